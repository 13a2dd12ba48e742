"""Prints a run's progress: the start block, lines of numbers, the summary.

A `Console` has three modes:

  live   a line at the bottom of the terminal, drawn again each second
  plain  a line at each interval, for a pipe, a file or a notebook
  off    a line at each interval in the log of absl, and nothing else

In the first two the numbers of training are means over at most 100 steps. What
is written to TensorBoard and JSON lines is exact.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
import contextlib
import errno
import math
import os
import sys
import time
from typing import Any

from absl import logging
import jax

from jaxline import debug
from jaxline import goodput
from jaxline.metrics import lines
from jaxline.metrics import live as live_lib
from jaxline.metrics import periodic
from jaxline.metrics import summary
from jaxline.metrics import writers
from jaxline.supervision import preemption

Origin = summary.Origin
MODES = ('live', 'plain', 'off')
# The most steps that a mean is over.
_MAX_STEPS = 100
_WIDTH = 120  # Of a plain line.
_LIVE_SECS = 1.0  # How often the live line gets new numbers.
_AFTER_LIVE_SECS = 10.0
# How often to say that an evaluation waits, and after how long first.
_WAIT_SECS = 60.0
_FIRST_WAIT_SECS = 5.0
# Errors of a stream that nobody reads any more.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)
# Scalars with a place and a form of their own; '' is not shown.
_FORMS = {
  'steps_per_sec': '{:.4g} steps/s',
  'tokens_per_sec': '{:,.0f} tokens/s',
  'examples_per_sec': '{:,.0f} examples/s',
  'mfu': 'mfu {:.1%}',
  'input_wait_fraction': 'input wait {:.1%}',
  'device_memory_gib': 'memory {:.1f} GiB',
  'tflops_per_sec': '{:.3g} TFLOP/s',
  'tokens_per_step': '',
  'examples_per_step': '',
}


class Console(periodic.Action):
  """What one run says; any thread may call it.

  As an action it notices the end of the first step, and costs 40 ns after it.

  Attributes:
    mode: one of `MODES`.
    activity: what the run does now instead of steps; '' for steps.
    log_action: the action that calls `log_training`.
    stopped: why the run ended before its last step; '' if it did not.
  """

  def __init__(
    self,
    mode: str = 'off',
    origin: Origin | None = None,
    *,
    is_silent: bool = False,
  ):
    """Says nothing yet.

    Args:
      mode: one of `MODES`.
      origin: how the run was started, for the two blocks.
      is_silent: says nothing at all, as a process that is not the first one.
    """
    self.mode = mode
    self.activity = ''
    self.log_action: Any = None
    self.stopped = ''
    self._is_silent = is_silent
    self._is_shown = mode != 'off'
    self._origin = origin or Origin()
    self._config: Any = None  # Until the run begins.
    self._experiment: Any = None
    self._state: Any = None
    self._first_step = 0
    self._checkpointer: Any = None
    # For the last block.
    self._began = time.monotonic()
    self._spent = goodput.spent()
    self._num_evaluated = 0
    self._best: tuple[str, float, int | None] | None = None
    self._waiting: tuple[Any, float] = (None, math.inf)
    # For the progress of training.
    self._window: collections.deque[dict[str, Any]] = collections.deque(
      maxlen=_MAX_STEPS
    )
    self._means: dict[str, Any] = {}
    self._rate = 0.0
    self._shown_save: int | None = None
    self._compiling: tuple[float, tuple[int, float, int]] | None = None
    self._live: live_lib.Live | None = None
    self._next_line = 0.0

  @classmethod
  def make(cls, config: Any, origin: Origin | None = None) -> Console:
    """Returns the console of a run, as `config.console` says."""
    if jax.process_index():
      return cls('off', origin, is_silent=not config.log_all_hosts)
    mode = config.console or 'live'
    if mode == 'live' and not live_lib.is_terminal(sys.stdout):
      mode = 'plain'
    return cls(mode, origin)

  def say(self, text: str) -> None:
    """Prints lines above the live one; in the mode off, logs them."""
    if self._is_silent:
      return
    if not self._is_shown:
      logging.info('%s', text)
      return
    stream = sys.stdout
    encoding = getattr(stream, 'encoding', None) or 'utf-8'
    try:
      stream.write(text.encode(encoding, 'replace').decode(encoding) + '\n')
      stream.flush()
    except (OSError, ValueError, AttributeError) as e:
      if isinstance(e, OSError) and e.errno not in _GONE:
        return  # Such as a full disk, which may pass: this line is lost.
      # The terminal or the pipe is gone, and the run goes on. Python's last
      # flush of the stream must not fail either.
      with contextlib.suppress(OSError, ValueError, AttributeError):
        with open(os.devnull, 'w') as nowhere:
          os.dup2(nowhere.fileno(), stream.fileno())

  # Both ends.

  def begin(
    self,
    config: Any,
    experiment: Any,
    state: Any = None,
    checkpointer: Any = None,
  ) -> None:
    """Prints the block before the first step or evaluation, once.

    Args:
      config: the run's.
      experiment: the one that is trained, or else evaluated.
      state: the live state of training; None if the run only evaluates.
      checkpointer: has restored the state, if it has any checkpoint.
    """
    if not self._is_shown or self._config is not None:
      return
    start = ''
    if state is not None:
      step, self._checkpointer = int(state.global_step), checkpointer
      self._first_step = step
      self._shown_save = self._saved
      of = f' of {config.training_steps}' if config.training_steps else ''
      source = 'a fresh run'
      if self._saved is not None:
        source = 'resumed'
      elif config.restore_from:
        source = f'from {config.restore_from}'
      elif step:
        source = 'from a snapshot of the program'
      start = f'step {step}{of}, {source}'
    block = summary.start_block(config, experiment, self._origin, start)
    self.say('\n'.join(block))
    self._config, self._experiment, self._state = config, experiment, state

  @property
  def tells_how_to_go_on(self) -> bool:
    """Whether the last block will have the command that does."""
    return self._saved is not None and bool(self._origin.command)

  def __enter__(self) -> Console:
    return self

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
    """Ends the live line, and prints the last block if the run has begun."""
    self._end_live()
    if self._config is not None:
      self.say('\n'.join(self._last_block(error)))
    self._config = self._experiment = self._state = None  # And its weights.
    self._checkpointer = None

  def _last_block(self, error: BaseException | None) -> list[str]:
    total = time.monotonic() - self._began
    is_over: bool | None = error is None
    if self._state is None:
      is_over = None
      plural = 's' * (self._num_evaluated != 1)
      done = f'Evaluated {self._num_evaluated} checkpoint{plural}'
    else:
      step, how = int(self._state.global_step), 'Trained to'
      if isinstance(error, preemption.Preempted):
        is_over = error.is_over
        if self._experiment.should_run_step(step, self._config):
          how = 'Stopped at'
      elif error is not None:
        how = 'Failed at'
      elif self.stopped:
        how = 'Stopped at'
      if is_over and step == self._first_step:
        how = 'Nothing was left to train at'
      done = f'{how} {self._step_text(step)}'
    block = [f'{done} in {lines.duration(total)}.']
    if self.stopped:
      block.append(f'Reason: {self.stopped}')
    if self._best is not None:
      name, value, at = self._best
      when = 'before this start' if at is None else f'at step {at}'
      block.append(f'Best {name}: {lines.shorten(value)} {when}.')
    if self._window:  # Of the steps after the last line.
      self._means = lines.means_of(list(self._window))
    if 'loss' in self._means:
      loss = lines.shorten(self._means['loss'])
      block.append(
        f'Last loss: {loss}, the mean of at most {_MAX_STEPS} steps.'
      )
    now = goodput.spent()
    return block + summary.end_block(
      self._config,
      self._experiment,
      self._origin,
      {name: secs - self._spent[name] for name, secs in now.items()},
      total,
      None if self.stopped else is_over,
      has_checkpoint=self._state is None or self._saved is not None,
    )

  # Training.

  def options(self, config: Any) -> dict[str, Any]:
    """Returns arguments of the `PeriodicAction` that calls `log_training`."""
    interval = None if self._is_silent else config.log_tensors_interval
    options = {
      'fn': self.log_training,
      'interval': interval,
      'run_async': config.log_async,
    }
    if self._is_shown:
      options['keep_last'] = _MAX_STEPS
      if interval is not None and interval >= 0:
        options['end_step_to_action'] = config.training_steps
        if self.mode == 'live':
          options |= {
            'interval': _LIVE_SECS,
            'interval_type': 'secs',
            'logging_growth_ratios': None,
          }
    return options

  @contextlib.contextmanager
  def training(self) -> Iterator[None]:
    """Shows the progress of the training steps inside."""
    if self._is_shown and self._experiment.should_run_step(
      self._state.global_step, self._config
    ):
      self._compiling = time.monotonic(), goodput.compilations()
      self.activity = 'compiling the train step'
      self.say('Compiling the train step...')
      if self.mode == 'live':
        self._live = live_lib.Live(self._draw)
        self._live.start()
    try:
      yield
    finally:
      # Its function refers to the experiment: the weights would stay.
      self._compiling = self.log_action = None
      self._end_live()

  def _end_live(self) -> None:
    if self._live is not None:
      self._live.stop()
      self._live = None

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    """Says how long it took to compile, after the first step."""
    if self._compiling is None:
      return
    (began, before), self._compiling = self._compiling, None
    self.activity = ''
    # The rate begins after the compilation.
    self.log_action.update_time(t, step)
    count, secs, hits = (
      b - a for a, b in zip(before, goodput.compilations(), strict=True)
    )
    text = f'The first step took {time.monotonic() - began:.1f} s.'
    if count and not debug.settings.disable_pmap_jit:
      text = f'Compiled in {secs:.1f} s'
      if (
        jax.config.values['jax_compilation_cache_dir'] is not None
        and jax.config.values['jax_enable_compilation_cache']
      ):
        text += f'; {hits or "none"} of {count} programs were in the cache'
      text += '.'
    self.say(text)

  def log_training(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Takes the scalars of a step, and shows them if they are due.

    Args:
      step: the step.
      scalars: on the host. Those of the last step before a line has
        `steps_per_sec`.
    """
    # None was donated before it was fetched.
    given = {name: x for name, x in scalars.items() if x is not None}
    numbers = writers.to_scalars(given)
    if not self._is_shown:
      self.say(' | '.join([f'step {step}', *lines.shown(numbers)]))
      return
    self._window.append(numbers)
    rate = numbers.get('steps_per_sec')
    if rate is None:
      return
    # Rates are of the interval already.
    own = {name: numbers[name] for name in _FORMS if name in numbers}
    self._means = lines.means_of(list(self._window)) | own
    self._rate = 0.7 * self._rate + 0.3 * rate if self._rate else rate
    if self._live is None:
      if self.mode == 'plain':
        self._window.clear()
        self.say(self._plain_line(step))
    elif not self._live.is_on and time.monotonic() > self._next_line:
      # A debugger has ended the live line, which has a shorter interval.
      self._next_line = time.monotonic() + _AFTER_LIVE_SECS
      self.say(self._plain_line(step))

  def _plain_line(self, step: int) -> str:
    before, self._shown_save = self._shown_save, self._saved
    is_new = self._shown_save != before
    notes = [f'saved {self._shown_save}'] if is_new else []
    notes = [*self._eta(step), *notes]
    return self._line(self._step_text(step), notes, _WIDTH)

  def _line(self, head: str, notes: list[str], width: int) -> str:
    fields, rates = self._fields()
    parts = [(0, x) for x in [head, *fields[:1]]]
    parts += [(2, x) for x in fields[1:]]
    parts += [(1, x) for x in [*rates[:1], *notes]]
    parts += [(3, x) for x in rates[1:]]
    return lines.fit(parts, width)

  def _fields(self) -> tuple[list[str], list[str]]:
    """Returns the scalars of training, the loss first; and the rates."""
    means = self._means
    names = sorted(means, key='loss'.__ne__)
    own = {name: means[name] for name in names if name not in _FORMS}
    rates = [
      form.format(means[name])
      for name, form in _FORMS.items()
      if form and means.get(name)  # A rate is 0 before it is known.
    ]
    return lines.shown(own), rates

  def _step_text(self, step: int) -> str:
    steps = self._config.training_steps
    of = f' of {steps} ({100 * step / steps:.0f}%)' if steps else ''
    return f'step {step}{of}'

  def _eta(self, step: int) -> list[str]:
    steps = self._config.training_steps
    if not steps or not self._rate or step >= steps:
      return []
    return [f'ETA {lines.duration((steps - step) / self._rate)}']

  @property
  def _saved(self) -> int | None:
    """The step of the last complete checkpoint; None if there is none."""
    return self._checkpointer and self._checkpointer.saved_step

  # Evaluation.

  def evaluating(self, step: int) -> None:
    """Notes that the evaluation of a step begins."""
    self.activity = f'evaluating step {step}'

  def log_evaluation(
    self, step: int, scalars: Mapping[str, Any], log: str = 'eval'
  ) -> None:
    """Shows what `evaluate` returned for a step, as of the log `log`."""
    self.activity = ''
    self._num_evaluated += 1
    fields = lines.shown(writers.to_scalars(scalars))
    line = [f'{log} step {step}', *fields]
    if self._is_shown:
      self.say(lines.fit(list(enumerate(line)), _WIDTH))
    else:
      self.say(' | '.join(line))

  def log_best(self, name: str, value: float, step: int | None = None) -> None:
    """Notes the best evaluation so far.

    Args:
      name: of the metric.
      value: of the metric.
      step: of the evaluation; None if it was before this start.
    """
    before, self._best = self._best, (name, value, step)
    if step is not None:
      was = f' (was {lines.shorten(before[1])})' if before else ''
      self.say(f'New best {name}: {lines.shorten(value)} at step {step}{was}.')

  def log_waiting(self, last: int | None, directory: str) -> None:
    """Says now and then that an evaluation waits for a checkpoint."""
    if self._state is not None:
      return  # The training in this process says how far it is.
    now = time.monotonic()
    waiting, due = self._waiting
    if waiting != (last, directory):
      self._waiting = (last, directory), now + _FIRST_WAIT_SECS
    elif now >= due:
      self._waiting = waiting, now + _WAIT_SECS
      after = '' if last is None else f' after step {last}'
      self.say(f'Waiting for a checkpoint{after} in {directory}.')

  def show_texts(self, writer: Any, mode: str) -> None:
    """Also prints the texts of a log, if its writer can have another beside it.

    Args:
      writer: the writer of the log.
      mode: the log.
    """
    if self._is_shown and isinstance(writer, writers.MetricWriter):
      writer.add(_TextWriter(self, mode))

  def _draw(self, width: int) -> str:
    """Returns the line at the bottom of the terminal."""
    step = int(self._state.global_step)
    head, notes = self._step_text(step), self._eta(step)
    if self.activity:
      head, notes = f'{head}, {self.activity}', []
    if self._saved is not None:
      notes.append(f'saved {self._saved}')
    return self._line(head, notes, width - 1)


class _TextWriter(writers.Backend):
  """Prints the texts that an experiment writes."""

  kinds = ('texts',)

  def __init__(self, console: Console, mode: str):
    self._console, self._mode = console, mode

  def write(self, records: list[writers.Record]) -> None:
    for record in records:
      for name, text in record.values.items():
        if name != 'config':  # Of the run; a file has it.
          self._print(record.step, name, text)

  def _print(self, step: int, name: str, text: str) -> None:
    # A model may write what a terminal takes for commands.
    clean = ''.join(
      x if x.isprintable() or x == '\n' else ' ' if x == '\t' else '\ufffd'
      for x in text
    )
    head = f'{self._mode} step {step} | {name}:'
    self._console.say('\n  '.join([head, *clean.split('\n')]))
