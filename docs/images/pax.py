"""Draws pax.svg: what an experiment in Pax's style is made of.

  python docs/images/pax.py

The names are read from the classes, so a class that is gone fails here.
"""

import pathlib

from examples.pax import base_experiment
from examples.pax import experiment
from examples.pax import learners
from examples.pax import models
from examples.pax import optimizers
from examples.pax import schedules
from examples.pax import tasks
from examples.pax.layers import transformers
from jaxline import train
from jaxline.inputs import text as text_input

INK, FAINT, LINE = '#1f2328', '#59636e', '#8c959f'
BLUE, GREEN, ORANGE, WHITE = '#d8ecfa', '#d9f3e8', '#fbe8c8', '#ffffff'
ROOT = pathlib.Path(__file__).resolve().parents[2]
WIDTH, HEIGHT = 900, 440

# (left, top, width, height, color, class, what it decides); a box within
# another one is a part of it.
BOXES = (
  (20, 50, 620, 370, BLUE, base_experiment.BaseExperiment,
   'constants; datasets() and task() are made of them'),
  (40, 110, 200, 70, WHITE, text_input.TextInput, 'datasets(): the batches'),
  (260, 110, 360, 290, GREEN, tasks.SingleTask, 'task(): what is trained, how'),
  (280, 172, 160, 208, WHITE, models.LanguageModel, 'loss, decoding'),
  (292, 234, 136, 130, ORANGE, transformers.TransformerLm, 'layers'),
  (304, 292, 112, 56, WHITE, transformers.Transformer, 'weights'),
  (460, 172, 140, 208, WHITE, learners.Learner, 'clips, averages'),
  (472, 234, 116, 56, ORANGE, optimizers.Adam, 'the update'),
  (472, 308, 116, 56, ORANGE, schedules.LinearRampupExponentialDecay,
   'learning rate'),
  (660, 110, 220, 70, WHITE, experiment.Experiment,
   'makes a step of the task'),
  (660, 230, 220, 110, WHITE, train.Run, 'runs the steps; saves,'),
)  # fmt: skip
SHORT = {schedules.LinearRampupExponentialDecay: 'a schedule'}


def text(x, y, words, size=14, color=INK, weight=400):
  """Returns words."""
  return (
    f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"'
    f' font-weight="{weight}">{words}</text>'
  )


def file_of(cls):
  """Returns the file that a class is written in, from the root."""
  return cls.__module__.replace('.', '/') + '.py'


def draw():
  """Returns the picture."""
  drawn = [text(20, 32, 'An experiment, and what runs it', 17, weight=700)]
  for x, y, width, height, color, cls, what in BOXES:
    assert (ROOT / file_of(cls)).is_file()
    drawn += [
      f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"'
      f' fill="{color}" stroke="{LINE}"/>',
      text(x + 12, y + 24, SHORT.get(cls, cls.__name__), weight=600),
      text(x + 12, y + 44, what, 12, FAINT),
    ]
  drawn += [
    text(672, 290, 'evaluates, logs and', 12, FAINT),
    text(672, 306, 'resumes it', 12, FAINT),
    text(660, 98, file_of(experiment.Experiment), 12, FAINT),
    text(660, 218, file_of(train.Run), 12, FAINT),
    f'<path d="M620 145 H658" stroke="{INK}" fill="none"'
    ' marker-end="url(#head)"/>',
    f'<path d="M770 180 V202" stroke="{INK}" fill="none"'
    ' marker-end="url(#head)"/>',
  ]
  head = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4"'
    ' markerWidth="8" markerHeight="8" orient="auto">'
    f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
  )
  return '\n'.join(
    [
      f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
      f' width="{WIDTH}" height="{HEIGHT}" role="img" font-family="system-ui,'
      " -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">",
      '<title>What an experiment in the style of Pax is made of</title>',
      head,
      f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"'
      ' fill="#ffffff" stroke="#d1d9e0"/>',
      *drawn,
      '</svg>',
      '',
    ]
  )


if __name__ == '__main__':
  target = pathlib.Path(__file__).with_suffix('.svg')
  target.write_text(draw(), encoding='utf-8')
