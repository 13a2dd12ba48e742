"""Several processes compute what one does, and go on where another number was.

Meshes that lie across processes, as `jaxline.launch` starts them; the keys of
their devices; who reads what. Faults of several processes are in
test_lost_hosts.py, and golden/runs.py has the language model.
"""

import json
import os
import re
import sys

import jax
import numpy as np
import pytest

from tests import processes
from tests.experiments import regression
from tests.programs import hosts

HOSTS = processes.ROOT / 'tests' / 'programs' / 'hosts.py'


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


def run_four(folder):
  """Returns what each of four processes saw, from a checkpoint in a folder."""
  cases = [{'name': name, **case} for name, (case, *_) in MESHES.items()]
  done = processes.run(
    *('-m', 'jaxline.launch', '--processes=4', '--devices-per-process=1', '--'),
    *(sys.executable, HOSTS, folder, json.dumps(cases)),
    timeout=160,
    # Most of the time would go into LLVM.
    XLA_FLAGS=f'{os.environ["XLA_FLAGS"]} --xla_backend_optimization_level=0',
  )
  assert done.returncode == 0, done.stderr[-9000:]
  found = re.findall(r'^\[(\d)\] (\{".*\})$', done.stdout, re.M)
  seen = {int(process): json.loads(line) for process, line in found}
  assert [seen[i]['process'] for i in range(4)] == [0, 1, 2, 3]
  return [seen[i] for i in range(4)]


# One test: two workers of pytest-xdist would each start the processes.
@pytest.mark.process
def test_four_processes_are_as_one(tmp_path):
  config, one = hosts.make(tmp_path / 'start', 'ddp', {})
  hosts.train(one)
  hosts.save(config, one)
  start, losses = regression.digest(one.state), hosts.train(one)
  evaluated, later = regression.evaluate(one), hosts.train(one)
  four = run_four(tmp_path)
  for name, (_, rows, shard) in MESHES.items():
    first = four[0][name]
    assert first['slices'] == ([*range(4)] if name == 'slices' else [0] * 4)
    for process, host in zip(four, rows, strict=True):
      own = process[name]
      assert own['restored'] == start
      np.testing.assert_allclose(own['losses'], losses, rtol=2e-5)
      assert own['saved'] == first['saved']
      assert own['host'] == host
      assert own['shards'] == [shard]
      # 41 examples in batches of 12, each counted once.
      assert own['eval'] == first['eval']
      assert own['eval']['loss'] == pytest.approx(evaluated['loss'], rel=2e-5)
      assert own['eval']['rows'] == hosts.EVAL_RECORDS / 4
    config, one = hosts.make(tmp_path / name, 'fsdp', {})
    hosts.restore(config, one)
    assert regression.digest(one.state) == first['saved']
    assert int(one.state.step) == 2 * hosts.STEPS
    np.testing.assert_allclose(hosts.train(one), later, rtol=2e-5)

  # The keys of steps are by the number of the device among all.
  step_key, _ = jax.random.split(jax.random.PRNGKey(3))
  for i, process in enumerate(four):
    for mode, key in (
      ('same_host_unique_device', step_key),
      ('unique_host_unique_device', jax.random.fold_in(step_key, i)),
    ):
      assert process['keys'][mode] == [jax.random.fold_in(key, i).tolist()]
