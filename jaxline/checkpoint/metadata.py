"""What other programs read of a checkpoint: folders and their metadata.

Zarr and TensorStore read `zarr.json` in the folder of each array, Orbax reads
`_METADATA` beside the folders.
"""

from collections.abc import Collection, Mapping
import itertools
import re
from typing import Any

import jax.numpy as jnp

ORBAX = '_METADATA'
FOLDER = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.~-]*')
_LONGEST = 200  # Characters; file systems have 255 bytes.


def folders(names: Collection[str]) -> dict[str, str]:
  """Maps the name of each array to that of its folder.

  For Orbax the folder of `a/b` is `a.b`. Where there can be no such folder, or
  no such place in a tree, the name begins with a number.
  """
  inner = set[str]()
  for name in names:
    above = name.split('/')[:-1]
    inner.update(itertools.accumulate(above, lambda a, b: f'{a}/{b}'))
  found, taken = {}, set[str]()
  for i, name in enumerate(names):
    folder = _orbax_folder(name)
    # Some file systems take `W` for `w`.
    if name in inner or folder[:1].isdigit() or folder.lower() in taken:
      folder = ''
    if not FOLDER.fullmatch(folder) or len(folder) > _LONGEST:
      tail = re.sub(r'[^A-Za-z0-9_.-]+', '.', name)[-100:].strip('.')
      folder = f'{i:04d}.{tail}'.rstrip('.')
    taken.add(folder.lower())
    found[name] = folder
  return found


def _orbax_folder(name: str) -> str:
  return name.replace('/', '.')


def zarr(about: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the metadata of Zarr 3 for a described array."""
  dtype = jnp.dtype(about['dtype'])
  fill = False if dtype.kind == 'b' else [0, 0] if dtype.kind == 'c' else 0
  return {
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


def orbax(described: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """Returns what Orbax reads first: the place of each array in a tree."""
  tree = {}
  for name, about in described.items():
    folder = about['file']
    path = name.split('/') if folder == _orbax_folder(name) else [folder]
    tree[str(tuple(path))] = {
      # The keys of nested dicts.
      'key_metadata': [{'key': key, 'key_type': 2} for key in path],
      'value_metadata': {
        'value_type': 'np.ndarray',  # One of jax.Array would need a sharding.
        'skip_deserialize': False,
        'write_shape': about['shape'],
      },
    }
  return {
    'tree_metadata': tree,
    'use_ocdbt': False,
    'use_zarr3': True,
    'store_array_data_equal_to_fill_value': True,
    'custom_metadata': None,
  }
