"""Tests of `python -m jaxline.runs`."""

import itertools
import json
import math
import sys

import numpy as np
import pytest

import jaxline
from jaxline import base_config
from jaxline import errors
from jaxline import runs
from jaxline.run_directory import store
from jaxline.runs import __main__ as cli
from jaxline.runs import plot
from jaxline.runs import replay


@pytest.fixture
def make_run(tmp_path):
  """Returns what writes a run's directory: its config and its logs."""

  def make(name, *, train=(), evals=(), ended=None, **values):
    folder = tmp_path / name
    config = base_config.get_base_config()
    values |= {'checkpoint_dir': str(folder), 'training_steps': 30}
    config.update(values)
    for mode, records in (('train', train), ('eval', evals)):
      (folder / mode).mkdir(parents=True)
      lines = [
        json.dumps({'step': step, 'time': 1.0, 'kind': 'scalars'} | scalars)
        for step, scalars in records
      ]
      text = ''.join(f'{x}\n' for x in lines)
      (folder / mode / 'metrics.jsonl').write_text(text)
    recorded = json.dumps(base_config.recorded(config))
    (folder / 'config.json').write_text(recorded)
    if ended is not None:
      (folder / 'checkpoints').mkdir()
      note = json.dumps({'step': ended})
      (folder / 'checkpoints' / 'ended.json').write_text(note)
    return folder

  return make


@pytest.fixture
def sweep(make_run, tmp_path):
  """Two runs of a sweep: one has ended, one was killed."""
  logged = (10, 3.0, 2.0), (20, 2.0, 0.1), (30, 1.0, 1.0)
  train = [(n, {'loss': x, 'steps_per_sec': rate}) for n, x, rate in logged]
  common = {'best_model_eval_metric': 'loss'}
  common['best_model_eval_metric_higher_is_better'] = False
  evals = [(10, {'loss': 1.5}), (20, {'loss': 1.25}), (30, {'loss': 1.75})]
  make_run('a', train=train, evals=evals, ended=30, random_seed=1, **common)
  evals = [(20, {'loss': 2.5})]
  make_run('b', train=train[:2], evals=evals, random_seed=2, **common)
  return tmp_path


def table(capsys, *argv):
  """Returns the columns that a command prints: first cell -> the others."""
  assert cli.main(argv) == 0
  text = capsys.readouterr().out
  lines = [line.split('  ') for line in text.splitlines() if line.strip()]
  rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
  return {first: rest for first, *rest in rows}


def test_ls_has_a_line_and_compare_a_column_for_each_run(sweep, capsys):
  # 10 steps at 2 a second, 10 at 0.1 and 10 at 1: 115 seconds.
  best, last = ('eval/loss 1.25', 'eval/loss 2.5'), 'train/steps_per_sec'
  assert table(capsys, 'ls', str(sweep)) == {
    'run': ['state', 'step', 'time', 'best', 'last'],
    'a': [
      *('ended', '30 of 30', '1:55', best[0]),
      f'eval/loss 1.75, train/loss 1, {last} 1',
    ],
    'b': [
      *('not ended', '20 of 30', '1:45', best[1]),
      f'eval/loss 2.5, train/loss 2, {last} 0.1',
    ],
  }
  rows = {
    'a': ['b'],
    'random_seed': ['1', '2'],
    'state': ['ended', 'not ended'],
    'step': ['30 of 30', '20 of 30'],
    'time': ['1:55', '1:45'],
  }
  argv = 'compare', str(sweep / 'a'), str(sweep / 'b')
  assert table(capsys, *argv) == rows | {
    'best eval/loss': ['1.25', '2.5'],
    'last eval/loss': ['1.75', '2.5'],
    'last train/loss': ['1', '2'],
  }
  rows[f'last {last}'] = ['1', '0.1']
  assert table(capsys, 'compare', str(sweep), f'--metrics={last}') == rows


@pytest.fixture
def rates(make_run, tmp_path):
  """Two rates with seeds: the second is better, and one run fell behind."""
  for rate, losses in {0.1: [1.0, 2.0, 6.0], 0.2: [2.0, 1.0]}.items():
    for seed, loss in enumerate(losses):
      make_run(
        f'{rate}_{seed}',
        train=[(10, {'loss': loss + 1}), (20, {'loss': loss})],
        evals=[(20, {'accuracy': -loss})],
        ended=None if loss == 6.0 else 30,
        random_seed=seed,
        experiment_kwargs={'config': {'rate': rate}},
      )
  return tmp_path


def test_groups_have_the_mean_and_standard_error_of_their_seeds(
  rates, make_run, capsys
):
  more = str(rates), '--group', '--sort=train/loss'
  # The mean of 1, 2 and 6 is 3, and of squares of deviations 14 / 2 = 7: the
  # error is (7 / 3) ** 0.5. Of 2 and 1: 0.5 ** 0.5 / 2 ** 0.5.
  assert table(capsys, 'compare', *more) == {
    '0.2_*': ['0.1_*'],
    'experiment_kwargs.config.rate': ['0.2', '0.1'],
    'random_seed': ['0,1', '0,1,2'],
    'state': ['ended', 'not ended'],
    'step': ['20 of 30', '20 of 30'],
    'time': ['0:00', '0:00'],
    'last eval/accuracy': ['-1.5 ± 0.5', '-3 ± 1.5'],
    'last train/loss': ['1.5 ± 0.5', '3 ± 1.5'],
  }
  for seed, logged in enumerate(([(20, {'loss': 0.1})], [])):
    kwargs = {'config': {'rate': 0.3}}
    make_run(
      f'0.3_{seed}', train=logged, random_seed=seed, experiment_kwargs=kwargs
    )
  *_, before, last = table(capsys, 'ls', *more).values()
  assert 'train/loss 3 ± 1.5' in before[-1]
  # A mean of less is no better.
  assert 'train/loss 0.1 (1 of 2)' in last[-1]


def test_the_best_of_many_runs_is_in_the_first_row(rates, capsys):
  found = table(capsys, 'compare', str(rates), '--sort=eval/accuracy')
  head, *rows = found.items()
  assert head[0] == 'run'
  names = [name for name, _ in rows]
  assert names == ['0.1_0', '0.2_1', '0.1_1', '0.2_0', '0.1_2']
  assert head[1][:2] == ['rate', 'random_seed']
  assert [row[1] for _, row in rows] == ['0', '1', '1', '0', '2']


def test_a_curve_of_seeds_has_a_band_where_all_have_steps(rates):
  log = rates / '0.1_2/train/metrics.jsonl'
  log.write_text(log.read_text().splitlines()[0])
  group = runs.find([str(rates / f'0.1_{seed}') for seed in range(3)])
  (row,) = plot.curve(group, 'train/loss')
  assert row == pytest.approx([10, 4, (7 / 3) ** 0.5])
  out = rates / 'x.png'
  argv = ['plot', str(rates), '--group', '--metrics=train/loss', '--out']
  assert cli.main([*argv, str(out)]) == 0
  assert out.read_bytes()[:4] == b'\x89PNG'
  (axes,) = plot.plot([str(rates)], 'train/loss', by_seed=True).axes
  assert [line.get_xdata().tolist() for line in axes.lines] == [[10], [10, 20]]


def test_history_is_arrays_and_a_frame(make_run, monkeypatch):
  train = [(20, {'loss': 2}), (10, {'loss': 3})]
  history = jaxline.history(
    make_run('a', train=train, evals=[(20, {'x': 'NaN'})])
  )
  assert history['train/loss'].tolist() == [[10, 3], [20, 2]]
  frame = history.to_pandas()
  assert frame.index.tolist() == [10, 20]
  assert frame['train/loss'].tolist() == [3, 2]
  assert frame['eval/x'].isna().all()
  monkeypatch.setitem(sys.modules, 'pandas', None)  # As if it were missing.
  with pytest.raises(errors.UsageError, match='pip install pandas'):
    history.to_pandas()


def test_a_log_may_be_cut_short(make_run):
  folder = make_run('a')
  record = '{"step": %d, "kind": "scalars", "loss": %s}\n'
  for text, steps in (
    (record % (1, 2.0) + record[:15], [1]),
    ('nonsense\n' + record % (3, '"NaN"'), [3]),
  ):
    (folder / 'train' / 'metrics.jsonl').write_text(text)
    run = runs.read(folder)
    assert list(run.curves.get('train/loss', {})) == steps
    assert run.step == max(steps)


def test_what_is_read_of_a_run(make_run):
  loss = {'best_model_eval_metric': 'loss'}
  memory = {'checkpointer': 'memory'}
  for i, (name, values, config, field, expected) in enumerate(
    (
      ('loss', {10: 2.0, 20: 'NaN'}, loss, 'best', {'eval/loss': 2.0}),
      # It began from another run.
      ('rate', {4010: 2.0, 4020: 10.0}, {'restore_from': 'b'}, 'seconds', 1.0),
      ('rate', {12: 2.0, 20: 8.0}, {'restore_from': 'b:10'}, 'seconds', 2.0),
      ('rate', {1: 'NaN', 2: 0.5}, {}, 'seconds', 2.0),
      # With checkpoints in memory there is no note of the end.
      ('loss', {30: 1.0}, memory, 'has_ended', True),
      ('loss', {29: 1.0}, memory, 'has_ended', False),
    )
  ):
    name = {'rate': 'steps_per_sec'}.get(name, name)
    logged = [(step, {name: x}) for step, x in values.items()]
    run = runs.read(make_run(f'{i}', train=logged, evals=logged, **config))
    assert getattr(run, field) == expected, field


def test_what_cannot_be_read_is_named_and_hides_nothing(
  sweep, make_run, capsys, monkeypatch
):
  (make_run('no_json') / 'config.json').write_text('[1]')
  cut = make_run('cut', ended=1) / 'checkpoints/ended.json'
  cut.write_text('{"step": 3')
  (make_run('other_format') / 'checkpoints/latest/7').mkdir(parents=True)
  make_run('unreadable')
  (sweep / 'loop').symlink_to('.')
  (sweep / 'zz').symlink_to(sweep / 'a')
  list_names = store.Disk.names

  def names(self, *args):  # Root may read all folders.
    if self.url.startswith(f'{sweep}/unreadable'):
      raise PermissionError(13, 'Permission denied', self.url)
    return list_names(self, *args)

  monkeypatch.setattr(store.Disk, 'names', names)
  monkeypatch.chdir(sweep)
  assert cli.main(['ls', str(sweep), 'a', '.']) == 0
  out, err = capsys.readouterr()
  for name in ('no_json', 'cut', 'other_format', 'unreadable'):
    assert sum(f'{sweep}/{name}' in line for line in err.splitlines()) == 1
    assert name not in out
  assert out.count('not ended') == 1
  assert out.replace('not ended', '').count('ended') == 1
  # One that is asked for, or nothing else, is an error.
  for name in ('no_json', 'cut', 'unreadable'):
    assert cli.main(['ls', f'{sweep}/{name}']) == 2
    assert f'{sweep}/{name}' in capsys.readouterr().err


@pytest.mark.parametrize('command', ['ls', 'compare', 'bisect'])
def test_text_of_a_run_does_not_control_the_terminal(command, make_run, capsys):
  escape = '\x1b]0;x\x07\x9b2J\r\n\u202e'
  train = [(1, {f'loss{escape}': 1.0})]
  runs = [make_run(x, train=train, **{f'key{escape}': x}) for x in 'ab']
  assert cli.main([command, *map(str, runs)]) == 0
  printed = ''.join(capsys.readouterr())
  assert r'\x1b]0;x\x07\x9b2J\r' in printed
  assert not set(escape) - {*']0;x2J\n'} & set(printed)


def test_errors_are_one_line(sweep, capsys, monkeypatch):
  monkeypatch.chdir(sweep)
  for argv, said in (
    (['ls', 'nowhere'], 'There is no run in nowhere'),
    (['ls', 'ftp://b/r'], 'gs://BUCKET/PATH'),
    (['ls', 'gs://b/r'], 'Invalid GCS bucket name'),
    (['compare', '.', '--metrics=eval/los'], "Did you mean 'eval/loss'?"),
    (['explain', 'b'], 'No logged or recorded step'),
  ):
    assert cli.main(argv) == 2
    out, error = capsys.readouterr()
    assert said in error
    assert error.count('\n') == 1
  assert '2 of 20 steps are logged' in out  # By `explain`, to judge it.


def test_a_verdict_needs_seeds_that_have_ended(make_run, tmp_path, capsys):
  names = map(str, itertools.count())

  def side(values, **config):
    """Writes a run for each value; returns their directory."""
    name = next(names)
    for seed, value in enumerate(values):
      own = {'ended': 9, 'random_seed': seed, 'best_model_eval_metric': 'x'}
      evals = [(3, {'x': 0.0, 'loss': value}), (9, {'x': value})]
      make_run(f'{name}/{seed}', evals=evals, **own | config)
    return str(tmp_path / name)

  for base, values, metric, word, numbers, code in (
    # By the table of t: 2.776 for 4 degrees of freedom, 4.303 for 2.
    ([1, 2, 3], [4, 5, 6], 'x', 'better', '+3 ± 2.3, confidence 97.9%', 0),
    ([1, 2, 3], [-5, -6, -7], 'x', 'worse', '-8 ± 2.3, confidence 99.9%', 1),
    ([1, 2], [3, 2], 'x', 'not dist', '+1 ± 3, confidence 70.7%', 1),
    ([1, 1], [1, 1], 'x', 'not dist', '+0 ± 0, confidence 0.0%', 1),
    ([2, 2], [1, 1], 'loss', 'better', '-1 ± 0, confidence 100.0%', 0)
  ):  # fmt: skip
    argv = ['compare', '--seeds', side(base), side(values)]
    argv += ['--metrics=eval/loss'] if metric == 'loss' else []
    assert cli.main(argv) == code
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(word)
    assert said.endswith(f' by {numbers}')
  both = side([1, 2])
  for others in (
    [],
    [side([1])],
    [side([1, 'NaN'])],
    [side([1, 2], ended=None)],
    [side([1, 2], random_seed=1)],
  ):
    assert cli.main(['compare', '--seeds', both, *others]) == 2
    assert 'config.random_seed' in capsys.readouterr().err


def test_values_of_a_replay_are_equal_to_the_last_bit_or_differ():
  tiny = np.nextafter(np.float32(1e-9), np.float32(1))
  one = {'a': 1e-9, 'b': math.nan, 'c': 1.0, 'd': np.float32(1e-9), 'here': 1}
  other = {'a': 2e-9, 'b': math.nan, 'c': 1.0, 'd': tiny, 'there': 1}
  assert replay.differing(one, other) == ['a', 'd']
  assert replay.differing(one, other, rtol=1e-3) == ['a']
