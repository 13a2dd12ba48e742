"""Every key of a run's config, its default and why; and their validation.

`get_base_config` is the only place where a key is declared. A config file
starts from it and sets the run's numbers; `validate_config` refuses what is
missing, misspelled, of the wrong kind or contradictory before anything is
compiled.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import difflib
import json
import math
import numbers
import os
import re
import types
import typing
from typing import Any, TypeVar

from ml_collections import config_dict

from jaxline import distributed
from jaxline import errors
from jaxline import xla
from jaxline.compat import prng
from jaxline.supervision import nonfinite

T = TypeVar('T')

INTERVAL_TYPES = ('secs', 'steps')
# Below this similarity an unknown key is taken for the experiment's own.
_MISSPELLED = 0.85


def get_base_config() -> config_dict.ConfigDict:
  """Returns the config that every run starts from, with all its defaults."""
  config = config_dict.ConfigDict()

  # Which class `experiment.py` runs, as 'package.module:Class'; None where the
  # file hands its class to `platform.main` itself.
  config.experiment_class = config_dict.placeholder(str)
  # What that class is constructed with, besides `mode` and `init_rng`.
  config.experiment_kwargs = config_dict.ConfigDict()

  # The run's directory: checkpoints, event files, JSON lines, resolved config.
  # None makes a fresh one below /tmp/jaxline-UID, which is this user's alone,
  # named for the config and the time. A run that was started with the same
  # directory goes on. Here and in all names of files `~` is the home directory.
  config.checkpoint_dir = config_dict.placeholder(str)

  # Number of training steps; None runs until the experiment's own
  # `should_run_step` says no.
  config.training_steps = 10000

  # Sharded steps: sizes of the mesh, within a slice (`ici`: devices that a fast
  # network joins, such as a TPU slice or the GPUs of a node) and across slices
  # (`dcn`). In each, one may be -1: all that are left. docs/sharding.md.
  config.mesh = config_dict.ConfigDict()
  config.mesh.ici = config_dict.ConfigDict(
    {'stage': 1, 'replica': 1, 'data': -1, 'mdl': 1}
  )
  config.mesh.dcn = config_dict.ConfigDict(
    {'stage': 1, 'replica': -1, 'data': 1, 'mdl': 1}
  )
  # What is split over it: 'ddp' (only the batch), 'fsdp', 'tp', 'fsdp_tp',
  # 'sp' or 'pipeline'; see `partitioning.PRESETS`.
  config.sharding = 'ddp'
  # Changes to the preset: logical axis -> mesh axes, {'vocab': ('data',)}.
  config.sharding_rules = config_dict.ConfigDict()
  # Sharded steps: a batch is cut into so many parts, one computed after the
  # other, whose gradients are added: less memory, the same step.
  config.gradient_accumulation_steps = 1

  # --jaxline_mode=compile: the TPU topology to compile for, such as 'v4:4x4x4',
  # and of how many slices; None compiles for the devices that are here.
  config.topology = config_dict.placeholder(str)
  config.num_slices = 1
  # A program that this mode saved, to run instead of compiling: the directory
  # that it names.
  config.compiled_program = config_dict.placeholder(str)

  # How several processes meet: 'auto' (a cluster that JAX knows, or the
  # launcher's variables; else this is one process), 'off', or a dict
  # {coordinator, num_processes, process_id}. docs/launching.md.
  config.distributed = config_dict.FieldReference('auto', field_type=object)

  # Settings of XLA, made before JAX starts: docs/accelerators.md.
  config.xla = config_dict.ConfigDict()
  # Communicate while computing; None leaves it to XLA.
  config.xla.latency_hiding_scheduler = config_dict.placeholder(bool)
  # GPU: profile so many runs of the step, then compile it again by what was
  # measured (auto PGLE); 0 is off.
  config.xla.pgle_profiling_runs = 0
  # Of several measured times, which; None is JAX's own, 90.
  config.xla.pgle_aggregation_percentile = config_dict.placeholder(int)
  # The same in two runs (manual PGLE): the first profiles so many steps and
  # writes this file, which the second names as its profile.
  config.xla.pgle_save = config_dict.placeholder(str)
  config.xla.pgle_save_steps = 10
  config.xla.pgle_profile = config_dict.placeholder(str)
  # More of XLA_FLAGS, and of libtpu's LIBTPU_INIT_ARGS: name -> value.
  config.xla.flags = config_dict.ConfigDict()
  config.xla.tpu_flags = config_dict.ConfigDict()

  # In what all intervals are counted: 'secs' or 'steps' (None means 'secs').
  # An interval that is None or negative is off; 0 is every step.
  config.interval_type = 'secs'
  # Overrides of `interval_type` for logging, checkpoints and evaluation.
  config.logging_interval_type = config_dict.placeholder(str)
  config.checkpoint_interval_type = config_dict.placeholder(str)
  config.eval_interval_type = config_dict.placeholder(str)

  config.save_checkpoint_interval = 300  # 0 is off here, as in JAXline.
  config.log_tensors_interval = 60  # The log line.
  config.log_train_data_interval = 120.0  # TensorBoard and JSON lines.
  # Training pauses this often for an evaluation, with
  # --jaxline_mode=train_and_eval.
  config.eval_interval = 300

  # Ratios r add the steps r, 10 r, 100 r ... to the intervals above: [1, 2, 5]
  # looks closely at the start and seldom later. Needs intervals in steps.
  config.periodic_action_growth_ratios = None
  # The log line is made on a background thread; False is for debugging. The
  # writers always are on one.
  config.log_async = True
  # Every host logs, not only the first.
  config.log_all_hosts = False
  # The scalars of every step are kept and logged together at the interval.
  config.log_all_train_data = False

  # How many training steps may be queued on the devices: 2 keeps them busy
  # while the host looks at the step before; 1 waits for each step. None is 2,
  # and 1 for several CPU devices, whose collectives can starve each other.
  config.max_steps_in_flight = config_dict.placeholder(int)

  # Sharded steps: how many batches are read and put on the devices ahead of the
  # step, at least 2. Each takes device memory. (Of an evaluation, read only.)
  config.infeed_buffer_size = 3
  # A step that waits so many seconds for its batch is told of in the log, with
  # what the input is reading. None never is.
  config.infeed_stall_secs = 60.0

  # A checkpoint before the first step, for evaluators to start from.
  config.save_initial_train_checkpoint = False
  # Checkpoints by all hosts, not only the first. In steps: hosts' clocks
  # differ.
  config.train_checkpoint_all_hosts = False
  config.best_checkpoint_all_hosts = False
  # Where checkpoints are kept: 'durable', on disk, below `checkpoint_dir`; or
  # 'memory', in this process, for tests and trials.
  config.checkpointer = 'durable'
  # How many of the newest checkpoints of a series are kept. For `best`, None
  # means `max_checkpoints_to_keep` in the per-device style, and 1 in the
  # sharded style.
  config.max_checkpoints_to_keep = 5
  config.max_best_checkpoints_to_keep = config_dict.placeholder(int)
  # Besides those, checkpoints of `latest` this far apart are kept for ever;
  # None keeps none.
  config.keep_checkpoint_every_steps = config_dict.placeholder(int)
  config.keep_checkpoint_every_hours = config_dict.placeholder(float)
  # What an experiment keeps is stored as arrays, JSON and structure. This
  # allows to pickle the rest, and to unpickle it at restore, which runs
  # whatever code the file holds: only for files that you made yourself.
  config.checkpoint_allow_pickle = False

  # Begin from another run, as 'DIR' or 'DIR:STEP', where this run has no
  # checkpoint of its own. Without rules all of it is restored: weights,
  # optimizer, step, keys, position of the data.
  config.restore_from = config_dict.placeholder(str)
  # What to take from it, as pairs (pattern, source): an array of this run
  # whose name the regular expression matches wholly (first match wins) gets
  # the array named `source` there, in which '\\1' is the pattern's first
  # group; None, or no match, leaves it as it was initialised. The run then
  # starts at step 0, with fresh keys and schedules, whatever the rules match.
  # `python -m jaxline.checkpoint show DIR` lists the names.
  config.restore_rules = ()
  # A checkpoint was made with another experiment_class, experiment_kwargs or
  # seed: 'raise' says which keys differ, 'continue' restores it all the same.
  # What an experiment declares as CHANGEABLE_ON_RESUME may always change.
  config.on_config_change = 'raise'

  # What a step with a loss or gradients that are not finite does: 'raise' ends
  # the run; 'warn' warns once for each scalar, and never removes the newest
  # checkpoint from before; 'skip' (sharded steps) keeps weights and optimizer
  # as they were, and counts; 'ignore' does nothing. None is 'raise' for sharded
  # steps and 'warn' in the per-device style, where JAXline goes on.
  config.on_nonfinite = config_dict.placeholder(str)
  # With 'skip': this many such steps in a row end the run.
  config.max_nonfinite_steps = 10
  # No step, and no other sign of life, for so many seconds ends the process,
  # with every thread's stack. Give more where a compilation or an evaluation
  # takes longer. None waits for ever.
  config.watchdog_secs = 7200.0

  # Evaluate the untrained weights while there is no checkpoint.
  config.eval_initial_weights = False
  # Evaluate the newest checkpoint once, then end.
  config.one_off_evaluate = False
  # Evaluate these checkpoints, then end: 'all' that are kept, or steps, such as
  # '1000,2000'. None follows the training run.
  config.eval_steps = config_dict.placeholder(str)
  # The scalar of `evaluate` whose best value is kept as the series 'best'; ''
  # keeps none.
  config.best_model_eval_metric = ''
  config.best_model_eval_metric_higher_is_better = True

  # --jaxline_mode=decode: prompts, continued with the weights of a checkpoint.
  config.decode = config_dict.ConfigDict()
  # A file with a prompt on each line that is not blank; or, if its name ends in
  # '.jsonl', with {"prompt": ...} on each. None is standard input, which asks
  # for them if it is a terminal.
  config.decode.prompts = config_dict.placeholder(str)
  # Where the continuations go, a line of JSON for each prompt; a file that is
  # there is replaced. None is decode/step_N.jsonl below `checkpoint_dir`
  # (step_N_2.jsonl while another process writes to that), or, where nothing can
  # be written there, a new file in the working directory.
  config.decode.output = config_dict.placeholder(str)
  # How many prompts are continued at once, but at a terminal.
  config.decode.batch_size = 8
  # Of which series, 'latest' or 'best', and of which step of it; None is the
  # newest.
  config.decode.series = 'latest'
  config.decode.step = config_dict.placeholder(int)

  # The seed of everything: split into the step key and the init key.
  config.random_seed = 42
  # How the per-device keys of a step are related: see prng.DistributedRNGMode.
  config.random_mode_train = 'unique_host_unique_device'
  config.random_mode_eval = 'same_host_same_device'
  # Both keys are the unsplit key of the seed, as in JAXline's first years.
  config.legacy_random_seed_behavior = False

  return config


def _nearest(key: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
  near = difflib.get_close_matches(key, list(names), n=1, cutoff=cutoff)
  return near[0] if near else None


def validate_keys(
  base_cfg: Mapping[str, Any],
  config: Mapping[str, Any],
  base_filename: str = 'jaxline/base_config.py',
) -> None:
  """Checks that a config has the keys it must have, spelled right.

  Keys that are not in the base config are the experiment's own and pass,
  unless one is so near to a base key that it must be a misspelling of it. A
  base key with further words, such as `num_training_steps`, is none.

  Args:
    base_cfg: the config with the keys there must be.
    config: the config to check.
    base_filename: where the keys are documented.

  Raises:
    ValueError: a key is missing or misspelled.
  """
  for key in config:
    near = _nearest(key, base_cfg, _MISSPELLED) if key not in base_cfg else None
    if near and not set(near.split('_')) <= set(key.split('_')):
      raise ValueError(
        f'Unknown config key {key!r}: did you mean {near!r}? The keys are'
        f' documented in {base_filename}. A key of your own needs another name,'
        ' or a place in experiment_kwargs.'
      )
  for key, value in base_cfg.items():
    if key not in config:
      near = _nearest(key, set(config) - set(base_cfg))
      raise ValueError(
        f'Config key {key!r} is missing'
        + (f'; is {near!r} a misspelling of it?' if near else '.')
        + f' Start the config from get_base_config(). The required keys are'
        f' {sorted(base_cfg)}; see {base_filename}.'
      )
    nested = config[key]
    if isinstance(value, config_dict.ConfigDict) and nested is not None:
      validate_keys(value, nested, base_filename)


def _check_values(config: Mapping[str, Any]) -> None:
  """Refuses single values that no run can mean."""

  def refuse(key: str, expected: str) -> None:
    raise ValueError(
      f'config.{key} is {config[key]!r}; expected {expected}. See'
      ' jaxline/base_config.py.'
    )

  for key in (
    'interval_type',
    'logging_interval_type',
    'checkpoint_interval_type',
    'eval_interval_type',
  ):
    if config[key] is not None and config[key] not in INTERVAL_TYPES:
      refuse(key, f'None or one of {INTERVAL_TYPES}')
  modes = [mode.value for mode in prng.DistributedRNGMode]
  for key in ('random_mode_train', 'random_mode_eval'):
    if config[key] not in modes:
      refuse(key, f'one of {modes}')
  for key in (
    'save_checkpoint_interval',
    'log_tensors_interval',
    'log_train_data_interval',
    'eval_interval',
  ):
    if config[key] is not None and not _is_number(config[key]):
      refuse(key, 'a number, or None for off')
  for key, valid in (
    ('checkpointer', ('durable', 'memory')),
    ('on_config_change', ('raise', 'continue')),
    ('on_nonfinite', (None, *nonfinite.MODES)),
  ):
    if config[key] not in valid:
      refuse(key, f'one of {valid}')
  for key in (
    'infeed_stall_secs',
    'keep_checkpoint_every_hours',
    'watchdog_secs',
  ):
    value = config[key]
    if value is not None and not (_is_number(value) and value > 0):
      refuse(key, 'a positive number, or None for none')
  _check_decode(config['decode'])
  distributed.validate(config['distributed'])
  xla.validate(config['xla'])
  _check_rules(config)
  wanted = config['eval_steps']
  if not isinstance(wanted, str | None) or (
    wanted not in (None, 'all') and not re.fullmatch(r'\d+(,\d+)*', wanted)
  ):
    refuse('eval_steps', "None, 'all' or steps, such as '1000,2000'")
  steps = config['training_steps']
  if steps is not None and (not _is_number(steps) or steps < 0):
    refuse('training_steps', 'a number of at least 0, or None for no end')
  for key, optional in (
    ('max_checkpoints_to_keep', False),
    ('max_best_checkpoints_to_keep', True),
    ('max_nonfinite_steps', False),
    ('gradient_accumulation_steps', False),
    ('num_slices', False),
    ('keep_checkpoint_every_steps', True),
    ('max_steps_in_flight', True),
  ):
    value = config[key]
    if value is None and optional:
      continue
    if not _is_integer(value) or value < 1:
      refuse(key, 'an integer of at least 1')
  buffer_size = config['infeed_buffer_size']
  if not _is_integer(buffer_size) or buffer_size < 2:
    refuse('infeed_buffer_size', 'an integer of at least 2')
  seed = config['random_seed']
  # JAX takes a signed integer of 64 bits.
  if not _is_integer(seed) or not -(2**63) <= seed < 2**63:
    refuse('random_seed', 'an integer from -2**63 to 2**63 - 1')
  for key, expected in (
    ('best_model_eval_metric', "the name of a scalar, or '' for none"),
    ('checkpoint_dir', 'the name of a directory, or None for a fresh one'),
    ('experiment_class', "'package.module:Class', or None"),
    ('restore_from', "'DIR' or 'DIR:STEP', or None"),
    ('topology', "a TPU topology, such as 'v4:4x4x4', or None"),
    ('compiled_program', 'the name of a directory, or None'),
  ):
    if not isinstance(config[key], str | None):
      refuse(key, expected)
  ratios = config['periodic_action_growth_ratios']
  if ratios is not None and not (
    isinstance(ratios, Sequence)
    and all(_is_number(r) and r > 0 for r in ratios)
  ):
    refuse(
      'periodic_action_growth_ratios', 'None or a list of positive numbers'
    )
  base = get_base_config()
  for key, default in base.items():
    if isinstance(default, bool) and not isinstance(config[key], bool):
      refuse(key, 'True or False')


def _check_decode(options: Mapping[str, Any]) -> None:
  """Refuses values of `config.decode` that no run can mean."""
  keys = get_base_config().decode
  if not isinstance(options, Mapping | config_dict.ConfigDict):
    raise ValueError(f'config.decode is {options!r}; expected {sorted(keys)}.')
  for key in options:
    if key not in keys:
      raise ValueError(
        f'Unknown key {key!r} in config.decode; its keys are {sorted(keys)}.'
      )

  def is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least

  for key, valid, expected in (
    ('prompts', lambda x: isinstance(x, str | None), 'the name of a file'),
    ('output', lambda x: isinstance(x, str | None), 'the name of a file'),
    ('batch_size', lambda x: is_count(x, 1), 'an integer of at least 1'),
    ('series', lambda x: x in ('latest', 'best'), "'latest' or 'best'"),
    ('step', lambda x: x is None or is_count(x, 0), 'a step, or None'),
  ):
    if not valid(options[key]):
      raise ValueError(
        f'config.decode.{key} is {options[key]!r}; expected {expected}. See'
        ' jaxline/base_config.py.'
      )


def _check_rules(config: Mapping[str, Any]) -> None:
  """Refuses `restore_rules` that are no rules."""
  rules = config['restore_rules']
  expected = (
    'expected pairs (regular expression, name or None), such as'
    " [('state/params/(.*)', r'state/params/\\1')]. See"
    ' jaxline/base_config.py.'
  )
  if isinstance(rules, str) or not isinstance(rules, Sequence):
    raise ValueError(f'config.restore_rules is {rules!r}; {expected}')
  for rule in rules:
    try:
      pattern, source = rule
      re.compile(pattern)
    except (TypeError, ValueError, re.error) as e:
      raise ValueError(
        f'config.restore_rules has {rule!r} ({e}); {expected}'
      ) from e
    if not isinstance(source, str | None):
      raise ValueError(f'config.restore_rules has {rule!r}; {expected}')


def _is_number(x: Any) -> bool:
  is_real = isinstance(x, numbers.Real) and not isinstance(x, bool)
  return is_real and math.isfinite(x)


def _is_integer(x: Any) -> bool:
  return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def check_numbers(config: Any, ranges: Mapping[str, str]) -> None:
  """Refuses values of an experiment's own config that no run can mean.

  For the `__post_init__` of a dataclass that `read` builds.

  Args:
    config: what has the values as attributes.
    ranges: attribute -> the interval that it must be in, such as '[0, 1)' or
      '(0, inf)'; for integers with a word before, 'integer [1, inf)'. Infinity
      and NaN are in none.

  Raises:
    ValueError: the first that is not, by name.
  """
  for key, expected in ranges.items():
    value = getattr(config, key)
    kind, interval = expected[:-1].rsplit('[' if '[' in expected else '(')
    low, high = (float(x) for x in interval.split(','))
    if not (
      (_is_integer if kind else _is_number)(value)
      and (low <= value if '[' in expected else low < value)
      and (value <= high if expected.endswith(']') else value < high)
    ):
      raise ValueError(
        f'{key} is {value!r}; expected {"an" if kind else "a number in"}'
        f' {expected.replace("integer", "integer in")}.'
      )


# The keys that name files, which may begin with `~`.
_PATHS = (
  'checkpoint_dir',
  'compiled_program',
  'decode.output',
  'decode.prompts',
  'restore_from',
  'xla.pgle_profile',
  'xla.pgle_save',
)


def expand_paths(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """Returns a copy of a run's config in which `~` is the home directory."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    for path in _PATHS:
      *sections, key = path.split('.')
      section = config
      for name in sections:
        section = section[name]
      if isinstance(section[key], str):
        section[key] = os.path.expanduser(section[key])
  return config


def check_constraints(config: Mapping[str, Any]) -> None:
  """Refuses keys that contradict each other.

  Raises:
    ValueError: naming the keys, their values and what to change.
  """
  checkpoint_type = (
    config['checkpoint_interval_type'] or config['interval_type']
  )
  if config['train_checkpoint_all_hosts'] and checkpoint_type != 'steps':
    raise ValueError(
      'config.train_checkpoint_all_hosts is True, but checkpoints go by'
      f' {checkpoint_type!r} (checkpoint_interval_type'
      f' {config["checkpoint_interval_type"]!r}, interval_type'
      f' {config["interval_type"]!r}): hosts would save different steps. Set'
      " checkpoint_interval_type = 'steps'."
    )
  if config['restore_rules'] and not config['restore_from']:
    raise ValueError(
      'config.restore_rules are given, but config.restore_from is'
      f' {config["restore_from"]!r}; name the run to restore from.'
    )
  if config['num_slices'] > 1 and not config['topology']:
    raise ValueError(
      f'config.num_slices is {config["num_slices"]}, but config.topology is'
      f' {config["topology"]!r}: the devices that are here are in as many'
      ' slices as they are. Set both, or neither.'
    )
  if config['checkpointer'] == 'memory':
    for key in (
      'restore_from',
      'eval_steps',
      'keep_checkpoint_every_steps',
      'keep_checkpoint_every_hours',
    ):
      if config[key] is not None:
        raise ValueError(
          f'config.{key} is {config[key]!r}, but config.checkpointer is'
          " 'memory', which has no such thing. Set config.checkpointer ="
          " 'durable'."
        )
  if config['periodic_action_growth_ratios']:
    for key in ('logging_interval_type', 'checkpoint_interval_type'):
      if (config[key] or config['interval_type']) != 'steps':
        raise ValueError(
          'config.periodic_action_growth_ratios needs intervals in steps, but'
          f' {key} is {config[key]!r} and interval_type is'
          f" {config['interval_type']!r}. Set interval_type = 'steps'."
        )


def validate_config(config: config_dict.ConfigDict) -> None:
  """Checks a whole config: `validate_keys`, each value, `check_constraints`.

  Raises:
    ValueError: the first thing that is wrong, by name.
  """
  keys = get_base_config()
  keys.mesh = {}  # What it leaves out has a default: see `partitioning`.
  validate_keys(keys, config)
  _check_values(config)
  check_constraints(config)


def complete_config(config: Any) -> Any:
  """Returns a config that has every key of the base config.

  Args:
    config: a run's config, which a program may have made without
      `get_base_config`; or a mock of one, which is returned as it is.

  Returns:
    The config itself if it lacks nothing. Otherwise a copy with the defaults of
    the missing keys; a config that knows no `on_nonfinite` ignores it.
  """
  if not isinstance(config, Mapping | config_dict.ConfigDict):
    return config
  defaults = get_base_config()
  missing = [key for key in defaults if key not in config]
  if not missing:
    return config
  complete = config_dict.ConfigDict(config)
  with complete.unlocked():
    for key in missing:
      complete[key] = defaults[key]
    if 'on_nonfinite' in missing:
      complete.on_nonfinite = 'ignore'
  return complete


_of_run: contextvars.ContextVar[Any] = contextvars.ContextVar(
  'config_of_run', default=None
)


@contextlib.contextmanager
def building(config: Any) -> Iterator[None]:
  """Lets the experiment that is constructed inside see the run's config.

  An experiment's constructor gets `experiment_kwargs` only, as in JAXline.

  Args:
    config: the run's.

  Yields:
    Nothing.
  """
  token = _of_run.set(config)
  try:
    yield
  finally:
    _of_run.reset(token)


def of_run() -> config_dict.ConfigDict:
  """Returns the config of the run whose experiment is being constructed.

  The base config where there is none, as in a notebook, or an old one without
  our keys.
  """
  config = _of_run.get()
  return config if has(config, 'mesh') else get_base_config()


def has(config: Any, key: str) -> bool:
  """Returns whether a config has a key of ours.

  Old programs make theirs without `get_base_config`, and tests mock it.
  """
  return isinstance(config, Mapping | config_dict.ConfigDict) and key in config


def to_json(config: config_dict.ConfigDict) -> str:
  """Returns a config as JSON, with what JSON lacks as text."""
  return json.dumps(
    json.loads(config.to_json_best_effort()), indent=2, sort_keys=True
  )


def read(cls: type[T], config: Mapping[str, Any]) -> T:
  """Builds an experiment's own config, refusing keys that nothing reads.

  Args:
    cls: a dataclass; each field is a key. A field whose type is a dataclass,
      or a dataclass or None, reads a nested config.
    config: the values, for instance `config.experiment_kwargs.config`.

  Returns:
    An instance of `cls`.

  Raises:
    errors.UsageError: a key is unknown or missing, and the nearest valid one is
      named; or `cls` refuses a value.
  """
  fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
  name = cls.__name__
  for key in config:
    if key not in fields:
      near = _nearest(key, fields)
      raise errors.UsageError(
        f'Unknown key {key!r} for {name}'
        + (f': did you mean {near!r}?' if near else '.')
        + f' Its keys are {sorted(fields)}.'
      )
  required = [
    key
    for key, f in fields.items()
    if f.default is dataclasses.MISSING
    and f.default_factory is dataclasses.MISSING
  ]
  if missing := sorted(set(required) - set(config)):
    raise errors.UsageError(
      f'Missing keys {missing} for {name}; its keys are {sorted(fields)}.'
    )
  kinds = typing.get_type_hints(cls)
  values = {}
  for key in config:
    value = config[key]
    nested = _dataclass_in(kinds[key])
    if isinstance(value, Mapping | config_dict.ConfigDict) and nested:
      value = read(nested, value)
    elif isinstance(value, config_dict.ConfigDict):
      value = value.to_dict()
    values[key] = value
  try:
    return cls(**values)
  except (TypeError, ValueError) as e:
    if isinstance(e, errors.UsageError):
      raise
    raise errors.UsageError(f'{name}: {e}') from e


def with_defaults(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns an experiment's own config with the keys that it lacks.

  Args:
    cls: a dataclass, as for `read`. Where defaults depend on other values, it
      has a static method `with_defaults(record)` of its own.
    config: the values.

  Returns:
    The values, and the default of each field without one that has a default.
    A new field's default must be what runs did before the field was there.
  """
  own = getattr(cls, 'with_defaults', dict)
  filled = dict(own(config))
  kinds = typing.get_type_hints(cls)
  for f in dataclasses.fields(cls):
    if f.name not in filled:
      if f.default is not dataclasses.MISSING:
        filled[f.name] = f.default
      elif f.default_factory is not dataclasses.MISSING:
        filled[f.name] = f.default_factory()
      else:
        continue
    value = filled[f.name]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
      filled[f.name] = dataclasses.asdict(value)
    elif isinstance(value, Mapping) and (
      nested := _dataclass_in(kinds[f.name])
    ):
      filled[f.name] = with_defaults(nested, value)
  return filled


def _dataclass_in(kind: Any) -> type | None:
  """Returns the dataclass in `Class` or `Class | None`."""
  is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
  for k in typing.get_args(kind) if is_union else (kind,):
    if dataclasses.is_dataclass(k) and isinstance(k, type):
      return k
  return None
