"""Each way to run the language model gives the same numbers.

`hf_test.py` compares them with transformers. Shapes: as in model.py.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import transformer
from jaxline.parallel import partitioning

from . import model

TINY = model.ModelConfig(
  vocab_size=11,
  num_layers=2,
  embed_dim=16,
  num_heads=2,
  mlp_dim=24,
  max_length=12,
)
# Options of a layer. `hf_test.py` compares most of them with transformers.
OPTIONS = {
  'learned': {'positions': 'learned', 'feed_forward': 'swiglu'},
  'bigrams': {'bigram_rows': 7},
  'grouped': {'num_kv_heads': 1, 'qkv_bias': True, 'qk_norm': True},
  'windows': {'windows': (3, 0), 'local_rotary_base': 1e2, 'num_layers': 4},
  'gemma': {
    'num_kv_heads': 1,
    'head_size': 12,
    'windows': (4,),
    'rotary_scaling': (2.0,),
    'norm_offset': True,
    'post_norms': True,
    'embedding_scale': True,
    'attention_cap': 5.0,
    'logits_cap': 3.0,
    'query_scale': 0.2,
    'tie_embeddings': False,
    'feed_forward': 'geglu',
  },
}
_init = jax.jit(model.init, static_argnums=1)
apply = jax.jit(model.apply, static_argnums=2, static_argnames='is_training')
_decode_step = jax.jit(model.decode_step, static_argnums=4)


@functools.cache
def params_of(config):
  # Norm scales start at one, where a forgotten one would not be noticed.
  params = partitioning.unbox(_init(jax.random.key(0), config))
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: np.asarray(x + 0.1 * rng.normal(size=x.shape), np.float32),
    jax.device_get(params),
  )


def decoded(params, tokens, config):
  """Returns the logits of tokens decoded in two pieces, then one by one."""
  length = tokens.shape[1]
  half = (length - 1) // 2  # Pieces of one length compile once.
  cache, pieces = model.empty_cache(config, *tokens.shape), []
  for piece in np.split(tokens, [half, *range(2 * half, length)], axis=1):
    start = sum(x.shape[1] for x in pieces)
    logits, cache = _decode_step(params, piece, cache, start, config)
    pieces.append(logits)
  return np.concatenate(pieces, axis=1)


def _tokens(config, batch=2, length=12, seed=1):
  rng = np.random.default_rng(seed)
  shape = (batch, length)
  return rng.integers(0, config.vocab_size, shape).astype(np.int32)


def _mean_loss(params, tokens, config, weights=None, **kwargs):
  weights = np.ones(tokens.shape, np.float32) if weights is None else weights
  args = params, tokens, tokens[:, ::-1], weights, config
  total, weight, _ = model.loss(*args, **kwargs)
  return total / weight


@functools.cache
def _loss_and_grads(config):
  tokens = _tokens(config)
  weights = np.ones(tokens.shape, np.float32)
  weights[0, :3] = 0
  mean = lambda params: _mean_loss(params, tokens, config, weights)
  return jax.jit(jax.value_and_grad(mean))(params_of(TINY))


def _assert_trees_close(actual, expected, **tolerance):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected
  )


def _numpy_norm(x, scale):
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def _numpy_turn(vector, position):
  """Turns pairs as complex numbers."""
  half = len(vector) // 2
  pairs = vector[:half] + 1j * vector[half:]
  pairs = pairs * np.exp(1j * position / 1e4 ** (np.arange(half) / half))
  return np.concatenate([pairs.real, pairs.imag])


def _numpy_attention(q_LK, k_LK, v_LK):
  out = []
  for i in range(len(q_LK)):
    scores = k_LK[: i + 1] @ q_LK[i] / math.sqrt(q_LK.shape[1])
    p = np.exp(scores) / np.exp(scores).sum()
    out.append(p @ v_LK[: i + 1])
  return np.array(out)


def _numpy_logits(params, tokens_L, config):
  w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = w['embedding']['tokens'][tokens_L]
  if config.bigram_rows:
    for i, token in enumerate(tokens_L):
      before = tokens_L[i - 1] if i else config.vocab_size
      mixed = int(token) * 2654435761 % 2**32 ^ int(before) * 2246822519 % 2**32
      mixed = (mixed ^ mixed >> 15) * 2246822519 % 2**32
      x[i] += w['embedding']['bigrams'][(mixed ^ mixed >> 13) % 7]
  if config.positions == 'learned':
    x = x + w['embedding']['positions'][: len(tokens_L)]
  for n in range(config.num_layers):
    attention, feed_forward = w['layers/attention'], w['layers/feed_forward']
    h = _numpy_norm(x, w['layers/attention_norm']['scale'][n])
    branch = 0
    for head in range(config.num_heads):
      q, k, v = (h @ attention['qkv'][n, :, i, head] for i in range(3))
      if config.positions == 'rotary':
        q = np.array([_numpy_turn(q[i], i) for i in range(len(q))])
        k = np.array([_numpy_turn(k[i], i) for i in range(len(k))])
      branch = branch + _numpy_attention(q, k, v) @ attention['out'][n, head]
    x = x + branch
    h = _numpy_norm(x, w['layers/feed_forward_norm']['scale'][n])
    a = h @ feed_forward['in'][n, :, 0]
    if config.feed_forward == 'swiglu':
      a = a / (1 + np.exp(-a)) * (h @ feed_forward['in'][n, :, 1])
    else:
      inner = math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
      a = 0.5 * a * (1 + np.tanh(inner))
    x = x + a @ feed_forward['out'][n]
  return _numpy_norm(x, w['final_norm']['scale']) @ w['embedding']['tokens'].T


@pytest.mark.parametrize('name', ['learned', 'bigrams'])
def test_logits_match_an_independent_program(name):
  """NumPy, float64, one position at a time."""
  config = dataclasses.replace(TINY, **OPTIONS[name])
  params, tokens = params_of(config), _tokens(config)
  expected = np.stack([_numpy_logits(params, row, config) for row in tokens])
  np.testing.assert_allclose(apply(params, tokens, config), expected, atol=2e-5)


@pytest.mark.parametrize('name', ['learned', 'bigrams'])
def test_documents_packed_into_a_row_cost_what_they_cost_alone(name):
  config = dataclasses.replace(TINY, **OPTIONS[name])
  params, lengths = params_of(config), (5, 1, 6)
  tokens = [_tokens(config, 1, n, seed=n) for n in lengths]
  mean_loss = jax.jit(_mean_loss, static_argnums=2)
  alone = sum(
    n * mean_loss(params, x, config)
    for n, x in zip(lengths, tokens, strict=True)
  )
  # The targets of a document are its tokens from behind.
  packed = np.concatenate(tokens, axis=1)
  targets = np.concatenate([x[:, ::-1] for x in tokens], axis=1)
  ones = np.ones((1, 12), np.float32)
  positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
  loss = jax.jit(model.loss, static_argnums=4)
  total, weight, _ = loss(
    *(params, packed, targets, ones, config),
    segment_ids_BL=np.repeat(np.arange(1, 4, dtype=np.int32), lengths)[None],
    positions_BL=positions[None],
  )
  assert weight == 12
  np.testing.assert_allclose(total, alone, rtol=1e-5)
  together, *_ = loss(params, packed, targets, ones, config)
  assert abs(together - alone) > 0.01  # Unless they see each other.


def test_initial_weights_and_loss():
  config = dataclasses.replace(TINY, embed_dim=128, mlp_dim=256, vocab_size=257)
  typed = _init(jax.random.key(3), config)
  raw = _init(jax.random.PRNGKey(3), config)
  _assert_trees_close(typed, raw, rtol=0)
  params = partitioning.unbox(typed)
  assert np.std(params['embedding']['tokens']) == pytest.approx(0.02, rel=0.02)
  first, second = params['layers/attention']['qkv']
  assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02
  assert np.std(first) == pytest.approx(128**-0.5, rel=0.02)
  out = params['layers/feed_forward']['out']
  assert np.std(out) == pytest.approx((256 * 2 * 2) ** -0.5, rel=0.02)
  # Nothing is known yet: the loss is that of a uniform guess.
  tokens = _tokens(config, batch=16)
  logits = np.asarray(apply(params, tokens, config), np.float64)
  target = np.take_along_axis(logits, np.asarray(tokens[:, ::-1, None]), -1)
  nats = np.log(np.exp(logits).sum(-1)) - target[..., 0]
  assert nats.mean() == pytest.approx(math.log(257), abs=0.06)


@pytest.mark.parametrize(
  'changes',
  [
    {'remat': 'dots'},
    {'remat': 'full', 'scan_layers': True},
    {'remat': 'offload', 'scan_layers': True},
    {'loss_chunks': 3},
  ],
  ids=str,
)
def test_how_it_is_computed_changes_neither_loss_nor_gradients(changes):
  config = dataclasses.replace(TINY, **changes)
  _assert_trees_close(
    _loss_and_grads(config), _loss_and_grads(TINY), rtol=1e-4, atol=1e-6
  )


def test_a_pipeline_over_two_devices_changes_neither_loss_nor_gradients(
  monkeypatch,
):
  flash = functools.partial(transformer.splash_attention, interpret=True)
  monkeypatch.setitem(transformer.FLASH, 'cpu', flash)
  # Learned positions, so that of segments and rows all is in use. Scanned
  # layers compile in a fraction of the time.
  options = OPTIONS['learned'] | {'num_layers': 4, 'max_length': 128}
  config = dataclasses.replace(TINY, **options, dropout=0.3, scan_layers=True)
  pipelined = dataclasses.replace(
    config,
    pipeline_stages=2,
    pipeline_microbatches=2,
    pipeline_repeats=2,
    remat='dots',
    loss_chunks=2,
  )
  params, tokens = params_of(config), _tokens(config, 6, 128)
  rows = {
    'rng': jax.random.key(5),
    'is_training': True,
    'segment_ids_BL': np.sort(_tokens(config, 6, 128, seed=2) % 3, axis=1),
    'positions_BL': tokens,
  }

  def loss_and_grads(config, **options):
    mean = lambda params: _mean_loss(params, tokens, config, **rows)
    run = jax.jit(jax.value_and_grad(mean), **options)
    return jax.device_get(run(params))

  sizes = {'stage': 2, 'data': 1}
  partitioner = partitioning.Partitioner.make(sizes, 'pipeline')
  specs = partitioner.specs(jax.eval_shape(_init, jax.random.key(0), config))
  places = (partitioner.shardings(specs),)
  expected = loss_and_grads(config)
  # A pipeline is a `vmap` over its stages, in which flash attention is a
  # `shard_map` over all devices.
  for attention in 'einsum', 'flash':
    changed = dataclasses.replace(pipelined, attention=attention)
    with partitioner.activate():
      actual = loss_and_grads(changed, in_shardings=places)
    _assert_trees_close(actual, expected, rtol=1e-4, atol=1e-6)
  with pytest.raises(ValueError, match=r'batch of 1 rows .* divide into 2'):
    apply(params, tokens[:1], pipelined)


@pytest.mark.parametrize(
  ('name', 'scan_layers'),
  [('grouped', True), ('learned', True), ('bigrams', False)],
)
def test_rows_decode_from_positions_of_their_own(name, scan_layers):
  options = OPTIONS[name] | {'scan_layers': scan_layers}
  config = dataclasses.replace(TINY, **options)
  params, tokens = params_of(config), np.asarray(_tokens(config, batch=3))
  whole = apply(params, tokens, config)  # Of which each prefix is a part.
  # Prompts of 2, 5 and 3 tokens, padded with nonsense.
  at = np.array([2, 5, 3])
  prompts = np.where(np.arange(5) < at[:, None], tokens[:, :5], 7)
  cache = model.empty_cache(config, 3, 9)
  logits, cache = _decode_step(params, prompts, cache, 0, config)
  assert logits.dtype == jnp.float32
  close = functools.partial(np.testing.assert_allclose, atol=1e-5)
  for row, length in enumerate(at):
    close(logits[row, :length], whole[row, :length])
  for _ in range(6):  # The second row runs past the end of the cache.
    new = np.take_along_axis(tokens, at[:, None], axis=1)
    logits, cache = _decode_step(params, new, cache, at, config)
    for row, position in enumerate(at):
      if position < 9:
        close(logits[row, 0], whole[row, position])
    at += 1


def test_decoding_drops_no_token_of_an_expert():
  free = dataclasses.replace(
    TINY, num_experts=4, experts_per_token=2, num_layers=1
  )
  config = dataclasses.replace(free, expert_capacity=0.25)
  params, tokens = params_of(free), _tokens(free)
  whole = apply(params, tokens, free)
  assert not np.allclose(apply(params, tokens, config), whole, atol=1e-2)
  cache = model.empty_cache(config, *tokens.shape)
  found, _ = _decode_step(params, tokens, cache, 0, config)
  np.testing.assert_allclose(found, whole, atol=1e-5)


def test_bfloat16_keeps_float32_weights_loss_and_gradients():
  config = dataclasses.replace(TINY, dtype='bfloat16')
  loss, grads = _loss_and_grads(config)
  exact_loss, exact_grads = _loss_and_grads(TINY)
  dtypes = {x.dtype for x in jax.tree.leaves((params_of(config), loss, grads))}
  assert dtypes == {jnp.dtype('float32')}
  assert loss != exact_loss  # It did compute in bfloat16.
  assert float(loss) == pytest.approx(float(exact_loss), rel=1e-2)
  for a, b in zip(
    jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True
  ):
    assert np.linalg.norm(np.ravel(a - b)) < 0.05 * np.linalg.norm(np.ravel(b))
  chunked = dataclasses.replace(config, loss_chunks=2, remat='dots')
  np.testing.assert_allclose(_loss_and_grads(chunked)[0], loss, rtol=1e-3)


def test_dropout_in_training_only_and_the_same_scanned_or_not():
  config = dataclasses.replace(TINY, dropout=0.5)
  params, tokens = params_of(TINY), _tokens(TINY)
  plain = apply(params, tokens, TINY)
  np.testing.assert_array_equal(apply(params, tokens, config), plain)
  scanned = dataclasses.replace(config, scan_layers=True)
  first, second, other = (
    apply(params, tokens, c, rng=jax.random.key(seed), is_training=True)
    for c, seed in ((config, 0), (scanned, 0), (config, 1))
  )
  np.testing.assert_allclose(first, second, atol=1e-5)
  assert not np.allclose(first, plain)
  assert not np.allclose(first, other)


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'mlp_dim': 2.5}, 'mlp_dim must be a positive integer; got 2.5'),
    ({'num_heads': 3}, 'num_heads must divide embed_dim; got 3 heads for 16'),
    ({'num_heads': 16}, "even embed_dim .* got 1.*positions='learned'"),
    ({'remat': 'some'}, "remat must be one of .*'dots'.*; got 'some'"),
    ({'pipeline_stages': 3}, '2 layers do not divide over 3 stages'),
    ({'pipeline_microbatches': 2}, 'no effect with pipeline_stages=1'),
    ({'matmul': 'fp8', 'pipeline_stages': 2}, 'pipeline of 2 stages would add'),
    ({'bigram_rows': -1}, 'bigram_rows must be 0 or a positive integer'),
    ({'dropout': 1.0}, r'dropout must lie in \[0, 1\); got 1.0'),
    ({'experts_per_token': 2}, 'experts_per_token must be at most num_experts'),
    ({'router_scale': 2.0}, 'router_scale=2.0 has no effect'),
    ({'num_experts': 4, 'expert_capacity': -1.0}, 'expert_capacity must be'),
    ({'num_experts': 4, 'pipeline_stages': 2}, 'pipeline .* num_experts=4'),
    ({'num_experts': 4, 'matmul': 'fp8'}, "matmul='fp8' .* num_experts=4"),
  ],
)
def test_config_errors_name_the_field(changes, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(TINY, **changes)


def test_errors_about_lengths():
  params, tokens = params_of(TINY), _tokens(TINY, length=13)
  with pytest.raises(ValueError, match='13 tokens; max_length is 12'):
    apply(params, tokens, TINY)
  with pytest.raises(ValueError, match=r'cache of 13 .* max_length is 12'):
    model.empty_cache(TINY, 2, 13)
  config = dataclasses.replace(TINY, loss_chunks=5)
  tokens = tokens[:, :12]
  with pytest.raises(ValueError, match=r'chunks must divide .* 5 for 12'):
    model.loss(params, tokens, tokens, np.ones(tokens.shape), config)


@pytest.mark.parametrize('name', OPTIONS)
def test_options_in_each_way_to_run_the_layers(name):
  config = dataclasses.replace(TINY, **OPTIONS[name])
  params, tokens = params_of(config), _tokens(config)
  expected = apply(params, tokens, config)
  assert not np.allclose(apply(params_of(TINY), tokens, TINY), expected)
  scanned = dataclasses.replace(config, scan_layers=True)
  pipelined = dataclasses.replace(
    config, pipeline_stages=2, pipeline_microbatches=2
  )
  for way, run, other in (
    ('scanned', apply, scanned),
    ('pipelined', apply, pipelined),
    ('decoded', decoded, config),
    ('decoded and scanned', decoded, scanned),
  ):
    found = run(params, tokens, other)
    np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=way)
