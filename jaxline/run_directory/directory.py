"""The directory of a run: the files next to its checkpoints.

    config.json                      the config of the newest start of training
    checkpoints/begun.json           the step at which training (re)started
    checkpoints/ended.json           the step at which training ended, and why
    checkpoints/evaluated/MODE.json  evaluations, see `notes.EvaluationNote`
    checkpoints/claims/NAME.lock     the claim to write a log or a series

These files are small and replaced atomically. The logs grow. A checkpoint holds
their lengths, and a resumed run truncates them to these lengths.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import os
import secrets
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils
from ml_collections import config_dict
import numpy as np

from jaxline import errors
from jaxline.base import async_lib
from jaxline.base import debug
from jaxline.base import disk
from jaxline.metrics import writers
from jaxline.parallel import distributed
from jaxline.run_directory import logs
from jaxline.run_directory import notes
from jaxline.run_directory import owner
from jaxline.run_directory import store as store_lib

RECORD = 'config.json'
BEGUN = 'begun.json'

# The training and the evaluation thread may change the same note.
_noting = threading.Lock()


class RunDirectory:
  """The notes, logs and claims of a run; this base class keeps nothing.

  All processes of a run call its methods together.

  Attributes:
    keeps: whether a later process can resume from the directory. Only then are
      records after the restored step invalid.
    follows: whether a different process or thread saves `latest`.
    reads_only: whether nothing is written.
    poll_secs: minimum time between two looks for a checkpoint.
    saved_step: the step of this run's checkpoint of `latest` that was restored
      or completed last; None if there is none on disk.
    saved_data: the name of the data of that checkpoint.
    logs: writers and actions. A checkpoint of `latest` becomes visible only
      after their records up to it are on disk.
    lengths: path -> bytes of each log file at the run's restored checkpoint.
  """

  keeps: bool = False
  follows: bool = False
  reads_only: bool = False
  poll_secs: float = 0.0
  saved_step: int | None = None
  saved_data: str = ''
  logs: Sequence[Any] = ()
  lengths: Mapping[str, int] = {}

  def begin(self, step: int) -> None:
    """Notes the step at which training (re)starts, and the run's config."""

  def end(self, step: int, why: str = '') -> None:
    """Notes the step at which training has ended, and why if it was early."""

  def ended(self) -> int | None:
    """Returns the step at which training has ended, or None."""
    return None

  def stop_if_noted(self, step: int) -> None:
    """Raises StopTraining in all processes if notes up to a step ask for it."""

  def evaluated(self) -> list[notes.EvaluationNote]:
    """Returns the noted evaluations of this mode."""
    return []

  def note_evaluation(
    self, step: int, value: float | None, flush: Callable[[], Mapping[str, int]]
  ) -> None:
    """Queues a note of an evaluation, after the checkpoints so far.

    Args:
      step: the evaluated step.
      value: the value of the metric for early stopping; None without one.
      flush: waits until the records of the evaluation are on disk; returns
        path -> length in bytes of the log files.
    """

  def resume_log(
    self,
    log: writers.MetricWriter,
    last: int | None,
    lengths: Mapping[str, int],
  ) -> bool:
    """Removes the records of steps that will be repeated.

    Args:
      log: the log of training or of evaluation.
      last: the last step that is not repeated; None if all steps are.
      lengths: path -> length to which to truncate the file.

    Returns:
      Whether the log starts from scratch.
    """
    del log, last, lengths
    return True

  def claim(self, name: str) -> None:
    """Claims the right to write a series, or raises ClaimedError."""

  def check_shared(self) -> None:
    """Raises UsageError unless all processes see the same directory."""

  def raise_error(self) -> None:
    """Raises the error of a write in the background, if any; never blocks."""


class ConfigOnly(RunDirectory):
  """Keeps only the config, for a run whose checkpoints are in memory."""

  def __init__(self, recorded: Mapping[str, Any]):
    """Takes the run's config, as `base_config.recorded` returns it."""
    self._recorded = recorded

  def begin(self, step: int) -> None:
    if jax.process_index() == 0:
      store = store_lib.at(self._recorded['checkpoint_dir'])
      store.write(RECORD, disk.to_json(self._recorded))


class DurableDirectory(RunDirectory):
  """A directory on a disk or in a bucket, shared by all processes.

  Attributes:
    recorded: the config, as `base_config.recorded` returns it.
    run: the store of the directory.
    store: the store of its folder `checkpoints`.
    thread: writes checkpoints and notes, in order.
    claims: series -> claim of process 0.
  """

  keeps = True

  def __init__(
    self, config: config_dict.ConfigDict, recorded: dict[str, Any], mode: str
  ):
    """Reads the config; touches no file.

    Args:
      config: the run's resolved config.
      recorded: the config, as `base_config.recorded` returns it.
      mode: the run's mode; 'train' or 'eval' for each half of a threaded run.
        If the run follows a training run, its notes have this name.
    """
    self.config, self.recorded = config, recorded
    self.follows = not mode.startswith('train')
    self.mode = mode
    # All series share a thread: processes synchronize while they write, and
    # must do so in the same order.
    self.thread = async_lib.SerialExecutor('checkpoint')
    self.claims: dict[str, owner.Claim | None] = {}
    self._has_moved = False
    self._set_place(config.checkpoint_dir)

  def _set_place(self, directory: str) -> None:
    self.run = store_lib.at(directory)
    self.store = self.run.below('checkpoints')
    self.poll_secs = self.run.poll_secs
    self.recorded['checkpoint_dir'] = directory

  def move(self, directory: str) -> None:
    """Continues in a different directory; the logs stay in the old one."""
    self.close()
    self._set_place(directory)
    self.saved_step, self._has_moved = None, True

  def claim(self, name: str) -> None:
    if name in self.claims:
      return
    is_chief = jax.process_index() == 0
    claim = owner.Claim(self.run.url, name) if is_chief else None
    distributed.broadcast_from_process_0(None)  # The others wait for the claim.
    self.claims[name] = claim

  def check_shared(self) -> None:
    if jax.process_count() == 1:
      return
    # Use a new name: a network file system may cache that an old one is absent.
    key = distributed.broadcast_from_process_0(f'.shared-{os.urandom(4).hex()}')
    is_writing = jax.process_index() == 0 and not self.reads_only
    if self.reads_only:
      key = RECORD
    elif is_writing:
      self.run.write(key, b'')
    distributed.broadcast_from_process_0(None)  # The others wait for the file.
    is_there = self.run.read(key) is not None
    seen = multihost_utils.process_allgather(np.bool_(is_there))
    if is_writing:
      self.run.delete(key)
    if seen[0] and not seen.all():
      raise errors.UsageError(
        f'Processes {np.flatnonzero(~seen).tolist()} cannot see files that'
        ' process 0 writes to config.checkpoint_dir'
        f' ({self.config.checkpoint_dir!r} in process {jax.process_index()}).'
        ' Use one directory on a file system that all processes share.'
      )

  def raise_error(self) -> None:
    self.thread.raise_error()

  def drain(self) -> None:
    """Waits until the thread has processed its queue."""
    # `wait` would raise an error that is logged at the end anyway.
    done = threading.Event()
    with contextlib.suppress(RuntimeError):  # The thread has ended.
      self.thread.put(done.set)
      done.wait()

  def close(self) -> None:
    """Waits for the queue, and releases all claims."""
    self.drain()
    for claim in filter(None, [*self.claims.values()][::-1]):
      claim.release()
    self.claims.clear()

  # Notes.

  def begin(self, step: int) -> None:
    """Notes the step at which training (re)starts, and the config.

    Removes the notes of evaluations of later steps, which will be repeated.
    """
    if jax.process_index() != 0:
      return
    self.run.write(RECORD, disk.to_json(self.recorded))
    # The nonce makes the content differ at each start.
    begun = {'step': step, 'nonce': secrets.token_hex(8)}
    self.store.write(BEGUN, disk.to_json(begun))
    self.store.delete(notes.ENDED)
    with _noting:
      for name in self.store.names('evaluated'):
        noted = self._read_notes(name)
        if any(x.step > step for x in noted):
          self._write_notes(name, [x for x in noted if x.step <= step])

  def end(self, step: int, why: str = '') -> None:
    if jax.process_index() == 0 and not self.reads_only:
      # A separate evaluation may have noted a reason.
      why = why or notes.read_end(self.store).get('why', '')
      self.store.write(
        notes.ENDED, disk.to_json({'step': int(step), 'why': why})
      )

  def ended(self) -> int | None:
    return distributed.broadcast_from_process_0(
      notes.read_end(self.store).get('step')
    )

  def stop_if_noted(self, step: int) -> None:
    end, rows = {}, []
    if jax.process_index() == 0:
      end = notes.read_end(self.store)
      if notes.early_stop(self.config).is_on:
        rows = [x[:3] for x in self.noted() if x.step <= step]
    end, rows = distributed.broadcast_from_process_0((end, rows))
    if end.get('why') and end['step'] <= step:
      place = f'{self.store}/{notes.ENDED}'
      raise errors.StopTraining(end['why'], f'remove {place}')
    notes.check_early_stopping(
      self.config, [notes.EvaluationNote(*row) for row in rows]
    )

  def evaluated(self) -> list[notes.EvaluationNote]:
    """Returns the notes of this mode, as process 0 reads them."""
    is_chief = jax.process_index() == 0
    rows = distributed.broadcast_from_process_0(
      self.noted() if is_chief else []
    )
    noted = [notes.EvaluationNote(*row) for row in rows]
    return [x._replace(lengths=self.local(x.lengths)) for x in noted]

  def note_evaluation(
    self, step: int, value: float | None, flush: Callable[[], Mapping[str, int]]
  ) -> None:
    if not self.reads_only:
      self.thread.submit(self._note, step, value, flush)

  def _note(
    self, step: int, value: float | None, flush: Callable[[], Mapping[str, int]]
  ) -> None:
    # Flush first: a noted evaluation must be in the log.
    lengths = distributed.gather_and_decide(self._uploaded(flush()), merged)
    if jax.process_index() != 0:
      return
    data = self.saved_data if step == self.saved_step else ''
    metric = '' if value is None else notes.early_stop(self.config).metric
    with _noting:
      # Keep all: an evaluation that continues through its data finds its place
      # by the number of notes. Steps are evaluated in ascending order.
      row = notes.EvaluationNote(step, metric, value, data, lengths)
      self._write_notes(self._own, [*self.noted(), row])

  @property
  def _own(self) -> str:
    return f'{self.mode if self.follows else "eval"}.json'

  def noted(self) -> list[notes.EvaluationNote]:
    """Returns the notes of this mode, as this process reads them."""
    return self._read_notes(self._own)

  def _read_notes(self, name: str) -> list[notes.EvaluationNote]:
    if (raw := self.store.read(f'evaluated/{name}')) is None:
      return []
    try:
      place = f'{self.store}/evaluated/{name}'
      rows = notes.unpack(place, raw, notes.EVALUATED)['evaluated']
    except ValueError as e:
      raise store_lib.RefusedError(
        f'{e}. Remove the file to evaluate all kept checkpoints again; this'
        ' replaces their records in the evaluation log.'
      ) from e
    return [notes.EvaluationNote(*row) for row in rows]

  def _write_notes(self, name: str, noted: list[notes.EvaluationNote]) -> None:
    self.store.write(f'evaluated/{name}', notes.to_bytes({'evaluated': noted}))

  # Logs. Notes hold their relative paths, because a run may be moved.

  def resume_log(
    self,
    log: writers.MetricWriter,
    last: int | None,
    lengths: Mapping[str, int],
  ) -> bool:
    # The logs of a run that has moved belong to an earlier training.
    if not self._has_moved:
      with debug.log_activity('resuming the logs'):
        log.resume(-1 if last is None else last, lengths)
    # `flush` lists the log's files; a log without files was not truncated.
    return last is None or (not lengths and bool(log.flush()))

  def flush_logs(self) -> Callable[[], dict[str, int]]:
    """Starts flushing all records so far.

    Returns:
      A function that waits for the flush and returns the lengths of the files.
    """
    flushes = [log.flush_async() for log in self.logs]
    return lambda: self._uploaded(merged(flush() or {} for flush in flushes))

  def _uploaded(self, lengths: Mapping[str, int]) -> dict[str, int]:
    """Uploads the logs if the run is in a bucket; returns relative paths."""
    top = logs.directory(self.run.url)
    found = {os.path.relpath(path, top): n for path, n in lengths.items()}
    own = {x: n for x, n in found.items() if not x.startswith('..')}
    logs.upload(self.run.url, own)
    return own

  def local(self, lengths: Mapping[str, int]) -> dict[str, int]:
    """Replaces relative paths of logs by the paths of this process."""
    top = logs.directory(self.run.url)
    return {str(top / name): length for name, length in lengths.items()}


def merged(lengths: Iterable[Mapping[str, int]]) -> dict[str, int]:
  """Merges the lengths of the logs of all processes."""
  return {name: n for of_one in lengths for name, n in of_one.items()}
