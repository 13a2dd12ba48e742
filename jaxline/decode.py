"""`--jaxline_mode=decode`: continues prompts with a checkpoint's weights."""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import errno
import io
import itertools
import json
import pathlib
import sys
from typing import Any, TextIO

import jax
from ml_collections import config_dict

from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline.base import debug
from jaxline.checkpoint import protocol
from jaxline.compat import experiments
from jaxline.metrics import files
from jaxline.metrics import lines
from jaxline.parallel import distributed
from jaxline.parallel import prng
from jaxline.run_directory import logs

# A text, the messages of a chat, or a dict with `messages` and `tools`.
_Prompt = str | list[dict[str, Any]] | dict[str, Any]
# The place of a prompt, such as 'FILE:3', the prompt, and its JSON record.
_Line = tuple[str, _Prompt, dict[str, Any]]
_TERMINAL = 'the terminal'


def restored_experiment(
  experiment_class: Any,
  mode: str,
  config: config_dict.ConfigDict,
  checkpointer: protocol.FullCheckpointer,
  series: str,
  step: int | None,
  check: Callable[[experiment_lib.FullExperiment], None] = lambda _: None,
) -> tuple[experiment_lib.FullExperiment, int]:
  """Returns an experiment with the weights of a checkpoint, and its step.

  A step of None means the newest. `check` is called before reading weights.
  """
  if not checkpointer.can_be_restored(series):
    other = '' if series == 'latest' else ", or set series = 'latest'"
    raise errors.UsageError(
      f'{config.checkpoint_dir} has no checkpoint of {series!r}. Train first'
      " with config.checkpointer = 'durable', or give the directory of a run"
      f' that has saved one{other}.'
    )
  if step is not None and step not in (steps := checkpointer.steps(series)):
    raise errors.UsageError(
      f'{config.checkpoint_dir} has no checkpoint of step {step}. Of {series!r}'
      f' it has the steps {steps}.'
    )
  init_rng = experiments.declared(experiment_class).eval_init_rng(config)
  with debug.log_activity('experiment init'):
    experiment = experiments.construct(experiment_class, mode, init_rng, config)
  check(experiment)
  state = protocol.new_state(checkpointer, experiment, series=series)
  with debug.log_activity('checkpoint restore'):
    checkpointer.restore(series, step=step)
  return experiment, int(state.global_step)


def _records(source: Iterable[str | bytes], path: str) -> Iterator[_Line]:
  """Yields the prompt of each line. Invalid bytes become U+FFFD."""
  for number, line in enumerate(source, 1):
    place = f'{path}:{number}'
    if isinstance(line, str):  # A UTF-8 terminal may have the locale C.
      line = line.encode(errors='surrogateescape')
    text = line.decode(errors='replace')
    is_whole = text.encode() == line
    text = text.removeprefix('\ufeff').rstrip('\r\n')
    if not text.strip():
      continue
    key, record = 'prompt', {'prompt': text}
    if path.endswith('.jsonl'):
      kinds = ('prompt', str), ('messages', list)
      found = ((k, files.parse_record(text, k, kind)) for k, kind in kinds)
      key, record = next((x for x in found if x[1]), ('', {}))
    if not record:
      raise errors.UsageError(
        f'{place} is {text[:80]!r}; expected JSON, such as {{"prompt": "Once"}}'
        ' or {"messages": [{"role": "user", "content": "Hi"}]}.'
      )
    given, record = record, files.replace_surrogates(record)
    if not is_whole or record != given:
      lines.warn_once(
        f'{place} is not valid Unicode; U+FFFD replaces the invalid parts.'
      )
    prompt = record[key]
    if key == 'messages' and record.get('tools') is not None:
      prompt = {name: record[name] for name in ('messages', 'tools')}
    yield place, prompt, record


def _checked(
  source: Iterable[_Line], experiment: experiment_lib.FullExperiment
) -> Iterator[tuple[_Prompt, dict[str, Any]]]:
  """Yields the prompts that the experiment accepts, with their records."""
  for place, prompt, record in source:
    try:
      experiment.check_prompt(prompt)
    except errors.UsageError as e:
      if not place.startswith(_TERMINAL):
        raise errors.UsageError(f'{place}: {e}') from e
      lines.print_text(e, sys.stderr)  # The user can type a new one.
    else:
      yield prompt, record


def _typed() -> Iterator[str]:
  """Yields lines that the user types, until Ctrl-D."""
  if isinstance(sys.stdin, io.TextIOWrapper):
    sys.stdin.reconfigure(errors='surrogateescape')
  with contextlib.suppress(EOFError):
    while True:
      yield input('prompt> ')
  print()


def _source(options: config_dict.ConfigDict) -> tuple[Iterable[_Line], int]:
  """Returns the prompts, as a list if from a file, and the batch size."""
  if (path := options.prompts) is not None:
    try:
      raw = pathlib.Path(path).read_bytes()
    except OSError as e:
      raise errors.UsageError(f'config.decode.prompts is {path!r}: {e}.') from e
    return [*_records(raw.splitlines(), path)], options.batch_size
  if sys.stdin.isatty():
    return _records(_typed(), _TERMINAL), 1
  source = getattr(sys.stdin, 'buffer', sys.stdin)
  return _records(source, 'standard input'), options.batch_size


def decode(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: protocol.FullCheckpointer,
) -> None:
  """Continues all prompts of `config.decode`; prints and writes the results.

  With several processes, process 0 reads the prompts and writes.
  """
  options = config.decode
  is_chief = jax.process_index() == 0
  # Read first, so that a missing file is reported before the slow restore.
  source, size = _source(options) if is_chief else ((), 1)
  records: Iterator[tuple[_Prompt, dict[str, Any]]] = iter(())

  def check(experiment: experiment_lib.FullExperiment) -> None:
    nonlocal records
    records = _checked(source, experiment)
    if isinstance(source, list):
      records = iter([*records])

  rng = prng.stream(jax.random.PRNGKey(config.random_seed), 'decoding')
  experiment, step = restored_experiment(
    experiment_class,
    'decode',
    config,
    checkpointer,
    options.series,
    options.step,
    check,
  )
  with contextlib.ExitStack() as stack:
    if is_chief:
      file = stack.enter_context(_open(config, step))
    rows = 0
    for number in itertools.count():
      batch = distributed.broadcast_from_process_0(
        list(itertools.islice(records, size))
      )
      if not batch:
        break
      prompts = [prompt for prompt, _ in batch]
      # Keep the number of rows, for which the programs are compiled.
      rows = max(rows, len(prompts))
      prompts += prompts[-1:] * (rows - len(prompts))
      continued = experiment.decode(prompts, jax.random.fold_in(rng, number))
      if len(continued) != rows:
        raise ValueError(
          f'{type(experiment).__name__}.decode got {rows} prompts and returned'
          f' {len(continued)} lists of continuations; expected one for each.'
        )
      if is_chief:
        pairs = [*zip(batch, continued, strict=False)]
        for (_, record), continuations in pairs:
          line = {**record, 'continuations': continuations}
          file.write(json.dumps(line, ensure_ascii=False) + '\n')
        file.flush()  # Whatever is shown is on disk.
        for (prompt, _), continuations in pairs:
          _show(prompt, continuations)
  if is_chief:
    print(f'Written to {file.name}', flush=True)


def _open(config: config_dict.ConfigDict, step: int) -> TextIO:
  """Opens the file of the continuations."""
  output, prompts = config.decode.output, config.decode.prompts
  directory = logs.directory(config.checkpoint_dir)
  folder = logs.local(directory, 'decode')
  path = pathlib.Path(output or folder / f'step_{step}.jsonl')
  if prompts is not None and path.resolve() == pathlib.Path(prompts).resolve():
    raise errors.UsageError(
      f'config.decode.output is {output!r}, which is the file of the prompts'
      ' and would be overwritten. Give a different file, or None.'
    )
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open('w', encoding='utf-8') if output else _open_new(path)
  except OSError as e:
    if output or e.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
      raise
  return _open_new(pathlib.Path.cwd() / f'{directory.name}_{path.name}')


def _open_new(path: pathlib.Path) -> TextIO:
  """Creates a file: NAME, or the first of NAME_2, NAME_3 ... that is free."""
  name, number = path, 1
  while True:
    try:
      return name.open('x', encoding='utf-8')
    except FileExistsError:
      number += 1
      name = path.with_stem(f'{path.stem}_{number}')


def _show(prompt: _Prompt, continuations: list[dict[str, Any]]) -> None:
  """Prints a prompt and its continuations."""
  if not isinstance(prompt, str):
    given = prompt if isinstance(prompt, dict) else {'messages': prompt}
    pairs: list[Any] = [('tools', x) for x in given.get('tools', [])]
    pairs += [(x.get('role'), x.get('content')) for x in given['messages']]
    prompt = '\n'.join(f'{name}: {text}' for name, text in pairs)
  lines.print_text(f'=== {prompt}')
  for continuation in continuations:
    others = {k: x for k, x in continuation.items() if k != 'text'}
    texts = (f'{k} {lines.shorten(x)}' for k, x in others.items())
    lines.print_text(' '.join(['---', *texts]))
    lines.print_text(continuation['text'])
