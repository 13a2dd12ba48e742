"""Promise: what a file of a run says is data, whoever has edited it.

Nothing is run, and no name leads out. Each edit of a manifest has a checksum
that fits.
"""

import base64
import contextlib
import copy
import functools
import json
import os
import pickle
import shutil
import sys

import numpy as np
import pytest

from jaxline import errors
from jaxline.checkpoint import arrays
from jaxline.checkpoint import durable
from jaxline.checkpoint import inspection
from jaxline.run_directory import logs
from jaxline.run_directory import notes
from jaxline.run_directory import store as store_lib
from jaxline.runs import __main__ as runs_main
from tests import checkpoints as lib


class Bomb:
  """Ends the process when it is unpickled."""

  def __reduce__(self):
    return os._exit, (3,)


_BOMB = base64.b64encode(pickle.dumps(Bomb())).decode()
_DEEP = json.loads('[' * 600 + ']' * 600)
_ARRAY = 'arrays', 'w'
_SMALL = 'processes', 0, 'n'
_REMOVED = object()
# Several fields at once, which fit each other.
ATTACKS = {
  'pickle': {(*_SMALL, 'structure'): {'pickle': ['n', _BOMB]}},
  'function': {(*_SMALL, 'structure'): {'node': ['os:system', ['exit 3'], 0]}},
  'import': {(*_SMALL, 'structure'): {'dataclass': ['this:s', {}]}},
  'uninitialised': {(*_ARRAY, 'chunk'): [0], (*_ARRAY, 'parts'): {}},
  'huge part': {(*_ARRAY, 'shape'): [2**40], (*_ARRAY, 'chunk'): [2**40]},
  'another rank': {(*_ARRAY, 'shape'): [1, 3], (*_ARRAY, 'chunk'): [1, 3],
                   (*_ARRAY, 'parts', 'c.0.0'): 0},
  'another type': {(*_ARRAY, 'dtype'): 'int32'},
  'another part': {(*_ARRAY, 'parts'): {'c.1': 0}},
  'part outside': {(*_ARRAY, 'parts'): {'../../../outside': 0}},
  'array in another': {(*_ARRAY, 'file'): '0001.w/..'},
  'another array': {(*_ARRAY, 'file'): '0000.run.train_step_rng'},
  'data outside': {('data',): '../../../outside'},
  'another step': {('step',): 6},
  'pointers': {(*_SMALL, 'structure'): {'numpy': 'n'}, (*_SMALL, 'arrays'): {
    'n': {'shape': [1], 'dtype': 'object', 'base64': 'AAAAAAAAAAA='}}},
  'huge number': {(*_SMALL, 'structure'): {'numpy': 'n'}, (*_SMALL, 'arrays'): {
    'n': {'shape': [2**60], 'dtype': 'int8', 'base64': ''}}},
}  # fmt: skip
VALUES = (
  *(_REMOVED, None, True, -1, 10**30, 1.5, float('nan'), ''),
  *('x', '../../x', [], {}, [1], {'a': 1}, _DEEP),
)


def _edits(value, path=()):
  """Yields an edit of each field below a value."""
  for new in (*VALUES, [value], {'a': value}) if path else ():
    yield {path: new}
  # The values of the config are its user's.
  if isinstance(value, dict | list) and path != ('config',):
    for key in value if isinstance(value, dict) else range(len(value)):
      yield from _edits(value[key], (*path, key))


def _edited(value, edit):
  value = copy.deepcopy(value)
  for (*path, name), new in edit.items():
    inner = value
    for key in path:
      inner = inner[key]
    if new is _REMOVED:
      del inner[name]
    else:
      inner[name] = new
  return value


def test_an_edited_manifest_is_refused_or_changes_nothing(
  open_run, tmp_path, capsys, monkeypatch
):
  run, live = tmp_path / 'run', lib.weights(1)
  training = open_run(train_checkpoint_all_hosts=True)
  lib.save(training, live)
  want, path = live.held(), lib.manifest_of(run)
  manifest = json.loads(path.read_text())
  del manifest['crc']
  # Some of hundreds; the number is odd, so that each value occurs.
  edits = [*[*_edits(manifest)][::9], *ATTACKS.values()]
  named = refused = 0
  empty, sizes = np.empty, []

  def spy(shape, *args, **kwargs):
    sizes.append(np.prod(shape, dtype=float))
    return empty(shape, *args, **kwargs)

  for edit in edits:
    path.write_bytes(notes.to_bytes(_edited(manifest, edit)))
    with monkeypatch.context() as patch:
      patch.setattr(arrays.np, 'empty', spy)
      try:
        lib.restore(training, live)
      except (errors.UsageError, store_lib.DamagedError) as e:
        named += '/latest/5' in str(e)
        refused += 1
      else:
        # What a user's own values are, nobody can know.
        if 'structure' in str(edit):
          live = lib.weights(1)
        lib.assert_same(live.held(), want, str(edit))
    for command in ('ls', 'show', 'verify'):
      status = inspection.main([command, str(run)])
      assert status in (0, 1, 2)
  assert named == refused > len(edits) // 2
  assert max(sizes) < 10_000
  assert 'this' not in sys.modules
  capsys.readouterr()


# Something else than a file, or a folder, in a run.


def _evaluate(open_run, run):
  with contextlib.closing(open_run('eval', run)) as evaluation:
    lib.fill(evaluation, lib.weights(7), -1)
    evaluation.follow('latest')(())
    evaluation.directory.ended()
    lib.note(evaluation, 5, 1.0, {})


def _train(open_run, run):
  config = lib.make_config(run, fingerprint=True)
  with (
    contextlib.closing(open_run('train', run)) as training,
    logs.RunWriter(config, 'train') as log,
  ):
    lib.restore(training, lib.weights(7))
    training.begin(5)
    log.resume(5, training.directory.lengths)
    log.write_scalars(6, {'loss': 1.0})
    training.directory.logs = [log]
    lib.save(training, lib.weights(2), 6)


def _run(main, command, open_run, run):
  if main([command, os.fspath(run)]):
    raise OSError


USES = {
  'evaluate': _evaluate,
  'ls': functools.partial(_run, inspection.main, 'ls'),
  'verify': functools.partial(_run, inspection.main, 'verify'),
  'runs ls': functools.partial(_run, runs_main.main, 'ls'),
  'train': _train,
}
KINDS = {
  'link': lambda path, outside: path.symlink_to(outside / 'file'),
  'dangling': lambda path, outside: path.symlink_to(outside / 'new'),
  'FIFO': lambda path, outside: os.mkfifo(path),
  'folder': lambda path, outside: path.mkdir(),
  'linked folder': lambda path, outside: path.symlink_to(outside / 'folder'),
}


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  """A run of which each file is there, and the names of all of them."""
  run = tmp_path_factory.mktemp('made') / 'run'
  config = lib.make_config(run, fingerprint=True)
  training = durable.DurableCheckpointer(config, 'train')
  with logs.RunWriter(config, 'train') as log:
    training.begin(0)
    log.write_scalars(1, {'loss': 1.0})
    training.directory.logs = [log]
    lib.save(training, lib.weights(1))
    lib.save_best(training, lib.weights(1), 5, 1.0)
    lib.note(training, 5, 1.0, {})
    training.directory.end(5)
  training.close()
  (run / 'checkpoints' / 'readers').mkdir()
  (run / 'checkpoints' / 'readers' / 'eval-1.json').write_text('{"data": []}')
  return run


# Writers that were opened before the one that is refused.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('kind', KINDS)
def test_only_files_and_folders_of_a_run_are_used(
  kind, made, open_run, tmp_path, capsys
):
  wrong = []
  for number, found in enumerate(sorted(made.rglob('*'))):
    name = str(found.relative_to(made))
    # These may be links, and no file is a folder in place of a folder.
    if name in ('checkpoints', 'train') and 'link' in kind:
      continue
    if kind == 'folder' and found.is_dir():
      continue
    outside = tmp_path / f'outside_{number}'
    shutil.copytree(made, outside / 'folder')
    (outside / 'file').write_bytes(b'x' * 10_000)
    before = lib.tree_of(outside)
    # A use for each pair of a file and a kind; all five kinds make all pairs.
    use = [*USES][(number + [*KINDS].index(kind)) % len(USES)]
    run = tmp_path / f'{number} {use}'
    path = shutil.copytree(made, run) / name
    shutil.rmtree(path) if found.is_dir() else path.unlink()
    KINDS[kind](path, outside)
    said = ''
    with contextlib.suppress(store_lib.DamagedError):
      try:
        USES[use](open_run, run)
      except (errors.UsageError, OSError) as e:
        said = f'{e} {capsys.readouterr()}'
    if said and not any(x in said for x in (path.stem, 'is missing')):
      wrong.append((name, use, said))
    if lib.tree_of(outside) != before:
      wrong.append((name, use, 'wrote outside'))
  assert not wrong


def test_what_people_put_on_a_larger_disk_may_be_a_link(
  made, open_run, tmp_path
):
  real = shutil.copytree(made, tmp_path / 'real')
  for name in ('checkpoints', 'train'):
    (real / name).rename(tmp_path / name)
    (real / name).symlink_to(tmp_path / name)
  (tmp_path / 'run').symlink_to(real)
  (real / 'code').symlink_to(made)  # The user's own.
  for use in USES.values():
    use(open_run, tmp_path / 'run')
  assert (tmp_path / 'checkpoints' / 'latest' / '6.json').exists()
