"""JAXline's names, imported from the modules that define them.

New code imports those modules. An experiment written for JAXline's `utils`
finds all its names here; `GLOBAL_CHECKPOINT_DICT` may be rebound here.
"""

# ruff: noqa: F401

from collections.abc import Iterator
import contextlib

from absl import logging
import jax

from jaxline import debug
from jaxline import lazy
from jaxline.async_lib import make_async
from jaxline.async_lib import py_prefetch
from jaxline.checkpoint.memory import GLOBAL_CHECKPOINT_DICT
from jaxline.checkpoint.memory import CheckpointNT
from jaxline.checkpoint.memory import InMemoryCheckpointer
from jaxline.checkpoint.memory import SnapshotNT
from jaxline.checkpointing import Checkpointer
from jaxline.debug import debugger_fallback
from jaxline.debug import disable_pmap_jit
from jaxline.debug import evaluate_should_return_dict
from jaxline.debug import kwargs_only
from jaxline.devices import bcast_local_devices
from jaxline.devices import double_buffer
from jaxline.devices import double_buffer_on_gpu
from jaxline.devices import get_first
from jaxline.devices import maybe_device_get
from jaxline.devices import rendezvous
from jaxline.devices import tree_psum
from jaxline.metrics.periodic import PeriodicAction
from jaxline.metrics.writers import Writer
import jaxline.platform  # Defines the flags that were utils' own.
from jaxline.prng import DistributedRNGMode
from jaxline.prng import host_id_devices_for_rng
from jaxline.prng import specialize_rng_host_device

lazy.complete(
  __name__,
  # JAXline calls these through this module.
  shared=(
    'CheckpointNT',
    'InMemoryCheckpointer',
    'bcast_local_devices',
    'double_buffer',
    'evaluate_should_return_dict',
    'get_first',
    'host_id_devices_for_rng',
    'rendezvous',
    'specialize_rng_host_device',
  ),
)


@contextlib.contextmanager
def log_activity(activity_name: str) -> Iterator[None]:
  """Logs the start and the end of a program's code, and its error in full.

  The library's own activities log no traceback: their error ends the process,
  which prints it.

  Args:
    activity_name: the name that the log shows.

  Yields:
    Nothing.
  """
  with debug.log_activity(activity_name):
    try:
      yield
    except BaseException:
      logging.exception('[jaxline] %s failed with error.', activity_name)
      raise
