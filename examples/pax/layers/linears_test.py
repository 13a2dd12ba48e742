"""Tests of linear layers against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import transformer
from examples.pax import layers

KEY = jax.random.key(0, impl='rbg')
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 2, 3)


def _run(p, x=X, **weights):
  """Returns the output with the given weights, or with random ones."""
  layer = p.Instantiate()
  variables = layer.init(KEY)
  params = {
    f'{module}/{name}': value
    for module, names in variables['params'].items()
    for name, value in names.items()
  }
  for path, value in weights.items():
    module, name = path.rsplit('_', 1)
    module = module.replace('_x_', '/')
    assert variables['params'][module][name].shape == value.shape
    variables['params'][module][name] = value
  return layer.apply(variables, jnp.asarray(x)), params


@pytest.mark.parametrize('has_bias', [False, True])
def test_feed_forward(has_bias):
  p = layers.FeedForward.HParams(
    input_dims=3, output_dims=4, has_bias=has_bias, name='ff'
  )
  assert p.Instantiate().num_params() == 3 * 4 + 4 * has_bias
  b = np.linspace(-0.5, 0.5, 4, dtype=np.float32)
  out, params = _run(p, **({'ff_x_bias_b': b} if has_bias else {}))
  expected = X.astype(np.float64) @ np.asarray(params['ff/linear/w'])
  if has_bias:
    np.testing.assert_array_equal(params['ff/bias/b'], np.zeros(4))
    expected += b
  assert (expected < 0).any()
  np.testing.assert_allclose(out, np.maximum(expected, 0), rtol=1e-5, atol=1e-6)
  # Activations differ, and inputs may have any number of axes.
  p.activation_tpl = layers.Tanh.HParams()
  out, _ = _run(p, X[0, 0], **({'ff_x_bias_b': b} if has_bias else {}))
  np.testing.assert_allclose(out, np.tanh(expected[0, 0]), rtol=1e-5)


def test_dtypes():
  p = layers.FeedForward.HParams(
    input_dims=3, output_dims=4, fprop_dtype=jnp.bfloat16
  )
  out, params = _run(p)
  assert out.dtype == jnp.bfloat16
  assert {value.dtype for value in params.values()} == {jnp.dtype('float32')}


def test_the_product_has_the_name_that_remat_keeps():
  layer = layers.Linear.HParams(input_dims=3, output_dims=4).Instantiate()
  variables = layer.init(KEY)
  jaxpr = jax.make_jaxpr(layer.apply)(variables, X)
  assert f'name={transformer.DOT}]' in str(jaxpr)


def test_axes():
  def axes(**kwargs):
    p = layers.FeedForward.HParams(input_dims=3, output_dims=4, **kwargs)
    boxed = p.Instantiate().boxed_init(KEY)['params']
    return (
      boxed['feed_forward/linear']['w'].axes,
      boxed['feed_forward/bias']['b'].axes,
    )

  assert axes() == (('embed', 'mlp'), ('mlp',))
  out = layers.Linear.HParams(weight_split_dims_mapping={'w': ('mlp', 'embed')})
  assert axes(linear_tpl=out) == (('mlp', 'embed'), ('embed',))
  out.weight_split_dims_mapping['w'] = None
  assert axes(linear_tpl=out) == ((None, None), (None,))
  bias = layers.Bias.HParams(weight_split_dims_mapping={'b': ('data',)})
  assert axes(linear_tpl=out, bias_tpl=bias) == ((None, None), ('data',))
