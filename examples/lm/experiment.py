"""Trains a language model on text: data, loss, optimizer, decoding.

Shapes: B batch, L length, T prompt.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
import gzip
import math
import os
import pathlib
import re
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples import decoding
from examples import fp8
from examples import moe
from jaxline import base_config
from jaxline import errors
from jaxline import metrics
from jaxline import sharded
from jaxline.base import keys
from jaxline.inputs import base as inputs
from jaxline.inputs import text
from jaxline.inputs import tokenization
from jaxline.metrics import writers
from jaxline.parallel import placement

from . import folder
from . import lora
from . import model

# `Config` has a field `lora`, which hides the module.
_Lora = lora.Config
# Keys of the model state: the biases of the routers, and the number of tokens
# that each expert got so far in this step.
_BIASES, _COUNTS = 'router_biases', 'router_counts'
_DECAYS = ('linear', 'cosine')
_PROMPT_FORMATS = ('text', 'special', 'chat')
_CHUNK = 8  # Number of tokens that `stream` decodes at a time.
# Above this number of held-out bytes, xz takes longer than a second or two.
_MAX_TO_COMPRESS = 4_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Settings of the experiment; `configs/lm.py` gives reasons for the values.

  Attributes:
    model: the transformer.
    files: 'stdlib', a folder, a glob, or a list of these.
    documents: the unit that is held out as a whole: 'file', 'line', 'jsonl',
      'rows' or 'split:SEPARATOR'; see `text.load_corpus`.
    text_key: key of the text in each line of 'jsonl' or row of 'rows'.
    eval_fraction: fraction of the documents to hold out.
    tokenizer: 'bytes', 'stdlib', a SentencePiece '.model' or a
      'tokenizer.json'.
    packing: how documents fill sequences: 'stream', 'packed' or 'padded'; see
      `text.TextInput`.
    cache_dir: where tokens are cached; None means the user's cache.
    batch_size: sequences per step, over all devices. It is rounded up to a
      multiple of the number of parts into which the mesh splits a batch, times
      `gradient_accumulation_steps`.
    length: tokens per sequence.
    eval_batch_size: sequences per evaluation batch.
    eval_batches: batches per evaluation; None means all held-out documents.
    seed: seed of the order of the data.
    training_steps: step at which the learning rate reaches its final value.
    learning_rate: peak learning rate.
    warmup_fraction: fraction of the run over which the learning rate rises. The
      first step has the peak divided by the number of warm-up steps.
    decay: how the learning rate falls from its peak: 'linear' or 'cosine'.
    final_learning_rate: final learning rate, as a fraction of the peak.
    b1: decay of Adam's first moment.
    b2: decay of Adam's second moment.
    weight_decay: decay of all weights except the scales of normalization.
    clip_norm: largest global norm of the gradient.
    trainable: regular expressions for the names of the weights to train, such
      as 'layers/.*'; the others are frozen. None means all weights, or only the
      adapters if `lora` has any.
    lora: low-rank adapters.
    sample_prompt: text that the sample of each evaluation continues.
    sample_length: tokens of the sample without its prompt; 0 means no sample.
    sample_temperature: 1 samples from the model's distribution; 0 takes the
      likeliest token.
    prompt_format: how to read a prompt. 'text': start with the token between
      documents, which stops a continuation too, and treat nothing in the text
      as a special token. 'special': find special tokens by name, as
      transformers does with the tokenizer.json. 'chat': treat the prompt as a
      user's message, and apply the chat template next to the tokenizer.json.
    decode: how --jaxline_mode=decode continues prompts.
  """

  model: model.ModelConfig
  files: Any
  documents: str
  text_key: str = 'text'
  eval_fraction: float
  tokenizer: str
  packing: str
  cache_dir: str | None
  batch_size: int
  length: int
  eval_batch_size: int
  eval_batches: int | None
  seed: int
  training_steps: int
  learning_rate: float
  warmup_fraction: float
  decay: str = 'cosine'  # The decay of older runs, which lack the key.
  final_learning_rate: float
  b1: float
  b2: float
  weight_decay: float
  clip_norm: float
  trainable: str | Sequence[str] | None = None
  lora: _Lora = dataclasses.field(default_factory=_Lora)
  sample_prompt: str
  sample_length: int
  sample_temperature: float
  prompt_format: str = 'text'  # The format of older runs, which lack the key.
  decode: decoding.Options

  def __post_init__(self):
    keys.check_attributes(
      self,
      batch_size=keys.integer(min=1),
      length=keys.integer(min=1),
      eval_batch_size=keys.integer(min=1),
      training_steps=keys.integer(min=1),
      warmup_fraction=keys.number(min=0, below=1),
      learning_rate=keys.number(min=0),
      final_learning_rate=keys.number(min=0),
      b1=keys.number(min=0, below=1),
      b2=keys.number(min=0, below=1),
      weight_decay=keys.number(min=0),
      clip_norm=keys.number(above=0),
      eval_fraction=keys.number(above=0, below=1),
      sample_length=keys.integer(min=0),
      sample_temperature=keys.number(min=0),
    )
    if self.decay not in _DECAYS:
      raise ValueError(f'decay must be one of {_DECAYS}; got {self.decay!r}.')
    if self.prompt_format not in _PROMPT_FORMATS:
      raise ValueError(
        f'prompt_format must be one of {_PROMPT_FORMATS}; got'
        f' {self.prompt_format!r}.'
      )
    if self.length > self.model.max_length:
      raise ValueError(
        f'length is {self.length}; expected at most model.max_length,'
        f' {self.model.max_length}.'
      )
    if self.eval_batches is not None and self.eval_batches < 1:
      raise ValueError(
        f'eval_batches is {self.eval_batches}; expected None for all, or at'
        ' least 1.'
      )


def learning_rate_schedule(config: Config) -> optax.Schedule:
  """Returns a linear warm-up followed by a decay to `final_learning_rate`.

  The first of w warm-up steps has the rate peak / w. The last step of the run
  has the final rate.
  """
  peak, final = config.learning_rate, config.final_learning_rate
  # The warm-up is a fraction, so even nine steps have a complete schedule.
  warmup = max(1, int(config.warmup_fraction * config.training_steps))
  steps = max(1, config.training_steps - warmup)
  if config.decay == 'linear':
    decay = optax.linear_schedule(peak, peak * final, steps)
  else:
    decay = optax.cosine_decay_schedule(peak, steps, alpha=final)
  schedule = optax.join_schedules(
    [optax.linear_schedule(0.0, peak, warmup), decay], [warmup]
  )
  # Optax mixes the step with floats, so strict promotion needs a float.
  return lambda step: schedule(jnp.asarray(step, jnp.float32) + 1)


def make_optimizer(config: Config) -> optax.GradientTransformation:
  """Returns AdamW, applied to gradients of clipped global norm."""

  def is_decayed(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda path, _: 'norm' not in jax.tree_util.keystr(path),
      params,
    )

  return optax.chain(
    optax.clip_by_global_norm(config.clip_norm),
    optax.adamw(
      learning_rate_schedule(config),
      b1=config.b1,
      b2=config.b2,
      weight_decay=config.weight_decay,
      mask=is_decayed,
    ),
  )


def merged(params: Any, model_state: Any, config: Config) -> Any:
  """Merges all arrays that the model needs into one tree.

  Adds the adapters to their weights, and inserts the scales of FP8 products and
  the biases of the routers, which are in the model state.
  """
  params = lora.merge(params, config.lora)
  for key in (sharded.OVERWRITE, _BIASES):
    if of_model := model_state.get(key):
      params = fp8.merge(params, of_model)
  return params


def compression_baselines(documents: text.Documents) -> dict[str, float]:
  """Returns the bits per byte of compressors, to compare a model with.

  Args:
    documents: held-out files. They are compressed together, in the order of
      their names, which takes fewer bits than compressing each alone.

  Returns:
    Bits per byte by name, for `gzip -9` and, unless Python was built without
    lzma, `xz`. Python's zlib and lzma agree with these programs to about 0.1%.
  """
  data = documents.data()
  compressed = {'gzip -9': gzip.compress(data, compresslevel=9, mtime=0)}
  with contextlib.suppress(ImportError):
    import lzma

    compressed['xz'] = lzma.compress(data)
  return {k: 8 * len(v) / len(data) for k, v in compressed.items()}


def find_tokenizer(spec: str, *runs: str | None) -> str:
  """Returns `Config.tokenizer`, or a run's copy of the file if it is gone.

  Each of `runs` is 'DIR' or 'DIR:STEP'.
  """
  text, mark, rest = str(spec).partition('#')
  path = pathlib.Path(text)
  for run in filter(None, runs if not path.exists() else ()):
    base = run if os.path.isdir(run) else re.sub(r':\d+$', '', run)
    base = re.sub(r'/checkpoints(/\w+)?/?$', '', base)
    for moved in (pathlib.Path(base, x, path.name) for x in (folder.NAME, '.')):
      if moved.is_file():
        return f'{moved}{mark}{rest}'
  return spec


class Experiment(sharded.ShardedExperiment):
  """Trains a language model on files of text."""

  CONFIG_CLASS = Config
  INPUT = text.TextInput  # Reads the documents of `load_corpus`.
  # These keys only change how a step is computed, how the model is evaluated
  # and decoded, or where tokens are cached.
  CHANGEABLE_ON_RESUME = tuple(
    f'experiment_kwargs.config.{key}'
    for key in (
      'model.attention',
      'model.loss_chunks',
      'model.pipeline_microbatches',
      'model.pipeline_repeats',
      'model.pipeline_stages',
      'model.remat',
      'model.scan_layers',
      'cache_dir',
      'eval_batch_size',
      'eval_batches',
      'sample_length',
      'sample_prompt',
      'sample_temperature',
      'prompt_format',
      'decode',
    )
  )

  def __init__(
    self, mode: str, init_rng: jax.Array, config: Any, *, run_config: Any = None
  ):
    """Loads the tokenizer and, unless the mode is 'decode', the text.

    Args:
      mode: 'train', 'decode', or a mode of evaluation.
      init_rng: the key of the initial weights.
      config: the values of a `Config`.
      run_config: the config of the run; see `sharded.ShardedExperiment`.
    """
    self.config = base_config.read(self.CONFIG_CLASS, config)
    places = 'checkpoint_dir', 'restore_from'
    runs = [run_config.get(x) for x in places] if run_config else []
    self._directory = run_config and run_config.checkpoint_dir
    self._tokenizer_file = find_tokenizer(self.config.tokenizer, *runs)
    self.tokenizer = tokenization.load_tokenizer(self._tokenizer_file)
    self._check_tokens()
    if mode != 'decode':
      self.corpus = self.load_corpus()
      train, held_out = self.corpus
      self.data_summary = (
        f'{len(train.names):,} documents, {train.tokens.size:,} tokens;'
        f' {len(held_out.names):,} documents held out'
      )
    super().__init__(mode, init_rng, run_config=run_config)
    self.trainable_rules = self.config.trainable
    if self.config.lora.rank:
      more = self.config.trainable or ()
      more = [more] if isinstance(more, str) else more
      self.trainable_rules = [lora.TRAINABLE, *more]
    self._rows = self.config.batch_size
    if self.config.model.matmul == 'fp8' and self.partitioner.is_here:
      fp8.check_devices(jax.local_devices())
    if (
      mode not in ('train', 'decode')
      and jax.process_index() == 0
      and self.INPUT is text.TextInput
      and self.corpus.eval.num_bytes < _MAX_TO_COMPRESS
    ):
      baselines = compression_baselines(self.corpus.eval).items()
      shown = ', '.join(f'{name} {bits:.3f}' for name, bits in baselines)
      print(f'Bits per byte of the held-out files: {shown}', flush=True)

  def load_corpus(self) -> text.Corpus:
    """Returns the tokens of the training text and of the held-out text."""
    corpus = text.load_corpus(
      self.config.files,
      documents=self.config.documents,
      eval_fraction=self.config.eval_fraction,
      tokenizer=self.tokenizer,
      cache_dir=self.config.cache_dir,
      text_key=self.config.text_key,
    )
    if self.config.model.vocab_size < self.tokenizer.vocab_size:
      for documents in corpus:
        texts = np.split(documents.tokens, documents.starts[1:])
        for name, ids in zip(documents.names, texts, strict=True):
          self._check_rows(ids, name)
    return corpus

  def _check_tokens(self) -> None:
    """Refuses a model that is too small for the tokens or for the sample."""
    config, tokenizer = self.config, self.tokenizer
    source = folder.of_tokenizer(self._tokenizer_file)
    # A published tokenizer may have tokens for which its model has no row.
    if config.model.vocab_size < tokenizer.vocab_size and not folder.is_of(
      source, config.model.vocab_size
    ):
      raise errors.UsageError(
        f'model.vocab_size is {config.model.vocab_size}; the tokenizer'
        f' {config.tokenizer!r} needs at least {tokenizer.vocab_size}.'
      )
    prompt = len(self.encode_prompt(config.sample_prompt))
    if config.sample_length and not prompt:
      raise errors.UsageError(
        f'sample_prompt is {config.sample_prompt!r}, which has no tokens;'
        ' expected some text, or sample_length=0.'
      )
    length = prompt + config.sample_length
    if config.sample_length < 0 or length > config.model.max_length:
      raise errors.UsageError(
        f'sample_length is {config.sample_length}; together with sample_prompt,'
        f' that is {length} tokens. Expected 0 or more, and in all at most'
        f' model.max_length, {config.model.max_length}.'
      )

  def _check_rows(self, ids: np.ndarray, what: str) -> None:
    """Refuses a text with a token for which the model has no row."""
    rows = self.config.model.vocab_size
    if wrong := ids[ids >= rows][:1].tolist():
      raise errors.UsageError(
        f'{what} has token {wrong[0]}, {self.tokenizer.decode(wrong)!r}, but'
        f' the model has only {rows} rows (model.vocab_size). Remove the token.'
      )

  @functools.cached_property
  def prompts(self) -> folder.Prompts:
    """The special tokens and the chat template in the tokenizer's folder."""
    return folder.Prompts(str(self._tokenizer_file).partition('#')[0])

  def encode_prompt(self, prompt: folder.Prompt) -> np.ndarray:
    """Returns the tokens of a prompt in the format `config.prompt_format`.

    The chat template is always applied to a conversation.
    """
    form = self.config.prompt_format
    if isinstance(prompt, str) and form == 'text':
      ids = self.tokenizer.encode(prompt)
      ids = np.append(np.int32(self.tokenizer.document_id), ids)
    elif isinstance(prompt, str) and form == 'chat':
      ids = self.prompts.encode([{'role': 'user', 'content': prompt}])
    else:
      ids = self.prompts.encode(prompt)
    self._check_rows(ids, f'The prompt {prompt!r:.80}')
    return ids

  def summary(self) -> dict[str, str]:
    """Adds the number of weights that process a token."""
    shown, config = super().summary(), self.config.model
    if config.num_experts > 1:
      active = model.active_weights(self.abstract_state().params, config)
      shown['Parameters'] += f'; {active:,} active for a token'
    return shown

  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    """Returns the initial weights and the model state: see `merged`."""
    params, scales = fp8.split(model.init(rng, self.config.model))
    params, biases = model.split_biases(params)
    params = lora.add(rng, params, self.config.lora)
    counts = jax.tree.map(jnp.zeros_like, biases)
    state = {sharded.OVERWRITE: scales, _BIASES: biases, _COUNTS: counts}
    return params, {key: x for key, x in state.items() if x}

  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> sharded.LossOutput:
    """Returns the mean cross entropy of the tokens, in nats.

    In training, the losses of the routers are added to it, and the metrics
    include statistics of the routers.
    """
    sums = self._sums(params, model_state, batch, rng, is_training)
    nats = metrics.Mean(sums.total, sums.weight)
    documents = self.corpus.train if is_training else self.corpus.eval
    # Each token except the first of a document is a label once, so the result
    # is exact for a whole evaluation.
    tokens = documents.tokens.size - len(documents.names)
    bytes_per_token = documents.num_bytes / tokens
    bits = metrics.Mean(
      sums.total / float(np.log(2)), sums.weight * bytes_per_token
    )
    values = {'loss': nats, 'bits_per_byte': bits}
    return self.with_routing(
      sums.routing, is_training, nats.compute(), values, model_state
    )

  def with_routing(
    self,
    routing: moe.Stats | None,
    is_training: bool,
    loss: jax.Array,
    values: dict[str, Any],
    model_state: Any,
  ) -> sharded.LossOutput:
    """Adds the losses and metrics of the routers to a result of `loss_fn`."""
    if routing is None or not is_training:
      return loss, values, model_state
    config, counts_NE = self.config.model, routing.counts_E
    if counts := model_state.get(_COUNTS):
      counts = jax.tree.map(lambda x: x + counts_NE, counts)
      model_state = {**model_state, _COUNTS: counts}
    means = {
      'dropped_fraction': routing.dropped,
      'router_balance': routing.balance,
      'router_entropy': routing.entropy,
      # Tokens of the busiest expert, relative to the mean of all experts.
      'expert_load': counts_NE.max(1) / counts_NE.mean(1),
    }
    values = values | {key: x.mean() for key, x in means.items()}
    return loss + model.router_loss(routing, config), values, model_state

  def after_update(
    self, before: sharded.TrainState, after: sharded.TrainState
  ) -> Any:
    """Moves the biases of the routers by the token counts of the whole step."""
    state = super().after_update(before, after)
    if counts := state.get(_COUNTS):
      moved = model.moved_biases(state[_BIASES], counts, self.config.model)
      zeros = jax.tree.map(jnp.zeros_like, counts)
      state = {**state, _BIASES: moved, _COUNTS: zeros}
    return state

  def row_losses(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
  ) -> jax.Array:
    """Returns the mean cross entropy of each row, in one pass."""
    sums = self._sums(
      params, model_state, batch, rng, is_training=True, by_row=True
    )
    # A row may have no token with a weight.
    return sums.total / jnp.maximum(sums.weight, 1)

  def _sums(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
    by_row: bool = False,
  ) -> model.Loss:
    """Calls `model.loss` on a batch."""
    packed, mask_BL = self.config.packing == 'packed', None
    if self.config.model.num_experts > 1:
      if 'segment_ids' in batch:
        mask_BL = batch['segment_ids'] > 0
      elif 'paddings' in batch:
        mask_BL = batch['paddings'] == 0
    return model.loss(
      merged(params, model_state, self.config),
      batch['ids'],
      batch['labels'],
      batch['weights'],
      self.config.model,
      rng=rng,
      is_training=is_training,
      segment_ids_BL=batch['segment_ids'] if packed else None,
      positions_BL=batch['segment_pos'] if packed else None,
      mask_BL=mask_BL,
      by_row=by_row,
    )

  def make_optimizer(self) -> optax.GradientTransformation:
    """Returns the optimizer of the config."""
    return make_optimizer(self.config)

  def train_input(self, shard: inputs.Shard | None = None) -> text.TextInput:
    """Returns shuffled rows of the training documents, without an end."""
    # A config for a laptop, with a batch of two rows, must run on any devices.
    given = self.config.batch_size
    parts = self.partitioner.batch_shards * self.accumulation_steps
    if shard is not None:  # `inputs show` has more hosts than devices.
      parts = math.lcm(parts, shard.count)
    self._rows = -(-given // parts) * parts
    if self._rows != given:
      logging.warning(
        'A batch has %d rows instead of batch_size=%d, which does not divide'
        ' into %d parts.',
        self._rows,
        given,
        parts,
      )
    return self.INPUT(
      documents=self.corpus.train,
      batch_size=inputs.per_host(self._rows, shard),
      shard=shard,
      length=self.config.length,
      packing=self.config.packing,
      input_random_seed=self.config.seed,
      is_training=True,
    )

  def eval_input(self, shard: inputs.Shard | None = None) -> text.TextInput:
    """Returns rows of the held-out documents, with each token once."""
    return self.INPUT(
      documents=self.corpus.eval,
      batch_size=inputs.per_host(self.config.eval_batch_size, shard),
      shard=shard,
      length=self.config.length,
      packing=self.config.packing,
      max_batches=self.config.eval_batches,
      reset_for_eval=True,
    )

  def step_scalars(
    self, state: sharded.TrainState, grads: Any, updates: Any
  ) -> dict[str, jax.Array]:
    """Adds the learning rate of the step."""
    # Use the optimizer's count, which leaves out skipped steps.
    schedules = optax.tree.get_all_with_path(
      state.opt_state, 'ScaleByScheduleState'
    )
    count = schedules[0][1].count  # Several optimizers have the same count.
    return {
      **super().step_scalars(state, grads, updates),
      'learning_rate': learning_rate_schedule(self.config)(count),
    }

  @functools.cached_property
  def _stands_alone(self) -> bool:
    """Copies the folder of an imported run into this run; returns True.

    The property is cached, so it copies only once. Afterwards, you may delete
    the imported run.
    """
    source = folder.of_tokenizer(self._tokenizer_file)
    run = self._directory if jax.process_index() == 0 else None
    if run and source and source.name == folder.NAME:
      folder.keep(source, pathlib.Path(run))
    return True

  def step(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> dict[str, Any]:
    """Trains on the next batch, and adds the number of its tokens."""
    _ = self._stands_alone
    scalars = super().step(global_step=global_step, rng=rng, writer=writer)
    tokens = self._rows * self.config.length
    return scalars | {'tokens_per_step': tokens}

  def evaluate(
    self, *, global_step: Any, rng: Any, writer: writers.MetricWriter | None
  ) -> dict[str, float]:
    """Measures bits per byte of the held-out files, and writes a sample."""
    scalars = super().evaluate(global_step=global_step, rng=rng, writer=writer)
    if self.config.sample_length:
      sample = self.sample(rng)
      if writer is not None:
        writer.write_texts(global_step, {'sample': sample})
    return scalars

  def sample(self, rng: jax.Array) -> str:
    """Returns `sample_prompt` and the model's continuation of it."""
    prompt = self.config.sample_prompt
    ((sample,),) = self._continue([prompt], rng, self.sample_options)
    return prompt + sample['text']

  @property
  def sample_options(self) -> decoding.Options:
    """The options of the samples, with the same stops as `decode`."""
    return decoding.Options(
      method='sample',
      max_decode_steps=self.config.sample_length,
      temperature=self.config.sample_temperature,
      top_k=0,
      stop_ids=self.decode_options.stop_ids,
      scores=False,
    )

  def decode(
    self, prompts: Sequence[folder.Prompt], rng: jax.Array
  ) -> list[list[dict[str, Any]]]:
    """Continues prompts with the options `config.decode`.

    Args:
      prompts: texts, conversations as lists of messages, or dicts with
        `messages` and `tools`. A prompt and `max_decode_steps` together must
        not exceed `max_length`.
      rng: a key.

    Returns:
      The continuations of each prompt, the best first: see
      `decoding.continue_texts`.
    """
    return self._continue(prompts, rng, self.decode_options)

  @property
  def decode_options(self) -> decoding.Options:
    """The options of the config, with all tokens that end a text."""
    stops = self.config.decode.stop_ids
    # The stops of an imported folder are complete.
    if self.config.prompt_format == 'text' or not stops:
      stops = (*stops, self.tokenizer.document_id)
    return dataclasses.replace(self.config.decode, stop_ids=stops)

  def check_prompt(self, prompt: folder.Prompt) -> None:
    """Refuses a prompt that `decode` cannot continue."""
    config = self.config
    longest = decoding.longest_prompt(config.decode, config.model.max_length)
    ids = self.encode_prompt(prompt)
    decoding.pad_prompts([ids], rows=1, max_length=longest)

  def stream(
    self, ids: np.ndarray, rng: jax.Array, options: decoding.Options
  ) -> Iterator[list[int]]:
    """Yields the tokens that follow a prompt, a few at a time.

    The token that stops the continuation is left out.

    Args:
      ids: the prompt's tokens, at most `decoding.longest_prompt`.
      rng: a key.
      options: how to decode, with one continuation.
    """
    config, steps = self.config.model, options.max_decode_steps
    longest = decoding.longest_prompt(options, config.max_length)
    prompts_BT, lengths_B = decoding.pad_prompts(
      [ids], rows=self.partitioner.batch_shards, max_length=longest
    )
    params = merged(self.eval_params, self.state.model_state, self.config)
    prefill, extend = self._stream
    # Answers of all lengths share the same few programs.
    options = dataclasses.replace(options, max_decode_steps=_CHUNK)
    put = lambda x: placement.put(x, self.partitioner.batch_sharding)
    rng = placement.put(rng, self.partitioner.replicated)
    cache = prefill(params, put(prompts_BT), steps)
    token_B = prompts_BT[np.arange(len(lengths_B)), lengths_B - 1]
    for start in range(0, steps, _CHUNK):
      key = jax.random.fold_in(rng, start)
      places_B = lengths_B - 1 + start
      args = put(token_B), put(places_B), key, options
      decoded, cache = extend(params, cache, *args)
      found = jax.device_get(decoded)
      chunk = found.ids[0, 0, : min(found.lengths[0, 0], steps - start)]
      has_stopped = chunk[-1] in options.stop_ids
      yield chunk[: len(chunk) - has_stopped].tolist()
      if has_stopped:
        return
      token_B = found.ids[:, 0, -1]

  @functools.cached_property
  def _stream(self) -> Any:
    """The programs of `stream`: one reads the prompt, one adds some tokens."""
    config = self.config.model

    def prefill(params: Any, prompts_BT: jax.Array, steps: int) -> Any:
      batch, length = prompts_BT.shape
      cache = model.empty_cache(config, batch, length + steps)
      tokens_BL = prompts_BT[:, :-1]
      return model.decode_step(params, tokens_BL, cache, 0, config)[1]

    def extend(
      params: Any,
      cache: Any,
      token_B: jax.Array,
      start_B: jax.Array,
      rng: jax.Array,
      options: decoding.Options,
    ) -> tuple[decoding.Decoded, Any]:
      params = model.split_layers(params, config)

      def step(cache: Any, tokens_BL: jax.Array, start_B: jax.Array) -> Any:
        return model.decode_step(params, tokens_BL, cache, start_B, config)

      return decoding.extend(step, cache, token_B, start_B, options, rng)

    return (
      jax.jit(self.in_mesh(prefill), static_argnums=2),
      jax.jit(self.in_mesh(extend), static_argnums=5, donate_argnums=1),
    )

  def _continue(
    self,
    prompts: Sequence[folder.Prompt],
    rng: jax.Array,
    options: decoding.Options,
  ) -> list[list[dict[str, Any]]]:
    """Continues prompts with texts; all devices get equally many rows."""
    rng = placement.put(rng, self.partitioner.replicated)

    def run(*batch: np.ndarray) -> decoding.Decoded:
      params = merged(self.eval_params, self.state.model_state, self.config)
      # All processes pass all rows and get all results.
      placed = placement.put(batch, self.partitioner.batch_sharding)
      return self._decode(params, *placed, rng, options)

    return decoding.continue_texts(
      run,
      prompts,
      options,
      tokenizer=self.tokenizer,
      start_id=None,
      encode=self.encode_prompt,
      max_length=self.config.model.max_length,
      rows=self.partitioner.batch_shards,
    )

  @functools.cached_property
  def _decode(self) -> Any:
    """`decoding.decode` of the model, compiled per shape and options."""
    config = self.config.model

    def decode(
      params: Any,
      prompts_BT: jax.Array,
      lengths_B: jax.Array,
      rng: jax.Array,
      options: decoding.Options,
    ) -> decoding.Decoded:
      batch, length = prompts_BT.shape
      params = model.split_layers(params, config)

      def step(cache: Any, tokens_BL: jax.Array, start_B: jax.Array) -> Any:
        # All prompts begin at position 0. Pass it as a constant and not per
        # row, so that XLA writes the cache in one piece.
        start = start_B if tokens_BL.shape[1] == 1 else 0
        return model.decode_step(params, tokens_BL, cache, start, config)

      return decoding.decode(
        step,
        model.empty_cache(config, batch, length + options.max_decode_steps),
        prompts_BT,
        lengths_B,
        options,
        rng,
        cache_axis=config.cache_axis,
        positions_axis=config.cache_axis + 2,
      )

    return jax.jit(
      self.in_mesh(decode),
      static_argnums=4,
      out_shardings=self.partitioner.replicated,
    )
