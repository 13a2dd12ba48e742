"""Turns iterables, generators and datasets into inputs.

The training loop passes every data source through `as_input`, which returns a
`base.BaseInput`.
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

  If the iterator has `get_state` and `set_state`, as Grain's iterators have,
  checkpoints hold its state, a pytree of arrays and plain values. Otherwise a
  resumed run starts from the beginning and logs a warning.

  Attributes:
    function: Returns an iterable of batches, each a dict of arrays
      [batch_size, ...]; the last may have fewer rows. It may take arguments
      named `host_index` and `num_hosts`. On several hosts it must take
      `host_index`.
    batch_size: Rows per batch; None means as many as each batch has.
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
    """Returns 0 without waiting for other hosts, since no seed is needed."""
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
      return {'state': mark}  # Grain's `ElasticIterator`: equal on all hosts.
    return {
      'host': self.infeed_host_index,
      'hosts': self.num_infeed_hosts,
      'state': mark,
    }

  def set_state(self, state: Any) -> None:
    """Sets the iterator's state; rejects the state of a different host."""
    got = state if isinstance(state, Mapping) else {}
    expected = self.state_of(got.get('state'))
    if any(got.get(key) != expected[key] for key in expected if key != 'state'):
      raise ValueError(
        f'{self.name} got the state {state!r:.200}; expected the state of host'
        f' {self.infeed_host_index} of {self.num_infeed_hosts}. Resume on the'
        ' same number of hosts, or start a new run.'
      )
    # Pass a copy, since the iterator may change its argument.
    self._open().set_state(copy.deepcopy(state['state']))
    self._ended = False


@dataclasses.dataclass(kw_only=True, eq=False)
class _SkippingInput(base.ResumableInput):
  """The batches of a `tf.data.Dataset`; to resume, it skips the first ones."""

  dataset: Any
  batch_size: int | None = None  # type: ignore[assignment]

  def read_from(self, position: int) -> Iterator[tuple[dict[str, Any], int]]:
    batches = self.dataset.skip(position).as_numpy_iterator()
    yield from zip(batches, itertools.count(position + 1), strict=False)


def as_input(
  source: Any, *, is_training: bool, shard: base.Shard | None = None
) -> base.BaseInput:
  """Turns a source of batches into an input.

  Args:
    source: An input, which is returned unchanged; an iterable or iterator of
      dicts of arrays [B, ...], such as a Grain dataset or data loader; a
      function that returns one; or a `tf.data.Dataset` of batches, which must
      be deterministic.
    is_training: Whether it feeds training. If not, each evaluation reads all.
    shard: Shard that the source was made for.
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
    function = lambda host_index: source  # It already has this host's rows.
  return IterableInput(function=function, **fields)
