"""y = x W^T for a handful of tokens on the tensor cores: the weights take the rows of the product,
the tokens its 16 columns.

What the library's product costs here is not its time but that it knows nothing of dependent
launches: this kernel has its first tile of weights on its way before the kernel that makes x is
done. For fewer tokens gemv.py does without the tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import dependent, is_hopper, wait_for_inputs

# TritonOps uses this kernel up to so many tokens. 0: always cuBLAS.
TOKENS = 16
COLUMNS = 16  # of the product


@dataclass(frozen=True)
class SkinnyPlan:
    """n weight rows per program, k columns per step, warps, pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int


@triton.jit
def _tile(pointers, at, COLUMNS: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr, keep):
    """A tile from column `at` on, along AXIS; `keep` is None, or a mask of the other axis."""
    if COLUMNS % K == 0:
        return tl.load(pointers) if keep is None else tl.load(pointers, mask=keep, other=0.0)
    inside = tl.expand_dims(at + tl.arange(0, K) < COLUMNS, 1 - AXIS)
    return tl.load(pointers, mask=inside if keep is None else inside & keep, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _skinny_kernel(
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
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """N rows of y per program; M tokens, of which `tokens` exist."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    token = tl.arange(0, M)
    columns = tl.arange(0, K)
    inside = row if ROWS % N == 0 else tl.minimum(row, ROWS - 1)
    w_tile = w + inside.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    x_tile = x + token.to(tl.int64)[None, :] * x_row + columns[:, None]
    there = (token < tokens)[None, :]
    first = _tile(w_tile, 0, COLUMNS, K, 1, None)  # weights: no kernel of a step writes them
    wait_for_inputs(DEPENDENT)
    acc = tl.dot(first, _tile(x_tile, 0, COLUMNS, K, 0, there), input_precision=PRECISION)
    for k in tl.range(K, COLUMNS, K, num_stages=STAGES):
        wk = _tile(w_tile + k, k, COLUMNS, K, 1, None)
        acc = tl.dot(wk, _tile(x_tile + k, k, COLUMNS, K, 0, there), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + inside).to(tl.float32)[:, None]
    place = y + token.to(tl.int64)[None, :] * ROWS + row[:, None]
    tl.store(place, acc.to(y.dtype.element_ty), mask=there & (row < ROWS)[:, None])


def chosen(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` uses this kernel by default."""
    return 0 < x.shape[0] <= TOKENS and supported(x, weight) and is_hopper(x.device)


def supported(x: Tensor, weight: Tensor) -> bool:
    plain = x.dim() == 2 and x.stride(1) == 1 and weight.is_contiguous()
    return plain and x.shape[0] <= COLUMNS and x.dtype == weight.dtype


def plan_for(weight: Tensor, tokens: int) -> SkinnyPlan:
    rows, columns = weight.shape
    return tuning.config_for(
        "linear_skinny", SkinnyPlan, weight.device, tokens=tokens, rows=rows, columns=columns
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, plan: SkinnyPlan | None = None
) -> Tensor:
    """x [T, columns], T at most 16; weight [rows, columns] contiguous; bias [rows]; [T, rows] in
    x's dtype, sums in fp32."""
    (tokens, columns) = x.shape
    rows = weight.shape[0]
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if tokens:
        plan = plan or plan_for(weight, tokens)
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        _skinny_kernel[triton.cdiv(rows, plan.n),](
            x,
            weight,
            bias,
            y,
            tokens,
            x.stride(0),
            rows,
            columns,
            COLUMNS,
            plan.n,
            plan.k,
            bias is not None,
            plan.stages,
            precision,
            num_warps=plan.warps,
            **dependent(x.device),
        )
    return y
