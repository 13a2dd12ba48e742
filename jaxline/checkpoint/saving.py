"""The writing half of the durable checkpointer: checkpoints, and notes.

`save` copies the state to host memory (`contents`) and returns. A background
thread waits until the logs are safe, writes the arrays as fresh data (`arrays`)
and, as its last file, the manifest. Then it retires checkpoints, and collects
data that no manifest names (`manager`).

Notes are small files beside the checkpoints; each is replaced whole:

    config.json                      the config that training goes on with
    checkpoints/begun.json           the step from which it goes on
    checkpoints/ended.json           the step at which training has ended, why
    checkpoints/evaluated/MODE.json  evaluations, see `checkpointing.Evaluation`
    checkpoints/code/HASH.diff       uncommitted changes of the code
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
import contextlib
import functools
import os
import secrets
import threading
import time
import types
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import async_lib
from jaxline import base_config
from jaxline import checkpointing
from jaxline import disk
from jaxline import distributed
from jaxline import errors
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import manager
from jaxline.checkpoint import memory
from jaxline.compat import experiments
from jaxline.storage import owner
from jaxline.storage import spool
from jaxline.storage import store as store_lib

BEGUN = 'begun.json'

# A training and an evaluation thread may change the same note.
_noting = threading.Lock()


class SavingCheckpointer(checkpointing.FullCheckpointer):
  """The part of a durable checkpointer that writes.

  On several hosts all call `save` at the same steps.
  """

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Reads the config; touches no file.

    Args:
      config: the run's, resolved.
      mode: the run's mode, or its half's: 'train', 'eval'. It names the notes
        of evaluation, if the checkpointer follows another run.
    """
    self._config = config
    # Before the experiment is constructed, which may change its own config.
    self._recorded = base_config.recorded(config)
    self._mode = mode
    self._allow_pickle = bool(config.checkpoint_allow_pickle)
    self._live = threading.local()
    # One thread for all series: on several hosts the processes meet while
    # they write, and must do so in one order.
    self._writer = async_lib.SerialExecutor('checkpoint')
    self._saving: futures.Future[None] | None = None
    # By series; process 0 has the claims.
    self._claims: dict[str, owner.Claim | None] = {}
    self._move(config.checkpoint_dir)
    # Keeps data that an evaluation reads, or writes and has not named yet.
    mark = f'readers/{mode}-{secrets.token_hex(4)}.json'
    self._mark, self._marked = owner.Beat(self._store, mark), set[str]()

  def _move(self, directory: str) -> None:
    """Sets the directory of the run."""
    self._run = store_lib.at(directory)
    self.poll_secs = self._run.poll_secs
    self._manifests = manager.Manifests(self._run.below('checkpoints'))
    self._store = self._manifests.store
    # The manifest of `latest` that was restored, and its last step that was
    # restored or saved.
    self._restored: dict[str, Any] = {}
    self._held_step: int | None = None
    self.saved_step = None

  # The protocol.

  def get_experiment_state(self, ckpt_series: str) -> Any:
    # Programs written against JAXline look at the series there.
    memory.add_series(ckpt_series)
    state = checkpointing.ExperimentState()
    return vars(self._live).setdefault(ckpt_series, state)

  def save(self, ckpt_series: str) -> None:
    """Copies the live state to host memory, and queues the write.

    Raises:
      TypeError: a value in it cannot be stored.
      Exception: the error of an earlier save.
    """
    self.claim(ckpt_series)
    if self._saving is not None:  # Host memory holds one copy of the state.
      futures.wait([self._saving])
    self.raise_error()
    state = self.get_experiment_state(ckpt_series)
    module = experiments.full_experiment(state.get('experiment_module'))
    config, step = self._config, int(state['global_step'])
    is_best = ckpt_series == 'best'
    added = contents.added(state, self._allow_pickle) if is_best else {}
    content = None
    # `best` can name the data of `latest` if that has this step and evaluation
    # changes nothing that a checkpoint holds. Otherwise copy the state.
    names_latest = module.EVALUATION_IS_PURE and step == self._held_step
    if not (is_best and names_latest):
      kind = 'best' if is_best else 'train'
      content = contents.content(
        state,
        module,
        self._recorded,
        all_hosts=config[f'{kind}_checkpoint_all_hosts'],
        allow_pickle=self._allow_pickle,
      )
    # Queue the flush now, so that it covers this step and not later ones.
    logs = self.logs if ckpt_series == 'latest' else ()
    flushes = [log.flush_async() for log in logs]
    nodes = content.nodes if content else {}
    published = self._published(ckpt_series, step, module, nodes)
    if ckpt_series == 'latest':
      self._held_step = step
    self._saving = self._writer.submit(
      self._write, ckpt_series, step, flushes, content, added, published
    )
    keep = checkpointing.num_to_keep(config, ckpt_series, module)
    # A call of its own: the next save waits for the write, not for removals.
    self._writer.put(functools.partial(self._retire, ckpt_series, keep))

  def wait_for_checkpointing_to_finish(self) -> None:
    self._writer.wait()

  # What the loops ask for besides.

  def steps(self, ckpt_series: str) -> list[int]:
    return self._manifests.steps(ckpt_series)

  def when_saved(self, fn: Callable[[], None]) -> None:
    self._writer.submit(fn)

  def raise_error(self) -> None:
    self._writer.raise_error()

  def close(self) -> None:
    # Not `wait`: an error that nobody has seen is still logged at the end.
    done = threading.Event()
    with contextlib.suppress(RuntimeError):  # The process ends; all is run.
      self._writer.put(done.set)
      done.wait()
    with contextlib.suppress(OSError):  # The next start collects the rest.
      self._keep_data(())
    for claim in filter(None, [*self._claims.values()][::-1]):
      claim.release()
    self._claims.clear()

  def claim(self, ckpt_series: str) -> None:
    """Takes the right to save a series, which the first use also does.

    Raises:
      ClaimedError: another process has it.
    """
    if ckpt_series in self._claims:
      return
    is_chief = jax.process_index() == 0
    claim = owner.Claim(self._run.url, ckpt_series) if is_chief else None
    distributed.of_chief(None)  # The others look at the directory afterwards.
    self._claims[ckpt_series] = claim

  # On the writing thread.

  def _write(
    self,
    series: str,
    step: int,
    flushes: Sequence[Callable[[], Any]],
    content: contents.Content | None,
    added: dict[str, Any],
    published: memory.Published,
  ) -> None:
    """Writes a checkpoint.

    Args:
      series: the series.
      step: the step.
      flushes: wait until the earlier records are safe, and return the lengths
        of the logs.
      content: a copy of the live state; None if that is `latest` of this step.
      added: the entries of `best` besides those of the state.
      published: the same checkpoint for programs written against JAXline.
    """
    lengths = self._relative(_merged(flush() or {} for flush in flushes))
    spool.upload(self._run.url, lengths)
    data, described, process = '', dict[str, Any](), dict[str, Any]()
    error: Exception | None = None
    if content is not None:
      process = content.process
      data = distributed.decide(None, lambda _: manager.new_data(step))
      if series == 'best':  # No manifest names it yet: training may collect.
        self._keep_data([data])
      try:
        place = self._store.below(f'data/{data}')
        described = arrays.write(place, content.arrays)
      except Exception as e:
        error = e

    def publish(all_of: list[Any]) -> None:
      """Writes the manifest, in process 0."""
      if content is None:
        manifest = self._latest(step)
        if not manifest:
          raise store_lib.DamagedError(
            f'{self._store}/latest/{step} is damaged or was removed, and so'
            ' cannot be the best.'
          )
      else:
        for others, _, _ in all_of[1:]:
          for name, about in others.items():
            described[name]['parts'].update(about['parts'])
        manifest = content.manifest | {
          'data': data,
          'arrays': described,
          'processes': [process for _, process, _ in all_of],
          'logs': _merged(lengths for _, _, lengths in all_of),
          'code': self._code(),
        }
      claim = self._claims[series]
      assert claim is not None
      if series == 'best':
        # The mark of a suspended process has kept nothing.
        self._keep_data([manifest['data']])
        entries = manifest['entries'] | added['entries']
        # Keep timestamps increasing even if the clock went back.
        times = self._manifests.times('best').values()
        when = max([time.time(), *(t + 1 for t in times)])
        manifest = manifest | added | {'entries': entries, 'time': when}
      self._manifests.write(series, manifest, claim.check)
      logging.info('Saved %s/%s/%s.', self._store, series, step)

    distributed.decide((described, process, lengths), publish, error)
    if series == 'latest':
      self.saved_step = step
    memory.publish(series, published)

  def _retire(self, series: str, num_to_keep: int) -> None:
    """Removes the checkpoints of a series that the config does not keep."""
    if jax.process_index() != 0 or self._writer.error is not None:
      return
    manifests = self._manifests
    if series == 'best':
      # The newest save of `best` is the best one, whatever its step.
      gone = manifests.by_time(series)[num_to_keep:]
    else:
      hours = self._config.keep_checkpoint_every_hours
      times = dict.fromkeys(manifests.steps(series), 0.0)
      gone = manager.removable(
        (manifests.times(series) if hours else times).items(),
        num_to_keep,
        self._config.keep_checkpoint_every_steps,
        hours,
      )
    manifests.retire(series, gone)
    manifests.collect()

  # What is there.

  def _keep_data(self, data: Collection[str]) -> None:
    """Marks data, so that the training beside this evaluation keeps it."""
    if jax.process_index() != 0 or self.reads_only or not self.follows:
      return
    if data:
      self._mark.write(data=sorted(data))
    else:
      self._mark.stop()
    # The mark alone may have kept the data that was marked before.
    self._manifests.collect(self._marked - {*data})
    self._marked = {*data}

  def _latest(self, step: int) -> dict[str, Any]:
    """Returns the manifest of `latest` of a step; {} if there is none."""
    if self.follows:
      return self._restored
    with contextlib.suppress(store_lib.DamagedError):
      return self._manifests.read('latest', step)
    return {}

  def _published(
    self, series: str, step: int, module: Any, nodes: dict[str, Any]
  ) -> memory.Published:
    """Returns a checkpoint for programs written against JAXline.

    Args:
      series: the series.
      step: of the checkpoint, which may not be written yet.
      module: the experiment; not kept, because it holds the live arrays.
      nodes: see `structure.encode`.
    """
    template = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
      dict(module.snapshot_template()),
    )
    attributes = dict(module.CHECKPOINT_ATTRS)
    manifests, allow_pickle = self._manifests, self._allow_pickle

    # It waits for no other process: a signal handler may call it.
    def read() -> Any:
      saved = contents.Checkpoint(manifests, series, step, allow_pickle)
      saved.nodes = nodes
      entries = {entry: entry for entry in saved.record['module']}
      everything = experiments.full_experiment(
        types.SimpleNamespace(CHECKPOINT_ATTRS=entries),
        snapshot_template=lambda: template,
        wants_restored=lambda name: True,
      )
      with saved.reading():
        entries = saved.entries(saved.record['entries'])
        snapshot = saved.snapshot(everything)
      nest = entries | {'experiment_module': snapshot}
      return memory.nest_of(nest, attributes)

    return memory.Published(step, read)

  # Notes.

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on from a step, with this config.

    Notes of evaluations of later steps are removed: those steps run again.

    Raises:
      TypeError: a save could not store a value in the live state.
    """
    state = self.get_experiment_state('latest')
    if not self._allow_pickle:
      module = experiments.full_experiment(state.get('experiment_module'))
      contents.check_storable(state, module)
    if jax.process_index() != 0:
      return
    # Later checkpoints are damaged: an intact one would have been restored.
    # First, because evaluations look for steps made anew after `BEGUN` changes.
    later = [found for found in self.steps('latest') if found > step]
    self._manifests.retire('latest', later)
    self._run.write(base_config.RECORD, disk.to_json(self._recorded))
    # Another content at each start.
    begun = {'step': step, 'nonce': secrets.token_hex(8)}
    self._store.write(BEGUN, disk.to_json(begun))
    self._store.delete(manager.ENDED)
    with _noting:
      for name in self._store.names('evaluated'):
        noted = self._read_note(name)
        if any(x.step > step for x in noted):
          self._write_note(name, [x for x in noted if x.step <= step])
    self._writer.put(self._clean)

  def _clean(self) -> None:
    """Removes what killed processes have left, on the writing thread."""
    self._code()  # Now: the user may edit it before the first save.
    left = (*self._store.names('data'), *self._store.names('doomed'))
    self._manifests.collect(left)

  def _code(self) -> dict[str, str]:
    """Returns the manifest's field; writes uncommitted changes once a run."""
    about, changes = contents.code()
    store, name = self._store.below('code'), f'{about["changed"]}.diff'
    store.mode = 0o600  # A changed file may have a password.
    if changes and self._config.record_git_diff and name not in store.names():
      store.write(name, changes.encode())
    return about

  def mark_ended(self, step: int, why: str = '') -> None:
    if jax.process_index() == 0 and not self.reads_only:
      # An evaluation beside it may have given a reason.
      why = why or manager.end(self._store).get('why', '')
      note = {'step': int(step), 'why': why}
      self._store.write(manager.ENDED, disk.to_json(note))

  def stop_if_noted(self, step: int) -> None:
    end, rows = {}, []
    if jax.process_index() == 0:
      end = manager.end(self._store)
      if checkpointing.early_stop(self._config)[1]:
        rows = [x[:3] for x in self._own_notes() if x.step <= step]
    end, rows = distributed.of_chief((end, rows))
    if end.get('why') and end['step'] <= step:
      place = f'{self._store}/{manager.ENDED}'
      raise errors.StopTraining(end['why'], f'remove {place}')
    until = [checkpointing.Evaluation(*row) for row in rows]
    checkpointing.stop_without_gain(self._config, until)

  def ended(self) -> int | None:
    return distributed.of_chief(manager.end(self._store).get('step'))

  def evaluated(self) -> list[checkpointing.Evaluation]:
    """Returns what `mark_evaluated` noted in this mode on the first host."""
    is_chief = jax.process_index() == 0
    rows = distributed.of_chief(self._own_notes() if is_chief else [])
    noted = [checkpointing.Evaluation(*row) for row in rows]
    return [x._replace(lengths=self._local(x.lengths)) for x in noted]

  def mark_evaluated(
    self, step: int, value: float | None, lengths: Mapping[str, int]
  ) -> None:
    """Notes that a step is evaluated and its results are safe."""
    if self.reads_only:
      return
    own = self._relative(lengths)
    spool.upload(self._run.url, own)
    lengths = distributed.decide(own, _merged)
    if jax.process_index() != 0:
      return
    with _noting:
      # They are evaluated in ascending order. (And counted: an evaluation that
      # goes on through its data finds its place by how many there were.)
      metric = checkpointing.early_stop(self._config)[0]
      metric = '' if value is None else metric
      data = self._latest(step).get('data', '')
      row = checkpointing.Evaluation(step, metric, value, data, lengths)
      noted = [*self._own_notes(), row]
      self._write_note(self._note, noted[-100_000:])

  @property
  def _note(self) -> str:
    return f'{self._mode if self.follows else "eval"}.json'

  def _own_notes(self) -> list[checkpointing.Evaluation]:
    return self._read_note(self._note)

  def _read_note(self, name: str) -> list[checkpointing.Evaluation]:
    """Returns the noted evaluations; none without a note.

    Raises:
      RefusedError: it is not as it was written.
    """
    if (raw := self._store.read(f'evaluated/{name}')) is None:
      return []
    try:
      place = f'{self._store}/evaluated/{name}'
      rows = manager.unpack(place, raw, manager.EVALUATED)['evaluated']
    except ValueError as e:
      raise store_lib.RefusedError(
        f'{e}. Remove it to evaluate the checkpoints that are kept again; their'
        ' records in the log of evaluation are replaced.'
      ) from e
    return [checkpointing.Evaluation(*row) for row in rows]

  def _write_note(
    self, name: str, noted: list[checkpointing.Evaluation]
  ) -> None:
    packed = manager.pack({'evaluated': noted})
    self._store.write(f'evaluated/{name}', packed)

  # Files name logs by relative paths, because a run may be moved.

  def _relative(self, lengths: Mapping[str, int]) -> dict[str, int]:
    top = spool.directory(self._run.url)
    found = {os.path.relpath(path, top): n for path, n in lengths.items()}
    return {x: n for x, n in found.items() if not x.startswith('..')}

  def _local(self, lengths: Mapping[str, int]) -> dict[str, int]:
    top = spool.directory(self._run.url)
    return {str(top / name): length for name, length in lengths.items()}


def _merged(lengths: Iterable[Mapping[str, int]]) -> dict[str, int]:
  """Returns the lengths of the logs of all processes."""
  return {name: n for of_one in lengths for name, n in of_one.items()}
