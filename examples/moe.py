"""Mixtures of experts: the router and the products of the experts.

The router sends each token to K of E experts. The token gets their outputs,
weighted by its gates (Shazeer et al., 2017). Like `transformer.py`, this module
creates no weights.

Tokens are copied to slots, each of which belongs to an expert. The experts'
products run over the slots, and each token collects the results of its slots.
There are two layouts of the slots:

* Without a capacity, no token is dropped. The slots are sorted by expert, and a
  grouped product multiplies each slot by its expert's matrix. It is
  `lax.ragged_dot`, or on CPU, where that is slow, a loop over blocks of slots,
  each of one expert.
* With a capacity, each expert has the same number of slots in each row, and
  drops the tokens that come later in the row (Lepikhin et al., "GShard", 2020).
  The products are dense.

If the experts are split over devices, these devices exchange rows (by an
all-gather, and a reduce-scatter of the sums) or, with a capacity, slots (by two
all-to-alls).

Shapes: B batch, L length, D embed, E experts, K experts of a token, S parts
fused into one product, F mlp; T tokens B L, R slots.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from examples import transformer
from jaxline.base import counting
from jaxline.parallel import partitioning

GATES = ('softmax', 'sigmoid')
# Logical axes of the experts' matrices, [E, D, S, F] and [E, F, D].
IN_AXES = ('experts', 'embed', None, 'mlp')
OUT_AXES = ('experts', 'mlp', 'embed')

# Largest number of slots of a block on the CPU, where a loop runs over blocks.
_MAX_BLOCK = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How to route tokens.

  Attributes:
    per_token: K.
    gate: function of the router's logits: 'softmax' or 'sigmoid'.
    normalize: whether to divide the gates of a token by their sum.
    scale: factor of the gates.
    capacity: number of slots of an expert in a row, as a multiple of the number
      of tokens that it gets if tokens are spread evenly. 0 means no limit.
  """

  per_token: int
  gate: str = 'softmax'
  normalize: bool = True
  scale: float = 1.0
  capacity: float = 0.0

  def slots(self, length: int, experts: int) -> int:
    """Returns the number of slots of an expert in a row of `length` tokens."""
    slots = self.capacity * length * self.per_token / experts
    # Round first: as floats, 1.1 * 100 / 2 is a little more than 55.
    return min(length, max(math.ceil(round(slots, 6)), 1))


class Stats(NamedTuple):
  """Statistics of a layer's router over a batch, in float32.

  Attributes:
    counts_E: number of tokens that chose each expert, including dropped ones.
    dropped: fraction of the choices that found no slot.
    entropy: mean entropy of the router's distribution, in nats.
    balance: E times the sum, over experts, of the fraction of choices times the
      mean probability; 1 if all experts are equal (Fedus et al., 2021).
    z: mean square of the logits' log-sum-exp (Zoph et al., 2022).
  """

  counts_E: jax.Array
  dropped: jax.Array
  entropy: jax.Array
  balance: jax.Array
  z: jax.Array


def route(
  x_BLD: jax.Array,
  router_DE: jax.Array,
  options: Options,
  bias_E: jax.Array | None = None,
  mask_BL: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Stats]:
  """Chooses the experts of each token. The computation is in float32.

  Args:
    x_BLD: normalized input.
    router_DE: the router's matrix.
    options: how to route.
    bias_E: added to the scores for the choice, but not for the gates
      (DeepSeek-AI, 2024); see `moved_bias`.
    mask_BL: False for padding, which the statistics leave out. Padding must
      come last in a row. None means that there is no padding.

  Returns:
    The experts [B, L, K], the likeliest first and equal ones in the order of
    their numbers; their gates [B, L, K]; and statistics. Gradients flow through
    the gates, `balance` and `z`.
  """
  num = router_DE.shape[1]
  logits_BLE = jnp.einsum(
    'BLD,DE->BLE',
    x_BLD.astype(jnp.float32),
    router_DE.astype(jnp.float32),
    precision='highest',  # TPUs round the operands by default.
  )
  if options.gate == 'softmax':
    scores_BLE = probs_BLE = jax.nn.softmax(logits_BLE)
  else:
    scores_BLE = jax.nn.sigmoid(logits_BLE)
    probs_BLE = scores_BLE / (scores_BLE.sum(-1, keepdims=True) + 1e-20)
  by_BLE = jax.lax.stop_gradient(scores_BLE)
  if bias_E is not None:
    by_BLE += jax.lax.stop_gradient(bias_E)[None, None]
  _, ids_BLK = jax.lax.top_k(by_BLE, options.per_token)
  chosen_BLKE = jax.nn.one_hot(ids_BLK, num)
  # Use a masked sum: a gather's gradient is a scatter, and TPUs round products.
  gates_BLK = jnp.sum(scores_BLE[:, :, None] * chosen_BLKE, axis=-1)
  if options.normalize:
    gates_BLK /= gates_BLK.sum(-1, keepdims=True) + 1e-20
  if mask_BL is None:
    mask_BL = jnp.ones(x_BLD.shape[:2])
  mask_BL = mask_BL.astype(jnp.float32)
  weights_BL1 = mask_BL[..., None] / jnp.maximum(mask_BL.sum(), 1)
  mean = lambda x_BLX: jnp.sum(x_BLX * weights_BL1, axis=(0, 1))
  counts_BE = (chosen_BLKE * mask_BL[..., None, None]).sum((1, 2))
  counts_E = counts_BE.sum(0)
  choices = jnp.maximum(counts_E.sum(), 1)
  dropped = jnp.float32(0)
  if options.capacity:
    room = options.slots(x_BLD.shape[1], num)
    dropped = jnp.maximum(counts_BE - room, 0).sum() / choices
  entropy_E = -mean(jax.scipy.special.xlogy(probs_BLE, probs_BLE))
  z_BL1 = jax.nn.logsumexp(logits_BLE, axis=-1, keepdims=True) ** 2
  stats = Stats(
    counts_E,
    dropped,
    jax.lax.stop_gradient(entropy_E.sum()),
    num * jnp.sum(counts_E / choices * mean(probs_BLE)),
    mean(z_BL1).sum(),
  )
  return ids_BLK, gates_BLK * options.scale, stats


def moved_bias(bias: jax.Array, counts: jax.Array, rate: float) -> jax.Array:
  """Returns the next bias of routers, [..., E].

  The bias rises by `rate` for experts that got fewer tokens than the mean, and
  falls by `rate` for experts that got more (DeepSeek-AI, 2024).
  """
  return bias + rate * jnp.sign(counts.mean(-1, keepdims=True) - counts)


def mix(
  x_BLD: jax.Array,
  ids_BLK: jax.Array,
  gates_BLK: jax.Array,
  in_EDSF: jax.Array,
  out_EFD: jax.Array,
  activation: str,
  options: Options,
) -> jax.Array:
  """Returns the experts' outputs, weighted by the gates.

  Args:
    x_BLD: normalized input.
    ids_BLK: the experts, from `route`.
    gates_BLK: the gates, from `route`.
    in_EDSF: the experts' first matrices, float32.
    out_EFD: the experts' second matrices, float32.
    activation: the activation in between, one of `transformer.ACTIVATIONS`.
    options: how tokens were routed.

  Returns:
    [B, L, D], in the type of `x_BLD`.
  """
  in_EDSF, out_EFD = (w.astype(x_BLD.dtype) for w in (in_EDSF, out_EFD))
  run = functools.partial(_mix_of_device, activation, options)
  args = x_BLD, ids_BLK, gates_BLK, in_EDSF, out_EFD
  partitioner = partitioning.active()
  if partitioner is None or partitioner.mesh.size == 1:
    return run(_Split((), (), (), None), *args)
  rows, *_ = _split(partitioner, ('batch', None, None), x_BLD.shape)
  experts, _, _, mlp = _split(partitioner, IN_AXES, in_EDSF.shape)
  # Devices add up their results, so they must have the same rows. But the
  # config's rules may split rows and matrices over the same axis.
  if not set(experts) <= set(rows) and set(experts) & set(rows):
    experts = ()
  mlp = tuple(axis for axis in mlp if axis not in rows)
  # If the residual stream or the sequence is split like the hidden width, no
  # device needs the whole sum, so scatter it.
  between = _split(partitioner, transformer.BETWEEN_BLOCKS, x_BLD.shape)
  out = [rows, (), ()]
  scattered = next((i for i in (1, 2) if mlp and between[i] == mlp), None)
  if scattered is not None:
    out[scattered] = mlp
  return jax.shard_map(
    functools.partial(run, _Split(rows, experts, mlp, scattered)),
    in_specs=(
      *[jax.P(rows)] * 3,
      jax.P(experts, None, None, mlp),
      jax.P(experts, mlp, None),
    ),
    out_specs=jax.P(*out),
    check_vma=False,  # `_block_product` does not declare varying axes.
  )(*args)


def _split(
  partitioner: partitioning.Partitioner, *of: Any
) -> list[tuple[str, ...]]:
  """Returns the mesh axes that split each dimension; axes of size 1 do not."""
  sizes = partitioner.axis_sizes
  entries = [
    (x,) if isinstance(x, str) else x or () for x in partitioner.spec(*of)
  ]
  return [tuple(axis for axis in x if sizes[axis] > 1) for x in entries]


class _Split(NamedTuple):
  """The mesh axes over which the arrays of `mix` are split, or ().

  Attributes:
    rows: axes that split the batch.
    experts: axes that split the matrices by expert.
    mlp: axes that split the hidden width.
    scattered: the dimension of the result that is split like `mlp`, if any.
  """

  rows: tuple[str, ...]
  experts: tuple[str, ...]
  mlp: tuple[str, ...]
  scattered: int | None


def _mix_of_device(
  activation: str,
  options: Options,
  split: _Split,
  x_BLD: jax.Array,
  ids_BLK: jax.Array,
  gates_BLK: jax.Array,
  in_EDSF: jax.Array,
  out_EFD: jax.Array,
) -> jax.Array:
  """Computes `mix` on one device, for its rows and its experts."""
  axes = split.experts
  parts = jax.lax.axis_size(axes) if axes else 1
  here = in_EDSF.shape[0]
  # The devices over which the experts are split may have the same rows.
  has_own_rows = parts > 1 and set(axes) <= set(split.rows)
  # A gather would move less data between few parts. But then each part handles
  # all rows, and memory bounds the step (docs/reference/scale.md).
  sends = has_own_rows and options.capacity > 0
  gathers = has_own_rows and not sends
  if gathers:
    x_BLD, ids_BLK, gates_BLK = (
      jax.lax.all_gather(x, axes, axis=0, tiled=True)
      for x in (x_BLD, ids_BLK, gates_BLK)
    )
  experts = here
  if sends:
    experts = here * parts
  elif parts > 1:  # Choices of other devices' experts get no slot.
    ids_BLK -= jax.lax.axis_index(axes) * here
    ids_BLK = jnp.where((ids_BLK >= 0) & (ids_BLK < here), ids_BLK, here)
  # The number of choices for these experts if they are spread evenly.
  used = ids_BLK.size // (1 if sends else parts)
  if options.capacity:
    room = options.slots(ids_BLK.shape[1], here * parts)
    slots, product = _slots_of_rows(ids_BLK, experts, room, used)
  else:
    slots, product = _sorted_slots(ids_BLK, experts, used)

  x_TD = x_BLD.reshape(-1, x_BLD.shape[2])
  x_RD = _to_slots(x_TD, slots)
  if sends:
    x_RD = _exchange(x_RD, experts, axes, split_axis=0, concat_axis=1)
  hidden_RC = product(x_RD, in_EDSF.reshape(*in_EDSF.shape[:2], -1))
  hidden_1RSF = hidden_RC.reshape(1, -1, *in_EDSF.shape[2:])
  hidden_RF = transformer.activate(activation, hidden_1RSF)[0]
  y_RD = product(hidden_RF, out_EFD)
  if sends:
    y_RD = _exchange(y_RD, here, axes, split_axis=1, concat_axis=0)
  y_TD = jnp.einsum(
    'TKD,TK->TD',
    _from_slots(y_RD, slots),
    gates_BLK.reshape(x_TD.shape[0], -1).astype(y_RD.dtype),
    preferred_element_type=jnp.float32,
  )
  y_BLD = y_TD.astype(x_BLD.dtype).reshape(x_BLD.shape)
  if gathers:
    y_BLD = jax.lax.psum_scatter(y_BLD, axes, tiled=True)
  elif parts > 1 and not sends:
    y_BLD = jax.lax.psum(y_BLD, axes)
  if split.scattered is not None:
    return jax.lax.psum_scatter(
      y_BLD, split.mlp, scatter_dimension=split.scattered, tiled=True
    )
  return jax.lax.psum(y_BLD, split.mlp) if split.mlp else y_BLD


def _exchange(
  x_RD: jax.Array, experts: int, axes: Sequence[str], **how: int
) -> jax.Array:
  """Sends slots to the devices of their experts, or back."""
  x_ERD = x_RD.reshape(experts, -1, x_RD.shape[1])
  x_ERD = jax.lax.all_to_all(x_ERD, axes, tiled=True, **how)
  return x_ERD.reshape(-1, x_RD.shape[1])


# ---- Slots.


class _Slots(NamedTuple):
  """The slots of choices. A choice is a token with one of its experts.

  Attributes:
    slot_TK: the slot of each choice; R means no slot.
    choice_R: the choice in each slot, t K + k; T K means a free slot.
  """

  slot_TK: jax.Array
  choice_R: jax.Array


# Rows [R, C] of slots and a matrix for each expert -> [R, ...].
_Product = Callable[[jax.Array, jax.Array], jax.Array]


def _ranks(group_A: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
  """Returns the rank of each choice in its group, and the groups' sizes.

  Args:
    group_A: the group of each choice; `groups` means that it is left out.
    groups: the number of groups.
  """
  order_A = jnp.argsort(group_A, stable=True)
  sizes = jnp.bincount(group_A, length=groups + 1)
  starts = jnp.cumsum(sizes) - sizes
  ranks_A = jnp.arange(group_A.size) - starts[group_A[order_A]]
  ranks_A = jnp.zeros_like(ranks_A).at[order_A].set(ranks_A)
  return ranks_A, sizes[:groups]


def _make_slots(slot_A: jax.Array, rows: int, per_token: int) -> _Slots:
  choices = jnp.arange(slot_A.size)
  choice_R = jnp.full([rows], slot_A.size).at[slot_A].set(choices, mode='drop')
  return _Slots(slot_A.reshape(-1, per_token), choice_R)


def _slots_of_rows(
  ids_BLK: jax.Array, experts: int, room: int, used: int
) -> tuple[_Slots, _Product]:
  """Returns `room` slots for each expert and row, [E, B, room]."""
  batch, _, per_token = ids_BLK.shape
  groups = experts * batch
  group_BLK = ids_BLK * batch + jnp.arange(batch)[:, None, None]
  group_A = jnp.minimum(group_BLK.ravel(), groups)
  ranks_A, _ = _ranks(group_A, groups)
  rows = groups * room
  has_slot = (ranks_A < room) & (group_A < groups)
  slot_A = jnp.where(has_slot, group_A * room + ranks_A, rows)

  def product(x_RC: jax.Array, w_ECF: jax.Array) -> jax.Array:
    x_ERC = x_RC.reshape(w_ECF.shape[0], -1, x_RC.shape[1])
    with counting.partly_used(min(used, rows), rows):
      y_ERF = jnp.einsum('ERC,ECF->ERF', x_ERC, w_ECF)
    return y_ERF.reshape(-1, w_ECF.shape[2])

  return _make_slots(slot_A, rows, per_token), product


def _sorted_slots(
  ids_BLK: jax.Array, experts: int, used: int
) -> tuple[_Slots, _Product]:
  """Returns slots sorted by expert, with room for all choices."""
  choices, per_token = ids_BLK.size, ids_BLK.shape[2]
  group_A = ids_BLK.ravel()
  ranks_A, sizes_E = _ranks(group_A, experts)
  if transformer.platform() == 'cpu':
    # The slots of a block have one expert. Small blocks leave fewer slots free.
    block = max(1, choices // experts // 4)
    block = min(2 ** (block.bit_length() - 1), _MAX_BLOCK)
    blocks = min(choices, choices // block + experts)
    blocks_E = -(-sizes_E // block)
    ends_E = jnp.cumsum(blocks_E)
    starts_E = (ends_E - blocks_E) * block
    rows = blocks * block
    expert_N = jnp.searchsorted(ends_E, jnp.arange(blocks), side='right')
    expert_N = jnp.minimum(expert_N, experts - 1)

    def product(x_RC: jax.Array, w_ECF: jax.Array) -> jax.Array:
      x_NRC = x_RC.reshape(blocks, block, -1)
      y_NRF = _block_product((used, rows), x_NRC, w_ECF, expert_N)
      return y_NRF.reshape(rows, -1)

  else:
    starts_E, rows = jnp.cumsum(sizes_E) - sizes_E, choices

    def product(x_RC: jax.Array, w_ECF: jax.Array) -> jax.Array:
      with counting.partly_used(used, rows):
        return jax.lax.ragged_dot(x_RC, w_ECF, sizes_E)

  starts_E = jnp.append(starts_E, 0)
  slot_A = jnp.where(group_A < experts, starts_E[group_A] + ranks_A, rows)
  return _make_slots(slot_A, rows, per_token), product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block_product(
  share: tuple[int, int], x_NRC: jax.Array, w_ECF: jax.Array, expert_N: Any
) -> jax.Array:
  """Multiplies each block by its expert's matrix, in a loop."""
  # XLA's CPU compiler turns `ragged_dot` into E products of all rows.
  with counting.partly_used(*share):
    return jax.lax.map(lambda of: of[0] @ w_ECF[of[1]], (x_NRC, expert_N))


def _block_product_forward(
  share: tuple[int, int], x_NRC: jax.Array, w_ECF: jax.Array, expert_N: Any
) -> Any:
  args = x_NRC, w_ECF, expert_N
  return _block_product(share, *args), args


def _block_product_backward(
  share: tuple[int, int], args: Any, grad_NRF: jax.Array
) -> Any:
  x_NRC, w_ECF, expert_N = args

  def add(grad_ECF: jax.Array, of: Any) -> tuple[jax.Array, jax.Array]:
    x_RC, grad_RF, expert = of
    # JAX's own rule would add an array for all experts in each iteration.
    grad_CF = transformer.einsum('RC,RF->CF', x_RC, grad_RF)
    return grad_ECF.at[expert].add(grad_CF), grad_RF @ w_ECF[expert].T

  of = x_NRC, grad_NRF, expert_N
  zeros_ECF = jnp.zeros(w_ECF.shape, jnp.float32)
  with counting.partly_used(*share):
    grad_ECF, grad_NRC = jax.lax.scan(add, zeros_ECF, of)
  return grad_NRC, grad_ECF.astype(w_ECF.dtype), None


_block_product.defvjp(_block_product_forward, _block_product_backward)


# Each of the two functions below is the gradient of the other, and both gather.
# The gradients that JAX derives would scatter.


def _gather(x: jax.Array, at: jax.Array) -> jax.Array:
  """Returns rows of `x`, and zeros for indices past its end."""
  return jnp.take(x, at, axis=0, mode='fill', fill_value=0)


@jax.custom_vjp
def _to_slots(x_TD: jax.Array, slots: _Slots) -> jax.Array:
  """Returns the token in each slot, [R, D]; 0 in a free slot."""
  return _gather(x_TD, slots.choice_R // slots.slot_TK.shape[1])


@jax.custom_vjp
def _from_slots(y_RD: jax.Array, slots: _Slots) -> jax.Array:
  """Returns the row in the slot of each choice, [T, K, D]; 0 without a slot."""
  return _gather(y_RD, slots.slot_TK)


_to_slots.defvjp(
  lambda x_TD, slots: (_to_slots(x_TD, slots), slots),
  lambda slots, grad_RD: (_gather(grad_RD, slots.slot_TK).sum(1), None),
)
_from_slots.defvjp(
  lambda y_RD, slots: (_from_slots(y_RD, slots), slots),
  lambda slots, grad: (
    _gather(grad.reshape(-1, grad.shape[-1]), slots.choice_R),
    None,
  ),
)
