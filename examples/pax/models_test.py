"""Tests of metrics against NumPy, and of decoding against a cacheless loop."""

import functools
import math

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
    tr_atten_tpl=attentions.DotProductAttention.HParams(combine_qkv=True),
    tr_fflayer_tpl=transformers.TransformerFeedForward.HParams(
      activation_tpl=activations.GELU.HParams()
    ),
  ),
)


class Table(base_layer.BaseLayer):
  """The smallest language model, which predicts from one token."""

  class HParams(base_layer.BaseLayer.HParams):
    """Attributes: packed_input: Whether it needs segments."""

    packed_input: bool = False

  def setup(self):
    self.create_child(
      'softmax',
      embedding_softmax.SharedEmbeddingSoftmax.HParams(
        num_classes=VOCAB, input_dims=16
      ),
    )

  def hidden(self, ids, **segments):
    self.add_aux_loss('one', jnp.float32(0.25), 3.0)
    self.add_aux_loss('other', 0.625)
    x = self.softmax.emb_lookup(ids)
    for factor, entry in zip((1.0, 100.0), segments.values(), strict=False):
      x += factor * entry.astype(jnp.float32)[..., None]
    return x

  def compute_loss(self, x, labels, weights):
    return self.softmax.compute_loss(x, labels, weights)


def table_model(**kwargs):
  return models.LanguageModel.HParams(
    lm_tpl=Table.HParams(**kwargs)
  ).Instantiate()


def sequence_model():
  network = transformers.TransformerEncoderDecoder.HParams(
    encoder_stacked_transformer_tpl=STACK,
    decoder_stacked_transformer_tpl=STACK,
    **SIZES,
  )
  return models.SequenceModel.HParams(model_tpl=network).Instantiate()


def tokens(seed, *shape):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32)


def random_variables(model):
  """Returns variables whose predictions are far from uniform.

  Compiling `init` would take longer than the rest of a test.
  """
  rng = np.random.default_rng(0)

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


def check_token_metrics(metrics, per_example, logits, labels, weights, aux=0.0):
  nats, expected = expected_metrics(logits, labels, weights)
  values = {name: float(value) for name, (value, _) in metrics.items()}
  assert values == pytest.approx(
    {
      'total_loss': expected['avg_xent'] + aux,
      'avg_xent': expected['avg_xent'],
      'aux_loss': aux,
      'log_pplx': expected['avg_xent'],
      'fraction_of_correct_next_step_preds': expected['correct'],
      'num_predictions': expected['total'],
    },
    rel=1e-5,
  )
  counts = {name: float(weight) for name, (_, weight) in metrics.items()}
  aux_weight, batch_weight = (
    counts.pop('aux_loss'),
    counts.pop('num_predictions'),
  )
  assert (aux_weight, batch_weight) == (2.0 if aux else 1.0, 1.0)
  assert set(counts.values()) == {expected['total']}
  np.testing.assert_allclose(per_example['per_token_xent'], nats, rtol=1e-4)
  np.testing.assert_allclose(
    per_example['scores'], -(nats * np.float64(weights)).sum(axis=1), rtol=1e-4
  )
  np.testing.assert_array_equal(per_example['labels'], labels)


def test_language_model_metrics():
  model = table_model()
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

  (value, (metrics, per_example)), _ = loss(variables, batch)
  assert value == metrics['total_loss'][0]
  softmax = variables['params']['language_model/lm/softmax']
  table, bias = (np.float64(softmax[name]) for name in ('emb_var', 'bias'))
  logits = table[np.asarray(batch['ids'])] @ table.T + bias
  # One token has weight 0.5, and one row is padding.
  check_token_metrics(
    metrics, per_example, logits, batch['labels'], batch['weights'], aux=0.875
  )
  # If all weights are 0, there is no NaN.
  nothing = batch | {'weights': jnp.zeros_like(batch['weights'])}
  (_, (metrics, _)), grads = loss(variables, nothing)
  assert metrics['avg_xent'] == (0, 0)
  assert metrics['num_predictions'] == (0, 1)
  assert all((g == 0).all() for g in jax.tree.leaves(grads))


def test_rows_have_weights_where_tokens_have_none():
  model = table_model()
  variables = random_variables(model)
  batch = {'ids': tokens(0, 2, 4), 'labels': tokens(1, 2, 4)}

  @jax.jit
  def run(batch):
    metrics, per_example = model.apply(variables, batch)
    return metrics['avg_xent'], per_example['per_token_xent']

  (mean, weight), xent = run(batch)
  assert weight == 8
  assert mean == pytest.approx(float(xent.mean()), rel=1e-5)
  (mean, weight), xent = run(batch | {'weights': jnp.float32([0, 1])})
  assert weight == 4
  assert mean == pytest.approx(float(xent[1].mean()), rel=1e-5)


def test_packed_input_is_handed_on():
  batch = {
    'ids': jnp.zeros([1, 3], jnp.int32),
    'segment_ids': jnp.int32([[1, 1, 2]]),
    'segment_pos': jnp.int32([[0, 1, 0]]),
  }

  def hidden(**kwargs):
    model = table_model(**kwargs)
    return model.apply(
      random_variables(model), batch, method='compute_predictions'
    )['hidden'][0, :, 0]

  np.testing.assert_allclose(
    hidden(packed_input=True) - hidden(), [1, 101, 2], rtol=1e-5
  )
  del batch['segment_pos']
  with pytest.raises(
    ValueError,
    match=r"lacks \['segment_pos'\]; it has \['ids', 'segment_ids'\]",
  ):
    hidden(packed_input=True)


def continue_without_cache(next_logits, prompts, steps, stop):
  """Decodes each prompt greedily by itself."""
  found = []
  for row, prompt in enumerate(prompts):
    new, score = [], 0.0
    while len(new) < steps and stop not in new:
      logp = log_softmax(next_logits(row, [*prompt, *new]))
      new.append(int(logp.argmax()))
      score += logp.max()
    found.append((new, score))
  return found


def check_decoded(decoded, expected):
  for row, (new, score) in enumerate(expected):
    assert decoded.lengths[row, 0] == len(new)
    assert decoded.ids[row, 0, : len(new)].tolist() == new
    assert decoded.scores[row, 0] == pytest.approx(score, rel=1e-3)


PROMPTS = [[3, 1, 4, 1], [5], [9, 2]]
LENGTH = 10


def padded(rows):
  ids = np.zeros([len(rows), max(map(len, rows))], np.int32)
  for row, prompt in enumerate(rows):
    ids[row, : len(prompt)] = prompt
  return {'ids': jnp.asarray(ids), 'lengths': jnp.int32([*map(len, rows)])}


def test_language_model_decodes():
  lm = transformers.TransformerLm.HParams(
    stacked_transformer_tpl=STACK, **SIZES
  )
  model = models.LanguageModel.HParams(lm_tpl=lm).Instantiate()
  variables = random_variables(model)
  network = lm.clone().set(name='language_model/lm').Instantiate()
  forward = jax.jit(lambda ids: network.apply(variables, ids))

  def next_logits(row, prefix):
    del row
    ids = np.zeros([1, LENGTH], np.int32)
    ids[0, : len(prefix)] = prefix  # Tokens do not see later ones.
    return forward(ids)[0, len(prefix) - 1]

  steps = LENGTH - max(map(len, PROMPTS))
  ((free, _),) = continue_without_cache(next_logits, PROMPTS[:1], steps, -1)
  stop = next(token for token in free if token != free[0])
  expected = continue_without_cache(next_logits, PROMPTS, steps, stop)
  assert 1 < len(expected[0][0]) < steps
  assert len({tuple(new) for new, _ in expected}) == len(PROMPTS)
  # The default decoder is the model's.
  greedy = models.GreedyDecoderHParams(max_decode_steps=steps, eos_id=stop)
  own = model.hparams.clone().set(decoder_tpl=greedy).Instantiate()
  check_decoded(jax.jit(own.decode)(variables, padded(PROMPTS)), expected)


def test_sequence_model_is_evaluated_and_decodes():
  model = sequence_model()
  variables = random_variables(model)
  source, target = tokens(0, 2, 5), tokens(1, 2, LENGTH)
  paddings = jnp.zeros([2, 5]).at[0, 3:].set(1)
  softmax = variables['params']['sequence_model/model/softmax']

  @jax.jit
  def run(source, target):
    batch = {'src': {'ids': source, 'paddings': paddings}, 'tgt': target}
    predictions = model.apply(variables, batch, method='compute_predictions')
    metrics, per_example = model.apply(
      variables, predictions, batch, method='compute_loss'
    )
    logits = predictions['hidden'] @ softmax['w'] + softmax['bias'][None, None]
    return metrics, per_example, logits

  target = {
    'ids': target,
    'labels': tokens(2, 2, LENGTH),
    'weights': jnp.ones([2, LENGTH]).at[0, 3:].set(0),
  }
  metrics, per_example, logits = run(source, target)
  check_token_metrics(
    metrics, per_example, logits, target['labels'], target['weights']
  )
  # Padding of the source does not count.
  other = source.at[0, 3:].set((source[0, 3:] + 1) % VOCAB)
  assert run(other, target)[0]['avg_xent'] == metrics['avg_xent']

  # A padding row does not count either.
  batch = {'tgt': {'labels': target['labels']}, 'weights': jnp.float32([0, 1])}
  x = jnp.ones([2, LENGTH, softmax['w'].shape[0]])
  found, _ = jax.jit(
    lambda batch: model.apply(
      variables, {'hidden': x}, batch, method='compute_loss'
    )
  )(batch)
  assert found['num_predictions'] == (LENGTH, 1)

  def next_logits(row, prefix):
    ids = np.zeros([2, LENGTH], np.int32)
    ids[row, : len(prefix)] = prefix
    return run(source, target | {'ids': ids})[2][row, len(prefix) - 1]

  steps, prompts = 5, [[0], [0, 6]]
  expected = continue_without_cache(next_logits, prompts, steps, stop=-1)
  options = models.GreedyDecoderHParams(max_decode_steps=steps).to_options()
  batch = {'src': {'ids': source, 'paddings': paddings}, 'tgt': padded(prompts)}
  decode = jax.jit(model.decode, static_argnames='options')
  check_decoded(decode(variables, batch, options=options), expected)


def test_decoder_hparams_are_options():
  sample = models.SampleDecoderHParams(
    max_decode_steps=4, num_samples=2, temperature=0.5, k=3, p=0.9, eos_id=1
  )
  assert sample.to_options() == decoding.Options(
    method='sample',
    max_decode_steps=4,
    num_samples=2,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    stop_ids=(1,),
  )
  assert (
    models.SampleDecoderHParams(max_decode_steps=4).to_options().top_k == 40
  )
  beam = models.BeamSearchHParams(
    max_decode_steps=4, beam_size=4, eos_id=(1, 2)
  )
  assert beam.to_options() == decoding.Options(
    method='beam',
    max_decode_steps=4,
    beam_size=4,
    length_norm_alpha=0.8,
    stop_ids=(1, 2),
  )
  with pytest.raises(ValueError, match='max_decode_steps is 0'):
    models.GreedyDecoderHParams().to_options()
  with pytest.raises(ValueError, match='top_k is None'):
    models.SampleDecoderHParams(max_decode_steps=1, k=None).to_options()
  with pytest.raises(ValueError, match="method is ''; expected one of"):
    models.DecoderHParams(max_decode_steps=1).to_options()


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


def test_acc5_of_fewer_classes_is_1():
  model = classifier(classes=3)
  batch = {'x': jnp.ones([2, 3]), 'y': jnp.int32([0, 2])}
  metrics, _ = jax.jit(model.apply)(random_variables(model), batch)
  assert metrics['acc5'] == (1, 2)


def test_a_model_needs_its_network():
  with pytest.raises(TypeError, match='HParams of a layer; got None'):
    models.LanguageModel.HParams(lm_tpl=None).Instantiate().init(KEY)
  # The default network has no sizes, as in Praxis.
  with pytest.raises(ValueError, match=r'softmax/emb_var.* still 0'):
    models.LanguageModel.HParams().Instantiate().init(KEY)
  assert issubclass(models.BaseModel, base_layer.BaseLayer)


def _value(seed, *shape):
  flat = np.sin(seed + 0.7 * np.arange(math.prod(shape))) / 2
  return jnp.float32(flat.reshape(shape))


# The first row has two documents, and the second has padding.
TYPED_BATCH = {
  'ids': jnp.int32([[0, 3, 5, 0, 2, 6], [1, 2, 4, 4, 0, 0]]),
  'labels': jnp.int32([[3, 5, 1, 2, 6, 1], [2, 4, 4, 1, 0, 0]]),
  'weights': jnp.float32([[1] * 6, [1, 1, 1, 1, 0, 0]]),
  'paddings': jnp.float32([[0] * 6, [0, 0, 0, 0, 1, 1]]),
  'segment_ids': jnp.int32([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]]),
  'segment_pos': jnp.int32([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 0]]),
}
# The same batch with padding in between.
PADDED_BATCH = TYPED_BATCH | {
  'paddings': jnp.float32([[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1]]),
  'weights': jnp.float32([[1, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]]),
}


def _typed_layer(seed=0):
  """Returns the weights of one layer."""
  return (
    {
      f'self_attention/{part}': {
        'w': _value(seed + 10 + 2 * i, 4, 2, 2),
        'b': _value(seed + 11 + 2 * i, 2, 2),
      }
      for i, part in enumerate(('query', 'key', 'value'))
    }
    | {
      'self_attention/post': {
        'w': _value(seed + 16, 2, 2, 4),
        'b': _value(seed + 17, 4),
      },
      'self_attention/per_dim_scale': {'per_dim_scale': _value(seed + 18, 2)},
    }
    | {
      f'{name}layer_norm': {'scale': _value(i, 4), 'bias': _value(i + 1, 4)}
      for name, i in (('', seed + 30), ('ff_layer/', seed + 40))
    }
    | {
      f'ff_layer/ffn_layer{1 + i}': {
        'w': _value(seed + 50 + 2 * i, *shape),
        'b': _value(seed + 51 + 2 * i, shape[1]),
      }
      for i, shape in enumerate(((4, 8), (8, 4)))
    }
  )


def small_model(packed, stages=0, layers=1, **fields):
  """Returns a small language model and its variables.

  Args:
    packed: Whether its rows are packed.
    stages: Stages of a pipeline. If 0, the layers are unrolled.
    layers: Number of layers.
    **fields: Other fields of the model.
  """
  stack = transformers.StackedTransformer.HParams(
    num_layers=1 if stages else layers,
    model_dims=4,
    hidden_dims=8,
    num_heads=2,
    dim_per_head=2,
  )
  params = {
    'final_ln': {'scale': _value(90, 4), 'bias': _value(91, 4)},
    'softmax': {'emb_var': _value(92, 7, 4), 'bias': _value(93, 7)},
  }
  each = [_typed_layer(100 * i) for i in range(layers)]
  places = {f'x_layers_{i}': weights for i, weights in enumerate(each)}
  if stages:
    stack = transformers.PipelinedTransformer.HParams(
      pipeline_stage=stack,
      num_pipeline_stages=stages,
      num_pipeline_microbatches=2,
      circular_repeat=layers // stages,
    )
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    places = {'repeat/sub/x_layers_0': stacked}
  for place, weights in places.items():
    for name, of in weights.items():
      params[f'transformer/{place}/{name}'] = of
  lm = transformers.TransformerLm.HParams(
    vocab_size=7,
    model_dims=4,
    stacked_transformer_tpl=stack,
    packed_input=packed,
  )
  model = models.LanguageModel.HParams(
    name='m', lm_tpl=lm, **fields
  ).Instantiate()
  params = {f'm/lm/{name}': of for name, of in params.items()}
  assert jax.tree.structure(params) == jax.tree.structure(
    model.abstract_init()['params']
  )
  return model, {'params': params, 'non_trainable': {}}


@pytest.mark.parametrize(
  ('dtype', 'stages', 'layers', 'xent', 'scores', 'norm'),
  [
    ('float32', 2, 4, 2.4607582, [-17.6246414, -6.9829416], 1.4602720),
    ('bfloat16', 0, 2, 2.4652052, [-17.7231674, -6.9288864], 1.4512119),
    pytest.param(
      *('bfloat16', 2, 2, 2.4653914, [-17.7250252, -6.9288888], 1.4508504),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      *('float32', 0, 2, 2.4651945, [-17.7229710, -6.9289770], 1.4511548),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      *('float32', 2, 2, 2.4651945, [-17.7229710, -6.9289770], 1.4511551),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      *('bfloat16', 2, 4, 2.4609456, [-17.6278229, -6.9816332], 1.4600513),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_narrow_types_and_pipelines_are_those_of_praxis(
  dtype, stages, layers, xent, scores, norm
):
  """layers.LanguageModel of praxis 1.4.0, jax 0.4.26, Python 3.10.

  The model is the one below, causal and packed, in training. It has several
  StackedTransformer layers (`stages` 0), or a PipelinedTransformer with
  `stages` stages of one layer, num_pipeline_microbatches=2 and circular_repeat
  layers / stages. For bfloat16, Paxml's cast of weights and batch was applied.
  """
  model, variables = small_model(
    True, stages, layers, fprop_dtype=jnp.dtype(dtype)
  )

  def loss(params):
    found = model.apply({**variables, 'params': params}, TYPED_BATCH)
    return found[0]['total_loss'][0], found

  program = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, (metrics, per_example)), grads = program(variables['params'])
  # The tolerance for bfloat16 would hide a computation in float32.
  hidden = jax.eval_shape(
    functools.partial(model.apply, method='compute_predictions'),
    variables,
    TYPED_BATCH,
  )['hidden']
  assert hidden.dtype == dtype
  # Rounding to bfloat16 changes a number by up to 4e-3, and differs in Praxis.
  close = functools.partial(
    np.testing.assert_allclose, rtol=1e-5 if dtype == 'float32' else 3e-3
  )
  close(metrics['avg_xent'][0], xent)
  close(per_example['scores'], scores)
  close(optax.tree.norm(grads), norm)


@pytest.mark.parametrize(
  ('packed', 'xent', 'scores', 'padded'),
  [
    (True, 2.3749886, [-16.9188499, -6.8310375], 2.4180837),
    (False, 2.3630917, [-16.7998810, -6.8310375], 2.4012694),
  ],
)
def test_language_models_are_those_of_praxis(packed, xent, scores, padded):
  """layers.LanguageModel of praxis 1.4.0, jax 0.4.26, Python 3.10.

  One StackedTransformer layer, model_dims=4, hidden_dims=8, num_heads=2,
  dim_per_head=2, vocab_size=7, sinusoidal positions, float32, in evaluation,
  with the weights and the batch above.
  """
  model, variables = small_model(packed)
  run = jax.jit(functools.partial(model.apply, do_eval=True))
  metrics, per_example = run(variables, TYPED_BATCH)
  # Float32 rounds otherwise on other processors.
  np.testing.assert_allclose(metrics['avg_xent'][0], xent, rtol=1e-5)
  np.testing.assert_allclose(per_example['scores'], scores, rtol=1e-5)
  # Tokens see padding only in packed rows, where it belongs to a document.
  metrics, _ = run(variables, PADDED_BATCH)
  np.testing.assert_allclose(metrics['avg_xent'][0], padded, rtol=1e-5)
