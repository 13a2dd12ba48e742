"""From the command line to a run. The only module that reads flags.

`main` turns flags into a validated config, makes the run's directory, the
checkpointer and the writers, and calls the function of `--jaxline_mode`.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import errno
import importlib
import json
import os
import pathlib
import re
import stat
import sys
import tempfile
import textwrap
import time
import traceback
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_dict
from ml_collections import config_flags

from jaxline import base_config
from jaxline import debug
from jaxline import decode
from jaxline import disk
from jaxline import distributed
from jaxline import errors
from jaxline import train
from jaxline import xla
from jaxline.checkpoint import base
from jaxline.checkpoint import files
from jaxline.checkpoint import memory
from jaxline.compat import adapters
from jaxline.metrics import writers
from jaxline.supervision import preemption
from jaxline.supervision import watchdog

UsageError = errors.UsageError

# How long a run that has nothing to save yet may take to leave, in seconds.
_GRACE_SECS = 5.0


# What a run is made of.


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


# Modes.


def _decode(run: train.Run) -> None:
  decode.decode(run.experiment_class, run.config, run.checkpointer)


def _compile(run: train.Run) -> None:
  from jaxline.aot import ahead

  if not ahead.compile_experiment(run.experiment_class, run.config):
    raise _Exit(1)


@dataclasses.dataclass(frozen=True)
class Mode:
  """A value of --jaxline_mode.

  A mode that logs nothing only reads the run's directory.

  Attributes:
    text: what it does, for --help.
    run: does it.
    checkpointer: the mode that its checkpointer is made for; '' for none.
    log: the name of the log of its training; '' if it does not train.
    eval_log: the name of the log of its evaluation; '' if it does not evaluate.
    eval_mode: the mode of the experiment that is evaluated; '' is `eval_log`.
    eval_checkpointer: the mode of a second checkpointer, for an evaluation
      beside the training; '' for none.
  """

  text: str
  run: Callable[[train.Run], None]
  checkpointer: str = ''
  log: str = ''
  eval_log: str = ''
  eval_mode: str = ''
  eval_checkpointer: str = ''

  @property
  def logs(self) -> list[str]:
    """The names of its logs; only this mode may write them."""
    return [log for log in (self.log, self.eval_log) if log]


MODES = {
  'train': Mode(
    'train, from the newest checkpoint if there is one',
    train.Run.train,
    checkpointer='train',
    log='train',
  ),
  'eval': Mode(
    'evaluate each new checkpoint (any name that begins with eval)',
    train.Run.evaluate,
    checkpointer='eval',
    eval_log='eval',
  ),
  'train_and_eval': Mode(
    'one thread: train, pause every config.eval_interval to evaluate',
    train.Run.train_and_eval,
    checkpointer='train_and_eval',
    log='train',
    eval_log='eval',
  ),
  'train_eval_multithreaded': Mode(
    'train and evaluate checkpoints at once, in two threads',
    train.Run.train_eval_multithreaded,
    checkpointer='train',
    log='train',
    eval_log='eval',
    eval_mode='train_eval_multithreaded',
    eval_checkpointer='eval',
  ),
  'decode': Mode(
    'continue prompts with the weights of a checkpoint: config.decode',
    _decode,
    checkpointer='eval_decode',
  ),
  'compile': Mode(
    'compile the steps, for config.topology or the devices that are here, and'
    ' report memory, communication and time; train nothing',
    _compile,
  ),
}


def _find_mode(name: str) -> Mode:
  """Returns the mode of a name; one that begins with eval logs below it."""
  if name in MODES:
    return MODES[name]
  if name.startswith('eval'):
    return dataclasses.replace(MODES['eval'], checkpointer=name, eval_log=name)
  raise UsageError(
    f'--jaxline_mode is {name!r}; expected one of {sorted(MODES)}.'
  )


# Flags.


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
    + '; '.join(f'{name}: {mode.text}' for name, mode in MODES.items())
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
  """Ends the process with a code, after its message was printed."""

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
  """Parses flags; returns the program's name and the arguments that are none.

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
  """Returns the config that a command line names, without starting a run.

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
  validate_config(values.config)
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
  """Runs; after an error, ends this process if others would wait for it."""
  name = _MODE.value
  try:
    with _exits():
      config = _CONFIG.value
      if config is None:
        raise UsageError(f'--config is missing; {_expected_config()}')
      _find_mode(name)
      _start_jax(config, name)
      _start(experiment_class, config, name, checkpointer_factory)
  except (Exception, SystemExit) as e:
    if _has_others():
      _leave_others(e, name)
    raise


def _start(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  name: str,
  checkpointer_factory: base.CheckpointerFactory,
) -> None:
  """Makes the parts of a run and runs its mode, once the processes have met.

  Raises:
    UsageError: what is wrong with the command line, the config or the run's
      directory; nothing has been changed there.
  """
  mode = _find_mode(name)
  if mode.checkpointer and not mode.logs and not config.checkpoint_dir:
    raise UsageError(
      f'config.checkpoint_dir is {config.checkpoint_dir!r}; expected the'
      f' directory of the run whose weights --jaxline_mode={name} shall take.'
    )
  config = resolve_config(config)
  if experiment_class is None:
    experiment_class = resolve_experiment_class(config)
  if mode.checkpointer:  # Compile mode has none, and runs nothing here.
    _check_backend(config)
  if mode.eval_checkpointer and jax.process_count() > 1:
    raise UsageError(
      f'--jaxline_mode={name} is for one process, and there are'
      f' {jax.process_count()}: their threads would meet in different programs.'
      ' Use train_and_eval.'
    )
  if (
    mode.logs == [mode.eval_log]
    and checkpointer_factory is create_checkpointer
    and config.checkpointer == 'memory'
  ):
    _check_can_follow(name, config)
  with contextlib.ExitStack() as stack:
    is_writable = bool(mode.logs) and _claim(config, mode, stack)
    if mode.logs:
      _take_programs(config, stack)
    made: list[base.FullCheckpointer] = []

    def checkpointer(mode: str) -> base.FullCheckpointer:
      full = adapters.full_checkpointer(checkpointer_factory(config, mode))
      full.reads_only = not is_writable
      made.append(full)
      return full

    first = checkpointer(mode.checkpointer) if mode.checkpointer else None
    if first is not None:
      _check_directory(first, experiment_class)
    supervision = train.Supervision()
    if mode.logs:
      stack.enter_context(_explained(config))
      _say_directory(config, is_trained=bool(mode.log))
      supervision = train.Supervision(
        preemption.begin_run(takes_steps=bool(mode.log)),
        stack.enter_context(watchdog.Watchdog(config.watchdog_secs)),
      )
    log_files = stack.enter_context(contextlib.ExitStack())

    def close_checkpointers() -> None:
      for full in made:
        full.close()

    # Before the writers, to which what is being saved is still logged.
    stack.callback(close_checkpointers)

    def writer(log: str) -> Any:
      if not log or not is_writable:
        return writers.MultiWriter([])
      return log_files.enter_context(_closing(create_writer(config, log)))

    run = train.Run(
      experiment_class,
      config,
      first,
      writer(mode.log),
      writer(mode.eval_log),
      xla.actions(config.xla) if mode.log else (),
      supervision,
      eval_mode=mode.eval_mode or mode.eval_log,
      eval_checkpointer=(
        checkpointer(mode.eval_checkpointer) if mode.eval_checkpointer else None
      ),
    )
    # What is raised before is wrong usage, which needs no debugger.
    debug.debugger_fallback(mode.run)(run)


def _say_directory(config: config_dict.ConfigDict, is_trained: bool) -> None:
  """Prints where the run is; writes its config if no checkpointer does."""
  if jax.process_index() == 0:
    logging.info('Run directory: %s', config.checkpoint_dir)
    print(f'Run directory: {config.checkpoint_dir}', flush=True)
    # A durable one writes it when the run is known to continue with it.
    if is_trained and config.checkpointer == 'memory':
      directory = pathlib.Path(config.checkpoint_dir)
      directory.mkdir(parents=True, exist_ok=True)
      files.write_json(
        directory / 'config.json', json.loads(base_config.to_json(config))
      )


@contextlib.contextmanager
def _closing(writer: Any) -> Iterator[Any]:
  """Closes a writer; an error in flight is raised in place of its error."""
  close = adapters.full_writer(writer).close
  try:
    yield writer
  except BaseException:
    try:
      close()
    except Exception as e:
      # It often has the same cause as the error that ends the run.
      logging.error('Closing a writer failed as well: %r', e)
    raise
  close()


@contextlib.contextmanager
def _explained(config: config_dict.ConfigDict) -> Iterator[None]:
  """Adds to the error that ends a run how to continue the run."""
  try:
    yield
  except preemption.Preempted as e:
    if config.checkpointer == 'durable':
      e.add_note(
        'It goes on with the same command and'
        f' --config.checkpoint_dir={config.checkpoint_dir}'
      )
    raise
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


def _check_directory(
  checkpointer: base.FullCheckpointer, experiment_class: Any
) -> None:
  """Refuses, before it is used, a directory not shared or of another config."""
  with _usage_errors():
    checkpointer.check_shared()
    checkpointer.check_config(experiment_class)


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
  """Raises a ValueError as a UsageError: what the user gave is wrong."""
  try:
    yield
  except ValueError as e:
    raise UsageError(str(e)) from e


def _full_disk(
  error: BaseException, config: config_dict.ConfigDict
) -> OSError | None:
  """Returns the first error if each says that the run's disk is full."""
  found = getattr(error, 'exceptions', [error])
  if all(
    isinstance(e, OSError)
    and e.errno in disk.FULL
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
  with _usage_errors():
    stack.enter_context(programs.of_run(config))


def _has_others() -> bool:
  """Says whether this is one of several processes, as far as is known yet."""
  # There is no public way to ask: `jax.process_count` starts the devices, which
  # takes the others, or this process has just failed to.
  from jax._src import distributed as jax_distributed
  from jax._src import xla_bridge

  if jax.distributed.is_initialized():
    return jax_distributed.global_state.num_processes > 1
  return xla_bridge.backends_are_initialized() and jax.process_count() > 1


# What collectives of CPUs and GPUs say when another process is gone. This
# process then ends with the code of SIGABRT, as JAX does.
_LOST = re.compile(
  r'\bGloo\b|ncclRemoteError|ncclSystemError|Connection (reset|closed) by peer'
)
_LOST_CODE = 134


def _leave_others(error: BaseException, mode: str) -> None:
  """Ends this process at once, if the other ones are still in the run.

  A normal exit of Python would wait for the other processes, which wait for
  this one. They notice that it is gone by a lost connection or JAX's heartbeat.
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


def _claim(
  config: config_dict.ConfigDict, mode: Mode, stack: contextlib.ExitStack
) -> bool:
  """Refuses to write where another run does, or where nothing can be written.

  Returns:
    Whether the directory can be written: an evaluation that was asked for once
    also works where it cannot.
  """
  refused, unwritable = '', ''
  if jax.process_index() == 0:
    try:
      for name in mode.logs:
        stack.callback(files.Claim(config.checkpoint_dir, name).release)
    except files.ClaimedError as e:
      refused = str(e)
    except OSError as e:
      once = config.one_off_evaluate or config.eval_steps is not None
      if (
        not mode.log
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
  refused, unwritable = distributed.of_chief((refused, unwritable))
  if refused:
    raise UsageError(refused)
  if unwritable:
    logging.warning(
      'Nothing can be written in %s (%s): this evaluation is in no log but this'
      ' one, and no checkpoint becomes the best one.',
      config.checkpoint_dir,
      unwritable,
    )
  return not unwritable


def _check_can_follow(name: str, config: config_dict.ConfigDict) -> None:
  """Refuses to wait for checkpoints that can never come."""
  checkpointer = memory.InMemoryCheckpointer(config, name)
  if not (config.one_off_evaluate or checkpointer.can_be_restored('latest')):
    raise UsageError(
      'Evaluation by itself would wait for ever: checkpoints are kept in the'
      ' memory of the process that trains. Use --jaxline_mode=train_and_eval;'
      ' or --config.one_off_evaluate=True with'
      ' --config.eval_initial_weights=True for untrained weights.'
    )


def validate_config(config: config_dict.ConfigDict) -> None:
  """Checks a whole config: see `base_config.validate_config`.

  Raises:
    UsageError: what is wrong with it, by name.
  """
  try:
    with _usage_errors():
      base_config.validate_config(config)
  except OSError as e:
    # What ml_collections gives instead of a config where it found no file.
    raise _unreadable_config(e) from None


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


def _check_backend(config: config_dict.ConfigDict) -> None:
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
  with _usage_errors():
    xla.check_backend(config.xla)
