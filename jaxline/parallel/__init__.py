"""Processes, devices, and which device holds which part of an array.

`distributed` connects the processes and lets process 0 decide for all, `mesh`
arranges the devices, `partitioning` maps the axes that a model names to the
mesh by the rules of `config.sharding`, `placement` puts batches there. `prng`
has the keys of hosts and devices. Read `partitioning` first.
"""
