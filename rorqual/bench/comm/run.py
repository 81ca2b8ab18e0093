"""`rorqual bench comm`: times of collectives and exchanges between ranks, in microseconds, and the
bytes that each rank sends.

Starts its ranks as processes of this host, connected over loopback, or joins a group that torchrun
has started (RANK is set). There is no expert computation: each exchange returns its input, so its
time is that of the network and of sorting tokens. On GPUs calls that can be captured are timed
inside a CUDA graph; exchanges through shared GPU memory have separate rows (`symm`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rorqual.bench.comm.exchanges import Call, ExchangeCase, Share, Sizes, exchanges, share_cards
from rorqual.bench.wide_console import wide_console
from rorqual.config.parallel import ParallelConfig
from rorqual.config.process import end_process
from rorqual.errors import ConfigError
from rorqual.ops import reference
from rorqual.parallel.collectives import Axis
from rorqual.parallel.group_axis import GroupAxis
from rorqual.parallel.mesh import Mesh, ProcessGroups


@dataclass(frozen=True)
class CommSetup:
    """What to measure: `rows` a rank of `hidden` columns; an expert layer of `experts`, `top_k`
    a token."""

    ranks: int
    device: str
    rows: tuple[int, ...] = (1, 16, 128)
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    repeats: int = 10
    dtype: str = "bfloat16"
    calls: int = 20  # in one timing


@dataclass(frozen=True)
class CommRow:
    """Median of the slowest rank. `sent`: bytes that leave a rank, as parallel/comm_counters.py
    counts them; over shared memory, of the rows routed to other ranks. peer_us: DeepEP's published
    time."""

    name: str
    ranks: int
    rows: int
    us: float
    sent: int
    captured: bool = False
    peer_us: float | None = None

    @property
    def gb_s(self) -> float:
        return self.sent / self.us / 1e3


def bench(setup: CommSetup) -> list[CommRow]:
    """Rows of all measurements, on rank 0; other ranks of a torchrun group get none. Raises
    ConfigError for impossible sizes."""
    if setup.ranks < 2:
        raise ConfigError(
            f"ranks={setup.ranks} must be at least 2: a single rank has nobody to talk to"
        )
    if setup.experts % setup.ranks:
        raise ConfigError(f"experts={setup.experts} must be a multiple of ranks={setup.ranks}")
    if (
        setup.device == "cuda"
        and torch.cuda.device_count() < setup.ranks
        and "RANK" not in os.environ
    ):
        raise ConfigError(
            f"ranks={setup.ranks} exceeds the {torch.cuda.device_count()} GPUs of this host"
        )
    if "RANK" in os.environ:
        return _joined(setup)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(setup, rank, folder), daemon=True)
            for rank in range(setup.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise ConfigError(
                f"ranks ended with {[process.exitcode for process in processes]}; their "
                "messages stand above"
            )
        return [CommRow(**row) for row in json.loads((Path(folder) / "rows").read_text())]


def _rank(setup: CommSetup, rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if setup.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        _backend(setup), init_method=f"file://{folder}/store", rank=rank, world_size=setup.ranks
    )
    rows = measure(setup)
    if rank == 0:
        (Path(folder) / "rows").write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()
    end_process(0)


def _joined(setup: CommSetup) -> list[CommRow]:
    if setup.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(_backend(setup))
    rows = measure(replace(setup, ranks=dist.get_world_size()))
    chief = dist.get_rank() == 0
    dist.destroy_process_group()
    return rows if chief else []


def _backend(setup: CommSetup) -> str:
    return "nccl" if setup.device == "cuda" else "gloo"


# ---- what is measured


@torch.inference_mode()
def measure(setup: CommSetup, share: Share | None = None) -> list[CommRow]:
    """Call on every rank; the result is the same on all. `share`: gives ranks shared memory without
    GPUs."""
    groups = ProcessGroups()
    found = []
    sizes = Sizes(setup.ranks, setup.hidden, setup.experts, setup.top_k, min(10, setup.calls))
    share = share_cards if setup.device == "cuda" else share
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if setup.device == "cuda"
        else torch.device("cpu")
    )
    mesh = Mesh.of(ParallelConfig(tp=setup.ranks), groups=groups)
    for rows in setup.rows:
        x = torch.randn(rows, setup.hidden, dtype=getattr(torch, setup.dtype), device=device)
        for case in chain(
            _collectives(mesh.tp, x), _fused(mesh, x), exchanges(sizes, groups, x, share)
        ):
            found.append(_timed(setup, case, rows))
    return found


def _collectives(axis: Axis, x: Tensor) -> Iterator[ExchangeCase]:
    # sums in place stay zero
    zeros = torch.zeros_like(x)
    every = x.repeat(axis.size, 1)
    yield ExchangeCase("all_reduce", axis, lambda: axis.all_reduce(zeros))
    yield ExchangeCase(
        "all_reduce + add + norm",
        axis,
        lambda: axis.add_norm(zeros, x, x[0], 1e-6, reference.add_norm),
    )
    yield ExchangeCase("all_gather", axis, lambda: axis.all_gather(x))
    yield ExchangeCase("reduce_scatter", axis, lambda: axis.reduce_scatter(every))
    yield ExchangeCase(
        "all_to_all", axis, lambda: axis.all_to_all_fixed(every.view(axis.size, -1, x.shape[1]))
    )


def _fused(mesh: Mesh, x: Tensor) -> Iterator[ExchangeCase]:
    """The same in one kernel over symmetric memory, on GPUs."""
    if not x.is_cuda or not isinstance(mesh.tp, GroupAxis):
        return
    axis = mesh.tp
    zeros = torch.zeros_like(x)
    mesh.fuse_all_reduce(x.shape[0], x.shape[1], x.dtype, x.device)
    yield ExchangeCase(
        "all_reduce + add + norm, fused",
        axis,
        lambda: axis.add_norm(zeros, x, x[0], 1e-6, reference.add_norm),
    )
    axis.fused = None


# ---- how


def _timed(setup: CommSetup, case: ExchangeCase, rows: int) -> CommRow:
    capture = case.capturable and setup.device == "cuda"
    case.call()
    case.axis.traffic.reset()
    case.call()
    sent = case.axis.traffic.total if case.sent is None else case.sent
    seconds = _captured(case.call, setup) if capture else _called(case.call, setup)
    slowest = torch.tensor(
        [seconds], dtype=torch.float64, device="cuda" if setup.device == "cuda" else "cpu"
    )
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return CommRow(
        case.name, case.axis.size, rows, slowest.item() * 1e6, sent, capture, case.peer_us
    )


def _called(call: Call, setup: CommSetup) -> float:
    times = []
    for _ in range(setup.repeats):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(setup.calls):
            call()
        if setup.device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / setup.calls)
    return statistics.median(times)


def _captured(call: Call, setup: CommSetup) -> float:
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()  # calls of a group follow one another, also from stream to stream
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(setup.calls):
            call()
    times = []
    for _ in range(setup.repeats):
        dist.barrier()
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / setup.calls / 1e3)
    return statistics.median(times)


def print_table(rows: Sequence[CommRow], setup: CommSetup, console: Console | None = None) -> None:
    if not rows:
        return
    layer = f"{setup.experts} experts, {setup.top_k} a token"
    title = (
        f"{rows[0].ranks} ranks, {_backend(setup)}, rows of {setup.hidden} {setup.dtype}, {layer}"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("call", "rows a rank", "us", "DeepEP us", "bytes sent", "GB/s", ""):
        table.add_column(column, justify="left" if column == "call" else "right")
    for row in rows:
        peer = "" if row.peer_us is None else f"{row.peer_us:.1f}"
        table.add_row(
            row.name,
            str(row.rows),
            f"{row.us:.1f}",
            peer,
            f"{row.sent:,}",
            f"{row.gb_s:.2f}",
            "graph" if row.captured else "",
        )
    (console or wide_console(140)).print(table)


def as_json(rows: Sequence[CommRow], setup: CommSetup) -> str:
    about = {**asdict(setup), "torch": torch.__version__, "python": sys.version.split()[0]}
    return json.dumps(
        {**about, "rows": [{**asdict(row), "gb_s": row.gb_s} for row in rows]}, indent=1
    )
