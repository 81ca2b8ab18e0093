"""y = x W^T with W in int8, int4 or e4m3 with a scale per row, for any number of tokens.

Few tokens: columns are split over several programs, and the last one to finish adds their partial
sums in a fixed order, as in gemm/fp8_gemm.py. Many tokens: int4 weights are dequantized to 16 bits
(widened.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import Weight
from rorqual.ops.triton.quantized import int4_direct, operands, rounded_direct, widened
from rorqual.ops.triton.quantized.int4_direct import DirectTile
from rorqual.ops.triton.quantized.operands import sums
from rorqual.ops.triton.quantized.rows import RoundedRows
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import (
    COUNTERS,
    dependent,
    is_hopper,
    multiprocessors,
    wait_for_inputs,
    zeroed_counters,
)

LEAST_SHARE = 256  # columns of a program
PORTABLE_ROWS = 64  # of weights in a tile before sm_90


@dataclass(frozen=True)
class QuantizedLinearPlan:
    """m tokens and n weight rows per tile; split: most programs that share a tile's columns.
    direct: use int4_direct.py's kernel, with tiles of m tokens and exactly `split` programs; of
    one token with 8-bit activations rounded_direct.py's.
    widened: dequantize the weight to 16 bits first, if widened.py supports it."""

    m: int
    n: int = 64
    warps: int = 4
    stages: int = 4
    split: int = 1
    direct: DirectTile | None = None
    widened: bool = False


@triton.jit(do_not_specialize=["tokens", "share_steps", "split", "xs_group"])
def _quantized_linear_kernel(
    x,
    x_scale,
    w,
    w_scale,
    w_zero,
    bias,
    y,
    partials,
    counters,
    tokens,
    share_steps,
    split,
    x_row,
    xs_row,
    xs_group,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    K: tl.constexpr,
    INT4: tl.constexpr,
    SHARE: tl.constexpr,
    W_GROUP: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_SCALED: tl.constexpr,
    ZERO: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (tile, part of the columns): share_steps steps of K columns. SHARE: weight rows of a
    scale. Token tiles of one weight tile are consecutive."""
    wait_for_inputs(DEPENDENT)
    STEPS: tl.constexpr = COLUMNS // K
    PACK: tl.constexpr = 2 if INT4 else 1
    WIDTH: tl.constexpr = K // PACK
    groups: tl.constexpr = (COLUMNS + W_GROUP - 1) // W_GROUP if W_GROUP else 1
    tile = tl.program_id(0)
    share = tl.program_id(1)
    m_tiles = tl.cdiv(tokens, M)
    token = (tile % m_tiles) * M + tl.arange(0, M)
    row = (tile // m_tiles) * N + tl.arange(0, N)
    inside = (row if ROWS % N == 0 else tl.minimum(row, ROWS - 1)).to(tl.int64)
    present = tl.minimum(token, tokens - 1).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    x_tile = x + present[:, None] * x_row + column
    w_tile = w + inside[:, None] * (COLUMNS // PACK) + column
    scales = inside // SHARE * groups
    w_zeros = w_zero + scales if ZERO else scales
    x_scales = x_scale + present * xs_row if X_SCALED else present
    first = share * share_steps
    last = tl.minimum(first + share_steps, STEPS)
    acc = sums(
        x_tile, token < tokens, x_scales, xs_group, w_tile, w_scale + scales, w_zeros, first, last,
        N, M, K, INT4, W_GROUP, X_GROUP, X_SCALED, ZERO,
    ).T  # fmt: skip
    valid = (token < tokens)[:, None] & (row < ROWS)[None, :]
    done = True
    if SPLIT:
        size = tokens.to(tl.int64) * ROWS
        held = partials + token.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(held + share * size, acc, mask=valid, cache_modifier=".cg")
        # all threads have stored their part before this program is counted
        tl.debug_barrier()
        done = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
        if done:
            acc = tl.zeros((M, N), tl.float32)
            for part in range(split):
                acc += tl.load(held + part * size, mask=valid, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if done:
        if BIAS:
            acc += tl.load(bias + row, mask=row < ROWS, other=0.0).to(tl.float32)[None, :]
        target = y + token.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(target, acc.to(y.dtype.element_ty), mask=valid)


def plan_for(weight: Weight, tokens: int, rounded: bool = False) -> QuantizedLinearPlan:
    """rounded: the tokens already are."""
    return tuning.config_for(
        "linear_quantized",
        QuantizedLinearPlan,
        weight.data.device,
        kind=operands.kind_of(weight),
        tokens=tokens,
        rows=weight.data.shape[0],
        columns=weight.columns,
        direct=int4_direct.takes(weight)
        or (tokens == 1 and not rounded and rounded_direct.takes(weight)),
    )


def linear(
    x: Tensor | RoundedRows,
    weight: Weight,
    bias: Tensor | None = None,
    plan: QuantizedLinearPlan | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x [T, columns] in bf16, fp16 or fp32, quantized here if the weight needs that, or already
    quantized; weight [rows, columns]; bias [rows]. Returns [T, rows] in `dtype` (None: x's)."""
    dtype = dtype or (torch.bfloat16 if isinstance(x, RoundedRows) else x.dtype)
    tokens = (x.data if isinstance(x, RoundedRows) else x).shape[0]
    plan = plan or plan_for(weight, tokens, isinstance(x, RoundedRows))
    if plan.widened and isinstance(x, Tensor) and widened.takes(weight, dtype):
        return F.linear(x, widened.widened(weight, dtype), bias)
    y = torch.empty(tokens, weight.data.shape[0], dtype=dtype, device=weight.data.device)
    if tokens:
        _launch(x, weight, bias, y, plan)
    return y


def _launch(
    x: Tensor | RoundedRows,
    weight: Weight,
    bias: Tensor | None,
    y: Tensor,
    plan: QuantizedLinearPlan,
) -> None:
    (tokens, rows) = y.shape
    device = y.device
    if plan.direct and isinstance(x, Tensor) and weight.activation != "wide":
        rows_of_x = x if x.stride(1) == 1 else x.contiguous()
        rounded_direct.linear(rows_of_x, weight, bias, y, plan.direct)
        return
    data, scale, xs_row, xs_group, x_group = operands.operand(x, weight)
    if plan.direct:
        assert weight.activation == "wide", "rows are rounded already"
        int4_direct.linear(data, weight, bias, y, plan.direct, plan.m, plan.split)
        return
    if not is_hopper(device):  # less shared memory as well
        plan = replace(plan, n=min(plan.n, PORTABLE_ROWS), stages=min(plan.stages, 3))
    tiles = triton.cdiv(tokens, plan.m) * triton.cdiv(rows, plan.n)
    fixed = operands.constants(weight, x_group, scale is not None)
    share_steps, split = _split(plan, tiles, weight.columns // fixed["K"], fixed["K"], device)
    partials = (
        torch.empty(split, tokens, rows, dtype=torch.float32, device=device) if split > 1 else None
    )
    _quantized_linear_kernel[tiles, split](
        data,
        scale,
        weight.data,
        weight.scale,
        weight.zero,
        bias,
        y,
        partials,
        zeroed_counters(device, tiles) if split > 1 else None,
        tokens,
        share_steps,
        split,
        data.stride(0),
        xs_row,
        xs_group,
        rows,
        weight.columns,
        plan.m,
        plan.n,
        split > 1,
        bias is not None,
        **fixed,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **dependent(device),
    )


def _split(
    plan: QuantizedLinearPlan, tiles: int, steps: int, k: int, device: torch.device
) -> tuple[int, int]:
    """(steps per program, programs per tile): about four programs per multiprocessor, each with
    enough work."""
    if tiles > COUNTERS:
        return steps, 1
    room = max(1, 4 * multiprocessors(device) // tiles)
    wanted = min(plan.split, room, max(1, steps * k // LEAST_SHARE))
    share = triton.cdiv(steps, wanted)
    return share, triton.cdiv(steps, share)
