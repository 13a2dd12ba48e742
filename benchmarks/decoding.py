"""Decoding with a cache against a hand-written loop, and without a cache.

    python -m benchmarks.decoding

The model of configs/lm.py with its initial weights continues prompts of 200
tokens. Ours is the compiled function of `--jaxline_mode=decode`. The baselines
are `hand_tuned.greedy`, a loop with a cache for prompts of one length, and the
same model without a cache. Before timing, we check that all of them give the
same tokens. A beam of 4 is compared with the greedy loop over 4 rows, although
it has to sort and reorder as well. Tokens per second count the new tokens of
all rows, including all rows of a beam.
"""

from typing import Any

import jax
import numpy as np

from benchmarks import hand_tuned
from benchmarks import harness
from benchmarks import lm_step
from examples import decoding
from examples.lm import experiment as lm_experiment
from jaxline.parallel import placement

_PROMPT = 200
_BEAM = 4


class _Decoder:
  """Decodes batches of prompts of one length by the experiment."""

  def __init__(self, experiment: lm_experiment.Experiment, steps: int):
    self._experiment = experiment
    self._steps = steps
    self._rng = placement.put(
      jax.random.key(0), experiment.partitioner.replicated
    )

  def __call__(self, prompts: np.ndarray, method: str) -> np.ndarray:
    options = decoding.Options(
      method=method,
      max_decode_steps=self._steps,
      beam_size=_BEAM,
      scores=False,
    )
    placed = placement.put(
      (prompts, np.full(len(prompts), prompts.shape[1], np.int32)),
      self._experiment.partitioner.batch_sharding,
    )
    params = self._experiment.state.params
    decoded = self._experiment._decode(params, *placed, self._rng, options)
    return np.asarray(decoded.ids)


def _programs(experiment: lm_experiment.Experiment) -> harness.Row:
  """Counts the programs that prompts of several lengths compile."""
  options = decoding.Options(method='greedy', max_decode_steps=4)
  longest = experiment.config.model.max_length - 4
  buckets = set()
  before = experiment._decode._cache_size()
  for words in (1, 3, 6, 12, 14, 20, 24):
    prompt = 'ab c ' * words
    tokens = 1 + len(experiment.tokenizer.encode(prompt))
    padded, _ = decoding.pad_prompts(
      [np.zeros(tokens, np.int32)], rows=1, max_length=longest
    )
    buckets.add(padded.shape)
    experiment._continue([prompt], jax.random.PRNGKey(0), options)
  count = experiment._decode._cache_size() - before
  return harness.row(
    'programs for prompts of 7 lengths',
    [harness.Sample(count)],
    'buckets',
    [harness.Sample(len(buckets))],
    unit='programs',
    aim='<= 1',
  )


def rows(options: harness.Options) -> list[harness.Row]:
  """Measures greedy decoding with two batch sizes, and a beam."""
  experiment = lm_step.make_experiment('default', options.quick)
  config = experiment.config.model
  steps = min(options.pick(48, 4), config.max_length - _PROMPT)
  params = hand_tuned.from_experiment(experiment.state.params, config)
  ours = _Decoder(experiment, steps)
  loop = hand_tuned.greedy(config, steps)
  uncached = hand_tuned.greedy_uncached(config, steps, _PROMPT + steps)
  rng = np.random.default_rng(0)
  found = []

  def compare(batch: int, method: str, baselines: dict[str, Any]) -> None:
    prompts = rng.integers(1, config.vocab_size, (batch, _PROMPT), np.int32)
    rows_of = batch * (_BEAM if method == 'beam' else 1)
    repeated = np.repeat(prompts, rows_of // batch, axis=0)
    ids = ours(prompts, method)
    for baseline in baselines.values():
      theirs = np.asarray(baseline(params, repeated))
      if method == 'greedy':
        np.testing.assert_array_equal(ids[:, 0], theirs)
    sides = {'ours': lambda: ours(prompts, method)}
    for name, baseline in baselines.items():
      sides[name] = lambda fn=baseline: fn(params, repeated).block_until_ready()
    samples = harness.turns(
      {
        name: lambda fn=fn: harness.timed(fn, rows_of * steps)
        for name, fn in sides.items()
      },
      options.num_rounds(15),
    )
    for name in baselines:
      found.append(
        harness.row(
          f'{method}, batch {batch}',
          samples['ours'],
          name,
          samples[name],
          unit='tokens/s',
          aim='>= 1' if method == 'greedy' else '>= 0.9',
        )
      )

  compare(1, 'greedy', {'hand-written loop': loop, 'uncached': uncached})
  compare(16, 'greedy', {'hand-written loop': loop})
  compare(1, 'beam', {'greedy loop over 4 rows': loop})
  return [*found, _programs(experiment)]


if __name__ == '__main__':
  harness.main(rows, __doc__)
