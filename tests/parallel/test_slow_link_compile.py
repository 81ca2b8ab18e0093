"""The kernels of the imitated slow link, compiled for a Hopper GPU without one."""

from __future__ import annotations

import importlib.util
import json

import pytest

from rorqual.parallel.group_axis import between
from tests.child_process import output_of_compiler

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def test_they_read_the_clock_in_their_loops() -> None:
    kernels = json.loads(output_of_compiler(__file__))
    waiting, stamping = kernels[:3], kernels[3]
    for kernel in waiting:
        assert kernel["%globaltimer"] >= 2, "before the loop, and in it"
        assert kernel["bra"] >= 1
        assert kernel["stack"] == 0
    assert len(kernels) == 4
    assert stamping["%globaltimer"] == 1


def test_what_a_message_takes_anyway_lies_between_what_was_measured() -> None:
    own = [(100, 2.0), (200, 3.0), (400, 4.0)]
    found = [between(own, count) for count in (0, 50, 100, 150, 200, 300, 400, 800)]
    assert found == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 6.0]
    assert between([(100, 1.0), (110, 5.0)], 0) == 0, "not less than nothing"


if __name__ == "__main__":
    import torch

    from rorqual.ops.triton.comm.delay import carry, delay, stamp
    from tests.emulation.cross_compile import compiling

    with compiling(90) as found:
        delay(0.001)
        at = torch.zeros(1, dtype=torch.int64)
        carry(at, None, 0.001, 0.0001)
        carry(at, torch.zeros_like(at), 0.001, 0.0001)
        stamp(at)
    print(json.dumps([kernel.figures(("%globaltimer", "bra")) for kernel in found]))
