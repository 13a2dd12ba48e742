"""Experiments of examples/pax, compiled for their chips, against formulas.

Small ones of each kind: layers unrolled and whole weights, layers in a loop and
weights that are split, and convolutions. And all of them against the table of
docs/reference/scale.md, which takes an hour.
"""

import json

import pytest

from benchmarks import scale
from jaxline.aot import report as report_lib

pytestmark = [
  pytest.mark.slow,
  pytest.mark.timeout(1800),  # Of each, a minute or two of a free core.
  # What config flags load a file with.
  pytest.mark.filterwarnings('ignore:the load_module'),
]

CHIPS = 4
FORWARD_AND_BACKWARD = 3


def compiled(name: str) -> tuple[report_lib.Report, report_lib.Program]:
  pytest.importorskip('libtpu')
  made = scale.compile_run(scale.RUNS[name])
  (train,) = made.programs
  assert made.target.num_devices == CHIPS
  assert train.fits
  assert train.measures.unknown_loops == ()
  assert train.measures.unknown_kernels == ()
  assert {t.axes for t in train.measures.traffic} == {('data',)}
  return made, train


def sent(train: report_lib.Program, *kinds: str) -> float:
  """Returns the bytes of a chip's collectives, of all kinds or of some."""
  return sum(
    t.bytes for t in train.measures.traffic if t.kind in kinds or not kinds
  )


@pytest.mark.parametrize('name', scale.RUNS)
def test_every_run_is_as_published(name):
  pytest.importorskip('libtpu')
  path = scale.RESULTS / f'{name}.json'
  published = json.loads(path.read_text())
  made = scale.compile_run(scale.RUNS[name])
  (train,), (expected,) = made.programs, published['programs']
  assert train.fits
  assert made.parameters == published['parameters']
  assert train.model_flops == expected['model_flops']
  # Another compiler does otherwise, but not much.
  flops = expected['measures']['flops']
  assert train.measures.flops == pytest.approx(flops, rel=0.05)
  assert train.peak_bytes == pytest.approx(expected['peak_bytes'], rel=0.2)
  if made.versions != published['versions']:
    return
  # A promise of this repository about itself, with the compiler as published.
  hbm_bytes = expected['measures']['hbm_bytes']
  assert train.measures.hbm_bytes == pytest.approx(hbm_bytes, rel=0.02)
  traffic = sum(t['bytes'] for t in expected['measures']['traffic'])
  assert sent(train) == pytest.approx(traffic, rel=0.02)


def language_model_flops(
  *, layers: int, width: int, hidden: int, vocab: int, rows: int, length: int
) -> int:
  """The products of a step, with heads that are together as wide as layers."""
  weights = layers * (4 * width**2 + 2 * width * hidden) + width * vocab
  # The first half of the queries leaves the second half of the keys out.
  scores = length * length * 3 // 4
  attention = layers * 2 * scores * width
  return FORWARD_AND_BACKWARD * 2 * rows * (length * weights + attention)


def test_layers_in_a_loop_and_split_weights():
  made, train = compiled('C4Spmd22BAdam1xv4_8')
  assert made.parameters == 872_751_104
  assert made.state_bytes * CHIPS == pytest.approx(12 * 872_751_104, rel=1e-3)
  assert train.model_flops == language_model_flops(
    layers=16, width=2048, hidden=8192, vocab=32768, rows=64, length=1024
  )
  # All of a layer but its last product twice; and what is rounded to tiles.
  assert 1.15 < train.measures.flops * CHIPS / train.model_flops < 4 / 3
  # Each weight twice, and its gradient once, in bfloat16; twice so the table of
  # tokens, which has two uses. No activation is sent.
  assert sent(train) < 1.2 * 2 * 3 * 872_751_104


def test_layers_one_by_one_and_whole_weights():
  made, train = compiled('LmCloudTransformerAdamLimitSteps')
  assert made.parameters == 158_723_968
  assert made.state_bytes == pytest.approx(12 * 158_723_968, rel=1e-3)
  assert train.model_flops == language_model_flops(
    layers=10, width=1024, hidden=4096, vocab=32000, rows=64, length=1024
  )
  # Nothing is computed again.
  assert train.measures.flops * CHIPS / train.model_flops == pytest.approx(
    1, abs=0.1
  )
  # The gradients, in float32, and a few sums. That of the table of tokens is
  # added up for each of its two uses.
  assert sent(train) == sent(train, 'all-reduce')
  assert sent(train) == pytest.approx(
    4 * (158_723_968 + 32000 * 1024), rel=1e-3
  )


def test_convolutions():
  made, train = compiled('ResNet50Pjit')
  assert made.parameters == 25_557_032
  statistics = 53_120
  assert made.state_bytes == pytest.approx(
    4 * (2 * 25_557_032 + statistics), rel=1e-3
  )
  # He et al. (2015) count 3.8 G products an image with the strides elsewhere;
  # with these they are 4.09 G, of which those with padding are not counted.
  published = FORWARD_AND_BACKWARD * 2 * 512 * 4.09e9
  assert 0.9 < train.model_flops / published < 1
  # Nothing needs the gradient of the images.
  assert train.measures.flops * CHIPS / train.model_flops == pytest.approx(
    1, abs=0.1
  )
  # The gradients in bfloat16, as they are computed, and sums over the batch.
  assert sent(train) == sent(train, 'all-reduce')
  assert sent(train) == pytest.approx(2 * 25_557_032, rel=0.05)
