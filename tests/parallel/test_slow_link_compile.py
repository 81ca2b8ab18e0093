"""The kernels of the imitated slow link, compiled for a Hopper GPU without one."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.child_process import output_of_compiler

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_they_read_the_clock_in_their_loops() -> None:
    kernels = json.loads(output_of_compiler(__file__))
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel["%globaltimer"] >= 2, "before the loop, and in it"
        assert kernel["bra"] >= 1
        assert kernel["stack"] == 0


if __name__ == "__main__":
    import torch

    from rorqual.ops.triton.comm.delay import carry, delay
    from tests.emulation.cross_compile import compiling

    with compiling(90) as found:
        delay(0.001)
        carry(torch.zeros(1, dtype=torch.int64), 0.001, 0.0001)
    print(json.dumps([kernel.figures(("%globaltimer", "bra")) for kernel in found]))
