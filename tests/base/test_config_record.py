"""Which changes of a config make another run."""

import types

from jaxline import base_config


def changes(old, new, free=()):
  cls = types.SimpleNamespace(CHANGEABLE_ON_RESUME=free, CONFIG_CLASS=None)
  return base_config.changes(old, new, cls)


def test_only_what_is_declared_and_what_is_below_it_may_change():
  own = {'mesh': {'data': 1}, 'mesh_noise': 1}
  for changed, names in (
    ({'mesh': {'data': 2}}, []),
    ({'mesh': 3}, []),
    ({'mesh_noise': 2}, ['experiment_kwargs.mesh_noise']),
  ):
    old, new = ({'experiment_kwargs': x} for x in (own, own | changed))
    found = changes(old, new, ('experiment_kwargs.mesh',))
    assert [line.partition(':')[0] for line in found] == names


def test_a_class_that_was_handed_over_may_be_named_later():
  unnamed, named, other = (
    {'experiment_class': name, 'random_seed': 1}
    for name in (None, 'a:A', 'b:B')
  )
  assert not changes(unnamed, named)
  assert not changes(named, unnamed)
  assert "'a:A' then, 'b:B' now" in changes(named, other)[0]
