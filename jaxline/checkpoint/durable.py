"""Checkpoints on disk, by Orbax: whole or not there, checked, resumable.

A save goes one way. `save` copies the state to host memory (`contents`) and
returns. A background thread waits until the logs are on disk, has Orbax write
the copy and hashes every file (`arrays`), makes it visible in one rename, and
then removes the checkpoints that need not be kept (`files`).

`restore` verifies the hashes first (TensorStore does not notice a flipped bit),
takes the newest checkpoint that is whole, and checks that it fits the
experiment before anything is changed (`contents`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
import contextlib
import functools
import os
import pathlib
import threading
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np

from jaxline import async_lib
from jaxline import base_config
from jaxline import disk
from jaxline import distributed
from jaxline import errors
from jaxline.checkpoint import arrays
from jaxline.checkpoint import base
from jaxline.checkpoint import contents
from jaxline.checkpoint import files
from jaxline.checkpoint import inspection
from jaxline.checkpoint import memory
from jaxline.checkpoint import notes
from jaxline.supervision import preemption

_SEED = 'the snapshot that the program put into utils.GLOBAL_CHECKPOINT_DICT'


class ConfigChangedError(errors.UsageError):
  """A checkpoint in the run's directory was made with another config."""


class DurableCheckpointer(notes.NotingCheckpointer):
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
    super().__init__(config, mode)
    self._declared = base.Module()  # Of its config, by the experiment's class.
    self._allow_pickle = bool(config.checkpoint_allow_pickle)
    self._live = threading.local()
    # One thread for all series: on several hosts the processes meet while
    # they write, and must do so in one order.
    self._writer = async_lib.SerialExecutor('checkpoint')
    self._saving: futures.Future[None] | None = None
    # Of the series that are saved; only the first process has a claim on them.
    self._claims: dict[str, files.Claim | None] = {}
    self._pinned: pathlib.Path | None = None
    self._passed_over: set[Any] = set()  # Identities of damaged checkpoints.

  # The protocol.

  def get_experiment_state(self, ckpt_series: str) -> Any:
    """Returns the calling thread's live state of the series."""
    # Programs written against JAXline look at the series there.
    memory.add_series(ckpt_series)
    state = base.ExperimentState()
    return vars(self._live).setdefault(ckpt_series, state)

  def save(self, ckpt_series: str) -> None:
    """Copies the live state to host memory, and has it written.

    Raises:
      TypeError: something in it can only be pickled.
      Exception: what an earlier save failed with.
    """
    self.claim(ckpt_series)
    if self._saving is not None:  # Host memory holds one copy of the state.
      futures.wait([self._saving])
    self.raise_error()
    state = self.get_experiment_state(ckpt_series)
    step = int(state['global_step'])
    target = self._root / ckpt_series / str(step)
    module = base.Module.of(state.get('experiment_module'))
    config = self._config
    source: arrays.Content | pathlib.Path
    added: dict[str, Any] = {}
    if self._follows and ckpt_series == 'best' and self._pinned is not None:
      assert self._pinned.name == str(step), (self._pinned, step)
      source = self._pinned
      added = contents.added(state, self._allow_pickle)
    else:
      kind = 'best' if ckpt_series == 'best' else 'train'
      source = contents.content(
        ckpt_series,
        state,
        module,
        self._recorded,
        all_hosts=config[f'{kind}_checkpoint_all_hosts'],
        allow_pickle=self._allow_pickle,
      )
    # Now: the flushes do not wait for what later steps log.
    logs = self.logs if ckpt_series == 'latest' else ()
    flushes = [log.flush_async() for log in logs]
    published = self._published(target, module)
    self._saving = self._writer.submit(
      self._make_visible, flushes, source, added, target, published
    )
    keep = base.num_to_keep(config, ckpt_series, module)
    # A call of its own: the next save waits for the copy, not for removals.
    self._writer.put(functools.partial(self._retire, target.parent, keep))

  def begin_training(self, experiment_class: Any) -> None:
    """Moves to another directory if another training of this process is here.

    `platform` does it before it opens the logs; a program that makes its own
    checkpointer and calls `train.train` with several classes has it done here.
    """
    config = self._recorded | {'checkpoint_dir': str(self._root.parent)}
    directory = memory.run_directory(experiment_class, config)
    if directory != config['checkpoint_dir']:
      self.close()
      self._root = files.root(directory)
      self._recorded['checkpoint_dir'] = directory
      self.saved_step = None
      self.has_moved = True

  def can_be_restored(self, ckpt_series: str) -> bool:
    """Returns whether there is something to restore.

    Raises:
      files.ClaimedError: another process writes to the series.
    """
    if not self._follows:
      self.claim(ckpt_series)
    return (
      self._has_any(ckpt_series) or self._beginning(ckpt_series) is not None
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
        damaged is reported and passed over.

    Raises:
      ValueError: there is none, or the run has another config.
      MismatchError: it does not fit the experiment.
      files.DamagedError: it is damaged, and there is none before it.
    """
    state = self.get_experiment_state(ckpt_series)
    module = base.Module.of(state.get('experiment_module'))
    if module.live is not None:
      self._declared = base.Module.of(type(module.live))
    if not self._follows:
      self.claim(ckpt_series)
    begin = None
    if step is None and not self._has_any(ckpt_series):
      begin = self._beginning(ckpt_series)
    what = f'Began the series {ckpt_series!r} from'
    source, unused = _SEED, ''
    if begin is None:
      path, entries = self._read_own(ckpt_series, step, state, module)
      what, source = 'Restored', str(path)
      if step is None and memory.seed(ckpt_series) is not None:
        unused = _SEED
    elif isinstance(begin, pathlib.Path):
      source = str(begin)
      with files.reading(begin):
        wants = module.wants_restored
        found = contents.verified(begin, wants, self._allow_pickle)
        read = functools.partial(self._read, found, state, module, True)
        entries = arrays.together(read)
    else:
      entries = memory.entries_of(begin, ckpt_series, state)
      entries = {key: _placed(key, entries, state) for key in entries}
      if self._forks:
        unused = f'config.restore_from = {self._config.restore_from!r}'
    memory.fill(state, entries)
    logging.info('%s %s.', what, source)
    if unused:
      logging.warning('%s is not used: there is %s.', unused, source)
    if begin is not None:
      return
    if ckpt_series == 'latest':
      self.saved_step = int(path.name)
    if module.live is not None and not self._follows:
      memory.publish(ckpt_series, self._published(path, module))

  def follow(self, ckpt_series: str) -> Callable[[Collection[int]], bool]:
    """Returns a function that restores the next checkpoint to evaluate.

    Checkpoints are restored in the order of their steps.
    """

    def restore_next(done: Collection[int]) -> bool:
      while (step := self.next_step(ckpt_series, done)) is not None:
        try:
          self.restore(ckpt_series, step)
          return True
        except ValueError:
          # It may have been removed meanwhile, or found damaged and reported.
          if self.next_step(ckpt_series, done) == step:
            raise
      # Before the run's first checkpoint there may be what it starts from.
      seed = None if self._has_any(ckpt_series) else self._seed(ckpt_series)
      if seed is None or memory.step_of(seed) in done:
        return False
      self.restore(ckpt_series)
      state = self.get_experiment_state(ckpt_series)
      return int(state.global_step) not in done

    return restore_next

  def is_new(self) -> bool:
    """Returns whether the run has no checkpoint of its own yet."""
    return not self._has_any('latest')

  def wait_for_checkpointing_to_finish(self) -> None:
    """Returns when everything saved is on the disk.

    Raises:
      Exception: what a save failed with.
    """
    self._writer.wait()

  # What the loops ask for besides.

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
      files.remove(self._pinned)
    self._pinned = None
    for claim in filter(None, self._claims.values()):
      claim.release()
    self._claims.clear()

  def next_step(self, ckpt_series: str, done: Collection[int]) -> int | None:
    """Returns the first step with a checkpoint and not in `done`, or None.

    All hosts get the first one's answer.
    """
    found = [int(path.name) for path in self._candidates(ckpt_series)]
    left = [step for step in reversed(found) if step not in done]
    return distributed.of_chief(left[0] if left else None)

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
      self._declared = base.Module.of(experiment_class)
    elif experiment_class is not None:
      return
    for path in self._candidates('latest')[:1]:
      # One that is damaged is found to be so by `restore`.
      with contextlib.suppress(files.DamagedError), files.reading(path):
        self._check_config(path, contents.Checkpoint(path).record)

  def check_shared(self) -> None:
    """Refuses a directory that not all processes share.

    Raises:
      UsageError: naming the processes that do not see the first one's files.
    """
    if jax.process_count() == 1:
      return
    is_writing = jax.process_index() == 0 and not self.reads_only
    # A name that nobody has asked for yet: a network file system may go on
    # saying for a while that an old one is not there.
    name = f'claims/.shared-{os.urandom(4).hex()}'
    if self.reads_only:
      name = f'latest/{max(self.steps("latest"), default="")}'
    path = self._root / distributed.of_chief(name)
    if is_writing:
      path.parent.mkdir(parents=True, exist_ok=True)
      path.touch()
    arrays.barrier('shared')
    seen = multihost_utils.process_allgather(np.bool_(path.exists()))
    if is_writing:
      path.unlink(missing_ok=True)
    if seen[0] and not seen.all():
      raise errors.UsageError(
        f'config.checkpoint_dir is {self._config.checkpoint_dir!r} in process'
        f' {jax.process_index()}, but processes'
        f' {np.flatnonzero(~seen).tolist()} do not see there what process 0'
        ' writes. All processes save together: give all the same directory,'
        ' on a disk that all of them share.'
      )

  # Saving.

  def _has_any(self, ckpt_series: str) -> bool:
    """Returns whether the first host sees a checkpoint."""
    return distributed.of_chief(bool(self.steps(ckpt_series)))

  def claim(self, ckpt_series: str) -> None:
    """Takes the right to save a series, and removes what killed saves left.

    The first use of a series that is saved calls it. A loop calls it earlier
    where a series that is in use has to be an error before the first save.

    Raises:
      files.ClaimedError: another process has it.
    """
    if ckpt_series in self._claims:
      return
    if jax.process_index() == 0:
      claim = files.Claim(self._root.parent, ckpt_series)
      self._claims[ckpt_series] = claim
      files.clean(self._root / ckpt_series)
    arrays.barrier('own')  # The others look at what is there now.
    self._claims.setdefault(ckpt_series, None)

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on from a step, with this config.

    Raises:
      TypeError: a save could not store something in the live state.
    """
    state = self.get_experiment_state('latest')
    module = base.Module.of(state.get('experiment_module'))
    if not self._allow_pickle and module.live is not None:
      contents.check_storable(state, module)
    super().mark_begun(step)

  # The rest of a save, on the writing thread.

  def _make_visible(
    self,
    flushes: Sequence[Callable[[], None]],
    source: arrays.Content | pathlib.Path,
    added: dict[str, Any],
    target: pathlib.Path,
    published: memory.Published,
  ) -> None:
    """Writes a checkpoint, and puts it in its place, or that of another.

    Args:
      flushes: wait until what was logged before it is on disk.
      source: a copy of the live state, or the checkpoint that is the best one.
      added: what the best one has besides.
      target: where it belongs. One of the same step stays there until the new
        one is whole.
      published: what programs written against JAXline will look at.
    """
    for flush in flushes:
      flush()
    series = target.parent
    claim = self._claims[series.name]  # None in other processes than the first.
    if claim is not None:
      claim.check()
      series.mkdir(parents=True, exist_ok=True)
    when = time.time()
    if series.name == 'best':
      # Later than any other best one, also if the clock is not.
      when = max([when, *(_saved_at(p) + 1 for p in self._candidates('best'))])
    # Several processes must agree on it, and may see another directory yet.
    is_free = jax.process_count() == 1 and not target.exists()
    place = target if is_free else files.new(target)
    try:
      if isinstance(source, arrays.Content):
        if series.name == 'best':
          source.record['time'] = when
        arrays.barrier('series')
        arrays.write(source, place)
      elif claim is not None:
        partial = place.with_name(f'{target.name}.partial')
        files.link(source, partial)
        files.write_json(partial / 'extra.json', {'time': when, **added})
        # What else is there is the user's, who may change it.
        files.complete_checksums(partial, ['extra.json'])
        os.rename(partial, place)
    except Exception as e:
      files.discard(place)  # On a full disk, the half of it is in the way.
      if not isinstance(e, OSError):
        raise
      error = disk.failed_write(e, target)
      error.strerror = (
        f'{error.strerror}; what was written of it was removed, and the'
        ' checkpoints before it are untouched'
      )
      raise error from None
    if claim is not None:
      files.replace(target)
      logging.info('Saved %s.', target)
    arrays.barrier('visible')
    if series.name == 'latest':
      self.saved_step = int(target.name)
    memory.publish(series.name, published)

  def _retire(self, series: pathlib.Path, num_to_keep: int) -> None:
    """Removes the checkpoints of a series that need not be kept."""
    if jax.process_index() != 0 or self._writer.error is not None:
      return
    whole = self._candidates(series.name)
    # One that was passed over would count as the newest; it is replaced now.
    every = [series / str(step) for step in files.steps(series)]
    gone = [path for path in every if path not in whole]
    if series.name == 'best':
      # The best is the one that was saved last, of whichever step.
      gone += whole[num_to_keep:]
    else:
      hours = self._config.keep_checkpoint_every_hours
      removable = files.removable(
        [(int(p.name), _saved_at(p) if hours else 0.0) for p in whole],
        num_to_keep,
        self._config.keep_checkpoint_every_steps,
        hours,
      )
      gone += [series / str(step) for step in removable]
    for path in gone:
      files.remove(path)

  def _published(
    self, path: pathlib.Path, module: base.Module
  ) -> memory.Published:
    """Returns a checkpoint as programs written against JAXline look at it.

    Args:
      path: the checkpoint, which may not be there yet.
      module: what is saved; not kept, since it holds the live arrays.
    """
    template = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
      dict(module.snapshot_template()),
    )
    attributes = dict(module.CHECKPOINT_ATTRS)
    allow_pickle = self._allow_pickle

    def read() -> Any:
      # A client's signal handler may call it: it waits for no other process.
      entries = contents.read_whole(path, template, allow_pickle)
      return memory.nest_of(entries, attributes)

    return memory.Published(int(path.name), read)

  # Restoring.

  @property
  def _forks(self) -> bool:
    return bool(self._config.restore_from) and not self._follows

  def _beginning(
    self, ckpt_series: str
  ) -> memory.SnapshotNT | pathlib.Path | None:
    """Returns what a series without checkpoints of its own begins from.

    Returns:
      The program's snapshot, or the checkpoint of another run, or None.
    """
    seed = self._seed(ckpt_series)
    if seed is None and self._forks and ckpt_series == 'latest':
      return _foreign(self._config.restore_from)
    return seed

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
    if not self._passed_over:
      return found
    return [path for path in found if _identity(path) not in self._passed_over]

  def _read_own(
    self, ckpt_series: str, step: int | None, state: Any, module: base.Module
  ) -> tuple[pathlib.Path, dict[str, Any]]:
    """Reads a checkpoint of the run: the newest that is whole, or a step's.

    Evaluation gets a second name of it, so that it stays while it is read.

    Returns:
      The checkpoint, and what it has for the entries of the live state.
    """
    wants = module.wants_restored
    reports: list[str] = []
    while True:
      paths = self._candidates(ckpt_series, step)
      name = distributed.of_chief(paths[0].name if paths else None)
      if name is None:
        raise (files.DamagedError if reports else ValueError)(
          f'The series {ckpt_series!r} in {self._root} has no checkpoint'
          + (f' of step {step}' if step is not None else '')
          + (' that is whole' if reports else '')
          + f'; its steps are {self.steps(ckpt_series)}.'
          + ''.join(f' {report}' for report in reports)
        )
      path = whole = self._root / ckpt_series / name
      found = None
      try:
        with files.reading(path):
          if self._follows and ckpt_series == 'latest' and not self.reads_only:
            whole = self._pin(path)
          found = contents.verified(whole, wants, self._allow_pickle)
          read = functools.partial(self._read, found, state, module)
          return path, arrays.together(read)
      except files.DamagedError as e:
        if not distributed.of_chief(path.exists()):
          continue  # It was removed while it was read: there may be another.
        if found is not None:
          raise  # It is as it was written.
        self._passed_over.add(_identity(path))
        if step is not None:
          raise
        logging.error('%s It is passed over.', e)
        reports.append(str(e))

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
        files.link(path, pinned)
    arrays.barrier('pin')
    self._pinned = pinned
    return pinned

  def _read(
    self,
    found: contents.Checkpoint,
    state: Any,
    module: base.Module,
    is_foreign: bool = False,
  ) -> dict[str, Any]:
    """Returns what a checkpoint has for the entries of the live state."""
    if not is_foreign:
      self._check_config(found.path, found.record)
    if is_foreign and self._config.restore_rules:
      rules = [(rule[0], rule[1]) for rule in self._config.restore_rules]
      return {'experiment_module': found.by_rules(module, rules)}
    entries = found.entries([k for k in state if k != 'experiment_module'])
    entries = {key: _placed(key, entries, state) for key in entries}
    if module.live is not None:
      entries['experiment_module'] = found.snapshot(module)
    return entries

  def _check_config(self, path: pathlib.Path, record: Any) -> None:
    """Refuses a checkpoint of another run, in the same directory."""
    changes = base_config.changes(
      record['config'], self._recorded, self._declared
    )
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


def _placed(name: str, entries: Mapping[str, Any], state: Any) -> Any:
  """Returns a restored entry, put where the live one is.

  The keys of the per-device style are one for each local device, all the
  same; on another number of devices there are more or fewer.

  Raises:
    contents.MismatchError: it is of another type, or shape.
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
      f'{name}: the checkpoint has {got[0]}{list(got[1])}, expected'
      f' {live.dtype}{list(live.shape)}; nothing was restored.'
    )
  return jax.device_put(value, live.sharding)


def _saved_at(checkpoint: pathlib.Path) -> float:
  """Returns when a checkpoint was saved, or became the best, in seconds.

  By its own word, since a copy of the run may have other file times.
  """
  for name in ('extra.json', files.RECORD):
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
      return float(files.read_json(checkpoint / name)['time'])
  return 0.0


def _identity(checkpoint: pathlib.Path) -> Any:
  """Returns what differs for another checkpoint of the same name."""
  with contextlib.suppress(OSError):
    found = checkpoint.stat()
    return str(checkpoint), found.st_ino, found.st_mtime_ns
  return None


def _foreign(where: str) -> pathlib.Path:
  """Returns the checkpoint that `restore_from` means.

  Raises:
    UsageError: there is none; says which there are.
  """
  files.root(where, 'restore_from')
  try:
    path = inspection.newest(where)
  except ValueError as e:
    raise errors.UsageError(f'config.restore_from is {where!r}: {e}') from e
  return path.with_name(distributed.of_chief(path.name))
