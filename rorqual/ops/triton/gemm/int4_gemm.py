"""y = x W^T with W in int4 and unquantized x (W4A16), for any number of tokens.

Few tokens: weights on the M side of the tensor cores and columns split over several programs; the
last one to finish adds their partial sums in a fixed order, as in fp8_gemm.py. Many tokens: larger
tiles of the same kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm import int4
from rorqual.ops.triton.gemm.int4 import add_int4, group_scale, halves
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


@dataclass(frozen=True)
class Int4Plan:
    """m tokens and n weight rows a tile, at most k columns a step; swap: weights on the M side;
    split: at most so many programs share a tile's columns."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = True
    split: int = 1


@triton.jit(do_not_specialize=["tokens", "share_steps", "split"])
def _int4_kernel(
    x,
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    SWAP: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (tile, part of the columns): share_steps steps of K columns. x in words of two
    columns; token tiles of one weight tile are consecutive."""
    wait_for_inputs(DEPENDENT)
    kind: tl.constexpr = y.dtype.element_ty
    STEPS: tl.constexpr = COLUMNS // K
    HALF: tl.constexpr = K // 2
    tile = tl.program_id(0)
    share = tl.program_id(1)
    m_tiles = tl.cdiv(tokens, M)
    token = (tile % m_tiles) * M + tl.arange(0, M)
    row = (tile // m_tiles) * N + tl.arange(0, N)
    inside = (row if ROWS % N == 0 else tl.minimum(row, ROWS - 1)).to(tl.int64)
    word = tl.arange(0, HALF)
    x_tile = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_row + word[None, :]
    w_tile = w + inside[:, None] * (COLUMNS // 2) + word[None, :]
    groups = inside * (COLUMNS // GROUP)
    acc = tl.zeros((N, M) if SWAP else (M, N), tl.float32)
    for step in tl.range(share * share_steps, tl.minimum((share + 1) * share_steps, STEPS)):
        even, odd = halves(tl.load(x_tile + step * HALF), kind)
        packed = tl.load(w_tile + step * HALF)
        scale, zero = group_scale(w_scale, w_zero, groups + step * K // GROUP, ZERO)
        acc = add_int4(acc, packed, scale, zero, even, odd, SWAP, ZERO)
    if SWAP:
        acc = acc.T
    valid = (token < tokens)[:, None] & (row < ROWS)[None, :]
    last = True
    if SPLIT:
        size = tokens.to(tl.int64) * ROWS
        held = partials + token.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(held + share * size, acc, mask=valid, cache_modifier=".cg")
        # all threads have stored their part before this program is counted
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
        if last:
            acc = tl.zeros((M, N), tl.float32)
            for part in range(split):
                acc += tl.load(held + part * size, mask=valid, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        if BIAS:
            acc += tl.load(bias + row, mask=row < ROWS, other=0.0).to(tl.float32)[None, :]
        target = y + token.to(tl.int64)[:, None] * ROWS + row[None, :]
        tl.store(target, acc.to(kind), mask=valid)


def plan_for(weight: Weight, tokens: int) -> Int4Plan:
    rows = weight.data.shape[0]
    return tuning.config_for(
        "linear_int4",
        Int4Plan,
        weight.data.device,
        tokens=tokens,
        rows=rows,
        columns=weight.columns,
        group=int4.group_of(weight),
    )


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, plan: Int4Plan | None = None
) -> Tensor:
    """x [T, columns] in bf16, fp16 or fp32; weight [rows, columns]; bias [rows]; [T, rows] in x's
    dtype."""
    tokens = x.shape[0]
    rows = weight.data.shape[0]
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if tokens:
        _launch(x, weight, bias, y, plan or plan_for(weight, tokens))
    return y


def _launch(x: Tensor, weight: Weight, bias: Tensor | None, y: Tensor, plan: Int4Plan) -> None:
    (tokens, rows) = y.shape
    words = int4.words_of(x)
    if not is_hopper(y.device):  # less shared memory as well
        plan = replace(plan, n=min(plan.n, int4.PORTABLE_ROWS), stages=min(plan.stages, 3))
    k = int4.step_of(weight, plan.k)
    tiles = triton.cdiv(tokens, plan.m) * triton.cdiv(rows, plan.n)
    share_steps, split = _split(plan, tiles, weight.columns // k, k, y.device)
    partials = (
        torch.empty(split, tokens, rows, dtype=torch.float32, device=y.device)
        if split > 1
        else None
    )
    _int4_kernel[tiles, split](
        words,
        weight.data,
        weight.scale,
        weight.zero,
        bias,
        y,
        partials,
        zeroed_counters(y.device, tiles) if split > 1 else None,
        tokens,
        share_steps,
        split,
        words.stride(0),
        rows,
        weight.columns,
        int4.group_of(weight),
        plan.m,
        plan.n,
        k,
        split > 1,
        plan.swap,
        weight.zero is not None,
        bias is not None,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **dependent(y.device),
    )


def _split(plan: Int4Plan, tiles: int, steps: int, k: int, device: torch.device) -> tuple[int, int]:
    """(steps per program, programs per tile): about four programs per multiprocessor, each with
    enough work."""
    if tiles > COUNTERS:
        return steps, 1
    room = max(1, 4 * multiprocessors(device) // tiles)
    wanted = min(plan.split, room, max(1, steps * k // LEAST_SHARE))
    share = triton.cdiv(steps, wanted)
    return share, triton.cdiv(steps, share)
