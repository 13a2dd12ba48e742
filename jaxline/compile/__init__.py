"""Compiles a run's programs ahead of time, and reports what they need.

`ahead` is the mode `compile`: it makes the report of `report` from the program
that `hlo` parses, its memory (`memory`) and its work and communication
(`measure`, `groups`). Read `ahead` first.
"""
