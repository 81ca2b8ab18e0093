"""The router GEMM for a batch of tokens: tensor cores, and split columns so that many
multiprocessors share the loads.

x is bf16. Products with a bf16 gate are exact, and so are those with an fp32 gate as the sum of
three bf16 parts of 8 bits each; only the order of the sums differs from an fp32 GEMM. Each program
stores a partial sum; topk.py adds them in column order, so logits depend neither on other tokens
nor on which program finishes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.gemm.gemv import columns_at
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import (
    dependent,
    multiprocessors,
    next_power,
    wait_for_inputs,
)

# TritonOps uses this GEMM above topk.ROUTER_TOKENS tokens, and up to so many instead of cuBLAS in
# this dtype; for fp32 always, since cuBLAS then uses no tensor cores.
TOKENS = {torch.float32: 1 << 31, torch.bfloat16: 1024}
# An fp32 gate whose values fit bf16, as from a bf16 checkpoint, is stored in bf16: half the bytes,
# a third of the products.
NARROWS = True


@dataclass(frozen=True)
class GatePlan:
    """Tile of m tokens, n experts and k columns; at most `split` partial sums; warps; pipeline
    stages."""

    m: int
    n: int
    k: int
    split: int
    warps: int
    stages: int


@triton.jit
def _add_product(acc, w, x, PARTS: tl.constexpr):
    """acc + w x^T, [experts, tokens], w being the sum of PARTS bf16 matrices."""
    high = w.to(tl.bfloat16)
    if PARTS == 3:  # the smallest first
        rest = w - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        acc = tl.dot((rest - middle.to(tl.float32)).to(tl.bfloat16), x.T, acc)
        acc = tl.dot(middle, x.T, acc)
    return tl.dot(high, x.T, acc)


@triton.jit(do_not_specialize=["tokens"])
def _gate_kernel(
    x,
    gate,
    sums,
    tokens,
    x_row,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EACH: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """sums[split, token, expert] over EACH tiles of columns: program (token block, expert block,
    split)."""
    EVEN: tl.constexpr = HIDDEN % K == 0
    token = tl.program_id(0) * M + tl.arange(0, M)
    expert = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    columns = tl.arange(0, K)
    begin = split * EACH * K
    w_rows = gate + tl.minimum(expert, EXPERTS - 1)[:, None] * HIDDEN + columns[None, :]
    first = columns_at(w_rows, begin, HIDDEN, EVEN, K)  # weights: no kernel of a step writes them
    wait_for_inputs(DEPENDENT)
    x_rows = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_row + columns[None, :]
    acc = _add_product(
        tl.zeros((N, M), tl.float32), first, columns_at(x_rows, begin, HIDDEN, EVEN, K), PARTS
    )
    if EACH > 1:
        for k in tl.range(begin + K, tl.minimum(begin + EACH * K, HIDDEN), K, num_stages=STAGES):
            acc = _add_product(
                acc,
                columns_at(w_rows, k, HIDDEN, EVEN, K),
                columns_at(x_rows, k, HIDDEN, EVEN, K),
                PARTS,
            )
    out = sums + (split * tokens + token).to(tl.int64)[None, :] * EXPERTS + expert[:, None]
    tl.store(out, acc, mask=(token < tokens)[None, :] & (expert < EXPERTS)[:, None])


def held(gate: Tensor, dtype: torch.dtype) -> Tensor:
    """`gate`, or the same values in bf16 if hidden states are bf16 and bf16 holds all of them."""
    if not NARROWS or gate.is_meta or (gate.dtype, dtype) != (torch.float32, torch.bfloat16):
        return gate
    narrow = gate.to(torch.bfloat16)
    return narrow if torch.equal(narrow.float(), gate) else gate


def chosen(x: Tensor, gate: Tensor, kind: torch.dtype) -> bool:
    """Whether `partial_logits` is used for this product; otherwise it is a GEMM in `kind`."""
    return 0 < x.shape[0] <= TOKENS.get(kind, 0) and supported(x, gate)


def supported(x: Tensor, gate: Tensor) -> bool:
    return (
        x.dtype == torch.bfloat16
        and gate.dtype in (torch.bfloat16, torch.float32)
        and x.stride(1) == 1
        and gate.is_contiguous()
    )


def kind_of(gate: Tensor) -> str:
    return "bf16" if gate.dtype == torch.bfloat16 else "fp32"


def plan_for(gate: Tensor, tokens: int) -> GatePlan:
    experts, hidden = gate.shape
    return tuning.config_for(
        "gate",
        GatePlan,
        gate.device,
        kind=kind_of(gate),
        tokens=tokens,
        experts=experts,
        hidden=hidden,
    )


def partial_logits(x: Tensor, gate: Tensor, plan: GatePlan | None = None) -> Tensor:
    """Partial sums of logits [S, T, E] fp32. x [T, hidden] bf16, constant row stride, T at least 1;
    gate [E, hidden] bf16 or fp32."""
    (tokens, hidden) = x.shape
    experts = gate.shape[0]
    plan = plan or plan_for(gate, tokens)
    m = min(plan.m, max(16, next_power(tokens)))
    n = min(plan.n, max(16, next_power(experts)))
    blocks = (triton.cdiv(tokens, m), triton.cdiv(experts, n))
    steps = triton.cdiv(hidden, plan.k)
    wanted = max(1, min(plan.split, multiprocessors(x.device) // (blocks[0] * blocks[1])))
    # few kernel variants for steps of any size: a new prefill size must not compile one
    each = next_power(triton.cdiv(steps, wanted))
    splits = triton.cdiv(steps, each)
    sums = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    _gate_kernel[(*blocks, splits)](
        x,
        gate,
        sums,
        tokens,
        x.stride(0),
        hidden,
        experts,
        m,
        n,
        plan.k,
        each,
        1 if gate.dtype == torch.bfloat16 else 3,
        plan.stages,
        num_warps=plan.warps,
        **dependent(x.device),
    )
    return sums
