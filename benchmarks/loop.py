"""Cost of the training loop: microseconds per step above a bare `for` loop.

    python -m benchmarks.loop
    python -m benchmarks.loop --original DIR   # DIR holds JAXline's own package

Each side runs a training step in a separate process, with all default periodic
actions (log line, checkpoint, scalars; none of them is due while the clock
runs). The bare side calls the same compiled function on the same values in a
`for` loop that does nothing else. The rows `input` take each batch from the
input's thread, although it is the same batch. In `20 scalars` and
`fingerprints` both sides are the loop, and each step returns 20 scalars. One
side writes nothing. The other writes all scalars to the writers `tensorboard`
and `jsonl`, or the fingerprint of each step.

CPU is the CPU time of the training thread. It excludes waiting for the device,
for a core or for another thread.
"""

import functools
import tempfile
import time
from typing import Any

from benchmarks import harness

# Side and baseline. A matrix of 16 x 16 is a trivial step; one of 512 x 512
# takes half a millisecond. The aims are microseconds.
_ROWS = (
  ('sharded, trivial step', 'sharded-16', 'bare-16', '<= 20'),
  ('sharded, step of 0.5 ms', 'sharded-512', 'bare-512', None),
  ('input, trivial step', 'infeed-16', 'bare-16', None),
  ('input, step of 0.5 ms', 'infeed-512', 'bare-512', None),
  ('20 scalars written', 'scalars-512', 'quiet-512', '<= 20'),
  ('fingerprints written', 'fingerprints-512', 'quiet-512', None),
  ('per-device, trivial step', 'pmap', 'bare_pmap', None),
)
_WARM_UP = 200
# The sides whose steps return 20 scalars -> the interval at which they are
# written, in steps, and whether to write fingerprints; None writes nothing.
_OF_SCALARS = {
  'quiet': None,
  'scalars': (1, False),
  'fingerprints': (-1, True),
}


def _sharded_class(width: int, reads_input: bool, scalars: int = 0) -> Any:
  import jax.numpy as jnp
  import numpy as np
  import optax

  from jaxline import metrics
  from jaxline import sharded
  from jaxline.metrics import scalars as scalars_lib
  from jaxline.parallel import placement

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
      return placement.put_batch(batch, self.partitioner)

    def train_input(self):
      while True:
        yield self.batch

    def eval_input(self):
      return ()

    def step(self, *, global_step, rng, writer):
      if reads_input:
        return super().step(global_step=global_step, rng=rng, writer=writer)
      self._state, packed = self.compiled_train_step(
        self.state, self.batch, rng
      )
      return scalars_lib.Scalars(packed)

  return Matrix


def _pmap_class() -> Any:
  import jax
  import jax.numpy as jnp

  # This code runs with JAXline's own package and with ours.
  from jaxline import experiment

  class Trivial(experiment.AbstractExperiment):
    """One weight vector on each device, plain gradient descent."""

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


def _now() -> tuple[float, float]:
  return time.perf_counter(), time.thread_time()


def _run_loop(
  cls: Any, steps: int, writes: tuple[int, bool] | None
) -> tuple[Any, Any]:
  """Runs the loop; returns the times after the warm-up and the last step."""
  from absl import flags

  from jaxline import base_config
  from jaxline import train
  from jaxline import utils

  times = []

  class Timed(cls):
    def should_run_step(self, global_step, config):
      if global_step in (_WARM_UP, _WARM_UP + steps):
        times.append(_now())
      return global_step < _WARM_UP + steps

  class Writer:
    def write_scalars(self, global_step: int, scalars: Any) -> None:
      """Ignores the scalars: none are due while the clock runs."""

  flags.FLAGS.mark_as_parsed()
  config = base_config.get_base_config()
  config.training_steps = _WARM_UP + steps
  writer: Any = Writer()
  if writes:
    from jaxline import platform

    config.interval_type = 'steps'
    config.log_train_data_interval, config.fingerprint = writes
    config.log_tensors_interval = config.save_checkpoint_interval = -1
    config.checkpoint_dir = tempfile.mkdtemp(dir='.')
    writer = platform.create_writer(config, 'train')
  train.train(
    Timed, config, utils.InMemoryCheckpointer(config, 'train'), writer
  )
  return times[0], times[1]


def _run_bare(step: Any, state: Any, args: Any, steps: int) -> tuple[Any, Any]:
  import jax

  for i in range(_WARM_UP + steps):
    if i == _WARM_UP:
      began = _now()
    state, scalars = step(state, *args)
  jax.block_until_ready(scalars)
  return began, _now()


def work(side: str, steps: int) -> list[float]:
  """Runs a side; returns microseconds a step by wall and by CPU time."""
  if side == 'original':
    _revive_jax()
  import jax
  import jax.numpy as jnp

  kind, _, width = side.partition('-')
  if kind == 'bare':
    trained = _sharded_class(int(width), False)('train', jax.random.PRNGKey(0))
    rng = trained.initialize_train_step_rng(jax.random.PRNGKey(0))
    args: Any = trained.batch, rng
    times = _run_bare(trained.compiled_train_step, trained.state, args, steps)
  elif kind == 'bare_pmap':
    mapped = _pmap_class()('train')
    n = jax.local_device_count()
    args = mapped._x, jnp.zeros([n, 2], jnp.uint32), jnp.zeros([n], jnp.int32)
    args = jax.pmap(lambda *x: x)(*args)
    times = _run_bare(mapped.update, mapped._w, args, steps)
  else:
    cls = (
      _sharded_class(int(width), kind == 'infeed', 20 * (kind in _OF_SCALARS))
      if width
      else _pmap_class()
    )
    times = _run_loop(cls, steps, _OF_SCALARS.get(kind))
  return [(b - a) / steps * 1e6 for a, b in zip(*times, strict=True)]


def _revive_jax() -> None:
  """Adds the functions that JAX has removed and the original still calls."""
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


def rows(options: harness.Options) -> list[harness.Row]:
  """Measures all sides in turns."""
  sides = list(dict.fromkeys(side for row in _ROWS for side in row[1:3]))
  if options.original:
    sides.append('original')
  steps = options.pick(4000, 200)

  def measure(side: str) -> harness.Sample:
    path = options.original or '' if side == 'original' else ''
    values = harness.call('benchmarks.loop', 'work', side, steps, path=path)
    return harness.Sample(*values)

  times = harness.turns(
    {side: functools.partial(measure, side) for side in sides},
    options.num_rounds(5),
  )
  unit = 'us/step'
  found = [
    harness.row(
      what,
      times[side],
      side_of_baseline,
      times[side_of_baseline],
      unit=unit,
      measure='difference',
      aim=aim,
      # The time of the writer's thread does not count.
      judged='cpu' if side == 'scalars-512' else 'wall',
    )
    for what, side, side_of_baseline, aim in _ROWS
  ]
  if options.original:
    over = [
      harness.pairwise(lambda a, b: a - b, times[side], times['bare_pmap'])
      for side in ('pmap', 'original')
    ]
    found.append(
      harness.row(
        'per-device loop, over bare',
        over[0],
        "JAXline's own loop, over bare",
        over[1],
        unit=unit,
        aim='<= 0.5',
      )
    )
  return found


if __name__ == '__main__':
  harness.main(rows, __doc__)
