"""Tests of the names of experiments; `main_test` has unknown names."""

import importlib
import sys

import pytest

from examples.pax import base_experiment
from examples.pax import experiment_registry
from examples.pax.tasks.lm.params import c4

OWN = """
from examples.pax import base_experiment, experiment_registry

@experiment_registry.register
class Own(base_experiment.BaseExperiment):
  datasets = task = None
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
  known = dict(experiment_registry.get_all())  # Imports all modules.
  monkeypatch.setattr(experiment_registry, '_registered', known)


def make(module, name='Mine'):
  body = {'__module__': module, 'datasets': None, 'task': None}
  return type(name, (base_experiment.BaseExperiment,), body)


@pytest.mark.parametrize(
  'prefix',
  [
    'examples.pax.tasks.lm.params.c4.',
    'paxml.tasks.lm.params.c4_multislice.',
    'lm.c4.',
    '',
  ],
)
def test_every_suffix_is_a_name_and_those_of_pax_are(prefix):
  cls = c4.C4SpmdGpt3AdamDataParallel2x16x16
  name = 'C4SpmdGpt3AdamDataParallel2x16x16'
  assert experiment_registry.get(prefix + name) is cls
  # The list has the experiment once.
  names = [n for n in experiment_registry.get_all() if n.endswith(name)]
  assert names == [experiment_registry.full_name(cls)]
  with pytest.raises(experiment_registry.UnknownError):
    experiment_registry.get(name[1:])


def test_a_name_of_two_lists_both():
  for module in ('mine.a', 'mine.b'):
    experiment_registry.register(make(module))
  with pytest.raises(
    experiment_registry.UnknownError, match=r"'mine\.a\.Mine', 'mine\.b\.Mine'"
  ):
    experiment_registry.get('Mine')
  assert experiment_registry.get('b.Mine').__module__ == 'mine.b'


def test_one_name_is_registered_once_except_where_code_runs_again():
  register = experiment_registry.register
  register(tags=['smoke'])(make('mine.a'))
  with pytest.raises(ValueError, match=r'mine\.a\.Mine'):
    register(make('mine.a'))
  second = register(allow_overwrite=True)(make('mine.a'))
  assert experiment_registry.get('mine.a.Mine') is second
  for _ in range(2):  # A cell of a notebook.
    cell = register(make('__main__'))
    assert experiment_registry.get('__main__.Mine') is cell


def test_a_module_elsewhere_is_imported_and_may_be_reloaded(
  monkeypatch, tmp_path
):
  path = tmp_path / 'my_experiments.py'
  path.write_text(OWN)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)
  old = experiment_registry.get('my_experiments.Own')
  module = importlib.reload(sys.modules['my_experiments'])
  assert experiment_registry.get('my_experiments.Own') is module.Own is not old
  # But a module may define a name only once.
  del sys.modules['my_experiments']
  path.write_text(OWN + OWN)
  with pytest.raises(ValueError, match=r'my_experiments\.Own'):
    importlib.import_module('my_experiments')
  with pytest.raises(experiment_registry.UnknownError):
    experiment_registry.get('my_other_experiments.Own2')
  # What a module lacks is told.
  path.write_text('import a_missing_module')
  with pytest.raises(ModuleNotFoundError, match='a_missing_module'):
    experiment_registry.get('my_experiments.Own2')


def test_rows_of_a_fraction_a_device():
  experiment = c4.C4SpmdGpt3AdamDataParallel2x16x16(512)
  assert experiment.rows(experiment.PERCORE_BATCH_SIZE) == 256
  with pytest.raises(ValueError, match=r'0.5 rows for each of 3 devices'):
    c4.C4SpmdGpt3AdamDataParallel2x16x16(3).rows(0.5)
