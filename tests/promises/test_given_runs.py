"""Promise: a run given by its directory supplies its config, and no code.

The caller may name or give anything.
"""

import functools
import importlib
import json
import os
import pathlib
import shutil
import sys
import types

from ml_collections import config_dict
import pytest

import jaxline
from jaxline import base_config
from jaxline import errors
from jaxline import experiment
from jaxline import platform
from jaxline.inputs import __main__ as inputs_main
from jaxline.runs import replay
from tests import processes
from tests import toys

ROOT = processes.ROOT
NAME = f'{__name__}:'


class Pickled:
  """A value that can only be pickled; notes when it is unpickled."""

  unpickled = []

  def __reduce__(self):
    return Pickled.make, ()

  @classmethod
  def make(cls):
    cls.unpickled.append(1)
    return cls()


class Counts(experiment.FullExperiment):
  """Counts its steps."""

  NON_BROADCAST_CHECKPOINT_ATTRS = {'count': 'count', 'kept': 'kept'}

  def __init__(self, mode, init_rng=None, sizes=(1,), label='a'):
    super().__init__(mode, init_rng)
    hash(sizes)
    self.count, self.kept, self.sizes, self.label = 0, None, sizes, label

  def step(self, **unused):
    self.count += 1
    return {'loss': 1.0 / self.count}

  def evaluate(self, **unused):
    return {'loss': 1.0 / self.count}


class Pickles(Counts):
  """Counts its steps, and keeps a value that can only be pickled."""

  def snapshot_state(self):
    return super().snapshot_state() | {'kept': Pickled()}


def duck(*args, **kwargs):
  """Makes an experiment, but is no class."""
  called.append(args)
  return Counts(*args, **kwargs)


called = []


class Duck:
  """Does not derive from an experiment."""

  def __init__(self, mode, init_rng=None):
    called.append(mode)


partial = functools.partial(Counts, label='b')


@pytest.fixture(autouse=True)
def _nothing_called():
  called.clear()
  Pickled.unpickled.clear()


def trained(directory, cls=Counts, **values):
  config = toys.make_config(
    3,
    experiment_class=f'{NAME}{cls.__name__}',
    checkpoint_dir=str(directory),
    writers=('jsonl',),
    compilation_cache='off',
  )
  config.update_from_flattened_dict(values)
  jaxline.fit(cls, config, mode='train')
  return directory


@pytest.fixture(scope='module')
def trained_run(tmp_path_factory):
  return trained(tmp_path_factory.mktemp('trained') / 'run')


@pytest.fixture
def run(trained_run, tmp_path):
  """The directory of a run of `Counts` that a test may change."""
  return shutil.copytree(trained_run, tmp_path / 'run')


def rewritten(run, **values):
  """Changes the config in a run's directory."""
  path = run / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | values))
  return run


READERS = {
  'load': jaxline.load,
  'evaluate': jaxline.evaluate,
  'train': lambda run: toys.main(
    f'--jaxline_run={run}', '--config.training_steps=4'
  ),
  'show': lambda run: inputs_main.input_maker(
    platform.load_config([f'--jaxline_run={run}']), 'train'
  ),
  'replay': lambda run: replay.open_replay(run, 1).__enter__(),
}


# What a directory cannot do, and what the caller may.


@pytest.mark.parametrize(
  ('name', 'kwargs'),
  [
    ('subprocess:Popen', {'args': ['touch', 'ran']}),
    (f'{NAME}duck', {}),
    (f'{NAME}Duck', {}),
    (f'{NAME}partial', {}),
  ],
)
def test_a_directory_names_only_experiments_and_the_caller_anything(
  name, kwargs, run, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  rewritten(run, experiment_class=name, experiment_kwargs=kwargs)
  refused = (errors.UsageError, SystemExit)
  for reader in READERS.values():
    with pytest.raises(refused, match='experiment_class'):
      reader(run)
  assert called == []
  assert not (tmp_path / 'ran').exists()
  rewritten(run, experiment_kwargs={})
  given = {'experiment_class': f'{NAME}duck'}
  assert jaxline.load(run, given).count == 3
  assert jaxline.load(run, experiment_class=duck).count == 3
  assert jaxline.load(run, experiment_class=partial).label == 'b'
  assert jaxline.evaluate(run, given) == {'loss': 1 / 3}
  toys.main(
    f'--jaxline_run={run}',
    f'--config.experiment_class={NAME}duck',
    '--config.training_steps=4',
    '--config.on_config_change=continue',
  )
  assert len(called) == 4


# The run is `run`; `inside` is a link into it.
@pytest.mark.parametrize(
  ('cwd', 'file', 'name'),
  [
    ('.', 'run/__init__.py', 'run.inner.evil:E'),
    ('.', 'run/inner/evil.py', 'inside.evil:E'),
    ('.', 'elsewhere/evil.py', 'run.link:E'),
    ('run', 'run/evil.py', 'evil:E'),
    ('run/inner', 'run/evil/__init__.py', 'evil:E'),
  ],
)
@pytest.mark.parametrize('is_on_path', [False, True])
def test_a_directory_supplies_no_code(
  cwd, file, name, is_on_path, run, tmp_path, monkeypatch
):
  rewritten(run, experiment_class=name)
  (run / 'inner').mkdir()
  (tmp_path / 'inside').symlink_to(run / 'inner')
  (run / 'link.py').symlink_to(tmp_path / 'elsewhere/evil.py')
  (tmp_path / file).parent.mkdir(exist_ok=True)
  for path in (tmp_path / file, run / 'inner/evil.py'):
    path.write_text(f'open({str(tmp_path / "ran")!r}, "w")')
  monkeypatch.chdir(tmp_path / cwd)
  monkeypatch.setattr(sys, 'path', [os.getcwd()] * is_on_path + sys.path)
  for package in ('run', 'run.inner', 'inside'):  # Of other tests.
    sys.modules.pop(package, None)
  before = list(sys.path)
  is_found = is_on_path or cwd == '.'
  said = "outside of the run's" if is_found else 'No module named'
  for reader in READERS.values():
    with pytest.raises((errors.UsageError, SystemExit), match=said):
      reader(run)
  assert not (tmp_path / 'ran').exists()
  assert {*sys.path} <= {*before, str(tmp_path)}
  # Nor does it choose among the modules that were imported.
  own = types.SimpleNamespace(E=Counts, __file__=str(tmp_path / file))
  monkeypatch.setitem(sys.modules, 'own_module', own)
  rewritten(run, experiment_class='own_module:E')
  if file.startswith('run'):
    with pytest.raises(errors.UsageError, match='own_module'):
      jaxline.load(run)
  assert jaxline.load(run, {'experiment_class': 'own_module:E'}).count == 3


def test_the_code_of_a_project_may_lie_around_and_beside_its_runs(
  trained_run, tmp_path, monkeypatch
):
  monkeypatch.setattr(sys, 'path', list(sys.path))
  (tmp_path / 'mine.py').write_text(
    f'from {__name__} import Counts\nclass Mine(Counts): pass'
  )
  for cwd, place in (('.', 'runs/a'), ('runs/a', 'runs/a'), ('runs', 'b')):
    run = shutil.copytree(trained_run, tmp_path / place, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / cwd)
    assert jaxline.load(rewritten(run, experiment_class='mine:Mine')).count == 3
    monkeypatch.delitem(sys.modules, 'mine')


@pytest.mark.parametrize('reader', ['load', 'evaluate', 'train'])
def test_a_directory_does_not_allow_pickles(reader, tmp_path):
  run = trained(tmp_path / 'run', Pickles, checkpoint_allow_pickle=True)
  recorded = json.loads((run / 'config.json').read_text())
  assert recorded['checkpoint_allow_pickle']
  with pytest.raises((Exception, SystemExit), match='checkpoint_allow_pickle'):
    READERS[reader](run)
  assert Pickled.unpickled == []
  jaxline.load(run, {'checkpoint_allow_pickle': True})
  assert len(Pickled.unpickled) == 1


# What is taken from it.


def test_the_config_is_that_of_the_run(tmp_path):
  values = {
    'experiment_kwargs.sizes': (1, (2, 3)),
    'experiment_kwargs.label': None,
    'my_own': {'a': {}},
    'compilation_cache': str(tmp_path / 'cache'),
    'on_config_change': 'continue',
  }
  moved = shutil.move(trained(tmp_path / 'run', **values), tmp_path / 'moved')
  found = base_config.recorded_config(rewritten(moved, mesh=None))
  expected = json.loads((moved / 'config.json').read_text())
  expected |= {
    'checkpoint_dir': str(moved),
    'compilation_cache': 'auto',
    'on_config_change': 'raise',
  }
  assert base_config.recorded(found) == expected
  assert found.experiment_kwargs.sizes == (1, (2, 3))
  # Its keys have types, so that flags can override them.
  own = 'experiment_kwargs.label=b', 'writers=("jsonl", "tensorboard")'
  config = platform.load_config(
    [f'--jaxline_run={moved}', *(f'--config.{x}' for x in own)]
  )
  assert config.experiment_kwargs.label == 'b'
  assert config.writers == ('jsonl', 'tensorboard')
  assert config.training_steps == 3


def test_what_followed_a_key_follows_it_again(tmp_path):
  recorded = {'training_steps': 3, 'seed': 42, 'eval_interval': 5}
  run = rewritten(
    trained(tmp_path / 'run'), experiment_kwargs={'config': recorded}
  )
  argv = '--config.training_steps=9', '--config.random_seed=7'  # In any order.
  config = platform.load_config([*argv, f'--jaxline_run={run}'])
  own = {'training_steps': 9, 'seed': 7, 'eval_interval': 5}
  assert config.experiment_kwargs.config.to_dict() == own
  argv = [f'--jaxline_run={run}', '--config.experiment_kwargs.config.seed=1']
  config = platform.load_config(argv)
  assert config.experiment_kwargs.config.seed == 1
  assert config.random_seed == 42


def test_what_is_damaged_or_not_there_is_refused(run, tmp_path):
  for content in ('', '[]', '{"a.b": 1}', '{"experiment_class": 3}'):
    (tmp_path / 'config.json').write_text(content)
    with pytest.raises(errors.UsageError):
      jaxline.load(tmp_path)
  with pytest.raises(errors.UsageError, match=f'{tmp_path}/no'):
    platform.load_config([f'--jaxline_run={tmp_path}/no'])
  for key, said in (('mesh.icy.data', "'ici'"), ('training_steps.x', "'x'")):
    with pytest.raises(errors.UsageError, match=said):
      jaxline.load(run, {key: 1})


# Where a class is looked for.


@pytest.fixture
def places(tmp_path, monkeypatch):
  """An installed package `shown` without the module `shown.mine.own`."""
  installed = tmp_path / 'lib' / 'site-packages'
  (installed / 'shown' / 'other').mkdir(parents=True)
  for package in ('shown', 'shown/other'):
    (installed / package / '__init__.py').touch()
  monkeypatch.setattr(sys, 'path', [*sys.path, str(installed)])
  yield tmp_path
  for name in [x for x in sys.modules if x.split('.')[0] == 'shown']:
    del sys.modules[name]


def add(folder):
  """Puts `shown/mine/own.py` into a folder."""
  path = folder / 'shown' / 'mine' / 'own.py'
  path.parent.mkdir(parents=True)
  for package in (path.parent, path.parent.parent):
    (package / '__init__.py').touch()
  path.write_text(f'class Mine:\n  place = {str(folder)!r}\n')
  return str(folder)


def place():
  config = config_dict.ConfigDict({'experiment_class': 'shown.mine.own:Mine'})
  return experiment.resolve_experiment_class(config).place


# Folders with the module, the working directory, where it is found: the nearest
# folder, after that of the program, if not everybody may write there.
@pytest.mark.parametrize(
  ('having', 'cwd', 'found'),
  [
    (['a'], 'a', 'a'),
    (['a'], 'a/scripts', 'a'),
    (['a'], 'a/docs/notebooks', 'a'),
    (['a', 'a/b'], 'a/b/c', 'a/b'),
    (['program', 'a'], 'a', 'program'),
    (['sticky'], 'sticky/b', None),
  ],
)
@pytest.mark.parametrize('is_imported', [False, True])
def test_where_a_class_is_found(
  having, cwd, found, is_imported, places, monkeypatch
):
  (places / cwd).mkdir(parents=True)
  for folder in having:
    add(places / folder)
  monkeypatch.chdir(places / cwd)
  if 'program' in having:
    monkeypatch.syspath_prepend(places / 'program')
  elif is_imported:
    importlib.import_module('shown.other')  # The installed package.
  if 'sticky' in having:
    (places / 'sticky').chmod(0o1777)
  if found is None:
    with pytest.raises(errors.UsageError, match=r'shown\.mine'):
      place()
    return
  assert place() == str(places / found)
  before = list(sys.path)
  assert place() == str(places / found)
  assert sys.path == before


def test_a_missing_dependency_is_no_wrong_name(places, monkeypatch):
  folder = pathlib.Path(add(places / 'a'))
  (folder / 'shown' / 'mine' / 'own.py').write_text('import nothing_like_it')
  monkeypatch.chdir(folder)
  with pytest.raises(ModuleNotFoundError, match='nothing_like_it') as e:
    place()
  assert not isinstance(e.value, errors.UsageError)
