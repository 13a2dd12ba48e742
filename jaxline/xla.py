"""Settings of the XLA compilers: flags, and profile-guided scheduling (PGLE).

`config.xla` is written to XLA_FLAGS, LIBTPU_INIT_ARGS and settings of JAX
before JAX starts. XLA and libtpu check the flags themselves: they end the
process and name a flag that they do not know.
docs/reference/accelerators.md says what to set, and when.

The Profile Guided Latency Estimator gives XLA's scheduler for GPUs the measured
durations of a program's instructions, so that it can overlap communication with
computation. JAX can measure and recompile in one run (automatic), or one run
saves a profile and the next one compiles with it (manual).
"""

from __future__ import annotations

from collections.abc import Mapping
import os
import pathlib
import tempfile
from typing import Any

from absl import logging
import jax
from jax.experimental import profiler

from jaxline import disk
from jaxline import errors
from jaxline.keys import BOOLEAN, COUNT, Key, integer, mapping, optional, text
from jaxline.metrics import periodic

# The first step whose profile is saved: the first compiles, and the next ones
# still fill the queues.
FIRST_PROFILED_STEP = 5

_PGLE_KEYS = ('pgle_profiling_runs', 'pgle_save', 'pgle_profile')

_PROFILE = optional(
  # XLA ignores a file without this suffix.
  text('the name of a file that ends in .pb', r'(.*\.pb)?', is_path=True)
)
KEYS = (
  Key('xla', {}, mapping('a dict of the keys below'),
      'Settings of XLA, set before JAX starts: docs/reference/accelerators.md.',
      'program'),
  Key('xla.latency_hiding_scheduler', None, optional(BOOLEAN),
      'Communicate while computing. None leaves the choice to XLA.', 'program'),
  Key('xla.pgle_profiling_runs', 0, integer(0),
      'GPU: profile this many runs of the step, then compile it again with what'
      ' was measured (automatic PGLE). 0 disables it.', 'program'),
  Key('xla.pgle_aggregation_percentile', None, optional(integer(0, 100)),
      "The percentile of several measured times that counts. None is JAX's"
      ' default, 90.', 'program'),
  Key('xla.pgle_save', None, _PROFILE,
      'The same in two runs (manual PGLE): the first writes this file.',
      'program'),
  Key('xla.pgle_save_steps', 10, COUNT, 'How many steps that run profiles.'),
  Key('xla.pgle_profile', None, _PROFILE,
      'The file of the first run, in the second run.', 'program'),
  Key('xla.flags', {}, mapping(
        "a dict from flag to value, such as {'xla_dump_to': '/tmp'}"),
      'Further flags for XLA_FLAGS.', 'program'),
  Key('xla.tpu_flags', {}, mapping('a dict from flag to value'),
      'Further flags of libtpu, for LIBTPU_INIT_ARGS.', 'program'),
)  # fmt: skip


def _flags(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns flag -> value for each environment variable of `config.xla`."""
  scheduler = options['latency_hiding_scheduler']
  # PGLE only informs this scheduler.
  for_gpu = True if uses_pgle(options) else scheduler
  found: dict[str, dict[str, Any]] = {'XLA_FLAGS': {}, 'LIBTPU_INIT_ARGS': {}}
  if for_gpu is not None:
    found['XLA_FLAGS']['xla_gpu_enable_latency_hiding_scheduler'] = for_gpu
  if scheduler is not None:
    found['LIBTPU_INIT_ARGS']['xla_tpu_enable_latency_hiding_scheduler'] = (
      scheduler
    )
  if options['pgle_save']:
    # The profiler sees no instructions in command buffers (CUDA graphs).
    found['XLA_FLAGS']['xla_gpu_enable_command_buffer'] = ''
  if options['pgle_profile']:
    # Absolute: the program may change its directory before it compiles.
    found['XLA_FLAGS']['xla_gpu_pgle_profile_file_or_directory_path'] = (
      os.path.abspath(options['pgle_profile'])
    )
  for variable, key in (
    ('XLA_FLAGS', 'flags'),
    ('LIBTPU_INIT_ARGS', 'tpu_flags'),
  ):
    own = options[key].items()
    found[variable] |= {name.lstrip('-'): value for name, value in own}
  return found


def uses_pgle(options: Mapping[str, Any]) -> bool:
  """Returns whether `config.xla` asks for PGLE, automatic or manual."""
  return any(options[key] for key in _PGLE_KEYS)


def apply(options: Mapping[str, Any]) -> list[str]:
  """Sets the environment and JAX as `config.xla` says, before JAX starts.

  The flags are appended to XLA_FLAGS and LIBTPU_INIT_ARGS. Of two values for
  one flag XLA takes the last.

  Args:
    options: the section of the config, validated.

  Returns:
    Lines for the user that say what was set; none if nothing was.

  Raises:
    UsageError: `pgle_profile` does not exist; or JAX has started, so that it
      would ignore the flags.
  """
  profile = options['pgle_profile']
  if profile and not os.path.exists(profile):
    # XLA would compile without it, and say so only in its own log.
    raise errors.UsageError(
      f'config.xla.pgle_profile is {profile!r}, which does not exist. Make it'
      f' by a run with config.xla.pgle_save={profile!r}.'
    )
  lines = []
  for variable, values in _flags(options).items():
    before = os.environ.get(variable, '')
    flags = [
      f'--{name}={str(x).lower() if isinstance(x, bool) else x}'
      for name, x in values.items()
    ]
    added = [flag for flag in flags if flag not in before.split()]
    # There is no public way to ask.
    from jax._src import xla_bridge

    if added and xla_bridge.backends_are_initialized():
      raise errors.UsageError(
        f'config.xla needs {" ".join(added)} in {variable}, but JAX has started'
        ' and no longer reads it. Call nothing that needs a device before the'
        f' run, or set {variable} in the shell.'
      )
    if added:
      os.environ[variable] = ' '.join([before, *added]).strip()
      lines.append(f'{variable}: {" ".join(added)}')
  settings: dict[str, Any] = {}
  if options['pgle_profiling_runs']:
    settings = {
      'jax_enable_pgle': True,
      'jax_pgle_profiling_runs': options['pgle_profiling_runs'],
      # Otherwise the cache key of a program with custom partitioning contains
      # a pointer and differs in each run.
      'jax_remove_custom_partitioning_ptr_from_cache_key': True,
    }
    if options['pgle_aggregation_percentile'] is not None:
      settings['jax_pgle_aggregation_percentile'] = options[
        'pgle_aggregation_percentile'
      ]
  for name, value in settings.items():
    jax.config.update(name, value)
    lines.append(f'JAX: {name}={value}')
  return lines


def actions(options: Mapping[str, Any]) -> list[ProfileSteps]:
  """Returns the periodic actions that `config.xla` asks for.

  Args:
    options: the section, validated.

  Returns:
    On the first process of a run that saves a profile: the action that does.
  """
  path, count = options['pgle_save'], options['pgle_save_steps']
  if path and jax.process_index() == 0:
    return [ProfileSteps(path, FIRST_PROFILED_STEP, count)]
  return []


class ProfileSteps(periodic.Action):
  """Saves the profile of some steps, for `config.xla.pgle_profile`.

  Training waits while the trace is read. The file is complete or does not
  exist.
  """

  def __init__(self, path: str, first_step: int, num_steps: int):
    """Makes the action.

    Args:
      path: the file to write, a serialized ProfiledInstructionsProto of XLA.
      first_step: the first step to profile, counted from 1 at the first step of
        this process; at least 2.
      num_steps: how many steps to profile.
    """
    self._path = pathlib.Path(path).absolute()
    self._before = first_step - 1
    self._last = self._before + num_steps
    self._calls = 0
    self._directory: tempfile.TemporaryDirectory | None = None

  def __call__(
    self, t: float, step: int, scalar_outputs: Mapping[str, Any] | None
  ) -> None:
    """Starts the trace, or stops it and writes the profile, if it is time to.

    Raises:
      RuntimeError: another trace is running, or the profile has no GPU.
      OSError: the profile cannot be written.
    """
    self._calls += 1
    if self._calls == self._before:
      self._start()
    elif self._calls == self._last:
      jax.block_until_ready(scalar_outputs)  # The last step has run.
      self._write_profile(step)

  def wait_to_finish(self) -> None:
    """Stops the trace of a run that ended too early, with a warning."""
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

  def _start(self) -> None:
    directory = tempfile.TemporaryDirectory(prefix='jaxline_pgle_')
    options = jax.profiler.ProfileOptions()
    # Durations belong to instructions of the programs. Python's stacks would
    # slow down the measured steps.
    options.enable_hlo_proto = True
    options.python_tracer_level = 0
    try:
      jax.profiler.start_trace(directory.name, profiler_options=options)
    except BaseException:
      directory.cleanup()
      raise
    self._directory = directory  # From here on, `wait_to_finish` stops it.
    logging.info(
      'Profiling %d steps for %s.', self._last - self._before, self._path
    )

  def _write_profile(self, step: int) -> None:
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
    with disk.replacing(self._path) as file:
      file.write(profile)
    logging.info(
      'Wrote the profile of %d bytes; the next run compiles with it by'
      ' --config.xla.pgle_profile=%s',
      len(profile),
      self._path,
    )
