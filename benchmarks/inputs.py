"""Cost of inputs: tokens per second of each source, and the infeed per step.

    python -m benchmarks.inputs

Each source is compared with the code that you would write without it. Both read
the same tokens, from the source text of Python's standard library:

- memmap: rows at random places of a `numpy.memmap`, stacked, cast to int32 ids
  and labels. A language model needs at least this. It makes no weights, and has
  no epochs and no position to save;
- view: the same on `numpy.asarray` of the memmap, whose slices cost less;
- plain Grain: source, shuffle, repeat, batch, with the same `ReadOptions`;
- plain tf.data: shuffle, batch, prefetch;
- plain SeqIO: the same task through the same converter, batch, prefetch.

The time that tf.data needs to begin an epoch is not included.

Small records are 60,000 images, uint8 [28, 28], and their labels, in two arrays
in memory, read in batches of 128. Users report that tf.data reads such data 5
to 10 times as fast as Grain (google/grain#1164, #569, #722). GrainInput reads a
source without and with `__getitems__`; a subclass of IndexedInput indexes the
arrays.

A row of tokens counts as L tokens, padding included. The sides of a group take
turns. Each side reads for a moment, after a warm-up that fills its read-ahead
buffers. Ratios are computed in each round.

The infeed's cost is the microseconds per step on the training thread above a
loop without the infeed, which uses one batch for all steps. Steps either sleep,
as if an accelerator were at work, or compute on the CPU that the infeed's
thread uses. CPU is the CPU time of the training thread.

Start-up is the seconds to make the tokens of the corpus, and to open them
again.

Sources that are not installed are left out.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from examples.pax.inputs import seqio as seqio_input
from examples.pax.inputs import synthetic
from examples.pax.inputs import tfdata
from jaxline.inputs import base
from jaxline.inputs import grain as grain_input
from jaxline.inputs import indexed
from jaxline.inputs import infeed
from jaxline.inputs import mixture
from jaxline.inputs import text
from jaxline.parallel import mesh as mesh_lib
from jaxline.parallel import partitioning
from jaxline.parallel import placement

# Batch size and length, in tokens.
_SIZES = ((8, 256), (32, 1024))
# The number of small records, in all and in a batch.
_NUM_IMAGES = 60_000
_IMAGES_PER_BATCH = 128
# tf.data draws the next record from this many.
_SHUFFLE_BUFFER = 1024
_THREADS = 4
# The time of a step that sleeps. A step on the CPU takes about as long on one
# core.
_STEP_SECS = 2e-3
_STEPS = 100
_INFEED_TARGET = 20


@dataclasses.dataclass(frozen=True)
class _Side:
  """A source of batches.

  Attributes:
    name: Name in the table.
    next: Function that returns the next batch.
    targets: Name of a baseline -> the aim for the ratio to it, or None.
  """

  name: str
  next: Callable[[], Any]
  targets: dict[str, float | None] = dataclasses.field(default_factory=dict)


def _memmap_batches(
  tokens: np.ndarray, rows: int, length: int
) -> Iterator[dict[str, np.ndarray]]:
  rng = np.random.default_rng(0)
  while True:
    starts = rng.integers(len(tokens) - length, size=rows)
    window = np.stack([tokens[i : i + length + 1] for i in starts])
    yield {
      'ids': window[:, :-1].astype(np.int32),
      'labels': window[:, 1:].astype(np.int32),
    }


class _Rows:
  """A data source: the rows of a stream of tokens."""

  def __init__(self, tokens: np.ndarray, length: int):
    self._tokens = tokens
    self._length = length

  def __len__(self) -> int:
    return (len(self._tokens) - 1) // self._length

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    start = index * self._length
    window = self._tokens[start : start + self._length + 1].astype(np.int32)
    return {'ids': window[:-1], 'labels': window[1:]}


def _decode(record: bytes) -> dict[str, np.ndarray]:
  window = np.frombuffer(record, np.int32)
  return {'ids': window[:-1], 'labels': window[1:]}


class _Images:
  """A data source: images with labels."""

  def __init__(self) -> None:
    rng = np.random.default_rng(0)
    self._images = rng.integers(256, size=(_NUM_IMAGES, 28, 28), dtype=np.uint8)
    self._labels = rng.integers(10, size=_NUM_IMAGES)

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: Any) -> tuple[np.ndarray, np.ndarray]:
    return self._images[index], self._labels[index]


class _ImagesByBatch(_Images):
  """A data source of images that reads several records in one call."""

  def __getitems__(self, indices: list[int]) -> list[Any]:
    return list(zip(*self[indices], strict=True))


@dataclasses.dataclass(kw_only=True, eq=False)
class _ImagesInput(indexed.IndexedInput):
  """Reads the images by a subclass, as a fork would."""

  images: _Images

  def num_records(self) -> int:
    return len(self.images)

  def read(self, records: np.ndarray, epochs: np.ndarray) -> dict[str, Any]:
    del epochs
    return _name_entries(self.images[records])


def _name_entries(record: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
  image, label = record
  return {'image': image, 'label': label}


def _is_installed(name: str) -> bool:
  return importlib.util.find_spec(name) is not None


def _text_sides(
  documents: text.Documents, path: pathlib.Path, rows: int, length: int
) -> list[_Side]:
  tokens = np.memmap(path, documents.tokens.dtype, 'r')

  def read(packing: str, seed: int = 0) -> text.TextInput:
    return text.TextInput(
      documents=documents,
      batch_size=rows,
      length=length,
      packing=packing,
      input_random_seed=seed,
      is_training=True,
    )

  def against(source: base.BaseInput, target: float | None) -> dict[str, Any]:
    return {
      'next': source.get_next_padded,
      'targets': {'memmap': target, 'view': None},
    }

  of_two = mixture.MixtureInput(
    inputs={'one': read('stream', 1), 'two': read('stream', 2)},
    weights={'one': 2, 'two': 1},
    batch_size=rows,
    is_training=True,
  )
  made = {'batch_size': rows, 'length': length, 'is_training': True}
  return [
    _Side('memmap', _memmap_batches(tokens, rows, length).__next__),
    _Side('view', _memmap_batches(np.asarray(tokens), rows, length).__next__),
    *(
      _Side(f'TextInput, {packing}', **against(read(packing), target))
      for packing, target in (
        ('stream', 0.9),
        ('packed', None),
        ('padded', None),
      )
    ),
    _Side('MixtureInput of two', **against(of_two, None)),
    *(
      _Side(
        f'SyntheticInput, {kind}',
        **against(synthetic.SyntheticInput(kind=kind, **made), None),
      )
      for kind in ('ones', 'random')
    ),
  ]


def _plain_grain(
  source: Any,
  rows: int,
  threads: int = 0,
  function: Callable[..., Any] | None = None,
) -> Callable[[], Any]:
  import grain

  dataset = grain.MapDataset.source(source).shuffle(seed=0)
  if function:
    dataset = dataset.map(function)
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
  return iter(dataset.repeat().batch(rows).to_iter_dataset(options)).__next__


def _grain_sides(
  source: Any, rows: int, threads: int, files: Any = None
) -> list[_Side]:
  """Returns Grain and GrainInput on a source of rows, or on files of rows."""
  import grain

  ours = grain_input.GrainInput(
    **(
      {'files': files, 'transformations': [_decode]}
      if files
      else {'dataset': grain.MapDataset.source(source)}
    ),
    num_threads=threads,
    batch_size=rows,
    is_training=True,
  )
  what = ', files' if files else ''
  if threads:
    what += f', {threads} threads'
  baseline = f'plain Grain{what}'
  function = _decode if files else None
  return [
    _Side(baseline, _plain_grain(source, rows, threads, function)),
    _Side(f'GrainInput{what}', ours.get_next_padded, {baseline: 0.95}),
  ]


def _write_array_record(source: _Rows, path: pathlib.Path) -> None:
  from array_record.python import array_record_module

  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for i in range(len(source)):
    record = source[i]
    window = np.append(record['ids'], record['labels'][-1:])
    writer.write(window.tobytes())
  writer.close()


def _plain_tfdata(arrays: dict[str, Any], rows: int) -> tuple[Any, _Side]:
  """Returns a dataset of the rows of arrays, and a side that reads it."""
  tf = tfdata.import_tensorflow()
  # Repeat without end: beginning an epoch takes as long as a turn.
  dataset = tf.data.Dataset.from_tensor_slices(arrays).repeat()
  plain = (
    dataset.shuffle(_SHUFFLE_BUFFER, seed=0)
    .batch(rows)
    .prefetch(tf.data.AUTOTUNE)
  )
  return dataset, _Side('plain tf.data', plain.as_numpy_iterator().__next__)


def _tfdata_sides(source: _Rows, rows: int) -> list[_Side]:
  records = [source[i] for i in range(len(source))]
  stacked = {k: np.stack([r[k] for r in records]) for k in records[0]}
  dataset, plain = _plain_tfdata(stacked, rows)

  def against(first_epochs: list[Any]) -> dict[str, Any]:
    epochs = iter(first_epochs)
    source = tfdata.TfDataInput(
      dataset=lambda seed: next(epochs, dataset),
      shuffle_buffer_size=_SHUFFLE_BUFFER,
      batch_size=rows,
      is_training=True,
    )
    return {'next': source.get_next_padded, 'targets': {'plain tf.data': None}}

  return [
    plain,
    _Side('TfDataInput', **against([])),
    # The second epoch begins in the middle of a batch.
    _Side('TfDataInput, later epochs', **against([dataset.take(1)])),
  ]


def _seqio_sides(source: _Rows, rows: int, length: int) -> list[_Side]:
  tf = tfdata.import_tensorflow()
  seqio = seqio_input.import_seqio()
  labels = np.stack([source[i]['labels'] for i in range(len(source))])
  examples = tf.data.Dataset.from_tensor_slices({'targets': labels}).repeat()
  vocabulary = seqio.PassThroughVocabulary(text.VOCABULARY_SIZE)
  task = seqio.Task(
    f'rows_of_{length}',
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: examples, ['train']
    ),
    preprocessors=[],
    output_features={'targets': seqio.Feature(vocabulary, add_eos=False)},
  )
  lengths = {'targets': length}
  convert = seqio_input.LanguageModelFeatures(pack=False)
  plain = (
    convert(
      task.get_dataset(lengths, 'train', shuffle=True, seed=0, num_epochs=1),
      lengths,
    )
    .batch(rows)
    .prefetch(tf.data.AUTOTUNE)
  )
  ours = seqio_input.SeqIOInput(
    mixture_or_task=task,
    split_name='train',
    task_feature_lengths=lengths,
    feature_converter=convert,
    batch_size=rows,
    is_training=True,
  )
  return [
    _Side('plain SeqIO', plain.as_numpy_iterator().__next__),
    _Side('SeqIOInput', ours.get_next_padded, {'plain SeqIO': None}),
  ]


def _image_sides() -> list[_Side]:
  images, rows = _Images(), _IMAGES_PER_BATCH
  made = {'batch_size': rows, 'is_training': True}
  named = {'transformations': [_name_entries], **made}
  ours = {
    'GrainInput': grain_input.GrainInput(dataset=images, **named),
    'GrainInput, __getitems__': grain_input.GrainInput(
      dataset=_ImagesByBatch(), **named
    ),
    'IndexedInput': _ImagesInput(images=images, **made),
  }
  sides = []
  if _is_installed('tensorflow'):
    sides.append(_plain_tfdata(_name_entries(images[:]), rows)[1])
  targets = {side.name: 1 for side in sides}
  plain = _plain_grain(images, rows, function=_name_entries)
  sides.append(_Side('plain Grain', plain, dict.fromkeys(targets)))
  targets['plain Grain'] = 0.95
  for name, source in ours.items():
    sides.append(_Side(name, source.get_next_padded, targets))
  return sides


def _groups(
  documents: text.Documents, folder: pathlib.Path, rows: int, length: int
) -> Iterator[list[_Side]]:
  """Yields groups of sides that are compared with each other."""
  path = folder / 'tokens'
  documents.tokens.tofile(path)
  yield _text_sides(documents, path, rows, length)
  source = _Rows(np.asarray(np.memmap(path, documents.tokens.dtype)), length)
  yield _grain_sides(source, rows, 0)
  yield _grain_sides(source, rows, _THREADS)
  if _is_installed('array_record'):
    import grain

    files = folder / f'{length}.array_record'
    _write_array_record(source, files)
    opened = grain.sources.ArrayRecordDataSource(str(files))
    yield _grain_sides(opened, rows, 0, files)
    yield _grain_sides(opened, rows, _THREADS, files)
  if _is_installed('tensorflow'):
    yield _tfdata_sides(source, rows)
  if _is_installed('tensorflow') and _is_installed('seqio'):
    yield _seqio_sides(source, rows, length)


def _per_second(side: _Side, seconds: float, amount: float) -> harness.Sample:
  """Returns how much a side reads per second, if a batch has `amount`."""
  end = time.perf_counter() + seconds / 4
  while time.perf_counter() < end:
    side.next()
  began = harness.now()
  count = 0
  while not count or time.perf_counter() < began.wall + seconds:
    side.next()
    count += 1
  return harness.since(began, harness.now(), count * amount)


def _source_rows(
  sides: list[_Side],
  what: str,
  amount: float,
  unit: str,
  options: harness.Options,
) -> Iterator[harness.Row]:
  """Compares the sides of a group with their baselines.

  Args:
    sides: The group.
    what: Description of the data for the table.
    amount: Size of a batch, in `unit`.
    unit: The unit of `amount`, such as 'records'.
    options: How to run.
  """
  seconds = options.pick(0.1, 0.01)
  speeds = harness.turns(
    {
      side.name: functools.partial(_per_second, side, seconds, amount)
      for side in sides
    },
    options.num_rounds(9),
  )
  for side in sides:
    for baseline, target in side.targets.items():
      yield harness.row(
        f'{side.name}, {what}',
        speeds[side.name],
        baseline,
        speeds[baseline],
        unit=f'{unit}/s',
        aim=f'>= {target}' if target else None,
      )


def _sleep_step() -> Callable[[Any], None]:
  """Returns a step that is dispatched and then keeps no core busy."""
  compute = jax.jit(lambda batch: batch['ids'][0, 0] + 1)

  def step(batch: Any) -> None:
    compute(batch)
    time.sleep(_STEP_SECS)

  return step


def _compute_step() -> Callable[[Any], None]:
  """Returns a step that computes on the CPU for about the same time."""
  weights = jnp.ones([256, 256])

  @jax.jit
  def compute(batch: Any) -> Any:
    x = weights + batch['ids'].sum()
    for _ in range(4):
      x = jnp.tanh(x @ weights)
    return x.sum()

  return lambda batch: compute(batch).block_until_ready()


def _micros(
  step: Callable[[Any], None], next_batch: Callable[[], Any], steps: int
) -> dict[str, harness.Sample]:
  """Times steps and the calls that get their batches, in microseconds.

  Args:
    step: Function that computes a step with its batch.
    next_batch: Function that returns the next batch.
    steps: Number of steps.

  Returns:
    'step' and 'next': the medians, by wall time and by this thread's CPU time.
  """
  times: dict[str, list[harness.Sample]] = {'step': [], 'next': []}
  for _ in range(steps):
    began = time.perf_counter(), time.thread_time()
    batch = next_batch()
    got = time.perf_counter(), time.thread_time()
    step(batch)
    done = time.perf_counter(), time.thread_time()
    for name, end in (('next', got), ('step', done)):
      pair = zip(began, end, strict=True)
      times[name].append(harness.Sample(*((b - a) * 1e6 for a, b in pair)))
  return {
    name: harness.Sample(
      *(statistics.median(x) for x in zip(*samples, strict=True))
    )
    for name, samples in times.items()
  }


def _infeed_rows(
  documents: text.Documents, rows: int, length: int, options: harness.Options
) -> Iterator[harness.Row]:
  """Compares steps with the infeed with steps without it."""
  with mesh_lib.on_devices(jax.devices()[:1]):
    partitioner = partitioning.Partitioner.make(None, 'ddp')

  def read() -> text.TextInput:
    return text.TextInput(
      documents=documents, batch_size=rows, length=length, is_training=True
    )

  placed = placement.put_batch(next(read()), partitioner)
  steps = {
    'step sleeps': (_sleep_step(), f'<= {_INFEED_TARGET}'),
    'step on the same CPU': (_compute_step(), None),
  }
  count = options.pick(_STEPS, 5)
  for name, (step, aim) in steps.items():
    batches = infeed.Infeed(
      read(), functools.partial(placement.put_batch, partitioner=partitioner)
    )

    def take(batches: infeed.Infeed = batches) -> Any:
      batch = next(batches)
      # A step of `ShardedExperiment` reads these, too.
      _ = batches.mark, batches.wait_fraction
      return batch

    _micros(step, take, count)
    values = harness.turns(
      {
        'bare': functools.partial(_micros, step, lambda: placed, count),
        'fed': functools.partial(_micros, step, take, count),
      },
      options.num_rounds(9),
    )
    batches.close()
    what = f'{rows} x {length}, {name}'
    fed = values['fed']
    yield harness.row(
      f'infeed, {what}',
      harness.fields(fed, 'step'),
      'one batch for all steps',
      harness.fields(values['bare'], 'step'),
      unit='us/step',
      measure='difference',
      aim=aim,
    )
    yield harness.row(
      f'`next` of the infeed, {what}',
      harness.fields(fed, 'next'),
      unit='us/step',
      aim=aim,
    )


def _start_rows(
  folder: pathlib.Path, options: harness.Options
) -> tuple[text.Corpus, harness.Row]:
  """Returns the corpus, and a row that compares opening with making it."""
  first, again = [], []
  for i in range(options.pick(3, 2)):
    path = folder / str(i)
    load = functools.partial(text.load_corpus, 'stdlib', cache_dir=path)
    first.append(harness.timed(load))
    again.append(harness.timed(load))
  row = harness.row(
    'tokens opened again', again, 'tokens made', first, unit='s', aim='<= 1'
  )
  return load(), row


def rows(options: harness.Options) -> list[harness.Row]:
  """Measures sources, the infeed and start-up."""
  logging.set_verbosity(logging.ERROR)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  jax.config.update('jax_platforms', 'cpu')
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    corpus, started = _start_rows(folder, options)
    documents = corpus.train
    found = []
    sizes = options.pick(_SIZES, _SIZES[:1])
    for size in sizes:
      what, amount = f'{size[0]} x {size[1]}', math.prod(size) / 1e6
      for sides in _groups(documents, folder, *size):
        found += _source_rows(sides, what, amount, 'M tokens', options)
    found += _source_rows(
      _image_sides(), 'small records', _IMAGES_PER_BATCH, 'records', options
    )
    for size in sizes:
      found += _infeed_rows(documents, *size, options)
  return [*found, started]


if __name__ == '__main__':
  harness.main(rows, __doc__)
