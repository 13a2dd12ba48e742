"""Ends a run whose loss or gradients are not finite, or warns of it."""

import collections
from collections.abc import Callable, Iterator, Mapping
import functools
import math
from typing import Any, NamedTuple

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from jaxline import errors

# Steps whose values may be still in the making before one is waited for. More
# than the loop lets run ahead by default, so that it is what waits.
_MAX_LATE = 8
_MAX_NAMED = 8  # Scalars in a message; a norm for each layer can be hundreds.

# The scalar by which a sharded step says whether it was finite.
NONFINITE = 'nonfinite'
MODES = ('warn', 'raise', 'skip', 'ignore')


class NonfiniteError(ArithmeticError):
  """A step's loss or gradients were NaN or infinite."""


class _Step(NamedTuple):
  """What a step gave, perhaps still in the making.

  Attributes:
    number: of the step.
    flag: a sharded step's own word; None where there is none.
    scalars: with a flag those that a message may name, else those to judge.
    judged: the arrays that must be computed before it can be judged.
  """

  number: int
  flag: Any
  scalars: Mapping[str, Any]
  judged: list[Any]


def resolve(on_nonfinite: str | None, is_sharded: bool) -> str:
  """Returns the mode that a value of `config.on_nonfinite` means.

  Args:
    on_nonfinite: one of `MODES`, or None for the default of the style.
    is_sharded: whether the experiment is of the sharded style. The per-device
      style warns, since JAXline goes on: its experiments may log a NaN on
      purpose.
  """
  if on_nonfinite is None:
    return 'raise' if is_sharded else 'warn'
  return on_nonfinite


class Guard:
  """A periodic action that judges each step: raises `NonfiniteError`, or warns.

  A sharded experiment says itself, exactly, whether a step's loss and gradients
  are finite (its attribute `nonfinite`; all hosts get the same answer); so does
  any with SKIPS_NONFINITE = True. Of all others, those scalars are judged whose
  name contains 'loss' or 'grad', in capitals or not, nested dicts too, and of
  an array such as [devices] each entry (of an array over several hosts, each
  host judges its own). A scalar of another name, or one that is no number, is
  not judged; nor is an array that a later step was given the buffer of.

  It never waits for the devices, but where 8 steps are behind: so a step is
  judged some steps late. Call `wait` before saving.
  """

  def __init__(
    self,
    experiment: Any,
    on_nonfinite: str | None,
    max_nonfinite_steps: int,
    warn: Callable[[int, list[str], str], None] | None = None,
  ):
    """Sets what is judged, and when it is an error.

    Args:
      experiment: the one in training.
      on_nonfinite: 'raise': the first such step is an error; 'skip': so many
        in a row are, the step itself leaves the state as it was; 'warn': none
        is, and each name is warned of once; 'ignore': none is. None is
        'raise' for a sharded experiment and 'warn' for any other.
      max_nonfinite_steps: how many in a row, for 'skip'.
      warn: for 'warn', gets the number of a step, the names that were not
        finite for the first time in this step, and the warning's text. None
        logs the text.

    Raises:
      ValueError: for another mode, or where the experiment's step cannot skip.
    """
    is_sharded = getattr(experiment, 'IS_SHARDED', False) is True
    mode = resolve(on_nonfinite, is_sharded)
    if mode not in MODES:
      raise errors.UsageError(
        f'Got config.on_nonfinite = {on_nonfinite!r}, expected one of {MODES}.'
      )
    # Another's attribute of the name `nonfinite` is no business of ours.
    self._has_flag = getattr(experiment, 'SKIPS_NONFINITE', False) is True
    if mode == 'skip' and not self._has_flag:
      raise errors.UsageError(
        "config.on_nonfinite is 'skip', but the step of"
        f' {type(experiment).__name__} is its own and cannot be undone from'
        ' outside; only a ShardedExperiment skips by itself. Wrap the'
        ' optimizer in optax.apply_if_finite, with config.on_nonfinite ='
        " 'ignore'."
      )
    self._experiment = experiment
    self._mode = mode
    self._max_in_a_row = max_nonfinite_steps if mode == 'skip' else 1
    self._warn = warn or (lambda step, names, text: logging.warning('%s', text))
    self._warned: set[str] = set()
    # A CPU's arrays lie on the host: to copy one costs more than to read it.
    self._copies = jax.default_backend() != 'cpu'
    self._steps: collections.deque[_Step] = collections.deque()
    self._error: NonfiniteError | None = None

  def __call__(
    self, t: float, step: int, scalar_outputs: Mapping[str, Any] | None
  ) -> None:
    """Takes a step, and judges those before it that are computed.

    Args:
      t: the time, which does not matter.
      step: the step that `scalar_outputs` are of.
      scalar_outputs: the step's scalars, on the devices or the host.

    Raises:
      NonfiniteError: a step was bad; from then on at every call.
    """
    del t
    if self._mode == 'ignore':
      return
    self._raise_error()
    flag = self._experiment.nonfinite if self._has_flag else None
    if flag is not None:
      scalars = dict(scalar_outputs or {})
      judged = [flag]
    else:
      scalars = {
        name: x
        for name, x in _flat(scalar_outputs or {})
        if _judges(name) and _is_number(x)
      }
      judged = [x for x in scalars.values() if _is_jax(type(x))]
    if self._copies:
      for x in judged:
        _start_copy(x)
    steps = self._steps
    steps.append(_Step(int(step), flag, scalars, judged))
    while steps and (
      len(steps) > _MAX_LATE or all(map(_is_ready, steps[0][3]))
    ):
      self._judge_oldest()

  def wait(self) -> None:
    """Judges all steps so far, waiting for them.

    Raises:
      NonfiniteError: one was bad.
    """
    self._raise_error()
    while self._steps:
      self._judge_oldest()

  def wait_to_finish(self) -> None:
    """Does what `wait` does, as a periodic action's end."""
    self.wait()

  def update_time(self, t: float, step: int) -> None:
    """Does nothing: no time matters here."""

  def skip_time(self, seconds: float) -> None:
    """Does nothing: no time matters here."""

  def _raise_error(self) -> None:
    if self._error is not None:
      raise self._error

  def _judge_oldest(self) -> None:
    step = self._steps.popleft()
    if step.flag is not None:
      in_a_row = 0 if _is_gone(step.flag) else int(np.asarray(step.flag))
      if in_a_row < self._max_in_a_row:
        return
    else:
      _warn_of_gone(step)
      if all(map(_is_finite, step.scalars.values())):
        return
    if self._mode == 'warn':
      self._warn_of(step)
      return
    self._steps.clear()  # Steps after a bad one say nothing new.
    self._error = NonfiniteError(self._message(step))
    raise self._error

  def _warn_of(self, step: _Step) -> None:
    """Warns of the names that were finite in all steps before."""
    bad = dict(
      _nonfinite(
        {name: x for name, x in _flat(step.scalars) if name not in self._warned}
      )
    )
    if not bad and not self._warned:
      bad[''] = _NOT_SHOWN
    if bad:
      self._warned.update(bad)
      self._warn(
        step.number,
        list(bad),
        f'The loss or gradients of step {step.number} are not finite:'
        f' {", ".join(bad.values())}. Training goes on, and does not warn of'
        " these again; config.on_nonfinite = 'raise' would end it.",
      )

  def _message(self, step: _Step) -> str:
    if self._mode == 'skip' and step.flag is not None:
      what = (
        f'Step {step.number} was skipped, as were those before it,'
        f' {int(np.asarray(step.flag))} in a row, which is'
        f' config.max_nonfinite_steps = {self._max_in_a_row} or more: its loss'
        ' or gradients are not finite'
      )
      other = "'ignore', or a larger config.max_nonfinite_steps,"
    else:
      what = f'The loss or gradients of step {step.number} are not finite'
      other = "'skip' (sharded steps) or 'ignore'"
    return (
      f'{what}: {_describe(step.scalars)}. The newest checkpoint, if any, is of'
      ' a step before it and untouched. Go on from there with a smaller'
      ' learning rate or clipped gradients (a changed config needs'
      f" config.on_config_change = 'continue'); config.on_nonfinite = {other}"
      ' goes on all the same. To find the cause, run again with'
      ' JAX_DEBUG_NANS=True and --jaxline_post_mortem.'
    )


@functools.cache
def _judges(name: str) -> bool:
  name = name.lower()
  return 'loss' in name or 'grad' in name


def _flat(scalars: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
  """Yields all values, those of nested mappings as `a/b`."""
  for name, x in scalars.items():
    if isinstance(x, dict):
      yield from _flat({f'{name}/{k}': v for k, v in x.items()})
    else:
      yield str(name), x


# By type and dtype, since these are asked at every step.
_cached: Any = functools.cache
_is_jax = _cached(lambda kind: issubclass(kind, jax.Array))
_is_array = _cached(
  lambda kind: issubclass(kind, jax.Array | np.ndarray | np.generic)
)
_is_inexact = _cached(lambda dtype: jnp.issubdtype(dtype, jnp.inexact))


def _is_number(x: Any) -> bool:
  """Returns whether it is something that can be NaN."""
  if _is_array(type(x)):
    return _is_inexact(x.dtype)
  return isinstance(x, float | complex)


def _is_gone(x: Any) -> bool:
  """Returns whether it is an array whose buffer a later step was given."""
  return _is_jax(type(x)) and x.is_deleted()


def _is_ready(x: Any) -> bool:
  """Returns whether a jax.Array can be read without waiting."""
  # JAX's own annotations lack is_ready.
  return x.is_deleted() or x.is_ready()


def _is_finite(x: Any) -> bool:
  """Returns whether all of a number or an array is finite."""
  if not _is_array(type(x)):
    return bool(np.isfinite(x))
  if x.ndim == 0 and not _is_gone(x) and x.dtype.kind == 'f':
    return math.isfinite(np.asarray(x))  # A third of the time of the below.
  return all(np.isfinite(part).all() for part in _to_host(x))


def _start_copy(x: Any) -> None:
  if isinstance(x, jax.Array) and not x.is_deleted():
    x.copy_to_host_async()


def _warn_of_gone(step: _Step) -> None:
  if not any(x.is_deleted() for x in step.judged):
    return
  if gone := [name for name, x in step.scalars.items() if _is_gone(x)]:
    logging.log_first_n(
      logging.WARNING,
      'The scalars %s of step %d were donated to a later step before they could'
      ' be read, so nobody knows whether they were finite. Return a copy.',
      1,
      gone,
      step.number,
    )


def _to_host(x: Any) -> list[np.ndarray]:
  """Returns what this host has of a number or an array, in pieces."""
  if _is_gone(x):
    return []
  if isinstance(x, jax.Array) and not x.is_fully_replicated:
    # Twice as fast as to put the whole together, and cut over hosts it cannot.
    return [np.asarray(shard.data) for shard in x.addressable_shards]
  return [np.asarray(x)]


_NOT_SHOWN = (
  'none of its scalars shows it; optax.tree.norm(grads) among them would'
)


def _nonfinite(scalars: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields the names that are not finite, and such as `loss = nan`."""
  numbers = [(name, x) for name, x in _flat(scalars) if _is_number(x)]
  # Those that speak of the loss or the gradients first.
  for name, x in sorted(numbers, key=lambda number: not _judges(number[0])):
    values = np.concatenate([[], *map(np.ravel, _to_host(x))])
    bad = values[~np.isfinite(values)]
    if bad.size:
      several = f' in {bad.size} of {values.size} entries'
      yield name, f'{name} = {bad[0]}' + (several if values.size > 1 else '')


def _describe(scalars: Mapping[str, Any]) -> str:
  """Returns such as `loss = nan, grad_norm = inf`."""
  texts = [text for _, text in _nonfinite(scalars)]
  if len(texts) > _MAX_NAMED:
    texts[_MAX_NAMED:] = [f'and {len(texts) - _MAX_NAMED} more']
  return ', '.join(texts) or _NOT_SHOWN
