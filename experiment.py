"""Runs the experiment that the config names.

    python experiment.py --config=configs/lm.py

The config names the class: `config.experiment_class = 'module:Class'`. So this
file runs every experiment without a change, and `jaxline.load`,
`jaxline.evaluate` and `python -m jaxline.inputs show` find the class too. You
can pass a class to `platform.main` instead of None.
"""

import gc
import sys

if __name__ == '__main__':
  gc.disable()  # Imports make no garbage; searching for it takes 0.15 s.
  from jaxline import platform

  gc.freeze()  # Later searches skip what the imports have made.
  gc.enable()
  platform.main(None, sys.argv[1:])
