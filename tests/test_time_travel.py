"""Replays, explanations, bisections, skipped batches, fingerprints."""

import functools
import json
import os
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import jaxline
from jaxline import errors
from jaxline import experiment
from jaxline.checkpoint import contents
from jaxline.checkpoint import manager
from jaxline.metrics import fingerprints
from jaxline.runs import __main__ as cli
from jaxline.runs import bisect
from jaxline.runs import explain
from jaxline.runs import replay
from jaxline.supervision import recompute
from tests import checkpoints
from tests import remains
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


def losses(directory):
  records = map(
    json.loads, (directory / 'train/metrics.jsonl').read_text().splitlines()
  )
  return {r['step']: r['loss'] for r in records if 'loss' in r}


def prints(directory):
  return fingerprints.read((directory / 'train/fingerprints.bin').read_bytes())


# Fingerprints.


def test_a_fingerprint_depends_on_every_bit_and_not_on_the_sharding():
  mesh = jax.make_mesh((2,), ('a',))
  x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
  y = np.arange(8, dtype=np.int8)

  def of(x, y, *spec):
    sharding = jax.sharding.NamedSharding(mesh, P(*spec))
    return int(fingerprints.fingerprint([jax.device_put(x, sharding), y]))

  assert of(x, y) == of(x, y, 'a') == of(x, y, None, 'a')
  changed = [x.copy() for _ in range(64)]
  for i, other in enumerate(changed):
    other.view(np.uint32).flat[2 * i] ^= np.uint32(1) << (i % 32)
  others = [of(other, y) for other in changed]
  others += [of(x[::-1], y), of(x, y[::-1]), of(-x, y), of(x[:, ::-1], y)]
  assert len({of(x, y), *others}) == 1 + len(others)


def test_a_resumed_run_has_the_fingerprints_of_an_uninterrupted_one(
  shared, tmp_path
):
  assert list(prints(shared)) == list(range(1, 13))
  part = run(tmp_path / 'part', {'training_steps': 7})
  assert len(prints(part)) == 7
  # As if it had been killed behind step 7: the checkpoint is that of step 4.
  (part / 'checkpoints/latest/7.json').unlink()
  run(part, {'on_config_change': 'continue'})
  assert prints(part) == prints(shared)
  assert losses(part) == losses(shared)


def test_steps_keep_their_numbers_in_a_file_that_lost_some(shared, tmp_path):
  part = run(tmp_path / 'part', {'training_steps': 6})
  file = part / 'train/fingerprints.bin'
  file.write_bytes(file.read_bytes()[:-16])
  run(part, {'on_config_change': 'continue'})
  want = prints(shared)
  assert prints(part) == {s: x for s, x in want.items() if s not in (5, 6)}


class OfDevices(experiment.AbstractExperiment):
  """Per-device; its scalars lie on all devices, on one, or nowhere."""

  def __init__(self, mode, init_rng=None):
    super().__init__(mode, init_rng)

  def step(self, **unused):
    loss = jax.pmap(jnp.square)(jnp.ones(jax.local_device_count()))
    last = jax.device_put(jnp.float32(2), jax.local_devices()[-1])
    return {'loss': loss, 'last': last, 'rate': 0.1}

  def evaluate(self, **unused):
    return {}


def test_scalars_may_lie_on_different_devices(tmp_path):
  config = travels.get_config(tmp_path)
  config.experiment_kwargs = {}
  jaxline.fit(OfDevices, config, mode='train')
  assert len(prints(tmp_path)) == 12
  config.skip_batches = '3'
  with pytest.raises(errors.UsageError, match='skip_batches'):
    jaxline.fit(OfDevices, config, mode='train')
  with replay.opened(tmp_path, 11, OfDevices) as found:
    with pytest.raises(errors.UsageError, match='OfDevices'):
      explain.explain(found, 11)
    assert found.state.global_step == 8  # Refused before it was replayed.


# Replays.


def test_a_fork_is_replayed_from_where_it_began(shared, tmp_path, capsys):
  source = run(tmp_path / 'source', {'training_steps': 4, 'random_seed': 7})
  fork = run(tmp_path / 'fork', {'restore_from': str(source)})
  run(source, {'random_seed': 7, 'on_config_change': 'continue'})
  more = {'training_steps': 13, 'on_config_change': 'continue'}
  run(fork, more | {'restore_from': str(source)})
  assert cli.main(['replay', str(fork), '6']) == 0
  assert 'from step 4 to' in capsys.readouterr().out


@pytest.mark.parametrize(('step', 'more'), [(6, 4), (3, 0), (12, 0)])
def test_a_replay_is_equal_and_writes_nothing(shared, capsys, step, more):
  before = {p: p.stat().st_mtime_ns for p in shared.rglob('*')}
  argv = ['replay', str(shared), str(step), f'--steps={more}']
  assert cli.main(argv) == 0
  out = capsys.readouterr().out
  assert f'All {3 * (more + 1)} logged values are equal' in out
  assert {p: p.stat().st_mtime_ns for p in shared.rglob('*')} == before


def test_a_replay_that_differs_says_in_what(shared, tmp_path, capsys):
  other = shutil.copytree(shared, tmp_path / 'other')
  raw = bytearray((other / 'train/fingerprints.bin').read_bytes())
  raw[8 * 5 + 4] ^= 1
  (other / 'train/fingerprints.bin').write_bytes(raw)
  assert cli.main(['replay', str(other), '6', '--steps=1']) == 1
  assert 'step 6: train/fingerprint' in capsys.readouterr().out


def test_a_replay_saves_the_checkpoint_of_its_step(shared, tmp_path):
  place = str(tmp_path / 'saved')
  assert (
    cli.main(['replay', str(shared), '6', '--steps=2', '--save', place]) == 0
  )
  want = jaxline.load_weights(shared, step=8)
  got = jaxline.load_weights(place, step=8)
  assert all(np.array_equal(got[key], want[key]) for key in want)


def test_a_replay_names_the_first_operation_that_is_not_finite(
  tmp_path, capsys
):
  fields = {'on_nonfinite': 'warn', 'training_steps': 2}
  directory = run(tmp_path / 'run', fields, root=True)
  assert cli.main(['replay', str(directory), '1', '--nan']) == 0
  out = capsys.readouterr().out
  assert 'log' in out
  assert 'travels.py' in out


class Masked(travels.Travels):
  """Its loss has an infinity that is meant, as in a mask."""

  def loss_fn(self, params, model_state, batch, rng, is_training):
    mask = jnp.where(batch['x'] > 0, 0.0, -jnp.inf)
    loss, *rest = super().loss_fn(params, model_state, batch, rng, is_training)
    return loss + 0 * jnp.exp(mask).sum(), *rest


def test_a_replay_finds_nothing_in_a_finite_step(tmp_path):
  config = travels.get_config(tmp_path)
  jaxline.fit(Masked, config, mode='train')
  assert replay.find_nonfinite(tmp_path, 6, Masked) is None


# Explanations.


def test_an_explanation_names_the_poisoned_record(tmp_path, capsys):
  directory = run(tmp_path / 'run', {'training_steps': 32}, poisoned=33)
  curve = losses(directory)
  spikes = explain.spikes(curve)
  step = max(spikes, key=spikes.get)
  with replay.opened(directory, step) as found:
    rows = explain.explain(found, step, with_grads=True)
    # The loss of the step is the mean of the rows'.
    assert np.mean([r.loss for r in rows]) == pytest.approx(curve[step], 1e-5)
  assert rows[0].where == 'record 33'
  assert rows[0].loss > 1000 * rows[1].loss
  assert rows[0].grad_norm > rows[1].grad_norm
  # Without a step, the worst spike is explained.
  assert cli.main(['explain', str(directory)]) == 0
  assert f'--config.skip_batches={step}' in capsys.readouterr().out


class Fast(travels.Travels):
  def row_losses(self, params, model_state, batch, rng):
    return jnp.arange(travels.ROWS, dtype=jnp.float32)


def test_an_experiment_may_compute_the_losses_of_all_rows(shared):
  with replay.opened(shared, 6, Fast) as found:
    rows = explain.explain(found, 6)
  assert [(r.number, r.loss) for r in rows] == [(i, i) for i in (3, 2, 1, 0)]


def test_spikes_are_found_by_the_rule():
  rng = np.random.default_rng(0)
  curve = {i: 2 - i / 100 + 0.01 * rng.normal() for i in range(1, 100)}
  assert not explain.spikes(curve)
  curve |= {40: 2.5, 70: float('nan'), 71: float('inf')}
  assert list(explain.spikes(curve)) == [40, 70, 71]
  assert list(explain.spikes(dict.fromkeys(range(9), 0.0) | {9: 1.0})) == [9]


# Skipped batches.


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
  with replay.opened(fork, 13) as found:
    assert found.experiment.train_feed.next_number == 16


def test_a_fork_around_a_batch(shared, tmp_path):
  fork = run(
    tmp_path / 'fork', {'restore_from': f'{shared}:4', 'skip_batches': '6'}
  )
  before, after = prints(shared), prints(fork)
  assert after[5] == before[5]
  assert after[6] != before[6]
  with replay.opened(fork, 5) as found:
    assert found.state.global_step == 4


# Where runs part.


def test_another_evaluation_is_no_difference_in_training(
  shared, tmp_path, capsys
):
  runs = [shutil.copytree(shared, tmp_path / name) for name in 'ab']
  for loss, directory in enumerate(runs):
    (directory / 'eval').mkdir(exist_ok=True)
    record = json.dumps({'step': 4, 'kind': 'scalars', 'loss': loss})
    (directory / 'eval/metrics.jsonl').write_text(record + '\n')
  assert cli.main(['bisect', *map(str, runs)]) == 1
  out = capsys.readouterr().out
  assert 'evaluation that differs: 4, in eval/loss' in out
  assert 'No difference in training up to step 12' in out


@pytest.mark.parametrize('is_old', [False, True])
def test_a_comparison_shows_revisions_that_differ(
  is_old, shared, tmp_path, capsys
):
  other = shutil.copytree(shared, tmp_path / 'other')
  file = other / 'checkpoints/latest/12.json'
  record = json.loads(file.read_text())
  del record['crc']
  record['code'] |= {'revision': 'f' * 40, 'changed': 'ab'}
  if is_old:  # Then each manifest had the changes.
    record['code']['diff'] = '+ faster'
  else:
    (other / 'checkpoints/code').mkdir(exist_ok=True)
    (other / 'checkpoints/code/ab.diff').write_text('+ faster')
  file.write_text(json.dumps(record | {'crc': manager.crc_of(record)}))
  for runs, is_shown in (([shared, other], True), ([shared, shared], False)):
    assert cli.main(['compare', *map(str, runs)]) == 0
    assert ('ffffffffffff' in capsys.readouterr().out) == is_shown
    assert cli.main(['bisect', *map(str, runs)]) == 0
    assert (f'{other}: + faster' in capsys.readouterr().out) == is_shown


def test_changes_of_the_code_are_recorded_for_the_user_alone(
  tmp_path, monkeypatch, open_run
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'model.py').write_text('before\n')
  for command in (
    'init -q',
    'add .',
    '-c user.name=a -c user.email=a commit -qm a',
  ):
    subprocess.run(['git', *command.split()], check=True)
  (tmp_path / 'model.py').write_text('after\n')
  os_open, modes = os.open, {}

  def opened(path, flags, mode=0o777, **more):
    fd = os_open(path, flags, mode, **more)
    modes[str(path)] = os.fstat(fd).st_mode & 0o777
    return fd

  monkeypatch.setattr(os, 'open', opened)
  for first, text in ((1, 'after'), (3, 'again')):  # Two starts of two saves.
    (tmp_path / 'model.py').write_text(f'{text}\n')
    anew = functools.cache(contents.code.__wrapped__)
    monkeypatch.setattr(contents, 'code', anew)
    for name, is_on in (('run', True), ('off', False)):
      training = open_run(directory=tmp_path / name, record_git_diff=is_on)
      checkpoints.save(training, checkpoints.weights(), first, first + 1)
      training.close()
  written = {p for p in modes if '/code/' in p and p.endswith('.partial')}
  assert len(written) == 2  # Once for each content.
  assert {modes[p] for p in written} == {0o600}
  for step, text in enumerate(('after', 'after', 'again', 'again'), 1):
    code = remains.record(tmp_path / 'run', step)['code']
    file = tmp_path / f'run/checkpoints/code/{code["changed"]}.diff'
    assert f'-before\n+{text}\n' in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert code['revision']
    assert 'before' not in str(code)
  assert not (tmp_path / 'off/checkpoints/code').exists()


@pytest.mark.parametrize('has_prints', [True, False])
def test_a_bisection_finds_the_step_and_the_array(
  shared, tmp_path, capsys, has_prints
):
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
  assert 'part in step 6, in the loss' in out


class Averaging(travels.Travels):
  """Keeps a sum that no scalar depends on."""

  def init_fn(self, rng):
    params, model_state = super().init_fn(rng)
    return params, model_state | {'sum': jnp.float32(0)}

  def loss_fn(self, params, model_state, *args):
    loss, scalars, new = super().loss_fn(params, model_state, *args)
    return loss, scalars, model_state | new

  def after_update(self, before, after):
    more = jnp.where(before.step + 1 == self.config.get('at', -1), 1.0, 0.5)
    return after.model_state | {'sum': before.model_state['sum'] + more}


def test_a_bisection_finds_what_no_scalar_shows(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(travels, 'Travels', Averaging)
  fields = {'save_checkpoint_interval': 12}
  one, other = (run(tmp_path / f'{at}', fields, at=at) for at in (-1, 5))
  assert bisect.bisect(str(one), str(other))
  assert 'step 5, in the state after' in capsys.readouterr().out


def test_a_bisection_finds_other_data(shared, tmp_path, capsys):
  other = run(tmp_path / 'other', poisoned=33)
  assert cli.main(['bisect', str(shared), str(other)]) == 1
  assert 'in the batch:\n  y: largest difference 100' in capsys.readouterr().out


# Computing twice.


def test_a_flipped_bit_ends_the_run_before_it_is_saved(tmp_path):
  fields = {'recompute_interval': 2, 'save_checkpoint_interval': 1}
  assert run(tmp_path / 'fine', fields)
  with pytest.raises(recompute.RecomputeError, match='model_state/step on'):
    run(tmp_path / 'flips', fields, flips=True)
  saved = (tmp_path / 'flips').glob('checkpoints/latest/*')
  assert {p.stem for p in saved} == {'1'}


def test_each_copy_of_an_array_is_compared():
  mesh = jax.make_mesh((2,), ('a',))
  whole = jax.sharding.NamedSharding(mesh, P())
  values = iter([(0.0, 0.0), (0.0, 1e-30)])  # Of each device.

  def step(state):
    parts = [
      jax.device_put(np.float32(x), device)
      for x, device in zip(next(values), mesh.devices.flat, strict=True)
    ]
    w = jax.make_array_from_single_device_arrays((), whole, parts)
    return {'w': w, 'kept': state}

  state = jax.device_put(
    jnp.arange(4.0), jax.sharding.NamedSharding(mesh, P('a'))
  )
  with pytest.raises(recompute.RecomputeError, match=r'w on .*:1\.'):
    recompute.twice(step, state)
