"""Tokenizers: bytes, SentencePiece models and Hugging Face models.

  tokenizer = load_tokenizer('bytes')  # or 'my.model', or 'my/tokenizer.json'
  tokenizer.encode('naïve')  # 110, 97, 195, 175, 118, 101
  load_tokenizer('stdlib')  # 2,048 tokens

Each tokenizer has a document token, which precedes every document. No text is
encoded to it.
"""

import abc
from collections.abc import Sequence
import functools
import hashlib
import json
import os
import pathlib
import re
from typing import Any, ClassVar

import numpy as np

from jaxline import errors

Text = str | bytes

# These are the values of the tokenizer 'bytes'.
DOCUMENT_TOKEN = 256
VOCABULARY_SIZE = 257

# Common names of special tokens that begin a text, then of tokens that end it.
WELL_KNOWN_TOKENS = (
  '<s>', '<bos>', '[BOS]', '<|begin_of_text|>', '<|startoftext|>',
  '<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '[EOS]',
)  # fmt: skip

# The tokenizer 'stdlib'; docs/inputs.md describes how it was made.
_STDLIB = pathlib.Path(__file__).with_name('stdlib.model')

_REPLACEMENT = '\ufffd'
_SPACE = '\u2581'  # SentencePiece's symbol for a space.
# This is how Llama 3 and Qwen 2 split words. `ByteLevel` uses GPT-2's pattern.
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_SPLITTERS: list[dict[str, Any]] = [
  {'type': 'BertPreTokenizer'},
  {'type': 'Whitespace'},
  {'type': 'WhitespaceSplit'},
  {'type': 'ByteLevel', 'use_regex': True},
  {'type': 'Metaspace', 'split': True},
  *(
    {'pattern': {'Regex': _WORDS % x}, 'behavior': 'Isolated', 'invert': False}
    for x in ('', '{1,3}')
  ),
]
# These normalizers treat an ASCII character or ' a' the same after any text.
_LOCAL = (
  'BertNormalizer', 'Lowercase', 'NFC', 'NFD', 'NFKC', 'NFKD', 'Nmt',
  'Precompiled', 'StripAccents',
)  # fmt: skip
_SPACES = {'Regex': ' {2,}'}  # T5 replaces a run of spaces.
_SPEC = re.compile(r'(?P<path>.*?\.(?P<kind>model|json))(#(?P<token>.+))?')


class Tokenizer(abc.ABC):
  """Turns text into tokens and back."""

  vocab_size: int  # All tokens are less than it.
  document_id: int  # The token that precedes a document.
  identity: str  # Identifies the tokenizer, with the hash of its file.

  def encode(self, text: Text) -> np.ndarray:
    """Returns the tokens of a text without a document token, int32 [length].

    Tokenizers except 'bytes' read bytes that are not UTF-8 as U+FFFD.
    """
    return self.encode_batch([text])[0]

  @abc.abstractmethod
  def encode_batch(self, texts: Sequence[Text]) -> list[np.ndarray]:
    """Tokenizes texts in parallel; returns int32 [length] for each."""

  def find_cuts(self, text: bytes) -> np.ndarray:
    """Returns the offsets, ascending, at which a text can be cut.

    With `encode_parts`, the two parts have the same tokens as the uncut text,
    for any text before and after `text`. Empty if no such offset is known.
    """
    del text
    return np.zeros(0, np.int64)

  def encode_parts(
    self, texts: Sequence[bytes], are_first: Sequence[bool]
  ) -> list[np.ndarray]:
    """Returns the tokens of parts of texts; `are_first` marks first parts."""
    del are_first
    return self.encode_batch(texts)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of tokens, [length].

    It omits document tokens. Ids outside the vocabulary become U+FFFD.
    """
    kept = np.asarray(ids, np.int64)
    kept = kept[kept != self.document_id]
    unknown = np.flatnonzero((kept < 0) | (kept >= self.vocab_size))
    first, *others = np.split(kept, unknown)
    return self._decode(first.tolist()) + ''.join(
      _REPLACEMENT + self._decode(run[1:].tolist()) for run in others
    )

  @abc.abstractmethod
  def _decode(self, ids: list[int]) -> str:
    """Returns the text of tokens that are in the vocabulary."""


class ByteTokenizer(Tokenizer):
  """A tokenizer whose tokens are the bytes of UTF-8 text."""

  vocab_size = VOCABULARY_SIZE
  document_id = DOCUMENT_TOKEN
  identity = 'bytes'

  def encode_batch(self, texts: Sequence[Text]) -> list[np.ndarray]:
    data = (t.encode() if isinstance(t, str) else t for t in texts)
    return [np.frombuffer(x, np.uint8).astype(np.int32) for x in data]

  def find_cuts(self, text: bytes) -> np.ndarray:
    return np.arange(1, len(text))

  def _decode(self, ids: list[int]) -> str:
    return bytes(ids).decode(errors='replace')


class _FileTokenizer(Tokenizer):
  """A tokenizer that is loaded from a file; `source` is its path."""

  KIND: ClassVar[str]

  def __init__(self, data: bytes, source: str, token: str | None = None):
    self._arguments = data, source, token
    try:
      special, defaults = self._load(data)
    except ImportError:
      raise
    except Exception as e:  # The libraries raise plain Exceptions.
      raise errors.UsageError(
        f'{source} is not a {self.KIND} tokenizer: {e}. Expected a'
        " SentencePiece '.model' or a '.json' of Hugging Face's `tokenizers`."
      ) from e
    names = defaults if token is None else [token]
    found = [special[name] for name in names if name in special]
    if not found:
      raise errors.UsageError(
        f'{source} has none of the special tokens {[*names]} for its documents.'
        f" Append one of {[*special]} to the path: '{source}#<name>'."
      )
    self.document_id = found[0]
    digest = hashlib.sha256(data).hexdigest()
    self.identity = f'{self.KIND} {digest} #{self.document_id}'

  def __reduce__(self) -> Any:
    # Worker processes get the file's content and load it again.
    return type(self), self._arguments

  @abc.abstractmethod
  def _load(self, data: bytes) -> tuple[dict[str, int], Sequence[str]]:
    """Sets `_library` and `vocab_size`.

    Returns the ids of special tokens, to which no text is encoded, by name; and
    the names of possible document tokens, the preferred one first.
    """


class SentencePieceTokenizer(_FileTokenizer):
  """A SentencePiece model; the document token is BOS, or EOS without a BOS.

  The model's normalization may change spaces.
  """

  KIND = 'sentencepiece'

  def _load(self, data: bytes) -> tuple[dict[str, int], Sequence[str]]:
    import sentencepiece

    library = self._library = sentencepiece.SentencePieceProcessor()
    library.LoadFromSerializedProto(data)
    self.vocab_size = library.vocab_size()
    name = library.id_to_piece
    control = filter(library.is_control, range(self.vocab_size))
    ends = library.bos_id(), library.eos_id()
    return {name(i): i for i in control}, [name(i) for i in ends if i >= 0]

  def encode_batch(self, texts: Sequence[Text]) -> list[np.ndarray]:
    ids = self._library.encode([_str(t) for t in texts], out_type=int)
    return [np.array(x, np.int32) for x in ids]

  @functools.cached_property
  def _can_cut(self) -> tuple[np.ndarray, bool]:
    return _find_bytes_to_cut_between(self._arguments[0])

  def find_cuts(self, text: bytes) -> np.ndarray:
    can_cut, adds_space = self._can_cut
    codes = np.frombuffer(text, np.uint8)
    cuts = 1 + np.flatnonzero(can_cut[codes[:-1], codes[1:]])
    return cuts[cuts < len(text) - adds_space]

  def encode_parts(
    self, texts: Sequence[bytes], are_first: Sequence[bool]
  ) -> list[np.ndarray]:
    if self._can_cut[1]:  # Drop their first space: the model adds it.
      pairs = zip(texts, are_first, strict=True)
      texts = [text if first else text[1:] for text, first in pairs]
    return self.encode_batch(texts)

  def _decode(self, ids: list[int]) -> str:
    return self._library.decode(ids)


class HuggingFaceTokenizer(_FileTokenizer):
  """A `tokenizer.json` of Hugging Face's library `tokenizers`.

  The document token is the first of `WELL_KNOWN_TOKENS` that is one of its
  special tokens. Names of special tokens in a text are encoded as text.
  """

  KIND = 'huggingface'

  def _load(self, data: bytes) -> tuple[dict[str, int], Sequence[str]]:
    import tokenizers

    library = self._library = tokenizers.Tokenizer.from_buffer(data)
    # The file may ask to truncate or pad texts.
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    self.vocab_size = 1 + max(library.get_vocab().values(), default=-1)
    added = library.get_added_tokens_decoder().items()
    return {x.content: i for i, x in added if x.special}, WELL_KNOWN_TOKENS

  def encode_batch(self, texts: Sequence[Text]) -> list[np.ndarray]:
    encodings = self._library.encode_batch_fast(
      [_str(t) for t in texts], add_special_tokens=False
    )
    return [np.array(x.ids, np.int32) for x in encodings]

  @functools.cached_property
  def _splits_before_words(self) -> bool:
    return _splits_before_words(json.loads(self._library.to_str()))

  def find_cuts(self, text: bytes) -> np.ndarray:
    if not self._splits_before_words:
      return super().find_cuts(text)
    codes = np.frombuffer(text, np.uint8)
    before, code, after = codes[:-2], codes[1:-1], codes[2:]
    is_letter = (after | 32) - np.uint8(ord('a')) < 26
    is_cut = (before > ord(' ')) & (before < 127) & (code == ord(' '))
    return 1 + np.flatnonzero(is_cut & is_letter)

  def _decode(self, ids: list[int]) -> str:
    return self._library.decode(ids, skip_special_tokens=False)


def _splits_before_words(spec: dict[str, Any]) -> bool:
  """Returns whether a tokenizer.json splits text before ' a' in 'x a'.

  If so, no step before the split reads across this place, and the tokens of a
  word do not depend on the words after it.
  """
  normalizers = _flatten(spec['normalizer'], 'normalizers')
  words = _flatten(spec['pre_tokenizer'], 'pretokenizers')
  # These two split only within words.
  words = [x for x in words if x['type'] not in ('Digits', 'Punctuation')]
  return (
    all(x['type'] in _LOCAL or x.get('pattern') == _SPACES for x in normalizers)
    and any(words and x.items() <= words[0].items() for x in _SPLITTERS)
    and not spec['model'].get('dropout')
    # Added tokens that are not special are found before the text is split.
    and all(token['special'] for token in spec['added_tokens'])
  )


def _flatten(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
  return part.get(key, [part]) if part else []


def _find_bytes_to_cut_between(model: bytes) -> tuple[np.ndarray, bool]:
  """Returns whether a text can be cut between two bytes, bool [256, 256].

  The second value is whether the model puts a space before each text. If so,
  every part after the first begins with a space and is longer than this space.

  BPE merges only neighbors, the best pair first. So if no piece of the
  vocabulary crosses a place, the merges on its two sides are independent.
  """
  can_cut = np.zeros([256, 256], bool)
  try:
    from sentencepiece import sentencepiece_model_pb2
  except Exception:  # It needs a compatible version of protobuf.
    return can_cut, False
  parsed = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
  how, trained = parsed.normalizer_spec, parsed.trainer_spec
  if (
    # Unigram sums and rounds scores over the whole text.
    trained.model_type != trained.BPE
    # Unknown neighbors become one token if there is no byte fallback.
    or not trained.byte_fallback
    or how.precompiled_charsmap
    or how.remove_extra_whitespaces
    or trained.treat_whitespace_as_suffix
  ):
    return can_cut, False
  can_cut[:128] = True  # A character begins after an ASCII byte.
  for piece in parsed.pieces:
    code = np.frombuffer(piece.piece.replace(_SPACE, ' ').encode(), np.uint8)
    can_cut[code[:-1], code[1:]] = False
  # The model reads an invalid byte as U+FFFD, and U+2581 as a space.
  can_cut[:, 128:] &= can_cut[:, _REPLACEMENT.encode()[0], None]
  can_cut[:, _SPACE.encode()[0]] &= can_cut[:, ord(' ')]
  if how.add_dummy_prefix:
    can_cut &= np.arange(256) == ord(' ')
    can_cut[ord(' ')] = False
  return can_cut, how.add_dummy_prefix


BYTES = ByteTokenizer()


def load_tokenizer(spec: str | os.PathLike[str] | Tokenizer) -> Tokenizer:
  """Returns a tokenizer.

  Args:
    spec: 'bytes'; 'stdlib', this package's SentencePiece model of 2,048 tokens
      for Python source (it decodes to the same text, except U+2581 to a space);
      or the path of a SentencePiece '.model' or of a Hugging Face
      `tokenizer.json`. To choose the document token, append it to the path:
      'tokenizer.json#<|endoftext|>'. A `Tokenizer` is returned unchanged.
  """
  if isinstance(spec, Tokenizer):
    return spec
  spec = os.fspath(spec)
  if spec == 'bytes':
    return BYTES
  match = _SPEC.fullmatch(str(_STDLIB) if spec == 'stdlib' else spec)
  if not match:
    raise errors.UsageError(
      f"The tokenizer is {spec!r}; expected 'bytes', 'stdlib', or a path, as in"
      " 'x.model' or 'x.json#<token>', with the document token after '#'."
    )
  path = pathlib.Path(match['path']).expanduser()
  if not path.is_file():
    raise errors.MissingFileError(
      f'The tokenizer is {spec!r}, but there is no file. Correct the path.'
    )
  kinds = {'model': SentencePieceTokenizer, 'json': HuggingFaceTokenizer}
  return kinds[match['kind']](path.read_bytes(), str(path), match['token'])


def _str(text: Text) -> str:
  return text if isinstance(text, str) else text.decode(errors='replace')
