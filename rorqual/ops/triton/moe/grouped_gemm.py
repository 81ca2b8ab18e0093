"""Routed experts: out[t] = sum over k of weights[t, k] * down[e] (silu(gate[e] x_t) * up[e] x_t),
with e = ids[t, k].

Three forms behind `experts`:
- direct, for a few (token, expert) pairs: small_batch.py.
- tall, for many rows per expert on Hopper: grouped_gemm_sm90_fp8.py or grouped_gemm_sm90_bf16.py
  instead of the grouped form's GEMMs.
- grouped: pairs are sorted into blocks of rows that share an expert (align.py), then two grouped
  GEMMs and a weighted sum (combine.py).
While an expert has few rows its weights are on the M side of the tensor cores (`swap`), which has
64 rows per instruction, and the tokens on the N side, which may be as narrow as 16.

No host sync and no atomics on values: a row's result depends neither on other rows nor on the order
of the pairs. fp8 weights (one scale per 128x128 block) are multiplied with fp8 activations (one
scale per token and 128 columns), and partial sums over 128 columns are promoted to fp32, as in
DeepGEMM (arXiv 2412.19437, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rorqual.ops.activation import Activation, Quantized, hidden_of
from rorqual.ops.deferred_sum import DeferredMoESum
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.gemm import int4
from rorqual.ops.triton.gemm.int4 import add_int4, group_scale, halves
from rorqual.ops.triton.moe.align import ExpertBlocks, moe_align_block_size, takes_buckets
from rorqual.ops.triton.moe.combine import combine
from rorqual.ops.triton.moe.small_batch import (
    DIRECT_PICKS,
    direct_experts,
    direct_plan_for,
    kind_of,
    rows_of,
    tile_of,
)
from rorqual.ops.triton.rowwise.quantize import quantized, scale_of
from rorqual.ops.triton.rowwise.silu import silu_exp
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import dependent, is_hopper, wait_for_inputs


@dataclass(frozen=True)
class Tile:
    """Tile of one GEMM: n weight rows (of gate and of up each, in the first GEMM), k columns per
    step, warps, pipeline stages.

    swap: weights on the M side. tma: weights are loaded by bulk tensor copies.
    """

    # ignored: present in tuning files of earlier versions, without effect
    FORMER_FIELDS: ClassVar[frozenset[str]] = frozenset({"waves"})

    n: int
    k: int
    warps: int
    stages: int
    swap: bool = True
    tma: bool = False


@dataclass(frozen=True)
class GroupedGemmPlan:
    """rows: rows of a block. up, down: tiles of both GEMMs. tall: stages of the kernel of
    grouped_gemm_sm90_fp8.py (128, 192 or 256 rows) or grouped_gemm_sm90_bf16.py (128), used
    instead on Hopper; 0: never."""

    rows: int
    up: Tile
    down: Tile
    tall: int = 0


SecondProduct = Callable[[Weight, ExpertBlocks], Tensor]

# Fuse shared experts with the routed ones if the layer allows it (layers/moe.py). False: a dense
# layer.
JOINS_SHARED = True
# The router's kernel also sorts the pairs, if nothing comes between router and experts.
SORTS_WHILE_ROUTING = True
# Up to so many tokens fused shared experts are part of the grouped GEMMs; above, dense GEMMs are
# faster.
FUSED_SHARED_TOKENS = {"bf16": 512, "fp8": 1024, "int4": 512, "fp32": 1024}


@triton.jit
def _product(acc, w, x, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + w x^T [n, rows] if swapped, else acc + x w^T [rows, n]."""
    if SWAP:
        return tl.dot(w, x.T, acc, input_precision=PRECISION)
    else:
        return tl.dot(x, w.T, acc, input_precision=PRECISION)


@triton.jit
def _scaled(acc, partial, token, weight, SWAP: tl.constexpr):
    """acc + partial * token scales * weight scale: promotes one 128-column partial sum."""
    factor = token * weight
    return acc + partial * (factor[None, :] if SWAP else factor[:, None])


@triton.jit
def _block(blocks, limit, index, ROWS: tl.constexpr):
    """(expert, first row, rows, which of them are valid, shift) of a row block; row r is pair
    order[r + shift]."""
    expert = tl.load(blocks + index)
    start = tl.load(blocks + limit + index)
    rows = start + tl.arange(0, ROWS)
    return (
        expert,
        start,
        rows,
        rows < tl.load(blocks + 2 * limit + index),
        tl.load(blocks + 3 * limit + index),
    )


@triton.jit(do_not_specialize=["limit", "xs_block", "hs_block"])
def _gate_up_kernel(
    x,
    x_scale,
    w,
    w_scale,
    w_zero,
    h,
    h_scale,
    order,
    blocks,
    count,
    limit,
    xs_row,
    xs_block,
    hs_row,
    hs_block,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    UE8M0: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h[sorted row] = silu(gate x) * (up x). A program computes N columns of h for one row block at
    a time. GROUP: columns of a group of int4 weights, with x in words of two columns; 0: other
    formats."""
    wait_for_inputs(DEPENDENT)
    PACK: tl.constexpr = 2 if GROUP else 1
    KP: tl.constexpr = K // PACK
    STRIDE: tl.constexpr = HIDDEN // PACK
    EVEN_N: tl.constexpr = INNER % N == 0
    EVEN_K: tl.constexpr = HIDDEN % K == 0
    tiles: tl.constexpr = (INNER + N - 1) // N
    scale_columns: tl.constexpr = HIDDEN // 128
    for tile in range(tl.program_id(0), tl.load(count) * tiles, tl.num_programs(0)):
        expert, _, rows, valid, shift = _block(blocks, limit, tile // tiles, ROWS)
        first = (tile % tiles) * N
        token = tl.load(order + shift + rows, mask=valid, other=0) // TOP_K
        x_tile = x + token.to(tl.int64)[:, None] * STRIDE + tl.arange(0, KP)[None, :]
        gate_row = expert * (2 * INNER) + first
        up_row = expert * (2 * INNER) + INNER + first
        gate_tile = rows
        up_tile = rows
        if not TMA:
            row = rows_of(first, INNER, N, EVEN_N)
            part = w + row[:, None] * STRIDE + tl.arange(0, KP)[None, :]
            gate_tile = part + expert.to(tl.int64) * (2 * INNER * STRIDE)
            up_tile = gate_tile + INNER * STRIDE
        gate = tl.zeros((N, ROWS) if SWAP else (ROWS, N), tl.float32)
        up = tl.zeros((N, ROWS) if SWAP else (ROWS, N), tl.float32)
        if QUANT:
            gate_scale = w_scale + (expert * (2 * INNER // 128) + first // 128) * scale_columns
            up_scale = gate_scale + INNER // 128 * scale_columns
            xs = x_scale + token.to(tl.int64) * xs_row
            for k in tl.range(0, HIDDEN // K):
                xk = tl.load(xs + k * xs_block)
                gk = tl.load(gate_scale + k)
                uk = tl.load(up_scale + k)
                xt = tl.load(x_tile + k * K)
                zero = tl.zeros((N, ROWS) if SWAP else (ROWS, N), tl.float32)
                gt = tile_of(w, gate_tile, gate_row, k * K, HIDDEN, True, TMA, K)
                gate = _scaled(gate, _product(zero, gt, xt, SWAP, PRECISION), xk, gk, SWAP)
                ut = tile_of(w, up_tile, up_row, k * K, HIDDEN, True, TMA, K)
                up = _scaled(up, _product(zero, ut, xt, SWAP, PRECISION), xk, uk, SWAP)
        elif GROUP:
            kind: tl.constexpr = h.dtype.element_ty
            groups: tl.constexpr = HIDDEN // GROUP
            at = (gate_row + rows_of(0, INNER - first, N, EVEN_N)).to(tl.int64) * groups
            for k in tl.range(0, HIDDEN // K):
                even, odd = halves(tl.load(x_tile + k * KP), kind)
                gt = tl.load(gate_tile + k * KP)
                gs, gz = group_scale(w_scale, w_zero, at + k * K // GROUP, ZERO)
                gate = add_int4(gate, gt, gs, gz, even, odd, SWAP, ZERO)
                ut = tl.load(up_tile + k * KP)
                us, uz = group_scale(w_scale, w_zero, at + INNER * groups + k * K // GROUP, ZERO)
                up = add_int4(up, ut, us, uz, even, odd, SWAP, ZERO)
        else:
            for k in tl.range(0, HIDDEN, K):
                xt = tile_of(x, x_tile, 0, k, HIDDEN, EVEN_K, False, K)
                gt = tile_of(w, gate_tile, gate_row, k, HIDDEN, EVEN_K, TMA, K)
                gate = _product(gate, gt, xt, SWAP, PRECISION)
                ut = tile_of(w, up_tile, up_row, k, HIDDEN, EVEN_K, TMA, K)
                up = _product(up, ut, xt, SWAP, PRECISION)
        y = silu_exp(gate) * up
        columns = first + tl.arange(0, N)
        if QUANT:  # N is 128 here: the tile is one block of the activation
            scale = scale_of(tl.maximum(tl.max(tl.abs(y), 0 if SWAP else 1), 1e-4), UE8M0)
            y = y / (scale[None, :] if SWAP else scale[:, None])
            tl.store(h_scale + rows * hs_row + first // 128 * hs_block, scale, mask=valid)
        y = (y.T if SWAP else y).to(h.dtype.element_ty)
        target = h + rows.to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(target, y, mask=valid[:, None] & (columns < INNER)[None, :])


@triton.jit(do_not_specialize=["limit", "hs_block"])
def _down_kernel(
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
    hs_row,
    hs_block,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    QUANT: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[pair] = down[expert] h[sorted row], N columns per program."""
    wait_for_inputs(DEPENDENT)
    PACK: tl.constexpr = 2 if GROUP else 1
    KP: tl.constexpr = K // PACK
    STRIDE: tl.constexpr = INNER // PACK
    EVEN_N: tl.constexpr = HIDDEN % N == 0
    EVEN_K: tl.constexpr = INNER % K == 0
    tiles: tl.constexpr = (HIDDEN + N - 1) // N
    scale_columns: tl.constexpr = INNER // 128
    for tile in range(tl.program_id(0), tl.load(count) * tiles, tl.num_programs(0)):
        expert, start, rows, valid, shift = _block(blocks, limit, tile // tiles, ROWS)
        first = (tile % tiles) * N
        pick = tl.load(order + shift + rows, mask=valid, other=0)
        inside = tl.where(valid, rows, start)
        h_tile = rows
        w_tile = rows
        if not TMA:
            h_tile = h + inside.to(tl.int64)[:, None] * STRIDE + tl.arange(0, KP)[None, :]
            row = rows_of(first, HIDDEN, N, EVEN_N)
            part = w + row[:, None] * STRIDE + tl.arange(0, KP)[None, :]
            w_tile = part + expert.to(tl.int64) * (HIDDEN * STRIDE)
        w_row = expert * HIDDEN + first
        acc = tl.zeros((N, ROWS) if SWAP else (ROWS, N), tl.float32)
        if QUANT:
            scale = w_scale + (expert * (HIDDEN // 128) + first // 128) * scale_columns
            hs = h_scale + inside * hs_row
            for k in tl.range(0, INNER // K):
                hk = tl.load(hs + k * hs_block)
                wk = tl.load(scale + k)
                ht = tile_of(h, h_tile, start, k * K, INNER, True, TMA, K)
                zero = tl.zeros((N, ROWS) if SWAP else (ROWS, N), tl.float32)
                wt = tile_of(w, w_tile, w_row, k * K, INNER, True, TMA, K)
                acc = _scaled(acc, _product(zero, wt, ht, SWAP, PRECISION), hk, wk, SWAP)
        elif GROUP:
            groups: tl.constexpr = INNER // GROUP
            at = (w_row + rows_of(0, HIDDEN - first, N, EVEN_N)).to(tl.int64) * groups
            for k in tl.range(0, INNER // K):
                even, odd = halves(tl.load(h_tile + k * KP), y.dtype.element_ty)
                wt = tl.load(w_tile + k * KP)
                ws, wz = group_scale(w_scale, w_zero, at + k * K // GROUP, ZERO)
                acc = add_int4(acc, wt, ws, wz, even, odd, SWAP, ZERO)
        else:
            for k in tl.range(0, INNER, K):
                ht = tile_of(h, h_tile, start, k, INNER, EVEN_K, TMA, K)
                wt = tile_of(w, w_tile, w_row, k, INNER, EVEN_K, TMA, K)
                acc = _product(acc, wt, ht, SWAP, PRECISION)
        columns = first + tl.arange(0, N)
        out = (acc.T if SWAP else acc).to(y.dtype.element_ty)
        target = y + pick.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        tl.store(target, out, mask=valid[:, None] & (columns < HIDDEN)[None, :])


def plan_for(
    down: Weight, num_picks: int, shared: int = 0, dtype: torch.dtype = torch.bfloat16
) -> GroupedGemmPlan:
    """The plan for num_picks pairs, chosen by their mean number per expert. The last `shared`
    experts and their pairs are not counted: they only add blocks of rows. dtype: of the result.
    Tuning rules with "tall" apply only if that form's kernel can run."""
    slots, hidden, _ = down.data.shape
    inner = down.columns
    slots -= shared
    shape = {
        "kind": kind_of(down),
        "mean": num_picks / slots,
        "slots": slots,
        "hidden": hidden,
        "inner": inner,
    }
    return tuning.config_for(
        "experts",
        GroupedGemmPlan,
        down.data.device,
        **shape,
        tall=has_tall(down, dtype),
    )


def has_tall(down: Weight, dtype: torch.dtype) -> bool:
    """Whether the weights' GPU has a kernel for many rows of them and results of `dtype`."""
    if not is_hopper(down.data.device):
        return False
    if down.quantized:
        return dtype.itemsize == 2
    from rorqual.ops.triton.moe import grouped_gemm_sm90_bf16

    return grouped_gemm_sm90_bf16.fits(down, dtype)


def supported(w: ExpertWeights) -> bool:
    """fp8 needs one scale per 128x128 block and sizes that are multiples of 128; int4: see int4.py;
    unquantized weights have no limits. Other formats are not supported."""
    if w.gate_up.quantized and w.gate_up.is_int4:
        return int4.supported(w.gate_up) and int4.supported(w.down)
    if not (w.gate_up.quantized or w.down.quantized):
        return True
    sizes = w.down.data.shape[1:]
    blocks = w.gate_up.fp8_blocks and w.down.fp8_blocks
    return blocks and all(size % 128 == 0 for size in sizes)


def experts(
    x: Activation, ids: Tensor, weights: Tensor, w: ExpertWeights, base: Tensor | None = None
) -> Tensor:
    """rorqual.ops.reference.experts. x [T, hidden] bf16, fp16 or fp32; ids [T, K] int32 or int64,
    -1: on another rank; weights [T, K] fp32. base [T, hidden] is added before the sum is rounded.

    Form and plan depend on the number of pairs of routed experts, without fused shared experts. The
    grouped form's plan is for the expected number of pairs on this rank.
    """
    shared = w.num_fused_shared_experts
    num_picks = ids.numel() - ids.shape[0] * shared
    rows = hidden_of(x)
    if ids.numel() == 0:
        return torch.zeros_like(rows) if base is None else base.clone()
    if num_picks <= DIRECT_PICKS[kind_of(w.gate_up)]:
        return direct_experts(rows, ids, weights, w, direct_plan_for(w.down, num_picks), base)
    plan = plan_for(w.down, round(num_picks * w.local_fraction), shared, rows.dtype)
    return grouped_experts(x, ids, weights, w, plan, base=base)


def grouped_plan(
    w: ExpertWeights, tokens: int, top_k: int, dtype: torch.dtype = torch.bfloat16
) -> GroupedGemmPlan | None:
    """The plan for `tokens` tokens with top_k routed experts and the fused shared ones each. None:
    use the direct form, or dense GEMMs for shared experts."""
    kind = kind_of(w.down)
    shared = w.num_fused_shared_experts
    num_picks = tokens * top_k
    if num_picks <= DIRECT_PICKS[kind] or (shared and tokens > FUSED_SHARED_TOKENS[kind]):
        return None
    return plan_for(w.down, num_picks, shared, dtype)


def sorts_while_routing(down: Weight, num_picks: int) -> bool:
    """Whether the router should sort num_picks pairs, including those of fused shared experts."""
    return SORTS_WHILE_ROUTING and takes_buckets(num_picks, down.data.shape[0])


def grouped_experts(
    x: Activation | Quantized,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    plan: GroupedGemmPlan,
    dtype: torch.dtype | None = None,
    base: Tensor | None = None,
) -> Tensor:
    """Sort, two grouped GEMMs, weighted sum. x may be quantized with fp8 weights; `dtype` of the
    result is then required."""
    kind = dtype if isinstance(x, Quantized) else hidden_of(x).dtype
    assert kind is not None
    assert dtype in (None, kind)
    blocks = moe_align_block_size(ids, w.down.data.shape[0], plan.rows)
    return combine(_products(x, w, plan, blocks, ids.shape[1], kind), ids, weights, base)


def experts_deferred(
    x: Activation,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    plan: GroupedGemmPlan,
    base: Tensor | None = None,
    blocks: ExpertBlocks | None = None,
    padded: PaddedRows | None = None,
) -> DeferredMoESum:
    """Everything but the sum, if all experts are local. blocks: the pairs, sorted into blocks of
    plan.rows rows; None: sort them here. padded: of which rows all ids are -1."""
    blocks = blocks or moe_align_block_size(ids, w.down.data.shape[0], plan.rows)
    y = _products(x, w, plan, blocks, ids.shape[1], hidden_of(x).dtype)
    return DeferredMoESum(y, None, weights, base, combine, padded)


def _products(
    x: Activation | Quantized,
    w: ExpertWeights,
    plan: GroupedGemmPlan,
    blocks: ExpertBlocks,
    top_k: int,
    dtype: torch.dtype,
) -> Tensor:
    return first_product(x, w, plan, blocks, top_k, dtype)(w.down, blocks)


def first_product(
    x: Activation | Quantized,
    w: ExpertWeights,
    plan: GroupedGemmPlan,
    blocks: ExpertBlocks,
    top_k: int,
    dtype: torch.dtype,
) -> SecondProduct:
    """Launch silu(gate x) * (up x) of each pair. Returns what multiplies that by one matrix down
    [hidden, inner] of each expert, given these and blocks whose rows are those of `blocks`: [pairs,
    hidden], in pair order."""
    assert blocks.rows == plan.rows
    stages = plan.tall
    if stages and w.down.quantized:
        from rorqual.ops.triton.moe import grouped_gemm_sm90_fp8 as tall_fp8

        inner = tall_fp8.gate_up_product(x, w, blocks, top_k, dtype, stages)
        return lambda down, blocks: tall_fp8.product(inner, down, blocks, dtype, stages, True)
    if stages:
        from rorqual.ops.triton.moe import grouped_gemm_sm90_bf16 as tall

        assert not isinstance(x, Quantized), "16-bit weights take activations as they are"
        gated = tall.gate_up_product(hidden_of(x), w.gate_up, blocks, top_k, stages)
        return lambda down, blocks: tall.down_product(gated, down, blocks, stages)
    h = gate_up_product(x, w.gate_up, blocks, top_k, plan.up)
    return lambda down, blocks: down_product(h, down, blocks, dtype, plan.down)


def gate_up_product(
    x: Activation | Quantized, weight: Weight, blocks: ExpertBlocks, top_k: int, tile: Tile
) -> Tensor | Quantized:
    """silu(gate x) * (up x) of each pair, in sorted order: [pairs, inner], quantized if the weights
    are."""
    slots, rows, _ = weight.data.shape
    hidden = weight.columns
    inner = rows // 2
    num_picks = blocks.num_picks
    data, scale, strides = _activation(quantized(x, weight.ue8m0) if weight.fp8_blocks else x)
    device = weight.data.device
    h = (
        Quantized.empty(num_picks, inner, device, weight.ue8m0)
        if weight.fp8_blocks
        else torch.empty(num_picks, inner, dtype=data.dtype, device=device)
    )
    h_data, h_scale, h_strides = _activation(h)
    tile = _fitting(tile, weight)
    w = (
        TensorDescriptor.from_tensor(weight.data.view(slots * rows, hidden), [tile.n, tile.k])
        if tile.tma
        else weight.data
    )
    _gate_up_kernel[blocks.limit * triton.cdiv(inner, tile.n),](
        int4.words_of(data) if weight.is_int4 else data,
        scale,
        w,
        weight.scale,
        weight.zero,
        h_data,
        h_scale,
        blocks.order,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        *strides,
        *h_strides,
        hidden,
        inner,
        top_k,
        blocks.rows,
        **_constants(weight, tile),
        UE8M0=weight.ue8m0,
        **dependent(device),
    )
    return h


def down_product(
    h: Tensor | Quantized, weight: Weight, blocks: ExpertBlocks, dtype: torch.dtype, tile: Tile
) -> Tensor:
    """down h of each pair, in pair order: [pairs, hidden]. Rows of experts on other ranks are
    uninitialized."""
    slots, hidden, _ = weight.data.shape
    inner = weight.columns
    y = torch.empty(blocks.num_picks, hidden, dtype=dtype, device=weight.data.device)
    data, scale, strides = _activation(h)
    tile = _fitting(tile, weight)
    w: Any = weight.data
    if tile.tma:
        w = TensorDescriptor.from_tensor(weight.data.view(slots * hidden, inner), [tile.n, tile.k])
        data = TensorDescriptor.from_tensor(data, [blocks.rows, tile.k])
    _down_kernel[blocks.limit * triton.cdiv(hidden, tile.n),](
        int4.words_of(data) if weight.is_int4 else data,
        scale,
        w,
        weight.scale,
        weight.zero,
        y,
        blocks.order,
        blocks.blocks,
        blocks.count,
        blocks.limit,
        *strides,
        hidden,
        inner,
        blocks.rows,
        **_constants(weight, tile),
        **dependent(y.device, after_long=True),
    )
    return y


def _activation(x: Activation | Quantized) -> tuple[Any, Tensor | None, tuple[int, ...]]:
    if isinstance(x, Quantized):
        return x.data, x.scale, x.scale.stride()
    return hidden_of(x), None, (0, 0)


def _fitting(tile: Tile, weight: Weight) -> Tile:
    """Bulk copies only if the GPU has them and rows are 16-byte aligned. Older GPUs have less
    shared memory: use fewer stages. A step of int4 weights must be inside one group."""
    if weight.is_int4:
        n = tile.n if is_hopper(weight.data.device) else min(tile.n, int4.PORTABLE_ROWS)
        tile = replace(tile, tma=False, n=n, k=int4.step_of(weight, tile.k))
    if not is_hopper(weight.data.device):
        return replace(tile, tma=False, stages=min(tile.stages, 2))
    aligned = weight.data.shape[-1] * weight.data.element_size() % 16 == 0
    return replace(tile, tma=tile.tma and aligned)


def _constants(weight: Weight, tile: Tile) -> dict[str, Any]:
    fp8 = weight.fp8_blocks
    assert not weight.quantized or weight.is_int4 or (tile.k == 128 and fp8)
    # The assembler gives a kernel for sm_80 that lacks a few registers only 32, unless it is told
    # how many there are (Triton 3.8, 128 rows in bf16).
    named = tile.warps <= 8 and not is_hopper(weight.data.device)
    limit = {"maxnreg": 255} if named else {}
    return {
        "N": tile.n, "K": tile.k, "QUANT": fp8, "ZERO": weight.zero is not None,
        "GROUP": int4.group_of(weight) if weight.is_int4 else 0, "SWAP": tile.swap, "TMA": tile.tma,
        "PRECISION": "ieee", "num_warps": tile.warps, "num_stages": tile.stages, **limit,
    }  # fmt: skip
