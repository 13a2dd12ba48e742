"""Rows of the language models, and inputs of text files.

Rows are packed. They have the entries ids, labels, weights, segment_ids and
segment_pos, each [b, L]. Rows of C4 (`inputs.c4`) have paddings, too.
"""

from examples.pax.inputs import c4
from jaxline.inputs import base as inputs
from jaxline.inputs import text
from jaxline.inputs import tokenization


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
  c4.check_vocabulary(tokenization.load_tokenizer(tokenizer), vocab_size)
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
