"""SeqIO tasks and mixtures as inputs, and their metrics.

  train = seqio.SeqIOInput(
    mixture_name='wmt_t2t_ende_v003', split_name='train', batch_size=8,
    task_feature_lengths={'inputs': 128, 'targets': 128},
    feature_converter=seqio.EncoderDecoderFeatures(pack=True), is_training=True,
  )

A host reads its part of the files or, if a source has fewer files than there
are hosts, its part of the examples. So a position is valid for this host of
this number of hosts; `jaxline.inputs.tfdata` says what a position is and what
it costs.

- A task that repeats is built again each epoch, with another seed.
- A mixture that repeats has no epochs: SeqIO repeats each of its tasks
  separately, so that the rates hold for ever. A resumed run reads from the
  beginning of the run. (A `MultiInput` or a weighted mixture of one
  `SeqIOInput` per task does not.)
- With `reset_for_eval`, each task of a mixture is evaluated on one epoch, one
  after the other, for any rates.

Metrics need `reset_for_eval=True` and a converter that does not pack, such as
`EncoderDecoderFeatures(pack=False)`: then the entries `ID_KEYS` of each row,
int32 [B], identify its example. Padding rows have index -1. To evaluate, gather
the model's outputs of all hosts and pass them to `compute_metrics`:

  outputs = []
  for batch in data.eval_batches():
    ids = data.example_ids(batch)
    outputs.append(
      multihost_utils.process_allgather((ids, predict(batch)), tiled=True)
    )
  metrics = data.compute_metrics(predict_outputs=outputs)

A token 0 is padding in SeqIO, and in the converters here.

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

from jaxline import errors
from jaxline.inputs import base
from jaxline.inputs import tfdata

# Which example a row is: the number of the part, of how many parts, and the
# example's place within the part, -1 for a padding row.
SHARD_KEY = '_seqio_shard'
NUM_SHARDS_KEY = '_seqio_num_shards'
INDEX_KEY = '_seqio_index_within_shard'
ID_KEYS = (SHARD_KEY, NUM_SHARDS_KEY, INDEX_KEY)

# SeqIO's own evaluator takes this seed.
_EVAL_SEED = 42
_MAX_NAMED = 3

# The rows of one batch: the entries of `ID_KEYS`, and arrays [B, ...].
Outputs = Iterable[tuple[Mapping[str, Any], Any]]


@functools.cache
def import_seqio() -> Any:
  """Returns the module `seqio`.

  Raises:
    ImportError: it is not installed.
  """
  try:
    import seqio
  except ImportError as e:
    raise ImportError(
      "This input needs SeqIO; install it: pip install -e '.[seqio]'."
    ) from e
  tfdata.import_tensorflow()
  return seqio


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelFeatures:
  """Makes batches for a decoder of a task's features.

  With `targets` alone, rows are those; with `inputs` too, a row is an example's
  inputs and then its targets. The entries, each [L], L the sum of the features'
  lengths: ids, labels, weights, paddings, segment_ids, segment_pos. `ids` are
  the labels one place further on, `bos_id` first in each segment.

  Attributes:
    pack: whether to put several examples into a row, where they fit whole.
    bos_id: the token that the model reads before an example's first one.
    weights_on_targets_only: whether the model does not predict the inputs.
  """

  pack: bool
  bos_id: int = 0
  weights_on_targets_only: bool = True

  def __call__(
    self, dataset: Any, task_feature_lengths: Mapping[str, int]
  ) -> Any:
    """Converts a dataset of examples to one of rows."""
    seqio = import_seqio()
    fields: dict[str, Any] = {'pack': self.pack, 'bos_id': self.bos_id}
    convert = (
      seqio.PrefixLMFeatureConverter(
        loss_on_targets_only=self.weights_on_targets_only, **fields
      )
      if 'inputs' in task_feature_lengths
      else seqio.LMFeatureConverter(**fields)
    )
    return convert(dataset, task_feature_lengths).map(_decoder_entries)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderFeatures:
  """Makes batches for an encoder and a decoder of `inputs` and `targets`.

  `src` has the entries ids, paddings, segment_ids, segment_pos, each [L of the
  inputs]; `tgt` those of `LanguageModelFeatures`, each [L of the targets].

  Attributes:
    pack: whether to put several examples into a row, where they fit whole.
    bos_id: the token that the decoder reads before an example's first one.
  """

  pack: bool
  bos_id: int = 0

  def __call__(
    self, dataset: Any, task_feature_lengths: Mapping[str, int]
  ) -> Any:
    """Converts a dataset of examples to one of rows."""
    convert = import_seqio().EncDecFeatureConverter(
      pack=self.pack, bos_id=self.bos_id
    )

    def entries(row: Mapping[str, Any]) -> dict[str, Any]:
      src = {
        'ids': row['encoder_input_tokens'],
        **_segments(row, 'encoder', row['encoder_input_tokens']),
      }
      return {'src': src, 'tgt': _decoder_entries(row)}

    return convert(dataset, task_feature_lengths).map(entries)


def _decoder_entries(row: Mapping[str, Any]) -> dict[str, Any]:
  tf = tfdata.import_tensorflow()
  labels = row['decoder_target_tokens']
  is_token = tf.cast(labels != 0, tf.int32)
  return {
    # Behind the last token, SeqIO leaves it once more.
    'ids': row['decoder_input_tokens'] * is_token,
    'labels': labels,
    'weights': tf.cast(row['decoder_loss_weights'], tf.float32),
    **_segments(row, 'decoder', labels),
  }


def _segments(row: Mapping[str, Any], side: str, tokens: Any) -> dict[str, Any]:
  """Returns the entries for documents and padding, packed or not."""
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
    mixture_name: of a registered mixture or task; or
    mixture_or_task: a `seqio.Mixture` or `seqio.Task` itself.
    split_name: which split, such as 'train'.
    task_feature_lengths: of each feature that is used, how many tokens; longer
      ones are cut.
    feature_converter: `LanguageModelFeatures`, `EncoderDecoderFeatures`, one of
      SeqIO's converters, or any `(dataset, task_feature_lengths) -> dataset`.
    use_cached: whether to read the files of SeqIO's cache tool.
    shuffle: whether each epoch has its own order; None is only in training. An
      evaluation is never shuffled.
    trim_output_features: whether the task cuts features to their lengths,
      before the converter does.
    eval_metrics_targets_length: how many tokens of the targets the metrics get,
      if a model may predict more than `task_feature_lengths` lets it read. None
      is as many as the model gets. (If a task keeps the text in
      `targets_pretokenized`, the metrics get all of it.)
    data_version: a version of the examples. A position is refused if this has
      changed. It stands for what this class cannot see, such as preprocessors
      and vocabularies.
  """

  mixture_name: str | None = None
  mixture_or_task: Any = None
  split_name: str
  task_feature_lengths: Mapping[str, int]
  feature_converter: Callable[..., Any]
  use_cached: bool = False
  shuffle: bool | None = None
  trim_output_features: bool = True
  eval_metrics_targets_length: int | None = None
  data_version: str = ''

  def __post_init__(self) -> None:
    import_seqio()
    super().__post_init__()
    self.check_flag('shuffle', or_none=True)
    self.check_flag('use_cached')
    self.check_flag('trim_output_features')
    if (self.mixture_name is None) == (self.mixture_or_task is None):
      raise ValueError(
        f'{self.name} has mixture_name={self.mixture_name!r} and'
        f' mixture_or_task={self.mixture_or_task!r}; give exactly one of them.'
      )
    if self.shuffle is None:
      self.shuffle = self.is_training
    if self.shuffle and not self.is_training:
      raise ValueError(
        f'{self.name} has shuffle=True and is_training=False; an evaluation is'
        ' never shuffled. Leave shuffle out.'
      )
    self._provider = self._find_provider()
    if self.split_name not in self._provider.splits:
      raise ValueError(
        f'{self._provider.name} has no split {self.split_name!r}; it has'
        f' {sorted(self._provider.splits)}.'
      )
    features = self._provider.output_features
    unknown = sorted(set(self.task_feature_lengths) - set(features))
    if unknown:
      raise ValueError(
        f'{self.name}.task_feature_lengths has {unknown}, which'
        f' {self._provider.name} has not; its features are {sorted(features)}.'
      )
    # Of each task; None until the data is opened.
    self._paths: list[list[str]] | None = None
    # Of each task, the examples of each part, for metrics.
    self._examples: dict[str, list[list[Any]]] = {}

  def _find_provider(self) -> Any:
    seqio = import_seqio()
    if self.mixture_name is None:
      if not isinstance(self.mixture_or_task, (seqio.Mixture, seqio.Task)):
        raise TypeError(
          f'{self.name}.mixture_or_task is a'
          f' {type(self.mixture_or_task).__name__}; expected a seqio.Mixture or'
          ' seqio.Task. (A name goes to mixture_name.)'
        )
      return self.mixture_or_task
    names = {*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()}
    if self.mixture_name not in names:
      similar = errors.nearest(self.mixture_name, names, n=3)
      raise ValueError(
        f'No SeqIO mixture or task is called {self.mixture_name!r}'
        + (f'; did you mean one of {similar}?' if similar else '.')
        + ' Import the module that registers it first.'
      )
    return seqio.get_mixture_or_task(self.mixture_name)

  @property
  def _tasks(self) -> list[Any]:
    """The tasks that have the split."""
    tasks = import_seqio().get_subtasks(self._provider)
    return [task for task in tasks if self.split_name in task.splits]

  @property
  def _has_ids(self) -> bool:
    packed = getattr(self.feature_converter, 'pack', False)
    return self.reset_for_eval and not packed

  @property
  def _is_endless(self) -> bool:
    mixture = isinstance(self._provider, import_seqio().Mixture)
    return bool(self.repeat) and mixture

  def seed(self) -> int:
    """Returns `input_random_seed`; SeqIO's 42 if None in evaluation."""
    if self.input_random_seed is None and not self.is_training:
      return _EVAL_SEED
    return super().seed()

  def epoch_seed(self, epoch: int) -> int:
    """Returns the seed of an epoch; all are the same in evaluation."""
    return super().epoch_seed(epoch) if self.is_training else self.seed()

  def epoch_dataset(self, seed: int, host_index: int) -> Any:
    """Returns the rows of a host: one epoch, or all there are of a mixture."""
    tf = tfdata.import_tensorflow()
    self._find_files()
    if self.reset_for_eval:
      parts = [
        self._convert(self._examples_of(task, seed, host_index))
        for task in self._tasks
      ]
      dataset = functools.reduce(lambda one, two: one.concatenate(two), parts)
    else:
      if self._is_endless:
        self._check_tasks_have_examples(seed, host_index)
      dataset = self._convert(
        self._examples_of(self._provider, seed, host_index)
      )
    if not self._has_ids:
      return dataset

    def add_id(index: Any, row: Mapping[str, Any]) -> dict[str, Any]:
      return {
        **row,
        SHARD_KEY: tf.constant(host_index, tf.int32),
        NUM_SHARDS_KEY: tf.constant(self.num_infeed_hosts, tf.int32),
        INDEX_KEY: tf.cast(index, tf.int32),
      }

    return dataset.enumerate().map(add_id)

  def _convert(self, dataset: Any) -> Any:
    return self.feature_converter(dataset, dict(self.task_feature_lengths))

  def _examples_of(
    self,
    provider: Any,
    seed: int,
    host_index: int,
    lengths: Mapping[str, int] | None = None,
    endless: bool | None = None,
    shuffle: bool | None = None,
  ) -> Any:
    """Returns the examples of a part of a task or mixture."""
    seqio = import_seqio()
    # Independent of what was built before: metrics read a single task.
    tfdata.import_tensorflow().random.set_seed(seed)
    endless = self._is_endless if endless is None else endless
    return provider.get_dataset(
      sequence_length=dict(lengths or self.task_feature_lengths),
      split=self.split_name,
      use_cached=self.use_cached,
      shuffle=self.shuffle if shuffle is None else shuffle,
      seed=seed,
      shard_info=(
        seqio.ShardInfo(host_index, self.num_infeed_hosts)
        if self.num_infeed_hosts != 1
        else None
      ),
      num_epochs=None if endless else 1,
      trim_output_features=self.trim_output_features,
      # It would hold an epoch that is read once.
      try_in_mem_cache=False,
    )

  def _check_tasks_have_examples(self, seed: int, host_index: int) -> None:
    # Repeated, a task without any would be looked through for ever.
    for task in self._tasks:
      dataset = self._examples_of(
        # One example is enough: do not fill a buffer for it.
        task,
        seed,
        host_index,
        endless=False,
        shuffle=False,
      )
      if next(iter(dataset), None) is None:
        raise ValueError(
          f'Task {task.name} of {self._provider.name} has no examples in split'
          f' {self.split_name!r} for host {host_index} of'
          f' {self.num_infeed_hosts}. Leave it out of the mixture, or check its'
          ' files and preprocessors.'
        )

  def fill_up(self, batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """Returns a batch with so many rows; those that only fill have index -1."""
    return self._mark(batch, super().fill_up(batch, rows))

  def _fill(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    return self._mark(batch, super()._fill(batch))

  def _mark(
    self, batch: Mapping[str, Any], filled: dict[str, Any]
  ) -> dict[str, Any]:
    # A subclass may leave them out, where it needs no metrics.
    if self._has_ids and INDEX_KEY in batch:
      index = filled[INDEX_KEY].copy()
      index[len(batch[INDEX_KEY]) :] = -1
      filled = base.Batch(filled, **{INDEX_KEY: index})
    return filled

  def identity(self) -> dict[str, Any]:
    """Returns what the examples and their order depend on."""
    return {**super().identity(), **self._data_identity}

  @functools.cached_property
  def _data_identity(self) -> dict[str, Any]:
    converter = self.feature_converter
    if dataclasses.is_dataclass(converter):
      named = repr(converter)
    else:
      kind = getattr(converter, '__qualname__', type(converter).__name__)
      named = f'{kind}(pack={getattr(converter, "pack", None)})'
    files = hashlib.sha256()
    for path in itertools.chain(*self._find_files()):
      files.update(f'{os.path.basename(path)}\n'.encode())
    # Without a mixture, or where each task is read to its end, no rate counts.
    mixes = not self.reset_for_eval and hasattr(self._provider, 'get_rate')
    return {
      'mixture_or_task': self._provider.name,
      # In order, since that is the one in which they are read.
      'tasks': [
        {
          'name': task.name,
          # Private in SeqIO; the other shuffles are the same each time.
          'shuffle_buffer_size': (
            getattr(task, '_shuffle_buffer_size', None)
            if self.shuffle
            else None
          ),
          'rate': self._provider.get_rate(task) if mixes else None,
        }
        for task in self._tasks
      ],
      'split_name': self.split_name,
      'task_feature_lengths': dict(self.task_feature_lengths),
      'feature_converter': named,
      'use_cached': self.use_cached,
      'shuffle': self.shuffle,
      'trim_output_features': self.trim_output_features,
      'data_version': self.data_version,
      'file_names_sha256': files.hexdigest(),
    }

  def _find_files(self) -> list[list[str]]:
    """Returns the paths of each task; looks for them the first time only."""
    if self._paths is None:
      self._paths = [
        [task.cache_dir]  # Its source may be gone.
        if self.use_cached and task.supports_caching
        else list(task.source.list_shards(self.split_name))
        for task in self._tasks
      ]
    return self._paths

  def _files_of_host(self) -> list[str]:
    """Returns the paths that this host reads, as SeqIO shares them out."""
    assert self._paths is not None
    hosts, host = self.num_infeed_hosts, self.infeed_host_index
    assert hosts is not None
    files = []
    for paths in self._paths:
      # With fewer files than hosts, each reads all and keeps some examples.
      files += paths[host::hosts] if len(paths) >= hosts else paths
    return files

  def where(self) -> str:
    """Returns the first record of the next batch, and the files it may be of.

    These are the files that this host reads, once the data is open. Before that
    they are not listed, since this is also called while a file system hangs.
    Only TensorFlow knows which of them is open.
    """
    text = (
      f'{super().where()} of {self._provider.name}, split {self.split_name!r}'
    )
    if self._paths is None:
      return text
    paths = self._files_of_host()
    some = ', '.join(paths[:_MAX_NAMED])
    if len(paths) > _MAX_NAMED:
      some += f' and {len(paths) - _MAX_NAMED} more'
    return f'{text} ({"one of " if len(paths) > 1 else ""}{some})'

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    """Returns the text of token ids, a line for each document in a row.

    Args:
      ids: integers [B, L].
      lengths: integers [B], how many of each row to take.
      key: a feature of the task, or 'src' for 'inputs'. All else, and None, is
        'targets'.

    Raises:
      ValueError: the task has no such feature.
    """
    features = self._provider.output_features
    key = 'inputs' if key == 'src' else key
    feature = features.get(key) or features.get('targets')
    if feature is None:
      raise ValueError(
        f'{self._provider.name} has no feature {key or "targets"!r} whose'
        f' vocabulary could decode ids; it has {sorted(features)}. Give one of'
        ' these as key.'
      )
    return [
      _decode(feature.vocabulary, np.asarray(row)[:length].tolist())
      for row, length in zip(ids, lengths, strict=True)
    ]

  def example_ids(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns which examples the rows of a batch are, for `compute_metrics`.

    Args:
      batch: of `eval_batches`, or the value that this returned for one.

    Returns:
      The entries `ID_KEYS` of it, int32 [B]; index -1 for a padding row.

    Raises:
      ValueError: rows have no ids.
    """
    self._check_has_ids()
    missing = sorted(set(ID_KEYS) - set(batch))
    if missing:
      raise ValueError(
        f'A batch has the entries {sorted(batch)}, and {missing} are missing.'
        f' Give a batch of {self.name}.eval_batches(), or its example_ids.'
      )
    return {key: batch[key] for key in ID_KEYS}

  def _check_has_ids(self) -> None:
    if not self._has_ids:
      raise ValueError(
        f'{self.name} has no example ids to compute metrics with: its'
        f' reset_for_eval is {self.reset_for_eval}, and packing is'
        f' {getattr(self.feature_converter, "pack", False)}. Set'
        ' reset_for_eval=True, and pack=False in the feature converter.'
      )

  def compute_metrics(
    self,
    *,
    predict_outputs: Outputs | None = None,
    score_outputs: Outputs | None = None,
  ) -> dict[str, dict[str, Any]]:
    """Computes the metrics of the task, or of each task of the mixture.

    It needs `reset_for_eval=True`, and a converter that does not pack.

    Each output is joined to its example by the id of its row, so that neither
    the order nor the number of hosts matters. Rows that only fill are left out;
    of several rows with the same id, the first counts. Where outputs of one
    kind are not given, the metrics on them are left out. Process 0 reads the
    examples of all hosts for this, and keeps them for the next time.

    Args:
      predict_outputs: for each batch, over all hosts, its `example_ids` (or the
        whole batch) and the model's predictions: token ids [B, L], or a pair of
        these and a dict of more arrays [B, ...] for the metrics that take
        `aux_values`.
      score_outputs: the same, with scores [B].

    Returns:
      By the name of the task and that of the metric: numbers, and what else the
      task's metric functions return. On process 0; {} on all others.

    Raises:
      ValueError: the outputs are not those of exactly the examples there are;
        or rows have no ids.
    """
    self._check_has_ids()
    if predict_outputs is None and score_outputs is None:
      raise ValueError('Give predict_outputs, score_outputs or both.')
    if jax.process_index():
      return {}
    given = {
      kind: self._collect(outputs)
      for kind, outputs in (
        ('predict', predict_outputs),
        ('score', score_outputs),
      )
      if outputs is not None
    }
    # Of each part, how many examples stand before this task's.
    assert self.num_infeed_hosts is not None
    before = [0] * self.num_infeed_hosts
    metrics = {}
    ids_of = {}
    for task in self._tasks:
      parts = self._examples_for_metrics(task)
      ids_of[task.name] = [
        (shard, before[shard] + i)
        for shard, part in enumerate(parts)
        for i in range(len(part))
      ]
      before = [b + len(part) for b, part in zip(before, parts, strict=True)]
    for kind, rows in given.items():
      self._check_complete(kind, rows, {i for x in ids_of.values() for i in x})
    for task in self._tasks:
      examples = [x for part in self._examples_for_metrics(task) for x in part]
      if task.metric_objs and examples:
        outputs_of = {
          kind: [rows[i] for i in ids_of[task.name]]
          for kind, rows in given.items()
        }
        metrics[task.name] = _task_metrics(task, examples, outputs_of)
    return metrics

  def _collect(self, outputs: Outputs) -> dict[tuple[int, int], Any]:
    """Returns the output of each example, by part and place in it."""
    collected: dict[tuple[int, int], Any] = {}
    for batch, output in outputs:
      shards, num_shards, indices = map(
        np.asarray, self.example_ids(batch).values()
      )
      for key, values in zip(
        ID_KEYS, (shards, num_shards, indices), strict=True
      ):
        if values.ndim != 1:
          raise ValueError(
            f'Outputs for {self.name} come with {key} of shape {values.shape};'
            ' expected [B], the rows of all hosts one after the other. Gather'
            ' with process_allgather(..., tiled=True).'
          )
      output = jax.tree.map(
        np.asarray, output, is_leaf=lambda x: isinstance(x, list)
      )
      for row, index in enumerate(indices.tolist()):
        if index < 0:
          continue
        if num_shards[row] != self.num_infeed_hosts:
          raise ValueError(
            f'An output is of a row with {NUM_SHARDS_KEY}={num_shards[row]};'
            f' {self.name} has num_infeed_hosts={self.num_infeed_hosts}.'
          )
        values = jax.tree.map(lambda x, row=row: x[row], output)
        collected.setdefault((int(shards[row]), index), values)
    return collected

  def _check_complete(
    self,
    kind: str,
    rows: Mapping[tuple[int, int], Any],
    expected: set[tuple[int, int]],
  ) -> None:
    for ids, what in (
      (sorted(expected - rows.keys()), 'are missing'),
      (sorted(rows.keys() - expected), 'belong to no example'),
    ):
      if ids:
        some = ', '.join(
          str((shard, self.num_infeed_hosts, index))
          for shard, index in ids[: 2 * _MAX_NAMED]
        )
        more = ', ...' if len(ids) > 2 * _MAX_NAMED else ''
        raise ValueError(
          f'{len(ids)} of the {kind}_outputs for {self.name} {what}:'
          f' (shard, num_shards, index) = {some}{more}. Give those of all'
          ' batches of one evaluation, gathered from all hosts.'
        )

  def _examples_for_metrics(self, task: Any) -> list[list[Any]]:
    """Returns the examples of each part; kept, as targets do not change."""
    if task.name not in self._examples:
      lengths = dict(self.task_feature_lengths)
      if self.eval_metrics_targets_length is not None:
        lengths['targets'] = self.eval_metrics_targets_length
      assert self.num_infeed_hosts is not None
      parts = []
      for shard in range(self.num_infeed_hosts):
        dataset = tfdata.build(
          self.epoch_seed(0),
          functools.partial(
            self._examples_of, task, host_index=shard, lengths=lengths
          ),
        )
        examples = dataset.as_numpy_iterator()
        # Only counted where no metric asks for them.
        parts.append([x if task.metric_objs else None for x in examples])
      self._examples[task.name] = parts
    return self._examples[task.name]


def _task_metrics(
  task: Any, examples: list[Any], outputs_of: Mapping[str, list[Any]]
) -> dict[str, Any]:
  """Returns the metrics of a task, which SeqIO's own objects compute.

  Args:
    task: a `seqio.Task`.
    examples: as the task gives them, N.
    outputs_of: by kind of outputs, those of each example.
  """
  metrics_lib = import_seqio().metrics
  kinds = metrics_lib.ModelOutputType
  wanted = {
    kinds.PREDICTION: ('predict', False),
    kinds.PREDICTION_WITH_AUX: ('predict', True),
    kinds.SCORE: ('score', False),
    kinds.SCORE_WITH_INTERMEDIATES: ('score', True),
  }
  result: dict[str, Any] = {}
  targets = None
  for metric in task.metric_objs:
    kind, takes_more = wanted[metric.model_output_type]
    if kind not in outputs_of:
      continue
    output = _stack(outputs_of[kind], f'{kind}_outputs of task {task.name}')
    has_more = isinstance(output, tuple)
    if takes_more and not has_more:
      raise ValueError(
        f'Task {task.name} has a metric that takes more than one array of each'
        f' row; let {kind}_outputs be pairs (array, dict of arrays).'
      )
    if has_more and not takes_more:
      output = output[0]
    computed = metric.from_model_output(
      examples, output, task.output_features, 'targets'
    )
    if isinstance(computed, metrics_lib.CollectingMetric):
      values, seen = computed.actual_compute(
        examples, task.output_features, 'targets', targets
      )
      targets = seen['targets']
    else:
      values = computed.compute()
    for name, value in values.items():
      if name in result:
        raise ValueError(
          f'Task {task.name} has two metrics called {name!r}; rename one.'
        )
      is_scalar = isinstance(value, metrics_lib.Scalar)
      result[name] = value.value if is_scalar else value
  return result


def _stack(rows: list[Any], what: str) -> Any:
  """Returns arrays [N, ...] of N rows of them."""

  def stack(*xs: Any) -> np.ndarray:
    first = np.shape(xs[0])
    for x in xs:
      if np.shape(x) != first:
        raise ValueError(
          f'The {what} have rows of shapes {first} and {np.shape(x)}; expected'
          ' the same in all batches. Pad predictions to one length, with 0.'
        )
    return np.stack(xs)

  return jax.tree.map(stack, *rows)


def _decode(vocabulary: Any, ids: list[int]) -> str:
  """Returns the text of a row: SeqIO decodes up to the first end only."""
  ends = [i + 1 for i, x in enumerate(ids) if x == vocabulary.eos_id]
  starts = [0, *ends]
  texts = [
    vocabulary.decode(ids[start:end])
    for start, end in zip(starts, [*ends, len(ids)], strict=True)
    if end > start
  ]
  return '\n'.join(
    text if isinstance(text, str) else ' '.join(map(str, text))
    for text in texts
  )
