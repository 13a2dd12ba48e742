"""Tests of layers: their variables, children and runs."""

import fiddle as fdl
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax.layers import repeats
from jaxline.parallel import partitioning

LayerTpl = base_layer.LayerTpl
WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit
template_field = base_layer.template_field

# This kind of key compiles fast.
KEY = jax.random.key(0, impl='rbg')
X = np.arange(6, dtype=np.float32).reshape(2, 3) / 5 - np.float32(0.4)


class Linear(base_layer.BaseLayer):
  """A product that counts its calls and reports sums."""

  input_dims: int = 3
  output_dims: int = 3

  def setup(self):
    shape = (self.input_dims, self.output_dims)
    weight = WeightHParams(shape, tensor_split_dims_mapping=('embed', 'mlp'))
    self.create_variable('w', weight)
    zero = WeightHParams((), WeightInit.Constant(0.0), jnp.int32)
    self.create_variable('calls', zero, trainable=False)

  def fprop(self, x):
    self.update_var('calls', self.theta.calls + 1)
    self.add_summary('sum', x.sum())
    self.add_summary('most', x.max(), verbosity=3)
    self.add_aux_loss('square', (x * x).sum(), weight=x.shape[0])
    return x @ self.theta.w.astype(self.fprop_dtype)


class Two(base_layer.BaseLayer):
  """Two layers, with tanh between them."""

  first: LayerTpl = template_field(Linear)
  second: LayerTpl = template_field(Linear)

  def setup(self):
    self.create_child('first', self.hparams.first)
    self.create_child('second', self.hparams.second)

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class Stack(base_layer.BaseLayer):
  """A sequence of equal layers."""

  layer: LayerTpl = template_field(Linear)
  times: int = 3

  def setup(self):
    repeat = repeats.Repeat.HParams(sub_tpl=self.layer, x_times=self.times)
    self.create_child('x', repeat)

  def __call__(self, x):
    return self.x(x)


def _shapes(variables):
  return jax.tree.map(jnp.shape, variables)


def test_a_layer_is_two_pure_functions():
  layer = Two.HParams(second=Linear.HParams(output_dims=4)).Instantiate()
  variables = layer.init(KEY)
  assert _shapes(variables) == {
    'params': {'two/first': {'w': (3, 3)}, 'two/second': {'w': (3, 4)}},
    'non_trainable': {
      'two/first': {'calls': ()},
      'two/second': {'calls': ()},
    },
  }
  assert layer.num_params() == 9 + 12
  w = [v['w'] for v in variables['params'].values()]
  np.testing.assert_allclose(
    layer.apply(variables, X), np.tanh(X @ w[0]) @ w[1], rtol=1e-5
  )
  # Without an input, nothing runs.
  abstract = layer.abstract_init()
  assert jax.tree.map(lambda w: w.full_shape, abstract) == _shapes(variables)
  assert abstract['params']['two/first']['w'].init == WeightInit.Xavier()
  again = layer.init(KEY, X)
  jax.tree.map(np.testing.assert_array_equal, variables, again)
  named = layer.hparams.clone().set(name='root').Instantiate()
  assert list(named.init(KEY)['params']) == ['root/first', 'root/second']


@pytest.mark.parametrize(
  ('init', 'shape', 'stddev', 'limit'),
  [
    (WeightInit.Gaussian(0.3), (200, 50), 0.3, None),
    (WeightInit.TruncatedGaussian(0.3), (200, 50), 0.3 * 0.87963, 0.6),
    (WeightInit.GaussianSqrtFanOut(2.0), (200, 50), 2 / 50**0.5, None),
    (WeightInit.Uniform(0.7), (200, 50), 0.7 / 3**0.5, 0.7),
    (WeightInit.Xavier(), (200, 50), (2 / 250) ** 0.5, (6 / 250) ** 0.5),
    # The size of a filter counts for both fans.
    (WeightInit.Xavier(2.0), (5, 40, 50), None, 2 * (6 / 450) ** 0.5),
    (WeightInit.Xavier(), (10_000,), None, (6 / 20_000) ** 0.5),
    (WeightInit.Constant(1.5), (200, 50), 0.0, 1.5),
  ],
)
def test_first_values(init, shape, stddev, limit):
  weight = WeightHParams(shape, init=init, dtype=jnp.float32)
  value = np.asarray(weight.make(KEY), np.float64)
  if stddev is None:
    stddev = limit / 3**0.5
  # 10,000 numbers determine the deviation to 0.7% and the mean to 1%.
  assert value.std() == pytest.approx(stddev, rel=0.03, abs=1e-9)
  if limit is not None:
    assert 0.999 * limit < np.abs(value).max() <= limit * (1 + 1e-6)
  if init.method != 'constant':
    assert abs(value.mean()) < 0.04 * stddev


def test_each_layer_of_a_stack_has_different_first_values():
  weight = WeightHParams(
    (200, 50), WeightInit.GaussianSqrtFanIn(), jnp.float32, repeat_prefix=(3, 2)
  )
  assert weight.size == 6 * 200 * 50
  assert weight.axes == ('layers', 'layers', None, None)
  flat = np.reshape(jax.jit(weight.make)(KEY), (6, -1))
  # The fans are those of one layer.
  np.testing.assert_allclose(flat.std(axis=1), 200**-0.5, rtol=0.03)
  assert len(np.unique(flat[:, 0])) == 6


def test_first_values_depend_on_the_names_and_the_key_only():
  class Three(Linear):
    def setup(self):
      self.create_variable('a', WeightHParams((3, 3)))
      super().setup()

  def first(cls, name='x', seed=0):
    key = jax.random.key(seed, impl='rbg')
    params = cls.HParams(name=name).Instantiate().init(key)['params'][name]
    return jax.tree.map(np.asarray, params)

  one, three = first(Linear), first(Three)
  np.testing.assert_array_equal(one['w'], three['w'])
  for other in three['a'], first(Linear, 'y')['w'], first(Linear, seed=1)['w']:
    assert np.all(other != one['w'])


def test_what_a_child_leaves_open_is_its_parents():
  p = Two.HParams(
    fprop_dtype=jnp.bfloat16,
    params_init=WeightInit.Constant(0.5),
    second=Linear.HParams(
      params_init=WeightInit.Constant(2.0), dtype=jnp.bfloat16
    ),
  )
  layer = p.Instantiate()
  params = layer.init(KEY)['params']
  np.testing.assert_array_equal(params['two/first']['w'], np.full((3, 3), 0.5))
  assert params['two/first']['w'].dtype == jnp.float32
  assert params['two/second']['w'].dtype == jnp.bfloat16
  assert float(params['two/second']['w'][0, 0]) == 2
  out = layer.apply(layer.init(KEY), X.astype(jnp.bfloat16))
  assert out.dtype == jnp.bfloat16
  wide = p.clone().set(fprop_dtype=None).Instantiate()
  assert wide.apply(wide.init(KEY), X).dtype == jnp.float32
  # As in Praxis, all children inherit a dtype that is not the default.
  whole = Stack.HParams(layer=Two.HParams(), dtype=jnp.bfloat16).Instantiate()
  for of in whole.abstract_init()['params'].values():
    assert of['w'].dtype == jnp.bfloat16
  # The template has not changed.
  assert p.first.fprop_dtype is None
  assert not p.first.is_frozen


# Shared layers.


def _shared(how):
  one = Linear.HParams(shared_weight_layer_id='one' if how == 'id' else None)
  both = Two.HParams(first=one, second=one)
  return fdl.build(both) if how == 'config' else both.Instantiate()


@pytest.mark.parametrize('how', ['config', 'id'])
def test_a_shared_layers_gradients_add(how):
  apart, shared = _shared('hparams'), _shared(how)
  assert (apart.num_params(), shared.num_params()) == (18, 9)
  variables = shared.init(KEY)
  assert list(variables['params']) == ['two/first']
  w = variables['params']['two/first']['w']

  def grads(layer, *names):
    def loss(params):
      return layer.apply({**layer.init(KEY), 'params': params}, X).sum()

    found = jax.grad(loss)({name: {'w': w} for name in names})
    return sum(of['w'] for of in found.values())

  np.testing.assert_allclose(
    grads(shared, 'two/first'),
    grads(apart, 'two/first', 'two/second'),
    rtol=1e-6,
  )
  # The shared layer was called twice.
  _, collected = shared.apply(variables, X, mutable=True, verbosity=2)
  assert collected.non_trainable == {'two/first': {'calls': 2}}
  assert sorted(collected.summaries) == ['two/first/sum', 'two/first/sum_1']


def test_layers_are_shared_across_a_tree():
  def paths(layer):
    return [path.partition('/')[2] for path in layer.init(KEY)['params']]

  def tree(one):
    inner = Two.HParams(first=one)
    return Two.HParams(first=inner, second=Two.HParams(first=inner, second=one))

  # All uses of `one` are one layer. `inner`, used twice, is one layer, too.
  shared = ['first/first', 'first/second']
  assert paths(fdl.build(tree(Linear.HParams()))) == shared
  by_id = tree(Linear.HParams(shared_weight_layer_id='one')).Instantiate()
  assert paths(by_id) == [*shared, 'second/first/second']
  assert len(paths(tree(Linear.HParams()).Instantiate())) == 5


def test_shared_layers_must_be_equal():
  first = Linear.HParams(shared_weight_layer_id='one')
  second = Linear.HParams(shared_weight_layer_id='one', output_dims=4)
  with pytest.raises(
    ValueError,
    match=r"'one'\) must have equal.* two/second differs from two/first"
    r' in\n- output_dims : 3\n\+ output_dims : 4$',
  ):
    Two.HParams(first=first, second=second).Instantiate().init(KEY)


def test_a_layer_within_a_stack_is_not_one_outside():
  one = Linear.HParams(shared_weight_layer_id='one')
  both = Two.HParams(first=one, second=one)
  # Sharing works within one layer of the stack.
  layer = Stack.HParams(layer=both).Instantiate()
  assert layer.num_params() == 3 * 9
  stack = Stack.HParams(layer=both)
  for outside in one, Stack.HParams(layer=one):
    with pytest.raises(
      ValueError, match='the same layer as one within a stack'
    ):
      Two.HParams(first=stack, second=outside).Instantiate().num_params()


# Side outputs.


def test_non_trainable_variables():
  layer = Two.HParams().Instantiate()
  variables = layer.init(KEY)
  assert variables['non_trainable']['two/first']['calls'] == 0
  out, collected = layer.apply(variables, X, mutable=True)
  assert collected.non_trainable == {
    'two/first': {'calls': 1},
    'two/second': {'calls': 1},
  }
  assert variables['non_trainable']['two/first']['calls'] == 0
  np.testing.assert_array_equal(out, layer.apply(variables, X))

  class Wrong(Linear):
    def __call__(self, name, value):
      self.update_var(name, value)

  wrong = Wrong.HParams().Instantiate()
  for name, value, message in (
    ('w', X, "cannot set 'w'; expected"),
    ('calls', jnp.zeros([]), r'int32 \(\); got float32 \(\)'),
    ('calls', jnp.zeros(2, int), r'int32 \(\); got int32 \(2,\)'),
  ):
    with pytest.raises(ValueError, match=message):
      wrong.apply(wrong.init(KEY), name, value)


def test_summaries_and_losses():
  layer = Two.HParams(name='net').Instantiate()
  variables = layer.init(KEY)

  def collected(**kwargs):
    return layer.apply(variables, X, mutable=True, **kwargs)[1]

  assert collected().summaries == {}
  assert collected(verbosity=1).summaries == {}
  some = collected(verbosity=2).summaries
  assert sorted(some) == ['net/first/sum', 'net/second/sum']
  assert some['net/first/sum'] == X.sum()
  every = collected(verbosity=3).summaries
  assert every['net/first/most'] == X.max()
  assert len(every) == 4
  losses = collected().aux_losses
  hidden = np.tanh(X @ variables['params']['net/first']['w'])
  assert sorted(losses) == ['net/first/square', 'net/second/square']
  value, weight = losses['net/second/square']
  assert value == pytest.approx(np.sum(hidden**2), rel=1e-6)
  assert weight == 2
  one = Linear.HParams().Instantiate()
  for method in 'add_summary', 'add_aux_loss':
    with pytest.raises(ValueError, match=r"linear has 'a' of shape \(2, 3\)"):
      one.apply(one.init(KEY), 'a', X, method=method)


def test_a_stack_of_stacks_is_its_layers_one_after_another():
  # `repeats_test` has what the layers of a stack report.
  layer = Stack.HParams(layer=Stack.HParams(times=2)).Instantiate()
  boxed = layer.boxed_init(KEY)['params']['stack/x/sub/x/sub']['w']
  assert boxed.axes == ('layers', 'layers', 'embed', 'mlp')
  variables = layer.init(KEY)
  w = np.asarray(variables['params']['stack/x/sub/x/sub']['w'], np.float64)
  assert w.shape == (3, 2, 3, 3)
  out, collected = layer.apply(variables, X, mutable=True, verbosity=9)
  expected, totals = X.astype(np.float64), {}
  for n, one in enumerate(w.reshape(6, 3, 3)):
    totals[f'stack/x/{n // 2}/sub/x/{n % 2}/sub/sum'] = expected.sum()
    expected = expected @ one
  np.testing.assert_allclose(out, expected, rtol=1e-5)
  for name, total in totals.items():
    np.testing.assert_allclose(collected.summaries[name], total, rtol=1e-5)
  calls = collected.non_trainable['stack/x/sub/x/sub']['calls']
  np.testing.assert_array_equal(calls, np.ones([3, 2]))


def test_evaluation_and_random_numbers():
  class Noisy(base_layer.BaseLayer):
    def __call__(self, x):
      if self.do_eval:
        return x, x
      keys = self.next_prng_key(), self.next_prng_key()
      return tuple(jax.random.normal(key, x.shape) for key in keys)

  layer = Noisy.HParams().Instantiate()
  variables = layer.init(KEY)
  assert layer.apply(variables, X, do_eval=True)[1] is X
  a, b = layer.apply(variables, X, rng=KEY)
  assert np.all(np.asarray(a) != np.asarray(b))
  np.testing.assert_array_equal(a, layer.apply(variables, X, rng=KEY)[0])
  with pytest.raises(ValueError, match=r'noisy draws .*rng=key\).*do_eval'):
    layer.apply(variables, X)


def test_haiku_modules_within_a_layer():
  class Inner(base_layer.BaseLayer):
    def setup(self):
      self.create_child('first', Linear.HParams())
      self.early = hk.Linear(2)

    def fprop(self, x):
      return self.helper(self.early(self.first(x))) + hk.Linear(2)(x)

    def helper(self, x):
      return hk.Linear(2, name='late')(x)

  class Outer(base_layer.BaseLayer):
    def setup(self):
      self.create_child('inner', Inner.HParams())

    def __call__(self, x):
      # A layer that is called twice has its modules once.
      return self.inner(x) + self.inner(x)

  layer = Outer.HParams().Instantiate()
  # Haiku's weights are only known with an input.
  assert layer.num_params() == 9
  boxed = layer.boxed_init(KEY, X)['params']
  # These are the names that Haiku gives to modules made in these methods.
  assert {path: of['w'].axes for path, of in boxed.items()} == {
    'outer/inner/first': ('embed', 'mlp'),
    'outer/inner/~fprop/linear': (None, None),
    'outer/inner/~helper/late': (None, None),
    'outer/inner/~setup/linear': (None, None),
  }
  variables = layer.init(KEY, X)
  first, linear, late, early = (
    variables['params'][path]['w'] for path in sorted(boxed)
  )
  inner = X @ first @ early @ late + X @ linear
  np.testing.assert_allclose(layer.apply(variables, X), 2 * inner, rtol=1e-4)


# Shardings.


def test_axes():
  def axes(**kwargs):
    layer = Linear.HParams(**kwargs).Instantiate()
    return layer.boxed_init(KEY)['params']['linear']['w'].axes

  assert axes() == ('embed', 'mlp')
  for mapping, expected in (
    (None, (None, None)),
    ((-1, 'heads'), (None, 'heads')),
    (('mdl', ('replica', 'data')), ('mdl', ('replica', 'data'))),
    ([['data', 'mdl'], None], (('data', 'mdl'), None)),
  ):
    assert axes(weight_split_dims_mapping={'w': mapping}) == expected
  with pytest.raises(ValueError, match=r'has 1 entries.*each dimension'):
    axes(weight_split_dims_mapping={'w': ('data',)})
  with pytest.raises(ValueError, match=r"names \['wight'\].*\['calls', 'w'\]"):
    axes(weight_split_dims_mapping={'wight': ('data', None)})


def test_a_layer_on_a_mesh():
  class Split(Linear):
    def fprop(self, x):
      return self.shard(super().fprop(x), ('batch', 'mlp'))

  partitioner = partitioning.Partitioner.make(
    {'data': 2}, 'ddp', {'embed': ('data',)}
  )

  def shards(**kwargs):
    layer = Split.HParams(input_dims=4, output_dims=4, **kwargs).Instantiate()
    boxed = jax.eval_shape(layer.boxed_init, KEY)
    spec = partitioner.specs(boxed)['params']['split']['w']
    with partitioner.activate():
      out = jax.jit(layer.apply)(layer.init(KEY), jnp.ones((4, 4)))
    return tuple(spec), out.sharding.shard_shape(out.shape)

  assert shards() == (('data', None), (2, 4))
  assert shards(
    weight_split_dims_mapping={'w': (None, 'data')},
    activation_split_dims_mapping={'out': (None, 'data')},
  ) == ((None, 'data'), (4, 2))
  # None means that XLA decides.
  assert shards(activation_split_dims_mapping={'out': None})[0][0] == 'data'
  with pytest.raises(ValueError, match=r"split names \['ou'\]; .*mean 'out'"):
    shards(activation_split_dims_mapping={'ou': None})


# Errors.


def test_what_a_layer_is_made_of():
  for wrong in (3, WeightInit.Xavier(), fdl.Config(dict)):
    with pytest.raises(TypeError, match='a child of Two to be the HParams'):
      Two.HParams(first=wrong).Instantiate().init(KEY)


def test_a_layer_outside_of_a_run():
  layer = Linear.HParams().Instantiate()
  for use in (lambda: layer(X), lambda: layer.theta.w, lambda: layer.do_eval):
    with pytest.raises(RuntimeError, match=r'layer\.apply\(layer\.init\(rng\)'):
      use()


def test_variables_of_another_layer():
  layer = Linear.HParams().Instantiate()
  variables = layer.init(KEY)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables['params'])
  for wrong, given, match in (
    (Linear.HParams(name='liner'), variables, r"no liner/w.*\['linear'\]"),
    (Linear.HParams(), variables | {'non_trainable': {}}, 'no linear/calls'),
    (Linear.HParams(output_dims=4), variables, r'\(3, 3\) does not match'),
    (Linear.HParams(), variables | {'params': half}, 'w is bfloat16; expected'),
  ):
    with pytest.raises(ValueError, match=match):
      wrong.Instantiate().apply(given, X)
  with pytest.raises(AttributeError, match="no attribute 'aply'"):
    layer.apply(variables, X, method='aply')


def test_names_within_a_layer():
  def layer(do, call=lambda self: None):
    namespace = {'setup': do, '__call__': call}
    made = type('Bad', (base_layer.BaseLayer,), namespace)
    return made.HParams().Instantiate()

  weight = WeightHParams((1,))
  for name in ('apply', 'theta', 'hparams', 'name', 'a'):

    def setup(self, name=name):
      self.create_variable('a', weight)
      self.create_child(name, Linear.HParams())

    with pytest.raises(ValueError, match=f"already has a '{name}'"):
      layer(setup).init(KEY)

  nothing = layer(
    lambda self: self.create_variable('weight', weight),
    lambda self: self.theta.wieght,
  )
  with pytest.raises(AttributeError, match=r"'wieght'.*Did you mean 'weight'"):
    nothing.apply(nothing.init(KEY))
