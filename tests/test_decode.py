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
from jaxline.parallel import prng
from tests import processes
from tests import remains
from tests import toys

BEST = 2


class Echo(toys.Plain):
  """Repeats a prompt, with the number of its steps; the second is its best."""

  calls = []
  missing = 0

  @property
  def count(self):
    return int(self._w[0])

  def evaluate(self, **unused):
    return {'loss': abs(self.count - BEST)}

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
    cls=Echo, directory=trained, text='a', mode='decode', values=(), **options
  ):
    monkeypatch.setattr(Echo, 'calls', [])
    if text is not None:
      path = tmp_path / 'p.txt'
      path.write_text(text)
      options = {'prompts': str(path)} | options
    config = base_config.get_base_config()
    config.checkpoint_dir = str(directory)
    config.decode.update(options)
    config.update(dict(values))
    with flagsaver.flagsaver(config=config, jaxline_mode=mode):
      platform.main(cls, [])
    return Echo.calls

  return run


def lines_of(path):
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def texts(path):
  return [line['continuations'][0]['text'] for line in lines_of(path)]


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


def test_prompts_of_a_terminal(run, tmp_path, monkeypatch):
  terminal = io.StringIO()
  terminal.isatty = lambda: True
  typed = iter(['a', '', 'b'])

  def ask(text):
    assert text == 'prompt> '
    # What was typed before is answered, and safe.
    assert len(lines_of(tmp_path / 'o')) == len(Echo.calls)
    try:
      return next(typed)
    except StopIteration:
      raise EOFError from None

  monkeypatch.setattr(sys, 'stdin', terminal)
  monkeypatch.setattr(builtins, 'input', ask)
  calls = run(text=None, output=str(tmp_path / 'o'))
  # One at a time, whatever the batch size.
  assert [prompts for prompts, _ in calls] == [['a'], ['b']]


def test_a_directory_that_cannot_be_written(
  run, trained, tmp_path, read_only, monkeypatch, caplog, capsys
):
  theirs = shutil.copytree(trained, tmp_path / 'theirs')
  before = remains.files(theirs)
  read_only(theirs)
  here = tmp_path / 'here'
  here.mkdir()
  monkeypatch.chdir(here)
  for series, step, name in (
    ('latest', 3, 'theirs_step_3.jsonl'),
    ('latest', 3, 'theirs_step_3_2.jsonl'),  # Nothing of ours is replaced.
    ('best', BEST, f'theirs_step_{BEST}.jsonl'),
  ):
    run(directory=theirs, series=series)
    assert texts(here / name) == [f'a {step}']
    assert capsys.readouterr().out.endswith(f'Written to {here / name}\n')
  run(directory=theirs, output=str(tmp_path / 'new' / 'o.jsonl'))
  assert texts(tmp_path / 'new' / 'o.jsonl') == ['a 3']
  assert len([*here.iterdir()]) == 3

  values = {
    'best_model_eval_metric': 'loss',
    'best_model_eval_metric_higher_is_better': False,
    'eval_steps': '1,3',
  }
  run(directory=theirs, mode='eval_mine', values=values)
  assert caplog.text.count(f'Nothing can be written in {theirs}: ') == 1
  shown = capsys.readouterr().out
  for step in (1, 3):
    assert f'eval_mine step {step} | loss 1' in shown
  assert remains.files(theirs) == before


def test_decoding_claims_and_keeps_nothing(run, trained):
  checkpoints = trained / 'checkpoints'
  before = remains.files(checkpoints)
  seen = []

  class Looking(Echo):
    def decode(self, prompts, rng):
      seen.append(remains.files(checkpoints))
      if len(seen) == 1:  # A second one, at the same time.
        run(cls=Looking)
      return super().decode(prompts, rng)

  run(cls=Looking)
  assert seen == [before, before]
  assert remains.files(checkpoints) == before
  for name in ('step_3.jsonl', 'step_3_2.jsonl'):
    assert texts(trained / 'decode' / name) == ['a 3']
  for options in ({'step': 1}, {'series': 'best', 'step': BEST}):
    run(**options)
    step = options['step']
    assert texts(trained / 'decode' / f'step_{step}.jsonl') == [f'a {step}']


@pytest.mark.parametrize(
  ('options', 'said'),
  [
    ({'step': 7}, r"step 7. Of 'latest' it has the steps \[1, 2, 3\]"),
    ({'series': 'best', 'step': 1}, r"Of 'best' it has the steps \[2\]"),
    ({'prompts': 'no_such.txt'}, "prompts is 'no_such.txt'"),
    ({'prompts': 'chat.jsonl'}, 'chat.jsonl:2: Echo does not support chats'),
    ({'prompts': 'bad.jsonl'}, r"bad.jsonl:3 is 'Once'"),
    ({'output': './p.txt'}, "output is './p.txt', which is the file"),
    ({'directory': 'new'}, r"new has no checkpoint of 'latest'"),
  ],
)
def test_what_is_refused(run, tmp_path, monkeypatch, options, said):
  monkeypatch.chdir(tmp_path)
  chat = '{"prompt": "a"}\n{"messages": [{"role": "user"}]}'
  (tmp_path / 'chat.jsonl').write_text(chat)
  (tmp_path / 'bad.jsonl').write_text('\n{"prompt": "a"}\nOnce')
  with pytest.raises(SystemExit, match=said):
    run(**options)
  assert Echo.calls == []
  assert (tmp_path / 'p.txt').read_text() == 'a'
  # No directory is made for a name that is wrong.
  assert not (tmp_path / 'new').exists()


def test_an_experiment_must_continue_each_prompt(run, tmp_path, monkeypatch):
  with pytest.raises(NotImplementedError, match='Plain'):
    run(cls=toys.Plain, output=str(tmp_path / 'o'))
  monkeypatch.setattr(Echo, 'missing', 1)
  with pytest.raises(ValueError, match=r'got 2 prompts and returned 1 lists'):
    run(text='a\nb', output=str(tmp_path / 'o'))


@pytest.mark.slow
def test_two_processes_continue_as_the_one_that_trained(tmp_path):
  prompts = ['for', 'total +=', 'x']
  (tmp_path / 'p').write_text('\n'.join(prompts))
  for i in range(3):
    text = 'for item in items:\n  total += item\n' * 9
    (tmp_path / f'{i}.txt').write_text(text)
  config = lm.get_config()
  config.checkpoint_dir = str(tmp_path / 'run')
  config.training_steps = 4
  kwargs = config.experiment_kwargs.config
  kwargs.update(length=16, sample_length=0, files=f'{tmp_path}/*.txt')
  kwargs.model.update(num_layers=1, embed_dim=32, mlp_dim=64, max_length=48)
  kwargs.decode.update(max_decode_steps=12, num_samples=2)
  fitted = jaxline.fit(lm_experiment.Experiment, config, mode='train')
  rng = prng.stream(jax.random.PRNGKey(config.random_seed), 'decoding')
  expected = fitted.experiment.decode(prompts, jax.random.fold_in(rng, 0))
  result = processes.run(
    *('-m', 'jaxline.launch', '--processes=2', '--devices-per-process=1'),
    *('--', sys.executable, 'experiment.py', '--jaxline_mode=decode'),
    f'--jaxline_run={config.checkpoint_dir}',
    f'--config.decode.prompts={tmp_path}/p',
    f'--config.decode.output={tmp_path}/o',
    # The text is not needed any more.
    '--config.experiment_kwargs.config.files=/no/such/place',
    timeout=170,
    JAX_DISABLE_MOST_OPTIMIZATIONS='1',
  )
  assert result.returncode == 0, result.stderr[-4000:]
  lines = lines_of(tmp_path / 'o')
  assert [line['prompt'] for line in lines] == prompts
  for line, continuations in zip(lines, expected, strict=True):
    for found, here in zip(line['continuations'], continuations, strict=True):
      score = pytest.approx(here['score'], rel=1e-4)
      assert found == {**here, 'score': score}
  # One of them prints.
  assert result.stdout.count(f'=== {prompts[-1]}\n') == 1
