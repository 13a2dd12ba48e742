"""Tests of `python -m jaxline.runs sweep` and of `jaxline.sweep`."""

import math
import pathlib
import re

import pytest

import jaxline
from jaxline import errors
from jaxline.runs import __main__ as cli
from jaxline.runs import sweep
from tests import processes
from tests import toys
from tests.experiments import regression
from tests.programs import toy


def test_points_of_a_grid_and_draws():
  grid = {'a': [1, 2], 'b': ['x', 'y']}
  expected = [(1, 'x'), (1, 'y'), (2, 'x'), (2, 'y')]
  assert [(p['a'], p['b']) for p in sweep.points(grid)] == expected
  axes = {'r': 'log:1e-4:1e-2', 'd': 'uniform:-1:1', 'n': 'int:1:3'}
  axes |= {'a': [5, 6]}
  drawn = sweep.points(axes, 300)
  assert drawn[:9] == sweep.points(axes, 9)
  columns = {key: [point[key] for point in drawn] for key in axes}
  # Half of them are below the middle, for the rate that of the logarithms.
  for key, low, middle, high in (('r', 1e-4, 1e-3, 1e-2), ('d', -1, 0, 1)):
    assert low <= min(columns[key]) <= max(columns[key]) <= high
    below = sum(x < middle for x in columns[key])
    assert abs(below - 150) < 4 * math.sqrt(300) / 2
  assert ({*columns['n']}, {*columns['a']}) == ({1, 2, 3}, {5, 6})
  for axes, draws, said in (
    ({}, None, 'expected at least one key'),
    ({'a': 'log:1:2'}, None, 'log:1:2'),
    ({'a': 'log:0:1'}, 3, 'log:0:1'),
    ({'a': 'uniform:x:1'}, 3, 'uniform:x:1'),
    ({'a': [1]}, 0, 'draws is 0'),
  ):
    with pytest.raises(errors.UsageError, match=said):
      sweep.points(axes, draws)


class Diverges(regression.Regression):
  """Its loss is not finite with one seed."""

  def loss_fn(self, *args):
    loss, scalars, state = super().loss_fn(*args)
    bad = self.run_config.random_seed == 2
    return loss * (math.nan if bad else 1.0), scalars, state


def test_each_value_has_a_directory_of_its_own(tmp_path):
  config = regression.get_config(1)
  config.update(checkpoint_dir=str(tmp_path), experiment_kwargs={'a': ''})
  points = sweep.points({'experiment_kwargs.a': ['x/y', 'x_y', '..', 'x y']})

  def config_of(point):
    config.update_from_flattened_dict(dict(point))
    return config.copy_and_resolve_references()

  made = []
  sweep.run(points, config_of, lambda _, x: made.append(x['checkpoint_dir']))
  assert len({*made}) == 4
  assert {pathlib.Path(path).parent for path in made} == {tmp_path}


def test_a_point_that_fails_ends_no_sweep(tmp_path, monkeypatch, capsys):
  config = regression.get_config(4)
  config.update(checkpoint_dir=str(tmp_path), best_model_eval_metric='loss')
  config.best_model_eval_metric_higher_is_better = False
  config.on_nonfinite = 'raise'
  seeds = {'random_seed': [2, 3]}
  found = jaxline.sweep(Diverges, config, seeds)
  printed = capsys.readouterr().out
  assert ' (1 of 2), in ' in printed.splitlines()[-1]
  assert 'jaxline.fit(' not in printed  # The sweep starts its runs again.
  states = {run.recorded['random_seed']: run.has_ended for run in found}
  assert states == {2: False, 3: True}
  names = {pathlib.Path(run.path).name for run in found}
  assert names == {'random_seed=2', 'random_seed=3'}
  for axes, index, said in (
    (seeds, 2, 'index is 2'),
    ({'random_sed': [1]}, None, 'random_sed'),
  ):
    with pytest.raises(errors.UsageError, match=said):
      jaxline.sweep(Diverges, config, axes, index=index)
  # Nothing is left to train, but with another config.
  trained = []
  train = lambda *args, **kwargs: trained.append(args)
  monkeypatch.setattr(jaxline.api, 'fit_point', train)
  jaxline.sweep(Diverges, config, seeds, index=1)
  assert not trained
  config.training_steps = 5
  jaxline.sweep(Diverges, config, seeds, index=1)
  assert len(trained) == 1


@pytest.mark.process
@pytest.mark.filterwarnings('ignore:the load_module')
def test_a_sweep_that_is_killed_goes_on(tmp_path, monkeypatch, capsys):
  argv = [
    *('sweep', f'--config={processes.ROOT}/tests/programs/toy_config.py'),
    '--config.experiment_class=tests.programs.toy:Sharded',
    f'--config.checkpoint_dir={tmp_path}',
    '--sweep.training_steps=2,6,4',
  ]
  taken, step = [], toy.Sharded.step

  def step_or_die(self, *, global_step, **kwargs):
    taken.append(global_step)
    if taken == [0, 1, 0, 1, 2, 3]:
      raise toys.Killed
    return step(self, global_step=global_step, **kwargs)

  monkeypatch.setattr(toy.Sharded, 'step', step_or_die)
  with pytest.raises(toys.Killed):
    cli.main(argv)
  taken.clear()
  capsys.readouterr()
  assert cli.main(argv) == 0
  assert taken == [2, 3, 4, 5, 0, 1, 2, 3]
  out = capsys.readouterr().out
  assert re.findall(r'^Point (\d) of 3', out, re.M) == ['1', '2']
  *_, best = out.splitlines()
  assert best.startswith('Best eval/loss: ')
  assert best.endswith(f'{tmp_path}/training_steps=6')
