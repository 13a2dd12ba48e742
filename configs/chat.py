"""Fine-tunes a chat model on conversations.

Expected: see below
Command:  python experiment.py --config=configs/chat.py \
            --jaxline_mode=train_and_eval
"""

import pathlib

from ml_collections import config_dict

from configs import lm
from jaxline import base_config

_BUNDLED = pathlib.Path(__file__).parents[1] / 'examples/lm/tiny_chat'


def get_config(run: str = '') -> config_dict.ConfigDict:
  """Returns the config of the run that fine-tunes an imported one."""
  config = lm.get_config()
  config.experiment_class = 'examples.lm.chat_training:Experiment'
  kwargs = config.experiment_kwargs.config

  if run:
    recorded = base_config.recorded_config(run)
    source = recorded.experiment_kwargs.config
    config.sharding = recorded.sharding
    config.restore_from = run
    # All but adapters, which begin anew.
    config.restore_rules = (
      ('state/params/((?!.*_lora_[ab]$).*)', r'state/params/\1'),
    )
    for key in 'model', 'tokenizer', 'length', 'decode':
      kwargs[key] = source[key]
    kwargs.learning_rate = 1e-5
  else:
    kwargs.tokenizer = f'{_BUNDLED}/tokenizer.json'
    kwargs.model.vocab_size = 259
    kwargs.length = 128
    kwargs.decode.stop_ids = (258, 256)

  kwargs.files = f'{_BUNDLED}/counting.jsonl'
  kwargs.chat = config_dict.ConfigDict()
  kwargs.chat.train_on = 'assistant'
  kwargs.chat.too_long = 'cut'
  kwargs.chat.messages = 'messages'
  kwargs.chat.system = 'system'
  kwargs.chat.user = 'prompt'
  kwargs.chat.assistant = 'completion'
  kwargs.chat.pairs = False
  kwargs.packing = 'packed'
  kwargs.eval_fraction = 0.1
  kwargs.batch_size = 8
  kwargs.eval_batch_size = 8

  config.training_steps = 300
  config.eval_interval = config.save_checkpoint_interval = 50
  config.best_model_eval_metric = 'loss'
  config.early_stop = {'metric': 'loss', 'patience': 3}
  kwargs.prompt_format = 'chat'
  kwargs.samples = 3
  kwargs.sample_prompt = 'What comes after 7?'
  kwargs.sample_length = 16
  kwargs.sample_temperature = 0.0
  kwargs.decode.max_decode_steps = 64
  return config
