"""The lower bound on the time of a step, by the peak rates of a chip."""

import dataclasses

from jaxline.base import chips
from jaxline.compile import measure
from jaxline.compile import report

# 100 FLOP/s, 1000 bytes of memory at 50 bytes/s, 20 and 10 bytes/s of network.
CHIP = chips.Chip('v4', ('TPU v4',), 100.0, 1000.0, 50.0, 2, 10.0, 10.0)
TARGET = report.Target(
  name='v4:2x2x1', device_kind='TPU v4', num_slices=2, num_devices=8, chip=CHIP
)
# How many; their bytes, those sent, and those sent to other slices.
GATHER = measure.Traffic('all-gather', ('data',), 3, 80.0, 60.0, 0.0)
REDUCE = measure.Traffic('all-reduce', ('replica', 'data'), 1, 40.0, 70.0, 10.0)
MEASURES = measure.Measures(
  flops=1000.0, hbm_bytes=200.0, traffic=(GATHER, REDUCE),
  unknown_loops=('while.3 (jit(step)/while)',), unknown_kernels=(),
)  # fmt: skip


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
