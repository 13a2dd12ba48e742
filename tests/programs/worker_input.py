"""Reads with a worker process until a signal comes.

Prints the id of its worker. With 'finish', three signals make it read ten
more batches and end, as a run that saves does.
"""

import multiprocessing
import os
import signal
import sys

import numpy as np

from jaxline.inputs import base
from jaxline.inputs import indexed


class Slow(indexed.IndexedInput):
  """Gives record numbers, and who read them."""

  def num_records(self):
    return 1000

  def read(self, records, epochs):
    del epochs
    pid = np.full(len(records), os.getpid())
    return base.Batch(x=records, pid=pid)


def main():
  """Reads until it is told to finish, or killed."""
  stop = []
  if sys.argv[1] == 'finish':
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, lambda *_: stop.append(1))
  source = Slow(batch_size=4, num_workers=1)
  print('starting', flush=True)
  next(source)
  workers = [process.pid for process in multiprocessing.active_children()]
  print('workers', *workers, flush=True)
  while len(stop) < 3:
    next(source)
  for _ in range(10):
    batch = next(source)
    assert batch.pid[0] in workers
  print('finished', flush=True)
  source.close()


if __name__ == '__main__':
  main()
