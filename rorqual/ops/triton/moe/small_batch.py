"""Routed experts for a few (token, expert) pairs: two kernels; each program reads the weight rows
of one pair and multiplies without tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.gemm import int4
from rorqual.ops.triton.gemm.int4 import group_scale, halves, int4_terms
from rorqual.ops.triton.rowwise.quantize import to_fp8
from rorqual.ops.triton.rowwise.silu import silu_exp
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs


@dataclass(frozen=True)
class DirectPlan:
    """Tiles [weight rows, columns] of the two direct kernels; down_rows is shared by a token's
    experts. down_warps, down_stages: the second kernel's, if they differ from the first one's."""

    up_rows: int
    up_columns: int
    down_rows: int
    down_columns: int
    warps: int = 8
    stages: int = 3
    down_warps: int | None = None
    down_stages: int | None = None


# most pairs for this form, which reads an expert's weights again for each pair
DIRECT_PICKS = {"bf16": 16, "fp8": 8, "int4": 16, "fp32": 2}


@triton.jit
def rows_of(first, limit, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Indices first .. first + SIZE, clamped below `limit` if tiles do not divide it."""
    rows = first + tl.arange(0, SIZE)
    return rows if EVEN else tl.minimum(rows, limit - 1)


@triton.jit
def tile_of(
    source,
    pointers,
    first,
    column,
    columns,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A tile [rows, WIDTH] at `column`: through a descriptor, from row `first`, or through
    pointers to its first column."""
    if TMA:
        return source.load([first, column])
    elif EVEN:
        return tl.load(pointers + column)
    else:
        return tl.load(
            pointers + column, mask=(column + tl.arange(0, WIDTH))[None, :] < columns, other=0.0
        )


@triton.jit
def _rounded(x, BLOCKS: tl.constexpr, UE8M0: tl.constexpr):
    """fp32 [BLOCKS * 128] after a round trip through fp8, as [BLOCKS, 128]."""
    data, scale = to_fp8(x, BLOCKS, UE8M0)
    return data.to(tl.float32) * scale[:, None]


@triton.jit
def _direct_gate_up_kernel(
    x,
    ids,
    w,
    w_scale,
    w_zero,
    h,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    QUANT: tl.constexpr,
    UE8M0: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """N columns of h[pair]: program (tile, pair)."""
    wait_for_inputs(DEPENDENT)
    first = tl.program_id(0) * N
    pick = tl.program_id(1)
    expert = tl.load(ids + pick).to(tl.int64)
    if expert >= 0:
        PACK: tl.constexpr = 2 if GROUP else 1
        KP: tl.constexpr = K // PACK
        STRIDE: tl.constexpr = HIDDEN // PACK
        EVEN: tl.constexpr = HIDDEN % K == 0
        BLOCKS: tl.constexpr = K // 128
        columns = tl.arange(0, KP)
        row = rows_of(first, INNER, N, INNER % N == 0)
        gate_rows = w + expert * (2 * INNER * STRIDE) + row[:, None] * STRIDE + columns[None, :]
        gate = tl.zeros((N, KP), tl.float32)
        up = tl.zeros((N, KP), tl.float32)
        x_row = x + (pick // TOP_K).to(tl.int64) * STRIDE + columns
        for k in tl.range(0, STRIDE, KP, num_stages=STAGES):
            inside = k + columns < STRIDE
            xk = tl.load(x_row + k, mask=inside, other=0.0)
            g = tile_of(w, gate_rows, 0, k, STRIDE, EVEN, False, KP)
            u = tile_of(w, gate_rows + INNER * STRIDE, 0, k, STRIDE, EVEN, False, KP)
            if GROUP == 0:
                xk = xk.to(tl.float32)
                g = g.to(tl.float32)
                u = u.to(tl.float32)
            if GROUP:
                groups: tl.constexpr = HIDDEN // GROUP
                at = (expert * (2 * INNER) + row) * groups + k * PACK // GROUP
                even, odd = halves(xk, h.dtype.element_ty)
                even = even.to(tl.float32)[None, :]
                odd = odd.to(tl.float32)[None, :]
                gs, gz = group_scale(w_scale, w_zero, at[:, None], ZERO)
                us, uz = group_scale(w_scale, w_zero, (at + INNER * groups)[:, None], ZERO)
                gate += int4_terms(g, gs, gz, even, odd, ZERO)
                up += int4_terms(u, us, uz, even, odd, ZERO)
            elif QUANT:
                scale_columns: tl.constexpr = HIDDEN // 128
                blocks = k // 128 + tl.arange(0, BLOCKS)
                scale = (
                    w_scale + (expert * (2 * INNER // 128) + first // 128) * scale_columns + blocks
                )
                known = blocks < scale_columns
                rounded = _rounded(xk, BLOCKS, UE8M0)
                gs = tl.load(scale, mask=known, other=0.0)
                us = tl.load(scale + INNER // 128 * scale_columns, mask=known, other=0.0)
                gate += g * tl.reshape(rounded * gs[:, None], (K,))[None, :]
                up += u * tl.reshape(rounded * us[:, None], (K,))[None, :]
            else:
                gate += g * xk[None, :]
                up += u * xk[None, :]
        g = tl.sum(gate, 1)
        u = tl.sum(up, 1)
        rows = first + tl.arange(0, N)
        y = (silu_exp(g) * u).to(h.dtype.element_ty)
        tl.store(h + pick.to(tl.int64) * INNER + rows, y, mask=rows < INNER)


@triton.jit
def _picked(
    ids,
    weights,
    token,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
):
    """(pair, expert, weight) of a token's pairs FIRST .. LAST, [PICKS]; unused: expert -1, weight
    0."""
    slots = FIRST + tl.arange(0, PICKS)
    pick = token * TOP_K + slots
    expert = tl.load(ids + pick, mask=slots < LAST, other=-1).to(tl.int64)
    return (
        pick.to(tl.int64),
        expert,
        tl.load(weights + pick, mask=(slots < LAST) & (expert >= 0), other=0.0),
    )


@triton.jit
def _down_terms(
    h,
    w,
    w_scale,
    w_zero,
    pick,
    expert,
    first,
    rows,
    k,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    PICKS: tl.constexpr,
    K: tl.constexpr,
    QUANT: tl.constexpr,
    UE8M0: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    kind: tl.constexpr,
):
    """down[expert] times h[pair] before the sum over columns, K of them from k on: [PICKS, rows,
    K]. In int4 a word has two columns, and k counts words: [PICKS, rows, K / 2]."""
    PACK: tl.constexpr = 2 if GROUP else 1
    STRIDE: tl.constexpr = INNER // PACK
    columns = k + tl.arange(0, K // PACK)
    here = expert >= 0
    inside = columns < STRIDE
    hk = tl.load(
        h + pick[:, None] * STRIDE + columns[None, :],
        mask=here[:, None] & inside[None, :],
        other=0.0,
    )
    w_tile = (
        w
        + expert[:, None, None] * (HIDDEN * STRIDE)
        + rows[None, :, None] * STRIDE
        + columns[None, None, :]
    )
    wk = tl.load(w_tile, mask=here[:, None, None] & inside[None, None, :], other=0.0)
    if GROUP:
        even, odd = halves(hk, kind)
        even = even.to(tl.float32)[:, None, :]
        odd = odd.to(tl.float32)[:, None, :]
        # an unused pair reads slot 0's weights and multiplies by zeros
        at = (tl.maximum(expert, 0)[:, None] * HIDDEN + rows[None, :]) * (INNER // GROUP)
        at = (at + k * PACK // GROUP)[:, :, None]
        ws, wz = group_scale(w_scale, w_zero, at, ZERO)
        return int4_terms(wk, ws, wz, even, odd, ZERO)
    else:
        hk = hk.to(tl.float32)
        wk = wk.to(tl.float32)
        if QUANT:
            BLOCKS: tl.constexpr = K // 128
            scale_columns: tl.constexpr = INNER // 128
            blocks = k // 128 + tl.arange(0, BLOCKS)
            scale = (
                w_scale
                + (expert * (HIDDEN // 128) + first // 128)[:, None] * scale_columns
                + blocks[None, :]
            )
            ws = tl.load(scale, mask=here[:, None] & (blocks < scale_columns)[None, :], other=0.0)
            rounded = _rounded(tl.reshape(hk, (PICKS * K,)), PICKS * BLOCKS, UE8M0)
            hk = tl.reshape(rounded * tl.reshape(ws, (PICKS * BLOCKS,))[:, None], (PICKS, K))
        return wk * hk[:, None, :]


@triton.jit
def _weighted(acc, weight, kind: tl.constexpr):
    """The sum over columns, rounded as a GEMM's result, then over the token's experts."""
    return tl.sum(tl.sum(acc, 2).to(kind).to(tl.float32) * weight[:, None], 0)


@triton.jit
def _direct_down_kernel(
    h,
    ids,
    weights,
    w,
    w_scale,
    w_zero,
    base,
    out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    MORE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    QUANT: tl.constexpr,
    UE8M0: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    STAGES: tl.constexpr,
    BASE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """N columns of out[token], over all of the token's experts: program (tile, token). PICKS and
    MORE are powers of 2 whose sum is at least TOP_K: with eight routed experts and a shared one, a
    single 16 would be nearly half unused."""
    wait_for_inputs(DEPENDENT)
    kind: tl.constexpr = out.dtype.element_ty
    FIRST: tl.constexpr = TOP_K if MORE == 0 else PICKS
    first = tl.program_id(0) * N
    token = tl.program_id(1)
    rows = rows_of(first, HIDDEN, N, HIDDEN % N == 0)
    pick, expert, weight = _picked(ids, weights, token, 0, FIRST, TOP_K, PICKS)
    PACK: tl.constexpr = 2 if GROUP else 1
    KP: tl.constexpr = K // PACK
    acc = tl.zeros((PICKS, N, KP), tl.float32)
    if MORE > 0:
        pick_2, expert_2, weight_2 = _picked(ids, weights, token, PICKS, TOP_K, TOP_K, MORE)
        acc_2 = tl.zeros((MORE, N, KP), tl.float32)
    for k in tl.range(0, INNER // PACK, KP, num_stages=STAGES):
        acc += _down_terms(
            h, w, w_scale, w_zero, pick, expert, first, rows, k,
            HIDDEN, INNER, PICKS, K, QUANT, UE8M0, GROUP, ZERO, kind,
        )  # fmt: skip
        if MORE > 0:
            acc_2 += _down_terms(
                h, w, w_scale, w_zero, pick_2, expert_2, first, rows, k,
                HIDDEN, INNER, MORE, K, QUANT, UE8M0, GROUP, ZERO, kind,
            )  # fmt: skip
    total = _weighted(acc, weight, kind)
    if MORE > 0:
        total += _weighted(acc_2, weight_2, kind)
    target = first + tl.arange(0, N)
    if BASE:
        total += tl.load(
            base + token.to(tl.int64) * HIDDEN + target, mask=target < HIDDEN, other=0.0
        ).to(tl.float32)
    tl.store(
        out + token.to(tl.int64) * HIDDEN + target,
        total.to(out.dtype.element_ty),
        mask=target < HIDDEN,
    )


def kind_of(weight: Weight) -> str:
    if weight.quantized:
        return "int4" if weight.is_int4 else "fp8"
    return "fp32" if weight.data.dtype == torch.float32 else "bf16"


def direct_plan_for(down: Weight, num_picks: int) -> DirectPlan:
    """For few pairs: small tiles, so that there are enough programs for the GPU."""
    hidden = down.data.shape[1]
    inner = down.columns
    return tuning.config_for(
        "experts_direct",
        DirectPlan,
        down.data.device,
        kind=kind_of(down),
        picks=num_picks,
        hidden=hidden,
        inner=inner,
    )


def direct_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    plan: DirectPlan | None = None,
    base: Tensor | None = None,
) -> Tensor:
    """Two kernels; every pair reads its expert's weights separately."""
    (tokens, top_k) = ids.shape
    hidden = x.shape[1]
    inner = w.down.columns
    packed = w.gate_up.is_int4
    plan = plan or direct_plan_for(w.down, tokens * top_k)
    h = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    late = dependent(x.device)
    _direct_gate_up_kernel[triton.cdiv(inner, plan.up_rows), tokens * top_k](
        int4.words_of(x) if packed else x,
        ids,
        w.gate_up.data,
        w.gate_up.scale,
        w.gate_up.zero,
        h,
        hidden,
        inner,
        top_k,
        plan.up_rows,
        *_format(w.gate_up, plan.up_columns),
        plan.stages,
        num_warps=plan.warps,
        **late,
    )
    width, more = split_picks(top_k)
    rows = max(1, plan.down_rows // width)
    _direct_down_kernel[triton.cdiv(hidden, rows), tokens](
        int4.words_of(h) if packed else h,
        ids,
        weights,
        w.down.data,
        w.down.scale,
        w.down.zero,
        base,
        out,
        hidden,
        inner,
        top_k,
        width,
        more,
        rows,
        *_format(w.down, plan.down_columns),
        plan.down_stages or plan.stages,
        base is not None,
        num_warps=plan.down_warps or plan.warps,
        **late,
    )
    return out


def _format(weight: Weight, columns: int) -> tuple[int, bool, bool, int, bool]:
    """K, QUANT, UE8M0, GROUP and ZERO. A step of int4 weights is inside one group."""
    if weight.is_int4:
        zero = weight.zero is not None
        return int4.step_of(weight, columns), False, False, int4.group_of(weight), zero
    return columns, weight.quantized, weight.ue8m0, 0, False


def split_picks(top_k: int) -> tuple[int, int]:
    """Powers of 2 that hold a token's experts: one, or two if one would be more than a third
    unused."""
    whole = next_power(top_k)
    more = next_power(top_k - whole // 2)
    return (whole // 2, more) if top_k > 2 and 3 * (whole // 2 + more) <= 2 * whole else (whole, 0)
