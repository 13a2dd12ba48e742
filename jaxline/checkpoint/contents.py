"""A live state as a checkpoint holds it: arrays and JSON, and back."""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import functools
import importlib.metadata
import pathlib
import platform
import re
import time
import types
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

import jaxline
from jaxline import errors
from jaxline.checkpoint import arrays as arrays_lib
from jaxline.checkpoint import base
from jaxline.checkpoint import files
from jaxline.checkpoint import structure


class MismatchError(ValueError):
  """A checkpoint does not fit the experiment; nothing was restored."""


class Encoder:
  """Makes what is written of the live states of a run."""

  def __init__(self, recorded: Any, allow_pickle: bool):
    """Makes the encoder.

    Args:
      recorded: the run's config, as JSON.
      allow_pickle: whether to pickle what cannot be described.
    """
    self._recorded = recorded
    self._allow_pickle = allow_pickle
    self._pickled: set[str] = set()

  def content(
    self, ckpt_series: str, state: Any, all_hosts: bool
  ) -> arrays_lib.Content:
    """Copies a live state to the host, and describes it.

    Args:
      ckpt_series: the series.
      state: the live state.
      all_hosts: whether each process keeps its own
        NON_BROADCAST_CHECKPOINT_ATTRS.

    Raises:
      TypeError: something in it can only be pickled.
    """
    arrays: dict[str, Any] = {}
    entries = {k: x for k, x in state.items() if k != 'experiment_module'}
    entries = self._encode(entries, arrays, 'run/')
    module, per_process, whole = {}, {}, {}
    experiment = state.get('experiment_module')
    if experiment is not None:
      by_leaves = template(experiment)
      own = set(getattr(experiment, 'PER_PROCESS_ENTRIES', ()))
      if all_hosts:
        own |= set(experiment.NON_BROADCAST_CHECKPOINT_ATTRS.values())
      for name, value in experiment.snapshot_state().items():
        if name in by_leaves:
          arrays.update(_arrays_of(value, name))
          module[name] = {'leaves': True}
        elif name in own:
          small: dict[str, Any] = {}
          per_process[name] = {
            'structure': self._encode({name: value}, small)[name],
            'arrays': arrays_lib.to_json(small),
          }
        else:
          whole[name] = value
    for name, json in self._encode(whole, arrays).items():
      module[name] = {'structure': json}
    stored, described = arrays_lib.store(arrays)
    record = {
      'format': files.FORMAT,
      'series': ckpt_series,
      'step': int(state['global_step']),
      'time': time.time(),
      'processes': jax.process_count(),
      'devices': jax.device_count(),
      'versions': _versions(),
      'config': self._recorded,
      'entries': entries,
      'module': module,
      'arrays': described,
    }
    return arrays_lib.Content(stored, record, per_process)

  def added(self, state: Any) -> dict[str, Any]:
    """Returns what a best checkpoint has besides the evaluated one, as JSON."""
    saved = ('global_step', 'train_step_rng', 'experiment_module')
    arrays: dict[str, Any] = {}
    more = {key: x for key, x in state.items() if key not in saved}
    entries = self._encode(more, arrays, 'run/')
    return {'entries': entries, 'arrays': arrays_lib.to_json(arrays)}

  def _encode(
    self, values: Mapping[str, Any], arrays: dict[str, Any], prefix: str = ''
  ) -> dict[str, Any]:
    """Splits values into arrays and JSON.

    Args:
      values: name -> value.
      arrays: name -> array; those of the values are added.
      prefix: of their names.

    Returns:
      Name -> JSON.
    """
    described, pickled = {}, set()
    for key, value in values.items():
      name = f'{prefix}{key}'
      encoded = structure.encode(value, name, allow_pickle=self._allow_pickle)
      if double := sorted(set(encoded.arrays) & set(arrays)):
        raise ValueError(
          f'Two arrays of the checkpoint have the name {double[0]!r}; rename'
          ' one of the entries.'
        )
      arrays.update(encoded.arrays)
      pickled.update(encoded.pickled)
      described[key] = encoded.structure
    if pickled - self._pickled:  # Once is enough.
      self._pickled |= pickled
      logging.warning(
        'Pickled into the checkpoint, as config.checkpoint_allow_pickle'
        ' permits: %s.',
        sorted(pickled),
      )
    return described


@functools.cache  # To look them up takes milliseconds.
def _versions() -> dict[str, str]:
  names = ('jax', 'jaxlib', 'orbax-checkpoint', 'numpy', 'optax')
  versions = {'jaxline': jaxline.__version__}
  versions['python'] = platform.python_version()
  for name in names:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return versions


class Reader:
  """Reads the entries of one checkpoint, whose files are verified."""

  def __init__(self, found: files.Listing, allow_pickle: bool = False):
    self._found = found
    self._record = found.record
    self._arrays = found.record['arrays']
    self._allow_pickle = allow_pickle

  @files.well_formed()
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
    if 'extra.json' in self._found.sums:
      extra = files.read_json(self._found.path / 'extra.json')
      described.update(extra['entries'])
      small = arrays_lib.from_json(extra['arrays'])
    keys = list(described if keys is None else keys)
    if missing := sorted(set(keys) - set(described)):
      raise ValueError(
        f'{self._found.path} lacks {missing}; it holds {sorted(described)}.'
      )
    names = [n for key in keys for n in self._below(f'run/{key}')]
    read = dict(arrays_lib.read(self._found, dict.fromkeys(names)))
    arrays = self._as_live(read) | small
    return {key: self._decode(described[key], arrays) for key in keys}

  def snapshot(self, experiment: Any) -> dict[str, Any]:
    """Reads an experiment's snapshot; of what it does not want, the shapes.

    Raises:
      MismatchError: naming each array that does not fit it.
    """
    trees = template(experiment)
    wants, is_named = wants_of(experiment), _names_of(experiment)
    saved = {e: x for e, x in self._record['module'].items() if is_named(e)}
    self._check_fit(trees, saved)
    # Name of an array -> where it goes; None is host memory.
    targets: dict[str, Any] = {}
    for entry, tree in trees.items():
      targets |= _arrays_of(tree, entry)
    for entry in set(saved) - set(trees):
      targets |= dict.fromkeys(self._below(entry))
    # It fits: what is replaced may go, so that the devices need not hold both.
    if hasattr(experiment, 'make_room'):
      experiment.make_room()
    wanted = {name: x for name, x in targets.items() if wants(name)}
    arrays = dict(arrays_lib.read(self._found, wanted))
    on_host = _placed_by(experiment)
    snapshot = base.Fresh()
    for entry, about in saved.items():
      if entry in trees:
        snapshot[entry] = _with_arrays(trees[entry], entry, arrays)
        continue
      own = {n: arrays[n] for n in self._below(entry) if n in arrays}
      if entry not in on_host:
        own = self._as_live(own)
      with files.well_formed():
        snapshot[entry] = self._decode(about['structure'], own)
    snapshot.update(self._per_process(lambda e: is_named(e) and wants(e)))
    if skipped := [e for e in self._record['module'] if e not in saved]:
      logging.info(
        'Skipped %s of %s, which %s does not name.',
        skipped,
        self._found.path,
        type(experiment).__name__,
      )
    return snapshot

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
      if structure.is_array(x) and not arrays_lib.is_key(x) and name not in own
    }
    where = 'config.restore_rules'
    sources, unused = match_rules(live, rules, where)
    if unused:
      near = errors.nearest(unused[0], live, n=8, cutoff=0)
      raise errors.UsageError(
        f"{where}: {unused} match none of this run's arrays, or"
        ' an earlier rule takes them. (Counts of steps, schedules and keys'
        f' begin anew.) The nearest arrays to the first are {near}.'
      )
    replaced = self.take(sources, live, where)
    # Nobody has these arrays but the experiment itself, or this function.
    return base.Fresh(
      {
        entry: _with_arrays(tree, entry, replaced)
        for entry, tree in snapshot.items()
      }
    )

  def take(
    self, sources: Mapping[str, str], live: Mapping[str, Any], where: str
  ) -> dict[str, Any]:
    """Returns name -> an array of its own, which lies where the live one does.

    Args:
      sources: name -> the name of the array in the checkpoint.
      live: name -> the live array.
      where: what named the sources, for messages.

    Raises:
      UsageError: the checkpoint lacks a source.
      MismatchError: a source has another shape or type.
    """
    if absent := sorted(set(sources.values()) - set(self._arrays)):
      near = errors.nearest(absent[0], self._arrays, n=3, cutoff=0.3)
      raise errors.UsageError(
        f'{where}: {self._found.path} has no arrays {absent}; the'
        f' nearest to the first are {near}.'
      )
    self._refuse_unfit([
      f"{name}: the checkpoint's {source} is {self._shape(source)}, expected"
      f' {_shape_of(live[name])}'
      for name, source in sources.items()
      if self._shape(source) != _shape_of(live[name])
    ])  # fmt: skip
    arrays: dict[str, Any] = {}
    # More than once where arrays have one source.
    while pending := {s: n for n, s in sources.items() if n not in arrays}:
      targets = {s: _abstract(live[name]) for s, name in pending.items()}
      found = dict(arrays_lib.read(self._found, targets))
      arrays |= {name: found[s] for s, name in pending.items()}
    return arrays

  def _below(self, entry: str) -> list[str]:
    """Returns the names of an entry's arrays."""
    return [n for n in self._arrays if n == entry or n.startswith(f'{entry}/')]

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
    return arrays_lib.saved_shape(self._arrays[name])

  def _check_fit(
    self, trees: Mapping[str, Any], saved: Mapping[str, Any]
  ) -> None:
    """Raises MismatchError unless all arrays of the trees are there as told."""
    wrong = []
    for entry, tree in trees.items():
      wanted = {n: _shape_of(x) for n, x in _arrays_of(tree, entry).items()}
      have = {n: self._shape(n) for n in self._below(entry)}
      wrong += [
        f'{name}: the checkpoint has {have.get(name, "nothing")}, the'
        f' experiment expects {wanted.get(name, "nothing")}'
        for name in sorted(have.keys() | wanted.keys())
        if have.get(name) != wanted.get(name)
      ]
    wrong += [
      f'{entry}: the experiment does not tell its shape'
      for entry, described in saved.items()
      if 'leaves' in described and entry not in trees
    ]
    self._refuse_unfit(wrong)

  def _refuse_unfit(self, wrong: list[str]) -> None:
    if wrong:
      lines = ''.join(f'\n  {files.printable(line)}' for line in wrong)
      raise MismatchError(
        f'{self._found.path} does not fit the experiment; nothing was restored.'
        ' Use the config it was trained with (checkpoint.json holds it), a new'
        ' config.checkpoint_dir, or config.restore_from with'
        f' config.restore_rules for what fits.{lines}'
      )

  @files.well_formed()
  def _per_process(self, wants: Callable[[str], bool]) -> dict[str, Any]:
    """Reads what each process has for itself.

    Raises:
      ValueError: other processes saved it, and not all had the same.
    """
    path, saved = self._found.path, self._record['processes']
    if saved == jax.process_count():
      mine = files.read_json(path / f'process_{jax.process_index()}.json')
    else:
      each = [files.read_json(path / f'process_{i}.json') for i in range(saved)]
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
        described['structure'], arrays_lib.from_json(described['arrays'])
      )
      for entry, described in mine.items()
      if wants(entry)
    }


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
      with files.reading(path):
        found = files.Listing(path)
        arrays_lib.require(found, lambda name: True)
        saved = Reader(found, allow_pickle)
        stand_in = types.SimpleNamespace(
          CHECKPOINT_ATTRS={entry: entry for entry in found.record['module']},
          snapshot_template=lambda: trees,
        )
        entries = saved.entries()
        return entries | {'experiment_module': saved.snapshot(stand_in)}
    except files.GoneError:
      if not (steps := files.steps(path.parent)):
        raise
      path = path.parent / str(steps[-1])


# Rules.


def match_rules(
  names: Iterable[str], rules: Iterable[tuple[str, str | None]], where: str
) -> tuple[dict[str, str], list[str]]:
  """Returns which arrays get which, by the first rule that matches.

  Args:
    names: those of arrays.
    rules: pairs of a regular expression for a whole name, and the name of its
      source in the checkpoint; with None, the array has none.
    where: what has the rules, for messages.

  Returns:
    Name -> that of its source; and the expressions that are used for no name.

  Raises:
    UsageError: an expression or a source is none.
  """
  rules = list(rules)
  used = set()
  sources: dict[str, str] = {}
  for name in names:
    for i, (pattern, source) in enumerate(rules):
      try:
        if match := re.fullmatch(pattern, name):
          used.add(i)
          if source is not None:
            sources[name] = match.expand(source)
          break
      except (re.error, IndexError) as e:
        raise errors.UsageError(
          f'{where} has {(pattern, source)!r}: {e}.'
        ) from e
  return sources, [p for i, (p, _) in enumerate(rules) if i not in used]


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
  return {
    *experiment.CHECKPOINT_ATTRS.values(),
    *experiment.NON_BROADCAST_CHECKPOINT_ATTRS.values(),
  }.__contains__


def wants_of(experiment: Any) -> Callable[[str], bool]:
  """Returns what says whether to read an array of the experiment's."""
  if experiment is None:
    return lambda name: False
  return getattr(experiment, 'wants_restored', lambda name: True)


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


def _arrays_of(tree: Any, entry: str) -> dict[str, Any]:
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
