"""Kernels that a launch compiles are named, for a GPU that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.child_process import output_of_compiler

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")

SCRIPT = """
import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime import driver
from tests.emulation.cross_compile import AbsentDriver
from rorqual.ops.triton.rowwise import norm, quantize
from rorqual.ops.triton.runtime import late_kernels

class Driver(AbsentDriver):
    def launcher_cls(self, src, metadata):
        return lambda *args: None

CompiledKernel._init_handles = lambda self: setattr(self, "_run", lambda *args: None)
driver.set_active(Driver(90))
runtime = triton.knobs.runtime
x = torch.ones(3, 256, dtype=torch.bfloat16)
norm.norm(x, x[0], 1e-6)
late, later = [], []
late_kernels.watch(lambda name, seconds: late.append((name, seconds)))
norm.norm(x, x[0], 1e-6)
assert not late, "compiled before"
quantize.quantize(x)
quantize.quantize(x)
norm.norm(torch.ones(3, 512, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16), 1e-6)
assert [name for name, _ in late] == ["_quantize_kernel", "_norm_kernel"], late
assert all(0 < seconds < 60 for _, seconds in late), late
late_kernels.watch(lambda name, seconds: later.append(name))  # another engine's
quantize.quantize(x, ue8m0=True)
late_kernels.watch(None)
quantize.quantize(x.float())
assert later == ["_quantize_kernel"] and len(late) == 2
assert runtime.jit_cache_hook is None and runtime.jit_post_compile_hook is None
seen = []
runtime.jit_post_compile_hook = lambda **given: seen.append(given["fn"].name)
late_kernels.watch(lambda name, seconds: later.append(name))
quantize.quantize(x.half())
late_kernels.watch(None)
assert len(seen) == 1 and len(later) == 1, "another tool's hook stays"
assert runtime.jit_post_compile_hook is not None
print("named")
"""


def test_kernels_that_a_launch_compiles_are_named(tmp_path: Path) -> None:
    cache = {"TRITON_CACHE_DIR": str(tmp_path)}
    assert output_of_compiler("-c", SCRIPT, **cache).split() == ["named"]
