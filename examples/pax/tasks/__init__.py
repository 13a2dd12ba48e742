"""Tasks, and in `params` below it the registered experiments."""

# ruff: noqa: F401 (other modules import these names from here)

from examples.pax import hparams
from examples.pax.base_task import BaseTask
from examples.pax.base_task import LossAggregator
from examples.pax.base_task import MeanMetrics
from examples.pax.base_task import MultiLossAggregator
from examples.pax.base_task import SingleTask
from examples.pax.base_task import TrainHParams
from examples.pax.base_task import VariationalNoise

__getattr__ = hparams.refuse_names_of_pax(__name__)
