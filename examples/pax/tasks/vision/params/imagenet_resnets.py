"""ResNet-50 on images of ImageNet's shape.

    python -m examples.pax.main --exp=ResNet50Pjit --job_log_dir=/tmp/resnet

The known parts of Pax's experiment are the network with its 25,557,032 weights
and 53,120 BatchNorm statistics, the batch and the optimizer. The schedule
follows Goyal et al. (2017), 'Accurate, large minibatch SGD', with the same rate
of 0.1 for each 256 images: the rate rises over the first five of 90 epochs, is
divided by ten at the epochs 30, 60 and 80, and is 0 from epoch 90. An epoch is
2502 whole batches.

The constant `DATA` selects the data:
  'synthetic'  ones, to measure speed.
  'digits'     scikit-learn's digits, with constants for their size. `reduced`
               uses it.

To train on your images, override `datasets` with an `indexed.ArrayInput` of
memory-mapped NumPy arrays, or with a `tfdata.TfDataInput`.
"""

from typing import Any, ClassVar, Self

import fiddle as fdl
import jax.numpy as jnp
import numpy as np

from examples import digits
from examples.pax import base_experiment
from examples.pax import base_layer
from examples.pax import experiment_registry
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from examples.pax import schedules
from examples.pax import tasks
from examples.pax.inputs import synthetic
from examples.pax.layers import embedding_softmax
from examples.pax.layers import resnets
from jaxline import errors
from jaxline.inputs import base as inputs
from jaxline.inputs import indexed

_DATA = ('synthetic', 'digits')


@experiment_registry.register
class ResNet50Pjit(base_experiment.BaseExperiment):
  """ResNet-50 with BatchNorm over the global batch.

  Goyal et al. (2017) report 76.3% of ImageNet's validation images correct, with
  crops of several sizes, which this module does not make. Not measured here.
  """

  TRAIN_BATCH_SIZE: ClassVar[int] = 512  # Rows over all devices.
  EVAL_BATCH_SIZE: ClassVar[int] = 512  # Rows over all devices.
  DATA: ClassVar[str] = 'synthetic'  # See the top of this module.
  # Images of an epoch, for synthetic data and for the schedule.
  TRAIN_EXAMPLES: ClassVar[int] = 1_281_167
  EVAL_EXAMPLES: ClassVar[int] = 50_000  # Images, for synthetic data.
  IMAGE_SIZE: ClassVar[int] = 224  # Rows and columns.
  IMAGE_CHANNELS: ClassVar[int] = 3
  # Statistics of each channel over ImageNet, for pixels from 0 to 255.
  PIXEL_MEAN: ClassVar[tuple[float, ...]] = (123.675, 116.28, 103.53)
  PIXEL_STD: ClassVar[tuple[float, ...]] = (58.395, 57.12, 57.375)
  NUM_CLASSES: ClassVar[int] = 1000

  BLOCKS: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)  # Blocks of each group.
  # Output channels of each group.
  CHANNELS: ClassVar[tuple[int, ...]] = (256, 512, 1024, 2048)
  # Stride of the first block of each group.
  STRIDES: ClassVar[tuple[int, ...]] = (1, 2, 2, 2)
  STEM_CHANNELS: ClassVar[int] = 64  # Channels of the first convolution.
  # Whether the first convolution is 3x3 and keeps the size. If not, it is 7x7
  # with stride 2, followed by a pooling with stride 2.
  SMALL_IMAGES: ClassVar[bool] = False
  # Dtype of the computation. Weights and statistics are float32.
  FPROP_DTYPE: ClassVar[str] = 'bfloat16'
  # Decay of the moving statistics.
  BATCH_NORM_DECAY: ClassVar[float] = 0.9

  LEARNING_RATE: ClassVar[float] = 0.2  # Peak value, after the warm-up.
  MOMENTUM: ClassVar[float] = 0.9  # Nesterov momentum.
  L2: ClassVar[float] = 1e-4  # Not applied to scales and biases.
  WARMUP_EPOCHS: ClassVar[float] = 5.0  # The learning rate rises from 0.
  # The rate is divided by ten at each of these, and is 0 after NUM_EPOCHS.
  DECAY_EPOCHS: ClassVar[tuple[float, ...]] = (30.0, 60.0, 80.0)
  NUM_EPOCHS: ClassVar[float] = 90.0

  # One host with four chips, with 128 images each.
  TOPOLOGY: ClassVar[str | None] = 'v4:2x2x1'
  MAX_STEPS: ClassVar[int] = 225_180  # 90 epochs of 2502 steps.
  CHECKPOINT_EVERY_N_STEPS: ClassVar[int] = 2502
  EVAL_INTERVAL_STEPS: ClassVar[int] = 2502

  changeable_constants = ('EVAL_BATCH_SIZE', 'EVAL_EXAMPLES')

  def datasets(self) -> list[fdl.Config]:
    """Returns an input for training and one for evaluation."""
    return [
      self._dataset(
        *('train', self.TRAIN_BATCH_SIZE, self.TRAIN_EXAMPLES),
        is_training=True,
        input_random_seed=self.RANDOM_SEED,
      ),
      self._dataset(
        *('validation', self.EVAL_BATCH_SIZE, self.EVAL_EXAMPLES),
        is_training=False,
        reset_for_eval=True,
        eval_loop_num_batches=None,
      ),
    ]

  def _dataset(
    self, split: str, rows: int, size: int, **fields: Any
  ) -> fdl.Config:
    errors.check_names([self.DATA], _DATA, 'value', 'DATA')
    fields.update(
      name=split, shard=self.shard, batch_size=inputs.per_host(rows, self.shard)
    )
    if self.DATA == 'digits':
      return fdl.Config(_digits, **fields)
    specs = self.input_specs()
    return fdl.Config(synthetic.SyntheticInput, spec=specs, size=size, **fields)

  def input_specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns entry -> (shape of a row, dtype) of a batch."""
    shape = (self.IMAGE_SIZE, self.IMAGE_SIZE, self.IMAGE_CHANNELS)
    return {
      'image': (shape, 'uint8'),
      'label': ((), 'int32'),
      'weights': ((), 'float32'),
    }

  def task(self) -> Any:
    """Returns the HParams of the task."""
    kernel, stride = (3, 1) if self.SMALL_IMAGES else (7, 2)
    network = resnets.ResNet.HParams(
      block_params=resnets.ResNetBlock.HParams(zero_init_residual=True),
      entryflow_conv_channels=self.STEM_CHANNELS,
      entryflow_conv_kernel=(kernel, kernel, self.IMAGE_CHANNELS),
      entryflow_conv_stride=(stride, stride),
      entry_max_pool=not self.SMALL_IMAGES,
      channels=self.CHANNELS,
      blocks=self.BLOCKS,
      kernels=(3,) * len(self.BLOCKS),
      strides=self.STRIDES,
      pixel_mean=self.PIXEL_MEAN,
      pixel_std=self.PIXEL_STD,
    )
    network.conv_params.batch_norm_tpl.decay = self.BATCH_NORM_DECAY
    softmax = embedding_softmax.FullSoftmax.HParams(
      input_dims=self.CHANNELS[-1],
      num_classes=self.NUM_CLASSES,
      # See Goyal et al. (2017), section 5.1.
      params_init=base_layer.WeightInit.Gaussian(0.01),
    )
    task = tasks.SingleTask.HParams(
      name='resnet',
      model=models.ClassificationModel.HParams(
        network_tpl=network,
        softmax_tpl=softmax,
        fprop_dtype=jnp.dtype(self.FPROP_DTYPE),
      ),
    )
    task.train.learner = learners.Learner.HParams(
      optimizer=optimizers.Sgd.HParams(
        learning_rate=self.LEARNING_RATE,
        lr_schedule=self._schedule(),
        momentum=self.MOMENTUM,
        nesterov=True,
        l2_regularizer_weight=self.L2,
        skip_lp_1d_vectors=True,
      )
    )
    return task

  def _schedule(self) -> Any:
    # Pax counts only whole batches, too.
    steps_per_epoch = self.TRAIN_EXAMPLES // self.TRAIN_BATCH_SIZE
    epochs = (self.WARMUP_EPOCHS, *self.DECAY_EPOCHS, self.NUM_EPOCHS)
    return schedules.LinearRampupPiecewiseConstant.HParams(
      boundaries=tuple(round(epoch * steps_per_epoch) for epoch in epochs),
      values=(*(10.0**-i for i in range(len(epochs) - 1)), 0.0),
    )

  @classmethod
  def reduced(cls) -> type[Self]:
    """Returns a version with two blocks, for scikit-learn's digits.

    It classifies about 98% of the 360 validation images correctly.
    """
    return cls.with_constants(
      {
        'DATA': 'digits',
        'TRAIN_BATCH_SIZE': 64,
        'EVAL_BATCH_SIZE': 120,
        'TRAIN_EXAMPLES': 1437,
        'EVAL_EXAMPLES': 360,
        'IMAGE_SIZE': 8,
        'IMAGE_CHANNELS': 1,
        'SMALL_IMAGES': True,
        # Statistics over all digits.
        'PIXEL_MEAN': (73.3,),
        'PIXEL_STD': (90.2,),
        'NUM_CLASSES': 10,
        'BLOCKS': (1, 1),
        'CHANNELS': (64, 128),
        'STRIDES': (1, 2),
        'STEM_CHANNELS': 32,
        'FPROP_DTYPE': 'float32',
        'LEARNING_RATE': 0.1,
        'WARMUP_EPOCHS': 1.0,
        'DECAY_EPOCHS': (8.0,),
        'NUM_EPOCHS': 10.0,
        'TOPOLOGY': None,
        'MAX_STEPS': 220,  # Ten epochs of the digits.
        'CHECKPOINT_EVERY_N_STEPS': 100,
        'SUMMARY_INTERVAL_STEPS': 10,
        'EVAL_INTERVAL_STEPS': 110,
      }
    )


def _digits(*, is_training: bool, **fields: Any) -> indexed.ArrayInput:
  """Makes an input of scikit-learn's digits; one in five is for validation.

  Images are uint8, the fewest bytes to send to the device, which normalizes
  them.
  """
  images_NHWC, labels_N = digits.load()
  chosen_N = (np.arange(len(labels_N)) % 5 > 0) == is_training
  values = {
    # Pixels are 0 to 16. This scales them to 0 to 240.
    'image': (images_NHWC[chosen_N] * 15).astype(np.uint8),
    'label': labels_N[chosen_N],
    'weights': np.ones(chosen_N.sum(), np.float32),
  }
  return indexed.ArrayInput(values=values, is_training=is_training, **fields)
