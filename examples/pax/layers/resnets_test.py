"""Tests of residual networks against Praxis, and of their fields."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax.layers import activations
from examples.pax.layers import convolutions
from examples.pax.layers import resnets

# The first block keeps the channels. The second needs a projection.
BLOCKS = (1, 1)
CHANNELS = (8, 16)


def _hparams(**changes):
  return resnets.ResNet.HParams(
    name='net',
    entryflow_conv_channels=8,
    channels=CHANNELS,
    blocks=BLOCKS,
    kernels=(3, 3),
    strides=(1, 2),
    dtype=jnp.float64,
    fprop_dtype=jnp.float64,
  ).set(**changes)


def _set_dtype(hparams, dtype):
  """Sets the dtype of all variables, because templates do not inherit it."""
  for template in (
    hparams.conv_params.conv_tpl,
    hparams.conv_params.batch_norm_tpl,
  ):
    template.dtype = dtype
  return hparams


def _random(weights, rng):
  """Returns random values, positive ones for variances."""

  def one(path, weight):
    name = path[-1].key
    if name == 'gamma':
      return rng.uniform(-0.5, 0.5, weight.shape)
    if name == 'moving_variance':
      return rng.uniform(0.5, 1.5, weight.shape)
    return rng.normal(size=weight.shape) / math.sqrt(
      math.prod(weight.shape[:-1])
    )

  return jax.tree_util.tree_map_with_path(one, weights)


def _sines(offset, shape):
  return np.sin(0.7 * np.arange(np.prod(shape)) + offset).reshape(shape)


def test_praxis_network_computes_the_same():
  """Praxis 1.4.0, jax 0.4.26, Python 3.10, in float32.

  ResNet with channels (8, 16), blocks (1, 1), kernels (3, 3), strides (1, 2),
  and the weights below.
  """
  # float64 makes the results equal on all processors.
  with jax.enable_x64(True):
    layer = _set_dtype(_hparams(entryflow_conv_channels=2), jnp.float64)
    layer = layer.Instantiate()
    variables = jax.tree.map(lambda weight: weight.shape, layer.abstract_init())
    parts = ('body_0', 'body_1', 'body_2', 'shortcut')
    names = ['entryflow_conv']
    names += [f'blocks_{i}/{part}' for i in range(2) for part in parts]
    for n, name in enumerate(names):
      conv = variables['params'][f'net/{name}/conv']
      w = _sines(n, conv['w'])
      conv['w'] = w / np.sqrt(math.prod(w.shape[:-1]) / 2)
      (size,) = w.shape[-1:]
      norm = f'net/{name}/batch_norm'
      variables['params'][norm] = {
        'gamma': _sines(n + 0.1, size) / 2,
        'beta': _sines(n + 0.2, size) / 2,
      }
      variables['non_trainable'][norm] = {
        'moving_mean': _sines(n + 0.3, size) / 2,
        'moving_variance': 1 + _sines(n + 0.4, size) / 2,
      }
    x_BHWC = np.sin(0.9 * np.arange(540)).reshape(2, 9, 10, 3)

    out, collected = jax.jit(functools.partial(layer.apply, mutable=True))(
      variables, x_BHWC
    )
    moving = collected.non_trainable['net/blocks_1/shortcut/batch_norm']
    eval_out = jax.jit(functools.partial(layer.apply, do_eval=True))(
      variables, x_BHWC
    )
    out, eval_out = np.asarray(out), np.asarray(eval_out)
  # The difference is the rounding of Praxis's float32, 1e-6. A wrong padding or
  # epsilon makes 1e-2.
  close = functools.partial(np.testing.assert_allclose, atol=2e-6)
  close(out[0, :4], [0.9511051, 0.4031399, 0.0943465, 0.0])
  close(out[1, -4:], [0.9456364, 0.2024910, 0.0, 0.0])
  close(out.sum(), 19.7825508, rtol=1e-6)
  close(moving['moving_mean'][:3], [0.3974330, 0.2187436, -0.0628242])
  close(moving['moving_variance'][:3], [1.3907146, 1.0733339, 0.8021709])
  close(eval_out[0, :4], [0.0, 0.0051375, 0.2520737, 0.2614729])
  close(eval_out[1, -4:], [0.4235960, 0.1407067, 0.0, 0.0])
  close(eval_out.sum(), 3.0111823, rtol=1e-6)


def test_a_block_starts_as_its_shortcut():
  block = resnets.ResNetBlock.HParams(
    name='block', input_dim=8, output_dim=8, zero_init_residual=True
  ).Instantiate()
  rng = np.random.default_rng(2)
  weights = block.abstract_init()
  variables = jax.tree.map(np.float32, _random(weights, rng))
  for module, of_module in weights['params'].items():
    for name, weight in of_module.items():
      if weight.init is not None and weight.init.method == 'constant':
        first = np.full(weight.shape, weight.init.scale, np.float32)
        variables['params'][module][name] = first
  x_BHWC = np.float32(rng.normal(size=(2, 4, 4, 8)))
  got = jax.jit(functools.partial(block.apply, do_eval=True))(variables, x_BHWC)
  np.testing.assert_array_equal(got, np.maximum(x_BHWC, 0))


class _Twice(base_layer.BaseLayer):
  """A block that has no convolution."""

  class HParams(base_layer.BaseLayer.HParams):
    input_dim: int = 0
    output_dim: int = 0
    kernel_size: int = 0
    stride: int = 0

  def __call__(self, x_BHWC):
    return 2 * x_BHWC


def test_blocks_and_activations_that_are_given():
  sizes = {'blocks': (2,), 'channels': (4,), 'kernels': (3,), 'strides': (1,)}
  net = resnets.ResNet.HParams(block_params=_Twice.HParams(), **sizes)
  weights = net.Instantiate().abstract_init()['params']
  assert weights['res_net/entryflow_conv/conv']['w'].shape == (7, 7, 3, 4)
  assert not any('blocks' in name for name in weights)

  block = resnets.ResNetBlock.HParams(
    input_dim=4,
    output_dim=4,
    conv_params=convolutions.ConvBNAct.HParams(),
    activation_tpl=activations.Identity.HParams(),
    zero_init_residual=True,
  )
  x_BHWC = np.float32(np.random.default_rng(2).normal(size=(2, 4, 4, 4)))
  variables = jax.jit(block.Instantiate().init)(jax.random.key(0))
  out = jax.jit(functools.partial(block.Instantiate().apply, do_eval=True))(
    variables, x_BHWC
  )
  np.testing.assert_array_equal(out, x_BHWC)  # There is no ReLU.


def test_integer_pixels_are_normalised_in_the_network():
  sizes = {'entry_max_pool': False, 'blocks': (1,), 'channels': (4,)}
  sizes |= {'kernels': (3,), 'strides': (1,), 'entryflow_conv_channels': 4}
  plain = resnets.ResNet.HParams(**sizes)
  pixels = plain.clone().set(
    pixel_mean=(10.0, 20.0, 30.0), pixel_std=(2.0, 4.0, 8.0)
  )
  rng = np.random.default_rng(3)
  variables = _random(plain.Instantiate().abstract_init(), rng)
  variables = jax.tree.map(np.float32, variables)
  x_BHWC = rng.integers(0, 256, (2, 4, 4, 3), np.uint8)
  floats_BHWC = (x_BHWC - np.array([10.0, 20, 30])) / np.array([2.0, 4, 8])

  def run(hparams, x_BHWC):
    apply = functools.partial(hparams.Instantiate().apply, do_eval=True)
    return jax.jit(apply)(variables, x_BHWC)

  want = run(plain, np.float32(floats_BHWC))
  got = run(pixels, x_BHWC)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  with pytest.raises(ValueError, match=r'uint8\. Set pixel_mean'):
    jax.eval_shape(plain.Instantiate().apply, variables, x_BHWC)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'blocks': (1, 2)}, 'one entry per group'),
    ({'channels': (256, 512, 1024, 2049)}, 'a multiple of 4'),
    ({'pixel_mean': (1.0,), 'pixel_std': (1.0,)}, 'expected 3 numbers each'),
    ({'pixel_mean': (1.0,) * 3}, 'expected 3 numbers each'),
  ],
)
def test_wrong_hyperparameters_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    resnets.ResNet.HParams(**fields).Instantiate().abstract_init()


def test_first_values_are_those_of_the_method():
  block = resnets.ResNetBlock.HParams(zero_init_residual=True)
  layer = _hparams(
    dtype=jnp.float32, fprop_dtype=None, block_params=block
  ).Instantiate()
  weights = layer.abstract_init()['params']
  he = base_layer.WeightInit.GaussianSqrtFanOut(1.4141)
  inits = {
    (path.rpartition('/')[2], name): weight.init
    for path, module in weights.items()
    for name, weight in module.items()
  }
  assert inits['conv', 'w'] == he
  for path, module in weights.items():
    if path.endswith('batch_norm'):
      is_last = path.endswith('body_2/batch_norm')
      gamma = module['gamma'].init
      assert gamma == base_layer.WeightInit.Constant(-1.0 if is_last else 0.0)
