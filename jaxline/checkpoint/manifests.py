"""Manifests: the files that make the checkpoints of a run visible.

    checkpoints/latest/4000.json     exists if and only if the checkpoint does
    checkpoints/best/3000.json       a manifest can name the data of `latest`
    checkpoints/readers/NAME.json    marks the data that a reader needs
    checkpoints/data/4000-7f3a/      arrays, written before the manifest
    checkpoints/doomed/4000-7f3a/    a process is about to delete these arrays

Deleting a manifest removes a checkpoint. Data that no manifest and no reader's
mark names is then garbage-collected.

A process may be suspended for so long that its marks expire. So a process that
deletes data first dooms it, then checks again that nothing names it. A process
that names data first writes the manifest, then checks that the data is not
doomed. Whatever the order, one of the two notices the other.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import re
import secrets
from typing import Any

from absl import logging

from jaxline.base import config_record
from jaxline.base import keys
from jaxline.checkpoint import arrays
from jaxline.checkpoint import metadata
from jaxline.run_directory import notes
from jaxline.run_directory import owner
from jaxline.run_directory import store as store_lib

# The version of the files' format. Other versions are rejected.
FORMAT = 2
_STEP = '0|[1-9][0-9]*'  # Each number has exactly one name.
_DATA = re.compile(f'({_STEP})-[0-9a-f]+')


def _texts(x: Any) -> Iterator[str]:
  """Yields all strings in a JSON value, among them the names of its arrays."""
  if isinstance(x, str):
    yield x
  elif isinstance(x, list | dict):
    for y in x.values() if isinstance(x, dict) else x:
      yield from _texts(y)


def _is_of_one_step(manifest: dict[str, Any]) -> bool:
  """Returns whether the fields of a manifest belong together."""
  step, module = manifest['step'], manifest['module']
  used = {*_texts([manifest['entries'], *module.values()])}
  trees = tuple(f'{x}/' for x, about in module.items() if 'leaves' in about)
  for name, about in manifest['arrays'].items():
    is_used = name in used or f'{name}/'.startswith(trees)
    if not is_used or not metadata.is_folder_of(about['file'], name):
      raise ValueError(f'the array {name!r} is in {about["file"]!r}')
  # `collect_garbage` searches only manifests of the data's step.
  of = [manifest['entries']['global_step'], int(manifest['data'].split('-')[0])]
  if of != [step, step]:
    raise ValueError(f'its entries and data have the steps {of}, not {step}')
  return bool(manifest['processes'])


_PLAIN = keys.optional(keys.Check('plain', lambda x: isinstance(x, int | str)))
_OWN = keys.record(
  lambda own: 'structure' in own and {*own['arrays']} <= {*_texts(own)},
  arrays=keys.each(arrays.SMALL),
)
# A manifest may lack these fields, which then have these values.
_MISSING: Any = {'small': {}, 'code': {}, 'versions': {}, 'devices': []}
_MANIFEST = keys.record(
  _is_of_one_step,
  format=keys.Check(
    f'{FORMAT}; use the jaxline that wrote it', lambda x: x == FORMAT
  ),
  step=keys.integer(0, below=2**63),
  time=keys.number(0, below=2e11),  # Up to the year 8000.
  data=keys.text('the name of data', _DATA.pattern),
  arrays=keys.each(arrays.DESCRIBED),
  entries=keys.record(
    global_step=keys.integer(0),
    best_eval_metric_value=keys.optional(notes.NUMBER),
  ),
  module=keys.each(
    keys.Check(
      "{'leaves': True} or {'structure': ...}",
      lambda x: x == {'leaves': True} or [*x] == ['structure'],
    )
  ),
  processes=keys.each(keys.each(_OWN), list),
  logs=notes.LENGTHS,
  config=config_record.RECORDED,
  small=keys.optional(keys.each(arrays.SMALL)),
  code=keys.optional(keys.each(_PLAIN)),
  versions=keys.optional(keys.each(_PLAIN)),
  devices=keys.optional(keys.each(_PLAIN, list)),
)
_MARK = keys.record(data=keys.each(keys.text('the name of data'), list))


class Manifests:
  """The manifests of a run; `store` is RUN/checkpoints."""

  def __init__(self, store: store_lib.Store):
    self.store = store
    self._seen: dict[str, tuple[Any, float]] = {}  # Marks: see `owner.is_old`.
    self._gc_candidates: set[str] = set()

  def steps(self, series: str) -> list[int]:
    """Returns the steps of a series' checkpoints in ascending order."""
    names = self.store.names(series)
    if any(re.fullmatch(_STEP, name) for name in names):
      raise store_lib.RefusedError(
        f'{self.store}/{series} has checkpoints of a different format; this'
        f' jaxline reads format {FORMAT}. Use the jaxline that wrote them, or a'
        ' different config.checkpoint_dir.'
      )
    found = (re.fullmatch(rf'({_STEP})\.json', name) for name in names)
    return sorted(int(match[1]) for match in found if match)

  def read(self, series: str, step: int) -> dict[str, Any]:
    """Reads a manifest.

    Raises:
      GoneError: the series has no manifest of this step.
      DamagedError: the checksum of the manifest does not match.
      RefusedError: the manifest is invalid, or belongs to a different step.
    """
    name = f'{self.store}/{series}/{step}.json'
    raw = self.store.read(f'{series}/{step}.json')
    if raw is None:
      raise store_lib.GoneError(
        f'{name} was removed: the run keeps only the newest. Try again.'
      )
    found = notes.unpack(name, raw, _MANIFEST)
    if found['step'] != step:
      raise store_lib.RefusedError(f'{name} belongs to step {found["step"]}.')
    return _MISSING | {k: x for k, x in found.items() if x is not None}

  def write(
    self,
    series: str,
    manifest: dict[str, Any],
    check: Callable[..., None] = lambda **_: None,
  ) -> None:
    """Writes a manifest, which makes the checkpoint visible.

    A manifest of `best` is reverted if this process loses the right to write,
    or if the data is lost. (No process collects the data of `latest`.) Reading
    all parts would take too long, so only a restore verifies their checksums.

    `check` raises an error if the right to write is lost.

    Raises:
      LostClaimError: another process has made a checkpoint of this step.
      DamagedError: the data is damaged, or is being deleted.
    """
    key = f'{series}/{manifest["step"]}.json'
    before, version = self.store.versioned(key)
    expected = store_lib.NEW if series == 'latest' else version
    self._add_candidate(series, manifest['step'])  # It may replace a manifest.
    if series == 'best':  # Check now too: this process may die after the write.
      self._check_data(key, manifest)
    check()
    if self.store.write(key, notes.to_bytes(manifest), expected) is None:
      raise owner.LostClaimError(
        f'{self.store}/{key} already exists: another run writes in this'
        ' directory. Nothing was saved.'
      )
    if series == 'latest':  # A process that took over may continue from it.
      return check(renews=False)
    try:
      check(renews=False)
      self._check_data(key, manifest)
    except Exception:
      if before is None:
        self.store.delete(key)
      else:
        self.store.write(key, before)
      raise

  def _check_data(self, key: str, manifest: dict[str, Any]) -> None:
    """Raises DamagedError if data is damaged, or is being deleted."""
    data = manifest['data']
    try:
      # Check in this order: doomed data is deleted first, then its doom.
      if self.store.names(f'doomed/{data}'):
        raise store_lib.DamagedError('it is being deleted')
      place = self.store.below(f'data/{data}')
      arrays.verify(place, manifest['arrays'], reads=False)
    except store_lib.DamagedError as e:
      raise store_lib.DamagedError(
        f'{self.store}/{key} was not saved, since its data {data} was damaged'
        f' or removed ({e!s:.200}). Older checkpoints are kept. Start again.'
      ) from e

  def _add_candidate(self, series: str, step: int) -> None:
    """Makes the data of a manifest a candidate for `collect_garbage`."""
    with contextlib.suppress(ValueError):
      self._gc_candidates.add(self.read(series, step)['data'])

  def times(self, series: str) -> dict[int, float]:
    """Maps each step whose manifest is readable to the time of its save."""
    times = {}
    for step in self.steps(series):
      with contextlib.suppress(ValueError):  # `read` will report it.
        times[step] = self.read(series, step)['time']
    return times

  def by_time(self, series: str) -> list[int]:
    """Returns the steps, newest first; in `best` the last saved is newest."""
    times = self.times(series) if series == 'best' else {}
    steps = self.steps(series)[::-1]
    return sorted(steps, key=lambda step: -times.get(step, 0.0))

  def delete_manifests(self, series: str, steps: Iterable[int]) -> None:
    """Deletes manifests; `collect_garbage` deletes their data."""
    for step in steps:
      self._add_candidate(series, step)
      self.store.delete(f'{series}/{step}.json')

  def collect_garbage(self, data: Iterable[str] = ()) -> None:
    """Deletes the data of deleted manifests, and `data`, if nothing names it.

    List `data` before the call: a writer marks its data before it writes. The
    first look finds unnamed data to doom; the second decides (see the module).
    """
    self._gc_candidates |= {*filter(_DATA.fullmatch, data)}
    if not self._gc_candidates:
      return
    nonce = secrets.token_hex(4)
    free, marked = self._look()
    for name in free:
      self.store.write(f'doomed/{name}/{nonce}', b'')
    if free:
      still_free, marked = self._look()
      for name in free - still_free:
        self.store.delete(f'doomed/{name}/{nonce}')
      for name in free & still_free:
        self.store.delete_folder(f'data/{name}')
        self.store.delete_folder(f'doomed/{name}')
    self._gc_candidates &= marked

  def _look(self) -> tuple[set[str], set[str]]:
    """Returns the candidates that nothing names, and the data that is marked.

    Marks are read before `best`, because an evaluation drops its mark when
    `best` names the data. If a mark, or a manifest of one of these steps, is
    not readable, all candidates count as marked.
    """
    marked, named = set[str](), set[str]()
    doomed_steps = {int(name.partition('-')[0]) for name in self._gc_candidates}
    try:
      for name in self.store.names('readers'):
        key = f'readers/{name}'
        if (raw := self.store.read(key)) is None:
          continue
        if owner.is_old(self._seen, name, raw):
          self.store.delete(key)
          continue
        mark = store_lib.checked(f'{self.store}/{key}', raw, _MARK)
        marked |= {*mark['data']}
      steps = {series: self.steps(series) for series in ('best', 'latest')}
      for series, found in steps.items():
        for step in doomed_steps.intersection(found):
          # Read it again each time: a restarted training saves steps again.
          with contextlib.suppress(store_lib.GoneError):
            named.add(self.read(series, step)['data'])
    except ValueError as e:
      logging.log_first_n(logging.WARNING, 'No data is removed: %s', 1, e)
      steps = {}
    # GCS returns an empty list instead of an error if listing is forbidden.
    if not any(steps.values()):
      return set(), {*self._gc_candidates}
    return self._gc_candidates - marked - named, marked


def new_data(step: int) -> str:
  """Returns a name for new data."""
  return f'{step}-{secrets.token_hex(4)}'


def steps_to_delete(
  saved: Iterable[tuple[int, float]],
  newest: int,
  every_steps: int | None = None,
  every_hours: float | None = None,
) -> list[int]:
  """Returns the steps to remove from a series.

  Args:
    saved: (step, time in seconds) of each checkpoint.
    newest: number of newest checkpoints to keep.
    every_steps: also keep the first one at or after each multiple of this.
    every_hours: also keep the first one that is at least this many hours newer
      than the last one kept by this rule.
  """
  ordered, forever = sorted(saved), set[int]()
  last_multiple, last_time = 0, None
  for step, when in ordered:
    if every_steps and step // every_steps > last_multiple:
      last_multiple = step // every_steps
      forever.add(step)
    # If the clock went back since the last kept one, restart the interval.
    if every_hours and (
      last_time is None or not 0 <= when - last_time < 3600 * every_hours
    ):
      last_time = when
      forever.add(step)
  return [step for step, _ in ordered[:-newest] if step not in forever]
