"""Tests of the token cache: keys, damage, several builders, bounded memory."""

import errno
import fcntl
import gzip
import hashlib
import io
import json
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc

from absl import logging
import numpy as np
import pytest

from jaxline.inputs import text
from jaxline.inputs import token_cache
from jaxline.inputs import tokenization

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def files(tmp_path):
  """A folder of ten files that were written long ago."""
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
  run = token_cache._Build.run

  def count(self, folder):
    seen.append(folder)
    run(self, folder)

  monkeypatch.setattr(token_cache._Build, 'run', count)
  return seen


@pytest.fixture
def hashed(monkeypatch):
  """Lists which files are read to hash them."""
  seen = []
  real = token_cache._hash

  def note(path, name):
    seen.append(name)
    return real(path, name)

  monkeypatch.setattr(token_cache, '_hash', note)
  return seen


def write(path, data, age=3600):
  path.write_bytes(data)
  then = time.time() - age
  os.utime(path, (then, then))


def digest(corpus):
  parts = [corpus.train.tokens, corpus.eval.tokens, corpus.train.starts]
  return hashlib.sha256(b''.join(p.tobytes() for p in parts)).hexdigest()


def keys(cache):
  return sorted(p.name for p in cache.iterdir() if (p / 'meta.json').exists())


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
  assert {p.name for p in cache.iterdir()} == {key, f'{key}.lock', 'hashes'}
  assert {p.name for p in (cache / key).iterdir()} == {
    'meta.json',
    *(
      f'{split}.{name}'
      for split in ('train', 'eval')
      for name in ('tokens.bin', 'starts.npy', 'files.json')
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
  # The same text under another name, then other text, then the first again.
  (files / '9.txt').rename(files / 'a.txt')
  load()
  (files / 'a.txt').rename(files / '9.txt')
  data = (files / '3.txt').read_bytes()
  write(files / '3.txt', data[::-1], age=1800)
  assert data[::-1] in load().train.data() + load().eval.data()
  assert len(builds) == 6
  write(files / '3.txt', data, age=900)
  load()
  # Where the files lie is not part of it.
  moved = files.rename(files.with_name('elsewhere'))
  text.load_corpus(moved, cache_dir=cache)
  assert len(keys(cache)) == len(builds) == 6


# Hashes of files.


def test_files_are_hashed_once(files, cache, hashed):
  def load():
    hashed.clear()
    text.load_corpus(files, cache_dir=cache)
    return sorted(hashed)

  assert load() == sorted(p.name for p in files.iterdir())
  assert load() == []
  write(files / '3.txt', b'other', age=100)
  assert load() == ['3.txt']
  write(files / 'new.txt', b'new', age=100)
  assert load() == ['new.txt']
  # The same bytes at another time.
  write(files / '3.txt', b'other', age=50)
  assert load() == ['3.txt']
  assert load() == []


def test_hashes_of_files_just_written_are_not_trusted(files, cache, hashed):
  path = files / '3.txt'
  path.write_bytes(b'first')
  stat = path.stat()
  first = text.load_corpus(files, cache_dir=cache)
  # Written again within the clock's tick: the same size, the same time.
  path.write_bytes(b'other')
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
  hashed.clear()
  second = text.load_corpus(files, cache_dir=cache)
  assert hashed == ['3.txt']
  assert second.sha256 != first.sha256
  assert b'other' in second.train.data() + second.eval.data()


def test_damaged_hashes_are_made_anew(files, cache, hashed):
  first = text.load_corpus(files, cache_dir=cache)
  (memo,) = (cache / 'hashes').iterdir()
  right = memo.read_bytes()
  sealed = [
    [],
    {'/x': 3},
    {name: known[:-1] for name, known in read(memo)['files'].items()},
    {name: [*known[:2], []] for name, known in read(memo)['files'].items()},
  ]
  for damage in (
    b'',
    b'{"format": 1',
    b'[]',
    b'{"format": 0, "files": {}}',
    b'[' * 10**6,
    # A bit by which files that are not empty would be left out.
    right.replace(b'false', b'true '),
    *(
      token_cache._sealed({'format': 2, 'files': of}).encode() for of in sealed
    ),
  ):
    memo.write_bytes(damage)
    hashed.clear()
    assert text.load_corpus(files, cache_dir=cache).sha256 == first.sha256
    assert len(hashed) == 10
  hashed.clear()
  text.load_corpus(files, cache_dir=cache)
  assert not hashed


def test_a_file_that_changes_meanwhile_is_an_error(files, cache, monkeypatch):
  run = token_cache._Build.run

  def change(self, folder):
    write(files / '3.txt', b'other', age=0)
    run(self, folder)

  monkeypatch.setattr(token_cache._Build, 'run', change)
  with pytest.raises(ValueError, match=r'3\.txt was written while it was'):
    text.load_corpus(files, cache_dir=cache)
  assert keys(cache) == []
  assert not list(cache.glob('*.tmp'))


# Damage.


@pytest.mark.parametrize(
  'name', ['train.tokens.bin', 'eval.starts.npy', 'train.files.json']
)
@pytest.mark.parametrize('damage', ['truncate', 'remove'])
def test_a_damaged_cache_is_made_anew(
  files, cache, builds, warnings, name, damage
):
  expected = digest(text.load_corpus(files, cache_dir=cache))
  (key,) = keys(cache)
  path = cache / key / name
  if damage == 'truncate':
    os.truncate(path, path.stat().st_size - 1)
  else:
    path.unlink()
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  assert len(builds) == 2
  assert keys(cache) == [key]
  assert not list(cache.glob('*.tmp'))
  (warning,) = warnings
  assert 'is damaged' in warning
  assert name in warning
  text.load_corpus(files, cache_dir=cache)
  assert len(builds) == 2


@pytest.mark.parametrize('meta', [None, b'', b'{}', b'[1]'])
def test_a_folder_without_its_description(files, cache, builds, meta):
  expected = digest(text.load_corpus(files, cache_dir=cache))
  (key,) = keys(cache)
  if meta is None:
    (cache / key / 'meta.json').unlink()
  else:
    (cache / key / 'meta.json').write_bytes(meta)
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  assert len(builds) == 2


def seal(path, values):
  """Writes JSON as the cache does: whoever can write can make checksums."""
  path.write_text(token_cache._sealed(values))


def read(path):
  return token_cache._read_sealed(path, 2**20)


def crafted(folder, name, data):
  """Replaces a file of the cache, and its checksums in the metadata."""
  (folder / name).write_bytes(data)
  meta = read(folder / 'meta.json')
  with (folder / name).open('rb') as f:
    meta['files'][name] = token_cache._checksums(f)
  seal(folder / 'meta.json', meta)


def check_made_anew(load, expected, warnings, *words):
  """Checks that the tokens are right, once they were made anew."""
  assert digest(load()) == expected
  (warning,) = warnings
  for word in ('is damaged', 'is made anew', *words):
    assert word in warning
  assert len(warning) < 500
  assert digest(load()) == expected
  assert len(warnings) == 1


@pytest.mark.parametrize('documents', ['file', 'line'])
def test_a_flipped_bit_is_noticed(files, cache, warnings, documents):
  def load():
    return text.load_corpus(files, documents=documents, cache_dir=cache)

  expected = digest(load())
  (key,) = keys(cache)
  names = sorted(p.name for p in (cache / key).iterdir())
  assert len(names) == (7 if documents == 'file' else 11)
  for name in names:
    path = cache / key / name
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    check_made_anew(load, expected, warnings, name)
    warnings.clear()


def test_which_part_of_a_large_file_is_damaged(
  files, cache, warnings, monkeypatch
):
  monkeypatch.setattr(token_cache, '_BLOCK_BYTES', 1000)
  monkeypatch.setattr(token_cache, '_BATCH_BYTES', 300)

  def load():
    return text.load_corpus(files, cache_dir=cache)

  expected = digest(load())
  (path,) = cache.glob('*/train.tokens.bin')
  with path.open('r+b') as f:
    f.seek(3456)
    f.write(b'\7')
  check_made_anew(
    load,
    expected,
    warnings,
    'train.tokens.bin is not as it was written: its CRC-32 differs from byte'
    ' 3000 on',
  )


@pytest.mark.parametrize(
  'change',
  [
    {'dtype': '|O'},
    {'dtype': '<u4'},
    {'dtype': '<f2'},
    {'dtype': '<u2,<u2'},
    {'dtype': ['<u2', [2**40]]},
    {'dtype': None},
    {'format': 3},
    {'format': None},
    {'kind': '../../etc'},
    {'tokenizer': '\x1b[2J' * 999},
    {'corpus_sha256': ''},
    {'files': None},
    {'files': {'../../etc/passwd': [1, 0]}},
    {'splits': []},
    {'splits': {'train': {'num_bytes': 1, 'sha256': ''}}},
    {'num_bytes': 0},
    {'num_bytes': 1.5},
    {'num_bytes': True},
    {'sha256': '\x1b[2J'},
    {'tokens': None},
    {'sums': [-1]},
    {'sums': [10**30, 0]},
    {'sums': ['x', {}]},
    {'sums': []},
    {'sums': [1.5, 0]},
    {'sums': [True, 0]},
  ],
)
def test_crafted_metadata_is_refused(files, cache, warnings, change):
  def load():
    return text.load_corpus(files, cache_dir=cache)

  expected = digest(load())
  (key,) = keys(cache)
  meta = read(cache / key / 'meta.json')
  if change.keys() & {'num_bytes', 'sha256', 'tokens'}:
    meta['splits']['train'].update(change)
  elif 'sums' in change:
    meta['files']['train.tokens.bin'] = change['sums']
  else:
    meta.update(change)
  seal(cache / key / 'meta.json', meta)
  check_made_anew(load, expected, warnings)
  assert '\x1b' not in warnings[0]


@pytest.mark.parametrize('name', ['meta.json', 'train.files.json'])
@pytest.mark.parametrize(
  'data',
  [
    b'[' * 10**6,
    b'{"a":' * 10**6,
    *(b'{"dtype": %s%s}' % (b'[' * n, b']' * n) for n in (500, 900, 5000)),
    b'"\xff"',
    b'9' * 5000,
    b'null',
  ],
  ids=range(8),
)
def test_crafted_json_is_refused(files, cache, warnings, name, data):
  def load():
    return text.load_corpus(files, cache_dir=cache)

  expected = digest(load())
  (key,) = keys(cache)
  if name == 'meta.json':
    (cache / key / name).write_bytes(data)
  else:
    crafted(cache / key, name, data)
  check_made_anew(load, expected, warnings, name)


def npy(array, **fields):
  """Returns what NumPy writes, or claims to."""
  header = {'descr': '<i8', 'fortran_order': False, 'shape': array.shape}
  out = io.BytesIO()
  np.lib.format.write_array_header_1_0(out, {**header, **fields})
  return out.getvalue() + array.tobytes()


STARTS = np.arange(0, 90, 10)


@pytest.mark.parametrize(
  ('name', 'data'),
  [
    ('starts.npy', npy(STARTS - 1)),
    ('starts.npy', npy(STARTS + 1)),
    ('starts.npy', npy(STARTS[::-1])),
    ('starts.npy', npy(STARTS * 0)),
    ('starts.npy', npy(STARTS * 2**50)),
    ('starts.npy', npy(STARTS[:3])),
    ('starts.npy', npy(STARTS[:0])),
    ('starts.npy', npy(STARTS, descr='|O')),
    ('starts.npy', npy(STARTS, descr='<f8')),
    ('starts.npy', npy(STARTS, shape=(10**17,))),
    ('starts.npy', npy(STARTS, shape=(3, 3))),
    ('starts.npy', npy(STARTS)[:-4]),
    ('starts.npy', b'\x80\x04N.'),
    ('starts.npy', b'PK\x03\x04'),
    ('starts.npy', b''),
    ('first.npy', npy(STARTS)),
    ('first.npy', npy(np.arange(3))),
    ('lines.npy', npy(STARTS)),
    ('lines.npy', npy(STARTS[:0])),
    ('tokens.bin', b''),
    ('tokens.bin', b'123'),
    ('tokens.bin', b'12'),
    ('files.json', b'[]'),
    ('files.json', b'["/etc/passwd"]'),
    ('files.json', b'["\\u001b[2J"]'),
    ('files.json', b'[1, 2]'),
    ('files.json', b'{"0.txt": 1}'),
  ],
)
def test_crafted_arrays_are_refused(files, cache, warnings, name, data):
  def load():
    return text.load_corpus(files, documents='line', cache_dir=cache)

  expected = digest(load())
  (key,) = keys(cache)
  crafted(cache / key, f'train.{name}', data)
  check_made_anew(load, expected, warnings, 'train')


@pytest.mark.parametrize('what', ['link', 'fifo', 'folder', 'zero'])
def test_only_regular_files_are_read(files, cache, tmp_path, warnings, what):
  """A link leads out of the cache, a FIFO makes its reader wait for ever."""

  def load():
    return text.load_corpus(files, cache_dir=cache)

  def replace(path):
    if path.is_dir():
      path.rename(tmp_path / 'outside')
    else:
      path.rename(tmp_path / 'outside' / path.name)
    if what == 'link':
      path.symlink_to(tmp_path / 'outside' / path.name)
    elif what == 'fifo':
      os.mkfifo(path)
    elif what == 'zero':
      path.symlink_to('/dev/zero')
    else:
      path.mkdir()

  (tmp_path / 'outside').mkdir()
  expected = digest(load())
  (key,) = keys(cache)
  for name in ('meta.json', 'train.tokens.bin', 'eval.files.json'):
    replace(cache / key / name)
    check_made_anew(load, expected, warnings, f'{name} is not a regular file')
    warnings.clear()
  # The hashes of files, and the lock.
  (memo,) = (cache / 'hashes').iterdir()
  replace(memo)
  if what == 'folder':
    assert digest(load()) == expected
    memo.rmdir()
    warnings.clear()
  replace(cache / f'{key}.lock')
  shutil.rmtree(cache / key)
  assert digest(load()) == expected
  assert keys(cache) == [key]
  assert not warnings


def test_hashes_are_not_written_through_a_link(
  files, cache, tmp_path, warnings
):
  outside = tmp_path / 'outside'
  outside.mkdir()
  cache.mkdir()
  (cache / 'hashes').symlink_to(outside)
  text.load_corpus(files, cache_dir=cache)
  assert not list(outside.iterdir())
  (warning,) = warnings
  assert f'{cache / "hashes"} is a link' in warning


@pytest.mark.parametrize('what', ['link', 'file'])
def test_what_is_no_folder_of_tokens_is_replaced(
  files, cache, tmp_path, warnings, what
):
  def load():
    return text.load_corpus(files, cache_dir=cache)

  expected = digest(load())
  (key,) = keys(cache)
  outside = (cache / key).rename(tmp_path / 'outside')
  before = {p: p.stat().st_mtime_ns for p in outside.iterdir()}
  if what == 'link':
    (cache / key).symlink_to(outside)
  else:
    (cache / key).touch()
  check_made_anew(load, expected, warnings, 'expected a folder')
  assert not (cache / key).is_symlink()
  assert {p: p.stat().st_mtime_ns for p in outside.iterdir()} == before
  assert not list(cache.glob('*.tmp'))


def test_a_cache_without_checksums_is_made_anew(
  files, cache, builds, warnings, monkeypatch
):
  said = []
  monkeypatch.setattr(
    logging, 'info', lambda message, *args: said.append(message % args)
  )
  expected = digest(text.load_corpus(files, cache_dir=cache))
  (key,) = keys(cache)
  meta = read(cache / key / 'meta.json')
  meta |= {'format': 1, 'dtype': '|O'}
  del meta['files']
  names = [p.name for p in (cache / key).iterdir() if p.name != 'meta.json']
  meta['sizes'] = {n: (cache / key / n).stat().st_size for n in names}
  (cache / key / 'meta.json').write_text(json.dumps(meta))
  said.clear()
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  assert len(builds) == 2
  assert not warnings
  assert sum('earlier version, without checksums' in line for line in said) == 1
  text.load_corpus(files, cache_dir=cache)
  assert len(builds) == 2
  assert keys(cache) == [key]


def test_checksums_are_compared_once_in_each_process(files, cache, monkeypatch):
  corpus = text.load_corpus(files, cache_dir=cache)
  seen = []
  real = token_cache._checksums
  monkeypatch.setattr(
    token_cache, '_checksums', lambda f: seen.append(f) or real(f)
  )
  text.load_corpus(files, cache_dir=cache)
  assert not seen
  token_cache._verified.clear()
  text.load_corpus(files, cache_dir=cache)
  assert len(seen) == 6
  # A worker process is told what its parent has verified.
  data = pickle.dumps(corpus.train)
  token_cache._verified.clear()
  again = pickle.loads(data)
  assert len(seen) == 6
  assert isinstance(again.tokens.base, np.memmap)
  (path,) = cache.glob('*/train.tokens.bin')
  path.write_bytes(bytes(path.stat().st_size))
  with pytest.raises(
    ValueError, match=r'damaged: train\.tokens\.bin is not as'
  ):
    pickle.loads(data)


def test_an_error_that_may_pass_is_not_damage(
  files, cache, builds, warnings, monkeypatch
):
  expected = digest(text.load_corpus(files, cache_dir=cache))
  (key,) = keys(cache)
  before = (cache / key).stat().st_ino
  real = token_cache._open_regular
  fails = [True]

  def fail(path):
    if path.name == 'train.tokens.bin' and fails and fails.pop():
      raise OSError(errno.EIO, 'Input/output error', str(path))
    return real(path)

  monkeypatch.setattr(token_cache, '_open_regular', fail)
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
  with pytest.raises(ValueError, match='are gone or damaged'):
    pickle.loads(data)


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
  assert any('Cannot remember the hashes' in w for w in warnings)
  again = pickle.loads(pickle.dumps(corpus.train))
  np.testing.assert_array_equal(again.tokens, corpus.train.tokens)
  lines = text.load_corpus(
    files, documents='line', cache_dir=tmp_path / 'file' / 'cache'
  )
  assert lines.train.names[0].startswith('0.txt:')


def test_large_text_needs_one(files, tmp_path, monkeypatch):
  monkeypatch.setattr(token_cache, '_MAX_UNCACHED_BYTES', 1000)
  (tmp_path / 'file').write_bytes(b'')
  with pytest.raises(ValueError, match='too many to tokenize at each start'):
    text.load_corpus(files, cache_dir=tmp_path / 'file' / 'cache')


def test_a_cache_may_be_read_only(files, cache, builds, warnings, monkeypatch):
  expected = digest(text.load_corpus(files, cache_dir=cache))

  def refuse(*args, **kwargs):
    raise PermissionError('read-only')

  for name in 'mkdir', 'touch', 'write_text', 'rename':
    monkeypatch.setattr(pathlib.Path, name, refuse)
  assert digest(text.load_corpus(files, cache_dir=cache)) == expected
  assert len(builds) == 1
  assert not warnings


# The default folder, which belongs to one user.


@pytest.fixture
def default(tmp_path, monkeypatch):
  """The default folder of the cache, not yet made."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
  return tmp_path / 'xdg' / 'jaxline' / 'tokens'


def give_away(path, monkeypatch):
  """Makes a file or folder that of another user."""
  if os.geteuid() == 0:
    os.chown(path, 12345, -1, follow_symlinks=False)
  else:
    monkeypatch.setattr(os, 'geteuid', lambda: path.stat().st_uid + 1)


def test_the_default_folder_is_for_one_user(files, default):
  text.load_corpus(files)
  for folder in default, default.parent:
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize('what', ['owner', 'parent', 'link', 'mode'])
def test_a_default_folder_of_another_user(
  files, default, builds, warnings, monkeypatch, what
):
  """Its tokens could be anything, and a link in it leads anywhere."""
  expected = digest(text.load_corpus(files))
  if what == 'mode':
    default.chmod(0o777)
    reason = f'everybody can write to {default}'
  else:
    theirs = default
    if what == 'parent':
      theirs = default.parent
    elif what == 'link':
      default.rename(default.with_name('elsewhere'))
      default.symlink_to('elsewhere')
    give_away(theirs, monkeypatch)
    reason = f'{theirs} belongs to user'
  before = sorted(default.parent.rglob('*'))
  (files / 'new.txt').write_bytes(b'new')
  changed = text.load_corpus(files)
  (files / 'new.txt').unlink()
  assert digest(text.load_corpus(files)) == expected
  assert changed.train.num_files + changed.eval.num_files == 11
  assert len(builds) == 3
  assert sorted(default.parent.rglob('*')) == before
  assert any(reason in w and 'at each start' in w for w in warnings)
  # A folder that was named is the user's choice.
  warnings.clear()
  assert digest(text.load_corpus(files, cache_dir=default)) == expected
  assert len(builds) == 3
  assert not warnings


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
run, publish = token_cache._Build.run, token_cache._publish
built = []

def build(self, folder):
  built.append(1)
  run(self, folder)
  if mode == 'hang':
    print('built', flush=True)
    time.sleep(600)
  time.sleep(0.5)

token_cache._Build.run = build
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


def test_who_is_second_leaves_what_is_there(files, cache, tmp_path):
  """Hosts that do not see each other's locks: the first one's stays."""
  text.load_corpus(files, cache_dir=cache)
  (key,) = keys(cache)
  before = (cache / key).stat().st_ino
  part = shutil.copytree(cache / key, tmp_path / 'part')
  token_cache._publish(part, cache / key, tokenization.BYTES)
  assert (cache / key).stat().st_ino == before
  assert not part.exists()


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
def test_many_parts_are_joined_in_order(tmp_path, monkeypatch, kind):
  """The same tokens, whether made in one part or in many."""
  folder = tmp_path / 'text'
  folder.mkdir()
  generator = np.random.default_rng(0)
  for i in range(60):
    words = generator.integers(97, 123, generator.integers(1, 3000))
    words[generator.random(words.size) < 0.05] = 10
    (folder / f'{i}.txt').write_bytes(words.astype(np.uint8).tobytes())
  one = text.load_corpus(folder, documents=kind, cache_dir=tmp_path / '1')
  monkeypatch.setattr(token_cache, '_MIN_GROUP_BYTES', 1)
  monkeypatch.setattr(token_cache, '_num_threads', lambda: 5)
  monkeypatch.setattr(token_cache, '_BATCH_BYTES', 256)
  many = text.load_corpus(folder, documents=kind, cache_dir=tmp_path / '2')
  for a, b in (one.train, many.train), (one.eval, many.eval):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.starts, b.starts)
    np.testing.assert_array_equal(np.flatnonzero(a.tokens == 256), a.starts)
    assert list(a.names) == list(b.names)
    assert (a.num_bytes, a.num_files) == (b.num_bytes, b.num_files)
    assert a.num_bytes == len(a.data())


def test_an_error_in_a_thread_leaves_nothing(files, cache):
  class Broken(tokenization.ByteTokenizer):
    identity = 'broken'

    def encode_joined(self, texts):
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
    ValueError, match=r"document token 55 .* 7\.txt, line 1, b'line 7'"
  ):
    text.load_corpus(files, documents='line', tokenizer=Bad(), cache_dir=cache)
