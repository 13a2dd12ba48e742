"""Inputs for generators with Lingvo's interface: Pax's adaptors.

A generator has `GetPreprocessedInputBatch()`, which returns a (nested) mapping
of tensors, batch first; `params` (or `p`), of which `file_random_seed` and
`batch_size` are used; and, optionally, `InfeedBatchSize()`, `Reset()` and
`IdsToStrings()`. Params are any object whose `Instantiate()` makes a generator.
Lingvo need not be installed. If it is, its generators get the host, and whether
they evaluate, as in Lingvo, by its infeed context and cluster.

Generators cannot save their position, so neither can these inputs: a run that
is resumed reads from the beginning again. In training they should therefore
have `file_random_seed` 0, which is another order at each start.

Shapes: b rows of a generator's batch, B rows of a host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
from typing import Any, ClassVar

import numpy as np

from examples.pax import base_input
from examples.pax.inputs import tfdata
from jaxline import errors
from jaxline.inputs import base

# Pax's name for the weights of rows.
SAMPLE_WEIGHTS = 'eval_sample_weights'


@dataclasses.dataclass(kw_only=True, eq=False)
class LingvoInputAdaptor(base_input.BaseInput):
  """The batches of a generator, as it makes them.

  Whether hosts read different data, and end together, is the generator's
  affair: with `file_random_seed` 0, each host has another random order. To
  evaluate on one epoch with several hosts, use `LingvoEvalAdaptor`.

  Strings are dropped in training and with several hosts, as devices cannot hold
  them. Where the generator gives no `eval_sample_weights`, ones are added,
  float32 [B]; and where it gives no `weights`, they are the same. Padding rows
  have weight 0 by either name.

  Attributes:
    input: a generator, or its params. Only with params can it be made again,
      for each evaluation and with a seed for each host.
    batch_size: leave it None: it is that of the generator, by
      `InfeedBatchSize()` or its params, or else the rows of its first batch,
      once that was read.
    num_batches: how many batches there are until the input ends; None is as
      many as the generator has.
    allow_fixed_file_random_seed: whether `file_random_seed` may be other than
      0; the host's index is added to it then.
    cluster_do_eval: whether Lingvo's cluster says that it evaluates: its
      generators then read in order, and once. None follows `reset_for_eval`.
  """

  input: Any
  batch_size: int | None = None  # type: ignore[assignment]
  num_batches: int | None = None
  allow_fixed_file_random_seed: bool = False
  cluster_do_eval: bool | None = None

  # Whether batches are as big as the generator makes them.
  _OWN_BATCH_SIZE: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if not self._OWN_BATCH_SIZE:
      self.check_integer('batch_size')
    elif self.batch_size is not None:
      self.refuse(
        'batch_size',
        "None, as it is the generator's own. Set that, or use"
        ' LingvoInputAdaptorNewBatchSize to cut its batches into smaller ones',
      )
    self.check_integer('num_batches', or_none=True)
    if self.cluster_do_eval is None:
      self.cluster_do_eval = self.reset_for_eval
    if self.cluster_do_eval and self.is_training:
      self.refuse('cluster_do_eval', 'False in training')
    self._generator: Any = self.input
    self._params: Any = None
    if hasattr(self.input, 'GetPreprocessedInputBatch'):
      self._settle_seed(_params_of(self.input))
    else:
      self._params = copy.deepcopy(self.input)
      self._settle_seed(self._params)
      self._generator = self._instantiate()
    self._begin()
    if self._OWN_BATCH_SIZE:
      self.batch_size = self._told_batch_size()

  def _settle_seed(self, params: Any) -> None:
    """Checks the generator's seed, and makes it that of this host."""
    seed = getattr(params, 'file_random_seed', 0)
    if not seed:
      return
    if not self.allow_fixed_file_random_seed:
      raise errors.UsageError(
        f'{self.name} has a generator with file_random_seed={seed}: each start'
        ' reads the same data, so that a training that is resumed repeats it.'
        ' Set file_random_seed=0 for another order at each start, or'
        ' allow_fixed_file_random_seed=True.'
      )
    if not self.infeed_host_index:
      return
    if params is not self._params:
      raise errors.UsageError(
        f'{self.name} is host {self.infeed_host_index}, and its generator was'
        f' already made with file_random_seed={seed}, that of host 0. Give the'
        ' params instead of the generator.'
      )
    params.file_random_seed = seed + self.infeed_host_index

  def _instantiate(self) -> Any:
    with self._scope():
      return self._params.Instantiate()

  def _begin(self) -> None:
    """Goes to the first batch of the generator."""
    self._given = 0
    with self._scope():
      self._get = _getter(self._generator)
    self._batches: Iterator[base.Batch] = self._read()

  def _told_batch_size(self) -> int | None:
    size = getattr(_params_of(self._generator), 'batch_size', None)
    if hasattr(self._generator, 'InfeedBatchSize'):
      with self._scope():
        size = self._generator.InfeedBatchSize()
    return int(size) if size else None  # Lingvo's of tf.data say 0.

  def _infeed_host(self) -> tuple[int, int]:
    """Returns which host of how many the generator is to read for."""
    assert self.infeed_host_index is not None
    assert self.num_infeed_hosts is not None
    return self.infeed_host_index, self.num_infeed_hosts

  @contextlib.contextmanager
  def _scope(self) -> Iterator[None]:
    """What Lingvo's generators look around for, if there are any."""
    if self._cluster is None:
      yield
      return
    module, cluster = self._cluster
    with module.InfeedContextScope(*self._infeed_host()), cluster:
      yield

  @functools.cached_property
  def _cluster(self) -> tuple[Any, Any] | None:
    """Lingvo's module of clusters and the cluster to read in, if it is here."""
    module = sys.modules.get('lingvo.core.cluster')
    if module is None:  # Who has one of its generators has imported it.
      return None
    factory = importlib.import_module('lingvo.core.cluster_factory')
    cluster = factory.SetEval(self.cluster_do_eval)
    cluster.params.xla_device = 'tpu'  # Fixed shapes, as JAX wants them too.
    cluster.params.enable_asserts = False
    return module, cluster

  def _read(self) -> Iterator[base.Batch]:
    """Yields the batches of the generator, [b, ...], with weights."""
    while True:
      try:
        with self._scope():
          given = self._get()
      except Exception as e:
        if base.is_end(e):
          return
        raise
      # `Batch` is for code that was written for Pax.
      batch = base.Batch(tfdata.to_batch(self, given))
      ones = np.ones(base.num_rows(batch), np.float32)
      weights = batch.setdefault(SAMPLE_WEIGHTS, ones)
      batch.setdefault(base.WEIGHTS, weights.astype(np.float32))
      yield batch

  def get_next(self) -> base.Batch:
    """Returns the next batch: arrays [b, ...].

    Raises:
      StopIteration: after `num_batches`, or where the generator ends.
    """
    if self._given == self.num_batches:
      raise StopIteration
    try:
      batch = next(self._batches)
    except Exception as e:
      if not isinstance(e, StopIteration):
        self._batches = self._read()  # A generator that raised only ends.
      raise
    self._given += 1
    self.batch_size = self.batch_size or base.num_rows(batch)
    return batch

  def reset(self) -> None:
    """Makes the generator again, or calls `Reset()` of a given one.

    Raises:
      NotImplementedError: it was given, and has none.
    """
    super().reset()
    if not self._given:
      return
    if self._params is not None:
      self._generator = self._instantiate()
    elif hasattr(self._generator, 'Reset'):
      with self._scope():
        self._generator.Reset()
    else:
      raise NotImplementedError(
        f'{self.name} cannot be reset: {type(self._generator).__name__} has no'
        ' Reset(). Give its params instead, which can make it anew.'
      )
    self._begin()

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    """Returns the text of token ids [B, L], as the generator has it."""
    if not hasattr(self._generator, 'IdsToStrings'):
      return super().ids_to_strings(ids, lengths, key)
    with self._scope():
      strings = self._generator.IdsToStrings(
        np.asarray(ids, np.int32), np.asarray(lengths, np.int32), key
      )
    if hasattr(strings, 'numpy'):
      strings = strings.numpy()
    return [
      s.decode(errors='replace') if isinstance(s, bytes) else str(s)
      for s in np.asarray(strings).tolist()
    ]


@dataclasses.dataclass(kw_only=True, eq=False)
class LingvoInputAdaptorNewBatchSize(LingvoInputAdaptor):
  """The batches of a generator, cut into smaller ones.

  For generators that pack a fixed number of examples into a row and so need
  big batches of their own.

  Attributes:
    batch_size: B; the generator's b must be a multiple of it.
    num_batches: counts the batches that this input gives.
  """

  _OWN_BATCH_SIZE: ClassVar[bool] = False

  def _read(self) -> Iterator[base.Batch]:
    assert self.batch_size is not None
    for batch in super()._read():
      if base.num_rows(batch) % self.batch_size:
        raise ValueError(
          f'{self.name} has batch_size={self.batch_size}, and its generator'
          f' gave {base.num_rows(batch)} rows; expected a multiple of'
          ' batch_size.'
        )
      yield from tfdata.rebatch([batch], self.batch_size)


@dataclasses.dataclass(kw_only=True, eq=False)
class LingvoEvalAdaptor(LingvoInputAdaptor):
  """One epoch of a generator's examples, divided among the hosts.

  Every host reads all examples, in the same order. The generator must give that
  order: it gets one as the number of hosts, and its `file_random_seed` is not
  changed. Of each B * num_infeed_hosts examples, a host gives its own B. All
  hosts end after the same number of batches, the last of them padded.

  Attributes:
    batch_size: B; the generator's batches may be of any size.
    reset_for_eval: must be True.
    num_batches: counts the batches that this input gives.
  """

  _OWN_BATCH_SIZE: ClassVar[bool] = False

  def _check_fields(self) -> None:
    super()._check_fields()
    if not self.reset_for_eval:
      self.refuse('reset_for_eval', 'True: it reads one epoch')

  def _settle_seed(self, params: Any) -> None:
    """Leaves the seed as it is: all hosts read the same."""

  def _infeed_host(self) -> tuple[int, int]:
    return 0, 1

  def _read(self) -> Iterator[base.Batch]:
    for batch in tfdata.rebatch(super()._read(), self.get_global_batch_size()):
      yield tfdata.host_rows(self, batch)


def _params_of(generator: Any) -> Any:
  return getattr(generator, 'params', getattr(generator, 'p', None))


def _getter(generator: Any) -> Callable[[], Any]:
  """Returns the function that makes the generator's next batch."""
  lingvo = sys.modules.get('lingvo.core.base_input_generator')
  if lingvo is None or not isinstance(generator, lingvo.BaseInputGenerator):
    return generator.GetPreprocessedInputBatch
  datasource = importlib.import_module('lingvo.core.datasource')
  if isinstance(
    getattr(generator, 'datasource', None), datasource.TFDatasetSource
  ):
    return generator.GetPreprocessedInputBatch
  # Called op by op, an input op of Lingvo would restart at each call.
  import tensorflow as tf

  return tf.function(generator.GetPreprocessedInputBatch)
