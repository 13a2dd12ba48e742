"""Names for the leaves of a tree."""

from collections.abc import Container
import functools
from typing import Any

import jax

# Returns the name of a path: 'params/linear/w'.
name_of = functools.partial(jax.tree_util.keystr, simple=True, separator='/')


def named_leaves(tree: Any, name: str = '') -> dict[str, Any]:
  """Returns the leaves of a tree by name, in the order of `jax.tree.leaves`.

  Where the paths of several leaves join to the same name, the second gets '#2',
  the third '#3'. None is not a leaf. `name` is the prefix of all names.
  """
  named: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    parts = [part for part in (name, name_of(path)) if part]
    named[unique_name('/'.join(parts), named)] = leaf
  return named


def unique_name(name: str, taken: Container[str]) -> str:
  """Returns a name that is not taken yet: with '#2', '#3' behind it if so."""
  unique, count = name, 1
  while unique in taken:
    count += 1
    unique = f'{name}#{count}'
  return unique
