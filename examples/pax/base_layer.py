"""Layers: functions with weights, configured by hyperparameters.

A layer has hyperparameters (see `hparams`), a method `setup` that creates its
variables and children, and a method `__call__`, or `fprop`, that computes the
output:

    class Linear(base_layer.BaseLayer):
      input_dims: int = 0
      output_dims: int = 0

      def setup(self):
        shape = (self.input_dims, self.output_dims)
        self.create_variable('w', WeightHParams(shape))

      def __call__(self, inputs):
        return inputs @ self.theta.w

    layer = Linear.HParams(input_dims=3, output_dims=4).Instantiate()
    variables = layer.init(jax.random.key(0))
    outputs = layer.apply(variables, inputs)

The object that `Instantiate` returns holds no weights. `init` and `apply` are
pure functions, and each call is a run with its own copies of the layers. Haiku
holds the variables and the random keys of a run, so a layer may contain Haiku
modules. `setup` creates all variables, so they are known without an input:
`abstract_init` lists their shapes and axes without creating an array.

`jaxline.parallel.partitioning` decides how arrays are split. A variable names
its axes (`tensor_split_dims_mapping`), and the run's sharding maps the axes to
the mesh.

Names and behavior follow Praxis (Google, 2022).
"""

from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import functools
import inspect
from typing import Any, Self

import haiku as hk
import jax
import jax.numpy as jnp

from examples.pax import hparams as hparams_lib
from examples.pax import layer_runs
from examples.pax import pax_fiddle
from examples.pax import weights
from jaxline import errors
from jaxline.parallel import partitioning

LayerTpl = pax_fiddle.Config  # It makes a `BaseLayer`.
instantiate = pax_fiddle.instantiate
sub_config_field = hparams_lib.sub_config_field
template_field = pax_fiddle.template_field

# Names under which Pax and its documents import these.
WeightHParams = weights.WeightHParams
WeightHParamsCollection = weights.WeightHParamsCollection
WeightInit = weights.WeightInit
SplitDims = weights.SplitDims
Collected = layer_runs.Collected
Variables = layer_runs.Variables
PARAMS, NON_TRAINABLE = layer_runs.PARAMS, layer_runs.NON_TRAINABLE


def _run_in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
  """Wraps a method so that it runs in the layer's scope, if within a run."""
  is_call = method.__name__ in ('__call__', 'fprop')

  @functools.wraps(method)
  def placed(self: 'BaseLayer', *args: Any, **kwargs: Any) -> Any:
    if self._run is None and not is_call:
      return method(self, *args, **kwargs)
    self.in_run()
    scope = jax.named_scope(str(self.name))
    with scope, layer_runs.place(self.module_name, method.__name__):
      self._depth += is_call  # A method may call the parent class's.
      out = method(self, *args, **kwargs)
      self._depth -= is_call
    if is_call and not self._depth:
      self._check_mapping(
        'activation_split_dims_mapping', self._sharded, 'its activations'
      )
    return out

  return placed


class BaseLayer(hparams_lib.Configurable):
  """A function with variables, and with other layers as children.

  `hparams` holds the frozen hyperparameters. During a run, `module_name` is the
  layer's path in the tree.
  """

  # Name of the layer if it is the root of a tree. If None, the class's name in
  # snake_case. A parent names its children. During a run, the last part of the
  # path.
  name: str | None = None
  # Dtype of the variables. A child with float32 takes its parent's dtype.
  dtype: Any = jnp.float32
  # Dtype of the computation. If None, the parent's, or `dtype` for a root.
  fprop_dtype: Any = None
  # Default initializer of the variables. If None, the parent's, or Xavier for a
  # root.
  params_init: WeightInit | None = None
  # Layers of a tree with the same id are one layer. Their other hyperparameters
  # must be equal.
  shared_weight_layer_id: str | None = None
  # Axes of variables by name, such as {'w': ('data', 'mdl')}, which override
  # the layer's own; see `SplitDims`. And axes of activations, such as
  # {'out': ('batch', None, 'mlp')}.
  weight_split_dims_mapping: dict[str, SplitDims] = dataclasses.field(
    default_factory=dict
  )
  activation_split_dims_mapping: dict[str, SplitDims] = dataclasses.field(
    default_factory=dict
  )

  _run: layer_runs.Run | None = None
  _depth = 0  # Number of nested calls.

  def __init__(self, hparams: Any):
    # `bound` checks them, because `fdl.build` makes layers from templates that
    # their parents have not completed.
    self.hparams = hparams
    self._names = set[str]()  # Names of variables and children.
    self._sharded = set[str]()  # Names that `shard` was called with.

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    for name, value in list(vars(cls).items()):
      if inspect.isfunction(value) and (name == '__call__' or name[:2] != '__'):
        setattr(cls, name, _run_in_scope(value))

  def bound(self, path: str, run: layer_runs.Run) -> Self:
    """Returns a copy at a path of a run's tree, with variables and children."""
    layer = type(self)(self.hparams)
    layer._run, layer.in_stacks = run, run.stacks
    layer.module_name, layer.name = path, path.rpartition('/')[2]
    if layer.fprop_dtype is None:
      layer.fprop_dtype = layer.dtype
    layer._check(path)
    layer.setup()
    layer._check_mapping(
      'weight_split_dims_mapping', set(layer._variables), 'its variables'
    )
    return layer

  @property
  def _variables(self) -> dict[str, tuple[WeightHParams, bool]]:
    """Name -> (declaration, whether trainable) of the layer's variables."""
    return self.in_run().created.get(self.module_name, {})

  def in_run(self) -> layer_runs.Run:
    """Returns the run that the layer is part of."""
    if self._run is None:
      raise RuntimeError(
        f'This {type(self).__name__} has no variables, because it is not part'
        ' of a run. From outside, call layer.apply(layer.init(rng), ...,'
        " method=...). Within a layer, call create_child('name', hparams) in"
        ' `setup`, and then self.name.'
      )
    return self._run

  def _check_mapping(self, field: str, names: set[str], what: str) -> None:
    if wrong := sorted(set(getattr(self.hparams, field)) - names):
      raise ValueError(
        f'{field} of {self.module_name} names {wrong}; expected some of {what}'
        f' {sorted(names)}.{errors.did_you_mean(wrong[0], names)}'
      )

  def setup(self) -> None:
    """Creates variables and children. By default, there are none."""

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Computes the output. A layer overrides this method or defines `fprop`."""
    return self.fprop(*args, **kwargs)

  # For use in `setup`.

  def create_variable(
    self, name: str, weight: WeightHParams, trainable: bool = True
  ) -> None:
    """Creates a variable, whose value is `self.theta.<name>`.

    If it is not `trainable`, only `update_var` updates it, not the optimizer.
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
    weight.check(f'{path}/{name}')
    run.created.setdefault(path, {})[name] = weight, trainable
    if (got := run.value(path, name).dtype) != weight.dtype:
      raise ValueError(
        f'The variable {path}/{name} is {got}; expected'
        f' {jnp.dtype(weight.dtype)}.'
      )

  def create_child(self, name: str, template: Any, **fields: Any) -> None:
    """Creates a child layer, `self.<name>`.

    The child inherits `dtype`, `fprop_dtype` and `params_init` from this layer
    unless its template sets them.

    Args:
      name: Name of the child.
      template: HParams of the child. If `fdl.build` found the same config
        several times in a tree, all of them are one layer, whose path is that
        of the first.
      **fields: Fields to set in the template, such as `input_dims`.
    """
    setattr(self, name, self._child(name, template, fields))

  def create_children(
    self, name: str, templates: Sequence[Any], **fields: Any
  ) -> None:
    """Like `create_child`: `name_0`, ..., and the list `self.<name>`."""
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
      return layer.bound(path, run)
    return run.only(shared, path, layer)

  def _unbound_child(
    self, template: Any, fields: Mapping[str, Any]
  ) -> 'BaseLayer':
    """Returns a child that inherits the fields which its template lacks."""
    if not isinstance(template, BaseLayer.HParams):
      raise TypeError(
        f'Expected a child of {type(self).__name__} to be the HParams of a'
        f' layer; got {template!r}.'
      )
    # A frozen template is copied without its nested templates, because the
    # identity of these tells which layers are shared.
    copied = copy.copy if template.is_frozen else copy.deepcopy
    p, hparams = self.hparams, copied(template).set(**fields)
    if hparams.dtype == jnp.float32:
      hparams.dtype = p.dtype
    if hparams.fprop_dtype is None:
      hparams.fprop_dtype = self.fprop_dtype
    if hparams.params_init is None:
      hparams.params_init = p.params_init
    return hparams.cls(hparams.freeze())

  def _reserve(self, name: str) -> layer_runs.Run:
    run = self.in_run()
    if name in self._names or name in vars(self) or hasattr(type(self), name):
      raise ValueError(
        f'{type(self).__name__} already has a {name!r}. Choose another name.'
      )
    self._names.add(name)
    return run

  # For use in `__call__` and other methods of a run.

  @property
  def do_eval(self) -> bool:
    """Whether this is an evaluation rather than training."""
    return self.in_run().do_eval

  @property
  def aux_losses(self) -> dict[str, tuple[Any, Any]]:
    """Path -> (value, weight) of the auxiliary losses so far in this run."""
    return dict(self.in_run().collected.aux_losses)

  @property
  def theta(self) -> Any:
    """Values of the variables, as attributes: `self.theta.w`."""
    return layer_runs.Theta(self.get_var)

  def get_var(self, name: str) -> jax.Array:
    """Returns the current value of a variable."""
    if name not in self._variables:
      raise AttributeError(
        f'{self.module_name} has no variable {name!r}; it has'
        f' {sorted(self._variables)}.'
        + errors.did_you_mean(name, self._variables)
      )
    return self.in_run().value(self.module_name, name)

  def update_var(self, name: str, value: jax.Array) -> None:
    """Sets a variable that was created with `trainable=False`."""
    weight, is_trained = self._variables.get(name, (WeightHParams(()), True))
    if is_trained:
      raise ValueError(
        f'{self.module_name} cannot set {name!r}; expected a variable of this'
        ' layer with trainable=False.'
      )
    if value.shape != weight.full_shape or value.dtype != weight.dtype:
      raise ValueError(
        f'{self.module_name}/{name} is {jnp.dtype(weight.dtype).name}'
        f' {weight.full_shape}; got {value.dtype.name} {value.shape}.'
      )
    self.in_run().update(self.module_name, name, value)

  def next_prng_key(self) -> jax.Array:
    """Returns a fresh random key."""
    key = hk.maybe_next_rng_key()
    if key is None:
      raise ValueError(
        f'{self.module_name} draws random numbers but got no key. Call'
        ' layer.apply(..., rng=key), or set do_eval=True if evaluation draws'
        ' none.'
      )
    return key

  def shard(
    self, x: jax.Array, axes: SplitDims, name: str = 'out'
  ) -> jax.Array:
    """Constrains how an activation is split over the mesh, and returns it.

    Args:
      x: The activation.
      axes: One entry for each dimension; see `SplitDims`. If None, the
        compiler decides.
      name: Key with which `activation_split_dims_mapping` overrides `axes`.
    """
    self._sharded.add(name)
    axes = self.hparams.activation_split_dims_mapping.get(name, axes)
    if axes is None:
      return x
    return partitioning.constrain(x, tuple(map(weights.axis, axes)))

  def add_summary(
    self, name: str, value: jax.Array, verbosity: int = 2
  ) -> None:
    """Logs a scalar with the metrics of the step.

    It does so if the task's `train.summary_verbosity` is at least `verbosity`.
    """
    run, path = self.in_run(), self._scalar_path(name, value)
    if verbosity <= run.verbosity:
      layer_runs.add(run.collected.summaries, path, value)

  def add_aux_loss(
    self, name: str, value: jax.Array, weight: Any = 1.0
  ) -> None:
    """Adds a scalar to the loss. Averages over batches weight it."""
    losses = self.in_run().collected.aux_losses
    layer_runs.add(losses, self._scalar_path(name, value), (value, weight))

  def _scalar_path(self, name: str, value: Any) -> str:
    if jnp.ndim(value):
      raise ValueError(
        f'{self.module_name} has {name!r} of shape {jnp.shape(value)}; expected'
        ' a scalar, such as the mean.'
      )
    return f'{self.module_name}/{name}'

  # For use from outside of a run.

  def init(self, rng: jax.Array, *args: Any, **kwargs: Any) -> Variables:
    """Returns the initial values of all variables.

    Args:
      rng: Random key, raw or typed.
      *args: Inputs. They are needed only if the tree contains Haiku modules,
        which create their weights when they are called.
      **kwargs: Keyword arguments, as for `apply`.
    """
    return partitioning.unbox(self.boxed_init(rng, *args, **kwargs))

  def boxed_init(self, rng: jax.Array, *args: Any, **kwargs: Any) -> Variables:
    """Like `init`, with each array in a `partitioning.Logical`."""
    run = layer_runs.Run(rng)
    variables = self._init(run, *args, **kwargs)

    def box(path: Any, value: jax.Array) -> partitioning.Logical:
      _, layer, name = (key.key for key in path)
      weight, _ = run.created.get(layer, {}).get(name, (None, None))
      # A variable of a Haiku module has no declaration.
      axes = weight.axes if weight else (None,) * value.ndim
      return partitioning.Logical(value, axes)

    return jax.tree_util.tree_map_with_path(box, variables)

  def abstract_init(self) -> dict[str, dict[str, dict[str, WeightHParams]]]:
    """Returns the declarations of all variables, without creating arrays."""
    run = layer_runs.Run()

    def make(rng: jax.Array) -> Variables:
      run.init_key = rng
      return self._init(run)

    jax.eval_shape(make, jax.random.key(0))
    return run.tree(lambda path, name, weight: weight)

  def num_params(self) -> int:
    """Returns the number of trainable parameters."""
    return sum(w.size for w in jax.tree.leaves(self.abstract_init()[PARAMS]))

  def _init(
    self,
    run: layer_runs.Run,
    *args: Any,
    method: str = '__call__',
    **kwargs: Any,
  ) -> Variables:
    def make() -> None:
      layer = self._root(run)
      if args or kwargs:
        getattr(layer, method)(*args, **kwargs)

    params, state = hk.transform_with_state(make).init(run.init_key)
    to_dict = hk.data_structures.to_mutable_dict
    return {PARAMS: to_dict(params), NON_TRAINABLE: to_dict(state)}

  def _root(self, run: layer_runs.Run) -> 'BaseLayer':
    name = self.hparams.name or layer_runs.snake_case(type(self).__name__)
    return self.bound(name, run)

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
    """Runs a method with the given variables; a pure function.

    Args:
      variables: Variables, as `init` returns them.
      *args: Positional arguments of the method.
      rng: Random key. Required if the method draws random numbers.
      method: Name of the method.
      do_eval: Whether this is an evaluation.
      mutable: Whether to return a pair of the result and a `Collected`.
      verbosity: Highest verbosity of the summaries to collect.
      **kwargs: Keyword arguments of the method.
    """
    run = layer_runs.Run(do_eval=do_eval, verbosity=verbosity)

    def call() -> Any:
      return getattr(self._root(run), method)(*args, **kwargs)

    out, state = hk.transform_with_state(call).apply(
      variables[PARAMS], variables.get(NON_TRAINABLE, {}), rng
    )
    if not mutable:
      return out
    run.collected.non_trainable = hk.data_structures.to_mutable_dict(state)
    return out, run.collected
