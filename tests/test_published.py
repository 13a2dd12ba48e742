"""Runs of several classes and configs in one process, as published programs.

Written in the shapes of emergent_communication_at_scale, of
distribution_shift_framework and of emergent_in_context_learning.
"""

import json
import pathlib
import textwrap
from unittest import mock

from absl.testing import flagsaver
import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np
import pytest

import jaxline
from jaxline import base_config
from jaxline import experiment
from jaxline import platform
from jaxline import train
from jaxline import utils
from jaxline.compat import checkpointers
from tests import processes
from tests import remains


class Teacher(experiment.AbstractExperiment):
  """Adds `rate` to its weights at each step."""

  CHECKPOINT_ATTRS = {'_params': 'params'}
  steps: list[int] = []

  def __init__(self, mode, init_rng, config):
    super().__init__(mode=mode, init_rng=init_rng)
    self._rate = config.rate
    self._params = utils.bcast_local_devices(jnp.zeros([2]))

  def step(self, global_step, rng, *unused_args, **unused_kwargs):
    Teacher.steps.append(int(utils.get_first(global_step)))
    self._params = jax.tree.map(lambda x: x + self._rate, self._params)
    return {'loss': jnp.ones([])}

  def evaluate(self, global_step, rng, *unused_args, **unused_kwargs):
    return {'w': utils.get_first(self._params)[0]}


class Student(Teacher):
  """Another experiment, whose state has the same shapes."""


def make_config(directory, rate=1.0, training_steps=1, **values):
  config = base_config.get_base_config()
  config.checkpoint_dir = str(directory)
  config.training_steps = training_steps
  config.experiment_kwargs = config_dict.ConfigDict({'config': {'rate': rate}})
  config.update(values)
  return config.lock()


def steps_of(fn, *args, **kwargs):
  Teacher.steps.clear()
  fn(*args, **kwargs)
  return list(Teacher.steps)


def main(cls, config, mode='train'):
  with flagsaver.flagsaver(config=config, jaxline_mode=mode):
    platform.main(cls, [])


@pytest.mark.parametrize(
  ('owner', 'name'),
  [
    *((base_config, x) for x in ('get_base_config', 'validate_config',
                                 'validate_keys', 'check_constraints')),
    *((platform, x) for x in ('create_writer', 'TensorBoardLogger')),
    *((train, x) for x in ('train', 'evaluate')),
    *((utils, x) for x in (
      'bcast_local_devices', 'evaluate_should_return_dict', 'get_first',
      'host_id_devices_for_rng', 'rendezvous', 'specialize_rng_host_device',
      'InMemoryCheckpointer', 'CheckpointNT')),
  ],
)  # fmt: skip
def test_a_rebound_name_is_called(owner, name, tmp_path):
  """JAXline looks these up when it calls them."""
  config = make_config(tmp_path, training_steps=2, checkpointer='memory')
  once = config_dict.ConfigDict(config)
  once.one_off_evaluate = True
  counts = [0]
  with mock.patch.object(owner, name, wraps=getattr(owner, name)) as called:
    for mode in ('train_eval_multithreaded', 'train', 'eval'):
      if mode == 'train':
        utils.GLOBAL_CHECKPOINT_DICT = {}
      main(Teacher, once if mode == 'eval' else config, mode)
      counts.append(called.call_count)
  assert 0 < counts[1] < counts[-1]
  assert Teacher.steps[-2:] == [0, 1]
  main(Teacher, once, 'eval')
  assert called.call_count == counts[-1]


class FullTeacher(Teacher, experiment.FullExperiment):
  """A program of this library, whose checkpoints are not in the dictionary."""


class FullStudent(Student, experiment.FullExperiment):
  """Another one."""


def test_a_second_class_of_this_library_begins_anew(tmp_path):
  config = make_config(tmp_path, training_steps=2)
  ckpt = platform.create_checkpointer(config, 'train')
  for cls in (FullTeacher, FullStudent):
    assert steps_of(train.train, cls, config, ckpt, None) == [0, 1]
  assert remains.steps(tmp_path) == remains.steps(tmp_path / 'run_2') == [2]
  assert not utils.GLOBAL_CHECKPOINT_DICT.get('latest', ([], []))[1]


@pytest.mark.parametrize('empties', [False, True])
@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_one_checkpointer_trains_a_second_class(
  checkpointer, empties, tmp_path, caplog
):
  config = make_config(tmp_path, checkpointer=checkpointer)
  ckpt = platform.create_checkpointer(config, 'train')
  writer = platform.create_writer(config, 'train')
  assert steps_of(train.train, Teacher, config, ckpt, writer) == [0]
  if empties:
    utils.GLOBAL_CHECKPOINT_DICT = {}
  other = make_config(tmp_path, 5.0, training_steps=2)
  assert steps_of(train.train, Student, other, ckpt, writer) == [0, 1]
  newest = utils.GLOBAL_CHECKPOINT_DICT['latest'].history[-1].pickle_nest
  np.testing.assert_array_equal(newest.experiment_module['params'], [10, 10])
  writer.close()
  log = (tmp_path / 'train' / 'metrics.jsonl').read_text()
  assert log.count('"loss"') == 2  # That of the teacher stays.
  if checkpointer == 'durable':
    assert remains.steps(tmp_path) == [1]
    assert remains.steps(tmp_path / 'run_2') == [2]
    assert f'{tmp_path}/run_2' in caplog.text


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_an_emptied_dictionary_begins_anew(checkpointer, tmp_path):
  config = make_config(tmp_path, training_steps=2, checkpointer=checkpointer)
  assert steps_of(main, Teacher, config) == [0, 1]
  assert steps_of(main, Teacher, config) == []
  utils.GLOBAL_CHECKPOINT_DICT = {}
  assert steps_of(main, Teacher, config) == [0, 1]
  assert steps_of(main, Teacher, config) == []


@pytest.mark.parametrize(
  'mode', ['train', 'train_and_eval', 'train_eval_multithreaded']
)
@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_another_class_or_config_begins_anew(mode, checkpointer, tmp_path):
  """`platform.main` again and again, with one directory."""
  runs = [(Teacher, 1.0), (Teacher, 2.0), (Student, 3.0), (Student, 1.0)]
  for experiment_class, rate in runs:
    config = make_config(
      tmp_path, rate, checkpointer=checkpointer, best_model_eval_metric='w'
    )
    assert steps_of(main, experiment_class, config, mode) == [0]
    longer = make_config(tmp_path, rate, 3, checkpointer=checkpointer)
    assert steps_of(main, experiment_class, longer, mode) == [1, 2]
  names = sorted(path.name for path in tmp_path.glob('run_*'))
  is_durable = checkpointer == 'durable'
  assert names == ['run_2', 'run_3', 'run_4'] * is_durable
  # The evaluation of a run is of its own checkpoints.
  if is_durable:
    config = make_config(
      tmp_path, 2.0, one_off_evaluate=True, eval_initial_weights=False
    )
    main(Teacher, config, 'eval')
    assert (tmp_path / 'run_2' / 'eval' / 'metrics.jsonl').exists()
  # A run that changes its config on purpose goes on.
  changed = make_config(
    tmp_path, 9.0, 4, checkpointer=checkpointer, on_config_change='continue'
  )
  last = Teacher if is_durable else Student
  assert steps_of(main, last, changed, mode) == [3]


def test_a_subclass_of_the_checkpointer_restores_another_config(tmp_path):
  """A program's own checkpointer goes by the class alone, as in JAXline."""
  for cls, rate, expected in (
    (Teacher, 1.0, [0]),
    (Teacher, 2.0, [1]),
    (Student, 2.0, [0, 1]),
  ):
    steps = 2 if cls is Student else len(expected) + expected[0]
    config = make_config(tmp_path, rate, steps)
    ckpt = utils.InMemoryCheckpointer(config, 'train')
    assert steps_of(train.train, cls, config, ckpt, None) == expected


@pytest.mark.parametrize('checkpointer', ['durable', 'memory'])
def test_fit_is_a_run_of_its_own_in_memory(checkpointer, tmp_path):
  config = make_config(tmp_path, checkpointer=checkpointer)
  fit = [steps_of(jaxline.fit, Teacher, config, mode='train') for _ in 'ab']
  assert fit == ([[0], []] if checkpointer == 'durable' else [[0], [0]])
  other = make_config(tmp_path, 2.0, checkpointer=checkpointer)
  assert steps_of(jaxline.fit, Teacher, other, mode='train') == [0]


@pytest.mark.process
def test_a_run_of_another_process_is_refused(tmp_path):
  program = tmp_path / 'program.py'
  program.write_text(
    textwrap.dedent("""
      import sys

      from absl import flags
      from tests import test_published as lib

      if __name__ == '__main__':
        flags.FLAGS.mark_as_parsed()
        directory, rates = sys.argv[1], map(float, sys.argv[2:])
        for rate in rates:
          config = lib.make_config(directory, rate)
          print(rate, lib.steps_of(lib.main, lib.Teacher, config))
    """)
  )

  def run(*rates):
    got = processes.run(program, tmp_path / 'runs', *rates)
    lines = [x for x in got.stdout.splitlines() if x[:2] in ('1.', '2.')]
    return got.returncode, lines, got.stderr

  assert run(1, 2)[:2] == (0, ['1.0 [0]', '2.0 [0]'])
  assert run(1, 2)[:2] == (0, ['1.0 []', '2.0 []'])  # Each goes on.
  code, lines, error = run(2, 1)
  assert (code, lines) == (2, [])
  assert 'experiment_kwargs.config.rate' in error


# What the library adds to JAXline's interface, and the constructor's argument.
ADDED = [x for x in vars(experiment.FullExperiment) if not x.startswith('_')]


def test_a_programs_own_checkpoint_needs_no_directory(tmp_path):
  config = make_config(tmp_path, training_steps=2).unlock()
  platform.start(Teacher, config, 'train')
  history = utils.GLOBAL_CHECKPOINT_DICT['latest'].history
  history[:] = [utils.SnapshotNT(0, history[-1].pickle_nest)]
  config.checkpoint_dir, config.one_off_evaluate = None, True
  path, _ = platform.start(Teacher, config, 'eval')
  log = pathlib.Path(path) / 'eval' / 'metrics.jsonl'
  assert json.loads(log.read_text().splitlines()[-1])['w'] == 2


def test_a_program_sees_its_own_experiment(tmp_path):
  seen = []

  class Program(Teacher):
    summary = 'mine'

    def __init__(self, mode, init_rng, config):
      super().__init__(mode, init_rng, config)
      self.num_evaluated = 77  # The library has this name, too.

    def on_new_best_model(self, best_state):
      module = best_state.experiment_module
      seen.append((module is self, module.summary, module.num_evaluated))

  config = make_config(
    tmp_path, training_steps=2, best_model_eval_metric='w', eval_interval=1
  )
  steps_of(main, Program, config, 'train_and_eval')
  assert {*seen} == {(True, 'mine', 77)}


NOT_ASKED_FOR = property(lambda self: pytest.fail('The library reads it.'))
FORMS = {
  'constant': lambda name: name,
  'method': lambda name: lambda self, *args: pytest.fail(name),
  'class method': lambda name: classmethod(lambda *args: pytest.fail(name)),
  'property': lambda name: NOT_ASKED_FOR,
}


@pytest.mark.parametrize('form', [*FORMS, 'attribute'])
def test_a_program_may_use_every_name_that_the_library_adds(
  form, tmp_path, monkeypatch
):
  assert {'summary', 'step_inputs', 'num_evaluated', 'run_config'} < {*ADDED}
  seen = []

  class Program(Teacher):
    # In the checkpoint too.
    NON_BROADCAST_CHECKPOINT_ATTRS = (
      dict(zip(ADDED, ADDED, strict=True)) if form == 'attribute' else {}
    )

    def __init__(self, mode, init_rng, config, run_config='own'):
      super().__init__(mode, init_rng, config)
      seen.append(run_config)
      if form == 'attribute':
        vars(self).update((name, np.full([2], 7)) for name in ADDED)

    def step(self, global_step, **unused):
      if form == 'attribute':
        for name in ADDED:
          vars(self)[name] = vars(self)[name] + 1
      return super().step(global_step, None)

    def evaluate(self, global_step, **unused):
      found = super().evaluate(global_step, None)
      if form == 'attribute':
        found |= {name: vars(self)[name][0] for name in ADDED}
      return found

  if form in FORMS:
    for name in ADDED:
      setattr(Program, name, FORMS[form](name))
  for steps in (2, 4):  # The second time, it is resumed.
    config = make_config(tmp_path, training_steps=steps, on_nonfinite='warn')
    assert steps_of(main, Program, config, 'train_and_eval') == [
      steps - 2,
      steps - 1,
    ]
    # As in another process.
    monkeypatch.setattr(utils, 'GLOBAL_CHECKPOINT_DICT', {})
    monkeypatch.setattr(checkpointers, '_begun', {})
  steps_of(main, Program, config, 'eval')
  log = (tmp_path / 'eval' / 'metrics.jsonl').read_text().splitlines()
  last = json.loads(log[-1])
  assert last['step'] == last['w'] == 4
  if form == 'attribute':
    assert {last[name] for name in ADDED} == {7 + 4}
  assert {*seen} == {'own'}


OWN = {
  'checkpoint_dir': 3,
  'decode': 'greedy',
  'distributed': True,
  'early_stop': True,
  'eval_interval': (1, 2),
  'eval_steps': 100,
  'max_seconds': '9',
  'mesh': '2x4',
  'profile_steps': 10,
  'sharding': 'spatial',
  'watchdog_secs': None,
  'writers': 'wandb',
  'xla': 'O3',
}


@pytest.mark.parametrize('how', ['main', 'fit', 'train'])
def test_a_program_may_use_the_keys_of_this_library_for_itself(
  how, tmp_path, monkeypatch, caplog
):
  monkeypatch.setattr(platform.tempfile, 'tempdir', str(tmp_path))
  seen = []

  class Program(Teacher):
    def should_run_step(self, global_step, config):
      seen.append({name: config[name] for name in OWN})
      return super().should_run_step(global_step, config)

  config = make_config('')
  for name, value in OWN.items():
    setattr(config, name, value)
  config.lock()
  if how == 'main':
    assert steps_of(main, Program, config, 'train_and_eval') == [0]
  elif how == 'fit':
    assert steps_of(jaxline.fit, Program, config) == [0]
  else:
    writer = platform.create_writer(make_config(tmp_path), 'train')
    ckpt = utils.InMemoryCheckpointer(config, 'train')
    assert steps_of(train.train, Program, config, ckpt, writer) == [0]
    writer.close()
  for values in seen:
    assert values.pop('checkpoint_dir') == 3 or how != 'train'
    assert values == {k: x for k, x in OWN.items() if k != 'checkpoint_dir'}
  valid = 'watchdog_secs', 'checkpoint_dir'
  said = [x for x in caplog.messages if 'eval_steps' in x and 'own' in x]
  assert len(said) == 1
  assert all(f'config.{name}' in said[0] for name in {*OWN} - set(valid))
