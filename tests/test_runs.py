"""Tests of `python -m jaxline.runs`."""

import json

import pytest

from jaxline import base_config
from jaxline import runs
from jaxline.run_directory import store
from jaxline.runs import __main__ as cli


@pytest.fixture
def make_run(tmp_path):
  """Returns what writes a run's directory: its config and its logs."""

  def make(name, *, train=(), evals=(), ended=None, **values):
    folder = tmp_path / name
    config = base_config.get_base_config()
    config.update(
      values | {'checkpoint_dir': str(folder), 'training_steps': 30}
    )
    for mode, records in (('train', train), ('eval', evals)):
      (folder / mode).mkdir(parents=True)
      lines = [
        json.dumps({'step': step, 'time': 1.0, 'kind': 'scalars'} | scalars)
        for step, scalars in records
      ]
      (folder / mode / 'metrics.jsonl').write_text(
        ''.join(f'{x}\n' for x in lines)
      )
    (folder / 'config.json').write_text(
      json.dumps(base_config.recorded(config))
    )
    if ended is not None:
      (folder / 'checkpoints').mkdir()
      path = folder / 'checkpoints' / 'ended.json'
      path.write_text(json.dumps({'step': ended}))
    return folder

  return make


@pytest.fixture
def sweep(make_run, tmp_path):
  """Two runs of a sweep: one has ended, one was killed."""
  train = [
    (10, {'loss': 3.0, 'steps_per_sec': 2.0}),
    (20, {'loss': 2.0, 'steps_per_sec': 0.1}),
  ]
  common = {
    'best_model_eval_metric': 'loss',
    'best_model_eval_metric_higher_is_better': False,
  }
  make_run(
    'a',
    train=[*train, (30, {'loss': 1.0, 'steps_per_sec': 1.0})],
    evals=[(10, {'loss': 1.5}), (20, {'loss': 1.25}), (30, {'loss': 1.75})],
    ended=30,
    random_seed=1,
    **common,
  )
  make_run(
    'b', train=train, evals=[(20, {'loss': 2.5})], random_seed=2, **common
  )
  return tmp_path


def table(text):
  """Returns printed columns as the first cell -> the others."""
  lines = [line.split('  ') for line in text.splitlines() if line.strip()]
  rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
  return {first: rest for first, *rest in rows}


def test_ls_has_a_line_for_each_run(sweep, capsys):
  assert cli.main(['ls', str(sweep)]) == 0
  # 10 steps at 2 a second, 10 at 0.1 and 10 at 1: 115 seconds.
  assert table(capsys.readouterr().out) == {
    'run': ['state', 'step', 'time', 'best', 'last'],
    'a': [
      'ended',
      '30 of 30',
      '1:55',
      'eval/loss 1.25',
      'eval/loss 1.75, train/loss 1, train/steps_per_sec 1',
    ],
    'b': [
      'not ended',
      '20 of 30',
      '1:45',
      'eval/loss 2.5',
      'eval/loss 2.5, train/loss 2, train/steps_per_sec 0.1',
    ],
  }


def test_compare_has_a_column_for_each_run(sweep, capsys):
  assert cli.main(['compare', str(sweep / 'a'), str(sweep / 'b')]) == 0
  rows = {
    'a': ['b'],
    'random_seed': ['1', '2'],
    'state': ['ended', 'not ended'],
    'step': ['30 of 30', '20 of 30'],
    'time': ['1:55', '1:45'],
  }
  assert table(capsys.readouterr().out) == rows | {
    'best eval/loss': ['1.25', '2.5'],
    'last eval/loss': ['1.75', '2.5'],
    'last train/loss': ['1', '2'],
  }
  argv = ['compare', str(sweep), '--metrics=train/steps_per_sec']
  assert cli.main(argv) == 0
  rows |= {'last train/steps_per_sec': ['1', '0.1']}
  assert table(capsys.readouterr().out) == rows


@pytest.mark.parametrize(
  ('text', 'steps'),
  [
    ('{"step": 1, "kind": "scalars", "loss": 2.0}\n{"step": 2, "ki', [1]),
    ('nonsense\n{"step": 3, "kind": "scalars", "loss": "NaN"}\n', [3]),
  ],
)
def test_a_log_may_be_cut_short(make_run, text, steps):
  folder = make_run('a')
  (folder / 'train' / 'metrics.jsonl').write_text(text)
  run = runs.read(folder)
  assert list(run.curves.get('train/loss', {})) == steps
  assert run.step == max(steps, default=0)


@pytest.mark.parametrize(
  ('name', 'values', 'config', 'field', 'expected'),
  [
    (
      *('loss', {10: 2.0, 20: 'NaN'}, {'best_model_eval_metric': 'loss'}),
      *('best', {'eval/loss': 2.0}),
    ),
    # It began from another run.
    (
      *('steps_per_sec', {4010: 2.0, 4020: 10.0}, {'restore_from': 'b'}),
      *('seconds', 1.0),
    ),
    ('steps_per_sec', {1: 'NaN', 2: 0.5}, {}, 'seconds', 2.0),
    # With checkpoints in memory there is no note of the end.
    ('loss', {30: 1.0}, {'checkpointer': 'memory'}, 'has_ended', True),
    ('loss', {29: 1.0}, {'checkpointer': 'memory'}, 'has_ended', False),
  ],
)
def test_what_is_read_of_a_run(make_run, name, values, config, field, expected):
  logged = [(step, {name: x}) for step, x in values.items()]
  run = runs.read(make_run('a', train=logged, evals=logged, **config))
  assert getattr(run, field) == expected


@pytest.mark.parametrize('command', ['ls', 'compare'])
def test_what_cannot_be_read_is_named_and_hides_nothing(
  command, sweep, make_run, capsys, monkeypatch
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
  assert cli.main([command, str(sweep), 'a', '.']) == 0
  out, err = capsys.readouterr()
  for name in ('no_json', 'cut', 'other_format', 'unreadable'):
    assert sum(f'{sweep}/{name}' in line for line in err.splitlines()) == 1
    assert name not in out
  assert out.count('not ended') == 1
  assert out.replace('not ended', '').count('ended') == 1
  # One that is asked for, or nothing else, is an error.
  for name in ('no_json', 'cut', 'unreadable'):
    assert cli.main([command, f'{sweep}/{name}']) == 2
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


@pytest.mark.parametrize(
  ('argv', 'said'),
  [
    (['ls', 'nowhere'], 'There is no run in nowhere'),
    (['ls', 'ftp://b/r'], 'gs://BUCKET/PATH'),
    (['ls', 'gs://b/r'], 'Invalid GCS bucket name'),
    (['compare', '.', '--metrics=eval/los'], "Did you mean 'eval/loss'?"),
  ],
)
def test_errors_are_one_line(sweep, argv, said, capsys, monkeypatch):
  monkeypatch.chdir(sweep)
  assert cli.main(argv) == 2
  error = capsys.readouterr().err
  assert said in error
  assert error.count('\n') == 1


@pytest.fixture
def make_side(make_run, tmp_path):
  """Returns what writes the runs of a side, one for each value; its name."""

  def make(name, values, **config):
    for seed, value in enumerate(values):
      own = {'ended': 9, 'random_seed': seed, 'best_model_eval_metric': 'x'}
      evals = [(3, {'x': 0.0, 'loss': value}), (9, {'x': value})]
      make_run(f'{name}/{seed}', evals=evals, **own | config)
    return str(tmp_path / name)

  return make


@pytest.mark.parametrize(
  ('base', 'values', 'metric', 'word', 'numbers', 'code'),
  [  # By the table of t: 2.776 for 4 degrees of freedom, 4.303 for 2.
    ([1, 2, 3], [4, 5, 6], 'x', 'better', '+3 ± 2.3, confidence 97.9%', 0),
    ([1, 2, 3], [-5, -6, -7], 'x', 'worse', '-8 ± 2.3, confidence 99.9%', 1),
    ([1, 2], [3, 2], 'x', 'not dist', '+1 ± 3, confidence 70.7%', 1),
    ([1, 1], [1, 1], 'x', 'not dist', '+0 ± 0, confidence 0.0%', 1),
    ([2, 2], [1, 1], 'loss', 'better', '-1 ± 0, confidence 100.0%', 0),
  ],
)
def test_a_verdict_over_seeds(
  make_side, capsys, base, values, metric, word, numbers, code
):
  sides = make_side('a', base), make_side('b', values)
  argv = ['--metrics=eval/loss'] if metric == 'loss' else []
  assert cli.main(['compare', '--seeds', *sides, *argv]) == code
  said = capsys.readouterr().out.splitlines()[-1]
  assert said.startswith(word)
  assert said.endswith(f' by {numbers}')


@pytest.mark.parametrize(
  ('values', 'config'),
  [
    ([1], {}),
    ([1, 'NaN'], {}),
    ([1, 2], {'ended': None}),
    ([1, 2], {'random_seed': 1}),
  ],
)
def test_no_verdict_without_seeds(make_side, capsys, values, config):
  sides = make_side('a', [1, 2]), make_side('b', values, **config)
  assert cli.main(['compare', '--seeds', *sides]) == 2
  assert cli.main(['compare', '--seeds', sides[0]]) == 2
  assert 'config.random_seed' in capsys.readouterr().err
