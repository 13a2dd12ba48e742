"""Draws inputs.svg: which host reads which record. Run it to draw it anew.

  python docs/images/inputs.py

The numbers in it are what an input really gives, read as each of the hosts.
"""

import dataclasses
import pathlib

import numpy as np

from jaxline.inputs import base
from jaxline.inputs import indexed

RECORDS = 10
GLOBAL_BATCH = 4
BATCHES = 3
CHECKPOINT = 2  # Behind so many batches.

# Of hosts: colours that people who see few of them can tell apart.
COLORS = ('#9fd0f0', '#f7cf87', '#93dcc0', '#eab5d2')
INK, FAINT, LINE = '#1f2328', '#59636e', '#8c959f'
CELL, HEIGHT, GAP, LEFT = 48, 30, 22, 150
WIDTH = LEFT + GLOBAL_BATCH * BATCHES * CELL + (BATCHES - 1) * GAP + 24


@dataclasses.dataclass(kw_only=True, eq=False)
class Numbers(indexed.IndexedInput):
  """Records that are their own numbers."""

  def num_records(self):
    """Returns how many there are."""
    return RECORDS

  def read(self, records, epochs):
    """Returns numbers and epochs."""
    return {'record': records, 'epoch': epochs}


def read(num_hosts, **fields):
  """Returns what hosts read: records, epochs, weights [hosts, batches, rows].

  Of training, it also makes sure that all stand where the picture says.
  """
  hosts = []
  for host in range(num_hosts):
    shard = base.Shard(host, num_hosts)
    rows = base.per_host(GLOBAL_BATCH, shard)
    source = Numbers(batch_size=rows, shard=shard, **fields)
    batches = []
    for number, batch in zip(range(BATCHES), source, strict=False):
      batches.append([batch[key] for key in ('record', 'epoch', 'weights')])
      if number + 1 == CHECKPOINT:
        assert source.position() == CHECKPOINT * GLOBAL_BATCH
    if source.reset_for_eval:
      assert next(source, None) is None
    hosts.append(batches)
  return np.array(hosts).transpose(2, 0, 1, 3)


def left(place):
  """Returns the left edge of a place in the global order."""
  return LEFT + place * CELL + place // GLOBAL_BATCH * GAP


def text(x, y, words, size=14, color=INK, anchor='middle', weight=400):
  """Returns words."""
  return (
    f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"'
    f' text-anchor="{anchor}" font-weight="{weight}">{words}</text>'
  )


def cell(place, y, record, epoch, weight, color):
  """Returns a row of a batch."""
  x = left(place)
  if not weight:
    color, record = 'url(#filler)', '&#8211;'
  return (
    f'<rect x="{x + 1.5}" y="{y}" width="{CELL - 3}" height="{HEIGHT}" rx="4"'
    f' fill="{color}" stroke="{LINE}"'
    + (' stroke-width="2.5"/>' if epoch else '/>')
    + text(
      x + CELL / 2,
      y + 20,
      record,
      color=INK if weight else FAINT,
      weight=700 if epoch else 400,
    )
  )


def lanes(y, title, rows):
  """Returns a lane for each host, and where they end.

  Args:
    y: where to begin.
    title: what the hosts are.
    rows: as `read` returns them.
  """
  num_hosts, per_host = rows.shape[1], rows.shape[3]
  drawn = [text(16, y + 14, title, anchor='start', weight=600)]
  y += 24
  for host in range(num_hosts):
    drawn.append(text(LEFT - 12, y + 20, f'host {host}', anchor='end'))
    for batch in range(BATCHES):
      for row in range(per_host):
        values = (int(x) for x in rows[:, host, batch, row])
        place = batch * GLOBAL_BATCH + host * per_host + row
        drawn.append(cell(place, y, *values, COLORS[host]))
    y += HEIGHT + 5
  return drawn, y + 15


def order(y, rows):
  """Returns the global order, and where it ends."""
  drawn = [text(LEFT - 12, y + 20, 'the global order', 13, anchor='end')]
  values = rows.transpose(0, 2, 1, 3).reshape(3, -1)
  for place in range(GLOBAL_BATCH * BATCHES):
    drawn.append(cell(place, y, *(int(x) for x in values[:, place]), '#eef1f4'))
  return drawn, y + HEIGHT + 16


def draw():
  """Returns the picture."""
  one, two, four = (read(hosts, is_training=True) for hosts in (1, 2, 4))
  drawn = [
    text(16, 30, 'Training', 17, anchor='start', weight=700),
    text(
      104,
      30,
      f'{RECORDS} records, global batches of {GLOBAL_BATCH}; in bold, the next'
      ' epoch, in another order',
      color=FAINT,
      anchor='start',
    ),
  ]
  for batch in range(BATCHES):
    middle = left(batch * GLOBAL_BATCH) + GLOBAL_BATCH * CELL / 2
    drawn.append(text(middle, 60, f'global batch {batch}', 13, FAINT))
  y = 70
  more, y = order(y, one)
  drawn += more
  more, y = lanes(y, '2 hosts, batch_size 2', two)
  drawn += more
  more, y = lanes(y, '4 hosts, batch_size 1', four)
  drawn += more
  x = left(CHECKPOINT * GLOBAL_BATCH) - GAP / 2
  drawn += [
    f'<line x1="{x}" y1="66" x2="{x}" y2="{y - 8}" stroke="#cf222e"'
    ' stroke-width="2" stroke-dasharray="6 4"/>',
    text(
      x,
      y + 8,
      f'checkpoint: position {CHECKPOINT * GLOBAL_BATCH} on every host, for any'
      ' number of hosts',
      13,
      '#a40e26',
      anchor='end' if x > WIDTH / 2 else 'start',
    ),
  ]
  y += 30
  drawn.append(
    f'<line x1="16" y1="{y}" x2="{WIDTH - 16}" y2="{y}" stroke="#d1d9e0"/>'
  )
  y += 30
  drawn += [
    text(16, y, 'One epoch of evaluation', 17, anchor='start', weight=700),
    text(
      270,
      y,
      'rows of weight 0 fill up the end',
      color=FAINT,
      anchor='start',
    ),
  ]
  y += 18
  one, two = (read(hosts, reset_for_eval=True) for hosts in (1, 2))
  assert one[2].sum() == two[2].sum() == RECORDS
  more, y = order(y, one)
  drawn += more
  more, y = lanes(y, '2 hosts, batch_size 2', two)
  drawn += more
  drawn.append(
    text(
      LEFT,
      y + 2,
      f'{BATCHES} batches on each host; all weights add up to {RECORDS}',
      13,
      FAINT,
      anchor='start',
    )
  )
  height = y + 22
  # Its own ground, since GitHub shows it on a light page and on a dark one.
  return '\n'.join(
    [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
      f' width="{WIDTH}" height="{height}" role="img"'
      " font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial,"
      ' sans-serif">',
      '<title>Which host reads which record</title>',
      '<defs><pattern id="filler" width="7" height="7"'
      ' patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect'
      ' width="7" height="7" fill="#ffffff"/><rect width="2" height="7"'
      ' fill="#d1d9e0"/></pattern></defs>',
      f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"'
      ' fill="#ffffff" stroke="#d1d9e0"/>',
      *drawn,
      '</svg>\n',
    ]
  )


if __name__ == '__main__':
  pathlib.Path(__file__).with_suffix('.svg').write_text(draw(), 'utf-8')
