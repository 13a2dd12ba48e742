"""Reads one checkpoint: checks that it is whole and fits, then its arrays."""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import errno
import functools
import os
import pathlib
import re
from typing import Any, TypeVar, cast

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from jaxline import errors
from jaxline.checkpoint import base
from jaxline.checkpoint import files
from jaxline.checkpoint import storage
from jaxline.checkpoint import structure

_F = TypeVar('_F', bound=Callable[..., Any])
_T = TypeVar('_T')


class MismatchError(ValueError):
  """A checkpoint does not fit the experiment; nothing was restored."""


@dataclasses.dataclass
class _Plan:
  """What to read for an experiment.

  Attributes:
    targets: name of an array -> where it goes, a jax.ShapeDtypeStruct with a
      sharding; None is host memory.
    trees: entry -> the tree of arrays it is restored into.
  """

  targets: dict[str, Any] = dataclasses.field(default_factory=dict)
  trees: dict[str, Any] = dataclasses.field(default_factory=dict)


def _well_formed(method: _F) -> _F:
  """Makes an error of what is not in a file as a save writes it."""

  @functools.wraps(method)
  def read(*args: Any, **kwargs: Any) -> Any:
    try:
      return method(*args, **kwargs)
    except (KeyError, TypeError, AttributeError) as e:
      raise files.RefusedError(
        f'it is not written as a save writes it ({type(e).__name__}: {e})'
      ) from e

  return cast(_F, read)


class Reader:
  """Reads one checkpoint."""

  def __init__(self, listing: files.Listing, allow_pickle: bool = False):
    self._listing = listing
    self._path = listing.path
    self._record = listing.record
    self._allow_pickle = allow_pickle
    self._arrays = self._record['arrays']

  def _below(self, entry: str) -> list[str]:
    """Returns the names of an entry's arrays."""
    return [
      name
      for name in self._arrays
      if name == entry or name.startswith(f'{entry}/')
    ]

  @_well_formed
  def entries(self, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Returns entries of the live state, besides the experiment's.

    Args:
      keys: which; None is all.

    Raises:
      ValueError: the checkpoint lacks one.
    """
    described = dict(self._record['entries'])
    small: dict[str, Any] = {}
    # Only as it was written: a file that is not listed is not ours.
    if 'extra.json' in self._listing.sums:
      extra = files.read_json(self._path / 'extra.json')
      described.update(extra['entries'])
      small = storage.from_json(extra['arrays'])
    keys = list(described if keys is None else keys)
    if missing := sorted(set(keys) - set(described)):
      raise ValueError(
        f'{self._path} lacks {missing}; it holds {sorted(described)}.'
      )
    names = [n for key in keys for n in self._below(f'run/{key}')]
    arrays = self._as_live(self.read(dict.fromkeys(names))) | small
    return {key: self._decode(described[key], arrays) for key in keys}

  def _decode(self, described: Any, arrays: Mapping[str, Any]) -> Any:
    try:
      return structure.decode(
        described, arrays, allow_pickle=self._allow_pickle
      )
    except ValueError as e:
      raise files.RefusedError(str(e).rstrip('.')) from e

  def _as_live(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Makes jax.Arrays of those that were such."""
    return {
      name: jnp.asarray(x) if self._arrays[name]['kind'] == 'jax' else x
      for name, x in arrays.items()
    }

  def _shape(self, name: str) -> str:
    return storage.saved_shape(self._arrays[name])

  def _plan(self, experiment: Any) -> _Plan:
    """Says what to read, where all of it fits the experiment.

    Raises:
      MismatchError: naming each array that is missing, extra or different.
    """
    plan = _Plan(trees=template(experiment))
    names = _names_of(experiment)
    saved = {e: d for e, d in self._record['module'].items() if names(e)}
    wrong = []
    for entry, tree in plan.trees.items():
      targets = prefixed(tree, entry)
      plan.targets.update(targets)
      wanted = {n: _shape_of(x) for n, x in targets.items()}
      have = {n: self._shape(n) for n in self._below(entry)}
      wrong += [
        f'  {name}: the checkpoint has {have.get(name, "nothing")}, the'
        f' experiment expects {wanted.get(name, "nothing")}'
        for name in sorted(have.keys() | wanted.keys())
        if have.get(name) != wanted.get(name)
      ]
    wrong += [
      f'  {entry}: the experiment does not tell its shape'
      for entry, described in saved.items()
      if 'leaves' in described and entry not in plan.trees
    ]
    if wrong:
      raise MismatchError(
        f'{self._path} does not fit the experiment; nothing was restored. Use'
        ' the config it was trained with (checkpoint.json holds it), a new'
        ' config.checkpoint_dir, or config.restore_from with'
        ' config.restore_rules for what fits.\n'
        + '\n'.join(map(files.printable, wrong))
      )
    for entry in set(saved) - set(plan.trees):
      plan.targets.update(dict.fromkeys(self._below(entry)))
    return plan

  def snapshot(self, experiment: Any) -> dict[str, Any]:
    """Reads an experiment's snapshot; of what it does not want, the shapes.

    Raises:
      MismatchError: naming each array that does not fit it.
    """
    plan = self._plan(experiment)
    wants, names = wants_of(experiment), _names_of(experiment)
    # It fits: what is replaced may go, so that the devices need not hold both.
    if hasattr(experiment, 'make_room'):
      experiment.make_room()
    arrays = self.read(
      {name: x for name, x in plan.targets.items() if wants(name)}
    )
    on_host = _placed_by(experiment)
    snapshot = base.Fresh()
    for entry, described in self._record['module'].items():
      if not names(entry):
        continue
      if entry in plan.trees:
        snapshot[entry] = _with_arrays(plan.trees[entry], entry, arrays)
        continue
      own = {n: arrays[n] for n in self._below(entry) if n in arrays}
      if entry not in on_host:
        own = self._as_live(own)
      snapshot[entry] = self._decode(described['structure'], own)
    snapshot.update(self._per_process(lambda e: names(e) and wants(e)))
    if skipped := [e for e in self._record['module'] if not names(e)]:
      logging.info(
        'Skipped %s of %s, which %s does not name.',
        skipped,
        self._path,
        type(experiment).__name__,
      )
    return snapshot

  @_well_formed
  def _per_process(self, wants: Callable[[str], bool]) -> dict[str, Any]:
    """Reads what each process has for itself.

    Raises:
      ValueError: other processes saved it, and not all had the same.
    """
    saved = self._record['processes']
    if saved == jax.process_count():
      mine = files.read_json(self._path / f'process_{jax.process_index()}.json')
    else:
      each = [
        files.read_json(self._path / f'process_{i}.json') for i in range(saved)
      ]
      mine = each[0]
      if differing := sorted(
        k for k in mine if any(e[k] != mine[k] for e in each)
      ):
        raise ValueError(
          f'{saved} processes saved {differing}, each its own, and now there'
          f' are {jax.process_count()}. Restore on {saved} processes, or begin'
          ' anew from this run with config.restore_from and'
          ' config.restore_rules.'
        )
    return {
      entry: self._decode(
        described['structure'],
        storage.from_json(described['arrays']),
      )
      for entry, described in mine.items()
      if wants(entry)
    }

  def read(self, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Reads arrays.

    Args:
      targets: name -> jax.ShapeDtypeStruct with a sharding; without one, or
        None, the array comes as numpy.

    Raises:
      files.DamagedError: one is not there.
      files.UnreadableError: one cannot be read, which may pass.
    """
    try:
      return files.retried(
        lambda: storage.read(self._listing, self._arrays, targets), files.ARRAYS
      )
    except (*files.MISSING, KeyError) as e:
      raise files.DamagedError(f'its arrays cannot be read ({e})') from e

  def by_rules(
    self, experiment: Any, rules: list[tuple[str, str | None]]
  ) -> dict[str, Any]:
    """Returns the experiment's own snapshot with arrays replaced by rules.

    No rule takes what begins anew with each run: its count of steps, those of
    schedules, and random keys.

    Raises:
      ValueError: a rule matches nothing, or names no array of the checkpoint.
      MismatchError: an array of the checkpoint has another shape or type.
    """
    snapshot = dict(experiment.snapshot_state())
    own = getattr(experiment, 'NEVER_BY_RULES', ())
    live = {
      name: x
      for entry, tree in snapshot.items()
      for name, x in _named(_without_schedules(tree), entry).items()
      if structure.is_array(x) and not storage.is_key(x) and name not in own
    }
    used = set()
    sources: dict[str, str] = {}
    for name in live:
      for pattern, source in rules:
        if match := re.fullmatch(pattern, name):
          used.add(pattern)
          if source is not None:
            try:
              sources[name] = match.expand(source)
            except (re.error, IndexError) as e:
              raise errors.UsageError(
                f'config.restore_rules has {(pattern, source)!r}: {e}.'
              ) from e
          break
    if unused := [pattern for pattern, _ in rules if pattern not in used]:
      near = errors.nearest(unused[0], live, n=8, cutoff=0)
      raise errors.UsageError(
        f"config.restore_rules: {unused} match none of this run's arrays, or"
        ' an earlier rule takes them. (Counts of steps, schedules and keys'
        f' begin anew.) The nearest arrays to the first are {near}.'
      )
    if absent := sorted(set(sources.values()) - set(self._arrays)):
      near = errors.nearest(absent[0], self._arrays, n=3, cutoff=0.3)
      raise errors.UsageError(
        f'config.restore_rules: {self._path} has no arrays {absent}; the'
        f' nearest to the first are {near}.'
      )
    wrong = [
      f"  {name}: the checkpoint's {source} is {self._shape(source)}, expected"
      f' {_shape_of(live[name])}'
      for name, source in sources.items()
      if self._shape(source) != _shape_of(live[name])
    ]
    if wrong:
      raise MismatchError(
        f'{self._path} does not fit the experiment; nothing was restored.\n'
        + '\n'.join(wrong)
      )
    replaced = {}
    while pending := {s: n for n, s in sources.items() if n not in replaced}:
      # More than once where arrays have one source: each gets its own copy.
      arrays = self.read({s: _abstract(live[n]) for s, n in pending.items()})
      replaced.update({n: arrays[s] for s, n in pending.items()})
    # Nobody has these arrays but the experiment itself, or this function.
    return base.Fresh(
      {
        entry: _with_arrays(tree, entry, replaced)
        for entry, tree in snapshot.items()
      }
    )


# Optax's states of schedules: by name, since not all of them are public. Not
# those of moments, such as Adam's, which are corrected by their own count.
_SCHEDULES = (
  'AddNoiseState',
  'InjectHyperparamsState',
  'InjectStatefulHyperparamsState',
  'ScaleByScheduleState',
  'WeightDecaySchedule',
  'WrappedScheduleState',
)


def _without_schedules(tree: Any) -> Any:
  """Returns a tree with None in place of all that a schedule is made of."""

  def is_schedule(x: Any) -> bool:
    return type(x).__name__ in _SCHEDULES and hasattr(x, '_fields')

  def strip(x: Any) -> Any:
    if not is_schedule(x):
      return x
    kept = dict.fromkeys(x._fields)
    if 'inner_state' in kept:  # Of the optimizer that has the schedule.
      kept['inner_state'] = _without_schedules(x.inner_state)
    return x._replace(**kept)

  return jax.tree.map(strip, tree, is_leaf=is_schedule)


@dataclasses.dataclass
class _OnHost:
  """Stands for an experiment whose arrays shall all be in host memory."""

  CHECKPOINT_ATTRS: dict[str, str]
  snapshot_template: Callable[[], Mapping[str, Any]]


def read_whole(
  path: pathlib.Path, trees: Mapping[str, Any], allow_pickle: bool
) -> dict[str, Any]:
  """Returns all entries of a checkpoint, as host arrays.

  No other process takes part.

  Args:
    path: the checkpoint; where it has been removed, the newest of its series
      is read.
    trees: entry that is stored leaf by leaf -> tree of its shapes.
    allow_pickle: whether to unpickle.

  Raises:
    files.DamagedError: it cannot be read.
  """
  while True:
    try:
      listing = files.Listing(path)
      if problems := listing.verify():
        raise files.DamagedError('; '.join(problems))
      saved = Reader(listing, allow_pickle)
      entries = saved.entries()
      names = {entry: entry for entry in listing.record['module']}
      entries['experiment_module'] = saved.snapshot(
        _OnHost(names, lambda: trees)
      )
      return entries
    except files.DamagedError as e:
      steps = files.steps(path.parent)
      if os.path.lexists(path) or not steps:
        raise files.DamagedError(f'{path} cannot be read: {e}.') from e
      path = path.parent / str(steps[-1])


# What an experiment says of its snapshot; one that is not an
# AbstractExperiment says nothing.


def template(experiment: Any) -> dict[str, Any]:
  """Returns the entries that are stored leaf by leaf, and their shapes."""
  get = getattr(experiment, 'snapshot_template', None)
  return dict(get()) if get is not None else {}


def _placed_by(experiment: Any) -> set[str]:
  """Returns the entries that the experiment itself puts onto its devices."""
  placed = set(getattr(experiment, 'CHECKPOINT_ATTRS', {}).values())
  whole = getattr(experiment, 'NON_BROADCAST_CHECKPOINT_ATTRS', {})
  for attribute, entry in whole.items():
    leaves = jax.tree.leaves(getattr(experiment, attribute, None))
    if leaves and all(isinstance(x, jax.Array) for x in leaves):
      placed.add(entry)
  return placed


def _names_of(experiment: Any) -> Callable[[str], bool]:
  """Returns what says whether an entry is one of the experiment's.

  Its attributes say so. One with a `snapshot_state` of its own may restore
  anything.
  """
  method = getattr(type(experiment), 'snapshot_state', None)
  if getattr(method, '__module__', None) != 'jaxline.experiment':
    return lambda name: True
  names = {
    *experiment.CHECKPOINT_ATTRS.values(),
    *experiment.NON_BROADCAST_CHECKPOINT_ATTRS.values(),
  }
  return lambda name: name in names


def wants_of(experiment: Any) -> Callable[[str], bool]:
  """Returns what says whether to read an array of the experiment's."""
  if experiment is None:
    return lambda name: False
  return getattr(experiment, 'wants_restored', lambda name: True)


def per_process(experiment: Any, all_hosts: bool) -> set[str]:
  """Returns the entries of which each process keeps its own."""
  own = set(getattr(experiment, 'PER_PROCESS_ENTRIES', ()))
  if all_hosts:
    own |= set(experiment.NON_BROADCAST_CHECKPOINT_ATTRS.values())
  return own


# Trees and names.


def _named(tree: Any, entry: str) -> dict[str, Any]:
  """Returns name -> leaf, in the order of jax.tree.leaves."""
  return {
    f'{entry}/{name}' if name else entry: leaf
    for name, leaf in structure.named_leaves(tree).items()
  }


def _with_arrays(tree: Any, entry: str, arrays: Mapping[str, Any]) -> Any:
  """Returns a tree with those leaves replaced for which there are arrays."""
  leaves = [arrays.get(name, x) for name, x in _named(tree, entry).items()]
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def prefixed(tree: Any, entry: str) -> dict[str, Any]:
  """Returns name -> array.

  Raises:
    TypeError: a leaf is no array.
  """
  named = _named(tree, entry)
  for name, leaf in named.items():
    if not structure.is_array(leaf):
      raise TypeError(
        f'{name} is a {type(leaf).__name__}; expected an array, since this'
        ' entry is stored leaf by leaf.'
      )
  return named


def _shape_of(x: Any) -> str:
  return f'{x.dtype.name}{list(x.shape)}'  # As the record tells it.


def _abstract(x: Any) -> Any:
  sharding = x.sharding if isinstance(x, jax.Array) else None
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def together(read: Callable[[], _T]) -> _T:
  """Calls a function in all processes; where it fails in one, all raise.

  Args:
    read: reads something, or finds it damaged.

  Returns:
    What it returns.

  Raises:
    files.UnreadableError: a process could not read it.
    files.DamagedError: all could read it, and one found it damaged.
    files.RefusedError: it is as it was written, but no save writes such.
  """
  error: Exception | None = None
  kind = 0
  try:
    result = read()
  except files.RefusedError as e:
    error, kind = e, 1
  except files.DamagedError as e:
    error, kind = e, 2
  except files.UnreadableError as e:
    # The strongest: it may pass, and leaves all as it is.
    error, kind = e, 3
  if jax.process_count() > 1:
    kinds = multihost_utils.process_allgather(np.int32(kind))
    if (most := kinds.max()) > kind:
      others = np.flatnonzero(kinds == most).tolist()
      error = (
        files.RefusedError(f'processes {others} say so'),
        files.DamagedError(f'processes {others} say so'),
        files.UnreadableError(
          errno.EIO, f'processes {others} could not read it'
        ),
      )[most - 1]
  if error is not None:
    raise error
  return result


def verify(path: pathlib.Path, experiment: Any) -> files.Listing:
  """Verifies the parts of a checkpoint that an experiment reads.

  The processes share the work.

  Raises:
    files.RefusedError: it is as it was written, but no save writes such.
    files.DamagedError: it is not as it was written.
    files.UnreadableError: a file cannot be read, which may pass.
  """
  process, processes = jax.process_index(), jax.process_count()

  def check() -> files.Listing:
    listing = files.Listing(path)
    # First whether the record is to be trusted.
    if wrong := listing.verify(lambda file: file == files.RECORD):
      raise files.DamagedError('; '.join(wrong))
    wants = wants_of(experiment)
    wanted, unwanted = {}, set()
    for name, about in listing.record['arrays'].items():
      if name.startswith('run/') or wants(name):
        wanted[name] = about
      else:
        unwanted.add(f'{files.ARRAYS}/{about["file"]}')
    if wrong := listing.verify(
      lambda file: '/'.join(file.split('/')[:2]) not in unwanted,
      process,
      processes,
    ):
      raise files.DamagedError('; '.join(wrong))
    share = list(wanted)[process::processes]
    storage.check(listing, {name: wanted[name] for name in share})
    return listing

  return together(check)
