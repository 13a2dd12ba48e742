"""Tests of the text input: windows, packings, splits, positions, hosts."""

import gzip
import hashlib
import json
import os
import pathlib
import pickle
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from jaxline.inputs import __main__ as program
from jaxline.inputs import text
from jaxline.inputs import tokenization

D = text.DOCUMENT_TOKEN


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


def write(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
  for name, data in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
  return folder


def documents(*contents: bytes) -> text.Documents:
  tokens = [t for data in contents for t in (D, *data)]
  names = tuple(f'{i}.txt' for i in range(len(contents)))
  return text.Documents(
    names=names,
    tokens=np.array(tokens, np.uint16),
    starts=np.flatnonzero(np.array(tokens) == D),
    sha256=f'hash of {names}',
    num_bytes=sum(map(len, contents)),
  )


# One document whose 201 tokens are all different: a window tells its place.
COUNTING = documents(bytes(range(200)))
PLACE = {D: 0} | {byte: byte + 1 for byte in range(200)}
EPOCH = {'reset_for_eval': True, 'eval_loop_num_batches': None}


def counting_input(**kwargs):
  kwargs = {
    'documents': COUNTING,
    'batch_size': 8,
    'length': 10,
    'input_random_seed': 7,
    'is_training': True,
  } | kwargs
  return text.TextInput(**kwargs)


def one_epoch(docs, **kwargs):
  return text.TextInput(documents=docs, **EPOCH, **kwargs)


def evaluate(docs, **kwargs):
  return list(one_epoch(docs, **kwargs).eval_batches())


def assert_same(actual: dict, expected: dict) -> None:
  assert actual.keys() == expected.keys()
  for key in expected:
    np.testing.assert_array_equal(actual[key], expected[key])
    assert actual[key].dtype == expected[key].dtype


def joined(batches) -> dict:
  batches = list(batches)
  return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def everything(corpus: text.Corpus) -> list[str]:
  return sorted([*corpus.train.names, *corpus.eval.names])


# Which files.


def test_a_folder_is_all_its_text_files(tmp_path):
  write(
    tmp_path,
    {
      'b.txt': b'b',
      'a/z.py': b'z\xff',
      'a-b.txt': b'-',
      'empty.txt': b'',
      'image.png': b'\x89PNG\0',
      '.hidden': b'no',
      '.git/config': b'no',
    },
  )
  corpus = text.load_corpus(tmp_path)
  assert everything(corpus) == ['a-b.txt', 'a/z.py', 'b.txt']
  assert corpus.train.num_bytes + corpus.eval.num_bytes == 4


def test_globs_and_lists(tmp_path):
  write(tmp_path, {'x/a.md': b'1', 'x/y/b.md': b'2', 'x/c.txt': b'3'})
  write(tmp_path, {'z/a.md': b'4', 'z/nul.md': b'\0'})
  assert everything(text.load_corpus(f'{tmp_path}/x/**/*.md')) == [
    'a.md',
    'y/b.md',
  ]
  # Names tell entries apart; what two entries match is read once; a glob takes
  # even what looks binary.
  entries = [f'{tmp_path}/x', f'{tmp_path}/[xz]/*.md', tmp_path / 'x' / 'c.txt']
  assert everything(text.load_corpus(entries)) == [
    '../1/z/a.md',
    '../1/z/nul.md',
    'a.md',
    'c.txt',
    'y/b.md',
  ]


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
  write(tmp_path, {'a': b'1', 'b': b'2', 'locked/c': b'3'})
  scandir = os.scandir

  def refuse(path):
    if 'locked' in str(path):  # To remove a folder, Python gives a number.
      raise PermissionError(f'Permission denied: {path}')
    return scandir(path)

  monkeypatch.setattr(os, 'scandir', refuse)
  with pytest.raises(PermissionError, match='locked'):
    text.load_corpus(tmp_path)


def test_a_linked_file_is_one_file(tmp_path):
  write(tmp_path, {'a': b'1', 'b': b'2'})
  (tmp_path / 'c').symlink_to(tmp_path / 'a')
  (tmp_path / 'dangling').symlink_to(tmp_path / 'nowhere')
  assert everything(text.load_corpus(tmp_path)) == ['a', 'b']


def test_contents_and_hash(tmp_path):
  files = {f'{i:02}': bytes([i + 1]) * (i + 1) for i in range(40)}
  corpus = text.load_corpus(write(tmp_path, files))
  for split in corpus.train, corpus.eval:
    assert list(split.names) == sorted(split.names)
    assert split.data() == b''.join(files[name] for name in split.names)
    expected = [t for name in split.names for t in (D, *files[name])]
    np.testing.assert_array_equal(split.tokens, expected)
    assert split.num_bytes == len(split.data())
    expected = hashlib.sha256(np.array(expected, np.uint16).tobytes())
    assert split.sha256 == expected.hexdigest()


def test_nothing_found(tmp_path):
  write(tmp_path, {'a.txt': b'a', 'b.txt': b'b'})
  with pytest.raises(ValueError, match=r'looked for .*nowhere'):
    text.load_corpus(tmp_path / 'nowhere')
  with pytest.raises(ValueError, match=r'looked for .*\*\.md'):
    text.load_corpus([tmp_path, f'{tmp_path}/*.md'])
  (tmp_path / 'folder').mkdir()
  with pytest.raises(ValueError, match=r'looked for .*folder'):
    text.load_corpus(tmp_path / 'folder')
  with pytest.raises(ValueError, match='0 documents'):
    text.load_corpus([])


# The split.


def test_the_split_goes_by_the_hash_of_the_name(tmp_path):
  files = {f'{i}.txt': b'text' for i in range(200)}
  corpus = text.load_corpus(write(tmp_path, files), eval_fraction=0.25)
  held_out = {
    name
    for name in files
    if int(hashlib.sha256(f'eval/{name}'.encode()).hexdigest()[:8], 16)
    < 0.25 * 2**32
  }
  assert set(corpus.eval.names) == held_out
  assert set(corpus.train.names) == set(files) - held_out
  assert 30 < len(held_out) < 70

  write(tmp_path, {f'{i}.txt': b'more' for i in range(200, 220)})
  more = text.load_corpus(tmp_path, eval_fraction=0.25)
  assert held_out == set(more.eval.names) & set(files)


@pytest.mark.parametrize('fraction', [1e-9, 1 - 1e-9])
def test_both_splits_have_a_file(tmp_path, fraction):
  write(tmp_path, {'a': b'1', 'b': b'2', 'c': b'3'})
  corpus = text.load_corpus(tmp_path, eval_fraction=fraction)
  num_eval = 1 if fraction < 0.5 else 2
  assert (corpus.eval.num_documents, corpus.train.num_documents) == (
    num_eval,
    3 - num_eval,
  )
  assert everything(corpus) == ['a', 'b', 'c']


def test_the_split_of_lines_goes_by_their_names(tmp_path):
  text_of = {f'a:{i}': f'line {i}'.encode() for i in range(1, 301)}
  write(tmp_path, {'a': b'\n'.join(text_of.values())})
  corpus = text.load_corpus(tmp_path, documents='line', eval_fraction=0.25)
  held_out = [
    name
    for name in text_of
    if int(hashlib.sha256(f'eval/{name}'.encode()).hexdigest()[:8], 16)
    < 0.25 * 2**32
  ]
  assert 50 < len(held_out) < 100
  assert list(corpus.eval.names) == held_out
  assert corpus.eval.data() == b''.join(text_of[name] for name in held_out)
  assert set(corpus.train.names) == set(text_of) - set(held_out)
  assert corpus.train.sha256 != corpus.eval.sha256
  # Neither split is ever empty.
  for fraction, sizes in (1e-9, (299, 1)), (1 - 1e-9, (1, 299)):
    few = text.load_corpus(tmp_path, documents='line', eval_fraction=fraction)
    assert (few.train.num_documents, few.eval.num_documents) == sizes
    assert sorted(everything(few)) == sorted(text_of)


def test_documents_of_lines(tmp_path):
  lines = [b'one', b'', b'two\xff \r', b'  ', b'three']
  write(
    tmp_path,
    {'b.txt': b'\n'.join(lines) + b'\n', 'a.gz': gzip.compress(b'zip\nped')},
  )
  corpus = text.load_corpus(tmp_path, documents='line')
  assert everything(corpus) == [
    'a.gz:1',
    'a.gz:2',
    'b.txt:1',
    'b.txt:3',
    'b.txt:4',
    'b.txt:5',
  ]
  contents = {
    'a.gz:1': b'zip',
    'a.gz:2': b'ped',
    'b.txt:1': b'one',
    'b.txt:3': b'two\xff ',
    'b.txt:4': b'  ',
    'b.txt:5': b'three',
  }
  for split in corpus.train, corpus.eval:
    names = list(split.names)
    assert names == sorted(names) == [split.names[i] for i in range(len(names))]
    assert split.names[-1] == names[-1]
    np.testing.assert_array_equal(
      split.tokens, [t for name in names for t in (D, *contents[name])]
    )
    np.testing.assert_array_equal(
      split.starts, np.flatnonzero(split.tokens == D)
    )
    assert split.num_bytes == sum(len(contents[name]) for name in names)


def test_documents_of_json(tmp_path):
  values = ['naïve', '', 'two\nlines', '\ud800', 'last']
  data = '\n'.join(json.dumps({'id': 1, 'text': v}) for v in values) + '\n\n'
  write(tmp_path, {'a.jsonl.gz': gzip.compress(data.encode())})
  corpus = text.load_corpus(tmp_path, documents='jsonl')
  found = {}
  for split in corpus.train, corpus.eval:
    contents = split.tokens.tolist()
    ends = [*split.starts[1:].tolist(), len(contents)]
    for name, i, j in zip(split.names, split.starts, ends, strict=True):
      found[name] = bytes(contents[i + 1 : j])
  assert found == {
    'a.jsonl.gz:1': 'naïve'.encode(),
    'a.jsonl.gz:3': b'two\nlines',
    'a.jsonl.gz:4': b'?',
    'a.jsonl.gz:5': b'last',
  }
  for bad in '{"text": 3}', '{"txt": ""}', '[]', '{':
    write(tmp_path, {'b.jsonl': b'{"text": "x"}\n' + bad.encode()})
    with pytest.raises(ValueError, match=r'b\.jsonl:2'):
      text.load_corpus(tmp_path, documents='jsonl')


def test_unpacked_files(tmp_path):
  write(
    tmp_path,
    {
      'a.gz': gzip.compress(b'first'),
      'b.txt': b'second',
      'empty.gz': gzip.compress(b''),
      'binary.gz': gzip.compress(b'\0'),
    },
  )
  corpus = text.load_corpus(tmp_path)
  assert everything(corpus) == ['a.gz', 'b.txt']
  assert corpus.train.num_bytes + corpus.eval.num_bytes == 11
  assert {corpus.train.data(), corpus.eval.data()} == {b'first', b'second'}
  for bad in b'no gzip', gzip.compress(b'text' * 100)[:20]:
    write(tmp_path, {'bad.gz': bad})
    with pytest.raises(ValueError, match=r'bad\.gz'):
      text.load_corpus(tmp_path)


def test_the_command(tmp_path, capsys):
  files = write(tmp_path / 'text', {f'{i}.txt': b'text' for i in range(9)})
  options = [f'--cache_dir={tmp_path / "cache"}', '--documents=line']
  assert program.main(['tokenize', str(files), *options]) == 0
  corpus = text.load_corpus(
    files, documents='line', cache_dir=tmp_path / 'cache'
  )
  out, _ = capsys.readouterr()
  assert out.startswith(corpus.summary)
  assert len([*tmp_path.glob('cache/*')]) == 1
  for wrong, message in (
    ([str(tmp_path / 'no')], 'no'),
    ([str(files), '--config=x.py'], '--config'),
    ([str(files), '--eval_fraction=2'], 'eval_fraction'),
    ([], '--config'),
    (['--config=x.py', '--tokenizer=bytes'], 'tokenizer'),
  ):
    assert program.main(['tokenize', *wrong, *options]) == 2
    _, err = capsys.readouterr()
    assert message in err
    assert err.count('\n') == 1


@pytest.mark.filterwarnings('ignore:the load_module')
def test_the_command_reads_what_a_config_reads(tmp_path, capsys):
  files = write(tmp_path / 'text', {f'{i}.txt': b'text' * 99 for i in range(9)})
  arguments = [
    'tokenize',
    f'--config={pathlib.Path(__file__).parents[1] / "configs" / "lm.py"}',
    f'--config.experiment_kwargs.config.files={files}',
    f'--config.experiment_kwargs.config.cache_dir={tmp_path / "cache"}',
  ]
  assert program.main(arguments) == 0
  out, _ = capsys.readouterr()
  assert 'TextInput: ' in out
  assert len([*tmp_path.glob('cache/*')]) == 1


# Training.


def test_training_windows():
  """Two and a half epochs of 20 windows, in batches that cross their ends."""
  data = counting_input()
  batch = next(data)
  assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
    'ids': ((8, 10), 'int32'),
    'labels': ((8, 10), 'int32'),
    'weights': ((8, 10), 'float32'),
  }
  rows = joined([batch] + [next(data) for _ in range(6)])
  ids = np.vectorize(PLACE.get)(rows['ids'])
  labels = np.vectorize(PLACE.get)(rows['labels'])
  starts = ids[:, 0]
  np.testing.assert_array_equal(ids, (starts[:, None] + np.arange(10)) % 201)
  np.testing.assert_array_equal(labels, (ids + 1) % 201)
  np.testing.assert_array_equal(rows['weights'], labels != 0)

  orders = []
  for epoch in range(2):
    # The place of the first cut, by an independent formula.
    digest = hashlib.sha256(f'offset/7/{epoch}'.encode()).hexdigest()
    offset = int(digest[:16], 16) % 201
    order = (starts[20 * epoch : 20 * (epoch + 1)] - offset) % 201
    np.testing.assert_array_equal(np.sort(order), np.arange(0, 200, 10))
    orders.append((offset, order.tolist()))
  assert orders[0][0] != orders[1][0]
  assert orders[0][1] != orders[1][1] != sorted(orders[1][1])


def test_the_order_is_that_of_earlier_versions():
  first = [PLACE[token] for token in next(counting_input())['ids'][:, 0]]
  assert first == [52, 132, 12, 183, 32, 2, 193, 162]


def test_a_text_of_one_window():
  """The circle closes: the label after the last byte is its first token."""
  data = counting_input(documents=documents(b'ab'), batch_size=2, length=3)
  seen = set()
  for row in joined(next(data) for _ in range(10))['ids'].tolist():
    assert row in ([D, 97, 98], [97, 98, D], [98, D, 97])
    seen.add(row[0])
  assert seen == {D, 97, 98}


@pytest.mark.parametrize(
  ('change', 'named'),
  [
    ({'input_random_seed': 8}, 'seed is 7 in the state and 8 here'),
    ({'length': 9}, 'length is 10 in the state and 9 here'),
    ({'packing': 'padded'}, "packing is 'stream' in the state and 'padded'"),
    ({'is_training': False, 'shuffle': True}, 'is_training is True in the st'),
    ({'documents': documents(b'x' * 100, b'y' * 100)}, 'corpus_sha256 is'),
  ],
)
def test_a_foreign_state_is_refused(change, named):
  state = counting_input().get_state()
  with pytest.raises(ValueError, match=named):
    counting_input(**change).set_state(state)


def test_the_state_of_another_text_is_refused(tmp_path):
  write(tmp_path, {'a': b'1' * 20, 'b': b'2' * 20})
  kwargs = {'files': tmp_path, 'length': 4}

  def make():
    return text.TextInput(batch_size=1, is_training=True, **kwargs)

  state = make().get_state()
  make().set_state(state)
  write(tmp_path, {'a': b'3' * 20, 'b': b'4' * 20})
  with pytest.raises(ValueError, match=r'corpus_sha256 is .* and .* here'):
    make().set_state(state)


def test_too_little_text():
  with pytest.raises(ValueError, match='no records'):
    next(counting_input(length=202))
  next(counting_input(length=201))
  with pytest.raises(ValueError, match='no records'):
    next(
      one_epoch(documents(b'', b''), batch_size=1, length=3, packing='padded')
    )


# Packings, against a construction of their own.

TEXTS = documents(b'abcdefghijk', b'', b'l', b'mnopqrs', b't', b'uvwx')


def naive_rows(docs, length, packing):
  """Builds each row of an epoch of evaluation, token by token."""
  tokens = docs.tokens.tolist()
  if packing == 'padded':
    ends = [*docs.starts[1:].tolist(), len(tokens)]
    streams = [
      tokens[i:j] for i, j in zip(docs.starts.tolist(), ends, strict=True)
    ]
  else:
    streams = [tokens]
  for stream in streams:
    for first in range(0, len(stream) - 1, length):
      row = {'ids': [], 'labels': [], 'weights': []}
      row |= {'segment_ids': [], 'segment_pos': [], 'paddings': []}
      segment, place = 1, -1
      for i in range(first, first + length):
        is_real = i + 1 < len(stream)
        label = stream[i + 1] if is_real else D
        # The last token of a stream is read by nobody but 'stream'.
        read = is_real or (packing == 'stream' and i < len(stream))
        token = stream[i] if read else D
        if token == D and i > first:
          segment, place = segment + 1, 0
        else:
          place += 1
        row['ids'].append(token)
        row['labels'].append(label)
        row['weights'].append(float(label != D))
        row['segment_ids'].append(segment if is_real else 0)
        row['segment_pos'].append(place if is_real else 0)
        row['paddings'].append(float(not is_real))
      keys = ['ids', 'labels', 'weights']
      keys += {
        'stream': [],
        'packed': ['segment_ids', 'segment_pos'],
        'padded': ['paddings'],
      }[packing]
      yield {k: row[k] for k in keys}


@pytest.mark.parametrize('packing', text.PACKINGS)
@pytest.mark.parametrize('length', [1, 2, 3, 4, 7, 11, 12, 13, 31, 32, 50])
@pytest.mark.parametrize('batch_size', [1, 4])
def test_packings(packing, length, batch_size):
  expected = list(naive_rows(TEXTS, length, packing))
  data = one_epoch(TEXTS, batch_size=batch_size, length=length, packing=packing)
  assert data.num_records() == len(expected)
  batches = list(data.eval_batches())
  assert len(batches) == -(-len(expected) // batch_size)
  rows = joined(batches)
  assert rows.keys() == expected[0].keys()
  for key, value in rows.items():
    np.testing.assert_array_equal(
      value[: len(expected)], [row[key] for row in expected], err_msg=key
    )
    is_float = key in ('weights', 'paddings')
    assert value.dtype == (np.float32 if is_float else np.int32)
  assert not rows['weights'][len(expected) :].any()
  # Each byte is a label once.
  labels = rows['labels'][rows['weights'] == 1]
  assert labels.astype(np.uint8).tobytes() == TEXTS.data()
  assert rows['weights'].sum() == TEXTS.num_bytes == 24


def test_packed_training_windows():
  """The same windows as of 'stream', with the segments of these rows."""
  kwargs = {'documents': TEXTS, 'length': 9}
  stream = counting_input(**kwargs)
  packed = counting_input(packing='packed', **kwargs)
  for _ in range(5):
    batch, expected = next(packed), next(stream)
    for key, value in expected.items():
      np.testing.assert_array_equal(batch[key], value)
    for row, ids in enumerate(batch['ids'].tolist()):
      segment, place = 1, -1
      for i, token in enumerate(ids):
        place += 1
        if token == D and i:
          segment, place = segment + 1, 0
        assert batch['segment_ids'][row, i] == segment
        assert batch['segment_pos'][row, i] == place
    # No label is of another document than what reads it.
    crosses = batch['segment_ids'][:, 1:] != batch['segment_ids'][:, :-1]
    assert crosses.any()
    assert not batch['weights'][:, :-1][crosses].any()


def test_padded_training_rows():
  kwargs = {'documents': TEXTS, 'length': 4, 'packing': 'padded'}
  data = counting_input(batch_size=1, **kwargs)
  expected = sorted(row['labels'] for row in naive_rows(TEXTS, 4, 'padded'))
  for _ in range(3):
    epoch = [next(data)['labels'][0].tolist() for _ in expected]
    assert sorted(epoch) == expected
    assert epoch != expected


def test_wide_tokens():
  """Large vocabularies: tokens of 32 bits, another document token."""

  class Words(tokenization.Tokenizer):
    vocab_size, document_id, identity = 100_000, 7, 'words'

    def encode_batch(self, texts):
      return [np.array(t.split(), np.int32) for t in texts]

    def _decode(self, ids):
      return ' '.join(map(str, ids))

  docs = text.Documents(
    names=('a', 'b'),
    tokens=np.array([7, 99_999, 3, 7, 70_000], np.uint32),
    starts=np.array([0, 3]),
    sha256='hash',
    num_bytes=13,
    tokenizer=Words(),
  )
  data = one_epoch(docs, batch_size=1, length=6, packing='packed')
  (batch,) = data.eval_batches()
  assert batch['ids'].tolist() == [[7, 99_999, 3, 7, 7, 7]]
  assert batch['labels'].tolist() == [[99_999, 3, 7, 70_000, 7, 7]]
  assert batch['weights'].tolist() == [[1, 1, 0, 1, 0, 0]]
  assert batch['segment_ids'].tolist() == [[1, 1, 1, 2, 0, 0]]
  assert data.ids_to_strings(batch['ids'], [3]) == ['99999 3']
  assert data.data_identity()['tokenizer'] == 'words'
  assert docs.data() == b'99999 370000'


# Evaluation.


def test_a_short_evaluation_is_spread_over_the_text():
  kwargs = {'batch_size': 2, 'length': 10}
  batches = evaluate(COUNTING, max_batches=2, **kwargs)
  # 4 of 20 windows.
  assert len(batches) == 2
  starts = [PLACE[t] for t in joined(batches)['ids'][:, 0]]
  assert starts == [0, 50, 100, 150]
  for hosts in 1, 2:
    part = one_epoch(
      COUNTING,
      batch_size=2 // hosts,
      length=10,
      max_batches=2,
      infeed_host_index=0,
      num_infeed_hosts=hosts,
    )
    assert part.num_records() == 4
  whole = evaluate(COUNTING, **kwargs)
  for enough in 10, 1000:
    capped = evaluate(COUNTING, max_batches=enough, **kwargs)
    for actual, expected in zip(capped, whole, strict=True):
      assert_same(actual, expected)
  padded = one_epoch(TEXTS, packing='padded', max_batches=1, **kwargs)
  (batch,) = padded.eval_batches()
  # 2 of 6 rows: of 11, 1, 7, 1 and 4 bytes.
  assert [bytes(r[:1].astype(np.uint8)) for r in batch['labels']] == [
    b'a',
    b'm',
  ]


def test_argument_errors(tmp_path):
  write(tmp_path, {'a': b'1', 'b': b'2'})
  given = {'files': tmp_path, 'documents': 'file', 'is_training': False}
  for key, fields in (
    ('length', {'length': 0}),
    ('length', {'length': 2.0}),
    ('max_batches', {'max_batches': True}),
    ('max_batches', {'max_batches': 3}),  # Training sees all of the text.
    ('packing', {'packing': 'rows'}),
    ('files', {'documents': 'file'}),
    ('tokenizer', {'tokenizer': 'bytes'}),  # COUNTING has one.
    ('eval_fraction', {'eval_fraction': 0.1}),
    ('split', {**given, 'split': 'test'}),
    ('eval_fraction', {**given, 'eval_fraction': 1}),
    ('documents', {**given, 'documents': 'word'}),
  ):
    with pytest.raises(ValueError, match=key):
      counting_input(**fields)


def test_where():
  docs = documents(b'abcdefghij', b'klmn')
  data = one_epoch(docs, batch_size=1, length=4)
  assert [data.describe_record(r, 0) for r in range(4)] == [
    '0.txt, from byte 0 on',
    '0.txt, from byte 3 on',
    '0.txt, from byte 7 on',
    '1.txt, from byte 0 on',
  ]
  data = one_epoch(docs, batch_size=1, length=4, packing='padded')
  assert data.describe_record(2, 0) == '0.txt, from byte 7 on'
  assert data.describe_record(3, 0) == '1.txt, from byte 0 on'
  data = one_epoch(docs, batch_size=1, length=4, max_batches=2)
  assert data.describe_record(1, 0) == '0.txt, from byte 7 on'
  # In training, a window is where its epoch cuts it.
  data = counting_input(batch_size=1, shuffle=False)
  for position in range(45):
    epoch, record = divmod(position, 20)
    place = PLACE[int(next(data)['ids'][0, 0])]
    assert data.describe_record(record, epoch) == (
      f'0.txt, from byte {max(0, place - 1)} on'
    )


def test_files_as_input(tmp_path):
  write(tmp_path, {f'{i}.txt': b'%d' % i * (i + 3) for i in range(9)})
  corpus = text.load_corpus(tmp_path, eval_fraction=0.3)
  kwargs = {'batch_size': 2, 'length': 5}
  for split, docs in ('train', corpus.train), ('eval', corpus.eval):
    data = text.TextInput(
      files=tmp_path, split=split, eval_fraction=0.3, **kwargs
    )
    assert list(data.documents.names) == list(docs.names)
    assert_same(next(data), next(text.TextInput(documents=docs, **kwargs)))
    assert data.identity()['corpus_sha256'] == docs.sha256
  default = text.TextInput(files=tmp_path, eval_fraction=0.3, **kwargs)
  assert list(default.documents.names) == list(corpus.eval.names)
  default = text.TextInput(
    files=tmp_path, eval_fraction=0.3, is_training=True, **kwargs
  )
  assert list(default.documents.names) == list(corpus.train.names)
  lines = text.TextInput(files=tmp_path, documents='line', **kwargs)
  assert lines.documents.names[0].endswith('.txt:1')


@pytest.mark.process
def test_workers_map_the_tokens_themselves(tmp_path):
  write(tmp_path, {f'{i}.txt': b'line %d\n' % i * 5_000 for i in range(4)})
  corpus = text.load_corpus(tmp_path)
  for kind in 'file', 'line':
    docs = text.load_corpus(tmp_path, documents=kind).train
    assert len(pickle.dumps(docs)) < 1000
    for packing in text.PACKINGS:
      data = counting_input(documents=docs, packing=packing)
      next(data)
      assert len(pickle.dumps(data)) < 5000
      other = pickle.loads(pickle.dumps(data))
      assert other.documents.names[0] == docs.names[0]
      assert_same(next(other), next(data))
  in_memory = pickle.loads(pickle.dumps(COUNTING))
  np.testing.assert_array_equal(in_memory.tokens, COUNTING.tokens)
  data = counting_input(documents=corpus.train, num_workers=1)
  expected = counting_input(documents=corpus.train)
  try:
    for _ in range(3):
      assert_same(next(data), next(expected))
  finally:
    data.close()


# The standard library.


def test_the_standard_library():
  corpus, again = text.load_corpus(), text.load_corpus('stdlib')
  assert corpus.train.sha256 == again.train.sha256
  names = everything(corpus)
  assert {'argparse.py', 'json/decoder.py'} <= set(names)
  for name in names:
    folders = set(name.split('/')[:-1])
    assert name.endswith('.py')
    assert not folders & {'test', 'tests', 'idle_test', 'site-packages'}
  size = corpus.train.num_bytes + corpus.eval.num_bytes
  assert 8e6 < size < 20e6
  assert 0.02 < corpus.eval.num_bytes / size < 0.1
  assert not set(corpus.train.names) & set(corpus.eval.names)
  name = corpus.eval.names[0]
  path = os.path.join(sysconfig.get_path('stdlib'), name)
  data = pathlib.Path(path).read_bytes()
  assert corpus.eval.data().startswith(data)
  batches = evaluate(corpus.eval, batch_size=64, length=512)
  weight = sum(int(batch['weights'].sum()) for batch in batches)
  assert weight == corpus.eval.num_bytes
  stream = np.tile(corpus.train.tokens, 2).tobytes()
  batch = next(counting_input(documents=corpus.train, length=64))
  assert batch['ids'][0].astype(np.uint16).tobytes() in stream


def test_looking_at_text_imports_no_other_library(tmp_path):
  write(tmp_path, {'a': b'text', 'b': b'text'})
  code = (
    'import sys; from jaxline.inputs import text;'
    f'text.TextInput(files={str(tmp_path)!r}, batch_size=1, length=4);'
    'print(sorted({"grain", "tensorflow", "sentencepiece", "tokenizers"}'
    ' & set(sys.modules)))'
  )
  run = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    cwd=pathlib.Path(__file__).parents[1],
  )
  assert run.stdout.strip() == '[]'
