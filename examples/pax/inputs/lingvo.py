"""Pax's adaptors for input generators with Lingvo's interface.

A generator has a method `GetPreprocessedInputBatch()`, which returns a (nested)
mapping of tensors, batch first. It has `params` (or `p`), whose
`file_random_seed` and `batch_size` the adaptors read. `InfeedBatchSize()`,
`Reset()` and `IdsToStrings()` are optional. Params are any object whose
`Instantiate()` makes a generator. Lingvo need not be installed. If it is, its
generators learn the host, and whether they evaluate, from Lingvo's infeed
context and cluster.

Generators cannot save their position, so neither can these inputs: a resumed
run reads from the beginning. In training, therefore set `file_random_seed` to
0, which gives a different order at each start.

Shapes: b rows of a generator's batch, B rows of a host's batch.
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

# Pax's name for row weights.
SAMPLE_WEIGHTS = 'eval_sample_weights'


@dataclasses.dataclass(kw_only=True, eq=False)
class LingvoInputAdaptor(base_input.BaseInput):
  """Passes on the batches of a generator.

  The generator decides whether hosts read different data and end together. With
  `file_random_seed` 0, each host has a different random order. To evaluate on
  one epoch with several hosts, use `LingvoEvalAdaptor`.

  Strings are dropped in training and with several hosts: see
  `tfdata.to_batch`. If the generator gives no `eval_sample_weights`, the
  adaptor adds ones, float32 [B]. If it gives no `weights`, they equal these.
  Padding rows have weight 0 under both names.

  Attributes:
    input: A generator, or its params. Only from params can the adaptor make the
      generator again for each evaluation, with a seed for each host.
    batch_size: Must be None. It becomes the generator's batch size from
      `InfeedBatchSize()` or its params. If neither has one, it becomes the
      number of rows of the first batch.
    num_batches: Number of batches. If None, the generator decides.
    allow_fixed_file_random_seed: Whether `file_random_seed` may differ from 0.
      If it does, the index of the host is added to it.
  """

  input: Any
  batch_size: int | None = None  # type: ignore[assignment]
  num_batches: int | None = None
  allow_fixed_file_random_seed: bool = False

  # Whether batches have the size that the generator gives them.
  _OWN_BATCH_SIZE: ClassVar[bool] = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if not self._OWN_BATCH_SIZE:
      self.check_integer('batch_size')
    elif self.batch_size is not None:
      self.refuse(
        'batch_size',
        "None. Set the generator's batch size, or use"
        ' LingvoInputAdaptorNewBatchSize to split its batches',
      )
    self.check_integer('num_batches', or_none=True)
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
    """Checks the generator's seed, and sets the seed of this host."""
    seed = getattr(params, 'file_random_seed', 0)
    if not seed:
      return
    if not self.allow_fixed_file_random_seed:
      raise errors.UsageError(
        f'{self.name} has a generator with file_random_seed={seed}: each start'
        ' reads the same data, so a resumed training repeats it. Set'
        ' file_random_seed=0 for a different order at each start, or'
        ' allow_fixed_file_random_seed=True.'
      )
    if not self.infeed_host_index:
      return
    if params is not self._params:
      raise errors.UsageError(
        f'{self.name} is host {self.infeed_host_index}, but its generator was'
        f' already made with file_random_seed={seed}, the seed of host 0. Give'
        ' the params instead of the generator.'
      )
    params.file_random_seed = seed + self.infeed_host_index

  def _instantiate(self) -> Any:
    with self._scope():
      return self._params.Instantiate()

  def _begin(self) -> None:
    """Starts at the first batch of the generator."""
    self._given = 0
    with self._scope():
      self._get = _getter(self._generator)
    self._batches: Iterator[base.Batch] = self._read()

  def _told_batch_size(self) -> int | None:
    size = getattr(_params_of(self._generator), 'batch_size', None)
    if hasattr(self._generator, 'InfeedBatchSize'):
      with self._scope():
        size = self._generator.InfeedBatchSize()
    return int(size) if size else None  # Lingvo's tf.data generators return 0.

  def _infeed_host(self) -> tuple[int, int]:
    """Returns the host to read for, and the number of hosts."""
    assert self.infeed_host_index is not None
    assert self.num_infeed_hosts is not None
    return self.infeed_host_index, self.num_infeed_hosts

  @contextlib.contextmanager
  def _scope(self) -> Iterator[None]:
    """Enters Lingvo's infeed context and cluster, if Lingvo is imported."""
    if self._cluster is None:
      yield
      return
    module, cluster = self._cluster
    with module.InfeedContextScope(*self._infeed_host()), cluster:
      yield

  @functools.cached_property
  def _cluster(self) -> tuple[Any, Any] | None:
    """Lingvo's cluster module and a cluster, or None if it is not imported."""
    module = sys.modules.get('lingvo.core.cluster')
    if module is None:  # Making a Lingvo generator imports it.
      return None
    factory = importlib.import_module('lingvo.core.cluster_factory')
    # In an evaluation, Lingvo's generators read in order and only once.
    cluster = factory.SetEval(self.reset_for_eval)
    cluster.params.xla_device = 'tpu'  # Gives fixed shapes, which JAX needs.
    cluster.params.enable_asserts = False
    return module, cluster

  def _read(self) -> Iterator[base.Batch]:
    """Yields the generator's batches, [b, ...], with weights added."""
    while True:
      try:
        with self._scope():
          given = self._get()
      except Exception as e:
        if base.is_end(e):
          return
        raise
      # Code written for Pax expects a `Batch`.
      batch = base.Batch(tfdata.to_batch(self, given))
      ones = np.ones(base.num_rows(batch), np.float32)
      weights = batch.setdefault(SAMPLE_WEIGHTS, ones)
      batch.setdefault(base.WEIGHTS, weights.astype(np.float32))
      yield batch

  def get_next(self) -> base.Batch:
    """Returns the next batch, arrays [b, ...]."""
    if self._given == self.num_batches:
      raise StopIteration
    try:
      batch = next(self._batches)
    except Exception as e:
      if not isinstance(e, StopIteration):
        # After an error, a generator is at its end.
        self._batches = self._read()
      raise
    self._given += 1
    self.batch_size = self.batch_size or base.num_rows(batch)
    return batch

  def reset(self) -> None:
    """Makes the generator again from its params, or calls its `Reset()`."""
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
        ' Reset(). Give its params instead, to make a new generator.'
      )
    self._begin()

  def ids_to_strings(
    self, ids: np.ndarray, lengths: np.ndarray, key: str | None = None
  ) -> list[str]:
    if not hasattr(self._generator, 'IdsToStrings'):
      return super().ids_to_strings(ids, lengths, key)
    with self._scope():
      strings = self._generator.IdsToStrings(
        np.asarray(ids, np.int32), np.asarray(lengths, np.int32), key
      )
    strings = getattr(strings, 'numpy', lambda: strings)()
    return [
      s.decode(errors='replace') if isinstance(s, bytes) else str(s)
      for s in np.asarray(strings).tolist()
    ]


@dataclasses.dataclass(kw_only=True, eq=False)
class LingvoInputAdaptorNewBatchSize(LingvoInputAdaptor):
  """Splits the batches of a generator into smaller ones.

  Use it for generators that need a large batch, for example because they pack a
  fixed number of examples into a row. `batch_size` is B, a divisor of the
  generator's b.
  """

  _OWN_BATCH_SIZE: ClassVar[bool] = False

  def _read(self) -> Iterator[base.Batch]:
    assert self.batch_size is not None
    for batch in super()._read():
      if base.num_rows(batch) % self.batch_size:
        raise ValueError(
          f'{self.name} has batch_size={self.batch_size}, but its generator'
          f' gave {base.num_rows(batch)} rows; expected a multiple of'
          ' batch_size.'
        )
      yield from tfdata.rebatch([batch], self.batch_size)


@dataclasses.dataclass(kw_only=True, eq=False)
class LingvoEvalAdaptor(LingvoInputAdaptor):
  """Divides one epoch of a generator's examples among the hosts.

  Every host reads all examples in the same order and keeps B, the `batch_size`,
  of each B * num_infeed_hosts. To get the same order, the generator sees one
  host, and its `file_random_seed` does not change. All hosts end after the same
  number of batches, of which the last is padded. `reset_for_eval` must be True.
  """

  _OWN_BATCH_SIZE: ClassVar[bool] = False

  def _check_fields(self) -> None:
    super()._check_fields()
    if not self.reset_for_eval:
      self.refuse('reset_for_eval', 'True, because this input reads one epoch')

  def _settle_seed(self, params: Any) -> None:
    """Keeps the seed, because all hosts read the same order."""

  def _infeed_host(self) -> tuple[int, int]:
    return 0, 1

  def _read(self) -> Iterator[base.Batch]:
    for batch in tfdata.rebatch(super()._read(), self.get_global_batch_size()):
      yield tfdata.host_rows(self, batch)


def _params_of(generator: Any) -> Any:
  return getattr(generator, 'params', getattr(generator, 'p', None))


def _getter(generator: Any) -> Callable[[], Any]:
  """Returns a function that makes the generator's next batch."""
  lingvo = sys.modules.get('lingvo.core.base_input_generator')
  if lingvo is None or not isinstance(generator, lingvo.BaseInputGenerator):
    return generator.GetPreprocessedInputBatch
  datasource = importlib.import_module('lingvo.core.datasource')
  if isinstance(
    getattr(generator, 'datasource', None), datasource.TFDatasetSource
  ):
    return generator.GetPreprocessedInputBatch
  # Executed eagerly, an input op of Lingvo would restart at each call.
  import tensorflow as tf

  return tf.function(generator.GetPreprocessedInputBatch)
