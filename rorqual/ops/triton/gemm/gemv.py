"""y = x W^T for a few tokens, and an MLP's gate and up with SwiGLU: memory-bound products.

Each program has a few weight rows with all columns and multiplies without tensor cores, so there
are no partial sums between programs. It loads its first tile of weights before it waits for the
kernel that computes x. For one token on Hopper, matrices whose share of a program fits into shared
memory have a kernel that loads all of it before (gemv_sm90.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.rowwise.silu import silu_exp
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import dependent, is_hopper, next_power, wait_for_inputs

# TritonOps uses this kernel up to so many tokens for bf16 and fp16 weights. 0: always cuBLAS.
TOKENS = 1
MOST_TOKENS = 8


@dataclass(frozen=True)
class SmallPlan:
    """n weight rows per program (with SwiGLU half gate, half up), k columns per step, warps,
    pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int


@triton.jit
def columns_at(pointers, column, columns, EVEN: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, WIDTH] at `column` of rows whose first columns are `pointers`."""
    if EVEN:
        return tl.load(pointers + column)
    else:
        return tl.load(
            pointers + column, mask=(column + tl.arange(0, WIDTH))[None, :] < columns, other=0.0
        )


@triton.jit
def _terms(w, x, M: tl.constexpr):
    """Products before their sum over columns: [N, K] for one token, else [M, N, K]."""
    w = w.to(tl.float32)
    x = x.to(tl.float32)
    if M == 1:
        return w * x
    else:
        return w[None, :, :] * x[:, None, :]


@triton.jit(do_not_specialize=["tokens"])
def _small_kernel(
    x,
    w,
    bias,
    y,
    tokens,
    x_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """N rows of y per program. M: number of tokens rounded up to a power of 2. GATED: w has ROWS
    gate rows, then ROWS up rows."""
    EVEN: tl.constexpr = COLUMNS % K == 0
    kind: tl.constexpr = y.dtype.element_ty
    row = tl.program_id(0) * N + tl.arange(0, N)
    columns = tl.arange(0, K)
    inside = row if ROWS % N == 0 else tl.minimum(row, ROWS - 1)
    w_rows = w + inside.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    first = columns_at(w_rows, 0, COLUMNS, EVEN, K)  # weights: no kernel of a step writes them
    up_rows = w_rows + ROWS * COLUMNS if GATED else w_rows
    first_up = columns_at(up_rows, 0, COLUMNS, EVEN, K) if GATED else first
    wait_for_inputs(DEPENDENT)
    token = tl.arange(0, M)
    x_rows = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * x_row + columns[None, :]
    xk = columns_at(x_rows, 0, COLUMNS, EVEN, K)
    acc = _terms(first, xk, M)
    up = _terms(first_up, xk, M) if GATED else acc
    for k in tl.range(K, COLUMNS, K, num_stages=STAGES):
        xk = columns_at(x_rows, k, COLUMNS, EVEN, K)
        acc += _terms(columns_at(w_rows, k, COLUMNS, EVEN, K), xk, M)
        if GATED:
            up += _terms(columns_at(up_rows, k, COLUMNS, EVEN, K), xk, M)
    out = tl.reshape(tl.sum(acc, 1 if M == 1 else 2), (M, N))
    if BIAS:
        out += tl.load(bias + inside).to(tl.float32)[None, :]
    if GATED:  # rounded where the separate ops round
        gate = out.to(kind).to(tl.float32)
        silu = silu_exp(gate).to(kind).to(tl.float32)
        out = silu * tl.reshape(tl.sum(up, 1 if M == 1 else 2), (M, N)).to(kind).to(tl.float32)
    valid = (token < tokens)[:, None] & (row < ROWS)[None, :]
    tl.store(y + token[:, None] * ROWS + row[None, :], out.to(kind), mask=valid)


def chosen(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` uses this kernel by default."""
    return 0 < x.shape[0] <= TOKENS and supported(x, weight) and is_hopper(x.device)


def supported(x: Tensor, weight: Tensor) -> bool:
    plain = x.dim() == 2 and x.stride(1) == 1 and weight.is_contiguous()
    return (
        plain
        and x.shape[0] <= MOST_TOKENS
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
    )


def plan_for(weight: Tensor, tokens: int) -> SmallPlan:
    rows, columns = weight.shape
    return tuning.config_for(
        "linear_small", SmallPlan, weight.device, tokens=tokens, rows=rows, columns=columns
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, plan: SmallPlan | None = None
) -> Tensor:
    """x [T, columns], T at most MOST_TOKENS; weight [rows, columns] contiguous; bias [rows]; [T,
    rows] in x's dtype, sums in fp32."""
    if plan is None and is_hopper(x.device):
        from rorqual.ops.triton.gemm import gemv_sm90

        if gemv_sm90.fits(x, weight):
            return gemv_sm90.linear(x, weight, bias)
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, y, False, plan)
    return y


def gate_up(x: Tensor, weight: Tensor, plan: SmallPlan | None = None) -> Tensor:
    """silu(gate x) * (up x), [T, I], with weight [2 I, columns]: gate's rows, then up's."""
    y = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    _launch(x, weight, None, y, True, plan)
    return y


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, gated: bool, plan: SmallPlan | None
) -> None:
    (tokens, rows) = y.shape
    columns = weight.shape[1]
    if tokens == 0:
        return
    plan = plan or plan_for(weight, tokens)
    n = max(1, plan.n // 2) if gated else plan.n
    _small_kernel[triton.cdiv(rows, n),](
        x,
        weight,
        bias,
        y,
        tokens,
        x.stride(0),
        rows,
        columns,
        next_power(tokens),
        n,
        min(plan.k, next_power(columns)),
        gated,
        bias is not None,
        plan.stages,
        num_warps=plan.warps,
        **dependent(x.device),
    )
