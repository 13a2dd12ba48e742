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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A way to train.

  Attributes:
    devices: how many of the eight.
    sharding: the preset.
    ici: sizes of the mesh within a slice.
    dcn: sizes across fake slices.
    accumulation: parts that a batch is cut into.
    model: changes to the model.
    packing: what a row is; both kinds have weights of 0 in other places.
    pieces: into how many pieces the preset cuts, along weights' `embed`, the
      heads and the hidden width, and the layers.
    like: the case on one device that it is compared with; None is that of its
      packing.
  """

  devices: int = 8
  sharding: str
  ici: dict = dataclasses.field(default_factory=dict)
  dcn: dict = dataclasses.field(default_factory=dict)
  accumulation: int = 1
  model: dict = dataclasses.field(default_factory=dict)
  packing: str = 'packed'
  pieces: tuple[int, int, int] = (1, 1, 1)
  like: str | None = None


def alone(packing, **more):
  return Case(devices=1, sharding='ddp', packing=packing, **more)


EXPERTS = {
  'num_experts': 8,
  'experts_per_token': 2,
  'mlp_dim': 16,
  'feed_forward': 'swiglu',
  'router_balance_loss': 0.01,
  'router_z_loss': 0.001,
  'router_bias_rate': 0.01,
}
CAPACITY = EXPERTS | {'expert_capacity': 1.0, 'shared_dim': 16}


def pipelined(stages, microbatches, repeats=1):
  return {
    'pipeline_stages': stages,
    'pipeline_microbatches': microbatches,
    'pipeline_repeats': repeats,
  }


# Each case restores what the one before it has saved, of those that are
# compared with the same one.
CASES = {
  'packed': alone('packed'),
  'padded': alone('padded'),
  'fsdp_over_slices': Case(
    sharding='fsdp',
    ici={'data': 4},
    dcn={'replica': 2},
    model={'remat': 'dots', 'loss_chunks': 2},
    pieces=(4, 1, 1),
  ),
  'fsdp_tp': Case(
    sharding='fsdp_tp',
    ici={'data': 2, 'mdl': 2},
    dcn={'data': 2},
    accumulation=4,
    packing='padded',
    pieces=(4, 2, 1),
  ),
  'sp': Case(
    sharding='sp',
    ici={'data': 2, 'mdl': 4},
    model={'remat': 'full'},
    pieces=(2, 4, 1),
  ),
  'circular_pipeline': Case(
    sharding='pipeline',
    ici={'data': 2, 'mdl': 2},
    dcn={'stage': 2},
    accumulation=2,
    model=pipelined(2, 4, 2),
    packing='padded',
    pieces=(2, 2, 2),
  ),
  'one_device_again': Case(
    devices=1,
    sharding='fsdp_tp',
    accumulation=2,
    model={'scan_layers': False, 'remat': 'full'},
    packing='padded',
  ),
  'experts': alone('packed', model=EXPERTS, like='experts'),
  'capacity': alone('packed', model=CAPACITY, like='capacity'),
  'experts_2x2x2': Case(
    sharding='fsdp_tp',
    ici={'data': 2, 'expert': 2, 'mdl': 2},
    model=EXPERTS,
    pieces=(4, 2, 1),
    like='experts',
  ),
  'capacity_1x4x2': Case(
    sharding='sp',
    ici={'data': 1, 'expert': 4, 'mdl': 2},
    model=CAPACITY,
    pieces=(4, 2, 1),
    like='capacity',
  ),
}


def run(folder):
  """Runs the cases; returns name -> what each saw, with its arrays."""
  last = {}
  written = []
  for name, case in CASES.items():
    like = case.like or case.packing
    about = {'name': name, 'restore': last.get(like, name)}
    written.append(dataclasses.asdict(case) | about)
    last[like] = name
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


def expected_pieces(case):
  """Returns weight -> into how many pieces it is to be cut."""
  embed, tensor, layers = case.pieces
  of_experts, name = {}, 'feed_forward'
  if case.model.get('num_experts'):
    experts = case.ici.get('expert', 1)
    both = max(embed, experts) * tensor
    of_experts = {
      "['layers/experts']['in']": both,
      "['layers/experts']['out']": both,
      "['layers/experts']['router']": embed,
    }
    name = 'experts/shared' if 'shared_dim' in case.model else None
  feed_forward = [f"['layers/{name}']['{x}']" for x in ('in', 'out') if name]
  return {
    **of_experts,
    **dict.fromkeys(feed_forward, embed * tensor * layers),
    **{
      f"['embedding']['{name}']": embed * tensor
      for name in ('tokens', 'bigrams', 'output')
    },
    "['layers/attention']['qkv']": embed * tensor * layers,
    "['layers/attention']['out']": embed * tensor * layers,
    "['layers/attention_norm']['scale']": embed * layers,
    "['layers/feed_forward_norm']['scale']": embed * layers,
    "['final_norm']['scale']": embed,
    "['embedding/norm']['scale']": embed,
  }


def check(seen, case, name):
  """Checks that a case is as that of one device."""
  own, one = seen[name], seen[case.like or case.packing]
  # It is really what it is called.
  assert own['devices'] == case.devices
  for pieces in own['pieces']:  # Of weights, momentum, and weights restored.
    assert pieces == expected_pieces(case)
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
