"""`rorqual bench kernels --tune`: search configurations of GEMMs, experts and routers for a shape,
and store the best for this GPU.

Candidates are compiled in parallel and timed as the cases of gemm_and_experts.py; the fastest one
with the same output as the current configuration is stored (rorqual/ops/triton/runtime/tuning.py).
Attention's few configurations are tried in attention.py.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rorqual.bench.kernels import gemm_and_experts as cases
from rorqual.bench.kernels import moe
from rorqual.bench.kernels.gemm_and_experts import Call, Draw, ExpertShape
from rorqual.config.model import MoEConfig
from rorqual.ops.reference import ExpertWeights
from rorqual.ops.triton.gemm import fp8_gemm, gemv, int4_gemm
from rorqual.ops.triton.gemm.linear_plan import (
    LinearPlan,
    PersistentPlan,
    SlicedPlan,
    StreamKPlan,
    TilePlan,
)
from rorqual.ops.triton.moe import grouped_gemm as ex
from rorqual.ops.triton.moe import router_gemm as gating
from rorqual.ops.triton.moe import small_batch as direct
from rorqual.ops.triton.moe import topk
from rorqual.ops.triton.moe.align import moe_align_block_size
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import is_hopper, multiprocessors, next_power

# how far a kept configuration's output may be from that of the one in use
ALIKE = {"bf16": 1e-4, "fp8": 1e-3, "int4": 1e-4}
SHOWN = 5
Results = list[tuple[float, Any]]  # (us, configuration), the fastest first


@dataclass(frozen=True)
class TuningSearch:
    """A shape to search for. name: that of its case."""

    name: str
    run: Callable[[torch.device], None]


def timed(name: str, options: list[Any], calls_of: Callable[[Any], list[Call]]) -> Results:
    """Compile all candidates in parallel, time each, print the best. Candidates that do not compile
    or fit are skipped."""
    began = time.time()
    with cases.compiling():
        for option in options:
            with contextlib.suppress(Exception):
                calls_of(option)[0]()
    results: Results = []
    for option in options:
        with contextlib.suppress(Exception):
            results.append((cases.median_us(calls_of(option), 5), option))
    results.sort(key=lambda result: result[0])
    print(f"{name}: {len(results)} of {len(options)} options, {time.time() - began:.0f} s")
    for us, option in results[:SHOWN]:
        print(f"   {us:8.1f} us  {option}", flush=True)
    return results


def keep(
    kernel: str, shape: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]], results: Results,
    calls_of: Callable[[Any], list[Call]], used: Any, alike: float, device: torch.device,
) -> None:  # fmt: skip
    """Store the fastest that computes what `used` computes, for `shape`, which may depend on it."""
    card = tuning.card_of(device)
    expected = calls_of(used)[0]()
    for us, option in results:
        with cases.poisoned():
            found = calls_of(option)[0]()
        if cases.difference(found, expected) < alike:  # not where a NaN shows
            if card is not None:
                named = shape(option) if callable(shape) else shape
                print(f"   kept in {tuning.store(card, kernel, named, option, us)}", flush=True)
            return
        print(f"   another result: {option}", flush=True)


# --- experts ---


def tile_candidates(kind: str, rows: int, first: bool) -> Iterator[ex.Tile]:
    for n, k, warps, stages, swap, tma in itertools.product(
        (64, 128, 256), (64, 128), (4, 8, 16), (2, 3, 4, 5, 6), (True, False), (True, False)
    ):
        if warps == 16 and (rows < 128 or n < 128):
            continue
        matrices = 2 if first else 1
        width = cases.WIDTHS[kind]
        # accumulators a thread; fp8 holds a partial sum as well
        outputs = n * rows * matrices / (32 * warps)
        sums = kind != "bf16"  # int4 too holds that of a group
        outputs *= 1.5 if sums and first else 2 if sums else 1
        shared = (n * matrices * width + rows * (1 if kind == "fp8" else 2)) * k * stages
        if (
            outputs > 150
            or shared > 220_000
            or (kind == "fp8" and k != 128)
            or (kind == "int4" and tma)
            or (kind == "fp8" and first and n != 128)
        ):
            continue
        if (
            (not swap and rows < 64)
            or (swap and rows > 128)
            or n * matrices * rows < 64 * 4 * warps
            or shared < (12_000 if kind == "int4" else 30_000)
        ):
            continue
        if n == 256 and (kind == "fp8" or swap):
            continue
        yield ex.Tile(n, k, warps, stages, swap, tma)


def row_candidates(picks: float, slots: int) -> list[int]:
    mean = picks / slots
    return [
        rows
        for rows in (16, 32, 64, 128)
        if rows / 8 <= mean * 2 + 4 and (rows * 4 >= mean or rows == 128)
    ]


def tune_experts(shape: ExpertShape, tokens: int, device: torch.device) -> None:
    """The best tiles of both products for each number of rows, then the whole layer with each of
    these plans."""
    w = cases.expert_weights(shape, device)
    picked = cases.draws(shape, tokens, device)
    picks = shape.routed_picks(tokens)
    if picked[0][1].numel() <= 16:
        tune_direct(shape, picks, picked, w, device)

    def whole(plan: ex.GroupedGemmPlan) -> list[Call]:
        return [partial(ex.grouped_experts, *draw, w, plan) for draw in picked]

    used = ex.plan_for(w.down, picks, shape.shared)
    plans = [used, *tall_plans(used, shape, picks, w)]
    plans += [
        plan
        for rows in row_candidates(picks, shape.routed)
        if (plan := best_tiles(shape, picked, w, rows))
    ]
    named = {
        "kind": shape.kind,
        "slots": shape.routed,
        "hidden": shape.hidden,
        "inner": shape.inner,
    }
    named["mean"] = tuning.near(picks / shape.routed)

    def stored(plan: ex.GroupedGemmPlan) -> dict[str, Any]:
        return named | {"tall": True} if plan.tall else named

    keep(
        "experts",
        stored,
        timed("whole layer", plans, whole),
        whole,
        used,
        ALIKE[shape.kind],
        device,
    )


def tall_plans(
    used: ex.GroupedGemmPlan, shape: ExpertShape, picks: float, w: ExpertWeights
) -> list[ex.GroupedGemmPlan]:
    """Hopper's kernels for many rows of an expert, with the tiles in use where they are not to be
    had."""
    if picks / shape.routed < 16 or not ex.has_tall(w.down, torch.bfloat16):
        return []
    sizes = {
        "fp8": ((128, 6), (128, 5), (128, 4), (192, 5), (192, 4), (256, 4), (256, 3)),
        "bf16": ((128, 4), (128, 3)),
    }
    return [replace(used, rows=rows, tall=stages) for rows, stages in sizes.get(shape.kind, ())]


def best_tiles(
    shape: ExpertShape, picked: list[Draw], w: ExpertWeights, rows: int
) -> ex.GroupedGemmPlan | None:
    """The plan of the tiles that are fastest by themselves, with so many rows a block."""
    pairs = [(draw[0], moe_align_block_size(draw[1], shape.slots, rows)) for draw in picked]

    def first(tile: ex.Tile) -> list[Call]:
        return [
            partial(ex.gate_up_product, x, w.gate_up, blocks, shape.top_k, tile)
            for x, blocks in pairs
        ]

    up = timed(f"rows {rows} up", list(tile_candidates(shape.kind, rows, True)), first)
    if not up:
        return None
    hidden = [call() for call in first(up[0][1])]

    def second(tile: ex.Tile) -> list[Call]:
        return [
            partial(ex.down_product, h, w.down, blocks, torch.bfloat16, tile)
            for h, (_, blocks) in zip(hidden, pairs, strict=True)
        ]

    below = timed(f"rows {rows} down", list(tile_candidates(shape.kind, rows, False)), second)
    return ex.GroupedGemmPlan(rows, up[0][1], below[0][1]) if below else None


def tune_direct(
    shape: ExpertShape,
    picks: int,
    picked: list[Draw],
    w: ExpertWeights,
    device: torch.device,
) -> None:
    """First the same tile for both kernels, then variations of each from the best."""
    options = itertools.product((8, 16, 32), (128, 256, 512), (4, 8), (2, 3, 4))
    plans = [
        direct.DirectPlan(rows, columns, rows, columns, warps, stages)
        for rows, columns, warps, stages in options
    ]
    used = direct.direct_plan_for(w.down, picks)

    def both(plan: direct.DirectPlan) -> list[Call]:
        return [partial(direct.direct_experts, *draw, w, plan) for draw in picked]

    results = timed("direct, both", [used, *plans], both)
    sizes = [*itertools.product((4, 8, 16, 32, 64), (128, 256, 512, 1024))]
    for name, fields, values in (
        ("up", ("up_rows", "up_columns"), sizes),
        ("down", ("down_rows", "down_columns"), sizes),
        (
            "warps and stages of down",
            ("down_warps", "down_stages"),
            [*itertools.product((2, 4, 8), (2, 3, 4))],
        ),
    ):
        some = [replace(results[0][1], **dict(zip(fields, pair, strict=True))) for pair in values]
        results = sorted(
            results + timed(f"direct, {name} alone varied", some, both),
            key=lambda result: result[0],
        )
    named = {
        "kind": shape.kind,
        "picks": tuning.near(picks),
        "hidden": shape.hidden,
        "inner": shape.inner,
    }
    keep("experts_direct", named, results, both, used, ALIKE[shape.kind], device)


# --- products ---


# bytes of a program's stages: three, two or one of them fit a multiprocessor
ROOM = (66_000, 104_000, 200_000)


def stream_candidates(tokens: int) -> Iterator[StreamKPlan]:
    """If two programs fit but one is launched, the next kernel's weights load while this one's
    partial sums are added."""
    heights = (max(8, next_power(tokens)),) if tokens <= 128 else (64, 128) if tokens <= 512 else ()
    for m, n, room, split in itertools.product(heights, (64, 128), ROOM, (1, 2, 4, 64)):
        stages = min(16, room // ((n + m) * 128))
        for waves in range(1, 228_000 // room + 1) if stages > 1 else ():
            yield StreamKPlan(m, n, n // 16, stages, split=split, waves=waves)


def persistent_candidates(
    tokens: int, rows: int, columns: int, processors: int
) -> Iterator[PersistentPlan]:
    """Tiles are split where they are too few for all of the GPU's multiprocessors."""
    for m, stages in ((256, 4), (192, 4), (128, 6), (128, 4)):
        if tokens > m // 2:
            yield PersistentPlan(m, stages)
    if tokens <= 64:
        return
    high = -(-tokens // 128)
    for split in (2, 3, 4, 6, 7, 8, 14):
        for stages in (6, 4):
            plan = PersistentPlan(128, stages, split)
            if plan.parts(rows, columns, high, processors)[0] > 1:
                yield plan


def sliced_candidates(
    tokens: int, rows: int, columns: int, processors: int
) -> Iterator[SlicedPlan]:
    """As many stages as fit."""
    from rorqual.ops.triton.gemm import fp8_gemm_sm90_sliced as sliced

    fitting = [m for m in (8, 16, 32, 64, 128) if m < 2 * tokens or m == 8]
    for m, slices in itertools.product(fitting[-2:], (2, 3)):
        plan = SlicedPlan(m, slices, 18)
        plan = replace(plan, stages=sliced.stages_of(plan, columns))
        if plan.stages > 0 and sliced.programs(plan, tokens, rows) <= processors:
            yield plan


def gluon_candidates(tokens: int, rows: int, columns: int, processors: int) -> Iterator[LinearPlan]:
    yield from stream_candidates(tokens)
    yield from persistent_candidates(tokens, rows, columns, processors)
    yield from sliced_candidates(tokens, rows, columns, processors)


def linear_candidates(tokens: int) -> Iterator[TilePlan]:
    """Triton's forms."""
    fitting = min(128, max(16, next_power(tokens)))
    heights = sorted({max(16, fitting // 2), fitting}) if tokens > 64 else [fitting]
    options = itertools.product(
        heights, (64, 128), (4, 8), (3, 4, 6, 8), (True, False), (True, False), (1, 2, 4, 8)
    )
    for m, n, warps, stages, swap, tma, split in options:
        if (
            m * n * 2 / (32 * warps) > 150
            or (m + n) * 128 * stages > 220_000
            or m * n < 64 * 4 * warps
        ):
            continue
        if (not swap and m < 64) or (tokens > 256 and split > 1):
            continue
        yield TilePlan(m, n, warps, stages, swap, tma, split)
    tall = itertools.product((64, 128, 256), (4, 8, 16), (2, 3, 4, 5, 6), (0, 1, 2))
    for m, warps, stages, waves in tall if tokens > 256 else ():
        if m == 16 * warps and (m + 128) * 128 * stages <= 220_000:
            yield TilePlan(m, 128, warps, stages, swap=False, tma=True, halves=True, waves=waves)


def sizes_alike(plan: LinearPlan, tokens: int) -> list[float]:
    """Numbers of tokens that a plan found for `tokens` is kept for. To a streaming plan all that
    fill the same tile are alike; one token, which is a decode step of one request, has a rule of
    its own."""
    if not isinstance(plan, StreamKPlan) or tokens > plan.m:
        return tuning.near(tokens)
    return [1, 1] if tokens == 1 else [2 if plan.m == 8 else plan.m // 2 + 1, plan.m]


def tune_linear(
    rows: int, columns: int, tokens: int, device: torch.device, gluon: bool = False
) -> None:
    """Triton's or Gluon's candidates, and the current configuration."""
    if gluon and not is_hopper(device):
        return
    weights, _, packed = cases.linear_data(rows, columns, tokens, device)

    def calls(plan: LinearPlan) -> list[Call]:
        return [partial(fp8_gemm.linear, packed, w, plan=plan) for w in weights]

    used = fp8_gemm.plan_for(weights[0], tokens)
    candidates: Iterator[LinearPlan] = (
        gluon_candidates(tokens, rows, columns, multiprocessors(device))
        if gluon
        else linear_candidates(tokens)
    )
    results = timed(f"linear {rows}x{columns} M{tokens}", [used, *candidates], calls)

    def named(plan: LinearPlan) -> dict[str, Any]:
        return {"rows": rows, "columns": columns, "tokens": sizes_alike(plan, tokens)}

    keep("linear_fp8", named, results, calls, used, ALIKE["fp8"], device)


def small_candidates(tokens: int) -> Iterator[gemv.SmallPlan]:
    for option in itertools.product((1, 2, 4, 8), (256, 512, 1024, 2048), (1, 2, 4, 8), (1, 2, 3)):
        plan = gemv.SmallPlan(*option)
        if 8 <= plan.n * plan.k / (32 * plan.warps) <= 64 // next_power(tokens) * 2:
            yield plan


def tune_small(rows: int, columns: int, tokens: int, device: torch.device) -> None:
    weights, x = cases.small_data(rows, columns, tokens, device)

    def calls(plan: gemv.SmallPlan) -> list[Callable[[], Tensor]]:
        return [partial(gemv.linear, x, w, plan=plan) for w in weights]

    used = gemv.plan_for(weights[0], tokens)
    results = timed(
        f"linear bf16 {rows}x{columns} M{tokens}", [used, *small_candidates(tokens)], calls
    )
    named = {"rows": rows, "columns": columns, "tokens": tuning.near(tokens)}
    keep("linear_small", named, results, calls, used, ALIKE["bf16"], device)


def int4_candidates(tokens: int) -> Iterator[int4_gemm.Int4Plan]:
    heights = sorted({max(16, min(128, next_power(tokens) // part)) for part in (1, 2)})
    options = itertools.product(
        heights, (32, 64, 128), (64, 128), (4, 8), (2, 3, 4, 5, 6), (True, False), (1, 2, 4, 8)
    )
    for m, n, k, warps, stages, swap, split in options:
        if (
            m * n * 2 / (32 * warps) <= 150
            and (n / 2 + 2 * m) * k * stages < 220_000
            and m * n >= 64 * 4 * warps
            and (swap or m >= 64)
            and (tokens <= 256 or split == 1)
        ):
            yield int4_gemm.Int4Plan(m, n, k, warps, stages, swap, split)


def tune_int4(rows: int, columns: int, tokens: int, device: torch.device) -> None:
    weights, x = cases.int4_data(rows, columns, tokens, device)

    def calls(plan: int4_gemm.Int4Plan) -> list[Call]:
        return [partial(int4_gemm.linear, x, w, plan=plan) for w in weights]

    used = int4_gemm.plan_for(weights[0], tokens)
    name = f"linear int4 {rows}x{columns} M{tokens}"
    results = timed(name, [used, *int4_candidates(tokens)], calls)
    named = {"rows": rows, "columns": columns, "tokens": tuning.near(tokens)}
    keep("linear_int4", named, results, calls, used, ALIKE["int4"], device)


# --- routers ---


def gate_candidates(tokens: int, experts: int, parts: int) -> Iterator[gating.GatePlan]:
    """parts: bf16 matrices that the gate is the sum of."""
    options = itertools.product(
        (16, 32, 64, 128), (64, 128), (64, 128), (4, 8, 16, 32), (4, 8), (2, 3, 4)
    )
    for m, n, k, split, warps, stages in options:
        if (
            m <= next_power(tokens)
            and n <= experts
            and n >= 16 * warps
            and (n * 2 * min(parts, 2) + m * 2) * k * stages < 220_000
        ):
            yield gating.GatePlan(m, n, k, split, warps, stages)


def tune_router(model: str, tokens: int, kind: torch.dtype | None, device: torch.device) -> None:
    """Timed with the choice behind it, which reads the more the more partial sums there are."""
    config = moe.ROUTERS[model]
    gates, x = moe.gate_data(model, tokens, device, kind)
    bias = torch.randn(config.num_experts, device=device) * 0.05 if config.has_bias else None
    logits = torch.float32 if config.router_fp32 else gates[0].dtype

    def calls(plan: gating.GatePlan) -> list[Call]:
        return [partial(_routed, x, gate, bias, config, logits, plan) for gate in gates]

    used = gating.plan_for(gates[0], tokens)
    parts = 1 if gates[0].dtype == torch.bfloat16 else 3
    results = timed(
        "gate and choice", [used, *gate_candidates(tokens, config.num_experts, parts)], calls
    )
    named = {
        "kind": gating.kind_of(gates[0]),
        "experts": config.num_experts,
        "hidden": x.shape[1],
        "tokens": tuning.near(tokens),
    }
    keep(
        "gate",
        named,
        results,
        lambda plan: [partial(_logits, x, gates[0], plan)],
        used,
        1e-9,
        device,
    )


def _routed(
    x: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    config: MoEConfig,
    logits: torch.dtype,
    plan: gating.GatePlan,
) -> Any:
    return topk.route(gating.partial_logits(x, gate, plan), bias, config, kind=logits)


def _logits(x: Tensor, gate: Tensor, plan: gating.GatePlan) -> Tensor:
    return gating.partial_logits(x, gate, plan).sum(0)


# --- the list ---


def searches() -> Iterator[TuningSearch]:
    for shape, name, sizes in cases.EXPERTS:
        for t in sizes:
            yield TuningSearch(f"{name} T{t}", partial(tune_experts, shape, t))
    for shape, name in moe.JOINED:
        for t in moe.FUSED_SHARED_TOKENS:
            yield TuningSearch(f"{name} T{t}", partial(tune_experts, shape, t))
    for model in moe.ROUTERS:
        for t in (16, 64, 256):
            yield TuningSearch(f"router split {model} T{t}", partial(tune_router, model, t, None))
    for (n, k), peers in cases.LINEARS.items():
        for m in peers:
            yield TuningSearch(f"linear {n}x{k} M{m}", partial(tune_linear, n, k, m))
            yield TuningSearch(
                f"linear gluon {n}x{k} M{m}", partial(tune_linear, n, k, m, gluon=True)
            )
    for (n, k), m in itertools.product(cases.INT4_LINEARS, cases.INT4_TOKENS):
        yield TuningSearch(f"linear int4 {n}x{k} M{m}", partial(tune_int4, n, k, m))
    for n, k in cases.SMALL:
        for m in (1, 4):
            yield TuningSearch(f"linear bf16 {n}x{k} M{m}", partial(tune_small, n, k, m))


def tune_all(device: torch.device, only: str, more: Callable[[], Iterator[TuningSearch]]) -> None:
    """more: additional searches."""
    words = [word for word in only.split(",") if word]
    for search in itertools.chain(searches(), more()):
        if not words or any(word in search.name + "$" for word in words):
            print(f"== {search.name}", flush=True)
            search.run(device)
