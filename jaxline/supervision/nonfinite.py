"""Ends a run, or warns, if its loss or gradients are not finite."""

import cmath
import collections
from collections.abc import Mapping
import functools
import re
import shlex
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from jaxline import errors
from jaxline.base import trees
from jaxline.metrics import periodic
from jaxline.metrics import scalars as scalars_lib
from jaxline.metrics import values as values_lib

# Scalars with matching names must be finite.
_JUDGED = re.compile('loss|grad', re.IGNORECASE)
NONFINITE, PARTS = scalars_lib.NONFINITE, scalars_lib.PARTS
# The keys are values of NONFINITE, or with 'skip' values of PARTS.
_PARTS = {
  2: 'The loss of step {} is',
  3: 'The gradients of step {} are',
  4: 'The loss and gradients of step {} are',
}


class NonfiniteError(errors.RunError, ArithmeticError):
  """A step's loss or gradients were NaN or infinite."""


class Guard(periodic.Action):
  """A periodic action that raises `NonfiniteError` or warns.

  If the experiment sets FLAGS_NONFINITE, it checks the scalar NONFINITE.
  Otherwise each host checks, on its devices, the scalars whose name contains
  'loss' or 'grad', unless their buffer was donated to a later step.

  It checks a step `steps_late` steps later, when the loop waits for the step's
  end anyway. Call `wait` before you save. The scalar `zero_weight_steps` counts
  the steps of this process whose batch had no weight (NONFINITE is -1), if any.
  """

  def __init__(
    self,
    experiment: Any,
    on_nonfinite: str | None,
    max_nonfinite_steps: int,
    steps_late: int = 1,
  ):
    self._mode = on_nonfinite or experiment.on_nonfinite
    self._has_flag = experiment.FLAGS_NONFINITE
    flagging = ('skip', 'raise') if self._has_flag else ('skip',)
    self._needs_flag = self._mode in flagging
    self._experiment = experiment
    self._max_in_a_row = max_nonfinite_steps if self._mode == 'skip' else 1
    self._warned: set[str] = set()
    self._num_empty = 0
    self._steps_late = steps_late
    self._fetches = jax.default_backend() != 'cpu'
    self._steps: collections.deque[tuple[int, Any, Any]] = collections.deque()

  def __call__(
    self, t: float, step: int, scalar_outputs: Mapping[str, Any] | None
  ) -> None:
    """Takes the scalars of a step and checks an earlier step."""
    if self._mode == 'ignore':
      return
    scalars: Any = {} if scalar_outputs is None else scalar_outputs
    flag = scalars_lib.find(scalars, NONFINITE) if self._has_flag else None
    if flag is None and self._needs_flag:
      name = self._experiment.__class__.__name__
      raise errors.UsageError(
        f'{name}.step returned {list(scalars)}, without'
        f' {NONFINITE!r}. A step of ShardedExperiment must return all scalars'
        ' of the compiled step. Per-device experiments do not support'
        " on_nonfinite = 'skip': use optax.apply_if_finite."
      )
    # Copy the values, since a later hook may change the mapping.
    kept = _judged(scalars) if flag is None else scalars
    if self._fetches:  # Fetch the numbers while the next step is dispatched.
      values_lib.start_fetch(kept if flag is None else flag[0])
    self._steps.append((step, kept, flag))
    if len(self._steps) > self._steps_late:
      self._judge_oldest()
    if self._num_empty:
      scalars_lib.others_of(scalars)['zero_weight_steps'] = self._num_empty

  def without_flag(self, scalars: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the scalars of a step without the flags, for the log."""
    if not self._has_flag:
      return scalars
    return {k: x for k, x in scalars.items() if k not in (NONFINITE, PARTS)}

  def wait(self) -> None:
    """Waits for all steps so far and checks them, as a call does."""
    while self._steps:
      self._judge_oldest()

  wait_to_finish = wait

  def _judge_oldest(self) -> None:
    step, scalars, flag = self._steps.popleft()
    in_a_row, names = 1, scalars
    if flag is not None:
      array, index = flag
      in_a_row = int(np.asarray(array)[index])
      # A packed flag is a uint32 with an int32's bits. NumPy converts slowly.
      in_a_row -= (in_a_row >= 2**31) << 32
      self._num_empty += in_a_row < 0
      if in_a_row < 0 and self._num_empty == 1:
        text = 'Nothing in the batch of step %d has a weight: its loss and'
        text += ' gradients are 0. zero_weight_steps counts such steps.'
        logging.warning(text, step)
      if in_a_row < self._max_in_a_row:
        return
      # The message names the checked scalars first, and then any others.
      scalars = _leaves(scalars)
      names = _judged(scalars) | scalars
    bad = {
      name: text
      for name in names
      if name not in self._warned and (text := _nonfinite(scalars[name]))
    }
    if not bad and (flag is None or self._warned):
      return
    parts = int(scalars.get(PARTS, 1)) if self._mode == 'skip' else in_a_row
    of = _PARTS.get(parts, 'The loss or gradients of step {} are')
    what = f'{of.format(step)} not finite'
    if self._mode == 'skip':
      what += f', after {in_a_row} such steps in a row that were skipped'
    shown = ', '.join(f'{name} = {text}' for name, text in bad.items())
    what += f': {shown}.' if shown else ', but all logged scalars are.'
    if self._mode == 'warn':
      self._warned.update(bad or [NONFINITE])
      text = '%s Training continues without further warnings of these. Set'
      text += " config.on_nonfinite = 'raise' to end the run instead."
      logging.warning(text, what)
      return
    self._steps.clear()  # The steps after a nonfinite one need no check.
    how = 'set JAX_DEBUG_NANS=True, with --jaxline_disable_pmap_jit.'
    if self._has_flag:
      config = self._experiment.run_config
      run = (config and config.checkpoint_dir) or 'RUN'
      how = f'python -m jaxline.runs replay {shlex.quote(run)} {step} --nan'
    raise NonfiniteError(
      f'{what}{self._about_weights()} The newest checkpoint, if any, is from an'
      ' earlier step. Resume from it with a smaller learning rate or clipped'
      ' gradients (a changed config needs config.on_config_change ='
      " 'continue'), or with config.on_nonfinite = 'ignore' ('skip' in the"
      f' sharded style). To find the first operation that is not finite: {how}'
    )

  def _about_weights(self) -> str:
    """Describes whether this host's part of the weights is finite."""
    is_finite = jax.jit(lambda x: jnp.isfinite(x).all())
    try:
      weights = jax.tree.leaves(self._experiment.state.params)
      parts = [part.data for x in weights for part in x.addressable_shards]
      what = 'finite' if all(map(is_finite, parts)) else 'not finite'
      step = int(self._experiment.state.step)  # Later steps may have run.
    except (AttributeError, RuntimeError, TypeError):  # It has no such weights.
      return ''
    return f' The weights after step {step} are {what}.'


def _leaves(scalars: Any) -> dict[str, Any]:
  """Flattens a mapping whose values may be nested; returns values by path."""
  leaves = jax.tree.leaves_with_path(dict(scalars))
  return {trees.name_of(path): x for path, x in leaves}


def _judged(scalars: Any) -> dict[str, Any]:
  """Returns the values that must be finite, by path."""
  kinds = tuple(map(type, scalars.values()))
  if (names := _judged_names(tuple(scalars), kinds)) is None:
    scalars = _leaves(scalars)
    names = _judged_names(tuple(scalars), ()) or []
  return {name: scalars[name] for name in names}


@functools.lru_cache  # Each step has the same names.
def _judged_names(
  names: tuple[Any, ...], kinds: tuple[type, ...]
) -> list[Any] | None:
  """Returns names of values that must be finite; None if a value is nested."""
  if any(issubclass(kind, Mapping | list | tuple) for kind in kinds):
    return None
  return [name for name in names if _JUDGED.search(str(name))]


def _nonfinite(x: Any) -> str:
  """Returns a text like 'nan in 2 of 8 entries', or '' if all are finite."""
  try:
    parts = _local(x)
    for part in parts:
      # For one number, NumPy would take four times as long.
      one = part.size == 1
      if not (cmath.isfinite(part.item()) if one else np.isfinite(part).all()):
        break
    else:
      return ''
  except (TypeError, ValueError):  # It is not a number, or not on this host.
    return ''
  values = np.concatenate([part.ravel() for part in parts])
  bad = values[~np.isfinite(values)]
  several = f' in {bad.size} of {values.size} entries'
  return f'{bad[0]}{several if values.size > 1 else ""}'


def _local(x: Any) -> list[np.ndarray]:
  """Returns the values on this host: one array, or one per device."""
  if not isinstance(x, jax.Array):
    return [np.asarray(x)]
  if x.is_deleted():  # It was donated to a later step.
    return []
  sharding = x.sharding
  if sharding.num_devices == 1 or sharding.is_fully_replicated:
    return [np.asarray(x)]
  # `addressable_shards` would compute indices, which takes even longer.
  num_parts = len(sharding.addressable_devices)
  return [np.asarray(x.addressable_data(i)) for i in range(num_parts)]
