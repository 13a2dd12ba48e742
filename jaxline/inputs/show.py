"""Shows and checks the data of a run: batches, hosts, resuming, speed.

These functions make the output of `python -m jaxline.inputs show`, also for
notebooks:

  source = text.TextInput(batch_size=8, ...)
  print(show.describe(next(source)))
  make_input = lambda shard: text.TextInput(batch_size=8, shard=shard, ...)
  print(show.check(make_input, num_hosts=4))

`make_input` below is always a function of a `base.Shard`, called `shard`, that
returns a new input, a `BaseInput` or any iterable of dicts. Without `shard` it
is checked as that of one host. `check` tests each of `PROMISES`. Rows are
compared by a hash of all entries except weights; rows of weight 0 are padding
and are never counted.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import copy
import dataclasses
import hashlib
import itertools
import textwrap
import time
from typing import Any

import jax
import numpy as np

from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import iterable

MakeInput = Callable[..., Iterable[Mapping[str, Any]]]

# The result of a check: correct; for a person to judge; wrong.
OK = 'ok'
LOOK = 'look'
WRONG = 'WRONG'

WIDTH = 100  # Columns of what is printed.
_TIMED_BATCHES = 32


# One batch.


def _arrays(batch: Any) -> dict[str, np.ndarray]:
  """Returns name -> array; an entry of a nested batch is 'src.ids'."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): np.asarray(x)
    for path, x in jax.tree_util.tree_leaves_with_path(batch)
  }


def _is(name: str, last: str) -> bool:
  """Returns whether an entry has a name, in the batch or in a nested one."""
  return name.rpartition('.')[2] == last


def _weights(arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
  return [x for name, x in arrays.items() if _is(name, base.WEIGHTS)]


def _real_rows(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns which rows have a weight, bool [B]."""
  if weights := _weights(arrays):
    return np.any([x.reshape(len(x), -1).any(axis=1) for x in weights], axis=0)
  return np.ones(next((len(x) for x in arrays.values() if x.ndim), 0), bool)


def _real_tokens(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns which positions hold tokens, bool [B, ..., L], by entry `ids`."""
  found = {}
  for name, ids in arrays.items():
    if not _is(name, 'ids') or ids.ndim < 2:
      continue
    paddings, segments, weights = (
      arrays.get(name.removesuffix('ids') + key)
      for key in (base.PADDINGS, 'segment_ids', base.WEIGHTS)
    )
    if weights is None or weights.shape != ids.shape:
      of_rows = _real_rows(arrays).reshape(-1, *[1] * (ids.ndim - 1))
      weights = np.broadcast_to(of_rows, ids.shape)
    # In this order: a prompt has no weight, and is no filler.
    if paddings is not None:
      real = paddings == 0
    elif segments is not None:
      real = segments > 0
    else:
      real = weights != 0
    # Padding rows may be zeros, also in `paddings`.
    found[name] = real & np.any(weights != 0, axis=-1, keepdims=True)
  return found


def rows(batch: Mapping[str, Any]) -> int:
  """Returns how many rows have a weight."""
  return int(_real_rows(_arrays(batch)).sum())


def tokens(batch: Mapping[str, Any]) -> int | None:
  """Returns how many tokens a batch has, without filler; None if it has none.

  Tokens are entries `ids` [B, ..., L], also those of nested batches. What fills
  is said by `paddings`, or else `segment_ids`, or else `weights`.
  """
  found = _real_tokens(_arrays(batch))
  return sum(int(x.sum()) for x in found.values()) if found else None


def padding_share(batch: Mapping[str, Any]) -> float:
  """Returns the fraction of a batch that is padding: of tokens, or of rows."""
  arrays = _arrays(batch)
  masks = list(_real_tokens(arrays).values()) or [_real_rows(arrays)]
  size = sum(x.size for x in masks)
  return 1 - sum(int(x.sum()) for x in masks) / size if size else 0.0


def describe(batch: Mapping[str, Any]) -> str:
  """Returns a table: each entry's name, shape, dtype, least, greatest, mean."""
  table = [('entry', 'shape', 'dtype', 'min', 'max', 'mean')]
  for name, x in _arrays(batch).items():
    shape = ' x '.join(map(str, x.shape)) or 'scalar'
    table.append((name, shape, x.dtype.name, *_range(x)))
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = []
  for line in table:
    cells = zip(line, widths, (str.ljust,) * 3 + (str.rjust,) * 3, strict=True)
    lines.append('  '.join(align(cell, width) for cell, width, align in cells))
  return '\n'.join(map(str.rstrip, lines))


def _range(x: np.ndarray) -> tuple[str, str, str]:
  """Returns an array's least value, greatest value and mean, as text."""
  if not x.size:
    return '', '', ''
  if jax.numpy.issubdtype(x.dtype, np.floating):
    x = x.astype(np.float64)  # NumPy has no mean of bfloat16.
    return f'{x.min():.4g}', f'{x.max():.4g}', f'{x.mean():.4g}'
  if x.dtype == bool or jax.numpy.issubdtype(x.dtype, np.integer):
    return str(x.min()), str(x.max()), f'{x.mean():.4g}'
  return '', '', f'first {shorten(repr(x.flat[0]), 30)}'


def texts(
  source: Any, batch: Mapping[str, Any], num_rows: int = 2
) -> dict[str, list[str]]:
  """Returns the text of a batch's first rows.

  Args:
    source: the input of the batch.
    batch: with entries `ids` [B, ..., L], or nested ones.
    num_rows: how many rows.

  Returns:
    The entry's name ('ids', 'tgt.ids') -> text of each row, without filler.
    Empty where the input has no `ids_to_strings`.
  """
  if not isinstance(source, base.BaseInput):
    return {}
  arrays = _arrays(batch)
  found = {}
  for name, real in _real_tokens(arrays).items():
    length = real.shape[-1]
    real_BL, ids_BL = (
      x.reshape(-1, length)[:num_rows] for x in (real, arrays[name])
    )
    # Up to the last one that is real: filler may stand between, not behind.
    lengths = np.max(real_BL * np.arange(1, length + 1), axis=1, initial=0)
    key = name.rpartition('.')[0].replace('.', '/') or None
    with contextlib.suppress(NotImplementedError):
      found[name] = source.ids_to_strings(ids_BL, lengths, key=key)
  return found


# Several batches.


def digest(batches: Iterable[Mapping[str, Any]]) -> str:
  """Returns a hash of batches, 16 letters.

  The same for the same names, dtypes, shapes and values in the same order, on
  every machine and in every process.
  """
  hashed = hashlib.sha256()
  for batch in batches:
    hashed.update(_serialized(_arrays(batch)))
  return hashed.hexdigest()[:16]


def _serialized(arrays: Mapping[str, np.ndarray]) -> bytes:
  """Returns names, dtypes, shapes and values as bytes."""
  parts = [f'{len(arrays)} arrays;'.encode()]
  for name, x in arrays.items():
    parts += [f'{name} {x.dtype.name} {x.shape};'.encode(), _bytes(x)]
  return b''.join(parts)


def _bytes(x: np.ndarray) -> bytes:
  # An array of objects holds addresses.
  return repr(x.tolist()).encode() if x.dtype == object else x.tobytes()


def _row_hashes(arrays: Mapping[str, np.ndarray]) -> list[bytes]:
  """Returns a hash of each row that has a weight."""
  hashes = []
  for row in np.flatnonzero(_real_rows(arrays)):
    hashed = hashlib.blake2b(digest_size=16)
    for name, x in arrays.items():
      if x.ndim and not _is(name, base.WEIGHTS):
        hashed.update(name.encode() + b';' + _bytes(x[row]))
    hashes.append(hashed.digest())
  return hashes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
  """How fast an input gives batches when nothing else is done.

  Attributes:
    batches: how many were read after the first one.
    rows: their rows with a weight.
    tokens: their tokens without padding; None if they have no tokens.
    seconds: their time.
    first_batch_seconds: the time of the first: opening files, starting workers.
  """

  batches: int
  rows: int
  tokens: int | None
  seconds: float
  first_batch_seconds: float

  def __str__(self) -> str:
    """Returns a line: tokens, rows and batches a second."""
    if not self.batches:
      text = 'not measured, as no second batch was read'
    else:
      counts = (('tokens', self.tokens), ('rows', self.rows))
      text = ', '.join(
        f'{number / self.seconds:,.0f} {name}/s'
        for name, number in (*counts, ('batches', self.batches))
        if number is not None
      )
    return f'{text}; the first batch after {self.first_batch_seconds:.2f} s'


def throughput(
  source: Iterable[Mapping[str, Any]], seconds: float = 1.0
) -> Throughput:
  """Reads for some seconds, or to the end of the data.

  Args:
    source: an input; its position changes.
    seconds: for how long, after the first batch.

  Returns:
    The counts and times. The first batch is timed separately and not counted.
  """
  batches = iter(source)
  begin = time.perf_counter()
  next(batches, None)
  first_batch_seconds = time.perf_counter() - begin
  num_batches = num_rows = 0
  num_tokens: int | None = None
  spent = 0.0
  # The time to count tokens is left out: for memory-mapped text it takes as
  # long as reading. Several batches are timed together, so that a source that
  # reads ahead gains little by these pauses.
  while spent < seconds:
    some = []
    begin = time.perf_counter()
    for batch in itertools.islice(batches, _TIMED_BATCHES):
      some.append(batch)
      if spent + time.perf_counter() - begin >= seconds:
        break
    spent += time.perf_counter() - begin
    if not some:
      break
    num_batches += len(some)
    num_rows += sum(map(rows, some))
    if counted := [n for n in map(tokens, some) if n is not None]:
      num_tokens = (num_tokens or 0) + sum(counted)
  return Throughput(
    batches=num_batches,
    rows=num_rows,
    tokens=num_tokens,
    seconds=spent,
    first_batch_seconds=first_batch_seconds,
  )


# Several hosts.


@contextlib.contextmanager
def opened(
  make_input: MakeInput, host: int, num_hosts: int
) -> Iterator[tuple[Any, Iterator[Any]]]:
  """Yields a host's input and its iterator; both closed afterwards."""
  if num_hosts > 1 and not takes_shard(make_input):
    raise ValueError(
      f'the input is of one host, and not of {num_hosts}, as the function that'
      ' makes it takes no `shard`'
    )
  shard = base.Shard(host, num_hosts)
  source = iterable.as_input(
    base.of_shard(make_input, shard), is_training=True, shard=shard
  )
  try:
    yield source, iter(source)
  finally:
    if hasattr(source, 'close'):
      source.close()  # Of its workers, some shared memory would stay.


def takes_shard(make_input: Callable[..., Any]) -> bool:
  """Returns whether a function can make the inputs of several hosts."""
  return 'shard' in base.choose_arguments(make_input, {'shard': None})


class _Host:
  """What one host reads.

  Attributes:
    make_input: see the top of this module.
    source: its input.
    digest: of the first batches.
    digests: of each of them.
    states: behind each of them, if the position is saved.
    rows: by batch, the hash of each row that has a weight.
    records: (epoch, number) of each of these rows; None where records have no
      numbers.
    num_rows: with padding.
    weight: the sum of all weights; without any, the rows.
    padding: the sum of the batches' padding shares.
    ends: whether the data shall end.
    ended: whether that is all there is.
  """

  def __init__(
    self,
    make_input: MakeInput,
    number: int,
    num_hosts: int,
    num_batches: int,
    max_batches: int,
    one_epoch: bool | None,
  ):
    """Reads as host `number`; the other arguments are those of `check`."""
    self.make_input = make_input
    self.digests: list[str] = []
    self.states: list[Any] = []
    self.rows: list[list[bytes]] = []
    self.num_rows = 0
    self.weight = self.padding = 0.0
    seen: list[tuple[int, int]] = []
    self.records: list[tuple[int, int]] | None = []
    total = hashlib.sha256()
    with opened(make_input, number, num_hosts) as (source, batches):
      self.source = source
      # A stream has no numbers, and its position depends on its workers.
      if (
        isinstance(source, indexed.IndexedInput)
        and 'num_workers' not in source.identity()
      ):
        # Neither ahead nor in a worker, where the calls could not be noted.
        source.num_threads = source.num_workers = 0
        read = source.read

        def watched(records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
          seen.extend(zip(epochs.tolist(), records.tolist(), strict=True))
          return read(records, epochs)

        source.read = watched  # type: ignore[method-assign]
      if one_epoch is None:  # Not all have the field `repeat`.
        one_epoch = isinstance(source, base.BaseInput) and (
          source.reset_for_eval or getattr(source, 'repeat', None) is False
        )
      self.ends = one_epoch
      limit = max(num_batches, max_batches) if self.ends else num_batches
      for batch in itertools.islice(batches, limit):
        arrays = _arrays(batch)
        if len(self.rows) < num_batches:
          data = _serialized(arrays)
          total.update(data)
          self.digests.append(hashlib.sha256(data).hexdigest()[:16])
          if source.saves_position:
            # No bytes, where it is no `BaseInput`: it may change afterwards.
            self.states.append(copy.deepcopy(source.get_state()))
        self.rows.append(_row_hashes(arrays))
        if self.rows[-1]:  # Else a record was read for its shapes.
          self.records += seen
        seen.clear()
        self.num_rows += len(_real_rows(arrays))
        sums = [float(x.sum(dtype=np.float64)) for x in _weights(arrays)]
        self.weight += sum(sums) if sums else len(self.rows[-1])
        self.padding += padding_share(batch)
      self.ended = len(self.rows) < limit or (
        self.ends and next(batches, None) is None
      )
    self.digest = total.hexdigest()[:16]
    if len(self.records) < sum(map(len, self.rows)):
      self.records = None  # It has none, or does not read by `read` alone.


def _in_order(hosts: Sequence[_Host], first: int = 0) -> list[bytes]:
  """Returns the hashes of the rows of global batches, from `first` on."""
  batches = itertools.zip_longest(
    *(h.rows[first:] for h in hosts), fillvalue=[]
  )
  return [row for parts in batches for part in parts for row in part]


# The promises of an input. Each function returns a verdict and the result in
# words; None if the input does not promise this.

_Result = tuple[str, str] | None


def _check_rows(hosts: Sequence[_Host]) -> _Result:
  """Compares the rows of all hosts: their records, or else their contents.

  A record that is read twice in an epoch is wrong, and so are hosts that read
  the same rows in the same order. Other identical rows are for people to judge:
  they may be in the data.
  """
  source = hosts[0].source
  has_numbers = hosts[0].records is not None
  rows_of: list[list[Any]] = [
    _in_order([host]) if host.records is None else host.records
    for host in hosts
  ]
  counts = [collections.Counter(of) for of in rows_of]
  hosts_with = collections.Counter(row for count in counts for row in count)
  across = [row for row, n in hosts_with.items() if n > 1]
  within = [row for count in counts for row, n in count.items() if n > 1]
  text = (
    f'{sum(map(len, rows_of))} rows of {len(hosts)} host{"s" * bool(hosts[1:])}'
  )
  if not across and not within:
    if has_numbers:
      return OK, f'no record of {text} is read twice'
    return OK, f'no two of {text} are identical'

  text = (
    f'of {text}, {len(across)} different ones are on several hosts and'
    f' {len(within)} again on the same host'
  )
  same = [
    str(number)
    for number, (of, count) in enumerate(zip(rows_of, counts, strict=True))
    # Else all rows are much the same.
    if rows_of.count(of) > 1 and 2 * len(count) > len(of) > 1
  ]
  if same:
    text += f'; hosts {", ".join(same)} read the same rows'
  if has_numbers:
    epoch, record = (across + within)[0]
    text += f'; such as {source.describe_record(record, epoch)}'
  elif not same:
    return LOOK, (
      f'{text}; either the data has them more than once, or came around to its'
      ' beginning, or hosts read the same'
    )
  return WRONG, text


def _check_epoch(hosts: Sequence[_Host]) -> _Result:
  """Compares how many batches the hosts have, where the data ends."""
  counts = [len(host.rows) for host in hosts]
  if not any(host.ended for host in hosts):
    if not hosts[0].ends:
      return None
    return LOOK, f'not compared: more than {max(counts)} batches a host'
  numbers = [f'{len(h.rows)}{"" if h.ended else " or more"}' for h in hosts]
  if len(set(numbers)) > 1:
    return WRONG, (
      f'hosts 0, 1, ... have {", ".join(numbers)} batches: in a run, those that'
      ' have more would wait for ever. Fill up with rows of weight 0'
    )
  if not counts[0]:
    return WRONG, 'there is no data'
  weight = sum(host.weight for host in hosts)
  text = (
    f'{counts[0]} batches on each host; in all, {len(_in_order(hosts)):,} rows'
    f' of {sum(host.num_rows for host in hosts):,}, and weights of'
    f' {weight:{",.0f" if weight == int(weight) else ",.4g"}}'
  )
  if any(host.records is None for host in hosts):
    return OK, text
  total = hosts[0].source.num_records()
  left = total - len({r for host in hosts for r in host.records or ()})
  text += f'; {total:,} records, of which {left} are not read'
  return WRONG if left else OK, text


def _check_resume(hosts: Sequence[_Host]) -> _Result:
  """Compares the batches after a saved state with the original ones."""
  host = hosts[-1]
  if not host.digests:
    return LOOK, 'there is no data'
  if not host.states:
    if host.ends:
      return OK, 'begins anew with each evaluation'
    return (
      LOOK,
      'its position is not saved: a run that resumes reads other data',
    )
  # From the middle, as a run that was killed; then back, as from an older
  # checkpoint.
  middle = (len(host.states) + 1) // 2
  with opened(host.make_input, len(hosts) - 1, len(hosts)) as (source, batches):
    for done in (middle, 1):
      try:
        source.set_state(copy.deepcopy(host.states[done - 1]))
      except Exception as e:
        return WRONG, f'a new input refuses the state after {done} batches: {e}'
      for i, want in enumerate(host.digests[done:], start=done):
        batch = next(batches, None)
        if batch is None or want != digest([batch]):
          return WRONG, (
            f'a new input that went on after {done} batches gave'
            f' {"no" if batch is None else "another"} batch number {i}'
            ' (counted from 0) than the one that read from the beginning'
          )
  text = f'a new input goes on exactly, after {middle} batches and after 1'
  if len(set(host.digests)) == 1:
    return LOOK, f'{text}; but all batches are the same, so this tells nothing'
  return OK, text


def _check_position(hosts: Sequence[_Host]) -> _Result:
  """Compares the hosts' states, and continues as one host from them."""
  states, source = hosts[0].states, hosts[0].source
  is_baseinput = isinstance(source, base.BaseInput)
  if not (hosts[1:] and states and is_baseinput and source.ANY_NUMBER_OF_HOSTS):
    return None
  if any(host.states != states for host in hosts):
    return WRONG, (
      'not the same on all hosts, though ANY_NUMBER_OF_HOSTS promises it: '
      + ', '.join(str(host.source.describe()) for host in hosts)
    )
  middle = (len(states) + 1) // 2
  want = _in_order(hosts, middle)
  got: list[bytes] = []
  with opened(hosts[0].make_input, 0, 1) as (source, batches):
    try:
      source.set_state(states[middle - 1])
    except Exception as e:
      return WRONG, f'one host refuses the state of {len(hosts)}: {e}'
    # One host may need as many batches as all together.
    for batch in itertools.islice(batches, len(hosts) * len(hosts[0].rows)):
      if len(got) >= len(want):
        break
      got += _row_hashes(_arrays(batch))
  if got[: len(want)] != want:
    return WRONG, (
      f'one host that goes on after {middle} batches of {len(hosts)} hosts'
      ' reads other rows, or in another order'
    )
  return OK, 'the same on all hosts, and one host goes on from it'


# What every input promises, by the name of its line in the report.
PROMISES: dict[str, tuple[str, Callable[[Sequence[_Host]], _Result]]] = {
  'rows': ('no row is read by two hosts, or twice', _check_rows),
  'epoch': ('data ends on all hosts after as many batches', _check_epoch),
  'resume': ('a new input goes on exactly from a state', _check_resume),
  'position': (
    'where ANY_NUMBER_OF_HOSTS is set, a state fits any number of hosts',
    _check_position,
  ),
}


# All of it.


@dataclasses.dataclass(frozen=True)
class Finding:
  """The result of one check.

  Attributes:
    name: of the promise, or 'hosts'.
    verdict: OK, LOOK or WRONG.
    text: the result in words.
  """

  name: str
  verdict: str
  text: str

  def __str__(self) -> str:
    """Returns lines of at most `WIDTH` columns."""
    return textwrap.fill(
      self.text,
      WIDTH,
      initial_indent=f'{self.verdict:<7}{self.name:<9}',
      subsequent_indent=' ' * 16,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What `check` found.

  Attributes:
    num_batches: how many batches of each host the digests are of.
    digests: of each host.
    findings: of each promise that the input makes.
    padding_share: the fraction of all batches that is padding.
    throughput: of one host.
  """

  num_batches: int
  digests: tuple[str, ...]
  findings: tuple[Finding, ...]
  padding_share: float
  throughput: Throughput

  @property
  def ok(self) -> bool:
    """Whether nothing is wrong."""
    return all(finding.verdict != WRONG for finding in self.findings)

  def __str__(self) -> str:
    """Returns lines of at most `WIDTH` columns."""
    lines = [f'digest of the first {self.num_batches} batches']
    lines += [
      f'  host {host} of {len(self.digests)}  {text}'
      for host, text in enumerate(self.digests)
    ]
    lines += ['', *map(str, self.findings)]
    lines += [
      f'       padding  {self.padding_share:.1%} of what was read is padding',
      f'       speed    {self.throughput}',
    ]
    return '\n'.join(lines)


def check(
  make_input: MakeInput,
  *,
  num_hosts: int = 2,
  num_batches: int = 20,
  max_batches: int = 1000,
  one_epoch: bool | None = None,
  seconds: float = 1.0,
) -> Report:
  """Tests all `PROMISES`.

  Args:
    make_input: see the top of this module.
    num_hosts: how many hosts to read as, one after the other. An input that
      refuses (with a ValueError) is checked as that of one host.
    num_batches: how many batches of each.
    max_batches: where the data ends, how many instead, at most, to see whether
      it ends on all hosts after the same number.
    one_epoch: whether it ends; None is what the input says.
    seconds: how long to measure its speed.

  Returns:
    What was found.
  """
  findings = []
  if num_hosts > 1:
    try:
      with opened(make_input, num_hosts - 1, num_hosts) as (_, batches):
        next(batches, None)
    except ValueError as e:
      findings.append(Finding('hosts', LOOK, f'{num_hosts} are refused: {e}'))
      num_hosts = 1
  hosts = [
    _Host(make_input, i, num_hosts, num_batches, max_batches, one_epoch)
    for i in range(num_hosts)
  ]
  for name, (_, test) in PROMISES.items():
    if result := test(hosts):
      findings.append(Finding(name, *result))
  with opened(make_input, 0, num_hosts) as (_, batches):
    speed = throughput(batches, seconds)
  return Report(
    num_batches=len(hosts[0].digests),
    digests=tuple(host.digest for host in hosts),
    findings=tuple(findings),
    padding_share=sum(host.padding for host in hosts)
    / max(1, sum(len(host.rows) for host in hosts)),
    throughput=speed,
  )


def shorten(text: str, width: int = WIDTH) -> str:
  """Returns the beginning of a text, as much as fits."""
  return text if len(text) <= width else f'{text[: width - 3]}...'
