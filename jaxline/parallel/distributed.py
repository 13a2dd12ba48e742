"""Connects the processes of a run and lets process 0 decide for all.

docs/reference/launching.md describes `config.distributed`.
"""

import collections
from collections.abc import Callable, Mapping
from concurrent import futures
import importlib
import json
import os
import queue
import re
import threading
from typing import Any, TypeVar

from absl import logging
import jax
from jax._src import clusters  # JAX has no public names for these.
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.clusters import cloud_tpu_cluster
from jax.experimental import multihost_utils

from jaxline import errors
from jaxline.base.keys import MAPPINGS, Check, Key

T = TypeVar('T')

MODES = ('auto', 'off')
# Maps the keys of `config.distributed` to environment variables.
VARIABLES = {
  'coordinator': 'JAX_COORDINATOR_ADDRESS',
  'num_processes': 'JAX_NUM_PROCESSES',
  'process_id': 'JAX_PROCESS_ID',
}
_CONNECT_SECS = int(os.environ.get('JAX_INITIALIZATION_TIMEOUT', '300'))
_HEARTBEAT_SECS = int(os.environ.get('JAX_HEARTBEAT_TIMEOUT_SECONDS', '100'))


def _check(source: str, value: Mapping[str, Any]) -> bool:
  errors.check_names(value, VARIABLES, 'key', source)
  coordinator, count, process = (value.get(key) for key in VARIABLES)
  if not (
    re.fullmatch(r'.+:\d+', str(coordinator))
    and isinstance(count, int)
    and isinstance(process, int)
    and 0 <= process < count
  ):
    raise errors.UsageError(
      f"{source}: {dict(value)}; expected a coordinator such as 'node0:1234',"
      ' num_processes, and a process_id from 0 to num_processes - 1 that is'
      ' different in each process.'
    )
  return True


KEYS = (
  Key('distributed', 'auto', Check(
        f'one of {MODES}, or a dict with the keys {tuple(VARIABLES)}',
        lambda x: x in MODES or (
          isinstance(x, MAPPINGS) and _check('config.distributed', x)), object),
      'How processes connect. `auto` uses a cluster that JAX knows or the'
      " launcher's variables; without either, the run has one process. `off`:"
      ' the run has one process. See docs/reference/launching.md.'),
)  # fmt: skip


def has_started() -> bool:
  """Returns whether JAX has started and no longer reads settings."""
  return xla_bridge.backends_are_initialized()


def has_others() -> bool:
  """Returns whether this process is connected to other processes of the run."""
  # `jax.process_count` would initialize the devices.
  count = jax_distributed.global_state.num_processes
  return jax.distributed.is_initialized() and (count or 1) > 1


def initialize(value: Any) -> None:
  """Connects to the other processes of the run, if there are any.

  Call it with `config.distributed` before you use any device. If this process
  cannot connect in time, JAX prints an error and ends it.
  """
  KEYS[0].check.require('config.distributed', value)
  if value != 'off' and not jax.distributed.is_initialized():
    place = _found() if value == 'auto' else dict(value)
    if place is not None and place['num_processes'] > 1:
      _connect(place)
  if has_others():
    # Otherwise, if one of three or more processes is lost later, gloo aborts
    # some of the others with the error 'collective mismatch'.
    multihost_utils.sync_global_devices('start')


def _connect(place: dict[str, Any]) -> None:
  logging.info('Connecting to the other processes: this is %s.', place)
  # Otherwise gRPC would connect to this address through `http_proxy`.
  host = place['coordinator'].rpartition(':')[0].strip('[]')
  env, key = os.environ, 'no_grpc_proxy'
  env[key] = f'{env.get(key, env.get("no_proxy", ""))},{host}'.lstrip(',')
  connected: futures.Future[None] = futures.Future()

  def connect() -> None:
    try:
      jax.distributed.initialize(
        place['coordinator'],
        place['num_processes'],
        place['process_id'],
        local_device_ids=place.get('local_device_ids'),
        # JAX does not have to detect values, since all are given.
        cluster_detection_method='deactivate',
        initialization_timeout=_CONNECT_SECS,
        heartbeat_timeout_seconds=_HEARTBEAT_SECS,
      )
      connected.set_result(None)
    except BaseException as e:
      connected.set_exception(e)

  # A signal interrupts `result`, but not JAX's call.
  threading.Thread(target=connect, name='rendezvous', daemon=True).start()
  connected.result()


def _found() -> dict[str, Any] | None:
  """Returns this process's place from the environment, or None."""
  given: dict[str, Any] = {
    key: int(text) if text.isdecimal() else text
    for key, name in VARIABLES.items()
    if (text := os.environ.get(name))
  }
  # A cluster knows the rest, so the address may be given alone.
  cluster = None if given.keys() - {'coordinator'} else _cluster()
  if cluster is None:
    if given:
      _check(f'The variables {", ".join(VARIABLES.values())}', given)
    return given or None
  count = cluster.get_process_count()
  if count == 1:
    return None
  local = cluster.get_local_process_id()
  return {
    'num_processes': count,
    'process_id': cluster.get_process_id(),
    'coordinator': given.get('coordinator')
    or cluster.get_coordinator_address(
      timeout_secs=_CONNECT_SECS,
      override_coordinator_port=os.environ.get('JAX_COORDINATOR_PORT'),
    ),
    # Give one GPU to each process of Slurm or MPI.
    'local_device_ids': None if local is None or _keeps_gpus() else [local],
  }


def _cluster() -> type[clusters.ClusterEnv] | None:
  # JAX's own loop would accept a pod that belongs to no job (a notebook), and a
  # TPU VM whose TPU is not used.
  platforms = jax.config.jax_platforms or 'tpu'  # type: ignore[attr-defined]
  for cluster in clusters.ClusterEnv._cluster_types:
    if issubclass(cluster, cloud_tpu_cluster.BaseTpuCluster):
      is_usable = 'tpu' in platforms.split(',')
    elif issubclass(cluster, clusters.K8sCluster):
      is_usable = 'JOB_COMPLETION_INDEX' in os.environ
      if is_usable:
        # Fail without it: JAX would only warn, and each pod would train alone.
        importlib.import_module('kubernetes')
    else:
      is_usable = not cluster.opt_in_only_method
    if is_usable and cluster.is_env_present():
      return cluster
  return None


def _keeps_gpus() -> bool:
  """Returns whether JAX chooses the GPUs of this process of Slurm or MPI."""
  # If a node has only one process, that process uses all GPUs of the node.
  per_node = os.environ.get('SLURM_STEP_TASKS_PER_NODE', '')
  return (
    bool(os.environ.get('JAX_LOCAL_DEVICE_IDS'))  # JAX selects the GPUs by it.
    or re.fullmatch(r'1(\(x\d+\))?(,1(\(x\d+\))?)*', per_node) is not None
    or os.environ.get('OMPI_COMM_WORLD_LOCAL_SIZE') == '1'
  )


# The number of the next decision of each series.
_numbers: dict[str, int] = collections.defaultdict(int)
# JAX requires a finite timeout. If a process is lost, JAX ends the others.
_FOREVER_MS = 10**12


def gather_and_decide(
  value: Any,
  choose: Callable[[list[Any]], T],
  error: BaseException | None = None,
  series: str = 'decision',
) -> T:
  """Gathers a value from each process; returns process 0's choice in all.

  It uses the coordination service, so a background thread may call it. All
  processes must call it in the same order, on one thread per series.

  Args:
    value: JSON value of this process.
    choose: Maps the list of all values to a JSON value; process 0 calls it.
    error: Failure of this process. Then nothing is chosen: this process raises
      the error, and the other processes raise an OSError or a RuntimeError.
    series: Name of the thread's series of decisions, which are numbered.
  """
  if jax.process_count() == 1:
    if error is not None:
      raise error
    return choose([value])
  client: Any = jax_distributed.global_state.client
  number = _numbers[series]
  _numbers[series] += 1
  place = f'jaxline/{series}'
  process, processes = jax.process_index(), jax.process_count()

  def put(key: str, value: Any, error: BaseException | None) -> None:
    text = None if error is None else f'process {process}: {error}'
    said = json.dumps((value, text, isinstance(error, OSError)))
    client.key_value_set(f'{place}/{number}/{key}', said)

  def get(key: str) -> Any:
    said = client.blocking_key_value_get(f'{place}/{number}/{key}', _FOREVER_MS)
    value, text, is_os_error = json.loads(said)
    if text is not None:
      raise (OSError if is_os_error else RuntimeError)(text)
    return value

  if process == 0:
    chosen: Any = None
    try:
      values = [value, *(get(str(i)) for i in range(1, processes))]
      if error is None:
        chosen = choose(values)
    except Exception as e:
      error = error or e
    put('chosen', chosen, error)
  else:
    put(str(process), value, error)
  if error is not None:
    raise error
  chosen = get('chosen')
  if process == 0 and number > 0:
    # All took part in this decision, so all have read the previous one.
    client.key_value_delete(f'{place}/{number - 1}/')
  return chosen


def broadcast_from_process_0(value: T, series: str = 'chief') -> T:
  """Returns process 0's value in all processes."""
  return gather_and_decide(value, lambda x: x[0], series=series)


class Agreement:
  """Lets the clock of process 0 decide when all processes act together.

  A request of process 0 wakes a thread in each process. These threads hold the
  lock of `is_due` while they exchange the newest step of each process. The
  action is due one step after the largest of these; no process has passed this
  step. Without a request, `is_due` only takes the lock.

  All processes must call `is_due` with the same names after the same steps.
  """

  def __init__(self) -> None:
    self.is_alone = jax.process_count() == 1
    _numbers['agreement'] += 1
    self._series = f'agreement/{_numbers["agreement"]}'
    self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    self._step = -1
    self._due: set[tuple[str, int]] = set()
    self._asked: set[str] = set()  # Open requests of this process.
    self._lock = threading.Lock()
    self._error: BaseException | None = None
    self._thread: threading.Thread | None = None

  def is_due(self, name: str, step: int, is_wanted: bool) -> bool:
    """Returns whether to act after this step, the same in all processes.

    `is_wanted` asks for the action: at once if there is only one process, and
    soon otherwise. Only the value of process 0 matters.
    """
    if self.is_alone:
      return is_wanted
    if self._thread is None:
      self._thread = threading.Thread(target=self._answer, daemon=True)
      self._thread.start()
    with self._lock:
      if self._error is not None:
        raise self._error
      self._step = int(step)  # A restored step can be an array.
      if (name, self._step) in self._due:
        self._due.remove((name, self._step))
        self._asked.discard(name)
        return True
      if is_wanted and name not in self._asked and jax.process_index() == 0:
        self._asked.add(name)
        self._requests.put(name)
    return False

  def close(self) -> None:
    """Ends the thread. Call it when all processes have done their last step."""
    if self._thread is not None:
      self._requests.put('')
      self._thread.join()

  def _answer(self) -> None:
    """Answers the requests of process 0, the last of which is ''."""
    name: str | None = None
    is_chief = jax.process_index() == 0
    try:
      while name != '':
        request = self._requests.get() if is_chief else ''
        name = broadcast_from_process_0(request, self._series)
        with self._lock:
          newest = gather_and_decide(self._step, max, series=self._series)
          self._due.add((name, newest + 1))
    except BaseException as e:
      self._error = e
