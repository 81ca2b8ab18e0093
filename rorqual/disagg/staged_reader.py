"""The reader's side where a library carries the bytes. One window of pages at a time: request
staging, read into a window of our own, ask whether the pages were still valid, compare the
checksum, and only then copy them out and count them as received."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import PagePart
from rorqual.cache.written_layers import Mark
from rorqual.disagg.page_link import (
    CONFIRM,
    MAX_KEYS,
    PageMessage,
    StagedReply,
    check_confirmed,
    pack_read,
    receive,
    receive_reply,
    unpack_staged,
)
from rorqual.disagg.transports.interface import ReadState, Transport
from rorqual.disagg.transports.ranges import HeldRange
from rorqual.disagg.transports.staging import HeldWindow, StagingWindows
from rorqual.parallel.remote.link import LinkError, send

READ_SECONDS = 10.0  # for a window's bytes to arrive
WINDOW_SECONDS = 20.0  # that a fetch waits for a local window


@dataclass
class RowsOfPages:
    """rows: [pages, size] uint8; held: the staging memory they are in, None for host memory. place:
    where there are no rows, launches the write of pages to the cache: the number of the first, and
    the bytes of it and the following ones [n, size]. prepare: called once before, while the other
    engine stages its pages."""

    size: int
    rows: Tensor | None
    held: HeldRange | None = None
    place: Callable[[int, Tensor], None] | None = None
    prepare: Callable[[], None] | None = None


class RunningReads:
    """Counts running reads, whose memory must not be reclaimed."""

    def __init__(self) -> None:
        self.running = 0
        self.lock = threading.Lock()

    @contextmanager
    def running_read(self) -> Iterator[None]:
        with self.lock:
            self.running += 1
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1


class StagedReads(RunningReads):
    """running: windows being read into."""

    def __init__(self, transport: Transport, windows: StagingWindows):
        super().__init__()
        self.transport = transport
        self.windows = windows

    def rows(self, memory: PageMemory, count: int, size: int) -> RowsOfPages:
        return RowsOfPages(size, memory.rows(count, size))

    def release(self, rows: RowsOfPages, mark: Mark | None) -> None:
        """Host memory is freed with its last reference."""

    def read(
        self,
        sock: socket.socket,
        lease: bytes,
        part: PagePart,
        keys: Sequence[bytes],
        into: RowsOfPages,
        coming: Callable[[], bool],
    ) -> Iterator[int]:
        """Read this part of the pages with these keys, in order, to rows of `into` [keys, bytes of
        the part]; yields after each window how many more were received. The server fills the next
        window while this side checks and copies one. coming: called while the next page is still
        being computed; returns False where it is no longer wanted. Raises LinkError, TransportError
        and OSError."""
        rows, size = into.rows, into.size
        assert rows is not None
        most = min(MAX_KEYS, self.windows.size // size)
        if not most:
            raise LinkError(
                f"{size} bytes of a page do not fit into a window of {self.windows.size}: "
                "kv_staging_mb is too small for the other engine's pages"
            )
        self._ask(sock, lease, part, keys[:most])
        came = 0
        while came < len(keys):
            staged = self._staged(sock, min(len(keys) - came, most), coming)
            if staged is None:
                return
            count = staged.count
            with self._window() as window:
                data = window.bytes[: count * size]
                self._read(window, staged.peer, staged.offset, data.numel())
                send(sock, PageMessage.CONFIRM, CONFIRM.pack(staged.generation))
                if came + count < len(keys):
                    self._ask(sock, lease, part, keys[came + count :][:most])
                self._confirmed(sock)
                if zlib.crc32(data.numpy().data) != staged.check:
                    raise LinkError("the pages came damaged: their checksum differs")
                rows[came : came + count].view(-1).copy_(data)
            came += count
            yield count

    def _ask(
        self, sock: socket.socket, lease: bytes, part: PagePart, keys: Sequence[bytes]
    ) -> None:
        send(sock, PageMessage.STAGE, pack_read(lease, part, list(keys)))

    def _staged(
        self, sock: socket.socket, asked: int, coming: Callable[[], bool]
    ) -> StagedReply | None:
        while True:
            kind, data = receive_reply(sock)
            if kind is not PageMessage.COMING:
                return unpack_staged(kind, data, asked)
            if not coming():
                return None

    def _confirmed(self, sock: socket.socket) -> None:
        kind, answer = receive(sock, 1)
        if kind is not PageMessage.CONFIRMED:
            raise LinkError(f"{kind.name} came where pages were to be confirmed")
        check_confirmed(answer)

    @contextmanager
    def _window(self) -> Iterator[HeldWindow]:
        window = self._take()
        try:
            yield window
        finally:
            if window not in self.windows.unusable():
                self.windows.release(window)
            elif not self.running:
                self.recover()

    def _take(self) -> HeldWindow:
        window = self.windows.take(0)
        if window is None and self.windows.unusable():
            self.recover()
        window = window or self.windows.take(WINDOW_SECONDS)
        if window is None:
            raise LinkError("no window of the staging memory here became free")
        return window

    def recover(self) -> None:
        """Reclaim windows that the library may still write to, by restarting it. Its other reads
        end with it."""
        lost = self.windows.unusable()
        if lost:
            self.transport.restart()
            self.windows.recover(lost)

    def _read(self, window: HeldWindow, peer: bytes, offset: int, size: int) -> None:
        """Read into the window; the window of an unfinished read is set aside. Cancelled requests
        are not checked for: the read finishes sooner than a library restarts."""
        with self.running_read():
            self._wait(window, peer, offset, size)

    def _wait(self, window: HeldWindow, peer: bytes, offset: int, size: int) -> None:
        ticket = self.transport.read(peer, offset, window.offset, size)
        state = self.transport.poll(ticket, READ_SECONDS)
        if state in (ReadState.RUNNING, ReadState.FAILED):
            self.windows.set_aside(window)
        if state is ReadState.RUNNING:
            self.transport.cancel(ticket)
            raise LinkError(f"the pages did not come within {READ_SECONDS:g} s")
        if state is not ReadState.DONE:
            raise LinkError("the transport did not bring the pages")
