"""Tests of conversations as data, and of the training on them."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import chat
import jaxline
from jaxline import errors
from jaxline.inputs import __main__ as commands

from . import chat_data
from . import chat_training
from . import experiment
from . import families_test
from . import folder
from . import hf_test
from . import model

TINY = pathlib.Path(__file__).parent / 'tiny_chat'
SYSTEM, ASK = ({'role': x, 'content': x[0]} for x in ('system', 'user'))
ONE, TWO = ({'role': 'assistant', 'content': f' é{x}'} for x in '12')
TALK = [ASK, ONE, ASK, TWO]


def make(path, template):
  """Makes a folder with a template, whose stop is <|im_end|>."""
  hf_test.make(path, jinja=template, eos_token='<|im_end|>')
  return path / 'tokenizer.json'


def encoded(codes, row):
  """Returns the tokens of a line, and the texts that train."""
  found = codes.encode_line(json.dumps(row).encode())
  runs = np.split(found, 1 + np.flatnonzero(np.diff(found & 1)))
  return found >> 1, [codes.prompts.decode(x >> 1) for x in runs if x[0] & 1]


# What trains of each answer. Qwen 3 writes another text before the last one.
ANSWERS = {
  'qwen2': [' é1<|im_end|>', ' é2<|im_end|>'],
  'qwen3': [' é1<|im_end|>', '<think>\n\n</think>\n\n é2<|im_end|>'],
  'llama3': ['é1<|eot_id|>', 'é2<|eot_id|>'],
  'gemma2': ['é1<end_of_turn>', 'é2<end_of_turn>'],
  'mistral': [' é1</s>', ' é2</s>'],
}


@pytest.mark.parametrize('family', ANSWERS)
def test_what_the_assistant_says_trains(family, tmp_path):
  path = families_test.make(family, tmp_path / 'hf') / 'tokenizer.json'
  codes = chat_data.Codes(path, chat_data.Options())
  ids, texts = encoded(codes, {'messages': TALK})
  assert texts == ANSWERS[family]
  assert encoded(codes, {'messages': TALK[:1]})[1] == []
  # Decoding begins an answer behind the same tokens.
  before = codes.prompts.encode(TALK[:3])
  np.testing.assert_array_equal(ids[: len(before)], before)
  every = chat_data.Codes(path, chat_data.Options(train_on='all'))
  assert encoded(every, {'messages': TALK})[1] == [codes.prompts.decode(ids)]
  if family == 'qwen2':  # A greeting does not train.
    assert encoded(codes, {'messages': TALK[1:]})[1] == texts[1:]


@pytest.mark.parametrize('behind', ['', '<|im_end|>'])
def test_what_a_template_marks_trains_and_the_stop_behind_it(behind, tmp_path):
  inside = '' if behind else '<|im_end|>'
  answer = f'{{{{ m.content }}}}{inside}{{% endgeneration %}}{behind}'
  path = make(
    tmp_path / 'hf',
    '{% for m in messages %}{{ m.role }} {% if m.role == "assistant" %}'
    f'{{% generation %}}{answer}{{% else %}}{{{{ m.content }}}}{{% endif %}}'
    '<|im_start|>{% endfor %}',
  )
  codes = chat_data.Codes(path, chat_data.Options())
  for messages in (TALK, TALK[1:]):  # A greeting trains, too.
    assert encoded(codes, {'messages': messages})[1] == ANSWERS['qwen2']


ALPACA = {'user': 'instruction,input', 'assistant': 'output'}


@pytest.mark.parametrize(
  ('row', 'options', 'want'),
  [
    ({'prompt': [SYSTEM, ASK], 'completion': [ONE]}, {}, 'ss uu a é1 '),
    ({'system': 's', 'prompt': 'a', 'completion': ''}, {}, 'ss ua a '),
    ({'instruction': 'a', 'input': '', 'output': 'b'}, ALPACA, 'ua ab '),
    ({'instruction': 'a', 'input': 'c', 'output': 'b'}, ALPACA, 'ua\n\nc ab '),
    # The answer is a whole conversation.
    ({'prompt': 'a', 'completion': [ASK, ONE]}, {}, 'uu a é1 '),
    ({'talk': [SYSTEM, ASK, ONE]}, {'messages': 'talk'}, 'ss uu a é1 '),
    ({'messages': [{**ASK, 'content': '\ud800'}]}, {}, 'u\ufffd '),
    ([], {}, 'list'),
    ({'text': 'a'}, {}, 'messages'),
    ({'messages': [{'role': 'gpt', 'content': 'a'}]}, {}, 'gpt'),
    ({'messages': [{'role': 'user', 'content': 1}]}, {}, 'content'),
    ({'prompt': [ASK, ONE], 'completion': 'b'}, {}, 'completion'),
    ({'prompt': [ASK], 'x': 'b', 'completion': 'b'}, {'user': 'prompt,x'}, 'x'),
    ({'completion': 'a'}, {}, 'prompt'),
  ],
)  # fmt: skip
def test_lines(row, options, want, tmp_path):
  template = (
    '{% for m in messages %}{{ m.role[0] + m.content + " " }}{% endfor %}'
  )
  path = make(tmp_path / 'hf', template)
  codes = chat_data.Codes(path, chat_data.Options(**options, train_on='all'))
  if want.endswith(' '):
    assert encoded(codes, row)[1] == [want]
  else:
    with pytest.raises(ValueError, match=want):
      encoded(codes, row)


def test_pairs_of_whole_conversations():
  row = {'prompt': 'é?', 'messages': [ASK, ONE]}
  row |= {'chosen': [ASK, ONE], 'rejected': [ASK, {**ONE, 'content': 'no'}]}
  answers = ('chosen', 'rejected')
  found = chat_data.conversations(row, chat_data.Options(), answers)
  assert found == [row[key] for key in answers]


def write(path, rows):
  path.write_text('\n'.join(map(json.dumps, rows)))
  return path


def load(path, tokenizer=TINY / 'tokenizer.json', answers=(), **options):
  codes = chat_data.Codes(tokenizer, chat_data.Options(**options), answers)
  where = {'cache_dir': path.parent / 'cache'}
  return chat_data.load(path, codes, eval_fraction=0.1, **where).train


def of_sizes(sizes):
  """Returns conversations whose answers have so many letters."""
  pairs = enumerate(sizes)
  return [{'prompt': f'{i}', 'completion': 'x' * int(n)} for i, n in pairs]


def test_lines_that_cannot_be_read_are_named_and_counted(tmp_path):
  # Alone, the beginning of this conversation is written in another way.
  template = '{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}'
  template += '{% if messages | length < 3 %}!{% endif %}'
  path = make(tmp_path / 'hf', template)
  good, bad = {'messages': [ASK]}, {'messages': TALK[:3]}
  file = write(tmp_path / 'a.jsonl', [*[good] * 200, bad])
  assert 'a.jsonl:201' in load(file, path).notes['a.jsonl']
  write(file, [good, bad, bad])
  with pytest.raises(
    errors.UsageError, match=r'2 of 3 .*a.jsonl:2: .*generation'
  ):
    load(file, path)


@pytest.mark.parametrize('stop', ['<|im_end|>', '<|eot_id|>'])
def test_answers_without_a_stop_are_warned_of(stop, tmp_path, caplog):
  template = f'{{% for m in messages %}}{{{{ m.content }}}}{stop}{{% endfor %}}'
  file = write(tmp_path / 'a.jsonl', of_sizes([3] * 9))
  load(file, make(tmp_path / 'hf', template))
  warns = 'does not learn to stop' in caplog.text
  assert warns == (stop != '<|im_end|>')


def chat_input(documents, batch_size=8, **fields):
  fields = {'length': 512, 'reset_for_eval': True, **fields}
  return chat_data.ChatInput(
    documents=documents, batch_size=batch_size, **fields
  )


def test_each_conversation_is_whole_in_one_row(tmp_path):
  sizes = np.random.default_rng(0).integers(0, 100, 400)
  documents, found = load(write(tmp_path / 'a.jsonl', of_sizes(sizes))), []
  data = chat_input(documents)
  names = 'ids', 'labels', 'segment_ids', 'segment_pos', 'weights'
  for batch in data:
    for ids, labels, segments, places, weights in zip(
      *(batch[x] for x in names), strict=True
    ):
      for i in range(1, segments.max() + 1):
        at = segments == i
        assert places[at].tolist() == [*range(at.sum())]
        assert ids[at][1:].tolist() == labels[at][:-1].tolist()
        found.append([ids[at][0] * 2, *labels[at] * 2 + weights[at]])
  codes = [
    chat_data.codes_of(documents, i)[0].tolist()
    for i in range(len(documents.names))
  ]
  assert sorted(found) == sorted(codes)
  used = sum(len(x) - 1 for x in codes)
  assert used > 0.95 * 512 * (data.num_records() - 1)


@pytest.mark.parametrize(
  ('too_long', 'train_on'), [('cut', 'assistant'), ('leave_out', 'all')]
)
def test_a_conversation_longer_than_a_row(too_long, train_on, tmp_path):
  file = write(tmp_path / 'a.jsonl', of_sizes([1, 300] * 8))
  documents = load(file, too_long=too_long, train_on=train_on)
  data = chat_input(documents, 1, length=64, packing='padded')
  sizes = np.diff(documents.starts, append=documents.tokens.size)
  assert f' {sum(sizes > 66)} are longer' in data.describe()
  batches = [*data]
  tokens = sum(
    len(x)
    for i in range(len(documents.names))
    for x in chat_data.codes_of(documents, i)
  )
  share = sum(x['weights'].sum() for x in batches) / tokens
  assert f' {tokens:,} tokens, of which {share:.1%} train;' in data.describe()
  rows = [x['labels'][0].tolist() for x in batches]
  assert len(rows) == sum((sizes <= 66) | (too_long == 'cut'))
  longest = chat_data.codes_of(documents, int(sizes.argmax()))[0] >> 1
  assert (longest[1:65].tolist() in rows) == (too_long == 'cut')


def test_show_marks_what_trains(capsys):
  args = ['show', '--config=configs/chat.py', '-n1', '--seconds=0']
  assert commands.main(args) == 0
  out = capsys.readouterr().out
  assert "\n  ('<|im_start|>user" in out
  assert ".<|im_end|>'\n" in out
  assert '8.1% train' in out
  assert '% of the tokens train' in ' '.join(out.split())


def overrides(tmp_path, **values):
  """Returns what makes the bundled model smaller yet."""
  sizes = {'num_layers': 1, 'embed_dim': 32, 'num_heads': 2, 'mlp_dim': 64}
  kwargs = {f'model.{key}': size for key, size in sizes.items()}
  kwargs |= {'cache_dir': str(tmp_path / 'cache'), **values}
  return {f'experiment_kwargs.config.{key}': x for key, x in kwargs.items()}


@pytest.mark.process
def test_training_lowers_the_loss_also_of_adapters(tmp_path):
  run = {'checkpoint_dir': str(tmp_path / 'run'), 'training_steps': 60}
  run |= {'eval_initial_weights': True, 'eval_interval': 60, 'console': 'off'}
  result = jaxline.fit(None, chat.get_config(), run | overrides(tmp_path))
  losses = result.history['eval/loss'][:, 1]
  assert losses[-1] < 0.4 * losses[0]
  assert '(expected: ' in result.experiment.sample(jax.random.key(0))
  base = jax.device_get(result.experiment.state.params)

  # In many batches nothing trains.
  rows = [{'messages': [ASK]}, {'prompt': 'a', 'completion': 'b'}] * 30
  values = {'files': str(write(tmp_path / 'a.jsonl', rows)), 'lora.rank': 2}
  values |= {'learning_rate': 0.02, 'batch_size': 1, 'packing': 'padded'}
  values = overrides(tmp_path, **values, eval_fraction=0.3)
  values |= {
    'checkpoint_dir': str(tmp_path / 'b'),
    'log_train_data_interval': 1,
  }
  config = chat.get_config(str(tmp_path / 'run'))
  result = jaxline.fit(None, config, run | values)
  losses = result.history['eval/loss'][:, 1]
  assert losses[-1] < 0.5 * losses[0]
  assert result.history['train/zero_weight_steps'][-1, 1] > 5
  tuned = jax.device_get(result.experiment.state.params)
  for module, leaves in base.items():
    for name, value in leaves.items():
      np.testing.assert_array_equal(tuned[module][name], value)


PAIRS = [
  {'prompt': f'{i}?', 'chosen': 'yes', 'rejected': 'no.'} for i in range(10, 30)
]


def make_experiment(tmp_path, **values):
  config = chat.get_config()
  config.update_from_flattened_dict(overrides(tmp_path, **values))
  return chat_training.Experiment(
    'train', jax.random.key(0), run_config=config, **config.experiment_kwargs
  )


@pytest.mark.process
def test_a_tuned_model_begins_with_the_biases_of_its_routers(tmp_path):
  values = {
    'model.num_experts': 4,
    'model.experts_per_token': 2,
    'model.router_bias_rate': 2**-5,
    'sample_length': 0,
    'samples': 0,
  }

  def train(config, folder, **more):
    config.update_from_flattened_dict(overrides(tmp_path, **values, **more))
    config.checkpoint_dir = str(tmp_path / folder)
    config.training_steps = 2
    config.eval_interval = -1
    jaxline.fit(chat_training.Experiment, config)
    state = jaxline.load_weights(config.checkpoint_dir, model_state=True)
    (found,) = jax.tree.leaves(state['model_state']['router_biases'])
    return found

  biases = train(chat.get_config(), 'a')
  assert np.abs(biases).max() > 0
  tuned = chat.get_config(str(tmp_path / 'a'))
  # It stops where answers were trained to end.
  stops = tuned.experiment_kwargs.config.decode.stop_ids
  path = tuned.experiment_kwargs.config.tokenizer
  assert {*folder.Prompts(path).stop_ids} <= {*stops}
  with pytest.raises(errors.UsageError, match='router_z_loss'):
    z_loss = {'model.num_experts': 4, 'model.router_z_loss': 1.0}
    make_experiment(tmp_path, loss='dpo', **z_loss)
  # DPO does not move them.
  files = str(write(tmp_path / 'pairs.jsonl', PAIRS))
  found = train(tuned, 'b', loss='dpo', files=files)
  np.testing.assert_array_equal(found, biases)


@pytest.mark.parametrize('rank', [0, 2])
def test_dpo_is_the_published_formula(rank, tmp_path):
  values = {'files': str(write(tmp_path / 'a.jsonl', PAIRS)), 'lora.rank': rank}
  values |= {'loss': 'dpo', 'dpo_beta': 0.3, 'learning_rate': 0.01}
  subject = make_experiment(tmp_path, **values)
  # Adapters alone do not move the weights that are the reference.
  assert ('reference' in subject.state.model_state) == (rank == 0)
  also = make_experiment(tmp_path, **values, trainable='.*norm.*')
  assert 'reference' in also.abstract_state().model_state
  documents = subject.corpus.train
  batch = next(chat_input(documents, 20, length=128))
  assert batch['weights'].sum() == pytest.approx(len(documents.names))
  loss_fn = jax.jit(subject.loss_fn, static_argnums=4)
  apply = jax.jit(model.apply, static_argnums=2)

  def means():
    args = subject.state.params, subject.state.model_state, batch
    _, found, _ = loss_fn(*args, jax.random.key(0), False)
    return {name: float(x.compute()) for name, x in found.items()}

  def log_probs():
    """Returns those of both answers to each question alone, [2, D]."""
    weights = experiment.merged(subject.state.params, {}, subject.config)
    sums = []
    for answer in ('yes', 'no.'):
      answer = subject.prompts.encode_rendered([f'{answer}<|im_end|>'])[0].ids
      ids = jnp.array([[*ask, *answer] for ask in questions])
      found = apply(weights, ids, subject.config.model)
      found = jax.nn.log_softmax(found)[:, -len(answer) - 1 : -1]
      sums.append(sum(found[:, i, x] for i, x in enumerate(answer)))
    return jnp.stack(sums)

  lines = [int(name.split(':')[1]) - 1 for name in documents.names]
  asked = [[{'role': 'user', 'content': PAIRS[i]['prompt']}] for i in lines]
  questions = [subject.prompts.encode(x).tolist() for x in asked]
  assert means()['loss'] == pytest.approx(np.log(2))
  start = log_probs()
  rng = subject.initialize_train_step_rng(jax.random.key(1))
  for step in range(5):
    subject.step(global_step=step, rng=rng, writer=None)
  chosen, rejected = 0.3 * (log_probs() - start)
  want = {
    'loss': -np.log(1 / (1 + np.exp(rejected - chosen))),
    'reward_chosen': chosen,
    'reward_rejected': rejected,
    'reward_margin': chosen - rejected,
    'reward_accuracy': chosen > rejected,
  }
  want = {name: float(np.mean(x)) for name, x in want.items()}
  assert means() == pytest.approx(want, rel=1e-4)
  assert want['reward_margin'] > 0.01
