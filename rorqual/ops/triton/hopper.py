"""Programmatic dependent launch for kernels in Gluon: what launch.wait_for_inputs is for Triton's, in its two halves."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def let_next_start(DEPENDENT: gl.constexpr):
    if DEPENDENT:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_inputs(DEPENDENT: gl.constexpr):
    if DEPENDENT:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
