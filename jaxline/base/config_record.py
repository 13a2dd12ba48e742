"""Records a run's config as JSON, and compares two records.

Two records belong to the same run if all keys with the effect `run` have equal
values: see `base_config`, which fills `TABLE`.
"""

from collections.abc import Mapping
import json
import re
from typing import Any

from ml_collections import config_dict

from jaxline.base import keys
from jaxline.base import stateful

# Maps the name of every config key to its row.
TABLE: dict[str, keys.Key] = {}


def programs_view(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """Returns the program's own config: see `base_config.complete_config`."""
  return getattr(config, '_programs', config)


def recorded(config: config_dict.ConfigDict) -> dict[str, Any]:
  """Returns a config as JSON values; other types become text."""
  text = programs_view(config).to_json_best_effort()
  # The text of a function holds its address, which differs each time.
  return json.loads(re.sub(' at 0x[0-9a-f]+', '', text))


def flat(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Flattens nested values to dotted keys. An empty dict counts as a value."""
  found: dict[str, Any] = {}
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      found |= flat(value, f'{prefix}{key}.')
    else:
      found[f'{prefix}{key}'] = value
  return found


# A deeper config would exceed Python's recursion limit.
RECORDED = keys.record(
  lambda config: all(key.count('.') < 100 for key in flat(config)),
  experiment_kwargs=keys.optional(keys.mapping('a dict of arguments')),
)


def value(config: Any, name: str) -> Any:
  """Returns the value of a key, or its default if the config lacks it."""
  found = config
  for part in name.split('.'):
    if not isinstance(found, keys.MAPPINGS) or part not in found:
      return TABLE[name].default
    found = found[part]
  return found


def changes(
  old: Mapping[str, Any],
  new: Mapping[str, Any],
  declared: stateful.Stateful | type[stateful.Stateful],
) -> list[str]:
  """Returns a line for each difference that changes the training result.

  `old` and `new` are records. `declared`, the experiment or its class, has
  CHANGEABLE_ON_RESUME and CONFIG_CLASS.
  """
  before, now = (_identity(config, declared) for config in (old, new))
  return [
    f'{key}: {before.get(key, "absent")!r} then, {now.get(key, "absent")!r} now'
    for key in sorted(before.keys() | now.keys())
    # Compare text too, because a NaN differs from itself.
    if before.get(key) != now.get(key)
    and repr(before.get(key)) != repr(now.get(key))
    # A program may name its class or pass it to `platform.main`.
    and not (key == 'experiment_class' and None in (before[key], now[key]))
  ]


def _identity(
  config: Mapping[str, Any],
  declared: stateful.Stateful | type[stateful.Stateful],
) -> dict[str, Any]:
  """Returns the flat keys and values that identify a run."""
  names = [name for name, key in TABLE.items() if key.effect == 'run']
  values = {name: value(config, name) for name in names}
  kwargs = values['experiment_kwargs']
  if 'config' in kwargs:
    own = keys.with_defaults(declared.CONFIG_CLASS, kwargs['config'])
    values['experiment_kwargs'] = {**kwargs, 'config': own}
  # Convert defaults to JSON: tuples become lists.
  values = recorded(config_dict.ConfigDict(values, allow_dotted_keys=True))
  free = tuple(f'{path}.' for path in declared.CHANGEABLE_ON_RESUME)
  return {k: x for k, x in flat(values).items() if not f'{k}.'.startswith(free)}
