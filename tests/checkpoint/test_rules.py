"""A run that begins from another one: `restore_from` and `restore_rules`."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxline.base import trees
from jaxline.run_directory import store as store_lib
from tests import checkpoints as lib


@pytest.mark.parametrize(
  ('where', 'step'),
  [
    ('', 5), ('/checkpoints/latest:3', 3), ('/checkpoints/best', 4),
  ],
)  # fmt: skip
def test_restore_from(where, step, open_run, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  other = open_run(directory=tmp_path / 'other')
  for n, series in ((3, 'latest'), (5, 'latest'), (4, 'best')):
    lib.save(other, lib.weights(n), n, series=series)
  before = lib.tree_of(tmp_path / 'other')
  source = 'other' + where  # Relative to the working directory.
  checkpointer = open_run(restore_from=source)
  assert checkpointer.can_be_restored('latest')
  assert not checkpointer.can_be_restored('best')
  live = lib.weights()
  state = lib.restore(checkpointer, live)
  assert (state.global_step, live.held()['n']) == (step, step)
  lib.assert_same(state.train_step_rng, lib.rows(jax.random.PRNGKey(7)))
  assert lib.tree_of(tmp_path / 'other') == before
  # From then on the run has its own.
  lib.save(checkpointer, lib.weights(9), 9)
  assert lib.restore(checkpointer, live).global_step == 9


def test_restore_from_what_is_damaged_or_does_not_fit(open_run, tmp_path):
  lib.save(open_run(directory=tmp_path / 'other'), lib.weights(1), 3, 5)
  lib.flip(lib.manifest_of(tmp_path / 'other'))
  before = lib.tree_of(tmp_path / 'other')
  checkpointer = open_run(restore_from=str(tmp_path / 'other'))
  with pytest.raises(store_lib.DamagedError, match=r'/5\.json does not'):
    lib.restore(checkpointer, lib.weights())
  checkpointer = open_run(
    directory=tmp_path / 'third', restore_from=str(tmp_path / 'other:3')
  )
  with pytest.raises(ValueError, match=r"lacks \['v'\]"):
    lib.restore(checkpointer, lib.PerDevice({'v': jnp.ones(2)}, {'n': 0}))
  assert lib.tree_of(tmp_path / 'other') == before


class Scheduled(lib.Sharded):
  """Has each kind of schedule that Optax keeps a count for."""

  def make_optimizer(self):
    rate = optax.linear_schedule(0.1, 0.0, 10)
    return optax.chain(
      optax.add_noise(0.1, 0.5, 3),
      optax.inject_hyperparams(optax.adamw)(rate, weight_decay=0.1),
      optax.add_decayed_weights(rate),
      optax.scale_by_schedule(rate),
    )


def _counts(opt_state):
  leaves = trees.named_leaves(opt_state).items()
  return {n: int(x) for n, x in leaves if n.split('/')[-1] == 'count'}


def test_rules_for_all_of_the_state_begin_a_new_run(open_run, tmp_path):
  source = Scheduled(params={'layer': {'b': jnp.ones([2, 3])}})
  lib.advance(source, 6)
  other = open_run(directory=tmp_path / 'other')
  lib.save(other, source, 6, key=jax.random.key(1))
  live = Scheduled(params={'head': jnp.zeros([4])}, seed=2)
  key, before = jax.random.key(8), jax.tree.map(jnp.copy, live.state)
  rules = [
    ('state/.*/layer/.*', None),
    ('state/(.*)/head', r'state/\1/w'),
    ('state/(.*)', r'state/\1'),
  ]
  checkpointer = open_run(
    restore_from=str(tmp_path / 'other'), restore_rules=rules
  )
  state = lib.fill(checkpointer, live, 0, key=key)
  checkpointer.restore('latest')
  assert state.global_step == 0
  assert state.train_step_rng is key
  got, taken = live.state, source.state
  # It was not of step 0, and had weights and moments of its own.
  assert (int(taken.step), int(got.step)) == (6, 0)
  lib.assert_same(got.skipped, before.skipped)
  w = taken.params['w']
  lib.assert_same(
    got.params, {'w': w, 'head': w, 'layer': before.params['layer']}
  )
  assert got.params['w'].sharding == before.params['w'].sharding
  kept = {'key': before.model_state['key']}
  lib.assert_same(got.model_state, taken.model_state | kept)
  adam = lambda x: x.opt_state[1].inner_state[0]
  assert adam(got).count == 6  # Of Adam's moments.
  lib.assert_same(adam(got).mu['w'], adam(taken).mu['w'])
  assert list(_counts(taken.opt_state).values()) == [6] * 6
  counts = _counts(got.opt_state)
  assert [name for name in counts if counts[name]] == ['1/inner_state/0/count']
  lib.assert_same(got.opt_state[0], before.opt_state[0])  # Its key as well.
  lib.assert_same(got.opt_state[1].hyperparams, before.opt_state[1].hyperparams)
  assert 'input' not in live.snapshot_state()
  lib.advance(live, 1)  # Nothing shares a buffer that a step gives away.
  assert int(live.state.step) == 1


@pytest.mark.parametrize(('rules', 'match'), [
  ([('state/params/w', None), ('state/params', None)],
   r"\['state/params'\] match no array .*state/params/w"),
  ([('state/params/.*', None), ('state/params/w', 'state/params/w')],
   r"\['state/params/w'\] match no array.*an earlier rule"),
  ([('state/params/w', 'state/params/v')],
   r"no arrays \['state/params/v'\]. Similar .*'state/params/w'"),
  ([('state/params/w', 'state/params/layer/b')], 'w from state/params/layer/b'),
  # What begins anew cannot be asked for.
  ([(x, x) for x in ('state/step', 'state/skipped', 'state/model_state/key')],
   r"\['state/step', .*skipped', .*key'\] match no array.*never restore step"),
])  # fmt: skip
def test_rules_that_cannot_be_followed(rules, match, kept, open_run, tmp_path):
  checkpointer = open_run(restore_from=str(kept), restore_rules=rules)
  key = jax.random.key(0)
  lib.assert_refused(
    checkpointer, lib.Sharded(seed=2), tmp_path, match, key=key
  )
