"""Batches read ahead: positions, waits, stalls, errors; in training too."""

import dataclasses
import gc
import re
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from jaxline import goodput
from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import infeed
from tests.experiments import regression

KEY = np.array([0, 7], np.uint32)
ROWS = 16


@dataclasses.dataclass(kw_only=True, eq=False)
class Counting(base.BaseInput):
  """Batches of one number each, counted up."""

  end: int = 1 << 30

  def __post_init__(self):
    super().__post_init__()
    self.number = 0
    self.closed = 0

  def get_next(self):
    if self.number == self.end:
      raise StopIteration
    self.number += 1
    return base.Batch(x=np.full(self.batch_size, self.number - 1))

  def position(self):
    return self.number

  def set_position(self, position):
    self.number = position

  def where(self):
    return f'file a.txt, record {self.number}'

  def close(self):
    self.closed += 1


def counting(**fields):
  return Counting(batch_size=2, is_training=True, **fields)


def value(batch):
  return int(batch['x'][0])


@pytest.fixture(autouse=True)
def others():
  """Leaves out the threads of tests before this one."""
  OTHERS.clear()
  OTHERS.update(threading.enumerate())


OTHERS = set()


def threads():
  return [t for t in {*threading.enumerate()} - OTHERS if t.name == 'infeed']


# Positions.


@pytest.mark.parametrize('buffer_size', [2, 3, 7])
def test_the_mark_is_that_behind_the_batch(buffer_size):
  source = counting()
  feed = infeed.Infeed(source, lambda x: x, buffer_size=buffer_size)
  marks = []
  for number in range(20):
    assert value(next(feed)) == number
    marks.append(feed.mark)
  feed.close()
  for number, mark in enumerate(marks):
    resumed = counting()
    resumed.set_state(source.state_of(mark))
    assert value(next(resumed)) == number + 1


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
  before = goodput.spent()['input wait']
  with goodput.run(), goodput.measure('steps'):
    clock.steps(4, wait=0.25, takes=1)
    clock.steps(4, wait=0.00005, takes=1)  # It was ready.
  assert goodput.spent()['input wait'] - before == 1


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


# Errors.


def test_an_error_names_the_source_and_the_place():
  class Failing(Counting):
    def get_next(self):
      if self.number == 2:
        raise KeyError('no such word')
      return super().get_next()

  feed = infeed.Infeed(
    Failing(batch_size=2, name='books', is_training=True), lambda x: x
  )
  assert [value(next(feed)) for _ in range(2)] == [0, 1]
  with pytest.raises(KeyError, match='no such word') as caught:
    next(feed)
  assert caught.value.__notes__ == [
    'It was books, reading file a.txt, record 2.'
  ]
  assert 'get_next' in [t.name for t in caught.traceback]


# The end of it.


@pytest.mark.parametrize('num_read', [0, 1, 5])
def test_close_ends_the_thread_and_closes_the_source(num_read):
  source = counting()
  feed = infeed.Infeed(source, lambda x: x)
  for _ in range(num_read):
    next(feed)
  feed.close()
  assert source.closed >= 1
  assert not threads()


def test_an_experiment_that_is_dropped_ends_its_thread():
  experiment = make()
  steps(experiment, 2)  # Outside of a training loop, which would close it.
  source = weakref.ref(experiment.train_feed._infeed.source)
  experiment.train_feed.close()
  assert source() is None  # It may have workers; its position is kept.
  steps(experiment, 1)
  assert threads()
  del experiment
  gc.collect()
  deadline = time.monotonic() + 5
  while threads() and time.monotonic() < deadline:
    time.sleep(0.01)
  assert not threads()


# In training.


@dataclasses.dataclass(kw_only=True, eq=False)
class Examples(indexed.IndexedInput):
  """Rows of the regression's data."""

  n: int = 50

  def num_records(self):
    return self.n

  def read(self, records, epochs):
    data = regression.examples(0, self.n)
    return base.Batch({name: x[records] for name, x in data.items()})


class Experiment(regression.Regression):
  """The regression, on inputs of ours."""

  train_fields = {}
  eval_fields = {'reset_for_eval': True}

  def train_input(self):
    fields = {'batch_size': ROWS, 'is_training': True, **self.train_fields}
    return Examples(**fields)

  def eval_input(self):
    return Examples(**{'batch_size': ROWS, **self.eval_fields})


def with_fields(train=None, evaluation=None):
  class Chosen(Experiment):
    train_fields = train or {}
    eval_fields = evaluation or Experiment.eval_fields

  return Chosen


def make(cls=Experiment, mode='train', run_config=None):
  return cls(mode, KEY, run_config=run_config)


def steps(experiment, num_steps):
  rng = experiment.initialize_train_step_rng(jax.random.PRNGKey(1))
  rows = []
  for step in range(num_steps):
    scalars = experiment.step(global_step=step, rng=rng, writer=None)
    rows.append({k: np.asarray(v).item() for k, v in scalars.items()})
  return rows


def losses(rows):
  return [row['loss'] for row in rows]


# An epoch is 50 / 16 batches. To start processes takes seconds.
@pytest.mark.parametrize(
  ('after', 'num_workers'),
  [
    (1, 0),
    (3, 0),
    (4, 0),
    pytest.param(3, 2, marks=pytest.mark.process),
  ],
)
def test_a_resumed_experiment_sees_what_follows(after, num_workers):
  straight = make()
  expected = steps(straight, 7)
  straight.train_feed.close()
  first = make(with_fields({'num_workers': num_workers}))
  rows = steps(first, after)
  saved = jax.device_get(first.snapshot_state())
  first.train_feed.close()
  assert isinstance(saved['input'], bytes)
  resumed = make()
  resumed.restore_from_snapshot(saved)
  rows += steps(resumed, 7 - after)
  resumed.train_feed.close()
  assert losses(rows) == losses(expected)


def test_a_config_sets_buffer_and_patience(monkeypatch):
  made = []

  class Spy(infeed.Infeed):
    def __init__(self, *args, buffer_size, stall_secs, **kwargs):
      made.append((buffer_size, stall_secs))
      super().__init__(*args, **kwargs)

  monkeypatch.setattr(infeed, 'Infeed', Spy)
  config = regression.get_config(2)
  config.update(infeed_buffer_size=5, infeed_stall_secs=9.0)
  regression.train_steps(make(run_config=config), 1)
  assert made == [(5, 9.0)]


@pytest.mark.parametrize(
  ('mode', 'fields', 'got'),
  [
    ('train', {'is_training': False}, (False, 0, 1)),
    ('eval', {'is_training': True}, (True, 0, 1)),
  ],
)
def test_an_input_that_cannot_be_meant_is_refused(mode, fields, got):
  run = regression.evaluate if mode == 'eval' else lambda x: steps(x, 1)
  with pytest.raises(ValueError, match=re.escape(str(got))):
    run(make(with_fields(fields, fields), mode))


# Evaluation.


def test_an_evaluation_reads_ahead_and_closes_its_input():
  closed, read_on = [], set()

  class Watched(Examples):
    def read(self, records, epochs):
      read_on.add(threading.current_thread().name)
      return super().read(records, epochs)

    def close(self):
      super().close()
      closed.append(self)

  class Watching(Experiment):
    def eval_input(self):
      return Watched(batch_size=ROWS, reset_for_eval=True)

  regression.evaluate(make(Watching, 'eval'))
  assert closed
  assert read_on == {'eval_infeed'}
  assert 'eval_infeed' not in {t.name for t in threading.enumerate()}


def test_an_evaluation_that_stalls_is_told_of(caplog):
  caplog.set_level('WARNING')

  class Slow(Experiment):
    def eval_input(self):
      time.sleep(0.7)
      yield regression.examples(0, ROWS)

  config = regression.get_config(0)
  config.infeed_stall_secs = 0.2
  experiment = make(Slow, 'eval', run_config=config)
  experiment.evaluate(global_step=0, rng=KEY, writer=None)
  assert 'The evaluation has waited 0 s for a batch: a gen' in caplog.text
