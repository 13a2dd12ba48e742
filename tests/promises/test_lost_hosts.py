"""Promise: several processes of a run end, save and go on together.

One of them is killed, told to end, hangs, raises, or finds damage. The longer
half is marked slow.
"""

import shutil
import signal

import pytest

from tests import remains
from tests import several

pytestmark = pytest.mark.timeout(600)  # Also on a busy machine.


def best_is_kept(directory, style='sharded'):
  """Checks the series `best`: the step, and its value to the last bit."""
  losses = {k: v['loss'] for k, v in several.logged(directory, 'eval').items()}
  best = min(losses, key=losses.__getitem__)
  kept = remains.steps(directory, 'best')
  # The per-device style keeps the best ones before as well.
  assert kept[-1] == best if style == 'per_device' else kept == [best]
  entries = remains.record(directory, best, 'best')['entries']
  assert entries['best_eval_metric_value'] == losses[best]


def same_end(results, others):
  """Checks that two runs trained to the same bits, on each process."""
  for a, b in zip(results, others, strict=True):
    assert a.the('trained') == b.the('trained')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('multiprocess')


@pytest.fixture(scope='module')
def undisturbed(folder):
  """A run of two processes from beginning to end."""
  directory = folder / 'undisturbed'
  return several.run(directory), directory


# --- Snapshots that the program has put in ------------------------------------


@pytest.mark.process
def test_each_process_begins_from_its_own_snapshot(folder, monkeypatch):
  directory = folder / 'snapshots'
  args = '--config.train_checkpoint_all_hosts=True'
  monkeypatch.setenv('MULTI_SEED', '6,6')
  results = several.run(directory, 'per_device', args)
  assert remains.steps(directory)[-1] == several.STEPS
  own = [5, 5]
  for step in range(6, several.STEPS):
    own = [total * 3 + step + i for i, total in enumerate(own)]
  for i, result in enumerate(results):
    trained, saved = result.the('trained'), result.the('saved')
    # Each has read the checkpoint from the disk by itself.
    assert saved['step'] == several.STEPS
    assert saved['digest'] == trained['digest']
    assert saved['own'] == trained['position']['total'] == own[i]


# --- Kills -------------------------------------------------------------------


@pytest.mark.process
def test_kills_lose_nothing(undisturbed, folder):
  results, directory = undisturbed
  a, b = (r.the('trained') for r in results)
  assert a['digest'] == b['digest']
  assert a['position'] != b['position']
  assert a['shards'] == [[4, 4]]  # 'fsdp' over two processes.
  assert remains.steps(directory) == [2, 4, 6, 8, 10]

  killed = folder / 'killed'
  # All of checkpoint 4 is written, but one process has not said so.
  results = several.run(
    killed, fault='1:save:4:kill', codes=None, step_secs=0.05
  )
  several.peers_end(results, dead=1, secs=several.HEARTBEAT_SECS + 5)
  assert remains.steps(killed) == [2]

  results = several.run(
    killed, fault='0:step:7:kill', codes=None, step_secs=0.1
  )
  several.peers_end(results, dead=0, secs=5)
  assert [r.the('restored')['step'] for r in results] == [2, 2]

  results = several.run(killed)
  assert {r.the('restored')['step'] for r in results} <= {4, 6}
  same_end(results, undisturbed[0])
  assert remains.bits(killed, several.STEPS) == remains.bits(
    directory, several.STEPS
  )
  assert several.logged(killed) == several.logged(directory)
  assert list(several.logged(killed)) == list(range(1, several.STEPS + 1))


@pytest.mark.parametrize(
  'style',
  [
    pytest.param('sharded', marks=pytest.mark.process),
    pytest.param('per_device', marks=pytest.mark.slow),
  ],
)
def test_the_clock_of_the_first_decides(style, folder):
  directory, straight = folder / f'clock_{style}', folder / f'steps_{style}'
  args = (
    '--jaxline_mode=train_and_eval',
    '--config.train_checkpoint_all_hosts=True',
    '--config.save_checkpoint_interval=1',
    '--config.eval_interval=1',
  )
  secs = (
    *args,
    '--config.checkpoint_interval_type=secs',
    '--config.eval_interval_type=secs',
  )
  # The kill comes 3.5 s after the first save is due: it may take long.
  time = {'step_secs': 0.1, 'steps': 60}
  first = several.run(
    directory, style, *secs, fault='1:step:45:kill', codes=None, **time
  )
  several.peers_end(first, dead=1, secs=several.HEARTBEAT_SECS + 5)
  assert 0 < len(remains.steps(directory)) < 10
  results = several.run(directory, style, *secs, **time)
  same_end(results, several.run(straight, style, *args, steps=60))
  assert remains.bits(directory, 60) == remains.bits(straight, 60)
  assert several.logged(directory) == several.logged(straight)
  evaluated, all_evaluated = (
    several.logged(x, 'eval') for x in (directory, straight)
  )
  assert 2 < len(evaluated) < 20
  assert evaluated == {step: all_evaluated[step] for step in evaluated}
  for ended in (first, results):
    a, b = (r.all('evaluated', 'step') for r in ended)
    assert a == b


# --- Signals -----------------------------------------------------------------


@pytest.mark.parametrize(
  ('style', 'fault', 'codes'),
  [
    pytest.param(*case, marks=mark)
    for mark, *case in [
      (pytest.mark.process, 'sharded', '1:step:3:term', [75, 75]),
      (pytest.mark.slow, 'per_device', '0:step:3:int', [130, 75]),
      # During start-up: it acts after the first step.
      (pytest.mark.slow, 'sharded', '1:start:0:term', [75, 75]),
    ]
  ],
)
def test_after_a_signal_to_one_both_go_on_as_without(
  folder, style, fault, codes
):
  directory = folder / fault.replace(':', '_')
  # No save but that one.
  args = (
    '--config.save_checkpoint_interval=1000',
    '--config.checkpoint_interval_type=secs',  # A thread waits for requests.
    '--config.train_checkpoint_all_hosts=True',
  )
  left = several.run(
    directory, style, *args, fault=fault, codes=codes, step_secs=0.1, steps=60
  )
  (step,) = remains.steps(directory)
  assert 1 <= step < 60
  assert all(f'after step {step}' in r.err for r in left), several.errors(left)
  gone_on = several.run(directory, style, *args, steps=step + 2)
  for a, b in zip(left, gone_on, strict=True):
    assert a.the('left') == b.the('restored') | {'what': 'left'}
  assert remains.steps(directory) == [step, step + 2]
  assert list(several.logged(directory)) == list(range(1, step + 3))
  straight = folder / f'{directory.name}_straight'
  same_end(gone_on, several.run(straight, style, *args, steps=step + 2))
  assert remains.bits(straight, step + 2) == remains.bits(directory, step + 2)
  assert several.logged(straight) == several.logged(directory)


@pytest.mark.slow
def test_a_signal_to_one_evaluator_ends_both(undisturbed, folder):
  directory = folder / 'told'
  shutil.copytree(undisturbed[1], directory)
  results = several.run(
    directory, 'sharded', '--jaxline_mode=eval',
    fault='1:evaluate:4:term', codes=None,
  )  # fmt: skip
  assert results[1].code == 75, several.errors(results)
  several.peers_end(results, dead=1, secs=several.HEARTBEAT_SECS + 5)


# --- Other numbers of processes and devices ----------------------------------


@pytest.mark.process
def test_another_number_of_processes(undisturbed):
  _, directory = undisturbed
  (result,) = several.run(
    directory, processes=1, devices=2, steps=12, codes=None
  )
  assert result.code == 2
  assert "2 processes saved ['input'] separately, but" in result.err
  assert remains.steps(directory)[-1] == several.STEPS


# --- What hangs --------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_sleeps_is_ended_by_its_watchdog(folder):
  directory = folder / 'sleeps'
  results = several.run(
    directory, 'sharded', '--config.watchdog_secs=20',
    fault='1:step:5:sleep', codes=None,
  )  # fmt: skip
  # Both are silent, the one that waits as well; whichever is first.
  assert 70 in [r.code for r in results]
  assert all(r.code not in (0, -signal.SIGKILL) for r in results)
  first = min(range(2), key=lambda i: results[i].at)
  several.peers_end(results, dead=first, secs=several.HEARTBEAT_SECS + 5)
  assert any('Watchdog: no sign of life' in r.err for r in results)
  same = several.run(directory)
  assert {r.the('restored')['step'] for r in same} <= {2, 4}


@pytest.mark.slow
@pytest.mark.parametrize('place', ['start:0', 'step:5', 'input:5'])
def test_an_error_in_one_ends_both(folder, place):
  directory = folder / place.replace(':', '_')
  results = several.run(directory, fault=f'1:{place}:raise', codes=None)
  assert results[1].code in (1, several.ABORTED)
  assert f'Failure: {place.replace(":", " ")}' in results[1].err
  several.peers_end(results, dead=1, secs=several.HEARTBEAT_SECS + 5)


# --- Damage ------------------------------------------------------------------


@pytest.mark.slow
def test_damage_is_agreed_upon(folder):
  directory = folder / 'damaged'
  several.run(directory, steps=6)
  part = max(remains.data_of(directory, 6).glob('*state.params.w/c*'))
  content = bytearray(part.read_bytes())
  content[0] ^= 1
  part.write_bytes(content)
  results = several.run(directory)
  assert [r.the('restored')['step'] for r in results] == [4, 4]
  assert remains.steps(directory) == [2, 4, 6, 8, 10]
  assert all('is damaged' in r.err for r in results)
  assert list(several.logged(directory)) == list(range(1, several.STEPS + 1))


# --- Evaluation --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('style', ['sharded', 'per_device'])
def test_evaluation_follows_once_and_in_order(folder, style):
  directory = folder / f'followed_{style}'
  mode = '--jaxline_mode=eval'
  training = several.Run(directory, style, step_secs=0.5)
  evaluation = several.Run(directory, style, mode, fault='1:evaluate:6:kill')
  try:
    results = evaluation.wait()
    assert [r.code for r in training.wait()] == [0, 0]
  finally:
    training.kill()
  several.peers_end(results, dead=1, secs=several.HEARTBEAT_SECS + 5)
  first = [r.all('evaluated', 'step') for r in results]
  results = several.run(directory, style, mode)
  second = [r.all('evaluated', 'step') for r in results]
  assert [a + b for a, b in zip(first, second, strict=True)] == [
    [2, 4, 6, 8, 10]
  ] * 2
  assert list(several.logged(directory, 'eval')) == [2, 4, 6, 8, 10]
  best_is_kept(directory, style)
  # Nothing is left to evaluate.
  results = several.run(directory, style, mode)
  assert all(not r.all('evaluated', 'step') for r in results)


# --- What is refused ---------------------------------------------------------


@pytest.mark.process
def test_steps_are_computed_twice_beside_saves(folder):
  # Both ask all processes, on two threads.
  options = 'recompute_interval', 'save_checkpoint_interval'
  several.run(
    folder, 'sharded', *(f'--config.{key}=1' for key in options), steps=40
  )


@pytest.mark.process
def test_a_directory_that_is_not_shared(folder):
  a, b = folder / 'mine', folder / 'yours'
  results = several.run(a, directories=[a, b], codes=2)
  for result, directory in zip(results, (a, b), strict=True):
    assert f'config.checkpoint_dir ({str(directory)!r} in process' in result.err
    assert 'Processes [1] cannot see files' in result.err
  assert not (b / 'checkpoints').exists()


@pytest.mark.slow
@pytest.mark.parametrize('style', ['sharded', 'per_device'])
def test_nonfinite_ends_both(folder, style):
  directory = folder / f'nan_{style}'
  place = {'sharded': 'input', 'per_device': 'step'}[style]
  results = several.run(
    directory, style, '--config.on_nonfinite=raise',
    fault=f'1:{place}:5:nan', codes=None,
  )  # fmt: skip
  assert all(r.code in (1, several.ABORTED) for r in results), several.errors(
    results
  )
  assert any('are not finite' in r.err for r in results), several.errors(
    results
  )
  assert max(remains.steps(directory)) == 4
  results = several.run(directory, style)
  assert all(r.the('trained') for r in results)
  assert list(several.logged(directory)) == list(range(1, several.STEPS + 1))
