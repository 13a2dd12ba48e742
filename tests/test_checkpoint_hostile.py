"""Checkpoints that somebody edited: nothing is run, and no path leads out.

Each attack changes a whole checkpoint and writes checksums that fit.
"""

import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxline import base_config
from jaxline import errors
from jaxline import experiment
from jaxline.checkpoint import arrays
from jaxline.checkpoint import durable
from jaxline.checkpoint import files
from jaxline.checkpoint import inspection

W = np.float32([[1, 2], [3, 4]])


class Bomb:
  """Ends the process when it is unpickled."""

  def __reduce__(self):
    return os._exit, (3,)


class Experiment(experiment.AbstractExperiment):
  """Holds an array, and an object that each process has for itself."""

  CHECKPOINT_ATTRS = {'_w': 'w'}
  NON_BROADCAST_CHECKPOINT_ATTRS = {'_note': 'note'}

  def __init__(self, w=W, note='mine'):
    super().__init__('train', None)
    self._w = jnp.asarray(w)[None]
    self._note = {'text': note, 'order': np.arange(3)}

  def step(self, **unused):
    raise NotImplementedError

  def evaluate(self, **unused):
    raise NotImplementedError


def use(directory, method, live, mode='train', **values):
  """Saves or restores in a checkpointer of its own."""
  config = base_config.get_base_config()
  config.checkpoint_dir = os.fspath(directory)
  config.train_checkpoint_all_hosts = True  # So that process_0.json has some.
  with config.ignore_type():
    config.update(values)
  checkpointer = durable.DurableCheckpointer(config, mode)
  state = checkpointer.get_experiment_state('latest')
  key = jax.random.PRNGKey(0)[None]
  state.update(global_step=5, experiment_module=live, train_step_rng=key)
  try:
    getattr(checkpointer, method)('latest')
    checkpointer.wait_for_checkpointing_to_finish()
  finally:
    checkpointer.close()


def array(**values):
  return lambda parts: parts['checkpoint.json']['arrays']['w'].update(values)


def larger_array(parts):
  """Has more rows in all that is said of it, and no file for them."""
  about = parts['checkpoint.json']['arrays']['w']
  about['shape'] = [8, 2]
  zarr = parts['step'] / 'arrays' / about['file'] / 'zarr.json'
  files.write_json(zarr, files.read_json(zarr) | {'shape': [8, 2]})


def small_array(**values):
  def change(parts):
    (about,) = parts['process_0.json']['note']['arrays'].values()
    about.update(values)

  return change


def note(structure):
  return lambda parts: parts['process_0.json']['note'].update(
    structure=structure
  )


def listed(name):
  return lambda parts: parts['sums'].update({name: [1, 0]})


_BOMB = arrays.base64.b64encode(pickle.dumps(Bomb())).decode()

ATTACKS = {
  'pickle': note({'pickle': ['note', _BOMB]}),
  'function': note({'node': ['os:system', ['exit 3'], None]}),
  'array outside': array(file='../../../outside'),
  'absolute array': array(file='/etc'),
  'array in another': array(file='0001.w/..'),
  'huge array': array(shape=[2**40, 2]),
  'more rows': larger_array,
  'another type': array(dtype='int32'),
  'Python objects': array(dtype='object'),
  'huge number of bytes': small_array(shape=[2**60]),
  'checksum outside': listed('../../../outside'),
  'absolute checksum': listed('/etc/passwd'),
  'another format': lambda parts: parts['checkpoint.json'].update(format=1),
  'another step': lambda parts: parts['checkpoint.json'].update(step=7),
}


@pytest.mark.parametrize('name', ATTACKS)
def test_an_edited_checkpoint_is_refused(name, tmp_path, capsys, monkeypatch):
  run = tmp_path / 'run'
  use(run, 'save', Experiment())
  step = files.root(run) / 'latest' / '5'
  parts = {x: files.read_json(step / x) for x in os.listdir(step) if '.j' in x}
  parts |= {'sums': {}, 'step': step}
  ATTACKS[name](parts)
  for file in ('checkpoint.json', 'process_0.json'):
    files.write_json(step / file, parts[file])
  files.write_checksums(step, 0, 1)
  if parts['sums']:
    part = files.read_json(step / 'checksums_0.json')
    part['files'] |= parts['sums']
    del part['crc']
    crc = files.crc_of(part)
    files.write_json(step / 'checksums_0.json', part | {'crc': crc})
  read, start = [], arrays._start

  def spy(opened, about, target):
    read.append(about)
    return start(opened, about, target)

  monkeypatch.setattr(arrays, '_start', spy)
  for mode, directory, more in (
    ('train', run, {}),
    ('eval', run, {}),
    ('train', tmp_path / 'new', {'restore_from': str(run)}),
  ):
    live = Experiment(W + 1, 'live')
    with pytest.raises(errors.UsageError):
      use(directory, 'restore', live, mode, **more)
    np.testing.assert_array_equal(live._w[0], W + 1)
    assert live._note['text'] == 'live'
  # No memory was taken for an array that is not as it is described.
  if name.endswith(('array', 'outside', 'in another', 'rows', 'type')):
    assert parts['checkpoint.json']['arrays']['w'] not in read
  out = tmp_path / 'out.npz'
  is_exported = name in ('pickle', 'function', 'huge number of bytes')
  status = inspection.main(
    ['export', str(run), str(out), '--select=w', '--force']
  )
  assert (status, out.exists()) == ((0, True) if is_exported else (2, False))
  assert capsys.readouterr().err.count('\n') == (not is_exported)
  assert step.is_dir()
