"""Checkpoints that somebody made up: every command and a restore refuse them.

Each attack changes a whole checkpoint and, where it can, writes checksums that
fit. An alarm ends what waits for a FIFO.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import base_config
from jaxline import experiment
from jaxline.checkpoint import arrays
from jaxline.checkpoint import contents
from jaxline.checkpoint import durable
from jaxline.checkpoint import files
from jaxline.checkpoint import inspection

W = np.float32([[1, 2], [3, 4]])
ARRAY = 'state/params/w'


class Experiment(experiment.AbstractExperiment):
  """Holds an array below `state`, and an object beside it."""

  CHECKPOINT_ATTRS = {'_state': 'state'}
  NON_BROADCAST_CHECKPOINT_ATTRS = {'_note': 'note'}

  def __init__(self, w=W, note='mine'):
    super().__init__('train', None)
    self._state = {'params': {'w': jnp.asarray(w)[None]}}
    self._note = {'text': note, 'order': np.arange(3)}

  def step(self, **unused):
    raise NotImplementedError

  def evaluate(self, **unused):
    raise NotImplementedError


def checkpointer_of(directory, mode='train', **values):
  config = base_config.get_base_config()
  config.checkpoint_dir = os.fspath(directory)
  config.train_checkpoint_all_hosts = True  # So that process_0.json has some.
  with config.ignore_type():
    config.update(values)
  return durable.DurableCheckpointer(config, mode)


def fill(checkpointer, module, series='latest', step=0):
  state = checkpointer.get_experiment_state(series)
  state.global_step = step
  state.experiment_module = module
  state.train_step_rng = jax.random.PRNGKey(0)[None]
  return state


def save(directory, *steps, series='latest', **entries):
  checkpointer = checkpointer_of(directory, max_best_checkpoints_to_keep=5)
  for step in steps:
    fill(checkpointer, Experiment(), series, step).update(entries)
    checkpointer.save(series)
  checkpointer.wait_for_checkpointing_to_finish()
  checkpointer.close()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A run whose only checkpoint is latest/5."""
  run = tmp_path_factory.mktemp('runs') / 'run'
  save(run, 5)
  return run


@pytest.fixture
def run(saved, tmp_path):
  """A copy that a test may change."""
  return shutil.copytree(saved, tmp_path / 'run')


@pytest.fixture
def call(capsys):
  """Calls main; returns exit status, stdout, stderr."""

  def call(*argv):
    with limited():
      status = inspection.main([os.fspath(arg) for arg in argv])
    out = capsys.readouterr()
    return status, out.out, out.err

  return call


class Waits(Exception):
  """Something takes too long."""


@contextlib.contextmanager
def limited(seconds=20):
  """Ends what takes too long."""

  def end(*unused):
    raise Waits

  before = signal.signal(signal.SIGALRM, end)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


OPENED: list[str] = []
sys.addaudithook(
  lambda event, args: (
    OPENED.append(str(args[0]))
    if event in ('open', 'os.listdir', 'os.scandir')
    else None
  )
)


# Attacks. Each gets the checkpoint, and a directory outside of it.


def edit(path, change):
  """Changes a JSON file in place, and all the checksums with it."""
  value = json.loads(path.read_text())
  changed = change(value)
  path.write_text(json.dumps(value if changed is None else changed))
  checkpoint = path
  while not (checkpoint / files.RECORD).exists():
    checkpoint = checkpoint.parent
  files.write_checksums(checkpoint, 0, 1)


def edit_record(change):
  return lambda step, outside: edit(step / files.RECORD, change)


def edit_array(**values):
  return edit_record(lambda record: record['arrays'][ARRAY].update(values))


def folder_of(step):
  record = json.loads((step / files.RECORD).read_text())
  return step / files.ARRAYS / record['arrays'][ARRAY]['file']


def edit_zarr(change):
  return lambda step, outside: edit(folder_of(step) / 'zarr.json', change)


def both_shapes(shape):
  def attack(step, outside):
    edit_array(shape=shape)(step, outside)
    edit_zarr(lambda zarr: zarr.update(shape=shape))(step, outside)

  return attack


def one_chunk(shape):
  def change(zarr):
    zarr['chunk_grid']['configuration']['chunk_shape'] = shape
    for codec in zarr['codecs']:
      codec['configuration']['chunk_shape'] = shape

  def attack(step, outside):
    both_shapes(shape)(step, outside)
    edit_zarr(change)(step, outside)

  return attack


def target_of(step, name):
  """Returns a path in the checkpoint; 'W' stands for the array's folder."""
  if name.startswith('W'):
    return folder_of(step) / name[2:]
  return step / name


def replaced_by(make, name):
  def attack(step, outside):
    path = target_of(step, name)
    if path.exists():
      shutil.move(path, outside / 'moved')
    make(path, outside / 'moved')

  return attack


def link(path, moved):
  path.symlink_to(moved)


def link_to_zero(path, moved):
  path.symlink_to('/dev/zero')


def fifo(path, moved):
  os.mkfifo(path)


def unix_socket(path, moved):
  here = os.getcwd()
  os.chdir(path.parent)  # Names of sockets are short.
  try:
    with socket.socket(socket.AF_UNIX) as s:
      s.bind(path.name)
  finally:
    os.chdir(here)


def zero(path, moved):
  try:
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
  except PermissionError:
    pytest.skip('only root makes devices')


def deep(name):
  def attack(step, outside):
    path = target_of(step, name)
    size = 100_000
    files.write_checksums(step, 0, 1)
    path.write_text('[' * size + ']' * size)
    if not name.startswith('checksums'):
      files.write_checksums(step, 0, 1)

  return attack


def listed(name):
  def attack(step, outside):
    path = step / 'checksums_0.json'
    part = json.loads(path.read_text())
    part['files'][name.replace('OUTSIDE', str(outside))] = [2, 0]
    files._write_sums(step, [], 0, part)

  return attack


def without(name, sealed=True):
  def attack(step, outside):
    path = target_of(step, name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if sealed:
      files.write_checksums(step, 0, 1)

  return attack


def unlisted(step, outside):
  path = step / 'checksums_0.json'
  part = json.loads(path.read_text())
  kept = {k: v for k, v in part['files'].items() if '/c/' not in k}
  files._write_sums(step, [], 0, {'processes': 1, 'files': kept})


def more_arrays(step, outside):
  def change(record):
    about = record['arrays'][ARRAY]
    record['arrays']['state/params/v'] = {**about, 'file': '0009.v'}

  edit_record(change)(step, outside)


def metadata(change):
  return lambda step, outside: edit(step / 'arrays' / '_METADATA', change)


def skip_deserialize(value):
  for entry in value['tree_metadata'].values():
    entry['value_metadata']['skip_deserialize'] = True


def aggregate(step, outside):
  (step / 'arrays' / 'checkpoint').write_bytes(b'\x81\xa1w\x01')
  files.write_checksums(step, 0, 1)


def small_array(**values):
  def change(entries):
    for entry in entries.values():
      for about in entry['arrays'].values():
        about.update(values)

  return lambda step, outside: edit(step / 'process_0.json', change)


def deep_config(record):
  inner: dict[str, Any] = {}
  record['config'] = inner
  for _ in range(300):
    inner['a'] = inner = {}


HUGE = [1 << 40, 1 << 20]  # Of float32, four million TiB.

IRREGULAR = {
  f'{make.__name__} as {name}': replaced_by(make, name)
  for make, names in {
    fifo: ('checkpoint.json', 'checksums_0.json', 'process_0.json', 'W/c/0/0',
           'W/zarr.json', 'arrays/_METADATA', 'arrays', 'extra.json'),
    link: ('checkpoint.json', 'checksums_0.json', 'process_0.json', 'W/c/0/0',
           'W/zarr.json', 'arrays/_METADATA', 'arrays', 'W', 'W/c'),
    link_to_zero: ('checkpoint.json', 'checksums_0.json', 'W/c/0/0',
                   'extra.json', 'arrays/manifest.ocdbt'),
    zero: ('checkpoint.json', 'W/c/0/0'),
    unix_socket: ('process_0.json',),
  }.items()
  for name in names
}  # fmt: skip

RECORDS = {
  'listed ..': listed('../../../../outside/secret.json'),
  'listed ./..': listed('arrays/../../../secret.json'),
  'listed /': listed('OUTSIDE/secret.json'),
  'deep record': deep('checkpoint.json'),
  'deep checksums': deep('checksums_0.json'),
  'step is text': edit_record(lambda record: record.update(step='4')),
}

# What only who reads arrays finds; `ls` does not.
ARRAYS = {
  'file ..': edit_array(file='../../../../outside'),
  'file .': edit_array(file='.'),
  'file /': edit_array(file='/etc'),
  'file that is none': edit_array(file=None),
  'file 7': edit_array(file=7),
  'shape huge in the record': edit_array(shape=HUGE),
  'shape huge in both': both_shapes(HUGE),
  'dtype of objects': edit_array(dtype='object', shape=[1]),
  'bytes of objects': edit_array(bytes_of='|O', shape=[1]),
  'bytes of a huge type': edit_array(bytes_of='|V2147483647'),
  'dtype that is none': edit_array(dtype='float33'),
  'dtypes that are deep': edit_array(bytes_of=[['a', [['b', '|O']]]]),
  'array that is not there': more_arrays,
  'array that was removed': without('W'),
  'all arrays removed': without('arrays'),
  'chunk that was removed': without('W/c/0/0'),
  'zarr.json that was removed': without('W/zarr.json'),
  'chunks without checksums': unlisted,
  'another dtype': edit_array(dtype='float64'),
  'shape of one huge dimension': both_shapes([0, 1 << 62]),
  'file of another': edit_array(file='0000.run.train_step_rng'),
  'shape differs in the record': edit_array(shape=[4, 1]),
  'smaller shape in the record': edit_array(shape=[1, 2]),
  'type differs in the record': edit_array(dtype='int32'),
  'shape huge in zarr.json': edit_zarr(lambda z: z.update(shape=HUGE)),
  'chunks huge in zarr.json': edit_zarr(
    lambda z: z['chunk_grid']['configuration'].update(chunk_shape=HUGE)
  ),
  'one huge chunk': one_chunk([1 << 17, 1 << 17]),  # 64 GiB of float32.
  'chunks small in zarr.json': edit_zarr(
    lambda z: z['chunk_grid']['configuration'].update(chunk_shape=[1, 2])
  ),
  'no chunks in zarr.json': edit_zarr(
    lambda z: z['chunk_grid']['configuration'].update(chunk_shape=[0, 0])
  ),
  'type differs in zarr.json': edit_zarr(lambda z: z.update(data_type='int32')),
  'other names of chunks': edit_zarr(
    lambda z: z.update(chunk_key_encoding={'name': 'v2'})
  ),
  'zarr.json without fields': edit_zarr(lambda z: {'shape': z['shape']}),
  'zarr.json is a list': edit_zarr(lambda z: [z]),
  'deep zarr.json': deep('W/zarr.json'),
}

# What nothing reads, or what is odd and does no harm.
HARMLESS = {
  'deep _METADATA': deep('arrays/_METADATA'),
  '_METADATA of OCDBT': metadata(lambda m: m.update(use_ocdbt=True)),
  '_METADATA of Zarr 2': metadata(lambda m: m.update(use_zarr3=False)),
  '_METADATA skips arrays': metadata(skip_deserialize),
  '_METADATA without arrays': metadata(lambda m: m.update(tree_metadata={})),
  'an aggregate file': aggregate,
  'deep config': edit_record(deep_config),
}

# Found by `show` and `diff`, which tell what is not an array, and by a restore.
VALUES = {
  'huge small array': small_array(shape=HUGE),
  'one byte for a huge array': small_array(
    shape=[1 << 44], dtype='|u1', base64='AA=='
  ),
  'small array of objects': small_array(dtype='|O'),
  'small array without data': small_array(base64=''),
  'process_0.json is a list': lambda step, outside: edit(
    step / 'process_0.json', lambda value: [value]
  ),
  'deep process_0.json': deep('process_0.json'),
}


@pytest.fixture
def attacked(run, tmp_path):
  """Attacks the checkpoint of the run; tells what is there afterwards."""

  def attack(attack):
    outside = tmp_path / 'outside'
    outside.mkdir()
    (outside / 'secret.json').write_text('{}')
    step = files.root(run) / 'latest' / '5'
    attack(step, outside)
    OPENED.clear()
    return step

  yield attack
  assert not [p for p in OPENED if p.startswith(f'{tmp_path}/outside')]
  assert '/dev/zero' not in OPENED


COMMANDS = ('ls', 'show', 'diff', 'verify', 'export')


def arguments(command, run, saved, tmp_path):
  return {
    'diff': [command, saved, run],
    'export': [command, run, tmp_path / 'out.npz'],
  }.get(command, [command, run])


@pytest.mark.parametrize('name', IRREGULAR | RECORDS | ARRAYS)
@pytest.mark.parametrize('command', COMMANDS)
def test_commands_refuse(command, name, call, run, saved, attacked, tmp_path):
  attacked((IRREGULAR | RECORDS | ARRAYS)[name])
  status, out, err = call(*arguments(command, run, saved, tmp_path))
  if command == 'ls' and name in ARRAYS:
    assert (status, err) == (0, '')  # It reads no arrays.
    return
  assert status == 1, (out, err)
  if command == 'ls':
    (line,) = [x for x in out.splitlines() if x.split()[:2] == ['latest', '5']]
    assert 'refused' in line
  elif command == 'verify':
    assert out.startswith('latest/5  DAMAGED: ')
    assert out.count('\n') == 2
  else:
    assert out == ''
    assert err.count('\n') == 1
    assert 'latest/5 is refused: ' in err
  assert len(out + err) < 2000
  assert not (tmp_path / 'out.npz').exists()


# NUL ends a name for the system, it takes none that is so long, and has no
# bytes for half of a pair.
@pytest.mark.parametrize('name', ['a\0b', 'a' * 300, '\ud800'])
def test_names_that_no_file_can_have_are_damage(name, call, run, attacked):
  step = attacked(listed(name))
  status, out, _ = call('verify', run)
  assert status == 1, out
  assert out.startswith('latest/5  DAMAGED: ')
  with pytest.raises(files.DamagedError, match='is missing'):
    contents.verified(step, lambda name: True)


@pytest.mark.parametrize('name', VALUES)
@pytest.mark.parametrize('command', ['show', 'diff'])
def test_values_are_refused(
  command, name, call, run, saved, attacked, tmp_path
):
  attacked(VALUES[name])
  status, out, err = call(*arguments(command, run, saved, tmp_path))
  assert (status, out) == (1, '')
  assert err.count('\n') == 1
  assert call('ls', run)[0] == 0


@pytest.mark.parametrize('name', IRREGULAR | RECORDS | ARRAYS | VALUES)
@pytest.mark.parametrize('mode', ['train', 'eval', 'restore_from'])
def test_a_restore_refuses(mode, name, run, attacked, tmp_path):
  step = attacked((IRREGULAR | RECORDS | ARRAYS | VALUES)[name])
  if mode == 'restore_from':
    checkpointer = checkpointer_of(tmp_path / 'new', restore_from=str(run))
  else:
    checkpointer = checkpointer_of(run, mode)
  live = Experiment(W + 1, 'live')
  state = fill(checkpointer, live)
  try:
    with limited(), pytest.raises(files.RefusedError) as caught:
      checkpointer.restore('latest')
  finally:
    checkpointer.close()
  message = str(caught.value)
  assert '\n' not in message
  assert f'{step} is refused: ' in message
  assert f'mv {step} {step}.bak' in message
  # Nothing was changed, moved, or linked.
  assert state.global_step == 0
  np.testing.assert_array_equal(live._state['params']['w'][0], W + 1)
  assert live._note['text'] == 'live'
  assert step.exists()
  assert not (files.root(run) / 'damaged').exists()


@pytest.mark.parametrize('name', HARMLESS)
def test_what_does_no_harm(name, call, run, saved, attacked, tmp_path):
  attacked(HARMLESS[name])
  for command in COMMANDS:
    assert call(*arguments(command, run, saved, tmp_path))[0] == 0, command
  with np.load(tmp_path / 'out.npz') as exported:
    np.testing.assert_array_equal(exported['w'], W)
  checkpointer = checkpointer_of(run, on_config_change='continue')
  live = Experiment(W + 1)
  fill(checkpointer, live)
  checkpointer.restore('latest')
  checkpointer.close()
  np.testing.assert_array_equal(live._state['params']['w'][0], W)


def test_what_is_missing_is_damage_and_the_one_before_is_used(saved, tmp_path):
  run = shutil.copytree(saved, tmp_path / 'run')
  save(run, 7)
  step = files.root(run) / 'latest' / '7'
  without('W', sealed=False)(step, None)
  checkpointer = checkpointer_of(run)
  state = fill(checkpointer, Experiment(W + 1))
  checkpointer.restore('latest')
  checkpointer.close()
  assert state.global_step == 5
  assert not step.exists()


@pytest.mark.parametrize('command', COMMANDS)
def test_an_array_that_was_removed(command, call, run, saved, tmp_path):
  without('W', sealed=False)(files.root(run) / 'latest' / '5', None)
  status, _, _ = call(*arguments(command, run, saved, tmp_path))
  assert status == {'ls': 0, 'export': 2}.get(command, 1)
  assert not (tmp_path / 'out.npz').exists()


@pytest.mark.parametrize('name', ['checkpoint.json', 'W/c/0/0'])
def test_a_file_of_enormous_size_is_not_read(name, call, run, attacked):
  attacked(
    lambda step, outside: os.truncate(target_of(step, name), 1 << 43)  # Sparse.
  )
  status, out, _ = call('verify', run)
  assert status == 1
  assert f'{1 << 43} bytes' in out
  checkpointer = checkpointer_of(run, 'eval')
  fill(checkpointer, Experiment())
  with limited(), pytest.raises(files.DamagedError, match='8796093022208 byte'):
    checkpointer.restore('latest')
  checkpointer.close()


# Links.


@pytest.mark.parametrize('mode', ['train', 'eval', *COMMANDS])
@pytest.mark.parametrize('target', ['there', 'gone', 'itself'])
def test_a_step_that_is_a_link(mode, target, call, run, saved, tmp_path):
  step = files.root(run) / 'latest' / '5'
  step.rename(tmp_path / '5')
  names = {'there': tmp_path / '5', 'gone': tmp_path / '6', 'itself': step}
  step.symlink_to(names[target])
  if mode in COMMANDS:
    status, out, err = call(*arguments(mode, run, saved, tmp_path))
    assert status == 1
    assert 'is a symbolic link' in out + err
    return
  checkpointer = checkpointer_of(run, mode)
  fill(checkpointer, Experiment())
  with limited(), pytest.raises(files.RefusedError, match='is a symbolic link'):
    checkpointer.restore('latest')
  checkpointer.close()
  assert step.is_symlink()


@pytest.mark.parametrize('which', ['run', 'checkpoints', 'latest'])
def test_links_to_a_run_are_followed(which, call, run, saved, tmp_path):
  path = {
    'run': run,
    'checkpoints': run / 'checkpoints',
    'latest': run / 'checkpoints' / 'latest',
  }[which]
  path.rename(tmp_path / 'big_disk')
  path.symlink_to(tmp_path / 'big_disk')
  for command in COMMANDS:
    assert call(*arguments(command, run, saved, tmp_path))[0] == 0, command
  for mode in ('eval', 'train'):
    checkpointer = checkpointer_of(run, mode)
    state = fill(checkpointer, Experiment(W + 1))
    checkpointer.restore('latest')
    assert state.global_step == 5
    checkpointer.close()


def test_a_link_that_the_user_gives_is_followed(call, run, tmp_path):
  (tmp_path / 'good').symlink_to(files.root(run) / 'latest' / '5')
  assert call('verify', tmp_path / 'good')[0] == 0
  assert call('show', tmp_path / 'good')[0] == 0
  checkpointer = checkpointer_of(
    tmp_path / 'new', restore_from=str(tmp_path / 'good')
  )
  state = fill(checkpointer, Experiment(W + 1))
  checkpointer.restore('latest')
  checkpointer.close()
  assert state.global_step == 5


def test_hard_links_are_files_as_any(call, run, tmp_path):
  latest = files.root(run) / 'latest' / '5'
  files.link(latest, files.root(run) / 'best' / '5')
  assert (latest / 'checkpoint.json').stat().st_nlink == 2
  status, out, _ = call('verify', run)
  assert (status, out.count(' ok\n')) == (0, 2)


# The step.


@pytest.mark.parametrize('series', ['latest', 'best'])
def test_a_renamed_step_is_noticed(series, call, saved, tmp_path):
  run = tmp_path / 'run'
  save(run, 3, 5, series=series)
  folder = files.root(run) / series
  (folder / '5').rename(folder / '500')
  for command in COMMANDS:
    status, out, err = call(*arguments(command, run, saved, tmp_path))
    assert status == 1, command
    assert 'named 500, but checkpoint.json says step 5' in out + err, command
  for mode in ('train', 'eval'):
    checkpointer = checkpointer_of(run, mode)
    state = fill(checkpointer, Experiment(W + 1), series)
    with pytest.raises(files.RefusedError, match='rename it to 5'):
      checkpointer.restore(series)
    checkpointer.close()
    assert state.global_step == 0
  assert files.steps(folder) == [3, 500]
  (folder / '500').rename(folder / '5')
  assert call('verify', run)[0] == 0
  checkpointer = checkpointer_of(run, 'train')
  state = fill(checkpointer, Experiment(W + 1), series)
  checkpointer.restore(series)
  checkpointer.close()
  assert state.global_step == 5


def test_names_that_are_no_steps_stay_the_users(call, run, tmp_path):
  step = files.root(run) / 'latest' / '5'
  kept = step.with_name('5.bak')
  shutil.copytree(step, kept)
  assert call('verify', kept)[0] == 0
  checkpointer = checkpointer_of(tmp_path / 'new', restore_from=str(kept))
  state = fill(checkpointer, Experiment(W + 1))
  checkpointer.restore('latest')
  checkpointer.close()
  assert state.global_step == 5


# What is printed.

EVIL = '\x1b]0;owned\x07\x1b[31m\r\x9b2J\u202e\ud83d'


def evil(step, outside):
  def change(record):
    about = record['arrays']['run/train_step_rng']
    record['arrays'][f'state/params/{EVIL}'] = about
    record['entries'][EVIL] = EVIL
    record['config'][EVIL] = {EVIL: EVIL}
    record['config']['experiment_kwargs'] = {EVIL: EVIL}
    record['versions'][EVIL] = EVIL
    record['module'][EVIL] = {'structure': {'dict': [[EVIL, EVIL]]}}
    record['module']['odd'] = {'structure': {'enum': [EVIL, EVIL]}}

  edit_record(change)(step, outside)
  root = step.parent.parent
  odd = EVIL.replace('\ud83d', '')
  (root / 'damaged' / odd).mkdir(parents=True)
  (root / odd).mkdir()
  shutil.copytree(step, root / odd / '5')
  owner = {'host': EVIL, 'pid': 1, 'since': EVIL}
  files.write_json(root / 'claims' / f'{odd}.json', owner)
  logs = root.parent / 'train'
  logs.mkdir()
  line = {'step': 5, 'kind': 'scalars', EVIL: EVIL}
  (logs / 'metrics.jsonl').write_text(json.dumps(line) + '\n')


def is_clean(text):
  return all(c.isprintable() for line in text.split('\n') for c in line)


@pytest.mark.parametrize(
  'argv',
  [
    ['ls', '{run}'],
    ['ls', '{run}', '--json'],
    ['show', '{run}'],
    ['show', '{run}', '--config'],
    ['diff', '{run}', '{saved}'],
    ['diff', '{saved}', '{run}'],
    ['verify', '{run}'],
    ['export', '{run}', '{tmp}/out.npz', '--select', '.*'],
    ['export', '{run}', '{tmp}/out.npz', '--select', 'none'],
    ['show', '{run}:6'],
    ['show', f'{{run}}/{EVIL[:-1]}'],
  ],
)
def test_control_characters_are_escaped(
  argv, call, run, saved, attacked, tmp_path
):
  attacked(evil)
  argv = [x.replace('{run}', str(run)) for x in argv]
  argv = [x.replace('{saved}', str(saved)) for x in argv]
  _, out, err = call(*(x.replace('{tmp}', str(tmp_path)) for x in argv))
  assert is_clean(out)
  assert is_clean(err)
  assert err.count('\n') <= 1
  out.encode()
  if 'show' in argv and not err:
    assert '\\x1b]0;owned\\x07' in out


@pytest.mark.parametrize('on_config_change', ['raise', 'continue'])
def test_control_characters_of_a_restore_are_escaped(
  on_config_change, run, attacked, caplog, monkeypatch
):
  # Another test may have had the warning, which is logged once a process.
  monkeypatch.setattr(
    durable.logging,
    'log_first_n',
    lambda level, text, n, *args: durable.logging.log(level, text, *args),
  )
  attacked(evil)
  checkpointer = checkpointer_of(run, on_config_change=on_config_change)
  fill(checkpointer, Experiment())
  message = ''
  try:
    checkpointer.restore('latest')
  except ValueError as e:
    message = str(e)
  checkpointer.close()
  assert 'owned' in message + caplog.text
  assert is_clean(message)
  assert is_clean(caplog.text)


# Others.


@pytest.mark.parametrize('command', ['ls', 'show', 'verify'])
def test_a_record_of_other_types(command, call, run):
  step = files.root(run) / 'latest' / '5'
  whole = json.loads((step / files.RECORD).read_text())
  for key in ('step', 'time', 'processes', 'devices', 'versions', 'config',
              'entries', 'module', 'arrays', 'format'):  # fmt: skip
    for value in (None, [[]], 'x', 1e300, 10**30, {'x': []}):
      files.write_json(step / files.RECORD, whole | {key: value})
      files.write_checksums(step, 0, 1)
      status, _, err = call(command, run)
      assert status in (0, 1, 2)
      assert err.count('\n') <= 1, (key, value, err)


def test_structures_that_are_malformed_are_one_line(call, run):
  step = files.root(run) / 'latest' / '5'
  whole = json.loads((step / files.RECORD).read_text())
  for value in (
    {},
    {'a': 1, 'b': 2},
    {'dict': 3},
    {'dict': [[1]]},
    {'key': []},
    {'namedtuple': []},
    {'enum': 1},
    {'node': [1]},
    {'pickle': 1},
    {'int': 'f' * 5000},
    {'range': ['a']},
    {'config': 1},
  ):
    record = json.loads(json.dumps(whole))
    record['entries']['odd'] = value
    files.write_json(step / files.RECORD, record)
    files.write_checksums(step, 0, 1)
    status, _, err = call('show', run)
    assert (status == 0) == (err == '')
    assert err.count('\n') <= 1, (value, err)


@pytest.mark.parametrize(
  'text',
  ['[]', '{"step": "x"}', '{"step": [1], "host": 1, "pid": "x"}', '[' * 9999],
)
def test_files_of_a_run_that_are_malformed(text, call, run):
  root = files.root(run)
  (root / 'ended.json').write_text(text)
  (root / 'claims').mkdir(exist_ok=True)
  (root / 'claims' / 'other.json').write_text(text)
  status, _, err = call('ls', run)
  assert (status, err) == (0, '')


@pytest.mark.parametrize('make', [fifo, link_to_zero, link, zero])
def test_files_of_a_run_that_are_no_files(make, call, run, tmp_path):
  root = files.root(run)
  (run / 'train').mkdir(exist_ok=True)
  (root / 'claims').mkdir(exist_ok=True)
  make(run / 'train' / 'metrics.jsonl', tmp_path / 'secret')
  make(root / 'ended.json', tmp_path / 'secret')
  make(root / 'claims' / 'other.json', tmp_path / 'secret')
  make(root / 'stray', tmp_path / 'secret')
  status, out, err = call('ls', run)
  assert (status, err) == (0, '')
  assert 'other' not in out


@pytest.mark.process
def test_a_fifo_in_a_program_of_its_own(run):
  step = files.root(run) / 'latest' / '5'
  replaced_by(fifo, 'W/c/0/0')(step, run)
  out = subprocess.run(
    [sys.executable, '-m', 'jaxline.checkpoint', 'verify', os.fspath(run)],
    cwd=pathlib.Path(__file__).resolve().parent.parent,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (out.returncode, out.stderr) == (1, '')
  assert 'is a FIFO' in out.stdout


def test_a_huge_chunk_is_refused_before_it_is_read(attacked):
  step = attacked(ARRAYS['one huge chunk'])
  with pytest.raises(files.RefusedError, match='chunks are missing'):
    contents.Checkpoint(step).check()


@pytest.mark.parametrize('chunk', [1, 2])
def test_arrays_of_many_chunks_are_whole(chunk, tmp_path, monkeypatch, call):
  monkeypatch.setattr(arrays, '_FILE_BYTES', 8 * chunk)
  run = tmp_path / 'run'
  save(run, 5)
  step = files.root(run) / 'latest' / '5'
  chunks = [p for p in (folder_of(step) / 'c').rglob('*') if p.is_file()]
  assert len(chunks) == 2 // chunk
  assert call('verify', run)[0] == 0
  contents.verified(step, lambda name: True)
  np.testing.assert_array_equal(inspection.find(run).arrays(ARRAY)[ARRAY], W)
  chunks[-1].unlink()
  files.write_checksums(step, 0, 1)
  with pytest.raises(files.RefusedError, match='state/params/w'):
    contents.verified(step, lambda name: True)
