"""Promise: a run can be replayed, explained and bisected to the bit.

Also fingerprints, skipped batches and steps that are computed twice.
"""

import dataclasses
import json
import pathlib
import shlex
import shutil

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import jaxline
from jaxline import base_config
from jaxline import errors
from jaxline.metrics import fingerprints
from jaxline.run_directory import notes
from jaxline.run_directory import sources
from jaxline.run_directory import store
from jaxline.runs import __main__ as cli
from jaxline.runs import bisect
from jaxline.runs import explain
from jaxline.runs import replay
from jaxline.supervision import recompute
from tests import remains
from tests import toys
from tests.experiments import travels


def run(directory, overrides=None, **kwargs):
  """Trains, and returns the run's directory."""
  config = travels.get_config(directory, **kwargs)
  config.update(overrides or {})
  jaxline.fit(None, config, mode='train')
  return pathlib.Path(directory)


@pytest.fixture(scope='module')
def shared(tmp_path_factory):
  """A run of 12 steps with checkpoints of 4, 8 and 12; not to be changed."""
  return run(tmp_path_factory.mktemp('travels') / 'run')


def prints(directory):
  raw = (directory / 'train/fingerprints.bin').read_bytes()
  return fingerprints.read(raw)[0]


# Fingerprints.


def test_a_fingerprint_depends_on_every_bit_and_not_on_the_sharding():
  mesh = jax.make_mesh((2,), ('a',))
  x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
  y = np.arange(8, dtype=np.int8)

  def of(x, y, *spec):
    sharding = jax.sharding.NamedSharding(mesh, P(*spec))
    return int(fingerprints.fingerprint([jax.device_put(x, sharding), y]))

  assert of(x, y) == of(x, y, 'a') == of(x, y, None, 'a')
  changed = [x.copy() for _ in range(32)]
  for i, other in enumerate(changed):
    other.view(np.uint32).flat[2 * i] ^= np.uint32(1) << i
  others = [of(other, y) for other in changed]
  others += [of(x[::-1], y), of(x, y[::-1]), of(-x, y), of(x[:, ::-1], y)]
  assert len({of(x, y), *others}) == 1 + len(others)


def test_a_fingerprint_of_scalars_on_different_devices():
  first, *_, last = (
    jax.device_put(jnp.float32(2), x) for x in jax.local_devices()
  )
  found = fingerprints.of_step(
    {'loss': first, 'of_last': last, 'rate': 0.1}, {}
  )
  assert found == fingerprints.of_step({'loss': first}, {})


def test_steps_keep_their_numbers_in_a_file_that_lost_some(shared, tmp_path):
  part = run(tmp_path / 'part', {'training_steps': 6})
  file = part / 'train/fingerprints.bin'
  file.write_bytes(file.read_bytes()[:-32])  # With the losses.
  run(part, {'on_config_change': 'continue'})
  want = prints(shared)
  assert prints(part) == {s: x for s, x in want.items() if s not in (5, 6)}


# Replays.


def test_a_fork_is_replayed_from_where_it_began(tmp_path, capsys):
  source = run(tmp_path / 'source', {'training_steps': 4, 'random_seed': 7})
  fork = run(tmp_path / 'fork', {'restore_from': str(source)})
  run(source, {'random_seed': 7, 'on_config_change': 'continue'})
  more = {'training_steps': 13, 'on_config_change': 'continue'}
  run(fork, more | {'restore_from': str(source)})
  assert cli.main(['replay', str(fork), '6']) == 0
  assert 'from step 4 to' in capsys.readouterr().out
  with pytest.raises(errors.UsageError, match='began at step 4'):
    replay.open_replay(fork, 4).__enter__()


# What is logged behind the steps that are asked for does not count.
@pytest.mark.parametrize(
  ('step', 'more', 'num'), [(6, 4, 5), (3, 0, 1), (11, 10**9, 2)]
)
def test_a_replay_is_equal_and_writes_nothing(shared, capsys, step, more, num):
  before = {p: p.stat().st_mtime_ns for p in shared.rglob('*')}
  argv = ['replay', str(shared), str(step), f'--steps={more}']
  assert cli.main(argv) == 0
  out = capsys.readouterr().out
  assert f'All {3 * num} logged values are equal' in out
  assert {p: p.stat().st_mtime_ns for p in shared.rglob('*')} == before


def test_steps_that_a_run_lacks_are_refused(shared, capsys, monkeypatch):
  monkeypatch.setattr(replay, 'open_replay', None)
  for args, said in (
    ('replay 3 --steps=-1', '--steps is -1'),
    ('replay 0', 'is 0'),
    ('replay 12 --steps=1 --save=new', 'is 13'),
    ('explain 13', 'is 13'),
  ):
    command, *more = args.split()
    assert cli.main([command, str(shared), *more]) == 2
    assert said in capsys.readouterr().err


def test_a_replay_of_damaged_files(shared, tmp_path, capfd):
  other = shutil.copytree(shared, tmp_path / 'other')
  for part, begin in (
    ('checkpoints/data/8-*/*params.w/c*', 'step 4'),
    ('checkpoints/latest/4.json', 'the seed'),
  ):
    (damaged,) = other.glob(part)
    damaged.write_bytes(b'x')
    assert cli.main(['replay', str(other), '9', '--steps=3']) == 0
    said = capfd.readouterr()
    assert 'Skipped' in said.err
    assert str(other) in said.err
    assert f'Replaying {other} from {begin}' in said.out
  raw = bytearray((other / 'train/fingerprints.bin').read_bytes())
  raw[16 * 5 + 4] ^= 1  # A fingerprint and a loss for each step.
  (other / 'train/fingerprints.bin').write_bytes(raw)
  assert cli.main(['replay', str(other), '6', '--steps=1']) == 1
  assert 'step 6: train/fingerprint' in capfd.readouterr().out


def test_a_replay_saves_the_checkpoint_of_its_step(shared, tmp_path):
  place = str(tmp_path / 'saved')
  argv = ['replay', str(shared), '6', '--steps=2', '--save', place]
  assert cli.main(argv) == 0
  want = jaxline.load_weights(shared, step=8)
  got = jaxline.load_weights(place, step=8)
  assert all(np.array_equal(got[key], want[key]) for key in want)


def test_a_replay_names_the_first_operation_that_is_not_finite(
  tmp_path, capsys, monkeypatch
):
  # A clone may have the name of the library, and lie beside other libraries.
  file = tmp_path / 'lib/python3/jaxline/model_of_clone.py'
  file.parent.mkdir(parents=True)
  shutil.copyfile(travels.__file__, file)
  monkeypatch.syspath_prepend(file.parent)
  fields = {'on_nonfinite': 'warn', 'training_steps': 2}
  fields['experiment_class'] = 'model_of_clone:Travels'
  directory = run(tmp_path / 'run', fields, log_of_0=True)
  assert cli.main(['replay', str(directory), '1', '--nan']) == 0
  out = capsys.readouterr().out
  assert 'log' in out
  assert f'{file}:' in out


# Explanations.


def test_an_explanation_names_the_poisoned_record(tmp_path, capsys):
  directory = run(tmp_path / 'run', {'training_steps': 32}, poisoned=33)
  curve = {r['step']: r['loss'] for r in remains.curve(directory, 'train')}
  spikes = explain.spikes(curve)
  step = max(spikes, key=spikes.get)
  with replay.open_replay(directory, step) as found:
    rows = explain.explain(found, step, with_grads=True)
    # The loss of the step is the mean of the rows'.
    assert np.mean([r.loss for r in rows]) == pytest.approx(curve[step], 1e-5)
  assert rows[0].where == 'record 33'
  assert rows[0].loss > 1000 * rows[1].loss
  assert rows[0].grad_norm > rows[1].grad_norm
  # Without a step, the worst spike is explained, although its step is not
  # logged: the loss of each is recorded.
  log = directory / 'train/metrics.jsonl'
  logged = log.read_text().splitlines(keepends=True)
  log.write_text(''.join(x for x in logged if json.loads(x)['step'] % 8 == 1))
  assert step % 8 != 1
  assert cli.main(['explain', str(directory)]) == 0
  assert f'--config.skip_batches={step}' in capsys.readouterr().out


OFF = '--config.compilation_cache=off'
RULES = r"--config.restore_rules=(('state/params/(.*)', r'state/params/\1'),)"


# How the run started, the step, the step that the new run starts from, and the
# batch of the step.
@pytest.mark.parametrize(
  ('start', 'step', 'begin', 'batch'),
  [
    (['--config.restore_from=SHARED:4'], 6, 4, 6),
    (['--config.restore_from=SHARED:4', RULES], 3, 0, 3),
    (['--config.skip_batches=2-3', '--config.writers=("jsonl",)'], 6, 4, 8),
  ],
)
def test_the_command_of_an_explanation_works(
  shared, tmp_path, capsys, start, step, begin, batch
):
  place = f'{tmp_path}/a run'
  argv = [f'--config={shared}', f'--config.checkpoint_dir={place}']
  toys.main(*argv, OFF, *(x.replace('SHARED', str(shared)) for x in start))
  assert cli.main(['explain', place, str(step)]) == 0
  command = capsys.readouterr().out.splitlines()[-1].partition(': ')[2]
  python, program, *argv = shlex.split(command)
  assert [python, program] == ['python', 'experiment.py']
  toys.main(*argv, OFF)
  (new,) = tmp_path.glob('a run_without_*')
  before, after = prints(pathlib.Path(place)), prints(new)
  assert list(after) == list(range(begin + 1, 13))
  same = [s for s in after if after[s] == before[s]]
  assert same == list(range(begin + 1, step))
  skipped = base_config.read_record(new)['skip_batches']
  assert skipped.split(',')[-1] == str(batch)


def test_spikes_are_found_by_the_rule():
  rng = np.random.default_rng(0)
  curve = {i: 2 - i / 100 + 0.01 * rng.normal() for i in range(1, 100)}
  assert not explain.spikes(curve)
  curve |= {40: 2.5, 70: float('nan'), 71: float('inf')}
  assert list(explain.spikes(curve)) == [40, 70, 71]
  assert list(explain.spikes(dict.fromkeys(range(9), 0.0) | {9: 1.0})) == [9]


def test_a_run_that_skips_equals_one_whose_data_lacks_the_records(tmp_path):
  rows = travels.ROWS
  skips = run(tmp_path / 'skips', {'skip_batches': '3-4,7'}, shuffled=False)
  missing = [*range(2 * rows, 4 * rows), *range(6 * rows, 7 * rows)]
  lacks = run(tmp_path / 'lacks', missing=missing, shuffled=False)
  assert prints(skips) == prints(lacks)
  # Also if it is resumed, behind the first and before the second.
  part = tmp_path / 'part'
  skipped = {'skip_batches': '3-4,7', 'training_steps': 4}
  run(part, skipped, shuffled=False)
  skipped |= {'training_steps': 12, 'on_config_change': 'continue'}
  run(part, skipped, shuffled=False)
  assert prints(part) == prints(lacks)
  # The numbers go on in a run that begins from it and skips none.
  fork = run(tmp_path / 'fork', {'restore_from': f'{part}:8'}, shuffled=False)
  with replay.open_replay(fork, 13) as found:
    assert found.experiment.train_feed.next_number == 16


def test_a_comparison_shows_revisions_that_differ(shared, tmp_path, capsys):
  other = shutil.copytree(shared, tmp_path / 'other')
  file = other / 'checkpoints/latest/12.json'
  record = json.loads(file.read_text())
  del record['crc']
  # An option of git that writes.
  revision = f'--output={tmp_path}/written'
  record['code'] |= {'revision': revision, 'files': 'ab'}
  name = 'tests/experiments/travels.py'
  sources.write(
    store.at(other / 'checkpoints'), 'ab', {name: b'faster\x1b[2J\n'}
  )
  file.write_text(json.dumps(record | {'crc': notes.crc_of(record)}))
  for command, said in (
    ('compare', revision),
    ('bisect', f'{other}: {name}: faster\\x1b[2J\n'),
  ):
    assert cli.main([command, str(shared), str(other)]) == 0
    assert said in capsys.readouterr().out
    assert cli.main([command, str(shared), str(shared)]) == 0
    assert said not in capsys.readouterr().out
  assert not (tmp_path / 'written').exists()


@pytest.mark.parametrize('has_prints', [True, False])
def test_a_bisection_finds_step_and_array(shared, tmp_path, capsys, has_prints):
  other = run(tmp_path / 'other', perturbed=6)
  one = shared
  if not has_prints:  # Nor is each step logged.
    one = shutil.copytree(shared, tmp_path / 'one')
    for directory in (one, other):
      (directory / 'train/fingerprints.bin').unlink()
      (directory / 'train/metrics.jsonl').write_text('')
  assert bisect.bisect(str(one), str(other))
  out = capsys.readouterr().out
  assert 'experiment_kwargs.config.perturbed: -1 and 6' in out
  assert 'diverge in step 6, in the loss' in out


class Faulty(travels.Travels):
  """Does something else in the step `at`, where `where` says."""

  def init_fn(self, rng):
    params, model_state = super().init_fn(rng)
    return params, model_state | {'sum': jnp.float32(0)}

  def is_at(self, step, where):
    at = self.config.get('at') if self.config.get('where') == where else -1
    return step + 1 == at

  def loss_fn(self, params, model_state, *args):
    *found, new = super().loss_fn(params, model_state, *args)
    return *found, model_state | new

  def after_update(self, before, after):  # No scalar depends on the sum.
    more = jnp.where(self.is_at(before.step, 'sum'), 1.0, 0.5)
    return after.model_state | {'sum': before.model_state['sum'] + more}

  def step(self, *, global_step, **kwargs):
    scalars = super().step(global_step=global_step, **kwargs)
    more = 0.25 * self.is_at(global_step, 'after')
    params = self.state.params | {'w': self.state.params['w'] + more}
    self._state = dataclasses.replace(self.state, params=params)
    return scalars | {'own': 1.0 * self.is_at(global_step, 'own')}


@pytest.fixture(scope='module')
def faultless(tmp_path_factory):
  """A run of `Faulty` without a fault; not to be changed."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(travels, 'Travels', Faulty)
    return run(tmp_path_factory.mktemp('faultless') / 'one')


@pytest.mark.parametrize(
  ('where', 'said'),
  [
    ('sum', ['step 7, in the state after']),
    ('after', ['The state differs', 'state/params/w: largest']),
    ('own', ['So are the states', 'look at `step`']),
  ],
)
def test_a_bisection_finds_what_the_logs_do_not_show(
  where, said, faultless, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(travels, 'Travels', Faulty)
  other = run(tmp_path / 'other', at=7, where=where)
  assert bisect.bisect(str(faultless), str(other))
  out = capsys.readouterr().out
  assert 'First replayed step that differs: 7' in out
  assert all(text in out for text in said)


def test_a_bisection_finds_other_data(shared, tmp_path, capsys):
  other = run(tmp_path / 'other', poisoned=33)
  assert cli.main(['bisect', str(shared), str(other)]) == 1
  assert 'in the batch:\n  y: largest difference 100' in capsys.readouterr().out


def test_a_flipped_bit_ends_the_run_before_it_is_saved(tmp_path):
  fields = {'recompute_interval': 2, 'save_checkpoint_interval': 1}
  assert run(tmp_path / 'fine', fields)
  with pytest.raises(recompute.RecomputeError, match='model_state/step on'):
    run(tmp_path / 'flips', fields, flips=True)
  saved = (tmp_path / 'flips').glob('checkpoints/latest/*')
  assert {p.stem for p in saved} == {'1'}
