"""Another config is refused, unless it may change; damage is for all."""

import dataclasses
import functools
import math
from typing import Any

from ml_collections import config_dict
import numpy as np
import pytest

from jaxline.checkpoint import restoring
from jaxline.compat import experiments
from jaxline.parallel import distributed
from jaxline.run_directory import store as store_lib
from tests import checkpoints as lib


def _kwargs(**values: Any) -> dict[str, Any]:
  return {'experiment_kwargs': config_dict.ConfigDict(values)}


def _activation(x):
  return x


SAME = {'layers': 2, 'nan': math.nan, 'mesh': {'data': 2}, 'sharding': 'ddp'}


@dataclasses.dataclass
class Decoding:
  """A part of an experiment's own config; `top_k` is a later addition."""

  method: str
  top_k: int = 40


@dataclasses.dataclass
class Settings:
  """An experiment's own config; what has a default was added later."""

  width: int
  decode: Decoding
  sizes: tuple[int, ...] = (1, 2)
  best: Decoding = dataclasses.field(default_factory=lambda: Decoding('beam'))


class Declares(lib.PerDevice):
  """Says what may change, and what its config is read into."""

  CONFIG_CLASS = Settings
  CHANGEABLE_ON_RESUME = (
    'experiment_kwargs.config.eval_batches',
    'experiment_kwargs.config.decode',
  )


def _own(**values: Any) -> dict[str, Any]:
  own = {'width': 3, 'decode': {'method': 'greedy'}} | values
  return _kwargs(config=own)


def test_what_the_experiment_declares_may_change(open_run):
  first = open_run(**_own(eval_batches=3))
  live = Declares({'w': np.ones(3)}, {})
  lib.save(first, live)
  lib.save(first, live, series='best', value=1.0)
  first.close()
  changed = _own(eval_batches=None, decode={'method': 'beam', 'size': 4})
  other = open_run(**changed)
  other.check_config(experiments.declared(functools.partial(Declares, {})))
  # The best value is restored without an experiment.
  state = other.get_experiment_state('best')
  state.value = 0.0
  other.restore('best')
  assert state.value == 1.0
  lib.restore(other, live)
  other.close()
  with pytest.raises(restoring.ConfigChangedError, match='eval_batches'):
    open_run(**changed).check_config()
  # Its name only begins like one that is declared.
  other = open_run(**_own(eval_batches=3, decode_seed=1))
  with pytest.raises(restoring.ConfigChangedError, match='decode_seed'):
    other.check_config(Declares)


def test_a_key_that_is_new_has_its_default(open_run):
  defaults = {
    'sizes': (1, 2),
    'decode': {'method': 'greedy', 'top_k': 40},
    'best': {'method': 'beam', 'top_k': 40},
  }
  live = Declares({'w': np.ones(3)}, {})
  first = open_run(**_own())
  lib.save(first, live)
  first.close()
  open_run(**_own(**defaults)).check_config(Declares)
  with pytest.raises(restoring.ConfigChangedError) as e:
    open_run(**_own(**defaults | {'sizes': (1, 3)})).check_config(Declares)
  assert [x for x in str(e.value).splitlines() if x[:2] == '  '] == [
    '  config.experiment_kwargs.config.sizes: [1, 2] then, [1, 3] now'
  ]
  lib.restore(open_run(**_own(**defaults)), live)


def test_another_config_is_refused_by_its_keys(open_run, tmp_path):
  first = open_run(experiment_class='a:A', **_kwargs(net=SAME | {'old': 1}))
  lib.save(first, lib.weights(1))
  first.close()
  other = open_run(random_seed=43, training_steps=7, mesh={'ici': {'data': 1}},
    experiment_class='b:B',
    **_kwargs(net=SAME | {'layers': 3, 'new': [1]}))  # fmt: skip
  with pytest.raises(restoring.ConfigChangedError) as e:
    other.check_config()
  assert [line for line in str(e.value).splitlines() if line[:2] == '  '] == [
    "  config.experiment_class: 'a:A' then, 'b:B' now",
    '  config.experiment_kwargs.net.layers: 2 then, 3 now',
    "  config.experiment_kwargs.net.new: 'absent' then, [1] now",
    "  config.experiment_kwargs.net.old: 1 then, 'absent' now",
    '  config.random_seed: 42 then, 43 now',
  ]
  assert "config.on_config_change = 'continue'" in str(e.value)
  error = restoring.ConfigChangedError
  lib.assert_refused(other, lib.weights(), tmp_path, 'layers: 2 then', error)


def test_what_may_change(open_run):
  again = type(_activation)(_activation.__code__, {}, '_activation')
  # At another address, as in another process.
  before, after = (functools.partial(f, 1) for f in (_activation, again))
  assert repr(after) != repr(before)
  first = open_run(**_kwargs(net=SAME, f=_activation, p=before))
  lib.save(first, lib.weights(1))
  first.close()
  other = open_run(
    training_steps=7, log_tensors_interval=3, max_checkpoints_to_keep=1,
    save_checkpoint_interval=2, on_nonfinite='skip', watchdog_secs=5.0,
    mesh={'ici': {'data': 1}}, sharding='fsdp',
    experiment_class='a:A',  # It was handed over before.
    **_kwargs(net=SAME, f=_activation, p=after),
  )  # fmt: skip
  other.check_config()
  lib.restore(other, lib.weights())
  other.close()
  # Training is permitted anything; an evaluation beside it follows it.
  for mode, permitted in ('train', 'continue'), ('eval', 'raise'):
    other = open_run(mode, on_config_change=permitted, **_kwargs(net=3))
    other.check_config()
    lib.restore(other, live := lib.weights())
    assert live.held()['n'] == 1


def test_damage_that_one_process_finds_is_raised_in_all(monkeypatch):
  decide = lambda own, choose, *unused: choose([own, 'c.0 is missing'])
  monkeypatch.setattr(distributed, 'gather_and_decide', decide)
  with pytest.raises(store_lib.DamagedError, match=r'c\.0 is missing'):
    restoring.call_in_all_processes(lambda: 1)
