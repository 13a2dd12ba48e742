"""Constructs experiments, and adapts what was written for JAXline.

`adapters` gives the parts of a run all methods when a `train.Run` is made,
`experiments` an experiment all attributes, `checkpoints` keeps JAXline's
`dictionary` of checkpoints, `threads` is JAXline's mode with two threads. Read
`adapters` first.
"""
