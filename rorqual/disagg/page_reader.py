"""Fetches pages from another engine, on threads of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.disagg.page_link import LEASE, MOST_KEYS, PageMessage, introduce, receive_head
from rorqual.disagg.staged_reader import StagedReads
from rorqual.disagg.transports.interface import TransportError
from rorqual.parallel.remote.link import Fingerprint, LinkError, receive_into, send

CONNECT_SECONDS = 5.0
QUIET_SECONDS = 10.0
FETCH_SECONDS = 60.0
AT_ONCE = 4


@dataclass
class PageFetch:
    """Pages with these keys, in order, from a lease of another engine. `found` of them came, the
    first ones, and lie in `rows` [keys, bytes of a page]; `error` says why not all."""

    address: tuple[str, int]
    lease: bytes
    keys: list[bytes]
    rows: Tensor | None = None
    found: int = 0
    error: str = ""
    seconds: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)


class PageReader:
    """staged: where a library carries the bytes; else they come by the link itself."""

    def __init__(
        self,
        secret: str,
        memory: PageMemory,
        fingerprint: Fingerprint,
        staged: StagedReads | None = None,
    ):
        self.staged = staged
        self.received = 0  # pages
        self.seconds = 0.0  # of all fetches
        self.errors = 0  # fetches that brought not all
        self.lock = threading.Lock()
        self.secret = secret.encode()
        self.memory = memory
        self.fingerprint = fingerprint
        self.pool = ThreadPoolExecutor(AT_ONCE, "page reader")

    def start(self, fetch: PageFetch, done: Callable[[], None]) -> None:
        """`done` is called on a thread, whatever happens."""
        self.pool.submit(self._run, fetch, done)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, fetch: PageFetch, done: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            if not fetch.cancelled.is_set():
                self._fetch(fetch)
        except TimeoutError:
            fetch.error = "the other engine has gone silent"
        except (LinkError, TransportError, OSError) as error:
            fetch.error = str(error) or type(error).__name__
        except Exception as error:  # the request must not wait for ever
            fetch.error = f"{type(error).__name__}: {error}"
        finally:
            fetch.seconds = time.perf_counter() - start
            self._count(fetch)
            done()

    def _count(self, fetch: PageFetch) -> None:
        with self.lock:
            self.received += fetch.found
            self.seconds += fetch.seconds
            self.errors += bool(fetch.error)

    def _fetch(self, fetch: PageFetch) -> None:
        deadline = time.monotonic() + FETCH_SECONDS
        with socket.create_connection(fetch.address, CONNECT_SECONDS) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            introduce(sock, self.secret, self.fingerprint)
            sock.settimeout(QUIET_SECONDS)
            fetch.rows = self.memory.rows(len(fetch.keys))
            if self.staged is not None:
                self._fetch_staged(sock, fetch, fetch.rows, deadline, self.staged)
                return
            for start in range(0, len(fetch.keys), MOST_KEYS):
                some = fetch.keys[start : start + MOST_KEYS]
                send(sock, PageMessage.READ, fetch.lease + b"".join(some))
                for _ in some:
                    if fetch.cancelled.is_set():
                        return
                    if time.monotonic() > deadline:
                        raise LinkError(f"not all pages came within {FETCH_SECONDS:g} s")
                    kind, size = receive_head(sock, self.memory.size)
                    if kind is not PageMessage.PAGE or size not in (0, self.memory.size):
                        raise LinkError(f"{kind.name} of {size} bytes came where a page was to")
                    if not size:
                        raise LinkError("the pages are kept no more")
                    receive_into(sock, fetch.rows[fetch.found].numpy().data)
                    fetch.found += 1
            send(sock, PageMessage.DONE, fetch.lease)

    def _fetch_staged(
        self,
        sock: socket.socket,
        fetch: PageFetch,
        rows: Tensor,
        deadline: float,
        staged: StagedReads,
    ) -> None:
        for count in staged.read(sock, fetch.lease, fetch.keys, rows):
            fetch.found += count
            if fetch.cancelled.is_set():
                return
            if time.monotonic() > deadline and fetch.found < len(fetch.keys):
                raise LinkError(f"not all pages came within {FETCH_SECONDS:g} s")
        send(sock, PageMessage.DONE, fetch.lease)


def lease_name(text: object) -> bytes | None:
    """What `remote_request_id` says; None where it is none of ours."""
    try:
        found = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return None
    return found if len(found) == LEASE else None
