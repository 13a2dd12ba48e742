r"""Checkpoint loading rules: start a new run from the weights of an old one.

    task.train.init_from_checkpoint_rules = {
      'runs/a': loading.CheckpointLoadingRules(
        load_rules=[
          (r'params/language_model/lm/(.*)', 'params/language_model/lm/{}'),
        ],
      ),
    }

They become `config.restore_from` and `config.restore_rules`. A weight is called
`params/NAME`, and a non-trainable variable, such as a moving mean,
`non_trainable/NAME`. If the old run keeps moving averages, its sources include
`ema/params/NAME` and `ema/non_trainable/NAME`. `python -m jaxline.checkpoint
show runs/a` lists the arrays of a checkpoint.

Moving averages of the new run start with the values of their variables.

Names and fields follow Paxml (Google, 2022).
"""

from collections.abc import Mapping, Sequence
import itertools
import re

from examples.pax import base_layer
from examples.pax import hparams
from jaxline import errors

_STATE = 'state/model_state/'
# Prefix of a source -> prefix of the array in a checkpoint.
_SOURCES = {
  f'{base_layer.PARAMS}/': 'state/params/',
  f'{base_layer.NON_TRAINABLE}/': f'{_STATE}non_trainable/',
  f'ema/{base_layer.PARAMS}/': f'{_STATE}ema/',
  f'ema/{base_layer.NON_TRAINABLE}/': f'{_STATE}ema_non_trainable/',
}
# Prefix of a rule's regular expression -> expression for the arrays of a
# variable and its average.
_VARIABLES = {
  f'{base_layer.PARAMS}/': 'state/(?:params|model_state/ema)/',
  f'{base_layer.NON_TRAINABLE}/': f'{_STATE}(?:ema_)?non_trainable/',
}

# An entry of `config.restore_rules`.
Rule = tuple[str, str | None]


class CheckpointLoadingRules(hparams.BaseHParams):
  r"""Rules that select the variables to load from a checkpoint.

  As in Pax, regular expressions match from the start of a name: 'params/lm'
  matches 'params/lm/w'. End an expression with `$` to match whole names only.
  Expressions begin with 'params/' or 'non_trainable/'. In `ignore_rules`, they
  may begin with '.*', too.

  Attributes:
    load_rules: Pairs of a regular expression for variables of this run and the
      name of the source. In the source, `{}` (or `{0}`, `{1}`) or `\1` stands
      for the text that a group matched. The first matching pair applies.
    safe_load: Whether an expression that is used for no variable is an error.
      Must be True.
    ignore_rules: Regular expressions for variables that keep their initial
      values. They take precedence over `load_rules`.
    step: Step of the checkpoint. If None, the newest.
  """

  load_rules: Sequence[tuple[str, str]] = ()
  safe_load: bool = True
  ignore_rules: Sequence[str] = ()
  step: int | None = None


def restore_keys(
  rules: Mapping[str, CheckpointLoadingRules],
) -> tuple[str, tuple[Rule, ...]]:
  """Returns the values of `config.restore_from` and `config.restore_rules`.

  `rules` has one entry: path of a run, a series or a checkpoint -> its rules.
  """
  if len(rules) != 1:
    raise errors.UsageError(
      'init_from_checkpoint_rules has the checkpoints'
      f' {sorted(rules)}; expected one.'
    )
  ((place, rule),) = rules.items()
  if not rule.safe_load:
    raise errors.UsageError(
      'safe_load is False; expected True, because a rule that is used for no'
      ' variable is an error. Remove such rules instead.'
    )
  pairs: list[Rule] = [(_pattern(r, None), None) for r in rule.ignore_rules]
  pairs += [(_pattern(r, s), _source(s)) for r, s in rule.load_rules]
  return place if rule.step is None else f'{place}:{rule.step}', tuple(pairs)


def _pattern(regex: str, source: str | None) -> str:
  """Converts a rule's expression to one for whole names of a run's arrays."""
  for prefix, ours in _VARIABLES.items():
    rest = regex.removeprefix(prefix)
    if rest != regex and prefix not in rest:
      return f'{ours}(?:{rest}).*'
  if regex.startswith('.*') and source is None:
    return f'(?:{"|".join(_VARIABLES.values())})(?:{regex}).*'
  raise errors.UsageError(
    f'init_from_checkpoint_rules has {regex!r}; expected an expression that'
    f' begins with one of {[*_VARIABLES]}, and contains it only once.'
  )


def _source(source: str) -> str:
  r"""Converts a source to an array's name, with group references for `{}`."""
  for prefix, ours in _SOURCES.items():
    if source.startswith(prefix):
      source = ours + source.removeprefix(prefix)
      break
  numbers = itertools.count(1)
  return re.sub(
    r'\{(\d*)\}',
    lambda m: rf'\g<{int(m[1]) + 1 if m[1] else next(numbers)}>',
    source,
  )
