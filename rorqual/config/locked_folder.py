"""Temporary folders of a server's sockets and of the file where ranks find each other. One left by
a killed process is removed by the next that makes one."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("rorqual")

PREFIX = "rorqual-"
LOCK = "server.lock"
STORE = "store"  # the file where ranks find each other
YOUNG_SECONDS = 60.0  # a younger folder may belong to a process that has not taken its lock yet


class LockedFolder:
    """Has mode 0700: other users cannot reach what is in it. This process holds the lock in it
    until it ends, however it ends. name: follows PREFIX."""

    def __init__(self, name: str = "") -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX + name))
        self.lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """May be called twice."""
        if self.lock >= 0:
            _remove(self.path)
            os.close(self.lock)
            self.lock = -1


def sweep(parent: Path) -> None:
    """Remove folders of this user whose process has ended: their lock is free."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process may be sweeping too
            if _stale(folder):
                _remove(folder)
                log.info("removed %s, which a killed process left", folder)


def _stale(folder: Path) -> bool:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if time.time() - os.fstat(lock).st_mtime < YOUNG_SECONDS:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove what processes put there; a folder with any other file stays."""
    for path in folder.iterdir():
        if path.name in (LOCK, STORE) or path.is_socket():
            path.unlink()
    folder.rmdir()
