"""One problem in two libraries: jaxline knows nothing of either.

Each is a small classifier with statistics of its inputs, by the class that
docs/howto.md shows. Both run through `train.train`, save, restore and go on.
"""

import re

import jax
import numpy as np
import optax
import pytest

from jaxline import metrics
from jaxline import sharded
from jaxline import train
from jaxline import utils
from jaxline.parallel import partitioning
from tests import processes
from tests.experiments import regression

FEATURES, HIDDEN, CLASSES, BATCH = 6, 16, 3, 24
STEPS = 30
MOMENTUM = 0.9


def examples(index):
  """Returns a batch of three clusters."""
  rng = np.random.default_rng(index)
  labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
  centers = np.eye(CLASSES, FEATURES, dtype=np.float32)
  x = 2 * centers[labels] + 0.5 * rng.normal(size=(BATCH, FEATURES))
  return {'x': x.astype(np.float32), 'label': labels}


class Input(regression.Input):
  """Endless batches with a position."""

  def __next__(self):
    self.state['next'] += 1
    return examples(int(self.state['next']))


class Classifier(sharded.ShardedExperiment):
  """What does not depend on the library."""

  def __init__(self, mode, init_rng, *, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config, sharding='fsdp')

  def loss_fn(self, params, model_state, batch, rng, is_training):
    logits, model_state = self.logits(
      params, model_state, batch['x'], is_training
    )
    weights = batch['weights']
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch['label']
    )
    loss = metrics.Mean.of(losses, weights)
    accuracy = metrics.Mean.of(logits.argmax(-1) == batch['label'], weights)
    return loss.compute(), {'loss': loss, 'accuracy': accuracy}, model_state

  def make_optimizer(self):
    return optax.adam(0.02)

  def train_input(self):
    return Input(BATCH)

  def eval_input(self):
    for index, rows in ((1, 24), (2, 7)):
      yield {name: x[:rows] for name, x in examples(index).items()}


def recipe(library, model):
  """Returns the class that docs/howto.md shows for a library, of a model."""
  page = processes.ROOT / 'docs' / 'howto.md'
  (code,) = re.findall(
    rf'^```python\n((?:from|import) {library}\b.*?)^```$',
    page.read_text(encoding='utf-8'),
    re.M | re.S,
  )
  names = {'Model': model, 'jax': jax, 'sharded': sharded}
  names['Logical'] = partitioning.Logical
  exec(code, names)
  (name,) = (x for x in names if x.endswith('Experiment'))
  return type('Recipe', (names[name], Classifier), {})


def flax_nnx():
  from flax import nnx

  class Model(nnx.Module):
    def __init__(self, rngs):
      self.norm = nnx.BatchNorm(FEATURES, momentum=MOMENTUM, rngs=rngs)
      self.hidden = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
      self.out = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
      return self.out(nnx.relu(self.hidden(self.norm(x))))

  return recipe('flax', Model)


def equinox():
  import equinox as eqx

  class Model(eqx.Module):
    norm: eqx.nn.BatchNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
      self.norm = eqx.nn.BatchNorm(FEATURES, 'batch', mode='batch')
      self.mlp = eqx.nn.MLP(FEATURES, CLASSES, HIDDEN, depth=1, key=key)

    def __call__(self, x, state):
      # Equinox's BatchNorm needs it.
      with jax.numpy_dtype_promotion('standard'):
        x, state = self.norm(x, state)
      return self.mlp(x), state

  return recipe('equinox', Model)


def run(cls, steps):
  """Trains from the newest checkpoint; returns losses and experiment."""
  config = regression.get_config(steps)
  losses = []

  class Recording(cls):
    def train_loop(self, config, state, periodic_actions, writer=None):
      record = lambda t, step, scalars: losses.append(float(scalars['loss']))
      super().train_loop(config, state, [*periodic_actions, record], writer)

  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  train.train(Recording, config, checkpointer, None)
  state = checkpointer.get_experiment_state('latest')
  return losses, state.experiment_module


@pytest.mark.parametrize(
  ('make', 'library'), [(flax_nnx, 'flax.nnx'), (equinox, 'equinox')]
)
def test_a_library_trains_saves_and_goes_on(make, library, monkeypatch):
  pytest.importorskip(library, exc_type=ImportError)
  cls = make()
  losses, live = run(cls, STEPS)
  assert len(losses) == STEPS
  assert np.mean(losses[-5:]) < 0.3 * np.mean(losses[:2])
  assert regression.evaluate(live)['accuracy'] > 0.9
  straight = regression.digest(live.state)
  monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
  first, (last, resumed) = run(cls, 11)[0], run(cls, STEPS)
  assert first + last == losses
  assert regression.digest(resumed.state) == straight

  # Two matrices, and the optimizer's two moments of each, are split.
  for tree, count in ((live.state.params, 2), (live.state.opt_state, 4)):
    matrices = [x for x in jax.tree.leaves(tree) if x.ndim == 2 and len(x) > 1]
    assert len(matrices) == count
    for x in matrices:
      rows = len(x) // 2 if len(x) % 2 == 0 else len(x)
      assert [len(s.data) for s in x.addressable_shards] == [rows] * 2

  if library == 'flax.nnx':  # The weights are loaded back into a model.
    state, x = live.state, examples(1)['x']
    model = live.model(state.params, state.model_state)
    model.eval()
    logits, _ = live.logits(state.params, state.model_state, x, False)
    np.testing.assert_allclose(model(x), logits, rtol=1e-6)
