"""Tests of the language-model example, on a corpus of a few thousand bytes."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from configs import lm_long
from configs import moe
from configs import moe_30b
from examples import decoding
import jaxline
from jaxline import errors
from jaxline.base import trees

from . import experiment
from . import families_test
from . import model_test

LINES = 'for item in items:\n  total = total + item\n'


def tiny_config(folder):
  """Returns the default config, tiny, on the bytes of twenty small files."""
  for i in range(20):
    (folder / f'file{i}.txt').write_text(LINES * (3 + i % 4))
  config = lm.get_config()
  config.training_steps = 60
  config.eval_interval = 30
  config.save_checkpoint_interval = -1
  kwargs = config.experiment_kwargs.config
  kwargs.update(files=str(folder / '*.txt'), eval_fraction=0.2)
  kwargs.update(tokenizer='bytes', length=16, batch_size=8, eval_batch_size=6)
  kwargs.update(learning_rate=1e-2, warmup_fraction=0.1, sample_length=20)
  kwargs.model.update(vocab_size=257, num_layers=1, embed_dim=32, num_heads=2)
  kwargs.model.update(mlp_dim=64, max_length=32, bigram_rows=50)
  kwargs.decode.max_decode_steps = 6
  return config


@pytest.fixture
def config(tmp_path):
  return tiny_config(tmp_path)


def make(config, mode='train'):
  config = config.copy_and_resolve_references()
  return experiment.Experiment(
    mode, jax.random.PRNGKey(0), run_config=config, **config.experiment_kwargs
  )


def run(config, tmp_path):
  """Trains and evaluates; returns the result and the last scalars by name."""
  config.log_train_data_interval = 10
  config.checkpoint_dir = str(tmp_path / 'run')
  result = jaxline.fit(None, config)
  return result, {name: x[-1, 1] for name, x in result.history.items()}


def test_it_learns_reports_and_samples(config, tmp_path):
  result, last = run(config, tmp_path)
  assert last['train/loss'] < 0.5 * result.history['train/loss'][0, 1]
  bits = last['train/loss'] / np.log(2)
  assert last['train/bits_per_byte'] == pytest.approx(bits)
  of_a_step = last['train/tokens_per_sec'] / last['train/steps_per_sec']
  assert of_a_step == pytest.approx(8 * 16)
  assert {'grad_norm', 'learning_rate', 'tflops_per_sec'} <= {
    x.removeprefix('train/') for x in last
  }
  steps, (first, second) = result.history['eval/bits_per_byte'].T
  assert steps.tolist() == [30, 60]
  assert second < first < 8
  log = (tmp_path / 'run' / 'eval' / 'metrics.jsonl').read_text().splitlines()
  texts = [x['sample'] for x in map(json.loads, log) if 'sample' in x]
  assert len(texts) == 2
  assert all(x.startswith('def') for x in texts)
  assert all(len(x) <= len('def') + 20 for x in texts)


def test_experts_learn_and_their_biases_move(config, tmp_path):
  config.training_steps, config.eval_interval = 20, -1
  config.gradient_accumulation_steps = 2
  config.sharding = 'ep'
  config.mesh.ici.update(data=1, expert=2)
  options = config.experiment_kwargs.config.model
  options.update(num_experts=4, experts_per_token=2, shared_dim=8)
  options.update(expert_capacity=1.0, router_bias_rate=2**-7)
  options.update(router_balance_loss=0.1, router_z_loss=0.1)
  result, last = run(config, tmp_path)
  # They are not part of what is reported.
  assert last['train/loss'] < result.history['train/loss'][0, 1] < 6
  bits = last['train/loss'] / np.log(2)
  assert last['train/bits_per_byte'] == pytest.approx(bits)
  for name, least, most in (
    ('expert_load', 1, 2),
    ('dropped_fraction', 1e-9, 0.5),
    ('router_entropy', 1e-9, np.log(4)),
    ('router_balance', 0.9, 4),
  ):
    assert least <= last[f'train/{name}'] <= most
  biases = result.experiment.state.model_state['router_biases']
  (bias,) = jax.tree.leaves(biases)
  moves = bias * 2**7
  np.testing.assert_array_equal(moves, np.round(moves))
  assert 0 < np.abs(moves).max() <= 20  # Once a step.
  # The tables, the norms, attention, the router, and the shared part. A token
  # reads one row of the pairs.
  rest = 2 * 257 * 32 + 4 * 32 + 4 * 32 * 32 + 32 * 4 + 3 * 32 * 8
  expert = 3 * 32 * 64
  text = result.experiment.summary()['Parameters']
  assert f'{rest + 50 * 32 + 4 * expert:,} (' in text
  assert f'{rest + 32 + 2 * expert:,} active for a token' in text


def test_losses_of_routers_are_part_of_the_loss(config):
  options = config.experiment_kwargs.config.model
  options.update(num_experts=4, experts_per_token=2)
  options.update(router_balance_loss=0.5, router_z_loss=0.25)
  subject = make(config)
  batch = next(iter(subject.train_input()))
  args = subject.state.params, {}, batch, jax.random.key(0)
  loss_fn = jax.jit(subject.loss_fn, static_argnames='is_training')
  loss, values, _ = loss_fn(*args, is_training=True)
  sums = jax.jit(functools.partial(subject._sums, is_training=True))(*args)
  z = sums.routing.z.mean()
  expected = sums.total / sums.weight + 0.5 * values['router_balance'] + z / 4
  assert loss == pytest.approx(float(expected), rel=1e-6)
  loss, values, _ = loss_fn(*args, is_training=False)
  assert loss == pytest.approx(float(sums.total / sums.weight), rel=1e-6)
  assert set(values) == {'loss', 'bits_per_byte'}


def test_the_evaluation_is_the_mean_over_all_held_out_bytes(config):
  subject = make(config, 'eval')
  scalars = subject.evaluate(
    global_step=0, rng=jax.random.PRNGKey(1), writer=None
  )
  nats, count = 0.0, 0
  for batch in subject.eval_input():
    logits_BLV = model_test.apply(
      subject.state.params, batch['ids'], subject.config.model
    )
    logprobs_BLV = np.asarray(jax.nn.log_softmax(logits_BLV), np.float64)
    of_target = np.take_along_axis(logprobs_BLV, batch['labels'][..., None], -1)
    nats -= (of_target[..., 0] * batch['weights']).sum()
    count += int(batch['weights'].sum())
  assert count == subject.corpus.eval.num_bytes
  expected = {'loss': nats / count, 'bits_per_byte': nats / count / np.log(2)}
  assert scalars == pytest.approx(expected, rel=1e-5)


def test_another_tokenizer_is_measured_by_the_bytes(config, tmp_path):
  words = families_test.tokenizer_of('qwen2')
  words.save(str(tmp_path / 'words.json'))
  kwargs = config.experiment_kwargs.config
  kwargs.tokenizer = str(tmp_path / 'words.json')
  size = words.get_vocab_size()
  with pytest.raises(ValueError, match=f'words.json.* needs at least {size}'):
    make(config, 'eval')
  kwargs.model.vocab_size = size + 1
  # The documents that train have fewer bytes per token, or more.
  (tmp_path / 'file0.txt').write_text('x' * 150)
  subject = make(config, 'eval')
  args = subject.state.params, {}, next(subject.eval_input()), jax.random.key(1)
  loss_fn = jax.jit(subject.loss_fn, static_argnums=4)
  for documents, is_training in zip(subject.corpus, (True, False), strict=True):
    _, values, _ = loss_fn(*args, is_training)
    loss, bits = (values[x].compute() for x in ('loss', 'bits_per_byte'))
    tokens = documents.tokens.size - len(documents.names)
    assert tokens < 0.8 * documents.num_bytes
    expected = float(loss) * tokens / documents.num_bytes / np.log(2)
    assert float(bits) == pytest.approx(expected, rel=1e-5)
  assert subject.sample(jax.random.PRNGKey(2)).startswith('def')


def test_the_losses_of_rows_are_those_of_each_row_alone(config):
  config.experiment_kwargs.config.packing = 'packed'
  subject = make(config)
  batch = next(subject.train_input())
  args = subject.state.params, subject.state.model_state
  rng = jax.random.key(0)
  loss_fn = jax.jit(subject.loss_fn, static_argnums=4)
  losses = np.asarray(jax.jit(subject.row_losses)(*args, batch, rng))
  for row, loss in enumerate(losses):
    alone = batch | {'weights': np.zeros_like(batch['weights'])}
    alone['weights'][row] = batch['weights'][row]
    want = loss_fn(*args, alone, rng, True)[0]
    np.testing.assert_allclose(loss, want, rtol=1e-5)


@pytest.mark.parametrize(
  ('rows', 'accumulation', 'used'), [(4, 1, 4), (3, 3, 6)]
)
def test_a_batch_is_rounded_up_to_the_devices(
  config, caplog, rows, accumulation, used
):
  config.experiment_kwargs.config.batch_size = rows
  config.gradient_accumulation_steps = accumulation
  subject = make(config)
  batch = subject.abstract_batch(is_training=True)
  assert batch['ids'].shape == (used, 16)
  rng = subject.initialize_train_step_rng(jax.random.PRNGKey(1))
  scalars = subject.step(global_step=0, rng=rng, writer=None)
  subject.train_feed.close()
  assert scalars['tokens_per_step'] == used * 16
  assert (f'has {used} rows' in caplog.text) == (used != rows)


def test_decoding_with_a_cache_is_decoding_without(config):
  subject = make(config, 'decode')
  # Larger weights, so that likely tokens and unlikely ones are far apart.
  params = jax.tree.map(lambda x: 3 * x, jax.device_get(subject.state.params))
  prompts = [[256, 5], [256, 70, 71, 72, 9, 9, 9], [3]]
  options = decoding.Options(method='beam', max_decode_steps=6)
  batch = decoding.pad_prompts(prompts, rows=1, max_length=20)
  decoded = subject._decode(params, *batch, jax.random.key(0), options)
  assert len({*map(str, decoded.ids.reshape(-1, 6).tolist())}) > 3
  for prompt, *of in zip(prompts, decoded.ids, decoded.scores, strict=True):
    for ids, score in zip(*of, strict=True):
      whole_BL = np.zeros([1, 13], np.int32)
      whole_BL[0, : len(prompt) + 6] = [*prompt, *ids]
      logits_LV = model_test.apply(params, whole_BL, subject.config.model)[0]
      logprobs_LV = jax.nn.log_softmax(logits_LV)
      at = len(prompt) - 1 + np.arange(6)
      expected = float(logprobs_LV[at, ids].sum())
      assert float(score) == pytest.approx(expected, rel=1e-4)


def test_decoding_takes_the_likeliest_of_the_uncached_model(config):
  config.experiment_kwargs.config.decode.method = 'greedy'
  config.experiment_kwargs.config.files = '/no/such/place'  # Nor needed.
  subject = make(config, 'decode')
  prompts = ['for', 'items in x', '']
  found = subject.decode(prompts, jax.random.PRNGKey(0))
  for prompt, continuations in zip(prompts, found, strict=True):
    tokens = [256, *prompt.encode()]
    ((continuation),) = continuations
    assert set(continuation) == {'text', 'score', 'tokens'}
    new = []
    while len(new) < 6 and 256 not in new:
      padded = jnp.array([[*tokens, *new] + [0] * (20 - len(tokens + new))])
      logits_BLV = model_test.apply(
        subject.state.params, padded, subject.config.model
      )
      new.append(int(logits_BLV[0, len(tokens + new) - 1].argmax()))
    assert continuation['tokens'] == len(new)
    assert continuation['text'] == subject.tokenizer.decode(new)


@pytest.mark.parametrize(
  ('decay', 'quarter'), [('linear', 0.75), ('cosine', 0.85355339)]
)
def test_learning_rate(config, decay, quarter):
  kwargs = config.experiment_kwargs.config
  kwargs.update(decay=decay, learning_rate=3e-3, final_learning_rate=0.1)

  def rates(steps, warmup, *at):
    kwargs.update(training_steps=steps, warmup_fraction=warmup / steps)
    read = experiment.base_config.read(experiment.Config, kwargs)
    schedule = experiment.learning_rate_schedule(read)
    return [float(schedule(step)) for step in at]

  found = rates(4100, 100, 0, 49, 99, 1099, 2099, 4099)
  # What goes is the part above the end's.
  expected = [3e-5, 1.5e-3, 3e-3, 3e-3 * (0.9 * quarter + 0.1), 1.65e-3, 3e-4]
  assert found == pytest.approx(expected)
  # Without a warm-up, and of one step.
  assert rates(9, 0, 0, 8) == pytest.approx([3e-3, 3e-4])
  assert rates(1, 0, 0) == pytest.approx([3e-3])


def test_only_norms_are_not_decayed(config):
  kwargs = config.experiment_kwargs.config
  kwargs.update(learning_rate=1.0, warmup_fraction=0.0, weight_decay=0.25)
  subject = make(config)
  params = jax.device_get(subject.state.params)
  zeros = jax.tree.map(np.zeros_like, params)
  optimizer = experiment.make_optimizer(subject.config)
  with jax.numpy_dtype_promotion('standard'):  # Optax's own.
    state = jax.jit(optimizer.init)(params)
    updates, _ = jax.jit(optimizer.update)(zeros, state, params)
  weights, updates = trees.named_leaves(params), trees.named_leaves(updates)
  for name, x in weights.items():
    expected = (0.0 if 'norm' in name else -0.25) * x
    np.testing.assert_allclose(updates[name], expected, rtol=1e-6)
  assert sum('norm' in name for name in weights) == 4


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('length', 64),  # More than model.max_length.
    ('sample_length', 29),  # It makes 33 tokens.
    ('warmup_fraction', 1.0),
    ('decay', 'sqrt'),
    ('model.dropout', 1.0),
    ('eval_batches', 0),
  ],
)
def test_wrong_values_are_refused_by_name(config, key, value):
  kwargs = config.experiment_kwargs.config
  kwargs.update_from_flattened_dict({key: value})
  with pytest.raises(errors.UsageError, match=key.rpartition('.')[2]):
    make(config)


@pytest.mark.parametrize('module', [lm, lm_long, moe, moe_30b])
def test_configs_are_valid(module):
  config = module.get_config().copy_and_resolve_references()
  train_config = experiment.base_config.read(
    experiment.Config, config.experiment_kwargs.config
  )
  assert train_config.training_steps == config.training_steps
  # The document token, the prompt, the sample.
  used = 1 + len(train_config.sample_prompt) + train_config.sample_length
  assert used <= train_config.model.max_length
