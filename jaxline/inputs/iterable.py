"""Inputs of anything that gives batches: iterables, generators, datasets.

`as_input` is the entrance of the training loop: behind it, everything that
gives batches is a `base.BaseInput`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import copy
import dataclasses
import itertools
from typing import Any

from jaxline.inputs import base
from jaxline.inputs import batches


@dataclasses.dataclass(kw_only=True, eq=False)
class IterableInput(base.BaseInput):
  """The batches of any iterable.

  If the iterator has `get_state` and `set_state`, as Grain's have, checkpoints
  hold its state, a pytree of arrays and plain values. Otherwise a resumed run
  reads from the beginning again, and logs so.

  Attributes:
    function: returns an iterable of batches, each a dict of arrays
      [batch_size, ...]; the last may have fewer rows. It may take `host_index`
      and `num_hosts`, by these names; with several hosts, it must take the
      first.
    batch_size: rows per batch; None is as many as each batch has.
  """

  function: Callable[..., Iterable[Mapping[str, Any]]]
  batch_size: int | None = None  # type: ignore[assignment]

  _iterator: Any = dataclasses.field(default=None, init=False, repr=False)

  def __post_init__(self) -> None:
    super().__post_init__()
    index, count = self.infeed_host_index, self.num_infeed_hosts
    hosts = {'host_index': index, 'num_hosts': count}
    self._hosts = base.choose_arguments(self.function, hosts)
    if count != 1 and 'host_index' not in self._hosts:
      self.refuse('function', f'one that takes host_index, for {count} hosts')

  def _draw_seed(self) -> int:
    """Returns 0: nothing needs a seed, so no process waits for the others."""
    return 0

  def _open(self) -> Any:
    if self._iterator is None:
      self._iterator = iter(self.function(**self._hosts))
    return self._iterator

  def get_next(self) -> dict[str, Any]:
    return batches.as_batch(next(self._open()))

  def reset(self) -> None:
    super().reset()
    self._iterator = None

  @property
  def saves_position(self) -> bool:
    return self.input_checkpointing_enabled and all(
      hasattr(self._open(), method) for method in ('get_state', 'set_state')
    )

  def position(self) -> Any:
    return self._open().get_state()

  def state_of(self, mark: Any) -> Any:
    if isinstance(mark, Mapping) and [*mark] == ['global_next_index']:
      return {'state': mark}  # All hosts of an `ElasticIterator` share it.
    return {
      'host': self.infeed_host_index,
      'hosts': self.num_infeed_hosts,
      'state': mark,
    }

  def set_state(self, state: Any) -> None:
    """Sets the state of the iterator; refuses the state of another host."""
    got = state if isinstance(state, Mapping) else {}
    expected = self.state_of(got.get('state'))
    if any(got.get(key) != expected[key] for key in expected if key != 'state'):
      raise ValueError(
        f'{self.name} got the state {state!r:.200}; expected that of host'
        f' {self.infeed_host_index} of this number of hosts,'
        f' {self.num_infeed_hosts}.'
      )
    # A copy, since the iterator may change what it gets.
    self._open().set_state(copy.deepcopy(state['state']))
    self._ended = False


@dataclasses.dataclass(kw_only=True, eq=False)
class _SkippingInput(base.ResumableInput):
  """The batches of a `tf.data.Dataset`; a resumed run reads them again."""

  dataset: Any
  batch_size: int | None = None  # type: ignore[assignment]

  def read_from(self, position: int) -> Iterator[tuple[dict[str, Any], int]]:
    batches = self.dataset.skip(position).as_numpy_iterator()
    yield from zip(batches, itertools.count(position + 1), strict=False)


def as_input(
  source: Any, *, is_training: bool, shard: base.Shard | None = None
) -> base.BaseInput:
  """Returns anything that gives batches as an input.

  Args:
    source: an input, which is returned as it is; an iterable or iterator of
      dicts of arrays [B, ...], such as a Grain dataset or data loader; a
      function that returns one; a `tf.data.Dataset` of batches that is the same
      each time it is read.
    is_training: whether it feeds training; else an evaluation reads all.
    shard: the shard that the source was made for.
  """
  if isinstance(source, base.BaseInput):
    return source
  fields: dict[str, Any] = {
    'name': f'a {type(source).__name__}',
    'is_training': is_training,
    'reset_for_eval': not is_training,
    'shard': shard,
  }
  if hasattr(source, 'as_numpy_iterator'):
    return _SkippingInput(dataset=source, repeat=False, **fields)
  function = source
  if not callable(source) or hasattr(source, '__iter__'):
    function = lambda host_index: source  # It is this host's.
  return IterableInput(function=function, **fields)
