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
import re
import shlex
import shutil
import threading
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import orbax.checkpoint as ocp

import jaxline
from jaxline import async_lib
from jaxline import preemption
from jaxline.checkpoint import base
from jaxline.checkpoint import files
from jaxline.checkpoint import reader
from jaxline.checkpoint import storage
from jaxline.checkpoint import structure

# Config keys whose change makes another run, and what may change all the same:
# where arrays lie says nothing about their values.
_IDENTITY = (
  'experiment_class',
  'experiment_kwargs',
  'random_seed',
  'random_mode_train',
  'legacy_random_seed_behavior',
)
# Of these, what changes no step: where arrays lie, in which order the same step
# is computed, and how a trained model is decoded.
_FREE = (
  'decode',
  'mesh',
  'sharding',
  'loss_chunks',
  'pipeline_microbatches',
  'pipeline_repeats',
  'pipeline_stages',
  'remat',
  'scan_layers',
  # The same in examples/pax.
  'ATTENTION_IMPL',
  'CHECKPOINT_POLICY',
  'EVAL_LOOP_NUM_BATCHES',
  'LOSS_CHUNKS',
  'MICROBATCH_SIZE',
  'NUM_STAGES',
)
_SLOW_SECS = 1.0  # A save that waits longer for the one before is reported.


class ConfigChangedError(ValueError):
  """A checkpoint in the run's directory was made with another config."""


class DurableCheckpointer:
  """Keeps checkpoints below `config.checkpoint_dir`; a `base.Checkpointer`.

  On several hosts all must see that directory, and all call `save` and
  `restore` at the same steps.

  Attributes:
    collective: all hosts take part in `save`.
    before_commit: series -> function that is called on the background thread
      before a checkpoint becomes visible, so that what belongs to it, such as
      the logs up to its step, is safe before it.
    restored_step: the step of the checkpoint of `latest` that was restored
      last, if it was this run's own.
    reads_only: nothing is written in the directory, not even by evaluation:
      a checkpoint may vanish while it is read, and then the next is tried.
  """

  collective = True

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
    self.before_commit: dict[str, Callable[[], None]] = {}
    self.restored_step: int | None = None
    self.reads_only = False

  # The protocol.

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the calling thread's live state of the series."""
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
    if self._follows and ckpt_series == 'best' and self._pinned is not None:
      pinned_step, pinned = self._pinned
      assert pinned_step == step, (pinned_step, step)
      write: Callable[[], None] = self._promotion(state, pinned, target)
    else:
      content = self._collect(ckpt_series, state)
      # Asked here, since hosts may agree only on the thread of the steps.
      is_there = bool(_of_chief(target.exists()))
      write = lambda: self._write(content, target, is_there)
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
    return ckpt_series == 'latest' and self._forks

  def restore_path(self, ckpt_series: str) -> str | None:
    """Returns the directory of the newest checkpoint, or None."""
    found = self._candidates(ckpt_series)
    return str(found[0]) if found else None

  @preemption.held()
  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    """Restores a checkpoint into the calling thread's live state.

    Only the entries of the live state are restored. Where this run has no
    checkpoint yet and `config.restore_from` names another run, that is where
    it begins.

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
    self.can_be_restored(ckpt_series)  # Raises where all are damaged.
    if self._forks and ckpt_series == 'latest' and not self._has_any('latest'):
      self._fork(state)
      return
    read = None
    while read is None:
      path = self._newest_whole(ckpt_series, step, state)
      with _reported(self._root / ckpt_series / path.name):
        try:
          read = reader.together(functools.partial(self._read, path, state))
        except files.DamagedError:
          # If it was removed while it was read, there may be another one.
          if _of_chief(path.exists()):
            raise
    _fill(state, *read)
    if ckpt_series == 'latest':
      self.restored_step = int(path.name)
    logging.info('Restored %s.', path)

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

  def check_config(self) -> None:
    """Compares the newest checkpoint's config with this run's.

    Raises:
      ConfigChangedError: a key that makes another run differs.
      ValueError: `restore_from` names no checkpoint.
    """
    if self._forks and not self._has_any('latest'):
      _foreign(self._config.restore_from)
    for path in self._candidates('latest')[:1]:
      # One that is damaged is found to be so by `restore`.
      with contextlib.suppress(files.DamagedError), _reported(path):
        if not files.verify(path, lambda file: file == files.RECORD):
          self._check_config(path, files.read_record(path))

  def check_shared(self) -> None:
    """Refuses a directory that not all processes share.

    Raises:
      ValueError: naming the processes that do not see the first one's files.
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
      raise ValueError(
        f'config.checkpoint_dir is {self._config.checkpoint_dir!r} in process'
        f' {jax.process_index()}, but processes'
        f' {np.flatnonzero(~seen).tolist()} do not see there what process 0'
        ' writes. All processes save together: give all the same directory,'
        ' on a disk that all of them share.'
      )

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
    files.write_json(
      self._root.parent / 'config.json', _json_config(self._config)
    )
    (self._root / 'ended.json').unlink(missing_ok=True)
    for path in (self._root / 'evaluated').glob('*.json'):
      noted = _noted(path)
      if left := [s for s in noted if s > step]:
        files.write_json(path, {'steps': [s for s in noted if s not in left]})

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

  def evaluated(self) -> list[int]:
    """Returns the steps that `mark_evaluated` noted in this mode.

    All hosts get the first one's answer.
    """
    steps = _noted(self._evaluated_path)
    if jax.process_count() == 1:
      return steps
    own = np.zeros([_of_chief(len(steps))], np.int32)
    own[: len(steps)] = steps[: len(own)]
    return multihost_utils.broadcast_one_to_all(own).tolist()

  def mark_evaluated(self, step: int) -> None:
    """Notes that a step is evaluated and its results are safe."""
    if jax.process_index() == 0 and not self.reads_only:
      steps = [*_noted(self._evaluated_path), step]
      self._evaluated_path.parent.mkdir(parents=True, exist_ok=True)
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      files.write_json(self._evaluated_path, {'steps': steps[-100_000:]})

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
      'config': _json_config(self._config),
      'entries': entries,
      'module': module,
      'arrays': described,
    }
    return storage.Content(
      arrays=stored,
      record=record,
      process=per_process,
      before_commit=self.before_commit.get(ckpt_series),
    )

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
          None if e.errno in files.FULL else e
        )
      raise
    if chief:
      if target != final:
        files.replace(target, final)
      files.sync_directory(final.parent)
      logging.info('Saved %s.', final)
      self._retire(final.parent)

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
        self._retire(target.parent)

    return write

  def _after_all_best(self) -> float:
    """Returns the time, later than any best one's also if the clock is not."""
    before = [_saved_at(path) + 1 for path in self._candidates('best')]
    return max([time.time(), *before])

  def _retire(self, series: pathlib.Path) -> None:
    """Removes the checkpoints of a series that need not be kept."""
    config = self._config
    if series.name == 'best':
      # The best is the one that was saved last, of whichever step.
      saved = self._candidates('best')
      for path in saved[config.max_best_checkpoints_to_keep :]:
        files.remove(path)
      return
    keep = files.Keep(
      config.max_checkpoints_to_keep,
      config.keep_checkpoint_every_steps,
      config.keep_checkpoint_every_hours,
    )
    times = [
      (step, _saved_at(series / str(step)) if keep.every_hours else 0.0)
      for step in files.steps(series)
    ]
    for step in keep.removable(times):
      files.remove(series / str(step))

  # Restoring.

  @property
  def _forks(self) -> bool:
    return bool(self._config.restore_from) and not self._follows

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
  ) -> pathlib.Path:
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
      if self._follows and ckpt_series == 'latest' and not self.reads_only:
        whole = self._pin(path)
      with _reported(path):
        problems = reader.verify(whole, state.get('experiment_module'))
      if not problems:
        return whole
      if not _of_chief(path.exists()):
        continue  # Training removed it meanwhile: there is a newer one.
      report = f'{path} is damaged: {"; ".join(problems)}'
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
    self, path: pathlib.Path, state: Any, is_foreign: bool = False
  ) -> tuple[dict[str, Any], Any]:
    """Returns the entries of a checkpoint, and the experiment's snapshot."""
    record = files.read_record(path)
    if not is_foreign:
      self._check_config(path, record)
    saved = reader.Reader(path, record, self._allow_pickle)
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
    changes = _config_changes(record['config'], _json_config(self._config))
    if not changes:
      return
    text = '\n'.join(f'  config.{line}' for line in changes)
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
      if problems := reader.verify(path, state['experiment_module']):
        raise files.DamagedError('; '.join(problems))
      read = reader.together(lambda: self._read(path, state, is_foreign=True))
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
  except files.DamagedError as e:
    raise files.DamagedError(f'{path} is damaged: {e}.') from e
  except files.UnreadableError as e:
    where = shlex.quote(str(path))
    raise files.UnreadableError(
      e.errno,
      f'{path} could not be read: {e.strerror}. This may pass, and nothing was'
      f' moved: start again. To skip this checkpoint: mv {where} {where}.bak',
    ) from e


def _noted(path: pathlib.Path) -> list[int]:
  """Returns the steps that a file of evaluated ones holds."""
  with contextlib.suppress(files.DamagedError, KeyError, TypeError):
    return list(files.read_json(path)['steps'])
  return []


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
  needed = size() if error.errno in files.FULL else None
  error = files.failed_write(error, target, needed)
  return OSError(
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


def _json_config(config: config_dict.ConfigDict) -> dict[str, Any]:
  # Functions are told by their names; where they lie changes each time.
  return json.loads(re.sub(' at 0x[0-9a-f]+', '', config.to_json_best_effort()))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
  if isinstance(value, Mapping) and value:
    for key in value:
      yield from _flat(value[key], f'{name}.{key}' if name else str(key))
  else:
    yield name, value


def _config_changes(
  old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[str]:
  """Returns a line for each key that makes another run of it."""
  before, now = dict(_flat(old, '')), dict(_flat(new, ''))
  return [
    f'{key}: {before.get(key, "absent")!r} then, {now.get(key, "absent")!r} now'
    for key in sorted(before.keys() | now.keys())
    # A NaN differs from itself.
    if before.get(key) != now.get(key)
    and repr(before.get(key)) != repr(now.get(key))
    and key.split('.')[0] in _IDENTITY
    and not set(key.split('.')) & set(_FREE)
  ]


def _saved_at(checkpoint: pathlib.Path) -> float:
  """Returns when a checkpoint was saved, or became the best, in seconds.

  By its own word, since a copy of the run may have other file times.
  """
  for name in ('extra.json', files.RECORD):
    with contextlib.suppress(files.DamagedError, KeyError, TypeError):
      return float(files.read_json(checkpoint / name)['time'])
  return 0.0


def _foreign(where: str) -> pathlib.Path:
  """Returns the checkpoint that 'DIR' or 'DIR:STEP' means.

  Raises:
    ValueError: there is none; says which there are.
  """
  if '://' in where:
    raise ValueError(
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
    return directory
  series = files.root(directory) / 'latest'
  if not series.exists():
    series = directory  # The directory of a series itself.
  steps = files.steps(series)
  if step is None and steps:
    step = steps[-1]
  step = _of_chief(-1 if step is None else step)
  if step not in steps:
    raise ValueError(
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
