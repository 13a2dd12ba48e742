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

pytestmark = pytest.mark.process

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


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """What one process trains, which leaves a checkpoint on the way."""
  folder = tmp_path_factory.mktemp('hosts')
  config, live = hosts.make(folder / 'start', 'ddp', {})
  hosts.train(live)
  hosts.save(config, live)
  seen = {'start': regression.digest(live.state), 'losses': hosts.train(live)}
  seen['eval'] = regression.evaluate(live)
  seen['later'] = hosts.train(live)
  return folder, seen


@pytest.fixture(scope='module')
def four(alone):
  """What each of four processes saw, that went on from the checkpoint."""
  folder, _ = alone
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


@pytest.mark.parametrize('name', MESHES)
def test_one_process_goes_on_from_the_checkpoint_of_four(name, alone, four):
  folder, expected = alone
  config, live = hosts.make(folder / name, 'fsdp', {})
  hosts.restore(config, live)
  assert regression.digest(live.state) == four[0][name]['saved']
  assert int(live.state.step) == 2 * hosts.STEPS
  np.testing.assert_allclose(hosts.train(live), expected['later'], rtol=2e-5)


def test_keys_of_steps_are_by_the_number_of_the_device_among_all(four):
  step_key, _ = jax.random.split(jax.random.PRNGKey(3))
  for i, process in enumerate(four):
    for mode, key in (
      ('same_host_unique_device', step_key),
      ('unique_host_unique_device', jax.random.fold_in(step_key, i)),
    ):
      assert process['keys'][mode] == [jax.random.fold_in(key, i).tolist()]
