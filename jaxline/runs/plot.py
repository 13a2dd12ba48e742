"""Draws curves of runs. In a notebook: `plot.plot(['runs'], 'eval/loss')`."""

import argparse
from collections.abc import Sequence
import os
from typing import Any

import numpy as np

from jaxline import errors
from jaxline import runs as runs_lib
from jaxline.metrics import lines
from jaxline.runs import tables


def curve(group: tables.Group, name: str) -> np.ndarray:
  """Returns [N, (step, mean, standard error)] at steps that all runs have."""
  curves = [run.curves[name] for run in group if name in run.curves]
  steps = sorted(set.intersection(*map(set, curves))) if curves else []
  means = [tables.mean([x[step] for x in curves]) for step in steps]
  found = [(step, *x) for step, x in zip(steps, means, strict=True)]
  return np.array(found, float).reshape(-1, 3)


def plot(
  places: Sequence[str], metrics: str | None = None, by_seed: bool = False
) -> Any:
  """Returns a matplotlib figure with axes for each metric.

  Args:
    places: Directories of runs, or directories with runs below them.
    metrics: Names, separated by commas; None means the default of `compare`.
    by_seed: Whether to draw runs that differ only in their seed as one line,
      their mean, with a band of the standard error.
  """
  pyplot = runs_lib.optional('matplotlib.pyplot')
  runs = runs_lib.find(places)
  names, groups = tables.metrics(runs, metrics), tables.groups(runs, by_seed)
  size = 8, 4 * max(1, len(names))
  figure = pyplot.figure(figsize=size, layout='constrained')
  for i, name in enumerate(names):
    axes = figure.add_subplot(len(names), 1, i + 1, xlabel='step')
    axes.set_ylabel(_shown(name))
    for label, group in zip(tables.names(groups), groups, strict=True):
      steps, means, deviations = curve(group, name).T
      # Matplotlib would omit a label that begins with _.
      label = f' {_shown(label)}'
      (line,) = axes.plot(steps, means, label=label)
      edges = means - deviations, means + deviations
      axes.fill_between(steps, *edges, color=line.get_color(), alpha=0.2, lw=0)
    axes.legend()
  pyplot.close(figure)  # A notebook would show it twice.
  return figure


def _shown(text: str) -> str:
  """Escapes control characters and matplotlib's math mode."""
  return lines.escaped(text).replace('$', r'\$')


def command(args: argparse.Namespace) -> None:
  """Runs `runs plot`."""
  os.environ['MPLBACKEND'] = 'agg'  # This backend needs no screen.
  figure = plot(args.dir, args.metrics, args.group)
  try:
    figure.savefig(args.out, format='png')
  except OSError as e:
    raise errors.UsageError(f'--out: {e}') from e
  lines.print_text(f'Wrote {args.out}.')
