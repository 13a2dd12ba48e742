"""Re-exports the layers of transformers, under Praxis's names."""

# ruff: noqa: F401 (other modules import these names from here)

from examples.pax.layers.attentions import Context
from examples.pax.layers.transformer_layers import Transformer
from examples.pax.layers.transformer_layers import TransformerFeedForward
from examples.pax.layers.transformer_models import CACHE_AXIS
from examples.pax.layers.transformer_models import TransformerEncoderDecoder
from examples.pax.layers.transformer_models import TransformerLm
from examples.pax.layers.transformer_stacks import PipelinedTransformer
from examples.pax.layers.transformer_stacks import StackedTransformer
from examples.pax.layers.transformer_stacks import StackedTransformerRepeated
