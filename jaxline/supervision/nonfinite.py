"""Ends a run whose loss or gradients are not finite, or warns of it."""

import collections
from collections.abc import Iterator, Mapping
import functools
import re
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from jaxline import errors
from jaxline.metrics import periodic

# The names of scalars that must be finite.
_JUDGED = re.compile('loss|grad', re.IGNORECASE)

# The scalar that the step of an experiment with SKIPS_NONFINITE returns, int32:
# 0 if the loss and the gradients were finite; else 1, or with 'skip' the number
# of steps in a row that were not.
NONFINITE = 'nonfinite'


class NonfiniteError(ArithmeticError):
  """A step's loss or gradients were NaN or infinite."""


class Guard(periodic.Action):
  """A periodic action that judges each step: raises `NonfiniteError`, or warns.

  The step of an experiment with SKIPS_NONFINITE = True returns the scalar
  NONFINITE, which is the same on all hosts. For all other experiments, the
  guard judges the scalars whose name contains 'loss' or 'grad' in any case,
  also in nested dicts, and every entry of an array such as [devices]. Of an
  array over several hosts, each host judges its own part. The guard judges no
  other scalars, no values that are not floating-point or complex numbers, and
  no array whose buffer a later step has reused.

  A step is judged `steps_late` steps later, when the loop has to wait for its
  end anyway. Call `wait` before saving.
  """

  def __init__(
    self,
    experiment: Any,
    on_nonfinite: str | None,
    max_nonfinite_steps: int,
    steps_late: int = 1,
  ):
    """Sets the experiment to judge, and what is an error.

    Args:
      experiment: the one in training.
      on_nonfinite: see `config.on_nonfinite`.
      max_nonfinite_steps: see `config.max_nonfinite_steps`.
      steps_late: how many steps may be in flight when one is judged; more than
        the loop allows would hold results longer than necessary, and fewer
        would make the loop wait.

    Raises:
      ValueError: the experiment's step cannot skip, as the mode says.
    """
    # JAXline continues after a NaN, and its experiments may log one on purpose.
    default = 'raise' if experiment.IS_SHARDED else 'warn'
    self._mode = default if on_nonfinite is None else on_nonfinite
    self._has_flag = experiment.SKIPS_NONFINITE
    self._class_name = type(experiment).__name__
    if self._mode == 'skip' and not self._has_flag:
      raise errors.UsageError(
        "config.on_nonfinite is 'skip', but the step of"
        f' {self._class_name} is its own; only a ShardedExperiment skips. Wrap'
        ' the optimizer in optax.apply_if_finite.'
      )
    self._max_in_a_row = max_nonfinite_steps if self._mode == 'skip' else 1
    self._warned: set[str] = set()
    self._steps_late = steps_late
    self._steps: collections.deque[tuple[int, dict[str, Any]]] = (
      collections.deque()
    )

  def __call__(
    self, t: float, step: int, scalar_outputs: Mapping[str, Any] | None
  ) -> None:
    """Takes a step, and judges the one `steps_late` steps before it.

    Args:
      t: the time, which does not matter.
      step: the step that `scalar_outputs` are of.
      scalar_outputs: the step's scalars, on the devices or the host.

    Raises:
      NonfiniteError: a step was not finite.
      ValueError: the scalar NONFINITE is missing, unless on_nonfinite='warn'.
    """
    del t
    if self._mode == 'ignore':
      return
    scalars = dict(scalar_outputs or {})
    has_lost_flag = self._has_flag and scalars.get(NONFINITE) is None
    if has_lost_flag and self._mode != 'warn':
      raise ValueError(
        f'config.on_nonfinite is {self._mode!r}, but {self._class_name}.step'
        f' returned {list(scalars)}, without {NONFINITE!r}. An override of'
        ' `step` must return all scalars of ShardedExperiment.step or of the'
        ' compiled step; a step that does not compute this scalar needs'
        ' SKIPS_NONFINITE = False.'
      )
    self._steps.append((int(step), scalars))
    if len(self._steps) > self._steps_late:
      self._judge_oldest()

  def without_flag(self, scalars: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the scalars to log, of those that a step returned."""
    if not self._has_flag:
      return scalars
    return {name: x for name, x in scalars.items() if name != NONFINITE}

  def wait(self) -> None:
    """Judges all steps so far, waiting for them.

    Raises:
      NonfiniteError: one was not finite.
    """
    while self._steps:
      self._judge_oldest()

  wait_to_finish = wait  # As a periodic action.

  def _judge_oldest(self) -> None:
    step, scalars = self._steps.popleft()
    flag = scalars.get(NONFINITE) if self._has_flag else None
    in_a_row = 1 if flag is None else int(np.asarray(flag))
    if in_a_row < self._max_in_a_row:
      return
    numbers = [(k, x) for k, x in _numbers(scalars) if k not in self._warned]
    if flag is None:
      numbers = [item for item in numbers if _JUDGED.search(item[0])]
    else:  # The message may name any, those of the loss and gradients first.
      numbers.sort(key=lambda item: not _JUDGED.search(item[0]))
    bad = _nonfinite(numbers)
    if not bad and (flag is None or self._warned):
      return
    texts = list(bad.values()) or [
      'none of its scalars shows it; optax.tree.norm(grads) among them would'
    ]
    what = f'The loss or gradients of step {step} are not finite'
    if self._mode == 'warn':
      names = list(bad) or ['']
      self._warned.update(names)
      logging.warning(
        '%s: %s. Training goes on, and does not warn of these again;'
        " config.on_nonfinite = 'raise' would end it.",
        what,
        ', '.join(texts),
      )
      return
    self._steps.clear()  # Steps after a nonfinite one say nothing new.
    if self._mode == 'skip':
      what += (
        f' ({in_a_row} such steps in a row; config.max_nonfinite_steps ='
        f' {self._max_in_a_row})'
      )
    raise NonfiniteError(
      f'{what}: {", ".join(texts)}. The newest checkpoint, if any, is of'
      ' a step before it and untouched. Go on from there with a smaller'
      ' learning rate or clipped gradients (a changed config needs'
      " config.on_config_change = 'continue'); config.on_nonfinite = 'ignore'"
      " (or 'skip', of sharded steps) goes on all the same. To find the cause,"
      ' run again with JAX_DEBUG_NANS=True, --jaxline_disable_pmap_jit and'
      ' --jaxline_post_mortem.'
    )


def _numbers(scalars: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields all values that can be NaN, those of nested mappings as `a/b`."""
  for name, x in scalars.items():
    kind: Any = type(x)
    if isinstance(x, dict):
      yield from _numbers({f'{name}/{k}': v for k, v in x.items()})
    elif _can_be_nan(kind, getattr(x, 'dtype', None)):
      yield str(name), x


@functools.cache
def _can_be_nan(kind: type, dtype: Any) -> bool:
  """Decides by class and dtype: it is asked for every scalar of every step."""
  return issubclass(kind, float | complex) or (
    issubclass(kind, jax.Array | np.ndarray | np.generic)
    and jnp.issubdtype(dtype, jnp.inexact)
  )


def _nonfinite(numbers: list[tuple[str, Any]]) -> dict[str, str]:
  """Returns the names that are not finite, each with such as `loss = nan`."""
  bad = {}
  for name, x in numbers:
    if isinstance(x, jax.Array):
      if x.is_deleted():  # Donated to a later step.
        continue
      if not x.is_fully_replicated:
        shards = [np.ravel(shard.data) for shard in x.addressable_shards]
        x = np.concatenate([[], *shards])
    values = np.asarray(x)
    is_finite = np.isfinite(values)
    # Not by all(), which takes three times as long for a few numbers.
    if count := values.size - np.count_nonzero(is_finite):
      several = (
        f' in {count} of {values.size} entries' if values.size > 1 else ''
      )
      bad[name] = f'{name} = {np.ravel(values[~is_finite])[0]}{several}'
  return bad
