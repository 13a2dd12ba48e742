"""Constructs experiments, and adapts programs written for JAXline.

When a `train.Run` is made, `adapters` gives its parts all methods, and
`experiments` gives the experiment all attributes. `checkpointers` keeps
JAXline's `dictionary` of checkpoints, and `threads` has JAXline's mode with two
threads. Read `adapters` first.
"""
