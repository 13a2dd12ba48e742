"""The text of a record of C4: a `tf.train.Example`, or a JSON object.

The messages are declared here as far as a text needs them, so that reading them
takes protobuf and not TensorFlow. A field that is not declared is skipped.
"""

import json

from google.protobuf import descriptor_pb2
from google.protobuf import descriptor_pool
from google.protobuf import message_factory
from google.protobuf import text_format

_PACKAGE = 'jaxline.examples.pax'
# The numbers of the fields are those of tensorflow/core/example/*.proto. A map
# is a repeated message of a key and a value.
_FILE = """
  name: 'examples/pax/example.proto' package: 'jaxline.examples.pax'
  message_type { name: 'Example'
    field { name: 'features' number: 1 label: LABEL_OPTIONAL
            type_name: 'Features' } }
  message_type { name: 'Features'
    field { name: 'feature' number: 1 label: LABEL_REPEATED
            type_name: 'Entry' } }
  message_type { name: 'Entry'
    field { name: 'key' number: 1 label: LABEL_OPTIONAL type: TYPE_BYTES }
    field { name: 'value' number: 2 label: LABEL_OPTIONAL
            type_name: 'Feature' } }
  message_type { name: 'Feature'
    field { name: 'bytes_list' number: 1 label: LABEL_OPTIONAL
            type_name: 'BytesList' } }
  message_type { name: 'BytesList'
    field { name: 'value' number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
"""
_pool = descriptor_pool.DescriptorPool()
_pool.Add(text_format.Parse(_FILE, descriptor_pb2.FileDescriptorProto()))
_Example = message_factory.GetMessageClass(
  _pool.FindMessageTypeByName(f'{_PACKAGE}.Example')
)


def document_text(record: bytes) -> bytes:
  """Returns the document of a record.

  Args:
    record: a `tf.train.Example` or a JSON object, each with `text`.

  Raises:
    ValueError: an example has none. Other records raise what their parser does.
  """
  if record.startswith(b'{'):
    return json.loads(record)['text'].encode()
  for entry in _Example.FromString(record).features.feature:
    if entry.key == b'text':
      return entry.value.bytes_list.value[0]
  raise ValueError(
    f'A record of {len(record)} bytes, {record[:40]!r}..., has no text;'
    ' expected a tf.train.Example or a JSON object with `text`.'
  )
