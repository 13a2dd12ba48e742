"""Compiling a run for chips that are not here."""

import dataclasses
import importlib.util
import json
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import metrics
from jaxline import sharded
from jaxline.compile import ahead
from jaxline.parallel import partitioning
from jaxline.supervision import compilation_cache

pytestmark = pytest.mark.usefixtures('compiles')

ROWS = 128


class TwoLayers(sharded.ShardedExperiment):
  """x -> tanh(x a) b; with Adam."""

  def __init__(self, mode, init_rng, width=128, hidden=256, evaluates=True,
               *, run_config=None):  # fmt: skip
    self.width, self.hidden, self.evaluates = width, hidden, evaluates
    super().__init__(mode, init_rng, run_config=run_config)

  def init_fn(self, rng):
    a = jax.random.normal(rng, [self.width, self.hidden])
    weights = {'a': (a, ('embed', 'mlp')), 'b': (a.T, ('mlp', 'embed'))}
    return {k: partitioning.Logical(*v) for k, v in weights.items()}, {}

  def loss_fn(self, params, model_state, batch, rng, is_training):
    y = jnp.tanh(batch['x'] @ params['a']) @ params['b']
    loss = metrics.Mean.of(jnp.square(y).mean(-1), batch['weights'])
    return loss.compute(), {'loss': loss}, model_state

  def make_optimizer(self):
    return optax.adam(1e-2)

  def train_input(self):
    while True:
      yield {'x': np.ones([ROWS, self.width], np.float32)}

  def eval_input(self):
    if not self.evaluates:
      raise NotImplementedError
    return [{'x': np.ones([ROWS, self.width], np.float32)}]


def make_config(**changes):
  config = base_config.get_base_config()
  config.update({'sharding': 'fsdp'} | changes)
  return config.lock()


def read(path):
  """Returns a report's JSON with attributes for its keys."""
  to_object = lambda values: types.SimpleNamespace(**values)
  return json.loads(path.read_text(), object_hook=to_object)


def test_a_run_on_the_devices_of_this_machine(tmp_path, capsys):
  config = make_config(checkpoint_dir=str(tmp_path))
  assert ahead.compile_experiment(TwoLayers, config)
  path = tmp_path / 'compile' / 'local.json'
  made = read(path)
  assert 'TwoLayers on local (cpu)' in capsys.readouterr().out
  mesh = {'stage': 1, 'replica': 1, 'data': 2, 'expert': 1, 'mdl': 1}
  assert vars(made.mesh) == mesh
  assert (made.target.num_slices, made.target.num_devices) == (1, 2)
  assert (made.sharding, made.batch_rows) == ('fsdp', ROWS)
  assert made.parameters == 2 * 128 * 256
  # Half of the weights and of Adam's two moments; four counters of 4 bytes.
  weights = 4 * made.parameters // 2
  assert made.state_bytes == 3 * weights + 4 * 4
  assert made.batch_bytes == (ROWS // 2) * (128 + 1) * 4
  train, evaluation = made.programs
  product = 2 * ROWS * 128 * 256
  assert train.model_flops == 3 * 2 * product
  assert evaluation.model_flops == 2 * product
  # There is no gradient of x, and each of the two devices has half the rows.
  assert train.measures.flops == 5 * product / 2
  assert evaluation.measures.flops == 2 * product / 2
  # The state is donated: it exists once.
  arrays = train.peak_bytes - train.temp_bytes
  assert made.state_bytes + made.batch_bytes <= arrays < 2 * made.state_bytes
  assert (train.fits, train.roofline) == (None, None)
  gathers = [t for t in train.measures.traffic if t.kind == 'all-gather']
  assert [t.axes for t in gathers] == [['data']]
  # Each weight once whole, at least.
  assert gathers[0].bytes >= 4 * made.parameters
  assert gathers[0].dcn_bytes == 0
  assert "state.opt_state[0].mu['a']" in [b.name for b in train.buffers]
  assert any("a 'cpu' device" in n.lower() for n in made.notes)
  assert os.listdir(path.parent) == ['local.json']


def test_the_compiler_is_asked_although_there_is_a_cache(tmp_path):
  """And an experiment need not evaluate."""
  config = make_config(experiment_kwargs={'evaluates': False})
  settings = {
    'jax_compilation_cache_dir': str(tmp_path),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
  }
  with compilation_cache.configured(settings):
    for _ in range(2):
      made = ahead.make_report(TwoLayers, config)
      (train,) = made.programs
      assert train.buffers  # XLA tells them as it compiles.
  assert any('no eval step' in note for note in made.notes)
  assert 'DOES NOT FIT' not in str(made)
  train = dataclasses.replace(train, fits=False)
  made = dataclasses.replace(made, programs=(train,))
  assert not made.fits
  for text in (
    'DOES NOT FIT',
    'gradient_accumulation_steps',
    made.notes[0][:20],
  ):
    assert text in str(made)


def test_for_tpus_their_compiler_is_needed(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(errors.UsageError, match='tpu-aot'):
    ahead.make_report(TwoLayers, make_config(topology='v4:2x2x1'))


# The TPU compiler.


def test_a_run_that_does_not_fit(tmp_path, capsys):
  pytest.importorskip('libtpu')
  config = make_config(
    topology='v5e:2x2', sharding='ddp', checkpoint_dir=str(tmp_path)
  )
  config.unlock()
  # Weights of 5 GiB, with Adam's moments 15 GiB; and a gradient of 2.5 GiB.
  config.experiment_kwargs.width = 1 << 14
  config.experiment_kwargs.hidden = 5 << 13
  assert not ahead.compile_experiment(TwoLayers, config)
  text = capsys.readouterr().out
  assert 'DOES NOT FIT' in text
  assert 'Suggested changes' in text
  made = read(tmp_path / 'compile' / 'v5e-2x2.json')
  train, evaluation = made.programs
  assert train.fits is False
  assert evaluation.fits is True
  assert 17 << 30 <= train.peak_bytes < 21 << 30
  assert train.buffers[0].bytes == 5 << 29
