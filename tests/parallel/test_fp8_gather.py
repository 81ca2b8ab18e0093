"""Rows of fp8 experts that are quantized before they are gathered: half the bytes of bf16, and the
same bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual.config.hf import read_config_file
from rorqual.config.model import MoEConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.custom_ops import TracedOps
from rorqual.ops.interface import DIRECT_FP8_PAIRS, AttentionMetadata, Ops
from rorqual.ops.reference import ExpertWeights, Weight, dequantize_activation
from rorqual.parallel.comm_volume import fp8_experts, step_messages
from rorqual.parallel.exchange_policy import FP8_GATHER_PAIRS, gathers_fp8
from tests.emulation.triton_interpreter import needs_triton
from tests.models.checkpoints import quantize_block, rewrite_config, save_fp8
from tests.parallel.pool import RankPool

SHAPES = Path(__file__).parents[2] / "rorqual" / "shapes"
# prompts in two chunks of more than FP8_GATHER_PAIRS pairs, decode steps of fewer
PROMPTS = [50, 44, 40, 36]
LENGTHS = [52, 47, 42, 38]
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 4, "ep": 4},
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 4, "redundant_experts": 4},
]
# layers that cut the matrices of attention or shared experts
CUTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2, "dense_tp": 2},
    {"tp": 2, "ep": 2, "dense_tp": 1, "exchange": "allgather_ep"},
    {"tp": 2, "dp": 2, "ep": 2, "dense_tp": 1},
]


def name_of(value: Any) -> str:
    return (
        "-".join(f"{key}{one}" for key, one in value.items())
        if isinstance(value, dict)
        else str(value)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fp8 checkpoints whose scales of activations are any fp32, or powers of two; and the
    configuration of a model whose matrices can be cut."""
    found = {}
    for name in ("float", "ue8m0"):
        found[name] = folder = tmp_path_factory.mktemp(name)
        save_fp8("fp8-aligned", folder)
        quantization = read_config_json(folder)["quantization_config"]
        rewrite_config(folder, quantization_config={**quantization, "scale_fmt": name})
    found["cut"] = folder = tmp_path_factory.mktemp("cut")
    (folder / "config.json").write_text((found["float"] / "config.json").read_text())
    rewrite_config(folder, moe_intermediate_size=256, v_head_dim=64)
    return found


def read_config_json(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize(
    ("scales", "sizes"),
    [
        *((scales, sizes) for sizes in LAYOUTS for scales in ("ue8m0", "float")),
        *(("cut", sizes) for sizes in CUTS),
    ],
    ids=name_of,
)
def test_bits_are_those_of_rows_gathered_as_they_are(
    pool: RankPool, folders: dict[str, Path], sizes: dict[str, Any], scales: str
) -> None:
    results = pool.run(
        "gather_twice",
        ParallelConfig(**sizes).world,
        sizes=sizes,
        folder=str(folders[scales]),
        prompts=PROMPTS,
        lengths=LENGTHS,
        seed=0 if scales == "cut" else None,
    )
    for rank, (in_fp8, wide) in enumerate(results):
        assert in_fp8["logits"] == wide["logits"], rank
        assert in_fp8["counted"] == in_fp8["expected"], rank
        assert wide["counted"] == wide["expected"], rank
        assert wide["in fp8"] == 0
        if sizes.get("dense_tp", 1) > 1:  # shared experts use the gathered rows
            assert in_fp8["in fp8"] == 0
            assert in_fp8["counted"] == wide["counted"]
            continue
        assert 0 < in_fp8["in fp8"] < in_fp8["calls"], "prompts, and not decode steps"
        axis = "stage" if "tp" in sizes else "dp"
        assert in_fp8["counted"][axis]["all_gather"] < wide["counted"][axis]["all_gather"]
    assert len({str([part["in fp8"] for part in result]) for result in results}) == 1


def experts_of(hidden: int, activation: str) -> ExpertWeights:
    """Three experts of 40 columns."""
    torch.manual_seed(0)
    stacks = []
    for rows, columns in ((80, hidden), (hidden, 40)):
        parts = [quantize_block(torch.randn(rows, columns) / 8) for _ in range(3)]
        data, scale = (torch.stack(part) for part in zip(*parts, strict=True))
        stacks.append(Weight(data, scale, activation=activation))
    return ExpertWeights(*stacks)


def routed(hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids (-1: on another rank), weights."""
    ids = torch.rand(9, 4).topk(2).indices - 1
    return torch.randn(9, hidden).to(dtype), ids, torch.rand(9, 2)


@pytest.mark.parametrize("activation", ["fp8_group", "fp8_group_ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [256, 200])
def test_experts_of_quantized_rows(hidden: int, dtype: torch.dtype, activation: str) -> None:
    """Bits of the experts of the rows themselves; rows with scales that are powers of two differ
    from rows with others."""
    w = experts_of(hidden, activation)
    x, ids, weights = routed(hidden, dtype)
    ops = Ops()
    data, scale = ops.quantize_for_experts(x, w)
    powers = bool((torch.frexp(scale)[0] == 0.5).all())
    assert powers == (activation == "fp8_group_ue8m0")
    got = ops.experts_fp8(data, scale, dtype, ids, weights, w)
    assert got.dtype == dtype
    assert torch.equal(got, ops.experts(x, ids, weights, w))
    some = [7, 2, 5]  # a row does not depend on others
    for whole, part in zip((data, scale), ops.quantize_for_experts(x[some], w), strict=True):
        assert torch.equal(whole[some].float(), part.float())
    assert not torch.equal(dequantize_activation(data, scale, dtype), x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hidden", [256, 200])
def test_they_are_operators_of_a_compiled_step(hidden: int) -> None:
    w = experts_of(hidden, "fp8_group")
    x, ids, weights = routed(hidden, torch.bfloat16)
    inner = CpuOps(native=False)
    ops = TracedOps(inner, MoEConfig(3, 2, 40))

    def step(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        data, scale = ops.quantize_for_experts(x, w)
        sent = data.view(torch.uint8).clone().view(torch.float8_e4m3fn)
        return ops.experts_fp8(sent, scale + 0, x.dtype, ids, weights, w)

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    with ops.attending(AttentionMetadata(ids, ids, (), ())), torch.inference_mode():
        got = torch.compile(step, backend=backend, fullgraph=True)(x, ids, weights)
        assert torch.equal(got, inner.experts(x, ids, weights, w))
    assert all(name in graphs[0] for name in ("quantize_for_experts", "experts_fp8"))


@needs_triton
def test_the_rule_leaves_few_pairs_to_kernels_of_wide_rows() -> None:
    from rorqual.ops.triton.moe.small_batch import DIRECT_PICKS

    assert DIRECT_PICKS["fp8"] <= DIRECT_FP8_PAIRS <= FP8_GATHER_PAIRS
    assert gathers_fp8(True, FP8_GATHER_PAIRS + 1, False)
    assert not gathers_fp8(True, FP8_GATHER_PAIRS, False)
    assert not gathers_fp8(False, 1 << 20, False)
    assert not gathers_fp8(True, 1 << 20, True)


def test_bytes_of_published_shapes(tmp_path: Path) -> None:
    config = read_config_file(SHAPES / "deepseek-v3")
    sizes = ParallelConfig(dp=8, ep=8)
    assert fp8_experts(config, sizes)
    row = 7168 + 4 * 56 + 64
    sent = step_messages(config, sizes, 0, [4] * 8, decode=True)["dp"]
    assert sent["all_gather"] == 58 * 7 * 4 * (2 * 7168 + 64)
    sent = step_messages(config, sizes, 0, [128] * 8, decode=True)["dp"]
    assert sent["all_gather"] == 58 * 7 * 128 * row
    wide = step_messages(config, replace(sizes, dense_tp=8), 0, [128] * 8, decode=True)["dp"]
    assert wide["all_gather"] == 58 * 7 * 128 * (2 * 7168 + 64)
    assert not fp8_experts(read_config_file(SHAPES / "qwen3-30b-a3b"), sizes)
    save_fp8("fp8", tmp_path)  # gate and up meet inside a block
    assert not fp8_experts(read_config_file(tmp_path), ParallelConfig())
