"""Connects the processes of a run.

`config.distributed` is 'auto', 'off', or a coordinator:

    config.distributed = {
      'coordinator': 'node0:1234',  # A free port of process 0's machine.
      'num_processes': 4,
      'process_id': 0,  # Another one in each process.
    }

'auto' reads JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID,
which `python -m jaxline.launch` sets, or asks the cluster that JAX detects:
Slurm, Open MPI, Kubernetes, Cloud TPU. Without either, and with one process,
nothing is done.

On the CPU the processes communicate by gloo, which is JAX's default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import socket
import threading
import time
from typing import Any, TypeVar

from absl import logging
import jax
from jax._src import clusters
from jax._src import xla_bridge
from jax._src.clusters import cloud_tpu_cluster
from jax.experimental import multihost_utils
from ml_collections import config_dict
import numpy as np

from jaxline import errors

T = TypeVar('T')

MODES = ('auto', 'off')
# The keys of a mapping, and their environment variables.
VARIABLES = {
  'coordinator': 'JAX_COORDINATOR_ADDRESS',
  'num_processes': 'JAX_NUM_PROCESSES',
  'process_id': 'JAX_PROCESS_ID',
}
_BIND_ADDRESS = 'JAX_COORDINATOR_BIND_ADDRESS'
_ALONE = (
  f'Or give {", ".join(VARIABLES.values())} in the environment; or run alone,'
  " with config.distributed = 'off'."
)

# How much longer JAX waits than this module. If JAX gives up, it ends the
# process; this module raises an error before that.
_JAX_SLACK_SECS = 60


class RendezvousError(RuntimeError):
  """The processes did not connect; the message says what to check."""


@dataclasses.dataclass(frozen=True)
class _Place:
  """The coordinator, and the place of this process.

  Attributes:
    coordinator: 'host:port'.
    num_processes: how many there are.
    process_id: the number of this process.
    source: where these values come from.
    local_device_ids: the devices of the machine that this process uses; None
      is all of them, or those in JAX_LOCAL_DEVICE_IDS.
  """

  coordinator: str
  num_processes: int
  process_id: int
  source: str
  local_device_ids: Sequence[int] | None = None

  def __str__(self) -> str:
    return (
      f'process {self.process_id} of {self.num_processes} (by {self.source}),'
      f' coordinator {self.coordinator}'
    )


def validate(value: Any) -> None:
  """Checks a value of `config.distributed`.

  Raises:
    UsageError: what is wrong, and what was expected.
  """
  if isinstance(value, Mapping | config_dict.ConfigDict):
    _read('config.distributed', dict(value))
  elif value not in MODES:
    raise errors.UsageError(
      f'config.distributed is {value!r}; expected one of {MODES} or a mapping'
      f' with the keys {tuple(VARIABLES)}.'
    )


def initialize(value: Any, timeout_secs: float = 300.0) -> None:
  """Connects to the other processes of the run, if there are any.

  Call it before any device is used. If `jax.distributed` is initialised
  already, nothing is done.

  Args:
    value: of `config.distributed`.
    timeout_secs: how long to wait for the others, in seconds.

  Raises:
    UsageError: the value, or the environment, is wrong; a device was used
      already; or a package is missing.
    RendezvousError: the others did not connect in time. The process must end
      then: JAX keeps trying for a minute, and then ends the process.
  """
  validate(value)
  if value == 'off':
    return
  if jax.distributed.is_initialized():
    logging.info('jax.distributed is initialised already, and left as it is.')
    return
  if value == 'auto':
    place = _found(timeout_secs)
  else:
    place = _read('config.distributed', dict(value))
  if place is None or place.num_processes == 1:
    source = place.source if place else 'no cluster and no JAX_* variables'
    logging.info('One process (by %s).', source)
    return
  _split(
    f'The coordinator (by {place.source} and the variables JAX_COORDINATOR_*)',
    place.coordinator,
  )
  _split(_BIND_ADDRESS, os.getenv(_BIND_ADDRESS) or place.coordinator)
  if xla_bridge.backends_are_initialized():
    raise errors.UsageError(
      f'This is {place}, but JAX has started its devices already, so that it'
      ' would not see those of the others. Call distributed.initialize (or'
      ' platform.main) before anything that touches a device, such as'
      ' jax.devices() or jnp.zeros(()); or run alone, with config.distributed ='
      " 'off'."
    )
  logging.info('This is %s; connecting to the others.', place)
  began = time.monotonic()
  _meet(place, timeout_secs)
  logging.info('All have connected after %.1f s.', time.monotonic() - began)


def _read(source: str, value: Mapping[str, Any]) -> _Place:
  """Returns the place that a mapping describes.

  Raises:
    UsageError: what is wrong with it.
  """
  errors.check_names(value, VARIABLES, 'key', source)
  if missing := [key for key in VARIABLES if key not in value]:
    raise errors.UsageError(
      f'{source} must give all of {tuple(VARIABLES)}; missing: {missing}.'
    )
  coordinator, count, process = (value[key] for key in VARIABLES)
  _split(f'coordinator of {source}', coordinator)
  numbers = isinstance(count, int) and isinstance(process, int)
  if not (numbers and 0 <= process < count):
    raise errors.UsageError(
      f'num_processes of {source} is {count!r} and process_id {process!r};'
      ' expected integers, and a process_id from 0 to num_processes - 1,'
      ' another one in each process.'
    )
  return _Place(coordinator, count, process, source)


def _split(name: str, address: Any) -> tuple[str, int]:
  """Returns the host and the port of an address, or refuses it by `name`."""
  parts = re.fullmatch(r'(?:([^:\s]+)|\[([^\]\s]+)\]):(\d+)', str(address))
  if parts is None or not 0 < int(parts[3]) < 2**16:
    raise errors.UsageError(
      f"{name} is {address!r}; expected 'host:port', such as 'node0:1234' or"
      " '[::1]:1234'."
    )
  return parts[1] or parts[2], int(parts[3])


def _found(timeout_secs: float) -> _Place | None:
  """Returns the place that the environment describes; None without one."""
  given = {
    key: text for key, name in VARIABLES.items() if (text := os.getenv(name))
  }
  # The address may be given beside a cluster, which has the rest.
  cluster = None if set(given) - {'coordinator'} else _cluster()
  if cluster is None:
    values = {k: int(v) if v.isdecimal() else v for k, v in given.items()}
    source = f'the variables {", ".join(VARIABLES.values())}'
    return _read(source, values) if given else None
  name = cluster.__name__
  with _explained(cluster):
    count = cluster.get_process_count()
    if count == 1:
      return _Place('', 1, 0, name)
    # JAX's own detection takes a name, which is '' for Kubernetes and for each
    # cluster that a program registers without one.
    local = cluster.get_local_process_id()
    address = given.get('coordinator') or cluster.get_coordinator_address(
      timeout_secs=int(timeout_secs),
      override_coordinator_port=os.getenv('JAX_COORDINATOR_PORT'),
    )
    process_id = cluster.get_process_id()
  devices = None if local is None or _keeps_devices() else [local]
  return _Place(address, count, process_id, name, devices)


def _cluster() -> type[clusters.ClusterEnv] | None:
  """Returns the first cluster that JAX detects, without asking in vain."""
  # A TPU VM whose TPU is not to be used: its metadata server need not be asked.
  # (On machines without a TPU, JAX does not ask it.)
  platforms = jax.config.jax_platforms or 'tpu'  # type: ignore[attr-defined]
  for cluster in clusters.ClusterEnv._cluster_types:
    is_pod = issubclass(cluster, clusters.K8sCluster)
    if (
      cluster.opt_in_only_method
      or (
        issubclass(cluster, cloud_tpu_cluster.BaseTpuCluster)
        and 'tpu' not in platforms.split(',')
      )
      # A notebook or a server in some pod is no process of a job.
      or (is_pod and 'JOB_COMPLETION_INDEX' not in os.environ)
    ):
      continue
    if is_pod and importlib.util.find_spec('kubernetes') is None:
      # No RendezvousError: to start again would not help.
      raise errors.UsageError(
        'This process is one of an Indexed Job of Kubernetes, and JAX can ask'
        ' for the others only with the package `kubernetes`: pip install'
        f' kubernetes. {_ALONE}'
      )
    with _explained(cluster):
      if cluster.is_env_present():
        return cluster
  return None


@contextlib.contextmanager
def _explained(cluster: type[clusters.ClusterEnv]) -> Iterator[None]:
  """Converts the errors of a cluster's variables and services."""
  try:
    yield
  except Exception as e:
    raise RendezvousError(
      f"JAX's {cluster.__name__} finds that this process is one of several, and"
      f' cannot tell which: {e}\n{_ALONE}'
    ) from e


def _keeps_devices() -> bool:
  """Says whether a process of Slurm or MPI is to have more than one GPU.

  JAX gives each of them the one of its local number. Where there is one process
  on each machine, the other GPUs would be idle.
  """
  if os.environ.get('JAX_LOCAL_DEVICE_IDS'):
    return True  # JAX takes these, where it is told of none.
  per_node = os.environ.get('SLURM_STEP_TASKS_PER_NODE', '')
  return (
    re.fullmatch(r'1(\(x\d+\))?(,1(\(x\d+\))?)*', per_node) is not None
    or os.environ.get('OMPI_COMM_WORLD_LOCAL_SIZE') == '1'
  )


def _meet(place: _Place, timeout_secs: float) -> None:
  """Calls `jax.distributed.initialize`; raises instead of hanging or dying."""
  deadline = time.monotonic() + timeout_secs
  if place.process_id == 0:
    _check_port(place)
  else:
    _check_reachable(place, deadline)
  raised: list[BaseException] = []

  def connect() -> None:
    try:
      jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        local_device_ids=place.local_device_ids,
        # All values are known: JAX need not detect a cluster.
        cluster_detection_method='deactivate',
        initialization_timeout=int(timeout_secs) + _JAX_SLACK_SECS,
      )
    except BaseException as e:
      raised.append(e)

  # On a thread, since neither Ctrl-C nor our deadline interrupts the call.
  thread = threading.Thread(target=connect, name='rendezvous', daemon=True)
  thread.start()
  thread.join(max(0.0, deadline - time.monotonic()))
  if thread.is_alive() or raised:
    why = f'After {timeout_secs:g} s not all processes have met'
    raise RendezvousError(
      f'{raised[0] if raised else why}; this is {place}.'
      f' Check that {place.num_processes} processes were started, that all of'
      ' them have the same num_processes and coordinator and each another'
      f' process_id from 0 to {place.num_processes - 1}, that none has failed'
      ' (its own output says why), and that no firewall or proxy variable is in'
      ' the way.'
    ) from (raised[0] if raised else None)


def _check_port(place: _Place) -> None:
  """Refuses a port that is taken, for which JAX ends in a segfault."""
  address = os.getenv(_BIND_ADDRESS)
  host, port = _split(_BIND_ADDRESS, address or place.coordinator)
  host = host if address else ''
  both = not address and socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if both or ':' in host else socket.AF_INET
  try:
    socket.create_server(
      (host, port), family=family, dualstack_ipv6=both
    ).close()
  except OSError as e:
    raise RendezvousError(
      f'This is {place}, which cannot listen on port {port}: {e}. Is a process'
      ' of an earlier or another run still there? End it, or take another port.'
    ) from e


def _check_reachable(place: _Place, deadline: float) -> None:
  """Waits until somebody listens at the coordinator's address."""
  address = _split('coordinator', place.coordinator)
  pause = 0.05
  while True:
    try:
      socket.create_connection(address, timeout=5).close()
      return
    except OSError as e:
      if time.monotonic() + pause > deadline:
        raise RendezvousError(
          f'This is {place}, which cannot be reached: {e}. Check that process 0'
          ' was started and still runs (its own output says what went wrong),'
          ' that the address is one of its machine, as seen from here, and that'
          ' no firewall is between.'
        ) from e
    time.sleep(pause)
    pause = min(2 * pause, 1.0)


def of_chief(value: T) -> T:
  """Returns the first process's value in all processes.

  All processes must call it together.

  Args:
    value: anything that JSON holds; tuples become lists. Only the first
      process's value matters.
  """
  if jax.process_count() == 1:
    return value
  data = json.dumps(value).encode()
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
  # Powers of two, since each size of an array compiles a program.
  room = max(1024, 1 << (size - 1).bit_length())
  padded = np.frombuffer(data[:room].ljust(room), np.uint8)
  padded = multihost_utils.broadcast_one_to_all(padded)
  return json.loads(np.asarray(padded, np.uint8).tobytes())
