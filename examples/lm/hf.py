"""Imports Hugging Face models into runs, and exports runs.

  python -m examples.lm.hf import DIR RUN
  python -m examples.lm.hf export RUN DIR [--step=N] [--series=best]
    [--weights=raw]
  python -m examples.lm.hf parity RUN DIR

DIR has `config.json`, `*.safetensors` and `tokenizer.json`. `_FAMILIES` lists
the supported models. `import` makes a run with a checkpoint of step 0. The run
keeps the other files of DIR (`folder.py`), and `export` writes them again.
`parity` compares a run with transformers: the logits, the tokens of prompts and
chats, and the tokens that follow them. It needs torch.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
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
from jaxline import errors
from jaxline import platform
from jaxline import sharded
from jaxline import train_state
from jaxline.base import stateful
from jaxline.base import trees
from jaxline.checkpoint import protocol
from jaxline.compat import adapters
from jaxline.compat import experiments
from jaxline.inputs import tokenization
from jaxline.metrics import lines
from jaxline.parallel import distributed
from jaxline.parallel import prng

from . import experiment as experiment_lib
from . import folder
from . import lora
from . import model

Tensors = Mapping[str, np.ndarray]

_GEMMA = {'embedding_scale': True, 'norm_offset': True, 'post_norms': True}
# `model_type` -> options that its `config.json` implies. An export takes the
# first family that fits.
_FAMILIES: dict[str, dict[str, Any]] = {
  'llama': {},
  'mistral': {},
  'mixtral': {},
  'qwen2': {'qkv_bias': True},
  'qwen3': {'qk_norm': True},
  'qwen3_moe': {'qk_norm': True},
  'gemma2': _GEMMA,
  'gemma3_text': {**_GEMMA, 'qk_norm': True},
}
# Families in which all layers have experts.
_MIXTURES = ('mixtral', 'qwen3_moe')
# Option -> its key in `config.json`.
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
  'num_experts': 'num_experts',
  'experts_per_token': 'num_experts_per_tok',
  'router_normalize': 'norm_topk_prob',
}
# Options of experts that have this value in all families.
_PLAIN = {
  'router_bias_rate': 0.0,
  'router_gate': 'softmax',
  'router_scale': 1.0,
  'shared_dim': None,
}
_CAPS = {
  'attention_cap': 'attn_logit_softcapping',
  'logits_cap': 'final_logit_softcapping',
}
_ACTIVATIONS = {'silu': 'swiglu', 'gelu_pytorch_tanh': 'geglu'}
_LENGTH = 'original_max_position_embeddings'
# `rope_type` -> the keys of `rotary_scaling`.
_ROPES = {
  'default': (),
  'linear': ('factor',),
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor', _LENGTH),
}
_LAYERS = ('full_attention', 'sliding_attention')
# Keys of computations that the model does not support.
_OFF = (
  'attention_bias',
  'mlp_bias',
  'quantization_config',
  'use_bidirectional_attention',
)
# Further keys that `_facts` or `_run_config` reads.
_READ = """
  model_type head_dim hidden_act hidden_activation eos_token_id layer_types
  max_window_layers moe_intermediate_size num_local_experts
  query_pre_attn_scalar rope_local_base_freq rope_parameters rope_scaling
  rope_theta sliding_window sliding_window_pattern _sliding_window_pattern
  use_sliding_window
"""
# Keys that do not change the logits. They describe where a model is from, how
# it was trained, and how other programs store it, run it and sample from it.
_NO_EFFECT = """
  _attn_implementation _name_or_path architectures attention_dropout
  attn_implementation begin_suppress_tokens bos_token_id cache_implementation
  diversity_penalty do_sample dtype early_stopping finetuning_task
  forced_bos_token_id forced_eos_token_id hidden_dropout id2label
  initializer_range is_llama_config label2id length_penalty max_length
  min_length no_repeat_ngram_size num_beam_groups num_beams
  num_return_sequences output_router_logits pad_token_id prefix pretraining_tp
  problem_type repetition_penalty return_dict router_aux_loss_coef
  router_jitter_noise sep_token_id sliding_window_size suppress_tokens
  task_specific_params temperature tokenizer_class top_k top_p torch_dtype
  transformers.js_config transformers_version typical_p unsloth_fixed
  unsloth_version use_cache
"""
# Any other key is refused, unless it is empty or has the value in this table.
_NEUTRAL = {'partial_rotary_factor': 1.0, 'decoder_sparse_step': 1}
# The largest error of logits that `parity` accepts, as a fraction of their
# standard deviation. In the models of the tests, rounding causes 2.2e-5, and
# the wrong option with the smallest effect 4.3e-3: see
# docs/reference/fine_tuning.md.
_MAX_ERROR = 1e-3
# Prompts that `parity` continues.
_PROMPTS = 'The first', 'naïve  中文 \n', 'def f(x):\n\treturn'
_DTYPES = 'F32', 'F16', 'BF16'
_MAX_FILE = 5 * 10**9  # Most bytes per file of an export, as in transformers.
# The table of names. Its columns: our weight; its axes (N is layers); the axes
# of the tensor (HK is H and K merged); the tensor's name; and the words that
# replace * in this name, one for each index along S. In a name, # stands for
# the index along E. `_words` replaces words in capitals.
_NAMES = """
embedding/tokens              VD     V,D   model.embed_tokens.weight
embedding/output              VD     V,D   lm_head.weight
final_norm/scale              D      D     model.norm.weight
layers/attention/qkv          NDSHK  HK,D  self_attn.*_proj.weight q k v
layers/attention/q            NDHK   HK,D  self_attn.*_proj.weight q
layers/attention/kv           NDSHK  HK,D  self_attn.*_proj.weight k v
layers/attention/out          NHKD   D,HK  self_attn.*_proj.weight o
layers/attention/qkv_bias     NSHK   HK    self_attn.*_proj.bias   q k v
layers/attention/q_bias       NHK    HK    self_attn.*_proj.bias   q
layers/attention/kv_bias      NSHK   HK    self_attn.*_proj.bias   k v
layers/attention/q_norm/scale NK     K     self_attn.*_norm.weight q
layers/attention/k_norm/scale NK     K     self_attn.*_norm.weight k
layers/feed_forward/in        NDSF   F,D   mlp.*_proj.weight       gate up
layers/feed_forward/out       NFD    D,F   mlp.*_proj.weight       down
layers/experts/router         NDR    R,D   MOE.gate.weight
layers/experts/in             NEDSF  F,D   MOE.experts.#.*.weight  GATE UP
layers/experts/out            NEFD   D,F   MOE.experts.#.*.weight  DOWN
layers/attention_norm/scale         ND D *_layernorm.weight input
layers/feed_forward_norm/scale      ND D *_layernorm.weight SECOND
layers/attention_post_norm/scale    ND D *_layernorm.weight post_attention
layers/feed_forward_post_norm/scale ND D *_layernorm.weight post_feedforward
"""


# Configs.


def _facts(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys of a `config.json` that describe the computation.

  If versions of transformers differ, the result has the keys of version 5, with
  two exceptions: `layer_types` has the window of each layer, and
  `rope_parameters` has an entry for layers without a window and one for layers
  with a window.
  """
  family, heads = hf['model_type'], hf['num_attention_heads']
  is_gemma = family.startswith('gemma')
  # In these families, layers have windows from a certain layer on.
  is_qwen = family in ('qwen2', 'qwen3')
  size = hf.get('head_dim') or hf['hidden_size'] // heads
  filled = {'rms_norm_eps': 1e-6, 'tie_word_embeddings': is_gemma, **hf}
  filled['head_dim'] = size
  filled['num_key_value_heads'] = hf.get('num_key_value_heads') or heads
  if family not in _MIXTURES:
    filled |= {'num_experts': 1, 'num_experts_per_tok': 1}
  elif 'num_local_experts' in hf:
    filled['num_experts'] = hf['num_local_experts']
  filled['norm_topk_prob'] = True
  if family == 'qwen3_moe':
    filled['intermediate_size'] = hf['moe_intermediate_size']
    filled['norm_topk_prob'] = hf.get('norm_topk_prob', False)
  activation = hf.get('hidden_activation') or hf.get('hidden_act')
  of_gemma = hf if is_gemma else {}
  facts = {
    **{key: filled[key] for key in _KEYS.values()},
    **{key: hf.get(key) or None for key in _OFF},
    **{key: of_gemma.get(key) or 0.0 for key in _CAPS.values()},
    'query_pre_attn_scalar': of_gemma.get('query_pre_attn_scalar') or size,
    'hidden_act': activation or ('gelu_pytorch_tanh' if is_gemma else 'silu'),
  }

  period = (
    hf.get('sliding_window_pattern')
    or hf.get('_sliding_window_pattern')
    or {'gemma2': 2}.get(family, 6)
  )

  def is_sliding(i: int) -> bool:
    if is_gemma:
      return (i + 1) % period != 0
    return not is_qwen or i >= hf['max_window_layers']

  types = hf.get('layer_types') or [
    _LAYERS[is_sliding(i)] for i in range(hf['num_hidden_layers'])
  ]
  errors.check_names(types, _LAYERS, 'layer_types', 'config.json')
  uses = hf.get('use_sliding_window', not family.startswith('qwen'))
  uses = uses and family != 'llama'
  window = (hf['sliding_window'] or 0) if uses else 0
  facts['layer_types'] = [window * _LAYERS.index(x) for x in types]

  rope = hf.get('rope_parameters') or {
    'rope_theta': hf.get('rope_theta'),
    **(hf.get('rope_scaling') or {}),
  }
  ropes = [(rope, 1e4)] * 2
  if family == 'gemma3_text':
    local = {'rope_theta': hf.get('rope_local_base_freq')}
    if _LAYERS[0] in rope:
      rope, local = (rope[x] for x in _LAYERS)
    ropes = [(rope, 1e6), (local, 1e4)]
  facts['rope_parameters'] = []
  for rope, theta in ropes:
    given = {key: x for key, x in rope.items() if x is not None}
    kind = given.pop('type', 'default')  # The former name of `rope_type`.
    given = {'rope_type': kind, 'rope_theta': theta, **given}
    if given['rope_type'] == 'llama3':
      given.setdefault(_LENGTH, hf['max_position_embeddings'])
    facts['rope_parameters'].append(given)
  return facts


def _read_config(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the options of `ModelConfig` for a `config.json`.

  Refuses every value that `_write_as` cannot reproduce from these options.
  """
  family = str(hf.get('model_type'))
  errors.check_names([family], _FAMILIES, 'model_type', 'config.json')
  known = {*_KEYS.values(), *_CAPS.values(), *_OFF}
  known |= {*_READ.split(), *_NO_EFFECT.split()}
  empty = (None, False, '', [], {})
  if unknown := [
    f'{key}={x!r:.80}'
    for key, x in hf.items()
    if key not in known
    and x != _NEUTRAL.get(key, hf)
    and not any(x == y and type(x) is type(y) for y in empty)
  ]:
    raise errors.UsageError(
      f'config.json of a {family} has {", ".join(unknown)}, which examples/lm'
      ' does not know. Remove the keys that do not change the logits.'
    )
  try:
    facts = _facts(hf)
    full, local = facts['rope_parameters']
    scaling = [float(full[key]) for key in _ROPES.get(full['rope_type'], ())]
  except KeyError as e:
    raise errors.UsageError(f'config.json of a {family} lacks {e}.') from e
  has_local = family == 'gemma3_text'
  options = _canonical(
    {name: facts[key] for name, key in (_KEYS | _CAPS).items()}
    | dict.fromkeys([*_GEMMA, 'qkv_bias', 'qk_norm'], False)
    | _FAMILIES[family]
    | _PLAIN
    | {
      'positions': 'rotary',
      'normalize_embedding': False,
      'bigram_rows': 0,
      'feed_forward': _ACTIVATIONS.get(facts['hidden_act'], 'swiglu'),
      'windows': facts['layer_types'],
      'query_scale': facts['query_pre_attn_scalar'] ** -0.5,
      'rotary_base': float(full['rope_theta']),
      'rotary_scaling': tuple(scaling),
      'local_rotary_base': float(local['rope_theta']) if has_local else None,
    }
  )
  again = _facts(_write_as(family, options))
  if lost := [f'{k}={x!r}' for k, x in facts.items() if x != again[k]]:
    raise errors.UsageError(
      f'config.json of a {family} has {", ".join(lost)}, which examples/lm does'
      ' not compute. Convert the model, or extend examples/lm/model.py.'
    )
  return options


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
  """Returns options such that equal models have equal options."""
  new = dict(options)
  new['head_size'] = new['head_size'] or new['embed_dim'] // new['num_heads']
  new['num_kv_heads'] = new['num_kv_heads'] or new['num_heads']
  new['query_scale'] = new['query_scale'] or new['head_size'] ** -0.5
  is_same = new['local_rotary_base'] == new['rotary_base']
  if is_same and not new['rotary_scaling']:
    new['local_rotary_base'] = None
  # The shortest pattern whose repetition gives each layer its window.
  layers = new['num_layers']
  windows = (tuple(new['windows'] or (0,)) * layers)[:layers]
  patterns = (windows[:n] for n in range(1, layers + 1))
  shortest = next(x for x in patterns if (x * layers)[:layers] == windows)
  new['windows'] = shortest if any(windows) else ()
  return new


def _write_config(config: model.ModelConfig) -> dict[str, Any]:
  """Returns the `config.json` of a model, for transformers 4 and 5."""
  options = _canonical(dataclasses.asdict(config))
  misfits = []
  for family in _FAMILIES:
    written = _write_as(family, options)
    read = _read_config(written)
    wrong = [
      f'{k}={options[k]} ({x})' for k, x in read.items() if options[k] != x
    ]
    if not wrong:
      return written
    misfits.append(f'{family} but for {", ".join(wrong)}')
  raise errors.UsageError(
    'No supported family has this model. The nearest is'
    f' {min(misfits, key=len)}, with its value in brackets. Train a model with'
    ' these values, or use `python -m jaxline.checkpoint export`.'
  )


def _write_as(family: str, options: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the `config.json` of the nearest model of a family.

  It has the keys of transformers 4, which version 5 reads too. The options must
  be canonical.
  """
  is_gemma = family.startswith('gemma')
  is_qwen = family in ('qwen2', 'qwen3')
  title = family.removesuffix('_text').title().replace('_', '')
  activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
  hf: dict[str, Any] = {
    'architectures': [f'{title}ForCausalLM'],
    'model_type': family,
    'hidden_act': activations.get(options['feed_forward'], 'silu'),
    **{key: options[name] for name, key in _KEYS.items()},
    'rope_theta': options['rotary_base'],
    'rope_scaling': None,
  }
  if scaling := options['rotary_scaling']:
    rope = next(k for k, x in _ROPES.items() if len(x) == len(scaling))
    hf['rope_scaling'] = {'rope_type': rope}
    for key, x in zip(_ROPES[rope], scaling, strict=True):
      hf['rope_scaling'][key] = int(x) if key == _LENGTH else x
  layers = options['num_layers']
  windows = ((options['windows'] or (0,)) * layers)[:layers]
  if family != 'llama':
    hf['sliding_window'] = max(windows) or None
  if is_qwen or is_gemma:
    hf['layer_types'] = [_LAYERS[x > 0] for x in windows]
  of_experts = [_KEYS[x] for x in _KEYS if 'expert' in x or 'router' in x]
  if family not in _MIXTURES:
    hf = {key: x for key, x in hf.items() if key not in of_experts}
  elif family == 'mixtral':
    hf['num_local_experts'] = hf.pop('num_experts')
    hf.pop('norm_topk_prob')
  else:
    hf['moe_intermediate_size'] = options['mlp_dim']
    hf['use_sliding_window'] = any(windows)
  if is_qwen:
    hf['use_sliding_window'] = any(windows)
    hf['max_window_layers'] = [*map(bool, windows), True].index(True)
  if is_gemma:
    hf['query_pre_attn_scalar'] = round(options['query_scale'] ** -2)
    hf['hidden_activation'] = hf['hidden_act']
    hf |= {key: options[name] or None for name, key in _CAPS.items()}
  if family == 'gemma3_text':
    local = options['local_rotary_base'] or options['rotary_base']
    hf['rope_local_base_freq'] = local
    hf['sliding_window_pattern'] = len(options['windows']) or 1
  return hf


# Weights.


_STACKED = 'NES'  # Axes of weights along which each index is a tensor.
_MIXTRAL = 'block_sparse_moe w1 w3 w2'


@dataclasses.dataclass(frozen=True)
class _Row:
  """A row of `_NAMES`; `names` has the axes N, E, S that `ours` has."""

  ours: str
  theirs: str
  names: np.ndarray

  def _stacked(self, x: np.ndarray, axes: str) -> np.ndarray:
    """Returns a part of the weight as a view, [N, E, S, *axes]."""
    stack = [a for a in _STACKED if a in self.ours]
    return x.transpose([self.ours.index(a) for a in [*stack, *axes]])

  def write(self, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and the tensors of a weight, which are views of it."""
    sizes = dict(zip(self.ours, x.shape, strict=True))
    shape = [math.prod(sizes[a] for a in y) for y in self.theirs.split(',')]
    stacked = self._stacked(x, self.theirs.replace(',', ''))
    for place, name in np.ndenumerate(self.names):
      yield str(name), stacked[place].reshape(shape)

  def read(
    self, tensors: Tensors, shape: Sequence[int], index: Sequence[slice]
  ) -> np.ndarray:
    """Returns a part of a weight in float32; the inverse of `write`."""
    sizes = dict(zip(self.ours, shape, strict=True))
    parts = dict(zip(self.ours, index, strict=True))
    lengths = [len(range(n)[parts[a]]) for a, n in sizes.items()]
    out = np.empty(lengths, np.float32)
    axes = ''.join(a for a in self.ours if a not in _STACKED)
    stacked, theirs = self._stacked(out, axes), self.theirs.replace(',', '')
    names = self.names[tuple(parts[a] for a in _STACKED if a in parts)]
    for place, name in np.ndenumerate(names):
      x = tensors[str(name)].reshape([sizes[a] for a in theirs])
      x = x.transpose([theirs.index(a) for a in axes])
      stacked[place] = x[tuple(parts[a] for a in axes)]
    return out


def _words(config: model.ModelConfig) -> dict[str, str]:
  """Returns the words that replace the names in capitals in `_NAMES`."""
  is_qwen = config.qk_norm
  moe = 'mlp gate_proj up_proj down_proj' if is_qwen else _MIXTRAL
  second = 'pre_feedforward' if config.post_norms else 'post_attention'
  words = ('SECOND', 'MOE', 'GATE', 'UP', 'DOWN')
  return dict(zip(words, (second, *moe.split()), strict=True))


def _rows(config: model.ModelConfig) -> dict[str, _Row]:
  """Returns the row of each weight of a model, by the path of the weight."""
  rows, words = {}, _words(config)
  table = re.sub('[A-Z]{2,}', lambda x: words.get(x[0], x[0]), _NAMES)
  for line in table.strip().splitlines():
    path, ours, theirs, tensor, *places = line.split()
    names: Any = [tensor.replace('*', x) for x in places or '*']
    names = names if 'S' in ours else names[0]
    if 'E' in ours:
      experts = range(config.num_experts)
      names = [np.char.replace(names, '#', str(e)) for e in experts]
    if 'N' in ours:
      layers = (f'model.layers.{n}.' for n in range(config.num_layers))
      names = [np.char.add(layer, names) for layer in layers]
    rows[path] = _Row(ours, theirs, np.array(names))
  return rows


def _tensors(
  weights: Tensors, config: model.ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the names and the tensors of weights, which are views of them."""
  rows = _rows(config)
  errors.check_names(weights, rows, 'weight', 'the checkpoint')
  for path, x in weights.items():
    yield from rows[path].write(x)


class _Files(Mapping[str, np.ndarray]):
  """Maps names to the tensors of files, which are read on access."""

  def __init__(self, places: Mapping[str, Any]):
    self._places = places  # Name -> the open file.

  def __getitem__(self, name: str) -> np.ndarray:
    return self._places[name].get_tensor(name)

  def __iter__(self) -> Iterator[str]:
    return iter(self._places)

  def __len__(self) -> int:
    return len(self._places)

  def shape(self, name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor without reading it."""
    return tuple(self._places[name].get_slice(name).get_shape())


def _open(path: pathlib.Path) -> _Files:
  """Opens the safetensors files of a folder."""
  import safetensors

  tensors: dict[str, Any] = {}
  places: dict[str, str] = {}
  for file in sorted(path.glob('model*.safetensors')):
    try:
      opened = safetensors.safe_open(file, 'np')
      for name in opened.keys():  # noqa: SIM118  safe_open cannot be iterated.
        if name in tensors:
          raise ValueError(f'{name} is in {places[name]} too')
        if (kind := opened.get_slice(name).get_dtype()) not in _DTYPES:
          raise ValueError(f'{name} is of type {kind}')
        tensors[name], places[name] = opened, file.name
    except (ValueError, safetensors.SafetensorError) as e:
      raise errors.UsageError(
        f'{file} cannot be read: {e!r}; expected a complete safetensors file'
        f' with tensors of the types {_DTYPES}. Copy it again, or convert it.'
      ) from e
  index = path / 'model.safetensors.index.json'
  try:
    listed = json.loads(index.read_bytes())['weight_map']
    wrong = sorted({*listed.items()} ^ {*places.items()})[:4]
  except FileNotFoundError:
    return _Files(tensors)
  except (ValueError, TypeError, LookupError, AttributeError) as e:
    raise errors.UsageError(
      f'{index} cannot be read: {e!r}. Copy it again, or remove it.'
    ) from e
  if wrong and tensors:
    raise errors.UsageError(
      f'{index} and the files disagree on {wrong}. Copy the folder again.'
    )
  return _Files(tensors)


def _is_spare(name: str, tensors: Tensors, config: model.ModelConfig) -> bool:
  """Returns whether the model does not need a tensor.

  This holds for the output layer of a tied model and for a buffer of old
  Llamas, if they have the expected values.
  """
  size = config.head_dim
  if name == 'lm_head.weight' and config.tie_embeddings:
    embedding = tensors.get('model.embed_tokens.weight')
    return embedding is not None and np.array_equal(tensors[name], embedding)
  if not re.fullmatch(
    r'model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq', name
  ):
    return False
  expected = config.rotary_base ** -(np.arange(0, size, 2) / size)
  found = tensors[name].astype(np.float32)
  # In bfloat16, numbers have 8 significant bits.
  return found.shape == expected.shape and np.allclose(found, expected, 1e-2, 0)


def _check(tensors: _Files, shapes: Any, config: model.ModelConfig) -> None:
  """Refuses tensors that are missing, superfluous or of the wrong shape."""
  nothing = np.float32(0)  # Broadcasting it takes no memory.
  weights = {k: np.broadcast_to(nothing, x.shape) for k, x in shapes.items()}
  expected = {k: x.shape for k, x in _tensors(weights, config)}
  found = {
    k: tensors.shape(k)
    for k in tensors
    if k in expected or not _is_spare(k, tensors, config)
  }
  if (name := 'lm_head.weight') in found and config.tie_embeddings:
    raise errors.UsageError(
      f'{name} differs from model.embed_tokens.weight, but config.json has'
      ' tie_word_embeddings=true. Set it to false to use the output layer.'
    )
  if wrong := [
    f'{k} {found.get(k)} (expected: {expected.get(k)})'
    for k in expected | found
    if found.get(k) != expected.get(k)
  ]:
    raise errors.UsageError(
      f'Tensors do not fit config.json: {wrong[:4]}. Check that config.json'
      ' belongs to these files.'
    )


# Commands.


def import_model(source: pathlib.Path, run: pathlib.Path) -> None:
  """Makes a run from a folder: config, tokenizer and checkpoint of step 0."""
  if folder.read(source, folder.CONFIG) is None:
    raise errors.MissingFileError(
      f'{source / folder.CONFIG} does not exist. Give the folder of a model.'
    )
  hf = folder.read_json(source, folder.CONFIG)
  with folder.reading(str(source / folder.CONFIG)):
    config = _run_config(hf)
  tensors = _open(source)
  names = ('tokenizer.json', 'tokenizer.model')
  name = next((x for x in names if (source / x).exists()), None)
  if name is None or not tensors:
    raise errors.UsageError(
      f'{source} lacks {"model*.safetensors" if name else " and ".join(names)};'
      ' download the whole folder of the model.'
    )
  config.checkpoint_dir = str(run)
  kwargs = config.experiment_kwargs.config
  kwargs.tokenizer = folder.tokenizer_of(source.absolute() / name)
  kwargs.decode.stop_ids = folder.stop_ids(source)
  if name == 'tokenizer.json':
    kwargs.prompt_format = 'special'
  distributed.initialize(config.distributed)
  # Read everything that may be refused before creating the run.
  cls = platform.resolve_experiment_class(config)
  step_rng, init_rng = prng.run_keys(config)
  experiment = experiments.construct(cls, 'decode', init_rng, config)
  state = _read_state(tensors, experiment, init_rng)
  beside = run.absolute() / folder.NAME
  token = kwargs.tokenizer.removeprefix(str(source.absolute() / name))
  kwargs.tokenizer = f'{beside / name}{token}'
  config = platform.resolve_config(config)
  checkpointer = adapters.full_checkpointer(
    platform.create_checkpointer(config, 'train'), cls
  )
  with contextlib.closing(checkpointer):
    if not protocol.is_new(checkpointer):
      raise errors.UsageError(
        f'{run} has checkpoints already. Give a new directory.'
      )
    if jax.process_index() == 0 and (others := folder.copy(source, beside)):
      lines.print_text(f'Not copied: {", ".join(others)}.')
    distributed.broadcast_from_process_0(None)  # Wait: all read the copy.
    experiment.restore_from_snapshot(stateful.OwnedSnapshot(state=state))
    step_rng = experiment.initialize_train_step_rng(step_rng)
    protocol.new_state(checkpointer, experiment, step_rng)
    checkpointer.begin(0)
    checkpointer.save('latest')
    checkpointer.wait_for_checkpointing_to_finish()
  if jax.process_index() == 0:
    print(
      f'{hf["model_type"]} of {source}, step 0 of {run}. Continue prompts:\n'
      f'  python experiment.py --jaxline_run={run} --jaxline_mode=decode\n'
      'docs/howto.md shows how to fine-tune it.'
    )


def _read_state(
  tensors: _Files, experiment: Any, rng: jax.Array
) -> sharded.TrainState:
  """Returns the state of step 0; each process reads its shards of weights."""
  abstract, config = experiment.abstract_state(), experiment.config.model
  _check(tensors, trees.named_leaves(abstract.params), config)
  rows = _rows(config)

  def read(path: Any, x: Any) -> jax.Array:
    row = rows[trees.name_of(path)]
    part = functools.partial(row.read, tensors, x.shape)
    return jax.make_array_from_callback(x.shape, x.sharding, part)

  def init(params: Any) -> sharded.TrainState:
    optimizer = experiment.make_optimizer()
    return train_state.init_state(lambda _: (params, {}), optimizer, rng)

  params = jax.tree_util.tree_map_with_path(read, abstract.params)
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  return jax.jit(init, donate_argnums=0, out_shardings=shardings)(params)


def _run_config(hf: Mapping[str, Any]) -> config_dict.ConfigDict:
  """Returns the config of a run that decodes with, or fine-tunes, a model."""
  config, options = lm.get_config(), _read_config(hf)
  # On one device this changes nothing. On several, weights of any size fit.
  config.sharding = 'fsdp'
  config.training_steps = 1000
  config.eval_interval = config.save_checkpoint_interval = 200
  kwargs = config.experiment_kwargs.config
  length = options['max_length']
  options['scan_layers'] = options['num_layers'] >= 12
  kwargs.model = config_dict.ConfigDict(kwargs.model.to_dict() | options)
  model.ModelConfig(**kwargs.model)  # Refuses impossible sizes.
  kwargs.update(length=min(length, 512), batch_size=8, packing='packed')
  kwargs.update(learning_rate=1e-5, warmup_fraction=0.05, b2=0.95)
  kwargs.sample_prompt = 'The'
  kwargs.sample_length = min(64, length // 2)
  kwargs.decode.max_decode_steps = min(128, length // 2)
  return config


def export_run(
  run: pathlib.Path, out: pathlib.Path, *, dtype: str = 'float32', **which: Any
) -> None:
  """Writes the weights of a run as a folder that transformers loads.

  `which` has the arguments `step`, `series` and `weights` of
  `jaxline.load_weights`.
  """
  import safetensors.numpy

  if out.exists() and any(out.iterdir()):
    raise errors.UsageError(f'{out} is not empty. Give a new folder.')
  kwargs = base_config.recorded_config(run).experiment_kwargs.config
  params = lora.merge(
    jaxline.load_weights(run, model_state=True, **which)['params'],
    base_config.read(lora.Config, kwargs.get('lora', {})),
  )
  config, weights = _folded(
    base_config.read(model.ModelConfig, kwargs.model),
    trees.named_leaves(jax.device_get(params)),
  )
  tokenizer = experiment_lib.find_tokenizer(kwargs.tokenizer, str(run))
  source = folder.of_tokenizer(tokenizer)
  is_of_model = folder.is_of(source, config.vocab_size)
  hf = _write_config(config)
  if source and is_of_model:
    more, generation = _as_imported(source, kwargs.decode.stop_ids)
    hf = more | hf
  else:
    start = tokenization.load_tokenizer(tokenizer).document_id
    # Decoding stops at the document token too.
    stops = [*dict.fromkeys([*kwargs.decode.stop_ids, start])]
    generation = {'bos_token_id': start, 'eos_token_id': stops}
    hf |= generation
  hf['torch_dtype'] = dtype

  files: dict[int, dict[str, np.ndarray]] = {}
  total = 0
  for name, x in _tensors(weights, config):
    files.setdefault(total // _MAX_FILE, {})[name] = x
    total += x.size * np.dtype(dtype).itemsize
  out.mkdir(parents=True, exist_ok=True)
  _write(out, folder.GENERATION, generation)
  places: dict[str, str] = {}
  for i, tensors in enumerate(files.values(), 1):
    part = f'-{i:05d}-of-{len(files):05d}' if len(files) > 1 else ''
    places |= dict.fromkeys(tensors, f'model{part}.safetensors')
    converted = {k: np.ascontiguousarray(x, dtype) for k, x in tensors.items()}
    file = out / f'model{part}.safetensors'
    safetensors.numpy.save_file(converted, file, {'format': 'pt'})
    # Safetensors makes private files.
    shutil.copymode(out / folder.GENERATION, file)
  if source:
    folder.export(source, out, is_of_model)
    path = pathlib.Path(str(tokenizer).partition('#')[0])
    shutil.copyfile(path, out / f'tokenizer{path.suffix}')
  else:
    print(f'No tokenizer is written: {kwargs.tokenizer!r} is not a file.')
  index = {'metadata': {'total_size': total}, 'weight_map': places}
  _write(out, 'model.safetensors.index.json', index)
  _write(out, folder.CONFIG, hf)  # Written last: marks a complete folder.
  print(f'{hf["model_type"]}, {total:,} bytes of {dtype}, in {out}')


def _as_imported(
  source: pathlib.Path, stops: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns parts of `config.json`, and `generation_config.json`, of a folder.

  The parts of `config.json` have no options of the model. If the run and the
  folder have different stops, both results get the stops of the run.
  """
  original = folder.read_json(source, folder.CONFIG)
  kept = {*_NO_EFFECT.split(), 'eos_token_id'} - {'dtype', 'torch_dtype'}
  values = {key: x for key, x in original.items() if key in kept}
  ids = {k: x for k, x in values.items() if k.endswith('_token_id')}
  generation = folder.read_json(source, folder.GENERATION) or ids
  if tuple(stops) != folder.stop_ids(source):
    values |= {'eos_token_id': [*stops]}
    generation |= {'eos_token_id': [*stops]}
  if isinstance(end := values.get('eos_token_id'), int):
    values['eos_token_id'] = [end]
  return values, generation


def _write(out: pathlib.Path, name: str, content: Any) -> None:
  (out / name).write_text(json.dumps(content, indent=2) + '\n')


def _folded(
  config: model.ModelConfig, weights: dict[str, np.ndarray]
) -> tuple[model.ModelConfig, dict[str, np.ndarray]]:
  """Replaces a normalized embedding by a table of its normalized rows."""
  if not config.normalize_embedding:
    return config, weights
  new = dict(weights)
  scale, table = new.pop('embedding/norm/scale'), new['embedding/tokens']
  new.setdefault('embedding/output', table)
  if config.norm_offset:
    scale = 1 + scale
  if config.embedding_scale:  # The model applies it before the norm.
    table = table * np.float32(config.embed_dim**0.5)
  normalized = transformer.normalize(
    table, scale=scale, epsilon=config.norm_epsilon, centered=False
  )
  new['embedding/tokens'] = np.asarray(normalized)
  return dataclasses.replace(
    config,
    normalize_embedding=False,
    tie_embeddings=False,
    embedding_scale=False,
  ), new


def logits_error(run: pathlib.Path, folder: pathlib.Path) -> float:
  """Compares the logits of a run and of transformers, in float32.

  Returns the largest error, as a fraction of the logits' standard deviation.
  """
  import torch
  import transformers

  experiment = jaxline.load(run, mode='decode')
  config = dataclasses.replace(experiment.config.model, dtype='float32')
  # Use the weights that `export` writes: the average, if the run has one.
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
    error = float(np.abs(ours - expected).max() / expected.std())
    p, q = (jax.nn.log_softmax(x) for x in (expected, ours))
    kl = float((jnp.exp(p) * (p - q)).sum(-1).mean())
    print(f'{name}: largest error {error:.2g} of a deviation, KL {kl:.2g} nats')
    worst = float(np.maximum(worst, error))  # NaN stays.
  return worst


def tokens_differ(run: pathlib.Path, folder: pathlib.Path) -> bool:
  """Compares the tokens of prompts and chats, and of greedy decoding."""
  import torch
  import transformers

  recorded = base_config.recorded_config(run).experiment_kwargs.config
  steps = min(32, recorded.model.max_length // 4)
  keys = {'method': 'greedy', 'max_decode_steps': steps, 'scores': False}
  keys = {f'decode.{key}': x for key, x in keys.items()}
  keys |= {'model.dtype': 'float32'}
  keys = {f'experiment_kwargs.config.{key}': x for key, x in keys.items()}
  experiment = jaxline.load(run, keys, mode='decode')
  try:
    options, prompts = experiment.decode_options, experiment.prompts
  except errors.UsageError as e:
    print(f'prompts: not compared ({e})')
    return False
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  )
  # The folder's config may enable sampling and penalties.
  theirs.generation_config = transformers.GenerationConfig(
    eos_token_id=theirs.generation_config.eos_token_id,
    max_new_tokens=steps,
    pad_token_id=0,
  )
  chats = [[{'role': 'user', 'content': x}] for x in _PROMPTS]
  to_ids = functools.partial(
    tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=True
  )
  differ = False
  for kind, encode, texts in (
    ('prompts', tokenizer, _PROMPTS),
    ('chats', to_ids, chats if prompts.has_template else []),
  ):
    counts = np.zeros(4, int)
    for text in texts:
      ids, expected = prompts.encode(text), encode(text)['input_ids']
      stream = experiment.stream(ids, jax.random.key(0), options)
      ours = [x for new in stream for x in new]
      batch = torch.tensor([expected])
      output = theirs.generate(batch, attention_mask=torch.ones_like(batch))
      found = output[0, len(expected) :].tolist()
      found = found[: len(found) - (found[-1] in options.stop_ids)]
      longest = max(len(ours), len(found))
      pairs = itertools.zip_longest(ours, found)
      same = next((i for i, (x, y) in enumerate(pairs) if x != y), longest)
      counts += [1, ids.tolist() == expected, longest, same]
    total, equal, generated, same = counts.tolist()
    print(
      f'{kind}: {equal} of {total} have the same tokens; {same} of {generated}'
      ' generated tokens are equal'
    )
    differ |= (total, generated) != (equal, same)
  return differ


def parity(run: pathlib.Path, folder: pathlib.Path) -> int:
  """Compares a run with transformers; returns 1 if logits or tokens differ."""
  try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
  except ImportError as e:
    raise errors.UsageError(
      f"parity needs torch and transformers ({e}): pip install -e '.[parity]'."
    ) from e
  is_near = logits_error(run, folder) <= _MAX_ERROR
  if not is_near:
    print(f'The logits differ; expected an error of at most {_MAX_ERROR:g}.')
  return int(tokens_differ(run, folder) or not is_near)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; returns the exit status, which is 2 for wrong use."""
  parser = argparse.ArgumentParser(prog='python -m examples.lm.hf')
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
      command.add_argument('--weights', choices=('raw', 'averaged'))
      dtypes = 'float32', 'bfloat16'
      command.add_argument('--dtype', choices=dtypes, default=dtypes[0])
  args = vars(parser.parse_args(argv))
  try:
    return args.pop('call')(**args) or 0
  except (ValueError, OSError, ImportError) as e:
    print(f'examples.lm.hf: {e}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main())
