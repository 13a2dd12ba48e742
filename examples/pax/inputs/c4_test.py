"""Tests of C4: its rows, and what is said if files are missing or wrong."""

import gzip
import json

import numpy as np
import pytest

from examples.pax import experiment_registry
from examples.pax.inputs import c4

sentencepiece = pytest.importorskip('sentencepiece')

C4 = experiment_registry.get('C4Spmd1BAdam4Replicas').with_constants(
  {'MAX_SEQ_LEN': 16}
)
# All are different.
DOCUMENTS = ['abc'[i % 3] * (1 + i // 3) + 'd' for i in range(30)]
TOKENS = {'</s>': 1, 'a': 3, 'b': 4, 'c': 5, 'd': 6}


@pytest.fixture(scope='module')
def vocabulary(tmp_path_factory):
  """A SentencePiece model of characters, with 0 for padding, 1 for the end."""
  prefix = tmp_path_factory.mktemp('vocabulary') / 'chars'
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['aaaabbbccd'] * 10),
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


def write(folder, split, kind):
  """Writes 3 files of 10 documents each."""
  for i in range(3):
    documents = [{'text': t, 'url': 'u'} for t in DOCUMENTS[10 * i :][:10]]
    path = folder / f'c4-{split}.{kind}-0000{i}-of-00003'
    if kind == 'json':
      lines = ''.join(json.dumps(document) + '\n' for document in documents)
      with gzip.open(f'{path}.json.gz', 'wt') as f:
        f.write(lines)
      continue
    tf = pytest.importorskip('tensorflow')
    with tf.io.TFRecordWriter(str(path)) as writer:
      for document in documents:
        features = {
          key: tf.train.Feature(
            bytes_list=tf.train.BytesList(value=[value.encode()])
          )
          for key, value in document.items()
        }
        features = tf.train.Features(feature=features)
        writer.write(tf.train.Example(features=features).SerializeToString())


def make(data_dir, vocabulary, **fields):
  return c4.c4_input(
    **{
      'data_dir': data_dir and str(data_dir),
      'vocabulary': vocabulary,
      'batch_size': 2,
      'length': 16,
      'vocab_size': 7,
      'is_training': False,
    }
    | fields
  )


def tokens_of(documents):
  return [[TOKENS[letter] for letter in text] for text in documents]


@pytest.mark.parametrize(('kind', 'hosts'), [('json', 1), ('tfrecord', 2)])
def test_an_epoch_has_each_token_once(tmp_path, vocabulary, kind, hosts):
  pytest.importorskip('seqio')
  write(tmp_path, 'train', kind)
  found = []
  for host in range(hosts):
    source = make(
      tmp_path,
      vocabulary,
      is_training=True,
      documents_at_once=4,
      repeat=False,
      num_infeed_hosts=hosts,
      infeed_host_index=host,
    )
    assert source.seed() == 9876
    for batch in source:
      shapes = {k: (x.shape[1:], x.dtype.name) for k, x in batch.items()}
      assert shapes == C4(num_devices=1).input_specs()
      np.testing.assert_array_equal(batch['weights'], batch['labels'] != 0)
      found += batch['labels'][batch['weights'] == 1].tolist()
  expected = [t for tokens in tokens_of(DOCUMENTS) for t in [*tokens, 1]]
  assert sorted(found) == sorted(expected)


@pytest.mark.parametrize('append_eos', [True, False])
def test_rows_are_documents_one_after_the_other(
  tmp_path, vocabulary, append_eos
):
  pytest.importorskip('seqio')
  write(tmp_path, 'validation', 'json')
  source = make(tmp_path, vocabulary, batch_size=1, append_eos=append_eos)
  batches = list(source.eval_batches())
  # All rows are full except for the end of the last group.
  assert all(b['segment_ids'].all() for b in batches[:-1])
  key = 'labels' if append_eos else 'ids'
  ids = np.concatenate([b[key][0][b['segment_ids'][0] > 0] for b in batches])
  ends = np.flatnonzero(ids == TOKENS['</s>' if append_eos else 'd']) + 1
  whole = [[*d, 1] if append_eos else d for d in tokens_of(DOCUMENTS)]
  found = [part.tolist() for part in np.split(ids, ends[:-1])]
  assert sorted(found) == sorted(whole)
  first = {key: x[0].tolist() for key, x in batches[0].items()}
  assert first['ids'][1:] == first['labels'][:-1]
  # Pax's rows have only tokens: none is before them, and the last has no label.
  assert first['weights'] == [1] * 15 + [1 if append_eos else 0]
  if append_eos:
    assert first['ids'][0] == c4.BOS_ID
  # A prompt begins as the rows do.
  constants = {'APPEND_EOS': append_eos, 'VOCABULARY': vocabulary}
  prompting = C4.with_constants(constants)(num_devices=1).prompting()
  assert prompting.start_id == (c4.BOS_ID if append_eos else None)
  rolling = make(tmp_path, vocabulary, eval_batches=3)
  assert rolling.eval_loop_num_batches == 3
  assert not rolling.reset_for_eval


def test_a_state_of_other_rows_is_refused(tmp_path, vocabulary):
  pytest.importorskip('seqio')
  write(tmp_path, 'validation', 'json')
  state = make(tmp_path, vocabulary, documents_at_once=4).get_state()
  for fields, message in (
    ({'documents_at_once': 8}, r'data_version is .*model_sha256=.*at_once=4'),
    ({'data_version': 'mine'}, "'mine vocabulary="),
    ({'append_eos': False}, 'append_eos=False'),
  ):
    with pytest.raises(ValueError, match=message):
      make(tmp_path, vocabulary, **{'documents_at_once': 4} | fields).set_state(
        state
      )


def test_what_is_missing_or_wrong_is_said(tmp_path, vocabulary):
  for given in ((None, vocabulary), (tmp_path, None)):
    with pytest.raises(ValueError, match=r'hf download.*data=stdlib'):
      make(*given)
  with pytest.raises(FileNotFoundError, match=r'hf download.*data=stdlib'):
    make(tmp_path, vocabulary)
  with pytest.raises(FileNotFoundError, match='no vocabulary'):
    make(tmp_path, 'none.model')
  with pytest.raises(ValueError, match=r'VOCAB_SIZE 6; .* at least 7'):
    make(tmp_path, vocabulary, vocab_size=6)
  (tmp_path / 'c4-validation.tfrecord').touch()
  path = tmp_path / 'c4-validation.json'
  path.write_text('{"text": "good"}\n{"texts": "bad"}\n')
  with pytest.raises(ValueError, match='expected files of a single kind'):
    make(tmp_path, vocabulary)
  pytest.importorskip('seqio')
  (tmp_path / 'c4-validation.tfrecord').unlink()
  with pytest.raises(Exception, match=r'\.json, line 2: expected'):
    next(make(tmp_path, vocabulary))
