"""Routed experts with weights in int8, int4 or e4m3 with a scale per row.

Grouped: (token, expert) pairs are sorted into blocks of rows that share an expert (moe/align.py),
then two GEMMs and a weighted sum (moe/combine.py). Up to DIRECT_PICKS pairs each pair is a block of
its own, and nothing is sorted. Between the GEMMs rows have the activations' dtype; if the second
GEMM takes 8-bit input a separate kernel quantizes them, since a token's scale covers all columns.

A tile of the first GEMM has as many gate as up rows, so that one GEMM computes both. A few rows per
expert have kernels of their own: int4_direct.py for int4 weights and 16-bit rows, rounded_direct.py
for unsorted 8-bit rows, which it rounds itself. On Hopper int4_grouped_sm90.py takes more rows in
16 bits. Elsewhere, with many rows per expert, int4 weights are dequantized to 16 bits for
moe/grouped_gemm.py (widened.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.moe import grouped_gemm
from rorqual.ops.triton.moe.align import ExpertBlocks, moe_align_block_size
from rorqual.ops.triton.moe.combine import combine
from rorqual.ops.triton.quantized import (
    int4_direct,
    int4_grouped_sm90,
    int4_order,
    operands,
    rounded_direct,
    widened,
)
from rorqual.ops.triton.quantized.int4_direct import DirectTile
from rorqual.ops.triton.quantized.operands import sums
from rorqual.ops.triton.rowwise.silu import silu_exp
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import dependent, is_hopper, wait_for_inputs

DIRECT_PICKS = 16
PORTABLE_ROWS = 64  # of weights in a tile before sm_90


@dataclass(frozen=True)
class QuantizedTile:
    """n weight rows (in the first GEMM half gate, half up), warps, pipeline stages. direct: use
    int4_direct.py's kernel with this tile instead, for unsorted pairs of 8-bit activations
    rounded_direct.py's; grouped: int4_grouped_sm90.py's, for sorted pairs only."""

    n: int = 64
    warps: int = 4
    stages: int = 4
    direct: DirectTile | None = None
    grouped: bool = False


@dataclass(frozen=True)
class QuantizedExpertsPlan:
    """rows: rows of a block. up, down: tiles of both GEMMs. widened: dequantize weights to 16 bits
    first, if widened.py supports them."""

    rows: int
    up: QuantizedTile
    down: QuantizedTile
    widened: bool = False

    def sorts(self, num_picks: int) -> bool:
        """Whether so many pairs are sorted; else each is a block of its own."""
        return num_picks > DIRECT_PICKS or self.up.grouped or self.down.grouped


@dataclass(frozen=True)
class PickBlocks:
    """Unsorted pairs, each a block of its own: ids [T K] are their experts; -1: on another
    rank."""

    ids: Tensor
    rows: int

    @property
    def num_picks(self) -> int:
        return self.ids.numel()


Blocks = ExpertBlocks | PickBlocks


@triton.jit
def _block(order, blocks, limit, index, ROWS: tl.constexpr, SORTED: tl.constexpr):
    """(expert, rows, which of them are valid, pointers to their pairs) of a row block."""
    if SORTED:
        expert = tl.load(blocks + index)
        start = tl.load(blocks + limit + index)
        rows = start + tl.arange(0, ROWS)
        valid = rows < tl.load(blocks + 2 * limit + index)
        shift = tl.load(blocks + 3 * limit + index)
        return expert, tl.where(valid, rows, start), valid, order + shift + rows
    else:
        expert = tl.load(order + index).to(tl.int32)
        rows = index + tl.arange(0, ROWS) * 0
        return expert, rows, (tl.arange(0, ROWS) == 0) & (expert >= 0), order + rows


@triton.jit
def _blocks_here(order, count, limit, index, SORTED: tl.constexpr):
    """Blocks to go through. Of unsorted pairs a program has a single one, block `index`: none if it
    has no expert."""
    if SORTED:
        return tl.load(count)
    else:
        return tl.where(tl.load(order + index) >= 0, limit, 0)


@triton.jit(do_not_specialize=["limit", "xs_group"])
def _quantized_gate_up_kernel(
    x,
    x_scale,
    w,
    w_scale,
    w_zero,
    h,
    order,
    blocks,
    count,
    limit,
    x_row,
    xs_row,
    xs_group,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    SORTED: tl.constexpr,
    K: tl.constexpr,
    INT4: tl.constexpr,
    SHARE: tl.constexpr,
    W_GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_SCALED: tl.constexpr,
    ZERO: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h[row] = silu(gate x) * (up x): N / 2 columns of h for one row block at a time."""
    wait_for_inputs(DEPENDENT)
    PACK: tl.constexpr = 2 if INT4 else 1
    WIDTH: tl.constexpr = K // PACK
    HALF: tl.constexpr = N // 2
    groups: tl.constexpr = (HIDDEN + W_GROUP - 1) // W_GROUP if W_GROUP else 1
    tiles: tl.constexpr = (INNER + HALF - 1) // HALF
    total = _blocks_here(order, count, limit, tl.program_id(0) // tiles, SORTED)
    for tile in range(tl.program_id(0), total * tiles, tl.num_programs(0)):
        expert, rows, valid, picks = _block(order, blocks, limit, tile // tiles, ROWS, SORTED)
        token = tl.load(picks, mask=valid, other=0) // TOP_K if SORTED else rows // TOP_K
        token = token.to(tl.int64)
        part = tl.arange(0, N)
        inner = (tile % tiles) * HALF + part % HALF
        row = part // HALF * INNER + tl.minimum(inner, INNER - 1)
        row = expert.to(tl.int64) * (2 * INNER) + row
        column = tl.arange(0, WIDTH)[None, :]
        x_tile = x + token[:, None] * x_row + column
        w_tile = w + row[:, None] * (HIDDEN // PACK) + column
        scales = row // SHARE * groups
        x_scales = x_scale + token * xs_row if X_SCALED else token
        acc = sums(
            x_tile, valid, x_scales, xs_group, w_tile, w_scale + scales,
            w_zero + scales if ZERO else scales, 0, HIDDEN // K,
            N, ROWS, K, INT4, W_GROUP, X_GROUP, X_SCALED, ZERO,
        )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, ROWS)), (2, 1, 0)))
        y = (silu_exp(gate) * up).to(h.dtype.element_ty)
        columns = (tile % tiles) * HALF + tl.arange(0, HALF)
        target = h + rows.to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(target, y, mask=valid[:, None] & (columns < INNER)[None, :])


@triton.jit(do_not_specialize=["limit", "hs_group"])
def _quantized_down_kernel(
    h,
    h_scale,
    w,
    w_scale,
    w_zero,
    y,
    order,
    blocks,
    count,
    limit,
    h_row,
    hs_row,
    hs_group,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    SORTED: tl.constexpr,
    K: tl.constexpr,
    INT4: tl.constexpr,
    SHARE: tl.constexpr,
    W_GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_SCALED: tl.constexpr,
    ZERO: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[pair] = down[expert] h[row], N columns per program."""
    wait_for_inputs(DEPENDENT)
    PACK: tl.constexpr = 2 if INT4 else 1
    WIDTH: tl.constexpr = K // PACK
    groups: tl.constexpr = (INNER + W_GROUP - 1) // W_GROUP if W_GROUP else 1
    tiles: tl.constexpr = (HIDDEN + N - 1) // N
    total = _blocks_here(order, count, limit, tl.program_id(0) // tiles, SORTED)
    for tile in range(tl.program_id(0), total * tiles, tl.num_programs(0)):
        expert, rows, valid, picks = _block(order, blocks, limit, tile // tiles, ROWS, SORTED)
        pick = tl.load(picks, mask=valid, other=0) if SORTED else rows
        present = rows.to(tl.int64)
        columns = (tile % tiles) * N + tl.arange(0, N)
        row = expert.to(tl.int64) * HIDDEN + tl.minimum(columns, HIDDEN - 1)
        column = tl.arange(0, WIDTH)[None, :]
        h_tile = h + present[:, None] * h_row + column
        w_tile = w + row[:, None] * (INNER // PACK) + column
        scales = row // SHARE * groups
        h_scales = h_scale + present * hs_row if X_SCALED else present
        acc = sums(
            h_tile, valid, h_scales, hs_group, w_tile, w_scale + scales,
            w_zero + scales if ZERO else scales, 0, INNER // K,
            N, ROWS, K, INT4, W_GROUP, X_GROUP, X_SCALED, ZERO,
        )  # fmt: skip
        target = y + pick.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        mask = valid[:, None] & (columns < HIDDEN)[None, :]
        tl.store(target, acc.T.to(y.dtype.element_ty), mask=mask)


def supported(w: ExpertWeights) -> bool:
    """Whether operands.supported holds for both matrices."""
    return operands.supported(w.gate_up) and operands.supported(w.down)


def rounds_itself(w: ExpertWeights, tokens: int, num_picks: int) -> bool:
    """Whether rounded_direct.py's kernels take so few unsorted pairs. Of two tokens they took int4
    pairs faster, but made whole steps with 8-bit weights 6 % longer."""
    few = num_picks <= DIRECT_PICKS and (tokens == 1 or w.down.is_int4)
    return few and rounded_direct.takes(w.down) and rounded_direct.takes(w.gate_up) and alike(w)


def alike(w: ExpertWeights) -> bool:
    """Whether both matrices have one format: a plan chosen for `down` then suits gate_up too."""
    formats = {
        (operands.kind_of(one), one.zero is None, one.is_int4 and int4_order.group_of(one))
        for one in (w.gate_up, w.down)
    }
    return len(formats) == 1


def plan_of(w: ExpertWeights, tokens: int, num_picks: int, own: int) -> QuantizedExpertsPlan:
    """The plan for a step's `tokens` with num_picks pairs, of which `own` are of these experts;
    neither counts fused shared experts."""
    rounds = rounds_itself(w, tokens, num_picks)
    return plan_for(w.down, own, w.num_fused_shared_experts, rounds, alike(w))


def plan_for(
    down: Weight, num_picks: int, shared: int = 0, rounds: bool = False, alike: bool = True
) -> QuantizedExpertsPlan:
    """The plan for the mean number of pairs per expert, without the last `shared` experts and their
    pairs. rounds: `rounds_itself`; alike: gate_up has the same format."""
    slots, hidden, _ = down.data.shape
    return tuning.config_for(
        "experts_quantized",
        QuantizedExpertsPlan,
        down.data.device,
        kind=operands.kind_of(down),
        mean=num_picks / max(1, slots - shared),
        slots=slots - shared,
        hidden=hidden,
        inner=down.columns,
        direct=rounds or (alike and int4_direct.takes_experts(down)),
        grouped=alike and int4_grouped_sm90.takes_experts(down),
    )


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, base: Tensor | None = None
) -> Tensor:
    """rorqual.ops.reference.experts. x [T, hidden] bf16, fp16 or fp32; ids [T, K] int32 or int64,
    -1: on another rank; weights [T, K] fp32. base [T, hidden] is added before the sum is
    rounded."""
    if ids.numel() == 0:
        return torch.zeros_like(x) if base is None else base.clone()
    shared = w.num_fused_shared_experts
    num_picks = ids.numel() - ids.shape[0] * shared
    plan = plan_of(w, ids.shape[0], num_picks, round(num_picks * w.local_fraction))
    if widens(plan, w, x.dtype):
        return grouped_gemm.experts(x, ids, weights, widened.wide_experts(w, x.dtype), base)
    blocks = sorted_picks(ids, w, plan) if plan.sorts(num_picks) else None
    y = products(x, w, plan, blocks, ids)
    return combine(y, ids, weights, base)


def widens(plan: QuantizedExpertsPlan, w: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether to dequantize the weights to 16 bits for this call."""
    return plan.widened and all(widened.takes(one, dtype) for one in (w.gate_up, w.down))


def sorted_picks(ids: Tensor, w: ExpertWeights, plan: QuantizedExpertsPlan) -> ExpertBlocks:
    return moe_align_block_size(ids, w.down.data.shape[0], plan.rows)


def products(
    x: Tensor,
    w: ExpertWeights,
    plan: QuantizedExpertsPlan,
    blocks: Blocks | None,
    ids: Tensor,
) -> Tensor:
    """Each pair's result, [pairs, hidden], before weights and sum. blocks None: each pair is a
    block. Rows of experts on other ranks are uninitialized."""
    found = blocks or PickBlocks(ids.contiguous().view(-1), plan.rows)
    assert found.rows == plan.rows
    h = gate_up_product(x, w.gate_up, found, ids.shape[1], plan.up)
    return down_product(h, w.down, found, plan.down, early=plan.up.direct is not None)


def gate_up_product(
    x: Tensor, weight: Weight, blocks: Blocks, top_k: int, tile: QuantizedTile
) -> Tensor:
    """silu(gate x) * (up x) of each pair, in the blocks' order: [pairs, inner] in x's dtype."""
    inner = weight.data.shape[1] // 2
    if tile.grouped:
        return int4_grouped_sm90.gate_up_product(x, weight, _sorted(blocks), top_k)
    tile = _fitting(tile, weight)
    h = torch.empty(blocks.num_picks, inner, dtype=x.dtype, device=weight.data.device)
    if tile.direct and isinstance(blocks, PickBlocks) and weight.activation != "wide":
        x = x if x.stride(1) == 1 else x.contiguous()
        rounded_direct.gate_up(x, weight, h, blocks.ids, tile.direct, top_k)
        return h
    data, scale, xs_row, xs_group, x_group = operands.operand(x, weight)
    order, table, count, limit = _places(blocks)
    if tile.direct:
        assert weight.activation == "wide", "sorted rows in 8 bits"
        places = (order, table, count, limit)
        int4_direct.gate_up(data, weight, h, places, tile.direct, blocks.rows, top_k)
        return h
    _quantized_gate_up_kernel[limit * triton.cdiv(inner, tile.n // 2),](
        data,
        scale,
        weight.data,
        weight.scale,
        weight.zero,
        h,
        order,
        table,
        count,
        limit,
        data.stride(0),
        xs_row,
        xs_group,
        weight.columns,
        inner,
        top_k,
        blocks.rows,
        tile.n,
        isinstance(blocks, ExpertBlocks),
        **operands.constants(weight, x_group, scale is not None),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(h.device),
    )
    return h


def down_product(
    h: Tensor, weight: Weight, blocks: Blocks, tile: QuantizedTile, early: bool = False
) -> Tensor:
    """down h of each pair, in pair order: [pairs, hidden] in h's dtype. early: the previous kernel
    is int4_direct.gate_up."""
    hidden = weight.data.shape[1]
    if tile.grouped:
        return int4_grouped_sm90.down_product(h, weight, _sorted(blocks))
    tile = _fitting(tile, weight)
    y = torch.empty(blocks.num_picks, hidden, dtype=h.dtype, device=weight.data.device)
    if tile.direct and isinstance(blocks, PickBlocks) and weight.activation != "wide":
        rounded_direct.down(h, weight, y, blocks.ids, tile.direct, early)
        return y
    data, scale, hs_row, hs_group, h_group = operands.operand(h, weight)
    order, table, count, limit = _places(blocks)
    if tile.direct:
        assert weight.activation == "wide", "sorted rows in 8 bits"
        places = (order, table, count, limit)
        int4_direct.down(data, weight, y, places, tile.direct, blocks.rows, early)
        return y
    _quantized_down_kernel[limit * triton.cdiv(hidden, tile.n),](
        data,
        scale,
        weight.data,
        weight.scale,
        weight.zero,
        y,
        order,
        table,
        count,
        limit,
        data.stride(0),
        hs_row,
        hs_group,
        hidden,
        weight.columns,
        blocks.rows,
        tile.n,
        isinstance(blocks, ExpertBlocks),
        **operands.constants(weight, h_group, scale is not None),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(y.device, after_long=True),
    )
    return y


def _places(blocks: Blocks) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """The kernels' arguments (order, blocks, count, limit)."""
    if isinstance(blocks, ExpertBlocks):
        return blocks.order, blocks.blocks, blocks.count, blocks.limit
    return blocks.ids, None, None, blocks.num_picks


def _sorted(blocks: Blocks) -> ExpertBlocks:
    assert isinstance(blocks, ExpertBlocks), "int4_grouped_sm90.py takes sorted pairs"
    return blocks


def _fitting(tile: QuantizedTile, weight: Weight) -> QuantizedTile:
    """GPUs before sm_90 have less shared memory."""
    if is_hopper(weight.data.device) or tile.direct:
        return tile
    return replace(tile, n=min(tile.n, PORTABLE_ROWS), stages=min(tile.stages, 2))
