"""The directory of a run: the files beside its checkpoints.

    config.json                      the config that training goes on with
    checkpoints/begun.json           the step from which it goes on
    checkpoints/ended.json           the step at which training has ended, why
    checkpoints/evaluated/MODE.json  evaluations, see `notes.EvaluationNote`
    claims/NAME.lock                 who may write a log or a series

Each of these files is small and replaced whole. The logs grow; a checkpoint
holds their lengths, to which a resume cuts them.
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

# A training and an evaluation thread may change the same note.
_noting = threading.Lock()


class RunDirectory:
  """What a run keeps beside its checkpoints; this one keeps nothing.

  All processes of a run call its methods together.

  Attributes:
    keeps: whether a later process can go on from what is kept. Only then is
      what was logged after the restored step void.
    follows: whether another checkpointer saves `latest`, which this one only
      reads.
    reads_only: whether nothing is written.
    poll_secs: how long an evaluation waits at least before it looks again.
    saved_step: the step of the run's own checkpoint of `latest` that was
      restored or became complete last; None if there is none on disk.
    saved_data: the name of the data of that checkpoint.
    logs: writers and actions whose records up to a checkpoint of `latest` are
      on disk before it becomes visible.
    lengths: path -> length in bytes of each log file, as of the restored
      checkpoint of the run itself.
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
    """Notes that training goes on from a step, with the run's config."""

  def end(self, step: int, why: str = '') -> None:
    """Notes that training has ended at a step, with the reason if early."""

  def ended(self) -> int | None:
    """Returns the step at which training has ended, or None."""
    return None

  def stop_if_noted(self, step: int) -> None:
    """Raises StopTraining in all processes if the notes end it by a step."""

  def evaluated(self) -> list[notes.EvaluationNote]:
    """Returns the noted evaluations of this mode."""
    return []

  def note_evaluation(
    self, step: int, value: float | None, flush: Callable[[], Mapping[str, int]]
  ) -> None:
    """Queues a note of an evaluation, behind the checkpoints so far.

    Args:
      step: the step.
      value: the metric of early stopping; None without one.
      flush: waits until the records of the evaluation are safe; returns
        path -> length of the files in bytes.
    """

  def resume_log(
    self,
    log: writers.MetricWriter,
    last: int | None,
    lengths: Mapping[str, int],
  ) -> bool:
    """Removes records of steps that run again.

    Args:
      log: the log of training or of evaluation.
      last: the last step that does not run again; None if all steps do.
      lengths: path -> the length to which each file is cut.

    Returns:
      Whether the log begins anew.
    """
    del log, last, lengths
    return True

  def claim(self, name: str) -> None:
    """Takes the right to write a series; raises ClaimedError if it is taken."""

  def check_shared(self) -> None:
    """Raises UsageError where not all processes see the same directory."""

  def raise_error(self) -> None:
    """Raises the error of a write in the background; costs nothing."""


class ConfigOnly(RunDirectory):
  """Keeps the config alone: that of a run with its checkpoints in memory."""

  def __init__(self, recorded: Mapping[str, Any]):
    """Takes the run's config, as `base_config.recorded` returns it."""
    self._recorded = recorded

  def begin(self, step: int) -> None:
    if jax.process_index() == 0:
      store = store_lib.at(self._recorded['checkpoint_dir'])
      store.write(RECORD, disk.to_json(self._recorded))


class DurableDirectory(RunDirectory):
  """A directory on a disk or in a bucket, which all processes see.

  Attributes:
    recorded: the config as `base_config.recorded` returns it.
    run: the store at the directory.
    store: the store at the folder `checkpoints` in it.
    thread: writes checkpoints and notes, in order.
    claims: the claims of process 0, by the name of a series.
  """

  keeps = True

  def __init__(
    self, config: config_dict.ConfigDict, recorded: dict[str, Any], mode: str
  ):
    """Reads the config; touches no file.

    Args:
      config: the run's, resolved.
      recorded: the same, as `base_config.recorded` returns it.
      mode: the run's mode, or its half's: 'train', 'eval'. It names the notes
        of evaluation, if the run follows another one.
    """
    self.config, self.recorded = config, recorded
    self.follows = not mode.startswith('train')
    self.mode = mode
    # One thread for all series: on several hosts the processes meet while
    # they write, and must do so in one order.
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
    """Goes on in another directory; the logs stay where they are."""
    self.close()
    self._set_place(directory)
    self.saved_step, self._has_moved = None, True

  def claim(self, name: str) -> None:
    if name in self.claims:
      return
    is_chief = jax.process_index() == 0
    claim = owner.Claim(self.run.url, name) if is_chief else None
    distributed.broadcast_from_process_0(
      None
    )  # The others look at the directory afterwards.
    self.claims[name] = claim

  def check_shared(self) -> None:
    if jax.process_count() == 1:
      return
    # A new name: a network file system may remember that an old one was absent.
    key = distributed.broadcast_from_process_0(f'.shared-{os.urandom(4).hex()}')
    is_writing = jax.process_index() == 0 and not self.reads_only
    if self.reads_only:
      key = RECORD
    elif is_writing:
      self.run.write(key, b'')
    distributed.broadcast_from_process_0(
      None
    )  # The others look once it is there.
    is_there = self.run.read(key) is not None
    seen = multihost_utils.process_allgather(np.bool_(is_there))
    if is_writing:
      self.run.delete(key)
    if seen[0] and not seen.all():
      raise errors.UsageError(
        f'config.checkpoint_dir is {self.config.checkpoint_dir!r} in process'
        f' {jax.process_index()}, but processes'
        f' {np.flatnonzero(~seen).tolist()} do not see there what process 0'
        ' writes. All processes save together: give all the same directory,'
        ' on a disk that all of them share.'
      )

  def raise_error(self) -> None:
    self.thread.raise_error()

  def drain(self) -> None:
    """Waits for the queue of the thread."""
    # Not `wait`: an error that nobody has seen is still logged at the end.
    done = threading.Event()
    with contextlib.suppress(RuntimeError):  # The process ends; all is run.
      self.thread.put(done.set)
      done.wait()

  def close(self) -> None:
    """Waits for the queue, and gives back all claims."""
    self.drain()
    for claim in filter(None, [*self.claims.values()][::-1]):
      claim.release()
    self.claims.clear()

  # Notes.

  def begin(self, step: int) -> None:
    """Notes that training goes on from a step, with this config.

    Notes of evaluations of later steps are removed: those steps run again.
    """
    if jax.process_index() != 0:
      return
    self.run.write(RECORD, disk.to_json(self.recorded))
    # Another content at each start.
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
      # An evaluation beside it may have given a reason.
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
    """Returns the notes of this mode, which the first host reads."""
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
    # First: what is noted as evaluated is in the log.
    lengths = distributed.gather_and_decide(self._uploaded(flush()), merged)
    if jax.process_index() != 0:
      return
    data = self.saved_data if step == self.saved_step else ''
    metric = '' if value is None else notes.early_stop(self.config).metric
    with _noting:
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      row = notes.EvaluationNote(step, metric, value, data, lengths)
      self._write_notes(self._own, [*self.noted(), row])

  @property
  def _own(self) -> str:
    return f'{self.mode if self.follows else "eval"}.json'

  def noted(self) -> list[notes.EvaluationNote]:
    """Returns the notes of this mode that this process reads."""
    return self._read_notes(self._own)

  def _read_notes(self, name: str) -> list[notes.EvaluationNote]:
    if (raw := self.store.read(f'evaluated/{name}')) is None:
      return []
    try:
      place = f'{self.store}/evaluated/{name}'
      rows = notes.unpack(place, raw, notes.EVALUATED)['evaluated']
    except ValueError as e:
      raise store_lib.RefusedError(
        f'{e}. Remove it to evaluate the checkpoints that are kept again; their'
        ' records in the log of evaluation are replaced.'
      ) from e
    return [notes.EvaluationNote(*row) for row in rows]

  def _write_notes(self, name: str, noted: list[notes.EvaluationNote]) -> None:
    self.store.write(f'evaluated/{name}', notes.to_bytes({'evaluated': noted}))

  # Logs. Files name them by relative paths, because a run may be moved.

  def resume_log(
    self,
    log: writers.MetricWriter,
    last: int | None,
    lengths: Mapping[str, int],
  ) -> bool:
    # Those of a run that has moved belong to an earlier training.
    if not self._has_moved:
      with debug.log_activity('resuming the logs'):
        log.resume(-1 if last is None else last, lengths)
    # `flush` names the log's files; a writer without files was not cut.
    return last is None or (not lengths and bool(log.flush()))

  def flush_logs(self) -> Callable[[], dict[str, int]]:
    """Begins to flush the logs, up to the records so far.

    Returns:
      A function that waits for that, and returns the lengths of the files.
    """
    flushes = [log.flush_async() for log in self.logs]
    return lambda: self._uploaded(merged(flush() or {} for flush in flushes))

  def _uploaded(self, lengths: Mapping[str, int]) -> dict[str, int]:
    """Uploads the logs of a run in a bucket; returns relative paths."""
    top = logs.directory(self.run.url)
    found = {os.path.relpath(path, top): n for path, n in lengths.items()}
    own = {x: n for x, n in found.items() if not x.startswith('..')}
    logs.upload(self.run.url, own)
    return own

  def local(self, lengths: Mapping[str, int]) -> dict[str, int]:
    """Returns lengths of logs by the paths at which this process has them."""
    top = logs.directory(self.run.url)
    return {str(top / name): length for name, length in lengths.items()}


def merged(lengths: Iterable[Mapping[str, int]]) -> dict[str, int]:
  """Returns the lengths of the logs of all processes."""
  return {name: n for of_one in lengths for name, n in of_one.items()}
