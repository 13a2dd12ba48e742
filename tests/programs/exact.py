"""The language model trained in many ways, for test_exactness.py.

Arguments: a folder and a JSON list of cases, as test_exactness.py writes them.
All is computed in float64. What the cases saw is left in the folder in `seen`,
and the checkpoint of each in a folder of its name.
"""

import json
import pathlib
import pickle
import sys

import jax
import numpy as np

from configs import lm
from examples import moe
from examples import transformer
from examples.lm import experiment
from examples.lm import model
from jaxline import train_step
from jaxline.parallel import mesh as mesh_lib
from tests.programs import hosts

MODEL = {
  'bigram_rows': 64,
  'vocab_size': 264,
  'num_layers': 4,
  'embed_dim': 32,
  'num_heads': 4,
  'mlp_dim': 64,
  'max_length': 32,
  'scan_layers': True,
}
BATCH_SIZE = 16


class Experiment(experiment.Experiment):
  """Tells its gradients."""

  def step_scalars(self, state, grads, updates):
    return super().step_scalars(state, grads, updates) | {'grads': grads}


class Wide:
  """jax.numpy whose float32 is float64."""

  float32 = jax.numpy.float64

  def __getattr__(self, name):
    return getattr(jax.numpy, name)


def widen():
  """Makes the model compute in float64."""
  jax.config.update('jax_enable_x64', True)
  model.jnp = moe.jnp = transformer.jnp = train_step.jnp = Wide()
  model._CHOICES['dtype'] += ('float64',)
  MODEL['dtype'] = 'float64'


def write_text(folder):
  """Writes documents of many lengths, a line each; returns the folder."""
  rng = np.random.default_rng(0)
  words = ['for', 'item', 'in', 'items', 'total', '=', '+', 'return']
  lines = [' '.join(rng.choice(words, n)) for n in rng.integers(1, 9, 300)]
  folder.mkdir(exist_ok=True)
  (folder / 'text.txt').write_text('\n'.join(lines))
  return folder


def config_of(case, folder):
  """Returns the run's config."""
  config = lm.get_config()
  config.checkpoint_dir = str(folder / case['name'])
  config.training_steps = 8
  config.sharding = case['sharding']
  config.mesh.update(ici=case['ici'], dcn=case['dcn'])
  config.gradient_accumulation_steps = case['accumulation']
  # Pipelines and remat are the model's own config.
  config.on_config_change = 'continue'
  kwargs = config.experiment_kwargs.config
  kwargs.update(
    files=str(folder / 'text'),
    cache_dir=str(folder / 'cache'),
    documents='line',
    tokenizer='bytes',
    packing='packed',  # Its rows have weights of 0 in different places.
    batch_size=BATCH_SIZE,
    eval_batch_size=BATCH_SIZE,
    length=32,
    warmup_fraction=0.0,
    sample_length=0,
  )
  kwargs.model = dict(kwargs.model) | MODEL | case['model']
  return config.copy_and_resolve_references()


def flat(tree):
  """Returns name -> array, on the host."""
  return {
    jax.tree_util.keystr(path): np.asarray(x)
    for path, x in jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
  }


def pieces(tree):
  """Returns name -> into how many pieces each array is really cut."""
  return {
    jax.tree_util.keystr(path): x.size // x.addressable_shards[0].data.size
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def run(case, folder):
  """Trains two steps, saves, restores another case's, and trains one step."""
  config = config_of(case, folder)
  devices = jax.devices()[: case['devices']]
  with mesh_lib.on_devices(devices):
    live = Experiment(
      'train',
      jax.random.PRNGKey(0),
      run_config=config,
      **config.experiment_kwargs,
    )
  key = live.initialize_train_step_rng(jax.random.PRNGKey(1))
  result = {
    'initial': flat(live.state.params),
    'devices': len(live.state.params['final_norm']['scale'].devices()),
    'cut': [
      pieces(x) for x in (live.state.params, live.state.opt_state[1][0].mu)
    ],
  }

  def step():
    scalars = live.step(global_step=int(live.state.step), rng=key, writer=None)
    # Several programs at once on fake devices can starve each other.
    return jax.block_until_ready((scalars, live.state))[0]

  first, second = step(), step()
  result['grads'] = flat(first['grads'])
  with hosts.checkpoints(config, live, key) as checkpointer:
    checkpointer.save('latest')
  result['saved'] = flat(live.state)
  step()  # Something else than what is restored.
  config.checkpoint_dir = str(folder / case['restore'])
  with hosts.checkpoints(config, live, key) as checkpointer:
    checkpointer.restore('latest')
    state = checkpointer.get_experiment_state('latest')
    key = live.initialize_train_step_rng(state.train_step_rng)
    result['step'] = state.global_step
  result['restored'] = flat(live.state)
  result['cut'].append(pieces(live.state.params))
  result['losses'] = [float(x['loss']) for x in (first, second, step())]
  result['grad_norm'] = float(first['grad_norm'])
  live.train_feed.close()
  return result


if __name__ == '__main__':
  where, seen = pathlib.Path(sys.argv[1]), {}
  widen()
  write_text(where / 'text')
  for one in json.loads(sys.argv[2]):
    # Rules are not among what JAX keeps its traces by.
    jax.clear_caches()
    seen[one['name']] = run(one, where)
  (where / 'seen').write_bytes(pickle.dumps(seen))
