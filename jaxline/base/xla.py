"""Applies `config.xla`: compiler flags and profile-guided scheduling (PGLE).

`config.xla` is written to XLA_FLAGS, LIBTPU_INIT_ARGS and settings of JAX
before JAX starts. XLA and libtpu check the flags themselves: they end the
process and name a flag that they do not know.
docs/reference/xla_flags.md explains which to set, and when.
"""

from __future__ import annotations

from collections.abc import Mapping
import os
import re
from typing import Any

import jax

from jaxline import errors
from jaxline.base import keys
from jaxline.base.keys import COUNT, Key, integer, mapping, optional

_PROFILE = optional(
  # XLA ignores a file without this suffix.
  keys.text('a file name that ends in .pb', r'(.*\.pb)?', is_path=True)
)
KEYS = (
  Key('xla', {}, mapping('a dict of the keys below'),
      'Settings of XLA, set before JAX starts: docs/reference/xla_flags.md.',
      'program'),
  Key('xla.latency_hiding_scheduler', None, optional(keys.BOOLEAN),
      'Overlap communication with computation. None means that XLA decides.',
      'program'),
  Key('xla.pgle_profiling_runs', 0, integer(0),
      'GPU, automatic PGLE: profile this many executions of the step, then'
      ' recompile it with the measured times. 0 disables it.', 'program'),
  Key('xla.pgle_aggregation_percentile', None, optional(integer(0, 100)),
      'Automatic PGLE uses this percentile of the measured times. None means'
      " JAX's default, 90.", 'program'),
  Key('xla.pgle_save', None, _PROFILE,
      'Manual PGLE, first run: the profile to write.', 'program'),
  Key('xla.pgle_save_steps', 10, COUNT,
      'Manual PGLE, first run: the number of steps to profile.'),
  Key('xla.pgle_profile', None, _PROFILE,
      'Manual PGLE, second run: the profile to read.', 'program'),
  Key('xla.flags', {}, mapping(
        "a dict from flag to value, such as {'xla_dump_to': '/tmp'}"),
      'More flags for XLA_FLAGS.', 'program'),
  Key('xla.tpu_flags', {}, mapping('a dict from flag to value'),
      'More libtpu flags, for LIBTPU_INIT_ARGS.', 'program'),
)  # fmt: skip

# Matches names of flags whose value is a file, a directory or more flags.
_PLACE = re.compile(
  r'(^|_)(dump|dir|directory|path|extra)(_|$)|(?<!pro)file|fromenv|_(to|from)$'
)


def _flags(options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the flags of `config.xla`: variable -> flag -> value."""
  gpu: dict[str, Any] = {}
  tpu: dict[str, Any] = {}
  scheduler = options['latency_hiding_scheduler']
  if scheduler is not None:
    gpu['xla_gpu_enable_latency_hiding_scheduler'] = scheduler
    tpu['xla_tpu_enable_latency_hiding_scheduler'] = scheduler
  if uses_pgle(options):  # PGLE only works with this scheduler.
    gpu['xla_gpu_enable_latency_hiding_scheduler'] = True
  if options['pgle_save']:
    # The profiler cannot see instructions in command buffers (CUDA graphs).
    gpu['xla_gpu_enable_command_buffer'] = ''
  if profile := options['pgle_profile']:
    # Make it absolute: the program may change its directory before compiling.
    path = os.path.abspath(profile)
    gpu['xla_gpu_pgle_profile_file_or_directory_path'] = path
  gpu |= {name.lstrip('-'): x for name, x in options['flags'].items()}
  tpu |= {name.lstrip('-'): x for name, x in options['tpu_flags'].items()}
  return {'XLA_FLAGS': gpu, 'LIBTPU_INIT_ARGS': tpu}


def drop_places(options: Any) -> list[str]:
  """Removes settings that may name files or more flags; returns their names."""
  dropped = [x for x in ('pgle_save', 'pgle_profile') if options[x]]
  options.update(dict.fromkeys(dropped))
  for flags in (options.flags, options.tpu_flags):
    for name, x in [*flags.items()]:
      is_plain = re.fullmatch(r'[\w-]+=[\w.,:+-]*', f'{name}={x}')
      if _PLACE.search(name) or not is_plain:
        dropped.append(name)
        del flags[name]
  return dropped


def uses_pgle(options: Mapping[str, Any]) -> bool:
  """Returns whether `config.xla` asks for PGLE, automatic or manual."""
  kinds = 'pgle_profiling_runs', 'pgle_save', 'pgle_profile'
  return any(options[key] for key in kinds)


def apply(options: Mapping[str, Any], *, has_started: bool) -> list[str]:
  """Applies `config.xla` to the environment and JAX; returns log lines.

  It appends flags to XLA_FLAGS and LIBTPU_INIT_ARGS. If a flag occurs twice,
  XLA uses the last value.

  Raises:
    UsageError: JAX has started, so it no longer reads a variable that needs
      new flags; or the profile does not exist.
  """
  profile = options['pgle_profile']
  if profile and not os.path.exists(profile):
    # XLA would compile without the file, and report it only in its own log.
    raise errors.UsageError(
      f'config.xla.pgle_profile is {profile!r}, which does not exist. To create'
      f' it, run with config.xla.pgle_save={profile!r}.'
    )
  lines = []
  for variable, values in _flags(options).items():
    before = os.environ.get(variable, '')
    flags = [
      f'--{name}={str(x).lower() if isinstance(x, bool) else x}'
      for name, x in values.items()
    ]
    added = ' '.join(flag for flag in flags if flag not in before.split())
    if added and has_started:
      raise errors.UsageError(
        f'config.xla needs {added} in {variable}, but JAX has started and no'
        ' longer reads it. Do not use JAX devices before the run, or set'
        f' {variable} in the shell.'
      )
    if added:
      os.environ[variable] = f'{before} {added}'.strip()
      lines.append(f'{variable}: {added}')
  settings = {
    'jax_enable_pgle': True,
    'jax_pgle_profiling_runs': options['pgle_profiling_runs'],
    # Otherwise the cache key of a program with custom partitioning contains a
    # pointer, and differs in each run.
    'jax_remove_custom_partitioning_ptr_from_cache_key': True,
    'jax_pgle_aggregation_percentile': options['pgle_aggregation_percentile'],
  }
  for name, value in settings.items() if options['pgle_profiling_runs'] else ():
    if value is not None:
      jax.config.update(name, value)
      lines.append(f'JAX: {name}={value}')
  return lines
