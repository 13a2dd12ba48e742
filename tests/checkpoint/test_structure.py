"""Tests of jaxline.checkpoint.structure."""

import collections
import dataclasses
import json
import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest

from jaxline import errors
from jaxline.base import trees
from jaxline.checkpoint import structure
from jaxline.run_directory import store as store_lib
from tests import checkpoints as lib

HERE = __name__


class Point(NamedTuple):
  x: Any
  y: Any


@dataclasses.dataclass
class Plain:
  """No argument of its constructor gives it another `b`."""

  a: Any
  b: Any = dataclasses.field(default=7, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
  a: Any
  b: Any


@dataclasses.dataclass
class DictData(dict):
  a: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
  w: Any
  name: str = dataclasses.field(metadata={'static': True})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
  a: int


class Outer:
  class Inner(NamedTuple):
    a: int


class Opaque:
  pass


def encode(value, name='v'):
  """Returns the description, as JSON gives it back, and the arrays."""
  arrays = {}
  described = structure.encode(value, name, arrays)
  # Fields of a manifest are sorted.
  return json.loads(json.dumps(described, sort_keys=True)), arrays


def trip(value, name='v'):
  return structure.decode(*encode(value, name))


@pytest.mark.parametrize('value', [
  [None, True, -(2**63) - 1, 10**300, -0.0, 0.1, 5e-324, 1e16, 3.0, math.inf],
  [complex(0.1, -0.0), 'é😀', 'a"\n\0', '\ud800', b'', b'\x00\xff', math.nan],
  [[], [1, [2.0]], (), (1, (2,), [3]), {}, {'b': 1, 'a': 2}, {'list': [1]}],
  {1: 'x', '1': 'y', None: 0, (1, 2): {3: 4}, 1.5: True, b'k': ()},
  {'jax': 'v'}, Point((), None), Outer.Inner(3), Plain([2]),
  {Slotted('a', None): 2}, Registered(1.5, 'n'),
  collections.OrderedDict(b=1, a=2),
], ids=repr)  # fmt: skip
def test_round_trip(value):
  back = trip(value)
  assert type(back) is type(value)
  assert repr(back) == repr(value)


@pytest.mark.parametrize(('value', 'expected'), [
  ([2**64, None, -0.5], [2**64, None, -0.5]),
  (complex(1, 2), {'complex': [1.0, 2.0]}),
  ({'b': 1, 'a': (2,)}, {'dict': [['b', 1], ['a', {'tuple': [2]}]]}),
  (b'a', {'bytes': 'YQ=='}),
  (Point(1, 2), {'namedtuple': [f'{HERE}:Point', {'x': 1, 'y': 2}]}),
  (Slotted(1, 2), {'dataclass': [f'{HERE}:Slotted', {'a': 1, 'b': 2}]}),
  (Registered(1, 's'),
   {'node': [f'{HERE}:Registered', [1], {'tuple': ['s']}]}),
  ([jnp.ones(1), (np.ones(2),), np.float32(3)],
   [{'jax': 'v/0'}, {'tuple': [{'numpy': 'v/1/0'}]}, {'scalar': 'v/2'}]),
])  # fmt: skip
def test_written_form(value, expected):
  # The format is on disk: a change here is a change of every checkpoint.
  assert encode(value)[0] == expected


def test_numpy_leaves_are_writeable_wherever_they_were_read_to():
  back = structure.decode({'numpy': 'n'}, {'n': jnp.arange(2.0)})
  assert type(back) is np.ndarray
  back += 1
  np.testing.assert_array_equal(back, [1.0, 2.0])


def test_equal_names_are_numbered_alike_in_any_order():
  one, two, three = jnp.ones(1), jnp.ones(2), jnp.ones(3)
  tree = {'a/b': {'w': two}, 'a': {'b/w': one, 'b': {'w': three}}}
  expected = {'a/b/w': three, 'a/b/w#2': one, 'a/b/w#3': two}
  leaves = trees.named_leaves(tree)
  assert list(leaves) == list(expected)
  assert all(leaves[name] is expected[name] for name in expected)
  _, arrays = encode(tree, 'p')
  assert {name: x.shape for name, x in arrays.items()} == {
    'p/a/b/w': (3,), 'p/a/b/w#2': (1,), 'p/a/b/w#3': (2,)
  }  # fmt: skip
  back = trip(tree, 'p')
  assert list(back) == ['a/b', 'a']
  assert back['a/b']['w'] is two
  assert back['a']['b/w'] is one


class Tagged:
  """Children by name; the rest, which no file can hold, is static."""

  def __init__(self, children, static=None):
    self.children, self.static = children, static


jax.tree_util.register_pytree_with_keys(
  Tagged,
  lambda x: (
    [(jax.tree_util.GetAttrKey(k), y) for k, y in x.children.items()],
    (tuple(x.children), x.static),
  ),
  lambda aux, children: Tagged(
    dict(zip(aux[0], children, strict=True)), aux[1]
  ),
)


@jax.tree_util.register_pytree_node_class
class Same:
  """Found by its name; the auxiliary data is itself no data."""

  def __init__(self, x):
    self.x = x

  def tree_flatten(self):
    return (self.x,), (Opaque, relu)

  @classmethod
  def tree_unflatten(cls, aux, children):
    assert aux == (Opaque, relu)
    return cls(*children)


relu = jax.nn.relu


def _local():
  """Returns classes that cannot be found by their names."""

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass
  class Data:
    w: Any

  class Pair(NamedTuple):
    a: Any
    b: Any

  return Data, Pair


_Data, _Pair = _local()


# Registered containers, made of an array.
_NODES = {
  'keys': lambda x: Tagged({'a': x, 'b': [x, None]}, Opaque),
  'node': lambda x: Same({'w': Same(x)}),
  'empty': lambda x: [Tagged({}, relu), collections.defaultdict(list)],
  'dataclass': lambda x: _Data((_Pair(x, 1), _Data(x))),
  'partial': lambda x: jax.tree_util.Partial(relu, x, key=x),
  'default': lambda x: collections.defaultdict(list, b=x, a=[x]),
}


def _assert_equal(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  lib.assert_same(jax.tree.leaves(got), jax.tree.leaves(want))


@pytest.mark.parametrize(
  ('name', 'own'), [*((name, False) for name in _NODES), ('keys', True)]
)
def test_registered_containers(name, own, open_run, tmp_path):
  def made(n):
    x = jnp.arange(n, n + 3.0)
    whole = [_NODES[name](x), Tagged({'text': 'a', 'number': n}, relu)]
    return lib.PerDevice({'a': _NODES[name](x)}, {'b': whole})

  saver = open_run(train_checkpoint_all_hosts=own)
  lib.save(saver, saved := made(1))
  lib.restore(open_run('eval'), live := made(0))
  for entry in 'ab':
    _assert_equal(live.held()[entry], saved.held()[entry])
  if name == 'empty' or own:
    return  # Rules find no arrays.
  fork = open_run(
    directory=tmp_path / 'fork',
    restore_from=str(tmp_path / 'run'),
    restore_rules=[('a(.*)', r'a\1'), ('b.*', None)],
  )
  lib.restore(fork, live := made(0))
  _assert_equal(live.held()['a'], saved.held()['a'])
  _assert_equal(live.held()['b'], made(0).held()['b'])


@pytest.mark.parametrize(('saved', 'live', 'match'), [
  (Tagged({'a': 1}, relu), None, "'b/x'.*no such node"),
  (Tagged({'a': 1}, relu), Tagged({'c': 1}, relu),
   r"'b/x'.*\['a'\].*\['c'\]"),
  (Tagged({'a': 1}, relu), Same(1), "'b/x'.*Tagged.*Same"),
  ([Same(1), Same(2)], [Same(1)], "'b/x/1'.*no such node"),
])  # fmt: skip
def test_other_live_containers_are_refused(saved, live, match, open_run):
  lib.save(open_run(), lib.PerDevice({}, {'b': {'x': saved}}))
  with pytest.raises(errors.UsageError, match=match):
    lib.restore(open_run('eval'), lib.PerDevice({}, {'b': {'x': live}}))


def test_refuses_by_name():
  @dataclasses.dataclass
  class Local:
    a: int

  stale = Plain(1)
  stale.later = 2  # type: ignore[attr-defined]
  for value, where, what in (
    ({1}, '', 'builtins.set'),
    (config_dict.ConfigDict({'a': 1}), '', 'ConfigDict'),
    (np.array(['a']), '', 'numpy.ndarray'),
    (np.ones(2, '>i4'), '', 'numpy.ndarray'),
    (np.datetime64('2026-01-02'), '', 'numpy.datetime64'),
    (np.ma.masked_array([1], [1]), '', 'MaskedArray'),
    (jax.ShapeDtypeStruct((2,), jnp.int32), '', 'ShapeDtypeStruct'),
    (Local(1), '', 'Local (its class cannot be found by its name)'),
    (Opaque(), '', 'Opaque'),
    (Static(1), '', 'registered as static'),
    (stale, '', "attributes that are not fields: ['later']"),
    (DictData(a=1), '', 'DictData'),
    # Functions within, where no live value is at hand.
    (optax.sgd(0.1), '/init', 'a builtins.function'),
    (jax.tree_util.Partial(jnp.add, 1), '/aux', ''),
    ({len: 1}, '/keys/<built-in function len>', ''),
  ):
    with pytest.raises(TypeError) as caught:
      encode({'it': [1, {'x': value}]}, 'train_iter')
    message = str(caught.value)
    assert f"'train_iter/it/1/x{where}" in message
    assert what in message
    assert 'config.checkpoint_allow_pickle' in message


_POINT = f'{HERE}:Point'


@pytest.mark.parametrize(
  ('kind', 'body'),
  [
    ('pickle', ['v', 'gASVAAAA']),
    # No function, and no class of another kind, is found by its name.
    *(
      (kind, [target, {'a': 'id'}])
      for kind in ('namedtuple', 'dataclass')
      for target in ('os:system', 'subprocess:Popen', 'builtins:dict',
                     f'{HERE}:DictData', f'{HERE}:sys.exit', '', 3)
    ),
    ('node', ['os:system', ['id'], None]),
    ('node', ['jax._src.tree_util:Partial', ['id'], _POINT]),
    ('namedtuple', [f'{HERE}:Slotted', {'a': 1, 'b': 2}]),
    ('dataclass', [_POINT, {'x': 1, 'y': 2}]),
    ('node', [_POINT, [1, 2], None]),
    ('dataclass', [f'{HERE}:Registered', {'w': 1, 'name': 's'}]),
    # Other fields, malformed bodies, arrays that are not there.
    ('namedtuple', [_POINT, {'x': 1, 'y': 2, 'z': 3}]),
    ('dataclass', [f'{HERE}:Slotted', {'a': 1, 'b': 2, '__class__': 3}]),
    ('node', [f'{HERE}:Registered', [1, 2, 3], None]),
    ('live', ['v', [f'{HERE}:Same', ['0']], [1]]),
    ('treedef', {'node': ['os:system', [], None]}),
    ('bytes', 'xyz'),
    ('dict', [[[1], 2]]),
    ('key', ['v', 'unknown']),
    ('jax', 'p/w'),
    ('__reduce__', ['os:system', 'exit 3']),
  ],
)  # fmt: skip
def test_edited_structures_are_refused(kind, body, monkeypatch):
  ran = []
  for module, name in (('os', 'system'), ('builtins', 'eval')):
    monkeypatch.setattr(sys.modules[module], name, lambda *a: ran.append(a))
  with pytest.raises(store_lib.RefusedError):
    structure.decode([{kind: body}], {'v': np.zeros(2, np.uint32)})
  assert not ran
