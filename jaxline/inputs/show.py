"""Shows and checks the data of a run: batches, hosts, resuming, speed.

These functions make the output of `python -m jaxline.inputs show`, also for
notebooks:

  source = text.TextInput(batch_size=8, ...)
  print(show.describe(next(source)))
  print(show.check(lambda: text.TextInput(batch_size=8, ...), num_hosts=4))

`make_input` below is always a function without arguments that returns a new
input, a `BaseInput` or any iterable of dicts. It is called inside
`base.pretend_host`, so that an input which does not name its host reads as each
of several hosts. Rows are compared by a hash of all entries except weights;
rows of weight 0 are padding and are never counted.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import copy
import dataclasses
import hashlib
import itertools
import json
import textwrap
import time
from typing import Any

import jax
import numpy as np

from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import infeed

MakeInput = Callable[[], Iterable[Mapping[str, Any]]]

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


def _is_weights(name: str) -> bool:
  return _split(name)[1] == base.WEIGHTS


def _split(name: str) -> tuple[str, str]:
  """Returns ('src', 'ids') for 'src.ids', and ('', 'ids') for 'ids'."""
  prefix, _, last = name.rpartition('.')
  return prefix, last


def _join(prefix: str, last: str) -> str:
  return f'{prefix}.{last}' if prefix else last


def _real_rows(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns which rows have a weight, bool [B]."""
  weights = [x for name, x in arrays.items() if _is_weights(name)]
  if not weights:
    rows = next((len(x) for x in arrays.values() if x.ndim), 0)
    return np.ones(rows, bool)
  return np.any([x.reshape(len(x), -1).any(axis=1) for x in weights], axis=0)


def _real_tokens(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns which positions hold tokens, bool [B, ..., L], by nested batch."""
  found: dict[str, np.ndarray] = {}
  # In this order: a prompt has no weight, and is no filler.
  for entry, is_real in (
    ('paddings', lambda x: x == 0),
    ('segment_ids', lambda x: x > 0),
    (base.WEIGHTS, lambda x: x != 0),
    ('ids', lambda x: np.ones(x.shape, bool)),
  ):
    for name, x in arrays.items():
      prefix, last = _split(name)
      ids = arrays.get(_join(prefix, 'ids'))
      if last != entry or prefix in found or ids is None:
        continue
      if x.ndim >= 2 and x.shape == ids.shape:
        found[prefix] = is_real(x) & _has_weight(arrays, prefix, x)
  return found


def _has_weight(
  arrays: Mapping[str, np.ndarray], prefix: str, like: np.ndarray
) -> np.ndarray:
  """Returns whose tokens count at all, bool [B, ..., 1].

  Rows that fill up a batch are zeros, which says of `paddings` that there are
  none.
  """
  weights = arrays.get(_join(prefix, base.WEIGHTS))
  if weights is not None and weights.shape == like.shape:
    return np.any(weights != 0, axis=-1, keepdims=True)
  return _real_rows(arrays).reshape(-1, *[1] * (like.ndim - 1))


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
  return '\n'.join(_aligned(table, right=(3, 4, 5)))


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
  for prefix, real in _real_tokens(arrays).items():
    name = _join(prefix, 'ids')
    # A mixture side by side has several of a child's rows in each of its own.
    length = real.shape[-1]
    real_BL, ids_BL = (x.reshape(-1, length) for x in (real, arrays[name]))
    # Up to the last one that is real: filler may stand between, not behind.
    lengths = np.where(
      real_BL.any(axis=1), length - np.argmax(real_BL[:, ::-1], axis=1), 0
    )
    try:
      found[name] = source.ids_to_strings(
        ids_BL[:num_rows],
        lengths[:num_rows],
        # As `MultiInput` names its children's entries.
        key=prefix.replace('.', '/') or None,
      )
    except NotImplementedError:
      continue
  return found


# Several batches.


def digest(batches: Iterable[Mapping[str, Any]]) -> str:
  """Returns a hash of batches, 16 letters.

  The same for the same names, dtypes, shapes and values in the same order, on
  every machine and in every process.
  """
  hashed = hashlib.sha256()
  for batch in batches:
    arrays = _arrays(batch)
    hashed.update(f'{len(arrays)} arrays;'.encode())
    for name, x in arrays.items():
      hashed.update(f'{name} {x.dtype.name} {x.shape};'.encode())
      hashed.update(_bytes(x))
  return hashed.hexdigest()[:16]


def _bytes(x: np.ndarray) -> bytes:
  # An array of objects holds addresses.
  return repr(x.tolist()).encode() if x.dtype == object else x.tobytes()


def _row_hashes(arrays: Mapping[str, np.ndarray]) -> list[bytes]:
  """Returns a hash of each row that has a weight."""
  hashes = []
  for row in np.flatnonzero(_real_rows(arrays)):
    hashed = hashlib.blake2b(digest_size=16)
    for name, x in arrays.items():
      if x.ndim and not _is_weights(name):
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
    for counted in map(tokens, some):
      if counted is not None:
        num_tokens = (num_tokens or 0) + counted
  return Throughput(
    batches=num_batches,
    rows=num_rows,
    tokens=num_tokens,
    seconds=spent,
    first_batch_seconds=first_batch_seconds,
  )


# Several hosts.


@contextlib.contextmanager
def _opened(
  make_input: MakeInput, host: int, num_hosts: int
) -> Iterator[tuple[Any, Iterator[Any]]]:
  """Yields a host's input and its iterator; both closed afterwards."""
  with base.pretend_host(host, num_hosts):
    source = make_input()
    try:
      yield source, iter(source)
    finally:
      if hasattr(source, 'close'):
        source.close()


class _Host:
  """What one host reads, noted while it is read.

  Attributes:
    digest: of the first batches.
    position: behind these, where it must be the same on all hosts.
    num_batches: how many were read in all.
    padding: the sum of their padding shares.
    ends: whether the data shall end.
    ended: whether that is all there is.
    num_rows: with those that only fill.
    hashes: of each row.
    weight: the sum of all weights; without any, the rows.
    records: of each row, (epoch, number); None where records have no numbers.
  """

  def __init__(
    self,
    source: Any,
    batches: Iterator[Any],
    num_batches: int,
    max_batches: int,
    ends: bool,
  ):
    """Reads.

    Args:
      source: the host's input.
      batches: its iterator.
      num_batches: how many batches are the first ones.
      max_batches: where the data ends, how many are read in all, at most.
      ends: whether it does.
    """
    self.source = source
    self.ends = ends
    self.num_batches = self.num_rows = 0
    self.hashes: list[bytes] = []
    self.weight = 0.0
    self.records = self._watch()
    self.padding = 0.0
    self.position: str | None = None

    self.digest = digest(self._read(batches, num_batches))
    if infeed.saves_position(source) and _fits_any_host(source):
      self.position = json.dumps(source.position(), sort_keys=True)
    if ends:
      for _ in self._read(batches, max(0, max_batches - num_batches)):
        pass
    self.ended = self.num_batches < num_batches or (
      ends and next(batches, None) is None
    )
    if self.records is not None and len(self.records) < len(self.hashes):
      self.records = None  # It does not read by `read` alone.

  def _watch(self) -> list[tuple[int, int]] | None:
    """Makes the input tell which records it reads, if they have numbers."""
    source = self.source
    if not isinstance(source, indexed.IndexedInput):
      return None
    # Neither ahead nor in a worker, where the calls could not be recorded.
    source.num_threads = source.num_workers = 0
    seen: list[tuple[int, int]] = []
    read = source.read

    def watched(records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
      seen.extend(zip(epochs.tolist(), records.tolist(), strict=True))
      return read(records, epochs)

    source.read = watched  # type: ignore[method-assign]
    return seen

  def _read(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
    for batch in itertools.islice(batches, number):
      arrays = _arrays(batch)
      hashes = _row_hashes(arrays)
      self.num_rows += len(_real_rows(arrays))
      if not hashes and self.records and not self._is_first():
        # A host whose rows only fill looks at the first record for shapes.
        first = int(self.source.order(np.zeros(1, np.int64))[0])
        if self.records[-1] == (0, first):
          self.records.pop()
      self.hashes += hashes
      weights = [x for name, x in arrays.items() if _is_weights(name)]
      sums = [float(x.sum(dtype=np.float64)) for x in weights]
      self.weight += sum(sums) if weights else len(hashes)
      self.padding += padding_share(batch)
      self.num_batches += 1
      yield batch

  def _is_first(self) -> bool:
    return self.num_batches == 0 and self.source.infeed_host_index == 0


def _fits_any_host(source: Any) -> bool:
  return isinstance(source, base.BaseInput) and source.ANY_NUMBER_OF_HOSTS


def _ends(source: Any) -> bool:
  """Returns whether an input says that its data ends."""
  if not isinstance(source, base.BaseInput):
    return False
  # Not all have the field `repeat`.
  return source.reset_for_eval or getattr(source, 'repeat', None) is False


def _read_hosts(
  make_input: MakeInput,
  num_hosts: int,
  num_batches: int,
  max_batches: int = 0,
  one_epoch: bool | None = None,
) -> list[_Host]:
  """Reads as each host, one after the other.

  Args:
    make_input: see the top of this module.
    num_hosts: how many.
    num_batches: how many batches of each.
    max_batches: where the data ends, how many instead, at most.
    one_epoch: whether it ends; None is what the input says.

  Returns:
    What each read.
  """
  found = []
  for host in range(num_hosts):
    with _opened(make_input, host, num_hosts) as (source, batches):
      ends = _ends(source) if one_epoch is None else one_epoch
      found.append(_Host(source, batches, num_batches, max_batches, ends))
  return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
  """Which rows several hosts read, and which one reads twice.

  Attributes:
    num_rows: of each host, how many rows were compared.
    shared_records: how many records, by their numbers, several hosts read;
      None if records have no numbers.
    repeated_records: how many a host read twice in one epoch; None likewise.
    example: where one of these comes from.
    identical_across: distinct rows that occur on several hosts.
    identical_within: rows that occurred before on their host.
    num_distinct: distinct rows over all hosts.
    same_hosts: hosts that read the same as another one, row by row, although
      most of these rows occur only once on it.
    mistaken_hosts: hosts whose input was built for another host: its number is
      set in the input.
    is_told: whether the input is a `BaseInput`, which gets its host from
      `pretend_host`.
  """

  num_rows: tuple[int, ...]
  shared_records: int | None = None
  repeated_records: int | None = None
  example: str = ''
  identical_across: int = 0
  identical_within: int = 0
  num_distinct: int = 0
  same_hosts: tuple[int, ...] = ()
  mistaken_hosts: tuple[int, ...] = ()
  is_told: bool = True

  @property
  def verdict(self) -> str:
    """Returns OK, LOOK or WRONG.

    Numbers of records decide, where there are any: identical rows may well be
    in the data. Without, hosts that read the same rows in the same order are
    wrong; anything less is for people to look at.
    """
    if self.shared_records or self.repeated_records:
      return WRONG
    if self.shared_records is not None:
      return OK
    if self.same_hosts and self.is_told:
      return WRONG
    return LOOK if self.identical_across or self.identical_within else OK

  def __str__(self) -> str:
    """Returns the result in words."""
    total = sum(self.num_rows)
    hosts = f'{len(self.num_rows)} hosts' if self.num_rows[1:] else 'one host'
    lines = []
    if self.shared_records:
      lines.append(
        f'{self.shared_records} records are read by several of {hosts}, such as'
        f' {self.example}'
      )
    if self.repeated_records:
      lines.append(
        f'{self.repeated_records} records are read twice in an epoch by the'
        f' same host, such as {self.example}'
      )
    if self.same_hosts and self.verdict != OK:
      some = ', '.join(map(str, self.same_hosts))
      lines.append(f'hosts {some} of {hosts} read the same rows')
      if not self.is_told:
        lines.append(
          'this is no BaseInput, and reads as another host here only if it asks'
          ' base.this_host()'
        )
    if self.verdict == WRONG and self.mistaken_hosts:
      lines.append(
        'the input names a host of its own: leave infeed_host_index and'
        ' num_infeed_hosts None, or take them from base.this_host()'
      )
    if self.shared_records == self.repeated_records == 0:
      lines.append(f'no record of {total} rows of {hosts} is read twice')
    if self.identical_across or self.identical_within:
      counts = (
        f'identical rows, of {total}: {self.identical_across} different ones on'
        f' several hosts, {self.identical_within} again on the same host'
      )
      if self.num_distinct == 1:
        counts += '; all rows are the same, so rows tell nothing of hosts'
      elif self.verdict == OK:
        counts += '; the data has them more than once'
      elif self.verdict == LOOK and not self.same_hosts:
        counts += (
          '; either the data has them more than once, or came around to its'
          ' beginning, or hosts read the same'
        )
      lines.append(counts)
    elif self.shared_records is None:
      lines.append(f'no two of {total} rows of {hosts} are identical')
    return '; '.join(lines)


def overlap(
  make_input: MakeInput, num_hosts: int = 2, num_batches: int = 20
) -> Overlap:
  """Compares the rows that several hosts read.

  Args:
    make_input: see the top of this module.
    num_hosts: how many hosts.
    num_batches: how many batches of each.

  Returns:
    What they share.
  """
  return _overlap(_read_hosts(make_input, num_hosts, num_batches))


def _overlap(hosts: Sequence[_Host]) -> Overlap:
  found: dict[str, Any] = {}
  if all(host.records is not None for host in hosts):
    records = [collections.Counter(host.records) for host in hosts]
    shared = _in_several(records)
    repeated = [r for c in records for r, number in c.items() if number > 1]
    found['shared_records'] = len(shared)
    found['repeated_records'] = len(repeated)
    for epoch, record in [*shared, *repeated][:1]:
      found['example'] = hosts[0].source.describe_record(record, epoch)
  counts = [collections.Counter(host.hashes) for host in hosts]
  same = collections.defaultdict(list)
  for number, (host, count) in enumerate(zip(hosts, counts, strict=True)):
    if 2 * len(count) > len(host.hashes) > 1:
      same[tuple(host.hashes)].append(number)
  return Overlap(
    num_rows=tuple(len(host.hashes) for host in hosts),
    identical_across=len(_in_several(counts)),
    identical_within=sum(c.total() - len(c) for c in counts),
    num_distinct=len(set().union(*counts)),
    same_hosts=tuple(
      sorted(number for group in same.values() if group[1:] for number in group)
    ),
    mistaken_hosts=tuple(
      number
      for number, host in enumerate(hosts)
      if isinstance(host.source, base.BaseInput)
      and (host.source.infeed_host_index, host.source.num_infeed_hosts)
      != (number, len(hosts))
    ),
    is_told=all(isinstance(host.source, base.BaseInput) for host in hosts),
    **found,
  )


def _in_several(counts: Sequence[Mapping[Any, int]]) -> list[Any]:
  """Returns the keys that occur on more than one host."""
  hosts = collections.Counter(x for count in counts for x in count)
  return [x for x, number in hosts.items() if number > 1]


# All of it.


@dataclasses.dataclass(frozen=True)
class Finding:
  """The result of one check.

  Attributes:
    name: of the check.
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
    findings: of each check.
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
  """Runs all checks.

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
      with _opened(make_input, num_hosts - 1, num_hosts) as (_, batches):
        next(batches, None)
    except ValueError as e:
      findings.append(Finding('hosts', LOOK, f'{num_hosts} are refused: {e}'))
      num_hosts = 1
  hosts = _read_hosts(
    make_input, num_hosts, num_batches, max_batches, one_epoch
  )
  found = _overlap(hosts)
  findings.append(Finding('rows', found.verdict, str(found)))
  findings += _check_epoch(hosts)
  findings.append(_check_resume(make_input, num_hosts, num_batches, one_epoch))
  findings += _check_positions(hosts)
  with _opened(make_input, 0, num_hosts) as (_, batches):
    speed = throughput(batches, seconds)
  return Report(
    num_batches=min(num_batches, hosts[0].num_batches),
    digests=tuple(host.digest for host in hosts),
    findings=tuple(findings),
    padding_share=sum(host.padding for host in hosts)
    / max(1, sum(host.num_batches for host in hosts)),
    throughput=speed,
  )


def _check_epoch(hosts: Sequence[_Host]) -> list[Finding]:
  """Compares how many batches the hosts have, where the data ends."""
  counts = [host.num_batches for host in hosts]
  ended = [host.ended for host in hosts]
  numbers = ', '.join(
    f'{count}{"" if end else " or more"}'
    for count, end in zip(counts, ended, strict=True)
  )
  if not any(ended):
    if not any(host.ends for host in hosts):
      return []
    text = f'not compared: more than {max(counts)} batches a host'
    return [Finding('epoch', LOOK, text)]
  if not all(ended) or len(set(counts)) > 1:
    text = (
      f'hosts 0, 1, ... have {numbers} batches: in a run, those that have more'
      ' would wait for ever. Fill up with rows of weight 0'
    )
    return [Finding('epoch', WRONG, text)]
  if not counts[0]:
    return [Finding('epoch', WRONG, 'there is no data')]
  text = (
    f'{counts[0]} batches on each host; in all,'
    f' {sum(len(host.hashes) for host in hosts):,} rows of'
    f' {_number(sum(host.num_rows for host in hosts))}, and weights'
    f' of {_number(sum(host.weight for host in hosts))}'
  )
  missing = 0
  if all(host.records is not None for host in hosts):
    num_records = hosts[0].source.num_records()
    missing = num_records - len(
      set().union(*(host.records or () for host in hosts))
    )
    text += f'; {num_records:,} records, of which {missing} are not read'
  return [Finding('epoch', WRONG if missing else OK, text)]


def _check_resume(
  make_input: MakeInput,
  num_hosts: int,
  num_batches: int,
  one_epoch: bool | None,
) -> Finding:
  """Compares the batches after a saved position with the original ones."""
  host = num_hosts - 1
  digests, states = [], []
  with _opened(make_input, host, num_hosts) as (source, batches):
    if not infeed.saves_position(source):
      if one_epoch or getattr(source, 'reset_for_eval', False):
        return Finding('resume', OK, 'begins anew with each evaluation')
      text = 'its position is not saved: a run that resumes reads other data'
      return Finding('resume', LOOK, text)
    for batch in itertools.islice(batches, 2 * num_batches):
      digests.append(digest([batch]))
      # Not bytes, where it is no `BaseInput`: it may change afterwards.
      states.append(copy.deepcopy(source.get_state()))
  if not digests:
    return Finding('resume', LOOK, 'there is no data')
  # From the middle, as a run that was killed; then back, as from an older
  # checkpoint.
  middle = (len(digests) + 1) // 2
  with _opened(make_input, host, num_hosts) as (source, batches):
    for done in (middle, 1):
      try:
        source.set_state(copy.deepcopy(states[done - 1]))
      except Exception as e:
        text = f'a new input refuses the state after {done} batches: {e}'
        return Finding('resume', WRONG, text)
      want = digests[done : done + num_batches]
      got = [digest([b]) for b in itertools.islice(batches, len(want))]
      for number, (a, b) in enumerate(
        itertools.zip_longest(want, got), start=done
      ):
        if a != b:
          text = (
            f'a new input that went on after {done} batches gave'
            f' {"another" if b else "no"} batch number {number}'
            ' (counted from 0) than the one that read from the beginning'
          )
          return Finding('resume', WRONG, text)
  text = f'a new input goes on exactly, after {middle} batches and after 1'
  if len(set(digests)) == 1:
    text += '; but all batches are the same, so this tells nothing'
    return Finding('resume', LOOK, text)
  return Finding('resume', OK, text)


def _check_positions(hosts: Sequence[_Host]) -> list[Finding]:
  """Compares positions that must be the same on all hosts."""
  positions = {host.position for host in hosts}
  if None in positions or not hosts[1:]:
    return []
  if len(positions) == 1:
    text = 'the same on all hosts'
    return [Finding('position', OK, text)]
  text = (
    'not the same on all hosts, though ANY_NUMBER_OF_HOSTS promises it: '
    + ', '.join(str(host.position) for host in hosts)
  )
  return [Finding('position', WRONG, text)]


# Text.


def _number(x: float) -> str:
  return f'{x:,.0f}' if x == int(x) else f'{x:,.4g}'


def shorten(text: str, width: int = WIDTH) -> str:
  """Returns the beginning of a text, as much as fits."""
  return text if len(text) <= width else f'{text[: width - 3]}...'


def _aligned(
  table: Sequence[Sequence[str]], right: Sequence[int] = ()
) -> list[str]:
  """Returns lines of columns, some of which are aligned on the right."""
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  return [
    '  '.join(
      cell.rjust(width) if i in right else cell.ljust(width)
      for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in table
  ]
