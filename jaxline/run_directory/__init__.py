"""The directory of a run, on a disk or in a bucket, and its config keys.

`directory` manages the notes, logs and claims of a run on top of a `store`.
`owner` decides who may write. `logs` has the writer of a run and its files,
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
      'Like `train_checkpoint_all_hosts`, for the series `best`.'),
  Key('checkpointer', 'durable', one_of('durable', 'memory'),
      'Where to keep checkpoints: `durable` on disk, below `checkpoint_dir`;'
      ' `memory` in this process, for tests and experiments.'),
  Key('max_checkpoints_to_keep', 5, COUNT,
      'Number of newest checkpoints of `latest` to keep.'),
  Key('max_best_checkpoints_to_keep', None, optional(COUNT),
      'Number of newest checkpoints of `best` to keep. None means'
      ' `max_checkpoints_to_keep` in the per-device style, 1 in the sharded.'),
  Key('keep_checkpoint_every_steps', None, optional(COUNT),
      'Never delete the first checkpoint of `latest` at or after each multiple'
      ' of this number of steps. None keeps only the newest checkpoints.'),
  Key('keep_checkpoint_every_hours', None, optional(keys.POSITIVE),
      'Never delete a checkpoint of `latest` that is at least this many hours'
      ' newer than the last one kept by this key.'),
  Key('checkpoint_allow_pickle', False, BOOLEAN,
      'Pickle values that are neither arrays, JSON nor structures. A restore'
      ' unpickles them, which runs any code in the file: trust its author.'),
  Key('record_code', True, BOOLEAN,
      'Write the Python files that the run has imported, except installed'
      ' packages, to `checkpoints/code`, readable only by you. Each version is'
      ' written once. Set it to False if the files contain secrets.'),
  Key('record_git_diff', True, BOOLEAN,
      'The predecessor of `record_code`: False turns `record_code` off.'),
  Key('restore_from', None, optional(text("'DIR' or 'DIR:STEP'", is_path=True)),
      'Start from a checkpoint of a different run, if this run has none. By'
      ' default everything is restored: weights, optimizer state, step, random'
      ' keys and position in the data.'),
  Key('restore_rules', (), keys.Check(
        'pairs (regular expression, name or None), such as'
        " [('state/params/(.*)', r'state/params/\\1')]",
        lambda x: isinstance(x, list | tuple)
        and all(isinstance(name, str | None) for _, name in x)),
      'Selects arrays of `restore_from`: an array of this run whose full name'
      ' matches the expression (the first match wins) gets the array `name` of'
      ' the checkpoint. With None, or without a match, it keeps its initial'
      ' value. The run starts at step 0 with new random keys and schedules: see'
      ' docs/checkpoints.md.'),
  Key('best_model_eval_metric', '',
      optional(text("the name of a scalar, or ''")),
      'The scalar of `evaluate` that selects the checkpoints of the series'
      " `best`. With '' there is no such series."),
  Key('best_model_eval_metric_higher_is_better', True, BOOLEAN,
      'Whether higher values of the metric are better; False: lower ones are.'),
  Key('early_stop', {}, keys.mapping(
        "a dict of the keys below, such as {'patience': 5}"),
      'Ends training when an evaluation metric stops improving or reaches a'
      ' target. If a separate process evaluates, training ends at a save.'),
  Key('early_stop.patience', None, optional(COUNT),
      'Number of consecutive evaluations without improvement after which'
      ' training ends. None disables this.'),
  Key('early_stop.metric', '', text("the name of a scalar, or ''"),
      "The scalar of `evaluate` to monitor; '' means `best_model_eval_metric`."
      ' `best_model_eval_metric_higher_is_better` applies in both cases.'),
  Key('early_stop.min_delta', 0.0, keys.number(0),
      'Only a change by more than this counts as an improvement.'),
  Key('early_stop.target', None, optional(keys.number()),
      'Training ends when the metric reaches this value or a better one. None'
      ' disables this.'),
  Key('on_config_change', 'raise', one_of('raise', 'continue'),
      'If keys with the effect `run` differ from the newest checkpoint, `raise`'
      ' lists them and exits, and `continue` resumes with the new values.'),
)  # fmt: skip
