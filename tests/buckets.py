"""Buckets on this machine: a stub of GCS, moto's S3, and fixtures for both."""

import collections
from collections.abc import Iterator
import http.server
import json
import logging
import pathlib
import threading
from typing import Any
import urllib.parse
import urllib.request
import uuid

import pytest


class Gcs(http.server.ThreadingHTTPServer):
  """The part of GCS's JSON API that TensorStore uses.

  Attributes:
    objects: `bucket/name` -> content.
    environment: Variables with which a process uses this server.
  """

  request_queue_size = 128  # With 5, fifty writes at once take two seconds.

  def __init__(self) -> None:
    super().__init__(('127.0.0.1', 0), _Handler)
    self.environment = {
      'TENSORSTORE_GCS_HTTP_URL': f'http://127.0.0.1:{self.server_port}',
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'x',
    }
    self.objects: dict[str, bytes] = {}
    self.generations = collections.Counter()
    self.buckets, self.faults, self.lock = set(), [], threading.Lock()

  def fail_next(self, n: int, status: int, applied: bool = False) -> None:
    """Answers n requests with an error; `applied` ones are carried out."""
    self.faults += [(status, applied)] * n


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True  # Else each content waits 40 ms for an ACK.

  def _answer(self):
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    bucket, _, name = url.path.rpartition('/b/')[2].strip('/').partition('/o')
    name = urllib.parse.unquote(name[1:]) or query.get('name', '')
    method = self.command if name or self.command == 'PUT' else 'LIST'
    size = int(self.headers['Content-Length'] or 0)
    content = self.rfile.read(size)
    if len(content) < size:  # The client was killed: nothing is stored.
      return
    with self.server.lock:
      faults = self.server.faults
      fault, applied = faults.pop(0) if faults else (None, True)
      if applied:
        answer = self._apply(method, bucket, name, query, content)
    status, content, headers = (fault, b'', {}) if fault else answer
    if status >= 400:  # As GCS. TensorStore reads it as an empty listing.
      content = json.dumps({'error': {'code': status}}).encode()
    self.send_response(status)
    for key, value in {**headers, 'Content-Length': len(content)}.items():
      self.send_header(key, str(value))
    self.end_headers()
    self.wfile.write(content)

  do_GET = do_POST = do_PUT = do_DELETE = _answer

  def _apply(self, method, bucket, name, query, content):
    """Returns the status, the content and the headers of the answer."""
    gcs, key = self.server, f'{bucket}/{name}'
    generation = str(gcs.generations[key] if key in gcs.objects else 0)
    if method == 'PUT':
      gcs.buckets.add(bucket)
      return 200, b'', {}
    if bucket not in gcs.buckets:
      return 404, b'', {}
    if query.get('ifGenerationMatch', generation) != generation:
      return 412, b'', {}
    if method == 'LIST':
      low = query.get('startOffset', '')
      high = query.get('endOffset', '\U0010ffff')
      keys = (k.partition('/') for k in sorted(gcs.objects))
      names = [n for b, _, n in keys if b == bucket and low <= n < high]
      found = {'items': [{'name': name} for name in names]}
      return 200, json.dumps(found).encode(), {}
    if method == 'POST':
      gcs.objects[key] = content
      gcs.generations[key] += 1
      metadata = {'name': name, 'generation': gcs.generations[key]}
      return 200, json.dumps(metadata).encode(), {}
    if key not in gcs.objects:
      return 404, b'', {}
    if method == 'DELETE':
      del gcs.objects[key]
      return 204, b'', {}
    headers, found = {'x-goog-generation': generation}, gcs.objects[key]
    if wanted := self.headers['Range']:
      low, _, high = wanted.removeprefix('bytes=').partition('-')
      part = found[int(low) : int(high or len(found)) + 1]
      place = f'bytes {low}-{int(low) + len(part) - 1}/{len(found)}'
      if int(low) >= len(found):
        return 416, b'', {}
      return 206, part, {**headers, 'Content-Range': place}
    return 200, found, headers

  def log_message(self, *unused):
    pass


@pytest.fixture
def gs() -> Iterator[Gcs]:
  """Serves the stub of GCS from a thread."""
  with Gcs() as server:
    threading.Thread(target=server.serve_forever, args=[0.02]).start()
    yield server
    server.shutdown()


@pytest.fixture(scope='session')
def s3() -> Iterator[Any]:
  """Serves moto's S3 from a thread; `environment` as that of Gcs."""
  from moto import server as moto  # Takes 0.3 seconds.

  logging.getLogger('werkzeug').setLevel(logging.ERROR)  # A line per request.
  server = moto.ThreadedMotoServer('127.0.0.1', 0, verbose=False)
  server.start()
  server.environment = {
    'AWS_ENDPOINT_URL': 'http://{}:{}'.format(*server.get_host_and_port()),
    'AWS_REGION': 'us-east-1',
    'AWS_ACCESS_KEY_ID': 'x',
    'AWS_SECRET_ACCESS_KEY': 'x',
  }
  yield server
  server.stop()


def new_bucket(endpoint: str) -> str:
  """Makes a bucket in either server and returns its name."""
  bucket = f'bucket-{uuid.uuid4().hex}'
  put = urllib.request.Request(f'{endpoint}/{bucket}', method='PUT')
  urllib.request.urlopen(put).close()
  return bucket


@pytest.fixture(params=['disk', 'gs', 's3'])
def url(
  request: pytest.FixtureRequest,
  tmp_path: pathlib.Path,
  monkeypatch: pytest.MonkeyPatch,
) -> str:
  """An empty place; `parametrize('url', ['gs'], indirect=True)` takes one."""
  if request.param == 'disk':
    return str(tmp_path / 'x')
  environment = request.getfixturevalue(request.param).environment
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr('tempfile.tempdir', str(tmp_path))  # Of spooled logs.
  return f'{request.param}://{new_bucket(next(iter(environment.values())))}/x'
