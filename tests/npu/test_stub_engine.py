"""The engine as a user starts it on an NPU, on a stub of one: platform, loading, captures, copies
and the scheduler's loop are real, kernels do nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = {"STUB_DEVICES": "1", "STUB_OPERATORS": "1", "PYTHONWARNINGS": "ignore"}
TOKENS = 6


def start(name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.npu.stub_engine", name, str(folder)]
    done = subprocess.run(
        [*command, json.dumps(options)],
        cwd=ROOT,
        env=os.environ | STUBS,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"exe_mode": "eager"}),
        ("v2", {"exe_mode": "eager", "quantization": "w8a8"}),
        ("v3", {"num_speculative_tokens": 2}),
        ("qwen3", {"quantization": "w4a16"}),
    ],
)
def test_an_engine_starts_and_runs(tmp_path, name, options):
    result = start(name, tmp_path, options)
    assert result["tokens"] == [TOKENS] * 3
    assert result["device"].startswith("Ascend910_93")
    assert result["captured"] == ("exe_mode" not in options and "num_spec" not in str(options))


@pytest.mark.parametrize("name", ["qwen3", "v2"])
def test_each_replay_of_a_captured_step_is_given_its_lengths(tmp_path, name):
    """Of prompts of 3 and 20 tokens: what is cached with the step's own token, and 1 for
    padding."""
    result = start(name, tmp_path, {"exe_mode": "acl_graph"})
    assert result["captured"]
    steps = [[4 + i, 21 + i, 6 + i, 1] for i in range(TOKENS - 1)]
    assert result["lengths"] == steps
