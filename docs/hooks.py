"""Hooks of MkDocs: pages from outside of docs/, and links that leave it.

The navigation in mkdocs.yml names pages of docs/, other Markdown files of the
repository, notebooks (as .md), and modules (in api/).
"""

import ast
import json
import pathlib
import posixpath
import re

from mkdocs.structure import files as mkdocs_files

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A code block, or a link within the repository: its text and its target.
LINK = re.compile(
  r'^ *```.*?^ *```$|\[([^\[\]]*)\]\((?!https?:|data:|#)([^)\s]+)\)',
  re.M | re.S,
)


def source_of(uri):
  """Returns the file of the repository that a page is made from."""
  page = ROOT / 'docs' / uri
  for path in (page, page.with_suffix('.ipynb')):
    if path.exists():
      return path
  return ROOT / uri


def on_files(files, config):
  """Adds the pages of the navigation that are not in docs/."""
  for uri in leaves(config['nav']):
    path = source_of(uri)
    if uri.startswith('api/'):
      text = api_page(pathlib.PurePath(uri).stem)
    elif path.suffix == '.ipynb':
      text = ''.join(cells(json.loads(path.read_text(encoding='utf-8'))))
    elif files.get_file_from_path(uri):
      continue
    else:
      text = path.read_text(encoding='utf-8')
    files.append(mkdocs_files.File.generated(config, uri, content=text))
  return files


def api_page(module):
  """Returns the page of a module, first the methods that a subclass writes."""
  path = ROOT / module.replace('.', '/')
  path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
  first, rest = '', ['!^_[^_]']
  for node in ast.parse(path.read_text(encoding='utf-8')).body:
    if isinstance(node, ast.ClassDef) and (names := abstract_methods(node)):
      options = f'members: {names}, show_docstring_attributes: false'
      first += f'::: {module}.{node.name}\n'
      first += f'    options: {{{options}, heading_level: 3}}\n\n'
      rest += [f'!^{name}$' for name in names if name[0] != '_']
  if not first:
    return f'# {module}\n\n::: {module}\n'
  return (
    f'# {module}\n\n## The methods that you write\n\n{first}'
    f'## All other names\n\n::: {module}\n    options: {{filters: {rest}}}\n'
  )


def abstract_methods(node):
  """Returns the names of the abstract methods of a class, in their order."""
  return [
    x.name
    for x in node.body
    if isinstance(x, ast.FunctionDef)
    and 'abc.abstractmethod' in map(ast.unparse, x.decorator_list)
  ]


def leaves(nav):
  """Yields the pages of a navigation."""
  for item in nav if isinstance(nav, list) else nav.values():
    if isinstance(item, str):
      yield item
    else:
      yield from leaves(item)


def cells(notebook):
  """Yields each cell of a notebook and its outputs, as Markdown."""
  for cell in notebook['cells']:
    source = ''.join(cell['source'])
    if cell['cell_type'] == 'markdown':
      yield f'{source}\n\n'
      continue
    yield f'```python\n{source}\n```\n\n'
    for output in cell['outputs']:
      if output['output_type'] == 'stream':
        yield f'```text\n{"".join(output["text"]).rstrip()}\n```\n\n'
      elif 'image/png' in output['data']:
        png = ''.join(output['data']['image/png']).replace('\n', '')
        yield f'![](data:image/png;base64,{png})\n\n'


def on_page_markdown(markdown, page, config, files):
  """Makes the links within the repository work on the site.

  A link to a file without a page leads to the repository if `repo_url` is set,
  and is plain text if not.
  """
  here = page.file.src_uri
  source = source_of(here)

  def replace(match):
    text, link = match.groups()
    if link is None:
      return match[0]
    name, hash_, anchor = link.partition('#')
    path = posixpath.normpath(
      posixpath.join(source.parent.relative_to(ROOT).as_posix(), name)
    )
    uri = path.removeprefix('docs/')
    for target in (uri.replace('.ipynb', '.md'), uri, f'{uri}/README.md'):
      if files.get_file_from_path(target):
        relative = posixpath.relpath(target, posixpath.dirname(here) or '.')
        return f'[{text}]({relative}{hash_}{anchor})'
    if not (ROOT / path).exists():
      return match[0]  # MkDocs reports it.
    if not config['repo_url']:
      return text
    return f'[{text}]({config["repo_url"]}/blob/main/{path}{hash_}{anchor})'

  markdown = LINK.sub(replace, markdown)
  if source.suffix == '.ipynb':
    title, rest = markdown.split('\n', 1)
    markdown = f'{title}\n\n[Download this notebook]({source.name})\n{rest}'
  return markdown
