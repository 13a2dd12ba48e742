"""Parses the flags, builds a run and starts it. No other module reads flags.

`main` parses the command line and configures JAX. `start` chooses the class and
the directory, builds the parts of the run, and calls the mode's function.
"""

from collections.abc import Callable, Sequence
import contextlib
import functools
import os
import runpy
import sys
import tempfile
from typing import Any, NamedTuple

from absl import app
from absl import flags
from absl import logging
import jax
from ml_collections import config_dict
from ml_collections import config_flags

from jaxline import base_config
from jaxline import errors
from jaxline import experiment as experiment_lib
from jaxline import train
from jaxline.base import debug
from jaxline.base import goodput
from jaxline.base import lazy
from jaxline.base import named_class
from jaxline.base import watchdog
from jaxline.base import xla
from jaxline.checkpoint import durable
from jaxline.checkpoint import protocol
from jaxline.compat import adapters
from jaxline.compat import checkpointers
from jaxline.compat import experiments
from jaxline.metrics import console as console_lib
from jaxline.metrics import writers
from jaxline.parallel import distributed
from jaxline.run_directory import logs as logs_lib
from jaxline.run_directory import owner
from jaxline.run_directory import store as store_lib
from jaxline.supervision import compilation_cache
from jaxline.supervision import exits
from jaxline.supervision import preemption

TensorBoardLogger = logs_lib.RunWriter  # JAXline's name.
resolve_experiment_class = experiment_lib.resolve_experiment_class
# The original class: a program may rebind the name in `checkpointers`.
_CHECKPOINTER = checkpointers.InMemoryCheckpointer

lazy.complete(__name__)


# Modes.


def _compile(run: train.Run) -> None:
  from jaxline.compile import ahead

  if not ahead.compile_experiment(run.experiment_class, run.config):
    raise SystemExit(1)


def _decode(run: train.Run) -> None:
  from jaxline import decode  # Few runs need it.

  decode.decode(run.experiment_class, run.config, run.checkpointer)


class Mode(NamedTuple):
  """A value of --jaxline_mode."""

  run: Callable[[train.Run], Any]
  trains: bool = False  # Whether it saves checkpoints and the log `train`.
  eval_log: str = ''  # The name of its evaluation log, if any.
  follows: bool = False  # Whether it reads weights that a training run saves.


_TRAIN = adapters.rebindable(train, 'train', 'writer')
_EVALUATE = adapters.rebindable(train, 'evaluate', 'eval_writer', 'eval_mode')


MODES = {
  'train': Mode(_TRAIN, trains=True),
  'eval': Mode(_EVALUATE, eval_log='eval', follows=True),
  'train_and_eval': Mode(
    train.Run.train_and_eval, trains=True, eval_log='eval'
  ),
  'train_eval_multithreaded': Mode(
    lambda run: run.train_and_eval_in_threads(_TRAIN, _EVALUATE),
    trains=True,
    eval_log='eval',
  ),
  'decode': Mode(_decode, follows=True),
  'compile': Mode(_compile),
}


def create_checkpointer(
  config: config_dict.ConfigDict, mode: str
) -> protocol.Checkpointer:
  """Returns the checkpointer of `config.checkpointer` for a mode."""
  config = base_config.complete_config(config)
  if checkpointers.InMemoryCheckpointer is not _CHECKPOINTER:
    return checkpointers.InMemoryCheckpointer(config, mode)
  if config.checkpointer == 'memory':
    return checkpointers.InMemoryCheckpointer(config, mode, records_config=True)
  checkpointer = durable.DurableCheckpointer(config, mode)
  # A program may call this checkpointer with an experiment made for JAXline.
  checkpointer.complete = experiments.full_experiment
  return checkpointer


def create_writer(config: config_dict.ConfigDict, mode: str) -> Any:
  """Returns the writer of a log such as `train` or `eval`."""
  if jax.process_index() == 0 or config.log_all_hosts:
    return TensorBoardLogger(base_config.complete_config(config), mode)
  return writers.MetricWriter()


def resolve_config(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
  """Returns a locked copy with `~` expanded and an absolute directory."""
  config = base_config.expand_paths(config)
  given = base_config.complete_config(config).checkpoint_dir
  given = given or tempfile.mkdtemp(prefix='jaxline_')  # Private to the user.
  config.checkpoint_dir = store_lib.at(given).url
  return config.lock()


def start(
  experiment_class: Any,
  config: config_dict.ConfigDict,
  name: str,
  checkpointer_factory: protocol.CheckpointerFactory = create_checkpointer,
  writer_factory: Callable[..., Any] | None = None,
  origin: console_lib.Origin | None = None,
) -> tuple[str, Any]:
  """Runs the mode called `name`, after the processes have connected.

  For the class and the factories see `main`. A run without an `origin` was
  started from Python. Returns the run's directory and the mode's result.
  """
  if name.startswith('eval'):
    mode = MODES['eval']._replace(eval_log=name)
  else:
    errors.check_names([name], MODES, 'mode', '--jaxline_mode')
    mode = MODES[name]
  is_threaded = name == 'train_eval_multithreaded'
  if is_threaded and jax.process_count() > 1:
    raise errors.UsageError(
      f'--jaxline_mode={name} runs in one process only. Use train_and_eval.'
    )
  if experiment_class is None:
    experiment_class = resolve_experiment_class(
      config, recorded_in=_recorded_in(origin)
    )
  may_be_own = not experiments.is_full(experiment_class)
  base_config.validate_config(config, may_be_own=may_be_own)
  config = resolve_config(config)
  config.checkpoint_dir = checkpointers.choose_directory(
    experiment_class, base_config.recorded(config), begins=mode.trains
  )
  own_config, config = config, base_config.complete_config(config)
  logs = [log for log in ('train' * mode.trains, mode.eval_log) if log]
  with goodput.run(), contextlib.ExitStack() as stack:
    if logs:  # Enter it first to exit it last: closing the others may hang.
      stack.enter_context(watchdog.limit(config.watchdog_secs))
    stack.enter_context(compilation_cache.of_run(config))
    # The console prints the summary after the other parts have closed.
    console = stack.enter_context(console_lib.Console.make(config, origin))
    logs = _claim(logs, config, stack)
    # Logs close after the checkpointers, so that a last save is still logged.
    closing = stack.enter_context(contextlib.ExitStack())

    def checkpointer(role: str) -> Any:
      made = checkpointer_factory(own_config, role)
      full = adapters.full_checkpointer(made, experiment_class)
      stack.callback(full.close)
      full.directory.reads_only = not logs
      # Set it here: a program's factory may ignore the mode.
      full.directory.follows = mode.follows or role == 'eval'
      full.directory.check_shared()
      declares = experiments.class_of(experiment_class)
      if isinstance(made, durable.DurableCheckpointer) and declares:
        made.check_config(experiments.declared(declares))
      return full

    first, second = None, None
    if mode.trains or mode.follows:
      first = checkpointer('train' if is_threaded else name)
      second = checkpointer('eval') if is_threaded else None
    made = {}
    for log in logs:
      made[log] = (writer_factory or create_writer)(own_config, log)
      closing.enter_context(adapters.full_writer(made[log]))
    profiles = mode.trains and config.xla.pgle_save and not jax.process_index()
    actions = []
    if profiles:
      from jaxline.supervision import profiling

      folder_of = logs_lib.folders(config.checkpoint_dir)
      actions.append(profiling.PgleProfiler(config, folder_of))
    run = train.Run(
      experiment_class,
      own_config,
      first,
      made.get('train'),
      made.get(mode.eval_log),
      actions,
      eval_mode=name if is_threaded else mode.eval_log,
      eval_checkpointer=second,
      console=console,
      watch=preemption.begin_run(mode.trains, config.preemption_signals),
    )
    stack.push(exits.abort_if_lost)
    # Only the mode itself needs a debugger, not the setup above.
    return config.checkpoint_dir, debug.debugger_fallback(mode.run)(run)


def _claim(
  logs: list[str], config: config_dict.ConfigDict, stack: contextlib.ExitStack
) -> list[str]:
  """Claims the logs of a run; returns the writable ones."""
  problem, is_refused = '', False
  if jax.process_index() == 0:
    try:
      for log in logs:
        stack.enter_context(owner.Claim(config.checkpoint_dir, log))
    except (owner.ClaimedError, OSError) as e:
      problem = f'Nothing can be written in {config.checkpoint_dir}: {e}'
      is_refused = 'train' in logs or isinstance(e, owner.ClaimedError)
  problem, is_refused = distributed.broadcast_from_process_0(
    (problem, is_refused)
  )
  if is_refused:
    raise errors.UsageError(problem)
  if problem:  # Evaluation can do without writing.
    logging.warning('%s. The results go to the console only.', problem)
    return []
  if logs:
    stack.callback(logs_lib.upload, config.checkpoint_dir)
  return logs


# Flags.


class _ConfigParser(flags.ArgumentParser):
  """Loads a config from FILE.py, FILE.py:OPTION, or the directory of a run."""

  def parse(self, argument: str) -> config_dict.ConfigDict:
    if directory := _run_of(argument):
      return base_config.recorded_config(directory).lock()
    file, *option = argument.split(':', 1)
    if not os.path.isfile(file):
      raise errors.UsageError(
        'not found; expected a file such as configs/lm.py, or the directory of'
        ' a run.'
      )
    try:
      # A config file names its own class as `f'{__name__}:Class'`.
      name = named_class.importable(file)
      values = runpy.run_path(file, run_name=name)
      config = values['get_config'](*option)
      named = getattr(config, 'experiment_class', None)
      named_class.check_own_class(file, values, str(named))
      base_config.open_nones(config)
      return config.lock()
    except errors.UsageError:
      raise
    except Exception as e:  # Some types would be reported as flag errors.
      raise RuntimeError(f'--config={argument} raised an error.') from e


def _run_of(path: str) -> str:
  """Returns the directory of the run that --config names, or ''."""
  path = path.removesuffix(f'/{base_config.RECORD}')
  return path * ('://' in path or os.path.isdir(os.path.expanduser(path)))


def _recorded_in(origin: console_lib.Origin | None) -> str:
  """Returns the run's directory if its record names the class, else ''."""
  if origin is None or 'experiment_class' in origin.overrides:
    return ''
  return _run_of(origin.config_file)


def _define_config(values: flags.FlagValues, argv: list[str] | None) -> None:
  """Defines --config and --jaxline_run; `argv` holds the overrides."""
  text = (
    'A config file such as configs/lm.py, or the directory of a run to take its'
    ' config from. Override values with --config.KEY=VALUE.'
  )
  config_flags.DEFINE_config_file('config', None, text, values, sys_argv=argv)
  flag = values['config']
  flag.parser = _ConfigParser()
  parse_config = flag.parse

  def parse(argument: Any) -> None:
    parse_config(argument)  # It defines a flag for each override.
    for name in [x for x in values if x.startswith('config.')]:
      one, key = values[name], name.removeprefix('config.')
      # In the experiment's own text keys, 'None' is text, as in JAXline.
      is_text = isinstance(one.value, str) and key not in base_config.DEFAULTS
      if isinstance(one, flags.MultiFlag):
        own = functools.partial(_parse_tuple, one, one.parse)
        one.parse = own  # type: ignore[method-assign]
      elif not is_text:
        one.parser = _OrNone(one.parser)

  flag.parse = parse  # type: ignore[method-assign]
  flags.DEFINE_alias('jaxline_run', 'config', values)


def _parse_tuple(flag: Any, parse: Callable[..., None], argument: Any) -> None:
  """Adds values to a tuple's flag; an empty tuple clears earlier values."""
  if argument in ('()', '[]') and flag.present:
    flag.value.clear()
  parse(argument)


class _OrNone(flags.ArgumentParser):
  """Parses None, and all values that the given parser accepts."""

  def __init__(self, parser: flags.ArgumentParser):
    self._parser = parser

  def parse(self, argument: Any) -> Any:
    return None if argument == 'None' else self._parser.parse(argument)


class _SettingFlag(flags.Flag):
  """A flag --jaxline_X that sets `debug.settings.X`, even without `main`."""

  def __init__(self, name: str, default: str | bool, text: str):
    is_switch = isinstance(default, bool)
    parser = flags.BooleanParser() if is_switch else flags.ArgumentParser()
    name = f'jaxline_{name}'
    super().__init__(parser, None, name, default, text, boolean=is_switch)

  def _set(self, value: Any) -> None:
    self._value = value
    setattr(debug.settings, self.name.removeprefix('jaxline_'), value)

  value = property(lambda self: self._value, _set)


_define_config(flags.FLAGS, None)
for _setting in (
  (
    'mode',
    'train',
    'train: train, resuming from the newest checkpoint. eval, or any name that'
    ' starts with eval: evaluate each new checkpoint. train_and_eval: do both'
    ' in turn. train_eval_multithreaded: do both in two threads. decode:'
    ' continue prompts. compile: report memory, communication and step time.',
  ),
  ('post_mortem', False, 'Enter pdb where an exception was raised.'),
  ('disable_pmap_jit', False, 'Run op by op, so that a debugger sees values.'),
):
  flags.DEFINE_flag(_SettingFlag(*_setting))
flags.DEFINE_bool('jaxline_ensure_tpu', False, 'Fail if JAX finds no TPU.')
flags.DEFINE_string('jaxline_tpu_driver', '', 'Ignored: a flag of JAXline.')
# `--help` shows the flags of the program's own module.
for _flag in flags.FLAGS.get_key_flags_for_module(__name__):
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], _flag)


# The command line.


def main(
  experiment_class: Any,
  argv: Sequence[str],
  checkpointer_factory: protocol.CheckpointerFactory = create_checkpointer,
  *,
  writer_factory: Callable[..., Any] | None = None,
) -> None:
  """Runs an experiment in the mode and with the config of the command line.

  Args:
    experiment_class: a class or a partial of one; None means the class that
      `config.experiment_class` names.
    argv: the command line without the program's name. It is parsed unless absl
      has already parsed it (`app.run(functools.partial(main, Class))`).
    checkpointer_factory: maps a config and a mode to a checkpointer.
    writer_factory: maps a config and the name of a log, 'train' or 'eval', to
      a writer; None means `create_writer`.
  """

  def parse(argv: list[str]) -> list[str]:
    try:
      with exits.exit_on_error():
        return _parse(flags.FLAGS, argv)
    except SystemExit as e:
      if e.code == 1:  # absl's --help.
        e.code = 0
      raise

  def run(unused_argv: Sequence[str]) -> None:
    factories = checkpointer_factory, writer_factory
    name = flags.FLAGS.jaxline_mode
    logging.get_absl_handler().addFilter(console_lib.is_shown)
    with exits.exit_on_error():
      config, origin = _read_config(flags.FLAGS)
      _start_jax(base_config.complete_config(config), name)
      watchdog.covers_exit = True
      start(experiment_class, config, name, *factories, origin)

  with preemption.Watch():
    if flags.FLAGS.is_parsed():
      run(argv)
    else:
      app.run(run, argv=[sys.argv[0], *argv], flags_parser=parse)


def load_config(argv: Sequence[str]) -> config_dict.ConfigDict:
  """Returns the validated, locked config of --config or --jaxline_run.

  `argv` may hold only this flag and overrides, `--config.KEY=VALUE`.
  """
  values, argv = flags.FlagValues(), [sys.argv[0], *argv]
  _define_config(values, argv)
  _parse(values, argv)
  config, origin = _read_config(values)
  base_config.validate_config(config)
  if config.experiment_class and (directory := _recorded_in(origin)):
    resolve_experiment_class(config, recorded_in=directory)
  return config.lock()


def _parse(values: flags.FlagValues, argv: list[str]) -> list[str]:
  """Parses flags; returns the program's name, or raises UsageError."""
  # Parse the flag of the config first: it defines the flags of the overrides.
  first = '--config=', '--jaxline_run='
  argv = [argv[0], *sorted(argv[1:], key=lambda x: not x.startswith(first))]
  try:
    name, *others = values(argv)
  except (flags.Error, AttributeError, KeyError) as e:
    # ml_collections raises the last two, one nested in the other.
    text = str(getattr(e.args[0], 'args', e.args)[0])
    kind = '' if isinstance(e, flags.Error) else 'Unknown config key: '
    raise errors.UsageError(kind + ' '.join(text.split())) from e
  if others:
    raise errors.UsageError(
      f'Got {others}; expected flags, such as --config.KEY=5.'
    )
  return [name]


def _read_config(
  values: flags.FlagValues,
) -> tuple[config_dict.ConfigDict, console_lib.Origin]:
  """Returns a validated copy of the config from the flags, and its origin."""
  # absl counts the alias as --config too.
  is_twice = 0 < values['jaxline_run'].present < values['config'].present
  if values.config is None or is_twice:
    raise errors.UsageError(
      'Expected --config=FILE, such as configs/lm.py, or --jaxline_run=DIR,'
      ' and not both.'
    )
  # Validate before the processes connect; `start` does so again for the class.
  base_config.validate_config(values.config, may_be_own=True)
  origin = console_lib.Origin.of(values['config'])
  return base_config.expand_paths(values.config), origin


def _start_jax(config: config_dict.ConfigDict, mode: str) -> None:
  """Configures JAX, and connects the processes unless one compiles alone."""
  is_alone = mode == 'compile' and config.topology
  if is_alone and not jax.config.values['jax_platforms']:
    # If libtpu is installed, JAX would look for TPUs on this machine.
    jax.config.update('jax_platforms', 'cpu')
  for line in xla.apply(config.xla, has_started=distributed.has_started()):
    print(f'[jaxline] {line}', flush=True)
  if is_alone:
    return
  distributed.initialize(config.distributed)
  backend = flags.FLAGS.jaxline_ensure_tpu and jax.default_backend()
  if backend not in (False, 'tpu'):
    raise errors.UsageError(
      f'--jaxline_ensure_tpu: JAX runs on {backend!r}. Install jax[tpu], and'
      ' end all other processes that use the TPU.'
    )
