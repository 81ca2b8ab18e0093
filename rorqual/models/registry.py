"""From a configuration to a model without weights."""

from __future__ import annotations

from rorqual.config import ModelConfig
from rorqual.layers.parameter import Build
from rorqual.models.deepseek import Deepseek
from rorqual.models.qwen3_moe import Qwen3Moe
from rorqual.models.transformer import Transformer


def make_model(config: ModelConfig, build: Build, max_len: int, mla_prefill: str = "CC", mla_decode: str = "A_CC_ME") -> Transformer:
    """Parameters are allocated on `build.device` and not yet filled."""
    if config.is_mla:
        return Deepseek(config, build, max_len, mla_prefill, mla_decode)
    return Qwen3Moe(config, build, max_len)
