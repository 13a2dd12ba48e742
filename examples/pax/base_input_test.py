"""Tests of inputs under Pax's names, whose batches act as a NestedMap."""

import dataclasses

import numpy as np
import pytest

from examples.pax import base_input
from examples.pax import pax_fiddle
from examples.pax.inputs import lingvo
from examples.pax.inputs import synthetic


@dataclasses.dataclass(kw_only=True, eq=False)
class Own(base_input.BaseInput):
  """An input of ones."""

  length: int = 2

  def get_next(self):
    return base_input.NestedMap(x=np.ones([self.batch_size, self.length]))


@pytest.mark.parametrize('name', ['HParams', 'Params'])
def test_a_class_has_its_config(name):
  p = getattr(Own, name)(batch_size=4)
  assert isinstance(p, pax_fiddle.Config)
  p.length = 3
  assert p.Instantiate().get_next().x.shape == (4, 3)
  assert p.clone().set(batch_size=5).Instantiate().batch_size == 5
  with pytest.raises(AttributeError):
    p.lenght = 4
  # A subclass makes configs of itself.
  synth = synthetic.SyntheticInput.HParams(batch_size=2, length=3)
  assert type(synth.Instantiate()) is synthetic.SyntheticInput


def test_fields_stand_on_the_class():
  with pytest.raises(TypeError, match='Own is a dataclass: declare the fields'):

    class Sub(Own):
      class HParams(Own.HParams):
        size: int = 3


class Given:
  """A generator with Lingvo's interface."""

  params = None

  def GetPreprocessedInputBatch(self):
    return {'x': np.ones([2, 3]), 'deep': {'y': np.zeros([2])}}


@pytest.mark.parametrize(
  ('cls', 'fields'),
  [
    (synthetic.SyntheticInput, {'batch_size': 2, 'length': 3}),
    (lingvo.LingvoInputAdaptor, {'input': Given()}),
  ],
)
def test_a_subclass_adds_an_entry_as_an_attribute(cls, fields):
  class Mine(cls):
    def get_next(self):
      batch = super().get_next()
      batch.new_field = np.arange(2)
      for nested in batch.values():
        if isinstance(nested, dict):
          nested.seen = np.arange(2)
      return batch

  batch = Mine(**fields).get_next_padded()
  np.testing.assert_array_equal(batch['new_field'], [0, 1])
