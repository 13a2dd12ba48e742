"""Metrics that are no means: docs/metrics.md, in one process and in several.

test_hosts.py has the rows on meshes across processes.
"""

import contextlib
import math
import re
import runpy
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxline
from jaxline import metrics
from tests import processes
from tests import remains
from tests.experiments import regression

BLOCK = re.compile(r'^```python\n# (examples/\S+)\n(.*?)^```$', re.M | re.S)
ROOT = processes.ROOT


@pytest.fixture(scope='module')
def clone(tmp_path_factory):
  """A folder with the files of the page, beside experiment.py."""
  root = tmp_path_factory.mktemp('clone')
  (root / 'examples').mkdir()
  (root / 'examples' / '__init__.py').touch()
  shutil.copy(ROOT / 'experiment.py', root)
  text = (ROOT / 'docs' / 'metrics.md').read_text(encoding='utf-8')
  for name, code in BLOCK.findall(text):
    (root / name).write_text(code)
  assert len(BLOCK.findall(text)) == text.count('```python') == 2
  return root


def fit(path, folder, **overrides):
  page = runpy.run_path(str(path))
  overrides['checkpoint_dir'] = str(folder)
  result = jaxline.fit(page['Experiment'], page['get_config'](), overrides)
  return result.history, result.experiment


@pytest.mark.process
def test_one_and_three_processes_have_the_exact_bleu(clone, tmp_path):
  path = clone / 'examples' / 'yours_bleu.py'
  bleu = runpy.run_path(str(path))['bleu']
  # Of 6, 5, 4 and 3 there are 5, 4, 3 and 2; and all, but of a short text.
  found = bleu([[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3, 4, 9]])
  assert found == pytest.approx((1 / 3) ** 0.25)
  assert bleu([[*range(5)]], [[*range(6)]]) == pytest.approx(math.exp(-0.2))
  history, live = fit(path, tmp_path / 'alone')
  table = np.asarray(live.state.params['table'])
  ours, theirs = [], []
  for batch in live.eval_input(None):
    for source, target in zip(batch['source'], batch['target'], strict=True):
      ours.append(table[source[source > 0]].argmax(-1).tolist())
      theirs.append(target[target > 0].tolist())
  expected = bleu(ours[:500], theirs[:500])
  assert history['eval/bleu'][-1, 1] == pytest.approx(expected)
  assert [] in theirs[:500]  # A row whose weights are all 0.
  done = processes.run(
    *('-m', 'jaxline.launch', '--processes=3', '--devices-per-process=2', '--'),
    *(sys.executable, 'experiment.py', f'--config={path}'),
    *('--jaxline_mode=train_and_eval', f'--config.checkpoint_dir={tmp_path}/3'),
    cwd=clone,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  rows = remains.curve(tmp_path / '3', 'eval')
  scores = [[row['step'], row['bleu']] for row in rows]
  assert scores == history['eval/bleu'].tolist()
  assert [row['pairs'] for row in rows] == [500] * len(rows)
  losses = history['eval/loss'][:, 1]
  np.testing.assert_allclose([row['loss'] for row in rows], losses, 1e-5)


def test_auc_f1_and_a_confusion_image(clone, tmp_path):
  path = clone / 'examples' / 'yours.py'
  history, live = fit(path, tmp_path, training_steps=20)
  w, b = (np.asarray(live.state.params[k]) for k in ('w', 'b'))
  data = [*live.eval_input(None)]
  x, label = (
    np.concatenate([d[k] for d in data])[:500] for k in ('x', 'label')
  )
  score = x @ w + b
  yes, no = score[label == 1], score[label == 0]
  auc = np.mean(yes[:, None] > no) + np.mean(yes[:, None] == no) / 2
  wrong = (yes <= 0).sum() + (no > 0).sum()
  f1 = 2 * (yes > 0).sum() / (2 * (yes > 0).sum() + wrong)
  assert history['eval/auc'][-1, 1] == pytest.approx(auc)
  assert history['eval/f1'][-1, 1] == pytest.approx(f1)
  assert 'eval/confusion' not in history
  lines = (tmp_path / 'eval' / 'metrics.jsonl').read_text()
  assert '"confusion":[1,2,2,1]' in lines


class Outputs(regression.Drawing):
  """Evaluates two sets, and keeps what it reduces."""

  name = 'number'

  def eval_input(self):
    self.seen, self.eval_sizes = [], (15, 15, 4)  # Filled up to 16.
    first = (
      batch | {'weights': self.weights(len(batch['x']))}
      for batch in super().eval_input()
    )
    return {'a': first, 'b': [regression.examples(2, 3)]}

  def weights(self, rows):
    return np.resize(np.float32([0, 1, 2]), rows)

  def eval_outputs(self, params, model_state, batch, rng):
    draw = jnp.full(batch['weights'].shape, jax.random.uniform(rng))
    return {'x': batch['x'], 'of': (batch['weights'], draw)}

  def reduce_outputs(self, outputs):
    self.seen.append(outputs)
    return {self.name: len(outputs['x'])}


def test_each_row_comes_once_in_order_whatever_its_weight():
  live = Outputs('eval', jax.random.PRNGKey(0))
  found = regression.evaluate(live)
  assert (found['a/number'], found['b/number']) == (34, 3)
  outputs, _ = live.seen
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(outputs))
  np.testing.assert_array_equal(outputs['x'], regression.examples(1, 34)['x'])
  weights, draws = outputs['of']
  given = [live.weights(rows) for rows in live.eval_sizes]
  np.testing.assert_array_equal(weights, np.concatenate(given))
  # The key of a batch is that of loss_fn.
  assert found['a/draw'] == pytest.approx(np.mean(draws[[0, 15, 30]]))
  live.name = 'loss'
  with pytest.raises(ValueError, match="'loss'"):
    regression.evaluate(live)


def test_what_is_no_row_and_what_is_neither_number_nor_image_is_refused():
  live = Outputs('eval', jax.random.PRNGKey(0))
  for value in (np.ones(3), None):
    live.reduce_outputs = lambda outputs, value=value: {'mine': value}
    with pytest.raises(TypeError, match="'mine'"):
      regression.evaluate(live)
  live = Outputs('eval', jax.random.PRNGKey(0))
  live.eval_outputs = lambda params, state, batch, rng: batch['x'].sum()
  with pytest.raises(ValueError, match=r'eval_outputs.*\(\)'):
    regression.evaluate(live)


@pytest.mark.parametrize(
  ('is_mean', 'scalar'),
  [
    (True, lambda x, weights: metrics.Mean.of(x, weights).compute()),
    (True, lambda x, weights: 0.25),
    (False, lambda x, weights: jnp.mean(x)),  # Of rows of weight 0 too.
    (False, lambda x, weights: weights.sum()),
  ],
)
def test_a_scalar_that_is_no_mean_is_refused(scalar, is_mean):
  class Scalar(regression.Regression):
    def loss_fn(self, *args):
      loss, values, new = super().loss_fn(*args)
      x, weights = args[2]['x'][:, 0], args[2]['weights']
      return loss, values | {'mine': scalar(x, weights)}, new

  live = Scalar('eval', jax.random.PRNGKey(0), eval_sizes=(16, 3))
  wrong = pytest.raises(ValueError, match=r"'mine'.*Mean\.of")
  with contextlib.nullcontext() if is_mean else wrong:
    assert 'mine' in regression.evaluate(live)
