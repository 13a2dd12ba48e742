"""Experiments without a device, and what writes down what they are asked."""

import contextlib
import functools
import json
import sys
from unittest import mock

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline import platform
from jaxline import train
from jaxline import utils
from jaxline.parallel import devices
from tests import remains


class Log:
  """What the experiments of one test have seen."""

  def __init__(self):
    self.inits, self.keys, self.evals = [], [], []


class Toy(experiment.FullExperiment):
  """Counts its steps in its only weight."""

  CHECKPOINT_ATTRS = {'_w': 'w'}

  def __init__(self, mode, init_rng=None, log=None, scalars=None, fail_at=None):
    super().__init__(mode=mode, init_rng=init_rng)
    self.mode = mode
    self.log = Log() if log is None else log
    self.scalars = {} if scalars is None else scalars
    self.fail_at = fail_at
    self.log.inits.append((mode, init_rng))
    self._w = devices.bcast_local_devices(np.float32(0))

  def step(self, *, global_step, rng, writer):
    step = np.asarray(global_step).reshape(-1)
    self.log.keys.append(rng)
    if self.fail_at == step[0]:
      raise ZeroDivisionError('in a step')
    self._w = self._w + np.float32(1)
    return {'loss': np.float32(step[0]), **self.scalars}

  def evaluate(self, *, global_step, rng, writer):
    step = int(np.asarray(global_step).reshape(-1)[0])
    weight = float(np.asarray(self._w).reshape(-1)[0])
    self.log.evals.append((step, weight))
    self.log.keys.append(rng)
    return {'score': self.scalars[step] if self.scalars else step}


class Plain(Toy):
  """The same with the step and the key as they are: nothing to compile."""

  def step_inputs(self, config):
    return lambda step, key: (step, key, key)

  def evaluate_inputs(self, config, rng):
    return lambda step: (step, rng)


def make_config(steps=4, **values):
  config = base_config.get_base_config()
  config.training_steps = steps
  config.interval_type = 'steps'
  config.save_checkpoint_interval = None
  config.update(values)
  base_config.validate_config(config)
  return config


class Recorder(utils.InMemoryCheckpointer):
  """Also writes down what it was asked."""

  def __init__(self, config, mode='train'):
    super().__init__(config, mode)
    self.calls = []

  def save(self, ckpt_series):
    step = self.get_experiment_state(ckpt_series).global_step
    self.calls.append(('save', ckpt_series, step))
    super().save(ckpt_series)

  def wait_for_checkpointing_to_finish(self):
    self.calls.append(('wait', None, None))

  def saves(self, series='latest'):
    return [c[2] for c in self.calls if c[:2] == ('save', series)]


class Writes:
  """A writer of the old kind: one method."""

  def __init__(self):
    self.records = []

  def write_scalars(self, global_step, scalars):
    self.records.append((global_step, dict(scalars)))

  def steps(self):
    return [step for step, _ in self.records]


class Killed(BaseException):
  """Ends a run as kill -9 does: nothing else is saved or noted."""


class Counted(Plain):
  """Says how many evaluations there were before; is killed in one step."""

  dies_at = None

  def step(self, *, global_step, rng, writer):
    if global_step == self.dies_at:
      raise Killed
    return super().step(global_step=global_step, rng=rng, writer=writer)

  def evaluate(self, **kwargs):
    super().evaluate(**kwargs)
    return {'before': self.num_evaluated}


class Process:
  """A run in a directory, with its logs; each call of `run` begins anew."""

  def __init__(self, run_dir, mode='train_and_eval', **values):
    self.run_dir = run_dir
    self.mode = mode
    self.values = {
      'eval_interval': 1, 'save_checkpoint_interval': 1,
      'max_checkpoints_to_keep': 2, 'console': 'off',
    } | values  # fmt: skip

  def run(self, steps, dies_at=None, **values):
    """Runs so many steps; returns what was evaluated, in this order."""
    config = make_config(
      steps, checkpoint_dir=str(self.run_dir), **self.values | values
    )
    log = Log()
    cls = type('Counted', (Counted,), {'dies_at': dies_at})
    experiment_class = functools.partial(cls, log=log)
    if self.mode == 'eval':
      # Training goes first, at once to its end; so nothing is missed.
      values = self.values | {'max_checkpoints_to_keep': 100}
      Process(self.run_dir, 'train', **values).run(steps)
    killed = contextlib.nullcontext()
    if dies_at is not None:
      killed = pytest.raises(Killed)
    with killed:
      platform.start(experiment_class, config, self.mode)
    return [step for step, _ in log.evals]

  def curve(self, mode='eval'):
    """Returns each line's step and number of evaluations before it."""
    found = remains.curve(self.run_dir, mode)
    return [(r['step'], r['before']) for r in found]

  def texts(self, mode='eval'):
    lines = (self.run_dir / mode / 'metrics.jsonl').read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(r['step'], 'config' in r) for r in found if r['kind'] == 'texts']

  def shown(self, mode='eval'):
    """Returns the curve of TensorBoard's files, whatever they say is void."""
    return remains.tensorboard(self.run_dir, mode, False)['before']


def run(cls=Plain, config=None, checkpointer=None, writer=None, actions=()):
  """Trains once; returns the log and the checkpointer."""
  config = make_config() if config is None else config
  checkpointer = Recorder(config) if checkpointer is None else checkpointer
  log = Log()
  partial = functools.partial(cls, log=log)
  train.train(partial, config, checkpointer, writer, actions)
  return log, checkpointer


def evaluate_once(cls, config):
  train.evaluate(cls, config, Recorder(config, 'eval'), None, 'eval')


def main(*argv):
  """Runs a command line of `experiment.py` in this process."""
  argv = ['experiment.py', *argv]
  with flagsaver.flagsaver(), mock.patch.object(sys, 'argv', argv):
    flags.FLAGS(argv)
    platform.main(None, [])
