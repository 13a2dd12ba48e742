"""Reads a Hugging Face folder, except its weights: prompts, stops, files.

  folder.stop_ids('models/qwen')  # (151645, 151643)
  prompts = folder.Prompts('models/qwen/tokenizer.json')
  prompts.encode('<|im_start|>user')  # As transformers' tokenizer does.
  prompts.encode([{'role': 'user', 'content': 'Hi'}])  # Uses the chat template.

A folder runs no code: templates run in the sandbox of Jinja2, and nothing is
imported or unpickled.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import stat
from typing import Any

import numpy as np

from jaxline import errors
from jaxline.inputs import tokenization
from jaxline.metrics import lines

Path = str | os.PathLike[str]
Messages = Sequence[Mapping[str, Any]]
# A text, messages, or a dict with 'messages' and 'tools'.
Prompt = str | Messages | Mapping[str, Any]

NAME = 'huggingface'  # Folder of an imported run that holds the copied files.
CONFIG, GENERATION = 'config.json', 'generation_config.json'
TEMPLATE, TEMPLATES = 'chat_template.jinja', 'additional_chat_templates'
_OF_TOOLS = 'tool_use'  # The template of conversations with tools.
_TOKENIZER_CONFIG = 'tokenizer_config.json'
# Files from which transformers makes a tokenizer.
_OF_TOKENIZERS = (
  'tokenizer.json', 'tokenizer.model', _TOKENIZER_CONFIG, TEMPLATE,
  'special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt',
)  # fmt: skip
_OF_TOKENS = (  # These files name the special tokens.
  f'{_TOKENIZER_CONFIG}, special_tokens_map.json or added_tokens.json'
)
_NAMED = 'bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask'
_LLAMA = 'LlamaTokenizer', 'LlamaTokenizerFast'
_WEIGHTS = '.safetensors', '.safetensors.index.json'
_COPIED = '.json', '.jinja', '.txt', '.md', '.model', ''
_NOT_COPIED = 'not_copied.txt'
_MAX_BYTES = 2**28  # The largest tokenizers have files of 2**25 bytes.
_MAX_TEXT = 2**26  # Number of characters that a template may write.
# These surround the text of a `generation` block. No text in UTF-8 has them.
_BEGIN, _END = '\udc00', '\udc01'


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
  """Turns any error inside into a `UsageError`, which names `what` was read."""
  try:
    yield
  except (errors.UsageError, ImportError):
    raise
  except Exception as e:  # A template, and Jinja2, may raise anything.
    raise errors.UsageError(
      f'{what} cannot be read: {lines.escaped(str(e) or repr(e))}. Copy it'
      ' again, or correct it.'
    ) from e


# Files.


def read(folder: Path, name: str) -> bytes | None:
  """Returns the content of a file, or None if it does not exist."""
  path = pathlib.Path(folder) / name
  try:
    # The cache of Hugging Face has symbolic links, but a run has none.
    is_run = pathlib.Path(folder).name == NAME
    found = path.lstat() if is_run else path.stat()
  except (FileNotFoundError, NotADirectoryError):
    return None
  if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
    raise errors.UsageError(
      f'{path} is not a file of at most {_MAX_BYTES:,} bytes. Copy it again.'
    )
  return path.read_bytes()


def read_json(folder: Path, name: str) -> dict[str, Any]:
  """Returns the JSON object in a file, or {} if there is no file."""
  with reading(str(pathlib.Path(folder) / name)):
    value = json.loads(read(folder, name) or b'{}')
    if not isinstance(value, dict):
      raise ValueError(f'it is a {type(value).__name__}; expected an object')
  return value


def of_tokenizer(spec: str) -> pathlib.Path | None:
  """Returns the folder of `Config.tokenizer`; None if it is not a path."""
  path = pathlib.Path(str(spec).partition('#')[0])
  return path.parent if path.suffix in ('.json', '.model') else None


def tokenizer_of(path: pathlib.Path) -> str:
  """Returns the value of `Config.tokenizer` for a file.

  It names the document token if `tokenization` cannot find one by itself.
  """
  if path.suffix == '.json':
    with reading(f'{path}, {_OF_TOKENS}'):
      added = read_json(path.parent, path.name).get('added_tokens') or []
      known = {x['content'] for x in added}
      named, _ = _special_tokens(path.parent)
      ends = [_content(named.get(f'{x}_token', '')) for x in _NAMED[:2]]
    ends = [x for x in ends if x in known]
    if ends and not known & {*tokenization.WELL_KNOWN_TOKENS}:
      return f'{path}#{ends[0]}'
  return str(path)


def is_of(folder: Path | None, vocab_size: int) -> bool:
  """Returns whether a folder holds a model with `vocab_size` rows."""
  return bool(folder) and (
    read_json(folder, CONFIG).get('vocab_size') == vocab_size
  )


def _names(folder: pathlib.Path) -> tuple[list[str], list[str]]:
  """Returns the files to copy and the files to leave out, without weights."""
  names: tuple[list[str], list[str]] = [], []
  # Links out of the cache may lead anywhere, and an export may be published.
  base = folder.resolve()
  targets = base, base.parent.parent / 'blobs'
  for path in sorted([*folder.iterdir(), *folder.glob(f'{TEMPLATES}/*')]):
    name = path.relative_to(folder).as_posix()
    is_passed = name.startswith('.') or name in (TEMPLATES, _NOT_COPIED)
    if is_passed or name.endswith(_WEIGHTS):
      continue
    is_read = name in (*_OF_TOKENIZERS, CONFIG, GENERATION)
    is_own = not path.is_symlink() or path.resolve().parent in targets
    is_own |= is_read and folder.name != NAME
    is_data = path.suffix in _COPIED and path.is_file()
    is_data = is_data and path.stat().st_size <= _MAX_BYTES
    names[not (is_own and is_data)].append(name)
  names[1].extend((read(folder, _NOT_COPIED) or b'').decode().splitlines())
  return names


def copy(source: pathlib.Path, target: pathlib.Path) -> list[str]:
  """Copies a folder without its weights; returns the other files left out."""
  names, others = _names(source)
  _copy(source, target, names)
  if others:
    text = '\n'.join([*others, ''])
    (target / _NOT_COPIED).write_text(text, 'utf-8', 'replace')
  return others


def keep(source: pathlib.Path, run: pathlib.Path) -> None:
  """Copies the folder of an imported run into a run on disk, once."""
  target, new = run / NAME, run / f'{NAME}.new'
  if run.is_dir() and not target.exists():
    shutil.rmtree(new, ignore_errors=True)
    copy(source, new)
    new.rename(target)  # If the process is killed, no partial copy remains.


def export(source: pathlib.Path, target: pathlib.Path, is_whole: bool) -> None:
  """Copies a folder without its configs, or only the files of its tokenizer.

  Prints the names of missing files.
  """
  names, lacks = _names(source)
  if is_whole:
    names = [name for name in names if name not in (CONFIG, GENERATION)]
  else:
    names = [name for name in names if name in _OF_TOKENIZERS]
    has_template = 'chat_template' in read_json(source, _TOKENIZER_CONFIG)
    there = [*names, *[TEMPLATE] * has_template]
    lacks = [x for x in (_TOKENIZER_CONFIG, TEMPLATE) if x not in there]
  _copy(source, target, names)
  if lacks:
    lines.print_text(f'Not in the export: {", ".join(lacks)}.')


def _copy(source: pathlib.Path, to: pathlib.Path, names: Iterable[str]) -> None:
  for name in names:
    (to / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / name, to / name)


# Contents.


def stop_ids(folder: Path) -> tuple[int, ...]:
  """Returns the tokens that end a text.

  Reads the files in the order of transformers.

  Raises:
    errors.UsageError: a value is not a token.
  """
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


def _templates_of(folder: Path) -> dict[str, tuple[str, str]]:
  """Returns the location and the text of each chat template, by its name.

  As in transformers, template files replace those in the tokenizer's config.
  """
  base, found = pathlib.Path(folder), {}
  files = (base / TEMPLATES).glob('*.jinja')
  for path in (base / TEMPLATE, *sorted(files)):
    name = 'default' if path.name == TEMPLATE else path.stem
    with reading(str(path)):
      if (raw := read(path.parent, path.name)) is not None:
        found[name] = str(path), raw.decode()
  if found:
    return found
  place = f'chat_template in {base / _TOKENIZER_CONFIG}'
  with reading(place):
    given = read_json(base, _TOKENIZER_CONFIG).get('chat_template')
    if isinstance(given, list):
      given = {x['name']: x['template'] for x in given}
    elif not isinstance(given, dict):
      given = {'default': given}
    for name, text in given.items():
      if not isinstance(text, str | None):
        raise ValueError(f'{name!r} is {text!r:.80}; expected text')
      (text or '').encode()  # Raises if JSON holds a lone surrogate.
    return {name: (place, x) for name, x in given.items() if x}


def _special_tokens(folder: Path) -> tuple[dict[str, Any], list[Any]]:
  """Returns the special tokens by name, and all tokens to add if missing."""
  values = read_json(folder, _TOKENIZER_CONFIG)
  added = values.get('added_tokens_decoder')
  if added is None:  # Only old folders need the other file.
    values = {**values, **read_json(folder, 'special_tokens_map.json')}
  extra = values.get('extra_special_tokens')
  extra = extra or values.get('additional_special_tokens') or []
  # The names that all models have come first, in this order.
  first = [f'{x}_token' for x in _NAMED]
  others = [k for k in values if k.endswith('_token') and k not in first]
  named = {k: values[k] for k in [*first, *others] if k in values}
  named |= values.get('model_specific_special_tokens') or {}
  if isinstance(extra, dict):
    named, extra = {**named, **extra}, []
  named = {k: x for k, x in named.items() if isinstance(x, str | dict)}
  tokens = [added[i] for i in sorted(added or {}, key=int)]
  if added is None:
    special = {_content(x) for x in [*named.values(), *extra]}
    ids = read_json(folder, 'added_tokens.json')
    tokens = [
      {'content': x, 'special': x in special, 'normalized': x not in special}
      for x in sorted(ids, key=lambda x: ids[x])
    ]
  return named, [*tokens, *named.values(), *extra]


def _content(token: Any) -> str:
  return token['content'] if isinstance(token, dict) else str(token)


class Prompts:
  """Turns prompts into the same tokens as transformers.

  Unlike `tokenization.Tokenizer`, it recognizes the names of special tokens in
  a text, and it applies the post-processor of the file, which may add a token
  in front.
  """

  def __init__(self, path: Path):
    """Loads the tokenizer.json `path` and the other files of its folder."""
    import tokenizers

    path = pathlib.Path(path)
    self.folder = path.parent
    if path.suffix != '.json':
      raise errors.UsageError(
        f'{path} has no special tokens and no chat template; expected a'
        ' tokenizer.json. Let transformers write one,'
        ' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), and import'
        " DIR again; or give texts, with prompt_format='text'."
      )
    with reading(str(path)):
      raw = read(self.folder, path.name) or b''
      library = self._library = tokenizers.Tokenizer.from_buffer(raw)
      values = read_json(self.folder, _TOKENIZER_CONFIG)
      model_type = read_json(self.folder, CONFIG).get('model_type')
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = values.get('split_special_tokens') is True
    # transformers 5 does not take this class's pre-tokenizer from the file.
    is_llama = (
      values.get('tokenizer_class') in _LLAMA and model_type != 'mistral'
    )
    if is_llama and b'"ByteLevel"' not in raw:
      has_prefix = values.get('add_prefix_space') in (None, True)
      scheme = 'always' if values.get('legacy') else 'first'
      library.normalizer = None
      library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(
        prepend_scheme=scheme if has_prefix else 'never', split=False
      )
    with reading(f'{self.folder}: {_OF_TOKENS}'):
      named, tokens = _special_tokens(self.folder)
      self._named = {name: _content(x) for name, x in named.items()}
      known = {x.content for x in library.get_added_tokens_decoder().values()}
      options = 'single_word', 'lstrip', 'rstrip', 'normalized', 'special'
      for x in tokens:
        if (text := _content(x)) in known:
          continue
        known.add(text)
        given = {k: x[k] for k in options if isinstance(x, dict) and k in x}
        token = tokenizers.AddedToken(text, **{'special': True, **given})
        library.add_tokens([token])

  def encode(self, prompt: Prompt) -> np.ndarray:
    """Returns the tokens of a text or of a conversation, int32 [length]."""
    if isinstance(prompt, str):
      encoding = self._library.encode(prompt)
    else:
      given = prompt if isinstance(prompt, Mapping) else {'messages': prompt}
      # The template writes all special tokens.
      (encoding,) = self.encode_rendered([self.render(**given)])
    return np.array(encoding.ids, np.int32)

  def encode_rendered(self, texts: Sequence[str]) -> list[Any]:
    """Returns the `tokenizers.Encoding` of each text of `render`."""
    return self._library.encode_batch(texts, add_special_tokens=False)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of tokens, including the names of special tokens."""
    return self._library.decode([*map(int, ids)], skip_special_tokens=False)

  @property
  def vocab_size(self) -> int:
    """One more than the largest token."""
    return 1 + max(self._library.get_vocab().values(), default=-1)

  @functools.cached_property
  def stop_ids(self) -> tuple[int, ...]:
    """The tokens that end an answer: the folder's and the tokenizer's EOS."""
    end = self._library.token_to_id(self._named.get('eos_token', ''))
    return (*stop_ids(self.folder), *[end] * (end is not None))

  @functools.cached_property
  def identity(self) -> str:
    """A hash of everything that the tokens of a conversation depend on."""
    self._template([])  # Refuses a folder without a template.
    library, found = self._library, self._templates
    names = self._named, self.stop_ids, library.encode_special_tokens
    texts = [found[name][1] for name in ('default', _OF_TOOLS) if name in found]
    about = [library.to_str(), *texts, *names]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()

  def render(self, messages: Messages, **options: Any) -> str:
    """Renders a conversation with the folder's chat template.

    Args:
      messages: dicts with `role`, `content` and other keys of the template.
      **options: variables of the template, such as `tools`. With
        `add_generation_prompt`, True by default, the text ends with the
        beginning of the next answer.
    """
    return self.render_spans(messages, **options)[0]

  def render_spans(
    self, messages: Messages, *, tools: Any = None, **options: Any
  ) -> tuple[str, list[tuple[int, int]]]:
    """Renders a conversation; adds (begin, end) of each `generation` block."""
    if not messages or not all(isinstance(x, Mapping) for x in messages):
      raise errors.UsageError(
        f'A conversation is {messages!r:.200}; expected messages, such as'
        " [{'role': 'user', 'content': 'Hi'}]."
      )
    are_objects = isinstance(tools, list) and all(
      isinstance(x, Mapping) for x in tools
    )
    if tools is not None and not are_objects:
      raise errors.UsageError(
        f'tools is {tools!r:.200}; expected a list of objects, such as'
        " [{'type': 'function', 'function': {'name': 'add'}}]."
      )
    size, template, written = 0, self._template(tools), []
    given = {'tools': tools, 'documents': None, 'add_generation_prompt': True}
    given |= {**self._named, **options, 'messages': [*map(_message, messages)]}
    with reading(f'A conversation by the chat template of {self.folder}'):
      for piece in template.generate(**given):
        size += len(piece)
        if size > _MAX_TEXT:
          raise ValueError(f'more than {_MAX_TEXT:,} characters')
        written.append(piece)
      parts = re.split(f'[{_BEGIN}{_END}]', ''.join(written))
      marks = [*itertools.accumulate(map(len, parts[:-1]))]
      return ''.join(parts), [*zip(marks[::2], marks[1::2], strict=True)]

  @property
  def has_template(self) -> bool:
    """Whether the folder has a chat template."""
    return 'default' in self._templates

  @functools.cached_property
  def _templates(self) -> dict[str, tuple[str, str]]:
    return _templates_of(self.folder)

  def _template(self, tools: Any) -> Any:
    """Returns the template that transformers would use."""
    found = self._templates
    is_of_tools = tools is not None and _OF_TOOLS in found
    if named := found.get(_OF_TOOLS if is_of_tools else 'default'):
      place, text = named
      with reading(place):
        return _compiled(text)
    raise errors.UsageError(
      f'{self.folder} has no chat template; expected {TEMPLATE}, or'
      f' chat_template in {_TOKENIZER_CONFIG}. Use the folder of a chat model,'
      " or give texts, with prompt_format='special'."
    )


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a message as transformers passes it to a template."""
  given = {k: x for k, x in message.items() if x is not None}
  names = 'reasoning_content', 'thinking', 'reasoning'
  for reasoning in [given[name] for name in names if name in given][:1]:
    given = {'thinking': reasoning, **given, 'reasoning_content': reasoning}
  return given


@functools.cache
def _compiled(template: str) -> Any:
  return _environment().from_string(template)


@functools.cache
def _environment() -> Any:
  """Returns Jinja2 with the settings, functions and tags of transformers."""
  import jinja2
  from jinja2 import ext
  from jinja2 import nodes
  from jinja2 import sandbox

  class Generation(ext.Extension):
    """Marks the text of the assistant, which `{% generation %}` surrounds."""

    tags = {'generation'}

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
      call = self.call_method('mark', lineno=line)
      return nodes.CallBlock(call, [], [], body, lineno=line)

    def mark(self, caller: Any) -> str:
      return f'{_BEGIN}{caller()}{_END}'

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[Generation, ext.loopcontrols],
  )
  to_json = functools.partial(json.dumps, ensure_ascii=False)
  environment.filters['tojson'] = to_json
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = strftime_now
  return environment
