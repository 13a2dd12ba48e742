"""Golden runs: one run of each kind, of six steps.

Each folder of tests/golden/runs has the losses of all steps and evaluations.
tests/promises/test_golden.py compares them with those of the same run, which it
ends in the sixth step and resumes from the checkpoint of step 3. They were
recorded with jax 0.10.2 on an x86_64 CPU with two devices, before checkpoints,
inputs and the training loop were rebuilt; all but `pax` once more when the
schedule of examples/lm and examples/image was moved by one step. To record them
again would make the test worthless: add others instead, whose expected.json is
what `numbers` returns.

The working directory must be the repository: `files` is a relative path.
"""

import dataclasses
import pathlib
from typing import Any

from tests import remains

FOLDER = pathlib.Path(__file__).resolve().parent / 'runs'
SAVED, LAST = 3, 6


@dataclasses.dataclass(frozen=True)
class Run:
  """How a run is started."""

  config: str
  kwargs: dict[str, Any]  # Overrides below `experiment_kwargs.config`.
  overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
  processes: int = 1  # How many share the two devices.
  optional: str = 'jax'  # The package without which it cannot run.


_LM = {
  'model.num_layers': 1, 'model.embed_dim': 8, 'model.num_heads': 2,
  'model.mlp_dim': 8, 'model.max_length': 16,
  # What configs/lm.py had when they were recorded.
  'model.vocab_size': 257, 'model.normalize_embedding': False,
  'model.bigram_rows': 0, 'model.tie_embeddings': True, 'b2': 0.95,
  'tokenizer': 'bytes', 'decay': 'cosine', 'final_learning_rate': 0.05,
  'files': 'tests/golden/text', 'documents': 'line', 'batch_size': 2,
  'length': 16, 'eval_batch_size': 4, 'eval_batches': 2, 'sample_length': 4,
}  # fmt: skip
_PAX = {
  'constants.NUM_LAYERS': 1, 'constants.MODEL_DIMS': 8,
  'constants.HIDDEN_DIMS': 16, 'constants.NUM_HEADS': 2,
  'constants.DIMS_PER_HEAD': 4, 'constants.MAX_SEQ_LEN': 16,
  'constants.PERCORE_BATCH_SIZE': 2,
}  # fmt: skip
_IMAGE = {
  'model.stem_channels': 4, 'model.blocks_per_group': '(1,)',
  'model.channels_per_group': '(4,)', 'model.strides': '(1,)',
  'train_batch_size': 8,
}  # fmt: skip

RUNS = {
  'lm': Run('configs/lm.py', _LM, {'sharding': 'fsdp'}),
  'lm_two_processes': Run(
    'configs/lm.py', _LM | {'packing': 'packed'}, processes=2
  ),
  'pax': Run(
    'configs/c4.py:C4Spmd1BAdam4Replicas:reduced',
    _PAX,
    {
      'experiment_class': 'examples.pax.experiment:Experiment',
      'data': 'tests/golden/text',
      'best_model_eval_metric': '',
    },
    optional='fiddle',
  ),
  'image': Run('configs/image.py', _IMAGE, optional='sklearn'),
}


def flags(name: str, directory: pathlib.Path) -> list[str]:
  """Returns the flags of a run; its mode is train_and_eval."""
  run = RUNS[name]
  values = {
    'checkpoint_dir': directory,
    'training_steps': LAST,
    'save_checkpoint_interval': SAVED,
    'eval_interval': SAVED,
    'log_tensors_interval': 1,
    'log_train_data_interval': 1,
    **{f'experiment_kwargs.config.{k}': v for k, v in run.kwargs.items()},
    **run.overrides,
  }
  overrides = [f'--config.{key}={value}' for key, value in values.items()]
  return [f'--config={run.config}', *overrides]


def numbers(directory: pathlib.Path) -> dict[str, list[Any]]:
  """Returns the [step, loss] of each record, for 'train' and 'eval'."""
  return {
    mode: [
      [record['step'], record[key]]
      for record in remains.curve(directory, mode)
      for key in ('loss', 'total_loss')
      if key in record
    ]
    for mode in ('train', 'eval')
  }
