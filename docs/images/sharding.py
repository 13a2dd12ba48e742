"""Draws sharding.svg: which device holds what. Run it to draw it anew.

  python docs/images/sharding.py

Every piece is where `jaxline.parallel.partitioning` puts it, on eight fake
devices.

Shapes: B batch, L length, D embed, F mlp.
"""

import os
import pathlib

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'


from jaxline.parallel import partitioning

# Each preset with a mesh that suits it.
PRESETS = {
  'ddp': {'data': 8},
  'fsdp': {'data': 8},
  'tp': {'data': 4, 'mdl': 2},
  'fsdp_tp': {'data': 4, 'mdl': 2},
  'sp': {'data': 4, 'mdl': 2},
}
DEVICE = 5  # Whose pieces are filled.

FILL, FAINT_FILL = '#9fd0f0', '#f6f8fa'
INK, FAINT, LINE = '#1f2328', '#59636e', '#8c959f'
LEFT, COLUMN, BOX = 176, 148, 124
WIDTH = LEFT + len(PRESETS) * COLUMN + 8
SIZE = 64  # Of every dimension: divisible by 8.


def pieces(preset, axes):
  """Returns the pieces of an array, and who holds each.

  Args:
    preset: whose rules.
    axes: logical names of the dimensions.

  Returns:
    ((start, stop) of each dimension, as fractions) -> ids of devices.
  """
  partitioner = partitioning.Partitioner.make(PRESETS[preset], preset)
  shape = (SIZE,) * len(axes)
  sharding = partitioner.shardings(partitioner.spec(axes, shape))
  holders = {}
  for device, index in sharding.devices_indices_map(shape).items():
    bounds = (part.indices(SIZE)[:2] for part in index)
    place = tuple((start / SIZE, stop / SIZE) for start, stop in bounds)
    holders.setdefault(place, []).append(device.id)
  return holders


def names(ids):
  """Returns ids of devices in few letters."""
  ids = sorted(ids)
  if len(ids) > 2 and ids == list(range(ids[0], ids[-1] + 1)):
    return f'{ids[0]}&#8211;{ids[-1]}'
  return ' '.join(map(str, ids))


def text(x, y, words, size=14, color=INK, anchor='middle', weight=400):
  """Returns words."""
  return (
    f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}"'
    f' text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
  )


def box(x, y, width, height, ids):
  """Returns one piece."""
  mine = DEVICE in ids
  return (
    f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    f' fill="{FILL if mine else FAINT_FILL}" stroke="{LINE}"/>'
    + text(
      x + width / 2,
      y + height / 2 + 4,
      names(ids),
      12,
      weight=700 if mine else 400,
    )
  )


def matrix(x, y, height, holders):
  """Returns the pieces of a matrix: its rows go down, its columns right."""
  return [
    box(
      x + left * BOX,
      y + top * height,
      (right - left) * BOX,
      (bottom - top) * height,
      ids,
    )
    for ((top, bottom), (left, right)), ids in holders.items()
  ]


def slabs(x, y, height, holders):
  """Returns the pieces of an activation: its rows are one below the other.

  Of each piece of the batch a slab: positions go right, the width down.
  """
  drawn = []
  for ((top, bottom), (left, right), (low, high)), ids in holders.items():
    slab = (bottom - top) * height - 4
    drawn.append(
      box(
        x + left * BOX,
        y + top * height + low * slab,
        (right - left) * BOX,
        (high - low) * slab,
        ids,
      )
    )
  return drawn


ROWS = (
  (
    ('a weight', 'w_DF'),
    ('embed', 'mlp'),
    ('&#8595; embed', '&#8594; mlp'),
    matrix,
    148,
  ),
  (
    ('an activation', 'between blocks', 'x_BLD'),
    ('batch', 'length', 'activation_embed'),
    ('a slab: some rows', '&#8594; length', '&#8595; embed'),
    slabs,
    196,
  ),
  (
    ('inside of a block', 'hidden_BLF'),
    ('batch', None, 'mlp'),
    ('a slab: some rows', '&#8594; length', '&#8595; mlp'),
    slabs,
    196,
  ),
)


def draw():
  """Returns the picture."""
  drawn = [
    text(16, 30, 'Who holds what', 17, anchor='start', weight=700),
    text(
      184,
      30,
      'of 8 devices, 0&#8211;7; a piece bears the numbers of those that hold'
      f' it; filled: what device {DEVICE} holds',
      color=FAINT,
      anchor='start',
    ),
  ]
  y = 64
  for i, (preset, mesh) in enumerate(PRESETS.items()):
    middle = LEFT + i * COLUMN + BOX / 2
    sizes = ' &#215; '.join(f'{axis} {size}' for axis, size in mesh.items())
    drawn += [
      text(middle, y, preset, 15, weight=700),
      text(middle, y + 18, sizes, 12, FAINT),
    ]
  y += 36
  for titles, axes, legend, shape, height in ROWS:
    for i, title in enumerate(titles):
      drawn.append(
        text(
          16,
          y + 20 + 19 * i,
          title,
          weight=400 if i == len(titles) - 1 else 600,
          anchor='start',
        )
      )
    for i, words in enumerate(legend):
      drawn.append(
        text(
          16,
          y + 26 + 19 * len(titles) + 17 * i,
          words,
          12,
          FAINT,
          anchor='start',
        )
      )
    for i, preset in enumerate(PRESETS):
      drawn += shape(LEFT + i * COLUMN, y, height, pieces(preset, axes))
    y += height + 22
  height = y - 4
  # Its own ground, since GitHub shows it on a light page and on a dark one.
  return '\n'.join(
    [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
      f' width="{WIDTH}" height="{height}" role="img"'
      " font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial,"
      ' sans-serif">',
      '<title>Which device holds what</title>',
      f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"'
      ' fill="#ffffff" stroke="#d1d9e0"/>',
      *drawn,
      '</svg>\n',
    ]
  )


if __name__ == '__main__':
  pathlib.Path(__file__).with_suffix('.svg').write_text(draw(), 'utf-8')
