"""A layer that wraps a Flax module.

    layer = FlaxModule.HParams(
      module_factory_method=lambda: nn.Dense(4),
      inputs=(jax.ShapeDtypeStruct((1, 3), jnp.float32),),
    ).Instantiate()

For a module of Flax's NNX, write
`lambda: nnx.bridge.ToLinen(nnx.Linear, (3, 4))`.
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

_PARAMS = 'params'  # Flax's name for the collection of trained weights.


@dataclasses.dataclass(frozen=True)
class _Init(weights.WeightInit):
  """Initializes a variable as the Flax module does, from a random key."""

  first: Callable[[jax.Array], jax.Array] | None = None

  def maker(self, *unused: Any) -> Callable[..., jax.Array]:
    return lambda key, shape, dtype: (
      self.first(key).reshape(shape).astype(dtype)
    )


class FlaxModule(base_layer.BaseLayer):
  """Wraps a Flax linen module, whose variables become the layer's.

  The collection 'params' is trained. Calls in training update all other
  collections, such as 'batch_stats'. A variable's name is its path, such as
  'Dense_0.kernel', with the collection as a prefix if it is not trained.
  """

  # Makes the unbound module.
  module_factory_method: Callable[[], Any] | None = None
  # An array or a `jax.ShapeDtypeStruct` of a valid shape for each argument.
  # They determine the shapes of the variables.
  inputs: Sequence[Any] = ()
  # The module's argument that is True in training. If '', there is none.
  train_argument: str = ''

  _RULES = {
    'a module_factory_method, which makes a Flax module': (
      lambda p: p.module_factory_method is not None
    )
  }

  def setup(self) -> None:
    self._module = self.module_factory_method()
    shapes = jax.eval_shape(self._first_values, jax.random.key(0))
    # Path, including the collection -> name of the variable.
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
    """Returns path -> initial value of all variables."""
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
