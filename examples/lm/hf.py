"""Weights of Hugging Face models: into a run, and out of one.

  python -m examples.lm.hf import DIR RUN
  python -m examples.lm.hf export RUN DIR [--step=N] [--series=best]
  python -m examples.lm.hf parity RUN DIR

DIR has `config.json`, `*.safetensors` and `tokenizer.json`. `_FAMILIES` lists
the models. `import` makes a run with a checkpoint of step 0. `parity` compares
the logits of a run and of transformers, which needs torch.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import re
import shutil
import sys
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import config_dict
import numpy as np

from configs import lm
from examples import transformer
import jaxline
from jaxline import base_config
from jaxline import distributed
from jaxline import errors
from jaxline import platform
from jaxline.checkpoint import base
from jaxline.compat import adapters
from jaxline.compat import prng
from jaxline.inputs import tokenization

from . import lora
from . import model

Weights = dict[str, Any]  # By their path, such as 'layers/attention/qkv'.

_GEMMA = {'embedding_scale': True, 'norm_offset': True, 'post_norms': True}
# `model_type` -> the class in transformers, and options that are not in its
# `config.json`. An export takes the first that fits.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
  'llama': ('LlamaForCausalLM', {}),
  'mistral': ('MistralForCausalLM', {}),
  'qwen2': ('Qwen2ForCausalLM', {'qkv_bias': True}),
  'qwen3': ('Qwen3ForCausalLM', {'qk_norm': True}),
  'gemma2': ('Gemma2ForCausalLM', _GEMMA),
  'gemma3_text': ('Gemma3ForCausalLM', {**_GEMMA, 'qk_norm': True}),
}
# Options that have a key of their own.
_KEYS = {
  'vocab_size': 'vocab_size',
  'num_layers': 'num_hidden_layers',
  'embed_dim': 'hidden_size',
  'num_heads': 'num_attention_heads',
  'num_kv_heads': 'num_key_value_heads',
  'head_size': 'head_dim',
  'mlp_dim': 'intermediate_size',
  'max_length': 'max_position_embeddings',
  'tie_embeddings': 'tie_word_embeddings',
  'norm_epsilon': 'rms_norm_eps',
}
_CAPS = {
  'attention_cap': 'attn_logit_softcapping',
  'logits_cap': 'final_logit_softcapping',
}
_ACTIVATIONS = {'silu': 'swiglu', 'gelu_pytorch_tanh': 'geglu'}
# `rope_type` -> the keys of `rotary_scaling`.
_ROPES = {
  'default': (),
  'linear': ('factor',),
  'llama3': (
    'factor',
    'low_freq_factor',
    'high_freq_factor',
    'original_max_position_embeddings',
  ),
}
_LAYERS = ('full_attention', 'sliding_attention')
# Computations that no option of the model has.
_REFUSED = (
  'attention_bias',
  'mlp_bias',
  'quantization_config',
  'use_bidirectional_attention',
)
_DTYPES = ('F32', 'F16', 'BF16')
_MAX_FILE = 5 * 10**9  # Bytes of a file that is written, as transformers does.
_TOKENIZERS = ('tokenizer.json', 'tokenizer.model')


# Configs.


def _read_config(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the options of `ModelConfig` that a `config.json` asks for."""
  family = str(hf.get('model_type'))
  errors.check_names([family], _FAMILIES, 'model_type', 'config.json')
  is_gemma = family.startswith('gemma')
  defaults: dict[str, Any] = {'rms_norm_eps': 1e-6, 'sliding_window': None}
  defaults['tie_word_embeddings'] = is_gemma
  if family in ('llama', 'mistral', 'qwen2'):
    defaults['head_dim'] = None
  if family == 'llama':
    defaults['num_key_value_heads'] = hf.get('num_attention_heads')
  hf = {**defaults, **hf}
  if absent := [x for x in _KEYS.values() if x not in hf]:
    raise errors.UsageError(
      f'config.json of a {family} lacks {absent}; expected the file that'
      ' transformers writes.'
    )
  for key in filter(hf.get, _REFUSED):
    raise errors.UsageError(
      f'config.json has {key}={hf[key]!r}, which examples/lm cannot compute;'
      ' expected it off. Convert the model, or extend examples/lm/model.py.'
    )
  activation = hf.get('hidden_activation') or hf.get('hidden_act')
  activation = activation or ('gelu_pytorch_tanh' if is_gemma else 'silu')
  errors.check_names([activation], _ACTIVATIONS, 'hidden_act', 'config.json')
  scalar = hf.get('query_pre_attn_scalar') if is_gemma else None
  return _canonical(
    {name: hf[key] for name, key in _KEYS.items()}
    | {name: (is_gemma and hf.get(key)) or 0.0 for name, key in _CAPS.items()}
    | {
      'positions': 'rotary',
      'normalize_embedding': False,
      'feed_forward': _ACTIVATIONS[activation],
      'windows': _read_windows(hf),
      'query_scale': scalar and scalar**-0.5,
      **dict.fromkeys([*_GEMMA, 'qkv_bias', 'qk_norm'], False),
      **_FAMILIES[family][1],
      **_read_rotary(hf),
    }
  )


def _read_windows(hf: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns each layer's window; 0 is full attention."""
  family, window = hf['model_type'], hf['sliding_window']
  uses = hf.get('use_sliding_window', not family.startswith('qwen'))
  if not window or not uses or family == 'llama':
    return ()
  layers = range(hf['num_hidden_layers'])
  if family == 'mistral':
    slides = [True for _ in layers]
  elif types := hf.get('layer_types'):
    errors.check_names(types, _LAYERS, 'layer_types', 'config.json')
    slides = [x == 'sliding_attention' for x in types]
  elif family.startswith('qwen'):
    slides = [i >= hf['max_window_layers'] for i in layers]
  else:
    period = hf.get('sliding_window_pattern') or {'gemma2': 2}.get(family, 6)
    slides = [(i + 1) % period != 0 for i in layers]
  return tuple(window if x else 0 for x in slides)


def _read_rotary(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the options of rotary positions, of transformers 4 and 5."""
  is_gemma3 = hf['model_type'] == 'gemma3_text'
  local = None
  rope = hf.get('rope_parameters') or {
    'rope_theta': hf.get('rope_theta'),
    **(hf.get('rope_scaling') or {}),
  }
  if is_gemma3:
    local = {'rope_theta': hf.get('rope_local_base_freq') or 1e4}
    if 'full_attention' in rope:
      local, rope = rope['sliding_attention'], rope['full_attention']
    if _read_scaling(local, hf):
      raise errors.UsageError(
        f'config.json has sliding_attention={local!r}; expected no scaling of'
        ' the positions of layers with a window.'
      )
  return {
    'rotary_base': float(rope.get('rope_theta') or (1e6 if is_gemma3 else 1e4)),
    'rotary_scaling': _read_scaling(rope, hf),
    'local_rotary_base': local and float(local['rope_theta']),
  }


def _read_scaling(
  rope: Mapping[str, Any], hf: Mapping[str, Any]
) -> tuple[float, ...]:
  """Returns `rotary_scaling`; refuses an unknown `rope_type` or key."""
  values = {k: x for k, x in rope.items() if x is not None}
  values.pop('rope_theta', None)
  kind = values.pop('type', 'default')  # Of earlier versions.
  kind = values.pop('rope_type', kind)
  errors.check_names([kind], _ROPES, 'rope_type', 'config.json')
  if kind == 'llama3':
    original = hf['max_position_embeddings']
    values.setdefault('original_max_position_embeddings', original)
  if set(values) != set(_ROPES[kind]):
    raise errors.UsageError(
      f'config.json has the rotary positions {rope!r}; for rope_type {kind!r}'
      f' expected {["rope_theta", *_ROPES[kind]]}.'
    )
  return tuple(float(values[key]) for key in _ROPES[kind])


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
  """Returns options with one spelling of each model, for comparison."""
  new = dict(options)
  layers, heads = new['num_layers'], new['num_heads']
  size = new['head_size'] or new['embed_dim'] // heads
  if size * heads == new['embed_dim']:
    new['head_size'] = None
  if new['num_kv_heads'] == heads:
    new['num_kv_heads'] = None
  # The shortest pattern whose repetition gives each layer its window.
  windows = tuple(new['windows'] or (0,)) * layers
  new['windows'] = next(
    windows[:n]
    for n in range(1, layers + 1)
    if (windows[:n] * layers)[:layers] == windows[:layers]
  )
  if not any(new['windows']):
    new['windows'] = ()
  if new['query_scale'] and math.isclose(new['query_scale'], size**-0.5):
    new['query_scale'] = None
  is_same = new['local_rotary_base'] == new['rotary_base']
  if not new['windows'] or (is_same and not new['rotary_scaling']):
    new['local_rotary_base'] = None
  new['rotary_scaling'] = tuple(new['rotary_scaling'])
  return new


def _write_config(config: model.ModelConfig) -> dict[str, Any]:
  """Returns the `config.json` of a model, as transformers 4 and 5 read it.

  Raises:
    errors.UsageError: names the options that no family has.
  """
  options = _canonical(dataclasses.asdict(config))
  misfits = {}
  for family in _FAMILIES:
    written = _write_as(family, options)
    misfits[family] = [
      f'{name}={options[name]!r} ({read!r})'
      for name, read in _read_config(written).items()
      if options[name] != read
    ]
    if not misfits[family]:
      return written
  family = min(misfits, key=lambda name: len(misfits[name]))
  raise errors.UsageError(
    f'No family of {list(_FAMILIES)} has this model. The nearest is {family},'
    f' but for {", ".join(misfits[family])}, whose value is in brackets.'
    ' Train with these values, or export the weights with'
    ' `python -m jaxline.checkpoint export`.'
  )


def _write_as(family: str, options: dict[str, Any]) -> dict[str, Any]:
  """Returns the `config.json` of the nearest model of a family."""
  size = options['head_size'] or options['embed_dim'] // options['num_heads']
  kv_heads = options['num_kv_heads'] or options['num_heads']
  filled = {**options, 'head_size': size, 'num_kv_heads': kv_heads}
  activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
  activation = activations.get(options['feed_forward'], 'silu')
  scaling = options['rotary_scaling']
  rope = next(k for k, keys in _ROPES.items() if len(keys) == len(scaling))
  hf: dict[str, Any] = {
    'architectures': [_FAMILIES[family][0]],
    'model_type': family,
    'hidden_act': activation,
    **{key: filled[name] for name, key in _KEYS.items()},
    'rope_theta': options['rotary_base'],
    'rope_scaling': None,
  }
  if scaling:
    values = zip(_ROPES[rope], scaling, strict=True)
    # transformers wants the original length as an integer.
    numbers = {k: int(x) if 'embeddings' in k else x for k, x in values}
    hf['rope_scaling'] = {'rope_type': rope, **numbers}
  # The keys of transformers 4, which 5 reads too.
  layers = options['num_layers']
  windows = ((options['windows'] or (0,)) * layers)[:layers]
  if family != 'llama':
    hf['sliding_window'] = max(windows) or None
  if family.startswith(('qwen', 'gemma')):
    hf['layer_types'] = [_LAYERS[bool(x)] for x in windows]
  if family.startswith('qwen'):
    hf['use_sliding_window'] = any(windows)
    hf['max_window_layers'] = [*map(bool, windows), True].index(True)
  if family.startswith('gemma'):
    scalar = (options['query_scale'] or size**-0.5) ** -2
    is_whole = math.isclose(scalar, round(scalar), rel_tol=1e-9)
    hf['query_pre_attn_scalar'] = round(scalar) if is_whole else scalar
    hf['hidden_activation'] = activation
    hf |= {key: options[name] or None for name, key in _CAPS.items()}
  if family == 'gemma3_text':
    local = options['local_rotary_base'] or options['rotary_base']
    hf['rope_local_base_freq'] = local
    hf['sliding_window_pattern'] = len(options['windows']) or 1
  return hf


# Weights.


@dataclasses.dataclass(frozen=True)
class _Row:
  """A weight of ours, and the tensors that it consists of.

  Attributes:
    ours: its axes: as in `model.py`, without that of the layers.
    theirs: those of a tensor; H and K side by side are one axis there.
    names: the tensors, one for each place along S; {} is the layer.
  """

  ours: str
  theirs: str
  names: tuple[str, ...]

  def merged(self, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a tensor's shape, from the shape of a layer's weight."""
    sizes = dict(zip(self.ours, shape, strict=True))
    if 'HK' in self.theirs:
      sizes['H'] *= sizes['K']
    return tuple(sizes[a] for a in self.theirs.replace('HK', 'H'))

  def write(self, x: np.ndarray, place: int) -> np.ndarray:
    """Returns the tensor at a place along S of a layer's weight: a view."""
    shape = self.merged(x.shape)
    if 'S' in self.ours:
      x = np.moveaxis(x, self.ours.index('S'), 0)[place]
    ours = self.ours.replace('S', '')
    return x.transpose([ours.index(a) for a in self.theirs]).reshape(shape)

  def read(
    self, tensor: Any, shape: Sequence[int], index: Sequence[slice]
  ) -> np.ndarray:
    """Reads no more of a tensor than it must; the inverse of `write`.

    Args:
      tensor: safetensors' slices of it.
      shape: of a layer's weight.
      index: the part of a layer's weight to return.

    Returns:
      The part, without S.
    """
    sizes = dict(zip(self.ours, shape, strict=True))
    parts = dict(zip(self.ours, index, strict=True))
    inner = [slice(None)] * len(self.theirs)
    if 'HK' in self.theirs:
      inner[self.theirs.index('K')] = parts['K']
      heads, width = range(*parts['H'].indices(sizes['H'])), sizes['K']
      parts['H'] = slice(heads.start * width, heads.stop * width)
      parts['K'] = slice(None)
    x = tensor[tuple(parts[a] for a in self.theirs.replace('HK', 'H'))]
    if 'HK' in self.theirs:
      i = self.theirs.index('H')
      x = x.reshape(*x.shape[:i], len(heads), width, *x.shape[i + 1 :])
    ours = self.ours.replace('S', '')
    return x[tuple(inner)].transpose([self.theirs.index(a) for a in ours])


_LAYER = 'model.layers.{}.'


def _rows(has_post_norms: bool) -> dict[str, _Row]:
  """Returns the table of names: path of a weight -> its row."""
  attention, mlp = f'{_LAYER}self_attn.', f'{_LAYER}mlp.'
  gated = f'{mlp}gate_proj.weight', f'{mlp}up_proj.weight'
  rows = {
    'embedding/tokens': _Row('VD', 'VD', ('model.embed_tokens.weight',)),
    'embedding/output': _Row('VD', 'VD', ('lm_head.weight',)),
    'final_norm/scale': _Row('D', 'D', ('model.norm.weight',)),
    'layers/feed_forward/in': _Row('DSF', 'FD', gated),
    'layers/feed_forward/out': _Row('FD', 'DF', (f'{mlp}down_proj.weight',)),
    'layers/attention/out': _Row('HKD', 'DHK', (f'{attention}o_proj.weight',)),
  }
  for name, s in (('qkv', 'S'), ('q', ''), ('kv', 'S')):
    weights = tuple(f'{attention}{x}_proj.weight' for x in name)
    biases = tuple(f'{attention}{x}_proj.bias' for x in name)
    rows[f'layers/attention/{name}'] = _Row(f'D{s}HK', 'HKD', weights)
    rows[f'layers/attention/{name}_bias'] = _Row(f'{s}HK', 'HK', biases)
  for name in ('q_norm', 'k_norm'):
    tensor = f'{attention}{name}.weight'
    rows[f'layers/attention/{name}/scale'] = _Row('K', 'K', (tensor,))
  norms = {'attention': 'input', 'feed_forward': 'post_attention'}
  if has_post_norms:
    norms |= {
      'attention_post': 'post_attention',
      'feed_forward': 'pre_feedforward',
      'feed_forward_post': 'post_feedforward',
    }
  for ours, theirs in norms.items():
    tensor = f'{_LAYER}{theirs}_layernorm.weight'
    rows[f'layers/{ours}_norm/scale'] = _Row('D', 'D', (tensor,))
  return rows


def _open(path: pathlib.Path) -> dict[str, Any]:
  """Returns the tensors of a folder's files, by name; none is read yet."""
  import safetensors

  files = ['model.safetensors']
  if not (path / files[0]).exists():
    index = _read_json(path / 'model.safetensors.index.json')
    files = sorted(set(index['weight_map'].values()))
  tensors: dict[str, Any] = {}
  for name in files:
    if pathlib.PurePath(name).name != name:
      raise errors.UsageError(
        f'The index of {path} names the file {name!r}; expected one in the'
        ' folder itself.'
      )
    try:
      file = safetensors.safe_open(path / name, 'np')
    except safetensors.SafetensorError as e:
      raise errors.UsageError(
        f'{path / name} is no whole safetensors file ({e}). Copy it again.'
      ) from e
    tensors |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
  return tensors


def _check(
  tensors: Mapping[str, Any], weights: Weights, config: model.ModelConfig
) -> None:
  """Refuses tensors that are missing, left over, or not as expected."""
  rows = _rows(config.post_norms)
  expected = {
    name.format(n): rows[path].merged(x.shape[path.startswith('layers/') :])
    for path, x in weights.items()
    for name in rows[path].names
    for n in range(config.num_layers)
  }
  # Buffers of old Llamas; an output layer that is not used.
  spare = r'.*\.rotary_emb\.inv_freq'
  spare += r'|lm_head\.weight' if config.tie_embeddings else ''
  unread = [x for x in tensors if x not in expected]
  unread = [x for x in unread if not re.fullmatch(spare, x)]
  absent = [x for x in expected if x not in tensors]
  if unread or absent:
    raise errors.UsageError(
      f'The files lack the tensors {absent[:4]} and have {unread[:4]}, which'
      ' nothing reads. Does config.json belong to these files?'
    )
  for name, shape in expected.items():
    got = tensors[name].get_dtype(), tuple(tensors[name].get_shape())
    if got[0] not in _DTYPES or got[1] != shape:
      raise errors.UsageError(
        f'{name} is {got[0]}{list(got[1])}; expected {list(shape)} of one of'
        f' {_DTYPES}.'
      )


def _read_weight(
  tensors: Mapping[str, Any],
  row: _Row,
  shape: tuple[int, ...],
  index: tuple[slice, ...],
) -> np.ndarray:
  """Returns a part of a weight, float32."""
  parts = [range(*x.indices(n)) for x, n in zip(index, shape, strict=True)]
  out = np.empty([len(x) for x in parts], np.float32)
  is_layer = _LAYER in row.names[0]
  s = row.ours.find('S')
  for i, n in enumerate(parts[0] if is_layer else [0]):
    layer = out[i] if is_layer else out
    for j, place in enumerate(parts[s + is_layer] if s >= 0 else [0]):
      part = np.moveaxis(layer, s, 0)[j] if s >= 0 else layer
      tensor = tensors[row.names[place].format(n)]
      part[...] = row.read(tensor, shape[is_layer:], index[is_layer:])
  return out


def _flat(tree: Any) -> Weights:
  """Returns weights by their path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _tensors(
  weights: Weights, config: model.ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tensors of weights, by name: views of them."""
  rows = _rows(config.post_norms)
  errors.check_names(weights, rows, 'weight', 'the checkpoint')
  for path, x in weights.items():
    row, is_layer = rows[path], path.startswith('layers/')
    for n, of_layer in enumerate(x if is_layer else [x]):
      for place, name in enumerate(row.names):
        yield name.format(n), row.write(of_layer, place)


def _read_json(path: pathlib.Path) -> Any:
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as e:
    raise errors.UsageError(
      f'{path} cannot be read: {e}. Expected a folder with config.json,'
      ' tokenizer.json and model.safetensors, or several with an index.'
    ) from e


# Commands.


def import_model(source: pathlib.Path, run: pathlib.Path) -> None:
  """Makes a run of a folder: its config, its tokenizer, a checkpoint of step 0.

  Args:
    source: the folder.
    run: the run's directory, which has no checkpoint yet.

  Raises:
    errors.UsageError: what is wrong with either.
  """
  hf = _read_json(source / 'config.json')
  options, tensors = _read_config(hf), _open(source)
  found = [x for x in _TOKENIZERS if (source / x).exists()]
  if not found:
    raise errors.UsageError(
      f'{source} has none of {_TOKENIZERS}; copy one there.'
    )
  config, rows = _run_config(options, hf), _rows(options['post_norms'])
  config.checkpoint_dir = str(run)
  tokenizer = run.absolute() / found[0]
  config.experiment_kwargs.config.tokenizer = str(tokenizer)
  distributed.initialize(config.distributed)
  config = platform.resolve_config(config)
  checkpointer = adapters.full_checkpointer(
    platform.create_checkpointer(config, 'train')
  )
  with contextlib.closing(checkpointer):
    if not checkpointer.is_new():
      raise errors.UsageError(f'{run} has checkpoints already; give another.')
    run.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
      shutil.copyfile(source / found[0], tokenizer)
    distributed.of_chief(None)  # The others read it too.
    cls = platform.resolve_experiment_class(config)
    step_rng, init_rng = prng.run_keys(config)
    experiment = adapters.construct(cls, 'decode', init_rng, config)
    shapes = _flat(experiment.abstract_state().params)
    _check(tensors, shapes, experiment.config.model)
    for module, leaves in experiment.state.params.items():
      for name, old in leaves.items():
        row, sharding = rows[f'{module}/{name}'], old.sharding
        old.delete()  # The devices never hold one weight more than the state.
        read = functools.partial(_read_weight, tensors, row, old.shape)
        leaves[name] = jax.make_array_from_callback(old.shape, sharding, read)
    step_rng = experiment.initialize_train_step_rng(step_rng)
    base.new_state(checkpointer, experiment, step_rng)
    checkpointer.mark_begun(0)
    checkpointer.save('latest')
    checkpointer.wait_for_checkpointing_to_finish()
  if jax.process_index() == 0:
    of_run = f'python experiment.py --jaxline_run={run} --jaxline_mode='
    print(
      f'{hf["model_type"]} of {source}, step 0 of {run}. Continue prompts:\n'
      f'  {of_run}decode\nFine-tune on your text:\n'
      f'  {of_run}train_and_eval --config.restore_from={run} \\\n'
      f'    --config.checkpoint_dir={run}-tuned \\\n'
      "    --config.experiment_kwargs.config.files='notes/**/*.md'"
    )


def _run_config(
  options: Mapping[str, Any], hf: Mapping[str, Any]
) -> config_dict.ConfigDict:
  """Returns the config of a run that continues, or fine-tunes, a model."""
  config = lm.get_config()
  config.sharding = 'fsdp'  # As on one device, and weights of any size fit.
  config.training_steps = 1000
  config.eval_interval = config.save_checkpoint_interval = 200
  kwargs = config.experiment_kwargs.config
  length = options['max_length']
  is_deep = options['num_layers'] >= 12
  values = {**kwargs.model.to_dict(), **options, 'scan_layers': is_deep}
  kwargs.model = config_dict.ConfigDict(values)
  kwargs.length = min(length, 512)
  kwargs.batch_size = 8
  kwargs.packing = 'packed'
  kwargs.learning_rate = 1e-5
  kwargs.warmup_fraction = 0.05
  kwargs.sample_prompt = 'The'
  kwargs.sample_length = min(64, length // 2)
  kwargs.decode.max_decode_steps = min(128, length // 2)
  ends = hf.get('eos_token_id')
  ends = ends if isinstance(ends, list) else [ends]
  kwargs.decode.stop_ids = tuple(x for x in ends if x is not None)
  return config


def export_run(
  run: pathlib.Path,
  out: pathlib.Path,
  *,
  step: int | None = None,
  series: str = 'latest',
  dtype: str = 'float32',
) -> None:
  """Writes the weights of a run as a folder that transformers loads.

  Args:
    run: the run's directory.
    out: the folder; not there, or empty.
    step: that of the checkpoint; None is the newest.
    series: 'latest' or 'best'.
    dtype: 'float32' or 'bfloat16'.

  Raises:
    errors.UsageError: the run has no such checkpoint, or a model that no
      family has.
  """
  import safetensors.numpy

  if out.exists() and any(out.iterdir()):
    raise errors.UsageError(f'{out} is not empty; give another folder.')
  kwargs = base_config.recorded_config(run).experiment_kwargs.config
  config = base_config.read(model.ModelConfig, kwargs.model)
  of_lora = base_config.read(lora.Config, kwargs.get('lora', {}))
  params = jaxline.load_weights(run, step=step, series=series)
  weights = _flat(jax.device_get(lora.merge(params, of_lora)))
  config, weights = _folded(config, weights)
  hf = _write_config(config)
  tokenizer = tokenization.load_tokenizer(kwargs.tokenizer)
  start = tokenizer.document_id
  # Decoding stops at the document token too.
  stops = [*dict.fromkeys([*kwargs.decode.stop_ids, start])]
  ends = {'bos_token_id': start, 'eos_token_id': stops}
  hf |= {**ends, 'torch_dtype': dtype}

  target = np.dtype(dtype)
  files: list[dict[str, np.ndarray]] = [{}]
  size = total = 0
  for name, x in _tensors(weights, config):
    num_bytes = x.size * target.itemsize
    if files[-1] and size + num_bytes > _MAX_FILE:
      files.append({})
      size = 0
    size, total = size + num_bytes, total + num_bytes
    files[-1][name] = x
  out.mkdir(parents=True, exist_ok=True)
  places: dict[str, str] = {}
  for i, tensors in enumerate(files, 1):
    name = f'model-{i:05d}-of-{len(files):05d}.safetensors'
    name = name if len(files) > 1 else 'model.safetensors'
    places |= dict.fromkeys(tensors, name)
    converted = {k: np.ascontiguousarray(x, target) for k, x in tensors.items()}
    safetensors.numpy.save_file(converted, out / name, {'format': 'pt'})
  index = {'metadata': {'total_size': total}, 'weight_map': places}
  written = {'generation_config.json': ends, 'config.json': hf}
  if len(files) > 1:
    written = {'model.safetensors.index.json': index, **written}
  path = pathlib.Path(str(kwargs.tokenizer).partition('#')[0])
  if path.suffix in ('.json', '.model'):
    shutil.copyfile(path, out / f'tokenizer{path.suffix}')
  for name, content in written.items():  # config.json last: all is there.
    (out / name).write_text(json.dumps(content, indent=2) + '\n')
  print(f'{hf["model_type"]}, {total:,} bytes of {dtype}, in {out}')


def _folded(
  config: model.ModelConfig, weights: Weights
) -> tuple[model.ModelConfig, Weights]:
  """Replaces a normalised embedding by a table of its normalised rows."""
  if not config.normalize_embedding:
    return config, weights
  weights = dict(weights)
  scale = weights.pop('embedding/norm/scale')
  table = weights['embedding/tokens']
  weights.setdefault('embedding/output', table)
  normalised = transformer.normalize(
    table, scale=scale, epsilon=config.norm_epsilon, centered=False
  )
  weights['embedding/tokens'] = np.asarray(normalised)
  return dataclasses.replace(
    config, normalize_embedding=False, tie_embeddings=False
  ), weights


def parity(run: pathlib.Path, folder: pathlib.Path) -> float:
  """Compares the logits of a run and of transformers, in float32.

  Args:
    run: the run's directory.
    folder: what `import` read, or `export` wrote.

  Returns:
    The largest error, as a part of the logits' standard deviation.
  """
  import torch
  import transformers

  experiment = jaxline.load(run, mode='decode')
  config = dataclasses.replace(experiment.config.model, dtype='float32')
  # What `export` wrote: averaged weights, if the run has them.
  params = lora.merge(experiment.eval_params, experiment.config.lora)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  )
  length = min(config.max_length, 512)
  text = experiment.tokenizer.encode(__doc__ or '')[:length]
  drawn = np.random.default_rng(0).integers(config.vocab_size, size=length)
  worst = 0.0
  for name, ids in (('random ids', drawn), ('text', text)):
    ids = np.asarray(ids, np.int32)[None]
    ours = np.asarray(model.apply(params, jnp.asarray(ids), config))
    with torch.no_grad():
      expected = theirs(torch.from_numpy(ids).long()).logits.numpy()
    error = np.abs(ours - expected).max() / expected.std()
    p, q = (jax.nn.log_softmax(x) for x in (expected, ours))
    kl = float((np.exp(p) * (p - q)).sum(-1).mean())
    print(f'{name}: largest error {error:.2g} of a deviation, KL {kl:.2g} nats')
    worst = max(worst, float(error))
  return worst


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; returns the exit status, 2 for an error of use."""
  parser = argparse.ArgumentParser(
    prog='python -m examples.lm.hf', description=(__doc__ or '').split('\n')[0]
  )
  commands = parser.add_subparsers(required=True, metavar='COMMAND')
  for name, run, *places in (
    ('import', import_model, 'source', 'run'),
    ('export', export_run, 'run', 'out'),
    ('parity', parity, 'run', 'folder'),
  ):
    command = commands.add_parser(name, help=(run.__doc__ or '').split('\n')[0])
    command.set_defaults(call=run)
    for place in places:
      command.add_argument(place, type=pathlib.Path)
    if name == 'export':
      command.add_argument('--step', type=int)
      command.add_argument('--series', default='latest')
      command.add_argument(
        '--dtype', choices=('float32', 'bfloat16'), default='float32'
      )
  args = vars(parser.parse_args(argv))
  try:
    args.pop('call')(**args)
  except (errors.UsageError, OSError, ImportError) as e:
    print(f'examples.lm.hf: {e}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main())
