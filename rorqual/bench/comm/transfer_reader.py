"""The side that fetches the pages that `bench comm` moves, and what it measures."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from rorqual.bench.comm.transfer_setup import CHUNK, HOST, TransferSetup, keys_of, staging_of
from rorqual.cache.page_memory import PageMemory
from rorqual.disagg.handle_reader import fetched_pages
from rorqual.disagg.page_reader import PageFetch, PageReader
from rorqual.disagg.transports.interface import ReadState, Transport
from rorqual.disagg.transports.ranges import HeldRange
from rorqual.disagg.transports.staging import HeldWindow
from rorqual.disagg.transports.start import HANDLES_WINDOW
from rorqual.errors import TargetError
from rorqual.parallel.remote.link import receive_into

KEEPER = "rorqual.bench.comm.transfer_keeper"
FETCH_SECONDS = 120.0
READS_AT_ONCE = 2  # concurrent reads of the bare library


@dataclass
class TransferTimes:
    """Seconds of each repetition: of a prompt's pages, and of as many bytes with the bare library
    (none for TCP), which reads one window repeatedly. With GPUs also: gathering the pages into one
    buffer, scattering them from one, and everything from the request to pages in place."""

    transport: str
    pages: list[float] = field(default_factory=list)
    library: list[float] = field(default_factory=list)
    gather: list[float] = field(default_factory=list)
    scatter: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


class ReaderSide:
    """Of one transport, with its keeper."""

    def __init__(self, transport: str, setup: TransferSetup, memory: PageMemory):
        self.times = TransferTimes(transport)
        self.size = setup.pages * memory.size
        self.keys = keys_of(setup.pages)
        secret = secrets.token_hex(16)
        self.process = subprocess.Popen(
            [sys.executable, "-m", KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.staging = staging_of(transport, setup, memory, False, True)
        self.memory = memory
        self.reader = PageReader(memory, {}, fetched_pages(self.staging))
        self.secret = bytes.fromhex(secret)
        self.part = memory.held
        self.page_size = setup.page_size
        self.request_after = setup.request_after
        settings = {"transport": transport, "setup": asdict(setup), "secret": secret}
        found = self.ask(json.dumps(settings))
        self.port, self.crc = found["port"], found["crc"]

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise TargetError(f"the keeper over {self.times.transport} has ended")
        return json.loads(answer)

    def fetch(self) -> None:
        """One repetition; the bytes are compared."""
        lease = bytes.fromhex(self.ask("lease"))
        fetch = PageFetch(
            (HOST, self.port), self.secret, lease, self.keys, self.part, self.page_size
        )
        pages = list(range(1, len(self.keys) + 1))
        if self.reader.places:
            fetch.pages = pages
        done = threading.Event()
        time.sleep(self.request_after)
        start = time.perf_counter()
        self.reader.start(fetch, done.set)
        if not done.wait(FETCH_SECONDS) or fetch.error:
            raise TargetError(f"{self.times.transport}: {fetch.error or 'no pages came in time'}")
        self.times.pages.append(fetch.seconds)
        rows = fetch.rows
        if self.memory.platform.device.type != "cpu" or rows is None:
            rows = self._placed(pages, rows, start)
        came = zlib.crc32(rows.cpu().numpy().data)
        fetch.release()
        if came != self.crc:
            raise TargetError(f"{self.times.transport}: the pages came damaged")

    def _placed(self, pages: list[int], rows: Tensor | None, start: float) -> Tensor:
        """The pages as bytes, after they are where an engine's steps would read them. If they
        arrived there directly, `scatter` is the remaining time."""
        memory = self.memory
        platform = memory.platform
        whole = time.perf_counter() - start
        if rows is not None:
            self._write(pages, rows)
            whole = time.perf_counter() - start
        self.times.whole.append(whole)
        found = torch.empty(len(pages), memory.size, dtype=torch.uint8, device=platform.device)
        memory.gather([(page, None) for page in pages], found, self.part)()
        if rows is None:
            self._write(pages, found)
        self.times.gather.append(float(self.ask("gather")))
        return found

    def _write(self, pages: list[int], rows: Tensor) -> None:
        platform = self.memory.platform
        platform.synchronize()
        start = time.perf_counter()
        self.memory.write(pages, rows, self.part, self.page_size)
        platform.synchronize()
        self.times.scatter.append(time.perf_counter() - start)

    def library_alone(self) -> None:
        staging = self.staging
        if staging is None:
            return
        peer = self.ask("serve 1").encode()
        if staging.ranges is not None:
            held = staging.ranges.take(min(HANDLES_WINDOW, staging.ranges.size, self.size), 0)
            assert held is not None
            self.times.library.append(self._read(staging.transport, peer, held))
            staging.ranges.release(held)
        elif staging.fetched is not None:
            window = staging.fetched.take(0)
            assert window is not None
            self.times.library.append(self._read(staging.transport, peer, window))
            staging.fetched.release(window)
        self.ask("serve -1")

    def _read(self, transport: Transport, peer: bytes, into: HeldWindow | HeldRange) -> float:
        """As many bytes as the pages have: seconds. Two reads run at once."""
        most = into.bytes.numel()
        tickets: deque[int] = deque()
        start = time.perf_counter()
        for place in range(0, self.size, most):
            if len(tickets) == READS_AT_ONCE:
                self._end(transport, tickets.popleft())
            tickets.append(transport.read(peer, 0, into.offset, min(most, self.size - place)))
        while tickets:
            self._end(transport, tickets.popleft())
        return time.perf_counter() - start

    def _end(self, transport: Transport, ticket: int) -> None:
        if transport.poll(ticket, FETCH_SECONDS) is not ReadState.DONE:
            raise TargetError(f"{self.times.transport} does not bring the bytes")

    def plain_socket(self) -> float:
        port = self.ask(f"send {self.size}")
        into = bytearray(CHUNK)
        with socket.create_connection((HOST, port), 5) as sock:
            sock.settimeout(FETCH_SECONDS)
            start = time.perf_counter()
            for place in range(0, self.size, CHUNK):
                receive_into(sock, memoryview(into)[: min(CHUNK, self.size - place)])
            return time.perf_counter() - start

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.reader.close()
        if self.staging is not None:
            self.staging.close()


@contextmanager
def reader_side(transport: str, setup: TransferSetup, memory: PageMemory) -> Iterator[ReaderSide]:
    side = ReaderSide(transport, setup, memory)
    try:
        yield side
    finally:
        side.close()
