"""Arrays in, arrays out, and the checksum of each file.

Orbax writes them. TensorStore reads them, part by part for each device.
"""

import base64
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import dataclasses
import errno
import functools
import json
import logging as std_logging
import math
import os
import pathlib
import re
import sys
from typing import Any, TypeVar

from absl import logging
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxline.checkpoint import files

# Arrays are cut into files of at most this many bytes.
_FILE_BYTES = 256 << 20
_BLOCK = 4096  # Bytes that a file takes at least, on most file systems.
_ORBAX = os.path.join(os.path.dirname(ocp.__file__), '')
# Of arrays, bytes that are on their way from the disk at once.
_READ_BYTES = 1 << 28
# As many as Orbax: of network disks, more at once are faster.
_READS = ts.Context({'file_io_concurrency': {'limit': 128}})
_T = TypeVar('_T')


# Writing.


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
  """Leaves what Orbax logs of a save out of the log; errors are raised."""
  log = logging.get_absl_logger()
  is_ours = lambda record: not record.pathname.startswith(_ORBAX)
  log.addFilter(is_ours)
  try:
    yield
  finally:
    log.removeFilter(is_ours)


@functools.cache  # Once, and for good: writes may report after a save.
def _ignore_closed_loops() -> None:
  """Silences what TensorStore's threads say once Orbax has given up.

  At the first array that cannot be written, Orbax closes the event loop to
  which the writes of the others would report, and asks for no other's error.
  """
  hook = sys.unraisablehook

  def unraisable(error: Any) -> None:
    if str(error.exc_value) != 'Event loop is closed':
      hook(error)

  sys.unraisablehook = unraisable
  std_logging.getLogger('asyncio').addFilter(
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

  def num_bytes(self) -> int:
    """Returns about how much room it takes, in files of whole blocks."""
    small = len(json.dumps([self.record, self.process], indent=1))
    # Each array has a file of numbers and one that describes them.
    sizes = [small, *(x.nbytes + _BLOCK for x in self.arrays.values())]
    return sum(-(-size // _BLOCK) * _BLOCK for size in sizes)


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
  _ignore_closed_loops()
  with quiet_orbax(), os_errors():
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
    about = {'file': file, **_about(live[name], x), 'dtype': x.dtype.name}
    # TensorStore has its types by their names.
    if not x.dtype.isnative or not hasattr(ts, x.dtype.name):
      about['bytes_of'] = _dtype_to_json(x.dtype)
      x = np.frombuffer(x.tobytes(), np.uint8)
    if x.size:
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
      'dtype': _dtype_to_json(x.dtype),
      'base64': base64.b64encode(x.tobytes()).decode('ascii'),
    }
    for name, x in to_host(arrays).items()
  }


def _about(live: Any, x: Any) -> dict[str, Any]:
  kind = 'jax' if isinstance(live, jax.Array) else 'numpy'
  about: dict[str, Any] = {'shape': list(x.shape), 'kind': kind}
  if is_key(live):
    about['key'] = str(jax.random.key_impl(live))
  return about


# Reading.


class Reader:
  """A checkpoint's files; each is listed, hashed and opened once.

  TensorStore reads the arrays, and is told shape and type of each: it refuses a
  file that holds something else, and takes no missing chunk for zeros.
  """

  def __init__(self, path: pathlib.Path):
    """Lists the files.

    Raises:
      files.RefusedError: there is a link, a FIFO or a device.
    """
    self.path = path
    self._there = frozenset(files.regular_files(path))
    # Name -> TensorStore; None is an array without elements.
    self._opened: dict[str, Any] = {}

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
      files.RefusedError: it holds what no save writes.
      files.DamagedError: with one argument for each file that differs.
      files.UnreadableError: a file cannot be read, which may pass.
    """
    problems = []
    for name in sorted(filter(wanted, self.sums))[share]:
      size, crc = self.sums[name]
      read = functools.partial(files.checksum, self.path / name, size)
      found = None
      if name in self._there:  # Else it may be no name of a file at all.
        with contextlib.suppress(*files.MISSING):
          found = files.retried(read, name)
      if found is None:
        problems.append(f'{name} is missing')
      elif found[0] != size:
        problems.append(f'{name} has {found[0]} bytes, {size} were written')
      elif found[1] != crc:
        problems.append(f'{name} is not as it was written (its CRC differs)')
    if problems:
      raise files.DamagedError(*map(files.printable, problems))

  @files.well_formed()
  def require_arrays(
    self, wants: Callable[[str], bool], share: slice = slice(None)
  ) -> None:
    """Verifies all files but those of arrays that are not wanted.

    Args:
      wants: of an array's name, whether it will be read.
      share: of the files, which to look at, where processes share the work.

    Raises:
      files.RefusedError: it is as it was written, but no save writes such.
      files.DamagedError: it is not as it was written.
      files.UnreadableError: a file cannot be read, which may pass.
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
    self.check(filter(wants, self.described))

  @files.well_formed()
  def check(self, names: Iterable[str] | None = None) -> None:
    """Opens arrays, once; refuses those that are not as the record says.

    Args:
      names: of the arrays; None is all.

    Raises:
      files.RefusedError: naming the first such array.
      files.DamagedError: the checkpoint was removed meanwhile.
    """
    # Sizes of the files with checksums below the directory of each array.
    sizes = collections.defaultdict(list)
    for file in self._there.intersection(self.sums):
      top, *below = file.split('/')
      if top == files.ARRAYS and len(below) > 1:
        sizes[below[0]].append(self.sums[file][0])
    opening = {}
    for name in dict.fromkeys(self.described if names is None else names):
      if name not in self._opened:
        with self._refused(name):
          opening[name] = self._open(self.described[name])
    for name, future in opening.items():
      opened = None
      if future is not None:
        with self._refused(name):
          opened = future.result()
          chunk = opened.chunk_layout.write_chunk.shape or ()
          grid = zip(opened.shape, chunk, strict=True)
          chunks = math.prod(-(-n // c) for n, c in grid)
          needed = chunks * math.prod(chunk) * opened.dtype.numpy_dtype.itemsize
          found = sizes[self.described[name]['file']]
          # One more is zarr.json.
          if len(found) <= chunks or sum(found) < needed:
            raise ValueError('chunks are missing')
      self._opened[name] = opened

  def _open(self, about: Mapping[str, Any]) -> Any:
    """Starts to open an array; None is one without elements."""
    file, (shape, dtype) = about['file'], stored_as(about)
    if (file is None) != (math.prod(shape) == 0):
      raise ValueError('what has no file has no elements')
    if file is None:
      return None
    if not re.fullmatch(r'\d+\.[\w.-]*', file):
      raise ValueError('no save gives such a name')
    folder = self.path / files.ARRAYS / file
    # TensorStore would crash at JSON that is nested too deeply.
    files.read_json(folder / 'zarr.json', f'{file}/zarr.json')
    spec = {
      'driver': 'zarr3',
      'kvstore': {'driver': 'file', 'path': f'{folder}/'},
      'metadata': {
        'shape': shape,
        'data_type': dtype.name,
        'chunk_key_encoding': {'name': 'default'},
      },
      'fill_missing_data_reads': False,
    }
    return ts.open(spec, open=True, context=_READS)

  @contextlib.contextmanager
  def _refused(self, name: str) -> Iterator[None]:
    """Refuses an array of verified files that TensorStore cannot read."""
    try:
      with os_errors():
        yield
    except (*files.MISSING, ValueError) as e:
      if not os.path.lexists(self.path):
        raise files.DamagedError('it was removed while it was read') from e
      if isinstance(e, files.RefusedError):
        raise
      about = self.described[name]
      raise files.RefusedError(
        f'{files.ARRAYS}/{about["file"]} does not hold all of the array'
        f' {name!r}, which is {about["dtype"]}{about["shape"]} in'
        f' {files.RECORD} ({files.printable(e)[:200]})'
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
      files.UnreadableError: one cannot be read, which may pass.
    """
    source_of = {name: name for name in targets} | dict(sources or {})
    files.retried(lambda: self.check(source_of.values()), files.ARRAYS)
    started: dict[str, Callable[[], Any]] = {}

    def get(name: str) -> Any:
      source, target = source_of[name], targets[name]
      with self._refused(source):
        # At a further try it is started anew.
        return (started.pop(name, None) or self._start(source, target))()

    left, on_their_way = collections.deque(targets), 0
    for name, target in targets.items():
      while left and (left[0] == name or on_their_way < _READ_BYTES):
        soon = left.popleft()
        on_their_way += num_bytes(self.described[source_of[soon]])
        started[soon] = self._start(source_of[soon], targets[soon])
      x = files.retried(functools.partial(get, name), files.ARRAYS)
      about = self.described[source_of[name]]
      on_their_way -= num_bytes(about)
      yield name, as_saved(x, about, target)
      del x

  def _start(self, name: str, target: Any) -> Callable[[], Any]:
    """Starts to read an array; returns a function that returns it."""
    opened, about = self._opened[name], self.described[name]
    if opened is None:
      return functools.partial(np.zeros, *stored_as(about))
    sharding = getattr(target, 'sharding', None)
    if sharding is None or is_key(target) or 'bytes_of' in about:
      return opened.read().result
    # Several devices may have the same part. (Slices have no hash.)
    indices = sharding.addressable_devices_indices_map(opened.shape).values()
    parts = {str(index): index for index in indices}
    reads = {key: opened[index].read() for key, index in parts.items()}
    return lambda: jax.make_array_from_callback(
      opened.shape, sharding, lambda index: reads[str(index)].result()
    )


def stored_as(about: Mapping[str, Any]) -> tuple[list[int], np.dtype]:
  """Returns shape and type of an array on the disk."""
  dtype = _dtype_from_json(about.get('bytes_of', about['dtype']))
  if 'bytes_of' in about:
    return [math.prod(about['shape']) * dtype.itemsize], np.dtype(np.uint8)
  return about['shape'], dtype


def as_saved(x: Any, about: Mapping[str, Any], target: Any) -> Any:
  """Makes of what was read what was saved."""
  if 'bytes_of' in about:
    x = _from_bytes(x.tobytes(), about['bytes_of'], about['shape'])
  if 'key' in about and is_key(target):
    x = jax.random.wrap_key_data(jnp.asarray(x), impl=about['key'])
  sharding = getattr(target, 'sharding', None)
  if sharding is None or getattr(x, 'sharding', None) == sharding:
    return x
  if isinstance(x, np.ndarray) and not x.dtype.isnative:
    x = x.astype(x.dtype.newbyteorder('='))  # Devices know no other order.
  return jax.device_put(x, sharding)


def from_json(described: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns what `to_json` got."""
  return {
    name: _from_bytes(
      base64.b64decode(about['base64']), about['dtype'], about['shape']
    )
    for name, about in described.items()
  }


def _dtype_to_json(dtype: np.dtype) -> Any:
  # Those of bfloat16 and its like have no unique name but this.
  is_jax = dtype.isbuiltin == 2
  return dtype.name if is_jax else np.lib.format.dtype_to_descr(dtype)


def _dtype_from_json(description: Any) -> np.dtype:
  """Returns a type as `_dtype_to_json` describes it."""
  if isinstance(description, list):  # A record's fields are lists in JSON.
    dtype = np.lib.format.descr_to_dtype(description)
  else:
    dtype = jnp.dtype(description)
  if dtype.hasobject:
    raise files.RefusedError('an array of Python objects is never stored')
  return dtype


def _from_bytes(data: bytes, dtype_json: Any, shape: list[int]) -> np.ndarray:
  dtype = _dtype_from_json(dtype_json)
  if len(data) != math.prod(shape) * dtype.itemsize:
    raise files.RefusedError(
      f'an array {dtype.name}{shape} has {len(data)} bytes'
    )
  return np.ndarray(shape, dtype, bytearray(data))


def num_bytes(about: Mapping[str, Any]) -> int:
  """Returns how many bytes the elements of a described array take."""
  shape, dtype = stored_as(about)
  return math.prod(shape) * dtype.itemsize


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


# What may be wrong with a checkpoint. The last is the strongest: it may pass,
# and leaves all as it is.
_WRONG = (files.RefusedError, files.DamagedError, files.UnreadableError)


def together(read: Callable[[], _T]) -> _T:
  """Calls a function in all processes; where it fails in one, all raise.

  Args:
    read: reads something, or finds it damaged.

  Returns:
    What it returns.

  Raises:
    files.UnreadableError: a process could not read it.
    files.DamagedError: all could read it, and one found it damaged.
    files.RefusedError: it is as it was written, but no save writes such.
  """
  error: Exception | None = None
  try:
    result = read()
  except _WRONG as e:
    error = e
  kind = next((i for i, c in enumerate(_WRONG, 1) if isinstance(error, c)), 0)
  if jax.process_count() > 1:
    kinds = multihost_utils.process_allgather(np.int32(kind))
    if (worst := kinds.max()) > kind:
      text = f'processes {np.flatnonzero(kinds == worst).tolist()} say so'
      cls = _WRONG[worst - 1]
      may_pass = cls is files.UnreadableError
      error = cls(errno.EIO, text) if may_pass else cls(text)
  if error is not None:
    raise error
  return result
