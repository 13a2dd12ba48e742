"""Fine-tunes a language model on conversations: see docs/chat_training.md."""

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
import numpy as np

from examples import decoding
from jaxline import metrics
from jaxline import sharded
from jaxline.base import keys
from jaxline.inputs import text

from . import chat_data
from . import experiment
from . import folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(experiment.Config):
  """What the experiment needs besides; `configs/chat.py` has the numbers.

  `documents` and `text_key` have no effect.

  Attributes:
    chat: how a line is read, and what trains.
    samples: how many held-out conversations each evaluation answers; with 0, or
      if none is short enough, it continues `sample_prompt`.
  """

  chat: chat_data.Options = dataclasses.field(default_factory=chat_data.Options)
  samples: int = 3

  def __post_init__(self):
    super().__post_init__()
    keys.check_attributes(self, samples=keys.integer(min=0))


class Experiment(experiment.Experiment):
  """Trains a language model to answer as the assistant does."""

  CONFIG_CLASS = Config
  INPUT = chat_data.ChatInput
  CHANGEABLE_ON_RESUME = (
    *experiment.Experiment.CHANGEABLE_ON_RESUME,
    'experiment_kwargs.config.samples',
  )
  config: Config

  def load_corpus(self) -> text.Corpus:
    """Returns the conversations to train and to evaluate on."""
    config, path = self.config, str(self._tokenizer_file).partition('#')[0]
    codes = chat_data.Codes(path, config.chat)
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

  def encode_prompt(
    self, prompt: str | folder.Messages | np.ndarray
  ) -> np.ndarray:
    """Returns the tokens of a prompt, which may be tokens already."""
    if isinstance(prompt, np.ndarray):
      return prompt
    return super().encode_prompt(prompt)

  def loss_fn(
    self,
    params: Any,
    model_state: Any,
    batch: sharded.BatchDict,
    rng: jax.Array,
    is_training: bool,
  ) -> sharded.LossOutput:
    """Returns the mean cross entropy of the tokens that train, in nats."""
    sums = self._sums(params, model_state, batch, rng, is_training)
    nats = metrics.Mean(*sums)
    return nats.compute(), {'loss': nats}, model_state

  def sample(self, rng: jax.Array) -> str:
    """Returns the model's answers to held-out conversations."""
    config = self.config
    options = decoding.Options(
      method='sample',
      max_decode_steps=config.sample_length,
      temperature=config.sample_temperature,
      top_k=0,
      scores=False,
      stop_ids=config.decode.stop_ids,
    )
    if not (questions := [*self._questions()]):
      return super().sample(rng)
    prompts, answers = zip(*questions, strict=True)
    decode = self.prompts.decode
    found = self._continue(prompts, rng, options)
    return '\n\n'.join(
      f'{decode(prompt)}{sample["text"]}\n(expected: {decode(answer)})'
      for prompt, answer, (sample,) in zip(prompts, answers, found, strict=True)
    )

  def _questions(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the tokens before the last answers, and those of the answers."""
    data = self.eval_input()
    most = self.config.model.max_length - self.config.sample_length
    left = self.config.samples
    for document in range(len(data.documents.names)):
      codes, *_ = data.codes_of(document)
      places = np.flatnonzero(np.diff(codes & 1, prepend=1) == 1)
      if left and places.size and places[-1] <= most:
        start, left = int(places[-1]), left - 1
        answer = codes[start:]
        yield codes[:start] >> 1, answer[answer & 1 == 1] >> 1
