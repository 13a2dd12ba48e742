"""Tests that the layers can be copied to a project without the trainer."""

import re
import shutil
import subprocess

import pytest

from tests import processes

ROOT = processes.ROOT
PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from examples.pax.layers import transformers

p = transformers.TransformerLm.HParams(vocab_size=5, model_dims=4)
p.stacked_transformer_tpl.set(
  num_layers=1, model_dims=4, hidden_dims=8, num_heads=2
)
layer = p.Instantiate()
ids = jnp.ones([2, 3], jnp.int32)
print(layer.apply(layer.init(jax.random.key(0)), ids, do_eval=True).shape)
trainer = {'jaxline.train', 'jaxline.sharded', 'jaxline.platform', 'optax'}
print(sorted(trainer & {*sys.modules}))
"""


@pytest.mark.process
def test_the_files_on_the_page_are_enough(tmp_path):
  page = (ROOT / 'docs/reference/from_pax.md').read_text(encoding='utf-8')
  listed = re.search(r'```\n(examples/transformer.py.*?)```', page, re.S)[1]
  bash = f'cd {ROOT} && ls -d {" ".join(listed.split())}'
  names = subprocess.check_output(['bash', '-c', bash], text=True).split()
  for name in names:
    target = tmp_path / name
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
    copy(ROOT / name, target)
  (tmp_path / 'jaxline').symlink_to(ROOT / 'jaxline')
  done = processes.run('-c', PROGRAM, cwd=tmp_path, PYTHONPATH=str(tmp_path))
  assert done.stdout.splitlines() == ['(2, 3, 5)', '[]'], done.stderr
