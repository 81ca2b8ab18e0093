"""Communication volume of one step, call by call, computed in advance. The counters of a run must
match it, and the planner's network times use it. No torch.

Bytes are as in comm_counters.py. Only the dynamic all-to-all depends on the routing: its volume is
the expectation under uniform routing. Exchanges are those of a process group: over shared memory a
gather sends rows of fp8 experts as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.parallel.comm_counters import ROUTING_BYTES, bytes_sent, fp8_row_bytes
from rorqual.parallel.exchange_policy import (
    chosen_exchange,
    destinations,
    gathered_columns,
    gathers_fp8,
    shards_tokens,
)
from rorqual.parallel.shard import Shard

Bytes = dict[str, dict[str, int]]  # by axis, then by call
COUNT_BYTES = ID_BYTES = 8


@dataclass(frozen=True)
class CommCall:
    """One call of one rank among `size` ranks of `axis`. `name`: what is sent. `message`: bytes, as
    comm_counters.py defines them."""

    name: str
    axis: str
    call: str
    message: int
    size: int

    @property
    def bytes(self) -> int:
        """Bytes that leave this rank."""
        return bytes_sent(self.call, self.message, self.size)

    def __bool__(self) -> bool:
        return self.size > 1 and self.message > 0


@dataclass
class StepMessages:
    """The calls of one rank in one step; calls without bytes are left out. `tokens`, `logits`: rows
    of each data-parallel rank. `itemsize`: of activations, bytes."""

    model: ModelConfig
    sizes: ParallelConfig
    rank: int
    tokens: Sequence[int]
    decode: bool
    itemsize: int
    logits: Sequence[int]

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.pp_rank, self.local = divmod(self.rank, sizes.stage)
        self.dp_rank = self.local // sizes.tp
        self.exchange = chosen_exchange(
            sizes, self.model.moe, -(-max(self.tokens) // sizes.tp), self.decode
        )
        self.sharded = shards_tokens(sizes, self.exchange)
        self.row = self.model.hidden_size * self.itemsize
        self.own = self.tokens[self.dp_rank]
        self.padded = -(-self.own // sizes.tp) * sizes.tp
        self.shards = [rows for count in self.tokens for rows in Shard(0, sizes.tp).lengths(count)]

    def step(self) -> Iterator[CommCall]:
        """In the order of the forward pass."""
        if self.pp_rank == 0:
            yield from self.embedding()
        for layer in self.sizes.stage_layers(self.model.num_layers, self.pp_rank):
            if layer or self.sharded:  # the input of the very first norm is no partial sum
                yield from self.to_attention()
            yield from self.layer(self.model.moe_layers[layer])
        if self.pp_rank == self.sizes.pp - 1:
            yield from self.head()
        else:
            yield from self.hand_over()

    def block(self, size: int) -> range:
        """Data-parallel ranks whose tokens are gathered in a block of `size` ranks."""
        ranks = max(size, self.sizes.tp)
        start = self.local // ranks * ranks
        return range(start // self.sizes.tp, (start + ranks) // self.sizes.tp)

    def embedding(self) -> Iterator[CommCall]:
        size = self.sizes.embed_tp or 1
        tp = self.sizes.tp
        if size <= tp:
            yield from _made(
                CommCall("embedding", "embed", "all_reduce", self.own * self.row, size)
            )
            return
        others = self.block(size)
        most = max(self.tokens[rank] for rank in others) * len(others)
        yield from _made(
            CommCall("embedding", "embed_dp", "all_gather", most * ID_BYTES, len(others)),
            CommCall("embedding", "embed_dp", "reduce_scatter", most * self.row, len(others)),
            CommCall("embedding", "tp", "all_reduce", self.own * self.row, tp),
        )

    def to_attention(self) -> Iterator[CommCall]:
        """Before the attention of one layer: the all-reduce of the previous feed-forward layer, or
        the all-gather of sharded tokens."""
        if self.sharded:
            columns = gathered_columns(self.model) * self.itemsize
            yield from _made(
                CommCall(
                    "attention input", "tp", "all_gather", self.padded * columns, self.sizes.tp
                )
            )
        else:
            yield from self.sums(self.own)

    def sums(self, rows: int) -> Iterator[CommCall]:
        """The all-reduce of a feed-forward layer, if tokens are replicated over tp."""
        yield from _made(
            CommCall("feed-forward output", "tp", "all_reduce", rows * self.row, self.sizes.tp)
        )

    def layer(self, sparse: bool) -> Iterator[CommCall]:
        """From the attention output of one layer to the partial sums of its feed-forward."""
        call, rows = ("reduce_scatter", self.padded) if self.sharded else ("all_reduce", self.own)
        yield from _made(CommCall("attention output", "tp", call, rows * self.row, self.sizes.tp))
        if not sparse:
            yield from self.dense("dense")
            return
        # an all-gather exchange also gathers the shared expert's rows and returns its sums
        gathered = self.exchange.startswith("allgather")
        if self.model.moe.num_shared and not gathered:
            yield from self.dense("shared")
        yield from self.experts()

    def dense(self, name: str) -> Iterator[CommCall]:
        size = self.sizes.dense_tp or 1
        tp = self.sizes.tp
        if self.sharded:
            first = self.local // size * size
            axis = "dense"
            ranks = size
            most = max(self.shards[first : first + size])
        else:
            others = self.block(size)
            axis = "dense_dp"
            ranks = size // tp
            most = max(self.tokens[rank] for rank in others)
        for end, call in (("gather", "all_gather"), ("output", "reduce_scatter")):
            yield from _made(CommCall(f"{name} {end}", axis, call, most * ranks * self.row, ranks))

    def experts(self) -> Iterator[CommCall]:
        if self.exchange == "local":
            return
        axis, counts = ("stage", self.shards) if self.sharded else ("dp", list(self.tokens))
        ranks = len(counts)
        most = max(counts)
        routing = self.model.moe.top_k * ROUTING_BYTES
        if self.exchange.startswith("allgather"):
            row = self.gathered_row(sum(counts)) + routing
            yield from _made(
                CommCall("experts gather", axis, "all_gather", ranks * most * row, ranks),
                CommCall("experts output", axis, "reduce_scatter", ranks * most * self.row, ranks),
            )
            return
        if self.exchange == "low_latency":
            there, back = ((ranks - 1) * most * size for size in (self.payload + routing, self.row))
        else:
            copies = (
                destinations(self.sizes.ep, self.model.moe, self.sizes.places_experts)
                * self.sizes.expert_tp
                * (ranks - 1)
                / ranks
            )
            own = counts[self.local if self.sharded else self.dp_rank]
            there = round(own * copies) * (self.row + routing) + COUNT_BYTES * (ranks - 1)
            back = round(sum(counts) / ranks * copies) * self.row
        yield from _made(
            CommCall("dispatch", axis, "all_to_all", there, ranks),
            CommCall("combine", axis, "all_to_all", back, ranks),
        )

    def gathered_row(self, rows: int) -> int:
        """Bytes of a hidden state in an all-gather of `rows` rows for experts."""
        model = self.model
        dense = (self.sizes.dense_tp or 1) // (1 if self.sharded else self.sizes.tp) > 1
        wide = dense and model.moe.num_shared > 0
        fp8 = gathers_fp8(fp8_experts(model, self.sizes), rows * model.moe.top_k, wide)
        return fp8_row_bytes(model.hidden_size) if fp8 else self.row

    @property
    def payload(self) -> int:
        """Bytes of a hidden state in a low-latency dispatch."""
        return fp8_row_bytes(self.model.hidden_size) if self.sizes.fp8_dispatch else self.row

    def leave(self, rows: int) -> Iterator[CommCall]:
        """After the last layer: hidden states of `rows` logit rows to every rank of tp."""
        if self.sharded:
            yield from _made(
                CommCall("hidden states", "tp", "all_gather", self.padded * self.row, self.sizes.tp)
            )
        else:
            yield from self.sums(rows)

    def head(self) -> Iterator[CommCall]:
        size = self.sizes.head_tp or 1
        tp = self.sizes.tp
        rows = self.logits[self.dp_rank]
        yield from self.leave(rows)
        width = 4 * -(-self.model.vocab_size // size)
        if size <= tp:
            yield from _made(CommCall("logits", "head", "all_gather", rows * width * size, size))
            return
        counts = [self.logits[rank] for rank in self.block(size)]
        yield from _made(
            CommCall(
                "hidden states",
                "head_dp",
                "all_gather",
                max(counts) * len(counts) * self.row,
                len(counts),
            ),
            CommCall("logits", "head", "all_to_all", (sum(counts) * tp - rows) * width, size),
        )

    def hand_over(self) -> Iterator[CommCall]:
        """To the next pipeline stage: hidden states and the residual stream."""
        rows = self.shards[self.local] if self.sharded else self.own
        yield from _made(CommCall("stage", "pp", "send", 2 * rows * self.row, self.sizes.pp))


def fp8_experts(model: ModelConfig, sizes: ParallelConfig) -> bool:
    """Whether routed experts are kept as e4m3 with one scale per 128 x 128 block, and take rows in
    fp8: Weight.fp8_blocks of the first layer's, as the model will have made them (scales are kept
    per row if gate and up do not meet at the edge of a block)."""
    layer = next((layer for layer, sparse in enumerate(model.moe_layers) if sparse), None)
    if model.quant is None or layer is None:
        return False
    name = f"model.layers.{layer}.mlp.experts.0.gate_proj"
    scheme = model.quant.of(name, model.hidden_size)
    size = model.moe.intermediate_size // sizes.expert_tp
    return (
        scheme.kind == "fp8"
        and scheme.block == (128, 128)
        and scheme.activation.startswith("fp8_group")
        and size % scheme.block[0] == 0
    )


def _made(*messages: CommCall) -> Iterator[CommCall]:
    return filter(None, messages)


def step_messages(
    model: ModelConfig,
    sizes: ParallelConfig,
    rank: int,
    tokens: Sequence[int],
    decode: bool,
    itemsize: int = 2,
    logits: Sequence[int] | None = None,
) -> Bytes:
    """Bytes that rank `rank` sends in a step, by axis and call. `logits` rows default to one per
    token, as in decode."""
    found: Bytes = {}
    for sent in StepMessages(
        model, sizes, rank, tokens, decode, itemsize, tokens if logits is None else logits
    ).step():
        calls = found.setdefault(sent.axis, {})
        calls[sent.call] = calls.get(sent.call, 0) + sent.bytes
    return found
