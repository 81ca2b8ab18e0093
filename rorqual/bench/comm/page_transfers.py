"""Transfer time of a prompt's pages between two engines of this host, for each transport, compared
with the same bytes over one plain socket, with the library alone, and as a memory copy.

The sending engines are separate processes (transfer_keeper.py)."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.table import Table

from rorqual.bench.comm.transfer_reader import ReaderSide, TransferTimes, reader_side
from rorqual.bench.comm.transfer_setup import TransferSetup, spec_of
from rorqual.bench.wide_console import wide_console
from rorqual.cache.page_memory import PageMemory
from rorqual.cache.pool import KVPool
from rorqual.disagg.transports.installed import HANDLES
from rorqual.platforms import make_platform


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


def bench(setup: TransferSetup) -> TransferFigures:
    """All transports in turn, `repeats` times after one warm-up. Raises ConfigError if a library is
    missing, TargetError if pages do not arrive."""
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
    if setup.request_after:
        title += f"; asked for {1e3 * setup.request_after:g} ms after their lease opened"
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
    (console or wide_console(140)).print(table)


def as_json(runs: Sequence[tuple[TransferSetup, TransferFigures]]) -> str:
    found = [{"setup": asdict(setup), "figures": asdict(figures)} for setup, figures in runs]
    return json.dumps({"runs": found}, indent=1)
