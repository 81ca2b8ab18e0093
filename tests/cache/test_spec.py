"""Bytes of a cached token, and which caches a model cannot have."""

from __future__ import annotations

import pytest
import torch

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import KV_DTYPES, MLA_FORMS, kv_dtype, kv_spec
from rorqual.config.hf import read_config
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
    with pytest.raises(
        ConfigError,
        match=r"kv_cache_dtype=fp8 .*grouped-query.*accepted: auto, bfloat16, float16, float32",
    ):
        kv_spec(read_config(QWEN3), 16, "fp8")
    v3 = read_config(V3)
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype=fp8 .*CD.*accepted: CC, A_CC, A_CC_ME, AM_CC_ME"
    ):
        kv_spec(v3, 16, "fp8", "CD")
    for form in set(MLA_FORMS) - {"CD"}:
        assert kv_spec(v3, 16, "fp8", form) == kv_spec(v3, 16, "fp8")
    with pytest.raises(ConfigError, match="kv_lora_rank=30"):
        kv_spec(read_config({**V3, "kv_lora_rank": 30}), 16, "fp8")
