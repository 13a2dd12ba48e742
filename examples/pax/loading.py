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
as a moving mean, `non_trainable/` and its name. If the other run keeps moving
averages, `ema/params/` and `ema/non_trainable/` with the same names are
sources. `python -m jaxline.checkpoint show runs/a` lists the arrays of a
checkpoint: weights are below `state/params/`, other variables below
`state/model_state/non_trainable/`, averages below `state/model_state/ema/` and
`state/model_state/ema_non_trainable/`. The other run may be any sharded run of
this library, with another experiment and another mesh.

This is a translation: `_sources` writes a rule out as pairs of arrays, and
`jaxline.checkpoint` matches names, checks shapes and reads, as it does for
`config.restore_from` with `config.restore_rules`, which suit any experiment.
What those have no words for is here: several checkpoints; averages and the
optimizer's state, which follow the weights; and the count of steps.

Names and fields are those of Paxml (Google, 2022).
"""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import re
from typing import Any

from absl import logging
import jax

from examples.pax import base_layer
from examples.pax import hparams
from jaxline import errors
from jaxline import sharded
from jaxline.base import trees
from jaxline.checkpoint import inspection
from jaxline.checkpoint import rules as rules_lib
from jaxline.parallel import distributed

_ROOT = 'state/'  # Where a checkpoint has a `TrainState`.
_STATE = 'model_state/'  # Rules leave this out.
_NON_TRAINABLE = f'{base_layer.NON_TRAINABLE}/'
_AVERAGE = 'model_state/ema'  # Also of what is not trained, `ema_...`.
# Prefix of a source in a rule -> the same in a `TrainState`.
_PREFIXES = {
  _NON_TRAINABLE: _STATE + _NON_TRAINABLE,
  'ema/params/': f'{_AVERAGE}/',
  f'ema/{_NON_TRAINABLE}': f'{_AVERAGE}_{_NON_TRAINABLE}',
}
# What stands before the own name of a variable, and of its average.
_PLACE = re.compile(r'^(model_state/)?(params|(ema_)?non_trainable|ema)/')
_NAMED = 20  # Names in a log line.


class CheckpointLoadingRules(hparams.BaseHParams):
  r"""What is taken of one checkpoint.

  Regular expressions match a name from its start (`re.match`), as in Pax:
  'params/lm' matches 'params/lm/w'. End one with `$` to match whole names only.

  Attributes:
    load_rules: pairs of a regular expression for variables of this run and the
      name of the source. In the source, `{}` (or `{0}`, `{1}`) or `\1` stands
      for what the groups matched. The first pair that matches counts.
    safe_load: whether a regular expression that is used for no variable is an
      error. Otherwise it is a warning, and an error only if no pair is used.
    ignore_rules: regular expressions of variables that stay as they are
      initialised, whatever `load_rules` say.
    step: of the checkpoint; None is the newest.
    load_step: whether the run's steps go on from the checkpoint's. The learning
      rate follows the optimizer's own count: see `load_opt_states`.
    load_opt_states: whether the optimizer's state of the loaded weights is
      loaded too, with its counts of steps. It must be of the same kind. Moving
      averages belong to it; without it, they begin as the loaded weights.
    load_ema_states: whether moving averages are read: as sources `ema/...`, and
      with `load_opt_states`. Without it, averages begin as the loaded weights.
  """

  load_rules: Sequence[tuple[str, str]] = ()
  safe_load: bool = False
  ignore_rules: Sequence[str] = ()
  step: int | None = None
  load_step: bool = False
  load_opt_states: bool = False
  load_ema_states: bool = True


def load(
  state: sharded.TrainState, rules: Mapping[str, CheckpointLoadingRules]
) -> sharded.TrainState:
  """Returns a state with variables replaced by those of checkpoints.

  Each array is read to where the one in its place lies, on several hosts each
  host's part. Nothing is replaced unless everything fits.

  Args:
    state: of a new run.
    rules: place of a run, a series or a checkpoint, see `inspection` -> what
      is taken of it.

  Returns:
    The state; what is not replaced are the arrays that were given.

  Raises:
    UsageError: a rule matches nothing, or names what the checkpoint has not; or
      two checkpoints give the same.
    contents.MismatchError: a source has another shape or type.
    store.DamagedError: what is asked for is damaged.
  """
  live = trees.named_leaves(state)
  replaced: dict[str, Any] = {}
  for directory, rule in rules.items():
    where = f'init_from_checkpoint_rules[{directory!r}]'
    sources = _sources(live, rule, where)
    if twice := sorted(replaced.keys() & sources.keys()):
      raise errors.UsageError(
        f'{where} gives {twice[:_NAMED]}, and so does an earlier one. Leave'
        ' them out in one of the two, with ignore_rules.'
      )
    found = inspection.find(
      directory if rule.step is None else f'{directory}:{rule.step}'
    )
    # Another process may have found a newer one.
    found.step = distributed.broadcast_from_process_0(found.step)
    stored = {name: _ROOT + source for name, source in sources.items()}
    with found.reading():
      replaced |= found.read_onto(stored, live, where)
    logging.info('Loaded %d arrays of %s.', len(sources), found.name)
  kept = [name for name, x in _variables(live).items() if x not in replaced]
  logging.info(
    '%d variables stay as they were initialised: %s',
    len(kept),
    ', '.join(kept[:_NAMED]),
  )
  leaves = [replaced.get(name, x) for name, x in live.items()]
  return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _variables(live: Iterable[str]) -> dict[str, str]:
  """Returns name of a variable in rules -> its name in a `TrainState`."""
  names = ('params/', f'{_STATE}{_NON_TRAINABLE}')
  return {n.removeprefix(_STATE): n for n in live if n.startswith(names)}


def _sources(
  live: Iterable[str], rule: CheckpointLoadingRules, where: str
) -> dict[str, str]:
  """Returns name of an array -> its source's, both in a `TrainState`."""
  variables = _variables(live)
  rules = [
    *((regex, None) for regex in rule.ignore_rules),
    *((regex, _template(source)) for regex, source in rule.load_rules),
  ]
  matched, unused = rules_lib.match_rules(
    variables, rules, where, matches=re.match
  )
  if unused:
    near = hparams.nearest_names(unused[0], variables)
    message = (
      f'{where}: {unused} of its rules are used for no variable of this run:'
      ' they match the start of none, or an earlier rule or ignore_rules take'
      f' what they match. The nearest to the first are {near}.'
    )
    # That no pair of several is used is never meant.
    if rule.safe_load or not matched:
      hint = ' safe_load=False turns this into a warning.' if matched else ''
      raise errors.UsageError(message + hint)
    logging.warning('%s', message)
  given = dict[str, str]()
  for name, source in matched.items():
    if source.startswith('ema/') and not rule.load_ema_states:
      raise errors.UsageError(
        f'{where} has the source {source!r}, but load_ema_states is False.'
      )
    prefix = next(filter(source.startswith, _PREFIXES), '')
    given[variables[name]] = _PREFIXES.get(prefix, '') + source.removeprefix(
      prefix
    )
  sources = dict(given)
  own = {name: _PLACE.sub('', name) for name in variables.values()}
  for name in live:
    is_average = name.startswith(_AVERAGE)
    is_opt_state = rule.load_opt_states and name.startswith('opt_state/')
    if not (is_average or is_opt_state):
      continue
    # What belongs to a variable ends with its name. What belongs to none, such
    # as a count, has the same name there.
    owners = [v for v in own if name.endswith(f'/{own[v]}')]
    owner = max(owners, key=len, default=None)
    if owner is None:
      sources[name] = name
    elif owner in given:
      source = given[owner]
      # An average that is not loaded begins as what it averages.
      if not is_average or (rule.load_opt_states and rule.load_ema_states):
        source = name.removesuffix(own[owner]) + _PLACE.sub('', source)
      sources[name] = source
  if rule.load_step:
    sources['step'] = 'step'
  return sources


def _template(source: str) -> str:
  r"""Returns a source with `\1` for `{0}` or the first `{}`."""
  numbers = itertools.count(1)
  return re.sub(
    r'\{(\d*)\}',
    lambda m: rf'\g<{int(m[1]) + 1 if m[1] else next(numbers)}>',
    source,
  )
