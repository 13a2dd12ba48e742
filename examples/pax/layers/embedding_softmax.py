"""Embeddings of tokens and of positions, and the output layer with its loss.

Shapes: B batch, L length, D embed, V vocab, H heads, K head dim.
"""

import math

import jax
import jax.numpy as jnp

from examples import transformer
from examples.pax import base_layer
from jaxline import errors

WeightHParams = base_layer.WeightHParams
WeightInit = base_layer.WeightInit


class Embedding(base_layer.BaseLayer):
  """A table of vectors, `emb_var` [V, D], with the axes 'vocab' and 'embed'.

  Attributes:
    num_classes: V.
    input_dims: D.
    scale_sqrt_depth: Whether to multiply the vectors by sqrt(D).
  """

  num_classes: int = 0
  input_dims: int = 0
  scale_sqrt_depth: bool = False

  def setup(self) -> None:
    p = self.hparams
    self.create_variable(
      'emb_var',
      WeightHParams(
        (p.num_classes, p.input_dims),
        tensor_split_dims_mapping=('vocab', 'embed'),
      ),
    )

  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., D] of ids [...], in `fprop_dtype`."""
    return self.emb_lookup(ids)

  def emb_lookup(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., D] of ids [...], in `fprop_dtype`."""
    p = self.hparams
    x = self.theta.emb_var[ids]
    if p.scale_sqrt_depth:
      x *= math.sqrt(p.input_dims)
    return self.shard(x.astype(self.fprop_dtype), None)


class _Softmax(base_layer.BaseLayer):
  """An output layer: logits, and their cross entropy.

  Attributes:
    num_classes: V.
    input_dims: D.
    soft_cap_logits: Soft cap c: logits become c tanh(logit / c). If 0, they are
      not capped.
    has_bias: Whether there is a `bias`, [V].
    chunks: Number of pieces into which the loss splits the sequence, to hold
      the logits of only one piece in memory; see
      `transformer.chunked_cross_entropy`.
  """

  num_classes: int = 0
  input_dims: int = 0
  soft_cap_logits: float = 0.0
  has_bias: bool = True
  chunks: int = 1

  def _create_bias(self) -> None:
    p = self.hparams
    if p.has_bias:
      weight = WeightHParams(
        (p.num_classes,),
        init=WeightInit.Constant(0.0),
        tensor_split_dims_mapping=('vocab',),
      )
      self.create_variable('bias', weight)

  def _table(self) -> jax.Array:
    """Returns the table [V, D]."""
    raise NotImplementedError

  def _head(self) -> transformer.Head:
    return self._table(), self.theta.bias if self.hparams.has_bias else None

  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Returns `get_logits(inputs)`."""
    return self.get_logits(inputs)

  def get_logits(self, inputs: jax.Array) -> jax.Array:
    """Returns float32 logits [B, L, V] for [B, L, D]; or [B, V] for [B, D]."""
    x_BLD = inputs[:, None] if inputs.ndim == 2 else inputs
    logits_BLV = transformer.logits(
      x_BLD.astype(self.fprop_dtype),
      self._head(),
      self.hparams.soft_cap_logits,
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
    p = self.hparams
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    if p.chunks == 1:
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
        chunks=p.chunks,
        cap=p.soft_cap_logits,
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
    p = self.hparams
    self.create_variable(
      'w',
      WeightHParams(
        (p.input_dims, p.num_classes),
        tensor_split_dims_mapping=('embed', 'vocab'),
      ),
    )
    self._create_bias()

  def _table(self) -> jax.Array:
    return self.theta.w.T


class SharedEmbeddingSoftmax(_Softmax):
  """An output layer that shares its table with the embedding of tokens.

  `emb_var` is [V, D], with the axes 'vocab' and 'embed'. See Press and Wolf
  (2017).

  Attributes:
    scale_sqrt_depth: Whether to multiply embedded tokens by sqrt(D).
  """

  scale_sqrt_depth: bool = False

  def setup(self) -> None:
    p = self.hparams
    self.create_variable(
      'emb_var',
      WeightHParams(
        (p.num_classes, p.input_dims),
        tensor_split_dims_mapping=('vocab', 'embed'),
        # Initialized as the matrix of the output layer.
        fan_in_axes=(1,),
        fan_out_axes=(0,),
      ),
    )
    self._create_bias()

  def _table(self) -> jax.Array:
    return self.theta.emb_var

  def emb_lookup(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., D] of ids [...], in `fprop_dtype`."""
    return Embedding.emb_lookup(self, ids)


class PositionalEmbedding(base_layer.BaseLayer):
  """Sines and cosines of positions (Vaswani et al., 2017); no variables.

  Attributes:
    embedding_dims: D, even.
    min_timescale: Highest angular frequency. Despite its name, and as in
      Praxis, this is not the shortest period.
    max_timescale: `max_timescale / min_timescale` is the ratio of the highest
      to the lowest frequency. If `min_timescale` is 1, the longest period
      divided by 2 pi.
  """

  embedding_dims: int = 0
  min_timescale: float = 1.0
  max_timescale: float = 10_000.0

  def setup(self) -> None:
    _check_even(self)

  def __call__(self, position_BL: jax.Array) -> jax.Array:
    """Returns [B, L, D] of integers [B, L], in `fprop_dtype`."""
    p = self.hparams
    x_BLD = transformer.sinusoidal_positions(
      position_BL.astype(jnp.float32) * jnp.float32(p.min_timescale),
      p.embedding_dims,
      p.max_timescale / p.min_timescale,
    )
    return x_BLD.astype(self.fprop_dtype)


class TrainablePositionalEmbedding(base_layer.BaseLayer):
  """A trained vector for each position: `emb_var` [max_seq_length, D].

  Attributes:
    max_seq_length: Number of positions.
    embedding_dims: D.
  """

  max_seq_length: int = 10_240
  embedding_dims: int = 0

  def setup(self) -> None:
    p = self.hparams
    self.create_variable(
      'emb_var',
      WeightHParams(
        (p.max_seq_length, p.embedding_dims),
        tensor_split_dims_mapping=(None, 'embed'),
      ),
    )

  def __call__(self, position_BL: jax.Array) -> jax.Array:
    """Returns [B, L, D] of integers [B, L], in `fprop_dtype`.

    Raises:
      UsageError: L exceeds `max_seq_length`.
    """
    most = self.hparams.max_seq_length
    if position_BL.shape[-1] > most:
      raise errors.UsageError(
        f'Got sequences of {position_BL.shape[-1]} tokens; {self.module_name}'
        f' has max_seq_length {most}. Shorten the sequences, or increase it.'
      )
    return self.theta.emb_var[position_BL].astype(self.fprop_dtype)


class RotaryPositionalEmbedding(base_layer.BaseLayer):
  """Rotates queries and keys by their positions (Su et al., 2021).

  Attributes:
    embedding_dims: K, even.
    max_timescale: Approximately the longest period divided by 2 pi.
  """

  embedding_dims: int = 0
  max_timescale: float = 10_000.0

  def setup(self) -> None:
    _check_even(self)

  def __call__(self, inputs: jax.Array, position: jax.Array) -> jax.Array:
    """Returns the rotated inputs, [B, L, H, K], in their dtype.

    Args:
      inputs: [B, L, H, K].
      position: Integers, [B, L] or [L].

    Raises:
      ValueError: K is not `embedding_dims`.
    """
    p = self.hparams
    if inputs.shape[-1] != p.embedding_dims:
      raise ValueError(
        f'{self.module_name}.embedding_dims is {p.embedding_dims}; expected the'
        f' width of the heads, {inputs.shape[-1]}.'
      )
    angles = transformer.rotary_angles(
      position, p.embedding_dims, p.max_timescale
    )
    return transformer.rotate(inputs, angles)


def _check_even(layer: base_layer.BaseLayer) -> None:
  dims = layer.hparams.embedding_dims
  if dims < 2 or dims % 2:
    raise errors.UsageError(
      f'{layer.module_name}.embedding_dims is {dims}; expected an even number,'
      ' for pairs of a sine and a cosine.'
    )
