"""`rorqual bench calibrate`: measure this machine's GPU and write the YAML that the planner reads.

Bandwidth is from a large copy (read and write counted), arithmetic from the GEMMs of real layers at
several row counts, each the median of repeated calls over more data than any cache holds. The
shortest kernel and the gap between launches are from sequences of tiny kernels. Collectives are
measured if several ranks were started (torchrun). All data is random: GEMMs of zeros run faster.
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rorqual.config.hardware import DeviceSpec, load_device
from rorqual.errors import ConfigError
from rorqual.platforms import make_platform
from rorqual.platforms.base import Platform

CARD_SHAPES = [
    (2112, 7168),
    (3072, 1536),
    (7168, 2048),
    (4096, 7168),
    (7168, 16384),
    (24576, 1536),
    (5120, 2048),
    (2048, 4096),
]
CARD_ROWS = [1, 16, 64, 128, 512, 4096]
HOST_SHAPES = [(1024, 256), (512, 1024), (1024, 1024), (2048, 1024)]
HOST_ROWS = [1, 8, 32, 128]
ROTATED = 256 * 2**20  # bytes of rotated weights, larger than every cache


@dataclass
class Clock:
    """Median seconds of a call, by events on a GPU and by the host's clock elsewhere; a call
    over `repeats` runs in one measurement."""

    platform: Platform
    samples: int = 7

    def seconds(self, calls: list[Callable[[], Any]], repeats: int = 1) -> float:
        for call in calls[:2]:
            call()
        self.platform.synchronize()
        return statistics.median(self._once(calls, repeats) for _ in range(self.samples)) / (
            repeats * len(calls)
        )

    def _once(self, calls: list[Callable[[], Any]], repeats: int) -> float:
        if self.platform.name != "cuda":
            start = time.perf_counter()
            for _ in range(repeats):
                for call in calls:
                    call()
            return time.perf_counter() - start
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(repeats):
            for call in calls:
                call()
        last.record()
        self.platform.synchronize()
        return first.elapsed_time(last) * 1e-3


@dataclass
class Calibration:
    """What was measured: bytes a second, operations a second by dtype, seconds, products in us,
    collectives in us."""

    bandwidth: float = 0.0
    flops: dict[str, float] = field(default_factory=dict)
    kernel: float = 0.0
    launch_gap: float = 0.0
    rows: list[int] = field(default_factory=list)
    gemm: dict[str, list[list[float]]] = field(default_factory=dict)
    collectives: dict[str, dict[int, list[list[float]]]] = field(default_factory=dict)


def measure(platform: Platform, limit: float = 240.0) -> Calibration:
    """Everything, in the order of what the planner needs most; products stop after `limit`
    seconds."""
    clock = Clock(platform)
    found = Calibration()
    began = time.monotonic()
    found.bandwidth = bandwidth(clock)
    found.launch_gap = launch_gap(clock)
    found.kernel = kernel_seconds(clock)
    on_card = platform.name == "cuda"
    shapes, found.rows = (CARD_SHAPES, CARD_ROWS) if on_card else (HOST_SHAPES, HOST_ROWS)
    for dtype in (
        ("bfloat16", "fp8")
        if on_card and has_fp8()
        else ("bfloat16",)
        if on_card
        else ("bfloat16", "float32")
    ):
        for rows, columns in shapes:
            if time.monotonic() - began > limit:
                break
            times = [product(clock, dtype, count, rows, columns) for count in found.rows]
            found.gemm.setdefault(dtype, []).append(
                [rows, columns, *(round(seconds * 1e6, 3) for seconds in times)]
            )
            best = max(
                2.0 * count * rows * columns / seconds
                for count, seconds in zip(found.rows, times, strict=True)
            )
            found.flops[dtype] = max(found.flops.get(dtype, 0.0), best)
    found.collectives = collectives(clock)
    return found


def bandwidth(clock: Clock) -> float:
    """Bytes read and written a second by a copy of 1 GiB on a GPU, 256 MiB on a host."""
    size = (1 << 30) if clock.platform.name == "cuda" else (1 << 28)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=clock.platform.device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds([lambda: target.copy_(source)])


def launch_gap(clock: Clock) -> float:
    """Seconds between kernels that are launched one by one and do next to nothing."""
    data = torch.zeros(16, device=clock.platform.device)
    return clock.seconds([lambda: data.add_(1.0)], repeats=500)


def kernel_seconds(clock: Clock) -> float:
    """The shortest kernel in a captured train; where nothing can be captured it is the launch
    gap."""
    if not clock.platform.has_graphs:
        return launch_gap(clock)
    data = torch.zeros(16, device=clock.platform.device)

    def train() -> Tensor:
        for _ in range(200):
            data.add_(1.0)
        return data

    return clock.seconds([clock.platform.capture(train)]) / 200


def has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9) and hasattr(torch, "_scaled_mm")


def product(clock: Clock, dtype: str, count: int, rows: int, columns: int) -> float:
    """Seconds of [count, columns] x [rows, columns]^T."""
    device = clock.platform.device
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    copies = max(1, min(16, ROTATED // max(rows * columns * kind.itemsize, 1)))
    x = torch.randn(count, columns, device=device, dtype=kind)
    held = [torch.randn(rows, columns, device=device, dtype=kind) for _ in range(copies)]
    if dtype != "fp8":
        return clock.seconds([partial(torch.nn.functional.linear, x, weight) for weight in held])
    one = torch.ones((), device=device)
    # this product wants multiples of 16 rows
    padded = torch.nn.functional.pad(x, (0, 0, 0, -count % 16)).to(torch.float8_e4m3fn)
    narrow = [weight.to(torch.float8_e4m3fn).t() for weight in held]
    scaled_mm = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return clock.seconds([partial(scaled_mm, padded, weight) for weight in narrow])


def collectives(clock: Clock) -> dict[str, dict[int, list[list[float]]]]:
    """us by bytes of the whole tensor, where torchrun started several ranks; empty otherwise."""
    import torch.distributed as dist

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        return {}
    if not dist.is_initialized():
        dist.init_process_group("nccl" if clock.platform.name == "cuda" else "gloo")
    found: dict[str, dict[int, list[list[float]]]] = {}
    sizes = [
        2**power
        for power in (
            (12, 14, 17, 20, 23, 26) if clock.platform.name == "cuda" else (10, 14, 18, 22)
        )
    ]
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        with suppress(RuntimeError, NotImplementedError):  # gloo lacks some of them
            found[kind] = {
                world: [
                    [size, round(_collective(clock, kind, size, world) * 1e6, 2)] for size in sizes
                ]
            }
    return found


def _collective(clock: Clock, kind: str, size: int, world: int) -> float:
    import torch.distributed as dist

    whole = torch.randn(size // 2, device=clock.platform.device).to(torch.bfloat16)
    part = whole[: whole.numel() // world].clone()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(whole.clone(), whole),
    }
    dist.barrier()
    return clock.seconds([calls[kind]], repeats=5)


# ---- the file


def as_card(
    found: Calibration, platform: Platform, name: str, base: DeviceSpec | None
) -> dict[str, Any]:
    """The entry for a file of devices. With a `base` GPU, peaks and links are from its data and the
    measured figures are fractions of them; without one the measured figures are the peaks, and
    links are loopback's until the user edits them."""
    today = datetime.date.today().isoformat()
    what = f"rorqual bench calibrate, {device_name(platform)}, torch {torch.__version__}, {today}"
    entry: dict[str, Any] = {
        "title": f"{device_name(platform)} as measured",
        "measured": base.name if base else name,
    }
    entry["memory_gib"] = round(platform.total_memory() / 2**30, 2)
    entry["kernel_us"] = round(found.kernel * 1e6, 3)
    entry["launch_gap_us"] = round(found.launch_gap * 1e6, 3)
    if base:
        entry |= {
            "based_on": base.name,
            "achieved_bandwidth": round(min(found.bandwidth / base.bandwidth, 1.0), 3),
        }
        entry["achieved_flops"] = {
            dtype: round(min(rate / base.peak(dtype), 1.0), 3)
            for dtype, rate in found.flops.items()
        }
    else:
        entry |= {"bandwidth_gb_s": round(found.bandwidth / 1e9, 1), "achieved_bandwidth": 1.0}
        entry["tflops"] = {dtype: round(rate / 1e12, 4) for dtype, rate in found.flops.items()}
        entry["achieved_flops"] = dict.fromkeys(found.flops, 1.0)
        entry["link"] = {"gb_s": 5, "latency_us": 100, "span": 1}
        entry["network"] = {"gb_s": 1.25, "latency_us": 100}
    entry["gemm"] = {"m": found.rows, "tables": found.gemm}
    if found.collectives:
        entry["collectives"] = found.collectives
    links = base.sources["link"] if base else "not measured: loopback assumed"
    network = base.sources["network"] if base else "not measured: 10 Gb/s Ethernet assumed"
    entry["sources"] = {
        "memory": what,
        "bandwidth": what,
        "flops": what,
        "link": links,
        "network": network,
    }
    return {name: entry}


def device_name(platform: Platform) -> str:
    if platform.name == "cuda":
        return torch.cuda.get_device_name(platform.device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    return f"CPU, {torch.get_num_threads()} threads"


def run(
    device: str = "auto",
    name: str = "local",
    based_on: str | None = None,
    out: Path | None = None,
    limit: float = 240.0,
) -> Path:
    """Measure and write; rank 0 writes where there are several. Returns the file. Raises
    ConfigError for a bad name or GPU."""
    import yaml

    if not name or not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"name={name!r} must be letters, digits, - and _")
    base = load_device(based_on) if based_on else None
    platform = make_platform(device)
    found = measure(platform, limit)
    path = out or Path(f"{name}.yaml")
    if int(os.environ.get("RANK", "0")) == 0:
        path.write_text(
            yaml.safe_dump(
                as_card(found, platform, name, base),
                sort_keys=False,
                default_flow_style=None,
                width=140,
            )
        )
    return path
