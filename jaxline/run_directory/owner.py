"""Claims on a run's directory: they decide which process may write to it.

On a disk, a claim is a lock of the operating system, which ends with the
process. In a bucket, it is an object that the process rewrites every
`BEAT_SECS`. Clocks of two machines are never compared: an object is stale if
this process has seen it unchanged for `STALE_SECS`.
"""

import contextlib
import errno
import json
import os
import pathlib
import secrets
import threading
import time
from typing import Any

from absl import logging

from jaxline import errors
from jaxline.base import disk
from jaxline.base import keys
from jaxline.base import watchdog
from jaxline.run_directory import store as store_lib

BEAT_SECS = 20.0
STALE_SECS = 120.0
_LOOK_SECS = 2.0

# `lockf` raises one of these on a file system without locks.
_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP


class ClaimedError(errors.UsageError):
  """Another process writes to the same directory."""


class LostClaimError(errors.RunError, RuntimeError):
  """A run has lost its right to write after its start."""


def is_old(seen: dict[str, tuple[Any, float]], name: str, value: Any) -> bool:
  """Notes in `seen` when a value changed; returns whether it is stale."""
  now = time.monotonic()
  if name not in seen or seen[name][0] != value:
    seen[name] = value, now
  return now - seen[name][1] >= STALE_SECS


class Heartbeat:
  """An object that is rewritten every BEAT_SECS while this process lives."""

  def __init__(self, store: store_lib.Store, key: str, version: Any = None):
    """Writes nothing yet. If `version` is None, `write` always overwrites."""
    self._store, self._key, self._version = store, key, version
    self._is_sole, self._is_lost = version is not None, False
    self._count = 0
    self._value: dict[str, Any] = {}
    self._lock, self._stopped = threading.RLock(), threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)

  def write(self, **value: Any) -> bool:
    """Writes a value, or the last one; returns whether the object is ours."""
    with self._lock:
      self._value = value or self._value
      if not self._is_lost:
        raw = json.dumps({**self._value, 'beat': self._count}).encode()
        expected = self._version if self._is_sole else None
        self._version = self._store.write(self._key, raw, expected)
        # Count last: if the answer is lost, the retry writes the same bytes.
        self._count += 1
        self._is_lost = self._version is None
    if self._thread.ident is None:
      self._thread.start()
    return not self._is_lost

  def is_ours(self) -> bool:
    """Returns whether the object has this process's value, without writing."""
    found = json.loads(self._store.read(self._key) or b'{}')
    self._is_lost |= not self._value.items() <= found.items()
    return not self._is_lost

  def _run(self) -> None:
    while not self._stopped.wait(BEAT_SECS):
      with self._lock:
        if not self._stopped.is_set():
          try:
            self.write()
          except OSError as e:  # The next beat may succeed.
            logging.warning('%s/%s: %s', self._store, self._key, e)

  def stop(self) -> None:
    """Deletes the object, unless a different process owns it."""
    self._stopped.set()
    with self._lock, contextlib.suppress(OSError):
      if self.is_ours():  # A process that stalled may not know of its loss.
        self._store.delete(self._key)


# The claims of this process. (A process can lock the same file twice.) A forked
# child inherits the dict, but not the locks.
_claimed: dict[str, 'Claim'] = {}
_claiming = threading.Lock()


class Claim(contextlib.AbstractContextManager['Claim']):
  """The exclusive right of a process to write a part of a run's directory."""

  def __init__(self, directory: str | os.PathLike[str], what: str):
    """Claims the right to write the log 'train' or 'eval', or a series.

    Raises:
      ClaimedError: a different run has it.
    """
    store = store_lib.at(directory).below('checkpoints')
    self._name = f'{store}/claims/{what}'
    self._process = os.getpid()
    self._fd: int | None = None
    self._beat: Heartbeat | None = None
    with _claiming:
      # Look before opening the file: closing it releases this process's lock.
      mine = [x for x in _claimed.values() if x._process == os.getpid()]
      self._nonce: str = mine[0]._nonce if mine else secrets.token_hex(8)
      if all(x._name != self._name for x in mine):
        if isinstance(store, store_lib.Bucket):
          self._beat = _take_object(store, f'claims/{what}', self._nonce)
        else:
          claims = store_lib.Disk(store.url).folder('claims')
          self._fd = _lock_file(claims / f'{what}.lock')
      if self._beat is None and self._fd is None:
        key = 'a different config.checkpoint_dir'
        if what == 'best':  # Only one evaluation may save it.
          key = "config.best_model_eval_metric = ''"
        raise ClaimedError(
          f'{os.fspath(directory)} is in use: another run writes {what!r}.'
          f' Wait until it ends, stop it, or give this run {key}.'
        )
      _claimed[self._name] = self

  def __exit__(self, *unused: Any) -> None:
    self.release()

  def check(self, *, renews: bool = True) -> None:
    """Raises LostClaimError if the right is lost.

    Args:
      renews: whether to rewrite the object in a bucket. GCS limits writes to
        one object to about one per second.
    """
    is_held = True
    if self._beat is not None:
      is_held = self._beat.write() if renews else self._beat.is_ours()
    elif self._fd is not None:
      is_held = False
      with contextlib.suppress(*store_lib.MISSING):
        found = os.lstat(f'{self._name}.lock')
        is_held = os.path.samestat(found, os.fstat(self._fd))
    if not is_held:
      raise LostClaimError(
        f'{self._name}: another run has taken over, or the directory was'
        ' removed while this run wrote to it. Nothing was saved.'
      )

  def release(self) -> None:
    """Releases the right."""
    # Close before another thread can claim: closing any descriptor of the file
    # releases all locks of this process on it.
    with _claiming:
      if self._fd is not None:
        os.close(self._fd)
        self._fd = None
      if self._beat is not None:
        self._beat.stop()
        self._beat = None
      _claimed.pop(self._name, None)


def check(run: store_lib.Store) -> None:
  """Checks this process's claims on a run (see `Claim.check`)."""
  for name, claim in [*_claimed.items()]:
    if name.startswith(f'{run}/checkpoints/'):
      claim.check()


def _lock_file(path: pathlib.Path) -> int | None:
  """Locks a file and returns its descriptor; None if it is locked."""
  disk.make_directory(path.parent)
  fd = disk.open_regular(str(path), os.O_RDWR | os.O_CREAT)
  try:
    import fcntl  # Windows does not have it.

    # Not flock: a forked worker process would keep such a lock.
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except (OSError, ImportError) as e:
    number = getattr(e, 'errno', errno.ENOLCK)
    if number not in _NO_LOCKS:
      os.close(fd)
      if number in (errno.EAGAIN, errno.EACCES):  # The lock is taken.
        return None
      raise
    logging.warning(
      '%s: the file system has no locks (%s), so nothing prevents a second run'
      ' from writing in this directory. Do not start one.',
      path, e,
    )  # fmt: skip
  return fd


# All objects of a process share a nonce, until it has released all of them.
_OBJECT = keys.record(nonce=keys.text('a nonce'))
_dead: set[str] = set()  # Nonces of ended processes: wait only once for each.


def _take_object(
  store: store_lib.Bucket, key: str, own: str
) -> Heartbeat | None:
  """Takes over an object; returns None if a live process owns it."""
  seen: dict[str, tuple[Any, float]] = {}
  before, nonce = None, ''
  while True:
    raw, version = store.versioned(key)
    if raw is None:
      _dead.add(nonce)
      break
    nonce = store_lib.checked(f'{store}/{key}', raw, _OBJECT)['nonce']
    if nonce in _dead or is_old(seen, key, raw):
      _dead.add(nonce)
      break
    if before is None:
      logging.warning(
        '%s/%s: a run writes to this directory, or was killed less than %.0f s'
        ' ago. Waiting for its heartbeat. (If it has ended, delete this'
        ' object.)',
        store, key, STALE_SECS,
      )  # fmt: skip
    if raw != (before := before or raw):
      return None
    watchdog.report_progress()  # Waiting may take longer than its limit.
    time.sleep(_LOOK_SECS)
  beat = Heartbeat(store, key, version)
  if not beat.write(nonce=own):
    return None
  # Without permission to list, GCS returns an empty list, and no error.
  if not store.names('claims'):
    beat.stop()
    raise PermissionError(errno.EACCES, 'It cannot be listed', str(store))
  return beat
