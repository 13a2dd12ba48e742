"""Tests of Lingvo's adaptors: on generators with its interface, and on its own.

Lingvo's input ops need a newer C library than some machines have; they are
replaced there, as what is tested on its own generators needs none of them.
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
  """What stands for an eager tensor."""

  def __init__(self, value):
    self.value = np.asarray(value)

  def numpy(self):
    return self.value


class OutOfRangeError(Exception):
  """What TensorFlow raises at the end of the data."""


OutOfRangeError.__module__ = 'tensorflow.python.framework.errors_impl'


class NestedMap(dict):
  """What Lingvo's is to an adaptor: a dict with methods of its own."""

  def FlattenItems(self):
    raise AssertionError('Lists are not flattened.')


@dataclasses.dataclass
class Params:
  """Of a `Generator`: examples 0, 1, ... in batches, the last one short."""

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
    return dataclasses.replace(self)  # `made` is shared: tests look at it.


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
    return Tensor(
      [
        f'{key or ""}{i[:n]}'.encode()
        for i, n in zip(ids, lengths, strict=True)
      ]
    )


class Stated(Generator):
  """One that tells its batch size by a tensor."""

  def InfeedBatchSize(self):
    return np.int32(8)


class Bare:
  """One without anything but batches."""

  count = 0

  def GetPreprocessedInputBatch(self):
    self.count += 1
    return {'x': np.full((3, 2), self.count)}


def adaptor(kind=lingvo.LingvoInputAdaptor, fields=None, **params):
  return kind(input=Params(**params), **(fields or {}))


def host(index, count):
  return {'num_infeed_hosts': count, 'infeed_host_index': index}


# As the generator makes them.


def test_batches_are_those_of_the_generator():
  source = adaptor()
  assert source.batch_size == 4
  first, _, last = list(source)
  assert first.x.tolist() == [0, 1, 2, 3]
  assert first.tgt.ids.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
  assert first.tgt.ids.dtype == np.int32
  assert isinstance(first.tgt, base.Batch)
  # Two examples are left, and two rows fill up.
  assert last.x.tolist() == [8, 9, 0, 0]
  for batch, weights in (first, [1, 1, 1, 1]), (last, [1, 1, 0, 0]):
    for key in lingvo.SAMPLE_WEIGHTS, base.WEIGHTS:
      assert batch[key].tolist() == weights
      assert batch[key].dtype == np.float32
  with pytest.raises(StopIteration):
    next(source)


def test_lists_of_tensors_stay_lists():
  generator = Generator(Params())
  batch = {'x': [Tensor([1, 2]), (Tensor([3, 4]), Tensor(['a', 'b']))]}
  generator.GetPreprocessedInputBatch = lambda: batch
  source = lingvo.LingvoInputAdaptor(input=generator, is_training=True)
  source.batch_size = 2
  x = next(source).x
  assert [x[0].tolist(), [a.tolist() for a in x[1]]] == [[1, 2], [[3, 4]]]


def test_batch_size_is_the_generators_own():
  assert adaptor().batch_size == 4
  assert adaptor(batch_size=3).batch_size == 3
  assert adaptor(cls=Stated).batch_size == 8
  # Not told: its first batch is asked, and not lost.
  source = lingvo.LingvoInputAdaptor(input=Bare())
  assert source.batch_size == 3
  assert [next(source).x[0, 0] for _ in range(3)] == [1, 2, 3]
  with pytest.raises(
    ValueError, match=r'batch_size is 2; leave it None: it is'
  ):
    adaptor(fields={'batch_size': 2})
  with pytest.raises(
    ValueError, match='does not tell its batch size, and ended'
  ):
    adaptor(batch_size=None, num_examples=0)


def test_num_batches_end_the_input():
  source = adaptor(
    fields={'num_batches': 2, 'reset_for_eval': True}, repeat=True
  )
  for _ in range(3):
    batches = list(source.eval_batches())
    assert [b.x[0] for b in batches] == [0, 4]
  for wrong in 0, -1:
    with pytest.raises(ValueError, match=f'num_batches is {wrong}; expected'):
      adaptor(fields={'num_batches': wrong})


def test_rolling_evaluations_read_on():
  source = adaptor(fields={'eval_loop_num_batches': 2}, repeat=True)
  firsts = [[b.x[0] for b in source.eval_batches()] for _ in range(2)]
  assert firsts == [[0, 4], [8, 2]]


def test_reset_makes_the_generator_anew():
  params = Params(batch_size=None)
  source = lingvo.LingvoInputAdaptor(input=params, reset_for_eval=True)
  for _ in range(2):
    assert len(list(source.eval_batches())) == 3
  # One to start with, which the first evaluation uses too.
  assert len(params.made) == 2
  assert params.made[0] is not params


def test_reset_of_a_generator_that_was_given():
  generator = Generator(Params())
  source = lingvo.LingvoInputAdaptor(input=generator, reset_for_eval=True)
  for _ in range(3):
    assert [b.x[0] for b in source.eval_batches()] == [0, 4, 8]
  assert generator.resets == 2
  source = lingvo.LingvoInputAdaptor(input=Bare())
  next(source)
  with pytest.raises(NotImplementedError, match=r'Bare has no Reset\(\). Give'):
    source.reset()


def test_fixed_seeds_are_refused():
  for make in (lambda p: p, Generator):
    with pytest.raises(ValueError, match='file_random_seed=301: each start'):
      lingvo.LingvoInputAdaptor(input=make(Params(file_random_seed=301)))


def test_hosts_get_seeds_of_their_own_where_they_are_allowed():
  params = Params(file_random_seed=301)
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
  with pytest.raises(
    ValueError, match='is host 2, and its generator was already'
  ):
    lingvo.LingvoInputAdaptor(input=made, **host(2, 3), **allowed)
  # 0 is another order at each start, on each host.
  source = adaptor(fields=host(2, 3) | allowed)
  assert set(next(source).seed) == {0}


@pytest.mark.parametrize(
  ('fields', 'kept'),
  [
    ({}, True),
    ({'is_training': True}, False),
    (host(0, 2), False),
    ({'is_training': True, **host(1, 2)}, False),
  ],
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
  with pytest.raises(TypeError, match='entry sparse is object, which is no'):
    next(source)
  generator = Generator(Params())
  generator.GetPreprocessedInputBatch = lambda: [Tensor([1])]
  with pytest.raises(TypeError, match='is list; expected dicts'):
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
  for make, kind in (
    (lambda x: tf.sparse.from_dense(x), 'SparseTensor'),
    (lambda x: tf.ragged.range(x), 'RaggedTensor'),
  ):
    source = adaptor(extra={'y': make}, wrap=lambda x: x)
    with pytest.raises(TypeError, match=f'entry y is {kind}, which is no'):
      next(source)


def test_the_generators_weights_stay():
  extra = {
    'weights': lambda x: np.stack([x, 2 * x], 1).astype(np.float32),
    'eval_sample_weights': lambda x: np.full(len(x), 0.5, np.float32),
  }
  batch = list(adaptor(extra=extra))[-1]
  assert batch.weights.tolist() == [[8, 16], [9, 18], [0, 0], [0, 0]]
  assert batch.eval_sample_weights.tolist() == [0.5, 0.5, 0, 0]


def test_custom_processing_of_batches():
  # As Pax's document has it.
  class MyInput(lingvo.LingvoInputAdaptor):
    def get_next(self):
      batch = super().get_next()
      batch.new_field = batch.x + 1
      return batch

  source = MyInput(input=Params())
  assert next(source).new_field.tolist() == [1, 2, 3, 4]
  assert source.name == 'MyInput'


def test_position_is_not_saved_and_says_so():
  source = adaptor()
  assert not source.saves_position
  with pytest.raises(NotImplementedError, match='does not override position'):
    source.get_state()
  with pytest.raises(
    ValueError, match='input_random_seed=1 but its position is'
  ):
    adaptor(fields={'is_training': True, 'input_random_seed': 1})


def test_ids_to_strings_are_the_generators():
  ids, lengths = np.array([[1, 2], [3, 4]]), np.array([2, 1])
  assert adaptor().ids_to_strings(ids, lengths, 'k') == ['k[1 2]', 'k[3]']
  with pytest.raises(NotImplementedError, match='has no tokens'):
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


def test_training_does_not_evaluate():
  with pytest.raises(ValueError, match='set one of them to False'):
    adaptor(fields={'is_training': True, 'cluster_do_eval': True})


# In smaller batches.


def test_new_batch_size_cuts():
  source = adaptor(
    lingvo.LingvoInputAdaptorNewBatchSize,
    {'batch_size': 2, 'reset_for_eval': True},
    batch_size=6,
    num_examples=12,
  )
  for _ in range(2):
    batches = list(source.eval_batches())
    assert [b.x.tolist() for b in batches] == [
      [i, i + 1] for i in range(0, 12, 2)
    ]
    assert batches[0].tgt.ids.shape == (2, 2)


def test_new_batch_size_must_divide():
  with pytest.raises(
    ValueError, match='batch_size=3, and its generator gave 4'
  ):
    next(adaptor(lingvo.LingvoInputAdaptorNewBatchSize, {'batch_size': 3}))
  # The last one of an epoch may be short.
  source = adaptor(
    lingvo.LingvoInputAdaptorNewBatchSize, {'batch_size': 2}, num_examples=11
  )
  with pytest.raises(
    ValueError, match='batch_size=2, and its generator gave 3'
  ):
    list(source)
  with pytest.raises(ValueError, match='batch_size is None; expected'):
    adaptor(lingvo.LingvoInputAdaptorNewBatchSize)


# One epoch, dealt out.


def evaluate(hosts, rows, **params):
  """Returns each host's batches, twice, which must be the same."""
  result = []
  for index in range(hosts):
    source = adaptor(
      lingvo.LingvoEvalAdaptor,
      {'batch_size': rows, 'reset_for_eval': True, **host(index, hosts)},
      **params,
    )
    batches, again = list(source.eval_batches()), list(source.eval_batches())
    for one, other in zip(batches, again, strict=True):
      np.testing.assert_array_equal(one.x, other.x)
      np.testing.assert_array_equal(one.weights, other.weights)
    result.append(batches)
  return result


@pytest.mark.parametrize('hosts', [1, 2, 4])
@pytest.mark.parametrize('rows', [1, 2, 3, 8])
@pytest.mark.parametrize('inner', [1, 3, 5, 40])
@pytest.mark.parametrize('examples', [1, 8, 19])
def test_eval_is_one_epoch_on_any_hosts(hosts, rows, inner, examples):
  of_host = evaluate(hosts, rows, batch_size=inner, num_examples=examples)
  count = -(-examples // (hosts * rows))
  assert [len(batches) for batches in of_host] == [count] * hosts
  x, weights = (
    np.stack([[b[k] for b in batches] for batches in of_host])
    for k in ('x', 'weights')
  )
  # [host, batch, row] in the order of the examples.
  order = np.swapaxes(x, 0, 1).ravel()
  filling = count * hosts * rows - examples
  assert order.tolist() == [*range(examples), *[0] * filling]
  counts = np.swapaxes(weights, 0, 1).ravel()
  assert counts.tolist() == [1] * examples + [0] * filling


def test_eval_fills_up_with_the_first_example():
  extra = {
    'y': lambda x: x + 100,
    'weight': lambda x: x + 1.0,
    'name': lambda x: np.array([f'n{i}' for i in x]),
  }
  (batches,) = evaluate(1, 8, num_examples=10, extra=extra)
  last = batches[-1]
  assert last.y.tolist() == [108, 109] + [100] * 6
  assert last.tgt.ids[2:].tolist() == [[0, 0]] * 6
  assert last.name.tolist() == ['n8', 'n9'] + ['n0'] * 6
  assert last.weight.tolist() == [9, 10] + [0] * 6
  for key in lingvo.SAMPLE_WEIGHTS, base.WEIGHTS:
    assert last[key].tolist() == [1, 1] + [0] * 6


def test_eval_weights_inside_are_zero_too():
  class Nested(Generator):
    def GetPreprocessedInputBatch(self):
      batch = super().GetPreprocessedInputBatch()
      batch['tgt']['weights'] = Tensor(np.ones_like(batch['tgt']['ids'].value))
      return batch

  ((batch,),) = evaluate(1, 4, num_examples=3, cls=Nested)
  assert batch.tgt.weights.tolist() == [[1, 1]] * 3 + [[0, 0]]


def test_eval_leaves_the_seed_to_the_generator():
  for batches in evaluate(2, 4, file_random_seed=301):
    assert {int(s) for b in batches for s in b.seed} == {301}


def test_eval_needs_an_epoch_and_a_batch_size():
  cls = lingvo.LingvoEvalAdaptor
  with pytest.raises(
    ValueError, match='is_training=False and reset_for_eval=Fal'
  ):
    adaptor(cls, {'batch_size': 2})
  with pytest.raises(
    ValueError, match='is_training=True and reset_for_eval=Fals'
  ):
    adaptor(cls, {'batch_size': 2, 'is_training': True})
  with pytest.raises(ValueError, match='batch_size is None'):
    adaptor(cls, {'reset_for_eval': True})


# Lingvo's own.


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
      except Exception:  # TensorFlow's: the library does not load.
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
  assert source.batch_size == 4
  for _ in range(2):
    batches = list(source.eval_batches())
    assert [b.x.tolist() for b in batches] == [
      [0, 1, 2, 3],
      [4, 5, 6, 7],
      [8, 9, 0, 0],
    ]
    assert batches[0].text.tolist() == [b'0', b'1', b'2', b'3']
  training = lingvo.LingvoInputAdaptor(input=counting, is_training=True)
  batches = [next(training) for _ in range(4)]  # It repeats.
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
      """It has no file."""

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
