"""Promise: several processes of a run end, save and go on together.

One of them is killed, told to end, raises, or finds damage. The longer half is
marked slow.
"""

import json
import signal

import pytest

from jaxline import errors
from jaxline import platform
from tests import checkpoints
from tests import remains
from tests import several
from tests.programs import multi

DISAGREE = 'own is 0.5 in process 0, 1.5 in process 1'
pytestmark = pytest.mark.timeout(600)  # Also on a busy machine.


@pytest.mark.parametrize(
  'style',
  [
    pytest.param('sharded', marks=pytest.mark.process),
    pytest.param('per_device', marks=pytest.mark.slow),
  ],
)
def test_the_clock_of_the_first_decides_and_kills_lose_nothing(style, tmp_path):
  is_sharded = style == 'sharded'
  directory, straight = tmp_path / 'run', tmp_path / 'straight'
  all_save = '--config.train_checkpoint_all_hosts=True'
  mode = '--jaxline_mode=train_and_eval', '--config.eval_interval=1'
  # A computation of a step again and a save both ask all processes.
  again = ['--config.recompute_interval=1'] * is_sharded
  undisturbed = several.run(straight, style, all_save, *mode, *again, steps=40)
  a, b = (r.the('trained') for r in undisturbed)
  assert a['digest'] == b['digest']
  assert a['position'] != b['position']
  if is_sharded:
    assert a['shards'] == [[4, 4]]  # 'fsdp' over two processes.
    # They disagree in each evaluation, and say so once.
    assert undisturbed[0].err.count(DISAGREE) == 1

  def run(*args, **fault):
    return several.run(
      directory, style, all_save, *args, steps=40, step_secs=0.1, **fault
    )

  # All of checkpoint 4 is written, but one process has not said so.
  results = run(fault='1:save:4:kill', codes=None)
  several.peers_end(results, dead=1, secs=several.HEARTBEAT_SECS + 5)
  assert remains.steps(directory) == [2]

  # What is due goes by seconds; no other process asks its own clock.
  secs = [f'--config.{x}_interval_type=secs' for x in ('checkpoint', 'eval')]
  secs += [*mode, '--config.save_checkpoint_interval=1']
  fault, codes = '1:step:25:term', [75, 75]
  if not is_sharded:
    fault, codes = '0:step:25:int', [130, 75]
  first = run(*secs, fault=fault, codes=codes)
  assert {r.the('restored')['step'] for r in first} == {2}
  left = remains.steps(directory)
  assert 1 < len(left) < 9
  assert 25 <= left[-1] < 40
  assert all(f'after step {left[-1]}' in r.err for r in first)

  last = run(*secs)
  for one, other, whole in zip(first, last, undisturbed, strict=True):
    assert one.the('left') == other.the('restored') | {'what': 'left'}
    assert other.the('trained') == whole.the('trained')
  assert remains.bits(directory, 40) == remains.bits(straight, 40)
  assert several.logged(directory) == several.logged(straight)
  assert list(several.logged(straight)) == list(range(1, 41))
  evaluated, all_evaluated = (
    several.logged(x, 'eval') for x in (directory, straight)
  )
  assert 2 < len(evaluated) < 20
  if is_sharded:  # Of four batches of 4, the last has 3 rows.
    assert {row['rows'] for row in evaluated.values()} == {15 / 2}
  assert evaluated == {step: all_evaluated[step] for step in evaluated}
  for ended in (first, last):
    a, b = (r.all('evaluated', 'step') for r in ended)
    assert a == b

  # Another number of processes has other positions in the data.
  if is_sharded:
    config = multi.get_config()
    config.checkpoint_dir = str(directory)
    said = r"2 processes saved \['input'\] separately, but"
    with pytest.raises(errors.UsageError, match=said):
      platform.start(multi.Sharded, config, 'train')
    assert remains.steps(directory)[-1] == 40


@pytest.mark.process
def test_own_snapshots_and_the_clock_of_the_first(tmp_path, monkeypatch):
  directory = tmp_path / 'run'
  monkeypatch.setenv('MULTI_SEED', '6')  # The program has put it in.
  args = '--config.max_seconds=3', '--config.train_checkpoint_all_hosts=True'
  results = several.run(
    directory, 'per_device', *args, step_secs=0.1, steps=100000
  )
  end = remains.steps(directory)[-1]
  noted = json.loads((directory / 'checkpoints' / 'ended.json').read_text())
  assert noted['step'] == end
  # They agree on a step soon after the one that took the last second.
  assert 6 < end <= 6 + 30 + 3
  for i, result in enumerate(results):
    own = 5
    for step in range(6, end):
      own = own * 3 + step + i
    left, saved = result.the('left'), result.the('saved')
    # Each has read the checkpoint from the disk by itself.
    assert saved == left | {'what': 'saved'}
    assert left['position'] == {'total': own, 'host': i}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('dead', 'fault', 'secs'),
  [
    (0, 'step:5:kill', 5),
    (1, 'start:0:raise', several.HEARTBEAT_SECS + 5),
    (1, 'step:5:raise', several.HEARTBEAT_SECS + 5),
    (1, 'input:5:raise', several.HEARTBEAT_SECS + 5),
  ],
)
def test_a_failure_of_one_ends_both(tmp_path, dead, fault, secs):
  results = several.run(tmp_path / 'run', fault=f'{dead}:{fault}', codes=None)
  if fault.endswith('raise'):
    assert results[dead].code in (1, several.ABORTED)
    what = fault.removesuffix(':raise').replace(':', ' ')
    assert f'Failure: {what}' in results[dead].err
  several.peers_end(results, dead, secs)


@pytest.mark.slow
def test_damage_is_agreed_upon(tmp_path):
  directory = tmp_path / 'damaged'
  several.run(directory, steps=6)
  data = checkpoints.data_of(directory, 6)
  checkpoints.flip(max(data.glob('*state.params.w/c*')))
  results = several.run(directory)
  assert [r.the('restored')['step'] for r in results] == [4, 4]
  assert remains.steps(directory) == [2, 4, 6, 8, 10]
  assert all('is damaged' in r.err for r in results)
  assert list(several.logged(directory)) == list(range(1, several.STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('style', 'what', 'of_first'),
  # `evaluate` ends in process 0 if it needs nothing of the other process.
  [('sharded', 'kill', [2, 4]), ('per_device', 'term', [2, 4, 6])],
)
def test_evaluation_follows_once_and_in_order(tmp_path, style, what, of_first):
  directory = tmp_path / 'run'
  mode = '--jaxline_mode=eval'
  training = several.Run(directory, style, step_secs=0.5)
  evaluation = several.Run(directory, style, mode, fault=f'1:evaluate:6:{what}')
  try:
    results = evaluation.wait()
    assert [r.code for r in training.wait()] == [0, 0]
  finally:
    training.kill()
  several.peers_end(results, dead=1, secs=several.HEARTBEAT_SECS + 5)
  assert results[1].code == {'kill': -signal.SIGKILL, 'term': 75}[what]
  assert [r.all('evaluated', 'step') for r in results] == [of_first, [2, 4]]
  assert list(several.logged(directory, 'eval')) == [2, 4]
  results = several.run(directory, style, mode)
  # Only the evaluation that one process did not end is repeated.
  assert [r.all('evaluated', 'step') for r in results] == [[6, 8, 10]] * 2
  logged = several.logged(directory, 'eval')
  assert list(logged) == [2, 4, 6, 8, 10]
  best = min(logged, key=lambda step: logged[step]['loss'])
  kept = remains.steps(directory, 'best')
  # The per-device style keeps the best ones before as well.
  assert kept[-1] == best if style == 'per_device' else kept == [best]
  entries = remains.record(directory, best, 'best')['entries']
  assert entries['best_eval_metric_value'] == logged[best]['loss']
  # Nothing is left to evaluate.
  results = several.run(directory, style, mode)
  assert all(not r.all('evaluated', 'step') for r in results)


@pytest.mark.process
def test_the_best_by_a_metric_that_processes_disagree_in(tmp_path):
  args = '--jaxline_mode=train_and_eval', '--config.best_model_eval_metric=own'
  results = several.run(tmp_path / 'run', 'sharded', *args, codes=None)
  assert all(r.code in (2, several.ABORTED) for r in results)
  assert any(DISAGREE in r.err and r.code == 2 for r in results)


@pytest.mark.process
def test_a_directory_that_is_not_shared(tmp_path):
  a, b = tmp_path / 'mine', tmp_path / 'yours'
  results = several.run(a, directories=[a, b], codes=2)
  for result, directory in zip(results, (a, b), strict=True):
    assert f'config.checkpoint_dir ({str(directory)!r} in process' in result.err
    assert 'Processes [1] cannot see files' in result.err
  assert not (b / 'checkpoints').exists()


@pytest.mark.slow
def test_nonfinite_ends_both(tmp_path):
  directory = tmp_path / 'run'
  results = several.run(directory, fault='1:input:5:nan', codes=None)
  assert all(r.code in (1, several.ABORTED) for r in results)
  assert any('are not finite' in r.err for r in results)
  assert max(remains.steps(directory)) == 4
  results = several.run(directory)
  assert all(r.the('trained') for r in results)
  assert list(several.logged(directory)) == list(range(1, several.STEPS + 1))
