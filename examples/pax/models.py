"""Models: a network, its loss, and its decoding.

A model is a layer that is called with a batch. `compute_predictions` runs the
network, `compute_loss` computes the loss of the predictions:

    (metrics, per_example), collected = model.apply(
      variables, batch, rng=key, mutable=True
    )

Metrics are pairs (value, weight) of scalars: the weighted mean over the batch,
and the weight with which it counts in a mean over several. `total_loss` is the
mean of the cross entropy in nats, and the auxiliary losses of all layers.

Names of classes, fields and metrics are those of Praxis (Google, 2022).

Shapes: B batch, L length, T prompt, S source, D embed, V vocab or classes.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from examples import decoding
from examples.pax import base_layer
from examples.pax import hparams
from examples.pax.layers import embedding_softmax
from examples.pax.layers import resnets
from examples.pax.layers import transformers
from jaxline import metrics as metrics_lib
from jaxline.inputs import base as inputs

__getattr__ = hparams.refuse_names_of_pax(__name__)

BaseHParams = hparams.BaseHParams
sub_config_field = base_layer.sub_config_field
template_field = base_layer.template_field

# Name -> (mean, weight), scalars.
WeightedScalars = dict[str, tuple[jax.Array, jax.Array]]
# Name -> array [B, ...].
PerExample = dict[str, jax.Array]


# Where a field of a decoder has another name in `decoding.Options`.
_OPTIONS = {'k': 'top_k', 'p': 'top_p'}


class DecoderHParams(BaseHParams):
  """Hyperparameters of all decoders; the subclasses are the methods.

  Attributes:
    max_decode_steps: the most tokens of a continuation.
    eos_id: token, or tokens, with which a continuation ends; None for none.
  """

  max_decode_steps: int = 0
  eos_id: int | Sequence[int] | None = 2
  _method = ''

  def to_options(self) -> decoding.Options:
    """Returns what `decoding.decode` takes.

    Raises:
      ValueError: a value that is no decoder's.
    """
    ids = () if self.eos_id is None else self.eos_id
    fields = {
      _OPTIONS.get(name, name): value
      for name, value in self.items()
      if name != 'eos_id' and (name, value) != ('p', None)
    }
    return decoding.Options(
      method=self._method,
      stop_ids=(ids,) if isinstance(ids, int) else tuple(ids),
      **fields,
    )


class GreedyDecoderHParams(DecoderHParams):
  """Takes the likeliest token each time."""

  _method = 'greedy'


class SampleDecoderHParams(DecoderHParams):
  """Draws each token.

  Attributes:
    num_samples: continuations of each prompt.
    sort_samples: sort the continuations of a prompt by their scores.
    temperature: logits are divided by it, after `k` and `p`.
    k: draw from so many of the likeliest tokens; 0 is all.
    p: of these from the fewest whose probabilities add up to it; None is all.
  """

  num_samples: int = 1
  sort_samples: bool = True
  temperature: float = 1.0
  k: int = 40
  p: float | None = None
  _method = 'sample'


class BeamSearchHParams(DecoderHParams):
  """Looks for the likeliest continuation as a whole.

  Attributes:
    beam_size: hypotheses kept for each prompt. Only those that ended with
      `eos_id` are returned.
    length_norm_alpha: see `decoding.length_norm`.
  """

  beam_size: int = 1
  length_norm_alpha: float = 0.8
  _method = 'beam'


class BaseModel(base_layer.BaseLayer, abc.ABC):
  """A layer that is called with a batch, and says what its loss is."""

  @abc.abstractmethod
  def compute_predictions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the network.

    Args:
      batch: arrays [B, ...].

    Returns:
      What `compute_loss` needs of it.
    """

  @abc.abstractmethod
  def compute_loss(
    self, predictions: Mapping[str, Any], batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns metrics, one of them the loss; and what each row gives.

    Args:
      predictions: of `compute_predictions`.
      batch: arrays [B, ...]. What has weight 0 does not count.
    """

  def __call__(
    self, batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns `compute_loss` of `compute_predictions`."""
    return self.compute_loss(self.compute_predictions(batch), batch)

  def _with_aux_loss(
    self, avg_xent: jax.Array, weight: jax.Array
  ) -> WeightedScalars:
    """Returns the metrics of a loss: in all, and its parts."""
    added = list(self.aux_losses.values())
    total, weights = jnp.float32(0), jnp.float32(1)
    if added:
      values, counts = zip(*added, strict=True)
      total = jnp.float32(sum(values))
      weights = jnp.mean(jnp.float32(counts))
    return {
      'total_loss': (avg_xent + total, weight),
      'avg_xent': (avg_xent, weight),
      'aux_loss': (total, weights),
    }


def _weights(batch: Mapping[str, Any], labels: jax.Array) -> jax.Array:
  """Returns what each label counts, float32 of its shape."""
  if inputs.WEIGHTS not in batch:
    return jnp.ones(labels.shape, jnp.float32)
  weights = batch[inputs.WEIGHTS].astype(jnp.float32)
  missing = (1,) * (labels.ndim - weights.ndim)  # Of rows, and not of tokens.
  return jnp.broadcast_to(
    weights.reshape(weights.shape + missing), labels.shape
  )


def _mean(total: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns total / weight; 0 where nothing counts, with the gradient 0."""
  return total / jnp.where(weight == 0, jnp.ones_like(weight), weight)


class _TokenModel(BaseModel):
  """One whose predictions are tokens, each by those before it.

  A subclass sets `_network` in `setup`, and has `start_decoding(batch,
  max_decode_steps)`, which returns the network's cache, the prompts [B, T] and
  their lengths [B].

  Attributes:
    decoder_tpl: how `decode` does it, where it is not told.
  """

  decoder_tpl: DecoderHParams = sub_config_field(GreedyDecoderHParams)

  def _token_loss(
    self, x_BLD: jax.Array, targets: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns the metrics of tokens, and what is known of each row."""
    labels_BL = targets['labels']
    weights_BL = _weights(targets, labels_BL)
    found = self._network.compute_loss(x_BLD, labels_BL, weights_BL)
    weight = found['total_weight']
    avg_xent = _mean(found['total_loss'], weight)
    metrics = self._with_aux_loss(avg_xent, weight) | {
      'log_pplx': (avg_xent, weight),
      'fraction_of_correct_next_step_preds': (
        _mean(found['correct'], weight),
        weight,
      ),
      'num_predictions': (weight, jnp.ones_like(weight)),
    }
    xent_BL = found['per_token_xent']
    return metrics, {
      'labels': labels_BL,
      'per_token_xent': xent_BL,
      'scores': -(xent_BL * weights_BL).sum(axis=1),
    }

  def extend_step(
    self, tokens_BL: jax.Array, cache: Any, start_B: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Returns the logits [B, L, V] of further tokens, and the cache."""
    return self._network.extend_step(tokens_BL, cache, start_B)

  def decode(
    self,
    variables: base_layer.Variables,
    batch: Mapping[str, Any],
    rng: jax.Array | None = None,
    options: DecoderHParams | decoding.Options | None = None,
  ) -> decoding.Decoded:
    """Continues the prompts of a batch; from outside, as `apply`; pure.

    Args:
      variables: as `init` returns them.
      batch: what `start_decoding` takes.
      rng: a key, where tokens are drawn.
      options: how; None is `decoder_tpl`.

    Returns:
      See `decoding.Decoded`.
    """
    if options is None:
      options = self.hparams.decoder_tpl
    if isinstance(options, DecoderHParams):
      options = options.to_options()

    def run(method: str, *args: Any) -> Any:
      return self.apply(variables, *args, method=method, do_eval=True)

    cache, prompts_BT, lengths_B = run(
      'start_decoding', batch, options.max_decode_steps
    )
    return decoding.decode(
      lambda cache, tokens, start: run('extend_step', tokens, cache, start),
      cache,
      prompts_BT,
      lengths_B,
      options,
      rng,
      cache_axis=transformers.CACHE_AXIS,
    )


class LanguageModel(_TokenModel):
  """A model of a stream of tokens, such as `transformers.TransformerLm`.

  A batch has `ids`, `labels` and `weights`, [B, L] (or [B] weights), and, for a
  network with `packed_input`, `segment_ids` and `segment_pos`, for another one
  perhaps `paddings`.

  Attributes:
    lm_tpl: the network.
  """

  lm_tpl: Any = template_field(transformers.TransformerLm)

  def setup(self) -> None:
    """Creates the network."""
    self.create_child('lm', self.hparams.lm_tpl)
    self._network = self.lm

  def compute_predictions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `hidden` [B, L, D], what the output layer is given."""
    p, names = self.lm.hparams, []
    if p.packed_input:
      names = ['segment_ids', 'segment_pos']
    elif 'paddings' in batch and isinstance(
      p, transformers.TransformerLm.HParams
    ):
      names = ['paddings']
    if missing := set(names) - set(batch):
      raise ValueError(
        f'{self.module_name}: the batch lacks {sorted(missing)}; it has'
        f' {sorted(batch)}. packed_input=True needs packed data.'
      )
    segments = {name: batch[name] for name in names}
    return {'hidden': self.lm.hidden(batch['ids'], **segments)}

  def compute_loss(
    self, predictions: Mapping[str, Any], batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns metrics of the tokens, and what each row gives.

    Returns:
      `total_loss`, which is `avg_xent` and `aux_loss` together; `avg_xent` and
      `log_pplx`, nats a token; `fraction_of_correct_next_step_preds`; and
      `num_predictions`, the tokens' weights summed. And of each row `labels`
      and `per_token_xent`, [B, L], and `scores` [B], its log probability.
    """
    return self._token_loss(predictions['hidden'], batch)

  def start_decoding(
    self, batch: Mapping[str, Any], max_decode_steps: int
  ) -> tuple[Any, jax.Array, jax.Array]:
    """Returns a cache, the prompts [B, T] and their lengths [B].

    Args:
      batch: `ids` int32 [B, T], padded on the right, and `lengths` int32 [B],
        of at least 1.
      max_decode_steps: for how many further tokens there must be room.
    """
    prompts_BT = batch['ids']
    rows, length = prompts_BT.shape
    cache = self.lm.empty_cache(rows, length + max_decode_steps - 1)
    return cache, prompts_BT, batch['lengths']


class SequenceModel(_TokenModel):
  """A model of a target by a source, such as an encoder and a decoder.

  Its network is like `transformers.TransformerEncoderDecoder`.

  A batch has `src`, with `ids` and `paddings` [B, S] (1 for padding),
  and `tgt`, with `ids`, `labels` and `weights` [B, L]; without these, the
  batch's own `weights` count. A run that accumulates gradients weighs parts of
  a batch by its own: with those of `tgt` there too, that is exact.

  Attributes:
    model_tpl: the network.
  """

  model_tpl: Any = template_field(transformers.TransformerEncoderDecoder)

  def setup(self) -> None:
    """Creates the network."""
    self.create_child('model', self.hparams.model_tpl)
    self._network = self.model

  def compute_predictions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `hidden` [B, L, D], what the output layer is given."""
    source, target = batch['src'], batch['tgt']
    return {
      'hidden': self.model.hidden(
        source['ids'], source['paddings'], target['ids']
      )
    }

  def compute_loss(
    self, predictions: Mapping[str, Any], batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns metrics of the target's tokens; see `LanguageModel`."""
    target = dict(batch['tgt'])
    if inputs.WEIGHTS not in target and inputs.WEIGHTS in batch:
      # So the rows that only fill up a batch do not count.
      target[inputs.WEIGHTS] = batch[inputs.WEIGHTS]
    return self._token_loss(predictions['hidden'], target)

  def start_decoding(
    self, batch: Mapping[str, Any], max_decode_steps: int
  ) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the encoded source as a cache, prompts [B, T], lengths [B].

    Args:
      batch: `src` as in training; `tgt` with `ids` int32 [B, T], padded on the
        right, how the target begins, and `lengths` int32 [B], at least 1.
      max_decode_steps: for how many further tokens there must be room.
    """
    source, target = batch['src'], batch['tgt']
    encoded_BSD = self.model.encode(source['ids'], source['paddings'])
    length = target['ids'].shape[1] + max_decode_steps - 1
    cache = self.model.empty_cache(encoded_BSD, source['paddings'], length)
    return cache, target['ids'], target['lengths']


class ClassificationModel(BaseModel):
  """A model of one label a row, such as of images.

  Attributes:
    network_tpl: from the input to features [B, D].
    softmax_tpl: from these to logits, such as `FullSoftmax.HParams`.
    input_field: the entry of the batch that the network is given.
    label_field: the entry with the labels, integers [B]; or, as Pax's
      `label_probs`, the probability of each label, [B, V].
  """

  network_tpl: Any = template_field(resnets.ResNet)
  softmax_tpl: Any = template_field(embedding_softmax.FullSoftmax)
  input_field: str = 'image'
  label_field: str = 'label'

  def setup(self) -> None:
    """Creates the network and the output layer."""
    self.create_child('network', self.hparams.network_tpl)
    self.create_child('softmax', self.hparams.softmax_tpl)

  def compute_predictions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `logits`, float32 [B, V]."""
    features_BD = self.network(batch[self.hparams.input_field])
    return {'logits': self.softmax.get_logits(features_BD)}

  def compute_loss(
    self, predictions: Mapping[str, Any], batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns metrics of the labels, and what each row gives.

    Returns:
      `total_loss`, which is `avg_xent` and `aux_loss` together; `avg_xent` in
      nats; `accuracy`, and `error` without it; `acc5`, how often the label was
      among the five likeliest; and `num_predictions`, the weights summed. And
      of each row `labels`, `xent` and `correct`, [B].
    """
    logits_BV = predictions['logits']
    labels = labels_B = batch[self.hparams.label_field]
    if labels.ndim > 1:
      labels_B = labels.argmax(axis=-1)
    weights_B = _weights(batch, labels_B)
    weight = weights_B.sum()

    def mean(values_B: jax.Array) -> jax.Array:
      # What has no weight may be NaN.
      return _mean(metrics_lib.Mean.of(values_B, weights_B).total, weight)

    xent_B = self.softmax.xent(logits_BV, labels, weights_B)
    _, best_BN = jax.lax.top_k(logits_BV, min(5, logits_BV.shape[1]))
    hits_BN = (best_BN == labels_B[:, None]).astype(jnp.float32)
    correct_B = hits_BN[:, 0]
    accuracy = mean(correct_B)
    metrics = self._with_aux_loss(mean(xent_B), weight) | {
      'accuracy': (accuracy, weight),
      'error': (1.0 - accuracy, weight),
      'acc5': (mean(hits_BN.sum(axis=1)), weight),
      'num_predictions': (weight, jnp.ones_like(weight)),
    }
    per_example = {'labels': labels_B, 'xent': xent_B, 'correct': correct_B}
    return metrics, per_example
