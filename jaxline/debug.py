"""What helps to see inside a run.

`--jaxline_post_mortem` (`debugger_fallback`): pdb at the line that raised.

`--jaxline_disable_pmap_jit` (`disable_pmap_jit`): every operation runs when its
line runs, so that `breakpoint()`, `print(x)` and `if x > 0:` work in a model or
a loss. What is seen there:

| inside                         | a value is                                |
|--------------------------------|-------------------------------------------|
| `jax.jit`, shardings or not    | a concrete array, whole                   |
| `jax.pmap`                     | a concrete array, this device's           |
| `jax.grad` in either           | `GradTracer(primal=<the concrete array>)`:|
|                                | comparisons, `if` and `x.item()` work     |
| `lax.scan`, `cond`, `while`    | as outside of it; a Python loop           |
| `jax.checkpoint`, looked up    | as outside of it                          |
|   inside the function          |                                           |
| `jax.shard_map(check_vma=True)`| JAX's eager tracer: prints each device's  |
|                                | value, takes no `if`, and is slow         |
| `jax.vmap`, `jax.eval_shape`,  | abstract, as ever                         |
|   `jit(f).lower().compile()`   |                                           |

The devices of a `pmap` take turns: the first runs until it needs the others (in
a `psum`, say), then the second, and so on; the collective itself runs for real,
across hosts too. So a breakpoint stops once per device, and an `if` may go
either way on each. The first device's program runs on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import pdb
import select
import socket
import sys
import tempfile
import threading
from typing import Any, TypeVar
from unittest import mock

from absl import logging
import jax

F = TypeVar('F', bound=Callable[..., Any])


@dataclasses.dataclass
class Settings:
  """The switches of this module, read at each use.

  jaxline.platform sets them to functions that read its flags; no other module
  knows of flags.
  """

  post_mortem: Callable[[], bool] = lambda: False
  disable_pmap_jit: Callable[[], bool] = lambda: False


settings = Settings()


def kwargs_only(f: F) -> F:
  """Makes a function refuse positional arguments."""

  @functools.wraps(f)
  def wrapped(**kwargs: Any) -> Any:
    return f(**kwargs)

  return wrapped  # type: ignore[return-value]


@contextlib.contextmanager
def log_activity(activity_name: str) -> Iterator[None]:
  """Logs the start and the end of what runs inside, and its error.

  Args:
    activity_name: what to call it in the log.

  Yields:
    Nothing.
  """
  logging.info('[jaxline] %s starting...', activity_name)
  try:
    yield
  except BaseException:
    logging.exception('[jaxline] %s failed with error.', activity_name)
    raise
  logging.info('[jaxline] %s finished.', activity_name)


def evaluate_should_return_dict(f: F) -> F:
  """Lets an `evaluate` return None, with a warning once."""

  @functools.wraps(f)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    scalars = f(*args, **kwargs)
    if scalars is None:
      logging.log_first_n(
        logging.WARNING,
        '`evaluate` returned None, which is deprecated: return the dict of '
        'scalars to write, {} if there are none.',
        1,
      )
      return {}
    return scalars

  return wrapped  # type: ignore[return-value]


# One debugger at a time: two would share one terminal.
_debugger_lock = threading.Lock()


def debugger_fallback(f: F) -> F:
  """Enters pdb where an error was raised, if `settings.post_mortem` is on.

  pdb starts in the frame that raised, on the thread that raised, once for an
  error that passes several of these. Without a terminal it waits for someone
  to attach and says on stderr how. SystemExit and KeyboardInterrupt pass by.

  Args:
    f: any function.

  Returns:
    The function, with pdb before its errors go on.
  """

  @functools.wraps(f)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    try:
      return f(*args, **kwargs)
    except Exception as e:
      if settings.post_mortem():
        _post_mortem(e)
      raise

  return wrapped  # type: ignore[return-value]


def _post_mortem(error: Exception) -> None:
  with _debugger_lock:
    if error.__dict__.setdefault('_jaxline_seen_by_pdb', False):
      return
    error.__dict__['_jaxline_seen_by_pdb'] = True
    if sys.stdin is not None and sys.stdin.isatty():
      pdb.post_mortem(error.__traceback__)
      return
    with _Remote(error) as remote, contextlib.suppress(OSError):
      # Only this thread's output goes to the debugger.
      streams = _PerThread(remote, sys.stdin), _PerThread(remote, sys.stdout)
      with mock.patch.multiple(sys, stdin=streams[0], stdout=streams[1]):
        pdb.post_mortem(error.__traceback__)


class _Remote(io.TextIOBase):
  """A terminal at the other end of a socket; waits for it at the first use."""

  def __init__(self, error: Exception):
    self._error = error
    self._stack = contextlib.ExitStack()
    self._files: tuple[Any, Any] | None = None

  def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
    return self._connected()[0].readline()

  def write(self, text: str, /) -> int:
    return self._connected()[1].write(text)

  def flush(self) -> None:
    if self._files is not None:
      self._files[1].flush()

  def close(self) -> None:
    with contextlib.suppress(OSError):
      self._stack.close()
    self._files = None
    super().close()

  def _connected(self) -> tuple[Any, Any]:
    """Returns a file to read from and one to write to."""
    if self._files is None:
      # A Unix socket in a directory that only this user may enter: who
      # reaches the debugger can run anything.
      folder = self._stack.enter_context(
        tempfile.TemporaryDirectory(prefix='jaxline_pdb_')
      )
      path = str(pathlib.Path(folder) / 'socket')
      server = self._stack.enter_context(socket.socket(socket.AF_UNIX))
      server.bind(path)
      server.listen(1)
      print(
        f'[jaxline] {type(self._error).__name__}: {self._error}\n'
        f'[jaxline] pdb waits at the raising frame, on '
        f'{socket.gethostname()}, process {os.getpid()}. Attach with\n'
        f'  {sys.executable} -m jaxline.debug {path}\n'
        f'or\n  nc -U {path}\nand let the run end with the command q.',
        file=sys.stderr,
        flush=True,
      )
      connection, _ = server.accept()
      self._stack.enter_context(connection)
      # Two files: a single one would forget lines read ahead when written to.
      self._files = (connection.makefile('r'), connection.makefile('w'))
      for file in self._files:
        self._stack.callback(file.close)
    return self._files


class _PerThread:
  """A stream that is `mine` for the thread that made it, else `others`."""

  def __init__(self, mine: Any, others: Any):
    self._thread = threading.get_ident()
    self._mine = mine
    self._others = others

  def __getattr__(self, name: str) -> Any:
    is_mine = threading.get_ident() == self._thread
    return getattr(self._mine if is_mine else self._others, name)


def attach(path: str) -> None:
  """Connects this terminal to a debugger that waits at a socket.

  Args:
    path: the socket, as `debugger_fallback` wrote it.
  """
  with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(path)
    sources: list[Any] = [connection, sys.stdin]
    while True:
      ready, _, _ = select.select(sources, [], [])
      if connection in ready:
        if not (data := connection.recv(65536)):
          return
        sys.stdout.write(data.decode(errors='replace'))
        sys.stdout.flush()
      if sys.stdin in ready:
        if data := os.read(sys.stdin.fileno(), 65536):
          connection.sendall(data)
        else:
          connection.shutdown(socket.SHUT_WR)
          sources.remove(sys.stdin)


def disable_pmap_jit(f: F) -> F:
  """Runs a function op by op, if `settings.disable_pmap_jit` is on.

  It holds for functions that were decorated with `jax.pmap` and `jax.jit`
  before, and in threads that the function starts. The table at the top of this
  file says what is seen.

  Args:
    f: any function.

  Returns:
    The function; it reads the setting at each call.
  """

  @functools.wraps(f)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    if not settings.disable_pmap_jit():
      return f(*args, **kwargs)
    import chex  # It takes as long to import as jax, and runs seldom need it.

    with _op_by_op, chex.fake_pmap_and_jit(enable_pmap_patching=False):
      return f(*args, **kwargs)

  return wrapped  # type: ignore[return-value]


class _OpByOp:
  """Switches this process to op by op while anyone is inside."""

  def __init__(self) -> None:
    self._lock = threading.Lock()
    self._num_inside = 0
    self._stack = contextlib.ExitStack()

  def __enter__(self) -> None:
    with self._lock:
      self._num_inside += 1
      if self._num_inside > 1:
        return
      logging.warning(
        'pmap and jit are off: every operation runs by itself, which is slow.'
      )
      # JAX's own switch is for one thread; this one is for all.
      was_off = jax.config.values['jax_disable_jit']
      jax.config.update('jax_disable_jit', True)
      self._stack.callback(jax.config.update, 'jax_disable_jit', was_off)
      for name in ('checkpoint', 'remat'):
        fake = mock.patch.object(jax, name, _fake_checkpoint)
        self._stack.enter_context(fake)
      self._stack.enter_context(_hooks_in_jax())

  def __exit__(self, *unused_args: Any) -> None:
    with self._lock:
      self._num_inside -= 1
      if not self._num_inside:
        self._stack.close()


_op_by_op = _OpByOp()


def _fake_checkpoint(fun: F, **unused_kwargs: Any) -> F:
  """In place of jax.checkpoint, which would trace its function."""
  return fun


@contextlib.contextmanager
def _hooks_in_jax() -> Iterator[None]:
  """Makes operations wait for their end, and gives pmaps concrete arrays.

  A pmap is a jit of a shard_map. With jit off, JAX's interpreter of shard_map
  compiles each operation anew at each call, some thousand times slower than
  the operation, and its values cannot be branched on. Here `_run_shard_map`
  takes its place, and a collective meets the other devices.

  Yields:
    Nothing.
  """
  try:
    # Private, hence looked for where it was last seen, in JAX 0.10 and 0.11.
    from jax._src import core
    from jax._src.lax import parallel

    eval_trace: Any = core.EvalTrace
    process_primitive = eval_trace.process_primitive
    process_shard_map = eval_trace.process_shard_map
    psum = parallel._psum
    collectives = [
      value for value in vars(parallel).values()
      if isinstance(value, core.Primitive)
    ]  # fmt: skip
  except (AttributeError, ImportError) as e:
    logging.warning(
      'This JAX is too new to run pmap op by op (%s): the functions of pmaps '
      'made from now on see vmap tracers, and those of older ones '
      'shard_map tracers.',
      e,
    )
    import chex

    with chex.fake_pmap():
      yield
    return

  def run_primitive(*args: Any, **kwargs: Any) -> Any:
    # An operation's own error then comes from its line. And thousands of
    # programs over several CPU devices, all in flight, can deadlock.
    return jax.block_until_ready(process_primitive(*args, **kwargs))

  def run_shard_map(*args: Any, **kwargs: Any) -> Any:
    return _run_shard_map(process_shard_map, *args, **kwargs)

  with contextlib.ExitStack() as stack:
    for owner, name, fake in (
      (eval_trace, 'process_primitive', run_primitive),
      (eval_trace, 'process_shard_map', run_shard_map),
      (parallel, '_psum', functools.partial(_psum, psum)),
      *((p, 'impl', functools.partial(_impl, p.impl, p)) for p in collectives),
    ):
      stack.enter_context(mock.patch.object(owner, name, fake))
    yield


# `exchange`: set while this thread runs the program of one device of a pmap;
# takes a _Collective, returns its result on this device.
_program = threading.local()


@dataclasses.dataclass
class _Collective:
  """A collective that a device's program has come to."""

  primitive: Any
  params: dict[str, Any]
  args: tuple[Any, ...] = dataclasses.field(compare=False)


def _impl(original: Callable[..., Any], primitive: Any, *args: Any,
          **params: Any) -> Any:  # fmt: skip
  """In place of what a collective's primitive does with concrete arrays."""
  exchange = getattr(_program, 'exchange', None)
  if exchange is None:
    return original(*args, **params)
  return exchange(_Collective(primitive, params, args))


def _psum(original: Callable[..., Any], x: Any, axis_name: Any,
          **kwargs: Any) -> Any:  # fmt: skip
  """In place of psum, which takes a concrete array for the same everywhere."""
  is_concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
  axes = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
  is_named = not any(isinstance(axis, int) for axis in axes)
  if getattr(_program, 'exchange', None) and is_concrete and is_named:
    from jax._src.lax import parallel

    groups = kwargs['axis_index_groups']
    return parallel.psum_p.bind(
      x.astype('int32') if x.dtype == bool else x,
      axes=tuple(axes),
      axis_index_groups=groups and tuple(map(tuple, groups)),
    )
  return original(x, axis_name, **kwargs)


def _run_shard_map(
  original: Callable[..., Any], trace: Any, primitive: Any, fun: Any, args: Any,
  *, mesh: jax.sharding.Mesh, in_specs: Any, check_vma: bool, **kwargs: Any,
) -> Any:  # fmt: skip
  """In place of JAX's interpreter of a shard_map on concrete arrays."""
  is_whole = set(kwargs['newly_manual_axes']) == set(mesh.axis_names)
  if check_vma or not is_whole or not isinstance(mesh, jax.sharding.Mesh):
    # Not a pmap. Its gradients need types that concrete arrays do not have.
    return original(
      trace, primitive, fun, args,
      mesh=mesh, in_specs=in_specs, check_vma=check_vma, **kwargs,
    )  # fmt: skip
  from jax._src import core

  def program(device: jax.Device) -> Any:
    with jax.default_device(device), jax.disable_jit():
      with core.extend_axis_env_nd(list(mesh.shape.items())):
        return fun(*shards[device]).unpack_aux()

  with core.eval_context(), futures.ThreadPoolExecutor(1) as pool:
    shards: dict[jax.Device, list[Any]] = {d: [] for d in mesh.local_devices}
    for arg, spec in zip(args, in_specs, strict=True):
      placed = jax.device_put(arg, jax.sharding.NamedSharding(mesh, spec))
      for shard in placed.addressable_shards:
        shards[shard.device].append(shard.data)
    # On a thread where the axes of the mesh are not bound.
    meet = lambda requests: pool.submit(
      _run_collective, mesh, requests
    ).result()
    outs, out_specs = zip(
      *_Turns(len(shards), meet).run(
        [functools.partial(program, device) for device in shards]
      ),
      strict=True,
    )
    return outs[0].update(
      [
        _join(mesh, spec, values)
        for spec, *values in zip(
          out_specs[0], *(out.vals for out in outs), strict=True
        )
      ]
    )


def _run_collective(
  mesh: jax.sharding.Mesh, requests: Sequence[_Collective]
) -> list[Any]:
  """Runs a collective of all devices; returns its result on each local one."""
  rows_spec = jax.sharding.PartitionSpec(mesh.axis_names)
  primitive, params = requests[0].primitive, requests[0].params
  with jax.disable_jit(False):
    args = [
      _join(mesh, rows_spec, [jax.numpy.expand_dims(x, 0) for x in values])
      for values in zip(*(request.args for request in requests), strict=True)
    ]
    program = _collective_program(
      primitive, tuple(sorted(params.items())), mesh, rows_spec
    )
    leaves, treedef = jax.tree.flatten(program(*args))
    rows = []
    for leaf in leaves:
      by_device = {s.device: s.data[0] for s in leaf.addressable_shards}
      rows.append([by_device[device] for device in mesh.local_devices])
    return [
      jax.tree.unflatten(treedef, values) for values in zip(*rows, strict=True)
    ]


@functools.cache
def _collective_program(
  primitive: Any,
  params: tuple[tuple[str, Any], ...],
  mesh: jax.sharding.Mesh,
  rows_spec: jax.sharding.PartitionSpec,
) -> Callable[..., Any]:
  """Compiles a collective; arguments and results have a row per device."""

  def run(*rows: jax.Array) -> Any:
    out = primitive.bind(*(row[0] for row in rows), **dict(params))
    return jax.tree.map(lambda x: x[None], out)

  return jax.jit(
    jax.shard_map(
      run, mesh=mesh, in_specs=rows_spec, out_specs=rows_spec, check_vma=False
    )
  )


def _join(
  mesh: jax.sharding.Mesh, spec: jax.sharding.PartitionSpec, values: Any
) -> jax.Array:
  """Makes the array of which `values` are the shards on the local devices."""
  devices = mesh.local_devices
  values = [jax.device_put(v, d) for v, d in zip(values, devices, strict=True)]
  shape = list(values[0].shape)
  for i, names in enumerate(spec):
    for name in (names,) if isinstance(names, str) else names or ():
      shape[i] *= mesh.shape[name]
  return jax.make_array_from_single_device_arrays(
    tuple(shape), jax.sharding.NamedSharding(mesh, spec), values
  )


class _Aborted(BaseException):
  """Ends the program of a device after another device's has failed."""


class _Turns:
  """Runs one program per device, in turns that end at the collectives."""

  def __init__(
    self, num_devices: int, meet: Callable[[Sequence[Any]], list[Any]]
  ):
    self._meet = meet
    self._num_devices = num_devices
    self._condition = threading.Condition()
    self._turn = 0
    # None where the program has ended.
    self._requests: list[_Collective | None] = [None] * num_devices
    self._replies: list[Any] = [None] * num_devices
    self._error: BaseException | None = None

  def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns what the programs return; the first runs on this thread."""
    results: list[Any] = [None] * self._num_devices

    def run_one(i: int) -> None:
      try:
        self._await_turn(i)
        _program.exchange = functools.partial(self._exchange, i)
        try:
          results[i] = programs[i]()
        finally:
          _program.exchange = None
        self._end_turn(i, None)
      except _Aborted:
        pass
      except BaseException as e:
        with self._condition:
          self._error = self._error or e
          self._condition.notify_all()

    threads = [
      threading.Thread(target=run_one, args=(i,), name=f'pmap device {i}')
      for i in range(1, self._num_devices)
    ]
    for thread in threads:
      thread.start()
    run_one(0)
    for thread in threads:
      thread.join()
    if self._error is not None:
      raise self._error
    return results

  def _exchange(self, i: int, request: _Collective) -> Any:
    self._end_turn(i, request)
    self._await_turn(i)
    return self._replies[i]

  def _await_turn(self, i: int) -> None:
    with self._condition:
      self._condition.wait_for(lambda: self._turn == i or self._error)
      if self._error:
        raise _Aborted

  def _end_turn(self, i: int, request: _Collective | None) -> None:
    self._requests[i] = request
    if i == self._num_devices - 1:
      first = self._requests[0]
      if any(other != first for other in self._requests):
        at = [r.primitive.name if r else 'the end' for r in self._requests]
        raise RuntimeError(
          f'The devices of a pmap went different ways: they are at {at}. All '
          'have to come to the same collectives, in the same order.'
        )
      if first is not None:
        self._replies = self._meet(self._requests)
    with self._condition:
      self._turn = (i + 1) % self._num_devices
      self._condition.notify_all()


if __name__ == '__main__':
  attach(sys.argv[1])
