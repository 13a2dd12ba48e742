"""The stub of GCS and moto do what TensorStore's key-value stores need."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorstore as ts

from tests import buckets

RETRIES = {'max_retries': 2, 'initial_delay': '10ms', 'max_delay': '100ms'}
S3 = {
  'driver': 's3',
  'aws_region': 'us-east-1',
  'aws_credentials': {'type': 'environment'},
}


def spec(url):
  scheme, _, place = url.rpartition('://')
  if scheme != 's3':
    return f'{scheme or "file"}://{place}/'
  bucket, _, path = place.partition('/')
  endpoint = os.environ['AWS_ENDPOINT_URL']
  return {**S3, 'endpoint': endpoint, 'bucket': bucket, 'path': f'{path}/'}


def opened(url):
  names = 'gcs_request_retries', 's3_request_retries'
  context = ts.Context(dict.fromkeys(names, RETRIES))
  return ts.KvStore.open(spec(url), context=context).result()


def test_conditions(url):
  store = opened(url)
  write = lambda value, seen: store.write('a', value, if_equal=seen).result()
  for values in ((b'1', b'2'), (b'3', b'4'), (b'5', None)):
    seen = store.read('a').result().stamp.generation
    assert [bool(write(value, seen).generation) for value in values] == [1, 0]
    assert store['a'] == values[0]


def test_ranges(url):
  store, a = opened(url), ts.KvStore.KeyRange('a/', 'a0')
  large = np.random.default_rng(0).bytes(1 << 20)
  for key in ('a/1', 'a/2', 'b/1'):
    store[key] = large
  assert store['a/2'] == large
  assert set(store.list(a).result()) == {b'a/1', b'a/2'}
  store.delete_range(a).result()
  assert store.list().result() == [b'b/1']


def test_part_of_an_object(url):
  chunks = ts.ChunkLayout(read_chunk_shape=[4], write_chunk_shape=[16])
  new = {'driver': 'zarr3', 'kvstore': spec(url), 'dtype': 'int64'}
  array = ts.open(new, create=True, shape=[16], chunk_layout=chunks).result()
  array[...] = np.arange(16)
  assert array[4:8].read().result().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize('url', ['gs'], indirect=True)
def test_faults(url, gs):
  store = opened(url)
  gs.fail_next(1, 503)
  store['a'] = b'1'
  gs.fail_next(1, 503, applied=True)  # The retry finds the object.
  assert not store.write('b', b'1', if_equal=b'\2').result().generation
  gs.fail_next(2, 403)
  with pytest.raises(ValueError, match='PERMISSION_DENIED'):
    store['a']
  assert store.list().result() == []  # A trap of TensorStore 0.1.86.
  methods = [method for method, _ in gs.operations]
  assert methods == ['PUT', *['POST'] * 4, 'GET', 'LIST']


@pytest.mark.parametrize('url', ['gs', 's3'], indirect=True)
def test_unreachable(url, monkeypatch):
  for name in ('TENSORSTORE_GCS_HTTP_URL', 'AWS_ENDPOINT_URL'):
    monkeypatch.setenv(name, 'http://127.0.0.1:9')
  with pytest.raises(ValueError, match='ABORTED'):
    opened(url)['a']


@pytest.mark.process
def test_program(monkeypatch):
  command = [sys.executable, buckets.__file__, '0']
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    endpoint = process.stdout.readline().strip()
    monkeypatch.setenv('TENSORSTORE_GCS_HTTP_URL', endpoint)
    monkeypatch.setenv('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'x')
    opened(f'gs://{buckets.new_bucket(endpoint)}/x')['a'] = b'1'
    process.kill()
