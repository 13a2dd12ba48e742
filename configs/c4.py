"""Language models of Pax's documents, with their sizes and meshes, by name.

Expected: to be compiled for the TPUs that they were run on, without these:
          what fits, and how fast it can be, is in docs/scale.md. Nobody has
          trained them here.
Hardware: the topology of each, below; to compile, any machine.
Command:  python experiment.py --config=configs/c4.py:C4Spmd1BAdam4Replicas \
            --jaxline_mode=compile

They read the bundled text byte by byte, which has no influence on what a step
costs; C4 is to be had through docs/inputs.md. The optimizer is that of
examples/lm, AdamW with a cosine, whose state has the size of Pax's.
"""

from typing import Any

from ml_collections import config_dict

from configs import lm

# Sinusoids, and caps on attention and logits.
_C4: dict[str, Any] = {
  'model': {
    'normalization': 'layer',
    'positions': 'sinusoidal',
    'scale_embedding': True,
    'scale_queries': True,
    'feed_forward_bias': True,
    'logits_bias': True,
    'attention_cap': 50.0,
    'logits_cap': 30.0,
    'initialization': 'xavier',
  },
  'training_steps': 10_000_000,
  'warmup_steps': 4000,
  'b2': 0.99,
  'weight_decay': 1e-3,
  'clip_norm': 5.0,
}
_GPT3: dict[str, Any] = {
  'model': {
    'normalization': 'layer',
    'norm_epsilon': 1e-5,
    'positions': 'learned',
    'feed_forward_bias': True,
    'attention_bias': True,
    'initialization': 'normal',
    'initial_stddev': 0.006,
  },
  'training_steps': 108_600,
  'warmup_steps': 265,
  'b2': 0.95,
  'weight_decay': 0.1,
  'clip_norm': 1.0,
}

# Sizes (learned positions are max_length, whatever the sequence); rows of a
# global batch; a slice and its mesh; slices, which are replicas; stages of a
# pipeline, and parts of a batch that go through it; learning rate at its peak;
# steps from checkpoint to checkpoint, log line to log line, and evaluation to
# evaluation.
RUNS: dict[str, dict[str, Any]] = {
  'C4Spmd1BAdam4Replicas': {
    'family': _C4,
    'layers': 13,
    'width': 2560,
    'hidden': 10240,
    'heads': 20,
    'vocab': 32000,
    'length': 1024,
    'max_length': 1024,
    'rows': 128,
    'topology': 'v4:2x2x1',
    'mesh': {'data': 4},
    'sharding': 'fsdp_tp',
    'slices': 1,
    'stages': 1,
    'microbatches': 1,
    'learning_rate': 1e-3,
    'save': 1000,
    'log': 10,
    'evaluate': 1000,
  },
  'C4Spmd16BAdam32Replicas': {
    'family': _C4,
    'layers': 36,
    'width': 6144,
    'hidden': 24576,
    'heads': 48,
    'vocab': 32000,
    'length': 1024,
    'max_length': 1024,
    'rows': 512,
    'topology': 'v4:2x4x4',
    'mesh': {'data': 16, 'mdl': 2},
    'sharding': 'fsdp_tp',
    'slices': 1,
    'stages': 1,
    'microbatches': 1,
    'learning_rate': 1e-3,
    'save': 1000,
    'log': 10,
    'evaluate': 1000,
  },
  'C4Spmd22BAdam2xv4_128': {
    'family': _C4,
    'layers': 48,
    'width': 6144,
    'hidden': 24576,
    'heads': 24,
    'vocab': 32768,
    'length': 1024,
    'max_length': 1024,
    'rows': 2048,
    'topology': 'v4:4x4x4',
    'mesh': {'data': 64},
    'sharding': 'fsdp_tp',
    'slices': 2,
    'stages': 1,
    'microbatches': 1,
    'learning_rate': 1e-3,
    'save': 1000,
    'log': 10,
    'evaluate': 1000,
  },
  'C4SpmdPipelineGpt3SmallAdam64Replicas': {
    'family': _GPT3,
    'layers': 24,
    'width': 3072,
    'hidden': 12288,
    'heads': 24,
    'vocab': 51200,  # 50257 does not divide over 4. As its successor.
    'length': 2048,
    'max_length': 16384,
    'rows': 512,
    'topology': 'v4:4x4x4',
    'mesh': {'stage': 4, 'data': 4, 'mdl': 4},
    'stages': 4,
    'microbatches': 32,  # Of 16 rows.
    'learning_rate': 2e-4,
    'save': 200,
    'log': 1,
    'evaluate': 100,
    'sharding': 'pipeline',
    'slices': 1,
  },
  'C4SpmdGpt3AdamDataParallel2x16x16': {
    'family': _GPT3,
    'layers': 96,
    'width': 12288,
    'hidden': 49152,
    'heads': 96,
    'vocab': 50257,
    'length': 2048,
    'max_length': 16384,
    'rows': 256,
    'topology': 'v4:4x8x8',
    'mesh': {'data': 16, 'mdl': 16},
    'sharding': 'fsdp_tp',
    'slices': 2,
    'learning_rate': 6e-5,
    'save': 2000,
    'stages': 1,
    'microbatches': 1,
    'log': 10,
    'evaluate': 1000,
  },
}


def get_config(name: str = 'C4Spmd1BAdam4Replicas') -> config_dict.ConfigDict:
  """Returns the config of a run of `RUNS`."""
  if name not in RUNS:
    raise ValueError(f'There is no run {name!r}; expected one of {list(RUNS)}.')
  run = RUNS[name]
  family = run['family']

  config = lm.get_config()
  config.topology = run['topology']
  config.num_slices = run['slices']
  config.mesh.ici.update({'data': 1} | run['mesh'])
  config.sharding = run['sharding']
  config.training_steps = family['training_steps']
  config.save_checkpoint_interval = run['save']
  config.log_train_data_interval = config.log_tensors_interval = run['log']
  config.eval_interval = run['evaluate']

  kwargs = config.experiment_kwargs.config
  kwargs.model.update(
    {
      'vocab_size': run['vocab'],
      'num_layers': run['layers'],
      'embed_dim': run['width'],
      'num_heads': run['heads'],
      'mlp_dim': run['hidden'],
      'max_length': run['max_length'],
      'feed_forward': 'gelu',
      'scan_layers': True,
      'remat': 'full',
      'dtype': 'bfloat16',
      'pipeline_stages': run['stages'],
      'pipeline_microbatches': run['microbatches'],
      **family['model'],
    }
  )
  kwargs.packing = 'packed'
  kwargs.batch_size = kwargs.eval_batch_size = run['rows']
  kwargs.length = run['length']
  kwargs.eval_batches = 1

  kwargs.learning_rate = run['learning_rate']
  kwargs.warmup_fraction = family['warmup_steps'] / family['training_steps']
  kwargs.final_learning_rate = 0.1
  kwargs.b1 = 0.9
  kwargs.b2 = family['b2']
  kwargs.weight_decay = family['weight_decay']
  kwargs.clip_norm = family['clip_norm']
  kwargs.sample_length = 0  # A sample of an untrained model says nothing.
  return config
