"""Copies to pinned memory on the way to a device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rorqual.platforms import pinned

THREADS = """
import os
import numpy as np
import torch
from rorqual.platforms import pinned

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(4)
data = torch.from_numpy(np.arange(4 * pinned.THREADED))  # operations of torch start threads
host = torch.from_numpy(np.zeros(len(data), np.int64))
before = threads()
pinned.fill(host, data)
assert (host.numpy() == data.numpy()).all()
own = threads()
host.copy_(data)
print(before, own, threads())
"""


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.int32])
def test_a_copy_has_the_bytes(dtype: torch.dtype) -> None:
    data = torch.randint(0, 2, (3, pinned.THREADED), generator=torch.manual_seed(3)).to(dtype)
    host = torch.zeros_like(data)
    pinned.fill(host, data)
    assert torch.equal(host, data)


def test_a_copy_wakes_no_threads() -> None:
    """torch's own does, from that many elements on: where its threads wait for busy cores, a step
    starts milliseconds later."""
    run = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    before, own, torchs = map(int, run.stdout.split())
    assert own == before
    assert torchs > before
