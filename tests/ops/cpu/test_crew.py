"""Calls use fewer threads while another program needs a thread's processor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rorqual.ops.cpu.backend import CpuOps, threads
from tests.engine.distributed.starting import environment

# Two threads on one processor wait for each other as those do that share theirs with another
# program. Then both processors are theirs again. Looked at after every call: where others take the
# second one, two threads are tried for a few calls at a time.
SHARED = """
import os, time, torch
whole = os.sched_getaffinity(0)
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.reference import Weight
torch.set_num_threads(2)
torch.manual_seed(0)
ops = CpuOps()
ops.native.lib.rq_threads(2)
weight = Weight(torch.randn(2048, 2048).bfloat16())
ops.prepare_weight(weight, "x")
x = torch.randn(1, 2048).bfloat16()
expected = ops.linear(x, weight)
def until(count, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert torch.equal(ops.linear(x, weight), expected)
        if ops.native.threads_used() == count:
            return True
    return False
def move(processors):
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), processors)
move({min(whole)})
print("fewer", until(1, 30))
move(whole)
print("all", until(2, 30))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two processors")
def test_threads_that_wait_for_each_other_become_fewer_and_are_tried_again() -> None:
    if CpuOps().native is None:
        pytest.skip("no compiler")
    told = subprocess.run(
        [sys.executable, "-c", SHARED],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.stdout.split("\n")[:2] == ["fewer True", "all True"], told.stderr


def test_torch_has_as_many_threads_as_calls_in_steps_that_decode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ops = CpuOps()
        if ops.native is None:
            pytest.skip("no compiler")
        monkeypatch.setattr(ops.native, "threads_used", lambda: 1)
        with ops.computing(decodes=True):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with ops.computing(decodes=False):
            assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="in between"), threads(1):
            raise ValueError("in between")
        assert torch.get_num_threads() == 2
        with threads(3):
            assert torch.get_num_threads() == 2, "never more than were given"
    finally:
        torch.set_num_threads(before)
