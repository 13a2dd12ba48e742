"""What an error of too little memory says."""

import jax
import jax.numpy as jnp
import pytest

from jaxline import base_config
from jaxline import train
from jaxline.supervision import out_of_memory
from tests import toys
from tests.experiments import regression

TOO_LARGE = 1 << 46  # Elements; no address space has that.


@pytest.fixture(autouse=True)
def lists_all(monkeypatch):
  # Arrays of other tests in this process live too.
  monkeypatch.setattr(out_of_memory, '_NUM_LISTED', 10**6)


def allocate_too_much():
  jnp.ones([TOO_LARGE], jnp.float32).block_until_ready()


class Evaluates(regression.Regression):
  def evaluate(self, *, global_step, rng, writer):
    allocate_too_much()


class PerDevice(toys.Toy):
  def step(self, **unused):
    jax.pmap(lambda x: x + 1, donate_argnums=0)(self._w)
    assert self._w.is_deleted()  # It was in memory when the step failed.
    allocate_too_much()


@pytest.mark.parametrize(
  ('cls', 'row'),
  [
    (Evaluates, ['128', 'B', '_state/params/w', 'float32[8,', '4]']),
    # Two devices: half of the array is on each.
    (PerDevice, ['4', 'B', '_w', 'float32[2]']),
  ],
)
def test_the_largest_arrays_and_the_remedies_are_listed(cls, row):
  config = toys.make_config(checkpointer='memory')
  loop = train.Run.train_and_eval if cls is Evaluates else train.Run.train
  with pytest.raises(jax.errors.JaxRuntimeError, match='RESOURCE_EX') as e:
    loop(train.Run(cls, config))
  assert 'allocate_too_much' in [entry.name for entry in e.traceback]
  (note,) = [x for x in e.value.__notes__ if x.startswith('[jaxline] ')]
  assert row in [line.split() for line in note.splitlines()]
  for remedy in ('config.sharding', 'gradient_accumulation_steps', 'remat'):
    assert remedy in note


@pytest.mark.parametrize('error', [
  jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: f; No space left on device'),
  jax.errors.JaxRuntimeError('INTERNAL: something else'),
])  # fmt: skip
def test_another_error_gets_no_note(error):
  with pytest.raises(jax.errors.JaxRuntimeError) as e:
    with out_of_memory.explain_oom(None, base_config.get_base_config()):
      raise error
  assert not getattr(e.value, '__notes__', [])
