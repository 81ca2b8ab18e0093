"""What kernels in Gluon have in common: programmatic dependent launch in its two halves
(Triton's have launch.wait_for_inputs), the ring of stages that bulk copies fill, and a way to
keep a loop from computing ahead what its registers have no room for."""

from __future__ import annotations

from functools import cache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@cache
def bulk_layout(bits: int) -> Any:
    """Of tiles in shared memory, 128 bytes a row of values of so many bits, as bulk copies leave
    them and products read them. Making one takes the host longer than a descriptor that names it.
    """
    return gl.NVMMASharedLayout(128, bits, rank=2)


# Triton 3.7 gave it another name.
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
    """0, but the compiler does not know: addresses it is added to are not all computed before
    the loop and kept in registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """(the stage behind this one, the phase of its barriers), which turns with every round."""
    stage = stage + 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase
