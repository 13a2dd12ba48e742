"""Nothing slows each step down: compilations, waits and copies, as counts.

None of these tests reads a clock. `python -m benchmarks` measures times.
"""

import collections
from concurrent import futures
import platform
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import train
from jaxline.metrics import scalars as scalars_lib
from jaxline.supervision import preemption
from tests import toys
from tests.experiments import regression


def make_config(steps):
  """Returns a config in which everything is due after each step."""
  config = regression.get_config(steps)
  config.checkpointer = 'memory'
  config.log_train_data_interval = config.log_tensors_interval = 1
  return config


def test_a_run_compiles_each_program_once():
  names = collections.Counter()

  def listen(event, unused_secs, fun_name='', **unused):
    if event == '/jax/core/compile/backend_compile_duration':
      names[fun_name] += 1

  config = make_config(6)
  config.eval_interval = config.save_checkpoint_interval = 2
  jax.clear_caches()
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    train.Run(
      regression.Regression, config, writer=toys.Writes()
    ).train_and_eval()
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert names['jit(step)'] == names['jit(evaluation)'] == 1, names
  # The others make the first state and keys, and copy a state to be saved.
  assert set(names.values()) == {1}, names
  assert len(names) <= 9, names


def test_nothing_on_the_training_thread_waits_for_the_step():
  """A fetch on the training thread would wait for the end of each step."""
  newest, was_running = {}, []

  class Slow(regression.Regression):
    def step_scalars(self, state, grads, updates):
      x = jnp.full([256, 256], state.step.astype(jnp.float32))
      x = jax.lax.fori_loop(0, 200, lambda i, x: jnp.tanh(x @ x), x)
      return {'slow': x.sum()}

    def step(self, **kwargs):
      newest['scalars'] = super().step(**kwargs)
      return newest['scalars'] | {'more': 1}

  class Watch(preemption.Watch):
    def reached(self, step):  # The last thing that the loop does in a step.
      (packed, *_) = scalars_lib.leaves(newest['scalars'])
      was_running.append(not packed.is_ready())
      return super().reached(step)

  writer = toys.Writes()
  train.Run(Slow, make_config(4), writer=writer, watch=Watch()).train()
  assert len(writer.records) == len(was_running) == 4
  # A step takes a sixth of a second, the loop's code behind it a millisecond.
  # Behind the first one, the program of the fingerprint is compiled.
  assert all(was_running[1:]), was_running


def test_a_step_copies_its_batch_to_the_devices_and_nothing_else(monkeypatch):
  copied, called = [], []
  device_put = jax.device_put

  def put(x, *args, **kwargs):
    copied.append(jax.tree.map(jnp.shape, x))
    return device_put(x, *args, **kwargs)

  experiment = regression.Regression('train', jax.random.PRNGKey(0))
  regression.train_steps(experiment, 1)
  step = experiment.compiled_train_step

  def checked(*args):
    called.append({type(x) for x in jax.tree.leaves(args)})
    return step(*args)

  experiment.__dict__['compiled_train_step'] = checked
  monkeypatch.setattr(jax, 'device_put', put)
  regression.train_steps(experiment, 8)
  # What the step gets lies on the devices: it is copied by no call of it.
  assert called == [{type(jnp.zeros([]))}] * 8
  batch = jax.tree.map(jnp.shape, regression.examples(0, 16))
  assert all(x == batch | {'weights': (16,)} for x in copied)
  # Each is copied once. The others are read ahead, as the batches are small.
  assert 8 <= len(copied) <= 8 + 32


@pytest.mark.skipif(
  platform.libc_ver() < ('glibc', '2.35'), reason='no glibc 2.35'
)
def test_a_run_on_a_cpu_keeps_freed_memory():
  train.Run(regression.Regression, make_config(1))

  def count_faults():
    len(bytes([1]) * (3 * 2**24))  # Allocates, fills and frees 48 MiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

  with futures.ThreadPoolExecutor(1) as pool:
    held = pool.submit(bytes, 2**25).result()  # Half of its first heap.
    for call in (lambda f: f(), lambda f: pool.submit(f).result()):
      faults = [call(count_faults) for _ in range(6)]
      assert np.median(np.diff(faults)) < 20  # Others may take a part once.
    del held  # Without it, the thread would need no second heap.
