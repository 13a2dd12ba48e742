"""Tests of the writers against the real packages, without a network."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from jaxline import base_config
from jaxline import platform

from . import run_id


def write(tmp_path, name, steps, then):
  """Writes like a run that trains and evaluates, and calls `then`."""
  config = base_config.get_base_config()
  config.checkpoint_dir = str(tmp_path)
  config.writers = ('jsonl', name)
  config.random_seed = 7
  train = platform.create_writer(config, 'train')
  evaluation = platform.create_writer(config, 'eval')
  with train, evaluation:
    for step in steps:
      train.write_scalars(step, {'loss': 1.0 / step})
    evaluation.write_scalars(steps[-1], {'loss': 0.5})
    train.flush()
    evaluation.flush()
    then()


EXPECTED = {
  'train/loss': [(1, 1.0), (2, 0.5), (4, 0.25)],
  'eval/loss': [(2, 0.5), (4, 0.5)],
}


_WRITE = """
import ast, importlib, os, pathlib, sys
directory, name, steps, then = sys.argv[1:]
importlib.import_module(f'examples.writers.{name}_writer')
from examples.writers import writers_test
then = {'end': lambda: None, 'kill': lambda: os._exit(0)}[then]
writers_test.write(pathlib.Path(directory), name, ast.literal_eval(steps), then)
"""


def run(program, *args):
  """Runs a program to its end, and returns its last line."""
  command = [sys.executable, '-W', 'ignore', '-c', program, *map(str, args)]
  done = subprocess.run(command, capture_output=True, text=True)
  assert not done.returncode, done.stderr
  return (done.stdout.splitlines() or [''])[-1]


def write_twice(tmp_path, name, then='end'):
  """Writes, and goes on as a resumed run does: in another process."""
  run(_WRITE, tmp_path, name, [1, 2], then)
  time.sleep(1)  # W&B names a directory by the second.
  run(_WRITE, tmp_path, name, [4], 'end')


def test_wandb(tmp_path, monkeypatch):
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  pytest.importorskip('wandb', exc_type=ImportError)
  from wandb.proto import wandb_internal_pb2

  write_twice(tmp_path, 'wandb')
  found, ids, seeds = {}, set(), set()
  for path in sorted(tmp_path.glob('wandb/offline-run-*/*.wandb')):
    for data in leveldb_records(path.read_bytes()):
      record = wandb_internal_pb2.Record.FromString(data)
      if record.run.run_id:
        ids.add(record.run.run_id)
      for x in record.run.config.update:
        if x.key == 'random_seed':
          seeds.add(x.value_json)
      row = {
        x.key or '/'.join(x.nested_key): json.loads(x.value_json)
        for x in record.history.item
      }
      for name in row.keys() & EXPECTED.keys():
        found.setdefault(name, []).append((row['step'], row[name]))
  assert found == EXPECTED
  assert ids == {(tmp_path / 'wandb_id').read_text()}
  assert seeds == {'7'}


def test_a_resumed_run_and_a_copy_keep_the_id_and_a_new_run_does_not(tmp_path):
  ids = iter(('first', 'second'))
  of = lambda run: run_id.of(str(tmp_path / run), 'service', lambda: next(ids))
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'service_id').touch()  # As a full disk left it.
  assert [of('a'), of('a')] == ['first'] * 2
  shutil.copytree(tmp_path / 'a', tmp_path / 'copy')
  assert [of('copy'), of('b'), of('b')] == ['first', 'second', 'second']


def leveldb_records(data):
  """Yields the records of a LevelDB log of one block, behind W&B's 7 bytes."""
  at = 7
  while at + 7 <= len(data):
    length = int.from_bytes(data[at + 4 : at + 6], 'little')
    yield data[at + 7 : at + 7 + length]
    at += 7 + length


def test_mlflow(tmp_path):
  pytest.importorskip('mlflow', exc_type=ImportError)
  from mlflow import tracking

  write_twice(tmp_path, 'mlflow')
  client = tracking.MlflowClient(f'sqlite:///{tmp_path}/mlflow.db')
  run = (tmp_path / 'mlflow_id').read_text()
  assert {
    name: [(m.step, m.value) for m in client.get_metric_history(run, name)]
    for name in EXPECTED
  } == EXPECTED
  assert client.get_run(run).data.params['random_seed'] == '7'


_READ_AIM = """
import json, sys, aim
repo = aim.Repo(sys.argv[1])
repo._recreate_index()  # The server does it, too.
found = {}
for run in repo.iter_runs():
  values = found[run.hash] = {'seed': run['config', 'random_seed']}
  for metric in run.metrics():
    name = metric.context['subset'] + '/' + metric.name
    steps, (numbers, *_) = metric.data.numpy()
    values[name] = sorted(zip(steps.tolist(), numbers.tolist()))
print(json.dumps(found))
"""


def test_aim(tmp_path):
  pytest.importorskip('aim', exc_type=ImportError)
  write_twice(tmp_path, 'aim', 'kill')  # Which leaves the run locked.
  run_id = (tmp_path / 'aim_id').read_text()
  expected = {name: [[*x] for x in pairs] for name, pairs in EXPECTED.items()}
  assert json.loads(run(_READ_AIM, tmp_path)) == {
    run_id: {'seed': 7, **expected}
  }
