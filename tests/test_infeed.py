"""Batches read ahead: how many, waits, stalls, the end."""

import dataclasses
import threading
import time

import numpy as np
import pytest

from jaxline.base import goodput
from jaxline.inputs import infeed
from tests import test_input_base


@dataclasses.dataclass(kw_only=True, eq=False)
class Counting(test_input_base.Counting):
  """Batches of one number each, counted up."""

  end: int = 1 << 30
  closed = False

  def where(self):
    return f'file a.txt, record {self.number}'

  def close(self):
    self.closed = True


def counting(**fields):
  return Counting(batch_size=2, is_training=True, **fields)


def value(batch):
  return int(batch['x'][0])


@pytest.mark.parametrize(
  ('num_bytes', 'expected'),
  [
    (2**25, 4),  # One is with us, three are ahead.
    (2**20, 16),
    (2**10, 32),
  ],
)
def test_batches_read_ahead_are_bounded_by_number_and_bytes(
  num_bytes, expected
):
  source = counting()
  row = np.broadcast_to(np.int8(0), num_bytes)  # Takes no memory.
  feed = infeed.Infeed(source, lambda x: {'x': row}, buffer_size=3)
  next(feed)
  deadline = time.monotonic() + 5
  while source.number < expected and time.monotonic() < deadline:
    time.sleep(0.01)
  time.sleep(0.1)
  assert source.number == expected
  feed.close()


# Time.


class Clock:
  """A feed whose waits and compilations take as long as the test says."""

  def __init__(self, monkeypatch, **fields):
    self.now = 1000.0
    self.compiled = 0.0
    self.wait = 0.0
    self.feed = infeed.Infeed(counting(**fields), lambda x: x)
    self.batches = self.feed._batches
    self.feed._batches = self
    monkeypatch.setattr(infeed.time, 'perf_counter', lambda: self.now)
    monkeypatch.setattr(infeed.goodput, 'compiled_secs', lambda: self.compiled)

  def __next__(self):
    self.now += self.wait
    return next(self.batches)

  def close(self):
    self.batches.close()

  def steps(self, num_steps, wait, takes):
    """Waits for a batch, and then takes that long."""
    self.wait = wait
    for _ in range(num_steps):
      next(self.feed)
      self.now += takes

  def compile(self, secs):
    self.now += secs
    self.compiled += secs


@pytest.fixture
def clock(monkeypatch):
  made = Clock(monkeypatch, name='books')
  yield made
  made.feed.close()


def test_wait_fraction_excludes_compilation(clock):
  clock.steps(1, wait=5, takes=0)
  clock.compile(50)  # In the first step.
  clock.steps(1, wait=1, takes=2)
  clock.steps(1, wait=1, takes=0)
  assert clock.feed.wait_fraction == 2 / 4
  clock.compile(500)  # Once more, for another shape.
  clock.steps(1, wait=0, takes=0)
  assert clock.feed.wait_fraction == 2 / 4
  clock.steps(1, wait=0, takes=4)
  clock.steps(1, wait=2, takes=0)
  assert clock.feed.wait_fraction == 4 / 10


def test_waits_are_accounted_for(clock):
  before = goodput.seconds_by_category()['input wait']
  with goodput.run(), goodput.measure('steps'):
    clock.steps(4, wait=0.25, takes=1)
    clock.steps(4, wait=0.00005, takes=1)  # It was ready.
  assert goodput.seconds_by_category()['input wait'] - before == 1


def test_a_stall_is_told_with_the_place(caplog):
  caplog.set_level('WARNING')
  go_on = threading.Event()

  class Stalling(Counting):
    def get_next(self):
      if self.number == 2:
        assert go_on.wait(30)
      return super().get_next()

  source = Stalling(batch_size=2, name='books', is_training=True)
  feed = infeed.Infeed(source, lambda x: x, stall_secs=0.05)
  assert [value(next(feed)) for _ in range(2)] == [0, 1]
  threading.Timer(0.5, go_on.set).start()
  assert value(next(feed)) == 2
  feed.close()
  assert 'books, reading file a.txt, record 2' in caplog.text


# The end of it.


@pytest.mark.parametrize('num_read', [0, 1, 5])
def test_close_ends_the_thread_and_closes_the_source(num_read):
  source = counting()
  before = {*threading.enumerate()}
  feed = infeed.Infeed(source, lambda x: x)
  for _ in range(num_read):
    next(feed)
  feed.close()
  assert source.closed
  assert not {*threading.enumerate()} - before
