"""JAXline's names, imported from the modules that define them.

New code imports those modules. An experiment written for JAXline's `utils`
finds all its names here; `GLOBAL_CHECKPOINT_DICT` may be rebound here.
"""

# ruff: noqa: F401

import functools

from absl import logging
import jax

from jaxline import debug
from jaxline import lazy
from jaxline.async_lib import make_async
from jaxline.async_lib import py_prefetch
from jaxline.checkpoint.protocol import Checkpointer
from jaxline.compat.checkpoints import InMemoryCheckpointer
from jaxline.compat.dictionary import GLOBAL_CHECKPOINT_DICT
from jaxline.compat.dictionary import CheckpointNT
from jaxline.compat.dictionary import SnapshotNT
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

# The errors of the library's own activities end the process, which prints them.
log_activity = functools.partial(debug.log_activity, logs_error=True)

lazy.complete(
  __name__,
  # JAXline uses these through this module, and programs rebind them on it.
  shared={
    'jaxline.compat.checkpoints': 'InMemoryCheckpointer',
    'jaxline.compat.dictionary': 'CheckpointNT GLOBAL_CHECKPOINT_DICT',
    'jaxline.debug': 'evaluate_should_return_dict',
    'jaxline.devices': 'bcast_local_devices double_buffer get_first rendezvous',
    'jaxline.prng': 'host_id_devices_for_rng specialize_rng_host_device',
  },
)
