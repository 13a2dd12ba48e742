"""tf.data as input: who reads what, where it ends, going on exactly."""

import itertools
import time

from absl import logging
import numpy as np
import pytest

from jaxline.inputs import tfdata
from jaxline.metrics import log_filter

tf = pytest.importorskip('tensorflow')


def numbers(count):
  """Returns a function that gives {'x': 0}, ..., {'x': count - 1}."""

  def dataset(seed):
    del seed
    return tf.data.Dataset.range(count).map(lambda x: {'x': x})

  return dataset


def parts(*sizes):
  """Returns a function that gives host h sizes[h] numbers from 100 h on."""

  def dataset(seed, host_index, num_hosts):
    del seed
    assert num_hosts == len(sizes)
    # tf.data does not know how many a filter lets through.
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


def train(count=1, cls=tfdata.TfDataInput, **fields):
  return hosts(count, cls, is_training=True, **fields)


def one_epoch(count=1, cls=tfdata.TfDataInput, **fields):
  return hosts(
    count, cls, reset_for_eval=True, eval_loop_num_batches=None, **fields
  )


def read(inputs, num_batches):
  """Returns `x` of so many global batches, one list each."""
  return [
    np.concatenate([next(host)['x'] for host in inputs]).tolist()
    for _ in range(num_batches)
  ]


def read_epoch(inputs):
  """Returns, by host, its batches: (x, weights) as lists."""
  return [
    [(b['x'].tolist(), b['weights'].tolist()) for b in host.eval_batches()]
    for host in inputs
  ]


def check_epoch(inputs, expected):
  """Checks that the hosts give each of `expected` once, as many batches each.

  Returns:
    How many batches.
  """
  batches = read_epoch(inputs)
  assert len({len(b) for b in batches}) == 1
  rows = [
    (x, w)
    for host in batches
    for xs, ws in host
    for x, w in zip(xs, ws, strict=True)
  ]
  assert all(w in (0, 1) for _, w in rows)
  assert sorted(x for x, w in rows if w) == sorted(expected)
  assert all(x == 0 for x, w in rows if not w)
  return len(batches[0])


# Who reads what.


def test_shuffling_gives_each_epoch_an_order_of_its_own():
  def orders(num_hosts, **fields):
    inputs = train(
      num_hosts,
      dataset=numbers(12),
      batch_size=4 // num_hosts,
      shuffle_buffer_size=12,
      **fields,
    )
    rows = list(itertools.chain(*read(inputs, 9)))
    return [rows[:12], rows[12:24], rows[24:]]

  epochs = orders(1)
  assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
  assert len({tuple(epoch) for epoch in epochs}) == 3
  assert orders(2) == orders(4) == epochs
  assert orders(1, input_random_seed=1) != epochs


@pytest.mark.parametrize(('sizes', 'num_batches'), [((5,), 3), ((2, 7, 0), 4)])
def test_one_epoch_of_parts_ends_with_the_largest(sizes, num_batches):
  inputs = one_epoch(
    len(sizes), tfdata.ShardedTfDataInput, dataset=parts(*sizes), batch_size=2
  )
  expected = [100 * h + i for h, n in enumerate(sizes) for i in range(n)]
  assert check_epoch(inputs, expected) == num_batches
  assert check_epoch(inputs, expected) == num_batches


def test_a_remainder_is_dropped_on_all_hosts_alike():
  whole = hosts(
    2,
    dataset=numbers(11),
    batch_size=2,
    is_training=True,
    repeat=False,
    drop_remainder=True,
  )
  assert read(whole, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
  shared = hosts(
    2,
    tfdata.ShardedTfDataInput,
    dataset=parts(7, 5),
    batch_size=2,
    is_training=True,
    repeat=False,
    drop_remainder=True,
  )
  assert read(shared, 2) == [[0, 1, 100, 101], [2, 3, 102, 103]]
  for host in whole + shared:
    for _ in range(2):
      with pytest.raises(StopIteration):
        next(host)
  exact = hosts(
    2,
    dataset=numbers(4),
    batch_size=2,
    is_training=True,
    repeat=False,
    drop_remainder=True,
  )
  assert read(exact, 1) == [[0, 1, 2, 3]]
  assert [next(host, None) for host in exact] == [None, None]
  with pytest.raises(ValueError, match='would not see all of it'):
    one_epoch(dataset=numbers(4), batch_size=2, drop_remainder=True)


# Going on.


@pytest.mark.parametrize('filtered', [False, True])
def test_a_position_at_the_end_goes_on_in_the_next_epoch(filtered):
  def dataset(seed):
    ten = numbers(10)(seed)
    # tf.data does not know how many a filter lets through.
    return ten.filter(lambda x: True) if filtered else ten

  inputs = train(2, dataset=dataset, batch_size=1)
  assert read(inputs, 5)[-1] == [8, 9]
  others = train(2, dataset=dataset, batch_size=1)
  for host, other in zip(inputs, others, strict=True):
    other.set_state(host.get_state())
  assert read(others, 1) == [[0, 1]]
  assert others[0].position() == {'epoch': 1, 'record': 2}


def test_a_state_of_other_data_or_another_order_is_refused():
  def make(**fields):
    fields = {'data_version': 'a', 'shuffle_buffer_size': 4, **fields}
    return train(dataset=numbers(5), batch_size=2, **fields)[0]

  state = make().get_state()
  make().set_state(state)
  for fields, message in (
    ({'data_version': 'b'}, "data_version is 'a' in the state and 'b' here"),
    ({'shuffle_buffer_size': 5}, 'shuffle_buffer_size is 4'),
    ({'input_random_seed': 3}, 'seed is 0 in the state and 3 here'),
  ):
    with pytest.raises(ValueError, match=message):
      make(**fields).set_state(state)


def test_what_has_no_seed_of_its_own_is_the_same_each_time():
  def dataset(seed):
    del seed
    return (
      tf.data.Dataset.range(8)
      .shuffle(8)
      .map(lambda x: {'x': x, 'noise': tf.random.uniform([])})
    )

  def batches(inputs, count):
    return [
      (b['x'].tolist(), b['noise'].tolist())
      for _ in range(count)
      for b in [next(inputs)]
    ]

  (first,) = train(dataset=dataset, batch_size=4)
  (second,) = train(dataset=dataset, batch_size=4)
  whole = batches(first, 4)
  assert whole[:2] != whole[2:]
  batches(second, 3)
  (third,) = train(dataset=dataset, batch_size=4)
  third.set_state(second.get_state())
  assert batches(third, 1) == whole[3:]


def slowly(x, stateful=True):
  """Gives `x` back; of each eight the first takes longest."""

  def work(x):
    time.sleep((7 - x % 8) / 1000)
    return x

  x = tf.numpy_function(work, [x], tf.int64, stateful=stateful)
  return tf.ensure_shape(x, [])


def parallel_map(seed):
  del seed
  options = tf.data.Options()
  options.deterministic = False
  return (
    tf.data.Dataset.range(64)
    .map(slowly, num_parallel_calls=8, deterministic=False)
    .map(lambda x: slowly(x, stateful=False), num_parallel_calls=8)
    .map(lambda x: {'x': x})
    .with_options(options)
  )


def parallel_interleave(seed):
  del seed
  return (
    tf.data.Dataset.range(8)
    .interleave(
      lambda k: tf.data.Dataset.range(8 * k, 8 * k + 8).map(
        lambda x: slowly(x // 8 + x % 8, stateful=False) * 0 + x
      ),
      cycle_length=8,
      num_parallel_calls=8,
      deterministic=False,
    )
    .map(lambda x: {'x': x})
  )


def parallel_draws(seed):
  del seed
  generator = tf.random.Generator.from_seed(1)

  def draw(x):
    x = slowly(x, stateful=False)
    a = tf.random.uniform([], 0, 1000, tf.int64)
    return {
      'x': 10**6 * x + 1000 * a + generator.uniform([], 0, 1000, tf.int64)
    }

  return tf.data.Dataset.range(64).map(draw, num_parallel_calls=8)


@pytest.mark.parametrize(
  'dataset', [parallel_map, parallel_interleave, parallel_draws]
)
def test_parallel_parts_are_the_same_each_time(dataset):
  (inputs,) = train(dataset=dataset, batch_size=8)
  whole = read([inputs], 8)
  rows = list(itertools.chain(*whole))
  if dataset is parallel_map:
    assert rows == list(range(64))
  elif dataset is parallel_interleave:
    assert rows == [8 * k + i for i in range(8) for k in range(8)]
  for done in (0, 3):
    (before,) = train(dataset=dataset, batch_size=8)
    assert read([before], done) == whole[:done]
    (after,) = train(dataset=dataset, batch_size=8)
    after.set_state(before.get_state())
    assert read([after], 8 - done) == whole[done:]


@pytest.mark.parametrize('op_determinism', [True, False])
def test_determinism_is_turned_on_in_the_open_or_not_at_all(
  op_determinism, monkeypatch, caplog
):
  calls = []
  monkeypatch.setattr(
    tf.config.experimental, 'enable_op_determinism', lambda: calls.append(0)
  )
  tfdata._enable_op_determinism.cache_clear()
  (inputs,) = train(
    dataset=numbers(3), batch_size=2, op_determinism=op_determinism
  )
  assert not calls  # Neither the import nor the construction does it.
  read([inputs], 4)
  with log_filter.quiet():  # As a run has it.
    shown = list(filter(logging.get_absl_handler().filter, caplog.records))
  assert len(calls) == len(shown) == op_determinism
  tfdata._enable_op_determinism.cache_clear()


# Ends and errors.


def test_no_records_end_and_do_not_loop():
  (inputs,) = train(dataset=numbers(0), batch_size=2)
  with pytest.raises(ValueError, match='no records in epoch 0'):
    next(inputs)
  (inputs,) = one_epoch(dataset=numbers(0), batch_size=2)
  assert list(inputs) == []
  with pytest.raises(ValueError, match='no data to evaluate on'):
    list(inputs.eval_batches())


def test_a_host_without_a_part_is_named_in_training():
  inputs = train(
    2, tfdata.ShardedTfDataInput, dataset=parts(5, 0), batch_size=2
  )
  next(inputs[0])
  with pytest.raises(ValueError, match='for host 1 of 2'):
    next(inputs[1])


def test_an_epoch_without_an_end_is_refused():
  (inputs,) = one_epoch(
    dataset=lambda seed: numbers(3)(seed).repeat(), batch_size=2
  )
  with pytest.raises(ValueError, match='repeat'):
    next(inputs)


def test_a_global_seed_is_set_again():
  def draw():
    return float(tf.random.uniform([]))

  tf.random.set_seed(5)
  tf.config.experimental.enable_op_determinism()
  expected = draw()
  tf.random.set_seed(5)
  (inputs,) = train(dataset=numbers(3), batch_size=2)
  next(inputs)
  assert draw() == expected
  with pytest.raises(ZeroDivisionError):
    tfdata.build(3, lambda seed: 1 / 0)
  assert draw() == expected


def write_records(path, values):
  with tf.io.TFRecordWriter(str(path)) as writer:
    for value in values:
      feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
      features = tf.train.Features(feature={'x': feature})
      writer.write(tf.train.Example(features=features).SerializeToString())


def records(paths):
  def dataset(seed):
    del seed
    return tf.data.TFRecordDataset([str(p) for p in paths]).map(
      lambda x: tf.io.parse_single_example(
        x, {'x': tf.io.FixedLenFeature([], tf.int64)}
      )
    )

  return dataset


@pytest.mark.parametrize('num_hosts', [1, 2, 4])
def test_files_are_read_once_by_all_hosts_together(tmp_path, num_hosts):
  paths = [tmp_path / f'{i}.tfrecord' for i in range(3)]
  for i, path in enumerate(paths):
    write_records(path, range(10 * i, 10 * i + 5 + i))
  inputs = one_epoch(num_hosts, dataset=records(paths), batch_size=2)
  expected = [*range(5), *range(10, 16), *range(20, 27)]
  assert check_epoch(inputs, expected) == -(-18 // (2 * num_hosts))


def test_a_broken_file_is_an_error_again_and_again(tmp_path):
  path = tmp_path / 'a.tfrecord'
  write_records(path, range(9))
  data = bytearray(path.read_bytes())
  data[-10] ^= 1
  path.write_bytes(data)
  (inputs,) = train(dataset=records([path]), batch_size=4, name='broken')
  assert read([inputs], 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
  for _ in range(2):  # Never mistaken for the end.
    with pytest.raises(tf.errors.DataLossError) as caught:
      next(inputs)
    assert (
      'broken, reading epoch 0 from record 8 on' in caught.value.__notes__[0]
    )


def test_strings_reach_no_device():
  def dataset(seed):
    del seed
    return tf.data.Dataset.range(3).map(
      lambda x: {
        'x': x,
        's': tf.strings.as_string(x),
        'in': {'s': tf.strings.as_string(x)},
        'more': {'y': tf.stack([x, x]), 's': tf.strings.as_string(x)},
      }
    )

  for inputs in (
    train(dataset=dataset, batch_size=3),
    hosts(2, dataset=dataset, batch_size=3),
  ):
    batch = next(inputs[0])
    assert set(batch) - {'weights'} == {'x', 'more'}
    assert set(batch['more']) == {'y'}
    assert batch['more']['y'].tolist() == [[0, 0], [1, 1], [2, 2]]
  batch = next(one_epoch(dataset=dataset, batch_size=3)[0])
  assert batch['s'].tolist() == [b'0', b'1', b'2']


@pytest.mark.parametrize(
  ('element', 'message'),
  [
    (lambda: 3, r'is \S+; expected dicts \(of dicts\) of dense'),
    (lambda: (1, 2), r'is tuple; expected dicts \(of dicts\) of dense'),
    (
      lambda: {'x': tf.ragged.constant([[1], [2, 3]])},
      'entry x is .* no dense',
    ),
    (lambda: {'x': 'text', 'y': {'z': 'text'}}, 'is dict; .* of numbers'),
  ],
)
def test_elements_that_make_no_batch_are_refused(element, message):
  (inputs,) = train(
    dataset=lambda seed: tf.data.Dataset.from_tensors(element()), batch_size=2
  )
  with pytest.raises(TypeError, match=message):
    next(inputs)


def test_no_gpu_is_left_to_tensorflow():
  tfdata.import_tensorflow()
  assert tf.config.get_visible_devices('GPU') == []
