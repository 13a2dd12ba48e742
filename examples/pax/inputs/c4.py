"""The C4 corpus as a SeqIO input, read from local files.

  train = c4.c4_input(
    data_dir='/data/c4/en',
    vocabulary='/data/c4/sentencepiece.model',
    batch_size=8,
    length=1024,
    is_training=True,
  )

The files `c4-train.*` and `c4-validation.*` are either the official ones, JSON
with one document per line (`allenai/c4` on the Hugging Face hub, config `en`),
or TFRecords of `tf.train.Example` (`c4/en` of TensorFlow Datasets). Both hold
the document as `text`. The hosts divide the files among themselves.

As in Pax's C4 runs, thousands of documents at a time are tokenized, joined and
cut into rows. Rows begin and end within a document. Only the last row of such a
group is shorter, and packing puts several of these into one row. The documents
of a row share a segment. Each document ends with the vocabulary's end token.
Pax's documents have no end token, and its rows have no token before them:
`append_eos=False` makes such rows.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
import glob
import hashlib
import json
import os
import pathlib
import re
from typing import Any

from etils import epath
import numpy as np

from examples.pax.inputs import seqio as seqio_input
from examples.pax.inputs import tfdata
from jaxline import errors
from jaxline.inputs import tokenization

# Number of lines per call of the parser. Each call takes Python's lock once.
_LINES_AT_ONCE = 64

# The seed and the group size of Pax's C4 runs.
SEED = 9876
_DOCUMENTS_AT_ONCE = 4096
# Rows. Pax's 100,000 take 400 MB per host for rows of 1024 tokens.
_SHUFFLE_BUFFER_SIZE = 10_000

# Token that the model reads before the first token of a row, as in SeqIO.
BOS_ID = 0

_GET_C4 = (
  'Download C4 with `hf download allenai/c4 --repo-type=dataset'
  " --include='en/*' --local-dir=DIR` (300 GB of JSON), or with `tfds build"
  ' c4/en:3.0.1` (TFRecord). Then give the folder of the files `c4-train.*` and'
  ' `c4-validation.*` with --config.data_dir=DIR/en, and a SentencePiece model'
  ' with --config.vocabulary=FILE.model. Or train the same model on the bundled'
  ' corpus with --config.data=stdlib.'
)


def c4_input(
  *,
  data_dir: str | None,
  vocabulary: str | None,
  batch_size: int,
  length: int,
  is_training: bool,
  vocab_size: int | None = None,
  eval_batches: int | None = None,
  append_eos: bool = True,
  documents_at_once: int = _DOCUMENTS_AT_ONCE,
  **fields: Any,
) -> seqio_input.SeqIOInput:
  """Makes an input of packed rows of C4.

  Args:
    data_dir: Folder of the files. Any path that `etils.epath` can read, such as
      'gs://...'.
    vocabulary: Local file of a SentencePiece model whose token 0 is padding.
    batch_size: Rows of a host's batch.
    length: Tokens of a row.
    is_training: Whether to read the split 'train'. If False, 'validation'.
    vocab_size: Vocabulary size of the model, which is checked.
    eval_batches: Number of batches of an evaluation, which continues where the
      last one ended. If None, one epoch.
    append_eos: Whether documents end with the end token, and the model reads
      `BOS_ID` before a row.
    documents_at_once: Number of documents that are joined before they are cut.
    **fields: Other fields of `SeqIOInput`. `data_version` gets what determines
      the rows: the vocabulary, `append_eos` and `documents_at_once`.

  Raises:
    ValueError: `data_dir` or `vocabulary` is None, the vocabulary is larger
      than `vocab_size`, or the files are not all JSON or all TFRecord.
    FileNotFoundError: The files or the vocabulary do not exist.
  """
  if data_dir is None or vocabulary is None:
    raise errors.UsageError(
      f'The data is C4, but data_dir is {data_dir!r} and vocabulary is'
      f' {vocabulary!r}; expected paths. {_GET_C4}'
    )
  if not pathlib.Path(vocabulary).is_file():
    raise errors.MissingFileError(
      f'There is no vocabulary {vocabulary!r}. {_GET_C4}'
    )
  if vocab_size is not None:
    check_vocabulary(tokenization.load_tokenizer(vocabulary), vocab_size)
  split = 'train' if is_training else 'validation'
  pattern = f'c4-{split}.*'
  found = epath.Path(glob.escape(os.fspath(data_dir))).glob(pattern)
  files = sorted(map(os.fspath, found))
  if not files:
    raise errors.MissingFileError(
      f'No file matches {data_dir}/{pattern}. {_GET_C4}'
    )
  readers = {_reader_of(path) for path in files}
  if len(readers) != 1 or None in readers:
    raise errors.UsageError(
      f'{data_dir}/{pattern} has {files[:2]}; expected files of a single kind,'
      ' with names like .json, .jsonl, .json.gz, or like .tfrecord,'
      ' .tfrecord-00000-of-01024.'
    )
  seqio = seqio_input.import_seqio()
  tokens = seqio.SentencePieceVocabulary(vocabulary)
  tokenize = (
    seqio.preprocessors.tokenize_and_append_eos
    if append_eos
    else seqio.preprocessors.tokenize
  )
  task = seqio.Task(
    'c4_lm',
    source=seqio.FileDataSource(readers.pop(), {split: files}),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map={'targets': 'text'}),
      functools.partial(tokenize, copy_pretokenized=False),
      functools.partial(_concatenate, documents=documents_at_once),
      _split,
    ],
    output_features={'targets': seqio.Feature(tokens, add_eos=append_eos)},
    shuffle_buffer_size=_SHUFFLE_BUFFER_SIZE,
  )
  version = [
    fields.pop('data_version', ''),
    f'vocabulary={type(tokens).__name__}({tokens.vocab_size})',
    # Hash the contents, because the path may change.
    f'model_sha256={hashlib.sha256(tokens.sp_model).hexdigest()}',
    '' if append_eos else 'append_eos=False',
    f'documents_at_once={documents_at_once}',
  ]
  reads_epochs = not is_training and eval_batches is None
  defaults = {
    'feature_converter': seqio_input.LanguageModelFeatures(
      pack=True, reverse_bos_padding=not append_eos
    ),
    'input_random_seed': SEED,
    'reset_for_eval': reads_epochs,
    'eval_loop_num_batches': None if reads_epochs else eval_batches or 1,
  }
  return seqio_input.SeqIOInput(
    mixture_or_task=task,
    split_name=split,
    batch_size=batch_size,
    is_training=is_training,
    task_feature_lengths={'targets': length},
    data_version=' '.join(filter(None, version)),
    **{**defaults, **fields},
  )


def check_vocabulary(
  tokenizer: tokenization.Tokenizer, vocab_size: int
) -> None:
  """Raises a UsageError if a tokenizer has more tokens than the model."""
  if tokenizer.vocab_size > vocab_size:
    raise errors.UsageError(
      f'The model has VOCAB_SIZE {vocab_size}; the tokenizer'
      f' {tokenizer.identity} needs at least {tokenizer.vocab_size}.'
    )


def _reader_of(path: str) -> Any:
  if re.search(r'\.jsonl?(\.gz)?$', path):
    return _read_json
  if re.search(r'\.tfrecords?(-\d+-of-\d+)?(\.gz)?$', path):
    return _read_tfrecord
  return None


def _compression(tf: Any, path: Any) -> Any:
  return tf.where(tf.strings.regex_full_match(path, r'.*\.gz'), 'GZIP', '')


def _read_json(path: Any) -> Any:
  """Returns the documents of a JSON file, as records of `text`."""
  tf = tfdata.import_tensorflow()

  def parse(numbers: Any, lines: Any) -> dict[str, Any]:
    texts = tf.numpy_function(
      _parse_json, [path, numbers[0], lines], tf.string, stateful=False
    )
    texts.set_shape([None])
    return {'text': texts}

  lines = tf.data.TextLineDataset(path, _compression(tf, path))
  return lines.enumerate(1).batch(_LINES_AT_ONCE).map(parse).unbatch()


def _parse_json(path: bytes, first: np.int64, lines: np.ndarray) -> np.ndarray:
  texts = []
  for number, line in enumerate(lines.tolist(), int(first)):
    try:
      texts.append(json.loads(line)['text'].encode())
    except (ValueError, KeyError, TypeError, AttributeError) as e:
      raise ValueError(
        f'{path.decode()}, line {number}: expected a JSON object with a string'
        f' `text`; got {line[:80]!r} ({e!r}).'
      ) from e
  return np.array(texts, object)


def _read_tfrecord(path: Any) -> Any:
  """Returns the documents of a TFRecord file, as records of `text`."""
  tf = tfdata.import_tensorflow()
  features = {'text': tf.io.FixedLenFeature([], tf.string)}
  return tf.data.TFRecordDataset(path, _compression(tf, path)).map(
    lambda record: tf.io.parse_single_example(record, features)
  )


def _concatenate(dataset: Any, *, documents: int) -> Any:
  """Joins the tokens of each group of `documents` documents."""
  return dataset.ragged_batch(documents).map(
    lambda batch: {'targets': batch['targets'].flat_values}
  )


def _split(dataset: Any, sequence_length: Mapping[str, int]) -> Any:
  """Cuts tokens into pieces as long as a row. Only the last may be shorter."""
  tf = tfdata.import_tensorflow()
  length = sequence_length['targets']

  def pieces(record: Mapping[str, Any]) -> Any:
    tokens = record['targets']
    starts = tf.range(0, tf.size(tokens), length)
    splits = tf.concat([starts, [tf.size(tokens)]], 0)
    rows = tf.RaggedTensor.from_row_splits(tokens, splits)
    return tf.data.Dataset.from_tensor_slices({'targets': rows})

  return dataset.flat_map(pieces)
