"""Checkpoints on disk, by Orbax: whole or not there, checked, resumable.

`save` copies the state to host memory and returns; a background thread writes
it, hashes every file, and makes it visible in one rename. `restore` verifies
the hashes first (Orbax itself does not notice a flipped bit), takes the newest
checkpoint that is whole, and checks that it fits the experiment before
anything is changed. How files lie is told in `files`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent import futures
import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import shutil
import threading
import time
from typing import Any
import zlib

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import orbax.checkpoint as ocp

import jaxline
from jaxline import async_lib
from jaxline import base_config
from jaxline import disk
from jaxline import errors
from jaxline.checkpoint import base
from jaxline.checkpoint import files
from jaxline.checkpoint import memory
from jaxline.checkpoint import reader
from jaxline.checkpoint import storage
from jaxline.checkpoint import structure
from jaxline.supervision import preemption

_SLOW_SECS = 1.0  # A save that waits longer for the one before is reported.


class ConfigChangedError(errors.UsageError):
  """A checkpoint in the run's directory was made with another config."""


class DurableCheckpointer(base.FullCheckpointer):
  """Keeps checkpoints below `config.checkpoint_dir`.

  On several hosts all must see that directory, and all call `save` and
  `restore` at the same steps. With `reads_only` a checkpoint may vanish while
  it is read, and then the next is tried.
  """

  collective = True
  is_resumable = True

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Reads the config; touches no file.

    Args:
      config: the run's, resolved.
      mode: the run's mode, or its half's: 'train', 'eval'. One that begins
        with 'eval' only reads the series `latest`.
    """
    if not config.checkpoint_dir:
      raise ValueError(
        f'config.checkpoint_dir is {config.checkpoint_dir!r}; durable'
        ' checkpoints need a directory. Give one, or set config.checkpointer ='
        " 'memory'."
      )
    self._config = config
    # Before the experiment is constructed, which may change its own config.
    self._recorded = base_config.recorded(config)
    self._experiment_class: Any = None
    self._mode = mode
    self._follows = mode.startswith('eval')
    self._root = files.root(config.checkpoint_dir)
    self._allow_pickle = bool(config.checkpoint_allow_pickle)
    self._active: dict[str, threading.local] = {}
    # One thread for all series: on several hosts the processes meet while
    # they write, and must do so in one order.
    self._writer = async_lib.SerialExecutor('checkpoint')
    self._last: dict[str, futures.Future[None]] = {}
    self._claims: dict[str, files.Claim] = {}
    self._owned: set[str] = set()
    self._pinned: tuple[int, pathlib.Path] | None = None
    self._passed_over: set[str] = set()
    self._pickles = False
    # What is evaluated as last read or written, for where the note is lost.
    self._evaluated: list[int] = []
    self._is_lost = False

  # The protocol.

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the calling thread's live state of the series."""
    # Programs written against JAXline look at the series there.
    memory.add_series(ckpt_series)
    active = self._active.setdefault(ckpt_series, threading.local())
    if not hasattr(active, 'state'):
      active.state = base.ExperimentState()
    return active.state

  def save(self, ckpt_series: str) -> None:
    """Copies the live state to host memory, and has it written.

    Waits for the series' save before, if that is not written yet: of each
    series there is one copy in host memory at most.

    Raises:
      TypeError: something in it can only be pickled.
      Exception: what an earlier save failed with.
    """
    self.claim(ckpt_series)
    if ckpt_series in self._last:
      began = time.monotonic()
      futures.wait([self._last[ckpt_series]])
      if (waited := time.monotonic() - began) > _SLOW_SECS:
        logging.warning(
          'Training waited %.1f s for the checkpoint before to be written. Save'
          ' less often (config.save_checkpoint_interval), or to a faster disk.',
          waited,
        )
    self.raise_error()
    state = self.get_experiment_state(ckpt_series)
    step = int(state['global_step'])
    target = self._root / ckpt_series / str(step)
    experiment = state.get('experiment_module')
    keep = base.num_to_keep(self._config, ckpt_series, experiment)
    saved = self._published(target, experiment)
    if self._follows and ckpt_series == 'best' and self._pinned is not None:
      pinned_step, pinned = self._pinned
      assert pinned_step == step, (pinned_step, step)
      make_visible: Callable[[], None] = self._promotion(state, pinned, target)
    else:
      content = self._collect(ckpt_series, state)
      # Asked here, since hosts may agree only on the thread of the steps.
      is_there = bool(_of_chief(target.exists()))
      make_visible = lambda: self._write(content, target, is_there)

    def write() -> None:
      make_visible()
      memory.publish(ckpt_series, saved)
      if jax.process_index() == 0:
        self._retire(target.parent, keep)

    self._last[ckpt_series] = self._writer.submit(write)

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether there is something to restore.

    Raises:
      files.DamagedError: all that there was has been set aside as damaged.
      files.ClaimedError: another process writes to the series.
    """
    if not self._follows:
      self.claim(ckpt_series)
    if self._has_any(ckpt_series):
      return True
    damaged = files.damaged(self._root, ckpt_series)
    # Without a best one, evaluation begins anew.
    is_lost = ckpt_series == 'latest' and not self._follows
    if is_lost and _of_chief(len(damaged)):
      raise files.DamagedError(
        f'No checkpoint of {ckpt_series!r} is left in {self._root}: all were'
        f' damaged, and set aside as {[str(p) for p in damaged]}. To train'
        ' from the beginning all the same, remove them or give another'
        ' config.checkpoint_dir.'
      )
    return self._seed(ckpt_series) is not None or (
      ckpt_series == 'latest' and self._forks
    )

  def restore_path(self, ckpt_series: str) -> str | None:
    """Returns the directory of the newest checkpoint, or None."""
    found = self._candidates(ckpt_series)
    return str(found[0]) if found else None

  @preemption.held()
  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    """Restores a checkpoint into the calling thread's live state.

    Only the entries of the live state are restored. Where this run has no
    checkpoint yet, it begins from the snapshot that the program has put into
    `utils.GLOBAL_CHECKPOINT_DICT`, or else from `config.restore_from`.

    Args:
      ckpt_series: the series.
      step: which checkpoint; None is the newest that is whole. One that is
        damaged is set aside (by evaluation: passed over), and reported.

    Raises:
      ValueError: there is none, or the run has another config.
      MismatchError: it does not fit the experiment.
      files.DamagedError: it is damaged, and there is none before it.
    """
    state = self.get_experiment_state(ckpt_series)
    experiment = state.get('experiment_module')
    if experiment is not None:
      self._experiment_class = type(experiment)
    self.can_be_restored(ckpt_series)  # Raises where all are damaged.
    seed = self._seed(ckpt_series) if step is None else None
    if not self._has_any(ckpt_series):
      if seed is not None:
        self._restore_seed(ckpt_series, seed, state)
        return
      if self._forks and ckpt_series == 'latest':
        self._fork(state)
        return
    read = None
    while read is None:
      found = self._newest_whole(ckpt_series, step, state)
      path = found.path
      with _reported(self._root / ckpt_series / path.name):
        try:
          read = reader.together(functools.partial(self._read, found, state))
        except files.DamagedError:
          # If it was removed while it was read, there may be another one.
          if _of_chief(path.exists()):
            raise
    _fill(state, *read)
    if ckpt_series == 'latest':
      self.restored_step = int(path.name)
    logging.info('Restored %s.', path)
    if seed is not None:
      logging.warning(
        'The snapshot that the program put into utils.GLOBAL_CHECKPOINT_DICT'
        ' is not used: %s holds checkpoints of %r.', self._root, ckpt_series,
      )  # fmt: skip
    if experiment is not None and not self._follows:
      memory.publish(ckpt_series, self._published(path, experiment))

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    """Returns a function that restores the next checkpoint to evaluate.

    Checkpoints are restored in the order of their steps.
    """
    return functools.partial(self._restore_next, ckpt_series)

  def _restore_next(self, ckpt_series: str, done: Collection[int]) -> bool:
    """Restores the first checkpoint whose step is not in `done`.

    Before the run's first checkpoint, that is the snapshot that it starts from.
    """
    while (step := self.next_step(ckpt_series, done)) is not None:
      try:
        self.restore(ckpt_series, step)
        return True
      except ValueError:
        # It may have been removed meanwhile, or found damaged and reported.
        if self.next_step(ckpt_series, done) == step:
          raise
    if self.seed_step() in {None, *done}:
      return False
    self.restore(ckpt_series)
    return int(self.get_experiment_state(ckpt_series).global_step) not in done

  def is_new(self) -> bool:
    """Returns whether the run has no checkpoint of its own yet."""
    return self.next_step('latest', ()) is None

  def wait_for_checkpointing_to_finish(self) -> None:
    """Returns when everything saved is on the disk.

    Raises:
      Exception: what a save failed with.
    """
    self._writer.wait()

  # Beyond it.

  def when_saved(self, fn: Callable[[], None]) -> None:
    """Calls a function, on the writing thread, once all so far is saved."""
    self._writer.submit(fn)

  def raise_error(self) -> None:
    """Raises what a save in the background failed with; costs nothing."""
    self._writer.raise_error()

  def close(self) -> None:
    """Waits for the saves, and gives back what was claimed."""
    with contextlib.suppress(Exception):  # Raised where training sees it.
      self._writer.wait()
    if self._pinned is not None and jax.process_index() == 0:
      files.remove(self._pinned[1])
    self._pinned = None
    for claim in self._claims.values():
      claim.release()
    self._claims.clear()

  def steps(self, ckpt_series: str) -> list[int]:
    """Returns the steps of a series' checkpoints, ascending."""
    return files.steps(self._root / ckpt_series)

  def next_step(self, ckpt_series: str, done: Collection[int]) -> int | None:
    """Returns the first step with a checkpoint and not in `done`, or None.

    All hosts get the first one's answer.
    """
    steps = [
      int(path.name)
      for path in reversed(self._candidates(ckpt_series))
      if int(path.name) not in done
    ]
    step = _of_chief(steps[0] if steps else -1)
    return step if step >= 0 else None

  def check_config(self, experiment_class: Any = None) -> None:
    """Compares the newest checkpoint's config with this run's.

    Args:
      experiment_class: what constructs the experiment. What it declares of its
        config counts (`CHANGEABLE_ON_RESUME`, `CONFIG_CLASS`); where it is
        neither a class nor a partial of one, only a restore compares.

    Raises:
      ConfigChangedError: a key that makes another run differs.
      UsageError: `restore_from` names no checkpoint.
    """
    if self._forks and not self._has_any('latest'):
      _foreign(self._config.restore_from)
    while isinstance(experiment_class, functools.partial):
      experiment_class = experiment_class.func
    if isinstance(experiment_class, type):
      self._experiment_class = experiment_class
    elif experiment_class is not None:
      return
    for path in self._candidates('latest')[:1]:
      # One that is damaged is found to be so by `restore`.
      with contextlib.suppress(files.DamagedError), _reported(path):
        found = files.Listing(path)
        if not found.verify(lambda file: file == files.RECORD):
          self._check_config(path, found.record)

  def check_shared(self) -> None:
    """Refuses a directory that not all processes share.

    Raises:
      UsageError: naming the processes that do not see the first one's files.
    """
    if jax.process_count() == 1:
      return
    if self.reads_only:
      step = _of_chief(max(self.steps('latest'), default=-1))
      there = step < 0 or (self._root / 'latest' / str(step)).exists()
      seen = multihost_utils.process_allgather(np.bool_(there))
    else:
      # A name that nobody has asked for yet: a network file system may go on
      # saying for a while that an old one is not there.
      token = _of_chief(int.from_bytes(os.urandom(3)))
      path = self._root / 'claims' / f'.shared-{token}'
      if jax.process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
      storage.barrier('shared')
      seen = multihost_utils.process_allgather(np.bool_(path.exists()))
      if jax.process_index() == 0:
        path.unlink(missing_ok=True)
    if not seen.all():
      raise errors.UsageError(
        f'config.checkpoint_dir is {self._config.checkpoint_dir!r} in process'
        f' {jax.process_index()}, but processes'
        f' {np.flatnonzero(~seen).tolist()} do not see there what process 0'
        ' writes. All processes save together: give all the same directory,'
        ' on a disk that all of them share.'
      )

  def warn_nonfinite(self, step: int, names: list[str], text: str) -> None:
    """Warns of a step that is not finite, and keeps a checkpoint from before.

    In the background: a save of a step before it may still be being written.
    """

    def warn() -> None:
      kept = self.keep_before(step, names)
      logging.warning(
        '%s %s',
        text,
        f'The newest checkpoint from before is not removed: {kept}.'
        if kept
        else 'There is no checkpoint from before.',
      )

    self.when_saved(warn)

  def keep_before(
    self, step: int, names: Collection[str]
  ) -> pathlib.Path | None:
    """Exempts the newest checkpoint of `latest` before a step from retention.

    Called once the saves before it are complete. Names that an earlier process
    gave exempt no other checkpoint, unless the run was set back to before their
    steps.

    Args:
      step: the first step in which these scalars were not finite.
      names: of the scalars.

    Returns:
      The checkpoint; None if there was none.
    """
    series = self._root / 'latest'
    noted = {
      name: kept
      for kept in files.kept(series)
      for name in _nonfinite(series / str(kept))
    }
    if new := [name for name in names if name not in noted]:
      # 0 if there is none: that is noted as well.
      kept = max((s for s in files.steps(series) if s < step), default=0)
      notes = [{'name': name, 'nonfinite_at': step} for name in new]
      files.keep(series / str(kept), notes)
    else:
      kept = min(noted[name] for name in names)
    checkpoint = series / str(kept)
    return checkpoint if checkpoint.exists() else None

  def mark_ended(self, step: int) -> None:
    """Notes that training has ended, for those who evaluate it."""
    if jax.process_index() == 0:
      self._root.mkdir(parents=True, exist_ok=True)
      files.write_json(self._root / 'ended.json', {'step': step})

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on from a step, with this config.

    What was evaluated of later steps, which are no more, will be anew.
    """
    if jax.process_index() != 0:
      return
    self._root.mkdir(parents=True, exist_ok=True)
    files.write_json(self._root.parent / 'config.json', self._recorded)
    (self._root / 'ended.json').unlink(missing_ok=True)
    for kept in files.kept(self._root / 'latest'):
      checkpoint = self._root / 'latest' / str(kept)
      if any(at > step for at in _nonfinite(checkpoint).values()):
        files.keep(checkpoint, [{'set_back_to': step}])
    with _noting:
      for path in (self._root / 'evaluated').glob('*.json'):
        with contextlib.suppress(files.DamagedError):  # Evaluation reports it.
          noted = _noted(path)
          if any(s > step for s in noted):
            _note(path, [s for s in noted if s <= step])
      path = self._root / 'evaluated' / 'eval.json'
      if not path.exists() and not self.steps('latest'):
        _note(path, [])  # A new run, whatever the logs of an earlier one say.

  def ended(self) -> int | None:
    """Returns the step at which training has ended, or None.

    All hosts get the first one's answer.
    """
    step = -1
    # Where it cannot be read it is asked again.
    with contextlib.suppress(files.DamagedError, OSError, KeyError, TypeError):
      step = int(files.read_json(self._root / 'ended.json')['step'])
    step = _of_chief(step)
    return step if step >= 0 else None

  def seed_step(self) -> int | None:
    """Returns the step of the snapshot that a new run starts from, or None.

    A run that has checkpoints is not new.
    """
    if self._has_any('latest'):
      return None
    seed = self._seed('latest')
    return None if seed is None else memory.step_of(seed)

  def evaluated(self, logged: Callable[[], list[int]] = list) -> list[int]:
    """Returns the steps that `mark_evaluated` noted in this mode.

    All hosts get the first one's answer.

    Args:
      logged: returns the steps in the log, which count where the note is
        missing or damaged; that is reported.
    """
    steps = []
    if jax.process_index() == 0:
      steps = self._read_evaluated(logged)
    if jax.process_count() == 1:
      return steps
    own = np.zeros([_of_chief(len(steps))], np.int32)
    own[: len(steps)] = steps[: len(own)]
    return multihost_utils.broadcast_one_to_all(own).tolist()

  def mark_evaluated(self, *steps: int) -> None:
    """Notes that steps are evaluated and their results are safe.

    Where the note is lost, what `evaluated` returned is noted as well.
    """
    if jax.process_index() != 0 or self.reads_only:
      return
    with _noting:
      noted = self._read_evaluated(lambda: self._evaluated)
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      self._evaluated = [*noted, *steps][-100_000:]
      _note(self._evaluated_path, self._evaluated)
      self._is_lost = False

  def _read_evaluated(self, logged: Callable[[], list[int]]) -> list[int]:
    path = self._evaluated_path
    try:
      self._evaluated = _noted(path)
    except files.DamagedError as e:
      self._evaluated = steps = logged()
      # In a new run there is neither a note nor a log.
      if not self._is_lost and (steps or path.exists()):
        self._is_lost = True
        logging.error(
          '%s is damaged: %s. Nothing is removed from the log, by which %d'
          ' steps are evaluated%s.',
          path,
          e,
          len(steps),
          f', the last of them {steps[-1]}' if steps else '',
        )
    return self._evaluated

  # Saving.

  @property
  def _evaluated_path(self) -> pathlib.Path:
    mode = self._mode if self._follows else 'eval'
    return self._root / 'evaluated' / f'{mode}.json'

  def _has_any(self, ckpt_series: str) -> bool:
    """Returns whether the first host sees a checkpoint."""
    return bool(_of_chief(len(self.steps(ckpt_series))))

  def claim(self, ckpt_series: str) -> None:
    """Takes the right to save a series, and cleans up after the dead.

    Done at the first use of a series that is saved; earlier by who would learn
    too late that another one has it.

    Raises:
      files.ClaimedError: another process has it.
    """
    if ckpt_series in self._owned:
      return
    if jax.process_index() == 0:
      try:
        claim = files.Claim(self._config.checkpoint_dir, ckpt_series)
      except files.ClaimedError as e:
        if ckpt_series == 'best':
          e.add_note(
            "One evaluation keeps 'best'; config.best_model_eval_metric = ''"
            ' lets another one run beside it.'
          )
        raise
      self._claims[ckpt_series] = claim
      files.clean(self._root / ckpt_series)
    storage.barrier('own')  # The others look at what is there now.
    self._owned.add(ckpt_series)

  def _collect(self, ckpt_series: str, state: Any) -> storage.Content:
    """Copies the live state to the host; describes it."""
    arrays: dict[str, Any] = {}
    pickled: list[str] = []
    entries, module, per_process = {}, {}, {}

    def add(value: Any, name: str) -> Any:
      encoded = structure.encode(value, name, allow_pickle=self._allow_pickle)
      if double := sorted(set(encoded.arrays) & set(arrays)):
        raise ValueError(
          f'Two arrays of the checkpoint have the name {double[0]!r}; rename'
          ' one of the entries.'
        )
      arrays.update(encoded.arrays)
      pickled.extend(encoded.pickled)
      return encoded.structure

    for key, value in state.items():
      if key != 'experiment_module':
        entries[key] = add(value, f'run/{key}')
    experiment = state.get('experiment_module')
    if experiment is not None:
      by_leaves = reader.template(experiment)
      all_hosts = (
        self._config.best_checkpoint_all_hosts
        if ckpt_series == 'best'
        else self._config.train_checkpoint_all_hosts
      )
      own = reader.per_process(experiment, all_hosts)
      for name, value in experiment.snapshot_state().items():
        if name in by_leaves:
          arrays.update(reader.prefixed(value, name))
          module[name] = {'leaves': True}
        elif name in own:
          encoded = structure.encode(
            value, name, allow_pickle=self._allow_pickle
          )
          pickled.extend(encoded.pickled)
          per_process[name] = {
            'structure': encoded.structure,
            'arrays': storage.to_json(encoded.arrays),
          }
        else:
          module[name] = {'structure': add(value, name)}
    if pickled and not self._pickles:
      self._pickles = True  # Once is enough.
      logging.warning(
        'Pickled into the checkpoint, as config.checkpoint_allow_pickle'
        ' permits: %s.',
        pickled,
      )
    stored, described = storage.store(arrays, storage.to_host(arrays))
    record = {
      'format': files.FORMAT,
      'series': ckpt_series,
      'step': int(state['global_step']),
      'time': time.time(),
      'processes': jax.process_count(),
      'devices': jax.device_count(),
      'versions': _versions(),
      'config': self._recorded,
      'entries': entries,
      'module': module,
      'arrays': described,
    }
    # Now: the flushes do not wait for what later steps log.
    logs = self.logs if ckpt_series == 'latest' else ()
    return storage.Content(
      arrays=stored,
      record=record,
      process=per_process,
      waits=[log.flush_async() for log in logs],
    )

  @storage.quiet_orbax()
  def _write(
    self, content: storage.Content, target: pathlib.Path, is_there: bool
  ) -> None:
    """Writes a checkpoint, on the background thread."""
    chief = jax.process_index() == 0
    final = target
    if chief:
      self._claims[target.parent.name].check()
      target.parent.mkdir(parents=True, exist_ok=True)
    if target.parent.name == 'best':
      content.record['time'] = self._after_all_best()
    if is_there:
      # The same step again: the old one stays until the new one is there.
      target = target.with_name(f'{target.name}{files.NEW}')
    storage.barrier('series')
    try:
      with storage.os_errors():
        ocp.Checkpointer(
          storage.Handler(),
          multiprocessing_options=storage.multiprocessing_options(),
          atomicity_options=ocp.options.AtomicityOptions(
            ocp.options.AtomicityMode.ATOMIC_RENAME
          ),
        ).save(target, args=content)
    except Exception as e:
      # On a full disk, the half of it is in the way.
      for partial in target.parent.glob(f'{target.name}.orbax-*-tmp*'):
        files.discard(partial)
      if isinstance(e, OSError):
        raise _failed_save(e, target, content.num_bytes) from (
          None if e.errno in disk.FULL else e
        )
      raise
    if chief:
      if target != final:
        files.replace(target, final)
      disk.sync_directory(final.parent)
      logging.info('Saved %s.', final)

  def _promotion(
    self, state: Any, pinned: pathlib.Path, target: pathlib.Path
  ) -> Callable[[], None]:
    """Returns what makes the evaluated checkpoint the best one, as it is."""
    values, arrays = {}, {}
    for key, value in state.items():
      if key not in ('global_step', 'train_step_rng', 'experiment_module'):
        encoded = structure.encode(
          value, f'run/{key}', allow_pickle=self._allow_pickle
        )
        values[key] = encoded.structure
        arrays.update(encoded.arrays)
    small = storage.to_json(arrays)

    def write() -> None:
      if jax.process_index() == 0:
        self._claims[target.parent.name].check()
        partial = target.with_name(f'{target.name}.partial')
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
          files.link(pinned, partial)
          files.write_json(
            partial / 'extra.json',
            {
              'time': self._after_all_best(),
              'entries': values,
              'arrays': small,
            },
          )
          files.add_checksum(partial, 'extra.json')
        except OSError as e:
          shutil.rmtree(partial, ignore_errors=True)
          # What it takes where the file system has no links.
          size = functools.partial(files.size, pinned)
          raise _failed_save(e, target, size) from e
        files.replace(partial, target)
        logging.info('Saved %s.', target)

    return write

  def _after_all_best(self) -> float:
    """Returns the time, later than any best one's also if the clock is not."""
    before = [_saved_at(path) + 1 for path in self._candidates('best')]
    return max([time.time(), *before])

  def _retire(self, series: pathlib.Path, num_to_keep: int) -> None:
    """Removes the checkpoints of a series that need not be kept."""
    config = self._config
    if series.name == 'best':
      # The best is the one that was saved last, of whichever step.
      for path in self._candidates('best')[num_to_keep:]:
        files.remove(path)
      return
    keep = files.Keep(
      num_to_keep,
      config.keep_checkpoint_every_steps,
      config.keep_checkpoint_every_hours,
    )
    times = [
      (step, _saved_at(series / str(step)) if keep.every_hours else 0.0)
      for step in files.steps(series)
    ]
    kept = files.kept(series)
    for step in keep.removable(times):
      if step not in kept:
        files.remove(series / str(step))

  def _published(self, path: pathlib.Path, experiment: Any) -> memory.Published:
    """Returns a checkpoint as programs written against JAXline look at it.

    Args:
      path: the checkpoint, which may not be there yet.
      experiment: what is saved; not kept, since it holds the live arrays.
    """
    template = {
      entry: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree
      )
      for entry, tree in reader.template(experiment).items()
    }
    attributes = dict(getattr(experiment, 'CHECKPOINT_ATTRS', {}))
    allow_pickle = self._allow_pickle

    def read() -> Any:
      # A client's signal handler may call it: it waits for no other process.
      entries = reader.read_whole(path, template, allow_pickle)
      return memory.nest_of(entries, attributes)

    return memory.Published(int(path.name), read)

  # Restoring.

  @property
  def _forks(self) -> bool:
    return bool(self._config.restore_from) and not self._follows

  def _seed(self, ckpt_series: str) -> memory.SnapshotNT | None:
    """Returns the snapshot that the program has put in.

    Each process has its own.

    Raises:
      ValueError: not all processes have one, or not of the same step.
    """
    seed = memory.seed(ckpt_series)
    if jax.process_count() > 1:
      step = -1 if seed is None else memory.step_of(seed)
      steps = multihost_utils.process_allgather(np.int32(step)).tolist()
      if len(set(steps)) > 1:
        raise ValueError(
          'The snapshots in utils.GLOBAL_CHECKPOINT_DICT are of the steps'
          f' {steps} in the processes (-1 is none); put one of the same step'
          ' into each process, or none.'
        )
    return seed

  def _restore_seed(
    self, ckpt_series: str, seed: memory.SnapshotNT, state: Any
  ) -> None:
    """Begins from a snapshot that the program has put in."""
    saved = memory.entries_of(seed, ckpt_series, state)
    restored = {
      key: _placed(key, saved[key], state[key])
      for key in state
      if key in saved and key != 'experiment_module'
    }
    has_experiment = 'experiment_module' in state
    _fill(
      state, restored, saved['experiment_module'] if has_experiment else None
    )
    logging.info(
      'Began the series %r from the snapshot that the program put into'
      ' utils.GLOBAL_CHECKPOINT_DICT.', ckpt_series,
    )  # fmt: skip
    if self._forks:
      logging.warning(
        'config.restore_from is %r, which is not used: the program put a'
        ' snapshot into utils.GLOBAL_CHECKPOINT_DICT.',
        self._config.restore_from,
      )

  def _candidates(
    self, ckpt_series: str, step: int | None = None
  ) -> list[pathlib.Path]:
    """Returns the checkpoints to try, newest first."""
    series = self._root / ckpt_series
    found = [series / str(s) for s in reversed(files.steps(series))]
    if ckpt_series == 'best':
      # Of several evaluations the later may have been of the earlier step.
      found.sort(key=_saved_at, reverse=True)
    if step is not None:
      return [path for path in found if path.name == str(step)]
    return [path for path in found if str(path) not in self._passed_over]

  def _newest_whole(
    self, ckpt_series: str, step: int | None, state: Any
  ) -> files.Listing:
    """Returns the newest checkpoint that is as it was written.

    Evaluation gets a second name of it, so that it stays while it is read.
    """
    reports: list[str] = []
    while True:
      found = self._candidates(ckpt_series, step)
      number = _of_chief(int(found[0].name) if found else -1)
      if number < 0:
        raise (files.DamagedError if reports else ValueError)(
          f'The series {ckpt_series!r} in {self._root} has no checkpoint'
          + (f' of step {step}' if step is not None else '')
          + (' that is whole' if reports else '')
          + f'; its steps are {self.steps(ckpt_series)}.'
          + ''.join(f' {report}.' for report in reports)
        )
      path = whole = self._root / ckpt_series / str(number)
      try:
        with _reported(path):
          files.refuse_link(path)
          if self._follows and ckpt_series == 'latest' and not self.reads_only:
            whole = self._pin(path)
          return reader.verify(whole, state.get('experiment_module'))
      except files.RefusedError:
        if _of_chief(os.path.lexists(path)):
          raise
        continue  # What was listed is gone.
      except files.DamagedError as e:
        report = str(e).removesuffix('.')
      if not _of_chief(path.exists()):
        continue  # Training removed it meanwhile: there is a newer one.
      if self._follows:
        self._passed_over.add(str(path))
        report += '. It is passed over'
      elif step is None and jax.process_index() == 0:
        report += f'. It was set aside as {files.set_aside(path)}'
      logging.error('%s.', report)
      reports.append(report)
      if step is not None:
        raise files.DamagedError(f'{report}.')
      storage.barrier('damaged')

  def _pin(self, path: pathlib.Path) -> pathlib.Path:
    """Gives a checkpoint a second name, which training does not remove."""
    folder = self._root / f'.evaluating-{self._mode}'
    pinned = folder / path.name
    if jax.process_index() == 0:
      files.clean(folder)
      for old in files.steps(folder):
        files.remove(folder / str(old))
      # Without it verification finds nothing, and the next one is taken.
      with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        files.retried(lambda: files.link(path, pinned), str(path))
    storage.barrier('pin')
    self._pinned = (int(path.name), pinned)
    return pinned

  def _read(
    self, listing: files.Listing, state: Any, is_foreign: bool = False
  ) -> tuple[dict[str, Any], Any]:
    """Returns the entries of a checkpoint, and the experiment's snapshot."""
    if not is_foreign:
      self._check_config(listing.path, listing.record)
    saved = reader.Reader(listing, self._allow_pickle)
    if is_foreign and self._config.restore_rules:
      rules = [(rule[0], rule[1]) for rule in self._config.restore_rules]
      return {}, saved.by_rules(state['experiment_module'], rules)
    entries = saved.entries([k for k in state if k != 'experiment_module'])
    entries = {k: _placed(k, x, state[k]) for k, x in entries.items()}
    if 'experiment_module' not in state:
      return entries, None
    return entries, saved.snapshot(state['experiment_module'])

  def _check_config(self, path: pathlib.Path, record: Any) -> None:
    """Refuses a checkpoint of another run, in the same directory."""
    changes = base_config.changes(
      record['config'], self._recorded, self._experiment_class
    )
    if not changes:
      return
    lines = map(files.printable, changes)
    text = '\n'.join(f'  config.{line}' for line in lines)
    if self._follows or self._config.on_config_change == 'continue':
      logging.log_first_n(
        logging.WARNING, '%s was made with another config:\n%s', 1, path, text
      )
      return
    raise ConfigChangedError(
      f'{path} was made with another config, and going on would mix two runs:\n'
      f'{text}\nGive this run another config.checkpoint_dir (with'
      ' config.restore_from to begin from here), or set'
      " config.on_config_change = 'continue' to go on with the new values."
    )

  def _fork(self, state: Any) -> None:
    """Begins from another run's checkpoint, as `restore_from` says."""
    path = _foreign(self._config.restore_from)
    with _reported(path):
      found = reader.verify(path, state['experiment_module'])
      read = reader.together(lambda: self._read(found, state, is_foreign=True))
    _fill(state, *read)
    logging.info('Began from %s.', path)


def _fill(state: Any, entries: Mapping[str, Any], snapshot: Any) -> None:
  """Restores the live state from what was read, or changes nothing."""
  if snapshot is not None:
    # The last that may refuse; then nothing else has changed yet.
    state['experiment_module'].restore_from_snapshot(snapshot)
  state.update(entries)


@contextlib.contextmanager
def _reported(path: pathlib.Path) -> Iterator[None]:
  """Says which checkpoint an error is about, and what to do."""
  try:
    yield
  except files.RefusedError as e:
    where = shlex.quote(str(path))
    raise files.RefusedError(
      f'{path} is refused: {e}. Nothing was restored or moved. To skip this'
      f' checkpoint: mv {where} {where}.bak'
    ) from e
  except files.DamagedError as e:
    raise files.DamagedError(f'{path} is damaged: {e}.') from e
  except files.UnreadableError as e:
    where = shlex.quote(str(path))
    raise files.UnreadableError(
      e.errno,
      f'{path} could not be read: {e.strerror}. This may pass, and nothing was'
      f' moved: start again. To skip this checkpoint: mv {where} {where}.bak',
    ) from e


def _nonfinite(kept: pathlib.Path) -> dict[str, int]:
  """Returns the scalars that a checkpoint is kept for, and their first steps.

  A checkpoint stays for ever. But what was not finite in steps that the run was
  set back from is no more, and may come again.
  """
  first: dict[str, int] = {}
  for note in files.why_kept(kept):
    name, at = note.get('name'), note.get('nonfinite_at')
    if isinstance(name, str) and type(at) is int:
      first[name] = at
    elif type(step := note.get('set_back_to')) is int:
      first = {name: at for name, at in first.items() if at <= step}
  return first


# A training and an evaluation thread may change the same file.
_noting = threading.Lock()


def _noted(path: pathlib.Path) -> list[int]:
  """Returns the steps that a file of evaluated ones holds.

  Raises:
    files.DamagedError: it is missing, or not as it was written.
  """
  noted = files.read_json(path, str(path))
  steps = noted.get('steps') if isinstance(noted, dict) else None
  if not isinstance(steps, list) or not all(type(s) is int for s in steps):
    raise files.DamagedError(f'{path.name} holds no steps')
  # Earlier versions wrote no checksum.
  if noted.get('crc', _crc_of(steps)) != _crc_of(steps):
    raise files.DamagedError(f'{path.name} is not as it was written')
  return steps


def _note(path: pathlib.Path, steps: list[int]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  files.write_json(path, {'steps': steps, 'crc': _crc_of(steps)})


def _crc_of(steps: list[int]) -> int:
  return zlib.crc32(json.dumps(steps).encode())


def _placed(name: str, value: Any, live: Any) -> Any:
  """Puts a restored entry where the live one is.

  The keys of the per-device style are one for each local device, all the
  same; on another number of devices there are more or fewer.

  Raises:
    reader.MismatchError: it is of another type, or shape.
  """
  if not isinstance(live, jax.Array):
    return value
  if isinstance(value, np.ndarray):
    value = jnp.asarray(value)
  got = getattr(value, 'dtype', type(value).__name__), np.shape(value)
  # A raw key is a row of numbers itself.
  rows = live.ndim - (not storage.is_key(live))
  if got[0] == live.dtype and rows == 1 and got[1][1:] == live.shape[1:]:
    value = jnp.broadcast_to(value[:1], live.shape)
  elif got != (live.dtype, live.shape):
    raise reader.MismatchError(
      f'{name}: the checkpoint has {got[0]}{list(got[1])}, expected'
      f' {live.dtype}{list(live.shape)}; nothing was restored.'
    )
  return jax.device_put(value, live.sharding)


def _failed_save(
  error: OSError, target: pathlib.Path, size: Callable[[], int]
) -> OSError:
  """Returns an error that says what became of a save."""
  needed = size() if error.errno in disk.FULL else None
  error = disk.failed_write(error, target, needed)
  return type(error)(
    error.errno,
    f'{error.strerror}; what was written of it was removed, and the checkpoints'
    ' before it are untouched',
    str(target),
  )


# What goes into the record, and how it is compared.


@functools.cache  # To look them up takes milliseconds.
def _versions() -> dict[str, str]:
  names = ('jax', 'jaxlib', 'orbax-checkpoint', 'numpy', 'optax')
  versions = {'jaxline': jaxline.__version__}
  versions['python'] = platform.python_version()
  for name in names:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return versions


def _saved_at(checkpoint: pathlib.Path) -> float:
  """Returns when a checkpoint was saved, or became the best, in seconds.

  By its own word, since a copy of the run may have other file times.
  """
  for name in ('extra.json', files.RECORD):
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
      return float(files.read_json(checkpoint / name)['time'])
  return 0.0


def _foreign(where: str) -> pathlib.Path:
  """Returns the checkpoint that 'DIR' or 'DIR:STEP' means.

  Raises:
    UsageError: there is none; says which there are.
  """
  if '://' in where:
    raise errors.UsageError(
      f'config.restore_from is {where!r}; expected a folder of this machine.'
      ' Mount the bucket and give the path it has here.'
    )
  head, _, tail = where.rpartition(':')
  directory = pathlib.Path(where).expanduser()
  step = None
  if head and tail.isdigit() and not directory.exists():
    directory, step = pathlib.Path(head).expanduser(), int(tail)
  directory = directory.absolute()
  if step is None and (directory / files.RECORD).exists():
    return directory.resolve()  # Its own link is the user's.
  series = files.root(directory) / 'latest'
  if not series.exists():
    series = directory  # The directory of a series itself.
  steps = files.steps(series)
  if step is None and steps:
    step = steps[-1]
  step = _of_chief(-1 if step is None else step)
  if step not in steps:
    raise errors.UsageError(
      f'config.restore_from is {where!r}; expected the directory of a run, or'
      ' of a series (RUN/checkpoints/best), optionally with :STEP.'
      f' {series} has the steps {steps}.'
    )
  return series / str(step)


def _of_chief(number: int) -> int:
  """Returns the first process's number, in all processes."""
  if jax.process_count() == 1:
    return number
  return int(multihost_utils.broadcast_one_to_all(np.int64(number)))
