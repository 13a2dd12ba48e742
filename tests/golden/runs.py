"""Golden runs: one run of each kind, of six steps.

    python tests/golden/runs.py NAME DIRECTORY

Each folder of tests/golden/runs has the losses of all steps and evaluations.
tests/promises/test_golden.py kills each run after its fifth step, resumes it
from the checkpoint of step 3, and compares the losses. They were recorded with
jax 0.10.2 on an x86_64 CPU, before checkpoints, inputs and the training loop
were rebuilt; all but `pax` once more when the schedule of examples/lm and
examples/image was moved by one step. To record them again would make the test
worthless: add others instead, whose expected.json is what `numbers` returns.

The working directory must be the repository: `files` is a relative path.
"""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / 'tests' / 'golden' / 'runs'
SAVED, KILLED, LAST = 3, 5, 6


@dataclasses.dataclass(frozen=True)
class Run:
  """How a run is started.

  Attributes:
    experiment_class: 'module:Class'.
    config: the config file.
    kwargs: overrides below `experiment_kwargs.config`.
    overrides: further flags.
    processes: how many share the two devices.
    optional: the package without which it cannot run.
  """

  experiment_class: str
  config: str
  kwargs: dict[str, Any]
  overrides: tuple[str, ...] = ()
  processes: int = 1
  optional: str = 'jax'


_LM = {
  'model.num_layers': 1,
  'model.embed_dim': 8,
  'model.num_heads': 2,
  'model.mlp_dim': 8,
  'model.max_length': 16,
  # What configs/lm.py had when they were recorded.
  'model.vocab_size': 257,
  'model.normalize_embedding': False,
  'model.bigram_rows': 0,
  'model.tie_embeddings': True,
  'b2': 0.95,
  'tokenizer': 'bytes',
  'decay': 'cosine',
  'final_learning_rate': 0.05,
  'files': 'tests/golden/text',
  'documents': 'line',
  'batch_size': 2,
  'length': 16,
  'eval_batch_size': 4,
  'eval_batches': 2,
  'sample_length': 4,
}

RUNS = {
  'lm': Run(
    'examples.lm.experiment:Experiment',
    'configs/lm.py',
    _LM,
    ('--config.sharding=fsdp',),
  ),
  'lm_two_processes': Run(
    'examples.lm.experiment:Experiment',
    'configs/lm.py',
    {**_LM, 'packing': 'packed'},
    processes=2,
  ),
  # Expects the losses of `lm`. The heads and the hidden width are split over
  # the processes.
  'lm_tensor_parallel': Run(
    'examples.lm.experiment:Experiment',
    'configs/lm.py',
    _LM,
    ('--config.sharding=fsdp_tp', '--config.mesh.ici.mdl=2'),
    processes=2,
  ),
  'pax': Run(
    'examples.pax.experiment:Experiment',
    'configs/c4.py:C4Spmd1BAdam4Replicas:reduced',
    {
      'constants.NUM_LAYERS': 1,
      'constants.MODEL_DIMS': 8,
      'constants.HIDDEN_DIMS': 16,
      'constants.NUM_HEADS': 2,
      'constants.DIMS_PER_HEAD': 4,
      'constants.MAX_SEQ_LEN': 16,
      'constants.PERCORE_BATCH_SIZE': 2,
    },
    (
      '--config.data=tests/golden/text',
      '--config.best_model_eval_metric=',
    ),
    optional='fiddle',
  ),
  'image': Run(
    'examples.image.experiment:Experiment',
    'configs/image.py',
    {
      'model.stem_channels': 4,
      'model.blocks_per_group': '(1,)',
      'model.channels_per_group': '(4,)',
      'model.strides': '(1,)',
      'train_batch_size': 8,
    },
    optional='sklearn',
  ),
}


def start(
  name: str, directory: str, *kill: str
) -> subprocess.CompletedProcess[str]:
  """Trains a run in processes of its own.

  Args:
    name: one of `RUNS`.
    directory: the run's; a run that is there is resumed.
    *kill: 'kill' kills the run after its fifth step.

  Returns:
    The ended process, with its output.
  """
  run = RUNS[name]
  command = [sys.executable, __file__, name, directory, *kill]
  devices = 2 // run.processes
  if run.processes > 1:
    command = [
      sys.executable,
      '-m',
      'jaxline.launch',
      f'--processes={run.processes}',
      f'--devices-per-process={devices}',
      '--',
      *command,
    ]
  return subprocess.run(
    command,
    cwd=REPOSITORY,
    env={
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
      'PYTHONPATH': str(REPOSITORY),
    },
    capture_output=True,
    text=True,
    check=False,
  )


def numbers(directory: str | pathlib.Path) -> dict[str, list[Any]]:
  """Returns the [step, loss] of each record, for 'train' and 'eval'."""
  found: dict[str, list[Any]] = {}
  for path in sorted(pathlib.Path(directory).glob('*/metrics.jsonl')):
    lines = map(json.loads, path.read_text(encoding='utf-8').splitlines())
    found[path.parent.name] = [
      [record['step'], record[key]]
      for record in lines
      for key in ('loss', 'total_loss')
      if key in record
    ]
  return found


def _train(name: str, directory: str, *kill: str) -> None:
  """Trains a run in this process; see `start`."""
  import importlib

  from jaxline import platform

  run = RUNS[name]
  module, _, cls = run.experiment_class.partition(':')
  saved = pathlib.Path(directory, 'checkpoints', 'latest', f'{SAVED}.json')

  class Golden(getattr(importlib.import_module(module), cls)):  # type: ignore[misc]
    """Kills itself after a step, if told to."""

    def train_loop(self, config, state, periodic_actions, writer=None):  # type: ignore[no-untyped-def]
      def end(t: float, step: int, scalars: Any) -> None:
        del t, scalars
        if step == KILLED and kill:
          while not saved.exists():
            time.sleep(0.05)
          os.kill(os.getpid(), signal.SIGKILL)

      end.update_time = lambda *_: None  # type: ignore[attr-defined]
      end.wait_to_finish = lambda: None  # type: ignore[attr-defined]
      super().train_loop(config, state, [*periodic_actions, end], writer)

  Golden.__qualname__ = cls
  argv = [
    f'--config={run.config}',
    '--jaxline_mode=train_and_eval',
    f'--config.checkpoint_dir={directory}',
    f'--config.training_steps={LAST}',
    f'--config.save_checkpoint_interval={SAVED}',
    f'--config.eval_interval={SAVED}',
    '--config.log_tensors_interval=1',
    '--config.log_train_data_interval=1',
    *(f'--config.experiment_kwargs.config.{k}={v}'
      for k, v in run.kwargs.items()),
    *run.overrides,
  ]  # fmt: skip
  sys.argv[1:] = argv  # Where ml_collections looks for overrides.
  platform.main(Golden, argv)


if __name__ == '__main__':
  _train(*sys.argv[1:])
