"""Tests of repeated and pipelined layers, with a layer that keeps records."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import transformer
from examples.pax import base_layer
from examples.pax.layers import repeats
from examples.pax.layers import transformers

Context = transformers.Context
ONE = Context(position=jnp.ones([]))


class Traces(base_layer.BaseLayer):
  """Multiplies by `w` and adds; has a count, a summary and an aux loss."""

  counts: bool = True
  penalises: bool = True

  def setup(self) -> None:
    weight = base_layer.WeightHParams(())
    self.create_variable('w', weight)
    if self.counts:
      self.create_variable('calls', weight, trainable=False)

  def __call__(self, x, context):
    w = self.theta.w
    if self.counts:
      self.update_var('calls', self.theta.calls + 1)
    if self.penalises:
      self.add_aux_loss('square', w * w, 2.0)
    self.add_summary('w', w)
    self.add_summary('quiet', w, verbosity=5)
    return x * w + context.position


WEIGHTS = np.array([2.0, 3.0, 5.0], np.float32)


def _repeat(policy='nothing'):
  return repeats.Repeat.HParams(
    sub_tpl=Traces.HParams(), x_times=3, checkpoint_policy=policy, name='r'
  ).Instantiate()


def _variables(place='r/sub'):
  return {
    'params': {place: {'w': WEIGHTS}},
    'non_trainable': {place: {'calls': np.arange(3, dtype=np.float32)}},
  }


@pytest.mark.parametrize('policy', ['nothing', 'full'])
def test_what_repeated_layers_leave_comes_out(policy):
  layer = _repeat(policy)

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def grads(params):
    variables = {**_variables(), 'params': params}
    y, collected = layer.apply(variables, 7.0, ONE, mutable=True, verbosity=2)
    loss = sum(value for value, _ in collected.aux_losses.values())
    return y + loss, (y, collected)

  found, (y, collected) = grads(_variables()['params'])
  assert y == ((7 * 2 + 1) * 3 + 1) * 5 + 1
  # The gradient of each w is d y / d w, plus 2 w from the penalty.
  np.testing.assert_allclose(
    found['r/sub']['w'], [7 * 15 + 4, 15 * 5 + 6, 46 + 10]
  )
  assert collected.non_trainable['r/sub']['calls'].tolist() == [1, 2, 3]
  summaries = {name: float(x) for name, x in collected.summaries.items()}
  assert summaries == {f'r/{i}/sub/w': w for i, w in enumerate(WEIGHTS)}
  losses = {
    name: (float(value), float(weight))
    for name, (value, weight) in collected.aux_losses.items()
  }
  assert losses == {
    f'r/{i}/sub/square': (w * w, 2) for i, w in enumerate(WEIGHTS)
  }


def test_a_part_that_is_computed_again_hands_on_what_it_leaves():
  class Unrolled(base_layer.BaseLayer):
    """One checkpointed layer."""

    def setup(self):
      self.create_child('sub', Traces.HParams())

    def __call__(self, x):
      policy = transformer.remat_policy('full')
      return repeats.remat(self.sub, policy=policy)(x, ONE)

  variables = jax.tree.map(lambda x: x[0], _variables())
  layer = Unrolled.HParams(name='r').Instantiate()
  y, collected = jax.jit(
    lambda v: layer.apply(v, 7.0, mutable=True, verbosity=5)
  )(variables)
  assert y == 15
  assert collected.non_trainable['r/sub']['calls'] == 1
  assert sorted(collected.summaries) == ['r/sub/quiet', 'r/sub/w']
  assert list(collected.aux_losses) == ['r/sub/square']


def _pipelined(counts=False, penalises=False, **fields):
  stage = transformers.StackedTransformerRepeated.HParams(
    block=Traces.HParams(counts=counts, penalises=penalises), x_times=1
  )
  return transformers.PipelinedTransformer.HParams(
    name='r', pipeline_stage=stage, num_pipeline_stages=3, **fields
  ).Instantiate()


@pytest.mark.parametrize(
  ('fields', 'match'),
  [
    ({'num_pipeline_microbatches': 2, 'counts': True}, "non-trainable.*'sub'"),
    ({'num_pipeline_microbatches': 2, 'penalises': True}, 'an aux loss; got'),
    ({'pipeline_microbatch_size': 3}, 'is 3; expected a divisor of the'),
  ],
)
def test_what_a_pipeline_cannot_do_is_refused(fields, match):
  layer, variables = _pipelined(**fields), _variables('r/repeat/sub')
  x = jnp.ones([4, 1, 1])
  with pytest.raises(ValueError, match=match):
    jax.eval_shape(layer.apply, variables, x, Context(position=x))


def test_each_repetition_draws_for_itself():
  class Draws(base_layer.BaseLayer):
    """Adds a random number."""

    def __call__(self, x):
      return x + jax.random.uniform(self.next_prng_key())

  def total(times):
    hparams = repeats.Repeat.HParams(sub_tpl=Draws.HParams(), x_times=times)
    layer = hparams.Instantiate()
    return jax.jit(lambda key: layer.apply({'params': {}}, 0.0, rng=key))(
      jax.random.key(0)
    )

  one, two = total(1), total(2)
  assert two != 2 * one
