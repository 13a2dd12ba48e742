"""Tests that sweeps register their points and find the best one."""

import pytest

from examples.pax import automl
from examples.pax import config as config_lib
from examples.pax import experiment_registry
from examples.pax import main
from examples.pax.tasks.synthetic.params import sequences

TINY = {
  'NUM_LAYERS': 1,
  'MODEL_DIMS': 8,
  'HIDDEN_DIMS': 8,
  'NUM_HEADS': 1,
  'BATCH_SIZE': 4,
  'EVAL_EXAMPLES': 4,
  'MAX_STEPS': 2,
  'EVAL_INTERVAL_STEPS': 2,
}
AXES = [('LEARNING_RATE', (1e-3, 0.0)), ('NUM_LAYERS', (1, 2))]


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
  known = dict(experiment_registry.get_all())
  monkeypatch.setattr(experiment_registry, '_registered', known)
  sweep = automl.parameter_sweep(AXES)

  @sweep
  @experiment_registry.register
  class Swept(sequences.ReverseEncoderDecoder.with_constants(TINY)):
    """A small experiment to sweep."""

    @classmethod
    def reduced(cls):
      return cls.with_constants({'LEARNING_RATE': 9.0, 'MODEL_DIMS': 4})


def test_each_combination_is_an_experiment():
  constants = 'experiment_kwargs.config.constants'
  assert automl.flags(experiment_registry.get('Swept')) == [
    f'--sweep.{constants}.LEARNING_RATE=0.001,0.0',
    f'--sweep.{constants}.NUM_LAYERS=1,2',
  ]
  for number, (rate, layers) in enumerate(
    [(1e-3, 1), (1e-3, 2), (0.0, 1), (0.0, 2)]
  ):
    found = experiment_registry.get(f'Swept.{number}')
    assert (rate, layers) == (found.LEARNING_RATE, found.NUM_LAYERS)
    constants = config_lib.get_config(
      f'Swept.{number}:reduced'
    ).experiment_kwargs.config.constants
    # The values of the sweep override the reduced version's.
    assert (rate, 4) == (constants.LEARNING_RATE, constants.MODEL_DIMS)
  with pytest.raises(experiment_registry.UnknownError):
    experiment_registry.get('Swept.4')


def test_what_cannot_be_swept_is_refused(capsys):
  with pytest.raises(ValueError, match=r"'LEARNIN_RATE'.*mean 'LEARNING_RATE'"):
    automl.parameter_sweep([('LEARNIN_RATE', (1,))])(
      sequences.ReverseEncoderDecoder
    )
  with pytest.raises(SystemExit, match='2'):
    main.main(['--exp=CopyEncoderDecoder', '--mode=sweep', '--job_log_dir=x'])
  assert '@automl.parameter_sweep' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)  # Two runs take a while.
def test_a_sweep_trains_its_points_and_names_the_best(tmp_path, capsys):
  flags = [
    *('--exp=Swept', '--mode=sweep', f'--job_log_dir={tmp_path}'),
    '--config.best_model_eval_metric=log_pplx',
    '--config.best_model_eval_metric_higher_is_better=False',
    '--config.console=plain',
  ]
  for index in ('--index=2', '--index=0'):
    with pytest.raises(SystemExit, match='0'):
      main.main([*flags, index])
  out = capsys.readouterr().out
  assert len(list(tmp_path.glob('*/checkpoints'))) == 2
  best = [x for x in out.splitlines() if x.startswith('Best ')][-1]
  assert 'LEARNING_RATE=0.001,' in best
