"""Kernels compiled ahead: side by side, for a GPU that is not there; nothing runs, and what
would be written is zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.child_process import output_of_compiler

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")

SCRIPT = """
import os
import threading
import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from tests.emulation.cross_compile import AbsentDriver
from rorqual.ops.reference import FP8, Weight
from rorqual.ops.triton.runtime import precompile
from rorqual.ops.triton.gemm import fp8_gemm, fp8_gemm_sm90_streamk
from rorqual.ops.triton.rowwise import norm
from rorqual.ops.activation import Quantized
from rorqual.ops.triton.gemm.linear_plan import StreamKPlan

launchers, loaded = [], []
class Driver(AbsentDriver):
    def launcher_cls(self, src, metadata):
        launchers.append((metadata.name, threading.get_ident()))
        if len(launchers) == 1:
            raise OSError("no C compiler")
def load(self):
    loaded.append((self.metadata.name, threading.get_ident()))
    if len(loaded) == 1:
        raise RuntimeError("no room on the device")
CompiledKernel._init_handles = load
driver.set_active(Driver(90))
fp8_gemm.is_hopper = lambda device: True
x, threads = torch.ones(3, 256, dtype=torch.bfloat16), set()
submit = precompile.ThreadPoolExecutor.submit
def seen(self, work, *args):
    def note():
        threads.add(threading.get_ident())
        return work(*args)
    return submit(self, note)
precompile.ThreadPoolExecutor.submit = seen

derived = []
derive = JITFunction._pack_args
def pack(self, *args):
    derived.append(self.__name__)
    return derive(self, *args)
JITFunction._pack_args = pack

def kept(kernel):
    return [found for cache, *_ in kernel.device_caches.values() for found in cache.values()]

with precompile.compiling() as count:
    assert count() == 0
    for _ in range(3):
        normed, total = norm.add_norm(x, x, x[0], 1e-6)
    assert count() == 1 and derived == ["_norm_kernel"]
    packed = Quantized(torch.empty(3, 256, dtype=FP8), torch.ones(2, 3).t())
    weight = Weight(torch.empty(256, 256, dtype=FP8), torch.ones(2, 2))
    for n in (64, 128):
        plan = StreamKPlan(8, n, n // 16, 2)
        y = fp8_gemm.linear(packed, weight, dtype=torch.bfloat16, plan=plan)
        assert y.shape == (3, 256) and not y.any()
    blank = torch.empty(5), x.new_empty(4), torch.empty_like(x), torch.empty_strided((2, 3), (3, 1))
assert not normed.any() and not total.any()
assert not any(made.any() for made in blank)
assert not packed.data.float().any()
assert count() == len(derived) == 3
streaming = kept(fp8_gemm_sm90_streamk._stream_kernel)
assert [kernel.metadata.name for kernel in streaming] == ["_stream_kernel"] * 2
assert all(kernel.asm["cubin"] for kernel in streaming + kept(norm._norm_kernel))
assert len(threads) > 1 or os.cpu_count() == 1, threads
own = threading.get_ident()
assert sorted(name for name, _ in launchers) == sorted(name for name, _ in loaded)
assert {"_stream_kernel", "_norm_kernel"} <= {name for name, _ in loaded}
assert own not in {thread for _, thread in launchers}
assert {thread for _, thread in loaded} == {own}
try:
    with precompile.compiling():
        norm.add_norm(x.half(), x.half(), x[0].half(), 1e-6)
        raise KeyError
except KeyError:
    pass
assert len(kept(norm._norm_kernel)) == 2
assert not any(hasattr(kernel, "result") for kernel in kept(norm._norm_kernel))
print("compiled")
"""


def test_what_failed_to_compile_is_left_to_its_first_launch() -> None:
    from rorqual.ops.triton.runtime.precompile import _settle

    class Awaited:
        def __init__(self, kernel: str | None):
            self.kernel = kernel

        def result(self, ignore_errors: bool) -> str | None:
            assert ignore_errors
            return self.kernel

    kernels: dict[str, object] = {"good": Awaited("code"), "bad": Awaited(None), "done": "code"}
    _settle([(kernels, key) for key in ("good", "bad", "done", "gone")])
    assert kernels == {"good": "code", "done": "code"}


def test_launches_compile_and_do_not_run(tmp_path: Path) -> None:
    assert output_of_compiler("-c", SCRIPT, TRITON_CACHE_DIR=str(tmp_path)).strip() == "compiled"
