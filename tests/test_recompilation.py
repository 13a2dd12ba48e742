"""Programs that steps compile again: what is said of them, and what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import base_config
from jaxline import debug
from jaxline import experiment
from jaxline import goodput
from jaxline import train
from jaxline.supervision import recompilation
from tests.experiments import regression


@pytest.fixture(autouse=True)
def limit(monkeypatch):
  """Warns of programs however fast they are compiled; none is compiled yet."""
  jax.clear_caches()
  monkeypatch.setattr(recompilation, '_SECS', 0.0)


class Recompiling(experiment.AbstractExperiment):
  """Calls a function with the rows that a test says, step by step."""

  rows = ()

  def __init__(self, mode, init_rng=None):
    super().__init__(mode, init_rng)
    self.jitted = jax.jit(self.update)
    self.mapped = jax.pmap(self.update)
    self.number = 0

  @staticmethod
  def update(state, batch):
    return {'loss': (batch['x'] @ state['w']).mean()}

  def step(self, *, global_step, rng, writer):
    rows, self.number = self.rows[self.number], self.number + 1
    return self.call({'w': np.ones(3)}, {'x': np.ones([rows, 3])})

  def call(self, state, batch):
    return self.jitted(state, batch)

  def evaluate(self, *, global_step, rng, writer):
    # Compiled anew in each evaluation, which is none of a step.
    self.number += 1
    return jax.jit(self.update)(
      {'w': np.ones(3)}, {'x': np.ones([self.number, 3])}
    )


class Mapped(Recompiling):
  """The same, by `jax.pmap`."""

  def call(self, state, batch):
    return self.mapped(*jax.tree.map(lambda x: x[None], (state, batch)))


class MadeAnew(Recompiling):
  """Makes its function in each step."""

  def call(self, state, batch):
    return jax.jit(lambda s, b: self.update(s, b))(state, batch)


class FirstLog(Recompiling):
  """Compiles other functions in a late step, for the first time."""

  def call(self, state, batch):
    scalars = self.jitted(state, batch)
    if self.number == 6:
      scalars['norm'] = jax.jit(lambda x: jnp.abs(x).max())(batch['x'])
    return scalars


class Placed(Recompiling):
  """Calls its function with arrays on another device, late."""

  def call(self, state, batch):
    device = jax.devices()[self.number == 6]
    return self.jitted(*jax.device_put((state, batch), device))


def warnings(caplog, cls, rows, run=train.Run.train, **changes):
  caplog.set_level('WARNING')
  config = base_config.get_base_config()
  config.update(
    training_steps=len(rows), checkpointer='memory', interval_type='steps'
  )
  config.update(changes)
  chosen = type(cls.__name__, (cls,), {'rows': rows})
  run(train.Run(chosen, config))
  said = [record.getMessage() for record in caplog.records]
  return [text for text in said if 'again' in text]


def test_what_changed_is_named(caplog):
  (said,) = warnings(caplog, Recompiling, [8] * 5 + [4, 4, 8])
  head, *lines = said.splitlines()
  assert head.startswith('Step 5 has compiled jit(update) again, in 0.')
  line = Recompiling.call.__code__.co_firstlineno + 1
  assert f's (called at {__file__}:{line}). ' in head
  assert lines == ["batch['x']: now float32[4,3], before float32[8,3]"]


def test_of_pmap(caplog):
  (said,) = warnings(caplog, Mapped, [8] * 5 + [4, 4, 8])
  head, *lines = said.splitlines()
  assert 'Step 5 has compiled a function of jax.pmap again' in head
  line = Mapped.call.__code__.co_firstlineno + 1
  assert f'(called at {__file__}:{line})' in head
  assert lines == ["args[1]['x']: now float32[1,4,3], before float32[1,8,3]"]


def test_the_arguments_of_the_last_compilation_are_compared(caplog):
  found = warnings(caplog, Recompiling, [8, 8, 8, 8, 4, 2])
  assert [text.splitlines()[1:] for text in found] == [
    ["batch['x']: now float32[4,3], before float32[8,3]"],
    ["batch['x']: now float32[2,3], before float32[4,3]"],
  ]


def test_a_function_that_is_made_anew(caplog):
  found = warnings(caplog, MadeAnew, [8] * 5)
  assert len(found) == 2  # Of the steps 3 and 4.
  for text in found:
    assert 'compiled jit(<lambda>) again' in text
    assert 'is the function made anew (jax.jit inside of the step)' in text


def test_arguments_on_another_device(caplog):
  (said,) = warnings(caplog, Placed, [8] * 6)
  assert 'Step 5 has compiled jit(update) again' in said
  line = said.splitlines()[1]
  assert line.startswith("state['w']: now float32[3] in SingleDeviceSharding")
  assert 'id=1' in line.partition('before in')[0]
  assert 'id=0' in line.partition('before in')[2]


def test_the_first_steps_may_compile(caplog):
  assert not warnings(caplog, Recompiling, [8, 4, 2, 8, 4, 2])


def test_a_function_may_be_new(caplog):
  assert not warnings(caplog, FirstLog, [8] * 8)


def test_an_evaluation_may_compile(caplog):
  run = train.Run.train_and_eval
  rows = [8] * 6
  assert not warnings(caplog, Recompiling, rows, run, eval_interval=1)


def test_op_by_op_nothing_is_said(caplog, monkeypatch):
  monkeypatch.setattr(debug.settings, 'disable_pmap_jit', True)
  assert not warnings(caplog, Recompiling, [8, 8, 8, 8, 4, 2])


def test_what_is_fast_is_said_when_it_has_added_up(caplog, monkeypatch):
  caplog.set_level('WARNING')
  monkeypatch.setattr(recompilation, '_SECS', 1.0)
  secs = [0.0]
  monkeypatch.setattr(goodput, 'compiled_secs', lambda: secs[0])
  with recompilation.Watch(0) as watch:
    for step in range(20):
      secs[0] += 9 if step < 4 else 0.5
      watch.step = step if step != 3 else None
      watch.compiled('f', 'here', {})
  found = [record.getMessage() for record in caplog.records]
  # After one second, and then each time that there were twice as many.
  assert found == [
    f'Step {n} has compiled f again, in 0.5 s (called at here). '
    for n in (5, 7, 11, 19)
  ]


def test_a_batch_of_the_sharded_style_is_warned_of_once(caplog):
  class Ragged(regression.Regression):
    def train_input(self):
      for rows in [16] * 5 + [8] * 3:
        yield regression.examples(0, rows)

  caplog.set_level('WARNING')
  config = regression.get_config(7)
  config.checkpointer = 'memory'
  train.Run(Ragged, config).train()
  said = [r.getMessage() for r in caplog.records if 'compiled' in r.message]
  assert len(said) == 1
  assert said[0].startswith('train_input gave a batch of another shape')


def test_what_cannot_be_read_does_no_harm(caplog, monkeypatch):
  monkeypatch.setattr(recompilation, '_describe', lambda x: 1 / 0)
  (said,) = warnings(caplog, Recompiling, [8, 8, 8, 8, 4])
  assert said.startswith('Step 4 has compiled jit(update) again')
  assert said.endswith('). ')


def test_a_static_argument(caplog):
  class Static(Recompiling):
    def call(self, state, batch):
      jitted = jax.jit(lambda w, kind: w.sum(), static_argnums=1)
      if self.number > 3:
        jitted = self.kept
      self.kept = jitted
      return {'loss': jitted(state['w'], 'fast' if self.number < 5 else 'slow')}

  (said,) = warnings(caplog, Static, [8] * 6)
  assert said.splitlines()[1:] == ["kind: now 'slow', before 'fast'"]
