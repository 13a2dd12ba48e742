"""Tests of text inputs: files, splits, windows, packings.

tests/promises/test_inputs.py has epochs, positions and hosts.
"""

import gzip
import hashlib
import json
import pathlib
import pickle

import numpy as np
import pytest

from jaxline.inputs import text
from jaxline.inputs import tokenization

D = text.DOCUMENT_TOKEN


def write(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
  for name, data in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
  return folder


def documents(*contents: bytes) -> text.Documents:
  tokens = [t for data in contents for t in (D, *data)]
  return text.Documents(
    names=tuple(f'{i}.txt' for i in range(len(contents))),
    tokens=np.array(tokens, np.uint16),
    starts=np.flatnonzero(np.array(tokens) == D),
    sha256=hashlib.sha256(b'/'.join(contents)).hexdigest(),
    num_bytes=sum(map(len, contents)),
  )


# One document whose 201 tokens are all different: a window tells its place.
COUNTING = documents(bytes(range(200)))
TEXTS = documents(b'abcdefghijk', b'', b'l', b'mnopqrs', b't', b'uvwx')


def make(docs=COUNTING, **kwargs):
  kwargs = {'batch_size': 8, 'length': 10, 'input_random_seed': 7} | kwargs
  return text.TextInput(documents=docs, **kwargs)


def epoch_rows(data, epoch=0):
  records = np.arange(data.num_records())
  return data.read(records, np.full_like(records, epoch))


def assert_same(actual: dict, expected: dict) -> None:
  assert actual.keys() == expected.keys()
  for key in expected:
    np.testing.assert_array_equal(actual[key], expected[key], err_msg=key)
    assert actual[key].dtype == expected[key].dtype


def test_files(tmp_path, monkeypatch):
  write(tmp_path / 'x', dict.fromkeys(['b.txt', 'y/z.py', 'a-b.txt'], b'x'))
  write(tmp_path / 'x', {'.hidden': b'no', '.git/config': b'no'})
  write(tmp_path / 'x', {'image.png': b'\0' + b'PNG' * 50, 'empty.txt': b''})
  write(tmp_path, {'z/b.txt': b'2', 'x/empty.gz': gzip.compress(b'')})
  monkeypatch.chdir(tmp_path)
  for files, expected in (
    (['x'], ['a-b.txt', 'b.txt', 'y/z.py']),
    (['x/y/**/*.py', 'x/?.txt'], ['../1/b.txt', 'z.py']),
    # A file is read once. A glob takes even what looks binary, if it is text.
    (['x/y', 'z', 'z/b.txt'], ['../1/b.txt', 'z.py']),
    (['[x]/i*', 'x/y'], ['../1/z.py', 'x/image.png']),
  ):
    corpus = text.load_corpus(files)
    assert sorted([*corpus.train.names, *corpus.eval.names]) == expected
  for files, named in (
    (['x', 'nowhere'], 'nowhere'),
    (['x', 'x/*.md'], r'x/\*\.md'),
    (['x/y'], ' 1 '),
    ([], ' 0 '),
  ):
    with pytest.raises(ValueError, match=named):
      text.load_corpus(files)


THREE = b'three' * 30
LINES = b'one\n\ntwo\xff \r\n  \n' + THREE + b'\n'
PACKED = b'zip\nped'
VALUES = ['na\u00efve', '', 'two\nlines', '\ud800', 'last']
JSON = '\n'.join(json.dumps({'id': 1, 'text': v}) for v in VALUES).encode()
CONTENTS = {
  'file': {'a.gz': PACKED, 'b.txt': LINES},
  'line': {'a.gz:1': b'zip', 'a.gz:2': b'ped', 'b.txt:1': b'one'}
  | {'b.txt:3': b'two\xff ', 'b.txt:4': b'  ', 'b.txt:5': THREE},
  'jsonl': {'a.gz:1': 'na\u00efve'.encode(), 'a.gz:3': b'two\nlines'}
  | {'a.gz:4': b'?', 'a.gz:5': b'last'},
}


@pytest.mark.parametrize('kind', CONTENTS)
def test_contents(tmp_path, kind):
  contents = CONTENTS[kind]
  files = {'a.gz': gzip.compress(PACKED), 'b.txt': LINES}
  if kind == 'jsonl':
    files = {'a.gz': gzip.compress(JSON)}
  folder = write(tmp_path, files)
  given = {'eval_fraction': 0.5}
  corpus = text.load_corpus(folder, documents=kind, **given)
  assert {*corpus.train.names, *corpus.eval.names} == {*contents}
  given |= {'docs': kind, 'files': folder, 'length': 1}
  for split in corpus:
    names = list(split.names)
    assert names == sorted(names) == [split.names[i] for i in range(len(names))]
    tokens = np.array([t for name in names for t in (D, *contents[name])])
    np.testing.assert_array_equal(split.tokens, tokens)
    np.testing.assert_array_equal(split.starts, np.flatnonzero(tokens == D))
    digest = hashlib.sha256(tokens.astype(np.uint16).tobytes())
    assert split.sha256 == digest.hexdigest()
    assert split.data() == b''.join(contents[name] for name in names)
    assert split.num_bytes == len(split.data())
    read = make(**given, is_training=split is corpus.train).documents
    assert read.sha256 == split.sha256
  for bad in b'{"text": 3}', b'{"txt": ""}', b'[]', b'{':
    write(tmp_path, {'bad.jsonl': b'{"text": "x"}\n' + bad})
    with pytest.raises(ValueError, match=r'bad\.jsonl:2'):
      text.load_corpus(tmp_path / 'bad.jsonl', documents='jsonl')


def test_the_split_goes_by_the_hash_of_the_name(tmp_path):
  def load(number, fraction):
    """Returns which names are held out, and the hash of each name."""
    names = [f'0.txt:{i + 1}' for i in range(number)]
    file = write(tmp_path, {'0.txt': b'text\n' * number}) / '0.txt'
    corpus = text.load_corpus(file, documents='line', eval_fraction=fraction)
    assert {*corpus.train.names, *corpus.eval.names} == {*names}
    digests = [hashlib.sha256(f'eval/{name}'.encode()) for name in names]
    hashes = [int(digest.hexdigest()[:16], 16) for digest in digests]
    return {*corpus.eval.names}, dict(zip(names, hashes, strict=True))

  for number in 200, 220:  # Other documents do not matter.
    held_out, hashes = load(number, 0.25)
    assert held_out == {n for n, x in hashes.items() if x < 0.25 * 2**64}
  # Neither split is ever empty.
  held_out, hashes = load(220, 1e-9)
  assert held_out == {min(hashes, key=hashes.get)}
  held_out, hashes = load(220, 1 - 1e-9)
  assert {*hashes} - held_out == {max(hashes, key=hashes.get)}


def test_training_windows():
  data, tokens = make(is_training=True), COUNTING.tokens.astype(np.int32)
  for epoch in range(2):
    rows = epoch_rows(data, epoch)
    # The place of the first cut, by an independent formula.
    digest = hashlib.sha256(f'offset/7/{epoch}'.encode()).hexdigest()
    places = int(digest[:16], 16) % 201 + np.arange(200).reshape(20, 10)
    ids, labels = tokens[places % 201], tokens[(places + 1) % 201]
    weights = (labels != D).astype(np.float32)
    assert_same(rows, {'ids': ids, 'labels': labels, 'weights': weights})
  # Records of two epochs at once.
  mixed = data.read(np.array([3, 5]), np.array([0, 1]))
  np.testing.assert_array_equal(mixed['ids'][1], rows['ids'][5])
  np.testing.assert_array_equal(mixed['ids'][0], epoch_rows(data)['ids'][3])
  # The same windows with the segments of these rows.
  kwargs = {'docs': TEXTS, 'length': 9, 'is_training': True}
  expected = epoch_rows(make(**kwargs))
  parts = [segments(ids, 9) for ids in expected['ids'].tolist()]
  for key in parts[0]:
    expected[key] = np.array([part[key] for part in parts], np.int32)
  assert_same(epoch_rows(make(packing='packed', **kwargs)), expected)


def test_a_foreign_state_is_refused():
  state = make(is_training=True).get_state()
  for key, change in (
    ('seed', {'input_random_seed': 8}),
    ('length', {'length': 9}),
    ('packing', {'packing': 'padded'}),
    ('is_training', {'is_training': False, 'shuffle': True}),
    ('corpus_sha256', {'docs': documents(b'x' * 100, b'y' * 100)}),
  ):
    with pytest.raises(ValueError, match=key):
      make(**{'is_training': True} | change).set_state(state)


def segments(ids, num_real):
  """Numbers the documents of a row, and the tokens of each."""
  row, segment, place = {'segment_ids': [], 'segment_pos': []}, 1, -1
  for i, token in enumerate(ids):
    new = token == D and i > 0
    segment, place = (segment + 1, 0) if new else (segment, place + 1)
    row['segment_ids'].append(segment * (i < num_real))
    row['segment_pos'].append(place * (i < num_real))
  return row


def naive_rows(docs, length, packing):
  """Builds each row of an epoch of evaluation by itself, token by token."""
  streams = [docs.tokens.tolist()]
  if packing == 'padded':
    streams = [x.tolist() for x in np.split(docs.tokens, docs.starts[1:])]
  for stream in streams:
    for first in range(0, len(stream) - 1, length):
      labels = stream[first + 1 : first + 1 + length]
      num_real = len(labels)
      # Only 'stream' reads the last token.
      ids = stream[first : first + num_real + (packing == 'stream')][:length]
      labels += [D] * (length - num_real)
      ids += [D] * (length - len(ids))
      row = {'ids': ids, 'labels': labels}
      row['weights'] = [float(label != D) for label in labels]
      if packing == 'packed':
        row |= segments(ids, num_real)
      elif packing == 'padded':
        row['paddings'] = [float(i >= num_real) for i in range(length)]
      yield row


@pytest.mark.parametrize('packing', text.PACKINGS)
def test_packings(packing):
  dtypes = dict.fromkeys(['weights', 'paddings'], np.float32)
  for length in 1, 2, 3, 4, 7, 11, 12, 13, 31, 32, 50:
    expected = list(naive_rows(TEXTS, length, packing))
    rows = epoch_rows(make(TEXTS, length=length, packing=packing))
    stacked = {
      key: np.array([row[key] for row in expected], dtypes.get(key, np.int32))
      for key in expected[0]
    }
    assert_same(rows, stacked)
    # Each byte is a label once.
    labels = rows['labels'][rows['weights'] == 1]
    assert labels.astype(np.uint8).tobytes() == TEXTS.data()


class Words(tokenization.Tokenizer):
  """A large vocabulary: tokens of 32 bits, another document token."""

  vocab_size, document_id, identity = 100_000, 7, 'words'

  def encode_batch(self, texts):
    return [np.array(t.split(), np.int32) for t in texts]

  def _decode(self, ids):
    return ' '.join(map(str, ids))


def test_wide_tokens(tmp_path):
  write(tmp_path, {f'{i}': b'99999 3' for i in range(3)})
  docs = text.load_corpus(tmp_path, tokenizer=Words()).train
  assert docs.tokens.tolist() == [7, 99_999, 3, 7, 99_999, 3]
  data = make(docs, length=6, packing='packed')
  batch = epoch_rows(data)
  assert batch['ids'].tolist() == [[7, 99_999, 3, 7, 99_999, 7]]
  assert batch['weights'].tolist() == [[1, 1, 0, 1, 1, 0]]
  assert batch['segment_ids'].tolist() == [[1, 1, 1, 2, 2, 0]]
  assert data.ids_to_strings(batch['ids'], [3]) == ['99999 3']
  assert data.data_identity()['tokenizer'] == 'words'


def test_a_short_evaluation_is_spread_over_the_text():
  whole = epoch_rows(make())
  for hosts in 1, 2:
    shared = {'num_infeed_hosts': hosts, 'infeed_host_index': 0}
    short = make(max_batches=2, batch_size=2 // hosts, **shared)
    rows = epoch_rows(short)  # 4 of 20 windows.
    assert_same(rows, {k: v[[0, 5, 10, 15]] for k, v in whole.items()})
  for enough in 10, 1000:
    assert_same(epoch_rows(make(max_batches=enough)), whole)
  padded = make(TEXTS, packing='padded', max_batches=1, batch_size=2)
  # 2 of 6 rows: of 11, 1, 7, 1 and 4 bytes.
  assert epoch_rows(padded)['labels'][:, 0].tolist() == [*b'am']


def test_argument_errors(tmp_path):
  given = {'files': write(tmp_path, {'a': b'1', 'b': b'2'}), 'docs': 'file'}
  empty = documents(b'', b'')
  for key, fields in (
    ('max_batches', {'max_batches': 3, 'is_training': True}),
    ('packing', {'packing': 'rows'}),
    ('files', {'docs': 'file'}),
    ('tokenizer', {'tokenizer': 'bytes'}),  # COUNTING has one.
    ('eval_fraction', {**given, 'eval_fraction': 1}),
    ('no records', {'length': 202, 'is_training': True}),  # It has 201 tokens.
    ('no records', {'docs': empty, 'packing': 'padded'}),
  ):
    with pytest.raises(ValueError, match=key):
      next(make(**fields))
  next(make(length=201, is_training=True))


def test_records_are_described():
  docs = documents(b'abcdefghij', b'klmn')
  expected = [('0.txt', 0), ('0.txt', 3), ('0.txt', 7), ('1.txt', 0)]
  shown = [f'{name}, starting at token {place}' for name, place in expected]
  for packing in 'stream', 'padded':
    data = make(docs, length=4, packing=packing)
    assert [data.describe_record(r, 0) for r in range(4)] == shown
  data = make(docs, length=4, batch_size=1, max_batches=2)
  assert data.describe_record(1, 0) == shown[2]
  data = make(is_training=True)
  for epoch in range(2):
    first = epoch_rows(data, epoch)['ids'][:, 0].tolist()
    for record, token in enumerate(first):
      assert data.describe_record(record, epoch).endswith(f' {token % D}')


def test_a_worker_maps_the_tokens_itself(tmp_path):
  write(tmp_path, {f'{i}.txt': b'line %d\n' % i * 5_000 for i in range(4)})
  docs = text.load_corpus(tmp_path, documents='line').train
  for packing in text.PACKINGS:
    data = make(docs, packing=packing, is_training=True)
    next(data)
    pickled = pickle.dumps(data)
    assert len(pickled) < 5000
    other = pickle.loads(pickled)
    assert other.documents.names[0] == docs.names[0]
    records = np.arange(8), np.arange(8)
    assert_same(other.read(*records), data.read(*records))
