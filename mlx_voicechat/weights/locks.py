"""A lock between programs that fetch the same file, by `flock`; who waits for it says so.

A disk may have no locks (network shares), or keep that of a machine which is gone: nobody waits without a word, and
where there are no locks, a file that grows shows that another program is at work.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_SECONDS = 0.2  # between two tries
SAY_SECONDS = 1.0  # of waiting that need no word
QUIET_SECONDS = 3.0  # a file that does not grow so long, on a disk without locks, is nobody's
STALE_SECONDS = 60.0  # after which the lock of one that does not grow is worth a word
TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EIO)


@contextmanager
def only_one(lock: Path, arriving: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Wait until nobody else fetches `name` into `arriving`, and keep others from it. Raises OSError of the disk."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    waiting = _Waiting(lock, arriving, name, say)
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o664)
        try:
            if taken(descriptor, lock):
                yield
                return
        except OSError as fault:
            if fault.errno not in WITHOUT_LOCKS:
                raise
            waiting.until_quiet()
            yield
            return
        finally:
            os.close(descriptor)
        waiting.look()


def taken(descriptor: int, lock: Path) -> bool:
    """Whether the lock is ours now, and still the one of that name. Raises OSError where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(lock), os.fstat(descriptor))
    except FileNotFoundError:  # removed, as those who wait are told
        return False
    except OSError as fault:
        if fault.errno in TAKEN:
            return False
        raise


class _Waiting:
    """The time that passes, and what is said of it."""

    def __init__(self, lock: Path, arriving: Path, name: str, say: Callable[[str], None]) -> None:
        self._lock, self._arriving, self._name, self._say = lock, arriving, name, say
        self._began = self._moved = time.monotonic()
        self._size = _size(arriving)
        self._said = self._warned = False

    def look(self) -> None:
        """Wait a little; say it once that another program is at work, and once that it seems to be gone."""
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        if (size := _size(self._arriving)) != self._size:
            self._size, self._moved = size, now
        if not self._said and now > self._began + SAY_SECONDS:
            self._said = True
            self._say(f"Another program is fetching {self._name}: waiting for it.")
        if not self._warned and now > self._moved + STALE_SECONDS:
            self._warned = True
            self._say(
                f"Nothing of {self._name} has arrived for {STALE_SECONDS:g} s. If no program of any machine is at it, "
                f"remove the lock that was left: {self._lock}"
            )

    def until_quiet(self) -> None:
        """Wait while the file grows."""
        if not self._arriving.exists():
            return
        while time.monotonic() < self._moved + QUIET_SECONDS:
            self.look()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
