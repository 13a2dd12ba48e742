"""Tests of `python -m jaxline.checkpoint`, on checkpoints as runs save them."""

import json
import math
import os
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxline.checkpoint import durable
from jaxline.checkpoint import inspection
from tests import checkpoints as lib
from tests import processes

W = np.float32([[1, 2], [3, 4]])


def experiment(w=W):
  """Holds arrays below `state`, and what it is told to besides."""
  params = {'w': jnp.asarray(w), 'file': jnp.ones([3], jnp.bfloat16)}
  note = {'text': 'hello', 'of': (1, math.inf)}
  state = {'params': params, 'n': jnp.int32(7)}
  return lib.PerDevice({'state': state}, {'note': note})


def save(directory, *steps, live=None, **more):
  """Saves checkpoints as a run does, and returns its directory."""
  config = lib.make_config(directory)
  checkpointer = durable.DurableCheckpointer(config, 'train')
  lib.save(checkpointer, live or experiment(), *steps, **more)
  checkpointer.close()
  return directory


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A run with latest 2, 4 and best 2; only to be read."""
  run = save(tmp_path_factory.mktemp('runs') / 'a', 2, 4)
  best = {'best_eval_metric_value': 0.25, 'best_model_eval_metric': 'loss'}
  save(run, 2, series='best', **best)
  for mode, step, name, value in (
    ('train', 2, 'loss', 0.5), ('train', 2, 'zeta', 1), ('train', 3, 'loss', 0),
    ('eval', 4, 'loss', 'NaN'),
  ):  # fmt: skip
    (run / mode).mkdir(exist_ok=True)
    line = {'step': step, 'time': 1.0, 'kind': 'scalars', name: value}
    with (run / mode / 'metrics.jsonl').open('a') as log:
      log.write(json.dumps(line) + '\n')
  text = {'step': 4, 'time': 1.0, 'kind': 'texts', 'loss': 'no scalar'}
  with (run / 'train' / 'metrics.jsonl').open('a') as log:
    log.write(json.dumps(text) + '\n{"step": 4, "ti')
  return run


@pytest.fixture
def run(saved, tmp_path):
  """A copy of `saved` that a test may change."""
  return shutil.copytree(saved, tmp_path / 'a')


@pytest.fixture
def call(capsys):
  """Calls main; returns exit status, stdout, stderr."""

  def call(*argv):
    status = inspection.main([os.fspath(arg) for arg in argv])
    out = capsys.readouterr()
    return status, out.out, out.err

  return call


def test_ls_lists_series_steps_and_metrics(call, run):
  status, out, err = call('ls', run)
  assert (status, err) == (0, '')
  rows = [line.split() for line in out.splitlines()]
  rows = rows[[row[:2] for row in rows].index(['series', 'step']) + 1 :]
  assert [' '.join(row[:2] + row[6:]) for row in rows] == [
    'latest 2 train/loss 0.5, train/zeta 1',
    'latest 4 eval/loss NaN',
    'best 2 best/loss 0.25, train/loss 0.5, train/zeta 1',
  ]
  (row,) = inspection.list_run(run / 'checkpoints' / 'best')
  manifest = json.loads(lib.manifest_of(run, 2, 'best').read_text())
  assert (row['time'], row['problem']) == (manifest['time'], None)
  parts = lib.data_of(run, 2, 'best').glob('*/c*')
  assert row['bytes'] == sum(p.stat().st_size for p in parts)


def test_show_tells_arrays_and_values(call, saved):
  status, out, err = call('show', f'{saved}:2')
  assert (status, err) == (0, '')
  rows = [line.split() for line in out.splitlines()]
  for row in (
    'step 2',
    'parameters 7 below state/params',
    'run/global_step 2',
    'state/params/w float32[2, 2] 16 B',
    'state/params/file bfloat16[3] 6 B',
    'state/n int32[] 4 B',
    'size 42 B',
  ):
    assert row.split() in rows, out
  assert 'hello' in out


def test_places(saved, tmp_path, monkeypatch):
  for where in ('', '/', '/checkpoints', '/checkpoints/latest:4', ':4'):
    found = inspection.find(f'{saved}{where}')
    assert found.name == f'{saved}/checkpoints/latest/4'
  best = saved / 'checkpoints' / 'best'
  for where in (best, f'{best}:2', f'{best}/'):
    assert inspection.find(where).name == f'{best}/2'
  monkeypatch.chdir(saved)
  assert inspection.find('.').record['step'] == 4
  # A run whose directory is named like a part of one.
  for run in (tmp_path / 'checkpoints', tmp_path / 'checkpoints' / 'one'):
    save(run, 7)
    for where in (run, run / 'checkpoints' / 'latest'):
      found = inspection.find(where)
      assert found.name == f'{run}/checkpoints/latest/7'


def test_verify_names_the_damaged_part_and_changes_nothing(call, run):
  path = lib.part_of(run, 'state/params/w', 4)
  lib.flip(path)
  other = lib.part_of(run, 'state/n', 4)
  other.unlink()
  before = lib.tree_of(run)
  status, out, _ = call('verify', run)
  assert status == 1
  lines = out.splitlines()
  verdicts = [line.split()[1] for line in lines[:3]]
  assert verdicts == ['ok', 'DAMAGED:', 'ok']
  assert f'{path.parent.name}/{path.name} does not match' in lines[1]
  assert f'{other.parent.name}/{other.name} is missing' in lines[1]
  assert lib.tree_of(run) == before
  assert call('verify', f'{run}:2')[0] == 0


def test_export_verifies_what_it_reads(call, run, tmp_path):
  out = tmp_path / 'w.safetensors'
  status, text, _ = call('export', run, out)
  assert status == 0
  assert text.startswith('2 arrays, ')
  want = {'w': W, 'file': np.ones(3, ml_dtypes.bfloat16)}
  lib.assert_same(safetensors.numpy.load_file(out), want)
  assert sorted(os.listdir(tmp_path)) == ['a', out.name]
  lib.flip(lib.part_of(run, 'state/params/w', 4))
  status, _, err = call('export', run, other := tmp_path / 'other.safetensors')
  assert status == 2
  assert 'state.params.w' in err
  assert not other.exists()
  # What is damaged is not asked for here.
  assert set(inspection.find(run).arrays('state/n')) == {'state/n'}
  with pytest.raises(ValueError, match="matches 'w'"):
    inspection.find(run).arrays('w')


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    (['ls', '{tmp}'], 'is not the directory of a run'),
    (['ls', 'ftp://b/r'], 'gs://BUCKET/PATH'),
    (['show', '{run}:3'], "has no step 3. It has the steps {'latest': [2, 4]"),
    (['verify', '{run}/checkpoints/best:4'], 'has no step 4'),
    (['export', '{run}', '{tmp}/none/w.safetensors'], 'No such file'),
    (['export', '{run}', '{run}/train/metrics.jsonl'], 'already exists'),
  ],
)
def test_errors_are_one_line(call, saved, tmp_path, argv, message):
  argv = [x.replace('{run}', f'{saved}') for x in argv]
  status, out, err = call(*(x.replace('{tmp}', f'{tmp_path}') for x in argv))
  assert (status, out) == (2, '')
  assert message in err
  assert err.count('\n') == 1


@pytest.mark.process
def test_the_program(saved):
  # Not asked for: the program itself keeps away from accelerators.
  argv = '-m', 'jaxline.checkpoint', 'verify', saved
  out = processes.run(*argv, JAX_PLATFORMS='cuda')
  assert (out.returncode, out.stderr) == (0, '')
  assert out.stdout.startswith('latest/2  ok\n')
