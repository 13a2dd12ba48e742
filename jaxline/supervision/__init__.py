"""Guards a run from its start to its end: signals, losses, exit codes.

`preemption` has the signals, `nonfinite` the guard of each step, `exits` the
table of exit codes. `compilation_cache` and `profiling` serve a start. Read
`exits` first.
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
      'A step has a loss or gradients that are not finite: `raise` ends the'
      ' run. `warn` warns once for each scalar. `skip` (sharded style) changes'
      ' no weights and counts the step. `ignore` does nothing. None is `raise`'
      ' in the sharded style, `warn` in the per-device style.', 'program'),
  Key('max_nonfinite_steps', 10, COUNT,
      'With `skip`, this many such steps in a row end the run.'),
  Key('recompute_interval', None, optional(COUNT),
      'Every so many steps, a step is computed twice and the results compared'
      ' to the bit; a difference ends the run. It costs a step and a copy of'
      ' the state.', sharded=True),
  Key('profile_steps', None, optional(RANGES),
      'Steps to trace for TensorBoard and Perfetto. See docs/howto.md.'),
  Key('preemption_signals', '', Check(
        "names such as 'SIGUSR2,SIGXCPU', or ''", lambda x: errors.check_names(
          filter(None, str.split(x, ',')), preemption.SIGNALS, 'signal',
          'config.preemption_signals'), str),
      'Further signals on which the run saves and ends, as it does on SIGTERM,'
      ' SIGHUP and SIGUSR1.'),
  Key('watchdog_secs', 7200.0, optional(POSITIVE),
      "The process ends, with every thread's stack in the log, after this many"
      ' seconds without a step or another sign of progress, until it has ended.'
      ' Give more if a compilation or an evaluation takes longer. None disables'
      ' it.'),
)  # fmt: skip
