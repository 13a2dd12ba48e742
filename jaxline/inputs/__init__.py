"""Where training and evaluation batches come from, one module per source.

`base` has the contract and the `Shard` of a host, `indexed` the inputs whose
batch n is a function of (seed, n), `feed` the way to the devices. Read `base`
first.
"""

from collections.abc import Mapping
from typing import Any

from jaxline.base.keys import POSITIVE, RANGES, Key, integer, optional

KEYS = (
  Key('infeed_buffer_size', 3, integer(2),
      'Sharded style: how many batches are read and put on the devices ahead of'
      ' the step, of small ones up to 32, of 16 MiB in all; those of an'
      ' evaluation are only read ahead.', sharded=True),
  Key('infeed_stall_secs', 60.0, optional(POSITIVE),
      'When a step waits for its batch this many seconds, the log says so, and'
      ' what the input is reading. None disables the warning.', sharded=True),
  Key('skip_batches', '', RANGES,
      'Batches to leave out, counted from 1: the step that would have had the'
      ' first of a range takes the batch after the last.', 'run', sharded=True),
)  # fmt: skip


def arrays(values: Mapping[str, Any], *, batch_size: int, **fields: Any) -> Any:
  """Returns an input of arrays in memory, such as {'x': [N, ...], 'y': [N]}.

  With `is_training=True` it shuffles each epoch and has no end; without, it is
  one pass in order. `batch_size` is the number of rows of each host; `fields`
  are more of `indexed.ArrayInput`, such as `shard`, `shuffle` and `repeat`.
  """
  from jaxline.inputs import indexed  # It needs what imports this package.

  fields.setdefault('reset_for_eval', not fields.get('is_training'))
  return indexed.ArrayInput(values=values, batch_size=batch_size, **fields)
