"""Checkpointers: one protocol, several places to keep things."""

from jaxline import keys

KEYS = (
  keys.Key('save_initial_train_checkpoint', False, keys.BOOLEAN,
      'Save a checkpoint before the first step, for evaluators to start from.'),
  keys.Key('train_checkpoint_all_hosts', False, keys.BOOLEAN,
      'Save on all hosts instead of only the first. Needs intervals in steps,'
      ' because the clocks of hosts differ.'),
  keys.Key('best_checkpoint_all_hosts', False, keys.BOOLEAN,
      'The same for the series `best`.'),
  keys.Key('checkpointer', 'durable', keys.one_of('durable', 'memory'),
      'Where checkpoints are kept: `durable` is on disk, below'
      ' `checkpoint_dir`; `memory` is in this process, for tests and trials.'),
  keys.Key('max_checkpoints_to_keep', 5, keys.COUNT,
      'How many of the newest checkpoints of a series are kept.'),
  keys.Key('max_best_checkpoints_to_keep', None, keys.optional(keys.COUNT),
      'The same for `best`. None means `max_checkpoints_to_keep` in the'
      ' per-device style and 1 in the sharded style.'),
  keys.Key('keep_checkpoint_every_steps', None, keys.optional(keys.COUNT),
      'Besides those, checkpoints of `latest` at least this many steps apart'
      ' are kept for ever. None keeps no others.'),
  keys.Key('keep_checkpoint_every_hours', None, keys.optional(keys.POSITIVE),
      'The same, in hours.'),
  keys.Key('checkpoint_allow_pickle', False, keys.BOOLEAN,
      'True pickles what is neither array, JSON nor structure, and unpickles it'
      ' at restore, which runs any code in the file: only for your own files.'),
  keys.Key('restore_from', None,
      keys.optional(keys.text("'DIR' or 'DIR:STEP'", is_path=True)),
      'Begin from a checkpoint of another run, if this run has none of its own.'
      ' Without rules all of it is restored: weights, optimizer, step, random'
      ' keys, position in the data.'),
  keys.Key('restore_rules', (), keys.Check(
        'pairs (regular expression, name or None), such as'
        " [('state/params/(.*)', r'state/params/\\1')]",
        lambda x: isinstance(x, list | tuple)
        and all(isinstance(name, str | None) for _, name in x)),
      'What to take from that checkpoint: an array whose whole name matches the'
      ' expression (the first match counts) gets the array `name` of it. With'
      ' None, or without a match, it keeps its initial value. The run starts at'
      ' step 0 with fresh keys and schedules: see docs/checkpoints.md.'),
  keys.Key('on_config_change', 'raise', keys.one_of('raise', 'continue'),
      'The latest checkpoint was made with another value of a key whose change'
      ' makes another run: `raise` lists these keys, `continue` restores it.'),
)  # fmt: skip
