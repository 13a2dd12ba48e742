"""What is said when the devices have no more memory."""

import errno
import gzip
import types

import jax
import jax.numpy as jnp
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline import train
from jaxline.supervision import out_of_memory
from tests.experiments import regression

TOO_LARGE = 1 << 46  # Elements; no address space has that.


@pytest.fixture(autouse=True)
def lists_all(monkeypatch):
  # Arrays of other tests in this process live too.
  monkeypatch.setattr(out_of_memory, '_NUM_LISTED', 10**6)


def allocate_too_much():
  jnp.ones([TOO_LARGE], jnp.float32).block_until_ready()


class Sharded(regression.Regression):
  """Takes too much in the mode `fails`, at the third step."""

  fails = 'train'

  def step(self, *, global_step, rng, writer):
    if self.fails == 'train' and global_step == 2:
      allocate_too_much()
    return super().step(global_step=global_step, rng=rng, writer=writer)

  def evaluate(self, *, global_step, rng, writer):
    if self.fails == 'eval':
      allocate_too_much()
    return super().evaluate(global_step=global_step, rng=rng, writer=writer)


class Evaluates(Sharded):
  fails = 'eval'


class PerDevice(experiment.AbstractExperiment):
  CHECKPOINT_ATTRS = {'_params': 'params'}

  def __init__(self, mode, init_rng):
    super().__init__(mode, init_rng)
    w = jnp.zeros([jax.local_device_count(), 1024])
    self._params = {'dense': {'w': jax.pmap(lambda x: x)(w)}}

  def step(self, *, global_step, rng, writer):
    allocate_too_much()

  def evaluate(self, *, global_step, rng, writer):
    return {}


class Constructor(PerDevice):
  def __init__(self, mode, init_rng):
    super().__init__(mode, init_rng)
    allocate_too_much()


def failed(tmp_path, cls, loop=train.Run.train):
  """Returns the error of a run, and its notes as one text."""
  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  config.checkpointer = 'memory'
  config.training_steps = 5
  with pytest.raises(jax.errors.JaxRuntimeError) as e:
    loop(train.Run(cls, config))
  notes = [x for x in e.value.__notes__ if x.startswith('[jaxline] ')]
  return e, '\n'.join(notes)


def test_a_step_that_needs_too_much(tmp_path):
  e, notes = failed(tmp_path, Sharded)
  assert e.traceback[-1].name != '_notes'
  assert 'allocate_too_much' in [entry.name for entry in e.traceback]
  assert str(e.value).startswith('RESOURCE_EXHAUSTED')
  (w,) = [line for line in notes.splitlines() if 'state/params/w ' in line]
  assert w.split() == ['128', 'B', 'state/params/w', 'float32[8,4]']
  for advice in (
    'smaller batch',
    "config.sharding = 'fsdp', now 'ddp'",
    'config.gradient_accumulation_steps, now 1',
    'remat',
    '--jaxline_mode=compile',
  ):
    assert advice in notes
  path = tmp_path / 'out_of_memory_process_0.prof'
  assert f'pprof -top {path}' in notes
  assert gzip.decompress(path.read_bytes())  # A protocol buffer of pprof.
  assert notes.count('Suggested changes') == 1


def test_an_evaluation_that_needs_too_much(tmp_path):
  _, notes = failed(tmp_path, Evaluates, train.Run.train_and_eval)
  assert 'state/params/w ' in notes
  assert notes.count('Suggested changes') == 1


def test_arrays_of_the_per_device_style_have_names(tmp_path):
  _, notes = failed(tmp_path, PerDevice)
  # Two devices: half of the array is on each.
  assert '4 KiB  params/dense/w float32[2,1024]' in notes


def test_a_constructor_that_needs_too_much(tmp_path):
  _, notes = failed(tmp_path, Constructor)
  assert '(unnamed) float32[2,1024]' in notes
  assert 'Suggested changes' in notes


def test_what_a_failed_step_was_given_is_named(tmp_path):
  given = types.SimpleNamespace(w=jnp.zeros([3, 1000]), batch=[jnp.ones([7])])
  given.w.delete()
  table = out_of_memory._largest(given)
  assert 'w float32[3,1000]' in table
  assert 'batch/0 float32[7]' in table


def test_the_memory_in_use_is_said_where_the_backend_knows():
  class Device:
    def memory_stats(self):
      return {'bytes_in_use': 3 << 30, 'bytes_limit': 16 << 30}

    def __str__(self):
      return 'TPU_0'

  assert (
    out_of_memory._in_use([Device()]) == 'TPU_0: 3 GiB in use, 16 GiB in all'
  )


def test_a_report_that_fails_hides_no_error(tmp_path, monkeypatch):
  def full(path):
    raise OSError(errno.ENOSPC, 'No space left on device', path)

  monkeypatch.setattr(jax.profiler, 'save_device_memory_profile', full)
  e, notes = failed(tmp_path, Sharded)
  assert str(e.value).startswith('RESOURCE_EXHAUSTED')
  assert 'No space left on device' in notes
  assert 'Suggested changes' in notes


@pytest.mark.parametrize(
  'error',
  [
    jax.errors.JaxRuntimeError(
      'RESOURCE_EXHAUSTED: f; No space left on device'
    ),
    jax.errors.JaxRuntimeError('INTERNAL: something else'),
    MemoryError('RESOURCE_EXHAUSTED'),
  ],
)
def test_another_error_gets_no_notes(error):
  config = base_config.get_base_config()
  with pytest.raises(type(error)) as e:
    with out_of_memory.explained(None, config):
      raise error
  assert not getattr(e.value, '__notes__', [])
