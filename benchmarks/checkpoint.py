"""Cost of a checkpoint: time on the training thread, total, restore, memory.

    python -m benchmarks.checkpoint

The state has the shape of a language model with Adam: 500 MB of random float32
numbers. It is saved and restored by

- copy: numpy.array of each array, and nothing is written. This is the least
  that a save can block if training continues while the checkpoint is written;
- numpy: numpy.save of each array from the live state, and fsync;
- orbax: Orbax's StandardCheckpointer with its defaults. It compresses, and on a
  CPU it writes from the live arrays, so its save copies nothing;
- durable: `DurableCheckpointer`, which writes checksums and verifies them when
  it reads.

All writers call fsync on each file (in Orbax, its library TensorStore does), so
a total is the time until the data is on disk. The step after a save rewrites
the complete state while the checkpoint is written in the background; it is
compared with the same step at rest. Restores read from the page cache, as after
a crash of the program and not of the machine. They end with arrays on the
device, whose bits are compared with the saved ones.

Each save and each restore runs in a separate process, and the sides take turns.
A process saves several times and lets the disk become idle before each save.
The first save is listed separately, because it includes the setup. Memory is
the peak that the operating system reports (VmHWM, so this needs Linux) minus
the memory in use before, for the first and the last save, to a thousandth; for
a restore, the state itself is subtracted too.
"""

import functools
import os
import pathlib
import statistics
import tempfile
from typing import Any

from benchmarks import harness

_SAVES = 3
_LAYERS = 12
# Measurement of the durable checkpointer, baseline, aim.
_ROWS = (
  ('first block', 'copy', None),
  ('block', 'copy', '<= 1.3'),
  ('save', 'orbax', '<= 1'),
  ('save', 'numpy', None),
  ('restore', 'orbax', '<= 1'),
  ('restore', 'numpy', None),
)


def _experiment(mb: float) -> Any:
  """Returns an experiment whose state has `mb` MB and is not made yet."""
  import jax
  import jax.numpy as jnp
  import optax

  from jaxline import sharded

  # 16 + 12 * _LAYERS matrices of width x width, and two moments of each.
  width = max(8, round((mb * 1e6 / 12 / (16 + 12 * _LAYERS)) ** 0.5))

  class Model(sharded.ShardedExperiment):
    """The weights of a decoder with stacked layers; it computes nothing."""

    def init_fn(self, rng):
      shapes = {
        'embedding': (16 * width, width),
        'attention_norm': (_LAYERS, width),
        'qkv': (_LAYERS, width, 3, width),
        'out': (_LAYERS, width, width),
        'feed_forward_norm': (_LAYERS, width),
        'w1': (_LAYERS, width, 4 * width),
        'w2': (_LAYERS, 4 * width, width),
        'final_norm': (width,),
      }
      return {name: jnp.zeros(shape) for name, shape in shapes.items()}, {}

    def loss_fn(self, params, model_state, batch, rng, is_training):
      raise NotImplementedError('This model is not trained.')

    def make_optimizer(self):
      return optax.adam(1e-3)

    def train_input(self):
      return iter(())

    def eval_input(self):
      return ()

  return Model('train', jax.random.key(0))


def _random_state(experiment: Any) -> Any:
  """Returns a state of random numbers on the host, the same at each call."""
  import jax
  import numpy as np

  rng = np.random.default_rng(0)

  def fill(x: Any) -> Any:
    if x.dtype == np.float32:
      return rng.standard_normal(x.shape, np.float32)
    return np.ones(x.shape, x.dtype)

  return jax.tree.map(fill, experiment.snapshot_template()['state'])


class _Copy:
  """Only copies the state to the host."""

  def __init__(self, folder: pathlib.Path, experiment: Any):
    del folder
    self._experiment = experiment

  def save(self, step: int) -> None:
    import jax
    import numpy as np

    del step
    self._copy = [np.array(x) for x in jax.tree.leaves(self._experiment.state)]

  def wait(self) -> None:
    del self._copy


class _Numpy:
  """Writes one file for each array."""

  def __init__(self, folder: pathlib.Path, experiment: Any):
    self._folder = folder
    self._experiment = experiment

  def save(self, step: int) -> None:
    import jax
    import numpy as np

    folder = self._folder / str(step)
    folder.mkdir(parents=True)
    for i, x in enumerate(jax.tree.leaves(self._experiment.state)):
      with open(folder / f'{i}.npy', 'wb') as f:
        np.save(f, x)
        f.flush()
        os.fsync(f.fileno())

  def wait(self) -> None:
    """Does nothing: `save` has written everything."""

  def restore(self, step: int) -> Any:
    import jax
    import numpy as np

    template = self._experiment.snapshot_template()['state']
    targets, tree = jax.tree.flatten(template)
    folder = self._folder / str(step)
    arrays = [
      jax.device_put(np.load(folder / f'{i}.npy'), x.sharding)
      for i, x in enumerate(targets)
    ]
    return jax.tree.unflatten(tree, arrays)


class _Orbax:
  """Uses Orbax."""

  def __init__(self, folder: pathlib.Path, experiment: Any):
    import orbax.checkpoint as ocp

    self._folder = folder
    self._experiment = experiment
    self._checkpointer: Any = ocp.StandardCheckpointer()

  def save(self, step: int) -> None:
    self._checkpointer.save(self._folder / str(step), self._experiment.state)

  def wait(self) -> None:
    self._checkpointer.wait_until_finished()

  def restore(self, step: int) -> Any:
    template = self._experiment.snapshot_template()['state']
    return self._checkpointer.restore(self._folder / str(step), template)


class _Durable:
  """Uses the checkpointer of this library."""

  def __init__(self, folder: pathlib.Path, experiment: Any):
    from jaxline import base_config
    from jaxline.checkpoint import durable

    config = base_config.get_base_config()
    config.checkpoint_dir = str(folder)
    self._checkpointer = durable.DurableCheckpointer(config, 'train')
    self._live = self._checkpointer.get_experiment_state('latest')
    self._live.experiment_module = experiment

  def save(self, step: int) -> None:
    self._live.global_step = step
    self._checkpointer.save('latest')

  def wait(self) -> None:
    self._checkpointer.wait_for_checkpointing_to_finish()

  def restore(self, step: int) -> Any:
    self._live.global_step = 0
    self._checkpointer.restore('latest', step)
    return self._live.experiment_module.state


_CLASSES = {
  'copy': _Copy,
  'numpy': _Numpy,
  'orbax': _Orbax,
  'durable': _Durable,
}


def _median(samples: list[harness.Sample]) -> harness.Sample:
  wall, cpu = (statistics.median(x) for x in zip(*samples, strict=True))
  return harness.Sample(wall, cpu)


def save(name: str, folder: str, mb: float) -> dict[str, Any]:
  """Saves several times; runs in a separate process."""
  import jax

  experiment = _experiment(mb)
  experiment.restore_from_snapshot({'state': _random_state(experiment)})
  # Otherwise the state is still being copied when the measurement begins.
  leaves = jax.tree.leaves(jax.block_until_ready(experiment.state))
  size = sum(x.nbytes for x in leaves)
  side = _CLASSES[name](pathlib.Path(folder), experiment)
  blocks, totals, copies = [], [], []
  for step in range(_SAVES):
    peak = harness.Peak()
    os.sync()
    began = harness.now()
    side.save(step)
    blocks.append(harness.since(began, harness.now(), None))
    side.wait()
    totals.append(harness.since(began, harness.now(), None))
    # Linux counts the memory of threads only approximately.
    copies.append(round(peak.grown() / size, 3))
  first, *later = blocks
  return {
    'first block': first,
    'block': _median(later),
    'save': _median(totals[1:]),
    'memory of the first save': copies[0],
    'memory of a save': copies[-1],
  }


def steps(folder: str, mb: float) -> dict[str, Any]:
  """Times a step at rest and after a save; runs in a separate process."""
  import jax

  experiment = _experiment(mb)
  experiment.restore_from_snapshot({'state': _random_state(experiment)})
  side = _Durable(pathlib.Path(folder), experiment)
  add = jax.jit(
    lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0
  )

  def step() -> None:
    experiment._state = jax.block_until_ready(add(experiment._state))

  step()  # Compiles.
  at_rest, after = [], []
  for i in range(_SAVES):
    os.sync()
    at_rest.append(harness.timed(step))
    side.save(i)
    after.append(harness.timed(step))
    side.wait()
  return {'a step': _median(at_rest), 'step after a save': _median(after)}


def restore(name: str, folder: str, mb: float) -> dict[str, Any]:
  """Restores once and compares all bits; runs in a separate process."""
  import jax
  import numpy as np

  experiment = _experiment(mb)
  side = _CLASSES[name](pathlib.Path(folder), experiment)
  peak = harness.Peak()
  began = harness.now()
  state = jax.block_until_ready(side.restore(_SAVES - 1))
  seconds = harness.since(began, harness.now(), None)
  grown = peak.grown()
  saved = jax.tree.leaves(_random_state(experiment))
  for got, expected in zip(jax.tree.leaves(state), saved, strict=True):
    np.testing.assert_array_equal(got, expected)
  size = sum(x.nbytes for x in saved)
  return {'restore': seconds, 'memory of a restore': grown / size - 1}


def _measure(name: str, mb: float) -> dict[str, Any]:
  with tempfile.TemporaryDirectory() as folder:
    args = 'benchmarks.checkpoint', name, folder, mb
    env = {'JAX_PLATFORMS': 'cpu'}
    measured = harness.call(args[0], 'save', *args[1:], env=env)
    if name != 'copy':
      measured |= harness.call(args[0], 'restore', *args[1:], env=env)
    if name == 'durable':
      folder = f'{folder}/steps'
      measured |= harness.call(args[0], 'steps', folder, mb, env=env)
    return measured


def rows(options: harness.Options) -> list[harness.Row]:
  """Measures all sides in turns."""
  mb = options.pick(500, 5)
  rounds = harness.turns(
    {side: functools.partial(_measure, side, mb) for side in _CLASSES},
    options.num_rounds(3),
  )
  found = [
    harness.row(
      what,
      harness.fields(rounds['durable'], what),
      baseline,
      harness.fields(rounds[baseline], what),
      unit='s',
      aim=aim,
    )
    for what, baseline, aim in _ROWS
  ]
  ours = rounds['durable']
  found.append(
    harness.row(
      'step after a save',
      harness.fields(ours, 'step after a save'),
      'a step',
      harness.fields(ours, 'a step'),
      unit='s',
    )
  )
  for what, aim in (
    ('memory of the first save', None),
    ('memory of a save', '<= 1'),
    ('memory of a restore', '<= 1'),
  ):
    samples = harness.fields(ours, what)
    found.append(harness.row(what, samples, unit='copies', aim=aim))
  return found


if __name__ == '__main__':
  harness.main(rows, __doc__)
