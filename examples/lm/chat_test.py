"""Tests of the chat in the terminal."""

import dataclasses
import functools
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from examples import decoding
import jaxline
from jaxline import errors
from jaxline.inputs import tokenization
from tests import processes

from . import chat
from . import families_test
from . import folder
from . import hf
from . import hf_test


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The directory of a run with a model that knows chats."""
  path = tmp_path_factory.mktemp('chat')
  families_test.make('qwen2', path / 'hf', length=2200)
  assert hf.main(['import', str(path / 'hf'), str(path / 'run')]) == 0
  return path / 'run'


@pytest.fixture(scope='module')
def experiment(run):
  """21: the last piece of an answer may be longer than what is left."""
  greedy = {'method': 'greedy', 'max_decode_steps': 21}
  keys = {f'experiment_kwargs.config.decode.{k}': x for k, x in greedy.items()}
  return jaxline.load(run, keys, mode='decode')


def message(role, content):
  return {'role': role, 'content': content}


def test_answers_are_those_of_decoding(experiment):
  key = jax.random.key(0)
  talk = chat.Chat(experiment, system='Be brief.', seed=0)
  said = [message('system', 'Be brief.')]
  for text in ('Hi', 'naïve'):
    said.append(message('user', text))
    ((found,),) = experiment.decode([said], key)
    pieces = [*talk.ask(text)]
    assert (''.join(pieces), len(pieces)) == (found['text'], 4)
    said.append(message('assistant', found['text']))
    assert talk.messages == said
  # What was heard before an answer was cut off is kept.
  talk.reset()
  answer = talk.ask('Hi')
  heard = next(answer)
  answer.close()
  assert talk.messages[1:] == [
    message('user', 'Hi'),
    message('assistant', heard),
  ]
  # A stop ends the stream, and is not in it.
  ids = experiment.encode_prompt(said[:2])
  options = experiment.decode_options
  new = np.concatenate([*experiment.stream(ids, key, options)]).tolist()
  options = dataclasses.replace(options, stop_ids=(new[11],))
  found = np.concatenate([*experiment.stream(ids, key, options)]).tolist()
  assert found == new[: new.index(new[11])]
  # Each piece has draws of its own.
  draws = {'method': 'sample', 'temperature': 1e6, 'top_k': 0, 'stop_ids': ()}
  options = dataclasses.replace(options, **draws)
  first, second, *_ = experiment.stream(ids, key, options)
  assert first != second


def test_the_oldest_turns_are_dropped(experiment, capsys):
  talk = chat.Chat(experiment, system='Be.', seed=0)
  before = [message('user', 'x' * 900), message('assistant', 'z' * 900)] * 6
  before = [x | {'content': f'{i}{x["content"]}'} for i, x in enumerate(before)]
  talk.messages += before
  next(talk.ask('z'))
  first, *kept, last, _ = talk.messages
  assert (first, last) == (message('system', 'Be.'), message('user', 'z'))
  assert kept == before[-len(kept) :]
  dropped = len(before) - len(kept)
  assert 0 < dropped < len(before)
  assert f'The oldest {dropped} messages' in capsys.readouterr().err
  known = [*talk.messages]
  with pytest.raises(errors.UsageError, match=r'expected at most 2179'):
    next(talk.ask('z' * 5000))
  assert talk.messages == known


def test_a_run_without_a_template(tmp_path, capsys):
  experiment = types.SimpleNamespace(
    decode_options=decoding.Options(method='greedy', max_decode_steps=9),
    tokenizer=tokenization.BYTES,
    encode_prompt=tokenization.BYTES.encode,
    # Characters are shown when they are whole.
    stream=lambda *_: iter([[0x61, 0xC3], [0xA9, 0xE4], [0xB8]]),
    prompts=folder.Prompts(hf_test.make(tmp_path / 'hf') / 'tokenizer.json'),
  )
  talk = chat.Chat(experiment, system=None, seed=0)
  assert 'has no template' in talk.why_plain
  assert [*talk.ask('x')] == ['a', 'é', '', '\ufffd']
  assert talk.messages == []
  with pytest.raises(errors.UsageError, match='--system'):
    chat.Chat(experiment, system='Be brief.', seed=0)
  experiment.decode_options = decoding.Options(
    method='beam', max_decode_steps=9
  )
  with pytest.raises(errors.UsageError, match='--method'):
    chat.Chat(experiment, system=None, seed=0)


def test_prompts_that_cannot_be_continued_are_refused(experiment):
  for prompt, what in (
    ('z' * 5000, 'tokens; expected 1 to 2179'),
    ('', 'has 0 tokens'),
    ([], 'conversation'),
    (['Hi'], 'conversation'),
    ({'messages': [message('user', 'Hi')], 'tools': 'add'}, 'tools is'),
  ):
    with pytest.raises(errors.UsageError, match=what):
      experiment.check_prompt(prompt)


@pytest.mark.process
def test_prompts_are_checked_before_the_weights_are_read(run, tmp_path):
  good = [{'prompt': 'naïve'}, {'messages': [message('user', 'Hi')], 'id': 7}]
  # The template writes no tools, and the answer is the same.
  good.append(good[1] | {'tools': [{'name': 'add'}]})
  file, output = tmp_path / 'p.jsonl', tmp_path / 'o.jsonl'

  def decode(directory, *prompts):
    file.write_text('\n'.join(map(json.dumps, prompts)))
    return processes.run(
      *('experiment.py', '--jaxline_mode=decode', f'--config={directory}'),
      f'--config.decode.prompts={file}',
      f'--config.decode.output={output}',
      '--config.experiment_kwargs.config.decode.max_decode_steps=21',
      JAX_DISABLE_MOST_OPTIMIZATIONS='1',
    )

  done = decode(run, *good)
  assert done.returncode == 0, done.stderr
  lines = [json.loads(x) for x in output.read_text().splitlines()]
  assert [x.pop('continuations')[0]['tokens'] for x in lines] == [21] * 3
  assert lines == good
  assert '=== user: Hi\n' in done.stdout
  # Without its weights: they are not reached.
  broken = tmp_path / 'broken'
  shutil.copytree(run, broken)
  for path in broken.glob('checkpoints/**/*'):
    if path.is_file() and path.stat().st_size > 20_000:
      path.write_bytes(b'')
  done = decode(broken, *good, {'messages': []})
  assert (done.returncode, done.stdout.count('===')) == (2, 0)
  assert f'{file}:4: A conversation is []' in done.stderr


@pytest.mark.process
@pytest.mark.parametrize('is_ascii', [False, True])
def test_a_terminal(run, is_ascii, request):
  names = {'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0', 'LC_ALL': 'C'}
  env = names if is_ascii else {'LC_ALL': 'C.UTF-8'}
  command = 'setsid', '--ctty', sys.executable, '-m', 'examples.lm.chat'
  ours, theirs = pty.openpty()
  process = subprocess.Popen(
    [*command, str(run), '--max_decode_steps=2000', '--method=greedy'],
    **dict.fromkeys(['stdin', 'stdout', 'stderr'], theirs),
    env=os.environ | env,
  )
  request.addfinalizer(process.kill)
  os.close(theirs)
  typed = functools.partial(os.write, ours)

  def read(pattern):
    """Returns what is shown up to a pattern, and in how many pieces."""
    shown, pieces, end = b'', 0, time.monotonic() + 60
    while not re.search(pattern, shown, re.DOTALL):
      assert select.select([ours], [], [], 1 + end - time.monotonic())[0]
      shown += os.read(ours, 4096)
      pieces += 1
    return shown, pieces

  read(b'> $')
  typed('naïve\n'.encode())
  shown, pieces = read(rb'Cut at.*> $')
  assert pieces > 9
  assert b'\x17' not in shown
  assert ('\ufffd'.encode() in shown) != is_ascii
  # Latin-1 is read too. Ctrl-C ends the answer, and not the program, which
  # waits: the terminal has no room for so long an answer.
  typed(b'\xff\n')
  read(rb'\n\S{4}')
  typed(b'\x03')
  shown, _ = read(rb'> $')
  assert b'Cut at' not in shown
  typed(b'/reset\n')
  read(b'> $')
  time.sleep(0.5)
  typed(b'\x03')
  read(b'\n> $')
  typed(b'\x04')
  assert process.wait(60) == 0
