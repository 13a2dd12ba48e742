"""Shows and checks the data of a run: batches, hosts, resuming, speed.

These functions make the output of `python -m jaxline.inputs show`, also for
notebooks:

  source = text.TextInput(batch_size=8, ...)
  print(show.describe(next(source)))
  print(show.check(lambda: text.TextInput(batch_size=8, ...), num_hosts=4))

`make_input` below is always a function without arguments that returns a new
input, a `BaseInput` or any iterable of dicts. It is called inside
`base.pretend_host`, so that an input which does not name its host reads as each
of several hosts. `check` tests each of `PROMISES`. Rows are compared by a hash
of all entries except weights; rows of weight 0 are padding and are never
counted.
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
from typing import Any, NamedTuple

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
  found = {}
  for name, ids in arrays.items():
    prefix, last = _split(name)
    if last != 'ids' or ids.ndim < 2:
      continue
    beside = {
      key: x
      for key in ('paddings', 'segment_ids', base.WEIGHTS)
      if (x := arrays.get(_join(prefix, key))) is not None
      and x.shape == ids.shape
    }
    weights = beside.get(base.WEIGHTS)
    # In this order: a prompt has no weight, and is no filler.
    if 'paddings' in beside:
      real = beside['paddings'] == 0
    elif 'segment_ids' in beside:
      real = beside['segment_ids'] > 0
    else:
      real = np.ones(ids.shape, bool) if weights is None else weights != 0
    # Padding rows are zeros, which says of `paddings` that there are none.
    has_weight = (
      _real_rows(arrays).reshape(-1, *[1] * (ids.ndim - 1))
      if weights is None
      else np.any(weights != 0, axis=-1, keepdims=True)
    )
    found[prefix] = real & has_weight
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
    source: its input.
    digest: of the first batches.
    digests: of each of them.
    states: behind each of them, if the position is saved.
    rows: by batch, the hash of each row that has a weight.
    records: by batch, of each row (epoch, number); None where records have no
      numbers.
    num_rows: with padding.
    weight: the sum of all weights; without any, the rows.
    padding: the sum of the batches' padding shares.
    ends: whether the data shall end.
    ended: whether that is all there is.
  """

  def __init__(
    self,
    source: Any,
    batches: Iterator[Any],
    num_batches: int,
    max_batches: int,
    one_epoch: bool | None,
  ):
    """Reads; the arguments are those of `check`."""
    self.source = source
    self.digests: list[str] = []
    self.states: list[Any] = []
    self.rows: list[list[bytes]] = []
    self.records: list[list[tuple[int, int]]] | None = None
    self._seen: list[tuple[int, int]] = []
    if isinstance(source, indexed.IndexedInput):
      self.records = []
      self._watch(source)
    self.num_rows = 0
    self.weight = self.padding = 0.0
    self.ends = one_epoch
    if one_epoch is None:  # Not all have the field `repeat`.
      self.ends = isinstance(source, base.BaseInput) and (
        source.reset_for_eval or getattr(source, 'repeat', None) is False
      )
    self.digest = digest(self._first(batches, num_batches))
    if self.ends:
      for batch in itertools.islice(batches, max(0, max_batches - num_batches)):
        self._note(batch)
    if len(list(itertools.chain(*self.records or ()))) < len(_in_order([self])):
      self.records = None  # It does not read by `read` alone.
    self.ended = len(self.rows) < num_batches or (
      bool(self.ends) and next(batches, None) is None
    )

  def _watch(self, source: indexed.IndexedInput) -> None:
    """Makes the input tell which records it reads."""
    # Neither ahead nor in a worker, where the calls could not be noted.
    source.num_threads = source.num_workers = 0
    read = source.read

    def watched(records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
      self._seen += zip(epochs.tolist(), records.tolist(), strict=True)
      return read(records, epochs)

    source.read = watched  # type: ignore[method-assign]

  def _first(self, batches: Iterator[Any], number: int) -> Iterator[Any]:
    for batch in itertools.islice(batches, number):
      self._note(batch)
      self.digests.append(digest([batch]))
      if infeed.saves_position(self.source):
        # No bytes, where it is no `BaseInput`: it may change afterwards.
        self.states.append(copy.deepcopy(self.source.get_state()))
      yield batch

  def _note(self, batch: Any) -> None:
    arrays = _arrays(batch)
    hashes = _row_hashes(arrays)
    self.rows.append(hashes)
    if self.records is not None:
      # For a batch of padding alone, a record is read for its shapes.
      self.records.append(self._seen if hashes else [])
      self._seen = []
    self.num_rows += len(_real_rows(arrays))
    weights = [x for name, x in arrays.items() if _is_weights(name)]
    sums = [float(x.sum(dtype=np.float64)) for x in weights]
    self.weight += sum(sums) if weights else len(hashes)
    self.padding += padding_share(batch)


def _in_order(hosts: Sequence[_Host], first: int = 0) -> list[bytes]:
  """Returns the hashes of the rows of global batches, from `first` on."""
  return [
    row
    for batches in itertools.zip_longest(
      *(host.rows[first:] for host in hosts), fillvalue=[]
    )
    for rows_of_host in batches
    for row in rows_of_host
  ]


# The promises of an input. Each function returns a verdict and the result in
# words; None if the input does not promise this.

_Result = tuple[str, str] | None


def _check_rows(make_input: MakeInput, hosts: Sequence[_Host]) -> _Result:
  """Compares the rows of all hosts: their records, or else their contents.

  A record that is read twice in an epoch is wrong, and so are hosts that read
  the same rows in the same order. Other identical rows are for people to judge:
  they may be in the data.
  """
  del make_input
  source = hosts[0].source
  has_numbers = hosts[0].records is not None
  of_host: list[list[Any]] = [
    list(
      itertools.chain(*(host.rows if host.records is None else host.records))
    )
    for host in hosts
  ]
  total = sum(map(len, of_host))
  counts = [collections.Counter(of) for of in of_host]
  hosts_with = collections.Counter(row for count in counts for row in count)
  across = [row for row, n in hosts_with.items() if n > 1]
  within = [row for count in counts for row, n in count.items() if n > 1]
  rows_of = f'{total} rows of {len(hosts)} host{"s" * bool(hosts[1:])}'
  if not across and not within:
    if has_numbers:
      return OK, f'no record of {rows_of} is read twice'
    return OK, f'no two of {rows_of} are identical'

  groups = collections.defaultdict(list)
  for number, (rows_, count) in enumerate(zip(of_host, counts, strict=True)):
    if 2 * len(count) > len(rows_) > 1:  # Else all rows are much the same.
      groups[tuple(rows_)].append(number)
  same = sorted(itertools.chain(*(g for g in groups.values() if g[1:])))
  text = (
    f'of {rows_of}, {len(across)} different ones are on several hosts and'
    f' {len(within)} again on the same host'
  )
  if same:
    text += f'; hosts {", ".join(map(str, same))} read the same rows'
  if has_numbers:
    epoch, record = (across + within)[0]
    text += f'; such as {source.describe_record(record, epoch)}'
  elif same and not isinstance(source, base.BaseInput):
    return LOOK, (
      f'{text}; this is no BaseInput, and reads as another host here only if it'
      ' asks base.this_host()'
    )
  elif len(hosts_with) == 1:
    return LOOK, f'{text}; all rows are the same, so they tell nothing'
  elif not same:
    return LOOK, (
      f'{text}; either the data has them more than once, or came around to its'
      ' beginning, or hosts read the same'
    )
  if any(
    (host.source.infeed_host_index, host.source.num_infeed_hosts)
    != (number, len(hosts))
    for number, host in enumerate(hosts)
  ):
    text += (
      '; the input names a host of its own: leave infeed_host_index and'
      ' num_infeed_hosts None, or take them from base.this_host()'
    )
  return WRONG, text


def _check_epoch(make_input: MakeInput, hosts: Sequence[_Host]) -> _Result:
  """Compares how many batches the hosts have, where the data ends."""
  del make_input
  counts = [len(host.rows) for host in hosts]
  ended = [host.ended for host in hosts]
  if not any(ended):
    if not any(host.ends for host in hosts):
      return None
    return LOOK, f'not compared: more than {max(counts)} batches a host'
  if not all(ended) or len(set(counts)) > 1:
    numbers = ', '.join(
      f'{count}{"" if end else " or more"}'
      for count, end in zip(counts, ended, strict=True)
    )
    return WRONG, (
      f'hosts 0, 1, ... have {numbers} batches: in a run, those that have more'
      ' would wait for ever. Fill up with rows of weight 0'
    )
  if not counts[0]:
    return WRONG, 'there is no data'
  text = (
    f'{counts[0]} batches on each host; in all, {len(_in_order(hosts)):,} rows'
    f' of {sum(host.num_rows for host in hosts):,}, and weights of'
    f' {_number(sum(host.weight for host in hosts))}'
  )
  if any(host.records is None for host in hosts):
    return OK, text
  total = hosts[0].source.num_records()
  read = {
    record for host in hosts for of in host.records or () for record in of
  }
  text += f'; {total:,} records, of which {total - len(read)} are not read'
  return OK if total == len(read) else WRONG, text


def _check_resume(make_input: MakeInput, hosts: Sequence[_Host]) -> _Result:
  """Compares the batches after a saved state with the original ones."""
  number, host = len(hosts) - 1, hosts[-1]
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
  with _opened(make_input, number, len(hosts)) as (source, batches):
    for done in (middle, 1):
      try:
        source.set_state(copy.deepcopy(host.states[done - 1]))
      except Exception as e:
        return WRONG, f'a new input refuses the state after {done} batches: {e}'
      for i, want in enumerate(host.digests[done:], start=done):
        batch = next(batches, None)
        if batch is None or digest([batch]) != want:
          return WRONG, (
            f'a new input that went on after {done} batches gave'
            f' {"no" if batch is None else "another"} batch number {i}'
            ' (counted from 0) than the one that read from the beginning'
          )
  text = f'a new input goes on exactly, after {middle} batches and after 1'
  if len(set(host.digests)) == 1:
    return LOOK, f'{text}; but all batches are the same, so this tells nothing'
  return OK, text


def _check_position(make_input: MakeInput, hosts: Sequence[_Host]) -> _Result:
  """Compares the hosts' states, and continues as one host from them."""
  states = hosts[0].states
  if not (
    hosts[1:]
    and states
    and isinstance(hosts[0].source, base.BaseInput)
    and hosts[0].source.ANY_NUMBER_OF_HOSTS
  ):
    return None
  if any(host.states != states for host in hosts):
    return WRONG, (
      'not the same on all hosts, though ANY_NUMBER_OF_HOSTS promises it: '
      + ', '.join(str(host.source.describe()) for host in hosts)
    )
  middle = (len(states) + 1) // 2
  want = _in_order(hosts, middle)
  got: list[bytes] = []
  with _opened(make_input, 0, 1) as (source, batches):
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


class Promise(NamedTuple):
  """What every input promises, and how to test it.

  Attributes:
    name: of the line in the report.
    text: the promise.
    check: tests what the hosts have read, and may read more.
  """

  name: str
  text: str
  check: Callable[[MakeInput, Sequence[_Host]], _Result]


PROMISES = (
  Promise('rows', 'no row is read by two hosts, or twice', _check_rows),
  Promise(
    'epoch', 'data ends on all hosts after as many batches', _check_epoch
  ),
  Promise('resume', 'a new input goes on exactly from a state', _check_resume),
  Promise(
    'position',
    'where ANY_NUMBER_OF_HOSTS is set, a state fits any number of hosts',
    _check_position,
  ),
)


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
      with _opened(make_input, num_hosts - 1, num_hosts) as (_, batches):
        next(batches, None)
    except ValueError as e:
      findings.append(Finding('hosts', LOOK, f'{num_hosts} are refused: {e}'))
      num_hosts = 1
  hosts = []
  for number in range(num_hosts):
    with _opened(make_input, number, num_hosts) as (source, batches):
      hosts.append(_Host(source, batches, num_batches, max_batches, one_epoch))
  for promise in PROMISES:
    if result := promise.check(make_input, hosts):
      findings.append(Finding(promise.name, *result))
  with _opened(make_input, 0, num_hosts) as (_, batches):
    speed = throughput(batches, seconds)
  return Report(
    num_batches=len(hosts[0].digests),
    digests=tuple(host.digest for host in hosts),
    findings=tuple(findings),
    padding_share=sum(host.padding for host in hosts)
    / max(1, sum(len(host.rows) for host in hosts)),
    throughput=speed,
  )


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
