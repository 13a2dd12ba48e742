"""Mixtures of experts: the router, and the products of the experts.

Each token goes to K of E experts, which the router chooses, and gets their
outputs, weighted by its gates (Shazeer et al., 2017). As `transformer.py`, this
has no modules and no weights.

Rows of tokens are put into slots, of which each belongs to an expert; the
experts' products run over the slots; and each token picks up its slots again.
There are two ways to lay out the slots:

* Without a capacity no token is dropped. Slots are sorted by expert, and a
  grouped product multiplies each with its expert's matrix: `lax.ragged_dot`
  where it is fast, on the CPU blocks of one expert each.
* With a capacity each expert has the same number of slots in each row, and
  drops what comes later in the row (Lepikhin et al., "GShard", 2020). The
  products are dense ones.

Devices that share the experts get each other's rows (an all-gather, and a
reduce-scatter of the sums), or with a capacity each other's slots (two
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

# Slots of a block on the CPU: at most. A block is a loop's round there.
_MAX_BLOCK = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How tokens are routed.

  Attributes:
    per_token: K.
    gate: 'softmax' or 'sigmoid' of the router's logits.
    normalize: whether the gates of a token are divided by their sum.
    scale: a factor of the gates.
    capacity: an expert has this times as many slots in a row as it gets tokens
      if all experts get equally many. With 0 it has as many as it needs.
  """

  per_token: int
  gate: str = 'softmax'
  normalize: bool = True
  scale: float = 1.0
  capacity: float = 0.0

  def slots(self, length: int, experts: int) -> int:
    """Returns the slots of an expert in a row of so many tokens."""
    slots = self.capacity * length * self.per_token / experts
    # 1.1 * 100 / 2 is a little more than 55.
    return min(length, max(math.ceil(round(slots, 6)), 1))


class Stats(NamedTuple):
  """What a layer's router did with the tokens of the batch; float32.

  Attributes:
    counts_E: tokens that chose an expert, dropped ones too.
    dropped: the part of the choices that found no slot.
    entropy: the mean entropy of the router's distribution, in nats.
    balance: E times the sum over experts of the part of the choices that it got
      and its mean probability: 1 where all are equal (Fedus et al., 2021).
    z: the mean square of the logarithm of the sum of the exponentials of the
      logits (Zoph et al., 2022).
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
  """Chooses the experts of each token; in float32.

  Args:
    x_BLD: normalised input.
    router_DE: the router's matrix.
    options: how.
    bias_E: is added to the scores for the choice, and not in the gates
      (DeepSeek-AI, 2024); see `moved_bias`.
    mask_BL: false for padding, which the statistics leave out. It must come
      last in a row. None means that there is none.

  Returns:
    The experts [B, L, K], the likeliest first; equal ones are in the order of
    their numbers. Their gates [B, L, K]. And statistics. The gates, `balance`
    and `z` have gradients.
  """
  num = router_DE.shape[1]
  logits_BLE = jnp.einsum(
    'BLD,DE->BLE',
    x_BLD.astype(jnp.float32),
    router_DE.astype(jnp.float32),
    precision='highest',  # TPUs round what they multiply.
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
  # The gradient of a gather would be a scatter, and TPUs would round a product.
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

  It rises by `rate` for experts that got less than the mean of the tokens, and
  falls for those that got more (DeepSeek-AI, 2024).
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
    x_BLD: normalised input.
    ids_BLK: the experts that `route` returns.
    gates_BLK: the gates that it returns.
    in_EDSF: the experts' first matrices, float32.
    out_EFD: their second ones.
    activation: between them, one of `transformer.ACTIVATIONS`.
    options: how.

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
  # Only devices with the same rows may add up their results. The config's rules
  # may split rows and matrices over the same axis.
  if not set(experts) <= set(rows) and set(experts) & set(rows):
    experts = ()
  mlp = tuple(axis for axis in mlp if axis not in rows)
  # Where the residual stream or the sequence is split as the hidden width is,
  # no device need have the whole sum.
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
    check_vma=False,  # `_block_product` does not declare what varies.
  )(*args)


def _split(
  partitioner: partitioning.Partitioner, *of: Any
) -> list[tuple[str, ...]]:
  """Returns the mesh axes that each dimension is really split over."""
  sizes = partitioner.axis_sizes
  entries = [
    (x,) if isinstance(x, str) else x or () for x in partitioner.spec(*of)
  ]
  return [tuple(axis for axis in x if sizes[axis] > 1) for x in entries]


class _Split(NamedTuple):
  """The mesh axes that the arrays of `mix` are split over, or ().

  Attributes:
    rows: they split the batch.
    experts: they split the matrices by expert.
    mlp: they split the hidden width.
    scattered: the dimension of the result that is split as `mlp`, if any.
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
  """Does `mix` for the rows of a device, or for its experts."""
  axes = split.experts
  parts = jax.lax.axis_size(axes) if axes else 1
  here = in_EDSF.shape[0]
  # The devices that share the experts may have the same rows.
  has_own_rows = parts > 1 and set(axes) <= set(split.rows)
  # A gather would move less between few parts. But then each part handles all
  # rows, and memory bounds the step (docs/reference/scale.md).
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
  elif parts > 1:  # What goes to the experts of others gets no slot.
    ids_BLK -= jax.lax.axis_index(axes) * here
    ids_BLK = jnp.where((ids_BLK >= 0) & (ids_BLK < here), ids_BLK, here)
  # The choices that these experts get, if all get the same.
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
  """Where choices go. A choice is a token with one of its experts.

  Attributes:
    slot_TK: the slot of each choice; R if it has none.
    choice_R: the choice of each slot, t K + k; T K if it has none.
  """

  slot_TK: jax.Array
  choice_R: jax.Array


# Rows [R, C] of slots and a matrix for each expert -> [R, ...].
_Product = Callable[[jax.Array, jax.Array], jax.Array]


def _ranks(group_A: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
  """Returns the number of each choice in its group, and the groups' sizes.

  Args:
    group_A: the group of each choice; a choice of group `groups` is left out.
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
  """Returns slots in the order of their experts, as many as choices need."""
  choices, per_token = ids_BLK.size, ids_BLK.shape[2]
  group_A = ids_BLK.ravel()
  ranks_A, sizes_E = _ranks(group_A, experts)
  if transformer.platform() == 'cpu':
    # A block has slots of one expert. Small blocks have fewer spare slots.
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
  """Multiplies each block with its expert's matrix, in a loop."""
  # XLA's CPU compiler makes of `ragged_dot` E products of all rows.
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
    # JAX's own rule would add a whole array of all experts in each round.
    grad_CF = transformer.einsum('RC,RF->CF', x_RC, grad_RF)
    return grad_ECF.at[expert].add(grad_CF), grad_RF @ w_ECF[expert].T

  of = x_NRC, grad_NRF, expert_N
  zeros_ECF = jnp.zeros(w_ECF.shape, jnp.float32)
  with counting.partly_used(*share):
    grad_ECF, grad_NRC = jax.lax.scan(add, zeros_ECF, of)
  return grad_NRC, grad_ECF.astype(w_ECF.dtype), None


_block_product.defvjp(_block_product_forward, _block_product_backward)


# Either is the other's gradient, and both gather: the gradients that JAX makes
# would scatter.


def _gather(x: jax.Array, at: jax.Array) -> jax.Array:
  """Returns rows of `x`; 0 past its end."""
  return jnp.take(x, at, axis=0, mode='fill', fill_value=0)


@jax.custom_vjp
def _to_slots(x_TD: jax.Array, slots: _Slots) -> jax.Array:
  """Returns the token of each slot, [R, D]; 0 in a slot that is free."""
  return _gather(x_TD, slots.choice_R // slots.slot_TK.shape[1])


@jax.custom_vjp
def _from_slots(y_RD: jax.Array, slots: _Slots) -> jax.Array:
  """Returns the row in the slot of each choice, [T, K, D]; 0 without one."""
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
