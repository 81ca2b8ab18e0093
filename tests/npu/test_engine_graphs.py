"""Decode steps of whole models as torchair is given them: the operators in the graph, what the
engine's graph is made of, and that a second start compiles nothing. Without a device: what CANN
makes of the engine's graph is not seen here."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rorqual.engine.config import EngineConfig
from rorqual.engine.npu.compiled import graph_folder

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
# reading a number on the host, or a result whose size is a number on the device
WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "_assert")
EVERY_LAYER = {
    "qwen3": {
        "npu_apply_rotary_pos_emb": 3,
        "npu_scatter_nd_update": 6,
        "npu_fused_infer_attention_score_v2": 3,
        "npu_moe_gating_top_k_softmax": 3,
        "npu_moe_init_routing_v2": 3,
        "npu_grouped_matmul": 6,
        "npu_swiglu": 3,
        "npu_moe_finalize_routing": 3,
        "npu_add_rms_norm": 6,
        "npu_rms_norm": 7,
    },
    "v3": {
        "npu_mla_prolog_v3_functional": 2,
        "npu_fused_infer_attention_score_v2": 2,
        "npu_transpose_batchmatmul": 2,
        "npu_dynamic_quant": 6,
        "npu_quant_matmul": 6,
        "npu_dequant_swiglu_quant": 3,
        "npu_moe_gating_top_k": 1,
        "npu_moe_init_routing_v2": 1,
        "npu_grouped_matmul": 2,
        "npu_moe_finalize_routing": 1,
        "npu_add_rms_norm": 4,
        "npu_rms_norm": 1,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {"case_name": "qwen3-tests"},
    "v3": {
        "quantization": "w8a8",
        "kv_cache_dtype": "int8",
        "enable_superkernel": True,
        "enable_multi_streams": True,
    },
}


def start(name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.npu.engine_graph_worker",
            name,
            str(folder),
            json.dumps(options),
        ],
        cwd=ROOT,
        env=os.environ | {"STUB_DEVICES": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def starts(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    options = OPTIONS[name]
    return start(name, folder, options), start(name, folder, options)


@pytest.fixture(params=list(OPTIONS))
def both(request, tmp_path_factory):
    name = request.param
    folder = tmp_path_factory.getbasetemp() / f"graphs-{name}"
    folder.mkdir(exist_ok=True)
    return name, *starts(name, folder)


def test_the_step_is_one_graph_of_exactly_the_expected_operators(both):
    name, first, _ = both
    assert first["traced"] == 1
    (nodes,) = first["nodes"]
    plain = [node.removeprefix("npu.").removeprefix("air.") for node in nodes]
    found = Counter(node.partition(".")[0] for node in plain if node.startswith("npu_"))
    assert found == EVERY_LAYER[name]


def test_nothing_in_it_waits_for_the_host(both):
    _, first, _ = both
    (nodes,) = first["nodes"]
    assert not [node for node in nodes if node.split(".")[1].startswith(WAITS)]


def test_torchair_translates_all_of_it(both):
    _, first, _ = both
    (engine,) = first["engine"]
    types = Counter(type_ for type_, _ in engine)
    assert types["FusedInferAttentionScore"] >= 2
    assert types["NetOutput"] == 1


def test_a_second_start_traces_and_compiles_nothing(both):
    _, first, second = both
    assert (second["traced"], second["nodes"], second["engine"]) == (0, [], [])
    assert second["kept"] == first["kept"]
    assert len(first["kept"]) == 1


def test_graphs_lie_in_the_folder_of_their_case(both):
    name, first, _ = both
    assert first["folders"] == [OPTIONS[name].get("case_name", "decode")]


def test_scopes_mark_layers_and_shared_experts(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "graphs-v3"
    folder.mkdir(exist_ok=True)
    (engine,) = starts("v3", folder)[0]["engine"]
    inside = [type_ for type_, marks in engine if "_super_kernel_scope" in marks]
    beside = [type_ for type_, marks in engine if "_user_stream_label" in marks]
    assert inside.count("FusedInferAttentionScore") == 2
    assert inside.count("GroupedMatmul") == 2
    assert "DequantSwigluQuant" in beside
    assert "GroupedMatmul" not in beside


def test_another_configuration_finds_no_graph_of_this_one(tmp_path):
    first = start("qwen3", tmp_path, {})
    second = start("qwen3", tmp_path, {"num_pages": 9})
    assert first["traced"] == second["traced"] == 1
    assert len(second["kept"]) == 2


def test_nothing_is_kept_where_nothing_is_to_be():
    config = EngineConfig("model", device="npu", exe_mode="ge_graph", enable_cache_compile=False)
    assert graph_folder(config, None, 8, "a device") is None
