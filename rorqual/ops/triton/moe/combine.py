"""The weighted sum over each token's experts: alone, and fused with the residual addition and
RMSNorm that follow.

Both forms add in the same order and round at the same points, so results are bit-identical. The
fused form saves one launch, and one write and read of [T, hidden]. It has one program per token and
as many warps as the norm's kernel, since the order of the norm's sum depends on both. The sum of a
padding row of a captured step is 0: its experts were not computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.activation import Activation, Quantized, output_of
from rorqual.ops.deferred_sum import DeferredMoESum
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.triton.rowwise.norm import normed, warps_for
from rorqual.ops.triton.rowwise.quantize import room_for, store_fp8
from rorqual.ops.triton.runtime.launch import INTERPRETED, dependent, next_power, wait_for_inputs
from rorqual.ops.triton.runtime.padding import padding, real_rows
from rorqual.ops.triton.runtime.prefetch import fetch_row_ahead

# Steps of up to so many tokens fuse the sum with the next norm; 0: none. Longer ones would save
# only a seventh of the two kernels' bytes, and keep y [T K, hidden] allocated until the norm is
# done.
NORM_SUMS_TOKENS = 512
# registers per thread for rows being loaded; half with more than 8 warps (128 registers in all)
ROW_REGISTERS = 192


@triton.jit
def _row(y, ids, pick, offsets, inside, hidden, ABSENT: tl.constexpr):
    """The result of one (token, expert) pair. ABSENT: rows of experts on other ranks are
    uninitialized."""
    if ABSENT:
        inside = inside & (tl.load(ids + pick) >= 0)
    return tl.load(y + pick * hidden + offsets, mask=inside, other=0.0)


@triton.jit
def _zero_behind_a_barrier(token):
    """0.0 that the compiler cannot fold, nor compute before a barrier of all warps: the number of
    threads with token 2^31 - 1."""
    count = tl.inline_asm_elementwise(
        "{ .reg .pred never; setp.eq.s32 never, $1, 0x7fffffff; bar.red.popc.u32 $0, 0, never; }",
        "=r,r",
        [token.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return count.to(tl.float32)


@triton.jit
def _picked_sum(
    y,
    ids,
    weights,
    token,
    offsets,
    inside,
    hidden,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ABSENT: tl.constexpr,
):
    """Sum of weights[t, k] * y[t, k] in fp32, in the order of k.

    AT_ONCE: number of rows to load before the first is used. By itself (0) the compiler saves
    registers and has three or four loads in flight, so a program that is alone on its
    multiprocessor often waits for memory. The compiler moves no load across a barrier, but does
    move arithmetic, unless it depends on the barrier's result: hence the zero to start from."""
    parts = ()
    factors = ()
    total = tl.zeros((SIZE,), tl.float32)
    for k in tl.static_range(AT_ONCE):
        row = _row(y, ids, token * TOP_K + k, offsets, inside, hidden, ABSENT)
        parts += (row,)  # type: ignore[assignment]
        factors += (tl.load(weights + token * TOP_K + k),)  # type: ignore[assignment]
    if AT_ONCE > 0:
        total += _zero_behind_a_barrier(token)
    for k in tl.static_range(AT_ONCE):
        total += parts[k].to(tl.float32) * factors[k]
    for k in tl.static_range(AT_ONCE, TOP_K):
        part = _row(y, ids, token * TOP_K + k, offsets, inside, hidden, ABSENT)
        total += part.to(tl.float32) * tl.load(weights + token * TOP_K + k)
    return total


@triton.jit(do_not_specialize=["each", "first"])
def _combine_kernel(
    y,
    ids,
    weights,
    base,
    out,
    requests,
    each,
    first,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    ABSENT: tl.constexpr,
    BASE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    real = real_rows(tl.num_programs(0), requests, each, first)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < HIDDEN
    summed = inside
    if requests is not None:
        summed = inside & (token < real)
    total = _picked_sum(y, ids, weights, token, columns, summed, HIDDEN, TOP_K, SIZE, 0, ABSENT)
    if BASE:
        total += tl.load(base + token * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["scale_block", "each", "first"])
def _combine_norm_kernel(
    y,
    ids,
    weights,
    base,
    residual,
    weight,
    out,
    total,
    data,
    scale,
    requests,
    each,
    first,
    r_row,
    hidden,
    eps,
    scale_row,
    scale_block,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ABSENT: tl.constexpr,
    BASE: tl.constexpr,
    QUANT: tl.constexpr,
    UE8M0: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per token: its sum, rounded as if it had been written; + residual, rounded; the
    norm of that. `hidden` is not a constexpr, as in the norm's kernel: division by a constant may
    round differently, and a known alignment may change the layout over threads."""
    offsets = tl.arange(0, SIZE)
    inside = offsets < hidden
    # loaded early, as no kernel of the step writes it; it is not in L2, since the experts' weights
    # went through it after the previous norm
    factor = tl.load(weight + offsets, mask=inside, other=0.0)
    real = real_rows(tl.num_programs(0), requests, each, first)
    token = tl.program_id(0).to(tl.int64)
    fetch_row_ahead(residual + token * r_row, hidden, SIZE, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    kind: tl.constexpr = out.dtype.element_ty
    other = tl.load(residual + token * r_row + offsets, mask=inside, other=0.0)
    if BASE:
        beside = tl.load(base + token * hidden + offsets, mask=inside, other=0.0)
    summed = inside
    if requests is not None:
        summed = inside & (token < real)
    x = _picked_sum(y, ids, weights, token, offsets, summed, hidden, TOP_K, SIZE, AT_ONCE, ABSENT)
    if BASE:
        x += beside.to(tl.float32)
    values = (x.to(kind).to(tl.float32) + other.to(tl.float32)).to(kind)
    tl.store(total + token * hidden + offsets, values, mask=inside)
    normal = normed(values.to(tl.float32), factor, hidden, eps, kind)
    tl.store(out + token * hidden + offsets, normal, mask=inside)
    if QUANT:
        store_fp8(
            normal.to(tl.float32),
            data,
            scale,
            token,
            0,
            hidden,
            hidden,
            scale_row,
            scale_block,
            SIZE,
            UE8M0,
        )


def combine(
    y: Tensor,
    ids: Tensor | None,
    weights: Tensor,
    base: Tensor | None = None,
    padded: PaddedRows | None = None,
) -> Tensor:
    """y [T K, hidden], ids [T, K] (-1: on another rank; None: all local) and weights [T, K] to the
    weighted sum [T, hidden], plus base [T, hidden]. padded: of which rows nothing is in y."""
    (tokens, top_k) = weights.shape
    hidden = y.shape[1]
    out = torch.empty(tokens, hidden, dtype=y.dtype, device=y.device)
    size = min(next_power(hidden), 512 if tokens <= 64 else 1024)
    _combine_kernel[tokens, triton.cdiv(hidden, size)](
        y,
        ids,
        weights,
        base,
        out,
        *padding(padded),
        hidden,
        top_k,
        size,
        ids is not None,
        base is not None,
        num_warps=4,
        **dependent(y.device, after_long=True),
    )
    return out


def rows_at_once(top_k: int, size: int, itemsize: int) -> int:
    """How many of a token's rows the fused form has registers for, besides residual, weight and
    base."""
    warps = warps_for(size)
    each = size * itemsize // 4 // (32 * warps)  # registers a thread
    return min(
        top_k, max(0, (ROW_REGISTERS if warps <= 8 else ROW_REGISTERS // 2) // max(1, each) - 3)
    )


def combine_add_norm(
    gave: DeferredMoESum,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    quantize_output: str | None = None,
) -> tuple[Activation, Tensor]:
    """(norm(sum + residual), sum + residual), both [T, hidden]: add_norm of `combine`'s result
    with the same `quantize_output`, bit for bit. The previous kernel must not write `weight`, which
    is read without waiting for it."""
    (tokens, top_k) = gave.weights.shape
    hidden = gave.y.shape[1]
    y = gave.y
    assert residual.shape == (tokens, hidden)
    assert residual.stride(1) == 1
    out, total = (torch.empty(tokens, hidden, dtype=y.dtype, device=y.device) for _ in range(2))
    made = Quantized.room(residual, quantize_output)
    data, scale, strides = room_for(made)
    size = max(16 if made is None else 128, next_power(hidden))
    at_once = 0 if INTERPRETED else rows_at_once(top_k, size, y.element_size())
    if tokens:
        _combine_norm_kernel[tokens,](
            y,
            gave.ids,
            gave.weights,
            gave.base,
            residual,
            weight,
            out,
            total,
            data,
            scale,
            *padding(gave.padded),
            residual.stride(0),
            hidden,
            eps,
            *strides,
            top_k,
            size,
            at_once,
            gave.ids is not None,
            gave.base is not None,
            made is not None,
            made is not None and made.ue8m0,
            num_warps=warps_for(size),
            **dependent(y.device, after_long=True),
        )
    return output_of(out, made), total
