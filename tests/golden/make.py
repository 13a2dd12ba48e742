"""Makes the checkpoints beside it: python tests/golden/make.py

To be run by hand, and only when the format changes on purpose (then raise
files.FORMAT, and leave those of the old format where they are under another
name: what was saved once must be restored for ever). A test restores each of
them and compares it with the values of the formulas here, so this file says
what a checkpoint of this format holds. Two fake CPU devices, as in the tests.
"""

import os
import pathlib
import shutil
import sys
from typing import Any

if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'
  sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxline import base_config
from jaxline import experiment
from jaxline import partitioning
from jaxline import sharded
from jaxline.checkpoint import durable
from jaxline.compat import devices

HERE = pathlib.Path(__file__).resolve().parent
STEP = 12


class PerDevice(experiment.AbstractExperiment):
  """JAXline's style: the first device's rows, and whole objects."""

  CHECKPOINT_ATTRS = {'_params': 'params', '_opt_state': 'opt_state'}
  NON_BROADCAST_CHECKPOINT_ATTRS = {'_host': 'host'}

  def __init__(self, on: int):
    """Holds the formula's values, or zeros.

    Args:
      on: 1, or 0 for zeros.
    """
    super().__init__('train', None)
    params = {'w': on * jnp.arange(6.0).reshape(2, 3), 'b': jnp.float32(on)}
    opt_state = optax.sgd(0.1, momentum=0.9).init(params)
    opt_state = jax.tree.map(lambda x: x + 3 * on, opt_state)
    self._params = devices.bcast_local_devices(params)
    self._opt_state = devices.bcast_local_devices(opt_state)
    self._host = {
      'seen': 7 * on,
      'name': 'ü' * on,
      'limit': float('inf') if on else 0.0,
      'order': on * np.arange(4, dtype='>i4'),
      'days': np.array(['2026-01-02'], 'M8[D]') if on else None,
      'half': on * jnp.arange(3, dtype=jnp.bfloat16),
      'key': jax.random.key(5 * on),
      'pair': (on, [None, {'x': b'\0' * on}]),
    }

  def step(self, **unused: Any) -> Any:
    """Is not called."""

  def evaluate(self, **unused: Any) -> Any:
    """Is not called."""


class Sharded(sharded.ShardedExperiment):
  """The sharded style, with the position of the data."""

  def __init__(self, on: int):
    """Holds the formula's values, or zeros.

    Args:
      on: 1, or 0 for zeros.
    """
    super().__init__('train', jax.random.key(0), sharding='fsdp')
    self.on = on
    if on:
      self._position = {'epoch': 2, 'order': np.arange(5), 'file': 'part-1'}

  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the formula's values."""
    w = self.on * jnp.arange(8.0).reshape(4, 2)
    model_state = {
      'key': jax.random.key(6 * self.on),
      'int4': jnp.full([3], self.on, jnp.int4),
      'empty': jnp.zeros([0, 2]),
    }
    return {'w': partitioning.Logical(w, ('embed', 'mlp'))}, model_state

  def loss_fn(self, *unused: Any) -> Any:
    """Is not called."""

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns one with named tuples in its state."""
    return optax.adam(0.1)

  def train_input(self) -> Any:
    """Returns what has a position and no batches."""
    return Position()

  def eval_input(self) -> Any:
    """Is not called."""


class Position:
  """An input without batches."""

  def __init__(self) -> None:
    """Stands at the beginning."""
    self.state: Any = None

  def __iter__(self) -> 'Position':
    return self

  def __next__(self) -> Any:
    raise StopIteration

  def get_state(self) -> Any:
    """Returns what was set."""
    return self.state

  def set_state(self, state: Any) -> None:
    """Goes to a position."""
    self.state = state


MADE = {'per_device': PerDevice, 'sharded': Sharded, 'best': PerDevice}


def key_of(name: str, on: int) -> jax.Array:
  """Returns the step key; raw in JAXline's style."""
  if name == 'sharded':
    return jax.random.key(4 * on)
  return devices.bcast_local_devices(jax.random.PRNGKey(4 * on))


def entries_of(name: str, on: int) -> dict[str, Any]:
  """Returns what the live state has besides."""
  if name != 'best':
    return {}
  return {
    'best_eval_metric_value': 0.25 if on else float('-inf'),
    'best_model_eval_metric': 'accuracy' * on,
    'note': {'scores': on * np.arange(3, dtype=np.float16)},
  }


def main() -> None:
  """Writes all of them anew."""
  os.chdir(HERE)
  for name in MADE:
    shutil.rmtree(HERE / name, ignore_errors=True)
    config = base_config.get_base_config()
    config.checkpoint_dir = name  # Is in the record: none of this machine.
    _save(config, name, 'train', 'latest')
    if name == 'best':  # As evaluation makes it: of a checkpoint, by links.
      _save(config, name, 'eval', 'best')
      shutil.rmtree(HERE / name / 'checkpoints' / 'latest')
    for folder in ('claims', '.evaluating-eval'):
      shutil.rmtree(HERE / name / 'checkpoints' / folder, ignore_errors=True)
    for path in (HERE / name).rglob('commit_success.txt'):
      path.unlink()  # Orbax's, read by nobody; tells where it was made.


def _save(config: Any, name: str, mode: str, series: str) -> None:
  checkpointer = durable.DurableCheckpointer(config, mode)
  live = MADE[name](1)
  if series == 'best':
    state = checkpointer.get_experiment_state('latest')
    state.update(global_step=0, experiment_module=live, train_step_rng=None)
    checkpointer.restore('latest')
  state = checkpointer.get_experiment_state(series)
  state.update(
    global_step=STEP,
    experiment_module=live,
    train_step_rng=key_of(name, 1),
    **(entries_of(name, 1) if series == 'best' else {}),
  )
  checkpointer.save(series)
  checkpointer.wait_for_checkpointing_to_finish()
  checkpointer.close()


if __name__ == '__main__':
  main()
