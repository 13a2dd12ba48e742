"""Maps an error to its exit code, which docs/reference/reliability.md explains.

`launch/slurm.sbatch` and `launch/tpu_vm.sh` start a run again after some codes.
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
  """Returns the exit code for an error, and the text to print.

  The text is empty if the user needs Python's traceback. `others` tells whether
  the run has other processes.
  """
  # JAX adds a remark on its own frames, which are not printed.
  notes = getattr(error, '__notes__', ())
  lines = [str(error), *(x for x in notes if _JAXS_REMARK not in x)]
  link = errors.link('\n'.join(lines))
  match error:
    case preemption.Preempted(code=int(code)):
      return code, '\n'.join(f'[jaxline] {x}' for x in lines)
    case SystemExit(code=int(code)) if code:
      return code, ''
    case SystemExit():  # Its code would mean that the run is complete.
      return 1, (
        f'{"".join(traceback.format_exception(error))}[jaxline] To end a run,'
        ' raise `experiment.StopTraining` in place of SystemExit.'
      )
    case errors.UsageError() | errors.RunError():
      return 1 + isinstance(error, errors.UsageError), ' '.join(lines) + link
    case _ if others and errors.is_lost_process(error):
      text = (
        '[jaxline] This process has lost another process, whose own lines may'
        ' say why. The same command resumes the run.'
        f' ({str(error).splitlines()[0]:.300})'
      )
      return errors.LOST_CODE, text + errors.link(text)
  if link:  # Python prints the notes of an error.
    error.add_note(link.strip())
  return 1, ''


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
  """Prints the error that leaves the block, and sets the exit code.

  A process among others ends at once, unless all end after the same step.
  """
  try:
    yield
  except (Exception, SystemExit) as error:
    cause: BaseException | None = error
    # A signal in the import of a C extension arrives as an ImportError.
    while isinstance(cause, ImportError):
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
  """Ends this process at once, while the others are still in the run.

  At a normal exit JAX would wait for the other processes, which wait for this
  one. They notice that it is gone by a lost connection or a heartbeat.
  """
  code, text = exit_code_and_message(error, others=True)
  if not (text or isinstance(error, SystemExit)):
    text = ''.join(traceback.format_exception(error))
  lines_lib.print_text(text, sys.stderr)
  with contextlib.suppress(OSError, ValueError):  # It may be closed.
    logging.flush()
    sys.stdout.flush()
  os._exit(code)


def abort_if_lost(kind: Any, error: BaseException | None, tb: Any) -> None:
  """Ends this process if it has lost another one.

  Push it onto a `contextlib.ExitStack`, whose other callbacks would hang.
  """
  if error and errors.is_lost_process(error) and distributed.has_others():
    abort_process(error)
