"""Compiles a run's programs ahead of time and reports their costs.

`ahead` implements the mode `compile` and decides whether a program fits. `hlo`
parses the program, `memory` reads its buffers, `measure` and `groups` count its
work and communication, and `report` prints the result. Read `ahead` first.
"""
