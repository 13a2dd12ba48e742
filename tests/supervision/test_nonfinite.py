"""Tests of jaxline.supervision.nonfinite, with and without a flag."""

import copy
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import errors
from jaxline.compat import experiments
from jaxline.metrics import scalars as scalars_lib
from jaxline.supervision import nonfinite
from tests.experiments import regression

KEY = jax.random.PRNGKey(0)
NAN, INF = float('nan'), float('inf')


def a_guard(mode='raise', **attributes):
  """A guard of an experiment in JAXline's style, or with these attributes."""
  return nonfinite.Guard(
    experiments.full_experiment(None, **attributes), mode, 10, steps_late=3
  )


def drive(guard, rows):
  """Hands on one step's scalars after another, then waits."""
  for step, scalars in enumerate(rows, start=1):
    guard(0.0, step, scalars)
  guard.wait()


ONE = {'loss': jnp.float32(1), 'grad': jnp.float32(2)}


def packed(scalars):
  return scalars_lib.Scalars(scalars_lib.pack(scalars))


def test_the_step_and_its_metrics_are_named():
  for scalars, named in (
    ({'grad_norm': -INF}, 'grad_norm = -inf'),
    ({'Total_LOSS': np.float16(INF), 'acc': NAN}, 'Total_LOSS = inf'),
    ({'loss': {'kl': NAN, 'l2': 1.0}}, 'loss/kl = nan'),
    ({'loss': jnp.bfloat16(NAN), 'GradMax': INF}, 'loss = nan, GradMax = inf'),
    ({'loss': np.float32([1, NAN, INF])}, 'loss = nan in 2 of 3 entries'),
    (
      jax.pmap(lambda x: {'loss': 1 / x})(jnp.float32([1, 0])),
      'loss = inf in 1 of 2 entries',
    ),
    ({'train': packed(ONE | {'loss': jnp.float32(NAN)})}, 'train/loss = nan'),
    # Without FLAGS_NONFINITE this is a scalar as any other.
    ({'loss': NAN, 'nonfinite': 0}, 'loss = nan'),
  ):
    with pytest.raises(nonfinite.NonfiniteError) as error:
      drive(a_guard(), [ONE, ONE, scalars, ONE])
    assert f'step 3 are not finite: {named}. ' in str(error.value)


def test_what_is_finite_or_no_loss_goes_on():
  drive(a_guard(), [
    {'loss': 1.0, 'nonfinite': INF}, {'loss': 1.0, 'nonfinite': 5}, None, {},
    {'accuracy': NAN, 'reward': INF},
    {'loss': 'nan', 'loss_b': None, 'loss_c': object(), 'loss_d': 3},
    {'loss': np.int32(3), 'grad': True, 'loss_key': jax.random.key(0)},
    {'loss': 3e38, 'grad_norm': np.float32([0, -3e38])}, {7: NAN},
  ])  # fmt: skip


def test_a_step_without_the_flag_that_it_needs_is_refused():
  for mode, flagged in ('skip', False), ('skip', True), ('raise', True):
    with pytest.raises(errors.UsageError, match='nonfinite'):
      drive(a_guard(mode, FLAGS_NONFINITE=flagged), [{'loss': 1.0}])


def test_donated_arrays_do_no_harm():
  donate = jax.jit(lambda x: x + 1, donate_argnums=0)
  guard = a_guard()
  x = jnp.zeros([])
  # As an experiment that returns what its next step donates.
  for step in range(1, 12):
    x_next = donate(x)
    guard(0.0, step, {'loss': x, 'grad_norm': x_next})
    x = x_next
  guard.wait()
  # What is left is judged, and named without the others.
  gone = jnp.float32(NAN)
  donate(gone)
  with pytest.raises(nonfinite.NonfiniteError, match=': grad = nan\\. '):
    drive(guard, [{'loss': gone, 'grad': NAN}])


class Faulty(regression.Regression):
  """Has bad steps where its data say so.

  Attributes:
    factors: number of the batch -> factor.
  """

  factors = {}

  def train_input(self):
    return regression.Scaled(self.batch_size, self.factors)


class Hidden(Faulty):
  """A factor of 1e18 gives finite metrics, but a NaN as loss; has a key."""

  def init_fn(self, rng):
    params, state = super().init_fn(rng)
    return params, {**state, 'key': jax.random.key(1)}

  def loss_fn(self, params, model_state, batch, rng, is_training):
    is_bad = jnp.abs(batch['y']).max() > 1e6
    loss, values, new = super().loss_fn(
      params, model_state, {**batch, 'y': 0 * batch['y']}, rng, is_training
    )
    key = jax.random.split(model_state['key'])[0]
    return loss + self.fault(params, is_bad), values, {**new, 'key': key}

  def fault(self, params, is_bad):
    return jnp.where(is_bad, NAN, 0.0)


class Steep(Hidden):
  """The loss is finite, too, but its gradient is not."""

  def fault(self, params, is_bad):
    # 0 with the gradient 1e60, which is infinite in float32.
    scale, b = jnp.where(is_bad, 1e30, 0.0), params['b'].sum()
    return (b - jax.lax.stop_gradient(b)) * scale * scale


def train(experiment, steps, mode, most=10):
  """Runs the loop with a guard; returns the scalars of its steps."""
  guard = nonfinite.Guard(experiment, mode, most)
  rows = regression.train_steps(
    experiment, steps, actions=[guard], on_nonfinite=mode
  )
  guard.wait()
  return rows


def make(factors, cls=Faulty, **kwargs):
  experiment = cls('train', KEY, **kwargs)
  experiment.factors = factors
  return experiment


@pytest.mark.parametrize(
  ('cls', 'factor', 'mode', 'parts', 'bad', 'weights'),
  [
    (Faulty, NAN, 'raise', 'loss and gradients', 'loss = nan', 'not finite'),
    (Faulty, INF, 'skip', 'loss and gradients', 'loss = (nan|inf)', 'finite'),
    (Steep, 1e18, 'raise', 'gradients', 'grad_norm = inf', 'not finite'),
    (Hidden, 1e18, 'raise', 'loss', 'not finite', 'finite'),
  ],
)
def test_what_is_not_finite_is_named_with_the_next_command(
  cls, factor, mode, parts, bad, weights, tmp_path
):
  config = regression.get_config(1)
  config.checkpoint_dir = str(tmp_path / 'a run')
  # The data's third batch is that of the third step.
  experiment = make({2: factor}, cls, run_config=config, sharding='fsdp')
  with pytest.raises(nonfinite.NonfiniteError, match=bad) as error:
    train(experiment, 20, mode, most=1)
  said = str(error.value)
  assert f'The {parts} of step 3 ' in said
  assert re.search(rf'The weights after step \d are {weights}\.', said)
  command = f"python -m jaxline.runs replay '{tmp_path}/a run' 3 --nan"
  assert said.endswith(command)


@pytest.mark.parametrize('mode', ['ignore', 'warn'])
def test_ignore_and_warn_go_on(mode, caplog):
  rows = train(make({2: NAN}), 5, mode)
  assert [bool(np.isnan(row['loss'])) for row in rows] == [0, 0, 1, 1, 1]
  assert ('nonfinite' in rows[0]) == (mode == 'warn')
  # The loss and the gradient show it at once, in one line.
  said = [r for r in caplog.messages if 'are not finite' in r]
  assert len(said) == (mode == 'warn')
  assert all('of step 3 ' in x and 'grad_norm = nan' in x for x in said)


def test_skip_keeps_every_bit_and_counts():
  experiment = make(dict.fromkeys([2, 3, 5], 1e18), Steep, sharding='fsdp')
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  bits = lambda x: jax.random.key_data(x) if is_key(x) else x
  digests, counts, totals = [], [], []
  for _ in range(7):
    (row,) = train(experiment, 1, 'skip')
    state = experiment.state
    kept = state.params, state.model_state, state.opt_state
    digests.append(regression.digest(jax.tree.map(bits, kept)))
    counts.append(np.asarray(experiment.state.skipped).tolist())
    totals.append(int(row['skipped_steps']))
    assert row['nonfinite'] == counts[-1][0]
  assert counts == [[0, 0], [0, 0], [1, 1], [2, 2], [0, 2], [1, 3], [0, 3]]
  assert totals == [0, 0, 1, 2, 2, 3, 3]
  same = [a == b for a, b in itertools.pairwise(digests)]
  assert same == [False, True, True, False, True, False]
  assert int(experiment.state.step) == 7
  assert int(experiment.state.opt_state[0].count) == 4


def test_the_run_of_skipped_steps_survives_a_resume():
  factors = dict.fromkeys(range(2, 9), NAN)
  experiment = make(factors)
  train(experiment, 4, 'skip', most=3)
  snapshot = copy.deepcopy(jax.device_get(experiment.snapshot_state()))
  np.testing.assert_array_equal(snapshot['state'].skipped, [2, 2])
  other = make(factors)
  other.restore_from_snapshot(snapshot)
  with pytest.raises(nonfinite.NonfiniteError, match=r'step 5 .*3 such steps'):
    train(other, 4, 'skip', most=3)


def test_steps_without_weight_are_counted_and_warned_of_once(caplog):
  class Weightless(Faulty):
    def train_input(self):
      for i, rows in enumerate(super().train_input()):
        yield rows | {'weights': np.full(len(rows['y']), i % 2, np.float32)}

  rows = train(make({}, Weightless), 6, 'skip')
  assert [row['loss'] == 0 for row in rows] == [1, 0, 1, 0, 1, 0]
  # A step is judged at the next one.
  counts = [row.get('zero_weight_steps') for row in rows]
  assert counts == [None, 1, 1, 2, 2, 3]
  (said,) = [x for x in caplog.messages if 'has a weight' in x]
  assert 'step 1 has a weight' in said


def test_each_name_is_warned_of_once_with_its_step(caplog):
  good = {'loss': 1.0, 'new_loss': 2.0, 'acc': NAN}
  rows = [
    good | {'new_loss': NAN},  # As kfac-jax logs it on purpose.
    good,
    good | {'new_loss': INF},
    good | {'new_loss': NAN, 'loss': np.float32([1, NAN]), 'grad': {'w': -INF}},
    good | {'loss': NAN},
  ]
  drive(a_guard(None), rows)  # As full_experiment has it.
  first, second = caplog.messages
  assert 'of step 1 are not finite: new_loss = nan. ' in first
  for text in ('of step 4 ', 'loss = nan in 1 of 2 entries', 'grad/w = -inf'):
    assert text in second
  assert 'new_loss' not in second


def test_reserved_names_are_refused():
  class Taken(Faulty):
    name = ''

    def step_scalars(self, state, grads, updates):
      return {self.name: jnp.zeros([])}

  for Taken.name in 'nonfinite', 'skipped_steps':
    with pytest.raises(ValueError, match=Taken.name):
      train(make({}, Taken), 1, 'raise')
  train(make({}, Taken), 1, 'ignore')
