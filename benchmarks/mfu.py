"""Tokens per second and model FLOPs utilization of examples/lm on a device.

  python -m benchmarks.mfu [--plan | --variants=as_is,remat_full] [--steps=20]
    [--out=FILE.jsonl] [--trace=DIR] [--budget_secs=540]
    [--config=configs/lm_1b.py] [--config.key=value ...]

Trains with the real step on the real input, once for each variant of the
config. The model's FLOPs are three times the FLOPs of the products in its
forward pass; recomputation does not count. MFU is these FLOPs per second over
the maker's peak rate. A second value divides by the rate of a large bfloat16
product, which is measured just before.

`--plan` runs all variants, decodes with three batch sizes and saves a
checkpoint. It is made for a card that you can borrow for ten minutes. While a
variant runs, the next one is compiled. A variant is timed after that
compilation has ended, because XLA tries kernels on the device. Each result is
written to `--out` at once. After `--budget_secs` no further variant is
compiled.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import gc
import json
import pathlib
import platform as machine
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np

from examples import decoding
from examples.lm import experiment as lm_experiment
from jaxline import platform
from jaxline.base import chips
from jaxline.checkpoint import protocol
from jaxline.metrics import rates
from jaxline.parallel import placement


@dataclasses.dataclass(frozen=True)
class Variant:
  """A way to compute the step.

  Attributes:
    config: Changes to `experiment_kwargs.config`.
    xla: Options of XLA for its step.
  """

  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  xla: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _variant(batch_size: int = 0, xla: Any = None, **model: Any) -> Variant:
  config: dict[str, Any] = {'model': model} if model else {}
  if batch_size:
    config['batch_size'] = batch_size
  return Variant(config, xla or {})


_UNROLLED = {'scan_layers': False}
_HIDES_LATENCY = {'xla_gpu_enable_latency_hiding_scheduler': True}
_NO_COMMANDS = {'xla_gpu_enable_command_buffer': ''}
VARIANTS = {
  'as_is': Variant(),
  'fp8': _variant(matmul='fp8'),
  'unrolled': _variant(**_UNROLLED),
  'fp8_unrolled': _variant(matmul='fp8', **_UNROLLED),
  'unrolled_batch_16': _variant(16, **_UNROLLED),
  'fp8_unrolled_batch_16': _variant(16, matmul='fp8', **_UNROLLED),
  'unrolled_batch_32': _variant(32, **_UNROLLED),
  'fp8_unrolled_batch_32': _variant(32, matmul='fp8', **_UNROLLED),
  'unrolled_remat_nothing': _variant(remat='nothing', **_UNROLLED),
  'fp8_unrolled_remat_nothing': _variant(
    matmul='fp8', remat='nothing', **_UNROLLED
  ),
  'unrolled_whole_loss': _variant(loss_chunks=1, **_UNROLLED),
  'unrolled_hides_latency': _variant(xla=_HIDES_LATENCY, **_UNROLLED),
  'unrolled_no_commands': _variant(xla=_NO_COMMANDS, **_UNROLLED),
  'batch_16': _variant(16),
  'batch_32': _variant(32),
  'remat_nothing': _variant(remat='nothing'),
  'remat_full': _variant(remat='full'),
  'whole_loss': _variant(loss_chunks=1),
  'einsum_attention': _variant(attention='einsum'),
}
_WARM_UP_STEPS = 3
_MAX_WAIT_SECS = 90  # For the compilation of the next variant.
_DECODE_BATCHES = 1, 16, 128
_PROMPT, _NEW_TOKENS = 128, 64


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A variant whose step is compiled.

  Attributes:
    experiment: The experiment, without a state yet.
    model_flops: FLOPs of a step on all devices together.
    compile_secs: Seconds of tracing and compiling.
    gib: Memory that the step needs on a device, in GiB; 0 if not known.
  """

  experiment: lm_experiment.Experiment
  model_flops: float
  compile_secs: float
  gib: float


def prepare(config: config_dict.ConfigDict, xla: Mapping[str, Any]) -> Prepared:
  """Compiles the step of a run; uses the device only to try kernels."""
  experiment = lm_experiment.Experiment(
    'train',
    jax.random.PRNGKey(config.random_seed),
    run_config=config,
    **config.experiment_kwargs,
  )
  batch = experiment.abstract_batch(is_training=True)
  flops = rates.model_flops(experiment, batch)
  begun = time.perf_counter()
  step: Any = experiment.compiled_train_step
  args = experiment.abstract_state(), batch, experiment.abstract_rng()
  compiled = step.lower(*args).compile(dict(xla) or None)
  secs = time.perf_counter() - begun
  experiment.compiled_train_step = compiled
  try:
    memory = compiled.memory_analysis()
    gib = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30
  except (AttributeError, jax.errors.JaxRuntimeError):
    gib = 0.0
  return Prepared(experiment, flops, secs, gib)


def train(experiment: lm_experiment.Experiment, steps: int) -> None:
  """Trains some steps, and waits for the last one."""
  key = placement.put(jax.random.PRNGKey(0), experiment.partitioner.replicated)
  for _ in range(steps):
    scalars = experiment.step(global_step=0, rng=key, writer=None)
  jax.block_until_ready((experiment.state, dict(scalars)))


def measure(
  prepared: Prepared, steps: int, is_quiet: Callable[[], bool]
) -> dict[str, float]:
  """Trains until nothing else uses the device, and then times steps.

  Returns:
    Milliseconds of a step, tokens per second, and the values of `Prepared`.
  """
  experiment, config = prepared.experiment, prepared.experiment.config
  train(experiment, _WARM_UP_STEPS)
  latest = time.monotonic() + _MAX_WAIT_SECS
  while not is_quiet() and time.monotonic() < latest:
    train(experiment, 1)
  was_quiet = is_quiet()
  begun = time.perf_counter()
  train(experiment, steps)
  secs = (time.perf_counter() - begun) / steps
  return {
    'ms': 1000 * secs,
    'tokens_per_sec': config.batch_size * config.length / secs,
    'flops_per_sec': prepared.model_flops / secs / jax.device_count(),
    'compile_secs': prepared.compile_secs,
    'gib': prepared.gib,
    'was_quiet': was_quiet,
  }


def matmul_rate(size: int) -> float:
  """Returns the FLOP/s of a bfloat16 product on one device.

  Args:
    size: Number of rows of the square matrices.
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


def decode(
  experiment: lm_experiment.Experiment, batch: int, bandwidth: float
) -> dict[str, float | None]:
  """Decodes with weights in the model's dtype; compares with a memory bound.

  The bound reads each weight except the input table once per token, and each
  row's cache at half of its final length.

  Args:
    experiment: An experiment with a state.
    batch: Number of rows.
    bandwidth: Bytes per second of the device's memory; 0 if not known.
  """
  config = experiment.config.model
  dtype = jnp.dtype(config.dtype)
  state = experiment.state
  params = jax.tree.map(
    lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x,
    lm_experiment.merged(state.params, state.model_state, experiment.config),
  )
  length = min(_PROMPT, config.max_length // 2)
  steps = min(_NEW_TOKENS, config.max_length - length)
  rng = np.random.default_rng(0)
  prompts = rng.integers(1, config.vocab_size, (batch, length), np.int32)
  placed = placement.put(
    (prompts, np.full(batch, length, np.int32)),
    experiment.partitioner.batch_sharding,
  )
  key = placement.put(jax.random.key(0), experiment.partitioner.replicated)

  def secs(count: int) -> float:
    options = decoding.Options(
      method='greedy', max_decode_steps=count, scores=False
    )
    run = lambda: jax.block_until_ready(
      experiment._decode(params, *placed, key, options)
    )
    run()
    times = []
    for _ in range(3):
      begun = time.perf_counter()
      run()
      times.append(time.perf_counter() - begun)
    return min(times)

  a_token = (secs(steps) - secs(1)) / (steps - 1)
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  if 'output' in params['embedding']:
    weights -= params['embedding']['tokens'].nbytes
  heads = config.num_kv_heads or config.num_heads
  size = config.head_size or config.embed_dim // config.num_heads
  row = 2 * config.num_layers * heads * size * dtype.itemsize
  read = weights + batch * row * (length + steps / 2)
  return {
    'ms': 1000 * a_token,
    'tokens_per_sec': batch / a_token,
    'of_bound': read / bandwidth / a_token if bandwidth else None,
  }


def save(
  experiment: lm_experiment.Experiment, config: config_dict.ConfigDict
) -> dict[str, float]:
  """Times how long a save blocks training, and a copy to the host."""
  state = experiment.state
  with tempfile.TemporaryDirectory() as folder:
    config = config.copy_and_resolve_references()
    config.checkpoint_dir = folder
    checkpointer = platform.create_checkpointer(config, 'train')
    live = protocol.new_state(checkpointer, experiment, series='latest')
    found: dict[str, float] = {}
    for step in (1, 2):  # The first save includes the setup.
      begun = time.perf_counter()
      jax.block_until_ready(jax.device_get(state))
      copied = time.perf_counter()
      live.global_step = step
      checkpointer.save('latest')
      saved = time.perf_counter()
      found = {'copy_secs': copied - begun, 'block_secs': saved - copied}
      checkpointer.wait_for_checkpointing_to_finish()
    checkpointer.close()
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  return found | {
    'ms': 1000 * found['block_secs'],
    'of_copy': found['block_secs'] / found['copy_secs'],
    'gb': size / 1e9,
  }


def profile(
  experiment: lm_experiment.Experiment, directory: str
) -> dict[str, str]:
  """Writes a profile of three steps."""
  with jax.profiler.trace(directory, create_perfetto_trace=True):
    train(experiment, 3)
  return {'directory': directory}


class Report:
  """Prints rows, and writes each to a file at once."""

  def __init__(self, out: pathlib.Path | None, rate: float):
    self._out, self._rate = out, rate
    self._chip = chips.chip_of(jax.devices()[0])

  @property
  def bandwidth(self) -> float:
    """Bytes per second of the chip's memory; 0 if not known."""
    return self._chip.hbm_bandwidth if self._chip else 0.0

  def add(self, name: str, values: Mapping[str, Any]) -> None:
    """Adds a row."""
    values = {'name': name, **values}
    if flops := values.pop('flops_per_sec', None):
      values['of_product'] = flops / self._rate
      values['mfu'] = flops / self._chip.peak_flops if self._chip else None
    if self._out:
      with self._out.open('a', encoding='utf-8') as file:
        file.write(json.dumps(values) + '\n')
    shown = [
      f'{key} {x:,.4g}' if isinstance(x, float) else f'{key} {x}'
      for key, x in values.items()
      if key != 'name'
    ]
    print(f'{name}: {", ".join(shown)}', flush=True)


def run(
  names: Sequence[str],
  load: Callable[[], config_dict.ConfigDict],
  report: Report,
  *,
  steps: int,
  ends: float = float('inf'),
  is_plan: bool = False,
  trace: str = '',
) -> None:
  """Measures variants; compiles each while the previous one runs.

  Args:
    names: Keys of `VARIANTS`.
    load: Function that returns a fresh config.
    report: Receives the rows.
    steps: Number of steps to time.
    ends: Time, by `time.monotonic`, after which no variant is compiled.
    is_plan: Whether to decode and to save with the first variant, too.
    trace: Directory for a profile of three steps of the first variant.
  """

  def changed(name: str) -> config_dict.ConfigDict:
    config = load().unlock()
    config.experiment_kwargs.config.update(VARIANTS[name].config)
    return config

  def attempt(name: str, call: Callable[..., Any], *args: Any) -> None:
    try:
      report.add(name, call(*args))
    except Exception as e:
      # There may be too little memory, or this XLA may lack an option. Measure
      # the other variants while the card is available.
      report.add(name, {'failed': f'{e!s:.300}'})

  def more(experiment: lm_experiment.Experiment) -> None:
    if trace:
      attempt('trace', profile, experiment, trace)
    if is_plan:
      for batch in _DECODE_BATCHES:
        attempt(f'decode_{batch}', decode, experiment, batch, report.bandwidth)
      attempt('save', save, experiment, changed(names[0]))

  with futures.ThreadPoolExecutor(1) as pool:

    def begin(name: str) -> futures.Future[Prepared] | None:
      if time.monotonic() > ends:
        return None
      return pool.submit(prepare, changed(name), VARIANTS[name].xla)

    def measured(
      running: futures.Future[Prepared], after: futures.Future[Prepared] | None
    ) -> dict[str, float]:
      return measure(
        running.result(), steps, lambda: after is None or after.done()
      )

    coming = begin(names[0])
    for i, name in enumerate(names):
      if coming is None:
        report.add(name, {'failed': 'no time was left'})
        continue
      running = coming
      futures.wait([running])
      coming = begin(names[i + 1]) if i + 1 < len(names) else None
      attempt(name, measured, running, coming)
      if i == 0 and running.exception() is None:
        more(running.result().experiment)
      del running
      gc.collect()  # Free the variant's arrays before the next one runs.


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the rows."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--variants', default='as_is')
  parser.add_argument('--plan', action='store_true')
  parser.add_argument('--steps', type=int, default=20)
  parser.add_argument('--matmul', type=int)
  parser.add_argument('--out', type=pathlib.Path)
  parser.add_argument('--trace', default='')
  parser.add_argument('--budget_secs', type=float, default=540.0)
  args, rest = parser.parse_known_args(argv)
  ends = time.monotonic() + args.budget_secs if args.plan else float('inf')
  if not any(arg.startswith('--config=') for arg in rest):
    rest.insert(0, '--config=configs/lm_1b.py')
  names = [*VARIANTS]
  if args.variants != 'all' and not (args.plan and args.variants == 'as_is'):
    names = args.variants.split(',')
  for name in names:
    if name not in VARIANTS:
      parser.error(f'no variant {name!r}; expected all, or {list(VARIANTS)}')
  device = jax.devices()[0]
  # A product of 8,192 takes a CPU ten seconds.
  size = args.matmul or (1024 if device.platform == 'cpu' else 8192)
  rate = matmul_rate(size)
  report = Report(args.out, rate)
  report.add(
    'machine',
    {
      'devices': f'{jax.device_count()} x {device.device_kind}',
      'versions': f'jax {jax.__version__}, Python {machine.python_version()}',
      'platform': device.client.platform_version.split('\n')[0],
      'product': size,
      'product_tflops': rate / 1e12,
    },
  )
  run(
    names,
    lambda: platform.load_config(rest),
    report,
    steps=args.steps,
    ends=ends,
    is_plan=args.plan,
    trace=args.trace,
  )


if __name__ == '__main__':
  main()
