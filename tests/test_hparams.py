"""Tests of TensorBoard's tab HPARAMS, by what its own backend reads."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
import warnings

import pytest

from jaxline import base_config
from jaxline import platform

with warnings.catch_warnings():
  warnings.simplefilter('ignore')
  from tensorboard import context as request_context
  from tensorboard.backend.event_processing import data_provider
  from tensorboard.backend.event_processing import plugin_event_multiplexer
  from tensorboard.plugins import base_plugin
  from tensorboard.plugins.hparams import api_pb2
  from tensorboard.plugins.hparams import backend_context
  from tensorboard.plugins.hparams import get_experiment
  from tensorboard.plugins.hparams import list_session_groups


def config_of(directory, **values):
  config = base_config.get_base_config()
  config.checkpoint_dir = str(directory)
  config.best_model_eval_metric = 'loss'
  config.best_model_eval_metric_higher_is_better = False
  config.update(values)
  return config


def write(config, losses, resumed=-1, modes=('train', 'eval')):
  """Writes evaluations like a run that goes on behind the step `resumed`."""
  for mode in modes:
    with platform.create_writer(config, mode) as writer:
      writer.resume(resumed)
      for step, loss in losses.items():
        writer.write_scalars(step, {'loss': loss, 'rows': 3})


def to_python(value):
  return getattr(value, value.WhichOneof('kind'))


def read(directory):
  """Returns what the tab shows: columns that differ, and rows by name."""
  multiplexer = plugin_event_multiplexer.EventMultiplexer()
  multiplexer.AddRunsFromDirectory(str(directory))
  multiplexer.Reload()
  provider = data_provider.MultiplexerDataProvider(multiplexer, str(directory))
  context = backend_context.Context(
    base_plugin.TBContext(data_provider=provider)
  )
  asked = request_context.RequestContext()
  experiment = get_experiment.Handler(
    asked, context, '', api_pb2.GetExperimentRequest()
  ).run()
  request = api_pb2.ListSessionGroupsRequest(
    allowed_statuses=[api_pb2.STATUS_UNKNOWN], slice_size=100
  )
  groups = list_session_groups.Handler(asked, context, '', request).run()
  rows = {}
  for group in groups.session_groups:
    (session,) = group.sessions
    values = {
      m.name.tag: (m.training_step, m.value) for m in session.metric_values
    }
    hparams = {name: to_python(x) for name, x in group.hparams.items()}
    rows[group.name] = (hparams, values)
  return [x.name for x in experiment.hparam_infos if x.differs], rows


def metrics(best_step, best, step, last):
  return {
    'best/loss': (best_step, best),
    'eval/loss': (step, last),
    'eval/rows': (step, 3.0),
  }


def test_a_row_has_the_config_and_the_best_and_last_evaluation(tmp_path):
  config = config_of(tmp_path / 'a', random_seed=1)
  config.experiment_kwargs = {'lr': 0.5, 'betas': (0.9, 0.99), 'kind': 'x'}
  write(config, {1: 2.0, 2: 0.5, 3: 1.0, 4: float('nan')})
  write(config_of(tmp_path / 'b', random_seed=2), {1: 0.25})
  # TensorBoard may be shown all runs, or one.
  for place, prefix in ((tmp_path, 'a/'), (tmp_path / 'a', '')):
    _, rows = read(place)
    hparams, values = rows[f'{prefix}hparams']
    assert values.pop('eval/loss')[0] == 4
    assert values == {'best/loss': (2, 0.5), 'eval/rows': (4, 3.0)}
    expected = {
      'random_seed': 1.0,
      'log_async': True,
      'sharding': 'ddp',
      'best_model_eval_metric': 'loss',
      'experiment_kwargs.lr': 0.5,
      'experiment_kwargs.betas.1': 0.99,
      'experiment_kwargs.kind': 'x',
    }
    assert hparams.items() >= expected.items()
    assert hparams['log_async'] is True
    # What is None is not shown.
    assert not hparams.keys() & {'checkpoint_dir', 'topology'}
  differing, rows = read(tmp_path)
  assert 'random_seed' in differing
  assert 'training_steps' not in differing
  assert rows['b/hparams'][1] == metrics(1, 0.25, 1, 0.25)
  assert len(rows) == 2


def test_the_best_may_be_the_greatest(tmp_path):
  config = config_of(tmp_path, best_model_eval_metric_higher_is_better=True)
  write(config, {1: -2.0, 2: -0.5, 3: -1.0})
  assert read(tmp_path)[1]['hparams'][1] == metrics(2, -0.5, 3, -1.0)


def test_a_run_without_a_best_metric_shows_its_evaluations(tmp_path):
  write(config_of(tmp_path, best_model_eval_metric=None), {1: 2.0})
  values = read(tmp_path)[1]['hparams'][1]
  assert values == {'eval/loss': (1, 2.0), 'eval/rows': (1, 3.0)}


def test_a_resumed_run_stays_one_row(tmp_path):
  config = config_of(tmp_path / 'a')
  write(config, {1: 2.0, 2: 1.0, 3: 0.125})
  (session,) = tmp_path.glob('a/hparams/*.hparams')
  before = session.read_bytes()
  # Step 3 is void. The best of the steps before it still counts.
  write(config, {3: 1.5, 4: 1.25}, resumed=2)
  assert session.read_bytes() == before
  ((name, (hparams, values)),) = read(tmp_path)[1].items()
  assert (name, values) == ('a/hparams', metrics(2, 1.0, 4, 1.25))
  assert hparams['training_steps'] == 10000
  config.training_steps = 20000
  write(config, {5: 0.75}, resumed=4)
  ((name, (hparams, values)),) = read(tmp_path)[1].items()
  assert (name, values) == ('a/hparams', metrics(5, 0.75, 5, 0.75))
  assert hparams['training_steps'] == 20000


def test_a_run_that_begins_anew_has_no_older_evaluation(tmp_path):
  config = config_of(tmp_path)
  write(config, {1: 0.125})
  write(config, {}, resumed=-1)
  ((_, values),) = read(tmp_path)[1].values()
  assert values == {}
  write(config, {1: 3.0}, resumed=-1)
  ((_, values),) = read(tmp_path)[1].values()
  assert values == metrics(1, 3.0, 1, 3.0)


def test_an_evaluation_elsewhere_does_not_change_the_row(tmp_path):
  write(config_of(tmp_path), {1: 2.0}, modes=['train'])
  # Its process may have another config; another of its modes is another log.
  config = config_of(tmp_path, random_seed=7)
  write(config, {1: 0.5}, modes=['eval', 'eval_on_test'])
  ((hparams, values),) = read(tmp_path)[1].values()
  assert hparams['random_seed'] == 42
  assert values == metrics(1, 0.5, 1, 0.5)


@pytest.mark.process
@pytest.mark.parametrize('loader', ['--load_fast=true', '--load_fast=false'])
def test_a_tensorboard_shows_the_table(loader, tmp_path):
  for name, loss in (('a', 2.0), ('b', 1.0)):
    write(config_of(tmp_path / name), {1: loss})
  write(config_of(tmp_path / 'a'), {2: 0.5}, resumed=1)
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  command = [sys.executable, '-m', 'tensorboard.main', loader]
  command += ['--logdir', str(tmp_path), '--port', str(port)]
  log = tmp_path / 'log.txt'
  with open(log, 'w') as output:
    server = subprocess.Popen(command, stdout=output, stderr=output)

  def ask():
    query = {'allowedStatuses': ['STATUS_UNKNOWN'], 'sliceSize': 10}
    request = urllib.request.Request(
      f'http://127.0.0.1:{port}/data/plugin/hparams/session_groups',
      json.dumps(query | {'experimentName': '', 'startIndex': 0}).encode(),
      {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
      return {
        group['name']: {
          metric['name']['tag']: metric['value']
          for metric in group.get('metricValues', [])
        }
        for group in json.loads(reply.read())['sessionGroups']
      }

  expected = {
    'a/hparams': {'best/loss': 0.5, 'eval/loss': 0.5, 'eval/rows': 3.0},
    'b/hparams': {'best/loss': 1.0, 'eval/loss': 1.0, 'eval/rows': 3.0},
  }
  deadline, found = time.monotonic() + 60, None
  try:
    while found != expected and time.monotonic() < deadline:
      assert server.poll() is None, log.read_text()
      try:
        found = ask()
      except (OSError, KeyError) as e:  # It has not read all yet.
        found = e
      time.sleep(0.2)
  finally:
    server.kill()
    server.wait()
  assert found == expected, log.read_text()
