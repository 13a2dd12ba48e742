"""Tests of the writers against the real packages, without a network."""

import importlib
import json

import pytest

from jaxline import base_config
from jaxline import platform


def write(tmp_path, name, steps):
  """Writes like a run that trains and evaluates."""
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


def load(package, module):
  pytest.importorskip(package, exc_type=ImportError)
  return importlib.import_module(f'.{module}', __package__)


EXPECTED = {
  'train/loss': [(1, 1.0), (2, 0.5), (4, 0.25)],
  'eval/loss': [(2, 0.5), (4, 0.5)],
}


def write_twice(tmp_path, name):
  """Writes, and goes on as a resumed run does."""
  write(tmp_path, name, [1, 2])
  write(tmp_path, name, [4])


def test_wandb(tmp_path, monkeypatch):
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  load('wandb', 'wandb_writer')
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


def leveldb_records(data):
  """Yields the records of a LevelDB log of one block, behind W&B's 7 bytes."""
  at = 7
  while at + 7 <= len(data):
    length = int.from_bytes(data[at + 4 : at + 6], 'little')
    yield data[at + 7 : at + 7 + length]
    at += 7 + length


def test_mlflow(tmp_path):
  load('mlflow', 'mlflow_writer')
  from mlflow import tracking

  write_twice(tmp_path, 'mlflow')
  client = tracking.MlflowClient(f'sqlite:///{tmp_path}/mlflow.db')
  run = (tmp_path / 'mlflow_id').read_text()
  assert {
    name: [(m.step, m.value) for m in client.get_metric_history(run, name)]
    for name in EXPECTED
  } == EXPECTED
  assert client.get_run(run).data.params['random_seed'] == '7'
