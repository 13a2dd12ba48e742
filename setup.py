"""For tools that run `python setup.py`; pyproject.toml has the metadata."""

import setuptools

setuptools.setup()
