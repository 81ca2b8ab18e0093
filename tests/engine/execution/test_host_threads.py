"""What the launching thread makes on the host for a step wakes no threads: torch's operations on
32,768 numbers or more do, which takes milliseconds where processors are busy."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

BEFORE = """
import os
from types import SimpleNamespace
import numpy as np
import torch
from rorqual.engine.execution.logits_processor import HostSampling
from rorqual.engine.execution.token_bans import TokenBans
from rorqual.platforms import pinned
from rorqual.request import SamplingParams

torch.set_num_threads(4)
VOCAB = 151936
platform = SimpleNamespace(to_device=lambda data: data)
data = torch.from_numpy(np.arange(4 * pinned.THREADED))
host = torch.from_numpy(np.zeros(len(data), np.int64))

def threads():
    return len(os.listdir("/proc/self/task"))

def bitmask():
    made = HostSampling.__new__(HostSampling)
    made.output = SimpleNamespace(decode_slots=list(range(40)), num_speculative_tokens=0)
    made.rows = SimpleNamespace(
        platform=platform,
        vocab=VOCAB,
        drafts=torch.zeros(40, 0, dtype=torch.int64),
        num_drafts=torch.zeros(40, dtype=torch.int64),
    )
    made.logit_rows = [None] * 40
    made.matchers = {}
    mask = made._bitmask()
    assert mask.shape == (40, VOCAB // 32) and mask.dtype == torch.int32
    assert set(mask.numpy().ravel().tolist()) == {-1}

def forbidden():
    params = SamplingParams(allowed_token_ids=[5, 70000])
    found = TokenBans.of(params, VOCAB, platform).forbidden
    assert found.shape == (VOCAB,) and found.dtype == torch.bool
    assert (~found.numpy()).nonzero()[0].tolist() == [5, 70000]

def copy():
    pinned.fill(host, data)
    assert (host.numpy() == data.numpy()).all()

def copy_of_torch():
    host.copy_(data)

def full_of_torch():
    torch.full((40, VOCAB // 32), -1)
"""


@pytest.mark.parametrize(
    ("work", "wakes"),
    [
        ("copy", False),
        ("bitmask", False),
        ("forbidden", False),
        ("copy_of_torch", True),
        ("full_of_torch", True),
    ],
)
def test_no_thread_is_woken(work: str, wakes: bool) -> None:
    code = f"""
    before = threads()
    {work}()
    print(before, threads())
    """
    run = subprocess.run(
        [sys.executable, "-c", BEFORE + textwrap.dedent(code)], capture_output=True, text=True
    )
    assert not run.returncode, run.stderr
    before, after = map(int, run.stdout.split())
    assert (after > before) == wakes
