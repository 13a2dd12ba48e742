"""Compiling a run for chips that are not here: its report, time and memory."""

import dataclasses
import importlib.util
import json
import os
import pathlib
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
from jaxline.base import chips
from jaxline.compile import ahead
from jaxline.compile import hlo
from jaxline.compile import measure
from jaxline.compile import memory
from jaxline.compile import report
from jaxline.parallel import partitioning
from jaxline.supervision import compilation_cache

pytestmark = pytest.mark.usefixtures('compiles')

HLO = pathlib.Path(__file__).parent / 'hlo'
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
  for text in 'DOES NOT FIT', 'gradient_accumulation_steps', made.notes[0][:20]:
    assert text in str(made)


def test_for_tpus_their_compiler_is_needed(monkeypatch):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(errors.UsageError, match='tpu-aot'):
    ahead.make_report(TwoLayers, make_config(topology='v4:2x2x1'))


def test_the_buffers_of_a_program_that_does_not_fit():
  # libtpu 0.0.52 for v5e:2x2: two layers, w f32[2,28000,28000] replicated, so
  # that a chip's 15.75 GiB do not hold it, its gradient and its update. Left
  # out are instructions and buffers that say nothing more.
  assignment = (HLO / 'out_of_memory.txt').read_text()
  module = hlo.parse((HLO / 'out_of_memory.hlo').read_text())
  total, found = memory.buffers(assignment, module)
  big, half = 'f32[2,28000,28000]', 'f32[1,28000,28000]'
  layer1 = 'jit(f)/transpose(jvp(layer1))/dot_general'
  assert [dataclasses.astuple(b) for b in found[:5]] == [
    (6279168000, big, 'argument', "p['w']"),  # 2 x 28000^2 x 4, and tiles.
    (6279168000, big, 'temporary', 'jit(f)/add_any'),
    (3139584000, half, 'temporary', ''),
    (3139584000, half, 'temporary', layer1),
    (28672000, 'f32[256,28000]', 'argument', 'x'),
  ]
  # Buffers that take turns in the same place count once, and all together they
  # are what the program needs, which is what the compiler says.
  assert total == 6279168000 + 28672000 + 12558385664
  assert 0 <= total - sum(b.bytes for b in found) < 1 << 20
  assert total / 2**30 == pytest.approx(17.57, rel=0.01)


def test_errors_of_too_little_memory():
  of_hbm = (
    'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM,'
    ' the total memory required for HLO temporaries (17.57G) exceeds available'
    ' HBM (15.75G). HLO module: jit_f.\nSee'
    ' https://openxla.org/xla/errors/error_1000 for more details.'
  )
  of_vmem = 'RESOURCE_EXHAUSTED: Ran out of scoped memory in vmem.'
  of_others = 'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.'
  for error, expected in (of_hbm, 1), (of_others, 1), (of_vmem, 0):
    assert memory.is_out_of_memory(RuntimeError(error)) == expected, error


def test_the_roofline_of_a_step():
  """The lower bound on its time, by the peak rates of a chip."""
  # 100 FLOP/s, 1000 bytes of memory at 50 bytes/s; links of 20 and 10 bytes/s.
  target = report.Target(
    name='v4:2x2x1', device_kind='TPU v4', num_slices=2, num_devices=8,
    chip=chips.Chip('v4', ('TPU v4',), 100.0, 1000.0, 50.0, 2, 10.0, 10.0),
  )  # fmt: skip
  # How many; their bytes, those sent, and those sent to other slices.
  gather = measure.Traffic('all-gather', ('data',), 3, 80.0, 60.0, 0.0)
  reduce = measure.Traffic('all-reduce', ('data',), 1, 40.0, 70.0, 10.0)
  measures = measure.Measures(
    flops=1000.0, hbm_bytes=200.0, traffic=(gather, reduce),
    unknown_loops=(), unknown_kernels=(),
  )  # fmt: skip

  def roofline(target=target, **changes):
    changed = dataclasses.replace(measures, **changes)
    return report.roofline(target, changed, model_flops=4000.0)

  assert roofline() == report.Roofline(
    seconds={
      'compute': 1000 / 100,
      'memory': 200 / 50,
      'ICI': (60 + 70 - 10) / 20,
      'DCN': 10 / 10,
    },
    # 4000 of the 8 x 100 FLOP/s there are, in 10 s; in 10 + 4 + 6 + 1 s.
    mfu_bound=4000 / (800 * 10),
    mfu_sum=4000 / (800 * 21),
  )
  assert roofline(flops=1.0).mfu_bound == 4000 / (800 * 6)  # Of ICI.
  assert roofline(flops=0.0, hbm_bytes=0.0, traffic=()).mfu_bound == 0
  assert roofline(dataclasses.replace(target, chip=None)) is None


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
