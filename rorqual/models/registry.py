"""Create a model, without weights, from its configuration."""

from __future__ import annotations

from rorqual.config.model import ModelConfig
from rorqual.errors import ConfigError
from rorqual.layers.parameter import Build
from rorqual.models.deepseek import Deepseek
from rorqual.models.qwen3_moe import Qwen3Moe
from rorqual.models.transformer import Transformer


def make_model(
    config: ModelConfig,
    build: Build,
    max_len: int,
    mla_prefill: str = "CC",
    mla_decode: str = "A_CC_ME",
    with_mtp: bool = False,
) -> Transformer:
    """Parameters are allocated on `build.device`, uninitialized. Raises ConfigError if `with_mtp`
    is set and the model has no prediction modules."""
    if with_mtp and not config.num_mtp_layers:
        raise ConfigError(
            f"{config.architecture} has no multi-token prediction module; speculate with "
            "drafter='ngram', or set num_speculative_tokens=0"
        )
    if config.is_mla:
        return Deepseek(config, build, max_len, mla_prefill, mla_decode, with_mtp)
    return Qwen3Moe(config, build, max_len)
