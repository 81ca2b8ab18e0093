"""The reader's side where our GPU copies from a peer's: pages come window by window to where they
stay until they are placed, a range of the staging memory on the device; or, where none is large
enough, to rows of host memory by way of one."""

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
    MOST_KEYS,
    STAGED,
    PageMessage,
    StagedAnswer,
    check_confirmed,
    pack_read,
    receive,
    unpack_staged,
)
from rorqual.disagg.staged_reader import READ_SECONDS, RowsOfPages, RunningReads, StagedReads
from rorqual.disagg.transports.handles import HandleTransport
from rorqual.disagg.transports.interface import MOST_DESCRIPTION, ReadState
from rorqual.disagg.transports.ranges import HeldRange, StagingRanges
from rorqual.disagg.transports.start import PageStaging
from rorqual.parallel.remote.link import LinkError, send

ROOM_SECONDS = 1.0  # that a prompt waits for room on the device, others' being placed
WINDOW_SECONDS = 20.0  # that a window's pages wait for it on their way to host memory
SPIN_SECONDS = 0.003  # since something came, that the link is looked at without a pause
LOOK_MILLISECONDS = 1  # between two looks at a read then
WAIT_SECONDS = 0.001  # for a read's end, where nothing else can be done


@dataclass
class RunningRead:
    """Of `count` pages, from number `first` on. passing: where they lie on their way to the cache
    or to host memory."""

    generation: int
    first: int
    count: int
    ticket: int
    passing: HeldRange | None
    deadline: float


class HandedReads(RunningReads):
    """running: prompts, in `read`."""

    def __init__(self, transport: HandleTransport, ranges: StagingRanges):
        super().__init__()
        self.transport = transport
        self.ranges = ranges

    def rows(self, memory: PageMemory, count: int, size: int) -> RowsOfPages:
        """For so many pages; `release` gives them back."""
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
        """As StagedReads.read; a window's pages count once the keeper has confirmed it, and the
        next ones come meanwhile."""
        self.recover()
        with self.one_more():
            for start in range(0, len(keys), MOST_KEYS):
                some = list(keys[start : start + MOST_KEYS])
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
        """Ranges that a read may write into yet are used again once it is over."""
        lost = self.ranges.unusable()
        if lost and not self.running:
            self.transport.restart()
            self.ranges.recover(lost)


class PagesInFlight:
    """Pages number `start` to `stop` (excluded) of a prompt, which were asked for."""

    def __init__(
        self, reads: HandedReads, sock: socket.socket, into: RowsOfPages, start: int, stop: int
    ):
        self.reads = reads
        self.sock = sock
        self.into = into
        self.size = into.size
        self.asked = start  # up to this one reads were begun
        self.stop = stop
        self.running: deque[RunningRead] = deque()
        self.confirming: deque[int] = deque()  # pages of windows that were asked about
        self.given_up = False
        self.error = ""  # what is wrong with the pages behind those that came
        self.incoming = select.poll()
        self.incoming.register(sock, select.POLLIN)
        self.busy_until = time.monotonic() + SPIN_SECONDS

    def _is_told(self) -> bool:
        """Whether a message is to be taken; reads are looked at meanwhile."""
        if self.incoming.poll(0):
            self.busy_until = time.monotonic() + SPIN_SECONDS
            return True
        if self.running and self._look_at_oldest():
            self.busy_until = time.monotonic() + SPIN_SECONDS
            return False
        if time.monotonic() < self.busy_until:
            return False
        if not self.running:
            return True
        self.incoming.poll(LOOK_MILLISECONDS)
        return False

    def counts(self, coming: Callable[[], bool]) -> Iterator[int]:
        while self.asked < self.stop or self.running or self.confirming:
            if not self._is_told():
                continue
            kind, data = receive(self.sock, STAGED.size + MOST_DESCRIPTION)
            if kind is PageMessage.COMING:
                if not coming():
                    self.given_up = True
                    return
            elif kind is PageMessage.CONFIRMED:
                yield self._confirmed(data)
            elif kind is PageMessage.UNSTAGED:
                reason = data.decode(errors="replace")
                self._stop(f"the other engine cannot offer its pages: {reason}")
            else:
                self._begin(unpack_staged(kind, data, self.stop - self.asked))
        if self.error:
            raise LinkError(self.error)

    def _stop(self, error: str) -> None:
        """Pages before are good, and count once they are confirmed."""
        self.stop = self.asked
        self.error = error

    def _begin(self, staged: StagedAnswer) -> None:
        count = staged.count
        if not count:
            self._stop("the pages are kept no more")
            return
        size = count * self.size
        held = self.into.held
        place = self._placing(self.asked, count)
        passing = None
        local = 0
        if held is not None:
            local = held.offset + self.asked * self.size
        elif place is None:
            passing = self._passing(size)
            local = passing.offset
        try:
            ticket = self.reads.transport.read(staged.peer, staged.offset, local, size, place)
        except BaseException:
            if passing is not None:
                self.reads.ranges.release(passing)
            raise
        deadline = time.monotonic() + READ_SECONDS
        self.running.append(
            RunningRead(staged.generation, self.asked, count, ticket, passing, deadline)
        )
        self.asked += count

    def _placing(self, first: int, count: int) -> Callable[[Tensor], None] | None:
        place = self.into.place
        if place is None:
            return None
        return lambda data: place(first, data.view(count, self.size))

    def _passing(self, size: int) -> HeldRange:
        found = self.reads.ranges.take(size, 0)
        while found is None and self.running:  # which may hold what is wanted
            self._look_at_oldest(WAIT_SECONDS)
            found = self.reads.ranges.take(size, 0)
        found = found or self.reads.ranges.take(size, WINDOW_SECONDS)
        if found is None:
            raise LinkError("no room of the staging memory here became free")
        self.reads._behind(found)
        return found

    def _look_at_oldest(self, seconds: float = 0.0) -> bool:
        """Whether it is over, and the keeper asked about it."""
        read = self.running[0]
        state = self.reads.transport.poll(read.ticket, seconds)
        if state is ReadState.RUNNING:
            if time.monotonic() > read.deadline:
                raise LinkError(f"the pages did not come within {READ_SECONDS:g} s")
            return False
        self.running.popleft()
        try:
            if state is not ReadState.DONE:
                raise LinkError("the transport did not bring the pages")
            if read.passing is not None and self.into.rows is not None:
                self._to_host(read.first, read.count, read.passing, self.into.rows)
        finally:
            if read.passing is not None:
                self.reads.ranges.release(read.passing)
        send(self.sock, PageMessage.CONFIRM, CONFIRM.pack(read.generation))
        self.confirming.append(read.count)
        return True

    def _to_host(self, first: int, count: int, passing: HeldRange, rows: Tensor) -> None:
        rows = rows[first : first + count]
        with self.reads.transport.platform.background() as wait:
            rows.copy_(passing.bytes.view_as(rows), non_blocking=True)
            wait()

    def _confirmed(self, answer: bytes) -> int:
        if not self.confirming:
            raise LinkError("an answer came where nothing was asked")
        check_confirmed(answer)
        return self.confirming.popleft()

    def end(self) -> None:
        """Nothing writes here any more, or it is set aside."""
        while self.running:
            read = self.running.popleft()
            left = max(0.0, read.deadline - time.monotonic())
            held = read.passing or self.into.held
            if self.reads.transport.poll(read.ticket, left) is ReadState.RUNNING:
                self.reads.transport.cancel(read.ticket)
                if held is not None:  # the steps wait for what is written to the cache
                    self.reads.ranges.set_aside(held)
            elif read.passing is not None:
                self.reads.ranges.release(read.passing)


def fetched_pages(staging: PageStaging | None) -> StagedReads | HandedReads | None:
    """What fetches pages where something else than the link carries them."""
    if staging is None:
        return None
    if isinstance(staging.transport, HandleTransport):
        return HandedReads(staging.transport, staging.ranges) if staging.ranges else None
    return StagedReads(staging.transport, staging.fetched) if staging.fetched else None
