"""SeqIO tasks and mixtures as inputs, with their metrics.

  train = seqio.SeqIOInput(
    mixture_name='wmt_t2t_ende_v003', split_name='train', batch_size=8,
    task_feature_lengths={'inputs': 128, 'targets': 128},
    feature_converter=seqio.EncoderDecoderFeatures(pack=True), is_training=True,
  )

Each host reads a part of the files or, if a source has fewer files than there
are hosts, a part of the examples. A position is therefore valid only for the
same host of the same number of hosts. See `tfdata.py` for the definition and
the cost of a position.

- A task that repeats is rebuilt each epoch with a different seed.
- A mixture that repeats has no epochs: SeqIO repeats each task separately to
  maintain the rates, and a resumed run reads from the beginning of the run.
- With `reset_for_eval`, the tasks of a mixture are evaluated one after the
  other, on one epoch each, regardless of the rates.

Metrics need `reset_for_eval=True` and a converter that does not pack, such as
`EncoderDecoderFeatures(pack=False)`. The entries `ID_KEYS` of a batch, int32
[B], then identify the example of each row. Padding rows have index -1. To
evaluate, gather the model's outputs of all hosts and pass them to
`compute_metrics`:

  outputs = []
  for batch in data.eval_batches():
    ids = data.example_ids(batch)
    outputs.append(
      multihost_utils.process_allgather((ids, predict(batch)), tiled=True)
    )
  metrics = data.compute_metrics(predict_outputs=outputs)

Token 0 is padding in SeqIO and in the converters of this module.

Shapes: B rows of this host, L tokens, N examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import hashlib
import itertools
import os
from typing import Any

import jax
import numpy as np

from examples.pax.inputs import tfdata

# Index of the part, number of parts, and the example's index within the part.
SHARD_KEY = '_seqio_shard'
NUM_SHARDS_KEY = '_seqio_num_shards'
INDEX_KEY = '_seqio_index_within_shard'
ID_KEYS = (SHARD_KEY, NUM_SHARDS_KEY, INDEX_KEY)

# Seed of SeqIO's evaluator.
_EVAL_SEED = 42
_MAX_NAMED = 3

# The values of `ID_KEYS` for one row.
Id = tuple[int, int, int]

# Pairs for each batch: the entries of `ID_KEYS`, and arrays [B, ...].
Outputs = Iterable[tuple[Mapping[str, Any], Any]]


def import_seqio() -> Any:
  """Imports `seqio`, after hiding the GPUs from TensorFlow."""
  tfdata.import_tensorflow()
  import seqio

  return seqio


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelFeatures:
  """Converts a task's features to rows for a decoder-only model.

  Without `inputs`, a row holds the `targets`. With `inputs`, it holds an
  example's inputs followed by its targets. The entries of a row are ids,
  labels, weights, paddings, segment_ids and segment_pos, each [L], where L is
  the sum of the features' lengths. `ids` are the labels shifted right by one,
  with `bos_id` first in each segment.

  A task may mark tokens to ignore by a negative id. `ids` and `labels` have the
  absolute values.

  Attributes:
    pack: Whether to put several whole examples into a row.
    bos_id: Token that the model reads before an example's first one.
    weights_on_targets_only: Selects the tokens with weight 1. None: all
      non-negative tokens, including inputs. True: non-negative target tokens.
      False: all tokens. Padding always has weight 0.
    reverse_bos_padding: Whether to omit `bos_id`. If so, `ids` are the tokens
      themselves, and a label is the next token in the row, or `eos_id` after
      the last. The last position of a row has weight 0. In a packed row, the
      label of an example's last token is the first token of the next example,
      as in Pax.
    eos_id: Last label of a row with `reverse_bos_padding`.
  """

  pack: bool
  bos_id: int = 0
  weights_on_targets_only: bool | None = None
  reverse_bos_padding: bool = False
  eos_id: int = 1

  def __call__(self, dataset: Any, lengths: Mapping[str, int]) -> Any:
    """Converts a dataset of examples to one of rows."""
    convert = import_seqio().DecoderFeatureConverter(
      loss_on_targets_only=True, pack=self.pack, bos_id=self.bos_id
    )
    return convert(dataset, lengths).map(self._entries)

  def _entries(self, row: Mapping[str, Any]) -> dict[str, Any]:
    tf = tfdata.import_tensorflow()
    entries = _decoder_entries(row)
    weights = 1.0 - entries['paddings']
    if self.weights_on_targets_only:
      weights *= entries['weights']
    if self.weights_on_targets_only is not False:
      weights *= tf.cast(entries['labels'] >= 0, tf.float32)
    entries['weights'] = weights
    for key in ('ids', 'labels'):
      entries[key] = tf.abs(entries[key])
    if self.reverse_bos_padding:
      entries['ids'] = entries['labels']
      for key, last in ('labels', self.eos_id), ('weights', 0), ('paddings', 1):
        x = entries[key]
        entries[key] = tf.concat([x[1:], tf.cast([last], x.dtype)], axis=0)
    return entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderFeatures:
  """Converts `inputs` and `targets` to rows for an encoder-decoder.

  `src` has the entries ids, paddings, segment_ids and segment_pos, as long as
  the inputs. `tgt` has the entries of `LanguageModelFeatures`, as long as the
  targets.

  Attributes:
    pack: Whether to put several whole examples into a row.
    bos_id: Token that the decoder reads before an example's first one.
  """

  pack: bool
  bos_id: int = 0

  def __call__(self, dataset: Any, lengths: Mapping[str, int]) -> Any:
    """Converts a dataset of examples to one of rows."""
    convert = import_seqio().EncDecFeatureConverter(
      pack=self.pack, bos_id=self.bos_id
    )

    def entries(row: Mapping[str, Any]) -> dict[str, Any]:
      ids = row['encoder_input_tokens']
      src = {'ids': ids, **_segments(row, 'encoder', ids)}
      return {'src': src, 'tgt': _decoder_entries(row)}

    return convert(dataset, lengths).map(entries)


def _decoder_entries(row: Mapping[str, Any]) -> dict[str, Any]:
  tf = tfdata.import_tensorflow()
  labels = row['decoder_target_tokens']
  is_token = tf.cast(labels != 0, tf.int32)
  return {
    # SeqIO's shift leaves the last token in the first padding position.
    'ids': row['decoder_input_tokens'] * is_token,
    'labels': labels,
    'weights': tf.cast(row['decoder_loss_weights'], tf.float32),
    **_segments(row, 'decoder', labels),
  }


def _segments(row: Mapping[str, Any], side: str, tokens: Any) -> dict[str, Any]:
  """Returns the entries that describe segments and padding, packed or not."""
  tf = tfdata.import_tensorflow()
  is_token = tf.cast(tokens != 0, tf.int32)
  places = row.get(f'{side}_positions', tf.range(tf.size(tokens)))
  return {
    'paddings': tf.cast(1 - is_token, tf.float32),
    'segment_ids': row.get(f'{side}_segment_ids', is_token),
    'segment_pos': places * is_token,
  }


@dataclasses.dataclass(kw_only=True, eq=False)
class SeqIOInput(tfdata.EpochInput):
  """A SeqIO task or mixture.

  Attributes:
    mixture_name: Name of a registered mixture or task. Set either this field or
      `mixture_or_task`.
    mixture_or_task: A `seqio.Mixture` or `seqio.Task`.
    split_name: Name of the split, such as 'train'.
    task_feature_lengths: Number of tokens of each feature. Longer features are
      truncated.
    feature_converter: `LanguageModelFeatures`, `EncoderDecoderFeatures`, one of
      SeqIO's converters, or any `(dataset, task_feature_lengths) -> dataset`.
    use_cached: Whether to read the files of SeqIO's cache tool.
    shuffle: Whether to shuffle each epoch differently. If None, only training
      is shuffled. All evaluations have the same order.
    trim_output_features: Whether the task truncates features before the
      converter does.
    data_version: Version of the data, for changes that this class cannot see,
      such as preprocessors and vocabularies. A position with a different
      version is rejected.
  """

  mixture_name: str | None = None
  mixture_or_task: Any = None
  split_name: str
  task_feature_lengths: Mapping[str, int]
  feature_converter: Callable[..., Any]
  use_cached: bool = False
  shuffle: bool | None = None
  trim_output_features: bool = True
  data_version: str = ''

  def __post_init__(self) -> None:
    seqio = import_seqio()
    super().__post_init__()
    if self.shuffle is None:
      self.shuffle = self.is_training
    self._provider: Any = self.mixture_or_task
    if self.mixture_name is not None:
      self._provider = seqio.get_mixture_or_task(self.mixture_name)

  @property
  def _tasks(self) -> list[Any]:
    """Tasks that have the split."""
    tasks = import_seqio().get_subtasks(self._provider)
    return [task for task in tasks if self.split_name in task.splits]

  def seed(self) -> int:
    """Returns `input_random_seed`; if None in evaluation, SeqIO's 42."""
    if self.input_random_seed is None and not self.is_training:
      return _EVAL_SEED
    return super().seed()

  def epoch_seed(self, epoch: int) -> int:
    """Returns the seed of an epoch, the same for all epochs in evaluation."""
    return super().epoch_seed(epoch) if self.is_training else self.seed()

  def epoch_dataset(self, seed: int, host_index: int) -> Any:
    """Returns the rows of a host: one epoch, or endless rows of a mixture."""
    tf = tfdata.import_tensorflow()
    providers = self._tasks if self.reset_for_eval else [self._provider]
    num_epochs: int | None = 1
    if self.repeat and isinstance(self._provider, import_seqio().Mixture):
      self._check_tasks_have_examples(seed, host_index)
      num_epochs = None
    parts = [
      self.feature_converter(
        self._examples_of(provider, seed, host_index, num_epochs=num_epochs),
        dict(self.task_feature_lengths),
      )
      for provider in providers
    ]
    dataset = functools.reduce(tf.data.Dataset.concatenate, parts)
    if not self.reset_for_eval or getattr(
      self.feature_converter, 'pack', False
    ):
      return dataset
    shard = {SHARD_KEY: host_index, NUM_SHARDS_KEY: self.num_infeed_hosts}

    def add_id(index: Any, row: Mapping[str, Any]) -> dict[str, Any]:
      ids = {**shard, INDEX_KEY: index}
      return {**row, **{key: tf.cast(x, tf.int32) for key, x in ids.items()}}

    return dataset.enumerate().map(add_id)

  def _examples_of(
    self, provider: Any, seed: int, host_index: int, **fields: Any
  ) -> Any:
    """Returns a host's examples of a task or mixture."""
    # Reset the seed, so that the examples do not depend on earlier datasets.
    # The metrics read one task by itself.
    tfdata.import_tensorflow().random.set_seed(seed)
    shard = import_seqio().ShardInfo(host_index, self.num_infeed_hosts)
    return provider.get_dataset(
      **{
        'sequence_length': dict(self.task_feature_lengths),
        'split': self.split_name,
        'use_cached': self.use_cached,
        'shuffle': self.shuffle,
        'seed': seed,
        'shard_info': shard if self.num_infeed_hosts != 1 else None,
        'num_epochs': 1,
        'trim_output_features': self.trim_output_features,
        # The cache would hold an epoch that is read only once.
        'try_in_mem_cache': False,
        **fields,
      }
    )

  def _check_tasks_have_examples(self, seed: int, host_index: int) -> None:
    # Repeating an empty task would loop forever.
    for task in self._tasks:
      # Shuffling would fill a buffer to get one example.
      dataset = self._examples_of(task, seed, host_index, shuffle=False)
      if next(iter(dataset), None) is None:
        raise ValueError(
          f'Task {task.name} of {self._provider.name} has no examples in split'
          f' {self.split_name!r} for host {host_index} of'
          f' {self.num_infeed_hosts}. Remove it from the mixture, or check its'
          ' files and preprocessors.'
        )

  def get_next_padded(self) -> dict[str, Any]:
    """Returns the next batch, in which padding rows have index -1."""
    batch = super().get_next_padded()
    if NUM_SHARDS_KEY in batch:
      is_padding = batch[NUM_SHARDS_KEY] == 0
      batch[INDEX_KEY] = np.where(is_padding, np.int32(-1), batch[INDEX_KEY])
    return batch

  def identity(self) -> dict[str, Any]:
    """Returns the settings that determine the examples and their order."""
    converter = self.feature_converter
    if dataclasses.is_dataclass(converter):
      named = repr(converter)
    else:
      kind = getattr(converter, '__qualname__', type(converter).__name__)
      named = f'{kind}(pack={getattr(converter, "pack", None)})'
    # Rates have no effect on a single task, or if each task is read to its end.
    mixes = not self.reset_for_eval and hasattr(self._provider, 'get_rate')
    tasks, files = [], hashlib.sha256()
    for task in self._tasks:
      # SeqIO's other shuffles are the same each time.
      size = task.shuffle_buffer_size if self.shuffle else None
      rate = self._provider.get_rate(task) if mixes else None
      tasks.append(
        {'name': task.name, 'shuffle_buffer_size': size, 'rate': rate}
      )
      paths = [task.cache_dir]  # The source may no longer exist.
      if not (self.use_cached and task.supports_caching):
        paths = task.source.list_shards(self.split_name)
      for path in paths:
        files.update(f'{os.path.basename(path)}\n'.encode())
    return {
      **super().identity(),
      'mixture_or_task': self._provider.name,
      # The order of the tasks matters, because they are read in it.
      'tasks': tasks,
      'split_name': self.split_name,
      'task_feature_lengths': dict(self.task_feature_lengths),
      'feature_converter': named,
      'use_cached': self.use_cached,
      'shuffle': self.shuffle,
      'trim_output_features': self.trim_output_features,
      'data_version': self.data_version,
      'file_names_sha256': files.hexdigest(),
    }

  def where(self) -> str:
    """Describes the first record of the next batch. SeqIO hides its file."""
    return (
      f'{super().where()} of {self._provider.name}, split {self.split_name!r}'
    )

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    """Returns the text of each row, with one line for each document.

    `key` is a feature of the task, or 'src' for 'inputs'. None and all other
    values mean 'targets'.
    """
    features = self._provider.output_features
    key = 'inputs' if key == 'src' else key
    vocabulary = features[key if key in features else 'targets'].vocabulary
    texts = []
    for row, length in zip(np.asarray(ids), lengths, strict=True):
      row = row[:length]
      # SeqIO stops decoding at the first end token, so split after each.
      parts = np.split(row, np.flatnonzero(row == vocabulary.eos_id) + 1)
      lines = [vocabulary.decode(part.tolist()) for part in parts if part.size]
      texts.append(
        '\n'.join(
          x if isinstance(x, str) else ' '.join(map(str, x)) for x in lines
        )
      )
    return texts

  def example_ids(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries `ID_KEYS` of a batch, int32 [B].

    Raises a ValueError if a batch has none.
    """
    if not set(ID_KEYS) <= set(batch):
      raise ValueError(
        f'A batch for {self.name} has the entries {sorted(batch)}; expected'
        f' {ID_KEYS}, which identify the examples. Set reset_for_eval=True, and'
        ' pack=False in the feature converter.'
      )
    return {key: batch[key] for key in ID_KEYS}

  def compute_metrics(
    self,
    *,
    predict_outputs: Outputs | None = None,
    score_outputs: Outputs | None = None,
  ) -> dict[str, dict[str, Any]]:
    """Computes the metrics of the task, or of each task of the mixture.

    Requires `reset_for_eval=True` and a converter that does not pack.

    The id of a row joins each output to its example, so neither the order nor
    the number of hosts matters. Padding rows and repeated ids are ignored. If
    outputs of one kind are not given, the metrics that need them are left out.
    Process 0 reads and keeps the examples of all hosts.

    Args:
      predict_outputs: Pairs for each batch, gathered from all hosts: its
        `example_ids` (or the whole batch), and the model's predictions. These
        are token ids [B, L], or a pair of token ids and a dict of arrays
        [B, ...] for metrics that take `aux_values`.
      score_outputs: Pairs like `predict_outputs`, with scores [B].

    Returns:
      Task -> metric -> value. {} in all processes but process 0.

    Raises:
      ValueError: The outputs do not match the examples one to one, or rows have
        no ids.
    """
    if jax.process_index():
      return {}
    expected = {id for of_task in self._examples.values() for id in of_task}
    given = {}
    for kind, outputs in ('predict', predict_outputs), ('score', score_outputs):
      if outputs is None:
        continue
      given[kind] = rows = self._by_id(outputs)
      if odd := sorted(rows.keys() ^ expected):
        raise ValueError(
          f'The {kind}_outputs for {self.name} have {len(rows)} examples;'
          f' expected {len(expected)}. Missing or unknown: {len(odd)}, as'
          f' (shard, num_shards, index) {odd[:_MAX_NAMED]}. Give the outputs of'
          ' all batches of one evaluation, gathered from all hosts.'
        )
    metrics = {}
    for task in self._tasks:
      examples = self._examples[task.name]
      if task.metric_objs and examples:
        outputs_of = {
          kind: jax.tree.map(
            lambda *xs: np.stack(xs), *(rows[id] for id in examples)
          )
          for kind, rows in given.items()
        }
        metrics[task.name] = _task_metrics(
          task, list(examples.values()), outputs_of
        )
    return metrics

  def _by_id(self, outputs: Outputs) -> dict[Id, Any]:
    """Returns id -> output of each example."""
    found: dict[Id, Any] = {}
    for batch, output in outputs:
      ids = [np.asarray(x) for x in self.example_ids(batch).values()]
      if ids[0].ndim != 1:
        raise ValueError(
          f'Outputs for {self.name} have ids of shape {ids[0].shape}; expected'
          ' [B], the concatenated rows of all hosts. Gather with'
          ' process_allgather(..., tiled=True).'
        )
      output = jax.tree.map(
        np.asarray, output, is_leaf=lambda x: isinstance(x, list)
      )
      for row, id in enumerate(zip(*(x.tolist() for x in ids), strict=True)):
        if id[-1] >= 0:
          found.setdefault(id, jax.tree.map(lambda x, row=row: x[row], output))
    return found

  @functools.cached_property
  def _examples(self) -> dict[str, dict[Id, Any]]:
    """Name of the task -> id -> example, of all hosts, for the metrics."""
    hosts = self.num_infeed_hosts
    assert hosts is not None
    examples: dict[str, dict[Id, Any]] = {task.name: {} for task in self._tasks}
    for shard in range(hosts):
      index = itertools.count()
      for task in self._tasks:
        dataset = tfdata.build(
          self.epoch_seed(0),
          functools.partial(self._examples_of, task, host_index=shard),
          self.op_determinism,
        )
        for example in dataset.as_numpy_iterator():
          examples[task.name][shard, hosts, next(index)] = example
    return examples


def _task_metrics(
  task: Any, examples: list[Any], outputs_of: Mapping[str, Any]
) -> dict[str, Any]:
  """Computes the metrics of a task with SeqIO's metric objects.

  `outputs_of` is 'predict' or 'score' -> arrays [N, ...], or pairs of them.
  """
  metrics_lib = import_seqio().metrics
  result: dict[str, Any] = {}
  for metric in task.metric_objs:
    wanted = metric.model_output_type.name  # Example: 'PREDICTION_WITH_AUX'.
    kind = 'score' if wanted.startswith('SCORE') else 'predict'
    if kind not in outputs_of:
      continue
    output = outputs_of[kind]
    if '_WITH_' not in wanted and isinstance(output, tuple):
      output = output[0]
    elif '_WITH_' in wanted and not isinstance(output, tuple):
      raise ValueError(
        f'Task {task.name} has a metric that takes more than one array for each'
        f' row. Give {kind}_outputs as pairs (array, dict of arrays).'
      )
    computed = metric.from_model_output(examples, output, task.output_features)
    if isinstance(computed, metrics_lib.CollectingMetric):
      values, _ = computed.actual_compute(examples, task.output_features)
    else:
      values = computed.compute()
    if twice := result.keys() & values.keys():
      raise ValueError(
        f'Task {task.name} has two metrics with the names {sorted(twice)}.'
        ' Rename one.'
      )
    for name, value in values.items():
      is_scalar = isinstance(value, metrics_lib.Scalar)
      result[name] = value.value if is_scalar else value
  return result
