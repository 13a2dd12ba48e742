"""Tests of the names of experiments, and of errors that suggest others."""

import importlib
import sys
import types

import pytest

from examples.pax import base_experiment
from examples.pax import experiment_registry
from examples.pax.tasks.lm.params import c4

FULL = 'examples.pax.tasks.lm.params.c4.C4Spmd1BAdam4Replicas'


@pytest.fixture(autouse=True)
def _as_before():
  experiment_registry.get_all()  # Imports the registering modules.
  before = dict(experiment_registry._registered)
  yield
  experiment_registry._registered.clear()
  experiment_registry._registered.update(before)


def make(name, module):
  body = {'__module__': module, 'datasets': None, 'task': None}
  return type(name, (base_experiment.BaseExperiment,), body)


def test_every_suffix_is_a_name():
  parts = FULL.split('.')
  for i in range(len(parts)):
    name = '.'.join(parts[i:])
    assert experiment_registry.get(name) is c4.C4Spmd1BAdam4Replicas


def test_what_is_no_suffix_at_a_dot_is_none():
  with pytest.raises(experiment_registry.UnknownError):
    experiment_registry.get('Adam4Replicas')


def test_a_name_of_two_lists_both():
  for module in ('mine.a', 'mine.b'):
    experiment_registry.register(make('Twice', module))
  with pytest.raises(
    experiment_registry.UnknownError,
    match=r"'mine\.a\.Twice', 'mine\.b\.Twice'",
  ):
    experiment_registry.get('Twice')
  assert experiment_registry.get('b.Twice').__module__ == 'mine.b'


def test_one_name_cannot_be_registered_twice():
  experiment_registry.register(make('Mine', 'mine.a'))
  with pytest.raises(ValueError, match=r'mine\.a\.Mine'):
    experiment_registry.register(make('Mine', 'mine.a'))


def test_a_cell_that_is_run_again_replaces_its_experiment():
  first = experiment_registry.register(make('Mine', '__main__'))
  second = experiment_registry.register(make('Mine', '__main__'))
  assert experiment_registry.get('Mine') is second is not first


def test_a_module_that_is_reloaded_replaces_its_experiments(
  monkeypatch, tmp_path
):
  path = tmp_path / 'my_reloaded.py'
  text = (
    'from examples.pax import base_experiment, experiment_registry\n'
    '@experiment_registry.register\n'
    'class Own(base_experiment.BaseExperiment):\n'
    '  datasets = task = None\n'
  )
  path.write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)
  old = experiment_registry.get('my_reloaded.Own')
  module = importlib.reload(sys.modules['my_reloaded'])
  assert experiment_registry.get('my_reloaded.Own') is module.Own is not old
  # But a module may define a name only once.
  del sys.modules['my_reloaded']
  path.write_text(text + text)
  with pytest.raises(ValueError, match=r'my_reloaded\.Own'):
    importlib.import_module('my_reloaded')


def test_names_that_pax_has():
  cls = c4.C4SpmdGpt3AdamDataParallel2x16x16
  name = 'C4SpmdGpt3AdamDataParallel2x16x16'
  for prefix in (
    'paxml.tasks.lm.params.c4_multislice.',
    'tasks.lm.params.c4_multislice.',
    'c4_multislice.',
    'tasks.lm.params.c4.',
    'lm.c4.',
    'paxml.',
    '',
  ):
    assert experiment_registry.get(prefix + name) is cls
  # The list has the experiment once.
  names = [n for n in experiment_registry.get_all() if n.endswith(name)]
  assert names == [experiment_registry.full_name(cls)]


def test_the_arguments_of_pax():
  register = experiment_registry.register
  first = register(tags=['smoke'])(make('Mine', 'mine.a'))
  assert experiment_registry.get('mine.a.Mine') is first
  second = register(allow_overwrite=True)(make('Mine', 'mine.a'))
  assert experiment_registry.get('mine.a.Mine') is second


def test_an_unknown_name_gets_the_nearest_first():
  with pytest.raises(
    experiment_registry.UnknownError,
    match=r"nearest are \['tasks\.lm\.params\.c4\.C4Spmd1BAdam4Replicas'",
  ) as e:
    experiment_registry.get('tasks.lm.params.c4.C4Spmd1BAdam4Replica')
  for name in experiment_registry.get_all():
    assert experiment_registry.short_name(name) in str(e.value)


def test_a_module_elsewhere_is_imported_by_its_name(monkeypatch, tmp_path):
  (tmp_path / 'my_experiments.py').write_text(
    'from examples.pax import base_experiment, experiment_registry\n'
    '@experiment_registry.register\n'
    'class Own(base_experiment.BaseExperiment):\n'
    '  datasets = task = None\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)
  own = experiment_registry.get('my_experiments.Own')
  assert own.__module__ == 'my_experiments'
  assert isinstance(sys.modules.pop('my_experiments'), types.ModuleType)
  with pytest.raises(experiment_registry.UnknownError):
    experiment_registry.get('my_other_experiments.Own2')


def test_constants_are_names_in_capitals_and_those_of_parents():
  found = c4.C4SpmdGpt3AdamDataParallel2x16x16.constants()
  assert found['NUM_LAYERS'] == 96
  assert found['TRAINABLE_PE_MAX_SEQ_LEN'] == 16384
  assert found['WEIGHT_DECAY'] == 0.1
  assert found['RANDOM_SEED'] == 1234
  assert all(name.isupper() for name in found)


def test_other_constants_make_another_class_of_the_name():
  other = c4.C4Spmd1BAdam4Replicas.with_constants({'NUM_LAYERS': 2})
  assert (other.NUM_LAYERS, c4.C4Spmd1BAdam4Replicas.NUM_LAYERS) == (2, 13)
  assert other.__name__ == 'C4Spmd1BAdam4Replicas'
  with pytest.raises(ValueError, match=r"'NUM_LAYER' in .*mean 'NUM_LAYERS'"):
    other.with_constants({'NUM_LAYER': 2})


def test_rows_of_a_fraction_a_device():
  experiment = c4.C4SpmdGpt3AdamDataParallel2x16x16(512)
  assert experiment.rows(experiment.PERCORE_BATCH_SIZE) == 256
  with pytest.raises(ValueError, match=r'0.5 rows for each of 3 devices'):
    c4.C4SpmdGpt3AdamDataParallel2x16x16(3).rows(0.5)
