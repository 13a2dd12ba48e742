"""Shows a run in a notebook, as HTML without scripts."""

from collections.abc import Mapping
import html
from typing import Any

import numpy as np

from jaxline.metrics import lines


def show(directory: str, best: Mapping[str, float], curves: Any) -> str:
  """Returns HTML of a run's numbers and loss; `curves` are as in `History`."""
  step = max((int(curve[-1, 0]) for curve in curves.values()), default=0)
  rows = {'Run directory': directory, 'Step': step}
  rows |= {f'Best {k}': x for k, x in best.items()}
  rows |= {f'Last {k}': float(x[-1, 1]) for k, x in sorted(curves.items())}
  text = '\n'.join(f'{k}: {lines.shorten(x)}' for k, x in rows.items())
  page = f'<pre>{html.escape(lines.escaped(text))}</pre>'
  points = curves.get('train/loss', np.empty([0, 2]))
  points = points[np.isfinite(points).all(1)][:: 1 + len(points) // 500]
  if len(points) < 2:
    return page
  low, high = points.min(0), points.max(0)
  points = (points - low) / np.where(high > low, high - low, 1)
  path = ' '.join(f'{480 * x:.0f},{120 - 120 * y:.0f}' for x, y in points)
  return (
    f'{page}<p>train/loss, {low[1]:.4g} to {high[1]:.4g}</p>'
    '<svg width="480" height="120"><polyline fill="none" stroke="currentColor"'
    f' points="{path}"/></svg>'
  )
