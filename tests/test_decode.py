"""`--jaxline_mode=decode`: prompts from anywhere, weights of a checkpoint."""

import builtins
import io
import json
import pathlib
import shutil
import sys
import zlib

from absl.testing import flagsaver
import jax
import numpy as np
import pytest

from configs import lm
from examples.lm import experiment as lm_experiment
import jaxline
from jaxline import base_config
from jaxline import platform
from jaxline import train
from jaxline import utils
from jaxline.parallel import prng
from tests import processes
from tests import toys

BEST = 2


class Mute(toys.Plain):
  """The second of its steps is its best."""

  @property
  def count(self):
    return int(self._w[0])

  def evaluate(self, **unused):
    return {'loss': abs(self.count - BEST)}


class Echo(Mute):
  """Repeats a prompt, with the number of its steps."""

  calls = []
  missing = 0

  def decode(self, prompts, rng):
    assert self.mode == 'decode'
    self.calls.append((list(prompts), np.asarray(rng).tolist()))
    return [
      [
        {'text': f'{prompt} {self.count}', 'score': -1 / 3},
        {'text': f'ü {prompt}', 'score': -1.0},
      ]
      for prompt in prompts[self.missing :]
    ]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The directory of a run of three steps, each with a checkpoint."""
  config = toys.make_config(
    3,
    checkpoint_dir=str(tmp_path_factory.mktemp('run')),
    save_checkpoint_interval=1,
    eval_interval=1,
    best_model_eval_metric='loss',
    best_model_eval_metric_higher_is_better=False,
    max_best_checkpoints_to_keep=1,
  )
  return pathlib.Path(jaxline.fit(Echo, config).directory)


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
  """Decodes prompts; returns the arguments of each call of `decode`."""
  shutil.rmtree(trained / 'decode', ignore_errors=True)

  def run(
    cls=Echo, directory=trained, checkpointer='durable', text='a', **options
  ):
    monkeypatch.setattr(Echo, 'calls', [])
    if text is not None:
      path = tmp_path / 'p.txt'
      path.write_text(text)
      options = {'prompts': str(path)} | options
    config = base_config.get_base_config()
    config.checkpoint_dir = str(directory)
    config.checkpointer = checkpointer
    config.decode.update(options)
    with flagsaver.flagsaver(config=config, jaxline_mode='decode'):
      platform.main(cls, [])
    return Echo.calls

  return run


def lines_of(path):
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def texts(path):
  return [line['continuations'][0]['text'] for line in lines_of(path)]


# Where prompts come from, and where continuations go.


def test_prompts_of_a_file_in_batches_of_one_size(run, trained, capsys):
  text = 'a\n  b \n\n \nc\r\nd\ne'
  calls = run(text=text, batch_size=2)
  # The last batch is filled up; each has a key of its own.
  assert [prompts for prompts, _ in calls] == [
    ['a', '  b '],
    ['c', 'd'],
    ['e', 'e'],
  ]
  # No small number is folded in first: `split` returns the same as these.
  number = zlib.crc32(b'decoding') | 2**31
  stream = jax.random.fold_in(jax.random.PRNGKey(42), number)
  keys = [jax.random.fold_in(stream, i).tolist() for i in range(3)]
  assert [key for _, key in calls] == keys
  path = trained / 'decode' / 'step_3.jsonl'
  lines = lines_of(path)
  assert [line['prompt'] for line in lines] == ['a', '  b ', 'c', 'd', 'e']
  assert lines[0]['continuations'] == [
    {'text': 'a 3', 'score': -1 / 3},
    {'text': 'ü a', 'score': -1.0},
  ]
  shown = capsys.readouterr().out
  assert '=== c\n--- score -0.3333\nc 3\n--- score -1\nü c\n=== d' in shown
  assert shown.endswith(f'Written to {path}\n')
  # Another run's file takes the place of this one.
  run(text='a\nb')
  assert len(lines_of(path)) == 5


def test_prompts_of_json_lines_and_a_pipe(run, tmp_path, monkeypatch, capsys):
  (tmp_path / 'p.jsonl').write_bytes(
    b'\xef\xbb\xbf{"prompt": "two\\nlines", "id": 7}\n\n{"prompt": ""}\r'
    b'{"prompt": "\xe9 \\ud83d \\ud83d\\ude00"}\n'
  )
  output = tmp_path / 'new' / 'o.jsonl'
  monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(io.BytesIO(), 'ascii'))
  run(prompts=str(tmp_path / 'p.jsonl'), output=str(output))
  first, second, third = lines_of(output)
  assert (first['prompt'], first['id']) == ('two\nlines', 7)
  assert second['continuations'][1]['text'] == 'ü '
  # What is no Unicode is replaced, and named.
  assert third['prompt'] == '\ufffd \ufffd \U0001f600'
  assert f'{tmp_path}/p.jsonl:4 ' in capsys.readouterr().err
  assert b'\n=== ? ? ?\n' in sys.stdout.buffer.getvalue()
  monkeypatch.setattr(sys, 'stdin', io.StringIO('a\n\nb\nc\n'))
  calls = run(text=None, batch_size=2, output=str(output))
  assert [prompts for prompts, _ in calls] == [['a', 'b'], ['c', 'c']]


def test_a_conversation_is_given_with_its_tools(run, tmp_path, capsys):
  class Talking(Echo):
    def check_prompt(self, prompt):
      checked.append(prompt)

  checked, asked = [], {'messages': [{'role': 'user', 'content': 'Hi'}]}
  asked |= {'tools': [{'name': 'add'}]}
  lines = [asked, asked | {'tools': None}, {'prompt': 'a', 'tools': []}]
  (tmp_path / 'p.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  output = tmp_path / 'o.jsonl'
  calls = run(Talking, prompts=str(tmp_path / 'p.jsonl'), output=str(output))
  assert checked == [asked, asked['messages'], 'a']
  assert calls[0][0] == checked
  assert [x for x in lines_of(output) if x.pop('continuations')] == lines
  assert "=== tools: {'name': 'add'}\nuser: Hi\n" in capsys.readouterr().out


def test_prompts_of_a_terminal(run, tmp_path, monkeypatch):
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  typed = iter(['a', '', 'b'])

  def ask(text):
    assert text == 'prompt> '
    # What was typed before is answered, and safe.
    assert len(lines_of(tmp_path / 'o')) == len(Echo.calls)
    try:
      return next(typed)
    except StopIteration:
      raise EOFError from None

  monkeypatch.setattr(sys, 'stdin', Terminal())
  monkeypatch.setattr(builtins, 'input', ask)
  calls = run(text=None, output=str(tmp_path / 'o'))
  # One at a time, whatever the batch size.
  assert [prompts for prompts, _ in calls] == [['a'], ['b']]


@pytest.mark.parametrize(
  ('options', 'step'),
  [({}, 3), ({'step': 1}, 1), ({'series': 'best', 'step': BEST}, BEST)],
)
def test_which_checkpoint(run, trained, options, step):
  run(**options)
  assert texts(trained / 'decode' / f'step_{step}.jsonl') == [f'a {step}']


def test_checkpoints_in_the_memory_of_this_process(run, tmp_path):
  config = base_config.get_base_config()
  config.training_steps = 2
  checkpointer = utils.InMemoryCheckpointer(config, 'train')
  train.train(Echo, config, checkpointer, None)
  memory = {'directory': tmp_path, 'checkpointer': 'memory'}
  for options in ({}, {'step': 2}):
    run(**options, **memory)
    output = tmp_path / 'decode' / 'step_2.jsonl'
    assert texts(output) == ['a 2']
    output.unlink()
  with pytest.raises(SystemExit, match=r'step 3\. .* steps \[2\]'):
    run(step=3, **memory)
  with pytest.raises(SystemExit, match=r"'best'.*'durable'"):
    run(series='best', **memory)


# Another one's directory.


def tree_of(directory):
  return sorted(
    (str(p), p.read_bytes() if p.is_file() else b'')
    for p in directory.rglob('*')
  )


@pytest.fixture
def colleague(trained, tmp_path, read_only):
  """A copy of that run in which nothing can be written."""
  directory = shutil.copytree(trained, tmp_path / 'theirs')
  # As training leaves it; other tests have decoded there.
  shutil.rmtree(directory / 'decode', ignore_errors=True)
  read_only(directory)
  with pytest.raises(OSError, match='Read-only'):
    (directory / 'mine').touch()
  return directory


def test_a_directory_that_cannot_be_written(
  run, colleague, tmp_path, monkeypatch, capsys
):
  before = tree_of(colleague)
  (tmp_path / 'here').mkdir()
  monkeypatch.chdir(tmp_path / 'here')
  for series, step, name in (
    ('latest', 3, 'theirs_step_3.jsonl'),
    ('latest', 3, 'theirs_step_3_2.jsonl'),  # Nothing of ours is replaced.
    ('best', BEST, f'theirs_step_{BEST}.jsonl'),
  ):
    run(directory=colleague, series=series)
    path = tmp_path / 'here' / name
    assert texts(path) == [f'a {step}']
    assert capsys.readouterr().out.endswith(f'Written to {path}\n')
  output = tmp_path / 'new' / 'o.jsonl'
  run(directory=colleague, output=str(output))
  assert texts(output) == ['a 3']
  assert tree_of(colleague) == before
  assert len(list((tmp_path / 'here').iterdir())) == 3


@pytest.mark.parametrize(
  ('option', 'metric'),
  [({'one_off_evaluate': True}, ''), ({'eval_steps': '1,3'}, 'loss')],
)
def test_an_evaluation_of_a_directory_that_cannot_be_written(
  option, metric, colleague, caplog, capsys
):
  before = tree_of(colleague)
  config = base_config.get_base_config()
  config.checkpoint_dir = str(colleague)
  config.best_model_eval_metric = metric
  config.best_model_eval_metric_higher_is_better = False
  with config.ignore_type():
    config.update(option)
  with flagsaver.flagsaver(config=config, jaxline_mode='eval_mine'):
    platform.main(Echo, [])
  assert caplog.text.count(f'Nothing can be written in {colleague}: ') == 1
  shown = capsys.readouterr().out
  assert 'eval_mine step 3 | loss 1' in shown
  assert ('eval_mine step 1 | loss 1' in shown) == ('eval_steps' in option)
  assert tree_of(colleague) == before


def test_decoding_claims_and_keeps_nothing(run, trained):
  checkpoints = trained / 'checkpoints'
  before = tree_of(checkpoints)
  seen = []

  class Looking(Echo):
    def decode(self, prompts, rng):
      seen.append(tree_of(checkpoints))
      if len(seen) == 1:  # A second one, at the same time.
        run(cls=Looking)
      return super().decode(prompts, rng)

  run(cls=Looking)
  assert seen == [before, before]
  assert tree_of(checkpoints) == before
  for name in ('step_3.jsonl', 'step_3_2.jsonl'):
    assert texts(trained / 'decode' / name) == ['a 3']


# What is refused.


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'step': 7}, r"step 7. Of 'latest' it has the steps \[1, 2, 3\]"),
    ({'series': 'best', 'step': 1}, r"Of 'best' it has the steps \[2\]"),
    ({'prompts': 'no_such.txt'}, "prompts is 'no_such.txt'"),
    ({'prompts': 'chat.jsonl'}, 'chat.jsonl:2: Echo does not support chats'),
    ({'prompts': 'bad.jsonl'}, r"bad.jsonl:3 is 'Once'"),
    ({'prompts': 'list.jsonl'}, 'list.jsonl:1 is'),
    ({'output': './p.txt'}, "output is './p.txt', which is the file"),
    ({'directory': 'new'}, r"new has no checkpoint of 'latest'"),
    ({'directory': 'new', 'series': 'best'}, "set series = 'latest'"),
  ],
)
def test_what_is_refused(run, tmp_path, monkeypatch, options, said):
  monkeypatch.chdir(tmp_path)
  for name, content in {
    'chat.jsonl': b'{"prompt": "a"}\n{"messages": [{"role": "user"}]}',
    'bad.jsonl': b'\n{"prompt": "a"}\nOnce',
    'list.jsonl': b'["prompt"]',
  }.items():
    (tmp_path / name).write_bytes(content)
  with pytest.raises(SystemExit, match=said):
    run(**options)
  assert Echo.calls == []
  assert (tmp_path / 'p.txt').read_text() == 'a'
  # No directory is made for a name that is wrong.
  assert not (tmp_path / 'new').exists()


def test_an_experiment_must_continue_each_prompt(run, tmp_path, monkeypatch):
  with pytest.raises(NotImplementedError, match='Mute'):
    run(cls=Mute, output=str(tmp_path / 'o'))
  monkeypatch.setattr(Echo, 'missing', 1)
  with pytest.raises(ValueError, match=r'got 2 prompts and returned 1 lists'):
    run(text='a\nb', output=str(tmp_path / 'o'))


# A language model.


SMALL = {
  'length': 16,
  'sample_length': 0,
  'model': {'num_layers': 1, 'embed_dim': 32, 'mlp_dim': 64, 'max_length': 48},
  'decode': {'max_decode_steps': 12, 'num_samples': 2},
}


PROMPTS = ['for', 'total +=', 'x']


@pytest.fixture(scope='module')
def language_model(tmp_path_factory):
  """Trains one here; returns flags to decode with it, and what it says."""
  folder = tmp_path_factory.mktemp('lm')
  for i in range(3):
    text = 'for item in items:\n  total += item\n' * 9
    (folder / f'{i}.txt').write_text(text)
  (folder / 'prompts').write_text('\n'.join(PROMPTS))
  config = lm.get_config()
  config.checkpoint_dir = str(folder / 'run')
  config.training_steps = 4
  kwargs = config.experiment_kwargs.config
  kwargs.update(SMALL)
  kwargs.update(files=f'{folder}/*.txt', cache_dir=str(folder / 'cache'))
  config = config.copy_and_resolve_references()
  fitted = jaxline.fit(lm_experiment.Experiment, config, mode='train')
  rng = prng.stream(jax.random.PRNGKey(config.random_seed), 'decoding')
  expected = fitted.experiment.decode(PROMPTS, jax.random.fold_in(rng, 0))
  flags = [
    f'--jaxline_run={config.checkpoint_dir}',
    f'--config.decode.prompts={folder}/prompts',
    # The text is not needed any more.
    '--config.experiment_kwargs.config.files=/no/such/place',
  ]
  return flags, expected


@pytest.mark.parametrize(
  'launcher',
  [
    pytest.param('', marks=pytest.mark.process, id='one process'),
    pytest.param(
      '-m jaxline.launch --processes=2 --devices-per-process=1 -- python',
      marks=pytest.mark.slow,
      id='two processes',
    ),
  ],
)
def test_a_language_model_is_trained_here_and_decoded_elsewhere(
  launcher, tmp_path, language_model
):
  flags, expected = language_model
  output = tmp_path / 'o.jsonl'
  result = processes.run(
    *launcher.replace('python', sys.executable).split(),
    *('experiment.py', '--jaxline_mode=decode'),
    *flags,
    f'--config.decode.output={output}',
    timeout=170,
    JAX_DISABLE_MOST_OPTIMIZATIONS='1',
  )
  assert result.returncode == 0, result.stderr[-4000:]
  lines = lines_of(output)
  assert [line['prompt'] for line in lines] == PROMPTS
  for line, continuations in zip(lines, expected, strict=True):
    assert len(continuations) == 2
    for found, here in zip(line['continuations'], continuations, strict=True):
      assert found['text'] == here['text']
      assert found['tokens'] == here['tokens'] <= 12
      assert found['score'] == pytest.approx(here['score'], rel=1e-4)
  # One of several processes prints.
  assert result.stdout.count(f'=== {PROMPTS[-1]}\n') == 1
