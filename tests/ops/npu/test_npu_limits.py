"""What an NPU cannot do is said in a sentence before anything is loaded."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rorqual.config.hf import read_config_file
from rorqual.config.parallel import ParallelConfig
from rorqual.config.quant import quantization_named
from rorqual.engine.config import EngineConfig
from rorqual.engine.npu.checks import check_npu
from rorqual.errors import ConfigError
from rorqual.ops.npu import limits
from rorqual.ops.reference import Weight
from rorqual.platforms import device_of
from rorqual.platforms.npu import NpuPlatform

SHAPES = Path(__file__).resolve().parents[3] / "rorqual" / "shapes"


@pytest.fixture(scope="module")
def v3():
    return replace(read_config_file(SHAPES / "deepseek-v3"), quant=None)


@pytest.fixture(scope="module")
def qwen3():
    return read_config_file(SHAPES / "qwen3-30b-a3b")


def refused(model, text, **options):
    config = EngineConfig("model", device="npu", **options)
    platform = SimpleNamespace(default_page_size=NpuPlatform.default_page_size)
    with pytest.raises(ConfigError, match=text) as error:
        check_npu(config, model, platform)
    assert "\n" not in str(error.value)


def test_models_that_fit_are_not_refused(v3, qwen3):
    platform = SimpleNamespace(default_page_size=128)
    for model in (v3, qwen3):
        check_npu(EngineConfig("model", device="npu"), model, platform)
        check_npu(EngineConfig("model", device="npu", tp=4), model, platform)
    w8a8 = replace(v3, quant=quantization_named("w8a8"))
    check_npu(EngineConfig("model", device="npu", kv_cache_dtype="int8"), w8a8, platform)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("page_size=64", {"page_size": 64}),
        ("kv_cache_dtype=fp8", {"kv_cache_dtype": "fp8"}),
        ("mla_prefill='A_CC_ME'", {"mla_prefill": "A_CC_ME"}),
        ("mla_prefill='CD'", {"mla_decode": "CD", "mla_prefill": "CD"}),
        ("enable_eplb=True", {"enable_eplb": True, "dp": 2, "ep": 2}),
        ("fp8_dispatch=True", {"fp8_dispatch": True}),
        ("embed_device='cpu'", {"embed_device": "cpu"}),
        ("steps_in_flight=2", {"steps_in_flight": 2}),
        ("num_speculative_tokens", {"num_speculative_tokens": 1, "exe_mode": "acl_graph"}),
        ("enable_superkernel", {"enable_superkernel": True, "exe_mode": "eager"}),
        ("enable_multi_streams", {"enable_multi_streams": True}),
        ("alltoall", {"exchange": "alltoall", "dp": 2, "ep": 2, "exe_mode": "ge_graph"}),
    ],
)
def test_options(v3, text, options):
    refused(v3, text, **options)


def test_shapes_of_attention(v3, qwen3):
    odd = replace(v3, attention=replace(v3.attention, kv_lora_rank=256))
    refused(odd, "kv_lora_rank")
    refused(replace(v3, attention=replace(v3.attention, num_heads=96)), "96 attention heads")
    refused(replace(qwen3, attention=replace(qwen3.attention, head_dim=72)), "head_dim=72")
    refused(qwen3, "fused MLA prologue", kv_cache_dtype="int8")


def test_int8_experts(v3):
    narrow = replace(v3.moe, intermediate_size=96)
    model = replace(v3, moe=narrow, quant=quantization_named("w8a8"))
    refused(model, "moe_intermediate_size=96")


def weight(dtype, rows, columns, block, activation, zero=None):
    data = torch.empty(rows, columns, dtype=dtype, device="meta")
    wide = dtype == torch.bfloat16
    places = (-(-rows // block[0]), -(-columns // block[1]))
    scale = None if wide else torch.empty(*places, device="meta")
    return Weight(data, scale, block, zero, activation)


def test_formats_of_weights():
    limits.check_weight(weight(torch.bfloat16, 256, 512, (128, 128), "wide"), "layer")
    limits.check_weight(weight(torch.int8, 256, 512, (1, 512), "int8_token"), "layer")
    for wrong in (
        weight(torch.float8_e4m3fn, 256, 512, (128, 128), "fp8_group"),
        weight(torch.int8, 256, 512, (128, 128), "int8_group"),
        weight(torch.int8, 256, 512, (1, 512), "fp8_token"),
        weight(torch.int8, 250, 512, (1, 512), "int8_token"),
        weight(torch.bfloat16, 250, 512, (128, 128), "wide"),
    ):
        with pytest.raises(ConfigError, match="layer"):
            limits.check_weight(wrong, "layer")


def test_dispatch(v3):
    sizes = ParallelConfig(dp=16, ep=16, exchange="low_latency")
    needed = limits.dispatch_buffer_mb(v3.hidden_size, v3.moe, sizes, 64)
    limits.check_dispatch(v3, sizes, 64, "A3", needed)
    for text, given in {
        "HCCL_BUFFSIZE": (v3, sizes, 64, "A3", needed - 1),
        "tokens of a rank": (v3, sizes, 513, "A3", 10**6),
        "ranks that share": (v3, ParallelConfig(dp=8, ep=8), 64, "A2", 10**6),
        "whole experts": (v3, ParallelConfig(dp=4, ep=2), 64, "A3", 10**6),
        "hidden columns": (replace(v3, hidden_size=512), sizes, 64, "A3", 10**6),
        "experts of a token": (replace(v3, moe=replace(v3.moe, top_k=17)), sizes, 64, "A3", 10**6),
    }.items():
        with pytest.raises(ConfigError, match=text):
            limits.check_dispatch(*given)


def test_the_buffer_is_the_recipes_formula(v3):
    """64 rows, 16 ranks, 16 experts each: 2 * (16 * 64 * 16 * 30 * 512 + 8 * 64 * 28 * 512)
    bytes."""
    sizes = ParallelConfig(dp=16, ep=16, exchange="low_latency")
    assert limits.dispatch_buffer_mb(7168, v3.moe, sizes, 64) == 505
    assert limits.dispatch_buffer_mb(7168, v3.moe, sizes, 1) == 200


def test_no_torch_npu(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="needs the package torch_npu: install torch_npu"):
        device_of("npu")


def test_torch_npu_of_another_torch(monkeypatch):
    """It is not imported: one that does not fit may end the process."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.11.0")
    with pytest.raises(ConfigError, match=r"1\.11\.0 belongs to another torch"):
        device_of("npu:3")


@pytest.mark.parametrize("device", ["npu:x", "npu:", "npux"])
def test_names_of_devices(device):
    with pytest.raises(ConfigError):
        device_of(device)
