"""Draws terminal.svg of a terminal's text and colours, which come on stdin.

To record them, run `tmux capture-pane -e -p`. Needs
`pip install -e '.[docs]'`.
"""

import io
import pathlib
import re
import sys

from rich import console
from rich import terminal_theme
from rich import text

_WIDTH = 100


def main() -> None:
  """Reads text with colours of a terminal; writes the picture."""
  lines = sys.stdin.read().rstrip().splitlines()
  shown = console.Console(width=_WIDTH, record=True, file=io.StringIO())
  screen = text.Text.from_ansi('\n'.join(line.rstrip() for line in lines))
  shown.print(screen, end='\n\n')  # Underscores of the last line are cut off.
  svg = shown.export_svg(title='jaxline', theme=terminal_theme.MONOKAI)
  # The fonts would come from a server; the reader's own monospace one does.
  svg = re.sub(r'@font-face \{.*?\}\s*', '', svg, flags=re.DOTALL)
  path = pathlib.Path(__file__).with_suffix('.svg')
  path.write_text(svg, encoding='utf-8')


if __name__ == '__main__':
  main()
