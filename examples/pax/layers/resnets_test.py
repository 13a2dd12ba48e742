"""Tests of residual networks against Praxis, and of their fields."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax.layers import resnets


def _hparams(**changes):
  # The first block keeps the channels. The second needs a projection.
  return resnets.ResNet.HParams(
    name='net',
    channels=(8, 16),
    blocks=(1, 1),
    kernels=(3, 3),
    strides=(1, 2),
    dtype=jnp.float64,
  ).set(**changes)


def _sines(offset, shape):
  return np.sin(0.7 * np.arange(np.prod(shape)) + offset).reshape(shape)


def test_praxis_network_computes_the_same():
  """Praxis 1.4.0, jax 0.4.26, Python 3.10, in float32.

  ResNet with channels (8, 16), blocks (1, 1), kernels (3, 3), strides (1, 2),
  and the weights below.
  """
  # float64 makes the results equal on all processors.
  with jax.enable_x64(True):
    layer = _hparams().Instantiate()
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
    input_dim=8, output_dim=8, zero_init_residual=True
  ).Instantiate()
  x_BHWC = np.float32(np.random.default_rng(2).normal(size=(2, 4, 4, 8)))
  variables = jax.jit(block.init)(jax.random.key(0))
  got = jax.jit(functools.partial(block.apply, do_eval=True))(variables, x_BHWC)
  np.testing.assert_array_equal(got, np.maximum(x_BHWC, 0))


def test_integer_pixels_are_normalised_in_the_network():
  plain = _hparams(dtype=jnp.float32)
  pixels = plain.clone().set(
    pixel_mean=(10.0, 20.0, 30.0), pixel_std=(2.0, 4.0, 8.0)
  )
  variables = jax.jit(plain.Instantiate().init)(jax.random.key(0))
  x_BHWC = np.random.default_rng(3).integers(0, 256, (2, 4, 4, 3), np.uint8)
  floats_BHWC = (x_BHWC - np.array([10.0, 20, 30])) / np.array([2.0, 4, 8])

  def run(hparams, x_BHWC):
    apply = functools.partial(hparams.Instantiate().apply, do_eval=True)
    return jax.jit(apply)(variables, x_BHWC)

  got = run(pixels, x_BHWC)
  assert got.std() > 0.1
  np.testing.assert_allclose(
    got, run(plain, np.float32(floats_BHWC)), rtol=1e-4
  )
  with pytest.raises(ValueError, match=r'uint8\. Set pixel_mean'):
    jax.eval_shape(plain.Instantiate().apply, variables, x_BHWC)
