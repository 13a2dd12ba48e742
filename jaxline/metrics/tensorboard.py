"""Event files for TensorBoard, without TensorFlow or protocol buffers.

An event file is a sequence of records: length, checksum, data, checksum. The
data is an `Event` of tensorflow/core/util/event.proto, encoded here by hand,
which takes a fifth of the time.
"""

from collections.abc import Mapping
import functools
import os
import re
import socket
import struct
import time
from typing import Any
import uuid
import zlib

import crc32c
import numpy as np

from jaxline.metrics import base
from jaxline.metrics import files

_TIME = re.compile(r'events\.out\.tfevents\.(\d{10})')
# TIME.HOST.PID.ID: TensorFlow and PyTorch give no such time and ID.
_OWN_NAME = re.compile(_TIME.pattern + r'\.\d{6}\..+\.\d+\.[0-9a-f]{8}')


class TensorBoardWriter(files.FileBackend):
  """Writes a new event file in a directory that may have older ones.

  So no record follows one that was cut, which would hide it. Scalars are
  stored as float32, as TensorBoard has it. A batch of images is one
  tag with B samples. Texts are shown verbatim (not as Markdown).

  `resume` cuts the older event files to the lengths that the checkpoint
  recorded; a file that it does not name becomes empty. Event files of other
  programs stay. TensorBoard may have a file open: it would show no more points
  if that file were deleted, or cut and appended to. So the new file goes on
  with SessionLog START events, which tell it to hide the points that were cut.
  """

  def __init__(self, log_dir: str | os.PathLike[str]) -> None:
    """Opens a new event file in a directory.

    TensorBoard reads the files in the order of their names, of their times.

    Args:
      log_dir: the directory; it is made where it does not exist. Give each mode
        (train, eval) a directory of its own: to TensorBoard it is one curve.
    """
    log_dir = os.fspath(log_dir)
    # The suffix distinguishes writers opened within the same second.
    owner = f'{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}'
    names = os.listdir(log_dir) if os.path.isdir(log_dir) else []
    found = map(_TIME.match, names)
    # A later name than all others, also if the clock was set back.
    now = max([time.time(), *(int(x[1]) + 1 for x in found if x)])
    name = f'events.out.tfevents.{now:017.6f}.{owner}'
    super().__init__(os.path.join(log_dir, name))
    self._append(_event(time.time(), 0, _field(3, b'brain.Event:2')))

  def encode(self, record: base.Record) -> bytes:
    field = _FIELDS[record.kind]
    values = [field(name, value) for name, value in record.values.items()]
    return _event(record.time, record.step, _field(5, b''.join(values)))

  def _logs(self) -> list[str]:
    directory = os.path.dirname(self.path)
    names = filter(_OWN_NAME.fullmatch, os.listdir(directory))
    return [os.path.join(directory, name) for name in names]

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    own = {self.path: os.path.getsize(self.path)}
    super().resume(step, {**lengths, **own})
    start = _field(7, b'\x08\x01')  # session_log {status: START}
    # Twice: TensorBoard takes the first that it finds in a directory for the
    # start of the run and hides nothing.
    for _ in range(2):
      self._append(_event(time.time(), step + 1, start))


def _varint(number: int) -> bytes:
  """Encodes an integer of 64 bits: seven in a byte, the lowest first."""
  number &= (1 << 64) - 1
  encoded = bytearray()
  while number > 127:
    encoded.append(number & 127 | 128)
    number >>= 7
  return bytes([*encoded, number])


def _field(number: int, data: bytes) -> bytes:
  """Encodes a field that has a length: a message, a string or bytes."""
  return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _event(wall_time: float, step: int, content: bytes) -> bytes:
  """Encodes an event as a record; `content` is one more encoded field."""
  step_field = b'\x10' + _varint(step)
  data = b'\x09' + struct.pack('<d', wall_time) + step_field + content
  length = struct.pack('<Q', len(data))
  return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
  """Returns the masked CRC of TensorFlow's record files."""
  crc = crc32c.crc32c(data)
  rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
  return struct.pack('<I', (rotated + 0xA282EAD8) & 0xFFFFFFFF)


@functools.lru_cache(1000)
def _scalar_prefix(name: str) -> bytes:
  """Returns the field of a scalar in a summary, up to its number."""
  value = _field(1, name.encode()) + b'\x15'  # simple_value, a float32.
  return b'\x0a' + _varint(len(value) + 4) + value


def _scalar(name: str, value: float) -> bytes:
  try:
    return _scalar_prefix(name) + struct.pack('<f', value)
  except OverflowError:
    return _scalar(name, np.inf if value > 0 else -np.inf)


def _strings(name: str, plugin: str, strings: list[bytes]) -> bytes:
  """Returns the field of a tensor of strings, which a plugin shows."""
  dim = _field(2, b'\x08' + _varint(len(strings)))
  shape = dim if plugin == 'images' else b''  # A text is a scalar.
  values = b''.join(_field(8, x) for x in strings)
  tensor = b'\x08\x07' + _field(2, shape) + values  # dtype: DT_STRING
  metadata = _field(1, _field(1, plugin.encode()))
  value = _field(1, name.encode()) + _field(8, tensor) + _field(9, metadata)
  return _field(1, value)


def _images(name: str, images: np.ndarray) -> bytes:
  sizes = [b'%d' % images.shape[axis] for axis in (2, 1)]  # Width, height.
  return _strings(name, 'images', [*sizes, *map(_to_png, images)])


def _text(name: str, text: str) -> bytes:
  # Indented by four spaces, Markdown shows any text as it is.
  block = '\n'.join('    ' + line for line in text.split('\n'))
  return _strings(name, 'text', [block.encode()])


_FIELDS: Any = {'scalars': _scalar, 'images': _images, 'texts': _text}


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
