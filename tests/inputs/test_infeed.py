"""Batches read ahead: how many, waits, stalls, the end."""

import threading
import time
from unittest import mock

from absl import logging
import numpy as np
import pytest

from jaxline.inputs import infeed
from tests import processes
from tests import sources


def counting():
  return sources.Counting(batch_size=2, end=1 << 30, is_training=True)


def test_batches_read_ahead_are_bounded_by_number_and_bytes():
  expected = {2**25: 4, 2**20: 16, 2**10: 32}  # One of them is with us.
  sources_by_bytes, feeds = {}, []
  for num_bytes in expected:
    source = sources_by_bytes[num_bytes] = counting()
    row = np.broadcast_to(np.int8(0), num_bytes)  # Takes no memory.
    place = lambda x, row=row: {'x': row}
    feeds.append(infeed.Infeed(source, place, buffer_size=3))
    next(feeds[-1])
  number = lambda: {k: x.number for k, x in sources_by_bytes.items()}
  processes.wait_until(lambda: number() == expected)
  time.sleep(0.1)  # No more are read.
  assert number() == expected
  for feed in feeds:
    feed.close()


class Clock:
  """A feed whose waits and compilations take as long as the test says."""

  def __init__(self, monkeypatch):
    self.now, self.compiled, self.wait = 1000.0, 0.0, 0.0
    read_ahead = lambda source, batches, **kwargs: self.read(batches)
    monkeypatch.setattr(infeed, 'read_ahead', read_ahead)
    monkeypatch.setattr(infeed.time, 'perf_counter', lambda: self.now)
    monkeypatch.setattr(infeed.goodput, 'compiled_secs', lambda: self.compiled)
    self.feed = infeed.Infeed(counting(), lambda x: x)

  def read(self, batches):
    for batch in batches:
      self.now += self.wait
      yield batch

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
  made = Clock(monkeypatch)
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


def test_a_stall_is_told_with_the_place(monkeypatch):
  go_on = threading.Event()

  class Stalling(sources.Counting):
    def get_next(self):
      if self.number == 2:
        assert go_on.wait(30)
      return super().get_next()

  warn = lambda *args, **kwargs: go_on.set()
  monkeypatch.setattr(logging, 'warning', mock.Mock(side_effect=warn))
  source = Stalling(batch_size=2, name='books', is_training=True)
  feed = infeed.Infeed(source, lambda x: x, stall_secs=0.05)
  assert sources.numbers([next(feed) for _ in range(3)]) == [0, 1, 2]
  feed.close()
  text, *args = logging.warning.call_args.args
  assert 'books, reading number 2' in text % tuple(args)


@pytest.mark.parametrize('num_read', [0, 5])
def test_close_ends_the_thread_and_closes_the_source(num_read):
  source, before = counting(), {*threading.enumerate()}
  feed = infeed.Infeed(source, lambda x: x)
  for _ in range(num_read):
    next(feed)
  feed.close()
  assert source.is_closed
  assert not {*threading.enumerate()} - before
