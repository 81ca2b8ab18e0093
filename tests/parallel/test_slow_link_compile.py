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
    from rorqual.ops.triton.comm.delay import HOPPER_KILOBYTES

    delay, booked, held, met, stamp = json.loads(output_of_compiler(__file__))
    assert delay["%globaltimer"] >= 2, "before the loop, and in it"
    assert held["%globaltimer"] >= 1, "in it"
    for kernel in (delay, held):
        assert kernel["bra"] >= 1
        assert kernel["stack"] == 0
    assert stamp["%globaltimer"] == 1
    assert booked["%globaltimer"] == met["%globaltimer"] == 0
    assert held["shared"] == HOPPER_KILOBYTES * 1024
    assert met["stack"] == 0


if __name__ == "__main__":
    import torch

    from rorqual.ops.triton.comm.delay import book, delay, hold, meet, stamp
    from tests.emulation.cross_compile import compiling

    with compiling(90) as found:
        delay(0.001)
        at = torch.zeros(1, dtype=torch.int64)
        message = (at, torch.zeros_like(at), 0.001)
        book(*message)
        hold(*message)
        meet(torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0, *message)
        stamp(at)
    print(json.dumps([kernel.figures(("%globaltimer", "bra")) for kernel in found]))
