"""Language models of Pax's documents on C4, by name.

Expected: they fit the TPUs that they were run on. Nobody has trained them here.
Hardware: the topology of each, in examples/pax/tasks/lm/params; to compile, any
          machine.
Time:     10,000,000 steps of at least 1.00 s are 116 days on 4 v4 chips:
          computed, not measured (C4Spmd1BAdam4Replicas in
          docs/reference/scale.md, which has the others too). The learning rate
          stays as it is after 300,000 steps, 3.5 days.
Command:  python experiment.py --config=configs/c4.py:C4Spmd1BAdam4Replicas \
            --config.data_dir=c4/en --config.vocabulary=my.model

The same runs as `python -m examples.pax.main --exp=NAME`: the numbers stand in
the registered experiments, and here under
`config.experiment_kwargs.config.constants`. Without C4,
--config.data=stdlib trains on the bundled corpus; --jaxline_mode=compile needs
no data. `NAME:reduced` is a small model of the family.
"""

from ml_collections import config_dict

from examples.pax import config as pax


def get_config(name: str = 'C4Spmd1BAdam4Replicas') -> config_dict.ConfigDict:
  """Returns the config of a registered experiment."""
  return pax.get_config(name)
