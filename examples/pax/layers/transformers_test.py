"""Transformers: against NumPy, in a loop and in a pipeline, and their parts.

`models_test` compares decoding, and further numbers of Praxis. Shapes: as in
transformers.py.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.pax import base_layer
from examples.pax.layers import activations
from examples.pax.layers import attentions
from examples.pax.layers import embedding_softmax
from examples.pax.layers import normalizations
from examples.pax.layers import repeats
from examples.pax.layers import resnets
from examples.pax.layers import transformers
from jaxline.parallel import partitioning

B, L, V, D, H, F = 4, 8, 11, 16, 2, 24

FULL = embedding_softmax.FullSoftmax.HParams()
TRAINED = embedding_softmax.TrainablePositionalEmbedding.HParams(
  max_seq_length=L
)


def _block(num_layers=1, heads=H, dropout=0.0, **attention):
  """Layers like Pax's on C4, with a cap low enough to have an effect."""
  atten = attentions.DotProductAttention.HParams(
    use_bias=False, atten_logit_cap=0.5, combine_qkv=True
  )
  return transformers.StackedTransformer.HParams(
    num_layers=num_layers,
    model_dims=D,
    hidden_dims=F,
    num_heads=heads,
    dropout_prob=dropout,
    transformer_layer_params_tpl=transformers.Transformer.HParams(
      tr_atten_tpl=atten.set(**attention),
      tr_fflayer_tpl=transformers.TransformerFeedForward.HParams(
        activation_tpl=activations.GELU.HParams()
      ),
    ),
  )


def _repeated(times, policy='nothing', **block):
  return transformers.StackedTransformerRepeated.HParams(
    block=_block(**block), x_times=times, checkpoint_policy=policy
  )


def _lm(stack, **fields):
  lm = transformers.TransformerLm.HParams(
    vocab_size=V,
    model_dims=D,
    softmax_tpl=embedding_softmax.SharedEmbeddingSoftmax.HParams(
      scale_sqrt_depth=True, soft_cap_logits=3.0
    ),
    stacked_transformer_tpl=stack,
  )
  return lm.set(**fields)


def _packed_lm(stack):
  lm = _lm(stack, packed_input=True)
  lm.softmax_tpl.chunks = 2
  return lm


def _llama():
  lm = _lm(
    _repeated(2, heads=4, num_kv_heads=2, use_rotary_position_emb=True),
    softmax_tpl=embedding_softmax.FullSoftmax.HParams(has_bias=False),
    separate_embedding_tpl=embedding_softmax.Embedding.HParams(),
    position_emb_tpl=None,
  )
  layer = lm.stacked_transformer_tpl.block.transformer_layer_params_tpl
  norm = normalizations.RmsNorm.HParams(epsilon=1e-2)
  layer.ln_tpl, lm.final_ln_tpl = norm.clone(), norm.clone()
  layer.tr_atten_tpl.atten_logit_cap = 0.0
  layer.tr_fflayer_tpl.set(
    ln_tpl=norm,
    use_gated_activation=True,
    has_bias=False,
    activation_tpl=activations.SiLU.HParams(),
  )
  return lm


def _random_like(layer):
  """Returns random variables."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: np.float32(rng.normal(size=x.shape) / 4),
    jax.eval_shape(layer.init, jax.random.key(0)),
  )


def _ids(batch=B, length=L, seed=1):
  rng = np.random.default_rng(seed)
  return rng.integers(0, V, [batch, length]).astype(np.int32)


WEIGHTS = np.float32(np.arange(B * L).reshape(B, L) > 2)  # Three weigh 0.
DOCUMENTS = {
  'segment_ids': np.int32([[1, 1, 1, 2, 2, 2, 2, 2]] * B),
  'segment_pos': np.int32([[0, 1, 2, 0, 1, 2, 3, 4]] * B),
}


def _loss(lm, **kwargs):
  """Returns a function `(variables, ids, rng) -> mean loss`."""
  layer = lm.Instantiate()

  def loss(variables, ids, rng):
    x = layer.apply(variables, ids, rng=rng, method='hidden', **kwargs)
    found = layer.apply(
      variables, x, ids[:, ::-1], WEIGHTS, method='compute_loss'
    )
    return found['total_loss'] / found['total_weight']

  return loss


# ---- Comparison with a separate program.


# The program uses NumPy, float64, and one head and query at a time. The weights
# that a layer has tell which kind it is.


def _numpy_norm(x, w, epsilon):
  if 'bias' not in w:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + epsilon) * w['scale']
  size = np.sqrt(x.var(-1, keepdims=True) + epsilon)
  return (x - x.mean(-1, keepdims=True)) / size * (1 + w['scale']) + w['bias']


def _numpy_cap(x, limit):
  return limit * np.tanh(x / limit) if limit else x


def _numpy_sinusoid(position):
  angles = position / np.geomspace(1, 1e4, D // 2)
  return np.array([*np.sin(angles), *np.cos(angles)])


def _numpy_turn(vector, position):
  """Rotates pairs as complex numbers."""
  half = len(vector) // 2
  pairs = vector[:half] + 1j * vector[half:]
  pairs = pairs * np.exp(1j * position / 1e4 ** (np.arange(half) / half))
  return np.concatenate([pairs.real, pairs.imag])


def _numpy_attention(w, x, cap, is_rotary):
  def part(i, name):
    matrix = w[name]['w'] if name in w else w['combined_qkv']['w'][:, i]
    return np.einsum('ld,dhk->lhk', x, matrix)

  q, k, v = map(part, range(3), ('query', 'key', 'value'))
  heads, width = q.shape[1:]
  out = np.zeros_like(x)
  scale_K = np.ones(width)
  if 'per_dim_scale' in w:
    scale_K = np.log2(1 + np.exp(w['per_dim_scale']['per_dim_scale']))
  for head in range(heads):
    group = head * k.shape[1] // heads
    for i in range(len(x)):
      query, keys = q[i, head], k[: i + 1, group]
      if is_rotary:
        query = _numpy_turn(query, i)
        keys = np.array([_numpy_turn(key, j) for j, key in enumerate(keys)])
      p = np.exp(_numpy_cap(keys @ (query * scale_K) / math.sqrt(width), cap))
      out[i] += p / p.sum() @ v[: i + 1, group] @ w['post']['w'][head]
  return out


def _numpy_feed_forward(w, x, activation):
  hidden = np.einsum('ld,d...->l...', x, w['ffn_layer1']['w'])
  hidden += w['ffn_layer1'].get('b', 0)
  if hidden.ndim == 3:
    hidden = activation(hidden[:, 0]) * hidden[:, 1]
  else:
    hidden = activation(hidden)
  return hidden @ w['ffn_layer2']['w'] + w['ffn_layer2'].get('b', 0)


def _numpy_gelu(x):
  inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
  return 0.5 * x * (1 + np.tanh(inner))


def _below(w, path):
  """Returns the weights whose names begin with a path, without it."""
  return {name.removeprefix(path): of for name, of in w.items() if path in name}


def _numpy_logits(variables, tokens_L, activation, epsilon, caps, is_rotary):
  """Returns the logits [L, V] of a language model of two layers."""
  params = jax.tree.map(np.float64, variables[base_layer.PARAMS])
  w = _below(params, 'transformer_lm/')
  x = w.get('embedding', w['softmax'])['emb_var'][tokens_L]
  if not is_rotary:
    x = x * math.sqrt(D) + [_numpy_sinusoid(i) for i in range(len(x))]
  stack = _below(w, 'transformer/repeat/sub/x_layers_0/')
  for i in range(2):
    own = jax.tree.map(lambda y, i=i: y[i], stack)
    normed = _numpy_norm(x, own['layer_norm'], epsilon)
    attention = _below(own, 'self_attention/')
    x = x + _numpy_attention(attention, normed, caps[0], is_rotary)
    normed = _numpy_norm(x, own['ff_layer/layer_norm'], epsilon)
    x = x + _numpy_feed_forward(_below(own, 'ff_layer/'), normed, activation)
  head = w['softmax']
  table_DV = head['w'] if 'w' in head else head['emb_var'].T
  logits = _numpy_norm(x, w['final_ln'], epsilon) @ table_DV
  return _numpy_cap(logits + head.get('bias', 0), caps[1])


@pytest.mark.parametrize(
  ('lm', 'documents', 'options'),
  [
    (
      _packed_lm(_repeated(2)),
      DOCUMENTS,
      (_numpy_gelu, 1e-6, (0.5, 3.0), False),
    ),
    (_llama(), {}, (lambda x: x / (1 + np.exp(-x)), 1e-2, (0.0, 0.0), True)),
  ],
  ids=['C4', 'Llama'],
)
def test_the_loss_is_that_of_another_program(lm, documents, options):
  ids = _ids()
  variables = _random_like(lm.Instantiate())
  actual = jax.jit(_loss(lm, **documents))(variables, ids, None)
  nats = []
  for row, labels in zip(
    np.asarray(ids), np.asarray(ids[:, ::-1]), strict=True
  ):
    # Documents that share a row do not see each other.
    parts = (slice(0, 3), slice(3, L)) if documents else (slice(0, L),)
    logits = np.concatenate(
      [_numpy_logits(variables, row[part], *options) for part in parts]
    )
    target = logits[np.arange(L), labels]
    nats.append(np.log(np.exp(logits).sum(-1)) - target)
  expected = np.average(nats, weights=np.float64(WEIGHTS))
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


# ---- Ways to run the same layers.


def _pipelined(stage, **sizes):
  return transformers.PipelinedTransformer.HParams(
    pipeline_stage=stage, num_pipeline_stages=2, **sizes
  )


def test_a_pipeline_drops_what_a_loop_does():
  def program(stack):
    lm = _lm(stack)
    variables = _random_like(lm.Instantiate())
    run = jax.jit(_loss(lm))
    return lambda seed: run(variables, _ids(), jax.random.key(seed))

  loop = program(_repeated(4, dropout=0.3))
  # Four layers in two rounds, with one layer per stage and one row at a time.
  pipeline = program(
    _pipelined(
      _block(1, dropout=0.3), pipeline_microbatch_size=1, circular_repeat=2
    )
  )
  np.testing.assert_allclose(pipeline(0), loop(0), rtol=1e-5)
  assert abs(loop(0) - loop(1)) > 1e-3


def test_axes_give_shardings_that_compute_the_same():
  lm = _lm(_pipelined(_repeated(1), num_pipeline_microbatches=2)).Instantiate()
  variables = _random_like(lm)
  expected = jax.jit(_lm(_repeated(2)).Instantiate().apply)(variables, _ids())
  boxed = jax.eval_shape(lm.boxed_init, jax.random.key(0))
  layer = 'transformer_lm/transformer/repeat/sub/x_layers_0'
  for preset, sizes, axes in (
    ('pipeline', {'stage': 2, 'data': 1}, ('stage', ('data', 'expert'), 'mdl')),
    ('fsdp', {'data': 2}, (None, ('data', 'expert'), None)),
  ):
    partitioner = partitioning.Partitioner.make(sizes, preset)
    specs = partitioner.specs(boxed)
    w = specs[base_layer.PARAMS][f'{layer}/ff_layer/ffn_layer1']['w']
    assert tuple(w) == axes
    with partitioner.activate():
      run = jax.jit(
        lm.apply,
        in_shardings=(partitioner.shardings(specs), partitioner.batch_sharding),
      )
      actual = jax.block_until_ready(run(variables, _ids()))
    assert len(actual.sharding.device_set) == 2
    np.testing.assert_allclose(actual, expected, atol=1e-5)


# ---- Parts.


@pytest.mark.parametrize(
  'fields',
  [
    {'residual_dropout_prob': 1 - 1e-6},
    {'relu_dropout_prob': 0.5},
    {'atten_dropout_prob': 0.5},
  ],
)
def test_a_layer_drops_in_training(fields):
  stack = _block()
  stack.transformer_layer_params_tpl.set(**fields)
  layer = stack.set(mask_self_attention=True).Instantiate()
  x = np.float32(np.random.default_rng(2).normal(size=[B, L, D]))
  run = functools.partial(layer.apply, _random_like(layer), x)
  whole = jax.jit(functools.partial(run, do_eval=True))()
  out = jax.jit(lambda key: run(rng=key))(jax.random.key(0))
  assert np.abs(out - whole).max() > 1e-3
  if 'residual_dropout_prob' in fields:  # Nothing is added to the input.
    np.testing.assert_array_equal(out, x)


def test_cross_attention_needs_a_source_and_only_it():
  x = jnp.zeros([B, L, D])
  for has, source, match in ((True, None, 'no source'), (False, x, 'a source')):
    layer = _block(1).set(use_cross_attention=has).Instantiate()
    context = transformers.Context(source=source)
    with pytest.raises(ValueError, match=match):
      jax.eval_shape(layer.apply, _random_like(layer), x, context)


@pytest.mark.parametrize(
  ('fields', 'method', 'args', 'match'),
  [
    # It has no table for an embedding.
    ({'softmax_tpl': FULL}, 'hidden', [_ids()], r"FullSoftmax.* 'emb_lookup'"),
    ({'packed_input': True}, 'hidden', [_ids()], 'there is no segment_ids'),
    ({}, 'hidden', [_ids(), _ids()], 'a value of segment_ids'),
    (
      {'stacked_transformer_tpl': _repeated(2, 'nothin')},
      'hidden',
      [_ids()],
      r"remat must be one of .*; got 'nothin'",
    ),
    ({'position_emb_tpl': TRAINED}, 'hidden', [_ids(length=L + 1)], '9 tokens'),
    ({'position_emb_tpl': TRAINED}, 'empty_cache', [1, L + 1], '9 tokens'),
  ],
)
def test_what_a_model_does_not_take_is_refused(fields, method, args, match):
  layer = _lm(_block(), **fields).Instantiate()
  with pytest.raises((ValueError, AttributeError), match=match):
    layer.apply(_random_like(layer), *args, method=method)


def test_defaults_are_those_of_praxis():
  # The defaults are from praxis 1.4.0. Registered experiments set other values.
  ff = transformers.TransformerFeedForward.HParams()
  assert isinstance(ff.activation_tpl, activations.ReLU.HParams)
  assert not attentions.DotProductAttention.HParams().combine_qkv
  assert not transformers.StackedTransformer.HParams().mask_self_attention
  save_nothing = repeats.AutodiffCheckpointType.SAVE_NOTHING
  for layer in (repeats.Repeat, transformers.StackedTransformerRepeated):
    assert layer.HParams().checkpoint_policy == save_nothing == 'full'
  assert normalizations.BatchNorm.HParams().decay == 0.999
  network = resnets.ResNet.HParams()
  assert network.conv_params.batch_norm_tpl.decay == 0.9
  assert not network.block_params.zero_init_residual
  assert TRAINED.cls.HParams().max_seq_length == 10_240
