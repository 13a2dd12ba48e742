"""Experiments, checkpointers and damage for the tests of checkpoints."""

from collections.abc import Iterator
import dataclasses
import json
import os
import pathlib
import shutil
import types
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import ml_dtypes
import numpy as np
import optax
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline import metrics
from jaxline import sharded
from jaxline.checkpoint import durable
from jaxline.compat import checkpointers
from jaxline.parallel import devices
from jaxline.parallel import partitioning
from jaxline.run_directory import owner


def assert_same(got: Any, want: Any, name: str = '') -> None:
  """Fails unless two values are the same, bit for bit and in kind."""
  if isinstance(want, jax.Array) and jnp.issubdtype(
    want.dtype, jax.dtypes.prng_key
  ):
    assert got.dtype == want.dtype, name
    got, want = jax.random.key_data(got), jax.random.key_data(want)
  if isinstance(want, np.ndarray | np.generic | jax.Array):
    bits = lambda x: (x.dtype, x.shape, np.asarray(x).tobytes())
    assert isinstance(got, jax.Array) == isinstance(want, jax.Array), name
    assert isinstance(got, np.generic) == isinstance(want, np.generic), name
    assert bits(got) == bits(want), (name, got, want)
    return
  assert type(got) is type(want), (name, got, want)
  if isinstance(want, list | tuple):
    got, want = dict(enumerate(got)), dict(enumerate(want))
  elif dataclasses.is_dataclass(want):
    got, want = vars(got), vars(want)
  if isinstance(want, dict):
    assert set(got) == set(want), name
    for key in want:
      assert_same(got[key], want[key], f'{name}/{key}')
  else:
    assert got == want or (got != got and want != want), name


def numpy_values() -> dict[str, np.ndarray]:
  """Returns arrays of all types that can be stored."""
  values = {
    'float': np.float32([0.1, -0.0, np.inf, -np.inf]),
    'nan payload': np.uint64([0x7FF8000000000001]).view(np.float64),
    '0-d': np.array(7, np.int16), 'bool': np.array([True, False]),
    'complex': np.complex64([1 + 2j, complex(np.nan, -0.0)]),
    'complex128': np.array([1 - 2j]), 'int8': np.int8([-128, 127]),
    'uint64': np.uint64([2**64 - 1]), 'float16': np.float16([0.1]),
    'empty': np.zeros([0, 3], np.float32), 'strided': np.arange(10)[::3],
    'fortran': np.asfortranarray(np.arange(6.0).reshape(2, 3)),
  }  # fmt: skip
  for name in (
    'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float8_e3m4',
    'float8_e8m0fnu', 'float8_e4m3b11fnuz', 'int4', 'uint4', 'int2',
    'float4_e2m1fn', 'float6_e2m3fn',
  ):  # fmt: skip
    dtype = np.dtype(getattr(ml_dtypes, name))
    # All values of a type of one byte.
    every = np.arange(256 if 'float8' in name else 2, dtype=np.uint8)
    every = every.view(dtype) if 'float8' in name else every.astype(dtype)
    one, none = np.array(1, dtype), np.zeros([0], dtype)
    values |= {name: every, f'{name} 0-d': one, f'empty {name}': none}
  return values


def rows(x: Any) -> Any:
  """Puts a copy of each array on each device."""
  return devices.bcast_local_devices(x)


class PerDevice(experiment.FullExperiment):
  """Holds what it is told to, in JAXline's style."""

  def __init__(self, attrs: dict[str, Any], whole: dict[str, Any]):
    super().__init__('train', None)
    self.CHECKPOINT_ATTRS = {f'_a{i}': name for i, name in enumerate(attrs)}
    self.NON_BROADCAST_CHECKPOINT_ATTRS = {
      f'_b{i}': name for i, name in enumerate(whole)
    }
    for i, value in enumerate(attrs.values()):
      setattr(self, f'_a{i}', rows(value))
    for i, value in enumerate(whole.values()):
      setattr(self, f'_b{i}', value)

  step = evaluate = None

  def held(self) -> dict[str, Any]:
    names = self.CHECKPOINT_ATTRS | self.NON_BROADCAST_CHECKPOINT_ATTRS
    return {name: getattr(self, attr) for attr, name in names.items()}


class Batches:
  """Input whose position holds an array and plain values."""

  def __init__(self):
    self.index = 0
    self.order = np.random.default_rng(0).permutation(8)

  def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
    return self

  def __next__(self) -> dict[str, np.ndarray]:
    i = self.order[self.index % 8]
    self.index += 1
    self.order = np.roll(self.order, 1)
    return {'x': np.full([8, 4], i, np.float32)}

  def get_state(self) -> dict[str, Any]:
    return {'index': self.index, 'order': self.order, 'of': ('a', 2.5)}

  def set_state(self, state: dict[str, Any]) -> None:
    self.index, self.order = state['index'], state['order']


class Sharded(sharded.ShardedExperiment):
  """A step that depends on all there is: weights, key, input, optimizer."""

  def __init__(self, mode='train', seed=0, sharding='fsdp', size=4, **more):
    self.size, self.more = size, more
    super().__init__(mode, jax.random.key(seed), sharding=sharding)

  def init_fn(self, rng):
    w = jax.random.normal(rng, [self.size])
    params = {
      'w': partitioning.Logical(w, ('embed',)),
      'layer': {'b': jnp.arange(6.0).reshape(2, 3)},
    }
    model_state = {
      'key': jax.random.key(3),
      'empty': jnp.zeros([0, 2]),
      'half': jnp.arange(4, dtype=jnp.bfloat16),
      'int4': jnp.arange(4, dtype=jnp.int4),
    }
    return params | self.more.get('params', {}), model_state

  def loss_fn(self, params, model_state, batch, rng, is_training):
    key, _ = jax.random.split(model_state['key'])
    noise = jax.random.normal(rng, [1]) + jax.random.normal(key, [1])
    losses = jnp.square(batch['x'] * params['w'][None] + noise[None]).mean(-1)
    losses += params['layer']['b'].sum()
    loss = metrics.Mean.of(losses, batch['weights'])
    return loss.compute(), {'loss': loss}, {**model_state, 'key': key}

  def make_optimizer(self):
    return optax.adam(1e-2)

  def train_input(self):
    return Batches()

  def eval_input(self):
    return [{'x': np.ones([8, 4], np.float32)}]


def advance(live: Sharded, steps: int) -> None:
  for step in range(steps):
    live.step(global_step=step, rng=jax.random.key(step), writer=None)
    jax.block_until_ready(live.state)


def weights(value: float = 0.0) -> PerDevice:
  return PerDevice({'w': jnp.full([3], float(value))}, {'n': int(value)})


def make_config(directory: Any, **values: Any) -> config_dict.ConfigDict:
  config = base_config.get_base_config()
  config.checkpoint_dir = os.fspath(directory)
  config.interval_type = 'steps'
  with config.ignore_type():
    config.update(values)
  return config


def note(checkpointer, step, value, lengths):
  """Notes an evaluation, and waits until it is noted."""
  checkpointer.directory.note_evaluation(step, value, lambda: lengths)
  checkpointer.wait_for_checkpointing_to_finish()


@pytest.fixture
def open_run(tmp_path):
  """Makes checkpointers of a run in `tmp_path`; closes them at the end."""
  made = []

  def make(mode='train', directory=tmp_path / 'run', mirrors=False, **values):
    config = make_config(directory, **values)
    made.append(durable.DurableCheckpointer(config, mode))
    if mirrors:  # In JAXline's dictionary of checkpoints.
      return checkpointers.MirroredCheckpointer(made[-1])
    return made[-1]

  yield make
  for checkpointer in made:
    checkpointer.close()


@pytest.fixture(scope='module')
def kept(tmp_path_factory) -> pathlib.Path:
  """The directory of a run with the sharded steps 3 and 5, only to be read."""
  directory = tmp_path_factory.mktemp('kept') / 'run'
  config = make_config(directory)
  checkpointer, live = durable.DurableCheckpointer(config, 'train'), Sharded()
  advance(live, 1)
  save(checkpointer, live, 3, 5, key=jax.random.key(1))
  checkpointer.close()
  return directory


@pytest.fixture
def copied(kept, tmp_path) -> pathlib.Path:
  """A copy of that run."""
  return shutil.copytree(kept, tmp_path / 'run')


@pytest.fixture
def two(open_run, tmp_path) -> pathlib.Path:
  """The directory of a run with the steps 3 and 5, of weights 1 and 2."""
  checkpointer = open_run()
  save(checkpointer, weights(1), 3)
  save(checkpointer, weights(2), 5)
  checkpointer.close()
  return tmp_path / 'run'


def fill(checkpointer, live, step=0, series='latest', key='same', **more):
  """Returns the live state, filled as the loops do."""
  state = checkpointer.get_experiment_state(series)
  state.global_step = step
  state.experiment_module = live
  if isinstance(key, str):
    key = rows(jax.random.PRNGKey(7))
  state.train_step_rng = key
  state.update(more)
  return state


def at_flush(checkpointer, wait):
  """Lets checkpoints of `latest` call a function before they are written."""
  log = types.SimpleNamespace(flush_async=lambda: lambda: wait() and None)
  checkpointer.directory.logs = [log]


def save(checkpointer, live, *steps, **more):
  for step in steps or [5]:
    fill(checkpointer, live, step, **more)
    checkpointer.save(more.get('series', 'latest'))
  checkpointer.wait_for_checkpointing_to_finish()


def save_best(checkpointer, live, step, value, **more):
  more |= {'best_eval_metric_value': value, 'best_model_eval_metric': 'loss'}
  save(checkpointer, live, step, series='best', **more)


def restore(checkpointer, live, step=None, **more):
  state = fill(checkpointer, live, -1, **more)
  checkpointer.restore(more.get('series', 'latest'), step=step)
  return state


def assert_refused(
  checkpointer, live, tmp_path, match, error=ValueError, **more
):
  """Asserts that a restore is refused and leaves everything as it was."""
  state = fill(checkpointer, live, -1, **more)
  live.snapshot_state()  # Makes what is made at the first use.
  before, held = dict(state), dict(vars(live))
  there = tree_of(tmp_path)
  with pytest.raises(error, match=match) as e:
    checkpointer.restore('latest')
  assert all(getattr(live, name) is held[name] for name in held)
  assert all(state[name] is before[name] for name in before)
  assert tree_of(tmp_path) == there
  return str(e.value)


class Clock:
  """Takes the place of the module `time`; whoever sleeps lets time pass."""

  def __init__(self):
    self.now, self.at_sleep = 1000.0, lambda: None

  def monotonic(self):
    return self.now

  def sleep(self, secs):
    self.now += secs
    self.at_sleep()


@pytest.fixture
def clock(monkeypatch) -> Clock:
  """The clock of claims and marks."""
  clock = Clock()
  monkeypatch.setattr(owner, 'time', clock)
  monkeypatch.setattr(owner, '_dead', set())
  return clock


def tree_of(path: pathlib.Path) -> dict[str, bytes]:
  """Returns the content of all files below a directory, but for locks."""
  return {
    str(p.relative_to(path)): p.read_bytes()
    for p in path.rglob('*')
    if p.is_file() and p.suffix != '.lock'
  }


def manifest_of(run: pathlib.Path, step=5, series='latest') -> pathlib.Path:
  return run / 'checkpoints' / series / f'{step}.json'


def data_of(run: pathlib.Path, step=5, series='latest') -> pathlib.Path:
  manifest = json.loads(manifest_of(run, step, series).read_text())
  return run / 'checkpoints' / 'data' / manifest['data']


def part_of(run: pathlib.Path, name: str, step=5) -> pathlib.Path:
  """Returns the file of an array's first part."""
  manifest = json.loads(manifest_of(run, step).read_text())
  return next(data_of(run, step).glob(f'{manifest["arrays"][name]["file"]}/c*'))


def flip(path: pathlib.Path) -> None:
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)
