"""x / (1 + exp(-x)) in fp32 for kernels, in two versions that differ in the last bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """With exp2, which flushes results below 2^-126 to zero, where exp needs four instructions for
    them; they are lost in 1 + exp(-x) anyway."""
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def silu_exp(x):
    """With exp."""
    return x / (1.0 + tl.exp(-x))
