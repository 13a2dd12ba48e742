"""Tests of the token cache: keys, damage, several builders, bounded memory."""

import errno
import fcntl
import gzip
import hashlib
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import zlib

from absl import logging
import numpy as np
import pytest

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
    write(folder / f'{i}.txt', b'line %d\n' % i * (100 + i))
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

  def count(self, folder):
    seen.append(folder)
    run(self, folder)

  monkeypatch.setattr(token_cache.Builder, 'run', count)
  return seen


@pytest.fixture
def read(monkeypatch):
  """Lists the files of text that are read, to tokenize or to hash them."""
  # As if the files had been there for a while: nothing can set their ctime.
  monkeypatch.setattr(token_cache, '_SETTLED_NS', 0)
  seen = []
  for name in '_sha256', '_open_hashed':
    real = getattr(token_cache, name)

    def note(path, *args, real=real):
      seen.append(os.path.basename(path))
      return real(path, *args)

    monkeypatch.setattr(token_cache, name, note)
  return seen


def write(path, data, age=3600):
  path.write_bytes(data)
  then = time.time() - age
  os.utime(path, (then, then))


def digest(corpus):
  parts = [corpus.train.tokens, corpus.eval.tokens, corpus.train.starts]
  return hashlib.sha256(b''.join(p.tobytes() for p in parts)).hexdigest()


def keys(cache):
  return sorted(p.name for p in cache.iterdir() if (p / 'meta').exists())


# What is kept.


def test_made_once(files, cache, builds):
  first = text.load_corpus(files, cache_dir=cache)
  again = text.load_corpus(files, cache_dir=cache)
  assert len(builds) == 1
  assert len(keys(cache)) == 1
  assert digest(again) == digest(first)
  assert again.train.sha256 == first.train.sha256
  assert again.train.names == first.train.names
  assert again.eval.num_bytes == first.eval.num_bytes
  # Nothing but the cache is left, and it is mapped, not read.
  (key,) = keys(cache)
  assert {p.name for p in cache.iterdir()} == {key, f'{key}.lock'}
  assert {p.name for p in (cache / key).iterdir()} == {
    'meta',
    *(
      f'{split}.{name}'
      for split in ('train', 'eval')
      for name in ('tokens', 'documents')
    ),
  }
  assert isinstance(first.train.tokens.base, np.memmap)
  assert not first.train.tokens.flags.writeable


def test_the_default_folder(files, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
  text.load_corpus(files)
  assert len(keys(tmp_path / 'xdg' / 'jaxline' / 'tokens')) == 1
  monkeypatch.delenv('XDG_CACHE_HOME')
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  text.load_corpus(files)
  assert len(keys(tmp_path / 'home' / '.cache' / 'jaxline' / 'tokens')) == 1


def test_all_that_tokens_depend_on_is_in_the_key(files, cache, builds):
  class Other(tokenization.ByteTokenizer):
    identity = 'other'

  def load(**kwargs):
    return text.load_corpus(files, cache_dir=cache, **kwargs)

  load()
  load(eval_fraction=0.5)
  load(documents='line')
  load(tokenizer=Other())
  assert len(keys(cache)) == len(builds) == 4
  # Other names, then another size, then the first again.
  (files / '9.txt').rename(files / 'a.txt')
  load()
  (files / 'a.txt').rename(files / '9.txt')
  data = (files / '3.txt').read_bytes()
  write(files / '3.txt', data[:-1])
  load()
  assert len(keys(cache)) == len(builds) == 6
  write(files / '3.txt', data)
  load()
  # A file that is left out by its content, and is not by its name.
  (files / 'b.png').write_bytes(b'\0')
  assert load().sha256 == load(eval_fraction=0.5).sha256
  glob = text.load_corpus(f'{files}/*', cache_dir=cache)
  assert glob.train.num_files + glob.eval.num_files == 11
  (files / 'b.png').unlink()
  assert len(keys(cache)) == len(builds) == 9
  # Two folders with the same names and sizes have tokens each.
  shutil.copytree(files, files.with_name('elsewhere'))
  text.load_corpus(files.with_name('elsewhere'), cache_dir=cache)
  assert len(keys(cache)) == len(builds) == 10


# Files that change.


def test_text_is_read_once(files, cache, read, builds):
  def load():
    read.clear()
    text.load_corpus(files, cache_dir=cache)
    return sorted(read)

  assert load() == sorted(p.name for p in files.iterdir())
  assert load() == []
  # The same bytes at another time are only hashed.
  data = (files / '3.txt').read_bytes()
  write(files / '3.txt', data, age=50)
  assert load() == ['3.txt']
  assert load() == []
  assert len(builds) == 1


def test_changed_text_is_noticed(files, cache, read, builds, warnings):
  """Of the same size, and with the time of the file that was there."""
  path = files / '3.txt'
  stat = path.stat()
  first = text.load_corpus(files, cache_dir=cache)
  other = path.read_bytes()[::-1]
  path.write_bytes(other)
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  read.clear()
  second = text.load_corpus(files, cache_dir=cache)
  assert second.sha256 != first.sha256
  assert other in second.train.data() + second.eval.data()
  assert len(builds) == 2
  (warning,) = warnings
  assert f'made anew: {path} has changed' in warning
  assert len(keys(cache)) == 1


def test_times_of_files_just_written_are_not_trusted(files, cache, read):
  token_cache._SETTLED_NS = 2 * 10**9  # The fixture restores it.
  (files / '3.txt').write_bytes(b'first')
  text.load_corpus(files, cache_dir=cache)
  read.clear()
  text.load_corpus(files, cache_dir=cache)
  assert len(read) == 10  # Only the times could tell that they are the same.
  token_cache._SETTLED_NS = 0
  for expected in 10, 0:
    read.clear()
    text.load_corpus(files, cache_dir=cache)
    assert len(read) == expected


def test_a_file_that_changes_meanwhile_is_an_error(files, cache, monkeypatch):
  documents = token_cache.Builder._documents

  def change(self, file, source):
    write(files / '3.txt', (files / '3.txt').read_bytes(), age=0)
    return documents(self, file, source)

  monkeypatch.setattr(token_cache.Builder, '_documents', change)
  with pytest.raises(ValueError, match=r'3\.txt was written while it was'):
    text.load_corpus(files, cache_dir=cache)
  assert keys(cache) == []
  assert not list(cache.glob('*.tmp'))


# Damage.


def check_made_anew(load, expected, warnings, *words):
  """Checks that the tokens are right, once they were made anew."""
  assert digest(load()) == expected
  (warning,) = warnings
  for word in ('are made anew', *words):
    assert word in warning
  assert len(warning) < 500
  assert digest(load()) == expected
  assert len(warnings) == 1


@pytest.mark.parametrize('damage', ['flip', 'truncate', 'remove', 'empty'])
def test_a_damaged_file_is_noticed(files, cache, warnings, damage):
  def load():
    return text.load_corpus(files, documents='line', cache_dir=cache)

  expected = digest(load())
  (key,) = keys(cache)
  names = sorted(p.name for p in (cache / key).iterdir())
  assert len(names) == 5
  for name in names:
    path = cache / key / name
    stat = path.stat()
    if damage == 'flip':
      data = bytearray(path.read_bytes())
      data[len(data) * 2 // 3] ^= 1
      path.write_bytes(data)
    elif damage == 'remove':
      path.unlink()
    else:
      os.truncate(path, 0 if damage == 'empty' else stat.st_size - 1)
    if path.exists():
      os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    check_made_anew(load, expected, warnings, name)
    warnings.clear()
  assert keys(cache) == [key]
  assert not list(cache.glob('*.tmp'))


def test_checksums_are_compared_once_in_each_process(files, cache, monkeypatch):
  seen = []
  crc32 = zlib.crc32
  monkeypatch.setattr(
    token_cache.zlib, 'crc32', lambda *args: seen.append(args) or crc32(*args)
  )
  first = text.load_corpus(files, cache_dir=cache)
  seen.clear()
  corpus = text.load_corpus(files, cache_dir=cache)
  assert len(seen) == 1  # Of `meta`.
  token_cache._crc32.cache_clear()
  text.load_corpus(files, cache_dir=cache)
  assert len(seen) == 1 + 1 + 4
  # A worker process relies on its parent.
  data = pickle.dumps(corpus.train)
  token_cache._crc32.cache_clear()
  again = pickle.loads(data)
  assert len(seen) == 1 + 1 + 4 + 1
  assert isinstance(again.tokens.base, np.memmap)
  np.testing.assert_array_equal(again.tokens, first.train.tokens)


def test_tokens_may_be_kept_elsewhere(files, cache, tmp_path, builds, warnings):
  """Behind a link, as on a larger disk."""
  expected = digest(text.load_corpus(files, cache_dir=cache))
  (key,) = keys(cache)
  (cache / key).rename(tmp_path / 'large')
  (cache / key).symlink_to(tmp_path / 'large')
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  assert len(builds) == 1
  assert not warnings


def test_a_worker_refuses_other_text(files, cache, read):
  data = pickle.dumps(text.load_corpus(files, cache_dir=cache).train)
  for path in files.iterdir():
    path.write_bytes(path.read_bytes()[::-1])
  text.load_corpus(files, cache_dir=cache)
  with pytest.raises(ValueError, match='is of other text by now'):
    pickle.loads(data)


def test_an_error_that_may_pass_is_not_damage(
  files, cache, builds, warnings, monkeypatch
):
  expected = digest(text.load_corpus(files, cache_dir=cache))
  (key,) = keys(cache)
  before = (cache / key).stat().st_ino
  real = token_cache._verify
  fails = [True]

  def fail(path, *args):
    if path.name == 'train.tokens' and fails and fails.pop():
      raise OSError(errno.EIO, 'Input/output error', str(path))
    return real(path, *args)

  monkeypatch.setattr(token_cache, '_verify', fail)
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  fails.extend([True] * 2)
  with pytest.raises(OSError, match='Input/output error') as caught:
    text.load_corpus(files, cache_dir=cache)
  assert f'rm -r {cache / key}' in caught.value.__notes__[0]
  assert (cache / key).stat().st_ino == before
  assert len(builds) == 1
  assert not warnings


def test_worker_processes_say_when_the_cache_is_gone(files, cache):
  corpus = text.load_corpus(files, cache_dir=cache)
  data = pickle.dumps(corpus.train)
  shutil.rmtree(cache)
  with pytest.raises(ValueError, match=r'No such file .*meta'):
    pickle.loads(data)


def test_a_folder_of_another_corpus_is_not_read(files, cache, warnings):
  """Moved there by mistake: it has the same files, cut in other documents."""
  text.load_corpus(files, cache_dir=cache)
  (of_files,) = keys(cache)

  def load():
    return text.load_corpus(files, documents='line', cache_dir=cache)

  expected = digest(load())
  (of_lines,) = set(keys(cache)) - {of_files}
  shutil.rmtree(cache / of_lines)
  (cache / of_files).rename(cache / of_lines)
  check_made_anew(load, expected, warnings, 'meta is of another corpus')


# Folders that cannot be written to.


def test_small_text_goes_without_a_cache(files, tmp_path, builds, warnings):
  expected = digest(text.load_corpus(files, cache_dir=tmp_path / 'other'))
  (tmp_path / 'file').write_bytes(b'')
  for count in 2, 3:
    corpus = text.load_corpus(files, cache_dir=tmp_path / 'file' / 'cache')
    assert digest(corpus) == expected
    assert len(builds) == count
  assert not builds[-1].exists()
  assert any('is tokenized at each start' in w for w in warnings)
  again = pickle.loads(pickle.dumps(corpus.train))
  np.testing.assert_array_equal(again.tokens, corpus.train.tokens)
  lines = text.load_corpus(
    files, documents='line', cache_dir=tmp_path / 'file' / 'cache'
  )
  assert lines.train.names[0].startswith('0.txt:')


def test_one_large_file_says_how_far_it_is(tmp_path, monkeypatch):
  (tmp_path / 'a.txt').write_bytes(b'a line\n' * 10)
  logged = []
  monkeypatch.setattr(token_cache, '_PROGRESS_SECS', 0)
  monkeypatch.setattr(token_cache, '_BATCH_BYTES', 7)
  monkeypatch.setattr(token_cache, '_BUFFER_BYTES', 7)
  monkeypatch.setattr(
    token_cache.logging, 'info', lambda text, *args: logged.append((text, args))
  )
  text.load_corpus(
    tmp_path / 'a.txt', documents='line', cache_dir=tmp_path / 'cache'
  )
  done = [args for text, args in logged if 'of %.2f GB' in text]
  assert {size for _, size in done} == {7e-8}
  assert sorted(done) == done
  assert len({read for read, _ in done}) > 3
  assert done[-1] == (7e-8, 7e-8)


def test_a_large_file_as_the_only_document_is_not_read(tmp_path, monkeypatch):
  (tmp_path / 'a.txt').write_bytes(b'text')
  (tmp_path / 'empty.txt').write_bytes(b'')
  monkeypatch.setattr(token_cache, '_open_hashed', None)
  with pytest.raises(ValueError, match='not empty, with 1 documents'):
    text.load_corpus(tmp_path, cache_dir=tmp_path / 'cache')


def test_large_text_needs_one(files, tmp_path, monkeypatch):
  monkeypatch.setattr(token_cache, '_MAX_UNCACHED_BYTES', 1000)
  (tmp_path / 'file').write_bytes(b'')
  with pytest.raises(ValueError, match='up to 1000 bytes of text'):
    text.load_corpus(files, cache_dir=tmp_path / 'file' / 'cache')


def test_a_cache_may_be_read_only(files, cache, builds, warnings, monkeypatch):
  expected = digest(text.load_corpus(files, cache_dir=cache))

  def refuse(*args, **kwargs):
    raise PermissionError('read-only')

  for name in 'mkdir', 'rename', 'replace':
    monkeypatch.setattr(os, name, refuse)
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  # The times of the files are those to keep now: `meta` would be written.
  monkeypatch.setattr(token_cache, '_SETTLED_NS', -(10**12))
  before = sorted(cache.rglob('*'))
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  assert sorted(cache.rglob('*')) == before  # Nothing half written.
  assert len(builds) == 1
  assert not warnings


# The default folder, which belongs to one user.


@pytest.fixture
def default(tmp_path, monkeypatch):
  """The default folder of the cache, not yet made."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
  return tmp_path / 'xdg' / 'jaxline' / 'tokens'


def test_the_default_folder_is_for_one_user(files, default):
  text.load_corpus(files)
  assert default.stat().st_mode & 0o777 == 0o700


def test_a_default_folder_of_another_user_is_not_needed(
  files, default, warnings, monkeypatch
):
  """As where several users share XDG_CACHE_HOME."""

  def refuse(path):
    raise PermissionError(errno.EACCES, 'Permission denied', str(path))

  expected = digest(text.load_corpus(files))
  shutil.rmtree(default)
  monkeypatch.setattr(token_cache.os, 'listdir', refuse)
  assert digest(text.load_corpus(files)) == expected
  assert f"Permission denied: '{default}'" in warnings[0]
  assert 'is tokenized at each start' in warnings[0]


def test_an_own_link_is_followed(files, default, builds, warnings, tmp_path):
  """A home with little space has its cache elsewhere."""
  (tmp_path / 'large').mkdir()
  default.parent.parent.mkdir()
  default.parent.symlink_to(tmp_path / 'large')
  text.load_corpus(files)
  text.load_corpus(files)
  assert len(keys(tmp_path / 'large' / 'tokens')) == len(builds) == 1
  assert not warnings


# Several builders.

BUILD = """
import hashlib, pathlib, sys, time
from jaxline.inputs import text, token_cache
files, cache, go, mode = sys.argv[1:]
run = token_cache.Builder.run
built = []

def build(self, folder):
  built.append(1)
  run(self, folder)
  if mode == 'hang':
    print('built', flush=True)
    time.sleep(600)
  time.sleep(0.5)

token_cache.Builder.run = build
if mode == 'no locks':
  def refuse(*args):
    raise OSError('no locks here')
  token_cache.fcntl.flock = refuse
print('ready', flush=True)
while not pathlib.Path(go).exists():
  time.sleep(0.01)
corpus = text.load_corpus(files, cache_dir=cache)
print(len(built), hashlib.sha256(corpus.train.tokens.tobytes()).hexdigest())
"""


def start(files, cache, go, mode=''):
  return subprocess.Popen(
    [sys.executable, '-c', BUILD, str(files), str(cache), str(go), mode],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )


@pytest.mark.process
@pytest.mark.parametrize('mode', ['', 'no locks'])
def test_several_processes_at_once(files, cache, tmp_path, mode):
  """One builds and the others wait; without locks all build, and one wins."""
  go = tmp_path / 'go'
  processes = [start(files, cache, go, mode) for _ in range(2)]
  try:
    for process in processes:
      assert process.stdout.readline() == 'ready\n'
    go.touch()
    results = [process.communicate()[0].split() for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
      process.stdout.close()
  assert [process.returncode for process in processes] == [0, 0]
  corpus = text.load_corpus(files, cache_dir=cache)
  expected = hashlib.sha256(corpus.train.tokens.tobytes()).hexdigest()
  assert {result[1] for result in results} == {expected}
  built = sum(int(result[0]) for result in results)
  assert built == 1 if not mode else built == 2
  assert len(keys(cache)) == 1
  assert not list(cache.glob('*.tmp'))


def test_who_is_second_leaves_what_is_there(files, cache, monkeypatch):
  """Hosts that do not see each other's locks: the first one's stays."""

  def refuse(*args):
    raise OSError('no locks here')

  run = token_cache.Builder.run
  first = []

  def be_slow(self, folder):
    run(self, folder)
    if not first:
      first.append(None)
      first[0] = text.load_corpus(files, cache_dir=cache)
      first.append(folder.with_name(self.key).stat().st_ino)

  monkeypatch.setattr(token_cache.fcntl, 'flock', refuse)
  monkeypatch.setattr(token_cache.Builder, 'run', be_slow)
  second = text.load_corpus(files, cache_dir=cache)
  assert digest(second) == digest(first[0])
  (key,) = keys(cache)
  assert (cache / key).stat().st_ino == first[1]
  assert not list(cache.glob('*.tmp'))


def test_a_builder_that_is_killed(files, cache, tmp_path, builds):
  (tmp_path / 'go').touch()
  process = start(files, cache, tmp_path / 'go', 'hang')
  try:
    assert process.stdout.readline() == 'ready\n'
    assert process.stdout.readline() == 'built\n'
    # Whoever comes meanwhile waits.
    (lock,) = cache.glob('*.lock')
    with open(lock, 'ab') as f, pytest.raises(BlockingIOError):
      fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
  (leftover,) = cache.glob('*.tmp')
  assert keys(cache) == [leftover.name]
  corpus = text.load_corpus(files, cache_dir=cache)
  assert len(builds) == 1
  assert corpus.train.num_documents + corpus.eval.num_documents == 10
  assert not leftover.exists()
  assert len(keys(cache)) == 1


def test_leftovers_of_other_hosts(files, cache):
  """They may still be at work, unless they have not been for a day."""
  old = cache / 'key.elsewhere.0123.tmp'
  new = cache / 'key.elsewhere.4567.tmp'
  for folder in old, new:
    folder.mkdir(parents=True)
    (folder / 'data').touch()
  two_days_ago = time.time() - 48 * 3600
  for path in old, old / 'data', new:
    os.utime(path, (two_days_ago, two_days_ago))
  text.load_corpus(files, cache_dir=cache)
  assert not old.exists()
  assert new.exists()


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
  assert not list(cache.glob('*.tmp'))


def test_text_with_the_document_token_is_refused(files, cache):
  class Bad(tokenization.ByteTokenizer):
    identity = 'bad'
    document_id = ord('7')

  with pytest.raises(
    ValueError, match=r"document token 55 .* 7\.txt:1, b'line 7'"
  ):
    text.load_corpus(files, documents='line', tokenizer=Bad(), cache_dir=cache)
