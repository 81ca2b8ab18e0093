"""Searches of tiles for the kernels of int8, int4 and e4m3 weights, for tuning.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rorqual.bench.kernels import gemm_and_experts as base
from rorqual.bench.kernels import quantized as cases
from rorqual.bench.kernels.gemm_and_experts import Call, Draw, ExpertShape
from rorqual.bench.kernels.quantized import QuantizedFormat
from rorqual.bench.kernels.tuning import TuningSearch, keep, row_candidates, timed
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.moe.align import moe_align_block_size
from rorqual.ops.triton.quantized import (
    experts,
    int4_direct,
    int4_grouped_sm90,
    operands,
    rounded_direct,
)
from rorqual.ops.triton.quantized.experts import (
    Blocks,
    PickBlocks,
    QuantizedExpertsPlan,
    QuantizedTile,
)
from rorqual.ops.triton.quantized.int4_direct import DirectTile
from rorqual.ops.triton.quantized.linear import QuantizedLinearPlan, linear, plan_for
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import next_power

DIRECT_ROWS = (8, 16)  # tokens of a tile


def linear_candidates(tokens: int, int4: bool) -> Iterator[QuantizedLinearPlan]:
    heights = sorted({max(16, min(256, next_power(tokens) // part)) for part in (1, 2)})
    options = itertools.product(heights, (64, 128), (4, 8), (3, 4, 5, 6), (1, 2, 4, 8))
    for m, n, warps, stages, split in options:
        width = 0.5 if int4 else 1
        room = (n * width + m * (2 if int4 else 1)) * 128 * stages
        few = tokens <= 256 or split == 1
        if room < 220_000 and m * n / (32 * warps) <= 128 and n >= 16 * warps and few:
            yield QuantizedLinearPlan(m, n, warps, stages, split)


def direct_linear_candidates(weight: Weight, tokens: int) -> Iterator[QuantizedLinearPlan]:
    heights = [m for m in DIRECT_ROWS if m <= 2 * max(8, tokens) and 4 * m >= tokens]
    tiles = [tile for tile in direct_tiles() if tile.depth == 3 and tile.registers == 128]
    for m, tile, split in itertools.product(heights, tiles, (1, 2, 4)):
        if int4_direct.fits(weight.columns, m, tile.parts, split):
            yield QuantizedLinearPlan(m, split=split, direct=tile)


def tune_linear(
    form: QuantizedFormat, rows: int, columns: int, tokens: int, device: torch.device
) -> None:
    held, _, given = cases.linear_data(form, rows, columns, tokens, device)

    def calls(plan: QuantizedLinearPlan) -> list[Call]:
        return [partial(linear, given, weight, plan=plan) for weight in held]

    used = plan_for(held[0], tokens)
    options = [used, *linear_candidates(tokens, form.numbers == "int4")]
    if int4_direct.takes(held[0]):
        options += direct_linear_candidates(held[0], tokens)
    rounds = tokens == 1 and rounded_direct.takes(held[0])
    if rounds:
        options += [QuantizedLinearPlan(8, direct=tile) for tile in rounding_tiles(held[0])]
    results = timed(f"linear {form.name} {rows}x{columns} M{tokens}", options, calls)
    named = {"kind": operands.kind_of(held[0]), "rows": rows, "columns": columns}
    direct = int4_direct.takes(held[0]) or rounds
    named |= {"tokens": tuning.near(tokens), "direct": direct}
    keep("linear_quantized", named, results, calls, used, 1e-4, device)


def tile_candidates(rows: int, int4: bool) -> Iterator[QuantizedTile]:
    for n, warps, stages in itertools.product((64, 128), (4, 8), (2, 3, 4, 5, 6)):
        room = (n * (0.5 if int4 else 1) + rows * (2 if int4 else 1)) * 128 * stages
        if room < 220_000 and rows * n / (32 * warps) <= 128 and n >= 16 * warps:
            yield QuantizedTile(n, warps, stages)


def direct_tiles() -> Iterator[DirectTile]:
    shapes = ((1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2))  # warps, parts
    for (warps, parts), depth, registers in itertools.product(shapes, (2, 3), (128, 168)):
        for tiles in (1, 2):
            yield DirectTile(warps, parts, depth, registers, tiles)


def rounding_tiles(weight: Weight) -> Iterator[DirectTile]:
    shapes = ((1, 4), (1, 8), (2, 2), (2, 4), (4, 1), (4, 2))  # warps, parts
    for (warps, parts), depth, registers in itertools.product(shapes, (2, 4, 8), (0, 128)):
        if rounded_direct.fits(weight, weight.columns, parts):
            yield DirectTile(warps, parts, depth, registers)


def int4_candidates(weight: Weight, rows: int) -> Iterator[QuantizedTile]:
    """Of the kernels that take int4 weights and 16-bit rows alone."""
    if rows in DIRECT_ROWS and int4_direct.takes(weight):
        for tile in direct_tiles():
            if int4_direct.fits(weight.columns, rows, tile.parts):
                yield QuantizedTile(direct=tile)
    if rows in int4_grouped_sm90.ROWS_TAKEN and int4_grouped_sm90.takes(weight):
        yield QuantizedTile(grouped=True)


def direct_candidates(weight: Weight, rows: int, rounds: bool) -> Iterator[QuantizedTile]:
    """Of the kernels beside the general one."""
    yield from int4_candidates(weight, rows)
    if rounds:
        yield from (QuantizedTile(direct=tile) for tile in rounding_tiles(weight))


def tune_experts(
    form: QuantizedFormat, shape: ExpertShape, tokens: int, device: torch.device
) -> None:
    """The best tiles of both products for each number of rows, then the whole layer with these."""
    w = cases.expert_weights(form, shape, device)
    picked = base.draws(shape, tokens, device)
    picks = tokens * shape.top_k
    rounds = experts.rounds_itself(w, tokens, picks)
    used = experts.plan_for(w.down, picks, rounds=rounds)
    plans = [used]
    few = [8] if int4_direct.takes_experts(w.down) and picks < 32 * shape.slots else []
    for rows in few + row_candidates(picks, shape.slots):
        found = [(x, _blocks(ids, shape, rows, rounds)) for x, ids, _ in picked]

        def first(tile: QuantizedTile, pairs: Any = found) -> list[Call]:
            return [
                partial(experts.gate_up_product, x, w.gate_up, blocks, shape.top_k, tile)
                for x, blocks in pairs
            ]

        shared = [] if rows < 16 else list(tile_candidates(rows, form.numbers == "int4"))
        options = [*shared, *direct_candidates(w.gate_up, rows, rounds)]
        up = timed(f"rows {rows} up", options, first)
        if not up:
            continue
        hidden = [call() for call in first(up[0][1])]

        def second(tile: QuantizedTile, pairs: Any = found, made: Any = hidden) -> list[Call]:
            return [
                partial(experts.down_product, h, w.down, blocks, tile)
                for h, (_, blocks) in zip(made, pairs, strict=True)
            ]

        options = [*shared, *direct_candidates(w.down, rows, rounds)]
        down = timed(f"rows {rows} down", options, second)
        if down:
            plans.append(QuantizedExpertsPlan(rows, up[0][1], down[0][1]))

    def whole(plan: QuantizedExpertsPlan) -> list[Call]:
        return [partial(_layer, draw, w, plan) for draw in picked]

    named: Mapping[str, Any] = {
        "kind": operands.kind_of(w.down), "slots": shape.slots, "hidden": shape.hidden,
        "inner": shape.inner, "mean": tuning.near(picks / shape.slots),
        "direct": int4_direct.takes_experts(w.down) or rounds,
        "grouped": int4_grouped_sm90.takes_experts(w.down),
    }  # fmt: skip
    results = timed("whole layer", plans, whole)
    keep("experts_quantized", named, results, whole, used, 1e-3, device)


def _blocks(ids: Tensor, shape: ExpertShape, rows: int, rounds: bool) -> Blocks:
    if rounds:
        return PickBlocks(ids.contiguous().view(-1), rows)
    return moe_align_block_size(ids, shape.slots, rows)


def _layer(draw: Draw, w: ExpertWeights, plan: QuantizedExpertsPlan) -> Tensor:
    x, ids, weights = draw
    blocks = experts.sorted_picks(ids, w, plan) if plan.sorts(ids.numel()) else None
    return experts.combine(experts.products(x, w, plan, blocks, ids), ids, weights)


def searches() -> Iterator[TuningSearch]:
    for form, shape, model, tokens in cases.EXPERTS:
        for t in tokens:
            run = partial(tune_experts, form, shape, t)
            yield TuningSearch(f"experts {form.name}{model} T{t}", run)
    for form, n, k, m in cases.linears():
        run = partial(tune_linear, form, n, k, m)
        yield TuningSearch(f"linear {form.name} {n}x{k} M{m}", run)
