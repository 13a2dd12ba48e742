"""The directory of a run, on a disk or in a bucket, and its keys.

`directory` has the notes, logs and claims of a run, `store` the bytes by key
below them, `owner` who may write, `logs` the writer of a run and its files,
`sources` the record of the code. Read `directory` first.
"""

from jaxline.base import keys
from jaxline.base.keys import BOOLEAN, COUNT, Key, one_of, optional, text

KEYS = (
  Key('save_initial_train_checkpoint', False, BOOLEAN,
      'Save a checkpoint before the first step, for evaluators to start from.'),
  Key('train_checkpoint_all_hosts', False, BOOLEAN,
      'Save on all hosts instead of only the first.'),
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
      'The first checkpoint of `latest` at or after each multiple of this'
      ' number is never deleted. None keeps only the newest ones.'),
  Key('keep_checkpoint_every_hours', None, optional(keys.POSITIVE),
      'Checkpoints at least this many hours apart are kept for ever.'),
  Key('checkpoint_allow_pickle', False, BOOLEAN,
      'True pickles what is neither array, JSON nor structure, and unpickles it'
      ' at restore, which runs any code in the file: only for your own files.'),
  Key('record_code', True, BOOLEAN,
      'Write the Python files that the run has imported, but for installed'
      ' packages, into `checkpoints/code`, once for each content, for the user'
      ' alone to read. False if they hold secrets.'),
  Key('record_git_diff', True, BOOLEAN,
      'False turns `record_code` off, too: the name of an earlier record.'),
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
  Key('best_model_eval_metric', '',
      optional(text("the name of a scalar, or ''")),
      'The scalar of `evaluate` whose best value is kept as the series `best`.'
      ' Without one there is no such series.'),
  Key('best_model_eval_metric_higher_is_better', True, BOOLEAN,
      'Whether the best value is the highest, or else the lowest.'),
  Key('early_stop', {}, keys.mapping(
        "a dict of the keys below, such as {'patience': 5}"),
      'Ends training when a metric of the evaluation stops improving, or is'
      ' good enough; beside a process of the mode `eval`, at a save.'),
  Key('early_stop.patience', None, optional(COUNT),
      'After how many evaluations in a row without a gain. None disables it.'),
  Key('early_stop.metric', '', text("the name of a scalar, or ''"),
      "The scalar of `evaluate`; '' is `best_model_eval_metric`, whose"
      ' `..._higher_is_better` counts for both.'),
  Key('early_stop.min_delta', 0.0, keys.number(0),
      'A gain is more than this beyond the best value so far.'),
  Key('early_stop.target', None, optional(keys.number()),
      'A value of the metric that ends training, as does any better one. None'
      ' disables it.'),
  Key('on_config_change', 'raise', one_of('raise', 'continue'),
      'How a run starts if keys whose effect is `run` differ from the newest'
      ' checkpoint: `raise` lists them and ends, `continue` restores it.'),
)  # fmt: skip
