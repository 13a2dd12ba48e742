"""Hooks of MkDocs: pages from outside of docs/, and links that leave it.

The navigation in mkdocs.yml may name any Markdown file of the repository, the
page of a notebook, and the page of a module (api/jaxline.MODULE.md).
"""

import json
import pathlib
import posixpath
import re

from mkdocs.structure import files as mkdocs_files

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A code block, or a link within the repository: its text, its target.
LINK = re.compile(
  r'^ *```.*?^ *```$|\[([^\[\]]*)\]\((?!https?:|#)([^)\s]+)\)', re.M | re.S
)


def on_files(files, config):
  """Adds the pages of the navigation that are not in docs/."""
  for uri in leaves(config['nav']):
    if files.get_file_from_path(uri):
      continue
    notebook = ROOT / 'docs' / uri.replace('.md', '.ipynb')
    if uri.startswith('api/'):
      module = pathlib.PurePath(uri).stem
      text = f'# {module}\n\n::: {module}\n'
    elif notebook.exists():
      text = ''.join(cells(json.loads(notebook.read_text(encoding='utf-8'))))
      text = text.replace(
        '\n', f'\n\n[Download this notebook]({notebook.name})\n', 1
      )
    else:
      text = (ROOT / uri).read_text(encoding='utf-8')
    files.append(mkdocs_files.File.generated(config, uri, content=text))
  return files


def leaves(nav):
  """Yields the pages of a navigation."""
  for item in nav if isinstance(nav, list) else nav.values():
    if isinstance(item, str):
      yield item
    else:
      yield from leaves(item)


def cells(notebook):
  """Yields each cell of a notebook and what it printed, as Markdown."""
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
  """Makes the links within the repository lead to pages of the site.

  A link to a file without a page leads to the repository, if its address is
  known, and is plain text if not.
  """
  here = page.file.src_uri
  if (ROOT / 'docs' / here).exists() or here.startswith('notebooks/'):
    folder = posixpath.dirname(f'docs/{here}')
  else:
    folder = posixpath.dirname(here)

  def replace(match):
    text, link = match.groups()
    if link is None or link.startswith('data:'):
      return match[0]
    target, hash_, anchor = link.partition('#')
    path = posixpath.normpath(posixpath.join(folder, target))
    uri = path.removeprefix('docs/')
    names = (uri.replace('.ipynb', '.md'), uri, f'{uri}/README.md')
    if text == 'Download this notebook':
      names = (uri,)
    for name in names:
      if files.get_file_from_path(name):
        relative = posixpath.relpath(name, posixpath.dirname(here) or '.')
        return f'[{text}]({relative}{hash_}{anchor})'
    if not (ROOT / path).exists():
      return match[0]  # MkDocs reports it.
    if not config['repo_url']:
      return text
    return f'[{text}]({config["repo_url"]}/blob/main/{path}{hash_}{anchor})'

  return LINK.sub(replace, markdown)
