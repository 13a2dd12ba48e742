"""Traces the training steps of `config.profile_steps`.

TensorBoard's profile plugin and Perfetto show a trace.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import pathlib
import re
import shutil
import time
from typing import Any

from absl import logging
import jax
from jax._src import profiler as jax_profiler

from jaxline import async_lib
from jaxline import errors
from jaxline.metrics import periodic


def parse(text: str) -> list[tuple[int, int]]:
  """Returns the (first, last) steps of ranges such as '10-15,1000-1005'.

  Raises:
    errors.UsageError: the text is something else, or not in order.
  """
  found: list[tuple[int, int]] = []
  for part in text.split(','):
    match = re.fullmatch(r'\s*(\d+)(?:\s*-\s*(\d+))?\s*', part, re.ASCII)
    first, last = (
      map(int, (match[1], match[2] or match[1])) if match else (0, 0)
    )
    if not max([0, *(x for _, x in found)]) < first <= last:
      raise errors.UsageError(
        f'config.profile_steps is {text!r}, where {part.strip()!r} is wrong;'
        " expected steps such as '12', '10-15' or '10-15,1000-1005', counted"
        ' from 1 and in increasing order.'
      )
    found.append((first, last))
  return found


def validate(text: Any) -> bool:
  """Returns False for what is no text; a wrong text is an error.

  Raises:
    errors.UsageError: the text is wrong.
  """
  return isinstance(text, str) and bool(parse(text))


def actions(
  config: Any, say: Callable[[str], None] = logging.info
) -> list[Profiler]:
  """Returns the periodic action that traces steps of a run that trains.

  Args:
    config: the run's, complete.
    say: gets what the user is to know.

  Returns:
    The action; none for a run without a directory.
  """
  if config.checkpoint_dir is None:
    if config.profile_steps is not None:
      logging.warning(
        'config.profile_steps is %r, but the run has no directory for the'
        ' trace. Set config.checkpoint_dir.',
        config.profile_steps,
      )
    return []
  return [Profiler(config, say)]


class Profiler(periodic.Action):
  """A periodic action that traces steps.

  The trace starts on the thread that trains, between two steps. Another thread
  waits for the last step's results, stops the trace and writes it, while
  training goes on, so that a part of the next steps is in it too. An error is a
  warning: no trace ends a run.
  """

  def __init__(
    self, config: Any, say: Callable[[str], None] = logging.info
  ) -> None:
    """Makes the action; `update_time` begins.

    Args:
      config: the run's, complete, with a directory.
      say: gets what the user is to know.
    """
    self._ranges = parse(config.profile_steps) if config.profile_steps else []
    self._run_directory = pathlib.Path(config.checkpoint_dir).absolute()
    self._directory = self._run_directory / 'train'
    if process := jax.process_index():
      self._directory /= f'host_{process}'
    self._say = say
    self._last: int | None = None  # Step of the trace that is being made.
    self._path = self._directory  # That trace's.
    self._scalars: Any = None  # Of the newest step of that trace.
    self._is_busy = False  # From the start of a trace until it is written.
    self._executor = async_lib.SerialExecutor('profiler')

  def update_time(self, t: float, step: int) -> None:
    """Begins: a range may begin with the first step of this process."""
    # Without those that an earlier process has run.
    self._ranges = [ends for ends in self._ranges if ends[1] > step]
    self(t, step, None)

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    """Starts or stops a trace, if it is time to."""
    del t
    step = int(step)  # A restored step can be an array.
    if self._last is not None:
      self._scalars = scalar_outputs
      if step >= self._last:
        self._stop()
    if self._is_busy:
      return
    # A range of which the end was waited for in vain.
    while self._ranges and self._ranges[0][1] <= step:
      first, last = self._ranges.pop(0)
      logging.warning(
        'The steps %d to %d were not traced: an earlier trace was not written'
        ' yet.',
        first,
        last,
      )
    if self._ranges and self._ranges[0][0] <= step + 1:
      self._start(step, self._ranges.pop(0)[1])

  def wait_to_finish(self) -> None:
    """Writes the trace of a run that ends."""
    if self._last is not None:
      self._stop()
    self._executor.wait()

  def _start(self, step: int, last: int) -> None:
    name = time.strftime(f'%Y_%m_%d_%H_%M_%S_steps_{step + 1}-{last}')
    options = jax.profiler.ProfileOptions()
    options.session_id = name
    # Stacks of Python would slow down the steps that are measured, and fill
    # the trace.
    options.python_tracer_level = 0
    try:
      jax.profiler.start_trace(
        self._directory, create_perfetto_trace=True, profiler_options=options
      )
    except Exception as e:  # Such as another trace.
      logging.warning('No trace of the steps from %d on: %s', step + 1, e)
      return
    self._path = self._directory / 'plugins' / 'profile' / name
    self._last = last
    self._is_busy = True
    logging.info('Tracing the steps %d to %d.', step + 1, last)

  def _stop(self) -> None:
    """Has the thread stop the trace once the newest step has run."""
    self._executor.put(
      functools.partial(self._write_behind, self._scalars, self._path)
    )
    self._scalars = self._last = None

  def _write_behind(self, scalars: Any, path: pathlib.Path) -> None:
    try:
      _wait(scalars)
      _write(path)
      self._say(
        f'Trace: {path}. To see it:'
        f'\n  tensorboard --logdir={self._run_directory}'
        ' (with `pip install xprof`), or open perfetto_trace.json.gz there'
        ' at https://ui.perfetto.dev'
      )
    except Exception as e:  # Such as a full disk.
      logging.warning('No trace was written to %s: %s', path, e)
    finally:
      self._is_busy = False


def _wait(scalars: Any) -> None:
  for x in jax.tree.leaves(scalars):
    # A later step may have been given its buffer, and is the sign then.
    if isinstance(x, jax.Array) and not x.is_deleted():
      with contextlib.suppress(RuntimeError):
        x.block_until_ready()


def _write(path: pathlib.Path) -> None:
  """Stops the trace, and writes it for TensorBoard and for Perfetto.

  Args:
    path: where JAX writes it.

  Raises:
    Exception: of the profiler or of the disk.
  """
  try:
    jax.profiler.stop_trace()
  except Exception:
    # JAX 0.10 would count as tracing for ever, and a part of a file is there.
    jax_profiler._profile_state.reset()
    shutil.rmtree(path, ignore_errors=True)
    raise
