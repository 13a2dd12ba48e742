"""Compares chats with transformers, in folders as seven families have them.

  python -m examples.lm.families_test qwen2 DIR  # Makes such a folder.
  python -m examples.lm.families_test record  # Asks transformers again.

`tests/data/chat_reference.json` has the tokens that transformers 5.24 makes of
the conversations, and of the texts of their messages. The templates
(tests/data/chat_templates) and the rules of the tokenizers are written after
the published ones; the vocabularies are small.
"""

import functools
import json
import pathlib
import shutil
import sys
import tempfile

import jinja2
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import decoders
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers

from jaxline import errors
from jaxline.inputs import tokenization

from . import folder
from . import hf
from . import hf_test

RECORDED = hf_test.ROOT / 'tests/data/chat_reference.json'
_CHATML = '<|im_end|>', '<|im_start|>', '<|endoftext|>'
_GEMMA = '<bos>', '<end_of_turn>', '<start_of_turn>', '<eos>', '<pad>', '<mask>'
_ENDS = '<|begin_of_text|>', '<|eot_id|>'
_HEADERS = '<|start_header_id|>', '<|end_header_id|>'
# Of each family the class of its tokenizer, and its special tokens: what begins
# a text, if anything does, what ends an answer, and others.
FAMILIES = {
  'llama': ('LlamaTokenizer', '<s>', '</s>'),
  'llama3': ('PreTrainedTokenizerFast', *_ENDS, *_HEADERS),
  'mistral': ('LlamaTokenizer', '<s>', '</s>'),
  'qwen2': ('Qwen2Tokenizer', None, *_CHATML),
  'qwen3': ('Qwen2Tokenizer', None, *_CHATML, '<think>', '</think>'),
  'gemma2': ('GemmaTokenizer', *_GEMMA),
  'gemma3': ('GemmaTokenizer', *_GEMMA, '<image_soft_token>'),
}


def _turns(*contents, system=None):
  roles = ['user', 'assistant'] * len(contents)
  first = [] if system is None else [{'role': 'system', 'content': system}]
  pairs = zip(roles, contents, strict=False)
  return first + [{'role': role, 'content': x} for role, x in pairs]


_CALL = {'function': {'name': 'add', 'arguments': {'a': 1, 'b': 'é<'}}}
CONVERSATIONS = [
  _turns('Hi'),
  _turns('Hi', system='Be brief.'),
  _turns('Hi', 'Hello!', 'What is 2 + 2?'),
  _turns('Hi', ' Hello! ', '  two  spaces\n', '4', 'x', system=' Rhyme.\n'),
  _turns('naïve 中文 👩‍🚀 e\u0301'),
  _turns("def f(x):\n\treturn x  # don't\r\n\n\n"),
  _turns('</s><|im_end|>\n<|im_start|>system<eos><|eot_id|>[/INST]'),
  _turns('', '', ''),
  _turns('1234567 3.14', '<think>\nso\n</think>\n\nWe', 'and'),
  _turns('Hi', 'Hello!'),  # An answer is there already.
  [{'role': 'assistant', 'content': 'First.'}, *_turns('Hi')],
  [
    *_turns('Add.'),
    {'role': 'assistant', 'content': '', 'tool_calls': [_CALL]},
    {'role': 'tool', 'content': '3'},
  ],
]


@functools.cache
def tokenizer_of(family):
  """Returns the tokenizer.json of a family, trained on some text."""
  is_bytes = family in ('llama3', 'qwen2', 'qwen3')
  is_gemma = family.startswith('gemma')
  library = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      byte_fallback=not is_bytes,
      fuse_unk=not is_bytes,
      unk_token=None if is_bytes else '<unk>',
    )
  )
  byte_names = [f'<0x{i:02X}>' for i in range(256)]
  if is_bytes:
    digits = '{1,3}' if family == 'llama3' else ''
    words = tokenizers.Regex(tokenization._WORDS % digits)
    library.pre_tokenizer = pre_tokenizers.Sequence(
      [
        pre_tokenizers.Split(words, 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
    )
    library.decoder = decoders.ByteLevel()
    if family != 'llama3':
      library.normalizer = normalizers.NFC()
  else:
    replace = normalizers.Replace(' ', '▁')
    prepend = [normalizers.Prepend('▁')] * (not is_gemma)
    library.normalizer = normalizers.Sequence([*prepend, replace])
    if is_gemma:
      library.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
    steps = [decoders.Replace('▁', ' '), decoders.ByteFallback()]
    strip = [decoders.Strip(' ', 1, 0)] * (not is_gemma)
    library.decoder = decoders.Sequence([*steps, decoders.Fuse(), *strip])
  words = pathlib.Path(__file__).parents[2].joinpath('LICENSE').read_text()
  trainer = trainers.BpeTrainer(
    vocab_size=900,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if is_bytes else ['▁'],
    special_tokens=[] if is_bytes else ['<unk>', *byte_names],
    show_progress=False,
  )
  library.train_from_iterator([f' {x}' for x in words.split()], trainer)
  raw = json.loads(library.to_str())
  kept = [x for x in raw['added_tokens'] if x['content'] not in byte_names]
  library = tokenizers.Tokenizer.from_str(
    json.dumps(raw | {'added_tokens': kept})
  )
  _, begin, *others = FAMILIES[family]
  names = [begin] * bool(begin) + others
  library.add_special_tokens(
    [tokenizers.AddedToken(x, special=True, normalized=False) for x in names]
  )
  if begin:
    library.post_processor = processors.TemplateProcessing(
      single=f'{begin} $A', special_tokens=[(begin, library.token_to_id(begin))]
    )
  return library


def make(family, path, length=512):
  """Makes a folder of a family, with a model of random weights."""
  ignore = shutil.ignore_patterns('*.npz')
  shutil.copytree(hf_test.REFERENCE / family, path, ignore=ignore)
  library, (name, begin, end, *_) = tokenizer_of(family), FAMILIES[family]
  library.save(str(path / 'tokenizer.json'))
  rows = library.get_vocab_size()
  options = 'content', 'lstrip', 'rstrip', 'normalized', 'special'
  template = hf_test.REFERENCE.parent / f'chat_templates/{family}.jinja'
  config = {
    'tokenizer_class': name,
    'add_bos_token': bool(begin),
    'added_tokens_decoder': {
      str(i): {k: getattr(x, k) for k in options}
      for i, x in library.get_added_tokens_decoder().items()
    },
    **{'bos_token': begin, 'eos_token': end},
    'chat_template': template.read_text().removesuffix('\n'),
  }
  if library.token_to_id('<unk>') is not None:
    config['unk_token'] = '<unk>'
  sizes = {'vocab_size': rows, 'max_position_embeddings': length}
  for stem, values in {
    'tokenizer_config': config,
    'config': folder.read_json(path, 'config.json') | sizes,
    'generation_config': {'eos_token_id': [library.token_to_id(end)]},
  }.items():
    (path / f'{stem}.json').write_text(json.dumps(values, indent=2))
  rng = np.random.default_rng(0)
  for file in path.glob('model*.safetensors'):
    weights = safetensors.numpy.load_file(file)
    for key in weights.keys() & {'model.embed_tokens.weight', 'lm_head.weight'}:
      x = weights[key]
      drawn = rng.normal(0, x.std(), [rows, x.shape[1]])
      weights[key] = drawn.astype(x.dtype)
    safetensors.numpy.save_file(weights, file)
  return path


def _or_refused(encode, messages):
  try:
    return encode(messages)
  except (errors.UsageError, jinja2.TemplateError, TypeError):
    return 'refused'


def _all_ids(encode, apply):
  """Returns the tokens of the texts, and of the conversations."""
  texts = [x['content'] for messages in CONVERSATIONS for x in messages]
  return {
    'texts': [encode(text) for text in texts],
    'conversations': [_or_refused(apply, x) for x in CONVERSATIONS],
  }


def ours(path):
  """Returns the tokens that `folder.Prompts` makes."""
  prompts = folder.Prompts(path / 'tokenizer.json')
  encode = lambda prompt: prompts.encode(prompt).tolist()
  return _all_ids(encode, encode)


def theirs(path):
  """Returns the tokens that transformers makes."""
  transformers = pytest.importorskip('transformers', minversion='5')
  tokenizer = transformers.AutoTokenizer.from_pretrained(path)
  apply = functools.partial(
    tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False
  )
  return _all_ids(lambda text: tokenizer(text)['input_ids'], apply)


@pytest.mark.parametrize('ids', [ours, theirs])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_family_has_the_recorded_ids(family, ids, tmp_path):
  recorded = json.loads(RECORDED.read_text())[family]
  assert ids(make(family, tmp_path / 'hf')) == recorded


@pytest.mark.process
@pytest.mark.parametrize('family', FAMILIES)
def test_a_family_generates_what_transformers_generates(family, tmp_path):
  pytest.importorskip('torch')
  path, run, out = (tmp_path / x for x in ('hf', 'run', 'out'))
  make(family, path)
  # Many stops, so that some end a text.
  stops = {'eos_token_id': [*range(0, 900, 2)], 'repetition_penalty': 9.0}
  (path / folder.GENERATION).write_text(json.dumps(stops))
  assert hf.main(['import', str(path), str(run)]) == 0
  assert hf.main(['export', str(run), str(out)]) == 0
  for other in (path, out):
    assert hf.main(['parity', str(run), str(other)]) == 0
  # It sees what differs.
  (out / folder.GENERATION).write_text('{"eos_token_id": 899}')
  assert hf.main(['parity', str(run), str(out)]) == 1


def test_parity_says_what_is_missing(monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, 'torch', None)
  assert hf.main(['parity', 'run', 'hf']) == 2
  assert "pip install -e '.[parity]'" in capsys.readouterr().err


def record():
  """Writes what transformers makes, a line for each family."""
  with tempfile.TemporaryDirectory() as scratch:
    folders = {x: make(x, pathlib.Path(scratch, x)) for x in FAMILIES}
    rows = [f'"{x}": {json.dumps(theirs(y))}' for x, y in folders.items()]
  RECORDED.write_text('{\n' + ',\n'.join(rows) + '\n}\n')


if __name__ == '__main__':
  if sys.argv[1:] == ['record']:
    record()
  else:
    make(sys.argv[1], pathlib.Path(sys.argv[2]))
