"""Where a run's numbers go: one interface, two backends, two decorators.

  writer = AsyncWriter(MultiWriter([
    TensorBoardWriter(directory), JsonlWriter(path)]))

The backends write on the calling thread and raise where writing fails.
`MultiWriter` hands each record to several writers, `AsyncWriter` moves all of
it (fetching from the device, encoding, the disk) to one background thread.

Shapes: B images, H rows, W columns, C channels. A record is what one call of a
`write_*` method hands over.
"""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
import errno
import json
import math
import numbers
import os
import pathlib
import re
import shutil
import socket
import stat
import struct
import threading
import time
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar
import uuid
import zlib

from absl import logging
import jax
import numpy as np

from jaxline import async_lib
from jaxline import disk
from jaxline import errors

F = TypeVar('F', bound=Callable[..., Any])


class Writer(Protocol):
  """What an experiment may count on: scalars can be written, nothing more.

  Every writer that old code brings along has this one method; `AsyncWriter` and
  `MultiWriter` accept such writers beside the complete ones.
  """

  def write_scalars(self, global_step: int, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers at a step."""


class MetricWriter(abc.ABC):
  """A complete writer: scalars, images, texts, histograms.

  `global_step` is an int, a numpy integer or an array whose elements are all
  the step (one copy per device). A writer is also a context manager that
  closes itself.

  A subclass gives `_write` and, where it holds something, `_flush` and
  `_close`; see also `Backend`.

  Attributes:
    executor: runs what writes on its thread, and lets others share the thread;
      None where calls write themselves.
  """

  executor: async_lib.SerialExecutor | None = None
  _is_closed = False

  def write_scalars(self, global_step: Any, scalars: Mapping[str, Any]) -> None:
    """Writes named numbers, as `to_scalars` accepts them."""
    self._write('scalars', global_step, scalars)

  def write_images(self, global_step: Any, images: Mapping[str, Any]) -> None:
    """Writes named images.

    Args:
      global_step: the step they belong to.
      images: arrays [H, W], [H, W, C] or [B, H, W, C] with C 1 (grey), 3 (RGB)
        or 4 (RGBA); uint8 in 0..255, bool, or floating point in 0..1.

    Raises:
      ValueError: an array has another shape, dtype or range.
    """
    self._write('images', global_step, images)

  def write_texts(self, global_step: Any, texts: Mapping[str, str]) -> None:
    """Writes named plain texts of any number of lines, shown as they are."""
    self._write('texts', global_step, texts)

  def write_histograms(
    self, global_step: Any, arrays: Mapping[str, Any], num_buckets: int = 30
  ) -> None:
    """Writes the distribution of the values in named arrays.

    Args:
      global_step: the step they belong to.
      arrays: real arrays of any shape. Values that are not finite are left out,
        with a warning.
      num_buckets: buckets of equal width between the least and the greatest
        value.
    """
    self._write('histograms', global_step, arrays, num_buckets)

  def resume(self, step: int) -> None:
    """Voids what an earlier process wrote of later steps than `step`.

    A run calls it once, when it has restored and before it writes. It may read
    all that was written, and blocks. A writer that keeps no records has nothing
    to void.

    Args:
      step: the last step that stays; -1 voids everything.

    Raises:
      OSError: a file cannot be rewritten; it stands as it was.
    """
    self._require_open('resume')
    self._resume(step)

  def logged_steps(self) -> list[int]:
    """Returns the steps that scalars were written of, ascending.

    Also by earlier processes. A writer that keeps no records has none. It may
    read all that was written, and blocks.

    Raises:
      OSError: a file cannot be read.
    """
    return []

  @abc.abstractmethod
  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any], *options: Any
  ) -> None:
    """Writes what `write_<kind>` was called with."""

  def flush(self) -> None:
    """Returns once everything written so far has reached the disk.

    Any thread may call it.
    """
    self._require_open('flush')
    self._flush()

  def flush_async(self) -> Callable[[], None]:
    """Starts a flush, in the background where the writer has a thread.

    Returns:
      A function that waits for it, or flushes where there is no thread. It
      raises no error of a record that was written after this call.
    """
    return self.flush

  def close(self) -> None:
    """Flushes and ends the writer; a later write raises RuntimeError.

    Closing twice is allowed.
    """
    if not self._is_closed:
      self._is_closed = True
      self._close()

  def _resume(self, step: int) -> None:  # noqa: B027
    """Does what `resume` does."""

  def _flush(self) -> None:  # noqa: B027
    """Does what `flush` does."""

  def _close(self) -> None:
    """Does what `close` does, once."""
    self._flush()

  def __enter__(self) -> 'MetricWriter':
    return self

  def __exit__(self, kind: object, *unused: object) -> None:
    try:
      self.close()
    except Exception as e:
      if kind is None:
        raise
      # It often has the same cause as the error that leaves the block.
      logging.error('Closing a writer failed as well: %r', e)

  def _require_open(self, method: str) -> None:
    if self._is_closed:
      raise RuntimeError(
        f'{type(self).__name__}.{method} was called after close(). Write before'
        ' the writer is closed, or make a new one.'
      )


# ---------------------------------------------------------------------------
# From what users hand over to what backends write.
# ---------------------------------------------------------------------------

_warned: set[tuple[str, ...]] = set()


def _warn_once(key: tuple[str, ...], message: str, *args: Any) -> None:
  if key not in _warned:
    _warned.add(key)
    logging.warning(message, *args)


def to_step(global_step: Any) -> int:
  """Returns the step as an int; waits for a device array to be computed.

  Args:
    global_step: an int, or an array of any shape whose elements are all the
      step, such as one copy per local device ([num_local_devices]).

  Raises:
    TypeError: it is not a whole number.
  """
  first = global_step
  if isinstance(first, jax.Array):
    # One shard is enough, and on several hosts it is all that there is.
    first = first.addressable_data(0)
  number = _to_number(np.asarray(first).reshape(-1)[:1])
  if number is None or number % 1:
    raise TypeError(
      f'global_step: got {_describe(global_step)}, expected an int or an array '
      'of ints (one copy of the step per device).'
    )
  return int(number)


def to_scalars(scalars: Mapping[str, Any]) -> dict[str, int | float]:
  """Returns the numbers in a mapping as Python numbers, in its order.

  Integers and bools become int (exact), other numbers float. A nested mapping
  is flattened: `{'loss': {'kl': 1.}}` gives `{'loss/kl': 1.}`. Device arrays
  are fetched, which waits for them to be computed.

  Args:
    scalars: Python, numpy or JAX numbers of any real dtype (integers of up to
      64 bits), or arrays with one element, by name. Whatever else stands there
      (None, a string, a bigger array, a typed random key, an array that was
      donated meanwhile) is skipped, with one warning per name.
  """
  flat: dict[str, int | float] = {}
  for name, value in scalars.items():
    if isinstance(value, Mapping):
      flat.update(to_scalars({f'{name}/{k}': v for k, v in value.items()}))
      continue
    number = _to_number(value)
    if number is None:
      _warn_once(
        ('scalar', str(name)),
        'Scalar "%s" is skipped, now and from here on: got %s, expected a '
        'number or an array with one element.',
        name,
        _describe(value),
      )
    else:
      flat[str(name)] = number
  return flat


def _to_number(value: Any) -> int | float | None:
  """Returns a number as int or float, anything else as None."""
  if isinstance(value, numbers.Integral):
    return int(value) if abs(int(value)) < 2**64 else None
  if isinstance(value, numbers.Real):
    return float(value)
  if not hasattr(value, '__array__') or getattr(value, 'size', 1) != 1:
    return None
  if isinstance(value, jax.Array):
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
      return None
    if not (value.is_fully_addressable or value.is_fully_replicated):
      return None
  try:
    array = np.asarray(value)
  except RuntimeError:
    if isinstance(value, jax.Array) and value.is_deleted():
      return None
    raise
  number = array.item() if array.size == 1 else None
  if isinstance(number, int):
    return int(number)  # A bool is one.
  return number if isinstance(number, float) else None


def _describe(value: Any) -> str:
  if isinstance(value, jax.Array) and value.is_deleted():
    return 'an array that was donated or deleted before it was written'
  if hasattr(value, 'shape') and hasattr(value, 'dtype'):
    return f'an array of shape {list(value.shape)} and dtype {value.dtype}'
  return f'{repr(value)[:60]} of type {type(value).__name__}'


# Rounding (bfloat16 has steps of 0.004 just below 1) may carry an image that is
# meant to lie in 0..1 a little past its ends.
_IMAGE_SLACK = 0.01


def _check_image(name: str, image: Any) -> None:
  """Checks shape and dtype, which needs no transfer from a device."""
  shape = tuple(image.shape)
  channels = shape[-1] if len(shape) > 2 else 1
  if len(shape) not in (2, 3, 4) or channels not in (1, 3, 4) or 0 in shape:
    raise ValueError(
      f'Image "{name}": got shape {list(shape)}, expected [H, W], [H, W, C] or '
      '[B, H, W, C] with C in (1, 3, 4) and no empty axis. Grey images in a '
      'batch need a last axis of 1: images[..., None].'
    )
  if image.dtype not in (np.uint8, bool) and not jax.dtypes.issubdtype(
    image.dtype, np.floating
  ):
    raise ValueError(
      f'Image "{name}": got dtype {image.dtype}, expected uint8 in 0..255, '
      'bool, or floating point in 0..1. Cast it: image.astype(np.uint8).'
    )


def _to_images(images: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns any accepted images as batches, uint8 [B, H, W, C]."""
  return {
    str(k): _to_batch(k, np.asarray(image)) for k, image in images.items()
  }


def _to_batch(name: str, image: np.ndarray) -> np.ndarray:
  _check_image(name, image)
  if image.dtype == bool:
    image = image.astype(np.uint8) * np.uint8(255)
  elif image.dtype != np.uint8:
    image = image.astype(np.float32)
    low, high = image.min(), image.max()
    # Written so that a NaN is noticed too. No error: TensorFlow, for which old
    # experiments were written, clips as well.
    if not (low >= -_IMAGE_SLACK and high <= 1 + _IMAGE_SLACK):
      _warn_once(
        ('image range', name),
        'Image "%s": got values in %g..%g, expected 0..1 for floating point '
        '(shape %s); what is outside is clipped, NaN is black. Rescale it, or '
        'cast an image in 0..255 to uint8.',
        name,
        low,
        high,
        list(image.shape),
      )
      image = np.nan_to_num(image)
    image = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
  if image.ndim == 2:
    image = image[:, :, None]
  return image if image.ndim == 4 else image[None]


def _to_texts(texts: Mapping[str, str]) -> dict[str, str]:
  # Text generated byte by byte may hold lone surrogates, which no file takes.
  return {
    str(name): str(text).encode('utf-8', 'replace').decode('utf-8')
    for name, text in texts.items()
  }


class _Histogram(NamedTuple):
  counts: np.ndarray  # [K]
  edges: np.ndarray  # [K + 1]
  stats: dict[str, int | float]


def _to_histograms(
  arrays: Mapping[str, Any], num_buckets: int
) -> dict[str, _Histogram]:
  histograms = {}
  for name, array in arrays.items():
    values = np.asarray(array).astype(np.float64).reshape(-1)
    finite = values[np.isfinite(values)]
    nonfinite = values.size - finite.size
    if nonfinite:
      _warn_once(
        ('histogram', str(name)),
        'Histogram "%s" has %d of %d values that are not finite; it shows the '
        'others. This is said once.',
        name,
        nonfinite,
        values.size,
      )
    if finite.size:
      stats = {
        'count': finite.size,
        'nonfinite': nonfinite,
        'min': float(finite.min()),
        'mean': float(finite.mean()),
        'max': float(finite.max()),
      }
      counts, edges = np.histogram(finite, bins=num_buckets)
      histograms[str(name)] = _Histogram(counts, edges, stats)
  return histograms


_CONVERSIONS: dict[str, Callable[..., dict[str, Any]]] = {
  'scalars': to_scalars,
  'images': _to_images,
  'texts': _to_texts,
  'histograms': _to_histograms,
}


class _Record(dict[str, Any]):
  """The values of one call, and what they are converted to for all backends."""

  converted: dict[str, Any] | None = None


def _summarize(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a record as flat JSON values: images and histograms in figures."""
  if kind == 'images':
    return {name: list(images.shape) for name, images in values.items()}
  if kind == 'histograms':
    return {
      f'{name}/{stat}': number
      for name, histogram in values.items()
      for stat, number in histogram.stats.items()
    }
  return dict(values)


# ---------------------------------------------------------------------------
# Backends.
# ---------------------------------------------------------------------------


class Backend(MetricWriter):
  """Converts what is handed over; a subclass only has to emit it.

  It has no lock: an `AsyncWriter` in front of it calls it on one thread.
  """

  @abc.abstractmethod
  def _emit(self, kind: str, step: int, values: dict[str, Any]) -> None:
    """Writes one record.

    Args:
      kind: scalars, images, texts or histograms.
      step: the step the values belong to.
      values: by name; int or float, uint8 [B, H, W, C], str, or _Histogram.
    """

  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any], *options: Any
  ) -> None:
    self._require_open(f'write_{kind}')
    record = values if isinstance(values, _Record) else _Record(values)
    if record.converted is None:
      record.converted = _CONVERSIONS[kind](values, *options)
    if record.converted:
      # A copy: one backend may change it before the next one gets it.
      self._emit(kind, to_step(global_step), dict(record.converted))


class _Piece(NamedTuple):
  """A piece of a file that processes have appended to.

  Attributes:
    data: what is to stand there, where it is not voided.
    step: a resume at an earlier step voids the piece; None: no resume does.
    has_scalars: whether it is a whole record of scalars.
  """

  data: bytes
  step: float | None
  has_scalars: bool


class _FileBackend(Backend):
  """Appends to a local file, whose errors reach the caller.

  Each append goes to the operating system at once: a reader sees it, a killed
  process does not lose it, and a full disk is noticed at the record that does
  not fit. `flush` also waits for the disk. Where another writer's `resume` has
  replaced the file, the new one is appended to.

  Attributes:
    path: the file.
  """

  def __init__(self, path: str) -> None:
    if '://' in path:
      raise ValueError(
        f'Writers write to a local or mounted directory, got {path!r}. Mount '
        'the bucket, or give the writers a local directory.'
      )
    self.path = path
    self._error: OSError | None = None
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    self._open()

  @abc.abstractmethod
  def _read(self, file: BinaryIO) -> Iterator[_Piece]:
    """Yields a file's pieces, which are all of it."""

  def _paths(self) -> list[str]:
    """Returns the files that processes have appended to, this one too."""
    # A pipe or a device has nothing to wait for, and nothing to void.
    return [self.path] if stat.S_ISREG(self._stat.st_mode) else []

  def _open(self) -> None:
    self._file = open(self.path, 'ab', buffering=0)  # noqa: SIM115
    self._stat = os.fstat(self._file.fileno())

  def _follow(self) -> None:
    # Linux lets us write to a deleted file for ever without an error.
    try:
      found = os.stat(self.path)
    except OSError as error:
      raise FileNotFoundError(
        errno.ENOENT,
        'This file was deleted while a writer had it open; its records are '
        'lost. Keep the run directory in place while it runs',
        self.path,
      ) from error
    if not os.path.samestat(found, self._stat):
      self._file.close()
      self._open()

  def _append(self, data: bytes) -> None:
    if self._error is not None:
      # The file may end in half a record; what follows could not be read.
      raise type(self._error)(
        self._error.errno, 'An earlier write to this file failed', self.path
      ) from self._error
    self._follow()
    try:
      while data:
        data = data[self._file.write(data) :]
    except OSError as error:
      path = pathlib.Path(os.path.abspath(self.path))
      self._error = disk.failed_write(error, path)
      raise self._error from None

  def logged_steps(self) -> list[int]:
    steps: set[Any] = set()
    for path in self._paths():
      with open(path, 'rb') as file:
        steps.update(p.step for p in self._read(file) if p.has_scalars)
    return sorted(steps)

  def _resume(self, step: int) -> None:
    for path in self._paths():
      self._void_later(pathlib.Path(os.path.realpath(path)), step)

  def _void_later(self, path: pathlib.Path, step: int) -> None:
    """Edits a file of any size; at each moment its path has all that stays."""

    def kept(file: BinaryIO) -> Iterator[bytes]:
      for data, of_step, _ in self._read(file):
        if of_step is None or of_step <= step:
          yield data

    with open(path, 'rb') as old:
      # What is voided is longer than the end of a line, which may be added.
      if sum(map(len, kept(old))) == old.tell():
        return
      old.seek(0)
      # Always the same name, so that kills leave one such file at most; one
      # that TensorBoard does not take for an event file.
      name = path.name.replace('tfevents', 'events')
      partial = path.with_name(f'.{name}.tmp')
      with disk.replacing(path, partial) as file:
        shutil.copymode(path, partial)
        file.writelines(kept(old))

  def _flush(self) -> None:
    self._follow()
    if self._paths():
      os.fsync(self._file.fileno())

  def _close(self) -> None:
    try:
      self._flush()
    finally:
      self._file.close()


class TensorBoardWriter(_FileBackend):
  """Writes event files for TensorBoard, without TensorFlow.

  tensorboardX supplies the protocol buffers and the checksum. Its own writer is
  not used: it writes on a thread of its own, where an error is lost.

  Scalars are stored as float32, as TensorBoard has it. A batch of images is one
  tag with B samples. Texts are shown verbatim (not as Markdown).

  `resume` takes voided records out of the older event files, each replaced in
  one rename, since not every reader heeds the mark that it also writes: a
  SessionLog START event, by which a TensorBoard that has read them hides them.
  What is damaged stays as it is. Of such a file TensorBoard shows at least what
  stands before the damage, and then goes on with the next file.
  """

  def __init__(
    self,
    log_dir: str | os.PathLike[str],
    *,
    time_fn: Callable[[], float] = time.time,
  ) -> None:
    """Opens a new event file in a directory.

    Its name sorts behind those that are there, also where the clock was set
    back: that is the order in which TensorBoard reads them.

    Args:
      log_dir: the directory; it is made where it does not exist. Give each mode
        (train, eval) a directory of its own: to TensorBoard it is one curve.
      time_fn: gives the time of each record, in seconds since the epoch.

    Raises:
      OSError: the directory cannot be made or written to.
    """
    self._time_fn = time_fn
    log_dir = os.fspath(log_dir)
    # The last part keeps two writers apart that open in one second.
    owner = f'{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}'
    name = f'events.out.tfevents.{time_fn():017.6f}.{owner}'
    last = max(_event_files(log_dir), default='')
    if name < last:
      # Later than any file that another writer made in the same second.
      found = re.match(r'events\.out\.tfevents\.(\d{10})', last)
      seconds = int(found[1]) + 1 if found else 0
      name = f'events.out.tfevents.{seconds:017.6f}.{owner}'
    if name < last:  # A name that is not of this kind.
      name = f'{last}.{owner}'
    super().__init__(os.path.join(log_dir, name))
    self._append_event(file_version='brain.Event:2')

  def _append_event(self, **fields: Any) -> None:
    """Appends one event as a TFRecord: length, checksum, data, checksum."""
    from tensorboardX.proto import event_pb2

    event = event_pb2.Event(wall_time=self._time_fn(), **fields)
    data = event.SerializeToString()
    length = struct.pack('<Q', len(data))
    self._append(length + _checksum(length) + data + _checksum(data))

  def _emit(self, kind: str, step: int, values: dict[str, Any]) -> None:
    summary = [{'tag': k, **_summary(kind, x)} for k, x in values.items()]
    self._append_event(step=step, summary={'value': summary})

  def _paths(self) -> list[str]:
    directory = os.path.dirname(self.path)
    return [os.path.join(directory, name) for name in _event_files(directory)]

  def _read(self, file: BinaryIO) -> Iterator[_Piece]:
    from google.protobuf import message
    from tensorboardX.proto import event_pb2

    while header := file.read(12):
      if header[8:] != _checksum(header[:8]):
        # Where the next record begins cannot be known.
        yield _Piece(header, None, False)
        while rest := file.read(1 << 20):
          yield _Piece(rest, None, False)
        return
      data = file.read(struct.unpack('<Q', header[:8])[0])
      checksum = file.read(4)
      try:
        event = event_pb2.Event.FromString(data)
      except message.DecodeError:
        event = event_pb2.Event()
      # What is damaged may say any step.
      has_scalars = checksum == _checksum(data) and any(
        value.HasField('simple_value') for value in event.summary.value
      )
      step = event.step if event.HasField('summary') else None
      yield _Piece(header + data + checksum, step, has_scalars)

  def _resume(self, step: int) -> None:
    super()._resume(step)
    # Twice: TensorBoard takes the first that it finds in a directory for the
    # start of the run and hides nothing.
    for _ in range(2):
      self._append_event(step=step + 1, session_log={'status': 'START'})


def _event_files(directory: str) -> list[str]:
  """Returns the names of what TensorBoard takes for event files."""
  names = os.listdir(directory) if os.path.isdir(directory) else []
  return [name for name in names if 'tfevents' in name]


def _checksum(data: bytes) -> bytes:
  from tensorboardX import record_writer

  return struct.pack('<I', record_writer.masked_crc32c(data))


def _summary(kind: str, value: Any) -> dict[str, Any]:
  """Returns the fields of a summary, for the plugin that shows such values."""
  if kind == 'scalars':
    return {'simple_value': value}
  if kind == 'histograms':
    # One row per bucket: left edge, right edge, count.
    edges = value.edges
    rows = np.stack([edges[:-1], edges[1:], value.counts], axis=1)
    content = rows.astype('<f8').tobytes()
    tensor = {'dtype': 'DT_DOUBLE', 'tensor_content': content}
    plugin, shape = 'histograms', rows.shape
  elif kind == 'images':
    _, height, width, _ = value.shape
    strings = [b'%d' % width, b'%d' % height, *map(_to_png, value)]
    tensor = {'dtype': 'DT_STRING', 'string_val': strings}
    plugin, shape = 'images', (len(strings),)
  else:
    # Four spaces make it a code block in Markdown, whatever it contains.
    block = '\n'.join('    ' + line for line in value.split('\n'))
    tensor = {'dtype': 'DT_STRING', 'string_val': [block.encode('utf-8')]}
    plugin, shape = 'text', ()
  dims = [{'size': size} for size in shape]
  return {
    'metadata': {'plugin_data': {'plugin_name': plugin}},
    'tensor': {**tensor, 'tensor_shape': {'dim': dims}},
  }


def _to_png(image: np.ndarray) -> bytes:
  """Encodes one uint8 [H, W, C] image (PNG, W3C recommendation)."""
  height, width, channels = image.shape
  color_type = {1: 0, 3: 2, 4: 6}[channels]
  header = struct.pack('>2I5B', width, height, 8, color_type, 0, 0, 0)
  # Each row begins with its filter: 0, none.
  rows = np.pad(image.reshape(height, -1), [(0, 0), (1, 0)]).tobytes()
  chunks = [(b'IHDR', header), (b'IDAT', zlib.compress(rows)), (b'IEND', b'')]
  return b'\x89PNG\r\n\x1a\n' + b''.join(
    struct.pack('>I', len(data))
    + kind
    + data
    # The checksum covers the kind and the data, not the length.
    + struct.pack('>I', zlib.crc32(kind + data))
    for kind, data in chunks
  )


class JsonlWriter(_FileBackend):
  """Appends one JSON object per record to a file; flat, ready for pandas.

  `{"step": 10, "time": 1700000000.5, "mode": "train", "kind": "scalars",
  "loss": 2.5, "kl/total": 0.1}`

  - `kind` is scalars, texts, images or histograms; `mode` is there where the
    writer was given one. A scalar that has one of these four names is written
    as `scalars/step` and so on.
  - Ints are exact, floats round-trip. JSON has no NaN: the strings "NaN",
    "Infinity" and "-Infinity" stand for them, which Python's `float` and
    pandas' `astype(float)` read.
  - Images are recorded by their shape, [B, H, W, C]; a histogram by
    `<name>/count`, `/nonfinite`, `/min`, `/mean` and `/max`.
  - A crash can leave a last line that is cut short. A new writer begins on a
    line of its own, so a reader loses that line and no other.
  - `resume` takes out the records of later steps that have the writer's own
    `mode`, and a last line that is cut short. The file is replaced in one
    rename, or not touched where nothing is to go. Lines that are no records
    (damaged ones) stay, and a warning gives their numbers.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    mode: str | None = None,
    time_fn: Callable[[], float] = time.time,
  ) -> None:
    """Opens the file to append to it.

    Args:
      path: the file; its directory is made where it does not exist.
      mode: written into each record where given, so that several writers
        (training and evaluation) can share a file.
      time_fn: gives the time of each record, in seconds since the epoch.

    Raises:
      OSError: the file cannot be opened to write.
    """
    self._time_fn = time_fn
    self._mode = mode
    super().__init__(os.fspath(path))
    self._has_begun = False

  def _emit(self, kind: str, step: int, values: dict[str, Any]) -> None:
    record: dict[str, Any] = {'step': step, 'time': self._time_fn()}
    if self._mode is not None:
      record['mode'] = self._mode
    record['kind'] = kind
    for name, value in _summarize(kind, values).items():
      key = f'{kind}/{name}' if name in JSONL_KEYS else name
      record[key] = _to_json_value(value)
    line = json.dumps(record, allow_nan=False).encode('ascii') + b'\n'
    if not self._has_begun and _ends_within_a_line(self.path):
      line = b'\n' + line
    self._append(line)
    self._has_begun = True

  def _read(self, file: BinaryIO) -> Iterator[_Piece]:
    for line in file:
      record = read_record(line)
      is_ours = bool(record) and record.get('mode') == self._mode
      is_whole = line.endswith(b'\n')
      step = record['step'] if is_ours else None
      if not record and not is_whole:
        step = math.inf  # It is cut short.
      # A record may lack no more than the end of its line.
      data = line if is_whole else line + b'\n'
      yield _Piece(data, step, is_ours and record.get('kind') == 'scalars')

  def _resume(self, step: int) -> None:
    super()._resume(step)
    for path in self._paths():
      with open(path, 'rb') as file:
        damaged = [n for n, x in enumerate(file, 1) if not read_record(x)]
      if damaged:
        logging.warning(
          '%s: %d lines are no records and stay as they are: line %s. Mend or '
          'remove them, or let what reads the file skip them.',
          path,
          len(damaged),
          ', '.join(map(str, damaged[:10])),
        )


JSONL_KEYS = frozenset({'step', 'time', 'mode', 'kind'})


def read_record(line: bytes) -> dict[str, Any]:
  """Returns a line's record, which has a step; of what is none, nothing."""
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):
    return {}
  if not isinstance(record, dict) or not isinstance(record.get('step'), int):
    return {}
  return record


def _to_json_value(value: Any) -> Any:
  if not isinstance(value, float) or np.isfinite(value):
    return value
  return 'NaN' if np.isnan(value) else f'{"-" * (value < 0)}Infinity'


def _ends_within_a_line(path: str) -> bool:
  # Where it was deleted, the write that follows says so.
  if not os.path.exists(path) or not os.path.getsize(path):
    return False
  with open(path, 'rb') as file:
    file.seek(-1, os.SEEK_END)
    return file.read() != b'\n'


# ---------------------------------------------------------------------------
# Backends by name.
# ---------------------------------------------------------------------------

# (config, mode, directory) -> a writer.
Factory = Callable[[Any, str, pathlib.Path], Writer]
_factories: dict[str, Factory] = {
  'tensorboard': lambda config, mode, directory: TensorBoardWriter(directory),
  'jsonl': lambda config, mode, directory: JsonlWriter(
    directory / 'metrics.jsonl'
  ),
}


def register(name: str) -> Callable[[F], F]:
  """Lets `config.writers` name a writer; a decorator of its factory or class.

    @writers.register('mine')
    def make_mine(config, mode, directory):
      return Mine(directory / 'mine.txt')

  Args:
    name: the name. The latest factory of a name counts.

  Returns:
    A decorator. The factory gets the config, the log ('train' or 'eval') and
    its directory; the writer needs no method but `write_scalars`, and is called
    on the background thread only.
  """

  def add(factory: F) -> F:
    _factories[name] = factory
    return factory

  return add


def make(name: str, config: Any, mode: str, directory: pathlib.Path) -> Writer:
  """Returns a new writer of a registered name.

  Raises:
    errors.UsageError: the name is not registered.
  """
  note = ' What the terminal shows is config.console, and no writer.'
  errors.check_names([name], list(_factories), 'writer', 'config.writers', note)
  return _factories[name](config, mode, directory)


# ---------------------------------------------------------------------------
# Decorators.
# ---------------------------------------------------------------------------


class MultiWriter(MetricWriter):
  """Hands each record to several writers.

  Every writer gets every call, also where one before it fails; then the error
  is raised, or an ExceptionGroup of them where several failed.
  """

  def __init__(self, writers: Iterable[Writer]) -> None:
    """Makes a writer in front of others.

    Args:
      writers: they get each record in this order, and are closed with this one.
    """
    self._writers = tuple(writers)

  def _each(self, method: str, *args: Any) -> None:
    errors = []
    for writer in self._writers:
      try:
        if hasattr(writer, method):
          getattr(writer, method)(*args)
        elif method.startswith('write_'):
          _warn_once(
            ('method', type(writer).__name__, method),
            '%s has no method %s: such records do not reach it. This is said '
            'once.',
            type(writer).__name__,
            method,
          )
      except Exception as error:
        errors.append(error)
    if len({async_lib.cause(e) for e in errors}) == 1:
      raise errors[0]
    if errors:
      raise ExceptionGroup(f'{len(errors)} writers failed in {method}', errors)

  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any], *options: Any
  ) -> None:
    self._require_open(f'write_{kind}')
    self._each(f'write_{kind}', global_step, _Record(values), *options)

  def logged_steps(self) -> list[int]:
    writers = [w for w in self._writers if isinstance(w, MetricWriter)]
    return sorted({step for w in writers for step in w.logged_steps()})

  def _resume(self, step: int) -> None:
    self._each('resume', step)

  def _flush(self) -> None:
    self._each('flush')

  def _close(self) -> None:
    self._each('close')


class AsyncWriter(MetricWriter):
  """Writes on one background thread, behind a queue that cannot overflow.

  A `write_*` call costs the caller a few microseconds, whatever the disk does.
  Device arrays are fetched on the background thread; numpy arrays are copied at
  once, since the caller may reuse them. (A donated array is gone by then: hand
  over a metric of the step, not a part of its state.)

  - Where the queue is full the record is dropped and counted. The 1st, 10th,
    100th ... drop is logged, and `flush` and `close` log the count and write it
    as the scalar `writer/dropped_records`.
  - The first error on the thread is raised, with its traceback, by every later
    write and flush and by the close. What was queued when it happened is still
    handed to the wrapped writer; what came later is refused.
  - `resume`, `flush` and `close` wait for the queue, on whichever thread they
    are called. The end of the program closes the writer.
  - Periodic actions that are given the executor run on the thread too, where a
    `write_*` call writes at once.
  """

  executor: async_lib.SerialExecutor

  def __init__(self, writer: Writer, *, max_queue: int = 1000) -> None:
    """Starts the thread.

    Args:
      writer: what writes; from now on only the thread calls it. It is closed
        with this one.
      max_queue: how many records may wait.

    Raises:
      ValueError: `max_queue` is not positive.
    """
    if max_queue < 1:
      raise ValueError(f'max_queue: got {max_queue}, expected at least 1.')
    self._writer: MetricWriter = (
      writer if isinstance(writer, MetricWriter) else MultiWriter([writer])
    )
    self._max_queue = max_queue
    # Reentrant: a signal handler may write while its thread is in a write.
    self._lock = threading.RLock()
    # Each of the two is written by one side only.
    self._num_queued = 0
    self._num_done = 0
    # Their number and the last one's step, at once: the thread takes no lock.
    self._dropped: tuple[int, Any] = (0, 0)
    self._reported = 0
    self.executor = async_lib.SerialExecutor('jaxline-writer')
    self.executor.put(lambda: None)  # No fork starts one of its own.
    async_lib.at_exit.append(self.close)

  def add(self, writer: Writer) -> None:
    """Also writes to another writer, which is closed with this one."""
    self.executor.wait()
    self._writer = MultiWriter([self._writer, writer])

  @property
  def dropped_records(self) -> int:
    """How many records were dropped because the queue was full."""
    return self._dropped[0]

  def _write(
    self, kind: str, global_step: Any, values: Mapping[str, Any], *options: Any
  ) -> None:
    if self.executor.is_current:  # A periodic action calls it.
      self.executor.run(
        lambda: self._hand_over(kind, global_step, values, *options)
      )
      return
    step = _snapshot(global_step)
    if kind in ('images', 'histograms'):
      values = {name: _to_array(x) for name, x in values.items()}
    values = _snapshot(values)
    if kind == 'images':
      for name, image in values.items():
        # Here the traceback still leads to the line that made the image.
        _check_image(name, image)

    def write() -> None:
      try:
        self._hand_over(kind, step, values, *options)
      finally:
        self._num_done += 1

    with self._lock:
      self._require_open(f'write_{kind}')
      self.executor.raise_error()
      # Besides those that wait, one is being written.
      if self._num_queued - self._num_done <= self._max_queue:
        self.executor.put(write)
        self._num_queued += 1
        return
      dropped = self.dropped_records + 1
      self._dropped = (dropped, step)
    if str(dropped).strip('0') == '1':
      logging.warning(
        'The writer cannot keep up: its queue holds %d records and %d were '
        'dropped so far. Is the disk slow or stuck? Log less often or raise '
        'max_queue.',
        self._max_queue,
        dropped,
      )

  def _hand_over(
    self, kind: str, step: Any, values: Mapping[str, Any], *options: Any
  ) -> None:
    on_host = _to_host(kind, values)
    method = getattr(self._writer, f'write_{kind}')
    method(to_step(step), on_host, *options)

  def logged_steps(self) -> list[int]:
    self._require_open('logged_steps')
    steps: list[int] = []
    self.executor.wait(lambda: steps.extend(self._writer.logged_steps()))
    return steps

  def _resume(self, step: int) -> None:
    self.executor.wait(lambda: self._writer.resume(step))

  def flush(self) -> None:
    self.flush_async()()

  def flush_async(self) -> Callable[[], None]:
    with self._lock:
      self._require_open('flush')
      return self.executor.wait_async(self._report_dropped, self._writer.flush)

  def _close(self) -> None:
    with self._lock:  # No write is between its check and the queue.
      wait = self.executor.wait_async(
        self._report_dropped, self._writer.flush, self._writer.close
      )
    async_lib.at_exit.remove(self.close)
    wait()

  def _report_dropped(self) -> None:
    dropped, step = self._dropped
    if dropped > self._reported:
      self._reported = dropped
      logging.warning('The writer dropped %d records in all.', dropped)
      self._writer.write_scalars(
        to_step(step), {'writer/dropped_records': dropped}
      )


# The first that fits is found fastest.
_UNCHANGEABLE = (jax.Array, float, int, str, np.generic)


def _snapshot(value: Any) -> Any:
  """Copies what the caller may change: mappings and arrays on the host."""
  if isinstance(value, _UNCHANGEABLE):
    return value
  if isinstance(value, Mapping):
    return {name: _snapshot(v) for name, v in value.items()}
  return np.array(value) if hasattr(value, '__array__') else value


def _to_array(value: Any) -> Any:
  return value if hasattr(value, '__array__') else np.array(value)


def _to_host(kind: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
  """Fetches what is still on a device."""
  if kind == 'scalars':
    return to_scalars(values)
  if kind == 'texts':
    return values
  return {name: np.asarray(array) for name, array in values.items()}
