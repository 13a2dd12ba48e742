"""Finding and reading text as people have it: links, packed, oddly encoded."""

import bz2
import gzip
import importlib.util
import json
import lzma

import pytest

from jaxline import errors
from jaxline.inputs import text

WORDS = 'Grüße aus Köln, hello world.\r\n'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


def put(path, data):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(data if isinstance(data, bytes) else data.encode())


def load(files, **kwargs):
  """Returns the text of each document by name, and the notes."""
  corpus = text.load_corpus(files, **kwargs)
  found = {}
  for split in corpus:
    ends = [*split.starts[1:], split.tokens.size]
    for name, start, end in zip(split.names, split.starts, ends, strict=True):
      found[name] = bytes(split.tokens[start + 1 : end].tolist())
  return found, corpus.train.notes


@pytest.mark.parametrize(
  'pattern', ['', '/**', '/**/*.txt', '/**/**/*.txt', '/*/../**/*.txt']
)
def test_each_folder_is_read_once(tmp_path, pattern):
  for i in range(3):
    put(tmp_path / f'text/own/{i}.txt', f'own {i}')
    put(tmp_path / f'elsewhere/{i}.txt', f'linked {i}')
  for name, target in (
    ('a', 'own'),
    ('loop', '.'),
    ('own/loop', '../..'),
    ('wiki', '../elsewhere'),
    ('gone', '../nowhere'),
  ):
    (tmp_path / 'text' / name).symlink_to(target)
  found, notes = load(f'{tmp_path}/text{pattern}')
  assert len(found) == 6
  # A link to a folder that is read anyway renames nothing.
  if '..' not in pattern:
    assert {f'own/{i}.txt' for i in range(3)} <= {*found}
  assert any(name.endswith('gone') for name in notes)
  assert any('4 links' in why for why in notes.values())


def test_a_path_that_exists_is_no_pattern(tmp_path):
  put(tmp_path / 'a [v2].txt', 'x\ny\n')
  put(tmp_path / 'a v.txt', 'z\n')
  found, _ = load(tmp_path / 'a [v2].txt', documents='line')
  assert found == {'a [v2].txt:1': b'x', 'a [v2].txt:2': b'y'}


@pytest.mark.parametrize('kind', ['', '/*'])
def test_encodings_and_packings(tmp_path, kind):
  plain = WORDS.encode()
  # Marks, and a character that two reads share.
  large = ('x' + 'ü' * 2**20).encode()
  texts = {
    'bom.txt': b'\xef\xbb\xbf' + plain,
    'utf16.txt': ('\ufeff' + WORDS).encode('utf-16-le'),
    'utf16be.txt': ('\ufeff' + WORDS).encode('utf-16-be'),
    'a.gz': gzip.compress(plain),
    'a.bz2': bz2.compress(plain),
    'a.xz': lzma.compress(plain),
    'large.txt': large,
    'large.bz2': bz2.compress(large.decode().encode('utf-16')),
    'odd.txt': plain * 99 + b'\xff',  # Less than 1%.
  }
  if importlib.util.find_spec('zstandard'):
    import zstandard

    texts['a.zst'] = zstandard.compress(plain) * 2
  for name, data in texts.items():
    put(tmp_path / name, data)
  # UTF-16 without a mark cannot be told from binary data.
  for name, data in {
    'latin1.txt': WORDS.encode('latin-1'),
    'binary.txt': bytes(range(256)) * 9,
    'utf16.none': WORDS.encode('utf-16-le'),
    'binary.xz': lzma.compress(b'\1\2'),
  }.items():
    put(tmp_path / name, data)
  found, notes = load(f'{tmp_path}{kind}')
  expected = dict.fromkeys(texts, plain)
  expected |= {'large.txt': large, 'large.bz2': large}
  expected |= {'odd.txt': texts['odd.txt']}
  expected |= {name: plain * 2 for name in texts if name == 'a.zst'}
  assert found == expected
  assert sorted(notes) == [
    'binary.txt', 'binary.xz', 'latin1.txt', 'utf16.none',
  ]  # fmt: skip


@pytest.mark.parametrize('end', ['gz', 'bz2', 'xz', 'zst'])
def test_damaged_files_are_named(tmp_path, end):
  put(tmp_path / f'a.{end}', b'no such thing')  # Or zstandard is missing.
  with pytest.raises(errors.UsageError, match=f'a.{end}'):
    load(tmp_path)


def test_nulls_are_left_out(tmp_path):
  rows = [{'t': None if i == 50 else f'row {i}'} for i in range(200)]
  put(tmp_path / 'rows.jsonl', '\n'.join(map(json.dumps, rows)))
  load_rows = lambda: load(tmp_path, documents='jsonl', text_key='t')
  found, notes = load_rows()
  assert len(found) == 199
  assert 'rows.jsonl:51' not in found
  assert '1 ' in notes['rows.jsonl']
  rows[60:63] = [{'t': None}] * 3
  put(tmp_path / 'rows.jsonl', '\n'.join(map(json.dumps, rows)))
  with pytest.raises(errors.UsageError, match=r'4 of 200.*text_key'):
    load_rows()


@pytest.mark.parametrize(
  ('content', 'end'),
  [
    (b'hello world\n' * 100, b'hello world\n' * 25),
    (b'1\n2\n3\n4', b'4'),
    (b'1\n' + b'2' * 100, b'2' * 100),  # The line's end before the place.
    ('字'.encode() * 101, '字'.encode() * 26),
    (b'12', b'2'),
    ((b'y' * 999 + b'\n') * 4000, (b'y' * 999 + b'\n') * 1000),
  ],
)
def test_a_file_alone_is_held_out_from_a_place_on(tmp_path, content, end):
  put(tmp_path / 'one.txt', content)
  corpus = text.load_corpus(tmp_path / 'one.txt', eval_fraction=0.25)
  assert corpus.train.data() + corpus.eval.data() == content
  assert corpus.eval.data() == end
  line = 1 + corpus.train.data().count(b'\n')
  assert [*corpus.train.names] == ['one.txt']
  assert [*corpus.eval.names] == [f'one.txt:{line}']


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
  # The tests may run as root, who may read all.
  put(tmp_path / 'a.txt', 'a')
  put(tmp_path / 'b.txt', 'b')

  def refuse(path, *args, opened=open, **kwargs):
    if str(path).endswith('b.txt'):
      raise PermissionError(13, 'Permission denied', path)
    return opened(path, *args, **kwargs)

  monkeypatch.setattr('builtins.open', refuse)
  with pytest.raises(errors.UsageError, match=r'b\.txt .*`files`'):
    load(tmp_path)
