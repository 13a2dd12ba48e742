"""What the package is called and what it needs."""

import pathlib
import re

import setuptools

_HERE = pathlib.Path(__file__).parent


def _version() -> str:
  text = (_HERE / 'jaxline' / '__init__.py').read_text(encoding='utf-8')
  return re.search(r"__version__ = '(.+)'", text).group(1)


# What the library and the language model need. No TensorFlow, no torch.
_BASE = [
  'absl-py>=2.1',
  'array_record>=0.8.1; sys_platform != "win32"',  # As Grain.
  'chex>=0.1.90',
  'crc32c>=2.7',  # Checksums of checkpoints and event files.
  'dm-haiku>=0.0.16',
  'etils[epath]>=1.9',  # As Grain.
  'grain>=0.2.18',
  # Python 3.11 gets 0.10, the last release for it.
  'jax>=0.10,<0.13',
  'jaxlib>=0.10,<0.13',
  'ml_collections>=1.0',
  'numpy>=2.0',
  'optax>=0.2.5',
  'sentencepiece>=0.2',
  'tensorstore>=0.1.80',  # Talks to buckets.
]
_DOCS = ['rich>=13']  # Draws the terminal in docs/images.
_IMAGE = ['scikit-learn>=1.4']
_EXPORT = ['safetensors>=0.4']
# The digits of ResNet50Pjit --reduced; records of tf.Examples.
_PAX = ['fiddle>=0.3', *_IMAGE, 'protobuf>=4.25']
_TEXT = ['tokenizers>=0.21']
_TEST = [
  *_IMAGE,
  *_EXPORT,
  *_PAX,
  *_TEXT,
  'equinox>=0.13',
  'flask>=3',  # Of moto's server, and the next; its own extra has 30 more.
  'flask-cors>=5',
  'flax>=0.12',
  'hypothesis>=6.100',
  'ipykernel>=6.29',
  'matplotlib>=3.9',  # In the notebooks of docs/.
  'moto[s3]>=5',  # A bucket of S3.
  'mypy>=1.15',
  'nbclient>=0.10',  # Runs the notebooks of docs/.
  'orbax-checkpoint>=0.11.20',  # benchmarks/checkpoint.py compares with it.
  'pandas>=2.2',
  'pytest>=8',
  'pytest-timeout>=2.3',
  'pytest-xdist>=3.6',  # Splits the tests among the cores.
  'ruff>=0.17,<0.18',  # Another release formats otherwise.
  'scipy>=1.13',
  'tensorboard>=2.18',  # Reads event files back.
]

setuptools.setup(
  name='jaxline',
  version=_version(),
  description='A forkable single-experiment training template for JAX.',
  long_description=(_HERE / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  packages=setuptools.find_packages(include=['jaxline', 'jaxline.*']),
  package_data={'jaxline.inputs': ['stdlib.model']},
  python_requires='>=3.11',
  classifiers=[
    f'Programming Language :: Python :: 3.{minor}' for minor in (11, 12, 13)
  ],
  install_requires=_BASE,
  extras_require={
    'aim': ['aim>=3.29'],
    'docs': _DOCS,
    'export': _EXPORT,
    'fp8': ['flax>=0.12'],
    'gpu': ['jax[cuda12]>=0.10,<0.13'],
    'image': _IMAGE,
    # MLflow without its server; a database in a file needs the others.
    'mlflow': ['mlflow-skinny>=3', 'alembic>=1.13', 'sqlalchemy>=2'],
    # Compares logits: `python -m examples.lm.hf parity`.
    'parity': [*_EXPORT, 'torch>=2.4', 'transformers>=4.57'],
    'pax': _PAX,
    'seqio': ['seqio>=0.0.20'],
    'test': _TEST,
    'text': _TEXT,
    'tf': ['tensorflow>=2.20'],
    'tpu': ['jax[tpu]>=0.10,<0.13'],
    # Compiles for TPUs on a machine without any.
    'tpu-aot': ['libtpu>=0.0.40'],
    'wandb': ['wandb>=0.20'],
  },
)
