"""Writes checkpoints in the background, and removes old ones.

`write` gets a copy of the state (`contents`), already in host memory. It waits
until the logs are on disk, writes the arrays as new data (`arrays`) and, as the
last file, the manifest. `apply_retention` removes checkpoints, and deletes data
that no manifest names (`manifests`).
"""

from collections.abc import Callable, Collection, Mapping
import secrets
import textwrap
import time
from typing import Any

from absl import logging
import jax

from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.parallel import distributed
from jaxline.run_directory import directory as directory_lib
from jaxline.run_directory import owner
from jaxline.run_directory import sources


class Saver:
  """Writes the checkpoints of a run; its methods run on one thread.

  Attributes:
    manifests: the run's manifests.
    restored: the manifest of `latest` that was restored; {} if there is none.
  """

  def __init__(self, directory: directory_lib.DurableDirectory):
    """Touches no file."""
    self._directory, self._store = directory, directory.store
    self.manifests = manifests_lib.Manifests(self._store)
    self.restored: dict[str, Any] = {}
    # The code that `write_code` has found.
    self._files, self._code = dict[str, bytes](), dict[str, str]()
    self._num_looks = 0
    # The mark keeps data that an evaluation reads, or that has no manifest yet.
    mark = f'readers/{directory.mode}-{secrets.token_hex(4)}.json'
    self._mark, self._marked = owner.Heartbeat(self._store, mark), set[str]()

  def write(
    self,
    series: str,
    step: int,
    flush: Callable[[], Mapping[str, int]],
    content: contents.Content | None,
    added: dict[str, Any],
  ) -> None:
    """Writes a checkpoint.

    Args:
      series: the series.
      step: the step.
      flush: waits until earlier records are on disk; returns the logs' lengths.
      content: a copy of the live state; None to share the data of `latest`.
      added: the entries that `best` adds to the state's.
    """
    lengths = flush()
    data, described, process = '', dict[str, Any](), dict[str, Any]()
    error: Exception | None = None
    if content is not None:
      process = content.process
      data = distributed.gather_and_decide(
        None, lambda _: manifests_lib.new_data(step)
      )
      if series == 'best':  # Without a mark, training could delete the data.
        self.keep_data([data])
      try:
        place = self._store.below(f'data/{data}')
        described = arrays.write(place, content.arrays)
        content.arrays.clear()  # Free the copy before the next save makes one.
      except Exception as e:
        error = e

    def publish(all_of: list[Any]) -> None:
      """Writes the manifest; called in process 0."""
      if content is None:
        follows = self._directory.follows
        read = self.manifests.read
        manifest = self.restored if follows else read('latest', step)
      else:
        for others, _, _ in all_of[1:]:
          for name, about in others.items():
            described[name]['parts'].update(about['parts'])
        manifest = content.manifest | {
          'data': data,
          'arrays': described,
          'processes': [process for _, process, _ in all_of],
          'logs': directory_lib.merged(lengths for _, _, lengths in all_of),
          'code': self.write_code(),
        }
      claim = self._directory.claims[series]
      assert claim is not None
      if series == 'best':
        # Renew the mark, which may have expired if this process was suspended.
        self.keep_data([manifest['data']])
        entries = manifest['entries'] | added['entries']
        # Keep timestamps increasing even if the clock went back.
        times = self.manifests.times('best').values()
        when = max([time.time(), *(t + 1 for t in times)])
        manifest = manifest | added | {'entries': entries, 'time': when}
      self.manifests.write(series, manifest, claim.check)
      logging.info('Saved %s/%s/%s.', self._store, series, step)

    distributed.gather_and_decide((described, process, lengths), publish, error)
    if series == 'latest':
      self._directory.saved_step, self._directory.saved_data = step, data

  def apply_retention(self, series: str, num_to_keep: int) -> None:
    """Removes the checkpoints of a series that the config does not keep."""
    if jax.process_index() != 0 or self._directory.thread.error is not None:
      return
    manifests, config = self.manifests, self._directory.config
    if series == 'best':
      # The last save of `best` is the best one, regardless of its step.
      gone = manifests.by_time(series)[num_to_keep:]
    else:
      hours = config.keep_checkpoint_every_hours
      times = dict.fromkeys(manifests.steps(series), 0.0)
      gone = manifests_lib.steps_to_delete(
        (manifests.times(series) if hours else times).items(),
        num_to_keep,
        config.keep_checkpoint_every_steps,
        hours,
      )
    manifests.delete_manifests(series, gone)
    manifests.collect_garbage()

  def keep_data(self, data: Collection[str] = ()) -> None:
    """Marks data for a training process to keep; removes earlier marks."""
    is_marking = self._directory.follows or self._marked
    if jax.process_index() or self._directory.reads_only or not is_marking:
      return
    if data:
      self._mark.write(data=sorted(data))
    else:
      self._mark.stop()
    # Delete earlier marked data if nothing else names it.
    self.manifests.collect_garbage(self._marked - {*data})
    self._marked = {*data}

  def clean(self) -> None:
    """Removes leftovers of killed processes, and warns of changed code."""
    self.write_code()  # The user may edit the code before the first save.
    left = (*self._store.names('data'), *self._store.names('doomed'))
    self.manifests.collect_garbage(left)
    before = sources.read(
      self._store, self.restored.get('code', {}).get('files')
    )
    # Compare only common files: a different program imports different files.
    if names := [k for k, x in self._files.items() if before.get(k, x) != x]:
      text = 'The code has changed since step %s was saved. The run uses the'
      text += ' current code of: %s.'
      shown = textwrap.shorten(', '.join(names), 400)
      logging.warning(text, self.restored['step'], shown)

  def write_code(self) -> dict[str, str]:
    """Returns the manifest's field `code`; writes each set of files once."""
    config = self._directory.config
    if self._num_looks < 2:  # The first step may import more files.
      self._num_looks += 1
      files = sources.add_imported(self._files)
      self._code = contents.code() | {'files': files}
      if config.record_code and config.record_git_diff:
        sources.write(self._store, files, self._files)
    return self._code
