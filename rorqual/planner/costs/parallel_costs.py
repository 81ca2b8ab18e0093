"""What one rank of a parallel layout computes and reads in a step (messages.py: what it sends).
Pure arithmetic, no torch.

Weights are the inventory of weights.py, split as in config/parallel.py; figures are for one rank of
one pipeline stage. There is one entry for the dense layers and one for the MoE layers, with the
number of each in the fullest stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rorqual.cache.spec import DTYPE_BYTES
from rorqual.config.model import GQAConfig, MLAConfig, ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.parallel.exchange_policy import chosen_exchange, gathers_latents, shards_tokens
from rorqual.planner.costs.costs import (
    DECOMPRESSED,
    DEFAULT_FORMAT,
    Format,
    GroupWork,
    attention_flops_per_pair,
)
from rorqual.planner.costs.messages import CostedMessage, RankMessages
from rorqual.planner.costs.routing import UNIFORM, Routing, rank_load
from rorqual.planner.costs.shards import layer_kv_bytes, part, shard, stage_layers
from rorqual.planner.costs.weights import WeightShape, head_weight, layer_weights


@dataclass(frozen=True)
class RankOp:
    """One operation of one rank. shape: gemm (m, n, k); bmm (heads, m, n, k); attention (heads,
    kv_heads, requests, new, cached); experts (tokens, pairs, distinct, hidden, intermediate,
    local). `layers` equal ones in the stage."""

    name: str
    part: str
    kind: str  # gemm | bmm | attention | experts | gather
    flops: float
    weight_bytes: float
    cache_bytes: float
    activation_bytes: float
    dtype: str
    shape: tuple[float, ...]
    layers: int = 1
    prefill: bool = False

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


@dataclass(frozen=True)
class RankStep:
    ops: tuple[RankOp, ...]
    messages: tuple[CostedMessage, ...]

    def total(self, field: str) -> float:
        return sum(getattr(op, field) * op.layers for op in self.ops)

    def sent(self) -> float:
        return sum(message.wire_bytes * message.layers for message in self.messages)


# ---- operations


def _gemm(weight: WeightShape, tokens: float, dtype: str, layers: int) -> RankOp:
    rows = sum(weight.rows)
    width = DTYPE_BYTES[dtype]
    name = weight.name.rsplit(".", 1)[-1]
    size = float(weight.bytes(dtype))
    if weight.columns == 1:  # a norm or a bias: bytes, no product
        return RankOp(
            name, weight.part, "gather", 0.0, size, 0.0, 0.0, dtype, (tokens, rows), layers
        )
    read = tokens * (weight.columns + rows) * width
    shape = (tokens, rows, weight.columns)
    return RankOp(
        name,
        weight.part,
        "gemm",
        weight.flops_per_token * tokens,
        size,
        0.0,
        read,
        weight.math(dtype),
        shape,
        layers,
    )


class _Layer:
    """The operations of one kind of layer."""

    def __init__(
        self,
        config: ModelConfig,
        sizes: ParallelConfig,
        work: GroupWork,
        fmt: Format,
        routing: Routing,
        layers: int,
    ):
        self.config = config
        self.sizes = sizes
        self.work = work
        self.fmt = fmt
        self.routing = routing
        self.layers = layers
        self.dtype = fmt.dtype or config.dtype
        self.width = DTYPE_BYTES[self.dtype]
        self.tokens = work.tokens
        most = max(work.tokens, *work.others(sizes.dp), 0)
        exchange = chosen_exchange(sizes, config.moe, part(most, sizes.tp), not work.prefill)
        self.sharded = shards_tokens(sizes, exchange)
        self.stage_tokens = (
            work.stage_tokens if work.stage_tokens is not None else work.tokens * sizes.dp
        )

    def ops(self, moe: bool) -> Iterator[RankOp]:
        experts: list[WeightShape] = []
        index = self.config.moe_layers.index(moe) if moe in self.config.moe_layers else 0
        for weight in layer_weights(self.config, index, moe, self.fmt.form):
            piece = shard(weight, self.config, self.sizes)
            if weight.part == "routed_experts":
                experts.append(piece)
            elif weight.name.endswith(".kv_b_proj"):
                yield from self._kv_b(piece)
            elif weight.part in ("dense_ffn", "shared_experts"):
                yield _gemm(
                    piece,
                    part(self.tokens * (self.sizes.dense_tp or 1), self.sizes.tp),
                    self.dtype,
                    self.layers,
                )
            else:
                yield _gemm(piece, self._rows(weight), self.dtype, self.layers)
        yield from self._attention()
        if experts:
            yield self._experts(experts)

    def _rows(self, weight: WeightShape) -> int:
        """Tokens of attention's down projections, norms and routers: those of the group, or only
        this rank's if tokens are sharded."""
        own = weight.part in ("norms", "router")
        down = weight.name.endswith(
            ("fused_qkv_a_proj_with_mqa", "q_a_layernorm", "kv_a_layernorm")
        )
        alone = self.sharded and (own or (down and gathers_latents(self.config)))
        return part(self.tokens, self.sizes.tp) if alone else self.tokens

    def _kv_b(self, weight: WeightShape) -> Iterator[RankOp]:
        """Prompts decompress new entries and, chunk by chunk, the cached ones. Decoding steps
        multiply head by head with W_UK and W_UV where absorbed; CC decompresses everything
        again."""
        mla = self.config.attention
        assert isinstance(mla, MLAConfig)
        heads = mla.num_heads // self.sizes.tp
        entries = sum(batch.entries for batch in self.work.prefill)
        decode = self.work.decode
        form = self.fmt.form
        rows = entries if form != "CD" else sum(batch.tokens for batch in self.work.prefill)
        if decode and form in DECOMPRESSED:
            rows += decode.entries if form == "CC" else decode.tokens
        if rows:
            yield replace(_gemm(weight, rows, self.dtype, self.layers), prefill=True)
        if decode and form not in DECOMPRESSED:
            m = decode.tokens
            size = weight.bytes(self.dtype) / (mla.nope_dim + mla.v_dim)
            for name, n, k in (
                ("w_uk", mla.kv_lora_rank, mla.nope_dim),
                ("w_uv", mla.v_dim, mla.kv_lora_rank),
            ):
                inner = mla.nope_dim if name == "w_uk" else mla.v_dim
                read = heads * m * (n + k) * self.width
                flops = 2.0 * heads * m * n * k
                yield RankOp(
                    name,
                    "attention",
                    "bmm",
                    flops,
                    size * inner,
                    0.0,
                    read,
                    self.dtype,
                    (heads, m, n, k),
                    self.layers,
                )

    def _attention(self) -> Iterator[RankOp]:
        attention = self.config.attention
        entry = layer_kv_bytes(self.config, self.sizes, self.fmt)
        heads = attention.num_heads // self.sizes.tp
        kv_heads = (
            max(attention.num_kv_heads // self.sizes.tp, 1)
            if isinstance(attention, GQAConfig)
            else 1
        )
        for batch in self.work.batches:
            decoding = batch is self.work.decode
            form = self.fmt.form if decoding or self.fmt.form == "CD" else "CC"
            flops = attention_flops_per_pair(self.config, form) / self.sizes.tp * batch.pairs
            query = self._query_width(form) * heads * batch.tokens * self.width
            shape = (heads, kv_heads, batch.requests, batch.new, batch.cached)
            cache = entry * batch.entries
            yield RankOp(
                "attention",
                "attention",
                "attention",
                flops,
                0.0,
                cache,
                query,
                self.dtype,
                shape,
                self.layers,
                not decoding,
            )

    def _query_width(self, form: str) -> int:
        """Columns a head reads and writes a token: its query and its output."""
        attention = self.config.attention
        if isinstance(attention, GQAConfig):
            return 2 * attention.head_dim
        if form in DECOMPRESSED:
            return attention.qk_dim + attention.v_dim
        return attention.latent_dim + attention.kv_lora_rank

    def _experts(self, pieces: list[WeightShape]) -> RankOp:
        moe = self.config.moe
        sizes = self.sizes
        load = rank_load(self.routing, moe.num_experts, moe.top_k, self.stage_tokens, sizes.ep)
        inner = moe.intermediate_size // sizes.expert_tp
        each = sum(replace(piece, count=1).bytes(self.dtype) for piece in pieces)
        flops = load.pairs * sum(piece.flops_per_token for piece in pieces)
        read = load.pairs * self.width * (2 * self.config.hidden_size + 3 * inner)
        shape = (
            self.stage_tokens,
            load.pairs,
            load.distinct,
            self.config.hidden_size,
            inner,
            sizes.expert_slots(moe.num_experts) // sizes.ep,
        )
        kind = pieces[0].math(self.dtype)
        prompts = bool(self.work.prefill)
        return RankOp(
            "experts",
            "routed_experts",
            "experts",
            flops,
            load.distinct * each,
            0.0,
            read,
            kind,
            shape,
            self.layers,
            prompts,
        )


# ---- a step


def _drafts(
    config: ModelConfig,
    sizes: ParallelConfig,
    work: GroupWork,
    fmt: Format,
    routing: Routing,
    copies: bool,
) -> Iterator[tuple[list[RankOp], Iterable[CostedMessage]]]:
    """The prediction module's passes: the first over the verified window, the others over one
    row a request; each ends in the head."""
    assert work.decode is not None
    for index in range(work.drafts):
        rows = work.decode.new if index == 0 else 1
        batch = replace(work.decode, new=rows, logits=1)
        passed = replace(work, decode=batch, prefill=(), stage_tokens=None, drafts=0)
        layer = _Layer(config, sizes, passed, fmt, routing, 1)
        joins = WeightShape("mtp", "eh_proj", (config.hidden_size,), 2 * config.hidden_size)
        ops = [
            *layer.ops(True),
            _gemm(joins, passed.tokens, layer.dtype, 1),
            _head(config, sizes, passed, fmt),
        ]
        messages = RankMessages(config, sizes, passed, layer.width, copies, routing.fullest)
        yield ops, messages.draft()


def _head(config: ModelConfig, sizes: ParallelConfig, work: GroupWork, fmt: Format) -> RankOp:
    """Logit rows of the head: those of all attention groups that it spans, or of the own group."""
    rows = work.logit_rows * max(1, (sizes.head_tp or 1) // sizes.tp)
    return _gemm(shard(head_weight(config), config, sizes), rows, fmt.dtype or config.dtype, 1)


def rank_step(
    config: ModelConfig,
    sizes: ParallelConfig,
    work: GroupWork,
    fmt: Format = DEFAULT_FORMAT,
    routing: Routing = UNIFORM,
    copies: bool = False,
) -> RankStep:
    """Everything one rank of the fullest stage does in a step, the embedding and the head
    included (as if it had both ends). `copies`: how a low-latency exchange sends (messages.py)."""
    ops: list[RankOp] = []
    dtype = fmt.dtype or config.dtype
    row = config.hidden_size * DTYPE_BYTES[dtype]
    ops.append(
        RankOp(
            "embed_tokens",
            "embedding",
            "gather",
            0.0,
            float(work.tokens * row),
            0.0,
            float(work.tokens * row),
            dtype,
            (work.tokens,),
        )
    )
    for moe, count in zip((False, True), stage_layers(config, sizes), strict=True):
        if count:
            layer = _Layer(config, sizes, work, fmt, routing, count)
            ops += layer.ops(moe)
    norm = WeightShape("norms", "norm", (config.hidden_size,))
    ops += [_gemm(norm, work.logit_rows, dtype, 1), _head(config, sizes, work, fmt)]
    sent = RankMessages(config, sizes, work, DTYPE_BYTES[dtype], copies, routing.fullest)
    messages = list(sent.all())
    for more_ops, more_messages in (
        _drafts(config, sizes, work, fmt, routing, copies) if work.drafts else ()
    ):
        ops += more_ops
        messages += more_messages
    return RankStep(tuple(ops), tuple(messages))
