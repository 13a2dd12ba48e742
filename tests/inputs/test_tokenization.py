"""Tests of tokenizers, with models that are trained here on Python's source."""

import hashlib
import io
import itertools
import json
import pathlib
import pickle
import sysconfig

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxline.inputs import text as text_input
from jaxline.inputs import text_files
from jaxline.inputs import token_cache
from jaxline.inputs import tokenization

STDLIB = pathlib.Path(sysconfig.get_path('stdlib'))
FILES = ('bisect.py', 'calendar.py')
HARD = (
  'plain words',
  'def f(x):\n    return x  # naïve ∑ 🙂\n',
  '',
  '\0',
  'the name <|endoftext|> of a token, and <s> and </s> and [BOS] too',
)


def lines():
  for name in FILES:
    for line in (STDLIB / name).read_text('utf-8').splitlines():
      if line.strip():
        yield line


def train_sentencepiece(path: pathlib.Path, **kwargs) -> pathlib.Path:
  sentencepiece = pytest.importorskip('sentencepiece')
  model = io.BytesIO()
  options = {'model_type': 'bpe', 'byte_fallback': True, 'vocab_size': 400}
  # Text comes back as it was.
  options |= {'normalization_rule_name': 'identity', 'add_dummy_prefix': False}
  options |= {'remove_extra_whitespaces': False, 'minloglevel': 2}
  options |= {'sentence_iterator': lines(), 'model_writer': model} | kwargs
  sentencepiece.SentencePieceTrainer.train(**options)
  path.write_bytes(model.getvalue())
  return path


def train_huggingface(path: pathlib.Path, *special: str) -> pathlib.Path:
  tokenizers = pytest.importorskip('tokenizers')
  words = tokenizers.pre_tokenizers.ByteLevel
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = words(add_prefix_space=False)
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=400,
    special_tokens=list(special),
    initial_alphabet=words.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator(lines(), trainer)
  # What some files say, and a corpus must not know of.
  model.enable_truncation(4)
  model.enable_padding(length=6)
  model.save(str(path))
  return path


@pytest.fixture(scope='module')
def huggingface_model(tmp_path_factory):
  path = tmp_path_factory.mktemp('hf') / 'tokenizer.json'
  return train_huggingface(path, '<unk>', '<|endoftext|>', '<s>')


@pytest.mark.parametrize('name', ['bytes', 'stdlib', 'huggingface'])
def test_text_comes_back_and_decoding_never_fails(cut_models, name):
  tokenizer = cut_models[name]
  texts = [*HARD, *lines()]
  batch = tokenizer.encode_batch(texts)
  for ids, example in zip(batch, texts, strict=True):
    assert (ids.dtype, ids.ndim) == (np.int32, 1)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    # Not even its name is the document token.
    assert tokenizer.document_id not in ids
    framed = [tokenizer.document_id, *ids, tokenizer.document_id]
    assert tokenizer.decode(framed) == tokenizer.decode(ids) == example
  for ids, example in zip(batch, HARD, strict=False):
    for given in example, example.encode():
      np.testing.assert_array_equal(tokenizer.encode(given), ids)
  sizes = [*map(len, batch)]
  if name != 'bytes':
    assert sum(sizes) < 0.8 * sum(map(len, texts))
    # Longer than the file's own limit, not filled up to its own length.
    assert max(sizes) > 6
    assert 1 in sizes
  a, b = (tokenizer.encode(x).tolist() for x in 'ab')
  foreign = [-1, tokenizer.vocab_size, 2**40]
  assert tokenizer.decode([*a, *foreign, *b]) == 'a\ufffd\ufffd\ufffdb'
  assert tokenizer.decode([]) == ''
  assert isinstance(tokenizer.decode(range(tokenizer.vocab_size)), str)
  assert tokenizer.decode(tokenizer.encode(b'a\xff')) == 'a\ufffd'


BITS = [
  '\n', '\n\n', '\r\n', ' ', '    ', '\t', '#', ')', ':', '"""', 'def ', 'a',
  '.',  '0', '\0', '\xa0', '\u2028', '\u2581', '\ufffd', 'é', '字', '🙂',
  'e\u0301',
  "'s", '<s>', '<|endoftext|>', b'\xff', b'\xe2', b'\xf0\x9f'
]  # fmt: skip


NAMES = 'bytes', 'stdlib', 'space', 'huggingface', 'Unigram', 'WordPiece'


@pytest.fixture(scope='module')
def cut_models(huggingface_model, tmp_path_factory):
  folder = tmp_path_factory.mktemp('cut')
  # No piece has two spaces.
  single = (' '.join(line.split()) for line in lines())
  options = {'add_dummy_prefix': True, 'sentence_iterator': single}
  space = train_sentencepiece(folder / 'a.model', **options)
  specs = {'space': space, 'huggingface': huggingface_model}
  tokenizers = pytest.importorskip('tokenizers')
  normalizers, words = tokenizers.normalizers, tokenizers.pre_tokenizers
  spaces = normalizers.Replace(tokenizers.Regex(' {2,}'), ' ')
  unknown = {'unk_token': '[UNK]'}
  for name, normalizer, word, more in (
    ('Unigram', [normalizers.NFKC(), spaces], words.Metaspace(), unknown),
    ('WordPiece', [normalizers.BertNormalizer()], words.BertPreTokenizer(), {}),
  ):
    model = tokenizers.Tokenizer(getattr(tokenizers.models, name)())
    model.normalizer = normalizers.Sequence(normalizer)
    model.pre_tokenizer = words.Sequence([words.Digits(), word])
    more |= {'special_tokens': ['[UNK]', '<s>'], 'show_progress': False}
    trainer = getattr(tokenizers.trainers, f'{name}Trainer')
    model.train_from_iterator(lines(), trainer(vocab_size=400, **more))
    specs[name] = folder / f'{name}.json'
    model.save(str(specs[name]))
  return {x: tokenization.load_tokenizer(specs.get(x, x)) for x in NAMES}


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.lists(st.sampled_from(BITS) | st.binary(max_size=3)))
@hypothesis.example(['a', ' ', ')', '    ', 'a', ' '])
@pytest.mark.parametrize('name', NAMES)
def test_a_cut_text_has_the_same_tokens(cut_models, name, bits):
  tokenizer = cut_models[name]
  text = b''.join(x.encode() if isinstance(x, str) else x for x in bits)
  whole = tokenizer.encode(text)
  cuts = tokenizer.find_cuts(text).tolist()
  assert cuts == sorted({*cuts} & {*range(1, len(text))})
  for chosen in *([cut] for cut in cuts), cuts:
    places = itertools.pairwise([0, *chosen, len(text)])
    parts = [text[first:end] for first, end in places]
    are_first = [True] + [False] * len(chosen)
    found = np.concatenate(tokenizer.encode_parts(parts, are_first))
    np.testing.assert_array_equal(found, whole, repr(parts))


def test_a_long_text_is_cut_unless_a_model_looks_at_the_whole(
  cut_models, tmp_path, monkeypatch
):
  monkeypatch.setattr(text_files, '_PIECE_BYTES', 2**11)
  monkeypatch.setattr(token_cache, '_BATCH_BYTES', 2**13)
  source = '\n'.join(lines()).encode()
  for name in 'ab':
    (tmp_path / name).write_bytes(source)
  for name, tokenizer in cut_models.items():
    places = [0, *tokenizer.find_cuts(source), len(source)]
    assert np.diff(places).max() < 2000, name
    tokens = [tokenizer.document_id, *tokenizer.encode(source)]
    for split in text_input.load_corpus(tmp_path, tokenizer=tokenizer):
      np.testing.assert_array_equal(split.tokens, tokens, name)
  for options in (
    {'model_type': 'unigram'},
    {'byte_fallback': False},
    {'remove_extra_whitespaces': True},
    {'normalization_rule_name': 'nmt_nfkc'},
  ):
    path = train_sentencepiece(tmp_path / 'a.model', **options)
    cuts = tokenization.load_tokenizer(path).find_cuts(b'a\nb c')
    assert not cuts.size, options


def test_json_files_that_look_across_words_cut_nothing(
  huggingface_model, tmp_path
):
  spec = json.loads(huggingface_model.read_bytes())
  space = {'type': 'Metaspace', 'replacement': '_', 'split': False}
  pattern = {'type': 'Split', 'pattern': {'Regex': 'x a'}, 'invert': False}
  strip = {'type': 'Strip', 'strip_left': True, 'strip_right': True}
  other = {'type': 'Replace', 'pattern': {'String': 'x a'}, 'content': 'y'}
  for change in (
    {'pre_tokenizer': None},
    {'pre_tokenizer': space | {'prepend_scheme': 'always'}},
    {'pre_tokenizer': pattern | {'behavior': 'Isolated'}},
    {'normalizer': strip},
    {'normalizer': other},
  ):
    (tmp_path / 'a.json').write_text(json.dumps(spec | change))
    tokenizer = tokenization.load_tokenizer(tmp_path / 'a.json')
    assert not tokenizer.find_cuts(b'x a').size, change


def test_identities(huggingface_model, tmp_path):
  stdlib = pathlib.Path(tokenization.__file__).with_name('stdlib.model')
  for spec, path in ('stdlib', stdlib), (huggingface_model,) * 2:
    tokenizer = tokenization.load_tokenizer(spec)
    assert tokenization.load_tokenizer(tokenizer) is tokenizer
    assert hashlib.sha256(path.read_bytes()).hexdigest() in tokenizer.identity
    # A worker process gets a pickle.
    other = pickle.loads(pickle.dumps(tokenizer))
    np.testing.assert_array_equal(other.encode('def'), tokenizer.encode('def'))
    # Not where it lies.
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    assert tokenization.load_tokenizer(str(copy)).identity == tokenizer.identity


def test_document_token_of_sentencepiece(tmp_path):
  path = train_sentencepiece(tmp_path / 'a.model')
  model, end = (
    tokenization.load_tokenizer(f'{path}{x}') for x in ('', '#</s>')
  )
  assert (model.document_id, end.document_id) == (1, 2)  # <s>, </s>
  assert end.identity != model.identity
  path = train_sentencepiece(tmp_path / 'eos.model', bos_id=-1)
  assert tokenization.load_tokenizer(path).document_id == 2
  path = train_sentencepiece(
    tmp_path / 'own.model', bos_id=-1, eos_id=-1, control_symbols=['<doc>']
  )
  own = tokenization.load_tokenizer(f'{path}#<doc>')
  assert own.document_id not in own.encode('<doc>')
  for spec in path, f'{path}#the':  # Text is encoded to 'the'.
    with pytest.raises(ValueError, match='<doc>'):
      tokenization.load_tokenizer(spec)


def test_document_token_of_huggingface(huggingface_model, tmp_path):
  # The beginning before the end.
  assert tokenization.load_tokenizer(huggingface_model).document_id == 2
  named = tokenization.load_tokenizer(f'{huggingface_model}#<|endoftext|>')
  assert named.document_id == 1
  assert named.decode([1, 2]) == '<s>'
  path = train_huggingface(tmp_path / 'a.json', '<#one#>', '<two>')
  assert tokenization.load_tokenizer(f'{path}#<#one#>').document_id == 0
  tokenizers = pytest.importorskip('tokenizers')
  model = tokenizers.Tokenizer.from_file(str(path))
  model.add_tokens(['<s>'])  # Not special: text is encoded to it.
  model.save(str(path))
  for spec in path, f'{path}#e', f'{path}#<s>':
    with pytest.raises(ValueError, match='<two>'):
      tokenization.load_tokenizer(spec)


def test_wrong_specs(tmp_path):
  for spec in 'byte', 'my.txt', '', str(tmp_path):
    with pytest.raises(ValueError, match="'bytes', 'stdlib'"):
      tokenization.load_tokenizer(spec)
  with pytest.raises(FileNotFoundError, match=r'no\.model'):
    tokenization.load_tokenizer(tmp_path / 'no.model#<s>')
  for library, name in ('sentencepiece', 'a.model'), ('tokenizers', 'a.json'):
    pytest.importorskip(library)
    for data in b'', b'nonsense', b'{}':
      (tmp_path / name).write_bytes(data)
      with pytest.raises(ValueError, match=name):
        tokenization.load_tokenizer(tmp_path / name)
