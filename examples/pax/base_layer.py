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

instantiate = pax_fiddle.instantiate
sub_config_field = hparams_lib.sub_config_field
template_field = pax_fiddle.template_field

# Pax's names, and the types of a run's results.
WeightHParams = weights.WeightHParams
WeightHParamsCollection = weights.WeightHParamsCollection
WeightInit = weights.WeightInit
SplitDims = weights.SplitDims
Collected = layer_runs.Collected
Variables = layer_runs.Variables
PARAMS, NON_TRAINABLE = layer_runs.PARAMS, layer_runs.NON_TRAINABLE


def _in_its_place(method: Callable[..., Any]) -> Callable[..., Any]:
  """Runs a layer's method in the layer's place, if it is part of a run."""
  is_call = method.__name__ in ('__call__', 'fprop')

  @functools.wraps(method)
  def placed(self: 'BaseLayer', *args: Any, **kwargs: Any) -> Any:
    if self._run is None and not is_call:
      return method(self, *args, **kwargs)
    self.in_run()
    scope = jax.named_scope(str(self.name))
    with scope, layer_runs.place(self.module_name, method.__name__):
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

  _run: layer_runs.Run | None = None
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

  def bound(self, path: str, run: layer_runs.Run) -> Self:
    """Returns the layer as part of a run, with variables and children.

    Args:
      path: the layer's place in the tree.
      run: the run of `init` or `apply`.
    """
    layer = type(self)(self.hparams)
    layer._run, layer.in_stacks = run, run.stacks
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
    return self.in_run().created.get(self.module_name, {})

  def in_run(self) -> layer_runs.Run:
    """Returns the run that the layer is part of."""
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
    weight.check(f'{path}/{name}')
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
      return layer.bound(path, run)
    return run.only(shared, path, layer)

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

  def _reserve(self, name: str) -> layer_runs.Run:
    run = self.in_run()
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
    return self.in_run().do_eval

  @property
  def aux_losses(self) -> dict[str, tuple[Any, Any]]:
    """What was added to the loss in this run up to now, by `add_aux_loss`."""
    return dict(self.in_run().collected.aux_losses)

  @property
  def theta(self) -> Any:
    """The values of its variables, as attributes: `self.theta.w`."""
    return layer_runs.Theta(self.get_var)

  def get_var(self, name: str) -> jax.Array:
    """Returns the value of a variable, as it is now."""
    if name not in self._variables:
      raise AttributeError(
        f'{self.module_name} has no variable {name!r}; it has'
        f' {sorted(self._variables)}.'
        + errors.did_you_mean(name, self._variables)
      )
    return self.in_run().value(self.module_name, name)

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
    self.in_run().update(self.module_name, name, value)

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
    return partitioning.constrain(x, tuple(map(weights.axis, axes)))

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
    run = self.in_run()
    self._check_scalar(name, value)
    if verbosity <= run.verbosity:
      path = f'{self.module_name}/{name}'
      layer_runs.add(run.collected.summaries, path, value)

  def add_aux_loss(
    self, name: str, value: jax.Array, weight: Any = 1.0
  ) -> None:
    """Adds `value` to what is minimised.

    Args:
      name: its name in this layer.
      value: a scalar.
      weight: what counts where it is averaged over batches.
    """
    losses = self.in_run().collected.aux_losses
    self._check_scalar(name, value)
    layer_runs.add(losses, f'{self.module_name}/{name}', (value, weight))

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
    run = layer_runs.Run(rng)
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
    run = layer_runs.Run()

    def make(rng: jax.Array) -> Variables:
      run.init_key = rng
      return self._init(run)

    jax.eval_shape(make, jax.random.key(0))
    return run.tree(lambda path, name, weight: weight)

  def num_params(self) -> int:
    """Returns how many numbers are trained."""
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
