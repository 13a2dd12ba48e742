"""The durable checkpointer: checkpoints on a disk or in a bucket.

`restore` takes the newest manifest, compares the configs, checks that the
checkpoint fits the experiment and reads each part once, verifying it. If a part
is damaged, all processes take the checkpoint before. `saving` is the writing
half.
"""

from collections.abc import Callable, Collection
import contextlib
import os
from typing import Any, TypeVar

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from jaxline import base_config
from jaxline import distributed
from jaxline import errors
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import inspection
from jaxline.checkpoint import memory
from jaxline.checkpoint import saving
from jaxline.compat import experiments
from jaxline.storage import store as store_lib

_SEED = 'the snapshot that the program put into utils.GLOBAL_CHECKPOINT_DICT'
# What restoring raises for values that an experiment cannot have.
_MISFITS = TypeError, ValueError, LookupError, AttributeError, ArithmeticError
_T = TypeVar('_T')


class ConfigChangedError(errors.UsageError):
  """A checkpoint in the run's directory was made with another config."""


class DurableCheckpointer(saving.SavingCheckpointer):
  """Keeps checkpoints below `config.checkpoint_dir`.

  All hosts see that directory, and call `save` and `restore` at the same steps.
  If a checkpoint is removed while it is read, the next one is tried.
  """

  collective = True
  is_resumable = True
  _declared = experiments.declared(None)  # The class, if it is known.

  # The protocol.

  def begin_training(self, experiment_class: Any) -> None:
    """Moves to another directory if this process has trained another run here.

    `platform` has done so before it opened the logs; this is for a program that
    makes its own checkpointer and trains several classes.
    """
    memory.forget_published()
    self._keep_data(())  # A program may have evaluated with it before.
    self.follows = False
    config = self._recorded | {'checkpoint_dir': self._run.url}
    directory = memory.run_directory(experiment_class, config)
    if directory != config['checkpoint_dir']:
      self.close()
      self._move(directory)
      self._recorded['checkpoint_dir'] = directory
      self.has_moved = True

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether there is something to restore.

    Raises:
      ClaimedError: another process writes to the series.
    """
    if not self.follows:
      self.claim(ckpt_series)
    return (
      self._has_any(ckpt_series)
      or memory.seed(ckpt_series) is not None
      or self._forks(ckpt_series)
    )

  def restore_path(self, ckpt_series: str) -> str | None:
    found = self._manifests.by_time(ckpt_series)
    return f'{self._store}/{ckpt_series}/{found[0]}' if found else None

  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    """Restores a checkpoint into the calling thread's live state.

    Only the entries of the live state are restored. Where this run has no
    checkpoint yet, it begins from the snapshot that the program has put into
    `utils.GLOBAL_CHECKPOINT_DICT`, or else from `config.restore_from`.

    Args:
      ckpt_series: the series.
      step: which checkpoint; None is the newest that is whole. One that is
        damaged is reported and passed over.

    Raises:
      ValueError: there is none, or the run has another config.
      MismatchError: it does not fit the experiment.
      DamagedError: it is damaged, and no earlier checkpoint is whole.
    """
    state = self.get_experiment_state(ckpt_series)
    live = state.get('experiment_module')
    module = experiments.full_experiment(live)
    if live is not None:
      self._declared = experiments.declared(type(live))
    if not self.follows:
      self.claim(ckpt_series)
    begins = step is None and not self._has_any(ckpt_series)
    seed = None if step is not None else memory.seed(ckpt_series)
    own: dict[str, Any] = {}  # The manifest, of a checkpoint of this run.
    unused = ''
    if begins and seed is not None:
      source, entries = _SEED, memory.entries_of(seed, ckpt_series, state)
      entries = {key: _placed(key, entries, state, source) for key in entries}
      if self._forks(ckpt_series):
        unused = f'config.restore_from = {self._config.restore_from!r}'
    elif begins and self._forks(ckpt_series):
      source, entries = self._read_foreign(state, module)
      # The step, too: that run may go on, and this one is to be replayed.
      self._recorded['restore_from'] = ':'.join(source.rsplit('/', 1))
    else:
      found, entries = self._read_own(ckpt_series, step, state, module)
      own, source = found.record, found.name
      unused = '' if seed is None else _SEED
    try:
      memory.fill(state, entries)
    except errors.UsageError:
      raise
    except _MISFITS as e:
      logging.info('The error in full:', exc_info=True)
      raise store_lib.RefusedError(
        f'{source} is refused: {type(e).__name__}: {e}'
      ) from e
    what = 'Restored' if own else f'Began the series {ckpt_series!r} from'
    logging.info('%s %s.', what, source)
    if unused:
      logging.warning('%s is not used: there is %s.', unused, source)
    if ckpt_series == 'latest':
      self._restored, self._held_step = own, own.get('step')
    if not own:
      return
    if ckpt_series == 'latest':
      self._recorded['restore_from'] = own['config'].get('restore_from')
      self.saved_step = own['step']
      self.lengths = self._local(own['logs'])
    if live is not None and not self.follows:
      nodes = found.nodes or {}
      published = self._published(ckpt_series, own['step'], module, nodes)
      memory.publish(ckpt_series, published)

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    """Returns a function that restores the next checkpoint to evaluate.

    It restores each checkpoint once, in the order of the steps. A step that
    training has saved again has other data, and is another checkpoint.
    """
    # The data of each evaluated step; '' if it had no checkpoint.
    evaluated: dict[int, str] = {}
    # Steps that were restored or found damaged since training began last. Only
    # a training that begins again saves a step again.
    looked_at: set[int] = set()
    begun: Any = ''

    def next_step(done: Collection[int]) -> int | None:
      nonlocal begun, evaluated
      if (note := self._store.read(saving.BEGUN)) != begun:
        begun = note
        evaluated = {x.step: x.data for x in self._own_notes()} | evaluated
        looked_at.clear()
      for step in self.steps(ckpt_series):
        data = evaluated.get(step)
        if step in looked_at or (step in done and not data):
          continue
        with contextlib.suppress(store_lib.DamagedError):  # See `restore`.
          if self._manifests.read(ckpt_series, step)['data'] == data:
            looked_at.add(step)
            continue
        return step
      return None

    def restore_next(done: Collection[int]) -> bool:
      is_chief = jax.process_index() == 0
      while True:
        step = distributed.of_chief(next_step(done) if is_chief else None)
        if step is None:
          break
        looked_at.add(step)
        # `restore` reports damage; what training has removed is passed over.
        with contextlib.suppress(store_lib.DamagedError):
          self.restore(ckpt_series, step)
          evaluated[step] = self._restored['data']
          return True
      # A run without checkpoints may start from a seed snapshot.
      seed = None if self._has_any(ckpt_series) else memory.seed(ckpt_series)
      if seed is not None and memory.step_of(seed) not in done:
        self.restore(ckpt_series)
        return True
      return False

    return restore_next

  def is_new(self) -> bool:
    return not self._has_any('latest')

  # What the loops ask for besides.

  def check_config(self, experiment_class: Any = None) -> None:
    """Compares the config of the newest checkpoint with this run's.

    Args:
      experiment_class: constructs the experiment. A class, or a partial of one,
        declares which keys may change; for another function only `restore`
        compares.

    Raises:
      ConfigChangedError: a key that makes another run differs.
      UsageError: `restore_from` names no checkpoint.
    """
    if self._forks('latest') and not self._has_any('latest'):
      _foreign(self._config.restore_from)
    if experiments.class_of(experiment_class) is not None:
      self._declared = experiments.declared(experiment_class)
    elif experiment_class is not None:
      return
    for step in self.steps('latest')[-1:]:
      # `restore` reports damage.
      with contextlib.suppress(store_lib.DamagedError):
        self._check_config(self._checkpoint('latest', step))

  def check_shared(self) -> None:
    """Raises UsageError, naming processes that see another directory."""
    if jax.process_count() == 1:
      return
    # A new name: a network file system may remember that an old one was absent.
    key = distributed.of_chief(f'.shared-{os.urandom(4).hex()}')
    is_writing = jax.process_index() == 0 and not self.reads_only
    if self.reads_only:
      key = base_config.RECORD
    elif is_writing:
      self._run.write(key, b'')
    distributed.of_chief(None)  # The others look once it is there.
    is_there = self._run.read(key) is not None
    seen = multihost_utils.process_allgather(np.bool_(is_there))
    if is_writing:
      self._run.delete(key)
    if seen[0] and not seen.all():
      raise errors.UsageError(
        f'config.checkpoint_dir is {self._config.checkpoint_dir!r} in process'
        f' {jax.process_index()}, but processes'
        f' {np.flatnonzero(~seen).tolist()} do not see there what process 0'
        ' writes. All processes save together: give all the same directory,'
        ' on a disk that all of them share.'
      )

  # Restoring.

  def _forks(self, series: str) -> bool:
    """Returns whether a series without checkpoints begins from another run."""
    return (
      series == 'latest'
      and bool(self._config.restore_from)
      and not self.follows
    )

  def _has_any(self, ckpt_series: str) -> bool:
    """Returns whether the first host sees a checkpoint."""
    return distributed.of_chief(bool(self.steps(ckpt_series)))

  def _checkpoint(self, series: str, step: int) -> contents.Checkpoint:
    return contents.Checkpoint(
      self._manifests, series, step, self._allow_pickle
    )

  def _read_own(
    self, series: str, step: int | None, state: Any, module: Any
  ) -> tuple[contents.Checkpoint, dict[str, Any]]:
    """Reads a checkpoint of the run: the newest that is whole, or a step's.

    Returns:
      The checkpoint, and what it has for the entries of the live state.
    """
    reports: dict[int, str] = {}  # Step -> the error.
    while True:
      steps = [
        s
        for s in self._manifests.by_time(series)
        if step in (None, s) and s not in reports
      ]
      at = distributed.of_chief(steps[0] if steps else None)
      if at is None:
        gone = ValueError if step is None else store_lib.GoneError
        raise (store_lib.DamagedError if reports else gone)(
          f'The series {series!r} in {self._store} has no checkpoint'
          + (f' of step {step}' if step is not None else '')
          + (' that is whole' if reports else '')
          + f'; its steps are {self.steps(series)}.'
          + ''.join(f' {report}' for report in reports.values())
        )

      def read(at: int = at) -> tuple[contents.Checkpoint, dict[str, Any]]:
        found = self._checkpoint(series, at)
        if series == 'latest':
          self._keep_data([found.record['data']])
          # The mark protects the data if the manifest is still there.
          found = self._checkpoint(series, at)
        self._check_config(found)
        with found.reading():
          # Only its value is read, which counts if the weights are there.
          if state.get('experiment_module') is None:
            arrays.verify(found.data, found.described, reads=False)
          return found, self._read(found, state, module)

      try:
        return _together(read)
      except store_lib.DamagedError as e:
        if not distributed.of_chief(at in self.steps(series)):
          continue  # It was removed while it was read: there may be another.
        logging.error('%s It is passed over.', e)
        reports[at] = str(e)

  def _read_foreign(
    self, state: Any, module: Any
  ) -> tuple[str, dict[str, Any]]:
    """Returns name and entries of the checkpoint that `restore_from` means.

    That run may go on, and remove it meanwhile, which is an error.
    """
    found = _foreign(self._config.restore_from)
    found.allow_pickle = self._allow_pickle

    def read() -> dict[str, Any]:
      with found.reading():
        if self._config.restore_rules:
          rules = [(rule[0], rule[1]) for rule in self._config.restore_rules]
          return {'experiment_module': found.by_rules(module, rules)}
        return self._read(found, state, module)

    return found.name, _together(read)

  def _read(
    self, found: contents.Checkpoint, state: Any, module: Any
  ) -> dict[str, Any]:
    """Returns a checkpoint's values of the entries of the live state."""
    entries = found.entries([k for k in state if k != 'experiment_module'])
    entries = {key: _placed(key, entries, state, found.name) for key in entries}
    if state.get('experiment_module') is not None:
      entries['experiment_module'] = found.snapshot(module)
    return entries

  def _check_config(self, found: contents.Checkpoint) -> None:
    """Raises ConfigChangedError if a checkpoint is of another run."""
    changes = base_config.changes(
      found.record['config'], self._recorded, self._declared
    )
    if not changes:
      return
    text = '\n'.join(f'  config.{line}' for line in changes)
    if self.follows or self._config.on_config_change == 'continue':
      logging.log_first_n(
        logging.WARNING,
        '%s was made with another config:\n%s', 1, found.name, text,
      )  # fmt: skip
      return
    raise ConfigChangedError(
      f'{found.name} was made with another config, and going on would mix two'
      f' runs:\n{text}\nGive this run another config.checkpoint_dir (with'
      ' config.restore_from to begin from here), or set'
      " config.on_config_change = 'continue' to go on with the new values."
    )


def _together(read: Callable[[], _T]) -> _T:
  """Calls a function in all processes; an error in one is raised in all.

  Raises:
    DamagedError: a process found damage.
  """
  damage: store_lib.DamagedError | None = None
  error: Exception | None = None
  try:
    result = read()
  except store_lib.DamagedError as e:
    damage = e
  except Exception as e:
    error = e
  reports = distributed.decide(str(damage or ''), list, error, 'restore')
  if any(reports):
    raise damage or store_lib.DamagedError(' '.join(filter(None, reports)))
  return result


def _placed(name: str, entries: dict[str, Any], state: Any, of: str) -> Any:
  """Returns a restored entry on the devices of the live one.

  The step keys of the per-device style are equal rows, one for each local
  device; another number of devices has more or fewer.

  Raises:
    contents.MismatchError: it has another type or shape.
  """
  value, live = entries[name], state.get(name)
  if not isinstance(live, jax.Array):
    return value
  if isinstance(value, np.ndarray):
    value = jnp.asarray(value)
  got = getattr(value, 'dtype', type(value).__name__), np.shape(value)
  # A raw key is a row of numbers itself.
  rows = live.ndim - (not arrays.is_key(live))
  if got[0] == live.dtype and rows == 1 and got[1][1:] == live.shape[1:]:
    value = jnp.broadcast_to(value[:1], live.shape)
  elif got != (live.dtype, live.shape):
    raise contents.MismatchError(
      f'{of}: {name}: the checkpoint has {got[0]}{list(got[1])}, expected'
      f' {live.dtype}{list(live.shape)}; nothing was restored.'
    )
  return jax.device_put(value, live.sharding)


def _foreign(where: str) -> contents.Checkpoint:
  """Returns the checkpoint that `restore_from` means.

  Raises:
    UsageError: there is none; says which there are.
  """
  try:
    found = inspection.find(where)
  except ValueError as e:
    raise errors.UsageError(f'config.restore_from is {where!r}: {e}') from e
  found.step = distributed.of_chief(found.step)
  return found
