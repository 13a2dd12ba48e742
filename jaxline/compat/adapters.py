"""Turns what JAXline's loose contract allows into what the loops expect."""

from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from jaxline import base_config


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
  defaults = base_config.get_base_config()
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
