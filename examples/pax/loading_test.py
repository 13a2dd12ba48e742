"""Tests of the loading rules: what they match, and the keys that they become.

The library's tests have runs that begin with what these keys load.
"""

import jax
import pytest

from examples.pax import config as config_lib
from examples.pax import experiment_registry
from examples.pax import experiment_test
from examples.pax import loading
from examples.pax.tasks.synthetic.params import sequences
from jaxline import base_config
from jaxline import errors
from jaxline.base import trees
from jaxline.checkpoint import rules as rules_lib
from jaxline.parallel import mesh as mesh_lib

Rules = loading.CheckpointLoadingRules
# Arrays of a state.
FIRST, SECOND = (f'state/params/net/{x}/w' for x in ('first', 'second'))
EMA_FIRST, EMA_SECOND = (
  f'state/model_state/ema/net/{x}/w' for x in ('first', 'second')
)
ROWS = 'state/model_state/non_trainable/net/rows'
EMA_ROWS = 'state/model_state/ema_non_trainable/net/rows'
ARRAYS = (FIRST, SECOND, EMA_FIRST, EMA_SECOND, ROWS, EMA_ROWS)
ALL = ('params/(.*)', 'params/{}')
ONE = ('params/net/first/w', 'params/net/first/w')


def match(load, ignore=(), **fields):
  """Returns array -> source, and the rules without use."""
  rules = Rules(load_rules=load, ignore_rules=ignore, **fields)
  _, pairs = loading.restore_keys({'run': rules})
  return rules_lib.match_rules(ARRAYS, pairs, 'rules')


@pytest.mark.parametrize(
  ('load', 'ignore', 'first', 'second', 'rows'),
  [
    # A weight is loaded, and its average starts with the same value.
    ([ALL], [], FIRST, SECOND, None),
    # The first match applies. Groups are numbered, or written as in Python.
    (
      [
        ('params/(.*)first/(.)', 'params/{0}second/{1}'),
        ('params/(.*)', r'params/\1'),
      ],
      *([], SECOND, SECOND, None),
    ),
    ([('non_trainable/(.*)', 'non_trainable/{}')], [], None, None, ROWS),
    # An expression matches the start of a name.
    ([('params/net/f', ONE[1])], [], FIRST, None, None),
    # Ignored variables keep their initial values.
    ([ALL], ['.*/first'], None, SECOND, None),
    ([ALL], ['params/net/f|params'], None, SECOND, None),
    # Averages are sources, too.
    ([('params/(.*)', 'ema/params/{}')], [], EMA_FIRST, EMA_SECOND, None),
    (
      [('non_trainable/(.*)', 'ema/non_trainable/{}')],
      *([], None, None, EMA_ROWS),
    ),
  ],
)
def test_rules_choose_a_source_for_each_variable(
  load, ignore, first, second, rows
):
  expected = [first, second, first, second, rows, rows]
  pairs = zip(ARRAYS, expected, strict=True)
  assert match(load, ignore) == ({k: x for k, x in pairs if x}, [])


def test_a_rule_without_use_is_known():
  # An earlier rule takes the variable of the last.
  for load in ([('params/net/f$', 'a')], [ONE, (ONE[0], 'params/net/second')]):
    assert len(match(load)[1]) == 1


@pytest.mark.parametrize(
  ('rule', 'message'),
  [
    (('params/(', 'a'), 'unterminated'),
    (('params/net/(.*)', 'params/{}/{}'), 'group reference 2'),
    (('net', 'a'), "'net'; expected an expression that begins"),
    (('.*net', 'a'), "'.*net'; expected an expression that begins"),
    (('params/a|params/b', 'a'), 'contains it only once'),
  ],
)
def test_errors(rule, message):
  with pytest.raises(errors.UsageError, match=message):
    match([rule])


def test_what_the_keys_of_a_run_cannot_say():
  with pytest.raises(errors.UsageError, match=r"\['a', 'b'\]; expected one"):
    loading.restore_keys({'a': Rules(), 'b': Rules()})
  with pytest.raises(errors.UsageError, match='safe_load is False'):
    match([ALL], safe_load=False)
  with pytest.raises(AttributeError, match=r'load_step.*Missing'):
    Rules(load_step=True)


class Tuned(sequences.ReverseEncoderDecoder):
  """Begins with the averages of a run, except for the encoder."""

  def task(self):
    task = super().task()
    task.train.learner.optimizer.ema_decay = 0.5
    rules = Rules(
      load_rules=[('params/(.*)', 'ema/params/{}')],
      ignore_rules=['.*/encoder'],
      step=7,
    )
    task.train.init_from_checkpoint_rules = {'runs/a': rules}
    return task


def test_an_experiments_rules_are_keys_of_its_config(monkeypatch):
  monkeypatch.setattr(experiment_registry, '_registered', {})
  experiment_registry.register(Tuned)
  config = config_lib.get_config('Tuned')
  base_config.validate_config(config)
  assert config.restore_from == 'runs/a:7'
  with mesh_lib.on_devices(jax.devices()[:1]):
    made = experiment_test.make(config)
  leaves = trees.named_leaves({'state': made.abstract_state()})
  sources, unused = rules_lib.match_rules(leaves, config.restore_rules, 'rules')
  average = 'state/model_state/ema/'
  assert sources == {
    name: name.replace('state/params/', average)
    for name in leaves
    if name.startswith(('state/params/', average)) and '/encoder' not in name
  }
  assert len(sources) > 20
  assert not unused
