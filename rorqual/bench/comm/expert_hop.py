"""Round-trip time of rows to expert servers, without expert computation, compared with the same
bytes over plain sockets.

The servers are processes of this host that answer with zeros. Run as a module this file is a
server."""

from __future__ import annotations

import json
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rorqual.bench.comm.expert_reads import Reads
from rorqual.bench.comm.server_processes import read_settings, serve, server_processes
from rorqual.bench.wide_console import wide_console
from rorqual.parallel.mesh import SINGLE_LAYOUT
from rorqual.parallel.remote.config import RemoteConfig
from rorqual.parallel.remote.exchange import RemoteExchange, RemoteLanes
from rorqual.parallel.remote.link import receive_into
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.parallel.remote.wire import CallHead, ReplyHead, RowFormat
from rorqual.platforms import device_of

FINGERPRINT = {"format": "hop"}
WARM = 20


@dataclass(frozen=True)
class HopSetup:
    """experts: of the layer, distributed over `servers` processes; each row is routed to `top_k` of
    them. intermediate: columns of local experts that are read for comparison; 0: none."""

    rows: tuple[int, ...]
    servers: int = 1
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    repeats: int = 200
    fp8: bool = True
    device: str = "cpu"
    intermediate: int = 0


@dataclass(frozen=True)
class Hop:
    """us: median and 90th percentile of dispatch and combine together. plain: of the same bytes,
    there and back, over one socket and no more. sent, back: bytes, of all servers together."""

    rows: int
    us: float
    p90: float
    plain: float
    sent: int
    back: int


class NoExperts:
    """Where an expert server expects a shard: answers zeros."""

    def __init__(self, hidden: int, experts: Sequence[int]):
        self.config = SimpleNamespace(hidden_size=hidden)
        self.dtype = torch.bfloat16
        self.experts = tuple(experts)
        self.max_slots = len(self.experts)
        self.answer = torch.zeros(0, hidden, dtype=self.dtype)

    def holdings(self) -> dict[int, tuple[int, ...]]:
        return {0: self.experts}

    def compute(self, layer: int, ids: Tensor, weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
        if self.answer.shape[0] < ids.shape[0]:
            self.answer = torch.zeros(ids.shape[0], self.answer.shape[1], dtype=self.dtype)
        return self.answer[: ids.shape[0]]


def serve_nothing() -> None:
    """Main of a server (server_processes.py)."""
    settings = read_settings()
    shard: Any = NoExperts(settings["hidden"], settings["experts"])
    serve(shard, settings, FINGERPRINT)


def _server_settings(setup: HopSetup, secret: str) -> list[dict[str, Any]]:
    """To each server."""
    return [
        {
            "hidden": setup.hidden,
            "experts": list(range(number, setup.experts, setup.servers)),
            "secret": secret,
            "max_rows": max(setup.rows),
        }
        for number in range(setup.servers)
    ]


def bench(setup: HopSetup) -> list[Hop]:
    secret = secrets.token_hex(16)
    device = device_of(setup.device)
    with server_processes(__name__, _server_settings(setup, secret)) as ports:
        config = RemoteConfig(tuple(("127.0.0.1", port) for port in ports), secret.encode())
        servers = ExpertServers(config, FINGERPRINT, [0], setup.experts, 1, max(setup.rows))
        try:
            servers.wait_for_all(60)
            lanes = RemoteLanes(1)
            exchange = RemoteExchange(servers, lanes, 0, device, setup.fp8)
            return [_hop(setup, exchange, rows, device) for rows in setup.rows]
        finally:
            servers.close()


def _hop(setup: HopSetup, exchange: RemoteExchange, rows: int, device: torch.device) -> Hop:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, setup.hidden, generator=generator).to(torch.bfloat16).to(device)
    scores = torch.rand(rows, setup.experts, generator=generator)
    ids = scores.topk(setup.top_k, 1).indices.to(device)
    weights = torch.rand(rows, setup.top_k, generator=generator).to(device)
    times = []
    for number in range(WARM + setup.repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        ticket = exchange.dispatch(x, ids, weights, SINGLE_LAYOUT)
        exchange.combine(ticket)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= WARM:
            times.append(1e6 * (time.perf_counter() - start))
    calls = [
        CallHead(0, 0, call.ids.shape[0], setup.top_k, RowFormat(int(setup.fp8)))
        for call in ticket.replies
    ]
    sent = sum(sum(call.sizes(setup.hidden, 2)) + CallHead.FORM.size for call in calls)
    back = sum(2 * call.rows * setup.hidden + ReplyHead.FORM.size for call in calls)
    times.sort()
    p90 = times[int(0.9 * (len(times) - 1))]
    plain = _plain(sent, back, setup.repeats)
    return Hop(rows, statistics.median(times), p90, plain, sent, back)


def _plain(sent: int, back: int, repeats: int) -> float:
    """Microseconds of so many bytes there and so many back, one process with two threads apart."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for sock in (near, far):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    total = WARM + repeats
    answer = bytes(back)

    def echo() -> None:
        into = bytearray(sent)
        for _ in range(total):
            receive_into(far, memoryview(into))
            far.sendall(answer)

    thread = threading.Thread(target=echo)
    thread.start()
    message = bytes(sent)
    into = bytearray(back)
    times = []
    for _ in range(total):
        start = time.perf_counter()
        near.sendall(message)
        receive_into(near, memoryview(into))
        times.append(1e6 * (time.perf_counter() - start))
    thread.join()
    near.close()
    far.close()
    return statistics.median(times[WARM:])


def print_table(found: list[Hop], setup: HopSetup, console: Console | None = None) -> None:
    form = "fp8" if setup.fp8 else "bf16"
    title = (
        f"{setup.servers} expert servers on this host, rows of {setup.hidden} in {form}, sums in "
        f"bf16, {setup.top_k} of {setup.experts} experts, tensors on {setup.device}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rows", "us", "us p90", "us, plain sockets", "kB out", "kB back"):
        table.add_column(name, justify="right")
    for hop in found:
        table.add_row(
            str(hop.rows),
            f"{hop.us:.0f}",
            f"{hop.p90:.0f}",
            f"{hop.plain:.0f}",
            f"{hop.sent / 1000:.1f}",
            f"{hop.back / 1000:.1f}",
        )
    (console or wide_console(140)).print(table)


def print_reads(reads: Reads, hops: list[Hop], setup: HopSetup) -> None:
    """Beside calls of one row, where these were timed."""
    console = Console()
    size = reads.bytes / 1e6
    console.print(
        f"one row through {reads.picks} experts of {setup.hidden} x {setup.intermediate} here: "
        f"{reads.us:.0f} us; through one ({size:.0f} MB in bf16): {reads.one:.0f} us"
    )
    for hop in hops:
        if hop.rows == 1 and setup.servers >= reads.picks:
            console.print(
                f"through one each on {setup.servers} servers: {hop.us + reads.one:.0f} us, as the "
                "sum of a call and of one expert, each server with a machine of its own"
            )


def as_json(found: list[Hop], setup: HopSetup, reads: Reads | None = None) -> str:
    content = {"setup": asdict(setup), "hops": [asdict(hop) for hop in found]}
    return json.dumps({**content, "reads": asdict(reads) if reads else None}, indent=1)


if __name__ == "__main__":
    serve_nothing()
