"""The files in launch/.

No cluster is needed: programs of the names that a cluster has (srun, gcloud)
stand in for them, and start real processes.
"""

import math
import os
import re
import signal
import string
import subprocess
import sys

import pytest
import yaml

from jaxline.supervision import preemption
from tests import processes

ROOT = processes.ROOT
LAUNCH = ROOT / 'launch'


def program(folder, name, text):
  """Makes an executable."""
  path = folder / name
  path.write_text(text)
  path.chmod(0o755)
  return path


def on_path(folder, **more):
  path = f'{folder}{os.pathsep}{os.environ["PATH"]}'
  return os.environ | {'PATH': path, 'PYTHONPATH': str(ROOT), **more}


def call(*args, env):
  return subprocess.run(
    args, env=env, cwd=ROOT, capture_output=True, text=True, timeout=100
  )


# Starts two processes on one node, tells them what Slurm would, and ends with
# the highest code.
SRUN = """#!/bin/bash
for i in 1 2 3 4; do echo "$1"; shift; done; echo "$SRUN_CPUS_PER_TASK"
export SLURM_STEP_NODELIST=localhost SLURM_STEP_NUM_NODES=1
export SLURM_STEP_TASKS_PER_NODE=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@"; code=$?
wait $first; other=$?
exit $((code > other ? code : other))
"""

MEET = """
import sys
from jaxline.parallel import distributed
distributed.initialize('auto')
from jax.experimental import multihost_utils
import jax
import numpy as np
ranks = multihost_utils.process_allgather(np.int32(jax.process_index()))
# In one piece: the other one writes to the same pipe.
print(f'process {jax.process_index()} sees {ranks.tolist()} {sys.argv[1:]}')
"""


@pytest.fixture
def slurm(tmp_path):
  """Runs the script as a job would; the folder has `srun` and `scontrol`."""
  program(tmp_path, 'srun', SRUN)
  program(tmp_path, 'scontrol', f'#!/bin/sh\necho "$@" >> {tmp_path}/control')

  def run(text, *args, **more):
    path = tmp_path / 'program.py'
    path.write_text(text)
    env = on_path(
      tmp_path,
      # JAX takes its port from it.
      SLURM_JOB_ID=str(os.getpid()),
      SLURM_NTASKS='2',
      JAX_PLATFORMS='cpu',
      PROGRAM=str(path),
      **{'PYTHON': sys.executable, **more},
    )
    return call('bash', LAUNCH / 'slurm.sbatch', *args, env=env)

  return run


@pytest.mark.process
def test_slurm_processes_meet(slurm):
  run = '--config.checkpoint_dir=/a/b c'
  job = slurm(MEET, '--config=x.py', run, SLURM_CPUS_PER_TASK='6')
  assert job.returncode == 0, job.stderr
  for process in range(2):
    said = f"process {process} sees [0, 1] ['--config=x.py', '{run}']"
    assert said in job.stdout
  options = '--label\n--unbuffered\n--kill-on-bad-exit=0\n--wait=300\n6\n'
  assert job.stdout.startswith(options)


@pytest.mark.parametrize(
  ('code', 'restarts', 'requeued'),
  [
    (1, 0, False),
    (70, 0, True),
    (preemption.EXIT_CODE, 99, True),
    (preemption.EXIT_CODE, 100, False),
    (143, 0, True),
  ],
)
def test_slurm_requeues(slurm, tmp_path, code, restarts, requeued):
  directory, program = '--config.checkpoint_dir=/a', f'exit {code}'
  done = slurm(
    program, directory, PYTHON='bash', SLURM_RESTART_COUNT=f'{restarts}'
  )
  assert done.returncode == code
  said = tmp_path / 'control'
  assert said.exists() == requeued
  if requeued:
    assert said.read_text() == f'requeue {os.getpid()}\n'
  # The next job must find the run of this one.
  done = slurm(program, '--config=configs/lm.py', PYTHON='bash')
  assert done.returncode == 2
  assert 'give --config.checkpoint_dir=DIR' in done.stderr


def test_jobset():
  text = (LAUNCH / 'jobset.yaml').read_text()
  # What its head exports.
  exported = dict(re.findall(r'^#   export ([A-Z]+)=(.*)$', text, re.M))
  body = re.sub(r'^#.*\n', '', text, flags=re.M)
  jobset = yaml.safe_load(string.Template(body).substitute(exported))
  (replicated,) = jobset['spec']['replicatedJobs']
  job = replicated['template']['spec']
  pod = job['template']['spec']
  (container,) = pod['containers']
  # A pod for each machine of a slice: it gets JOB_COMPLETION_INDEX, and none
  # is replaced alone.
  assert (job['completionMode'], job['backoffLimit']) == ('Indexed', 0)
  assert job['parallelism'] == job['completions']
  sides = pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
  per_pod = container['resources']['limits']['google.com/tpu']
  assert job['parallelism'] * per_pod == math.prod(map(int, sides))
  directory = f'{exported["RUNS"]}/{jobset["metadata"]["name"]}'
  assert f'--config.checkpoint_dir={directory}' in container['command']
  # A run has time to save, and is started anew unless that is of no use.
  assert pod['terminationGracePeriodSeconds'] >= 300
  (rule,) = job['podFailurePolicy']['rules']
  codes = set(rule['onExitCodes']['values'])
  assert {1, 2} <= codes
  assert not {0, 70, preemption.EXIT_CODE, 134, 137, 143} & codes


def tpu_vm(*args, env):
  done = call(LAUNCH / 'tpu_vm.sh', *args, env=env)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_tpu_vm_says_or_does_what_is_typed(tmp_path):
  program(tmp_path, 'gcloud', f'#!/bin/sh\necho "$@" >> {tmp_path}/called')
  (tmp_path / 'tmp').mkdir()
  env = on_path(
    tmp_path, NAME='lm', ZONE='z', ACCELERATOR='v4-8', RUNTIME='r',
    SLICES='4', DATA='gs://b/text', TMPDIR=f'{tmp_path}/tmp',
  )  # fmt: skip

  for name, said in {
    'create': '^gcloud compute tpus queued-resources create lm .*'
    '--node-count=4 --node-prefix=lm',
    'delete': 'queued-resources delete lm ',
    'install': 'rsync --recursive gs://b/text data',
    'run': 'ssh lm --node=all --worker=all ',
    'stop': 'ssh lm --node=all --worker=all ',
  }.items():
    shown = tpu_vm('--dry-run', name, '--config.checkpoint_dir=/a', env=env)
    assert re.search(said, shown), shown
  assert not (tmp_path / 'called').exists()
  # What is really copied has a name that nobody can know, and is removed.
  tpu_vm('install', env=env)
  assert f' scp {tmp_path}/tmp/tmp.' in (tmp_path / 'called').read_text()
  assert not [*(tmp_path / 'tmp').iterdir()]


# A worker's Python: says what it was given, ends with the codes that a file
# lists, and then waits for SIGTERM.
WORKER = """#!/bin/bash
echo "$@"
code=$(head -n 1 codes)
sed -i 1d codes
[ -z "$code" ] || exit "$code"
trap 'kill $!; exit 75' TERM
echo waiting
sleep 1000 & wait $!
"""


@pytest.fixture
def worker(tmp_path):
  """Returns what has this machine do what gcloud would have workers do.

  It takes the codes with which the worker's Python ends, and returns the
  environment of `tpu_vm` and the worker's folder.
  """
  folder = tmp_path / 'home' / 'jaxline'
  python = folder / '.venv' / 'bin'
  python.mkdir(parents=True)
  program(python, 'python', WORKER)
  program(
    tmp_path,
    'gcloud',
    '#!/bin/bash\nfor x; do case $x in --command=*)'
    ' bash -c "${x#--command=}";; esac; done',
  )

  def make(*codes):
    (folder / 'codes').write_text(''.join(f'{code}\n' for code in codes))
    return on_path(tmp_path, HOME=str(folder.parent)), folder

  return make


def test_tpu_vm_runs_and_stops(worker):
  env, folder = worker(75, 134)
  log, pid = folder / 'run.log', folder / 'run.pid'
  options = '--config=x.py', '--config.checkpoint_dir=/runs/a b'
  tpu_vm('run', *options, env=env)
  try:
    processes.wait_until(lambda: log.exists() and 'waiting' in log.read_text())
    tpu_vm('stop', env=env)
    line = f'experiment.py --jaxline_ensure_tpu {" ".join(options)}'
    # Started anew after 75 and 134, and not once it was told to stop.
    processes.wait_until(lambda: processes.is_gone(int(pid.read_text())))
    assert log.read_text().splitlines() == [line] * 3 + ['waiting']
  finally:
    if not processes.is_gone(int(pid.read_text())):
      os.kill(int(pid.read_text()), signal.SIGTERM)


def test_tpu_vm_gives_up_what_never_lasts(worker):
  """As where a worker is gone for good: the others must not wait for ever."""
  env, folder = worker(*[70] * 9)
  tpu_vm('run', '--config.checkpoint_dir=/runs/a', env=env)
  log = folder / 'run.log'
  processes.wait_until(lambda: log.exists() and 'tpu_vm.sh' in log.read_text())
  *starts, last = log.read_text().splitlines()
  assert len(starts) == 5
  assert 'ended with 70' in last
