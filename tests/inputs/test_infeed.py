"""Batches read ahead: how many, waits, stalls, the end."""

import threading
import time
import types
from unittest import mock

from absl import logging
import numpy as np

from jaxline.inputs import infeed
from tests import processes
from tests import sources


def counting():
  return sources.Counting(batch_size=2, end=1 << 30, is_training=True)


def test_batches_read_ahead_are_bounded_by_number_and_bytes():
  expected = {2**25: 4, 2**20: 16, 2**10: 32}  # One of them is with us.
  feeds, before = {}, {*threading.enumerate()}
  for num_bytes in expected:
    row = np.broadcast_to(np.int8(0), num_bytes)  # Takes no memory.
    place = lambda x, row=row: {'x': row}
    feed = infeed.Infeed(counting(), place, buffer_size=3)
    next(feed)
    feeds[num_bytes] = feed
  number = lambda: {k: feed.source.number for k, feed in feeds.items()}
  processes.wait_until(lambda: number() == expected)
  time.sleep(0.1)  # No more are read.
  assert number() == expected
  feeds['unread'] = infeed.Infeed(counting(), lambda x: x)
  for feed in feeds.values():
    feed.close()
    assert feed.source.is_closed
  assert not {*threading.enumerate()} - before


def test_wait_fraction_excludes_compilation(monkeypatch):
  clock = types.SimpleNamespace(now=1000.0, compiled=0.0, wait=0.0)

  def read(source, batches, **unused):
    for batch in batches:
      clock.now += clock.wait
      yield batch

  monkeypatch.setattr(infeed, 'read_ahead', read)
  monkeypatch.setattr(infeed.time, 'perf_counter', lambda: clock.now)
  monkeypatch.setattr(infeed.goodput, 'compiled_secs', lambda: clock.compiled)
  feed = infeed.Infeed(counting(), lambda x: x)
  # Seconds of a wait, of a compilation after it, and of the rest of the step.
  for clock.wait, compiles, takes, expected in (
    (5, 50, 0, 0),
    (1, 0, 2, 1),
    (1, 500, 0, 2 / 4),  # Once more, for another shape.
    (0, 0, 4, 2 / 4),
    (2, 0, 0, 4 / 10),
  ):
    next(feed)
    assert feed.wait_fraction == expected
    clock.now += compiles + takes
    clock.compiled += compiles
  feed.close()


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
