"""Tests of what surrounds the weights of a Hugging Face folder.

`families_test.py` compares tokens with transformers.
"""

import json
import shutil
import stat

import jax
import pytest
import tokenizers

from configs import chat
import jaxline
from jaxline import base_config
from jaxline import errors

from . import experiment
from . import families_test
from . import folder
from . import hf
from . import hf_test

CHATML = (
  '{% for m in messages %}\n  {% generation %}\n'
  "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}\n"
  '  {% endgeneration %}\n{% endfor %}\n'
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = {'role': 'user', 'content': 'x'}


def test_rare_forms_are_read_as_transformers_5_reads_them(tmp_path):
  added = {'content': '<y>', 'lstrip': True, 'special': False}
  path = hf_test.make(
    tmp_path / 'hf',
    bos_token={'__type': 'AddedToken', 'content': '<|endoftext|>'},
    eos_token='<x>',  # It is not in the tokenizer.json.
    added_tokens_decoder={'259': added},
    map={'eos_token': '<z>'},  # Not read, unlike in old folders.
    chat_template='not read if there is a file',
    jinja='{{ bos_token }}{% for m in messages %}'
    '{% if m.role == "system" %}{% continue %}{% endif %}'
    '{{ m.content }}{{ m.reasoning_content }}{{ tools | tojson(indent=1) }}'
    '{% endfor %}{{ eos_token }}',
  )
  prompts = folder.Prompts(path / 'tokenizer.json')
  messages = [USER | {'role': 'system'}, USER | {'thinking': ' so '}]
  text = prompts.render(messages, tools=[{'é': '<'}])
  assert text == '<|endoftext|>x so [\n {\n  "é": "<"\n }\n]<x>'
  ids = prompts.encode('Hi <y> <x>').tolist()
  assert [prompts.decode([x]) for x in ids] == ['H', 'i', '<y>', ' ', '<x>']
  assert ids[2::2] == [259, 260]
  assert prompts.stop_ids == (2, 260)


@pytest.mark.parametrize('is_file', [False, True])
def test_tools_are_read_by_their_template(is_file, tmp_path):
  texts = {'default': 'd', 'tool_use': '{{ tools[0].name }}'}
  files = {f'{folder.TEMPLATES}/{k}.jinja': x for k, x in texts.items()}
  given = [{'name': k, 'template': x} for k, x in texts.items()]
  kinds = {'chat_template': given}, {'chat_template': 'no', 'more': files}
  path = hf_test.make(tmp_path / 'hf', **kinds[is_file]) / 'tokenizer.json'
  prompts = folder.Prompts(path)
  assert prompts.decode(prompts.encode([USER])) == 'd'
  asked = {'messages': [USER], 'tools': [{'name': 'add'}]}
  assert prompts.decode(prompts.encode(asked)) == 'add'
  for wrong in ('add', [1], {}, 5):
    with pytest.raises(errors.UsageError, match='tools is '):
      prompts.encode(asked | {'tools': wrong})
  # Both templates make the tokens.
  shutil.rmtree(tmp_path / 'hf')
  given[1]['template'] = files[f'{folder.TEMPLATES}/tool_use.jinja'] = 'x'
  hf_test.make(tmp_path / 'hf', **kinds[is_file])
  assert folder.Prompts(path).identity != prompts.identity


@pytest.mark.parametrize(
  ('template', 'message'),
  [
    ("{{ raise_exception('no roles') }}", 'no roles'),
    ('{{ messages.append(1) }}', 'append'),
    ("{{ ''.__class__.__base__.__subclasses__() }}", '__class__'),
    ('{{ cycler.__init__.__globals__.os.getcwd() }}', '__init__'),
    ("{% for i in range(999) %}{{ 'x' * 999999 }}{% endfor %}", 'characters'),
    ('{% for %}', 'template'),
    ("{% include 'tokenizer.json' %}", 'loader'),
    (None, 'no chat template'),
  ],
)
def test_a_template_is_data(template, message, tmp_path):
  path = hf_test.make(tmp_path / 'hf', jinja=template)
  with pytest.raises(errors.UsageError, match=message):
    folder.Prompts(path / 'tokenizer.json').encode([USER])


def edit_decode(run, **values):
  """Changes keys of decoding in the config of a run."""
  config = json.loads((run / 'config.json').read_text())
  config['experiment_kwargs']['config']['decode'] |= values
  (run / 'config.json').write_text(json.dumps(config))


@pytest.mark.process
def test_a_tuned_run_needs_no_other(tmp_path, capsys):
  path = families_test.make('qwen2', tmp_path / 'hf')
  (path / 'custom.py').write_text('')
  run, tuned = hf_test.imported(path), tmp_path / 'tuned'
  identity = folder.Prompts(path / 'tokenizer.json').identity
  edit_decode(run, max_decode_steps=200)

  def train():
    """Makes a new run `tuned` from `run`, which is deleted."""
    cache = {'experiment_kwargs.config.cache_dir': str(tmp_path / 'cache')}
    values = {'training_steps': 1, 'eval_interval': -1, 'console': 'off'}
    values |= {'checkpoint_dir': str(tuned), 'on_config_change': 'continue'}
    jaxline.fit(None, chat.get_config(str(run)), values | cache)
    assert not [*tuned.glob('*.new')]
    shutil.rmtree(run)

  train()
  shutil.rmtree(path)
  tuned.rename(run)
  train()  # The second run is tuned from a tuned one.
  model = jaxline.load(tuned, mode='decode')
  assert model.prompts.identity == identity
  assert model.config.decode.max_decode_steps == 200
  capsys.readouterr()
  assert hf.main(['export', str(tuned), str(tmp_path / 'out')]) == 0
  assert 'Not in the export: custom.py' in capsys.readouterr().out
  assert (tmp_path / 'out' / 'tokenizer_config.json').exists()
  spec = '/gone/tokenizer.json#x'
  found = experiment.find_tokenizer(spec, None, str(run), f'{tuned}:1')
  assert found == f'{tuned}/{folder.NAME}/tokenizer.json#x'


@pytest.mark.parametrize('stops', [None, [3]])
def test_a_folder_comes_out_as_it_went_in(stops, tmp_path, capsys):
  source, out = tmp_path / 'snapshots' / 'hf', tmp_path / 'out'
  hf_test.make(source, size=61, jinja=CHATML, map={'bos_token': '<|im_start|>'})
  (source / folder.TEMPLATES).mkdir()
  generation = {'eos_token_id': [63, 61], 'temperature': 0.7}
  given = {
    'generation_config.json': json.dumps(generation),
    f'{folder.TEMPLATES}/rag.jinja': 'x',
    'added_tokens.json': '{}',
    'LICENSE': 'free',
  }
  refused = {'custom.py': 'raise', 'pytorch_model.bin': 'pickle'}
  for name, text in {**given, **refused}.items():
    (source / name).write_text(text)
  (source / 'linked.md').symlink_to('/etc/passwd')
  # As in the cache of Hugging Face.
  (tmp_path / 'blobs').mkdir()
  blob = (source / 'LICENSE').rename(tmp_path / 'blobs' / 'x')
  (source / 'LICENSE').symlink_to(blob)
  run = hf_test.imported(source)
  config = base_config.recorded_config(run).experiment_kwargs.config
  assert tuple(config.decode.stop_ids) == (63, 61)
  if stops:
    edit_decode(run, stop_ids=stops)
  sources = {x.name: x.read_bytes() for x in source.glob('*.js*')}
  shutil.rmtree(source)
  assert hf.main(['export', str(run), str(out)]) == 0
  assert 'custom.py, linked.md, pytorch_model.bin' in capsys.readouterr().out
  files = [x for x in out.rglob('*') if x.is_file()]
  assert len({stat.S_IMODE(x.stat().st_mode) for x in files}) == 1
  names = {x.relative_to(out).as_posix() for x in files}
  weights = {'model.safetensors', 'model.safetensors.index.json'}
  assert names == {*given, *sources, folder.TEMPLATE, *weights}
  for name in sources.keys() - {'config.json', 'generation_config.json'}:
    assert (out / name).read_bytes() == sources[name], name
  assert (out / folder.TEMPLATE).read_text() == CHATML
  want = generation | ({'eos_token_id': stops} if stops else {})
  assert folder.read_json(out, 'generation_config.json') == want
  config = folder.read_json(out, 'config.json')
  assert config['eos_token_id'] == (stops or [2])
  assert (config['bos_token_id'], config['pad_token_id']) == (1, 0)


def test_a_model_without_a_row_of_its_tokenizer(tmp_path):
  path = hf_test.make(
    tmp_path / 'hf', size=61, eos_token='<|im_end|>', jinja=CHATML
  )
  library = tokenizers.Tokenizer.from_file(str(path / 'tokenizer.json'))
  library.add_tokens(['<x>'])
  library.save(str(path / 'tokenizer.json'))
  run = hf_test.imported(path)
  model = jaxline.load(run, mode='decode')
  # The ids are the characters from '!' to ']'; others have none.
  assert model.encode_prompt('<|im_start|>!').tolist() == [62, 0]
  # In a corpus no name is special.
  assert 62 not in model.tokenizer.encode('<|im_start|>!')
  messages = [{'role': '!', 'content': '"'}]
  assert model.encode_prompt(messages).tolist()[:4] == [62, 0, 1, 63]
  chat = {'experiment_kwargs.config.prompt_format': 'chat'}
  ids = jaxline.load(run, chat, mode='decode').encode_prompt('!')
  assert ids.tolist() == [62, 0, 63, 62]
  with pytest.raises(errors.UsageError, match=r"'<x>' has token 64"):
    model.decode(['!', '<x>'], jax.random.key(0))
  (tmp_path / '99.txt').write_text('! <x>')
  with pytest.raises(errors.UsageError, match=r'99.txt has token 64'):
    hf_test.tuned(run, tmp_path)


@pytest.mark.parametrize(
  ('name', 'content'),
  [
    ('generation_config.json', '{"eos_token_id": "2"}'),
    ('generation_config.json', '[1]'),
    ('tokenizer_config.json', '{"added_tokens_decoder": {"x": 1}}'),
    ('special_tokens_map.json', '{'),
    ('tokenizer_config.json', '{"chat_template": [{"template": "x"}]}'),
    ('tokenizer_config.json', '{"chat_template": {"default": [1]}}'),
    ('tokenizer_config.json', '{"chat_template": "\\ud800"}'),
    ('chat_template.jinja', b'\xff'),
    ('chat_template.jinja', '{% for %}'),
    ('additional_chat_templates/tool_use.jinja', '{% for %}'),
    ('config.json', '{'),
    ('config.json', {'hidden_size': '64'}),
  ],
)
def test_a_file_that_cannot_be_read_is_named(name, content, tmp_path):
  path = hf_test.make(tmp_path / 'hf', size=61)
  if isinstance(content, dict):
    content = json.dumps(folder.read_json(path, name) | content)
  (path / name).parent.mkdir(exist_ok=True)
  raw = content if isinstance(content, bytes) else content.encode()
  (path / name).write_bytes(raw)
  with pytest.raises(errors.UsageError) as raised:
    # A template is not needed before a chat.
    if 'template' in f'{name}{content}':
      asked = {'messages': [USER], 'tools': [{'name': 'add'}]}
      folder.Prompts(path / 'tokenizer.json').encode(asked)
    else:
      hf.import_model(path, tmp_path / 'run')
  assert str(path) in str(raised.value)
  assert name in str(raised.value)
  assert not (tmp_path / 'run').exists()
