"""Traces steps, by `config.profile_steps` and `config.xla.pgle_save`."""

from collections.abc import Callable
import contextlib
import os
import pathlib
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import profiler

from jaxline.base import disk
from jaxline.base import keys
from jaxline.metrics import periodic


class Profiler(periodic.Action):
  """Traces steps. Training waits until the files are written.

  `folder_of` maps a name to the path of a folder in the run's directory.
  """

  def __init__(
    self,
    config: Any,
    folder_of: Callable[[str], pathlib.Path],
    say: Callable[[str], None] = logging.info,
  ) -> None:
    self._ranges = keys.parse_ranges(config.profile_steps or '')
    self._folder_of = folder_of
    self._say = say
    self._last = 0
    self._path: pathlib.Path | None = None  # The trace that ends at `_last`.

  def update_time(self, t: float, step: int) -> None:
    # Drop ranges that an earlier process has run. A range may start with the
    # first step of this process.
    self._ranges = [ends for ends in self._ranges if ends[1] > step]
    self(t, step, None)

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    if self._path is not None and step >= self._last:
      self._stop(scalar_outputs)
    if self._ranges and self._ranges[0][0] <= step + 1:
      self._start(int(step), self._ranges.pop(0)[1])

  def wait_to_finish(self) -> None:
    if self._path is not None:
      self._stop(None)

  def _start(self, step: int, last: int) -> None:
    process = jax.process_index()
    folder = f'train/host_{process}' if process else 'train'
    self._folder_of(f'{folder}/plugins/profile')
    directory = self._folder_of(folder)
    name = time.strftime(f'%Y_%m_%d_%H_%M_%S_steps_{step + 1}-{last}')
    options = jax.profiler.ProfileOptions()
    options.session_id = name
    # Python's stacks would slow the measured steps and fill the trace.
    options.python_tracer_level = 0
    jax.profiler.start_trace(
      directory, create_perfetto_trace=True, profiler_options=options
    )
    self._path = directory / 'plugins' / 'profile' / name
    self._last = last

  def _stop(self, scalars: Any) -> None:
    path, self._path = self._path, None
    for x in jax.tree.leaves(scalars):  # Wait until their step has run.
      # The buffer may have been donated to a later step.
      if isinstance(x, jax.Array) and not x.is_deleted():
        with contextlib.suppress(RuntimeError):  # The loop raises this error.
          x.block_until_ready()
    jax.profiler.stop_trace()
    self._say(
      f'Trace: {path}. To view it:'
      f'\n  tensorboard --logdir={self._folder_of("train").parent}'
      ' (with `pip install xprof`), or open its perfetto_trace.json.gz'
      ' at https://ui.perfetto.dev'
    )


class PgleProfiler(Profiler):
  """Traces some steps and saves their profile for a second run."""

  def __init__(
    self, config: Any, folder_of: Callable[[str], pathlib.Path]
  ) -> None:
    super().__init__(config, folder_of)
    # Make it absolute, since the program may change its directory.
    self._file = pathlib.Path(config.xla.pgle_save).absolute()
    self._num_steps = config.xla.pgle_save_steps

  def update_time(self, t: float, step: int) -> None:
    # Skip the first step, which compiles, and the next, which fill the queues.
    self._ranges = [(step + 5, step + 4 + self._num_steps)]

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    trace = self._path
    super().__call__(t, step, scalar_outputs)
    if trace is None or self._path is not None:
      return
    profile = profiler.get_profiled_instructions_proto(os.fspath(trace))
    if not profile:
      raise RuntimeError(
        f'The trace {trace} has no GPU, so nothing was written to {self._file}.'
        f' JAX runs on {jax.default_backend()!r}; expected NVIDIA GPUs that no'
        ' other profiler (such as Nsight Systems) uses.'
      )
    self._file.parent.mkdir(parents=True, exist_ok=True)
    with disk.replacing(self._file) as file:
      file.write(profile)
    text = 'To compile with it, run again with --config.xla.pgle_profile=%s'
    logging.info(text, self._file)

  def wait_to_finish(self) -> None:
    if self._ranges or self._path is not None:
      text = 'No profile was saved to %s: the run ended before it finished'
      text += ' steps 5 to %d since this start.'
      logging.warning(text, self._file, 4 + self._num_steps)
      self._ranges = []
    super().wait_to_finish()
