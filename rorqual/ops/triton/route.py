"""The router's choice in one kernel: rorqual.ops.reference.route (arXiv 2412.19437, section 2.1.2; group limits: 2405.04434)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.config import MoEConfig
from rorqual.ops.triton.launch import dependent, next_power, wait_for_inputs


@triton.jit
def _best(values, index, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """(largest value, the lowest index that holds it) along AXIS. Exact: no packing of value and index into one word."""
    top = tl.max(values, AXIS)
    held = values == (top if AXIS == 0 else top[:, None])
    return top, tl.min(tl.where(held, index if AXIS == 0 else index[None, :], SIZE), AXIS)


@triton.jit
def _kept_groups(choice, expert, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, GROUP_PAD: tl.constexpr,
                 KEEP: tl.constexpr, BEST_TWO: tl.constexpr):  # fmt: skip
    """choice with the experts outside the KEEP best groups set to -inf. A group counts by its best expert, or its best two."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUP_PAD)
    member = (expert // SIZE)[None, :] == group[:, None]
    spread = tl.where(member, choice[None, :], float("-inf"))
    worth, first = _best(spread, expert, WIDTH, 1)
    if BEST_TWO:
        worth += tl.max(tl.where(expert[None, :] == first[:, None], float("-inf"), spread), 1)
    worth = tl.where(group < GROUPS, worth, float("-inf"))
    kept = expert < 0
    for _ in tl.static_range(KEEP):
        _, chosen = _best(worth, group, GROUP_PAD, 0)
        kept = kept | (expert // SIZE == chosen)
        worth = tl.where(group == chosen, float("-inf"), worth)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def _route_kernel(logits, bias, ids, weights, stride, scaling, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
                  PICKS: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, GROUP_PAD: tl.constexpr,
                  KEEP: tl.constexpr, BEST_TWO: tl.constexpr, NORM: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    wait_for_inputs(DEPENDENT)
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    present = expert < EXPERTS
    x = tl.load(logits + token * stride + expert, mask=present, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    choice = scores
    if BIAS:
        choice += tl.load(bias + expert, mask=present, other=0.0)
    choice = tl.where(present, choice, float("-inf"))
    if GROUPS > 1:
        choice = _kept_groups(choice, expert, EXPERTS, WIDTH, GROUPS, GROUP_PAD, KEEP, BEST_TWO)
    slot = tl.arange(0, PICKS)
    chosen, weight = tl.zeros((PICKS,), tl.int32), tl.zeros((PICKS,), tl.float32)
    for k in tl.static_range(TOP_K):
        _, best = _best(choice, expert, WIDTH, 0)
        chosen = tl.where(slot == k, best, chosen)
        weight = tl.where(slot == k, tl.sum(tl.where(expert == best, scores, 0.0), 0), weight)
        choice = tl.where(expert == best, float("-inf"), choice)
    if NORM:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    out = token * TOP_K + slot
    tl.store(ids + out, chosen.to(ids.dtype.element_ty), mask=slot < TOP_K)
    tl.store(weights + out, weight * scaling, mask=slot < TOP_K)


def route(logits: Tensor, bias: Tensor | None, moe: MoEConfig, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """logits [T, E], bias [E] fp32 or None; (ids [T, K] in `dtype`, weights [T, K] fp32), best first, ties to the lowest expert."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, moe.top_k, dtype=dtype, device=logits.device)
    weights = torch.empty(tokens, moe.top_k, dtype=torch.float32, device=logits.device)
    groups = moe.n_group if moe.method != "greedy" else 1
    if tokens:
        _route_kernel[tokens,](
            logits, bias, ids, weights, logits.stride(0), float(moe.scaling), experts, next_power(experts), moe.top_k,
            next_power(moe.top_k), moe.scoring == "sigmoid", bias is not None, groups, next_power(groups), moe.topk_group,
            moe.method == "noaux_tc", moe.norm_topk_prob, num_warps=1 if experts <= 256 else 4, **dependent(logits.device))  # fmt: skip
    return ids, weights
