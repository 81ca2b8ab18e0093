"""y = x W^T with W in fp8 e4m3 with one scale per 128x128 block, and x in fp8 with one scale per
token and 128 columns.

Partial sums over 128 columns are promoted to fp32. Few tokens: weights on the M side of the tensor
cores, columns split over several programs; the last one to finish adds their partial sums in a
fixed order. Many tokens: bulk copies of both operands.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rorqual.ops.activation import Activation, Quantized, hidden_of
from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm.linear_plan import (
    HEIGHTS,
    LinearPlan,
    PersistentPlan,
    SlicedPlan,
    StreamKPlan,
    TilePlan,
    WholeTilesPlan,
    whole_tiles,
)
from rorqual.ops.triton.rowwise.quantize import quantized
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import (
    dependent,
    is_ahead,
    is_hopper,
    multiprocessors,
    wait_for_inputs,
    zeroed_counters,
)

HALVES = TilePlan(128, 128, 8, 3, swap=False, tma=True, halves=True)
MIN_BLOCKS = 4  # least number of 128-column blocks per program


@triton.jit
def _tile_of(
    tile, tokens, ROWS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr
):
    """(token tile, weight tile). GROUP token tiles iterate over all weight tiles together, so that
    both stay in the cache."""
    n_tiles: tl.constexpr = (ROWS + N - 1) // N
    m_tiles = tl.cdiv(tokens, M)
    group = tile // (GROUP * n_tiles)
    height = tl.minimum(m_tiles - group * GROUP, GROUP)
    inside = tile % (GROUP * n_tiles)
    return group * GROUP + inside % height, inside // height


@triton.jit(do_not_specialize=["tokens", "shares", "split", "xs_block"])
def _linear_kernel(
    x,
    x_scale,
    w,
    w_scale,
    bias,
    y,
    partials,
    counters,
    tokens,
    shares,
    split,
    xs_row,
    xs_block,
    y_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (tile, part of the columns); shares: blocks of 128 columns per program."""
    wait_for_inputs(DEPENDENT)
    BLOCKS: tl.constexpr = COLUMNS // 128
    n_tiles: tl.constexpr = (ROWS + N - 1) // N
    share = tl.program_id(1)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, M) * n_tiles, tl.num_programs(0)):
        m_tile, n_tile = _tile_of(tile, tokens, ROWS, M, N, 8)
        token = m_tile * M + tl.arange(0, M)
        row = n_tile * N + tl.arange(0, N)
        inside = tl.minimum(token, tokens - 1)
        columns = tl.arange(0, 128)
        x_tile = token
        w_tile = row
        if not TMA:
            x_tile = x + inside.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
            w_tile = (
                w
                + (row if ROWS % N == 0 else tl.minimum(row, ROWS - 1)).to(tl.int64)[:, None]
                * COLUMNS
                + columns[None, :]
            )
        token_scale = x_scale + inside.to(tl.int64) * xs_row
        weight_scale = w_scale + n_tile * N // 128 * BLOCKS
        acc = tl.zeros((N, M) if SWAP else (M, N), tl.float32)
        for block in tl.range(share * shares, tl.minimum(share * shares + shares, BLOCKS)):
            factor = tl.load(token_scale + block * xs_block) * tl.load(weight_scale + block)
            if TMA:
                xt = x.load([m_tile * M, block * 128])
                wt = w.load([n_tile * N, block * 128])
            else:
                xt = tl.load(x_tile + block * 128)
                wt = tl.load(w_tile + block * 128)
            if SWAP:
                acc += tl.dot(wt, xt.T) * factor[None, :]
            else:
                acc += tl.dot(xt, wt.T) * factor[:, None]
        if SWAP:
            acc = acc.T
        valid = (token < tokens)[:, None] & (row < ROWS)[None, :]
        last = True
        if SPLIT:
            held = partials + token.to(tl.int64)[:, None] * ROWS + row[None, :]
            tl.store(
                held + share * tokens.to(tl.int64) * ROWS, acc, mask=valid, cache_modifier=".cg"
            )
            # all threads have stored their part before this program is counted
            tl.debug_barrier()
            last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
            if last:
                acc = tl.zeros((M, N), tl.float32)
                for part in range(split):
                    acc += tl.load(
                        held + part * tokens.to(tl.int64) * ROWS,
                        mask=valid,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                tl.store(counters + tile, 0)
        if last:
            if BIAS:
                acc += tl.load(bias + row, mask=row < ROWS, other=0.0).to(tl.float32)[None, :]
            tl.store(
                y + token.to(tl.int64)[:, None] * y_row + row[None, :],
                acc.to(y.dtype.element_ty),
                mask=valid,
            )


@triton.jit(do_not_specialize=["tokens", "xs_block"])
def _halves_kernel(
    x,
    x_scale,
    w,
    w_scale,
    bias,
    y,
    tokens,
    xs_row,
    xs_block,
    y_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """For many tokens: x and w are descriptors, w's with N / 2 rows."""
    wait_for_inputs(DEPENDENT)
    BLOCKS: tl.constexpr = COLUMNS // 128
    HALF: tl.constexpr = N // 2
    n_tiles: tl.constexpr = (ROWS + N - 1) // N
    for tile in range(tl.program_id(0), tl.cdiv(tokens, M) * n_tiles, tl.num_programs(0)):
        m_tile, n_tile = _tile_of(tile, tokens, ROWS, M, N, 8)
        token = m_tile * M + tl.arange(0, M)
        token_scale = x_scale + tl.minimum(token, tokens - 1).to(tl.int64) * xs_row
        weight_scale = w_scale + n_tile * N // 128 * BLOCKS
        low = tl.zeros((M, HALF), tl.float32)
        high = tl.zeros((M, HALF), tl.float32)
        for block in tl.range(0, BLOCKS):
            factor = (tl.load(token_scale + block * xs_block) * tl.load(weight_scale + block))[
                :, None
            ]
            xt = x.load([m_tile * M, block * 128])
            low += tl.dot(xt, w.load([n_tile * N, block * 128]).T) * factor
            high += tl.dot(xt, w.load([n_tile * N + HALF, block * 128]).T) * factor
        _store_half(y, bias, low, token, n_tile * N, tokens, y_row, ROWS, HALF, BIAS)
        _store_half(y, bias, high, token, n_tile * N + HALF, tokens, y_row, ROWS, HALF, BIAS)


@triton.jit
def _store_half(
    y,
    bias,
    acc,
    token,
    first,
    tokens,
    y_row,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = first + tl.arange(0, HALF)
    if BIAS:
        acc += tl.load(bias + row, mask=row < ROWS, other=0.0).to(tl.float32)[None, :]
    valid = (token < tokens)[:, None] & (row < ROWS)[None, :]
    tl.store(
        y + token.to(tl.int64)[:, None] * y_row + row[None, :],
        acc.to(y.dtype.element_ty),
        mask=valid,
    )


def supported(weight: Weight) -> bool:
    """fp8 with one scale per 128x128 block and whole blocks of columns; any number of rows."""
    return weight.fp8_blocks and weight.data.shape[1] % 128 == 0


def plan_for(weight: Weight, tokens: int) -> LinearPlan:
    rows, columns = weight.data.shape
    shape = {
        "tokens": tokens,
        "rows": rows,
        "columns": columns,
        # of 128 x 128: with less than a GPU has multiprocessors, these decide more than the sizes
        "tiles": triton.cdiv(tokens, 128) * triton.cdiv(rows, 128),
    }
    device = weight.data.device
    plan = tuning.config_for("linear_fp8", LinearPlan, device, **shape)
    if isinstance(plan, WholeTilesPlan):
        return whole_tiles(tokens, rows, columns, multiprocessors(device))
    return plan


def linear(
    x: Activation | Quantized,
    weight: Weight,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    plan: LinearPlan | None = None,
) -> Tensor:
    """x [T, columns], quantized here unless it is already; weight [rows, columns]. Returns [T,
    rows] in `dtype` (None: x's, or bf16)."""
    dtype = dtype or (torch.bfloat16 if isinstance(x, Quantized) else hidden_of(x).dtype)
    x = quantized(x, weight.ue8m0)
    tokens = x.shape[0]
    rows = weight.data.shape[0]
    device = weight.data.device
    y = torch.empty(tokens, rows, dtype=dtype, device=device)
    if tokens == 0:
        return y
    plan = plan or plan_for(weight, tokens)
    hopper = is_hopper(device)
    if hopper and isinstance(plan, PersistentPlan) and is_ahead():
        # ranges of tokens with one height may be too narrow for any step of a start
        for m, (_, stages) in HEIGHTS.items():
            _run(x, weight, bias, y, PersistentPlan(m, stages))
    _run(x, weight, bias, y, plan if hopper else plan.portable())
    return y


def _run(x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: LinearPlan) -> None:
    """Launch the kernel of a plan's kind."""
    if isinstance(plan, SlicedPlan):
        from rorqual.ops.triton.gemm import fp8_gemm_sm90_sliced

        if fp8_gemm_sm90_sliced.fits(plan, weight, y):
            fp8_gemm_sm90_sliced.launch(x, weight, bias, y, plan)
            return
        plan = plan.unsliced()
    if isinstance(plan, StreamKPlan):
        from rorqual.ops.triton.gemm import fp8_gemm_sm90_streamk

        fp8_gemm_sm90_streamk.launch(x, weight, bias, y, plan)
        return
    if isinstance(plan, PersistentPlan):
        from rorqual.ops.triton.gemm import fp8_gemm_sm90_persistent

        if fp8_gemm_sm90_persistent.fits(weight, y):
            fp8_gemm_sm90_persistent.launch(x, weight, bias, y, plan)
            return
        plan = HALVES
    assert isinstance(plan, TilePlan)
    (_launch_halves if plan.halves else _launch_tiles)(x, weight, bias, y, plan)


def _programs(tiles: int, plan: TilePlan, device: torch.device) -> int:
    return min(tiles, plan.waves * multiprocessors(device)) if plan.waves else tiles


def _launch_halves(
    x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: TilePlan
) -> None:
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    assert plan.n == 128
    programs = _programs(triton.cdiv(tokens, plan.m) * triton.cdiv(rows, plan.n), plan, y.device)
    operands = (
        TensorDescriptor.from_tensor(x.data, [plan.m, 128]),
        TensorDescriptor.from_tensor(weight.data, [plan.n // 2, 128]),
    )
    _halves_kernel[programs,](
        operands[0],
        x.scale,
        operands[1],
        weight.scale,
        bias,
        y,
        tokens,
        *x.scale.stride(),
        y.stride(0),
        rows,
        columns,
        plan.m,
        plan.n,
        bias is not None,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **dependent(y.device),
    )


def _launch_tiles(
    x: Quantized, weight: Weight, bias: Tensor | None, y: Tensor, plan: TilePlan
) -> None:
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    device = y.device
    tiles = triton.cdiv(tokens, plan.m) * triton.cdiv(rows, plan.n)
    shares, split = _split(plan, tiles, columns // 128, multiprocessors(device))
    partials = (
        torch.empty(split, tokens, rows, dtype=torch.float32, device=device) if split > 1 else None
    )
    counters = zeroed_counters(device, tiles) if split > 1 else None
    x_data, w_data = _operands(x.data, weight.data, plan)
    _linear_kernel[_programs(tiles, plan, device), split](
        x_data,
        x.scale,
        w_data,
        weight.scale,
        bias,
        y,
        partials,
        counters,
        tokens,
        shares,
        split,
        *x.scale.stride(),
        y.stride(0),
        rows,
        columns,
        plan.m,
        plan.n,
        split > 1,
        plan.swap,
        plan.tma,
        bias is not None,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **dependent(device),
    )


def _split(plan: TilePlan, tiles: int, blocks: int, processors: int) -> tuple[int, int]:
    """(blocks of columns per program, programs per tile): about two programs per multiprocessor,
    each with enough work."""
    wanted = min(plan.split, max(1, 2 * processors // tiles), max(1, blocks // MIN_BLOCKS))
    shares = triton.cdiv(blocks, wanted)
    return shares, triton.cdiv(blocks, shares)


def _operands(x: Tensor, w: Tensor, plan: TilePlan) -> tuple[Any, Any]:
    if not plan.tma:
        return x, w
    return TensorDescriptor.from_tensor(x, [plan.m, 128]), TensorDescriptor.from_tensor(
        w, [plan.n, 128]
    )
