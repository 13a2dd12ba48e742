"""Tests of the command lines of Pax's documents."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from examples.pax import main
from jaxline import platform
from tests import processes

EXP = 'tasks.lm.params.c4.C4Spmd1BAdam4Replicas'


@pytest.fixture
def handed_on(monkeypatch):
  """Returns a function from a command line to the platform's arguments."""
  monkeypatch.setattr(sys, 'argv', ['main.py'])
  monkeypatch.setattr(sys, 'orig_argv', ['python', 'main.py'])

  def run(*argv):
    found = []
    monkeypatch.setattr(
      platform, 'main', lambda cls, argv: found.append((cls, list(argv)))
    )
    main.main(argv)
    ((cls, argv),) = found
    assert cls is None
    assert sys.argv[1:] == argv  # Config flags read these.
    assert sys.argv[0] == '-m examples.pax.main'  # Messages show this name.
    return argv

  return run


@pytest.mark.parametrize(
  ('argv', 'mode', 'flags'),
  [
    (['--config.seed=3'], 'train_and_eval', ['--config.seed=3']),
    (['--mode', 'eval'], 'eval', []),
    (['--mode=decode_once'], 'decode', []),
    # A constant has a flag of its name.
    (
      ['--NUM_LAYERS=2', '--MAX_STEPS', '10', '--DATA_DIR=c4/en'],
      'train_and_eval',
      [
        '--config.experiment_kwargs.config.constants.NUM_LAYERS=2',
        *('--config.training_steps', '10', '--config.data_dir=c4/en'),
      ],
    ),
    # Flags of Pax without effect here.
    (['--pmap_use_tensorstore=True'], 'train_and_eval', []),
    (['--nopmap_use_tensorstore', '--mode=compile'], 'compile', []),
  ],
)
def test_a_command_line_becomes_the_librarys(
  handed_on, capsys, argv, mode, flags
):
  config, *given = handed_on(
    f'--exp=paxml.{EXP}', '--job_log_dir', '/tmp/x', *argv, '--reduced'
  )
  assert config.endswith(f'examples/pax/config.py:paxml.{EXP}:reduced')
  assert given == [
    f'--jaxline_mode={mode}',
    '--config.checkpoint_dir=/tmp/x',
    *flags,
  ]
  is_pax = any('pmap_use_tensorstore' in x for x in argv)
  said = '--pmap_use_tensorstore has no effect' in capsys.readouterr().err
  assert said == is_pax
  # The command that later ones are made of has each key once.
  first = ['-m', 'examples.pax.main', f'--exp=paxml.{EXP}', '--reduced']
  joined = ' '.join(flags).replace(' 10', '=10').split()
  assert sys.orig_argv[1:] == [*first, *given[1:2], *joined]


def test_flags_that_libtpu_no_longer_has(handed_on, capsys, monkeypatch):
  """The variable is from Pax's commands for several slices."""
  kept = (
    '--xla_jf_spmd_threshold_for_windowed_einsum_mib=0',
    '--xla_enable_async_all_gather=true',
    'TPU_MEGACORE=MEGACORE_DENSE',
  )
  gone = (
    '--xla_tpu_spmd_rewrite_einsum_with_reshape=true',
    '--jax_enable_async_collective_offload=true',
  )
  given = ' '.join([kept[0], gone[0], kept[1], gone[1], kept[2]])
  monkeypatch.setenv('LIBTPU_INIT_ARGS', given)
  handed_on('--exp=C4Spmd22BAdam2xv4_128')
  assert os.environ['LIBTPU_INIT_ARGS'] == ' '.join(kept)
  assert f'left out {" ".join(gone)}, which' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('argv', 'said'),
  [
    ([], f'  {EXP}\n'),
    (['--exp=C4Spmd1BAdam4Replica'], "'tasks.lm.params.c4.C4Spmd1B"),
    ([f'--exp={EXP}', '--mode=evaluate'], "'decode_once'"),
    ([f'--exp={EXP}', '--mode=eval'], '--job_log_dir'),
    ([f'--exp={EXP}', '--NUM_LAYER=2'], "Did you mean 'NUM_LAYERS'?"),
    ([f'--exp={EXP}', '--ICI_MESH_SHAPE=1'], '--config.mesh.ici.data=4'),
    (
      [f'--exp={EXP}', '--mode=decode', '--job_log_dir=/tmp/x'],
      '--config.decode.prompts=FILE',
    ),
    (
      ['--exp=ResNet50Pjit', '--mode=decode_once', '--job_log_dir=/tmp/x'],
      'ResNet50Pjit does not override `prompting`',
    ),
  ],
)
def test_what_is_wrong_is_said(capsys, argv, said):
  with pytest.raises(SystemExit) as e:
    main.main(argv)
  assert e.value.code == 2
  assert said in capsys.readouterr().err


def test_list(capsys):
  main.main(['--list'])
  names = capsys.readouterr().out.split()
  assert {EXP, 'tasks.vision.params.imagenet_resnets.ResNet50Pjit'} <= {*names}


def test_decode_follows_a_run(monkeypatch, tmp_path):
  latest = tmp_path / 'checkpoints' / 'latest'
  latest.mkdir(parents=True)
  for step in (10, 20):
    (latest / f'{step}.json').touch()
  ran = []

  def run(command):
    step = int(command[-1].removeprefix('--config.decode.step='))
    ran.append((step, command[3:]))
    if step == 10:  # The run continues: it removes both, saves 30, and ends.
      for removed in latest.iterdir():
        removed.unlink()
      (latest / '30.json').touch()
      (tmp_path / 'checkpoints' / 'ended.json').write_text('{"step": 30}')
    return subprocess.CompletedProcess(command, int(step == 10))  # It is gone.

  monkeypatch.setattr(subprocess, 'run', run)
  flags = [f'--exp={EXP}', f'--job_log_dir={tmp_path}', '--reduced']
  prompts = '--config.decode.prompts=x.txt'
  main.main([*flags, '--mode=decode', prompts])
  assert [step for step, _ in ran] == [10, 30]
  assert ran[0][1] == [
    '--mode=decode_once',
    *flags,
    prompts,
    '--config.decode.step=10',
  ]

  # If a decoding fails, the program exits with the same code.
  monkeypatch.setattr(
    subprocess, 'run', lambda command: subprocess.CompletedProcess(command, 3)
  )
  with pytest.raises(SystemExit) as e:
    main.main([*flags, '--mode=decode', prompts])
  assert e.value.code == 3


def start(*argv):
  """Runs the program, and returns its output."""
  done = processes.run(
    *('-m', 'examples.pax.main', *argv), timeout=170, XLA_FLAGS=''
  )
  said = done.stdout + done.stderr
  assert done.returncode == 0, said
  return said


@pytest.mark.slow
@pytest.mark.timeout(400)  # Five starts take a while.
def test_a_run_from_the_command_line(tmp_path):
  run = tmp_path / 'run'
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('def \nimport\n')
  flags = [
    '--exp=C4Spmd1BAdam4Replicas',
    '--reduced',
    f'--job_log_dir={run}',
    '--MAX_STEPS=4',
    '--config.save_checkpoint_interval=2',
    '--config.eval_interval=4',
    '--config.experiment_kwargs.config.constants.NUM_LAYERS=1',
  ]
  said = start(*flags)
  assert 'Trained to step 4 of 4' in said
  (go_on,) = [x for x in said.splitlines() if x.startswith('Continue:')]
  assert f'-m examples.pax.main --exp={flags[0][6:]} --reduced' in go_on
  assert go_on.count('checkpoint_dir') == go_on.count('training_steps') == 1
  assert said.count('vn.vn_scale') == 1  # The task's text has it.
  # The run has evaluated its last checkpoint, and no evaluation repeats that.
  again = '--mode=eval', '--config.one_off_evaluate'
  assert 'log_pplx' in start(*flags, *again)
  start(
    *flags,
    '--mode=decode',
    f'--config.decode.prompts={prompts}',
    '--config.experiment_kwargs.config.decode.max_decode_steps=8',
    '--config.experiment_kwargs.config.decode.method=greedy',
  )
  for step in (2, 4):
    lines = (run / 'decode' / f'step_{step}.jsonl').read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [f['prompt'] for f in found] == ['def ', 'import']
    assert all(len(f['continuations']) == 1 for f in found)
  assert 'step 8 of 8' in start(
    *shlex.split(go_on.split('examples.pax.main')[1])
  )
