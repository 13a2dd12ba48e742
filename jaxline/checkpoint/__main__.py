"""`python -m jaxline.checkpoint`: see inspection.py."""

import sys

import jax

from jaxline.checkpoint import inspection

if __name__ == '__main__':
  # Files are looked at beside a run that may have all accelerators.
  jax.config.update('jax_platforms', 'cpu')
  sys.exit(inspection.main())
