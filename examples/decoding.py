"""Decoding: continues prompts greedily, by sampling or by beam search.

The model is given as a function

    step_fn(cache, tokens_BL, start_B) -> (logits_BLV, cache)

which runs it over L further tokens of each row, and keeps this contract:

- `tokens_BL` int32: those of row b have the positions `start_B[b]`,
  `start_B[b] + 1` and so on; `start_B` is int32, [B].
- `cache` is a pytree of arrays, each with the rows as its axis `cache_axis`
  (examples/lm: [B, G, M, K], axis 0); it is returned with the same shapes
  and types. The function writes what later tokens need of these tokens at their
  positions, over earlier content. A token sees the positions up to its own and
  no later ones, which may hold padding. There are T + max_decode_steps - 1
  positions. The output of an encoder for a row belongs in the cache too: rows
  are repeated and reordered along that axis.
- `logits_BLV` float32: of the token that follows each one.
- It is pure, and traced twice: for the prompts, with L = T - 1 and unused
  logits, so that XLA leaves out their product; and in the body of a loop, with
  L = 1 and, for N continuations of a prompt, N times the rows.

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
# Shorter prompts are not told apart: one program serves them all.
_SHORTEST = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """How to decode.

  Attributes:
    method: 'greedy' takes the likeliest token each time, of equals the first,
      and 0 where a logit is NaN; 'sample' draws it;
      'beam' looks for the likeliest continuation as a whole.
    max_decode_steps: the most tokens of a continuation.
    temperature: of 'sample': logits are divided by it; 0 takes the likeliest.
    top_k: of 'sample': draw from so many of the likeliest tokens (Fan et al.,
      2018); 0 is all. 40 is the default of Pax.
    top_p: of 'sample': of these draw from the fewest whose probabilities, among
      these and before the temperature, add up to at least this (Holtzman et
      al., 2020). As in Praxis; several other libraries apply the temperature
      first, which keeps fewer tokens below 1 and more above.
    num_samples: of 'sample': continuations of each prompt.
    sort_samples: of 'sample': sort the continuations of a prompt by their
      scores, the best first, as Praxis does. Otherwise each of them alone is a
      fair sample.
    beam_size: of 'beam': hypotheses kept for each prompt.
    length_norm_alpha: of 'beam': see `length_norm`; 0 prefers short ones.
    stop_ids: tokens with which a continuation ends. If there are any, 'beam'
      returns only continuations that end with one.
    scores: whether scores are returned also where nothing else needs them: they
      cost another pass over the vocabulary for each token. 0 stands for none.
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
    # A config may hold a list, and what is compiled for is hashed.
    object.__setattr__(self, 'stop_ids', tuple(ids))

  def _refuse(self, key: str, expected: str) -> None:
    raise ValueError(f'{key} is {getattr(self, key)!r}; expected {expected}.')

  @property
  def num_continuations(self) -> int:
    """N, the continuations of each prompt."""
    return self.beam_size if self.method == 'beam' else self.num_samples


class Decoded(NamedTuple):
  """Continuations of prompts, the best first; see `Options.sort_samples`.

  Attributes:
    ids: int32 [B, N, S]: the tokens, without the prompt, and 0 behind them.
    lengths: int32 [B, N]: how many; the one that stopped it is among them.
    scores: float32 [B, N]: the sum of the tokens' log probabilities in nats, by
      the model (before temperature, top_k and top_p). Of 'beam', -inf (and
      length 0) stands where there are fewer than N.
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
  """Continues prompts; pure, to be jitted by the caller.

  Each row goes on at its own position and ends by itself; the loop ends with
  the last of them.

  Args:
    step_fn: runs the model; see the module.
    cache: for B rows. What it holds does not matter.
    prompts_BT: int32, padded on the right; T is at least 1.
    lengths_B: int32, tokens of each prompt, at least 1.
    options: how.
    rng: a key, raw or typed; 'sample' needs one. The draws of a sample depend
      on it, on the row's number, the sample's and the step's, and not on what
      else is in the batch.
    cache_axis: the axis of the rows in the cache's arrays.
    positions_axis: the axis of the positions in all of the cache's arrays. With
      it, a beam reorders only the positions behind the prompts.

  Returns:
    The continuations.
  """
  batch, length = prompts_BT.shape
  if length < 1:
    raise ValueError(
      f'prompts_BT has shape {prompts_BT.shape}; expected a token at least,'
      ' such as one that begins a document.'
    )
  if options.method == 'sample' and rng is None:
    raise ValueError("method is 'sample', but rng is None; expected a key.")
  if length > 1:
    # The last token of each prompt is the loop's first: it comes again, with
    # the same result, and no other position's logits are ever made.
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
  """Continues rows by some tokens, and returns the cache for the next ones.

  Args:
    step_fn: runs the model; see the module.
    cache: the cache of all tokens before `token_B`.
    token_B: int32, the last token of each row.
    start_B: int32, its position.
    options: how: 'greedy' or 'sample', with one continuation of each row.
    rng: a key, a new one each time.
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
  """Takes a token at a time, likeliest or drawn; returns the cache too."""
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
  """Returns what 'sample' draws from, at a temperature above 0.

  Args:
    logits_V: float32, of all tokens.
    options: how.

  Returns:
    Logits [K], after the temperature, -inf where `top_p` leaves a token out;
    and whose they are, int32 [K]. K is `top_k`, or V; of equals the first.
  """
  size = len(logits_V)
  if not options.top_k and options.top_p == 1:
    return logits_V / options.temperature, jnp.arange(size, dtype=jnp.int32)
  logits_K, ids_K = jax.lax.top_k(logits_V, min(options.top_k or size, size))
  if options.top_p < 1:
    probs_K = jax.nn.softmax(logits_K)
    before_K = jnp.cumsum(probs_K) - probs_K
    # The first stays: sums are not exact.
    is_out_K = (before_K >= options.top_p).at[0].set(False)
    logits_K = jnp.where(is_out_K, -jnp.inf, logits_K)
  return logits_K / options.temperature, ids_K


def _argmax(logits_RV: jax.Array) -> jax.Array:
  """Returns the likeliest tokens [R], in less time than `jnp.argmax`."""
  size = logits_RV.shape[-1]
  # Nothing is less than NaN, which is the maximum where there is one.
  is_less = logits_RV < logits_RV.max(axis=-1, keepdims=True)
  tokens_1V = jnp.arange(size, dtype=jnp.int32)[None]
  return jnp.where(is_less, size, tokens_1V).min(axis=-1)


def _logprobs(some_RK: jax.Array, logits_RV: jax.Array) -> jax.Array:
  """Returns what `jax.nn.log_softmax` makes of some of the logits."""
  top_R1 = logits_RV.max(axis=-1, keepdims=True)
  total_R1 = jnp.exp(logits_RV - top_R1).sum(axis=-1, keepdims=True)
  return some_RK - top_R1 - jnp.log(total_R1)


def _is_stop(tokens: jax.Array, options: Options) -> jax.Array:
  is_stop = jnp.zeros(tokens.shape, bool)
  for token in options.stop_ids:
    is_stop |= tokens == token
  return is_stop


def length_norm(lengths: jax.Array, alpha: float) -> jax.Array:
  """What 'beam' divides a score by: ((5 + length) / 5)^alpha.

  Scores are sums, and favour the short. Wu et al. (2016), but for a constant.

  Args:
    lengths: integers, any shape; tokens of a continuation, its stop included.
    alpha: 0 changes nothing, 1 is nearly the mean a token.

  Returns:
    float32, the same shape.
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

  Each step ends every live hypothesis with the likeliest of the stops: that is
  a finished one. Then it looks at the N likeliest tokens behind each live
  hypothesis, leaves out stops, and keeps the N best by score as the live ones
  of the next step. Of the finished, the N best by score over `length_norm` are
  kept. The search ends where no live hypothesis can become one of them. Without
  stops, the live ones of the last step are the finished.
  """
  size, steps = options.beam_size, options.max_decode_steps
  batch = len(token_R) // size
  cache_axis, positions_axis = axes

  def normalized(scores: jax.Array, lengths: jax.Array) -> jax.Array:
    return scores / length_norm(lengths, options.length_norm_alpha)

  def pick(x: jax.Array, rows_N: jax.Array, axis: int = 0) -> jax.Array:
    return jnp.take(x, rows_N, axis=axis, mode='clip')

  take = jax.vmap(pick)  # Of each prompt's [N, ..] those rows.

  def reorder(x: jax.Array, rows_BN: jax.Array) -> jax.Array:
    def of_prompt(
      x: jax.Array, rows_N: jax.Array, start: jax.Array
    ) -> jax.Array:
      if positions_axis is None:
        return pick(x, rows_N, cache_axis)
      # The rows of a prompt differ behind it only.
      new = jax.lax.dynamic_slice_in_dim(x, start, steps, positions_axis)
      return jax.lax.dynamic_update_slice_in_dim(
        x, pick(new, rows_N, cache_axis), start, positions_axis
      )

    shape = x.shape
    # By prompt, so that where prompts are split over devices none is sent.
    x = x.reshape(*shape[:cache_axis], batch, size, *shape[cache_axis + 1 :])
    return jax.vmap(of_prompt, in_axes=(cache_axis, 0, 0), out_axes=cache_axis)(
      x, rows_BN, start_B
    ).reshape(shape)

  def is_running(state: Any) -> jax.Array:
    step, _, _, (_, live_scores), (_, lengths, scores) = state
    # A score only falls; what it is divided by is at most that of the longest.
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
      # A stop that is no token of the model is never found.
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
    # Of equals the first: so what is not there has length 0.
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
      # All alike: one of them counts.
      (empty_ids, none.at[:, 0].set(0)),
      (empty_ids, jnp.zeros([batch, size], jnp.int32), none),
    ),
  )
  return Decoded(*finished)


def pad_prompts(
  prompts: Sequence[Sequence[int] | np.ndarray], *, rows: int, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
  """Makes a batch of prompts of different lengths, of one of few shapes.

  Args:
    prompts: the tokens of each, at least one.
    rows: B is a multiple of it, such as the devices that share a batch. Rows
      that only fill up have one token, 0.
    max_length: the most tokens of a prompt.

  Returns:
    Tokens int32 [B, T], 0 behind them, and their counts int32 [B]. T is a power
    of two, or `max_length`.

  Raises:
    errors.UsageError: a prompt is empty, or too long. It ends the run in
      a line, without a traceback.
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
  """Returns how many tokens a prompt may have.

  Args:
    options: how it is continued.
    max_length: tokens that the model can see.

  Raises:
    errors.UsageError: there is no room for any.
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
  """Continues texts with texts: what an experiment's `decode` returns.

  Args:
    run: `(prompts_BT, lengths_B) -> Decoded`, as `decode` with these options.
    prompts: at least one.
    options: how.
    tokenizer: of the model.
    start_id: the token in front of each prompt; None is none.
    max_length: tokens that the model can see, `max_decode_steps` among them.
    rows: see `pad_prompts`.
    encode: returns the tokens of a prompt, which follow `start_id`; None means
      `tokenizer.encode`.

  Returns:
    For each prompt its continuations, the best first: 'text', without the token
    that stopped it, 'score' (see `Decoded`) and 'tokens', their number.

  Raises:
    errors.UsageError: a prompt is too long, or has no token; or there is no
      room for any.
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
    # Behind the prompts there may be rows that fill up.
    for tokens, *row in zip(encoded, *decoded, strict=False)
  ]


def new_text(
  tokenizer: tokenization.Tokenizer, old: np.ndarray, new: np.ndarray
) -> str:
  """Returns the text of new tokens behind old ones."""
  # Together: alone, a tokenizer's first word may lose the space before it.
  before = tokenizer.decode(old)
  whole = tokenizer.decode(np.concatenate([old, new]))
  if whole.startswith(before):
    return whole[len(before) :]
  return tokenizer.decode(new)  # The new ones changed the end of the old.
