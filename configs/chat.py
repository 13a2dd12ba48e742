"""Fine-tunes a language model on conversations.

Expected: a loss of 0.48 nats a token of the assistant on 16 held-out
          conversations; 3 of 3 samples are right.
Hardware: two cores of an AMD EPYC, shared with other programs; no GPU.
Time:     3 minutes, measured.
Command:  python experiment.py --config=configs/chat.py \
            --jaxline_mode=train_and_eval

The command trains a tiny model with random weights on bundled conversations. To
fine-tune a Hugging Face model on your conversations:

  python -m examples.lm.hf import models/qwen runs/qwen
  python experiment.py --config=configs/chat.py:runs/qwen \
    --jaxline_mode=train_and_eval --config.checkpoint_dir=runs/tuned \
    --config.experiment_kwargs.config.files='chats/*.jsonl'

With --config.experiment_kwargs.config.lora.rank=8 only adapters are trained.
They need a higher learning rate, such as 2e-4. docs/chat_training.md describes
the format of the files.
"""

import pathlib

from ml_collections import config_dict

from configs import lm
from examples.lm import experiment
from examples.lm import folder
from jaxline import base_config
from jaxline import errors

_BUNDLED = pathlib.Path(__file__).parents[1] / 'examples/lm/tiny_chat'


def get_config(run: str = '') -> config_dict.ConfigDict:
  """Returns the config; `run` is the imported run to fine-tune, if any."""
  config = lm.get_config()
  config.experiment_class = 'examples.lm.chat_training:Experiment'
  kwargs = config.experiment_kwargs.config
  if run:
    recorded = base_config.recorded_config(run)
    source = recorded.experiment_kwargs.config
    if source.get('lora', {}).get('rank'):
      raise errors.UsageError(
        f'{run} has adapters, which a new run does not load. Export it with'
        ' examples.lm.hf, and import the export.'
      )
    for key in 'model', 'tokenizer', 'length', 'decode', 'sample_length':
      kwargs[key] = source[key]
    # The model is trained to end its answers with each of these.
    tokenizer = experiment.find_tokenizer(source.tokenizer, run)
    stops = folder.Prompts(str(tokenizer).partition('#')[0]).stop_ids
    kwargs.tokenizer = tokenizer  # The run may have been moved.
    stops = dict.fromkeys((*source.decode.stop_ids, *stops))
    kwargs.decode.stop_ids = tuple(stops)
    config.sharding = recorded.sharding
    config.restore_from = run
    # Load all weights except adapters. The reference model of loss='dpo' starts
    # from the same weights.
    config.restore_rules = (
      (
        'state/(?:params|model_state/reference)/((?!.*_lora_[ab]$).*)',
        r'state/params/\1',
      ),
    )
    if source.model.get('router_bias_rate'):
      config.restore_rules += (
        (r'state/model_state/(router_biases/.*)', r'state/model_state/\1'),
      )
    kwargs.learning_rate = 1e-5  # With more, the model forgets its training.
    kwargs.weight_decay = 0.0  # The weights must stay near their start.
  else:
    kwargs.tokenizer = f'{_BUNDLED}/tokenizer.json'
    kwargs.model.num_heads = 4
    kwargs.model.tie_embeddings = True
    kwargs.model.bigram_rows = 0  # An export to Hugging Face has no such table.
    kwargs.model.vocab_size = 259  # The bytes and three special tokens.
    kwargs.length = 128
    kwargs.decode.stop_ids = (258, 256)  # <|im_end|> and <|endoftext|>.
    kwargs.sample_length = 16

  kwargs.b2 = 0.95
  config.training_steps = 600
  config.log_tensors_interval = 50
  config.eval_interval = config.save_checkpoint_interval = 100
  config.best_model_eval_metric = 'loss'
  # The model memorizes a small data set, and then the held-out loss rises.
  config.early_stop = {'metric': 'loss', 'patience': 3}

  kwargs.files = f'{_BUNDLED}/counting.jsonl'
  kwargs.eval_fraction = 0.1
  # A row has complete conversations, which do not see each other.
  kwargs.packing = 'packed'
  kwargs.batch_size = 8
  kwargs.eval_batch_size = 8
  kwargs.chat = config_dict.ConfigDict()
  kwargs.chat.train_on = 'assistant'
  kwargs.chat.too_long = 'cut'  # A conversation's beginning is one, too.
  kwargs.chat.messages = 'messages'
  # The next three keys are for lines without messages. Other common names are
  # 'instruction,input' and 'output'.
  kwargs.chat.system = 'system'
  kwargs.chat.user = 'prompt'
  kwargs.chat.assistant = 'completion'
  kwargs.loss = 'cross_entropy'
  # A smaller value lets the model move further from the reference.
  kwargs.dpo_beta = 0.1

  kwargs.prompt_format = 'chat'
  kwargs.samples = 3
  kwargs.sample_prompt = 'Hi'
  kwargs.sample_temperature = 0.0  # Always the most likely answer.
  return config
