"""The token with the largest logit of each row: `Ops.argmax`, for greedy decoding. torch uses one
program per row, 38 us for one row of 129,280; here a row is split into parts that fill the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.runtime.launch import (
    dependent,
    multiprocessors,
    next_power,
    wait_for_inputs,
)
from rorqual.ops.triton.sampling.sampling import NEVER, _chunk

CHUNK = 2048  # tokens that a program reads at a time


@triton.jit(do_not_specialize=["chunks", "parts"])
def _part_kernel(
    logits,
    peaks,
    firsts,
    row_stride,
    vocab,
    chunks,
    parts,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, part): the largest logit of several chunks, and the first token with it. NaN
    counts as the largest."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    part = tl.program_id(1)
    argmax = tl.full((CHUNK,), NEVER, tl.float32)
    at = tl.full((CHUNK,), 0, tl.int32) + vocab
    for chunk in range(part * chunks, part * chunks + chunks):
        token, x = _chunk(logits, row, chunk, row_stride, vocab, CHUNK)
        x = tl.where(x == x, x, float("inf"))
        # the first of equal ones; -inf if there is nothing else
        better = (x > argmax) | ((at == vocab) & (token < vocab))
        argmax = tl.where(better, x, argmax)
        at = tl.where(better, token, at)
    peak = tl.max(argmax, 0)
    tl.store(peaks + row * parts + part, peak)
    tl.store(firsts + row * parts + part, tl.min(tl.where(argmax == peak, at, vocab), 0))


@triton.jit(do_not_specialize=["parts"])
def _whole_kernel(peaks, firsts, out, parts, SIZE: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    part = tl.arange(0, SIZE)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=NEVER)
    first = tl.load(firsts + row * parts + part, mask=part < parts, other=2**31 - 1)
    tl.store(out + row, tl.min(tl.where(peak == tl.max(peak, 0), first, 2**31 - 1), 0).to(tl.int64))


def argmax(logits: Tensor) -> Tensor:
    """logits [M, V] in any float format, contiguous rows: [M] int64, the first of a row's
    largest."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    size = min(CHUNK, next_power(vocab))
    wanted = min(triton.cdiv(vocab, size), triton.cdiv(4 * multiprocessors(logits.device), rows))
    chunks = triton.cdiv(triton.cdiv(vocab, size), wanted)
    parts = triton.cdiv(vocab, size * chunks)
    peaks = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    firsts = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    late = dependent(logits.device)
    _part_kernel[rows, parts](
        logits, peaks, firsts, logits.stride(0), vocab, chunks, parts, size, num_warps=4, **late
    )
    _whole_kernel[rows,](peaks, firsts, out, parts, next_power(parts), num_warps=1, **late)
    return out
