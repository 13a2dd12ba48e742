"""Disables pmap and jit, so that every operation runs when its line runs.

The values in user code are then:

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
a `psum`, say), then the second, and so on. The collective itself is executed,
across hosts too. So a breakpoint stops once per device, and an `if` may take
another branch on each. The first device's program runs on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import threading
from typing import Any
from unittest import mock

from absl import logging
import jax


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
      # It would trace its function.
      for name in ('checkpoint', 'remat'):
        fake = mock.patch.object(jax, name, lambda fun, **unused: fun)
        self._stack.enter_context(fake)
      self._stack.enter_context(_hooks_in_jax())

  def __exit__(self, *unused_args: Any) -> None:
    with self._lock:
      self._num_inside -= 1
      if not self._num_inside:
        self._stack.close()


# A context manager; there is one switch, however many threads are inside.
mode = _OpByOp()


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
  # Private, and the same in JAX 0.10 to 0.12.
  from jax._src import core
  from jax._src.lax import parallel

  eval_trace: Any = core.EvalTrace
  process_primitive = eval_trace.process_primitive
  process_shard_map = eval_trace.process_shard_map
  collectives = [
    value for value in vars(parallel).values()
    if isinstance(value, core.Primitive)
  ]  # fmt: skip

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
      (parallel, '_psum', functools.partial(_psum, parallel._psum)),
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
    self._turns = [threading.Semaphore(0) for _ in range(num_devices)]
    # None where the program has ended.
    self._requests: list[_Collective | None] = [None] * num_devices
    self._replies: list[Any] = [None] * num_devices
    self._error: BaseException | None = None

  def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Returns what the programs return; the first runs on this thread."""
    results: list[Any] = [None] * len(programs)

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
        self._error = self._error or e
        for turn in self._turns:
          turn.release()

    threads = [
      threading.Thread(target=run_one, args=(i,), name=f'pmap device {i}')
      for i in range(1, len(programs))
    ]
    for thread in threads:
      thread.start()
    self._turns[0].release()
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
    self._turns[i].acquire()
    if self._error:
      self._turns[i].release()  # A `finally` may ask again.
      raise _Aborted

  def _end_turn(self, i: int, request: _Collective | None) -> None:
    self._requests[i] = request
    if i == len(self._turns) - 1:
      first = self._requests[0]
      if any(other != first for other in self._requests):
        at = [r.primitive.name if r else 'the end' for r in self._requests]
        raise RuntimeError(
          f'The devices of a pmap went different ways: they are at {at}. All '
          'have to come to the same collectives, in the same order.'
        )
      if first is not None:
        self._replies = self._meet(self._requests)
    self._turns[(i + 1) % len(self._turns)].release()
