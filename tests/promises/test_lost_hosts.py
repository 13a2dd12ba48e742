"""Promise: several processes of a run end, save and go on together.

One of them is killed, told to end, raises, or finds damage. The longer half is
marked slow.
"""

import pytest

from jaxline import errors
from jaxline import platform
from tests import remains
from tests import several
from tests.programs import multi
from tests.programs import multi_config

DISAGREE = 'own is 0.5 in process 0, 1.5 in process 1'
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


@pytest.fixture
def folder(tmp_path):
  return tmp_path


# --- Snapshots that the program has put in ------------------------------------


@pytest.mark.process
def test_each_process_begins_from_its_own_snapshot(folder, monkeypatch):
  directory = folder / 'snapshots'
  args = '--config.train_checkpoint_all_hosts=True'
  monkeypatch.setenv('MULTI_SEED', '6')
  results = several.run(directory, 'per_device', args)
  assert remains.steps(directory)[-1] == several.STEPS
  for i, result in enumerate(results):
    own = 5
    for step in range(6, several.STEPS):
      own = own * 3 + step + i
    trained, saved = result.the('trained'), result.the('saved')
    # Each has read the checkpoint from the disk by itself.
    assert saved == trained | {'what': 'saved'}
    assert trained['position'] == {'total': own, 'host': i}


# --- Kills and signals --------------------------------------------------------


@pytest.mark.parametrize(
  ('style', 'signal_to_one', 'codes'),
  [
    pytest.param(
      'sharded', '1:step:25:term', [75, 75], marks=pytest.mark.process
    ),
    pytest.param(
      'per_device', '0:step:25:int', [130, 75], marks=pytest.mark.slow
    ),
  ],
)
def test_the_clock_of_the_first_decides_and_kills_lose_nothing(
  style, signal_to_one, codes, folder
):
  directory, straight = folder / 'run', folder / 'straight'
  all_save = '--config.train_checkpoint_all_hosts=True'
  evaluates = (
    all_save,
    '--jaxline_mode=train_and_eval',
    '--config.save_checkpoint_interval=1',
    '--config.eval_interval=1',
  )
  # A computation of a step again and a save both ask all processes.
  again = ['--config.recompute_interval=1'] * (style == 'sharded')
  undisturbed = several.run(straight, style, *evaluates, *again, steps=40)
  a, b = (r.the('trained') for r in undisturbed)
  assert a['digest'] == b['digest']
  assert a['position'] != b['position']
  if style == 'sharded':
    assert a['shards'] == [[4, 4]]  # 'fsdp' over two processes.
    # They disagree in each evaluation, and say so once.
    assert undisturbed[0].err.count(DISAGREE) == 1

  def run(*args, **fault):
    return several.run(
      directory, style, *args, **{'steps': 40, 'step_secs': 0.1} | fault
    )

  # All of checkpoint 4 is written, but one process has not said so.
  results = run(all_save, fault='1:save:4:kill', codes=None)
  several.peers_end(results, dead=1, secs=several.HEARTBEAT_SECS + 5)
  assert remains.steps(directory) == [2]

  results = run(all_save, fault='0:step:7:kill', codes=None)
  several.peers_end(results, dead=0, secs=5)
  assert [r.the('restored')['step'] for r in results] == [2, 2]
  kept = remains.steps(directory)
  assert kept[-1] in (4, 6)

  # What is due goes by seconds; no other process asks its own clock.
  secs = [f'--config.{x}_interval_type=secs' for x in ('checkpoint', 'eval')]
  first = run(*evaluates, *secs, fault=signal_to_one, codes=codes)
  assert {r.the('restored')['step'] for r in first} == {kept[-1]}
  left = remains.steps(directory)
  assert len(kept) < len(left) < len(kept) + 8
  assert 25 <= left[-1] < 40
  assert all(f'after step {left[-1]}' in r.err for r in first)

  last = run(*evaluates, *secs)
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
  if style == 'sharded':  # Of four batches of 4, the last has 3 rows.
    assert {row['rows'] for row in evaluated.values()} == {15 / 2}
  assert evaluated == {step: all_evaluated[step] for step in evaluated}
  for ended in (first, last):
    a, b = (r.all('evaluated', 'step') for r in ended)
    assert a == b

  # Another number of processes has other positions in the data.
  if style == 'sharded':
    config = multi_config.get_config()
    config.checkpoint_dir = str(directory)
    said = r"2 processes saved \['input'\] separately, but"
    with pytest.raises(errors.UsageError, match=said):
      platform.start(multi.Sharded, config, 'train')
    assert remains.steps(directory)[-1] == 40


# --- Errors --------------------------------------------------------------


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
@pytest.mark.parametrize(
  ('style', 'what'), [('sharded', 'kill'), ('per_device', 'term')]
)
def test_evaluation_follows_once_and_in_order(folder, style, what):
  directory = folder / f'followed_{style}'
  mode = '--jaxline_mode=eval'
  training = several.Run(directory, style, step_secs=0.5)
  evaluation = several.Run(directory, style, mode, fault=f'1:evaluate:6:{what}')
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
def test_the_best_by_a_metric_that_processes_disagree_in(folder):
  args = '--jaxline_mode=train_and_eval', '--config.best_model_eval_metric=own'
  results = several.run(folder / 'run', 'sharded', *args, codes=None)
  assert all(r.code in (2, several.ABORTED) for r in results)
  assert any(DISAGREE in r.err and r.code == 2 for r in results)


@pytest.mark.process
def test_a_directory_that_is_not_shared(folder):
  a, b = folder / 'mine', folder / 'yours'
  results = several.run(a, directories=[a, b], codes=2)
  for result, directory in zip(results, (a, b), strict=True):
    assert f'config.checkpoint_dir ({str(directory)!r} in process' in result.err
    assert 'Processes [1] cannot see files' in result.err
  assert not (b / 'checkpoints').exists()


@pytest.mark.slow
def test_nonfinite_ends_both(folder):
  directory = folder / 'nan'
  results = several.run(directory, fault='1:input:5:nan', codes=None)
  assert all(r.code in (1, several.ABORTED) for r in results)
  assert any('are not finite' in r.err for r in results)
  assert max(remains.steps(directory)) == 4
  results = several.run(directory)
  assert all(r.the('trained') for r in results)
  assert list(several.logged(directory)) == list(range(1, several.STEPS + 1))
