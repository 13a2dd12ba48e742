"""What the tests of the examples have in common."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope='module')
def compile_fast() -> Iterator[None]:
  """Makes XLA spend less time on programs that are run only once."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)
