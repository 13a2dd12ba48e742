"""Tests of the checkpointer: what is saved comes back, or is refused."""

import dataclasses
import errno
import json
import math
import os
import shutil
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from jaxline.checkpoint import contents
from jaxline.run_directory import store as store_lib
from tests import checkpoints as lib


def _values() -> dict[str, Any]:
  key, numpy = jax.random.key(5), lib.numpy_values()
  params = {'w': jnp.ones([2]), 'b': jnp.zeros([], jnp.bfloat16)}
  return {
    'plain': [None, True, 1, 2**100, 1.5, math.inf, math.nan, 'ü', b'\0', 1j],
    'none': None,
    'numpy': numpy,
    'scalars': [np.float32(0.1), np.int64(-1), np.bool_(True),
                ml_dtypes.bfloat16(1.5)],
    'jax': [jnp.float32(2), jnp.ones([2], jnp.bfloat16), jnp.zeros([0])],
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
    'odd keys': {
      1: 'int', '1': 'str', (1, 'a'): np.zeros(1), None: 2, False: 3, '': 4,
      'a/b': np.ones(1), 'a': {'b': np.zeros(2)}, '../x': np.ones(2),
    },
  }  # fmt: skip


@pytest.mark.parametrize('all_hosts', [False, True])
def test_attributes_come_back_bit_for_bit(all_hosts, open_run):
  more = {'train_checkpoint_all_hosts': all_hosts}

  def made(x, values):
    params = {
      dtype: jnp.full([2, 3], x, dtype)
      for dtype in ('float32', 'bfloat16', 'float8_e4m3fn', 'int4')
    }
    keys = {'typed': jax.random.key(x), 'raw': jax.random.PRNGKey(x)}
    opt = optax.adam(0.1).init({'w': jnp.full([2, 3], x)})
    return lib.PerDevice({'all': params | keys | {'0-d': opt}}, values)

  lib.save(open_run(**more), saved := made(1, _values()))
  live = made(0, dict.fromkeys(_values()))
  lib.restore(open_run('eval', **more), live)
  lib.assert_same(live.held(), saved.held())
  for x in jax.tree.leaves(live.held()['all']):
    assert len(x.sharding.device_set) == 2


_raw = jax.random.PRNGKey


@pytest.mark.parametrize(('saved', 'live', 'says'), [
  (lambda: lib.rows(_raw(3)), lambda: lib.rows(_raw(0)), ''),
  (lambda: lib.rows(jax.random.key(3)),
   lambda: lib.rows(jax.random.key(0)), ''),
  (lambda: jax.random.key(3, impl='rbg'),
   lambda: jax.random.key(0, impl='rbg'), ''),
  (lambda: None, lambda: None, ''),
  # Of another number of devices.
  (lambda: jnp.stack([_raw(3)] * 5), lambda: lib.rows(_raw(0)), ''),
  # Of another kind.
  (lambda: _raw(1), lambda: jax.random.key(1), 'uint32'),
  (lambda: jax.random.key(1, impl='rbg'), lambda: jax.random.key(1), 'rbg'),
  (lambda: lib.rows(_raw(1)), lambda: _raw(1), r'\[2, 2\]; expected'),
  (lambda: None, lambda: jax.random.key(1), 'NoneType'),
])  # fmt: skip
def test_the_step_key(saved, live, says, open_run, tmp_path):
  saved, live = saved(), live()
  checkpointer = open_run()
  lib.save(checkpointer, lib.weights(1), key=saved)
  if says:
    match = f'train_step_rng: the checkpoint has .*{says}'
    lib.assert_refused(checkpointer, lib.weights(), tmp_path, match, key=live)
    return
  got = lib.restore(checkpointer, lib.weights(), key=live).train_step_rng
  if saved is not None:
    saved = jnp.broadcast_to(saved[:1], live.shape) if live.ndim else saved
    assert got.sharding == live.sharding
  lib.assert_same(got, saved)


class Picky(lib.PerDevice):
  def restore_from_snapshot(self, snapshot):
    raise ArithmeticError('not mine')


def test_what_the_experiment_refuses_changes_nothing(open_run, two, tmp_path):
  live, error = Picky({'w': jnp.ones(3)}, {'n': 0}), store_lib.RefusedError
  lib.assert_refused(open_run(), live, tmp_path, '/latest/5.*not mine', error)


def test_two_arrays_of_one_name_are_refused(open_run):
  twice = lib.PerDevice(
    {}, {'a': {'b/c': np.ones(1)}, 'a/b': {'c': np.zeros(1)}}
  )
  with pytest.raises(ValueError, match="named 'a/b/c'"):
    lib.save(open_run(), twice)


# What can only be pickled.


@dataclasses.dataclass
class Opaque(dict):
  """Neither arrays nor plain values, but can be pickled."""

  value: int


def test_what_can_only_be_pickled_is_refused_before_the_first_step(open_run):
  live = lib.PerDevice({'w': jnp.ones(2)}, {'thing': {'x': Opaque(1)}})
  checkpointer = open_run()
  lib.fill(checkpointer, live)
  for call in (
    lambda: checkpointer.begin(0),
    lambda: lib.save(checkpointer, live),
  ):
    with pytest.raises(TypeError, match=r'thing/x'):
      call()
  assert checkpointer.steps('latest') == []
  del live._b0  # As if the first step made it.
  checkpointer.begin(0)
  live._b0 = {'x': 1}
  lib.save(checkpointer, live)  # Nothing else has broken.
  assert checkpointer.steps('latest') == [5]


def test_pickles_need_permission(open_run):
  allowed = {'checkpoint_allow_pickle': True}
  lib.save(open_run(**allowed), lib.PerDevice({}, {'thing': Opaque(3), 'n': 1}))
  live = lib.PerDevice({}, {'thing': None, 'n': 2})
  with pytest.raises(ValueError, match=r"'thing' as a pickle.*_pickle = True"):
    lib.restore(open_run('eval'), live)
  assert live.held() == {'thing': None, 'n': 2}
  lib.restore(open_run('eval', **allowed), live)
  assert live.held() == {'thing': Opaque(3), 'n': 1}


@pytest.mark.parametrize('is_sharded', [False, True])
def test_what_is_overwritten_at_once_was_saved_before(is_sharded, open_run):
  def made(seed):
    if is_sharded:
      return lib.Sharded(seed=seed)
    w = np.float32(seed) * np.arange(100_000, dtype=np.float32)
    return lib.PerDevice(
      {'rows': w}, {'jax': jnp.asarray(w), 'numpy': w.copy()}
    )

  def values(live):
    held = live.state.params if is_sharded else live.held()
    return [np.array(x) for x in jax.tree.leaves(held)]

  checkpointer, live = open_run(), made(1)
  state = lib.fill(checkpointer, live, 5)
  before = values(live)
  # Held up before it is written: what follows is surely before that.
  hold = threading.Event()
  checkpointer.directory.thread.submit(hold.wait, 10)
  checkpointer.save('latest')
  if is_sharded:
    lib.advance(live, 1)
  else:
    live._a0 = jax.pmap(lambda x: -x, donate_argnums=0)(live._a0)
    live._b0 = jax.jit(lambda x: -x, donate_argnums=0)(live._b0)
    live._b1 *= -1
  for old, new in zip(before, values(live), strict=True):
    assert not np.array_equal(old, new)
  state.global_step = 6
  hold.set()
  checkpointer.wait_for_checkpointing_to_finish()
  fresh = made(0)
  assert lib.restore(open_run('eval'), fresh).global_step == 5
  lib.assert_same(values(fresh), before)


def test_a_save_waits_for_the_one_before_and_not_for_its_own(open_run):
  checkpointer, gate = open_run(), threading.Event()
  checkpointer.directory.thread.submit(gate.wait, 10)
  live = lib.weights(1)
  lib.fill(checkpointer, live, 1)
  checkpointer.save('latest')  # Returns although it cannot be written yet.
  assert checkpointer.steps('latest') == []

  def save_again():  # Live states belong to threads.
    lib.fill(checkpointer, live, 2)
    checkpointer.save('latest')

  second = threading.Thread(target=save_again)
  second.start()
  second.join(0.2)
  assert second.is_alive()
  gate.set()
  second.join()
  checkpointer.wait_for_checkpointing_to_finish()
  assert checkpointer.steps('latest') == [1, 2]


@pytest.mark.parametrize(
  'harm', [shutil.rmtree, lambda data: os.truncate(next(data.rglob('c*')), 1)]
)
def test_the_one_before_damage_is_used(harm, open_run, two, caplog):
  """Of all other damage see test_model.py."""
  harm(lib.data_of(two, 5))
  checkpointer, live = open_run(max_checkpoints_to_keep=1), lib.weights()
  assert lib.restore(checkpointer, live).global_step == 3
  assert live.held()['n'] == 1
  assert 'Trying an earlier one' in caplog.text
  with pytest.raises(store_lib.DamagedError, match='/latest/5'):
    lib.restore(checkpointer, live, 5)
  assert live.held()['n'] == 1
  lib.flip(lib.manifest_of(two, 3))
  left = lib.tree_of(two)
  with pytest.raises(store_lib.DamagedError, match='that is intact') as e:
    lib.restore(checkpointer, lib.weights())
  assert '/latest/3' in str(e.value)
  assert '/latest/5' in str(e.value)
  assert left.items() <= lib.tree_of(two).items()
  checkpointer.begin(3)  # It goes when training begins there.
  assert checkpointer.steps('latest') == [3]


def test_evaluation_reads_no_optimizer(copied, open_run):
  manifest = json.loads(lib.manifest_of(copied).read_text())
  opt = [n for n in manifest['arrays'] if n.startswith('state/opt_state/')]
  assert len(opt) == 5  # Adam's count and two moments of two weights.
  for name in opt:
    lib.part_of(copied, name).unlink()
  live = lib.Sharded('eval', seed=1)
  state = lib.restore(open_run('eval'), live, key=None)
  assert state.global_step == 5
  lib.assert_same(state.train_step_rng, jax.random.key(1))
  want = lib.Sharded()
  lib.advance(want, 1)
  for field in ('step', 'params', 'model_state'):
    lib.assert_same(getattr(live.state, field), getattr(want.state, field))
  # Training takes the one before.
  state = lib.restore(open_run(), lib.Sharded(), key=jax.random.key(0))
  assert state.global_step == 3


@pytest.mark.parametrize('method', ['versioned', 'read_into'])
def test_an_error_of_the_disk_is_raised_as_it_is(
  method, open_run, two, monkeypatch
):
  def fails(*unused):
    raise OSError(errno.EIO, 'Input/output error')

  checkpointer, live, left = open_run('eval'), lib.weights(), lib.tree_of(two)
  with monkeypatch.context() as patch:
    patch.setattr(store_lib.Disk, method, fails)
    with pytest.raises(OSError, match='Input/output'):
      lib.restore(checkpointer, live)
  assert live.held()['n'] == 0
  assert left.items() <= lib.tree_of(two).items()
  assert lib.restore(checkpointer, live).global_step == 5


def test_sharded_state_that_does_not_fit(copied, open_run, tmp_path):
  live = lib.Sharded(seed=1, params={
    'w': jnp.ones([4], jnp.bfloat16), 'new': jnp.ones([2]),
    'layer': {'b': jnp.ones([3, 2])},
  })  # fmt: skip
  live.loss_fn = None  # What is refused is refused before any step.
  message = lib.assert_refused(
    open_run(), live, tmp_path, 'nothing was restored',
    contents.MismatchError, key=jax.random.key(0),
  )  # fmt: skip
  # The optimizer's moments are told too, and nothing that fits.
  lines = [x.strip() for x in message.splitlines() if x.startswith('  ')]
  assert len(lines) == 9
  assert sum('opt_state' in line for line in lines) == 6
  of = 'the checkpoint has'
  assert lines[6:] == [
    f'state/params/layer/b: {of} float32[2, 3], the experiment expects'
    ' float32[3, 2]',
    f'state/params/new: {of} nothing, the experiment expects float32[2]',
    f'state/params/w: {of} float32[4], the experiment expects bfloat16[4]',
  ]
