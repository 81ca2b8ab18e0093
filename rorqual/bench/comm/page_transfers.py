"""How long the pages of a prompt take from one engine to another of this host, by each transport,
beside the same bytes over one plain socket, by the library alone, and copied in memory.

The keepers are processes of their own. As a module it is one of them."""

from __future__ import annotations

import json
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import KVSpec, kv_spec
from rorqual.config.hf import read_config_file
from rorqual.disagg.leases import LeaseTable, lease_name
from rorqual.disagg.page_reader import PageFetch, PageReader
from rorqual.disagg.page_server import PageServer
from rorqual.disagg.staged_reader import StagedReads
from rorqual.disagg.staged_server import StagedPages
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.disagg.transports.installed import TCP
from rorqual.disagg.transports.interface import ReadState
from rorqual.disagg.transports.start import PageStaging, start_staging
from rorqual.errors import TargetError
from rorqual.models.hub import model_folder
from rorqual.parallel.remote.link import receive_into
from rorqual.platforms.cpu import CpuPlatform

HOST = "127.0.0.1"
CHUNK = 16 * 2**20  # bytes of a plain socket's buffer
FETCH_SECONDS = 120.0


@dataclass(frozen=True)
class TransferSetup:
    """model: a folder or a name in rorqual/shapes; tokens: of the prompt, whole pages count."""

    model: str
    tokens: int = 2048
    page_size: int = 64
    transports: tuple[str, ...] = (TCP,)
    repeats: int = 5
    staging_mb: int = 128

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size


@dataclass
class TransferTimes:
    """Seconds of each repetition: of a prompt's pages, and of as many bytes by the library alone
    (nothing for TCP), which read one window again and again."""

    transport: str
    pages: list[float] = field(default_factory=list)
    library: list[float] = field(default_factory=list)


@dataclass
class TransferFigures:
    """socket, copy: seconds of as many bytes over one plain socket, and from memory to memory."""

    bytes: int
    pieces: int
    piece: int
    transports: list[TransferTimes]
    socket: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)


def spec_of(setup: TransferSetup) -> KVSpec:
    config = read_config_file(model_folder(setup.model, weights=False))
    return kv_spec(config, setup.page_size, "auto")


def staging_of(
    transport: str, setup: TransferSetup, page: int, sends: bool, fetches: bool
) -> PageStaging | None:
    if transport == TCP:
        return None
    return start_staging(transport, setup.staging_mb, page, HOST, sends, fetches)


class NoEvents:
    """Nobody decides here what reading means."""

    def reading(self, lease: bytes, pages: int, size: int) -> None:
        pass

    def done(self, lease: bytes) -> None:
        pass


class KeeperSide:
    """In the keeper's process."""

    def __init__(self, transport: str, setup: TransferSetup, secret: str):
        platform = CpuPlatform(torch.device("cpu"))
        pool = KVPool(spec_of(setup), setup.pages + 1, platform.device)
        for layer in pool.layers:
            for plane in layer.values():
                plane.view(torch.uint8).random_(0, 256)
        self.memory = PageMemory(pool, platform)
        self.pages = range(1, setup.pages + 1)
        self.secret = bytes.fromhex(secret)
        self.leases = LeaseTable(self.secret)
        self.newest = b""
        self.staging = staging_of(transport, setup, self.memory.size, True, False)
        staged = None
        if self.staging is not None and self.staging.offered is not None:
            windows = self.staging.offered
            staged = StagedPages(self.staging.transport, windows, self.leases, self.memory)
        config = TransferConfig("prefill", secret)
        self.server = PageServer(
            config, self.secret, self.leases, self.memory, {}, NoEvents(), staged
        )

    def crc(self) -> int:
        row = self.memory.rows(1)[0]
        value = 0
        for page in self.pages:
            self.memory.read(page, row)
            value = zlib.crc32(row.numpy().data, value)
        return value

    def lease(self) -> str:
        self.leases.close([self.newest])
        self.newest = lease_name(self.secret, self.leases.newest + 1)
        pages = dict(zip(keys_of(len(self.pages)), self.pages, strict=True))
        self.leases.open(self.newest, pages)()
        return self.newest.hex()

    def send(self, size: int) -> int:
        """The port of a socket that sends so many bytes to who calls."""
        listener = socket.create_server((HOST, 0))
        data = memoryview(bytes(CHUNK))

        def work() -> None:
            with listener, listener.accept()[0] as sock:
                for start in range(0, size, CHUNK):
                    sock.sendall(data[: min(CHUNK, size - start)])

        threading.Thread(target=work, daemon=True).start()
        return int(listener.getsockname()[1])

    def run(self) -> None:
        """A line in, a line out, until the caller is gone."""
        say({"port": self.server.port, "crc": self.crc()})
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "lease":
                say(self.lease())
            elif word == "send":
                say(self.send(int(rest)))
            elif self.staging is not None:
                self.staging.transport.serve(int(rest))
                say(self.staging.transport.describe().decode())


def keys_of(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def keep() -> None:
    """The main of a keeper, told how on its standard input."""
    told = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    given = told["setup"]
    setup = TransferSetup(**{**given, "transports": tuple(given["transports"])})
    KeeperSide(told["transport"], setup, told["secret"]).run()


class ReaderSide:
    """Of one transport, with its keeper."""

    def __init__(self, transport: str, setup: TransferSetup, memory: PageMemory):
        self.times = TransferTimes(transport)
        self.size = setup.pages * memory.size
        self.keys = keys_of(setup.pages)
        secret = secrets.token_hex(16)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.staging = staging_of(transport, setup, memory.size, False, True)
        staged = None
        if self.staging is not None and self.staging.fetched is not None:
            staged = StagedReads(self.staging.transport, self.staging.fetched)
        self.reader = PageReader(memory, {}, staged)
        self.secret = bytes.fromhex(secret)
        self.part = memory.held
        self.page_size = setup.page_size
        told = {"transport": transport, "setup": asdict(setup), "secret": secret}
        found = self.ask(json.dumps(told))
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

    def fetch(self) -> float:
        """Seconds; the bytes are compared."""
        lease = bytes.fromhex(self.ask("lease"))
        fetch = PageFetch(
            (HOST, self.port), self.secret, lease, self.keys, self.part, self.page_size
        )
        done = threading.Event()
        self.reader.start(fetch, done.set)
        if not done.wait(FETCH_SECONDS) or fetch.error or fetch.rows is None:
            raise TargetError(f"{self.times.transport}: {fetch.error or 'no pages came in time'}")
        if zlib.crc32(fetch.rows.numpy().data) != self.crc:
            raise TargetError(f"{self.times.transport}: the pages came damaged")
        return fetch.seconds

    def library_alone(self) -> float | None:
        if self.staging is None or self.staging.fetched is None:
            return None
        peer = self.ask("serve 1").encode()
        window = self.staging.fetched.take(0)
        assert window is not None
        start = time.perf_counter()
        for place in range(0, self.size, window.bytes.numel()):
            size = min(window.bytes.numel(), self.size - place)
            ticket = self.staging.transport.read(peer, 0, window.offset, size)
            if self.staging.transport.poll(ticket, FETCH_SECONDS) is not ReadState.DONE:
                raise TargetError(f"{self.times.transport} does not bring the bytes")
        seconds = time.perf_counter() - start
        self.staging.fetched.release(window)
        self.ask("serve -1")
        return seconds

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


def bench(setup: TransferSetup) -> TransferFigures:
    """All transports in turn, `repeats` times after once to warm up. Raises ConfigError where a
    library is missing, TargetError where pages do not come."""
    platform = CpuPlatform(torch.device("cpu"))
    spec = spec_of(setup)
    memory = PageMemory(KVPool(spec, 1, platform.device), platform)
    size = setup.pages * memory.size
    layers = len(spec.layers)
    with ExitStack() as stack:
        sides = [stack.enter_context(reader_side(name, setup, memory)) for name in setup.transports]
        times = [side.times for side in sides]
        found = TransferFigures(size, setup.pages * layers, memory.size // layers, times)
        here = torch.zeros(size, dtype=torch.uint8)
        there = torch.ones(size, dtype=torch.uint8)
        for number in range(setup.repeats + 1):
            one_round(sides, found, lambda: there.copy_(here), number > 0)
    return found


def one_round(
    sides: list[ReaderSide], found: TransferFigures, copy: Callable[[], Any], counts: bool
) -> None:
    for side in sides:
        pages, library = side.fetch(), side.library_alone()
        if counts:
            side.times.pages.append(pages)
            side.times.library += [] if library is None else [library]
    plain = sides[0].plain_socket()
    start = time.perf_counter()
    copy()
    seconds = time.perf_counter() - start
    if counts:
        found.socket.append(plain)
        found.copy.append(seconds)


def print_table(
    found: TransferFigures, setup: TransferSetup, console: Console | None = None
) -> None:
    title = (
        f"{setup.pages} pages of {setup.page_size} tokens of {setup.model} between two processes "
        f"of this host: {found.bytes / 1e6:.0f} MB, {found.pieces} pieces of "
        f"{found.piece / 1000:.0f} kB; medians of {setup.repeats}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("ms", "ms, least", "GB/s", "times the plain socket"):
        table.add_column(name, justify="right")
    plain = statistics.median(found.socket)
    rows = []
    for one in found.transports:
        rows.append((f"pages by {one.transport}", one.pages))
        if one.library:
            rows.append((f"  {one.transport} alone", one.library))
    for name, times in [*rows, ("plain socket", found.socket), ("copy in memory", found.copy)]:
        middle = statistics.median(times)
        table.add_row(
            name,
            f"{1e3 * middle:.1f}",
            f"{1e3 * min(times):.1f}",
            f"{found.bytes / middle / 1e9:.2f}",
            f"{middle / plain:.2f}",
        )
    (console or Console()).print(table)


def as_json(runs: Sequence[tuple[TransferSetup, TransferFigures]]) -> str:
    found = [{"setup": asdict(setup), "figures": asdict(figures)} for setup, figures in runs]
    return json.dumps({"runs": found}, indent=1)


if __name__ == "__main__":
    keep()
