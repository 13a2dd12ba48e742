"""The language models of Pax's documents on C4, by name.

Expected: according to the TPU compiler, they fit the TPUs for which Pax
          configured them. We have not trained them.
Hardware: the topology of each model, in examples/pax/tasks/lm/params; any
          machine can compile them.
Time:     10,000,000 steps of at least 1.00 s are 116 days on 4 v4 chips:
          computed, not measured (C4Spmd1BAdam4Replicas in
          docs/reference/scale.md, which has the other models too). The learning
          rate is constant after 300,000 steps, which are 3.5 days.
Command:  python experiment.py --config=configs/c4.py:C4Spmd1BAdam4Replicas \
            --config.data_dir=c4/en --config.vocabulary=my.model

These are the runs of `python -m examples.pax.main --exp=NAME`. The registered
experiments define the numbers; this config has them below
`config.experiment_kwargs.config.constants`. Without C4, use
--config.data=stdlib to train on the bundled corpus; --jaxline_mode=compile
needs no data. `NAME:reduced` is a small model of the family.
"""

from ml_collections import config_dict

from examples.pax import config as pax


def get_config(name: str = 'C4Spmd1BAdam4Replicas') -> config_dict.ConfigDict:
  """Returns the config of a registered experiment."""
  return pax.get_config(name)
