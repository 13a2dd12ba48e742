"""The names of JAXline's `utils`; new code imports the defining modules."""

import functools

from jaxline.base import debug
from jaxline.base import lazy
from jaxline.base.async_lib import py_prefetch  # noqa: F401  Rebound here alone.
import jaxline.platform  # noqa: F401  Defines the flags that were utils' own.

# A program's activities log their errors; the library's errors end the process.
log_activity = functools.partial(debug.log_activity, logs_error=True)

lazy.complete(
  __name__,
  {
    'jaxline.base.async_lib': 'make_async',
    'jaxline.checkpoint.protocol': 'Checkpointer',
    'jaxline.compat.checkpointers': 'InMemoryCheckpointer',
    'jaxline.compat.dictionary': """CheckpointNT GLOBAL_CHECKPOINT_DICT
      SnapshotNT""",
    'jaxline.base.debug': """debugger_fallback disable_pmap_jit
      evaluate_should_return_dict kwargs_only""",
    'jaxline.parallel.devices': """bcast_local_devices double_buffer
      double_buffer_on_gpu get_first maybe_device_get rendezvous tree_psum""",
    'jaxline.metrics.periodic': 'PeriodicAction',
    'jaxline.metrics.writers': 'Writer',
    'jaxline.parallel.prng': """DistributedRNGMode host_id_devices_for_rng
      specialize_rng_host_device""",
  },
)
