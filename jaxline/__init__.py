"""A forkable single-experiment training template for JAX."""

__version__ = '0.1.0'
