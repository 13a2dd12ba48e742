"""How much host memory is left for a second copy of the state."""

import contextlib
import pathlib
import re

# Controllers, as /proc/self/cgroup names them -> where their groups are, and
# the names of the files with the limit, what is used, and what of it can go.
_CGROUPS = {
  '': ('', 'memory.max', 'memory.current', 'inactive_file'),
  'memory': (
    'memory',
    'memory.limit_in_bytes',
    'memory.usage_in_bytes',
    'total_inactive_file',
  ),
}


def free_memory(top: str = '/') -> int:
  """Returns how many bytes of host memory this process may still take.

  That is the least of what is left of the machine's memory and of the limit of
  each control group that the process is in; 0 where it is unknown.

  Args:
    top: the directory with `proc` and `sys`.
  """
  proc, groups = pathlib.Path(top, 'proc'), pathlib.Path(top, 'sys/fs/cgroup')
  try:
    free = [1024 * _number(proc / 'meminfo', 'MemAvailable:')]
    for line in (proc / 'self/cgroup').read_text().splitlines():
      _, controllers, path = line.split(':', 2)
      if controllers not in _CGROUPS:
        continue
      folder, limit, used, cached = _CGROUPS[controllers]
      group = groups / folder / path.lstrip('/')
      # Parents limit it too. A container may see its own group as the topmost
      # one, whatever the path is.
      for at in (group, *group.parents):
        # The machine's own group has no such files, and 'max' is no limit.
        with contextlib.suppress(OSError, ValueError):
          left = _number(at / limit) - _number(at / used)
          free.append(left + _number(at / 'memory.stat', f'{cached} '))
  except (OSError, ValueError):
    return 0
  return max(0, min(free))


def _number(path: pathlib.Path, name: str = '') -> int:
  """Returns the number that follows a name at the beginning of a line."""
  match = re.search(rf'^{name}\s*(\d+)', path.read_text(), re.MULTILINE)
  if match is None:
    raise ValueError(f'{path} has no number after {name!r}.')
  return int(match[1])
