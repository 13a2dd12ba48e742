"""Distributes a run over processes and devices, and shards arrays.

`distributed` connects the processes and lets process 0 decide for all. `mesh`
arranges the devices. `partitioning` maps the axes that a model names to the
mesh, by the rules of `config.sharding`. `placement` puts batches on the mesh.
`prng` has the keys of hosts and devices. Read `partitioning` first.
"""
