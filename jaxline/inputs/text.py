"""Text files as batches of tokens for a language model.

  data = text.TextInput(files='stdlib', batch_size=8, length=256)
  print(*data.ids_to_strings(next(data)['ids'], [256] * 8), sep='\n---\n')

A document is a file, or a line of a file. Its tokens are the document token and
those of its text; the documents of a split, sorted by name, form one stream.

`packing` defines a row:

  stream  the next L tokens of the stream, across documents
  packed  the same, with `segment_ids` and `segment_pos` to separate documents
  padded  one document from its beginning; a long one continues in another row

A batch has these arrays, each of shape [B, L]:

  ids          int32    the tokens that the model reads
  labels       int32    the tokens that it predicts: the stream, shifted by one
  weights      float32  1 where the label is text, else 0
  segment_ids  int32    packed: the documents of a row, 1, 2, ...; 0 for padding
  segment_pos  int32    packed: the position, from 0, within the document's part
                        in this row
  paddings     float32  padded: 1 for padding, else 0

so that, for bytes, `sum(weights * nats) / sum(weights) / log(2)` is the bits
per byte. The model reads the document token but never predicts it.

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

# Of the tokenizer 'bytes'.
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
  """Returns the tokens of text files, split; makes them if they are not cached.

  The hash of a document's name alone decides whether it is held out: the split
  is the same on every machine and does not change when files are added. Each
  part has at least one document. Of a file alone, the end is held out.

  Args:
    files: 'stdlib', the source text of the running Python's standard library
      without its tests; or a folder, for all text files below it that are not
      hidden; or a file; or a glob such as 'notes/**/*.md'; or a list of these.
      Links are followed, to each folder once. Text is UTF-8, or UTF-16 with a
      byte order mark. A file of which more than 1% is neither is left out.
      Files that end in '.gz', '.bz2', '.xz' or '.zst' are unpacked. A file
      '.tokens' of a `cache_dir`, maybe in a bucket, is taken as it is.
    eval_fraction: the fraction of the documents to hold out, between 0 and 1.
    tokenizer: as for `tokenization.load_tokenizer`.
    documents: what a document is: 'file'; 'line', each line that is not empty,
      with the name 'path:line'; 'jsonl', an entry of each line; 'rows', an
      entry of each row of '.parquet' and '.arrow'; or 'split:' and the text
      that separates documents.
    cache_dir: where tokens are kept; None is '~/.cache/jaxline/tokens', or
      below XDG_CACHE_HOME if that is set.
    text_key: the entry with the text of each line of 'jsonl' or 'rows'. Those
      where it is null are left out; more than 1% of them are refused.
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

  Training ('stream' and 'packed'): each epoch cuts the stream, as a circle,
  into consecutive windows from another offset, and leaves out the last N mod L
  tokens. In evaluation the windows begin with the stream, and each token of
  text is a label once.

  'padded' rows are the same in every epoch: a document of T tokens of text has
  ceil(T / L) rows. Document tokens of weight 0 fill rows up.

  Attributes:
    documents: a split of `load_corpus`; or, with `files`, what a document is,
      of the split that `is_training` names. Afterwards the documents.
    files, eval_fraction, tokenizer, cache_dir, text_key: the arguments of
      `load_corpus`; None is its default. All None if `documents` is a split.
      Afterwards `tokenizer` is the tokenizer.
    length: L, tokens of a row.
    packing: what a row is: 'stream', 'packed' or 'padded'.
    max_batches: global batches of an evaluation epoch at most: always the same
      rows, at equal distances over the whole split. None is all.
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
      self.refuse('max_batches', 'None, since training sees all of the text')
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
    """Sets how many rows there are, of which `max_batches` may take some."""
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
        self.refuse(key, 'None, since documents are tokens of some files')
      return self.documents
    if self.files is None:
      self.refuse('files', 'files, or documents: a split of load_corpus()')
    corpus = load_corpus(documents=self.documents, **given)
    return corpus.train if self.is_training else corpus.eval

  @functools.cached_property
  def _first_rows(self) -> np.ndarray:
    """For 'padded': documents[i] has rows [first[i], first[i + 1]); [D + 1]."""
    documents = self._documents
    sizes = np.diff(documents.starts, append=documents.tokens.size)
    # The first token of a document is no label.
    return np.append(0, np.cumsum(-((1 - sizes) // self.length)))

  def num_records(self) -> int:
    return self._num_records

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    tokens, length = self._documents.tokens, self.length
    filler = self._documents.tokenizer.document_id
    starts, sizes = self._spans(records, epochs)
    # A view of all windows: three times as fast as a loop over slices.
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
    # No label follows the last token, so that it need not be read.
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
    """Returns where rows begin, [b], and how many labels they have: [b, 1]."""
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
      numbers = epochs.tolist()
      offsets = {
        e: _epoch_offset(self.seed(), e, num_tokens) for e in set(numbers)
      }
      starts = rows * self.length + [offsets[e] for e in numbers]
      return starts % num_tokens, self.length
    else:
      starts, stops = rows * self.length, np.array(num_tokens)
    return starts, np.minimum(stops - starts - 1, self.length)[:, None]

  def describe(self) -> str:
    """Returns the size of the text and its largest documents, in lines."""
    return self._documents.totals()

  def describe_record(self, record: int, epoch: int) -> str:
    starts = self._documents.starts
    (start,), _ = self._spans(np.array([record]), np.array([epoch]))
    # NumPy's search would copy this column of a map.
    document = bisect.bisect_right(starts, start) - 1
    place = max(0, start - starts[document] - 1)
    return f'{self._documents.names[document]}, from token {place} on'

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
    state.pop('_first_rows', None)  # Large, and quickly made again.
    return state


@functools.lru_cache(maxsize=64)
def _epoch_offset(seed: int, epoch: int, num_tokens: int) -> int:
  """Returns where an epoch begins to cut the stream into windows."""
  return text_files.stable_hash(f'offset/{seed}/{epoch}') % num_tokens
