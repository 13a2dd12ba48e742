"""Finding and reading text as people have it: links, packed, oddly encoded."""

import bz2
import gzip
import json
import lzma

from backports import zstd
import pyarrow
from pyarrow import parquet
import pytest

from jaxline import errors
from jaxline.inputs import text

WORDS = 'Grüße aus Köln, hello world.\r\n'


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


@pytest.mark.parametrize('pattern', ['', '/**/*.txt', '/*/../**/*.txt'])
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
  put(tmp_path / '[v2]' / 'a [v2].txt', 'x\ny\n')
  put(tmp_path / '[v2]' / 'a v.txt', 'z\n')
  for pattern in 'a [v2].txt', '*[[]v2*':
    found, _ = load(tmp_path / '[v2]' / pattern, documents='line')
    assert found == {'a [v2].txt:1': b'x', 'a [v2].txt:2': b'y'}


def test_encodings_and_packings(tmp_path):
  plain = WORDS.encode()
  # Marks, and a character that two reads share.
  large = ('x' + 'ü' * 2**20).encode()
  odd = plain * 99 + b'\xff'  # Less than 1%.
  texts = {
    'bom.txt': b'\xef\xbb\xbf' + plain,
    'utf16.txt': ('\ufeff' + WORDS).encode('utf-16-le'),
    'utf16be.txt': ('\ufeff' + WORDS).encode('utf-16-be'),
    'A.GZ': gzip.compress(plain),
    'a.bz2': bz2.compress(plain),
    'a.xz': lzma.compress(plain),
    'a.zst': zstd.compress(plain),
    'large.txt': large,
    'large.bz2': bz2.compress(large.decode().encode('utf-16')),
    'odd.txt': odd,
  }
  binary = {
    'latin1.txt': WORDS.encode('latin-1'),
    'binary.txt': bytes(range(256)) * 9,
    # UTF-16 without a mark cannot be told from binary data.
    'utf16.none': WORDS.encode('utf-16-le'),
    'binary.xz': lzma.compress(b'\1\2'),
  }
  for name, data in (texts | binary).items():
    put(tmp_path / name, data)
  expected = dict.fromkeys(texts, plain) | {'odd.txt': odd}
  expected |= {'large.txt': large, 'large.bz2': large}
  for kind in '', '/*':
    found, notes = load(f'{tmp_path}{kind}')
    assert found == expected
    assert notes.keys() == binary.keys()


def test_damaged_files_are_named(tmp_path):
  for name, module in ('gz', gzip), ('bz2', bz2), ('xz', lzma), ('zst', zstd):
    for data in b'no such thing', module.compress(WORDS.encode() * 9)[:-9]:
      put(tmp_path / name / f'a.{name}', data)
      with pytest.raises(errors.UsageError, match=f'a.{name}'):
        load(tmp_path / name)


def test_rows_of_tables(tmp_path):
  """Of a folder as Hugging Face's `datasets` writes it."""
  rows = [None if i == 50 else f'row {i}' for i in range(200)]
  table = pyarrow.table({'id': range(200), 't': rows, 'n': range(200)})
  put(tmp_path / 'dataset_info.json', '{}')
  parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=70)
  with pyarrow.ipc.new_stream(tmp_path / 'b.arrow', table.schema) as out:
    out.write_table(table, 30)
  found, notes = load(tmp_path, documents='rows', text_key='t')
  assert found == {
    f'{name}:{i + 1}': f'row {i}'.encode()
    for name in ('a.parquet', 'b.arrow')
    for i in range(200)
    if i != 50
  }
  assert 'left out' in notes.pop('dataset_info.json')
  assert [*notes] == ['a.parquet', 'b.arrow']
  for key in 'text', 'n':  # Not there, and numbers.
    with pytest.raises(errors.UsageError, match=r'a\.parquet.*text_key'):
      load(tmp_path, documents='rows', text_key=key)
  with pytest.raises(errors.UsageError, match=r"a\.parquet.*'rows'"):
    load(f'{tmp_path}/*', documents='file')


def test_documents_with_a_separator(tmp_path):
  texts, start = [], 0
  for i in range(1, 5):  # Two reads share a separator, at each of its places.
    end = i * 2**20 - i
    texts.append('x' * (end - start))
    start = end + len('<|e|>')
  texts += ['one\n', '\n<two<|<|>', '', 'drei ü', '<|e', '\n']
  put(tmp_path / 'a.txt', '<|e|>'.join(texts))
  found, _ = load(tmp_path, documents='split:<|e|>')
  parts = enumerate(texts, 1)
  assert found == {f'a.txt:{i}': x.encode() for i, x in parts if x}


def test_nulls_are_left_out(tmp_path):
  rows = [{'t': None if i == 50 else f'row {i}'} for i in range(200)]

  def load_rows():
    put(tmp_path / 'rows.jsonl', '\n'.join(map(json.dumps, rows)))
    return load(tmp_path, documents='jsonl', text_key='t')

  found, notes = load_rows()
  assert len(found) == 199
  assert 'rows.jsonl:51' not in found
  assert '1 ' in notes['rows.jsonl']
  rows[60:63] = [{'t': None}] * 3
  with pytest.raises(errors.UsageError, match=r'4 of 200.*text_key'):
    load_rows()


def test_a_file_alone_is_held_out_from_a_place_on(tmp_path):
  for content, end in (
    (b'hello world\n' * 100, b'hello world\n' * 25),
    (b'1\n2\n3\n4', b'4'),
    (b'1\n' + b'2' * 100, b'2' * 100),  # The line's end before the place.
    ('字'.encode() * 101, '字'.encode() * 26),
    (b'12', b'2'),
    ((b'y' * 999 + b'\n') * 4000, (b'y' * 999 + b'\n') * 1000),
  ):
    put(tmp_path / 'one.txt', content)
    corpus = text.load_corpus(tmp_path / 'one.txt', eval_fraction=0.25)
    assert corpus.train.data() + corpus.eval.data() == content
    assert corpus.eval.data() == end
    line = 1 + corpus.train.data().count(b'\n')
    assert [*corpus.train.names] == ['one.txt']
    assert [*corpus.eval.names] == [f'one.txt:{line}']
