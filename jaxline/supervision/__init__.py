"""Guards a run from its start to its end: signals, losses, exit codes.

`preemption` handles signals, `nonfinite` checks each step, and `exits` has the
exit codes. `compilation_cache` keeps compiled programs, and `profiling` traces
steps. Read `exits` first.
"""

from jaxline import errors
from jaxline.base.keys import (
  COUNT,
  POSITIVE,
  RANGES,
  Check,
  Key,
  one_of,
  optional,
)
from jaxline.supervision import preemption

KEYS = (
  Key('on_nonfinite', None, optional(one_of('warn', 'raise', 'skip', 'ignore')),
      'Reaction to a loss or gradients that are not finite. `raise` ends the'
      ' run. `warn` warns once per scalar. `skip` (sharded style) changes no'
      ' weights and counts the step. `ignore` does nothing. None means `raise`'
      ' in the sharded style, `warn` in the per-device style.', 'program'),
  Key('max_nonfinite_steps', 10, COUNT,
      'With `skip`, end the run after this many nonfinite steps in a row.'),
  Key('recompute_interval', None, optional(COUNT),
      'Once in this many steps, compute a step twice and compare the results'
      ' bit by bit. A difference ends the run. It costs one step and a copy of'
      ' the state.', sharded=True),
  Key('profile_steps', None, optional(RANGES),
      'Steps to trace for TensorBoard and Perfetto. See docs/howto.md.'),
  Key('preemption_signals', '', Check(
        "names such as 'SIGUSR2,SIGXCPU', or ''", lambda x: errors.check_names(
          filter(None, str.split(x, ',')), preemption.SIGNALS, 'signal',
          'config.preemption_signals'), str),
      'Further signals on which the run saves and ends, in addition to SIGTERM,'
      ' SIGHUP and SIGUSR1.'),
  Key('watchdog_secs', 7200.0, optional(POSITIVE),
      "End the process and log every thread's stack after this many seconds"
      ' without a step or another sign of progress. Set it higher if a'
      ' compilation or an evaluation takes longer. None disables it.'),
)  # fmt: skip
