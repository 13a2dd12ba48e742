"""Tests of `python -m jaxline.checkpoint`, on checkpoints as runs save them."""

import json
import math
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxline.checkpoint import contents
from jaxline.checkpoint import inspection
from tests import checkpoints as lib
from tests import processes

W = np.float32([[1, 2], [3, 4]])


def record(step, kind='scalars', **values):
  return json.dumps({'step': step, 'time': 1.0, 'kind': kind, **values})


LOGS = {
  'train': [
    *(record(2, loss=0.5), record(2, zeta=1), record(3, loss=0)),
    *(record(4, 'texts', loss='no scalar'), '{"step": 4, "ti'),
  ],
  'eval': [record(4, loss='NaN')],
}


@pytest.fixture
def run(open_run, tmp_path):
  """A run with latest 2, 4 and best 2, whose arrays are below `state`."""
  params = {'w': jnp.asarray(W), 'file': jnp.ones([3], jnp.bfloat16)}
  state = {'params': params, 'n': jnp.int32(7)}
  note = {'text': 'hello', 'of': (1, math.inf)}
  live = lib.PerDevice({'state': state}, {'note': note})
  checkpointer, run = open_run(), tmp_path / 'run'
  lib.save(checkpointer, live, 2, 4)
  lib.save_best(checkpointer, live, 2, 0.25)
  for mode, lines in LOGS.items():
    (run / mode).mkdir()
    (run / mode / 'metrics.jsonl').write_text('\n'.join(lines))
  return run


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


def test_show_tells_arrays_and_values(call, run):
  status, out, err = call('show', f'{run}:2')
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


def test_places(run, open_run, tmp_path, monkeypatch):
  for where in ('', '/', '/checkpoints', '/checkpoints/latest:4', ':4'):
    found = inspection.find(f'{run}{where}')
    assert found.name == f'{run}/checkpoints/latest/4'
  best = run / 'checkpoints' / 'best'
  for where in (best, f'{best}:2', f'{best}/'):
    assert inspection.find(where).name == f'{best}/2'
  monkeypatch.chdir(run)
  assert inspection.find('.').record['step'] == 4
  # A run whose directory is named like a part of one.
  for other in (tmp_path / 'checkpoints', tmp_path / 'checkpoints' / 'one'):
    lib.save(open_run(directory=other), lib.weights(), 7)
    for where in (other, other / 'checkpoints' / 'latest'):
      found = inspection.find(where)
      assert found.name == f'{other}/checkpoints/latest/7'


def test_the_average_counts_after_the_first_step(open_run):
  state = {
    'params': {'w': jnp.ones(1)},
    'model_state': {'ema': {'w': jnp.ones(1)}},
  }
  checkpointer = open_run()
  lib.save(checkpointer, lib.PerDevice({'state': state}, {}), 0, 1)
  for step, weights in (0, contents.PARAMS), (1, contents.AVERAGED):
    found = inspection.find(f'{checkpointer.directory.run}:{step}')
    assert found.weights() == weights


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
  assert sorted(os.listdir(tmp_path)) == ['run', out.name]
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
def test_errors_are_one_line(call, run, tmp_path, argv, message):
  argv = [x.replace('{run}', f'{run}') for x in argv]
  status, out, err = call(*(x.replace('{tmp}', f'{tmp_path}') for x in argv))
  assert (status, out) == (2, '')
  assert message in err
  assert err.count('\n') == 1


@pytest.mark.process
def test_the_program(run):
  # Not asked for: the program itself keeps away from accelerators.
  argv = '-m', 'jaxline.checkpoint', 'verify', run
  out = processes.run(*argv, JAX_PLATFORMS='cuda')
  assert (out.returncode, out.stderr) == (0, '')
  assert out.stdout.startswith('latest/2  ok\n')
