"""Warns of programs that training compiles again, and says what changed.

JAX tells its listeners when it has compiled a program. One of them looks, on
the thread that trains and only while a step runs, at the call that JAX was
compiling for: what an evaluation, a checkpoint or a metric compiles is no
concern of it.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import inspect
import os
import sys
import threading
import types
from typing import Any

from absl import logging
import jax

from jaxline import debug
from jaxline import goodput

_COMPILED = '/jax/core/compile/backend_compile_duration'
_JAX = os.path.dirname(jax.__file__) + os.sep

# The first steps may compile a program for what `init` and for what the step
# before have made of its arguments, which may differ in types and layouts.
_FIRST_STEPS = 3
# Functions are warned of that have taken that long to compile again.
_SECS = 1.0
_MAX_LINES = 10

# Name -> shape and type, and placement; or the value of a static argument.
_Arguments = dict[str, tuple[str, Any]]


@dataclasses.dataclass
class _Function:
  """What is known of a function of the step.

  Attributes:
    arguments: those it was compiled for last.
    count: how often it was compiled again.
    secs: for that.
  """

  arguments: _Arguments
  count: int = 0
  secs: float = 0.0


class Watch:
  """Sees what the steps of one training loop compile; a context manager.

  Attributes:
    step: the number of the step that runs; None between two steps.
    num_batches: how often the step was compiled for another batch.
  """

  def __init__(self, first_step: int):
    """Sets what is known.

    Args:
      first_step: the number of the first step.
    """
    self.step: int | None = None
    self.num_batches = 0
    self._first_step = first_step
    self._functions: dict[tuple[str, str], _Function] = {}

  def __enter__(self) -> Watch:
    _listen()
    self._secs = goodput.compiled_secs()
    if not debug.settings.disable_pmap_jit:  # It runs each operation by itself.
      _thread.watch = self
    return self

  def __exit__(self, *unused: Any) -> None:
    _thread.watch = None

  def compiled(self, name: str, caller: str, arguments: _Arguments) -> None:
    """Hears of a program that was compiled.

    Args:
      name: of its function.
      caller: the line of code that called it.
      arguments: that it was called with.
    """
    before, self._secs = self._secs, goodput.compiled_secs()
    if self.step is None:
      return
    function = self._functions.get((name, caller))
    if function is None:
      self._functions[name, caller] = _Function(arguments)
      return
    lines = _changes(arguments, function.arguments)
    function.arguments = arguments
    if self.step - self._first_step < _FIRST_STEPS:
      return
    function.secs += (secs := self._secs - before)
    function.count += 1
    # Each step may compile: the 1st, 2nd, 4th, ... time is told.
    if function.secs < _SECS or function.count & (function.count - 1):
      return
    advice = ''
    if lines:
      advice = 'Keep its arguments as they are, such as by padding. Changed:'
    elif arguments:
      advice = (
        'Its arguments have the shapes, types and shardings of before: is the'
        ' function made anew (jax.jit inside of the step)?'
      )
    if len(lines) > _MAX_LINES:
      lines[_MAX_LINES:] = [f'and {len(lines) - _MAX_LINES} more']
    logging.warning(
      'Step %d has compiled %s again, in %.1f s (called at %s). %s%s',
      self.step,
      name,
      secs,
      caller,
      advice,
      ''.join(f'\n{line}' for line in lines),
    )


def _changes(now: _Arguments, then: _Arguments) -> list[str]:
  """Returns a line for each argument that differs."""
  nothing = ('nothing', None)
  lines = []
  for name in now | then:
    (a, a_place), (b, b_place) = now.get(name, nothing), then.get(name, nothing)
    if a != b:
      lines.append(f'{name}: now {a}, before {b}')
    elif a_place != b_place and a_place and b_place:
      lines.append(f'{name}: now {a} in {a_place}, before in {b_place}')
  return lines


class _Thread(threading.local):
  """The watch of this thread's training loop."""

  watch: Watch | None = None


_thread = _Thread()


def warn_of_batch(lines: Sequence[str]) -> None:
  """Warns that the program that is being traced was so for another batch.

  Args:
    lines: one for each array that has changed.
  """
  watch = _thread.watch
  if watch is not None:
    watch.step = None  # What else this step compiles has the same cause.
    watch.num_batches += 1
    if watch.num_batches & (watch.num_batches - 1):
      return  # Every new length may be one: the 1st, 2nd, 4th, ... is told.
  logging.warning(
    'train_input gave a batch of another shape or type, for which the step is'
    ' compiled anew; pad its batches to one shape, or to few.\n%s',
    '\n'.join(lines),
  )


@functools.cache
def _listen() -> None:
  """Has JAX call `_on_duration`, from the first call on."""
  goodput.listen()  # First: it sums up how long a compilation took.
  jax.monitoring.register_event_duration_secs_listener(_on_duration)


def _on_duration(event: str, duration_secs: float, **kwargs: Any) -> None:
  watch = _thread.watch
  if event == _COMPILED and watch is not None:
    watch.compiled(*_call(sys._getframe(1), str(kwargs.get('fun_name'))))


def _call(
  frame: types.FrameType | None, name: str
) -> tuple[str, str, _Arguments]:
  """Returns the function that JAX compiles, its caller and its arguments.

  Args:
    frame: of JAX, called by what it compiles for.
    name: that JAX has for the function.
  """
  found: types.FrameType | None = None
  while frame is not None and frame.f_code.co_filename.startswith(_JAX):
    # In these functions `jax.jit` and `jax.pmap` have the user's arguments.
    if frame.f_code.co_name in ('cache_miss', 'wrapped'):
      found = frame
    frame = frame.f_back
  caller = f'{frame.f_code.co_filename}:{frame.f_lineno}' if frame else ''
  try:
    call = found.f_locals  # type: ignore[union-attr]
    args, kwargs = call['args'], call['kwargs']
    if 'fun' in call:
      signature = inspect.signature(call['fun'])
      named = signature.bind(*args, **kwargs).arguments
    else:
      name, named = 'a function of jax.pmap', {'args': args, **kwargs}
    leaves = jax.tree_util.tree_leaves_with_path
    return (
      name,
      caller,
      {
        f'{argument}{jax.tree_util.keystr(path)}': _describe(x)
        for argument, value in named.items()
        for path, x in leaves(value)
      },
    )
  except Exception:  # JAX's functions are no interface.
    return name, caller, {}


def _describe(x: Any) -> tuple[str, Any]:
  try:
    return str(jax.typeof(x)), getattr(x, 'sharding', None)
  except TypeError:
    return repr(x)[:80], None  # Of a static argument.
