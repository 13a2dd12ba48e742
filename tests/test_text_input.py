"""Tests of the text input: windows, splits, positions, shares of processes."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from jaxline.inputs import text

D = text.DOCUMENT_TOKEN


def write(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
  for name, data in files.items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
  return folder


def documents(*contents: bytes) -> text.Documents:
  tokens = [t for data in contents for t in (D, *data)]
  names = tuple(f'{i}.txt' for i in range(len(contents)))
  return text.Documents(names, np.array(tokens, np.uint16), f'hash of {names}')


# One document whose 201 tokens are all different: a window tells its place.
COUNTING = documents(bytes(range(200)))
PLACE = {D: 0} | {byte: byte + 1 for byte in range(200)}


def counting_input(**kwargs):
  kwargs = {'batch_size': 8, 'length': 10, 'seed': 7} | kwargs
  return text.TrainInput(COUNTING, **kwargs)


def assert_same(actual: text.Batch, expected: text.Batch) -> None:
  assert actual.keys() == expected.keys()
  for key in expected:
    np.testing.assert_array_equal(actual[key], expected[key])
    assert actual[key].dtype == expected[key].dtype


def joined(batches) -> text.Batch:
  batches = list(batches)
  return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def everything(corpus: text.Corpus) -> list[str]:
  return sorted(corpus.train.names + corpus.eval.names)


# Tokens.


def test_tokens_are_the_bytes():
  np.testing.assert_array_equal(text.encode('aé'), [97, 0xC3, 0xA9])
  np.testing.assert_array_equal(text.encode(b'\xff\x00'), [255, 0])
  assert text.encode('').shape == (0,)
  assert text.encode('a').dtype == np.int32
  assert text.decode(text.encode('naïve ∑ 🙂\n')) == 'naïve ∑ 🙂\n'


def test_decode_never_fails():
  assert text.decode([D, 97, D, 98, D]) == 'ab'
  assert text.decode([97, 0xC3, 98]) == 'a\ufffdb'
  assert text.decode([97, 257, -1, 98]) == 'a\ufffd\ufffdb'
  assert text.decode([]) == ''


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
  assert corpus.train.num_files + corpus.eval.num_files == 3


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
    '0/a.md',
    '0/c.txt',
    '0/y/b.md',
    '1/z/a.md',
    '1/z/nul.md',
  ]


def test_names_are_sorted_whatever_the_order_of_entries(tmp_path):
  write(tmp_path, {f'{i}.txt': b'text' for i in range(12)})
  entries = [tmp_path / f'{11 - i}.txt' for i in range(12)]
  names = text.load_corpus(entries).train.names
  assert {'10/1.txt', '2/9.txt'} <= set(names)
  assert list(names) == sorted(names)


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
  write(tmp_path, {'a': b'1', 'b': b'2', 'locked/c': b'3'})
  scandir = os.scandir

  def refuse(path):
    if 'locked' in os.fspath(path):
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
  lines = ''.join(
    f'{hashlib.sha256(data).hexdigest()}  {name}\n'
    for name, data in sorted(files.items())
  )
  assert corpus.sha256 == hashlib.sha256(lines.encode()).hexdigest()

  (tmp_path / '39').rename(tmp_path / '40')
  renamed = text.load_corpus(tmp_path)
  assert renamed.sha256 != corpus.sha256
  (tmp_path / '40').write_bytes(b'other')
  assert text.load_corpus(tmp_path).sha256 != renamed.sha256


def test_nothing_found(tmp_path):
  write(tmp_path, {'a.txt': b'a', 'b.txt': b'b'})
  with pytest.raises(ValueError, match=r'looked for .*nowhere'):
    text.load_corpus(tmp_path / 'nowhere')
  with pytest.raises(ValueError, match=r'looked for .*\*\.md'):
    text.load_corpus([tmp_path, f'{tmp_path}/*.md'])
  (tmp_path / 'folder').mkdir()
  with pytest.raises(ValueError, match='files below the folder'):
    text.load_corpus(tmp_path / 'folder')
  with pytest.raises(ValueError, match='has 0 files'):
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
  assert (corpus.eval.num_files, corpus.train.num_files) == (
    num_eval,
    3 - num_eval,
  )
  assert everything(corpus) == ['a', 'b', 'c']


def test_split_errors(tmp_path):
  write(tmp_path, {'only.txt': b'text', 'empty.txt': b''})
  with pytest.raises(ValueError, match='has 1 files that are not empty'):
    text.load_corpus(tmp_path)
  for fraction in 0, 1, -0.1:
    with pytest.raises(ValueError, match='eval_fraction'):
      text.load_corpus(tmp_path, eval_fraction=fraction)


# Training.


def test_training_windows():
  """Two and a half epochs of 20 windows, in batches that cross their ends."""
  data = counting_input()
  batch = next(data)
  assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
    'inputs': ((8, 10), 'int32'),
    'targets': ((8, 10), 'int32'),
    'weights': ((8, 10), 'float32'),
  }
  rows = joined([batch] + [next(data) for _ in range(6)])
  inputs = np.vectorize(PLACE.get)(rows['inputs'])
  targets = np.vectorize(PLACE.get)(rows['targets'])
  starts = inputs[:, 0]
  np.testing.assert_array_equal(inputs, (starts[:, None] + np.arange(10)) % 201)
  np.testing.assert_array_equal(targets, (inputs + 1) % 201)
  np.testing.assert_array_equal(rows['weights'], targets != 0)

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
  """Runs that were saved a year ago shall continue with the data they miss."""
  first = [PLACE[token] for token in next(counting_input())['inputs'][:, 0]]
  assert first == [62, 92, 42, 183, 193, 32, 162, 72]


def test_seeds():
  a, b, c = (counting_input(seed=s) for s in (7, 7, 8))
  first = next(a)
  assert_same(next(b), first)
  assert not np.array_equal(next(c)['inputs'], first['inputs'])
  next(counting_input(seed=2**40))
  next(counting_input(seed=-1))


def test_a_text_of_one_window():
  """The circle closes: the target after the last byte is its first token."""
  data = text.TrainInput(documents(b'ab'), batch_size=2, length=3, seed=0)
  for row in joined(next(data) for _ in range(3))['inputs'].tolist():
    assert row in ([D, 97, 98], [97, 98, D], [98, D, 97])


def test_resume_is_exact_at_every_position():
  straight = counting_input()
  states, batches = [straight.get_state()], []
  for _ in range(9):  # Three and a half epochs.
    batches.append(next(straight))
    states.append(straight.get_state())
  resumed = counting_input()
  for position in range(6):
    state = json.loads(json.dumps(states[position]))
    assert len(json.dumps(state)) < 300
    for data in resumed, counting_input():
      data.set_state(state)
      assert data.get_state() == states[position]
      for i in range(position, position + 3):
        assert_same(next(data), batches[i])
  assert iter(resumed) is resumed


@pytest.mark.parametrize(
  ('change', 'named'),
  [
    ({'seed': 8}, 'seed is 7 in the state and 8 here'),
    ({'batch_size': 4}, 'batch_size is 8 in the state and 4 here'),
    ({'length': 9}, 'length is 10 in the state and 9 here'),
  ],
)
def test_a_foreign_state_is_refused(change, named):
  state = counting_input().get_state()
  with pytest.raises(ValueError, match=named):
    counting_input(**change).set_state(state)


def test_the_state_of_another_text_is_refused(tmp_path):
  write(tmp_path, {'a': b'1' * 20, 'b': b'2' * 20})
  kwargs = {'batch_size': 1, 'length': 4, 'seed': 0}
  state = text.TrainInput(
    text.load_corpus(tmp_path).train, **kwargs
  ).get_state()
  text.TrainInput(text.load_corpus(tmp_path).train, **kwargs).set_state(state)
  write(tmp_path, {'a': b'3' * 20, 'b': b'4' * 20})
  other = text.TrainInput(text.load_corpus(tmp_path).train, **kwargs)
  with pytest.raises(ValueError, match=r'corpus_sha256 is .* another Python'):
    other.set_state(state)
  with pytest.raises(ValueError, match=r"lacks \['format'.* has \['step'\]"):
    other.set_state({'step': 3})
  with pytest.raises(ValueError, match='format is 0 in the state'):
    other.set_state(other.get_state() | {'format': 0})


def test_too_little_text():
  with pytest.raises(ValueError, match='201 tokens, fewer than one'):
    counting_input(length=202)
  next(counting_input(length=201))


# Several processes.


@pytest.mark.parametrize('count', [2, 4, 8])
def test_processes_share_each_batch(count):
  single = counting_input()
  parts = [
    counting_input(process_index=i, process_count=count) for i in range(count)
  ]
  for _ in range(6):
    batches = [next(part) for part in parts]
    assert all(b['inputs'].shape == (8 // count, 10) for b in batches)
    assert_same(joined(batches), next(single))
  # One process goes on where many were.
  again = counting_input()
  again.set_state(parts[-1].get_state())
  assert_same(next(again), next(single))


@pytest.mark.parametrize('count', [1, 2, 4])
def test_processes_share_the_evaluation(count):
  kwargs = {'batch_size': 4, 'length': 9}
  single = text.EvalInput(COUNTING, **kwargs)
  parts = [
    text.EvalInput(COUNTING, process_index=i, process_count=count, **kwargs)
    for i in range(count)
  ]
  # 23 windows: the last batch has three, which are not the same for all.
  assert {len(part) for part in parts} == {len(single)} == {6}
  for whole, *batches in zip(single, *parts, strict=True):
    assert_same(joined(batches), whole)
    assert all(b['inputs'].shape[1] == 9 for b in batches)


def test_process_defaults_are_those_of_jax(monkeypatch):
  monkeypatch.setattr('jax.process_count', lambda: 4)
  monkeypatch.setattr('jax.process_index', lambda: 3)
  expected = counting_input(process_index=3, process_count=4)
  assert_same(next(counting_input()), next(expected))


@pytest.mark.parametrize('cls', [text.TrainInput, text.EvalInput])
def test_argument_errors(cls):
  kwargs = {'batch_size': 8, 'length': 10}
  if cls is text.TrainInput:
    kwargs['seed'] = 0
  with pytest.raises(ValueError, match='batch_size=8 cannot be'):
    cls(COUNTING, process_index=0, process_count=3, **kwargs)
  with pytest.raises(ValueError, match='process_index is 2; expected 0 to 1'):
    cls(COUNTING, process_index=2, process_count=2, **kwargs)
  for key in 'batch_size', 'length':
    with pytest.raises(ValueError, match=f'{key} is 0; expected at least 1'):
      cls(COUNTING, **(kwargs | {key: 0}))


# Evaluation.


def test_evaluation_windows():
  data = text.EvalInput(documents(b'abc', b'de'), batch_size=2, length=4)
  a, b, c, d, e = b'abcde'
  (batch,) = data
  assert len(data) == 1
  assert_same(
    batch,
    {
      'inputs': np.array([[D, a, b, c], [D, d, e, D]], np.int32),
      'targets': np.array([[a, b, c, D], [d, e, D, D]], np.int32),
      'weights': np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.float32),
    },
  )
  assert_same(next(iter(data)), batch)


@pytest.mark.parametrize('length', [1, 2, 5, 7, 8, 100])
@pytest.mark.parametrize('batch_size', [1, 3])
def test_each_byte_is_a_target_once(length, batch_size):
  held_out = documents(b'first', b'2', b'third\xff\x00')
  data = text.EvalInput(held_out, batch_size=batch_size, length=length)
  batches = list(data)
  assert len(batches) == len(data)
  assert all(len(b['inputs']) == batch_size for b in batches[:-1])
  rows = joined(batches)
  counted = rows['targets'][rows['weights'] == 1]
  assert counted.astype(np.uint8).tobytes() == b'first2third\xff\x00'
  assert rows['weights'].sum() == held_out.num_bytes == 13
  # What is read is what was to be predicted one token before.
  np.testing.assert_array_equal(
    rows['inputs'].ravel()[1:], rows['targets'].ravel()[:-1]
  )


def test_a_short_evaluation_is_spread_over_the_text():
  kwargs = {'batch_size': 2, 'length': 10}
  batches = list(text.EvalInput(COUNTING, max_batches=2, **kwargs))
  # 4 of 20 windows.
  starts = [PLACE[t] for t in joined(batches)['inputs'][:, 0]]
  assert starts == [0, 50, 100, 150]
  whole = list(text.EvalInput(COUNTING, **kwargs))
  for enough in 10, 1000:
    capped = text.EvalInput(COUNTING, max_batches=enough, **kwargs)
    assert len(capped) == 10
    for actual, expected in zip(capped, whole, strict=True):
      assert_same(actual, expected)
  with pytest.raises(ValueError, match='max_batches is 0'):
    text.EvalInput(COUNTING, max_batches=0, **kwargs)


def test_compression_baselines():
  noise = np.random.default_rng(0).bytes(20_000)
  bits = text.compression_baselines(documents(noise[:10_000], noise[10_000:]))
  assert list(bits) == ['gzip -9', 'xz']
  assert all(8 < b < 8.1 for b in bits.values())
  # The second half is the first: xz sees that far back, gzip does not.
  twice = documents(noise * 2, noise * 2)
  assert text.compression_baselines(twice)['xz'] < 2.2
  bits = text.compression_baselines(documents(b'a' * 50_000, b'a' * 50_000))
  assert all(b < 0.02 for b in bits.values())


# The standard library.


def test_the_standard_library():
  corpus, again = text.load_corpus(), text.load_corpus('stdlib')
  assert corpus.sha256 == again.sha256
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
  batches = text.EvalInput(corpus.eval, batch_size=64, length=512)
  weight = sum(int(batch['weights'].sum()) for batch in batches)
  assert weight == corpus.eval.num_bytes
  stream = np.tile(corpus.train.tokens, 2).tobytes()
  batch = next(text.TrainInput(corpus.train, batch_size=2, length=64, seed=0))
  assert batch['inputs'][0].astype(np.uint16).tobytes() in stream


def test_looking_at_text_imports_neither_jax_nor_grain(tmp_path):
  write(tmp_path, {'a': b'text', 'b': b'text'})
  code = (
    'import sys; from jaxline.inputs import text;'
    f'corpus = text.load_corpus({str(tmp_path)!r});'
    'kwargs = dict(process_index=0, process_count=1);'
    'list(text.EvalInput(corpus.eval, batch_size=1, length=4, **kwargs));'
    'print(sorted({"jax", "grain", "tensorflow"} & set(sys.modules)))'
  )
  run = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    cwd=pathlib.Path(__file__).parents[1],
  )
  assert run.stdout.strip() == '[]'
