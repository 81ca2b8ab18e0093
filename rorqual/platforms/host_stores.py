"""Small results written to pinned host memory by a kernel. A GPU's copy engine works through the
copies to the host in the order they were launched, whatever their streams: behind a gigabyte of
pages the tokens of a step would wait for 17 ms (H200)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # bytes of one program
MOST_BYTES = 64 * 2**10  # beyond, a copy; programs store single bytes


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def _store_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


def store(source: Tensor, target: Tensor) -> None:
    """source: on the current GPU; target: pinned, of the same shape and dtype, complete once the
    current stream is."""
    given = source.contiguous().view(-1).view(torch.uint8)
    count = given.shape[0]
    _store_kernel[(triton.cdiv(count, BLOCK),)](
        given, target.view(-1).view(torch.uint8), count, BLOCK
    )
