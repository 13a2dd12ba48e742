"""Manifests that somebody edited: nothing is run, and no name leads out.

Each attack changes a manifest and writes a checksum that fits.
"""

import base64
import json
import os
import pickle
import sys

import numpy as np
import pytest

from jaxline import errors
from jaxline.checkpoint import arrays
from jaxline.checkpoint import inspection
from jaxline.checkpoint import manager
from jaxline.storage import store as store_lib
from tests import checkpoints as lib


class Bomb:
  """Ends the process when it is unpickled."""

  def __reduce__(self):
    return os._exit, (3,)


_BOMB = base64.b64encode(pickle.dumps(Bomb())).decode()


def array(**values):
  return lambda manifest: manifest['arrays']['w'].update(values)


def note(structure):
  return lambda manifest: manifest['processes'][0]['n'].update(
    structure=structure
  )


def small(**values):
  about = {'shape': [2], 'dtype': 'int8', 'base64': 'AAA='} | values

  def change(manifest):
    note({'numpy': 'n'})(manifest)
    manifest['processes'][0]['n']['arrays'] = {'n': about}

  return change


ATTACKS = {
  # Only who restores these needs them.
  'pickle': note({'pickle': ['n', _BOMB]}),
  'function': note({'node': ['os:system', ['exit 3'], None]}),
  'import': note({'dataclass': ['this:s', {}]}),
  'huge number of bytes': small(shape=[2**60]),
  'pointers': small(shape=[1], dtype='object', base64='AAAAAAAAAAA='),
  'data outside': lambda manifest: manifest.update(data='../../../outside'),
  'absolute data': lambda manifest: manifest.update(data='/etc'),
  'array outside': array(file='../../../outside'),
  'absolute array': array(file='/etc'),
  'array in another': array(file='0001.w/..'),
  'part outside': array(parts={'../../../outside': 0}),
  'another part': array(parts={'c.1': 0}),
  'no part': array(parts={}),
  'huge array': array(shape=[2**40]),
  'huge part': array(shape=[2**40], chunk=[2**40]),
  'many parts': array(shape=[2**40], chunk=[1]),
  'negative': array(shape=[-3], chunk=[-3]),
  'another rank': array(shape=[3, 1]),
  'another type': array(dtype='float64'),
  'Python objects': array(dtype='object'),
}


@pytest.mark.parametrize('name', ATTACKS)
def test_an_edited_manifest_is_refused(
  name, open_run, tmp_path, capsys, monkeypatch
):
  run, values = tmp_path / 'run', {'train_checkpoint_all_hosts': True}
  training = open_run(**values)
  lib.save(training, lib.weights(1))
  training.close()
  path = lib.manifest_of(run)
  manifest = json.loads(path.read_text())
  del manifest['crc']
  ATTACKS[name](manifest)
  path.write_bytes(manager.pack(manifest))
  empty, sizes = np.empty, []

  def spy(shape, *args, **kwargs):
    sizes.append(np.prod(shape, dtype=float))
    return empty(shape, *args, **kwargs)

  monkeypatch.setattr(arrays.np, 'empty', spy)
  for mode, directory, more in (
    ('train', run, {}),
    ('eval', run, {}),
    ('train', tmp_path / 'new', {'restore_from': str(run)}),
  ):
    live = lib.weights(7)
    before = live.held()
    with pytest.raises((errors.UsageError, store_lib.DamagedError)):
      lib.restore(open_run(mode, directory, **values, **more), live)
    lib.assert_same(live.held(), before)
  assert max(sizes, default=0) < 10_000
  out = tmp_path / 'out.safetensors'
  is_exported = list(ATTACKS).index(name) < 3
  status = inspection.main(['export', str(run), str(out), '--select=w'])
  assert (status, out.exists()) == ((0, True) if is_exported else (2, False))
  assert capsys.readouterr().err.count('\n') == (not is_exported)
  assert path.exists()
  assert 'this' not in sys.modules
