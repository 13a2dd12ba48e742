"""The user's own code: which class trains, and the record of its files."""

import json
import pathlib
import re
import stat
import sys
import types
import zipfile

import pytest

import jaxline
from jaxline import errors
from jaxline import platform
from jaxline.checkpoint import inspection
from jaxline.run_directory import sources
from jaxline.run_directory import store
from tests import checkpoints
from tests import processes
from tests import remains

ROOT = processes.ROOT
MINIMAL = (ROOT / 'examples/minimal.py').read_text()


def files_of(run, step):
  """Returns name -> text of the code of a checkpoint, as a user sees it."""
  name = remains.record(run, step)['code']['files']
  file = run / f'checkpoints/code/{name}.zip'
  assert stat.S_IMODE(file.stat().st_mode) == 0o600
  with zipfile.ZipFile(file) as archive:
    return {x: archive.read(x).decode() for x in archive.namelist()}


@pytest.mark.process
def test_a_copy_of_the_example_trains_and_its_code_is_kept(
  tmp_path, monkeypatch, capsys
):
  for i in 'ab':
    (tmp_path / f'{i}.txt').write_text('text ' * 200)
  own, run = tmp_path / 'own', tmp_path / 'run'
  own.mkdir()
  (own / 'helper.py').write_text('RATE = 0.0')
  (own / 'huge.py').write_text(f'# {"x" * 2**20}')
  code = f'from own import helper, huge\n{MINIMAL}'
  code = code.replace('adam(self.config.learning_rate)', 'adam(helper.RATE)')
  (own / 'yours.py').write_text(code)

  def train(steps, cwd):
    done = processes.run(
      *(ROOT / 'experiment.py', f'--config={own}/yours.py'),
      f'--config.checkpoint_dir={run}',
      f'--config.training_steps={steps}',
      '--config.log_train_data_interval=1',
      '--config.save_checkpoint_interval=2',
      f'--config.experiment_kwargs.config.files={tmp_path}/*.txt',
      '--config.experiment_kwargs.config.length=16',
      cwd=cwd,
      PYTHONPATH=f'{ROOT}:{tmp_path}',
    )
    assert done.returncode == 0, done.stderr
    return done.stderr

  assert 'own/huge.py' in train(2, tmp_path)
  (own / 'helper.py').write_text('RATE = 0.1')
  (changed,) = [x for x in train(4, ROOT).splitlines() if 'since step 2' in x]
  assert 'own/helper.py' in changed
  assert 'yours' not in changed
  rows = map(json.loads, (run / 'train/metrics.jsonl').read_text().splitlines())
  before, _, *after = [x['loss'] for x in rows if 'loss' in x]
  assert before == pytest.approx(5.549, abs=1e-3)  # All bytes equally likely.
  assert after[-1] < before - 0.1
  first, last = files_of(run, 2), files_of(run, 4)
  assert first['own/helper.py'] == 'RATE = 0.0'
  assert last['own/helper.py'] == 'RATE = 0.1'
  assert first['own/yours.py'] == last['own/yours.py'] == code
  assert first['own/huge.py'] == ''
  assert not [x for x in first if x.startswith(('jax/', 'numpy/'))]
  assert inspection.main(['show', f'{run}:2']) == 0
  shown = re.search(r'python -m zipfile -e (\S+)', capsys.readouterr().out)
  assert zipfile.is_zipfile(shown[1])
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  assert type(jaxline.load(run)).__module__ == 'own.yours'


CONFIG = """
from jaxline import base_config
class Own: pass
def get_config():
  config = base_config.get_base_config()
  config.experiment_class = {}
  return config
"""


# The working directory and the file; the name of its module.
@pytest.mark.parametrize(
  ('cwd', 'file', 'module'),
  [
    ('.', 'a/b/ours.py', 'a.b.ours'),
    ('a', '../b/ours.py', 'ours'),
    ('.', 'my-runs/ours.py', 'ours'),
    ('.', 'my-run.py', None),
  ],
)
def test_a_config_names_the_class_of_its_own_file(
  cwd, file, module, tmp_path, monkeypatch
):
  (tmp_path / cwd).mkdir(exist_ok=True)
  monkeypatch.chdir(tmp_path / cwd)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  place = pathlib.Path(file)
  place.parent.mkdir(parents=True, exist_ok=True)
  place.write_text(CONFIG.format("f'{__name__}:Own'"))
  monkeypatch.setattr(sys, 'modules', dict(sys.modules))
  config = platform.load_config([f'--config={file}'])
  if module is None:
    with pytest.raises(errors.UsageError, match='experiment_class'):
      platform.resolve_experiment_class(config)
    return
  assert config.experiment_class == f'{module}:Own'
  found = platform.resolve_experiment_class(config)
  assert place.samefile(sys.modules[found.__module__].__file__)


def test_another_module_of_the_same_name_is_refused(tmp_path, monkeypatch):
  for place in ('program', 'here'):
    (tmp_path / place / 'own').mkdir(parents=True)
    file = tmp_path / place / 'own/ours.py'
    file.write_text(CONFIG.format("f'{__name__}:Own'"))
  monkeypatch.syspath_prepend(tmp_path / 'program')
  monkeypatch.chdir(tmp_path / 'here')
  monkeypatch.setattr(sys, 'modules', dict(sys.modules))
  config = platform.load_config(['--config=own/ours.py'])
  with pytest.raises(errors.UsageError, match=r'program/own/ours\.py'):
    platform.resolve_experiment_class(config)


def test_a_copy_that_names_the_class_of_the_original_is_refused(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(sys, 'path', list(sys.path))
  file = tmp_path / 'ours.py'
  file.write_text(CONFIG.format("'examples.minimal:Own'"))
  with pytest.raises(errors.UsageError, match='ours'):
    platform.load_config([f'--config={file}'])
  for named in ('ours:Own', 'examples.minimal:Experiment'):
    file.write_text(CONFIG.format(repr(named)))
    assert platform.load_config([f'--config={file}']).experiment_class == named


def test_the_code_is_recorded_as_it_was_at_the_start(
  tmp_path, monkeypatch, open_run
):
  monkeypatch.chdir(tmp_path)
  file = tmp_path / 'model.py'
  module = types.SimpleNamespace(__file__=str(file))
  monkeypatch.setitem(sys.modules, 'model', module)
  file.write_text('at the start')
  training = open_run()
  for step in (1, 2):
    checkpoints.save(training, checkpoints.weights(), step)
    assert files_of(tmp_path / 'run', step)['model.py'] == 'at the start'
    file.write_text('edited while it ran')


def test_a_record_is_read_as_data(tmp_path, caplog):
  place = store.at(tmp_path / 'checkpoints')
  names = {'bomb': {'a.py': b'0' * 2**25}, 'good': {'../a.py': b'raise'}}
  for name, files in names.items():
    sources.write(place, name, files)
  place.write('code/none.zip', b'PK\x03\x04 no archive')
  assert sources.read(place, 'good') == names['good']
  for name in ('bomb', 'none'):
    assert sources.read(place, name) == {}
    assert name in caplog.messages[-1]
  (tmp_path / 'checkpoints/code/link.zip').symlink_to(tmp_path)
  for name in ('link', '../../x', None, 7):
    assert sources.read(place, name) == {}


def test_a_key_turns_the_record_off(tmp_path, open_run):
  for key in ('record_code', 'record_git_diff'):
    training = open_run(directory=tmp_path / key, **{key: False})
    checkpoints.save(training, checkpoints.weights(), 1)
    training.close()
    code = remains.record(tmp_path / key, 1)['code']
    assert len(code['files']) == 64
    assert not (tmp_path / key / 'checkpoints/code').exists()
