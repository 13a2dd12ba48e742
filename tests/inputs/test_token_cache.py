"""Tests of the token cache: keys, concurrent builds, bounded memory."""

from concurrent import futures
import os
import shutil
import tempfile
import tracemalloc

import numpy as np
import pytest

from jaxline import errors
from jaxline.inputs import text
from jaxline.inputs import text_files
from jaxline.inputs import token_cache
from jaxline.inputs import tokenization
from jaxline.run_directory import store


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


def names_in(cache):
  return sorted(p.name for p in cache.iterdir())


def assert_same(first, again):
  for a, b in (first.train, again.train), (first.eval, again.eval):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.starts, b.starts)
    assert list(a.names) == list(b.names)
    assert (a.sha256, a.num_bytes) == (b.sha256, b.num_bytes)


def test_made_once(files, cache, monkeypatch):
  first = text.load_corpus(files, cache_dir=cache)
  monkeypatch.setattr(tokenization.ByteTokenizer, 'encode_batch', pytest.fail)
  again = text.load_corpus(files, cache_dir=cache)
  (name,) = names_in(cache)
  assert name.endswith('.tokens')
  assert_same(first, again)
  # The file alone is the corpus, for hosts without the text.
  assert_same(first, text.load_corpus(cache / name))
  with pytest.raises(errors.UsageError, match='`tokenizer` is sentencepiece'):
    text.load_corpus(cache / name, tokenizer='stdlib')
  for data in (cache / name).read_bytes()[:-1], b'text', b'':
    (cache / 'cut.tokens').write_bytes(data)
    with pytest.raises(errors.UsageError, match='cut'):
      text.load_corpus(cache / 'cut.tokens')
  for split in again.train, again.eval:
    for array in split.tokens, split.starts:
      assert not array.flags.writeable
      assert array.flags.aligned


@pytest.mark.parametrize('url', ['gs'], indirect=True)
def test_tokens_of_a_bucket(files, cache, url, monkeypatch):
  monkeypatch.setattr(token_cache, '_DOWNLOAD_BYTES', 1000)
  place, address = store.at(url), f'{url}/my.tokens'
  with pytest.raises(errors.MissingFileError, match=address):
    text.load_corpus(address, cache_dir=cache)
  for fraction in 0.3, 0.6:  # Later, another one of the same name.
    made = text.load_corpus(files, eval_fraction=fraction, cache_dir=cache)
    place.write(
      'my.tokens', max(cache.iterdir(), key=os.path.getctime).read_bytes()
    )
    assert_same(made, text.load_corpus(address, cache_dir=cache / 'host'))
  number = len(names_in(cache / 'host'))
  text.load_corpus(address, cache_dir=cache / 'host')
  assert number == len(names_in(cache / 'host')) == 2
  for keys in {'files': url}, {'files': files, 'cache_dir': url}:
    with pytest.raises(errors.UsageError, match=[*keys][-1]):
      text.load_corpus(**keys)


def test_the_default_folder(files, tmp_path, monkeypatch):
  for key, value, folder in (
    ('XDG_CACHE_HOME', 'xdg', 'xdg/jaxline/tokens'),
    ('HOME', 'home', 'home/.cache/jaxline/tokens'),
  ):
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setenv(key, str(tmp_path / value))
    text.load_corpus(files)
    assert len(names_in(tmp_path / folder)) == 1
    assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700  # One user's.
  # One that cannot be written.
  (tmp_path / 'file').touch()
  folder = tmp_path / 'file' / 'cache'
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  with pytest.raises(errors.UsageError, match='cache_dir'):
    text.load_corpus(files, cache_dir=folder)
  monkeypatch.setenv('XDG_CACHE_HOME', str(folder))
  text.load_corpus(files)
  (found,) = tmp_path.glob('jaxline-*')
  assert len(names_in(found)) == 1
  assert found.stat().st_mode & 0o777 == 0o700


def test_all_that_tokens_depend_on_is_in_the_key(files, cache):
  class Other(tokenization.ByteTokenizer):
    identity = 'other'

  def load(where=files, **kwargs):
    return text.load_corpus(where, cache_dir=cache, **kwargs)

  first = load()
  load(eval_fraction=0.5)
  load(documents='line')
  load(tokenizer=Other())
  path = files / '3.txt'
  stat = path.stat()
  path.write_bytes(path.read_bytes()[::-1])
  # The size and the time of modification stay.
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  assert load().train.sha256 != first.train.sha256
  (files / '9.txt').rename(files / 'a.txt')
  load()
  # What looks binary is left out, unless a glob names the file.
  (files / 'b.png').write_bytes(b'\0' + b'text' * 50)
  count = lambda corpus: len(corpus.train.names) + len(corpus.eval.names)
  assert (count(load()), count(load(f'{files}/*'))) == (10, 11)
  # Two folders with the same names and sizes have tokens each, of one identity.
  other = files.with_name('elsewhere')
  shutil.copytree(files, other)
  assert load(other).train.sha256 == load().train.sha256
  assert len(names_in(cache)) == 9


class Counting(tokenization.ByteTokenizer):
  """Counts the parts that it encodes, and is interrupted at one of them."""

  identity, count, fails_at = 'counting', 0, 4

  def encode_batch(self, texts):
    self.count += 1
    if self.count == self.fails_at:
      raise KeyboardInterrupt
    return super().encode_batch(texts)


def test_one_of_many_makes_the_tokens_and_a_kill_loses_one_part(
  files, cache, monkeypatch
):
  def load(cache_dir=cache):
    return text.load_corpus(files, tokenizer=tokenizer, cache_dir=cache_dir)

  tokenizer = Counting()
  (files / 'large').write_text('word\n' * (2**18))  # Twenty parts.
  monkeypatch.setattr(token_cache, '_BATCH_BYTES', 2**16)
  with pytest.raises(KeyboardInterrupt):
    load()
  with futures.ThreadPoolExecutor(3) as pool:
    corpora = [*pool.map(lambda _: load(), range(3))]
  assert len(names_in(cache)) == 1
  made, tokenizer.count = tokenizer.count - 1, 5
  whole = load(cache / 'other')
  assert made == tokenizer.count - 5 > 15
  for corpus in corpora:
    assert_same(corpus, whole)


@pytest.mark.parametrize('kind', ['jsonl', 'split:{'])
def test_memory_does_not_grow_with_the_text(files, cache, monkeypatch, kind):
  """1.5 MB of text, 3 MB of tokens, in 1 MB of memory."""
  line = b'{"text": "%s"}\n' % (b'some words of text ' * 10)
  (files / 'large').write_bytes(line * (3 * 2**19 // len(line)))
  monkeypatch.setattr(token_cache, '_BATCH_BYTES', 2**16)
  monkeypatch.setattr(text_files, '_BLOCK_BYTES', 2**13)
  monkeypatch.setattr(text_files, '_PIECE_BYTES', 2**12)
  tracemalloc.start()
  try:
    corpus = text.load_corpus(f'{files}/l*', documents=kind, cache_dir=cache)
    data = text.TextInput(
      documents=corpus.train, batch_size=4, length=64, is_training=True
    )
    rows = data.num_records() - np.arange(1, 5)
    data.read(rows, np.zeros(4, np.int64))
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert corpus.train.num_bytes + corpus.eval.num_bytes > 1.2e6
  assert peak < 2**20


def test_text_with_the_document_token_is_refused(files, cache):
  class Bad(tokenization.ByteTokenizer):
    identity = 'bad'
    document_id = ord('7')

  with pytest.raises(ValueError, match='document token, 55'):
    text.load_corpus(files, tokenizer=Bad(), cache_dir=cache)
  assert names_in(cache) == []  # The error leaves no file.
