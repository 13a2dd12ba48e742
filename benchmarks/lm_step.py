"""The compiled training step of examples/lm against hand-tuned JAX and peers.

    python -m benchmarks.lm_step [--peers=DIR]

`hand_tuned.py` computes the same mathematics from the same weights: forward and
backward pass, clipping, AdamW with a schedule. Three steps check this before
anything is timed. The peers are unmodified models of other programs with the
same number of weights, the same loss, clipping and AdamW. They have no table
for pairs of tokens and use the embedding as the output layer, so they are
compared with our model without these two. DIR holds NanoDO's package `nanodo`
and `lm1b`, the folder of Flax's example.
"""

from collections.abc import Callable, Iterator
import functools
import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import hand_tuned
from benchmarks import harness
from configs import lm as lm_config
from examples.lm import experiment as lm_experiment
from jaxline.inputs import base
from jaxline.metrics import scalars
from jaxline.parallel import devices
from jaxline.parallel import placement

# The changes that each size makes to configs/lm.py.
SIZES: dict[str, dict[str, Any]] = {
  'default': {},
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
# The model as the peers have it.
_LIKE_PEERS = {'bigram_rows': 0, 'tie_embeddings': True}
_AIM = '>= 0.99'


def make_experiment(
  name: str, quick: bool = False, **changes: Any
) -> lm_experiment.Experiment:
  """Constructs the real experiment.

  Args:
    name: A key of `SIZES`.
    quick: Whether to use one layer, which compiles faster.
    **changes: Changes to `experiment_kwargs.config`.
  """
  config = lm_config.get_config().copy_and_resolve_references()
  kwargs = config.experiment_kwargs.config
  kwargs.update(SIZES[name])
  if quick:
    kwargs.model.num_layers = 1
  kwargs.update(changes)
  devices.keep_freed_memory()  # As a run does; the other sides gain as well.
  return lm_experiment.Experiment(
    'train', jax.random.key(0), run_config=config, **config.experiment_kwargs
  )


def _loss(out: Any) -> float:
  """Returns the loss from a step's output: scalars or the loss itself."""
  packed = isinstance(out, scalars.Packed)
  return float(scalars.Scalars(out)['loss'] if packed else out)


class Side:
  """A training step with its state, to be timed.

  Attributes:
    losses: The losses of the first steps.
  """

  def __init__(self, step: Any, state: Any, batches: list[Any]):
    self._step = step
    self._state = state
    self._batches = batches
    self.losses = [_loss(self._train(batch)) for batch in batches]

  def _train(self, batch: Any) -> Any:
    self._state, out = self._step(self._state, *batch)
    return out

  def time(self, steps: int, tokens: int) -> harness.Sample:
    """Returns tokens per second."""

    def train() -> None:
      for i in range(steps):
        self._train(self._batches[i % len(self._batches)])
      jax.block_until_ready(self._state)

    return harness.timed(train, steps * tokens)


def hand_tuned_side(
  experiment: lm_experiment.Experiment, tokens: list[np.ndarray]
) -> Side:
  """Returns the hand-tuned program with the experiment's initial weights."""
  config = experiment.config
  # Copy, because each side donates its buffers.
  params = jax.tree.map(jnp.copy, experiment.state.params)
  tree = hand_tuned.from_experiment(params, config.model)
  step = hand_tuned.step(
    hand_tuned.loss_fn(config.model, config.length), config
  )
  state = tree, hand_tuned.optimizer(config).init(tree)
  return Side(step, state, [(jnp.asarray(x),) for x in tokens])


def our_side(
  experiment: lm_experiment.Experiment, tokens: list[np.ndarray]
) -> Side:
  """Returns the step of the experiment."""
  key = experiment.initialize_train_step_rng(jax.random.key(1))
  batches = [
    base.Batch(
      ids=x[:, :-1],
      labels=x[:, 1:],
      weights=np.ones(x[:, 1:].shape, np.float32),
    )
    for x in tokens
  ]
  place = functools.partial(
    placement.put_batch, partitioner=experiment.partitioner
  )
  placed = [(place(x), key) for x in batches]
  return Side(experiment.compiled_train_step, experiment.state, placed)


def random_tokens(
  experiment: lm_experiment.Experiment, count: int = 3
) -> list[np.ndarray]:
  """Returns global batches of tokens with their labels, [B, L + 1]."""
  config = experiment.config
  rng = np.random.default_rng(0)
  shape = config.batch_size, config.length + 1
  vocab = config.model.vocab_size
  return [rng.integers(1, vocab, shape, np.int32) for _ in range(count)]


def _mlp_dim(c: Any) -> int:
  """Returns the width that gives as many weights without a gate."""
  return c.mlp_dim * 3 // 2 if c.feed_forward == 'swiglu' else c.mlp_dim


def _nanodo(config: Any) -> tuple[Any, Callable[..., jax.Array]]:
  model = importlib.import_module('nanodo.model')
  c = config.model
  sizes = {'D': c.embed_dim, 'H': c.num_heads, 'L': config.length}
  sizes |= {'N': c.num_layers, 'V': c.vocab_size, 'F': _mlp_dim(c)}
  module = model.TransformerDo(model.DoConfig(**sizes, fsdp_enabled=False))
  return module, lambda params, tokens: module.apply(params, tokens[:, :-1])


def _lm1b(config: Any) -> tuple[Any, Callable[..., jax.Array]]:
  model = importlib.import_module('lm1b.models')
  c = config.model
  module = model.TransformerLM(
    model.TransformerConfig(
      vocab_size=c.vocab_size,
      output_vocab_size=c.vocab_size,
      logits_via_embedding=True,
      emb_dim=c.embed_dim,
      num_heads=c.num_heads,
      num_layers=c.num_layers,
      qkv_dim=c.embed_dim,
      mlp_dim=_mlp_dim(c),
      max_len=config.length,
      deterministic=True,
    )
  )
  # The model shifts its input itself.
  return module, lambda params, tokens: module.apply(params, tokens[:, 1:])


PEERS = {'NanoDO': _nanodo, 'Flax lm1b': _lm1b}


def _peer_sides(
  folder: str | None, config: Any, tokens: list[np.ndarray]
) -> Iterator[tuple[str, Side]]:
  """Yields the peers that can be imported; prints the names of the others."""
  if folder is None:
    return
  sys.path.insert(0, folder)
  for name, make in PEERS.items():
    try:
      module, logits = make(config)
    except ImportError as e:
      print(f'{name} is left out: {e}')
      continue
    first = jnp.asarray(tokens[0][:, :-1])
    params = jax.jit(module.init)(jax.random.key(0), first)

    def loss(params: Any, tokens: jax.Array, logits: Any = logits) -> jax.Array:
      return optax.softmax_cross_entropy_with_integer_labels(
        logits(params, tokens), tokens[:, 1:]
      ).mean()

    # Remove the boxes that name the axes of weights.
    params = jax.tree.map(
      lambda x: getattr(x, 'value', x),
      params,
      is_leaf=lambda x: hasattr(x, 'value'),
    )
    state = params, hand_tuned.optimizer(config).init(params)
    step = hand_tuned.step(loss, config)
    yield name, Side(step, state, [(jnp.asarray(x),) for x in tokens])


def _millions(experiment: lm_experiment.Experiment) -> float:
  leaves = jax.tree.leaves(experiment.state.params)
  return sum(x.size for x in leaves) / 1e6


def _rows_of_size(name: str, options: harness.Options) -> list[harness.Row]:
  experiment = make_experiment(name, options.quick)
  config = experiment.config
  tokens = random_tokens(experiment)
  what = f'{name}: {_millions(experiment):.1f} M weights'
  ours = {'hand-tuned': ('ours', what)}
  sides = {'hand-tuned': hand_tuned_side(experiment, tokens)}
  sides['ours'] = our_side(experiment, tokens)
  np.testing.assert_allclose(
    sides['ours'].losses, sides['hand-tuned'].losses, rtol=1e-5
  )
  if peers := dict(_peer_sides(options.peers, config, tokens)):
    like = make_experiment(name, options.quick, model=_LIKE_PEERS)
    what = f'{name}, no pairs: {_millions(like):.1f} M weights'
    ours |= dict.fromkeys(peers, ('no pairs', what))
    sides |= {'no pairs': our_side(like, tokens), **peers}
  steps = options.pick(5, 2)
  size = config.batch_size * config.length
  samples = harness.turns(
    {k: lambda side=v: side.time(steps, size) for k, v in sides.items()},
    options.num_rounds(20),
  )
  return [
    harness.row(
      f'{what}, batch {config.batch_size} x {config.length}',
      samples[side],
      against,
      samples[against],
      unit='tokens/s',
      aim=_AIM if against == 'hand-tuned' else '>= 1',
      judged='cpu',
    )
    for against, (side, what) in ours.items()
  ]


# A token uses as many weights of the mixture as of the dense model.
_DENSE = {
  'batch_size': 16,
  'model': {'embed_dim': 256, 'num_heads': 8, 'mlp_dim': 1024},
}
_EXPERTS = {'num_experts': 8, 'experts_per_token': 2, 'mlp_dim': 512}


def _rows_of_experts(options: harness.Options) -> list[harness.Row]:
  """Compares a mixture of experts with the dense model."""
  sides, sizes = {}, {}
  for what, change in {
    'dense': {},
    'dropless': _EXPERTS,
    'capacity 1.25': {**_EXPERTS, 'expert_capacity': 1.25},
  }.items():
    values = {**_DENSE, 'model': {**_DENSE['model'], **change}}
    experiment = make_experiment('default', options.quick, **values)
    sides[what] = our_side(experiment, random_tokens(experiment))
    sizes[what] = _millions(experiment)
  config = experiment.config
  tokens, steps = config.batch_size * config.length, options.pick(3, 1)
  samples = harness.turns(
    {k: lambda side=v: side.time(steps, tokens) for k, v in sides.items()},
    options.num_rounds(10),
  )
  dense = samples.pop('dense')
  return [
    harness.row(
      f'{name}: {sizes[name]:.1f} M weights, 2 of 8 experts, batch'
      f' {config.batch_size} x {config.length}',
      sample,
      f'dense, {sizes["dense"]:.1f} M',
      dense,
      unit='tokens/s',
      aim='>= 0.75',
      judged='cpu',
    )
    for name, sample in samples.items()
  ]


def rows(options: harness.Options) -> list[harness.Row]:
  """Compares the step of each size, and of mixtures of experts."""
  found = [row for name in SIZES for row in _rows_of_size(name, options)]
  return found + _rows_of_experts(options)


if __name__ == '__main__':
  harness.main(rows, __doc__)
