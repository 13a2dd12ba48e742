"""Names for the leaves of a tree."""

from collections.abc import Container
import functools
from typing import Any

import jax

# Returns the name of a path, such as 'params/linear/w'.
name_of = functools.partial(jax.tree_util.keystr, simple=True, separator='/')


def named_leaves(tree: Any, name: str = '') -> dict[str, Any]:
  """Returns the leaves of a tree by name, in the order of `jax.tree.leaves`.

  If several paths give the same name, '#2' is added to the second, '#3' to the
  third. None is not a leaf. `name` is a prefix of all names.
  """
  named: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    parts = [part for part in (name, name_of(path)) if part]
    named[unique_name('/'.join(parts), named)] = leaf
  return named


def unique_name(name: str, taken: Container[str]) -> str:
  """Returns `name`, with '#2', '#3' ... added if it is taken."""
  unique, count = name, 1
  while unique in taken:
    count += 1
    unique = f'{name}#{count}'
  return unique
