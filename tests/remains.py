"""What a run leaves on a disk: its checkpoints, its curves and its notes."""

import contextlib
import json
import os
import pathlib
from typing import Any

from jaxline.checkpoint import contents
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.run_directory import notes
from jaxline.run_directory import store

# Ends of the names of what depends on the clock.
TIMES = ('_per_sec', '_wait_fraction')


def manifests(run_dir: os.PathLike[str]) -> manifests_lib.Manifests:
  return manifests_lib.Manifests(store.at(run_dir).below('checkpoints'))


def steps(run_dir: os.PathLike[str], series: str = 'latest') -> list[int]:
  return manifests(run_dir).steps(series)


def data_of(
  run_dir: os.PathLike[str], step: int, series: str = 'latest'
) -> pathlib.Path:
  """Returns the directory with the arrays of a checkpoint."""
  return pathlib.Path(
    manifests(run_dir).store.url, 'data', record(run_dir, step, series)['data']
  )


def record(
  run_dir: os.PathLike[str], step: int, series: str = 'latest'
) -> dict[str, Any]:
  """Returns a manifest."""
  return manifests(run_dir).read(series, step)


def newest(run_dir: os.PathLike[str], series: str = 'latest') -> int | None:
  """Returns the newest step, or None; all checkpoints are whole.

  An evaluation that lives may remove its last best one meanwhile.
  """
  there = steps(run_dir, series)
  for step in there:
    with contextlib.suppress(store.GoneError):
      found = contents.Checkpoint(manifests(run_dir), series, step)
      assert found.arrays()
  return max(there, default=None)


def bits(
  run_dir: os.PathLike[str], step: int, series: str = 'latest'
) -> dict[str, Any]:
  """Returns what a checkpoint holds: checksums of arrays, and the rest."""
  found = record(run_dir, step, series)
  keys = ('step', 'arrays', 'entries', 'module', 'processes')
  return {key: found[key] for key in keys}


def evaluated(run_dir: os.PathLike[str], mode: str = 'eval') -> list[Any]:
  """Returns step, metric, value and data of each noted evaluation."""
  raw = store.at(run_dir).read(f'checkpoints/evaluated/{mode}.json')
  if not raw:
    return []
  note = notes.unpack(mode, raw, notes.EVALUATED)
  return [x[:4] for x in note['evaluated']]


def curve(run_dir: os.PathLike[str], mode: str) -> list[dict[str, Any]]:
  """Returns the scalars of each line of metrics.jsonl, in its order."""
  path = pathlib.Path(run_dir, mode, 'metrics.jsonl')
  return [
    {
      name: value
      for name, value in record.items()
      if name != 'time' and not name.endswith(TIMES)
    }
    for record in map(json.loads, path.read_text().splitlines())
    if record['kind'] == 'scalars'
  ]


def tensorboard(
  run_dir: os.PathLike[str], mode: str, hides_voided: bool
) -> dict[str, list[tuple[int, float]]]:
  """Returns tag -> [(step, value)], as TensorBoard reads it."""
  from tensorboard.backend.event_processing import event_accumulator

  events = event_accumulator.EventAccumulator(
    str(pathlib.Path(run_dir, mode)),
    size_guidance={'scalars': 0},
    purge_orphaned_data=hides_voided,
  ).Reload()
  return {
    tag: [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()['scalars']
    if not tag.endswith(TIMES)
  }


def copy(url: str, to: os.PathLike[str]) -> None:
  """Downloads a run that is in a bucket."""
  place = store.at(url)
  assert isinstance(place, store.Bucket)
  for raw in place._kv.list().result():
    key = raw.decode()
    store.at(to).write(key, place.read(key))


def left_by(run_dir: os.PathLike[str]) -> dict[str, Any]:
  """Returns all that must not depend on what happened to a run that ended.

  Nothing lies there that no manifest names.
  """
  left: dict[str, Any] = {}
  named = set()
  for series in ('latest', 'best'):
    left[f'{series} step'] = step = newest(run_dir, series)
    left[series] = bits(run_dir, step, series)
    there = steps(run_dir, series)
    named |= {record(run_dir, s, series)['data'] for s in there}
  for mode in ('train', 'eval'):
    left[f'{mode} curve'] = curve(run_dir, mode)
    # All that is in the files; and what is shown where it heeds the marks.
    left[f'{mode} events'] = tensorboard(run_dir, mode, False)
    left[f'{mode} shown'] = tensorboard(run_dir, mode, True)
  left['evaluated'] = [[*x[:3], bool(x[3])] for x in evaluated(run_dir)]
  place = store.at(run_dir).below('checkpoints')
  assert set(place.names('data')) == named
  assert place.names('readers') == []
  return left
