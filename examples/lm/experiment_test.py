"""Tests of the language-model example, on a corpus of a few thousand bytes."""

import functools
import os
import pathlib
import subprocess
import sys

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lm
from configs import lm_long
from configs import moe
from configs import moe_30b
from examples import decoding
from jaxline import errors
from jaxline import train
from jaxline import utils
from jaxline.inputs import text

from . import experiment
from . import model

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
  kwargs.files = str(folder / '*.txt')
  kwargs.eval_fraction = 0.2
  kwargs.tokenizer = 'bytes'
  kwargs.model.vocab_size = 257
  kwargs.model.num_layers = 1
  kwargs.model.embed_dim = 32
  kwargs.model.bigram_rows = 50
  kwargs.model.num_heads = 2
  kwargs.model.mlp_dim = 64
  kwargs.model.max_length = 32
  kwargs.length = 16
  kwargs.batch_size = 8
  kwargs.eval_batch_size = 6
  kwargs.learning_rate = 1e-2
  kwargs.warmup_fraction = 0.1
  kwargs.sample_length = 20
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


class Recorder:
  """Keeps what is written."""

  def __init__(self):
    self.scalars, self.texts = {}, {}

  def write_scalars(self, global_step, scalars):
    self.scalars[int(global_step)] = dict(scalars)

  def write_texts(self, global_step, texts):
    self.texts[int(global_step)] = dict(texts)


@pytest.fixture
def checkpointer(config):
  return utils.InMemoryCheckpointer(config, 'train')


def test_it_learns_reports_and_samples(config, checkpointer):
  config = config.copy_and_resolve_references()
  config.log_train_data_interval = 10
  recorder, evaluations = Recorder(), Recorder()
  train.Run(
    experiment.Experiment, config, checkpointer, recorder, evaluations
  ).train_and_eval()
  first, last = recorder.scalars[10], recorder.scalars[60]
  assert last['loss'] < 0.5 * first['loss']
  assert last['bits_per_byte'] == pytest.approx(last['loss'] / np.log(2))
  assert last['tokens_per_sec'] == pytest.approx(last['steps_per_sec'] * 8 * 16)
  assert set(last) == {
    'bits_per_byte',
    'grad_norm',
    'input_wait_fraction',
    'learning_rate',
    'loss',
    'steps_per_sec',
    'tflops_per_sec',
    'tokens_per_sec',
    'tokens_per_step',
  }
  assert list(evaluations.scalars) == [30, 60]
  assert (
    evaluations.scalars[60]['bits_per_byte']
    < evaluations.scalars[30]['bits_per_byte']
    < 8.0
  )
  sample = evaluations.texts[60]['sample']
  assert sample.startswith('def')
  assert len(sample) <= len('def') + 20


@pytest.mark.parametrize('accumulation', [1, 2])
def test_experts_learn_and_their_biases_move(config, accumulation):
  config.training_steps = 20
  config.log_train_data_interval = 10
  config.gradient_accumulation_steps = accumulation
  config.sharding = 'ep'
  config.mesh.ici.update(data=1, expert=2)
  options = config.experiment_kwargs.config.model
  options.update(num_experts=4, experts_per_token=2, shared_dim=8)
  options.update(expert_capacity=1.0, router_bias_rate=2**-7)
  options.update(router_balance_loss=0.1, router_z_loss=0.1)
  config = config.copy_and_resolve_references()
  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  recorder = Recorder()
  run = train.Run(experiment.Experiment, config, checkpointer, recorder)
  subject = run.train()
  first, last = recorder.scalars[10], recorder.scalars[20]
  # They are not part of what is reported.
  assert last['loss'] < first['loss'] < 6
  assert last['bits_per_byte'] == pytest.approx(last['loss'] / np.log(2))
  assert 1 <= last['expert_load'] <= 2
  assert 0 < last['dropped_fraction'] < 0.5
  assert 0 < last['router_entropy'] <= np.log(4)
  assert 0.9 < last['router_balance'] < 4
  ((bias,),) = (
    x.values() for x in subject.state.model_state['router_biases'].values()
  )
  moves = bias * 2**7
  np.testing.assert_array_equal(moves, np.round(moves))
  assert np.abs(moves).max() <= 20  # Once a step.
  assert np.abs(moves).max() > 0
  # The tables, the norms, attention, the router, and the shared part. A token
  # reads one row of the pairs.
  rest = 2 * 257 * 32 + 4 * 32 + 4 * 32 * 32 + 32 * 4 + 3 * 32 * 8
  expert = 3 * 32 * 64
  text = subject.summary()['Parameters']
  assert f'{rest + 50 * 32 + 4 * expert:,} (' in text
  assert f'{rest + 32 + 2 * expert:,} active for a token' in text


def test_losses_of_routers_are_part_of_the_loss(config):
  options = config.experiment_kwargs.config.model
  options.update(num_experts=4, experts_per_token=2)
  options.update(router_balance_loss=0.5, router_z_loss=0.25)
  subject = make(config)
  batch = next(iter(subject.train_input()))
  args = subject.state.params, {}, batch, jax.random.key(0)
  loss, values, _ = subject.loss_fn(*args, is_training=True)
  sums = subject._sums(*args, is_training=True)
  z = sums.routing.z.mean()
  expected = sums.total / sums.weight + 0.5 * values['router_balance'] + z / 4
  assert loss == pytest.approx(float(expected), rel=1e-6)
  loss, values, _ = subject.loss_fn(*args, is_training=False)
  assert loss == pytest.approx(float(sums.total / sums.weight), rel=1e-6)
  assert set(values) == {'loss', 'bits_per_byte'}


def test_the_evaluation_is_the_mean_over_all_held_out_bytes(config):
  subject = make(config, 'eval')
  scalars = subject.evaluate(
    global_step=0, rng=jax.random.PRNGKey(1), writer=None
  )
  nats, count = 0.0, 0
  for batch in subject.eval_input():
    logits_BLV = np.asarray(
      model.apply(subject.state.params, batch['ids'], subject.config.model),
      np.float64,
    )
    probs = np.exp(logits_BLV - logits_BLV.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    of_target = np.take_along_axis(probs, batch['labels'][..., None], -1)
    nats -= (np.log(of_target[..., 0]) * batch['weights']).sum()
    count += int(batch['weights'].sum())
  assert count == subject.corpus.eval.num_bytes
  assert scalars['loss'] == pytest.approx(nats / count, rel=1e-5)
  assert scalars['bits_per_byte'] == pytest.approx(
    nats / count / np.log(2), rel=1e-5
  )


def test_another_tokenizer_is_measured_by_the_bytes(config, tmp_path):
  tokenizers = pytest.importorskip('tokenizers')
  words = tokenizers.Tokenizer(tokenizers.models.BPE())
  words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  words.decoder = tokenizers.decoders.ByteLevel()
  words.train_from_iterator(
    [LINES] * 9,
    tokenizers.trainers.BpeTrainer(
      vocab_size=290,
      special_tokens=['<|endoftext|>'],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  words.save(str(tmp_path / 'words.json'))
  kwargs = config.experiment_kwargs.config
  kwargs.tokenizer = str(tmp_path / 'words.json')
  with pytest.raises(ValueError, match=r'words.json.* needs at least 2\d\d'):
    make(config, 'eval')
  kwargs.model.vocab_size = 320
  subject = make(config, 'eval')
  scalars = subject.evaluate(
    global_step=0, rng=jax.random.PRNGKey(1), writer=None
  )
  documents = subject.corpus.eval
  tokens = documents.tokens.size - len(documents.names)
  assert tokens < 0.8 * documents.num_bytes
  assert scalars['bits_per_byte'] == pytest.approx(
    scalars['loss'] * tokens / documents.num_bytes / np.log(2), rel=1e-5
  )
  assert subject.sample(jax.random.PRNGKey(2)).startswith('def')


@pytest.fixture
def said(monkeypatch):
  """The lines of the log that are about the size of a batch."""
  lines = []

  def note(message, *args):
    if 'rows' in message:
      lines.append(message % args)

  monkeypatch.setattr(logging, 'warning', note)
  monkeypatch.setattr(logging, 'info', note)
  return lines


def on_mesh(config, rows, *, mdl=1, accumulation=1):
  """An experiment on two devices, which share a batch unless mdl is 2."""
  config = config.copy_and_resolve_references()
  config.experiment_kwargs.config.batch_size = rows
  config.mesh.ici.mdl = mdl
  config.sharding = 'fsdp_tp'
  config.gradient_accumulation_steps = accumulation
  return make(config)


def losses_of(subject, steps):
  rng = subject.initialize_train_step_rng(jax.random.PRNGKey(1))
  scalars = [
    subject.step(global_step=i, rng=rng, writer=None) for i in range(steps)
  ]
  return [float(s['loss']) for s in scalars], scalars[-1]['tokens_per_step']


@pytest.mark.parametrize('packing', ['stream', 'packed'])
def test_the_losses_of_rows_are_those_of_each_row_alone(config, packing):
  config.experiment_kwargs.config.packing = packing
  subject = make(config)
  batch = next(subject.train_input())
  args = subject.state.params, subject.state.model_state
  rng = jax.random.key(0)
  got = subject.row_losses(*args, batch, rng)
  for row, loss in enumerate(got):
    alone = batch | {'weights': np.zeros_like(batch['weights'])}
    alone['weights'][row] = batch['weights'][row]
    want = subject.loss_fn(*args, alone, rng, True)[0]
    np.testing.assert_allclose(loss, want, rtol=1e-5)


@pytest.mark.parametrize(
  ('rows', 'accumulation', 'used'), [(1, 1, 2), (4, 1, 4), (3, 3, 6)]
)
def test_a_batch_is_rounded_up_to_the_devices(
  config, said, rows, accumulation, used
):
  subject = on_mesh(config, rows, accumulation=accumulation)
  batch = subject.abstract_batch(is_training=True)
  assert batch['ids'].shape == (used, 16)
  said.clear()
  _, tokens = losses_of(subject, 2)
  subject.train_feed.close()
  assert tokens == used * 16
  if used == rows:
    assert not said
    return
  (line,) = said
  assert f'has {used} rows' in line


@pytest.mark.process
def test_the_first_command_on_eight_devices(config, tmp_path):
  """That of the README, with a smaller model, on a little text."""
  kwargs = config.experiment_kwargs.config
  values = {
    'files': kwargs.files,
    'eval_fraction': 0.2,
    'length': 16,
    'sample_length': 0,
    'sample_prompt': '',
    'model.num_layers': 1,
    'model.embed_dim': 16,
    'model.num_heads': 2,
    'model.mlp_dim': 16,
  }
  found = subprocess.run(
    [
      sys.executable,
      'experiment.py',
      '--config=configs/lm.py',
      '--jaxline_mode=train_and_eval',
      f'--config.checkpoint_dir={tmp_path / "run"}',
      '--config.training_steps=2',
      *(
        f'--config.experiment_kwargs.config.{key}={value}'
        for key, value in values.items()
      ),
    ],
    cwd=pathlib.Path(__file__).parents[2],
    env=os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=8'},
    capture_output=True,
    text=True,
  )
  assert found.returncode == 0, found.stderr
  assert found.stderr.count('A batch has 8 rows') == 1
  assert 'eval step 2 | ' in found.stdout


def test_an_evaluation_is_of_the_same_records_on_any_devices(config):
  config.experiment_kwargs.config.eval_batch_size = 3
  config.experiment_kwargs.config.eval_batches = 2
  found = []
  for mdl in (1, 2):
    subject = on_mesh(config, rows=2, mdl=mdl)
    for _ in range(2):
      scalars = subject.evaluate(
        global_step=0, rng=jax.random.PRNGKey(1), writer=None
      )
    found.append(scalars['loss'])
  assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_decoding_with_a_cache_is_decoding_without(config):
  subject = make(config, 'decode')
  # Larger weights, so that likely tokens and unlikely ones are far apart.
  params = jax.tree.map(lambda x: 3 * x, subject.state.params)
  prompts = [[256, 5], [256, 70, 71, 72, 9, 9, 9], [3]]
  options = decoding.Options(method='beam', max_decode_steps=6)
  prompts_BT, lengths_B = decoding.pad_prompts(prompts, rows=1, max_length=20)
  decoded = subject._decode(
    params, prompts_BT, lengths_B, jax.random.key(0), options
  )
  rows = [
    (prompt, ids, score)
    for prompt, *of in zip(prompts, decoded.ids, decoded.scores, strict=True)
    for ids, score in zip(*of, strict=True)
  ]
  assert len({tuple(np.asarray(ids).tolist()) for _, ids, _ in rows}) > 3
  whole_BL = np.zeros([len(rows), 13], np.int32)
  for row, (prompt, ids, _) in enumerate(rows):
    whole_BL[row, : len(prompt) + 6] = [*prompt, *ids]
  logits_BLV = np.asarray(
    jax.jit(functools.partial(model.apply, config=subject.config.model))(
      params, whole_BL
    ),
    np.float64,
  )
  logprobs_BLV = logits_BLV - np.log(np.exp(logits_BLV).sum(-1, keepdims=True))
  for row, (prompt, ids, score) in enumerate(rows):
    at = len(prompt) - 1 + np.arange(6)
    assert float(score) == pytest.approx(
      logprobs_BLV[row, at, ids].sum(), rel=1e-4
    )


def test_decoding_takes_the_likeliest_of_the_uncached_model(config):
  config.experiment_kwargs.config.decode.method = 'greedy'
  config.experiment_kwargs.config.files = '/no/such/place'  # Nor needed.
  subject = make(config, 'decode')
  prompts = ['for', 'items in x', '']
  found = subject.decode(prompts, jax.random.PRNGKey(0))
  apply = jax.jit(functools.partial(model.apply, config=subject.config.model))
  for prompt, continuations in zip(prompts, found, strict=True):
    tokens = [256, *prompt.encode()]
    ((continuation),) = continuations
    assert set(continuation) == {'text', 'score', 'tokens'}
    new = []
    while len(new) < 6 and 256 not in new:
      padded = jnp.array([[*tokens, *new] + [0] * (20 - len(tokens + new))])
      logits_BLV = apply(subject.state.params, padded)
      new.append(int(logits_BLV[0, len(tokens + new) - 1].argmax()))
    assert continuation['tokens'] == len(new)
    assert continuation['text'] == subject.tokenizer.decode(new)


def test_the_document_token_stops_besides_the_others(config, monkeypatch):
  config.experiment_kwargs.config.decode.stop_ids = (10,)
  subject = make(config, 'decode')
  seen = []
  said = [[{'text': 'y'}]]
  monkeypatch.setattr(
    subject, '_continue', lambda *args: seen.append(args) or said
  )
  assert subject.decode(['x'], 'key') == said
  assert subject.sample('key') == subject.config.sample_prompt + 'y'
  (prompts, key, options), (*_, of_sample) = seen
  assert of_sample.stop_ids == options.stop_ids
  assert (prompts, key) == (['x'], 'key')
  assert options.stop_ids == (10, 256)
  assert options.max_decode_steps == 6


def test_a_prompt_must_leave_room(config):
  subject = make(config, 'decode')
  with pytest.raises(ValueError, match=r'Prompt 2 of 2 has 27 tokens.* to 26'):
    subject.decode(['x', 'x' * 26], jax.random.PRNGKey(0))
  config.experiment_kwargs.config.decode.max_decode_steps = 32
  with pytest.raises(
    ValueError, match=r'max_decode_steps is 32.*the 32 tokens'
  ):
    make(config, 'decode').decode(['x'], jax.random.PRNGKey(0))


@pytest.mark.parametrize(
  ('decay', 'quarter'), [('linear', 0.75), ('cosine', 0.85355339)]
)
def test_learning_rate(config, decay, quarter):
  kwargs = config.experiment_kwargs.config
  kwargs.update(decay=decay, learning_rate=3e-3, final_learning_rate=0.1)
  kwargs.update(training_steps=4100, warmup_fraction=100 / 4100)
  schedule = experiment.learning_rate_schedule(
    experiment.base_config.read(experiment.Config, kwargs)
  )
  assert float(schedule(0)) == pytest.approx(3e-5)
  assert float(schedule(49)) == pytest.approx(1.5e-3)
  assert float(schedule(99)) == pytest.approx(3e-3)
  # What goes is the part above the end's.
  assert float(schedule(1099)) == pytest.approx(3e-3 * (0.9 * quarter + 0.1))
  assert float(schedule(2099)) == pytest.approx(3e-3 * 0.55)
  assert float(schedule(4099)) == pytest.approx(3e-4)
  # Without a warm-up, and of one step.
  for steps, last in ((9, 3e-4), (1, 3e-3)):
    kwargs.update(training_steps=steps, warmup_fraction=0.0)
    schedule = experiment.learning_rate_schedule(
      experiment.base_config.read(experiment.Config, kwargs)
    )
    assert float(schedule(0)) == pytest.approx(3e-3)
    assert float(schedule(steps - 1)) == pytest.approx(last)


def test_a_skipped_step_does_not_move_the_logged_learning_rate(
  config, checkpointer
):
  class Poisoned(experiment.Experiment):
    def train_input(self):
      for i, batch in enumerate(super().train_input()):
        if i in (1, 2):
          batch['weights'] = np.full_like(batch['weights'], np.nan)
        yield batch

  config.update(training_steps=6, log_train_data_interval=1)
  config.update(on_nonfinite='skip')
  config = config.copy_and_resolve_references()
  recorder = Recorder()
  train.train(Poisoned, config, checkpointer, recorder)
  schedule = experiment.learning_rate_schedule(
    experiment.base_config.read(
      experiment.Config, config.experiment_kwargs.config
    )
  )
  logged = [recorder.scalars[step]['learning_rate'] for step in range(1, 7)]
  expected = [schedule(count) for count in (0, 1, 1, 1, 2, 3)]
  np.testing.assert_allclose(logged, expected, rtol=1e-6)


def test_only_norms_are_not_decayed(config):
  config.experiment_kwargs.config.learning_rate = 1.0
  config.experiment_kwargs.config.warmup_fraction = 0.0
  config.experiment_kwargs.config.weight_decay = 0.25
  subject = make(config)
  params = jax.device_get(subject.state.params)
  zeros = jax.tree.map(np.zeros_like, params)
  optimizer = experiment.make_optimizer(subject.config)
  with jax.numpy_dtype_promotion('standard'):  # Optax's own.
    updates, _ = jax.jit(optimizer.update)(
      zeros, jax.jit(optimizer.init)(params), params
    )
  flat = jax.tree_util.tree_leaves_with_path(updates)
  weights = dict(jax.tree_util.tree_leaves_with_path(params))
  for path, update in flat:
    is_norm = 'norm' in jax.tree_util.keystr(path)
    expected = (0.0 if is_norm else -0.25) * weights[path]
    np.testing.assert_allclose(update, expected, rtol=1e-6)
  assert sum('norm' in jax.tree_util.keystr(path) for path, _ in flat) == 4


@pytest.mark.parametrize(
  ('key', 'values'),
  [
    ('length', [64]),  # More than model.max_length.
    ('warmup_fraction', [1.0]),
    ('clip_norm', [0.0, float('inf')]),
    ('learning_rate', [-1.0, float('nan')]),
    ('decay', ['sqrt']),
    ('final_learning_rate', [-0.1]),
    ('b1', [1.0]),
    ('b2', [-0.1]),
    ('weight_decay', [float('inf')]),
    ('eval_fraction', [1.0]),
    ('sample_temperature', [-1.0]),
    ('model.dropout', [1.0]),
    ('decode.temperature', [float('inf')]),
    ('sample_length', [29, -1]),  # The former makes 33 tokens, more than 32.
    ('eval_batches', [0]),
    ('eval_batch_size', [0]),
  ],
)
def test_wrong_values_are_refused_by_name(config, key, values):
  *section, key = key.split('.')
  kwargs = config.experiment_kwargs.config
  for value in values:
    (kwargs[section[0]] if section else kwargs)[key] = value
    with pytest.raises(errors.UsageError, match=key):
      make(config)


@pytest.mark.parametrize(
  'get_config',
  [lm.get_config, lm_long.get_config, moe.get_config, moe_30b.get_config],
)
def test_configs_are_valid(get_config):
  config = get_config().copy_and_resolve_references()
  train_config = experiment.base_config.read(
    experiment.Config, config.experiment_kwargs.config
  )
  assert train_config.training_steps == config.training_steps
  # The document token, the prompt, the sample.
  used = 1 + len(train_config.sample_prompt) + train_config.sample_length
  assert used <= train_config.model.max_length
  assert train_config.decode.max_decode_steps < train_config.model.max_length


def test_compression_baselines():
  def bits(*texts):
    return experiment.compression_baselines(
      text.Documents(
        names=[''] * len(texts),
        tokens=np.array([t for x in texts for t in (256, *x)], np.uint16),
        starts=np.cumsum([0, *(1 + len(x) for x in texts[:-1])]),
        sha256='',
        num_bytes=sum(map(len, texts)),
      )
    )

  noise = np.random.default_rng(0).bytes(20_000)
  found = bits(noise[:10_000], noise[10_000:])
  assert list(found) == ['gzip -9', 'xz']
  assert all(8 < b < 8.1 for b in found.values())
  # The second half is the first: xz sees that far back, gzip does not.
  assert bits(noise * 2, noise * 2)['xz'] < 2.2
