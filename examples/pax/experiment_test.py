"""Runs of registered experiments: they learn, and what is wrong is said.

The slow tests are complete runs of a minute or two on two cores.
"""

import json
import math
import pathlib

import fiddle as fdl
import jax
import numpy as np
import pytest

from examples import decoding
from examples.pax import config as config_lib
from examples.pax import experiment
from examples.pax import experiment_registry
from examples.pax.tasks.lm.params import lm_cloud
from examples.pax.tasks.synthetic.params import sequences
import jaxline
from jaxline import base_config
from jaxline import errors
from jaxline import sharded
from jaxline.inputs import base as inputs
from jaxline.parallel import mesh as mesh_lib

ALL = sorted(
  name.rpartition('.')[2]
  for name in experiment_registry.get_all()
  if '.tasks.lm.' in name
)
# Smaller than `reduced`, because compiling dominates the time of a test.
TINY = {
  'NUM_LAYERS': 2,
  'MODEL_DIMS': 16,
  'HIDDEN_DIMS': 32,
  'NUM_HEADS': 2,
  'DIMS_PER_HEAD': 8,
  'MAX_SEQ_LEN': 16,
  'PERCORE_BATCH_SIZE': 4,
}
LINES = 'for item in items:\n  total = total + item\n'
LM, RESNET = 'LmCloudSpmd2BLimitSteps', 'ResNet50Pjit'
PIPELINE = 'C4SpmdPipelineGpt3SmallAdam64Replicas'


@pytest.fixture(autouse=True)
def _on_one_device():
  with mesh_lib.on_devices(jax.devices()[:1]):
    yield


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Twenty files of the same two lines."""
  path = tmp_path_factory.mktemp('text')
  for i in range(20):
    (path / f'file{i}.txt').write_text(LINES * (3 + i % 4))
  return str(path)


def tiny(name, constants=(), **keys):
  """Returns the config of a run of a second, with some `keys` changed."""
  config = config_lib.get_config(f'{name}:reduced')
  config.log_tensors_interval = 1
  config.update({'training_steps': 3, 'eval_interval': 3} | keys)
  config.experiment_kwargs.config.constants.update(TINY | dict(constants))
  return config


def make(config, mode='train'):
  """Constructs the experiment of a run, as `train` does."""
  config = config.copy_and_resolve_references()
  return experiment.Experiment(
    mode, jax.random.PRNGKey(0), run_config=config, **config.experiment_kwargs
  )


def fit(config, directory):
  """Trains; returns the result, and the last scalars by name."""
  config.checkpoint_dir = str(directory / 'run')
  result = jaxline.fit(None, config)
  return result, {name: x[-1, 1] for name, x in result.history.items()}


@pytest.mark.process
def test_it_learns_and_reports(tmp_path, folder):
  constants = {'LR_WARMUP_STEPS': 6, 'LEARNING_RATE': 3e-2}
  keys = {'data': folder, 'training_steps': 60, 'eval_interval': 30}
  config = tiny('C4Spmd22BAdam2xv4_8', constants, **keys)
  result, last = fit(config, tmp_path)
  curves = result.history
  steps, losses = curves['train/total_loss'].T
  assert steps.tolist() == list(range(1, 61))
  # The untrained model is near ln V, up to the size of its initial logits.
  assert math.log(257) - 0.1 < losses[0] < math.log(257) + 3
  for name in 'log_pplx', 'avg_xent':
    np.testing.assert_array_equal(curves[f'train/{name}'][:, 1], losses)
  rates = curves['train/learning_rate'][:7, 1]
  np.testing.assert_allclose(rates, 3e-2 * np.arange(7) / 6, rtol=1e-5)
  of_step = (last['train/examples_per_step'], last['train/tokens_per_step'])
  assert of_step == (4, 64)
  assert any(name.startswith('train/var_norm/') for name in last)
  # The held-out files have the same lines as the others.
  assert curves['eval/log_pplx'][:, 0].tolist() == [30, 60]
  assert max(losses[-1], last['eval/log_pplx']) < 1.2
  assert last['eval/fraction_of_correct_next_step_preds'] > 0.6
  # The log has the configuration.
  log = pathlib.Path(result.directory, 'train', 'metrics.jsonl').read_text()
  assert 'model.lm_tpl.vocab_size : 257' in log
  assert 'train.num_train_steps : 60' in log


@pytest.mark.process
def test_a_model_with_products_in_fp8_learns_and_keeps_its_scales():
  pytest.importorskip('flax')
  made = make(tiny(LM, {'USE_FP8': True, 'LR_WARMUP_STEPS': 1}))
  for step in range(6):
    scalars = made.step(
      global_step=step, rng=jax.random.PRNGKey(1), writer=None
    )
  made.train_feed.close()
  assert scalars['log_pplx'] < 0.9 * math.log(256)  # All tokens are the same.
  scales = made.state.model_state[sharded.OVERWRITE]
  # The scales cover the products of two layers.
  assert len(scales) == 4
  for kept in scales.values():
    assert kept['weight_scale_fp8'].shape == (2,)
    assert (kept['weight_scale_fp8'] < 1).all()
  assert not any('fp8' in name for name in made.task.weights)


@pytest.mark.parametrize('steps', [1, 750])
def test_a_run_may_be_shorter_than_its_warm_up(steps):
  constants = {'MAX_STEPS': steps}
  made = sequences.ReverseEncoderDecoder.with_constants(constants)(1)
  rate = made.filled_task().Instantiate().learner.optimizer.get_learning_rate
  np.testing.assert_allclose(rate(steps), 0.01 * made.LEARNING_RATE, rtol=1e-5)
  np.testing.assert_allclose(
    rate(min(steps // 2, made.LR_WARMUP_STEPS)), made.LEARNING_RATE, rtol=1e-5
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', ALL)
def test_reduced(name, tmp_path):
  """Trains three steps on the experiment's own data, and evaluates."""
  result, last = fit(tiny(name), tmp_path)
  _, losses = result.history['train/total_loss'].T
  assert losses[2] < losses[0] < math.log(257) + 3
  assert np.isfinite(last['eval/log_pplx'])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  ('name', 'metric', 'most'),
  [
    # Nats per byte of held-out files, after 400 steps of 512 bytes. A model
    # that only counts bytes has 3.25, and gzip -9 needs 1.33.
    ('C4Spmd1BAdam4Replicas', 'log_pplx', 2.3),  # 2.23 was seen.
    ('LmCloudTransformerAdamLimitSteps', 'log_pplx', 2.3),  # 2.23.
    (PIPELINE, 'log_pplx', 2.5),  # 2.41.
    (RESNET, 'error', 0.03),
    ('ReverseEncoderDecoder', 'log_pplx', 0.01),
    ('CopyEncoderDecoder', 'log_pplx', 0.01),
  ],
)
def test_a_complete_run_reaches_its_loss(name, metric, most, tmp_path):
  config = config_lib.get_config(f'{name}:reduced')
  if name == RESNET:
    pytest.importorskip('sklearn')
  elif not name.endswith('EncoderDecoder'):
    config.data = 'stdlib'
  _, last = fit(config, tmp_path)
  assert last[f'eval/{metric}'] < most


def test_prompts_become_tokens_and_tokens_text():
  config = tiny('C4Spmd1BAdam4Replicas')
  config.experiment_kwargs.config.decode.max_decode_steps = 4
  made = make(config, 'decode')
  asked = []

  def decode(params, model_state, batch, rng, options):
    asked.extend([*map(np.asarray, batch.values()), options])
    ids = np.array([[[*b'a\xc3\xa9', 256]], [[*b'b', 256, 0, 0]]], np.int32)
    return decoding.Decoded(ids, np.array([[4], [2]]), np.full([2, 1], -1.5))

  made.__dict__['_decode'] = decode
  made._state = sharded.TrainState(
    step=0, params={}, model_state={}, opt_state=()
  )
  key = jax.random.PRNGKey(0)
  assert made.decode(['for it', 'f'], key) == [
    [{'text': 'aé', 'score': -1.5, 'tokens': 4}],
    [{'text': 'b', 'score': -1.5, 'tokens': 2}],
  ]
  prompts, lengths, options = asked
  np.testing.assert_array_equal(lengths, [7, 2])
  # Prompts begin with the document token, which ends continuations, too.
  assert prompts[0, :7].tolist() == [256, *b'for it']
  assert prompts[1].tolist() == [256, *b'f'] + 10 * [0]
  assert (options.method, options.stop_ids) == ('sample', (256,))
  made.check_prompt('for item in')
  with pytest.raises(ValueError, match='has 14 tokens'):
    made.check_prompt('for item in i')


@pytest.mark.parametrize(
  ('name', 'rows'),
  [(PIPELINE, 4), (RESNET, 64), ('ReverseEncoderDecoder', 64)],
)
def test_a_step_can_be_traced_without_data(name, rows):
  config = config_lib.get_config(f'{name}:reduced')
  if name == PIPELINE:
    config.data = 'c4'
  made = make(config)
  batch = made.abstract_batch(is_training=True)
  if specs := made.experiment.input_specs():
    assert {key: (x.shape, x.dtype.name) for key, x in batch.items()} == {
      key: ((rows, *shape), dtype) for key, (shape, dtype) in specs.items()
    }
  traced = made.compiled_train_step.trace(
    made.abstract_state(), batch, made.abstract_rng()
  )
  _, packed = traced.out_info
  assert 'total_loss' in packed.names


@pytest.mark.parametrize('name', [LM, RESNET, 'ReverseEncoderDecoder'])
def test_hosts_divide_the_batches_whose_shapes_are_declared(name, folder):
  config = config_lib.get_config(f'{name}:reduced')
  if name == LM:
    config.data = folder
  if name == RESNET:
    pytest.importorskip('sklearn')
  made = make(config)
  shards = [inputs.Shard(*x) for x in ((0, 1), (0, 2), (1, 2))]
  whole, *halves = (dict(next(made.train_input(x))) for x in shards)
  joined = jax.tree.map(lambda *x: np.concatenate(x), *halves)
  jax.tree.map(np.testing.assert_array_equal, joined, whole)
  types = lambda batch: jax.tree.map(lambda x: (x.shape, x.dtype), dict(batch))
  assert types(made.abstract_batch(is_training=True)) == types(whole)
  held_out = next(iter(made.eval_input()))
  assert types(made.abstract_batch(is_training=False)) == types(held_out)
  assert name != LM or made.eval_input().max_batches == 16


class _TwoSets(lm_cloud.LmCloudSpmd2BLimitSteps):
  """Evaluates on two datasets, each with a name."""

  NAMES = ('a', 'b')

  def datasets(self):
    train_data, one = super().datasets()
    return [train_data, *(fdl.copy_with(one, name=n) for n in self.NAMES)]


def test_several_datasets_have_metrics_of_their_own():
  made = make(tiny(LM))
  constants = type(made.experiment).constants()
  made.experiment = _TwoSets.with_constants(constants)(1)
  scalars = made.evaluate(global_step=0, rng=jax.random.PRNGKey(0), writer=None)
  assert {'a/log_pplx', 'b/log_pplx'} <= set(scalars)
  constants['NAMES'] = ('a', 'a')
  made.experiment = _TwoSets.with_constants(constants)(1)
  with pytest.raises(ValueError, match="names \\['a', 'a'\\]"):
    made.eval_input()
  made.experiment.datasets = list
  with pytest.raises(ValueError, match='no data to train on'):
    made.train_input()


def changes(old, new):
  """Returns the reasons for which a resumed run is rejected."""
  old, new = (json.loads(x.to_json_best_effort()) for x in (old, new))
  return base_config.changes(old, new, experiment.Experiment)


@pytest.fixture
def mine(monkeypatch):
  """A user's experiment, registered."""

  class Mine(lm_cloud.LmCloudSpmd2BLimitSteps):
    SHOWN = 3
    MY_OPTION = None
    changeable_constants = (
      *lm_cloud.LmCloudSpmd2BLimitSteps.changeable_constants,
      'SHOWN',
    )

  monkeypatch.setattr(experiment_registry, '_registered', {})
  return experiment_registry.register(Mine)


def test_an_experiment_says_which_constants_change_no_step(mine):
  old = config_lib.get_config('Mine')
  new = config_lib.get_config(experiment_registry.full_name(mine))
  constants = new.experiment_kwargs.config.constants
  constants.update({'SHOWN': 4, 'LOSS_CHUNKS': 8, 'TARGET_LOG_PPLX': 2.5})
  # Nor does a different spelling of the experiment's name, nor a constant that
  # is newer than the record.
  del old.experiment_kwargs.config.constants['WEIGHT_DECAY']
  assert changes(old, new) == changes(new, old) == []
  constants.NUM_LAYERS = 2
  (line,) = changes(old, new)
  assert line == 'experiment_kwargs.config.constants.NUM_LAYERS: 18 then, 2 now'
  # A different experiment is a different run for any constants.
  new.experiment_kwargs.config.exp = 'LmCloudSpmd2B'
  assert any('config.exp: ' in line for line in changes(old, new))


def test_constants_become_a_config(mine):
  config = config_lib.get_config('Mine')
  constants = config.experiment_kwargs.config.constants
  # One without an annotation may be anything.
  assert constants.MY_OPTION is None
  constants.MY_OPTION = 3
  constants.MY_OPTION = 'text'
  # The shape of a mesh may be a list, as in Pax.
  mine.ICI_MESH_SHAPE = [2, 4, 1]
  ici = config_lib.get_config('Mine').mesh.ici
  assert (ici.stage, ici.replica, ici.data, ici.mdl) == (1, 2, 4, 1)
  for name, value, said in (
    ('ICI_MESH_SHAPE', [4, 1], r'is \(4, 1\); expected sizes'),
    ('changeable_constants', ('SHOW',), r"'SHOW' in .*mean 'SHOWN'"),
  ):
    setattr(mine, name, value)
    with pytest.raises(errors.UsageError, match=said):
      config_lib.get_config('Mine')


def test_gpt3_ends_at_paxs_target():
  name = 'C4SpmdGpt3AdamDataParallel2x16x16'
  config = config_lib.get_config(name)
  assert config.early_stop.metric == 'log_pplx'
  assert config.early_stop.target == 2.69
  assert not config.best_model_eval_metric_higher_is_better
  config.early_stop.target = 3.0
  gpt3 = config_lib.Config(exp=name, reduced=False, constants={})
  assert gpt3.experiment(config).TARGET_LOG_PPLX == 3.0
  # The target is for larger tokens than bytes.
  assert config_lib.get_config(f'{name}:reduced').early_stop.target is None


@pytest.mark.parametrize(
  ('name', 'constants', 'said'),
  [
    (LM, {'ACTIVATION': 'gleu'}, "'gleu' in ACTIVATION; .*mean 'gelu'"),
    (LM, {'FPROP_DTYPE': 'bf16'}, "'bf16' in FPROP_DTYPE; .*'bfloat16'"),
    (LM, {'DATA': 'c4'}, r'data_dir is None .*--config\.data=stdlib'),
    (LM, {'DATA': 'stdlib', 'VOCABULARY': '/none.model'}, 'no file'),
    (LM, {'MODEL_DIMS': 7}, 'an even embedding_dims.*: 7'),
    (LM, {'LR_WARMUP_STEPS': 600}, 'expects 0 <= warmup'),
    (LM, {'MICROBATCH_SIZE': 2}, 'MICROBATCH_SIZE is 2'),
    (PIPELINE, {'NUM_LAYERS': 3}, 'NUM_LAYERS is 3'),
    (PIPELINE, {'USE_FP8': True}, 'use_fp8=False'),
    (
      'ReverseEncoderDecoder',
      {'MODEL_DIMS': 6},
      "'input_dim': 6, 'num_heads': 4",
    ),
    (RESNET, {'DATA': 'syntetic'}, "mean 'synthetic'"),
    (RESNET, {'CHANNELS': (6, 6)}, "multiple of 4; got .'output_dim': 6"),
    (LM, {'LEARNING_RATE': -1.0}, 'LEARNING_RATE is -1.0; expected'),
    (LM, {'CLIP_GRADIENT_NORM': math.inf}, 'NORM is inf; expected'),
  ],
)
def test_what_a_user_gets_wrong_is_said_in_one_line(name, constants, said):
  config = config_lib.get_config(f'{name}:reduced')
  for constant, value in constants.items():
    key = config_lib.key_of(experiment_registry.get(name), constant)
    config.update_from_flattened_dict({key: value})
  # The program prints the message of such an error, and no traceback.
  with pytest.raises(errors.UsageError, match=said) as e:
    make(config).train_input()
  assert '\n' not in str(e.value)


def test_what_a_constant_says_the_task_cannot_say_otherwise(monkeypatch):
  made = lm_cloud.LmCloudSpmd2BLimitSteps(num_devices=1)
  task = made.task()
  task.train.num_train_steps = 9
  monkeypatch.setattr(made, 'task', lambda: task)
  with pytest.raises(errors.UsageError, match='to 9, and MAX_STEPS is 300'):
    made.filled_task()


def test_an_experiment_without_text_does_not_decode():
  # The lines at the end of a run look at this to propose a command.
  made = make(config_lib.get_config(f'{RESNET}:reduced'))
  with pytest.raises(NotImplementedError, match='has no `decode`'):
    made.decode(['text'], jax.random.key(0))


def test_too_few_devices_say_that_there_is_a_small_version():
  with pytest.raises(mesh_lib.MeshError) as e:
    make(config_lib.get_config('C4Spmd16BAdam32Replicas'))
  assert any('--reduced' in note for note in e.value.__notes__)
