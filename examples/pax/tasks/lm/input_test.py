"""Tests of the language models' data: rows of C4, and missing files."""

import json

from etils import epath
from etils.epath import gpath
import pytest

from examples.pax import experiment_registry
from examples.pax.tasks.lm import input as lm_input

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


def test_files_of_a_bucket_are_found(vocabulary, monkeypatch):
  given = {}
  monkeypatch.setattr(lm_input.c4, 'c4_task', lambda **kw: given.update(kw))
  monkeypatch.setattr(lm_input.c4, 'c4_input', lambda *args, **kwargs: None)
  monkeypatch.setattr(gpath, '_is_tf_installed', lambda: False)
  name = 'c4-validation.00000-of-00008.json.gz'
  with epath.testing.mock_epath(
    glob=lambda _, path: [path.replace('.*', name[len('c4-validation') :])]
  ):
    make('gs://bucket/en', vocabulary)
  assert given['eval_files'] == [f'gs://bucket/en/{name}']


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
