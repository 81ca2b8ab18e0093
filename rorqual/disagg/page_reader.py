"""Fetches parts of pages from ranks of another engine, on its own threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import PagePart
from rorqual.cache.written_layers import Mark
from rorqual.disagg.handle_reader import HandleReads
from rorqual.disagg.page_link import (
    LEASE,
    MAX_KEYS,
    PIECE,
    PageMessage,
    introduce,
    pack_read,
    receive_head,
)
from rorqual.disagg.staged_reader import RowsOfPages, StagedReads
from rorqual.disagg.transports.handles import HandleTransport
from rorqual.disagg.transports.interface import TransportError
from rorqual.parallel.remote.link import (
    Fingerprint,
    LinkError,
    readable,
    receive_exactly,
    receive_into,
    send,
)

CONNECT_SECONDS = 5.0
QUIET_SECONDS = 10.0
FETCH_SECONDS = 60.0
COMPUTE_SECONDS = 600.0  # for a prompt still being computed when its pages are requested
AT_ONCE = 8  # concurrent fetches of prompt parts
IDLE_SECONDS = 10.0  # that a connection is kept for the next prompt; the server closes it after 30
MAX_IDLE = 16


@dataclass
class PageFetch:
    """One part of the pages with these keys, in order, from a lease of another engine. secret: of
    the connections to it. page_size: of its pages, in tokens. The first `found` pages were
    received, into `rows` [keys, bytes of the part], which are valid until `release`; `error` says
    why not all. pages: of the cache, one for each key, to write to at once in place of rows, after
    mark `before` if given; set to none by `end_placing`."""

    address: tuple[str, int]
    secret: bytes
    lease: bytes
    keys: list[bytes]
    part: PagePart
    page_size: int
    pages: list[int] | None = None
    before: Mark | None = None
    rows: Tensor | None = None
    size: int = 0  # bytes of a page's part
    placing: bool = True
    found: int = 0
    error: str = ""
    seconds: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)
    give_back: Callable[[Mark | None], None] | None = None
    holders: int = 2  # the fetching thread, and the placing one
    mark: Mark | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def release(self, mark: Mark | None = None) -> None:
        """Each of the two holders calls this once. mark: of what may still read the rows."""
        with self.lock:
            self.holders -= 1
            over = not self.holders
            if mark is not None:
                self.mark = mark
        if over and self.give_back is not None:
            self.give_back(self.mark)

    @property
    def received(self) -> int:
        """Bytes received."""
        return self.found * self.size


@dataclass
class Link:
    """idle: whether no more messages are expected on it."""

    sock: socket.socket
    idle: bool = False


class IdleLinks:
    """Idle connections to page servers, kept because connecting takes longer than a transfer
    between GPUs."""

    def __init__(self) -> None:
        self.links: list[tuple[tuple[tuple[str, int], bytes], socket.socket, float]] = []
        self.lock = threading.Lock()
        self.closed = False

    def take(self, address: tuple[str, int], secret: bytes) -> socket.socket | None:
        self._drop(lambda link: time.monotonic() - link[2] > IDLE_SECONDS or _ended(link[1]))
        with self.lock:
            for link in self.links:
                if link[0] == (address, secret):
                    self.links.remove(link)
                    return link[1]
        return None

    def keep(self, address: tuple[str, int], secret: bytes, sock: socket.socket) -> None:
        with self.lock:
            self.links.append(((address, secret), sock, time.monotonic()))
            most = 0 if self.closed else MAX_IDLE
            old = self.links.pop(0)[1] if len(self.links) > most else None
        if old is not None:
            old.close()

    def close(self) -> None:
        """Links that a fetch still under way gives back later are closed then."""
        with self.lock:
            self.closed = True
        self._drop(lambda link: True)

    def _drop(self, over: Callable[[tuple[Any, socket.socket, float]], bool]) -> None:
        with self.lock:
            dropped = [link for link in self.links if over(link)]
            self.links = [link for link in self.links if link not in dropped]
        for link in dropped:
            link[1].close()


def _ended(sock: socket.socket) -> bool:
    """Whether the connection was closed, or has unexpected data."""
    return readable(sock, 0.0)


class PageReader:
    """staged: where a transport other than the connection itself carries the bytes."""

    def __init__(
        self,
        memory: PageMemory,
        fingerprint: Fingerprint,
        staged: StagedReads | HandleReads | None = None,
    ):
        self.staged = staged
        self.idle = IdleLinks()
        self.memory = memory
        self.fingerprint = fingerprint
        self.pool = ThreadPoolExecutor(AT_ONCE, "page reader")

    def start(self, fetch: PageFetch, done: Callable[[], None]) -> None:
        """`done` is called on a thread in any case."""
        self.pool.submit(self._run, fetch, done)

    def finish(self, address: tuple[str, int], secret: bytes, lease: bytes) -> None:
        """Notify rank 0 of the other engine that a lease will not be read any more. If the message
        is lost, the lease expires."""
        self.pool.submit(self._finish, address, secret, lease)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.idle.close()

    def _run(self, fetch: PageFetch, done: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            if not fetch.cancelled.is_set():
                self._fetch(fetch)
        except TimeoutError:
            fetch.error = "the other engine has gone silent"
        except (LinkError, TransportError, OSError) as error:
            fetch.error = str(error) or type(error).__name__
        except Exception as error:  # else the request would wait forever
            fetch.error = f"{type(error).__name__}: {error}"
        finally:
            fetch.seconds = time.perf_counter() - start
            fetch.release()
            done()

    @contextmanager
    def _linked(self, address: tuple[str, int], secret: bytes) -> Iterator[Link]:
        """A connection; closed at the end, unless it is idle and can be kept."""
        sock = self.idle.take(address, secret)
        with ExitStack() as stack:
            if sock is None:
                sock = stack.enter_context(socket.create_connection(address, CONNECT_SECONDS))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                introduce(sock, secret, self.fingerprint)
                sock.settimeout(QUIET_SECONDS)
            else:
                stack.enter_context(sock)
            link = Link(sock)
            yield link
            if link.idle and (self.staged is None or isinstance(self.staged, HandleReads)):
                stack.pop_all()
                self.idle.keep(address, secret, sock)

    def _finish(self, address: tuple[str, int], secret: bytes, lease: bytes) -> None:
        with suppress(LinkError, OSError), self._linked(address, secret) as link:
            send(link.sock, PageMessage.DONE, lease)
            link.idle = True

    def _fetch(self, fetch: PageFetch) -> None:
        size = self.memory.part_size(fetch.part, fetch.page_size)
        patience = FetchDeadline()
        with self._linked(fetch.address, fetch.secret) as link:
            sock = link.sock
            if self.staged is not None:
                self._fetch_staged(sock, fetch, size, patience, self.staged)
                link.idle = fetch.found == len(fetch.keys)
                return
            fetch.size = size
            fetch.rows = self.memory.rows(len(fetch.keys), size)
            for start in range(0, len(fetch.keys), MAX_KEYS):
                some = fetch.keys[start : start + MAX_KEYS]
                send(sock, PageMessage.READ, pack_read(fetch.lease, fetch.part, some))
                if not self._receive_pages(sock, fetch, fetch.rows[start:][: len(some)], patience):
                    return
            link.idle = True

    def _fetch_staged(
        self,
        sock: socket.socket,
        fetch: PageFetch,
        size: int,
        patience: FetchDeadline,
        staged: StagedReads | HandleReads,
    ) -> None:
        fetch.size = size
        if isinstance(staged, HandleReads) and fetch.pages is not None:
            placing = Placing(fetch, self.memory, staged.transport)
            rows = RowsOfPages(size, None, None, placing.place, placing.prepare)
        else:
            rows = staged.rows(self.memory, len(fetch.keys), size)
        fetch.rows = rows.rows
        fetch.give_back = partial(staged.release, rows)

        def coming() -> bool:
            patience.check()
            patience.renew()
            return not fetch.cancelled.is_set()

        for count in staged.read(sock, fetch.lease, fetch.part, fetch.keys, rows, coming):
            fetch.found += count
            if fetch.cancelled.is_set():
                return
            if fetch.found < len(fetch.keys):
                patience.check()

    @property
    def places(self) -> bool:
        """Whether received pages can be written to the cache at once."""
        return isinstance(self.staged, HandleReads)

    def end_placing(self, fetches: Sequence[PageFetch]) -> None:
        """Make later launches in the current context wait for all writes to the cache for these
        fetches."""
        for fetch in fetches:
            with fetch.lock:
                fetch.placing = False
        if isinstance(self.staged, HandleReads):
            self.staged.transport.mark()()

    def _receive_pages(
        self, sock: socket.socket, fetch: PageFetch, rows: Tensor, patience: FetchDeadline
    ) -> bool:
        """Receive pages in order, or in pieces of any of them. False where they are no longer
        wanted."""
        count, size = rows.shape
        first = fetch.found
        filled = [0] * count
        while fetch.found < first + count:
            if fetch.cancelled.is_set():
                return False
            patience.check()
            kind, length = receive_head(sock, size + PIECE.size)
            if kind is PageMessage.COMING:
                patience.renew()
                continue
            number = fetch.found - first
            if kind is PageMessage.PIECE and length >= PIECE.size:
                (number,) = PIECE.unpack(receive_exactly(sock, PIECE.size))
                length -= PIECE.size
                patience.renew()
            elif kind is not PageMessage.PAGE or length not in (0, size):
                raise LinkError(f"{kind.name} of {length} bytes came where a page was to")
            if number >= count or filled[number] + length > size:
                raise LinkError(f"{length} bytes came of page {number}, where none were to")
            if not length:
                raise LinkError("the pages are kept no more")
            receive_into(sock, rows[number].numpy().data[filled[number] :][:length])
            filled[number] += length
            while fetch.found < first + count and filled[fetch.found - first] == size:
                fetch.found += 1
        return True


class Placing:
    """Writes the pages of a fetch to the cache."""

    def __init__(self, fetch: PageFetch, memory: PageMemory, transport: HandleTransport):
        self.fetch = fetch
        self.memory = memory
        self.transport = transport
        self.launch: Callable[[int, Tensor], None] | None = None

    def prepare(self) -> None:
        fetch = self.fetch
        assert fetch.pages is not None
        with self.transport.where_placed():
            if fetch.before is not None:
                fetch.before()
            self.launch = self.memory.placing(fetch.pages, fetch.part)

    def place(self, first: int, data: Tensor) -> None:
        """Does not write after `end_placing`: the pages may have been reused."""
        assert self.launch is not None
        with self.fetch.lock:
            if self.fetch.placing:
                self.launch(first, data)


class FetchDeadline:
    """A deadline of FETCH_SECONDS, renewed when the server reports that it still computes the
    pages, for at most COMPUTE_SECONDS."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + FETCH_SECONDS
        self.last = time.monotonic() + COMPUTE_SECONDS

    def renew(self) -> None:
        self.deadline = time.monotonic() + FETCH_SECONDS

    def check(self) -> None:
        """Raises LinkError."""
        now = time.monotonic()
        if now > self.last:
            raise LinkError(f"the prompt was not computed within {COMPUTE_SECONDS:g} s")
        if now > self.deadline:
            raise LinkError(f"not all pages came within {FETCH_SECONDS:g} s")


def parse_lease(text: object) -> bytes | None:
    """The lease name in `remote_request_id`; None where it is not valid."""
    try:
        found = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return None
    return found if len(found) == LEASE else None
