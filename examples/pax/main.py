r"""Runs a registered experiment, as Pax's documents do.

    python -m examples.pax.main \
      --exp=tasks.lm.params.lm_cloud.LmCloudSpmd2BLimitSteps \
      --job_log_dir=/tmp/lm --reduced

It runs `experiment.py` with a config that is made from the experiment
(`examples.pax.config`). Other flags are passed on, such as
`--config.training_steps=10` and `--jaxline_ensure_tpu`; a constant of the
experiment has a flag of its name, such as `--NUM_LAYERS=2`.
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
  'train': 'train, with evaluations between if there is data for them',
  'eval': 'evaluate each new checkpoint of --job_log_dir',
  'decode': 'continue prompts with each new checkpoint (--config.decode.*)',
  'decode_once': 'continue prompts with the newest checkpoint',
  'sweep': 'train each point of @automl.parameter_sweep; --index=N is only one',
  'compile': 'compile the steps for the chips of the experiment, and report'
  ' what they need; train nothing',
}

_PROGRAM = '-m examples.pax.main'
_CONFIG = pathlib.Path(__file__).with_name('config.py')

# Flags of Pax's first commands: without effect here; and two with which libtpu
# 0.0.52 ends the process.
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
    usage=argparse.SUPPRESS,  # So that what is wrong is said in a line.
    allow_abbrev=False,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    description=__doc__,
    epilog='modes:\n'
    + '\n'.join(f'  {name:<12} {text}' for name, text in MODES.items()),
  )
  add = parser.add_argument
  add('--exp', help='the experiment, such as tasks.lm.params.c4.NAME, or NAME')
  add('--job_log_dir', help='directory of the run; one that is there goes on')
  add('--mode', default='train', choices=MODES, help='what to do; see below')
  add(
    '--reduced',
    action='store_true',
    help='a small model of the same family, for two cores and a minute',
  )
  add('--list', action='store_true', help='print the experiments, and end')
  return parser


def _drop_gone_flags(arguments: list[str]) -> list[str]:
  """Returns arguments without what has no effect here; and says so.

  Flags that libtpu no longer has are taken out of the environment.
  """
  kept = [x for x in arguments if not _PMAP_USE_TENSORSTORE.match(x)]
  if kept != arguments:
    print(
      '--pmap_use_tensorstore has no effect: checkpoints of replicated and of'
      ' split weights are the same here.',
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
  """Runs what the command line says.

  Args:
    argv: the command line without the program's name.
  """
  parser = _parser()
  args, others = parser.parse_known_args(argv)
  names = map(experiment_registry.short_name, experiment_registry.get_all())
  if args.list:
    try:
      print('\n'.join(names), flush=True)
    except BrokenPipeError:
      # Whoever read, such as `head`, has read enough; nothing more is written.
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return
  if args.exp is None:
    parser.error('\n  '.join(['Which experiment? Give --exp, one of:', *names]))
  try:
    experiment = experiment_registry.get(args.exp)
    others = [
      # A constant is the key of the config for it.
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
      f'--mode={args.mode} continues text, and {experiment.__name__} has none:'
      ' it does not override `prompting`. Take a language model.'
    )
  if args.mode == 'decode':
    if not any(x.startswith('--config.decode.prompts') for x in others):
      parser.error(
        '--mode=decode takes the same prompts for each checkpoint: give'
        ' --config.decode.prompts=FILE; or --mode=decode_once, which asks.'
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
  # Where config flags look for what overrides the config, and messages for how
  # the program is started: not by its path, from which it finds no package.
  sys.argv = [_PROGRAM, *flags, *others]
  # The commands that a run prints at its end are made of this one: there each
  # key of the config must have one flag, so that a new value replaces it.
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
    if not argument.startswith('--') and joined:
      joined[-1] += f'={argument}'
    else:
      joined.append(argument)
  return joined


def _config_flag(args: argparse.Namespace) -> str:
  """Returns the flag of the config of an experiment's run."""
  return f'--config={_CONFIG}:{args.exp}' + (':reduced' if args.reduced else '')


def _sweep(
  experiment: experiment_registry.Experiment,
  args: argparse.Namespace,
  others: Sequence[str],
) -> int:
  """Trains the points of a sweep; returns the exit status."""
  try:
    axes = automl.flags(experiment)
  except errors.UsageError as e:
    _parser().error(str(e))
  where = f'--config.checkpoint_dir={args.job_log_dir}'
  return runs_main.main(['sweep', _config_flag(args), where, *axes, *others])


def _decode_each(args: argparse.Namespace, others: Sequence[str]) -> None:
  """Decodes with each checkpoint of a run until it has ended.

  Each in a process of its own. It may be started before the run is.
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
    # Asked first: the last checkpoint is there when the run has ended.
    has_ended = bool(notes.read_end(manifests.store))
    new = [s for s in manifests.steps('latest') if s not in done]
    if new:
      done.add(step := new[0])
      ended = subprocess.run([*command, f'--config.decode.step={step}'])
      # The run may have removed the checkpoint, having newer ones.
      if ended.returncode and step in manifests.steps('latest'):
        sys.exit(ended.returncode)
    elif has_ended:
      return
    else:
      time.sleep(_POLL_SECS)


if __name__ == '__main__':
  main(sys.argv[1:])
