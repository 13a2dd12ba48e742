"""Runs of `init` or `apply`: the state that all layers of a tree share.

Haiku holds the variables and the random keys of a run.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import difflib
import re
from typing import Any
import zlib

import haiku as hk
import jax

from examples.pax import weights

# Collections of variables.
PARAMS = 'params'
NON_TRAINABLE = 'non_trainable'

# Collection -> path of the layer -> name -> array.
Variables = dict[str, dict[str, dict[str, Any]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Collected:
  """Side outputs of a run."""

  # New values of all non-trainable variables: path of the layer -> name.
  non_trainable: dict[str, dict[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  summaries: dict[str, Any] = dataclasses.field(
    default_factory=dict
  )  # Path -> scalar.
  aux_losses: dict[str, tuple[Any, Any]] = dataclasses.field(
    default_factory=dict
  )  # Path -> (value, weight).

  def add(self, other: 'Collected', prefix: str = '') -> None:
    """Adds the summaries and losses of `other`, their names prefixed."""
    for name, value in other.summaries.items():
      add(self.summaries, prefix + name, value)
    for name, value in other.aux_losses.items():
      add(self.aux_losses, prefix + name, value)


def add(into: dict[str, Any], name: str, value: Any) -> None:
  """Adds an entry. A layer that is called twice adds two, `name`, `name_1`."""
  unique, i = name, 1
  while unique in into:
    unique, i = f'{name}_{i}', i + 1
  into[unique] = value


@dataclasses.dataclass
class Run:
  """The state of one run of `init` or `apply`, shared by its layers."""

  # Key for the initial values, or None in a run of `apply`.
  init_key: jax.Array | None = None
  do_eval: bool = True  # Whether this is an evaluation.
  verbosity: int = -1  # Highest verbosity of the summaries to collect.
  # Side outputs of the layers so far.
  collected: Collected = dataclasses.field(default_factory=Collected)
  # Path of the layer -> name -> (declaration, whether trainable).
  created: dict[str, dict[str, tuple[weights.WeightHParams, bool]]] = (
    dataclasses.field(default_factory=dict)
  )
  # Layers with several parents, by `shared_weight_layer_id` or by the id of
  # their template.
  shared: dict[Any, Any] = dataclasses.field(default_factory=dict)
  # Stacks whose layers are being created, outermost first, as (path, number of
  # layers).
  stacks: tuple[tuple[str, int], ...] = ()

  def value(self, path: str, name: str) -> jax.Array:
    """Returns the current value of a variable."""
    weight, trainable = self.created[path][name]
    get = hk.get_parameter if trainable else hk.get_state

    def make(*unused: Any) -> jax.Array:
      if self.init_key is None:
        given = {**hk.get_params(), **hk.get_current_state()}
        raise ValueError(
          f'The variables given to `apply` have no {path}/{name}; got the'
          f' layers {sorted(given)}. Create all variables in `setup`, and pass'
          ' the result of `init`.'
        )
      # The key depends on the name only, so adding a variable does not change
      # the initial values of the others.
      number = zlib.crc32(f'{path}/{name}'.encode())
      return weight.make(jax.random.fold_in(self.init_key, number))

    with place(path):
      return get(name, weight.full_shape, weight.dtype, init=make)

  def tree(self, make: Callable[..., Any], above: str = '') -> Variables:
    """Returns a tree like `init`, with leaves `make(path, name, declaration)`.

    It has the paths with the prefix `above`, and lacks this prefix.
    """
    tree: Variables = {PARAMS: {}, NON_TRAINABLE: {}}
    for path, created in self.created.items():
      for name, (weight, trainable) in created.items():
        if path.startswith(above):
          layers = tree[PARAMS if trainable else NON_TRAINABLE]
          of_layer = layers.setdefault(path.removeprefix(above), {})
          of_layer[name] = make(path, name, weight)
    return tree

  def only(self, key: Any, path: str, layer: Any) -> Any:
    """Returns the layer that several parents share, bound to this run.

    Args:
      key: Key of the layer in `shared`.
      path: Path of the layer within this parent. The variables have the path of
        the first parent.
      layer: The layer, not yet bound to a run.
    """
    if key not in self.shared:
      self.shared[key] = layer.bound(path, self)
    first = self.shared[key]
    if first.in_stacks != self.stacks:
      raise ValueError(
        f'{path} and {first.module_name} cannot be the same layer as one within'
        ' a stack, whose weights have an extra axis. Share layers either within'
        ' one layer of the stack or outside the stack.'
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

  def update(self, path: str, name: str, value: jax.Array) -> None:
    """Sets a non-trainable variable."""
    with place(path):
      hk.set_state(name, value)


def place(path: str, method: str | None = None) -> Any:
  """Enters the scope of a layer's variables and Haiku modules."""
  if method is None and hk.experimental.current_name() == path:
    return contextlib.nullcontext()
  return hk.name_scope(
    hk.experimental.force_name(path), method_name=method or '__call__'
  )


class Theta:
  """Values of a layer's variables, as attributes."""

  def __init__(self, get: Callable[[str], jax.Array]):
    self._get = get

  def __getattr__(self, name: str) -> Any:
    return self._get(name)


def snake_case(name: str) -> str:
  """Converts a class name to the default name of its layers."""
  return re.sub(
    r'(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])', '_', name
  ).lower()
