"""Checkpointers: one protocol, several places to keep things."""

from jaxline import keys
from jaxline.keys import BOOLEAN, COUNT, Key, one_of, optional, text

KEYS = (
  Key('save_initial_train_checkpoint', False, BOOLEAN,
      'Save a checkpoint before the first step, for evaluators to start from.'),
  Key('train_checkpoint_all_hosts', False, BOOLEAN,
      'Save on all hosts instead of only the first. Needs intervals in steps,'
      ' because the clocks of hosts differ.'),
  Key('best_checkpoint_all_hosts', False, BOOLEAN,
      'The same for the series `best`.'),
  Key('checkpointer', 'durable', one_of('durable', 'memory'),
      'Where checkpoints are kept: `durable` is on disk, below'
      ' `checkpoint_dir`; `memory` is in this process, for tests and trials.'),
  Key('max_checkpoints_to_keep', 5, COUNT,
      'How many of the newest checkpoints of a series are kept.'),
  Key('max_best_checkpoints_to_keep', None, optional(COUNT),
      'The same for `best`. None means `max_checkpoints_to_keep` in the'
      ' per-device style and 1 in the sharded style.'),
  Key('keep_checkpoint_every_steps', None, optional(COUNT),
      'Besides those, checkpoints of `latest` at least this many steps apart'
      ' are kept for ever. None keeps no others.'),
  Key('keep_checkpoint_every_hours', None, optional(keys.POSITIVE),
      'The same, in hours.'),
  Key('checkpoint_allow_pickle', False, BOOLEAN,
      'True pickles what is neither array, JSON nor structure, and unpickles it'
      ' at restore, which runs any code in the file: only for your own files.'),
  Key('restore_from', None, optional(text("'DIR' or 'DIR:STEP'", is_path=True)),
      'Begin from a checkpoint of another run, if this run has none of its own.'
      ' Without rules all of it is restored: weights, optimizer, step, random'
      ' keys, position in the data.'),
  Key('restore_rules', (), keys.Check(
        'pairs (regular expression, name or None), such as'
        " [('state/params/(.*)', r'state/params/\\1')]",
        lambda x: isinstance(x, list | tuple)
        and all(isinstance(name, str | None) for _, name in x)),
      'What to take from that checkpoint: an array whose whole name matches the'
      ' expression (the first match counts) gets the array `name` of it. With'
      ' None, or without a match, it keeps its initial value. The run starts at'
      ' step 0 with fresh keys and schedules: see docs/checkpoints.md.'),
  Key('on_config_change', 'raise', one_of('raise', 'continue'),
      'The latest checkpoint was made with another value of a key whose change'
      ' makes another run: `raise` lists these keys, `continue` restores it.'),
)  # fmt: skip
