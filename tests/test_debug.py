"""Tests of jaxline.debug."""

from concurrent import futures
import functools
import io
import pdb
import signal
import sys
import threading
import time
from unittest import mock

from absl import flags
from absl.testing import flagsaver
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import debug
from jaxline import op_by_op
from jaxline import platform  # noqa: F401  It defines the flags.
from jaxline import utils
from tests import processes

P = jax.sharding.PartitionSpec


@pytest.fixture
def post_mortem_on(monkeypatch):
  monkeypatch.setattr(debug.settings, 'post_mortem', True)


@pytest.fixture
def jit_off(monkeypatch):
  monkeypatch.setattr(debug.settings, 'disable_pmap_jit', True)


# --- settings ----------------------------------------------------------------


def test_settings_are_the_flags_of_a_program_that_parses_them_itself():
  names = ('post_mortem', 'disable_pmap_jit', 'mode')
  values = lambda: [getattr(debug.settings, name) for name in names]
  before = values()
  with flagsaver.flagsaver():
    flags.FLAGS(['x', '--jaxline_post_mortem', '--jaxline_mode=eval_test'])
    assert values() == [True, False, 'eval_test']
    flags.FLAGS.jaxline_post_mortem = False  # As tests set it.
    assert not debug.settings.post_mortem
  assert values() == before
  # Without the module that defines the flags.
  assert debug.Settings().mode == 'eval'


# --- small helpers -----------------------------------------------------------


def test_kwargs_only_refuses_positional_arguments():
  f = debug.kwargs_only(lambda a, b=2: (a, b))
  assert f(a=1) == (1, 2)
  with pytest.raises(TypeError):
    f(1)


@pytest.mark.parametrize('patched', ['absl.logging', 'jaxline.utils.logging'])
def test_an_activity_is_logged_with_its_error(patched):
  with (
    mock.patch(f'{patched}.info') as info,
    mock.patch(f'{patched}.exception') as exception,
  ):
    with utils.log_activity('a'):
      exception.assert_not_called()
    with pytest.raises(ValueError, match='bad'), utils.log_activity('b'):
      raise ValueError('bad')
  info.assert_any_call('[jaxline] %s starting...', 'a')
  info.assert_any_call('[jaxline] %s finished.', 'a')
  exception.assert_called_once_with('[jaxline] %s failed with error.', 'b')


# --- post mortem -------------------------------------------------------------


def _fail(error):
  raise error


@pytest.mark.parametrize(
  ('is_on', 'error', 'entered'),
  [
    (False, ValueError, 0),
    (True, ValueError, 1),
    (True, SystemExit, 0),
    (True, KeyboardInterrupt, 0),
  ],
)
def test_post_mortem_enters_once_where_an_error_was_raised(
  monkeypatch, is_on, error, entered
):
  monkeypatch.setattr(debug.settings, 'post_mortem', is_on)
  nested = debug.debugger_fallback(debug.debugger_fallback(_fail))
  frames = []

  def post_mortem(tb):
    while tb.tb_next:
      tb = tb.tb_next
    frames.append(tb.tb_frame.f_code.co_name)

  monkeypatch.setattr(pdb, 'post_mortem', post_mortem)
  for _ in range(2):
    with pytest.raises(error):
      nested(error())
  assert frames == ['_fail'] * 2 * entered


def test_post_mortem_serves_one_thread_at_a_time(post_mortem_on):
  inside, seen = threading.Lock(), []

  def post_mortem(tb):
    assert inside.acquire(blocking=False), 'two debuggers at once'
    seen.append(tb)
    threading.Event().wait(0.05)  # Long enough for the other to come.
    inside.release()

  @debug.debugger_fallback
  def fail():
    both.wait()
    raise ValueError

  both = threading.Barrier(2)
  with mock.patch.object(pdb, 'post_mortem', post_mortem):
    with futures.ThreadPoolExecutor(2) as pool:
      failed = [pool.submit(fail) for _ in range(2)]
  assert [type(x.exception()) for x in failed] == [ValueError] * 2
  assert len(seen) == 2


class _Closed(io.StringIO):
  def readline(self, *unused):
    raise OSError('closed')


@pytest.mark.parametrize('stdin', [None, io.StringIO(), _Closed()])
def test_post_mortem_without_stdin_lets_the_error_pass(
  post_mortem_on, monkeypatch, stdin
):
  monkeypatch.setattr(sys, 'stdin', stdin)
  with pytest.raises(ValueError, match='bad'):
    debug.debugger_fallback(_fail)(ValueError('bad'))


@pytest.mark.process
@pytest.mark.parametrize('debugger', ['post mortem', 'breakpoint'])
@pytest.mark.parametrize('is_main_thread', [True, False])
def test_an_interrupt_is_for_the_debugger(is_main_thread, debugger):
  program = f"""
import threading
from jaxline import debug
from jaxline.supervision import preemption

debug.settings.post_mortem = True

def fail():
  if {debugger == 'breakpoint'}:
    debug.settings.post_mortem = False
    breakpoint()
  raise ValueError

with preemption.Watch() as watch, watch.training():
  try:
    if {is_main_thread}:
      debug.debugger_fallback(fail)()
    thread = threading.Thread(target=debug.debugger_fallback(fail))
    thread.start()
    thread.join()
  except ValueError:
    pass
  print('noted', watch.reached(1))
"""
  with processes.started('-c', program) as process:
    while ')fail()' not in (line := process.stdout.readline()):
      assert line, process.stderr.read()
    time.sleep(0.5)
    for _ in range(2):
      process.send_signal(signal.SIGINT)
      time.sleep(0.2)
    done = processes.end(process, 'c\n')
  assert done.returncode == 0, done.stderr
  out = done.stdout
  assert 'noted False' in out
  assert out.count('--KeyboardInterrupt--') == 2 * is_main_thread


# --- op by op ----------------------------------------------------------------


# What `_loss` saw: the value as Python sees it, and which way an `if` went.
_seen = []


def _loss(w, x):
  y = (w * x).sum()
  _seen.append((y.item(), 'positive' if y > 0 else 'negative', repr(y)))
  return y


def _step(w, x):
  return w - jax.grad(_loss)(w, x)


def _pmap_step(w, x):
  grad = jax.lax.pmean(jax.grad(_loss)(w, x), 'i')
  _seen.append(type(grad).__name__)
  return w - grad


_jit_step = jax.jit(_step, donate_argnums=0)
_pmapped_step = jax.pmap(_pmap_step, axis_name='i', donate_argnums=0)


# Compiled before, and inside; the latter in a thread that the function starts.
@pytest.mark.parametrize('is_inside', [False, True])
def test_op_by_op_in_jit(jit_off, is_inside):
  _seen.clear()
  got = []

  def step():
    step = jax.jit(_step) if is_inside else _jit_step
    got.append(step(jnp.array([1.0, -2.0]), jnp.array([3.0, 4.0])))

  @debug.disable_pmap_jit
  def run():
    if is_inside:
      thread = threading.Thread(target=step)
      thread.start()
      thread.join()
    else:
      step()

  run()
  np.testing.assert_array_equal(got, [[-2.0, -6.0]])
  assert [seen[:2] for seen in _seen] == [(-5.0, 'negative')]
  assert 'primal=-5.0' in _seen[0][2]


@pytest.mark.parametrize(
  'make',
  [lambda: _pmapped_step, lambda: jax.pmap(_pmap_step, axis_name='i')],
)
@pytest.mark.parametrize('num_devices', [1, 2])
def test_op_by_op_in_pmap(jit_off, make, num_devices):
  _seen.clear()
  w = jnp.array([[1.0, -2.0], [1.0, -2.0]])[:num_devices]
  x = jnp.array([[3.0, 4.0], [5.0, 0.0]])[:num_devices]

  @debug.disable_pmap_jit
  def run():
    return make()(w, x)

  got = run()
  # The mean gradient is [4, 2] on two devices, [3, 4] on one.
  expected = [[-3.0, -4.0]] * 2 if num_devices == 2 else [[-2.0, -6.0]]
  np.testing.assert_array_equal(got, expected)
  assert len(got.sharding.device_set) == num_devices
  saw_loss = [seen[:2] for seen in _seen if isinstance(seen, tuple)]
  # Each device's own value, and its own way at the `if`.
  assert saw_loss == [(-5.0, 'negative'), (5.0, 'positive')][:num_devices]
  assert [seen for seen in _seen if isinstance(seen, str)] == [
    'ArrayImpl'
  ] * num_devices


def test_a_device_program_creates_its_arrays_on_its_device(jit_off):
  created = []

  @debug.disable_pmap_jit
  def run():
    jax.pmap(lambda x: created.append(jnp.ones([]).devices()) or x)(
      jnp.ones([2])
    )
    # Outside of it, collectives have no axis again.
    with pytest.raises(NameError):
      jax.lax.psum(jnp.ones([]), 'i')

  run()
  assert created == [{device} for device in jax.devices()]


def test_op_by_op_in_a_jit_with_shardings(jit_off):
  mesh = jax.make_mesh(
    (2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows, whole = (
    jax.sharding.NamedSharding(mesh, P('data')),
    jax.sharding.NamedSharding(mesh, P()),
  )
  seen = []

  def loss(w, x):
    y = jax.lax.with_sharding_constraint(x @ w, rows)
    seen.append((repr(y), bool((y > 0).all())))
    return y.mean()

  step = jax.jit(
    lambda w, x: w - jax.grad(loss)(w, x),
    in_shardings=(whole, rows),
    out_shardings=whole,
    donate_argnums=0,
  )
  w = jax.device_put(np.float32([1.0, 2.0]), whole)
  x = jax.device_put(np.float32([[1.0, 0.0], [0.0, 1.0]]), rows)
  np.testing.assert_array_equal(debug.disable_pmap_jit(step)(w, x), [0.5, 1.5])
  # The whole batch, not one device's part.
  assert seen == [('GradTracer(primal=[1. 2.], typeof(tangent)=f32[2])', True)]


def test_an_operation_has_ended_when_its_line_has(jit_off, monkeypatch):
  waited_for = []

  def wait(x):
    waited_for.append(x)
    return x

  monkeypatch.setattr(jax, 'block_until_ready', wait)
  x = jnp.ones([2])
  assert not waited_for
  got = debug.disable_pmap_jit(lambda: x * 3.0)()
  assert any(one is got for one in waited_for)


def test_op_by_op_ends_with_the_last_function(jit_off):
  outer_began, inner_ended = threading.Event(), threading.Event()
  hook = lambda: jax._src.core.EvalTrace.process_shard_map
  before, during = hook(), []

  def outer():
    outer_began.set()
    inner_ended.wait(10)
    during.extend([jax.config.values['jax_disable_jit'], hook()])

  thread = threading.Thread(target=debug.disable_pmap_jit(outer))
  thread.start()
  assert outer_began.wait(10)
  with pytest.raises(ZeroDivisionError):
    debug.disable_pmap_jit(lambda: 1 // 0)()
  inner_ended.set()
  thread.join(10)
  assert during[0] is True
  assert during[1] is not before
  assert not jax.config.values['jax_disable_jit']
  assert hook() is before
  assert jax.checkpoint.__module__ != op_by_op.__name__


def _collectives(x):
  """x: [2, 2], different on each device."""
  index = jax.lax.axis_index('i')
  return {
    'psum': jax.lax.psum(x, 'i'),
    'psum_bool': jax.lax.psum(x > 2, 'i'),
    'psum_number': x * jax.lax.psum(1.0, 'i'),
    'size': x * jax.lax.axis_size('i'),
    'groups': jax.lax.psum(x, 'i', axis_index_groups=[[0], [1]]),
    'pmean': jax.lax.pmean({'a': x, 'b': x.sum()}, 'i'),
    'pmax': jax.lax.pmax(x, 'i'),
    'pmin': jax.lax.pmin(x, 'i'),
    'index': index,
    'ppermute': jax.lax.ppermute(x, 'i', [(0, 1), (1, 0)]),
    'all_gather': jax.lax.all_gather(x, 'i', axis=1),
    'all_to_all': jax.lax.all_to_all(x, 'i', 0, 0),
    'psum_scatter': jax.lax.psum_scatter(x, 'i', tiled=True),
    'grad': jax.grad(lambda x: (x * jax.lax.psum(x, 'i')).sum())(x),
    'keys': jax.random.uniform(
      jax.random.fold_in(jax.random.key(0), index), (3,)
    ),
  }


def _many_arguments(n, scale, x, key, *, shift):
  noise = jax.random.uniform(key, x.shape)
  return {'x': n * scale * x + shift + noise}, x.sum()


def _shard_map(check_vma):
  return jax.jit(
    jax.shard_map(
      lambda x: (jax.lax.psum(x, ('a', 'b')), x * 2.0),
      mesh=jax.make_mesh(
        (2, 1), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2
      ),
      in_specs=P(('a', 'b')),
      out_specs=(P(), P(('a', 'b'))),
      check_vma=check_vma,
    )
  )


@pytest.mark.parametrize(
  ('make', 'args'),
  [
    (
      lambda: jax.pmap(_collectives, axis_name='i'),
      (np.arange(8, dtype=np.float32).reshape(2, 2, 2),),
    ),
    (
      lambda: functools.partial(
        jax.pmap(
          _many_arguments,
          axis_name='i',
          in_axes=(None, None, 1, 0),
          out_axes=({'x': 1}, 0),
          static_broadcasted_argnums=0,
        ),
        shift=jnp.array([1.0, 2.0]),
      ),
      (
        3,
        np.float32(2),
        np.arange(6, dtype=np.float32).reshape(3, 2),
        np.uint32([[0, 1], [2, 3]]),
      ),
    ),
    (lambda: _shard_map(True), (np.arange(4, dtype=np.float32),)),
    (lambda: _shard_map(False), (np.arange(4, dtype=np.float32),)),
  ],
)
def test_op_by_op_gives_what_it_gives_compiled(make, args, jit_off):
  op_by_op = debug.disable_pmap_jit(make())(*args)
  chex.assert_trees_all_close(op_by_op, make()(*args), rtol=1e-6)


@jax.custom_vjp
def _double(x):
  return 2.0 * x


_double.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2.0 * g,))


def test_control_flow_runs_in_python(jit_off):
  seen = []

  def body(carry, x):
    seen.append(carry.item())
    carry = jax.lax.cond(carry > 1.0, lambda c: c, _double, carry + x)
    return carry, carry

  def loss(x):
    layer = jax.checkpoint(lambda c: jax.lax.scan(body, c, jnp.ones(3))[0])
    y = jax.nn.relu(jax.jit(layer)(x))
    return jax.lax.while_loop(lambda y: y < 9.0, lambda y: y + 4.0, y)

  def by_hand(x):
    for _ in range(3):
      x = x + 1.0 if x > 1.0 else 2.0 * (x + 1.0)
    while x < 9.0:
      x += 4.0
    return x

  run = debug.disable_pmap_jit(jax.pmap(loss, axis_name='i'))
  np.testing.assert_array_equal(
    run(jnp.array([0.0, 2.0])), [by_hand(0.0), by_hand(2.0)]
  )
  assert seen == [0.0, 2.0, 3.0, 2.0, 3.0, 4.0]


def test_pmap_error_of_one_device_is_the_error(jit_off):
  def f(x):
    if x > 0:
      raise ValueError(f'device saw {x.item()}')
    return jax.lax.psum(x, 'i')

  for values in ([0.0, 7.0], [7.0, 0.0]):
    with pytest.raises(ValueError, match=r'device saw 7\.0') as info:
      debug.disable_pmap_jit(jax.pmap(f, axis_name='i'))(jnp.array(values))
    assert info.traceback[-1].name == 'f'


@pytest.mark.parametrize('values', [[0.0, 7.0], [7.0, 0.0]])
def test_pmap_devices_that_part_are_an_error(jit_off, values):
  def f(x):
    return jax.lax.psum(x, 'i') if x > 0 else x

  with pytest.raises(RuntimeError, match=r"different ways.*the end|'psum'"):
    debug.disable_pmap_jit(jax.pmap(f, axis_name='i'))(jnp.array(values))
