"""Leases: pages held for another engine until it has read them or the lease expires. No torch.

Rank 0's `Leases` hold pages in a prefix cache and decide when a lease ends; the `LeaseTable` of
each rank that holds a part of the pages controls what may be read there. A page is read under its
lease's lock. Rank 0 releases pages only after it has sent every rank, in the order of the steps, a
message to close the lease, which takes the same lock: so in any order of threads and processes,
also after SIGSTOP and SIGCONT, a reused page is never read.
"""

from __future__ import annotations

import hmac
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from rorqual.cache.prefix import PrefixCache
from rorqual.cache.written_layers import Mark, WrittenLayers
from rorqual.disagg.page_link import LEASE

CopyLayers = Callable[..., None]
NUMBER = struct.Struct("!Q")
OPENING_SECONDS = 5.0  # for a rank that has not yet received a lease; less than a reader's timeout
COMING_SECONDS = 2.0  # for a page not yet written, until its reader is sent COMING


@dataclass
class Lease:
    """pages by key, held in `prefix`, the cache of this data-parallel rank. most: pages that it may
    hold in the end; complete: no more will be added, and it may expire; waits: not yet, since the
    answer that names it waits for other prompts."""

    prefix: PrefixCache
    dp_rank: int
    pages: dict[bytes, int]
    deadline: float
    most: int
    complete: bool = True
    waits: bool = False


class Leases:
    """Rank 0's leases. On the engine's thread."""

    def __init__(self, secret: bytes, seconds: float, most_pages: int):
        """secret: this engine's own, from which lease names are made. most_pages: most pages of one
        prefix cache held at once."""
        self.secret = secret
        self.seconds = seconds
        self.most_pages = most_pages
        self.open: dict[bytes, Lease] = {}
        self.done: set[bytes] = set()
        # by data-parallel rank, how many leases hold a page: prompts with a common beginning share
        # its pages
        self.holders: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.expired = 0
        self.newest = 0

    @property
    def held(self) -> int:
        """Pages, each counted once."""
        return sum(map(len, self.holders.values()))

    def promised(self, dp_rank: int) -> int:
        """Pages of a data-parallel rank's cache that leases hold or may still add."""
        leases = (lease for lease in self.open.values() if lease.dp_rank == dp_rank)
        coming = sum(lease.most - len(lease.pages) for lease in leases)
        return len(self.holders[dp_rank]) + coming

    def make(
        self,
        prefix: PrefixCache,
        dp_rank: int,
        pages: dict[bytes, int],
        more: int = 0,
        waits: bool = False,
    ) -> bytes | None:
        """Lease pages that the caller holds; returns the lease's name, or None where too many are
        leased: the caller then releases them. more: how many will be added; until then it does not
        expire. waits: nor does it before `begin`."""
        holders = self.holders[dp_rank]
        new = len(set(pages.values()) - holders.keys())
        if self.promised(dp_rank) + new + more > self.most_pages:
            return None
        most = len(pages) + more
        holders.update(pages.values())
        self.newest += 1
        name = lease_name(self.secret, self.newest)
        deadline = time.monotonic() + self.seconds
        self.open[name] = Lease(prefix, dp_rank, pages, deadline, most, not more, waits)
        return name

    def add(self, name: bytes, pages: dict[bytes, int], complete: bool) -> None:
        """Add pages that the caller holds to an open lease."""
        lease = self.open[name]
        lease.pages.update(pages)
        self.holders[lease.dp_rank].update(pages.values())
        lease.complete = complete
        if complete:
            lease.most = len(lease.pages)
        self.extend(name)

    def begin(self, name: bytes) -> None:
        """Its reader is told of it now: its time begins."""
        lease = self.open.get(name)
        if lease is not None:
            lease.waits = False
            self.extend(name)

    def give_way(self) -> None:
        """Nothing can be computed, perhaps for want of pages: leases whose seconds are over end,
        though they wait. What they wait for may need their pages."""
        now = time.monotonic()
        for lease in self.open.values():
            lease.waits = lease.waits and now <= lease.deadline

    def extend(self, name: bytes) -> None:
        """The lease is being read: renew it."""
        lease = self.open.get(name)
        if lease is not None:
            lease.deadline = time.monotonic() + self.seconds

    def finish(self, name: bytes) -> None:
        """Its reader has finished."""
        if name in self.open:
            self.done.add(name)

    def settle(self, prefixes: Iterable[PrefixCache], close: Callable[[list[bytes]], None]) -> None:
        """Release leases that were read or have expired. prefixes: the current caches; pages of
        earlier ones, replaced after an error, need no release. close: makes every rank close
        leases, in the order of the steps."""
        now = time.monotonic()
        in_force = {id(prefix) for prefix in prefixes}
        stale = {name for name, lease in self.open.items() if id(lease.prefix) not in in_force}
        late = {
            name
            for name, lease in self.open.items()
            if lease.complete and not lease.waits and now > lease.deadline
        }
        over = [name for name in self.open if name in self.done | stale | late]
        if not over:
            return
        close(over)
        self.expired += len(late - self.done - stale)
        self.done -= set(over)
        for name in over:
            lease = self.open.pop(name)
            pages = list(lease.pages.values())
            holders = self.holders[lease.dp_rank]
            holders.subtract(pages)
            for page in pages:
                if not holders[page]:
                    del holders[page]
            if name not in stale:
                lease.prefix.release(pages)


class Found(Enum):
    HERE = 1
    GONE = 2
    COMING = 3


@dataclass
class OpenLease:
    """pages: those that this rank's device has written. writing: those that a step is writing, with
    its progress. complete: no more will be added. by_layer: pages are read as layers are
    written."""

    pages: dict[bytes, int] = field(default_factory=dict)
    writing: dict[bytes, tuple[int, WrittenLayers]] = field(default_factory=dict)
    by_layer: bool = False
    complete: bool = False
    closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def layers(self, key: bytes, most: int) -> int:
        """How many of a page's first `most` layers may be read, after their mark."""
        if key in self.pages:
            return most
        _, written = self.writing.get(key, (0, None))
        return min(most, len(written.marks)) if written is not None else 0

    def has(self, key: bytes) -> bool:
        """Whether the whole page may be read."""
        _, written = self.writing.get(key, (0, None))
        return key in self.pages or (written is not None and len(written.marks) == written.layers)

    def is_missing(self, key: bytes) -> bool:
        """Whether the page will never be added."""
        return self.complete and key not in self.pages and key not in self.writing

    def place(self, key: bytes, layers: int | None = None) -> tuple[int] | tuple[int, Mark]:
        """The page, and the mark after which its first `layers` layers may be read, if they need
        one."""
        if key in self.pages:
            return (self.pages[key],)
        page, written = self.writing[key]
        count = len(written.marks)
        return page, written.marks[min(count, count if layers is None else layers) - 1]


class LeaseWatcher(Protocol):
    """Told of leases on the engine's thread, which it must not hold up."""

    def opened(self, lease: bytes) -> None:
        """It has all its pages, and they are written."""

    def closed(self, lease: bytes) -> None: ...


class LeaseTable:
    """The leases of one rank. `read` and the like are called on the page server's threads, all else
    on the engine's. watcher: told of leases that open with all their pages."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.watcher: LeaseWatcher | None = None
        self.leases: dict[bytes, OpenLease] = {}
        self.newest = 0
        self.changed = threading.Condition()

    def open(
        self, name: bytes, pages: dict[bytes, int], complete: bool = True, by_layer: bool = False
    ) -> Callable[[], None]:
        """Call the returned function once the pages are written. complete: no more will be
        added."""
        with self.changed:
            self.leases[name] = OpenLease(by_layer=by_layer)
        self.note(name)
        written = self.add(name, pages, complete)

        def whole() -> None:
            written()
            if self.watcher is not None and complete:
                self.watcher.opened(name)

        return whole

    def add(self, name: bytes, pages: dict[bytes, int], complete: bool) -> Callable[[], None]:
        """Add pages; likewise."""

        def written() -> None:
            with self.changed:
                lease = self.leases.get(name)
                if lease is not None:
                    lease.pages.update(pages)
                    lease.complete = complete
                self.changed.notify_all()

        return written

    def note(self, name: bytes) -> None:
        """Record a lease that this rank does not serve: its readers need not wait for it to
        open."""
        with self.changed:
            self.newest = max(self.newest, _number(name))
            self.changed.notify_all()

    def close(self, names: Iterable[bytes]) -> None:
        for name in names:
            with self.changed:
                lease = self.leases.pop(name, None)
                self.changed.notify_all()
            if lease is not None:
                with lease.lock:
                    lease.closed = True
                if self.watcher is not None:
                    self.watcher.closed(name)

    def write(self, name: bytes, pages: dict[bytes, int], written: WrittenLayers) -> None:
        """The next step writes these pages."""
        with self.changed:
            lease = self.leases.get(name)
            if lease is not None:
                lease.writing.update((key, (page, written)) for key, page in pages.items())
            self.changed.notify_all()

    def keys(self, name: bytes) -> list[bytes]:
        """Of an open lease's written pages, in the prompt's order."""
        with self.changed:
            lease = self.leases.get(name)
            return [] if lease is None else list(lease.pages)

    def is_by_layer(self, name: bytes) -> bool:
        lease = self._find(name)
        return lease is not None and lease.by_layer

    def read(self, name: bytes, key: bytes, copy: Callable[..., None]) -> Found:
        """Call `copy(page)` for the page with this key, or copy(page, mark) for one that a step has
        written once its mark is reached. Waits up to COMING_SECONDS for a page not yet computed or
        written."""
        lease = self._find(name)
        if lease is None:
            return Found.GONE
        with self.changed:
            self.changed.wait_for(
                lambda: lease.has(key) or lease.is_missing(key) or name not in self.leases,
                COMING_SECONDS,
            )
            if not lease.has(key):
                over = lease.is_missing(key) or name not in self.leases
                return Found.GONE if over else Found.COMING
            place = lease.place(key)
        return _copy(lease, lambda: copy(*place))

    def read_together(
        self,
        name: bytes,
        keys: Sequence[bytes],
        copy: Callable[[list[tuple[int, Mark | None]]], None],
    ) -> int:
        """Call `copy` with the leading pages of these that are written, and the mark to read each
        after. Returns how many there are; does not wait, and copies none of a closed lease."""
        lease = self._find(name)
        places = self.places(name, keys)
        if lease is None or not places:
            return 0
        return len(places) if _copy(lease, lambda: copy(places)) is Found.HERE else 0

    def places(self, name: bytes, keys: Sequence[bytes]) -> list[tuple[int, Mark | None]]:
        """The leading pages of these that are written: the page of each, and the mark to read it
        after. What was read is valid if the lease `is_open` afterwards."""
        lease = self._find(name)
        found: list[tuple[int, Mark | None]] = []
        with self.changed:
            for key in keys:
                if lease is None or not lease.has(key):
                    break
                page, *mark = lease.place(key)
                found.append((page, mark[0] if mark else None))
        return found

    def is_open(self, name: bytes) -> bool:
        """Whether the lease has not been closed."""
        with self.changed:
            lease = self.leases.get(name)
        if lease is None:
            return False
        with lease.lock:
            return not lease.closed

    def read_more(
        self, name: bytes, keys: Sequence[bytes], sent: Sequence[int], last: int, copy: CopyLayers
    ) -> tuple[Found, int]:
        """For the first page of which more than its `sent` layers are written, up to `last`: call
        `copy(number, page, layers)`, or copy(number, page, layers, mark), with the page's number
        among `keys` and how many layers are written now. Layers count from this rank's first."""
        lease = self._find(name)
        if lease is None:
            return Found.GONE, 0

        def first(wanted: Callable[[int, bytes], bool]) -> int | None:
            left = (i for i, key in enumerate(keys) if sent[i] < last and wanted(i, key))
            return next(left, None)

        def more() -> int | None:
            return first(lambda i, key: lease.layers(key, last) > sent[i])

        def gone() -> int | None:
            return first(lambda i, key: lease.is_missing(key))

        with self.changed:
            self.changed.wait_for(
                lambda: more() is not None or gone() is not None or name not in self.leases,
                COMING_SECONDS,
            )
            number = more()
            if number is None:
                lost = gone()
                over = lost is not None or name not in self.leases
                return (Found.GONE if over else Found.COMING), lost or 0
            page, *mark = lease.place(keys[number], last)
            layers = lease.layers(keys[number], last)
        return _copy(lease, lambda: copy(number, page, layers, *mark)), number

    def _find(self, name: bytes) -> OpenLease | None:
        number = _number(name)
        if not hmac.compare_digest(name, lease_name(self.secret, number)):
            return None  # rank 0 has not made this name
        with self.changed:
            self.changed.wait_for(lambda: self.newest >= number, OPENING_SECONDS)
            return self.leases.get(name)


def _copy(lease: OpenLease, copy: Callable[[], None]) -> Found:
    with lease.lock:
        if lease.closed:
            return Found.GONE
        copy()
        return Found.HERE


def lease_name(secret: bytes, number: int) -> bytes:
    """Names contain an increasing number, so that a rank can tell a lease not yet received from a
    closed one, and a MAC: only the engine's secret can make one."""
    head = NUMBER.pack(number)
    return head + hmac.digest(secret, b"lease" + head, "sha256")[: LEASE - NUMBER.size]


def _number(name: bytes) -> int:
    found: int = NUMBER.unpack_from(name)[0]
    return found
