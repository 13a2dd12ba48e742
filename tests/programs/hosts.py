"""The regression on meshes that lie across processes, for one of these.

Started by `python -m jaxline.launch` in promises/test_hosts.py. Arguments:
a folder with the checkpoint `start`, and a JSON list of cases, as that has
them. Each case goes on from there, and leaves a checkpoint of its name. Prints
as JSON what this process sees.
"""

import contextlib
import json
import pathlib
import sys

import jax

from jaxline import base_config
from jaxline import inputs
from jaxline import platform
from jaxline.inputs import base
from jaxline.parallel import devices
from jaxline.parallel import distributed
from jaxline.parallel import prng
from tests.experiments import regression

STEPS = 2  # Of each leg: before, in the processes, after.
GLOBAL_BATCH = 12
EVAL_RECORDS = 41  # The last batch has five, for more hosts than that fills.


class Regression(regression.Regression):
  """The regression on an input that every host has its rows of."""

  def train_input(self, shard):
    rows = base.per_host(GLOBAL_BATCH, shard)
    values = regression.examples(0, 100)
    return inputs.arrays(values, batch_size=rows, shard=shard, is_training=True)

  def eval_input(self, shard):
    rows = base.per_host(GLOBAL_BATCH, shard)
    values = regression.examples(0, EVAL_RECORDS)
    return inputs.arrays(values, batch_size=rows, shard=shard)


def make(folder, sharding, mesh):
  """Returns a run's config and experiment."""
  config = base_config.get_base_config()
  config.checkpoint_dir = str(folder)
  config.interval_type = 'steps'
  config.sharding = sharding
  for network, sizes in mesh.items():
    config.mesh[network].update(sizes)
  key = jax.random.PRNGKey(0)
  return config, Regression('train', key, run_config=config)


@contextlib.contextmanager
def checkpoints(config, live, key):
  """A durable checkpointer of the run, filled as the loops do."""
  checkpointer = platform.create_checkpointer(config, 'train')
  checkpointer.get_experiment_state('latest').update(
    global_step=int(live.state.step), train_step_rng=key, experiment_module=live
  )
  try:
    yield checkpointer
  finally:
    checkpointer.close()


def save(config, live):
  with checkpoints(config, live, jax.random.PRNGKey(1)) as checkpointer:
    checkpointer.save('latest')


def restore(config, live):
  with checkpoints(config, live, None) as checkpointer:
    checkpointer.restore('latest')


def train(live):
  """Returns the losses of the next steps."""
  return [float(row['loss']) for row in regression.train_steps(live, STEPS)]


def step_keys():
  """Returns mode -> the key of a step on each device of this process."""
  state_key = devices.bcast_local_devices(jax.random.PRNGKey(3))
  found = {}
  for mode in ('same_host_unique_device', 'unique_host_unique_device'):
    _, keys, _ = prng.DeviceStepKeys(mode)(0, state_key)
    found[mode] = [s.data[0].tolist() for s in keys.addressable_shards]
  return found


def run(folder, name, sharding, mesh):
  """Goes on from `start`; returns what this process saw."""
  config, live = make(folder / 'start', sharding, mesh)
  restore(config, live)
  restored = regression.digest(live.state)
  losses = train(live)
  config.checkpoint_dir = str(folder / name)
  save(config, live)
  w = live.state.params['w']
  return {
    'restored': restored,
    'losses': losses,
    'saved': regression.digest(live.state),
    'eval': regression.evaluate(live),
    'host': live.partitioner.host,
    'slices': live.partitioner.slices,
    'shards': [shard.data.shape for shard in w.addressable_shards],
  }


if __name__ == '__main__':
  distributed.initialize('auto')
  where = pathlib.Path(sys.argv[1])
  cases = json.loads(sys.argv[2])
  seen = {case['name']: run(where, **case) for case in cases}
  seen |= {'process': jax.process_index(), 'keys': step_keys()}
  print(json.dumps(seen), flush=True)
