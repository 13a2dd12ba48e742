"""Grain datasets, data sources and ArrayRecord files as inputs.

tests/promises/test_inputs.py has their epochs, hosts and resumes.
"""

import itertools

import grain as grain_library
import numpy as np
import pytest

from jaxline.inputs import grain
from tests import sources

EVERY = list(range(23))


def records(number):
  return [{'x': np.int32(i)} for i in range(number)]


def decode(record):
  return {'x': np.frombuffer(record, np.int32)[0]}


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """ArrayRecord files of 5, 0, 17 and 1 records: 0 to 22, as int32."""
  from array_record.python import array_record_module

  folder = tmp_path_factory.mktemp('data')
  numbers = itertools.count()
  for name, size in (('a', 5), ('b', 0), ('c', 17), ('d', 1)):
    path = folder / f'{name}.array_record'
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
    for number in itertools.islice(numbers, size):
      writer.write(np.int32(number).tobytes())
    writer.close()
  return folder


def test_a_dataset_keeps_its_own_order():
  dataset = grain_library.MapDataset.source(records(9)).shuffle(seed=4)
  expected = [int(x['x']) for x in dataset.repeat(2)]
  source = grain.GrainInput(dataset=dataset, batch_size=9)
  assert sources.rows(sources.take(source, 2)) == expected
  assert expected[:9] != expected[9:]


def test_what_cannot_be_read_is_refused(files, tmp_path):
  (path := tmp_path / 'text').write_text('no records')
  endless = grain_library.MapDataset.source(records(4)).repeat()
  for fields, error, message in (
    ({}, ValueError, 'files'),
    ({'dataset': endless}, ValueError, 'repeat'),
    # Batches that cannot be made.
    ({'dataset': [{'x': 1}, {'x': 1, 'y': 1}]}, ValueError, 'x'),
    ({'dataset': [{'y': [1]}, {'y': [1, 2]}]}, ValueError, "'y'"),
    ({'files': [files / '*', 'none/x']}, FileNotFoundError, 'none/x'),
    ({'files': path}, RuntimeError, str(path)),
  ):
    with pytest.raises(error) as caught:
      next(grain.GrainInput(batch_size=2, **fields))
    notes = getattr(caught.value, '__notes__', [])
    assert message in ' '.join([str(caught.value), *notes])


class AddNoise(grain_library.transforms.RandomMap):
  """Adds a random entry."""

  def random_map(self, element, rng):
    return {**element, 'noise': rng.integers(2**62)}


def test_randomness_depends_on_seed_record_and_epoch_alone():
  def noise(hosts, **fields):
    seen = {}
    for host in range(hosts):
      source = grain.GrainInput(
        dataset=records(6),
        transformations=[AddNoise(), lambda x: x | {'x': x['x'] + 1}],
        batch_size=6 // hosts,
        num_infeed_hosts=hosts,
        infeed_host_index=host,
        **fields,
      )
      for epoch, batch in enumerate(itertools.islice(source, 2)):
        keys = [(epoch, x) for x in batch['x'].tolist()]
        seen.update(zip(keys, batch['noise'].tolist(), strict=True))
      source.close()
    return seen

  reference = noise(1)
  assert {x for _, x in reference} == {*range(1, 7)}
  other = noise(1, input_random_seed=1)
  assert len({*reference.values(), *other.values()}) == 24
  assert noise(3, num_threads=2) == reference
  assert noise(1, shuffle=True) == reference


def test_records_are_stacked():
  dataset = [{'a': {'b': np.full(3, i)}, 'c': str(i)} for i in range(3)]
  batch = next(grain.GrainInput(dataset=dataset, batch_size=3))
  assert batch.a.b.tolist() == [[i] * 3 for i in range(3)]
  assert batch.c.tolist() == ['0', '1', '2']


@pytest.mark.parametrize('batch_size', [3, 20])  # One by one, or together.
def test_files_are_read_in_their_order(files, batch_size):
  fields = {'batch_size': batch_size, **sources.ONE_EPOCH}
  for given, expected in (
    (str(files / '*.array_record'), EVERY),
    (files / 'c.array_record', EVERY[5:22]),
    ([files / 'd.array_record', str(files / 'a.*')], [22, *EVERY[:5]]),
    ([files / '[ab]*', files / 'a.array_record'], EVERY[:5]),
    (f'{files.parent}/**/{files.name}/*', EVERY),
  ):
    source = grain.GrainInput(files=given, transformations=[decode], **fields)
    found = sources.rows(b['x'][b['weights'] > 0].tolist() for b in source)
    assert found == expected


def test_an_error_names_file_and_record(files):
  for number, place in (
    (4, 'a.array_record, record 4'),
    (5, 'c.array_record, record 0'),
  ):
    bad = lambda x, number=number: {'x': 1 // int(x['x'] - number)}
    source = grain.GrainInput(
      files=files / '*', transformations=[decode, bad], batch_size=3
    )
    with pytest.raises(ZeroDivisionError) as caught:
      sources.take(source, 5)
    assert f'{files}/{place}.' in caught.value.__notes__[0]


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
  state = make(dataset=records(3)).get_state()
  with pytest.raises(ValueError, match='data_name'):
    make(dataset=records(3), data_name='v2').set_state(state)
