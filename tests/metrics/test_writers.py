"""Tests for jaxline.metrics.writers."""

import contextlib
import io
import itertools
import json
import math
import os
import pathlib
import resource
import tempfile
import threading
import time
import types
from unittest import mock
import warnings

import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

from jaxline.base import async_lib
from jaxline.metrics import files
from jaxline.metrics import fingerprints
from jaxline.metrics import periodic
from jaxline.metrics import tensorboard
from jaxline.metrics import writers
from jaxline.parallel import devices

with warnings.catch_warnings():
  # The reader only; what we write with stays under warnings as errors.
  warnings.simplefilter('ignore')
  from tensorboard.backend.event_processing import event_accumulator
  from tensorboard.backend.event_processing import plugin_event_accumulator
  from tensorboard.util import tensor_util

_TIMEOUT = 30.0


@pytest.fixture
def gate():
  """Holds a `_Recorder` up until it is set, at the latest when a test ends."""
  event = threading.Event()
  yield event
  event.set()


def _load(directory):
  """Reads a directory as it stands, values as they were written."""
  kinds = ('scalars', 'tensors', 'images')
  return event_accumulator.EventAccumulator(
    str(directory), size_guidance=dict.fromkeys(kinds, 0)
  ).Reload()


def _scalars(directory, tag):
  return [(e.step, e.value) for e in _load(directory).Scalars(tag)]


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


class _Recorder(writers.Backend):
  """Keeps every call; waits at `gate` and fails at `failing`."""

  def __init__(self, gate=None, failing=None):
    self.calls, self.threads = [], set()
    self.gate, self.failing = gate, failing
    self.entered = threading.Event()

  def _take(self, *call):
    self.threads.add(threading.current_thread().name)
    self.entered.set()
    assert self.gate is None or self.gate.wait(_TIMEOUT)
    if call[:2] == self.failing:
      raise OSError('disk on fire')
    self.calls.append(call)

  def write(self, records):
    for record in records:
      self._take(record.kind, record.step, record.values)

  def resume(self, step, lengths):
    self._take('resume', step, lengths)

  def flush(self):
    return self._take('flush') or {}

  def close(self):
    self._take('close')


def test_to_scalars_takes_every_kind_of_number():
  for value, expected in (
    (3, 3),
    (2**53 + 1, 9007199254740993),
    (True, 1),
    (math.inf, math.inf),
    (np.float16(0.25), 0.25),
    (np.uint64(2**64 - 1), 18446744073709551615),
    (np.bool_(True), 1),
    (np.array([[2.5]], np.float32), 2.5),
    (np.asarray(jnp.array([0.75], jnp.bfloat16)), 0.75),
    (jnp.array([9], jnp.int32), 9),
    (jnp.array(-3, jnp.int4), -3),
    (jnp.array(0.5, jnp.float8_e4m3fn), 0.5),
    # float32's neighbour of 0.1: 13421773 / 2**27.
    (jnp.float32(0.1), 13421773 / 2**27),
    (jnp.float32('nan'), math.nan),
  ):
    got = writers.to_scalars({'a': value, 'nest': {'b': {'c': value}}})
    np.testing.assert_equal(got, {'a': expected, 'nest/b/c': expected})
    assert {type(x) for x in got.values()} == {type(expected)}


def test_what_is_no_number_is_skipped_with_one_warning_a_name(caplog):
  donated = jnp.float32(1)
  donated.delete()
  bad = [None, 'fast', [1.0], 1j, 10**400, np.array(['a']), np.zeros((2, 3))]
  bad += [np.zeros(0, np.int32), jnp.zeros(4), jax.random.key(0), donated]
  for i, value in enumerate(bad):
    name = f'not_a_number_{i}'
    for _ in range(3):
      got = writers.to_scalars({'good': 1, 'nest': {name: value}, 'last': 2})
      assert got == {'good': 1, 'last': 2}
    assert sum(f'"nest/{name}"' in x for x in caplog.messages) == 1


def _jsonl(directory):
  return writers.JsonlWriter(directory / 'metrics.jsonl')


def _record(step):
  return [files.Record('scalars', step, 0.0, {'a': step})]


def test_numbers_in_events_and_in_lines(monkeypatch, tmp_path):
  clock = itertools.count(1.5)
  times = types.SimpleNamespace(**vars(time) | {'time': lambda: next(clock)})
  monkeypatch.setattr(writers, 'time', times)
  directory = tmp_path / 'new' / 'train'
  own = tensorboard.TensorBoardWriter(directory), _jsonl(directory)
  numbers = {'loss': jnp.float32(0.5), 'big': 2**53 + 1}
  numbers |= {'nan': np.float32('nan'), 'up': math.inf}
  numbers |= {'down': {'x': -math.inf}, 'step': 12, 'kind': 3}
  with writers.MetricWriter(*own) as writer:
    writer.write_scalars(devices.bcast_local_devices(7), numbers)
    writer.write_texts(8, {'sample': 'a "b"\nc\ud800', 'time': 'noon'})
    writer.write_images(9, {'x': np.zeros((2, 4, 5, 3), np.uint8)})
    writer.write_scalars(11, {'none': np.zeros(3)})
    writer.write_scalars(2**40, {'ö' * 100: -(10**18), 'loss': 1e300})
  events = _load(directory)
  shown = {
    tag: [(x.wall_time, x.step, x.value) for x in events.Scalars(tag)]
    for tag in events.Tags()['scalars']
  }
  np.testing.assert_equal(shown, {
    'loss': [(1.5, 7, 0.5), (5.5, 2**40, math.inf)],
    'big': [(1.5, 7, 2.0**53)],
    'nan': [(1.5, 7, math.nan)],
    'up': [(1.5, 7, math.inf)],
    'down/x': [(1.5, 7, -math.inf)],
    'step': [(1.5, 7, 12)],
    'kind': [(1.5, 7, 3)],
    'ö' * 100: [(5.5, 2**40, float(np.float32(-1e18)))],
  })  # fmt: skip
  assert _lines(directory / 'metrics.jsonl') == [
    {'step': 7, 'time': 1.5, 'kind': 'scalars', 'loss': 0.5}
    | {'big': 9007199254740993, 'nan': 'NaN', 'up': 'Infinity'}
    | {'down/x': '-Infinity', 'scalars/step': 12, 'scalars/kind': 3},
    {'step': 8, 'time': 2.5, 'kind': 'texts', 'sample': 'a "b"\nc?'}
    | {'texts/time': 'noon'},
    {'step': 9, 'time': 3.5, 'kind': 'images', 'x': [2, 4, 5, 3]},
    {'step': 2**40, 'time': 5.5, 'kind': 'scalars', 'ö' * 100: -(10**18)}
    | {'loss': 1e300},
  ]


def test_tensorboard_images_are_pixel_exact_and_texts_verbatim(tmp_path):
  grey = np.arange(6, dtype=np.uint8).reshape(2, 3) * 50
  rgb = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14
  rgba = np.arange(5 * 2 * 3 * 4, dtype=np.uint8).reshape(5, 2, 3, 4) * 2
  images = {
    'rgb': (rgb, rgb[None]),
    'rgba': (jnp.asarray(rgba), rgba),
    'column': (grey[:, :, None], grey[None]),
    # 0.2 * 255 = 51 exactly; 0.5 * 255 = 127.5 rounds to even, 128.
    'float': (jnp.array([[0.0, 0.2, 0.5, 1.0]]), [[[0, 51, 128, 255]]]),
    'bool': (np.array([[True, False]]), [[[255, 0]]]),
    'range': (np.array([[-3.0, 1.004, 200.0, np.nan]]), [[[0, 255, 255, 0]]]),
  }
  text = 'def f(x):\n  return *x*\n\n# <b>end</b>\ud800'
  with writers.MetricWriter(tensorboard.TensorBoardWriter(tmp_path)) as writer:
    writer.write_images(9, {name: image for name, (image, _) in images.items()})
    writer.write_texts(2, {'sample': text})
    shapes = [4], [1, 2, 2, 2, 3], [4, 8, 8], [4, 8, 8, 2], [0, 8]
    bad = [np.zeros(shape, np.uint8) for shape in shapes]
    for image in (*bad, np.zeros((8, 8), np.int32)):
      with pytest.raises(ValueError, match=r'"x".*(shape|int32)'):
        writer.write_images(0, {'x': image})
  accumulator = _load(tmp_path)

  def tensor(tag, plugin, step):
    (event,) = accumulator.Tensors(tag)
    data = accumulator.SummaryMetadata(tag).plugin_data
    assert (data.plugin_name, event.step) == (plugin, step)
    return tensor_util.make_ndarray(event.tensor_proto)

  for name, (_, expected) in images.items():
    width, height, *pngs = tensor(name, 'images', 9).tolist()
    found = [np.asarray(PIL.Image.open(io.BytesIO(png))) for png in pngs]
    np.testing.assert_array_equal(found, expected)
    assert found[0].shape[:2] == (int(height), int(width))
  block = tensor('sample', 'text', 2).item().decode('utf-8')
  assert block == ('    def f(x):\n      return *x*\n    \n    # <b>end</b>?')


@pytest.mark.parametrize('make', [tensorboard.TensorBoardWriter, _jsonl])
def test_a_full_disk_is_an_error_and_spares_whole_records(make, tmp_path):
  backend = make(tmp_path)
  for step in range(2):
    backend.write(_record(step))
  size = os.path.getsize(backend.path)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  # The kernel takes a record and ten more bytes of this file, then refuses.
  backend.write(_record(2))
  more = os.path.getsize(backend.path) - size
  resource.setrlimit(resource.RLIMIT_FSIZE, (size + 2 * more + 10, limits[1]))
  try:
    with pytest.raises(OSError, match='too large') as raised:
      backend.write([*_record(3), *_record(4)])
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert backend.path in str(raised.value)
  backend.write(_record(5))  # There is room again.
  backend.close()
  if make is _jsonl:
    lines = pathlib.Path(backend.path).read_text().splitlines()
    steps = [x['a'] for x in map(files.parse_record, lines) if x]
    assert steps == [0, 1, 2, 3, 5]
  else:
    assert _scalars(tmp_path, 'a') == [(step, step) for step in range(4)]


def _seen(reader):
  """Returns (step, value) of the tag 'a'."""
  reader.Reload()
  has_any = 'a' in reader.Tags()['tensors']
  events = reader.Tensors('a') if has_any else ()
  to_array = tensor_util.make_ndarray
  return [(e.step, float(to_array(e.tensor_proto))) for e in events]


_ACTIONS = st.lists(
  st.sampled_from(['write', 'write', 'mark', 'see'])
  # A kill and a start that restores: at this mark, or with none as a new run.
  | st.integers(0, 4),
  max_size=25,
)


@hypothesis.settings(
  max_examples=20, derandomize=True, deadline=None, database=None
)
@hypothesis.given(_ACTIONS)
@hypothesis.example(['write', 'write', 'mark', 'write', 'see', 1])
def test_a_log_that_is_cut_to_a_mark_has_the_records_before_it(actions):
  with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
    run = pathlib.Path(name)

    def start():
      lines = writers.JsonlWriter(run / 'm.jsonl')
      writer = writers.MetricWriter(tensorboard.TensorBoardWriter(run), lines)
      return stack.enter_context(writer)

    # TensorBoard's own reader, which keeps a directory open.
    reader = plugin_event_accumulator.EventAccumulator(
      str(run), size_guidance={plugin_event_accumulator.TENSORS: 0}
    )
    writer, values, expected, marks = start(), itertools.count(), [], []
    for action in [*actions, 'write', 'see']:
      if action == 'write':
        point = (len(expected), float(next(values)))
        writer.write_scalars(point[0], {'a': point[1]})
        expected = [*expected, point]
      elif action == 'mark':
        marks.append((writer.flush_async(), expected))
      elif action == 'see':
        writer.flush()
        assert _seen(reader) == expected
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


def test_only_own_files_are_cut_and_short_ones_stay(tmp_path):
  foreign = [
    'events.out.tfevents.1700000000.host',
    'events.out.tfevents.1700000000.000000.host.77.12345678.v2',
    'events.out.tfevents.4000000000.host.77.12345678',  # The clock was ahead.
    'notes.jsonl',
  ]
  for name in foreign:
    (tmp_path / name).write_bytes(b'foreign')
  lengths = {str(tmp_path / name): 2 for name in foreign}
  void = tensorboard.TensorBoardWriter(tmp_path)
  old = [tensorboard.TensorBoardWriter(tmp_path), _jsonl(tmp_path)]
  for backend in (void, *old):
    backend.write(_record(0))
    backend.close()
  lengths |= {x.path: os.path.getsize(x.path) + 1 for x in old}
  before = {str(x): x.read_bytes() for x in tmp_path.iterdir()}
  new = tensorboard.TensorBoardWriter(tmp_path)
  # TensorBoard reads files in the order of their names.
  assert new.path > max(x for x in before if 'tfevents' in x)
  with writers.MetricWriter(new, _jsonl(tmp_path)) as writer:
    writer.resume(0, lengths)
    paths = {void.path, new.path, *(x.path for x in old)}
    assert set(writer.flush()) == paths
  after = {str(x): x.read_bytes() for x in tmp_path.iterdir()}
  del after[new.path]
  assert after == before | {void.path: b''}


@pytest.mark.parametrize('is_resumed', [False, True])
def test_a_record_behind_one_that_was_cut_is_whole(is_resumed, tmp_path):
  for cut in range(1, 12):
    record = [files.Record('fingerprints', 0, 0.0, {7: cut, 8: 5})]
    lines, prints = tmp_path / f'm{cut}.jsonl', tmp_path / f'prints{cut}'
    for start in (0, 1):
      own = [writers.JsonlWriter(lines), fingerprints.FingerprintWriter(prints)]
      for backend, written in zip(own, (_record(start), record), strict=True):
        if start and is_resumed:  # Longer than what a failing disk has kept.
          backend.resume(0, {backend.path: 1000})
        backend.write(written)
        assert backend.flush() == {backend.path: os.path.getsize(backend.path)}
        backend.close()
        if not start:
          os.truncate(backend.path, os.path.getsize(backend.path) - cut)
    assert json.loads(lines.read_text().splitlines()[-1])['a'] == 1
    assert lines.read_bytes().count(b'\n') == 2
    assert fingerprints.read(prints.read_bytes())[0] == {7: cut, 8: 5}
    assert prints.stat().st_size % 8 == 0


def test_every_backend_gets_what_it_takes_in_order():
  recorder, late = _Recorder(), _Recorder()
  some = mock.Mock(['write_scalars'])
  full = mock.Mock(['write_scalars', 'write_texts', 'flush', 'close'])
  writer = writers.MetricWriter(recorder, some, full)
  writer.resume(0, {'/a': 1})
  assert recorder.calls == [('resume', 0, {'/a': 1})]  # When it returns.
  image = np.zeros((1, 1, 1, 1), np.uint8)
  records = [
    ('scalars', 1, {'a': 1}),
    ('images', 2, {'b': image}),
    ('texts', 3, {'c': 'd'}),
  ]
  for kind, step, values in records:
    getattr(writer, f'write_{kind}')(step, values)
  assert writer.flush() == {}
  np.testing.assert_equal(recorder.calls[1:], [*records, ('flush',)])
  writer.add(late)
  writer.write_texts(4, {'e': 'f'})
  for _ in range(2):
    writer.close()
  assert late.calls == [('texts', 4, {'e': 'f'}), ('close',)]
  assert recorder.calls[4:] == [('flush',), *late.calls]
  assert recorder.threads == {'jaxline-writer'}
  scalars = mock.call.write_scalars(1, {'a': 1})
  assert some.mock_calls == [scalars]
  assert full.mock_calls == [
    *(scalars, mock.call.write_texts(3, {'c': 'd'}), mock.call.flush()),
    mock.call.write_texts(4, {'e': 'f'}),
    *(mock.call.flush(), mock.call.close()),
  ]
  for kind, step, values in records:
    with pytest.raises(RuntimeError, match=rf'write_{kind} .*after close\(\)'):
      getattr(writer, f'write_{kind}')(step, values)


def test_a_full_queue_blocks_and_loses_nothing(gate, monkeypatch):
  monkeypatch.setattr(async_lib, 'MAX_QUEUED', 3)
  recorder, written, scalars = _Recorder(gate), [], {}
  writer = writers.MetricWriter(recorder)
  writer.write_texts(0, {'x': ''})
  assert recorder.entered.wait(_TIMEOUT)

  def write():
    for step in range(8):
      scalars['x'] = step  # What waits keeps its own value.
      writer.write_scalars(step, scalars)
      written.append(step)

  thread = threading.Thread(target=write)
  thread.start()
  thread.join(0.2)
  assert written == [0, 1, 2]
  gate.set()
  thread.join(_TIMEOUT)
  writer.close()
  got = [(step, x['x']) for _, step, x in recorder.calls[1:-1]]
  assert got == [(step, step) for step in range(8)]


@pytest.mark.parametrize('place', ['backend', 'device'])
def test_an_error_on_the_thread_is_raised_on_the_caller(place, gate):
  class Fault:
    def __array__(self, *unused):
      raise OSError('disk on fire')

  bad = _Recorder(gate, failing=('scalars', 2) if place == 'backend' else None)
  good = _Recorder()
  writer = writers.MetricWriter(bad, good)
  for step in range(5):
    if step == 2:
      flushed = writer.flush_async()
    value = Fault() if (step, place) == (2, 'device') else 0
    writer.put('scalars', step, {'a': value})
  gate.set()
  flushed()  # The error is of a later step.
  for act in (
    writer.flush,
    lambda: writer.write_scalars(5, {'a': 5}),
    writer.executor.raise_error,
    writer.wait_to_finish,
    writer.close,
  ):
    with pytest.raises(OSError, match='disk on fire'):
      act()
  writer.close()
  steps = [x[1] for x in good.calls if x[0] == 'scalars']
  # What was queued is still written, what came after the error is not.
  assert steps == [0, 1, *[2][: place == 'backend'], 3, 4]
  assert [x[1] for x in bad.calls if x[0] == 'scalars'][:2] == [0, 1]
  assert good.calls[-1] == bad.calls[-1] == ('close',)


def test_an_action_on_the_thread_writes_before_a_later_mark():
  recorder = _Recorder()
  writer = writers.MetricWriter(recorder)
  action = periodic.PeriodicAction(writer.write_scalars, 'steps', 1)
  action.share(writer.executor)
  action(1.0, 1, {'a': 1})
  flushed = writer.flush_async()
  action(2.0, 2, {'a': 1})
  flushed()
  writer.close()
  kinds = [call[0] for call in recorder.calls]
  assert kinds == ['scalars', 'flush', 'scalars', 'close']


def test_what_the_caller_changes_later_is_not_written(gate):
  recorder = _Recorder()
  writer = writers.MetricWriter(recorder)
  writer.executor.put(gate.wait)  # Before anything is converted.
  step, array = np.array([5, 5]), np.array(1.0)
  image, weight = np.zeros((2, 2), np.uint8), jnp.zeros((2, 2))
  scalars, texts = {'a': array, 'nest': {'b': array}}, {'c': 'd'}
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
  zeros = np.zeros((1, 2, 2, 1), np.uint8)
  expected = ('scalars', {'a': 1.0, 'nest/b': 1.0}), ('texts', {'c': 'd'})
  expected = expected[0], ('images', {'i': zeros, 'w': zeros}), expected[1]
  np.testing.assert_equal(
    recorder.calls[:3], [(kind, 5, values) for kind, values in expected]
  )
