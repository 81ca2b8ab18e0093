"""A keeper whose pages a library carries, a reader of them, and a library that is told what to do
wrong."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

from rorqual.disagg.page_reader import PageFetch, PageReader
from rorqual.disagg.page_server import PageServer
from rorqual.disagg.staged_reader import StagedReads
from rorqual.disagg.staged_server import StagedPages
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.disagg.transports.interface import ReadState, Transport
from rorqual.disagg.transports.staging import StagingWindows
from tests.disagg.test_page_leases import LINKS, MINE, SECRET, Keeper, fetch_of, memory

WINDOW_PAGES = 3  # of the four that a prompt has


class FakeTransport:
    """Copies between tensors of this process. fault: of the read that is begun while it is set, and
    of that alone: "error" (half of the bytes, then FAILED), "never", or "late" (as never, and the
    bytes come when `write_late` says so)."""

    memories: dict[bytes, Tensor] = {}  # noqa: RUF012

    def __init__(self, memory: Tensor):
        self.memory = memory
        self.name = str(id(self)).encode()
        self.memories[self.name] = memory
        self.fault = ""
        self.before_read = lambda: None
        self.states: dict[int, ReadState] = {}
        self.late: list[tuple[Tensor, Tensor]] = []
        self.cancelled = 0
        self.restarts = 0
        self.serving = 0
        self.reads = 0
        self.lock = threading.Lock()

    def describe(self) -> bytes:
        return self.name

    def serve(self, windows: int) -> None:
        with self.lock:
            self.serving += windows

    def read(self, peer: bytes, remote: int, local: int, size: int) -> int:
        fault, self.fault = self.fault, ""
        self.before_read()
        there = self.memories[peer][remote : remote + size]
        here = self.memory[local : local + size]
        with self.lock:
            self.reads += 1
            ticket = self.reads
        if fault == "error":
            here[: size // 2].copy_(there[: size // 2])
        elif fault == "late":
            self.late.append((here, there.clone()))
        elif not fault:
            here.copy_(there)
        found = {"": ReadState.DONE, "error": ReadState.FAILED}
        self.states[ticket] = found.get(fault, ReadState.RUNNING)
        return ticket

    def poll(self, ticket: int, seconds: float) -> ReadState:
        deadline = time.monotonic() + seconds
        while self.states[ticket] is ReadState.RUNNING and time.monotonic() < deadline:
            time.sleep(0.002)
        return self.states[ticket]

    def cancel(self, ticket: int) -> None:
        self.cancelled += 1

    def write_late(self) -> None:
        for here, data in self.late:
            here.copy_(data)

    def restart(self) -> None:
        self.restarts += 1
        self.late.clear()
        for ticket, state in self.states.items():
            if state is ReadState.RUNNING:
                self.states[ticket] = ReadState.ENDED

    def close(self) -> None: ...


def fake_windows(page: int, count: int) -> tuple[FakeTransport, StagingWindows]:
    size = page * WINDOW_PAGES
    data = torch.zeros(size * count, dtype=torch.uint8)
    return FakeTransport(data), StagingWindows(data, 0, size, count)


class StagedKeeper(Keeper):
    """given: a library and the windows that peers read from; a fake one with `count` windows where
    it is not."""

    def __init__(self, given: tuple[Transport, StagingWindows] | None = None, count: int = 4):
        super().__init__()
        self.leases.most_pages = 100
        self.server.close()
        found = given or fake_windows(self.memory.size, count)
        self.transport: Any = found[0]
        self.windows = found[1]
        self.staged = StagedPages(*found, self.table, self.memory)
        self.server = self.serve(MINE)

    def serve(self, fingerprint: dict[str, str], port: int = 0) -> PageServer:
        config = TransferConfig("prefill", SECRET, port=port)
        return PageServer(config, LINKS, self.table, self.memory, fingerprint, self, self.staged)


class StagedReader:
    def __init__(self, given: tuple[Transport, StagingWindows] | None = None, count: int = 4):
        self.memory = memory()
        found = given or fake_windows(self.memory.size, count)
        self.transport: Any = found[0]
        self.windows = found[1]
        self.staged = StagedReads(*found)
        self.reader = PageReader(self.memory, MINE, self.staged)
        self.go_on = threading.Event()

    def fetch_until_read(self, keeper: Keeper) -> tuple[PageFetch, threading.Event]:
        """A fetch whose first read waits for `go_on`."""
        began = threading.Event()

        def wait() -> None:
            began.set()
            assert self.go_on.wait(60)

        self.transport.before_read = wait
        found = self.start(keeper, keeper.offer())
        assert began.wait(60)
        return found

    def start(self, keeper: Keeper, name: bytes) -> tuple[PageFetch, threading.Event]:
        found = fetch_of((keeper.server.host, keeper.server.port), name, keeper.keys)
        done = threading.Event()
        self.reader.start(found, done.set)
        return found, done

    def fetch(self, keeper: Keeper, name: bytes | None = None) -> PageFetch:
        found, done = self.start(keeper, name or keeper.offer())
        assert done.wait(60)
        if not found.error:
            self.reader.finish(found.address, LINKS, found.lease)
        return found


def right_rows(keeper: Keeper) -> Tensor:
    rows = keeper.memory.rows(len(keeper.pages))
    for page, row in zip(keeper.pages, rows, strict=True):
        keeper.memory.read(page, row)
    return rows


def is_right(keeper: Keeper, found: PageFetch) -> bool:
    """What came is what the keeper has, and what did not come is not counted."""
    assert found.rows is not None
    return torch.equal(found.rows[: found.found], right_rows(keeper)[: found.found])
