"""Tests of frozen weights and adapters of the language model."""

import jax
import numpy as np
import pytest

import jaxline
from jaxline import errors
from jaxline import sharded

from . import experiment
from . import experiment_test
from . import lora


@pytest.fixture
def config(tmp_path):
  config = experiment_test.tiny_config(tmp_path)
  config.training_steps = 4
  config.writers = ()
  config.console = 'off'
  config.eval_interval = -1
  options = config.experiment_kwargs.config
  options.sample_length = 0
  options.model.update(num_layers=2, scan_layers=True)  # It compiles faster.
  return config


RANK = {'experiment_kwargs.config.lora.rank': 2}


def make(config, overrides):
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(overrides)
  return experiment.Experiment(
    'train', jax.random.key(0), run_config=config, **config.experiment_kwargs
  )


def loss(subject, params):
  batch = next(iter(subject.eval_input()))
  return subject.loss_fn(params, {}, batch, jax.random.key(1), False)[0]


def merged(subject):
  return lora.merge(subject.state.params, subject.config.lora)


def test_each_expert_has_its_adapters(config):
  options = config.experiment_kwargs.config.model
  options.update(num_experts=4, experts_per_token=2)
  targets = {'experiment_kwargs.config.lora.targets': 'layers/experts/(in|out)'}
  tuned = make(config, RANK | targets)
  found = base = tuned.state.params
  shapes = {k: x.shape for k, x in found['layers/experts'].items()}
  assert shapes['in_lora_a'] == (2, 4, 32, 2)
  assert shapes['in_lora_b'] == (2, 4, 2, 2, 64)
  assert shapes['out_lora_a'] == (2, 4, 64, 2)
  assert shapes['out_lora_b'] == (2, 4, 2, 32)
  found = jax.tree.map(lambda x: x + 1, found)
  experts = lora.merge(found, tuned.config.lora)['layers/experts']
  a, b = (found['layers/experts'][f'out_lora_{x}'] for x in 'ab')
  w = base['layers/experts']['out'][1, 3] + 1 + 8 * a[1, 3] @ b[1, 3]
  np.testing.assert_allclose(experts['out'][1, 3], w, rtol=1e-5)


def test_adapters_start_as_the_base_model_and_merge_into_it(config):
  base, tuned = make(config, {}), make(config, RANK)
  start = jax.device_get(tuned.state.params)
  jax.tree.map(np.testing.assert_array_equal, merged(tuned), base.state.params)
  qkv = start['layers/attention']
  assert qkv['qkv_lora_a'].shape == (2, 32, 2)
  assert qkv['qkv_lora_b'].shape == (2, 2, 3, 2, 16)
  assert start['layers/attention']['out_lora_a'].shape == (2, 2, 16, 2)

  rng = tuned.initialize_train_step_rng(jax.random.key(1))
  for step in range(4):
    tuned.step(global_step=step, rng=rng, writer=None)
  changed = jax.tree.map(
    lambda a, b: bool(np.any(a != b)), start, tuned.state.params
  )
  for leaves in changed.values():
    assert leaves == {name: 'lora' in name for name in leaves}
  plain = jax.device_get(merged(tuned))
  assert jax.tree.structure(plain) == jax.tree.structure(base.state.params)
  # A known answer: two matrix products of the first layer.
  a, b = (
    np.asarray(tuned.state.params['layers/attention'][f'out_lora_{x}'][0])
    for x in 'ab'
  )
  np.testing.assert_allclose(
    plain['layers/attention']['out'][0].reshape(32, 32),
    start['layers/attention']['out'][0].reshape(32, 32)
    + 8 * a.reshape(32, 2) @ b,
    atol=1e-6,
  )
  # The base model computes with the merged weights what was trained.
  of_base, of_tuned = loss(base, plain), loss(tuned, tuned.state.params)
  assert of_tuned != loss(base, base.state.params)
  np.testing.assert_allclose(of_base, of_tuned, rtol=1e-5)


def test_trainable_adds_to_the_adapters(config):
  more = {'experiment_kwargs.config.trainable': 'embedding/.*'}
  both, adapters, alone = (
    sum(
      jax.tree.leaves(
        sharded.trainable(x.abstract_state().params, x.trainable_rules)
      )
    )
    for x in (make(config, RANK | more), make(config, RANK), make(config, more))
  )
  assert both == adapters + alone


@pytest.mark.parametrize(
  ('overrides', 'optimized'),
  [
    (RANK | {'sharding': 'fsdp', 'gradient_accumulation_steps': 2}, 8),
    ({'experiment_kwargs.config.trainable': 'layers/.*'}, 6),
  ],
)
def test_a_run_is_tuned_from_the_weights_of_another(
  config, tmp_path, overrides, optimized
):
  config.checkpoint_dir = str(tmp_path / 'base')
  base = jaxline.fit(None, config).experiment.state.params
  config.checkpoint_dir = str(tmp_path / 'tuned')
  config.restore_from = str(tmp_path / 'base')
  config.restore_rules = (
    ('.*_lora_.', None),
    ('state/params/(.*)', r'state/params/\1'),
  )
  if 'trainable' in str(overrides):
    config.restore_rules = config.restore_rules[1:]
  tuned = jaxline.fit(None, config, overrides).experiment
  moments = jax.tree.leaves(tuned.state.opt_state[1][0].mu)
  assert len(moments) == optimized
  has_adapters = overrides.keys() >= RANK.keys()
  for module, leaves in base.items():
    for name, w in leaves.items():
      now = tuned.state.params[module][name]
      is_frozen = has_adapters or 'layers' not in module
      assert np.array_equal(now, w) == is_frozen, (module, name)
  again = jaxline.load(tmp_path / 'tuned')
  jax.tree.map(
    np.testing.assert_array_equal, again.state.params, tuned.state.params
  )
  assert again.decode(['to'], jax.random.key(0))


def test_targets_that_match_nothing_are_refused(config):
  key = 'experiment_kwargs.config.lora.targets'
  with pytest.raises(errors.UsageError, match='layers/attention/qvk'):
    _ = make(config, RANK | {key: 'layers/attention/qvk'}).state
