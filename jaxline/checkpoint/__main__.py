"""`python -m jaxline.checkpoint`: see inspection.py."""

import sys

import jax

from jaxline.checkpoint import inspection

if __name__ == '__main__':
  # Use the CPU: a run may be using all accelerators.
  jax.config.update('jax_platforms', 'cpu')
  sys.exit(inspection.main())
