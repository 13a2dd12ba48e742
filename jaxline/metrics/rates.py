"""Computes scalars that the loop adds to a step: rates, utilization, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging
import jax

from jaxline.base import chips
from jaxline.base import counting
from jaxline.base import debug
from jaxline.metrics import values

# If a step counts these, the loop adds the rates per second.
_COUNTS = ('tokens_per_step', 'examples_per_step')


class Rates:
  """Adds the rates of a training experiment to the scalars of a due step.

  - `tokens_per_sec` and `examples_per_sec`, if the step counts them.
  - `tflops_per_sec`, if the experiment is sharded: 10^12 FLOPs of the model per
    second and device. A step counts as three forward passes' matrix products.
  - `mfu`: the same as a fraction of the device's bfloat16 peak, if known.
  - `device_memory_gib`: current memory use of the fullest local device, if any.
  """

  def __init__(self, experiment: Any):
    self._experiment = experiment
    self._batch: Any = None
    self._flops = 0.0

  def __call__(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scalars of a step and the added ones, on the host."""
    added = dict(scalars)
    steps_per_sec = scalars.get('steps_per_sec')
    if steps_per_sec is None:  # It is not due.
      return added
    counts = {k: scalars[k] for k in _COUNTS if k in scalars}
    for name, count in values.to_scalars(counts).items():
      added[name.replace('_per_step', '_per_sec')] = count * steps_per_sec
    if flops := self._step_flops():
      rate = flops * steps_per_sec / jax.device_count()
      added['tflops_per_sec'] = rate / 1e12
      if chip := chips.chip_of(jax.local_devices()[0]):
        added['mfu'] = rate / chip.peak_flops
    if (num_bytes := bytes_in_use(jax.local_devices())) is not None:
      added['device_memory_gib'] = num_bytes / 2**30
    return added

  def _step_flops(self) -> float:
    """Returns the FLOPs of the model in a step, or 0 if unknown."""
    batch = self._experiment.traced_batch
    # Op by op, steps are not traced: tracing here would hit breakpoints again.
    if batch is None or debug.settings.disable_pmap_jit:
      return 0.0
    if batch is not self._batch:
      self._batch, self._flops = batch, 0.0
      try:
        self._flops = model_flops(self._experiment, batch)
      except Exception:  # A failure to log a number must not end the run.
        text = 'No tflops_per_sec and mfu: counting the FLOPs of a step failed.'
        logging.warning(text, exc_info=True)
    return self._flops


def model_flops(experiment: Any, batch: Any) -> float:
  """Returns the model's FLOPs for a training step, over all devices."""
  args = experiment.abstract_state(), batch, experiment.abstract_rng()
  traced = experiment.compiled_train_step.trace(*args)
  return counting.PRODUCTS_IN_TRAINING * counting.forward_flops(traced.jaxpr)


def bytes_in_use(devices: Sequence[Any]) -> int | None:
  """Returns the memory use of the fullest device, or None if unknown."""
  try:
    stats = [device.memory_stats() or {} for device in devices]
  except (NotImplementedError, jax.errors.JaxRuntimeError):
    return None
  found = [s['bytes_in_use'] for s in stats if 'bytes_in_use' in s]
  return max(found, default=None)
