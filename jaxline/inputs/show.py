"""Describes and checks an input: its batches, hosts, resuming, speed.

`python -m jaxline.inputs show` prints the results; you can call the functions
from a notebook too. `make_input(shard)` returns a new input, or any value that
`iterable.as_input` takes. Without its argument `shard`, checks use one host.
A `batch` has `weights`; rows of weight 0 are padding and are not counted.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import hashlib
import itertools
import textwrap
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import iterable

# The verdicts of a check. LOOK needs your judgment; NOTE is only information.
OK = 'ok'
LOOK = 'look'
WRONG = 'WRONG'
NOTE = ''

WIDTH = 100  # Columns of the output.
_MAX_PARTS = 12  # The limit of lines for a row.
# This entry of a batch has (epoch + 1, number) of each row's record, int64
# [B, 2], and zeros in padding.
_RECORDS = '_records'


def _arrays(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Returns the arrays by name; nested names are joined, as in 'src.ids'."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): np.asarray(x)
    for path, x in jax.tree_util.tree_leaves_with_path(batch)
  }


def _real_rows(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns which rows have a weight, bool [B]."""
  is_real = arrays[base.WEIGHTS] != 0
  return np.any(is_real, axis=tuple(range(1, is_real.ndim)))


def _real_tokens(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns which positions hold tokens, bool [B, ..., L], by entry `ids`."""
  found = {}
  for name, ids in arrays.items():
    if name.rpartition('.')[2] != 'ids' or ids.ndim < 2:
      continue
    paddings, segments, weights = (
      arrays.get(name.removesuffix('ids') + key)
      for key in ('paddings', 'segment_ids', base.WEIGHTS)
    )
    is_token = np.ones(ids.shape, bool)
    # Weights come last because a prompt has weight 0 but is not padding.
    if paddings is not None:
      is_token = paddings == 0
    elif segments is not None:
      is_token = segments > 0
    elif weights is not None and weights.shape == ids.shape:
      is_token = weights != 0
    of_rows = _real_rows(arrays).reshape(-1, *[1] * (ids.ndim - 1))
    found[name] = is_token & of_rows
  return found


def counts(batch: Mapping[str, Any]) -> dict[str, float]:
  """Counts rows, tokens, weights and padding of a batch.

  'rows' counts rows with a weight and 'all_rows' all rows. 'weights' is the sum
  of weights and 'zeros' the fraction of them that are 0. 'padding' is the
  fraction of tokens (without tokens, of rows) that are padding. If there are
  entries `ids`, 'tokens' counts tokens without padding. If tokens have weights,
  'trained' counts nonzero weights.
  """
  found = _arrays(batch)
  is_row, are_tokens = _real_rows(found), _real_tokens(found)
  weights = found[base.WEIGHTS]
  masks = list(are_tokens.values()) or [is_row]
  num_real = sum(int(x.sum()) for x in masks)
  return {
    'batches': 1,
    'rows': int(is_row.sum()),
    'all_rows': is_row.size,
    'weights': float(weights.sum(dtype=np.float64)),
    'padding': 1 - num_real / sum(x.size for x in masks),
    'zeros': float(np.mean(weights == 0)),
    **({'trained': int((weights != 0).sum())} if weights.ndim > 1 else {}),
    **({'tokens': num_real} if are_tokens else {}),
  }


def describe(batch: Mapping[str, Any]) -> str:
  """Returns a table: each entry's name, shape, dtype, least, greatest, mean."""
  table = [['entry', 'shape', 'dtype', 'min', 'max', 'mean']]
  for name, x in _arrays(batch).items():
    table.append([name, ' x '.join(map(str, x.shape)), x.dtype.name])
    if x.size and x.dtype.kind not in 'OSU':
      x = x.astype(np.float64)  # A sum in bfloat16 would lose small numbers.
      table[-1] += f'{x.min():.6g}', f'{x.max():.6g}', f'{x.mean():.4g}'
  columns = []
  for number, cells in enumerate(itertools.zip_longest(*table, fillvalue='')):
    align = str.ljust if number < 3 else str.rjust
    columns.append([align(cell, max(map(len, cells))) for cell in cells])
  return '\n'.join('  '.join(x).rstrip() for x in zip(*columns, strict=True))


def digest(batches: Iterable[Mapping[str, Any]]) -> str:
  """Returns a hash of batches, 16 hexadecimal digits.

  It depends only on names, dtypes, shapes, values and their order, so it is the
  same on every machine and in every process.
  """
  hashed = hashlib.sha256()
  for batch in batches:
    named = _arrays(batch)
    hashed.update(f'{len(named)} arrays;'.encode())
    for name, x in named.items():
      hashed.update(f'{name} {x.dtype.name} {x.shape};'.encode())
      # In an array of objects, the bytes are addresses.
      is_object = x.dtype == object
      hashed.update(repr(x.tolist()).encode() if is_object else x.tobytes())
  return hashed.hexdigest()[:16]


def texts(
  source: base.BaseInput, batch: Mapping[str, Any], num_rows: int = 2
) -> dict[str, list[str]]:
  """Returns the text of a batch's first rows, without padding.

  Keys are entries, such as 'tgt.ids'. Without `ids_to_strings`, it is empty.
  """
  arrays = _arrays(batch)
  found = {}
  for name, is_token in _real_tokens(arrays).items():
    length = is_token.shape[-1]
    is_token_BL = is_token.reshape(-1, length)[:num_rows]
    ids_BL = arrays[name].reshape(-1, length)[:num_rows]
    # Count up to the last token, since padding may separate tokens.
    lengths = np.max(is_token_BL * np.arange(1, length + 1), axis=1, initial=0)
    key = name.rpartition('.')[0].replace('.', '/') or None
    with contextlib.suppress(NotImplementedError):
      found[name] = source.ids_to_strings(ids_BL, lengths, key=key)
  return found


def marked_texts(
  source: base.BaseInput, batch: Mapping[str, Any], num_rows: int = 2
) -> dict[str, list[list[str]]]:
  """Returns lines of text of the first rows; text in ( ) has no weight.

  The keys are names of entries 'ids' that come with 'labels' and weights. The
  dict is empty if all tokens have a weight.
  """
  arrays, found = _arrays(batch), {}
  for name, is_token in _real_tokens(arrays).items():
    ids, key = arrays[name], name.rpartition('.')[0].replace('.', '/') or None
    labels, weights, segments = (
      arrays.get(name.removesuffix('ids') + x)
      for x in ('labels', base.WEIGHTS, 'segment_ids')
    )
    if labels is None or weights is None or weights.ndim != 2:
      continue
    segments = np.zeros_like(ids) if segments is None else segments
    is_first = np.diff(segments, axis=1, prepend=-1) != 0
    # Keep all labels and the first id of each segment, which is not a label.
    both = [ids, labels], [is_token & is_first, is_token]
    tokens, is_kept = (np.stack(x, -1).reshape(len(ids), -1) for x in both)
    kinds = np.repeat(2 * segments + (weights != 0), 2, axis=1)
    rows: list[list[str]] = []
    for row, kept in enumerate(is_kept[:num_rows]):
      rows.append([])
      cuts = 1 + np.flatnonzero(np.diff(kinds[row, kept]))
      for part in np.split(np.flatnonzero(kept), cuts)[:_MAX_PARTS]:
        size, half = np.array([part.size]), WIDTH // 2 - 4
        (text,) = source.ids_to_strings(tokens[row, part][None], size, key)
        shown = repr(text)
        if len(shown) > 2 * half:
          shown = f'{shown[:half]}...{shown[-half:]}'
        trains = kinds[row, part[:1]] & 1
        rows[-1] += [shown if trains.any() else f'({shown})'] * bool(text)
    if any(line.startswith('(') for row in rows for line in row):
      found[name] = rows
  return found


def _hash_rows(batch: Mapping[str, Any]) -> list[str]:
  """Returns a hash per row with a weight."""
  arrays = _arrays(batch)
  return [
    digest([{name: x[i : i + 1] for name, x in arrays.items()}])
    for i in np.flatnonzero(_real_rows(arrays)).tolist()
  ]


@contextlib.contextmanager
def open_input(
  make_input: Callable[..., Any], is_training: bool, shard: base.Shard
) -> Iterator[base.BaseInput]:
  """Opens the input of a shard; the context closes it."""
  if shard.count > 1 and not takes_shard(make_input):
    raise ValueError('the function that makes the input takes no `shard`')
  source = iterable.as_input(
    base.of_shard(make_input, shard), is_training=is_training, shard=shard
  )
  with contextlib.closing(source):
    yield source


def takes_shard(make_input: Callable[..., Any]) -> bool:
  """Returns whether a function can make the inputs of several hosts."""
  return 'shard' in base.choose_arguments(make_input, {'shard': None})


class _Host:
  """Reads one host's `num_batches`, or one epoch up to `max_batches`."""

  def __init__(
    self, source: base.BaseInput, num_batches: int, max_batches: int
  ):
    self.source: Any = source
    self.one_epoch = source.reset_for_eval or not getattr(
      source, 'repeat', True
    )
    # Each batch adds the hashes of its rows with a weight, and its state.
    self.rows: list[list[str]] = []
    self.states: list[Any] = []
    # The `_RECORDS` of all rows, if records have numbers.
    self.records: list[tuple[int, ...]] = []
    self.totals: Any = collections.Counter()
    _number_records(source)
    limit = max_batches if self.one_epoch else num_batches
    self.digest = digest(map(self._note, itertools.islice(source, limit)))
    self.ended = next(source, None) is None

  def _note(self, batch: dict[str, Any]) -> dict[str, Any]:
    records = batch.pop(_RECORDS, np.zeros((0, 2), int))
    self.records += map(tuple, records[records[:, 0] > 0].tolist())
    self.rows.append(_hash_rows(batch))
    self.totals.update(counts(batch))
    if self.source.saves_position:
      self.states.append(self.source.get_state())
    return batch


def _number_records(source: base.BaseInput) -> None:
  """Makes an input add `_RECORDS` to its batches, if records have numbers."""
  if not isinstance(source, indexed.IndexedInput):
    return
  # Not `source.read`: a worker would look up this name and find `numbered`.
  read = type(source).read

  def numbered(records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    batch = read(source, records, epochs)
    numbers = np.stack([epochs + 1, records], axis=1)
    return type(batch)(batch, **{_RECORDS: numbers})

  source.read = numbered  # type: ignore[method-assign]


def _flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
  return list(itertools.chain.from_iterable(lists))


# A check returns a verdict and a text, or None if it does not apply.
_OpenInput = Callable[[base.Shard], Any]
_Result = tuple[str, str] | None


def _check_rows(hosts: Sequence[_Host]) -> _Result:
  """Compares all hosts' rows by their record numbers, or by their contents."""
  source, is_numbered = hosts[0].source, bool(hosts[0].records)
  read: list[Any] = [h.records if is_numbered else _flat(h.rows) for h in hosts]
  times = collections.Counter(_flat(read))
  again = [row for row, n in times.items() if n > 1]
  text = f'{times.total()} rows of {len(hosts)} hosts'
  if not again:
    what = ('two', 'are identical'), ('record', 'is read twice')
    kind, verb = what[is_numbered]
    return OK, f'no {kind} of {text} {verb}'
  of = ', '.join(str(i) for i, rows in enumerate(read) if again[0] in rows)
  text = f'of {text}, {len(again)} are read more than once, one by host {of}'
  if is_numbered:
    epoch, record = again[0]
    return WRONG, f'{text}: {source.describe_record(record, epoch - 1)}'
  if any(read.count(rows) > 1 and len(set(rows)) > 1 for rows in read):
    return WRONG, f'{text}; some hosts read the same rows in the same order'
  text += '; the data repeats them or starts over, or hosts read the same rows'
  return LOOK, text


def _check_epoch(
  hosts: Sequence[_Host], totals: Mapping[str, float]
) -> _Result:
  """Compares the number of batches per host, if any host has ended."""
  lengths = [f'{len(h.rows)}{"" if h.ended else " or more"}' for h in hosts]
  if not any(host.ended for host in hosts):
    text = f'not compared: each host has {lengths[0]} batches'
    return (LOOK, text) if hosts[0].one_epoch else None
  if len(set(lengths)) > 1:
    return WRONG, (
      f'the hosts have {", ".join(lengths)} batches; hosts with more would wait'
      ' forever. Add batches of rows with weight 0'
    )
  if not totals['batches']:
    return WRONG, 'there is no data'
  text = (
    f'{lengths[0]} batches on each host; {totals["rows"]:,} of'
    f' {totals["all_rows"]:,} rows are real, total weight'
    f' {totals["weights"]:,.10g}'
  )
  if not hosts[0].records:
    return OK, text
  total = hosts[0].source.num_records()
  left = total - len(set(_flat(host.records for host in hosts)))
  text += f'; {total - left:,} of {total:,} records were read'
  return WRONG if left else OK, text


def _check_resume(hosts: Sequence[_Host], open_shard: _OpenInput) -> _Result:
  """Continues from states of the last host."""
  host = hosts[-1]
  if not host.rows:
    return LOOK, 'there is no data'
  if not host.states:
    if host.one_epoch:
      return OK, 'starts over in each evaluation'
    return LOOK, 'its position is not saved: a resumed run reads different data'
  # Start in the middle, like a run that was killed. Then go back, like a run
  # that falls back to an older checkpoint.
  middle = (len(host.states) + 1) // 2
  with open_shard(base.Shard(len(hosts) - 1, len(hosts))) as source:
    for start in (middle, 1):
      if problem := _continue(source, [host], start):
        return WRONG, f'a new input {problem}'
  text = f'a new input resumes exactly after {middle} batches and after 1'
  if host.rows.count(host.rows[0]) == len(host.rows):
    return LOOK, f'{text}; but all batches are equal, so this proves nothing'
  return OK, text


def _check_position(hosts: Sequence[_Host], open_shard: _OpenInput) -> _Result:
  """Compares the states of the hosts, and continues from them as one host."""
  states = hosts[0].states
  if not (hosts[1:] and states and hosts[0].source.ANY_NUMBER_OF_HOSTS):
    return None
  if any(host.states != states for host in hosts):
    return WRONG, 'differs between hosts, although ANY_NUMBER_OF_HOSTS is True'
  with open_shard(base.Shard(0, 1)) as source:
    if problem := _continue(source, hosts, (len(states) + 1) // 2):
      return WRONG, f'one host instead of {len(hosts)} {problem}'
  return OK, 'the same on all hosts, and one host continues from it'


def _continue(
  source: base.BaseInput, hosts: Sequence[_Host], start: int
) -> str:
  """Returns '' if an input continues like the hosts, or a problem."""
  try:
    source.set_state(hosts[0].states[start - 1])
  except Exception as e:
    return f'refuses the state after {start} batches: {e}'
  parts = (host.rows[start:] for host in hosts)
  want = list(map(_flat, itertools.zip_longest(*parts, fillvalue=())))
  got: Iterator[Any] = map(_hash_rows, source)
  if len(hosts) > 1:  # The sizes of the batches differ, so compare rows.
    want, got = _flat(want), itertools.chain.from_iterable(got)
  # If the hosts' data has ended, this input must end too.
  if list(itertools.islice(got, len(want) + hosts[0].ended)) == want:
    return ''
  return f'reads different rows, or in a different order, after {start} batches'


class Finding(NamedTuple):
  """The result of a check, or a note named 'hosts', 'padding' or 'speed'."""

  name: str
  verdict: str
  text: str

  def __str__(self) -> str:
    return textwrap.fill(
      self.text,
      WIDTH,
      initial_indent=f'{self.verdict:<7}{self.name:<9}',
      subsequent_indent=' ' * 16,
    )


class InputReport(NamedTuple):
  """The result of `check`, which read `num_batches` as each host."""

  num_batches: int
  digests: tuple[str, ...]
  findings: tuple[Finding, ...]

  @property
  def ok(self) -> bool:
    """Whether no check found an error."""
    return all(finding.verdict != WRONG for finding in self.findings)

  def __str__(self) -> str:
    lines = [f'digest of the first {self.num_batches} batches']
    for i, x in enumerate(self.digests):
      lines.append(f'  host {i} of {len(self.digests)}  {x}')
    return '\n'.join([*lines, '', *map(str, self.findings)])


def check(
  make_input: Callable[..., Any],
  *,
  is_training: bool = True,
  num_hosts: int = 2,
  num_batches: int = 20,
  max_batches: int = 1000,
  seconds: float = 1.0,
) -> InputReport:
  """Tests the guarantees of an input.

  Args:
    make_input: See the top of this module.
    is_training: Whether it feeds training; unused for a `BaseInput`.
    num_hosts: Number of hosts to simulate, one after the other. If the input
      raises a ValueError for them, one host is simulated.
    num_batches: Number of batches to read as each host.
    max_batches: Limit on the batches of an input of one epoch.
    seconds: Time for which to measure the speed.
  """
  open_shard = functools.partial(open_input, make_input, is_training)
  findings, hosts = [], []
  if num_hosts > 1:
    try:
      with open_shard(base.Shard(num_hosts - 1, num_hosts)) as source:
        next(source, None)
    except ValueError as e:
      findings.append(Finding('hosts', LOOK, f'{num_hosts} are refused: {e}'))
      num_hosts = 1
  for index in range(num_hosts):
    with open_shard(base.Shard(index, num_hosts)) as source:
      hosts.append(_Host(source, num_batches, max_batches))
  totals: Any = sum((host.totals for host in hosts), collections.Counter())
  padding, zeros = (
    totals[x] / max(1, totals['batches']) for x in ('padding', 'zeros')
  )
  padded = f'{padding:.1%} of what was read is padding, '
  share = ''
  if 'trained' in totals and totals['trained'] < totals['tokens']:
    part = totals['trained'] / totals['tokens']
    share = f'; {part:.1%} of the tokens train'
  with open_shard(base.Shard(0, num_hosts)) as source:
    speed = _measure(source, seconds, totals)
  results = {
    'rows': _check_rows(hosts),
    'epoch': _check_epoch(hosts, totals),
    'resume': _check_resume(hosts, open_shard),
    'position': _check_position(hosts, open_shard),
    'padding': (NOTE, f'{padded}{zeros:.1%} of the weights are 0{share}'),
    'speed': (NOTE, speed),
  }
  findings += [Finding(name, *x) for name, x in results.items() if x]
  digests = tuple(host.digest for host in hosts)
  return InputReport(len(hosts[0].rows), digests, tuple(findings))


def _measure(
  source: base.BaseInput, seconds: float, totals: Mapping[str, float]
) -> str:
  """Reads for some seconds; describes tokens, rows and batches per second."""
  start = time.perf_counter()
  next(source, None)
  first = last = time.perf_counter()
  count = 0
  while last - first < seconds and next(source, None) is not None:
    last, count = time.perf_counter(), count + 1
  speeds = [
    f'{totals[name] / totals["batches"] * count / (last - first):,.0f} {name}/s'
    for name in ('tokens', 'rows', 'batches')
    if count and totals[name]
  ]
  text = ', '.join(speeds) or 'not measured'
  # The first batch takes longer: it opens files and starts workers.
  return f'{text}; the first batch after {first - start:.2f} s'
