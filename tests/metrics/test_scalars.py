"""Packed scalars are the mapping that a step would return without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline.metrics import scalars as scalars_lib
from jaxline.metrics import values

GIVEN = {'loss': 1 / 3, 'nan': float('nan'), 'tiny': 1e-45, 'zero': -0.0}
COUNTS = {'count': 2**31 - 1, 'minus': -1}


@pytest.fixture(params=[1, 2])
def packed(request):
  """Scalars of some devices: six in the array, and two that cannot be."""

  def step():
    numbers = {k: jnp.float32(x) for k, x in GIVEN.items()}
    numbers |= {k: jnp.int32(x) for k, x in COUNTS.items()}
    others = {'is_odd': jnp.bool_(True), 'row': jnp.arange(3.0)}
    return scalars_lib.pack({**others, **numbers})

  mesh = jax.sharding.Mesh(jax.devices()[: request.param], ('x',))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return scalars_lib.Scalars(jax.jit(step, out_shardings=whole)())


def bits(mapping):
  floats = {k: np.float32(mapping[k]).tobytes() for k in GIVEN}
  return floats | {k: np.int32(mapping[k]).tobytes() for k in COUNTS}


def test_it_is_the_mapping_to_the_bit(packed):
  assert len(scalars_lib.leaves(packed)) == 3  # The array and the others.
  assert {*packed} == {*GIVEN, *COUNTS, 'is_odd', 'row'}
  assert len(packed) == 8
  assert 'loss' in packed
  assert 'losses' not in packed
  assert bits(values.fetch(packed)) == bits(GIVEN | COUNTS)
  assert packed.numbers()['minus'] == -1
  for name, value in (('count', 2**31 - 1), ('is_odd', True)):
    array, index = scalars_lib.find(packed, name)
    assert np.asarray(array)[index] == value
  assert scalars_lib.find(packed, 'losses') is None
  assert len(scalars_lib.leaves(packed)) == 3
  assert bits(packed) == bits({**packed}) == bits(GIVEN | COUNTS)  # Splits it.
  assert packed['loss'].sharding.device_set == packed['row'].sharding.device_set
  with pytest.raises(KeyError, match='losses'):
    packed['losses']


def test_a_copy_and_more_entries_leave_it_packed(packed):
  more = packed | {'rows': 8, 'zero': 5.0}
  more['loss'] = 3.0
  assert len(scalars_lib.leaves(more)) == 6
  assert values.to_scalars(more) == pytest.approx(
    GIVEN | COUNTS | {'loss': 3.0, 'zero': 5.0, 'rows': 8, 'is_odd': 1},
    nan_ok=True,
  )
  assert len(more) == len({*more}) == 9
  assert bits(values.fetch(packed)) == bits(GIVEN | COUNTS)  # Unchanged.
  assert bits({'loss': 1.0, 'minus': 7} | packed) == bits(GIVEN | COUNTS)
  fetched = values.fetch(packed)
  assert fetched['loss'].dtype == np.float32
  del more['tiny']
  assert 'tiny' not in more
  # A value that replaces a number counts alone.
  more = packed | {'loss': None, 'tiny': {'kl': 2.0}}
  shown = values.to_scalars(more)
  assert {'loss', 'tiny'}.isdisjoint(shown)
  assert shown['tiny/kl'] == 2.0
