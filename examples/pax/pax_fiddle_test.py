"""Tests of hyperparameters that are fields of the class, and of their configs.

The classes are written like the layers and tasks of Paxml 1.4.0.
"""

import fiddle as fdl
from fiddle import selectors
import jax
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax import base_task
from examples.pax import layers
from examples.pax import pax_fiddle
from examples.pax.inputs import synthetic
from examples.pax.layers import activations

LayerTpl = pax_fiddle.Config[base_layer.BaseLayer]
template_field = base_layer.template_field
instantiate = base_layer.instantiate


class Linear(base_layer.BaseLayer):
  """A product with a matrix."""

  input_dims: int = 0
  output_dims: int = 0
  weight_init: base_layer.WeightInit | None = None

  def setup(self) -> None:
    shape = [self.input_dims, self.output_dims]
    weight = base_layer.WeightHParams(shape=shape, init=self.weight_init)
    self.create_variable('w', weight)

  def __call__(self, inputs):
    return inputs @ self.theta.w


class FeedForward(base_layer.BaseLayer):
  """A product and an activation."""

  input_dims: int = 0
  output_dims: int = 0
  linear_tpl: LayerTpl = template_field(Linear)
  activation_tpl: pax_fiddle.Config[activations.BaseActivation] = (
    template_field(activations.ReLU)
  )
  last_tpl: LayerTpl | None = template_field(None)

  def setup(self) -> None:
    linear_p = self.linear_tpl.clone()
    linear_p.set(input_dims=self.input_dims, output_dims=self.output_dims)
    self.create_child('linear', linear_p)
    self.create_child('activation', self.activation_tpl.clone())
    if self.last_tpl is not None:
      self.create_child('last', self.last_tpl)

  def __call__(self, inputs):
    out = self.activation(self.linear(inputs))
    return out if self.last_tpl is None else self.last(out)


class Wide(FeedForward):
  """Redeclares a field of its parent, and adds one."""

  output_dims: int = 8
  factor: float = 2.0

  def __call__(self, inputs):
    return self.factor * super().__call__(inputs)


ONE = base_layer.WeightInit.Constant(1.0)


def test_a_layer_of_fields():
  p = pax_fiddle.Config(FeedForward, input_dims=3, output_dims=2)
  p.linear_tpl.weight_init = ONE
  p.last_tpl = pax_fiddle.Config(Linear, input_dims=2, output_dims=1)
  p.last_tpl.weight_init = base_layer.WeightInit.Constant(-2.0)
  assert isinstance(p, pax_fiddle.Config)
  assert isinstance(p, FeedForward.HParams)
  assert p.cls is pax_fiddle.get_callable(p) is FeedForward
  assert fdl.get_callable(p) is FeedForward
  x = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, -9.0]], np.float32)
  for build in pax_fiddle.build, instantiate, fdl.build:
    made = build(p)
    variables = made.init(jax.random.key(0))
    assert made.input_dims == 3
    # The hidden values are max(0, 6) and max(0, -6), twice; -2 times the sum.
    np.testing.assert_array_equal(made.apply(variables, x), [[-24.0], [0.0]])
  assert instantiate(p, output_dims=4).output_dims == 4
  # Only Fiddle makes one layer of a template that is used twice.
  twice = pax_fiddle.Config(FeedForward, linear_tpl=p, last_tpl=p)
  assert fdl.build(twice).last_tpl.is_shared
  assert not instantiate(twice).last_tpl.is_shared
  assert p.output_dims == 2
  # Each config has separate templates.
  assert pax_fiddle.Config(FeedForward).linear_tpl.weight_init is None
  with pytest.raises(AttributeError, match=r"'input_dimz'.*mean 'input_dims'"):
    p.input_dimz = 3
  with pytest.raises(AttributeError, match="no attribute 'input_dimz'"):
    _ = made.input_dimz
  with pytest.raises(TypeError, match='Expected a pax_fiddle'):
    instantiate(made)


def test_fields_are_inherited_and_declared_again():
  p = pax_fiddle.Config(Wide, input_dims=3)
  p.linear_tpl.weight_init = ONE
  layer = p.Instantiate()
  assert (layer.output_dims, layer.factor, layer.dtype) == (8, 2.0, np.float32)
  assert FeedForward.HParams().output_dims == 0
  out = layer.apply(layer.init(jax.random.key(0)), np.ones([1, 3], np.float32))
  np.testing.assert_array_equal(out, np.full([1, 8], 6.0))
  # The two ways to declare fields inherit from each other.

  class Inner(Wide):
    class HParams(Wide.HParams):
      depth: int = 1

  class Outer(Inner):
    width: int = 2

  layer = pax_fiddle.Config(Outer, depth=5, factor=3.0).Instantiate()
  assert (layer.width, layer.depth, layer.factor) == (2, 5, 3.0)
  assert layer.output_dims == layer.hparams.output_dims == 8


def test_wrong_fields():
  with pytest.raises(AttributeError, match=r'output_dims = .*has no type'):

    class Untyped(FeedForward):
      output_dims = 8

  with pytest.raises(AttributeError, match="cannot have a field 'apply'"):

    class Taken(base_layer.BaseLayer):
      apply: bool = True

  with pytest.raises(TypeError, match=r"\['output_dims'\] and a class HParams"):

    class Both(FeedForward):
      output_dims: int = 2

      class HParams(base_layer.BaseLayer.HParams):
        other: int = 3


def test_fiddles_tools_know_the_class():
  block_p = pax_fiddle.Config(layers.StackedTransformer, num_layers=1)
  repeated_p = pax_fiddle.Config(
    layers.StackedTransformerRepeated, block=block_p
  )
  # A copy has the same class, so Fiddle's selectors find it.
  repeated_p = fdl.copy_with(repeated_p, x_times=9)
  selectors.select(repeated_p, layers.StackedTransformerRepeated).set(x_times=3)
  assert repeated_p.x_times == 3
  layer_p = repeated_p.block.transformer_layer_params_tpl
  selectors.select(repeated_p, layers.Transformer).set(num_heads=2)
  assert layer_p.num_heads == 2


def test_names_in_a_task_are_paxmls():
  task_p = pax_fiddle.Config(base_task.SingleTask, name='xformer_task')
  train_p = pax_fiddle.Config(base_task.SingleTask.Train, num_train_steps=7)
  assert task_p.train.set(num_train_steps=7) == train_p
  vn_p = pax_fiddle.Config(base_task.SingleTask.VariationalNoise, vn_scale=0.5)
  assert task_p.vn.set(vn_scale=0.5) == vn_p


def test_an_error_in_a_layer_is_not_hidden_by_a_missing_attribute():
  class Wrong(base_layer.BaseLayer):
    def setup(self):
      pax_fiddle.Config(Linear, input_dimz=3)

    @property
    def depth(self):
      return self.hparams.depht

  layer = instantiate(pax_fiddle.Config(Wrong))
  with pytest.raises(AttributeError, match="mean 'input_dims'"):
    layer.abstract_init()
  with pytest.raises(AttributeError, match="no field 'depht'"):
    _ = layer.depth


def test_a_config_of_what_has_no_hyperparameters():
  cls = synthetic.SyntheticInput
  p = pax_fiddle.Config(cls, batch_size=4, vocab_size=16, length=6)
  assert type(p) is pax_fiddle.Config
  q = p.clone().set(batch_size=2)
  assert q.Instantiate().get_next()['ids'].shape == (2, 6)
  assert instantiate(p, length=3).get_next()['ids'].shape == (4, 3)
  assert pax_fiddle.build(p).batch_size == 4
  assert pax_fiddle.get_callable(p) is cls


def test_defaults_that_are_made_for_each_owner():
  class Holder(base_layer.BaseLayer):
    tpl: LayerTpl = template_field(lambda: pax_fiddle.Config(Linear))
    sizes: dict[str, int] = pax_fiddle.instance_field(dict)
    widths: list[int] = pax_fiddle.field(default_factory=lambda: [1])

  p, q = pax_fiddle.Config(Holder), pax_fiddle.Config(Holder)
  p.tpl.input_dims = p.sizes['a'] = 3
  p.widths.append(2)
  assert (q.tpl, q.sizes, q.widths) == (Linear.HParams(), {}, [1])
  layer = p.Instantiate()
  assert (layer.tpl.input_dims, layer.sizes, layer.widths) == (
    3,
    {'a': 3},
    [1, 2],
  )
