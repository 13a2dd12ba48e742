"""What inputs cost: tokens per second of each source, and the infeed per step.

    python -m benchmarks.inputs [--sizes 8x256 32x1024] [--rounds=11]

Each source stands beside what one would write without it, on the same tokens,
those of the source text of Python's standard library:

- memmap: rows at random places of a `numpy.memmap`, stacked, cast to int32 ids
  and labels; the least that a language model can be fed with. It makes no
  weights, knows no epochs and has no position to save;
- view: the same on `numpy.asarray` of the memmap, whose slices cost less;
- plain Grain: source, shuffle, repeat, batch, with the same `ReadOptions`;
- plain tf.data: shuffle, batch, prefetch;
- plain SeqIO: the same task through the same converter, batch, prefetch.

What it costs tf.data to begin an epoch is not in these numbers.

A row of tokens counts L, filler included. The sides of a group take turns, each
reading for a moment after as long a warm-up as fills what it reads ahead; a
ratio is taken round by round.

The infeed: microseconds a step on the training thread, above a loop without it
that has one batch for all steps. Steps either sleep, as if an accelerator were
at work, or compute on the same CPU as the infeed's thread.

Start-up: seconds to make the tokens of the corpus, and to open them again.

Parts that are not installed are left out, and named.
"""

import argparse
from collections.abc import Callable, Iterator
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import platform as platform_info
import statistics
import tempfile
import time
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from jaxline import mesh as mesh_lib
from jaxline import partitioning
from jaxline.inputs import base
from jaxline.inputs import grain as grain_input
from jaxline.inputs import infeed
from jaxline.inputs import multi
from jaxline.inputs import seqio as seqio_input
from jaxline.inputs import synthetic
from jaxline.inputs import text
from jaxline.inputs import tfdata

_PACKAGES = ('jax', 'numpy', 'grain', 'array_record', 'tensorflow', 'seqio')
# Records among which tf.data draws the next.
_SHUFFLE_BUFFER = 1024
_THREADS = 4
# What a step takes that sleeps; one on the CPU takes about as long on one core.
_STEP_SECS = 2e-3
_STEPS = 100
_INFEED_TARGET = 100


@dataclasses.dataclass(frozen=True)
class _Side:
  """Something that gives batches.

  Attributes:
    name: in the table.
    next: returns the next batch.
    targets: of baselines by name, the least ratio that is aimed at, or None.
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
  """The stream in rows, as a data source."""

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

  mixture = multi.MixtureInput(
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
    _Side('MixtureInput of two', **against(mixture, None)),
    *(
      _Side(
        f'SyntheticInput, {kind}',
        **against(synthetic.SyntheticInput(kind=kind, **made), None),
      )
      for kind in ('ones', 'random')
    ),
  ]


def _grain_sides(
  source: Any, rows: int, threads: int, files: Any = None
) -> list[_Side]:
  """Returns Grain and GrainInput on a source of rows, or files of them."""
  import grain

  plain = grain.MapDataset.source(source).shuffle(seed=0)
  if files:
    plain = plain.map(_decode)
  plain = (
    plain.repeat()
    .batch(rows)
    .to_iter_dataset(
      grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    )
  )
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
  return [
    _Side(baseline, iter(plain).__next__),
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


def _tfdata_sides(source: _Rows, rows: int) -> list[_Side]:
  tf = tfdata.import_tensorflow()
  records = [source[i] for i in range(len(source))]
  stacked = {k: np.stack([r[k] for r in records]) for k in records[0]}
  # Epochs without an end: to begin one takes as long as a side has to read.
  dataset = tf.data.Dataset.from_tensor_slices(stacked).repeat()
  plain = (
    dataset.shuffle(_SHUFFLE_BUFFER, seed=0)
    .batch(rows)
    .prefetch(tf.data.AUTOTUNE)
  )

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
    _Side('plain tf.data', plain.as_numpy_iterator().__next__),
    _Side('TfDataInput', **against([])),
    # Which begins in the middle of a batch.
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


def _groups(
  documents: text.Documents, folder: pathlib.Path, rows: int, length: int
) -> Iterator[list[_Side]]:
  """Yields the sides that are compared with one another."""
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


def _batches_per_second(side: _Side, seconds: float) -> float:
  end = time.perf_counter() + seconds / 4
  while time.perf_counter() < end:
    side.next()
  began = now = time.perf_counter()
  count = 0
  while now < began + seconds:
    side.next()
    count += 1
    now = time.perf_counter()
  return count / (now - began)


def _in_turn(
  measures: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, list[Any]]:
  """Returns what each measure gave in each round."""
  values: dict[str, list[Any]] = {name: [] for name in measures}
  for i in range(rounds):
    # Forth and back: no side always runs after the same other.
    for name in list(measures)[:: -1 if i % 2 else 1]:
      values[name].append(measures[name]())
  return values


def _spread(values: list[float], decimals: int = 2) -> str:
  """Returns the median and the quartiles."""
  low, median, high = statistics.quantiles(values, n=4, method='inclusive')
  return f'{median:.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]'


def _print_sources(
  groups: Iterator[list[_Side]], rows: int, length: int, args: Any
) -> None:
  print(
    f'\nSources, rows of {rows} x {length}\n{"":30}{"tokens/s":>10}'
    f'{"us/batch":>10}   {"of":32}{"ratio":20}target'
  )
  for sides in groups:
    speeds = _in_turn(
      {
        side.name: functools.partial(_batches_per_second, side, args.seconds)
        for side in sides
      },
      args.rounds,
    )
    for side in sides:
      speed = statistics.median(speeds[side.name])
      line = (
        f'{side.name:30}{speed * rows * length / 1e6:8.1f} M'
        f'{1e6 / speed:10.0f}   '
      )
      for baseline, target in (side.targets or {'': None}).items():
        if baseline:
          pairs = zip(speeds[side.name], speeds[baseline], strict=True)
          line += f'{baseline:32}{_spread([a / b for a, b in pairs]):20}'
          line += f'{target}' if target else ''
        print(line.rstrip())
        line = ' ' * 53


def _sleep_step() -> Callable[[Any], None]:
  """Returns a step that is dispatched and then keeps no core busy."""
  compute = jax.jit(lambda batch: batch['ids'][0, 0] + 1)

  def step(batch: Any) -> None:
    compute(batch)
    time.sleep(_STEP_SECS)

  return step


def _compute_step() -> Callable[[Any], None]:
  """Returns a step that computes on the CPU for about as long."""
  weights = jnp.ones([256, 256])

  @jax.jit
  def compute(batch: Any) -> Any:
    x = weights + batch['ids'].sum()
    for _ in range(4):
      x = jnp.tanh(x @ weights)
    return x.sum()

  return lambda batch: compute(batch).block_until_ready()


def _micros(function: Callable[[], Any]) -> float:
  """Returns the median time of a call."""
  times = []
  for _ in range(_STEPS):
    began = time.perf_counter()
    function()
    times.append(time.perf_counter() - began)
  return statistics.median(times) * 1e6


def _fed_micros(
  step: Callable[[Any], None], batches: infeed.Infeed
) -> dict[str, float]:
  """Returns medians of steps that take their batch from an infeed.

  Returns:
    Of a step, of getting its batch, and, for machines with other work, the time
    that this thread had a core to get it.
  """
  times: dict[str, list[float]] = {'step': [], 'next': [], 'core': []}
  for _ in range(_STEPS):
    began = time.perf_counter()
    had = time.thread_time()
    batch = next(batches)
    # What a step of `ShardedExperiment` asks besides.
    _ = batches.position, batches.wait_fraction
    times['core'].append(time.thread_time() - had)
    got = time.perf_counter()
    step(batch)
    times['step'].append(time.perf_counter() - began)
    times['next'].append(got - began)
  return {k: statistics.median(v) * 1e6 for k, v in times.items()}


def _print_infeed(
  documents: text.Documents, rows: int, length: int, rounds: int
) -> None:
  partitioner = partitioning.Partitioner(
    mesh_lib.make_mesh(devices=jax.devices()[:1]), partitioning.Rules()
  )

  def read() -> text.TextInput:
    return text.TextInput(
      documents=documents, batch_size=rows, length=length, is_training=True
    )

  source = read()
  batch = next(source)
  placed = partitioner.put_batch(batch)
  behind = _in_turn(
    {
      name: functools.partial(_micros, function)
      for name, function in {
        'next(TextInput)': source.__next__,
        'get_state()': source.get_state,
        'put_batch': lambda: jax.block_until_ready(
          partitioner.put_batch(batch)
        ),
      }.items()
    },
    rounds,
  )
  print(f'\nInfeed, rows of {rows} x {length}: us a batch, on its own thread')
  for name, values in behind.items():
    print(f'{name:30}{_spread(values, 1)}')
  print(
    f'\n{"us a step":22}{"bare":>7}{"fed":>7}   {"over":24}{"next()":22}'
    f'{"of it at work":22}target'
  )
  steps = {
    'step sleeps': _sleep_step(),
    'step on the same CPU': _compute_step(),
  }
  for name, step in steps.items():
    batches = infeed.Infeed(read(), partitioner.put_batch)
    _fed_micros(step, batches)
    values = _in_turn(
      {
        'bare': lambda step=step: _micros(lambda: step(placed)),
        'fed': functools.partial(_fed_micros, step, batches),
      },
      rounds,
    )
    batches.close()
    bare = values['bare']
    fed = {k: [x[k] for x in values['fed']] for k in values['fed'][0]}
    over = [b - a for a, b in zip(bare, fed['step'], strict=True)]
    print(
      f'{name:22}{statistics.median(bare):7.0f}'
      f'{statistics.median(fed["step"]):7.0f}   {_spread(over, 1):24}'
      f'{_spread(fed["next"], 1):22}{_spread(fed["core"], 1):22}'
      f'under {_INFEED_TARGET}'
    )


def _start_up(folder: pathlib.Path, rounds: int) -> text.Corpus:
  """Prints what it takes to open the corpus, and returns it."""
  times: dict[str, list[float]] = {'make tokens': [], 'open them again': []}
  for i in range(rounds):
    for name in times:
      began = time.perf_counter()
      corpus = text.load_corpus('stdlib', cache_dir=folder / str(i))
      times[name].append(time.perf_counter() - began)
  size = corpus.train.num_bytes + corpus.eval.num_bytes
  files = corpus.train.num_files + corpus.eval.num_files
  print(f'\nStart-up, {size / 1e6:.1f} MB in {files} files: seconds')
  for name, values in times.items():
    print(f'{name:30}{_spread(values, 3)}')
  return corpus


def _size(argument: str) -> tuple[int, int]:
  rows, _, length = argument.partition('x')
  return int(rows), int(length)


def main() -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--sizes',
    nargs='+',
    type=_size,
    default=[(8, 256), (32, 1024)],
    metavar='ROWSxTOKENS',
    help='of batches',
  )
  parser.add_argument('--rounds', type=int, default=11)
  parser.add_argument(
    '--seconds', type=float, default=0.1, help='a side reads in a round'
  )
  args = parser.parse_args()
  if args.rounds < 2:
    parser.error(f'--rounds is {args.rounds}; expected at least 2.')
  logging.set_verbosity(logging.ERROR)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  jax.config.update('jax_platforms', 'cpu')
  versions = [
    f'{name} {importlib.metadata.version(name)}'
    for name in _PACKAGES
    if _is_installed(name)
  ]
  missing = [name for name in _PACKAGES if not _is_installed(name)]
  print(
    f'Python {platform_info.python_version()}, {", ".join(versions)};'
    f' {os.cpu_count()} cores, one CPU device. Medians and quartiles of'
    f' {args.rounds} rounds of {args.seconds} s.'
  )
  if missing:
    print(f'Not installed, and left out: {", ".join(missing)}.')
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    documents = _start_up(folder, 3).train
    for rows, length in args.sizes:
      groups = _groups(documents, folder, rows, length)
      _print_sources(groups, rows, length, args)
    for rows, length in args.sizes:
      _print_infeed(documents, rows, length, args.rounds)


if __name__ == '__main__':
  main()
