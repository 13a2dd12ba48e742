"""Reads conversations from JSON lines, and marks the tokens that train.

A line is `{"messages": [{"role": "user", "content": "Hi"}, ...]}`, or has texts
or messages under other keys (`Options`), or two answers, `chosen` and
`rejected`. The chat template in the folder of the tokenizer.json renders it.
Each line is one document of the token cache. Its tokens are stored as codes:
2 * token, plus 1 if the token trains.

Shapes: B rows of this host, L tokens of a row, T tokens of a conversation.
"""

import bisect
import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import datetime
import functools
import itertools
import json
from typing import Any

from absl import logging
import numpy as np

from jaxline.base import keys
from jaxline.inputs import text
from jaxline.inputs import text_files
from jaxline.inputs import token_cache
from jaxline.inputs import tokenization
from jaxline.metrics import files as files_lib

from . import folder

_FORMAT = 1  # A new number invalidates the caches.
_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# A template that writes the date must write the same tokens every day.
_TODAY = datetime.datetime(2024, 7, 26)
_PROBE = 2**16  # Number of tokens to search for a stop.

Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How to read a line, and which of its tokens train.

  Attributes:
    train_on: 'assistant' trains the answers, each with the token that ends it;
      'all' trains every token.
    too_long: 'cut' keeps the beginning of a conversation that is longer than a
      row; 'leave_out' drops it. A line with two answers is always dropped.
    messages: the key of the messages. The keys below are for lines without it.
    system: the key of the system's text, which a line may lack.
    user: the keys of the user's text, such as 'instruction,input'.
    assistant: the key of the answer.
  """

  train_on: str = 'assistant'
  too_long: str = 'cut'
  messages: str = 'messages'
  system: str = 'system'
  user: str = 'prompt'
  assistant: str = 'completion'

  def __post_init__(self) -> None:
    keys.check_attributes(
      self,
      train_on=keys.one_of('assistant', 'all'),
      too_long=keys.one_of('cut', 'leave_out'),
    )


def conversations(
  row: Any, options: Options, answers: Sequence[str] = ()
) -> list[Messages]:
  """Returns the conversation of a line, or one for each key in `answers`.

  Raises:
    ValueError: the line has no conversation.
  """
  if not isinstance(row, dict):
    raise ValueError(f'it is a {type(row).__name__}; expected an object')
  given = row.get(options.messages)
  has_messages = given is not None
  if not has_messages:
    given = _said(row, 'system', options.system)
    given = given + _said(row, 'user', options.user)
    answers = answers or [options.assistant]
  elif not isinstance(given, list):
    raise ValueError(f'its messages are {given!r:.80}; expected a list')
  found = [_answered(given, row, key) for key in answers] or [given]
  for messages in found:
    roles = [*map(_role, messages)]
    # Under `messages`, a conversation may begin with an answer: a greeting. In
    # other lines, this means that the key of the question is missing.
    has_question = has_messages or roles[:1] != ['assistant']
    has_answer = not answers or roles[-1:] == ['assistant']
    if not (roles and has_question and has_answer):
      expected = [options.messages, *options.user.split(','), *answers]
      raise ValueError(
        f'its keys {[*row]} give messages of {roles}; expected a question and'
        f' an answer, from {expected} or other keys set in `chat`'
      )
  return found


def _answered(given: Messages, row: Mapping[str, Any], key: str) -> Messages:
  """Returns the conversation that ends with the answer under a key."""
  said = _said(row, 'assistant', key)
  if [*map(_role, said)][:1] in (['system'], ['user']):
    return said  # It is a whole conversation, which repeats the question.
  if said and [*map(_role, given)][-1:] == ['assistant']:
    raise ValueError(
      f'its messages end with an answer, and {key!r} has a second one'
    )
  return given + said


def _said(row: Mapping[str, Any], role: str, names: str) -> Messages:
  """Returns the texts under some keys as one message, or a key's messages."""
  keys_of_row = [name.strip() for name in names.split(',')]
  values = [x for key in keys_of_row if (x := row.get(key)) is not None]
  if len(values) == 1 and isinstance(values[0], list):
    return values[0]
  if not all(isinstance(x, str) for x in values):
    raise ValueError(f'{names!r} is {values!r:.80}; expected text')
  content = '\n\n'.join(filter(None, values))
  return [{'role': role, 'content': content}] if values else []


def _role(message: Any) -> str:
  is_dict = isinstance(message, dict) and message.get('role') in _ROLES
  if not is_dict or not isinstance(message.get('content'), str | list | None):
    raise ValueError(
      f'a message is {message!r:.80}; expected a role of {_ROLES} and content'
    )
  return message['role']


class Codes(tokenization.Tokenizer):
  """Turns a line into the codes of its conversation."""

  def __init__(
    self, path: folder.Path, options: Options, answers: Sequence[str] = ()
  ):
    """Reads the folder of the tokenizer.json `path`; see `conversations`."""
    self._arguments = path, options, answers
    self.options, self.answers = options, answers
    self.prompts = folder.Prompts(path)
    # Two further codes: one before each document, one between conversations.
    self.document_id = 2 * self.prompts.vocab_size
    self.separator = self.document_id + 1
    self.vocab_size = self.separator + 1
    about = dataclasses.asdict(options) | {'too_long': None}
    named = [_FORMAT, *about.values(), answers, self.prompts.identity]
    self.identity = f'conversations {json.dumps(named)}'

  def __reduce__(self) -> Any:
    return type(self), self._arguments

  def encode_batch(self, texts: Sequence[Any]) -> list[np.ndarray]:
    """Returns the codes of lines that `_Reader` has encoded as bytes."""
    return [np.frombuffer(x, np.int32) for x in texts]

  def _decode(self, ids: list[int]) -> str:
    """Returns the text of token ids: inputs decode ids, not codes."""
    return self.prompts.decode(ids)

  def encode_line(self, line: bytes) -> np.ndarray:
    """Returns the codes of a line, int32.

    Raises:
      ValueError: the line cannot be read.
    """
    row = json.loads(line.decode(errors='replace'))
    if rb'\ud' in line.lower():  # JSON can hold lone surrogates.
      row = files_lib.replace_surrogates(row)
    found: list[Any] = []
    for messages in conversations(row, self.options, self.answers):
      found += [[self.separator]] * bool(found)
      found.append(self._encode(messages, row.get('tools')))
    return np.concatenate(found).astype(np.int32)

  def _encode(self, messages: Messages, tools: Any) -> np.ndarray:
    render = functools.partial(
      self.prompts.render_spans, tools=tools, strftime_now=_TODAY.strftime
    )
    whole, spans = render(messages, add_generation_prompt=False)
    (encoding,) = self.prompts.encode_rendered([whole])
    ids_T, offsets = np.array(encoding.ids, np.int32), encoding.offsets
    if len(ids_T) < 2:
      raise ValueError(
        f'the template writes {whole!r}; expected at least two tokens'
      )
    if self.options.train_on == 'all':
      return 2 * ids_T + 1
    is_stop_T = np.isin(ids_T, self.prompts.stop_ids)
    trains_T = np.zeros(len(ids_T), bool)
    begin_T, end_T = np.array(offsets).T
    for begin, end in spans:
      trains_T |= (begin_T < end) & (end_T > begin)
    # A block may end before the token that ends the turn.
    trains_T[1:] |= is_stop_T[1:] & trains_T[:-1]
    turns = [i for i, x in enumerate(messages) if x['role'] == 'assistant']
    # A greeting does not train, because no template shows where it begins.
    for i in () if spans else filter(None, turns):
      before, _ = render(messages[:i], add_generation_prompt=True)
      (start,) = self.prompts.encode_rendered([before])
      if start.ids != encoding.ids[: len(start.ids)]:
        raise ValueError(
          f'if the conversation ends before message {i}, the template writes'
          f' other tokens, at the end {before[-40:]!r}. Mark the answers in the'
          ' template with {% generation %}, or strip the message'
        )
      after, _ = render(messages[: i + 1], add_generation_prompt=False)
      is_prefix = whole.startswith(after)
      is_turn_T = (
        begin_T < len(after) if is_prefix else np.ones(len(ids_T), bool)
      )
      is_turn_T[: len(start.ids)] = False
      # Decoding ends at the stop, so text after it, such as a new line, does
      # not train.
      stops = np.flatnonzero(is_turn_T & is_stop_T)
      if stops.size:
        is_turn_T[stops[0] + 1 :] = False
      elif not is_prefix:
        raise ValueError(
          f'the template changes message {i} if more messages follow, and'
          f' writes none of the stops {self.prompts.stop_ids} after it. Mark'
          ' the answers in the template with {% generation %}'
        )
      trains_T |= is_turn_T
    return 2 * ids_T + trains_T


class _Reader(text_files.Reader):
  """Reads lines as codes, and leaves out lines that it cannot read."""

  tokenizer: Codes

  def read_rows(
    self, source: text_files.Source, blocks: Iterable[Any]
  ) -> Iterator[tuple[int, bytes]]:
    first, name = '', source.name
    for number, line in super().read_rows(source, blocks):
      try:
        if line.strip():
          yield number, self.tokenizer.encode_line(line).tobytes()
      except (ValueError, RecursionError) as e:
        first = first or f'{name}:{number}: {str(e).rstrip(".")}'
        count = self.nulls[name] = self.nulls.get(name, 0) + 1
        self.notes[name] = f'{count} lines left out, the first is {first}'


def load(
  files: text.Path | Sequence[text.Path],
  codes: Codes,
  *,
  eval_fraction: float,
  cache_dir: text.Path | None,
) -> text.Corpus:
  """Loads conversations, as `text.load_corpus` loads documents."""
  sources, notes = text_files.find(files)
  reader = _Reader(sources, codes, 'line', '', float(eval_fraction))
  corpus = token_cache.load(reader, notes, cache_dir)
  some = corpus.train.tokens[:_PROBE].astype(np.int64)
  trains, what = some & 1, 'answer ends with'
  ends = trains[:-1] > trains[1:]
  if codes.options.train_on == 'all':  # Codes do not show where answers end.
    ends, what = trains[:-1] > 0, 'conversation has'
  last, stops = some[:-1][ends] >> 1, sorted({*codes.prompts.stop_ids})
  if last.size and not np.isin(last, stops).any():
    logging.warning(
      'No %s one of the stops %s, so the model does not learn to stop. Check'
      ' the template, and eos_token_id in generation_config.json.',
      what,
      stops,
    )
  return corpus


def codes_of(documents: text.Documents, document: int) -> list[np.ndarray]:
  """Returns the codes of each conversation of a document, int32."""
  starts, end = documents.starts, document + 1
  end = starts[end] if end < len(starts) else None
  found = documents.tokens[starts[document] + 1 : end].astype(np.int32)
  at = np.flatnonzero(found == documents.tokenizer.separator)
  return np.split(found, np.stack([at, at + 1], 1).ravel())[::2]


@dataclasses.dataclass(kw_only=True, eq=False)
class ChatInput(text.TextInput):
  """Packs whole conversations into rows.

  A batch has the entries of `text.TextInput`. A conversation of T tokens takes
  T - 1 places, because its last token is only a label. With `packing='padded'`,
  no two conversations share a row. All epochs have the same rows, in random
  order.

  If lines have two answers, segment 2n - 1 has the first answer of a line and
  segment 2n the second. The weights of each answer sum to 1/2.
  """

  packing: str = 'packed'

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.packing == 'stream':
      self.refuse('packing', "'packed' or 'padded'")
    documents, codes = self._documents, self._documents.tokenizer
    self._cuts = codes.options.too_long == 'cut' and not codes.answers
    # Leave out the document's first code, the separator, and the last token of
    # each conversation.
    sizes = np.diff(documents.starts, append=documents.tokens.size)
    sizes -= 4 if codes.answers else 2
    is_long = sizes > self.length
    how = 'cut' if self._cuts else 'left out'
    self._about_long = f'{is_long.sum():,} are longer than a row and {how}'
    if self.is_training and is_long.any():
      logging.warning('Of %d conversations %s.', sizes.size, self._about_long)
    sizes[is_long] = self.length if self._cuts else 0
    self._sizes = sizes
    if not sizes.any():
      self.refuse('length', 'at least the length of one conversation')
    self._rows = _pack(sizes, self.length, self.packing == 'packed')
    self.set_num_rows(self._rows[1].size - 1)

  def documents_of(self, record: int) -> np.ndarray:
    """Returns the numbers of the documents of a row, int64 [n]."""
    documents, firsts = self._rows
    row = record * self._num_rows // self._num_records
    return documents[firsts[row] : firsts[row + 1]]

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    del epochs
    shape = len(records), self.length
    names = 'ids', 'labels', 'segment_ids', 'segment_pos'
    batch = {name: np.zeros(shape, np.int32) for name in names}
    batch['weights'] = np.zeros(shape, np.float32)
    for row, record in enumerate(records.tolist()):
      at = segment = 0
      for document in self.documents_of(record):
        for codes in codes_of(self._documents, document):
          codes = codes[: self.length + 1 - at]
          place = row, slice(at, at + codes.size - 1)
          at, segment = at + codes.size - 1, segment + 1
          batch['ids'][place] = codes[:-1] >> 1
          batch['labels'][place] = codes[1:] >> 1
          batch['segment_ids'][place] = segment
          batch['segment_pos'][place] = np.arange(codes.size - 1)
          weights = codes[1:] & 1
          if self.tokenizer.answers:
            weights = weights / max(1, 2 * weights.sum())
          batch['weights'][place] = weights
    return batch

  def describe(self) -> str:
    """Returns lines with the numbers of conversations, rows and tokens."""
    documents, codes = self._documents, self._documents.tokenizer
    is_token = documents.tokens < codes.document_id
    # All tokens of a conversation are labels, except the first.
    is_label = is_token[1:] & is_token[:-1]
    trains = 1 + np.flatnonzero(is_label & (documents.tokens[1:] & 1))
    begins, more = documents.starts, 4 if codes.answers else 2
    ends = begins + np.where(self._sizes, self._sizes + more, 0)
    trained = np.diff(np.searchsorted(trains, [begins, ends]), axis=0).sum()
    tokens = np.count_nonzero(is_token)
    return (
      f'{len(documents.names):,} conversations, {self._num_rows:,} rows,'
      f' {tokens:,} tokens, of which {trained / tokens:.1%} train;'
      f' {self._about_long}\n{token_cache.join_notes(documents.notes)}'
    ).rstrip()

  def describe_record(self, record: int, epoch: int) -> str:
    del epoch
    found = self.documents_of(record).tolist()
    return ', '.join(self._documents.names[i] for i in found)

  def data_identity(self) -> dict[str, Any]:
    return super().data_identity() | {'cuts': self._cuts}


def _pack(
  sizes: np.ndarray, length: int, shares: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Puts each document into the fullest row that has room for it.

  Args:
    sizes: number of places that each document takes; 0 leaves it out.
    length: number of places of a row.
    shares: whether a row may have several documents.

  Returns:
    The documents, row by row, and where each row begins in them, [rows + 1].
  """
  rows: list[list[int]] = []
  rooms: list[int] = []  # Free places of rows that are not full, sorted.
  of_room = collections.defaultdict(list)  # Free places -> rows.
  order = np.argsort(-sizes, kind='stable')[: np.count_nonzero(sizes > 0)]
  for document, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
    place, room, row = bisect.bisect_left(rooms, size), length, []
    if place < len(rooms):
      room = rooms[place]
      row = of_room[room].pop()
      if not of_room[room]:
        del rooms[place]
    else:
      rows.append(row)
    row.append(document)
    if shares and (room := room - size):
      if not of_room[room]:
        bisect.insort(rooms, room)
      of_room[room].append(row)
  firsts = np.cumsum([0, *map(len, rows)])
  return np.array([*itertools.chain.from_iterable(rows)], np.int64), firsts
