"""The router's top-k in one kernel: rorqual.ops.reference.route (arXiv 2412.19437, section 2.1.2;
group limits: 2405.04434).

For a few tokens the router GEMM is fused: each program multiplies a gate row or two, and a token's
last program to finish selects. For a batch, router_gemm.py's partial sums are added here. Logits
are sums in a fixed order, independent of other tokens. Padding rows of a captured step choose no
expert: their ids are -1 and their weights 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.ops.activation import PendingNorm
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import RouterWeights
from rorqual.ops.triton.moe.align import (
    ROUTER_COUNTERS,
    ExpertBlocks,
    append_to_buckets,
    bucket_counts,
    plan_if_last,
)
from rorqual.ops.triton.rowwise.norm import normed
from rorqual.ops.triton.runtime.launch import (
    dependent,
    next_power,
    wait_for_inputs,
    zeroed_counters,
)
from rorqual.ops.triton.runtime.padding import padding, real_rows
from rorqual.ops.triton.runtime.prefetch import fetch_row_ahead

# Router GEMM and top-k are one kernel for up to so many tokens and multiplications: every token
# reads the whole gate.
ROUTER_TOKENS = 2
ROUTER_PRODUCTS = 1 << 21
PART = 2048  # most columns that a program multiplies at once
NOBODY: tl.constexpr = tl.constexpr(-(2**31))  # below the key of every float
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _ordered(values):
    """int32 keys with the order of fp32 values: a warp's integer maximum is one instruction, its
    float maximum ten."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The inverse of `_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, index, SIZE: tl.constexpr):
    """(the largest of `keys` [SIZE], its lowest index). Exact: key and index are not packed in one
    word."""
    top = tl.max(keys, 0)
    return top, tl.min(tl.where(keys == top, index, SIZE), 0)


@triton.jit
def _group_worth(members, SIZE: tl.constexpr, BEST_TWO: tl.constexpr):
    """Score of each group, [groups]: its best expert, or the sum of its best two. members [groups,
    SIZE]."""
    worth = tl.max(members, 1)
    if BEST_TWO:
        index = tl.arange(0, SIZE)[None, :]
        first = tl.min(tl.where(members == worth[:, None], index, SIZE), 1)
        worth += tl.max(tl.where(index == first[:, None], float("-inf"), members), 1)
    return worth


class Sorting(NamedTuple):
    """Buffers for sorting pairs in the router's kernel (align.py)."""

    order: Any
    blocks: Any
    count: Any
    counts: Any
    num_picks: Any
    limit: Any


class Rules(NamedTuple):
    """Constants: the router's rules and sizes. WIDTH, K_WIDTH and GROUP_WIDTH: powers of 2 that
    hold experts, a token's experts, and groups. ROUNDED: the type to which weights are rounded.
    ROWS of a block and BINS of the sort; ROWS is 0 without sorting."""

    EXPERTS: Any
    WIDTH: Any
    TOP_K: Any
    SHARED: Any
    K_WIDTH: Any
    SIGMOID: Any
    BIAS: Any
    GROUPS: Any
    GROUP_WIDTH: Any
    KEEP: Any
    BEST_TWO: Any
    NORM: Any
    ROUNDED: Any
    ROWS: Any
    BINS: Any


@triton.jit
def _kept_groups(choice, expert, rules):
    """choice with the experts outside the KEEP best groups set to -inf."""
    SIZE: tl.constexpr = rules.EXPERTS // rules.GROUPS
    group = tl.arange(0, rules.GROUP_WIDTH)
    if rules.EXPERTS == rules.WIDTH and rules.GROUPS == rules.GROUP_WIDTH:
        worth = _group_worth(tl.reshape(choice, (rules.GROUPS, SIZE)), SIZE, rules.BEST_TWO)
    else:
        member = (expert // SIZE)[None, :] == group[:, None]
        worth = _group_worth(
            tl.where(member, choice[None, :], float("-inf")), rules.WIDTH, rules.BEST_TWO
        )
    keys = tl.where(group < rules.GROUPS, _ordered(worth), NOBODY)
    kept = expert < 0
    for _ in tl.static_range(rules.KEEP):
        _, chosen = _best(keys, group, rules.GROUP_WIDTH)
        kept = kept | (expert // SIZE == chosen)
        keys = tl.where(group == chosen, NOBODY, keys)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def _choose(x, bias, ids, weights, token, scaling, requests, real, sorting, rules):
    """Top-k of one token from its logits x, fp32 [WIDTH], -inf beyond EXPERTS. Appends SHARED fused
    shared experts, with weight 1, to the TOP_K routed ones. Tokens from number `real` on are
    padding, unless `requests` is None. Callers construct `sorting` and `rules` in the call:
    assigned to a name first, constants would become tensors."""
    expert = tl.arange(0, rules.WIDTH)
    present = expert < rules.EXPERTS
    if rules.SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if rules.BIAS:
        choice += tl.load(bias + expert, mask=present, other=0.0)
    choice = tl.where(present, choice, float("-inf"))
    if rules.GROUPS > 1:
        choice = _kept_groups(choice, expert, rules)
    slot = tl.arange(0, rules.K_WIDTH)
    keys = _ordered(choice)
    chosen = tl.zeros((rules.K_WIDTH,), tl.int32)
    weight = tl.zeros((rules.K_WIDTH,), tl.float32)
    for k in tl.static_range(rules.TOP_K):
        top, best = _best(keys, expert, rules.WIDTH)
        chosen = tl.where(slot == k, best, chosen)
        # without a bias the score is the key itself
        score = tl.sum(tl.where(expert == best, scores, 0.0), 0) if rules.BIAS else _value(top)
        weight = tl.where(slot == k, score, weight)
        keys = tl.where(expert == best, NOBODY, keys)
    if rules.NORM:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    weight = (weight * scaling).to(rules.ROUNDED).to(tl.float32)
    if rules.SHARED > 0:
        chosen = tl.where(slot < rules.TOP_K, chosen, rules.EXPERTS - rules.TOP_K + slot)
        weight = tl.where(slot < rules.TOP_K, weight, 1.0)
    mine = slot < rules.TOP_K + rules.SHARED
    sorted_in = mine
    if requests is not None:
        chosen = tl.where(token < real, chosen, -1)
        weight = tl.where(token < real, weight, 0.0)
        sorted_in = mine & (token < real)
    out = token * (rules.TOP_K + rules.SHARED) + slot
    tl.store(ids + out, chosen.to(ids.dtype.element_ty), mask=mine)
    tl.store(weights + out, weight, mask=mine)
    if rules.ROWS > 0:
        s = sorting
        append_to_buckets(chosen, out.to(tl.int32), sorted_in, s.order, s.counts, s.num_picks)
        tokens = s.num_picks // (rules.TOP_K + rules.SHARED)
        plan_if_last(
            tokens, s.blocks, s.count, s.counts, s.num_picks, s.limit, rules.ROWS, rules.BINS
        )


@triton.jit(do_not_specialize=["num_picks", "limit", "each", "first"])
def _route_kernel(
    logits,
    bias,
    ids,
    weights,
    split_stride,
    stride,
    scaling,
    requests,
    each,
    first,
    order,
    blocks,
    count,
    counts,
    num_picks,
    limit,
    SPLITS: tl.constexpr,
    LOGITS: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    K_WIDTH: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
    BEST_TWO: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per token. Logits are sums of SPLITS parts, in order, rounded to the type
    LOGITS."""
    real = real_rows(tl.num_programs(0), requests, each, first)
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, WIDTH)
    present = expert < EXPERTS
    x = tl.load(logits + token * stride + expert, mask=present, other=float("-inf")).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(
            logits + split * split_stride + token * stride + expert, mask=present, other=0.0
        )
    x = x.to(LOGITS).to(tl.float32)
    _choose(
        x,
        bias,
        ids,
        weights,
        token,
        scaling,
        requests,
        real,
        Sorting(order, blocks, count, counts, num_picks, limit),
        Rules(
            EXPERTS,
            WIDTH,
            TOP_K,
            SHARED,
            K_WIDTH,
            SIGMOID,
            BIAS,
            GROUPS,
            GROUP_WIDTH,
            KEEP,
            BEST_TWO,
            NORM,
            ROUNDED,
            ROWS,
            BINS,
        ),
    )


@triton.jit
def _part(pointers, column, columns, EVEN: tl.constexpr, WIDTH: tl.constexpr):
    if EVEN:
        return tl.load(pointers + column)
    else:
        return tl.load(pointers + column, mask=column + tl.arange(0, WIDTH) < columns, other=0.0)


@triton.jit
def _normed_row(x, residual, factor, out, total, columns, eps, STORES, HIDDEN: tl.constexpr):
    """The norm of x + residual at `columns` of one row, with weights `factor`, as in
    rowwise/norm.py; both are stored if STORES."""
    inside = columns < HIDDEN
    values = tl.load(x + columns, mask=inside, other=0.0)
    other = tl.load(residual + columns, mask=inside, other=0.0)
    values = (values.to(tl.float32) + other.to(tl.float32)).to(x.dtype.element_ty)
    y = normed(values.to(tl.float32), factor, HIDDEN, eps, x.dtype.element_ty)
    if STORES:
        tl.store(total + columns, values, mask=inside)
        tl.store(out + columns, y, mask=inside)
    return y


@triton.jit(do_not_specialize=["num_picks", "limit", "each", "first"])
def _router_kernel(
    x,
    residual,
    norm_weight,
    out,
    total,
    gate,
    logits,
    counters,
    bias,
    ids,
    weights,
    x_row,
    residual_row,
    eps,
    scaling,
    requests,
    each,
    first,
    order,
    blocks,
    count,
    counts,
    num_picks,
    limit,
    PENDING: tl.constexpr,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    LOGITS: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    K_WIDTH: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    KEEP: tl.constexpr,
    BEST_TWO: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (expert, token). Logits are rounded to the type LOGITS and stored in fp32. PENDING: x
    is first added to the residual stream and normed, in one part of K columns; every program does
    so, and a token's first one stores the results."""
    EVEN: tl.constexpr = HIDDEN % K == 0
    row = tl.program_id(0)
    token = tl.program_id(1)
    columns = tl.arange(0, K)
    w_row = gate + row * HIDDEN + columns
    # loaded before the wait: no kernel of a step writes weights
    weight = _part(w_row, 0, HIDDEN, EVEN, K).to(tl.float32)
    real = real_rows(tl.num_programs(1), requests, each, first)
    if PENDING:
        factor = tl.load(norm_weight + columns, mask=columns < HIDDEN, other=0.0)
        fetch_row_ahead(residual + token.to(tl.int64) * residual_row, HIDDEN, HIDDEN, DEPENDENT)
    if BIAS:
        fetch_row_ahead(bias, EXPERTS, EXPERTS, DEPENDENT)
    wait_for_inputs(DEPENDENT)
    x_columns = x + token.to(tl.int64) * x_row + columns
    if PENDING:
        at = token.to(tl.int64)
        y = _normed_row(
            x + at * x_row,
            residual + at * residual_row,
            factor,
            out + at * HIDDEN,
            total + at * HIDDEN,
            columns,
            eps,
            row == 0,
            HIDDEN,
        )
        acc = weight * y.to(LOGITS).to(tl.float32)
    else:
        acc = weight * _part(x_columns, 0, HIDDEN, EVEN, K).to(LOGITS).to(tl.float32)
    for k in tl.range(K, HIDDEN, K, num_stages=STAGES):
        acc += _part(w_row, k, HIDDEN, EVEN, K).to(tl.float32) * _part(
            x_columns, k, HIDDEN, EVEN, K
        ).to(LOGITS).to(tl.float32)
    token_logits = logits + token * EXPERTS
    tl.store(token_logits + row, tl.sum(acc, 0).to(LOGITS).to(tl.float32), cache_modifier=".cg")
    tl.debug_barrier()  # the logit is stored before this program is counted
    if tl.atomic_add(counters + token, 1, sem="acq_rel") == EXPERTS - 1:
        expert = tl.arange(0, WIDTH)
        values = tl.load(
            token_logits + expert, mask=expert < EXPERTS, other=float("-inf"), cache_modifier=".cg"
        )
        tl.store(counters + token, 0)
        _choose(
            values,
            bias,
            ids,
            weights,
            token,
            scaling,
            requests,
            real,
            Sorting(order, blocks, count, counts, num_picks, limit),
            Rules(
                EXPERTS,
                WIDTH,
                TOP_K,
                SHARED,
                K_WIDTH,
                SIGMOID,
                BIAS,
                GROUPS,
                GROUP_WIDTH,
                KEEP,
                BEST_TWO,
                NORM,
                ROUNDED,
                ROWS,
                BINS,
            ),
        )


def route(logits: Tensor, bias: Tensor | None, moe: MoEConfig, dtype: torch.dtype = torch.int64,
          rounded: torch.dtype = torch.float32, shared: int = 0, kind: torch.dtype | None = None,
          into: ExpertBlocks | None = None,
          padded: PaddedRows | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits [T, E], bias [E] fp32 or None; (ids [T, K] in `dtype`, weights [T, K] fp32), best
    first, ties to the lowest expert.

    logits may be partial sums [S, T, E] (router_gemm.py), which are added in order and rounded to
    the type `kind`. rounded: weights are fp32, rounded to this type. shared: number of fused shared
    experts E, E + 1, ... to append with weight 1. into: where to sort the pairs of all tokens
    (align.empty_blocks with buckets). padded: which rows are padding.
    """
    parts = logits if logits.dim() == 3 else logits[None]
    splits, tokens, experts = parts.shape
    ids, weights = _outputs(tokens, moe.top_k + shared, dtype, logits.device)
    if tokens:
        _route_kernel[tokens,](
            logits,
            bias,
            ids,
            weights,
            parts.stride(0),
            parts.stride(1),
            float(moe.scaling),
            *padding(padded),
            SPLITS=splits,
            LOGITS=KINDS[kind or logits.dtype],
            **_sorting(into, ids, experts + shared),
            **_options(moe, experts, bias, rounded, shared),
            num_warps=1 if experts <= 256 else 4,
            **dependent(logits.device),
        )
    return ids, weights


def joint(x: Tensor, gate: Tensor) -> bool:
    """Whether `router` supports this and is faster."""
    few = (
        x.shape[0] <= min(ROUTER_TOKENS, ROUTER_COUNTERS)
        and x.shape[0] * gate.numel() <= ROUTER_PRODUCTS
    )
    return few and x.stride(1) == 1 and gate.is_contiguous()


def takes_norm(hidden: int) -> bool:
    """Whether `router` can also compute the norm before it: a row must be one part."""
    return hidden <= PART


def router(
    x: Tensor | PendingNorm,
    w: RouterWeights,
    dtype: torch.dtype = torch.int64,
    rounded: torch.dtype = torch.float32,
    into: ExpertBlocks | None = None,
    padded: PaddedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Router GEMM and top-k of a few tokens: hidden states x [T, hidden] with constant row stride,
    and a contiguous gate. Also computes a pending norm, if `takes_norm`."""
    pending = None
    if isinstance(x, PendingNorm):
        assert not x.done
        assert takes_norm(x.x.shape[1])
        pending = x
        x = pending.x
    (tokens, hidden) = x.shape
    gate = w.gate
    moe = w.config
    shared = w.num_fused_shared_experts
    experts = gate.shape[0]
    assert x.stride(1) == 1
    assert gate.is_contiguous()
    ids, weights = _outputs(tokens, moe.top_k + shared, dtype, x.device)
    if tokens:
        logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
        width = min(next_power(hidden), PART)
        _router_kernel[experts, tokens](
            x,
            pending and pending.residual,
            pending and pending.weight,
            pending and pending.out,
            pending and pending.total,
            gate,
            logits,
            zeroed_counters(x.device, ROUTER_COUNTERS),
            w.bias,
            ids,
            weights,
            x.stride(0),
            pending.residual.stride(0) if pending else 0,
            pending.eps if pending else 0.0,
            float(moe.scaling),
            *padding(padded),
            PENDING=pending is not None,
            HIDDEN=hidden,
            K=width,
            STAGES=3,
            LOGITS=KINDS[torch.float32 if moe.router_fp32 else gate.dtype],
            **_sorting(into, ids, experts + shared),
            **_options(moe, experts, w.bias, rounded, shared),
            num_warps=1 if hidden <= PART and experts <= 256 else 2,
            **dependent(x.device),
        )
    if pending:
        pending.done = True
    return ids, weights


def _outputs(
    tokens: int, each: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    ids = torch.empty(tokens, each, dtype=dtype, device=device)
    return ids, torch.empty(tokens, each, dtype=torch.float32, device=device)


def _sorting(into: ExpertBlocks | None, ids: Tensor, slots: int) -> dict[str, Any]:
    """Kernel arguments for sorting in the router's kernel."""
    if into is None:
        return {
            "order": ids,
            "blocks": ids,
            "count": ids,
            "counts": ids,
            "num_picks": 0,
            "limit": 0,
            "ROWS": 0,
            "BINS": 1,
        }
    assert into.num_picks == ids.numel()
    bins = next_power(slots)
    counts = bucket_counts(ids.device, bins)
    return {
        "order": into.order,
        "blocks": into.blocks,
        "count": into.count,
        "counts": counts,
        "num_picks": into.num_picks,
        "limit": into.limit,
        "ROWS": into.rows,
        "BINS": bins,
    }


def _options(
    moe: MoEConfig, experts: int, bias: Tensor | None, rounded: torch.dtype, shared: int
) -> dict[str, Any]:
    groups = moe.n_group if moe.method != "greedy" else 1
    return {
        "EXPERTS": experts,
        "WIDTH": next_power(experts),
        "TOP_K": moe.top_k,
        "SHARED": shared,
        "K_WIDTH": next_power(moe.top_k + shared),
        "SIGMOID": moe.scoring == "sigmoid",
        "BIAS": bias is not None,
        "GROUPS": groups,
        "GROUP_WIDTH": next_power(groups),
        "KEEP": moe.topk_group,
        "BEST_TWO": moe.method == "noaux_tc",
        "NORM": moe.norm_topk_prob,
        "ROUNDED": KINDS[rounded],
    }
