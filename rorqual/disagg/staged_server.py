"""The server's side where a library carries the bytes: leased pages are copied into a window that
the library's peers can read; the reader is sent its location, and afterwards whether all of it was
still valid."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import PagePart
from rorqual.cache.written_layers import Mark
from rorqual.disagg.leases import Found, LeaseTable
from rorqual.disagg.page_link import CONFIRM, STAGED, PageMessage
from rorqual.disagg.transports.interface import Transport, TransportError
from rorqual.disagg.transports.staging import HeldWindow, StagingWindows
from rorqual.parallel.remote.link import LinkError, send

WINDOW_SECONDS = 5.0  # for a reader to get a window


class StagedPages:
    """State shared by all connections."""

    def __init__(
        self, transport: Transport, windows: StagingWindows, leases: LeaseTable, memory: PageMemory
    ):
        self.transport = transport
        self.windows = windows
        self.leases = leases
        self.memory = memory

    def link(self) -> StagedLink:
        return StagedLink(self)


class StagedLink:
    """One reader's connection, which holds at most one window."""

    def __init__(self, pages: StagedPages):
        self.pages = pages
        self.window: HeldWindow | None = None
        self.count = 0  # pages in it
        self.size = 0  # bytes of one
        self.lease = b""

    def stage(
        self, sock: socket.socket, lease: bytes, part: PagePart, keys: Sequence[bytes]
    ) -> None:
        """Copy this part of the leading pages, until one is missing or the window is full. Waits
        for the first while it is being computed."""
        self.close()
        self.lease = lease
        self.size = self.pages.memory.part_size(part)
        try:
            description = self.pages.transport.describe()
        except TransportError as error:
            send(sock, PageMessage.UNSTAGED, str(error).encode())
            return
        if keys and not self._wait_for_page(sock, lease, keys[0]):
            send(sock, PageMessage.STAGED, STAGED.pack(0, 0, 0, 0) + description)
            return
        window = self.pages.windows.take(WINDOW_SECONDS)
        if window is None:
            send(sock, PageMessage.UNSTAGED, b"its staging memory is in use by others")
            return
        self.window = window
        self._fill(window, lease, part, keys)
        check = zlib.crc32(window.bytes[: self.count * self.size].numpy().data)
        self.pages.windows.offer(window)
        self.pages.transport.serve(1)
        head = STAGED.pack(window.generation, window.offset, self.count, check)
        send(sock, PageMessage.STAGED, head + description)

    def _wait_for_page(self, sock: socket.socket, lease: bytes, key: bytes) -> bool:
        """Whether the page exists; waits while it is being computed."""
        while (found := self.pages.leases.read(lease, key, nothing)) is Found.COMING:
            send(sock, PageMessage.COMING)
        return found is Found.HERE

    def _fill(
        self, window: HeldWindow, lease: bytes, part: PagePart, keys: Sequence[bytes]
    ) -> None:
        size = self.size
        rows = window.bytes[: window.bytes.numel() // size * size].view(-1, size)
        self.count = 0
        for key, row in zip(keys, rows, strict=False):
            copy = partial(self._copy, row, part)
            if self.pages.leases.read(lease, key, copy) is not Found.HERE:
                break
            self.count += 1

    def _copy(self, row: Tensor, part: PagePart, page: int, after: Mark | None = None) -> None:
        self.pages.memory.read(page, row, part, after)

    def confirm(self, sock: socket.socket, message: bytes) -> int:
        """Send whether the window still holds what it was filled with; returns its pages, if so."""
        (generation,) = CONFIRM.unpack(message)
        window = self.window
        good = (
            window is not None
            and window.generation == generation
            and self.pages.windows.is_held(window)
        )
        count = self.count if good else 0
        self.close()
        send(sock, PageMessage.CONFIRMED, bytes([good]))
        return count

    def close(self) -> None:
        window = self.window
        if window is None:
            return
        self.window = None
        if window.offered_at:
            self.pages.transport.serve(-1)
        self.pages.windows.release(window)


def nothing(page: int, after: Mark | None = None) -> None:
    pass


def check_confirm(message: bytes) -> None:
    if len(message) != CONFIRM.size:
        raise LinkError(f"a question of {len(message)} bytes came; accepted: {CONFIRM.size}")
