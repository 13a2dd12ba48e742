"""Does what docs/tutorial.md asks its reader to do, step by step."""

import os
import shutil
import subprocess
import sys

import pytest

import jaxline
from tests import processes
from tests import test_howto

RUN = {'bash': ['bash', '-euc'], 'python': [sys.executable, '-c']}


@pytest.mark.process
@pytest.mark.timeout(900)
def test_each_step_does_what_the_page_shows(tmp_path, monkeypatch):
  root = processes.ROOT
  shutil.copytree(root / 'examples', tmp_path / 'examples')
  shutil.copy(root / 'experiment.py', tmp_path)
  monkeypatch.delenv('XLA_FLAGS')  # As a reader has it: one device.
  monkeypatch.setenv('PYTHONPATH', str(root))
  path = f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}'
  monkeypatch.setenv('PATH', path)
  page = (root / 'docs' / 'tutorial.md').read_text(encoding='utf-8')
  (_, install), *steps = test_howto.BLOCK.findall(page)
  assert 'pip install' in install  # This is not done again.
  printed = ''
  for language, code in steps:
    if language == 'diff':
      test_howto.change(tmp_path, code)
      continue
    command = [*RUN[language], code]
    done = subprocess.run(
      command, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f'{code}\n{done.stdout}\n{done.stderr}'
    printed += done.stdout

  few, first, second = (
    jaxline.history(str(tmp_path / 'runs' / name))
    for name in ('few', 'first', 'second')
  )
  assert few['train/loss'][-1, 1] < 0.3
  for history in (first, second):
    steps, bits = history['eval/bits_per_byte'].T
    assert sorted({*steps}) == [250, 500, 750, 1000]
    assert bits[-1] < bits[0] < 5
  assert 0.3 < first['eval/accuracy'][-1, 1] < 1
  assert second['eval/bits_p90'][-1, 1] > second['eval/bits_per_byte'][-1, 1]
  assert 'values are equal to the bit' in printed
  assert "'in': (8, 257, 128)" in printed
