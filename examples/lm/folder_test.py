"""Tests of what surrounds the weights of a Hugging Face folder."""

import json
import os
import pathlib
import shutil
import stat

import jax
import pytest
import tokenizers
from tokenizers import pre_tokenizers
from tokenizers import processors

import jaxline
from jaxline import errors

from . import folder
from . import hf
from . import hf_test

CHATML = (
  '{% for m in messages %}\n  {% generation %}\n'
  "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}\n"
  '  {% endgeneration %}\n{% endfor %}\n'
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As the templates of seven families do it: BOS, roles in turns, loops with
# `break`, namespaces, JSON of what a tool gets, reasoning.
LLAMA = (
  '{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}'
  "{% if m.role == 'system' %}{% continue %}{% endif %}"
  "{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
  "{{ raise_exception('roles must alternate') }}{% endif %}"
  "{% set ns.n = ns.n + 1 %}[{{ m.role }}] {{ m['content'] | trim }}"
  '{% if m.tool_calls %}{{ m.tool_calls | tojson }}'
  '{{ m.tool_calls | tojson(indent=2) }}{% endif %}'
  '{% if m.reasoning_content %}<|im_start|>{{ m.thinking }}{% endif %}'
  '{% if m.role != "user" %}{{ eos_token }}{% endif %}{% endfor %}'
)
CALL = {'role': 'assistant', 'content': '', 'tool_calls': [{'name': 'é<&>'}]}
CONVERSATIONS = [
  [{'role': 'user', 'content': 'Hi'}],
  [
    {'role': 'system', 'content': 'Be <|im_end|>'},
    {'role': 'user', 'content': ' a\n'},
  ],
  [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'y '}],
  [{'role': 'user', 'content': 'naïve 中'}, CALL],
  [
    {'role': 'user', 'content': 'x'},
    CALL | {'thinking': 'so', 'tool_calls': None},
  ],
]
TEXTS = ['Hi <|im_start|>user\n', '<|endoftext|>', '<x> <y>', 'naïve', '']
# What varies: files, and what is put before a text.
KINDS = {
  'plain': {'chat_template': CHATML},
  'no bos': {'bos_token': None, 'add_bos_token': False, 'chat_template': CHATML},
  'bos': {'bos_token': '<|endoftext|>', 'add_bos_token': True, 'jinja': LLAMA},
  'post': {
    'bos_token': {'__type': 'AddedToken', 'content': '<|endoftext|>'},
    'eos_token': '<|im_end|>',
    'add_bos_token': False,
    'post': '<|endoftext|> $A',
    'chat_template': [
      {'name': 'tool_use', 'template': 'no'},
      {'name': 'default', 'template': LLAMA},
    ],
  },
  'both ends': {'post': '<|endoftext|> $A <|im_end|>', 'jinja': CHATML},
  'added': {
    'eos_token': '<x>',
    'added_tokens_decoder': {
      '259': {'content': '<y>', 'lstrip': True, 'special': False},
    },
    'jinja': LLAMA,
    'chat_template': CHATML,
  },
  'old': {
    'map': {'bos_token': '<x>', 'additional_special_tokens': ['<y>']},
    'chat_template': LLAMA,
  },
}  # fmt: skip


def make(path, *, reference='qwen2', post=None, jinja=None, map=None, **config):
  """Makes a folder with a byte-level tokenizer and three special tokens."""
  shutil.copytree(hf_test.REFERENCE / reference, path)
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {name: i for i, name in enumerate(alphabet)}
  library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
  library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.decoder = tokenizers.decoders.ByteLevel()
  names = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
  library.add_special_tokens(names)
  if post:
    tokens = [(x, library.token_to_id(x)) for x in names if x in post]
    library.post_processor = processors.TemplateProcessing(
      single=post, special_tokens=tokens
    )
  library.save(str(path / 'tokenizer.json'))
  config = {'tokenizer_class': 'PreTrainedTokenizerFast', **config}
  (path / 'tokenizer_config.json').write_text(json.dumps(config))
  if jinja:
    (path / 'chat_template.jinja').write_text(jinja)
  if map:
    (path / 'special_tokens_map.json').write_text(json.dumps(map))
  return path


@pytest.mark.parametrize('kind', KINDS)
def test_ids_are_those_of_transformers(kind, tmp_path):
  transformers = pytest.importorskip('transformers')
  path = make(tmp_path / 'hf', reference='llama', **KINDS[kind])
  theirs = transformers.AutoTokenizer.from_pretrained(path)
  ours = folder.Prompts(path / 'tokenizer.json')
  for text in TEXTS:
    assert ours.encode(text).tolist() == theirs(text)['input_ids']
  for messages in CONVERSATIONS:
    for ends in (True, False):
      want = theirs.apply_chat_template(
        messages, add_generation_prompt=ends, tokenize=False
      )
      assert ours.render(messages, add_generation_prompt=ends) == want
    want = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert ours.encode(messages).tolist() == want['input_ids']
