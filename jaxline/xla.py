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

from collections.abc import Callable, Iterable, Mapping
import importlib.util
import itertools
import mmap
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
# What may be one, among all that is in a library. Patterns that begin with
# letters are found in it twenty times faster than one with alternatives.
_WORDS = tuple(
  re.compile(start + rb'[a-z0-9_]{3,80}') for start in (b'xla_', b'megascale_')
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
_PROBE_SECS = 60.0
# How many names an error offers, and how many near ones are tried for that.
_NUM_NAMES = 3
_NUM_TRIED = 8


class _Flags:
  """The flags for one environment variable, each with the place it is from."""

  def __init__(self, variable: str, before: str):
    """Begins with the flags that the variable has already.

    Args:
      variable: its name.
      before: its text.
    """
    self.variable = variable
    self._environment = f'the environment variable {variable}'
    self._flags = {
      # A flag without a value is a switch that is on.
      m['name']: (
        'true' if m['value'] is None else m['value'].strip('\'"'),
        self._environment,
      )
      for m in _FLAG.finditer(before)
    }

  def add(self, name: str, value: Any, place: str) -> None:
    """Adds a flag.

    Args:
      name: with or without dashes in front.
      value: True, False, a number or text.
      place: where it is set, for messages.

    Raises:
      UsageError: the flag has another value from elsewhere, or cannot be one.
    """
    name, text = name.lstrip('-'), _to_text(name, value, place)
    if not re.fullmatch(r'[\w-]+', name):
      raise errors.UsageError(
        f'{place} has {name!r}; expected the name of a flag, such as'
        f' {_GPU_SCHEDULER!r}.'
      )
    first = self._flags.setdefault(name, (text, place))
    _check_same(f'The flag --{name}', first, (text, place))

  def missing(self) -> dict[str, str]:
    """Returns '--name=value' -> place of the flags that are not set yet."""
    return {
      f'--{name}={value}': place
      for name, (value, place) in self._flags.items()
      if place != self._environment
    }


def _to_text(name: str, value: Any, place: str) -> str:
  """Returns a flag's value as XLA reads it."""
  text = str(value).lower() if isinstance(value, bool) else str(value)
  # XLA splits at white space, and libtpu knows no quotes.
  if not isinstance(value, str | numbers.Real) or re.search(r'[\s\'"]', text):
    raise errors.UsageError(
      f'{place} sets {name!r} to {value!r}; expected True, False, a number or'
      ' text without white space and quotes.'
    )
  return text


def _is_same(a: str, b: str) -> bool:
  words = {'true': True, '1': True, 'false': False, '0': False}
  return words.get(a.lower(), a) == words.get(b.lower(), b)


def _check_same(what: str, a: tuple[Any, str], b: tuple[Any, str]) -> None:
  """Refuses two values, each given with its place, that are not the same."""
  if not _is_same(str(a[0]), str(b[0])):
    raise errors.UsageError(
      f'{what} has two values: {a[0]!r} by {a[1]} and {b[0]!r} by {b[1]}. Take'
      ' one out.'
    )


def _flags(
  options: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[_Flags, _Flags]:
  """Returns the flags for XLA and those for libtpu."""
  xla, tpu = (
    _Flags(variable, environ.get(variable, ''))
    for variable in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')
  )
  scheduler = options['latency_hiding_scheduler']
  if scheduler is not None:
    place = 'config.xla.latency_hiding_scheduler'
    xla.add(_GPU_SCHEDULER, scheduler, place)
    tpu.add(_TPU_SCHEDULER, scheduler, place)
  for key in ('pgle_profiling_runs', 'pgle_save', 'pgle_profile'):
    if options[key]:
      xla.add(_GPU_SCHEDULER, True, f'config.xla.{key}')
  if options['pgle_save']:
    # In command buffers (CUDA graphs) the profiler sees no instructions.
    xla.add(_COMMAND_BUFFER, '', 'config.xla.pgle_save')
  if options['pgle_profile']:
    # The program may go to another directory before it compiles.
    path = os.path.abspath(options['pgle_profile'])
    xla.add(_PGLE_PROFILE, path, 'config.xla.pgle_profile')
  for wanted, key in ((xla, 'flags'), (tpu, 'tpu_flags')):
    for name, value in options[key].items():
      wanted.add(name, value, f'config.xla.{key}')
  return xla, tpu


def validate(options: Mapping[str, Any]) -> None:
  """Checks the flags of `config.xla` without looking at the machine.

  Args:
    options: the section of the config; each value is valid by itself.

  Raises:
    UsageError: a flag has two values, or one that XLA cannot read.
  """
  _flags(options, {})


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
  for wanted in _flags(options, os.environ):
    before = os.environ.get(wanted.variable, '')
    missing = wanted.missing()
    if not missing:
      continue
    if before.strip() and not before.strip().startswith('-'):
      raise errors.UsageError(
        f'{wanted.variable} is {before!r}, the name of a file with flags; no'
        f' flags can be added to it. Put them into {wanted.variable} itself.'
      )
    _check_not_started(wanted.variable, missing)
    after = ' '.join([before, *missing]).strip()
    why = 'libtpu is not installed here'
    try:
      is_tried = _try(wanted.variable, after)
      # Without libtpu the scheduler's does nothing, nor matters.
      is_shown = is_tried or bool(options['tpu_flags'])
    except subprocess.TimeoutExpired:
      # Of many processes on one slow disk. No reason to stop all of them.
      is_tried, is_shown = False, True
      why = f'what reads them took more than {_PROBE_SECS:g} s'
    os.environ[wanted.variable] = after
    if not is_shown:
      continue
    if not is_tried:
      lines.append(f'{wanted.variable}: {why}: they are not checked.')
    lines += [
      f'{wanted.variable}: {flag} ({place})' for flag, place in missing.items()
    ]
  return lines + _set_auto_pgle(options)


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


def _check_not_started(variable: str, missing: Iterable[str]) -> None:
  # There is no public way to ask.
  from jax._src import xla_bridge

  if xla_bridge.backends_are_initialized():
    raise errors.UsageError(
      f'config.xla needs {" ".join(missing)} in {variable}, but JAX has started'
      ' and reads it no more. Call nothing of JAX that needs a device before'
      f' the run, or set {variable} in the shell.'
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


def _try(variable: str, text: str) -> bool:
  """Refuses flags for which XLA or libtpu would end the process.

  Args:
    variable: XLA_FLAGS or LIBTPU_INIT_ARGS.
    text: its value.

  Returns:
    Whether there is something to ask: libtpu may not be installed.

  Raises:
    subprocess.TimeoutExpired: it has not read them after `_PROBE_SECS`.
  """
  if variable == 'XLA_FLAGS':
    name = f'XLA (jaxlib {jaxlib.__version__})'
    others = 'flags of libtpu go into config.xla.tpu_flags'
    libraries = list(pathlib.Path(jaxlib.__file__).parent.glob('*.so'))
    program, environ = [_READ_XLA_FLAGS], {}
  else:
    name = 'libtpu'
    others = 'flags of XLA for CPUs and GPUs go into config.xla.flags'
    path = os.environ.get('TPU_LIBRARY_PATH', '')
    if not os.path.isfile(path):
      package = importlib.util.find_spec('libtpu')
      if package is None or package.origin is None:
        return False
      path = str(pathlib.Path(package.origin).with_name('libtpu.so'))
    libraries = [pathlib.Path(path)]
    # It reads its flags and no more: it takes no chip, needs not be the only
    # one to use libtpu, and does not look for the machine's metadata.
    program = [_READ_TPU_FLAGS, path]
    environ = {'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_SKIP_MDS_QUERY': '1'}

  def read(text: str) -> str | None:
    """Returns the error of a process that reads flags; None without one."""
    done = subprocess.run(
      [sys.executable, '-c', *program],
      env=os.environ | environ | {variable: text},
      stdin=subprocess.DEVNULL,
      capture_output=True,
      text=True,
      errors='replace',
      timeout=_PROBE_SECS,
    )
    return done.stderr if done.returncode else None

  said = read(text)
  if said is None:
    return True
  unknown = re.findall(r"Unknown command line flag '([^']*)'", said)
  for line in re.findall(r'Unknown flags? in XLA_FLAGS: (.*)', said):
    unknown += [m['name'] for m in _FLAG.finditer(line)]
  if unknown:
    raise errors.UsageError(
      f'{name} does not know {_with_near(unknown, libraries, read)}.'
      f' {variable} would be {text!r}; {others}.'
    )
  problems = re.findall(r'^ERROR: (.*)$', said, re.MULTILINE)
  if 'Flag parsing failed' in said:
    problems += re.findall(r'^E.*?\] (.*?)\.?$', said, re.MULTILINE)
  if problems:
    raise errors.UsageError(
      f'{name} refuses the value of a flag: {"; ".join(problems)}. {variable}'
      f' would be {text!r}.'
    )
  raise errors.UsageError(
    f'{name} could not be started with {variable}={text!r}:\n{said[-2000:]}'
  )


def _with_near(
  unknown: Iterable[str],
  libraries: Iterable[pathlib.Path],
  read: Callable[[str], str | None],
) -> str:
  """Lists unknown flags, each with the names that are near and known.

  There is no complete list of flags: XLA truncates its output of --help. So
  words in the library that are spelled like flags are tried.
  """
  words: set[str] = set()
  for path in libraries:
    with (
      open(path, 'rb') as f,
      mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
      for pattern in _WORDS:
        words |= {word.decode() for word in set(pattern.findall(data))}

  def is_known(name: str) -> bool:
    said = read(f'--{name}=')
    return said is None or not re.search('Unknown (command line )?flag', said)

  texts = []
  for flag in unknown:
    near = errors.nearest(flag, words, n=_NUM_TRIED)
    # Lazily: each costs a third of a second.
    known = list(itertools.islice(filter(is_known, near), _NUM_NAMES))
    note = f' (near: {", ".join(f"--{name}" for name in known)})'
    texts.append(f'--{flag}{note if known else ""}')
  return ' nor '.join(texts)


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
    for key in ('pgle_profiling_runs', 'pgle_profile'):
      if options[key]:
        warnings.append(
          f'config.xla.{key} has no effect: JAX runs on {platform!r}, and PGLE'
          ' is for GPUs.'
        )
  elif cache := _compilation_cache():
    if options['pgle_profiling_runs']:
      warnings.append(
        f'The compilation cache {cache} may hold programs that an earlier run'
        ' compiled with its own profile. They are used as they are and measured'
        ' no more, whatever config.xla.pgle_profiling_runs and'
        ' pgle_aggregation_percentile say. To measure anew, empty it.'
      )
    if options['pgle_profile']:
      warnings.append(
        f'The compilation cache {cache} knows config.xla.pgle_profile by its'
        ' name, not by what is in it. Give a new profile a new name, or empty'
        ' the cache.'
      )
  _log_warnings(warnings)
  return warnings


def _compilation_cache() -> str | None:
  settings = jax.config.values
  if not settings['jax_enable_compilation_cache']:
    return None
  return settings['jax_compilation_cache_dir']


def check_precompiled(options: Mapping[str, Any]) -> list[str]:
  """Warns of settings that have no effect on a program compiled before.

  Args:
    options: the section, validated.

  Returns:
    The warnings, which are logged as well.
  """
  why = {
    'pgle_profiling_runs': 'JAX measures and recompiles only what it compiles'
    ' as it runs',
    'pgle_profile': 'the profile is used when a program is compiled',
    'pgle_save': 'it may have been compiled with command buffers, inside of'
    ' which nothing can be measured',
  }
  warnings = [
    f'config.xla.{key} is {options[key]!r}, but has no effect on a program that'
    f' was compiled before: {reason}. Do not reuse the saved program.'
    for key, reason in why.items()
    if options[key]
  ]
  _log_warnings(warnings)
  return warnings


def _log_warnings(warnings: Iterable[str]) -> None:
  for warning in warnings:
    logging.warning('%s', warning)


def actions(options: Mapping[str, Any]) -> list[ProfileSteps]:
  """Returns the periodic actions that `config.xla` asks for.

  Args:
    options: the section, validated, after `check_backend`.

  Returns:
    On the first process of a run that saves a profile: the action that does.
  """
  if options['pgle_save'] and jax.process_index() == 0:
    return [
      ProfileSteps(
        options['pgle_save'], FIRST_PROFILED_STEP, options['pgle_save_steps']
      )
    ]
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
