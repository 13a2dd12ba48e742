"""Tests of tf.data inputs: uneven parts, ends of epochs, determinism.

`tests/promises/test_inputs.py` has the promises that all inputs share, and
`lingvo_test.py` tests which tensors become batches.
"""

import itertools
import os
import time

import numpy as np
import pytest

from examples.pax.inputs import tfdata
from jaxline.metrics import console

tf = pytest.importorskip('tensorflow')

ONE_EPOCH = {'reset_for_eval': True, 'eval_loop_num_batches': None}


def numbers(count):
  """Returns a function that gives {'x': 0}, ..., {'x': count - 1}."""
  return lambda seed: tf.data.Dataset.range(count).map(lambda x: {'x': x})


def parts(*sizes):
  """Returns a function that gives host h sizes[h] numbers from 100 h on."""

  def dataset(seed, host_index, num_hosts):
    assert num_hosts == len(sizes)
    # tf.data does not know the number of records after a filter.
    return (
      tf.data.Dataset.range(100 * host_index, 100 * host_index + 50)
      .filter(lambda x: x < 100 * host_index + sizes[host_index])
      .map(lambda x: {'x': x})
    )

  return dataset


def hosts(count, cls=tfdata.TfDataInput, **fields):
  return [
    cls(num_infeed_hosts=count, infeed_host_index=index, **fields)
    for index in range(count)
  ]


def train(**fields):
  return tfdata.TfDataInput(is_training=True, **fields)


def evaluate(**fields):
  return tfdata.TfDataInput(**ONE_EPOCH, **fields)


def read(inputs, num_batches):
  """Returns `x` of `num_batches` global batches, as lists."""
  return [
    np.concatenate([next(host)['x'] for host in inputs]).tolist()
    for _ in range(num_batches)
  ]


# Division among hosts.


def test_shuffling_gives_each_epoch_an_order_of_its_own():
  def orders(**fields):
    inputs = train(
      dataset=numbers(12), batch_size=4, shuffle_buffer_size=12, **fields
    )
    rows = list(itertools.chain(*read([inputs], 6)))
    return rows[:12], rows[12:]

  first, second = epochs = orders()
  assert sorted(first) == sorted(second) == list(range(12))
  assert first != second
  assert orders() == epochs != orders(input_random_seed=1)


def test_one_epoch_of_parts_ends_with_the_largest():
  sizes = (2, 7, 0)

  def make():
    return hosts(
      len(sizes),
      tfdata.ShardedTfDataInput,
      dataset=parts(*sizes),
      batch_size=2,
      **ONE_EPOCH,
    )

  for host, (source, size) in enumerate(zip(make(), sizes, strict=True)):
    rows = [(100 * host + i, 1) for i in range(size)] + [(0, 0)] * (8 - size)
    states = [source.get_state()]
    for _ in range(2):
      batches = []
      for batch in source.eval_batches():
        batches += zip(batch['x'].tolist(), batch['weights'], strict=True)
        states.append(source.get_state())
      assert batches == rows
    for given, state in enumerate(states[:5]):
      resumed = make()[host]
      resumed.set_state(state)
      assert len(list(resumed)) == 4 - given


# Resuming.


def test_a_state_of_other_data_or_another_order_is_refused():
  def make(**fields):
    fields = {'data_version': 'a', 'shuffle_buffer_size': 4, **fields}
    return train(dataset=numbers(5), batch_size=2, **fields)

  state = make().get_state()
  make().set_state(state)
  for fields, message in (
    ({'data_version': 'b'}, "data_version is 'a' in the state and 'b' here"),
    ({'shuffle_buffer_size': 5}, 'shuffle_buffer_size is 4'),
    ({'input_random_seed': 3}, 'seed is 0 in the state and 3 here'),
  ):
    with pytest.raises(ValueError, match=message):
      make(**fields).set_state(state)


def test_seeds_of_epochs_never_change():
  # A change would make saved positions point to different records.
  seeds = [tfdata.derive_seed(9876, epoch) for epoch in (0, 2)]
  assert seeds == [1015467176, 578776331]


def slowly(x, stateful=True):
  """Returns `x`. The first of every eight records takes longest."""

  def work(x):
    time.sleep((7 - x % 8) / 1000)
    return x

  x = tf.numpy_function(work, [x], tf.int64, stateful=stateful)
  return tf.ensure_shape(x, [])


def ordered(seed):
  options = tf.data.Options()
  options.deterministic = False
  return (
    tf.data.Dataset.range(64)
    .map(slowly, num_parallel_calls=8, deterministic=False)
    .map(lambda x: slowly(x, stateful=False), num_parallel_calls=8)
    .map(lambda x: {'x': x})
    .with_options(options)
  )


def drawn(seed):
  generator = tf.random.Generator.from_seed(1)

  def draw(x):
    x = slowly(x, stateful=False)
    a = tf.random.uniform([], 0, 1000, tf.int64)
    b = generator.uniform([], 0, 1000, tf.int64)
    return {'x': 10**6 * x + 1000 * a + b}

  dataset = tf.data.Dataset.range(64).shuffle(64)
  return dataset.map(draw, num_parallel_calls=8)


@pytest.mark.parametrize('dataset', [ordered, drawn])
def test_an_epoch_is_the_same_each_time(dataset):
  inputs = train(dataset=dataset, batch_size=8)
  whole = read([inputs], 8)
  if dataset is ordered:
    assert list(itertools.chain(*whole)) == list(range(64))
  for done in (0, 3):
    before = train(dataset=dataset, batch_size=8)
    assert read([before], done) == whole[:done]
    after = train(dataset=dataset, batch_size=8)
    after.set_state(before.get_state())
    assert read([after], 8 - done) == whole[done:]


def test_determinism_is_turned_on_or_not_at_all(monkeypatch, caplog):
  calls = []
  monkeypatch.setattr(
    tf.config.experimental, 'enable_op_determinism', lambda: calls.append(0)
  )
  for op_determinism in (False, True):
    tfdata._enable_op_determinism.cache_clear()
    inputs = train(
      dataset=numbers(3), batch_size=2, op_determinism=op_determinism
    )
    assert not calls  # Import and construction do not enable it.
    read([inputs], 4)
    shown = list(filter(console.is_shown, caplog.records))  # The log of a run.
    assert len(calls) == len(shown) == op_determinism
  tfdata._enable_op_determinism.cache_clear()


# Ends and errors.


def test_an_epoch_without_records_or_without_an_end_is_refused():
  with pytest.raises(ValueError, match='no records in epoch 0'):
    next(train(dataset=numbers(0), batch_size=2))
  assert list(evaluate(dataset=numbers(0), batch_size=2)) == []
  inputs = hosts(
    2,
    tfdata.ShardedTfDataInput,
    dataset=parts(5, 0),
    batch_size=2,
    is_training=True,
  )
  next(inputs[0])
  with pytest.raises(ValueError, match='for host 1 of 2'):
    next(inputs[1])
  endless = lambda seed: numbers(3)(seed).repeat()
  with pytest.raises(ValueError, match='repeat'):
    next(evaluate(dataset=endless, batch_size=2))


def test_a_broken_file_is_an_error_again_and_again(tmp_path):
  path = str(tmp_path / 'a.tfrecord')
  with tf.io.TFRecordWriter(path) as writer:
    for x in range(9):
      writer.write(str(x))
  with open(path, 'r+b') as f:
    f.truncate(f.seek(-2, os.SEEK_END))

  def dataset(seed):
    records = tf.data.TFRecordDataset(path)
    return records.map(lambda x: {'x': tf.strings.to_number(x, tf.int32)})

  inputs = train(dataset=dataset, batch_size=4, name='broken')
  assert read([inputs], 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
  for _ in range(2):  # The error is not mistaken for the end.
    with pytest.raises(tf.errors.DataLossError) as caught:
      next(inputs)
    note = caught.value.__notes__[0]
    assert 'broken, reading epoch 0 from record 8 on' in note
