r"""Runs a registered experiment, as Pax's documents do.

    python -m examples.pax.main \
      --exp=tasks.lm.params.lm_cloud.LmCloudSpmd2BLimitSteps \
      --job_log_dir=/tmp/lm --reduced

It runs `experiment.py` with a config made from the experiment
(`examples.pax.config`). It passes on other flags, such as
`--config.training_steps=10` and `--jaxline_ensure_tpu`. Each constant of the
experiment is a flag, such as `--NUM_LAYERS=2`.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import re
import subprocess
import sys
import time

from examples.pax import automl
from examples.pax import config as config_lib
from examples.pax import experiment_registry
from jaxline import errors
from jaxline import platform
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.run_directory import notes
from jaxline.run_directory import store as store_lib
from jaxline.runs import __main__ as runs_main

MODES = {
  'train': 'train, and evaluate periodically if there is data for it',
  'eval': 'evaluate each new checkpoint of --job_log_dir',
  'decode': 'continue prompts with each new checkpoint (--config.decode.*)',
  'decode_once': 'continue prompts with the newest checkpoint',
  'sweep': 'train each point of @automl.parameter_sweep; --index=N: only one',
  'compile': 'compile the steps for the chips of the experiment, and report'
  ' what they need; train nothing',
}

_PROGRAM = '-m examples.pax.main'
_CONFIG = pathlib.Path(__file__).with_name('config.py')

# Flags in Pax's first commands. The first has no effect here. libtpu 0.0.52
# aborts the process for the other two.
_PMAP_USE_TENSORSTORE = re.compile(r'--(no)?pmap_use_tensorstore(=|$)')
_GONE_TPU_FLAGS = (
  'xla_tpu_spmd_rewrite_einsum_with_reshape',
  'jax_enable_async_collective_offload',
)

# How often `--mode=decode` looks for a new checkpoint, in seconds.
_POLL_SECS = 5.0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog=f'python {_PROGRAM}',
    usage=argparse.SUPPRESS,  # Keeps error messages to one line.
    allow_abbrev=False,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    description=__doc__,
    epilog='modes:\n'
    + '\n'.join(f'  {name:<12} {text}' for name, text in MODES.items()),
  )
  add = parser.add_argument
  add('--exp', help='the experiment, such as tasks.lm.params.c4.NAME, or NAME')
  add('--job_log_dir', help='directory of the run; an existing run continues')
  add('--mode', default='train', choices=MODES, help='what to do; see below')
  add(
    '--reduced',
    action='store_true',
    help='use a small model of the same family: a minute on two cores',
  )
  add('--list', action='store_true', help='print the experiments and exit')
  return parser


def _drop_gone_flags(arguments: list[str]) -> list[str]:
  """Drops flags that only Pax has, with a message; the environment's too."""
  kept = [x for x in arguments if not _PMAP_USE_TENSORSTORE.match(x)]
  if kept != arguments:
    print(
      '--pmap_use_tensorstore has no effect: here, replicated and split weights'
      ' have the same checkpoints.',
      file=sys.stderr,
    )
  flags = os.environ.get('LIBTPU_INIT_ARGS', '').split()
  gone = [f for f in flags if f.lstrip('-').split('=')[0] in _GONE_TPU_FLAGS]
  if gone:
    os.environ['LIBTPU_INIT_ARGS'] = ' '.join(f for f in flags if f not in gone)
    print(
      f'LIBTPU_INIT_ARGS: left out {" ".join(gone)}, which libtpu no longer'
      ' knows.',
      file=sys.stderr,
    )
  return kept


def main(argv: Sequence[str]) -> None:
  """Runs a command line: `argv` has no name of the program."""
  parser = _parser()
  args, others = parser.parse_known_args(argv)
  names = map(experiment_registry.short_name, experiment_registry.get_all())
  if args.list:
    print('\n'.join(names))
    return
  if args.exp is None:
    parser.error('\n  '.join(['Choose an experiment with --exp:', *names]))
  try:
    experiment = experiment_registry.get(args.exp)
    others = [
      # Replaces the flag of a constant by the key of the config that holds it.
      re.sub(
        r'^--([A-Z][A-Z0-9_]*)(?==|$)',
        lambda match: f'--config.{config_lib.key_of(experiment, match[1])}',
        argument,
      )
      for argument in _drop_gone_flags(others)
    ]
  except errors.UsageError as e:
    parser.error(str(e))
  if args.job_log_dir is None and args.mode not in ('train', 'compile'):
    parser.error(f'--mode={args.mode} needs the --job_log_dir of a run.')
  if args.mode == 'sweep':
    sys.exit(_sweep(experiment, args, others))
  if args.mode.startswith('decode') and not experiment.has_prompting():
    parser.error(
      f'--mode={args.mode} continues text, but {experiment.__name__} does not'
      ' override `prompting`. Use a language model.'
    )
  if args.mode == 'decode':
    if not any(x.startswith('--config.decode.prompts') for x in others):
      parser.error(
        '--mode=decode continues the same prompts with each checkpoint. Give'
        ' --config.decode.prompts=FILE, or use --mode=decode_once, which can'
        ' ask for prompts.'
      )
    _decode_each(args, others)
    return
  mode = args.mode
  if mode == 'train' and experiment.EVAL_INTERVAL_STEPS is not None:
    mode = 'train_and_eval'
  flags = [
    _config_flag(args),
    f'--jaxline_mode={"decode" if mode == "decode_once" else mode}',
  ]
  if args.job_log_dir is not None:
    others.insert(0, f'--config.checkpoint_dir={args.job_log_dir}')
  # Config flags read overrides from argv, and messages show it as the command
  # to start. It names the module, because the path would not find the package.
  sys.argv = [_PROGRAM, *flags, *others]
  # A run builds the commands that it prints at its end from orig_argv. There,
  # each key of the config needs a single flag, so that a new value replaces it.
  sys.orig_argv = [
    *(sys.executable, *_PROGRAM.split(), f'--exp={args.exp}'),
    *(['--reduced'] if args.reduced else []),
    *_joined(others),
  ]
  platform.main(None, sys.argv[1:])


def _joined(arguments: Sequence[str]) -> list[str]:
  """Returns `--flag=value` for each `--flag value`."""
  joined: list[str] = []
  for argument in arguments:
    if argument.startswith('--') or not joined:
      joined.append(argument)
    else:
      joined[-1] += f'={argument}'
  return joined


def _config_flag(args: argparse.Namespace) -> str:
  """Returns the `--config` flag of an experiment."""
  return f'--config={_CONFIG}:{args.exp}' + (':reduced' if args.reduced else '')


def _sweep(
  experiment: experiment_registry.Experiment,
  args: argparse.Namespace,
  others: Sequence[str],
) -> int:
  """Trains the points of a sweep, and returns the exit status."""
  try:
    axes = automl.flags(experiment)
  except errors.UsageError as e:
    _parser().error(str(e))
  where = f'--config.checkpoint_dir={args.job_log_dir}'
  return runs_main.main(['sweep', _config_flag(args), where, *axes, *others])


def _decode_each(args: argparse.Namespace, others: Sequence[str]) -> None:
  """Decodes with each checkpoint of a run until the run has ended.

  Each checkpoint is decoded in a separate process. You may start this mode
  before the run.
  """
  run = store_lib.at(args.job_log_dir)
  manifests = manifests_lib.Manifests(run.below('checkpoints'))
  command = [
    *(sys.executable, *_PROGRAM.split(), '--mode=decode_once'),
    *(f'--exp={args.exp}', f'--job_log_dir={args.job_log_dir}'),
    *(['--reduced'] if args.reduced else []),
    *others,
  ]
  done = set[int]()
  while True:
    # Ask this first: if the run has ended, its last checkpoint exists.
    has_ended = bool(notes.read_end(manifests.store))
    new = [s for s in manifests.steps('latest') if s not in done]
    if new:
      done.add(step := new[0])
      ended = subprocess.run([*command, f'--config.decode.step={step}'])
      # The run may have removed the checkpoint in favor of newer ones.
      if ended.returncode and step in manifests.steps('latest'):
        sys.exit(ended.returncode)
    elif has_ended:
      return
    else:
      time.sleep(_POLL_SECS)


if __name__ == '__main__':
  main(sys.argv[1:])
