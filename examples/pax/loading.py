r"""Checkpoint loading rules: a new run starts from weights of another run.

    task.train.init_from_checkpoint_rules = {
      'runs/a': loading.CheckpointLoadingRules(
        load_rules=[
          (r'params/language_model/lm/(.*)', 'params/language_model/lm/{}'),
        ],
      ),
    }

They are another way to write `config.restore_from` and `config.restore_rules`,
which `examples.pax.config` makes of them. A weight is called `params/` and its
name; a variable that is not trained, such as a moving mean, `non_trainable/`
and its name. If the other run keeps moving averages, `ema/params/` and
`ema/non_trainable/` with the same names are sources. `python -m
jaxline.checkpoint show runs/a` lists the arrays of a checkpoint.

A moving average of the new run begins as the variable that it is of.

Names and fields are those of Paxml (Google, 2022).
"""

from collections.abc import Mapping, Sequence
import itertools
import re

from examples.pax import base_layer
from examples.pax import hparams
from jaxline import errors

_STATE = 'state/model_state/'
# Prefix of a source -> where a checkpoint has it.
_SOURCES = {
  f'{base_layer.PARAMS}/': 'state/params/',
  f'{base_layer.NON_TRAINABLE}/': f'{_STATE}non_trainable/',
  f'ema/{base_layer.PARAMS}/': f'{_STATE}ema/',
  f'ema/{base_layer.NON_TRAINABLE}/': f'{_STATE}ema_non_trainable/',
}
# Prefix of a regular expression -> one for a variable and its average.
_VARIABLES = {
  f'{base_layer.PARAMS}/': 'state/(?:params|model_state/ema)/',
  f'{base_layer.NON_TRAINABLE}/': f'{_STATE}(?:ema_)?non_trainable/',
}

# An entry of `config.restore_rules`.
Rule = tuple[str, str | None]


class CheckpointLoadingRules(hparams.BaseHParams):
  r"""What is taken of a checkpoint.

  Regular expressions match a name from its start, as in Pax: 'params/lm'
  matches 'params/lm/w'. End one with `$` to match whole names only. One begins
  with 'params/' or 'non_trainable/'; of `ignore_rules` also with '.*'.

  Attributes:
    load_rules: pairs of a regular expression for variables of this run and the
      name of the source. In the source, `{}` (or `{0}`, `{1}`) or `\1` stands
      for what the groups matched. The first pair that matches counts.
    safe_load: True: a regular expression that is used for no variable is an
      error.
    ignore_rules: regular expressions of variables that stay as they are
      initialised, whatever `load_rules` say.
    step: of the checkpoint; None is the newest.
  """

  load_rules: Sequence[tuple[str, str]] = ()
  safe_load: bool = True
  ignore_rules: Sequence[str] = ()
  step: int | None = None


def restore_keys(
  rules: Mapping[str, CheckpointLoadingRules],
) -> tuple[str, tuple[Rule, ...]]:
  """Returns `config.restore_from` and `config.restore_rules`.

  Args:
    rules: place of a run, a series or a checkpoint, see
      `jaxline.checkpoint.inspection` -> what is taken of it; one entry.

  Raises:
    UsageError: there are several; or a rule says what these keys cannot.
  """
  if len(rules) != 1:
    raise errors.UsageError(
      'init_from_checkpoint_rules has the checkpoints'
      f' {sorted(rules)}; expected one.'
    )
  ((place, rule),) = rules.items()
  if not rule.safe_load:
    raise errors.UsageError(
      'safe_load is False; expected True: a rule that is used for no variable'
      ' is an error. Take it out.'
    )
  pairs: list[Rule] = [(_pattern(r, None), None) for r in rule.ignore_rules]
  pairs += [(_pattern(r, s), _source(s)) for r, s in rule.load_rules]
  return place if rule.step is None else f'{place}:{rule.step}', tuple(pairs)


def _pattern(regex: str, source: str | None) -> str:
  """Returns the expression for the arrays of a run, with whole names."""
  for prefix, ours in _VARIABLES.items():
    rest = regex.removeprefix(prefix)
    if rest != regex and prefix not in rest:
      return f'{ours}(?:{rest}).*'
  if regex.startswith('.*') and source is None:
    return f'(?:{"|".join(_VARIABLES.values())})(?:{regex}).*'
  raise errors.UsageError(
    f'init_from_checkpoint_rules has {regex!r}; expected an expression that'
    f' begins with one of {[*_VARIABLES]}, and has it once.'
  )


def _source(source: str) -> str:
  r"""Returns where a checkpoint has a source, with `\1` for the first `{}`."""
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
