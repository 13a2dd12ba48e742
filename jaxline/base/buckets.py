"""Connects to buckets, `gs://` and `s3://`, by TensorStore."""

from collections.abc import Iterator
import contextlib
import errno
import os
from typing import Any

from jaxline import errors

DRIVERS = {'gs': 'gcs', 's3': 's3'}  # TensorStore's, by scheme.
# TensorStore tries a request again after a 503, a timeout or a lost connection,
# and doubles its delay from a second up to 32. It would try an address that is
# not there for minutes.
_RETRIES = {'max_retries': 6, 'max_delay': '8s'}


def connect(url: str, threads: int) -> Any:
  """Returns the `tensorstore.KvStore` of the keys that begin with a URL."""
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
      # TensorStore logs an error for each profile file that is not there.
      spec['aws_credentials'] = {'type': 'environment'}
  context = {
    f'{driver}_request_retries': _RETRIES,
    f'{driver}_request_concurrency': {'limit': threads},
  }
  try:  # It connects later.
    return ts.KvStore.open(spec, context=ts.Context(context)).result()
  except ValueError as e:
    raise errors.UsageError(f'{url}: {str(e).partition(" [")[0]}') from e


@contextlib.contextmanager
def os_errors(url: str) -> Iterator[None]:
  """Turns the errors of TensorStore, all ValueErrors, into OSErrors."""
  try:
    yield
  except ValueError as e:
    text = str(e).partition(' [')[0]
    is_refused = text.startswith(('PERMISSION_DENIED', 'UNAUTHENTICATED'))
    number = errno.EACCES if is_refused else errno.EIO
    raise OSError(number, text, url) from e
