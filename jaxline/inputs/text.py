"""Text files as batches of tokens for a language model.

  data = text.TextInput(files='stdlib', batch_size=8, length=256)
  print(*data.ids_to_strings(next(data)['ids'], [256] * 8), sep='\n---\n')

A document is a file or a part of a file, such as a line. Its tokens are the
document token, followed by the tokens of its text. The documents of a split,
sorted by name, form one stream. `packing` defines a row:

  stream  the next L tokens of the stream, across documents
  packed  the same, with `segment_ids` and `segment_pos` to separate documents
  padded  one document from its beginning; a long one continues in the next row

A batch has these arrays, each of shape [B, L]:

  ids          int32    the tokens that the model reads
  labels       int32    the tokens to predict: the stream, shifted by one
  weights      float32  1 where the label is text, else 0
  segment_ids  int32    packed: the documents of a row, 1, 2, ...; 0 for padding
  segment_pos  int32    packed: the position, from 0, within the document's part
                        in this row
  paddings     float32  padded: 1 for padding, else 0

With bytes as tokens, `sum(weights * nats) / sum(weights) / log(2)` is the
number of bits per byte. Document tokens are read, but never predicted.

Shapes: N tokens of a stream, D documents, B rows of this host, L tokens of a
row, b rows to read.
"""

import bisect
from collections.abc import Sequence
import dataclasses
import functools
import os
import pathlib
import re
from typing import Any

import numpy as np

from jaxline import errors
from jaxline.inputs import indexed
from jaxline.inputs import text_files
from jaxline.inputs import token_cache
from jaxline.inputs import tokenization

# These are the values of the tokenizer 'bytes'.
DOCUMENT_TOKEN = tokenization.DOCUMENT_TOKEN
VOCABULARY_SIZE = tokenization.VOCABULARY_SIZE
decode = tokenization.BYTES.decode

Corpus = token_cache.Corpus
Documents = token_cache.Documents
Path = text_files.Path

PACKINGS = ('stream', 'packed', 'padded')


def load_corpus(
  files: Path | Sequence[Path] = 'stdlib',
  *,
  eval_fraction: float = 0.05,
  tokenizer: Path | tokenization.Tokenizer = 'bytes',
  documents: str = 'file',
  cache_dir: Path | None = None,
  text_key: str = 'text',
) -> Corpus:
  """Returns the training and the held-out tokens of text files; caches them.

  The hash of a document's name decides whether it is held out. So the split is
  the same on every machine, and adding files moves no document. Each part has
  at least one document. If there is only one file, its end is held out.

  Args:
    files: 'stdlib' (the source of the running Python's standard library,
      without its tests), a folder (all text files below it that are not
      hidden), a file, a glob such as 'notes/**/*.md', or a list of these. Links
      are followed, to each folder once. Text is UTF-8, or UTF-16 with a byte
      order mark; a file is left out if more than 1% of it is not. Files
      that end in '.gz', '.bz2', '.xz' or '.zst' are unpacked. A '.tokens' file
      from a `cache_dir`, maybe in a bucket, is used directly.
    eval_fraction: Fraction of the documents to hold out, between 0 and 1.
    tokenizer: As for `tokenization.load_tokenizer`.
    documents: How to cut files into documents: 'file'; 'line' (each nonempty
      line, named 'path:line'); 'jsonl' (an entry of each line); 'rows' (an
      entry of each row of '.parquet' and '.arrow'); or 'split:' followed by the
      text that separates documents.
    cache_dir: Folder for the tokens. None means '~/.cache/jaxline/tokens', or
      'jaxline/tokens' below XDG_CACHE_HOME if it is set.
    text_key: Entry of a 'jsonl' line or a row that holds the text. Lines whose
      entry is null are left out; more than 1% of such lines are an error.
  """
  if not 0 < eval_fraction < 1:
    raise errors.UsageError(
      f'eval_fraction is {eval_fraction}; expected a number between 0 and 1.'
    )
  if not re.match('split:.', documents, re.DOTALL):
    errors.check_names([documents], text_files.KINDS, 'kind', 'documents')
  loaded = tokenization.load_tokenizer(tokenizer)
  if isinstance(files, str | os.PathLike):
    path = pathlib.Path(files).expanduser().absolute()
    if re.match('(gs|s3)://.+[.]tokens$', os.fspath(files)):
      path = token_cache.download(os.fspath(files), cache_dir)
    if path.suffix == '.tokens' and path.is_file():
      return token_cache.open_corpus(path, loaded)
  sources, notes = text_files.find(files)
  reader = text_files.Reader(
    sources, loaded, documents, text_key, float(eval_fraction)
  )
  return token_cache.load(reader, notes, cache_dir)


@dataclasses.dataclass(kw_only=True, eq=False)
class TextInput(indexed.IndexedInput):
  """Rows of tokens of text files; see the top of this module.

  With 'stream' and 'packed', each training epoch starts at a new offset, wraps
  around, cuts the stream into windows of L tokens and drops the remaining
  N mod L. Evaluation starts at the beginning of the stream, and each token of
  text is a label once.

  With 'padded', all epochs have the same rows: a document whose text has T
  tokens has ceil(T / L) rows, padded with document tokens of weight 0.

  Attributes:
    documents: A split from `load_corpus`, or, with `files`, the `documents`
      argument of `load_corpus`. After construction: the split that is read.
    files, eval_fraction, tokenizer, cache_dir, text_key: Passed to
      `load_corpus`; None means its default. Leave them None if `documents` is
      a split. After construction, `tokenizer` is the loaded tokenizer.
    length: L, the tokens per row.
    packing: 'stream', 'packed' or 'padded'.
    max_batches: Limit on global batches per evaluation epoch. The same evenly
      spaced rows of the split are used every time. None means no limit.
  """

  documents: Documents | str = 'file'
  files: Path | Sequence[Path] | None = None
  eval_fraction: float | None = None
  tokenizer: Path | tokenization.Tokenizer | None = None
  length: int
  packing: str = 'stream'
  max_batches: int | None = None
  cache_dir: Path | None = None
  text_key: str | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.packing not in PACKINGS:
      self.refuse('packing', f'one of {PACKINGS}')
    self.check_integer('length')
    self.check_integer('max_batches', or_none=True)
    if self.is_training and self.max_batches is not None:
      self.refuse('max_batches', 'None, since training reads all of the text')
    self._documents = self.documents = self._load()
    self.tokenizer = self._documents.tokenizer
    num_tokens = self._documents.tokens.size
    if self.packing == 'padded':
      self.set_num_rows(int(self._first_rows[-1]))
    elif self.is_training:
      self.set_num_rows(num_tokens // self.length)
    else:
      self.set_num_rows(-((1 - num_tokens) // self.length))

  def set_num_rows(self, num_rows: int) -> None:
    """Sets the number of rows, from which `max_batches` may select some."""
    self._num_rows = self._num_records = num_rows
    if self.max_batches is not None:
      most = self.max_batches * self.get_global_batch_size()
      self._num_records = min(num_rows, most)

  def _load(self) -> Documents:
    keys = 'files', 'eval_fraction', 'tokenizer', 'cache_dir', 'text_key'
    given: dict[str, Any] = {key: getattr(self, key) for key in keys}
    given = {key: x for key, x in given.items() if x is not None}
    if isinstance(self.documents, Documents):
      for key in given:
        self.refuse(key, 'None, since `documents` has tokens already')
      return self.documents
    if self.files is None:
      self.refuse('files', 'files; or set documents to a load_corpus() split')
    corpus = load_corpus(documents=self.documents, **given)
    return corpus.train if self.is_training else corpus.eval

  @functools.cached_property
  def _first_rows(self) -> np.ndarray:
    """With 'padded', document i has rows [first[i], first[i + 1]); [D + 1]."""
    documents = self._documents
    sizes = np.diff(documents.starts, append=documents.tokens.size)
    # A document's first token is not a label.
    return np.append(0, np.cumsum(-((1 - sizes) // self.length)))

  def num_records(self) -> int:
    return self._num_records

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    tokens, length = self._documents.tokens, self.length
    filler = self._documents.tokenizer.document_id
    starts, sizes = self._spans(records, epochs)
    # A view of all windows is three times as fast as a loop over slices.
    shape = max(0, tokens.size - length), length + 1
    windows = np.ndarray(
      shape, tokens.dtype, tokens, strides=tokens.strides * 2
    )
    try:
      window = windows[starts]
    except IndexError:  # A row crosses the end of the stream.
      places = starts[:, None] + np.arange(length + 1)
      window = tokens.take(places, mode='wrap')
    if isinstance(sizes, np.ndarray):
      window[np.arange(length + 1) > sizes] = filler
    labels_BL = window[:, 1:].astype(np.int32)
    batch = {
      'ids': window[:, :-1].astype(np.int32),
      'labels': labels_BL,
      'weights': (labels_BL != filler).astype(np.float32),
    }
    if self.packing == 'stream':
      return batch
    ids_BL = batch['ids']
    is_filler_BL = np.arange(length) >= sizes
    # The last token predicts no label, so it need not be read.
    np.copyto(ids_BL, filler, where=is_filler_BL)
    if self.packing == 'padded':
      batch['paddings'] = is_filler_BL.astype(np.float32)
      return batch
    is_first_BL = ids_BL == filler
    is_first_BL[:, 0] = True
    batch['segment_ids'] = np.cumsum(is_first_BL, axis=1, dtype=np.int32)
    firsts = np.flatnonzero(is_first_BL).astype(np.int32)
    first = np.repeat(firsts, np.diff(firsts, append=ids_BL.size))
    place = np.arange(ids_BL.size, dtype=np.int32) - first
    batch['segment_pos'] = place.reshape(ids_BL.shape)
    for key in 'segment_ids', 'segment_pos':
      np.copyto(batch[key], 0, where=is_filler_BL)
    return batch

  def _spans(
    self, records: np.ndarray, epochs: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray | int]:
    """Returns the start of each row, [b], and its number of labels, [b, 1]."""
    documents, rows = self._documents, records
    if self._num_records < self._num_rows:
      rows = records * self._num_rows // self._num_records
    num_tokens = documents.tokens.size
    if self.packing == 'padded':
      firsts, first_rows = documents.starts, self._first_rows
      document = np.searchsorted(first_rows, rows, side='right') - 1
      starts = firsts[document] + (rows - first_rows[document]) * self.length
      following = np.minimum(document + 1, len(firsts) - 1)
      stops = np.where(following > document, firsts[following], num_tokens)
    elif self.is_training:
      starts = rows * self.length
      for e in set(epochs.tolist()):
        starts[epochs == e] += _epoch_offset(self.seed(), e, num_tokens)
      return starts % num_tokens, self.length
    else:
      starts, stops = rows * self.length, np.array(num_tokens)
    return starts, np.minimum(stops - starts - 1, self.length)[:, None]

  def describe(self) -> str:
    """Returns lines with the size of the text and its largest documents."""
    return self._documents.totals()

  def describe_record(self, record: int, epoch: int) -> str:
    starts = self._documents.starts
    (start,), _ = self._spans(np.array([record]), np.array([epoch]))
    # NumPy's search would copy this column of the mapped file.
    document = bisect.bisect_right(starts, start) - 1
    place = max(0, start - starts[document] - 1)
    return f'{self._documents.names[document]}, starting at token {place}'

  def data_identity(self) -> dict[str, Any]:
    return {
      'corpus_sha256': self._documents.sha256,
      'tokenizer': self._documents.tokenizer.identity,
      'length': self.length,
      'packing': self.packing,
      'is_training': self.is_training,
    }

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    del key
    decode = self._documents.tokenizer.decode
    rows = zip(np.asarray(ids), lengths, strict=True)
    return [decode(row[:length]) for row, length in rows]

  def __getstate__(self) -> dict[str, Any]:
    state = super().__getstate__()
    state.pop('_first_rows', None)  # It is large and quickly made again.
    return state


@functools.lru_cache(maxsize=64)
def _epoch_offset(seed: int, epoch: int, num_tokens: int) -> int:
  """Returns the offset of an epoch's first window in the stream."""
  return text_files.stable_hash(f'offset/{seed}/{epoch}') % num_tokens
