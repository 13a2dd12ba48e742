"""Training and evaluation on one directory, against a dictionary."""

from concurrent import futures
import itertools
import math
import os
import pathlib
import shutil
import tempfile
import threading
from typing import Any

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxline import experiment
from jaxline.checkpoint import durable
from jaxline.checkpoint import manifests as manifests_lib
from jaxline.run_directory import store
from tests import checkpoints
from tests import remains

KEPT, EVERY = 2, 4  # The newest; and for ever, as `steps_to_delete` says.


class Experiment(experiment.FullExperiment):
  """One weight."""

  step = evaluate = None
  value = -1.0
  EVALUATION_IS_PURE = True  # Then `best` names the data of `latest`.

  def __init__(self) -> None:
    pass

  def snapshot_state(self) -> dict[str, Any]:
    return {'w': np.float32([self.value] * 3)}

  def restore_from_snapshot(self, snapshot: Any) -> None:
    (self.value,) = {float(x) for x in snapshot['w']}


def truncate(path: pathlib.Path) -> None:
  os.truncate(path, path.stat().st_size // 2)


def opened(
  run_dir: pathlib.Path, mode: str, kept: int = KEPT, every: Any = EVERY
) -> Any:
  """Returns a checkpointer of a new process, with its live state."""
  config = checkpoints.make_config(
    run_dir,
    max_checkpoints_to_keep=kept,
    max_best_checkpoints_to_keep=1,
    keep_checkpoint_every_steps=every,
  )
  made = durable.DurableCheckpointer(config, mode)
  state = made.get_experiment_state('latest')
  state.global_step, state.experiment_module = 0, Experiment()
  return made


class Machine(stateful.RuleBasedStateMachine):
  """What a run's directory should hold.

  Attributes:
    latest: step -> value, of the checkpoints that should be there.
    damaged: those of them that are damaged.
    protected: step -> data of a manifest that was damaged.
    left: data of such a manifest that retention has removed since.
    best: step and value of the best, None without one.
    evaluated: the checkpoints that are evaluated, as (step, value).
    done: the steps that this evaluation knows to be evaluated; they may have
      been made anew since.
  """

  def __init__(self) -> None:
    super().__init__()
    self.run_dir = pathlib.Path(
      tempfile.mkdtemp(dir=os.environ.get('PYTEST_DEBUG_TEMPROOT'))
    )
    self.latest: dict[int, float] = {}
    self.damaged: set[int] = set()
    self.protected: dict[int, str] = {}
    self.left: set[str] = set()
    self.best: tuple[int, float] | None = None
    self.is_best_damaged = False
    self.evaluated: list[tuple[int, float]] = []
    self.count = 0.0
    self.training: Any = None
    self.evaluation: Any = None
    self.restart_training()
    self.restart_evaluation()

  def teardown(self) -> None:
    self.training.close()
    self.evaluation.close()
    shutil.rmtree(self.run_dir)

  def _whole(self) -> list[int]:
    return sorted(self.latest.keys() - self.damaged)

  # Training.

  @stateful.rule(leaves=st.booleans())
  def restart_training(self, leaves: bool = False) -> None:
    """Goes on from the newest whole checkpoint."""
    if self.training is not None:
      self.training.close()
    if leaves:  # As a save that was killed.
      place = store.at(self.run_dir / 'checkpoints')
      data = f'data/{manifests_lib.new_data(99)}'
      place.write_part(f'{data}/0000.w/c.0', memoryview(b'12'))
      for name in (
        'latest/.99.json.7.partial',
        'evaluated/.eval.json.7.partial',
      ):
        place._path(name).parent.mkdir(exist_ok=True)
        place._path(name).write_bytes(b'{')
    self.training = opened(self.run_dir, 'train')
    state = self.training.get_experiment_state('latest')
    is_there = self.training.can_be_restored('latest')
    assert is_there == bool(self.latest)
    if is_there and not self._whole():
      with pytest.raises(store.DamagedError):
        self.training.restore('latest')
      # The user removes what is damaged, and begins anew.
      for step in self.latest:
        (self.run_dir / f'checkpoints/latest/{step}.json').unlink()
      self.latest, self.damaged = {}, set()
      return self.restart_training()
    if is_there:
      self.training.restore('latest')
      step = self._whole()[-1]
      restored = state.global_step, state.experiment_module.value
      assert restored == (step, self.latest[step])
      for newer in [s for s in self.latest if s > step]:
        del self.latest[newer]
        self.damaged.discard(newer)
    begin = state.global_step
    self.training.begin(begin)
    self.evaluated = [x for x in self.evaluated if x[0] <= begin]
    self.training.wait_for_checkpointing_to_finish()
    self.left.clear()

  @stateful.rule(steps=st.integers(1, 3))
  def save(self, steps: int) -> None:
    state = self.training.get_experiment_state('latest')
    state.global_step += steps
    self.count += 1.0  # No two values are the same.
    state.experiment_module.value = self.count
    self.training.save('latest')
    self.training.wait_for_checkpointing_to_finish()
    self.latest[state.global_step] = self.count
    last, forever = 0, set()
    for step in sorted(self.latest):
      if step // EVERY > last // EVERY:
        last = step
        forever.add(step)
    for step in sorted(self.latest)[:-KEPT]:
      if step not in forever:
        del self.latest[step]
        if step in self.damaged:
          self.damaged.remove(step)
          self.left.add(self.protected.get(step, ''))

  @stateful.rule(
    data=st.data(),
    harm=st.sampled_from([checkpoints.flip, truncate, os.unlink]),
    is_part=st.booleans(),
    restarts=st.booleans(),
  )
  def damage(self, data: Any, harm: Any, is_part: bool, restarts: bool) -> None:
    if not (steps := self._whole()):
      return
    step = data.draw(st.sampled_from(steps[::-1]))
    if is_part:
      data = remains.record(self.run_dir, step)['data']
      folder = self.run_dir / 'checkpoints' / 'data' / data
      harm(max(folder.glob('w/c*')))
      self.protected.pop(step, None)
      if self.best and self.best[1] == self.latest[step]:
        self.is_best_damaged = True
    else:
      path = self.run_dir / f'checkpoints/latest/{step}.json'
      self.protected[step] = remains.record(self.run_dir, step)['data']
      (truncate if harm is os.unlink else harm)(path)
    self.damaged.add(step)
    if restarts:
      self.restart_training()

  # Evaluation.

  @stateful.rule()
  def restart_evaluation(self) -> None:
    if self.evaluation is not None:
      self.evaluation.close()
    self.evaluation = opened(self.run_dir, 'eval')
    self.restore_next = self.evaluation.follow('latest')
    self.done = {step for step, _ in self.evaluated}

  @stateful.rule(is_best=st.booleans(), is_pure=st.booleans())
  def evaluate(self, is_best: bool, is_pure: bool = True) -> None:
    expected = [
      (s, self.latest[s])
      for s in self._whole()
      if (s, self.latest[s]) not in self.evaluated
    ]
    assert self.restore_next(self.done) == bool(expected)
    if not expected:
      return
    state = self.evaluation.get_experiment_state('latest')
    step, value = state.global_step, state.experiment_module.value
    state.experiment_module.EVALUATION_IS_PURE = is_pure
    assert (step, value) == expected[0]
    if is_best:
      best = self.evaluation.get_experiment_state('best')
      best.update(state, best_eval_metric_value=value)
      self.evaluation.save('best')
      self.best, self.is_best_damaged = (step, value), False
    self.evaluation.wait_for_checkpointing_to_finish()
    checkpoints.note(self.evaluation, step, math.pi, {})
    self.evaluated.append(expected[0])
    self.done.add(step)

  @stateful.invariant()
  def holds(self) -> None:
    """All that should be there is there, and whole; nothing else is."""
    place = store.at(self.run_dir).below('checkpoints')
    assert remains.steps(self.run_dir) == sorted(self.latest)
    for step in self._whole():
      assert remains.bits(self.run_dir, step)['step'] == step
    named = {remains.record(self.run_dir, s)['data'] for s in self._whole()}
    kept = remains.steps(self.run_dir, 'best')
    assert kept == ([self.best[0]] if self.best else [])
    if self.best and not self.is_best_damaged:
      assert remains.newest(self.run_dir, 'best') == self.best[0]
    named |= {remains.record(self.run_dir, s, 'best')['data'] for s in kept}
    named |= {x for s, x in self.protected.items() if s in self.damaged}
    assert named <= set(place.names('data'))
    noted = [step for step, *_ in remains.evaluated(self.run_dir)]
    assert noted == [step for step, _ in self.evaluated]
    # Nothing is collected while a manifest cannot be read, or none is there.
    if self.latest and not self.damaged:
      named |= self.left | self.evaluation._saver._marked
      assert set(place.names('data')) <= named


Machine.TestCase.settings = hypothesis.settings(
  max_examples=25, stateful_step_count=25, deadline=None, derandomize=True,
)  # fmt: skip
TestModel = Machine.TestCase


# An evaluation that stops between any two operations of the store.

NEVER = 1 << 30


def evaluate_beside(
  run_dir: pathlib.Path, stop_at: int, pause_at: int = NEVER
) -> tuple[int, int]:
  """Evaluates; at one of its operations a training saves beside it.

  Args:
    run_dir: a new directory.
    stop_at: the number of the evaluation's operation.
    pause_at: that of the training's operation before which it waits until a
      checkpoint is evaluated.

  Returns:
    How many operations of each there were.
  """
  counted, counts, best = '', {'evaluation': 0, 'training': 0}, [None]
  paused, resumed = threading.Event(), threading.Event()
  saving: list[futures.Future[None]] = []
  training: Any = None

  def save() -> None:
    nonlocal training
    training = training or opened(run_dir, 'train', kept=1, every=None)
    state = training.get_experiment_state('latest')
    state.global_step += 1
    state.experiment_module.value = float(state.global_step)
    training.save('latest')
    training.wait_for_checkpointing_to_finish()
    assert remains.newest(run_dir, 'best') in best[-2:]  # And it is whole.

  def before_operation() -> None:
    nonlocal counted
    if not (who := counted):
      return
    counts[who] += 1
    if who == 'evaluation' and counts[who] == stop_at:
      counted = 'training'
      saving.append(thread.submit(save))
      saving[0].add_done_callback(lambda _: paused.set())
      assert paused.wait(60)
      counted = ''
    elif who == 'training' and counts[who] == pause_at:
      paused.set()
      assert resumed.wait(60)

  def hooked(method: str) -> Any:
    inner = getattr(store.Disk, method)

    def outer(*args: Any) -> Any:
      before_operation()
      return inner(*args)

    return outer

  # Live states belong to threads.
  with (
    futures.ThreadPoolExecutor(1) as thread,
    pytest.MonkeyPatch.context() as p,
  ):
    p.setattr('absl.logging.error', pytest.fail)  # Nothing is damaged.
    for method in store.Store.__abstractmethods__:
      p.setattr(store.Disk, method, hooked(method))
    thread.submit(save).result()
    evaluation = opened(run_dir, 'eval')
    restore_next = evaluation.follow('latest')
    counted = 'evaluation'
    for _ in range(2):
      assert restore_next(())
      state = evaluation.get_experiment_state('latest')
      assert state.experiment_module.value == state.global_step
      best.append(state.global_step)
      evaluation.get_experiment_state('best').update(state)
      evaluation.save('best')
      evaluation.wait_for_checkpointing_to_finish()
      checkpoints.note(evaluation, state.global_step, 1.0, {})
      counted = ''
      if saving and not saving[0].done():
        evaluation.close()  # It drops its mark.
        evaluation = opened(run_dir, 'eval')
        restore_next = evaluation.follow('latest')
      resumed.set()
      thread.submit(save).result()
      counted = '' if saving else 'evaluation'
    evaluation.close()
    counted = ''
    for future in saving:
      future.result()
    assert remains.newest(run_dir, 'best') == best[-1]
    thread.submit(save).result()
    training.close()
  place = store.at(run_dir).below('checkpoints')
  named = {remains.record(run_dir, best[-1], 'best')['data']}
  named |= {remains.record(run_dir, s)['data'] for s in remains.steps(run_dir)}
  assert set(place.names('data')) == named
  assert place.names('readers') == []
  return counts['evaluation'], counts['training']


# A sample of the operations: all of them take minutes.
@pytest.mark.parametrize(
  ('pauses', 'every'),
  [
    (False, 5),
    pytest.param(False, 1, marks=pytest.mark.slow),
    pytest.param(True, 7, marks=pytest.mark.process),
    pytest.param(True, 1, marks=pytest.mark.slow),
  ],
)
def test_training_beside_any_operation_of_an_evaluation(
  pauses: bool, every: int, tmp_path: pathlib.Path
) -> None:
  """Training saves meanwhile; or, if it pauses, begins to and ends later."""
  count, _ = evaluate_beside(tmp_path / 'none', 0)
  _, saves = evaluate_beside(tmp_path / 'first', 1)
  assert count > 30
  assert saves > 10
  places = itertools.product(range(1, count + 1), [NEVER])
  if pauses:  # The evaluation stops before it has read.
    places = itertools.product(range(1, 13), range(1, saves + 1))
  for stop_at, pause_at in itertools.islice(places, 0, None, every):
    evaluate_beside(tmp_path / f'{stop_at}.{pause_at}', stop_at, pause_at)
