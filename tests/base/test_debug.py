"""Tests of jaxline.base.debug, whose settings are flags of the program."""

from concurrent import futures
import io
import os
import signal
import sys
import threading

from absl import flags
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import platform  # noqa: F401  It defines the flags.
from jaxline.base import debug
from tests import processes


@pytest.fixture
def set_flag():
  with flagsaver.flagsaver():
    yield lambda name, value: setattr(flags.FLAGS, f'jaxline_{name}', value)


@pytest.fixture
def jit_off(set_flag):
  set_flag('disable_pmap_jit', True)


def test_kwargs_only_refuses_positional_arguments():
  f = debug.kwargs_only(lambda a, b=2: (a, b))
  assert f(a=1) == (1, 2)
  with pytest.raises(TypeError):
    f(1)


def _fail(error, local='here'):
  """Raises an error in a frame of Python's own."""
  future = futures.Future()
  future.set_exception(error)
  future.result()


class _Terminal(io.StringIO):
  isatty = lambda self: True


@pytest.mark.parametrize(
  ('is_on', 'error', 'entered'),
  [
    (False, ValueError, 0),
    (True, ValueError, 1),
    (True, SystemExit, 0),
    (True, KeyboardInterrupt, 0),
  ],
)
def test_post_mortem_enters_once_in_the_users_frame(
  is_on, error, entered, set_flag, monkeypatch, capsys
):
  set_flag('post_mortem', is_on)
  fail = lambda error: _fail(error)  # One more frame of the user.
  nested = debug.debugger_fallback(debug.debugger_fallback(fail))
  for _ in range(2):
    monkeypatch.setattr(sys, 'stdin', _Terminal('p local, error\n'))
    with pytest.raises(error):
      nested(error('bad'))
    shown = capsys.readouterr().out
    assert shown.count('Traceback') == entered
    assert shown.count("('here', ValueError('bad'))") == entered


def test_post_mortem_takes_commands_of_a_pipe_or_lets_the_error_pass(
  set_flag, monkeypatch, capsys
):
  def fail():
    with pytest.raises(ValueError, match='bad'):
      debug.debugger_fallback(_fail)(ValueError('bad'))
    return 'Traceback' in capsys.readouterr().out

  set_flag('post_mortem', True)
  read, write = os.pipe()
  with open(read) as pipe, open(write, 'w') as commands:
    for stdin in (None, io.StringIO(), pipe):
      monkeypatch.setattr(sys, 'stdin', stdin)
      assert not fail()
    print('q', file=commands, flush=True)
    assert fail()


@pytest.mark.process
def test_an_interrupt_is_for_the_debugger():
  program = """
from jaxline.supervision import preemption

def fail():
  breakpoint()

with preemption.Watch() as watch, watch.training():
  fail()
  print('noted', watch.reached(1))
"""

  def wait_for(text):
    while text not in (line := process.stdout.readline()):
      assert line, process.stderr.read()

  with processes.started('-c', program) as process:
    print('p 1', file=process.stdin, flush=True)  # It starts with a command.
    wait_for('(Pdb)')
    for _ in range(2):
      # It sleeps while it waits for a command.
      processes.wait_until(lambda: processes.state_of(process.pid) == 'S')
      process.send_signal(signal.SIGINT)
      wait_for('--KeyboardInterrupt--')
    done = processes.end(process, 'c\n')
  assert done.returncode == 0, done.stderr
  assert 'noted False' in done.stdout


# What `_loss` saw: the value as Python sees it, and which way an `if` went.
_seen = []


def _loss(w, x):
  y = (w * x).sum()
  _seen.append((y.item(), 'positive' if y > 0 else 'negative', repr(y)))
  return y


def _step(w, x):
  return w - jax.grad(_loss)(w, x)


def _pmap_step(w, x):
  return w - jax.lax.pmean(jax.grad(lambda w: (w * x).sum())(w), 'i')


_jit_step = jax.jit(_step, donate_argnums=0)
_pmapped_step = jax.pmap(_pmap_step, axis_name='i', donate_argnums=0)


def _sharded_step():
  types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((2,), ('data',), axis_types=types)
  on = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))
  return jax.jit(_step, in_shardings=(on(), on('data')), out_shardings=on())


# Compiled before; and for two devices, whose parts are seen together.
@pytest.mark.parametrize('make', [lambda: _jit_step, _sharded_step])
def test_op_by_op_in_jit_and_in_a_thread(jit_off, make):
  _seen.clear()
  got, arguments = [], (np.float32([1.0, -2.0]), np.float32([3.0, 4.0]))

  @debug.disable_pmap_jit
  def run():
    thread = threading.Thread(target=lambda: got.append(make()(*arguments)))
    thread.start()
    thread.join()

  run()
  np.testing.assert_array_equal(got, [[-2.0, -6.0]])
  assert [seen[:2] for seen in _seen] == [(-5.0, 'negative')]
  assert 'primal=-5.0' in _seen[0][2]


def test_op_by_op_in_pmap(jit_off):
  """The values are a batch, of which an `if` does not take one."""
  w, x = jnp.array([[1.0, -2.0]] * 2), jnp.array([[3.0, 4.0], [5.0, 0.0]])

  @debug.disable_pmap_jit
  def run():
    with pytest.raises(jax.errors.TracerBoolConversionError):
      jax.pmap(lambda x: x if x > 0 else -x)(w[:, 0])
    return jax.pmap(_pmap_step, axis_name='i')(w, x), _pmapped_step(w, x)

  np.testing.assert_array_equal(run(), [[[-3.0, -4.0]] * 2] * 2)


def test_op_by_op_ends_with_the_last_function(jit_off):
  outer_began, inner_ended = threading.Event(), threading.Event()
  look = lambda: (jax.config.values['jax_disable_jit'], jax.pmap, jax.remat)
  before, during = look(), []

  def outer():
    outer_began.set()
    inner_ended.wait(10)
    during.extend(look())

  thread = threading.Thread(target=debug.disable_pmap_jit(outer))
  thread.start()
  assert outer_began.wait(10)
  with pytest.raises(ZeroDivisionError):
    debug.disable_pmap_jit(lambda: 1 // 0)()
  inner_ended.set()
  thread.join(10)
  assert during[0] is True
  assert set(during[1:]).isdisjoint(before)
  assert look() == before
