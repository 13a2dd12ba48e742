"""The account of the time of a run, and of what was compiled."""

import time
import types

import jax
import pytest

from jaxline import api
from jaxline.base import debug
from jaxline.base import goodput
from tests.experiments import regression


@pytest.fixture
def clock(monkeypatch):
  """Stands still unless it is set."""
  made = types.SimpleNamespace(now=100.0, time=lambda: made.now)
  monkeypatch.setattr(goodput, '_clock', made.time)
  # JAX says how long its phases took.
  monkeypatch.setattr('jax._src.dispatch.time', made)
  return made


def since_now():
  """Returns a function that returns what has been spent since."""
  before = goodput.seconds_by_category()

  def since():
    now = goodput.seconds_by_category()
    return {k: x - before[k] for k, x in now.items() if x != before[k]}

  return since


def test_each_moment_counts_once(clock):
  def nested():
    clock.now += 1024  # compilation, within another one

  def traced():
    with jax.ensure_compile_time_eval():
      jax.jit(nested)()

  since = since_now()
  with goodput.run():
    clock.now += 1  # start
    with debug.log_activity('reading', category='restore'):
      clock.now += 2
    with debug.log_activity('resuming'):
      clock.now += 4  # start
    with goodput.measure('steps'):
      clock.now += 8
      jax.jit(traced)()
      with goodput.run(), goodput.measure('evaluation'):
        clock.now += 16
        with goodput.measure('checkpoints'):
          clock.now += 32
        clock.now += 64  # evaluation
        goodput.add('input wait', 48)  # Of the evaluation's.
      clock.now += 128  # steps
    clock.now += 256  # other
  clock.now += 512  # After the run.
  assert since() == {
    **{'start': 5, 'restore': 2, 'steps': 136, 'input wait': 48},
    **{'checkpoints': 32, 'evaluation': 32, 'other': 256},
    'compilation': 1024,
  }


def test_the_time_of_a_run_adds_up(tmp_path):
  config = regression.get_config(6)
  config.update(checkpoint_dir=str(tmp_path), save_checkpoint_interval=3)
  config.eval_interval = 3
  since, began = since_now(), time.monotonic()
  api.fit(regression.Regression, config)
  wall = time.monotonic() - began
  took = since()
  assert all(secs > 0 for secs in took.values())
  # A compilation counts once; curves are read after the run.
  assert wall - 1 < sum(took.values()) < wall
  assert set(took) == {
    *('start', 'compilation', 'steps', 'input wait', 'checkpoints'),
    *('evaluation', 'other'),
  }
  config.training_steps = 9
  since = since_now()
  api.fit(regression.Regression, config)
  assert 'restore' in since()
