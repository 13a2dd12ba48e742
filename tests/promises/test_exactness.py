"""One model, one seed, one batch: the same whatever the mesh and the preset.

The language model of examples/lm is trained in many ways by one process with
eight fake devices (programs/exact.py). Loss and gradients must be those of one
device, and each case goes on from another one's checkpoint.
"""

import dataclasses
import json
import os
import pickle

import numpy as np
import pytest

from tests import processes

PROGRAM = processes.ROOT / 'tests' / 'programs' / 'exact.py'

# By how much results may differ: sums in another order, in float64. Of losses
# relative, of gradients in the norm of each array, relative to its own.
TOLERANCE = 1e-12

QKV, IN = "['layers/attention']['qkv']", "['layers/experts']['in']"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A way to train."""

  like: str = 'dense'  # The case on one device that it is compared with.
  devices: int = 8
  sharding: str = 'ddp'
  # Sizes of the mesh within a slice, and across fake slices.
  ici: dict = dataclasses.field(default_factory=dict)
  dcn: dict = dataclasses.field(default_factory=dict)
  accumulation: int = 1  # Parts that a batch is cut into.
  # Changes to the model.
  model: dict = dataclasses.field(default_factory=dict)
  # Weight -> into how many pieces the preset cuts it.
  pieces: dict = dataclasses.field(default_factory=dict)


EXPERTS = {
  'num_experts': 8,
  'experts_per_token': 2,
  'mlp_dim': 16,
  'feed_forward': 'swiglu',
  'router_balance_loss': 0.01,
  'router_z_loss': 0.001,
  'router_bias_rate': 0.01,
}

# Each case restores what the one before it has saved, of those that are
# compared with the same one.
CASES = {
  'fsdp_over_slices': Case(
    sharding='fsdp', ici={'data': 4}, dcn={'replica': 2},
    model={'remat': 'dots', 'loss_chunks': 2}, pieces={QKV: 4},
  ),
  'fsdp_tp': Case(
    sharding='fsdp_tp', ici={'data': 2, 'mdl': 2}, dcn={'data': 2},
    accumulation=4, pieces={QKV: 8},
  ),
  'sp': Case(
    sharding='sp', ici={'data': 2, 'mdl': 4}, model={'remat': 'full'},
    pieces={QKV: 8},
  ),
  'circular_pipeline': Case(
    sharding='pipeline', ici={'data': 2, 'mdl': 2}, dcn={'stage': 2},
    accumulation=2, pieces={QKV: 8},
    model={'pipeline_stages': 2, 'pipeline_microbatches': 4}
    | {'pipeline_repeats': 2},
  ),
  'dense': Case(devices=1),
  'experts': Case(devices=1, model=EXPERTS, like='experts'),
  'experts_2x2x2': Case(
    sharding='fsdp_tp', ici={'data': 2, 'expert': 2, 'mdl': 2},
    model=EXPERTS, like='experts',
    pieces={QKV: 8, IN: 8, "['layers/experts']['out']": 8}
    | {"['layers/experts']['router']": 4, "['embedding']['bigrams']": 8},
  ),
}  # fmt: skip


def run(folder):
  """Runs the cases; returns name -> what each saw, with its arrays."""
  last, written = {}, []
  for name, case in CASES.items():
    about = {'name': name, 'restore': last.get(case.like, name)}
    written.append(dataclasses.asdict(case) | about)
    last[case.like] = name
  result = processes.run(
    *(PROGRAM, folder, json.dumps(written)),
    timeout=480,
    # Most of the time goes into LLVM, whose optimisations gain nothing here.
    XLA_FLAGS=f'{os.environ["XLA_FLAGS"]} --xla_backend_optimization_level=0'
    ' --xla_force_host_platform_device_count=8',
  )
  assert result.returncode == 0, result.stderr[-6000:]
  seen = pickle.loads((folder / 'seen').read_bytes())
  return {case['name']: case | seen[case['name']] for case in written}


def check(seen, case, name):
  """Checks that a case is as that of one device."""
  own, one = seen[name], seen[case.like]
  # It is really what it is called.
  assert own['devices'] == case.devices
  for found in own['cut']:  # Of weights, momentum, and weights restored.
    assert found | case.pieces == found
  same_bits(own['initial'], one['initial'])
  assert own['grads'].keys() == one['grads'].keys()
  for path, x in one['grads'].items():
    error = np.linalg.norm(own['grads'][path] - x) / np.linalg.norm(x)
    assert error < TOLERANCE, (path, error)
  assert own['grad_norm'] == pytest.approx(one['grad_norm'], rel=TOLERANCE)
  # Restored from another mesh.
  assert own['step'] == 2
  same_bits(own['restored'], seen[own['restore']]['saved'])
  np.testing.assert_allclose(own['losses'], one['losses'], rtol=TOLERANCE)


def same_bits(a, b):
  assert a.keys() == b.keys()
  for path, x in b.items():
    assert a[path].dtype == x.dtype
    np.testing.assert_array_equal(a[path], x, err_msg=path, strict=True)


# One test: of ten, two workers of pytest-xdist would each run all the cases.
@pytest.mark.process
@pytest.mark.timeout(500)
def test_every_way_is_the_same(tmp_path):
  seen, wrong = run(tmp_path), {}
  for name, case in CASES.items():
    try:
      check(seen, case, name)
    except AssertionError as e:
      wrong[name] = str(e)
  assert wrong == {}
