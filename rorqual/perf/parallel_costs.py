"""What one rank of a parallel layout computes, reads and sends in a step. Pure arithmetic, no torch.

Weights are the inventory of weights.py, cut as parallel_config.py says; every figure is of one rank of one pipeline stage. A layer
is described once for the dense layers and once for the MoE layers, with how many the fullest stage has of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rorqual.cache.spec import DTYPE_BYTES
from rorqual.config import GQAConfig, MLAConfig, ModelConfig
from rorqual.parallel.choice import chosen_exchange, destinations
from rorqual.parallel_config import ParallelConfig
from rorqual.perf.costs import DECOMPRESSED, DEFAULT_FORMAT, Batch, Format, attention_flops_per_pair
from rorqual.perf.routing import UNIFORM, Routing, rank_load
from rorqual.perf.shards import layer_kv_bytes, part, shard, stage_layers
from rorqual.perf.weights import FP8, OWN, Weight, head_weight, layer_weights


@dataclass(frozen=True)
class Work:
    """One step of one attention group (the tp ranks of one data-parallel rank): requests that decode or verify, and prompt chunks.

    stage_tokens: tokens of all groups of the stage together; None means that every group has as many as this one. drafts: how many
    draft passes of the prediction module follow.
    """

    decode: Batch | None = None
    prefill: tuple[Batch, ...] = ()
    stage_tokens: int | None = None
    drafts: int = 0

    @property
    def batches(self) -> tuple[Batch, ...]:
        return (*((self.decode,) if self.decode else ()), *self.prefill)

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    @property
    def logit_rows(self) -> int:
        return sum(batch.requests * batch.logits for batch in self.batches)


@dataclass(frozen=True)
class RankOp:
    """One operation of one rank. shape: gemm (m, n, k); bmm (heads, m, n, k); attention (heads, kv_heads, requests, new, cached);
    experts (tokens, picks, distinct, hidden, intermediate, local). `layers` equal ones in the stage."""

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
class Message:
    """A collective among `ranks` ranks that lie `span` ranks apart at most. `bytes`: of the whole tensor for all_reduce, all_gather and
    reduce_scatter; what one rank sends away for all_to_all and p2p. tokens: rows a rank brings. wide: bytes a row over those of fp8
    rows with scales, which published exchange times are for."""

    name: str
    kind: str  # all_reduce | reduce_scatter | all_gather | all_to_all | p2p
    axis: str
    ranks: int
    span: int
    bytes: float
    tokens: int
    layers: int = 1
    wide: float = 1.0

    @property
    def wire_bytes(self) -> float:
        """What one rank sends: ring algorithms send (r - 1) / r of the tensor, twice for an all-reduce."""
        if self.kind in ("all_to_all", "p2p"):
            return self.bytes
        return self.bytes * (self.ranks - 1) / self.ranks * (2 if self.kind == "all_reduce" else 1)


@dataclass(frozen=True)
class RankStep:
    ops: tuple[RankOp, ...]
    messages: tuple[Message, ...]

    def total(self, field: str) -> float:
        return sum(getattr(op, field) * op.layers for op in self.ops)

    def sent(self) -> float:
        return sum(message.wire_bytes * message.layers for message in self.messages)


# ---- operations


def _math(weight: Weight, dtype: str) -> str:
    return "fp8" if weight.memory == FP8 else dtype if weight.memory == OWN else weight.memory


def _gemm(weight: Weight, tokens: float, dtype: str, layers: int) -> RankOp:
    rows, width = sum(weight.rows), DTYPE_BYTES[dtype]
    name, size = weight.name.rsplit(".", 1)[-1], float(weight.bytes(dtype))
    if weight.columns == 1:  # a norm or a bias: bytes, no product
        return RankOp(name, weight.part, "gather", 0.0, size, 0.0, 0.0, dtype, (tokens, rows), layers)
    read = tokens * (weight.columns + rows) * width
    shape = (tokens, rows, weight.columns)
    return RankOp(name, weight.part, "gemm", weight.flops_per_token * tokens, size, 0.0, read, _math(weight, dtype), shape, layers)


class _Layer:
    """The operations and messages of one kind of layer."""

    def __init__(self, config: ModelConfig, sizes: ParallelConfig, work: Work, fmt: Format, routing: Routing, layers: int):
        self.config, self.sizes, self.work, self.fmt, self.routing, self.layers = config, sizes, work, fmt, routing, layers
        self.dtype = fmt.dtype or config.dtype
        self.width = DTYPE_BYTES[self.dtype]
        self.tokens = work.tokens
        self.stage_tokens = work.stage_tokens if work.stage_tokens is not None else work.tokens * sizes.dp

    def ops(self, moe: bool) -> Iterator[RankOp]:
        experts: list[Weight] = []
        index = self.config.moe_layers.index(moe) if moe in self.config.moe_layers else 0
        for weight in layer_weights(self.config, index, moe, self.fmt.form):
            piece = shard(weight, self.config, self.sizes)
            if weight.part == "routed_experts":
                experts.append(piece)
            elif weight.name.endswith(".kv_b_proj"):
                yield from self._kv_b(piece)
            elif weight.part in ("dense_ffn", "shared_experts"):
                yield _gemm(piece, part(self.tokens * (self.sizes.dense_tp or 1), self.sizes.tp), self.dtype, self.layers)
            else:
                yield _gemm(piece, self.tokens, self.dtype, self.layers)
        yield from self._attention()
        if experts:
            yield self._experts(experts)

    def _kv_b(self, weight: Weight) -> Iterator[RankOp]:
        """Prompts decompress new entries and, chunk by chunk, the cached ones. Decoding steps multiply head by head with W_UK and W_UV
        where absorbed; CC decompresses everything again."""
        mla = self.config.attention
        assert isinstance(mla, MLAConfig)
        heads, entries = mla.num_heads // self.sizes.tp, sum(batch.entries for batch in self.work.prefill)
        decode, form = self.work.decode, self.fmt.form
        rows = entries if form != "CD" else sum(batch.tokens for batch in self.work.prefill)
        if decode and form in DECOMPRESSED:
            rows += decode.entries if form == "CC" else decode.tokens
        if rows:
            yield replace(_gemm(weight, rows, self.dtype, self.layers), prefill=True)
        if decode and form not in DECOMPRESSED:
            m, size = decode.tokens, weight.bytes(self.dtype) / (mla.nope_dim + mla.v_dim)
            for name, n, k in (("w_uk", mla.kv_lora_rank, mla.nope_dim), ("w_uv", mla.v_dim, mla.kv_lora_rank)):
                inner = mla.nope_dim if name == "w_uk" else mla.v_dim
                read, flops = heads * m * (n + k) * self.width, 2.0 * heads * m * n * k
                yield RankOp(name, "attention", "bmm", flops, size * inner, 0.0, read, self.dtype, (heads, m, n, k), self.layers)

    def _attention(self) -> Iterator[RankOp]:
        attention, entry = self.config.attention, layer_kv_bytes(self.config, self.sizes, self.fmt)
        heads = attention.num_heads // self.sizes.tp
        kv_heads = max(attention.num_kv_heads // self.sizes.tp, 1) if isinstance(attention, GQAConfig) else 1
        for batch in self.work.batches:
            decoding = batch is self.work.decode
            form = self.fmt.form if decoding or self.fmt.form == "CD" else "CC"
            flops = attention_flops_per_pair(self.config, form) / self.sizes.tp * batch.pairs
            query = self._query_width(form) * heads * batch.tokens * self.width
            shape = (heads, kv_heads, batch.requests, batch.new, batch.cached)
            cache = entry * batch.entries
            yield RankOp("attention", "attention", "attention", flops, 0.0, cache, query, self.dtype, shape, self.layers, not decoding)

    def _query_width(self, form: str) -> int:
        """Columns a head reads and writes a token: its query and its output."""
        attention = self.config.attention
        if isinstance(attention, GQAConfig):
            return 2 * attention.head_dim
        if form in DECOMPRESSED:
            return attention.qk_dim + attention.v_dim
        return attention.latent_dim + attention.kv_lora_rank

    def _experts(self, pieces: list[Weight]) -> RankOp:
        moe, sizes = self.config.moe, self.sizes
        load = rank_load(self.routing, moe.num_experts, moe.top_k, self.stage_tokens, sizes.ep)
        inner = moe.intermediate_size // sizes.expert_tp
        each = sum(replace(piece, count=1).bytes(self.dtype) for piece in pieces)
        flops = load.picks * sum(piece.flops_per_token for piece in pieces)
        read = load.picks * self.width * (2 * self.config.hidden_size + 3 * inner)
        shape = (self.stage_tokens, load.picks, load.distinct, self.config.hidden_size, inner, moe.num_experts // sizes.ep)
        kind, prompts = _math(pieces[0], self.dtype), bool(self.work.prefill)
        return RankOp("experts", "routed_experts", "experts", flops, load.distinct * each, 0.0, read, kind, shape, self.layers, prompts)

    # ---- messages

    def messages(self, moe: bool) -> Iterator[Message]:
        """After attention, and around the FFN."""
        sizes = self.sizes
        whole = float(self.tokens * self.config.hidden_size * self.width)
        dense = sizes.dense_tp or 1
        split = not moe and dense < sizes.tp  # each rank takes its own rows: half an all-reduce before, half after
        if sizes.tp > 1:
            yield self._message("attention output", "reduce_scatter" if split else "all_reduce", "tp", sizes.tp, sizes.tp, whole)
        if not moe:
            yield from self._dense_messages(whole, dense)
        else:
            yield from self._exchange(whole)

    def _dense_messages(self, whole: float, dense: int) -> Iterator[Message]:
        sizes = self.sizes
        if dense > sizes.tp:
            gathered = whole * dense / sizes.tp
            yield self._message("dense gather", "all_gather", "dense_tp", dense, dense, gathered)
            yield self._message("dense output", "reduce_scatter", "dense_tp", dense, dense, gathered)
        elif dense < sizes.tp:
            yield self._message("dense output", "all_gather", "tp", sizes.tp, sizes.tp, whole)
        elif dense > 1:
            yield self._message("dense output", "all_reduce", "dense_tp", dense, dense, whole)

    def _exchange(self, whole: float) -> Iterator[Message]:
        sizes, stage = self.sizes, self.sizes.stage
        rows = part(self.tokens, sizes.tp)
        mode = chosen_exchange(sizes, self.config.moe, rows, decode=not self.work.prefill) if stage > 1 else "local"
        if mode == "local":
            if stage > 1:  # every rank has every token; the shared expert's partial sums are added in the same all-reduce
                yield self._message("experts output", "all_reduce", "tp", stage, stage, whole)
            return
        if self.config.moe.num_shared and (sizes.dense_tp or 1) > 1:
            yield from self._dense_messages(whole, sizes.dense_tp or 1)
        if mode in ("allgather_tp", "allgather_ep"):
            every = float(self.stage_tokens * self.config.hidden_size * self.width)
            yield self._message("experts gather", "all_gather", "stage", stage, stage, every)
            yield self._message("experts output", "reduce_scatter", "stage", stage, stage, every)
        else:
            yield from self._all_to_all(mode, rows)

    def _all_to_all(self, mode: str, own: int) -> Iterator[Message]:
        """Copies that leave the rank: one an expert (low latency) or one a group of ranks that holds a chosen expert (normal), there in the
        model's dtype, or in fp8 with one fp32 scale for 128 columns, and back in the model's dtype."""
        moe, sizes, hidden = self.config.moe, self.sizes, self.config.hidden_size
        copies = float(moe.top_k) if mode == "low_latency" else destinations(sizes.ep, moe)
        away = copies * (sizes.ep - 1) / sizes.ep * own * sizes.expert_tp
        narrow = hidden + hidden // 128 * 4
        out = narrow if mode == "low_latency" and sizes.fp8_dispatch else hidden * self.width
        there = self._message("dispatch", "all_to_all", "ep", sizes.ep, sizes.stage, away * out)
        yield replace(there, tokens=own, wide=out / narrow)
        yield replace(self._message("combine", "all_to_all", "ep", sizes.ep, sizes.stage, away * hidden * self.width), tokens=own)

    def _message(self, name: str, kind: str, axis: str, ranks: int, span: int, size: float) -> Message:
        return Message(name, kind, axis, ranks, span, size, self.tokens, self.layers)


# ---- a step


def _drafts(
    config: ModelConfig, sizes: ParallelConfig, work: Work, fmt: Format, routing: Routing
) -> Iterator[tuple[list[RankOp], list[Message]]]:
    """The prediction module's passes: the first over the verified window, the others over one row a request; each ends in the head."""
    assert work.decode is not None
    for index in range(work.drafts):
        rows = work.decode.new if index == 0 else 1
        batch = replace(work.decode, new=rows, logits=1)
        passed = replace(work, decode=batch, prefill=(), stage_tokens=None, drafts=0)
        layer = _Layer(config, sizes, passed, fmt, routing, 1)
        joins = Weight("mtp", "eh_proj", (config.hidden_size,), 2 * config.hidden_size)
        head, sent = _head(config, sizes, passed, fmt)
        yield [*layer.ops(True), _gemm(joins, passed.tokens, layer.dtype, 1), head], [*layer.messages(True), *sent]


def _head(config: ModelConfig, sizes: ParallelConfig, work: Work, fmt: Format) -> tuple[RankOp, list[Message]]:
    dtype, head_tp = fmt.dtype or config.dtype, sizes.head_tp or 1
    rows = part(work.logit_rows * head_tp, sizes.tp)  # a wider head takes several groups' rows, a narrower one its share
    op = _gemm(shard(head_weight(config), config, sizes), rows, dtype, 1)
    if head_tp == 1:
        return op, []
    logits = float(rows * config.vocab_size * 4)  # gathered in fp32 for sampling
    return op, [Message("logits", "all_gather", "head_tp", head_tp, head_tp, logits, rows)]


def rank_step(config: ModelConfig, sizes: ParallelConfig, work: Work, fmt: Format = DEFAULT_FORMAT, routing: Routing = UNIFORM) -> RankStep:
    """Everything one rank of the fullest stage does in a step, the embedding and the head included (as if it had both ends)."""
    ops: list[RankOp] = []
    messages: list[Message] = []
    dtype = fmt.dtype or config.dtype
    row = config.hidden_size * DTYPE_BYTES[dtype]
    ops.append(
        RankOp("embed_tokens", "embedding", "gather", 0.0, float(work.tokens * row), 0.0, float(work.tokens * row), dtype, (work.tokens,))
    )
    if (sizes.embed_tp or 1) > 1:
        embed = sizes.embed_tp or 1
        messages.append(Message("embedding", "all_reduce", "embed_tp", embed, embed, float(work.tokens * row), work.tokens))
    for moe, count in zip((False, True), stage_layers(config, sizes), strict=True):
        if count:
            layer = _Layer(config, sizes, work, fmt, routing, count)
            ops += layer.ops(moe)
            messages += layer.messages(moe)
    norm = Weight("norms", "norm", (config.hidden_size,))
    head, sent = _head(config, sizes, work, fmt)
    ops += [_gemm(norm, work.logit_rows, dtype, 1), head]
    messages += sent
    for more_ops, more_messages in _drafts(config, sizes, work, fmt, routing) if work.drafts else ():
        ops += more_ops
        messages += more_messages
    if sizes.pp > 1:
        messages.append(Message("stage", "p2p", "pp", 2, sizes.stage * 2, float(work.tokens * row) / sizes.tp, work.tokens))
    return RankStep(tuple(ops), tuple(messages))
