"""Maps errors to exit codes, which docs/reference/reliability.md explains.

`launch/slurm.sbatch` and `launch/tpu_vm.sh` restart a run after some of them.
"""

from collections.abc import Iterator
import contextlib
import os
import sys
import traceback
from typing import Any, NoReturn

from absl import logging

from jaxline import errors
from jaxline.metrics import lines as lines_lib
from jaxline.parallel import distributed
from jaxline.supervision import preemption

_JAXS_REMARK = 'JAX has removed its internal frames'


def exit_code_and_message(
  error: BaseException, *, others: bool
) -> tuple[int, str]:
  """Returns the exit code of an error and the text to print.

  The text is empty if the user needs Python's traceback. `others` is whether
  the run has other processes.
  """
  # Drop JAX's remark on its frames, since no frames are printed.
  notes = getattr(error, '__notes__', ())
  lines = [str(error), *(x for x in notes if _JAXS_REMARK not in x)]
  link = errors.link('\n'.join(lines))
  match error:
    case preemption.Preempted(code=int(code)):
      return code, '\n'.join(f'[jaxline] {x}' for x in lines)
    case SystemExit(code=int(code)) if code:
      return code, ''
    case SystemExit():  # Its exit code would mean that the run is complete.
      return 1, (
        f'{"".join(traceback.format_exception(error))}[jaxline] To end a run,'
        ' raise `experiment.StopTraining` instead of SystemExit.'
      )
    case errors.UsageError() | errors.RunError():
      return 1 + isinstance(error, errors.UsageError), ' '.join(lines) + link
    case _ if others and errors.is_lost_process(error):
      text = (
        '[jaxline] This process has lost another process, whose output may show'
        ' the cause. The same command resumes the run.'
        f' ({str(error).splitlines()[0]:.300})'
      )
      return errors.LOST_CODE, text + errors.link(text)
  if link:  # Python prints the notes of an error.
    error.add_note(link.strip())
  return 1, ''


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
  """Prints the error that leaves the block, and sets the exit code.

  In a run of several processes, this process exits at once, unless all exit
  after the same step.
  """
  try:
    yield
  except (Exception, SystemExit) as error:
    cause: Any = error
    # A signal becomes an ImportError in a C extension, or an error of a lock.
    while isinstance(cause, ImportError) or 'un-acquired lock' in str(cause):
      cause = cause.__cause__ or cause.__context__
    own = cause if isinstance(cause, preemption.Preempted) else error
    if distributed.has_others() and not getattr(own, 'is_joint', False):
      abort_process(own)
    code, text = exit_code_and_message(own, others=False)
    if not text:
      raise
    lines_lib.print_text(text, sys.stderr)
    end = SystemExit(text)
    end.code = code
    raise end from own


def abort_process(error: BaseException) -> NoReturn:
  """Ends this process at once, while other processes are still in the run.

  In a normal exit JAX would wait for the other processes, which wait for this
  one. The others notice its end by a lost connection or a missing heartbeat.
  """
  code, text = exit_code_and_message(error, others=True)
  if not (text or isinstance(error, SystemExit)):
    text = ''.join(traceback.format_exception(error))
  lines_lib.print_text(text, sys.stderr)
  with contextlib.suppress(OSError, ValueError):  # The streams may be closed.
    logging.flush()
    sys.stdout.flush()
  os._exit(code)


def abort_if_lost(kind: Any, error: BaseException | None, tb: Any) -> None:
  """Ends this process if it has lost another process of the run.

  Push it onto a `contextlib.ExitStack` whose other callbacks would hang.
  """
  if error and errors.is_lost_process(error) and distributed.has_others():
    abort_process(error)
