"""Tests of Lingvo's adaptors, on fake generators and on Lingvo's.

`pip install --no-deps lingvo` next to TensorFlow is enough for the latter.
Lingvo's input ops need a newer C library than some machines have. Here, they
are replaced, because these tests do not need them.
"""

import copy
import dataclasses
import sys
import types
import warnings

import numpy as np
import pytest

from examples.pax.inputs import lingvo
from jaxline.inputs import base


class Tensor:
  """Stands for an eager tensor."""

  def __init__(self, value):
    self.value = np.asarray(value)

  def numpy(self):
    return self.value


class OutOfRangeError(Exception):
  """The error that TensorFlow raises at the end of the data."""


OutOfRangeError.__module__ = 'tensorflow.python.framework.errors_impl'


class NestedMap(dict):
  """Stands for Lingvo's NestedMap, a dict with extra methods."""

  def FlattenItems(self):
    raise AssertionError('Lists are not flattened.')


@dataclasses.dataclass
class Params:
  """Params of a `Generator` of examples 0, 1, ...; the last batch is short."""

  batch_size: int | None = 4
  file_random_seed: int = 0
  num_examples: int = 10
  repeat: bool = False
  extra: dict = dataclasses.field(default_factory=dict)
  wrap: type = Tensor
  cls: type = None
  made: list = dataclasses.field(default_factory=list)

  def Instantiate(self):
    self.made.append(self)
    return (self.cls or Generator)(self)

  def __deepcopy__(self, memo):
    return dataclasses.replace(self)  # Tests look at the shared `made`.


class Generator:
  """Follows the interface of Lingvo's generators."""

  def __init__(self, params):
    self.params = params
    self.place = 0
    self.resets = 0

  def GetPreprocessedInputBatch(self):
    p = self.params
    if self.place >= p.num_examples:
      raise OutOfRangeError
    rows = p.batch_size or 4
    x = np.arange(self.place, self.place + rows)
    self.place += rows
    if p.repeat:
      x, self.place = x % p.num_examples, self.place % p.num_examples
    x = x[x < p.num_examples]
    wrap = p.wrap
    return NestedMap(
      x=wrap(x),
      seed=wrap(np.full(len(x), p.file_random_seed)),
      tgt=NestedMap(ids=wrap(np.stack([x, x], 1).astype(np.int32))),
      **{key: wrap(make(x)) for key, make in p.extra.items()},
    )

  def Reset(self):
    self.place = 0
    self.resets += 1

  def IdsToStrings(self, ids, lengths, key=None):
    assert ids.dtype == lengths.dtype == np.int32
    pairs = zip(ids, lengths, strict=True)
    return Tensor([f'{key or ""}{i[:n]}'.encode() for i, n in pairs])


class Stated(Generator):
  """A generator that returns its batch size as a tensor."""

  def InfeedBatchSize(self):
    return np.int32(8)


class Bare:
  """A generator with no optional methods."""

  count = 0

  def GetPreprocessedInputBatch(self):
    self.count += 1
    return {'x': np.full((3, 2), self.count)}


def adaptor(kind=lingvo.LingvoInputAdaptor, fields=None, **params):
  return kind(input=Params(**params), **(fields or {}))


def host(index, count):
  return {'num_infeed_hosts': count, 'infeed_host_index': index}


# The generator's batches.


def test_batches_are_those_of_the_generator():
  source = adaptor()
  first, _, last = list(source)
  assert first.x.tolist() == [0, 1, 2, 3]
  assert first.tgt.ids.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
  assert first.tgt.ids.dtype == np.int32
  assert isinstance(first.tgt, base.Batch)
  # The last batch has two examples and two padding rows.
  assert last.x.tolist() == [8, 9, 0, 0]
  for batch, weights in (first, [1, 1, 1, 1]), (last, [1, 1, 0, 0]):
    for key in lingvo.SAMPLE_WEIGHTS, base.WEIGHTS:
      assert batch[key].tolist() == weights
      assert batch[key].dtype == np.float32
  # The generator's weights are kept.
  extra = {
    'weights': lambda x: np.stack([x, 2 * x], 1).astype(np.float32),
    'eval_sample_weights': lambda x: np.full(len(x), 0.5, np.float32),
  }
  last = list(adaptor(extra=extra))[-1]
  assert last.weights.tolist() == [[8, 16], [9, 18], [0, 0], [0, 0]]
  assert last.eval_sample_weights.tolist() == [0.5, 0.5, 0, 0]


def test_lists_of_tensors_stay_lists():
  generator = Generator(Params(batch_size=2))
  batch = {'x': [Tensor([1, 2]), (Tensor([3, 4]), Tensor(['a', 'b']))]}
  generator.GetPreprocessedInputBatch = lambda: batch
  source = lingvo.LingvoInputAdaptor(input=generator, is_training=True)
  x = next(source).x
  assert [x[0].tolist(), [a.tolist() for a in x[1]]] == [[1, 2], [[3, 4]]]


def test_batch_size_is_the_generators_own():
  assert adaptor(batch_size=3).batch_size == 3
  assert adaptor(cls=Stated).batch_size == 8
  # If unknown, it comes from the first batch. The last one is padded to it.
  source = adaptor(batch_size=None)
  assert [batch.x.shape for batch in source] == [(4,)] * 3
  assert source.batch_size == 4
  with pytest.raises(ValueError, match='batch_size'):
    adaptor(fields={'batch_size': 2})


def test_num_batches_end_the_input():
  source = adaptor(
    fields={'num_batches': 2, 'reset_for_eval': True}, repeat=True
  )
  for _ in range(3):
    batches = list(source.eval_batches())
    assert [b.x[0] for b in batches] == [0, 4]


def test_reset_makes_the_generator_anew_or_resets_it():
  params = Params()
  source = lingvo.LingvoInputAdaptor(input=params, reset_for_eval=True)
  for _ in range(2):
    assert [b.x[0] for b in source.eval_batches()] == [0, 4, 8]
  # The first evaluation uses the initial generator.
  assert len(params.made) == 2
  assert params.made[0] is not params
  generator = Generator(Params())
  source = lingvo.LingvoInputAdaptor(input=generator, reset_for_eval=True)
  for _ in range(3):
    assert [b.x[0] for b in source.eval_batches()] == [0, 4, 8]
  assert generator.resets == 2
  source = lingvo.LingvoInputAdaptor(input=Bare())
  next(source)
  with pytest.raises(NotImplementedError, match=r'Reset\(\)'):
    source.reset()


def test_fixed_seeds_are_refused_or_differ_between_hosts():
  params = Params(file_random_seed=301)
  for given in params, Generator(params):
    with pytest.raises(ValueError, match='file_random_seed=301'):
      lingvo.LingvoInputAdaptor(input=given)
  allowed = {'allow_fixed_file_random_seed': True}
  for index in range(3):
    source = lingvo.LingvoInputAdaptor(
      input=params, **host(index, 3), **allowed
    )
    for _ in range(2):
      assert set(next(source).seed) == {301 + index}
      source.reset()
  assert params.file_random_seed == 301
  made = Generator(copy.deepcopy(params))
  lingvo.LingvoInputAdaptor(input=made, **host(0, 3), **allowed)
  with pytest.raises(ValueError, match='is host 2'):
    lingvo.LingvoInputAdaptor(input=made, **host(2, 3), **allowed)
  # 0 means a different order at each start and on each host.
  assert set(next(adaptor(fields=host(2, 3) | allowed)).seed) == {0}


@pytest.mark.parametrize(
  ('fields', 'kept'),
  [({}, True), ({'is_training': True}, False), (host(0, 2), False)],
)
@pytest.mark.parametrize('make', [str, lambda i: str(i).encode()])
def test_strings_are_dropped_where_devices_cannot_hold_them(fields, kept, make):
  extra = {
    'text': lambda x: np.array([make(i) for i in x], object),
    'fixed': lambda x: np.array([make(i) for i in x]),
  }
  batch = next(adaptor(fields=fields, extra=extra))
  numbers = {'x', 'seed', 'tgt', 'weights', 'eval_sample_weights'}
  assert set(batch) == numbers | ({'text', 'fixed'} if kept else set())
  if kept:
    assert batch.text.tolist() == [make(i) for i in range(4)]


def test_what_is_no_array_is_refused():
  source = adaptor(extra={'sparse': lambda x: object()}, wrap=lambda x: x)
  with pytest.raises(TypeError, match='sparse'):
    next(source)
  generator = Generator(Params())
  generator.GetPreprocessedInputBatch = lambda: [Tensor([1])]
  with pytest.raises(TypeError, match='list'):
    next(lingvo.LingvoInputAdaptor(input=generator))


def test_tensorflows_tensors():
  tf = pytest.importorskip('tensorflow')
  extra = {
    'half': lambda x: tf.cast(x, tf.bfloat16),
    'text': lambda x: tf.strings.as_string(x),
  }
  batch = next(adaptor(extra=extra, wrap=tf.convert_to_tensor))
  assert batch.x.tolist() == [0, 1, 2, 3]
  assert batch.half.dtype.name == 'bfloat16'
  assert batch.text.tolist() == [b'0', b'1', b'2', b'3']


def test_custom_processing_of_batches():
  # This class is from Pax's document.
  class MyInput(lingvo.LingvoInputAdaptor):
    def get_next(self):
      batch = super().get_next()
      batch.new_field = batch.x + 1
      return batch

  source = MyInput(input=Params())
  assert next(source).new_field.tolist() == [1, 2, 3, 4]


def test_a_training_cannot_be_made_to_repeat_or_to_evaluate():
  assert not adaptor().saves_position
  for fields in {'input_random_seed': 1}, {'cluster_do_eval': True}:
    with pytest.raises(ValueError, match=next(iter(fields))):
      adaptor(fields={'is_training': True, **fields})


def test_ids_to_strings_are_the_generators():
  ids, lengths = np.array([[1, 2], [3, 4]]), np.array([2, 1])
  assert adaptor().ids_to_strings(ids, lengths, 'k') == ['k[1 2]', 'k[3]']
  with pytest.raises(NotImplementedError):
    lingvo.LingvoInputAdaptor(input=Bare()).ids_to_strings(ids, lengths)


@pytest.mark.parametrize(
  ('kind', 'fields'),
  [
    (lingvo.LingvoInputAdaptor, {}),
    (lingvo.LingvoInputAdaptorNewBatchSize, {'batch_size': 2}),
    (lingvo.LingvoEvalAdaptor, {'batch_size': 4, 'reset_for_eval': True}),
  ],
)
def test_an_error_is_never_mistaken_for_the_end(kind, fields):
  def fail(x):
    raise OSError('the disk is gone')

  source = adaptor(kind, fields, extra={'y': fail}, num_examples=12)
  for _ in range(3):
    with pytest.raises(OSError, match='the disk is gone'):
      next(source)


# Smaller batches.


# 4 is not a multiple of 3, and the last batch of an epoch has only 3 rows.
@pytest.mark.parametrize(('rows', 'examples'), [(3, 12), (2, 11)])
def test_new_batch_size_must_divide(rows, examples):
  source = adaptor(
    lingvo.LingvoInputAdaptorNewBatchSize,
    {'batch_size': rows},
    num_examples=examples,
  )
  with pytest.raises(ValueError, match=f'batch_size={rows}'):
    list(source)


# One epoch, divided among hosts.


def evaluate(hosts, rows, **params):
  """Returns each host's batches."""
  sources = [
    adaptor(
      lingvo.LingvoEvalAdaptor,
      {'batch_size': rows, 'reset_for_eval': True, **host(index, hosts)},
      **params,
    )
    for index in range(hosts)
  ]
  return [list(source.eval_batches()) for source in sources]


@pytest.mark.parametrize('hosts', [1, 2, 4])
@pytest.mark.parametrize('rows', [1, 3])
@pytest.mark.parametrize('inner', [1, 5, 40])
def test_eval_deals_one_epoch_out_in_order(hosts, rows, inner):
  of_host = evaluate(hosts, rows, batch_size=inner, num_examples=19)
  count = -(-19 // (hosts * rows))
  assert [len(batches) for batches in of_host] == [count] * hosts
  # [host, batch, row] in the order of the examples.
  x, weights, samples = (
    np.swapaxes([[b[k] for b in batches] for batches in of_host], 0, 1).ravel()
    for k in ('x', 'weights', lingvo.SAMPLE_WEIGHTS)
  )
  filling = count * hosts * rows - 19
  assert x.tolist() == [*range(19), *[0] * filling]
  assert weights.tolist() == samples.tolist() == [1] * 19 + [0] * filling


def test_eval_padding_is_zero_at_any_depth():
  class Nested(Generator):
    def GetPreprocessedInputBatch(self):
      batch = super().GetPreprocessedInputBatch()
      batch['tgt']['weights'] = Tensor(np.ones_like(batch['tgt']['ids'].value))
      return batch

  extra = {'name': lambda x: np.array([f'n{i}' for i in x])}
  ((batch,),) = evaluate(1, 4, num_examples=3, cls=Nested, extra=extra)
  assert batch.tgt.weights.tolist() == [[1, 1]] * 3 + [[0, 0]]
  assert batch.name.tolist() == ['n0', 'n1', 'n2', '']


def test_eval_leaves_the_seed_to_the_generator():
  for batches in evaluate(2, 5, file_random_seed=301):
    assert {int(s) for b in batches for s in b.seed} == {301}


@pytest.mark.parametrize(
  'fields', [{'batch_size': 2}, {'reset_for_eval': True}]
)
def test_eval_needs_an_epoch_and_a_batch_size(fields):
  missing = {'batch_size', 'reset_for_eval'} - set(fields)
  with pytest.raises(ValueError, match=missing.pop()):
    adaptor(lingvo.LingvoEvalAdaptor, fields)


# Lingvo's generators.


@pytest.fixture(scope='module')
def real():
  """Returns Lingvo's module of generators."""
  pytest.importorskip('tensorflow')
  name = 'lingvo.core.ops.gen_x_ops'

  class Ops(types.ModuleType):
    def __getattr__(self, key):
      if key.startswith('__'):
        raise AttributeError(key)
      return None

  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    try:
      try:
        from lingvo.core import ops
      except ModuleNotFoundError:
        raise
      except Exception:  # TensorFlow's error: the library does not load.
        sys.modules[name] = Ops(name)
      else:
        del ops
      from lingvo.core import base_input_generator
    except ImportError as e:
      pytest.skip(f'Lingvo does not import: {e}')
  return base_input_generator


@pytest.fixture
def counting(real):
  """Returns params of a generator of Lingvo's with a tf.data pipeline."""
  import tensorflow as tf

  def pipeline(end=10):
    dataset = tf.data.Dataset.range(end).map(
      lambda x: {'x': x, 'text': tf.strings.as_string(x)}
    )
    return dataset.batch(4)

  params = real.DefineTFDataInput('Counting', pipeline).Params()
  return params.Set(name='counting')


@pytest.mark.filterwarnings('ignore')
def test_lingvos_tf_data_generators(counting):
  source = lingvo.LingvoInputAdaptor(input=counting, reset_for_eval=True)
  for _ in range(2):
    batches = list(source.eval_batches())
    assert [b.x.tolist() for b in batches] == [
      [0, 1, 2, 3],
      [4, 5, 6, 7],
      [8, 9, 0, 0],
    ]
    assert batches[0].text.tolist() == [b'0', b'1', b'2', b'3']
  training = lingvo.LingvoInputAdaptor(input=counting, is_training=True)
  batches = [next(training) for _ in range(4)]  # Training repeats.
  assert all('text' not in batch for batch in batches)


@pytest.mark.filterwarnings('ignore')
def test_lingvos_generators_are_dealt_out(counting):
  counting.use_per_host_infeed = True
  of_host = [
    list(
      lingvo.LingvoEvalAdaptor(
        input=counting, batch_size=3, reset_for_eval=True, **host(index, 2)
      )
    )
    for index in range(2)
  ]
  assert [[b.x.tolist() for b in batches] for batches in of_host] == [
    [[0, 1, 2], [6, 7, 8]],
    [[3, 4, 5], [9, 0, 0]],
  ]
  assert sum(b.weights.sum() for batches in of_host for b in batches) == 10


@pytest.mark.filterwarnings('ignore')
def test_lingvos_generators_see_the_host_and_are_traced_once(real):
  from lingvo.core import cluster
  from lingvo.core import py_utils
  import tensorflow as tf

  count = tf.Variable(0)

  class PerHost(real.BaseInputGenerator):
    traces = 0

    def _InputBatch(self):
      type(self).traces += 1
      context = cluster.GetInfeedContext()
      count.assign_add(1)
      return py_utils.NestedMap(
        host=tf.fill([2], context.infeed_host_index),
        hosts=tf.fill([2], context.num_infeed_hosts),
        count=tf.fill([2], count),
        do_eval=tf.fill([2], bool(self.do_eval)),
      )

  params = PerHost.Params().Set(name='per_host', batch_size=2)
  for is_training in False, True:
    PerHost.traces = 0
    count.assign(0)
    source = lingvo.LingvoInputAdaptor(
      input=params,
      is_training=is_training,
      reset_for_eval=not is_training,
      **host(1, 3),
    )
    assert source.batch_size == 2
    for number in 1, 2, 3:
      batch = next(source)
      assert batch.count.tolist() == [number] * 2
      assert batch.host.tolist() == [1, 1]
      assert batch.hosts.tolist() == [3, 3]
      assert batch.do_eval.tolist() == [not is_training] * 2
    assert PerHost.traces == 1


@pytest.mark.filterwarnings('ignore')
def test_lingvos_file_generators_have_a_fixed_seed(real):
  class FromFiles(real.BaseInputGeneratorFromFiles):
    def CreateDatasource(self):
      """Creates nothing, because there is no file."""

    def _InputBatch(self):
      import tensorflow as tf

      return {'seed': tf.fill([2], self.params.file_random_seed)}

  params = FromFiles.Params().Set(name='files', batch_size=2)
  with pytest.raises(ValueError, match='file_random_seed=301: each start'):
    lingvo.LingvoInputAdaptor(input=params)
  source = lingvo.LingvoInputAdaptor(
    input=params, allow_fixed_file_random_seed=True, **host(2, 3)
  )
  assert next(source).seed.tolist() == [303, 303]
  assert params.file_random_seed == 301
