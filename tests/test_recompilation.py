"""Programs that steps compile again: what is said of them, and what is not."""

import logging
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import base_config
from jaxline import debug
from jaxline import experiment
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


def test_the_closest_arguments_of_before_are_compared(caplog):
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
  assert 'or called on other devices' in said


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
  with recompilation.Watch(0) as watch:
    for step, secs in enumerate([9, 9, 9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1]):
      watch.step = step
      watch._program = recompilation._Program('f', 'here', {})
      watch.took('/jax/core/compile/jaxpr_trace_duration', secs / 2, 'f')
      watch.took(recompilation._COMPILED, secs / 2, 'f')
  found = [record.getMessage()[:40] for record in caplog.records]
  # After one second, after two more, and where one takes so long by itself.
  assert found == [
    f'Step {n} has compiled f again, in {secs:.1f} s (ca'[:40]
    for n, secs in ((4, 0.5), (8, 0.5), (9, 1), (10, 1))
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


def test_what_cannot_be_read_is_said_and_does_no_harm(caplog, monkeypatch):
  monkeypatch.setattr(recompilation, '_read', lambda record: 1 / 0)
  first, second = warnings(caplog, Recompiling, [8, 8, 8, 8, 4])
  assert first.startswith('What JAX says of a compilation cannot be read')
  assert second.startswith('Step 4 has compiled jit(update) again')
  assert second.endswith('). ')


def test_without_names_arguments_have_numbers(caplog, monkeypatch):
  monkeypatch.setattr(recompilation, '_argument_names', lambda *unused: None)
  (said,) = warnings(caplog, Recompiling, [8, 8, 8, 8, 4])
  assert said.splitlines()[1:] == [
    'argument 1: now float32[4,3], before float32[8,3]'
  ]


SHOWS = """
import logging, sys
import jax, jax.numpy as jnp
from jaxline.supervision import recompilation
logging.basicConfig(stream=sys.stdout, format='%(name)s %(message)s')
jax.config.update('jax_log_compiles', {log_compiles})
if {debug}:
  logging.getLogger('jax').setLevel(logging.DEBUG)
with recompilation.Watch(0) as watch:
  watch.step = 0
  jax.jit(lambda x: x)(1.0)
"""


@pytest.mark.process
@pytest.mark.parametrize(
  ('log_compiles', 'is_debug', 'is_shown'),
  [(False, False, False), (True, False, True), (False, True, True)],
)
def test_what_jax_shows_is_as_before(log_compiles, is_debug, is_shown):
  program = SHOWS.format(log_compiles=log_compiles, debug=is_debug)
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(program)],
    capture_output=True,
    text=True,
    check=True,
  )
  shown = 'jax._src.interpreters.pxla Compiling jit(<lambda>)' in done.stdout
  assert shown == is_shown, done.stdout + done.stderr


def test_the_level_of_the_log_stays_ours():
  assert logging.getLogger(recompilation._LOGGER).level == logging.DEBUG
