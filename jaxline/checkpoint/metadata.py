"""Names the folders of arrays, and describes the arrays to other programs.

Zarr and TensorStore read `zarr.json` in the folder of each array. Orbax reads
`_METADATA`, which places each array in a tree.
"""

from collections.abc import Collection, Mapping
import itertools
import json
import re
from typing import Any

import jax.numpy as jnp

ORBAX, ZARR = '_METADATA', 'zarr.json'
# A plain name starts with a letter. File systems limit names to 255 bytes.
_PLAIN = re.compile(r'[A-Za-z][A-Za-z0-9_.~-]{0,199}')
FOLDER = re.compile(rf'\d{{4,}}(\.[A-Za-z0-9_.-]+)?|{_PLAIN.pattern}')


def folders(names: Collection[str]) -> dict[str, str]:
  """Maps the name of each array to the name of its folder.

  Orbax expects the folder `a.b` for `a/b`. If no such folder, or no such place
  in a tree, is possible, the folder's name starts with a number instead.
  """
  inner = set[str]()
  for name in names:
    above = name.split('/')[:-1]
    inner.update(itertools.accumulate(above, lambda a, b: f'{a}/{b}'))
  found, taken = {}, set[str]()
  for i, name in enumerate(names):
    folder = _orbax_folder(name)
    if (
      name in inner
      or not _PLAIN.fullmatch(folder)
      or folder.lower() in taken  # Some file systems ignore case.
    ):
      folder = f'{i:04d}{_end(name)}'
    taken.add(folder.lower())
    found[name] = folder
  return found


def is_folder_of(folder: str, name: str) -> bool:
  """Returns whether a folder of this name may hold the array `name`."""
  numbered = folder[:1].isdigit() and folder.lstrip('0123456789') == _end(name)
  return numbered or folder == _orbax_folder(name)


def _orbax_folder(name: str) -> str:
  return name.replace('/', '.')


def _end(name: str) -> str:
  """Returns the part of a folder's name that follows the number."""
  end = re.sub(r'[^A-Za-z0-9_.-]+', '.', name)[-100:].strip('.')
  return f'.{end}'.rstrip('.')


def zarr(about: Mapping[str, Any]) -> bytes:
  """Returns the Zarr 3 metadata of a described array."""
  dtype = jnp.dtype(about['dtype'])
  fill = False if dtype.kind == 'b' else [0, 0] if dtype.kind == 'c' else 0
  meta = {
    'zarr_format': 3,
    'node_type': 'array',
    'shape': about['shape'],
    'data_type': about['dtype'],
    'chunk_grid': {
      'name': 'regular',
      'configuration': {'chunk_shape': [max(1, n) for n in about['chunk']]},
    },
    'chunk_key_encoding': {
      'name': 'default',
      'configuration': {'separator': '.'},
    },
    'fill_value': fill,
    'codecs': [{'name': 'bytes', 'configuration': {'endian': 'little'}}],
  }
  return json.dumps(meta).encode()


def orbax(described: Mapping[str, Mapping[str, Any]]) -> bytes:
  """Returns Orbax's `_METADATA`: the place of each array in a tree."""
  tree = {}
  for name, about in described.items():
    folder = about['file']
    path = name.split('/') if folder == _orbax_folder(name) else [folder]
    tree[str(tuple(path))] = {
      # Key type 2 means the key of a dict.
      'key_metadata': [{'key': key, 'key_type': 2} for key in path],
      'value_metadata': {
        'value_type': 'np.ndarray',  # jax.Array would need a sharding.
        'skip_deserialize': False,
        'write_shape': about['shape'],
      },
    }
  index = {
    'tree_metadata': tree,
    'use_ocdbt': False,
    'use_zarr3': True,
    'store_array_data_equal_to_fill_value': True,
    'custom_metadata': None,
  }
  return json.dumps(index).encode()
