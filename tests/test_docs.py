"""The pages of the documentation: links, commands, and quoted results."""

import ast
import importlib
import json
import pathlib
import re
import runpy
import shutil
import types

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import lm_recipe
import jaxline
from jaxline import base_config
from jaxline import errors
from jaxline import platform

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The target of a Markdown link, without those of other sites.
LINK = re.compile(r'\]\((?!https?:)([^)\s]+)\)')
HEADING = re.compile(r'^#+ (.+)$', re.M)


def tracked():
  """Returns the files of the repository or a release, without recorded runs."""
  folders = 'docs', 'jaxline', 'examples', 'configs', 'benchmarks', 'tests'
  found = [x for f in folders for x in (ROOT / f).rglob('*') if x.is_file()]
  golden = ROOT / 'tests' / 'golden'
  return [*ROOT.glob('*.md'), *(p for p in found if golden not in p.parents)]


def anchors(text):
  """Returns what a link to a heading of a page may be, as GitHub has it."""
  text = re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)
  return {
    re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-')
    for heading in HEADING.findall(text)
  }


def test_links():
  pages = [p for p in tracked() if p.suffix in ('.md', '.ipynb')]
  assert ROOT / 'README.md' in pages
  wrong, linked = [], set()
  for path in pages:
    for link in LINK.findall(path.read_text(encoding='utf-8')):
      name, _, anchor = link.partition('#')
      target = path.parent / name if name else path
      linked |= {target.resolve()} - {path}
      if not target.exists() or (
        anchor and anchor not in anchors(target.read_text(encoding='utf-8'))
      ):
        wrong.append(f'{path.relative_to(ROOT)}: {link}')
  assert not wrong, '\n'.join(wrong)
  # Every page and picture is linked from another page.
  pictures = (ROOT / 'docs' / 'images').glob('*.[ps][nv]g')
  orphans = {*(ROOT / 'docs').rglob('*.md'), *pictures} - linked
  assert not orphans, orphans


# Quoted from Python, pip, absl, JAX, XLA and Grain.
FOREIGN = """
, but this version of jax requires version >=
An NVIDIA GPU may be present on this machine, but a CUDA-enabled jaxlib
DEADLINE_EXCEEDED
Failed to add port to server
Failed to start RPC server
File too large
No module named
No space left on device
Permission denied
RegisterTask
Unknown command line flag
Unknown flag
Worker process was terminated unexpectedly with exit code
[SPMD] Involuntary full rematerialization
is newer than and incompatible with jax version
jaxlib is version
jaxlib version
not in '>=3.11'
requires a different Python
stopped sending heartbeats
"""


def strings(path):
  """Yields the strings of a module, with NUL in place of each value."""
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    values = (getattr(x, 'value', '') for x in parts)
    text = ''.join(x if isinstance(x, str) else '\0' for x in values)
    yield text * ('(?P<' not in text)  # Patterns search for messages.


def test_messages_that_troubleshooting_quotes():
  """The code has them, and an error that ends a run links to its section."""
  modules = (ROOT / 'jaxline').rglob('*.py')
  known = '\n'.join(x for path in modules for x in strings(path))
  foreign = tuple(FOREIGN.strip().splitlines())
  page, linked = (ROOT / 'docs' / 'troubleshooting.md').read_text(), set()
  for section in re.split(r'^### ', page, flags=re.M)[1:]:
    (anchor,) = anchors(f'# {section.splitlines()[0]}')
    for quote in re.findall(r'^```text\n(.*?)^```$', section, re.M | re.S):
      parts = (x.strip(' :;') for x in re.split(r'\.\.\.|\n', quote))
      unknown = [x for x in parts if not x.startswith(foreign)]
      assert [x for x in unknown if x not in known] == []
      links = {*map(errors.link, quote.splitlines())} - {''}
      assert links <= {f' (see docs/troubleshooting.md#{anchor})'}, quote
      linked |= {anchor.replace('-', '_')} if links else set()
  assert linked == errors._SECTIONS.groupindex.keys()


def test_pages_have_the_kept_results_of_benchmarks():
  newest = max((ROOT / 'benchmarks' / 'results').glob('*.json'))
  found = json.loads(newest.read_text(encoding='utf-8'))
  text = benchmarks.PAGE.read_text(encoding='utf-8')
  by_hand = benchmarks._BY_HAND + text.partition(benchmarks._BY_HAND)[2]
  assert text == benchmarks.page(found, by_hand), (
    'Run python -m benchmarks --page FILE with the newest file of'
    ' benchmarks/results.'
  )
  rows = json.loads(lm_recipe.RESULTS.read_text(encoding='utf-8'))['rows']
  page = (ROOT / 'docs' / 'reference' / 'lm_recipe.md').read_text()
  assert lm_recipe.table(rows) in page


@pytest.mark.process
def test_the_port_from_lightning_learns(tmp_path):
  pytest.importorskip('sklearn')
  page = (ROOT / 'docs' / 'reference' / 'from_lightning.md').read_text()
  _, code = page.split('```python\n# examples/yours_digits.py\n')
  (tmp_path / 'yours.py').write_text(code.partition('```')[0])
  module = runpy.run_path(str(tmp_path / 'yours.py'), run_name='yours')
  place = {'checkpoint_dir': str(tmp_path / 'run')}
  result = jaxline.fit(module['Classifier'], module['get_config'](), place)
  assert result.best['eval/accuracy'] > 0.85


# A command of a page that starts experiment.py, on one line; and its config.
COMMAND = re.compile(r'^(?:\w+=\S+ )*python experiment\.py .+', re.M)
CONFIG = re.compile(r'--config=((configs|examples)/\w+\.py)(:([\w:]+)(?!\S))?')


def test_commands_name_configs_and_keys_that_exist():
  checked, wrong = 0, []
  for page in (p for p in tracked() if p.suffix == '.md'):
    text = re.sub(r'\\\n\s*', '', page.read_text(encoding='utf-8'))
    for command in COMMAND.findall(text):
      found = CONFIG.search(command)
      if not found or 'yours' in found[1]:
        continue
      module = runpy.run_path(str(ROOT / found[1]))
      config = module['get_config'](*filter(None, [found[4]]))
      flat = base_config.flat(config.to_dict())
      # Sections may be named, too.
      keys = ''.join(f'\n{key}.' for key in flat)
      used = re.findall(r'--config\.([\w.]+)[= ]', command)
      modes = re.findall(r'--jaxline_mode=(\w+)', command)
      unknown = [key for key in used if f'\n{key}.' not in keys]
      unknown += set(modes) - set(platform.MODES)
      wrong += [f'{page.relative_to(ROOT)}: {command}: {x}' for x in unknown]
      checked += len(used)
  assert not wrong, '\n'.join(wrong)
  assert checked > 30


def test_tests_that_the_table_of_faults_names_exist():
  page = ROOT / 'docs' / 'reference' / 'reliability.md'
  named = page.read_text(encoding='utf-8')
  names = set(re.findall(r'\b(test_\w+)`', named))
  files = set(re.findall(r'`(tests/[\w/]+\.py)`', named))
  assert len(names | files) > 30
  sources = [p for p in tracked() if re.fullmatch(r'test_\w+\.py', p.name)]
  assert files <= {str(p.relative_to(ROOT)) for p in sources}
  text = '\n'.join(p.read_text(encoding='utf-8') for p in sources)
  assert not [name for name in names if f'def {name}(' not in text]


@pytest.mark.parametrize('name', ['image', 'lm'])
def test_a_copy_of_an_example_uses_the_copy(name, tmp_path, monkeypatch):
  if name == 'image':
    pytest.importorskip('sklearn')
  copy = f'copy_of_{name}'
  shutil.copytree(ROOT / 'examples' / name, tmp_path / copy)
  monkeypatch.syspath_prepend(tmp_path)
  owners = {}
  for path in sorted((tmp_path / copy).glob('*.py')):
    if path.stem.endswith('_test'):
      continue
    module = importlib.import_module(f'{copy}.{path.stem}')
    for key, value in vars(module).items():
      is_module = isinstance(value, types.ModuleType)
      owner = value.__name__ if is_module else getattr(value, '__module__', '')
      owners[f'{path.name}: {key}'] = str(owner)
  assert f'{copy}.model' == owners['experiment.py: model']
  original = f'examples.{name}.'
  assert not [k for k, x in owners.items() if f'{x}.'.startswith(original)]
  # And its README names the modules that it shares with the original.
  readme = (tmp_path / copy / 'README.md').read_text(encoding='utf-8')
  shared = {x for x in owners.values() if x.startswith('examples.')}
  assert not {x for x in shared if f'{x.replace(".", "/")}.py' not in readme}
