"""The runs of docs/reference/scale.md, compiled for their chips again.

It takes an hour. `test_measure` compares the measures with formulas.
"""

import json

import pytest

from benchmarks import scale

pytestmark = [
  pytest.mark.slow,
  pytest.mark.timeout(1800),  # Of each, a minute or two of a free core.
  # What config flags load a file with.
  pytest.mark.filterwarnings('ignore:the load_module'),
]


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
  found = sum(t.bytes for t in train.measures.traffic)
  assert found == pytest.approx(traffic, rel=0.02)
