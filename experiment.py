"""Runs the experiment that the config names.

    python experiment.py --config=configs/lm.py

The config names the class: `config.experiment_class = 'module:Class'`. So this
file runs every experiment without a change, and `jaxline.load`,
`jaxline.evaluate` and `python -m jaxline.inputs show` find the class too. You
can pass a class to `platform.main` instead of None.
"""

import sys

from jaxline import platform

if __name__ == '__main__':
  platform.main(None, sys.argv[1:])
