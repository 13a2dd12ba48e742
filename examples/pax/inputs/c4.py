"""The C4 corpus as a SeqIO task, read from local files.

  task = c4.c4_task(
    train_files='/data/c4/en/c4-train.*.json.gz',
    eval_files='/data/c4/en/c4-validation.*.json.gz',
    vocabulary='/data/c4/sentencepiece.model',
  )
  train = c4.c4_input(task, batch_size=8, length=1024, is_training=True)

The files are either the official ones, JSON with one document per line
(`allenai/c4` on the Hugging Face hub, config `en`), or TFRecords of
`tf.train.Example` (`c4/en` of TensorFlow Datasets). Both hold the document as
`text`. The hosts divide the files among themselves.

As in Pax's C4 runs, thousands of documents at a time are tokenized, joined and
cut into rows. Rows begin and end within a document. Only the last row of such a
group is shorter, and packing puts several of these into one row. The documents
of a row share a segment. Each document ends with the vocabulary's end token.
Pax's documents have no end token, and its rows have no token before them. To
get Pax's rows, give `append_eos=False` to `c4_task`, and give `c4_input` the
`feature_converter`
`LanguageModelFeatures(pack=True, reverse_bos_padding=True, eos_id=1)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
import hashlib
import json
import os
import re
from typing import Any

import jax
import numpy as np

from examples.pax.inputs import seqio as seqio_input
from examples.pax.inputs import tfdata
from jaxline import errors

# Number of lines per call of the parser. Each call takes Python's lock once.
_LINES_AT_ONCE = 64

# The seed and the group size of Pax's C4 runs.
SEED = 9876
_DOCUMENTS_AT_ONCE = 4096

Patterns = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def c4_task(
  *,
  train_files: Patterns | None = None,
  eval_files: Patterns | None = None,
  vocabulary: Any,
  name: str = 'c4_lm',
  append_eos: bool = True,
  documents_at_once: int = _DOCUMENTS_AT_ONCE,
  shuffle_buffer_size: int = 10_000,
) -> Any:
  """Makes a task with the splits 'train' and 'validation'.

  Args:
    train_files: Paths or globs of the training split, or None to leave it out.
    eval_files: Paths or globs of the validation split, or None.
    vocabulary: Path of a SentencePiece model whose token 0 is padding, or any
      `seqio.Vocabulary`.
    name: Name of the task. It is not registered, so give the task itself to
      `SeqIOInput.mixture_or_task`.
    append_eos: Whether each document ends with the vocabulary's end token.
    documents_at_once: Number of documents that are joined before they are cut.
    shuffle_buffer_size: Number of rows in the shuffle buffer. (Pax's 100,000
      take 400 MB per host for rows of 1024 tokens.)

  Returns:
    A `seqio.Task` with the feature 'targets'.

  Raises:
    FileNotFoundError: A pattern matches no file.
    ValueError: Files are neither JSON nor TFRecord, or there are none.
  """
  seqio = seqio_input.import_seqio()
  patterns = {
    split: [os.fspath(pattern) for pattern in jax.tree.leaves(given)]
    for split, given in (('train', train_files), ('validation', eval_files))
    if given is not None
  }
  files = [path for split in patterns for path in _find(split, patterns[split])]
  readers = {_reader_of(path) for path in files}
  if len(readers) != 1 or None in readers:
    raise errors.UsageError(
      f'train_files and eval_files contain {files[:2]}; expected files of a'
      ' single kind, with names like .json, .jsonl, .json.gz, or like'
      ' .tfrecord, .tfrecord-00000-of-01024.'
    )
  if isinstance(vocabulary, (str, os.PathLike)):
    vocabulary = seqio.SentencePieceVocabulary(os.fspath(vocabulary))
  return seqio.Task(
    name,
    source=seqio.FileDataSource(readers.pop(), patterns),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map={'targets': 'text'}),
      functools.partial(
        seqio.preprocessors.tokenize_and_append_eos
        if append_eos
        else seqio.preprocessors.tokenize,
        copy_pretokenized=False,
      ),
      functools.partial(_concatenate, documents=documents_at_once),
      _split,
    ],
    output_features={'targets': seqio.Feature(vocabulary, add_eos=append_eos)},
    shuffle_buffer_size=shuffle_buffer_size,
  )


def c4_input(
  task: Any, *, batch_size: int, length: int, is_training: bool, **fields: Any
) -> seqio_input.SeqIOInput:
  """Makes the packed input of Pax's C4 runs, with their seed.

  Args:
    task: Result of `c4_task`.
    batch_size: Rows of a host's batch.
    length: Tokens of a row.
    is_training: Whether to read 'train'. If False, reads 'validation', one
      epoch per evaluation.
    **fields: Other fields of `SeqIOInput`. The task's `documents_at_once` and
      vocabulary are added to `data_version`.

  Returns:
    The input.
  """
  version = [fields.pop('data_version', ''), *_describe(task)]
  defaults = {
    'split_name': 'train' if is_training else 'validation',
    'task_feature_lengths': {'targets': length},
    'feature_converter': seqio_input.LanguageModelFeatures(pack=True),
    'input_random_seed': SEED,
    'reset_for_eval': not is_training,
    'eval_loop_num_batches': 1 if is_training else None,
  }
  return seqio_input.SeqIOInput(
    mixture_or_task=task,
    batch_size=batch_size,
    is_training=is_training,
    data_version=' '.join(filter(None, version)),
    **{**defaults, **fields},
  )


def _describe(task: Any) -> list[str]:
  """Describes the settings that turn a task's documents into rows."""
  vocabulary = task.output_features['targets'].vocabulary
  kind = type(vocabulary).__name__
  described = [f'vocabulary={kind}({vocabulary.vocab_size})']
  if isinstance(vocabulary, seqio_input.import_seqio().SentencePieceVocabulary):
    # Hash the contents, because the path may change.
    model = hashlib.sha256(vocabulary.sp_model).hexdigest()
    described.append(f'model_sha256={model}')
  if not task.output_features['targets'].add_eos:
    described.append('append_eos=False')
  for preprocessor in task.preprocessors:
    if getattr(preprocessor, 'func', None) is _concatenate:
      documents = preprocessor.keywords['documents']
      described.append(f'documents_at_once={documents}')
  return described


def _find(split: str, patterns: list[str]) -> list[str]:
  """Returns the paths of the files that match the patterns."""
  tf = tfdata.import_tensorflow()
  paths = []
  for pattern in patterns:
    found = tf.io.gfile.glob(pattern)
    if not found:
      argument = 'train_files' if split == 'train' else 'eval_files'
      raise errors.MissingFileError(
        f'No file matches {argument}={pattern!r}. To download C4, see'
        ' docs/inputs.md.'
      )
    paths += found
  return paths


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
