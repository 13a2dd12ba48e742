"""The contract of inputs: random sizes, hosts, epochs, points of a kill.

An input joins by an entry in `SOURCES`. `test_every_promise_is_kept` runs
`show.check`, which users run on their own data; the others know each record.
"""

import collections
from collections.abc import Callable
import dataclasses
import functools
import importlib.util
from typing import Any

import grain as grain_library
import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxline.inputs import base
from jaxline.inputs import grain
from jaxline.inputs import indexed
from jaxline.inputs import multi
from jaxline.inputs import show
from jaxline.inputs import synthetic
from jaxline.inputs import text
from jaxline.inputs import tfdata

# The same examples each time: a failure is found again, and the time bounded.
SETTINGS = hypothesis.settings(
  derandomize=True,
  deadline=None,
  database=None,
  max_examples=60,
  suppress_health_check=list(hypothesis.HealthCheck),
)
# TensorFlow builds a graph for each epoch of each input.
SLOW = (pytest.mark.slow, pytest.mark.timeout(1800))
ONE_EPOCH = {'reset_for_eval': True, 'eval_loop_num_batches': None}


@dataclasses.dataclass(frozen=True)
class Source:
  """How to make an input, and what it promises.

  Attributes:
    make: called with (num_records, **fields of the input); its records are
      known by the numbers 0 to num_records - 1.
    records: returns a batch's numbers, integers [B].
    shard: of an input whose maker deals it out, called with (num_records,
      hosts, host): the numbers that host reads in an epoch; None for one global
      order.
    one_epoch_hosts: whether several hosts may evaluate on one epoch.
    saves_position: whether it can be resumed.
    has_epochs: whether an epoch is the dataset, each record once.
  """

  make: Callable[..., base.BaseInput]
  records: Callable[[base.Batch], np.ndarray] = lambda batch: batch['x']
  shard: Callable[[int, int, int], Any] | None = None
  one_epoch_hosts: bool = True
  saves_position: bool = True
  has_epochs: bool = True


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(indexed.IndexedInput):
  """Gives the numbers of its records."""

  size: int

  def num_records(self):
    return self.size

  def read(self, records, epochs):
    del epochs
    return base.Batch(x=records)


def make_numbers(size, **fields):
  return Numbers(size=size, **fields)


def listed(size):
  return [{'x': np.int64(i)} for i in range(size)]


def make_stream(size, **fields):
  def stream(host_index, num_hosts, epoch):
    mine = np.array(every_nth(size, num_hosts, host_index))
    # Grain's own shuffle takes milliseconds a record where there are so few.
    mine = np.random.default_rng(epoch).permutation(mine)
    return grain_library.MapDataset.source(
      [{'x': x} for x in mine]
    ).to_iter_dataset(
      grain_library.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    )

  return grain.GrainInput(dataset=stream, **fields)


def make_generator(size, **fields):
  batch_size = fields['batch_size']
  repeat = not fields.get('reset_for_eval', False)

  def batches(host_index, num_hosts):
    mine = every_nth(size, num_hosts, host_index)
    rows = []
    while True:
      for number in mine:
        rows.append(number)
        if len(rows) == batch_size:
          yield {'x': np.array(rows)}
          rows = []
      if not repeat:
        break
    if rows:
      yield {'x': np.array(rows)}

  fields.pop('input_random_seed', None)
  return base.from_generator(batches, **fields)


def make_text(size, packing, **fields):
  tokens = [[text.DOCUMENT_TOKEN, i] for i in range(size)]
  documents = text.Documents(
    names=tuple(map(str, range(size))),
    tokens=np.array(tokens, np.uint16).ravel(),
    starts=np.arange(0, 2 * size, 2),
    sha256='',
    num_files=size,
    num_bytes=size,
  )
  # A row is a document: in training, the circle of tokens may begin in one.
  length = 1 if packing == 'padded' else 2
  return text.TextInput(
    documents=documents, length=length, packing=packing, **fields
  )


class NumberedSynthetic(synthetic.SyntheticInput):
  """Gives the numbers of its records too."""

  def read(self, records, epochs):
    return base.Batch(super().read(records, epochs), x=records)


def make_synthetic(size, **fields):
  return NumberedSynthetic(
    kind='random', length=4, size=size, shuffle=True, **fields
  )


def make_mixture(size, **fields):
  seed = fields.pop('input_random_seed')
  hosts = {k: fields[k] for k in ('num_infeed_hosts', 'infeed_host_index')}
  children = {
    name: make_numbers(
      size + i,
      batch_size=i + 2,
      input_random_seed=seed,
      is_training=fields['is_training'],
      **hosts,
    )
    for i, name in enumerate('abc')
  }
  weights = {'a': 0.5, 'b': 0.2, 'c': 0.3}
  return multi.MixtureInput(inputs=children, weights=weights, **fields)


def make_tensors(size, **fields):
  import tensorflow as tf

  def dataset(seed):
    return (
      tf.data.Dataset.range(size).shuffle(7, seed=seed).map(lambda x: {'x': x})
    )

  return tfdata.TfDataInput(dataset=dataset, **fields)


def make_sharded_tensors(size, **fields):
  import tensorflow as tf

  def dataset(seed, host_index, num_hosts):
    mine = list(every_nth(size, num_hosts, host_index))
    dataset = tf.data.Dataset.from_tensor_slices({'x': mine})
    return dataset.shuffle(7, seed=seed)

  return tfdata.ShardedTfDataInput(dataset=dataset, **fields)


def every_nth(size, hosts, host):
  """Returns a host's part; where not all have one, all read the same."""
  return range(size)[host::hosts] if size >= hosts else range(size)


SOURCES = {
  'indexed': Source(make_numbers),
  'indexed_threads': Source(
    lambda size, **fields: make_numbers(size, num_threads=2, **fields)
  ),
  'grain_list': Source(
    lambda size, **fields: grain.GrainInput(dataset=listed(size), **fields)
  ),
  'grain_map_dataset': Source(
    lambda size, **fields: grain.GrainInput(
      dataset=grain_library.MapDataset.source(listed(size)), **fields
    )
  ),
  'grain_stream': Source(make_stream, shard=every_nth, one_epoch_hosts=False),
  'generator': Source(
    make_generator, shard=every_nth, one_epoch_hosts=False, saves_position=False
  ),
  **{
    f'text_{packing}': Source(
      functools.partial(make_text, packing=packing),
      # The other label is the document token, which is larger.
      lambda batch: batch['labels'].min(axis=1),
    )
    for packing in text.PACKINGS
  },
  'synthetic': Source(make_synthetic),
  'mixture': Source(make_mixture, has_epochs=False),
}
if importlib.util.find_spec('tensorflow'):
  SOURCES['tf_data'] = Source(make_tensors)
  SOURCES['tf_data_sharded'] = Source(
    make_sharded_tensors, shard=every_nth, one_epoch_hosts=False
  )

sizes = st.integers(1, 30)
batch_sizes = st.integers(1, 6)
host_counts = st.integers(1, 4)
seeds = st.integers(0, 2**32)
steps = st.integers(0, 12)


def those(**conditions):
  """Marks a test with the sources of which this is true."""
  return pytest.mark.parametrize(
    'name',
    [
      pytest.param(name, marks=SLOW if name.startswith('tf_data') else ())
      for name, source in SOURCES.items()
      if all(getattr(source, key) == value for key, value in conditions.items())
    ],
  )


def make_hosts(name, size, hosts, **fields):
  return [
    SOURCES[name].make(
      size, num_infeed_hosts=hosts, infeed_host_index=host, **fields
    )
    for host in range(hosts)
  ]


def take(name, inputs, number):
  """Returns the records of the next batches: [number][host][rows]."""
  records = SOURCES[name].records
  return [
    [np.asarray(records(next(part))).tolist() for part in inputs]
    for _ in range(number)
  ]


def flat(batches):
  return [record for batch in batches for rows in batch for record in rows]


def close(inputs):
  for part in inputs:
    part.close()


@those()
@hypothesis.settings(SETTINGS, max_examples=15)
@hypothesis.given(sizes, batch_sizes, host_counts, seeds, st.booleans())
def test_every_promise_is_kept(
  name, size, batch_size, hosts, seed, is_training
):
  source = SOURCES[name]
  is_training |= not source.has_epochs
  hosts = min(hosts, size)  # Each has a part of its own.
  if not is_training and not source.one_epoch_hosts:
    hosts = 1
  fields = {'is_training': True} if is_training else dict(ONE_EPOCH)
  if source.saves_position:
    fields['input_random_seed'] = seed

  def make():
    host, count = base.this_host()
    return source.make(
      size,
      batch_size=batch_size,
      num_infeed_hosts=count,
      infeed_host_index=host,
      **fields,
    )

  report = show.check(make, num_hosts=hosts, num_batches=6, seconds=0)
  assert report.ok, report
  promises = {'rows', 'resume'} | ({'epoch'} if not is_training else set())
  if hosts > 1 and make().ANY_NUMBER_OF_HOSTS:
    promises.add('position')
  assert {f.name for f in report.findings} == promises


@those(has_epochs=True)
@SETTINGS
@hypothesis.given(sizes, batch_sizes, host_counts, seeds, st.booleans())
def test_one_epoch_is_the_dataset_once(
  name, size, batch_size, hosts, seed, twice
):
  if not SOURCES[name].one_epoch_hosts:
    hosts = 1
  inputs = make_hosts(
    name,
    size,
    hosts,
    batch_size=batch_size,
    input_random_seed=seed,
    **ONE_EPOCH,
  )
  for _ in range(1 + twice):
    batches = [list(part.eval_batches()) for part in inputs]
    assert len({len(part) for part in batches}) == 1
    seen, weight = [], 0.0
    for batch in (batch for part in batches for batch in part):
      records = np.asarray(SOURCES[name].records(batch))
      assert records.shape == (batch_size,)
      weights = batch.get('weights', np.ones(batch_size, np.float32))
      weights = weights.reshape(batch_size, -1).max(1)  # Of rows.
      seen += records[weights > 0].tolist()
      weight += float(weights.sum())
    assert sorted(seen) == list(range(size))
    assert weight == size
  close(inputs)


@those(has_epochs=True)
@SETTINGS
@hypothesis.given(sizes, batch_sizes, host_counts, st.integers(1, 3), seeds)
def test_training_sees_each_record_once_an_epoch(
  name, size, batch_size, hosts, epochs, seed
):
  shard = SOURCES[name].shard
  fields = {'batch_size': batch_size, 'is_training': True}
  if SOURCES[name].saves_position:
    fields['input_random_seed'] = seed
  inputs = make_hosts(name, size, hosts, **fields)
  if shard is None:
    number = -(-epochs * size // (batch_size * hosts))
    given = flat(take(name, inputs, number))[: epochs * size]
    for epoch in range(epochs):
      part = given[epoch * size : (epoch + 1) * size]
      assert sorted(part) == list(range(size))
  else:
    for host, part in enumerate(inputs):
      mine = shard(size, hosts, host)
      number = -(-epochs * len(mine) // batch_size)
      given = flat(take(name, [part], number))[: epochs * len(mine)]
      assert collections.Counter(given) == dict.fromkeys(mine, epochs)
  close(inputs)


@those(saves_position=True)
@SETTINGS
@hypothesis.given(
  sizes, batch_sizes, host_counts, seeds, steps, steps, st.booleans()
)
def test_resumed_is_uninterrupted(
  name, size, batch_size, hosts, seed, killed_at, wasted, peeked
):
  fields = {
    'batch_size': batch_size,
    'is_training': True,
    'input_random_seed': seed,
  }
  straight = make_hosts(name, size, hosts, **fields)
  expected = take(name, straight, killed_at + 6)
  first = make_hosts(name, size, hosts, **fields)
  assert take(name, first, killed_at) == expected[:killed_at]
  if peeked:
    for part in first:
      part.peek_padded()
  states = [part.get_state() for part in first]
  take(name, first, wasted)  # Steps behind the last save are lost.
  second = make_hosts(name, size, hosts, **fields)
  take(name, second, wasted)
  for part, state in zip(second, states, strict=True):
    part.set_state(state)
  assert take(name, second, 6) == expected[killed_at:]
  assert [part.get_state() for part in second] == [
    part.get_state() for part in straight
  ]
  close(straight + first + second)


@those(saves_position=True, one_epoch_hosts=True, has_epochs=True)
@SETTINGS
@hypothesis.given(sizes, batch_sizes, host_counts, seeds, steps)
def test_one_epoch_resumed_is_uninterrupted(
  name, size, batch_size, hosts, seed, killed_at
):
  def read(inputs):
    return [
      [np.asarray(SOURCES[name].records(b)).tolist() for b in part]
      for part in inputs
    ]

  fields = {'batch_size': batch_size, 'input_random_seed': seed, **ONE_EPOCH}
  straight = make_hosts(name, size, hosts, **fields)
  expected = read(straight)
  killed_at = min(killed_at, len(expected[0]))
  first = make_hosts(name, size, hosts, **fields)
  take(name, first, killed_at)
  second = make_hosts(name, size, hosts, **fields)
  for old, new in zip(first, second, strict=True):
    new.set_state(old.get_state())
  assert read(second) == [part[killed_at:] for part in expected]
  close(straight + first + second)


@those(saves_position=True, shard=None)
@SETTINGS
@hypothesis.given(
  sizes, batch_sizes, host_counts, batch_sizes, host_counts, seeds, steps
)
def test_resumed_by_other_hosts_is_uninterrupted(
  name, size, batch_size, hosts, other_batch_size, other_hosts, seed, killed_at
):
  fields = {'is_training': True, 'input_random_seed': seed}
  total = killed_at * batch_size * hosts + 3 * other_batch_size * other_hosts
  alone = make_hosts(name, size, 1, batch_size=1, **fields)
  expected = flat(take(name, alone, total))
  first = make_hosts(name, size, hosts, batch_size=batch_size, **fields)
  given = flat(take(name, first, killed_at))
  states = {part.get_state() for part in first}
  assert len(states) == 1
  second = make_hosts(
    name, size, other_hosts, batch_size=other_batch_size, **fields
  )
  for part in second:
    part.set_state(next(iter(states)))
  given += flat(take(name, second, 3))
  assert given == expected
  close(alone + first + second)
