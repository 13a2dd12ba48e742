"""Tests of hyperparameters, by themselves and through Fiddle.

`pax_fiddle_test` has fields of the class itself. The page from_pax.md has the
layers of Pax's documents, and `tests/test_notebooks.py` runs it.
"""

import dataclasses
import enum
import pickle
import runpy
import sys

import fiddle as fdl
import jax.numpy as jnp
import pytest

from examples import pax
from examples.pax import base_layer
from examples.pax import hparams
from examples.pax import layers

BaseHParams = hparams.BaseHParams
sub_config_field = hparams.sub_config_field


class Colour(enum.Enum):
  RED = 1


class Leaf(hparams.Configurable):
  class HParams(BaseHParams):
    size: int = 0
    colour: Colour = Colour.RED


class Tree(hparams.Configurable):
  class HParams(BaseHParams):
    """Hyperparameters of a tree."""

    left: BaseHParams = sub_config_field(Leaf.HParams)
    right: BaseHParams | None = sub_config_field(None)
    others: list = dataclasses.field(default_factory=list)
    by_name: dict = dataclasses.field(default_factory=dict)


class Tall(Tree):
  class HParams(BaseHParams):
    height: float = 1.5


def _tree(**kwargs):
  return Tree.HParams(
    right=Leaf.HParams(size=1),
    others=[Leaf.HParams(size=2), (Leaf.HParams(size=3), 'text')],
    by_name={'a': Leaf.HParams(size=4)},
    **kwargs,
  )


def _leaves(tree):
  first, (second, _) = tree.others
  return [tree.left, tree.right, first, second, tree.by_name['a']]


@pytest.mark.parametrize(
  'use',
  [
    lambda: Leaf.HParams(sise=3),
    lambda: setattr(Tree.HParams.config().left, 'sise', 3),
    lambda: Leaf.HParams().sise,
    lambda: Leaf.HParams().Instantiate(sise=3),
    lambda: fdl.build(Leaf.HParams.partial())(sise=3),
  ],
)
def test_a_typo_names_the_nearest_field(use):
  with pytest.raises(
    AttributeError,
    match=r"Leaf.HParams has no field 'sise'. Did you mean 'size'\? Its fields"
    r" are \['colour', 'size'\]. docs/reference/from_pax.md",
  ):
    use()


def test_frozen_is_all_that_is_nested_and_a_clone_is_not():
  tree = _tree()
  assert not tree.is_frozen
  assert tree.freeze() is tree
  for nested in tree, *_leaves(tree):
    assert nested.is_frozen
    with pytest.raises(AttributeError, match=r'is frozen.*clone\(\)'):
      setattr(nested, nested.names()[0], 7)
  clone = tree.clone()
  assert clone == tree
  for old, new in zip(_leaves(tree), _leaves(clone), strict=True):
    new.size += 10
    assert new.size == old.size + 10
  assert clone != tree
  twice = Leaf.HParams()
  clone = Tree.HParams(left=twice, right=twice).clone()
  assert clone.left is clone.right
  assert pickle.loads(pickle.dumps(tree)) == tree


def test_instantiate_copies_and_freezes():
  tree = _tree()
  made = tree.Instantiate(left=Leaf.HParams(size=9))
  assert type(made) is Tree
  assert made.hparams.is_frozen
  assert (made.hparams.left.size, tree.left.size) == (9, 0)
  tree.right.size = 5
  assert made.hparams.right.size == 1

  class Plain(BaseHParams):
    size: int = 0

  with pytest.raises(TypeError, match='belongs to no class'):
    Plain().Instantiate()
  assert fdl.build(Plain.config(size=3)) == Plain(size=3)


def test_inheritance():
  assert Tall.HParams().names() == [*Tree.HParams().names(), 'height']
  assert isinstance(Tall.HParams(), Tree.HParams)
  assert Tree.HParams.__doc__ == 'Hyperparameters of a tree.'

  class Wide(hparams.Configurable):
    class HParams(BaseHParams):
      width: int = 3

  class Both(Tall, Wide):
    class HParams(Tall.HParams):
      both: int = 4

  p = Both.HParams(width=5)
  assert dataclasses.is_dataclass(p)
  assert sorted(p.names()) == sorted([*Tall.HParams().names(), 'width', 'both'])
  assert (p.height, p.width, p.both) == (1.5, 5, 4)
  assert isinstance(p, Wide.HParams)
  assert type(p.Instantiate()) is Both


def _inherits(*parents, typed=True, overrides=(), **body):
  """Makes a class whose HParams have this body."""
  kinds = {name: type(value) for name, value in body.items()} if typed else {}
  body |= {'__annotations__': kinds, '_attribute_overrides': overrides}
  inner = type('HParams', (BaseHParams,), {'__qualname__': 'New', **body})
  return type('New', parents, {'HParams': inner})


class High(hparams.Configurable):
  class HParams(BaseHParams):
    height: float = 2.5


def test_another_default_must_be_meant():
  with pytest.raises(
    AttributeError,
    match=r"redefines \['height'\].*_attribute_overrides = \('height',\)",
  ):
    _inherits(Tall, height=2.0)
  right = _inherits(Tall, High, height=2.0, overrides=('height',))
  assert right.HParams().height == 2.0
  assert Tall.HParams().height == 1.5
  # A child of a class with an override must declare its own override.
  with pytest.raises(AttributeError, match='redefines'):
    _inherits(right, height=3.0)
  # So must a child of two classes with different defaults.
  with pytest.raises(AttributeError, match=r"redefines \['height'\]"):
    _inherits(Tall, High)
  with pytest.raises(AttributeError, match=r'depth = .*has no type'):
    _inherits(Tall, depth=2.0, typed=False)
  with pytest.raises(AttributeError, match="cannot have a field 'clone'"):
    _inherits(Tall, clone=0)


def test_text():
  def double(x):
    return 2 * x

  p = layers.FeedForward.HParams(
    output_dims=3,
    dtype=jnp.bfloat16,
    params_init=base_layer.WeightInit.Gaussian(0.5),
    weight_split_dims_mapping={'w': ('data', None)},
  )
  lines = p.to_text().splitlines()
  assert lines == sorted(lines)
  assert {
    'activation_tpl.type : examples.pax.layers.activations.ReLU',
    'dtype : bfloat16',
    'linear_tpl.output_dims : 0',
    'name : None',
    "params_init : WeightInit(method='gaussian', scale=0.5)",
    "weight_split_dims_mapping : {'w': ('data', None)}",
  } <= {*lines}
  lines = _tree(left=double).to_text().splitlines()
  assert {
    "by_name['a'].colour : Colour.RED",
    'left : test_text.<locals>.double',
    'others[1][0].size : 3',
    "others[1][1] : 'text'",
    f'right.type : {__name__}.Leaf',
    f'type : {__name__}.Tree',
  } <= {*lines}
  assert repr(Leaf.HParams(size=2)) == (
    'Leaf.HParams(size=2, colour=<Colour.RED: 1>)'
  )


def test_what_fiddle_builds_is_what_hparams_make():
  config = _tree()
  made = fdl.build(config)
  assert type(made) is Tree
  assert made.hparams == config
  assert made.hparams.left.is_frozen
  # A template that Fiddle built can be completed.
  assert made.hparams.left.clone().set(size=6).size == 6
  # The config has not changed, and builds a different object.
  config.left.size = 5
  assert fdl.build(config).hparams.left.size == 5
  assert made.hparams.left.size == 0
  partial = Tree.HParams.partial()
  partial.left.size = 8
  make = fdl.build(partial)
  assert make().hparams.left.size == 8
  assert make(left=Leaf.HParams(size=9)).hparams.left.size == 9


def test_one_config_used_twice_is_one():
  leaf = Leaf.HParams.config(size=1)
  config = Tree.HParams.config(left=leaf, by_name={'a': leaf}, others=[leaf])
  p = fdl.build(config).hparams
  assert p.left.is_shared
  assert p.by_name['a'] is p.others[0] is p.left
  # Neither a single config nor equal configs are shared.
  alone = fdl.build(Tree.HParams(left=leaf, right=leaf.clone())).hparams
  assert not alone.left.is_shared
  assert not alone.right.is_shared
  # A clone of the whole shares within itself. A clone of a part is not shared.
  clone = p.clone()
  assert clone.left is clone.others[0] is not p.left
  assert clone.left.is_shared
  assert not p.left.clone().is_shared
  # `Instantiate` makes a separate object for each use of a template.
  assert not config.Instantiate().hparams.left.is_shared


def test_without_fiddle_it_is_said_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'fiddle', None)
  with pytest.raises(ModuleNotFoundError, match=r"pip install -e '.\[pax\]'"):
    runpy.run_path(pax.__file__)
