"""What torch_npu's operators accept, as their documentation states it, checked before anything is
loaded: on the device a wrong shape is an error number, or a wrong result.

Sources: the pages of each operator in Ascend's op-plugin 7.3.0 (docs/context) and CANN 8.5
(aclnnFusedInferAttentionScore, aclnnMlaPrologV3WeightNz, aclnnMoeDistributeDispatchV2).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch

from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig, MoEConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.ops.reference import Weight

PAGE_SIZES = (16, 128)
MLA_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
LATENT = 512
ROPE = 64
NOPE = 128
PROLOGUE_HIDDEN = 7168
PROLOGUE_QUERY_LATENT = 1536
ABSORBED_ROWS = 16  # query tokens of a request, at most
GQA_MOST_QUERIES = 64  # query heads that share a key
GQA_WIDTH = 16  # a head is a multiple of this
GQA_WIDEST = 512
MATRIX_UNIT = 16  # rows and columns of a matrix in the NZ layout
INT8_UNIT = 32
INT8_INNER_UNIT = 64  # columns between an expert's two int8 products
MAX_EXPERTS = 1024  # of dispatch and combine
GATING_EXPERTS = 2048
MAX_TOP_K = 16
HIDDEN = (1024, 8192)
HIDDEN_UNIT = 32
DISPATCH_ROWS = {"A2": 256, "A3": 512}
DISPATCH_RANKS = {"A2": (16, 32, 64), "A3": range(2, 769)}
MIN_BUFFER_MB = 200  # HCCL's own default


def check_model(model: ModelConfig, sizes: ParallelConfig, page_size: int) -> None:
    """Raises ConfigError where the attention or the experts of one rank cannot run."""
    if page_size not in PAGE_SIZES:
        raise ConfigError(
            f"page_size={page_size} is not supported on an NPU; accepted: "
            f"{', '.join(map(str, PAGE_SIZES))}"
        )
    attention = model.attention
    heads = attention.num_heads // sizes.tp
    if isinstance(attention, MLAConfig):
        _check_mla(attention, heads)
    else:
        _check_gqa(attention, heads, sizes.tp)
    if model.hidden_size % MATRIX_UNIT:
        raise ConfigError(
            f"hidden_size={model.hidden_size} is not supported on an NPU, whose matrices have "
            f"multiples of {MATRIX_UNIT} columns"
        )


def check_int8_experts(model: ModelConfig, sizes: ParallelConfig) -> None:
    """Raises ConfigError where SwiGLU and rounding cannot be one operator between int8 products by
    expert."""
    width = model.moe.intermediate_size
    if width // sizes.expert_tp % INT8_INNER_UNIT:
        raise ConfigError(
            f"moe_intermediate_size={width} over {sizes.expert_tp} ranks is not supported with "
            f"int8 weights on an NPU; accepted: multiples of {INT8_INNER_UNIT} on a rank"
        )


def _check_mla(mla: MLAConfig, heads: int) -> None:
    if heads not in MLA_HEADS:
        raise ConfigError(
            f"{heads} attention heads a rank are not supported on an NPU; accepted for latent "
            f"attention: {', '.join(map(str, MLA_HEADS))}"
        )
    found = (mla.kv_lora_rank, mla.rope_dim, mla.nope_dim, mla.v_dim)
    if found != (LATENT, ROPE, NOPE, NOPE):
        raise ConfigError(
            "kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim and v_head_dim of "
            f"{', '.join(map(str, found))} are not supported on an NPU, whose attention takes "
            f"{LATENT}, {ROPE}, {NOPE} and {NOPE}"
        )


def _check_gqa(gqa: GQAConfig, heads: int, tp: int) -> None:
    groups = max(1, gqa.num_kv_heads // tp)
    if gqa.head_dim % GQA_WIDTH or gqa.head_dim > GQA_WIDEST:
        raise ConfigError(
            f"head_dim={gqa.head_dim} is not supported on an NPU; accepted: multiples of "
            f"{GQA_WIDTH} up to {GQA_WIDEST}"
        )
    if heads // groups > GQA_MOST_QUERIES:
        raise ConfigError(
            f"{heads // groups} query heads to a key are not supported on an NPU; accepted: up "
            f"to {GQA_MOST_QUERIES}"
        )


def fuses_prologue(mla: MLAConfig, hidden: int, heads: int) -> bool:
    """Whether the fused MLA prologue has these widths: those of DeepSeek-V3 and R1."""
    return (
        mla.q_lora_rank == PROLOGUE_QUERY_LATENT
        and hidden == PROLOGUE_HIDDEN
        and not mla.bias
        and heads in MLA_HEADS
        and (mla.kv_lora_rank, mla.rope_dim, mla.nope_dim) == (LATENT, ROPE, NOPE)
    )


def check_int8_cache(model: ModelConfig, sizes: ParallelConfig) -> None:
    """An int8 cache has one scale a layer, and the queries that meet it are rounded by the fused
    prologue."""
    mla = model.attention
    if isinstance(mla, GQAConfig) or not fuses_prologue(
        mla, model.hidden_size, mla.num_heads // sizes.tp
    ):
        raise ConfigError(
            "kv_cache_dtype=int8 on an NPU needs the fused MLA prologue, which has DeepSeek-V3's "
            f"widths (hidden {PROLOGUE_HIDDEN}, query latent {PROLOGUE_QUERY_LATENT}); accepted "
            "here: auto, bfloat16, float16"
        )


def check_weight(weight: Weight, module: str) -> None:
    """Raises ConfigError where no operator multiplies by weights held like that."""
    rows = weight.data.shape[-2]
    unit = MATRIX_UNIT
    if weight.scale is not None:
        unit = INT8_UNIT
        token_int8 = weight.data.dtype == torch.int8 and weight.activation == "int8_token"
        per_row = weight.block[0] == 1 and weight.scale.shape[-1] == 1
        four_bits = (
            weight.is_int4
            and weight.zero is None
            and weight.group_index is None
            and weight.activation == "wide"
        )
        if not (four_bits or (token_int8 and per_row)):
            kind = str(weight.data.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{module}: weights in {'int4' if weight.is_int4 else kind} with blocks of "
                f"{weight.block[0]} x {weight.block[1]} and activations {weight.activation} are "
                "not supported on an NPU; accepted: bf16, int8 with a scale a row and a token "
                "(w8a8), symmetric int4 with wide activations (w4a16)"
            )
    if rows % unit or weight.columns % unit:
        raise ConfigError(
            f"{module}: a matrix of {rows} x {weight.columns} on one rank is not supported on an "
            f"NPU; accepted: multiples of {unit}"
        )


def check_dispatch(
    model: ModelConfig, sizes: ParallelConfig, rows: int, soc: str, buffer_mb: int
) -> None:
    """Raises ConfigError where the fused dispatch and combine cannot carry `rows` tokens a rank,
    in HCCL buffers of so many MB."""
    moe = model.moe
    if sizes.expert_tp > 1:
        raise ConfigError(
            f"exchange='low_latency' on an NPU needs whole experts: ep={sizes.ep} leaves "
            f"{sizes.expert_tp} ranks to an expert"
        )
    ranks = DISPATCH_RANKS[soc]
    least, most = HIDDEN
    hidden = model.hidden_size
    most_rows = DISPATCH_ROWS[soc]
    checks = (
        ("ranks that share experts", sizes.stage, sizes.stage in ranks, _span(ranks)),
        ("tokens of a rank and step", rows, 0 < rows <= most_rows, f"up to {most_rows}"),
        ("experts", moe.num_experts, moe.num_experts <= MAX_EXPERTS, f"up to {MAX_EXPERTS}"),
        ("experts of a token", moe.top_k, moe.top_k <= MAX_TOP_K, f"up to {MAX_TOP_K}"),
        (
            "hidden columns",
            hidden,
            least <= hidden <= most and hidden % HIDDEN_UNIT == 0,
            f"multiples of {HIDDEN_UNIT} from {least} to {most}",
        ),
    )
    for what, found, fits, accepted in checks:
        if not fits:
            raise ConfigError(
                f"exchange='low_latency' on an NPU ({soc}) does not take {found} {what}; "
                f"accepted: {accepted}"
            )
    needed = dispatch_buffer_mb(hidden, moe, sizes, rows)
    if buffer_mb < needed:
        raise ConfigError(
            f"HCCL_BUFFSIZE={buffer_mb} is too small to dispatch {rows} tokens a rank to "
            f"{sizes.stage} ranks; accepted: {needed} or more (MB)"
        )


def _span(ranks: Sequence[int]) -> str:
    if isinstance(ranks, range):
        return f"{ranks.start} to {ranks.stop - 1}"
    return ", ".join(map(str, ranks))


def dispatch_buffer_mb(hidden: int, moe: MoEConfig, sizes: ParallelConfig, rows: int) -> int:
    """MB of an HCCL buffer that dispatch and combine need for `rows` tokens a rank and step (cann
    recipes' formula: twice what all ranks send in blocks of 480 bytes with 32 of flags, and what
    comes back in 512-byte units, and 11 MB more)."""
    local = moe.num_experts // sizes.ep
    sent = local * rows * sizes.stage * ceil(2 * hidden / 480) * 512
    back = moe.top_k * rows * ceil(2 * hidden / 512) * 512
    return max(MIN_BUFFER_MB, ceil(2 * (sent + back) / 2**20) + 11)


def fuses_gating(moe: MoEConfig) -> bool:
    """Whether a fused operator chooses experts by these rules."""
    groups = moe.n_group if moe.method != "greedy" else 1
    if moe.num_experts > GATING_EXPERTS or moe.num_experts % groups:
        return False
    each = moe.num_experts // groups
    kept = moe.topk_group if groups > 1 else 1
    if moe.top_k > each * kept:
        return False
    if moe.scoring == "sigmoid":
        return moe.norm_topk_prob and (groups == 1 or moe.method == "noaux_tc")
    return True
