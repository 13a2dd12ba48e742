"""`python -m jaxline.checkpoint`: see cli.py."""

import sys

import jax

from jaxline.checkpoint import cli

if __name__ == '__main__':
  # Files are looked at beside a run that may have all accelerators.
  jax.config.update('jax_platforms', 'cpu')
  sys.exit(cli.main())
