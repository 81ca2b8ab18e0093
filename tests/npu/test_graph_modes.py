"""torchair's graph modes and torch_npu's captured graphs, as far as they go without a device.

Real here: Dynamo's trace, torchair's translation into a graph of the engine or into a capture, the
cache it keeps, and how a replay gets new KV lengths. Not real: what CANN makes of the engine's
graph (its session answers that it compiled), and every kernel.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODES = ("ge_graph", "acl_graph", "npugraph_ex")
CALLS = [[5, 7], [6, 8], [7, 9]]
NODES = [
    "npu.npu_rms_norm.default",
    "aten.mm.default",
    "npu.npu_swiglu.default",
    "npu.npu_fused_infer_attention_score.default",
]


def start(
    mode: str, cache: Path | str, calls: list[list[int]], kind: str = "dynamic"
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.npu.graph_worker", mode, str(cache), json.dumps(calls)]
    return subprocess.Popen(
        [*command, kind],
        cwd=ROOT,
        env=os.environ | {"STUB_DEVICES": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@functools.cache
def starts(mode: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Two processes with empty caches of their own, then one more over the first one's."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        both = [start(mode, one, CALLS), start(mode, other, CALLS)]
        first, beside = map(result_of, both)
        return first, beside, result_of(start(mode, one, CALLS))


@pytest.mark.parametrize("mode", MODES)
def test_the_step_is_one_graph_of_the_operators_it_calls(mode: str) -> None:
    first, _, _ = starts(mode)
    assert first["traced"] == 1
    assert first["nodes"] == [NODES]


@pytest.mark.parametrize("mode", MODES)
def test_a_second_start_traces_nothing(mode: str) -> None:
    first, _, second = starts(mode)
    assert (second["traced"], second["nodes"], second["engine"]) == (0, [], [])
    assert second["kept"] == first["kept"]
    assert len(first["kept"]) == 1


@pytest.mark.parametrize("mode", MODES)
def test_every_process_makes_the_same_code(mode: str) -> None:
    first, beside, _ = starts(mode)
    assert first["kept"] == beside["kept"]


@pytest.mark.parametrize("mode", MODES)
def test_each_call_has_its_own_lengths(mode: str) -> None:
    """A capture records attention with the first lengths; then each replay updates them."""
    first, _, second = starts(mode)
    expected = CALLS if mode == "ge_graph" else CALLS[:1] + CALLS
    assert first["lengths"] == expected
    assert second["lengths"] == expected


@pytest.mark.parametrize("mode", MODES)
def test_tensors_of_the_device(mode: str, tmp_path: Path) -> None:
    """The whole step is captured, in the capturing modes: torch_npu's host code raised nothing."""
    first = result_of(start(mode, tmp_path, CALLS[:2], "device"))
    assert first["traced"] == 1
    assert first["nodes"] == [[NODES[0], "aten.matmul.default", *NODES[2:]]]


def test_the_engine_graph() -> None:
    first, _, second = starts("ge_graph")
    types = [type_ for type_, _ in first["engine"][0] if type_ not in ("Data", "Const")]
    assert types == ["RmsNorm", "MatMul", "SwiGlu", "FusedInferAttentionScore", "NetOutput"]
    assert first["runs"] == second["runs"] == len(CALLS)


def test_lengths_of_a_static_trace_stay_in_the_cache(tmp_path: Path) -> None:
    """torchair drops Dynamo's guards from what it caches: lengths traced as constants would be used
    for every later batch, without a word. Lists of lengths need a dynamic trace."""
    result_of(start("acl_graph", tmp_path, CALLS[:1], "static"))
    second = result_of(start("acl_graph", tmp_path, CALLS[1:2], "static"))
    assert second["traced"] == 0
    assert second["lengths"] == CALLS[:1]


def test_scopes_mark_the_nodes_of_the_engine_graph(tmp_path: Path) -> None:
    first = result_of(start("ge_graph", tmp_path, CALLS[:1], "scopes"))
    assert first["nodes"][0].count("air.scope_enter.default") == 2
    assert first["nodes"][0].count("air.scope_exit.default") == 2
    assert "air.wait_tensor.default" in first["nodes"][0]
    nodes = [
        (type_, marks) for type_, marks in first["engine"][0] if type_ not in ("Data", "Const")
    ]
    assert nodes[-1] == ("NetOutput", {})
    assert all(marks["_super_kernel_scope"] == "decode" for _, marks in nodes[:-1])
    on_second_stream = [type_ for type_, marks in nodes if "_user_stream_label" in marks]
    assert on_second_stream == ["MatMul", "SwiGlu"]


def test_waiting_for_a_tensor_is_the_engine_mode_s_alone(tmp_path: Path) -> None:
    process = start("acl_graph", tmp_path, CALLS[:1], "scopes")
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "npu_wait_tensor is not support in this mode" in err


def test_a_plain_capture_updates_lengths_at_each_replay(tmp_path: Path) -> None:
    done = result_of(start("captured", tmp_path, CALLS))
    assert done["recorded"] == ["npu_fused_infer_attention_score.out"]
    assert done["lengths"] == CALLS
