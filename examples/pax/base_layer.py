"""Layers: Haiku modules that are made of hyperparameters.

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

The object that `Instantiate` returns has no weights: `init` and `apply` are
pure functions that make the Haiku modules again at each call. All variables are
created in `setup`, so that they are known without an input: `abstract_init`
lists them with their shapes and axes without making one.

`jaxline.partitioning` decides how an array is split: a variable names its axes
(`tensor_split_dims_mapping`), and the run's sharding maps them to the mesh.

Names and behaviour are those of Praxis (Google, 2022).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import difflib
import enum
import functools
import math
import re
from typing import Any, Self
import zlib

import haiku as hk
import jax
import jax.numpy as jnp

from examples.pax import hparams as hparams_lib
from jaxline import errors
from jaxline import partitioning

sub_config_field = hparams_lib.sub_config_field

# Up to so many numbers a variable is drawn flat.
_MAX_FLAT = 2**22

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
  def TruncatedGaussian(cls, scale: float = 1.0) -> Self:
    """Normal with the standard deviation `scale`, which is then cut at two."""
    return cls('truncated_gaussian', scale)

  @classmethod
  def GaussianSqrtFanIn(cls, scale: float = 1.0) -> Self:
    """Normal; the standard deviation is `scale` over the inputs' root."""
    return cls('gaussian_sqrt_fan_in', scale)

  @classmethod
  def GaussianSqrtFanOut(cls, scale: float = 1.0) -> Self:
    """Normal; the standard deviation is `scale` over the outputs' root."""
    return cls('gaussian_sqrt_fan_out', scale)

  @classmethod
  def Uniform(cls, scale: float = 1.0) -> Self:
    """Uniform between `-scale` and `scale`."""
    return cls('uniform', scale)

  @classmethod
  def Xavier(cls, scale: float = 1.0) -> Self:
    """Uniform, the limit is `scale` sqrt(6 / (inputs + outputs)).

    Glorot and Bengio (2010).
    """
    return cls('xavier', scale)

  @classmethod
  def Constant(cls, scale: float = 0.0) -> Self:
    """`scale` everywhere."""
    return cls('constant', scale)

  def __call__(
    self,
    key: jax.Array,
    shape: Sequence[int],
    dtype: Any,
    in_axes: Sequence[int],
    out_axes: Sequence[int],
    batch_axes: Sequence[int] = (),
  ) -> jax.Array:
    """Returns the first value.

    Args:
      key: a key.
      shape: its shape.
      dtype: its type.
      in_axes: dimensions over which an output sums.
      out_axes: dimensions of the outputs.
      batch_axes: dimensions that count several matrices, each of which starts
        as if it were alone. What is in none of these counts as the size of a
        filter.
    """
    named = (*in_axes, *out_axes, *batch_axes)
    area = math.prod(n for i, n in enumerate(shape) if i not in named)
    fan_in = area * math.prod(shape[i] for i in in_axes)
    fan_out = area * math.prod(shape[i] for i in out_axes)
    init = jax.nn.initializers

    def uniform(limit: float) -> Callable[..., jax.Array]:
      return functools.partial(jax.random.uniform, minval=-limit, maxval=limit)

    s = self.scale
    makers: dict[str, Callable[..., jax.Array]] = {
      'gaussian': init.normal(s),
      'truncated_gaussian': init.truncated_normal(s),
      'gaussian_sqrt_fan_in': init.normal(s / math.sqrt(fan_in)),
      'gaussian_sqrt_fan_out': init.normal(s / math.sqrt(fan_out)),
      'uniform': uniform(s),
      'xavier': uniform(s * math.sqrt(6 / (fan_in + fan_out))),
      'constant': init.constant(s),
    }
    if self.method not in makers:
      raise ValueError(
        f'Unknown WeightInit {self.method!r}; expected one of'
        f' {sorted(makers)}.{errors.did_you_mean(self.method, makers)}'
      )
    # The bits are the same for every shape of a size, and each new shape costs
    # XLA's CPU compiler seconds. A large one keeps its own: it may be split.
    drawn = (size,) if (size := math.prod(shape)) <= _MAX_FLAT else shape
    return makers[self.method](key, tuple(drawn), dtype).reshape(shape)


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
    repeat_prefix: dimensions before `shape`, one for each level of repetition.
    repeat_prefix_split_dims_mapping: their axes.
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
  repeat_prefix_split_dims_mapping: tuple[str | None, ...] = ()

  def __post_init__(self) -> None:
    object.__setattr__(self, 'shape', tuple(self.shape))

  def check(self, path: str) -> None:
    """Refuses what no variable can be.

    Args:
      path: of the variable.

    Raises:
      ValueError: the shape has a size that is no positive integer, or not as
        many dimensions as there are axes.
    """
    if any(type(n) is not int or n < 1 for n in self.shape):
      raise ValueError(
        f'The shape of {path} is {self.shape}; expected positive integers. Is a'
        ' size of the HParams still 0?'
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
    return (
      *(self.repeat_prefix_split_dims_mapping or (None,) * self._depth),
      *(_axis(entry) for entry in mapping),
    )

  @property
  def _depth(self) -> int:
    return len(self.repeat_prefix)

  def repeated(self, times: int, axis: str | None = 'layers') -> Self:
    """Returns the variable of `times` such layers, stacked.

    Args:
      times: how many.
      axis: the name of the new first dimension.
    """
    return dataclasses.replace(
      self,
      repeat_prefix=(times, *self.repeat_prefix),
      repeat_prefix_split_dims_mapping=(
        axis,
        *(self.repeat_prefix_split_dims_mapping or (None,) * self._depth),
      ),
    )

  def make(self, key: jax.Array) -> jax.Array:
    """Returns its first value; every repetition gets a key of its own."""
    assert self.init is not None
    in_axes, out_axes = self.fan_in_axes, self.fan_out_axes
    rank = len(self.shape)
    if in_axes is None:
      in_axes = () if rank == 0 else (max(rank - 2, 0),)
    if out_axes is None:
      out_axes = () if rank == 0 else (rank - 1,)

    def one(key: jax.Array) -> jax.Array:
      return self.init(
        key, self.shape, self.dtype, in_axes, out_axes, self.batch_axes
      )

    for times in reversed(self.repeat_prefix):
      one = functools.partial(
        lambda key, inner, times: jax.vmap(inner)(jax.random.split(key, times)),
        inner=one,
        times=times,
      )
    return one(key)


def _axis(entry: str | int | Sequence[str] | None) -> Any:
  if entry is None or entry == -1:
    return None
  return entry if isinstance(entry, str) else tuple(entry)


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


jax.tree_util.register_dataclass(
  Collected, ['non_trainable', 'summaries', 'aux_losses'], []
)


@dataclasses.dataclass
class _Scope:
  """One run of `init` or `apply`."""

  do_eval: bool
  verbosity: int
  init_key: jax.Array | None
  collected: Collected = dataclasses.field(default_factory=Collected)
  # (path of the layer, name) -> what was created, and whether it is trained.
  created: dict[tuple[str, str], tuple[WeightHParams, bool]] = (
    dataclasses.field(default_factory=dict)
  )
  # Layers that several parents have, by what makes them the same: a
  # `shared_weight_layer_id`, `BaseHParams.shared`, or the unbound layer.
  shared: dict[Any, 'BaseLayer'] = dataclasses.field(default_factory=dict)
  # Those of them that are within a `Stacked`.
  stacked: set[Any] = dataclasses.field(default_factory=set)


_scope: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar(
  'pax_scope', default=None
)


@contextlib.contextmanager
def _in_scope(scope: _Scope) -> Iterator[_Scope]:
  token = _scope.set(scope)
  try:
    yield scope
  finally:
    _scope.reset(token)


_NOT_OUTSIDE = (
  '{} cannot be the same layer as one within a stack, whose weights have one'
  ' axis more. Share layers either within one of its layers or outside of it.'
)


def _current_scope(what: str) -> _Scope:
  scope = _scope.get()
  if scope is None:
    raise RuntimeError(
      f'{what} works inside of a layer only. From outside call'
      ' layer.apply(variables, ..., method=...).'
    )
  return scope


class _Theta:
  """The values of a layer's variables, as attributes."""

  def __init__(self, layer: 'BaseLayer'):
    self._layer = layer

  def __getattr__(self, name: str) -> Any:
    return self._layer.get_var(name)


def _in_a_run(method: Callable[..., Any]) -> Callable[..., Any]:
  """Says what is wrong with how a layer is called, or what it splits."""

  @functools.wraps(method)
  def checked(self: 'BaseLayer', *args: Any, **kwargs: Any) -> Any:
    self._check_bound('call')
    self._depth += 1  # A method may call its parent's.
    try:
      out = method(self, *args, **kwargs)
    finally:
      self._depth -= 1
    if not self._depth:
      self._check_mapping(
        'activation_split_dims_mapping', self._sharded, 'what it splits'
      )
    return out

  return checked


class _LayerMeta(type(hk.Module)):  # type: ignore[misc]
  """Lets a layer be made outside of a run, with hyperparameters only."""

  def __new__(cls, name: str, bases: tuple, namespace: dict) -> Any:
    made = super().__new__(cls, name, bases, namespace)
    for method in {'__call__', 'fprop'} & set(namespace):
      setattr(made, method, _in_a_run(getattr(made, method)))
    return made

  def __call__(cls, hparams: Any = None, path: str | None = None) -> Any:
    if not isinstance(hparams, cls.HParams):
      raise TypeError(
        f'{cls.__name__} is made of {cls.HParams.__qualname__}; got'
        f' {_brief(hparams)}. Write'
        f' {cls.HParams.__qualname__}(...).Instantiate().'
      )
    if path is None:
      layer = cls.__new__(cls)
      object.__setattr__(layer, 'hparams', hparams)
      object.__setattr__(layer, '_auto_repr', f'{cls.__name__}(unbound)')
      return layer
    return super().__call__(hparams, path)


class BaseLayer(hparams_lib.Configurable, hk.Module, metaclass=_LayerMeta):
  """A function with variables, and with other layers as children.

  Attributes:
    hparams: its hyperparameters, frozen.
    theta: its variables as attributes, `self.theta.w`; within a run only.
  """

  class HParams(hparams_lib.BaseHParams):
    """Hyperparameters that every layer has.

    Attributes:
      name: of the layer, as the root of a tree; a child's is its parent's
        choice. None is the class's, in snake_case.
      dtype: of its variables. A child's that is float32 is its parent's.
      fprop_dtype: of what it computes; None is its parent's, or `dtype`.
      params_init: what its variables start as, where they say nothing else;
        None is its parent's, or Xavier.
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

  def __init__(self, hparams: Any, path: str):
    hk.Module.__init__(self, name=hk.experimental.force_name(path))
    self.hparams = hparams
    self.theta = _Theta(self)
    # Name -> what it is, and whether it is trained.
    self._variables: dict[str, tuple[WeightHParams, bool]] = {}
    self._names: set[str] = set()
    self._sharded: set[str] = set()  # What `shard` was called with.
    self._depth = 0  # Of calls.
    self._in_setup = True
    self.setup()
    self._in_setup = False
    self._check_mapping(
      'weight_split_dims_mapping', set(self._variables), 'its variables'
    )

  @hk.transparent
  def _check_mapping(self, field: str, names: set[str], what: str) -> None:
    if wrong := sorted(set(getattr(self.hparams, field)) - names):
      raise ValueError(
        f'{field} of {self.module_name} names {wrong}, which are none of {what}'
        f' {sorted(names)}.{errors.did_you_mean(wrong[0], names)}'
      )

  def __deepcopy__(self, memo: Any) -> Self:
    return self  # Nothing in it changes; and who shares it, still does.

  @hk.transparent
  def __getattr__(self, name: str) -> Any:
    # What is not there; names with underscores are asked for by Python itself.
    if name.startswith('_'):
      raise AttributeError(name)
    if 'module_name' not in vars(self):
      raise AttributeError(
        f'{type(self).__name__} has no {name!r} yet: outside of a run a layer'
        ' is nothing but hyperparameters. layer.init(rng) returns variables;'
        ' layer.apply(variables, ..., method=...) runs a method.'
      )
    own = sorted(self._names)
    raise AttributeError(
      f'{type(self).__name__} {self.module_name} has no {name!r}; `setup`'
      f' creates {own}.{errors.did_you_mean(name, own)}'
    )

  @hk.transparent
  def _check_bound(self, what: str) -> None:
    if 'module_name' not in vars(self):
      raise RuntimeError(
        f'Cannot {what} this {type(self).__name__}: it has no variables. From'
        ' outside write layer.apply(layer.init(rng), ...); in another layer'
        " create_child('name', hparams) in `setup`, and call self.name."
      )

  def setup(self) -> None:
    """Creates variables and children; nothing by default."""

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Computes; another name for `fprop`."""
    return self.fprop(*args, **kwargs)

  def fprop(self, *args: Any, **kwargs: Any) -> Any:
    """Computes; a layer has either this or `__call__`."""
    raise NotImplementedError(
      f'{type(self).__name__} has neither `fprop` nor `__call__`; write one.'
    )

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
    scope = _current_scope('create_variable')
    self._reserve(name, 'create_variable')
    p = self.hparams
    split = weight.tensor_split_dims_mapping
    if name in p.weight_split_dims_mapping:
      split = p.weight_split_dims_mapping[name]
    weight = dataclasses.replace(
      weight,
      init=weight.init or p.params_init or WeightInit.Xavier(),
      dtype=weight.dtype or p.dtype,
      tensor_split_dims_mapping=split,
    )
    path = self.module_name
    weight.check(f'{path}/{name}')
    self._variables[name] = weight, trainable
    scope.created[path, name] = (weight, trainable)

    def make(*unused: Any) -> jax.Array:
      return _first_value(f'{path}/{name}', weight)

    get = hk.get_parameter if trainable else hk.get_state
    value = get(name, weight.full_shape, weight.dtype, init=make)
    if value.dtype != weight.dtype:
      raise ValueError(
        f'The variable {path}/{name} is {value.dtype}; expected'
        f' {jnp.dtype(weight.dtype)}.'
      )

  @hk.transparent
  def create_child(self, name: str, template: Any, **fields: Any) -> None:
    """Creates a layer, which becomes `self.<name>`.

    What it leaves open (`dtype`, `fprop_dtype`, `params_init`) is this layer's.

    Args:
      name: its name, new in this layer.
      template: its HParams. Where a Fiddle config was used several times in
        a tree, or a layer is in the place of its HParams, all are one layer,
        which has its place where it comes first.
      **fields: what this layer decides of them, such as `input_dims`.
    """
    setattr(self, name, self._child(name, template, fields))

  @hk.transparent
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
    self._reserve(name, 'create_children')
    setattr(self, name, made)

  @hk.transparent
  def _child(
    self, name: str, template: Any, fields: Mapping[str, Any]
  ) -> 'BaseLayer':
    scope = _current_scope('create_child')
    self._reserve(name, 'create_child')
    hparams = self._inherit(template, fields)
    shared = _identity(template, hparams)
    path = f'{self.module_name}/{name}'
    if shared is None:
      return hparams._owner(hparams, path)
    if shared in scope.stacked:
      raise ValueError(_NOT_OUTSIDE.format(path))
    if shared not in scope.shared:
      scope.shared[shared] = hparams._owner(hparams, path)
    layer = scope.shared[shared]
    if layer.hparams != hparams or type(layer) is not hparams._owner:
      raise ValueError(
        f'Layers that are shared (shared_weight_layer_id is'
        f' {hparams.shared_weight_layer_id!r}) must have equal hyperparameters.'
        f' {path} differs from {layer.module_name} in\n'
        + _differences(hparams, layer.hparams)
      )
    return layer

  @hk.transparent
  def _inherit(self, template: Any, fields: Mapping[str, Any]) -> Any:
    """Returns a child's hyperparameters, what they leave open filled in."""
    if isinstance(template, BaseLayer):
      template = template.hparams
    if not (
      isinstance(template, hparams_lib.BaseHParams)
      and isinstance(template._owner, type)
      and issubclass(template._owner, BaseLayer)
    ):
      raise TypeError(
        f'A child of {type(self).__name__} is made of the HParams of a layer;'
        f' got {_brief(template)}.'
      )
    p, hparams = self.hparams, template.twin().set(**fields)
    if hparams.dtype == jnp.float32:
      hparams.dtype = p.dtype
    if hparams.fprop_dtype is None:
      hparams.fprop_dtype = self.fprop_dtype
    if hparams.params_init is None:
      hparams.params_init = p.params_init
    return hparams.freeze()

  @hk.transparent
  def _reserve(self, name: str, method: str) -> None:
    if not self._in_setup:
      raise RuntimeError(
        f'{type(self).__name__} calls {method}({name!r}) outside of `setup`;'
        ' what a layer has must be known without an input.'
      )
    if name in self._names or name in vars(self) or hasattr(type(self), name):
      raise ValueError(
        f'{type(self).__name__} has a {name!r} already; choose another name.'
      )
    self._names.add(name)

  # What computing uses.

  @property
  @hk.transparent
  def fprop_dtype(self) -> Any:
    """The type of what the layer computes."""
    p = self.hparams
    return p.dtype if p.fprop_dtype is None else p.fprop_dtype

  @property
  @hk.transparent
  def do_eval(self) -> bool:
    """Whether this is an evaluation, and not training."""
    return _current_scope('do_eval').do_eval

  @property
  @hk.transparent
  def verbosity(self) -> int:
    """Up to which verbosity summaries are wanted; -1 is none."""
    return _current_scope('verbosity').verbosity

  @property
  @hk.transparent
  def aux_losses(self) -> dict[str, tuple[Any, Any]]:
    """What was added to the loss in this run up to now, by `add_aux_loss`."""
    return dict(_current_scope('aux_losses').collected.aux_losses)

  def get_var(self, name: str) -> jax.Array:
    """Returns the value of a variable, as it is now."""
    if name not in self._variables:
      raise AttributeError(
        f'{self.module_name} has no variable {name!r}; it has'
        f' {sorted(self._variables)}.'
        + errors.did_you_mean(name, self._variables)
      )
    weight, trainable = self._variables[name]
    get = hk.get_parameter if trainable else hk.get_state
    return get(name, weight.full_shape, weight.dtype)

  def update_var(self, name: str, value: jax.Array) -> None:
    """Sets a variable that is not trained."""
    own = sorted(
      n for n, (_, trained) in self._variables.items() if not trained
    )
    if name not in own:
      raise ValueError(
        f'{self.module_name} cannot set {name!r}: expected one of its variables'
        f' with trainable=False, {own}.'
      )
    weight, _ = self._variables[name]
    if value.shape != weight.full_shape or value.dtype != weight.dtype:
      raise ValueError(
        f'{self.module_name}/{name} is {jnp.dtype(weight.dtype).name}'
        f' {weight.full_shape}; got {value.dtype.name} {value.shape}.'
      )
    hk.set_state(name, value)

  @hk.transparent
  def next_prng_key(self) -> jax.Array:
    """Returns a new random key of this run."""
    key = hk.maybe_next_rng_key()
    if key is None:
      raise ValueError(
        f'{self.module_name} draws random numbers, and got no key; expected'
        ' layer.apply(..., rng=key), or do_eval=True where that draws none.'
      )
    return key

  @hk.transparent
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

  @hk.transparent
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
    scope = _current_scope('add_summary')
    self._check_scalar(name, value)
    if verbosity <= scope.verbosity:
      _add(scope.collected.summaries, f'{self.module_name}/{name}', value)

  @hk.transparent
  def add_aux_loss(
    self, name: str, value: jax.Array, weight: Any = 1.0
  ) -> None:
    """Adds `value` to what is minimised.

    Args:
      name: its name in this layer.
      value: a scalar.
      weight: what counts where it is averaged over batches.
    """
    losses = _current_scope('add_aux_loss').collected.aux_losses
    self._check_scalar(name, value)
    _add(losses, f'{self.module_name}/{name}', (value, weight))

  @hk.transparent
  def collect(self, collected: Collected) -> None:
    """Adds the summaries and losses of a layer that was run by `apply`."""
    into = _current_scope('collect').collected
    _add_all(into, collected, f'{self.module_name}/')

  @hk.transparent
  def _check_scalar(self, name: str, value: Any) -> None:
    if jnp.ndim(value):
      raise ValueError(
        f'{self.module_name} has {name!r} of shape {jnp.shape(value)}; expected'
        ' a scalar, such as the mean.'
      )

  # From outside.

  @hk.transparent
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

  @hk.transparent
  def boxed_init(self, rng: jax.Array, *args: Any, **kwargs: Any) -> Variables:
    """Returns `init`, each array in a `partitioning.Logical`."""
    variables, scope = self._init(rng, *args, **kwargs)

    def box(path: Any, value: jax.Array) -> partitioning.Logical:
      _, module, name = (key.key for key in path)
      axes: tuple[Any, ...] = (None,) * value.ndim
      if (module, name) in scope.created:  # Else it is a Haiku module's own.
        axes = scope.created[module, name][0].axes
      return partitioning.Logical(value, axes)

    return jax.tree_util.tree_map_with_path(box, variables)

  @hk.transparent
  def abstract_init(self) -> dict[str, dict[str, dict[str, WeightHParams]]]:
    """Returns what each variable is, without making any."""
    tree: dict[str, Any] = {PARAMS: {}, NON_TRAINABLE: {}}
    for (module, name), (weight, trainable) in self._abstract().created.items():
      collection = tree[PARAMS if trainable else NON_TRAINABLE]
      collection.setdefault(module, {})[name] = weight
    return tree

  @hk.transparent
  def _abstract(self) -> _Scope:
    scopes = []

    def run(rng: jax.Array) -> Variables:
      variables, scope = self._init(rng)
      scopes.append(scope)
      return variables

    jax.eval_shape(run, jax.random.key(0))
    return scopes[0]

  @hk.transparent
  def num_params(self) -> int:
    """Returns how many numbers are trained."""
    params = self.abstract_init()[PARAMS]
    return sum(w.size for module in params.values() for w in module.values())

  @hk.transparent
  def _init(
    self, rng: jax.Array, *args: Any, method: str = '__call__', **kwargs: Any
  ) -> tuple[Variables, _Scope]:
    scope = _Scope(do_eval=True, verbosity=-1, init_key=rng)

    def run() -> None:
      layer = self._bind()
      if args or kwargs:
        getattr(layer, method)(*args, **kwargs)

    with _in_scope(scope):
      params, state = hk.transform_with_state(run).init(rng)
    to_dict = hk.data_structures.to_mutable_dict
    return {PARAMS: to_dict(params), NON_TRAINABLE: to_dict(state)}, scope

  @hk.transparent
  def _bind(self) -> 'BaseLayer':
    if 'module_name' in vars(self):
      raise RuntimeError(
        f'{self.module_name} is part of a run; call it, or its methods, itself.'
      )
    name = self.hparams.name or _snake_case(type(self).__name__)
    return type(self)(self.hparams, name)

  @hk.transparent
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
    if PARAMS not in variables:
      raise ValueError(
        f'The variables have the keys {sorted(variables)}; expected'
        f' {[PARAMS, NON_TRAINABLE]}, as `init` returns them.'
      )
    scope = _Scope(do_eval=do_eval, verbosity=verbosity, init_key=None)

    def run() -> Any:
      return getattr(self._bind(), method)(*args, **kwargs)

    with _in_scope(scope):
      out, state = hk.transform_with_state(run).apply(
        variables[PARAMS], variables.get(NON_TRAINABLE, {}), rng
      )
    if not mutable:
      return out
    scope.collected.non_trainable = hk.data_structures.to_mutable_dict(state)
    return out, scope.collected


def _first_value(name: str, weight: WeightHParams) -> jax.Array:
  """Returns what a variable starts as; `name` is `<path of the layer>/w`."""
  key = _current_scope('create_variable').init_key
  if key is None:
    given = [
      f'{module}/{name}'
      for modules in (hk.get_params(), hk.get_current_state())
      for module, names in modules.items()
      for name in names
    ]
    raise ValueError(
      f'The variables given to `apply` have no {name}; expected those that'
      ' `init` of a layer with the same HParams returns.'
      f'{errors.did_you_mean(name, given)} Got {sorted(given)}.'
    )
  # By name, so that a new variable does not change what others start as.
  return weight.make(jax.random.fold_in(key, zlib.crc32(name.encode())))


def _add(into: dict[str, Any], name: str, value: Any) -> None:
  """Adds an entry; a layer that is called twice has two."""
  unique, i = name, 1
  while unique in into:
    unique, i = f'{name}_{i}', i + 1
  into[unique] = value


def _add_all(into: Collected, other: Collected, prefix: str = '') -> None:
  for name, value in other.summaries.items():
    _add(into.summaries, prefix + name, value)
  for name, value in other.aux_losses.items():
    _add(into.aux_losses, prefix + name, value)


def _identity(template: Any, hparams: Any) -> Any:
  """Returns what a layer has in common with those that it is one with."""
  if hparams.shared_weight_layer_id is not None:
    return hparams.shared_weight_layer_id
  return template if isinstance(template, BaseLayer) else hparams.shared


def _brief(value: Any) -> str:
  """Returns what is short enough for an error."""
  if isinstance(value, hparams_lib.BaseHParams):
    return f'{type(value).__qualname__}(...)'
  return repr(value)


def _differences(a: hparams_lib.BaseHParams, b: hparams_lib.BaseHParams) -> str:
  lines = difflib.ndiff(b.to_text().splitlines(), a.to_text().splitlines())
  return '\n'.join(line for line in lines if line[0] in '+-')


def remat(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
  """`hk.remat` of what calls layers: summaries and losses come out of it.

  Args:
    fn: calls layers, within a run.
    **kwargs: as for `jax.checkpoint`.
  """

  def run(*args: Any) -> tuple[Any, Collected]:
    scope = _current_scope('remat')
    outside, scope.collected = scope.collected, Collected()
    try:
      return fn(*args), scope.collected
    finally:
      scope.collected = outside

  def call(*args: Any) -> Any:
    out, collected = hk.remat(run, **kwargs)(*args)
    _add_all(_current_scope('remat').collected, collected)
    return out

  return call


def _snake_case(name: str) -> str:
  return re.sub(
    r'(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])', '_', name
  ).lower()


class _Bundle(hk.Module):
  """Variables with a path of their own."""

  def __init__(self, path: str):
    super().__init__(name=hk.experimental.force_name(path))

  def get(
    self, name: str, weight: WeightHParams, trainable: bool, make: Any
  ) -> jax.Array:
    get = hk.get_parameter if trainable else hk.get_state
    return get(name, weight.full_shape, weight.dtype, init=make)

  def set(self, name: str, value: jax.Array) -> None:
    hk.set_state(name, value)


class Stacked:
  """The variables of several equal layers, each with a first axis for them.

  For layers that run another one several times, such as a scan over layers.

  Attributes:
    layer: the one layer, unbound: `layer.apply(slice of variables, ...)`.
    times: how many.
  """

  def __init__(
    self,
    parent: BaseLayer,
    name: str,
    template: Any,
    times: int,
    axis: str | None = 'layers',
    **fields: Any,
  ):
    """Creates the variables; to be called in the parent's `setup`.

    Args:
      parent: the layer that they are part of.
      name: their place in it.
      template: HParams of the one layer; what they leave open is the parent's.
      times: how many layers.
      axis: the name of the first axis, for the sharding.
      **fields: what the parent decides of the HParams.
    """
    scope = _current_scope('Stacked')
    parent._reserve(name, 'Stacked')
    if times < 1:
      raise ValueError(
        f'{parent.module_name}/{name} is to be repeated {times} times; expected'
        ' at least 1.'
      )
    hparams = parent._inherit(template, fields)
    root = _identity(template, hparams)
    hparams = hparams.clone().set(name=name)
    self.times = times
    self.layer = hparams.Instantiate()
    self._path = parent.module_name
    self._weights: dict[tuple[str, str], tuple[WeightHParams, bool]] = {}
    self._bundles: dict[str, _Bundle] = {}
    inside = self.layer._abstract()
    shared = {root, *inside.shared, *inside.stacked} - {None}
    if shared & {*scope.shared, *scope.stacked}:
      raise ValueError(_NOT_OUTSIDE.format(f'A layer of {self._path}/{name}'))
    scope.stacked |= shared
    for (module, key), (weight, trainable) in inside.created.items():
      if module not in self._bundles:
        self._bundles[module] = _Bundle(f'{self._path}/{module}')
      stacked = (weight.repeated(times, axis), trainable)
      self._weights[module, key] = stacked
      scope.created[f'{self._path}/{module}', key] = stacked
      self._value(module, key)

  def _value(self, module: str, key: str) -> jax.Array:
    weight, trainable = self._weights[module, key]

    def make(*unused: Any) -> jax.Array:
      return _first_value(f'{self._path}/{module}/{key}', weight)

    return self._bundles[module].get(key, weight, trainable, make)

  def variables(self, *, boxed: bool = False) -> Variables:
    """Returns their values, as `layer.init` would, with one axis more.

    Args:
      boxed: whether each is in a `partitioning.Logical`.
    """
    tree: Variables = {PARAMS: {}, NON_TRAINABLE: {}}
    for (module, key), (weight, trainable) in self._weights.items():
      value: Any = self._value(module, key)
      if boxed:
        value = partitioning.Logical(value, weight.axes)
      collection = tree[PARAMS if trainable else NON_TRAINABLE]
      collection.setdefault(module, {})[key] = value
    return tree

  def update(self, non_trainable: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets the variables that are not trained, stacked."""
    for module, values in non_trainable.items():
      for key, value in values.items():
        self._bundles[module].set(key, value)
