"""The pages that a reader follows: docs/howto.md and docs/tutorial.md.

The recipes: each diff applies, and the result runs. A diff names its file in
its first line; `@@` stands between two places. The tutorial: each step does
what the page shows.
"""

import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxline
from jaxline import sharded

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / 'docs' / 'howto.md'
BLOCK = re.compile(r'^```(\w+)\n(.*?)^```$', re.M | re.S)


_, *_parts = re.split(
  r'^## (.+)\n', PAGE.read_text(encoding='utf-8'), flags=re.M
)
# The text below each heading.
SECTIONS = dict(zip(_parts[::2], _parts[1::2], strict=True))


def blocks(section, language):
  return [
    code for kind, code in BLOCK.findall(SECTIONS[section]) if kind == language
  ]


def hunks(diff):
  """Yields (file, old lines, new lines) of each place that a diff changes."""
  for part in re.split(r'^--- ', diff, flags=re.M)[1:]:
    name, _, body = part.partition('\n')
    for hunk in re.split(r'^@@\n', body, flags=re.M):
      lines = hunk.splitlines()
      assert {line[:1] for line in lines} <= {' ', '+', '-', ''}, hunk
      old = [line[1:] for line in lines if line[:1] != '+']
      new = [line[1:] for line in lines if line[:1] != '-']
      yield name, '\n'.join(old), '\n'.join(new)


def apply(root, *names):
  """Makes the changes of sections in a copy of the repository."""
  for section in names:
    for code in blocks(section, 'python'):
      if code.startswith('# examples/'):
        name, _, source = code.partition('\n')
        (root / name.removeprefix('# ')).write_text(source)
    diffs = blocks(section, 'diff')
    assert diffs
    for diff in diffs:
      change(root, diff)


def change(root, diff):
  for name, old, new in hunks(diff):
    text = (root / name).read_text(encoding='utf-8')
    assert f'\n{text}'.count(f'\n{old}\n') == 1, f'{name}\n{old}'
    text = f'\n{text}'.replace(f'\n{old}\n', f'\n{new}\n').removeprefix('\n')
    (root / name).write_text(text)


@pytest.fixture
def copy(tmp_path, monkeypatch):
  """A folder with a copy of what the diffs change, imported from there."""
  root = tmp_path / 'copy'
  for name in ('examples', 'configs'):
    shutil.copytree(ROOT / name, root / name)
  monkeypatch.syspath_prepend(root)
  monkeypatch.chdir(tmp_path)
  for name in imported():
    monkeypatch.delitem(sys.modules, name)
  yield root
  for name in imported():
    del sys.modules[name]


def imported():
  return [x for x in sys.modules if x.split('.')[0] in ('examples', 'configs')]


def tiny(root):
  """Returns the config of configs/lm.py in the copy, for a little text."""
  text = 'for item in items:\n  total = total + item\n'
  for i in range(20):
    (root / f'file{i}.txt').write_text(text * (3 + i % 4))
  lm = importlib.import_module('configs.lm')
  assert pathlib.Path(lm.__file__).is_relative_to(root)
  config = lm.get_config()
  config.checkpoint_dir = str(root.parent / 'runs' / 'a')
  config.update(training_steps=20, eval_interval=10)
  config.update(save_checkpoint_interval=10, log_train_data_interval=10)
  kwargs = config.experiment_kwargs.config
  kwargs.update(files=str(root / 'file*.txt'), cache_dir=str(root / 'cache'))
  kwargs.update(eval_fraction=0.2, length=16, sample_length=4)
  kwargs.model.update(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32)
  kwargs.model.max_length = 16
  return config


def train(config, **overrides):
  return jaxline.fit(None, config, overrides)


@pytest.mark.process
def test_recipes_that_go_together(copy):
  apply(copy, 'Add a metric', 'Add an image or a text', 'Add a writer')
  apply(copy, 'Call a function every so often', 'Add a config key')
  apply(copy, 'Change the optimizer', 'Average the weights')
  config = tiny(copy)
  assert config.experiment_kwargs.config.table_rate == 0.1
  result = train(config)
  run = pathlib.Path(result.directory)

  batches = list(result.experiment.eval_input())
  rows = np.concatenate([batch['weights'] for batch in batches]).mean(-1)
  expected = rows[rows > 0].mean()
  assert 0.5 < expected < 1
  steps, filled = result.history['eval/filled'].T
  assert steps.tolist() == [10, 20]
  np.testing.assert_allclose(filled, expected, rtol=1e-6)
  losses, perplexities = (
    result.history[f'eval/{name}'][:, 1] for name in ('loss', 'perplexity')
  )
  np.testing.assert_allclose(perplexities, np.exp(losses), rtol=1e-6)
  assert (result.history['train/update_norm'][:, 1] > 0).all()

  records = (run / 'eval' / 'metrics.jsonl').read_text().splitlines()
  shapes = [json.loads(r)['embedding'] for r in records if '"embedding"' in r]
  assert shapes == [[1, 2048, 16, 1]] * 2

  losses = dict(result.history['train/loss'])
  lines = (run / 'train' / 'metrics.csv').read_text().splitlines()
  assert f'20,loss,{losses[20]}' in lines

  assert (run / 'progress.txt').read_text() == f'20 {losses[20]:.3f}'

  state = result.experiment.state
  assert set(state.opt_state[1].inner_states) == {'table', 'rest'}
  average = state.model_state[sharded.EMA]
  assert jax.tree.map(np.shape, average) == jax.tree.map(np.shape, state.params)


@pytest.mark.process
def test_own_data_and_fine_tuning(copy):
  config = tiny(copy)
  first = train(config)
  apply(copy, 'Read data of your own')
  for name in [n for n in sys.modules if n.startswith('examples.lm')]:
    del sys.modules[name]
  tokens = np.random.default_rng(0).integers(0, 256, [50, 17], np.int32)
  np.save('tokens.npy', tokens)
  (rules,) = blocks('Start from the weights of another run', 'python')
  config.checkpoint_dir = str(pathlib.Path('runs', 'b').absolute())
  exec(rules, {'config': config})
  config.experiment_kwargs.config.learning_rate = 0.0
  second = train(config, training_steps=1)
  assert int(second.experiment.state.step) == 1

  source = second.experiment.train_input()
  assert type(source).__name__ == 'Rows'
  batch = next(source)
  rows = {row.tobytes() for row in tokens}
  joined = np.concatenate([batch['ids'], batch['labels'][:, -1:]], 1)
  assert {row.tobytes() for row in joined} <= rows

  # The rate is 0: the weights are still those that were restored.
  old, new = (jaxline.load_weights(x.directory) for x in (first, second))
  table = np.abs(
    old.pop('embedding')['tokens'] - new.pop('embedding')['tokens']
  )
  assert table.max() > 0.01
  jax.tree.map(np.testing.assert_array_equal, old, new)


@pytest.mark.process
def test_arrays_bfloat16_and_a_schedule_of_the_clip(copy):
  apply(copy, 'Read arrays in memory', 'Compute in bfloat16')
  apply(copy, 'Clip by a schedule')
  minimal = importlib.import_module('examples.minimal')
  rows = np.arange(20, dtype=np.int32).repeat(9).reshape(20, 9)
  for name in ('train', 'eval'):
    np.save(copy / f'{name}.npy', rows)
  config = minimal.get_config()
  config.experiment_kwargs.config.files = str(copy)
  config.experiment_kwargs.config.batch_size = 10
  first, second = train(config, training_steps=20, eval_interval=10).history[
    'eval/loss'
  ][:, 1]
  assert second < first < np.log(257)
  experiment = minimal.Experiment('train', jax.random.PRNGKey(0),
                                  config.experiment_kwargs.config)  # fmt: skip
  source = experiment.train_input()
  seen = np.concatenate([next(source)['ids'][:, 0] for _ in range(2)])
  assert sorted(seen) == [*range(20)] != [*seen]
  state, batch = experiment.state, next(source)
  loss_fn = lambda p: experiment.loss_fn(p, {}, batch, None, True)[0]
  assert 'bf16[8,257' in str(jax.make_jaxpr(loss_fn)(state.params))
  assert jax.grad(loss_fn)(state.params)['out'].dtype == np.float32

  config = tiny(copy)
  assert config.experiment_kwargs.config.model.dtype == 'bfloat16'
  config.log_train_data_interval = 1
  config.experiment_kwargs.config.warmup_fraction = 0.25
  norms = train(config).history['train/clip_norm'][:, 1]
  # Of the step before: from 10 to 1 in 5 steps.
  np.testing.assert_allclose(norms[:7], [10, 10, 8.2, 6.4, 4.6, 2.8, 1], 1e-6)


def test_all_diffs_apply(copy):
  # Each by itself, but for those that need the config key.
  for section in SECTIONS:
    if blocks(section, 'diff'):
      for name in ('lm/experiment.py', 'minimal.py'):
        shutil.copy(ROOT / 'examples' / name, copy / 'examples' / name)
      shutil.copy(ROOT / 'configs' / 'lm.py', copy / 'configs')
      apply(copy, section)


@pytest.mark.process
def test_from_python(copy):
  config = tiny(copy)
  first = train(config)
  # The schedule of the learning rate refers to the number of steps.
  config.on_config_change = 'continue'
  experiment = importlib.import_module('examples.lm.experiment')
  names = {'Experiment': experiment.Experiment, 'config': config}
  for section in ('Use the library from Python', 'Use the weights elsewhere'):
    (code,) = blocks(section, 'python')
    code = code.replace('500', '25').replace('=4000', '=20')
    exec(code, names)
  assert names['steps'].tolist() == [10, 20, 25]
  assert int(names['experiment'].state.step) == 20
  np.testing.assert_array_equal(
    names['experiment'].state.params['embedding']['tokens'],
    first.experiment.state.params['embedding']['tokens'],
  )
  shapes = jax.tree.map(np.shape, names['params'])
  assert shapes['embedding']['tokens'] == (2048, 16)


@pytest.mark.process
@pytest.mark.timeout(900)
def test_each_step_of_the_tutorial(tmp_path, monkeypatch):
  run = {'bash': ['bash', '-euc'], 'python': [sys.executable, '-c']}
  shutil.copytree(ROOT / 'examples', tmp_path / 'examples')
  shutil.copy(ROOT / 'experiment.py', tmp_path)
  monkeypatch.delenv('XLA_FLAGS')  # As a reader has it: one device.
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  path = f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}'
  monkeypatch.setenv('PATH', path)
  page = (ROOT / 'docs' / 'tutorial.md').read_text(encoding='utf-8')
  (_, install), *steps = BLOCK.findall(page)
  assert 'pip install' in install  # This is not done again.
  printed = ''
  for language, code in steps:
    if language == 'diff':
      change(tmp_path, code)
      continue
    command = [*run[language], code]
    done = subprocess.run(
      command, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f'{code}\n{done.stdout}\n{done.stderr}'
    printed += done.stdout

  few, first, second = (
    jaxline.history(str(tmp_path / 'runs' / name))
    for name in ('few', 'first', 'second')
  )
  assert few['train/loss'][-1, 1] < 0.3
  for history in (first, second):
    steps, bits = history['eval/bits_per_byte'].T
    assert sorted({*steps}) == [250, 500, 750, 1000]
    assert bits[-1] < bits[0] < 5
  assert 0.3 < first['eval/accuracy'][-1, 1] < 1
  assert second['eval/bits_p90'][-1, 1] > second['eval/bits_per_byte'][-1, 1]
  assert 'values are equal to the bit' in printed
  assert "'in': (8, 257, 128)" in printed
