"""What the training loop costs: microseconds per step above a bare `for` loop.

    python -m benchmarks.loop
    python -m benchmarks.loop --original DIR   # DIR holds JAXline's own package

Each side runs a trivial training step in a process of its own, with all
default periodic actions (log line, checkpoint, scalars; none of them due while
the clock runs), and the sides take turns. The bare side calls the same
compiled function on the same values in a `for` loop that does nothing else.
The rows `with infeed` also take each batch from the input's thread, although it
is the same batch. In the row `20 scalars` both sides are the loop, and each
step returns 20 scalars: one side writes nothing, the other all of them to the
writers `tensorboard` and `jsonl`.

CPU is what the training thread computes itself: its waits for the device, for a
core or for another thread are not in it.
"""

import argparse
import functools
import os
import pathlib
import platform as platform_info
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

# A matrix of 16 x 16 is a trivial step; one of 512 x 512 takes a millisecond.
_ROWS = {
  'sharded': ('bare-sharded-16', 'sharded-16'),
  'sharded, 1 ms': ('bare-sharded-512', 'sharded-512'),
  'with infeed': ('bare-sharded-16', 'infeed-16'),
  'with, 1 ms': ('bare-sharded-512', 'infeed-512'),
  '20 scalars': ('quiet-512', 'scalars-512'),
  'per-device': ('bare-pmap', 'pmap'),
}
_WARM_UP = 200


def _sharded_class(
  width: int, has_infeed: bool = False, scalars: int = 0
) -> Any:
  import jax.numpy as jnp
  import numpy as np
  import optax

  from jaxline import metrics
  from jaxline import sharded

  class Matrix(sharded.ShardedExperiment):
    """One weight matrix, plain gradient descent."""

    def init_fn(self, rng):
      return {'w': jnp.ones([width, width])}, {}

    def loss_fn(self, params, model_state, batch, rng, is_training):
      errors = jnp.square((batch['x'] @ params['w']).mean(-1))
      loss = metrics.Mean.of(errors, batch['weights'])
      more = {f'scalar_{i}': loss for i in range(1, scalars)}
      return loss.compute(), {'loss': loss, **more}, model_state

    def step_scalars(self, state, grads, updates):
      if not scalars:
        return super().step_scalars(state, grads, updates)
      return {}

    def make_optimizer(self):
      return optax.sgd(1e-6)

    @functools.cached_property
    def batch(self):
      batch = {
        'x': np.ones([32, width], np.float32),
        'weights': np.ones([32], np.float32),
      }
      return self.partitioner.put_batch(batch)

    def train_input(self):
      while True:
        yield self.batch

    def eval_input(self):
      return ()

    def step(self, *, global_step, rng, writer):
      if has_infeed:
        return super().step(global_step=global_step, rng=rng, writer=writer)
      self._state, scalars = self.compiled_train_step(
        self.state, self.batch, rng
      )
      return scalars

  return Matrix


def _pmap_class() -> Any:
  import jax
  import jax.numpy as jnp

  # The original or ours: this is code written against JAXline.
  from jaxline import experiment

  class Trivial(experiment.AbstractExperiment):
    """One weight vector, plain gradient descent, per device."""

    NON_BROADCAST_CHECKPOINT_ATTRS = {'_w': 'w'}

    def __init__(self, mode, init_rng=None):
      super().__init__(mode=mode, init_rng=init_rng)
      n = jax.local_device_count()
      self._w = jax.pmap(lambda x: x)(jnp.ones([n, 256]))
      self._x = jax.pmap(lambda x: x)(jnp.ones([n, 8, 256]))
      self.update = jax.pmap(self._update, axis_name='i', donate_argnums=0)

    def _update(self, w, x, rng, global_step):
      del rng, global_step
      loss, grad = jax.value_and_grad(
        lambda w: jnp.square((x * w[None]).mean(-1)).mean()
      )(w)
      return w - 0.1 * jax.lax.pmean(grad, 'i'), {'loss': loss}

    def step(self, *, global_step, rng, writer):
      self._w, scalars = self.update(self._w, self._x, rng, global_step)
      return scalars

    def evaluate(self, *, global_step, rng, writer):
      return {}

  return Trivial


class _Clock:
  """Measures the time of this thread: all of it, and what it computed."""

  def __init__(self) -> None:
    self._began = time.perf_counter(), time.thread_time()

  def stop(self, steps: int) -> None:
    now = time.perf_counter(), time.thread_time()
    print(
      *((b - a) / steps * 1e6 for a, b in zip(self._began, now, strict=True))
    )


def _timed(cls: Any, steps: int) -> Any:
  """Adds a clock that runs from the end of the warm-up to the last step."""

  class Timed(cls):
    def should_run_step(self, global_step, config):
      if global_step == _WARM_UP:
        self.clock = _Clock()
      if global_step == _WARM_UP + steps:
        self.clock.stop(steps)
        return False
      return True

  return Timed


def _run_loop(cls: Any, steps: int, writes: bool = False) -> None:
  from absl import flags

  from jaxline import base_config
  from jaxline import train
  from jaxline import utils

  flags.FLAGS.mark_as_parsed()
  config = base_config.get_base_config()
  config.training_steps = _WARM_UP + steps

  class Writer:
    def write_scalars(self, global_step: int, scalars: Any) -> None:
      """Nothing is due while the clock runs."""

  writer: Any = Writer()
  if writes:
    from jaxline import platform

    config.interval_type = 'steps'
    config.log_train_data_interval = 1
    config.log_tensors_interval = config.save_checkpoint_interval = -1
    config.checkpoint_dir = tempfile.mkdtemp(dir='.')
    writer = platform.create_writer(config, 'train')
  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  train.train(_timed(cls, steps), config, checkpointer, writer)


def _run_bare_sharded(width: int, steps: int) -> None:
  import jax

  experiment = _sharded_class(width)('train', jax.random.PRNGKey(0))
  rng = experiment.initialize_train_step_rng(jax.random.PRNGKey(0))
  batch = experiment.batch
  step, state = experiment.compiled_train_step, experiment.state
  for i in range(_WARM_UP + steps):
    if i == _WARM_UP:
      clock = _Clock()
    state, scalars = step(state, batch, rng)
  jax.block_until_ready(scalars)
  clock.stop(steps)


def _run_bare_pmap(steps: int) -> None:
  import jax
  import jax.numpy as jnp

  experiment = _pmap_class()('train')
  n = jax.local_device_count()
  rng = jax.pmap(lambda x: x)(jnp.zeros([n, 2], jnp.uint32))
  global_step = jax.pmap(lambda x: x)(jnp.zeros([n], jnp.int32))
  w, x = experiment._w, experiment._x
  for i in range(_WARM_UP + steps):
    if i == _WARM_UP:
      clock = _Clock()
    w, scalars = experiment.update(w, x, rng, global_step)
  jax.block_until_ready(scalars)
  clock.stop(steps)


def _worker(side: str, steps: int) -> None:
  if side == 'original':
    _revive_jax()
  kind, _, width = side.rpartition('-')
  if kind == 'bare-sharded':
    _run_bare_sharded(int(width), steps)
  elif kind in ('quiet', 'scalars'):
    cls = _sharded_class(int(width), scalars=20)
    _run_loop(cls, steps, writes=kind == 'scalars')
  elif kind in ('sharded', 'infeed'):
    _run_loop(_sharded_class(int(width), kind == 'infeed'), steps)
  elif side == 'bare-pmap':
    _run_bare_pmap(steps)
  else:
    _run_loop(_pmap_class(), steps)


def _revive_jax() -> None:
  """Gives today's JAX the functions that the original still calls."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  def device_put_sharded(shards: Any, devices: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(devices), ('i',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('i'))
    return jax.tree.map(
      lambda *x: jax.device_put(jnp.stack(x), sharding), *shards
    )

  jax.device_put_sharded = device_put_sharded
  jax.tree_map = jax.tree.map


def _measure(side: str, steps: int, original: str | None) -> tuple[float, ...]:
  here = str(pathlib.Path(__file__).resolve().parent.parent)
  path = original if side == 'original' else here
  with tempfile.TemporaryDirectory() as folder:
    result = subprocess.run(
      [sys.executable, __file__, '--worker', side, '--steps', str(steps)],
      env=os.environ | {'PYTHONPATH': str(path)},
      cwd=folder,
      capture_output=True,
      text=True,
    )
  if result.returncode:
    raise RuntimeError(f'{side} failed:\n{result.stderr[-3000:]}')
  return tuple(map(float, result.stdout.splitlines()[-1].split()))


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--steps', type=int, default=5000)
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--original', help="a folder with JAXline's own package")
  parser.add_argument('--rows', nargs='*', default=list(_ROWS))
  parser.add_argument('--worker', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    _worker(args.worker, args.steps)
    return

  import jax

  rows = {name: _ROWS[name] for name in args.rows}
  sides = list(dict.fromkeys(s for pair in rows.values() for s in pair))
  if args.original:
    sides.append('original')
  times: dict[str, list[tuple[float, ...]]] = {side: [] for side in sides}
  for _ in range(args.rounds):
    for side in sides:
      times[side].append(_measure(side, args.steps, args.original))
  print(
    f'jax {jax.__version__}, Python {platform_info.python_version()},'
    f' {os.cpu_count()} cores, {jax.device_count()} {jax.default_backend()}'
    f' device(s), {args.steps} steps, {args.rounds} rounds\n'
  )
  print(
    f'{"style":14}{"bare us":>10}{"loop us":>10}{"over us":>10}   ratio'
    f'{"CPU us":>10}{"over us":>10}'
  )

  def row(name: str, bare: str, loop: str) -> float:
    pairs = list(zip(times[bare], times[loop], strict=True))
    median = statistics.median
    over, cpu_over = (median(b[i] - a[i] for a, b in pairs) for i in (0, 1))
    print(
      f'{name:14}{median(a[0] for a, _ in pairs):10.1f}'
      f'{median(b[0] for _, b in pairs):10.1f}{over:10.1f}'
      f'{median(b[0] / a[0] for a, b in pairs):8.2f}'
      f'{median(b[1] for _, b in pairs):10.1f}{cpu_over:10.1f}'
    )
    return over

  for name, (bare, loop) in rows.items():
    ours = row(name, bare, loop)
  if args.original:
    theirs = row('original', 'bare-pmap', 'original')
    print(f'\nper-device loop / original loop, over bare: {ours / theirs:.2f}')


if __name__ == '__main__':
  main()
