"""The stubs' device: torch_npu's own host code runs on it, up to the kernels, which do nothing.

So that it can be seen without a device that a step can be captured: what waits for the device while
a capture is under way raises, as it would there. Each script is a process, as the number of devices
is asked once.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAD = """
import torch, torch_npu
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="npu")
"""

WORKS = """
assert torch.npu.device_count() == 1 and torch.npu.current_device() == 0
there = torch.arange(5).to("npu")
assert there.device.type == "npu" and there.cpu().tolist() == [0, 1, 2, 3, 4]
event = torch.npu.Event()
with torch.npu.stream(torch.npu.Stream()):
    event.record()
event.synchronize()
assert event.query() and torch.npu.memory_allocated() > 0
"""

CAPTURES = """
x, gamma, weights = empty(12, 64), empty(64), empty(4, 64, 96)
groups = empty(4, dtype=torch.int64)
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    normed, _ = torch_npu.npu_rms_norm(x, gamma)
    grouped = torch_npu.npu_grouped_matmul(
        [normed], [weights], group_list=groups, split_item=3, group_type=0, group_list_type=1
    )[0]
    out = torch_npu.npu_swiglu(grouped)
graph.replay()
torch.npu.synchronize()
assert out.shape == (12, 48) and out.device.type == "npu"
"""

WAITS = """
x = empty(12, 64)
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    WAIT
"""

# What the Meta kernels take and the host code of the same operators refuses.
REFUSED = """
from tests.npu.wrong_calls import WrongCall, judge
npu = torch.ops.npu
x = torch.zeros(5, 16, dtype=torch.bfloat16)
right = (npu.npu_moe_gating_top_k_softmax.default, (x, None, 4), {})
many = (right[0], (x, None, 32), {})
turned = torch.zeros(5, 1, 4, 64)
angle = torch.zeros(5, 1, 1, 64)
mode = (npu.npu_rotary_mul.default, (turned, angle, angle, "other"), {})
for call in (many, mode):
    wrong = WrongCall("mistaken value", "", 0, call)
    assert judge(wrong, right, on_device=True) == "host"
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + script],
        env=os.environ | {"STUB_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("script", [WORKS, CAPTURES, REFUSED], ids=["works", "captures", "refuses"])
def test_the_device(script: str) -> None:
    done = run(script)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("wait", ["x.sum().item()", "x.cpu()", "torch.npu.synchronize()"])
def test_a_capture_refuses_to_wait(wait: str) -> None:
    done = run(WAITS.replace("WAIT", wait))
    assert done.returncode != 0
    assert "107027" in done.stderr
