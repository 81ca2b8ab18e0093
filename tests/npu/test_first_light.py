"""The first thing to run on an NPU, on emulated operators: it finds what is right, and what is
not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rorqual.bench import npu_first_light
from rorqual.ops.npu.backend import NpuOps
from tests.emulation import npu_platform

ENTRIES = 11


@pytest.fixture(autouse=True)
def small(monkeypatch):
    npu_platform.install(wide=False)
    few = replace(npu_first_light.MOE, num_experts=16, n_group=4, topk_group=2)
    monkeypatch.setattr(npu_first_light, "MOE", few)
    monkeypatch.setattr(npu_first_light, "REPEATS", 1)


def test_every_entry_is_compared_and_timed():
    results = npu_first_light.first_light(npu_platform.EmulatedNpu(), 4, 200)
    assert len(results) == ENTRIES
    assert [found.name for found in results if not found.fine] == []
    assert all(found.milliseconds > 0 for found in results)


def test_a_wrong_and_a_failing_operator_are_named(monkeypatch):
    def refused(self, x):
        raise RuntimeError("error code 561103")

    monkeypatch.setattr(NpuOps, "norm", lambda self, x, weight, eps: x * weight)
    monkeypatch.setattr(NpuOps, "swiglu", refused)
    results = npu_first_light.first_light(npu_platform.EmulatedNpu(), 4, 200)
    bad = {found.name: found for found in results if not found.fine}
    assert bad["norm"].error > npu_first_light.CLOSE
    assert bad["mlp bf16"].failed == "RuntimeError: error code 561103"
    assert "linear bf16" not in bad
    text = npu_first_light.report(npu_platform.EmulatedNpu(), results, 4, 200)
    assert "561103" in text
    assert torch.__version__ in text
