"""Tests of frozen weights and adapters of the language model."""

import jax
import numpy as np
import pytest

import jaxline
from jaxline import errors

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
  return experiment_test.make(config)


def test_adapters_start_as_the_base_model_and_merge_into_it(config):
  model = config.experiment_kwargs.config.model
  model.update(num_experts=4, experts_per_token=2)
  targets = 'layers/(attention/.*|experts/(in|out))'
  key = 'experiment_kwargs.config.lora.targets'
  base, tuned = make(config, {}), make(config, RANK | {key: targets})
  start = jax.device_get(tuned.state.params)
  merge = jax.jit(lambda params: lora.merge(params, tuned.config.lora))
  jax.tree.map(np.testing.assert_array_equal, merge(start), base.state.params)
  shapes = {
    f'{module}/{name}': x.shape
    for module, leaves in start.items()
    for name, x in leaves.items()
    if 'lora' in name
  }
  assert shapes == {
    'layers/attention/qkv_lora_a': (2, 32, 2),
    'layers/attention/qkv_lora_b': (2, 2, 3, 2, 16),
    'layers/attention/out_lora_a': (2, 2, 16, 2),
    'layers/attention/out_lora_b': (2, 2, 32),
    'layers/experts/in_lora_a': (2, 4, 32, 2),  # Each expert has its own.
    'layers/experts/in_lora_b': (2, 4, 2, 2, 64),
    'layers/experts/out_lora_a': (2, 4, 64, 2),
    'layers/experts/out_lora_b': (2, 4, 2, 32),
  }
  rng = tuned.initialize_train_step_rng(jax.random.key(1))
  for step in range(2):
    tuned.step(global_step=step, rng=rng, writer=None)
  after = jax.device_get(tuned.state.params)
  for module, leaves in after.items():
    for name, x in leaves.items():
      assert np.any(x != start[module][name]) == ('lora' in name)
  plain = merge(after)
  # Known answers: two matrix products of a layer, and of an expert.
  for module, at, shape in (
    ('layers/attention', (0,), (32, 32)),
    ('layers/experts', (1, 3), (64, 32)),
  ):
    w, a, b, found = (
      np.asarray(leaves[module][name][at])
      for leaves, name in (
        *((start, 'out'), (after, 'out_lora_a'), (after, 'out_lora_b')),
        (plain, 'out'),
      )
    )
    expected = w.reshape(shape) + 8 * a.reshape(shape[0], 2) @ b
    np.testing.assert_allclose(found.reshape(shape), expected, atol=1e-6)
  with pytest.raises(errors.UsageError, match='layers/attention/qvk'):
    _ = make(tuned.run_config, {key: 'layers/attention/qvk'}).state


def test_runs_are_tuned_from_the_weights_of_another(config, tmp_path):
  config.checkpoint_dir = str(tmp_path / 'base')
  base = jaxline.fit(None, config).experiment.state.params
  config.restore_from = config.checkpoint_dir
  accumulated = {'sharding': 'fsdp', 'gradient_accumulation_steps': 2}
  for overrides, rules, optimized in (
    ({'experiment_kwargs.config.trainable': 'layers/.*'}, [], 6),
    (RANK | accumulated, [('.*_lora_.', None)], 8),
  ):
    config.checkpoint_dir = str(tmp_path / f'{optimized}')
    config.restore_rules = (*rules, ('state/params/(.*)', r'state/params/\1'))
    tuned = jaxline.fit(None, config, overrides).experiment
    moments = jax.tree.leaves(tuned.state.opt_state[1][0].mu)
    assert len(moments) == optimized
    for module, leaves in base.items():
      for name, w in leaves.items():
        now = tuned.state.params[module][name]
        is_frozen = bool(rules) or 'layers' not in module
        assert np.array_equal(now, w) == is_frozen, (module, name)
    again = jaxline.load(config.checkpoint_dir)
    jax.tree.map(
      np.testing.assert_array_equal, again.state.params, tuned.state.params
    )
    assert again.decode(['to'], jax.random.key(0))
