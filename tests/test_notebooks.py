"""The notebooks run, and the code on the page for users of Pax does.

To run them anew and keep what they print:

    PYTHONPATH=. JAX_PLATFORMS=cpu python tests/test_notebooks.py
"""

import ast
import pathlib
import re
import tempfile

import nbclient
import nbformat
import pytest

from examples.pax import experiment_registry

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / 'docs' / 'notebooks').glob('*.ipynb'))
PAGE = ROOT / 'docs' / 'reference' / 'from_pax.md'
# A statement that says so in its last line is expected to raise this.
RAISES = re.compile(r'#.*?\b(\w*Error)\b')


def execute(notebook, folder):
  """Runs a notebook in a folder; raises what a cell raises."""
  nbclient.NotebookClient(
    notebook,
    timeout=150,
    kernel_name='python3',
    record_timing=False,
    coalesce_streams=True,
    resources={'metadata': {'path': str(folder)}},
  ).execute()
  # Else the version of Python, and more.
  notebook.metadata.language_info = {'name': 'python'}


@pytest.mark.process
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
  # The library alone, as `pip install .` does: not `examples` beside it.
  installed = tmp_path / 'installed'
  installed.mkdir()
  (installed / 'jaxline').symlink_to(ROOT / 'jaxline')
  monkeypatch.setenv('PYTHONPATH', str(installed))
  # Most of the time would go into LLVM.
  monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
  notebook = nbformat.read(path, as_version=4)
  (tmp_path / 'here').mkdir()
  execute(notebook, tmp_path / 'here')
  assert list((tmp_path / 'here').iterdir()) == []  # Folders of its own.


def statements(markdown):
  """Yields (code, what it shall raise) of all Python in a page, in order."""
  for match in re.finditer(r'^```python\n(.*?)^```', markdown, re.M | re.S):
    # As many lines as stand before it, for tracebacks.
    before = markdown.count('\n', 0, match.start(1))
    source = '\n' * before + match[1]
    lines = source.splitlines()
    for node in ast.parse(source).body:
      raises = RAISES.search(lines[node.end_lineno - 1])
      yield ast.Module([node], []), raises[1] if raises else None


def test_page_for_users_of_pax(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  # What the page registers is forgotten afterwards.
  known = experiment_registry.get_all()
  monkeypatch.setattr(experiment_registry, '_registered', dict(known))
  names, raised = {'__name__': 'from_pax'}, []
  for code, expected in statements(PAGE.read_text(encoding='utf-8')):
    found = None
    try:
      exec(compile(code, str(PAGE), 'exec'), names)
    except Exception as e:
      found = type(e).__name__
      raised.append(found)
    assert found == expected
  assert raised == ['AttributeError'] * 4 + ['UnknownError']


if __name__ == '__main__':
  for saved in NOTEBOOKS:
    book = nbformat.read(saved, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
      execute(book, directory)
    nbformat.write(book, saved)
