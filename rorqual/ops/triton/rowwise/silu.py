"""x / (1 + exp(-x)) of fp32 for kernels, in two ways that differ in the last digit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """By exp2, which takes results below 2^-126 for zero where exp spends four instructions on
    them: beside the 1 none of them counts."""
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def silu_exp(x):
    """By exp."""
    return x / (1.0 + tl.exp(-x))
