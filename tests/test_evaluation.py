"""Evaluation: which checkpoints it follows, initial weights, the best ones."""

import contextlib
import functools
import math
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import errors
from jaxline import experiment
from jaxline import train
from jaxline import utils
from jaxline.base import debug
from jaxline.checkpoint import durable
from jaxline.checkpoint import protocol
from jaxline.parallel import distributed
from tests import toys

Log, Plain, Recorder, Writes = toys.Log, toys.Plain, toys.Recorder, toys.Writes
make_config, run = toys.make_config, toys.run
NAN = math.nan


class Scripted:
  """A checkpointer whose newest checkpoint changes as a script says.

  One entry is one look: the step of the newest checkpoint then, or None.
  """

  def __init__(self, looks):
    self.looks, self.newest = list(looks), None
    self.states, self.saved = {}, []

  def get_experiment_state(self, ckpt_series):
    return self.states.setdefault(ckpt_series, protocol.ExperimentState())

  def restore_path(self, ckpt_series):
    assert ckpt_series == 'latest'
    assert self.looks, 'evaluation should have ended'
    self.newest = self.looks.pop(0)
    return None if self.newest is None else f'checkpoint_{self.newest}'

  def can_be_restored(self, ckpt_series):
    return ckpt_series == 'latest' and self.newest is not None

  def restore(self, ckpt_series):
    self.states['latest'].update(
      global_step=self.newest, train_step_rng=f'key {self.newest}'
    )

  def save(self, ckpt_series):
    self.saved.append((ckpt_series, self.states[ckpt_series].to_dict()))

  def wait_for_checkpointing_to_finish(self):
    pass


def evaluate(looks, scores=None, writer=None, cls=Plain, **values):
  """Evaluates by a script; returns the log and the checkpointer."""
  config = make_config(100, **values)
  log, checkpointer = Log(), Scripted(looks)
  partial = functools.partial(cls, log=log, scalars=scores)
  train.evaluate(partial, config, checkpointer, writer, 'eval')
  return log, checkpointer


@pytest.fixture
def waits(monkeypatch):
  """Waits for nothing; calls `do` each time, with the seconds."""
  found = types.SimpleNamespace(do=lambda secs: None)
  own, sleep = threading.get_ident(), time.sleep

  def wait(secs):  # Threads that other tests have left sleep.
    (found.do if threading.get_ident() == own else sleep)(secs)

  monkeypatch.setattr(time, 'sleep', wait)
  return found


@pytest.mark.parametrize(
  ('looks', 'initial', 'expected'),
  [
    ([None, 10, 10, 30, 100, 'not looked at'], False, [10, 30, 100]),
    ([None, None, None, 100], True, [0, 100]),
    ([100], True, [100]),
  ],
)
def test_each_new_checkpoint_is_evaluated_once_until_the_last(
  looks, initial, expected, waits
):
  writer, slept = Writes(), []
  waits.do = slept.append
  log, _ = evaluate(looks, writer=writer, eval_initial_weights=initial)
  assert writer.records == [(step, {'score': step}) for step in expected]
  assert [step for step, _ in log.evals] == expected
  assert log.inits[0][0] == 'eval'
  # A new one is noticed within a second.
  assert max(slept, default=0) < 1


def test_a_checkpoint_saved_just_before_training_ends_is_evaluated(waits):
  """Without initial weights: a run that begins from another has none."""
  trained, log = threading.Event(), Log()

  class Ends(Scripted):
    def restore_path(self, ckpt_series):
      trained.set()
      return super().restore_path(ckpt_series)

  config = make_config(100, eval_initial_weights=True, restore_from='other')
  looks, cls = [None, 50, 50], functools.partial(Plain, log=log)
  train.Run(cls, config, Ends(looks), trained=trained).evaluate()
  assert [step for step, _ in log.evals] == [50]


def test_an_experiment_with_snapshots_of_its_own_is_evaluated_as_trained():
  seen, add = [], jax.jit(lambda x: x + 1, donate_argnums=0)

  class Own(experiment.AbstractExperiment):
    """Keeps its weights where no attribute dict says."""

    def __init__(self, mode, init_rng):
      super().__init__(mode, init_rng)
      self.hidden = jnp.zeros([])

    def step(self, **unused):
      self.hidden = add(self.hidden)

    def evaluate(self, **unused):
      seen.append(float(self.hidden))

    def snapshot_state(self):
      return {'w': self.hidden, 'key': jax.random.key(3)}

    def restore_from_snapshot(self, snapshot_state):
      assert snapshot_state['key'] == jax.random.key(3)
      self.hidden = jnp.asarray(snapshot_state['w'])

  config = make_config(4, eval_interval=2)
  train.Run(Own, config, Recorder(config), None, None).train_and_eval()
  assert seen == [2.0, 4.0]


class Seeded(Plain):
  """Its score after n steps is n and a draw from [0, 1) by its initial key."""

  def __init__(self, mode, init_rng, **kwargs):
    super().__init__(mode, init_rng, **kwargs)
    self._w = self._w + jax.random.uniform(init_rng)

  def evaluate(self, **kwargs):
    super().evaluate(**kwargs)
    return {'score': self.log.evals[-1][1]}


@pytest.mark.parametrize(
  ('saves_initial', 'legacy'), [(False, False), (True, False), (False, True)]
)
def test_initial_weights_of_an_evaluation_are_not_those_of_the_run(
  saves_initial, legacy, tmp_path, waits
):
  """In the per-device style they count, and may be the best, if they are."""
  config = make_config(
    1,
    checkpoint_dir=str(tmp_path),
    checkpointer='durable',
    eval_initial_weights=True,
    save_initial_train_checkpoint=saves_initial,
    legacy_random_seed_behavior=legacy,
    best_model_eval_metric='score',
    best_model_eval_metric_higher_is_better=False,
  )
  seed = jax.random.PRNGKey(config.random_seed)
  key_of_run = seed if legacy else jax.random.split(seed)[1]
  own, runs = (float(jax.random.uniform(key)) for key in (seed, key_of_run))
  make, writer = functools.partial(Seeded, log=Log()), Writes()

  def train_once(unused_secs):
    waits.do = lambda secs: None
    with contextlib.closing(durable.DurableCheckpointer(config, 'train')) as x:
      train.train(make, config, x, None)

  waits.do = train_once
  checkpointer = durable.DurableCheckpointer(config, 'eval')
  train.evaluate(make, config, checkpointer, writer, 'eval')
  is_of_run = saves_initial or legacy
  expected = [(0, runs if is_of_run else own), (1, 1 + runs)]
  found = [(step, x['score']) for step, x in writer.records]
  np.testing.assert_allclose(found, expected, rtol=1e-6)
  assert checkpointer.steps('best') == ([0] if is_of_run else [1])
  checkpointer.close()


def test_one_off_without_a_checkpoint(monkeypatch):
  config = make_config(one_off_evaluate=True)
  with pytest.raises(ValueError, match='eval_initial_weights'):
    toys.evaluate_once(Plain, config)
  config.eval_initial_weights = True
  log = Log()
  # Without a mode, it is that of the command line.
  monkeypatch.setattr(debug.settings, 'mode', 'eval_on_test')
  train.evaluate(functools.partial(Plain, log=log), config, None, None)
  assert log.evals == [(0, 0.0)]
  assert log.inits[0][0] == 'eval_on_test'


@pytest.mark.parametrize(
  ('higher', 'scores', 'best_at'),
  [
    (True, [1, 1, NAN, 2, np.array([3.0]), 3, np.float32(4)], [0, 3, 4, 6]),
    (False, [NAN, 1, 3, 0.5, 0.5, NAN, -1], [1, 3, 6]),
    (True, [-math.inf, NAN], []),
  ],
)
def test_best_is_saved_where_strictly_better(higher, scores, best_at):
  class Adds(Plain):
    def on_new_best_model(self, best_state):
      best_state.note = best_state.best_eval_metric_value

  steps = [10 * (i + 1) for i in range(len(scores) - 1)] + [100]
  _, checkpointer = evaluate(
    steps,
    dict(zip(steps, scores, strict=True)),
    cls=Adds,
    best_model_eval_metric='score',
    best_model_eval_metric_higher_is_better=higher,
  )
  assert [
    (series, state['global_step'], state['best_eval_metric_value'])
    for series, state in checkpointer.saved
  ] == [('best', steps[i], scores[i]) for i in best_at]
  for _, state in checkpointer.saved:
    assert state['train_step_rng'] == f'key {state["global_step"]}'
    assert state['best_model_eval_metric'] == 'score'
    assert state['note'] == state['best_eval_metric_value']
    assert isinstance(state['experiment_module'], Plain)


def test_a_missing_best_metric_lists_the_names_there_are():
  found = {'loss': 1.0, 'score': None}
  Other = type('Other', (Plain,), {'evaluate': lambda self, **unused: found})
  with pytest.raises(errors.UsageError, match=r"score.*\['loss'\]"):
    evaluate([10], cls=Other, best_model_eval_metric='score')


@pytest.mark.parametrize('metric', ['score', ''])
def test_processes_whose_scalars_differ(metric, monkeypatch, caplog):
  decide = lambda own, choose, **unused: choose([own, {'score': -1.0}])
  monkeypatch.setattr(distributed, 'gather_and_decide', decide)
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  config = make_config(2, eval_interval=1, best_model_eval_metric=metric)
  raises = pytest.raises(errors.UsageError, match='score is 1')
  with raises if metric else contextlib.nullcontext():
    train.Run(Plain, config, Recorder(config), None, None).train_and_eval()
  assert caplog.text.count('-1.0 in process 1') == (not metric)  # Not twice.


def test_the_best_value_survives_a_restart():
  run(config=make_config(1))
  kept = []
  # Another metric begins anew.
  for metric, score in (('score', 2.0), ('score', 1.5), ('accuracy', 1.5)):
    cls = type('Scored', (Plain,), {})
    cls.evaluate = lambda self, found={metric: score}, **unused: found
    config = make_config(
      1, one_off_evaluate=True, best_model_eval_metric=metric
    )
    checkpointer = Recorder(config, 'eval')
    train.evaluate(cls, config, checkpointer, None, 'eval')
    kept.append(checkpointer.saves('best'))
  assert kept == [[1], [], [1]]
  nest = utils.GLOBAL_CHECKPOINT_DICT['best'].history[-1].pickle_nest
  assert nest['best_eval_metric_value'] == 1.5
