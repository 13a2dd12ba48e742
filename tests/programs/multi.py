"""Experiments on several processes, as tests/several.py runs them.

Arguments: coordinator's address, number of processes, this process, the style
('sharded', 'per_device' or 'fed'), and then `platform.main`'s command line.

The environment's MULTI_FAULT, 'PROCESS:PLACE:STEP:WHAT' or several of them with
commas between, says what befalls which process where: see `fault`. (Not the
config: a run with another config would be another run.) MULTI_STEP_SECS is how
long a step takes at least, MULTI_HEARTBEAT_SECS JAX's patience with a process.
MULTI_WORKERS is how many processes read for each of the 'fed' style.
MULTI_SEED is the step of the snapshot that each process begins from, in the
style 'per_device'; behind the run each says what it has saved.
"""

import dataclasses
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
from jaxline import metrics
from jaxline import platform
from jaxline import sharded
from jaxline import utils
from jaxline.checkpoint import arrays
from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.supervision import preemption
from tests.experiments import regression
from tests.programs import events

WORKERS = int(os.environ.get('MULTI_WORKERS', '0'))
SIGNALS = {
  'term': signal.SIGTERM,
  'int': signal.SIGINT,
  'kill': signal.SIGKILL,
  'stop': signal.SIGSTOP,
}


class Failure(Exception):
  """What an injected fault raises."""


def say(what, **about):
  print(json.dumps({'what': what, **about}), flush=True)


def fault(place, step):
  """Does to this process what MULTI_FAULT says.

  Args:
    place: 'start' (of the constructor), 'step', 'save' (all is written, and
      not yet visible), 'evaluate'.
    step: which one.

  Returns:
    Whether this step's loss is to be NaN.
  """
  if place == 'step':
    events.write('step', step=step)  # So many have been taken.
    time.sleep(float(os.environ['MULTI_STEP_SECS']))
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
    os.kill(os.getpid(), SIGNALS[what])
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

  def restore_from_snapshot(self, snapshot_state):
    super().restore_from_snapshot(snapshot_state)
    self._say('restored')

  def train_loop(self, *args, **kwargs):
    try:
      super().train_loop(*args, **kwargs)
    except preemption.Preempted:
      self._say('left')
      raise
    self._say('trained')


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

  def _say(self, what):
    if self.mode == 'train':
      say(
        what,
        step=int(self.state.step),
        digest=regression.digest(self.state),
        position=jax.tree.map(int, self.train_feed.position['state']),
        shards=[list(s.data.shape) for s in
                self.state.params['w'].addressable_shards],
      )  # fmt: skip


RECORDS, GLOBAL_BATCH = 41, 12


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(indexed.IndexedInput):
  """The numbers up to 40."""

  def num_records(self):
    return RECORDS

  def read(self, records, epochs):
    return base.Batch(x=np.float32(records))


class Fed(Reporting, sharded.ShardedExperiment):
  """Reports which records a step or an evaluation saw, and in which rows."""

  def __init__(self, mode, init_rng, *, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config)
    self.rows = GLOBAL_BATCH // jax.process_count()

  def init_fn(self, rng):
    return {'w': jnp.zeros([])}, {}

  def loss_fn(self, params, model_state, batch, rng, is_training):
    x, one = batch['x'], jnp.ones([])
    places = jnp.arange(1, x.shape[0] + 1, dtype=jnp.float32)
    seen = {
      'loss': metrics.Mean.of(
        jnp.square(params['w'] - x / 20), batch['weights']
      ),
      # Whole numbers, small enough to be exact.
      'order': metrics.Mean(jnp.sum(x * places * batch['weights']), one),
      'squares': metrics.Mean(jnp.sum(x * x * batch['weights']), one),
    }
    return seen['loss'].compute(), seen, model_state

  def make_optimizer(self):
    return optax.sgd(0.01)

  def train_input(self):
    return Numbers(batch_size=self.rows, is_training=True, num_workers=WORKERS)

  def eval_input(self):
    raise NotImplementedError

  def _say(self, what):
    if self.mode == 'train':
      position = json.loads(self.train_feed.position)['position']
      say(what, step=int(self.state.step), position=position)


class PerDevice(Reporting, experiment.AbstractExperiment):
  """Learns y = 2 x by pmap; each process counts for itself."""

  CHECKPOINT_ATTRS = {'_w': 'w', '_opt_state': 'opt_state'}
  NON_BROADCAST_CHECKPOINT_ATTRS = {'_own': 'own'}

  def __init__(self, mode, init_rng):
    super().__init__(mode=mode, init_rng=init_rng)
    self.mode = mode
    fault('start', 0)
    self.optimizer = optax.adam(0.05)
    w = jax.random.normal(init_rng, [4])
    self._w = utils.bcast_local_devices(w)
    self._opt_state = utils.bcast_local_devices(self.optimizer.init(w))
    self._own = {'total': np.zeros([], np.int64), 'host': jax.process_index()}
    self.update = jax.pmap(self._update, axis_name='i', donate_argnums=(0, 1))
    self.loss = jax.pmap(
      lambda w: jax.lax.pmean(jnp.square(w - 2).mean(), 'i'), axis_name='i'
    )

  def _update(self, w, opt_state, rng):
    def loss_fn(w):
      x = jax.random.normal(rng, [4, 4])
      return jnp.square(x * w[None] - 2 * x).mean()

    loss, grad = jax.value_and_grad(loss_fn)(w)
    loss, grad = jax.lax.pmean((loss, grad), 'i')
    updates, opt_state = self.optimizer.update(grad, opt_state, w)
    return optax.apply_updates(w, updates), opt_state, {'loss': loss}

  def step(self, *, global_step, rng, writer):
    step = int(global_step[0])
    if fault('step', step):
      self._w = self._w * np.float32('nan')
    self._own['total'] = self._own['total'] * 3 + step + jax.process_index()
    self._w, self._opt_state, scalars = self.update(
      self._w, self._opt_state, rng
    )
    return utils.get_first(scalars)

  def evaluate(self, *, global_step, rng, writer):
    fault('evaluate', int(global_step[0]))
    loss = float(self.loss(self._w)[0])
    say('evaluated', step=int(global_step[0]), loss=loss)
    return {'loss': loss}

  def _say(self, what):
    if self.mode == 'train':
      say_of(what, self._w, self._opt_state, self._own)


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
    'opt_state': optax.adam(0.05).init(w),
    'own': {'total': np.int64(5), 'host': jax.process_index()},
  }
  nest = {'global_step': step, 'experiment_module': module}
  utils.GLOBAL_CHECKPOINT_DICT['latest'] = utils.CheckpointNT(
    threading.local(), [utils.SnapshotNT(0, nest)]
  )


def say_saved():
  """Does what a program does that saves a file of its own."""
  nest = utils.GLOBAL_CHECKPOINT_DICT['latest'].history[-1].pickle_nest
  module = nest.experiment_module
  say_of('saved', module._w, module._opt_state, module.to_dict()['own'])


def say_of(what, w, opt_state, own):
  own = {name: int(x) for name, x in own.items()}
  digest = regression.digest(utils.get_first((w, opt_state)))
  say(what, digest=digest, position=own)


CLASSES = {'sharded': Sharded, 'per_device': PerDevice, 'fed': Fed}

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
  seed = os.environ.get('MULTI_SEED', '')
  if seed:
    put_snapshot(int(seed))
  platform.main(CLASSES[style], argv)
  if seed:
    say_saved()
