"""Settings of the XLA compilers: flags, and profile-guided scheduling (PGLE).

`config.xla` is written to XLA_FLAGS, LIBTPU_INIT_ARGS and settings of JAX
before JAX starts. XLA ends the process if it does not know a flag; here a
separate process reads the flags first, so that a misspelled one is an error
like any other. docs/reference/accelerators.md says what to set, and when.

The Profile Guided Latency Estimator gives XLA's scheduler for GPUs the measured
durations of a program's instructions, so that it can overlap communication with
computation. JAX can measure and recompile in one run (automatic), or one run
saves a profile and the next one compiles with it (manual).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import importlib.util
import numbers
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from absl import logging
import jax
from jax.experimental import profiler
import jaxlib

from jaxline import disk
from jaxline import errors
from jaxline.metrics import periodic

# The first step whose profile is saved: the first compiles, and the next ones
# still fill the queues.
FIRST_PROFILED_STEP = 5

_GPU_SCHEDULER = 'xla_gpu_enable_latency_hiding_scheduler'
_TPU_SCHEDULER = 'xla_tpu_enable_latency_hiding_scheduler'
_PGLE_PROFILE = 'xla_gpu_pgle_profile_file_or_directory_path'
_COMMAND_BUFFER = 'xla_gpu_enable_command_buffer'

# A flag as XLA reads it: a name, and a value that may be quoted.
_FLAG = re.compile(
  r"""(?<!\S)--?(?P<name>[\w-]+)(=(?P<value>"(?:\\.|[^"\\])*"|'[^']*'|\S*))?(?=\s|$)"""
)
# The parts of XLA and of libtpu that read the flags: a fraction of a second.
_READ_XLA_FLAGS = """
from jaxlib import xla_client
xla_client.CompileOptions().executable_build_options.debug_options
"""
_READ_TPU_FLAGS = """
import sys
from jaxlib import xla_client
xla_client.load_pjrt_plugin_dynamically('tpu', sys.argv[1])
xla_client.initialize_pjrt_plugin('tpu')
"""
# What they print before they end the process.
_REFUSAL = re.compile(
  r"(?:Unknown (?:command line )?flag|Illegal value|Couldn't interpret).*"
)
_PROBE_SECS = 60.0

# Name of a flag -> its value as text, and the place that sets it.
_Flags = dict[str, tuple[str, str]]


def _flags(options: Mapping[str, Any]) -> dict[str, _Flags]:
  """Returns the flags of `config.xla` by environment variable.

  Raises:
    UsageError: a flag has two values, or cannot be one.
  """
  found: dict[str, _Flags] = {'XLA_FLAGS': {}, 'LIBTPU_INIT_ARGS': {}}

  def add(variable: str, name: str, value: Any, key: str) -> None:
    place = f'config.xla.{key}'
    text = str(value).lower() if isinstance(value, bool) else str(value)
    # XLA splits at white space, and libtpu knows no quotes.
    if not isinstance(value, str | numbers.Real) or re.search(
      r'[\s\'"]', name + text
    ):
      raise errors.UsageError(
        f'{place} sets {name!r} to {value!r}; expected True, False, a number or'
        ' text, and no white space and quotes.'
      )
    name = name.lstrip('-')
    first = found[variable].setdefault(name, (text, place))
    _check_same(f'The flag --{name}', first, (text, place))

  scheduler = options['latency_hiding_scheduler']
  if scheduler is not None:
    add('XLA_FLAGS', _GPU_SCHEDULER, scheduler, 'latency_hiding_scheduler')
    add(
      'LIBTPU_INIT_ARGS', _TPU_SCHEDULER, scheduler, 'latency_hiding_scheduler'
    )
  for key in ('pgle_profiling_runs', 'pgle_save', 'pgle_profile'):
    if options[key]:
      add('XLA_FLAGS', _GPU_SCHEDULER, True, key)
  if options['pgle_save']:
    # In command buffers (CUDA graphs) the profiler sees no instructions.
    add('XLA_FLAGS', _COMMAND_BUFFER, '', 'pgle_save')
  if options['pgle_profile']:
    # The program may go to another directory before it compiles.
    path = os.path.abspath(options['pgle_profile'])
    add('XLA_FLAGS', _PGLE_PROFILE, path, 'pgle_profile')
  for variable, key in (
    ('XLA_FLAGS', 'flags'),
    ('LIBTPU_INIT_ARGS', 'tpu_flags'),
  ):
    for name, value in options[key].items():
      add(variable, name, value, key)
  return found


def _check_same(what: str, a: tuple[Any, str], b: tuple[Any, str]) -> None:
  """Refuses two values, each given with its place, that are not the same."""
  words = {'true': '1', 'false': '0'}
  first, second = (str(value).lower() for value, _ in (a, b))
  if words.get(first, first) != words.get(second, second):
    raise errors.UsageError(
      f'{what} has two values: {a[0]!r} by {a[1]} and {b[0]!r} by {b[1]}. Take'
      ' one out.'
    )


def validate(options: Mapping[str, Any]) -> None:
  """Checks the flags of `config.xla` without looking at the machine.

  Args:
    options: the section of the config; each value is valid by itself.

  Raises:
    UsageError: a flag has two values, or one that XLA cannot read.
  """
  _flags(options)


def apply(options: Mapping[str, Any]) -> list[str]:
  """Sets the environment and JAX as `config.xla` says, before JAX starts.

  Flags are added to those that XLA_FLAGS and LIBTPU_INIT_ARGS have already.
  Where flags are added, they are tried in another process, for half a second.

  Args:
    options: the section, validated.

  Returns:
    Lines for the user that say what was set; none if nothing was.

  Raises:
    UsageError: a flag is unknown, its value is wrong or it has another value in
      the environment; `pgle_profile` is no profile; or JAX has started, and
      flags would have to be set.
  """
  if options['pgle_profile']:
    _check_profile(pathlib.Path(options['pgle_profile']))
  lines = []
  for variable, flags in _flags(options).items():
    before = os.environ.get(variable, '')
    missing = _missing(variable, before, flags)
    if not missing:
      continue
    after = ' '.join([before, *missing]).strip()
    unchecked = _try(variable, after)
    os.environ[variable] = after
    # Without libtpu the scheduler's flag does nothing, nor matters.
    if unchecked and variable != 'XLA_FLAGS' and not options['tpu_flags']:
      continue
    if unchecked:
      lines.append(f'{variable}: {unchecked}: they are not checked.')
    lines += [
      f'{variable}: {flag} ({place})' for flag, place in missing.items()
    ]
  return lines + _set_auto_pgle(options)


def _missing(variable: str, before: str, flags: _Flags) -> dict[str, str]:
  """Returns '--name=value' -> place of the flags that are still to be set."""
  given = {
    # A flag without a value is a switch that is on.
    m['name']: 'true' if m['value'] is None else m['value'].strip('\'"')
    for m in _FLAG.finditer(before)
  }
  environment = f'the environment variable {variable}'
  for name in flags.keys() & given.keys():
    _check_same(f'The flag --{name}', (given[name], environment), flags[name])
  missing = {
    f'--{name}={value}': place
    for name, (value, place) in flags.items()
    if name not in given
  }
  if missing and before.strip() and not before.strip().startswith('-'):
    raise errors.UsageError(
      f'{variable} is {before!r}, the name of a file with flags; no flags can'
      f' be added to it. Put them into {variable} itself.'
    )
  # There is no public way to ask.
  from jax._src import xla_bridge

  if missing and xla_bridge.backends_are_initialized():
    raise errors.UsageError(
      f'config.xla needs {" ".join(missing)} in {variable}, but JAX has started'
      ' and reads it no more. Call nothing of JAX that needs a device before'
      f' the run, or set {variable} in the shell.'
    )
  return missing


def _check_profile(path: pathlib.Path) -> None:
  """Refuses a file that XLA would silently treat as no profile."""
  if not path.exists():
    raise errors.UsageError(
      f'config.xla.pgle_profile is {str(path)!r}, which does not exist. Make it'
      f' with a run with config.xla.pgle_save={str(path)!r}.'
    )
  if not path.is_dir() and path.suffix not in ('.pb', '.pbtxt'):
    raise errors.UsageError(
      f'config.xla.pgle_profile is {str(path)!r}; expected a .pb or a .pbtxt'
      ' file, or a directory of them: XLA ignores any other.'
    )


def _set_auto_pgle(options: Mapping[str, Any]) -> list[str]:
  if not options['pgle_profiling_runs']:
    return []
  settings = {
    'jax_enable_pgle': True,
    'jax_pgle_profiling_runs': options['pgle_profiling_runs'],
    # Else programs with custom partitioning are other programs in each run.
    'jax_remove_custom_partitioning_ptr_from_cache_key': True,
  }
  if options['pgle_aggregation_percentile'] is not None:
    settings['jax_pgle_aggregation_percentile'] = options[
      'pgle_aggregation_percentile'
    ]
  for name, value in settings.items():
    given = os.environ.get(name.upper(), value)
    place = f'the environment variable {name.upper()}'
    _check_same(name, (given, place), (value, 'config.xla'))
  for name, value in settings.items():
    jax.config.update(name, value)
  return [f'JAX: {name}={value}' for name, value in settings.items()]


def _try(variable: str, text: str) -> str:
  """Refuses flags for which XLA or libtpu would end the process.

  Args:
    variable: XLA_FLAGS or LIBTPU_INIT_ARGS.
    text: its value.

  Returns:
    Why the flags could not be tried; '' if they are right.
  """
  environ = {variable: text}
  if variable == 'XLA_FLAGS':
    name = f'XLA (jaxlib {jaxlib.__version__})'
    others = 'flags of libtpu go into config.xla.tpu_flags'
    program = [_READ_XLA_FLAGS]
  else:
    name = 'libtpu'
    others = 'flags of XLA for CPUs and GPUs go into config.xla.flags'
    path = os.environ.get('TPU_LIBRARY_PATH', '')
    if not os.path.isfile(path):
      package = importlib.util.find_spec('libtpu')
      if package is None or package.origin is None:
        return 'libtpu is not installed here'
      path = str(pathlib.Path(package.origin).with_name('libtpu.so'))
    # It reads its flags and no more: it takes no chip, needs not be the only
    # one to use libtpu, and does not look for the machine's metadata.
    program = [_READ_TPU_FLAGS, path]
    environ |= {'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_SKIP_MDS_QUERY': '1'}
  try:
    done = subprocess.run(
      [sys.executable, '-c', *program],
      env=os.environ | environ,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      errors='replace',
      timeout=_PROBE_SECS,
    )
  except subprocess.TimeoutExpired:
    # Of many processes on one slow disk. No reason to stop all of them.
    return f'what reads them took more than {_PROBE_SECS:g} s'
  if done.returncode:
    lines = _REFUSAL.findall(done.stderr) or ['a value that it cannot read']
    raise errors.UsageError(
      f'{name} refuses the flags: {"; ".join(lines).rstrip(".")}.'
      f' {variable} would be {text!r}; {others}.'
    )
  return ''


def check_backend(options: Mapping[str, Any]) -> list[str]:
  """Warns of settings that have no effect on the devices that JAX found.

  Automatic PGLE is turned off without a GPU: it would measure nothing and
  compile everything twice.

  Args:
    options: the section, validated, after `apply`.

  Returns:
    The warnings, which are logged as well.

  Raises:
    UsageError: a profile shall be saved, and there is no GPU.
  """
  platform = jax.default_backend()
  cache = jax.config.values['jax_compilation_cache_dir']
  if not jax.config.values['jax_enable_compilation_cache']:
    cache = None
  warnings = []
  if platform != 'gpu':
    if options['pgle_save']:
      raise errors.UsageError(
        f'config.xla.pgle_save is {options["pgle_save"]!r}, but JAX runs on'
        f' {platform!r}, and only profiles of NVIDIA GPUs say how long'
        ' instructions take. Set it to None.'
      )
    if options['pgle_profiling_runs']:
      jax.config.update('jax_enable_pgle', False)
    warnings = [
      f'config.xla.{key} has no effect: JAX runs on {platform!r}, and PGLE is'
      ' for GPUs.'
      for key in ('pgle_profiling_runs', 'pgle_profile')
      if options[key]
    ]
  elif cache and options['pgle_profiling_runs']:
    warnings = [
      f'The compilation cache {cache} may hold programs that an earlier run'
      ' compiled with its own profile. They are used as they are and measured'
      ' no more, whatever config.xla.pgle_profiling_runs and'
      ' pgle_aggregation_percentile say. To measure anew, empty it.'
    ]
  elif cache and options['pgle_profile']:
    warnings = [
      f'The compilation cache {cache} knows config.xla.pgle_profile by its'
      ' name, not by what is in it. Give a new profile a new name, or empty the'
      ' cache.'
    ]
  return _logged(warnings)


def _logged(warnings: Iterable[str]) -> list[str]:
  warnings = list(warnings)
  for warning in warnings:
    logging.warning('%s', warning)
  return warnings


def actions(options: Mapping[str, Any]) -> list[ProfileSteps]:
  """Returns the periodic actions that `config.xla` asks for.

  Args:
    options: the section, validated, after `check_backend`.

  Returns:
    On the first process of a run that saves a profile: the action that does.
  """
  path, count = options['pgle_save'], options['pgle_save_steps']
  if path and jax.process_index() == 0:
    return [ProfileSteps(path, FIRST_PROFILED_STEP, count)]
  return []


class ProfileSteps(periodic.PeriodicAction):
  """Saves the profile of some steps, for `config.xla.pgle_profile`.

  The thread that trains starts the trace. A background thread waits for it,
  stops it and reads it, while training continues; one or two further steps in
  it do no harm, since durations are averaged. The file is complete or does not
  exist. An error is raised by the next step, or by `wait_to_finish`.
  """

  def __init__(self, path: str, first_step: int, num_steps: int):
    """Makes the action.

    Args:
      path: the file to write, a serialized ProfiledInstructionsProto of XLA.
      first_step: the first step to profile, counted from 1 at the first step of
        this process; at least 2.
      num_steps: how many steps to profile.
    """
    super().__init__(self._write_profile, 'steps', interval=None)
    self._path = pathlib.Path(path).absolute()
    self._before = first_step - 1
    self._last = self._before + num_steps
    self._calls = 0
    self._directory: tempfile.TemporaryDirectory | None = None

  def __call__(
    self, t: float, step: int, scalar_outputs: Mapping[str, Any] | None
  ) -> None:
    """Starts, or has stopped, the trace if it is time to.

    Raises:
      RuntimeError: another trace is running.
      BaseException: the error of saving the profile.
    """
    self._calls += 1
    super().__call__(t, step, scalar_outputs)
    if self._calls == self._before:
      self._start()

  def _is_due(self, t: float, step: int) -> bool:
    return self._calls == self._last

  def wait_to_finish(self) -> None:
    """Waits until the profile is saved; warns where the run ended before.

    Raises:
      BaseException: the error of saving the profile.
    """
    if self._calls < self._last:
      logging.warning(
        'No profile was saved to %s: this run ended after %d steps, and the'
        ' profile is of the steps from %d to %d.',
        self._path,
        self._calls,
        self._before + 1,
        self._last,
      )
      self._calls = self._last
      if self._directory is not None:
        with self._directory:
          jax.profiler.stop_trace()
    super().wait_to_finish()

  def _start(self) -> None:
    directory = tempfile.TemporaryDirectory(prefix='jaxline_pgle_')
    options = jax.profiler.ProfileOptions()
    # The programs, to whose instructions the durations belong; no stacks of
    # Python, which would slow down the steps that are measured.
    options.enable_hlo_proto = True
    options.python_tracer_level = 0
    try:
      jax.profiler.start_trace(directory.name, profiler_options=options)
    except BaseException:
      directory.cleanup()
      raise
    self._directory = directory  # Only now the trace is this one's to stop.
    logging.info(
      'Profiling %d steps for %s.', self._last - self._before, self._path
    )

  def _write_profile(self, step: int, scalars: dict[str, Any]) -> None:
    """Stops the trace and writes the profile; on the background thread.

    It gets the last step's scalars on the host, so that step has run.
    """
    del scalars
    assert self._directory is not None
    with self._directory as directory:
      jax.profiler.stop_trace()
      (trace,) = pathlib.Path(directory).glob('plugins/profile/*/')
      profile = profiler.get_profiled_instructions_proto(os.fspath(trace))
    if not profile:
      raise RuntimeError(
        f'There is no GPU in the profile of the steps up to {step}, so nothing'
        f' was written to {self._path}. JAX runs on'
        f" {jax.default_backend()!r}; a GPU other than NVIDIA's, or another"
        ' profiler beside this one (Nsight Systems), gives no durations.'
      )
    self._path.parent.mkdir(parents=True, exist_ok=True)
    partial = self._path.with_name(f'{self._path.name}.{os.getpid()}.partial')
    with disk.replacing(self._path, partial) as file:
      file.write(profile)
    logging.info(
      'Wrote the profile of %d bytes; the next run compiles with it by'
      ' --config.xla.pgle_profile=%s',
      len(profile),
      self._path,
    )
