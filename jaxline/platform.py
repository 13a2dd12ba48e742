"""From the command line to a run. The only module that reads flags.

`main` turns flags into a validated config, makes the run's directory, the
checkpointer and the writers, and calls the loop that `--jaxline_mode` names.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import errno
import importlib
import json
import os
import pathlib
import queue
import re
import stat
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax
from jax.experimental import multihost_utils
from ml_collections import config_dict
from ml_collections import config_flags
import numpy as np

from jaxline import base_config
from jaxline import debug
from jaxline import decode
from jaxline import distributed
from jaxline import errors
from jaxline import partitioning
from jaxline import periodic
from jaxline import train
from jaxline import writers
from jaxline import xla
from jaxline.checkpoint import base
from jaxline.checkpoint import files
from jaxline.checkpoint import memory
from jaxline.supervision import preemption
from jaxline.supervision import watchdog

MODES = {
  'train': 'train, from the newest checkpoint if there is one',
  'eval': 'evaluate each new checkpoint (any name that begins with eval)',
  'train_and_eval': 'one thread: train, pause every config.eval_interval to'
  ' evaluate',
  'train_eval_multithreaded': 'train and evaluate checkpoints at once, in two'
  ' threads',
  'decode': 'continue prompts with the weights of a checkpoint: config.decode',
  'compile': 'compile the steps, for config.topology or the devices that are'
  ' here, and report memory, communication and time; train nothing',
}


class _SettingFlag(flags.Flag):
  """A flag whose value is also a field of `debug.settings`.

  So JAXline's decorators and `train.evaluate` follow the command line in a
  program that parses flags but does not call `main`.
  """

  def __init__(self, setting: str, *args: Any, **kwargs: Any):
    self._setting = setting
    super().__init__(*args, **kwargs)

  @property
  def value(self) -> Any:
    return self._value

  @value.setter
  def value(self, value: Any) -> None:
    self._value = value
    setattr(debug.settings, self._setting, value)


class _BoolSettingFlag(_SettingFlag, flags.BooleanFlag):
  """The same for a flag that is true or false."""


_CONFIG = config_flags.DEFINE_config_file(
  name='config',
  help_string='The run: a config file, such as configs/lm.py. Its values are'
  ' overridden by --config.key=value.',
)
_MODE = flags.DEFINE_flag(
  _SettingFlag(
    'mode',
    flags.ArgumentParser(),
    flags.ArgumentSerializer(),
    'jaxline_mode',
    'train',
    'What to do: '
    + '; '.join(f'{name}: {text}' for name, text in MODES.items())
    + '.',
  )
)
_POST_MORTEM = flags.DEFINE_flag(
  _BoolSettingFlag(
    'post_mortem',
    'jaxline_post_mortem',
    False,
    'Enter pdb where an exception was raised.',
  )
)
_DISABLE_PMAP_JIT = flags.DEFINE_flag(
  _BoolSettingFlag(
    'disable_pmap_jit',
    'jaxline_disable_pmap_jit',
    False,
    'Run step and evaluate op by op, so that a debugger sees values.',
  )
)
_TPU_DRIVER = flags.DEFINE_string(
  'jaxline_tpu_driver',
  '',
  'Kept from JAXline; JAX has no TPU drivers any more.',
)
_ENSURE_TPU = flags.DEFINE_bool(
  'jaxline_ensure_tpu', False, 'Fail where JAX has fallen back to the CPU.'
)
_OUR_FLAGS = (
  'config',
  _MODE.name,
  _POST_MORTEM.name,
  _DISABLE_PMAP_JIT.name,
  _ENSURE_TPU.name,
  _TPU_DRIVER.name,
)
# `--help` of a program that lets absl parse the command line shows these too.
for _name in _OUR_FLAGS:
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[_name])

# Bytes of a message from the first process to the others, at most.
_MAX_TEXT = 4096
# How long the other half of a run may take to notice that one has failed, and
# a run that has nothing to save yet to leave.
_GRACE_SECS = 5.0

UsageError = errors.UsageError


def create_checkpointer(
  config: config_dict.ConfigDict, mode: str
) -> base.Checkpointer:
  """Returns the run's checkpointer for one mode, as `config.checkpointer`.

  A run that trains forgets the checkpoints of earlier runs in this process; an
  evaluation may be of those.
  """
  if not mode.startswith('eval'):
    memory.forget_published()
  if config.checkpointer == 'memory':
    return memory.InMemoryCheckpointer(config, mode)
  from jaxline.checkpoint import durable  # Orbax takes a second to import.

  return durable.DurableCheckpointer(config, mode)


class TensorBoardLogger(writers.AsyncWriter):
  """Writes below `config.checkpoint_dir/<mode>`, on a background thread.

  Event files for TensorBoard, and beside them `metrics.jsonl`: one JSON
  object for each record.
  """

  def __init__(self, config: config_dict.ConfigDict, mode: str):
    """Opens the files; a host that is not the first gets a directory of it."""
    directory = pathlib.Path(config.checkpoint_dir) / mode
    if jax.process_index() != 0:
      directory = directory / f'host_{jax.process_index()}'
    super().__init__(
      writers.MultiWriter(
        [
          writers.TensorBoardWriter(directory),
          writers.JsonlWriter(directory / 'metrics.jsonl'),
        ]
      )
    )


def create_writer(config: config_dict.ConfigDict, mode: str) -> Any:
  """Returns the run's writer for one mode.

  It writes on the first host, and on the others only with
  `config.log_all_hosts`.
  """
  if jax.process_index() == 0 or config.log_all_hosts:
    return TensorBoardLogger(config, mode)
  return writers.MultiWriter([])


def resolve_experiment_class(config: config_dict.ConfigDict) -> Any:
  """Returns the class that `config.experiment_class` names.

  Raises:
    UsageError: it names none, or none that can be imported.
  """
  name = config.experiment_class
  module_name, separator, class_name = (name or '').partition(':')
  if not separator:
    raise UsageError(
      f'config.experiment_class is {name!r}; expected'
      " 'package.module:Class', such as 'examples.lm.experiment:Experiment'."
    )
  try:
    module = importlib.import_module(module_name)
  except ModuleNotFoundError as e:
    # A missing dependency of the module is not a wrong name: let it through.
    if e.name and module_name.startswith(e.name):
      raise UsageError(
        f'config.experiment_class is {name!r}, but there is no module'
        f' {e.name!r}. Is the working directory the repository?'
      ) from e
    raise
  if not hasattr(module, class_name):
    classes = sorted(k for k, v in vars(module).items() if isinstance(v, type))
    raise UsageError(
      f'config.experiment_class is {name!r}, but {module_name} has no'
      f' {class_name!r}; its classes are {classes}.'
    )
  return getattr(module, class_name)


def main(
  experiment_class: Any,
  argv: Sequence[str],
  checkpointer_factory: base.CheckpointerFactory = create_checkpointer,
) -> None:
  """Runs an experiment as the command line says.

  Args:
    experiment_class: a class or a partial of one; None is the class that
      `config.experiment_class` names.
    argv: the command line without the program's name. Parsed here, unless
      absl has parsed it already (`app.run(functools.partial(main, Class))`).
    checkpointer_factory: makes the checkpointer of a config and a mode.
  """

  def run(unused_argv: Sequence[str]) -> None:
    _main(experiment_class, checkpointer_factory)

  with preemption.Watch(grace=_GRACE_SECS):
    if flags.FLAGS.is_parsed():
      run(argv)
    else:
      app.run(run, argv=[sys.argv[0], *argv], flags_parser=_parse_flags)


class _Exit(SystemExit):
  """Ends the process with a code; what there is to say has been said."""

  def __init__(self, code: int, message: str = ''):
    super().__init__(message)
    self.code = code


class _Refused(_Exit, UsageError):
  """A UsageError that has been printed."""


@contextlib.contextmanager
def _exits() -> Iterator[None]:
  """Prints what ends a run, once, and gives it its exit code.

  Raises:
    _Refused: for a UsageError.
    _Exit: for a SystemExit of the user's code, which must not look like the end
      of a run.
  """
  debug.settings.log_tracebacks = False
  try:
    yield
  except preemption.Preempted as e:
    text = _with_notes(e, '\n[jaxline] ')
    print(f'[jaxline] {text}', file=sys.stderr, flush=True)
    raise
  except _Exit:
    raise
  except UsageError as e:
    message = _with_notes(e)
    print(message, file=sys.stderr, flush=True)
    raise _Refused(2, message) from e
  except (files.RefusedError, files.UnreadableError) as e:
    # The checkpoint is the cause, which no traceback explains.
    print(e, file=sys.stderr, flush=True)
    raise _Exit(1) from e
  except SystemExit as e:
    traceback.print_exception(e)
    print(
      f'[jaxline] The experiment or its config raised SystemExit({e.code!r}),'
      ' which does not end a run: let `should_run_step` return False.',
      file=sys.stderr,
      flush=True,
    )
    code = e.code if isinstance(e.code, int) else 1
    raise _Exit(code if code & 0xFF else 1) from e
  finally:
    debug.settings.log_tracebacks = True


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses the command line; what is wrong with it is said in a line."""
  if any(arg in ('--help', '-help', '-h', '--h') for arg in argv[1:]):
    print(_help_text())
    sys.exit(0)
  with _exits():
    return _parse(flags.FLAGS, argv)


def _parse(values: flags.FlagValues, argv: list[str]) -> list[str]:
  """Parses flags; returns what are none, behind the program's name.

  Raises:
    UsageError: what is wrong, in a line.
  """
  try:
    return values(argv)
  except OSError as e:
    raise _unreadable_config(e) from e
  except (flags.Error, AttributeError, KeyError) as e:
    unknown = getattr(e, 'flagname', '')
    if unknown.startswith('config.'):  # ml_collections defines it by the file.
      raise UsageError(f'--config is missing; {_expected_config()}') from e
    # The latter two are what ml_collections raises for an unknown config key,
    # one inside the other. From elsewhere they are errors of the config file.
    *_, raised_in = traceback.walk_tb(e.__traceback__)
    module = raised_in[0].f_globals.get('__name__', '')
    if not isinstance(e, flags.Error) and 'ml_collections' not in module:
      raise
    message: Any = e
    while isinstance(message, Exception) and message.args:
      message = message.args[0]
    prefix = '' if isinstance(e, flags.Error) else 'Unknown config key: '
    raise UsageError(prefix + ' '.join(str(message).split())) from e


def load_config(argv: Sequence[str]) -> config_dict.ConfigDict:
  """Returns the config that a command line names, for programs that run none.

  Args:
    argv: `--config=FILE` and overrides, `--config.key=value`; nothing else.

  Returns:
    The config, validated and locked; no directory is made for it.

  Raises:
    UsageError: what is wrong with the command line or the config.
  """
  values = flags.FlagValues()
  argv = [sys.argv[0], *argv]
  config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
  _, *unknown = _parse(values, argv)
  if unknown:
    raise UsageError(f'Unexpected arguments {unknown}.')
  if values.config is None:
    raise UsageError('Which run? Give --config=FILE, such as configs/lm.py.')
  try:
    _validate(values.config)
  except (OSError, ValueError) as e:
    raise UsageError(str(e)) from e
  return values.config.copy_and_resolve_references().lock()


def _help_text() -> str:
  lines = [
    f'usage: python {sys.argv[0]} --config=FILE [--config.key=value ...]',
    '',
  ]
  for name in _OUR_FLAGS:
    flag = flags.FLAGS[name]
    text = flag.help
    if flag.default not in (None, ''):
      text += f' (default: {flag.default})'
    lines.append(f'  --{name}')
    lines += [f'      {line}' for line in textwrap.wrap(text, 70)]
  lines += ['', _configs_text(), '', 'For the flags of absl: --helpfull']
  return '\n'.join(lines)


def _configs() -> list[pathlib.Path]:
  """Returns the config files beside the program."""
  folder = pathlib.Path(sys.argv[0]).resolve().parent / 'configs'
  return sorted(p for p in folder.glob('*.py') if not p.name.startswith('_'))


def _configs_text() -> str:
  """Lists the configs beside the program, with the first line of each."""
  if not (found := _configs()):
    return 'There is no folder `configs` beside the program.'
  lines = ['Configs:']
  for path in found:
    text = path.read_text(encoding='utf-8').lstrip()
    first = text[3:].splitlines()[0] if text.startswith('"""') else ''
    lines.append(f'  configs/{path.name:<16} {first.rstrip(chr(34))}')
  lines.append(
    f'Run one: python {sys.argv[0]} --config=configs/{found[0].name}'
  )
  return '\n'.join(lines)


def _unreadable_config(error: OSError) -> UsageError:
  *_, reason = str(error).splitlines()
  reason = reason[max(reason.find('[Errno'), 0) :]
  return UsageError(f'--config cannot be read: {reason}; {_expected_config()}')


def _expected_config() -> str:
  names = [f'--config=configs/{path.name}' for path in _configs()]
  return f'expected {" or ".join(names or ["--config=FILE"])}.'


def _main(
  experiment_class: Any, checkpointer_factory: base.CheckpointerFactory
) -> None:
  """Runs; with an error it leaves the other processes, which would wait."""
  mode = _MODE.value
  try:
    with _exits():
      _check_and_start(experiment_class, mode, checkpointer_factory)
  except (Exception, SystemExit) as e:
    if _has_others():
      _leave_others(e, mode)
    raise


def _check_and_start(
  experiment_class: Any,
  mode: str,
  checkpointer_factory: base.CheckpointerFactory,
) -> None:
  """Checks what the user said; only what comes then is worth a debugger."""
  config = _CONFIG.value
  if config is None:
    raise UsageError(f'--config is missing; {_expected_config()}')
  if not mode.startswith('eval') and mode not in MODES:
    raise UsageError(
      f'--jaxline_mode is {mode!r}; expected one of {sorted(MODES)}.'
    )
  _start_jax(config, mode)
  _start(experiment_class, config, mode, checkpointer_factory)


def _start(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  mode: str,
  checkpointer_factory: base.CheckpointerFactory,
) -> None:
  """Does what a mode says, once the processes have met."""
  if mode == 'decode' and not config.checkpoint_dir:
    raise UsageError(
      f'config.checkpoint_dir is {config.checkpoint_dir!r}; expected the'
      ' directory of the run whose weights --jaxline_mode=decode shall take.'
    )
  config = resolve_config(config)
  if experiment_class is None:
    experiment_class = resolve_experiment_class(config)
  if mode == 'compile':
    _compile(experiment_class, config)
    return
  _check_backend()
  try:
    xla.check_backend(config.xla)
  except ValueError as e:
    raise UsageError(str(e)) from e
  if mode == 'decode':
    _decode(experiment_class, config, checkpointer_factory)
    return
  if mode == 'train_eval_multithreaded' and jax.process_count() > 1:
    raise UsageError(
      f'--jaxline_mode={mode} is for one process, and there are'
      f' {jax.process_count()}: their threads would meet in different programs.'
      ' Use train_and_eval.'
    )
  if (
    mode.startswith('eval')
    and checkpointer_factory is create_checkpointer
    and config.checkpointer == 'memory'
  ):
    _check_can_follow(create_checkpointer(config, mode), config)
  with contextlib.ExitStack() as stack:
    is_writable = _claim(config, mode, stack)
    made = _Checkpointers(config, checkpointer_factory, not is_writable)
    _take_programs(config, stack)
    in_threads = mode == 'train_eval_multithreaded'
    _check_directory(made('train' if in_threads else mode), experiment_class)
    try:
      _run(experiment_class, config, mode, made)
    except (OSError, ExceptionGroup) as e:
      if (full := _full_disk(e, config)) is None:
        raise
      print(
        f'{full.strerror}: {full.filename}. Make room, then start the same'
        ' command again.',
        file=sys.stderr,
        flush=True,
      )
      raise _Exit(1) from e


def _full_disk(
  error: BaseException, config: config_dict.ConfigDict
) -> OSError | None:
  """Returns the first error if each says that the run's disk is full."""
  found = getattr(error, 'exceptions', [error])
  if all(
    isinstance(e, OSError)
    and e.errno in files.FULL
    and str(e.filename).startswith(config.checkpoint_dir)
    for e in found
  ):
    return found[0]
  return None


def _start_jax(config: config_dict.ConfigDict, mode: str) -> None:
  """Sets what must be set before JAX touches a device, and meets the others.

  Raises:
    UsageError: the config is wrong, or it does not fit what is here.
    SystemExit: the other processes were not met; with a code that means to
      start again.
  """
  validate_config(config)
  config = base_config.expand_paths(config)
  try:
    if (
      mode == 'compile'
      and config.topology
      and not jax.config.values['jax_platforms']
    ):
      # With libtpu installed JAX would look for TPUs here.
      jax.config.update('jax_platforms', 'cpu')
    for line in xla.apply(config.xla):
      print(f'[jaxline] {line}', flush=True)
    if mode != 'compile' or not config.topology:
      distributed.initialize(config.distributed)
    elif int(os.environ.get('JAX_NUM_PROCESSES') or 1) > 1:
      raise UsageError(
        f'config.topology is {config.topology!r}, for which one process'
        ' compiles, and JAX_NUM_PROCESSES is'
        f' {os.environ["JAX_NUM_PROCESSES"]!r}. Start it once, without the'
        ' launcher.'
      )
  except distributed.RendezvousError as e:
    # To start again is all there is to do: the others may be late.
    print(e, file=sys.stderr, flush=True)
    raise _Exit(watchdog.EXIT_CODE) from e
  except (ValueError, RuntimeError) as e:
    raise UsageError(str(e)) from e


@debug.debugger_fallback
def _compile(experiment_class: Any, config: config_dict.ConfigDict) -> None:
  """Compiles the steps and reports on them; exits with 1 if they do not fit."""
  from jaxline.aot import ahead

  if not ahead.compile_experiment(experiment_class, config):
    raise _Exit(1)


@debug.debugger_fallback
def _decode(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer_factory: base.CheckpointerFactory,
) -> None:
  """Continues prompts with a checkpoint; its run may go on meanwhile."""
  with contextlib.ExitStack() as stack:
    # As evaluation does, it only reads, and may lack the optimizer's state.
    made = _Checkpointers(config, checkpointer_factory, reads_only=True)
    checkpointer = made('eval_decode')
    decode.check_checkpoint(config, checkpointer)
    _check_directory(checkpointer, experiment_class)
    stack.callback(made.close)
    decode.decode(experiment_class, config, checkpointer)


def _with_notes(error: BaseException, separator: str = ' ') -> str:
  return separator.join([str(error), *getattr(error, '__notes__', [])])


def _take_programs(
  config: config_dict.ConfigDict, stack: contextlib.ExitStack
) -> None:
  """Has the run take programs from where `--jaxline_mode=compile` put them."""
  if config.compiled_program is None:
    return
  from jaxline.aot import programs

  xla.check_precompiled(config.xla)
  try:
    stack.enter_context(programs.of_run(config))
  except ValueError as e:
    raise UsageError(str(e)) from e


class _Checkpointers:
  """Makes the checkpointers of a run, each once."""

  def __init__(
    self,
    config: config_dict.ConfigDict,
    factory: base.CheckpointerFactory,
    reads_only: bool,
  ):
    self._config = config
    self._factory = factory
    self.reads_only = reads_only
    self._made: dict[str, base.Checkpointer] = {}

  def __call__(self, mode: str) -> base.Checkpointer:
    if mode not in self._made:
      made = self._made[mode] = self._factory(self._config, mode)
      if self.reads_only and base.is_durable(made):
        made.reads_only = True
    return self._made[mode]

  def close(self) -> None:
    for checkpointer in self._made.values():
      if hasattr(checkpointer, 'close'):
        checkpointer.close()


def _has_others() -> bool:
  """Says whether this is one of several processes, as far as is known yet."""
  # There is no public way to ask: `jax.process_count` starts the devices, which
  # takes the others, or this process has just failed to.
  from jax._src import distributed as jax_distributed
  from jax._src import xla_bridge

  if jax.distributed.is_initialized():
    return jax_distributed.global_state.num_processes > 1
  return xla_bridge.backends_are_initialized() and jax.process_count() > 1


# What collectives say, of CPUs and of GPUs, where another process has gone: so
# nothing is wrong with this one. It ends with the code of SIGABRT, by which JAX
# ends those that it finds so.
_LOST = re.compile(
  r'\bGloo\b|ncclRemoteError|ncclSystemError|Connection (reset|closed) by peer'
)
_LOST_CODE = 134


def _leave_others(error: BaseException, mode: str) -> None:
  """Ends this process at once, if the other ones are still in the run.

  Python's own end would wait for them, who wait for this process: for minutes.
  Once it is gone they notice, by a lost connection or JAX's heartbeat.
  """
  if isinstance(error, preemption.Preempted) and not mode.startswith('eval'):
    return  # All leave together.
  code: Any
  if isinstance(error, SystemExit):
    code = error.code
  elif isinstance(error, UsageError):
    code = 2
  else:
    traceback.print_exception(error)
    code = _LOST_CODE if _LOST.search(str(error)) else 1
  logging.flush()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


# What each mode alone may do in the run's directory: log below that name.
_CLAIMS = {
  'train': ('train',),
  'train_and_eval': ('train', 'eval'),
  'train_eval_multithreaded': ('train', 'eval'),
}


def _claim(
  config: config_dict.ConfigDict, mode: str, stack: contextlib.ExitStack
) -> bool:
  """Refuses to write where another run does, or where nothing can be written.

  Returns:
    Whether the directory can be written: an evaluation that was asked for once
    also works where it cannot.
  """
  refused = unwritable = ''
  if jax.process_index() == 0:
    try:
      for what in _CLAIMS.get(mode, (mode,)):
        stack.callback(files.Claim(config.checkpoint_dir, what).release)
    except files.ClaimedError as e:
      refused = str(e)
    except OSError as e:
      once = config.one_off_evaluate or config.eval_steps is not None
      if (
        mode.startswith('eval')
        and once
        and e.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
        and os.path.isdir(config.checkpoint_dir)
      ):
        unwritable = str(e)
      else:
        refused = (
          f'config.checkpoint_dir is {config.checkpoint_dir!r}, but nothing can'
          f' be written there: {e}. Give a directory of yours.'
        )
  if refused := _text_of_chief(refused):
    raise UsageError(refused)
  if unwritable := _text_of_chief(unwritable):
    logging.warning(
      'Nothing can be written in %s (%s): this evaluation is in no log but this'
      ' one, and no checkpoint becomes the best one.',
      config.checkpoint_dir,
      unwritable,
    )
  return not unwritable


def _text_of_chief(text: str) -> str:
  """Returns the first process's text, in all processes."""
  if jax.process_count() == 1:
    return text
  data = np.frombuffer(text.encode()[:_MAX_TEXT].ljust(_MAX_TEXT), np.uint8)
  data = np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8)
  return data.tobytes().decode(errors='replace').rstrip()


def _check_directory(
  checkpointer: base.Checkpointer, experiment_class: Any
) -> None:
  """Refuses, before it is used, a directory not shared or of another config."""
  if base.is_durable(checkpointer):
    try:
      checkpointer.check_shared()
      checkpointer.check_config(experiment_class)
    except ValueError as e:
      raise UsageError(str(e)) from e


@debug.debugger_fallback
def _run(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  mode: str,
  checkpointer: _Checkpointers,
) -> None:
  """Runs one mode, potentially under a debugger."""
  evaluates_only = mode.startswith('eval')
  if jax.process_index() == 0:
    logging.info('Run directory: %s', config.checkpoint_dir)
    print(f'Run directory: {config.checkpoint_dir}', flush=True)
    # A durable one writes it when the run is known to go on with it.
    if not evaluates_only and config.checkpointer == 'memory':
      _write_config(config)

  with contextlib.ExitStack() as stack:
    supervision = train.Supervision(
      preemption.begin_run(takes_steps=not evaluates_only),
      stack.enter_context(watchdog.Watchdog(config.watchdog_secs)),
    )
    stack.enter_context(_exit_said(config))
    writer = stack.enter_context(_Writers(config))

    # Before the writers, to which what is being saved is still logged.
    stack.callback(checkpointer.close)

    if mode == 'train':
      train.train(
        experiment_class,
        config,
        checkpointer(mode),
        writer(mode),
        xla.actions(config.xla),
        supervision=supervision,
      )
    elif mode == 'train_and_eval':
      train.train_and_eval(
        experiment_class,
        config,
        checkpointer(mode),
        writer('train'),
        writer('eval'),
        xla.actions(config.xla),
        supervision=supervision,
      )
    elif mode == 'train_eval_multithreaded':
      _train_eval_multithreaded(
        experiment_class, config, checkpointer, writer, supervision
      )
    else:
      train.evaluate(
        experiment_class,
        config,
        checkpointer(mode),
        writers.MultiWriter([]) if checkpointer.reads_only else writer(mode),
        mode,
        supervision=supervision,
      )


@contextlib.contextmanager
def _exit_said(config: config_dict.ConfigDict) -> Iterator[None]:
  """Adds to what is said of a run that was told to end how it goes on."""
  try:
    yield
  except preemption.Preempted as e:
    if config.checkpointer == 'durable':
      e.add_note(
        'It goes on with the same command and'
        f' --config.checkpoint_dir={config.checkpoint_dir}'
      )
    raise


def _check_can_follow(
  checkpointer: base.Checkpointer, config: config_dict.ConfigDict
) -> None:
  """Refuses to wait for checkpoints that can never come."""
  waits = not config.one_off_evaluate
  if waits and not checkpointer.can_be_restored('latest'):
    raise UsageError(
      'Evaluation by itself would wait for ever: checkpoints are kept in the'
      ' memory of the process that trains. Use --jaxline_mode=train_and_eval;'
      ' or --config.one_off_evaluate=True with'
      ' --config.eval_initial_weights=True for untrained weights.'
    )


def validate_config(config: config_dict.ConfigDict) -> None:
  """Checks a whole config: `base_config.validate_config`, mesh, sharding.

  Raises:
    UsageError: what is wrong with it, by name.
  """
  try:
    _validate(config)
  except OSError as e:
    # What ml_collections gives instead of a config where it found no file.
    raise _unreadable_config(e) from None
  except ValueError as e:
    raise UsageError(str(e)) from e


def _validate(config: config_dict.ConfigDict) -> None:
  base_config.validate_config(config)
  partitioning.validate(config.mesh, config.sharding, config.sharding_rules)


def resolve_config(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """Returns the config of a run, validated, with a directory, locked.

  Args:
    config: as the config file and the overrides made it; not changed.

  Raises:
    UsageError: what is wrong with it, by name.
  """
  validate_config(config)
  config = base_config.expand_paths(config)
  if '://' in (config.checkpoint_dir or ''):
    raise UsageError(
      f'config.checkpoint_dir is {config.checkpoint_dir!r}; expected a folder'
      ' of this machine. Mount the bucket and give the path it has here.'
    )
  if not config.checkpoint_dir:
    if jax.process_count() > 1:
      raise UsageError(
        f'config.checkpoint_dir is {config.checkpoint_dir!r}; a run of'
        f' {jax.process_count()} processes needs one, the same for all.'
      )
    with config.ignore_type(), config.unlocked():
      config.checkpoint_dir = _fresh_directory()
  elif not os.path.isabs(config.checkpoint_dir):
    with config.unlocked():
      config.checkpoint_dir = os.path.abspath(config.checkpoint_dir)
  return config.lock()


def _fresh_directory() -> str:
  """Makes a directory below /tmp/jaxline-UID that no other run has."""
  try:
    source = config_flags.get_config_filename(flags.FLAGS['config'])
  except flags.Error:
    source = 'run'  # A config that was set without a file, by a flag saver.
  path, _, option = source.partition(':')
  # The option says which run of a file it is.
  name = re.sub(r'[^\w.-]+', '_', f'{pathlib.Path(path).stem}_{option}').strip(
    '_'
  )
  # Everybody may write to /tmp, and so be there first.
  root = pathlib.Path(tempfile.gettempdir()) / f'jaxline-{os.geteuid()}'
  with contextlib.suppress(FileExistsError):
    root.mkdir(mode=0o700, parents=True)
  found = root.lstat()
  if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
    raise UsageError(
      f'{root}, where runs without a directory go, is not a directory that'
      f' belongs to you (user {os.geteuid()}): its mode is'
      f' {stat.filemode(found.st_mode)} and its owner is user {found.st_uid}.'
      ' Remove it, or give --config.checkpoint_dir=DIR.'
    )
  root.chmod(0o700)
  stamp = time.strftime('%Y%m%d_%H%M%S')
  for suffix in ('', *(f'_{i}' for i in range(2, 1000))):
    path = root / f'{name}_{stamp}{suffix}'
    try:
      path.mkdir(parents=True)
    except FileExistsError:
      continue
    return str(path)
  raise FileExistsError(f'{root} is full of runs of {name} at {stamp}.')


def _write_config(config: config_dict.ConfigDict) -> None:
  """Writes the resolved config as JSON, visible only when it is whole."""
  directory = pathlib.Path(config.checkpoint_dir)
  directory.mkdir(parents=True, exist_ok=True)
  files.write_json(
    directory / 'config.json', json.loads(base_config.to_json(config))
  )


def _check_backend() -> None:
  if _TPU_DRIVER.value:
    raise UsageError(
      f'--jaxline_tpu_driver is {_TPU_DRIVER.value!r}, but TPU drivers are gone'
      ' from JAX. Leave the flag out: on a TPU VM, JAX finds the TPU itself.'
    )
  if _ENSURE_TPU.value and jax.default_backend() != 'tpu':
    raise RuntimeError(
      '--jaxline_ensure_tpu is set, but JAX runs on'
      f' {jax.default_backend()!r}: {jax.devices()}. Is the TPU in use by'
      ' another process, and is jax[tpu] installed?'
    )


class _Writers:
  """Makes the writers of a run, and closes them however it ends."""

  def __init__(self, config: config_dict.ConfigDict):
    self._config = config
    self._open: list[Any] = []

  def __enter__(self) -> Callable[[str], Any]:
    return self._create

  def _create(self, mode: str) -> Any:
    writer = create_writer(self._config, mode)
    self._open.append(writer)
    return writer

  def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
    failures = []
    for writer in self._open:
      # A writer of an old fork may have no `close`.
      if isinstance(writer, writers.MetricWriter):
        try:
          writer.close()
        except Exception as e:
          failures.append(e)
    for failed in failures:
      if error is None:
        raise failed
      # The error that ends the run counts; this one is often its cause.
      logging.error('Closing a writer failed as well: %r', failed)


class _StopAction(periodic.PeriodicAction):
  """Ends training at its next step once `stop` is set."""

  def __init__(self, stop: threading.Event):
    super().__init__(lambda *_: None, 'steps', interval=None, run_async=False)
    self._stop = stop

  def __call__(self, t: float, step: int, scalar_outputs: Any) -> None:
    if self._stop.is_set():
      raise debug.Stopped


class _FollowingCheckpointer:
  """The evaluator's checkpointer beside a training thread.

  Evaluation asks `restore_path` several times a second while it waits. Here
  that ends it where training has failed, or has ended and its last
  checkpoint is evaluated.
  """

  def __init__(
    self,
    checkpointer: base.Checkpointer,
    stop: threading.Event,
    trained: threading.Event,
  ):
    self._checkpointer = checkpointer
    self._stop = stop
    self._trained = trained
    self._restored: Any = None

  def __getattr__(self, name: str) -> Any:
    return getattr(self._checkpointer, name)

  def restore_path(self, ckpt_series: str) -> Any:
    # In this order: what was saved before `trained` was set is seen.
    trained = self._trained.is_set()
    path = self._checkpointer.restore_path(ckpt_series)
    if self._stop.is_set() or (trained and path in (None, self._restored)):
      raise debug.Stopped
    return path

  def restore(self, ckpt_series: str, step: int | None = None) -> None:
    path = self._checkpointer.restore_path(ckpt_series)
    if base.is_durable(self._checkpointer):
      self._checkpointer.restore(ckpt_series, step)
      if step is not None and path and pathlib.Path(path).name != str(step):
        return  # There are newer ones to evaluate.
    else:
      self._checkpointer.restore(ckpt_series)
    if ckpt_series == 'latest':
      self._restored = path

  def ended(self) -> int | None:
    # Until this training has ended, that note is of the one before.
    if not self._trained.is_set() or not base.is_durable(self._checkpointer):
      return None
    return self._checkpointer.ended()


def _train_eval_multithreaded(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  checkpointer: Callable[[str], base.Checkpointer],
  writer: Callable[[str], Any],
  supervision: train.Supervision,
) -> None:
  """Trains and evaluates at once; the first exception of either ends both."""
  stop, trained = threading.Event(), threading.Event()
  # Before training begins: its experiment may change the config.
  follower = _FollowingCheckpointer(checkpointer('eval'), stop, trained)
  ended: queue.Queue[tuple[str, BaseException | None]] = queue.Queue()

  def run_train() -> None:
    train.train(
      experiment_class,
      config,
      checkpointer('train'),
      writer('train'),
      (_StopAction(stop), *xla.actions(config.xla)),
      supervision=supervision,
    )
    trained.set()

  def run_eval() -> None:
    train.evaluate(
      experiment_class,
      config,
      follower,
      writer('eval'),
      # What it is told by signals is for the thread that trains.
      supervision=train.Supervision(dog=supervision.dog),
    )

  def target(half: Callable[[], None]) -> None:
    error: BaseException | None = None
    try:
      with supervision.dog.watched():
        debug.debugger_fallback(half)()
    except debug.Stopped:
      pass
    except BaseException as e:
      error = e
    ended.put((threading.current_thread().name, error))

  threads = [
    # Daemons: a half deep in a compilation must not outlive the run's error.
    threading.Thread(target=target, args=(half,), name=name, daemon=True)
    for name, half in (('train', run_train), ('eval', run_eval))
  ]
  for thread in threads:
    thread.start()
  try:
    for _ in threads:
      name, error = ended.get()
      if error is not None:
        if not isinstance(error, UsageError):
          error.add_note(f'[jaxline] raised in the {name} thread.')
        raise error
  finally:
    stop.set()
    deadline = time.monotonic() + _GRACE_SECS
    for thread in threads:
      thread.join(max(0.0, deadline - time.monotonic()))
