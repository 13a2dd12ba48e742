"""Models: their metrics are NumPy's and Praxis's, decoding needs no cache."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import decoding
from examples.pax import base_layer
from examples.pax import models
from examples.pax.layers import activations
from examples.pax.layers import attentions
from examples.pax.layers import embedding_softmax
from examples.pax.layers import linears
from examples.pax.layers import transformers

KEY = jax.random.key(0)
VOCAB = 11
# The output layer is separate, because a tied one repeats the same token.
SIZES = {
  'vocab_size': VOCAB,
  'model_dims': 16,
  'softmax_tpl': embedding_softmax.FullSoftmax.HParams(),
  'separate_embedding_tpl': embedding_softmax.Embedding.HParams(),
}
STACK = transformers.StackedTransformer.HParams(
  num_layers=1,
  model_dims=16,
  hidden_dims=32,
  num_heads=2,
  transformer_layer_params_tpl=transformers.Transformer.HParams(
    tr_atten_tpl=attentions.DotProductAttention.HParams(
      combine_qkv=True, atten_logit_cap=2.0
    ),
    tr_fflayer_tpl=transformers.TransformerFeedForward.HParams(
      activation_tpl=activations.GELU.HParams()
    ),
  ),
)


class Table(base_layer.BaseLayer):
  """The smallest language model, which predicts from one token."""

  packed_input: bool = False

  def setup(self):
    softmax = embedding_softmax.SharedEmbeddingSoftmax.HParams()
    self.create_child('softmax', softmax, num_classes=VOCAB, input_dims=16)

  def hidden(self, ids):
    self.add_aux_loss('one', jnp.float32(0.25), 3.0)
    self.add_aux_loss('other', 0.625)
    return self.softmax.emb_lookup(ids)

  def compute_loss(self, x, labels, weights):
    return self.softmax.compute_loss(x, labels, weights)


def language_model(stack, **fields):
  lm = transformers.TransformerLm.HParams(
    stacked_transformer_tpl=stack, **SIZES
  )
  return models.LanguageModel.HParams(lm_tpl=lm.set(**fields))


def repeated(block, times=2):
  return transformers.StackedTransformerRepeated.HParams(
    block=block, x_times=times
  )


def rotary_pipeline():
  stack = STACK.clone()
  attention = stack.transformer_layer_params_tpl.tr_atten_tpl
  attention.set(num_kv_heads=1, use_rotary_position_emb=True)
  return transformers.PipelinedTransformer.HParams(
    pipeline_stage=repeated(stack, 1),
    num_pipeline_stages=2,
    num_pipeline_microbatches=3,
  )


def sequence_model():
  network = transformers.TransformerEncoderDecoder.HParams(
    encoder_stacked_transformer_tpl=STACK,
    decoder_stacked_transformer_tpl=repeated(STACK),
    **SIZES,
  )
  return models.SequenceModel.HParams(model_tpl=network)


def tokens(seed, *shape):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32)


def random_variables(model, seed=0):
  """Returns variables whose predictions are far from uniform.

  Compiling `init` would take longer than the rest of a test.
  """
  rng = np.random.default_rng(seed)

  def draw(weight):
    scale = 1 / np.sqrt(weight.shape[0]) if len(weight.shape) > 1 else 0.1
    return jnp.float32(3 * scale * rng.normal(size=weight.full_shape))

  return jax.tree.map(draw, model.abstract_init())


def log_softmax(logits):
  logits = np.float64(logits)
  logits = logits - logits.max(axis=-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def expected_metrics(logits, labels, weights):
  """Computes the metrics from their definitions, in float64."""
  logp = log_softmax(logits)
  labels, weights = np.asarray(labels), np.float64(weights)
  nats = -np.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]
  correct = logp.argmax(axis=-1) == labels
  total = weights.sum()
  return nats, {
    'avg_xent': (nats * weights).sum() / total,
    'correct': (correct * weights).sum() / total,
    'total': total,
  }


def test_language_model_metrics():
  model = models.LanguageModel.HParams(lm_tpl=Table.HParams()).Instantiate()
  variables = random_variables(model)
  batch = {
    'ids': tokens(0, 3, 5),
    'labels': tokens(1, 3, 5),
    'weights': jnp.float32([[1, 1, 1, 0.5, 0], [1, 1, 0, 0, 0], [0] * 5]),
  }

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def loss(variables, batch):
    metrics, per_example = model.apply(variables, batch)
    return metrics['total_loss'][0], (metrics, per_example)

  softmax = variables['params']['language_model/lm/softmax']
  table, bias = (np.float64(softmax[name]) for name in ('emb_var', 'bias'))
  logits = table[np.asarray(batch['ids'])] @ table.T + bias

  def check(batch, weights):
    (value, (metrics, per_example)), _ = loss(variables, batch)
    nats, expected = expected_metrics(logits, batch['labels'], weights)
    avg_xent, total = expected['avg_xent'], expected['total']
    pairs = {name: (float(x), float(w)) for name, (x, w) in metrics.items()}
    assert pairs == {
      name: pytest.approx(pair, rel=1e-5)
      for name, pair in {
        'total_loss': (avg_xent + 0.875, total),
        'avg_xent': (avg_xent, total),
        'aux_loss': (0.875, 2.0),
        'log_pplx': (avg_xent, total),
        'fraction_of_correct_next_step_preds': (expected['correct'], total),
        'num_predictions': (total, 1.0),
      }.items()
    }
    assert value == metrics['total_loss'][0]
    np.testing.assert_allclose(per_example['per_token_xent'], nats, rtol=1e-4)
    scores = -(nats * np.float64(weights)).sum(axis=1)
    np.testing.assert_allclose(per_example['scores'], scores, rtol=1e-4)
    np.testing.assert_array_equal(per_example['labels'], batch['labels'])

  # One token has weight 0.5, and one row is padding.
  check(batch, batch['weights'])
  # If all weights are 0, there is no NaN.
  nothing = batch | {'weights': jnp.zeros_like(batch['weights'])}
  (_, (metrics, _)), grads = loss(variables, nothing)
  assert metrics['avg_xent'] == (0, 0)
  assert metrics['num_predictions'] == (0, 1)
  assert all((g == 0).all() for g in jax.tree.leaves(grads))
  # Rows may have weights where tokens have none. By default, all count equally.
  of_rows = jnp.float32([0, 1, 2])
  check(batch | {'weights': of_rows}, np.outer(of_rows, np.ones(5)))
  del batch['weights']
  check(batch, np.ones([3, 5]))


def test_packed_input_needs_segments():
  model = small_model(packed=True)
  batch = {'ids': jnp.zeros([1, 3], jnp.int32), 'segment_ids': None}
  with pytest.raises(ValueError, match=r"lacks \['segment_pos'\]; it has"):
    model.apply(praxis_variables(model), batch)


PROMPTS = [[3, 1, 4, 1], [5], [9, 2]]
LENGTH = 10


def padded(rows, length):
  return jnp.int32([[*row, *[0] * (length - len(row))] for row in rows])


@pytest.mark.parametrize(
  'model_p',
  [
    # A loop of loops, with sinusoids.
    language_model(repeated(repeated(STACK))),
    language_model(
      STACK.clone().set(num_layers=2),
      position_emb_tpl=(
        embedding_softmax.TrainablePositionalEmbedding.HParams(
          max_seq_length=LENGTH
        )
      ),
    ),
    language_model(rotary_pipeline(), position_emb_tpl=None),
    sequence_model(),
  ],
  ids=['loop', 'unrolled', 'pipeline', 'sequence'],
)
def test_decoding_is_that_without_a_cache(model_p):
  model = model_p.Instantiate()
  variables = random_variables(model, seed=4)
  (softmax,) = (
    of for path, of in variables['params'].items() if path.endswith('softmax')
  )
  paddings = jnp.zeros([3, 5]).at[0, 3:].set(1).at[2, 1:].set(1)

  def batch(**target):
    if isinstance(model, models.LanguageModel):
      return target
    return {
      'src': {'ids': tokens(0, 3, 5), 'paddings': paddings},
      'tgt': target,
    }

  @jax.jit
  def logits(ids):
    found = model.apply(variables, batch(ids=ids), method='compute_predictions')
    return found['hidden'] @ softmax['w'] + softmax['bias'][None, None]

  # Each row is continued from its own prompt with the likeliest tokens.
  rows, steps = [list(row) for row in PROMPTS], LENGTH - 4
  scores = np.zeros([3, steps])
  for step in range(steps):
    logp = log_softmax(logits(padded(rows, LENGTH)))
    for row, prefix in enumerate(rows):
      scores[row, step] = logp[row, len(prefix) - 1].max()
      prefix.append(int(logp[row, len(prefix) - 1].argmax()))
  found = [
    row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)
  ]
  others = [token for new in found for token in new[1:] if token != new[0]]
  stop = others[0] if others else None  # Such a token ends a continuation.
  # The decoder is the model's. Two samples share a prompt's cache.
  model_p = model_p.clone().set(
    decoder_tpl=models.SampleDecoderHParams(
      max_decode_steps=steps, eos_id=stop, temperature=0.0, num_samples=2
    )
  )
  lengths = jnp.int32([*map(len, PROMPTS)])
  decoded = jax.jit(model_p.Instantiate().decode)(
    variables, batch(ids=padded(PROMPTS, 4), lengths=lengths), KEY
  )
  for row, new in enumerate(found):
    length = new.index(stop) + 1 if stop in new else steps
    for sample in range(2):
      assert decoded.lengths[row, sample] == length
      assert decoded.ids[row, sample, :length].tolist() == new[:length]
      score = scores[row, :length].sum()
      assert decoded.scores[row, sample] == pytest.approx(score, rel=1e-4)


def test_what_does_not_count_for_a_sequence_model():
  model = sequence_model().Instantiate()
  variables = random_variables(model)
  source = tokens(0, 2, 5)
  paddings = jnp.zeros([2, 5]).at[0, 3:].set(1)
  run = jax.jit(functools.partial(model.apply, variables))
  batch = {
    'src': {'ids': source, 'paddings': paddings},
    'tgt': {'ids': tokens(1, 2, LENGTH), 'labels': tokens(2, 2, LENGTH)},
    'weights': jnp.float32([0, 1]),
  }
  # A padding row.
  metrics, rows = run(batch)
  assert metrics['num_predictions'] == (LENGTH, 1)
  found = float(metrics['total_loss'][0])
  assert found == pytest.approx(float(rows['per_token_xent'][1].mean()))
  # Padding of the target, whose weights come first.
  weights = jnp.ones([2, LENGTH]).at[0, 3:].set(0)
  target = batch['tgt'] | {'weights': weights}
  metrics, rows = run(batch | {'tgt': target})
  found = float(metrics['total_loss'][0])
  expected = float(np.average(rows['per_token_xent'], weights=weights))
  assert found == pytest.approx(expected, rel=1e-5)
  # Padding of the source.
  other = source.at[0, 3:].set((source[0, 3:] + 1) % VOCAB)
  of_other = {'ids': other, 'paddings': paddings}
  again, _ = run(batch | {'tgt': target, 'src': of_other})
  assert again['avg_xent'] == metrics['avg_xent']


def test_decoder_hparams_are_options():
  for decoder, options in (
    (
      models.GreedyDecoderHParams(max_decode_steps=4),
      {'method': 'greedy', 'stop_ids': (2,)},
    ),
    (
      models.SampleDecoderHParams(max_decode_steps=4, eos_id=None),
      {'method': 'sample', 'top_k': 40},
    ),
    (
      models.SampleDecoderHParams(max_decode_steps=4, k=3, p=0.9, eos_id=1),
      {'method': 'sample', 'top_k': 3, 'top_p': 0.9, 'stop_ids': (1,)},
    ),
    (
      models.BeamSearchHParams(max_decode_steps=4, beam_size=3, eos_id=(1, 2)),
      {'method': 'beam', 'beam_size': 3, 'stop_ids': (1, 2)},
    ),
  ):
    expected = decoding.Options(max_decode_steps=4, **options)
    assert decoder.to_options() == expected


def classifier(classes=7):
  return models.ClassificationModel.HParams(
    network_tpl=linears.Linear.HParams(input_dims=3, output_dims=4),
    softmax_tpl=embedding_softmax.FullSoftmax.HParams(
      input_dims=4, num_classes=classes
    ),
    input_field='x',
    label_field='y',
  ).Instantiate()


def test_classification_metrics():
  model = classifier()
  variables = random_variables(model)
  rng = np.random.default_rng(0)
  x = rng.normal(size=[64, 3]).astype(np.float32)
  y = rng.integers(0, 7, 64).astype(np.int32)
  weights = np.float32(rng.integers(0, 3, 64))
  x[weights == 0] *= 100  # These rows do not count.
  batch = {'x': jnp.asarray(x), 'y': jnp.asarray(y)}
  run = jax.jit(model.apply)
  metrics, per_example = run(
    variables, batch | {'weights': jnp.asarray(weights)}
  )
  params = jax.tree.map(np.float64, variables['params'])
  network = params['classification_model/network']
  softmax = params['classification_model/softmax']
  logits = np.float64(x) @ network['w'] @ softmax['w'] + softmax['bias']
  nats, expected = expected_metrics(logits, y, weights)
  among_5 = (np.argsort(-logits, axis=1)[:, :5] == y[:, None]).any(axis=1)
  acc5 = (among_5 * weights).sum() / weights.sum()
  assert expected['correct'] < acc5 < 1
  values = {name: float(value) for name, (value, _) in metrics.items()}
  assert values == pytest.approx(
    {
      'total_loss': expected['avg_xent'],
      'avg_xent': expected['avg_xent'],
      'aux_loss': 0,
      'accuracy': expected['correct'],
      'error': 1 - expected['correct'],
      'acc5': acc5,
      'num_predictions': weights.sum(),
    },
    rel=1e-4,
  )
  np.testing.assert_allclose(per_example['xent'], nats, rtol=1e-3, atol=1e-4)
  # Rows with weight 0 may even be NaN.
  unknown = jnp.where((weights == 0)[:, None], jnp.nan, batch['x'])
  again, _ = run(variables, batch | {'x': unknown, 'weights': weights})
  assert {name: float(value) for name, (value, _) in again.items()} == values
  # Labels may be probabilities, like Pax's `label_probs`.
  probs = jax.nn.one_hot(batch['y'], 7)
  again, _ = run(variables, batch | {'y': probs, 'weights': weights})
  assert {name: float(value) for name, (value, _) in again.items()} == (
    pytest.approx(values, rel=1e-6)
  )
  # If there are no weights, all rows count equally.
  metrics, _ = run(variables, batch)
  assert float(metrics['avg_xent'][0]) == pytest.approx(nats.mean(), rel=1e-4)
  # Any label is among the five likeliest of three.
  few, batch = classifier(classes=3), batch | {'y': batch['y'] % 3}
  metrics, _ = jax.jit(few.apply)(random_variables(few), batch)
  assert metrics['acc5'] == (1, 64)


# Comparison with Praxis.

# Path of a layer's weights -> seed of their values; the bias has the next one.
SEEDS = {
  **{
    f'{kind}_attention/{part}': first + 2 * i
    for kind, first in (('self', 10), ('cross', 60))
    for i, part in enumerate(('query', 'key', 'value', 'post', 'per_dim_scale'))
  },
  'layer_norm': 30,
  'ff_layer/layer_norm': 40,
  'ff_layer/ffn_layer1': 50,
  'ff_layer/ffn_layer2': 52,
  'cross_layer_norm': 80,
  'final_ln': 90,
  'softmax': 92,
}


def _value(seed, *shape):
  flat = np.sin(seed + 0.7 * np.arange(math.prod(shape))) / 2
  return np.float32(flat.reshape(shape))


def praxis_variables(layer):
  """Returns the variables that Praxis had; 100 is added to a layer's seeds."""

  def one(path, weight):
    _, path, name = (key.key for key in path)
    found = re.fullmatch(r'(?:m/lm/|t/)(?:.*x_layers_(.)/)?(.*)', path)
    seed = SEEDS[found[2]] + (name in ('b', 'bias'))
    if not weight.repeat_prefix:
      return _value(seed + 100 * int(found[1] or 0), *weight.shape)
    (times,) = weight.repeat_prefix
    layers = [_value(seed + 100 * i, *weight.shape) for i in range(times)]
    return np.stack(layers)

  return jax.tree_util.tree_map_with_path(one, layer.abstract_init())


# The first row has two documents, and the second has padding.
TYPED_BATCH = {
  'ids': np.int32([[0, 3, 5, 0, 2, 6], [1, 2, 4, 4, 0, 0]]),
  'labels': np.int32([[3, 5, 1, 2, 6, 1], [2, 4, 4, 1, 0, 0]]),
  'weights': np.float32([[1] * 6, [1, 1, 1, 1, 0, 0]]),
  'paddings': np.float32([[0] * 6, [0, 0, 0, 0, 1, 1]]),
  'segment_ids': np.int32([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]]),
  'segment_pos': np.int32([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 0]]),
}
# The same batch with padding in between.
PADDED_BATCH = TYPED_BATCH | {
  'paddings': np.float32([[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1]]),
  'weights': np.float32([[1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]]),
}


def small_model(packed, stages=0, layers=1, **fields):
  """Returns a small language model, which is unrolled if it has no stages."""
  stack = transformers.StackedTransformer.HParams(
    num_layers=1 if stages else layers,
    model_dims=4,
    hidden_dims=8,
    num_heads=2,
    dim_per_head=2,
  )
  if stages:
    stack = transformers.PipelinedTransformer.HParams(
      pipeline_stage=stack,
      num_pipeline_stages=stages,
      num_pipeline_microbatches=2,
      circular_repeat=layers // stages,
    )
  lm = transformers.TransformerLm.HParams(
    vocab_size=7,
    model_dims=4,
    stacked_transformer_tpl=stack,
    packed_input=packed,
  )
  return models.LanguageModel.HParams(
    name='m', lm_tpl=lm, **fields
  ).Instantiate()


@pytest.mark.parametrize(
  ('packed', 'dtype', 'stages', 'layers', 'xent', 'scores', 'norm', 'padded'),
  [
    (
      *(True, 'float32', 0, 1),
      *(2.3749886, [-16.9188499, -6.8310375], None, 2.4180837),
    ),
    (
      *(False, 'float32', 0, 1),
      *(2.3630917, [-16.7998810, -6.8310375], None, 2.4012694),
    ),
    (
      *(True, 'float32', 2, 4),
      *(2.4607582, [-17.6246414, -6.9829416], 1.4602720, None),
    ),
    (
      *(True, 'bfloat16', 0, 2),
      *(2.4652052, [-17.7231674, -6.9288864], 1.4512119, None),
    ),
  ],
)
def test_language_models_are_those_of_praxis(
  packed, dtype, stages, layers, xent, scores, norm, padded
):
  """layers.LanguageModel of praxis 1.4.0, jax 0.4.26, Python 3.10.

  The models of `small_model`, causal, with sinusoidal positions, and with the
  weights and batches above. They have several StackedTransformer layers
  (`stages` 0), or a PipelinedTransformer with `stages` stages of one layer,
  num_pipeline_microbatches=2 and circular_repeat layers / stages. For bfloat16,
  Paxml's cast of weights and batch was applied.
  """
  model = small_model(packed, stages, layers, fprop_dtype=jnp.dtype(dtype))
  variables = praxis_variables(model)

  def loss(params, batch):
    found = model.apply({**variables, 'params': params}, batch)
    return found[0]['total_loss'][0], found

  program = jax.jit(jax.value_and_grad(loss, has_aux=True))
  params = variables['params']
  (_, (metrics, per_example)), grads = program(params, TYPED_BATCH)
  # Float32 rounds otherwise on other processors. Rounding to bfloat16 changes a
  # number by up to 4e-3, and differs in Praxis.
  close = functools.partial(
    np.testing.assert_allclose, rtol=1e-5 if dtype == 'float32' else 3e-3
  )
  close(metrics['avg_xent'][0], xent)
  close(per_example['scores'], scores)
  if norm is not None:
    close(jax.jit(optax.tree.norm)(grads), norm)
  if padded is not None:
    # Tokens see padding only in packed rows, where it belongs to a document.
    (_, (metrics, _)), _ = program(params, PADDED_BATCH)
    close(metrics['avg_xent'][0], padded)
  # The tolerance for bfloat16 would hide a computation in float32.
  run = functools.partial(model.apply, method='compute_predictions')
  hidden = jax.eval_shape(run, variables, TYPED_BATCH)['hidden']
  assert hidden.dtype == dtype


def test_a_layer_with_cross_attention_is_that_of_praxis():
  """layers.Transformer of praxis 1.4.0, jax 0.4.26, Python 3.10.

  input_dims=4, hidden_dims=8, num_heads=2, dim_per_head=2, a causal mask, no
  paddings, float32, in evaluation, with the weights and inputs above.
  """
  layer = transformers.Transformer.HParams(
    name='t',
    input_dims=4,
    hidden_dims=8,
    num_heads=2,
    dim_per_head=2,
    use_cross_attention=True,
  ).Instantiate()
  variables = praxis_variables(layer)
  x, source = _value(1, 1, 3, 4), _value(2, 1, 2, 4)
  run = functools.partial(layer.apply, do_eval=True)
  out = jax.jit(run)(variables, x, transformers.Context(source=source))
  # Processors differ in how they round float32.
  last = [0.2158439, -0.5555394, -1.0656438, -1.0745593]
  np.testing.assert_allclose(out[0, -1], last, rtol=1e-5, atol=5e-6)
  np.testing.assert_allclose(np.abs(out).sum(), 11.489978, rtol=1e-5)
  # Decoding token by token gives the same.
  cache = run(variables, 1, 3, source, method='empty_cache')
  extend = jax.jit(functools.partial(run, method='extend_step'))
  for i in range(3):
    step, cache = extend(variables, x[:, i : i + 1], cache, i)
    np.testing.assert_allclose(step, out[:, i : i + 1], rtol=1e-5, atol=1e-6)
