"""Saves and restores a run's state; `run_directory` has the config keys.

`protocol` defines the interface between loops and checkpointers. `durable` is
the checkpointer; `saving` and `restoring` are its halves. `manifests` handles
the files that make checkpoints visible, and `arrays` their data. `contents` and
`structure` convert a state to these and back. `inspection` is the command
`python -m jaxline.checkpoint`. Read `durable` first.
"""
