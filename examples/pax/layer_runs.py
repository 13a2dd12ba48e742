"""A run of `init` or `apply`: what all layers of a tree have in common.

Haiku keeps the variables and the random keys of a run.
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

# The two collections of variables.
PARAMS = 'params'
NON_TRAINABLE = 'non_trainable'

# Collection -> path of the layer -> name -> array.
Variables = dict[str, dict[str, dict[str, Any]]]


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
      add(self.summaries, prefix + name, value)
    for name, value in other.aux_losses.items():
      add(self.aux_losses, prefix + name, value)


def add(into: dict[str, Any], name: str, value: Any) -> None:
  """Adds an entry; a layer that is called twice has two."""
  unique, i = name, 1
  while unique in into:
    unique, i = f'{name}_{i}', i + 1
  into[unique] = value


@dataclasses.dataclass
class Run:
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
  created: dict[str, dict[str, tuple[weights.WeightHParams, bool]]] = (
    dataclasses.field(default_factory=dict)
  )
  shared: dict[Any, Any] = dataclasses.field(default_factory=dict)
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
      number = zlib.crc32(f'{path}/{name}'.encode())
      return weight.make(jax.random.fold_in(self.init_key, number))

    with place(path):
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

  def only(self, key: Any, path: str, layer: Any) -> Any:
    """Returns the one layer that several parents have, as part of this run.

    Args:
      key: what it is in `shared`.
      path: where a parent has it; the first counts.
      layer: the layer, not yet part of a run.

    Raises:
      ValueError: the layers of this key are not the same.
    """
    if key not in self.shared:
      self.shared[key] = layer.bound(path, self)
    first = self.shared[key]
    if first.in_stacks != self.stacks:
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

  def update(self, path: str, name: str, value: jax.Array) -> None:
    """Sets a variable that is not trained."""
    with place(path):
      hk.set_state(name, value)


def place(path: str, method: str | None = None) -> Any:
  """Enters a layer's place in Haiku's tree: its variables, Haiku modules."""
  if method is None and hk.experimental.current_name() == path:
    return contextlib.nullcontext()
  return hk.name_scope(
    hk.experimental.force_name(path), method_name=method or '__call__'
  )


class Theta:
  """The values of a layer's variables, as attributes."""

  def __init__(self, get: Callable[[str], jax.Array]):
    self._get = get

  def __getattr__(self, name: str) -> Any:
    return self._get(name)


def snake_case(name: str) -> str:
  """Returns the default name of a layer of a class."""
  return re.sub(
    r'(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])', '_', name
  ).lower()
