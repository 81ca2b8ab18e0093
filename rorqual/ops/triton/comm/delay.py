"""Kernels that end after a given time, for benchmarks of slow links: one warp of one multiprocessor
waits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
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


@triton.jit
def _stamp_kernel(at):
    tl.store(at, globaltimer())


def stamp(at: Tensor) -> None:
    """On the current stream: write the GPU's time in ns to at [1] int64."""
    _stamp_kernel[(1,)](at, num_warps=1)


@triton.jit(do_not_specialize=["nanoseconds", "early"])
def _carry_kernel(free, ready, nanoseconds, early):
    now = globaltimer()
    if ready is not None:
        now = tl.load(ready)
    end = tl.maximum(now, tl.load(free)) + nanoseconds.to(tl.int64)
    tl.store(free, end)
    while now < end - early.to(tl.int64):
        now = globaltimer()


def carry(free: Tensor, ready: Tensor | None, seconds: float, early: float) -> None:
    """On the current stream: wait until a link has carried a message of so many seconds, less
    `early`. Both [1] int64, the GPU's time in ns. free: from when on the link is free, which is
    moved on; ready: since when the message is ready, None for now."""
    _carry_kernel[(1,)](free, ready, round(seconds * 1e9), round(early * 1e9), num_warps=1)
