"""Every key of a run's config: its default, what is expected, what it is for.

A config file starts from `base_config.get_base_config()` and sets the numbers
of its run; `--config.KEY=VALUE` overrides one. A key that is not in the table
is the experiment's own. A misspelled key, a value of the wrong kind and values
that contradict each other are refused before anything is compiled.

*Effect* is what a change means for a run that is resumed:

- **run**: it would be another run. The checkpoint is refused, unless
  `on_config_change` is `continue`.
- **program**: the same run goes on, with a step that is compiled to another
  program.
- **none**: the same run goes on, with the same program.

The table is `KEYS` in `jaxline/base_config.py`; `python -m jaxline.base_config`
prints docs/reference/config.md.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import numbers
import operator
import os
import re
import types
import typing
from typing import Any, TypeVar

from ml_collections import config_dict

from jaxline import distributed
from jaxline import errors
from jaxline import mesh as mesh_lib
from jaxline import partitioning
from jaxline.checkpoint import store as store_lib
from jaxline.compat import prng
from jaxline.supervision import nonfinite
from jaxline.supervision import profiling

T = TypeVar('T')

# An unknown key that is at least as similar to a known one is a misspelling of
# it; any other is the experiment's own.
_MISSPELLED = 0.85
_MAPPINGS = (Mapping, config_dict.ConfigDict)


# Checks.


@dataclasses.dataclass(frozen=True)
class Check:
  """What the value of a key must be.

  Attributes:
    expected: the valid values in words, for messages and the documentation.
    accepts: returns False for a value that is not valid, or raises an error
      that says what is wrong with it.
    kind: the type of a value that replaces a default of None. With `object`, a
      value of any type replaces any default.
    is_path: the value names a file, and may begin with `~`.
  """

  expected: str
  accepts: Callable[[Any], bool | None]
  kind: type | None = None
  is_path: bool = False


def optional(check: Check) -> Check:
  """Accepts None, too."""
  return dataclasses.replace(
    check,
    expected=f'{check.expected}, or None',
    accepts=lambda x: x is None or check.accepts(x),
  )


def one_of(*valid: str) -> Check:
  """Accepts some words."""
  return Check(f'one of {valid}', lambda x: x in valid, str)


def text(expected: str, pattern: str = '.*', *, is_path: bool = False) -> Check:
  """Accepts text that matches a regular expression."""
  regex = re.compile(pattern, re.DOTALL)
  return Check(
    expected,
    lambda x: isinstance(x, str) and bool(regex.fullmatch(x)),
    str,
    is_path,
  )


def number(interval: str) -> Check:
  """Accepts a number in an interval: '[0, 1)' or 'integer [1, inf)'.

  Infinity and NaN are in no interval.
  """
  ((noun, left, low, high, right),) = re.findall(
    r'(integer )?([\[(])(.+),(.+)([\])])', interval
  )
  kind = numbers.Integral if noun else numbers.Real
  above = operator.ge if left == '[' else operator.gt
  below = operator.le if right == ']' else operator.lt
  return Check(
    f'an integer in {interval[8:]}' if noun else f'a number in {interval}',
    lambda x: (
      isinstance(x, kind)
      and not isinstance(x, bool)
      and bool(above(x, float(low)) and below(x, float(high)))
    ),
    int if noun else float,
  )


def mapping(expected: str) -> Check:
  """Accepts a dict."""
  return Check(expected, lambda x: isinstance(x, _MAPPINGS))


def _are_rules(x: Any) -> bool:
  """Whether `restore_rules` are pairs; raises where they are none."""
  return isinstance(x, list | tuple) and all(
    isinstance(source, str | None) and bool(re.compile(pattern))
    for pattern, source in x
  )


_BOOLEAN = Check('True or False', lambda x: isinstance(x, bool), bool)
_PROFILED = Check(
  "steps such as '10-15,1000'",
  lambda x: isinstance(x, str) and bool(profiling.parse(x)),
  str,
)
_SKIPPED = text("numbers of batches such as '7310-7312', or ''", r'[-\d,\s]*')
_FILE = optional(text('the name of a file', is_path=True))
# XLA silently ignores a file without this suffix.
_PROFILE = optional(
  text('the name of a file that ends in .pb', r'(.*\.pb)?', is_path=True)
)
_EVAL_STEPS = text("'all', or steps such as '1000,2000'", r'all|\d+(,\d+)*')
_INTERVAL = optional(number('(-inf, inf)'))
_INTERVAL_TYPE = optional(one_of('secs', 'steps'))
_POSITIVE = number('(0, inf)')
_COUNT = number('integer [1, inf)')
_RANDOM_MODE = one_of(*(mode.value for mode in prng.DistributedRNGMode))
# `partitioning.validate` checks them together.
_MESH_SIZE = Check('an integer in [1, inf), or -1', lambda x: True)
_RATIOS = Check(
  'a list of positive numbers',
  lambda x: isinstance(x, Sequence) and all(map(_POSITIVE.accepts, x)),
)
# JAX takes a signed integer of 64 bits.
_SEED = Check(
  'an integer from -2**63 to 2**63 - 1',
  lambda x: (
    number('integer (-inf, inf)').accepts(x) and bool(-(2**63) <= x < 2**63)
  ),
)


# The table.

RUN, PROGRAM, NONE = 'run', 'program', 'none'  # Effects of a change.


@dataclasses.dataclass(frozen=True)
class Key:
  """A key of the config.

  Attributes:
    name: with a dot where it belongs to a section, such as 'decode.step'.
    default: its value in the base config; {} is a section, or a dict with keys
      of the user's choice.
    check: what a value must be.
    reason: what the key is for, and why one would change it.
    effect: of a change on a run that is resumed: RUN, PROGRAM or NONE.
    sharded: only the sharded style reads it; the per-device style refuses a
      value that is not the default.
  """

  name: str
  default: Any
  check: Check
  reason: str
  effect: str = NONE
  sharded: bool = False


# fmt: off
KEYS = (
  Key('experiment_class', None, optional(text("'package.module:Class'")),
      'The class that `experiment.py` runs. None where that file gives its'
      ' class to `platform.main` itself.', RUN),
  Key('experiment_kwargs', {}, mapping('a dict of arguments'),
      'Arguments of its constructor, besides `mode`, `init_rng`, `run_config`.'
      ' What it declares as CHANGEABLE_ON_RESUME may change on resume.', RUN),
  Key('checkpoint_dir', None,
      optional(text('the name of a directory', is_path=True)),
      "The run's directory: checkpoints, logs, resolved config. A run in it is"
      ' resumed. None makes a fresh one in /tmp, which only this user can read.'
      ' In all keys that name a file, `~` is the home directory.'),
  Key('training_steps', 10000, optional(number('[0, inf)')),
      'Number of training steps. With None the run ends when `should_run_step`'
      ' of the experiment returns False.'),

  Key('mesh', {}, optional(mapping('a dict of some of the keys below')),
      'Sizes of the device mesh of a sharded step; their product is the number'
      ' of devices. See docs/sharding.md.', PROGRAM, sharded=True),
  Key('mesh.ici', {}, optional(mapping('a dict from axis to size')),
      'Sizes within a slice: devices that a fast network connects, such as a'
      ' TPU slice or the GPUs of a node. One may be -1: all that are left.',
      PROGRAM),
  Key('mesh.dcn', {}, optional(mapping('a dict from axis to size')),
      'Sizes across slices, which a slower network connects. The size of an'
      ' axis of the mesh is the product of both.', PROGRAM),
  *(Key(f'mesh.{network}.{axis}', -1 if axis == filled else 1, _MESH_SIZE,
        reason, PROGRAM)
    for network, filled in (('ici', 'data'), ('dcn', 'replica'))
    for axis, reason in (
      ('stage', 'Stages of a pipeline.'),
      ('replica', 'Splits the batch; each part holds all weights.'),
      ('data', 'Splits the batch and, with `fsdp`, the weights.'),
      ('mdl', 'Splits weights and activations, with `tp`.'))),
  Key('sharding', 'ddp', text(f'one of {tuple(partitioning.PRESETS)}'),
      'What a sharded step splits over the mesh: see `partitioning.PRESETS`.'
      ' With `ddp` only the batch.', PROGRAM, sharded=True),
  Key('sharding_rules', {}, optional(mapping(
        'a dict from logical axis to mesh axes')),
      "Changes to that preset, such as {'vocab': ('data',)}.",
      PROGRAM, sharded=True),
  Key('gradient_accumulation_steps', 1, _COUNT,
      'A sharded step computes its batch in this many parts and adds their'
      ' gradients: less memory for the same step.', PROGRAM, sharded=True),

  Key('topology', None, optional(text("a TPU topology, such as 'v4:4x4x4'")),
      'With --jaxline_mode=compile: for what. None is the devices here.'),
  Key('num_slices', 1, _COUNT, 'The number of slices of that topology.'),

  Key('distributed', 'auto', Check(
        f'one of {distributed.MODES}, or a dict with the keys'
        f' {tuple(distributed.VARIABLES)}', distributed.validate, object),
      'How several processes connect. `auto`: by a cluster that JAX knows or'
      " the launcher's variables; without either, this is one process. `off`:"
      ' this is one process. See docs/reference/launching.md.'),

  Key('xla', {}, mapping('a dict of the keys below'),
      'Settings of XLA, set before JAX starts: docs/reference/accelerators.md.',
      PROGRAM),
  Key('xla.latency_hiding_scheduler', None, optional(_BOOLEAN),
      'Communicate while computing. None leaves the choice to XLA.', PROGRAM),
  Key('xla.pgle_profiling_runs', 0, number('integer [0, inf)'),
      'GPU: profile this many runs of the step, then compile it again with'
      ' what was measured (automatic PGLE). 0 disables it.', PROGRAM),
  Key('xla.pgle_aggregation_percentile', None,
      optional(number('integer [0, 100]')),
      "The percentile of several measured times that counts. None is JAX's"
      ' default, 90.', PROGRAM),
  Key('xla.pgle_save', None, _PROFILE,
      'The same in two runs (manual PGLE): the first writes this file.',
      PROGRAM),
  Key('xla.pgle_save_steps', 10, _COUNT, 'How many steps that run profiles.'),
  Key('xla.pgle_profile', None, _PROFILE,
      'The file of the first run, in the second run.', PROGRAM),
  Key('xla.flags', {}, mapping(
        "a dict from flag to value, such as {'xla_dump_to': '/tmp'}"),
      'Further flags for XLA_FLAGS.', PROGRAM),
  Key('xla.tpu_flags', {}, mapping('a dict from flag to value'),
      "Further flags of libtpu, for LIBTPU_INIT_ARGS.", PROGRAM),

  Key('compilation_cache', 'auto', text(
        "'auto', 'off', or a directory with '/'", r'auto|off|.*/.*',
        is_path=True),
      'Where compiled programs are kept for the next start. `auto` is at most'
      " 4 GiB in the user's cache directory. A cache that JAX was given comes"
      ' first; with PGLE there is none.'),

  Key('interval_type', 'secs', _INTERVAL_TYPE,
      'The unit of all intervals; None means `secs`. An interval that is None'
      ' or negative disables the action, and 0 is every step.'),
  Key('logging_interval_type', None, _INTERVAL_TYPE,
      'Overrides `interval_type` for logging.'),
  Key('checkpoint_interval_type', None, _INTERVAL_TYPE,
      'Overrides `interval_type` for checkpoints.'),
  Key('eval_interval_type', None, _INTERVAL_TYPE,
      'Overrides `interval_type` for evaluation.'),
  Key('save_checkpoint_interval', 300, _INTERVAL,
      'How often a checkpoint is saved. 0 is never, as in JAXline.'),
  Key('log_tensors_interval', 60, _INTERVAL, 'How often a line is logged.'),
  Key('log_train_data_interval', 120.0, _INTERVAL,
      'How often scalars are written to TensorBoard and JSON lines.'),
  Key('eval_interval', 300, _INTERVAL,
      'How often training pauses to evaluate, in the mode `train_and_eval`.'),
  Key('periodic_action_growth_ratios', None, optional(_RATIOS),
      'Each ratio r adds the steps r, 10 r, 100 r ... to the intervals above:'
      ' [1, 2, 5] logs often at the start. Needs intervals in steps.'),
  Key('console', None, optional(one_of('live', 'plain', 'off')),
      'What the first process shows: `live` redraws one line of the terminal,'
      ' `plain` prints a line at each `log_tensors_interval`, `off` logs it.'
      ' None is `live` on a terminal, else `plain`; -v 1 adds the full log.'),
  Key('log_async', True, _BOOLEAN,
      'Make the log line on a background thread; False is for debugging.'),
  Key('writers', ('tensorboard', 'jsonl'), Check(
        'a list of names of writers',
        lambda x: isinstance(x, list | tuple)
        and all(isinstance(name, str) for name in x)),
      'What writes numbers, images and texts: `tensorboard`, `jsonl` (which'
      ' `jaxline.fit` and `.runs` read), or a name of `writers.register`.'),
  Key('log_all_hosts', False, _BOOLEAN,
      'Log on all hosts instead of only the first.'),
  Key('log_all_train_data', False, _BOOLEAN,
      'Keep the scalars of every step, and log them together at the interval.'),
  Key('recompute_interval', None, optional(_COUNT),
      'Every so many steps, a step is computed twice and the results compared'
      ' to the bit; a difference ends the run. It costs a step and a copy of'
      ' the state.', sharded=True),
  Key('fingerprint', True, _BOOLEAN,
      'Write a number of the scalars and the batch of every step, for'
      ' `runs replay` and `runs bisect`.'),

  Key('max_steps_in_flight', None, optional(_COUNT),
      'How many training steps may be queued on the devices: 2 keeps them busy,'
      ' 1 waits for each step. None is 2, or 1 for several CPU devices, whose'
      ' collectives can starve each other.'),
  Key('infeed_buffer_size', 3, number('integer [2, inf)'),
      'Sharded style: how many batches are read and put on the devices ahead of'
      ' the step, of small ones up to 32, of 16 MiB in all; those of an'
      ' evaluation are only read ahead.', sharded=True),
  Key('infeed_stall_secs', 60.0, optional(_POSITIVE),
      'When a step waits for its batch this many seconds, the log says so, and'
      ' what the input is reading. None disables the warning.', sharded=True),

  Key('save_initial_train_checkpoint', False, _BOOLEAN,
      'Save a checkpoint before the first step, for evaluators to start from.'),
  Key('train_checkpoint_all_hosts', False, _BOOLEAN,
      'Save on all hosts instead of only the first. Needs intervals in steps,'
      ' because the clocks of hosts differ.'),
  Key('best_checkpoint_all_hosts', False, _BOOLEAN,
      'The same for the series `best`.'),
  Key('checkpointer', 'durable', one_of('durable', 'memory'),
      'Where checkpoints are kept: `durable` is on disk, below'
      ' `checkpoint_dir`; `memory` is in this process, for tests and trials.'),
  Key('max_checkpoints_to_keep', 5, _COUNT,
      'How many of the newest checkpoints of a series are kept.'),
  Key('max_best_checkpoints_to_keep', None, optional(_COUNT),
      'The same for `best`. None means `max_checkpoints_to_keep` in the'
      ' per-device style and 1 in the sharded style.'),
  Key('keep_checkpoint_every_steps', None, optional(_COUNT),
      'Besides those, checkpoints of `latest` at least this many steps apart'
      ' are kept for ever. None keeps no others.'),
  Key('keep_checkpoint_every_hours', None, optional(_POSITIVE),
      'The same, in hours.'),
  Key('checkpoint_allow_pickle', False, _BOOLEAN,
      'True pickles what is neither array, JSON nor structure, and unpickles it'
      ' at restore, which runs any code in the file: only for your own files.'),
  Key('restore_from', None, optional(text("'DIR' or 'DIR:STEP'", is_path=True)),
      'Begin from a checkpoint of another run, if this run has none of its own.'
      ' Without rules all of it is restored: weights, optimizer, step, random'
      ' keys, position in the data.'),
  Key('restore_rules', (), Check(
        'pairs (regular expression, name or None), such as'
        " [('state/params/(.*)', r'state/params/\\1')]", _are_rules),
      'What to take from that checkpoint: an array whose whole name matches the'
      ' expression (the first match counts) gets the array `name` of it. With'
      ' None, or without a match, it keeps its initial value. The run starts at'
      ' step 0 with fresh keys and schedules: see docs/checkpoints.md.'),
  Key('on_config_change', 'raise', one_of('raise', 'continue'),
      'The latest checkpoint was made with another value of a key whose change'
      ' makes another run: `raise` lists these keys, `continue` restores it.'),

  Key('on_nonfinite', None, optional(one_of(*nonfinite.MODES)),
      'A step has a loss or gradients that are not finite: `raise` ends the'
      ' run. `warn` warns once for each scalar. `skip` (sharded style) changes'
      ' no weights and counts the step. `ignore` does nothing. None is `raise`'
      ' in the sharded style, `warn` in the per-device style.', PROGRAM),
  Key('max_nonfinite_steps', 10, _COUNT,
      'With `skip`, this many such steps in a row end the run.'),
  Key('profile_steps', None, optional(_PROFILED),
      'Steps to trace for TensorBoard and Perfetto. See docs/howto.md.'),
  Key('watchdog_secs', 7200.0, optional(_POSITIVE),
      "The process ends, with every thread's stack in the log, after this many"
      ' seconds without a step or another sign of progress, until it has ended.'
      ' Give more if a compilation or an evaluation takes longer. None disables'
      ' it.'),

  Key('eval_initial_weights', False, _BOOLEAN,
      'Evaluate the weights that the run begins with, also those that it has by'
      ' `restore_from`, before the first step. In the'
      ' per-device style an evaluation initialises weights of its own, from'
      ' another key than training: see docs/walk.md.'),
  Key('one_off_evaluate', False, _BOOLEAN,
      'Evaluate the newest checkpoint once, then end.'),
  Key('eval_steps', None, optional(_EVAL_STEPS),
      'Evaluate the checkpoints of these steps, or all that are kept, then end.'
      ' None evaluates each new checkpoint of the training run.'),
  Key('best_model_eval_metric', '', optional(
        text("the name of a scalar, or ''")),
      'The scalar of `evaluate` whose best value is kept as the series `best`.'
      ' Without one there is no such series.'),
  Key('best_model_eval_metric_higher_is_better', True, _BOOLEAN,
      'Whether the best value is the highest, or else the lowest.'),
  Key('early_stop', {}, mapping(
        "a dict of the keys below, such as {'patience': 5}"),
      'Ends training when a metric of the evaluation stops improving; beside a'
      ' process of the mode `eval`, at a save.'),
  Key('early_stop.patience', None, optional(_COUNT),
      'After how many evaluations in a row without a gain. None disables it.'),
  Key('early_stop.metric', '', text("the name of a scalar, or ''"),
      "The scalar of `evaluate`; '' is `best_model_eval_metric`, whose"
      ' `..._higher_is_better` counts for both.'),
  Key('early_stop.min_delta', 0.0, number('[0, inf)'),
      'A gain is more than this beyond the best value so far.'),

  Key('decode', {}, mapping(
        "a dict of the keys below, such as {'prompts': 'FILE'}"),
      '--jaxline_mode=decode: continues prompts by the weights of a run.'),
  Key('decode.prompts', None, _FILE,
      'A file with a prompt on each line, in a .jsonl as {"prompt": ...}; blank'
      ' lines are ignored. None reads standard input or asks at a terminal.'),
  Key('decode.output', None, _FILE,
      'The file for the continuations, a line of JSON for each prompt. None is'
      ' a new decode/step_N.jsonl below `checkpoint_dir` or, if that cannot be'
      ' written, a file in the working directory.'),
  Key('decode.batch_size', 8, _COUNT,
      'How many prompts are continued at once, except at a terminal.'),
  Key('decode.series', 'latest', one_of('latest', 'best'),
      'The series of the checkpoint.'),
  Key('decode.step', None, optional(number('integer [0, inf)')),
      'The step of the checkpoint. None is the newest.'),

  Key('skip_batches', '', _SKIPPED,
      'Batches to leave out, counted from 1: the step that would have had the'
      ' first of a range takes the batch after the last.', RUN, sharded=True),
  Key('random_seed', 42, _SEED,
      'The seed of all random numbers: split into the step key and the init'
      ' key.', RUN),
  Key('random_mode_train', 'unique_host_unique_device', _RANDOM_MODE,
      'How the keys of the devices differ in a training step of the per-device'
      ' style: see `prng.DistributedRNGMode`.', RUN),
  Key('random_mode_eval', 'same_host_same_device', _RANDOM_MODE,
      'The same in an evaluation.'),
  Key('legacy_random_seed_behavior', False, _BOOLEAN,
      'Use the unsplit key of the seed for both, as the first versions of'
      ' JAXline did.', RUN),
)
# fmt: on


def get_base_config() -> config_dict.ConfigDict:
  """Returns the config that every run starts from, with all its defaults."""
  config = config_dict.ConfigDict()
  for key in KEYS:
    value = key.default
    if key.check.kind is object or (value is None and key.check.kind):
      value = config_dict.FieldReference(value, field_type=key.check.kind)
    *sections, name = key.name.split('.')
    functools.reduce(operator.getitem, sections, config)[name] = value
  return config


# Validation.


def validate_keys(
  base_cfg: Mapping[str, Any],
  config: Mapping[str, Any],
  base_filename: str = 'jaxline/base_config.py',
) -> None:
  """Checks that a config has the keys it must have, spelled right.

  A key that is not in the base config is the experiment's own and passes,
  unless it is so similar to a base key that it must be a misspelling. A base
  key with further words, such as `num_training_steps`, is not.

  Args:
    base_cfg: the config with the required keys.
    config: the config to check.
    base_filename: where the keys are documented.

  Raises:
    errors.UsageError: a key is missing or misspelled.
  """
  for key in set(config) - set(base_cfg):
    for near in errors.nearest(key, base_cfg, cutoff=_MISSPELLED):
      if not set(near.split('_')) <= set(key.split('_')):
        raise errors.UsageError(
          f'Unknown config key {key!r}.{errors.did_you_mean(key, [near])} The'
          f' keys are documented in {base_filename}. A key of your own needs'
          ' another name, or a place in experiment_kwargs.'
        )
  for key, value in base_cfg.items():
    if key not in config:
      raise errors.UsageError(
        f'Config key {key!r} is missing. Start the config from'
        f' get_base_config(). The required keys are {sorted(base_cfg)}; see'
        f' {base_filename}.'
      )
    nested = config[key]
    if isinstance(value, config_dict.ConfigDict) and isinstance(
      nested, _MAPPINGS
    ):
      validate_keys(value, nested, base_filename)


def _value(config: Any, name: str) -> Any:
  """Returns the value of a key: its default where the config lacks it."""
  for part in name.split('.'):
    if not isinstance(config, _MAPPINGS) or part not in config:
      return next(key.default for key in KEYS if key.name == name)
    config = config[part]
  return config


# fmt: off
# Keys, whether their values contradict each other, and what to do then.
_CONTRADICTIONS: tuple[tuple[tuple[str, ...], Callable[..., Any], str], ...] = (
  (('train_checkpoint_all_hosts', 'checkpoint_interval_type', 'interval_type'),
   lambda is_on, own, common: is_on and (own or common) != 'steps',
   'Hosts would save different steps, because their clocks differ. Set'
   " checkpoint_interval_type = 'steps'."),
  (('restore_rules', 'restore_from'),
   lambda rules, source: rules and not source,
   'The rules need a checkpoint. Set restore_from to the run that has it.'),
  (('num_slices', 'topology'),
   lambda count, topology: count > 1 and not topology,
   'The slices are those of the topology. Set both, or neither.'),
  *((('checkpointer', key),
     lambda checkpointer, x: checkpointer == 'memory' and x is not None,
     "Checkpoints in memory do not support it. Set checkpointer = 'durable'.")
    for key in ('restore_from', 'eval_steps', 'early_stop.patience')),
  (('early_stop.patience', 'early_stop.metric', 'best_model_eval_metric'),
   lambda patience, own, best: patience is not None and not (own or best),
   'Set one of the metrics.'),
  *((('periodic_action_growth_ratios', key, 'interval_type'),
     lambda ratios, own, common: ratios and (own or common) != 'steps',
     "The ratios need intervals in steps. Set interval_type = 'steps'.")
    for key in ('logging_interval_type', 'checkpoint_interval_type')),
  (('xla.pgle_save', 'xla.pgle_profiling_runs', 'xla.pgle_profile'),
   lambda *ways: sum(map(bool, ways)) > 1,
   'Set one of them: pgle_profiling_runs measures and recompiles in one run;'
   ' pgle_save is for the first of two runs, pgle_profile for the second.'),
)
# fmt: on


def check_constraints(config: Mapping[str, Any]) -> None:
  """Refuses keys that contradict each other.

  Raises:
    errors.UsageError: naming the keys, their values and what to change.
  """
  for keys, is_wrong, advice in _CONTRADICTIONS:
    values = [_value(config, key) for key in keys]
    if is_wrong(*values):
      pairs = zip(keys, values, strict=True)
      given = ', '.join(f'config.{key} is {value!r}' for key, value in pairs)
      raise errors.UsageError(f'{given}. {advice}')
  mesh, preset, rules = (
    _value(config, key) for key in ('mesh', 'sharding', 'sharding_rules')
  )
  mesh_lib.check_sizes(mesh)
  partitioning.get_rules(preset, rules)


# The sections that have no keys but ours, and what may have been meant.
_SECTIONS = {
  'decode': '',
  'early_stop': '',
  'xla': ' A flag of XLA belongs into config.xla.flags, a flag of libtpu into'
  ' config.xla.tpu_flags.',
}


def validate_config(config: config_dict.ConfigDict) -> None:
  """Checks a whole config: its keys, each value, then contradictions.

  Raises:
    errors.UsageError: the first thing that is wrong, by name.
  """
  required = get_base_config()
  # A key that it leaves out has its default.
  required.mesh = required.early_stop = {}
  validate_keys(required, config)
  for key in KEYS:
    value, why = _value(config, key.name), ''
    try:
      is_valid = key.check.accepts(value) is not False
    except errors.UsageError:
      raise
    except (TypeError, ValueError, re.error) as e:
      is_valid, why = False, f' ({e})'
    if not is_valid:
      raise errors.UsageError(
        f'config.{key.name} is {value!r}{why}; expected {key.check.expected}.'
        ' See jaxline/base_config.py.'
      )
  for name, note in _SECTIONS.items():
    valid = list(get_base_config()[name])
    errors.check_names(config[name], valid, 'key', f'config.{name}', note)
  check_constraints(config)


def complete_config(config: Any) -> Any:
  """Returns a config that has every key of the base config.

  Args:
    config: a run's config, which a program may have made without
      `get_base_config`.

  Returns:
    The config itself if it lacks nothing. Otherwise a copy with the defaults of
    the missing keys, to which later changes of the config do not get; a config
    without `on_nonfinite` ignores it.
  """
  defaults = get_base_config()
  defaults.on_nonfinite = 'ignore'
  missing = [key for key in defaults if key not in config]
  if not missing:
    return config
  complete = config_dict.ConfigDict(config)
  with complete.unlocked():
    for key in missing:
      complete[key] = defaults[key]
  return complete


# What else derives from the table.


def expand_paths(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """Returns a copy of a run's config in which `~` is the home directory."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    for key in KEYS:
      if key.check.is_path and (path := _value(config, key.name)):
        path = os.path.expanduser(path)
        config.update_from_flattened_dict({key.name: path})
  return config


def changes(
  old: Mapping[str, Any], new: Mapping[str, Any], experiment_class: Any
) -> list[str]:
  """Returns a line for each key whose change makes another run.

  Args:
    old: the config of the run so far, as `recorded` returns it.
    new: the config of the run that resumes it, likewise.
    experiment_class: has CHANGEABLE_ON_RESUME and CONFIG_CLASS.
  """
  before = _identity(old, experiment_class)
  now = _identity(new, experiment_class)
  return [
    f'{key}: {before.get(key, "absent")!r} then, {now.get(key, "absent")!r} now'
    for key in sorted(before.keys() | now.keys())
    # A NaN differs from itself.
    if before.get(key) != now.get(key)
    and repr(before.get(key)) != repr(now.get(key))
    # A program may name its class, or hand it to `platform.main`.
    and not (key == 'experiment_class' and None in (before[key], now[key]))
  ]


def _identity(config: Mapping[str, Any], declared: Any) -> dict[str, Any]:
  """Returns the flat keys whose change makes another run, with their values.

  A key that the config lacks, since it is newer than the config, has its
  default.
  """
  values = {k.name: _value(config, k.name) for k in KEYS if k.effect == RUN}
  kwargs = values['experiment_kwargs']
  if 'config' in kwargs:
    own = with_defaults(declared.CONFIG_CLASS, kwargs['config'])
    values['experiment_kwargs'] = {**kwargs, 'config': own}
  # Defaults as a record holds them: tuples are lists there.
  values = recorded(config_dict.ConfigDict(values, allow_dotted_keys=True))
  return {
    key: value
    for key, value in flat(values).items()
    if not any(
      f'{key}.'.startswith(f'{path}.') for path in declared.CHANGEABLE_ON_RESUME
    )
  }


def flat(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns nested values by dotted key. An empty dict is a value."""
  found: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      found |= flat(value, f'{prefix}{key}.')
    else:
      found[f'{prefix}{key}'] = value
  return found


def recorded(config: config_dict.ConfigDict) -> dict[str, Any]:
  """Returns a config as JSON values, with what JSON lacks as text."""
  # A function has its name there; its address differs each time.
  return json.loads(re.sub(' at 0x[0-9a-f]+', '', config.to_json_best_effort()))


# The config that a run has recorded in its directory.

RECORD = 'config.json'

# Keys that are not taken from a record. A pickle and a compiled program can run
# code, and the file is replaced; the others are about one start.
_NOT_TAKEN = (
  'checkpoint_allow_pickle',
  'compilation_cache',
  'decode.output',
  'distributed',
  'on_config_change',
)


def read_record(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the JSON of a run's config.

  Raises:
    errors.UsageError: the directory has no such file.
  """
  try:
    text = store_lib.at(directory, 'checkpoint_dir').read(RECORD)
    if text is None:
      raise ValueError('there is no such file')
    if isinstance(record := json.loads(text), dict):
      return record
    raise ValueError('no JSON object')
  except (OSError, ValueError) as e:
    raise errors.UsageError(
      f'{directory} is no directory of a run: {RECORD}: {e}'
    ) from e


def recorded_config(
  directory: str | os.PathLike[str],
) -> config_dict.ConfigDict:
  """Returns the config of a run, from its directory.

  Lists are tuples in it, and keys that could run code have their defaults. The
  class that it names must still be checked: `adapters.resolve_experiment_class`
  does that.

  Args:
    directory: the run's, which may have been moved.

  Raises:
    errors.UsageError: the directory is not that of a run.
  """
  place = store_lib.at(os.path.expanduser(directory)).url
  record = read_record(place)
  config = get_base_config()
  try:
    with config.ignore_type():
      _fill(config, record)
      config.checkpoint_dir = place
      for key in KEYS:
        if key.name in _NOT_TAKEN and _value(config, key.name) != 'off':
          config.update_from_flattened_dict({key.name: key.default})
  except (KeyError, TypeError, ValueError) as e:
    raise errors.UsageError(f'{directory} is no directory of a run: {e}') from e
  return config


def _fill(target: Any, values: Mapping[str, Any]) -> None:
  """Sets values in a config, whose keys keep their types for flags."""
  for key, value in values.items():
    if isinstance(value, dict):
      if not isinstance(target.get(key), config_dict.ConfigDict):
        target[key] = config_dict.ConfigDict()
      _fill(target[key], value)
    elif value is None and key not in target:
      target[key] = config_dict.placeholder(object)
    else:
      target[key] = _as_tuples(value)


def _as_tuples(value: Any) -> Any:
  return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


# An experiment's own config.


def check_numbers(config: Any, ranges: Mapping[str, str]) -> None:
  """Refuses values of an experiment's own config that no run can mean.

  For the `__post_init__` of a dataclass that `read` builds.

  Args:
    config: what has the values as attributes.
    ranges: attribute -> its interval, as for `number`.

  Raises:
    ValueError: the first that is not, by name.
  """
  for key, interval in ranges.items():
    value, check = getattr(config, key), number(interval)
    if not check.accepts(value):
      raise ValueError(f'{key} is {value!r}; expected {check.expected}.')


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
  fields = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
  errors.check_names(config, fields, 'key', cls.__name__)
  kinds = typing.get_type_hints(cls)
  values = {}
  for key in config:
    value, nested = config[key], _dataclass_in(kinds[key])
    if isinstance(value, _MAPPINGS) and nested:
      value = read(nested, value)
    elif isinstance(value, config_dict.ConfigDict):
      value = value.to_dict()
    values[key] = value
  try:
    return cls(**values)
  except (TypeError, ValueError) as e:
    raise errors.UsageError(f'{cls.__name__}: {e}') from e


def with_defaults(cls: Any, config: Any) -> Any:
  """Returns an experiment's own config with the keys that it lacks.

  A new field's default must be what runs did before the field was there.

  Args:
    cls: a dataclass, as for `read`, or None. Its own `with_defaults(record)`,
      if it has one, may leave out keys whose change makes no other run.
    config: the values.
  """
  if cls is None or not isinstance(config, Mapping):
    return config
  filled = dict(getattr(cls, 'with_defaults', dict)(config))
  kinds = typing.get_type_hints(cls)
  for f in dataclasses.fields(cls):
    if f.name in filled:
      nested = _dataclass_in(kinds[f.name])
      filled[f.name] = with_defaults(nested, filled[f.name])
    elif f.default is not dataclasses.MISSING:
      filled[f.name] = f.default
    elif f.default_factory is not dataclasses.MISSING:
      filled[f.name] = f.default_factory()
  return filled


def _dataclass_in(kind: Any) -> Any:
  """Returns the dataclass in `Class` or `Class | None`, or None."""
  is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
  kinds = typing.get_args(kind) if is_union else (kind,)
  return next(filter(dataclasses.is_dataclass, kinds), None)


if __name__ == '__main__':
  print(f'# Config keys\n\n{__doc__}')
  print('| key | default | expected | effect | what it is for |')
  print('|---|---|---|---|---|')
  for key in KEYS:
    print(
      f'| `{key.name}` | `{key.default!r}` | {key.check.expected} |'
      f' {key.effect} | {key.reason} |'
    )
