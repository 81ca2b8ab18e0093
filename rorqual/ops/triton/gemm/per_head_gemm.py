"""x [T, H, a] times matrices [H, a, b] head by head for a few tokens: MLA's absorbed products,
which are memory-bound.

One token uses no tensor cores, as in gemv.py; a few do, as in skinny_gemm.py: the matrix has the
product's rows, the tokens its 16 columns. Both kernels load matrices before they wait for the
kernel that computes x, which cuBLAS does not. If the output projection is fp8, each program
quantizes its head's 128 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.activation import NormOutput, Quantized
from rorqual.ops.triton.rowwise.quantize import room_for, scale_of
from rorqual.ops.triton.runtime.launch import dependent, is_hopper, next_power, wait_for_inputs

# TritonOps uses these kernels up to so many tokens: without and with tensor cores. Above: cuBLAS.
TOKENS = 1
DOT_TOKENS = 16
MOST_TOKENS = 8  # without tensor cores
COLUMNS = 16  # of a product on tensor cores
ELEMENTS = 8192  # of a program's piece of a matrix
HEAD = 128  # columns of a scale


@triton.jit(do_not_specialize=["tokens"])
def _heads_kernel(
    x,
    matrices,
    out,
    tokens,
    x_token,
    x_head,
    m_head,
    m_row,
    m_column,
    A: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (head, N columns). A rows of a matrix, padded to WIDTH; M is the number of tokens
    rounded up to a power of 2."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, WIDTH)
    column = tl.program_id(1) * N + tl.arange(0, N)
    inside = (row < A)[:, None] & (column < B)[None, :]
    piece = tl.load(
        matrices + head * m_head + row[:, None] * m_row + column[None, :] * m_column,
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    wait_for_inputs(DEPENDENT)  # matrices are weights: no kernel of a step writes them
    for token in tl.static_range(M):
        if token < tokens:
            values = tl.load(x + token * x_token + head * x_head + row, mask=row < A, other=0.0).to(
                tl.float32
            )
            total = tl.sum(piece * values[:, None], 0)
            place = out + (token * tl.num_programs(0) + head) * B + column
            tl.store(place, total.to(out.dtype.element_ty), mask=column < B)


@triton.jit
def _piece(pointers, inner, outer, AXIS: tl.constexpr, WHOLE: tl.constexpr):
    """A tile masked by `inner` along AXIS and by `outer` along the other axis."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(
            pointers, mask=tl.expand_dims(inner, 1 - AXIS) & tl.expand_dims(outer, AXIS), other=0.0
        )


@triton.jit(do_not_specialize=["tokens", "scale_head"])
def _heads_dot_kernel(
    x,
    matrices,
    out,
    data,
    scale,
    tokens,
    x_token,
    x_head,
    m_head,
    m_row,
    m_column,
    scale_head,
    A: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    QUANT: tl.constexpr,
    UE8M0: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (head, N columns); M tokens, of which `tokens` exist; K rows of a matrix at a time.
    QUANT: N is all columns of a head, which share a scale."""
    head = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0)
    row = tl.arange(0, K)
    column = tl.program_id(1) * N + tl.arange(0, N)
    token = tl.arange(0, M)
    WHOLE: tl.constexpr = (A % K == 0) and (B % N == 0)
    there = token < tokens
    ours = column < B
    part = matrices + head * m_head + column[:, None] * m_column + row[None, :] * m_row
    x_part = x + head * x_head + token.to(tl.int64)[None, :] * x_token + row[:, None]
    first = _piece(part, row < A, ours, 1, WHOLE)  # weights: no kernel of a step writes them
    wait_for_inputs(DEPENDENT)
    acc = tl.dot(first, _piece(x_part, row < A, there, 0, False))
    for k in tl.range(K, A, K, num_stages=STAGES):
        piece = _piece(part + k * m_row, k + row < A, ours, 1, WHOLE)
        acc = tl.dot(piece, _piece(x_part + k, k + row < A, there, 0, False), acc)
    y = acc.to(out.dtype.element_ty)
    keep = there[None, :] & ours[:, None]
    place = (token.to(tl.int64)[None, :] * heads + head) * B + column[:, None]
    tl.store(out + place, y, mask=keep)
    if QUANT:
        exact = y.to(tl.float32)
        factor = scale_of(tl.maximum(tl.max(tl.abs(exact), 0), 1e-4), UE8M0)
        tl.store(data + place, (exact / factor[None, :]).to(tl.float8e4nv), mask=keep)
        tl.store(scale + token + head * scale_head, factor, mask=there)


def chosen(x: Tensor) -> bool:
    """Whether `heads_matmul` uses these kernels by default."""
    most = DOT_TOKENS if x.element_size() == 2 else TOKENS
    return 0 < x.shape[0] <= most and x.stride(2) == 1 and is_hopper(x.device)


def heads_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """x [T, H, a], T at most 16, contiguous columns; matrices [H, a, b] with any strides. Returns
    [T, H, b] contiguous; sums in fp32."""
    if x.shape[0] > TOKENS:
        return heads_dot(x, matrices)
    return heads_small(x, matrices)


def heads_small(x: Tensor, matrices: Tensor) -> Tensor:
    """The same without tensor cores, T at most 8."""
    (tokens, heads, rows) = x.shape
    columns = matrices.shape[2]
    assert tokens <= MOST_TOKENS
    assert x.stride(2) == 1
    out = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    if tokens:
        width = next_power(rows)
        n = max(1, min(next_power(columns), ELEMENTS // width))
        _heads_kernel[heads, triton.cdiv(columns, n)](
            x,
            matrices,
            out,
            tokens,
            x.stride(0),
            x.stride(1),
            *matrices.stride(),
            rows,
            columns,
            width,
            n,
            next_power(tokens),
            num_warps=4,
            **dependent(x.device),
        )
    return out


def heads_dot(x: Tensor, matrices: Tensor, made: Quantized | None = None) -> Tensor:
    """The same on tensor cores, T at most 16, 16-bit dtypes. made [T, H b]: receives the result in
    fp8 with concatenated heads; b must be 128."""
    (tokens, heads, rows) = x.shape
    columns = matrices.shape[2]
    assert tokens <= COLUMNS
    assert x.stride(2) == 1
    assert x.dtype == matrices.dtype
    assert x.element_size() == 2
    assert made is None or columns == HEAD
    out = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    data, scale, strides = room_for(made)
    if tokens:
        _heads_dot_kernel[heads, triton.cdiv(columns, HEAD)](
            x,
            matrices,
            out,
            data,
            scale,
            tokens,
            x.stride(0),
            x.stride(1),
            *matrices.stride(),
            strides[1],
            rows,
            columns,
            COLUMNS,
            HEAD,
            min(128, max(16, next_power(rows))),
            made is not None,
            made is not None and made.ue8m0,
            3,
            num_warps=4,
            **dependent(x.device),
        )
    return out


def joined_heads_dot(x: Tensor, matrices: Tensor, ue8m0: bool = False) -> NormOutput:
    """The same with concatenated heads, [T, H b], also quantized; b is 128."""
    made = Quantized.empty(x.shape[0], x.shape[1] * matrices.shape[2], x.device, ue8m0)
    return NormOutput(heads_dot(x, matrices, made).flatten(1), made)
