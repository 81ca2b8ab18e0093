"""The per-module sweep: how long each kind of layer takes at n tokens, or against n cached ones, on
the device at hand.

Every call is timed alone, from an idle device to an idle device, and the median is kept: launch
costs are in it. Weights and hidden states are random, never zero, and every routing prints the
experts it hit, without which an MoE figure says nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from rorqual.bench.info import count
from rorqual.bench.layers.cases import CASES, LayerBench, LayerCase, check_memory, modules_of
from rorqual.cache.spec import DTYPE_BYTES
from rorqual.config.hf import read_config_file
from rorqual.config.model import ModelConfig
from rorqual.errors import ConfigError
from rorqual.models.hub import model_folder
from rorqual.planner.costs.costs import expected_experts
from rorqual.platforms import make_platform
from rorqual.platforms.base import Platform

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
WARM_UPS = 2
MOST_CALLS = 1000
COLLAPSED = 0.5  # of the experts that uniform routing hits
PHASES = {
    "tokens": "n tokens",
    "prefill": "one prompt of n tokens",
    "decode": "one token a request, n cached",
}


@dataclass(frozen=True)
class LayerRow:
    """One measurement. seconds: median of `calls`, `best` the fastest; flops, bytes: what the call
    computes and must read (planner/costs/costs.py).

    cache_bytes: of one token, over the module's layers; `experts_expected` under uniform routing.
    """

    module: str
    variant: str
    phase: str
    n: int
    requests: int
    seconds: float
    best: float
    calls: int
    flops: float
    bytes: float
    parameters: int
    cache_bytes: int
    experts_hit: int | None = None
    experts_expected: float | None = None

    @property
    def collapsed(self) -> bool:
        """Routing so narrow that the time says nothing about a real model."""
        return self.experts_hit is not None and self.experts_hit < COLLAPSED * (
            self.experts_expected or 0
        )

    @property
    def noisy(self) -> bool:
        return self.seconds > 2 * self.best

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "collapsed": self.collapsed, "noisy": self.noisy}


def bench(
    model: str | None = None,
    modules: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    repeats: int = 5,
    requests: int = 1,
    threads: int | None = None,
    ignore_fields: Iterable[str] = (),
) -> list[LayerRow]:
    """`sweep` of a model given by folder or Hugging Face id (None: the bundled one); only its
    config.json is read."""
    config = read_config_file(model_folder(model, weights=False), ignore_fields)
    if threads:
        torch.set_num_threads(threads)
    return sweep(config, modules, tokens or TOKENS, device, dtype, repeats, requests=requests)


def sweep(
    config: ModelConfig,
    modules: Sequence[str] | None = None,
    tokens: Sequence[int] = TOKENS,
    device: str = "auto",
    dtype: str = "auto",
    repeats: int = 5,
    min_seconds: float = 0.02,
    requests: int = 1,
    progress: Callable[[LayerRow], None] | None = None,
) -> list[LayerRow]:
    """Measure `modules` (None: all the model has), each time at least `repeats` calls and
    `min_seconds`. Raises ConfigError for a module the model lacks, CapacityError where the
    weights of one do not fit."""
    chosen = _check_modules(config, modules)
    name = config.dtype if dtype == "auto" else dtype
    _check_sizes(name, tokens, repeats, requests)
    setup = LayerBench(config, make_platform(device), getattr(torch, name), tuple(tokens), requests)
    check_memory(setup, chosen)
    rows = []
    with torch.inference_mode(), setup.platform.stream():
        for module in chosen:
            for case in CASES[module](setup):
                rows.append(
                    _row(setup, case, measure(case.run, setup.platform, repeats, min_seconds))
                )
                if progress:
                    progress(rows[-1])
    return rows


def _check_modules(config: ModelConfig, modules: Sequence[str] | None) -> list[str]:
    known = modules_of(config)
    for name in modules or ():
        if name not in known:
            raise ConfigError(
                f"module {name!r} is not one of this model's; accepted: {', '.join(known)}"
            )
    return [name for name in known if modules is None or name in modules]


def _check_sizes(dtype: str, tokens: Sequence[int], repeats: int, requests: int) -> None:
    if DTYPE_BYTES.get(dtype, 0) < 2:
        raise ConfigError(
            f"dtype={dtype!r} is not supported; accepted: auto, bfloat16, float16, float32"
        )
    for name, value in (
        *(("tokens", n) for n in tokens),
        ("repeats", repeats),
        ("requests", requests),
    ):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if not tokens:
        raise ConfigError("tokens is empty; give at least one size")


def measure(
    run: Callable[[], object], platform: Platform, repeats: int, min_seconds: float
) -> list[float]:
    """Seconds of each call."""
    for _ in range(WARM_UPS):
        run()
    platform.synchronize()
    times: list[float] = []
    while len(times) < repeats or (sum(times) < min_seconds and len(times) < MOST_CALLS):
        start = time.perf_counter()
        run()
        platform.synchronize()
        times.append(time.perf_counter() - start)
    return times


def _row(setup: LayerBench, case: LayerCase, times: list[float]) -> LayerRow:
    moe = setup.config.moe
    requests = setup.requests if case.phase == "decode" else 1
    head = (
        case.module,
        case.variant,
        case.phase,
        case.n,
        requests,
        median(times),
        min(times),
        len(times),
    )
    row = LayerRow(*head, case.cost.flops, case.cost.bytes, case.parameters, case.cache_bytes)
    if case.experts_hit is None:
        return row
    return replace(
        row,
        experts_hit=case.experts_hit,
        experts_expected=expected_experts(moe.num_experts, moe.top_k, case.n),
    )


# ---- printing


def print_table(rows: Iterable[LayerRow], console: Console | None = None) -> None:
    """One table a module and phase: sizes down, variants across, milliseconds; for experts the
    number hit in brackets."""
    console = console or Console()
    groups: dict[tuple[str, str], list[LayerRow]] = {}
    for row in rows:
        groups.setdefault((row.module, row.phase), []).append(row)
    for (module, phase), group in groups.items():
        requests = f", {group[0].requests} requests" if group[0].requests > 1 else ""
        console.print(f"\n[bold]{module}[/bold]: ms, {PHASES[phase]}{requests}")
        console.print(_table(group))
        if any(row.collapsed for row in group):
            console.print(
                "! collapsed routing: fewer than half the experts that uniform routing would "
                "hit; do not plan with these figures"
            )
        if any(row.noisy for row in group):
            console.print("~ more than twice the fastest call: the machine was busy")


def _table(rows: list[LayerRow]) -> Table:
    variants = {row.variant: row for row in rows}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("n", justify="right")
    for variant in variants:
        table.add_column(variant, justify="right")
    table.add_row("parameters", *(count(row.parameters) for row in variants.values()), style="dim")
    if any(row.cache_bytes for row in rows):
        table.add_row(
            "bytes a token", *(f"{row.cache_bytes:,}" for row in variants.values()), style="dim"
        )
    for n in dict.fromkeys(row.n for row in rows):
        by_variant = {row.variant: row for row in rows if row.n == n}
        table.add_row(str(n), *(_cell(by_variant[variant]) for variant in variants))
    return table


def _cell(row: LayerRow) -> str:
    hit = "" if row.experts_hit is None else f" ({row.experts_hit}{'!' if row.collapsed else ''})"
    return f"{row.seconds * 1e3:.4g}{'~' if row.noisy else ''}{hit}"


def as_json(rows: Iterable[LayerRow], **about: object) -> str:
    about = {**about, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return json.dumps({**about, "rows": [row.as_dict() for row in rows]}, indent=1)
