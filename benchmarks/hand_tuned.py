"""A hand-written version of the language model of configs/lm.py: a baseline.

It is plain JAX and Optax, tuned for a CPU: one array for each weight, every
layer written out, and no options that this model does not need. It imports
nothing from this repository. If the model of configs/lm.py gains an option, add
it here: in `params`, `from_experiment` and `_block`.

Run as a program, it is a plain training script, which ends after its first
step:

    python benchmarks/hand_tuned.py CONFIG.json TOKENS.npy

Shapes: as in examples/lm/model.py.
"""

from collections.abc import Callable
import json
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# (q, k, v of the new tokens, layer index) -> mixed values
Attend = Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array]


def _layer(config: Any, new: Callable[..., Any]) -> dict[str, Any]:
  """Returns the weights of a layer: `new(fan_in, *shape)` each, or ones."""
  d, f = config.embed_dim, config.mlp_dim
  parts = 2 if config.feed_forward == 'swiglu' else 1
  return {
    'norm1': jnp.ones([d]),
    'qkv': new(d, d, 3 * d),
    'out': new(2 * config.num_layers * d, d, d),
    'norm2': jnp.ones([d]),
    'w1': new(d, d, parts * f),
    'w2': new(2 * config.num_layers * f, f, d),
  }


def params(key: jax.Array, config: Any) -> Any:
  """Returns initial weights."""
  keys = iter(jax.random.split(key, 4 * config.num_layers + 2))

  def new(fan_in: float, *shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape) * fan_in**-0.5

  return {
    'table': 0.02 * new(1, config.vocab_size, config.embed_dim),
    'bigrams': jnp.zeros([config.bigram_rows, config.embed_dim]),
    'head': 0.02 * new(1, config.vocab_size, config.embed_dim),
    'norm0': jnp.ones([config.embed_dim]),
    'norm': jnp.ones([config.embed_dim]),
    'layers': [_layer(config, new) for _ in range(config.num_layers)],
  }


def from_experiment(weights: Any, config: Any) -> Any:
  """Converts the weights of examples/lm to the structure of `params`."""
  attention = weights['layers/attention']
  feed_forward = weights['layers/feed_forward']
  d = config.embed_dim
  return {
    'table': weights['embedding']['tokens'],
    'bigrams': weights['embedding']['bigrams'],
    'head': weights['embedding']['output'],
    'norm0': weights['embedding/norm']['scale'],
    'norm': weights['final_norm']['scale'],
    'layers': [
      {
        'norm1': weights['layers/attention_norm']['scale'][i],
        'qkv': attention['qkv'][i].reshape(d, -1),
        'out': attention['out'][i].reshape(-1, d),
        'norm2': weights['layers/feed_forward_norm']['scale'][i],
        'w1': feed_forward['in'][i].reshape(d, -1),
        'w2': feed_forward['out'][i],
      }
      for i in range(config.num_layers)
    ],
  }


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _angles(config: Any, length: int) -> tuple[np.ndarray, np.ndarray]:
  half = config.embed_dim // config.num_heads // 2
  angles = np.arange(length)[:, None] / 1e4 ** (np.arange(half) / half)
  return np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  a, b = jnp.split(x, 2, axis=-1)
  cos, sin = cos[None, :, None], sin[None, :, None]
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _mix(
  q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, kv: str = 'bmhk'
) -> jax.Array:
  """Computes attention; the softmax divides after the product with values."""
  scores = jnp.einsum(f'blhk,{kv}->bhlm', q, k)
  scores = jnp.where(mask, scores, -1e30)
  exp = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
  mixed = jnp.einsum(f'bhlm,{kv}->blhk', exp, v)
  return mixed / exp.sum(-1).swapaxes(1, 2)[..., None]


def _block(
  config: Any, number: int, p: Any, x: jax.Array, turns: Any, attend: Attend
) -> jax.Array:
  heads, width = config.num_heads, config.embed_dim // config.num_heads
  qkv = (_norm(x, p['norm1']) @ p['qkv']).reshape(*x.shape[:2], 3, heads, width)
  q = _turn(qkv[:, :, 0], *turns) * width**-0.5
  k = _turn(qkv[:, :, 1], *turns)
  mixed = attend(q, k, qkv[:, :, 2], number)
  x += mixed.reshape(x.shape) @ p['out']
  hidden = _norm(x, p['norm2']) @ p['w1']
  if config.feed_forward == 'swiglu':
    gate, value = jnp.split(hidden, 2, axis=-1)
    return x + (jax.nn.silu(gate) * value) @ p['w2']
  return x + jax.nn.gelu(hidden) @ p['w2']


def _pairs(config: Any, before: jax.Array, tokens: jax.Array) -> jax.Array:
  """Returns the row of each token and the one before it in 'bigrams'."""
  a, b = jnp.uint32(2654435761), jnp.uint32(2246822519)
  mixed = (tokens.astype(jnp.uint32) * a) ^ (before.astype(jnp.uint32) * b)
  mixed = (mixed ^ (mixed >> 15)) * b
  mixed = (mixed ^ (mixed >> 13)) % jnp.uint32(config.bigram_rows)
  return mixed.astype(jnp.int32)


def _before(config: Any, tokens: jax.Array) -> jax.Array:
  """Returns the token before each; before the first, `vocab_size`."""
  padded = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=config.vocab_size)
  return padded[:, :-1]


def _hidden(
  config: Any,
  params: Any,
  tokens: jax.Array,
  before: jax.Array,
  turns: Any,
  attend: Attend,
) -> jax.Array:
  """Returns the input of the output layer, [B, L, D]."""
  x = params['table'][tokens]
  x = x + params['bigrams'][_pairs(config, before, tokens)]
  x = _norm(x, params['norm0'])
  for number, p in enumerate(params['layers']):
    x = _block(config, number, p, x, turns, attend)
  return _norm(x, params['norm'])


def _cross_entropy(x: jax.Array, table: jax.Array, t: jax.Array) -> jax.Array:
  logits = x @ table.T
  picked = jnp.take_along_axis(logits, t[..., None], axis=-1)[..., 0]
  return (jax.nn.logsumexp(logits, axis=-1) - picked).sum()


def _chunked(chunks: int) -> Callable[..., jax.Array]:
  """Returns a cross entropy that holds one chunk of logits at a time."""

  @jax.custom_vjp
  def chunked(x: jax.Array, table: jax.Array, t: jax.Array) -> jax.Array:
    return _cross_entropy(x, table, t)

  def forward(x: jax.Array, table: jax.Array, t: jax.Array) -> Any:
    # Each chunk computes its gradient while its logits exist.
    def add(carry: Any, chunk: Any) -> Any:
      value, (dx, dtable) = jax.value_and_grad(_cross_entropy, (0, 1))(
        chunk[0], table, chunk[1]
      )
      return (carry[0] + value, carry[1] + dtable), dx

    (value, dtable), dx = jax.lax.scan(
      add,
      (jnp.zeros([]), jnp.zeros_like(table)),
      (x.reshape(chunks, -1, x.shape[-1]), t.reshape(chunks, -1)),
    )
    return value, (dx.reshape(x.shape), dtable)

  chunked.defvjp(forward, lambda grads, g: (grads[0] * g, grads[1] * g, None))
  return chunked


def loss_fn(config: Any, length: int) -> Callable[[Any, jax.Array], jax.Array]:
  """Returns `(params, tokens [B, L + 1]) -> mean loss`."""
  half = length // 2
  causal = np.tril(np.ones((length, length), bool))[None, None]

  def attend(q: Any, k: Any, v: Any, number: int) -> jax.Array:
    # The first half of the queries sees no keys of the second half.
    first = q[:, :half], k[:, :half], v[:, :half]
    return jnp.concatenate(
      [
        _mix(*first, causal[..., :half, :half]),
        _mix(q[:, half:], k, v, causal[..., half:, :]),
      ],
      axis=1,
    )

  chunks = config.loss_chunks
  entropy = _chunked(chunks) if chunks > 1 else _cross_entropy

  def loss(params: Any, tokens: jax.Array) -> jax.Array:
    turns = _angles(config, length)
    inputs = tokens[:, :-1]
    before = _before(config, inputs)
    x = _hidden(config, params, inputs, before, turns, attend)
    return entropy(x, params['head'], tokens[:, 1:]) / tokens[:, 1:].size

  return loss


def optimizer(config: Any) -> optax.GradientTransformation:
  """Returns the optimizer of examples/lm."""
  peak, steps = config.learning_rate, config.training_steps
  warmup = max(1, int(config.warmup_fraction * steps))
  end = peak * config.final_learning_rate
  schedule = optax.join_schedules(
    [
      optax.linear_schedule(0.0, peak, warmup),
      optax.linear_schedule(peak, end, max(1, steps - warmup)),
    ],
    [warmup],
  )
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      lambda step: schedule(step + 1),
      b1=config.b1,
      b2=config.b2,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: 'norm' not in jax.tree_util.keystr(path), params
      ),
    ),
  )


def step(loss: Callable[..., Any], config: Any) -> Any:
  """Returns a jitted, donated `(state, tokens) -> (state, mean loss)`."""
  optimize = optimizer(config)

  def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, tokens)
    updates, opt_state = optimize.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return jax.jit(step, donate_argnums=0)


def greedy(config: Any, steps: int) -> Any:
  """Returns a jitted `(params, prompts [B, T]) -> tokens [B, steps]`.

  All prompts have one length. The loop has a cache of keys and values.
  """

  def decode(params: Any, prompts: jax.Array) -> jax.Array:
    batch, length = prompts.shape
    heads, width = config.num_heads, config.embed_dim // config.num_heads
    cos, sin = _angles(config, length + steps)
    shape = (batch, heads, length + steps, width)
    places = jnp.arange(length + steps)

    def run(
      tokens: jax.Array, before: jax.Array, cache: Any, start: Any
    ) -> tuple[Any, Any]:
      count = tokens.shape[1]
      turns = [
        jax.lax.dynamic_slice_in_dim(x, start, count) for x in (cos, sin)
      ]
      mask = places[None] <= (start + jnp.arange(count))[:, None]
      kept = []

      def attend(q: Any, k: Any, v: Any, number: int) -> jax.Array:
        keys, values = (
          jax.lax.dynamic_update_slice_in_dim(
            old, new.swapaxes(1, 2), start, axis=2
          )
          for old, new in zip(cache[number], (k, v), strict=True)
        )
        kept.append((keys, values))
        return _mix(q, keys, values, mask[None, None], 'bhmk')

      x = _hidden(config, params, tokens, before, turns, attend)
      return (x[:, -1] @ params['head'].T).argmax(-1).astype(jnp.int32), kept

    cache = [(jnp.zeros(shape),) * 2 for _ in range(config.num_layers)]
    # Leave out the last token, so that the prompt's logits are never computed.
    before = _before(config, prompts)
    _, cache = run(prompts[:, :-1], before[:, :-1], cache, 0)

    def advance(carry: Any, i: jax.Array) -> Any:
      token, last, cache = carry
      new, cache = run(token[:, None], last[:, None], cache, length - 1 + i)
      return (new, token, cache), new

    first = prompts[:, -1], before[:, -1], cache
    return jax.lax.scan(advance, first, jnp.arange(steps))[1].T

  return jax.jit(decode)


def greedy_uncached(config: Any, steps: int, width: int) -> Any:
  """Like `greedy`, but each token computes all `width` positions again."""
  causal = np.tril(np.ones((width, width), bool))[None, None]

  def decode(params: Any, prompts: jax.Array) -> jax.Array:
    length = prompts.shape[1]
    tokens = jnp.pad(prompts, ((0, 0), (0, width - length)))
    turns = _angles(config, width)

    def advance(tokens: jax.Array, i: jax.Array) -> Any:
      x = _hidden(
        config,
        params,
        tokens,
        _before(config, tokens),
        turns,
        lambda q, k, v, number: _mix(q, k, v, causal),
      )
      new = (x[:, length + i - 1] @ params['head'].T).argmax(-1)
      new = new.astype(jnp.int32)
      return tokens.at[:, length + i].set(new), new

    return jax.lax.scan(advance, tokens, jnp.arange(steps))[1].T

  return jax.jit(decode)


def _as_object(values: Any) -> Any:
  if isinstance(values, dict):
    return types.SimpleNamespace(
      **{k: _as_object(v) for k, v in values.items()}
    )
  return values


def main() -> None:
  """Trains for one step and prints its loss."""
  with open(sys.argv[1]) as f:
    config = _as_object(json.load(f))
  tokens = np.load(sys.argv[2], mmap_mode='r')
  loss = loss_fn(config.model, config.length)

  def init(key: jax.Array) -> Any:
    weights = params(key, config.model)
    return weights, optimizer(config).init(weights)

  state = jax.jit(init)(jax.random.key(0))
  places = np.random.default_rng(0).integers(
    len(tokens) - config.length, size=config.batch_size
  )
  batch = np.stack([tokens[i : i + config.length + 1] for i in places])
  state, value = step(loss, config)(state, jnp.int32(batch))
  print(f'step 1: loss {float(value):.4f}', flush=True)


if __name__ == '__main__':
  main()
