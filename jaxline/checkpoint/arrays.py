"""Arrays in, arrays out, and the checksum of each file.

Orbax writes them. TensorStore reads them, part by part for each device.
"""

import base64
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import logging as std_logging
import math
import os
import pathlib
import re
import sys
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxline.checkpoint import files

# Arrays are cut into files of at most this many bytes.
_FILE_BYTES = 256 << 20
# Of arrays, bytes that are on their way from the disk at once.
_READ_BYTES = 1 << 28
# As many as Orbax: of network disks, more at once are faster.
_READS = ts.Context({'file_io_concurrency': {'limit': 128}})
_T = TypeVar('_T')


# Writing.


@functools.cache  # Once, and for good: writes may report after a save.
def _quieten() -> None:
  """Silences what Orbax logs of a save; errors are raised.

  At the first array that cannot be written, Orbax closes the event loop to
  which the writes of the others would report, and asks for no other's error.
  """
  hook = sys.unraisablehook

  def unraisable(error: Any) -> None:
    if str(error.exc_value) != 'Event loop is closed':
      hook(error)

  sys.unraisablehook = unraisable
  for logger in ('asyncio', 'absl'):
    std_logging.getLogger(logger).addFilter(
      lambda record: '.orbax-checkpoint-tmp' not in record.getMessage()
    )


@dataclasses.dataclass
class Content(ocp.args.CheckpointArgs):
  """One checkpoint, in host memory.

  Attributes:
    arrays: name of the array's directory -> array.
    record: what checkpoint.json will hold.
    process: what process_N.json of this process will hold.
  """

  arrays: dict[str, Any]
  record: dict[str, Any]
  process: dict[str, Any]


class _Handler(ocp.CheckpointHandler):
  """Writes a `Content` into the directory that Orbax will rename."""

  def __init__(self) -> None:
    # No OCDBT: evaluation reads, and verifies, only the arrays that it needs.
    # No compression: weights do not compress, and it takes most of the time.
    # The arrays are our own copies: another one would take memory for nothing.
    types = ocp.type_handlers
    self._arrays = ocp.PyTreeCheckpointHandler(
      use_ocdbt=False,
      use_zarr3=True,
      use_compression=False,
      multiprocessing_options=_multiprocessing_options(),
      type_handler_registry=types.create_type_handler_registry(
        (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, types.ArrayHandler()),
      ),
    )

  def save(self, directory: Any, args: Content) -> None:
    """Writes all; returns when all processes have written theirs."""
    folder = pathlib.Path(directory)
    process, processes = jax.process_index(), jax.process_count()
    if process == 0:
      files.write_json(folder / files.RECORD, args.record)
    files.write_json(folder / f'process_{process}.json', args.process)
    if args.arrays:
      arrays = directory / files.ARRAYS
      if process == 0:
        arrays.mkdir()
      barrier('directory')
      save_args = jax.tree.map(
        lambda x: ocp.SaveArgs(chunk_byte_size=_FILE_BYTES), args.arrays
      )
      self._arrays.save(
        arrays, args=ocp.args.PyTreeSave(args.arrays, save_args)
      )
      barrier('arrays')
      if process == 0:
        self._arrays.finalize(arrays)
    barrier('content')
    files.write_checksums(folder, process, processes)

  def finalize(self, directory: Any) -> None:
    """Hashes, on the first process, what the others did not see yet."""
    # The listing of a network file system may be some seconds old.
    files.complete_checksums(pathlib.Path(directory))

  def restore(self, directory: Any, args: Any = None) -> Any:
    """Is not used: see `read`."""
    raise NotImplementedError


ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)(
  Content
)


def write(content: Content, place: pathlib.Path) -> None:
  """Writes a checkpoint, which appears in one rename."""
  _quieten()
  with os_errors():
    ocp.Checkpointer(
      _Handler(),
      multiprocessing_options=_multiprocessing_options(),
      atomicity_options=ocp.options.AtomicityOptions(
        ocp.options.AtomicityMode.ATOMIC_RENAME
      ),
    ).save(place, args=content)


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
  """Makes an OSError of what TensorStore says of the operating system's."""
  try:
    yield
  except ValueError as e:
    # "RESOURCE_EXHAUSTED: ... No space left on device [os_error_code='28']"
    if match := re.search(r"\[os_error_code='(\d+)'\]", str(e)):
      number = int(match[1])
      raise OSError(number, os.strerror(number)) from e
    raise


def _multiprocessing_options() -> Any:
  """Returns the options with which Orbax knows all processes."""
  # With the processes named, Orbax meets through the coordination service;
  # else by a program on the devices, which a background thread must not run.
  return ocp.options.MultiprocessingOptions(
    primary_host=0, active_processes=set(range(jax.process_count()))
  )


def barrier(name: str) -> None:
  """Waits for all processes; on any thread."""
  if jax.process_count() > 1:
    # Orbax wants another name each time; the order is the same everywhere.
    _barrier_counts[name] += 1
    ocp.multihost.sync_global_processes(
      f'jaxline:{name}:{_barrier_counts[name]}',
      processes=set(range(jax.process_count())),
    )


_barrier_counts = collections.Counter[str]()


def to_host(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Copies arrays so that no later step can change them.

  Returns:
    Numpy arrays; of an array that spans several hosts, a jax.Array in host
    memory.
  """
  live = {
    name: jax.random.key_data(x) if is_key(x) else x
    for name, x in arrays.items()
  }
  for x in live.values():  # All on their way before the first is awaited.
    if isinstance(x, jax.Array) and x.is_fully_addressable:
      x.copy_to_host_async()
  return {name: _host_copy(x) for name, x in live.items()}


def _host_copy(x: Any) -> Any:
  if not isinstance(x, jax.Array):
    return np.array(x)
  if x.is_fully_addressable:
    on_cpu = next(iter(x.devices())).platform == 'cpu'
    # What this gives is a view of the device's own memory on a CPU, unless it
    # was put together from shards; else it is a copy already.
    return np.array(x, copy=(on_cpu and x.is_fully_replicated) or None)
  return jax.device_put(x, x.sharding.with_memory_kind('pinned_host'))


def store(live: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Copies arrays to the host, and gives each a directory.

  Args:
    live: name -> array, on the devices or not.

  Returns:
    Directory -> array, and name -> description for the record.
  """
  stored, described = {}, {}
  for i, (name, x) in enumerate(to_host(live).items()):
    tail = re.sub(r'[^A-Za-z0-9_.-]+', '.', name)[-100:].strip('.')
    file = f'{i:04d}.{tail}'
    about = {'file': file, **_about(live[name], x)}
    if not can_store(x):
      raise TypeError(f'{name} is an array of {x.dtype}, which Zarr has not.')
    if x.size and _type_on_disk(x.dtype.name) != x.dtype.name:
      stored[file] = np.asarray(x).view(np.uint8)
    elif x.size:
      stored[file] = x
    else:
      about['file'] = None  # Orbax takes none that is empty.
    described[name] = about
  return stored, described


def to_json(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Makes JSON of small arrays."""
  return {
    name: {
      **_about(arrays[name], x),
      'base64': base64.b64encode(x.tobytes()).decode('ascii'),
    }
    for name, x in to_host(arrays).items()
  }


def _about(live: Any, x: Any) -> dict[str, Any]:
  about: dict[str, Any] = {'shape': list(x.shape), 'dtype': x.dtype.name}
  if is_key(live):
    about['key'] = str(jax.random.key_impl(live))
  return about


# Reading.


class Reader:
  """A checkpoint's files.

  TensorStore reads the arrays, and is told shape and type of each: it refuses a
  file that holds something else, and takes no missing chunk for zeros.
  """

  def __init__(self, path: pathlib.Path):
    """Reads nothing yet."""
    self.path = path

  @functools.cached_property
  def sums(self) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of each file: see `files.read_checksums`."""
    return files.read_checksums(self.path)

  @functools.cached_property
  def record(self) -> dict[str, Any]:
    """What it says of itself, verified: see `files.read_record`."""
    self.verify(lambda file: file == files.RECORD)
    return files.read_record(self.path)

  @property
  def described(self) -> dict[str, dict[str, Any]]:
    """Name of each array -> its file, shape and type, in the record."""
    return self.record['arrays']

  def verify(
    self,
    wanted: Callable[[str], bool] = lambda name: True,
    share: slice = slice(None),
  ) -> None:
    """Compares files with their checksums.

    Files that were not there when it was written (an editor's, a file
    system's) are ignored.

    Args:
      wanted: of a file's relative name, whether to look at it.
      share: of these, which to look at, where processes share the work.

    Raises:
      files.DamagedError: with one argument for each file that differs.
      OSError: a file cannot be read.
    """
    problems = []
    for name in sorted(filter(wanted, self.sums))[share]:
      size, crc = self.sums[name]
      found = None
      with contextlib.suppress(*files.MISSING):
        found = files.checksum(self.path / name, size)
      if found is None:
        problems.append(f'{name} is missing')
      elif found[0] != size:
        problems.append(f'{name} has {found[0]} bytes, {size} were written')
      elif found[1] != crc:
        problems.append(f'{name} is not as it was written (its CRC differs)')
    if problems:
      raise files.DamagedError(*problems)

  def require_arrays(
    self, wants: Callable[[str], bool], share: slice = slice(None)
  ) -> None:
    """Verifies all files but those of arrays that are not wanted.

    Args:
      wants: of an array's name, whether it will be read.
      share: of the files, which to look at, where processes share the work.

    Raises:
      files.DamagedError: it is not as it was written.
      OSError: a file cannot be read.
    """
    verified_or_unwanted = {
      files.RECORD,
      *(
        f'{files.ARRAYS}/{about["file"]}'
        for name, about in self.described.items()
        if not wants(name)
      ),
    }
    self.verify(
      lambda file: '/'.join(file.split('/')[:2]) not in verified_or_unwanted,
      share,
    )

  def _open(self, names: Iterable[str]) -> dict[str, Any]:
    """Opens arrays; of one without elements the value is None."""
    # Bytes of the chunks with checksums below the directory of each array.
    sizes = collections.Counter[str]()
    for file, (size, _) in self.sums.items():
      top, *below = file.split('/')
      if top == files.ARRAYS and below[1:] and below[1:] != ['zarr.json']:
        sizes[below[0]] += size
    opening = {}
    for name in names:
      about = self.described[name]
      file, needed = about['file'], num_bytes(about)
      with self._refused(name):
        # Before memory is taken for it, since it is not compressed. Only names
        # of directories here have a size, so no other path is opened.
        if needed > sizes[file]:
          raise ValueError('its files are smaller')
        opening[name] = _open_zarr(self.path, about) if needed else None
    opened = {}
    for name, future in opening.items():
      with self._refused(name):
        opened[name] = future and future.result()
    return opened

  @contextlib.contextmanager
  def _refused(self, name: str) -> Iterator[None]:
    """Refuses an array of verified files that TensorStore cannot read."""
    try:
      with os_errors():
        yield
    except (*files.MISSING, ValueError) as e:
      if not self.path.exists():
        raise files.DamagedError('it was removed while it was read') from e
      about = self.described[name]
      raise files.RefusedError(
        f'{files.ARRAYS}/{about["file"]} does not hold all of the array'
        f' {name!r}, which is {about["dtype"]}{about["shape"]} in'
        f' {files.RECORD} ({str(e)[:200]})'
      ) from e

  def read(
    self, targets: Mapping[str, Any], sources: Mapping[str, str] | None = None
  ) -> Iterator[tuple[str, Any]]:
    """Yields name and array, some of them ahead; their files are verified.

    Args:
      targets: name -> jax.ShapeDtypeStruct with a sharding; without one, or
        None, the array comes as numpy.
      sources: name -> name of the array here, where that is another.

    Raises:
      files.DamagedError: one is not there.
      files.RefusedError: one is not as the record says.
      OSError: one cannot be read.
    """
    source_of = {name: name for name in targets} | dict(sources or {})
    opened = self._open(dict.fromkeys(source_of.values()))
    started: dict[str, Callable[[], Any]] = {}
    left, on_their_way = collections.deque(targets), 0
    for name, target in targets.items():
      while left and (left[0] == name or on_their_way < _READ_BYTES):
        soon = left.popleft()
        on_their_way += num_bytes(self.described[source_of[soon]])
        about = self.described[source_of[soon]]
        started[soon] = _start(opened[source_of[soon]], about, targets[soon])
      with self._refused(source_of[name]):
        x = started.pop(name)()
      about = self.described[source_of[name]]
      on_their_way -= num_bytes(about)
      yield name, as_saved(x, about, target)
      del x


def _open_zarr(checkpoint: pathlib.Path, about: Mapping[str, Any]) -> Any:
  """Starts to open an array."""
  folder = checkpoint / files.ARRAYS / about['file']
  spec = {
    'driver': 'zarr3',
    'kvstore': {'driver': 'file', 'path': f'{folder}/'},
    'metadata': {
      'shape': about['shape'],
      'data_type': _type_on_disk(about['dtype']),
      'chunk_key_encoding': {'name': 'default'},
    },
    'fill_missing_data_reads': False,
  }
  return ts.open(spec, open=True, context=_READS)


def _start(
  opened: Any, about: Mapping[str, Any], target: Any
) -> Callable[[], Any]:
  """Starts to read an array; returns a function that returns it."""
  dtype = jnp.dtype(about['dtype'])
  if opened is None:
    return lambda: np.zeros(about['shape'], dtype)
  sharding = getattr(target, 'sharding', None)
  is_viewed = _type_on_disk(dtype.name) != dtype.name
  if sharding is None or is_key(target) or is_viewed:
    reading = opened.read()
    return lambda: reading.result().view(dtype)
  # Several devices may have the same part. (Slices have no hash.)
  indices = sharding.addressable_devices_indices_map(opened.shape).values()
  parts = {str(index): index for index in indices}
  reads = {key: opened[index].read() for key, index in parts.items()}
  return lambda: jax.make_array_from_callback(
    opened.shape, sharding, lambda index: reads[str(index)].result()
  )


def as_saved(x: Any, about: Mapping[str, Any], target: Any) -> Any:
  """Makes of what was read what was saved."""
  if 'key' in about and is_key(target):
    x = jax.random.wrap_key_data(jnp.asarray(x), impl=about['key'])
  sharding = getattr(target, 'sharding', None)
  if sharding is None or getattr(x, 'sharding', None) == sharding:
    return x
  return jax.device_put(x, sharding)


def from_json(described: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns what `to_json` got."""
  arrays = {}
  for name, about in described.items():
    data = bytearray(base64.b64decode(about['base64']))
    if len(data) != num_bytes(about):
      raise files.RefusedError(f'{name} has {len(data)} bytes')
    arrays[name] = np.ndarray(about['shape'], jnp.dtype(about['dtype']), data)
  return arrays


def can_store(x: Any) -> bool:
  """Returns whether `store` takes arrays of this type."""
  # TensorStore has its types by their names.
  is_narrow = x.dtype.isbuiltin == 2 and x.dtype.itemsize == 1
  return x.dtype.isnative and (hasattr(ts, x.dtype.name) or is_narrow)


def _type_on_disk(name: str) -> str:
  return name if hasattr(ts, name) else 'uint8'


def num_bytes(about: Mapping[str, Any]) -> int:
  """Returns how many bytes the elements of a described array take."""
  return math.prod(about['shape']) * jnp.dtype(about['dtype']).itemsize


def saved_shape(about: Mapping[str, Any]) -> str:
  """Returns type and shape of a described array, as text."""
  if 'key' in about:
    key = jax.eval_shape(lambda: jax.random.key(0, impl=about['key']))
    # The last axis is the key's own.
    return f'{key.dtype}{about["shape"][:-1]}'
  return f'{about["dtype"]}{about["shape"]}'


def is_key(x: Any) -> bool:
  """Returns whether something is, or has the type of, an array of keys."""
  return x is not None and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def together(read: Callable[[], _T]) -> _T:
  """Calls a function in all processes; what one finds damaged, all raise.

  Args:
    read: reads something, or finds it damaged.

  Returns:
    What it returns.

  Raises:
    files.DamagedError: a process found it damaged.
  """
  error: files.DamagedError | None = None
  try:
    result = read()
  except files.DamagedError as e:
    error = e
  if jax.process_count() > 1:
    said = multihost_utils.process_allgather(np.bool_(error is not None))
    if said.any() and error is None:
      error = files.DamagedError(f'processes {np.flatnonzero(said)} say so')
  if error is not None:
    raise error
  return result
