"""Measures the gain of each part of configs/lm.py's recipe over seeds.

    python -m benchmarks.lm_recipe [--seeds=3] [--steps=1500] [--plot]

Trains the real experiment without one part of the recipe at a time, and prints
the bits per byte as the table of docs/reference/lm_recipe.md. Validation
documents are held out from the training files of configs/lm.py; its own
held-out files are never read. Runs that have a result are not repeated. A run
takes about two minutes.
"""

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

from benchmarks import harness
from jaxline.inputs import text

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'benchmarks' / 'results' / 'lm_recipe' / 'ablation.json'
PLOT = ROOT / 'docs' / 'images' / 'lm_recipe.svg'
_LM = '--config.experiment_kwargs.config'
_BYTES = [f'{_LM}.tokenizer=bytes', f'{_LM}.model.vocab_size=257']
_SMALL = [f'{_LM}.model.normalize_embedding=False']
_COSINE = [f'{_LM}.decay=cosine', f'{_LM}.final_learning_rate=0.05']

# Name -> what differs, and how many of its steps take as long as one of ours.
ROWS: dict[str, tuple[list[str], float]] = {
  'the recipe': ([], 1.0),
  'cosine to 5% of the peak': (_COSINE, 1.0),
  'embedding not normalized': (_SMALL, 1.0),
  'bytes for tokens': (_BYTES, 1.15),
  'none of these: the earlier recipe': (_BYTES + _SMALL + _COSINE, 1.15),
}
# Documents whose hash is below this fraction are held out. The 5% that
# configs/lm.py holds out would be among them, but are not in these files: about
# 5% of all documents remain.
_EVAL_FRACTION = 0.1


def write_training_files(folder: pathlib.Path) -> None:
  """Writes the documents that configs/lm.py trains on, as files."""
  train = text.load_corpus('stdlib').train
  bounds = [*train.starts.tolist(), len(train.tokens)]
  for i, name in enumerate(train.names):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = train.tokens[bounds[i] + 1 : bounds[i + 1]]
    path.write_bytes(tokens.astype('uint8').tobytes())


def train(
  overrides: Sequence[str], steps: int, seed: int, folder: pathlib.Path
) -> dict[str, float]:
  """Trains; returns the final bits per byte and the CPU seconds."""
  with tempfile.TemporaryDirectory() as run:
    command = [
      *(sys.executable, 'experiment.py', '--config=configs/lm.py'),
      '--jaxline_mode=train_and_eval',
      f'--config.checkpoint_dir={run}',
      f'--config.random_seed={seed}',
      f'--config.training_steps={steps}',
      f'--config.eval_interval={steps}',
      '--config.save_checkpoint_interval=-1',
      f'{_LM}.files={folder}',
      f'{_LM}.eval_fraction={_EVAL_FRACTION}',
      f'{_LM}.sample_length=0',
      *overrides,
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = (pathlib.Path(run) / 'eval' / 'metrics.jsonl').read_text()
  rows = [json.loads(line) for line in lines.splitlines()]
  bits = [x['bits_per_byte'] for x in rows if 'bits_per_byte' in x]
  cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return {'bits_per_byte': bits[-1], 'cpu_secs': round(cpu, 1)}


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
  """Returns the table of the page.

  Args:
    results: Row -> seed -> the result of `train`.
  """
  recipe = _bits(results['the recipe'])
  rows = []
  for name, runs in results.items():
    bits = _bits(runs)
    shown = ', '.join(f'{x:.3f}' for x in sorted(bits))
    loss = statistics.mean(bits) - statistics.mean(recipe)
    rows.append((name, f'{statistics.mean(bits):.3f}', shown, f'{loss:.3f}'))
  titles = ('', 'bits per byte', 'of each seed', 'worse by')
  return harness.markdown(titles, rows)


def _bits(runs: dict[str, dict[str, float]]) -> list[float]:
  return [x['bits_per_byte'] for x in runs.values()]


def plot(results: dict[str, dict[str, dict[str, float]]]) -> None:
  """Draws each seed of each row as a dot."""
  import matplotlib

  matplotlib.use('svg')
  # The file is the same each time, and its text stays text.
  matplotlib.rcParams.update(
    {'svg.hashsalt': 'lm_recipe', 'svg.fonttype': 'none'}
  )
  from matplotlib import pyplot

  _, axes = pyplot.subplots(figsize=(8, 0.5 * len(results) + 1))
  for i, runs in enumerate(results.values()):
    bits = _bits(runs)
    axes.plot(bits, [i] * len(bits), 'o', color='#1f6feb', alpha=0.6)
    axes.plot(statistics.mean(bits), i, '|', color='#1f2328', markersize=18)
  axes.set_yticks(range(len(results)), list(results))
  axes.set_ylim(len(results) - 0.5, -0.5)
  axes.set_xlabel('bits per byte of held-out documents; less is better')
  axes.grid(axis='x', alpha=0.3)
  pyplot.savefig(PLOT, bbox_inches='tight', metadata={'Date': None})


def main(argv: Sequence[str] | None = None) -> None:
  """Trains the runs that have no result yet, and prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--steps', type=int, default=1500)
  parser.add_argument('--results', type=pathlib.Path, default=RESULTS)
  parser.add_argument('--plot', action='store_true')
  args = parser.parse_args(argv)
  results = {name: {} for name in ROWS}
  if args.results.exists():
    kept = json.loads(args.results.read_text())
    if kept['steps'] != args.steps:
      parser.error(
        f'{args.results} has runs of {kept["steps"]} steps, not {args.steps}:'
        ' give another file by --results.'
      )
    results |= kept['rows']
  with tempfile.TemporaryDirectory() as folder:
    write_training_files(pathlib.Path(folder))
    for seed in map(str, range(1, args.seeds + 1)):
      for name, (overrides, factor) in ROWS.items():
        if seed not in results[name]:
          results[name][seed] = train(
            overrides, int(args.steps * factor), int(seed), pathlib.Path(folder)
          )
          args.results.write_text(
            json.dumps({'steps': args.steps, 'rows': results}, indent=2) + '\n'
          )
  print(table(results))
  if args.plot:
    plot(results)


if __name__ == '__main__':
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  main()
