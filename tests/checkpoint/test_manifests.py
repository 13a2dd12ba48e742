"""Tests of manifests and retention; collection is in test_model.py too."""

import pytest

from jaxline.checkpoint import manifests as manifests_lib
from jaxline.run_directory import owner
from jaxline.run_directory import store as store_lib

DAY = 24 * 3600.0


def manifest(step, **values):
  about = {'file': '0000.w', 'shape': [], 'dtype': 'int8', 'chunk': []}
  return {
    'format': 2, 'step': step, 'time': float(step), 'data': f'{step}-ab',
    'arrays': {'w': about | {'parts': {'c': 1}}},
    'module': {'w': {'structure': {'jax': 'w'}}}, 'processes': [{}],
    'entries': {'global_step': step}, 'logs': {}, 'config': {},
  } | values  # fmt: skip


def write(manifests, series, step, **values):
  """Writes data and its manifest, as a save does."""
  saved = manifest(step, **values)
  store = manifests.store
  store.write(f'data/{saved["data"]}/0000.w/c', b'1')
  manifests.write(series, saved)


@pytest.fixture
def manifests(tmp_path) -> manifests_lib.Manifests:
  return manifests_lib.Manifests(store_lib.at(tmp_path))


# Which checkpoints there are.


def test_only_numbers_are_steps(manifests):
  for name in (
    '0.json', '12.json', '3.json', '03.json', '-1.json', '٣.json', 'x.json',
    '.5.json.77.partial', '6.json.bak',
  ):  # fmt: skip
    manifests.store.write(f'latest/{name}', b'')
  assert manifests.steps('latest') == [0, 3, 12]
  assert manifests.steps('absent') == []
  manifests.store.write('latest/7/checkpoint.json', b'')  # As format 1 has it.
  with pytest.raises(store_lib.RefusedError, match='different format'):
    manifests.steps('latest')


def test_every_byte_of_a_manifest_is_guarded(manifests):
  write(manifests, 'latest', 5)
  whole = manifests.store.read('latest/5.json')
  want = manifests.read('latest', 5)
  edits = [b'', whole[:-2], b'[]', b'{"crc": 1}', b'[' * 100_000]
  for bit in range(0, 8 * len(whole), 9):
    edits.append(bytearray(whole))
    edits[-1][bit // 8] ^= 1 << bit % 8
  for edited in edits:
    manifests.store.write('latest/5.json', edited)
    with pytest.raises(store_lib.DamagedError, match=r'/5\.json does not'):
      manifests.read('latest', 5)
  manifests.store.write('latest/5.json', whole)
  assert manifests.read('latest', 5) == want
  manifests.store.delete('latest/5.json')
  with pytest.raises(store_lib.GoneError, match=r'latest/5\.json'):
    manifests.read('latest', 5)


@pytest.mark.parametrize('url', ['gs'], indirect=True)
def test_a_step_is_created_once(url):
  one, other = (manifests_lib.Manifests(store_lib.at(url)) for _ in range(2))
  write(one, 'latest', 5)
  before = one.store.read('latest/5.json')
  with pytest.raises(owner.LostClaimError, match=r'latest/5\.json'):
    write(other, 'latest', 5, data='5-cd')
  assert one.store.read('latest/5.json') == before
  one.delete_manifests('latest', [5])
  write(other, 'latest', 5, data='5-cd')
  write(one, 'best', 5)
  write(one, 'best', 5, data='5-cd')  # The same step may be the best again.
  assert one.read('best', 5)['data'] == '5-cd'


@pytest.mark.parametrize(('keep', 'saved', 'stay'), [
  ((1, None, 24), [(i, i * DAY / 4) for i in range(1, 12)], [1, 5, 9, 11]),
  # The clock was put back.
  ((1, None, 24),
   [(1, 9 * DAY), (2, 1 * DAY), (3, 1.5 * DAY), (4, 2 * DAY), (5, 2 * DAY)],
   [1, 2, 4, 5]),
  ((1, 4, 24), [(2, 0.0), (4, 1.0), (6, DAY), (7, DAY), (9, DAY + 1)],
   [2, 4, 6, 9]),
])  # fmt: skip
def test_which_stay(keep, saved, stay):
  gone = manifests_lib.steps_to_delete(saved, *keep)
  assert sorted({step for step, _ in saved} - set(gone)) == stay


def data(manifests):
  return manifests.store.names('data')


def test_data_of_a_manifest_that_is_replaced_is_collected(manifests):
  for step in (1, 2):
    write(manifests, 'latest', step)
  write(manifests, 'best', 1)
  manifests.delete_manifests('latest', [1])
  manifests.collect_garbage()
  assert data(manifests) == ['1-ab', '2-ab']
  # An evaluation, in another process, has the same step as the best again.
  write(manifests_lib.Manifests(manifests.store), 'best', 1, data='1-cd')
  manifests.collect_garbage(data(manifests))
  assert data(manifests) == ['1-cd', '2-ab']
  write(manifests, 'latest', 2, data='2-cd')  # Saved twice.
  manifests.collect_garbage()
  assert data(manifests) == ['1-cd', '2-cd']


@pytest.mark.parametrize('key', ['best/2.json', 'latest/3.json', 'readers/x'])
def test_what_cannot_be_read_protects_all(key, manifests):
  for step in (1, 2, 3):
    write(manifests, 'latest', step)
  write(manifests, 'best', 2)
  manifests.store.write(key, b'{')
  fresh = manifests_lib.Manifests(manifests.store)
  fresh.delete_manifests('latest', [1])
  fresh.collect_garbage(data(fresh))
  assert data(fresh) == ['1-ab', '2-ab', '3-ab']
  fresh.store.delete(key)
  fresh.collect_garbage()
  assert '1-ab' not in data(fresh)
  # GCS lists nothing, without an error, where listing is not permitted.
  fresh.delete_manifests('latest', fresh.steps('latest'))
  fresh.delete_manifests('best', [2])
  left = data(fresh)
  fresh.collect_garbage(left)
  assert data(fresh) == left != []


def test_marked_data_stays_while_the_mark_changes(manifests, clock):
  for step in (1, 2):
    write(manifests, 'latest', step)
  mark, other = (owner.Heartbeat(manifests.store, f'readers/{x}') for x in 'ab')
  mark.write(data=['1-ab'])
  other.write(data=['2-ab'])
  manifests.delete_manifests('latest', [1])
  for _ in range(4):  # As its thread does.
    manifests.collect_garbage()
    clock.now += owner.STALE_SECS - 1
    mark.write()
  manifests.collect_garbage()
  assert data(manifests) == ['1-ab', '2-ab']
  clock.now += owner.STALE_SECS - 1
  manifests.collect_garbage()  # Nobody has seen it that long without a change.
  assert data(manifests) == ['1-ab', '2-ab']
  clock.now += 1
  manifests.collect_garbage()  # Its process was killed.
  assert data(manifests) == ['2-ab']
  assert manifests.store.names('readers') == []
  for each in (mark, other):
    each.stop()


# The two orders in which a process names data that another one deletes.


def test_data_that_is_marked_behind_the_first_look_is_kept(
  manifests, monkeypatch
):
  for step in (1, 2):
    write(manifests, 'latest', step)
  manifests.delete_manifests('latest', [1])
  store, real = manifests.store, manifests.store.write

  def late(key, *args):
    if key.startswith('doomed/'):
      real('readers/eval.json', b'{"data": ["1-ab"]}')
    return real(key, *args)

  monkeypatch.setattr(store, 'write', late)
  manifests.collect_garbage()
  assert data(manifests) == ['1-ab', '2-ab']
  assert not any(store.names(f'doomed/{x}') for x in store.names('doomed'))


@pytest.mark.parametrize('when', ['before', 'meanwhile'])
def test_a_best_whose_data_is_being_deleted_is_not_saved(
  when, manifests, monkeypatch
):
  write(manifests, 'best', 5)
  write(manifests, 'latest', 5, data='5-cd')
  before, real = manifests.read('best', 5), manifests.store.write

  def doom(key, *args):
    monkeypatch.undo()
    real('doomed/5-cd/nonce', b'')
    return real(key, *args)

  monkeypatch.setattr(manifests.store, 'write', doom)
  if when == 'before':
    manifests.store.write('x', b'')
  with pytest.raises(store_lib.DamagedError, match='it is being deleted'):
    manifests.write('best', manifest(5, data='5-cd'))
  assert manifests.read('best', 5) == before
