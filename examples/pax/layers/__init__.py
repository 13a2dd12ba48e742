"""Re-exports all layers, under Praxis's names."""

# ruff: noqa: F401 (other modules import these names from here)

from examples.pax import hparams
from examples.pax.layers.activations import GELU
from examples.pax.layers.activations import BaseActivation
from examples.pax.layers.activations import Identity
from examples.pax.layers.activations import ReLU
from examples.pax.layers.activations import SiLU
from examples.pax.layers.attentions import DotProductAttention
from examples.pax.layers.attentions import PerDimScale
from examples.pax.layers.attentions import Projection
from examples.pax.layers.convolutions import Conv2D
from examples.pax.layers.convolutions import ConvBNAct
from examples.pax.layers.convolutions import GlobalPooling
from examples.pax.layers.convolutions import MaxPool2D
from examples.pax.layers.embedding_softmax import Embedding
from examples.pax.layers.embedding_softmax import FullSoftmax
from examples.pax.layers.embedding_softmax import PositionalEmbedding
from examples.pax.layers.embedding_softmax import RotaryPositionalEmbedding
from examples.pax.layers.embedding_softmax import SharedEmbeddingSoftmax
from examples.pax.layers.embedding_softmax import TrainablePositionalEmbedding
from examples.pax.layers.linears import Bias
from examples.pax.layers.linears import FeedForward
from examples.pax.layers.linears import Linear
from examples.pax.layers.normalizations import BaseNormalization
from examples.pax.layers.normalizations import BatchNorm
from examples.pax.layers.normalizations import IdentityNorm
from examples.pax.layers.normalizations import LayerNorm
from examples.pax.layers.normalizations import RmsNorm
from examples.pax.layers.repeats import AutodiffCheckpointType
from examples.pax.layers.repeats import Repeat
from examples.pax.layers.resnets import ResNet
from examples.pax.layers.resnets import ResNetBlock
from examples.pax.layers.stochastics import Dropout
from examples.pax.layers.transformers import PipelinedTransformer
from examples.pax.layers.transformers import StackedTransformer
from examples.pax.layers.transformers import StackedTransformerRepeated
from examples.pax.layers.transformers import Transformer
from examples.pax.layers.transformers import TransformerEncoderDecoder
from examples.pax.layers.transformers import TransformerFeedForward
from examples.pax.layers.transformers import TransformerLm

__getattr__ = hparams.refuse_names_of_pax(__name__)
