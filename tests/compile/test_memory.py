"""Buffers of a program, from what XLA writes of its memory."""

import dataclasses
import pathlib

import pytest

from jaxline.compile import hlo
from jaxline.compile import memory

HLO = pathlib.Path(__file__).parent / 'hlo'

# libtpu 0.0.52 for v5e:2x2: two layers, w f32[2,28000,28000] replicated, so
# that a chip's 15.75 GiB do not hold it, its gradient and its update. Left out
# are instructions and buffers that say nothing more.
OUT_OF_MEMORY = (
  'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the'
  ' total memory required for HLO temporaries (17.57G) exceeds available HBM'
  ' (15.75G). HLO module: jit_f.\nSee'
  ' https://openxla.org/xla/errors/error_1000 for more details.'
)
ASSIGNMENT = (HLO / 'out_of_memory.txt').read_text()
MODULE = (HLO / 'out_of_memory.hlo').read_text()


def test_the_buffers_of_a_program_that_does_not_fit():
  total, found = memory.buffers(ASSIGNMENT, hlo.parse(MODULE))
  big, half = 'f32[2,28000,28000]', 'f32[1,28000,28000]'
  layer1 = 'jit(f)/transpose(jvp(layer1))/dot_general'
  assert [dataclasses.astuple(b) for b in found[:5]] == [
    (6279168000, big, 'argument', "p['w']"),  # 2 x 28000^2 x 4, and tiles.
    (6279168000, big, 'temporary', 'jit(f)/add_any'),
    (3139584000, half, 'temporary', ''),
    (3139584000, half, 'temporary', layer1),
    (28672000, 'f32[256,28000]', 'argument', 'x'),
  ]
  # Buffers that take turns in the same place count once, and all together they
  # are what the program needs.
  assert total == 6279168000 + 28672000 + 12558385664
  assert 0 <= total - sum(b.bytes for b in found) < 1 << 20
  # Which is what the compiler says.
  assert total / 2**30 == pytest.approx(17.57, rel=0.01)


def test_errors_of_too_little_memory():
  of_vmem = 'RESOURCE_EXHAUSTED: Ran out of scoped memory in vmem.'
  of_others = 'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.'
  for error, expected in (OUT_OF_MEMORY, 1), (of_others, 1), (of_vmem, 0):
    assert memory.is_out_of_memory(RuntimeError(error)) == expected, error
