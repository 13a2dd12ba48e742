"""Embeddings of tokens and of positions, and the output layer with its loss.

Shapes: B batch, L length, D embed, V vocab, H heads, K head dim.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer
from jaxline import errors

WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit

_EVEN = {
  'an even embedding_dims, for pairs of a sine and a cosine': (
    lambda p: p.embedding_dims > 0 and p.embedding_dims % 2 == 0
  )
}


class _Table(base_layer.BaseLayer):
  """The base of layers with a vector [D] for each of V tokens."""

  num_classes: int = 0  # V.
  input_dims: int = 0  # D.

  def _create(self, name: str, *axes: str, **kwargs: Any) -> None:
    """Creates a variable with these axes, 'vocab' or 'embed'."""
    sizes = {'vocab': self.num_classes, 'embed': self.input_dims}
    shape = tuple(sizes[axis] for axis in axes)
    weight = WeightHParams(shape, tensor_split_dims_mapping=axes, **kwargs)
    self.create_variable(name, weight)


class Embedding(_Table):
  """A table of vectors, `emb_var` [V, D], with the axes 'vocab' and 'embed'."""

  scale_sqrt_depth: bool = False  # Whether to multiply vectors by sqrt(D).

  def setup(self) -> None:
    self._create('emb_var', 'vocab', 'embed')

  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns `emb_lookup(ids)`."""
    return self.emb_lookup(ids)

  def emb_lookup(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., D] of ids [...], in `fprop_dtype`."""
    x = self.theta.emb_var[ids]
    if self.scale_sqrt_depth:
      x *= math.sqrt(self.input_dims)
    return self.shard(x.astype(self.fprop_dtype), None)


class _Softmax(_Table):
  """An output layer: logits, and their cross entropy."""

  # Soft cap c: logits become c tanh(logit / c). 0 means no cap.
  soft_cap_logits: float = 0.0
  has_bias: bool = True  # Whether there is a `bias`, [V].
  # Pieces into which the loss splits the sequence, to hold the logits of only
  # one in memory; see `transformer.chunked_cross_entropy`.
  chunks: int = 1

  def setup(self) -> None:
    if self.has_bias:
      self._create('bias', 'vocab', init=WeightInit.Constant(0.0))

  def _table(self) -> jax.Array:
    """Returns the table [V, D]."""
    raise NotImplementedError

  def _head(self) -> transformer.Head:
    return self._table(), self.theta.bias if self.has_bias else None

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns `get_logits(inputs)`."""
    return self.get_logits(inputs)

  def get_logits(self, inputs: jax.Array) -> jax.Array:
    """Returns float32 logits [B, L, V] for [B, L, D]; or [B, V] for [B, D]."""
    x_BLD = inputs[:, None] if inputs.ndim == 2 else inputs
    logits_BLV = transformer.logits(
      x_BLD.astype(self.fprop_dtype), self._head(), self.soft_cap_logits
    )
    return logits_BLV[:, 0] if inputs.ndim == 2 else logits_BLV

  def compute_loss(
    self, inputs: jax.Array, labels: jax.Array, weights: jax.Array
  ) -> dict[str, jax.Array]:
    """Returns the cross entropy in nats, and statistics of the predictions.

    Args:
      inputs: [B, L, D], or, with one chunk, [B, D] for one label per row.
      labels: Integers below V, [B, L] or [B].
      weights: Weights of the labels, constant in the gradient. 0 ignores a
        label.

    Returns:
      A dict of float32 arrays. `total_loss` is the weighted sum of the cross
      entropy, and the only entry with a gradient. `total_weight` is the sum of
      the weights. `per_token_xent` is the unweighted cross entropy of each
      label. `correct` is the weighted number of labels that the model ranks
      first.

    Raises:
      ValueError: `chunks` does not divide L.
    """
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    if self.chunks == 1:
      logits = self.get_logits(inputs)
      xent = transformer.cross_entropy(logits, labels)
      hits = logits.argmax(axis=-1).astype(labels.dtype) == labels
      found = transformer.CrossEntropy(
        total=jnp.sum(xent * weights),
        correct=jnp.sum(jnp.where(hits, weights, 0)),
        nats_BL=jax.lax.stop_gradient(xent),
      )
    else:
      found = transformer.chunked_cross_entropy(
        inputs.astype(self.fprop_dtype),
        self._head(),
        labels,
        weights,
        chunks=self.chunks,
        cap=self.soft_cap_logits,
      )
    return {
      'total_loss': found.total,
      'total_weight': weights.sum(),
      'per_token_xent': found.nats_BL,
      'correct': found.correct,
    }


class FullSoftmax(_Softmax):
  """An output layer with a matrix `w` [D, V], axes 'embed' and 'vocab'."""

  def setup(self) -> None:
    self._create('w', 'embed', 'vocab')
    super().setup()

  def _table(self) -> jax.Array:
    return self.theta.w.T


class SharedEmbeddingSoftmax(_Softmax):
  """An output layer that shares its table with the embedding of tokens.

  `emb_var` is [V, D], with the axes 'vocab' and 'embed'. See Press and Wolf
  (2017).
  """

  scale_sqrt_depth: bool = False  # Whether to multiply vectors by sqrt(D).

  def setup(self) -> None:
    # Initialized as the matrix of the output layer.
    fans = {'fan_in_axes': (1,), 'fan_out_axes': (0,)}
    self._create('emb_var', 'vocab', 'embed', **fans)
    super().setup()

  def _table(self) -> jax.Array:
    return self.theta.emb_var

  emb_lookup = Embedding.emb_lookup


class PositionalEmbedding(base_layer.BaseLayer):
  """Sines and cosines of positions (Vaswani et al., 2017); no variables."""

  embedding_dims: int = 0  # D, even.
  max_timescale: float = 10_000.0  # The longest period divided by 2 pi.

  _RULES = _EVEN

  def __call__(self, position_BL: jax.Array) -> jax.Array:
    """Returns [B, L, D] of integers [B, L], in `fprop_dtype`."""
    x_BLD = transformer.sinusoidal_positions(
      position_BL, self.embedding_dims, self.max_timescale
    )
    return x_BLD.astype(self.fprop_dtype)


class TrainablePositionalEmbedding(base_layer.BaseLayer):
  """A trained vector for each position: `emb_var` [max_seq_length, D]."""

  max_seq_length: int = 10_240  # Number of positions.
  embedding_dims: int = 0  # D.

  def setup(self) -> None:
    shape = (self.max_seq_length, self.embedding_dims)
    weight = WeightHParams(shape, tensor_split_dims_mapping=(None, 'embed'))
    self.create_variable('emb_var', weight)

  def __call__(self, position_BL: jax.Array) -> jax.Array:
    """Returns [B, L, D] of integers [B, L], in `fprop_dtype`.

    Raises:
      UsageError: L exceeds `max_seq_length`.
    """
    self.check_length(position_BL.shape[-1])
    return self.theta.emb_var[position_BL].astype(self.fprop_dtype)

  def check_length(self, length: int) -> None:
    """Raises a UsageError if there are too few positions."""
    if length > self.max_seq_length:
      raise errors.UsageError(
        f'Got sequences of {length} tokens; {self.module_name} has'
        f' max_seq_length {self.max_seq_length}. Shorten them, or increase it.'
      )


class RotaryPositionalEmbedding(base_layer.BaseLayer):
  """Rotates queries and keys by their positions (Su et al., 2021)."""

  embedding_dims: int = 0  # K, even.
  max_timescale: float = 10_000.0  # Nearly the longest period over 2 pi.

  _RULES = _EVEN

  def __call__(self, inputs: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the rotated inputs, [B, L, H, K], in their dtype.

    Args:
      inputs: [B, L, H, K].
      position: Integers, [B, L] or [L].
    """
    angles = transformer.rotary_angles(
      position, self.embedding_dims, self.max_timescale
    )
    return transformer.rotate(inputs, angles)
