"""What a Hugging Face folder has beside the weights: prompts, stops, files.

  folder.stop_ids('models/qwen')  # (151645, 151643)
  prompts = folder.Prompts('models/qwen/tokenizer.json')
  prompts.encode('<|im_start|>user')  # As transformers' tokenizer does.
  prompts.encode([{'role': 'user', 'content': 'Hi'}])  # By its chat template.

All that a folder says is data: a template runs in the sandbox of Jinja2, and
nothing is imported or unpickled.
"""

from collections.abc import Iterable, Mapping, Sequence
import datetime
import functools
import json
import os
import pathlib
import shutil
import stat
from typing import Any

import numpy as np

from jaxline import errors
from jaxline.metrics import lines

Path = str | os.PathLike[str]
Messages = Sequence[Mapping[str, Any]]

NAME = 'huggingface'  # Of the copy in a run that was imported.
CONFIG, GENERATION = 'config.json', 'generation_config.json'
TEMPLATE, TEMPLATES = 'chat_template.jinja', 'additional_chat_templates'
_TOKENIZER_CONFIG = 'tokenizer_config.json'
# What transformers reads of a folder to make a tokenizer.
_OF_TOKENIZERS = (
  'tokenizer.json', 'tokenizer.model', _TOKENIZER_CONFIG, TEMPLATE,
  'special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt',
)  # fmt: skip
_COPIED = '.json', '.jinja', '.txt', '.md', '.model', ''
_NOT_COPIED = 'not_copied.txt'
_MAX_BYTES = 2**28  # Of a file; the largest tokenizers have 2**25.
_MAX_TEXT = 2**26  # Characters that a template may write.


# Files.


def read(folder: Path, name: str) -> bytes | None:
  """Returns the content of a file, or None if there is none."""
  path = pathlib.Path(folder) / name
  try:
    found = path.stat()  # The cache of Hugging Face has links.
  except (FileNotFoundError, NotADirectoryError):
    return None
  if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
    raise errors.UsageError(
      f'{path} is no file of at most {_MAX_BYTES:,} bytes. Copy it again.'
    )
  return path.read_bytes()


def read_json(folder: Path, name: str) -> dict[str, Any]:
  """Returns the object in a file, {} if there is no file."""
  if (raw := read(folder, name)) is None:
    return {}
  try:
    value = json.loads(raw)
    if isinstance(value, dict):
      return value
    problem = f'a {type(value).__name__}'
  except (ValueError, RecursionError) as e:
    problem = f'not JSON ({e})'
  raise errors.UsageError(
    f'{pathlib.Path(folder) / name} is {problem}; expected an object. Copy it'
    ' again.'
  )


def of_tokenizer(spec: str) -> pathlib.Path | None:
  """Returns the folder of `Config.tokenizer`, None if that is no file."""
  path = pathlib.Path(str(spec).partition('#')[0])
  return path.parent if path.suffix in ('.json', '.model') else None


def is_of(folder: Path | None, vocab_size: int) -> bool:
  """Returns whether a folder has a model with so many rows."""
  if folder is None:
    return False
  return read_json(folder, CONFIG).get('vocab_size') == vocab_size


def _names(folder: pathlib.Path) -> dict[str, bool]:
  """Returns the names of what is no weights -> whether it is copied."""
  names = {}
  for path in sorted([*folder.iterdir(), *folder.glob(f'{TEMPLATES}/*')]):
    name = path.relative_to(folder).as_posix()
    is_weights = name.endswith(('.safetensors', '.safetensors.index.json'))
    if is_weights or name in (TEMPLATES, _NOT_COPIED) or name[0] == '.':
      continue
    is_known = name in (*_OF_TOKENIZERS, CONFIG, GENERATION)
    # A link may lead anywhere, and an export may be published.
    is_own = path.is_file() and (is_known or not path.is_symlink())
    is_data = path.suffix in _COPIED
    names[name] = is_own and is_data and path.stat().st_size <= _MAX_BYTES
  return names


def copy(source: pathlib.Path, target: pathlib.Path) -> list[str]:
  """Copies what is beside the weights; returns what is not copied, by name."""
  names = _names(source)
  _copy(
    source, target, [name for name, is_copied in names.items() if is_copied]
  )
  left_out = [name for name, is_copied in names.items() if not is_copied]
  if left_out:
    (target / _NOT_COPIED).write_text('\n'.join(left_out) + '\n')
  return left_out


def export(source: pathlib.Path, target: pathlib.Path, is_whole: bool) -> None:
  """Copies a folder but for its configs, or only the files of its tokenizer.

  Prints what a whole folder would have besides.
  """
  names = [x for x in _OF_TOKENIZERS if (source / x).is_file()]
  lacks = [] if _TOKENIZER_CONFIG in names else [_TOKENIZER_CONFIG]
  if is_whole:
    names = [name for name, is_copied in _names(source).items() if is_copied]
    names = [name for name in names if name not in (CONFIG, GENERATION)]
    lacks = (read(source, _NOT_COPIED) or b'').decode().split('\n')[:-1]
  _copy(source, target, names)
  if not is_whole and not _templates(target):
    lacks.append('a chat template')
  if lacks:
    lines.print_text(f'Not in the export: {", ".join(lacks)}.')


def _copy(
  source: pathlib.Path, target: pathlib.Path, names: Iterable[str]
) -> None:
  for name in names:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / name, target / name)


# What the files say.


def stop_ids(folder: Path) -> tuple[int, ...]:
  """Returns the tokens that end a text: transformers reads the same files."""
  for name in (GENERATION, CONFIG):
    ends = read_json(folder, name).get('eos_token_id')
    ids = ends if isinstance(ends, list) else [ends]
    if ids in ([None], []):
      continue
    if any(type(i) is not int or i < 0 for i in ids):
      raise errors.UsageError(
        f'eos_token_id in {pathlib.Path(folder) / name} is {ends!r}; expected a'
        ' token or a list of tokens, such as [2].'
      )
    return tuple(ids)
  return ()


def _templates(folder: Path) -> dict[str, str]:
  """Returns the chat templates of a folder, by name."""
  found: dict[str, str] = {}
  paths = sorted((pathlib.Path(folder) / TEMPLATES).glob('*.jinja'))
  files = {path.stem: f'{TEMPLATES}/{path.name}' for path in paths}
  for name, file in {'default': TEMPLATE, **files}.items():
    if (raw := read(folder, file)) is not None:
      found[name] = raw.decode(errors='replace')
  given = read_json(folder, _TOKENIZER_CONFIG).get('chat_template')
  if found or given is None:
    return found
  try:
    given = {'default': given} if isinstance(given, str) else given
    if isinstance(given, list):
      given = {x['name']: x['template'] for x in given}
    return {str(name): x + '' for name, x in given.items()}
  except (TypeError, LookupError, AttributeError) as e:
    raise errors.UsageError(
      f'chat_template in {pathlib.Path(folder) / _TOKENIZER_CONFIG} is of type'
      f' {type(given).__name__}; expected text. Copy it again.'
    ) from e


def _special_tokens(folder: Path) -> tuple[dict[str, Any], list[Any]]:
  """Returns a tokenizer's named special tokens, and all that may be new."""
  config = dict(read_json(folder, _TOKENIZER_CONFIG))
  added = config.get('added_tokens_decoder')
  if added is None:  # Only old folders need the other file.
    config |= read_json(folder, 'special_tokens_map.json')
    added = {}
  extra = config.get('extra_special_tokens')
  extra = extra or config.get('additional_special_tokens') or []
  named = {k: x for k, x in config.items() if k.endswith('_token')}
  if isinstance(extra, dict):
    named, extra = {**named, **extra}, []
  named = {k: x for k, x in named.items() if isinstance(x, str) or _is_token(x)}
  tokens = [added[i] for i in sorted(added, key=int)]
  return named, [*tokens, *named.values(), *extra]


def _is_token(x: Any) -> bool:
  return isinstance(x, dict) and isinstance(x.get('content'), str)


def _content(x: Any) -> str:
  return x['content'] if _is_token(x) else str(x)


class Prompts:
  """Turns prompts into the tokens that transformers makes of them.

  Unlike `tokenization.Tokenizer` it reads the names of special tokens in a text
  as these tokens, and puts before it what the folder's post-processor says.
  """

  def __init__(self, path: Path):
    """Loads `path`, a tokenizer.json, and the files beside it."""
    import tokenizers

    self._folder = pathlib.Path(path).parent
    raw = read(self._folder, pathlib.Path(path).name)
    if raw is None or pathlib.Path(path).suffix != '.json':
      raise errors.UsageError(
        f"{path} is no tokenizer.json, which prompt_format 'special' and 'chat'"
        " need. Set prompt_format='text'."
      )
    library = self._library = tokenizers.Tokenizer.from_buffer(raw)
    library.no_truncation()
    library.no_padding()
    try:
      named, tokens = _special_tokens(self._folder)
      known = {x.content for x in library.get_added_tokens_decoder().values()}
      options = 'single_word', 'lstrip', 'rstrip', 'normalized', 'special'
      for x in tokens:
        if (text := _content(x)) in known:
          continue
        known.add(text)
        given = x if isinstance(x, dict) else {}
        given = {k: bool(given[k]) for k in options if k in given}
        token = tokenizers.AddedToken(text, **{'special': True, **given})
        library.add_tokens([token])
    except (TypeError, ValueError, LookupError, AttributeError) as e:
      raise errors.UsageError(
        f'The special tokens in {self._folder / _TOKENIZER_CONFIG} cannot be'
        f' read: {e!r}. Copy it again.'
      ) from e
    self._named = {name: _content(x) for name, x in named.items()}

  def encode(self, prompt: str | Messages) -> np.ndarray:
    """Returns the tokens of a text or of a conversation, int32 [length]."""
    is_text = isinstance(prompt, str)
    text = prompt if isinstance(prompt, str) else self.render(prompt)
    # A template writes all special tokens itself.
    encoding = self._library.encode(text, add_special_tokens=is_text)
    return np.array(encoding.ids, np.int32)

  def render(self, messages: Messages, **options: Any) -> str:
    """Returns the text of a conversation, by the folder's template.

    Args:
      messages: dicts with `role` and `content`, and what the template reads.
      **options: variables of the template. `add_generation_prompt` says whether
        to begin the next answer; the default is True.
    """
    if not messages or not all(isinstance(x, Mapping) for x in messages):
      raise errors.UsageError(
        f'A conversation is {messages!r:.200}; expected messages, such as'
        " [{'role': 'user', 'content': 'Hi'}]."
      )
    variables = {'add_generation_prompt': True, **self._named, **options}
    variables |= {'messages': [*map(_message, messages)]}
    variables = {'tools': None, 'documents': None, **variables}
    written, size, template = [], 0, self._template
    try:
      for piece in template.generate(**variables):
        size += len(piece)
        if size > _MAX_TEXT:
          raise ValueError(f'it writes more than {_MAX_TEXT:,} characters')
        written.append(piece)
    except Exception as e:  # A template may raise anything.
      raise errors.UsageError(
        f'The chat template of {self._folder} refuses a conversation:'
        f' {lines.escaped(str(e))}.'
      ) from e
    return ''.join(written)

  @functools.cached_property
  def _template(self) -> Any:
    import jinja2

    found = _templates(self._folder)
    if 'default' not in found:
      raise errors.UsageError(
        f'{self._folder} has no chat template (it has {[*found]}); expected'
        f' {TEMPLATE}, or chat_template in {_TOKENIZER_CONFIG}. Take the folder'
        " of a model for chats, or prompt_format='special' and texts."
      )
    try:
      return _environment().from_string(found['default'])
    except (jinja2.TemplateError, RecursionError) as e:
      raise errors.UsageError(
        f'The chat template of {self._folder} cannot be read:'
        f' {lines.escaped(str(e))}. Copy it again.'
      ) from e


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a message as transformers gives it to a template."""
  given = {k: x for k, x in message.items() if x is not None}
  names = 'reasoning_content', 'thinking', 'reasoning'
  reasoning = [given[name] for name in names if name in given]
  if not reasoning:
    return given
  return {'thinking': reasoning[0], **given, 'reasoning_content': reasoning[0]}


@functools.cache
def _environment() -> Any:
  """Returns the Jinja2 of transformers: its settings, functions and tags."""
  import jinja2
  from jinja2 import ext
  from jinja2 import nodes
  from jinja2 import sandbox

  class Generation(ext.Extension):
    """Accepts the tag around what an assistant writes."""

    tags = {'generation'}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      return nodes.Scope(body, lineno=line)

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

  def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
  ) -> str:
    return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, ext.loopcontrols],
  )
  environment.filters['tojson'] = to_json
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = strftime_now
  return environment
