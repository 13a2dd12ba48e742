"""The model of weak scaling in benchmarks, without compiling anything."""

import dataclasses
import json
import pathlib

import pytest

from benchmarks import scale
from benchmarks import scaling_model
from jaxline import platform

ROOT = pathlib.Path(__file__).parents[1]


def seconds(terms, efficiency, exposed):
  return [t.products / efficiency + exposed * t.rest for t in terms]


def terms(*pairs):
  return [scaling_model.Terms(*pair, published=0.5) for pair in pairs]


def test_two_runs_give_their_two_constants():
  runs = terms((10, 4), (8, 6))
  found = scaling_model.fit(runs, seconds(runs, 0.8, 0.3))
  assert found.efficiency == pytest.approx(0.8)
  assert found.exposed == pytest.approx(0.3)
  assert found.seconds(runs[0]) == pytest.approx(10 / 0.8 + 0.3 * 4)


def test_seconds_that_no_constant_changes_are_subtracted():
  run = scaling_model.Terms(6, 0, published=0.5, fixed=3)
  found = scaling_model.fit([run, run], [11, 11])
  assert found.efficiency == pytest.approx(0.75)
  assert found.exposed is None
  assert found.seconds(run) == pytest.approx(11)


def test_more_to_wait_for_in_the_same_time_is_hidden():
  found = scaling_model.fit(terms((1, 1), (1, 2)), [2, 2])
  assert found.efficiency == pytest.approx(0.5)
  assert found.exposed == 0


def test_products_are_at_most_as_fast_as_the_peak():
  # Without the bound: e = 2, x = 0.5.
  found = scaling_model.fit(terms((2, 2), (2, 4)), [2, 3])
  assert found.efficiency == 1
  assert 0 < found.exposed < 0.5


@pytest.mark.parametrize(
  ('shape', 'mesh', 'links'),
  [
    ((4, 4, 4), {'data': 16, 'mdl': 4}, {'data': 4, 'mdl': 2}),
    ((8, 8, 16), {'data': 64, 'mdl': 16}, {'data': 4, 'mdl': 2}),
    ((4, 4, 4), {'data': 64}, {'data': 6}),
    # No rings.
    ((2, 4, 4), {'data': 16, 'mdl': 2}, {'data': 2, 'mdl': 1}),
  ],
)
def test_an_axis_has_the_links_of_its_dimensions(shape, mesh, links):
  assert scaling_model.axis_links(shape, mesh) == links


def test_an_axis_that_is_no_product_of_dimensions_is_an_error():
  with pytest.raises(ValueError, match='Choose another topology'):
    scaling_model.axis_links((4, 4, 4), {'data': 8, 'mdl': 8})


@pytest.fixture(scope='module')
def reports():
  return scaling_model.load()


def test_reports_are_of_the_runs(reports):
  compiled = [p for p in scaling_model.POINTS if p.name in reports]
  assert {'16B', '32B', '256B', '512B'} <= {p.name for p in compiled}
  for point in compiled:
    report = reports[point.name]
    assert report['target']['name'] == point.topology
    assert report['target']['num_devices'] == point.chips
    assert report['mesh']['data'] == point.data
    assert report['mesh']['mdl'] == point.mdl
    assert report['batch_rows'] == point.chips * point.rows
    # Without LayerNorm and biases.
    assert report['parameters'] == pytest.approx(point.weights, rel=1e-3)
    step = report['programs'][0]
    # One chip's memory is too small by less than a hundredth for 512B.
    assert step['fits'] == (point.name != '512B')
    assert step['peak_bytes'] < 1.01 * report['target']['chip']['hbm_bytes']
    # What layers compute is known exactly.
    model, here = scaling_model.flops(point)
    assert step['model_flops'] == pytest.approx(model * point.chips, rel=1e-9)
    assert step['measures']['flops'] == pytest.approx(here, rel=0.01)
    # One axis at a time is slower than all links at once.
    cost = scaling_model.costs(report)
    assert cost.network > cost.all_links > 0


# What config flags load a file with.
@pytest.mark.filterwarnings('ignore:the load_module')
def test_the_first_run_is_the_registered_one():
  first, second = (
    platform.load_config(scaling_model.arguments(point))
    for point in scaling_model.POINTS[:2]
  )
  registered = platform.load_config(scale.RUNS[scaling_model.FIRST])
  assert first.to_dict() == registered.to_dict()
  constants = second.experiment_kwargs.config.constants
  assert (constants.NUM_LAYERS, constants.NUM_HEADS) == (40, 64)
  assert (second.mesh.ici.data, second.mesh.ici.mdl) == (16, 4)
  assert second.topology == 'v4:4x4x4'


def test_sizes_are_those_of_the_names():
  # A parameter, a token: 6 FLOPs, and attention.
  for point in scaling_model.POINTS:
    billions = int(point.name.removesuffix('B'))
    assert point.weights / 1e9 == pytest.approx(billions, rel=0.04)
    tokens = 1024 * point.rows
    model, _ = scaling_model.flops(point)
    assert 1 < model / (6 * point.weights * tokens) < 1.03


def test_a_run_is_derived_from_its_layers(reports):
  found = scaling_model.costs(reports['256B'])
  (point,) = (p for p in scaling_model.POINTS if p.name == '256B')
  made = scaling_model.derive(point, reports)
  assert made.ideal == pytest.approx(found.ideal, rel=1e-3)
  assert made.compute == pytest.approx(found.compute, rel=0.01)
  assert made.memory == pytest.approx(found.memory, rel=0.15)
  assert made.data == pytest.approx(found.data, rel=0.15)
  # The compiler sends more over a longer axis.
  assert made.mdl == pytest.approx(found.mdl, rel=0.25)
  # Twice the layers cost twice as much, but for the table of tokens.
  twice = dataclasses.replace(point, layers=2 * point.layers)
  double = scaling_model.derive(twice, reports)
  for name in ('compute', 'memory', 'data', 'mdl'):
    cost = getattr(found, name)
    assert getattr(double, name) == pytest.approx(2 * cost, rel=0.01)


@pytest.mark.parametrize(
  ('data', 'topology', 'times'),
  # Pieces of 128 and 64: gradients, and then weights too, are all-reduced.
  [(128, 'v4:8x8x16', 4), (256, 'v4:8x16x16', 6)],
)
def test_narrow_pieces_send_more(reports, data, topology, times):
  (point,) = (p for p in scaling_model.POINTS if p.name == '256B')
  found = scaling_model.costs(reports['256B'])
  other = dataclasses.replace(point, data=data, topology=topology)
  expected = found.data * times / 3 * (1 - 1 / data) / (1 - 1 / 64)
  made = scaling_model.derive(other, reports)
  assert made.data == pytest.approx(expected)


def test_first_runs_are_fitted_and_the_others_predicted(reports):
  of = scaling_model.all_costs(reports)
  found = scaling_model.predict(of)
  assert 0 < found.constants.efficiency <= 1
  # Both are published as 42%.
  assert found.mfu[:2] == pytest.approx([0.42, 0.42], abs=0.002)
  published = [0.485, 0.53, 0.49, 0.535]
  errors = [
    abs(mfu - p) for mfu, p in zip(found.mfu[2:], published, strict=True)
  ]
  assert found.error == pytest.approx(sum(errors) / 4)


def test_page_and_plot_are_those_of_the_reports(reports):
  of = scaling_model.all_costs(reports)
  page = (ROOT / 'docs/reference/scale.md').read_text()
  assert scaling_model.costs_table(reports) in page
  assert scaling_model.predictions_table(of) in page
  assert scaling_model.variants_table(of) in page
  assert scaling_model.check_table(reports) in page
  curves = json.dumps(scaling_model.curves(of))
  assert curves in scaling_model.PLOT.read_text()
