"""The reader's side where a library carries the bytes. A part of the pages at a time: ask for them
to be staged, read them into a window of our own, ask whether they were still there, compare the
checksum, and only then copy them to where they count as come."""

from __future__ import annotations

import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from rorqual.disagg.page_link import (
    CONFIRM,
    MOST_KEYS,
    STAGED,
    PageMessage,
    receive,
)
from rorqual.disagg.transports.interface import MOST_DESCRIPTION, ReadState, Transport
from rorqual.disagg.transports.staging import HeldWindow, StagingWindows
from rorqual.parallel.remote.link import LinkError, send

READ_SECONDS = 10.0  # for a window's bytes to come
LOOK_SECONDS = 0.1  # between two looks whether the request was cancelled
WINDOW_SECONDS = 20.0  # that a fetch waits for a window of our own


class StagedReads:
    def __init__(self, transport: Transport, windows: StagingWindows, page: int):
        """page: bytes of one."""
        self.transport = transport
        self.windows = windows
        self.page = page
        self.most = min(MOST_KEYS, windows.size // page)
        self.running = 0
        self.lock = threading.Lock()

    def read(
        self,
        sock: socket.socket,
        lease: bytes,
        keys: Sequence[bytes],
        into: Tensor,
        cancelled: Callable[[], bool],
    ) -> int:
        """Some of the first pages with these keys, to rows of `into` [keys, page]; how many: 0
        where the request was cancelled. Raises LinkError, TransportError, OSError."""
        send(sock, PageMessage.STAGE, lease + b"".join(keys[: self.most]))
        kind, data = receive(sock, STAGED.size + MOST_DESCRIPTION)
        if kind is PageMessage.UNSTAGED:
            raise LinkError(f"the other engine cannot offer its pages: {data.decode()}")
        if kind is not PageMessage.STAGED or len(data) < STAGED.size:
            raise LinkError(f"{kind.name} of {len(data)} bytes came where pages were to be staged")
        generation, offset, count, check = STAGED.unpack(data[: STAGED.size])
        if not 0 <= count <= min(len(keys), self.most):
            raise LinkError(f"{count} pages were staged where {len(keys)} were asked for")
        if not count:
            raise LinkError("the pages are kept no more")
        with self._window() as window:
            size = count * self.page
            if not self._read(window, data[STAGED.size :], offset, size, cancelled):
                return 0
            send(sock, PageMessage.CONFIRM, CONFIRM.pack(generation))
            kind, answer = receive(sock, 1)
            if kind is not PageMessage.CONFIRMED or answer not in (b"\0", b"\1"):
                raise LinkError(f"{kind.name} came where pages were to be confirmed")
            if answer == b"\0":
                raise LinkError("the pages were given up while they were read")
            if zlib.crc32(window.bytes[:size].numpy().data) != check:
                raise LinkError("the pages came damaged: their checksum differs")
            into[:count].view(-1).copy_(window.bytes[:size])
            return count

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
        """Windows that a library may write into yet are used again once it is gone. Its other
        reads end with it."""
        lost = self.windows.unusable()
        if lost:
            self.transport.restart()
            self.windows.recover(lost)

    def _read(
        self,
        window: HeldWindow,
        peer: bytes,
        offset: int,
        size: int,
        cancelled: Callable[[], bool],
    ) -> bool:
        """False where the request was cancelled meanwhile. Of a read that did not finish the window
        is set aside."""
        with self.lock:
            self.running += 1
        try:
            return self._wait(window, peer, offset, size, cancelled)
        finally:
            with self.lock:
                self.running -= 1

    def _wait(
        self,
        window: HeldWindow,
        peer: bytes,
        offset: int,
        size: int,
        cancelled: Callable[[], bool],
    ) -> bool:
        deadline = time.monotonic() + READ_SECONDS
        ticket = self.transport.read(peer, offset, window.offset, size)
        state = ReadState.RUNNING
        while state is ReadState.RUNNING:
            state = self.transport.poll(ticket, LOOK_SECONDS)
            late = time.monotonic() > deadline
            if state is ReadState.RUNNING and (late or cancelled()):
                self.windows.set_aside(window)
                self.transport.cancel(ticket)
                if not late:
                    return False
                raise LinkError(f"the pages did not come within {READ_SECONDS:g} s")
        if state is ReadState.FAILED:
            self.windows.set_aside(window)
        if state is not ReadState.DONE:
            raise LinkError("the transport did not bring the pages")
        return True
