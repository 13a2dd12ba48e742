"""Tokens per second, and model FLOPs utilization, of the language model here.

  python -m benchmarks.mfu [--variants=as_is,remat_full] [--steps=20]
    [--matmul=8192] [--config=configs/lm_1b.py] [--config.key=value ...]

Trains on the real input by the real step, once for each variant of the config:
the obvious things to try. MFU is the model's FLOPs (three times those of the
products of its forward pass, whatever is computed again) over time and over two
rates: the chips' own, as their maker gives it, and that of a large bfloat16
product, as measured here just before.
"""

import argparse
import dataclasses
import gc
import platform as machine
import time
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import config_dict

from examples.lm import experiment as lm_experiment
from jaxline import platform
from jaxline.base import chips
from jaxline.metrics import rates

# What each changes of `experiment_kwargs.config`.
VARIANTS: dict[str, dict[str, Any]] = {
  'as_is': {},
  'batch_16': {'batch_size': 16},
  'batch_32': {'batch_size': 32},
  'remat_nothing': {'model': {'remat': 'nothing'}},
  'remat_full': {'model': {'remat': 'full'}},
  'unrolled': {'model': {'scan_layers': False}},
  'whole_loss': {'model': {'loss_chunks': 1}},
  'einsum_attention': {'model': {'attention': 'einsum'}},
  'fp8': {'model': {'matmul': 'fp8'}},
}
_WARM_UP_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Speed:
  """What a variant reached.

  Attributes:
    step_secs: of one step.
    tokens: of one step.
    model_flops: of one step, over all devices.
  """

  step_secs: float
  tokens: int
  model_flops: float


def measure(config: config_dict.ConfigDict, steps: int) -> Speed:
  """Trains some steps of a run, and says how long one took.

  Args:
    config: the run's.
    steps: how many to time, behind those that compile and warm up.
  """
  rng = jax.random.PRNGKey(config.random_seed)
  experiment = lm_experiment.Experiment(
    'train', rng, run_config=config, **config.experiment_kwargs
  )
  batch = experiment.abstract_batch(is_training=True)
  flops = rates.model_flops(experiment, batch)
  key = experiment.initialize_train_step_rng(rng)

  def train(count: int) -> None:
    for _ in range(count):
      scalars = experiment.step(global_step=None, rng=key, writer=None)
    jax.block_until_ready((experiment.state, scalars))

  train(_WARM_UP_STEPS)
  start = time.perf_counter()
  train(steps)
  secs = (time.perf_counter() - start) / steps
  c = experiment.config
  return Speed(secs, c.batch_size * c.length, flops)


def matmul_rate(size: int) -> float:
  """Returns the FLOP/s of a bfloat16 product on one device.

  Args:
    size: of its square matrices.
  """
  x = jax.random.normal(jax.random.key(0), [size, size], jnp.bfloat16)
  product = jax.jit(lambda a, b: a @ b)
  jax.block_until_ready(product(x, x))
  best = float('inf')
  for _ in range(5):
    start = time.perf_counter()
    y = x
    for _ in range(10):
      y = product(x, y)
    jax.block_until_ready(y)
    best = min(best, (time.perf_counter() - start) / 10)
  return 2 * size**3 / best


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--variants', default='as_is')
  parser.add_argument('--steps', type=int, default=20)
  parser.add_argument('--matmul', type=int, default=8192)
  args, rest = parser.parse_known_args()
  if not any(arg.startswith('--config=') for arg in rest):
    rest.insert(0, '--config=configs/lm_1b.py')
  names = list(VARIANTS) if args.variants == 'all' else args.variants.split(',')
  for name in names:
    if name not in VARIANTS:
      parser.error(f'no variant {name!r}; expected all, or of {list(VARIANTS)}')
  device = jax.devices()[0]
  chip = chips.chip_of(device)
  rate = matmul_rate(args.matmul)
  print(
    f'{jax.device_count()} x {device.device_kind}, jax {jax.__version__},'
    f' Python {machine.python_version()}; a product of {args.matmul}:'
    f' {rate / 1e12:.3g} TFLOP/s a device'
  )
  print('| variant | ms a step | tokens/s | MFU | of the measured product |')
  print('|---|---|---|---|---|')
  for name in names:
    config = platform.load_config(rest).unlock()
    config.experiment_kwargs.config.update(VARIANTS[name])
    try:
      speed = measure(config, args.steps)
    except jax.errors.JaxRuntimeError as e:
      if 'RESOURCE_EXHAUSTED' not in str(e):
        raise
      print(f'| {name} | out of memory | | | |')
      continue
    finally:
      gc.collect()  # The arrays of one variant would crowd the next.
    flops = speed.model_flops / speed.step_secs / jax.device_count()
    published = f'{flops / chip.peak_flops:.1%}' if chip else 'not known'
    print(
      f'| {name} | {1000 * speed.step_secs:.1f} |'
      f' {speed.tokens / speed.step_secs:,.0f} | {published} |'
      f' {flops / rate:.1%} |',
      flush=True,
    )


if __name__ == '__main__':
  main()
