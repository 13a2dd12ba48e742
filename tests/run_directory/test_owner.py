"""Tests of jaxline.run_directory.owner: who may write, on disk and in buckets.

Of claims in a bucket the other process is played by this one, which forgets
what it has claimed.
"""

import errno
import fcntl
import multiprocessing
import os
import shutil

import pytest

from jaxline.run_directory import owner
from jaxline.run_directory import store as store_lib
from tests import processes


def claim_elsewhere(directory) -> str:
  """Returns the error of another process that claims a directory."""
  code = "from jaxline.run_directory import owner; owner.Claim('{}', 'train')"
  return processes.run('-c', code.format(directory)).stderr


def test_a_claim_without_locks_warns(tmp_path, monkeypatch, caplog):
  def lockf(*args):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(fcntl, 'lockf', lockf)
  for number in errno.ENOLCK, errno.ENOSYS:
    with owner.Claim(tmp_path, 'train') as claim:
      assert os.strerror(number) in caplog.text
      with pytest.raises(owner.ClaimedError):  # In one process it is known.
        owner.Claim(tmp_path, 'train')
      claim.check()
  number = errno.EACCES  # On some systems for a lock that is taken.
  with pytest.raises(owner.ClaimedError):
    owner.Claim(tmp_path, 'train')
  number = errno.EIO
  with pytest.raises(OSError, match='Input/output'):
    owner.Claim(tmp_path, 'train')


@pytest.mark.filterwarnings('ignore:.*fork.*')
def test_one_claim_in_this_process_its_children_and_all_others(tmp_path):
  claim, other = (owner.Claim(tmp_path, what) for what in ('train', 'best'))
  for what, key in ('train', 'checkpoint_dir'), ('best', 'best_model_eval'):
    for _ in range(2):  # It has not got it by asking.
      with pytest.raises(owner.ClaimedError, match=f'in use.*{key}'):
        owner.Claim(tmp_path / '.', what)
  ours, theirs = multiprocessing.Pipe()
  child = os.fork()
  if not child:
    for what in ('train', 'best'):
      try:
        owner.Claim(tmp_path, what)
        theirs.send('claimed')
      except owner.ClaimedError:
        theirs.send('in use')
      claim.release()  # This process has nothing to give back.
      theirs.recv()
    os._exit(0)
  assert ours.recv() == 'in use'
  # Neither a refusal nor the child has given the lock back.
  assert 'ClaimedError' in claim_elsewhere(tmp_path)
  claim.check()
  for mine in (claim, claim, other):
    mine.release()
  owner.Claim(tmp_path, 'train').release()
  assert claim_elsewhere(tmp_path) == ''
  ours.send(None)
  assert ours.recv() == 'claimed'
  ours.send(None)
  os.waitpid(child, 0)


@pytest.mark.parametrize('removed', ['checkpoints/claims', '.'])
def test_a_lock_that_is_removed_is_lost(removed, tmp_path):
  for is_made_anew in False, True:  # As another run makes it.
    run = tmp_path / f'{is_made_anew}'
    with owner.Claim(run, 'train') as claim:
      claim.check()
      shutil.rmtree(run / removed)
      if is_made_anew:
        lock = run / 'checkpoints' / 'claims' / 'train.lock'
        lock.parent.mkdir(parents=True)
        lock.touch()
      with pytest.raises(owner.LostClaimError):
        claim.check()


@pytest.fixture
def another(monkeypatch):
  """Makes this process another one."""
  return lambda: monkeypatch.setattr(owner, '_claimed', {})


BUCKETS = pytest.mark.parametrize('url', ['gs'], indirect=True)


@BUCKETS
@pytest.mark.parametrize('is_deleted', [False, True])
def test_what_a_dead_process_had_is_taken_over(
  is_deleted, url, clock, another, monkeypatch, caplog
):
  """After a while without a sign of life, or when its object is deleted."""
  older = [owner.Claim(url, x) for x in ('train', 'eval', 'latest', 'best')]
  another()
  start, store, signs = clock.now, store_lib.at(url), []
  sign = lambda: signs.append(clock.now)
  monkeypatch.setattr(owner.watchdog, 'report_progress', sign)

  def delete_what_is_named():
    (line,) = (x for x in caplog.messages if 'delete this object' in x)
    store.delete(line.partition(': ')[0].removeprefix(f'{url}/'))

  if is_deleted:
    clock.at_sleep = delete_what_is_named
  # In another order: an evaluation may be the first that goes on. Then it is
  # known that the process is dead, and nobody waits again.
  newer = [owner.Claim(url, x) for x in ('best', 'train', 'latest', 'eval')]
  waited = clock.now - start
  assert waited == (owner._LOOK_SECS if is_deleted else owner.STALE_SECS)
  assert len(signs) == waited / owner._LOOK_SECS
  older.pop().release()  # It does not know of its loss.
  lost = lambda: pytest.raises(owner.LostClaimError, match='taken over')
  for claim in older:
    with lost():
      claim.check()
  for claim in older[1:]:
    claim.release()
  for claim in newer:
    claim.check()  # It is still there.
    claim.release()
  assert store.names('checkpoints/claims') == []
  with lost():  # Also what was taken and given back.
    older[0].check()
  older[0].release()


@BUCKETS
def test_who_lives_keeps_the_claim(url, clock, another, monkeypatch):
  older, start, beats = owner.Claim(url, 'train'), clock.now, []
  store, write = older._beat._store, older._beat._store.write

  def lose(*args):
    monkeypatch.setattr(store, 'write', write)
    write(*args)
    raise OSError(errno.EIO, 'Input/output error')

  # A beat whose answer is lost is repeated.
  monkeypatch.setattr(store, 'write', lose)
  with pytest.raises(OSError, match='Input/output'):
    older.check()
  older.check()

  def beat():
    if clock.now - start > owner.BEAT_SECS:
      beats.append(older._beat.write())

  clock.at_sleep = beat
  another()
  with pytest.raises(owner.ClaimedError, match='in use'):
    owner.Claim(url, 'train')
  assert beats == [True]
  older.check()
  older.release()
  another()
  owner.Claim(url, 'train').release()  # It was given back: nobody waits.


@BUCKETS
def test_one_of_two_gets_what_is_stale(url, clock, another, monkeypatch):
  older = owner.Claim(url, 'train')
  another()
  store = store_lib.at(url).below('checkpoints')
  write = owner.Heartbeat.write

  def late(beat, **value):
    store.write('claims/train', b'{"nonce": "of a third"}')
    return write(beat, **value)

  monkeypatch.setattr(owner.Heartbeat, 'write', late)
  with pytest.raises(owner.ClaimedError):
    owner.Claim(url, 'train')
  assert b'third' in store.read('claims/train')
  older.release()


@BUCKETS
def test_objects_that_cannot_be_listed(url, monkeypatch):
  # TensorStore lists nothing where listing is not permitted.
  monkeypatch.setattr(store_lib.Bucket, 'names', lambda self, folder='': [])
  with pytest.raises(PermissionError, match='listed'):
    owner.Claim(url, 'train')
  assert store_lib.at(url).read('checkpoints/claims/train') is None


def test_a_beat_goes_on_after_an_error(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(owner, 'BEAT_SECS', 0.01)
  store, calls = store_lib.at(tmp_path), []
  write = store.write

  def fail_once(*args):
    calls.append(args)
    if len(calls) == 3:
      raise OSError(errno.EIO, 'Input/output error')
    return write(*args)

  monkeypatch.setattr(store, 'write', fail_once)
  beat = owner.Heartbeat(store, 'beat')
  beat.write(data=[1])
  processes.wait_until(lambda: len(calls) > 5)
  assert 'Input/output' in caplog.text
  beat.stop()
  assert store.read('beat') is None
  monkeypatch.setattr(store, 'write', pytest.fail)  # It has stopped.
