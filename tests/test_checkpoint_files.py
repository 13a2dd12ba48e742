"""Tests of jaxline.checkpoint.files."""

import errno
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from jaxline import disk
from jaxline.checkpoint import contents
from jaxline.checkpoint import files

DAY = 24 * 3600.0


# Which steps there are, and which stay.


def test_only_names_that_are_numbers_are_steps(tmp_path):
  for name in (
    '0', '12', '3', '03', '-1', '4.5', '٣', '5.orbax-checkpoint-tmp',
    '6.new', '.deleted-7-1', '8.partial', 'x', '1_0', '9 ',
  ):  # fmt: skip
    (tmp_path / name).mkdir()
  assert files.steps(tmp_path) == [0, 3, 12]
  assert files.steps(tmp_path / 'absent') == []
  (tmp_path / 'file').touch()
  assert files.steps(tmp_path / 'file') == []


@pytest.mark.parametrize(
  ('keep', 'saved', 'stay'),
  [
    pytest.param({'newest': 2}, [], [], id='none'),
    pytest.param({'newest': 2}, [(1, 0.0)], [1], id='fewer'),
    pytest.param(
      {'newest': 2}, [(30, 0.0), (10, 5.0), (20, 1.0)], [20, 30], id='by step'
    ),
    pytest.param(
      {'newest': 1, 'every_steps': 10},
      [(s, 0.0) for s in (0, 4, 8, 12, 16, 20, 24, 36, 38)],
      [12, 20, 36, 38],
      id='the first at or after each multiple',
    ),
    pytest.param(
      {'newest': 1, 'every_hours': 24},
      [(i, i * DAY / 4) for i in range(1, 12)],
      [1, 5, 9, 11],
      id='a day apart',
    ),
    pytest.param(
      {'newest': 1, 'every_hours': 24},
      [(1, 9 * DAY), (2, 1 * DAY), (3, 1.5 * DAY), (4, 2 * DAY), (5, 2 * DAY)],
      [1, 2, 4, 5],
      id='the clock was put back',
    ),
    pytest.param(
      {'newest': 1, 'every_steps': 4, 'every_hours': 24},
      [(2, 0.0), (4, 1.0), (6, DAY), (7, DAY), (9, DAY + 1)],
      [2, 4, 6, 9],
      id='both',
    ),
  ],
)
def test_which_stay(keep, saved, stay):
  gone = files.removable(saved, **keep)
  assert sorted({step for step, _ in saved} - set(gone)) == stay


# Removing, replacing, cleaning, linking.


def _checkpoint(path: pathlib.Path, content: str = 'content') -> pathlib.Path:
  (path / 'arrays' / 'w').mkdir(parents=True)
  (path / files.RECORD).write_text(
    json.dumps({'format': 2, 'step': 5, 'is': content})
  )
  (path / 'arrays' / 'w' / '0').write_bytes(b'abcd')
  files.write_checksums(path, 0, 1)
  return path


def _problems(path: pathlib.Path, *args, **kwargs) -> list[str]:
  try:
    contents.Checkpoint(path).verify(*args, **kwargs)
  except files.DamagedError as e:
    return list(e.args)
  return []


def _content(path: pathlib.Path) -> str:
  return files.read_json(path / files.RECORD)['is']


def test_removed_in_one_rename(tmp_path, monkeypatch):
  _checkpoint(tmp_path / '5')
  seen = []
  monkeypatch.setattr(
    files.shutil,
    'rmtree',
    lambda path, **unused: seen.append((path.name, os.listdir(tmp_path))),
  )
  files.remove(tmp_path / '5')
  ((doomed, there),) = seen
  assert there == [doomed]
  assert doomed.startswith('.deleted-5')
  assert files.steps(tmp_path) == []
  files.remove(tmp_path / '5')  # Nothing there is nothing to do.


@pytest.mark.parametrize('renames', [0, 1, 2])
def test_a_replacement_killed_at_any_instant_loses_none(
  renames, tmp_path, monkeypatch
):
  _checkpoint(tmp_path / '5', 'old')
  _checkpoint(files.new(tmp_path / '5'), 'new')
  done = []

  def rename(a, b, rename=os.rename):
    if len(done) == renames:
      raise KeyboardInterrupt
    done.append(rename(a, b))

  with monkeypatch.context() as patch:
    patch.setattr(files.os, 'rename', rename)
    try:
      files.replace(tmp_path / '5')
    except KeyboardInterrupt:
      assert renames < 2
  files.clean(tmp_path)
  assert os.listdir(tmp_path) == ['5']
  contents.Checkpoint(tmp_path / '5').verify()
  assert _content(tmp_path / '5') == 'new'


def test_clean(tmp_path):
  _checkpoint(tmp_path / '5')
  _checkpoint(tmp_path / '6.new', 'six')
  for name in (
    '7.orbax-checkpoint-tmp', '7.new.orbax-checkpoint-tmp', '.deleted-1-2',
    '8.partial', '03', 'x.new',
  ):  # fmt: skip
    _checkpoint(tmp_path / name)
  (tmp_path / 'notes.txt').touch()
  _checkpoint(tmp_path / '5.bak')
  files.clean(tmp_path)
  # What we and Orbax do not make is the user's.
  assert sorted(os.listdir(tmp_path)) == [
    '03', '5', '5.bak', '6', 'notes.txt', 'x.new',
  ]  # fmt: skip
  assert _content(tmp_path / '6') == 'six'
  files.clean(tmp_path / 'absent')


@pytest.mark.parametrize('links', [True, False])
def test_link_outlives_its_source(links, tmp_path, monkeypatch):
  source = _checkpoint(tmp_path / '5')
  if not links:

    def link(a, b):
      raise PermissionError(1, 'no hard links here')

    monkeypatch.setattr(files.os, 'link', link)
  files.link(source, tmp_path / 'pin' / '5')
  same = os.path.samefile(
    source / files.RECORD, tmp_path / 'pin' / '5' / files.RECORD
  )
  assert same == links
  files.remove(source)
  contents.Checkpoint(tmp_path / 'pin' / '5').verify()


# Files that are whole.


def test_json_is_whole_or_not_there(tmp_path, monkeypatch):
  path = tmp_path / 'a.json'
  files.write_json(path, {'a': 1})
  with pytest.raises(TypeError):
    files.write_json(path, {'a': object()})

  def full(fd):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(files.os, 'fsync', full)
  with pytest.raises(OSError, match='No space'):
    files.write_json(path, {'a': 2})
  assert files.read_json(path) == {'a': 1}


@pytest.fixture
def synced(monkeypatch):
  """The names of all that was renamed, and of what was synced after it."""
  happened = []

  def fsync(fd, fsync=os.fsync):
    happened.append(('sync', os.readlink(f'/proc/self/fd/{fd}')))
    fsync(fd)

  def rename(a, b, rename=os.replace):
    rename(a, b)
    happened.append(('rename', str(b)))

  monkeypatch.setattr(files.os, 'fsync', fsync)
  monkeypatch.setattr(files.os, 'replace', rename)
  monkeypatch.setattr(files.os, 'rename', rename)
  return happened


def test_a_new_name_is_on_the_disk_too(tmp_path, synced):
  files.write_json(tmp_path / 'a.json', 1)
  assert synced[1:] == [
    ('rename', str(tmp_path / 'a.json')), ('sync', str(tmp_path))
  ]  # fmt: skip


def test_a_replacement_is_on_the_disk_before_the_old_one_goes(tmp_path, synced):
  _checkpoint(tmp_path / '5')
  _checkpoint(files.new(tmp_path / '5'))
  synced.clear()
  files.replace(tmp_path / '5')
  sync = ('sync', str(tmp_path))
  doomed = f'.deleted-5-{os.getpid()}'
  renames = [('rename', str(tmp_path / n)) for n in (doomed, '5')]
  assert synced == [sync, *renames, sync]


def test_directories_that_cannot_be_synced(tmp_path, monkeypatch):
  error = OSError(errno.EINVAL, 'Invalid argument')

  def fsync(fd):
    raise error

  monkeypatch.setattr(files.os, 'fsync', fsync)
  disk.sync_directory(tmp_path)
  error = OSError(errno.EIO, 'Input/output error')
  with pytest.raises(OSError, match='Input/output'):
    disk.sync_directory(tmp_path)


@pytest.mark.parametrize(
  ('write', 'match'),
  [
    (lambda p: None, r'a.json cannot be read \(No such file'),
    (lambda p: p.mkdir(), r'a.json cannot be read \(Is a directory\)'),
    (lambda p: p.write_text('{"a": '), 'a.json is not JSON'),
    (lambda p: p.write_bytes(b'"\xff"'), 'a.json is not JSON'),
    (lambda p: p.write_bytes(b''), 'a.json is not JSON'),
  ],
)
def test_json_that_is_damaged(write, match, tmp_path):
  write(tmp_path / 'a.json')
  with pytest.raises(files.DamagedError, match=match):
    files.read_json(tmp_path / 'a.json')


def test_every_bit_of_every_file_is_guarded(tmp_path):
  path = _checkpoint(tmp_path / '5')
  contents.Checkpoint(path).verify()
  total = 0
  for name in ('checkpoint.json', 'arrays/w/0', 'checksums_0.json'):
    whole = (path / name).read_bytes()
    for bit in range(8 * len(whole)):
      flipped = bytearray(whole)
      flipped[bit // 8] ^= 1 << bit % 8
      if name == 'checksums_0.json':
        # White space and the like may change: what it says may not.
        try:
          if json.loads(flipped) == json.loads(whole):
            continue
        except ValueError:
          pass
      (path / name).write_bytes(flipped)
      (problem,) = _problems(path)
      assert problem.startswith(name), (bit, problem)
      total += 1
    (path / name).write_bytes(whole)
  assert total > 1000


def test_shares_of_several_processes(tmp_path):
  path = _checkpoint(tmp_path / '5')
  for process in range(3):
    files.write_checksums(path, process, 3)
  parts = [
    files.read_json(path / f'checksums_{i}.json')['files'] for i in range(3)
  ]
  assert [list(part) for part in parts] == [
    ['arrays/w/0'], ['checkpoint.json'], []
  ]  # fmt: skip
  assert files.read_checksums(path) == parts[0] | parts[1]
  assert files.size(path) == 4 + parts[1]['checkpoint.json'][0]
  (path / 'arrays/w/0').write_bytes(b'abce')
  per_process = [_problems(path, share=slice(i, None, 2)) for i in range(2)]
  assert [len(problems) for problems in per_process] == [1, 0]
  contents.Checkpoint(path).verify(lambda name: name == 'checkpoint.json')
  (path / 'checksums_1.json').unlink()
  (problem,) = _problems(path)
  assert problem.startswith('checksums_1.json cannot be read')


def test_a_file_that_was_added_is_no_damage(tmp_path):
  path = _checkpoint(tmp_path / '5')
  for name in ('.checkpoint.json.swp', 'arrays/w/.nfs0001', 'arrays/.DS_Store'):
    (path / name).write_text('x')
  contents.Checkpoint(path).verify()
  (path / 'arrays/w/0').unlink()
  assert _problems(path) == ['arrays/w/0 is missing']


# Claims.

_CLAIM = 'from jaxline.checkpoint import files; import sys, os, time;'


def _claim_elsewhere(directory) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-c', f'{_CLAIM} files.Claim(sys.argv[1], "train")',
     str(directory)],
    capture_output=True, text=True, check=False, env=_env(),
  )  # fmt: skip


def _env() -> dict[str, str]:
  root = str(pathlib.Path(__file__).parents[1])
  return {**os.environ, 'PYTHONPATH': root}


def test_one_claim_in_this_process_and_all_others(tmp_path):
  claim = files.Claim(tmp_path, 'train')
  with pytest.raises(files.ClaimedError, match='in use'):
    files.Claim(tmp_path / '.', 'train')
  # The refusal did not give the lock back.
  other = _claim_elsewhere(tmp_path)
  assert other.returncode != 0
  assert 'ClaimedError' in other.stderr
  files.Claim(tmp_path, 'eval').release()
  claim.release()
  claim.release()
  assert _claim_elsewhere(tmp_path).returncode == 0
  files.Claim(tmp_path, 'train').release()


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOSYS])
def test_a_claim_without_locks_warns(number, tmp_path, monkeypatch, caplog):
  def lockf(*args):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(files.fcntl, 'lockf', lockf)
  claim = files.Claim(tmp_path, 'train')
  assert f'has no locks ({os.strerror(number)})' in caplog.text
  with pytest.raises(files.ClaimedError):  # In one process it is known.
    files.Claim(tmp_path, 'train')
  claim.check()
  claim.release()
  number = errno.EIO
  with pytest.raises(OSError, match='Input/output'):
    files.Claim(tmp_path, 'train')


def test_a_folder_of_another_user_is_not_in_use(tmp_path, monkeypatch):
  def refuse(*args):
    raise PermissionError(errno.EACCES, 'Permission denied')

  files.Claim(tmp_path, 'eval').release()  # Of a process that is gone.
  with monkeypatch.context() as patched:
    patched.setattr(files.os, 'open', refuse)
    with pytest.raises(PermissionError):
      files.Claim(tmp_path, 'eval')
  # On some systems this is what a lock that is taken raises.
  monkeypatch.setattr(files.fcntl, 'lockf', refuse)
  with pytest.raises(files.ClaimedError):
    files.Claim(tmp_path, 'eval')


def test_a_claim_ends_with_its_process(tmp_path):
  hold = 'files.Claim(sys.argv[1], "train"); print(flush=True); time.sleep(60)'
  with subprocess.Popen(
    [sys.executable, '-c', _CLAIM + hold, str(tmp_path)],
    stdout=subprocess.PIPE,
    env=_env(),
  ) as owner:
    try:
      owner.stdout.readline()
      with pytest.raises(files.ClaimedError):
        files.Claim(tmp_path, 'train')
    finally:
      owner.send_signal(signal.SIGKILL)
    owner.wait()
  files.Claim(tmp_path, 'train').release()


@pytest.mark.filterwarnings('ignore:.*fork.*')
def test_a_forked_child_has_no_part_in_it(tmp_path):
  claim = files.Claim(tmp_path, 'train')
  ours, theirs = multiprocessing.Pipe()
  child = os.fork()
  if not child:
    try:
      files.Claim(tmp_path, 'train')
      theirs.send('claimed')
    except files.ClaimedError as e:
      theirs.send(str(e))
    claim.release()
    theirs.recv()
    os._exit(0)
  try:
    assert 'in use' in ours.recv()
    assert _claim_elsewhere(tmp_path).returncode != 0
    claim.release()
    files.Claim(tmp_path, 'train').release()
    assert _claim_elsewhere(tmp_path).returncode == 0
  finally:
    ours.send(None)
    os.waitpid(child, 0)


def test_claims_where_nothing_can_be_written(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(OSError, match='file'):
    files.Claim(tmp_path / 'file', 'train')
  with pytest.raises(ValueError, match='path of this machine'):
    files.root('gs://bucket/run')


def test_a_relative_directory_is_made_absolute(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert files.root('run') == tmp_path / 'run' / 'checkpoints'
