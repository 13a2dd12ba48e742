"""The runs of Pax's documents are as published; nothing is compiled.

The sizes were counted with Pax's own configuration classes.
"""

import math

import jax
import pytest

from configs import c4
from examples.lm import experiment as lm_experiment
from examples.lm import model
from examples.pax import base_layer
from examples.pax import experiment_registry
from jaxline import base_config
from jaxline import platform
from jaxline.base import chips
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning

# What config flags load a file with.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')

# Parameters; rows of a global batch, length; chips of a slice, slices; mesh
# without what is 1; learning rate, steps, save, log.
FACTS = {
  'LmCloudTransformerAdamLimitSteps': (
    158_723_968,
    (64, 1024),
    (4, 1),
    {'data': 4},
    (1e-3, 2000, 5000, 100),
  ),
  'LmCloudSpmd2BLimitSteps': (
    2_137_273_856,
    (32, 1024),
    (4, 1),
    {'data': 4},
    (2.5e-4, 300, 5000, 100),
  ),
  'C4Spmd1BAdam4Replicas': (
    1_104_619_904,
    (128, 1024),
    (4, 1),
    {'data': 4},
    (1e-3, 10_000_000, 1000, 10),
  ),
  'C4Spmd16BAdam32Replicas': (
    16_506_101_504,
    (512, 1024),
    (32, 1),
    {'data': 16, 'mdl': 2},
    (1e-3, 10_000_000, 1000, 10),
  ),
  **{
    f'C4Spmd22BAdam{slices}xv4_{cores}': (
      parameters,
      (rows * slices, 1024),
      (chips_of_slice, slices),
      {'replica': slices, 'data': chips_of_slice},
      (1e-3, 10_000_000, 1000, 10),
    )
    for parameters, cores, chips_of_slice, rows, all_slices in (
      (21_947_310_080, 128, 64, 1024, (1, 2, 4)),
      (24_765_221_888, 384, 192, 1920, (1, 2)),
      (872_751_104, 8, 4, 64, (1, 2, 4)),
    )
    for slices in all_slices
  },
  'C4SpmdPipelineGpt3SmallAdam64Replicas': (
    2_926_491_648,
    (512, 2048),
    (64, 1),
    {'stage': 4, 'data': 4, 'mdl': 4},
    (2e-4, 108_600, 200, 1),
  ),
  'C4SpmdGpt3AdamDataParallel2x16x16': (
    174_780_420_096,
    (256, 2048),
    (256, 2),
    {'replica': 2, 'data': 16, 'mdl': 16},
    (6e-5, 100, 2000, 10),
  ),
}


def load(name):
  """Returns a run's config as the command line gives it, and its experiment.

  The latter is made for as many devices as the run has.
  """
  config = platform.load_config([f'--config=configs/c4.py:{name}'])
  experiment = experiment_registry.get(name)
  _, shape = chips.parse_topology(config.topology)
  return config, experiment(math.prod(shape) * config.num_slices)


def weights_of(experiment):
  """Returns what each weight is, by module and name."""
  model = experiment.task().model.Instantiate()
  return model.abstract_init()[base_layer.PARAMS]


def count(tree):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def test_facts_are_of_all_runs():
  known = experiment_registry.get_all()
  assert {n.rpartition('.')[2] for n in known if '.tasks.lm.' in n} == {*FACTS}


@pytest.mark.parametrize('name', FACTS)
def test_run_is_as_published(name):
  parameters, batch, (chips_of_slice, slices), mesh, numbers = FACTS[name]
  config, experiment = load(name)
  task = experiment.filled_task()

  weights = jax.tree.leaves(weights_of(experiment))
  assert sum(w.size for w in weights) == parameters
  (train, evaluation) = experiment.datasets()
  assert (train.is_training, evaluation.is_training) == (True, False)
  assert (train.batch_size, train.length) == batch
  _, shape = chips.parse_topology(config.topology)
  assert (math.prod(shape), config.num_slices) == (chips_of_slice, slices)
  devices = mesh_lib.abstract_devices(chips_of_slice * slices, slices)
  with mesh_lib.on_devices(devices):
    sizes = mesh_lib.make(config.mesh)[0].shape
  assert {k: size for k, size in sizes.items() if size > 1} == {
    k: size for k, size in mesh.items() if size > 1
  }
  run = (
    config.training_steps,
    config.save_checkpoint_interval,
    config.log_tensors_interval,
  )
  rate = task.train.learner.optimizer.learning_rate
  assert (rate, *run) == numbers
  train = task.train
  assert run == (
    train.num_train_steps,
    train.save_interval_steps,
    train.summary_interval_steps,
  )
  assert (config.eval_interval, config.random_seed) == (100, 1234)

  # Its weights are split over the mesh.
  if config.sharding == 'ddp':
    assert name == 'LmCloudTransformerAdamLimitSteps'
    return
  with mesh_lib.on_devices(devices):
    partitioner = partitioning.Partitioner.make(
      config.mesh, config.sharding, config.sharding_rules
    )
  # What is outside of the layers is no stage's, and 50257 tokens are no
  # multiple of 16.
  layers = {
    (module, key): partitioning.Logical(
      jax.ShapeDtypeStruct(weight.full_shape, weight.dtype), weight.axes
    )
    for module, weights in weights_of(experiment).items()
    for key, weight in weights.items()
    if weight.repeat_prefix
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
  assert share <= count(a_chip) < 1.008 * share


def test_an_unknown_name_lists_the_names():
  with pytest.raises(ValueError, match='C4Spmd2B') as e:
    c4.get_config('C4Spmd2B')
  assert all(name in str(e.value) for name in FACTS)
  with pytest.raises(ValueError, match='reduced'):
    c4.get_config('C4Spmd1BAdam4Replicas:small')


@pytest.mark.parametrize(
  ('name', 'size'),
  [
    ('lm_1b', 1_093_224_448),
    ('llama_8b', 8_030_261_248),
    ('moe_30b', 30_532_122_624),  # As Qwen3-30B-A3B is published.
  ],
)
def test_weights_of_lm_configs(name, size):
  config = platform.load_config([f'--config=configs/{name}.py'])
  kwargs = base_config.read(
    lm_experiment.Config, config.experiment_kwargs.config
  )
  weights = jax.eval_shape(lambda: model.init(jax.random.key(0), kwargs.model))
  assert count(weights) == size
