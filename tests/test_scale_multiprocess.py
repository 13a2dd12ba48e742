"""Tests of runs of several real processes, as `jaxline.launch` starts them.

What they compute is what one process computes with the same global batch, on
meshes that lie across them, with checkpoints that another number goes on from.
Faults of two processes are in test_durable_multiprocess.py.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs import lm
from examples.lm import experiment
from jaxline import platform
from jaxline import train
from jaxline.supervision import preemption
from tests import remains
from tests.programs import events
from tests.programs import hosts

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOSTS = ROOT / 'tests' / 'programs' / 'hosts.py'
TIMEOUT_SECS = 160


class Launched:
  """A run of the launcher.

  Attributes:
    process: the launcher itself.
  """

  def __init__(self, log, processes, devices, *command):
    self._log = log
    with log.open('wb') as file:
      self.process = subprocess.Popen(
        [
          *(sys.executable, '-m', 'jaxline.launch'),
          *('--processes', str(processes)),
          *('--devices-per-process', str(devices)),
          *('--', sys.executable, *map(str, command)),
        ],
        cwd=ROOT,
        env=os.environ
        | {
          'PYTHONPATH': f'{ROOT}{os.pathsep}{ROOT / "tests"}',
          # Most of the time would go into LLVM.
          'XLA_FLAGS': '--xla_backend_optimization_level=0',
        },
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
      )

  def lines(self):
    return self._log.read_text(errors='replace').splitlines()

  def wait(self, code=0):
    """Waits for the end, with this exit code; returns what was printed."""
    try:
      ended = self.process.wait(TIMEOUT_SECS)
    finally:
      self.stop()
    assert ended == code, '\n'.join(self.lines()[-60:])
    return self.lines()

  def wait_for_step(self, directory, step):
    """Waits until a step is in the run's log."""
    path = directory / 'train' / 'metrics.jsonl'
    assert events.wait(
      lambda: path.exists() and f'"step": {step},' in path.read_text(),
      lambda: self.process.poll() is not None,
      TIMEOUT_SECS,
    ), '\n'.join(self.lines()[-60:])

  def pid(self, process):
    """Returns the process id of one of the processes."""
    for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
      with contextlib.suppress(OSError):
        parent = (
          (path.parent / 'stat').read_text().rpartition(')')[2].split()[1]
        )
        if int(parent) == self.process.pid and (
          f'JAX_PROCESS_ID={process}\0'.encode() in path.read_bytes()
        ):
          return int(path.parent.name)
    raise AssertionError(f'There is no process {process}.')

  def stop(self):
    # It ends its processes, even if it is killed itself.
    self.process.kill()
    self.process.wait()


# --- Meshes across processes -------------------------------------------------

# Four processes of a device each. Of each: the host that a process is to the
# input, and what a device has of the weights, [8, 4].
MESHES = {
  # Two processes share the weights of a row's heads, and so the rows.
  'rows_in_common': (
    {'sharding': 'fsdp_tp', 'mesh': {'ici': {'data': 2, 'mdl': 2}}},
    [[0, 2], [0, 2], [1, 2], [1, 2]],
    [4, 2],
  ),
  'all_rows_in_common': (
    {'sharding': 'tp', 'mesh': {'ici': {'data': 1, 'mdl': 4}}},
    [[0, 1]] * 4,
    [8, 1],
  ),
  # Each process is a slice.
  'slices': (
    {'sharding': 'fsdp', 'mesh': {'dcn': {'replica': 2, 'data': 2}}},
    [[0, 4], [1, 4], [2, 4], [3, 4]],
    [4, 4],
  ),
}


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """What one process trains, which leaves a checkpoint on the way."""
  folder = tmp_path_factory.mktemp('hosts')
  config, live = hosts.make(folder / 'start', 'ddp', {})
  hosts.train(live)
  hosts.save(config, live)
  seen = {'start': hosts.digest(live.state), 'losses': hosts.train(live)}
  seen['eval'] = hosts.regression.evaluate(live)
  seen['later'] = hosts.train(live)
  return folder, seen


@pytest.fixture(scope='module')
def four(alone):
  """What each of four processes saw, that went on from the checkpoint."""
  folder, _ = alone
  cases = [{'name': name, **case} for name, (case, *_) in MESHES.items()]
  launched = Launched(folder / 'log', 4, 1, HOSTS, folder, json.dumps(cases))
  seen = {}
  for line in launched.wait():
    if found := re.fullmatch(r'\[(\d)\] (\{"process".*\})', line):
      seen[int(found[1])] = json.loads(found[2])
  assert [seen[i]['process'] for i in range(4)] == [0, 1, 2, 3]
  return [seen[i] for i in range(4)]


@pytest.mark.process
@pytest.mark.parametrize('name', MESHES)
def test_four_processes_are_as_one(name, alone, four):
  _, expected = alone
  _, rows, shard = MESHES[name]
  for process, host in zip(four, rows, strict=True):
    own = process[name]
    assert own['restored'] == expected['start']
    np.testing.assert_allclose(own['losses'], expected['losses'], rtol=2e-5)
    assert own['saved'] == four[0][name]['saved']
    assert own['host'] == host
    assert own['shards'] == [shard]
    # 41 examples in batches of 12, each counted once.
    assert own['eval'] == four[0][name]['eval']
    assert own['eval']['loss'] == pytest.approx(
      expected['eval']['loss'], rel=2e-5
    )
    assert own['eval']['rows'] == hosts.EVAL_RECORDS / 4
  slices = [0, 1, 2, 3] if name == 'slices' else [0] * 4
  assert four[0][name]['slices'] == slices


@pytest.mark.process
@pytest.mark.parametrize('name', MESHES)
def test_each_host_has_its_own_rows(name, four):
  _, rows, _ = MESHES[name]
  by_host = {}
  for process, host in zip(four, rows, strict=True):
    records = process[name]['records']
    assert len(records) == hosts.GLOBAL_BATCH // host[1]
    # Processes that are one host read the same.
    assert by_host.setdefault(host[0], records) == records
  together = [record for host in sorted(by_host) for record in by_host[host]]
  with contextlib.closing(
    hosts.Examples(batch_size=hosts.GLOBAL_BATCH, is_training=True)
  ) as source:
    assert together == next(source).record.tolist()


@pytest.mark.process
@pytest.mark.parametrize('name', MESHES)
def test_one_process_goes_on_from_the_checkpoint_of_four(name, alone, four):
  folder, expected = alone
  config, live = hosts.make(folder / name, 'fsdp', {})
  hosts.restore(config, live)
  assert hosts.digest(live.state) == four[0][name]['saved']
  assert int(live.state.step) == 2 * hosts.STEPS
  np.testing.assert_allclose(hosts.train(live), expected['later'], rtol=2e-5)


@pytest.mark.process
@pytest.mark.parametrize('mode', hosts.MODES)
def test_keys_of_each_process(mode, four):
  for process, seen in enumerate(four):
    key, _ = jax.random.split(jax.random.PRNGKey(3))
    if 'unique_host' in mode:
      key = jax.random.fold_in(key, process)
    if 'unique_device' in mode:  # One device each, counted over all.
      key = jax.random.fold_in(key, process)
    assert seen['keys'][mode] == [key.tolist()]


# --- The whole path: launcher, experiment.py, configs/lm.py -------------------

STEPS = 4


def settings(folder):
  """Returns what a run of seconds changes in configs/lm.py."""
  files = folder / 'text'
  files.mkdir(exist_ok=True)
  for i in range(20):
    line = f'for item in items[{i}:]:\n  total = total + item\n'
    (files / f'{i}.txt').write_text(line * (3 + i % 4))
  kwargs = {
    'files': files,
    'cache_dir': folder / 'cache',
    'eval_fraction': 0.2,
    'batch_size': 8,
    'length': 32,
    'eval_batch_size': 8,
    'sample_length': 0,
    'tokenizer': 'bytes',
    'model.vocab_size': 264,
    'model.num_layers': 2,
    'model.embed_dim': 32,
    'model.num_heads': 4,
    'model.mlp_dim': 64,
    'model.max_length': 32,
    'model.scan_layers': True,
  }
  return {
    'training_steps': STEPS,
    'log_tensors_interval': 1,
    'log_train_data_interval': 1,
    'save_checkpoint_interval': 2,
    'eval_interval': 2,
    **{f'experiment_kwargs.config.{k}': v for k, v in kwargs.items()},
  }


def launch_lm(folder, directory, processes, devices, **changes):
  """Starts the command line that a user would."""
  values = settings(folder) | changes | {'checkpoint_dir': directory}
  flags = [f'--config.{key}={value}' for key, value in values.items()]
  return Launched(
    folder / f'{directory.name}_{time.monotonic_ns()}.log',
    processes,
    devices,
    ROOT / 'experiment.py',
    f'--config={ROOT}/configs/lm.py',
    '--jaxline_mode=train_and_eval',
    *flags,
  )


def run_here(folder, directory, **changes):
  """Runs the same in this process, on its two devices."""
  config = lm.get_config()
  values = settings(folder) | changes | {'checkpoint_dir': directory}
  for key, value in values.items():
    *path, name = key.split('.')
    place = config
    for part in path:
      place = place[part]
    is_path = isinstance(value, pathlib.Path)
    place[name] = str(value) if is_path else value
  config = config.copy_and_resolve_references()
  checkpointer = platform.create_checkpointer(config, 'train')
  seen = {'train': {}, 'eval': {}}

  class Recorder:
    def __init__(self, mode):
      self.mode = mode

    def write_scalars(self, global_step, scalars):
      seen[self.mode][int(global_step)] = {
        k: float(v) for k, v in scalars.items() if k in SCALARS
      }

  try:
    train.Run(
      experiment.Experiment,
      config,
      checkpointer,
      Recorder('train'),
      Recorder('eval'),
    ).train_and_eval()
  finally:
    checkpointer.close()
  return seen


SCALARS = ('loss', 'bits_per_byte', 'grad_norm')


def logged(directory):
  """Returns mode -> step -> scalars, of metrics.jsonl."""
  seen = {'train': {}, 'eval': {}}
  for mode, rows in seen.items():
    lines = (directory / mode / 'metrics.jsonl').read_text().splitlines()
    for row in map(json.loads, lines):
      if 'loss' in row:
        assert row['step'] not in rows, 'It was logged twice.'
        rows[row['step']] = {k: row[k] for k in SCALARS if k in row}
  return seen


def assert_close(a, b):
  assert a.keys() == b.keys()
  for mode, rows in b.items():
    assert a[mode].keys() == rows.keys()
    for step, scalars in rows.items():
      assert a[mode][step] == pytest.approx(scalars, rel=1e-4), (mode, step)


@pytest.mark.process
def test_experiment_py_on_two_processes(tmp_path):
  directory = tmp_path / 'two'
  # The heads, the hidden width and the vocabulary lie across processes.
  printed = launch_lm(
    tmp_path, directory, 2, 2,
    **{'mesh.ici.mdl': 4, 'sharding': 'fsdp_tp'},
  ).wait()  # fmt: skip
  assert any('mdl 4' in line for line in printed)
  seen = logged(directory)
  assert list(seen['train']) == list(range(1, STEPS + 1))
  assert list(seen['eval']) == [2, 4]
  assert_close(seen, run_here(tmp_path, tmp_path / 'straight'))


# --- What befalls one of four ------------------------------------------------

LONG = {
  'training_steps': 60,
  'save_checkpoint_interval': 5,
  'eval_interval': 30,
  'mesh.ici.mdl': 2,
  'mesh.dcn.data': 2,
  'mesh.dcn.replica': 2,
  'sharding': 'fsdp_tp',
}


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
  """The scalars of a run of one process from beginning to end."""
  folder = tmp_path_factory.mktemp('long')
  return folder, run_here(
    folder, folder / 'straight', training_steps=60, eval_interval=30,
    save_checkpoint_interval=30,
  )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  ('signum', 'code'),
  [
    (signal.SIGTERM, preemption.EXIT_CODE),
    (signal.SIGKILL, 128 + signal.SIGKILL),
    (signal.SIGSTOP, None),
  ],
  ids=['term', 'kill', 'stop'],
)
def test_a_fault_of_one_of_four(signum, code, undisturbed):
  folder, expected = undisturbed
  directory = folder / signum.name
  changes = LONG | ({'watchdog_secs': 60.0} if code is None else {})
  launched = launch_lm(folder, directory, 4, 2, **changes)
  launched.wait_for_step(directory, 12)
  os.kill(launched.pid(2), signum)
  if code is None:
    # Nothing comes from it any more: the others' watchdogs end them.
    code = launched.process.wait(TIMEOUT_SECS)
    assert code not in (0, 128 + signal.SIGKILL)
  printed = launched.wait(code)
  assert not any('Traceback' in line for line in printed if signum == 15)
  steps = remains.steps(directory)
  assert 10 <= steps[-1] < 60
  if signum == signal.SIGTERM:
    # All agreed upon a step, and saved it.
    saved = re.findall(r'\[(\d)\] .*after step (\d+)', '\n'.join(printed))
    assert {(str(i), str(steps[-1])) for i in range(4)} <= set(saved)
  # Half as many go on, on another mesh.
  launch_lm(
    folder, directory, 2, 2,
    **LONG | {'mesh.ici.mdl': 1, 'mesh.dcn.data': 1, 'sharding': 'fsdp'},
  ).wait()  # fmt: skip
  assert_close(logged(directory), expected)
