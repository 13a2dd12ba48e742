"""Tests of jaxline.base.async_lib."""

from concurrent import futures
import functools
import itertools
import threading
import traceback

import pytest

from jaxline.base import async_lib
from tests import processes

TIMEOUT = 10  # Seconds; only a broken test waits that long.


def _frames(error):
  return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_make_async_runs_all_calls_in_order_on_one_thread():
  may_go, running, order = threading.Event(), threading.Lock(), []

  class Counter:
    @async_lib.make_async('worker')
    def add(self, n, *, to):
      assert may_go.wait(TIMEOUT)
      assert running.acquire(blocking=False)
      order.append((self, n))
      running.release()
      return n + to, threading.current_thread().name

  counters = Counter(), Counter()
  calls = [(counters[i % 2], i) for i in range(100)]
  pending = [counter.add(i, to=1) for counter, i in calls]
  assert not pending[0].done()
  cancelled = counters[0].add(100, to=1)
  assert cancelled.cancel()  # It does not run, and ends nothing.
  may_go.set()
  for i, future in enumerate([*pending, counters[0].add(100, to=1)]):
    total, thread_name = future.result(TIMEOUT)
    assert total == i + 1
    assert thread_name.startswith('worker')
  assert order == [*calls, (counters[0], 100)]
  nameless = async_lib.make_async()(functools.partial(int, '3'))
  assert nameless().result(TIMEOUT) == 3


def test_make_async_raises_an_error_at_each_later_call():
  may_go, runs = threading.Event(), []

  @async_lib.make_async()
  def fail(i):
    assert may_go.wait(TIMEOUT)
    runs.append(i)
    raise SystemExit('bad')

  pending = [fail(i) for i in range(3)]
  may_go.set()
  error = pending[0].exception(TIMEOUT)
  for future in pending[1:]:
    with pytest.raises(futures.CancelledError):
      future.result(TIMEOUT)
  frames = []
  for i in range(3, 6):
    with pytest.raises(SystemExit, match='bad') as info:
      fail(i)
    assert info.value is error
    frames.append(_frames(info.value))
  # It shows where it was raised, and does not grow with each raise.
  assert frames == [frames[0]] * 3
  assert frames[0][-1] == 'fail'
  assert runs == [0]


def test_a_call_of_its_own_thread_waits_its_turn_and_its_wait_ends():
  executor, order = async_lib.SerialExecutor(), []

  def call(n):
    if n < 2000:
      executor.submit(call, n + 1)
      executor.put(lambda: order.append(('put', n)))
    order.append(n)

  executor.submit(call, 0)
  while len(order) < 4001:
    executor.wait()
  assert order[:5] == [0, 1, ('put', 0), 2, ('put', 1)]
  wait = executor.submit(executor.wait, lambda: order.append('within'))
  wait.result(TIMEOUT)
  assert order[-1] == 'within'


_PROGRAM = """
import atexit
import os
import sys
import time
from jaxline.base import async_lib

def late():
  try:
    first.submit(print, 'late')
  except RuntimeError as e:
    print(e)

def poll():
  time.sleep(0.01)
  second.submit(poll)

def work():
  time.sleep(0.3)
  first.wait(lambda: print('first'))
  print('second')

atexit.register(late)
first, second = (async_lib.SerialExecutor(name) for name in ('a', 'b'))
if not (child := os.fork()):
  sys.exit()  # It inherits the handlers, and no thread to wait for.
os.waitpid(child, 0)
for executor in second, first, second:
  executor.submit(int).result()
second.submit(work)
second.submit(poll)
atexit.register(first.submit, print, 'early')
"""


def test_the_end_of_the_process_ends_all_executors_together():
  done = processes.run('-c', _PROGRAM)
  forked, *lines, last = done.stdout.splitlines()
  assert lines == ['early', 'first', 'second']
  for said in forked, last:
    assert 'The background thread a has stopped' in said
  assert done.returncode == 0


@pytest.mark.parametrize('error', [None, ValueError, SystemExit])
def test_py_prefetch_gives_what_its_thread_reads_in_order(error):
  def read(count):
    built_on = threading.current_thread().name
    for i in range(count):
      yield i, built_on, threading.current_thread().name
    if error:
      raise error('bad')

  for count, buffer_size in (0, 2), (1, 5), (100, 2), (100, 5):
    prefetched = async_lib.py_prefetch(
      lambda n=count: read(n), buffer_size, thread_name='reader'
    )
    expected = [(i, 'reader', 'reader') for i in range(count)]
    assert [*itertools.islice(prefetched, count)] == expected
    with pytest.raises(error or StopIteration) as info:
      next(prefetched)
    assert _frames(info.value)[-1] == 'read' or not error
  with pytest.raises(ValueError, match='buffer_size'):
    async_lib.py_prefetch(lambda: (), buffer_size=1)


class _Endless:
  """Counts for ever, and says when it was closed."""

  def __init__(self):
    self.read, self.closed = threading.Semaphore(0), threading.Event()
    self.close = self.closed.set

  def __iter__(self):
    return self

  def __next__(self):
    self.read.release()
    return 0


@pytest.mark.parametrize(('is_dropped', 'buffer_size'), [(0, 2), (1, 4)])
def test_py_prefetch_ends_early(is_dropped, buffer_size):
  endless = _Endless()
  prefetched = async_lib.py_prefetch(
    lambda: endless, buffer_size, thread_name='early'
  )
  next(prefetched)
  for _ in range(buffer_size + 1):  # Until it is blocked on a full buffer.
    assert endless.read.acquire(timeout=TIMEOUT)
  # One is out; `buffer_size` are held.
  assert not endless.read.acquire(timeout=0.1)
  reads = lambda: 'early' in {t.name for t in threading.enumerate()}
  assert reads()
  if is_dropped:
    del prefetched
  else:
    prefetched.close()
  assert not reads()
  assert endless.closed.is_set()


_LEFT = """
import itertools
import sys
import threading
from jaxline.base import async_lib

def read():
  generator = async_lib.py_prefetch(itertools.count)
  next(generator)
  return generator

cycle, mapped = [read()], map(str, read())
cycle.append(cycle)
unread = async_lib.py_prefetch(itertools.count)
sys.modules['of_a_module'] = read()
threading.Thread(target=lambda: [*read()], daemon=True).start()
try:
  for _ in read():
    sys.exit(3)
finally:
  print('end')
"""


def test_the_end_of_the_process_ends_what_reads_ahead():
  done = processes.run('-c', _LEFT)
  assert (done.stdout, done.stderr, done.returncode) == ('end\n', '', 3)
