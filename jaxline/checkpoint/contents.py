"""Converts a run's state to arrays and JSON, and back."""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxline
from jaxline import errors
from jaxline.checkpoint import arrays as arrays_lib
from jaxline.checkpoint import base
from jaxline.checkpoint import manager
from jaxline.checkpoint import rules as rules_lib
from jaxline.checkpoint import store as store_lib
from jaxline.checkpoint import structure
from jaxline.compat import devices

_MAX_DIFF = 2**20  # Characters.


class MismatchError(errors.UsageError):
  """A checkpoint does not fit the experiment; nothing was restored."""


# Writing.


@dataclasses.dataclass
class Content:
  """One checkpoint, in host memory.

  Attributes:
    arrays: by name; what this process writes of them.
    manifest: what the manifest will hold, but for what is known later.
    process: the entries that this process keeps for itself.
  """

  arrays: dict[str, arrays_lib.HostArray]
  manifest: dict[str, Any]
  process: dict[str, Any]


def content(
  state: Any,
  module: base.Module,
  recorded: Any,
  *,
  all_hosts: bool,
  allow_pickle: bool,
) -> Content:
  """Copies a live state to the host, and describes it.

  Args:
    state: the live state.
    module: what the state's experiment says of itself.
    recorded: the run's config, as JSON.
    all_hosts: whether each process keeps its own
      NON_BROADCAST_CHECKPOINT_ATTRS.
    allow_pickle: whether to pickle what cannot be described.

  Raises:
    TypeError: something in it can only be pickled.
  """
  arrays: dict[str, Any] = {}
  entries = {k: x for k, x in state.items() if k != 'experiment_module'}
  entries = _encode(entries, arrays, allow_pickle, 'run/')
  saved, per_process, whole = {}, {}, {}
  by_leaves = module.snapshot_template()
  own = set(module.PER_PROCESS_ENTRIES)
  if all_hosts:
    own |= set(module.NON_BROADCAST_CHECKPOINT_ATTRS.values())
  for name, value in module.snapshot_state().items():
    if name in by_leaves:
      arrays.update(structure.named_leaves(value, name))
      saved[name] = {'leaves': True}
    elif name in own:
      small: dict[str, Any] = {}
      per_process[name] = {
        'structure': _encode({name: value}, small, allow_pickle)[name],
        'arrays': _to_json(small),
      }
    else:
      whole[name] = value
  for name, described in _encode(whole, arrays, allow_pickle).items():
    saved[name] = {'structure': described}
  manifest = {
    'format': manager.FORMAT,
    'step': int(state['global_step']),
    'time': time.time(),
    'devices': [jax.device_count(), jax.devices()[0].device_kind],
    'versions': _versions(),
    'config': recorded,
    'entries': entries,
    'module': saved,
  }
  return Content(arrays_lib.to_host(arrays), manifest, per_process)


def check_storable(state: Any, module: base.Module) -> None:
  """Refuses by name what a save of the live state could not store.

  Attributes that the experiment makes later, and those of a class with its own
  `snapshot_state`, are checked by the first save.

  Raises:
    TypeError: see `structure.encode`.
  """
  entries = {k: x for k, x in state.items() if k != 'experiment_module'}
  _encode(entries, {}, False, 'run/')
  if module.snapshot_state.__module__ == 'jaxline.experiment':
    names = {**module.CHECKPOINT_ATTRS, **module.NON_BROADCAST_CHECKPOINT_ATTRS}
    for attribute, name in names.items():
      _encode({name: getattr(module.live, attribute, None)}, {}, False)


def added(state: Any, allow_pickle: bool) -> dict[str, Any]:
  """Returns what a best checkpoint has besides the evaluated one, as JSON."""
  saved = ('global_step', 'train_step_rng', 'experiment_module')
  more = {key: x for key, x in state.items() if key not in saved}
  arrays: dict[str, Any] = {}
  entries = _encode(more, arrays, allow_pickle, 'run/')
  return {'entries': entries, 'small': _to_json(arrays)}


def _encode(
  values: Mapping[str, Any],
  arrays: dict[str, Any],
  allow_pickle: bool,
  prefix: str = '',
) -> dict[str, Any]:
  """Returns the structures of values by name, and adds their arrays."""
  described = {}
  for key, value in values.items():
    own: dict[str, Any] = {}
    described[key] = structure.encode(
      value, f'{prefix}{key}', own, allow_pickle=allow_pickle
    )
    if double := sorted(own.keys() & arrays.keys()):
      raise ValueError(
        f'Two arrays of the checkpoint have the name {double[0]!r}; rename'
        ' one of the entries.'
      )
    arrays.update(own)
  return described


@functools.cache  # To look them up takes milliseconds.
def _versions() -> dict[str, str]:
  names = ('jax', 'jaxlib', 'numpy', 'optax')
  versions = {'jaxline': jaxline.__version__}
  versions['python'] = platform.python_version()
  for name in names:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  return versions


def git(*args: str) -> str:
  """Returns what git prints of the working directory; '' where it fails."""
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    return subprocess.run(
      ['git', *args], capture_output=True, check=True, timeout=10
    ).stdout.decode(errors='replace')
  return ''


@functools.cache
def code() -> dict[str, str]:
  """Returns the revision of the working directory, its changes, XLA's flags."""
  changed = git('diff', 'HEAD')
  return {
    'host': platform.node(),
    'revision': git('rev-parse', 'HEAD').strip(),
    'changed': hashlib.sha256(changed.encode()).hexdigest() if changed else '',
    'diff': changed[:_MAX_DIFF],
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
  }


# Reading.


class Checkpoint:
  """A checkpoint that is read, as what `content` and `added` got.

  Attributes:
    name: the place of its manifest, for messages.
    record: the manifest.
    described: name of each array -> its description, see `arrays`.
    is_there: returns whether it still exists.
    data: the store of its arrays.
  """

  def __init__(
    self,
    manifests: manager.Manifests,
    series: str,
    step: int,
    allow_pickle: bool = False,
  ):
    """Reads the manifest: see `Manifests.read`."""
    self.name = f'{manifests.store}/{series}/{step}'
    self.is_there = lambda: step in manifests.steps(series)
    self.record = manifests.read(series, step)
    self.described = self.record['arrays']
    self.data = manifests.data(self.record)
    self._decode = functools.partial(
      structure.decode, allow_pickle=allow_pickle
    )

  def read(self, targets: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields name and array: see `arrays.read`."""
    return arrays_lib.read(self.data, self.described, targets)

  def entries(self, keys: Iterable[str]) -> dict[str, Any]:
    """Returns entries of the live state; raises ValueError if one is absent."""
    described = self.record['entries']
    keys = [k for k in keys if k != base.OPTIONAL or k in described]
    if missing := sorted(set(keys) - set(described)):
      raise ValueError(
        f'{self.name} lacks {missing}; it holds {sorted(described)}.'
      )
    names = [n for key in keys for n in self._below(f'run/{key}')]
    arrays = dict(self.read(dict.fromkeys(names)))
    arrays |= _from_json(self.record.get('small', {}))
    return {key: self._decode(described[key], arrays) for key in keys}

  def snapshot(self, module: base.Module) -> dict[str, Any]:
    """Reads an experiment's snapshot; of what it does not want, the shapes.

    Raises:
      MismatchError: naming each array that does not fit it.
    """
    trees = module.snapshot_template()
    wants, is_named = module.wants_restored, module.has_entry
    saved = {e: x for e, x in self.record['module'].items() if is_named(e)}
    # Maps an array's name to its target sharding; None means host memory.
    targets: dict[str, Any] = {}
    for entry, tree in trees.items():
      targets |= structure.named_leaves(tree, entry)
    have = {n: self._shape(n) for e in trees for n in self._below(e)}
    expected = {n: _shape_of(x) for n, x in targets.items()}
    have |= {
      entry: 'a tree of arrays'
      for entry, about in saved.items()
      if 'leaves' in about and entry not in trees
    }
    self._check_fit(
      (name, have.get(name, 'nothing'), expected.get(name, 'nothing'))
      for name in sorted(have.keys() | expected.keys())
    )
    for entry in set(saved) - set(trees):
      targets |= dict.fromkeys(self._below(entry))
    # It fits: what is replaced may go, so that the devices need not hold both.
    module.make_room()
    wanted = {name: x for name, x in targets.items() if wants(name)}
    arrays = dict(self.read(wanted))
    # What the experiment itself puts onto its devices, by `devices.put`.
    placed = set(module.CHECKPOINT_ATTRS.values())
    for attribute, entry in module.NON_BROADCAST_CHECKPOINT_ATTRS.items():
      if devices.layout(getattr(module.live, attribute, None)) is not None:
        placed.add(entry)
    snapshot = base.Fresh()
    for entry, about in saved.items():
      if entry in trees:
        snapshot[entry] = _with_arrays(trees[entry], entry, arrays)
      else:
        snapshot[entry] = self._decode(
          about['structure'], arrays, on_host=entry in placed
        )
    snapshot.update(self._per_process(lambda e: is_named(e) and wants(e)))
    return snapshot

  def by_rules(
    self, module: base.Module, rules: list[tuple[str, str | None]]
  ) -> dict[str, Any]:
    """Returns the experiment's own snapshot with arrays replaced by rules.

    No rule takes what begins anew with each run: its count of steps, those of
    schedules, and random keys.

    Raises:
      ValueError: a rule matches nothing, or names no array of the checkpoint.
      MismatchError: an array of the checkpoint has another shape or type.
    """
    snapshot = dict(module.snapshot_state())
    live = {
      name: x
      for entry, tree in snapshot.items()
      for name, x in structure.named_leaves(
        rules_lib.without_schedules(tree), entry
      ).items()
      if structure.is_array(x)
      and not arrays_lib.is_key(x)
      and name not in module.NEVER_BY_RULES
    }
    where = 'config.restore_rules'
    sources, unused = rules_lib.match_rules(live, rules, where)
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
    if absent := sorted(set(sources.values()) - set(self.described)):
      near = errors.nearest(absent[0], self.described, n=3, cutoff=0.3)
      raise errors.UsageError(
        f'{where}: {self.name} has no arrays {absent}; the nearest to the first'
        f' are {near}.'
      )
    self._check_fit(
      (f'{name} from {source}', self._shape(source), _shape_of(live[name]))
      for name, source in sources.items()
    )
    described = {n: self.described[s] for n, s in sources.items()}
    targets = {name: live[name] for name in sources}
    return dict(arrays_lib.read(self.data, described, targets))

  def _below(self, entry: str) -> list[str]:
    """Returns the names of an entry's arrays."""
    return [n for n in self.described if f'{n}/'.startswith(f'{entry}/')]

  def _shape(self, name: str) -> str:
    return arrays_lib.saved_shape(self.described[name])

  def _check_fit(self, pairs: Iterable[tuple[str, str, str]]) -> None:
    """Raises MismatchError unless all is here as the experiment expects it.

    Args:
      pairs: name, what is here, and what is expected, as text.
    """
    wrong = [
      f'{name}: the checkpoint has {have}, the experiment expects {expected}'
      for name, have, expected in pairs
      if have != expected
    ]
    if wrong:
      lines = ''.join(f'\n  {line}' for line in wrong)
      raise MismatchError(
        f'{self.name} does not fit the experiment; nothing was restored.'
        ' Use the config it was trained with (the manifest holds it), a new'
        ' config.checkpoint_dir, or config.restore_from with'
        f' config.restore_rules for what fits.{lines}'
      )

  def _per_process(self, wants: Callable[[str], bool]) -> dict[str, Any]:
    """Returns what each process has for itself.

    Raises:
      ValueError: other processes saved it, and not all had the same.
    """
    mine, *others = saved = self.record['processes']
    if len(saved) == jax.process_count():
      mine = saved[jax.process_index()]
    elif differing := sorted(
      k for k in mine if any(other[k] != mine[k] for other in others)
    ):
      raise ValueError(
        f'{len(saved)} processes saved {differing}, each its own, and now there'
        f' are {jax.process_count()}. Restore on {len(saved)} processes, or'
        ' begin anew from this run with config.restore_from and'
        ' config.restore_rules.'
      )
    return {
      entry: self._decode(
        described['structure'], _from_json(described['arrays'])
      )
      for entry, described in mine.items()
      if wants(entry)
    }


def read_whole(
  manifests: manager.Manifests,
  series: str,
  step: int,
  trees: Mapping[str, Any],
  allow_pickle: bool,
) -> dict[str, Any]:
  """Returns all entries of a checkpoint, as host arrays.

  No other process takes part.

  Args:
    manifests: the run's.
    series: the series.
    step: of the checkpoint; where it has been removed, the newest is read.
    trees: entry that is stored leaf by leaf -> tree of its shapes.
    allow_pickle: whether to unpickle.

  Raises:
    DamagedError: it cannot be read.
  """
  while True:
    try:
      saved = Checkpoint(manifests, series, step, allow_pickle)
      everything = base.Module(
        CHECKPOINT_ATTRS={entry: entry for entry in saved.record['module']},
        snapshot_template=lambda: trees,
      )
      with manager.naming(saved.name):
        snapshot = saved.snapshot(everything)
        entries = saved.entries(saved.record['entries'])
        return entries | {'experiment_module': snapshot}
    except store_lib.DamagedError:
      steps = manifests.steps(series)
      if step in steps or not steps:
        raise
      step = steps[-1]


def _to_json(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Makes JSON of small arrays of this process."""
  return {
    name: {
      'shape': list(x.shape),
      'dtype': x.dtype.name,
      'base64': base64.b64encode(np.asarray(x).tobytes()).decode('ascii'),
    }
    for name, x in arrays.items()
  }


def _from_json(described: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns what `_to_json` got.

  Raises:
    RefusedError: an array has not the bytes of its shape.
  """
  arrays = {}
  for name, about in described.items():
    data = bytearray(base64.b64decode(about['base64']))
    if len(data) != arrays_lib.num_bytes(about):
      raise store_lib.RefusedError(f'{name} has {len(data)} bytes')
    arrays[name] = np.ndarray(about['shape'], jnp.dtype(about['dtype']), data)
  return arrays


def _with_arrays(tree: Any, entry: str, arrays: Mapping[str, Any]) -> Any:
  """Returns a tree with those leaves replaced for which there are arrays."""
  named = structure.named_leaves(tree, entry)
  leaves = [arrays.get(name, x) for name, x in named.items()]
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _shape_of(x: Any) -> str:
  return f'{x.dtype.name}{list(x.shape)}'  # As the record tells it.
