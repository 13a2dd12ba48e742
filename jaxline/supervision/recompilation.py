"""Warns of programs that training compiles again, and says what changed.

JAX logs what it compiles, and for which arguments, at a level that is not
shown. A filter of that log reads the records, on the thread that trains and
only while a step runs: what an evaluation, a checkpoint or a metric compiles is
no concern of it.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import logging as python_logging
import os
import sys
import threading
import types
from typing import Any

from absl import logging
import jax

from jaxline import debug

_LOGGER = 'jax._src.interpreters.pxla'
_COMPILING = 'Compiling '
_PHASES = '/jax/core/compile/'
_COMPILED = '/jax/core/compile/backend_compile_duration'
_JAX = os.path.dirname(jax.__file__) + os.sep

# The first steps may compile a program for what `init` and for what the step
# before have made of its arguments, which may differ in types and layouts.
_FIRST_STEPS = 3
# Programs that took less are warned of when they have taken as much together.
_SECS = 1.0
_MAX_LINES = 10
# Of the earlier arguments of a function the closest are compared.
_MAX_KEPT = 8


@dataclasses.dataclass(frozen=True)
class _Program:
  """A program that is being compiled.

  Attributes:
    name: of the function, as JAX has it.
    caller: the line of code that has called it.
    arguments: name -> shape and type, and placement.
  """

  name: str
  caller: str
  arguments: dict[str, tuple[str, Any]]

  def changes_since(self, before: _Program) -> list[str]:
    """Returns a line for each argument that differs."""
    now, then = self.arguments, before.arguments
    nothing = ('nothing', None)
    lines = []
    for name in [*now, *(name for name in then if name not in now)]:
      (a, a_place), (b, b_place) = (
        now.get(name, nothing),
        then.get(name, nothing),
      )
      if a != b:
        lines.append(f'{name}: now {a}, before {b}')
      elif a_place != b_place:
        lines.append(f'{name}: now {a} in {a_place}, before in {b_place}')
    return lines


@dataclasses.dataclass
class _Function:
  """What is known of a function of the step.

  Attributes:
    programs: it was compiled as.
    secs: for compiling it again, since the last warning.
    limit: the seconds after which the next warning is due.
  """

  programs: list[_Program] = dataclasses.field(default_factory=list)
  secs: float = 0.0
  limit: float = _SECS


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
    self._first_step = first_step
    self._functions: dict[tuple[str, str], _Function] = {}
    self._program: _Program | None = None
    self._secs = 0.0
    self._is_explained = False
    self.num_batches = 0
    self._before: Watch | None = None

  def __enter__(self) -> Watch:
    _install()
    self._before = _thread.watch
    if not debug.settings.disable_pmap_jit:  # It runs each operation by itself.
      _thread.watch = self
    return self

  def __exit__(self, *unused: Any) -> None:
    _thread.watch = self._before

  def explained(self) -> None:
    """Notes that the program that is being traced has been warned of."""
    self._is_explained = True

  def begins(self, record: python_logging.LogRecord) -> None:
    """Reads the record of a program that is about to be compiled."""
    self._program = _read(record)

  def took(self, event: str, secs: float, name: str) -> None:
    """Hears how long a phase of the compilation of a function took."""
    self._secs += secs
    if event != _COMPILED:
      return
    program, self._program = self._program, None
    secs, self._secs = self._secs, 0.0
    is_explained, self._is_explained = self._is_explained, False
    # Without a record the same is compiled for other devices.
    key = (program.name, program.caller) if program else _name(name, _frames())
    function = self._functions.setdefault(key, _Function())
    before = function.programs[-_MAX_KEPT:]
    program = program or _Program(*key, before[-1].arguments if before else {})
    function.programs = [*before, program]
    if not before or is_explained or self.step is None:
      return
    if self.step - self._first_step >= _FIRST_STEPS:
      self._warn(function, before, secs)

  def _warn(
    self, function: _Function, before: Sequence[_Program], secs: float
  ) -> None:
    program = function.programs[-1]
    function.secs += secs
    if secs < _SECS and function.secs < function.limit:
      return
    if secs < _SECS:
      function.limit *= 2
    function.secs = 0.0
    lines = min(map(program.changes_since, reversed(before)), key=len)
    advice = ''
    if lines:
      advice = 'Keep its arguments as they are, such as by padding. Changed:'
    elif program.arguments:
      advice = (
        'Its arguments have the shapes, types and shardings of before: is the'
        ' function made anew (jax.jit inside of the step), or called on other'
        ' devices or with another static argument?'
      )
    if len(lines) > _MAX_LINES:
      lines[_MAX_LINES:] = [f'and {len(lines) - _MAX_LINES} more']
    logging.warning(
      'Step %d has compiled %s again, in %.1f s (called at %s). %s%s',
      self.step,
      program.name,
      secs,
      program.caller,
      advice,
      ''.join(f'\n{line}' for line in lines),
    )


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
    watch.explained()
    watch.num_batches += 1
    if watch.num_batches & (watch.num_batches - 1):
      return  # Every new length may be one: the 1st, 2nd, 4th, ... is told.
  logging.warning(
    'train_input gave a batch of another shape or type, for which the step is'
    ' compiled anew; pad its batches to one shape, or to few.\n%s',
    '\n'.join(lines),
  )


def _watch() -> Watch | None:
  """Returns the watch of this thread, while a step runs."""
  watch = _thread.watch
  return None if watch is None or watch.step is None else watch


# What is read of JAX.


def _read(record: python_logging.LogRecord) -> _Program:
  """Returns the program of a record 'Compiling %s with ...'."""
  name, types_, places = (*record.args, (), ())[:3]  # type: ignore[misc]
  frames = _frames()
  names = _argument_names(frames, len(types_)) or [
    f'argument {n}' for n in range(len(types_))
  ]
  values = [str(x) for x in types_]
  values = [x.removeprefix('ShapedArray(').removesuffix(')') for x in values]
  arguments = dict(zip(names, zip(values, places, strict=False), strict=False))
  return _Program(*_name(str(name), frames), arguments)


def _name(name: str, frames: Sequence[types.FrameType]) -> tuple[str, str]:
  """Returns the name of a function that is compiled, and the calling line."""
  caller = next((f for f in frames if not _is_of_jax(f)), frames[-1])
  if any(_is_of_pmap(frame) for frame in frames):
    name = 'a function of jax.pmap'  # Its own name is not known there.
  return name, f'{caller.f_code.co_filename}:{caller.f_lineno}'


def _frames() -> list[types.FrameType]:
  """Returns the frames that have called this module, innermost first."""
  frame: types.FrameType | None = sys._getframe(1)
  found: list[types.FrameType] = []
  while frame is not None:
    if found or _is_of_jax(frame):
      found.append(frame)
    frame = frame.f_back
  return found


def _is_of_jax(frame: types.FrameType) -> bool:
  return frame.f_code.co_filename.startswith(_JAX)


def _is_of_pmap(frame: types.FrameType) -> bool:
  return frame.f_code.co_filename == os.path.join(_JAX, '_src', 'pmap.py')


def _argument_names(
  frames: Sequence[types.FrameType], count: int
) -> list[str] | None:
  """Returns the names of a program's arguments, such as "batch['x']".

  The record does not have them: they are taken from the functions of JAX that
  have made it. None where these have changed.
  """
  for frame in frames:
    if not _is_of_jax(frame):
      return None
    if _is_of_pmap(frame) and {'args', 'kwargs'} <= {*frame.f_locals}:
      values = frame.f_locals['args'], frame.f_locals['kwargs']
      paths = jax.tree_util.tree_leaves_with_path(values)
      names = [jax.tree_util.keystr(path) for path, _ in paths]
      names = [f'args{x[3:]}' if x[:3] == '[0]' else x[3:] for x in names]
    else:
      jaxpr = frame.f_locals.get('jaxpr')
      info = getattr(jaxpr, 'debug_info', None)
      names = list(getattr(info, 'arg_names', None) or ())
      if any(name.startswith('flat_args') for name in names):
        continue  # Of a program of `pmap`.
    if len(names) == count:
      return names
  return None


class _Filter(python_logging.Filter):
  """Reads the records of programs; lets pass what would be shown without it.

  Attributes:
    shows_all: whether the level of the log was chosen by somebody else.
  """

  shows_all = False

  def filter(self, record: python_logging.LogRecord) -> bool:
    watch = _watch()
    if watch is not None and str(record.msg).startswith(_COMPILING):
      try:
        watch.begins(record)
      except Exception:  # JAX's records and functions are no interface.
        logging.log_first_n(
          logging.WARNING,
          'What JAX says of a compilation cannot be read: of a program that is'
          ' compiled again, it is not known which arguments have changed.',
          1,
          exc_info=True,
        )
    parent = python_logging.getLogger(_LOGGER).parent
    if self.shows_all or parent is None:
      return True
    return record.levelno >= parent.getEffectiveLevel()


def _on_duration(event: str, duration_secs: float, **kwargs: Any) -> None:
  if event.startswith(_PHASES) and (watch := _watch()) is not None:
    watch.took(event, duration_secs, str(kwargs.get('fun_name')))


_lock = threading.Lock()
_is_installed = False


def _install() -> None:
  """Has the functions above called, from the first call on."""
  global _is_installed
  with _lock:
    if _is_installed:
      return
    _is_installed = True
  jax.monitoring.register_event_duration_secs_listener(_on_duration)
  logger = python_logging.getLogger(_LOGGER)
  reader = _Filter()
  reader.shows_all = logger.level != python_logging.NOTSET
  if not reader.shows_all:
    logger.setLevel(python_logging.DEBUG)
  logger.addFilter(reader)
