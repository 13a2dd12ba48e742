"""Tests of Lingvo's adaptors, on fake generators and on Lingvo's.

For Lingvo's, `pip install --no-deps lingvo sympy` next to TensorFlow is enough.
Lingvo's input ops need a newer C library than some machines have. Here, they
are replaced, because these tests do not need them.
"""

import copy
import dataclasses
import sys
from unittest import mock
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


@dataclasses.dataclass
class Params:
  """Params of a `Generator` of examples 0, 1, ...; the last batch is short."""

  batch_size: int | None = 4
  file_random_seed: int = 0
  num_examples: int = 10
  extra: dict = dataclasses.field(default_factory=dict)
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
    x = x[x < p.num_examples]
    return {
      'x': Tensor(x),
      'seed': Tensor(np.full(len(x), p.file_random_seed)),
      'tgt': {'ids': Tensor(np.stack([x, x], 1).astype(np.int32))},
      **{key: Tensor(make(x)) for key, make in p.extra.items()},
    }

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

  def GetPreprocessedInputBatch(self):
    return {'x': np.ones((3, 2))}


def adaptor(kind=lingvo.LingvoInputAdaptor, fields=None, **params):
  return kind(input=Params(**params), **(fields or {}))


def host(index, count):
  return {'num_infeed_hosts': count, 'infeed_host_index': index}


# The generator's batches.


def test_batches_are_those_of_the_generator():
  assert not adaptor().saves_position
  first, _, last = list(adaptor())
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


def test_lists_stay_lists_and_others_are_refused():
  generator = Generator(Params(batch_size=2))
  batch = {'x': [Tensor([1, 2]), (Tensor([3, 4]), Tensor(['a', 'b']))]}
  generator.GetPreprocessedInputBatch = lambda: batch
  source = lingvo.LingvoInputAdaptor(input=generator, is_training=True)
  x = next(source).x
  assert [x[0].tolist(), [a.tolist() for a in x[1]]] == [[1, 2], [[3, 4]]]
  batch['x'] = object()
  with pytest.raises(TypeError, match='entry x is a object'):
    next(source)


def test_batch_size_is_the_generators_own():
  assert adaptor(batch_size=3).batch_size == 3
  assert adaptor(cls=Stated).batch_size == 8
  # If unknown, it comes from the first batch. The last one is padded to it.
  source = adaptor(batch_size=None)
  assert [batch.x.shape for batch in source] == [(4,)] * 3
  assert source.batch_size == 4
  with pytest.raises(ValueError, match='batch_size'):
    adaptor(fields={'batch_size': 2})


def test_reset_makes_the_generator_anew_or_resets_it():
  fields = {'num_batches': 2, 'reset_for_eval': True}
  params, generator = Params(), Generator(Params())
  for given in params, generator:
    source = lingvo.LingvoInputAdaptor(input=given, **fields)
    for _ in range(3):
      assert [b.x[0] for b in source.eval_batches()] == [0, 4]
  # The first evaluation uses the initial generator.
  assert len(params.made) == 3
  assert params.made[0] is not params
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
def test_strings_are_dropped_where_devices_cannot_hold_them(fields, kept):
  extra = {
    'text': lambda x: np.array([b'%d' % i for i in x], object),
    'fixed': lambda x: np.array([str(i) for i in x]),
  }
  batch = next(adaptor(fields=fields, extra=extra))
  numbers = {'x', 'seed', 'tgt', 'weights', 'eval_sample_weights'}
  assert set(batch) == numbers | ({'text', 'fixed'} if kept else set())
  if kept:
    assert batch.text.tolist() == [b'0', b'1', b'2', b'3']


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
  kind, fields = lingvo.LingvoInputAdaptorNewBatchSize, {'batch_size': rows}
  with pytest.raises(ValueError, match=f'batch_size={rows}'):
    list(adaptor(kind, fields, num_examples=examples))


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


@pytest.mark.parametrize(
  ('hosts', 'rows', 'inner'), [(1, 3, 5), (2, 1, 40), (4, 3, 1)]
)
def test_eval_deals_one_epoch_out_in_order(hosts, rows, inner):
  seed = {'file_random_seed': 301}  # It is left to the generator.
  of_host = evaluate(hosts, rows, batch_size=inner, num_examples=19, **seed)
  seeds = [b.seed[b.weights > 0] for batches in of_host for b in batches]
  assert {*np.concatenate(seeds)} == {301}
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


@pytest.mark.parametrize(
  ('kind', 'fields', 'missing'),
  [
    (lingvo.LingvoEvalAdaptor, {'batch_size': 2}, 'reset_for_eval'),
    (lingvo.LingvoEvalAdaptor, {'reset_for_eval': True}, 'batch'),
    # A training does not repeat what it cannot resume.
    (
      lingvo.LingvoInputAdaptor,
      {'is_training': True, 'input_random_seed': 1},
      'input_random_seed',
    ),
  ],
)
def test_fields_that_contradict_are_refused(kind, fields, missing):
  with pytest.raises(ValueError, match=missing):
    adaptor(kind, fields)


# Lingvo's generators.


@pytest.fixture(scope='module')
def real():
  """Returns Lingvo's module of generators, with a stand-in for its ops."""
  pytest.importorskip('lingvo')
  ops = mock.MagicMock(unsafe=True)
  sys.modules.setdefault('lingvo.core.ops.gen_x_ops', ops)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return pytest.importorskip(
      'lingvo.core.base_input_generator', exc_type=ImportError
    )


@pytest.mark.filterwarnings('ignore')
def test_lingvos_tf_data_generators(real):
  import tensorflow as tf

  def pipeline(end=10):
    dataset = tf.data.Dataset.range(end).map(
      lambda x: {'x': x, 'text': tf.strings.as_string(x)}
    )
    return dataset.batch(4)

  params = real.DefineTFDataInput('Counting', pipeline).Params()
  params.Set(name='counting')
  source = lingvo.LingvoInputAdaptor(input=params, reset_for_eval=True)
  for _ in range(2):
    first, _, last = source.eval_batches()
    assert first.x.tolist() == [0, 1, 2, 3]
    assert first.text.tolist() == [b'0', b'1', b'2', b'3']
    assert last.x.tolist() == [8, 9, 0, 0]
  training = lingvo.LingvoInputAdaptor(input=params, is_training=True)
  batches = [next(training) for _ in range(4)]  # Training repeats.
  assert all('text' not in batch for batch in batches)
  params.use_per_host_infeed = True
  fields = {'input': params, 'batch_size': 3, 'reset_for_eval': True}
  for index, expected in enumerate(
    [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 0, 0]]]
  ):
    source = lingvo.LingvoEvalAdaptor(**fields, **host(index, 2))
    assert [batch.x.tolist() for batch in source] == expected


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('is_training', [False, True])
def test_lingvos_generators_see_the_host_and_are_traced_once(real, is_training):
  from lingvo.core import cluster
  from lingvo.core import py_utils
  import tensorflow as tf

  count, traces = tf.Variable(0), []

  class PerHost(real.BaseInputGenerator):
    def _InputBatch(self):
      traces.append(1)
      context = cluster.GetInfeedContext()
      count.assign_add(1)
      return py_utils.NestedMap(
        host=tf.fill([2], context.infeed_host_index),
        hosts=tf.fill([2], context.num_infeed_hosts),
        count=tf.fill([2], count),
        do_eval=tf.fill([2], bool(self.do_eval)),
      )

  source = lingvo.LingvoInputAdaptor(
    input=PerHost.Params().Set(name='per_host', batch_size=2),
    is_training=is_training,
    reset_for_eval=not is_training,
    **host(1, 3),
  )
  assert source.batch_size == 2
  for number in 1, 2, 3:
    batch = next(source)
    expected = {'host': 1, 'hosts': 3, 'count': number}
    expected['do_eval'] = not is_training
    for key, value in expected.items():
      assert batch[key].tolist() == [value] * 2
  assert len(traces) == 1
