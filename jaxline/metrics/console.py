"""Prints a run's progress: the start block, lines of numbers, the summary.

On a terminal it redraws one line. A pipe, a file or a notebook gets a line per
interval. The training numbers are means over at most 100 steps.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import itertools
import logging as std_logging
import os
import pathlib
import shlex
import shutil
import sys
import textwrap
import time
import types
from typing import Any, NamedTuple

from absl import logging
import jax

from jaxline.base import goodput
from jaxline.metrics import lines
from jaxline.metrics import live
from jaxline.metrics import periodic
from jaxline.metrics import scalars as scalars_lib
from jaxline.metrics import writers

_MAX_STEPS = 100  # Means are taken over at most this many steps.
_WIDTH = 80  # The width of the start block and the summary.
_PIPE_WIDTH = 120  # The width of a line that does not go to a terminal.
_LIVE_SECS = 1.0  # The live line gets new numbers at this interval.

_LIBRARIES = tuple(
  f'{pathlib.Path(file).parent}{os.sep}'
  for file in (pathlib.Path(__file__).parent, jax.__file__)
)
_HEARD = ('console.py', 'token_cache.py', 'xla.py')  # These log long waits.


def is_shown(record: std_logging.LogRecord) -> bool:
  """Filters out most infos of this library and JAX, unless --verbosity=1."""
  return (
    record.levelno != std_logging.INFO
    or not record.pathname.startswith(_LIBRARIES)
    or record.filename in _HEARD
    or logging.get_verbosity() >= logging.DEBUG
  )


class Origin(NamedTuple):
  """How a run was started."""

  command: tuple[str, ...] = ()  # Empty for a call from Python.
  config_file: str = ''  # The value of --config.
  # The user's values of dotted config keys.
  overrides: Mapping[str, Any] = types.MappingProxyType({})
  is_point: bool = False  # Whether the run is a point of a sweep.

  @classmethod
  def of(cls, flag: Any) -> Origin:
    """Returns how this process was started; `flag` is the flag --config."""
    given = (flag.config_filename, flag.override_values) if flag.present else ()
    return cls(('python', *sys.orig_argv[1:]), *given)


class Console(contextlib.AbstractContextManager):
  """Prints the progress of a run. Any thread may call it.

  Mode 'live' redraws a line, 'plain' prints lines, 'off' logs them with absl,
  and 'silent' does nothing.
  """

  def __init__(self, mode: str = 'off', origin: Origin | None = None):
    self.mode = mode
    self.stopped = ''  # The experiment's reason to stop the run early.
    self._origin = origin or Origin()
    self._began, self._spent = time.monotonic(), goodput.seconds_by_category()
    self._config: Any = None  # `begin` sets this and the next three.
    self._experiment: Any = None
    self._state: Any = None
    self._saved_step: Callable[[], int | None] = lambda: None
    self._activity = ''  # The run's activity while it trains no steps.
    self._compiled_before: float | None = None
    self._earlier: list[dict[str, Any]] = []  # The numbers of earlier steps.
    self._texts: list[str] = []  # The scalars of the newest step, or means.
    self._num_averaged = 0  # The number of steps that `_texts` averages.
    self._num_first = 2  # The number of `_texts` to print before 'saved ...'.
    self._rate = 0.0  # Smoothed steps per second, for the ETA.
    self._waits_after: Any = ''
    self._num_evaluated = 0
    self._best = ''

  @classmethod
  def make(cls, config: Any, origin: Origin | None = None) -> Console:
    """Returns the console of a run, in the mode of `config.console`."""
    if jax.process_index():
      return cls('off' if config.log_all_hosts else 'silent')
    mode = config.console or 'live'
    if mode == 'live' and not live.is_terminal(sys.stdout):
      mode = 'plain'
    return cls(mode, origin)

  def print(self, text: str) -> None:
    """Prints text above the live line; logs it in the mode 'off'."""
    if self.mode == 'off':
      logging.info('%s', lines.escaped(text))
    elif self.mode != 'silent':
      lines.print_text(text)

  def begin(
    self,
    config: Any,
    experiment: Any,
    state: Any = None,
    saved_step: Callable[[], int | None] = lambda: None,
  ) -> None:
    """Prints the start block. Without a state, the run only evaluates.

    `saved_step` returns the step of the last complete checkpoint, or None.
    """
    self._config, self._experiment, self._state = config, experiment, state
    self._saved_step, start = saved_step, ''
    if state is not None:
      step = int(state.global_step)
      source = 'resumed' if step else 'a fresh run'
      if step and self._is_over(step):
        source = 'resumed, nothing left to train'
      if config.restore_from and self._saved_step() is None:
        source = f'from {config.restore_from}'
      start = f'{self._step_text(step).partition(" (")[0]}, {source}'
    kind, directory = experiment.__class__, _relative(config.checkpoint_dir)
    has_events = directory and 'tensorboard' in config.writers
    events = f'tensorboard --logdir {shlex.quote(directory)}'
    overrides = [f'{k}={x}' for k, x in self._origin.overrides.items()]
    devices = f'{jax.device_count()} x {jax.devices()[0].device_kind}'
    processes = jax.process_count()
    values = {
      'Experiment': config.experiment_class
      or f'{kind.__module__}:{kind.__qualname__}',
      'Config': ', '.join(filter(None, [self._origin.config_file, *overrides])),
      'Devices': devices + f' in {processes} processes' * (processes > 1),
      **experiment.summary(),
      'Run directory': directory,
      'TensorBoard': events if has_events else '',
      'Start': start,
    }
    wrapper = textwrap.TextWrapper(_WIDTH, subsequent_indent=' ' * 15)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    wrapper.max_lines, wrapper.placeholder = 5, ' ... (see config.json)'
    shown = [f'{f"{k}:":15}{text}' for k, text in values.items() if text]
    self.print('\n'.join(map(wrapper.fill, shown)))

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
    """Prints the summary, if the run has started, and releases the weights."""
    if self._config is not None:
      self.print('\n'.join(self._summary(error)))
    self._config = self._experiment = self._state = None
    self._saved_step = lambda: None

  def _is_over(self, step: int) -> bool:
    should_run_step = self._experiment.should_run_step
    return bool(self.stopped) or not should_run_step(step, self._config)

  def _summary(self, error: BaseException | None) -> list[str]:
    config, secs = self._config, time.monotonic() - self._began
    if self._state is None:
      done = f'Evaluated {self._num_evaluated} checkpoint(s)'
    else:
      step, how = int(self._state.global_step), 'Trained to'
      if error is not None and not isinstance(error, SystemExit):
        how = 'Failed at'
      elif self.stopped or not self._is_over(step):
        how = 'Stopped at'
      done = f'{how} {self._step_text(step)}'
    block = [f'{done} in {lines.duration(secs)}.']
    if self.stopped:
      block.append(f'Reason: {self.stopped}')
    if self._best:
      block.append(f'Best {self._best}.')
    if self._texts and self._texts[0].startswith('loss '):
      count, loss = self._num_averaged, self._texts[0].split()[1]
      steps = f'{count} steps' if count > 1 else 'step'
      block.append(f'Mean loss over the last {steps}: {loss}.')
    spent = [
      (x - self._spent[k], k) for k, x in goodput.seconds_by_category().items()
    ]
    percents = [(round(100 * x / secs), k) for x, k in sorted(spent)[::-1]]
    times = ', '.join(f'{k} {percent}%' for percent, k in percents if percent)
    block += textwrap.wrap(f'Time: {times}.', _WIDTH)
    if not config.checkpoint_dir:
      return block
    directory, commands = _relative(config.checkpoint_dir), {}
    is_saved = self._state is None or self._saved_step() is not None
    if is_saved and not self._origin.is_point:
      commands = self._next_commands(error)
    commands['Results'] = f'python -m jaxline.runs compare {directory}'
    block.append(f'Run directory: {directory}')
    return block + [f'{f"{k}:":10}{x}' for k, x in commands.items() if x]

  def _next_commands(self, error: BaseException | None) -> dict[str, str]:
    """Returns the commands to continue and to use the weights, by label."""
    config, command = self._config, self._origin.command
    directory = _relative(config.checkpoint_dir)
    changes: dict[str, Any] = {}
    is_over = error is None or getattr(error, 'is_over', False)
    if is_over and config.training_steps:
      # A schedule of the experiment may depend on the number of steps.
      changes = {'training_steps': 2 * config.training_steps}
      changes['on_config_change'] = 'continue'
    label, mode = 'Evaluate', 'eval --config.one_off_evaluate'
    if not command:
      changes = {'checkpoint_dir': directory, **changes}
      name = self._experiment.__class__.__name__
      argument = '' if config.experiment_class else f', experiment_class={name}'
      go_on = f'jaxline.fit(..., overrides={changes})'
      look = f'jaxline.evaluate({directory!r}{argument})'
    else:
      program, modes = ['the', 'same', 'command', 'with'], list[str]()
      run = f'--config.checkpoint_dir={directory}'
      flags = {arg.partition('=')[0].lstrip('-') for arg in command}
      # A process does not know the command of its launcher.
      if jax.process_count() == 1:
        program = [*itertools.takewhile(lambda x: x[:2] != '--', command)]
        if flags & {'config', 'jaxline_run'}:
          modes = [x for x in command if x.startswith('--jaxline_mode=')]
          run = f'--jaxline_run={directory}'
        else:  # The program makes the config from its own flags.
          anew = [f'--config.{key}' for key in ('checkpoint_dir', *changes)]
          is_new = False
          for arg in command[len(program) :]:
            if arg[:2] == '--':  # A flag's value may be the next word.
              is_new = arg.partition('=')[0] in anew
            program += [arg] * (not is_new)
      others = [f'--config.{key}={x}' for key, x in changes.items()]
      go_on = shlex.join([*program, *modes, run, *others])
      if self._experiment.overrides('decode'):
        label, mode = 'Decode', 'decode'
      look = f'{shlex.join([*program, run])} --jaxline_mode={mode}'
    has_more = self._state is not None and not self.stopped
    has_more &= not is_over or bool(config.training_steps)
    return {'Continue': go_on if has_more else '', label: look}

  @contextlib.contextmanager
  def training(self) -> Iterator[None]:
    """Shows the progress of the training steps inside the context."""
    state, line = self._state, None
    if self._experiment.should_run_step(state.global_step, self._config):
      self.print('Compiling the train step...')
      goodput.listen()
      self._compiled_before = goodput.compiled_secs()
      if self.mode == 'live':
        line = live.LiveLine(
          lambda width: self._progress(int(state.global_step), width)
        )
    try:
      yield
    finally:
      self._compiled_before = None
      if line:
        line.stop()

  def report_compilation(self) -> bool:
    """Prints the first compilation's time, once; returns whether it did."""
    if self._compiled_before is None:
      return False
    secs = goodput.compiled_secs() - self._compiled_before
    self._compiled_before, self._activity = None, ''
    self.print(f'Compiled in {secs:.1f} s.')
    return True

  def log_training(self, step: int, numbers: dict[int, Any]) -> None:
    """Takes the numbers of new steps, by step; prints the line that is due."""
    recent, earlier = [*numbers.values()], self._earlier
    rate, self._earlier = recent[-1].get('steps_per_sec'), recent
    if self.mode == 'live':  # One second may have too few steps for a mean.
      self._earlier = [*earlier, *recent][-2 * _MAX_STEPS :]
      middle = len(self._earlier) // 2
      earlier, recent = self._earlier[:middle], self._earlier[middle:]
    first = ['loss', 'steps_per_sec']
    if recent[-1].get('input_wait_fraction', 0) > 0.2:  # The input is slow.
      first.append('input_wait_fraction')
    self._texts = lines.describe(recent, earlier, first)
    self._num_first, self._num_averaged = len(first), len(recent)
    if rate is not None:  # It is None for the steps after the last line.
      self._rate = 0.7 * self._rate + 0.3 * rate if self._rate else rate
      if self.mode != 'live':
        self.print(self._progress(step, self._width))

  def _progress(self, step: int, width: int) -> str:
    steps, eta, saved = self._config.training_steps, '', ''
    activity = self._activity if self.mode == 'live' else ''
    if steps and self._rate and step < steps and not activity:
      eta = f'ETA {lines.duration((steps - step) / self._rate)}'
    if self._saved_step() is not None:
      saved = f'saved {self._saved_step()}'
    head = self._step_text(step) + activity
    texts = self._texts[: self._num_first], self._texts[self._num_first :]
    return lines.fit([head, eta, *texts[0], saved, *texts[1]], width)

  def _step_text(self, step: int) -> str:
    steps = self._config.training_steps
    of = f' of {steps} ({100 * step / steps:.0f}%)' if steps else ''
    return f'step {step}{of}'

  @property
  def _width(self) -> int:
    columns = shutil.get_terminal_size((_PIPE_WIDTH, 0)).columns
    return sys.maxsize if self.mode == 'off' else columns

  def evaluating(self, step: int) -> None:
    """Notes that the evaluation of a step starts."""
    self._activity = f', evaluating step {step}'

  def log_evaluation(
    self, step: int, scalars: Mapping[str, Any], log: str = 'eval'
  ) -> None:
    """Prints the scalars that `evaluate` returned for a step."""
    self._activity = ''
    self._num_evaluated += 1
    best = getattr(self._config, 'best_model_eval_metric', '')
    texts = lines.describe([writers.to_scalars(scalars)], first=[best, 'loss'])
    self.print(lines.fit([f'{log} step {step}', *texts], self._width))

  def log_best(self, name: str, value: float, step: int | None = None) -> None:
    """Notes the best value so far. Without a step, an earlier start had it."""
    when = 'before this start' if step is None else f'at step {step}'
    self._best = f'{name}: {lines.shorten(value)} {when}'
    if step is not None:
      self.print(f'New best {self._best}.')

  def log_waiting(self, last: int | None, directory: str | None) -> None:
    """Reports that an evaluation waits for the checkpoint after a step."""
    # If this process trains, it reports its progress instead.
    if self._state is None and self._waits_after != last:
      self._waits_after = last
      after = '' if last is None else f' after step {last}'
      where = _relative(directory) or 'memory'
      self.print(f'Waiting for a checkpoint{after} in {where}.')

  def show(self, writer: writers.MetricWriter, log: str) -> None:
    """Prints the texts that are written to a log."""

    def write_texts(step: int, texts: Mapping[str, str]) -> None:
      for name, text in texts.items():
        if name != 'config':  # config.json has the config.
          shown = textwrap.indent(text.expandtabs(), '  ')
          self.print(f'{log} step {step} | {name}:\n{shown}')

    if self.mode != 'silent':
      writer.add(types.SimpleNamespace(write_texts=write_texts))


class ConsoleHook(periodic.PeriodicAction):
  """Collects the scalars of the newest steps and shows them when due.

  With `config.log_async`, the thread of `log` fetches them. `finish` is as in
  `MetricWriter.put`.
  """

  def __init__(
    self, console: Console, config: Any, log: writers.MetricWriter, finish: Any
  ):
    every = config.log_tensors_interval
    growth = config.periodic_action_growth_ratios
    is_on = every is not None and every >= 0 and console.mode != 'silent'
    kind = config.logging_interval_type or config.interval_type
    if console.mode == 'live':
      kind, every, growth = 'secs', _LIVE_SECS, None
    super().__init__(
      console.log_training,
      kind,
      every if is_on else None,
      run_async=config.log_async,
      logging_growth_ratios=growth,
      end_step_to_action=config.training_steps if is_on else None,
      # Keeping arrays slows the next steps by some microseconds.
      log_all_data=console.mode != 'off',
    )
    self.share(log.executor)
    self._console, self._finish = console, finish
    self._kept = collections.deque[Any](maxlen=_MAX_STEPS)
    self._large: list[str] = []

  def _is_due(self, t: float, step: int) -> bool:
    if self._console.report_compilation():
      self.update_time(t, step)  # Exclude compilation from the rate.
    return super()._is_due(t, step)

  def _act(self, step: int, scalars: Any, is_due: bool) -> None:
    others = scalars_lib.others_of(scalars)  # The packed scalars are small.
    if not self._kept:  # Doing this in each step would take microseconds.
      sizes = ((name, getattr(x, 'size', 1)) for name, x in others.items())
      self._large = [name for name, size in sizes if size != 1]
    for name in self._large:  # They would fill the memory of the devices.
      others.pop(name, None)
    self._kept.append((step, scalars))
    if is_due:
      self._show_kept()

  def _show_kept(self) -> None:
    steps = dict(self._kept)
    self._kept.clear()
    if steps:
      super()._act(max(steps), steps, True)

  def _convert(self, steps: dict[int, Any]) -> dict[int, Any]:
    to_scalars = writers.to_scalars
    return {k: self._finish(to_scalars(x)) for k, x in steps.items()}

  def wait_to_finish(self) -> None:
    """Shows the collected scalars."""
    self._show_kept()
    super().wait_to_finish()


def _relative(directory: str | None) -> str:
  return (directory or '').removeprefix(f'{pathlib.Path.cwd()}{os.sep}')
