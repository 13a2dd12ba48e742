"""The runs of configs/c4.py are those of Pax's documents; nothing is compiled.

The sizes were counted with Pax's own configuration classes.
"""

import dataclasses
import math

import jax
import pytest

from configs import c4
from examples.lm import experiment
from examples.lm import model
from jaxline import base_config
from jaxline import partitioning
from jaxline import platform
from jaxline.aot import chips

# What config flags load a file with.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')

# Parameters; rows of a global batch, length; chips of a slice, slices; mesh.
FACTS = {
  'C4Spmd1BAdam4Replicas': (
    1_104_619_904,
    (128, 1024),
    (4, 1),
    {'stage': 1, 'replica': 1, 'data': 4, 'mdl': 1},
  ),
  'C4Spmd16BAdam32Replicas': (
    16_506_101_504,
    (512, 1024),
    (32, 1),
    {'stage': 1, 'replica': 1, 'data': 16, 'mdl': 2},
  ),
  'C4Spmd22BAdam2xv4_128': (
    21_947_310_080,
    (2048, 1024),
    (64, 2),
    {'stage': 1, 'replica': 2, 'data': 64, 'mdl': 1},
  ),
  'C4SpmdPipelineGpt3SmallAdam64Replicas': (
    2_926_491_648,
    (512, 2048),
    (64, 1),
    {'stage': 4, 'replica': 1, 'data': 4, 'mdl': 4},
  ),
  'C4SpmdGpt3AdamDataParallel2x16x16': (
    174_780_420_096,
    (256, 2048),
    (256, 2),
    {'stage': 1, 'replica': 2, 'data': 16, 'mdl': 16},
  ),
}


def load(name):
  """Returns a run's config as the command line gives it, and the experiment's.

  Validated, both of them.
  """
  config = platform.load_config([f'--config=configs/{name}'])
  kwargs = config.experiment_kwargs.config
  return config, base_config.read(experiment.Config, kwargs)


def abstract_weights(config):
  """Returns the weights' shapes, with the names of their axes."""
  return jax.eval_shape(lambda: model.init(jax.random.key(0), config.model))


def count(tree):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def test_facts_are_of_all_runs():
  assert list(c4.RUNS) == list(FACTS)


@pytest.mark.parametrize('name', FACTS)
def test_run_is_as_published(name):
  parameters, batch, (chips_of_slice, slices), mesh = FACTS[name]
  config, kwargs = load(f'c4.py:{name}')

  assert count(abstract_weights(kwargs)) == parameters
  assert (kwargs.batch_size, kwargs.length) == batch
  topology = chips.parse_topology(config.topology)
  assert (topology.num_chips, config.num_slices) == (chips_of_slice, slices)
  devices = partitioning.abstract_devices(chips_of_slice * slices, slices)
  assert partitioning.mesh_shape(config.mesh, devices).sizes == mesh
  assert (kwargs.model.dtype, kwargs.model.remat) == ('bfloat16', 'full')
  if mesh['stage'] > 1:
    # Of 16 rows each.
    assert kwargs.model.pipeline_stages == mesh['stage']
    assert batch[0] / kwargs.model.pipeline_microbatches == 16


@pytest.mark.parametrize('name', FACTS)
def test_weights_are_split_over_the_mesh(name):
  config, kwargs = load(f'c4.py:{name}')
  *_, (chips_of_slice, slices), _ = FACTS[name]
  devices = partitioning.abstract_devices(chips_of_slice * slices, slices)
  with partitioning.on_devices(devices):
    partitioner = partitioning.Partitioner.make(
      config.mesh, config.sharding, config.sharding_rules
    )
  # What is outside of the layers is no stage's, and 50257 tokens are no
  # multiple of 16.
  layers = {
    module: leaves
    for module, leaves in abstract_weights(kwargs).items()
    if module.startswith('layers/')
  }
  a_chip = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(
      sharding.shard_shape(x.shape), x.dtype
    ),
    partitioning.unbox(layers),
    partitioner.shardings(partitioner.specs(layers)),
  )
  # All but biases.
  share = count(layers) / chips_of_slice
  assert share <= count(a_chip) < 1.004 * share


def test_a_schedule_is_as_published():
  config, kwargs = load('c4.py:C4SpmdGpt3AdamDataParallel2x16x16')
  assert kwargs.training_steps == config.training_steps == 108_600
  assert int(kwargs.warmup_fraction * kwargs.training_steps) == 265
  assert kwargs.learning_rate == 6e-5
  config, kwargs = load('c4.py:C4SpmdPipelineGpt3SmallAdam64Replicas')
  assert kwargs.learning_rate == 2e-4
  assert config.save_checkpoint_interval == 200
  config, kwargs = load('c4.py:C4Spmd1BAdam4Replicas')
  assert int(kwargs.warmup_fraction * kwargs.training_steps) == 4000
  assert (kwargs.b1, kwargs.b2) == (0.9, 0.99)
  assert config.save_checkpoint_interval == 1000


def test_any_field_of_the_model_may_be_overridden():
  override = '--config.experiment_kwargs.config.model.loss_chunks=8'
  config = platform.load_config(
    ['--config=configs/c4.py:C4Spmd1BAdam4Replicas', override]
  )
  assert config.experiment_kwargs.config.model.loss_chunks == 8


def test_an_unknown_name_lists_the_names():
  with pytest.raises(ValueError, match='C4Spmd2B') as e:
    c4.get_config('C4Spmd2B')
  assert all(name in str(e.value) for name in c4.RUNS)


def test_lm_1b():
  _, kwargs = load('lm_1b.py')
  # Without a GPU, its kernels cannot even be traced.
  sized = dataclasses.replace(kwargs.model, attention='einsum')
  kwargs = dataclasses.replace(kwargs, model=sized)
  assert 1.09e9 < count(abstract_weights(kwargs)) < 1.1e9
