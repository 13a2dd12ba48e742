"""How arrays get to the disk and back: copied to the host, written by Orbax."""

import base64
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import errno
import itertools
import json
import logging as std_logging
import math
import os
import pathlib
import re
import sys
import threading
from typing import Any

from absl import logging
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxline.checkpoint import files

# Arrays are cut into files of at most this many bytes.
_FILE_BYTES = 256 << 20
_BLOCK = 4096  # Bytes that a file takes at least, on most file systems.
_ORBAX = os.path.join(os.path.dirname(ocp.__file__), '')
# Those beside NumPy's own that TensorStore's zarr3 driver takes.
_ZARR_DTYPES = (
  'bfloat16', 'float8_e3m4', 'float8_e4m3b11fnuz', 'float8_e4m3fn',
  'float8_e4m3fnuz', 'float8_e5m2', 'float8_e5m2fnuz', 'float8_e8m0fnu',
  'float4_e2m1fn', 'int4', 'int2',
)  # fmt: skip
# How Orbax calls what is restored as an array.
_VALUE_TYPES = {'np.ndarray', 'jax.Array'}


def _is_worth_reading(record: Any) -> bool:
  if not record.pathname.startswith(_ORBAX):
    return True
  # The warning says that there is no OCDBT, which is as it should be.
  # An error in a thread of Orbax is raised by the save as well.
  quiet = {
    'ocdbt_utils.py': std_logging.WARNING,
    'future.py': std_logging.ERROR,
  }
  return record.levelno > quiet.get(record.filename, std_logging.INFO)


_quiet_lock = threading.Lock()
_num_quiet = 0  # Threads may save and restore at once.
_hook: Any = None


def _unraisable(error: Any) -> None:
  if str(error.exc_value) != 'Event loop is closed':
    _hook(error)


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
  """Leaves Orbax's dozen lines for each save or restore out of the log.

  Also what TensorStore's threads say once Orbax has given up: at the first
  array that cannot be written it closes the event loop to which the writes of
  the others would report.
  """
  global _num_quiet, _hook
  log = logging.get_absl_logger()
  with _quiet_lock:
    _num_quiet += 1
    if _num_quiet == 1:
      log.addFilter(_is_worth_reading)
      _hook, sys.unraisablehook = sys.unraisablehook, _unraisable
  try:
    yield
  finally:
    with _quiet_lock:
      _num_quiet -= 1
      if _num_quiet == 0:
        log.removeFilter(_is_worth_reading)
        if sys.unraisablehook is _unraisable:  # Else the program's is newer.
          sys.unraisablehook = _hook


@dataclasses.dataclass
class Content(ocp.args.CheckpointArgs):
  """One checkpoint, in host memory.

  Attributes:
    arrays: name of the array's directory -> array.
    record: what checkpoint.json will hold.
    process: what process_N.json of this process will hold.
    waits: called when all is written, before it becomes visible.
  """

  arrays: dict[str, Any]
  record: dict[str, Any]
  process: dict[str, Any]
  waits: Sequence[Callable[[], None]] = ()

  def num_bytes(self) -> int:
    """Returns about how much room it takes, in files of whole blocks."""
    small = len(json.dumps([self.record, self.process], indent=1))
    # Each array has a file of numbers and one that describes them.
    sizes = [small, *(x.nbytes + _BLOCK for x in self.arrays.values())]
    return sum(-(-size // _BLOCK) * _BLOCK for size in sizes)


def _numpy_handler() -> Any:
  # The arrays are our own copies: another one would take memory for nothing.
  return ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)


class Handler(ocp.CheckpointHandler):
  """Writes a `Content` into the directory that Orbax will rename."""

  def __init__(self) -> None:
    # No OCDBT: evaluation reads, and verifies, only the arrays that it needs.
    # No compression: weights do not compress, and it takes most of the time.
    self._arrays = ocp.PyTreeCheckpointHandler(
      use_ocdbt=False,
      use_zarr3=True,
      use_compression=False,
      multiprocessing_options=multiprocessing_options(),
      type_handler_registry=ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _numpy_handler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
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
    for wait in args.waits:
      wait()
    barrier('content')
    files.write_checksums(folder, process, processes)

  def finalize(self, directory: Any) -> None:
    """Hashes, on the first process, what the others did not see yet."""
    # The listing of a network file system may be some seconds old.
    files.complete_checksums(pathlib.Path(directory))

  def restore(self, directory: Any, args: Any = None) -> Any:
    """Reads arrays from a checkpoint's `arrays`.

    Args:
      directory: that one.
      args: name of the array's directory -> Orbax's restore arguments.
    """
    return self._arrays.restore(
      directory,
      args=ocp.args.PyTreeRestore(
        item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True
      ),
    )


ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)(
  Content
)


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
    if str(e).startswith('NOT_FOUND:'):  # An array lacks one of its files.
      raise FileNotFoundError(errno.ENOENT, str(e)) from e
    raise


def multiprocessing_options() -> Any:
  """Returns the options with which Orbax knows all processes."""
  # With the processes named, Orbax meets through the coordination service;
  # else by a program on the devices, which a background thread must not run.
  return ocp.options.MultiprocessingOptions(
    primary_host=0, active_processes=set(range(jax.process_count()))
  )


def barrier(name: str) -> None:
  """Waits for all processes; on any thread."""
  if jax.process_count() > 1:
    # One call a save and name, in the same order everywhere.
    _barrier_counts[name] = _barrier_counts.get(name, 0) + 1
    ocp.multihost.sync_global_processes(
      f'jaxline:{name}:{_barrier_counts[name]}',
      processes=set(range(jax.process_count())),
    )


_barrier_counts: dict[str, int] = {}


# Arrays: live -> host -> stored, and back.


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
  kinds = {m.kind for m in next(iter(x.devices())).addressable_memories()}
  if 'pinned_host' in kinds:
    return jax.device_put(x, x.sharding.with_memory_kind('pinned_host'))
  # On a CPU the devices' memory is the host's.
  return jax.make_array_from_single_device_arrays(
    x.shape, x.sharding, [jnp.copy(s.data) for s in x.addressable_shards]
  )


def _can_be_stored(dtype: Any) -> bool:
  """Returns whether the Zarr 3 driver knows a type."""
  dtype = np.dtype(dtype)
  return dtype.isnative and (
    (dtype.kind in 'biufc' and dtype not in (np.longdouble, np.clongdouble))
    or dtype.name in _ZARR_DTYPES
  )  # fmt: skip


def store(
  live: Mapping[str, Any], host: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Gives each array a directory.

  Args:
    live: name -> array, on the devices.
    host: name -> its copy.

  Returns:
    Directory -> array, and name -> description for the record.
  """
  stored, described = {}, {}
  for i, (name, x) in enumerate(host.items()):
    tail = re.sub(r'[^A-Za-z0-9_.-]+', '.', name)[-100:].strip('.')
    file = f'{i:04d}.{tail}'
    about = {
      'file': file,
      'shape': list(x.shape),
      'dtype': x.dtype.name,
      'kind': 'jax' if isinstance(live[name], jax.Array) else 'numpy',
    }
    if is_key(live[name]):
      about['key'] = str(jax.random.key_impl(live[name]))
    if not _can_be_stored(x.dtype):
      about['bytes_of'] = _dtype_to_json(x.dtype)
      x = np.frombuffer(x.tobytes(), np.uint8)
    if x.size:
      stored[file] = x
    else:
      about['file'] = None  # Orbax takes none that is empty.
    described[name] = about
  return stored, described


def read(
  listing: files.Listing,
  described: Mapping[str, Any],
  targets: Mapping[str, Any],
) -> dict[str, Any]:
  """Reads arrays.

  Args:
    listing: the checkpoint's.
    described: name -> description, as in the record.
    targets: name -> jax.ShapeDtypeStruct with a sharding; without one, or
      None, the array comes as numpy.

  Returns:
    Name -> array.

  Raises:
    files.DamagedError: see `check`.
    OSError: a file is not there, or cannot be read.
  """
  check(listing, {name: described[name] for name in targets})
  requests, restored = {}, {}
  for name, target in targets.items():
    about = described[name]
    sharding = getattr(target, 'sharding', None)
    if about['file'] is None:
      dtype = np.uint8 if 'bytes_of' in about else jnp.dtype(about['dtype'])
      x = np.zeros(about['shape'], dtype)
      restored[name] = _as_saved(x, about, target)
    elif sharding is None or is_key(target) or 'bytes_of' in about:
      requests[about['file']] = ocp.RestoreArgs(restore_type=np.ndarray)
    else:
      requests[about['file']] = ocp.ArrayRestoreArgs(
        sharding=sharding, global_shape=tuple(about['shape'])
      )
  if requests:
    with os_errors(), quiet_orbax():
      folder = epath.Path(listing.path / files.ARRAYS)
      arrays = Handler().restore(folder, requests)
    if not folder.exists():
      # A file that is not there any more is read as zeros.
      raise FileNotFoundError(errno.ENOENT, 'they were removed meanwhile')
    for name, target in targets.items():
      if name not in restored:
        about = described[name]
        restored[name] = _as_saved(arrays[about['file']], about, target)
  return restored


def check(listing: files.Listing, described: Mapping[str, Any]) -> None:
  """Refuses arrays whose files do not hold what the record says.

  An array that was found to be whole is not looked at again.

  Orbax and TensorStore would read a file that is not there as zeros, and take
  as much memory as a shape asks for.

  Args:
    listing: the checkpoint's.
    described: name -> description, as in the record.

  Raises:
    files.DamagedError: naming the first such array.
  """
  described = {n: x for n, x in described.items() if n not in listing.checked}
  for name, about in described.items():
    _check_file(name, about['file'])
  check_listed(described, listing.sizes)
  stored = {n: about for n, about in described.items() if about['file']}
  if not stored:
    return
  folders = _by_folder(listing.sizes)
  arrays = listing.path / files.ARRAYS
  metadata = files.read_json(arrays / '_METADATA', f'{files.ARRAYS}/_METADATA')
  try:
    values = [
      metadata['tree_metadata'][str((about['file'],))]['value_metadata']
      for about in stored.values()
    ]
    is_ours = (
      '_METADATA' in folders
      and not metadata['use_ocdbt']
      and metadata['use_zarr3']
      and not any(value['skip_deserialize'] for value in values)
      and {value['value_type'] for value in values} <= _VALUE_TYPES
      # Another way of Orbax to store values, which it would prefer.
      and not os.path.lexists(arrays / 'checkpoint')
    )
  except (KeyError, TypeError, AttributeError):
    is_ours = False
  if not is_ours:
    raise files.RefusedError(
      f'{files.ARRAYS} does not describe its arrays as a save does'
    )
  for name, about in stored.items():
    file = f'{files.ARRAYS}/{about["file"]}/zarr.json'
    zarr = files.read_json(listing.path / file, file)
    try:
      fits = _fits(zarr, *_stored(about), folders[about['file']])
    except (KeyError, TypeError, AttributeError):
      fits = False
    if not fits:
      raise files.RefusedError(
        f'{files.ARRAYS}/{about["file"]} does not hold all of the array'
        f' {name!r}, which is {about["dtype"]}{about["shape"]} in'
        f' {files.RECORD}'
      )
  listing.checked.update(described)


def check_listed(
  described: Mapping[str, Any], sizes: Mapping[str, int]
) -> None:
  """Refuses arrays that have fewer bytes than the record says.

  Args:
    described: name -> description, as in the record.
    sizes: of the files that may be read: see `files.Listing.sizes`.

  Raises:
    files.RefusedError: naming the first such array.
  """
  folders = _by_folder(sizes)
  for name, about in described.items():
    _check_file(name, about['file'])
    shape, dtype = _stored(about)
    wanted = math.prod(shape) * dtype.itemsize
    has = folders.get(about['file'], {})
    # Nothing is compressed.
    size = sum(size for key, size in has.items() if key != 'zarr.json')
    if wanted > size or (about['file'] and 'zarr.json' not in has):
      raise files.RefusedError(
        f'{files.RECORD} says that the array {name!r} is'
        f' {about["dtype"]}{about["shape"]}, of {wanted} bytes; its files with'
        f' a checksum have {size}'
      )


def _by_folder(sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
  """Returns the directory of each array -> the files in it -> their bytes."""
  folders: dict[str, dict[str, int]] = collections.defaultdict(dict)
  for name, size in sizes.items():
    if name.startswith(f'{files.ARRAYS}/'):
      folder, _, key = name.removeprefix(f'{files.ARRAYS}/').partition('/')
      folders[folder][key] = size
  return folders


def _stored(about: Mapping[str, Any]) -> tuple[list[int], np.dtype]:
  """Returns shape and type of an array on the disk."""
  dtype = _dtype_from_json(about.get('bytes_of', about['dtype']))
  if 'bytes_of' in about:
    return [math.prod(about['shape']) * dtype.itemsize], np.dtype(np.uint8)
  return about['shape'], dtype


def _fits(
  zarr: Any, shape: list[int], dtype: np.dtype, has: Mapping[str, int]
) -> bool:
  """Returns whether a zarr.json is of such an array, and its chunks are there.

  Args:
    zarr: its content.
    shape: the array's.
    dtype: likewise.
    has: the files beside it.
  """
  grid = zarr['chunk_grid']
  chunk = grid['configuration']['chunk_shape']
  separator = zarr['chunk_key_encoding'].get('configuration', {})
  if (
    (zarr['zarr_format'], zarr['node_type']) != (3, 'array')
    or zarr['shape'] != shape
    or zarr['data_type'] != dtype.name
    or grid['name'] != 'regular'
    or zarr['chunk_key_encoding']['name'] != 'default'
    or separator not in ({}, {'separator': '/'})
    or len(chunk) != len(shape)
    or not all(0 < c <= max(n, 1) for c, n in zip(chunk, shape, strict=True))
  ):
    return False
  counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
  if math.prod(counts) > len(has):
    return False
  indices = itertools.product(*map(range, counts))
  return all('/'.join(('c', *map(str, index))) in has for index in indices)


def _check_file(name: str, file: Any) -> None:
  """Refuses what is no name of a directory right in the checkpoint's."""
  if file is None:
    return
  if not isinstance(file, str) or not re.fullmatch(r'\d+\.[\w.-]*', file):
    raise files.RefusedError(
      f'{files.RECORD} says that the array {name!r} is in {file!r}, which is'
      ' no name that a save gives; the file was edited'
    )


def _as_saved(x: Any, about: Mapping[str, Any], target: Any) -> Any:
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


def _dtype_to_json(dtype: np.dtype) -> Any:
  # Those of bfloat16 and its like have no unique name but this.
  is_jax = dtype.isbuiltin == 2
  return dtype.name if is_jax else np.lib.format.dtype_to_descr(dtype)


def _dtype_from_json(description: Any) -> np.dtype:
  """Returns a type as `_dtype_to_json` describes it."""
  dtype = None
  with contextlib.suppress(Exception):  # NumPy raises all kinds.
    if isinstance(description, list):  # A record's fields are lists in JSON.
      dtype = np.lib.format.descr_to_dtype(description)
    elif isinstance(description, str):
      dtype = jnp.dtype(description)
  if dtype is None or dtype.hasobject:
    text = description if isinstance(description, str) else 'of several fields'
    raise files.RefusedError(f'an array has a type that is none: {text!r:.40}')
  return dtype


def _from_bytes(data: bytes, dtype_json: Any, shape: list[int]) -> np.ndarray:
  dtype = _dtype_from_json(dtype_json)
  if len(data) != math.prod(shape) * dtype.itemsize:
    raise files.RefusedError(
      f'an array {dtype.name}{shape} has {len(data)} bytes'
    )
  x = np.empty(shape, dtype)
  if x.nbytes:
    x.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
  return x


def saved_shape(about: Mapping[str, Any]) -> str:
  """Returns type and shape of a described array, as text."""
  if 'key' in about:
    key = jax.eval_shape(lambda: jax.random.key(0, impl=about['key']))
    # The last axis is the key's own.
    return f'{key.dtype}{about["shape"][:-1]}'
  return f'{about["dtype"]}{about["shape"]}'


def to_json(arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Makes JSON of small arrays."""
  described = {}
  for name, x in to_host(arrays).items():
    described[name] = about = {
      'shape': list(x.shape),
      'dtype': _dtype_to_json(x.dtype),
      'kind': 'jax' if isinstance(arrays[name], jax.Array) else 'numpy',
      'base64': base64.b64encode(x.tobytes()).decode('ascii'),
    }
    if is_key(arrays[name]):
      about['key'] = str(jax.random.key_impl(arrays[name]))
  return described


def from_json(described: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what `to_json` got; a jax.Array is on the default device."""
  arrays: dict[str, Any] = {}
  for name, about in described.items():
    data = base64.b64decode(about['base64'])
    x = _from_bytes(data, about['dtype'], about['shape'])
    if 'key' in about:
      arrays[name] = jax.random.wrap_key_data(jnp.asarray(x), impl=about['key'])
    else:
      arrays[name] = jnp.asarray(x) if about['kind'] == 'jax' else x
  return arrays


def is_key(x: Any) -> bool:
  """Returns whether something is, or has the type of, an array of keys."""
  return x is not None and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
