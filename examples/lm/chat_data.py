"""Conversations in JSON lines as batches of tokens, with what trains of them.

A line is `{"messages": [{"role": "user", "content": "Hi"}, ...]}`; or it has
texts or messages by the names in `Options`, as `{"prompt": ..., "completion":
...}`; or, of preferences, `{"prompt": ..., "chosen": ..., "rejected": ...}`.
The chat template beside the tokenizer.json writes it.

A conversation is a document of the token cache. Its tokens there are 2 * id, or
2 * id + 1 if the token trains.

Shapes: B rows of this host, L tokens of a row, T tokens of a conversation.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import datetime
import functools
import itertools
import json
import re
from typing import Any, NamedTuple

import numpy as np

from jaxline import errors
from jaxline.inputs import text
from jaxline.inputs import text_files
from jaxline.inputs import token_cache
from jaxline.inputs import tokenization

from . import folder

_FORMAT = 1  # Another number makes the tokens again.
_TRAIN_ON = ('assistant', 'all')
_TOO_LONG = ('cut', 'leave_out')
_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
_BATCH = 256  # Lines to tokenize at once.
_SURROGATES = re.compile('[\ud800-\udfff]')
# A template that asks for the date shall write the same tokens every day.
_TODAY = datetime.datetime(2024, 7, 26)

Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How a line is read, and which of its tokens train.

  Attributes:
    train_on: 'assistant' trains what the assistant says, with the token that
      ends it; 'all' all tokens.
    too_long: of a conversation with more tokens than a row, 'cut' drops the
      end; 'leave_out' drops all of it, as it does always with a pair.
    messages: the key of the messages. The next three are for lines without it.
    system: the key of what the system says, if the line has it.
    user: the keys of what the user says, such as 'instruction,input'.
    assistant: the key of what the assistant says.
    pairs: whether a line has two conversations: in place of `assistant`,
      'chosen' and 'rejected'.
  """

  train_on: str = 'assistant'
  too_long: str = 'cut'
  messages: str = 'messages'
  system: str = 'system'
  user: str = 'prompt'
  assistant: str = 'completion'
  pairs: bool = False

  def __post_init__(self) -> None:
    for key, choices in ('train_on', _TRAIN_ON), ('too_long', _TOO_LONG):
      if (value := getattr(self, key)) not in choices:
        raise ValueError(f'{key} must be one of {choices}; got {value!r}.')


def conversations(row: Any, options: Options) -> list[Messages]:
  """Returns the conversation of a line, or the chosen and the rejected one.

  Raises:
    ValueError: there is none, or it has no messages.
  """
  if not isinstance(row, dict):
    raise ValueError(f'it is a {type(row).__name__}; expected an object')
  given = row.get(options.messages)
  if given is None:
    given = _said(row, 'system', options.system, optional=True)
    # Of preferences, each answer may have the prompt in it.
    given = given + _said(row, 'user', options.user, optional=options.pairs)
    if not options.pairs:
      given = given + _said(row, 'assistant', options.assistant)
  found = [given]
  if options.pairs:
    keys = 'chosen', 'rejected'
    found = [given + _said(row, 'assistant', key) for key in keys]
  for messages in found:
    _check(messages)
  return found


def _said(
  row: Mapping[str, Any], role: str, names: str, optional: bool = False
) -> Messages:
  """Returns the texts under some keys as a message, or the messages there."""
  values = [x for name in names.split(',') if (x := row.get(name)) is not None]
  if not values and not optional:
    raise ValueError(f'it has no {names!r}; it has the keys {[*row]}')
  if values and isinstance(values[0], list):
    return values[0]
  if wrong := [x for x in values if not isinstance(x, str)]:
    raise ValueError(f'{names!r} is {wrong[0]!r:.80}; expected a text')
  content = '\n\n'.join(filter(None, values))
  return [{'role': role, 'content': content}] if values else []


def _check(messages: Any) -> None:
  if not messages or not isinstance(messages, list):
    raise ValueError(f'its messages are {messages!r:.80}; expected a list')
  for i, message in enumerate(messages):
    role = message.get('role') if isinstance(message, dict) else None
    if role not in _ROLES:
      raise ValueError(
        f'message {i} is {message!r:.80}; expected a role of {_ROLES}'
      )
    if not isinstance(message.get('content'), str | list | None):
      raise ValueError(f'the content of message {i} is not a text')


class Codes(tokenization.Tokenizer):
  """Turns a line into the codes of its conversations: see the module."""

  def __init__(self, path: folder.Path, options: Options):
    """Loads what the folder of the tokenizer.json `path` says."""
    self._arguments = path, options
    self.options, self.prompts = options, folder.Prompts(path)
    _ = self.prompts.template  # A folder without one is refused here.
    # The last two codes begin a document, and separate the two of a pair.
    self.document_id = 2 * self.prompts.vocab_size
    self.separator = self.document_id + 1
    self.vocab_size = self.separator + 1
    about = dataclasses.asdict(options) | {'too_long': None}
    named = [_FORMAT, *about.values(), self.prompts.identity]
    self.identity = f'conversations {json.dumps(named)}'

  def __reduce__(self) -> Any:
    return type(self), self._arguments

  def encode_batch(
    self, texts: Sequence[tokenization.Text]
  ) -> list[np.ndarray]:
    """Returns what `encode_lines` made, which the reader gave as bytes."""
    return [np.frombuffer(x, np.int32) for x in texts if isinstance(x, bytes)]

  def _decode(self, ids: list[int]) -> str:
    return self.prompts.decode([i >> 1 for i in ids if i != self.separator])

  def encode_lines(
    self, lines: Sequence[bytes]
  ) -> list[np.ndarray | ValueError]:
    """Returns the codes of each line, or why it cannot be read."""
    written = [*map(self._write, lines)]
    # One call, whose threads take a text each.
    texts = dict.fromkeys(
      part
      for found in written
      if not isinstance(found, ValueError)
      for one in found
      for part in (one.whole, *(x for turn in one.turns for x in turn))
      if part is not None
    )
    encodings = self.prompts.encode_rendered([*texts])
    encoded = dict(zip(texts, encodings, strict=True))
    return [self._codes(found, encoded) for found in written]

  def _write(self, line: bytes) -> 'list[_Written] | ValueError':
    try:
      row = json.loads(line.decode(errors='replace'))
      if rb'\ud' in line.lower():  # JSON can hold halves of characters.
        halves = json.dumps(row, ensure_ascii=False)
        row = json.loads(_SURROGATES.sub('\ufffd', halves))
      found = conversations(row, self.options)
      tools = row.get('tools')
      return [self._write_one(messages, tools) for messages in found]
    except RecursionError as e:
      return ValueError(str(e))
    except ValueError as e:  # UsageError is one.
      return e

  def _write_one(self, messages: Messages, tools: Any) -> '_Written':
    """Writes a conversation, and what is before and behind each answer."""
    given = {'tools': tools, 'strftime_now': _TODAY.strftime}
    render = functools.partial(self.prompts.render, **given)
    whole, spans = self.prompts.render_spans(
      messages, add_generation_prompt=False, **given
    )
    if spans or self.options.train_on == 'all':
      return _Written(whole, spans, [])
    turns: list[tuple[str, str | None]] = []
    for i, message in enumerate(messages):
      if message['role'] != 'assistant':
        continue
      if not i:
        raise ValueError('it begins with the assistant')
      before = render(messages[:i], add_generation_prompt=True)
      after = whole
      if i + 1 < len(messages):
        after = render(messages[: i + 1], add_generation_prompt=False)
      if not whole.startswith(before):
        raise ValueError(
          f'the template writes what is before message {i} in another way if'
          f' that message is there: {_differ(before, whole)}. Mark the'
          ' answers in the template by a {% generation %} block'
        )
      turns.append((before, after if whole.startswith(after) else None))
    return _Written(whole, [], turns)

  def _codes(
    self,
    found: 'list[_Written] | ValueError',
    encoded: Mapping[str, Any],
  ) -> np.ndarray | ValueError:
    if isinstance(found, ValueError):
      return found
    try:
      parts = [self._codes_of(one, encoded) for one in found]
    except ValueError as e:
      return e
    between = np.array([self.separator])
    joined = [x for part in parts for x in (between, part)][1:]
    return np.concatenate(joined).astype(np.int32)

  def _codes_of(self, one: '_Written', encoded: Mapping[str, Any]) -> Any:
    encoding = encoded[one.whole]
    ids_T = np.array(encoding.ids, np.int32)
    if len(ids_T) < 2:
      raise ValueError('it has less than two tokens')
    if self.options.train_on == 'all':
      return 2 * ids_T + 1
    is_stop_T = np.isin(ids_T, self.prompts.stop_ids)
    trains_T = np.zeros(len(ids_T), bool)
    if one.spans:
      begin_T, end_T = np.array(encoding.offsets).T
      for begin, end in one.spans:
        trains_T |= (begin_T < end) & (end_T > begin)
      # A block may end before the token that ends the turn.
      trains_T[1:] |= is_stop_T[1:] & trains_T[:-1]
      return 2 * ids_T + trains_T
    for i, (before, after) in enumerate(one.turns):
      start = len(encoded[before].ids)
      if encoded[before].ids != encoding.ids[:start]:
        raise ValueError(
          'the last token before an answer is another one if the answer'
          ' follows. Remove white space from the beginning of the answer'
        )
      stops = start + np.flatnonzero(is_stop_T[start:])
      end = len(encoded[after].ids) if after else 0
      if end and encoded[after].ids == encoding.ids[:end]:
        # What follows the last stop, such as a new line, is never decoded.
        stops = stops[stops < end][-1:]
      else:
        if i + 1 < len(one.turns):
          stops = stops[stops < len(encoded[one.turns[i + 1][0]].ids)]
        if not stops.size:
          raise ValueError(
            'the template writes an answer in another way if more follows, and'
            f' none of the stops {self.prompts.stop_ids} is behind it'
          )
      end = stops[0] + 1 if stops.size else end
      trains_T[start:end] = True
    return 2 * ids_T + trains_T


class _Written(NamedTuple):
  """What the template writes of a conversation.

  Attributes:
    whole: all of it.
    spans: where its `generation` blocks are, if it has some.
    turns: otherwise, for each answer, what is before it, and what ends with it;
      None if that is not how `whole` begins.
  """

  whole: str
  spans: list[tuple[int, int]]
  turns: list[tuple[str, str | None]]


def _differ(before: str, whole: str) -> str:
  """Returns where two texts begin to differ."""
  pairs = enumerate(zip(before, whole, strict=False))
  same = next((i for i, (a, b) in pairs if a != b), 0)
  at = max(0, same - 20)
  return f'{before[at : same + 20]!r}, and {whole[at : same + 20]!r}'


class _Reader(text_files.Reader):
  """Reads lines as codes; leaves out those that it cannot read."""

  tokenizer: Codes

  def _read_rows(
    self, name: str, blocks: Iterable[bytes]
  ) -> Iterator[tuple[int, bytes]]:
    first = ''
    rows = super()._read_rows(name, blocks)
    while some := [*itertools.islice(rows, _BATCH)]:
      found = self.tokenizer.encode_lines([line for _, line in some])
      for (number, _), codes in zip(some, found, strict=True):
        if not isinstance(codes, ValueError):
          yield number, codes.tobytes()
          continue
        first = first or f'{name}:{number}: {str(codes).rstrip(".")}'
        count = self.nulls[name] = self.nulls.get(name, 0) + 1
        self.notes[name] = f'{count} lines left out, the first is {first}'


def load(
  files: text.Path | Sequence[text.Path],
  codes: Codes,
  *,
  eval_fraction: float,
  cache_dir: text.Path | None,
) -> text.Corpus:
  """Returns conversations as `text.load_corpus` returns documents."""
  sources, notes = text_files.find(files)
  reader = _Reader(sources, codes, 'line', '', float(eval_fraction))
  return token_cache.load(reader, notes, cache_dir)


@dataclasses.dataclass(kw_only=True, eq=False)
class ChatInput(text.TextInput):
  """Rows of whole conversations, as many as fit into each.

  The entries of a batch are those of `text.TextInput`. A conversation of T
  tokens has T - 1 places: the last token is a label only. With
  `packing='padded'` a row has one conversation. The conversations of a row are
  the same in each epoch; the order of the rows is drawn.

  Pairs are segments 2n - 1, chosen, and 2n, rejected. Of these, `weights` has 1
  at the first place, and `signs` tells the tokens that train: 1 and -1.
  """

  packing: str = 'packed'

  def __post_init__(self) -> None:
    super().__post_init__()
    documents = self._documents
    options = self._options = documents.tokenizer.options
    self._cuts = options.too_long == 'cut' and not options.pairs
    if self.packing == 'stream':
      self.refuse('packing', "'packed' or 'padded'")
    sizes = np.diff(documents.starts, append=documents.tokens.size)
    # Without the document's own token, and the last one of each conversation.
    sizes -= 4 if options.pairs else 2
    is_long = sizes > self.length
    self._long = int(is_long.sum())
    if not self._cuts:
      sizes[is_long] = 0
    sizes = np.minimum(sizes, self.length)
    self._rows = _pack(sizes, self.length, self.packing == 'packed')
    self._num_rows = self._num_records = self._rows[1].size - 1
    if not self._num_rows:
      raise errors.UsageError(
        f'All {sizes.size} conversations are longer than a row of {self.length}'
        ' tokens. Raise `length`.'
      )
    if self.max_batches is not None:
      most = self.max_batches * self.get_global_batch_size()
      self._num_records = min(self._num_rows, most)

  def conversations_of(self, record: int) -> np.ndarray:
    """Returns which documents a row has, int64 [n]."""
    members, firsts = self._rows
    row = record * self._num_rows // self._num_records
    return members[firsts[row] : firsts[row + 1]]

  def codes_of(self, document: int) -> list[np.ndarray]:
    """Returns the codes of a conversation, or of the two of a pair."""
    starts, codes = self._documents.starts, self._documents.tokenizer
    end = starts[document + 1] if document + 1 < len(starts) else None
    found = self._documents.tokens[starts[document] + 1 : end]
    at = np.flatnonzero(found == codes.separator)
    return np.split(found.astype(np.int32), [*at, *at + 1])[::2]

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    del epochs
    shape, pairs = (len(records), self.length), self._options.pairs
    names = 'ids', 'labels', 'segment_ids', 'segment_pos'
    batch = {name: np.zeros(shape, np.int32) for name in names}
    batch['weights'] = weights_BL = np.zeros(shape, np.float32)
    trains_BL = weights_BL
    if pairs:
      batch['signs'] = trains_BL = np.zeros(shape, np.float32)
    for i, record in enumerate(records.tolist()):
      at = segment = 0
      for document in self.conversations_of(record):
        if pairs:
          weights_BL[i, at] = 1
        for sign, codes in zip((1, -1), self.codes_of(document), strict=False):
          codes = codes[: self.length + 1 - at]
          place = i, slice(at, at := at + len(codes) - 1)
          batch['ids'][place] = codes[:-1] >> 1
          batch['labels'][place] = codes[1:] >> 1
          batch['segment_ids'][place] = segment = segment + 1
          batch['segment_pos'][place] = np.arange(len(codes) - 1)
          trains_BL[place] = sign * (codes[1:] & 1)
    return batch

  def describe(self) -> str:
    """Returns how many conversations, tokens and rows there are, in lines."""
    tokens = self._documents.tokens
    trains = int(np.count_nonzero(tokens & 1))
    count = len(self._documents.names)
    how = 'left out' if not self._cuts else 'cut'
    text = (
      f'{count:,} conversations, {tokens.size - count:,} tokens, of which'
      f' {trains / max(1, tokens.size - count):.1%} train, in'
      f' {self._num_rows:,} rows; {self._long:,} are longer than a row and'
      f' {how}'
    )
    notes = token_cache.join_notes(self._documents.notes)
    return f'{text}\n{notes}'.rstrip()

  def describe_record(self, record: int, epoch: int) -> str:
    del epoch
    found = self.conversations_of(record).tolist()
    return ', '.join(self._documents.names[i] for i in found)

  def data_identity(self) -> dict[str, Any]:
    return super().data_identity() | {'cuts': self._cuts}

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    del key
    decode = self._documents.tokenizer.prompts.decode
    rows = zip(np.asarray(ids), lengths, strict=True)
    return [decode(row[:length]) for row, length in rows]


def _pack(
  sizes: np.ndarray, length: int, shares: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Divides documents among rows: each into the fullest one that has room.

  Args:
    sizes: places that each document takes; one without is left out.
    length: places of a row.
    shares: whether a row may have more than one.

  Returns:
    The documents, row by row, and where each row begins in them, [rows + 1].
  """
  rows: list[list[int]] = []
  rooms: list[int] = []  # Those that rows have, ascending.
  open_rows: dict[int, list[int]] = {}  # The rows by their room.
  order = np.argsort(-sizes, kind='stable')
  for document in order[: np.count_nonzero(sizes > 0)].tolist():
    size, row, room = int(sizes[document]), len(rows), length
    place = bisect.bisect_left(rooms, size)
    if place < len(rooms):
      room = rooms[place]
      row = open_rows[room].pop()
      if not open_rows[room]:
        del open_rows[room], rooms[place]
    else:
      rows.append([])
    rows[row].append(document)
    if shares and (left := room - size):
      if left not in open_rows:
        bisect.insort(rooms, left)
      open_rows.setdefault(left, []).append(row)
  firsts = np.cumsum([0, *map(len, rows)])
  return np.array([*itertools.chain.from_iterable(rows)], np.int64), firsts
