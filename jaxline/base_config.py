"""Defines every key of a run's config: default, valid values and purpose.

A config file starts from `base_config.get_base_config()` and sets the values
of its run. On the command line, `--config.KEY=VALUE` overrides a value, and
`--config.KEY=None` sets it to None. Give a tuple as
`--config.writers='("jsonl", "mine")'`, or repeat the flag;
`--config.writers=()` clears it. Keys that are not in the table belong to the
experiment. Misspelled keys, values of the wrong kind and contradictory values
are rejected before anything is compiled.

*Effect* tells how changing a key affects a run that you resume:

- **run**: the change affects the training result. The run is not resumed,
  unless `on_config_change` is `continue`.
- **program**: the run continues, and its step is recompiled.
- **none**: the run continues with the same compiled step.

Packages declare keys in `KEYS`: `grep -rn "Key('NAME'" jaxline` finds one.
`python -m jaxline.base_config` prints docs/reference/config.md.
"""

from collections.abc import Callable, Mapping
import functools
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

# Experiments use these names.
read = keys.read
with_defaults = keys.with_defaults
# Higher modules call these functions through this module.
changes = config_record.changes
flat = config_record.flat
programs_view = config_record.programs_view
recorded = config_record.recorded

_FILE = optional(text('a file name', is_path=True))
KEYS: tuple[Key, ...] = (
  Key('experiment_class', None, optional(text("'package.module:Class'")),
      'The experiment class to run. None if the program passes its class to'
      ' `platform.main`.', 'run'),
  Key('experiment_kwargs', {}, mapping('a dict of arguments'),
      'Arguments of the class, besides `mode`, `init_rng` and `run_config`. On'
      ' resume, only those in its CHANGEABLE_ON_RESUME may change.', 'run'),
  Key('checkpoint_dir', None,
      optional(text('a directory name', is_path=True)),
      "The run's directory: checkpoints, logs, resolved config. If it holds a"
      ' run, the run is resumed. None makes a new one in /tmp, readable only by'
      ' you. In all keys that name a file, `~` is the home directory.'),
  Key('training_steps', 10000, optional(keys.number(0)),
      'Number of training steps. With None, the run ends when `should_run_step`'
      ' of the experiment returns False.'),
  Key('max_seconds', None, optional(keys.POSITIVE),
      'Ends the run after this many seconds of training, added up over all'
      ' restarts. Start-up, compilation and evaluations do not count.'),
  Key('gradient_accumulation_steps', 1, COUNT,
      'Number of microbatches: a sharded step computes their gradients in turn'
      ' and adds them, which saves memory.', 'program', sharded=True),
  Key('topology', None, optional(text("a TPU topology, such as 'v4:4x4x4'")),
      'The target of --jaxline_mode=compile. None means the local devices.'),
  Key('num_slices', 1, COUNT, 'Number of slices of `topology`.'),
  Key('eval_initial_weights', False, keys.BOOLEAN,
      'Evaluate the initial weights (random, or from `restore_from`) before the'
      ' first step. In the per-device style, a separate evaluation initializes'
      ' its weights from a different key than training: see docs/walk.md.'),
  Key('one_off_evaluate', False, keys.BOOLEAN,
      'Evaluate the newest checkpoint once, then exit.'),
  Key('eval_steps', None, optional(text(
        "'all', or steps such as '1000,2000'", r'all|\d+(,\d+)*')),
      'Evaluate the checkpoints of these steps, or all kept ones, then exit.'
      ' None means to evaluate each new checkpoint of the training run.'),
  Key('decode', {}, mapping(
        "a dict of the keys below, such as {'prompts': 'FILE'}"),
      "--jaxline_mode=decode continues prompts with a run's weights."),
  Key('decode.prompts', None, _FILE,
      'A file with one prompt per line. In a .jsonl file, a line is'
      ' {"prompt": ...} or {"messages": [...]}. Blank lines are ignored. None'
      ' reads standard input, or asks at a terminal.'),
  Key('decode.output', None, _FILE,
      'The file for the continuations, one line of JSON per prompt. None means'
      ' a new decode/step_N.jsonl in `checkpoint_dir` or, if that cannot be'
      ' written, a new file in the working directory.'),
  Key('decode.batch_size', 8, COUNT,
      'Number of prompts to continue at once; 1 at a terminal.'),
  Key('decode.series', 'latest', keys.one_of('latest', 'best'),
      'The series of the checkpoint.'),
  Key('decode.step', None, optional(keys.integer(0)),
      'The step of the checkpoint. None means the newest.'),
  *(key for owner in (
      mesh, partitioning, devices, distributed, xla, compilation_cache, metrics,
      inputs, run_directory, supervision, prng) for key in owner.KEYS),
)  # fmt: skip
DEFAULTS = {key.name: key.default for key in KEYS}
config_record.TABLE.update((key.name, key) for key in KEYS)
# JAXline has these keys too. A JAXline program may give the others any meaning.
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
  """A config that accepts any type for keys that JAXline does not have."""

  def __setitem__(self, key: str, value: Any) -> None:
    try:
      if key in _OTHERS and key in self and isinstance(value, bool):
        raise TypeError  # A float key would turn True into 1.0.
      super().__setitem__(key, value)
    except TypeError:
      if key not in _OTHERS:
        raise
      with self.unlocked(), self.ignore_type():
        if not isinstance(value, os.PathLike):  # Flags take the value's type.
          del self[key]
        super().__setitem__(key, value)


def get_base_config() -> config_dict.ConfigDict:
  """Returns the base config: all keys with their defaults."""
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


_defaults = functools.cache(get_base_config)  # For checks; read only.

# Validation.


def validate_keys(
  base_cfg: Mapping[str, Any],
  config: Mapping[str, Any],
  base_filename: str = 'jaxline/base_config.py',
) -> None:
  """Checks that a config has the required keys and no misspelled ones.

  A key that is very similar to a required one counts as misspelled, unless it
  only adds words, as `num_training_steps` does. Others are yours.
  """
  for key in set(config) - set(base_cfg):
    for near in errors.nearest(key, base_cfg, cutoff=0.85):
      if not set(near.split('_')) <= set(key.split('_')):
        raise errors.UsageError(
          f'Unknown config key {key!r}. Did you mean {near!r}? The keys are'
          f' documented in {base_filename}. If the key is yours, rename it or'
          ' move it to experiment_kwargs.'
        )
  for key, required in base_cfg.items():
    if key not in config:
      raise errors.UsageError(
        f'Config key {key!r} is missing. Start the config from'
        f' get_base_config(); see {base_filename}.'
      )
    if all(isinstance(x, keys.MAPPINGS) for x in (required, config[key])):
      validate_keys(required, config[key], base_filename)


# (keys, a function that tells whether their values contradict, advice).
_CONTRADICTIONS: tuple[tuple[str, Callable[..., Any], str], ...] = (
  (
    'restore_rules restore_from',
    lambda rules, source: rules and not source,
    'The rules need a checkpoint: set restore_from to the run that has it.',
  ),
  (
    'checkpointer restore_from eval_steps early_stop.patience'
    ' early_stop.target',
    lambda kind, *others: kind == 'memory' and {*others} != {None},
    "The other keys need checkpoints on disk: set checkpointer = 'durable'.",
  ),
  (
    'early_stop.patience early_stop.target early_stop.metric'
    ' best_model_eval_metric',
    lambda patience, target, own, best: (
      (patience, target) != (None, None) and not (own or best)
    ),
    'Early stopping needs a metric: set early_stop.metric.',
  ),
  (
    'xla.pgle_profiling_runs xla.pgle_save xla.pgle_profile',
    lambda *ways: sum(map(bool, ways)) > 1,
    'Set only one: the first needs one run, the others need two in a row.',
  ),
)


def check_constraints(config: Mapping[str, Any]) -> None:
  """Raises UsageError if keys contradict each other."""
  for names, contradict, advice in _CONTRADICTIONS:
    values = {name: config_record.value(config, name) for name in names.split()}
    if contradict(*values.values()):
      given = ', '.join(f'config.{k} is {x!r}' for k, x in values.items())
      raise errors.UsageError(f'{given}. {advice}')


# In these sections, all keys are in the table.
_SECTIONS = ('decode', 'early_stop', 'xla')


def validate_config(
  config: config_dict.ConfigDict, *, may_be_own: bool = False
) -> None:
  """Raises UsageError for the first wrong key or value, with its name.

  With `may_be_own`, the values of keys that JAXline does not have are not
  checked, because the program may give such keys a different meaning.
  """
  # This finds misspelled keys of a section; `_problems` finds missing ones.
  sections = {
    name: {**_defaults()[name], **config[name]}
    for name in _SECTIONS
    if name in config and isinstance(config[name], keys.MAPPINGS)
  }
  validate_keys({**_defaults(), 'mesh': {}}, {**config, **sections})
  for name, problem in _problems(config).items():
    if not (may_be_own and name in _OTHERS):
      raise problem
  check_constraints(complete_config(config))


def _problems(config: Any) -> dict[str, errors.UsageError]:
  """Maps each top-level key whose value, or a subkey, is wrong to an error."""
  found: dict[str, errors.UsageError] = {}
  for key in KEYS:
    name = key.name.partition('.')[0]
    try:
      key.check.require(
        f'config.{key.name}', config_record.value(config, key.name)
      )
      if key.name in _SECTIONS and name in config:
        where = f'config.{name}'
        errors.check_names(config[name], _defaults()[name], 'key', where)
        if name != 'early_stop':  # It may be given in part, like `mesh`.
          validate_keys(_defaults()[name], config[name])
    except errors.UsageError as e:
      found.setdefault(name, e)
  return found


def own_keys(config: Any) -> dict[str, errors.UsageError]:
  """Maps each key with a program's own meaning to the error of our check."""
  return {k: x for k, x in _problems(config).items() if k in _OTHERS}


def complete_config(config: Any) -> Any:
  """Returns the config if it has all base keys; otherwise a completed copy.

  If keys are missing, the copy ignores non-finite losses, as JAXline does. The
  copy has defaults in place of a program's own values: see `programs_view`.
  """
  if not all(key in config for key in _defaults()):
    missing = {**get_base_config(), 'on_nonfinite': 'ignore'}
    config = config_dict.ConfigDict({**missing, **config})
  ours = {name: get_base_config()[name] for name in own_keys(config)}
  for key in _defaults().keys() - ours.keys():
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


# The file of a run's recorded config, in its directory.
RECORD = directory_lib.RECORD
# A config from a record has the defaults of these keys. A pickle and a compiled
# program can run code, and output replaces a file. Others concern one start.
_NOT_TAKEN = (
  *('checkpoint_allow_pickle', 'compilation_cache', 'decode.output'),
  *('distributed', 'on_config_change'),
)


def read_record(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the JSON of a run's recorded config, or raises UsageError."""
  try:
    raw = store_lib.at(directory, 'checkpoint_dir').read(RECORD)
    if raw is None:
      raise ValueError('no such file')
  except (OSError, ValueError) as e:
    raise errors.UsageError(
      f'{directory} is not the directory of a run: {RECORD}: {e}'
    ) from e
  return store_lib.checked(f'{directory}/{RECORD}', raw, config_record.RECORDED)


def recorded_config(
  directory: str | os.PathLike[str],
) -> config_dict.ConfigDict:
  """Returns the config of a run from its directory, which may have moved.

  It does not check the class that the config names, as
  `experiment.resolve_experiment_class` does. XLA settings that may name files
  or programs are left out, with a line on stderr.
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
      _link(config)
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise errors.UsageError(
      f'{directory} is not the directory of a run: {e}'
    ) from e
  if dropped:
    lines.warn_once(
      f'{place}: ignoring {dropped} of config.xla, which may name files or'
      ' programs. To use them, set XLA_FLAGS or LIBTPU_INIT_ARGS in the shell,'
      ' or override config.xla.pgle_save or pgle_profile.'
    )
  return config


def _link(config: config_dict.ConfigDict) -> None:
  """Restores references between keys; a record has only values.

  An experiment's key follows the base key of its name if both are equal. (The
  base key of `seed` is `random_seed`.)
  """
  own: Any = dict(config.experiment_kwargs).get('config')
  for name in [*own] if isinstance(own, config_dict.ConfigDict) else ():
    base = 'random_seed' if name == 'seed' else name
    is_same = base in config and own[name] == config[base]
    if is_same and isinstance(own[name], int | float | str):
      own[name] = config.get_oneway_ref(base)


def _fill(target: Any, values: Mapping[str, Any]) -> None:
  """Sets values in a config; the keys keep their types for flags."""
  for key, value in values.items():
    if isinstance(value, dict):
      if not isinstance(target.get(key), config_dict.ConfigDict):
        target[key] = config_dict.ConfigDict()
      _fill(target[key], value)
    else:
      target[key] = _as_tuples(value)
  open_nones(target)


def open_nones(config: config_dict.ConfigDict) -> None:
  """Lets flags replace each None of a config by a value of any type."""
  for key, value in config.items():
    if isinstance(value, config_dict.ConfigDict):
      open_nones(value)
    elif config.get_type(key) is type(None):
      config[key] = config_dict.placeholder(object)


def _as_tuples(value: Any) -> Any:
  return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


if __name__ == '__main__':
  print(f'# Config keys\n\n{__doc__}')
  print('| key | default | expected | effect | purpose |')
  print('|---|---|---|---|---|')
  for key in KEYS:
    print(
      f'| `{key.name}` | `{key.default!r}` | {key.check.expected} |'
      f' {key.effect} | {key.reason} |'
    )
