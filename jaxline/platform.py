"""From the command line to a run. The only module that reads flags.

`main` turns flags into a validated config, makes the run's directory, the
checkpointer and the writers, and calls the function of `--jaxline_mode`.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import errno
import os
import pathlib
import re
import sys
import tempfile
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
from jaxline import compilation_cache
from jaxline import debug
from jaxline import decode
from jaxline import disk
from jaxline import distributed
from jaxline import errors
from jaxline import goodput
from jaxline import train
from jaxline import xla
from jaxline.checkpoint import base
from jaxline.checkpoint import durable
from jaxline.checkpoint import memory
from jaxline.checkpoint import owner
from jaxline.checkpoint import spool
from jaxline.checkpoint import store as store_lib
from jaxline.compat import adapters
from jaxline.compat import lazy
from jaxline.metrics import console as console_lib
from jaxline.metrics import writers
from jaxline.supervision import nonfinite
from jaxline.supervision import preemption
from jaxline.supervision import watchdog

UsageError = errors.UsageError

lazy.complete(__name__)


# What a run is made of.


def create_checkpointer(
  config: config_dict.ConfigDict, mode: str
) -> base.Checkpointer:
  """Returns the run's checkpointer for one mode, as `config.checkpointer`."""
  if config.checkpointer == 'memory':
    return memory.InMemoryCheckpointer(config, mode, records_config=True)
  if not mode.startswith('eval'):
    memory.forget_published()
  return durable.DurableCheckpointer(config, mode)


TensorBoardLogger = writers.RunWriter  # JAXline's name.


def create_writer(config: config_dict.ConfigDict, mode: str) -> Any:
  """Returns the run's writer for one mode.

  It writes on the first host, and on the others only with
  `config.log_all_hosts`.
  """
  if jax.process_index() == 0 or config.log_all_hosts:
    return writers.RunWriter(config, mode)
  return writers.MetricWriter()


resolve_experiment_class = adapters.resolve_experiment_class


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
  run: Callable[[train.Run], Any]
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
  if name.startswith('eval'):
    return dataclasses.replace(MODES['eval'], checkpointer=name, eval_log=name)
  note = ' A name that begins with eval evaluates.'
  errors.check_names([name], MODES, 'mode', '--jaxline_mode', note)
  return MODES[name]


# Flags.


class _SettingFlag(flags.Flag):
  """A flag, --jaxline_X, whose value is also `debug.settings.X`.

  So JAXline's decorators and `train.evaluate` follow the command line in a
  program that parses flags but does not call `main`.
  """

  @property
  def value(self) -> Any:
    return self._value

  @value.setter
  def value(self, value: Any) -> None:
    self._value = value
    setattr(debug.settings, self.name.removeprefix('jaxline_'), value)


class _RecordedPath(str):
  """The value of --config if --jaxline_run stands in its place."""


class _ConfigParser(flags.ArgumentParser):
  """Parses a `_RecordedPath`, or lets another parser load a config file."""

  def __init__(self, of_files: flags.ArgumentParser):
    self._of_files = of_files

  def parse(self, path: str) -> Any:
    if isinstance(path, _RecordedPath):
      return base_config.recorded_config(os.path.dirname(path)).lock()
    return self._of_files.parse(path)


class _RunFlag(flags.Flag):
  """--jaxline_run=DIR: parses --config, as a file with the config of the run.

  Attributes:
    config: the flag --config.
  """

  config: flags.Flag

  def parse(self, argument: str) -> None:
    super().parse(argument)
    path = os.path.join(argument, base_config.RECORD)
    self.config.parse(_RecordedPath(path))


def _define_config(values: flags.FlagValues, argv: list[str] | None) -> None:
  """Defines --config and --jaxline_run.

  Args:
    values: where.
    argv: the command line; None is that of the process.
  """
  config_flags.DEFINE_config_file(
    'config',
    help_string='The run: a config file, such as configs/lm.py. Its values are'
    ' overridden by --config.key=value.',
    flag_values=values,
    sys_argv=argv,
  )
  values['config'].parser = _ConfigParser(values['config'].parser)
  run = _RunFlag(
    flags.ArgumentParser(),
    flags.ArgumentSerializer(),
    'jaxline_run',
    None,
    'In place of --config: the directory of a run, whose config is taken.'
    ' --config.key=value overrides its values.',
  )
  run.config = values['config']
  flags.DEFINE_flag(run, values)


_define_config(flags.FLAGS, None)
_MODE = flags.DEFINE_flag(
  _SettingFlag(
    flags.ArgumentParser(),
    flags.ArgumentSerializer(),
    'jaxline_mode',
    'train',
    'What to do: '
    + '; '.join(f'{name}: {mode.text}' for name, mode in MODES.items())
    + '.',
  )
)
for _name, _text in (
  ('jaxline_post_mortem', 'Enter pdb where an exception was raised.'),
  (
    'jaxline_disable_pmap_jit',
    'Run step and evaluate op by op, so that a debugger sees values.',
  ),
):
  flags.DEFINE_flag(
    _SettingFlag(flags.BooleanParser(), None, _name, False, _text, boolean=True)
  )
_ENSURE_TPU = flags.DEFINE_bool(
  'jaxline_ensure_tpu', False, 'Fail where JAX has fallen back to the CPU.'
)
_TPU_DRIVER = flags.DEFINE_string(
  'jaxline_tpu_driver',
  '',
  'Kept from JAXline; JAX has no TPU drivers any more.',
)
# `--help` of a program that lets absl parse the command line shows these too.
for _flag in flags.FLAGS.get_key_flags_for_module(__name__):
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], _flag)


# The command line.


def _parse_flags(argv: list[str]) -> list[str]:
  """Parses the command line; what is wrong with it is said in a line."""
  if any(arg in ('--help', '-help', '-h', '--h') for arg in argv[1:]):
    app.usage(shorthelp=True, writeto_stdout=True)  # The key flags alone.
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
    raise _config_error(e) from e
  except (flags.Error, AttributeError, KeyError) as e:
    if getattr(e, 'flagname', '').startswith('config.'):
      # ml_collections defines it by the file.
      raise _config_error('is missing') from e
    prefix = ''
    if not isinstance(e, flags.Error):
      # What ml_collections raises for an unknown config key, one inside the
      # other. From elsewhere they are errors of the config file.
      *_, raised_in = traceback.walk_tb(e.__traceback__)
      if 'ml_collections' not in raised_in[0].f_globals.get('__name__', ''):
        raise
      prefix = 'Unknown config key: '
    message: Any = e
    while isinstance(message, Exception) and message.args:
      message = message.args[0]
    raise UsageError(prefix + ' '.join(str(message).split())) from e


def _read_config(values: flags.FlagValues) -> config_dict.ConfigDict:
  """Returns a copy of the config of parsed flags: validated, `~` expanded."""
  if values.config is None:
    raise _config_error('is missing')
  if values['config'].present > values['jaxline_run'].present > 0:
    raise UsageError(
      f'--jaxline_run={values.jaxline_run} takes the place of --config, and'
      ' both are given. Leave one of them out.'
    )
  try:
    base_config.validate_config(values.config)
  except OSError as e:
    # What ml_collections gives instead of a config where it found no file.
    raise _config_error(e) from None
  return base_config.expand_paths(values.config)


def load_config(argv: Sequence[str]) -> config_dict.ConfigDict:
  """Returns the config that a command line names, without starting a run.

  Args:
    argv: `--config=FILE` or `--jaxline_run=DIR`, and overrides,
      `--config.key=value`; nothing else.

  Returns:
    The config, validated and locked; no directory is made for it.

  Raises:
    UsageError: what is wrong with the command line or the config.
  """
  values = flags.FlagValues()
  argv = [sys.argv[0], *argv]
  _define_config(values, argv)
  _, *unknown = _parse(values, argv)
  if unknown:
    raise UsageError(f'Unexpected arguments {unknown}.')
  config = _read_config(values)
  if config.experiment_class is not None:
    _check_recorded_class(values, config)
  return config.lock()


def _check_recorded_class(
  values: flags.FlagValues, config: config_dict.ConfigDict
) -> None:
  """Refuses what is no experiment, if the directory of a run names it."""
  if not values['jaxline_run'].present:
    return
  overrides = config_flags.get_override_values(values['config'])
  if 'experiment_class' not in overrides:
    resolve_experiment_class(config, is_recorded=True)


def _configs() -> list[pathlib.Path]:
  """Returns the config files beside the program."""
  folder = pathlib.Path(sys.argv[0]).resolve().parent / 'configs'
  return sorted(p for p in folder.glob('*.py') if not p.name.startswith('_'))


def _config_error(problem: str | OSError) -> UsageError:
  if isinstance(problem, OSError):
    problem = f'cannot be read: {str(problem).splitlines()[-1].strip()}'
  names = [f'--config=configs/{path.name}' for path in _configs()]
  expected = ' or '.join([*(names or ['--config=FILE']), '--jaxline_run=DIR'])
  return UsageError(f'--config {problem}; expected {expected}.')


# How a run ends.


class _Exit(SystemExit):
  """Ends the process with a code, after its message was printed."""

  def __init__(self, code: int, message: str = ''):
    super().__init__(message)
    self.code = code


class _Refused(_Exit, UsageError):
  """A UsageError that has been printed."""


# The errors whose message says all, so that it is printed without a traceback,
# and their exit codes.
_CODES = {
  UsageError: 2,
  store_lib.DamagedError: 1,
  nonfinite.NonfiniteError: 1,
  disk.FullDiskError: 1,
}


@contextlib.contextmanager
def _exits() -> Iterator[None]:
  """Prints what ends a run, once, and gives it its exit code.

  If other processes would wait for this one, it ends here.

  Raises:
    _Refused: for a UsageError.
    _Exit: for the other errors in `_CODES`, and for a SystemExit of the user's
      code, which must not look like the end of a run.
  """
  debug.settings.log_tracebacks = False
  try:
    yield
  except (Exception, SystemExit) as e:
    end = _end_of(e)
    if _has_others():
      _leave_others(end)
    if end is e:
      raise
    raise end from e
  finally:
    debug.settings.log_tracebacks = True


def _end_of(error: BaseException) -> BaseException:
  """Returns what to raise for an error, after printing its message."""
  if isinstance(error, _Exit):
    return error
  cause: BaseException | None = error
  while isinstance(cause, ImportError):
    cause = cause.__cause__ or cause.__context__
  if isinstance(cause, preemption.Preempted):
    error = cause  # It interrupted the import of an extension module.
  lines = [str(error), *getattr(error, '__notes__', [])]
  text = ' '.join(x for x in lines if 'JAX has removed its internal' not in x)
  codes = [code for kind, code in _CODES.items() if isinstance(error, kind)]
  if isinstance(error, preemption.Preempted):
    end: BaseException = error
    text = '\n'.join(f'[jaxline] {line}' for line in lines)
  elif isinstance(error, SystemExit):
    traceback.print_exception(error)
    code = error.code if isinstance(error.code, int) else 1
    end = _Exit(code if code & 0xFF else 1)
    text = (
      '[jaxline] The experiment or its config raised'
      f' SystemExit({error.code!r}), which does not end a run: raise'
      ' `experiment.StopTraining`.'
    )
  elif codes:
    kind = _Refused if isinstance(error, UsageError) else _Exit
    end = kind(codes[0], text)
  else:
    return error  # Python prints its traceback.
  print(text, file=sys.stderr, flush=True)
  return end


def _has_others() -> bool:
  """Says whether this is one of several processes, as far as is known yet."""
  # There is no public way to ask: `jax.process_count` starts the devices, which
  # takes the others, or this process has just failed to.
  from jax._src import distributed as jax_distributed
  from jax._src import xla_bridge

  if jax.distributed.is_initialized():
    return jax_distributed.global_state.num_processes > 1
  return xla_bridge.backends_are_initialized() and jax.process_count() > 1


def _leave_others(error: BaseException) -> None:
  """Ends this process at once, if the other ones are still in the run.

  A normal exit of Python would wait for the other processes, which wait for
  this one. They notice that it is gone by a lost connection or JAX's heartbeat.
  """
  evaluates = debug.settings.mode.startswith('eval')
  if isinstance(error, preemption.Preempted) and not evaluates:
    return  # All leave together.
  if isinstance(error, SystemExit):
    code: Any = error.code
  elif errors.is_lost_process(error):
    code = errors.LOST_CODE
    print(
      f'[jaxline] Process {jax.process_index()} of {jax.process_count()} has'
      ' lost another process, whose own lines may say why. The same command'
      f' resumes the run. ({str(error).splitlines()[0]:.300})',
      file=sys.stderr,
    )
  else:
    code = 1
    traceback.print_exception(error)
  logging.flush()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


# The run.


def main(
  experiment_class: Any,
  argv: Sequence[str],
  checkpointer_factory: base.CheckpointerFactory = create_checkpointer,
  *,
  writer_factory: Callable[[config_dict.ConfigDict, str], Any] = create_writer,
) -> None:
  """Runs an experiment as the command line says.

  Args:
    experiment_class: a class or a partial of one; None is the class that
      `config.experiment_class` names.
    argv: the command line without the program's name. Parsed here, unless
      absl has parsed it already (`app.run(functools.partial(main, Class))`).
    checkpointer_factory: makes the checkpointer of a config and a mode.
    writer_factory: makes the writer of a config and a log, 'train' or 'eval'.
  """

  def run(unused_argv: Sequence[str]) -> None:
    with _exits(), goodput.run(), console_lib.quiet_log():
      config = _read_config(flags.FLAGS)
      mode = _find_mode(_MODE.value)
      _start_jax(config)
      watchdog.cover_exit()
      if mode.checkpointer:  # Compile mode has none, and runs nothing here.
        _check_flags()
      if experiment_class is None:
        _check_recorded_class(flags.FLAGS, config)
      factories = checkpointer_factory, writer_factory
      origin = console_lib.Origin.of(flags.FLAGS['config'])
      start(experiment_class, config, _MODE.value, *factories, origin)

  with preemption.Watch():
    if flags.FLAGS.is_parsed():
      run(argv)
    else:
      app.run(run, argv=[sys.argv[0], *argv], flags_parser=_parse_flags)


def _start_jax(config: config_dict.ConfigDict) -> None:
  """Sets what must be set before JAX touches a device, and meets the others.

  Raises:
    UsageError: the config does not fit what is here.
  """
  is_alone = _MODE.value == 'compile' and config.topology
  if is_alone and not jax.config.values['jax_platforms']:
    # With libtpu installed JAX would look for TPUs here.
    jax.config.update('jax_platforms', 'cpu')
  for line in xla.apply(config.xla):
    print(f'[jaxline] {line}', flush=True)
  if not is_alone:
    distributed.initialize(config.distributed)
  elif os.environ.get('JAX_NUM_PROCESSES') not in (None, '', '1'):
    raise UsageError(
      f'config.topology is {config.topology!r}, for which one process'
      ' compiles, and JAX_NUM_PROCESSES is'
      f' {os.environ["JAX_NUM_PROCESSES"]!r}. Start it once, without the'
      ' launcher.'
    )


def start(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  name: str,
  checkpointer_factory: base.CheckpointerFactory = create_checkpointer,
  writer_factory: Callable[[config_dict.ConfigDict, str], Any] = create_writer,
  origin: console_lib.Origin | None = None,
) -> Any:
  """Makes the parts of a run and runs a mode, once the processes have met.

  Args:
    experiment_class: as for `main`.
    config: the run's, validated.
    name: the mode, as for --jaxline_mode.
    checkpointer_factory: as for `main`.
    writer_factory: as for `main`.
    origin: how the run was started; None is a call from Python.

  Returns:
    The run's directory, and what the function of the mode returns.

  Raises:
    UsageError: what is wrong with the command line, the config or the run's
      directory; nothing has been changed there.
  """
  mode = _find_mode(name)
  needs_run = bool(mode.checkpointer) and not mode.log
  if mode.eval_log:  # Unless the weights come from elsewhere.
    is_ours = checkpointer_factory is create_checkpointer
    needs_run &= is_ours and config.checkpointer == 'durable'
    needs_run &= not (config.eval_initial_weights or memory.seed('latest'))
  refusal = (
    f'config.checkpoint_dir is {config.checkpoint_dir!r}; expected the'
    f' directory of the run whose weights --jaxline_mode={name} shall take.'
  )
  if needs_run and not config.checkpoint_dir:
    raise UsageError(refusal)
  config = resolve_config(config)
  is_once = mode.eval_log and (config.one_off_evaluate or config.eval_steps)
  if needs_run and is_once and not store_lib.at(config.checkpoint_dir).names():
    raise UsageError(f'{refusal} There is none.')
  if experiment_class is None:
    experiment_class = resolve_experiment_class(config)
  if mode.eval_checkpointer and jax.process_count() > 1:
    raise UsageError(
      f'--jaxline_mode={name} is for one process, and there are'
      f' {jax.process_count()}: their threads would meet in different programs.'
      ' Use train_and_eval.'
    )
  if mode.checkpointer:
    directory = memory.run_directory(
      experiment_class, base_config.recorded(config), begins=bool(mode.log)
    )
    with config.ignore_type(), config.unlocked():
      config.checkpoint_dir = directory
  with goodput.run(), contextlib.ExitStack() as stack:
    if mode.logs:  # First: whatever closes below may hang.
      stack.enter_context(watchdog.limit(config.watchdog_secs))
    stack.enter_context(compilation_cache.of_run(config))
    # It closes last, with what the run came to.
    console = stack.enter_context(console_lib.Console.make(config, origin))
    is_writable = bool(mode.logs) and _claim(config, mode, stack)

    if is_writable:
      stack.callback(lambda: spool.upload(config.checkpoint_dir))
    # It closes last: what is being saved is still logged.
    logs = stack.enter_context(contextlib.ExitStack())

    def checkpointer(mode: str) -> base.FullCheckpointer | None:
      if not mode:
        return None
      full = adapters.full_checkpointer(checkpointer_factory(config, mode))
      full.reads_only = not is_writable
      stack.callback(full.close)
      return full

    def writer(log: str) -> Any:
      if not log or not is_writable:
        return writers.MetricWriter()
      made = writer_factory(config, log)
      console.show_texts(made, log)
      logs.enter_context(adapters.full_writer(made))
      return made

    first = checkpointer(mode.checkpointer)
    if first is not None:
      first.check_shared()
      first.check_config(experiment_class)
    watch = preemption.Watch()
    if mode.logs:
      watch = preemption.begin_run(takes_steps=bool(mode.log))
    run = train.Run(
      experiment_class,
      config,
      first,
      writer(mode.log),
      writer(mode.eval_log),
      xla.actions(config.xla) if mode.log else (),
      eval_mode=mode.eval_mode or mode.eval_log,
      eval_checkpointer=checkpointer(mode.eval_checkpointer),
      console=console,
      watch=watch,
    )
    # What is raised before is wrong usage, which needs no debugger.
    try:
      return config.checkpoint_dir, debug.debugger_fallback(mode.run)(run)
    except preemption.Preempted as e:
      is_durable = mode.logs and config.checkpointer == 'durable'
      if is_durable and not (e.is_over or console.tells_how_to_go_on):
        given = f'--config.checkpoint_dir={config.checkpoint_dir}'
        e.add_note(f'It goes on with the same command and {given}')
      raise
    except Exception as e:
      if errors.is_lost_process(e) and _has_others():
        _leave_others(e)  # The checkpointer's end would wait for the lost one.
      raise


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
        stack.enter_context(owner.Claim(config.checkpoint_dir, name))
    except owner.ClaimedError as e:
      refused = str(e)
    except OSError as e:
      unwritable = str(e)
      if (
        mode.log
        or not (config.one_off_evaluate or config.eval_steps)
        or e.errno not in (errno.EROFS, errno.EACCES, errno.EPERM)
      ):
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


def resolve_config(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """Returns the config of a run with a directory of this machine, locked.

  Args:
    config: as the config file and the overrides made it, validated; not
      changed.

  Raises:
    UsageError: what is wrong with the directory.
  """
  config = base_config.expand_paths(config)
  if not config.checkpoint_dir and jax.process_count() > 1:
    raise UsageError(
      f'config.checkpoint_dir is {config.checkpoint_dir!r}; a run of'
      f' {jax.process_count()} processes needs one, the same for all.'
    )
  place = store_lib.at(config.checkpoint_dir or _fresh_directory())
  with config.ignore_type(), config.unlocked():
    config.checkpoint_dir = place.url
  return config.lock()


def _fresh_directory() -> str:
  """Makes a directory below /tmp that no other run has, for this user alone."""
  try:
    source = config_flags.get_config_filename(flags.FLAGS['config'])
  except flags.Error:
    source = 'run'  # A config that was set without a file, by a flag saver.
  path, _, option = source.partition(':')
  # The option says which run of a file it is.
  name = re.sub(r'[^\w.-]+', '_', f'{pathlib.Path(path).stem}_{option}')
  stamp = time.strftime('%Y%m%d_%H%M%S')
  return tempfile.mkdtemp(prefix=f'jaxline_{name.strip("_")}_{stamp}_')


def _check_flags() -> None:
  """Refuses what --jaxline_tpu_driver and --jaxline_ensure_tpu say."""
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
