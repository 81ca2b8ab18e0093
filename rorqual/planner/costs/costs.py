"""Costs of a model, a layer or an operation: parameters, bytes, operations. Pure arithmetic, no
torch.

Everything is a sum over the inventory in weights.py. A product of [n, k] with [k, m] counts 2 n k m
operations; norms, rope, softmax and activations count none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from rorqual.cache.spec import DTYPE_BYTES, kv_spec
from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs.weights import (
    DEFAULT_FORM,
    WeightShape,
    attention_weights,
    head_weight,
    layer_weights,
    materialized,
    weights,
)

DECOMPRESSED = ("CD", "CC")  # forms whose scores are taken with keys per head


@dataclass(frozen=True)
class ByPart:
    """A quantity (parameters or bytes) by part of the model. `attention` holds the norms inside
    attention, `norms` all others, `mtp` the multi-token prediction modules without the embedding
    and head they share."""

    embedding: int = 0
    lm_head: int = 0
    attention: int = 0
    dense_ffn: int = 0
    router: int = 0
    routed_experts: int = 0
    shared_experts: int = 0
    norms: int = 0
    mtp: int = 0

    @property
    def total(self) -> int:
        """Without the multi-token prediction modules."""
        return self.total_with_mtp - self.mtp

    @property
    def total_with_mtp(self) -> int:
        return sum(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True)
class Format:
    """Formats of weights and cache; None: the model's dtype. Quantized weights follow
    `ModelConfig.quant`. kv_dtype: a name of the engine's kv_cache_dtype. split_latent: latents and
    rope keys in separate planes with one scale per layer, as on an NPU."""

    dtype: str | None = None
    kv_dtype: str | None = None
    form: str = DEFAULT_FORM
    split_latent: bool = False


DEFAULT_FORMAT = Format()


def _by_part(pairs: Iterable[tuple[str, int]]) -> ByPart:
    sums: dict[str, int] = {}
    for part, value in pairs:
        sums[part] = sums.get(part, 0) + value
    return ByPart(**sums)


# ---- parameters and bytes


def parameters(config: ModelConfig, form: str = DEFAULT_FORM) -> ByPart:
    return _by_part((weight.part, weight.parameters) for weight in weights(config, form))


def attention_parameters(config: ModelConfig, form: str = DEFAULT_FORM) -> int:
    """Of one layer: what the form multiplies by, and the norms inside."""
    return sum(weight.parameters for weight in attention_weights(config, 0, form))


def active_parameters(config: ModelConfig) -> int:
    """Parameters one token uses, the whole embedding table counted as its authors do, no
    multi-token prediction."""
    parts = parameters(config)
    return (
        parts.total
        - parts.routed_experts
        + parts.routed_experts * config.moe.top_k // config.moe.num_experts
    )


def weight_bytes(
    config: ModelConfig, where: str = "memory", fmt: Format = DEFAULT_FORMAT
) -> ByPart:
    """Bytes by part in `memory` or in the `checkpoint`.

    In memory the router is fp32 if the model routes in fp32, kv_b is dequantized, and AM_CC_ME
    stores its products in addition to the weights.
    """
    if where not in ("memory", "checkpoint"):
        raise ConfigError(f"where={where!r} is not known; accepted: memory, checkpoint")
    held = list(weights(config))
    if where == "memory" and fmt.form == "AM_CC_ME" and isinstance(config.attention, MLAConfig):
        held += materialized(config, config.attention, "") * config.num_layers
    return _by_part(
        (weight.part, weight.bytes(fmt.dtype or config.dtype, where)) for weight in held
    )


def kv_bytes_per_token(config: ModelConfig, fmt: Format = DEFAULT_FORMAT) -> int:
    """Cache bytes of one token over all layers."""
    spec = kv_spec(
        config,
        1,
        fmt.kv_dtype,
        fmt.form,
        activations=fmt.dtype,
        split_latent=fmt.split_latent,
    )
    return spec.bytes_per_token


def kv_tokens(
    config: ModelConfig, room: float, fmt: Format = DEFAULT_FORMAT, page_size: int = 1
) -> int:
    """Tokens whose cache fits in `room` bytes, in whole pages."""
    return max(0, int(room // (kv_bytes_per_token(config, fmt) * page_size))) * page_size


# ---- operations


@dataclass(frozen=True)
class BatchShape:
    """One step's work: `requests` equal requests, each with `new` tokens to compute after
    `cached` ones, `logits` rows of which go through the head."""

    requests: int
    new: int
    cached: int = 0
    logits: int = 1

    @staticmethod
    def decode(requests: int, context: int) -> BatchShape:
        """`context` counts the new token: it attends to itself as well."""
        return BatchShape(requests, 1, context - 1)

    @staticmethod
    def verify(requests: int, context: int, num_speculative_tokens: int) -> BatchShape:
        """Speculation: the last token and its `num_speculative_tokens` drafts are computed
        together, and all their logits; num_speculative_tokens=0 is `decode`."""
        return BatchShape(
            requests,
            num_speculative_tokens + 1,
            context - num_speculative_tokens - 1,
            num_speculative_tokens + 1,
        )

    @property
    def tokens(self) -> int:
        return self.requests * self.new

    @property
    def entries(self) -> int:
        """Cache entries present once the step has written its own."""
        return self.requests * (self.cached + self.new)

    @property
    def pairs(self) -> int:
        """Query-key pairs under the causal mask."""
        return self.requests * (self.new * self.cached + self.new * (self.new + 1) // 2)


@dataclass(frozen=True)
class GroupWork:
    """One step of one attention group (the tp ranks of one data-parallel rank): requests that
    decode or verify, and prompt chunks.

    stage_tokens: tokens of all groups of the stage together; None means that every group has as
    many as this one. drafts: how many draft passes of the prediction module follow.
    """

    decode: BatchShape | None = None
    prefill: tuple[BatchShape, ...] = ()
    stage_tokens: int | None = None
    drafts: int = 0

    @property
    def batches(self) -> tuple[BatchShape, ...]:
        return (*((self.decode,) if self.decode else ()), *self.prefill)

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    @property
    def logit_rows(self) -> int:
        return sum(batch.requests * batch.logits for batch in self.batches)

    def others(self, dp: int) -> tuple[int, ...]:
        """Tokens of the other data-parallel ranks of the stage, which share what this one leaves
        as evenly as can be."""
        rest = (
            self.tokens * (dp - 1)
            if self.stage_tokens is None
            else max(0, self.stage_tokens - self.tokens)
        )
        return tuple(
            rest * (rank + 1) // (dp - 1) - rest * rank // (dp - 1) for rank in range(dp - 1)
        )


@dataclass(frozen=True)
class Op:
    """What one operation computes and must read: weights (of experts in use only) and cache."""

    name: str
    part: str
    flops: float = 0
    weight_bytes: float = 0
    cache_bytes: float = 0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes


def expected_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that n tokens choose under uniform routing, in expectation: E (1 - (1 -
    k/E)^n)."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def attention_flops_per_pair(config: ModelConfig, form: str = DEFAULT_FORM) -> int:
    """Scores and weighted sum of one query token with one cached token, over all heads of a layer.

    With keys per head 2 H (qk + v); absorbed 2 H (2 C + rope) (arXiv 2405.04434, section 2.1).
    """
    attention = config.attention
    if isinstance(attention, GQAConfig):
        return 4 * attention.num_heads * attention.head_dim
    if form in DECOMPRESSED:
        return 2 * attention.num_heads * (attention.qk_dim + attention.v_dim)
    return 2 * attention.num_heads * (2 * attention.kv_lora_rank + attention.rope_dim)


def decode_flops_per_cached_token(config: ModelConfig, form: str = DEFAULT_FORM) -> int:
    """What one more cached token adds to a layer's decode step: CC decompresses it anew each
    time."""
    attention = config.attention
    pair = attention_flops_per_pair(config, form)
    if not isinstance(attention, MLAConfig) or form != "CC":
        return pair
    return pair + 2 * attention.kv_lora_rank * attention.num_heads * (
        attention.nope_dim + attention.v_dim
    )


def _weight_op(config: ModelConfig, weight: WeightShape, batch: BatchShape, fmt: Format) -> Op:
    """The product with one weight. Experts in use are those of uniform routing."""
    flops = float(weight.flops_per_token * batch.tokens)
    size = float(weight.bytes(fmt.dtype or config.dtype))
    if weight.part == "routed_experts":
        flops *= config.moe.top_k
        size *= (
            expected_experts(config.moe.num_experts, config.moe.top_k, batch.tokens)
            / config.moe.num_experts
        )
    elif weight.name.endswith(".kv_b_proj") and fmt.form == "CC":
        # The other forms touch kv_b once a new token: to decompress it (CD), or as W_UK and W_UV
        # around the absorbed attention.
        flops = float(weight.flops_per_token * batch.entries)
    return Op(weight.name.rsplit(".", 1)[-1], weight.part, flops, size)


def layer_ops(
    config: ModelConfig, layer: int, batch: BatchShape, fmt: Format = DEFAULT_FORMAT
) -> list[Op]:
    """All operations of one layer in a step. Attention reads each cached entry once in every
    form."""
    found = [
        _weight_op(config, weight, batch, fmt)
        for weight in layer_weights(config, layer, config.moe_layers[layer], fmt.form)
    ]
    entry = kv_bytes_per_token(config, fmt) / config.num_layers
    flops = float(attention_flops_per_pair(config, fmt.form) * batch.pairs)
    return [*found, Op("attention", "attention", flops, 0.0, entry * batch.entries)]


def step_ops(config: ModelConfig, batch: BatchShape, fmt: Format = DEFAULT_FORMAT) -> list[Op]:
    """A whole step: embedding rows, every layer, and the head on one row a request."""
    width = DTYPE_BYTES[fmt.dtype or config.dtype]
    ops = [Op("embed_tokens", "embedding", 0.0, float(batch.tokens * config.hidden_size * width))]
    for layer in range(config.num_layers):
        ops += layer_ops(config, layer, batch, fmt)
    ops.append(Op("norm", "norms", 0.0, float(config.hidden_size * width)))
    ops.append(
        _weight_op(config, head_weight(config), BatchShape(batch.requests, batch.logits), fmt)
    )  # a tied head reads the embedding table
    return ops


def total(ops: Iterable[Op], name: str = "total") -> Op:
    listed = list(ops)
    sums = (
        sum(op.flops for op in listed),
        sum(op.weight_bytes for op in listed),
        sum(op.cache_bytes for op in listed),
    )
    return Op(name, name, *sums)


def decode_flops_per_token(
    config: ModelConfig, context: int, fmt: Format = DEFAULT_FORMAT
) -> float:
    return total(step_ops(config, BatchShape.decode(1, context), fmt)).flops


@dataclass(frozen=True)
class StepBytes:
    """What a step must read at least: the experts in use, all other weights, the cache."""

    experts: float
    rest: float
    cache: float

    @property
    def total(self) -> float:
        return self.experts + self.rest + self.cache


def decode_bytes(
    config: ModelConfig, batch: int, context: int, fmt: Format = DEFAULT_FORMAT
) -> StepBytes:
    """`batch` requests of `context` tokens each, under uniform routing."""
    ops = step_ops(config, BatchShape.decode(batch, context), fmt)
    experts = total(op for op in ops if op.part == "routed_experts").weight_bytes
    everything = total(ops)
    return StepBytes(experts, everything.weight_bytes - experts, everything.cache_bytes)


def decode_floor_seconds(
    config: ModelConfig,
    batch: int,
    context: int,
    bandwidth: float,
    flops_rate: float | None = None,
    fmt: Format = DEFAULT_FORMAT,
) -> float:
    """No decode step is faster: bytes it must read over `bandwidth` (bytes a second) and, given
    a `flops_rate`, operations over that."""
    everything = total(step_ops(config, BatchShape.decode(batch, context), fmt))
    return max(everything.bytes / bandwidth, everything.flops / flops_rate if flops_rate else 0.0)
