"""Shards arrays over the mesh by rules.

A model names the axes of its weights where it creates them
(`Logical(value, ('embed', 'mlp'))`), and the axes of activations where it
matters (`constrain(x, ('batch', 'length', 'embed'))`). As in T5X, Flax and Pax,
`Rules` map these names to axes of the mesh, so a config value selects the
strategy and the model does not change. `AXIS_NAMES` are the valid names.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
from typing import Any

from absl import logging
import jax

from jaxline import errors
from jaxline.base import trees
from jaxline.base.keys import Check, Key, optional
from jaxline.parallel import mesh as mesh_lib

NamedSharding = jax.sharding.NamedSharding
P = jax.sharding.PartitionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logical:
  """A weight and the names of its axes, outermost first; `jit` accepts it."""

  value: Any
  axes: tuple['Axis', ...] = dataclasses.field(metadata={'static': True})


@dataclasses.dataclass(frozen=True)
class Rules:
  """The mesh axes over which each logical axis is split.

  An array uses a mesh axis once, for the first logical axis that asks for it.

  Attributes:
    batch: Rows of activations.
    length: Positions of activations between blocks.
    activation_embed: Residual stream of activations between blocks.
    stages: Leading axis of a pipeline's buffers.
    layers: Repeated layers, in weights.
    vocab: Tokens, in weights and logits.
    embed: Width of the residual stream, in weights.
    experts: Experts of a mixture, in weights.
    mlp: Hidden width of the feed-forward part, in weights and activations.
    heads: Attention heads, in weights and activations.
    kv: Width of one head, in weights and activations.
  """

  batch: tuple[str, ...] = ('replica', 'data', 'expert')
  length: tuple[str, ...] = ()
  activation_embed: tuple[str, ...] = ()
  stages: tuple[str, ...] = ()
  layers: tuple[str, ...] = ()
  vocab: tuple[str, ...] = ()
  experts: tuple[str, ...] = ()
  embed: tuple[str, ...] = ()
  mlp: tuple[str, ...] = ()
  heads: tuple[str, ...] = ()
  kv: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    for name, axes in vars(self).items():
      axes = (axes,) if isinstance(axes, str) else tuple(axes)
      where = f'sharding_rules.{name}'
      errors.check_names(axes, mesh_lib.MESH_AXES, 'mesh axis', where)
      object.__setattr__(self, name, axes)

  def mesh_axes(self, axis: 'Axis') -> tuple[str, ...]:
    """Returns the mesh axes over which a dimension is split."""
    names = (axis,) if isinstance(axis, str) else tuple(axis or ())
    valid = (*AXIS_NAMES, *mesh_lib.MESH_AXES)
    if wrong := [name for name in names if name not in valid]:
      # A UsageError would hide the traceback, which names the model's line.
      raise ValueError(
        f'Unknown axis {wrong[0]!r}; expected None or some of {valid}.'
        f'{errors.did_you_mean(wrong[0], valid)}'
      )
    found = [getattr(self, name, (name,)) for name in names]
    return tuple(itertools.chain.from_iterable(found))


AXIS_NAMES = tuple(field.name for field in dataclasses.fields(Rules))
WEIGHT_AXES = AXIS_NAMES[AXIS_NAMES.index('layers') :]
# For weights without names: to split fewer than MIN_SPLIT elements is not worth
# the communication; a matrix of at most MAX_LAYERS rows may be stacked layers.
MIN_SPLIT, MAX_LAYERS = 2**16, 256

# A dimension is split by a logical axis, which the rules map to mesh axes; by a
# mesh axis, under any rules; by several of either; or, for None, not at all.
Axis = str | tuple[str, ...] | None

# `expert` extends `data`, except where it splits the experts themselves.
_FSDP = ('data', 'expert')
_TENSOR = Rules(
  vocab=('mdl',), experts=('expert',), mlp=('mdl',), heads=('mdl',)
)
_PAX = dataclasses.replace(_TENSOR, embed=_FSDP, activation_embed=('mdl',))

PRESETS = {
  # Data parallel: every device holds the entire state.
  'ddp': Rules(),
  # Fully sharded data parallel (ZeRO-3): each weight, its gradient and its
  # optimizer state are split along the `embed` dimension.
  'fsdp': Rules(embed=_FSDP),
  # Expert parallel: each device holds some experts and all other weights.
  'ep': Rules(experts=('expert',)),
  # `fsdp` and `ep`: `data` splits the `embed` dimension of the experts too.
  'fsdp_ep': Rules(experts=('expert',), embed=_FSDP),
  # Tensor parallel (Megatron): heads, hidden width and vocabulary are split.
  # This preset and the next ones split the experts and their hidden width.
  'tp': _TENSOR,
  # `fsdp_ep` and `tp`: the sharding of Pax's language models.
  'fsdp_tp': _PAX,
  # `fsdp_tp`, but between blocks this splits the sequence instead of the
  # residual stream (Megatron's sequence parallelism).
  'sp': dataclasses.replace(_PAX, length=('mdl',), activation_embed=()),
  # `fsdp_tp`, with the layers split over the stages of a pipeline.
  'pipeline': dataclasses.replace(_PAX, layers=('stage',), stages=('stage',)),
}


def get_rules(
  name: str, changes: Mapping[str, Sequence[str] | str] | None = None
) -> Rules:
  """Returns a preset; `changes` maps logical axes to different mesh axes."""
  errors.check_names([name], PRESETS, 'preset', 'config.sharding')
  changes = dict(changes or {})
  errors.check_names(changes, AXIS_NAMES, 'logical axis', 'sharding_rules')
  return dataclasses.replace(PRESETS[name], **changes)  # type: ignore[arg-type]


KEYS = (
  Key('sharding', 'ddp', Check(f'one of {tuple(PRESETS)}', get_rules),
      'How a sharded step is split over the mesh: see `partitioning.PRESETS`.'
      ' `ddp` splits only the batch.', 'program', sharded=True),
  Key('sharding_rules', {}, optional(Check(
        'a dict from logical axis to mesh axes',
        lambda x: get_rules('ddp', x))),
      "Changes to the preset, such as {'vocab': ('data',)}.",
      'program', sharded=True),
)  # fmt: skip


def is_logical(x: Any) -> bool:
  """Returns whether `x` is a `Logical`, for `is_leaf=`."""
  return isinstance(x, Logical)


def unbox(tree: Any) -> Any:
  """Returns `tree` with each `Logical` replaced by its value."""
  return jax.tree.map(
    lambda x: x.value if is_logical(x) else x, tree, is_leaf=is_logical
  )


@dataclasses.dataclass(eq=False)
class Partitioner:
  """A mesh and rules, which give the sharding of each array."""

  mesh: mesh_lib.Mesh
  rules: Rules
  slices: Sequence[int]  # The slice of each device of the flattened mesh.

  @classmethod
  def make(
    cls,
    sizes: Mapping[str, Any] | None,
    sharding: str,
    changes: Mapping[str, Any] | None = None,
  ) -> 'Partitioner':
    """Makes a mesh and rules; see `mesh.make` and `get_rules`."""
    mesh, slices = mesh_lib.make(sizes)
    made = cls(mesh, get_rules(sharding, changes), slices)
    if idle := made.idle_axes():
      text = 'The sharding does not use the mesh axes %s: devices along them'
      logging.warning(f'{text} compute the same.', idle)
    return made

  @property
  def axis_sizes(self) -> dict[str, int]:
    """The sizes of the mesh axes by name, outermost first."""
    return dict(self.mesh.shape)

  def size(self, name: Axis) -> int:
    """Returns the number of pieces into which this axis is split."""
    mesh_axes = self.rules.mesh_axes(name)
    return math.prod(self.mesh.shape[axis] for axis in mesh_axes)

  @property
  def is_here(self) -> bool:
    """Whether the mesh has devices of this process; see `on_devices`."""
    return (
      isinstance(self.mesh, jax.sharding.Mesh)
      and self.mesh.devices.flat[0].client is jax.devices()[0].client
    )

  @functools.cached_property
  def host(self) -> tuple[int, int]:
    """The index of this host among the hosts that read rows, and their number.

    Processes that hold the same rows, as with tensor parallelism, count as one
    host. If the mesh has no devices of this process, it reads all rows.
    """
    if not self.is_here or jax.process_count() == 1:
      return 0, 1
    # Take a batch with one row per shard, and find the first row of each
    # process: it comes last and so replaces the others in the dict.
    shape = (self.batch_shards,)
    shards: Any = self.batch_sharding.devices_indices_map(shape).items()
    pairs = [(d.process_index, rows.start or 0) for d, (rows,) in shards]
    first = dict(sorted(pairs, reverse=True))
    firsts = sorted(set(first.values()))
    return firsts.index(first[jax.process_index()]), len(firsts)

  @functools.cached_property
  def replicated(self) -> NamedSharding:
    """The sharding of replicated arrays."""
    return NamedSharding(self.mesh, P())

  @functools.cached_property
  def batch_sharding(self) -> NamedSharding:
    """The sharding of a batch, which splits its rows over `Rules.batch`."""
    return NamedSharding(self.mesh, P(self.rules.batch))

  @property
  def batch_shards(self) -> int:
    """The number of pieces into which a global batch is split."""
    return self.size('batch')

  def spec(self, axes: Sequence[Axis], shape: Sequence[int]) -> P:
    """Returns the partition of an array with one `Axis` per dimension.

    A dimension is not split if its mesh axes do not divide it.
    """
    used: set[str] = set()
    entries = []
    for name, length in zip(axes, shape, strict=True):
      wanted = self.rules.mesh_axes(name)
      mesh_axes = tuple(axis for axis in wanted if axis not in used)
      if length % self.size(mesh_axes):
        mesh_axes = ()
      used.update(mesh_axes)
      entries.append(mesh_axes or None)
    return P(*entries)

  def specs(self, tree: Any) -> Any:
    """Returns a `PartitionSpec` for each array of a tree of weights.

    An array that is not in a `Logical` and has at least `MIN_SPLIT` elements is
    split like `embed`, along its largest divisible axis except the layers.
    """

    def spec_of(path: Any, x: Any) -> P:
      axes = self._axes(x)
      if not is_logical(x) and not any(axes):
        return P()
      try:
        return self.spec(axes, unbox(x).shape)
      except ValueError as e:
        e.add_note(f'The error is in the weight {trees.name_of(path)}.')
        raise

    return jax.tree.map_with_path(spec_of, tree, is_leaf=is_logical)

  def _axes(self, x: Any) -> tuple[Axis, ...]:
    """Returns the axes of a weight; `specs` describes those without names."""
    if is_logical(x):
      return x.axes
    axes: list[Axis] = [None] * len(x.shape)
    parts = self.size('embed')
    if parts > 1 and math.prod(x.shape) >= MIN_SPLIT:
      # The first dimension of a stack of weights is the number of layers.
      may_be_stack = len(x.shape) > 2 or x.shape[0] <= MAX_LAYERS
      dims = range(1 if may_be_stack else 0, len(x.shape))
      divisible = [i for i in dims if x.shape[i] % parts == 0]
      if divisible:
        axes[max(divisible, key=lambda i: x.shape[i])] = 'embed'
    return tuple(axes)

  def specs_like(self, tree: Any, weights: Any) -> Any:
    """Returns a `PartitionSpec` for each array of an optimizer's state.

    An array whose path ends with the path of a weight of equal shape is split
    like it: `[0].mu['w']` like `['w']`. All other arrays are replicated, such
    as counters and Adafactor's factors of a weight.
    """
    specs = dict(jax.tree.leaves_with_path(self.specs(weights)))
    arrays = dict(jax.tree.leaves_with_path(unbox(weights)))

    def spec_of(path: tuple[Any, ...], x: Any) -> P:
      for start in range(len(path) + 1):  # Look for the longest end first.
        if (end := path[start:]) in specs:
          return specs[end] if x.shape == arrays[end].shape else P()
      return P()

    return jax.tree.map_with_path(spec_of, tree)

  def shardings(self, specs: Any) -> Any:
    """Returns the sharding for each `PartitionSpec` of a tree."""
    return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

  def undersharded_weights(self, tree: Any) -> list[str]:
    """Lists weights that are replicated or split less than the rules ask for.

    Each line has the sizes that do not divide. The list is empty if the rules
    split no weights (`ddp`, or a mesh of one device).
    """
    lines = []
    # A preset that splits only experts replicates the rest on purpose.
    names = (name for name in WEIGHT_AXES if name != 'experts')
    splits = any(self.size(name) > 1 for name in names)
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_logical):
      axes, shape = self._axes(x), unbox(x).shape
      splits |= any(self.size(name) > 1 for name in axes)
      misfits = ''.join(
        f'; {name} is {length}, no multiple of {self.size(name)}'
        for name, length in zip(axes, shape, strict=True)
        if length % self.size(name)
      )
      spec = self.spec(axes, shape)
      if misfits or NamedSharding(self.mesh, spec).is_fully_replicated:
        named = axes if is_logical(x) else 'no axes named'
        lines.append(f'{trees.name_of(path)} {tuple(shape)} {named}{misfits}')
    return lines if splits else []

  def idle_axes(self) -> list[str]:
    """Lists the mesh axes that no rule uses; devices along them do the same."""
    used = {axis for axes in vars(self.rules).values() for axis in axes}
    sizes = self.axis_sizes.items()
    return [axis for axis, size in sizes if size > 1 and axis not in used]

  @contextlib.contextmanager
  def activate(self) -> Iterator[None]:
    """Makes `constrain` use this mesh and these rules while tracing.

    JAX caches traces of inner functions by mesh and not by rules. Call
    `jax.clear_caches()` before you use different rules on the same mesh.
    """
    token = _active.set(self)
    try:
      with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
        yield
    finally:
      _active.reset(token)


_active = contextvars.ContextVar[Any]('active_partitioner', default=None)


def active() -> Partitioner | None:
  """Returns the partitioner of the step being traced, if there is one."""
  return _active.get()


def constrain(x: jax.Array, axes: Sequence[Axis]) -> jax.Array:
  """Constrains the sharding of an activation over the mesh of the traced step.

  `axes` has one `Axis` per dimension. If no `Partitioner` is active, as in a
  notebook, the activation is returned unchanged.
  """
  partitioner = _active.get()
  if partitioner is None:
    return x
  sharding = NamedSharding(partitioner.mesh, partitioner.spec(axes, x.shape))
  return jax.lax.with_sharding_constraint(x, sharding)
