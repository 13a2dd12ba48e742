"""What needs no run: threads, files, checks of values, XLA's flags, FLOPs.

`async_lib` has the threads of all other packages,
`keys` the checks behind each config key and each JSON file, `disk` the way to
open and to replace a file, `buckets` the connection to a bucket. Read `keys`
first.
"""
