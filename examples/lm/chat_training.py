"""Fine-tunes a language model on conversations: see docs/chat_training.md.

Shapes: B batch, L length, P pairs of a row, 2 chosen and rejected.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxline import metrics
from jaxline import sharded
from jaxline.base import keys
from jaxline.inputs import text

from . import chat_data
from . import experiment
from . import folder
from . import model

_ANSWERS = {'cross_entropy': (), 'dpo': ('chosen', 'rejected')}
_REFERENCE = 'reference'  # Key of DPO's frozen weights in the model state.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(experiment.Config):
  """Additional settings; `configs/chat.py` gives reasons for the values.

  `documents` and `text_key` have no effect.

  Attributes:
    chat: the format of a line, and the tokens that train.
    loss: 'cross_entropy'; or 'dpo' (Rafailov et al., 2023) for lines with
      `chosen` and `rejected`. The initial weights are DPO's reference.
    dpo_beta: factor of log-probabilities in DPO's rewards.
    samples: number of held-out conversations that each evaluation answers. With
      0, or if none is short enough, it continues `sample_prompt` instead.
  """

  chat: chat_data.Options = dataclasses.field(default_factory=chat_data.Options)
  loss: str = 'cross_entropy'
  dpo_beta: float = 0.1
  samples: int = 3

  def __post_init__(self):
    super().__post_init__()
    keys.check_attributes(
      self, samples=keys.integer(min=0), dpo_beta=keys.number(above=0)
    )
    if self.loss not in _ANSWERS:
      raise ValueError(
        f'loss must be one of {(*_ANSWERS,)}; got {self.loss!r}.'
      )
    for name in ('expert_capacity', 'router_balance_loss', 'router_z_loss'):
      # The two answers of a pair would share the capacity of their row.
      if self.loss == 'dpo' and (value := getattr(self.model, name)):
        raise ValueError(
          f"loss='dpo' does not support model.{name}={value}; set it to 0."
        )


class Experiment(experiment.Experiment):
  """Trains a language model to answer like the assistant."""

  CONFIG_CLASS = Config
  INPUT = chat_data.ChatInput
  CHANGEABLE_ON_RESUME = (
    *experiment.Experiment.CHANGEABLE_ON_RESUME,
    'experiment_kwargs.config.samples',
  )
  config: Config

  def load_corpus(self) -> text.Corpus:
    """Returns the training conversations and the held-out ones."""
    config, path = self.config, str(self._tokenizer_file).partition('#')[0]
    codes = chat_data.Codes(path, config.chat, _ANSWERS[config.loss])
    corpus = chat_data.load(
      config.files,
      codes,
      eval_fraction=config.eval_fraction,
      cache_dir=config.cache_dir,
    )
    if config.model.vocab_size < codes.prompts.vocab_size:
      for documents in corpus:
        texts = np.split(documents.tokens, documents.starts[1:])
        for name, found in zip(documents.names, texts, strict=True):
          self._check_rows(found[found < codes.document_id] >> 1, name)
    return corpus

  def encode_prompt(self, prompt: folder.Prompt | np.ndarray) -> np.ndarray:
    """Returns the tokens of a prompt; an array is returned as it is."""
    if isinstance(prompt, np.ndarray):
      return prompt
    return super().encode_prompt(prompt)

  def row_losses(self, *args: Any) -> jax.Array:
    """Returns the mean loss of each row, over its tokens or its pairs."""
    if self.config.loss == 'cross_entropy':
      return super().row_losses(*args)
    found, weights_BP = self._preferences(*args, is_training=True)
    total_B = (found['loss'] * weights_BP).sum(axis=1)
    return total_B / jnp.maximum(weights_BP.sum(axis=1), 1)

  @property
  def _has_reference(self) -> bool:
    """Whether the model state keeps a reference for DPO.

    If only adapters train, the weights without them are the reference.
    """
    config = self.config
    is_frozen = config.lora.rank and not config.trainable
    return config.loss == 'dpo' and not is_frozen

  def init_fn(self, rng: jax.Array) -> tuple[Any, Any]:
    """Adds the reference, if it is needed, to the model state."""
    params, model_state = super().init_fn(rng)
    if self._has_reference:
      model_state = {**model_state, _REFERENCE: params}
    return params, model_state

  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> sharded.LossOutput:
    """Returns the mean loss over tokens that train, in nats, or over pairs."""
    args = params, model_state, batch, rng, is_training
    if self.config.loss == 'cross_entropy':
      sums = self._sums(*args)
      nats = metrics.Mean(sums.total, sums.weight)
      return self.with_routing(
        sums.routing, is_training, nats.compute(), {'loss': nats}, model_state
      )
    found, weights_BP = self._preferences(*args)
    means = {k: metrics.Mean.of(x, weights_BP) for k, x in found.items()}
    return means['loss'].compute(), means, model_state

  def _preferences(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the loss and the rewards of each pair, and weights, [B, P]."""
    config, segments_BL = self.config, batch['segment_ids']
    length = segments_BL.shape[1]

    def by_pair(x_BL: jax.Array) -> jax.Array:
      """Returns the sum over each conversation, [B, P, 2]."""
      add = lambda x, segments: jax.ops.segment_sum(x, segments, length + 1)
      sums = jax.vmap(add)(x_BL, segments_BL)[:, 1 : 1 + length // 2 * 2]
      return sums.reshape(-1, length // 2, 2)

    def log_probs(params: Any, alpha: float, **options: Any) -> jax.Array:
      adapters = dataclasses.replace(config.lora, alpha=alpha)
      log_probs_BL = model.log_probs(
        experiment.merged(
          params, model_state, dataclasses.replace(config, lora=adapters)
        ),
        batch['ids'],
        batch['labels'],
        config.model,
        segment_ids_BL=segments_BL,
        positions_BL=batch['segment_pos'],
        **options,
      )
      return by_pair(jnp.where(batch['weights'] > 0, log_probs_BL, 0))

    current = log_probs(
      params, config.lora.alpha, rng=rng, is_training=is_training
    )
    base = model_state[_REFERENCE] if self._has_reference else params
    reference = jax.lax.stop_gradient(log_probs(base, alpha=0.0))
    rewards_BP2 = config.dpo_beta * (current - reference)
    chosen_BP, rejected_BP = rewards_BP2[..., 0], rewards_BP2[..., 1]
    margin_BP = chosen_BP - rejected_BP
    return {
      'loss': -jax.nn.log_sigmoid(margin_BP),
      'reward_chosen': chosen_BP,
      'reward_rejected': rejected_BP,
      'reward_margin': margin_BP,
      'reward_accuracy': (margin_BP > 0).astype(jnp.float32),
    }, by_pair(batch['weights']).sum(axis=-1)

  def sample(self, rng: jax.Array) -> str:
    """Returns the model's answers to held-out conversations."""
    if not (questions := [*self._questions()]):
      return super().sample(rng)
    prompts, answers = zip(*questions, strict=True)
    found = self._continue(prompts, rng, self.sample_options)
    decode = self.prompts.decode
    return '\n\n'.join(
      f'{decode(prompt)}{sample["text"]}\n(expected: {decode(answer)})'
      for prompt, answer, (sample,) in zip(prompts, answers, found, strict=True)
    )

  def _questions(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields tokens: a prompt, and the answer that ends the conversation."""
    documents, left = self.corpus.eval, self.config.samples
    most = self.config.model.max_length - self.config.sample_length
    for document in range(len(documents.names) if left else 0):
      codes, *_ = chat_data.codes_of(documents, document)
      begins = np.flatnonzero(np.diff(codes & 1, prepend=1) == 1)
      if left and begins.size and begins[-1] <= most:
        left -= 1
        prompt, answer = np.split(codes, begins[-1:])
        yield prompt >> 1, answer[answer & 1 == 1] >> 1
