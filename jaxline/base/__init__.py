"""Utilities that need no run: threads, files, checks, XLA flags and FLOPs.

`async_lib` has the threads that all packages use, and `keys` the checks of
config keys and JSON files. `disk` opens and replaces files, and `buckets`
connects to buckets. Read `keys` first.
"""
