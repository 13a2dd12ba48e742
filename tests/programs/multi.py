"""Experiments on several processes, as tests/several.py runs them.

Arguments: coordinator's address, number of processes, this process, the style
('sharded' or 'per_device'), and then `platform.main`'s command line.

The environment's MULTI_FAULT, 'PROCESS:PLACE:STEP:WHAT' or several of them with
commas between, says what befalls which process where: see `fault`. (Not the
config: a run with another config would be another run.) MULTI_STEP_SECS is how
long a step takes at least, MULTI_HEARTBEAT_SECS JAX's patience with a process.
MULTI_SEED is the step of the snapshot that each process begins from, in the
style 'per_device'; behind the run each says what it has saved.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import experiment
from jaxline import platform
from jaxline import utils
from jaxline.checkpoint import arrays
from jaxline.supervision import preemption
from tests.experiments import regression
from tests.programs import events


def get_config():
  config = regression.get_run_config(steps=6, save=2, evaluation=2)
  config.max_checkpoints_to_keep = 10
  return config


class Failure(Exception):
  """What an injected fault raises."""


def say(what, **about):
  print(json.dumps({'what': what, **about}), flush=True)


def fault(place, step):
  """Does to this process what MULTI_FAULT says; returns whether a batch is NaN.

  The place is 'start' (of the constructor), 'step', 'input', 'evaluate' or
  'save' (all is written, and not yet visible).
  """
  if place == 'step':
    events.write('step', step=step)  # So many have been taken.
    time.sleep(float(os.environ.get('MULTI_STEP_SECS', '0')))
  here = [str(jax.process_index()), place, str(step)]
  for text in filter(None, os.environ.get('MULTI_FAULT', '').split(',')):
    *where, what = text.split(':')
    if where != here:
      continue
    if what == 'nan':
      return True
    if what == 'end':
      raise experiment.StopTraining('enough')
    if what == 'raise':
      raise Failure(f'{place} {step}')
    os.kill(os.getpid(), signal.Signals[f'SIG{what.upper()}'])
  return False


class Input(regression.Input):
  """Of the global batches the rows of this process; knows what it gave."""

  def __init__(self, batch_size):
    super().__init__(batch_size)
    self.state['given'] = 0

  def __next__(self):
    step = int(self.state['next'])
    batch = super().__next__()
    rows = self.batch_size // jax.process_count()
    first = rows * jax.process_index()
    batch = {name: x[first : first + rows] for name, x in batch.items()}
    self.state['given'] = zlib.crc32(batch['x'].tobytes(), self.state['given'])
    if fault('input', step):
      batch['y'] = batch['y'] * np.float32('nan')
    return batch

  def set_state(self, state):
    super().set_state(state)
    self.state['given'] = int(state['given'])


class Reporting:
  """Says where training begins, ends, and what it then has."""

  def train_loop(self, config, state, *args):
    if state.global_step:
      self._say('restored', state.global_step)
    try:
      super().train_loop(config, state, *args)
    except (preemption.Preempted, experiment.StopTraining):
      self._say('left', state.global_step)
      raise
    self._say('trained', state.global_step)


class Sharded(Reporting, regression.Regression):
  """The regression, its weights over all processes."""

  def __init__(self, mode, init_rng, *, run_config=None):
    super().__init__(
      mode, init_rng, batch_size=12, sharding='fsdp', run_config=run_config
    )
    fault('start', 0)

  def train_input(self):
    return Input(self.batch_size)

  def eval_input(self):
    first = 8 * jax.process_index()
    for rows in (4, 4 - jax.process_index()):
      yield regression.examples(1, rows, first)
      first += rows

  def step(self, *, global_step, rng, writer):
    fault('step', global_step)
    return super().step(global_step=global_step, rng=rng, writer=writer)

  def evaluate(self, *, global_step, rng, writer):
    fault('evaluate', int(global_step))
    scalars = super().evaluate(global_step=global_step, rng=rng, writer=writer)
    say('evaluated', step=int(global_step), loss=scalars['loss'])
    return scalars | {'own': 0.5 + jax.process_index()}

  def _say(self, what, step):
    assert step == int(self.state.step)
    say(
      what,
      step=step,
      digest=regression.digest(self.state),
      position=jax.tree.map(int, self.train_feed.position['state']),
      shards=[list(s.data.shape) for s in
              self.state.params['w'].addressable_shards],
    )  # fmt: skip


OPTIMIZER = optax.sgd(0.05, momentum=0.9)


@functools.partial(jax.pmap, axis_name='i', donate_argnums=(0, 1))
def descend(w, opt_state, rng):
  """A step of `PerDevice`."""
  x = jax.random.normal(rng, [4, 4])
  loss, grad = jax.value_and_grad(
    lambda w: jnp.square(x * w[None] - 2 * x).mean()
  )(w)
  loss, grad = jax.lax.pmean((loss, grad), 'i')
  updates, opt_state = OPTIMIZER.update(grad, opt_state, w)
  return optax.apply_updates(w, updates), opt_state, loss


class PerDevice(Reporting, experiment.AbstractExperiment):
  """Learns y = 2 x by pmap; each process counts for itself."""

  CHECKPOINT_ATTRS = {'_w': 'w', '_opt_state': 'opt_state'}
  NON_BROADCAST_CHECKPOINT_ATTRS = {'_own': 'own'}

  def __init__(self, mode, init_rng):
    super().__init__(mode=mode, init_rng=init_rng)
    fault('start', 0)
    w = jax.random.normal(init_rng, [4])
    self._w = utils.bcast_local_devices(w)
    self._opt_state = utils.bcast_local_devices(OPTIMIZER.init(w))
    self._own = {'total': np.zeros([], np.int64), 'host': jax.process_index()}

  def step(self, *, global_step, rng, writer):
    step = int(global_step[0])
    fault('step', step)
    self._own['total'] = self._own['total'] * 3 + step + jax.process_index()
    self._w, self._opt_state, loss = descend(self._w, self._opt_state, rng)
    return {'loss': loss[0]}

  def evaluate(self, *, global_step, rng, writer):
    fault('evaluate', int(global_step[0]))
    loss = float(jnp.square(self._w[0] - 2).mean())
    say('evaluated', step=int(global_step[0]), loss=loss)
    return {'loss': loss}

  def _say(self, what, step):
    say_of(what, step, self._w, self._opt_state, self._own)


def fault_in_saves():
  """Lets a fault come when the arrays are written and no manifest is."""
  write = arrays.write

  def write_then_fault(store, content):
    described = write(store, content)
    data = store.url.rpartition('/')[2]
    fault('save', int(data.partition('-')[0]))
    return described

  arrays.write = write_then_fault


def put_snapshot(step):
  """Does what a program does that restores a file of its own."""
  w = np.arange(4, dtype=np.float32)
  module = {
    'w': w,
    'opt_state': OPTIMIZER.init(w),
    'own': {'total': np.int64(5), 'host': jax.process_index()},
  }
  nest = {'global_step': step, 'experiment_module': module}
  utils.GLOBAL_CHECKPOINT_DICT['latest'] = utils.CheckpointNT(
    threading.local(), [utils.SnapshotNT(0, nest)]
  )


def say_saved():
  """Does what a program does that saves a file of its own."""
  nest = utils.GLOBAL_CHECKPOINT_DICT['latest'].history[-1].pickle_nest
  module, step = nest.experiment_module, nest.global_step
  say_of('saved', step, module._w, module._opt_state, module.to_dict()['own'])


def say_of(what, step, w, opt_state, own):
  own = {name: int(x) for name, x in own.items()}
  digest = regression.digest(utils.get_first((w, opt_state)))
  say(what, step=step, digest=digest, position=own)


if __name__ == '__main__':
  address, num_processes, process, style, *argv = sys.argv[1:]
  if int(num_processes) > 1:
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(
      address,
      int(num_processes),
      int(process),
      initialization_timeout=60,
      heartbeat_timeout_seconds=int(os.environ['MULTI_HEARTBEAT_SECS']),
    )
  fault_in_saves()
  events.install()
  if seed := os.environ.get('MULTI_SEED'):
    put_snapshot(int(seed))
  try:  # It ends by SystemExit.
    classes = {'sharded': Sharded, 'per_device': PerDevice}
    platform.main(classes[style], argv)
  finally:
    if seed:
      say_saved()
