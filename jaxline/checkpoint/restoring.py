"""Restores checkpoints consistently on all processes and devices of a run."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
from typing import Any, TypeVar

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from jaxline import errors
from jaxline.base import config_record
from jaxline.base import stateful
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import inspection
from jaxline.parallel import distributed
from jaxline.run_directory import directory as directory_lib
from jaxline.run_directory import store as store_lib

_T = TypeVar('_T')
# Restoring raises these errors for values that an experiment cannot have.
_MISFITS = TypeError, ValueError, LookupError, AttributeError, ArithmeticError


class ConfigChangedError(errors.UsageError):
  """A checkpoint in the run's directory was made with a different config."""


def check_config(
  found: contents.Checkpoint,
  directory: directory_lib.DurableDirectory,
  declared: stateful.Stateful | type[stateful.Stateful],
) -> None:
  """Compares the config of a checkpoint with a run's.

  Args:
    found: the checkpoint.
    directory: the run's directory.
    declared: the experiment or its class, which declares changeable keys.

  Raises:
    ConfigChangedError: a key with the effect `run` differs.
  """
  before, now = found.record['config'], directory.recorded
  changes = config_record.changes(before, now, declared)
  if not changes:
    return
  text = '\n'.join(f'  config.{line}' for line in changes)
  if directory.follows or directory.config.on_config_change == 'continue':
    logging.log_first_n(
      logging.WARNING,
      '%s was made with a different config:\n%s', 1, found.name, text,
    )  # fmt: skip
    return
  raise ConfigChangedError(
    f'{found.name} was made with a different config, so resuming would mix two'
    f' runs:\n{text}\nGive this run a new config.checkpoint_dir (and set'
    ' config.restore_from to start from this checkpoint), or set'
    " config.on_config_change = 'continue' to resume with the new values."
  )


def call_in_all_processes(read: Callable[[], _T]) -> _T:
  """Calls `read` in all processes; an error in one is raised in all.

  Raises:
    DamagedError: a process found damage.
  """
  damage: store_lib.DamagedError | None = None
  error: Exception | None = None
  try:
    result = read()
  except store_lib.DamagedError as e:
    damage = e
  except Exception as e:
    error = e
  reports = distributed.gather_and_decide(
    str(damage or ''), list, error, 'restore'
  )
  if any(reports):
    raise damage or store_lib.DamagedError(' '.join(filter(None, reports)))
  return result


def place(
  entries: Mapping[str, Any], state: Mapping[str, Any], of: str
) -> dict[str, Any]:
  """Puts restored entries onto the devices of the live entries.

  In the per-device style, the random key of a step has an equal row for each
  local device, so the number of rows may differ.

  Args:
    entries: the restored entries.
    state: the live entries.
    of: the name of the checkpoint, for errors.

  Raises:
    contents.MismatchError: the type or the shape of an entry differs.
  """
  placed = dict(entries)
  for name, value in entries.items():
    live = state.get(name)
    if not isinstance(live, jax.Array):
      continue
    if isinstance(value, np.ndarray):
      value = jnp.asarray(value)
    got = getattr(value, 'dtype', type(value).__name__), np.shape(value)
    # A raw key has one more axis than a typed key, for its numbers.
    rows = live.ndim - (not arrays.is_key(live))
    if got[0] == live.dtype and rows == 1 and got[1][1:] == live.shape[1:]:
      value = jnp.broadcast_to(value[:1], live.shape)
    elif got != (live.dtype, live.shape):
      raise contents.MismatchError(
        f'{of}: {name}: the checkpoint has {got[0]}{list(got[1])}; expected'
        f' {live.dtype}{list(live.shape)}. Nothing was restored.'
      )
    placed[name] = jax.device_put(value, live.sharding)
  return placed


@contextlib.contextmanager
def refusing(source: str) -> Iterator[None]:
  """Turns errors that values of a file cause into RefusedError.

  `source` is the name of the file.
  """
  try:
    yield
  except errors.UsageError:
    raise
  except _MISFITS as e:
    logging.info('The full error:', exc_info=True)
    raise store_lib.RefusedError(
      f'{source} is refused: {type(e).__name__}: {e}'
    ) from e


def fill(state: dict[str, Any], entries: Mapping[str, Any]) -> None:
  """Restores the entries that a live state has, or changes nothing."""
  found = {key: entries[key] for key in state if key in entries}
  # Restore the experiment first: if it raises an error, nothing has changed.
  if 'experiment_module' in state:
    snapshot = found.pop('experiment_module')
    state['experiment_module'].restore_from_snapshot(snapshot)
  state.update(found)


def find_foreign(where: str) -> contents.Checkpoint:
  """Returns the checkpoint that `restore_from` names.

  Raises:
    UsageError: there is no such checkpoint; the message lists the steps.
  """
  try:
    found = inspection.find(where)
  except ValueError as e:
    raise errors.UsageError(f'config.restore_from is {where!r}: {e}') from e
  found.step = distributed.broadcast_from_process_0(found.step)
  return found
