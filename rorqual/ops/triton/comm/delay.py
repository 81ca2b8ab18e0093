"""A kernel that ends after a given time, for benchmarks of slow links: one warp of one
multiprocessor waits."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["nanoseconds"])
def _delay_kernel(nanoseconds):
    start = globaltimer()
    now = start
    while now - start < nanoseconds.to(tl.int64):
        now = globaltimer()


def delay(seconds: float) -> None:
    """On the current stream; whatever the GPU's clocks are."""
    _delay_kernel[(1,)](round(seconds * 1e9), num_warps=1)
