"""What a run leaves on a disk: its checkpoints, its curves and its notes."""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

from jaxline.base import buckets
from jaxline.base import disk
from jaxline.checkpoint import contents
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.metrics import fingerprints
from jaxline.run_directory import notes
from jaxline.run_directory import store

# Ends of the names of what depends on the clock.
TIMES = ('_per_sec', '_wait_fraction')


def manifests(run_dir: os.PathLike[str]) -> manifests_lib.Manifests:
  return manifests_lib.Manifests(store.at(run_dir).below('checkpoints'))


def steps(run_dir: os.PathLike[str], series: str = 'latest') -> list[int]:
  return manifests(run_dir).steps(series)


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
  records = map(json.loads, path.read_text().splitlines())
  is_kept = lambda name: name != 'time' and not name.endswith(TIMES)
  return [
    {name: value for name, value in record.items() if is_kept(name)}
    for record in records
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


def _keys(bucket: store.Bucket) -> list[str]:
  listed = buckets.connect(f'{bucket.url}/', bucket.threads).list().result()
  return [key.decode() for key in listed]


def files(url: os.PathLike[str] | str) -> dict[str, bytes]:
  """Returns the files of a run by their paths in it."""
  place = store.at(url)
  if isinstance(place, store.Bucket):
    return {key: place.read(key) or b'' for key in _keys(place)}
  paths = [p for p in pathlib.Path(url).rglob('*') if p.is_file()]
  return {str(p.relative_to(url)): p.read_bytes() for p in paths}


def put(url: os.PathLike[str] | str, files: dict[str, bytes]) -> None:
  """Makes these the files of a run, and no others."""
  place = store.at(url)
  if isinstance(place, store.Bucket):
    for key in _keys(place):
      place.delete(key)
    for key, content in files.items():
      place.write(key, content)
    return
  shutil.rmtree(url, ignore_errors=True)
  for key, content in files.items():
    path = pathlib.Path(url, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def left_by(run_dir: os.PathLike[str] | str) -> dict[str, Any]:
  """Returns all that must not depend on what happened to a run that ended.

  Nothing lies there that no manifest names.
  """
  if disk.is_address(run_dir):
    with tempfile.TemporaryDirectory() as folder:
      put(folder, files(run_dir))
      return left_by(folder)
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
  prints = pathlib.Path(run_dir, 'train', fingerprints.FILE)
  left['fingerprints'] = prints.read_bytes()
  left['evaluated'] = [[*x[:3], bool(x[3])] for x in evaluated(run_dir)]
  place = store.at(run_dir).below('checkpoints')
  assert set(place.names('data')) == named
  assert place.names('readers') == []
  return left
