"""Tests of the token cache: keys, cut files, kills, bounded memory."""

import functools
import gzip
import hashlib
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import tracemalloc

from absl import logging
import numpy as np
import pytest

from jaxline import errors
from jaxline.inputs import text
from jaxline.inputs import token_cache
from jaxline.inputs import tokenization

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def files(tmp_path):
  """A folder of ten files."""
  folder = tmp_path / 'text'
  folder.mkdir()
  for i in range(10):
    (folder / f'{i}.txt').write_bytes(b'line %d\n' % i * (100 + i))
  return folder


@pytest.fixture
def cache(tmp_path):
  return tmp_path / 'cache'


@pytest.fixture
def warnings(monkeypatch):
  said = []
  monkeypatch.setattr(
    logging, 'warning', lambda message, *args: said.append(message % args)
  )
  return said


@pytest.fixture
def builds(monkeypatch):
  """Counts how often tokens are made."""
  seen = []
  run = token_cache.Builder.run

  def count(self, file, folder):
    seen.append(folder)
    run(self, file, folder)

  monkeypatch.setattr(token_cache.Builder, 'run', count)
  return seen


def digest(corpus):
  parts = [corpus.train.tokens, corpus.eval.tokens, corpus.train.starts]
  return hashlib.sha256(b''.join(p.tobytes() for p in parts)).hexdigest()


def names_in(cache):
  return sorted(p.name for p in cache.iterdir())


# What is kept.


def test_made_once(files, cache, builds):
  first = text.load_corpus(files, cache_dir=cache)
  again = text.load_corpus(files, cache_dir=cache)
  assert len(builds) == 1
  assert digest(again) == digest(first)
  assert again.train.sha256 == first.train.sha256
  assert again.train.names == first.train.names
  assert again.eval.num_bytes == first.eval.num_bytes
  # Nothing but the tokens is left, and they are mapped, not read.
  (name,) = names_in(cache)
  assert name.endswith('.tokens')
  assert isinstance(first.train.tokens.base.base, np.memmap)
  assert not first.train.tokens.flags.writeable


def test_the_default_folder(files, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
  text.load_corpus(files)
  folder = tmp_path / 'xdg' / 'jaxline' / 'tokens'
  assert len(names_in(folder)) == 1
  assert folder.stat().st_mode & 0o777 == 0o700  # It is one user's.
  monkeypatch.delenv('XDG_CACHE_HOME')
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  text.load_corpus(files)
  assert len(names_in(tmp_path / 'home' / '.cache' / 'jaxline' / 'tokens')) == 1


def test_all_that_tokens_depend_on_is_in_the_key(files, cache, builds):
  class Other(tokenization.ByteTokenizer):
    identity = 'other'

  def load(where=files, **kwargs):
    return text.load_corpus(where, cache_dir=cache, **kwargs)

  load()
  load(eval_fraction=0.5)
  load(documents='line')
  load(tokenizer=Other())
  (files / '9.txt').rename(files / 'a.txt')
  load()
  # A file that is left out by its content, and is not by its name.
  (files / 'b.png').write_bytes(b'\0')
  assert load().sha256 == load(eval_fraction=0.5).sha256
  glob = load(f'{files}/*')
  assert glob.train.num_files + glob.eval.num_files == 11
  # Two folders with the same names and sizes have tokens each, of one identity.
  other = files.with_name('elsewhere')
  shutil.copytree(files, other)
  assert load(other).train.sha256 == load().train.sha256
  assert len(names_in(cache)) == len(builds) == 9


def test_changed_text_is_noticed(files, cache, builds):
  """Of the same size, and with the time of the file that was there."""
  path = files / '3.txt'
  stat = path.stat()
  first = text.load_corpus(files, cache_dir=cache)
  other = path.read_bytes()[::-1]
  path.write_bytes(other)
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  second = text.load_corpus(files, cache_dir=cache)
  assert second.sha256 != first.sha256
  assert other in second.train.data() + second.eval.data()
  assert len(builds) == 2


def test_a_file_that_changes_meanwhile_is_an_error(files, cache, monkeypatch):
  documents = token_cache.Builder._documents

  def change(self, file, source):
    with (files / '3.txt').open('ab') as f:
      f.write(b'more')
    return documents(self, file, source)

  monkeypatch.setattr(token_cache.Builder, '_documents', change)
  with pytest.raises(ValueError, match=r'3\.txt was written while it was'):
    text.load_corpus(files, cache_dir=cache)
  assert names_in(cache) == []


def test_a_worker_maps_the_tokens_of_its_parent(files, cache):
  parent = text.load_corpus(files, cache_dir=cache).train
  data = pickle.dumps(parent)
  again = pickle.loads(data)
  assert isinstance(again.tokens.base.base, np.memmap)
  np.testing.assert_array_equal(again.tokens, parent.tokens)
  for path in files.iterdir():
    path.write_bytes(path.read_bytes()[::-1])
  (name,) = names_in(cache)
  text.load_corpus(files, cache_dir=cache)
  (other,) = {*names_in(cache)} - {name}
  (cache / other).replace(cache / name)
  with pytest.raises(ValueError, match='of other text'):
    pickle.loads(data)


# Folders that cannot be written to.


def test_a_folder_that_cannot_be_written_to_is_an_error(files, tmp_path):
  (tmp_path / 'file').write_bytes(b'')
  with pytest.raises(errors.UsageError, match='cache_dir'):
    text.load_corpus(files, cache_dir=tmp_path / 'file' / 'cache')


def test_a_cache_may_be_read_only(files, cache, builds, monkeypatch):
  expected = digest(text.load_corpus(files, cache_dir=cache))

  def refuse(*args, **kwargs):
    raise PermissionError('read-only')

  for name in 'mkdir', 'rename', 'replace':
    monkeypatch.setattr(os, name, refuse)
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  assert len(builds) == 1


# Several builders.

BUILD = """
import hashlib, pathlib, sys, time
from jaxline.inputs import text, token_cache
files, cache, go, mode = sys.argv[1:]
run = token_cache.Builder.run

def build(self, file, folder):
  run(self, file, folder)
  file.flush()
  print('built', flush=True)
  time.sleep(600 if mode == 'hang' else 0.5)

token_cache.Builder.run = build
print('ready', flush=True)
while not pathlib.Path(go).exists():
  time.sleep(0.01)
corpus = text.load_corpus(files, cache_dir=cache)
print(hashlib.sha256(corpus.train.tokens.tobytes()).hexdigest())
"""


def start(files, cache, go, mode=''):
  return subprocess.Popen(
    [sys.executable, '-c', BUILD, str(files), str(cache), str(go), mode],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )


@pytest.mark.process
def test_several_processes_at_once(files, cache, tmp_path):
  """Each builds, and one file stays."""
  go = tmp_path / 'go'
  processes = [start(files, cache, go) for _ in range(2)]
  try:
    for process in processes:
      assert process.stdout.readline() == 'ready\n'
    go.touch()
    results = [process.communicate()[0].split()[-1] for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
      process.stdout.close()
  assert [process.returncode for process in processes] == [0, 0]
  corpus = text.load_corpus(files, cache_dir=cache)
  expected = hashlib.sha256(corpus.train.tokens.tobytes()).hexdigest()
  assert set(results) == {expected}
  assert len(names_in(cache)) == 1


def test_the_first_of_two_builders_stays(files, cache, monkeypatch):
  run, inodes = token_cache.Builder.run, []

  def be_slow(self, file, folder):
    run(self, file, folder)
    if not inodes:
      inodes.append(None)
      text.load_corpus(files, cache_dir=cache)
      inodes[0] = next(cache.glob('*.tokens')).stat().st_ino

  monkeypatch.setattr(token_cache.Builder, 'run', be_slow)
  text.load_corpus(files, cache_dir=cache)
  (path,) = cache.iterdir()
  assert path.stat().st_ino == inodes[0]


def test_a_builder_that_is_killed(files, cache, tmp_path, builds):
  (tmp_path / 'go').touch()
  process = start(files, cache, tmp_path / 'go', 'hang')
  try:
    assert process.stdout.readline() == 'ready\n'
    assert process.stdout.readline() == 'built\n'
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
  (leftover,) = names_in(cache)
  assert leftover.endswith('.part')
  corpus = text.load_corpus(files, cache_dir=cache)
  assert len(builds) == 1
  assert corpus.train.num_documents + corpus.eval.num_documents == 10


# Size.


def make_large(folder, kind):
  folder.mkdir()
  line = b'{"text": "%s"}\n' % (b'some words of text ' * 10)
  data = line * (6 * 2**20 // len(line))
  if kind == 'gz':
    (folder / 'a.gz').write_bytes(gzip.compress(data, 1))
    (folder / 'b.gz').write_bytes(gzip.compress(data[: len(data) // 2], 1))
  else:
    (folder / 'a.txt').write_bytes(data)
    (folder / 'b.txt').write_bytes(data[: len(data) // 2])
  return len(data) * 3 // 2


@pytest.mark.parametrize('kind', ['file', 'gz', 'line', 'jsonl'])
def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch, kind):
  """9 MB of text, 18 MB of tokens, in 1 MB of memory."""
  size = make_large(tmp_path / 'text', kind)
  monkeypatch.setattr(token_cache, '_BATCH_BYTES', 2**16)
  documents = 'file' if kind == 'gz' else kind
  tracemalloc.start()
  try:
    corpus = text.load_corpus(
      tmp_path / 'text', documents=documents, cache_dir=tmp_path / 'cache'
    )
    data = text.TextInput(
      documents=corpus.train, batch_size=4, length=64, is_training=True
    )
    rows = data.num_records() - np.arange(1, 5)
    data.read(rows, np.zeros(4, np.int64))
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  num_bytes = corpus.train.num_bytes + corpus.eval.num_bytes
  assert num_bytes > (size * 0.9 if kind != 'file' else size - 1)
  assert peak < 2**20


@pytest.mark.parametrize('kind', ['file', 'line'])
def test_many_batches_are_in_order(tmp_path, monkeypatch, kind):
  """The same tokens, whether made in one batch or in many."""
  folder = tmp_path / 'text'
  folder.mkdir()
  generator = np.random.default_rng(0)
  for i in range(60):
    words = generator.integers(97, 123, generator.integers(1, 3000))
    words[generator.random(words.size) < 0.05] = 10
    (folder / f'{i}.txt').write_bytes(words.astype(np.uint8).tobytes())
  one = text.load_corpus(folder, documents=kind, cache_dir=tmp_path / '1')
  monkeypatch.setattr(token_cache, '_BATCH_BYTES', 256)
  many = text.load_corpus(folder, documents=kind, cache_dir=tmp_path / '2')
  for a, b in (one.train, many.train), (one.eval, many.eval):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.starts, b.starts)
    np.testing.assert_array_equal(np.flatnonzero(a.tokens == 256), a.starts)
    assert list(a.names) == list(b.names)
    assert (a.num_bytes, a.num_files) == (b.num_bytes, b.num_files)
    assert a.num_bytes == len(a.data())


def test_an_error_leaves_nothing(files, cache):
  class Broken(tokenization.ByteTokenizer):
    identity = 'broken'

    def encode_batch(self, texts):
      raise RuntimeError('cannot')

  with pytest.raises(RuntimeError, match='cannot'):
    text.load_corpus(
      files, documents='line', tokenizer=Broken(), cache_dir=cache
    )
  assert names_in(cache) == []


def test_text_with_the_document_token_is_refused(files, cache):
  class Bad(tokenization.ByteTokenizer):
    identity = 'bad'
    document_id = ord('7')

  with pytest.raises(
    ValueError, match=r"document token 55 .* 7\.txt:1, b'line 7'"
  ):
    text.load_corpus(files, documents='line', tokenizer=Bad(), cache_dir=cache)


def test_a_file_that_lost_its_beginning_is_refused(tmp_path):
  for name in 'ab':
    (tmp_path / f'{name}.txt').write_text(f'the text of {name}')
  load = functools.partial(
    text.load_corpus, str(tmp_path / '*.txt'), cache_dir=str(tmp_path / 'cache')
  )
  load()
  (cached,) = (tmp_path / 'cache').glob('*.tokens')
  cached.write_bytes(cached.read_bytes()[8:])
  with pytest.raises(errors.UsageError, match=cached.name):
    load()
