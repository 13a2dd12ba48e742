"""Converts a run's state to named arrays and a manifest's JSON, and back."""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxline
from jaxline import errors
from jaxline.base import stateful
from jaxline.base import trees
from jaxline.checkpoint import arrays as arrays_lib
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.checkpoint import protocol
from jaxline.checkpoint import rules as rules_lib
from jaxline.checkpoint import structure
from jaxline.parallel import devices
from jaxline.run_directory import store as store_lib

PARAMS = 'state/params/'
AVERAGED = 'state/model_state/ema/'  # See `train_state.average_weights`.
_PACKAGES = 'jax', 'jaxlib', 'numpy', 'optax'
_VERSIONS = {
  'jaxline': jaxline.__version__,
  'python': platform.python_version(),
  **{name: importlib.metadata.version(name) for name in _PACKAGES},
}


class MismatchError(errors.UsageError):
  """A checkpoint does not fit the experiment; nothing was restored."""


# Writing.


@dataclasses.dataclass
class Content:
  """A checkpoint in host memory."""

  arrays: dict[str, arrays_lib.HostArray]
  manifest: dict[str, Any]  # The fields that are known before the write.
  process: dict[str, Any]  # The entries that only this process saves.


def content(
  state: Any, module: Any, recorded: Any, *, all_hosts: bool, allow_pickle: bool
) -> Content:
  """Copies a live state to the host, and describes it.

  Args:
    state: the live state.
    module: the state's experiment.
    recorded: the run's config, as JSON.
    all_hosts: whether each process saves its own
      NON_BROADCAST_CHECKPOINT_ATTRS.
    allow_pickle: whether to pickle values that have no description.
  """
  arrays, nodes = dict[str, Any](), dict[str, Any]()
  entries = _entries(state, ['experiment_module'], arrays, allow_pickle)
  saved, per_process = {}, {}
  by_leaves = module.snapshot_template()
  own = set(module.PER_PROCESS_ENTRIES)
  if all_hosts:
    own |= set(module.NON_BROADCAST_CHECKPOINT_ATTRS.values())
  for name, value in module.snapshot_state().items():
    if name in by_leaves:
      arrays.update(trees.named_leaves(value, name))
      saved[name] = {'leaves': True}
    elif name in own:
      small: dict[str, Any] = {}
      about = _encode(value, name, small, allow_pickle, nodes)
      per_process[name] = {'structure': about, 'arrays': _to_json(small)}
    else:
      about = _encode(value, name, arrays, allow_pickle, nodes)
      saved[name] = {'structure': about}
  manifest = {
    'format': manifests_lib.FORMAT,
    'step': int(state['global_step']),
    'time': time.time(),
    'devices': [jax.device_count(), jax.devices()[0].device_kind],
    'versions': _VERSIONS,
    'config': recorded,
    'entries': entries,
    'module': saved,
  }
  return Content(arrays_lib.to_host(arrays), manifest, per_process)


def check_storable(state: Any, module: Any) -> None:
  """Raises TypeError for a live state that a save could not store.

  It cannot check attributes that the experiment sets later, nor the snapshot of
  a class that overrides `snapshot_state`. The first save checks these.
  """
  _entries(state, ['experiment_module'], {}, False)
  if not module.overrides('snapshot_state'):
    for name, value in _live(module).items():
      _encode(value, name, {}, False, {})


def _live(module: Any) -> dict[str, Any]:
  """Returns the live values that a checkpoint describes, by name."""
  if module.overrides('snapshot_state'):
    return dict(module.snapshot_state())
  names = {**module.CHECKPOINT_ATTRS, **module.NON_BROADCAST_CHECKPOINT_ATTRS}
  own = stateful.live(module)
  return {name: getattr(own, x, None) for x, name in names.items()}


def live_nodes(module: Any, allow_pickle: bool) -> dict[str, Any]:
  """Returns the nodes of live values (see `structure.encode`)."""
  nodes: dict[str, Any] = {}
  for name, value in _live(module).items():
    with contextlib.suppress(TypeError):  # A save reports it.
      _encode(value, name, {}, allow_pickle, nodes)
  return nodes


def best_extras(state: Any, allow_pickle: bool) -> dict[str, Any]:
  """Returns the entries that `best` adds to the evaluated state, as JSON."""
  arrays: dict[str, Any] = {}
  saved = ('global_step', 'train_step_rng', 'experiment_module')
  entries = _entries(state, saved, arrays, allow_pickle)
  return {'entries': entries, 'small': _to_json(arrays)}


def _entries(
  state: Any, without: Sequence[str], arrays: dict[str, Any], allow_pickle: bool
) -> dict[str, Any]:
  """Describes the entries of the live state; adds their arrays to `arrays`."""
  return {
    key: _encode(x, f'run/{key}', arrays, allow_pickle)
    for key, x in state.items()
    if key not in without
  }


def _encode(
  value: Any,
  name: str,
  arrays: dict[str, Any],
  allow_pickle: bool,
  nodes: dict[str, Any] | None = None,
) -> Any:
  """Returns the structure of an entry, and adds its arrays."""
  own: dict[str, Any] = {}
  options: Any = {'allow_pickle': allow_pickle, 'nodes': nodes}
  described = structure.encode(value, name, own, **options)
  if double := sorted(own.keys() & arrays.keys()):
    raise ValueError(
      f'Two arrays of the checkpoint are named {double[0]!r}. Rename one of the'
      ' entries.'
    )
  arrays.update(own)
  return described


def git(*args: str) -> str:
  """Returns the output of a git command; '' if it fails."""
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    return subprocess.run(
      ['git', *args], capture_output=True, check=True, timeout=10
    ).stdout.decode(errors='replace')
  return ''


@functools.cache
def code() -> dict[str, str]:
  """Returns the manifest's field `code`, without the hash of the files."""
  return {
    'host': platform.node(),
    'revision': git('rev-parse', 'HEAD').strip(),
    'XLA_FLAGS': os.environ.get('XLA_FLAGS', ''),
  }


# Reading.


@dataclasses.dataclass
class Checkpoint:
  """A checkpoint to read. Its manifest is read on first use."""

  manifests: manifests_lib.Manifests
  series: str
  step: int
  allow_pickle: bool = False
  # The live nodes (see `structure.encode`), collected on first use.
  nodes: dict[str, Any] | None = None
  _module: Any = dataclasses.field(default=None, init=False)
  _record: Any = dataclasses.field(default=None, init=False)

  @property
  def name(self) -> str:
    """The location of the manifest, for messages."""
    return f'{self.manifests.store}/{self.series}/{self.step}'

  @property
  def record(self) -> dict[str, Any]:
    """The manifest (see `Manifests.read`)."""
    # Not a cached_property: in Python 3.11, all checkpoints would share a lock.
    if self._record is None:
      self._record = self.manifests.read(self.series, self.step)
    return self._record

  @property
  def described(self) -> dict[str, Any]:
    """Maps the name of each array to its description (see `arrays`)."""
    return self.record['arrays']

  @property
  def data(self) -> store_lib.Store:
    """The store of the arrays."""
    return self.manifests.store.below(f'data/{self.record["data"]}')

  @contextlib.contextmanager
  def reading(self) -> Iterator[None]:
    """Adds the checkpoint's name to errors; detects a removal during a read."""
    try:
      yield
    except store_lib.RefusedError as e:
      if self.name in str(e):  # The error is about the manifest.
        raise
      raise store_lib.RefusedError(f'{self.name} is refused: {e}.') from e
    except store_lib.DamagedError as e:
      if self.step in self.manifests.steps(self.series):
        raise store_lib.DamagedError(f'{self.name} is damaged: {e}.') from e
      raise store_lib.GoneError(f'{self.name} has just been removed.') from e

  def read(self, targets: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (name, array); see `arrays.read`."""
    return arrays_lib.read(self.data, self.described, targets)

  def arrays(self, select: str = '.*') -> dict[str, np.ndarray]:
    """Reads the arrays whose full names match a pattern.

    Random keys are returned as their uint32 data.
    """
    names = [name for name in self.described if re.fullmatch(select, name)]
    if not names and select != '.*':
      raise ValueError(
        f'{self.name} has no array whose full name matches {select!r}; it has'
        f' {list(self.described)[:8]}, ... (`python -m jaxline.checkpoint show'
        f' {self.manifests.store.url.removesuffix("/checkpoints")}` lists all.)'
      )
    with self.reading():
      return dict(self.read(dict.fromkeys(names)))

  def weights(self, which: str | None = None) -> str:
    """Returns the prefix of the names of the weights.

    Args:
      which: 'raw', 'averaged', or None for the weights that evaluation uses:
        the averaged ones, if the run averages them and has done a step, else
        the raw ones (see `ShardedExperiment.eval_params`).
    """
    if which is None:
      has_averaged = any(name.startswith(AVERAGED) for name in self.described)
      is_trained = self.record['step'] > 0
      which = 'averaged' if has_averaged and is_trained else 'raw'
    return {'raw': PARAMS, 'averaged': AVERAGED}[which]

  def model_state(self) -> list[str]:
    """Returns the names of `model_state`'s arrays, without averaged weights."""
    names = self._below('state/model_state')
    return [n for n in names if not n.startswith(AVERAGED)]

  def entries(self, keys: Iterable[str]) -> dict[str, Any]:
    """Reads entries of the live state; raises ValueError if one is missing."""
    described = self.record['entries']
    keys = [k for k in keys if k != protocol.OPTIONAL or k in described]
    if missing := sorted(set(keys) - set(described)):
      raise ValueError(
        f'{self.name} lacks {missing}; it holds {sorted(described)}.'
      )
    names = [n for key in keys for n in self._below(f'run/{key}')]
    arrays = dict(self.read(dict.fromkeys(names)))
    arrays |= _from_json(self.record['small'])
    return {key: self._decode(described[key], arrays) for key in keys}

  def snapshot(self, module: Any) -> dict[str, Any]:
    """Reads a snapshot; arrays that `wants_restored` rejects stay abstract."""
    template, wants = module.snapshot_template(), module.wants_restored
    self._module = module
    saved = {
      entry: about
      for entry, about in self.record['module'].items()
      if any(map(wants, [entry, *self._below(entry)]))
    }
    # Maps an array's name to its abstract target; None means host memory.
    targets = trees.named_leaves(dict(template))
    shapes = {n: arrays_lib.saved_shape(x) for n, x in self.described.items()}
    have = {n: shapes[n] for entry in template for n in self._below(entry)}
    expected = {n: _shape_of(x) for n, x in targets.items()}
    for entry in saved.keys() - template.keys():
      if 'leaves' in saved[entry]:
        have[entry] = 'a tree of arrays'
      targets |= dict.fromkeys(self._below(entry))
    self._check_fit(
      (name, have.get(name, 'nothing'), expected.get(name, 'nothing'))
      for name in sorted(have.keys() | expected.keys())
    )
    # Free the old state first, so that the devices need not hold both.
    module.make_room()
    arrays = dict(self.read({n: x for n, x in targets.items() if wants(n)}))
    # The experiment itself puts these entries onto its devices.
    placed = set(module.CHECKPOINT_ATTRS.values())
    for attribute, entry in module.NON_BROADCAST_CHECKPOINT_ATTRS.items():
      value = getattr(stateful.live(module), attribute, None)
      if devices.layout(value) is not None:
        placed.add(entry)
    snapshot = stateful.OwnedSnapshot(self._per_process(wants))
    for entry, about in saved.items():
      if entry in template:
        snapshot[entry] = _with_arrays(template[entry], entry, arrays)
      else:
        snapshot[entry] = self._decode(
          about['structure'], arrays, on_host=entry in placed
        )
    return snapshot

  def read_by_rules(
    self, module: Any, rules: list[tuple[str, str | None]]
  ) -> dict[str, Any]:
    """Returns the experiment's snapshot with some arrays replaced, by rules.

    Rules never replace step counts, schedules or random keys.
    """
    snapshot = dict(module.snapshot_state())
    leaves = trees.named_leaves(rules_lib.without_schedules(snapshot))
    live = {
      name: x
      for name, x in leaves.items()
      if structure.is_array(x)
      and not arrays_lib.is_key(x)
      and name not in module.NEVER_BY_RULES
    }
    where = 'config.restore_rules'
    sources, unused = rules_lib.match_rules(live, rules, where)
    if unused:
      near = errors.nearest(unused[0], live, n=8, cutoff=0)
      raise errors.UsageError(
        f'{where}: {unused} match no array of this run, or an earlier rule'
        ' shadows them. (Rules never restore step counts, schedules or random'
        f' keys.) Similar to the first: {near}.'
      )
    replaced = self.read_onto(sources, live, where)
    return stateful.OwnedSnapshot(_with_arrays(snapshot, '', replaced))

  def read_onto(
    self, sources: Mapping[str, str], live: Mapping[str, Any], where: str
  ) -> dict[str, Any]:
    """Reads arrays onto the devices of the live arrays that they replace.

    Args:
      sources: name -> name of the source array in the checkpoint.
      live: name -> live array.
      where: the config key that names the sources, for messages.
    """
    if absent := sorted(set(sources.values()) - set(self.described)):
      near = errors.nearest(absent[0], self.described, n=3, cutoff=0.3)
      raise errors.UsageError(
        f'{where}: {self.name} has no arrays {absent}. Similar to the first:'
        f' {near}.'
      )
    described = {n: self.described[s] for n, s in sources.items()}
    targets = {name: live[name] for name in sources}
    self._check_fit(
      (f'{n} from {sources[n]}', arrays_lib.saved_shape(x), _shape_of(live[n]))
      for n, x in described.items()
    )
    return dict(arrays_lib.read(self.data, described, targets))

  def _decode(self, described: Any, arrays: Any, **more: Any) -> Any:
    more |= {'allow_pickle': self.allow_pickle, 'nodes': self._nodes}
    try:
      return structure.decode(described, arrays, **more)
    except RecursionError as e:
      raise store_lib.RefusedError('its values are nested too deeply') from e

  def _nodes(self) -> dict[str, Any]:
    if self.nodes is None:
      self.nodes = live_nodes(self._module, self.allow_pickle)
    return self.nodes

  def _below(self, entry: str) -> list[str]:
    """Returns the names of an entry's arrays."""
    return [n for n in self.described if f'{n}/'.startswith(f'{entry}/')]

  def _check_fit(self, triples: Iterable[tuple[str, str, str]]) -> None:
    """Raises MismatchError unless saved and expected shapes are equal."""
    wrong = [
      f'\n  {name}: the checkpoint has {have}, the experiment expects {want}'
      for name, have, want in triples
      if have != want
    ]
    if wrong:
      raise MismatchError(
        f'{self.name} does not fit the experiment; nothing was restored. Use'
        ' the config of its run (it is in the manifest), or start in a new'
        ' config.checkpoint_dir. To restore only the arrays that fit, set'
        f' config.restore_from and config.restore_rules.{"".join(wrong)}'
      )

  def _per_process(self, wants: Callable[[str], bool]) -> dict[str, Any]:
    """Returns the requested per-process entries of this process."""
    saved = [
      {entry: about for entry, about in of.items() if wants(entry)}
      for of in self.record['processes']
    ]
    mine = saved[0]
    if len(saved) == jax.process_count():
      mine = saved[jax.process_index()]
    elif any(other != mine for other in saved):
      raise errors.UsageError(
        f'{len(saved)} processes saved {sorted(mine)} separately, but this run'
        f' has {jax.process_count()} processes. Restore with {len(saved)}'
        ' processes, or start a new run with config.restore_from and'
        ' config.restore_rules.'
      )
    return {
      entry: self._decode(about['structure'], _from_json(about['arrays']))
      for entry, about in mine.items()
    }


def _to_json(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Encodes small arrays of this process as JSON."""
  return {
    name: {
      'shape': list(x.shape),
      'dtype': x.dtype.name,
      'base64': base64.b64encode(np.asarray(x).tobytes()).decode('ascii'),
    }
    for name, x in arrays.items()
  }


def _from_json(described: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Inverts `_to_json`."""
  arrays = {}
  for name, about in described.items():
    data = bytearray(base64.b64decode(about['base64']))
    flat = np.frombuffer(data, jnp.dtype(about['dtype']))
    arrays[name] = flat.reshape(about['shape'])
  return arrays


def _with_arrays(tree: Any, entry: str, arrays: Mapping[str, Any]) -> Any:
  """Returns a tree whose leaves are replaced by the arrays of their names."""
  named = trees.named_leaves(tree, entry)
  leaves = [arrays.get(name, x) for name, x in named.items()]
  return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _shape_of(x: Any) -> str:
  return f'{x.dtype.name}{list(x.shape)}'  # `saved_shape` returns this form.
