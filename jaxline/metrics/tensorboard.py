"""Event files for TensorBoard, without TensorFlow.

tensorboardX supplies the protocol buffers and the checksum. Its own writer is
not used: it writes on a thread of its own, where an error is lost.
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

from jaxline.metrics import files

_TIME = re.compile(r'events\.out\.tfevents\.(\d{10})')
# TIME.HOST.PID.ID: TensorFlow and PyTorch give no such time and ID.
_OWN_NAME = re.compile(_TIME.pattern + r'\.\d{6}\..+\.\d+\.[0-9a-f]{8}')


class TensorBoardWriter(files.FileBackend):
  """Writes a new event file in a directory that may have older ones.

  Scalars are stored as float32, as TensorBoard has it. A batch of images is one
  tag with B samples. Texts are shown verbatim (not as Markdown).

  `resume` cuts the older event files to the lengths that the checkpoint
  recorded; a file that it does not name becomes empty. Event files of other
  programs stay. TensorBoard may have a file open: it would show no more points
  if that file were deleted, or cut and appended to. So the new file goes on
  with SessionLog START events, which tell it to hide the points that were cut.
  """

  def __init__(self, log_dir: str | os.PathLike[str]) -> None:
    """Opens a new event file in a directory.

    Its name sorts behind those that are there, also where the clock was set
    back: that is the order in which TensorBoard reads them.

    Args:
      log_dir: the directory; it is made where it does not exist. Give each mode
        (train, eval) a directory of its own: to TensorBoard it is one curve.

    Raises:
      OSError: the directory cannot be made or written to.
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
    self._append_event(file_version='brain.Event:2')

  def _append_event(self, **fields: Any) -> None:
    self._append(_record(time.time(), **fields))

  def _emit(self, kind: str, step: int, values: dict[str, Any]) -> None:
    summary = [{'tag': k, **_summary(kind, x)} for k, x in values.items()]
    self._append_event(step=step, summary={'value': summary})

  def _logs(self) -> list[str]:
    directory = os.path.dirname(self.path)
    names = filter(_OWN_NAME.fullmatch, os.listdir(directory))
    return [os.path.join(directory, name) for name in names]

  def resume(self, step: int, lengths: Mapping[str, int]) -> None:
    own = {self.path: os.path.getsize(self.path)}
    super().resume(step, {**lengths, **own})
    # Twice: TensorBoard takes the first that it finds in a directory for the
    # start of the run and hides nothing.
    for _ in range(2):
      self._append_event(step=step + 1, session_log={'status': 'START'})


def _record(wall_time: float, **fields: Any) -> bytes:
  """Returns one event as a TFRecord: length, checksum, data, checksum."""
  from tensorboardX.proto import event_pb2

  event = event_pb2.Event(wall_time=wall_time, **fields)
  data = event.SerializeToString()
  length = struct.pack('<Q', len(data))
  return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
  from tensorboardX import record_writer

  return struct.pack('<I', record_writer.masked_crc32c(data))


def _summary(kind: str, value: Any) -> dict[str, Any]:
  """Returns the fields of a summary, for the plugin that shows such values."""
  if kind == 'scalars':
    return {'simple_value': value}
  if kind == 'images':
    _, height, width, _ = value.shape
    strings = [b'%d' % width, b'%d' % height, *map(_to_png, value)]
    tensor = {'dtype': 'DT_STRING', 'string_val': strings}
    plugin, dims = 'images', [{'size': len(strings)}]
  else:
    # Four spaces make it a code block in Markdown, whatever it contains.
    block = '\n'.join('    ' + line for line in value.split('\n'))
    tensor = {'dtype': 'DT_STRING', 'string_val': [block.encode('utf-8')]}
    plugin, dims = 'text', []
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
