"""Every key of a run's config: its default, what is expected, what it is for.

A config file starts from `base_config.get_base_config()` and sets the numbers
of its run; `--config.KEY=VALUE` overrides one, and `--config.KEY=None` makes it
None. A tuple is given as `--config.writers='("jsonl", "mine")'` or by repeating
the flag, and `--config.writers=()` clears it. A key that is not in the table is
the experiment's own. A misspelled key, a value of the wrong kind and values
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

from collections.abc import Callable, Mapping
import os
from typing import Any

from ml_collections import config_dict

from jaxline import errors
from jaxline import inputs
from jaxline import metrics
from jaxline import run_directory
from jaxline import supervision
from jaxline.base import config_record
from jaxline.base import keys
from jaxline.base import xla
from jaxline.base.keys import COUNT, Key, mapping, optional, text
from jaxline.metrics import lines
from jaxline.parallel import devices
from jaxline.parallel import distributed
from jaxline.parallel import mesh
from jaxline.parallel import partitioning
from jaxline.parallel import prng
from jaxline.run_directory import directory as directory_lib
from jaxline.run_directory import store as store_lib
from jaxline.supervision import compilation_cache

# For experiments.
read = keys.read
with_defaults = keys.with_defaults
# Modules above this one call these by its name.
changes = config_record.changes
flat = config_record.flat
programs_view = config_record.programs_view
recorded = config_record.recorded

_FILE = optional(text('the name of a file', is_path=True))
KEYS: tuple[Key, ...] = (
  Key('experiment_class', None, optional(text("'package.module:Class'")),
      'The class that `experiment.py` runs. None where that file gives its'
      ' class to `platform.main` itself.', 'run'),
  Key('experiment_kwargs', {}, mapping('a dict of arguments'),
      'Arguments of its constructor, besides `mode`, `init_rng`, `run_config`.'
      ' What it declares as CHANGEABLE_ON_RESUME may change on resume.', 'run'),
  Key('checkpoint_dir', None,
      optional(text('the name of a directory', is_path=True)),
      "The run's directory: checkpoints, logs, resolved config. A run in it is"
      ' resumed. None makes a fresh one in /tmp, which only this user can read.'
      ' In all keys that name a file, `~` is the home directory.'),
  Key('training_steps', 10000, optional(keys.number(0)),
      'Number of training steps. With None the run ends when `should_run_step`'
      ' of the experiment returns False.'),
  Key('max_seconds', None, optional(keys.POSITIVE),
      'Seconds of training after which the run ends as by `training_steps`.'
      ' Start-up, compilation and evaluations do not count; those before the'
      ' checkpoint that a run is resumed from do.'),
  Key('gradient_accumulation_steps', 1, COUNT,
      'A sharded step computes its batch in this many parts and adds their'
      ' gradients: less memory for the same step.', 'program', sharded=True),
  Key('topology', None, optional(text("a TPU topology, such as 'v4:4x4x4'")),
      'With --jaxline_mode=compile: for what. None is the devices here.'),
  Key('num_slices', 1, COUNT, 'The number of slices of that topology.'),
  Key('eval_initial_weights', False, keys.BOOLEAN,
      'Evaluate the weights that the run begins with, also those that it has by'
      ' `restore_from`, before the first step. In the per-device style an'
      ' evaluation initialises weights of its own, from another key than'
      ' training: see docs/walk.md.'),
  Key('one_off_evaluate', False, keys.BOOLEAN,
      'Evaluate the newest checkpoint once, then end.'),
  Key('eval_steps', None, optional(text(
        "'all', or steps such as '1000,2000'", r'all|\d+(,\d+)*')),
      'Evaluate the checkpoints of these steps, or all that are kept, then end.'
      ' None evaluates each new checkpoint of the training run.'),
  Key('decode', {}, mapping(
        "a dict of the keys below, such as {'prompts': 'FILE'}"),
      '--jaxline_mode=decode: continues prompts by the weights of a run.'),
  Key('decode.prompts', None, _FILE,
      'A file with a prompt on each line, in a .jsonl as {"prompt": ...} or'
      ' {"messages": [...]}; blank lines are ignored. None reads standard input'
      ' or asks at a terminal.'),
  Key('decode.output', None, _FILE,
      'The file for the continuations, a line of JSON for each prompt. None is'
      ' a new decode/step_N.jsonl below `checkpoint_dir` or, if that cannot be'
      ' written, a file in the working directory.'),
  Key('decode.batch_size', 8, COUNT,
      'How many prompts are continued at once, except at a terminal.'),
  Key('decode.series', 'latest', keys.one_of('latest', 'best'),
      'The series of the checkpoint.'),
  Key('decode.step', None, optional(keys.integer(0)),
      'The step of the checkpoint. None is the newest.'),
  *(key for owner in (
      mesh, partitioning, devices, distributed, xla, compilation_cache, metrics,
      inputs, run_directory, supervision, prng) for key in owner.KEYS),
)  # fmt: skip
DEFAULTS = {key.name: key.default for key in KEYS}
config_record.TABLE.update((key.name, key) for key in KEYS)
# Those that JAXline has too; a program of it may use the others for itself.
_JAXLINES = """experiment_kwargs training_steps interval_type log_async
  save_checkpoint_interval log_tensors_interval log_all_hosts
  log_train_data_interval log_all_train_data logging_interval_type
  periodic_action_growth_ratios checkpoint_interval_type
  save_initial_train_checkpoint eval_initial_weights one_off_evaluate
  max_checkpoints_to_keep random_seed random_mode_train random_mode_eval
  legacy_random_seed_behavior best_model_eval_metric
  best_model_eval_metric_higher_is_better train_checkpoint_all_hosts
  best_checkpoint_all_hosts"""
_OTHERS = {part for name in DEFAULTS for part in name.split('.')}
_OTHERS -= {*_JAXLINES.split()}


class _BaseConfig(config_dict.ConfigDict):
  """Takes a value of any type for a key that JAXline does not have."""

  def __setitem__(self, key: str, value: Any) -> None:
    try:
      if key in _OTHERS and key in self and isinstance(value, bool):
        raise TypeError  # It would become 1.0 where a number is expected.
      super().__setitem__(key, value)
    except TypeError:
      if key not in _OTHERS:
        raise
      with self.unlocked(), self.ignore_type():
        if not isinstance(value, os.PathLike):  # A flag has the value's type.
          del self[key]
        super().__setitem__(key, value)


def get_base_config() -> config_dict.ConfigDict:
  """Returns the config that every run starts from, with all its defaults."""
  config = _BaseConfig()
  for key in KEYS:
    value, check = key.default, key.check
    if value == {} and key.name in _OTHERS:
      value = _BaseConfig()
    elif check.kind and (
      value is None or check.is_path or check.kind is object
    ):
      value = config_dict.FieldReference(value, field_type=check.kind)
    config.update_from_flattened_dict({key.name: value})
  return config


# Validation.


def validate_keys(
  base_cfg: Mapping[str, Any],
  config: Mapping[str, Any],
  base_filename: str = 'jaxline/base_config.py',
) -> None:
  """Checks that a config has the required keys and no misspelled ones.

  Another key is the experiment's own, unless it is very similar to a required
  key and not that key with further words, such as `num_training_steps`.
  """
  for key in set(config) - set(base_cfg):
    for near in errors.nearest(key, base_cfg, cutoff=0.85):
      if not set(near.split('_')) <= set(key.split('_')):
        raise errors.UsageError(
          f'Unknown config key {key!r}. Did you mean {near!r}? The keys are'
          f' documented in {base_filename}. A key of your own needs another'
          ' name, or a place in experiment_kwargs.'
        )
  for key, required in base_cfg.items():
    if key not in config:
      raise errors.UsageError(
        f'Config key {key!r} is missing. Start the config from'
        f' get_base_config(); see {base_filename}.'
      )
    if all(isinstance(x, keys.MAPPINGS) for x in (required, config[key])):
      validate_keys(required, config[key], base_filename)


# Names of keys, whether their values contradict each other, and what to do.
_CONTRADICTIONS: tuple[tuple[str, Callable[..., Any], str], ...] = (
  (
    'restore_rules restore_from',
    lambda rules, source: rules and not source,
    'The rules need a checkpoint. Set restore_from to the run that has it.',
  ),
  (
    'checkpointer restore_from eval_steps early_stop.patience'
    ' early_stop.target',
    lambda kind, *others: kind == 'memory' and {*others} != {None},
    "The others read checkpoints on disk. Set checkpointer = 'durable'.",
  ),
  (
    'early_stop.patience early_stop.target early_stop.metric'
    ' best_model_eval_metric',
    lambda patience, target, own, best: (
      (patience, target) != (None, None) and not (own or best)
    ),
    'Early stopping compares a metric. Set early_stop.metric.',
  ),
  (
    'xla.pgle_profiling_runs xla.pgle_save xla.pgle_profile',
    lambda *ways: sum(map(bool, ways)) > 1,
    'Set one: the first is for one run, the others are for two in a row.',
  ),
)


def check_constraints(config: Mapping[str, Any]) -> None:
  """Refuses keys that contradict each other."""
  for names, contradict, advice in _CONTRADICTIONS:
    values = {name: config_record.value(config, name) for name in names.split()}
    if contradict(*values.values()):
      given = ', '.join(f'config.{k} is {x!r}' for k, x in values.items())
      raise errors.UsageError(f'{given}. {advice}')


# Those whose keys are all in the table.
_SECTIONS = ('decode', 'early_stop', 'xla')


def validate_config(
  config: config_dict.ConfigDict, *, may_be_own: bool = False
) -> None:
  """Raises a UsageError with the first thing that is wrong, by name.

  With `may_be_own` a wrong value of a key that JAXline does not have is the
  program's own.
  """
  defaults = get_base_config()
  # This finds misspelled keys of a section; `_problems` finds missing ones.
  sections = {
    name: {**defaults[name], **config[name]}
    for name in _SECTIONS
    if name in config and isinstance(config[name], keys.MAPPINGS)
  }
  validate_keys({**defaults, 'mesh': {}}, {**config, **sections})
  for name, problem in _problems(config).items():
    if not (may_be_own and name in _OTHERS):
      raise problem
  check_constraints(complete_config(config))


def _problems(config: Any) -> dict[str, errors.UsageError]:
  """Maps each key that is wrong, itself or below it, to the error."""
  found: dict[str, errors.UsageError] = {}
  defaults = get_base_config()
  for key in KEYS:
    name = key.name.partition('.')[0]
    try:
      key.check.require(
        f'config.{key.name}', config_record.value(config, key.name)
      )
      if key.name in _SECTIONS and name in config:
        where = f'config.{name}'
        errors.check_names(config[name], defaults[name], 'key', where)
        if name != 'early_stop':  # A part of it may be given, as of `mesh`.
          validate_keys(defaults[name], config[name])
    except errors.UsageError as e:
      found.setdefault(name, e)
  return found


def own_keys(config: Any) -> dict[str, errors.UsageError]:
  """Maps each key that is a program's own to the error of our check."""
  return {k: x for k, x in _problems(config).items() if k in _OTHERS}


def complete_config(config: Any) -> Any:
  """Returns a config with all base keys: itself, or a copy with the defaults.

  A copy of a config that lacks keys ignores losses that are not finite. A copy
  has the defaults in place of a program's own values: see `programs_view`.
  """
  defaults = get_base_config()
  if not all(key in config for key in defaults):
    defaults.on_nonfinite = 'ignore'
    config = config_dict.ConfigDict({**defaults, **config})
  ours = {name: get_base_config()[name] for name in own_keys(config)}
  for key in defaults.keys() - ours.keys():
    if isinstance(path := config[key], os.PathLike):
      ours[key] = os.fspath(path)
  if not ours:
    return config
  copy = config_dict.ConfigDict({**config, **ours})
  object.__setattr__(copy, '_programs', config)  # This sets no key.
  return copy


def expand_paths(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """Returns a copy of a run's config in which `~` is the home directory."""
  config = config.copy_and_resolve_references()
  with config.unlocked(), config.ignore_type():
    for key in KEYS:
      path = key.check.is_path and config_record.value(config, key.name)
      if path and isinstance(path, str | os.PathLike):
        config.update_from_flattened_dict({key.name: os.path.expanduser(path)})
  return config


# The config that a run has recorded in its directory.
RECORD = directory_lib.RECORD
# Keys that are not taken from a record. A pickle and a compiled program can run
# code, and the file is replaced; the others are about one start.
_NOT_TAKEN = (
  *('checkpoint_allow_pickle', 'compilation_cache', 'decode.output'),
  *('distributed', 'on_config_change'),
)


def read_record(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the JSON of a run's config, or raises UsageError."""
  try:
    raw = store_lib.at(directory, 'checkpoint_dir').read(RECORD)
    if raw is None:
      raise ValueError('there is no such file')
  except (OSError, ValueError) as e:
    raise errors.UsageError(
      f'{directory} is no directory of a run: {RECORD}: {e}'
    ) from e
  return store_lib.checked(f'{directory}/{RECORD}', raw, config_record.RECORDED)


def recorded_config(
  directory: str | os.PathLike[str],
) -> config_dict.ConfigDict:
  """Returns the config of a run from its directory, which may have moved.

  The class that it names is not checked: `experiment.resolve_experiment_class`
  does that. Of the settings of XLA those that name files or programs are left
  out, with a line on stderr.
  """
  place = store_lib.at(os.path.expanduser(directory)).url
  record = read_record(place) | {'checkpoint_dir': place}
  config = get_base_config()
  try:
    with config.ignore_type():
      _fill(config, record)
      for name in _NOT_TAKEN:
        if config_record.value(config, name) != 'off':
          config.update_from_flattened_dict({name: DEFAULTS[name]})
      dropped = xla.drop_places(config.xla)
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise errors.UsageError(f'{directory} is no directory of a run: {e}') from e
  if dropped:
    lines.warn_once(
      f'{place}: of config.xla, {dropped} may name files or programs and are'
      ' left out. Set XLA_FLAGS or LIBTPU_INIT_ARGS in the shell to use them,'
      ' or override config.xla.pgle_save or pgle_profile.'
    )
  return config


def _fill(target: Any, values: Mapping[str, Any]) -> None:
  """Sets values in a config, whose keys keep their types for flags."""
  for key, value in values.items():
    if isinstance(value, dict):
      if not isinstance(target.get(key), config_dict.ConfigDict):
        target[key] = config_dict.ConfigDict()
      _fill(target[key], value)
    else:
      target[key] = _as_tuples(value)
  open_nones(target)


def open_nones(config: config_dict.ConfigDict) -> None:
  """Lets a flag replace each None of a config by a value of any type."""
  for key, value in config.items():
    if isinstance(value, config_dict.ConfigDict):
      open_nones(value)
    elif config.get_type(key) is type(None):
      config[key] = config_dict.placeholder(object)


def _as_tuples(value: Any) -> Any:
  return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


if __name__ == '__main__':
  print(f'# Config keys\n\n{__doc__}')
  print('| key | default | expected | effect | what it is for |')
  print('|---|---|---|---|---|')
  for key in KEYS:
    print(
      f'| `{key.name}` | `{key.default!r}` | {key.check.expected} |'
      f' {key.effect} | {key.reason} |'
    )
