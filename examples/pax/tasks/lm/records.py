"""Parses records of C4: `tf.train.Example` messages or JSON objects.

The field numbers of tensorflow/core/example/*.proto are built in, so parsing an
example requires protobuf but not TensorFlow.
"""

import json

from google.protobuf import empty_pb2
from google.protobuf import unknown_fields


def document_text(record: bytes) -> bytes:
  """Returns the document of a record.

  Args:
    record: A `tf.train.Example` or a JSON object, with an entry `text`.

  Raises:
    ValueError: An example has no `text`. Malformed records raise the errors of
      their parser.
  """
  if record.startswith(b'{'):
    return json.loads(record)['text'].encode()
  for entry in _fields(record, 1, 1):  # features.feature, a map.
    if _fields(entry, 1) == [b'text']:
      return _fields(entry, 2, 1, 1)[0]  # value.bytes_list.value[0]
  raise ValueError(
    f'A record of {len(record)} bytes, {record[:40]!r}..., has no text;'
    ' expected a tf.train.Example or a JSON object with an entry `text`.'
  )


def _fields(message: bytes, *path: int) -> list[bytes]:
  """Returns the values of a message's fields at a path of field numbers."""
  if not path:
    return [message]
  # An empty message type puts all fields into its unknown fields.
  fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
  return [
    value
    for field in fields
    # A message of a different type may have a number in this field.
    if field.field_number == path[0] and isinstance(field.data, bytes)
    for value in _fields(field.data, *path[1:])
  ]
