"""The regression on several processes: one of them, as a program.

Arguments: coordinator's address, number of processes, this process, sharding.
Prints as JSON what this process sees.
"""

import json
import sys

from experiments import regression
import jax

from jaxline import utils

STEPS = 6
# Rows of each evaluation batch of each process: uneven, and one more batch.
EVAL_SIZES = ((5, 5, 2), (4, 3))
# A process that has nothing to evaluate.
EMPTY_EVAL_SIZES = ((4,), ())


class Input(regression.Input):
  """Of the global batches, the rows of this process."""

  def __next__(self):
    batch = super().__next__()
    rows = self.batch_size // jax.process_count()
    first = rows * jax.process_index()
    return {name: x[first : first + rows] for name, x in batch.items()}


class Regression(regression.Drawing):
  """The regression, each process with its own part of the data."""

  def train_input(self):
    return Input(self.batch_size)

  def eval_input(self):
    process = jax.process_index()
    first = sum(sum(sizes) for sizes in self.eval_sizes[:process])
    for rows in self.eval_sizes[process]:
      yield regression.examples(1, rows, first)
      first += rows


def run(sharding):
  """Trains, evaluates, saves and restores in memory; returns what was seen."""
  experiment = Regression(
    'train', jax.random.PRNGKey(0), sharding=sharding, eval_sizes=EVAL_SIZES
  )
  losses = regression.train_steps(experiment, STEPS // 2)
  checkpointer = utils.InMemoryCheckpointer(regression.get_config(0), 'train')
  checkpointer.get_experiment_state('x').experiment_module = experiment
  checkpointer.save('x')
  regression.train_steps(experiment, 2)
  checkpointer.restore('x')
  losses += regression.train_steps(experiment, STEPS - STEPS // 2)
  result = {
    'losses': [float(row['loss']) for row in losses],
    'rows': [float(row['rows']) for row in losses],
    'eval': [regression.evaluate(experiment) for _ in range(2)],
    'programs': experiment.compiled_eval_step._cache_size(),
    'shards': [
      shard.data.shape
      for shard in experiment.state.params['w'].addressable_shards
    ],
  }
  experiment.eval_sizes = EMPTY_EVAL_SIZES
  try:
    regression.evaluate(experiment)
  except ValueError as e:
    result['empty'] = str(e)
  return result


if __name__ == '__main__':
  address, num_processes, process, *shardings = sys.argv[1:]
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    address,
    int(num_processes),
    int(process),
    initialization_timeout=60,
  )
  print(json.dumps([run(sharding) for sharding in shardings]), flush=True)
  jax.distributed.shutdown()
