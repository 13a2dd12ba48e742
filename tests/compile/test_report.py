"""Reports: the bounds they compute, their JSON and their text."""

import dataclasses

import pytest

from jaxline.base import chips
from jaxline.compile import measure
from jaxline.compile import memory
from jaxline.compile import report

# 100 FLOP/s, 1000 bytes of memory at 50 bytes/s, 20 and 10 bytes/s of network.
CHIP = chips.Chip('v4', ('TPU v4',), 100.0, 1000.0, 50.0, 2, 10.0, 10.0)
TARGET = report.Target(
  name='v4:2x2x1', device_kind='TPU v4', num_slices=2, num_devices=8, chip=CHIP
)
# How many; their bytes, those sent, and those sent to other slices.
GATHER = measure.Traffic('all-gather', ('data',), 3, 80.0, 60.0, 0.0)
REDUCE = measure.Traffic('all-reduce', ('replica', 'data'), 1, 40.0, 70.0, 10.0)
PATH = f"state.params['{'layers/' * 20}w']"
BUFFER = memory.Buffer(6 << 30, 'f32[2,28000,28000]', 'argument', PATH)
MEASURES = measure.Measures(
  flops=1000.0, hbm_bytes=200.0, traffic=(GATHER, REDUCE),
  unknown_loops=('while.3 (jit(step)/while)',), unknown_kernels=(),
)  # fmt: skip


REPORT = report.ProgramReport(
  experiment='Experiment',
  target=TARGET,
  mesh={'stage': 1, 'replica': 2, 'data': 4, 'mdl': 1},
  sharding='fsdp',
  batch_rows=32,
  parameters=1_104_619_904,
  state_bytes=480,
  batch_bytes=20,
  programs=(
    report.Program(
      name='train step',
      model_flops=4000.0,
      temp_bytes=300,
      peak_bytes=800,
      fits=True,
      measures=MEASURES,
      roofline=report.roofline(TARGET, MEASURES, 4000.0),
      compile_secs=12.34,
      buffers=(BUFFER,),
    ),
  ),
  notes=('A note.',),
  versions={'jax': '0.10.2'},
)


def test_the_roofline_of_a_step():
  def roofline(**changes):
    measures = dataclasses.replace(MEASURES, **changes)
    return report.roofline(TARGET, measures, model_flops=4000.0)

  assert roofline() == report.Roofline(
    seconds={
      'compute': 1000 / 100,
      'memory': 200 / 50,
      'ICI': (60 + 70 - 10) / 20,
      'DCN': 10 / 10,
    },
    # 4000 of the 8 x 100 FLOP/s there are, in 10 s; in 10 + 4 + 6 + 1 s.
    mfu_bound=4000 / (800 * 10),
    mfu_sum=4000 / (800 * 21),
  )
  assert roofline(flops=1.0).mfu_bound == 4000 / (800 * 6)  # Of ICI.
  assert roofline(flops=0.0, hbm_bytes=0.0, traffic=()).mfu_bound == 0
  target = dataclasses.replace(TARGET, chip=None)
  assert report.roofline(target, MEASURES, model_flops=1.0) is None


def test_the_text_has_the_numbers_and_fits_80_columns():
  text = str(REPORT)
  assert max(map(len, text.splitlines())) <= 80
  for part in (
    '1,104,619,904',
    '480 B of 1000 B (48%)',
    '800 B of 1000 B: fits, 200 B to spare',
    # 8 x 1000 compiled FLOPs for 4000 of the model.
    '8.00 k (2.00 x); 1.00 k per chip',
    '3 over data: 80 B',
    '1 over replica x data: 40 B',
    'compute 10.00 s, memory 4.00 s, ICI 6.00 s, DCN 1.00 s',
    *('50.0%', '23.8%', 'while.3', 'A note.', "layers/layers/w']"),
  ):
    assert part in text, part


@pytest.mark.parametrize(
  ('hbm_bytes', 'expected'),
  [
    (1000.0, '1.46 KiB of 1000 B: DOES NOT FIT, 500 B too much'),
    # Nothing is known of the chip but that the compiler found no room.
    (None, ' 1.46 KiB: DOES NOT FIT\n'),
    # The compiler had less to give.
    (1600.0, '1.46 KiB of 1.56 KiB: DOES NOT FIT\n'),
  ],
)
def test_what_does_not_fit_says_so(hbm_bytes, expected):
  assert REPORT.fits
  train = dataclasses.replace(REPORT.programs[0], peak_bytes=1500, fits=False)
  chip = hbm_bytes and dataclasses.replace(CHIP, hbm_bytes=hbm_bytes)
  target = dataclasses.replace(TARGET, chip=chip)
  made = dataclasses.replace(REPORT, programs=(train,), target=target)
  assert not made.fits
  assert expected in str(made)
  assert 'gradient_accumulation_steps' in str(made)
