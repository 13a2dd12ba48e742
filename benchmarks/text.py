"""Tokenization, against Hugging Face `datasets` and an earlier commit.

    python -m benchmarks.text --megabytes=1000 --datasets=ENV/bin/python
    python -m benchmarks.text --megabytes=20 --before=CHECKOUT --rounds=1

ENV has `datasets` and `tokenizers`. CHECKOUT is a clone at an earlier commit.
The text is generated: lines of words from a Zipf distribution, in one file and
in 10,000 files. Each side is a separate process. It uses a byte-level BPE of
8,000 tokens, trained on Python's source, or the bundled tokenizer, 'stdlib'.
In the single file, `datasets` takes each line as a document, because one text
of 1 GB does not fit in memory. It writes the tokens as Arrow files. An earlier
commit needs a second file, of five bytes, and hours for a file above 20 MB.

Seconds and CPU seconds count the complete process. The memory is the peak
resident memory, including Python and libraries. The sides take turns; the ratio
to `datasets` is the median over the rounds.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks import harness

_OURS = """
import sys
from absl import logging
from jaxline.inputs import text
logging.set_verbosity(logging.ERROR)
corpus = text.load_corpus(sys.argv[1], tokenizer=sys.argv[2],
                          eval_fraction=0.01, cache_dir=sys.argv[3])
print(corpus.train.tokens.size + corpus.eval.tokens.size)
"""
_THEIRS = """
import glob, os, sys
import datasets, tokenizers
datasets.disable_progress_bars()
path, spec, cache = sys.argv[1:]
files = sorted(glob.glob(f'{path}/*/*.txt'))
by = 'document' if len(files) > 1 else 'line'
data = datasets.load_dataset('text', data_files=files, sample_by=by,
                             split='train', cache_dir=cache)
tokenizer = tokenizers.Tokenizer.from_file(spec)
def encode(batch):
  found = tokenizer.encode_batch(batch['text'], add_special_tokens=False)
  return {'ids': [x.ids for x in found]}
data = data.map(encode, batched=True, remove_columns=['text'])
data = data.with_format('numpy')
print(sum(len(x['ids']) for x in data) if len(data) < 1e6 else '')
"""


def _generate(folder: pathlib.Path, size: int, num_files: int) -> None:
  """Writes about `size` bytes of text into files, in folders of 100 files."""
  rng = np.random.default_rng(0)
  letters = np.array([*'eeettaaooiinnsshhrrdlucmfwygpbvk'])
  words = [''.join(rng.choice(letters, n)) for n in rng.integers(2, 10, 50_000)]
  table = np.array([*words, *'.,;', '\n', '\n'])
  shares = 1 / (10 + np.arange(len(table)))
  shares[-5:] = 0.03
  shares /= shares.sum()
  for i in range(num_files):
    path = folder / f'{i // 100:03}' / f'{i:06}.txt'
    path.parent.mkdir(exist_ok=True, parents=True)
    left = size // num_files
    with path.open('w') as file:
      while left > 0:
        drawn = rng.choice(table, min(2**18, left // 6 + 1), p=shares)
        left -= file.write(' '.join(drawn.tolist())[:left] + '\n')


def _train_tokenizer(path: pathlib.Path) -> None:
  import tokenizers as hf

  model = hf.Tokenizer(hf.models.BPE())
  model.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = hf.trainers.BpeTrainer(
    vocab_size=8000,
    special_tokens=['<s>'],
    initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  files = [*pathlib.Path(os.__file__).parent.glob('*.py')]
  model.train([*map(str, files)], trainer)
  model.save(str(path))


def _measure(
  python: str, program: str, root: pathlib.Path, *arguments: str
) -> tuple[float, float, float, str]:
  """Returns seconds, CPU seconds, MiB and the output of a process."""
  with tempfile.TemporaryDirectory() as cache:
    env = os.environ | {'PYTHONPATH': str(root), 'HF_HOME': cache}
    began = time.perf_counter()
    process = subprocess.Popen(
      [python, '-c', program, *arguments, cache],
      stdout=subprocess.PIPE,
      text=True,
      cwd=root,  # With `-c`, Python imports from it.
      env=env | {'JAX_PLATFORMS': 'cpu', 'HF_HUB_OFFLINE': '1'},
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
      raise RuntimeError(f'{arguments} ended with {process.returncode}')
  cpu = usage.ru_utime + usage.ru_stime
  return seconds, cpu, usage.ru_maxrss / 2**10, output.strip()


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add('--megabytes', type=int, default=10)
  add('--files', type=int, default=10_000)
  add('--rounds', type=int, default=3)
  add('--datasets', help='the interpreter of an environment with `datasets`')
  add('--before', type=pathlib.Path, help='a checkout of an earlier commit')
  args = parser.parse_args()
  size = args.megabytes * 10**6
  table = []
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    spec = str(folder / 'tokenizer.json')
    _train_tokenizer(pathlib.Path(spec))
    sides = {
      'jaxline': (sys.executable, _OURS, harness.ROOT, spec),
      "jaxline, 'stdlib'": (sys.executable, _OURS, harness.ROOT, 'stdlib'),
    }
    if args.datasets:
      sides['datasets'] = (args.datasets, _THEIRS, folder, spec)
    if args.before:
      before = args.before.absolute()
      sides["before, 'stdlib'"] = (sys.executable, _OURS, before, 'stdlib')
    for num_files in 1, args.files:
      text = folder / str(num_files)
      _generate(text, size, num_files)
      if args.before and num_files == 1:  # It refused a single file.
        (text / 'other.txt').write_text('other')

      def turn(side: str, text: pathlib.Path = text) -> tuple:
        python, program, root, tokenizer = sides[side]
        return _measure(python, program, root, str(text), tokenizer)

      found = harness.turns(
        {side: lambda side=side: turn(side) for side in sides}, args.rounds
      )
      for side, samples in found.items():
        seconds, cpu, mib, _ = (
          statistics.median(x) if i < 3 else x
          for i, x in enumerate(zip(*samples, strict=True))
        )
        peers = found.get('datasets', samples)
        ratios = [b[0] / a[0] for a, b in zip(samples, peers, strict=True)]
        table.append(
          {
            'files': f'{num_files:,}',
            'side': side,
            'seconds': f'{seconds:.1f}',
            'CPU seconds': f'{cpu:.1f}',
            'MiB/s': f'{size / 2**20 / seconds:.2f}',
            'peak MiB': f'{mib:.0f}',
            'times as fast as `datasets`': (
              f'{statistics.median(ratios):.2f}' if args.datasets else ''
            ),
            'tokens': samples[0][3],
          }
        )
  print(f'{args.megabytes} MB, {args.rounds} rounds\n')
  print(harness.table_of(table))


if __name__ == '__main__':
  main()
