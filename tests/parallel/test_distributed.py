"""Tests of jaxline.parallel.distributed: who a process is, and agreements.

`tests/promises/test_hosts.py` and `test_lost_hosts.py` have real processes.
"""

from concurrent import futures
import importlib.util
import random
import re
import signal
import socket
import sys
import threading
import time
import types

import jax
from jax._src.clusters import cloud_tpu_cluster
import pytest

from jaxline import errors
from jaxline.parallel import distributed

HERE = {'coordinator': 'localhost:1234', 'num_processes': 4, 'process_id': 1}
VARIABLES = tuple(distributed.VARIABLES.values())
# What could tell the tests' own process that it is one of several.
NAMES = (
  *(*VARIABLES, 'JAX_LOCAL_DEVICE_IDS', 'JAX_COORDINATOR_PORT'),
  *('JOB_COMPLETION_INDEX', 'OMPI_MCA_orte_hnp_uri', 'SLURM_JOB_ID'),
  'SLURM_STEP_TASKS_PER_NODE',
)
SLURM = {
  'SLURM_JOB_ID': '70000',
  'SLURM_STEP_NODELIST': 'node[07-09]',
  'SLURM_NTASKS': '24',
  'SLURM_PROCID': '9',
  'SLURM_LOCALID': '1',
  'SLURM_STEP_TASKS_PER_NODE': '8(x3)',
}


@pytest.fixture(autouse=True)
def env(monkeypatch):
  """Nothing is known of other processes; returns a function that adds."""
  for name in NAMES:
    monkeypatch.delenv(name, raising=False)

  def add(**variables):
    for name, value in variables.items():
      monkeypatch.setenv(name, value)

  return add


@pytest.fixture
def connected(monkeypatch):
  """Nobody is met; yields what JAX is told."""
  told = {}

  def initialize(coordinator, num_processes, process_id, **more):
    told.update(more, place=(coordinator, num_processes, process_id))

  monkeypatch.setattr(jax.distributed, 'initialize', initialize)
  return told


def test_invalid(env):
  for value, word in (
    ('of', "'of'"),
    ({**HERE, 'num_process': 4}, "Did you mean 'num_processes'"),
    ({**HERE, 'num_processes': 4.0}, "'num_processes': 4.0"),
    ({**HERE, 'process_id': 4}, "'process_id': 4"),
  ):
    with pytest.raises(errors.UsageError, match=re.escape(word)):
      distributed.initialize(value)
  env(JAX_COORDINATOR_ADDRESS='a', JAX_NUM_PROCESSES='4', JAX_PROCESS_ID='2')
  with pytest.raises(errors.UsageError, match='JAX_PROCESS_ID'):
    distributed.initialize('auto')


def test_nothing_is_found_and_nobody_is_asked(monkeypatch, env, connected):
  def refuse(*args, **kwargs):
    raise AssertionError('Somebody was asked.')

  monkeypatch.setattr(socket, 'create_connection', refuse)
  monkeypatch.setattr(socket, 'getaddrinfo', refuse)
  monkeypatch.setattr(cloud_tpu_cluster, 'get_metadata', refuse)
  # A pod that is no process of a job: no warning, no package asked for.
  env(KUBERNETES_SERVICE_HOST='10.0.0.1')
  distributed.initialize('auto')
  # A TPU VM where the CPU is to be used.
  monkeypatch.setattr(cloud_tpu_cluster, 'running_in_cloud_tpu_vm', True)
  monkeypatch.delenv('TPU_SKIP_MDS_QUERY', raising=False)
  distributed.initialize('auto')
  # One process of Slurm meets nobody.
  env(**SLURM | {'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'})
  distributed.initialize('auto')
  assert not connected


GIVEN = dict(zip(VARIABLES, ('n0:12', '4', '2'), strict=True))
BY_SLURM = ('node07:61808', 24, 9)  # JAX's port: 61440 + the job modulo 4096.


@pytest.mark.parametrize(
  ('variables', 'place', 'gpus'),
  [
    # One GPU for each process.
    (SLURM, BY_SLURM, [1]),
    (SLURM | {'JAX_COORDINATOR_ADDRESS': 'other:99'}, ('other:99', 24, 9), [1]),
    # JAX gives it what the variable says.
    (SLURM | {'JAX_LOCAL_DEVICE_IDS': '2,3'}, BY_SLURM, None),
    # One process on each node keeps all of its GPUs.
    (SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1,1(x2)'}, BY_SLURM, None),
    # They say more than the cluster does.
    (SLURM | GIVEN, ('n0:12', 4, 2), None),
  ],
)
def test_what_the_environment_says(env, connected, variables, place, gpus):
  env(**variables)
  distributed.initialize('auto')
  assert connected['place'] == place
  assert connected['local_device_ids'] == gpus


def test_an_indexed_job_needs_the_package(monkeypatch, env):
  monkeypatch.setitem(sys.modules, 'kubernetes', None)
  env(KUBERNETES_SERVICE_HOST='10.0.0.1', JOB_COMPLETION_INDEX='1')
  with pytest.raises(ImportError, match='kubernetes'):
    distributed.initialize('auto')


def test_a_signal_ends_the_wait_for_the_others(monkeypatch):
  """JAX's call hears no signal: it waits outside the main thread."""
  ended, main = threading.Event(), threading.main_thread()

  def initialize(*args, **kwargs):
    assert threading.current_thread() is not main
    signal.pthread_kill(main.ident, signal.SIGINT)
    ended.wait(60)

  monkeypatch.setattr(jax.distributed, 'initialize', initialize)
  with pytest.raises(KeyboardInterrupt):
    distributed.initialize(HERE)
  ended.set()


def test_how_long_to_wait_for_a_process_is_set(env, connected):
  env(JAX_INITIALIZATION_TIMEOUT='20', JAX_HEARTBEAT_TIMEOUT_SECONDS='3')
  module_of(1, 4, None).initialize(HERE)
  assert connected['initialization_timeout'] == 20
  assert connected['heartbeat_timeout_seconds'] == 3


class Store:
  """The key-value store of the coordination service, with random delays."""

  def __init__(self):
    self.values, self.changed = {}, threading.Condition()

  def key_value_set(self, key, value):
    time.sleep(random.random() * 1e-3)
    with self.changed:
      assert key not in self.values
      self.values[key] = value
      self.changed.notify_all()

  def blocking_key_value_get(self, key, timeout_in_ms):
    with self.changed:
      assert self.changed.wait_for(lambda: key in self.values, 20), key
      return self.values[key]

  def key_value_delete(self, key):
    with self.changed:
      for name in [x for x in self.values if x.startswith(key)]:
        del self.values[name]


def module_of(process, processes, client):
  """Returns the module as one of several processes has it."""
  spec = importlib.util.spec_from_file_location('copy', distributed.__file__)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  module.jax = types.SimpleNamespace(
    process_index=lambda: process,
    process_count=lambda: processes,
    distributed=jax.distributed,
  )
  state = types.SimpleNamespace(client=client, num_processes=None)
  module.jax_distributed = types.SimpleNamespace(global_state=state)
  return module


@pytest.mark.parametrize('processes', [1, 2, 4])
def test_processes_agree_on_the_step(processes):
  """Threads are the processes, whose steps take different times."""
  store, met = Store(), threading.Barrier(processes)

  def train(process):
    rng = random.Random(process)
    module, done = module_of(process, processes, store), []
    for loop in range(3):
      agreement, asked = module.Agreement(), set()
      for step in range(1, 60):
        time.sleep(rng.random() * 1e-3 * (process + 1))
        for name in ('save', 'evaluation'):
          if is_wanted := rng.random() < 0.2:
            asked.add(name)
          is_due = agreement.is_due(name, step, is_wanted)
          if is_due:
            done.append((loop, step, name))
            assert process or name in asked
            asked.discard(name)
          assert processes > 1 or is_due == is_wanted
      met.wait(60)
      agreement.close()
    return done

  with futures.ThreadPoolExecutor(processes) as executor:
    done = list(executor.map(train, range(processes)))
  assert all(x == done[0] for x in done)
  # Each is due in each loop, and again.
  assert len({(loop, name) for loop, _, name in done[0]}) == 3 * 2
  assert len(done[0]) > 3 * 2
  # The keys of the last exchange of each loop.
  assert len(store.values) == (processes > 1) * processes * 3


def test_no_error_of_an_agreement_is_lost():
  agreement = module_of(1, 2, types.SimpleNamespace()).Agreement()
  deadline = time.monotonic() + 20
  with pytest.raises(AttributeError, match='key_value_set'):
    while time.monotonic() < deadline:
      agreement.is_due('save', 1, False)
