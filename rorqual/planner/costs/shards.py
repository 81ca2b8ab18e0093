"""One rank's part of a model: how config/parallel.py's sizes split each weight of the inventory,
and the cache. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from rorqual.cache.spec import DTYPE_BYTES
from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.planner.costs.costs import DEFAULT_FORMAT, Format, kv_bytes_per_token
from rorqual.planner.costs.weights import (
    WeightShape,
    layer_weights,
    materialized,
    mtp_weights,
    weights,
)


def part(total: int, ranks: int) -> int:
    """Of `total`, the most one rank has."""
    return -(-total // ranks)


def shard(weight: WeightShape, config: ModelConfig, sizes: ParallelConfig) -> WeightShape:
    """One rank's piece: heads over tp, columns of dense and shared FFNs over dense_tp, whole
    experts over ep and their columns over expert_tp, vocabulary rows over embed_tp and head_tp.
    Norms, routers and latent projections are on every rank."""
    name = weight.name.rsplit(".", 1)[-1]
    attention = config.attention
    if weight.part == "embedding":
        return replace(weight, rows=(part(weight.rows[0], sizes.embed_tp or 1),))
    if weight.part == "lm_head":
        return replace(weight, rows=(part(weight.rows[0], sizes.head_tp or 1),))
    if ".experts." in weight.name:
        cut = sizes.expert_tp
        count = sizes.expert_slots(weight.count) // sizes.ep
        return replace(_ffn_cut(weight, name, cut), count=count)
    if name in ("gate_up_proj", "down_proj"):
        return _ffn_cut(weight, name, sizes.dense_tp or 1)
    if name in ("o_proj", "merged_o"):
        return replace(weight, columns=weight.columns // sizes.tp)
    if name in ("q_b_proj", "kv_b_proj", "absorbed_q", "rope_q"):
        return replace(weight, rows=(weight.rows[0] // sizes.tp,))
    if (
        name == "fused_qkv_a_proj_with_mqa"
        and isinstance(attention, MLAConfig)
        and attention.q_lora_rank is None
        and len(weight.rows) == 2
    ):
        return replace(weight, rows=(weight.rows[0] // sizes.tp, weight.rows[1]))
    if name in ("qkv_proj", "bias") and isinstance(attention, GQAConfig):
        kept = max(attention.num_kv_heads // sizes.tp, 1) * attention.head_dim
        return replace(weight, rows=(weight.rows[0] // sizes.tp, kept, kept, *weight.rows[3:]))
    return weight


def _ffn_cut(weight: WeightShape, name: str, ranks: int) -> WeightShape:
    if name == "down_proj":
        return replace(weight, columns=weight.columns // ranks)
    return replace(weight, rows=tuple(rows // ranks for rows in weight.rows))


def stage_layers(config: ModelConfig, sizes: ParallelConfig) -> tuple[int, int]:
    """(dense, MoE) layers of the fullest pipeline stage: the one with most MoE layers, and among
    those most layers."""
    stages = [sizes.stage_layers(config.num_layers, stage) for stage in range(sizes.pp)]
    moe, layers = max(
        (sum(config.moe_layers[held.start : held.stop]), len(held)) for held in stages
    )
    return layers - moe, moe


@lru_cache(maxsize=1024)
def stage_weight_bytes(
    config: ModelConfig,
    sizes: ParallelConfig,
    stage: int,
    fmt: Format = DEFAULT_FORMAT,
    mtp: bool = False,
) -> float:
    """Bytes of weights on a rank of one pipeline stage: its layers, the embedding on the first,
    norm, head and prediction modules on the last. A tied head, and prediction modules, need the
    embedding there as well."""
    dtype = fmt.dtype or config.dtype
    last = stage == sizes.pp - 1
    held: list[WeightShape] = []
    for layer in sizes.stage_layers(config.num_layers, stage):
        held += _with_products(
            config, layer_weights(config, layer, config.moe_layers[layer]), layer, fmt
        )
    if mtp and last:
        held += mtp_weights(config)
        for extra in range(config.num_mtp_layers):
            held += _with_products(config, [], config.num_layers + extra, fmt)
    ends = {"embedding": stage == 0 or (last and (config.tie_embeddings or mtp)), "lm_head": last}
    held += [weight for weight in weights(config) if ends.get(weight.part)]
    norm = config.hidden_size * DTYPE_BYTES[dtype] if last else 0
    return norm + sum(shard(weight, config, sizes).bytes(dtype) for weight in held)


def _with_products(
    config: ModelConfig, held: list[WeightShape], layer: int, fmt: Format
) -> list[WeightShape]:
    """AM_CC_ME's products are stored in addition to the weights."""
    if fmt.form != "AM_CC_ME" or not isinstance(config.attention, MLAConfig):
        return held
    return held + materialized(config, config.attention, f"model.layers.{layer}.self_attn")


def rank_weight_bytes(
    config: ModelConfig, sizes: ParallelConfig, fmt: Format = DEFAULT_FORMAT, mtp: bool = False
) -> float:
    """Bytes of weights on the fullest rank."""
    return max(stage_weight_bytes(config, sizes, stage, fmt, mtp) for stage in range(sizes.pp))


def stage_kv_bytes_per_token(
    config: ModelConfig,
    sizes: ParallelConfig,
    stage: int,
    fmt: Format = DEFAULT_FORMAT,
    mtp: bool = False,
) -> float:
    """Cache bytes of one token on a rank of one pipeline stage; prediction modules have theirs
    on the last. A latent has no heads to split."""
    layers = len(sizes.stage_layers(config.num_layers, stage)) + (
        config.num_mtp_layers if mtp and stage == sizes.pp - 1 else 0
    )
    return layer_kv_bytes(config, sizes, fmt) * layers


def rank_kv_bytes_per_token(
    config: ModelConfig, sizes: ParallelConfig, fmt: Format = DEFAULT_FORMAT, mtp: bool = False
) -> float:
    """Cache bytes of one token on the rank that has most of it."""
    return max(
        stage_kv_bytes_per_token(config, sizes, stage, fmt, mtp) for stage in range(sizes.pp)
    )


def layer_kv_bytes(config: ModelConfig, sizes: ParallelConfig, fmt: Format) -> float:
    """Of one token in one layer on one rank."""
    whole = kv_bytes_per_token(config, fmt) / config.num_layers
    attention = config.attention
    if isinstance(attention, GQAConfig):
        return whole * max(attention.num_kv_heads // sizes.tp, 1) / attention.num_kv_heads
    return whole / sizes.tp if fmt.form == "CD" else whole
