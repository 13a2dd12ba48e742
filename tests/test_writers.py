"""Tests for jaxline.metrics.writers."""

from collections.abc import Iterator
import contextlib
import io
import itertools
import json
import math
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import types
from typing import Any
from unittest import mock
import warnings

from absl import logging
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from jaxline.metrics import jsonl
from jaxline.metrics import periodic
from jaxline.metrics import tensorboard
from jaxline.metrics import values
from jaxline.metrics import writers

with warnings.catch_warnings():
  # The reader only; what we write with stays under warnings as errors.
  warnings.simplefilter('ignore')
  from tensorboard.backend.event_processing import event_accumulator
  from tensorboard.backend.event_processing import plugin_event_accumulator
  from tensorboard.util import tensor_util

_TIMEOUT = 30.0


@pytest.fixture
def set_clock(monkeypatch):
  """Sets the clock of the backends."""

  def set_clock(now):
    for module in (jsonl, tensorboard):
      clock = types.SimpleNamespace(time=now)
      monkeypatch.setattr(module, 'time', clock)

  return set_clock


@pytest.fixture
def logged_warnings() -> Iterator[mock.Mock]:
  values._warned.clear()
  with mock.patch.object(logging, 'warning') as warning:
    yield warning


@pytest.fixture
def gate() -> Iterator[threading.Event]:
  """Holds a `_Recorder` up until it is set, at the latest when a test ends."""
  event = threading.Event()
  yield event
  event.set()


def _load(directory: Any) -> event_accumulator.EventAccumulator:
  """Reads a directory as it stands, values as they were written."""
  return event_accumulator.EventAccumulator(
    str(directory), size_guidance=dict.fromkeys(_KINDS, 0)
  ).Reload()


_KINDS = (
  event_accumulator.SCALARS,
  event_accumulator.TENSORS,
  event_accumulator.IMAGES,
)


def _scalars(directory: Any, tag: str) -> list[tuple[int, float]]:
  return [(e.step, e.value) for e in _load(directory).Scalars(tag)]


def _tensor(directory: Any, tag: str) -> np.ndarray:
  (event,) = _load(directory).Tensors(tag)
  return tensor_util.make_ndarray(event.tensor_proto)


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
  def refuse(constant: str) -> None:
    raise AssertionError(f'{constant} is not JSON')

  text = path.read_text()
  return [json.loads(t, parse_constant=refuse) for t in text.splitlines()]


class _Recorder(writers.MetricWriter):
  """Keeps every call; waits at `gate` and fails where told to."""

  def __init__(self, gate: threading.Event | None = None) -> None:
    self.calls: list[tuple[Any, ...]] = []
    self.gate = gate
    self.entered = threading.Event()
    self.failing: dict[str, Exception] = {}
    self.threads: set[str] = set()

  def _take(self, *call: Any) -> None:
    self.threads.add(threading.current_thread().name)
    self.entered.set()
    if self.gate is not None:
      assert self.gate.wait(_TIMEOUT)
    if call[0] in self.failing:
      raise self.failing[call[0]]
    self.calls.append(call)

  def _write(self, kind: str, global_step: Any, values: Any) -> None:
    self._take(kind, global_step, values)

  def resume(self, step: int, lengths: Any) -> None:
    self._take('resume', step, lengths)

  def flush(self) -> None:  # As older writers do it, without lengths.
    self._take('flush')

  def close(self) -> None:
    self._take('close')


class _ScalarsOnly:
  """A writer as old forks have it."""

  def __init__(self) -> None:
    self.calls: list[tuple[int, dict[str, Any]]] = []

  def write_scalars(self, global_step: int, scalars: Any) -> None:
    self.calls.append((global_step, scalars))


# --- Conversion. ---


@pytest.mark.parametrize(
  ('value', 'expected'),
  [
    (3, 3),
    (2**53 + 1, 9007199254740993),
    (True, 1),
    (0.5, 0.5),
    (math.inf, math.inf),
    (np.float16(0.25), 0.25),
    (np.int8(-7), -7),
    (np.uint64(2**64 - 1), 18446744073709551615),
    (np.bool_(True), 1),
    (np.array([[2.5]], np.float32), 2.5),
    (jnp.array(-2.0, jnp.bfloat16), -2.0),
    (np.asarray(jnp.array([0.75], jnp.bfloat16)), 0.75),
    (jnp.array([9], jnp.int32), 9),
    (jnp.array(-3, jnp.int4), -3),
    (jnp.array(0.5, jnp.float8_e4m3fn), 0.5),
    # float32's neighbour of 0.1: 13421773 / 2**27.
    (jnp.float32(0.1), 13421773 / 2**27),
    (jnp.float32('nan'), math.nan),
  ],
)
def test_to_scalars_takes_every_kind_of_number(value, expected):
  got = writers.to_scalars({'a': value, 'nest': {'b': {'c': value}}})
  np.testing.assert_equal(got, {'a': expected, 'nest/b/c': expected})
  assert {type(x) for x in got.values()} == {type(expected)}


_DONATED = jnp.float32(1)
_DONATED.delete()


@pytest.mark.parametrize(
  'value',
  [
    *(None, 'fast', [1.0], 1j, 10**400, np.array(['a']), np.zeros((2, 3))),
    *(np.zeros(0, np.int32), jnp.zeros(4), jax.random.key(0), _DONATED),
  ],
  ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_is_skipped_with_one_warning(value, logged_warnings):
  for _ in range(3):
    got = writers.to_scalars({'good': 1, 'nest': {'bad': value}, 'last': 2})
    assert got == {'good': 1, 'last': 2}
  ((message, *args),) = [call.args for call in logged_warnings.call_args_list]
  assert '"nest/bad"' in message % tuple(args)


def test_a_part_that_is_on_another_host_is_skipped(logged_warnings):
  value = jnp.ones(1)
  with (
    mock.patch.object(type(value), 'is_fully_addressable', False),
    mock.patch.object(type(value), 'is_fully_replicated', False),
  ):
    assert writers.to_scalars({'elsewhere': value}) == {}
  assert logged_warnings.call_count == 1


def _per_device(number: int) -> jax.Array:
  """Returns one copy per device, [2], each on its own device."""
  mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ('d',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('d'))
  return jax.device_put(np.full(jax.local_device_count(), number), sharding)


def test_to_step_takes_one_copy_per_device():
  steps = (7, np.int64(7), np.full(3, 7), jnp.array(7), _per_device(7), 7.0)
  for step in steps:
    got = writers.to_step(step)
    assert got == 7
    assert type(got) is int
  for step in (None, 'x', np.zeros(0), math.nan):
    with pytest.raises((TypeError, ValueError, IndexError)):
      writers.to_step(step)


# --- TensorBoard. ---


def test_tensorboard_scalars(set_clock, tmp_path):
  clock = iter(range(100, 200))
  set_clock(lambda: float(next(clock)))
  with writers.TensorBoardWriter(tmp_path / 'new' / 'train') as writer:
    writer.write_scalars(jnp.array([3, 3]), {'loss': 0.5, 'n': {'k': 2}})
    writer.write_scalars(4, {'loss': jnp.float32('nan'), 'n/k': -1})
    writer.write_scalars(5, {'nothing': {}})
  directory = tmp_path / 'new' / 'train'
  first, second = _load(directory).Scalars('loss')
  # 100 named the file and 101 is its first, empty event.
  assert (first.wall_time, first.step, first.value) == (102.0, 3, 0.5)
  assert (second.wall_time, second.step) == (103.0, 4)
  assert math.isnan(second.value)
  assert _scalars(directory, 'n/k') == [(3, 2.0), (4, -1.0)]
  assert _load(directory).Tags()['scalars'] == ['loss', 'n/k']
  assert os.listdir(directory) == [os.path.basename(writer.path)]
  assert os.path.basename(writer.path).startswith(
    'events.out.tfevents.0000000100.000000.'
  )


def test_tensorboard_shows_a_record_before_any_flush(tmp_path):
  with writers.TensorBoardWriter(tmp_path) as writer:
    writer.write_scalars(1, {'a': 2})
    assert _scalars(tmp_path, 'a') == [(1, 2.0)]


def _decode(directory: Any, tag: str) -> list[np.ndarray]:
  width, height, *pngs = _tensor(directory, tag).tolist()
  images = [np.asarray(PIL.Image.open(io.BytesIO(png))) for png in pngs]
  for image in images:
    assert image.shape[:2] == (int(height), int(width))
  return images


def test_tensorboard_images_are_pixel_exact(tmp_path):
  grey = np.arange(6, dtype=np.uint8).reshape(2, 3) * 50
  rgb = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14
  rgba = np.arange(5 * 2 * 3 * 4, dtype=np.uint8).reshape(5, 2, 3, 4) * 2
  with writers.TensorBoardWriter(tmp_path) as writer:
    writer.write_images(
      9,
      {
        'grey': grey,
        'rgb': rgb,
        'rgba': jnp.asarray(rgba),
        'column': grey[:, :, None],
        # 0.2 * 255 = 51 exactly; 0.5 * 255 = 127.5 rounds to even, 128.
        'float': jnp.array([[0.0, 0.2, 0.5, 1.0]]),
        'rounding': np.array([[-0.004, 1.004]]),
        'bool': np.array([[True, False]]),
      },
    )
  accumulator = _load(tmp_path)
  assert accumulator.Tensors('rgba')[0].step == 9
  metadata = accumulator.SummaryMetadata('rgba')
  assert metadata.plugin_data.plugin_name == 'images'
  np.testing.assert_array_equal(_decode(tmp_path, 'grey'), grey[None])
  np.testing.assert_array_equal(_decode(tmp_path, 'column'), grey[None])
  np.testing.assert_array_equal(_decode(tmp_path, 'rgb'), rgb[None])
  np.testing.assert_array_equal(_decode(tmp_path, 'rgba'), rgba)
  np.testing.assert_array_equal(
    _decode(tmp_path, 'float'), [[[0, 51, 128, 255]]]
  )
  np.testing.assert_array_equal(_decode(tmp_path, 'rounding'), [[[0, 255]]])
  np.testing.assert_array_equal(_decode(tmp_path, 'bool'), [[[255, 0]]])


@pytest.mark.parametrize('make', ['tensorboard', 'async'])
def test_images_that_cannot_be_shown_are_refused(make, tmp_path):
  with (
    writers.TensorBoardWriter(tmp_path)
    if make == 'tensorboard'
    else writers.AsyncWriter(_Recorder())  # Where the caller is.
  ) as writer:
    for shape in ([4], [1, 2, 2, 2, 3], [4, 8, 8], [4, 8, 8, 2], [0, 8]):
      with pytest.raises(ValueError, match=r'"x".*shape'):
        writer.write_images(0, {'x': np.zeros(shape, np.uint8)})
    with pytest.raises(ValueError, match=r'"x".*int32'):
      writer.write_images(0, {'x': np.zeros((8, 8), np.int32)})


def test_images_out_of_range_are_clipped_with_one_warning(tmp_path):
  values._warned.clear()
  image = np.array([[-3.0, 0.2, 200.0, np.nan]])
  with mock.patch.object(logging, 'warning') as warning:
    with writers.TensorBoardWriter(tmp_path) as writer:
      writer.write_images(0, {'x': image})
    values._to_images({'x': image})
  warning.assert_called_once()
  assert 'expected 0..1' in warning.call_args[0][0] % warning.call_args[0][1:]
  np.testing.assert_array_equal(_decode(tmp_path, 'x'), [[[0, 51, 255, 0]]])


def test_tensorboard_texts_are_shown_verbatim(tmp_path):
  text = 'def f(x):\n  return *x*\n\n# <b>end</b>\ud800'
  with writers.TensorBoardWriter(tmp_path) as writer:
    writer.write_texts(2, {'sample': text})
  block = _tensor(tmp_path, 'sample').item().decode('utf-8')
  assert block == ('    def f(x):\n      return *x*\n    \n    # <b>end</b>?')
  metadata = _load(tmp_path).SummaryMetadata('sample')
  assert metadata.plugin_data.plugin_name == 'text'
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    from tensorboard import plugin_util
  html = plugin_util.markdown_to_safe_html(block)
  assert html.count('<pre><code>') == 1
  assert 'return *x*' in html
  assert '&lt;b&gt;end' in html


def _make_tensorboard(directory: pathlib.Path) -> writers.MetricWriter:
  return writers.TensorBoardWriter(directory)


def _make_jsonl(directory: pathlib.Path) -> writers.MetricWriter:
  return writers.JsonlWriter(directory / 'metrics.jsonl')


both = pytest.mark.parametrize('make', [_make_tensorboard, _make_jsonl])


@both
@pytest.mark.parametrize('act', ['write', 'flush', 'close'])
@pytest.mark.parametrize('is_made_again', [False, True])
def test_a_deleted_directory_is_an_error(make, act, is_made_again, tmp_path):
  writer = make(tmp_path / 'run')
  writer.write_scalars(0, {'a': 1})
  shutil.rmtree(tmp_path / 'run')
  if is_made_again:
    (tmp_path / 'run').mkdir()
    pathlib.Path(writer.path).touch()
  with pytest.raises(FileNotFoundError, match='/run/'):
    if act == 'write':
      writer.write_scalars(1, {'a': 1})
    else:
      getattr(writer, act)()
  if act != 'close':
    with pytest.raises(FileNotFoundError):
      writer.close()
  writer.close()


@both
def test_flush_waits_for_the_disk(make, tmp_path):
  with make(tmp_path) as writer:
    with mock.patch.object(os, 'fsync') as fsync:
      writer.write_scalars(0, {'a': 1})
      fsync.assert_not_called()
      writer.flush()
      fsync.assert_called_once()


@both
def test_a_full_disk_is_an_error_and_spares_whole_records(make, tmp_path):
  writer = make(tmp_path)
  for step in range(3):
    writer.write_scalars(step, {'a': step})
  writer.flush()
  (path,) = tmp_path.iterdir()
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  # The kernel takes ten more bytes of this file, then refuses.
  resource.setrlimit(
    resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1])
  )
  try:
    with pytest.raises(OSError, match='too large') as raised:
      writer.write_scalars(3, {'a': 3})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert str(path) in str(raised.value)
  # Written behind the torn record it would be lost, so it is refused.
  with pytest.raises(OSError, match='too large'):
    writer.write_scalars(4, {'a': 4})
  writer.close()
  if make is _make_tensorboard:
    assert _scalars(tmp_path, 'a') == [(0, 0.0), (1, 1.0), (2, 2.0)]
  else:
    whole = path.read_text().splitlines()[:3]
    assert [json.loads(line)['a'] for line in whole] == [0, 1, 2]


@both
def test_backends_refuse_writes_after_close_and_close_twice(make, tmp_path):
  writer = make(tmp_path)
  writer.close()
  writer.close()
  with pytest.raises(ValueError, match='closed file'):
    writer.write_texts(0, {'a': 'b'})
  with pytest.raises(ValueError, match='closed file'):
    writer.flush()


@both
def test_an_unusable_directory_is_an_error_at_once(make, tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(OSError, match='file'):
    make(tmp_path / 'file')


# --- Resuming. ---


class _Readers:
  """TensorBoard's two readers, which keep a directory open."""

  def __init__(self, directory: Any) -> None:
    self._scalars = event_accumulator.EventAccumulator(
      str(directory), size_guidance=dict.fromkeys(_KINDS, 0)
    )
    # The pages read with this one.
    self._tensors = plugin_event_accumulator.EventAccumulator(
      str(directory), size_guidance={plugin_event_accumulator.TENSORS: 0}
    )

  def points(self) -> list[tuple[int, float]]:
    """Returns (step, value) of the tag 'a', on which both agree."""
    self._scalars.Reload()
    self._tensors.Reload()
    if 'a' not in self._scalars.Tags()['scalars']:
      assert not self._tensors.Tags()['tensors']
      return []
    points = [(e.step, e.value) for e in self._scalars.Scalars('a')]
    assert points == [
      (e.step, float(tensor_util.make_ndarray(e.tensor_proto)))
      for e in self._tensors.Tensors('a')
    ]
    return points


_ACTIONS = st.lists(
  st.sampled_from(['write', 'write', 'mark', 'see'])
  # A kill and a start that restores: at this mark, or with none as a new run.
  | st.integers(0, 4),
  max_size=25,
)


@pytest.mark.parametrize('is_async', [False, True])
def test_a_log_that_is_cut_to_a_mark_has_the_records_before_it(is_async):
  @hypothesis.settings(
    max_examples=50, derandomize=True, deadline=None, database=None
  )
  @hypothesis.given(_ACTIONS)
  def check(actions: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
      run = pathlib.Path(name)

      def start() -> writers.MetricWriter:
        both = [
          writers.TensorBoardWriter(run),
          writers.JsonlWriter(run / 'm.jsonl'),
        ]
        writer: writers.MetricWriter = writers.MultiWriter(both)
        writer = writers.AsyncWriter(writer) if is_async else writer
        return stack.enter_context(writer)

      readers, writer, values = _Readers(run), start(), itertools.count()
      expected: list[tuple[int, float]] = []
      marks: list[tuple[Any, list[tuple[int, float]]]] = []
      for action in [*actions, 'write', 'see']:
        if action == 'write':
          point = (len(expected), float(next(values)))
          writer.write_scalars(point[0], {'a': point[1]})
          expected = [*expected, point]
        elif action == 'mark':
          marks.append((writer.flush_async(), expected))
        elif action == 'see':
          writer.flush()
          assert readers.points() == expected
        else:
          writer.close()
          for path in run.iterdir():  # Killed within a record.
            path.write_bytes(path.read_bytes() + b'{"st')
          del marks[action:]
          flushed, expected = marks[-1] if marks else (dict, [])
          writer = start()
          writer.resume(len(expected) - 1, flushed())
      assert _scalars(run, 'a') == expected
      assert [(x['step'], x['a']) for x in _lines(run / 'm.jsonl')] == expected

  check()


def test_only_own_files_are_cut_and_short_ones_stay(logged_warnings, tmp_path):
  foreign = [
    'events.out.tfevents.1700000000.host',
    'events.out.tfevents.1700000000.host.77.0',
    'events.out.tfevents.1700000000.000000.host.77.12345678.v2',
    'events.out.tfevents.1700000000.host.77.12345678',
    'notes.jsonl',
  ]
  for name in foreign:
    (tmp_path / name).write_bytes(b'foreign')
  lengths = {str(tmp_path / name): 2 for name in foreign}
  with _make_tensorboard(tmp_path) as void:
    void.write_scalars(0, {'a': 1})
  old = [_make_tensorboard(tmp_path), _make_jsonl(tmp_path)]
  for writer in old:
    with writer:
      writer.write_scalars(0, {'a': 1})
      lengths |= {writer.path: writer.flush()[writer.path] + 1}
  before = {x: x.read_bytes() for x in tmp_path.iterdir()}
  with _make_tensorboard(tmp_path) as new, _make_jsonl(tmp_path) as lines:
    for writer in (new, lines):
      writer.resume(0, lengths)
    assert set(new.flush()) == {void.path, old[0].path, new.path}
  texts = [c.args[0] % c.args[1:] for c in logged_warnings.call_args_list]
  assert [text.split()[0] for text in texts] == [x.path for x in old]
  before[pathlib.Path(void.path)] = b''
  after = {x: x.read_bytes() for x in tmp_path.iterdir()}
  del after[pathlib.Path(new.path)]
  assert after == before


def test_two_processes_append_to_a_file_that_one_of_them_cuts(tmp_path):
  with _make_jsonl(tmp_path) as first, _make_jsonl(tmp_path) as second:
    lengths = first.flush()
    first.write_scalars(0, {'a': 0})
    second.resume(-1, lengths)
    for step, writer in enumerate([first, second, first]):
      writer.write_scalars(step, {'a': 1})
  steps = [(x['step'], x['a']) for x in _lines(tmp_path / 'metrics.jsonl')]
  assert steps == [(0, 1), (1, 1), (2, 1)]


def test_a_device_has_no_length():
  with writers.JsonlWriter(os.devnull) as writer:
    writer.resume(3, {os.devnull: 5})
    writer.write_scalars(4, {'a': 1})
    assert writer.flush() == {}


@pytest.mark.parametrize(
  'older', [None, 'events.out.tfevents.2000000000.zebra']
)
def test_a_clock_that_was_set_back_changes_no_order(set_clock, older, tmp_path):
  set_clock(lambda: 2e9 + 0.5)
  with writers.TensorBoardWriter(tmp_path) as writer:
    writer.write_scalars(0, {'a': 0})
  if older is not None:
    os.rename(writer.path, tmp_path / older)
  set_clock(lambda: 1e9)
  for step in (1, 2):
    with writers.TensorBoardWriter(tmp_path) as writer:
      assert os.path.basename(writer.path) == max(os.listdir(tmp_path))
      writer.write_scalars(step, {'a': step})
      assert writer.path in writer.flush()
  # One second later each time.
  prefix = 'events.out.tfevents.2000000002.000000.'
  assert older or os.path.basename(writer.path).startswith(prefix)
  assert _scalars(tmp_path, 'a') == [(0, 0.0), (1, 1.0), (2, 2.0)]
  # The time of a record is what the clock said.
  assert _load(tmp_path).Scalars('a')[-1].wall_time == 1e9


# --- JSONL. ---


def test_jsonl_records(set_clock, tmp_path):
  path = tmp_path / 'run' / 'metrics.jsonl'
  clock = iter([1.5, 2.5, 3.5, 4.5])
  set_clock(lambda: next(clock))
  with writers.JsonlWriter(path) as writer:
    writer.write_scalars(
      jnp.array([7, 7]),
      {
        'loss': jnp.float32(0.5),
        'big': 2**53 + 1,
        'nan': np.float32('nan'),
        'up': math.inf,
        'down': {'x': -math.inf},
        'step': 12,
        'kind': 3,
      },
    )
    writer.write_texts(8, {'sample': 'a "b"\nc\ud800', 'time': 'noon'})
    writer.write_images(9, {'x': np.zeros((2, 4, 5, 3), np.uint8)})
    writer.write_scalars(11, {'none': np.zeros(3)})
  assert _lines(path) == [
    {'step': 7, 'time': 1.5, 'kind': 'scalars', 'loss': 0.5}
    | {'big': 9007199254740993, 'nan': 'NaN', 'up': 'Infinity'}
    | {'down/x': '-Infinity', 'scalars/step': 12, 'scalars/kind': 3},
    {'step': 8, 'time': 2.5, 'kind': 'texts', 'sample': 'a "b"\nc?'}
    | {'texts/time': 'noon'},
    {'step': 9, 'time': 3.5, 'kind': 'images', 'x': [2, 4, 5, 3]},
  ]
  for name in ('nan', 'up', 'down/x'):
    assert not math.isfinite(float(_lines(path)[0][name]))


def test_jsonl_appends_and_survives_a_line_cut_short(set_clock, tmp_path):
  path = tmp_path / 'm.jsonl'
  set_clock(lambda: 0.0)
  with writers.JsonlWriter(path) as writer:
    writer.write_scalars(1, {'a': 1})
  with writers.JsonlWriter(path) as writer:
    writer.write_scalars(2, {'a': 2})
  assert [line['step'] for line in _lines(path)] == [1, 2]
  path.write_bytes(path.read_bytes()[:-9])
  with writers.JsonlWriter(path) as writer:
    writer.write_scalars(3, {'a': 3})
    writer.write_scalars(4, {'a': 4})
  first, torn, *rest = path.read_text().split('\n')
  assert json.loads(first)['step'] == 1
  assert torn == '{"step": 2, "time": 0.0, "kind": "scalars",'
  assert [json.loads(line)['step'] for line in rest[:-1]] == [3, 4]
  assert rest[-1] == ''


# --- Several writers. ---


def _write_all_kinds(writer: writers.MetricWriter) -> None:
  writer.write_scalars(1, {'a': 1})
  writer.write_images(2, {'b': np.zeros((1, 1), np.uint8)})
  writer.write_texts(3, {'c': 'd'})


_ALL_KINDS = [
  ('scalars', 1, {'a': 1}),
  ('images', 2, {'b': np.zeros((1, 1), np.uint8)}),
  ('texts', 3, {'c': 'd'}),
]


@pytest.mark.parametrize('decorate', ['multi', 'async'])
def test_decorators_pass_every_kind_on(decorate):
  recorder = _Recorder()
  writer: writers.MetricWriter = (
    writers.MultiWriter([recorder])
    if decorate == 'multi'
    else writers.AsyncWriter(recorder)
  )
  _write_all_kinds(writer)
  writer.flush()
  np.testing.assert_equal(recorder.calls, [*_ALL_KINDS, ('flush',)])
  writer.close()
  assert recorder.calls[-1] == ('close',)


def test_async_refuses_writes_after_close_and_closes_once():
  recorder = _Recorder()
  writer = writers.AsyncWriter(recorder)
  writer.close()
  writer.close()
  assert [c[0] for c in recorder.calls] == ['flush', 'close']
  for method in ('write_scalars', 'write_images', 'write_texts'):
    with pytest.raises(RuntimeError, match=rf'{method} .*after close\(\)'):
      getattr(writer, method)(0, {})


@pytest.mark.parametrize('decorate', ['multi', 'async'])
def test_decorators_take_a_writer_of_scalars_only(decorate, logged_warnings):
  old = _ScalarsOnly()
  writer = (
    writers.MultiWriter([old])
    if decorate == 'multi'
    else writers.AsyncWriter(old)
  )
  for _ in range(2):
    _write_all_kinds(writer)
  writer.flush()
  writer.close()
  assert old.calls == [(1, {'a': 1})] * 2
  texts = [c.args[0] % c.args[1:] for c in logged_warnings.call_args_list]
  # Once per method that is missing.
  assert sum('_ScalarsOnly' in text for text in texts) == 2


@pytest.mark.parametrize('decorate', ['multi', 'async'])
def test_decorators_pass_resume_on_in_order(decorate, logged_warnings):
  recorder, foreign = _Recorder(), _ScalarsOnly()
  writer: writers.MetricWriter = writers.MultiWriter([foreign, recorder])
  if decorate == 'async':
    writer = writers.AsyncWriter(writer)
  with writer:
    writer.resume(7, {'/a': 1})
    # Done when it returns.
    assert recorder.calls == [('resume', 7, {'/a': 1})]
    writer.write_scalars(8, {'a': 1})
  assert [c[0] for c in recorder.calls[:2]] == ['resume', 'scalars']
  assert foreign.calls == [(8, {'a': 1})]
  assert not logged_warnings.called


def test_a_failing_writer_does_not_keep_a_record_from_the_others():
  good, bad, worse = _Recorder(), _Recorder(), _Recorder()
  bad.failing = {'scalars': ValueError('bad'), 'close': KeyError('bad')}
  writer = writers.MultiWriter([bad, worse, good])
  with pytest.raises(ValueError, match='bad'):
    writer.write_scalars(1, {'a': 1})
  worse.failing = {'scalars': OSError('worse')}
  with pytest.raises(ExceptionGroup, match='2 writers failed in') as raised:
    writer.write_scalars(2, {'a': 2})
  assert [str(e) for e in raised.value.exceptions] == ['bad', 'worse']
  with pytest.raises(KeyError):
    writer.close()
  assert [c[0] for c in good.calls] == ['scalars', 'scalars', 'close']
  assert [c[0] for c in worse.calls] == ['scalars', 'close']


# --- In the background. ---


def test_a_slow_writer_does_not_hold_up_the_caller(gate):
  recorder = _Recorder(gate)
  writer = writers.AsyncWriter(recorder, max_queue=200)
  for step in range(100):
    writer.write_scalars(step, {'a': step})
  # All calls have returned and the first has not yet been written.
  assert recorder.calls == []
  gate.set()
  writer.close()
  assert recorder.calls[:100] == [('scalars', n, {'a': n}) for n in range(100)]
  assert [c[0] for c in recorder.calls[100:]] == ['flush', 'close']
  assert recorder.threads == {'jaxline-writer'}


@pytest.mark.parametrize('kind', ['scalars', 'images'])
def test_a_full_queue_blocks_and_loses_nothing(kind, gate, monkeypatch):
  monkeypatch.setattr(writers, '_MAX_BYTES', 100)
  recorder, written = _Recorder(gate), []
  writer = writers.AsyncWriter(recorder, max_queue=3)
  # More than 100 bytes are taken only while no other image waits.
  image = jnp.zeros((101, 1), jnp.uint8)

  def write() -> None:
    for step in range(8):
      if kind == 'images':
        writer.write_images(step, {'x': image})
      else:
        writer.write_scalars(step, {'x': step})
      written.append(step)

  thread = threading.Thread(target=write)
  thread.start()
  assert recorder.entered.wait(_TIMEOUT)
  thread.join(0.2)
  # One is being written, and three scalars wait.
  assert written == ([0] if kind == 'images' else [0, 1, 2, 3])
  gate.set()
  thread.join(_TIMEOUT)
  writer.close()
  kinds = [call[:2] for call in recorder.calls[:-2]]
  assert kinds == [(kind, step) for step in range(8)]


def _deep_in_the_backend() -> None:
  raise OSError('disk on fire')


class _Burning(_Recorder):
  def _write(self, kind: str, *args: Any) -> None:
    if args[0] == 1:
      _deep_in_the_backend()
    super()._write(kind, *args)


def test_an_error_on_the_thread_is_raised_on_the_caller(gate):
  recorder = _Burning(gate)
  writer = writers.AsyncWriter(recorder)
  for step in range(4):
    writer.write_scalars(step, {'a': step})
  gate.set()

  def frames(act: Any) -> list[str]:
    with pytest.raises(OSError, match='disk on fire') as raised:
      act()
    return [f.name for f in traceback.extract_tb(raised.value.__traceback__)]

  depths = []
  for act in (
    writer.flush,
    lambda: writer.write_scalars(4, {'a': 4}),
    lambda: writer.write_texts(4, {'a': 'b'}),
    writer.flush,
    writer.close,
  ):
    names = frames(act)
    assert names[-1] == '_deep_in_the_backend'
    depths.append(len(names))
  # Raised again and again it still has one traceback, not a growing one.
  assert max(depths) <= depths[0] + 2
  writer.close()
  kinds = [c[:2] for c in recorder.calls if c[0] == 'scalars']
  # What was queued is still written, what came after the error is not.
  assert kinds == [('scalars', 0), ('scalars', 2), ('scalars', 3)]
  assert recorder.calls[-1] == ('close',)
  with pytest.raises(RuntimeError, match=r'after close\(\)'):
    writer.write_scalars(5, {'a': 5})


@pytest.mark.parametrize('interval', [1, 3])
def test_an_error_of_an_action_takes_no_record_before_it(gate, interval):
  recorder = _Burning(gate)
  writer = writers.AsyncWriter(recorder)
  action = periodic.PeriodicAction(
    writer.write_scalars,
    'steps',
    interval,
    log_all_data=True,
    executor=writer.executor,
  )
  action(0.0, 0, {'a': 0})
  flushed = writer.flush_async()
  for step in range(1, 4):
    action(float(step), step, {'a': step})
  gate.set()
  flushed()  # The error is of a later step.
  assert ('flush',) in recorder.calls
  done = threading.Event()
  writer.executor.put(done.set)
  assert done.wait(_TIMEOUT)
  # Nobody has seen it so far: it would be logged at the end.
  assert len(writer.executor._unraised) == 1
  with pytest.raises(OSError, match='disk on fire'):
    writer.close()
  steps = [c[1] for c in recorder.calls if c[0] == 'scalars']
  assert steps == [0, 2, 3]


@pytest.fixture
def often_switched():
  """Threads take turns ten times as often: more races in less time."""
  interval = sys.getswitchinterval()
  sys.setswitchinterval(interval / 10)
  yield
  sys.setswitchinterval(interval)


def test_close_loses_nothing_that_a_write_accepted(often_switched):
  del often_switched
  for _ in range(30):
    recorder, accepted = _Recorder(), []
    writer = writers.AsyncWriter(recorder, max_queue=10**6)

    def write() -> None:
      with contextlib.suppress(RuntimeError):
        while True:
          writer.write_scalars(0, {'a': 0})  # noqa: B023
          accepted.append(None)  # noqa: B023

    thread = threading.Thread(target=write)
    thread.start()
    time.sleep(0.0005)
    writer.close()
    thread.join()
    kinds = [c[0] for c in recorder.calls]
    assert kinds == ['scalars'] * len(accepted) + ['flush', 'close']


def test_what_the_caller_changes_later_is_not_written(gate):
  recorder = _Recorder(gate)
  writer = writers.AsyncWriter(recorder)
  array = np.array(1.0)
  image = np.zeros((2, 2), np.uint8)
  weight = jnp.zeros((2, 2))
  step = np.array([5, 5])
  scalars = {'a': array, 'nest': {'b': array}}
  texts = {'c': 'd'}
  writer.write_scalars(step, scalars)
  writer.write_images(step, {'i': image, 'w': weight})
  writer.write_texts(step, texts)
  array[...] = 2.0
  image[...] = 255
  weight.delete()  # As the next step does, which it is donated to.
  step[...] = 6
  scalars['nest']['b'] = 7
  texts.clear()
  gate.set()
  writer.close()
  zeros = np.zeros((2, 2), np.uint8)
  np.testing.assert_equal(
    recorder.calls[:3],
    [
      ('scalars', 5, {'a': 1.0, 'nest/b': 1.0}),
      ('images', 5, {'i': zeros, 'w': zeros}),
      ('texts', 5, {'c': 'd'}),
    ],
  )


def test_device_arrays_are_fetched_on_the_thread():
  fetches = []
  asarray = np.asarray

  def fetch(value: Any, *args: Any, **kwargs: Any) -> np.ndarray:
    if isinstance(value, jax.Array):
      fetches.append((threading.current_thread().name, value.shape))
    return asarray(value, *args, **kwargs)

  recorder = _Recorder()
  step = _per_device(3)
  scalars = {'a': jnp.float32(2), 'nest': {'b': jnp.ones((1, 1))}}
  image = jnp.ones((4, 4))
  writer = writers.AsyncWriter(recorder)
  with mock.patch.object(np, 'asarray', fetch):
    writer.write_scalars(step, scalars)
    writer.write_images(4, {'i': image})
    writer.flush()
  writer.close()
  # Of the step only one device's copy is needed.
  shapes = [(), (1, 1), (1,), (4, 4)]
  assert fetches == [('jaxline-writer', shape) for shape in shapes]
  assert recorder.calls[0] == ('scalars', 3, {'a': 2.0, 'nest/b': 1.0})
  assert type(recorder.calls[1][2]['i']) is np.ndarray


_PROGRAM = """
  import os
  import sys
  import time

  from jaxline.metrics import writers

  assert 'tensorboardX' not in sys.modules
  assert 'tensorflow' not in sys.modules

  class Slow(writers.JsonlWriter):
    def _emit(self, *args):
      time.sleep(0.005)
      super()._emit(*args)

  writer = writers.AsyncWriter(Slow(sys.argv[1]))
  child = os.fork()
  if not child:
    for act in (writer.flush, writer.close):
      try:
        act()
      except RuntimeError as error:
        assert 'forked process' in str(error)
      else:
        os._exit(1)
    sys.exit(0)  # The inherited exit handler has nothing to wait for.
  assert os.waitpid(child, 0)[1] == 0

  import jax.numpy as jnp
  for step in range(100):
    writer.write_scalars(jnp.array([step]), {'a': jnp.float32(step)})
  raise SystemExit('the end')
"""


@pytest.mark.process
def test_the_end_of_the_program_writes_what_is_queued(tmp_path):
  path = tmp_path / 'm.jsonl'
  done = subprocess.run(
    [
      sys.executable,
      # Python 3.12 warns of what the program does on purpose.
      '-Wignore:This process:DeprecationWarning',
      '-c',
      textwrap.dedent(_PROGRAM),
      path,
    ],
    cwd=pathlib.Path(__file__).parents[1],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert (done.returncode, done.stderr.strip()) == (1, 'the end')
  assert [(r['step'], r['a']) for r in _lines(path)] == [
    (n, float(n)) for n in range(100)
  ]
