"""The training step of examples/lm against a hand-tuned program.

  python -m benchmarks.lm_step [--sizes=default,large_vocabulary] [--rounds=10]

Both sides compute the same mathematics from the same weights: forward and
backward pass, clipping, AdamW with a schedule. That they do is checked on
three steps before anything is timed. The hand-tuned side is plain JAX and
Optax, one array a weight, every layer written out, nothing but what this one
model needs. The sides take turns, and the ratio is taken round by round, so
that a busy machine slows both alike.

Shapes: as in examples/lm/model.py.
"""

import argparse
from collections.abc import Callable
import os
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import lm as lm_config
from examples.lm import experiment as lm_experiment
from examples.lm import model
from jaxline.inputs import base

# What each size changes of configs/lm.py.
SIZES: dict[str, dict[str, Any]] = {
  'default': {},
  # 5.2 M parameters, 40% of them in the embedding.
  'large_vocabulary': {
    'batch_size': 8,
    'model': {
      'vocab_size': 8192,
      'embed_dim': 256,
      'mlp_dim': 1024,
      'feed_forward': 'gelu',
      'loss_chunks': 4,
    },
  },
}

Loss = Callable[[Any, jax.Array], jax.Array]


def _experiment(name: str) -> lm_experiment.Experiment:
  """Constructs the real experiment at one of the sizes."""
  config = lm_config.get_config().copy_and_resolve_references()
  config.experiment_kwargs.config.update(SIZES[name])
  return lm_experiment.Experiment(
    'train', jax.random.key(0), run_config=config, **config.experiment_kwargs
  )


def _optimizer(config: lm_experiment.Config) -> optax.GradientTransformation:
  schedule = optax.warmup_cosine_decay_schedule(
    0.0,
    config.learning_rate,
    int(config.warmup_fraction * config.training_steps),
    config.training_steps,
    config.learning_rate * config.final_learning_rate,
  )
  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      schedule,
      b1=config.b1,
      b2=config.b2,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: 'norm' not in jax.tree_util.keystr(path), params
      ),
    ),
  )


def _hand_tuned_step(config: lm_experiment.Config) -> Any:
  """Returns a jitted, donated `(state, tokens) -> (state, mean loss)`."""
  optimizer = _optimizer(config)
  loss = _hand_tuned_loss(config.model, config.length)

  def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  return jax.jit(step, donate_argnums=0)


def _hand_tuned_params(params: Any, config: model.ModelConfig) -> Any:
  """Our weights as the hand-tuned program wants them: matrices, by layer."""
  attention, feed_forward = (
    params['layers/attention'],
    params['layers/feed_forward'],
  )
  d = config.embed_dim
  return {
    'table': params['embedding']['tokens'],
    'norm': params['final_norm']['scale'],
    'layers': [
      {
        'norm1': params['layers/attention_norm']['scale'][i],
        'qkv': attention['qkv'][i].reshape(d, -1),
        'out': attention['out'][i].reshape(-1, d),
        'norm2': params['layers/feed_forward_norm']['scale'][i],
        'w1': feed_forward['in'][i].reshape(d, -1),
        'w2': feed_forward['out'][i],
      }
      for i in range(config.num_layers)
    ],
  }


def _hand_tuned_loss(config: model.ModelConfig, length: int) -> Loss:
  """Plain JAX, tuned for a CPU; what it knows, the model knows too."""
  heads, width = config.num_heads, config.head_dim
  angles = np.arange(length)[:, None] / 1e4 ** (
    np.arange(width // 2) / (width // 2)
  )
  cos = np.cos(angles, dtype=np.float32)[None, :, None]
  sin = np.sin(angles, dtype=np.float32)[None, :, None]
  causal = np.tril(np.ones((length, length), bool))[None, None]

  def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

  def turn(x: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any) -> jax.Array:
    scores = jnp.einsum('blhk,bmhk->bhlm', q, k)
    scores = jnp.where(mask, scores, -1e30)
    exp = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    mixed = jnp.einsum('bhlm,bmhk->blhk', exp, v)
    return mixed / exp.sum(-1).swapaxes(1, 2)[..., None]

  def cross_entropy(x: jax.Array, table: jax.Array, t: jax.Array) -> jax.Array:
    logits = x @ table.T
    picked = jnp.take_along_axis(logits, t[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).sum()

  @jax.custom_vjp
  def chunked(x: jax.Array, table: jax.Array, t: jax.Array) -> jax.Array:
    return cross_entropy(x, table, t)

  def forward(x: jax.Array, table: jax.Array, t: jax.Array) -> Any:
    # The gradient is taken while the logits are there, chunk by chunk.
    def add(carry: Any, chunk: Any) -> Any:
      value, (dx, dtable) = jax.value_and_grad(cross_entropy, (0, 1))(
        chunk[0], table, chunk[1]
      )
      return (carry[0] + value, carry[1] + dtable), dx

    (value, dtable), dx = jax.lax.scan(
      add,
      (jnp.zeros([]), jnp.zeros_like(table)),
      (
        x.reshape(config.loss_chunks, -1, x.shape[-1]),
        t.reshape(config.loss_chunks, -1),
      ),
    )
    return value, (dx.reshape(x.shape), dtable)

  chunked.defvjp(forward, lambda grads, g: (grads[0] * g, grads[1] * g, None))

  def loss(params: Any, tokens: jax.Array) -> jax.Array:
    half = length // 2
    x = params['table'][tokens[:, :-1]]
    for p in params['layers']:
      qkv = (norm(x, p['norm1']) @ p['qkv']).reshape(
        *x.shape[:2], 3, heads, width
      )
      q, k, v = (
        turn(qkv[:, :, 0]) * width**-0.5,
        turn(qkv[:, :, 1]),
        qkv[:, :, 2],
      )
      mixed = jnp.concatenate(
        [
          attend(
            q[:, :half], k[:, :half], v[:, :half], causal[..., :half, :half]
          ),
          attend(q[:, half:], k, v, causal[..., half:, :]),
        ],
        axis=1,
      )
      x += mixed.reshape(x.shape) @ p['out']
      hidden = norm(x, p['norm2']) @ p['w1']
      if config.feed_forward == 'swiglu':
        gate, value = jnp.split(hidden, 2, axis=-1)
        x += (jax.nn.silu(gate) * value) @ p['w2']
      else:
        x += jax.nn.gelu(hidden) @ p['w2']
    x = norm(x, params['norm'])
    entropy = chunked if config.loss_chunks > 1 else cross_entropy
    return entropy(x, params['table'], tokens[:, 1:]) / tokens[:, 1:].size

  return loss


def _spread(values: list[float]) -> str:
  low, _, high = statistics.quantiles(values, n=4)
  return f'{statistics.median(values):.3f} [{low:.3f}, {high:.3f}]'


def compare(name: str, rounds: int, steps: int) -> float:
  """Times both sides in turns and prints a table.

  Args:
    name: of `SIZES`.
    rounds: how often each side takes its turn.
    steps: training steps in a turn.

  Returns:
    Our tokens per CPU second over those of the hand-tuned program.

  Raises:
    AssertionError: the sides do not compute the same losses.
  """
  experiment = _experiment(name)
  config = experiment.config
  batch, length = config.batch_size, config.length
  rng = np.random.default_rng(0)
  tokens = [
    rng.integers(0, config.model.vocab_size, (batch, length + 1), np.int32)
    for _ in range(3)
  ]
  # A copy: each side donates its own buffers.
  params = jax.tree.map(jnp.copy, experiment.state.params)
  count = sum(x.size for x in jax.tree.leaves(params))
  tree = _hand_tuned_params(params, config.model)
  states = {
    'hand-tuned': (tree, _optimizer(config).init(tree)),
    'examples/lm': experiment.state,
  }
  key = experiment.initialize_train_step_rng(jax.random.key(1))
  placed = [
    experiment.partitioner.put_batch(
      base.Batch(
        ids=x[:, :-1],
        labels=x[:, 1:],
        weights=np.ones([batch, length], np.float32),
      )
    )
    for x in tokens
  ]
  # The arguments of each program behind its state, for each batch.
  arguments = {
    'hand-tuned': [(jnp.asarray(x),) for x in tokens],
    'examples/lm': [(x, key) for x in placed],
  }
  programs = {
    'hand-tuned': _hand_tuned_step(config),
    'examples/lm': experiment.compiled_train_step,
  }
  losses: dict[str, list[float]] = {}
  compile_seconds: dict[str, float] = {}
  for side, step in programs.items():
    start = time.process_time()
    step.lower(states[side], *arguments[side][0]).compile()
    compile_seconds[side] = time.process_time() - start
    losses[side] = []
    for args in arguments[side]:
      states[side], out = step(states[side], *args)
      losses[side].append(float(out['loss'] if isinstance(out, dict) else out))
  np.testing.assert_allclose(
    losses['examples/lm'], losses['hand-tuned'], rtol=1e-5
  )

  wall: dict[str, list[float]] = {side: [] for side in programs}
  cpu: dict[str, list[float]] = {side: [] for side in programs}
  for i in range(rounds):
    # A B, B A, ...: neither side always runs after the other.
    for side in list(programs)[:: 1 if i % 2 else -1]:
      start_wall, start_cpu = time.perf_counter(), time.process_time()
      for j in range(steps):
        states[side], _ = programs[side](states[side], *arguments[side][j % 3])
      jax.block_until_ready(states[side])
      wall[side].append((time.perf_counter() - start_wall) / steps)
      cpu[side].append((time.process_time() - start_cpu) / steps)

  print(f'\n{name}: {config.model}')
  print(
    f'{count:,} parameters, batch {batch} x {length}, same loss'
    f' {losses["examples/lm"][-1]:.5f} after 3 steps'
  )
  print(
    f'{"":12}{"ms/step":>10}{"cpu ms":>10}{"tokens/s":>11}{"compile s":>11}'
  )
  for side in programs:
    ms, cpu_ms = (1e3 * statistics.median(x[side]) for x in (wall, cpu))
    print(
      f'{side:12}{ms:10.1f}{cpu_ms:10.1f}{batch * length / ms * 1e3:11.0f}'
      f'{compile_seconds[side]:11.1f}'
    )
  ratios = {
    what: [
      a / b for a, b in zip(x['hand-tuned'], x['examples/lm'], strict=True)
    ]
    for what, x in (('wall', wall), ('cpu', cpu))
  }
  for what, values in ratios.items():
    print(
      f'tokens per {what} second, ours / hand-tuned, median and quartiles of'
      f' {rounds} rounds: {_spread(values)}'
    )
  return statistics.median(ratios['cpu'])


def main() -> None:
  """Runs the comparison for the sizes of the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--sizes', default=','.join(SIZES))
  parser.add_argument('--rounds', type=int, default=10)
  parser.add_argument('--steps', type=int, default=5)
  args = parser.parse_args()
  load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else float('nan')
  print(
    f'{jax.devices()}, {os.cpu_count()} cores, load {load:.1f} at the start;'
    f' Python {platform.python_version()}, jax {jax.__version__},'
    f' optax {optax.__version__}'
  )
  for name in args.sizes.split(','):
    if name not in SIZES:
      parser.error(f'unknown size {name!r}; expected one of {list(SIZES)}')
    compare(name, args.rounds, args.steps)


if __name__ == '__main__':
  main()
