"""The C4 corpus as a SeqIO task, read from local files.

  task = c4.c4_task(
    train_files='/data/c4/en/c4-train.*.json.gz',
    eval_files='/data/c4/en/c4-validation.*.json.gz',
    vocabulary='/data/c4/sentencepiece.model',
  )
  train = c4.c4_input(task, batch_size=8, length=1024, is_training=True)

Files are the official ones, JSON with a document a line (`allenai/c4` on the
Hugging Face hub, config `en`), or TFRecords of `tf.train.Example` (`c4/en` of
TensorFlow Datasets); both have the document as `text`. The files are divided
among the hosts.

As in Pax's C4 runs, some thousand documents at a time are tokenized, joined and
cut into rows. A row begins and ends within a document; only the last row of
such a group is shorter, and packing puts several of these into one row. The
documents of a row share a segment. Each document ends with the vocabulary's end
token. Pax's have none, and no token stands before a row; for its rows, give
`append_eos=False` to `c4_task`, and to `c4_input` the `feature_converter`
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

# Lines that are parsed at once: each time costs a turn of Python's lock.
_LINES_AT_ONCE = 64

# Of Pax's C4 runs.
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
  """Makes the task: splits 'train' and 'validation', feature 'targets'.

  Args:
    train_files: paths or globs of the training split; None: there is none.
    eval_files: likewise, of the validation split.
    vocabulary: the path of a SentencePiece model whose token 0 is padding, or
      any `seqio.Vocabulary`.
    name: of the task. It is not registered; give the task itself to
      `SeqIOInput.mixture_or_task`.
    append_eos: whether each document ends with the vocabulary's end token.
    documents_at_once: how many are put one after the other before they are cut.
    shuffle_buffer_size: among how many rows to draw the next. (Pax takes
      100,000, which is 400 MB a host for rows of 1024 tokens.)

  Returns:
    A `seqio.Task`.

  Raises:
    FileNotFoundError: a pattern matches no file.
    ValueError: files are neither JSON nor TFRecord, or there are none.
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
      f'Some of the files in train_files and eval_files are {files[:2]};'
      ' expected files of one kind by their names: .json, .jsonl, .json.gz, or'
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
  """Makes the input of Pax's C4 runs: packed, with its seed.

  Args:
    task: of `c4_task`.
    batch_size: rows a host reads a batch.
    length: tokens of a row.
    is_training: reads 'train' then, otherwise 'validation', one epoch each
      time.
    **fields: more of `SeqIOInput`. Its `data_version` also gets the task's
      `documents_at_once` and vocabulary.

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
  """Returns what makes a task's rows of its documents."""
  vocabulary = task.output_features['targets'].vocabulary
  kind = type(vocabulary).__name__
  described = [f'vocabulary={kind}({vocabulary.vocab_size})']
  if isinstance(vocabulary, seqio_input.import_seqio().SentencePieceVocabulary):
    # Its contents: the path may change.
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
  """Returns the paths that match."""
  tf = tfdata.import_tensorflow()
  paths = []
  for pattern in patterns:
    found = tf.io.gfile.glob(pattern)
    if not found:
      argument = 'train_files' if split == 'train' else 'eval_files'
      raise errors.MissingFileError(
        f'No file matches {argument}={pattern!r}. docs/inputs.md says how to'
        ' download C4.'
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
  """Returns the documents of a file, as records of `text`."""
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
        f' `text`, got {line[:80]!r} ({e!r}).'
      ) from e
  return np.array(texts, object)


def _read_tfrecord(path: Any) -> Any:
  """Returns the documents of a file, as records of `text`."""
  tf = tfdata.import_tensorflow()
  features = {'text': tf.io.FixedLenFeature([], tf.string)}
  return tf.data.TFRecordDataset(path, _compression(tf, path)).map(
    lambda record: tf.io.parse_single_example(record, features)
  )


def _concatenate(dataset: Any, *, documents: int) -> Any:
  """Puts the tokens of so many documents one after the other."""
  return dataset.ragged_batch(documents).map(
    lambda batch: {'targets': batch['targets'].flat_values}
  )


def _split(dataset: Any, sequence_length: Mapping[str, int]) -> Any:
  """Cuts tokens into pieces, all as long as a row but the last."""
  tf = tfdata.import_tensorflow()
  length = sequence_length['targets']

  def pieces(record: Mapping[str, Any]) -> Any:
    tokens = record['targets']
    starts = tf.range(0, tf.size(tokens), length)
    splits = tf.concat([starts, [tf.size(tokens)]], 0)
    rows = tf.RaggedTensor.from_row_splits(tokens, splits)
    return tf.data.Dataset.from_tensor_slices({'targets': rows})

  return dataset.flat_map(pieces)
