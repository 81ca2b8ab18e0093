"""Pages that are kept for another engine until it has read them, or until its time is over. No
torch.

The engine's thread makes leases and lets their pages go; threads of the page server read. A page
is read under its lease's lock, and let go only once the lease is closed under that lock: whatever
order threads wake up in, also after the process was stopped and continued, nobody reads a page that
has become another's.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rorqual.cache.prefix import PrefixCache
from rorqual.disagg.page_link import LEASE


@dataclass
class Lease:
    """pages by key, held in `prefix`."""

    prefix: PrefixCache
    pages: dict[bytes, int]
    deadline: float
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Leases:
    def __init__(self, seconds: float, most_pages: int):
        """most_pages: that may be held at once."""
        self.seconds = seconds
        self.most_pages = most_pages
        self.open: dict[bytes, Lease] = {}
        self.held = 0
        self.expired = 0
        self.table = threading.Lock()

    # ---- the engine's thread

    def make(self, prefix: PrefixCache, pages: dict[bytes, int]) -> bytes | None:
        """Keep pages that the caller has held; their name, or None where too many are kept as it
        is: the caller then lets them go."""
        if self.held + len(pages) > self.most_pages:
            return None
        name = secrets.token_bytes(LEASE)
        lease = Lease(prefix, pages, time.monotonic() + self.seconds)
        with self.table:
            self.open[name] = lease
        self.held += len(pages)
        return name

    def settle(self, prefix: PrefixCache) -> None:
        """Let go of what was read, or not in time. prefix: the one in force; pages of one before
        it, which an error made void, are nobody's to give back."""
        now = time.monotonic()
        for name, lease in list(self.open.items()):
            stale = lease.prefix is not prefix
            if not (lease.closed or stale or now > lease.deadline):
                continue
            with lease.lock:
                self.expired += not (lease.closed or stale)
                lease.closed = True
            with self.table:
                del self.open[name]
            self.held -= len(lease.pages)
            if not stale:
                lease.prefix.release(list(lease.pages.values()))

    # ---- threads of the server

    def read(self, name: bytes, key: bytes, copy: Callable[[int], None]) -> bool:
        """`copy(page)` of the page with this key; False where it is kept no more. Reading extends
        the lease."""
        with self.table:
            lease = self.open.get(name)
        if lease is None:
            return False
        with lease.lock:
            now = time.monotonic()
            page = lease.pages.get(key)
            if lease.closed or now > lease.deadline or page is None:
                return False
            lease.deadline = now + self.seconds
            copy(page)
            return True

    def close(self, name: bytes) -> None:
        """The reader is through; the engine's thread lets go of the pages."""
        with self.table:
            lease = self.open.get(name)
        if lease is not None:
            with lease.lock:
                lease.closed = True
