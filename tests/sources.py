"""Small inputs of numbers, for the tests of inputs."""

import dataclasses
import threading
import time

import numpy as np

from jaxline.inputs import base
from jaxline.inputs import indexed

ONE_EPOCH = {'reset_for_eval': True, 'eval_loop_num_batches': None}


class OddError(Exception):
  """Cannot be pickled."""

  def __init__(self, message):
    super().__init__(message)
    self.lock = threading.Lock()


FAULTS = {'odd': OddError, 'stop': StopIteration, 'error': ValueError}


@dataclasses.dataclass(kw_only=True, eq=False)
class Records(indexed.IndexedInput):
  """Records that have numbers: each is its number and the epoch.

  Attributes:
    size: how many there are.
    fail: what happens at record 7: a key of `FAULTS`, or 'stall'.
    data: what identifies the data.
  """

  size: int = 10
  fail: str = ''
  data: str = 'a'

  def num_records(self):
    return self.size

  def read(self, records, epochs):
    if self.fail == 'stall' and 7 in records:
      time.sleep(1000)
    if self.fail and 7 in records:
      raise FAULTS[self.fail]('broken')
    return base.Batch(x=records, epoch=epochs)

  def describe_record(self, record, epoch):
    return f'file f{record // 5}, row {record % 5}'

  def data_identity(self):
    return {'data': self.data}


@dataclasses.dataclass(kw_only=True, eq=False)
class Counting(base.BaseInput):
  """Batches [B] of one number: 0, 1, ... `end` - 1."""

  end: int = 4
  is_closed = False

  def __post_init__(self):
    super().__post_init__()
    self.number = 0
    self.num_reads = 0

  def get_next(self):
    self.num_reads += 1
    if self.number >= self.end:
      raise StopIteration
    self.number += 1
    return base.Batch(x=np.full(self.batch_size, self.number - 1, np.int32))

  def reset(self):
    super().reset()
    self.number = 0

  def position(self):
    return self.number

  def set_position(self, position):
    self.number = position

  def where(self):
    return f'number {self.number}'

  def close(self):
    self.is_closed = True


class Counted:
  """An iterator whose state is a pytree that it changes in place."""

  def __init__(self, first=0, end=6):
    self.state, self.end = {'next': np.array(first)}, end

  def __iter__(self):
    return self

  def __next__(self):
    number = int(self.state['next'])
    if number == self.end:
      raise StopIteration
    self.state['next'] += 1
    return {'x': np.array([number, number + 100])}

  def get_state(self):
    return self.state

  def set_state(self, state):
    self.state = state


def numbers(batches):
  """Returns the first number of each batch."""
  return [int(batch['x'][0]) for batch in batches]


def take(source, number):
  """Returns the records of the next batches, a list of each."""
  return [next(source)['x'].tolist() for _ in range(number)]


def rows(batches):
  """Returns the records of some batches in a row."""
  return [record for batch in batches for record in batch]
