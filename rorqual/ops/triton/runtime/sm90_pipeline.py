"""Shared parts of Gluon kernels: the two halves of programmatic dependent launch (Triton kernels
use launch.wait_for_inputs), the ring of stages for bulk copies, and a way to keep the compiler from
hoisting address computations out of a loop."""

from __future__ import annotations

from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@cache
def bulk_layout(bits: int) -> Any:
    """Layout of tiles in shared memory, 128 bytes per row of `bits`-bit values, as bulk copies
    write and products read them. Cached, since creating one takes longer than creating a
    descriptor."""
    return gl.NVMMASharedLayout(128, bits, rank=2)


# renamed in Triton 3.7
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def let_next_start(DEPENDENT: gl.constexpr):
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def wait_for_inputs(DEPENDENT: gl.constexpr):
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def opaque_zero():
    """0, unknown to the compiler: added to addresses, it keeps them from being computed before the
    loop and held in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """(the next stage, the phase of its barriers); the phase flips with every round."""
    stage = stage + 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase
