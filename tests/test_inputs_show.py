"""Looking at data: known answers, inputs that are wrong, the command."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from jaxline.inputs import base
from jaxline.inputs import indexed
from jaxline.inputs import iterable
from jaxline.inputs import show

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(indexed.IndexedInput):
  """Record r of N is the tokens r, r + 1, r + 2, which letters stand for."""

  n: int = 10
  is_training: bool = True
  same: bool = False  # All records hold the same.

  def num_records(self):
    return self.n

  def read(self, records, epochs):
    records = 0 * records if self.same else records
    ids = (records[:, None] + np.arange(3)).astype(np.int32)
    return {'ids': ids, 'weights': np.ones(ids.shape, np.float32)}

  def describe_record(self, record, epoch):
    return f'line {record}'

  def ids_to_strings(self, ids, lengths, key=None):
    assert key is None
    return [
      ''.join(chr(ord('a') + i) for i in row[:length])
      for row, length in zip(ids, lengths, strict=True)
    ]


@dataclasses.dataclass(kw_only=True, eq=False)
class Counting(base.BaseInput):
  """Numbers 0, 1, 2 ... of each host's own, or the same on all."""

  own: bool = True
  end: int = 10**6  # How many numbers there are, of each host.
  lies: bool = False  # Its position is one too far.

  def __post_init__(self):
    super().__post_init__()
    self.count = 0

  def get_next(self):
    if self.count >= self.end:
      raise StopIteration
    x = np.arange(self.count, self.count + self.batch_size)
    self.count += self.batch_size
    return base.Batch(x=x + 10**6 * self.infeed_host_index * self.own)

  def position(self):
    return self.count + self.lies

  def set_position(self, position):
    self.count = position


def train(**fields):
  return lambda shard: Counting(
    shard=shard, batch_size=2, is_training=True, **fields
  )


def verdicts(report):
  return {finding.name: finding.verdict for finding in report.findings}


def said(report):
  return ' '.join(str(report).split())


def check(make_input, **kwargs):
  return show.check(make_input, seconds=0.0, **{'num_batches': 5} | kwargs)


# One batch.


PADDED = base.Batch(
  ids=np.int32([[5, 6, 7, 0], [8, 0, 0, 0], [0, 0, 0, 0]]),
  # The last row fills up the batch: zeros, as `base.pad_rows` makes them.
  paddings=np.float32([[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]]),
  weights=np.float32([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
)


@pytest.mark.parametrize(
  ('batch', 'tokens', 'share', 'rows'),
  [
    (PADDED, 4, 8 / 12, 2),
    # By the first of these that there is: paddings, segments, weights, none.
    ({k: PADDED[k] for k in ('ids', 'weights')}, 3, 9 / 12, 2),
    ({'ids': PADDED.ids}, 12, 0.0, 3),
    ({'ids': PADDED.ids, 'segment_ids': PADDED.ids}, 4, 8 / 12, 3),
    ({'src': PADDED, 'tgt': {'ids': PADDED.ids}}, 4 + 8, 12 / 24, 2),
    # An entry may have several rows in each row.
    (
      {
        'a': {k: x[None] for k, x in PADDED.items()},
        'b': {'ids': PADDED.ids[:1], 'weights': PADDED.weights[:1]},
      },
      4 + 2,
      10 / 16,
      1,
    ),
    # No tokens: rows.
    (
      {'x': np.ones([4, 2]), 'weights': np.float32([1, 1, 1, 0])},
      None,
      1 / 4,
      3,
    ),
    ({'x': np.ones([0, 2])}, None, 0.0, 0),
  ],
)
def test_tokens_padding_and_rows(batch, tokens, share, rows):
  assert show.tokens(batch) == tokens
  assert show.padding_share(batch) == pytest.approx(share)
  assert show.rows(batch) == rows


def test_describe():
  batch = {
    'ids': np.int32([[3, 5], [0, 0]]),
    'image': np.zeros([2, 4, 4, 3], ml_dtypes.bfloat16) + ml_dtypes.bfloat16(2),
    'is_new': np.array([True, False]),
    'nested': {'key': np.array([b'abc', b'd'])},
    'none': np.ones([0, 2]),
  }
  table = [line.split() for line in show.describe(batch).splitlines()]
  assert table == [
    ['entry', 'shape', 'dtype', 'min', 'max', 'mean'],
    ['ids', '2', 'x', '2', 'int32', '0', '5', '2'],
    ['image', '2', 'x', '4', 'x', '4', 'x', '3', 'bfloat16', '2', '2', '2'],
    ['is_new', '2', 'bool', 'False', 'True', '0.5'],
    ['nested.key', '2', 'bytes24', 'first', "np.bytes_(b'abc')"],
    ['none', '0', 'x', '2', 'float64'],
  ]


def test_texts_have_no_filler():
  source = Numbers(batch_size=3)
  assert show.texts(source, PADDED) == {'ids': ['fgh', 'i']}
  assert show.texts(source, PADDED, 3) == {'ids': ['fgh', 'i', '']}
  assert show.texts(source, {'x': np.ones(3)}) == {}
  assert show.texts(Counting(batch_size=3), PADDED) == {}
  assert show.texts(iter([PADDED]), PADDED) == {}


# Several batches.


def test_a_digest_never_changes():
  # Written down: it must be the same tomorrow, and elsewhere.
  batch = {'b': np.float32([[1, 2]]), 'a': np.int32([7])}
  assert show.digest([batch]) == 'b7699075867a52cc'
  assert show.digest([dict(reversed(batch.items()))]) == 'b7699075867a52cc'


def test_a_digest_sees_everything():
  x = np.int32([1, 2, 3, 4])
  strings = np.array(['ab', 'c'], object)
  different = [
    [],
    [{'x': x}],
    [{'y': x}],
    [{'x': x[::-1]}],
    [{'x': x.reshape(2, 2)}],
    [{'x': x.view(np.uint32)}],
    [{'x': x}, {'x': x}],
    [{'x': x, 'y': x}],
    [{'x': {'y': x}}],
    [{'x': strings}],
    [{'x': strings[::-1]}],
  ]
  assert len({show.digest(batches) for batches in different}) == len(different)
  assert show.digest([{'x': strings.copy()}]) == show.digest([{'x': strings}])


def test_throughput_counts_what_it_reads():
  batches = [PADDED] * 5
  found = show.throughput(batches, seconds=1e9)
  # The first one is not counted.
  assert (found.batches, found.rows, found.tokens) == (4, 8, 16)
  found = show.throughput([{'x': np.ones(3)}] * 100, seconds=1e9)
  assert (found.batches, found.rows, found.tokens) == (99, 297, None)
  assert 'tokens' not in str(found)
  found = show.throughput([PADDED], seconds=1e9)
  assert found.batches == 0
  assert 'no second batch was read' in str(found)


# Several hosts.


def rows_of(make_input, num_hosts, num_batches):
  """Returns what is found about rows."""
  report = check(make_input, num_hosts=num_hosts, num_batches=num_batches)
  return next(f for f in report.findings if f.name == 'rows')


@pytest.mark.parametrize(
  ('num_hosts', 'workers'),
  [
    *((n, threads) for n in (1, 2, 4) for threads in ({}, {'num_threads': 2})),
    pytest.param(2, {'num_workers': 1}, marks=pytest.mark.process),
  ],
)
def test_records_of_a_right_input_are_read_once(num_hosts, workers):
  # Over two epochs and more, rows come again; records of an epoch do not.
  found = rows_of(
    lambda shard: Numbers(shard=shard, batch_size=2, **workers), num_hosts, 10
  )
  assert found.verdict == show.OK
  assert f'no record of {20 * num_hosts} rows of' in found.text


def test_hosts_that_share_records_are_found():
  found = rows_of(lambda shard: Numbers(batch_size=2, num_infeed_hosts=1), 3, 4)
  assert found.verdict == show.WRONG
  assert found.text.startswith(
    'of 24 rows of 3 hosts, 8 different ones are on several hosts and 0 again'
    ' on the same host; hosts 0, 1, 2 read the same rows; such as line '
  )


def test_records_read_twice_by_one_host_are_found():
  class Twice(Numbers):
    def order(self, positions):
      return positions // 2 % self.n

  found = rows_of(lambda shard: Twice(shard=shard, batch_size=2), 2, 2)
  assert found.verdict == show.WRONG
  assert '0 different ones are on several hosts and 4 again' in found.text
  assert found.text.endswith('such as line 0')


def test_rows_tell_where_records_have_no_numbers():
  right = rows_of(train(), 3, 4)
  assert right.verdict == show.OK
  assert right.text == 'no two of 24 rows of 3 hosts are identical'

  wrong = rows_of(train(own=False), 3, 4)
  assert wrong.verdict == show.WRONG
  assert '8 different ones are on several hosts and 0 again' in wrong.text
  assert 'hosts 0, 1, 2 read the same rows' in wrong.text


def test_some_identical_rows_are_for_people_to_judge():
  def half(host_index, num_hosts):
    del num_hosts
    for i in range(4):
      yield {'x': np.array([i, 100 * (host_index + 1) + i])}

  found = rows_of(
    lambda shard: iterable.from_generator(
      half, shard=shard, batch_size=2, is_training=True
    ),
    2,
    4,
  )
  assert found.verdict == show.LOOK
  assert '4 different ones are on several hosts and 0 again' in found.text


def test_a_plain_iterator_may_not_know_its_host():
  def same():
    return iter([{'x': np.arange(2) + i} for i in range(0, 8, 2)])

  def own(shard):
    for i in range(0, 8, 2):
      yield {'x': (np.arange(2) + i) * shard.count + shard.index}

  report = check(same, num_hosts=2)
  assert len(report.digests) == 1
  assert 'takes no `shard`' in said(report)
  assert rows_of(own, 2, 4).verdict == show.OK


def test_weights_and_padding_rows_do_not_count():
  def rows(host_index):
    # The same row twice, in different company; then one that fills.
    weights = np.float32([1, 1 + host_index, 0])
    yield {'x': np.array([1, 1, 0]), 'weights': weights}

  found = rows_of(
    lambda shard: iterable.from_generator(rows, shard=shard, batch_size=3), 2, 1
  )
  assert 'of 4 rows of 2 hosts, 1 different ones are on several' in found.text


# All checks.


def test_a_right_input_passes():
  report = check(
    lambda shard: Numbers(shard=shard, batch_size=2, n=1000), num_hosts=4
  )
  assert report.ok
  assert verdicts(report) == {'rows': 'ok', 'resume': 'ok', 'position': 'ok'}
  assert len(set(report.digests)) == 4
  assert max(map(len, str(report).splitlines())) <= show.WIDTH
  source = Numbers(batch_size=2, n=1000, shard=base.Shard(3, 4))
  assert show.digest(next(source) for _ in range(5)) == report.digests[3]


@pytest.mark.parametrize('n', [1, 7, 8, 10])
@pytest.mark.parametrize('num_hosts', [1, 3])
def test_one_epoch_is_counted(n, num_hosts):
  report = check(
    lambda shard: Numbers(
      shard=shard,
      batch_size=2,
      n=n,
      is_training=False,
      reset_for_eval=True,
      eval_loop_num_batches=None,
    ),
    num_hosts=num_hosts,
    num_batches=1,
  )
  assert report.ok, report
  batches = -(-n // (2 * num_hosts))
  text = next(f.text for f in report.findings if f.name == 'epoch')
  assert text == (
    f'{batches} batches on each host; in all, {n} rows of'
    f' {batches * 2 * num_hosts}, and weights of {3 * n};'
    f' {n} records, of which 0 are not read'
  )
  rows = batches * 2 * num_hosts
  assert report.padding_share == pytest.approx((rows - n) / rows)


def test_records_that_are_left_out_are_found():
  class Less(Numbers):
    def order(self, positions):
      return positions // 2

  report = check(
    lambda shard: Less(
      shard=shard,
      batch_size=2,
      is_training=False,
      reset_for_eval=True,
      eval_loop_num_batches=None,
    )
  )
  assert verdicts(report)['epoch'] == show.WRONG
  assert '10 records, of which 5 are not read' in said(report)


def test_unequal_numbers_of_batches_are_found():
  def make(shard):
    end = 8 + 2 * shard.index * (shard.count > 1)
    return Counting(batch_size=2, shard=shard, reset_for_eval=True, end=end)

  assert check(make, num_hosts=1).ok
  report = check(make, num_batches=1)
  assert verdicts(report)['epoch'] == show.WRONG
  assert 'have 4, 5 batches' in said(report)
  # Also where only one of them ends within what is read.
  report = check(make, num_batches=1, max_batches=4)
  assert 'have 4, 4 or more batches' in said(report)
  report = check(make, num_batches=1, max_batches=3)
  assert verdicts(report)['epoch'] == show.LOOK
  # And in training, where nobody asked for an end.
  report = check(lambda shard: train(end=4 + 6 * shard.index)(shard))
  assert 'have 2, 5 or more batches' in said(report)


def test_no_data_is_found():
  report = check(train(end=0))
  assert report.num_batches == 0
  assert verdicts(report)['epoch'] == show.WRONG
  assert 'there is no data' in said(report)


def test_a_position_that_lies_is_found():
  assert check(train()).ok
  report = check(train(lies=True))
  assert verdicts(report)['resume'] == show.WRONG
  assert 'after 3 batches gave another batch number 3' in said(report)


def test_a_state_that_is_refused_is_found():
  class Random(Counting):
    def identity(self):
      return {**super().identity(), 'data': os.urandom(4).hex()}

  report = check(
    lambda shard: Random(shard=shard, batch_size=2, is_training=True)
  )
  assert verdicts(report)['resume'] == show.WRONG
  assert 'refuses the state after 3 batches: Random cannot go on' in said(
    report
  )


def test_resuming_that_cannot_be_judged():
  report = check(
    lambda shard: Counting(
      shard=shard,
      batch_size=2,
      is_training=True,
      input_checkpointing_enabled=False,
    )
  )
  assert verdicts(report)['resume'] == show.LOOK
  report = check(lambda shard: Numbers(shard=shard, batch_size=2, same=True))
  assert verdicts(report)['resume'] == show.LOOK
  assert 'all batches are the same' in said(report)


@pytest.mark.parametrize('num_hosts', [1, 2])
def test_a_record_without_weight_is_read_all_the_same(num_hosts):
  class Empty(Numbers):
    def read(self, records, epochs):
      batch = super().read(records, epochs)
      return batch | {'weights': batch['weights'] * (records > 0)[:, None]}

  report = check(
    lambda shard: Empty(
      shard=shard,
      batch_size=2,
      n=3,
      shuffle=False,
      is_training=False,
      reset_for_eval=True,
      eval_loop_num_batches=None,
    ),
    num_hosts=num_hosts,
  )
  assert report.ok
  assert '2 rows of' in said(report)
  assert '3 records, of which 0 are not read' in said(report)


def test_a_plain_iterator_that_saves_its_position():
  class Plain:
    def __init__(self, step):
      self.state = {'count': np.zeros([], np.int64)}
      self.step = step

    def __iter__(self):
      return self

    def __next__(self):
      self.state['count'] += 2
      return {'x': np.arange(2) + self.state['count']}

    def get_state(self):
      return self.state

    def set_state(self, state):
      self.state = {'count': state['count'] + self.step}

  assert verdicts(check(lambda: Plain(0)))['resume'] == show.OK
  assert verdicts(check(lambda: Plain(2)))['resume'] == show.WRONG


def test_positions_that_differ_are_found():
  class Own(Numbers):
    def position(self):
      given = super().position()['records']
      return {'records': given // (1 + self.infeed_host_index)}

  report = check(lambda shard: Own(shard=shard, batch_size=2))
  assert verdicts(report)['position'] == show.WRONG
  assert 'not the same on all hosts' in said(report)


def test_an_order_that_depends_on_the_number_of_hosts_is_found():
  class Own(Numbers):
    def order(self, positions):
      return (positions + self.num_infeed_hosts) % self.n

  report = check(lambda shard: Own(shard=shard, batch_size=2))
  assert verdicts(report)['position'] == show.WRONG
  assert 'reads other rows' in said(report)
  # And a position that only this number of hosts takes.

  class Strict(Numbers):
    def identity(self):
      return super().identity() | {'hosts': self.num_infeed_hosts}

  report = check(lambda shard: Strict(shard=shard, batch_size=2))
  assert 'one host refuses the state of 2' in said(report)


def test_hosts_that_are_refused():
  report = check(
    lambda shard: iterable.from_generator(
      lambda: ({'x': np.arange(2) + 2 * i} for i in range(100)),
      batch_size=2,
      shard=shard,
      is_training=True,
    )
  )
  assert report.ok
  assert report.findings[0].verdict == show.LOOK
  assert 'all hosts would read the same' in report.findings[0].text
  assert len(report.digests) == 1


# The command, as a process.


EXPERIMENT = '''
import dataclasses

import numpy as np

from jaxline import sharded
from jaxline.inputs import base
from tests import test_inputs_show


class Experiment(sharded.ShardedExperiment):

  def __init__(self, mode, init_rng, batch_size, fault, mesh, run_config=None):
    super().__init__(mode, init_rng, run_config=run_config, mesh=mesh)
    self.batch_size, self.fault = batch_size, fault

  def init_fn(self, rng):
    raise AssertionError('The weights were made.')

  make_optimizer = loss_fn = init_fn

  def train_input(self, shard):
    index, count = shard.index, shard.count
    if self.batch_size % count:
      raise ValueError(f'batch_size is {self.batch_size}, for {count} hosts.')
    if self.fault == 'read':
      raise KeyError('in code of the user')
    return test_inputs_show.Numbers(
      name='numbers',
      batch_size=self.batch_size // count,
      shuffle=False,
      n=20,
      infeed_host_index=0 if self.fault == 'hosts' else index,
      num_infeed_hosts=1 if self.fault == 'hosts' else count,
    )

  def eval_input(self, shard):
    assert self.mode == 'eval'
    batches = [{'x': np.arange(3) + 3 * shard.index}]
    if self.fault == 'sets':
      return {'short': batches, 'long': 2 * batches}
    return batches


class Old:
  """Has no inputs."""
'''

CONFIG = """
from jaxline import base_config


def get_config():
  config = base_config.get_base_config()
  config.experiment_class = 'looked_at:Experiment'
  config.experiment_kwargs.batch_size = 8
  config.experiment_kwargs.fault = ''
  config.experiment_kwargs.mesh = {'data': 2}
  return config
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('show')
  (path / 'looked_at.py').write_text(EXPERIMENT)
  (path / 'config.py').write_text(CONFIG)
  return path


def command(folder, *args):
  # conftest has put two CPU devices into XLA_FLAGS.
  return subprocess.run(
    [sys.executable, '-m', 'jaxline.inputs', *args],
    cwd=folder,
    env=os.environ | {'PYTHONPATH': f'{ROOT}{os.pathsep}{folder}'},
    capture_output=True,
    text=True,
    timeout=120,
    stdin=subprocess.DEVNULL,
  )


def shown(folder, *args):
  return command(
    folder, 'show', '--config=config.py', '--seconds=0.01', '--batches=3', *args
  )


@pytest.mark.process
def test_command(folder):
  result = shown(folder, '-n', '1')
  assert (result.returncode, result.stderr) == (0, '')
  lines = result.stdout.splitlines()
  first = "Numbers 'numbers': 8 rows a batch, 8 over all hosts, for host 0 of 1"
  assert lines[0] == first
  assert lines[2:8] == [
    'batch 0',
    'entry    shape  dtype    min  max  mean',
    'ids      8 x 3  int32      0    9   4.5',
    'weights  8 x 3  float32    1    1     1',
    "row 0 of ids: 'abc'",
    "row 1 of ids: 'bcd'",
  ]
  assert 'batch 1' not in lines
  assert 'digest of the first 3 batches' in lines
  assert sum('  host ' in line for line in lines) == 2
  assert 'no record of 24 rows of 2 hosts is read twice' in result.stdout
  assert 'tokens/s' in lines[-1]
  assert 'WRONG' not in result.stdout
  assert max(map(len, lines)) <= show.WIDTH
  assert not list(folder.glob('**/checkpoints'))


@pytest.mark.process
def test_command_on_evaluation(folder):
  result = shown(folder, '--split=eval', '--hosts', '3')
  assert (result.returncode, result.stderr) == (0, '')
  assert 'list, no BaseInput, for host 0 of 3' in result.stdout
  assert '1 batches on each host; in all, 9 rows of 9' in result.stdout
  assert 'begins anew with each evaluation' in result.stdout


# ml_collections loads the config file in a way that Python will drop.
loads_config = pytest.mark.filterwarnings('ignore:the load_module')


@loads_config
@pytest.mark.parametrize(('name', 'batches'), [(None, 1), ('long', 2)])
def test_command_on_one_of_several_evaluation_sets(
  folder, name, batches, monkeypatch, capsys
):
  from jaxline.inputs import __main__ as program

  monkeypatch.chdir(folder)
  monkeypatch.syspath_prepend(str(folder))
  args = ['--split=eval', '--config.experiment_kwargs.fault=sets']
  if name:
    args.append(f'--set={name}')
  program.main(['show', '--config=config.py', '--seconds=0.01', '-n0', *args])
  assert f'{batches} batches on each host' in capsys.readouterr().out


@pytest.mark.process
@pytest.mark.parametrize('split', ['train', 'eval'])
def test_command_on_the_language_model(split):
  result = command(
    ROOT,
    'show',
    '--config=configs/lm.py',
    f'--split={split}',
    '--host=1/2',
    '--seconds=0.01',
    '-n1',
  )
  assert (result.returncode, result.stderr) == (0, '')
  assert 'row 0 of ids: ' in result.stdout
  for line in (
    '^ok     rows     no record of .* rows of 2 hosts is read twice$',
    '^ok     resume   a new input goes on exactly',
    '^ok     position the same on all hosts, and one host goes on from it$',
  ):
    assert re.search(line, result.stdout, re.MULTILINE)
  assert ('of which 0 are not read' in said(result.stdout)) == (split == 'eval')


@pytest.mark.process
def test_command_finds_hosts_that_read_the_same(folder):
  result = shown(folder, '-n0', '--config.experiment_kwargs.fault=hosts')
  assert (result.returncode, result.stderr) == (1, '')
  assert 'WRONG  rows     of 24 rows of 2 hosts, 12 different' in result.stdout


@loads_config
@pytest.mark.parametrize(
  ('args', 'words'),
  [
    ([], '--config'),
    (['--config=config.py', '--hots=3'], 'hots'),
    (['--config=config.py', '--config.interval_type=days'], 'interval_type'),
    (
      ['--config=config.py', '--config.experiment_class=looked_at:Old'],
      'train_input',
    ),
    (['--config=config.py', '--hosts=3'], 'batch_size is 8'),
    (['--config=config.py', '--host=0/2', '--hosts=4'], '--hosts'),
    (['--config=config.py', '--split=eval', '--set=long'], '--set'),
  ],
  ids=str,
)
def test_wrong_usage(folder, args, words, monkeypatch, capsys):
  # In this process, for the time's sake: another one takes seconds.
  from jaxline.inputs import __main__ as program

  monkeypatch.chdir(folder)
  monkeypatch.syspath_prepend(str(folder))
  try:
    status = program.main(['show', *args])
  except SystemExit as e:
    status = e.code  # How argparse leaves.
  assert status == 2
  assert words in capsys.readouterr().err
