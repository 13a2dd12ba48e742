"""Tests of jaxline.run_directory.store; power losses are in test_resume.py."""

from concurrent import futures
import errno
import os

import pytest

from jaxline import errors
from jaxline.base import buckets
from jaxline.base import disk
from jaxline.run_directory import store as store_lib

NEW = store_lib.NEW


@pytest.fixture
def store(url) -> store_lib.Store:
  return store_lib.at(url)


def test_places(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for place, want in (
    ('run', f'{tmp_path}/run'),
    (f'{tmp_path}/a/../run/', f'{tmp_path}/run'),
    ('gs://bucket/a/run/', 'gs://bucket/a/run'),
    ('s3://bucket/run', 's3://bucket/run'),
    ('', None),
    ('gs:///', None),
    ('http://b/run', None),
  ):
    if want is None:
      with pytest.raises(errors.UsageError, match='checkpoint_dir'):
        store_lib.at(place)
    else:
      assert store_lib.at(place).url == want
  assert list(tmp_path.iterdir()) == []  # Nothing is touched.


def test_values(store):
  assert store.names() == store.names('b') == []
  values = {
    'a': b'1', 'b/c': b'', 'b/d.json': bytes(range(256)), 'b/e/f': b'x' * 70000,
    'b-': b'2', 'b0': b'3', 'bb/c': b'4'
  }  # fmt: skip
  for key in values:
    assert store.read(key) is None
    store.write(key, memoryview(values[key]))
  assert {key: store.read(key) for key in values} == values
  assert store.names() == ['a', 'b', 'b-', 'b0', 'bb']
  assert store.names('b') == ['c', 'd.json', 'e']
  assert store.below('b').names('e') == ['f']
  assert store.below('b/e').read('f') == values['b/e/f']
  for _ in range(2):  # Nothing there is nothing to do.
    store.delete('a')
    store.delete_folder('b')
    assert store.names() == ['b-', 'b0', 'bb']


@pytest.mark.parametrize('url', ['gs', 's3'], indirect=True)
def test_versions(store):
  assert store.versioned('a') == (None, NEW)
  seen = {NEW}
  for value in (b'1', b'22', b'3'):
    old = store.write('a', value)
    assert store.versioned('a') == (value, old)
    assert old not in seen
    seen.add(old)
  assert store.write('a', b'other', NEW) is None
  new = store.write('a', b'2', old)
  assert store.write('a', b'3', old) is None
  assert store.versioned('a') == (b'2', new)
  store.delete('a')
  assert store.write('a', b'4', old) is None
  assert store.write('a', b'4', NEW)
  assert store.read('a') == b'4'


def test_parts(store):
  store.write_part('data/x/c.0', memoryview(b'abcd'))
  store.write_part('data/x/c.1', memoryview(b''))
  store.below('data').sync()
  buffer = bytearray(4)
  store.read_into('data/x/c.0', memoryview(buffer))
  assert buffer == b'abcd'
  store.read_into('data/x/c.1', memoryview(bytearray()))
  for key, size in (('c.0', 3), ('c.0', 5), ('c.1', 1), ('c.2', 0)):
    with pytest.raises(store_lib.DamagedError, match=f'data/x/{key}'):
      store.read_into(f'data/x/{key}', memoryview(bytearray(size)))
  store.check('data/x/c.0', 4)
  for key, size in (('c.0', 3), ('c.0', 5), ('c.0', 9), ('c.2', 1)):
    with pytest.raises(store_lib.DamagedError, match=f'data/x/{key}'):
      store.check(f'data/x/{key}', size)


@pytest.fixture
def impatient(monkeypatch):
  retries = {'max_retries': 2, 'initial_delay': '10ms', 'max_delay': '10ms'}
  monkeypatch.setattr(buckets, '_RETRIES', retries)


@pytest.mark.parametrize('url', ['gs'], indirect=True)
def test_errors_of_a_bucket(url, gs, impatient):
  store = store_lib.at(url)
  store.write('a', b'1')
  for use in (
    lambda: store.read('a'),
    lambda: store.read_into('a', memoryview(bytearray(1))),
    lambda: store.write('a', b'2', NEW),
    lambda: store.write_part('a', memoryview(b'1')),
    lambda: store.delete('a'),
  ):
    for status in 403, 401:
      gs.fail_next(1, status)
      with pytest.raises(OSError, match='x/a') as e:
        use()
      assert e.value.errno == errno.EACCES
    gs.fail_next(3, 503)  # As often as it is tried.
    with pytest.raises(OSError, match='ABORTED'):
      use()
    assert store.read('a') == b'1'
    gs.fail_next(1, 503)
    use()


@pytest.mark.parametrize('url', ['gs', 's3'], indirect=True)
def test_a_bucket_that_is_not_there(url, impatient, monkeypatch):
  absent = store_lib.at(url.replace('bucket-', 'absent-'))
  with pytest.raises(OSError, match='absent-'):
    absent.write('a', b'1')
  for name in ('TENSORSTORE_GCS_HTTP_URL', 'AWS_ENDPOINT_URL'):
    monkeypatch.setenv(name, 'http://127.0.0.1:9')
  with pytest.raises(OSError, match='x/a'):
    store_lib.at(url).read('a')


@pytest.mark.parametrize('url', ['gs'], indirect=True)
def test_an_answer_that_was_lost(url, gs, impatient):
  store = store_lib.at(url)
  # The request is carried out, fails, and is repeated.
  store._read('a')
  for value in (b'1', b'2'):
    expected = store._read('a').stamp.generation
    gs.fail_next(1, 503, applied=True)
    version = store.write('a', value, expected)
    assert store.versioned('a') == (value, version)


def test_directories_that_cannot_be_synced(tmp_path, monkeypatch):
  def fsync(fd):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(os, 'fsync', fsync)
  number = errno.EINVAL  # The file system cannot do it.
  disk.sync_directory(tmp_path)
  number = errno.EIO
  with pytest.raises(OSError, match='Input'):
    disk.sync_directory(tmp_path)


def test_two_threads_may_write_the_same_note(tmp_path):
  store = store_lib.at(tmp_path)
  with futures.ThreadPoolExecutor(2) as pool:
    for _ in pool.map(lambda i: store.write('a', b'%d' % i), range(200)):
      pass
  assert os.listdir(tmp_path) == ['a']
