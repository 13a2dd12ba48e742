"""Inputs of the language models: C4 or other text files.

Rows are packed. They have the entries ids, labels, weights, segment_ids and
segment_pos, each [b, L]. Rows of C4 have paddings, too.
"""

import glob
import os
import pathlib
from typing import Any

from etils import epath

from examples.pax.inputs import c4
from examples.pax.inputs import seqio
from jaxline import errors
from jaxline.inputs import base as inputs
from jaxline.inputs import text
from jaxline.inputs import tokenization

# Token that the model reads before the first token of a piece, as in SeqIO.
BOS_ID = 0

_GET_C4 = (
  'Download C4 with `hf download allenai/c4 --repo-type=dataset'
  " --include='en/*' --local-dir=DIR` (300 GB of JSON), or with `tfds build"
  ' c4/en:3.0.1` (TFRecord). Then give the folder of the files `c4-train.*` and'
  ' `c4-validation.*` with --config.data_dir=DIR/en, and a SentencePiece model'
  ' with --config.vocabulary=FILE.model. Or train the same model on the bundled'
  ' corpus with --config.data=stdlib.'
)


def row_specs(length: int) -> dict[str, tuple[tuple[int, ...], str]]:
  """Returns the shape and dtype of each entry of a row of `length` tokens."""
  integers = ('ids', 'labels', 'segment_ids', 'segment_pos')
  return {
    **dict.fromkeys(integers, ((length,), 'int32')),
    **dict.fromkeys(('weights', 'paddings'), ((length,), 'float32')),
  }


def text_input(
  *,
  files: str,
  batch_size: int,
  length: int,
  vocab_size: int,
  tokenizer: str,
  is_training: bool,
  eval_batches: int | None = None,
  shard: inputs.Shard | None = None,
) -> text.TextInput:
  """Makes an input of packed rows of text files.

  Args:
    files: 'stdlib' for the bundled corpus, or a folder or glob.
    batch_size: Rows of a host's batch.
    length: Tokens of a row.
    vocab_size: Vocabulary size of the model.
    tokenizer: Name or path for `tokenization.load_tokenizer`.
    is_training: Whether to read the training documents, without end. If False,
      reads the held-out ones.
    eval_batches: Maximum number of batches of an evaluation, the same batches
      each time. If None, all of them.
    shard: Shard to read. If None, this process's shard.
  """
  check_vocabulary(tokenization.load_tokenizer(tokenizer), vocab_size)
  return text.TextInput(
    files=files,
    tokenizer=tokenizer,
    packing='packed',
    batch_size=batch_size,
    shard=shard,
    length=length,
    is_training=is_training,
    input_random_seed=c4.SEED if is_training else None,
    reset_for_eval=not is_training,
    max_batches=None if is_training else eval_batches,
  )


def c4_input(
  *,
  data_dir: str | None,
  vocabulary: str | None,
  batch_size: int,
  length: int,
  vocab_size: int,
  is_training: bool,
  eval_batches: int | None = None,
  append_eos: bool = True,
  shard: inputs.Shard | None = None,
) -> inputs.BaseInput:
  """Makes an input of packed rows of C4.

  SeqIO reads the files, JSON or TFRecord, as in Pax.

  Args:
    data_dir: Folder of the files `c4-train.*` and `c4-validation.*`. Any path
      that `etils.epath` can read, such as 'gs://...'.
    vocabulary: Local file of a SentencePiece model whose token 0 is padding.
    batch_size: Rows of a host's batch.
    length: Tokens of a row.
    vocab_size: Vocabulary size of the model.
    is_training: Whether to read the split 'train'. If False, 'validation'.
    eval_batches: Number of batches of an evaluation, which continues where the
      last one ended. If None, one epoch.
    append_eos: Whether documents end with the end token, and the model reads
      `BOS_ID` before a row. If False, the rows are like Pax's, which have
      neither.
    shard: Shard to read. If None, this process's shard.

  Raises:
    ValueError: `data_dir` or `vocabulary` is None, the vocabulary is larger
      than `vocab_size`, or the files are neither JSON nor TFRecord.
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
  check_vocabulary(tokenization.load_tokenizer(vocabulary), vocab_size)
  split = 'train' if is_training else 'validation'
  name = f'c4-{split}.*'
  files = sorted(map(os.fspath, epath.Path(glob.escape(data_dir)).glob(name)))
  if not files:
    raise errors.MissingFileError(
      f'No file matches {data_dir}/{name}. {_GET_C4}'
    )
  fields: dict[str, Any] = {
    'batch_size': batch_size,
    'is_training': is_training,
    'shard': shard,
  }
  if not is_training and eval_batches is not None:
    fields |= {'reset_for_eval': False, 'eval_loop_num_batches': eval_batches}
  task = c4.c4_task(
    **{'train_files' if is_training else 'eval_files': files},
    vocabulary=vocabulary,
    append_eos=append_eos,
  )
  if not append_eos:
    fields['feature_converter'] = seqio.LanguageModelFeatures(
      pack=True, reverse_bos_padding=True, eos_id=1
    )
  return c4.c4_input(task, length=length, **fields)


def check_vocabulary(
  tokenizer: tokenization.Tokenizer, vocab_size: int
) -> None:
  """Raises a UsageError if a tokenizer has more tokens than the model."""
  if tokenizer.vocab_size > vocab_size:
    raise errors.UsageError(
      f'The model has VOCAB_SIZE {vocab_size}; the tokenizer'
      f' {tokenizer.identity} needs at least {tokenizer.vocab_size}.'
    )
