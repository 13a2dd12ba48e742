"""Saves and restores a run's state; `run_directory` has the config keys.

`protocol` has what the loops ask of a checkpointer, `durable` the checkpointer,
`saving` and `restoring` its halves. `manifests` has the manifests, by which a
checkpoint exists, `arrays` their data, `contents` and `structure` the way from
a state to these and back. `inspection` is `python -m jaxline.checkpoint`. Read
`durable` first.
"""
