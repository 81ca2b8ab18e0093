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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import KVSpec, kv_spec
from rorqual.config.hf import read_config_file
from rorqual.disagg.handed_reader import fetched_pages
from rorqual.disagg.handed_server import offered_pages
from rorqual.disagg.leases import LeaseTable, lease_name
from rorqual.disagg.page_reader import PageFetch, PageReader
from rorqual.disagg.page_server import PageServer
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.disagg.transports.installed import HANDLES, TCP
from rorqual.disagg.transports.interface import ReadState, Transport
from rorqual.disagg.transports.ranges import HeldRange
from rorqual.disagg.transports.staging import HeldWindow
from rorqual.disagg.transports.start import (
    HANDLES_WINDOW,
    PageStaging,
    start_handles,
    start_staging,
)
from rorqual.errors import TargetError
from rorqual.models.hub import model_folder
from rorqual.parallel.remote.link import receive_into
from rorqual.platforms import make_platform

HOST = "127.0.0.1"
CHUNK = 16 * 2**20  # bytes of a plain socket's buffer
FETCH_SECONDS = 120.0
READS_AT_ONCE = 2  # by a library alone


@dataclass(frozen=True)
class TransferSetup:
    """model: a folder or a name in rorqual/shapes; tokens: of the prompt, whole pages count.
    devices: where the pages are, and where they are to be."""

    model: str
    tokens: int = 2048
    page_size: int = 64
    transports: tuple[str, ...] = (TCP,)
    repeats: int = 5
    staging_mb: int = 128
    devices: tuple[str, str] = ("cpu", "cpu")

    @property
    def pages(self) -> int:
        return self.tokens // self.page_size


@dataclass
class TransferTimes:
    """Seconds of each repetition: of a prompt's pages, and of as many bytes by the library alone
    (nothing for TCP), which read one window again and again. Of GPUs: of gathering the pages in
    one piece, of placing them from one, and of all from the question to pages in place."""

    transport: str
    pages: list[float] = field(default_factory=list)
    library: list[float] = field(default_factory=list)
    gather: list[float] = field(default_factory=list)
    scatter: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass
class TransferFigures:
    """socket, copy: seconds of as many bytes over one plain socket, and from the one device's
    memory to the other's."""

    bytes: int
    pieces: int
    piece: int
    transports: list[TransferTimes]
    socket: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)

    def forget(self) -> None:
        """What was measured until now."""
        self.socket.clear()
        self.copy.clear()
        for times in self.transports:
            for one in (times.pages, times.library, times.gather, times.scatter, times.whole):
                one.clear()


def spec_of(setup: TransferSetup) -> KVSpec:
    config = read_config_file(model_folder(setup.model, weights=False))
    return kv_spec(config, setup.page_size, "auto")


def staging_of(
    transport: str, setup: TransferSetup, memory: PageMemory, sends: bool, fetches: bool
) -> PageStaging | None:
    if transport == TCP:
        return None
    if transport == HANDLES:
        return start_handles(setup.staging_mb, memory.size, memory.platform, sends, fetches)
    return start_staging(transport, setup.staging_mb, memory.size, HOST, sends, fetches)


class NoEvents:
    """Nobody decides here what reading means."""

    def reading(self, lease: bytes, pages: int, size: int) -> None:
        pass

    def done(self, lease: bytes) -> None:
        pass


class KeeperSide:
    """In the keeper's process."""

    def __init__(self, transport: str, setup: TransferSetup, secret: str):
        platform = make_platform(setup.devices[0])
        pool = KVPool(spec_of(setup), setup.pages + 1, platform.device)
        for layer in pool.layers:
            for plane in layer.values():
                plane.view(torch.uint8).random_(0, 256)
        self.memory = PageMemory(pool, platform)
        self.pages = range(1, setup.pages + 1)
        self.secret = bytes.fromhex(secret)
        self.leases = LeaseTable(self.secret)
        self.newest = b""
        self.staging = staging_of(transport, setup, self.memory, True, False)
        staged = offered_pages(self.staging, self.leases, self.memory)
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

    def gather(self) -> float:
        """Seconds for all pages, to one piece of the device's memory."""
        count = len(self.pages)
        device = self.memory.platform.device
        rows = torch.empty(count, self.memory.size, dtype=torch.uint8, device=device)
        places = [(page, None) for page in self.pages]
        self.memory.platform.synchronize()
        start = time.perf_counter()
        self.memory.gather(places, rows, self.memory.held)()
        return time.perf_counter() - start

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
            elif word == "gather":
                say(self.gather())
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
    tuples = {name: tuple(given[name]) for name in ("transports", "devices")}
    setup = TransferSetup(**{**given, **tuples})
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
        self.staging = staging_of(transport, setup, memory, False, True)
        self.memory = memory
        self.reader = PageReader(memory, {}, fetched_pages(self.staging))
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
        """The pages as bytes, once they are where an engine's steps would read them. Where they
        came there at once, `scatter` is what it takes beside that."""
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


def bench(setup: TransferSetup) -> TransferFigures:
    """All transports in turn, `repeats` times after once to warm up. Raises ConfigError where a
    library is missing, TargetError where pages do not come."""
    platform = make_platform(setup.devices[1])
    spec = spec_of(setup)
    placed = platform.device.type != "cpu" or HANDLES in setup.transports
    pages = setup.pages + 1 if placed else 1
    memory = PageMemory(KVPool(spec, pages, platform.device), platform)
    size = setup.pages * memory.size
    layers = len(spec.layers)
    with ExitStack() as stack:
        sides = [stack.enter_context(reader_side(name, setup, memory)) for name in setup.transports]
        times = [side.times for side in sides]
        found = TransferFigures(size, setup.pages * layers, memory.size // layers, times)
        here = torch.zeros(size, dtype=torch.uint8, device=setup.devices[0])
        there = torch.ones(size, dtype=torch.uint8, device=platform.device)
        platform.synchronize()

        def copy() -> None:
            there.copy_(here)
            platform.synchronize()

        for number in range(setup.repeats + 1):
            one_round(sides, found, copy)
            if not number:
                found.forget()
    return found


def one_round(sides: list[ReaderSide], found: TransferFigures, copy: Callable[[], None]) -> None:
    for side in sides:
        side.fetch()
        side.library_alone()
    found.socket.append(sides[0].plain_socket())
    start = time.perf_counter()
    copy()
    found.copy.append(time.perf_counter() - start)


def print_table(
    found: TransferFigures, setup: TransferSetup, console: Console | None = None
) -> None:
    title = (
        f"{setup.pages} pages of {setup.page_size} tokens of {setup.model} between two processes "
        f"of this host ({' to '.join(setup.devices)}): {found.bytes / 1e6:.0f} MB, "
        f"{found.pieces} pieces of {found.piece / 1000:.0f} kB; medians of {setup.repeats}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("ms", "ms, least", "GB/s", "times the plain socket", "of the copy's speed"):
        table.add_column(name, justify="right")
    plain = statistics.median(found.socket)
    copied = statistics.median(found.copy)
    rows = []
    for one in found.transports:
        rows.append((f"pages by {one.transport}", one.pages))
        if one.library:
            rows.append((f"  {one.transport} alone", one.library))
        if one.whole:
            rows.append(("  gathered in one piece", one.gather))
            rows.append(("  placed from one piece", one.scatter))
            rows.append(("  from the question to pages in place", one.whole))
    copy = "copy in memory" if setup.devices == ("cpu", "cpu") else "plain copy, device to device"
    for name, times in [*rows, ("plain socket", found.socket), (copy, found.copy)]:
        middle = statistics.median(times)
        table.add_row(
            name,
            f"{1e3 * middle:.1f}",
            f"{1e3 * min(times):.1f}",
            f"{found.bytes / middle / 1e9:.2f}",
            f"{middle / plain:.2f}",
            f"{100 * copied / middle:.0f} %",
        )
    (console or Console()).print(table)


def as_json(runs: Sequence[tuple[TransferSetup, TransferFigures]]) -> str:
    found = [{"setup": asdict(setup), "figures": asdict(figures)} for setup, figures in runs]
    return json.dumps({"runs": found}, indent=1)


if __name__ == "__main__":
    keep()
