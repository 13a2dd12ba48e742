"""Layers: functions with weights, which are made of hyperparameters.

A layer has an inner dataclass `HParams`; `setup`, which creates its variables
and children; and `__call__`, which computes (a layer may call it `fprop`).

    class Linear(base_layer.BaseLayer):

      class HParams(BaseHParams):
        input_dims: int = 0
        output_dims: int = 0

      def setup(self):
        p = self.hparams
        shape = (p.input_dims, p.output_dims)
        self.create_variable('w', WeightHParams(shape))

      def __call__(self, inputs):
        return inputs @ self.theta.w

    layer = Linear.HParams(input_dims=3, output_dims=4).Instantiate()
    variables = layer.init(jax.random.key(0))
    outputs = layer.apply(variables, inputs)

The fields may stand on the class as well: see `hparams`.

The object that `Instantiate` returns has no weights: `init` and `apply` are
pure functions, each call of which is a run with its own copies of the layers.
Haiku keeps the variables and the random keys of a run, and Haiku's modules may
be used within a layer. All variables are created in `setup`, so that they are
known without an input: `abstract_init` lists them with their shapes and axes
without making one.

`jaxline.parallel.partitioning` decides how an array is split: a variable names
its axes (`tensor_split_dims_mapping`), and the run's sharding maps them to the
mesh.

Names and behaviour are those of Praxis (Google, 2022).
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import copy
import dataclasses
import difflib
import enum
import functools
import inspect
import math
import re
from typing import Any, Self
import zlib

import haiku as hk
import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import hparams as hparams_lib
from examples.pax import pax_fiddle
from jaxline import errors
from jaxline.parallel import partitioning

instantiate = pax_fiddle.instantiate
sub_config_field = hparams_lib.sub_config_field
template_field = pax_fiddle.template_field

# The two collections of variables.
PARAMS = 'params'
NON_TRAINABLE = 'non_trainable'

# Collection -> path of the layer -> name -> array.
Variables = dict[str, dict[str, dict[str, Any]]]
# For each dimension of an array: a logical axis of the run's sharding
# (`partitioning.AXIS_NAMES`), a mesh axis (`mesh_lib.MESH_AXES`), several
# of these, or -1 or None where it is whole.
SplitDims = Sequence[str | int | Sequence[str] | None] | None


class WeightHParamsCollection(enum.Enum):
  """What else is to be known of a variable."""

  # Neither weight decay nor L2 regularisation belongs to it.
  SKIP_LP_REGULARIZATION = 'skip_lp_regularization'


@dataclasses.dataclass(frozen=True)
class WeightInit:
  """What a variable starts as.

  Attributes:
    method: one of the class's methods' names.
    scale: standard deviation, limit, factor of either, or the constant.
  """

  method: str
  scale: float = 1.0

  @classmethod
  def Gaussian(cls, scale: float = 1.0) -> Self:
    """Normal, with the standard deviation `scale`."""
    return cls('gaussian', scale)

  @classmethod
  def GaussianSqrtDim(cls, scale: float = 1.0) -> Self:
    """Normal; the standard deviation is `scale` / sqrt(first dimension)."""
    return cls('gaussian_sqrt_dim', scale)

  @classmethod
  def GaussianSqrtFanIn(cls, scale: float = 1.0) -> Self:
    """Normal; the standard deviation is `scale` / sqrt(inputs)."""
    return cls('gaussian_sqrt_fanin', scale)

  @classmethod
  def GaussianSqrtFanOut(cls, scale: float = 1.0) -> Self:
    """Normal; the standard deviation is `scale` / sqrt(outputs)."""
    return cls('gaussian_sqrt_fanout', scale)

  @classmethod
  def GaussianSqrtFanAvg(cls, scale: float = 1.0) -> Self:
    """Normal; the variance is `scale`^2 2 / (inputs + outputs)."""
    return cls('gaussian_sqrt_fanavg', scale)

  @classmethod
  def TruncatedGaussian(cls, scale: float = 1.0) -> Self:
    """Like `Gaussian`, cut at two standard deviations."""
    return cls('truncated_gaussian', scale)

  @classmethod
  def TruncatedGaussianSqrtDim(cls, scale: float = 1.0) -> Self:
    """Like `GaussianSqrtDim`, cut at two standard deviations."""
    return cls('truncated_gaussian_sqrt_dim', scale)

  @classmethod
  def TruncatedGaussianSqrtFanIn(cls, scale: float = 1.0) -> Self:
    """Like `GaussianSqrtFanIn`, cut at two standard deviations."""
    return cls('truncated_gaussian_sqrt_fanin', scale)

  @classmethod
  def TruncatedGaussianSqrtFanOut(cls, scale: float = 1.0) -> Self:
    """Like `GaussianSqrtFanOut`, cut at two standard deviations."""
    return cls('truncated_gaussian_sqrt_fanout', scale)

  @classmethod
  def Uniform(cls, scale: float = 1.0) -> Self:
    """Uniform between `-scale` and `scale`."""
    return cls('uniform', scale)

  @classmethod
  def UniformSqrtDim(cls, scale: float = 1.0) -> Self:
    """Uniform; the limit is `scale` / sqrt(first dimension)."""
    return cls('uniform_sqrt_dim', scale)

  @classmethod
  def UniformSqrtFanAvg(cls, scale: float = 1.0) -> Self:
    """The same as `Xavier`."""
    return cls('uniform_sqrt_fanavg', scale)

  @classmethod
  def UniformUnitScaling(cls, scale: float = 1.0) -> Self:
    """Uniform; the limit is `scale` sqrt(3 / all dimensions but the last)."""
    return cls('uniform_unit_scaling', scale)

  @classmethod
  def Xavier(cls, scale: float = 1.0) -> Self:
    """Uniform, the limit is `scale` sqrt(6 / (inputs + outputs)).

    Glorot and Bengio (2010).
    """
    return cls('xavier', scale)

  @classmethod
  def XavierWithFixupParams(
    cls,
    scale: float = 1.0,
    depth: float = 1.0,
    layers_per_residual_block: float = 1.0,
  ) -> Self:
    """`Xavier` with a scale for deep residual networks (Zhang et al., 2019)."""
    return cls.Xavier(scale * depth ** (-0.5 / layers_per_residual_block))

  @classmethod
  def Constant(cls, scale: float = 1.0) -> Self:
    """`scale` everywhere."""
    return cls('constant', scale)

  def maker(
    self, shape: tuple[int, ...], fan_in: int, fan_out: int
  ) -> Callable[..., jax.Array]:
    """Returns what makes a first value of a key, a shape and a type.

    Args:
      shape: of the variable; the value may be made flat.
      fan_in: over how many numbers an output sums.
      fan_out: in how many outputs a number is.
    """
    init = jax.nn.initializers

    def uniform(limit: float) -> Callable[..., jax.Array]:
      return functools.partial(jax.random.uniform, minval=-limit, maxval=limit)

    s, root = self.scale, math.sqrt
    xavier = uniform(s * root(6 / (fan_in + fan_out)))
    first, but_last = shape[0] if shape else 1, math.prod(shape[:-1])
    makers: dict[str, Callable[..., jax.Array]] = {
      'gaussian': init.normal(s),
      'gaussian_sqrt_dim': init.normal(s / root(first)),
      'gaussian_sqrt_fanin': init.normal(s / root(fan_in)),
      'gaussian_sqrt_fanout': init.normal(s / root(fan_out)),
      'gaussian_sqrt_fanavg': init.normal(s * root(2 / (fan_in + fan_out))),
      'truncated_gaussian': init.truncated_normal(s),
      'truncated_gaussian_sqrt_dim': init.truncated_normal(s / root(first)),
      'truncated_gaussian_sqrt_fanin': init.truncated_normal(s / root(fan_in)),
      'truncated_gaussian_sqrt_fanout': init.truncated_normal(
        s / root(fan_out)
      ),
      'uniform': uniform(s),
      'uniform_sqrt_dim': uniform(s / root(first)),
      'uniform_sqrt_fanavg': xavier,
      'uniform_unit_scaling': uniform(s * root(3 / but_last)),
      'xavier': xavier,
      'constant': init.constant(s),
    }
    return makers[self.method]


@dataclasses.dataclass(frozen=True)
class WeightHParams:
  """A variable.

  Attributes:
    shape: its shape; of a repeated layer's, that of one layer.
    init: what it starts as; None is the layer's `params_init`.
    dtype: its type; None is the layer's `dtype`.
    collections: what else is to be known of it.
    tensor_split_dims_mapping: its axes; see `SplitDims`.
    fan_in_axes: dimensions over which an output sums, for `init`; None is the
      last but one (of a vector, its only one).
    fan_out_axes: dimensions of the outputs; None is the last.
    batch_axes: dimensions that count several matrices side by side, each of
      which starts as if it were alone.
    repeat_prefix: dimensions before `shape`, one for each level of repetition,
      each with the axis 'layers'.
  """

  shape: tuple[int, ...]
  init: WeightInit | None = None
  dtype: Any = None
  collections: tuple[WeightHParamsCollection, ...] = ()
  tensor_split_dims_mapping: SplitDims = None
  fan_in_axes: tuple[int, ...] | None = None
  fan_out_axes: tuple[int, ...] | None = None
  batch_axes: tuple[int, ...] = ()
  repeat_prefix: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    object.__setattr__(self, 'shape', tuple(self.shape))

  def _check(self, path: str) -> None:
    """Refuses what the variable at a path cannot be."""
    if any(type(n) is not int or n < 1 for n in self.full_shape):
      raise ValueError(
        f'The shape of {path} is {self.full_shape}; expected positive integers.'
        ' Is a size of the HParams still 0?'
      )
    mapping = self.tensor_split_dims_mapping
    if mapping is not None and len(mapping) != len(self.shape):
      raise ValueError(
        f'tensor_split_dims_mapping {tuple(mapping)} of {path} has'
        f' {len(mapping)} entries for the shape {self.shape}; expected one a'
        ' dimension.'
      )

  @property
  def full_shape(self) -> tuple[int, ...]:
    """Its shape, with those dimensions that repetition puts before."""
    return (*self.repeat_prefix, *self.shape)

  @property
  def size(self) -> int:
    """How many numbers it is."""
    return math.prod(self.full_shape)

  @property
  def axes(self) -> tuple[Any, ...]:
    """For each of its dimensions what `partitioning.Logical` takes."""
    mapping = self.tensor_split_dims_mapping or (None,) * len(self.shape)
    return (*('layers' for _ in self.repeat_prefix), *map(_axis, mapping))

  def make(self, key: jax.Array) -> jax.Array:
    """Returns its first value; every repetition gets a key of its own."""
    if self.repeat_prefix:
      times, *rest = self.repeat_prefix
      one = dataclasses.replace(self, repeat_prefix=tuple(rest))
      return jax.vmap(one.make)(jax.random.split(key, times))
    assert self.init is not None
    shape, in_axes, out_axes = self.shape, self.fan_in_axes, self.fan_out_axes
    if in_axes is None:
      in_axes = (max(len(shape) - 2, 0),) if shape else ()
    if out_axes is None:
      out_axes = (len(shape) - 1,) if shape else ()
    # What is in none of these counts as the size of a filter.
    named = (*in_axes, *out_axes, *self.batch_axes)
    area = math.prod(n for i, n in enumerate(shape) if i not in named)
    fan_in = area * math.prod(shape[i] for i in in_axes)
    fan_out = area * math.prod(shape[i] for i in out_axes)
    make = self.init.maker(shape, fan_in, fan_out)
    return transformer.draw(make, key, shape, self.dtype)


def _axis(entry: str | int | Sequence[str] | None) -> Any:
  if entry is None or entry == -1:
    return None
  return entry if isinstance(entry, str) else tuple(entry)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Collected:
  """What a layer has left beside its output.

  Attributes:
    non_trainable: the new values of these variables, all of them.
    summaries: path -> array, of `add_summary`.
    aux_losses: path -> (value, weight), of `add_aux_loss`.
  """

  non_trainable: dict[str, dict[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  summaries: dict[str, Any] = dataclasses.field(default_factory=dict)
  aux_losses: dict[str, tuple[Any, Any]] = dataclasses.field(
    default_factory=dict
  )

  def add(self, other: 'Collected', prefix: str = '') -> None:
    """Adds summaries and losses, with a prefix to their names."""
    for name, value in other.summaries.items():
      _add(self.summaries, prefix + name, value)
    for name, value in other.aux_losses.items():
      _add(self.aux_losses, prefix + name, value)


def _add(into: dict[str, Any], name: str, value: Any) -> None:
  """Adds an entry; a layer that is called twice has two."""
  unique, i = name, 1
  while unique in into:
    unique, i = f'{name}_{i}', i + 1
  into[unique] = value


@dataclasses.dataclass
class _Run:
  """One run of `init` or `apply`: what the layers of a tree have in common.

  Attributes:
    init_key: of the variables' first values; None in a run of `apply`.
    do_eval: whether this is an evaluation.
    verbosity: up to which verbosity summaries are wanted.
    collected: what layers have left up to now.
    created: path of the layer -> name -> variable, and whether it is trained.
    shared: layers that several parents have, by `shared_weight_layer_id`, or
      by the id of the template.
    stacks: those of which layers are created just now, the outermost first:
      path, and how many layers.
  """

  init_key: jax.Array | None = None
  do_eval: bool = True
  verbosity: int = -1
  collected: Collected = dataclasses.field(default_factory=Collected)
  created: dict[str, dict[str, tuple[WeightHParams, bool]]] = dataclasses.field(
    default_factory=dict
  )
  shared: dict[Any, 'BaseLayer'] = dataclasses.field(default_factory=dict)
  stacks: tuple[tuple[str, int], ...] = ()

  def value(self, path: str, name: str) -> jax.Array:
    """Returns the value of a variable, as it is now."""
    weight, trainable = self.created[path][name]
    get = hk.get_parameter if trainable else hk.get_state

    def make(*unused: Any) -> jax.Array:
      if self.init_key is None:
        given = {**hk.get_params(), **hk.get_current_state()}
        raise ValueError(
          f'The variables given to `apply` have no {path}/{name}. `init`'
          ' returns those that `setup` creates; given are those of'
          f' {sorted(given)}.'
        )
      # By name, so that a new variable does not change what others start as.
      place = zlib.crc32(f'{path}/{name}'.encode())
      return weight.make(jax.random.fold_in(self.init_key, place))

    with _place(path):
      return get(name, weight.full_shape, weight.dtype, init=make)

  def tree(self, make: Callable[..., Any], above: str = '') -> Variables:
    """Returns `make(path, name, variable)` of all variables, as `init` does.

    Args:
      make: what is made of each.
      above: what their paths begin with and the tree's do not; of others there
        is nothing in it.
    """
    tree: Variables = {PARAMS: {}, NON_TRAINABLE: {}}
    for path, created in self.created.items():
      for name, (weight, trainable) in created.items():
        if path.startswith(above):
          layers = tree[PARAMS if trainable else NON_TRAINABLE]
          of_layer = layers.setdefault(path.removeprefix(above), {})
          of_layer[name] = make(path, name, weight)
    return tree

  def update(self, path: str, name: str, value: jax.Array) -> None:
    """Sets a variable that is not trained."""
    with _place(path):
      hk.set_state(name, value)


def _place(path: str, method: str | None = None) -> Any:
  """Enters a layer's place in Haiku's tree: its variables, Haiku modules."""
  if method is None and hk.experimental.current_name() == path:
    return contextlib.nullcontext()
  return hk.name_scope(
    hk.experimental.force_name(path), method_name=method or '__call__'
  )


class _Theta:
  """The values of a layer's variables, as attributes."""

  def __init__(self, layer: 'BaseLayer'):
    self._layer = layer

  def __getattr__(self, name: str) -> Any:
    return self._layer.get_var(name)


def _in_its_place(method: Callable[..., Any]) -> Callable[..., Any]:
  """Runs a layer's method in the layer's place, if it is part of a run."""
  is_call = method.__name__ in ('__call__', 'fprop')

  @functools.wraps(method)
  def placed(self: 'BaseLayer', *args: Any, **kwargs: Any) -> Any:
    if self._run is None and not is_call:
      return method(self, *args, **kwargs)
    self._in_run()
    scope = jax.named_scope(str(self.name))
    with scope, _place(self.module_name, method.__name__):
      self._depth += is_call  # A method may call its parent's.
      out = method(self, *args, **kwargs)
      self._depth -= is_call
    if is_call and not self._depth:
      self._check_mapping(
        'activation_split_dims_mapping', self._sharded, 'what it splits'
      )
    return out

  return placed


class BaseLayer(hparams_lib.Configurable):
  """A function with variables, and with other layers as children.

  `hparams` are its hyperparameters, frozen. In a run it also has `module_name`,
  its path in the tree.

  Attributes:
    name: of the layer, as the root of a tree; a child's is its parent's choice.
      None is the class's, in snake_case. In a run, the last part of the path.
    dtype: of its variables. A child's that is float32 is its parent's.
    fprop_dtype: of what it computes; None is its parent's, or `dtype`.
    params_init: what its variables start as, where they say nothing else; None
      is its parent's, or Xavier.
    shared_weight_layer_id: all layers of one tree with one id are one layer.
      Their other hyperparameters must be equal.
    weight_split_dims_mapping: axes of its variables by name, in place of the
      layer's own: {'w': ('data', 'mdl')}. See `SplitDims`.
    activation_split_dims_mapping: the same of what it computes:
      {'out': ('batch', None, 'mlp')}.
  """

  name: str | None = None
  dtype: Any = jnp.float32
  fprop_dtype: Any = None
  params_init: WeightInit | None = None
  shared_weight_layer_id: str | None = None
  weight_split_dims_mapping: dict[str, SplitDims] = dataclasses.field(
    default_factory=dict
  )
  activation_split_dims_mapping: dict[str, SplitDims] = dataclasses.field(
    default_factory=dict
  )

  _run: _Run | None = None
  _depth = 0  # Of calls.

  def __init__(self, hparams: Any):
    super().__init__(hparams)
    self._names = set[str]()  # Of variables and children.
    self._sharded = set[str]()  # What `shard` was called with.

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    for name, value in list(vars(cls).items()):
      if inspect.isfunction(value) and (name == '__call__' or name[:2] != '__'):
        setattr(cls, name, _in_its_place(value))

  def _bound(self, path: str, run: _Run) -> Self:
    """Returns the layer as part of a run, with variables and children."""
    layer = type(self)(self.hparams)
    layer._run, layer._stacks = run, run.stacks
    layer.module_name, layer.name = path, path.rpartition('/')[2]
    if layer.fprop_dtype is None:
      layer.fprop_dtype = layer.dtype
    layer.setup()
    layer._check_mapping(
      'weight_split_dims_mapping', set(layer._variables), 'its variables'
    )
    return layer

  @property
  def _variables(self) -> dict[str, tuple[WeightHParams, bool]]:
    """Name -> what it is, and whether it is trained."""
    return self._in_run().created.get(self.module_name, {})

  def _in_run(self) -> _Run:
    if self._run is None:
      raise RuntimeError(
        f'This {type(self).__name__} has no variables: it is not part of a'
        ' run. From outside write layer.apply(layer.init(rng), ...,'
        " method=...); in another layer create_child('name', hparams) in"
        ' `setup`, and call self.name.'
      )
    return self._run

  def _check_mapping(self, field: str, names: set[str], what: str) -> None:
    if wrong := sorted(set(getattr(self.hparams, field)) - names):
      raise ValueError(
        f'{field} of {self.module_name} names {wrong}, which are none of {what}'
        f' {sorted(names)}.{errors.did_you_mean(wrong[0], names)}'
      )

  def setup(self) -> None:
    """Creates variables and children; nothing by default."""

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Computes; a layer overrides this or has a method `fprop`."""
    return self.fprop(*args, **kwargs)

  # What `setup` uses.

  def create_variable(
    self, name: str, weight: WeightHParams, trainable: bool = True
  ) -> None:
    """Creates a variable; `self.theta.<name>` is its value.

    Args:
      name: its name, new in this layer.
      weight: what it is.
      trainable: whether the optimizer changes it; else only `update_var` does.
    """
    run = self._reserve(name)
    p = self.hparams
    split = weight.tensor_split_dims_mapping
    weight = dataclasses.replace(
      weight,
      init=weight.init or p.params_init or WeightInit.Xavier(),
      dtype=weight.dtype or p.dtype,
      tensor_split_dims_mapping=p.weight_split_dims_mapping.get(name, split),
      repeat_prefix=tuple(times for _, times in run.stacks),
    )
    path = self.module_name
    weight._check(f'{path}/{name}')
    run.created.setdefault(path, {})[name] = weight, trainable
    if (got := run.value(path, name).dtype) != weight.dtype:
      raise ValueError(
        f'The variable {path}/{name} is {got}; expected'
        f' {jnp.dtype(weight.dtype)}.'
      )

  def create_child(self, name: str, template: Any, **fields: Any) -> None:
    """Creates a layer, which becomes `self.<name>`.

    What it leaves open (`dtype`, `fprop_dtype`, `params_init`) is this layer's.

    Args:
      name: its name, new in this layer.
      template: its HParams. Where `fdl.build` found a config several times in
        a tree, all are one layer, which has its place where it comes first.
      **fields: what this layer decides of them, such as `input_dims`.
    """
    setattr(self, name, self._child(name, template, fields))

  def create_children(
    self, name: str, templates: Sequence[Any], **fields: Any
  ) -> None:
    """Creates layers `name_0`, ...; `self.<name>` is the list of them.

    Args:
      name: of all of them.
      templates: one each, as for `create_child`.
      **fields: as for `create_child`.
    """
    made = [
      self._child(f'{name}_{i}', t, fields) for i, t in enumerate(templates)
    ]
    self._reserve(name)
    setattr(self, name, made)

  def _child(
    self, name: str, template: Any, fields: Mapping[str, Any]
  ) -> 'BaseLayer':
    run = self._reserve(name)
    layer = self._unbound_child(template, fields)
    shared = layer.hparams.shared_weight_layer_id
    if shared is None and template.is_shared:
      shared = id(template)
    path = f'{self.module_name}/{name}'
    if shared is None:
      return layer._bound(path, run)
    if shared not in run.shared:
      run.shared[shared] = layer._bound(path, run)
    first = run.shared[shared]
    if first._stacks != run.stacks:
      raise ValueError(
        f'{path} and {first.module_name}: neither can be the same layer as one'
        ' within a stack, whose weights have one axis more. Share layers either'
        ' within one of its layers or outside of it.'
      )
    if first.hparams != layer.hparams:
      lines = difflib.ndiff(
        first.hparams.to_text().splitlines(),
        layer.hparams.to_text().splitlines(),
      )
      raise ValueError(
        f'Layers that are shared (shared_weight_layer_id is'
        f' {layer.hparams.shared_weight_layer_id!r}) must have equal'
        f' hyperparameters. {path} differs from {first.module_name} in\n'
        + '\n'.join(line for line in lines if line[0] in '+-')
      )
    return first

  def _unbound_child(
    self, template: Any, fields: Mapping[str, Any]
  ) -> 'BaseLayer':
    """Returns a child, what its template leaves open filled in."""
    if not isinstance(template, BaseLayer.HParams):
      raise TypeError(
        f'A child of {type(self).__name__} is made of the HParams of a layer;'
        f' got {template!r}.'
      )
    # Of one that is frozen, what is nested stays the same objects, by which
    # shared layers are known.
    copied = copy.copy if template.is_frozen else copy.deepcopy
    p, hparams = self.hparams, copied(template).set(**fields)
    if hparams.dtype == jnp.float32:
      hparams.dtype = p.dtype
    if hparams.fprop_dtype is None:
      hparams.fprop_dtype = self.fprop_dtype
    if hparams.params_init is None:
      hparams.params_init = p.params_init
    return hparams.cls(hparams.freeze())

  def _reserve(self, name: str) -> _Run:
    run = self._in_run()
    if name in self._names or name in vars(self) or hasattr(type(self), name):
      raise ValueError(
        f'{type(self).__name__} has a {name!r} already; choose another name.'
      )
    self._names.add(name)
    return run

  # What computing uses.

  @property
  def do_eval(self) -> bool:
    """Whether this is an evaluation, and not training."""
    return self._in_run().do_eval

  @property
  def aux_losses(self) -> dict[str, tuple[Any, Any]]:
    """What was added to the loss in this run up to now, by `add_aux_loss`."""
    return dict(self._in_run().collected.aux_losses)

  @property
  def theta(self) -> Any:
    """The values of its variables, as attributes: `self.theta.w`."""
    return _Theta(self)

  def get_var(self, name: str) -> jax.Array:
    """Returns the value of a variable, as it is now."""
    if name not in self._variables:
      raise AttributeError(
        f'{self.module_name} has no variable {name!r}; it has'
        f' {sorted(self._variables)}.'
        + errors.did_you_mean(name, self._variables)
      )
    return self._in_run().value(self.module_name, name)

  def update_var(self, name: str, value: jax.Array) -> None:
    """Sets a variable that is not trained."""
    weight, is_trained = self._variables.get(name, (WeightHParams(()), True))
    if is_trained:
      raise ValueError(
        f'{self.module_name} cannot set {name!r}: expected one of its variables'
        ' with trainable=False.'
      )
    if value.shape != weight.full_shape or value.dtype != weight.dtype:
      raise ValueError(
        f'{self.module_name}/{name} is {jnp.dtype(weight.dtype).name}'
        f' {weight.full_shape}; got {value.dtype.name} {value.shape}.'
      )
    self._in_run().update(self.module_name, name, value)

  def next_prng_key(self) -> jax.Array:
    """Returns a new random key of this run."""
    key = hk.maybe_next_rng_key()
    if key is None:
      raise ValueError(
        f'{self.module_name} draws random numbers, and got no key; expected'
        ' layer.apply(..., rng=key), or do_eval=True where that draws none.'
      )
    return key

  def shard(
    self, x: jax.Array, axes: SplitDims, name: str = 'out'
  ) -> jax.Array:
    """Says how an activation is split over the mesh.

    Args:
      x: the activation.
      axes: one entry for each dimension; see `SplitDims`.
      name: under which `activation_split_dims_mapping` may say otherwise.
    """
    self._sharded.add(name)
    axes = self.hparams.activation_split_dims_mapping.get(name, axes)
    if axes is None:
      return x
    return partitioning.constrain(x, tuple(_axis(entry) for entry in axes))

  def add_summary(
    self, name: str, value: jax.Array, verbosity: int = 2
  ) -> None:
    """Logs a scalar beside the metrics of the step, where that is wanted.

    Args:
      name: its name in this layer.
      value: a scalar.
      verbosity: from which verbosity of the run on (the task's
        `train.summary_verbosity`).
    """
    run = self._in_run()
    self._check_scalar(name, value)
    if verbosity <= run.verbosity:
      _add(run.collected.summaries, f'{self.module_name}/{name}', value)

  def add_aux_loss(
    self, name: str, value: jax.Array, weight: Any = 1.0
  ) -> None:
    """Adds `value` to what is minimised.

    Args:
      name: its name in this layer.
      value: a scalar.
      weight: what counts where it is averaged over batches.
    """
    losses = self._in_run().collected.aux_losses
    self._check_scalar(name, value)
    _add(losses, f'{self.module_name}/{name}', (value, weight))

  def _check_scalar(self, name: str, value: Any) -> None:
    if jnp.ndim(value):
      raise ValueError(
        f'{self.module_name} has {name!r} of shape {jnp.shape(value)}; expected'
        ' a scalar, such as the mean.'
      )

  # From outside.

  def init(self, rng: jax.Array, *args: Any, **kwargs: Any) -> Variables:
    """Returns the first values of all variables.

    Args:
      rng: a key, raw or typed.
      *args: inputs, which are needed only where a layer has Haiku modules that
        make their weights when they are called.
      **kwargs: as for `apply`.
    """
    boxed = self.boxed_init(rng, *args, **kwargs)
    return partitioning.unbox(boxed)

  def boxed_init(self, rng: jax.Array, *args: Any, **kwargs: Any) -> Variables:
    """Returns `init`, each array in a `partitioning.Logical`."""
    run = _Run(rng)
    variables = self._init(run, *args, **kwargs)

    def box(path: Any, value: jax.Array) -> partitioning.Logical:
      _, layer, name = (key.key for key in path)
      weight, _ = run.created.get(layer, {}).get(name, (None, None))
      # Else it is a Haiku module's own.
      axes = weight.axes if weight else (None,) * value.ndim
      return partitioning.Logical(value, axes)

    return jax.tree_util.tree_map_with_path(box, variables)

  def abstract_init(self) -> dict[str, dict[str, dict[str, WeightHParams]]]:
    """Returns what each variable is, without making any."""
    run = _Run()

    def make(rng: jax.Array) -> Variables:
      run.init_key = rng
      return self._init(run)

    jax.eval_shape(make, jax.random.key(0))
    return run.tree(lambda path, name, weight: weight)

  def num_params(self) -> int:
    """Returns how many numbers are trained."""
    return sum(w.size for w in jax.tree.leaves(self.abstract_init()[PARAMS]))

  def _init(
    self, run: _Run, *args: Any, method: str = '__call__', **kwargs: Any
  ) -> Variables:
    def make() -> None:
      layer = self._root(run)
      if args or kwargs:
        getattr(layer, method)(*args, **kwargs)

    params, state = hk.transform_with_state(make).init(run.init_key)
    to_dict = hk.data_structures.to_mutable_dict
    return {PARAMS: to_dict(params), NON_TRAINABLE: to_dict(state)}

  def _root(self, run: _Run) -> 'BaseLayer':
    name = self.hparams.name or _snake_case(type(self).__name__)
    return self._bound(name, run)

  def apply(
    self,
    variables: Mapping[str, Any],
    *args: Any,
    rng: jax.Array | None = None,
    method: str = '__call__',
    do_eval: bool = False,
    mutable: bool = False,
    verbosity: int = -1,
    **kwargs: Any,
  ) -> Any:
    """Runs a method with these variables; a pure function.

    Args:
      variables: as `init` returns them.
      *args: of the method.
      rng: a key, where the method draws random numbers.
      method: its name.
      do_eval: whether this is an evaluation.
      mutable: whether to return also what else comes of it.
      verbosity: which summaries are wanted; those up to it.
      **kwargs: of the method.

    Returns:
      What the method returns; with `mutable` also a `Collected`.
    """
    run = _Run(do_eval=do_eval, verbosity=verbosity)

    def call() -> Any:
      return getattr(self._root(run), method)(*args, **kwargs)

    out, state = hk.transform_with_state(call).apply(
      variables[PARAMS], variables.get(NON_TRAINABLE, {}), rng
    )
    if not mutable:
      return out
    run.collected.non_trainable = hk.data_structures.to_mutable_dict(state)
    return out, run.collected


def _snake_case(name: str) -> str:
  return re.sub(
    r'(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])', '_', name
  ).lower()


def remat(layer: BaseLayer, **kwargs: Any) -> Callable[..., Any]:
  """`hk.remat` of a layer's call: summaries and losses come out of it.

  Args:
    layer: part of a run.
    **kwargs: as for `jax.checkpoint`.
  """
  run = layer._in_run()

  def inside(*args: Any) -> tuple[Any, Collected]:
    outside, run.collected = run.collected, Collected()
    try:
      return layer(*args), run.collected
    finally:
      run.collected = outside

  def call(*args: Any) -> Any:
    out, collected = hk.remat(inside, **kwargs)(*args)
    run.collected.add(collected)
    return out

  return call
