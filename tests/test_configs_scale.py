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
# without what is 1.
FACTS = {
  'LmCloudTransformerAdamLimitSteps': (
    158_723_968, (64, 1024), (4, 1), {'data': 4},
  ),
  'LmCloudSpmd2BLimitSteps': (2_137_273_856, (32, 1024), (4, 1), {'data': 4}),
  'C4Spmd1BAdam4Replicas': (1_104_619_904, (128, 1024), (4, 1), {'data': 4}),
  'C4Spmd16BAdam32Replicas': (
    16_506_101_504, (512, 1024), (32, 1), {'data': 16, 'mdl': 2},
  ),
  **{
    f'C4Spmd22BAdam{slices}xv4_{cores}': (
      parameters, (rows * slices, 1024), (chips_of_slice, slices),
      {'replica': slices, 'data': chips_of_slice},
    )
    for parameters, cores, chips_of_slice, rows, all_slices in (
      (21_947_310_080, 128, 64, 1024, (1, 2, 4)),
      (24_765_221_888, 384, 192, 1920, (1, 2)),
      (872_751_104, 8, 4, 64, (1, 2, 4)),
    )
    for slices in all_slices
  },
  'C4SpmdPipelineGpt3SmallAdam64Replicas': (
    2_926_491_648, (512, 2048), (64, 1), {'stage': 4, 'data': 4, 'mdl': 4},
  ),
  'C4SpmdGpt3AdamDataParallel2x16x16': (
    174_780_420_096, (256, 2048), (256, 2),
    {'replica': 2, 'data': 16, 'mdl': 16},
  ),
}  # fmt: skip


def count(tree):
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def test_facts_are_of_all_runs():
  known = experiment_registry.get_all()
  assert {n.rpartition('.')[2] for n in known if '.tasks.lm.' in n} == {*FACTS}
  with pytest.raises(ValueError, match='C4Spmd1BAdam4Replicas'):
    c4.get_config('C4Spmd2B')


@pytest.mark.parametrize('name', FACTS)
def test_run_is_as_published(name):
  parameters, batch, (chips_of_slice, slices), mesh = FACTS[name]
  config = platform.load_config([f'--config=configs/c4.py:{name}'])
  _, shape = chips.parse_topology(config.topology)
  assert (math.prod(shape), config.num_slices) == (chips_of_slice, slices)
  num_chips = chips_of_slice * slices
  experiment = experiment_registry.get(name)(num_chips)
  net = experiment.task().model.Instantiate()
  weights = net.abstract_init()[base_layer.PARAMS]
  assert sum(w.size for w in jax.tree.leaves(weights)) == parameters
  (train, evaluation) = experiment.datasets()
  assert (train.is_training, evaluation.is_training) == (True, False)
  assert (train.batch_size, train.length) == batch
  with mesh_lib.on_devices(mesh_lib.abstract_devices(num_chips, slices)):
    partitioner = partitioning.Partitioner.make(
      config.mesh, config.sharding, config.sharding_rules
    )
  sizes = partitioner.mesh.shape
  assert {k: size for k, size in sizes.items() if size > 1} == {
    k: size for k, size in mesh.items() if size > 1
  }
  train = experiment.filled_task().train
  assert config.training_steps == train.num_train_steps
  assert config.save_checkpoint_interval == train.save_interval_steps
  if config.sharding == 'ddp':
    assert name == 'LmCloudTransformerAdamLimitSteps'
    return
  # Its layers are split over the mesh, all but biases. What is outside of them
  # is no stage's, and 50257 tokens are no multiple of 16.
  layers = {
    (module, key): partitioning.Logical(
      jax.ShapeDtypeStruct(weight.full_shape, weight.dtype), weight.axes
    )
    for module, leaves in weights.items()
    for key, weight in leaves.items()
    if weight.repeat_prefix
  }
  whole = partitioning.unbox(layers)
  shardings = partitioner.shardings(partitioner.specs(layers))
  a_chip = sum(
    math.prod(shardings[key].shard_shape(x.shape)) for key, x in whole.items()
  )
  share = count(whole) / chips_of_slice
  assert share <= a_chip < 1.008 * share


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
