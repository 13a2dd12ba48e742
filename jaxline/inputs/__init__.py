"""Sources of training and evaluation batches, one module per source.

Read `base` first: it defines the interface of an input and the `Shard` of a
host. `indexed` has the inputs whose batch n is a function of (seed, n). `feed`
puts batches on the devices.
"""

from collections.abc import Mapping
from typing import Any

from jaxline.base.keys import POSITIVE, RANGES, Key, integer, optional

KEYS = (
  Key('infeed_buffer_size', 3, integer(2),
      'Sharded style: number of batches to read and put on the devices ahead of'
      ' the step; up to 32 small ones, 16 MiB in all. Evaluation batches are'
      ' read ahead, but put on the devices when needed.', sharded=True),
  Key('infeed_stall_secs', 60.0, optional(POSITIVE),
      'When a step has waited this many seconds for its batch, log a warning'
      ' that names what the input is reading. None disables it.', sharded=True),
  Key('skip_batches', '', RANGES,
      'Batches to leave out, counted from 1. The step that would have used the'
      ' first of a range uses the one after the range.', 'run', sharded=True),
)  # fmt: skip


def arrays(values: Mapping[str, Any], *, batch_size: int, **fields: Any) -> Any:
  """Returns an input that reads arrays, such as {'x': [N, ...], 'y': [N]}.

  With `is_training=True` the input repeats endlessly and shuffles each epoch.
  Otherwise it makes one pass, in order. `batch_size` is the number of rows per
  host. `fields` are passed to `indexed.ArrayInput`: `shard`, `shuffle`, ...
  """
  from jaxline.inputs import indexed  # Avoids a cycle of imports.

  fields.setdefault('reset_for_eval', not fields.get('is_training'))
  return indexed.ArrayInput(values=values, batch_size=batch_size, **fields)
