"""The text of a record of C4: a `tf.train.Example`, or a JSON object.

An example is read by the numbers of its fields, those of
tensorflow/core/example/*.proto, so that it takes protobuf and not TensorFlow.
"""

import json

from google.protobuf import empty_pb2
from google.protobuf import unknown_fields


def document_text(record: bytes) -> bytes:
  """Returns the document of a record.

  Args:
    record: a `tf.train.Example` or a JSON object, each with `text`.

  Raises:
    ValueError: an example has none. Other records raise what their parser does.
  """
  if record.startswith(b'{'):
    return json.loads(record)['text'].encode()
  for entry in _fields(record, 1, 1):  # features.feature, a map.
    if _fields(entry, 1) == [b'text']:
      return _fields(entry, 2, 1, 1)[0]  # value.bytes_list.value[0]
  raise ValueError(
    f'A record of {len(record)} bytes, {record[:40]!r}..., has no text;'
    ' expected a tf.train.Example or a JSON object with `text`.'
  )


def _fields(message: bytes, *path: int) -> list[bytes]:
  """Returns what a message has in its fields at a path of numbers."""
  if not path:
    return [message]
  # To a message without fields of its own, all are unknown.
  fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
  return [
    value
    for field in fields
    # Another message may have a number there.
    if field.field_number == path[0] and isinstance(field.data, bytes)
    for value in _fields(field.data, *path[1:])
  ]
