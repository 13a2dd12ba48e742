"""A module of Flax as a layer.

    layer = FlaxModule.HParams(
      module_factory_method=lambda: nn.Dense(4),
      inputs=(jax.ShapeDtypeStruct((1, 3), jnp.float32),),
    ).Instantiate()

One of Flax's NNX is `lambda: nnx.bridge.ToLinen(nnx.Linear, (3, 4))`.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from flax import traverse_util
from flax.core import meta
import haiku as hk
import jax
import jax.numpy as jnp

from examples.pax import base_layer
from examples.pax import weights
from jaxline import errors

_PARAMS = 'params'  # Flax's name of the collection of trained weights.


@dataclasses.dataclass(frozen=True)
class _Init(weights.WeightInit):
  """A variable of a module starts as the module says.

  Attributes:
    first: returns its first value of a key.
  """

  first: Callable[[jax.Array], jax.Array] | None = None

  def maker(self, *unused: Any) -> Callable[..., jax.Array]:
    assert self.first is not None
    first = self.first
    return lambda key, shape, dtype: first(key).reshape(shape).astype(dtype)


class FlaxModule(base_layer.BaseLayer):
  """Wraps a module of Flax's linen, whose variables become the layer's.

  Its collection 'params' is trained; all others, such as 'batch_stats', are set
  by a call in training. A variable's name is its path, as 'Dense_0.kernel', and
  behind the name of its collection if that is not trained.

  Attributes:
    module_factory_method: makes the module, unbound.
    inputs: for each argument, an array or a `jax.ShapeDtypeStruct` of a valid
      shape, from which the shapes of the variables follow.
    train_argument: the name of the argument that says whether this is training;
      '' is none.
  """

  module_factory_method: Callable[[], Any] | None = None
  inputs: Sequence[Any] = ()
  train_argument: str = ''

  def setup(self) -> None:
    if self.module_factory_method is None:
      raise errors.UsageError(
        f'{self.module_name}.module_factory_method is None; expected a function'
        ' that makes a module of Flax.'
      )
    self._module = self.module_factory_method()
    shapes = jax.eval_shape(self._first_values, jax.random.key(0))
    # Path, from the collection on -> name of the variable.
    self._paths: dict[tuple[str, ...], str] = {}
    for path, x in shapes.items():
      is_trained = path[0] == _PARAMS
      name = '.'.join(path[is_trained:])
      self._paths[path] = name
      init = _Init(
        'flax', first=lambda key, path=path: self._first_values(key)[path]
      )
      weight = base_layer.WeightHParams(x.shape, init, x.dtype)
      self.create_variable(name, weight, trainable=is_trained)

  def _first_values(self, rng: jax.Array) -> dict[tuple[str, ...], jax.Array]:
    """Returns path -> first value of all variables."""
    inputs = [jnp.zeros(x.shape, x.dtype) for x in self.inputs]
    variables = self._module.init(rng, *inputs, **self._argument(False))
    return traverse_util.flatten_dict(meta.unbox(variables))

  def _argument(self, is_training: bool) -> dict[str, bool]:
    return {self.train_argument: is_training} if self.train_argument else {}

  def __call__(self, *args: Any) -> Any:
    """Returns the output of the module."""
    values = {path: self.get_var(name) for path, name in self._paths.items()}
    changing = {path[0] for path in values} - {_PARAMS}
    key = hk.maybe_next_rng_key()
    out, changed = self._module.apply(
      traverse_util.unflatten_dict(values),
      *args,
      **self._argument(not self.do_eval),
      rngs=None if key is None else {'dropout': key},
      mutable=[] if self.do_eval else sorted(changing),
    )
    for path, value in traverse_util.flatten_dict(changed).items():
      self.update_var(self._paths[path], value)
    return out
