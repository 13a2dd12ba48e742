r"""Checkpoint loading rules: a new run starts from weights of other runs.

    task.train.init_from_checkpoint_rules = {
      'runs/a': loading.CheckpointLoadingRules(
        load_rules=[
          (r'params/language_model/lm/(.*)', 'params/language_model/lm/{}'),
        ],
        safe_load=True,
      ),
    }

A weight is called `params/` and its name; a variable that is not trained, such
as a moving mean, `non_trainable/` and its name. `python -m jaxline.checkpoint
show runs/a` lists the names in a checkpoint, with `state/` and, before
`non_trainable/`, `model_state/` in front. The other run may be any sharded run
of this library, with another experiment and another mesh. If it keeps a moving
average of its weights, that of a weight is `model_state/ema/` and the weight's
name.

For one checkpoint, `config.restore_from` with `config.restore_rules` does the
same, for any experiment.

Names and fields are those of Paxml (Google, 2022).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import re
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import multihost_utils
import numpy as np

from examples.pax import base_layer
from examples.pax import hparams
from jaxline import sharded
from jaxline.checkpoint import arrays as arrays_lib
from jaxline.checkpoint import contents
from jaxline.checkpoint import files
from jaxline.checkpoint import inspection
from jaxline.checkpoint import structure

_PARAMS = 'params/'
_EMA = 'model_state/ema/'
_OPT_STATE = 'opt_state/'
_ROOT = 'state/'  # Where a checkpoint has a `TrainState`.
_NAMED = 20  # Names in a log line.


class CheckpointLoadingRules(hparams.BaseHParams):
  r"""What is taken of one checkpoint.

  Attributes:
    load_rules: pairs of a regular expression, which must match the whole name
      of a variable of this run, and the name of its source. In that, `{}` (or
      `{0}`, `{1}`) or `\1` stands for what the groups matched. The first pair
      that matches counts.
    safe_load: whether it is an error if a pair is used for no variable.
    ignore_rules: regular expressions, likewise: these variables stay as they
      are initialised, whatever `load_rules` say.
    step: of the checkpoint; None is the newest.
    load_step: whether the run's steps go on from the checkpoint's. The learning
      rate follows the optimizer's own count: see `load_opt_states`.
    load_opt_states: whether the optimizer's state of the loaded weights is
      loaded too, with its counts of steps. It must be of the same kind.
    load_ema_states: whether the moving average of the loaded weights is loaded
      too. Else, an average begins as the loaded weights.
  """

  load_rules: Sequence[tuple[str, str]] = ()
  safe_load: bool = False
  ignore_rules: Sequence[str] = ()
  step: int | None = None
  load_step: bool = False
  load_opt_states: bool = False
  load_ema_states: bool = False


def load(
  state: sharded.TrainState, rules: Mapping[str, CheckpointLoadingRules]
) -> sharded.TrainState:
  """Returns a state with variables replaced by those of checkpoints.

  Each array is read to where the one in its place lies, on several hosts each
  host's part. Nothing is replaced unless everything fits.

  Args:
    state: of a new run.
    rules: directory (of a run, of a series, of a checkpoint; see
      `inspection`) -> what is taken of it.

  Returns:
    The state; what is not replaced are the arrays that were given.

  Raises:
    ValueError: a rule matches nothing, names what the checkpoint has not, or
      gives another shape or type; or two checkpoints give the same.
    files.DamagedError: what is asked for is damaged.
  """
  live = structure.named_leaves(state)
  plans = []
  given: dict[str, str] = {}
  for directory, rule in rules.items():
    if not isinstance(rule, CheckpointLoadingRules):
      raise TypeError(
        f'init_from_checkpoint_rules[{directory!r}] is {rule!r}; expected'
        ' loading.CheckpointLoadingRules.'
      )
    where = f'init_from_checkpoint_rules[{directory!r}]'
    checkpoint = _find(directory, rule.step)
    sources = _sources(live, rule, where)
    _check(sources, live, checkpoint, where)
    if twice := sorted(given.keys() & sources.keys()):
      raise ValueError(
        f'{where} gives {twice[:_NAMED]}, and so does'
        f' init_from_checkpoint_rules[{given[twice[0]]!r}]. Leave them out in'
        ' one of the two, with ignore_rules.'
      )
    given |= dict.fromkeys(sources, directory)
    plans.append((checkpoint, sources))
  replaced: dict[str, Any] = {}
  for checkpoint, sources in plans:
    replaced |= _read(checkpoint, sources, live)
    logging.info('Loaded %d arrays of %s.', len(sources), checkpoint.path)
  kept = [name for name in _variables(live) if _full(name) not in replaced]
  if kept:
    logging.info(
      '%d variables stay as they were initialised: %s%s',
      len(kept),
      ', '.join(kept[:_NAMED]),
      ' ...' if len(kept) > _NAMED else '',
    )
  leaves = [replaced.get(name, x) for name, x in live.items()]
  return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _variables(live: Iterable[str]) -> Iterator[str]:
  """Yields the name of each variable, as rules have it."""
  not_trained = f'model_state/{base_layer.NON_TRAINABLE}/'
  for name in live:
    if name.startswith(_PARAMS):
      yield name
    elif name.startswith(not_trained):
      yield name.removeprefix('model_state/')


def _full(name: str) -> str:
  """Returns where in a `TrainState` a variable of rules is."""
  if name.startswith(f'{base_layer.NON_TRAINABLE}/'):
    return f'model_state/{name}'
  return name


def _sources(
  live: Mapping[str, Any], rule: CheckpointLoadingRules, where: str
) -> dict[str, str]:
  """Returns name of an array -> its source's, both in a `TrainState`."""
  names = list(_variables(live))
  ignored = [_compiled(r, f'{where}.ignore_rules') for r in rule.ignore_rules]
  pairs = [
    (_compiled(regex, f'{where}.load_rules'), source)
    for regex, source in rule.load_rules
  ]
  sources: dict[str, str] = {}
  used = set()
  for name in names:
    if any(regex.fullmatch(name) for regex in ignored):
      continue
    for i, (regex, source) in enumerate(pairs):
      if match := regex.fullmatch(name):
        used.add(i)
        sources[_full(name)] = _full(_expanded(match, source, where))
        break
  unused = [r.pattern for i, (r, _) in enumerate(pairs) if i not in used]
  # That none of several is used is never meant.
  if unused and (rule.safe_load or not used):
    near = hparams.nearest_names(unused[0], names)
    raise ValueError(
      f'{where}.load_rules: {unused} match the whole name of no variable of'
      ' this run, or those that match are ignored, or an earlier rule takes'
      f' them. The nearest to the first are {near}.'
      + (' safe_load=False lets unused rules pass.' if used else '')
    )
  # Of the weights alone: what follows belongs to them. A weight that comes from
  # an average belongs to the weight that this is the average of.
  weights = {
    name.removeprefix(_PARAMS): source.removeprefix(_PARAMS).removeprefix(_EMA)
    for name, source in sources.items()
    if name.startswith(_PARAMS)
  }
  has_ema = any(name.startswith(_EMA) for name in live)
  if rule.load_ema_states and not has_ema:
    raise ValueError(
      f'{where}.load_ema_states is True, but this run keeps no moving average'
      " of its weights: its optimizer's ema_decay is 0."
    )
  if rule.load_ema_states:
    sources |= {f'{_EMA}{n}': f'{_EMA}{s}' for n, s in weights.items()}
  elif has_ema:
    sources |= {f'{_EMA}{n}': sources[f'{_PARAMS}{n}'] for n in weights}
  if rule.load_opt_states:
    sources |= _opt_sources(live, weights)
  if rule.load_step:
    sources['step'] = 'step'
  return sources


def _opt_sources(
  live: Mapping[str, Any], weights: Mapping[str, str]
) -> dict[str, str]:
  """Returns the same of the optimizer's state.

  What belongs to a weight ends with its name. What belongs to none, such as a
  count, has the same name there.
  """
  all_weights = [
    name.removeprefix(_PARAMS) for name in live if name.startswith(_PARAMS)
  ]
  sources = {}
  for name in live:
    if not name.startswith(_OPT_STATE):
      continue
    owners = [w for w in all_weights if name.endswith(f'/{w}')]
    if not owners:
      sources[name] = name
    elif (owner := max(owners, key=len)) in weights:
      sources[name] = name.removesuffix(owner) + weights[owner]
  return sources


def _compiled(regex: str, where: str) -> re.Pattern[str]:
  try:
    return re.compile(regex)
  except re.error as e:
    raise ValueError(
      f'{where} has {regex!r}, which is no regular expression: {e}.'
    ) from e


def _expanded(match: re.Match[str], source: str, where: str) -> str:
  """Returns a source with what the groups matched."""
  try:
    if '{' in source:
      return source.format(*match.groups())
    return match.expand(source)
  except (re.error, IndexError, KeyError, ValueError) as e:
    raise ValueError(
      f'{where}.load_rules has {(match.re.pattern, source)!r}, whose source'
      f' does not fit its {match.re.groups} groups: {e}.'
    ) from e


def _find(directory: str, step: int | None) -> inspection.Checkpoint:
  """Finds a checkpoint, on all hosts the same."""
  where = directory if step is None else f'{directory}:{step}'
  found = inspection.find(where)
  if jax.process_count() > 1 and step is None:
    # There may be a newer one since the first host looked.
    newest = int(
      multihost_utils.broadcast_one_to_all(np.int64(found.record['step']))
    )
    if newest != found.record['step']:
      found = inspection.find(f'{directory}:{newest}')
  return found


def _check(
  sources: Mapping[str, str],
  live: Mapping[str, Any],
  checkpoint: inspection.Checkpoint,
  where: str,
) -> None:
  """Refuses sources that are not there, or of another shape or type."""
  described = checkpoint.described
  have = [n.removeprefix(_ROOT) for n in described if n.startswith(_ROOT)]
  if absent := {n: s for n, s in sources.items() if s not in have}:
    name, source = next(iter(absent.items()))
    raise ValueError(
      f'{where}: {checkpoint.path} lacks {len(absent)} arrays: {source!r} (for'
      f' {name!r}) and {sorted(absent.values())[:_NAMED]}. The nearest to the'
      f' first are {hparams.nearest_names(source, have)}.'
    )
  wrong = []
  for name, source in sources.items():
    saved = arrays_lib.saved_shape(described[_ROOT + source])
    here = f'{live[name].dtype.name}{list(live[name].shape)}'
    if saved != here:
      wrong.append(f'  {name} is {here}, its source {source} is {saved}')
  if wrong:
    raise ValueError(
      f'{where}: {checkpoint.path} does not fit; nothing was loaded. Leave'
      ' these out with ignore_rules.\n' + '\n'.join(wrong)
    )


def _read(
  checkpoint: inspection.Checkpoint,
  sources: Mapping[str, str],
  live: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns name -> array, which lies where the live one does."""
  stored = {name: _ROOT + source for name, source in sources.items()}
  with files.reading(checkpoint.path):
    wants = frozenset(stored.values()).__contains__
    return contents.verified(checkpoint.path, wants).read_like(live, stored)


class LoadingMixin:
  """A `ShardedExperiment` that follows loading rules; to stand before it.

  They are followed once, when the state is made: not where a checkpoint of the
  run itself is restored.

  Attributes:
    loading_rules: as `load` takes them; to be set by the constructor.
  """

  loading_rules: Mapping[str, CheckpointLoadingRules] = {}

  @property
  def state(self) -> sharded.TrainState:
    """The live state, made at the first use."""
    is_new = self._state is None
    state = super().state
    if is_new and self.loading_rules:
      state = self._state = load(state, self.loading_rules)
    return state

  def train_loop(
    self,
    config: Any,
    state: Any,
    periodic_actions: Sequence[Any],
    writer: Any = None,
  ) -> None:
    """Runs steps until `should_run_step` says no, perhaps from a later one."""
    if any(rule.load_step for rule in self.loading_rules.values()):
      step = int(self.state.step)
      if step != state.global_step:
        logging.info('The run begins at step %d, as load_step says.', step)
        state.global_step = step
        for action in periodic_actions:
          action.update_time(time.time(), step)
    super().train_loop(config, state, periodic_actions, writer)
