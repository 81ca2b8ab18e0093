"""The op table of a platform. Not in interface.py, which the backends import."""

from __future__ import annotations

from rorqual.ops.interface import Ops


def ops_for(platform: str) -> Ops:
    """The op table of a platform, by its name."""
    if platform == "cpu":
        from rorqual.ops.cpu.backend import CpuOps

        return CpuOps()
    if platform == "cuda":
        from rorqual.ops.triton.quantized.backend import QuantizedTritonOps

        return QuantizedTritonOps()
    if platform == "npu":
        from rorqual.ops.npu.backend import NpuOps

        return NpuOps()
    return Ops()
