"""Continues prompts greedily, by sampling or by beam search.

You pass the model as a function

    step_fn(cache, tokens_BL, start_B) -> (logits_BLV, cache)

which runs it on the next L tokens of each row. The function must follow this
contract:

- `tokens_BL` is int32. The tokens of row b have the positions `start_B[b]`,
  `start_B[b] + 1` and so on; `start_B` is int32 [B].
- `cache` is a pytree of arrays, in which the rows are the axis `cache_axis`
  (examples/lm: [B, G, M, K], axis 0). The function returns it with the same
  shapes and types. At the positions of the given tokens, it overwrites the data
  that later tokens need, such as keys and values. A token sees no positions
  after its own, because they may hold padding. There are
  T + max_decode_steps - 1 positions. If an encoder has an output for each row,
  put it into the cache too, because decoding repeats and reorders rows along
  `cache_axis`.
- `logits_BLV` is float32: the logits of the token after each given one.
- The function is pure. It is traced twice: for the prompts, with L = T - 1 and
  B rows, and in the body of a loop, with L = 1 and R rows. The logits of the
  prompts are not used, so XLA leaves out the product that makes them.

Shapes: B prompts, T prompt length, N continuations of a prompt, R = B x N rows,
S max_decode_steps, V vocab, K candidates; L and M as above.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxline import errors
from jaxline.base import keys
from jaxline.inputs import tokenization

# (cache, tokens_BL, start_B) -> (logits_BLV, cache)
StepFn = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]

METHODS = ('greedy', 'sample', 'beam')
# Prompts are padded to at least this length, so short ones share one program.
_SHORTEST = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How to decode.

  Attributes:
    method: 'greedy' takes the likeliest token each time (the first of equally
      likely ones, and token 0 if a logit is NaN); 'sample' draws each token;
      'beam' searches for the likeliest continuation as a whole.
    max_decode_steps: largest number of tokens of a continuation.
    temperature: for 'sample': divisor of the logits; 0 takes the likeliest
      token.
    top_k: for 'sample': draw from this number of likeliest tokens (Fan et al.,
      2018); 0 means all. 40 is the default of Pax.
    top_p: for 'sample': of the `top_k` tokens, draw from the smallest set whose
      probabilities sum to at least `top_p` (Holtzman et al., 2020). As in
      Praxis, these are probabilities among the `top_k` tokens, before the
      temperature is applied. Several other libraries apply the temperature
      first: one below 1 then keeps fewer tokens, and one above 1 more.
    num_samples: for 'sample': number of continuations of each prompt.
    sort_samples: for 'sample': whether to sort the continuations of a prompt by
      score, the best first, as Praxis does. Without sorting, each single
      continuation is a fair sample.
    beam_size: for 'beam': number of hypotheses kept for each prompt.
    length_norm_alpha: for 'beam': see `length_norm`; 0 favors short ones.
    stop_ids: tokens that end a continuation. If there are any, 'beam' returns
      only continuations that end with one of them.
    scores: whether to compute scores even if decoding does not need them. They
      cost one more pass over the vocabulary per token. If False, they are 0.
  """

  method: str
  max_decode_steps: int
  temperature: float = 1.0
  top_k: int = 40
  top_p: float = 1.0
  num_samples: int = 1
  sort_samples: bool = True
  beam_size: int = 4
  length_norm_alpha: float = 0.8
  stop_ids: tuple[int, ...] = ()
  scores: bool = True

  def __post_init__(self) -> None:
    if self.method not in METHODS:
      self._refuse('method', f'one of {METHODS}')
    keys.check_attributes(
      self,
      max_decode_steps=keys.integer(min=1),
      temperature=keys.number(min=0),
      top_k=keys.integer(min=0),
      top_p=keys.number(above=0, max=1),
      num_samples=keys.integer(min=1),
      beam_size=keys.integer(min=1),
      length_norm_alpha=keys.number(min=0),
    )
    if self.num_samples > 1 and self.method != 'sample':
      self._refuse('num_samples', f"1, or method='sample', not {self.method!r}")
    ids = self.stop_ids
    if not isinstance(ids, Sequence) or not all(
      type(i) is int and i >= 0 for i in ids
    ):
      self._refuse('stop_ids', 'a tuple of tokens, such as (0, 10)')
    # A config may hold a list, but options of compiled programs are hashed.
    object.__setattr__(self, 'stop_ids', tuple(ids))

  def _refuse(self, key: str, expected: str) -> None:
    raise ValueError(f'{key} is {getattr(self, key)!r}; expected {expected}.')

  @property
  def num_continuations(self) -> int:
    """N, the number of continuations of each prompt."""
    return self.beam_size if self.method == 'beam' else self.num_samples


class Decoded(NamedTuple):
  """Continuations of prompts, the best first; see `Options.sort_samples`.

  Attributes:
    ids: int32 [B, N, S]: the tokens without the prompt, padded with 0.
    lengths: int32 [B, N]: the number of tokens, including the one that ends
      the continuation.
    scores: float32 [B, N]: the sum of the tokens' log probabilities in nats,
      before temperature, top_k and top_p. If 'beam' finds fewer than N
      continuations, the others have score -inf and length 0.
  """

  ids: jax.Array
  lengths: jax.Array
  scores: jax.Array


def decode(
  step_fn: StepFn,
  cache: Any,
  prompts_BT: jax.Array,
  lengths_B: jax.Array,
  options: Options,
  rng: jax.Array | None = None,
  *,
  cache_axis: int,
  positions_axis: int | None = None,
) -> Decoded:
  """Continues prompts; a pure function, which you jit.

  Each row continues from its position and stops independently. The loop ends
  when the last row has stopped.

  Args:
    step_fn: runs the model; see the module.
    cache: a cache for B rows, with any content.
    prompts_BT: int32, padded on the right; T is at least 1.
    lengths_B: int32, the number of tokens of each prompt, at least 1.
    options: how to decode.
    rng: a key, raw or typed; 'sample' needs one. The draws of a sample depend
      only on the key and on the numbers of the row, the sample and the step,
      not on the rest of the batch.
    cache_axis: the axis of the rows in the cache's arrays.
    positions_axis: the axis of the positions in all of the cache's arrays. If
      given, a beam reorders only the positions after the prompts.

  Returns:
    The continuations.
  """
  batch, length = prompts_BT.shape
  if length < 1:
    raise ValueError(
      f'prompts_BT has shape {prompts_BT.shape}; expected at least one token'
      ' per prompt, such as one that begins a document.'
    )
  if options.method == 'sample' and rng is None:
    raise ValueError("method is 'sample', but rng is None; expected a key.")
  if length > 1:
    # Leave out the last column: the loop starts with the last token of each
    # prompt and computes its logits. In a shorter prompt, this token is in the
    # other columns too, and is computed twice with the same result.
    _, cache = step_fn(cache, prompts_BT[:, :-1], jnp.zeros([batch], jnp.int32))
  start_B = lengths_B - 1
  token_B = jnp.take_along_axis(prompts_BT, start_B[:, None], axis=1)[:, 0]
  repeats = options.num_continuations

  def repeat(x: jax.Array, axis: int = 0) -> jax.Array:
    return x if repeats == 1 else jnp.repeat(x, repeats, axis)

  token_R, start_R = repeat(token_B), repeat(start_B)
  cache = jax.tree.map(lambda x: repeat(x, cache_axis), cache)

  def next_logits(
    cache: Any, token_R: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, Any]:
    logits_R1V, cache = step_fn(cache, token_R[:, None], start_R + step)
    return logits_R1V[:, 0], cache

  if options.method == 'beam':
    axes = cache_axis, positions_axis
    return _beam(next_logits, cache, token_R, start_B, options, axes)
  return _sample(next_logits, cache, token_R, options, rng)[0]


def extend(
  step_fn: StepFn,
  cache: Any,
  token_B: jax.Array,
  start_B: jax.Array,
  options: Options,
  rng: jax.Array,
) -> tuple[Decoded, Any]:
  """Continues rows by some tokens, and returns the cache for the next call.

  Args:
    step_fn: runs the model; see the module.
    cache: the cache of all tokens before `token_B`.
    token_B: int32, the last token of each row.
    start_B: int32, the positions of these tokens.
    options: how to decode: 'greedy' or 'sample', with one continuation per row.
    rng: a key, different in each call.
  """

  def next_logits(
    cache: Any, token_B: jax.Array, step: jax.Array
  ) -> tuple[jax.Array, Any]:
    logits_B1V, cache = step_fn(cache, token_B[:, None], start_B + step)
    return logits_B1V[:, 0], cache

  return _sample(next_logits, cache, token_B, options, rng)


def _sample(
  next_logits: Callable[..., tuple[jax.Array, Any]],
  cache: Any,
  token_R: jax.Array,
  options: Options,
  rng: jax.Array | None,
) -> tuple[Decoded, Any]:
  """Decodes by taking or drawing one token at a time; returns the cache too."""
  rows, steps = len(token_R), options.max_decode_steps
  draws = options.method == 'sample' and options.temperature > 0
  sorts = options.num_samples > 1 and options.sort_samples
  scored = options.scores or sorts
  if draws:
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys_B = fold(rng, jnp.arange(rows // options.num_samples))
    keys_BN = jax.vmap(fold, in_axes=(0, None))(
      keys_B, jnp.arange(options.num_samples)
    )
    keys_R = keys_BN.reshape((rows, *keys_BN.shape[2:]))

  def choose(logits_RV: jax.Array, step: jax.Array) -> jax.Array:
    if not draws:
      return _argmax(logits_RV)

    def draw(key: jax.Array, logits_V: jax.Array) -> jax.Array:
      logits_K, ids_K = choices(logits_V, options)
      return ids_K[
        jax.random.categorical(jax.random.fold_in(key, step), logits_K)
      ]

    return jax.vmap(draw)(keys_R, logits_RV)

  def is_running(state: Any) -> jax.Array:
    step, _, _, has_stopped_R, _ = state
    return (step < steps) & ~has_stopped_R.all()

  def advance(state: Any) -> Any:
    step, cache, token_R, has_stopped_R, (ids_RS, lengths_R, scores_R) = state
    logits_RV, cache = next_logits(cache, token_R, step)
    token_R = jnp.where(has_stopped_R, 0, choose(logits_RV, step))
    if scored:
      logprob_R1 = _logprobs(
        jnp.take_along_axis(logits_RV, token_R[:, None], axis=1), logits_RV
      )
      scores_R += jnp.where(has_stopped_R, 0, logprob_R1[:, 0])
    decoded = (
      ids_RS.at[:, step].set(token_R),
      lengths_R + jnp.where(has_stopped_R, 0, 1),
      scores_R,
    )
    has_stopped_R |= _is_stop(token_R, options)
    return step + 1, cache, token_R, has_stopped_R, decoded

  _, cache, _, _, decoded = jax.lax.while_loop(
    is_running,
    advance,
    (
      jnp.int32(0),
      cache,
      token_R,
      jnp.zeros([rows], bool),
      (
        jnp.zeros([rows, steps], jnp.int32),
        jnp.zeros([rows], jnp.int32),
        jnp.zeros([rows], jnp.float32),
      ),
    ),
  )
  shape = (rows // options.num_samples, options.num_samples)
  found = Decoded(*(x.reshape(shape + x.shape[1:]) for x in decoded))
  if sorts:
    _, order_BN = jax.lax.top_k(found.scores, options.num_samples)
    found = jax.tree.map(
      lambda x: jax.vmap(lambda x, order: x[order])(x, order_BN), found
    )
  return found, cache


def choices(
  logits_V: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
  """Returns the candidates of 'sample', at a temperature above 0.

  Args:
    logits_V: float32, the logits of all tokens.
    options: how to decode.

  Returns:
    The logits of the candidates, [K], and the candidates, int32 [K]. The logits
    are divided by the temperature, and -inf for tokens that `top_p` excludes. K
    is `top_k`, or V. Of equally likely tokens, the first are taken.
  """
  size = len(logits_V)
  if not options.top_k and options.top_p == 1:
    return logits_V / options.temperature, jnp.arange(size, dtype=jnp.int32)
  logits_K, ids_K = jax.lax.top_k(logits_V, min(options.top_k or size, size))
  if options.top_p < 1:
    probs_K = jax.nn.softmax(logits_K)
    before_K = jnp.cumsum(probs_K) - probs_K
    # Always keep the first, because sums are not exact.
    is_out_K = (before_K >= options.top_p).at[0].set(False)
    logits_K = jnp.where(is_out_K, -jnp.inf, logits_K)
  return logits_K / options.temperature, ids_K


def _argmax(logits_RV: jax.Array) -> jax.Array:
  """Returns the likeliest tokens [R], faster than `jnp.argmax`."""
  size = logits_RV.shape[-1]
  # If there is a NaN, it is the maximum, and nothing is less than NaN.
  is_less = logits_RV < logits_RV.max(axis=-1, keepdims=True)
  tokens_1V = jnp.arange(size, dtype=jnp.int32)[None]
  return jnp.where(is_less, size, tokens_1V).min(axis=-1)


def _logprobs(some_RK: jax.Array, logits_RV: jax.Array) -> jax.Array:
  """Returns `jax.nn.log_softmax` of some of the logits."""
  top_R1 = logits_RV.max(axis=-1, keepdims=True)
  total_R1 = jnp.exp(logits_RV - top_R1).sum(axis=-1, keepdims=True)
  return some_RK - top_R1 - jnp.log(total_R1)


def _is_stop(tokens: jax.Array, options: Options) -> jax.Array:
  is_stop = jnp.zeros(tokens.shape, bool)
  for token in options.stop_ids:
    is_stop |= tokens == token
  return is_stop


def length_norm(lengths: jax.Array, alpha: float) -> jax.Array:
  """Returns the divisor of a score of 'beam': ((5 + length) / 5)^alpha.

  Scores are sums, which favor short continuations. The formula is from Wu et
  al. (2016), except for a constant factor.

  Args:
    lengths: integers of any shape: number of tokens, including the stop.
    alpha: 0 changes nothing; with 1, scores are almost means per token.

  Returns:
    An array of float32 of the same shape.
  """
  return ((5 + lengths.astype(jnp.float32)) / 5) ** alpha


def _beam(
  next_logits: Callable[..., tuple[jax.Array, Any]],
  cache: Any,
  token_R: jax.Array,
  start_B: jax.Array,
  options: Options,
  axes: tuple[int, int | None],
) -> Decoded:
  """Beam search, as in Praxis (Google, 2022).

  A live hypothesis can continue; a finished one has ended. In each step, each
  live hypothesis, followed by its likeliest stop, becomes a finished one. Then
  the search scores the N likeliest next tokens of each live hypothesis, except
  stops. The N best results are the live hypotheses of the next step. The search
  keeps the N finished hypotheses with the best score / `length_norm`. It ends
  when no live hypothesis can become one of these. Without stops, the live
  hypotheses of the last step are the finished ones.
  """
  size, steps = options.beam_size, options.max_decode_steps
  batch = len(token_R) // size
  cache_axis, positions_axis = axes

  def normalized(scores: jax.Array, lengths: jax.Array) -> jax.Array:
    return scores / length_norm(lengths, options.length_norm_alpha)

  def pick(x: jax.Array, rows_N: jax.Array, axis: int = 0) -> jax.Array:
    return jnp.take(x, rows_N, axis=axis, mode='clip')

  take = jax.vmap(pick)  # Picks rows of [N, ...] for each prompt.

  def reorder(x: jax.Array, rows_BN: jax.Array) -> jax.Array:
    def of_prompt(
      x: jax.Array, rows_N: jax.Array, start: jax.Array
    ) -> jax.Array:
      if positions_axis is None:
        return pick(x, rows_N, cache_axis)
      # The rows of a prompt differ only after it.
      new = jax.lax.dynamic_slice_in_dim(x, start, steps, positions_axis)
      return jax.lax.dynamic_update_slice_in_dim(
        x, pick(new, rows_N, cache_axis), start, positions_axis
      )

    if batch == 1:  # XLA would copy these positions once more for a `vmap`.
      return of_prompt(x, rows_BN[0], start_B[0])
    shape = x.shape
    # Reorder within each prompt, so that no row moves to a different device.
    x = x.reshape(*shape[:cache_axis], batch, size, *shape[cache_axis + 1 :])
    return jax.vmap(of_prompt, in_axes=(cache_axis, 0, 0), out_axes=cache_axis)(
      x, rows_BN, start_B
    ).reshape(shape)

  def is_running(state: Any) -> jax.Array:
    step, _, _, (_, live_scores), (_, lengths, scores) = state
    # A score can only fall, and its divisor is largest at the full length.
    hope_B = normalized(live_scores.max(axis=1), jnp.int32(steps))
    worst_B = normalized(scores, lengths).min(axis=1)
    return (step < steps) & (hope_B > worst_B).any()

  def advance(state: Any) -> Any:
    step, cache, token_R, (live_ids, live_scores), finished = state
    logits_RV, cache = next_logits(cache, token_R, step)
    vocab = logits_RV.shape[-1]

    def logprobs(some_RK: jax.Array) -> jax.Array:
      return _logprobs(some_RK, logits_RV).reshape(batch, size, -1)

    best_RK, tokens_RK = jax.lax.top_k(logits_RV, min(size, vocab))
    best_BNK = logprobs(best_RK)
    tokens_BNK = tokens_RK.reshape(best_BNK.shape)
    best_BNK = jnp.where(_is_stop(tokens_BNK, options), -jnp.inf, best_BNK)
    totals = (live_scores[:, :, None] + best_BNK).reshape(batch, -1)
    best_BN, places_BN = jax.lax.top_k(totals, size)
    parents_BN = places_BN // best_BNK.shape[-1]
    tokens_BN = jnp.take_along_axis(
      tokens_BNK.reshape(batch, -1), places_BN, axis=1
    )
    ids = take(live_ids, parents_BN).at[:, :, step].set(tokens_BN)
    if options.stop_ids:
      stops = jnp.array(options.stop_ids, jnp.int32)
      # A stop outside of the vocabulary is never chosen.
      stop_BNS = logprobs(
        logits_RV.at[:, stops].get(mode='fill', fill_value=-jnp.inf)
      )
      stop_BN = stops[stop_BNS.argmax(axis=-1)]
      ended = live_ids.at[:, :, step].set(stop_BN)
      ended_scores = live_scores + stop_BNS.max(axis=-1)
    else:
      ended = ids
      ended_scores = jnp.where(step == steps - 1, best_BN, -jnp.inf)

    pool = jax.tree.map(
      lambda old, new: jnp.concatenate([old, new], axis=1),
      finished,
      (ended, jnp.full_like(tokens_BN, step + 1), ended_scores),
    )
    # `top_k` takes the first of equals, so missing hypotheses keep length 0.
    _, kept_BN = jax.lax.top_k(normalized(pool[2], pool[1]), size)
    finished = jax.tree.map(lambda x: take(x, kept_BN), pool)
    cache = jax.tree.map(lambda x: reorder(x, parents_BN), cache)
    return step + 1, cache, tokens_BN.reshape(-1), (ids, best_BN), finished

  empty_ids = jnp.zeros([batch, size, steps], jnp.int32)
  none = jnp.full([batch, size], -jnp.inf, jnp.float32)
  *_, finished = jax.lax.while_loop(
    is_running,
    advance,
    (
      jnp.int32(0),
      cache,
      token_R,
      # All hypotheses are equal at first, so only one of them counts.
      (empty_ids, none.at[:, 0].set(0)),
      (empty_ids, jnp.zeros([batch, size], jnp.int32), none),
    ),
  )
  return Decoded(*finished)


def pad_prompts(
  prompts: Sequence[Sequence[int] | np.ndarray], *, rows: int, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Pads prompts to a batch with one of few shapes.

  Args:
    prompts: the tokens of each prompt, at least one.
    rows: B is a multiple of this number, such as the number of devices that
      share a batch. Additional rows have one token, 0.
    max_length: largest number of tokens of a prompt.

  Returns:
    Tokens int32 [B, T], padded with 0, and their numbers int32 [B]. T is a
    power of two, or `max_length`.

  Raises:
    errors.UsageError: a prompt is empty or too long. The error ends a run with
      one line instead of a traceback.
  """
  for i, prompt in enumerate(prompts):
    if not 1 <= len(prompt) <= max_length:
      what_to_do = 'Shorten it.' if len(prompt) else 'Give it some text.'
      number = f'Prompt {i + 1} of {len(prompts)}'
      raise errors.UsageError(
        f'{number if len(prompts) > 1 else "The prompt"} has {len(prompt)}'
        f' tokens; expected 1 to {max_length}. {what_to_do}'
      )
  longest = max(map(len, prompts))
  length = max(1 << (longest - 1).bit_length(), _SHORTEST)
  batch = -(-len(prompts) // rows) * rows
  prompts_BT = np.zeros([batch, min(length, max_length)], np.int32)
  lengths_B = np.ones([batch], np.int32)
  for i, prompt in enumerate(prompts):
    prompts_BT[i, : len(prompt)] = prompt
    lengths_B[i] = len(prompt)
  return prompts_BT, lengths_B


def longest_prompt(options: Options, max_length: int) -> int:
  """Returns the largest number of tokens that a prompt may have.

  Args:
    options: how to decode.
    max_length: number of tokens that the model can see.

  Raises:
    errors.UsageError: there is no room for a prompt.
  """
  longest = max_length - options.max_decode_steps
  if longest < 1:
    raise errors.UsageError(
      f'max_decode_steps is {options.max_decode_steps}, which leaves nothing of'
      f' the {max_length} tokens that the model can see for a prompt; expected'
      f' at most {max_length - 1}.'
    )
  return longest


def continue_texts(
  run: Callable[[np.ndarray, np.ndarray], Decoded],
  prompts: Sequence[Any],
  options: Options,
  *,
  tokenizer: tokenization.Tokenizer,
  start_id: int | None,
  max_length: int,
  rows: int,
  encode: Callable[[Any], np.ndarray] | None = None,
) -> list[list[dict[str, Any]]]:
  """Continues texts with texts, as an experiment's `decode` must.

  Args:
    run: `(prompts_BT, lengths_B) -> Decoded`, such as `decode` with these
      options.
    prompts: at least one prompt.
    options: how to decode.
    tokenizer: the tokenizer of the model.
    start_id: the token before each prompt; None means that there is none.
    max_length: number of tokens that the model can see, including the
      `max_decode_steps` new ones.
    rows: see `pad_prompts`.
    encode: function that returns the tokens of a prompt, without `start_id`;
      None means `tokenizer.encode`.

  Returns:
    The continuations of each prompt, the best first. Each has 'text', without
    the token that ended it, 'score' (see `Decoded`) and the number of 'tokens'.

  Raises:
    errors.UsageError: a prompt is too long or has no tokens, or there is no
      room for a prompt.
  """
  longest = longest_prompt(options, max_length)
  start = np.array([] if start_id is None else [start_id], np.int32)
  encode = encode or tokenizer.encode
  encoded = [np.append(start, encode(prompt)) for prompt in prompts]
  decoded = jax.device_get(
    run(*pad_prompts(encoded, rows=rows, max_length=longest))
  )
  return [
    [
      {
        'text': new_text(
          tokenizer,
          tokens[len(start) :],
          ids[: length - (ids[length - 1] in options.stop_ids)],
        ),
        **({'score': float(score)} if options.scores else {}),
        'tokens': int(length),
      }
      for ids, length, score in zip(*row, strict=True)
      if length
    ]
    # Rows after the prompts only fill the batch.
    for tokens, *row in zip(encoded, *decoded, strict=False)
  ]


def new_text(
  tokenizer: tokenization.Tokenizer, old: np.ndarray, new: np.ndarray
) -> str:
  """Returns the text of new tokens that follow old ones."""
  # Decode both together: a first word may lose the space before it.
  before = tokenizer.decode(old)
  whole = tokenizer.decode(np.concatenate([old, new]))
  if whole.startswith(before):
    return whole[len(before) :]
  return tokenizer.decode(new)  # The new tokens changed the old text's end.
