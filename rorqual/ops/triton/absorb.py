"""x [T, H, a] times matrices [H, a, b] head by head for a few tokens: MLA's absorb products, which only stream their matrices.

As in linear_small.py, by ordinary arithmetic, and with the matrices on their way before the kernel waits for the one that makes x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.launch import dependent, is_hopper, next_power, wait_for_inputs

# TritonOps takes this kernel for so many tokens at most: from four on the library's product is faster.
TOKENS = 1
MOST_TOKENS = 8
ELEMENTS = 8192  # of a program's piece of a matrix


@triton.jit(do_not_specialize=["tokens"])
def _heads_kernel(x, matrices, out, tokens, x_token, x_head, m_head, m_row, m_column, A: tl.constexpr, B: tl.constexpr,
                  WIDTH: tl.constexpr, N: tl.constexpr, M: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Program (head, N columns). A rows of a matrix, padded to WIDTH; M is the number of tokens rounded up to a power of 2."""
    head = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, WIDTH), tl.program_id(1) * N + tl.arange(0, N)
    inside = (row < A)[:, None] & (column < B)[None, :]
    piece = tl.load(matrices + head * m_head + row[:, None] * m_row + column[None, :] * m_column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(DEPENDENT)  # matrices are weights: no kernel of a step writes them
    for token in tl.static_range(M):
        if token < tokens:
            values = tl.load(x + token * x_token + head * x_head + row, mask=row < A, other=0.0).to(tl.float32)
            total = tl.sum(piece * values[:, None], 0)
            place = out + (token * tl.num_programs(0) + head) * B + column
            tl.store(place, total.to(out.dtype.element_ty), mask=column < B)


def chosen(x: Tensor) -> bool:
    """Whether `heads_matmul` takes this product by default."""
    return 0 < x.shape[0] <= TOKENS and x.stride(2) == 1 and is_hopper(x.device)


def heads_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """x [T, H, a], T at most 8, columns side by side; matrices [H, a, b] with any strides; [T, H, b] contiguous, sums in fp32."""
    (tokens, heads, rows), columns = x.shape, matrices.shape[2]
    assert tokens <= MOST_TOKENS
    assert x.stride(2) == 1
    out = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    if tokens:
        width = next_power(rows)
        n = max(1, min(next_power(columns), ELEMENTS // width))
        _heads_kernel[heads, triton.cdiv(columns, n)](
            x, matrices, out, tokens, x.stride(0), x.stride(1), *matrices.stride(), rows, columns, width, n, next_power(tokens),
            num_warps=4, **dependent(x.device))  # fmt: skip
    return out
