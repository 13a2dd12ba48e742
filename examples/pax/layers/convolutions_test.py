"""Tests of convolutions and pooling against NumPy and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import signal

from examples.pax import base_layer
from examples.pax.layers import convolutions


def _variables(layer, rng):
  """Returns random variables."""
  return jax.tree.map(
    lambda weight: rng.uniform(0.5, 1.5, weight.shape).astype(weight.dtype),
    layer.abstract_init(),
  )


def _windows(x_BHWC, size, stride, filler):
  """Returns the windows of TensorFlow's SAME, [B, H', W', size, size, C].

  There are ceil(size / stride) windows. If the padding is odd, the end gets
  one more.
  """
  counts = [-(-n // stride) for n in x_BHWC.shape[1:3]]
  lacks = [
    max((count - 1) * stride + size - n, 0)
    for count, n in zip(counts, x_BHWC.shape[1:3], strict=True)
  ]
  pads = [(0, 0), *((n // 2, n - n // 2) for n in lacks), (0, 0)]
  x_BHWC = np.pad(x_BHWC, pads, constant_values=filler)
  return np.stack(
    [
      np.stack(
        [
          x_BHWC[:, i * stride :][:, :size, j * stride :][:, :, :size]
          for j in range(counts[1])
        ],
        axis=1,
      )
      for i in range(counts[0])
    ],
    axis=1,
  )


@pytest.mark.parametrize(
  ('size', 'stride', 'height'), [(3, 1, 5), (3, 2, 6), (7, 2, 9)]
)
def test_conv_is_a_sum_over_windows(size, stride, height):
  rng = np.random.default_rng(0)
  layer = convolutions.Conv2D.HParams(
    filter_shape=(size, size, 3, 4),
    filter_stride=(stride, stride),
    tf_equivalent_padding=True,
    bias=True,
  ).Instantiate()
  variables = _variables(layer, rng)
  x_BHWC = rng.normal(size=(2, height, 6, 3)).astype(np.float32)
  got = layer.apply(variables, jnp.asarray(x_BHWC))
  (weights,) = variables['params'].values()
  want = np.einsum(
    'bhwijc,ijcd->bhwd',
    _windows(np.float64(x_BHWC), size, stride, 0.0),
    np.float64(weights['w']),
  ) + np.float64(weights['b'])
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ('size', 'stride', 'first', 'last'),
  [
    (3, 2, [-0.7857267, -0.0513394, 1.1347158], [0.9655407, -0.8871020]),
    (7, 2, [-0.3529168, 0.2091897, 0.8761678], [-0.0767288, 0.4881912]),
    (2, 2, [1.5018742, 0.2025850, -1.5939296], [-0.2481577, -0.3156304]),
    (4, 3, [-0.0011901, -0.2226619, 0.3143457], [0.6986455, -0.1946388]),
  ],
)
def test_strided_convolutions_pad_as_praxis(size, stride, first, last):
  """Praxis 1.4.0 (jax 0.4.26, Python 3.10), Conv2D without other settings."""
  layer = convolutions.Conv2D.HParams(
    filter_shape=(size, size, 1, 1),
    filter_stride=(stride, stride),
    name='c',
    dtype=jnp.float64,
  ).Instantiate()
  w = np.sin(0.7 * np.arange(size**2)).reshape(size, size, 1, 1)
  w /= np.sqrt(size**2 / 2)
  x_BHWC = np.sin(0.9 * np.arange(56)).reshape(1, 7, 8, 1)
  # float64 makes the results equal on all processors.
  with jax.enable_x64(True):
    got = np.ravel(layer.apply({'params': {'c': {'w': w}}}, x_BHWC))
  assert len(got) == {2: 16, 3: 9}[stride]
  np.testing.assert_allclose(got[:3], first, atol=2e-6)
  np.testing.assert_allclose(got[-2:], last, atol=2e-6)


def test_valid_padding_is_scipys():
  rng = np.random.default_rng(1)
  layer = convolutions.Conv2D.HParams(
    filter_shape=(3, 2, 1, 1), padding='VALID'
  ).Instantiate()
  variables = _variables(layer, rng)
  x_HW = rng.normal(size=(6, 5)).astype(np.float32)
  got = layer.apply(variables, jnp.asarray(x_HW)[None, :, :, None])
  (weights,) = variables['params'].values()
  want = signal.correlate2d(x_HW, np.asarray(weights['w'])[..., 0, 0], 'valid')
  np.testing.assert_allclose(got[0, :, :, 0], want, rtol=1e-5, atol=1e-6)


def test_conv_computes_in_fprop_dtype_with_float32_weights():
  layer = convolutions.Conv2D.HParams(
    filter_shape=(1, 1, 2, 8), bias=True, fprop_dtype=jnp.bfloat16
  ).Instantiate()
  variables = jax.eval_shape(layer.init, jax.random.key(0))
  dtypes = {x.dtype for x in jax.tree.leaves(variables)}
  assert dtypes == {jnp.dtype(jnp.float32)}
  out = jax.eval_shape(layer.apply, variables, jnp.ones((1, 2, 2, 2)))
  assert out.dtype == jnp.bfloat16


def test_first_values_have_the_variance_of_the_outputs_fan():
  layer = convolutions.Conv2D.HParams(
    filter_shape=(3, 3, 64, 32),
    params_init=base_layer.WeightInit.GaussianSqrtFanOut(2**0.5),
  ).Instantiate()
  (weights,) = jax.jit(layer.init)(jax.random.key(0))['params'].values()
  # The variance of 18432 draws is within 5% of 2 / (3 * 3 * 32).
  assert np.var(weights['w']) == pytest.approx(2 / (3 * 3 * 32), rel=0.05)


def test_filters_are_split_by_outputs():
  layer = convolutions.Conv2D.HParams(filter_shape=(3, 3, 4, 8)).Instantiate()
  (weights,) = layer.abstract_init()['params'].values()
  assert weights['w'].axes == (None, None, None, 'embed')


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'filter_shape': (3, 3, 4)}, 'w has 4 entries for the shape'),
    ({'padding': 'same'}, "'same' in conv2_d; .*'SAME', 'VALID'"),
    ({'filter_shape': (3, 3, 0, 4)}, 'expected positive integers'),
  ],
)
def test_wrong_hyperparameters_are_refused(fields, message):
  hparams = convolutions.Conv2D.HParams(filter_shape=(3, 3, 4, 4)).set(**fields)
  with pytest.raises(ValueError, match=message):
    hparams.Instantiate().abstract_init()


def test_images_of_other_channels_are_refused():
  layer = convolutions.Conv2D.HParams(filter_shape=(1, 1, 3, 4)).Instantiate()
  variables = _variables(layer, np.random.default_rng(3))
  with pytest.raises(
    ValueError, match=r'feature dimension size .* 1 // 1 != 3'
  ):
    layer.apply(variables, jnp.ones((1, 2, 2, 1)))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_max_pool_is_the_largest_of_each_window(dtype):
  rng = np.random.default_rng(2)
  x_BHWC = jnp.asarray(rng.normal(size=(2, 7, 6, 3)) - 9, dtype)
  layer = convolutions.MaxPool2D.HParams().Instantiate()
  got = layer.apply({'params': {}}, x_BHWC)
  windows = _windows(np.asarray(x_BHWC, np.float64), 3, 2, -np.inf)
  assert got.dtype == dtype
  np.testing.assert_array_equal(np.float64(got), windows.max((3, 4)))


def test_global_pooling_sums_in_float32():
  # A sum of ones in bfloat16 stays at 256.
  x_BHWC = jnp.ones((1, 32, 32, 2), jnp.bfloat16)
  layer = convolutions.GlobalPooling.HParams().Instantiate()
  got = layer.apply({'params': {}}, x_BHWC)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.float64(got), np.ones((1, 2)))
