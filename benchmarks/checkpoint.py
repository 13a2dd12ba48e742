"""What a checkpoint costs: time on the training thread, total, restore, memory.

    python -m benchmarks.checkpoint [--mb=500] [--rounds=5] [--dir=DIR]

The state is that of a language model with Adam, random float32 numbers, saved
and restored by

- copy: numpy.array of each array, nothing written; the least that a save can
  block, if training is to go on while it is written;
- numpy: numpy.save of each array from the live state, and fsync;
- orbax: Orbax's StandardCheckpointer as it comes. It compresses, and on a CPU
  it writes from the live arrays: its save copies nothing;
- orbax, raw: the same without compression, one directory an array, as the
  durable checkpointer sets it;
- durable: `DurableCheckpointer`, whose save hashes what it has written, and
  whose restore verifies that first.

All that write also call fsync on each file (Orbax's library TensorStore does
by itself), so a total is a time to the disk. Restores read from the page cache,
as after a crash of the program and not of the machine; all end with arrays on
the device, and their bits are compared with what was saved.

Each save and each restore has a process of its own, and the sides take turns.
A process saves several times, the disk being idle before each: the first save
is told apart, since it also pays for what is set up once. Memory is the highest
that the operating system has seen (VmHWM, so this needs Linux) above what was
there before; of a restore, without the state itself.
"""

import argparse
import ctypes
import json
import os
import pathlib
import platform as platform_info
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

_SAVES = 3
_LAYERS = 12
SIDES = ('copy', 'numpy', 'orbax', 'orbax, raw', 'durable')


def _experiment(mb: float) -> Any:
  """Returns a fresh experiment with a state of so many MB, not yet made."""
  import jax
  import jax.numpy as jnp
  import optax

  from jaxline import sharded

  # 16 + 12 * _LAYERS matrices of width x width, each with two moments.
  width = max(8, round((mb * 1e6 / 12 / (16 + 12 * _LAYERS)) ** 0.5))

  class Model(sharded.ShardedExperiment):
    """The weights of a decoder, its layers stacked; it computes nothing."""

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
      raise NotImplementedError('Nothing is trained here.')

    def make_optimizer(self):
      return optax.adam(1e-3)

    def train_input(self):
      return iter(())

    def eval_input(self):
      return ()

  return Model('train', jax.random.key(0))


def _random_state(experiment: Any) -> Any:
  """Returns a state of random numbers, on the host; always the same."""
  import jax
  import numpy as np

  rng = np.random.default_rng(0)

  def fill(x: Any) -> Any:
    if x.dtype == np.float32:
      return rng.standard_normal(x.shape, np.float32)
    return np.ones(x.shape, x.dtype)

  return jax.tree.map(fill, experiment.snapshot_template()['state'])


class _Copy:
  """The copy to the host alone."""

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
  """One file an array."""

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
    """Nothing is left to do."""

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
  """Orbax alone."""

  def __init__(self, folder: pathlib.Path, experiment: Any, raw: bool):
    import orbax.checkpoint as ocp

    self._folder = folder
    self._experiment = experiment
    self._args: Any = (ocp.args.StandardSave, ocp.args.StandardRestore)
    if raw:
      self._checkpointer: Any = ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(
          use_ocdbt=False, use_zarr3=True, use_compression=False
        )
      )
      self._args = (
        ocp.args.PyTreeSave,
        lambda template: ocp.args.PyTreeRestore(
          template,
          restore_args=ocp.checkpoint_utils.construct_restore_args(template),
        ),
      )
    else:
      self._checkpointer = ocp.AsyncCheckpointer(
        ocp.StandardCheckpointHandler()
      )

  def save(self, step: int) -> None:
    args = self._args[0](self._experiment.state)
    self._checkpointer.save(self._folder / str(step), args=args)

  def wait(self) -> None:
    self._checkpointer.wait_until_finished()

  def restore(self, step: int) -> Any:
    template = self._experiment.snapshot_template()['state']
    return self._checkpointer.restore(
      self._folder / str(step), args=self._args[1](template)
    )


class _Durable:
  """The checkpointer of this library."""

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


def _side(name: str, folder: pathlib.Path, experiment: Any) -> Any:
  if name.startswith('orbax'):
    return _Orbax(folder, experiment, name == 'orbax, raw')
  sides = {'copy': _Copy, 'numpy': _Numpy, 'durable': _Durable}
  return sides[name](folder, experiment)


def _memory(what: str) -> int:
  """Returns a line of this process's status, in bytes."""
  status = pathlib.Path('/proc/self/status').read_text()
  line = next(x for x in status.splitlines() if x.startswith(what))
  return int(line.split()[1]) << 10


class _Peak:
  """Measures by how much memory grows at most."""

  def __init__(self) -> None:
    ctypes.CDLL(None).malloc_trim(0)  # What is free shall not count as used.
    pathlib.Path('/proc/self/clear_refs').write_text('5')  # Resets VmHWM.
    self._before = _memory('VmRSS')

  def grown(self) -> int:
    return _memory('VmHWM') - self._before


def _save_worker(name: str, folder: pathlib.Path, mb: float) -> dict[str, Any]:
  import jax

  experiment = _experiment(mb)
  experiment.restore_from_snapshot({'state': _random_state(experiment)})
  size = sum(x.nbytes for x in jax.tree.leaves(experiment.state))
  side = _side(name, folder, experiment)
  blocks, totals = [], []
  peak = _Peak()
  for step in range(_SAVES):
    os.sync()
    began = time.perf_counter()
    side.save(step)
    blocks.append(time.perf_counter() - began)
    side.wait()
    totals.append(time.perf_counter() - began)
  return {
    'first block': blocks[0],
    'block': statistics.median(blocks[1:]),
    'first save': totals[0],
    'save': statistics.median(totals[1:]),
    'save copies': peak.grown() / size,
    'arrays': len(jax.tree.leaves(experiment.state)),
    'bytes': size,
  }


def _restore_worker(
  name: str, folder: pathlib.Path, mb: float
) -> dict[str, Any]:
  import jax
  import numpy as np

  experiment = _experiment(mb)
  side = _side(name, folder, experiment)
  peak = _Peak()
  began = time.perf_counter()
  state = jax.block_until_ready(side.restore(_SAVES - 1))
  seconds = time.perf_counter() - began
  grown = peak.grown()
  saved = jax.tree.leaves(_random_state(experiment))
  for got, expected in zip(jax.tree.leaves(state), saved, strict=True):
    np.testing.assert_array_equal(got, expected)
  size = sum(x.nbytes for x in saved)
  return {'restore': seconds, 'restore copies': grown / size - 1}


def _run(what: str, name: str, folder: pathlib.Path, mb: float) -> Any:
  root = pathlib.Path(__file__).resolve().parent.parent
  result = subprocess.run(
    [
      *(sys.executable, __file__, '--worker', what, '--side', name),
      *('--dir', str(folder), '--mb', str(mb)),
    ],
    env=os.environ | {'PYTHONPATH': str(root), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  if result.returncode:
    raise RuntimeError(f'{what} by {name} failed:\n{result.stderr[-3000:]}')
  return json.loads(result.stdout.splitlines()[-1])


def _measure(name: str, folder: pathlib.Path, mb: float) -> dict[str, Any]:
  try:
    measured = _run('save', name, folder, mb)
    if name != 'copy':
      measured |= _run('restore', name, folder, mb)
    return measured
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def _print(rounds: list[dict[str, dict[str, Any]]], sides: list[str]) -> None:
  columns = ('first block', 'block', 'first save', 'save', 'restore')
  copies = ('save copies', 'restore copies')
  print(f'{"":12}' + ''.join(f'{c:>15}' for c in columns + copies))
  for side in sides:
    line = f'{side:12}'
    for c in columns + copies:
      if c in rounds[0][side]:
        line += f'{statistics.median(r[side][c] for r in rounds):15.3f}'
      else:
        line += f'{"":15}'
    print(line)
  print()
  for what, baseline in (
    ('first block', 'copy'),
    ('block', 'copy'),
    ('save', 'orbax'),
    ('save', 'orbax, raw'),
    ('save', 'numpy'),
    ('restore', 'orbax'),
    ('restore', 'orbax, raw'),
    ('restore', 'numpy'),
  ):
    if {'durable', baseline} <= set(sides):
      ratios = [r['durable'][what] / r[baseline][what] for r in rounds]
      print(
        f'{what}, durable / {baseline}: {statistics.median(ratios):.2f}'
        f' [{min(ratios):.2f}, {max(ratios):.2f}]'
      )
  for what in copies:
    if 'durable' in sides:
      values = [r['durable'][what] for r in rounds]
      print(f'{what}, durable: at most {max(values):.2f}')


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--mb', type=float, default=500, help='of the state')
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--sides', nargs='+', default=SIDES, choices=SIDES)
  parser.add_argument('--dir', help='where to write; default: temporary')
  parser.add_argument('--worker', help=argparse.SUPPRESS)
  parser.add_argument('--side', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    work = {'save': _save_worker, 'restore': _restore_worker}[args.worker]
    print(json.dumps(work(args.side, pathlib.Path(args.dir), args.mb)))
    return

  import jax
  import orbax.checkpoint as ocp

  rounds = []
  with tempfile.TemporaryDirectory(dir=args.dir) as folder:
    for i in range(args.rounds):
      # Forth and back: no side always runs after the same other.
      rounds.append(
        {
          side: _measure(side, pathlib.Path(folder) / 'run', args.mb)
          for side in args.sides[:: -1 if i % 2 else 1]
        }
      )
  state = rounds[0][args.sides[0]]
  print(
    f'jax {jax.__version__}, orbax-checkpoint {ocp.__version__}, Python'
    f' {platform_info.python_version()}, {os.cpu_count()} cores, one CPU'
    f' device; {state["bytes"] / 1e6:.0f} MB in {state["arrays"]} arrays.'
    f' Seconds, and memory in copies of the state: medians of {args.rounds}'
    ' rounds.\n'
  )
  _print(rounds, args.sides)


if __name__ == '__main__':
  main()
