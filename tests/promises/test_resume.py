"""Promise: a run that is killed at any moment goes on as if nothing had been.

`assert_same_after_kill` records a run in this process: at operations that
change something, it copies all files as a kill leaves them: before the
operation, half-way, and on a disk also without what a power loss takes, which
is all that was not synced. Each copy that has other files than those before is
resumed, and must end as the run that nothing happened to: in the last and the
best checkpoint bit by bit, in curves, events and notes point by point.

Below are real kills and signals of real processes. The many of the third tier:
pytest tests/promises/test_resume.py -m slow -n 0
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import pathlib
import re
import signal
import threading
import time
from typing import Any

import jax
from ml_collections import config_dict
import numpy as np
import pytest

from jaxline import platform
from jaxline import sharded
from jaxline.compat import dictionary
from jaxline.metrics import files as files_lib
from jaxline.parallel import partitioning
from jaxline.run_directory import owner
from jaxline.run_directory import store
from jaxline.supervision import nonfinite
from jaxline.supervision import preemption
from tests import remains
from tests import survivors
from tests.programs import multi
from tests.programs import survivor

Files = dict[str, bytes]  # Path below the run's directory -> content.


# Recording.


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
def recorded(url: str, at: Callable[[int, str], Any]) -> Iterator[Shots]:
  """Collects what kills at the wanted operations would leave of a run."""
  shots: Shots = {}
  lock, is_disk, count = threading.RLock(), '://' not in url, 0

  def before(name: str, half: Callable[[Files], Files], synced: Synced) -> None:
    nonlocal count
    count += 1
    if not at(count, name):
      return
    shots[f'{count} {name}'] = files = remains.files(url)
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


def is_small(key: str) -> bool:
  """Returns whether it is a file that is replaced whole, as a manifest."""
  return key.endswith('.json') and '/data/' not in key


def run(experiment_class: Any, config: Any, mode: str) -> None:
  """Runs from where the files are to the end, as another process does."""
  dictionary.forget_published()
  with pytest.MonkeyPatch.context() as patch:
    # The local files of logs in a bucket: they are gone with the machine.
    patch.setattr('jaxline.run_directory.logs._directories', {})
    if mode != 'train_eval_multithreaded':
      # Takes an object for that of a killed process at once.
      patch.setattr(owner, 'STALE_SECS', 0.0)
    platform.start(experiment_class, config, mode)


def assert_same_after_kill(
  experiment: Any,
  config: config_dict.ConfigDict,
  at: Callable[[int, str], Any],
  mode: str = 'train_and_eval',
) -> dict[str, Any]:
  """Asserts that a run that is killed and resumed ends as if it had not been.

  Args:
    experiment: the class, or what constructs it.
    config: the run's. Its `checkpoint_dir` is on a disk or in a bucket, and may
      have what `mode` goes on from.
    at: (number of an operation, its name) -> whether to kill there.
    mode: the mode that is killed.

  Returns:
    What the run leaves, see `remains.left_by`.
  """
  url = config.checkpoint_dir
  with recorded(url, at) as shots:
    run(experiment, config, mode)
  whole, wrong, seen = remains.left_by(url), {}, set()
  for name, files in shots.items():
    synced = shots[name.removesuffix(', power loss')].keys() - files.keys()
    # Else the run would begin anew, and end in the same way.
    if lost := [f for f in synced if is_small(f)]:
      wrong[name] = lost
    # A sync, for example, changes no file: all that counts is what is there.
    if (content := hash(frozenset(files.items()))) in seen:
      continue
    seen.add(content)
    # What a killed evaluation has marked would stay for a minute.
    marks = {key for key in files if key.startswith('checkpoints/readers/')}
    remains.put(url, {key: files[key] for key in files.keys() - marks})
    try:
      run(experiment, config, mode)
      got = remains.left_by(url)
      different = [key for key in got if got[key] != whole[key]]
    except Exception as e:
      different = [repr(e)]
    if different:
      wrong[name] = different
  assert wrong == {}
  assert seen
  return whole


# Experiments, whose programs are traced once: that takes longer than a run.


def made_once(name: str) -> property:
  """Returns a property of an experiment that all runs here share."""
  make, made = getattr(sharded.ShardedExperiment, name).func, []

  def get(experiment: Any) -> Any:
    if not made:
      made.append(make(experiment))
      if name == 'layout':
        made[0].make = initializer(made[0])
    return made[0]

  return property(get)


def initializer(layout: Any) -> Callable[[], Any]:
  """Does as `Layout.make`, which compiles anew at each call."""
  make = jax.jit(
    lambda rng: partitioning.unbox(layout.init(rng)),
    out_shardings=layout.shardings,
  )
  return lambda: make(layout.rng)


class Survivor(survivor.Survivor):
  """The sharded style."""

  layout = made_once('layout')
  compiled_train_step = made_once('compiled_train_step')
  compiled_eval_step = made_once('compiled_eval_step')


class OwnSnapshot:
  """Has no base class, and makes its snapshots itself."""

  def __init__(self, mode, init_rng):
    self.total = 1

  def step(self, *, global_step, rng, writer):
    self.total = self.total * 3 + 1
    return {'loss': 1 / self.total}

  def evaluate(self, *, global_step, rng, writer):
    return {'loss': abs(40 - self.total)}

  def snapshot_state(self):
    return {'total': self.total}

  def restore_from_snapshot(self, snapshot_state):
    self.total = snapshot_state['total']


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


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
  """What `Survivor` leaves on a disk if nothing happens to it."""
  config = config_of(str(tmp_path_factory.mktemp('whole') / 'run'))
  run(Survivor, config, 'train_and_eval')
  return remains.left_by(config.checkpoint_dir)


def at_every(number: int) -> Callable[[int, str], bool]:
  return lambda k, name: k % number == 5


def of_each_kind() -> Callable[[int, str], bool]:
  """Returns what is true twice for each kind of file and of operation."""
  counts = collections.Counter[str]()

  def at(k: int, name: str) -> bool:
    # One part is like another, and so are steps and random names.
    kind = re.sub(r'data/.*|[0-9a-f]*\d[0-9a-f.-]*', '#', name)
    counts[kind] += 1
    return counts[kind] in (1, 3)

  return at


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ('url', 'at'),
  [
    ('disk', at_every(41)),
    ('gs', at_every(97)),
    pytest.param('s3', at_every(149), marks=pytest.mark.process),
    pytest.param('disk', of_each_kind(), marks=pytest.mark.process),
    pytest.param('disk', lambda k, name: True, marks=pytest.mark.slow),
  ],
  indirect=['url'],
)
def test_killed_at_any_change(url: str, at: Any, whole: Any) -> None:
  assert assert_same_after_kill(Survivor, config_of(url), at) == whole


def test_killed_again_behind_a_checkpoint_without_a_manifest(tmp_path, whole):
  config = config_of(url := str(tmp_path / 'run'))
  at_manifest = lambda k, name: name == 'write checkpoints/latest/6.json'
  with recorded(url, at_manifest) as shots:
    run(Survivor, config, 'train_and_eval')
  remains.put(url, next(iter(shots.values())))
  assert assert_same_after_kill(Survivor, config, at_every(41)) == whole


@pytest.mark.parametrize('mode', ['train_and_eval', 'train_eval_multithreaded'])
@pytest.mark.parametrize('kind', [Survivor, multi.PerDevice, OwnSnapshot])
def test_every_style_in_every_mode(kind, mode, tmp_path):
  config = config_of(str(tmp_path / 'run'))
  config.eval_initial_weights = False
  config.max_checkpoints_to_keep = 9
  assert_same_after_kill(kind, config, lambda k, name: k % 89 == 41, mode)


def test_an_evaluation_of_its_own(tmp_path):
  config = config_of(str(tmp_path / 'run'))
  config.max_checkpoints_to_keep = 9
  run(Survivor, config, 'train')
  assert_same_after_kill(Survivor, config, lambda k, name: k % 9 == 5, 'eval')


@pytest.mark.parametrize('url', ['gs'], indirect=True)
def test_an_evaluation_that_is_asked_for_once_keeps_the_log(url):
  config = config_of(url)
  run(OwnSnapshot, config, 'train_and_eval')
  log = functools.partial(store.at(url).read, 'eval/metrics.jsonl')
  before, config.eval_steps = log(), '8'
  run(OwnSnapshot, config, 'eval')
  assert log().startswith(before)
  assert len(log()) > len(before)


def test_what_ends_in_an_error_goes_on(tmp_path, whole, monkeypatch):
  config = config_of(str(tmp_path / 'run'))
  for faults, error, newest in (
    ({'input_at': 3}, RuntimeError, 2),
    ({'evaluate_at': 4}, RuntimeError, 6),
    ({'nan_at': 6}, nonfinite.NonfiniteError, 6),
  ):
    monkeypatch.setattr(survivor, 'FAULTS', faults)
    with pytest.raises(error):
      run(Survivor, config, 'train_and_eval')
    assert remains.newest(config.checkpoint_dir) == newest
  monkeypatch.setattr(survivor, 'FAULTS', {})
  # The clock is put back two hours, and one more while the run goes on.
  now, step, taken = time.time, survivor.Survivor.step, []

  def counted(experiment, **kwargs):
    taken.append(kwargs['global_step'])
    return step(experiment, **kwargs)

  monkeypatch.setattr(survivor.Survivor, 'step', counted)
  monkeypatch.setattr(time, 'time', lambda: now() - 3600 * (2 + bool(taken)))
  run(Survivor, config, 'train_and_eval')
  assert taken
  assert remains.left_by(config.checkpoint_dir) == whole


# Real kills and signals.


def wait_until(run, what, rng):
  """Waits for something to begin, and up to a while beyond."""
  # Late instants are rarer, that the run is interrupted often before its end.
  count = int(rng.integers(1, 4, 2).min())
  happened, seconds = {
    'start-up': (lambda: True, 2.0),
    'restore': (lambda: run.wait_for('checkpoint restore'), 0.1),
    'logs': (lambda: run.wait_for('resuming the logs'), 0.02),
    'training': (lambda: run.wait_for('step', 2 * count), 0.05),
    'evaluation': (lambda: run.wait_for('evaluation'), 0.05),
    'save': (lambda: run.wait_for_save('data', count), 0.15),
    'saved': (lambda: run.wait_for_save('latest', count), 0.02),
    'best': (lambda: run.wait_for_save('best'), 0.15),
    'end': (lambda: run.wait_for('final checkpoint'), 0.3),
  }[what]
  if not happened():
    return False
  time.sleep(rng.uniform(0, seconds))
  return True


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  'seed',
  [
    pytest.param(seed, marks=pytest.mark.slow if seed else pytest.mark.process)
    for seed in range(26)
  ],
)
def test_interrupted_at_any_instant(tmp_path, undisturbed, start, seed):
  """By SIGKILL or SIGTERM, many times, until it ends by itself."""
  rng, count, before, code = np.random.default_rng(seed), 0, None, None
  plan = ['save', 'restore', 'start-up', 'training', 'saved', 'logs']
  plan += ['best', 'restore', 'evaluation', 'save', 'start-up']
  plan = rng.permutation(plan) if seed else ['save', 'restore']
  for what in [*plan, 'end', None]:
    if what == 'restore' and before is None:
      what = 'save'
    signals = signal.SIGKILL, signal.SIGTERM
    signum = int(rng.choice(signals)) if seed else signals[count % 2]
    # Else it may get to its end before it was interrupted often.
    run = start(tmp_path, faults={'step_secs': 0.04})
    if what is not None and wait_until(run, what, rng):
      run.send(signum)
      count += 1
    code = run.end()
    survivors.check_resumed(run, before)
    # Nothing that was saved is lost.
    after = remains.newest(tmp_path)
    assert (after or 0) >= (before or 0), (what, before, after)
    remains.newest(tmp_path, 'best')
    if code == 75:
      # Not a step is lost: the newest is of the last one that was taken.
      taken = run.events('step')
      last = taken[-1]['step'] if taken else before
      assert after == last, (what, run.log[-8000:])
      assert not taken or remains.curve(tmp_path, 'train')[-1]['step'] == after
    before = after
    if code == 0:
      break
    assert code in (-signum, 75), (what, run.log[-8000:])
  assert code == 0
  assert count >= (8 if seed else 3)
  assert remains.left_by(tmp_path) == undisturbed


@pytest.mark.process
def test_evaluation_of_a_run_that_is_killed(tmp_path, undisturbed, start):
  """Both are killed, in a step and in an evaluation or a wait."""
  started = []
  for is_killed in (True, False):
    # The evaluation begins where there is nothing yet.
    runs = {
      mode: start(tmp_path, survivors.KEEP_ALL, mode=mode, faults=faults)
      for mode, faults in (('eval', {}), ('train', {'step_secs': 0.03}))
    }
    if is_killed:
      assert runs['eval'].wait_for('evaluation', 3, what='start')
      for run in runs.values():
        run.kill()
      remains.newest(tmp_path, 'best')
    else:
      assert [run.end(0) for run in runs.values()] == [0, 0]
    started += runs['eval'].events('evaluation', what='start')
  last, every = survivors.STEPS, survivors.SAVE_EVERY
  steps = list(range(every, last + 1, every))
  # Again is evaluated only what the kill has interrupted.
  assert {event['step'] for event in started} == {*steps}
  assert len(started) <= len(steps) + 1, started
  assert remains.steps(tmp_path) == steps
  assert remains.bits(tmp_path, last) == undisturbed['latest']
  assert remains.curve(tmp_path, 'train') == undisturbed['train curve']
  evaluated = remains.curve(tmp_path, 'eval')
  assert [r['step'] for r in evaluated] == steps  # Each once.
  shown = remains.tensorboard(tmp_path, 'eval', False)['loss']
  assert [step for step, _ in shown] == steps
  losses = {r['step']: r['loss'] for r in evaluated}
  assert remains.newest(tmp_path, 'best') == min(losses, key=losses.get)
  # Those that both modes evaluate.
  both = [r for r in undisturbed['eval curve'] if r['step'] in steps]
  assert [r for r in evaluated if r in both] == both
  # The same in one go, afterwards.
  all_steps = '--config.eval_steps=all'
  survivors.finished(tmp_path, all_steps, survivors.KEEP_ALL, mode='eval_again')
  assert evaluated == remains.curve(tmp_path, 'eval_again')


def test_training_and_evaluation_in_two_threads(tmp_path, whole, monkeypatch):
  """A signal ends both, and they go on as if there had been none."""
  mode, step, left = 'train_eval_multithreaded', Survivor.step, []

  def signalled(experiment, *, global_step, **kwargs):
    if global_step == 3:
      signal.raise_signal(signal.SIGTERM)
    return step(experiment, global_step=global_step, **kwargs)

  for is_signalled in (False, True):
    config = config_of(str(tmp_path / f'{is_signalled}'))
    config.eval_initial_weights = False
    config.max_checkpoints_to_keep = 9
    if is_signalled:
      with monkeypatch.context() as patch, preemption.Watch():
        patch.setattr(Survivor, 'step', signalled)
        with pytest.raises(preemption.Preempted) as ended:
          run(Survivor, config, mode)
      assert ended.value.code == preemption.EXIT_CODE
      assert remains.newest(config.checkpoint_dir) == 4
    run(Survivor, config, mode)
    left.append(remains.left_by(config.checkpoint_dir))
  assert left[0] == left[1]
  # Those that both modes evaluate.
  both = [r for r in whole['eval curve'] if r['step'] in (6, 8)]
  assert [r for r in left[0]['eval curve'] if r in both] == both
