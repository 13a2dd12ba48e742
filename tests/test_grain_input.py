"""Grain datasets, data sources and ArrayRecord files as inputs."""

import itertools
import json
import multiprocessing
import os
import random
import time

from etils import epath
from etils.epath import gpath
import grain as grain_library
import numpy as np
import pytest

from jaxline.inputs import grain

ONE_EPOCH = {'reset_for_eval': True, 'eval_loop_num_batches': None}


def records(number, first=0):
  return [{'x': np.int32(i)} for i in range(first, first + number)]


def source_of(number):
  return grain_library.MapDataset.source(records(number))


def stream_of(number, repeat=False, shuffle=True, num_threads=0):
  numbers = records(number)
  if shuffle:  # Grain's own takes milliseconds a record where there are so few.
    random.Random(5).shuffle(numbers)
  dataset = grain_library.MapDataset.source(numbers)
  if repeat:
    dataset = dataset.repeat()
  return dataset.to_iter_dataset(
    grain_library.ReadOptions(
      num_threads=num_threads, prefetch_buffer_size=2 * num_threads
    )
  )


def decode(record):
  return {'x': np.frombuffer(record, np.int32)[0]}


def take(source, number):
  return [next(source)['x'].tolist() for _ in range(number)]


def rows(batches):
  return [x for batch in batches for x in batch]


def real_rows(batches):
  return [
    int(x)
    for batch in batches
    for x, weight in zip(batch['x'], batch['weights'], strict=True)
    if weight
  ]


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """ArrayRecord files of 5, 0, 7 and 1 records: 0 to 12, as int32 [500]."""
  from array_record.python import array_record_module

  folder = tmp_path_factory.mktemp('data')
  numbers = itertools.count()
  for name, size in (('a', 5), ('b', 0), ('c', 7), ('d', 1)):
    path = folder / f'{name}.array_record'
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
    for number in itertools.islice(numbers, size):
      # So long that each record is a block of its own.
      words = np.random.default_rng(number).integers(0, 2**31, 50_000)
      words[0] = number
      writer.write(words.astype(np.int32).tobytes())
    writer.close()
  return folder


# Records that have numbers.


class Batched:
  """A data source that reads many at once."""

  def __init__(self, number):
    self.number = number
    self.calls = []

  def __len__(self):
    return self.number

  def __getitem__(self, index):
    raise AssertionError('read one by one')

  def __getitems__(self, indices):
    self.calls.append(indices)
    return [{'x': np.int32(i)} for i in indices]


@pytest.mark.parametrize(
  'dataset',
  [
    records(11),
    source_of(11),
    Batched(11),
    lambda: source_of(11),
    lambda seed: records(11 + seed),
    lambda seed=1, other=2: records(11),
  ],
)
def test_datasets_with_numbers_give_their_records(dataset):
  source = grain.GrainInput(dataset=dataset, batch_size=4, **ONE_EPOCH)
  for _ in range(2):
    batches = list(source.eval_batches())
    assert real_rows(batches) == list(range(11))
    assert [batch['x'].dtype for batch in batches] == [np.int32] * 3
  source = grain.GrainInput(dataset=dataset, batch_size=4, is_training=True)
  given = rows(take(source, 11))
  epochs = [given[i : i + 11] for i in range(0, 44, 11)]
  assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_source_that_reads_many_at_once_is_asked_once_a_batch():
  dataset = Batched(11)
  source = grain.GrainInput(dataset=dataset, batch_size=4)
  take(source, 2)
  assert dataset.calls == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_dataset_that_is_shuffled_already_keeps_its_order():
  dataset = source_of(9).shuffle(seed=4)
  expected = [int(x['x']) for x in dataset.repeat(2)]
  source = grain.GrainInput(dataset=dataset, batch_size=9)
  assert rows(take(source, 2)) == expected
  assert expected[:9] != expected[9:]


@pytest.mark.parametrize(
  ('dataset', 'error', 'message'),
  [
    (source_of(4).repeat(), ValueError, 'repeat'),
    (source_of(4).filter(lambda x: x['x'] > 2), TypeError, 'NoneType'),
    (b'abc', TypeError, 'dict of arrays'),
    (7, TypeError, 'len'),
    (lambda host: 7, TypeError, 'host'),
    (lambda host_index, num_hosts: records(3), ValueError, 'host_index'),
    (lambda epoch: records(3), ValueError, 'epoch'),
  ],
)
def test_what_is_no_dataset_of_records_is_refused(dataset, error, message):
  with pytest.raises(error, match=message):
    next(grain.GrainInput(dataset=dataset, batch_size=2))


def test_one_of_dataset_and_files_is_needed(files):
  with pytest.raises(ValueError, match=r'files is \(\); expected some'):
    grain.GrainInput(batch_size=2)
  with pytest.raises(ValueError, match='none with one'):
    grain.GrainInput(batch_size=2, dataset=records(3), files=files / 'a*')


def test_nothing_to_read_is_an_error_and_no_endless_loop():
  with pytest.raises(ValueError, match='no records'):
    next(grain.GrainInput(dataset=records(0), batch_size=2))
  source = grain.GrainInput(
    dataset=stream_of(4).filter(lambda x: False), batch_size=2
  )
  with pytest.raises(ValueError, match='no records: epoch 0 of its stream'):
    next(source)


# What is done with records.


class AddNoise(grain_library.transforms.RandomMap):
  """Adds a random entry."""

  def random_map(self, element, rng):
    return {**element, 'noise': rng.integers(2**62)}


class Double(grain_library.transforms.Map):
  """Doubles."""

  def map(self, element):
    return {**element, 'x': element['x'] * 2}


def test_transformations_are_applied_in_their_order():
  source = grain.GrainInput(
    dataset=[1, 2, 3],
    transformations=[lambda x: {'x': x}, Double(), lambda d: {'x': d['x'] + 1}],
    batch_size=3,
  )
  assert take(source, 1) == [[3, 5, 7]]


def test_randomness_depends_on_seed_record_and_epoch_alone():
  def noise(**fields):
    hosts = fields.pop('hosts', 1)
    seen = {}
    for host in range(hosts):
      source = grain.GrainInput(
        dataset=source_of(6),
        transformations=[AddNoise(), AddNoise()][: fields.pop('stages', 1)],
        batch_size=6 // hosts,
        num_infeed_hosts=hosts,
        infeed_host_index=host,
        **fields,
      )
      for epoch in range(2):
        batch = next(source)
        for x, value in zip(
          batch['x'].tolist(), batch['noise'].tolist(), strict=True
        ):
          seen[epoch, x] = value
      source.close()
    return seen

  reference = noise()
  assert len(set(reference.values())) == 12
  assert noise(hosts=3, num_threads=2) == reference
  assert noise(shuffle=True) == reference
  assert not set(noise(input_random_seed=1).values()) & set(reference.values())


@pytest.mark.parametrize('dataset', [records(11), stream_of(11)])
@pytest.mark.parametrize('fields', [{}, ONE_EPOCH])
@pytest.mark.parametrize('rows', [3, 5])
def test_a_batch_that_loses_or_doubles_records_is_an_error(
  dataset, fields, rows
):
  def collate(elements):
    del elements
    return {'x': np.zeros(rows)}

  source = grain.GrainInput(
    dataset=dataset, collate=collate, batch_size=4, name='mine', **fields
  )
  with pytest.raises(ValueError, match=f'mine made {rows} rows of 4 records'):
    next(source)


def test_records_are_stacked_as_nested_batches():
  dataset = [{'a': {'b': np.full(3, i)}, 'c': float(i)} for i in range(4)]
  batch = next(grain.GrainInput(dataset=dataset, batch_size=4))
  np.testing.assert_array_equal(batch['a']['b'], [[i] * 3 for i in range(4)])
  assert batch['c'].tolist() == [0, 1, 2, 3]


def test_a_function_can_make_the_batch():
  def ragged(elements):
    batch = np.zeros((len(elements), 3), np.int32)
    for row, element in zip(batch, elements, strict=True):
      row[: len(element)] = element
    return {'ids': batch}

  source = grain.GrainInput(
    dataset=[[1], [1, 2], [1, 2, 3]], collate=ragged, batch_size=2, **ONE_EPOCH
  )
  batches = [batch['ids'].tolist() for batch in source]
  assert batches == [[[1, 0, 0], [1, 2, 0]], [[1, 2, 3], [0, 0, 0]]]


def test_records_of_different_shapes_are_named():
  dataset = [{'x': np.ones(2)}, {'x': np.ones(3)}]
  source = grain.GrainInput(dataset=dataset, batch_size=2)
  with pytest.raises(ValueError, match='same structure') as caught:
    next(source)
  assert 'one by one: record 0' in caught.value.__notes__[0]


# Files.


def test_files_are_read_in_their_order(files):
  every = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
  for given, expected in (
    (str(files / '*.array_record'), every),
    (files / 'c.array_record', every[5:12]),
    ([files / 'd.array_record', str(files / 'a.*')], [12, *every[:5]]),
    (f'{files.parent}/**/{files.name}/*', every),
  ):
    source = grain.GrainInput(
      files=given, transformations=[decode], batch_size=3, **ONE_EPOCH
    )
    assert real_rows(source) == expected
  source = grain.GrainInput(
    files=files / '*', transformations=[decode], batch_size=13, shuffle=True
  )
  assert sorted(take(source, 1)[0]) == every


def test_files_of_a_bucket_are_found(files, monkeypatch):
  def there(function, path):
    return function(os.fspath(path).replace('gs://bucket', str(files)))

  def found(function, path):
    paths = there(function, path)
    return [path.replace(str(files), 'gs://bucket') for path in paths]

  open_files = grain_library.sources.ArrayRecordDataSource
  monkeypatch.setattr(
    grain_library.sources,
    'ArrayRecordDataSource',
    lambda x: there(open_files, x) if isinstance(x, str) else list(x),
  )
  monkeypatch.setattr(gpath, '_is_tf_installed', lambda: False)
  with epath.testing.mock_epath(
    exists=there, glob=found, isdir=there, stat=there
  ):
    source = grain.GrainInput(files='gs://bucket/[ac]*', batch_size=1)
    assert source.describe_record(11, 0) == (
      'gs://bucket/c.array_record, record 6'
    )
    one = grain.GrainInput(files='gs://bucket/a.array_record', batch_size=1)
    assert one._paths == ['gs://bucket/a.array_record']
    with pytest.raises(
      FileNotFoundError, match="'gs://bucket/x\\*' names none"
    ):
      grain.GrainInput(files='gs://bucket/x*', batch_size=1)
    with pytest.raises(NotImplementedError, match=r'\*\*'):
      grain.GrainInput(files='gs://bucket/**', batch_size=1)


def test_records_of_files_are_told_by_file_and_place(files):
  source = grain.GrainInput(files=files / '*', batch_size=1)
  assert [source.describe_record(i, 0) for i in (0, 4, 5, 11, 12)] == [
    f'{files}/a.array_record, record 0',
    f'{files}/a.array_record, record 4',
    f'{files}/c.array_record, record 0',
    f'{files}/c.array_record, record 6',
    f'{files}/d.array_record, record 0',
  ]


def test_an_error_names_file_and_record(files):
  def fail(record):
    x = decode(record)
    if x['x'] == 8:
      raise KeyError('no label')
    return x

  source = grain.GrainInput(
    files=files / '*', transformations=[fail], batch_size=6
  )
  next(source)
  with pytest.raises(KeyError, match='no label') as caught:
    next(source)
  assert caught.value.__notes__[0] == (
    f'While GrainInput read {files}/c.array_record, record 3.'
  )


def test_a_damaged_file_is_an_error_that_names_it(files, tmp_path):
  path = tmp_path / 'bad.array_record'
  data = bytearray((files / 'c.array_record').read_bytes())
  # In the middle of record 3 of 7.
  middle = len(data) // 2
  data[middle : middle + 100] = bytes(100)
  path.write_bytes(data)
  source = grain.GrainInput(
    files=path, transformations=[decode], batch_size=1, **ONE_EPOCH
  )
  with pytest.raises(RuntimeError, match='hash mismatch') as caught:
    list(source)
  position = source.position()['records']
  assert 2 <= position <= 4
  assert f'read {path}, record {position}.' in caught.value.__notes__[0]


def test_files_that_cannot_be_opened_are_named(files, tmp_path):
  with pytest.raises(FileNotFoundError, match='none/x'):
    grain.GrainInput(files=[files / '*', 'none/x'], batch_size=1)
  with pytest.raises(ValueError, match='names a file twice'):
    grain.GrainInput(
      files=[files / '*', files / 'a.array_record'], batch_size=1
    )
  path = tmp_path / 'text'
  path.write_text('no records')
  with pytest.raises(RuntimeError) as caught:
    grain.GrainInput(files=path, batch_size=1)
  assert f'{path} was opened as an ArrayRecord' in caught.value.__notes__[0]


def test_the_state_of_other_data_is_refused(files, tmp_path):
  def make(**fields):
    return grain.GrainInput(batch_size=1, **fields)

  state = make(files=files / 'a.array_record').get_state()
  copied = tmp_path / 'a.array_record'
  copied.write_bytes((files / 'a.array_record').read_bytes())
  make(files=copied).set_state(state)  # The same in another folder.
  with pytest.raises(ValueError, match='num_records is 5'):
    make(files=files / 'c.array_record').set_state(state)
  other = copied.rename(tmp_path / 'b.array_record')
  with pytest.raises(ValueError, match='files is '):
    make(files=other).set_state(state)
  with pytest.raises(ValueError, match="data_name is '' in the state and 'v2'"):
    make(dataset=records(3), data_name='v2').set_state(
      make(dataset=records(3)).get_state()
    )


@pytest.mark.process
def test_workers_read_files_and_their_errors_name_them(files):
  def fail(record):
    x = decode(record)
    if x['x'] == 11:
      raise OSError('gone')
    return x

  source = grain.GrainInput(
    files=str(files / '*'), transformations=[fail], batch_size=4, num_workers=1
  )
  assert take(source, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
  with pytest.raises(OSError, match='gone') as caught:
    next(source)
  notes = caught.value.__notes__
  assert f'While GrainInput read {files}/c.array_record, record 6.' in notes
  assert not multiprocessing.active_children()


# Streams.


def test_a_stream_is_resumed_at_every_position():
  for dataset in (stream_of(11, repeat=True, num_threads=2), stream_of(11)):
    expected = take(grain.GrainInput(dataset=dataset, batch_size=4), 9)
    for position in range(9):
      source = grain.GrainInput(dataset=dataset, batch_size=4)
      take(source, position)
      state = source.get_state()
      next(source)  # What it reads on does not change the state.
      other = grain.GrainInput(dataset=dataset, batch_size=4)
      take(other, 1)
      other.set_state(state)
      assert take(other, 9 - position) == expected[position:]
      # With another batch size too.
      other = grain.GrainInput(dataset=dataset, batch_size=6)
      other.set_state(state)
      assert rows(take(other, 1)) == (
        rows(expected)[4 * position : 4 * position + 6]
        if position < 8
        else rows(take(grain.GrainInput(dataset=dataset, batch_size=38), 1))[
          32:
        ]
      )


def test_a_stream_begins_again_and_may_differ_by_epoch():
  def by_epoch(epoch):
    dataset = source_of(5).shuffle(seed=epoch)
    return dataset.to_iter_dataset(grain_library.ReadOptions(num_threads=1))

  same = rows(take(grain.GrainInput(dataset=stream_of(5), batch_size=3), 5))
  assert same[:5] == same[5:10] == same[10:]
  source = grain.GrainInput(dataset=by_epoch, batch_size=3)
  given = rows(take(source, 10))
  epochs = [given[i : i + 5] for i in range(0, 30, 5)]
  assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) > 3
  other = grain.GrainInput(dataset=by_epoch, batch_size=3)
  take(other, 7)
  third = grain.GrainInput(dataset=by_epoch, batch_size=3)
  third.set_state(other.get_state())
  assert rows(take(third, 3)) == given[21:]


def test_streams_are_transformed_and_filtered():
  is_odd = type(
    'Odd', (grain_library.transforms.Filter,), {'filter': lambda s, x: x % 2}
  )
  source = grain.GrainInput(
    dataset=grain_library.MapDataset.range(10).to_iter_dataset(),
    transformations=[is_odd(), lambda x: {'x': x}, Double(), AddNoise()],
    batch_size=3,
    **ONE_EPOCH,
  )
  assert real_rows(source) == [2, 6, 10, 14, 18]


def sharded(host_index, num_hosts):
  return source_of(13)[host_index::num_hosts].to_iter_dataset()


def test_one_epoch_of_a_stream_of_several_hosts_is_refused():
  with pytest.raises(ValueError, match='different numbers of batches'):
    grain.GrainInput(
      dataset=sharded, batch_size=2, num_infeed_hosts=3, **ONE_EPOCH
    )


def test_a_stream_of_several_hosts_that_is_not_dealt_out_is_refused():
  for dataset in (stream_of(4), lambda: stream_of(4), lambda **_: stream_of(4)):
    with pytest.raises(ValueError, match='would be the same on all of them'):
      grain.GrainInput(dataset=dataset, batch_size=2, num_infeed_hosts=2)


def test_an_error_in_a_stream_names_the_record_and_loses_nothing():
  broken = [True]

  def fail(record):
    if record['x'] == 5 and broken:
      raise KeyError('no label')
    return record

  dataset = stream_of(8, shuffle=False)
  source = grain.GrainInput(
    dataset=dataset, transformations=[fail], batch_size=4, name='mine'
  )
  take(source, 1)
  for _ in range(2):
    with pytest.raises(KeyError) as caught:
      next(source)
    assert caught.value.__notes__[-1] == (
      'It was mine, reading record 5 of epoch 0 of the stream of host 0/1.'
    )
  broken.clear()
  assert take(source, 1) == [[4, 5, 6, 7]]


def end_at_5(record):
  return next(iter([])) if record['x'] == 5 else record


@pytest.mark.parametrize('fields', [ONE_EPOCH, {'is_training': True}])
def test_an_end_inside_a_record_is_no_end_of_the_stream(fields):
  source = grain.GrainInput(
    dataset=stream_of(8, shuffle=False),
    transformations=[end_at_5],
    batch_size=4,
    **fields,
  )
  take(source, 1)
  for _ in range(2):
    with pytest.raises(RuntimeError, match='could not be read: StopIteration'):
      take(source, 2)


class OddError(Exception):
  """Cannot be pickled."""

  def __reduce__(self):
    raise TypeError('never')


def odd_at_5(record):
  if record['x'] == 5:
    raise OddError('boom')
  return record


@pytest.mark.process
@pytest.mark.parametrize('own', [True, False])
def test_an_error_that_cannot_be_sent_comes_up_all_the_same(own):
  dataset = stream_of(8, shuffle=False)
  source = grain.GrainInput(
    dataset=dataset if own else dataset.map(odd_at_5),
    transformations=[odd_at_5] if own else [],
    batch_size=4,
    num_workers=1,
  )
  take(source, 1)
  with pytest.raises(RuntimeError, match='OddError: boom'):
    next(source)
  assert not multiprocessing.active_children()


def test_a_closed_stream_goes_on_or_says_that_it_cannot():
  source = grain.GrainInput(dataset=stream_of(8, shuffle=False), batch_size=3)
  take(source, 1)
  source.close()
  assert take(source, 1) == [[3, 4, 5]]
  source = grain.GrainInput(
    dataset=stream_of(8, shuffle=False),
    batch_size=3,
    input_checkpointing_enabled=False,
  )
  source.close()
  assert take(source, 1) == [[0, 1, 2]]
  source.close()
  for _ in range(2):
    with pytest.raises(RuntimeError, match='behind record 3 of epoch 0'):
      next(source)
  source.reset()
  assert take(source, 1) == [[0, 1, 2]]


def test_a_state_with_tuples_is_saved_and_resumed():
  lengths = [3, 5, 2, 7, 4, 1, 6, 2]
  texts = [
    {'x': np.arange(length) + 10 * i} for i, length in enumerate(lengths)
  ]
  dataset = grain_library.experimental.ConcatThenSplitIterDataset(
    grain_library.MapDataset.source(texts).to_iter_dataset(),
    length_struct={'x': 4},
  ).map(lambda packed: {'x': packed['x']})

  def make():
    return grain.GrainInput(dataset=dataset, batch_size=1, **ONE_EPOCH)

  source = make()
  expected = [batch['x'].tolist() for batch in source]
  assert len(expected) > 5
  for position in range(len(expected)):
    source.reset()
    take(source, position)
    other = make()
    other.set_state(source.get_state())
    assert [batch['x'].tolist() for batch in other] == expected[position:]


class Unsaved(grain_library.DatasetIterator):
  """Its state is no plain value."""

  def __init__(self):
    super().__init__()
    self.number = 0

  def __next__(self):
    self.number += 1
    return {'x': np.int32(self.number)}

  def get_state(self):
    return object()

  def set_state(self, state):
    raise AssertionError


class UnsavedStream(grain_library.IterDataset):
  """A stream of `Unsaved`."""

  def __iter__(self):
    return Unsaved()


def test_a_state_that_is_no_json_is_refused_when_it_is_needed():
  source = grain.GrainInput(dataset=UnsavedStream(), batch_size=2)
  with pytest.raises(TypeError, match='not JSON serializable'):
    next(source)
  source = grain.GrainInput(
    dataset=UnsavedStream(), batch_size=2, input_checkpointing_enabled=False
  )
  assert take(source, 2) == [[1, 2], [3, 4]]


@pytest.mark.process
def test_a_stream_is_read_by_workers():
  fields = {'dataset': stream_of(11, repeat=True), 'batch_size': 3}
  source = grain.GrainInput(**fields, num_workers=2)
  take(source, 2)
  state = source.get_state()
  expected = take(source, 4)
  assert len(multiprocessing.active_children()) == 2
  assert len(json.dumps(state.decode())) < 2000
  source.close()
  assert not multiprocessing.active_children()
  source.set_state(state)
  assert take(source, 4) == expected
  source.close()
  with pytest.raises(ValueError, match='num_workers is 2 in the state and 0'):
    grain.GrainInput(**fields).set_state(state)


def test_threads_keep_the_order():
  # What is ready first is not given first.
  def slow(index):
    time.sleep(0.001 * (index % 7))
    return {'x': np.int32(index)}

  dataset = grain_library.MapDataset.range(40).map(slow)
  source = grain.GrainInput(dataset=dataset, batch_size=4, num_threads=4)
  assert rows(take(source, 10)) == list(range(40))
  source.close()
