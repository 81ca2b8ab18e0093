"""Products beside messages leave multiprocessors to them."""

from __future__ import annotations

import ctypes
import statistics

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from rorqual.ops.triton.backend import TritonOps
from rorqual.ops.triton.runtime import cublas, launch

TAKEN = 8
WIDE = 32768  # numbers that a program keeps in registers, so that nothing else fits beside it


@triton.jit(do_not_specialize=["nanoseconds"])
def _occupy_kernel(out, nanoseconds, WIDE: tl.constexpr):
    x = tl.arange(0, WIDE).to(tl.float32)
    start = globaltimer()
    now = start
    while now - start < nanoseconds.to(tl.int64):
        x = x * 1.0001 + 0.5
        now = globaltimer()
    tl.store(out + tl.program_id(0) * WIDE + tl.arange(0, WIDE), x)


def test_the_number_is_set_for_the_context_alone() -> None:
    library = cublas._library()
    assert library is not None
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")

    def target() -> int:
        found = ctypes.c_int()
        assert library.cublasGetSmCountTarget(cublas._handle(), ctypes.byref(found)) == 0
        return found.value

    assert target() == 0
    with TritonOps().beside_messages():
        all_of_them = torch.cuda.get_device_properties(0).multi_processor_count
        assert target() == all_of_them - launch.nccl_channels(launch.NCCL_CHANNELS)
    assert target() == 0


def test_a_product_is_no_slower_beside_a_kernel_that_takes_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product of 4,160 rows, which has a program for each multiprocessor otherwise."""
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", str(TAKEN))
    x = torch.randn(4160, 4096, device="cuda").bfloat16()
    weight = torch.randn(2048, 4096, device="cuda").bfloat16() / 64
    out = torch.empty(TAKEN * WIDE, device="cuda")
    side = torch.cuda.Stream()

    def microseconds() -> float:
        found = []
        for _ in range(13):
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                _occupy_kernel[(TAKEN,)](out, 1_000_000, WIDE, num_warps=32)
            torch.cuda._sleep(200_000)  # until those programs run
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.nn.functional.linear(x, weight)
            end.record()
            end.synchronize()
            found.append(1e3 * start.elapsed_time(end))
        return statistics.median(found[3:])

    whole = microseconds()
    with TritonOps().beside_messages():
        left = microseconds()
    assert left < 0.8 * whole, (left, whole)
