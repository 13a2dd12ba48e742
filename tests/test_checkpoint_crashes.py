"""A run that is killed at any of its changes goes on as if nothing had been.

A run is recorded: at each operation that changes something, all its files are
copied as a kill leaves them: before the operation, half-way, and on a disk also
without what a power loss takes, which is all that was not synced. Each copy is
resumed by a run of its own and compared whole with an undisturbed run.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import pathlib
import shutil
import tempfile
import threading
from typing import Any

from ml_collections import config_dict
import pytest

import jaxline
from jaxline import platform
from jaxline import sharded
from jaxline.metrics import files as files_lib
from jaxline.run_directory import logs
from jaxline.run_directory import owner
from jaxline.run_directory import store
from tests import remains
from tests.programs import survivor

Files = dict[str, bytes]  # Path below the run's directory -> content.


def keys_of(bucket: store.Bucket) -> list[str]:
  return [key.decode() for key in bucket._kv.list().result()]


def dump(url: str) -> Files:
  """Returns the files of a run."""
  place = store.at(url)
  if isinstance(place, store.Bucket):
    return {key: place.read(key) or b'' for key in keys_of(place)}
  paths = [p for p in pathlib.Path(url).rglob('*') if p.is_file()]
  return {str(p.relative_to(url)): p.read_bytes() for p in paths}


def load(url: str, files: Files) -> None:
  """Makes these the files of a run, and no others."""
  place = store.at(url)
  if isinstance(place, store.Bucket):
    for key in keys_of(place):
      place.delete(key)
    for key, content in files.items():
      place.write(key, content)
    return
  shutil.rmtree(url, ignore_errors=True)
  for key, content in files.items():
    path = pathlib.Path(url, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def config_of(url: str) -> config_dict.ConfigDict:
  config = survivor.get_config()
  config.checkpoint_dir = url
  config.training_steps = 8
  config.save_checkpoint_interval = 2
  # At a step without a checkpoint, one with, and the last, which is the best.
  config.eval_interval = 3
  config.eval_initial_weights = True
  config.max_checkpoints_to_keep = 1
  config.console = 'off'
  return config


def made_once(name: str) -> property:
  """Returns a property of an experiment that all runs here share."""
  make, made = getattr(sharded.ShardedExperiment, name).func, []

  def get(experiment: Any) -> Any:
    if not made:
      made.append(make(experiment))
    return made[0]

  return property(get)


class Survivor(survivor.Survivor):
  """It traces its programs once, which takes longer than a run."""

  layout = made_once('layout')
  compiled_train_step = made_once('compiled_train_step')
  compiled_eval_step = made_once('compiled_eval_step')


def train(url: str) -> None:
  """Runs from where the files are to the end, as on another machine."""
  logs._directories.clear()
  jaxline.fit(Survivor, config_of(url))


class Synced:
  """What the disk keeps in a power loss: names and lengths that were synced."""

  def __init__(self, patch: pytest.MonkeyPatch, url: str):
    self._names: dict[str, set[str]] = {}
    self._lengths: dict[int, int] = {}
    for place, folders, files in os.walk(url):  # What was there before.
      self._names[place] = {*folders, *files}
      self._names.setdefault(os.path.dirname(place), {os.path.basename(place)})
      for about in (os.stat(os.path.join(place, f)) for f in files):
        self._lengths[about.st_ino] = about.st_size
    patch.setattr(os, 'fsync', functools.partial(self._fsync, os.fsync))

  def _fsync(self, fsync: Callable[[int], None], fd: int) -> None:
    fsync(fd)
    path, about = os.readlink(f'/proc/self/fd/{fd}'), os.fstat(fd)
    if os.path.isdir(path):
      self._names[path] = {*os.listdir(path)}
    else:
      self._lengths[about.st_ino] = about.st_size

  def of(self, url: str, files: Files) -> Files:
    kept = {}
    for key, content in files.items():
      path = pathlib.Path(url, key)
      places = [path, *path.parents][: key.count('/') + 2]
      if all(p.name in self._names.get(str(p.parent), ()) for p in places):
        kept[key] = content[: self._lengths.get(path.stat().st_ino, 0)]
    return kept


def is_small(key: str) -> bool:
  """Returns whether it is a file that is replaced whole, as a manifest."""
  return key.endswith('.json') and '/data/' not in key


# What an operation leaves half-way: (files, place, its arguments) -> files.


def half_part(files: Files, at: str, key: str, value: Any) -> Files:
  return files | {f'{at}{key}': bytes(value[: len(value) // 2])}


def half_write(files: Files, at: str, key: str, value: Any, *_: Any) -> Files:
  folder, _, name = f'{at}{key}'.rpartition('/')
  return half_part(files, '', f'{folder}/.{name}.1.partial'.strip('/'), value)


def half_folder(files: Files, at: str, folder: str) -> Files:
  gone = [f for f in files if f.startswith(f'{at}{folder}/')][::2]
  return {f: x for f, x in files.items() if f not in gone}


def half_append(files: Files, at: str, data: bytes) -> Files:
  return files | {at: files.get(at, b'') + data[: len(data) // 2]}


def nothing(files: Files, *unused: Any) -> Files:
  return files


Shots = dict[str, Files]


@contextlib.contextmanager
def recorded(url: str, wants: Callable[[int, str], Any]) -> Iterator[Shots]:
  """Collects what kills at the wanted operations would leave of a run."""
  shots: Shots = {}
  lock, is_disk, count = threading.RLock(), '://' not in url, 0

  def before(name: str, half: Callable[[Files], Files], synced: Synced) -> None:
    nonlocal count
    count += 1
    if not wants(count, name):
      return
    shots[f'{count} {name}'] = files = dump(url)
    if (left := half(files)) != files:
      shots[f'{count} {name}, half'] = left
    if is_disk:
      shots[f'{count} {name}, power loss'] = synced.of(url, files)

  with pytest.MonkeyPatch.context() as patch:
    synced = Synced(patch, url)

    def wrap(owner: Any, method: str, half: Callable[..., Files]) -> None:
      inner = getattr(owner, method)

      def outer(*args: Any) -> Any:
        on = args[0]  # A store, a writer or a path.
        at = getattr(on, 'url', None) or getattr(on, 'path', on)
        at = f'{at}/'.removeprefix(f'{url}/')
        if not hasattr(on, 'url'):
          at = at.rstrip('/')
        key = args[1] if hasattr(on, 'url') and len(args) > 1 else ''
        with lock:
          half_way = lambda files: half(files, at, *args[1:])
          before(f'{method} {at}{key}', half_way, synced)
          return inner(*args)

      patch.setattr(owner, method, outer)

    kind: Any = store.Disk if is_disk else store.Bucket
    wrap(kind, 'write_part', half_part if is_disk else nothing)
    wrap(kind, 'write', half_write if is_disk else nothing)
    wrap(kind, 'delete_folder', half_folder)
    wrap(kind, 'delete', nothing)
    wrap(kind, 'sync', nothing)
    wrap(files_lib.FileBackend, '_append', half_append if is_disk else nothing)
    wrap(files_lib.FileBackend, 'flush', nothing)
    wrap(files_lib.FileBackend, 'resume', nothing)
    yield shots


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
  run_dir = tmp_path_factory.mktemp('undisturbed')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr('jaxline.utils.GLOBAL_CHECKPOINT_DICT', {})
    train(str(run_dir))
  return remains.left_by(run_dir)


def check(url: str, wants: Any, undisturbed: Any, copy: pathlib.Path) -> None:
  """Records a run, and one that goes on after a kill; resumes all copies."""

  def left() -> dict[str, Any]:
    load(str(copy), dump(url))
    return remains.left_by(copy)

  wrong: dict[str, Any] = {}
  begin: Files = {}
  seen: set[int] = set()
  for what in ('begun', 'resumed'):
    load(url, begin)
    with recorded(url, wants) as shots:
      train(url)
    assert left() == undisturbed
    for name, files in shots.items():
      whole = shots[name.removesuffix(', power loss')].keys() - files.keys()
      # Else the run would begin anew, and end in the same way.
      if lost := [f for f in whole if is_small(f)]:
        wrong[f'{what}: {name}'] = lost
      # A sync, for example, changes no file: all that counts is what is there.
      if (content := hash(frozenset(files.items()))) in seen:
        continue
      seen.add(content)
      load(url, files)
      try:
        train(url)
        got = left()
        different = [key for key in got if got[key] != undisturbed[key]]
      except Exception as e:
        different = [repr(e)]
      if different:
        wrong[f'{what}: {name}'] = different
    # Killed when all of step 6 was written, but not its manifest.
    load(url, {})
    is_manifest = lambda k, name: name == 'write checkpoints/latest/6.json'
    with recorded(url, is_manifest) as shots:
      train(url)
    begin = next(iter(shots.values()))
  assert wrong == {}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
  """Takes an object for that of a killed process at once."""
  monkeypatch.setattr(owner, 'STALE_SECS', 0.0)


def test_killed_at_some_changes(
  url: str, undisturbed: Any, tmp_path: pathlib.Path
) -> None:
  every = {'s3': 211, 'gs': 97}.get(url[:2], 37)
  check(url, lambda k, name: k % every == 5, undisturbed, tmp_path / 'copy')


@pytest.mark.process
@pytest.mark.timeout(1200)
@pytest.mark.parametrize('url', ['disk', 'gs'], indirect=True)
def test_killed_at_any_change(
  url: str, undisturbed: Any, tmp_path: pathlib.Path
) -> None:
  def wants(k: int, name: str) -> bool:
    if '://' in url:
      return k % 7 == 0
    return k % 5 == 0 or 'write_part' not in name  # One part is like another.

  check(url, wants, undisturbed, tmp_path / 'copy')


@pytest.mark.parametrize('url', ['gs'], indirect=True)
@pytest.mark.parametrize('fails', [False, True])
def test_a_start_keeps_the_logs_that_are_there(
  fails: bool, url: str, monkeypatch: pytest.MonkeyPatch
):
  """Of an evaluation that was asked for once, and of one that is not begun."""
  train(url)
  log = functools.partial(store.at(url).read, 'eval/metrics.jsonl')
  before, config = log(), config_of(url)
  logs._directories.clear()
  config.eval_steps = '8'
  if fails:
    fail = lambda *unused, **more: 1 // 0
    monkeypatch.setattr(Survivor, '__init__', fail)
  error = pytest.raises(ZeroDivisionError) if fails else None
  with error or contextlib.nullcontext():
    platform.start(Survivor, config, 'eval')
  assert log().startswith(before)
  assert (len(log()) > len(before)) != fails
  assert not [*pathlib.Path(tempfile.gettempdir()).glob('jaxline_logs_*')]
