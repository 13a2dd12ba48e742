"""Tests of decoding, with a model small enough to enumerate.

Its logits depend on every token before, which it knows from its cache only:

    logits(x_0 .. x_p) = sum over j of table[p - j, x_j]

so that a row at a wrong place, or the cache of another one, gives other tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import decoding

VOCAB, LONGEST = 4, 12
TABLE = np.random.default_rng(0).normal(size=[LONGEST, VOCAB, VOCAB]) * 1.5
PROMPTS = [[1], [2, 0, 1], [3, 3, 1, 0, 2]]


def step_fn(cache, tokens_BL, start_B):
  """Runs the model; the cache holds the tokens themselves, [1, B, M]."""
  positions_BL = start_B[:, None] + jnp.arange(tokens_BL.shape[1])[None]
  rows_B1 = jnp.arange(len(tokens_BL))[:, None]
  cache = {'x': cache['x'].at[0, rows_B1, positions_BL].set(tokens_BL)}
  back_BLM = positions_BL[..., None] - jnp.arange(LONGEST)[None, None]
  logits_BLMV = jnp.asarray(TABLE, jnp.float32)[
    back_BLM, cache['x'][0][:, None]
  ]
  return jnp.where(back_BLM[..., None] >= 0, logits_BLMV, 0).sum(2), cache


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _decode(prompts_BT, lengths_B, rng, options, batch, positions_axis):
  # What an empty cache holds does not matter.
  cache = {'x': jnp.full([1, batch, LONGEST], 3, jnp.int32)}
  return decoding.decode(
    step_fn,
    cache,
    prompts_BT,
    lengths_B,
    options,
    rng,
    cache_axis=1,
    positions_axis=positions_axis,
  )


def decode(prompts, seed=0, length=5, positions_axis=2, **options):
  """Returns NumPy arrays (ids, lengths, scores)."""
  ids = np.full([len(prompts), length], 2, np.int32)  # Padding is no token.
  for i, prompt in enumerate(prompts):
    ids[i, : len(prompt)] = prompt
  options = decoding.Options(**{'max_decode_steps': 4} | options)
  lengths = np.array([*map(len, prompts)], np.int32)
  return jax.device_get(
    _decode(
      ids, lengths, jax.random.key(seed), options, len(prompts), positions_axis
    )
  )


def logprobs(prefix):
  """Returns the log probabilities of the next token, in float64."""
  logits = sum(TABLE[len(prefix) - 1 - j, x] for j, x in enumerate(prefix))
  return logits - np.log(np.exp(logits).sum())


def score(prompt, tokens):
  return sum(
    logprobs([*prompt, *tokens[:i]])[token] for i, token in enumerate(tokens)
  )


def trimmed(decoded, row):
  """Returns the continuations of a row, as tuples."""
  pairs = [*zip(decoded.ids[row], decoded.lengths[row], strict=True)]
  assert not any(ids[length:].any() for ids, length in pairs)
  return [tuple(ids[:length].tolist()) for ids, length in pairs]


# Greedy.


@pytest.mark.parametrize(
  ('method', 'stop_ids'),
  [('greedy', ()), ('greedy', (0, 3)), ('sample', (0, 3))],
)
def test_the_likeliest_is_taken_until_it_stops(method, stop_ids):
  found = decode(PROMPTS, method=method, temperature=0, stop_ids=stop_ids)
  for row, prompt in enumerate(PROMPTS):
    tokens = []
    while len(tokens) < 4 and not {*tokens} & {*stop_ids}:
      tokens.append(int(logprobs([*prompt, *tokens]).argmax()))
    assert trimmed(found, row) == [tuple(tokens)]
    assert found.scores[row, 0] == pytest.approx(score(prompt, tokens), 1e-5)
  # Rows stop at steps of their own.
  assert not stop_ids or len({*found.lengths[:, 0].tolist()}) > 1


def test_scores_are_made_where_they_are_asked_for_or_sort():
  sample = {'method': 'sample', 'num_samples': 2, 'temperature': 0.5}
  for options, has_scores in (
    ({'method': 'greedy', 'stop_ids': (0,)}, False),
    ({**sample, 'sort_samples': False}, False),
    (sample, True),
    ({'method': 'beam'}, True),
  ):
    full = decode(PROMPTS, **options)
    found = decode(PROMPTS, scores=False, **options)
    np.testing.assert_array_equal(found.ids, full.ids)
    np.testing.assert_array_equal(found.scores, full.scores * has_scores)


# Samples.

DRAWS = 4000


def test_samples_follow_the_softmax_at_its_temperature():
  found = decode(
    [[2, 0, 1]],
    method='sample',
    max_decode_steps=2,
    top_k=2,
    temperature=3.0,
    num_samples=DRAWS,
  )
  ids = found.ids[0]

  def probs(prefix):
    probs = np.exp(logprobs(prefix) / 3.0)
    probs[probs.argsort()[:-2]] = 0
    return probs / probs.sum()

  first = probs([2, 0, 1])
  expected = [first[x] * probs([2, 0, 1, x]) for x in range(VOCAB)]
  expected = np.concatenate(expected)
  drawn = ids[:, 0] * VOCAB + ids[:, 1]
  counts = np.bincount(drawn, minlength=expected.size)
  possible = expected > 0
  assert counts[~possible].sum() == 0
  expected = DRAWS * expected[possible]
  chi2 = ((counts[possible] - expected) ** 2 / expected).sum()
  p_value = jax.scipy.special.gammaincc((expected.size - 1) / 2, chi2 / 2)
  assert p_value > 1e-3
  # A score is the model's own, whatever is drawn from.
  scores = [score([2, 0, 1], tokens) for tokens in ids[:20].tolist()]
  np.testing.assert_allclose(found.scores[0, :20], scores, rtol=1e-5)


RISING = [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
  ('options', 'probs', 'kept'),
  [
    ({'top_k': 2}, [0.3, 0.1, 0.3, 0.3], [0, 2]),  # Of equals the first.
    ({'top_k': 9}, RISING, [0, 1, 2, 3]),
    ({'top_k': 0, 'top_p': 0.65}, RISING, [2, 3]),
    ({'top_k': 0, 'top_p': 1e-9}, RISING, [3]),
    # Of the two that are left, the first has 4/7.
    ({'top_k': 2, 'top_p': 0.55}, RISING, [3]),
    # The temperature comes last; else these were 1, 4, 9, 16 of 30.
    ({'top_k': 0, 'top_p': 0.8, 'temperature': 0.5}, RISING, [1, 2, 3]),
  ],
)
def test_top_k_top_p_and_temperature(options, probs, kept):
  options = decoding.Options(method='sample', max_decode_steps=1, **options)
  found = decoding.choices(jnp.log(jnp.asarray(probs)), options)
  logits, ids = map(np.asarray, found)
  assert sorted(ids[np.isfinite(logits)].tolist()) == kept
  expected = np.log(probs)[ids] / options.temperature
  expected = np.where(np.isin(ids, kept), expected, -np.inf)
  np.testing.assert_allclose(logits, expected, rtol=1e-5)


def test_samples_are_sorted_by_their_scores():
  sample = functools.partial(
    decode, PROMPTS, method='sample', top_k=0, temperature=3.0, num_samples=8
  )
  found, drawn = sample(), sample(sort_samples=False)
  assert (np.diff(drawn.scores) > 0).any()
  for row in range(len(PROMPTS)):
    order = np.argsort(-drawn.scores[row], kind='stable')
    for sorted_, unsorted in zip(found, drawn, strict=True):
      np.testing.assert_array_equal(sorted_[row], unsorted[row][order])


def test_a_sample_depends_on_its_row_and_number_only():
  sample = functools.partial(
    decode, method='sample', top_k=0, temperature=3.0, num_samples=8
  )
  found, beside = sample(PROMPTS), sample([[3, 3], [2, 0, 1], [1]])
  assert trimmed(found, 1) == trimmed(beside, 1)
  # The samples of a row differ, as do those of rows with the same prompt, and
  # those of another seed.
  same = sample([[2, 0, 1]] * 3)
  assert len(set(trimmed(same, 0))) > 4
  assert trimmed(same, 0) != trimmed(same, 1)
  assert trimmed(same, 0) != trimmed(sample([[2, 0, 1]] * 3, seed=1), 0)


# Beams.


def beam(prompt, size, steps, stop_ids, alpha):
  """The search in words: lists, and no early end."""

  def best_first(found):
    return sorted(found, key=lambda x: score(prompt, x), reverse=True)

  live, finished = [()], []
  for _ in range(steps):
    behind = [[(*tokens, x) for x in range(VOCAB)] for tokens in live]
    for found in behind if stop_ids else ():
      ends = [tokens for tokens in found if tokens[-1] in stop_ids]
      finished.append(best_first(ends)[0])
    candidates = [x for found in behind for x in best_first(found)[:size]]
    candidates = [x for x in candidates if x[-1] not in stop_ids]
    live = best_first(candidates)[:size]
  return sorted(
    finished or live,
    key=lambda x: score(prompt, x) / ((5 + len(x)) / 5) ** alpha,
    reverse=True,
  )[:size]


@pytest.mark.parametrize(
  ('size', 'stop_ids', 'positions_axis', 'steps'),
  [(3, (0,), 2, 5), (2, (3, 0), 2, 5), (3, (), None, 5), (3, (0,), 2, 1)],
)
@pytest.mark.parametrize('prompts', [PROMPTS, PROMPTS[1:2]])
def test_a_narrow_beam(size, stop_ids, positions_axis, steps, prompts):
  alpha = 2.0  # With two beams, a bound that is too low ends the search early.
  found = decode(
    prompts,
    method='beam',
    beam_size=size,
    max_decode_steps=steps,
    stop_ids=stop_ids,
    length_norm_alpha=alpha,
    positions_axis=positions_axis,
  )
  for row, prompt in enumerate(prompts):
    expected = beam(prompt, size, steps, stop_ids, alpha)
    missing = size - len(expected)  # After one step, there is one stop.
    assert trimmed(found, row) == expected + [()] * missing
    assert np.isneginf(found.scores[row]).sum() == missing


def test_a_beam_is_that_of_praxis():
  """Praxis 1.4.0 (jax 0.4.26, Python 3.10), beam_search.beam_search.

  BeamSearchHParams with these values, and eos_id for stop_ids. The logits
  depend on the position of a token and on the token itself, by this table.
  """
  n = np.arange(8 * 6 * 6)
  table = np.float32(0.3 * np.sin(n * n * 0.37 + 0.5)).reshape(8, 6, 6)
  # The stop is one of the three tokens that are looked at behind each.
  options = {'beam_size': 3, 'stop_ids': (1,), 'max_decode_steps': 5}

  def step_fn(cache, tokens_BL, start_B):
    positions_BL = start_B[:, None] + jnp.arange(tokens_BL.shape[1])[None]
    return jnp.asarray(table)[positions_BL, tokens_BL], cache

  options = decoding.Options(method='beam', length_norm_alpha=0.8, **options)
  decode = functools.partial(decoding.decode, step_fn, options=options)
  found = jax.jit(functools.partial(decode, cache_axis=1))(
    {'x': jnp.zeros([1, 2])}, jnp.array([[1, 3], [4, 0]]), jnp.array([2, 2])
  )
  assert trimmed(found, 0) == [(1,), (4, 1), (3, 1)]
  assert trimmed(found, 1) == [(1,), (4, 1), (2, 1)]
  scores = found.scores / decoding.length_norm(found.lengths, 0.8)
  of_praxis = [
    [-1.3587567, -2.3807368, -2.9129982],
    [-1.8515825, -2.3637433, -2.6324401],
  ]
  np.testing.assert_allclose(scores, of_praxis, rtol=1e-5)


# What is refused, and prompts.


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'method': 'beams'}, r"method is 'beams'; expected one of .*'beam'"),
    ({'max_decode_steps': 2.0}, 'max_decode_steps is 2.0; .* integer'),
    ({'top_p': 0}, r'top_p is 0; .* number in \(0, 1\]'),
    ({'num_samples': 2}, "num_samples is 2; .*method='sample', not 'greedy'"),
    ({'stop_ids': 3}, r'stop_ids is 3; .*\(0, 10\)'),
    ({'stop_ids': (-1,)}, r'stop_ids is \(-1,\)'),
  ],
)
def test_wrong_options_are_refused_by_name(options, said):
  with pytest.raises(ValueError, match=said):
    decoding.Options(**{'method': 'greedy', 'max_decode_steps': 1} | options)


def test_what_cannot_be_decoded_is_refused():
  options = decoding.Options(
    method='sample', max_decode_steps=1, stop_ids=[0, 1]
  )
  one, none = jnp.zeros([1, 1], jnp.int32), jnp.zeros([1, 0], jnp.int32)
  for prompts, said in ((one, 'rng is None'), (none, r'shape \(1, 0\)')):
    with pytest.raises(ValueError, match=said):
      decoding.decode(
        step_fn, {}, prompts, jnp.ones([1]), options, cache_axis=1
      )


def test_prompts_are_padded_to_few_shapes():
  pad = functools.partial(decoding.pad_prompts, max_length=100)
  prompts_BT, lengths_B = pad([[5, 6, 7], np.array([8])], rows=3)
  expected = np.zeros([3, 32], np.int32)
  expected[0, :3], expected[1, 0] = [5, 6, 7], 8
  np.testing.assert_array_equal(prompts_BT, expected, strict=True)
  np.testing.assert_array_equal(lengths_B, np.int32([3, 1, 1]), strict=True)
  for size, shape in ((32, 32), (33, 64), (65, 100), (100, 100)):
    assert pad([[1] * size], rows=1)[0].shape == (1, shape)
  for prompts, said in (
    ([[1], [1] * 101], r'Prompt 2 of 2 has 101 tokens.*to 100'),
    ([[]], 'The prompt has 0 tokens'),
  ):
    with pytest.raises(ValueError, match=said):
      pad(prompts, rows=1)


class Words:
  """A tokenizer as SentencePiece's: no space in front of a text."""

  words = ['', 'a', ' b', ' c', 'X']

  def encode(self, text):
    return np.array([self.words.index(' b' if x == 'b' else x) for x in text])

  def decode(self, ids):
    # X changes the word before.
    return ''.join(self.words[i] for i in ids).lstrip().replace('bX', 'd')


def texts(decoded, prompts, start_id=None, **options):
  """Continues texts by a model that returns `decoded`, in three rows."""
  seen = []

  def run(prompts_BT, lengths_B):
    seen.append(prompts_BT[:, :3].tolist())
    return decoding.Decoded(*map(np.array, decoded))

  found = decoding.continue_texts(
    run,
    prompts,
    decoding.Options(**{'method': 'greedy', 'max_decode_steps': 2} | options),
    tokenizer=Words(),
    start_id=start_id,
    max_length=6,
    rows=3,
  )
  return found, seen


def test_texts_go_on_with_texts():
  decoded = (
    [[[3, 3], [4, 3]], [[2, 3], [1, 0]], [[1, 1]] * 2],
    [[2, 2], [1, 0], [2, 2]],
    [[-1.0, -2.0], [-3.0, -np.inf], [-4.0, -5.0]],
  )
  found, seen = texts(decoded, ['ab', 'a'], 9, method='beam', beam_size=2)
  assert seen == [[[9, 1, 2], [9, 1, 0], [0, 0, 0]]]
  assert found == [
    [
      {'text': ' c c', 'score': -1.0, 'tokens': 2},
      {'text': 'X c', 'score': -2.0, 'tokens': 2},
    ],
    # What a beam has not found is left out.
    [{'text': ' b', 'score': -3.0, 'tokens': 1}],
  ]
  with pytest.raises(ValueError, match=r'max_decode_steps is 6.*the 6 tokens'):
    texts(decoded, ['a'], max_decode_steps=6)
  # Without a token before it. The token that stops it counts, and is no text.
  decoded = [[[3, 4]]], [[2]], [[0.0]]
  found, seen = texts(decoded, ['ab'], stop_ids=(4,))
  assert seen[0][0] == [1, 2, 0]
  assert found == [[{'text': ' c', 'score': 0.0, 'tokens': 2}]]
  with pytest.raises(ValueError, match=r'prompt has 0 tokens.*some text'):
    texts(decoded, [''])
