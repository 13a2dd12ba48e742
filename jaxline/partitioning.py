"""The mesh, and what lies where on it. The only module that knows either.

A model names the axes of its weights where it creates them
(`Logical(value, ('embed', 'mlp'))`) and of its activations where it matters
(`constrain(x, ('batch', 'length', 'embed'))`). `Rules` map those names to axes
of the mesh, so that another strategy is another config value and no other
model. The names in use are `AXIS_NAMES`.

After the logical axis rules of GSPMD-style trainers (T5X, Flax, Pax).
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import difflib
import functools
import math
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

Mesh = jax.sharding.Mesh
NamedSharding = jax.sharding.NamedSharding
P = jax.sharding.PartitionSpec

# Outermost first: what talks least often comes first, so that the axes that
# talk most get the nearest devices.
MESH_AXES = ('replica', 'data')


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=['value'], meta_fields=['axes']
)
@dataclasses.dataclass(frozen=True)
class Logical:
  """A weight and the names of its axes, outermost first.

  A pytree node with one leaf, so `jax.eval_shape` and `jax.jit` see through it.

  Attributes:
    value: the array.
    axes: one name of `AXIS_NAMES`, or None, for each dimension of `value`.
  """

  value: Any
  axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
  """For each logical axis, the mesh axes it is split over.

  Within one array a mesh axis is used once, by the first logical axis that
  asks for it. So `embed` may be split over `data` in a weight and whole in an
  activation, whose `batch` comes first and takes `data`.
  """

  batch: tuple[str, ...] = ('replica', 'data')
  length: tuple[str, ...] = ()
  layers: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ()
  embed: tuple[str, ...] = ()
  mlp: tuple[str, ...] = ()
  heads: tuple[str, ...] = ()
  kv: tuple[str, ...] = ()


AXIS_NAMES = tuple(field.name for field in dataclasses.fields(Rules))

PRESETS = {
  # Data parallel: every device holds the whole state.
  'ddp': Rules(),
  # Fully sharded data parallel (ZeRO-3): each weight, and with it its
  # gradient and optimizer state, is split along its `embed` dimension.
  'fsdp': Rules(embed=('data',)),
}


def get_rules(name: str) -> Rules:
  """Returns the rules of a preset; an error lists the presets there are."""
  if name not in PRESETS:
    near = difflib.get_close_matches(str(name), PRESETS, n=1)
    raise ValueError(
      f'Unknown sharding {name!r}; expected one of {sorted(PRESETS)}.'
      + (f' Did you mean {near[0]!r}?' if near else '')
    )
  return PRESETS[name]


def make_mesh(
  sizes: Mapping[str, int] | None = None,
  devices: Sequence[jax.Device] | None = None,
) -> Mesh:
  """Makes the mesh of a run.

  Args:
    sizes: number of devices along `replica` and `data`; one may be -1, which
      means all that are left. Absent axes have size 1; None is `{'data': -1}`.
    devices: the devices to use; all devices of all hosts where None.

  Returns:
    A mesh with the axes `MESH_AXES`.

  Raises:
    ValueError: an axis is unknown, or the sizes do not multiply to the number
      of devices.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = {'data': -1} if sizes is None else dict(sizes)
  if unknown := sorted(set(sizes) - set(MESH_AXES)):
    raise ValueError(
      f'Unknown mesh axes {unknown}; expected some of {list(MESH_AXES)}.'
    )
  shape = [sizes.get(axis, 1) for axis in MESH_AXES]
  fixed = math.prod(size for size in shape if size != -1)
  if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
    raise ValueError(
      f'Mesh sizes must be positive, and one may be -1; got {sizes}.'
    )
  if -1 in shape and fixed and len(devices) % fixed == 0:
    shape[shape.index(-1)] = len(devices) // fixed
  if math.prod(shape) != len(devices):
    raise ValueError(
      f'The mesh {dict(zip(MESH_AXES, shape, strict=True))} needs'
      f' {math.prod(abs(size) for size in shape)} devices (or a multiple, with'
      f' -1), but there are {len(devices)}. Sizes that fit are the divisors of'
      f' {len(devices)}; {{"data": -1}} uses all.'
    )
  return jax.make_mesh(
    shape,
    MESH_AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * len(MESH_AXES),
    devices=devices,
  )


def is_logical(x: Any) -> bool:
  """Whether `x` is a `Logical`: for `is_leaf=`."""
  return isinstance(x, Logical)


def unbox(tree: Any) -> Any:
  """Returns `tree` with each `Logical` replaced by its value."""
  return jax.tree.map(
    lambda x: x.value if is_logical(x) else x, tree, is_leaf=is_logical
  )


class Partitioner:
  """A mesh and rules: says where each array of a run lies, and puts it there.

  Attributes:
    mesh: the devices, with the axes `MESH_AXES`.
    rules: logical axes to mesh axes.
  """

  def __init__(self, mesh: Mesh, rules: Rules):
    for field in dataclasses.fields(rules):
      for axis in getattr(rules, field.name):
        if axis not in mesh.axis_names:
          raise ValueError(
            f'Rules.{field.name} names the mesh axis {axis!r}; the mesh has'
            f' {mesh.axis_names}.'
          )
    self.mesh = mesh
    self.rules = rules

  @functools.cached_property
  def replicated(self) -> NamedSharding:
    """The sharding of what every device holds whole."""
    return NamedSharding(self.mesh, P())

  @functools.cached_property
  def batch_sharding(self) -> NamedSharding:
    """The sharding of a batch: its leading dimension over `Rules.batch`."""
    return NamedSharding(self.mesh, P(self.rules.batch))

  @property
  def batch_shards(self) -> int:
    """Into how many pieces a global batch is cut."""
    return math.prod(self.mesh.shape[axis] for axis in self.rules.batch)

  def spec(
    self, axes: Sequence[str | None], shape: Sequence[int] | None = None
  ) -> P:
    """Returns the partition of an array with these logical axes.

    Args:
      axes: a logical name or None for each dimension.
      shape: the array's shape. Where given, a dimension that its mesh axes do
        not divide stays whole.

    Raises:
      ValueError: an axis name is unknown, or `axes` and `shape` differ in
        length.
    """
    if shape is not None and len(axes) != len(shape):
      raise ValueError(
        f'{len(axes)} axis names {tuple(axes)} for an array of'
        f' {len(shape)} dimensions {tuple(shape)}; expected one a dimension.'
      )
    used: set[str] = set()
    entries = []
    for i, name in enumerate(axes):
      if name is not None and name not in AXIS_NAMES:
        raise ValueError(
          f'Unknown logical axis {name!r} in {tuple(axes)}; expected None or'
          f' one of {AXIS_NAMES}.'
        )
      wanted = () if name is None else getattr(self.rules, name)
      mesh_axes = tuple(axis for axis in wanted if axis not in used)
      parts = math.prod(self.mesh.shape[axis] for axis in mesh_axes)
      if shape is not None and shape[i] % parts:
        mesh_axes = ()
      used.update(mesh_axes)
      entries.append(mesh_axes or None)
    return P(*entries)

  def specs(self, tree: Any) -> Any:
    """Returns a `PartitionSpec` for each array of a tree of weights.

    Args:
      tree: arrays or `jax.ShapeDtypeStruct`, some of them in `Logical`. One
        that is in none has no names and is replicated.

    Returns:
      The tree with a spec for each array.
    """

    def one(path: Any, x: Any) -> P:
      if not is_logical(x):
        return P()
      try:
        return self.spec(x.axes, x.value.shape)
      except ValueError as e:
        e.add_note(f'In the weight {jax.tree_util.keystr(path)}.')
        raise

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_logical)

  def specs_like(self, tree: Any, weights: Any) -> Any:
    """Returns a `PartitionSpec` for each array of an optimizer's state.

    An array follows the weight whose path in `weights` ends its own path,
    such as `[0].mu['w']` the weight `['w']`, if it has that weight's shape. All
    others are replicated: counters, and what is kept of less than a weight,
    as in Adafactor.

    Args:
      tree: the optimizer's state; arrays or `jax.ShapeDtypeStruct`.
      weights: as for `specs`.

    Returns:
      `tree` with a spec for each array.
    """
    weight_specs = {
      path: (x.shape, spec)
      for (path, x), spec in zip(
        jax.tree_util.tree_leaves_with_path(unbox(weights)),
        jax.tree.leaves(
          self.specs(weights), is_leaf=lambda x: isinstance(x, P)
        ),
        strict=True,
      )
    }

    def one(path: tuple[Any, ...], x: Any) -> P:
      for start in range(len(path) + 1):  # The longest end comes first.
        if path[start:] in weight_specs:
          shape, spec = weight_specs[path[start:]]
          return spec if x.shape == shape else P()
      return P()

    return jax.tree_util.tree_map_with_path(one, tree)

  def shardings(self, specs: Any) -> Any:
    """Returns the sharding for each `PartitionSpec` of a tree."""
    return jax.tree.map(
      lambda spec: NamedSharding(self.mesh, spec),
      specs,
      is_leaf=lambda x: isinstance(x, P),
    )

  def whole_weights(self, tree: Any) -> list[str]:
    """Lists the weights that these rules leave whole on a mesh that could cut.

    Args:
      tree: as for `specs`.

    Returns:
      One line a weight: its path, shape and axes. Empty where the rules split
      no weight at all (`ddp`) or one device holds everything.
    """
    lines, split = [], False
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_logical)
    for path, x in flat:
      axes = x.axes if is_logical(x) else 'no axes named'
      shape = (x.value if is_logical(x) else x).shape
      spec = self.spec(x.axes, shape) if is_logical(x) else P()
      if not NamedSharding(self.mesh, spec).is_fully_replicated:
        split = True
      else:
        lines.append(f'{jax.tree_util.keystr(path)} {tuple(shape)} {axes}')
    return lines if split else []

  def put(self, tree: Any, shardings: Any, *, may_keep: bool = False) -> Any:
    """Puts host values on the devices, each shard where it belongs.

    Args:
      tree: numpy or jax arrays; every process passes the same values.
      shardings: a sharding for each, as a prefix of `tree`.
      may_keep: nobody else has the jax arrays; those that lie right already
        are returned as they are.

    Returns:
      Arrays that share no buffer with what others have, so that they may be
      donated.
    """
    shardings = jax.tree.map(
      lambda sharding, subtree: jax.tree.map(lambda _: sharding, subtree),
      shardings,
      tree,
    )

    def one(x: Any, sharding: NamedSharding) -> jax.Array:
      lies_right = isinstance(x, jax.Array) and x.sharding == sharding
      if lies_right and may_keep:
        return x
      if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(jnp.copy, out_shardings=sharding)(x)
      if isinstance(x, jax.Array) and jnp.issubdtype(
        x.dtype, jax.dtypes.prng_key
      ):
        data = one(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
      if lies_right:
        return jax.device_put(x, sharding, may_alias=False)
      host = np.asarray(x)
      return jax.make_array_from_callback(
        # The copy keeps a CPU device from borrowing the caller's memory.
        host.shape,
        sharding,
        lambda index: np.array(host[index]),
      )

    return jax.tree.map(one, tree, shardings)

  def put_batch(
    self, batch: Any, device_order: Sequence[int] | None = None
  ) -> Any:
    """Makes the global batch of which every process holds its part.

    Args:
      batch: a pytree of numpy arrays [B / processes, ...]: this process's
        rows, in process order; on a CPU it may be borrowed and not copied, so
        leave it as it is. A batch that lies right already is returned.
      device_order: the ids of this process's devices: which gets the first
        rows, which the next. None is the order of the mesh.

    Returns:
      The tree with global arrays [B, ...], split along the first dimension.

    Raises:
      ValueError: the rows do not divide over this process's devices, or
        `device_order` is not an order of these.
    """
    sharding = self.batch_sharding
    rows = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
    if len(rows) != 1 or () in rows:
      raise ValueError(
        'The arrays of a batch must share one leading dimension; got shapes '
        f'{jax.tree.map(np.shape, batch)}.'
      )
    local = rows.pop()[0]
    if local * jax.process_count() % self.batch_shards:
      raise ValueError(
        f'A global batch of {local * jax.process_count()} rows does not divide'
        f' over {self.batch_shards} devices (mesh {dict(self.mesh.shape)});'
        f' make it a multiple of {self.batch_shards}.'
      )
    if device_order is not None:
      return self._put_in_order(batch, tuple(device_order))
    leaves = jax.tree.leaves(batch)
    if all(getattr(x, 'sharding', None) == sharding for x in leaves):
      return batch
    if jax.process_count() == 1:  # Faster than the general way below.
      return jax.device_put(batch, sharding)
    return jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
      batch,
    )

  def _put_in_order(self, batch: Any, order: tuple[int, ...]) -> Any:
    """Makes the global batch, its local rows dealt out in a device order."""
    local = {d.id: d for d in self.mesh.local_devices}
    if sorted(order) != sorted(local):
      raise ValueError(
        f"custom_device_order is {order}; expected each of this process's"
        f' devices once, in any order: {sorted(local)}.'
      )

    def one(x: Any) -> jax.Array:
      x = np.asarray(x)
      shape = (x.shape[0] * jax.process_count(), *x.shape[1:])
      pieces = zip(np.split(x, len(order)), order, strict=True)
      return jax.make_array_from_single_device_arrays(
        shape,
        self.batch_sharding,
        [jax.device_put(piece, local[i]) for piece, i in pieces],
      )

    return jax.tree.map(one, batch)

  def all_hosts(self, value: int) -> list[int]:
    """Returns the value of each process; all must call it together."""
    if jax.process_count() == 1:
      return [value]
    return multihost_utils.process_allgather(np.asarray(value)).tolist()

  @contextlib.contextmanager
  def activate(self) -> Iterator[None]:
    """Makes `constrain` refer to this mesh and these rules, while tracing.

    JAX keeps what it has traced of inner functions (`jit`, `scan`) by mesh, but
    not by rules: to try other rules on the same mesh in the same process,
    `jax.clear_caches()` first.

    Yields:
      Nothing.
    """
    token = _active.set(self)
    try:
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        yield
    finally:
      _active.reset(token)


_active: contextvars.ContextVar[Partitioner | None] = contextvars.ContextVar(
  'active_partitioner', default=None
)


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
  """Says how an activation is split over the mesh of the step being traced.

  Args:
    x: the activation.
    axes: a logical name or None for each of its dimensions.

  Returns:
    `x`; unchanged where no `Partitioner` is active, as in a notebook or in
    the per-device style, so that models need not know how they are run.
  """
  partitioner = _active.get()
  if partitioner is None:
    return x
  spec = partitioner.spec(axes, x.shape)
  return jax.lax.with_sharding_constraint(
    x, NamedSharding(partitioner.mesh, spec)
  )
