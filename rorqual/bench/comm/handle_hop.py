"""Round-trip time of rows to an expert server's GPU over shared memory, without expert computation:
many sequential hops in one captured graph, with a server that answers at once.

The server is another process, on another GPU or on the same one (which the two then share, so times
are meaningless and only the rows are checked). Run as a module this file is the server."""

from __future__ import annotations

import json
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rorqual.bench.comm.server_processes import read_settings, serve, server_processes
from rorqual.ops.reference import ACTIVATION_BLOCK, dequantize_activation, quantize_activation
from rorqual.parallel.mesh import SINGLE_LAYOUT
from rorqual.parallel.remote.config import RemoteConfig
from rorqual.parallel.remote.exchange import RemoteExchange, RemoteLanes
from rorqual.parallel.remote.group.exchange import GroupExchange
from rorqual.parallel.remote.handle_exchange import HandleExchange
from rorqual.parallel.remote.handles import HandleCalls
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.platforms import make_platform
from rorqual.platforms.base import Platform

FINGERPRINT = {"format": "handle hop"}
HopExchanges = Sequence[HandleExchange] | Sequence[GroupExchange]  # of LAYERS
DTYPE = torch.bfloat16
SILENT = 0  # a layer that computes nothing and returns stale memory
ECHO = 1  # one that answers the row times its weights
LAYERS = (SILENT, ECHO)
WARM = 3
SILENCE_SECONDS = 30.0  # compiling on a busy machine is no reason to leave a server out
NVLINK = 450e3  # bytes per us in one direction: NVLink 4


@dataclass(frozen=True)
class HandleHopSetup:
    """experts: of a layer, distributed over `servers` processes; each row is routed to `top_k` of
    them. hops: in one graph. device, server_device: such as cuda:0. busy: us for which a server's
    GPU computes before it answers, as experts would."""

    rows: tuple[int, ...]
    servers: int = 1
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    repeats: int = 20
    hops: int = 200
    device: str = "cuda:0"
    server_device: str = "cuda:1"
    own_gpus: bool = False  # servers have the GPUs from server_device on
    busy: float = 0.0

    def device_of_server(self, number: int) -> str:
        kind, colon, first = self.server_device.partition(":")
        return f"{kind}:{int(first) + number}" if self.own_gpus and colon else self.server_device

    @property
    def one_gpu(self) -> bool:
        return torch.device(self.device) == torch.device(self.server_device)


@dataclass(frozen=True)
class HandleHop:
    """us: of a round trip, median over graphs; least: the fastest graph's; both without the time
    for which servers were told to compute. sent, back: bytes, all servers together. floor: us for
    these bytes at NVLINK, one direction after the other. right: whether the returned rows were
    correct."""

    rows: int
    fp8: bool
    us: float
    least: float
    sent: int
    back: int
    floor: float
    right: bool


MakeExchanges = Callable[
    [HandleHopSetup, Sequence[int], str, Platform, bool], AbstractContextManager[HopExchanges]
]


class EchoExperts:
    """Where an expert server expects a shard."""

    def __init__(
        self,
        platform: Platform,
        hidden: int,
        num_experts: int,
        held: Sequence[int],
        top_k: int,
        busy: float = 0.0,
    ):
        self.platform = platform
        self.config = SimpleNamespace(
            hidden_size=hidden, moe=SimpleNamespace(top_k=top_k, num_experts=num_experts)
        )
        self.dtype = DTYPE
        self.layers = dict.fromkeys(LAYERS)
        self.held = tuple(held)
        self.max_slots = len(self.held)
        places = torch.full((num_experts + 1,), -1)
        places[list(held)] = torch.arange(len(held))
        self.places = places.to(platform.device)
        self.answer = torch.zeros(0, hidden, dtype=DTYPE, device=platform.device)
        self.cycles = cycles_of(busy, platform)

    def room(self, rows: int) -> None:
        self.answer = torch.zeros(
            rows, self.config.hidden_size, dtype=DTYPE, device=self.platform.device
        )

    def holdings(self) -> dict[int, tuple[int, ...]]:
        return dict.fromkeys(LAYERS, self.held)

    def places_of(self, layer: int) -> Tensor:
        return self.places

    def run(self, layer: int, slots: Tensor, weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
        if layer == SILENT:
            if self.cycles:
                torch.cuda._sleep(self.cycles)
            return self.answer[: slots.shape[0]]
        wide = (
            dequantize_activation(rows[0], rows[1], DTYPE).float()
            if len(rows) == 2
            else rows[0].float()
        )
        return (wide * share(weights, slots >= 0)).to(DTYPE)


def cycles_of(busy: float, platform: Platform) -> int:
    """Of the GPU's clock in `busy` us, measured while it runs at full speed."""
    if not busy:
        return 0
    cycles = 1 << 20
    with platform.stream():
        times = []
        for _ in range(200):  # a second: clocks have risen by the end
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            times.append(100 * start.elapsed_time(end))
    return round(cycles * busy / statistics.median(times[100:]))


def share(weights: Tensor, here: Tensor) -> Tensor:
    """[T, 1]: factor of a row at a server that holds some of its experts."""
    return torch.where(here, weights, 0.0).sum(1, keepdim=True)


def serve_echo() -> None:
    """Main of a server (server_processes.py)."""
    settings = read_settings()
    platform = make_platform(settings["device"])
    shard: Any = EchoExperts(
        platform,
        settings["hidden"],
        settings["experts"],
        settings["held"],
        settings["top_k"],
        settings["busy"],
    )
    shard.room(settings["max_rows"])
    serve(shard, settings, FINGERPRINT)


def _server_settings(setup: HandleHopSetup, secret: str) -> list[dict[str, Any]]:
    """To each server."""
    return [
        {
            "device": setup.device_of_server(number),
            "hidden": setup.hidden,
            "experts": setup.experts,
            "held": list(range(number, setup.experts, setup.servers)),
            "top_k": setup.top_k,
            "busy": setup.busy,
            "secret": secret,
            "max_rows": max(setup.rows),
        }
        for number in range(setup.servers)
    ]


def bench(
    setup: HandleHopSetup,
    forms: Sequence[bool] = (True, False),
    module: str = __name__,
    exchanges: MakeExchanges | None = None,
) -> list[HandleHop]:
    """forms: rows in fp8 or not. module: the servers' main. exchanges: others than over shared
    memory."""
    make = exchanges or _exchanges
    secret = secrets.token_hex(16)
    platform = make_platform(setup.device)
    servers = server_processes(module, _server_settings(setup, secret))
    with servers as ports, torch.inference_mode(), platform.stream():
        found = []
        for fp8 in forms:
            with make(setup, ports, secret, platform, fp8) as layers:
                found += [_hop(setup, layers, rows, fp8) for rows in setup.rows]
        return found


@contextmanager
def _exchanges(
    setup: HandleHopSetup, ports: Sequence[int], secret: str, platform: Platform, fp8: bool
) -> Iterator[list[HandleExchange]]:
    from rorqual.ops.triton.comm.remote_dispatch import LaneAreas

    areas = LaneAreas(max(setup.rows), setup.hidden, setup.top_k, DTYPE.itemsize)
    calls = HandleCalls(platform, areas, DTYPE, fp8, 1, LAYERS, setup.experts)
    config = RemoteConfig(
        tuple(("127.0.0.1", port) for port in ports),
        secret.encode(),
        timeout=SILENCE_SECONDS,
        transport="handles",
    )
    servers = ExpertServers(config, FINGERPRINT, LAYERS, setup.experts, 1, max(setup.rows), calls)
    try:
        servers.wait_for_all(60)
        calls.decide(servers, must=True)
        lanes = RemoteLanes(1)
        yield [
            HandleExchange(RemoteExchange(servers, lanes, layer, platform.device, fp8), calls)
            for layer in LAYERS
        ]
        platform.synchronize()
    finally:
        servers.close()


def _hop(setup: HandleHopSetup, layers: HopExchanges, rows: int, fp8: bool) -> HandleHop:
    calls = layers[0].calls
    device = calls.device
    epoch = calls.begin()
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, setup.hidden, generator=generator).to(DTYPE).to(device)
    scores = torch.rand(rows, setup.experts, generator=generator)
    ids = scores.topk(setup.top_k, 1).indices.to(device)
    weights = torch.rand(rows, setup.top_k, generator=generator).to(device)

    def hops(layer: int, count: int) -> Tensor:
        out = x
        for _ in range(count):
            exchange = layers[layer]
            out = exchange.combine(exchange.dispatch(x, ids, weights, SINGLE_LAYOUT))
        return out

    wanted = _echoed(setup, x, ids, weights, fp8)
    right = torch.allclose(hops(ECHO, 1), wanted, rtol=1e-2, atol=1e-2)
    echo = _graph(layers, lambda: hops(ECHO, 3))
    right = right and torch.allclose(echo(), wanted, rtol=1e-2, atol=1e-2)
    times = sorted(_time(layers, hops, setup))
    holders = ids % setup.servers
    copies = sum(int((holders == server).any(1).sum()) for server in range(setup.servers))
    row = setup.hidden + 4 * -(-setup.hidden // ACTIVATION_BLOCK) if fp8 else 2 * setup.hidden
    sent = copies * row + setup.servers * rows * 8 * setup.top_k
    back = copies * 2 * setup.hidden
    # raises if a server was dropped meanwhile
    calls.check(epoch, int(calls.sent[0, 0]))
    return HandleHop(
        rows, fp8, statistics.median(times), times[0], sent, back, (sent + back) / NVLINK, right
    )


def _echoed(setup: HandleHopSetup, x: Tensor, ids: Tensor, weights: Tensor, fp8: bool) -> Tensor:
    wide = dequantize_activation(*quantize_activation(x), DTYPE).float() if fp8 else x.float()
    total = torch.zeros_like(wide)
    for server in range(setup.servers):
        total += (wide * share(weights, ids % setup.servers == server)).to(DTYPE).float()
    return total.to(DTYPE)


def _graph(layers: HopExchanges, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Captures if the device has graphs. Each call of the result first announces the step to the
    servers."""
    calls = layers[0].calls
    if not calls.platform.has_graphs:
        return work
    return calls.capture(work)


def _time(
    layers: HopExchanges, hops: Callable[[int, int], Tensor], setup: HandleHopSetup
) -> Iterator[float]:
    """us of a hop, for each graph."""
    run = _graph(layers, lambda: hops(SILENT, setup.hops))
    platform = layers[0].calls.platform
    for number in range(WARM + setup.repeats):
        platform.synchronize()
        if platform.has_graphs:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            us = 1e3 * start.elapsed_time(end)
        else:
            before = time.perf_counter()
            run()
            us = 1e6 * (time.perf_counter() - before)
        if number >= WARM:
            yield us / setup.hops - setup.busy


def print_table(found: list[HandleHop], setup: HandleHopSetup, way: str = "") -> None:
    """way: the transport, if not shared memory."""
    title = (
        f"{setup.servers} expert servers on {setup.server_device}{way}, the caller on "
        f"{setup.device}, "
        f"rows of {setup.hidden}, sums in bf16, {setup.top_k} of {setup.experts} experts, "
        f"{setup.hops} hops {'a graph' if setup.device != 'cpu' else 'one after the other'}"
    )
    if setup.busy:
        title += f"; servers compute for {setup.busy:g} us, which are taken off"
    if setup.one_gpu and setup.device != "cpu":
        title += "; both on one GPU, where times mean nothing"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rows", "form", "us", "us least", "us at 450 GB/s", "kB out", "kB back", "rows"):
        table.add_column(name, justify="right")
    for hop in found:
        table.add_row(
            str(hop.rows),
            "fp8" if hop.fp8 else "bf16",
            f"{hop.us:.1f}",
            f"{hop.least:.1f}",
            f"{hop.floor:.2f}",
            f"{hop.sent / 1000:.1f}",
            f"{hop.back / 1000:.1f}",
            "right" if hop.right else "WRONG",
        )
    Console(width=120).print(table)


def as_json(found: list[HandleHop], setup: HandleHopSetup) -> str:
    return json.dumps({"setup": asdict(setup), "hops": [asdict(hop) for hop in found]}, indent=1)


if __name__ == "__main__":
    serve_echo()
