"""Connects to buckets (`gs://` and `s3://`) with TensorStore."""

from collections.abc import Iterator
import contextlib
import errno
import os
from typing import Any

from jaxline import errors

DRIVERS = {'gs': 'gcs', 's3': 's3'}  # Maps schemes to TensorStore's drivers.
# After a 503, a timeout or a lost connection, TensorStore retries a request,
# with delays that double from 1 s to 32 s. Without these limits, it would retry
# an address that does not exist for minutes.
_RETRIES = {'max_retries': 6, 'max_delay': '8s'}


def connect(url: str, threads: int) -> Any:
  """Returns the `tensorstore.KvStore` of all keys below a URL."""
  import tensorstore as ts

  scheme, _, rest = url.partition('://')
  bucket, _, path = rest.partition('/')
  driver = DRIVERS[scheme]
  spec: Any = {'driver': driver, 'bucket': bucket, 'path': path}
  if driver == 's3':
    if endpoint := os.environ.get('AWS_ENDPOINT_URL'):
      spec['endpoint'] = endpoint
    if region := os.environ.get('AWS_REGION'):
      spec['aws_region'] = region
    if {'AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'} <= os.environ.keys():
      # Otherwise TensorStore logs an error for each missing profile file.
      spec['aws_credentials'] = {'type': 'environment'}
  context = {
    f'{driver}_request_retries': _RETRIES,
    f'{driver}_request_concurrency': {'limit': threads},
  }
  try:  # This does not connect yet.
    return ts.KvStore.open(spec, context=ts.Context(context)).result()
  except ValueError as e:
    raise errors.UsageError(f'{url}: {str(e).partition(" [")[0]}') from e


@contextlib.contextmanager
def os_errors(url: str) -> Iterator[None]:
  """Turns TensorStore's errors, which are all ValueErrors, into OSErrors."""
  try:
    yield
  except ValueError as e:
    text = str(e).partition(' [')[0]
    is_refused = text.startswith(('PERMISSION_DENIED', 'UNAUTHENTICATED'))
    number = errno.EACCES if is_refused else errno.EIO
    raise OSError(number, text, url) from e
