"""Says what is in the memory of the devices when there is no more of it."""

from collections.abc import Iterator, Sequence
import contextlib
import math
import pathlib
from typing import Any

import jax

from jaxline.metrics import lines as lines_lib

_NUM_LISTED = 12
_MARK = '[jaxline]'
_STATS = {
  'bytes_in_use': 'in use',
  'peak_bytes_in_use': 'at the peak',
  'bytes_limit': 'in all',
}
_ADVICE = """\
Suggested changes, most effective first: a smaller batch; more
rematerialisation (`remat` of the model); weights and optimizer split over the
devices (config.sharding = 'fsdp', now {sharding!r}); the batch in parts
(config.gradient_accumulation_steps, now {steps!r}).
--jaxline_mode=compile says what a sharded step needs before it runs."""


@contextlib.contextmanager
def explained(experiment: Any, config: Any) -> Iterator[None]:
  """Adds to an error of too little memory what the memory holds.

  The error keeps its type and traceback, and gets notes: the largest arrays,
  by name where they belong to the experiment, how much is in use, and what to
  change. The profile of the memory is written to the run's directory.

  Args:
    experiment: whose attributes name arrays; None where there is none yet.
    config: the run's, complete.

  Yields:
    Nothing.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    text = str(error)
    # XLA calls a full disk the same.
    is_memory = 'RESOURCE_EXHAUSTED' in text and 'No space left' not in text
    noted = '\n'.join(getattr(error, '__notes__', []))  # JAX has notes as well.
    if is_memory and _MARK not in noted:
      for note in _notes(experiment, config):
        error.add_note(f'{_MARK} {note}')
    raise


def _notes(experiment: Any, config: Any) -> Iterator[str]:
  for make, argument in (
    (_in_use, jax.local_devices()),
    (_largest, experiment),
    (_saved_profile, config),
  ):
    try:
      if note := make(argument):
        yield note
    except Exception as e:  # The run's own error is what counts.
      yield f'What the memory holds is not known: {e!r}'
  yield _ADVICE.format(
    sharding=config.sharding, steps=config.gradient_accumulation_steps
  )


def _in_use(devices: Sequence[Any]) -> str:
  """Returns how much the backend says is in use; '' where it does not."""
  lines = []
  for device in devices:
    if stats := device.memory_stats():
      parts = [
        f'{lines_lib.size(stats[key])} {what}'
        for key, what in _STATS.items()
        if key in stats
      ]
      lines.append(f'{device}: {", ".join(parts)}')
  return '\n'.join(lines)


def _largest(experiment: Any) -> str:
  """Returns a table of the largest arrays, bytes on one device."""
  names = _names(experiment)
  # Arrays that were given to the step are not live any more, but their memory
  # was in use when it failed.
  arrays = {id(x): x for x in [*jax.live_arrays(), *names.values()]}
  by_id = {id(x): name for name, x in names.items()}
  rows: dict[str, tuple[int, int]] = {}
  for key, x in arrays.items():
    shape = ','.join(map(str, x.shape))
    name = f'{by_id.get(key, "(unnamed)")} {x.dtype.name}[{shape}]'
    count, size = rows.get(name, (0, 0))
    on_one_device = math.prod(x.sharding.shard_shape(x.shape))
    rows[name] = count + 1, size + on_one_device * x.dtype.itemsize
  ordered = sorted(rows.items(), key=lambda row: -row[1][1])
  total = sum(size for _, (_, size) in ordered)
  lines = [
    f'{len(arrays)} arrays take {lines_lib.size(total)} on one device; programs'
    ' need more while they run. The largest:'
  ]
  lines += [
    f'  {lines_lib.size(size):>10}  {name}{f" x {count}" if count > 1 else ""}'
    for name, (count, size) in ordered[:_NUM_LISTED]
  ]
  return '\n'.join(lines)


def _names(experiment: Any) -> dict[str, jax.Array]:
  """Returns name -> array of an experiment's attributes.

  The attributes and not `snapshot_state`, which may make arrays.
  """
  found: dict[str, jax.Array] = {}
  for attribute, value in vars(experiment).items() if experiment else ():
    for path, x in jax.tree_util.tree_leaves_with_path(value):
      if isinstance(x, jax.Array):
        key = jax.tree_util.keystr(path, simple=True, separator='/')
        found['/'.join(filter(None, (attribute.strip('_'), key)))] = x
  return found


def _saved_profile(config: Any) -> str:
  if config.checkpoint_dir is None:
    return ''
  path = pathlib.Path(config.checkpoint_dir).absolute()
  path /= f'out_of_memory_process_{jax.process_index()}.prof'
  jax.profiler.save_device_memory_profile(str(path))
  return f'Who allocated what: pprof -top {path}'
