"""Bytes of a cached token, and which caches a model cannot have."""

from __future__ import annotations

import pytest
import torch

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import KV_DTYPES, MLA_FORMS, kv_dtype, kv_spec
from rorqual.config.hf import read_config
from rorqual.config.model import GQAConfig
from rorqual.errors import ConfigError
from rorqual.ops import reference
from tests.config.test_model_config import QWEN3, V3

FP8_NAMES = ("fp8", "fp8_e4m3", "float8_e4m3fn")


@pytest.mark.parametrize("name", FP8_NAMES)
def test_an_fp8_token_of_deepseek_v3_takes_656_bytes_a_layer(name: str) -> None:
    config = read_config(V3)
    spec = kv_spec(config, 64, name, mtp_layers=1)
    assert len(spec.layers) == config.num_layers + 1
    assert spec.bytes_per_token == 656 * len(spec.layers)
    assert spec.bytes_per_page == 64 * spec.bytes_per_token
    assert spec.shard(8).bytes_per_token == spec.bytes_per_token, "a latent is on every rank"
    assert spec.shard(8, range(2)).bytes_per_token == 2 * 656, "a pipeline stage holds its layers"


@pytest.mark.parametrize(
    ("rank", "rope", "dtype"),
    [(512, 64, "bfloat16"), (64, 16, "bfloat16"), (132, 6, "float32"), (32, 2, "float16")],
)
def test_the_plane_has_the_width_of_the_rows_that_are_written(
    rank: int, rope: int, dtype: str
) -> None:
    config = read_config({**V3, "kv_lora_rank": rank, "qk_rope_head_dim": rope})
    pool = KVPool(kv_spec(config, 4, "fp8", activations=dtype), 3, torch.device("cpu"))
    rows = reference.pack_latent(torch.ones(2, rank + rope, dtype=getattr(torch, dtype)), rank)
    plane = pool.layers[0]["latent"]
    assert plane.shape == (3, 4, rows.shape[1])
    assert plane.dtype == rows.dtype == torch.uint8


def test_names_of_the_caches_dtype() -> None:
    assert {kv_dtype(name) for name in FP8_NAMES} == {"float8_e4m3fn"}
    assert kv_dtype("auto") is kv_dtype(None) is None
    assert set(FP8_NAMES) < set(KV_DTYPES)
    with pytest.raises(
        ConfigError,
        match=r"kv_cache_dtype='fp8_e5m2'.*accepted: auto, .*fp8, fp8_e4m3, float8_e4m3fn",
    ):
        kv_dtype("fp8_e5m2")


def test_auto_is_the_dtype_of_the_activations() -> None:
    config = read_config(V3)
    sizes = {
        dtype: kv_spec(config, 1, "auto", activations=dtype).bytes_per_token
        for dtype in (None, "float32")
    }
    assert sizes == {None: 1152 * config.num_layers, "float32": 2304 * config.num_layers}


def test_models_and_forms_without_a_latent_are_refused() -> None:
    v3 = read_config(V3)
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype=fp8 .*CD.*accepted: CC, A_CC, A_CC_ME, AM_CC_ME"
    ):
        kv_spec(v3, 16, "fp8", "CD")
    for form in set(MLA_FORMS) - {"CD"}:
        assert kv_spec(v3, 16, "fp8", form) == kv_spec(v3, 16, "fp8")
    with pytest.raises(ConfigError, match="kv_lora_rank=30"):
        kv_spec(read_config({**V3, "kv_lora_rank": 30}), 16, "fp8")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8 .*CD"):
        kv_spec(v3, 16, "int8", "CD")


@pytest.mark.parametrize(("name", "held"), [("fp8", torch.uint8), ("int8", torch.int8)])
def test_grouped_query_attention_has_a_scale_for_each_key_and_value(
    name: str, held: torch.dtype
) -> None:
    """3 % of the numbers' bytes at 128 columns; cut with the heads."""
    config = read_config(QWEN3)
    assert isinstance(config.attention, GQAConfig)
    groups = config.attention.num_kv_heads
    width = config.attention.head_dim
    spec = kv_spec(config, 16, name)
    assert spec.bytes_per_token == config.num_layers * groups * 2 * (width + 4)
    assert 2 * spec.shard(2).bytes_per_token == spec.bytes_per_token
    layer = KVPool(spec, 2, torch.device("cpu")).layers[0]
    k, k_scale = reference.pack_heads(torch.ones(3, groups, width), held)
    assert layer["k"].shape[2:] == k.shape[1:] == layer["v"].shape[2:]
    assert layer["k"].dtype == layer["v"].dtype == k.dtype == held
    assert layer["scales"].shape[2:] == (groups, 2)
    assert layer["scales"].dtype == k_scale.dtype


@pytest.mark.parametrize(("name", "held"), [("fp8", torch.uint8), ("int8", torch.int8)])
def test_a_latent_in_int8_is_as_large_as_one_in_fp8(name: str, held: torch.dtype) -> None:
    pool = KVPool(kv_spec(read_config(V3), 4, name), 3, torch.device("cpu"))
    assert pool.layers[0]["latent"].shape == (3, 4, 656)
    assert pool.layers[0]["latent"].dtype == held
