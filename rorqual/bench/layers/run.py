"""The per-module sweep: time of each kind of layer with n tokens, or n cached ones, on the current
device.

Results are medians. On a device with graphs, decode cases and cases without a cache are captured
and replayed (timing.py); prefill and embeddings are timed per call, including launches. Weights and
hidden states are random, never zero, and every routing prints the experts hit, without which an MoE
figure is meaningless.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from rorqual.bench.info import count
from rorqual.bench.layers.cases import CASES, LayerBench, LayerCase, check_memory, modules_of
from rorqual.bench.layers.timing import (
    TIMINGS,
    DeviceRates,
    compile_ahead,
    measure,
    measure_captured,
    threads,
)
from rorqual.cache.spec import DTYPE_BYTES
from rorqual.config.hf import read_config_file
from rorqual.config.model import ModelConfig
from rorqual.errors import ConfigError
from rorqual.models.hub import model_folder
from rorqual.planner.costs.costs import expected_experts
from rorqual.platforms import make_platform

log = logging.getLogger("rorqual.bench")

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CALLED = ("embed_tokens",)  # modules whose variants are compared with what a host does
COLLAPSED = 0.5  # of the experts that uniform routing hits
TOLD = {"call": "call by call", "graph": "captured, in a row"}
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
    timing: call or graph. floor: seconds, where the device's rates were measured.
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
    timing: str = "call"
    floor: float | None = None

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
    ignore_fields: Iterable[str] = (),
    timing: str = "auto",
    limit: float = 600.0,
) -> list[LayerRow]:
    """`sweep` of a model given by folder or Hugging Face id (None: the bundled one); only its
    config.json is read."""
    config = read_config_file(model_folder(model, weights=False), ignore_fields)
    return sweep(
        config,
        modules,
        tokens or TOKENS,
        device,
        dtype,
        repeats,
        requests=requests,
        timing=timing,
        limit=limit,
    )


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
    timing: str = "auto",
    limit: float = 600.0,
) -> list[LayerRow]:
    """Measure `modules` (None: all the model has), each time at least `repeats` calls and
    `min_seconds`; none is begun after `limit` seconds. Raises ConfigError for a module the model
    lacks, CapacityError where the weights of one do not fit."""
    chosen = _check_modules(config, modules)
    name = config.dtype if dtype == "auto" else dtype
    _check_sizes(name, tokens, repeats, requests)
    platform = make_platform(device)
    if timing not in TIMINGS or (timing == "graph" and not platform.has_graphs):
        accepted = TIMINGS if platform.has_graphs else TIMINGS[:2]
        raise ConfigError(f"timing={timing!r}; accepted here: {', '.join(accepted)}")
    setup = LayerBench(config, platform, getattr(torch, name), tuple(tokens), requests)
    check_memory(setup, chosen)
    began = time.monotonic()
    rows = []
    with torch.inference_mode(), platform.stream():
        rates = DeviceRates.measured(platform) if platform.name == "cuda" else None
        for module in chosen:
            if time.monotonic() - began > limit:
                log.warning("%s was left out: %g s are over", module, limit)
                continue
            cases = list(CASES[module](setup))
            compile_ahead(setup.build.ops, [case.run for case in cases])
            while cases:  # the last one holds the module's weights
                if time.monotonic() - began > limit:
                    log.warning("%s was cut short: %g s are over", module, limit)
                    cases.clear()
                    break
                rows.append(_measured(setup, cases.pop(0), repeats, min_seconds, timing, rates))
                if progress:
                    progress(rows[-1])
            platform.release_memory()
    return rows


def _measured(
    setup: LayerBench,
    case: LayerCase,
    repeats: int,
    min_seconds: float,
    timing: str,
    rates: DeviceRates | None,
) -> LayerRow:
    called = case.phase == "prefill" or case.module in CALLED
    how = timing if timing != "auto" else "call" if called else "graph"
    if case.on_host or not setup.platform.has_graphs:
        how = "call"
    times: list[float] = []
    if how == "graph":
        try:
            times = measure_captured(case.run, setup.platform, repeats, min_seconds)
        except RuntimeError as error:
            log.warning("%s %s is called, not captured: %s", case.module, case.variant, error)
            how = "call"
    if not times:
        with threads(1 if case.on_host else None):
            times = measure(case.run, setup.platform, repeats, min_seconds)
    # operations of quantized weights have another rate than those in bf16
    judged = rates is not None and not case.on_host and case.variant != "pinned"
    floor = rates.floor(case.cost) if rates is not None and judged else None
    return replace(_row(setup, case, times), timing=how, floor=floor)


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
        how = " and ".join(sorted({TOLD[row.timing] for row in group}))
        console.print(f"\n[bold]{module}[/bold]: ms, {PHASES[phase]}{requests}; {how}")
        console.print(_table(group))
        if any(row.collapsed for row in group):
            console.print(
                "! collapsed routing: fewer than half the experts that uniform routing would "
                "hit; do not plan with these figures"
            )
        if any(row.floor for row in group):
            console.print("%: of the floor by bytes and bf16 operations, at rates measured here")
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
        found = map(by_variant.get, variants)
        table.add_row(str(n), *("" if row is None else _cell(row) for row in found))
    return table


def _cell(row: LayerRow) -> str:
    hit = "" if row.experts_hit is None else f" ({row.experts_hit}{'!' if row.collapsed else ''})"
    share = "" if row.floor is None else f" {100 * row.floor / row.seconds:.0f}%"
    return f"{row.seconds * 1e3:.4g}{'~' if row.noisy else ''}{hit}{share}"


def as_json(rows: Iterable[LayerRow], **about: object) -> str:
    about = {**about, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return json.dumps({**about, "rows": [row.as_dict() for row in rows]}, indent=1)
