"""Chats with the model of a run in the terminal.

  python -m examples.lm.chat RUN [--system=TEXT] [--temperature=0.7]

An answer appears as the model writes it. Ctrl-C ends the answer; Ctrl-D ends
the program; /reset starts a new conversation. If a conversation leaves no room
for an answer of `max_decode_steps` tokens, the program drops the oldest turns.
A run without a chat template continues each line as text, then forgets it.
"""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import io
import pathlib
import signal
import sys
from typing import Any

import jax

from examples import decoding
import jaxline
from jaxline import errors
from jaxline.metrics import lines

# Keys of `decoding.Options` that have a flag.
_KEYS = 'method', 'max_decode_steps', 'temperature', 'top_k', 'top_p'
_CONTEXT = 8  # Tokens before an answer that its first word may depend on.


class Chat:
  """A conversation with the model of an experiment.

  Attributes:
    messages: the turns so far; without a template, no turns are kept.
    why_plain: the reason why there is no template; None if there is one.
  """

  def __init__(self, experiment: Any, *, system: str | None, seed: int):
    self._experiment = experiment
    self._options = dataclasses.replace(
      experiment.decode_options, num_samples=1, scores=False
    )
    if self._options.method == 'beam':
      raise errors.UsageError(
        "A chat cannot show a beam's answer as it is written. Use"
        ' --method=sample or --method=greedy.'
      )
    self.why_plain = None
    try:
      if not experiment.prompts.has_template:
        self.why_plain = f'{experiment.prompts.folder} has no template.'
    except errors.UsageError as e:
      self.why_plain = str(e)
    if system and self.why_plain:
      raise errors.UsageError(f'--system needs a template. {self.why_plain}')
    self._first = [{'role': 'system', 'content': system}] if system else []
    self._rng = jax.random.key(seed)
    self.reset()

  def reset(self) -> None:
    """Starts a new conversation."""
    self.messages: list[dict[str, str]] = [*self._first]

  def ask(self, text: str) -> Iterator[str]:
    """Yields the answer to a message in pieces, and remembers these pieces."""
    if self.why_plain:
      yield from self._continue(self._experiment.encode_prompt(text))
      return
    kept, ids = self._fit([*self.messages, {'role': 'user', 'content': text}])
    pieces: list[str] = []
    try:
      for piece in self._continue(ids):
        pieces.append(piece)
        yield piece
    finally:  # The caller may stop before the end of the answer.
      if pieces:
        answer = {'role': 'assistant', 'content': ''.join(pieces)}
        self.messages = [*kept, answer]

  def _fit(self, messages: list[dict[str, str]]) -> tuple[Any, Any]:
    """Drops the oldest turns that do not fit; returns messages and tokens."""
    length = self._experiment.config.model.max_length
    longest = decoding.longest_prompt(self._options, length)
    first = len(self._first)
    for turn, message in enumerate(messages):
      if message['role'] == 'user':
        kept = [*self._first, *messages[turn:]]
        ids = self._experiment.encode_prompt(kept)
        if len(ids) <= longest:
          if turn > first:
            _note(f'The oldest {turn - first} messages are dropped.')
          return kept, ids
    raise errors.UsageError(
      f'The message has {len(ids)} tokens; expected at most {longest} of the'
      f' {length} that the model sees. Shorten it, or lower --max_decode_steps.'
    )

  def _continue(self, ids: Any) -> Iterator[str]:
    """Yields the text that follows a prompt, in whole characters."""
    self._rng, rng = jax.random.split(self._rng)
    new: list[int] = []
    shown = text = ''
    for chunk in self._experiment.stream(ids, rng, self._options):
      new += chunk
      text = decoding.new_text(self._experiment.tokenizer, ids[-_CONTEXT:], new)
      # The next token may complete the bytes of the last character.
      whole = text.rstrip('\ufffd')
      yield whole[len(shown) :]
      shown = whole
    yield text[len(shown) :]
    if len(new) == self._options.max_decode_steps:
      _note(f'Cut at --max_decode_steps={len(new)}.')


def _note(text: str) -> None:
  lines.print_text(f'[{text}]', sys.stderr)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
  """Yields a list that Ctrl-C appends to; a second Ctrl-C raises as usual."""
  seen: list[int] = []

  def note(number: int, frame: Any) -> None:
    seen.append(number)
    signal.signal(signal.SIGINT, signal.default_int_handler)

  before = signal.signal(signal.SIGINT, note)
  try:
    yield seen
  finally:
    signal.signal(signal.SIGINT, before)


def converse(chat: Chat) -> None:
  """Answers lines of standard input until it ends."""
  mark = '> ' if sys.stdin.isatty() else ''
  while True:
    try:
      # The locale may be C although the terminal is UTF-8.
      text = (
        input(mark).encode(errors='surrogateescape').decode(errors='replace')
      )
      if text.strip() == '/reset':
        chat.reset()
      elif text.strip():
        with (
          _interrupts() as seen,
          contextlib.closing(chat.ask(text)) as answer,
        ):
          for piece in answer:
            print(lines.escaped(piece), end='', flush=True)
            if seen:
              break
        print(flush=True)
    except EOFError:
      return print()
    except KeyboardInterrupt:
      print()
    except errors.UsageError as e:
      lines.print_text(e, sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a chat; returns the exit status, which is 2 for wrong use."""
  summary, *_, rest = (__doc__ or '').partition('\n\n')
  parser = argparse.ArgumentParser(
    prog='python -m examples.lm.chat',
    description=summary,
    epilog=rest,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('run', type=pathlib.Path, help='directory of a run')
  parser.add_argument('--system', help='system message of the conversation')
  parser.add_argument('--step', type=int, help='step; default: the newest')
  parser.add_argument('--series', default='latest', help="'latest' or 'best'")
  parser.add_argument('--seed', type=int, default=0, help='seed for sampling')
  kinds = {x.name: x.type for x in dataclasses.fields(decoding.Options)}
  for key in _KEYS:
    parser.add_argument(f'--{key}', type=kinds[key], help='as in config.decode')
  args = parser.parse_args(argv)
  for stream in (sys.stdin, sys.stdout):
    if isinstance(stream, io.TextIOWrapper):
      is_input = stream is sys.stdin
      stream.reconfigure(errors='surrogateescape' if is_input else 'replace')
  # `input` can edit lines if readline is imported. But unless the encoding is
  # UTF-8, readline takes characters that are not ASCII for keys.
  if 'utf' in (getattr(sys.stdin, 'encoding', '') or '').lower():
    with contextlib.suppress(ImportError):
      import readline  # noqa: F401
  given = {
    f'experiment_kwargs.config.decode.{key}': x
    for key in _KEYS
    if (x := getattr(args, key)) is not None
  }
  which = {'step': args.step, 'series': args.series}
  try:
    experiment = jaxline.load(args.run, given, mode='decode', **which)
    if not hasattr(experiment, 'stream'):
      raise errors.UsageError(f'{args.run} is not a run of examples/lm.')
    chat = Chat(experiment, system=args.system, seed=args.seed)
    if chat.why_plain:
      _note(f'{chat.why_plain} Each line is continued as text.')
    converse(chat)
  except (ValueError, OSError, ImportError) as e:
    print(f'examples.lm.chat: {e}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
