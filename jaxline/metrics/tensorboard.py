"""Writes event files for TensorBoard without TensorFlow.

An event file is a sequence of records: length, checksum, data, checksum. The
data is an `Event` of tensorflow/core/util/event.proto, which tensorboardX has.
Its `SummaryWriter` is not used because it cannot truncate a file, and its
`flush` returns before its queue is written.
"""

from collections.abc import Mapping
import os
import re
import socket
import struct
import time
from typing import Any
import uuid
import zlib

import numpy as np
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2
from tensorboardX.proto import summary_pb2
from tensorboardX.proto import tensor_pb2

from jaxline.metrics import files

_TIME = re.compile(r'events\.out\.tfevents\.(\d{10})')
# TIME.HOST.PID.ID; files of TensorFlow and PyTorch have no such TIME and ID.
_OWN_NAME = re.compile(_TIME.pattern + r'\.\d{6}\..+\.\d+\.[0-9a-f]{8}')


class TensorBoardWriter(files.FileBackend):
  """Writes a new event file in a directory that may have older ones.

  The file is new because TensorBoard does not read past a truncated record. A
  batch of images is one tag with B samples. Texts are shown verbatim.

  `resume` truncates the older event files of this library. If TensorBoard has
  one of them open and this file is deleted, or is truncated and then grows, it
  shows no more points. So the new file has SessionLog START events, which tell
  TensorBoard to hide the removed points.
  """

  def __init__(self, log_dir: str | os.PathLike[str]) -> None:
    """Opens a new event file in a directory, which it creates if needed."""
    self._names: list[str] = []
    self._event = event_pb2.Event()
    self._numbers: list[summary_pb2.Summary.Value] = []
    log_dir = os.fspath(log_dir)
    # The suffix distinguishes writers opened within the same second.
    owner = f'{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}'
    names = os.listdir(log_dir) if os.path.isdir(log_dir) else []
    found = map(_TIME.match, names)
    # TensorBoard reads files in the order of their names, so the new name must
    # be the last, even if the clock was set back.
    now = max([time.time(), *(int(x[1]) + 1 for x in found if x)])
    name = f'events.out.tfevents.{now:017.6f}.{owner}'
    super().__init__(os.path.join(log_dir, name))
    version = event_pb2.Event(
      wall_time=time.time(), file_version='brain.Event:2'
    )
    self._append(_frame(version))

  def encode(self, record: files.Record) -> bytes:
    values = record.values
    if record.kind == 'scalars':
      # Reuse the messages if the names have not changed: making them again
      # would take the thread four times as long.
      if self._names != (names := list(values)):
        self._event = event_pb2.Event()
        add = self._event.summary.value.add
        self._numbers = [add(tag=name) for name in names]
        self._names = names
      event = self._event
      for number, x in zip(self._numbers, values.values(), strict=True):
        number.simple_value = x
    else:
      event = event_pb2.Event()
      for name, x in values.items():
        event.summary.value.add(tag=name, **_tensor(record.kind, x))
    event.wall_time, event.step = record.time, record.step
    return _frame(event)

  def _logs(self) -> list[str]:
    directory = os.path.dirname(self.path)
    names = filter(_OWN_NAME.fullmatch, os.listdir(directory))
    return [os.path.join(directory, name) for name in names]

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    own = {self.path: os.path.getsize(self.path)}
    super().resume(step, {**lengths, **own})
    session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    start = event_pb2.Event(
      wall_time=time.time(), step=step + 1, session_log=session
    )
    # Write it twice: TensorBoard takes the first START event in a directory for
    # the start of the run and hides nothing.
    for _ in range(2):
      self._append(_frame(start))


def _frame(event: event_pb2.Event) -> bytes:
  """Encodes an event as a record."""
  data = event.SerializeToString()
  parts = struct.pack('<Q', len(data)), data
  sums = [struct.pack('<I', record_writer.masked_crc32c(x)) for x in parts]
  return parts[0] + sums[0] + parts[1] + sums[1]


def _tensor(kind: str, x: Any) -> dict[str, Any]:
  """Returns a tensor of strings and the metadata for its plugin."""
  if kind == 'texts':
    # Markdown shows text verbatim if it is indented by four spaces.
    block = '\n'.join('    ' + line for line in x.split('\n'))
    plugin, strings = 'text', [block.encode()]
  else:
    sizes = [b'%d' % x.shape[axis] for axis in (2, 1)]  # Width, height.
    plugin, strings = 'images', [*sizes, *map(_to_png, x)]
  tensor = tensor_pb2.TensorProto(dtype='DT_STRING', string_val=strings)
  if kind == 'images':
    tensor.tensor_shape.dim.add(size=len(strings))
  data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin)
  metadata = summary_pb2.SummaryMetadata(plugin_data=data)
  return {'tensor': tensor, 'metadata': metadata}


def _to_png(image: np.ndarray) -> bytes:
  """Encodes one uint8 [H, W, C] image (PNG, W3C recommendation)."""
  height, width, channels = image.shape
  color_type = {1: 0, 3: 2, 4: 6}[channels]
  header = struct.pack('>2I5B', width, height, 8, color_type, 0, 0, 0)
  # Each row begins with its filter; 0 means none.
  rows = np.pad(image.reshape(height, -1), [(0, 0), (1, 0)]).tobytes()
  png = b'\x89PNG\r\n\x1a\n'
  chunks = [b'IHDR' + header, b'IDAT' + zlib.compress(rows), b'IEND']
  for chunk in chunks:  # A chunk is a kind of four bytes and its data.
    png += struct.pack('>I', len(chunk) - 4) + chunk
    png += struct.pack('>I', zlib.crc32(chunk))
  return png
