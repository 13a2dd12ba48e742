"""Models: a network, its loss, and its decoding.

A model is a layer that takes a batch. `compute_predictions` runs the network,
and `compute_loss` computes the loss of the predictions:

    (metrics, per_example), collected = model.apply(
      variables, batch, rng=key, mutable=True
    )

A metric is a pair of scalars: the weighted mean over the batch, and its weight
in a mean over several batches. `total_loss` is the mean cross entropy in nats,
plus the auxiliary losses of all layers.

Names of classes, fields and metrics follow Praxis (Google, 2022).

Shapes: B batch, L length, T prompt, S source, D embed, V vocab or classes.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from examples import decoding
from examples import transformer
from examples.pax import base_layer
from examples.pax import hparams
from examples.pax.layers import embedding_softmax
from examples.pax.layers import resnets
from examples.pax.layers import transformers
from jaxline import metrics as metrics_lib
from jaxline.inputs import base as inputs

__getattr__ = hparams.refuse_names_of_pax(__name__)

LayerTpl = base_layer.LayerTpl
template_field = base_layer.template_field

# Name -> (mean, weight), scalars.
WeightedScalars = dict[str, tuple[jax.Array, jax.Array]]
# Name -> array [B, ...].
PerExample = dict[str, jax.Array]


# Fields of a decoder whose names differ in `decoding.Options`.
_OPTIONS = {'k': 'top_k', 'p': 'top_p', 'eos_id': 'stop_ids'}


class DecoderHParams(hparams.BaseHParams):
  """Hyperparameters of all decoders. Each subclass is a decoding method."""

  max_decode_steps: int = 0  # Maximum number of tokens of a continuation.
  # Token or tokens that end a continuation. If None, no token does.
  eos_id: int | Sequence[int] | None = 2
  _method = ''

  def to_options(self) -> decoding.Options:
    """Returns the options for `decoding.decode`."""
    ids = () if self.eos_id is None else self.eos_id
    fields = dict(self.items())
    fields['eos_id'] = (ids,) if isinstance(ids, int) else tuple(ids)
    if fields.get('p', 0) is None:
      del fields['p']
    return decoding.Options(
      method=self._method,
      **{_OPTIONS.get(name, name): value for name, value in fields.items()},
    )


class GreedyDecoderHParams(DecoderHParams):
  """Takes the likeliest token at each step."""

  _method = 'greedy'


class SampleDecoderHParams(DecoderHParams):
  """Draws a random token at each step."""

  num_samples: int = 1  # Continuations of each prompt.
  sort_samples: bool = True  # Whether to sort a prompt's samples by score.
  temperature: float = 1.0  # Divisor of the logits, applied after `k` and `p`.
  k: int = 40  # Number of likeliest tokens to draw from. If 0, all tokens.
  # Draw from the fewest of these tokens whose probabilities sum to `p`. If
  # None, from all of them.
  p: float | None = None
  _method = 'sample'


class BeamSearchHParams(DecoderHParams):
  """Searches for the likeliest continuation as a whole."""

  # Number of hypotheses for each prompt. Only those that ended with `eos_id`
  # are returned.
  beam_size: int = 1
  length_norm_alpha: float = 0.8  # Exponent; see `decoding.length_norm`.
  _method = 'beam'


class BaseModel(base_layer.BaseLayer, abc.ABC):
  """A layer that takes a batch and computes its loss."""

  @abc.abstractmethod
  def compute_predictions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the network on arrays [B, ...]; returns input of `compute_loss`."""

  @abc.abstractmethod
  def compute_loss(
    self, predictions: Mapping[str, Any], batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns the metrics, including the loss, and the results of each row.

    Args:
      predictions: Result of `compute_predictions`.
      batch: Arrays [B, ...]. Entries with weight 0 are ignored.
    """

  def __call__(
    self, batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns `compute_loss` of `compute_predictions`."""
    return self.compute_loss(self.compute_predictions(batch), batch)

  def _with_aux_loss(
    self, avg_xent: jax.Array, weight: jax.Array
  ) -> WeightedScalars:
    """Returns the total loss and its parts, as metrics."""
    total, weights = jnp.float32(0), jnp.float32(1)
    if added := self.aux_losses.values():
      values, counts = zip(*added, strict=True)
      total, weights = jnp.float32(sum(values)), jnp.mean(jnp.float32(counts))
    return {
      'total_loss': (avg_xent + total, weight),
      'avg_xent': (avg_xent, weight),
      'aux_loss': (total, weights),
    }


def _weights(batch: Mapping[str, Any], labels: jax.Array) -> jax.Array:
  """Returns the weight of each label, float32, in the shape of the labels."""
  if inputs.WEIGHTS not in batch:
    return jnp.ones(labels.shape, jnp.float32)
  weights = batch[inputs.WEIGHTS].astype(jnp.float32)
  missing = (1,) * (labels.ndim - weights.ndim)  # One weight may be per row.
  return jnp.broadcast_to(
    weights.reshape(weights.shape + missing), labels.shape
  )


def _mean(total: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns total / weight, or 0 with a zero gradient if the weight is 0."""
  return total / jnp.where(weight == 0, jnp.ones_like(weight), weight)


class _TokenModel(BaseModel):
  """A model that predicts each token from the tokens before it.

  A subclass sets `_network` in `setup` and defines `start_decoding(batch,
  max_decode_steps)`, which returns the network's cache, the prompts [B, T] and
  their lengths [B].
  """

  decoder_tpl: DecoderHParams = template_field(GreedyDecoderHParams)

  def _token_loss(
    self, x_BLD: jax.Array, targets: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns the metrics of the tokens, and the results of each row."""
    labels_BL = targets['labels']
    weights_BL = _weights(targets, labels_BL)
    found = self._network.compute_loss(x_BLD, labels_BL, weights_BL)
    weight = found['total_weight']
    avg_xent = _mean(found['total_loss'], weight)
    correct = _mean(found['correct'], weight)
    metrics = self._with_aux_loss(avg_xent, weight) | {
      'log_pplx': (avg_xent, weight),
      'fraction_of_correct_next_step_preds': (correct, weight),
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
    """Returns the logits [B, L, V] of the next tokens, and the cache."""
    return self._network.extend_step(tokens_BL, cache, start_B)

  def decode(
    self,
    variables: base_layer.Variables,
    batch: Mapping[str, Any],
    rng: jax.Array | None = None,
    options: DecoderHParams | decoding.Options | None = None,
  ) -> decoding.Decoded:
    """Continues the prompts of a batch: a pure function, as is `apply`.

    Args:
      variables: Variables, as `init` returns them.
      batch: Prompts, as for `start_decoding`.
      rng: Random key. Required if tokens are drawn.
      options: Decoder. If None, `decoder_tpl`.
    """
    options = options or self.decoder_tpl
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
  """A model of a stream of tokens.

  A batch has `ids`, `labels` and `weights`, [B, L]; the weights may be [B]. For
  a network with `packed_input`, it has `segment_ids` and `segment_pos` too. For
  other networks, `paddings` is optional.
  """

  lm_tpl: LayerTpl = template_field(transformers.TransformerLm)

  def setup(self) -> None:
    self.create_child('lm', self.lm_tpl)
    self._network = self.lm

  def compute_predictions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `hidden`, the input of the output layer, [B, L, D]."""
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
        f' {sorted(batch)}. packed_input=True requires packed data.'
      )
    segments = {name: batch[name] for name in names}
    return {'hidden': self.lm.hidden(batch['ids'], **segments)}

  def compute_loss(
    self, predictions: Mapping[str, Any], batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns the metrics of the tokens, and the results of each row.

    `total_loss` is the sum of `avg_xent` and `aux_loss`; `avg_xent` and
    `log_pplx` are nats per token; `num_predictions` is the sum of the tokens'
    weights; there is `fraction_of_correct_next_step_preds`. The rows have
    `labels` and `per_token_xent`, [B, L], and `scores`, the log probability of
    the row, [B].
    """
    return self._token_loss(predictions['hidden'], batch)

  def start_decoding(
    self, batch: Mapping[str, Any], max_decode_steps: int
  ) -> tuple[Any, jax.Array, jax.Array]:
    """Returns a cache, the prompts [B, T] and their lengths [B].

    Args:
      batch: `ids`, int32 [B, T], padded on the right, and `lengths`, int32 [B],
        at least 1.
      max_decode_steps: Number of further tokens that the cache can hold.
    """
    prompts_BT = batch['ids']
    rows, length = prompts_BT.shape
    cache = self.lm.empty_cache(rows, length + max_decode_steps - 1)
    return cache, prompts_BT, batch['lengths']


class SequenceModel(_TokenModel):
  """A model of a target sequence given a source, such as an encoder-decoder.

  A batch has two entries: `src` with `ids` and `paddings` [B, S] (1 for
  padding), and `tgt` with `ids`, `labels` and `weights` [B, L]. If `tgt` has no
  `weights`, the `weights` of the batch are used. A run that accumulates
  gradients weights the parts of a batch by the `weights` of the batch, so for
  exact results put the target's weights there too.
  """

  model_tpl: LayerTpl = template_field(transformers.TransformerEncoderDecoder)

  def setup(self) -> None:
    self.create_child('model', self.model_tpl)
    self._network = self.model

  def compute_predictions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `hidden`, the input of the output layer, [B, L, D]."""
    source, target_ids = batch['src'], batch['tgt']['ids']
    hidden = self.model.hidden(source['ids'], source['paddings'], target_ids)
    return {'hidden': hidden}

  def compute_loss(
    self, predictions: Mapping[str, Any], batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns the metrics of the target's tokens; see `LanguageModel`."""
    target = dict(batch['tgt'])
    if inputs.WEIGHTS not in target and inputs.WEIGHTS in batch:
      # These weights exclude the rows that pad a batch.
      target[inputs.WEIGHTS] = batch[inputs.WEIGHTS]
    return self._token_loss(predictions['hidden'], target)

  def start_decoding(
    self, batch: Mapping[str, Any], max_decode_steps: int
  ) -> tuple[Any, jax.Array, jax.Array]:
    """Returns a cache, the target's prompts [B, T] and their lengths [B].

    Args:
      batch: `src` as in training, and `tgt` with the beginning of the target:
        `ids`, int32 [B, T], padded on the right, and `lengths`, int32 [B], at
        least 1.
      max_decode_steps: Number of further tokens that the cache can hold.
    """
    source, target = batch['src'], batch['tgt']
    encoded_BSD = self.model.encode(source['ids'], source['paddings'])
    length = target['ids'].shape[1] + max_decode_steps - 1
    cache = self.model.empty_cache(encoded_BSD, source['paddings'], length)
    return cache, target['ids'], target['lengths']


class ClassificationModel(BaseModel):
  """A model of one label per row, for example of images."""

  # The network computes features [B, D] from the input; `softmax_tpl` computes
  # logits from the features.
  network_tpl: LayerTpl = template_field(resnets.ResNet)
  softmax_tpl: LayerTpl = template_field(embedding_softmax.FullSoftmax)
  input_field: str = 'image'  # Entry of the batch with the network's input.
  # Entry with the labels, integers [B]; or, like Pax's `label_probs`, with the
  # probability of each label, [B, V].
  label_field: str = 'label'

  def setup(self) -> None:
    self.create_child('network', self.network_tpl)
    self.create_child('softmax', self.softmax_tpl)

  def compute_predictions(self, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `logits`, float32 [B, V]."""
    features_BD = self.network(batch[self.input_field])
    return {'logits': self.softmax.get_logits(features_BD)}

  def compute_loss(
    self, predictions: Mapping[str, Any], batch: Mapping[str, Any]
  ) -> tuple[WeightedScalars, PerExample]:
    """Returns the metrics of the labels, and the results of each row.

    `total_loss` is the sum of `avg_xent`, in nats, and `aux_loss`; `error` is 1
    minus `accuracy`; `acc5` is how often the label is among the five likeliest;
    `num_predictions` is the sum of the weights. The rows have `labels`, `xent`
    and `correct`, [B].
    """
    logits_BV = predictions['logits']
    labels = labels_B = batch[self.label_field]
    if labels.ndim > 1:
      labels_B = labels.argmax(axis=-1)
    weights_B = _weights(batch, labels_B)
    weight = weights_B.sum()

    def mean(values_B: jax.Array) -> jax.Array:
      # Values with weight 0 may be NaN.
      return _mean(metrics_lib.Mean.of(values_B, weights_B).total, weight)

    xent_B = transformer.cross_entropy(logits_BV, labels)
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
