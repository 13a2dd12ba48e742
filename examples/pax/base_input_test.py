"""Tests of inputs under Pax's names, whose batches act as a NestedMap."""

import dataclasses

import numpy as np
import pytest

from examples.pax import base_input
from examples.pax import pax_fiddle


@dataclasses.dataclass(kw_only=True, eq=False)
class Own(base_input.BaseInput):
  """An input of ones."""

  length: int = 2

  def get_next(self):
    return base_input.NestedMap(x=np.ones([self.batch_size, self.length]))


def test_a_class_has_its_config():
  for make in Own.HParams, Own.Params:
    p = make(batch_size=4)
    assert isinstance(p, pax_fiddle.Config)
    assert type(p.Instantiate()) is Own
    p.length += 1
    assert p.Instantiate().get_next().x.shape == (4, 3)
    assert p.clone().set(batch_size=5).Instantiate().batch_size == 5
    with pytest.raises(AttributeError):
      p.lenght = 4
  with pytest.raises(TypeError, match='Own is a dataclass: declare the fields'):

    class Sub(Own):
      class HParams(Own.HParams):
        size: int = 3
