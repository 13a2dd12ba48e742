"""Tests of jaxline.checkpoint.durable, with real files.

Real kills are in test_faults.py, several processes in
test_durable_multiprocess.py.
"""

from collections.abc import Iterator
import copy
import dataclasses
import errno
import functools
import hashlib
import importlib
import itertools
import math
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import threading
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import experiment
from jaxline import metrics
from jaxline import partitioning
from jaxline import platform
from jaxline import sharded
from jaxline import utils
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import durable
from jaxline.checkpoint import files
from jaxline.checkpoint import structure
from jaxline.compat import devices

ROOT = pathlib.Path(__file__).resolve().parents[1]

# What is compared: bits, dtypes, types, and where arrays are.


def assert_same(got: Any, want: Any, name: str = '') -> None:
  """Fails unless two values are the same, bit for bit and in kind."""
  if isinstance(want, jax.Array) and jnp.issubdtype(
    want.dtype, jax.dtypes.prng_key
  ):
    assert got.dtype == want.dtype, name
    got, want = jax.random.key_data(got), jax.random.key_data(want)
  if isinstance(want, np.ndarray | np.generic | jax.Array):
    assert isinstance(got, jax.Array) == isinstance(want, jax.Array), name
    assert isinstance(got, np.generic) == isinstance(want, np.generic), name
    assert got.dtype == want.dtype, (name, got.dtype, want.dtype)
    assert got.shape == want.shape, name
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), name
    return
  assert type(got) is type(want), (name, got, want)
  if isinstance(want, dict):
    assert set(got) == set(want), name
    for key in want:
      assert_same(got[key], want[key], f'{name}/{key}')
  elif isinstance(want, list | tuple):
    assert len(got) == len(want), name
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
      assert_same(g, w, f'{name}/{i}')
  elif dataclasses.is_dataclass(want):
    assert_same(vars(got), vars(want), name)
  elif isinstance(want, float) and math.isnan(want):
    assert math.isnan(got), name
  else:
    assert got == want, name


def rows(x: Any) -> Any:
  """Puts a copy of each array on each device."""
  return devices.bcast_local_devices(x)


class PerDevice(experiment.AbstractExperiment):
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

  def held(self) -> dict[str, Any]:
    names = self.CHECKPOINT_ATTRS | self.NON_BROADCAST_CHECKPOINT_ATTRS
    return {name: getattr(self, attr) for attr, name in names.items()}

  def step(self, **unused):
    raise NotImplementedError

  def evaluate(self, **unused):
    raise NotImplementedError


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
    params = {
      'w': partitioning.Logical(
        jax.random.normal(rng, [self.size]), ('embed',)
      ),
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


def make_config(directory: Any, **values: Any) -> config_dict.ConfigDict:
  config = base_config.get_base_config()
  config.checkpoint_dir = os.fspath(directory)
  config.interval_type = 'steps'
  with config.ignore_type():
    config.update(values)
  return config


@pytest.fixture
def run(tmp_path):
  """Makes checkpointers of a run in `tmp_path`; closes them at the end."""
  made = []

  def make(mode='train', directory=tmp_path / 'run', **values):
    config = make_config(directory, **values)
    made.append(durable.DurableCheckpointer(config, mode))
    return made[-1]

  yield make
  for checkpointer in made:
    checkpointer.close()


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


def at_commit(checkpointer, wait):
  """Lets checkpoints of `latest` call a function before they are visible."""
  checkpointer.logs = [types.SimpleNamespace(flush_async=lambda: wait)]


def save(checkpointer, live, *steps, **more):
  for step in steps or [5]:
    fill(checkpointer, live, step, **more)
    checkpointer.save(more.get('series', 'latest'))
  checkpointer.wait_for_checkpointing_to_finish()


def restore(checkpointer, live, step=None, **more):
  state = fill(checkpointer, live, -1, **more)
  checkpointer.restore(more.get('series', 'latest'), step)
  return state


def weights(value: float = 0.0) -> PerDevice:
  return PerDevice({'w': jnp.full([3], float(value))}, {'n': int(value)})


def series_path(tmp_path, series='latest', run='run') -> pathlib.Path:
  return tmp_path / run / 'checkpoints' / series


def tree_of(path: pathlib.Path) -> dict[str, tuple[int, bytes]]:
  """Returns all files below, each with its inode and content."""
  return {
    str(p.relative_to(path)): (p.stat().st_ino, p.read_bytes())
    for p in sorted(path.rglob('*'))
    if p.is_file()
  }


def pickle_twice(x: Any) -> Any:
  return pickle.loads(pickle.dumps(x))


# Bit for bit.


class Stats(NamedTuple):
  mean: Any
  count: Any


@dataclasses.dataclass
class Schedule:
  rate: float
  table: Any


def _values() -> dict[str, Any]:
  key = jax.random.key(5)
  numpy = {
    'float': np.float32([0.1, -0.0, np.inf, -np.inf]),
    'nan payload': np.uint64([0x7FF8000000000001, 0xFFF0000000000002]).view(
      np.float64
    ),
    '0-d': np.array(7, np.int16),
    'bool': np.array([True, False]),
    'complex': np.complex64([1 + 2j, complex(np.nan, -0.0)]),
    'complex128': np.array([1 - 2j]),
    'int8': np.int8([-128, 127]),
    'uint64': np.uint64([2**64 - 1]),
    'float16': np.float16([0.1]),
    'empty': np.zeros([0, 3], np.float32),
    'fortran': np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    'strided': np.arange(10)[::3],
  }
  for name in (
    'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float8_e3m4',
    'float8_e8m0fnu', 'float8_e4m3b11fnuz', 'int4', 'uint4', 'int2',
    'float4_e2m1fn', 'float6_e2m3fn',
  ):  # fmt: skip
    dtype = np.dtype(getattr(ml_dtypes, name))
    # All values of a type of one byte.
    every = np.arange(256 if dtype.itemsize == 1 else 2).astype(np.uint8)
    numpy[name] = every.view(dtype) if 'float8' in name else every.astype(dtype)
    numpy[f'{name} 0-d'] = np.array(1, dtype)
    numpy[f'empty {name}'] = np.zeros([0], dtype)
  on_device = {
    name: jnp.asarray(numpy[name])
    for name in (
      'float', '0-d', 'bool', 'complex', 'empty', 'bfloat16', 'float8_e5m2',
      'int4', 'uint4', 'int8', 'float16', 'empty bfloat16',
    )
  }  # fmt: skip
  params = {'w': jnp.ones([2]), 'b': jnp.zeros([], jnp.bfloat16)}
  return {
    'plain': [None, True, 1, 2**100, 1.5, math.inf, math.nan, 'ü', b'\0', 1j],
    'none': None,
    'numpy': numpy,
    'scalars': [np.float32(0.1), np.int64(-1), np.bool_(True),
                ml_dtypes.bfloat16(1.5)],
    'jax': on_device,
    'keys': {
      'typed': key,
      'many': jax.random.split(key, 3),
      'rbg': jax.random.key(1, impl='rbg'),
      'raw': jax.random.PRNGKey(5),
      'none': jax.random.split(key, 0),
    },
    'optax': optax.chain(
      optax.clip(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 5))
    ).init(params),
    'tuple': Stats(np.float32([1]), (jnp.int32(2), {'x': ()})),
    'dataclass': Schedule(0.1, {'t': np.arange(3)}),
    'odd keys': {
      1: 'int', '1': 'str', (1, 'a'): np.zeros(1), None: 2, False: 3, '': 4,
      'a/b': np.ones(1), 'a': {'b': np.zeros(2)}, '../x': np.ones(2),
    },
  }  # fmt: skip


@pytest.mark.parametrize('all_hosts', [False, True])
def test_whole_attributes_come_back_bit_for_bit(all_hosts, run):
  more = {'train_checkpoint_all_hosts': all_hosts}
  saved = PerDevice({'w': jnp.ones(2)}, _values())
  save(run(**more), saved)
  names = dict.fromkeys(_values())
  live = PerDevice({'w': jnp.zeros(2)}, names)
  restore(run('eval', **more), live)
  for name, value in _values().items():
    assert_same(live.held()[name], value, name)


def test_attributes_of_each_device(run):
  attrs = {
    'params': {
      'w': jnp.arange(6.0).reshape(2, 3),
      'h': jnp.ones([2], jnp.bfloat16),
      'f8': jnp.ones([2], jnp.float8_e4m3fn),
      'i4': jnp.ones([2], jnp.int4),
      'scalar': jnp.float32(2),
      'typed': jax.random.key(1),
      'raw': jax.random.PRNGKey(1),
    },
    'opt': optax.adam(0.1).init({'w': jnp.ones([2, 3])}),
  }
  saved = PerDevice(attrs, {})
  save(run(), saved)
  live = PerDevice(
    jax.tree.map(lambda x: jax.random.key(0) if x.ndim == 0 and jnp.issubdtype(
      x.dtype, jax.dtypes.prng_key) else jnp.zeros_like(x), attrs), {}
  )  # fmt: skip
  restore(run('eval'), live)
  assert_same(live.held(), saved.held())
  for x in jax.tree.leaves(live.held()):
    assert len(x.sharding.device_set) == 2


@pytest.mark.parametrize(
  'key',
  [
    pytest.param(lambda: rows(jax.random.PRNGKey(3)), id='raw, per device'),
    pytest.param(lambda: rows(jax.random.key(3)), id='typed, per device'),
    pytest.param(lambda: jax.random.PRNGKey(3), id='raw'),
    pytest.param(lambda: jax.random.key(3, impl='rbg'), id='typed'),
    pytest.param(lambda: None, id='none'),
  ],
)
def test_the_step_key(key, run):
  save(run(), weights(1), key=key())
  zeros = key()
  if zeros is not None:
    zeros = jax.random.clone(zeros) if zeros.dtype != jnp.uint32 else zeros * 0
  state = restore(run('eval'), weights(), key=zeros)
  assert_same(state.train_step_rng, key())
  if zeros is not None:
    assert state.train_step_rng.sharding == zeros.sharding


def _advance(live: Sharded, steps: int) -> None:
  for step in range(steps):
    live.step(global_step=step, rng=jax.random.key(step), writer=None)
    jax.block_until_ready(live.state)


def test_sharded_state_and_position(run):
  saved = Sharded()
  _advance(saved, 3)
  assert len(saved.state.params['w'].sharding.device_set) == 2
  assert not saved.state.params['w'].is_fully_replicated
  key = jax.random.key(9)
  save(run(), saved, 3, key=key)
  live = Sharded(seed=1)
  _advance(live, 1)
  state = restore(run('eval'), live, key=jax.random.key(0))
  assert state.global_step == 3
  assert_same(state.train_step_rng, key)
  assert_same(live.snapshot_state(), saved.snapshot_state())
  jax.tree.map(
    lambda a, b: None if a.sharding == b.sharding else pytest.fail('moved'),
    live.state, saved.state,
  )  # fmt: skip
  _advance(saved, 2)
  _advance(live, 2)
  assert_same(live.snapshot_state(), saved.snapshot_state())


# Names.


@pytest.mark.parametrize('style', ['rows', 'whole'])
def test_names_that_file_systems_do_not_like(style, run, tmp_path):
  names = [
    '../x', '/tmp/x', '', '.', '..', 'a/b', 'W', 'w', 'x' * 500, 'ü/測試',
    'con', 'a\nb', 'a\\b', 'a%2Fb', 'a b', '.zarray', '~', 'run', 'state',
  ]  # fmt: skip
  values = {
    name: {'w': jnp.full([2], i), name: jnp.full([3], -i)}
    for i, name in enumerate(names)
  }
  made = (values, {}) if style == 'rows' else ({}, values)
  save(run(), PerDevice(*made))
  (path,) = series_path(tmp_path).iterdir()
  assert {p.name for p in (path / 'arrays').iterdir() if p.is_dir()} == {
    about['file'] for about in files.read_record(path)['arrays'].values()
  }
  zeros = jax.tree.map(jnp.zeros_like, values)
  live = PerDevice(*((zeros, {}) if style == 'rows' else ({}, zeros)))
  restore(run('eval'), live)
  assert_same(live.held(), PerDevice(*made).held())


def test_two_arrays_of_one_name_are_refused(run):
  twice = PerDevice({}, {'a': {'b/c': np.ones(1)}, 'a/b': {'c': np.zeros(1)}})
  with pytest.raises(ValueError, match="the name 'a/b/c'"):
    save(run(), twice)


# What can only be pickled.


class Opaque:
  """Neither arrays nor plain values, but can be pickled."""

  def __init__(self, value):
    self.value = value

  def __eq__(self, other):
    return self.value == other.value

  __hash__ = None


@pytest.mark.parametrize('value', [Opaque(1), {1}, range(2), np.array(['a'])])
def test_what_can_only_be_pickled_is_refused_before_the_first_step(value, run):
  live = PerDevice({'w': jnp.ones(2)}, {'thing': {'x': value}})
  checkpointer = run()
  fill(checkpointer, live)
  with pytest.raises(TypeError, match=r'thing/x'):
    checkpointer.mark_begun(0)
  with pytest.raises(TypeError, match=r'thing/x'):  # If it is made later.
    checkpointer.save('latest')
  assert checkpointer.steps('latest') == []
  del live._b0  # As if the first step made it.
  checkpointer.mark_begun(0)
  live._b0 = {'x': 1}
  save(checkpointer, live)  # Nothing else has broken.
  assert checkpointer.steps('latest') == [5]


def test_pickles_are_permitted_and_announced(run, caplog):
  structure._announce.cache_clear()
  allowed = {'checkpoint_allow_pickle': True}
  save(run(**allowed), PerDevice({}, {'thing': Opaque(3), 'n': 1}))
  assert "'thing'" in caplog.text
  assert 'Pickled' in caplog.text
  live = PerDevice({}, {'thing': None, 'n': 2})
  with pytest.raises(ValueError, match=r"'thing' pickled.*_pickle = True"):
    restore(run('eval'), live)
  assert live.held() == {'thing': None, 'n': 2}
  caplog.clear()
  restore(run('eval', **allowed), live)
  assert live.held() == {'thing': Opaque(3), 'n': 1}
  assert "Unpickling 'thing'" in caplog.text


# Nothing aliases.


@pytest.mark.parametrize('style', ['rows', 'jax', 'numpy', 'sharded'])
def test_what_is_overwritten_at_once_was_saved_before(
  style, run, tmp_path, monkeypatch
):
  checkpointer = run()
  gate = threading.Event()
  at_commit(checkpointer, lambda: gate.wait(10))
  size = 100_000
  original = np.arange(size, dtype=np.float32)
  update = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
  if style == 'rows':
    live = PerDevice({'w': jnp.asarray(original)}, {})
    pmapped = jax.pmap(lambda x: x * 0 - 1, donate_argnums=0)
    overwrite = lambda: setattr(live, '_a0', pmapped(live._a0))
  elif style == 'jax':
    live = PerDevice({}, {'w': jnp.asarray(original)})
    overwrite = lambda: setattr(live, '_b0', update(live._b0))
  elif style == 'numpy':
    live = PerDevice({}, {'w': original.copy()})
    overwrite = lambda: live._b0.fill(-1)
  else:
    live = Sharded(params={'big': jnp.asarray(original)})
    overwrite = lambda: _advance(live, 1)
    live.state  # noqa: B018
  state = fill(checkpointer, live, 5)
  # Held up before it is written: what follows is surely before that.
  hold = threading.Event()
  checkpointer._writer.submit(hold.wait, 10)
  checkpointer.save('latest')
  overwrite()
  state.global_step = 6
  hold.set()
  gate.set()
  checkpointer.wait_for_checkpointing_to_finish()
  fresh = (
    Sharded(params={'big': jnp.zeros(size)})
    if style == 'sharded'
    else PerDevice(
      *(({'w': jnp.zeros(size)}, {}) if style == 'rows' else ({}, {'w': None}))
    )
  )
  state = restore(run('eval'), fresh)
  assert state.global_step == 5
  if style == 'sharded':
    got = fresh.state.params['big']
  else:
    got = np.asarray(fresh.held()['w'])
    got = got[0] if style == 'rows' else got
  np.testing.assert_array_equal(got, original)


def save_in_a_thread(checkpointer, live, step) -> threading.Thread:
  def save():
    fill(checkpointer, live, step)
    checkpointer.save('latest')

  thread = threading.Thread(target=save)
  thread.start()
  thread.join(0.2)
  return thread


def test_a_save_waits_for_the_one_before_and_not_for_its_own(run):
  checkpointer, gate = run(), threading.Event()
  checkpointer._writer.submit(gate.wait, 10)
  live = weights(1)
  fill(checkpointer, live, 1)
  checkpointer.save('latest')  # Returns although it cannot be written yet.
  assert checkpointer.steps('latest') == []
  second = save_in_a_thread(checkpointer, live, 2)
  assert second.is_alive()
  gate.set()
  second.join()
  checkpointer.wait_for_checkpointing_to_finish()
  assert checkpointer.steps('latest') == [1, 2]


def test_where_a_save_failed_nothing_is_removed(run, tmp_path):
  first = run(max_checkpoints_to_keep=2)
  save(first, weights(1), 1, 2)
  first.close()
  checkpointer = run(max_checkpoints_to_keep=1)
  at_commit(checkpointer, lambda: 1 / 0)
  with pytest.raises(ZeroDivisionError):
    save(checkpointer, weights(1), 3)
  assert checkpointer.steps('latest') == [1, 2]


# Which stay.


@pytest.mark.parametrize(
  ('series', 'values', 'stay'),
  [
    ('latest', {'max_checkpoints_to_keep': 2}, [5, 6]),
    ('best', {'max_best_checkpoints_to_keep': 1}, [6]),
    ('best', {'max_best_checkpoints_to_keep': 3,
              'keep_checkpoint_every_steps': 1}, [4, 5, 6]),
    # As many as of the others, in JAXline's style.
    ('best', {'max_checkpoints_to_keep': 2}, [5, 6]),
    ('latest', {'max_checkpoints_to_keep': 1,
                'keep_checkpoint_every_steps': 3}, [3, 6]),
    ('latest', {'max_checkpoints_to_keep': 1,
                'keep_checkpoint_every_hours': 1.0}, [1, 6]),
  ],
)  # fmt: skip
def test_retention(series, values, stay, run, tmp_path):
  checkpointer = run(**values)
  save(checkpointer, weights(1), 1, 2, 3, 4, 5, 6, series=series)
  assert checkpointer.steps(series) == stay
  there = [p.name for p in series_path(tmp_path, series).iterdir()]
  assert sorted(there) == [str(s) for s in stay]


def test_only_the_owner_cleans_up(run, tmp_path):
  save(run(), weights(1))
  run_latest = series_path(tmp_path)
  left = ['6.orbax-checkpoint-tmp', '.deleted-4-1', '7.partial']
  for name in left:
    shutil.copytree(run_latest / '5', run_latest / name)
  restore(run('eval'), weights())
  assert sorted(p.name for p in run_latest.iterdir()) == sorted([*left, '5'])
  fresh = run()
  with pytest.raises(files.ClaimedError):
    fresh.can_be_restored('latest')
  assert len(list(run_latest.iterdir())) == 4


# Damage.


def _flip(path: pathlib.Path) -> None:
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


DAMAGES = {
  'flip': _flip,
  'truncate': lambda path: os.truncate(path, path.stat().st_size - 2),
  'empty': lambda path: os.truncate(path, 0),
  'delete': lambda path: path.unlink(),
}
# Read by nobody; Orbax's own.
UNREAD = ('_CHECKPOINT_METADATA', 'commit_success.txt')


@pytest.fixture(scope='module')
def kept(tmp_path_factory) -> pathlib.Path:
  """The directory of a run with the sharded steps 3 and 5."""
  directory = tmp_path_factory.mktemp('kept') / 'run'
  checkpointer = durable.DurableCheckpointer(make_config(directory), 'train')
  live = Sharded()
  _advance(live, 1)
  save(checkpointer, live, 3, 5, key=jax.random.key(1))
  checkpointer.close()
  return directory


@pytest.fixture
def copied(kept, tmp_path) -> pathlib.Path:
  """The checkpoint of step 5 in a copy of that directory."""
  shutil.copytree(kept, tmp_path / 'run')
  return series_path(tmp_path) / '5'


@pytest.mark.parametrize('damage', DAMAGES)
def test_damage_to_any_file_is_found(damage, copied):
  names = [str(p.relative_to(copied)) for p in copied.rglob('*') if p.is_file()]
  assert len(names) > 20
  live = Sharded()
  contents.verified(copied, live.wants_restored)
  for name in names:
    path = copied / name
    whole = path.read_bytes()
    DAMAGES[damage](path)
    if name in UNREAD:
      contents.verified(copied, live.wants_restored)
    else:
      with pytest.raises(files.DamagedError, match=re.escape(name)) as e:
        contents.verified(copied, live.wants_restored)
      assert type(e.value) is files.DamagedError, name
    path.write_bytes(whole)
  contents.verified(copied, live.wants_restored)


@pytest.mark.parametrize(
  ('name', 'damage'),
  [
    ('checkpoint.json', 'flip'),
    ('checkpoint.json', 'delete'),
    ('process_0.json', 'truncate'),
    ('checksums_0.json', 'flip'),
    ('checksums_0.json', 'empty'),
    ('arrays/*.w/zarr.json', 'delete'),
    ('arrays/*.w/c/0', 'flip'),
  ],
)
def test_the_one_before_is_used(name, damage, run, tmp_path, caplog):
  newest = _two(run, tmp_path)
  (path,) = newest.glob(name)
  DAMAGES[damage](path)
  left = tree_of(newest)
  for mode in ('eval', 'train'):
    caplog.clear()
    live, checkpointer = weights(), run(mode, max_checkpoints_to_keep=1)
    state = restore(checkpointer, live)
    assert (state.global_step, live.held()['n']) == (3, 1)
    assert 'passed over' in caplog.text
    assert path.name in caplog.text
    assert tree_of(newest) == left
  # It counts as none of those that are kept, and goes with the next save.
  save(checkpointer, weights(1), 4)
  assert checkpointer.steps('latest') == [4]
  save(checkpointer, weights(3), 5)
  assert checkpointer.steps('latest') == [5]
  assert restore(run('eval'), live).global_step == 5


def test_a_step_that_was_damaged_and_is_made_again_is_evaluated(run, tmp_path):
  newest = _two(run, tmp_path)
  _flip(newest / 'checkpoint.json')
  evaluation, live = run('eval'), weights()
  restore_next = evaluation.follow('latest')
  state = fill(evaluation, live)
  assert restore_next(())
  assert state.global_step == 3
  assert not restore_next({3})
  training = run()
  restore(training, weights())
  save(training, weights(4), 5)
  assert restore_next({3})
  assert live.held()['n'] == 4


def test_where_all_are_damaged_nothing_begins_anew(run, tmp_path):
  newest = _two(run, tmp_path)
  for step in ('3', '5'):
    _flip(newest.with_name(step) / 'checkpoint.json')
  for mode in ('eval', 'train', 'train'):  # At each start.
    checkpointer = run(mode, restore_from=str(tmp_path / 'other'))
    live = weights()
    before = live.held()
    assert checkpointer.can_be_restored('latest')
    with pytest.raises(files.DamagedError, match=r'(?s)/5 is.*/3 is'):
      restore(checkpointer, live)
    assert_same(live.held(), before)
    checkpointer.close()


@pytest.mark.parametrize('found', ['1', '3', 'null'])
def test_another_format_is_refused(found, run, tmp_path):
  newest = _two(run, tmp_path)
  text = (newest / files.RECORD).read_text()
  assert '"format": 2,' in text
  text = text.replace('"format": 2,', f'"format": {found},')
  (newest / files.RECORD).write_text(text)
  files.write_checksums(newest, 0, 1)
  left = tree_of(newest.parent)
  for mode in ('eval', 'train'):
    for use in (lambda c: c.check_config(), lambda c: restore(c, weights())):
      with pytest.raises(errors.UsageError, match='format') as e:
        use(run(mode))
      assert '\n' not in str(e.value)
  assert tree_of(newest.parent) == left


def test_a_step_that_is_asked_for_is_not_replaced_by_another(run, tmp_path):
  checkpointer = run()
  save(checkpointer, weights(1), 3, 5)
  with pytest.raises(ValueError, match=r'no checkpoint of step 4.*\[3, 5\]'):
    restore(checkpointer, weights(), 4)
  assert restore(checkpointer, weights(), 3).global_step == 3
  _flip(series_path(tmp_path) / '5' / 'checkpoint.json')
  with pytest.raises(files.DamagedError, match=r'/5 is damaged: checkpoint.js'):
    restore(checkpointer, weights(), 5)
  assert checkpointer.steps('latest') == [3, 5]


def _opt_files(path: pathlib.Path) -> list[pathlib.Path]:
  arrays = files.read_record(path)['arrays']
  names = [n for n in arrays if n.startswith('state/opt_state/')]
  assert len(names) == 5  # Adam's count and two moments of two weights.
  return [path / 'arrays' / arrays[name]['file'] for name in names]


def test_evaluation_reads_no_optimizer(copied, run):
  for folder in _opt_files(copied):
    shutil.rmtree(folder)
  live = Sharded('eval', seed=1)
  state = restore(run('eval'), live, key=None)
  assert state.global_step == 5
  assert_same(state.train_step_rng, jax.random.key(1))
  want = Sharded()
  _advance(want, 1)
  for field in ('step', 'params', 'model_state'):
    assert_same(getattr(live.state, field), getattr(want.state, field))
  # Training takes the one before.
  assert restore(run(), Sharded(), key=jax.random.key(0)).global_step == 3


# An error of the disk is no damage.


def _two(run, tmp_path):
  """Makes the steps 3 and 5; returns the checkpoint of the latter."""
  first = run()
  save(first, weights(1), 3)
  save(first, weights(2), 5)
  first.close()
  return series_path(tmp_path) / '5'


@pytest.mark.parametrize(
  'name',
  ['checkpoint.json', 'checksums_0.json', 'process_0.json', 'arrays/*.w/c/0'],
)
@pytest.mark.parametrize('mode', ['train', 'eval'])
def test_an_error_of_the_disk_is_raised_as_it_is(
  name, mode, run, tmp_path, monkeypatch
):
  newest = _two(run, tmp_path)
  path, number = next(newest.glob(name)), itertools.count()
  left = tree_of(newest.parent)
  really = open

  def fails(file, *args, **kwargs):
    if os.path.exists(file) and os.path.samefile(file, path):
      next(number)
      raise OSError(errno.EIO, 'Input/output error', str(file))
    return really(file, *args, **kwargs)

  checkpointer, live = run(mode), weights()
  with monkeypatch.context() as patch:
    patch.setattr('builtins.open', fails)
    patch.setattr('io.open', fails)
    with pytest.raises(OSError, match='Input/output') as e:
      restore(checkpointer, live)
  assert (e.value.errno, next(number)) == (errno.EIO, 1)
  assert live.held()['n'] == 0
  assert tree_of(newest.parent) == left
  assert restore(checkpointer, live).global_step == 5


def test_an_error_of_tensorstore_is_an_error_of_the_disk(run, tmp_path):
  newest = _two(run, tmp_path)
  (chunk,) = newest.glob('arrays/*.w/c/0')
  found = contents.verified(newest, lambda name: True)
  chunk.unlink()
  os.symlink(chunk, chunk)  # A loop, which is an error of the system.
  with pytest.raises(OSError, match='symbolic links') as e:
    dict(found.read({'w': None}))
  assert e.value.errno == errno.ELOOP


def test_what_one_process_finds_damaged_all_pass_over(
  run, tmp_path, monkeypatch
):
  newest = _two(run, tmp_path)
  says = [False, True]
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(
    arrays.multihost_utils, 'process_allgather', lambda x: np.array(says)
  )
  with pytest.raises(files.DamagedError, match=r'processes \[1\]'):
    contents.verified(newest, lambda name: False)
  says[1] = False
  contents.verified(newest, lambda name: False)


# What does not fit.


def _unchanged(checkpointer, live, tmp_path, match, error=ValueError, **more):
  """Asserts that a restore is refused and leaves everything as it was."""
  state = fill(checkpointer, live, -1, **more)
  live.snapshot_state()  # Makes what is made at the first use.
  before, held = dict(state), dict(vars(live))
  there = tree_of(series_path(tmp_path))
  with pytest.raises(error, match=match) as e:
    checkpointer.restore('latest')
  assert all(getattr(live, name) is held[name] for name in held)
  assert all(state[name] is before[name] for name in before)
  assert tree_of(series_path(tmp_path)) == there
  return str(e.value)


SHAPES = {
  'missing': r'new: the checkpoint has nothing, the experiment expects'
  r' float32\[2\]',
  'extra': r'layer/b: the checkpoint has float32\[2, 3\], the experiment'
  ' expects nothing',
  'shape': r'w: the checkpoint has float32\[4\], .* expects float32\[6\]',
  'dtype': r'layer/b: the checkpoint has float32\[2, 3\], .* expects'
  r' bfloat16\[2, 3\]',
}


@pytest.mark.parametrize('wrong', SHAPES)
def test_sharded_state_that_does_not_fit(wrong, copied, run, tmp_path):
  live = Sharded(seed=1, size=6 if wrong == 'shape' else 4, params={
    'missing': {'new': jnp.ones([2])},
    'extra': {'layer': {}},
    'shape': {},
    'dtype': {'layer': {'b': jnp.ones([2, 3], jnp.bfloat16)}},
  }[wrong])  # fmt: skip
  live.loss_fn = None  # What is refused is refused before any step.
  message = _unchanged(
    run(), live, tmp_path, f'state/params/{SHAPES[wrong]}',
    contents.MismatchError, key=jax.random.key(0),
  )  # fmt: skip
  # The optimizer's moments are told too, and nothing that fits.
  lines = [line for line in message.splitlines() if line.startswith('  ')]
  assert len(lines) == 3
  assert sum('opt_state' in line for line in lines) == 2


class Bare:
  """Has the two methods that JAXline asks for, and no base class."""

  live = 'mine'  # No attribute of the contract.

  def __init__(self, n):
    self.held = {'n': n, 'w': jnp.full([2], float(n))}

  def snapshot_state(self):
    return self.held

  def restore_from_snapshot(self, snapshot_state):
    self.held = snapshot_state


class Declaring(Bare):
  """Declares some of the rest."""

  CHECKPOINT_ATTRS = {'_w': 'w'}
  PER_PROCESS_ENTRIES = ('n',)
  IS_SHARDED = True

  def wants_restored(self, name):
    return name != 'n'


@pytest.mark.parametrize('kind', ['durable', 'memory'])
def test_what_is_saved_needs_no_base_class(run, kind, tmp_path, monkeypatch):
  config = {'train_checkpoint_all_hosts': True, 'max_checkpoints_to_keep': 2}
  for cls, num_best in ((Bare, 2), (Declaring, 1)):
    monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
    if kind == 'memory':
      checkpointer = utils.InMemoryCheckpointer(make_config('', **config), '')
    else:
      checkpointer = run(directory=tmp_path / cls.__name__, **config)
    for step in (1, 2):
      save(checkpointer, cls(step), step)
      save(checkpointer, cls(step), step, series='best')
    assert len(checkpointer.steps('best')) == num_best
    live, want = cls(0), cls(2).held
    fill(checkpointer, live)
    checkpointer.restore('latest')
    module = (
      utils.GLOBAL_CHECKPOINT_DICT['latest']
      .history[-1]
      .pickle_nest['experiment_module']
    )
    if cls is Declaring:
      assert_same(module._w, np.full([1, 2], 2, np.float32))
    if cls is Declaring and kind == 'durable':
      del want['n']
    assert set(live.held) == set(want)
    np.testing.assert_array_equal(live.held['w'], want['w'])
    assert live.held.get('n') == want.get('n')
    checkpointer.close()


def test_an_attribute_that_the_class_names_no_longer(run, caplog):
  caplog.set_level('INFO')
  first = run(train_checkpoint_all_hosts=True)
  save(first, PerDevice({'w': np.ones(3), 'old': np.ones(2)}, {'gone': 3}))
  first.close()
  live = PerDevice({'w': np.zeros(3)}, {})
  restore(run(), live)
  assert_same(live.held(), {'w': rows(np.ones(3))})
  (line,) = [x for x in caplog.messages if x.startswith('Skipped')]
  assert re.fullmatch(
    r"Skipped \['old'\] of .*/latest/5, which PerDevice does not name\.", line
  )


@pytest.mark.parametrize(
  ('saved', 'live', 'says'),
  [
    (lambda: jax.random.PRNGKey(1), lambda: jax.random.key(1), 'uint32'),
    (lambda: jax.random.key(1), lambda: jax.random.PRNGKey(1), 'fry'),
    (lambda: jax.random.PRNGKey(1, impl='rbg'),
     lambda: jax.random.PRNGKey(1), r'uint32\[4\], expected uint32\[2\]'),
    (lambda: jax.random.key(1, impl='rbg'), lambda: jax.random.key(1), 'rbg'),
    (lambda: rows(jax.random.PRNGKey(1)), lambda: jax.random.PRNGKey(1),
     r'uint32\[2, 2\], expected uint32\[2\]'),
    (lambda: None, lambda: jax.random.key(1), 'NoneType'),
  ],
)  # fmt: skip
def test_a_step_key_of_another_kind(saved, live, says, run, tmp_path):
  checkpointer = run()
  save(checkpointer, weights(1), key=saved())
  match = f'train_step_rng: the checkpoint has .*{says}'
  _unchanged(checkpointer, weights(), tmp_path, match, key=live())


# Another config.


def _kwargs(**values: Any) -> dict[str, Any]:
  return {'experiment_kwargs': config_dict.ConfigDict(values)}


def _activation(x):
  return x


SAME = {'layers': 2, 'nan': math.nan, 'mesh': {'data': 2}, 'sharding': 'ddp'}


@dataclasses.dataclass
class Decoding:
  """A part of an experiment's own config; `top_k` is a later addition."""

  method: str
  top_k: int = 40


@dataclasses.dataclass
class Settings:
  """An experiment's own config; what has a default was added later."""

  width: int
  decode: Decoding
  sizes: tuple[int, ...] = (1, 2)
  best: Decoding = dataclasses.field(default_factory=lambda: Decoding('beam'))


class Declares(PerDevice):
  """Says what may change, and what its config is read into."""

  CONFIG_CLASS = Settings
  CHANGEABLE_ON_RESUME = (
    'experiment_kwargs.config.eval_batches',
    'experiment_kwargs.config.decode',
  )


class Inherits(Declares):
  """Shares the config."""


def _own(**values: Any) -> dict[str, Any]:
  own = {'width': 3, 'decode': {'method': 'greedy'}} | values
  return _kwargs(config=own)


def test_what_the_experiment_declares_may_change(run):
  first = run(**_own(eval_batches=3))
  live = Declares({'w': np.ones(3)}, {})
  save(first, live)
  save(first, live, series='best', value=1.0)
  first.close()
  changed = _own(eval_batches=None, decode={'method': 'beam', 'size': 4})
  for cls in (Declares, Inherits, functools.partial(Inherits, {})):
    other = run(**changed)
    other.check_config(cls)
    # The best value is restored without an experiment.
    state = other.get_experiment_state('best')
    state.value = 0.0
    other.restore('best')
    assert state.value == 1.0
    other.close()
  other = run(**changed)
  restore(other, live)
  with pytest.raises(durable.ConfigChangedError, match='eval_batches'):
    run(**changed).check_config()
  # Of a function it is not known yet what it declares.
  run(**changed).check_config(lambda **kwargs: live)


@pytest.mark.parametrize(
  ('name', 'option'),
  [('lm', ()), ('image', ()), ('c4', ('C4Spmd1BAdam4Replicas:reduced',))],
)
def test_what_the_examples_declare(name, option):
  module = importlib.import_module(f'configs.{name}')
  config = module.get_config(*option).copy_and_resolve_references()
  cls = platform.resolve_experiment_class(config)
  keys = base_config.flat(base_config.recorded(config))
  fields = {f.name for f in dataclasses.fields(cls.CONFIG_CLASS)}
  for path in cls.CHANGEABLE_ON_RESUME:
    assert path.split('.')[2] in fields
    assert any(f'{key}.'.startswith(f'{path}.') for key in keys), path


def test_a_key_that_is_new_has_its_default(run):
  defaults = {
    'sizes': (1, 2),
    'decode': {'method': 'greedy', 'top_k': 40},
    'best': {'method': 'beam', 'top_k': 40},
  }
  old, new = {}, defaults
  live = Declares({'w': np.ones(3)}, {})
  first = run(**_own(**old))
  save(first, live)
  first.close()
  run(**_own(**new)).check_config(Declares)
  with pytest.raises(durable.ConfigChangedError) as e:
    run(**_own(**new | {'sizes': (1, 3)})).check_config(Declares)
  assert [x for x in str(e.value).splitlines() if x[:2] == '  '] == [
    '  config.experiment_kwargs.config.sizes: [1, 2] then, [1, 3] now'
  ]
  other = run(**_own(**new))
  restore(other, live)


def test_another_config_is_refused_by_its_keys(run, tmp_path):
  first = run(**_kwargs(net=SAME | {'old': 1}))
  save(first, weights(1))
  first.close()
  other = run(random_seed=43, training_steps=7, mesh={'ici': {'data': 1}},
    **_kwargs(net=SAME | {'layers': 3, 'new': [1]}))  # fmt: skip
  with pytest.raises(durable.ConfigChangedError) as e:
    other.check_config()
  assert [line for line in str(e.value).splitlines() if line[:2] == '  '] == [
    '  config.experiment_kwargs.net.layers: 2 then, 3 now',
    "  config.experiment_kwargs.net.new: 'absent' then, [1] now",
    "  config.experiment_kwargs.net.old: 1 then, 'absent' now",
    '  config.random_seed: 42 then, 43 now',
  ]
  assert "config.on_config_change = 'continue'" in str(e.value)
  _unchanged(
    other, weights(), tmp_path, 'layers: 2 then', durable.ConfigChangedError
  )


@pytest.mark.parametrize('mode', ['train', 'eval'])
def test_another_config_may_be_permitted(mode, run, caplog):
  first = run(**_kwargs(layers=2))
  save(first, weights(1))
  first.close()
  permitted = {'on_config_change': 'continue'} if mode == 'train' else {}
  other = run(mode, **permitted, **_kwargs(layers=3))
  other.check_config()
  live = weights()
  restore(other, live)
  assert live.held()['n'] == 1


def test_what_may_change(run):
  before = {'f': _activation, 'p': functools.partial(_activation, 1)}
  first = run(**_kwargs(net=SAME, **before))
  save(first, weights(1))
  first.close()
  _activation_again = type(_activation)(
    _activation.__code__, {}, '_activation'
  )  # At another address, as in another process.
  after = {'f': _activation, 'p': functools.partial(_activation_again, 1)}
  assert repr(after['p']) != repr(before['p'])
  other = run(
    training_steps=7, log_tensors_interval=3, max_checkpoints_to_keep=1,
    save_checkpoint_interval=2, on_nonfinite='skip', watchdog_secs=5.0,
    mesh={'ici': {'data': 1}}, sharding='fsdp',
    **_kwargs(net=SAME, **after),
  )  # fmt: skip
  other.check_config()
  restore(other, weights())


# Programs written against JAXline look at checkpoints in its dictionary.


@pytest.fixture
def newest(monkeypatch):
  """Returns what such programs look at."""
  monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
  return lambda series='latest': utils.GLOBAL_CHECKPOINT_DICT[series].history[
    -1
  ]


def test_the_newest_save_is_read_when_it_is_looked_at(
  newest, run, tmp_path, monkeypatch
):
  reads = []
  read = contents.Checkpoint.read

  def spy(listing, *args):
    reads.append(listing)
    return read(listing, *args)

  monkeypatch.setattr(contents.Checkpoint, 'read', spy)
  checkpointer = run(max_checkpoints_to_keep=1)
  fill(checkpointer, weights(1))
  assert utils.GLOBAL_CHECKPOINT_DICT['latest'].history == []
  live = weights(1)
  save(checkpointer, live, 5, extra={'a': np.ones(2)})
  first = newest()
  assert (first.id, reads) == (5, [])
  live._a0, live._b0 = rows({'other': np.zeros(1)}), 9  # Not the live state.
  nest = first.pickle_nest
  assert nest.global_step == 5
  assert nest.experiment_module.n == 1
  assert_same(nest.to_dict()['experiment_module'], {
    'w': np.full([3], 1, np.float32), 'n': 1})  # fmt: skip
  assert_same(nest['extra'].to_dict(), {'a': np.ones(2)})
  np.testing.assert_array_equal(
    nest['experiment_module']._a0, [np.full([3], 1, np.float32)]
  )
  assert first.pickle_nest is nest
  number, unpacked = first
  assert (number, unpacked) == (5, nest)
  assert first[1] is nest
  # One that was looked at keeps what it has read; another one, which is
  # removed meanwhile, gives way to the newest.
  save(checkpointer, weights(6), 6)
  late = newest()
  save(checkpointer, weights(7), 7)
  assert late.pickle_nest.global_step == 7
  assert first.pickle_nest.global_step == 5
  assert len(utils.GLOBAL_CHECKPOINT_DICT['latest'].history) == 1


def test_the_newest_save_of_the_sharded_style(newest, run, copied):
  checkpointer = run()
  live = Sharded()
  restore(checkpointer, live, key=jax.random.key(0))
  # What a run goes on from is its last save.
  assert newest().pickle_nest.global_step == 5
  _advance(live, 2)
  want = live.snapshot_state()
  want = jax.tree.map(np.asarray, want['state'].params), want['input']
  save(checkpointer, live, 7, key=jax.random.key(0))
  _advance(live, 1)
  module = newest().pickle_nest.experiment_module
  assert isinstance(module.state, sharded.TrainState)
  assert_same(module.state.params, want[0])
  assert_same(module.to_dict()['input'], want[1])


def test_the_best_is_looked_at_too(newest, run):
  training = run()
  save(training, weights(3), 3)
  evaluation = run('eval')
  live = weights()
  restore(evaluation, live)
  save_best(evaluation, live, 3, 0.5)
  nest = newest('best').pickle_nest
  assert nest.global_step == 3
  assert nest.best_eval_metric_value == 0.5
  assert nest.experiment_module.n == 3


@pytest.mark.parametrize('clone', [copy.copy, copy.deepcopy, pickle_twice])
def test_a_copy_of_a_save_is_a_plain_snapshot(clone, newest, run):
  checkpointer = run()
  save(checkpointer, weights(3), 3)
  checkpointer.close()
  snapshot = clone(newest())
  assert type(snapshot) is utils.SnapshotNT
  assert snapshot.pickle_nest.global_step == 3
  # And starts another run, which the save itself does not.
  other = run(directory=checkpointer._root.parent.with_name('other'))
  assert not other.can_be_restored('latest')
  utils.GLOBAL_CHECKPOINT_DICT['latest'].history.append(snapshot)
  assert other.can_be_restored('latest')
  live = weights()
  assert restore(other, live).global_step == 3
  assert live.held()['n'] == 3
  assert other.saved_step is None  # It is no checkpoint of its own.
  assert other.steps('latest') == []


# Beginning from another run.


@pytest.mark.parametrize(
  ('where', 'step'),
  [
    ('', 5), (':3', 3), ('/checkpoints', 5), ('/checkpoints/latest', 5),
    ('/checkpoints/latest:3', 3), ('/checkpoints/latest/3', 3),
    ('/checkpoints/best', 4), ('/checkpoints/best:4', 4),
  ],
)  # fmt: skip
def test_restore_from(where, step, run, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  other = run(directory=tmp_path / 'other')
  for n, series in ((3, 'latest'), (5, 'latest'), (4, 'best')):
    save(other, weights(n), n, series=series)
  before = tree_of(tmp_path / 'other')
  source = 'other' + where  # Relative to the working directory.
  checkpointer = run(restore_from=source)
  assert checkpointer.can_be_restored('latest')
  assert not checkpointer.can_be_restored('best')
  live = weights()
  state = restore(checkpointer, live)
  assert (state.global_step, live.held()['n']) == (step, step)
  assert_same(state.train_step_rng, rows(jax.random.PRNGKey(7)))
  assert tree_of(tmp_path / 'other') == before
  # From then on the run has its own.
  save(checkpointer, weights(9), 9)
  assert restore(checkpointer, live).global_step == 9


def test_restore_from_what_is_damaged_or_does_not_fit(run, tmp_path):
  save(run(directory=tmp_path / 'other'), weights(1), 3, 5)
  _flip(series_path(tmp_path, run='other') / '5' / 'checkpoint.json')
  before = tree_of(tmp_path / 'other')
  checkpointer = run(restore_from=str(tmp_path / 'other'))
  with pytest.raises(files.DamagedError, match=r'checkpoint\.json is not as'):
    restore(checkpointer, weights())
  checkpointer = run(
    directory=tmp_path / 'third', restore_from=str(tmp_path / 'other:3')
  )
  with pytest.raises(ValueError, match=r"lacks \['v'\]"):
    restore(checkpointer, PerDevice({'v': jnp.ones(2)}, {'n': 0}))
  assert tree_of(tmp_path / 'other') == before


def test_rules(kept, run, tmp_path):
  source, live = Sharded(), Sharded(seed=2, params={'head': jnp.zeros([4])})
  _advance(source, 1)
  before = live.state
  rules = [
    ('state/params/layer/.*', None),
    (r'state/(params)/(w|layer/b)', r'state/\1/\2'),
    ('state/params/head', 'state/params/w'),
  ]
  _advance(live, 0)
  state = fill(run(), live, 0, key=(key := jax.random.key(8)))
  checkpointer = run(
    directory=tmp_path / 'rules', restore_from=str(kept), restore_rules=rules
  )
  state = fill(checkpointer, live, 0, key=key)
  checkpointer.restore('latest')
  assert state.global_step == 0
  assert state.train_step_rng is key
  got = live.state
  assert_same(got.params['w'], source.state.params['w'])
  assert_same(got.params['head'], jnp.asarray(np.asarray(got.params['w'])))
  assert_same(got.params['layer'], before.params['layer'])
  assert_same(got.opt_state, before.opt_state)
  assert got.params['w'].sharding == before.params['w'].sharding
  assert 'input' not in live.snapshot_state()
  _advance(live, 1)  # Nothing shares a buffer that a step gives away.
  assert live.snapshot_state()['input']['index'] == 1


class Scheduled(Sharded):
  """Has each kind of schedule that Optax keeps a count for."""

  def make_optimizer(self):
    rate = optax.linear_schedule(0.1, 0.0, 10)
    return optax.chain(
      optax.add_noise(0.1, 0.5, 3),
      optax.inject_hyperparams(optax.adamw)(rate, weight_decay=0.1),
      optax.add_decayed_weights(rate),
      optax.scale_by_schedule(rate),
    )


def _counts(opt_state):
  leaves = structure.named_leaves(opt_state).items()
  return {n: int(x) for n, x in leaves if n.split('/')[-1] == 'count'}


def test_rules_for_all_of_the_state_begin_a_new_run(run, tmp_path):
  source = Scheduled(params={'more': jnp.ones([3])})
  _advance(source, 6)
  save(run(directory=tmp_path / 'other'), source, 6, key=jax.random.key(1))
  live = Scheduled(params={'more': jnp.zeros([3])}, seed=2)
  key = jax.random.key(8)
  before = jax.tree.map(jnp.copy, live.state)
  rules = [('state/(.*)', r'state/\1')]
  checkpointer = run(restore_from=str(tmp_path / 'other'), restore_rules=rules)
  state = fill(checkpointer, live, 0, key=key)
  checkpointer.restore('latest')
  assert state.global_step == 0
  assert state.train_step_rng is key
  got, taken = live.state, source.state
  # It was not of step 0, and had weights and moments of its own.
  assert (int(taken.step), int(got.step)) == (6, 0)
  assert_same(got.skipped, before.skipped)
  assert_same(got.params, taken.params)
  assert_same(got.model_state['half'], taken.model_state['half'])
  assert_same(got.model_state['key'], before.model_state['key'])
  adam = lambda x: x.opt_state[1].inner_state[0]
  assert_same(adam(got), adam(taken))
  assert _counts(taken.opt_state) == {
    '0/count': 6,
    '1/count': 6,
    '1/hyperparams_states/learning_rate/count': 6,
    '1/inner_state/0/count': 6,
    '2/count': 6,
    '3/count': 6,
  }
  counts = _counts(got.opt_state)
  assert counts.pop('1/inner_state/0/count') == 6  # Of Adam's moments.
  assert set(counts.values()) == {0}
  assert_same(got.opt_state[0], before.opt_state[0])  # Its key as well.
  assert_same(got.opt_state[1].hyperparams, before.opt_state[1].hyperparams)
  _advance(live, 1)
  assert int(live.state.step) == 1
  # What begins anew cannot be asked for either.
  for name in ('step', 'skipped', 'opt_state/3/count', 'model_state/key'):
    other = run(
      directory=tmp_path / name.replace('/', '_'),
      restore_from=str(tmp_path / 'other'),
      restore_rules=[(f'state/{name}', f'state/{name}')],
    )
    fill(other, live, 0, key=key)
    with pytest.raises(ValueError, match='keys begin anew'):
      other.restore('latest')


@pytest.mark.parametrize(
  ('rules', 'match'),
  [
    ([('state/params/w', None), ('nothing/.*', None)],
     r"\['nothing/\.\*'\] match none .*state/params/w"),
    ([('state/params/.*', None), ('state/params/w', 'state/params/w')],
     r"\['state/params/w'\] match none.*an earlier rule"),
    ([('state/params/w', 'state/params/v')],
     r"no arrays \['state/params/v'\]; the nearest .*'state/params/w'"),
    ([('state/params/w', 'state/params/layer/b')],
     r'state/params/w from state/params/layer/b: the checkpoint has'
     r' float32\[2, 3\], the experiment expects float32\[4\]'),
    ([('params/w', 'state/params/w')], r"\['params/w'\] match none"),
  ],
)  # fmt: skip
def test_rules_that_cannot_be_followed(rules, match, kept, run, tmp_path):
  checkpointer = run(restore_from=str(kept), restore_rules=rules)
  series_path(tmp_path).mkdir(parents=True)
  key = jax.random.key(0)
  _unchanged(checkpointer, Sharded(seed=2), tmp_path, match, key=key)


def test_rules_between_attributes_of_all_kinds(run, tmp_path):
  made = {
    'f': np.arange(3, dtype='f4'), 'k': jax.random.key(4), 'i': jnp.int4(3),
    'j': jnp.arange(3.0),
  }  # fmt: skip
  keys = {'k': made['k']}
  save(run(directory=tmp_path / 'other'), PerDevice(keys, {'n': made}))
  live = PerDevice(
    {'f': jnp.zeros(3), 'k': jax.random.key(0)},
    {'n': {'f': np.zeros(3, np.float32), 'i': jnp.int4(0), 'j': jnp.zeros(3)}},
  )
  checkpointer = run(
    restore_from=str(tmp_path / 'other'),
    restore_rules=[('n/(.)', r'n/\1'), ('f', 'n/f')],
  )
  restore(checkpointer, live)
  held = live.held()
  assert_same(held['f'], rows(jnp.arange(3.0)))
  assert_same(held['k'], rows(jax.random.key(0)))
  assert_same(held['n']['i'], jnp.int4(3))
  assert_same(held['n']['j'], jnp.arange(3.0))
  np.testing.assert_array_equal(held['n']['f'], [0, 1, 2])


# Another number of devices.

_ELSEWHERE = """
import sys
import jax
sys.path.insert(0, sys.argv[1])
from tests import test_checkpoint_durable as here
n = jax.device_count()
for style, directory in zip(('sharded', 'rows'), sys.argv[2:], strict=True):
  config = here.make_config(directory)
  checkpointer = here.durable.DurableCheckpointer(config, 'eval')
  live = here.moved(style)
  key = jax.random.key(0) if style == 'sharded' else 'same'
  state = here.restore(checkpointer, live, key=key)
  if style == 'sharded':
    w = live.state.params['w']
    assert w.sharding.num_devices == n, w.sharding
    assert w.is_fully_replicated == (n == 1)
  else:
    assert live._a0.shape == (n, 3), live._a0
    assert state.train_step_rng.shape == (n, 2), state.train_step_rng
  checkpointer.close()
  print(n, here.digest(style, live, state))
"""


def moved(style: str) -> Any:
  """Returns an experiment of zeros, or of another seed."""
  return Sharded(seed=1) if style == 'sharded' else weights()


def digest(style: str, live: Any, state: Any) -> str:
  """Returns a hash of all values, which knows nothing of devices."""
  key = state.train_step_rng
  whole = live.snapshot_state()
  if style != 'sharded':
    key = np.unique(np.asarray(key), axis=0)
  sha = hashlib.sha256()
  for x in jax.tree.leaves((whole, key)):
    is_key = hasattr(x, 'dtype') and jnp.issubdtype(
      x.dtype, jax.dtypes.prng_key
    )
    x = np.asarray(jax.random.key_data(x) if is_key else x)
    sha.update(f'{x.dtype.name}{x.shape}'.encode() + x.tobytes())
  return sha.hexdigest()


@pytest.mark.process
@pytest.mark.parametrize('n', [1, 4])
def test_bits_on_another_number_of_devices(n, kept, run, tmp_path):
  save(run(), weights(3))
  directories = {'sharded': kept, 'rows': tmp_path / 'run'}
  want = []
  for style, directory in directories.items():
    live = moved(style)
    key = jax.random.key(0) if style == 'sharded' else 'same'
    mine = restore(run('eval_here', directory=directory), live, key=key)
    want += [str(n), digest(style, live, mine)]
  flags = f'--xla_force_host_platform_device_count={n}'
  got = subprocess.run(
    [sys.executable, '-c', _ELSEWHERE, ROOT, *directories.values()],
    capture_output=True, text=True, check=False, timeout=100,
    env={**os.environ, 'XLA_FLAGS': flags, 'PYTHONPATH': str(ROOT)},
  )  # fmt: skip
  assert got.returncode == 0, got.stderr
  assert got.stdout.split() == want


# Evaluation.


def test_what_is_evaluated_stays_while_it_is_read(run, tmp_path):
  training = run(max_checkpoints_to_keep=1)
  evaluation = run('eval')
  save(training, weights(1), 1)
  live = weights()
  restored = live.restore_from_snapshot

  def slow_restore(snapshot):
    save(training, weights(2), 2)  # Removes what is being read.
    restored(snapshot)

  live.restore_from_snapshot = slow_restore
  state = restore(evaluation, live, 1)
  assert (state.global_step, live.held()['n']) == (1, 1)
  assert training.steps('latest') == [2]
  # It can become the best although training has removed it.
  save_best(evaluation, live, 1, 0.5)
  assert evaluation.steps('best') == [1]
  evaluation.close()
  folders = {p.name for p in (tmp_path / 'run' / 'checkpoints').iterdir()}
  assert os.listdir(tmp_path / 'run' / 'checkpoints' / '.evaluating-eval') == []
  assert {'latest', 'best'} <= folders


def save_best(evaluation, live, step, value, **more) -> None:
  fill(
    evaluation, live, step, series='best', best_eval_metric_value=value,
    best_model_eval_metric='loss', **more
  )  # fmt: skip
  evaluation.save('best')
  evaluation.wait_for_checkpointing_to_finish()


def test_one_that_goes_before_it_is_read(run, monkeypatch):
  training = run(max_checkpoints_to_keep=1)
  save(training, weights(1), 1)
  link = files.link

  def late(source, target):
    if source.name == '1':
      save(training, weights(2), 2)
    link(source, target)

  monkeypatch.setattr(files, 'link', late)
  assert restore(run('eval'), weights()).global_step == 2
  with pytest.raises(ValueError, match=r'no checkpoint of step 1; .*\[2\]'):
    restore(run('eval_again'), weights(), 1)


@pytest.mark.parametrize('series', ['latest', 'best'])
@pytest.mark.parametrize('when', ['verified', 'read'])
def test_one_that_goes_while_it_is_read_without_a_second_name(
  series, when, run, tmp_path, monkeypatch
):
  writing = run()
  save(writing, weights(1), 1, series=series)
  decoding = run('eval_decode')
  decoding.reads_only = True
  before = tree_of(tmp_path / 'run' / 'checkpoints' / series)
  module, name = contents.Checkpoint, 'verify' if when == 'verified' else 'read'
  original, taken = getattr(module, name), []

  def late(listing, *args):
    taken.append(listing.path)
    if len(taken) == 1:
      save(writing, weights(2), 2, series=series)
      files.remove(listing.path)
    return original(listing, *args)

  monkeypatch.setattr(module, name, late)
  live = weights()
  state = restore(decoding, live, series=series)
  assert (state.global_step, live.held()['n']) == (2, 2)
  assert taken[0].name == '1'
  assert not set(before) & set(tree_of(series_path(tmp_path, series)))
  # Where a step is asked for there is no other one for it.
  monkeypatch.setattr(module, name, original)
  save(writing, weights(3), 3, series=series)

  def gone(listing, *args):
    files.remove(listing.path)
    return original(listing, *args)

  monkeypatch.setattr(module, name, gone)
  with pytest.raises(ValueError, match='no checkpoint of step 3'):
    restore(decoding, weights(), 3, series=series)
  assert _names(tmp_path / 'run' / 'checkpoints') == sorted(['claims', series])


def test_the_best_is_the_very_same_checkpoint(copied, run, tmp_path):
  evaluation = run('eval')
  live = Sharded('eval', seed=1)
  restore(evaluation, live, key=None)
  extra = {
    'extra': {'plain': (1, 'a'), 'numpy': np.arange(3, dtype='i2')},
    'on_device': jnp.ones([2], jnp.bfloat16),
    'infinite': math.inf,
  }
  save_best(evaluation, live, 5, 0.5, key=None, **extra)
  best = series_path(tmp_path, 'best') / '5'
  contents.Checkpoint(best).verify()
  # Nothing was copied.
  ours = {name: inode for name, (inode, _) in tree_of(best).items()}
  for name, (inode, _) in tree_of(copied).items():
    assert (ours[name] == inode) == (name != 'checksums_0.json'), name
  contents.Checkpoint(copied).verify()
  assert set(ours) - set(tree_of(copied)) == {'extra.json'}
  # The next evaluation gets the value, the entries and their kinds.
  evaluation.close()
  blank = dict.fromkeys(extra) | {
    'best_eval_metric_value': 9.0, 'best_model_eval_metric': '',
  }  # fmt: skip
  again = Sharded('eval', seed=2)
  state = restore(run('eval'), again, series='best', key=None, **blank)
  assert state.best_eval_metric_value == 0.5
  assert state.global_step == 5
  for name, value in extra.items():
    assert_same(state[name], value, name)
  # Training goes on from it, with its optimizer and its position.
  trained = Sharded(seed=3)
  other = run(directory=tmp_path / 'fork', restore_from=str(best.parent))
  assert restore(other, trained, key=jax.random.key(0)).global_step == 5
  want = Sharded()
  _advance(want, 1)
  assert_same(trained.snapshot_state(), want.snapshot_state())


def test_the_last_best_counts_of_whichever_step_it_is(run, monkeypatch):
  save(run(), weights(1), 1, 2, 3)
  evaluation = run('eval', max_best_checkpoints_to_keep=2)
  now = durable.time.time()
  for value, step in enumerate((3, 1, 2)):
    # Each by a clock that was put back an hour.
    monkeypatch.setattr(durable.time, 'time', lambda v=value: now - 3600 * v)
    live = weights()
    restore(evaluation, live, step)
    save_best(evaluation, live, step, float(value))
  assert evaluation.steps('best') == [1, 2]
  blank = {'best_eval_metric_value': 0.0, 'best_model_eval_metric': ''}
  state = restore(run('eval_2'), weights(), series='best', **blank)
  assert (state.global_step, state.best_eval_metric_value) == (2, 2.0)


def test_a_wrong_place_to_begin_from_is_found_at_once(run, tmp_path):
  save(run(directory=tmp_path / 'other'), weights(1), 4)
  for where, says in (
    ('gs://x/y', 'Mount the bucket'),
    (f'{tmp_path}/nowhere', 'nowhere is no directory'),
    (f'{tmp_path}/other:5', r"no step 5.*'latest': \[4\]"),
  ):
    with pytest.raises(ValueError, match=says):
      run(restore_from=where).check_config()
  run(restore_from=f'{tmp_path}/other:4').check_config()


def test_the_best_of_two_evaluations(run):
  save(run(), weights(1), 1)
  first, second = run('eval'), run('eval_more')
  for evaluation in (first, second):
    restore(evaluation, weights())
  save_best(first, weights(), 1, 0.5)
  with pytest.raises(files.ClaimedError, match='best_model_eval_metric'):
    save_best(second, weights(), 1, 0.7)
  with pytest.raises(files.ClaimedError, match='best_model_eval_metric'):
    save_best(second, weights(), 1, 0.7)  # It has not got it by asking.
  first.close()
  save_best(second, weights(), 1, 0.7)


def test_what_was_evaluated_is_noted_per_mode(run, tmp_path):
  training, evaluation = run(), run('eval')
  assert evaluation.evaluated() == []
  assert evaluation.next_step('latest', ()) is None
  save(training, weights(1), 3, 5, 9)
  assert evaluation.next_step('latest', ()) == 3
  assert evaluation.next_step('latest', {3, 9}) == 5
  assert evaluation.next_step('latest', {3, 5, 9}) is None
  three, five, nine = [3, '', 0.5], [5, '', None], [9, '', None]
  evaluation.mark_evaluated(3, 0.5)
  evaluation.mark_evaluated(5)
  assert run('eval').evaluated() == [three, five]
  assert run('eval_other').evaluated() == []
  training.mark_begun(3)  # It was set back, or killed before a save.
  assert evaluation.evaluated() == [three]
  evaluation.mark_evaluated(5)
  training.mark_evaluated(9)  # By train_and_eval, whose evaluation is 'eval'.
  assert evaluation.evaluated() == [three, five, nine]
  noted = tmp_path / 'run' / 'checkpoints' / 'evaluated' / 'eval.json'
  whole = noted.read_text()
  for damage in ('[]', '{', '{"evaluated": 5}', whole.replace('9', '8')):
    noted.write_text(damage)
    for use in (run('eval').evaluated, lambda: training.mark_begun(9)):
      with pytest.raises(errors.UsageError, match=r'eval\.json'):
        use()
    assert noted.read_text() == damage
  noted.unlink()
  assert run('eval').evaluated() == []


def test_the_end_is_noted_and_taken_back(run, tmp_path):
  training, evaluation = run(), run('eval')
  assert evaluation.ended() is None
  training.mark_begun(0)
  training.mark_ended(7)  # Also where nothing was saved.
  assert evaluation.ended() == 7
  training.mark_begun(7)
  assert evaluation.ended() is None
  (tmp_path / 'run' / 'checkpoints' / 'ended.json').write_text('{"st')
  assert evaluation.ended() is None


# Whose directory it is, and what it is.


def test_where_nothing_was_saved(run, tmp_path):
  for mode in ('train', 'eval'):
    checkpointer = run(mode)
    assert not checkpointer.can_be_restored('latest')
    assert checkpointer.restore_path('latest') is None
    assert checkpointer.steps('latest') == []
    checkpointer.check_config()
    live = weights(4)
    with pytest.raises(ValueError, match=r"'latest' in .* has no checkpoint;"):
      restore(checkpointer, live)
    assert live.held()['n'] == 4
  assert not (tmp_path / 'run' / 'checkpoints' / 'latest').exists()


# Saves that fail.


@pytest.mark.parametrize(
  'place', ['record', 'process', 'array', 'checksums', 'rename', 'hook']
)
def test_a_failed_save_is_raised_and_loses_nothing(
  place, run, tmp_path, monkeypatch
):
  first = run()
  save(first, weights(1))
  error = OSError(errno.ENOSPC, 'No space left on device')

  def fails(*args, **kwargs):
    raise error

  write_json = files.write_json

  def write(path, value):
    if path.name.startswith(place):
      fails()
    write_json(path, value)

  if place == 'hook':
    at_commit(first, fails)
  elif place == 'array':
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, 'save', fails)
  elif place == 'rename':
    monkeypatch.setattr(files, 'removable', fails)
  else:
    names = {'record': 'checkpoint.json'}
    place = names.get(place, place)
    monkeypatch.setattr(files, 'write_json', write)
  fill(first, weights(2), 6)
  first.save('latest')
  with pytest.raises(OSError, match='No space left') as e:
    first.wait_for_checkpointing_to_finish()
  assert e.value.errno == errno.ENOSPC
  for attempt in (first.raise_error, lambda: first.save('latest'),
                  first.wait_for_checkpointing_to_finish):  # fmt: skip
    with pytest.raises(OSError, match='No space left'):
      attempt()
  first.close()
  monkeypatch.undo()
  visible = [5, 6] if place == 'rename' else [5]
  assert run('eval').steps('latest') == visible
  second = run()
  live = weights()
  state = restore(second, live)
  assert (state.global_step, live.held()['n']) == (
    (6, 2) if place == 'rename' else (5, 1)
  )
  save(second, weights(3), 6)
  assert sorted(os.listdir(series_path(tmp_path))) == ['5', '6']


@pytest.mark.parametrize('removed', ['checkpoints', 'checkpoints/claims', '.'])
@pytest.mark.parametrize('series', ['latest', 'best'])
def test_a_right_that_is_lost_is_an_error_at_the_next_save(
  series, removed, run, tmp_path
):
  first = run()
  save(first, weights(1), 3)
  if series == 'best':
    first = run('eval')
    live = weights()
    restore(first, live, 3)
    first.claim('best')
  shutil.rmtree(tmp_path / 'run' / removed)
  if removed != '.':  # As another run makes it.
    claim = tmp_path / 'run' / 'checkpoints' / 'claims' / f'{series}.lock'
    claim.parent.mkdir(parents=True)
    claim.touch()
  before = _names(series_path(tmp_path, series))
  with pytest.raises(OSError, match=rf'another one may .*{series}\.lock'):
    if series == 'best':
      save_best(first, live, 3, 0.5)
    else:
      save(first, weights(2), 5)
  assert _names(series_path(tmp_path, series)) == before
  assert (tmp_path / 'run').exists() == (removed != '.')


PAGE = 4096  # Bytes; what a file on a tmpfs takes is a multiple of it.


@pytest.mark.parametrize(('series', 'step'), [('latest', 6), ('best', 5)])
def test_a_save_that_does_not_fit_leaves_nothing(series, step, run, small_disk):
  folder, _ = small_disk
  directory = folder / 'run'
  live = PerDevice({'w': jnp.ones([9000])}, {'n': 0, 'v': np.arange(9000.0)})
  first = run(directory=directory)
  save(first, live, 5)
  first.close()
  there = [5] if series == 'latest' else []
  # It ends in another phase each time: arrays, record, checksums, renames.
  for pages in range(0, 60, 5 if series == 'latest' else 1):
    if series == 'latest':
      checkpointer = run(directory=directory)
      fill(checkpointer, live, step)
    else:
      checkpointer = run('eval', directory=directory)
      restore(checkpointer, live, 5)
      more = {'best_eval_metric_value': 0.5, 'best_model_eval_metric': ''}
      fill(checkpointer, live, step, series, **more)
    checkpointer.claim(series)
    free = os.statvfs(folder).f_bavail
    (folder / 'ballast').write_bytes(bytes(max(0, free - pages) * PAGE))
    checkpointer.save(series)
    error = checkpointer._saving.exception()
    (folder / 'ballast').unlink()
    checkpointer.close()
    if error is None:
      break
    assert error.errno == errno.ENOSPC
    assert re.search(r'No space left .* MiB free', str(error))
    assert '\n' not in str(error)
    assert error.filename == str(series_path(folder, series) / str(step))
    assert checkpointer.steps(series) == there
    left = _names(series_path(folder, series))
    assert left == [str(step) for step in there]
  assert pages >= 2
  assert checkpointer.steps(series) == [*there, step]
  contents.Checkpoint(series_path(folder, series) / str(step)).verify()


def _names(folder):
  return sorted(os.listdir(folder)) if folder.exists() else []
