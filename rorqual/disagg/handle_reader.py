"""The reader's side where our GPU copies from a peer's: pages are copied window by window to a
range of staging memory on the device, where they stay until they are placed, or to the cache
itself; where no range is large enough, through a smaller one to rows of host memory."""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import PagePart
from rorqual.cache.written_layers import Mark
from rorqual.disagg.page_link import (
    CONFIRM,
    MAX_KEYS,
    NotStaged,
    PageMessage,
    StagedReply,
    pack_read,
    receive_reply,
    unpack_staged,
)
from rorqual.disagg.staged_reader import READ_SECONDS, RowsOfPages, RunningReads, StagedReads
from rorqual.disagg.transports.handles import HandleTransport, PeerRead
from rorqual.disagg.transports.interface import ReadState
from rorqual.disagg.transports.ranges import HeldRange, StagingRanges
from rorqual.disagg.transports.start import PageStaging
from rorqual.parallel.remote.link import LinkError, send

ROOM_SECONDS = 1.0  # for a prompt to get device memory, while others are placed
WINDOW_SECONDS = 20.0  # for a window's pages to get a range on the way to host memory
SPIN_SECONDS = 0.003  # of busy polling since the last message
LOOK_MILLISECONDS = 1  # between two polls of a read meanwhile
WAIT_SECONDS = 0.001  # of blocking on a read, when there is no other work


@dataclass
class RunningRead:
    """A read of `count` pages, from number `first` on. passing: the range they pass through to host
    memory."""

    generation: int
    first: int
    count: int
    ticket: int
    passing: HeldRange | None
    deadline: float


class HandleReads(RunningReads):
    """running: prompts being read."""

    def __init__(self, transport: HandleTransport, ranges: StagingRanges):
        super().__init__()
        self.transport = transport
        self.ranges = ranges

    def rows(self, memory: PageMemory, count: int, size: int) -> RowsOfPages:
        """Rows for `count` pages; freed by `release`."""
        held = self.ranges.take(count * size, ROOM_SECONDS)
        if held is None:
            return RowsOfPages(size, memory.rows(count, size))
        self._behind(held)
        return RowsOfPages(size, held.bytes.view(count, size), held)

    def release(self, rows: RowsOfPages, mark: Mark | None) -> None:
        """mark: of what may still read them."""
        if rows.held is not None:
            self.ranges.release(rows.held, mark)

    def _behind(self, held: HeldRange) -> None:
        for mark in held.marks:
            self.transport.wait_for(mark)

    def read(
        self,
        sock: socket.socket,
        lease: bytes,
        part: PagePart,
        keys: Sequence[bytes],
        into: RowsOfPages,
        coming: Callable[[], bool],
    ) -> Iterator[int]:
        """As StagedReads.read; a window's pages count if the server has not taken it back until
        they were read, and the next window is read meanwhile."""
        self.recover()
        with self.running_read():
            for start in range(0, len(keys), MAX_KEYS):
                some = list(keys[start : start + MAX_KEYS])
                send(sock, PageMessage.STAGE, pack_read(lease, part, some))
                if into.prepare is not None and not start:
                    into.prepare()
                reading = PagesInFlight(self, sock, into, start, start + len(some))
                try:
                    yield from reading.counts(coming)
                finally:
                    reading.end()
                if reading.given_up:
                    return

    def recover(self) -> None:
        """Reclaim ranges that a read may still write to, once it is over."""
        lost = self.ranges.unusable()
        if lost and not self.running:
            self.transport.restart()
            self.ranges.recover(lost)


class PagesInFlight:
    """Requested pages number `start` to `stop` (excluded) of a prompt."""

    def __init__(
        self, reads: HandleReads, sock: socket.socket, into: RowsOfPages, start: int, stop: int
    ):
        self.reads = reads
        self.sock = sock
        self.into = into
        self.size = into.size
        self.asked = start  # reads were started up to this page
        self.stop = stop
        self.running: deque[RunningRead] = deque()
        self.arrived = 0  # pages, since the last result of `counts`
        self.given_up = False
        self.error = ""  # why no further pages are read
        self.incoming = select.poll()
        self.incoming.register(sock, select.POLLIN)
        self.busy_until = time.monotonic() + SPIN_SECONDS

    def _has_message(self) -> bool:
        """Whether a message has arrived; polls the reads meanwhile."""
        if self.incoming.poll(0):
            self.busy_until = time.monotonic() + SPIN_SECONDS
            return True
        if self.running and self._poll_oldest():
            self.busy_until = time.monotonic() + SPIN_SECONDS
            return False
        if time.monotonic() < self.busy_until:
            return False
        if not self.running:
            return True
        self.incoming.poll(LOOK_MILLISECONDS)
        return False

    def counts(self, coming: Callable[[], bool]) -> Iterator[int]:
        while self.asked < self.stop or self.running:
            if self._has_message():
                self._receive(coming)
                if self.given_up:
                    return
            if self.arrived:
                count = self.arrived
                self.arrived = 0
                yield count
        if self.error:
            raise LinkError(self.error)

    def _receive(self, coming: Callable[[], bool]) -> None:
        """All messages that are there. Reads of several windows are launched together, which takes
        less time."""
        windows: list[StagedReply] = []
        asked = self.asked
        error = ""
        while not windows or (asked < self.stop and self.incoming.poll(0)):
            kind, data = receive_reply(self.sock)
            if kind is PageMessage.COMING:
                self.given_up = not coming()
                break
            try:
                windows.append(unpack_staged(kind, data, self.stop - asked))
            except NotStaged as refused:
                error = str(refused)
                break
            asked += windows[-1].count
        if self.into.held is not None or self.into.place is not None:
            self._begin(windows)
        else:
            for window in windows:
                self._begin([window])
        if error:
            self._stop(error)

    def _stop(self, error: str) -> None:
        """Read no further pages than those announced."""
        self.stop = self.asked
        self.error = error

    def _begin(self, windows: Sequence[StagedReply]) -> None:
        """Several: not of pages that pass through a range."""
        if not windows:
            return
        passing = None
        origin = 0  # where the next page goes in the staging memory, if it goes there
        if self.into.held is not None:
            origin = self.into.held.offset + self.asked * self.size
        elif self.into.place is None:
            passing = self._passing(windows[0].count * self.size)
            origin = passing.offset
        reads = []
        first = self.asked
        for one in windows:
            size = one.count * self.size
            place = self._placing(first, one.count)
            window = (one.check, one.generation)
            reads.append(PeerRead(one.offset, origin, size, place, window))
            first += one.count
            origin += size
        try:
            tickets = self.reads.transport.read_windows(windows[0].peer, reads)
        except BaseException:
            if passing is not None:
                self.reads.ranges.release(passing)
            raise
        deadline = time.monotonic() + READ_SECONDS
        for one, ticket in zip(windows, tickets, strict=True):
            self.running.append(
                RunningRead(one.generation, self.asked, one.count, ticket, passing, deadline)
            )
            self.asked += one.count

    def _placing(self, first: int, count: int) -> Callable[[Tensor], None] | None:
        place = self.into.place
        if place is None:
            return None
        return lambda data: place(first, data.view(count, self.size))

    def _passing(self, size: int) -> HeldRange:
        found = self.reads.ranges.take(size, 0)
        while found is None and self.running:  # which may hold the needed memory
            self._poll_oldest(WAIT_SECONDS)
            found = self.reads.ranges.take(size, 0)
        found = found or self.reads.ranges.take(size, WINDOW_SECONDS)
        if found is None:
            raise LinkError("no room of the staging memory here became free")
        self.reads._behind(found)
        return found

    def _poll_oldest(self, seconds: float = 0.0) -> bool:
        """Whether the oldest read is over, and its window done with."""
        read = self.running[0]
        state = self.reads.transport.poll(read.ticket, seconds)
        if state is ReadState.RUNNING:
            if time.monotonic() > read.deadline:
                raise LinkError(f"the pages did not come within {READ_SECONDS:g} s")
            return False
        self.running.popleft()
        try:
            if state is ReadState.REVOKED:
                raise LinkError("the pages were given up while they were read")
            if state is not ReadState.DONE:
                raise LinkError("the transport did not bring the pages")
            if read.passing is not None and self.into.rows is not None:
                self._to_host(read.first, read.count, read.passing, self.into.rows)
        finally:
            if read.passing is not None:
                self.reads.ranges.release(read.passing)
        send(self.sock, PageMessage.CONFIRM, CONFIRM.pack(read.generation))
        self.arrived += read.count
        return True

    def _to_host(self, first: int, count: int, passing: HeldRange, rows: Tensor) -> None:
        rows = rows[first : first + count]
        with self.reads.transport.platform.background() as wait:
            rows.copy_(passing.bytes.view_as(rows), non_blocking=True)
            wait()

    def end(self) -> None:
        """Set aside the memory of unfinished reads."""
        while self.running:
            read = self.running.popleft()
            left = max(0.0, read.deadline - time.monotonic())
            held = read.passing or self.into.held
            if self.reads.transport.poll(read.ticket, left) is ReadState.RUNNING:
                self.reads.transport.cancel(read.ticket)
                if held is not None:  # steps must wait for writes to the cache
                    self.reads.ranges.set_aside(held)
            elif read.passing is not None:
                self.reads.ranges.release(read.passing)


def fetched_pages(staging: PageStaging | None) -> StagedReads | HandleReads | None:
    """Fetches pages where a transport other than the connection carries them; else None."""
    if staging is None:
        return None
    if isinstance(staging.transport, HandleTransport):
        return HandleReads(staging.transport, staging.ranges) if staging.ranges else None
    return StagedReads(staging.transport, staging.fetched) if staging.fetched else None
