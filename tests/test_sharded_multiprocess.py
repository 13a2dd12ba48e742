"""Tests of jaxline.sharded on two real processes of one CPU device each."""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

from experiments import processes
from experiments import regression
import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUM_PROCESSES = 2
TIMEOUT_SECS = 120
SHARDINGS = ('ddp', 'fsdp')


def free_port():
  with socket.socket() as s:
    s.bind(('localhost', 0))
    return s.getsockname()[1]


def run_processes(folder):
  """Runs the program on all processes; returns what each printed."""
  address = f'localhost:{free_port()}'
  env = os.environ | {
    'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}',
    'XLA_FLAGS': '--xla_force_host_platform_device_count=1',
  }
  outputs = [folder / f'process_{i}' for i in range(NUM_PROCESSES)]
  with contextlib.ExitStack() as stack:
    started = []
    for i, output in enumerate(outputs):
      args = [processes.__file__, address, str(NUM_PROCESSES), str(i)]
      # To files, since a pipe that nobody reads can fill up and block.
      process = subprocess.Popen(
        [sys.executable, *args, *SHARDINGS],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stack.enter_context(output.with_suffix('.out').open('wb')),
        stderr=stack.enter_context(output.with_suffix('.err').open('wb')),
      )
      stack.callback(process.wait)
      stack.callback(process.kill)
      started.append(process)
    deadline = time.monotonic() + TIMEOUT_SECS
    # One that fails leaves the others waiting for it.
    while any(p.poll() is None for p in started):
      failed = any(p.poll() for p in started)
      if failed or time.monotonic() > deadline:
        break
      time.sleep(0.1)
    codes = [p.poll() for p in started]
  errors = [
    output.with_suffix('.err').read_text()[-4000:] for output in outputs
  ]
  assert codes == [0] * NUM_PROCESSES, '\n\n'.join(errors)
  return [
    json.loads(output.with_suffix('.out').read_text().splitlines()[-1])
    for output in outputs
  ]


@pytest.fixture(scope='module')
def seen(tmp_path_factory):
  return run_processes(tmp_path_factory.mktemp('processes'))


@pytest.fixture(scope='module')
def alone():
  """The same training by this process, on its two devices."""
  experiment = regression.Regression('train', jax.random.PRNGKey(0))
  rows = regression.train_steps(experiment, processes.STEPS)
  total = sum(map(sum, processes.EVAL_SIZES))
  return {
    'losses': [float(row['loss']) for row in rows],
    'eval': regression.expected_evaluation(experiment.state, [total]),
  }


@pytest.fixture(params=range(len(SHARDINGS)), ids=SHARDINGS)
def case(request, seen):
  """What each process saw with one sharding, and the sharding."""
  return [results[request.param] for results in seen], SHARDINGS[request.param]


def test_processes_agree(case):
  (a, b), _ = case
  assert a == b


def test_training_is_that_of_one_process(case, alone):
  (a, _), sharding = case
  np.testing.assert_allclose(a['losses'], alone['losses'], rtol=2e-5)
  assert a['rows'] == [16.0] * processes.STEPS
  assert a['shards'] == [[4, 4] if sharding == 'fsdp' else [8, 4]]


def test_evaluation_counts_every_example_once(case, alone):
  (a, _), _ = case
  for scalars in a['eval']:
    np.testing.assert_allclose(scalars['loss'], alone['eval'], rtol=2e-5)
    # Three batches in all, though the second process has only two.
    assert scalars['rows'] == sum(map(sum, processes.EVAL_SIZES)) / 3
    # Each global batch has a key of its own, the same on all processes.
    draws = regression.drawn(jax.random.PRNGKey(2), [''], batches=3)
    np.testing.assert_allclose(scalars['draw'], draws[''], rtol=1e-6)
  assert a['programs'] == 1


def test_no_process_waits_for_one_without_data(case):
  (a, _), _ = case
  assert a['empty'].endswith(
    'eval_input gave no batch: the first batches have [4, 0] rows in the'
    ' processes; give each process at least one.'
  )
