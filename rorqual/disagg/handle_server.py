"""The server's side where a peer's GPU copies from ours: leased pages are gathered into windows of
staging memory on the device, one after the other while windows are free, and the reader is notified
of each as soon as it is filled. So a prompt's pages are copied between the GPUs while later ones
are gathered. The first windows are often filled already (prepared_windows.py).

A page's lease is checked before and after: while it is open the page is not written to. A window
that is filled again before its reader has done with it is stamped first (window_stamps.py).
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain, repeat

from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import PagePart
from rorqual.cache.written_layers import Mark
from rorqual.disagg.leases import Found, LeaseTable
from rorqual.disagg.page_link import CONFIRM, STAGED, PageMessage, receive
from rorqual.disagg.prepared_windows import FilledWindow, PreparedWindows
from rorqual.disagg.staged_server import StagedPages, check_confirm, nothing
from rorqual.disagg.transports.handles import HandleTransport
from rorqual.disagg.transports.interface import TransportError
from rorqual.disagg.transports.staging import HeldWindow, StagingWindows
from rorqual.disagg.transports.start import PageStaging
from rorqual.parallel.remote.link import LinkError, send

WINDOW_SECONDS = 5.0  # for a reader to get a window
RAMP = (2,)  # divisors of a prompt's first windows: partly filled, so that the copy starts sooner
AHEAD = 2  # windows whose copies are launched before waiting for the first
SPIN_SECONDS = 0.003  # of busy polling for the reader's message after a window was sent


class HandlePages:
    """State shared by all connections."""

    def __init__(
        self,
        transport: HandleTransport,
        windows: StagingWindows,
        leases: LeaseTable,
        memory: PageMemory,
    ):
        self.transport = transport
        self.windows = windows
        self.leases = leases
        self.memory = memory
        assert transport.stamps is not None, "made to be read from"
        windows.revoke = transport.stamps.revoke
        self.prepared = PreparedWindows(windows, leases, memory)

    def link(self) -> HandlePagesLink:
        return HandlePagesLink(self)

    def close(self) -> None:
        self.prepared.close()


class HandlePagesLink:
    """One reader's connection."""

    def __init__(self, pages: HandlePages):
        self.pages = pages
        self.held: dict[int, FilledWindow] = {}  # announced to the reader, by generation
        self.filling: deque[FilledWindow] = deque()
        self.size = 0  # bytes of a page's part
        self.lease = b""
        self.description = b""
        self.num_announced = 0  # pages announced, of the last request
        self.places: list[tuple[int, Mark | None]] = []  # of the next pages, as far as looked up
        self.numbers: Tensor | None = None  # the same, on the device
        self.confirmed = 0  # pages since the last result of `confirm`
        self.refusal = ""
        self.busy_until = 0.0

    def stage(
        self, sock: socket.socket, lease: bytes, part: PagePart, keys: Sequence[bytes]
    ) -> None:
        """Gather this part of these pages until one is missing, and announce each window. Waits for
        the first while it is being computed."""
        self.close()
        self.refusal = ""
        self.lease = lease
        self.size = self.pages.memory.part_size(part)
        most = self.pages.windows.size // self.size
        self.num_announced = 0
        self.places = []
        try:
            self.description = self.pages.transport.describe()
        except TransportError as error:
            send(sock, PageMessage.UNSTAGED, str(error).encode())
            return
        if not most:
            reason = f"{self.size} bytes of a page do not fit into a window of its staging memory"
            send(sock, PageMessage.UNSTAGED, reason.encode())
            return
        parts = chain(RAMP, repeat(1))
        begun = self._take_prepared(lease, part, keys)
        if begun:
            next(parts)
        while self.filling:
            self._announce(sock)
        while begun < len(keys):
            count = max(1, most // next(parts))
            if not self._begin(sock, lease, part, keys[begun:], count):
                break
            begun += self.filling[-1].count
            if (
                len(self.filling) == AHEAD or not self.num_announced
            ):  # the first window goes out at once
                self._announce(sock)
        while self.filling:
            self._announce(sock)
        if self.refusal:
            send(sock, PageMessage.UNSTAGED, self.refusal.encode())
        elif self.num_announced < len(keys) or not keys:
            send(sock, PageMessage.STAGED, STAGED.pack(0, 0, 0, 0) + self.description)
        self.busy_until = time.monotonic() + SPIN_SECONDS

    def _take_prepared(self, lease: bytes, part: PagePart, keys: Sequence[bytes]) -> int:
        """How many pages of these are in windows that were filled before."""
        prepared = self.pages.prepared.take(lease, part, keys)
        if prepared is None:
            return 0
        self.filling.extend(prepared.filled)
        self.places = prepared.places
        self.numbers = prepared.numbers
        return prepared.count

    def _begin(
        self,
        sock: socket.socket,
        lease: bytes,
        part: PagePart,
        keys: Sequence[bytes],
        most: int,
    ) -> bool:
        """Start to copy the leading pages, at most `most`, into a window; returns whether there is
        at least one."""
        if not self.places and not self._look_up(sock, lease, keys):
            return False
        window = self._take(sock)
        if window is None:
            self.refusal = "its staging memory is in use by others"
            return False
        places = self.places[:most]
        if not places or self.numbers is None:  # the lease has ended
            self.pages.windows.release(window)
            return False
        numbers = self.numbers[: len(places)]
        rows = window.bytes[: len(places) * self.size].view(-1, self.size)
        wait = self.pages.memory.gather(places, rows, part, numbers)
        self.filling.append(FilledWindow(window, len(places), wait))
        self.places = self.places[len(places) :]
        self.numbers = self.numbers[len(places) :]
        return True

    def _look_up(self, sock: socket.socket, lease: bytes, keys: Sequence[bytes]) -> bool:
        """Look up the pages before the first missing one; returns whether there are any. Waits for
        the first while it is being computed."""
        leases = self.pages.leases
        while self.filling:  # windows already filled need not wait
            self._announce(sock)
        self.places = leases.places(lease, keys)
        if not self.places:
            while (found := leases.read(lease, keys[0], nothing)) is Found.COMING:
                send(sock, PageMessage.COMING)
            if found is not Found.HERE:
                return False
            self.places = leases.places(lease, keys)
        if self.places:
            self.numbers = self.pages.memory.numbers(self.places)
        return bool(self.places)

    def _take(self, sock: socket.socket) -> HeldWindow | None:
        """A free window. The reader confirms windows it has read, which frees them; all filled ones
        are announced first."""
        windows = self.pages.windows
        window = windows.take(0)
        while window is None and self.pages.prepared.give_up_oldest():
            window = windows.take(0)
        while window is None and (self.filling or self.held):
            if self.filling:
                self._announce(sock)
                window = windows.take(0)
                continue
            self.busy_until = time.monotonic() + SPIN_SECONDS
            self.await_message(sock)
            kind, message = receive(sock, CONFIRM.size)
            if kind is not PageMessage.CONFIRM:
                raise LinkError(f"{kind.name} came where a window was to be confirmed")
            self._confirm(message)
            window = windows.take(0)
        return window or windows.take(WINDOW_SECONDS)

    def _announce(self, sock: socket.socket) -> None:
        """Announce the oldest window once it is filled, if its pages were still leased then."""
        filled = self.filling.popleft()
        filled.wait()
        window = filled.window
        if not self.pages.leases.is_open(self.lease):
            self.pages.windows.release(window)
            self.places = []
            return
        self.pages.windows.offer(window)
        self.held[window.generation] = filled
        head = STAGED.pack(window.generation, window.offset, filled.count, window.place)
        send(sock, PageMessage.STAGED, head + self.description)
        self.num_announced += filled.count

    def await_message(self, sock: socket.socket) -> None:
        """Busy-poll for the reader's next message while one is imminent: a sleeping thread wakes up
        to a tenth of a millisecond late."""
        incoming = select.poll()
        incoming.register(sock, select.POLLIN)
        while self.held and time.monotonic() < self.busy_until and not incoming.poll(0):
            pass

    def confirm(self, sock: socket.socket, message: bytes) -> int:
        """The reader has done with a window; returns the pages that it has since the last call."""
        self._confirm(message)
        self.busy_until = time.monotonic() + SPIN_SECONDS
        count, self.confirmed = self.confirmed, 0
        return count

    def _confirm(self, message: bytes) -> None:
        check_confirm(message)
        (generation,) = CONFIRM.unpack(message)
        filled = self.held.pop(generation, None)
        if filled is not None and self.pages.windows.is_held(filled.window):
            self.confirmed += filled.count
            self.pages.windows.release(filled.window)

    def close(self) -> None:
        for filled in self.filling:
            filled.wait()
        for filled in (*self.filling, *self.held.values()):
            self.pages.windows.release(filled.window)
        self.filling.clear()
        self.held.clear()


def offered_pages(
    staging: PageStaging | None, leases: LeaseTable, memory: PageMemory
) -> StagedPages | HandlePages | None:
    """Serves pages where a transport other than the connection carries them; else None."""
    if staging is None or staging.offered is None:
        return None
    if isinstance(staging.transport, HandleTransport):
        return HandlePages(staging.transport, staging.offered, leases, memory)
    return StagedPages(staging.transport, staging.offered, leases, memory)
