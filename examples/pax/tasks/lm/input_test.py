"""Tests of the language models' data: rows of C4, and missing files."""

import json

from etils import epath
from etils.epath import gpath
from google.protobuf import message
import grain
import numpy as np
import pytest

from examples.pax import experiment_registry
from examples.pax.tasks.lm import input as lm_input
from examples.pax.tasks.lm import records

array_record = pytest.importorskip('array_record.python.array_record_module')
sentencepiece = pytest.importorskip('sentencepiece')


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  """A SentencePiece model of characters, with 0 for padding, 1 for the end."""
  prefix = tmp_path_factory.mktemp('vocabulary') / 'chars'
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['abcd'] * 10),
    model_prefix=str(prefix),
    model_type='char',
    vocab_size=7,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    add_dummy_prefix=False,
    minloglevel=2,
  )
  return f'{prefix}.model'


def field(number, value):
  """Encodes a length-delimited Protocol Buffers field."""
  assert len(value) < 128
  return bytes([number << 3 | 2, len(value)]) + value


def example(**features):
  """Encodes a `tf.train.Example` of texts."""
  entries = b''.join(
    field(
      1, field(1, name.encode()) + field(2, field(1, field(1, text.encode())))
    )
    for name, text in features.items()
  )
  return field(1, entries)


def test_a_record_is_an_example_or_json():
  record = example(timestamp='2019', text='né', url='http://x')
  assert records.document_text(record) == 'né'.encode()
  record = json.dumps({'text': 'né', 'url': 'x'}).encode()
  assert records.document_text(record) == 'né'.encode()
  for wrong, error, said in (
    (example(content='x'), ValueError, 'has no text; expected a tf'),
    (b'{"content": "x"}', KeyError, 'text'),
    (b'abc', message.DecodeError, 'parsing'),
    (b'\x08\x01', ValueError, 'has no text'),  # Field 1 holds a number.
    (record[:20], ValueError, 'Unterminated string|Expecting'),
  ):
    with pytest.raises(error, match=said):
      records.document_text(wrong)


def write(path, documents):
  writer = array_record.ArrayRecordWriter(str(path), 'group_size:1')
  for document in documents:
    writer.write(example(text=document))
  writer.close()


def make(data_dir, vocabulary, **fields):
  return lm_input.c4_input(
    **{
      'data_dir': data_dir and str(data_dir),
      'vocabulary': vocabulary,
      'batch_size': 2,
      'length': 5,
      'vocab_size': 7,
      'is_training': False,
      'eval_batches': 1,
    }
    | fields
  )


def test_rows_of_array_records_are_documents_without_a_gap(
  tmp_path, vocabulary
):
  write(tmp_path / 'c4-validation.array_record-00000-of-00001', ['abcd', 'ba'])
  tokenizer = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
  a, b, c, d = (tokenizer.piece_to_id(x) for x in 'abcd')
  batch = next(make(tmp_path, vocabulary).eval_batches())
  # A document ends with 1, and its first input is 0. After its end, the data
  # starts again.
  np.testing.assert_array_equal(
    batch['labels'], [[a, b, c, d, 1], [b, a, 1, a, b]]
  )
  np.testing.assert_array_equal(
    batch['ids'], [[0, a, b, c, d], [0, b, a, 0, a]]
  )
  np.testing.assert_array_equal(batch['weights'], np.ones((2, 5)))
  np.testing.assert_array_equal(batch['paddings'], 1 - batch['weights'])
  np.testing.assert_array_equal(
    batch['segment_ids'], [[1] * 5, [1, 1, 1, 2, 2]]
  )
  np.testing.assert_array_equal(
    batch['segment_pos'], [[0, 1, 2, 3, 4], [0, 1, 2, 0, 1]]
  )
  specs = lm_input.row_specs(5)
  assert {k: (x.shape[1:], x.dtype.name) for k, x in batch.items()} == specs


def test_files_of_a_bucket_are_found(tmp_path, vocabulary, monkeypatch):
  name = 'c4-validation.array_record-00000-of-00001'
  write(tmp_path / name, ['abcd'])
  opened = []

  def open_files(paths):
    opened.extend(paths)
    return real([f'{tmp_path}/{name}'])

  real = grain.sources.ArrayRecordDataSource
  monkeypatch.setattr(grain.sources, 'ArrayRecordDataSource', open_files)
  monkeypatch.setattr(gpath, '_is_tf_installed', lambda: False)
  with epath.testing.mock_epath(
    glob=lambda _, path: [path.replace('.*', name[len('c4-validation') :])]
  ):
    batch = next(make('gs://bucket/en', vocabulary).eval_batches())
  assert set(opened) == {f'gs://bucket/en/{name}'}
  assert batch['labels'].shape == (2, 5)


def test_array_records_have_no_rows_of_paxs_and_no_epoch(tmp_path, vocabulary):
  write(tmp_path / 'c4-validation.array_record-00000-of-00001', ['abcd'])
  with pytest.raises(ValueError, match='eval_loop_num_batches'):
    make(tmp_path, vocabulary, eval_batches=None)
  with pytest.raises(ValueError, match='Give JSON or TFRecord'):
    make(tmp_path, vocabulary, append_eos=False)


def test_training_reads_every_document_and_goes_on_where_it_was(
  tmp_path, vocabulary
):
  documents = ['abcd', 'ba', 'ddd', 'c', 'abab']
  write(tmp_path / 'c4-train.array_record-00000-of-00001', documents)

  def read(source):
    return next(source)['labels']

  source = make(tmp_path, vocabulary, is_training=True, length=4)
  first = [read(source) for _ in range(3)]
  state = source.get_state()
  after = [read(source) for _ in range(3)]
  # An epoch has 19 tokens, and the first 19 are all of them.
  tokenizer = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
  tokens = np.concatenate(first).ravel()[:19]
  expected = [t for x in documents for t in [*tokenizer.encode(x), 1]]
  assert sorted(tokens) == sorted(expected)

  other = make(tmp_path, vocabulary, is_training=True, length=4)
  other.set_state(state)
  np.testing.assert_array_equal([read(other) for _ in range(3)], after)


def test_json_goes_through_seqio(tmp_path, vocabulary):
  pytest.importorskip('seqio')
  documents = {'train': 40 * ['abcd'], 'validation': 40 * ['ba']}
  for split, texts in documents.items():
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts)
    (tmp_path / f'c4-{split}.00000-of-00001.json').write_text(lines)
  tokenizer = lm_input.tokenization.load_tokenizer(vocabulary)
  for is_training, split in ((True, 'train'), (False, 'validation')):
    source = lm_input.c4_input(
      data_dir=str(tmp_path),
      vocabulary=vocabulary,
      batch_size=2,
      length=16,
      vocab_size=7,
      is_training=is_training,
      eval_batches=3,
    )
    batch = source.get_next()
    found = {k: (x.shape[1:], x.dtype.name) for k, x in batch.items()}
    assert found == lm_input.row_specs(16)
    document = [*tokenizer.encode(documents[split][0]), 1]
    # Rows are pieces of the concatenated documents, without a gap.
    rows = [(document * 17)[i : i + 16] for i in range(len(document))]
    assert all(row.tolist() in rows for row in batch['labels'])
    assert source.eval_loop_num_batches == (1 if is_training else 3)
  # Pax's rows have only tokens, each of which is the previous label.
  source = make(tmp_path, vocabulary, length=16, append_eos=False)
  batch = source.get_next()
  document = tokenizer.encode(documents['validation'][0]).tolist()
  rows = [(document * 17)[i : i + 16] for i in range(len(document))]
  for ids, labels in zip(batch['ids'], batch['labels'], strict=True):
    assert ids.tolist() in rows
    assert labels.tolist() == [*ids[1:].tolist(), 1]
  assert batch['weights'].tolist() == [[1] * 15 + [0]] * 2


def test_a_prompt_begins_as_the_rows_do(vocabulary):
  c4 = experiment_registry.get('C4Spmd1BAdam4Replicas')
  for append_eos, start_id in ((True, lm_input.BOS_ID), (False, None)):
    made = c4.with_constants(
      {'APPEND_EOS': append_eos, 'VOCABULARY': vocabulary}
    )
    assert made(num_devices=1).prompting().start_id == start_id


def test_what_is_missing_is_said(tmp_path, vocabulary):
  for given in ((None, vocabulary), (tmp_path, None)):
    with pytest.raises(ValueError, match=r'hf download.*data=stdlib'):
      make(*given)
  with pytest.raises(FileNotFoundError, match=r'hf download.*data=stdlib'):
    make(tmp_path, vocabulary)
  with pytest.raises(FileNotFoundError, match='no vocabulary'):
    make(tmp_path, 'none.model')
  with pytest.raises(ValueError, match=r'VOCAB_SIZE 6; .* at least 7'):
    make(tmp_path, vocabulary, vocab_size=6)
