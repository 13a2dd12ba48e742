"""Promise: data is exact, with every input, over epochs, hosts and kills.

Each evaluation example counts once, an epoch of training has each record once,
and a resumed run reads on as if nothing had happened. Every input joins by an
entry in `SOURCES`, which says what it promises, and is tried with random sizes,
hosts, epochs and points of a kill. The file of a single input tests what is
its own.
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

from examples.pax.inputs import tfdata
from jaxline import inputs as inputs_lib
from jaxline.inputs import base
from jaxline.inputs import grain
from jaxline.inputs import iterable
from jaxline.inputs import mixture
from jaxline.inputs import text
from tests import sources

# The same examples each time: a failure is found again, and the time bounded.
SETTINGS = hypothesis.settings(
  derandomize=True,
  max_examples=12,
  deadline=None,
  database=None,
  suppress_health_check=list(hypothesis.HealthCheck),
)
ONE_EPOCH = sources.ONE_EPOCH
TRAINING = {'is_training': True}


@dataclasses.dataclass(frozen=True)
class Source:
  """How to make an input, and what it promises."""

  # Called with (num_records, **fields of the input); its records are known by
  # the numbers 0 to num_records - 1.
  make: Callable[..., base.BaseInput]
  # Returns a batch's numbers, integers [B].
  records: Callable[[dict[str, Any]], np.ndarray] = lambda batch: batch['x']
  # Whether each host reads the records whose number modulo the hosts is its
  # own, and goes on by itself; else there is one global order.
  is_sharded: bool = False
  has_epochs: bool = True  # Whether an epoch is each record once.
  evaluates: bool = True  # Whether it can be read for one epoch.
  needs: str = 'numpy'  # The package without which it is skipped.


def make_grain(size, **fields):
  records = [{'x': np.int64(i)} for i in range(size)]
  dataset = grain_library.MapDataset.source(records)
  return grain.GrainInput(dataset=dataset, **fields)


class Dealt(sources.Counted):
  """An iterator of a host's batches; it changes its own state in place."""

  def __init__(self, numbers, rows):
    super().__init__()
    self.numbers, self.rows = numbers, rows

  def __next__(self):
    places = self.state['next'] + np.arange(self.rows)
    self.state['next'] += self.rows
    return {'x': self.numbers[places % len(self.numbers)]}


def make_iterator(size, **fields):
  """Makes an input of an object that is only an iterator with a state."""
  index, count = fields['infeed_host_index'], fields['num_infeed_hosts']
  batches = Dealt(np.arange(size)[index::count], fields['batch_size'])
  shard = base.Shard(index, count)
  return iterable.as_input(batches, is_training=True, shard=shard)


def make_text(size, packing, **fields):
  tokens = [[text.DOCUMENT_TOKEN, i] for i in range(size)]
  documents = text.Documents(
    names=tuple(map(str, range(size))),
    tokens=np.array(tokens, np.uint16).ravel(),
    starts=np.arange(0, 2 * size, 2),
    sha256='',
    num_bytes=size,
  )
  # A row is a document: in training, the circle of tokens may begin in one.
  length = 1 if packing == 'padded' else 2
  return text.TextInput(
    documents=documents, length=length, packing=packing, **fields
  )


def make_mixture(size, **fields):
  seed = fields.pop('input_random_seed')
  kept = {key: x for key, x in fields.items() if key != 'batch_size'}
  children = {
    name: sources.Records(
      size=size + i, batch_size=i + 2, input_random_seed=seed, **kept
    )
    for i, name in enumerate('abc')
  }
  weights = {'a': 0.5, 'b': 0.2, 'c': 0.3}
  return mixture.MixtureInput(inputs=children, weights=weights, **fields)


def make_tensors(size, cls, **fields):
  import tensorflow as tf

  def dataset(seed, host_index=0, num_hosts=1):
    mine = tf.data.Dataset.range(host_index, size, num_hosts)
    return mine.shuffle(7, seed=seed).map(lambda x: {'x': x})

  return cls(dataset=dataset, **fields)


SOURCES = {
  'indexed_threads': Source(
    lambda size, **fields: sources.Records(size=size, num_threads=2, **fields)
  ),
  'arrays': Source(
    lambda size, **fields: inputs_lib.arrays({'x': np.arange(size)}, **fields)
  ),
  'grain': Source(make_grain),
  'iterator': Source(make_iterator, is_sharded=True, evaluates=False),
  **{
    f'text_{packing}': Source(
      functools.partial(make_text, packing=packing),
      # The other label is the document token, which is larger.
      lambda batch: batch['labels'].min(axis=1),
    )
    for packing in text.PACKINGS
  },
  'mixture': Source(make_mixture, has_epochs=False, evaluates=False),
  'tf_data': Source(
    functools.partial(make_tensors, cls=tfdata.TfDataInput), needs='tensorflow'
  ),
  'tf_data_sharded': Source(
    functools.partial(make_tensors, cls=tfdata.ShardedTfDataInput),
    is_sharded=True,
    needs='tensorflow',
  ),
}

sizes = st.integers(1, 30)
batch_sizes = st.integers(1, 6)
host_counts = st.integers(1, 4)
seeds = st.integers(0, 2**32)
steps = st.integers(0, 12)
# Of each: rows a batch, hosts, batches, and those after the last save.
lives = st.lists(
  st.tuples(batch_sizes, host_counts, steps, st.integers(0, 3)),
  min_size=2,
  max_size=3,
)


def promise(*arguments, **conditions):
  """Marks a test of each source of which the conditions are true.

  It is called with the name of the source, and with a tuple of the numbers of
  its records, of rows a batch, of hosts, and of what the arguments give.
  """
  names = [
    pytest.param(
      name,
      marks=pytest.mark.skipif(
        importlib.util.find_spec(source.needs) is None, reason=source.needs
      ),
    )
    for name, source in SOURCES.items()
    if all(getattr(source, k) == v for k, v in conditions.items())
  ]
  given = hypothesis.given(
    drawn=st.tuples(sizes, batch_sizes, host_counts, *arguments)
  )
  return lambda test: pytest.mark.parametrize('name', names)(
    SETTINGS(given(test))
  )


def make_hosts(name, size, hosts, **fields):
  source = SOURCES[name]
  if source.is_sharded:
    hosts = min(hosts, size)  # Each has a part of its own.
  return [
    source.make(size, num_infeed_hosts=hosts, infeed_host_index=host, **fields)
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


@promise(seeds, st.booleans(), evaluates=True)
def test_one_epoch_is_the_dataset_once(name, drawn):
  size, batch_size, hosts, seed, twice = drawn
  fields = {'batch_size': batch_size, 'input_random_seed': seed, **ONE_EPOCH}
  inputs = make_hosts(name, size, hosts, **fields)
  for _ in range(1 + twice):
    batches = [list(part.eval_batches()) for part in inputs]
    count = -(-size // (batch_size * len(inputs)))
    assert {len(part) for part in batches} == {count}
    seen, weight = [], 0.0
    for batch in (batch for part in batches for batch in part):
      records = np.asarray(SOURCES[name].records(batch))
      assert records.shape == (batch_size,)
      weights = batch['weights'].reshape(batch_size, -1).max(1)  # Of rows.
      seen += records[weights > 0].tolist()
      weight += float(weights.sum())
    assert sorted(seen) == list(range(size))
    assert weight == size
  close(inputs)


@promise(st.integers(1, 3), seeds, has_epochs=True)
def test_training_sees_each_record_once_an_epoch(name, drawn):
  size, batch_size, hosts, epochs, seed = drawn
  is_sharded = SOURCES[name].is_sharded
  fields = {'batch_size': batch_size, 'input_random_seed': seed, **TRAINING}
  inputs = make_hosts(name, size, hosts, **fields)
  if not is_sharded:
    number = -(-epochs * size // (batch_size * hosts))
    given = flat(take(name, inputs, number))[: epochs * size]
    for epoch in range(epochs):
      part = given[epoch * size : (epoch + 1) * size]
      assert sorted(part) == list(range(size))
  else:
    for host, part in enumerate(inputs):
      mine = range(size)[host :: len(inputs)]
      number = -(-epochs * len(mine) // batch_size)
      given = flat(take(name, [part], number))[: epochs * len(mine)]
      assert collections.Counter(given) == dict.fromkeys(mine, epochs)
  close(inputs)


@promise(lives, seeds)
def test_resumed_is_uninterrupted(name, drawn):
  """Also on other hosts with other batches, where the order is global."""
  size, batch_size, hosts, lives, seed = drawn
  fields = {'input_random_seed': seed, **TRAINING}
  is_sharded = SOURCES[name].is_sharded
  if is_sharded:
    lives = [(batch_size, hosts, *rest) for _, _, *rest in lives]
  given, states = [], None
  for batch_size, hosts, number, wasted in lives:
    inputs = make_hosts(name, size, hosts, batch_size=batch_size, **fields)
    if states is not None:
      take(name, inputs, wasted)  # An input that has read may be set, too.
      own = states if is_sharded else [*states] * len(inputs)
      for part, state in zip(inputs, own, strict=True):
        part.set_state(state)
    given += take(name, inputs, number)
    states = [part.get_state() for part in inputs]
    if not is_sharded:  # It is that of any number of hosts.
      states = {*states}
      assert len(states) == 1
    take(name, inputs, wasted)  # Steps behind the last save are lost.
    close(inputs)
  if is_sharded:
    straight = make_hosts(name, size, hosts, batch_size=batch_size, **fields)
    assert given == take(name, straight, len(given))
  else:
    straight = make_hosts(name, size, 1, batch_size=1, **fields)
    assert flat(given) == flat(take(name, straight, len(flat(given))))
  close(straight)
