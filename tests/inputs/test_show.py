"""Looking at data: known answers, inputs that are wrong, the command."""

import dataclasses
import time

import numpy as np
import pytest

from jaxline import base_config
from jaxline import sharded
from jaxline.inputs import __main__ as program
from jaxline.inputs import base
from jaxline.inputs import show
from tests import processes
from tests import sources

# ml_collections loads the config file in a way that Python will drop.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module')


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(sources.Records):
  """Record r of N is the tokens r, r + 1, r + 2, which letters stand for."""

  batch_size: int = 2
  is_training: bool = True

  def read(self, records, epochs):
    ids = (records[:, None] + np.arange(3)).astype(np.int32)
    return {'ids': ids, 'weights': np.ones(ids.shape, np.float32)}

  def describe_record(self, record, epoch):
    return f'line {record} in epoch {epoch}'

  def ids_to_strings(self, ids, lengths, key=None):
    rows = zip(ids, lengths, strict=True)
    return [''.join(map(chr, ord('a') + row[:size])) for row, size in rows]


@dataclasses.dataclass(kw_only=True, eq=False)
class Counting(sources.Counting):
  """Numbers of each host's own, or the same on all."""

  batch_size: int = 2
  is_training: bool = True
  end: int = 10**6
  own: bool = True
  skip: int = 0  # By how many batches a position is wrong.

  def get_next(self):
    x = super().get_next().x + 10**6 * self.infeed_host_index * self.own
    return base.Batch(x=x + 1000 * np.arange(self.batch_size))

  def position(self):
    return super().position() + self.skip


def padded(shard):
  # The first row is on both hosts, in different company.
  weights = np.float32([1, shard.index, 0])
  yield {'x': np.array([1, 2, 1]), 'weights': weights}


def uneven(shard):
  return Counting(shard=shard, end=2 + 3 * shard.index, **EPOCH)


def weightless(self, records, epochs):
  batch = Numbers.read(self, records, epochs)
  return batch | {'weights': batch['weights'] * (records > 0)[:, None]}


def make(cls, **fields):
  """Returns a function of a shard; of a class with other methods, if given."""
  methods = {key: fields.pop(key) for key in [*fields] if callable(fields[key])}
  cls = type(cls.__name__, (cls,), methods)
  return lambda shard: cls(shard=shard, **fields)


EPOCH = {'is_training': False, 'reset_for_eval': True}

# How a finding that is not ok is marked.
MARKS = {show.OK: '', show.LOOK: '?', show.WRONG: '!'}


def case(make_input, verdicts, *words, **options):
  return make_input, verdicts, words, options


@pytest.mark.parametrize(
  ('make_input', 'verdicts', 'words', 'options'),
  [
    # Over two epochs and more, rows come again; records of an epoch do not.
    case(make(Numbers), 'rows resume position', 'no record of 20 rows of 2 '),
    case(
      make(Numbers, read=weightless, size=3, batch_size=1, **EPOCH),
      'rows epoch resume position',
      *(' 2 of 4 rows are real, ', ' 3 of 3 records '),
    ),
    # Hosts: a record, or else a row, that is read twice.
    case(
      lambda shard: Numbers(num_infeed_hosts=1),
      'rows! resume position!',
      *(' 30 rows of 3 hosts, 10 ', 'host 0, 1, 2: line '),
      num_hosts=3,
    ),
    case(
      make(Numbers, order=lambda self, at: at // 2, **EPOCH),
      'rows! epoch! resume position',
      *('5 are read', 'host 0: line 0 in epoch 0', ' 5 of 10 records '),
    ),
    case(make(Counting, own=False), 'rows! resume', ' 10 ', 'host 0, 1'),
    case(
      padded,
      'rows? epoch resume',
      *(' 3 rows of 2 hosts, 1 ', ' 3 of 6 rows are real, total weight 3'),
      is_training=False,
    ),
    case(sources.Counted, 'hosts? rows resume', '`shard`'),
    # Epochs: other numbers of batches, the limit, no data.
    case(uneven, 'rows epoch! resume', ' 2, 2 or more ', max_batches=2),
    case(make(Counting, end=0), 'rows epoch! resume?'),
    # Positions: wrong, not saved; of each host's own, or of its number.
    case(make(Counting, skip=1), 'rows resume!', 'after 3 batches'),
    case(make(Counting, input_checkpointing_enabled=False), 'rows resume?'),
    case(
      make(Numbers, position=lambda self: self._at - self.infeed_host_index),
      'rows resume! position!',
      'ANY_NUMBER_OF_HOSTS',
    ),
    case(
      make(Numbers, identity=lambda self: {'hosts': self.num_infeed_hosts}),
      'rows resume position!',
      'hosts is 2',
    ),
  ],
)
def test_verdicts(make_input, verdicts, words, options):
  report = show.check(make_input, **{'num_batches': 5, 'seconds': 0} | options)
  found = [f.name + MARKS[f.verdict] for f in report.findings if f.verdict]
  assert ' '.join(found) == verdicts, report
  assert report.ok == ('!' not in verdicts)
  assert max(map(len, str(report).splitlines())) <= show.WIDTH
  text = ' '.join(str(report).split())
  assert [word for word in words if word not in text] == []


def test_a_digest_never_changes_and_the_speed_is_of_later_batches(monkeypatch):
  # Written down: it must be the same tomorrow, and elsewhere.
  batch = {'b': np.float32([[1, 2]]), 'a': np.int32([7])}
  assert show.digest([batch]) == 'b7699075867a52cc'
  assert show.digest([dict(reversed(batch.items()))]) == 'b7699075867a52cc'
  # Equal strings at other addresses are the same.
  strings = [np.array([x * 2, 'c'], object) for x in ('a', 'a', 'b')]
  assert len({show.digest([{'x': value}]) for value in strings}) == 2
  monkeypatch.setattr(time, 'perf_counter', iter(range(100)).__next__)
  report = show.check(make(Numbers), num_hosts=4, num_batches=5)
  source = Numbers(shard=base.Shard(3, 4))
  assert show.digest(next(source) for _ in range(5)) == report.digests[3]
  assert report.findings[-1].text == (
    '6 tokens/s, 2 rows/s, 1 batches/s; the first batch after 1.00 s'
  )


class Experiment(sharded.ShardedExperiment):
  """Has inputs, but no weights."""

  def __init__(self, mode, init_rng, batch_size, fault, mesh, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config, mesh=mesh)
    self.batch_size, self.fault = batch_size, fault

  def init_fn(self, rng):
    raise AssertionError('The weights were made.')

  make_optimizer = loss_fn = init_fn

  def train_input(self, shard):
    return Numbers(
      name='numbers',
      batch_size=base.per_host(self.batch_size, shard),
      shuffle=False,
      size=20,
      shard=base.Shard(0, 1) if self.fault == 'hosts' else shard,
    )

  def eval_input(self, shard):
    assert self.mode == 'eval'
    batches = [{'x': np.arange(3) + 3 * shard.index}]
    if self.fault == 'sets':
      return {'short': batches, 'long': 2 * batches}
    return batches


def get_config():
  """Makes this file a config file too."""
  config = base_config.get_base_config()
  config.experiment_class = 'tests.inputs.test_show:Experiment'
  config.experiment_kwargs = {'batch_size': 8, 'fault': '', 'mesh': {'data': 2}}
  return config


FAULT = '--config.experiment_kwargs.fault='


@pytest.mark.parametrize(
  ('args', 'status', 'words'),
  [
    ('--host=1/4 -n1', 0, "row 0 of ids: 'cde'"),
    ('--split=eval --hosts=3', 0, "'a list', for host 0 of 3"),
    (f'--split=eval {FAULT}sets --set=long', 0, ' 2 batches on each host'),
    (f'{FAULT}hosts', 1, 'WRONG  rows '),
    ('--hots=3', 2, 'hots'),
    ('--config.interval_type=days', 2, 'interval_type'),
    ('--config.experiment_class=builtins:dict', 2, 'train_input'),
    ('--hosts=3', 2, 'global batch of 8 rows'),
    ('--host=0/2 --hosts=4', 2, '--hosts'),
    ('--split=eval --set=long', 2, '--set'),
    (f'--split=eval {FAULT}sets --set=longer', 2, "'long'"),
  ],
)
def test_status(args, status, words, capsys):
  argv = 'show', f'--config={__file__}', '-n0', '--seconds=0', *args.split()
  try:
    found = program.main(argv)
  except SystemExit as e:
    found = e.code  # How argparse leaves.
  out, err = capsys.readouterr()
  assert found == status, (out, err)
  assert words in (err if status == 2 else out)


def test_totals_of_text(tmp_path, capsys):
  folder, cache = tmp_path / 'text', tmp_path / 'cache'
  folder.mkdir()
  for i in range(4):
    (folder / f'{i}.txt').write_text('a' * 5)
  (folder / 'large.txt').write_text('b' * 974)  # 975 of 993 tokens.
  (folder / 'binary').write_bytes(bytes(99))
  (folder / 'gone').symlink_to('nowhere')
  values = {'files': folder, 'cache_dir': cache, 'tokenizer': 'bytes'}
  values |= {'model.vocab_size': 257, 'eval_fraction': 1e-9}
  args = [f'--config.experiment_kwargs.config.{k}={values[k]}' for k in values]
  config = f'--config={processes.ROOT}/configs/lm.py'
  for command in ['prepare'], ['show', '-n0', '--seconds=0']:
    assert program.main([*command, config, *args]) == 0
    train = capsys.readouterr().out.split('\nTextInput')[0]
    assert ' 4 documents, 993 tokens of 989 bytes, ' in train
    assert 'large.txt (98.2%)' in train
    assert 'binary: left out' in train
    assert 'gone: a broken link' in train
    assert len([*cache.iterdir()]) == 1
