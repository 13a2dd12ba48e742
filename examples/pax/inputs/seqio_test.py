"""Tests of SeqIO inputs: rows, training, evaluation and metrics."""

import jax
import numpy as np
import pytest

from examples.pax.inputs import seqio as seqio_input

tf = pytest.importorskip('tensorflow')
seqio = pytest.importorskip('seqio')

VOCABULARY = seqio.PassThroughVocabulary(100, eos_id=1)


def write_examples(path, *examples):
  """Writes dicts of lists of integers."""
  with tf.io.TFRecordWriter(str(path)) as writer:
    for example in examples:
      features = {
        key: tf.train.Feature(int64_list=tf.train.Int64List(value=value))
        for key, value in example.items()
      }
      features = tf.train.Features(feature=features)
      writer.write(tf.train.Example(features=features).SerializeToString())


def accuracy(targets, predictions):
  hits = [list(t) == list(p) for t, p in zip(targets, predictions, strict=True)]
  return {'accuracy': float(np.mean(hits))}


def total(targets, scores):
  return {'total': float(np.sum(scores)), 'examples': len(targets)}


def longest(targets, predictions, aux_values):
  del targets, predictions
  return {'longest': int(np.max(aux_values['length']))}


def make_task(folder, name='numbers', sizes=(5, 0, 6), first=10, **fields):
  """Makes a task of files: each example has a number x from `first` on.

  Its inputs are x % 3 + 1 threes and an end, its targets x and an end.
  """
  for i, size in enumerate(sizes):
    examples = (
      {'inputs': [3] * (x % 3 + 1) + [1], 'targets': [x, 1]}
      for x in range(first, first + size)
    )
    write_examples(folder / f'{name}-{i}.tfrecord', *examples)
    first += size
  lengths = tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True)
  glob = str(folder / f'{name}-*.tfrecord')
  return seqio.Task(
    name,
    source=seqio.TFExampleDataSource(
      {'train': glob, 'validation': glob},
      {'inputs': lengths, 'targets': lengths},
    ),
    preprocessors=[to_int32],
    output_features={
      key: seqio.Feature(VOCABULARY, add_eos=False)
      for key in ('inputs', 'targets')
    },
    **{'metric_fns': [accuracy, total], **fields},
  )


@seqio.map_over_dataset
def to_int32(example):
  return {key: tf.cast(value, tf.int32) for key, value in example.items()}


def make(task, count=1, host=0, **fields):
  fields = {
    'split_name': 'train',
    'batch_size': 2,
    'task_feature_lengths': {'inputs': 4, 'targets': 2},
    'feature_converter': seqio_input.EncoderDecoderFeatures(pack=False),
    'is_training': True,
    **fields,
  }
  return seqio_input.SeqIOInput(
    mixture_or_task=task,
    num_infeed_hosts=count,
    infeed_host_index=host,
    **fields,
  )


ONE_EPOCH = {
  'is_training': False,
  'reset_for_eval': True,
  'eval_loop_num_batches': None,
}


def evaluate(task, count=1, **fields):
  """Returns the inputs of all hosts for one epoch of evaluation."""
  fields = {'split_name': 'validation', **ONE_EPOCH, **fields}
  return [make(task, count, host, **fields) for host in range(count)]


def labels(batch):
  """Returns the first target of each row, which is its example's number."""
  return batch['tgt']['labels'][:, 0]


def rows_of(converter, examples, lengths):
  dataset = tf.data.Dataset.from_generator(
    lambda: iter(examples),
    output_signature={
      key: tf.TensorSpec([None], tf.int32) for key in examples[0]
    },
  )
  return list(converter(dataset, lengths).as_numpy_iterator())


def check_row(row, **expected):
  assert {key: value.tolist() for key, value in row.items()} == expected
  for key, value in row.items():
    is_float = key in ('weights', 'paddings')
    assert value.dtype == (np.float32 if is_float else np.int32)


# Rows.


# Pax's converter makes these rows, except for the first, of the same examples:
# paxml 1.4.0, seqio-nightly 0.0.17.dev20231010, Python 3.10.
@pytest.mark.parametrize(
  ('fields', 'expected'),
  [
    (
      {'bos_id': 7},
      {
        'ids': [7, 3, 9, 7, 4, 0],
        'labels': [3, 9, 1, 4, 1, 0],
        'weights': [1, 1, 1, 1, 1, 0],
        'paddings': [0, 0, 0, 0, 0, 1],
      },
    ),
    (
      {'reverse_bos_padding': True, 'eos_id': 42},
      {
        'ids': [3, 9, 1, 4, 1, 0],
        'labels': [9, 1, 4, 1, 0, 42],
        'weights': [1, 1, 1, 1, 0, 0],
        'paddings': [0, 0, 0, 0, 1, 1],
      },
    ),
  ],
)
def test_packed_rows_of_a_language_model(fields, expected):
  rows = rows_of(
    seqio_input.LanguageModelFeatures(pack=True, **fields),
    [{'targets': [3, 9, 1]}, {'targets': [4, 1]}, {'targets': [5, 5, 5, 1]}],
    {'targets': 6},
  )
  assert len(rows) == 2
  check_row(
    rows[0],
    **expected,
    segment_ids=[1, 1, 1, 2, 2, 0],
    segment_pos=[0, 1, 2, 0, 1, 0],
  )


@pytest.mark.parametrize(
  ('fields', 'weights'),
  [
    ({}, [1, 0, 1, 0, 1, 0, 0]),
    ({'weights_on_targets_only': True}, [0, 0, 1, 0, 1, 0, 0]),
    ({'weights_on_targets_only': False}, [1, 1, 1, 1, 1, 0, 0]),
  ],
)
def test_a_padded_row_with_a_prefix(fields, weights):
  (row,) = rows_of(
    seqio_input.LanguageModelFeatures(pack=False, **fields),
    [{'inputs': [8, -9], 'targets': [4, -5, 1]}],
    {'inputs': 3, 'targets': 4},
  )
  check_row(
    row,
    ids=[0, 8, 9, 4, 5, 0, 0],
    labels=[8, 9, 4, 5, 1, 0, 0],
    weights=weights,
    paddings=[0, 0, 0, 0, 0, 1, 1],
    segment_ids=[1, 1, 1, 1, 1, 0, 0],
    segment_pos=[0, 1, 2, 3, 4, 0, 0],
  )


def test_rows_of_an_encoder_and_a_decoder():
  def rows(pack):
    return rows_of(
      seqio_input.EncoderDecoderFeatures(pack=pack, bos_id=9),
      [
        {'inputs': [7, 8, 1], 'targets': [3, 1]},
        {'inputs': [6, 1], 'targets': [4, 1]},
      ],
      {'inputs': 6, 'targets': 5},
    )

  (row,) = rows(pack=True)
  check_row(
    row['src'],
    ids=[7, 8, 1, 6, 1, 0],
    paddings=[0, 0, 0, 0, 0, 1],
    segment_ids=[1, 1, 1, 2, 2, 0],
    segment_pos=[0, 1, 2, 0, 1, 0],
  )
  check_row(
    row['tgt'],
    ids=[9, 3, 9, 4, 0],
    labels=[3, 1, 4, 1, 0],
    weights=[1, 1, 1, 1, 0],
    paddings=[0, 0, 0, 0, 1],
    segment_ids=[1, 1, 2, 2, 0],
    segment_pos=[0, 1, 0, 1, 0],
  )
  first, second = rows(pack=False)
  assert first['src']['ids'].tolist() == [7, 8, 1, 0, 0, 0]
  assert second['tgt']['ids'].tolist() == [9, 4, 0, 0, 0]
  assert second['tgt']['segment_ids'].tolist() == [1, 1, 0, 0, 0]


def test_ids_are_text_again():
  bytes_ = seqio.ByteVocabulary()
  features = {
    'inputs': seqio.Feature(VOCABULARY),
    'targets': seqio.Feature(bytes_),
  }
  source = seqio.FunctionDataSource(
    lambda split, shuffle_files: None, ['train']
  )
  inputs = make(seqio.Task('text', source, features))
  ids = np.array([[*b'\0de', 1, *b'f', 1, 0], [*b'gggg', 0, 0, 0]])
  ids[ids > 1] += 3
  for key in (None, 'tgt'):
    assert inputs.ids_to_strings(ids, [6, 2], key) == ['de\nf', 'gg']
  for key in ('src', 'inputs'):
    assert inputs.ids_to_strings([[5, 1, 6]], [3], key) == ['5 1\n6']


# Training.


def test_epochs_differ_and_a_state_of_others_is_refused(tmp_path):
  task = make_task(tmp_path)
  inputs = make(task)
  rows = np.concatenate([labels(next(inputs)) for _ in range(12)]).tolist()
  assert sorted(rows[:11]) == sorted(rows[11:22]) == list(range(10, 21))
  assert rows[:11] != rows[11:22]
  state = make(task).get_state()
  for fields, message in (
    ({'split_name': 'validation'}, 'split_name'),
    ({'shuffle': False}, 'shuffle'),
    ({'trim_output_features': False}, 'trim_output_features'),
    ({'data_version': 'new'}, 'data_version'),
    ({'task': make_task(tmp_path, shuffle_buffer_size=5)}, 'tasks'),
  ):
    with pytest.raises(ValueError, match=message):
      make(**{'task': task, **fields}).set_state(state)
  (tmp_path / 'numbers-3.tfrecord').touch()
  seqio.utils._list_files_for_glob.cache_clear()
  with pytest.raises(ValueError, match='file_names_sha256'):
    make(task).set_state(state)


def test_a_mixture_repeats_its_tasks_each_by_itself(tmp_path):
  small = make_task(tmp_path, 'small', sizes=(2,), first=10)
  large = make_task(tmp_path, 'large', sizes=(40,), first=20)
  mixture = seqio.Mixture('both', [(small, 1), (large, 1)])
  inputs = make(mixture, batch_size=10)
  rows = np.array([labels(next(inputs)) for _ in range(10)])
  # Both tasks are drawn equally often. The small one does not end the epoch.
  assert 30 < (rows < 20).sum() < 70
  assert len(np.unique(rows)) > 20
  assert inputs.position() == {'epoch': 0, 'record': 100}
  after = make(mixture, batch_size=10)
  after.set_position({'epoch': 0, 'record': 70})
  np.testing.assert_array_equal(labels(next(after)), rows[7])


def test_a_state_of_other_rates_is_refused(tmp_path):
  tasks = [make_task(tmp_path, name) for name in ('one', 'two')]

  def mix(*rates, **fields):
    mixture = seqio.Mixture('both', list(zip(tasks, rates, strict=True)))
    return make(mixture, **fields)

  state = mix(1, 2).get_state()
  mix(1, 2.0).set_state(state)
  with pytest.raises(ValueError, match=r'tasks is .*2\.0.* in the state'):
    mix(1, 3).set_state(state)
  # In an evaluation, each task is read once, so the rates have no effect.
  mix(1, 3, **ONE_EPOCH).set_state(mix(1, 2, **ONE_EPOCH).get_state())


def test_an_empty_task_of_a_mixture_does_not_loop(tmp_path):
  def nothing(dataset):
    return dataset.filter(lambda _: False)

  empty = make_task(tmp_path, 'empty')
  empty = empty.replace(preprocessors=[to_int32, nothing])
  mixture = seqio.Mixture('mixed', [(make_task(tmp_path), 1), (empty, 1)])
  with pytest.raises(ValueError, match='Task empty of mixed'):
    next(make(mixture))


# One epoch of evaluation, and metrics.


def run_model(inputs):
  """Returns all hosts' predictions, right for x % 4 == 0, and scores x."""
  predictions, scores = [], []
  for host in inputs:
    for batch in host.eval_batches():
      ids = host.example_ids(batch)
      x = labels(batch)
      right = np.where(x % 4 == 0, x, 99)
      tokens = np.stack([right, np.ones_like(x)], axis=1)
      length = {'length': x}
      predictions.append((ids, (tokens.astype(np.int32), length)))
      scores.append((ids, x.astype(np.float32)))
  return predictions, scores


@pytest.mark.parametrize('count', [2, 4])
def test_ids_and_metrics_whatever_the_number_of_hosts(tmp_path, count):
  metric_fns = [accuracy, total, longest]
  numbers = make_task(tmp_path, metric_fns=metric_fns)
  more = make_task(
    tmp_path, 'more', sizes=(3, 1), first=30, metric_fns=metric_fns
  )
  inputs = evaluate(seqio.Mixture('both', [(numbers, 1), (more, 5)]), count)
  predictions, scores = run_model(inputs)

  examples = {}
  for ids, x in scores:
    assert {(x.dtype.name, x.shape) for x in ids.values()} == {('int32', (2,))}
    np.testing.assert_array_equal(ids[seqio_input.INDEX_KEY] == -1, x == 0)
    for row in np.nonzero(x)[0]:
      key = tuple(ids[k][row].item() for k in seqio_input.ID_KEYS)
      assert key not in examples
      assert key[1] == count
      examples[key] = x[row]
  assert sorted(examples.values()) == [*range(10, 21), *range(30, 34)]
  assert {key[0] for key in examples} == set(range(count))
  # The files have 5, 0 and 6 examples, and 3 and 1. The first of two hosts has
  # all but one of them. Four hosts have too few files, and take every fourth
  # example.
  assert len(scores) == {2: 2 * 7, 4: 4 * 2}[count]

  # Three of 10, ..., 20 are multiples of 4. The sum of all is 165.
  expected = {
    'numbers': pytest.approx(
      {'accuracy': 3 / 11, 'longest': 20, 'total': 165, 'examples': 11}
    ),
    'more': pytest.approx(
      {'accuracy': 1 / 4, 'longest': 33, 'total': 126, 'examples': 4}
    ),
  }
  order = np.random.default_rng(0).permutation(len(predictions))
  metrics = inputs[-1].compute_metrics(
    predict_outputs=[predictions[i] for i in order],
    # A repeated row counts once.
    score_outputs=[scores[i] for i in order] + scores[:1],
  )
  assert metrics == expected
  only = inputs[-1].compute_metrics(score_outputs=scores)
  assert only['numbers'] == {'total': 165.0, 'examples': 11}


def test_postprocessing_and_metric_objects_are_those_of_seqio(tmp_path):
  @seqio.metrics.flax.struct.dataclass
  class Count(seqio.metrics.Metric):
    model_output_type: seqio.metrics.ModelOutputType = (
      seqio.metrics.ModelOutputType.SCORE
    )
    value: int = 0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, *_):
      assert len(inputs) == len(model_output)
      return cls(value=len(model_output))

    def compute(self):
      return {'count': seqio.metrics.Scalar(self.value)}

  def postprocess(decoded, example, is_target):
    # An example has its inputs: for 10, ..., 20 they have 2, 3, 1, ... threes.
    return [int(decoded[0]) * 100 + int(np.sum(example['inputs'] == 3))]

  def collected(targets, predictions):
    return {'first': [*targets[:3], *predictions[:3]]}

  task = make_task(
    tmp_path,
    postprocess_fn=postprocess,
    metric_fns=[collected],
    metric_objs=[Count()],
  )
  inputs = evaluate(task)
  predictions, scores = run_model(inputs)
  metrics = inputs[0].compute_metrics(
    predict_outputs=predictions, score_outputs=scores
  )
  first = [[1002], [1103], [1201], [9902], [9903], [1201]]
  assert metrics == {'numbers': {'first': first, 'count': 11}}


def test_outputs_that_do_not_fit_are_refused(tmp_path, monkeypatch):
  task = make_task(tmp_path, metric_fns=[total, longest])
  inputs = evaluate(task, 2)
  predictions, scores = run_model(inputs)
  compute = inputs[0].compute_metrics
  with pytest.raises(ValueError, match=r'\[\(0, 2, 0\), \(0, 2, 1\)\]'):
    compute(score_outputs=scores[1:])
  _, others = run_model(evaluate(task, 1))
  with pytest.raises(ValueError, match=r' 22, .*\(0, 1, 0\)'):
    compute(score_outputs=others)
  # Not gathered with `tiled=True`, as the top of seqio.py says.
  stacked = [jax.tree.map(lambda x: np.asarray(x)[None], scores[0])]
  with pytest.raises(ValueError, match=r'shape \(1, 2\)'):
    compute(score_outputs=stacked)
  unknown = dict(zip(seqio_input.ID_KEYS, ([0], [2], [11]), strict=True))
  with pytest.raises(ValueError, match=r' 1, .*\(0, 2, 11\)'):
    compute(score_outputs=[*scores, (unknown, [1.0])])
  with pytest.raises(ValueError, match='pairs'):
    compute(predict_outputs=[(i, tokens) for i, (tokens, _) in predictions])
  (packed,) = evaluate(
    task, feature_converter=seqio_input.EncoderDecoderFeatures(pack=True)
  )
  for source in packed, make(task):
    with pytest.raises(ValueError, match='reset_for_eval=True, and pack=False'):
      source.compute_metrics(score_outputs=[(next(source), [1.0, 1.0])])
  monkeypatch.setattr(seqio_input.jax, 'process_index', lambda: 1)
  assert compute(score_outputs=scores) == {}


def test_a_task_by_its_name(tmp_path):
  task = make_task(tmp_path, 'a_registered_task')
  seqio.TaskRegistry.add_provider(task.name, task)
  assert labels(next(make(None, mixture_name=task.name))).shape == (2,)
  with pytest.raises(ValueError, match='a_registred_task'):
    make(None, mixture_name='a_registred_task')
