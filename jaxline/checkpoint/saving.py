"""Saves checkpoints: the writing half of the durable checkpointer.

`save` copies the state to host memory (`contents`) and returns. A background
thread waits until the logs are safe, writes the arrays as fresh data (`arrays`)
and, as its last file, the manifest. Then it retires checkpoints, and collects
data that no manifest names (`manager`).
"""

from collections.abc import Callable, Collection, Sequence
from concurrent import futures
import contextlib
import functools
import threading
import time
from typing import Any

from absl import logging
import jax
from ml_collections import config_dict

from jaxline import async_lib
from jaxline import checkpointing
from jaxline import distributed
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import manager
from jaxline.checkpoint import memory
from jaxline.checkpoint import notes
from jaxline.compat import experiments
from jaxline.storage import owner
from jaxline.storage import spool
from jaxline.storage import store as store_lib


class SavingCheckpointer(notes.NotingCheckpointer):
  """The part of a durable checkpointer that saves.

  On several hosts all call `save` at the same steps.
  """

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Reads the config; touches no file.

    Args:
      config: the run's, resolved.
      mode: the run's mode, or its half's: 'train', 'eval'. One that begins
        with 'eval' only reads the series `latest`.
    """
    super().__init__(config, mode)
    self._allow_pickle = bool(config.checkpoint_allow_pickle)
    self._live = threading.local()
    # One thread for all series: on several hosts the processes meet while
    # they write, and must do so in one order.
    self._writer = async_lib.SerialExecutor('checkpoint')
    self._saving: futures.Future[None] | None = None
    # By series; process 0 has the claims.
    self._claims: dict[str, owner.Claim | None] = {}
    # The manifest of `latest` that was restored, and its last step that was
    # restored or saved.
    self._restored: dict[str, Any] = {}
    self._held_step: int | None = None
    self._mark = manager.Mark(self._store, mode)
    # Series and step of checkpoints that were found damaged.
    self._damaged: set[tuple[str, int]] = set()

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
    content, added = None, {}
    if ckpt_series == 'best':
      added = contents.added(state, self._allow_pickle)
    # `best` can name the data of `latest` if that has this step and evaluation
    # changes nothing that a checkpoint holds. Otherwise copy the state.
    names_latest = module.EVALUATION_IS_PURE and step == self._held_step
    if not (ckpt_series == 'best' and names_latest):
      kind = 'best' if ckpt_series == 'best' else 'train'
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
    published = self._published(ckpt_series, step, module)
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

  def when_saved(self, fn: Callable[[], None]) -> None:
    self._writer.submit(fn)

  def raise_error(self) -> None:
    self._writer.raise_error()

  def close(self) -> None:
    with contextlib.suppress(Exception):  # Raised where training sees it.
      self._writer.wait()
    with contextlib.suppress(OSError):  # The next start collects the rest.
      self._keep_data(())
    for claim in filter(None, self._claims.values()):
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

  def mark_begun(self, step: int) -> None:
    """Notes that training goes on from a step, with this config.

    Raises:
      TypeError: a save could not store a value in the live state.
    """
    state = self.get_experiment_state('latest')
    if not self._allow_pickle:
      module = experiments.full_experiment(state.get('experiment_module'))
      contents.check_storable(state, module)
    super().mark_begun(step)
    if jax.process_index() == 0:
      # Training saves these steps again.
      self._manifests.retire('latest', self._damaged_steps('latest'))
      self._writer.put(self._clean)

  def _clean(self) -> None:
    """Removes what killed processes have left, on the writing thread."""
    contents.code()  # Now: the user may edit it before the first save.
    self._manifests.doom_all()
    self._manifests.collect()

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
    lengths = self._relative(notes.merged(flush() or {} for flush in flushes))
    spool.upload(self._run.url, lengths)
    # If the data is the same, `best` is a second manifest that names it.
    manifest = self._latest(step) if series == 'best' else {}
    if content is not None:
      data = distributed.decide(None, lambda _: manager.new_data(step))
      if series == 'best':
        self._keep_data({data, manifest.get('data', data)})
      can_share = series == 'best' and step == self._held_step
      if not (can_share and self._are_same(content, manifest)):
        manifest = self._write_data(content, data, lengths)

    def publish(unused: Any) -> None:
      if not manifest:
        raise store_lib.DamagedError(
          f'{self._store}/latest/{step} is damaged, and so cannot be the best.'
        )
      claim = self._claims[series]
      assert claim is not None
      claim.check()
      more = {}
      if series == 'best':
        more = added | {'entries': manifest['entries'] | added['entries']}
        # Keep timestamps increasing even if the clock went back.
        times = self._manifests.times('best').values()
        more['time'] = max([time.time(), *(t + 1 for t in times)])
      self._manifests.write(series, manifest | more)
      logging.info('Saved %s/%s/%s.', self._store, series, step)

    distributed.decide(None, publish)
    self._damaged.discard((series, step))
    if series == 'latest':
      self.saved_step = step
      self._read_notes()
    memory.publish(series, published)

  def _are_same(
    self, content: contents.Content, manifest: dict[str, Any]
  ) -> bool:
    """Returns whether a manifest names everything that a content holds."""
    process = jax.process_index()
    is_same = bool(manifest) and (
      manifest['module'] == content.manifest['module']
      and manifest['entries'].items() <= content.manifest['entries'].items()
      and manifest['processes'][process] == content.process
      and arrays.are_same(content.arrays, manifest['arrays'])
    )
    return distributed.decide(is_same, all)

  def _write_data(
    self,
    content: contents.Content,
    data: str,
    lengths: dict[str, int],
  ) -> dict[str, Any]:
    """Writes the arrays of a content; returns its manifest, in process 0.

    Args:
      content: the checkpoint.
      data: the name of the data.
      lengths: of this process's logs.
    """
    described: dict[str, Any] = {}
    error = None
    try:
      place = self._store.below(f'data/{data}')
      described = arrays.write(place, content.arrays)
    except Exception as e:
      error = e
    all_of: list[Any] = []  # In process 0.
    mine = described, content.process, lengths
    distributed.decide(mine, all_of.extend, error)
    for others, _, _ in all_of[1:]:
      for name, about in others.items():
        described[name]['parts'].update(about['parts'])
    return content.manifest | {
      'data': data,
      'arrays': described,
      'processes': [process for _, process, _ in all_of],
      'logs': notes.merged(lengths for _, _, lengths in all_of),
      'code': contents.code(),
    }

  def _retire(self, series: str, num_to_keep: int) -> None:
    """Removes the checkpoints of a series that the config does not keep."""
    if jax.process_index() != 0 or self._writer.error is not None:
      return
    manifests = self._manifests
    gone = self._damaged_steps(series)
    whole = [s for s in manifests.by_time(series) if s not in gone]
    if series == 'best':
      # The newest save is the best one, whatever its step.
      gone += whole[num_to_keep:]
    else:
      hours = self._config.keep_checkpoint_every_hours
      times = manifests.times(series) if hours else dict.fromkeys(whole, 0.0)
      gone += manager.removable(
        [(s, times[s]) for s in whole if s in times],
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
    # The mark alone may have kept the data that was marked before.
    self._manifests.doom(self._mark.data - {*data})
    if data:
      self._mark.keep(data)
    else:
      self._mark.drop()
    self._manifests.collect()

  def _damaged_steps(self, series: str) -> list[int]:
    """Returns the steps whose checkpoints were found damaged."""
    return [step for of, step in self._damaged if of == series]

  def _candidates(self, series: str) -> list[int]:
    """Returns the steps to try, newest first."""
    damaged = self._damaged_steps(series)
    return [s for s in self._manifests.by_time(series) if s not in damaged]

  def _latest(self, step: int) -> dict[str, Any]:
    """Returns the manifest of `latest` of a step; {} if there is none."""
    if self.follows:
      return self._restored
    with contextlib.suppress(store_lib.DamagedError):
      return self._manifests.read('latest', step)
    return {}

  def _data_of(self, step: int) -> str:
    return self._latest(step).get('data', '')

  def _published(self, series: str, step: int, module: Any) -> memory.Published:
    """Returns a checkpoint for programs written against JAXline.

    Args:
      series: the series.
      step: of the checkpoint, which may not be written yet.
      module: the experiment; not kept, because it holds the live arrays.
    """
    template = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
      dict(module.snapshot_template()),
    )
    attributes = dict(module.CHECKPOINT_ATTRS)
    manifests, allow_pickle = self._manifests, self._allow_pickle

    def read() -> Any:
      entries = contents.read_whole(
        manifests, series, step, template, allow_pickle
      )
      return memory.nest_of(entries, attributes)

    return memory.Published(step, read)
