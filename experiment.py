"""The fork point: which Experiment runs.

    python experiment.py --config=configs/lm.py

As it stands, the config names the class (`config.experiment_class`), so that
one file runs every example. To fork, write a class beside this file or in a
folder of your own and hand it over here instead of None.
"""

import sys

from jaxline import platform

if __name__ == '__main__':
  platform.main(None, sys.argv[1:])
