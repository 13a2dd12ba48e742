"""Reads with a worker process until a signal comes.

Prints the id of its worker. With 'finish', three signals make it read ten
more batches and end, as a run that saves does.
"""

import multiprocessing
import signal
import sys

from tests import sources


def main():
  """Reads until it is told to finish, or killed."""
  stop = []
  if sys.argv[1] == 'finish':
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
      signal.signal(number, lambda *_: stop.append(1))
  source = sources.Records(batch_size=4, num_workers=1)
  print('starting', flush=True)
  next(source)
  workers = multiprocessing.active_children()
  print('workers', *(worker.pid for worker in workers), flush=True)
  while len(stop) < 3:
    next(source)
  for _ in range(10):
    next(source)
  assert multiprocessing.active_children() == workers
  print('finished', flush=True)
  source.close()


if __name__ == '__main__':
  main()
