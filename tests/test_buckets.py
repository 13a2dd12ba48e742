"""The stub of GCS and moto do what TensorStore's key-value stores need."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorstore as ts

from tests import buckets

A = ts.KvStore.KeyRange('a/', 'a0')


def spec(url):
  retries = {'max_retries': 2, 'initial_delay': '10ms', 'max_delay': '100ms'}
  scheme, _, place = url.rpartition('://')
  bucket, _, path = place.partition('/')
  kinds = {
    '': {'driver': 'file', 'path': f'{url}/'},
    'gs': {'driver': 'gcs', 'gcs_request_retries': retries},
    's3': {
      'driver': 's3',
      's3_request_retries': retries,
      'endpoint': os.environ.get('AWS_ENDPOINT_URL', ''),
      'aws_region': 'us-east-1',
      'aws_credentials': {'type': 'environment'},  # No search for profiles.
      'use_conditional_write': True,  # Without it only on Amazon's hosts.
    },
  }
  shared = {'bucket': bucket, 'path': f'{path}/'} if scheme else {}
  return {**kinds[scheme], **shared}


@pytest.fixture
def store(url):
  return ts.KvStore.open(spec(url)).result()


def test_conditions(store):
  read = lambda: store.read('a').result()
  write = lambda value, seen: store.write('a', value, if_equal=seen).result()
  for values in ((b'1', b'2'), (b'3', b'4'), (b'5', None)):
    seen = read().stamp.generation
    assert [bool(write(value, seen).generation) for value in values] == [1, 0]
    assert read().value == values[0]


def test_ranges(store):
  large = np.random.default_rng(0).bytes(1 << 20)
  for key in ('a/1', 'a/2', 'b/1'):
    store.write(key, large).result()
  assert store.read('a/2').result().value == large
  assert set(store.list(A).result()) == {b'a/1', b'a/2'}
  store.delete_range(A).result()
  assert store.list().result() == [b'b/1']


def test_part_of_an_object(url):
  layout = ts.ChunkLayout(read_chunk_shape=[4], write_chunk_shape=[16])
  array = ts.open(
    {'driver': 'zarr3', 'kvstore': spec(url)},
    create=True,
    dtype=np.int32,
    shape=[16],
    chunk_layout=layout,
  ).result()
  array.write(np.arange(16, dtype=np.int32)).result()
  assert array[4:8].read().result().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize('url', ['gs'], indirect=True)
def test_faults(store, gs):
  gs.fail_next(1, 503)
  assert store.write('a', b'1').result().generation
  gs.fail_next(1, 503, applied=True)  # The retry finds the object.
  assert not store.write('b', b'1', if_equal=b'\2').result().generation
  gs.fail_next(1, 403)
  with pytest.raises(ValueError, match='PERMISSION_DENIED'):
    store.read('a').result()
  gs.fail_next(1, 403)
  assert store.list().result() == []  # A trap of TensorStore 0.1.86.
  methods = [method for method, _ in gs.operations]
  assert methods == ['PUT', *['POST'] * 4, 'GET', 'LIST']


@pytest.mark.parametrize('url', ['gs', 's3'], indirect=True)
def test_unreachable(url, monkeypatch):
  for name in ('TENSORSTORE_GCS_HTTP_URL', 'AWS_ENDPOINT_URL'):
    monkeypatch.setenv(name, 'http://127.0.0.1:9')
  with pytest.raises(ValueError, match='ABORTED'):
    ts.KvStore.open(spec(url)).result().read('a').result()


@pytest.mark.process
def test_program(monkeypatch):
  command = [sys.executable, buckets.__file__, '0']
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    endpoint = process.stdout.readline().strip()
    monkeypatch.setenv('TENSORSTORE_GCS_HTTP_URL', endpoint)
    monkeypatch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'x')
    place = spec(f'gs://{buckets.new_bucket(endpoint)}/x')
    store = ts.KvStore.open(place).result()
    store['a'] = b'1'
    assert store['a'] == b'1'
    process.kill()
