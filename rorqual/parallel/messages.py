"""What one step moves between ranks, by axis and call, computed beforehand: the counters of a run must come to the same. No torch.

Bytes are those of traffic.py. The dynamic all-to-all alone depends on where tokens go: for it the result is the expectation under
uniform routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rorqual.config import ModelConfig
from rorqual.parallel.choice import chosen_exchange, destinations, gathered_columns, shards_tokens
from rorqual.parallel.cut import Cut
from rorqual.parallel.traffic import bytes_sent
from rorqual.parallel_config import ParallelConfig

Bytes = dict[str, dict[str, int]]  # by axis, then by call
COUNT_BYTES = ID_BYTES = 8
PICK_BYTES = 8  # an int32 place and an fp32 weight


@dataclass
class StepMessages:
    """The messages of one rank in one step. `tokens`, `logits`: rows of each data-parallel rank; `itemsize` of activations in bytes."""

    model: ModelConfig
    sizes: ParallelConfig
    rank: int
    tokens: Sequence[int]
    decode: bool
    itemsize: int
    logits: Sequence[int]
    found: Bytes = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.pp_rank, self.local = divmod(self.rank, sizes.stage)
        self.dp_rank = self.local // sizes.tp
        self.exchange = chosen_exchange(sizes, self.model.moe, -(-max(self.tokens) // sizes.tp), self.decode)
        self.sharded = shards_tokens(sizes, self.exchange)
        self.row = self.model.hidden_size * self.itemsize
        self.own = self.tokens[self.dp_rank]
        self.shards = [rows for count in self.tokens for rows in Cut(0, sizes.tp).lengths(count)]

    def add(self, axis: str, call: str, message: int, size: int) -> None:
        if size > 1 and message:
            calls = self.found.setdefault(axis, {})
            calls[call] = calls.get(call, 0) + bytes_sent(call, message, size)

    def step(self) -> Bytes:
        held = self.sizes.stage_layers(self.model.num_layers, self.pp_rank)
        if self.pp_rank == 0:
            self.embedding()
        for layer in held:
            self.layer(layer)
        if self.pp_rank == self.sizes.pp - 1:
            self.head()
        else:
            rows = self.shards[self.local] if self.sharded else self.own
            self.add("pp", "send", 2 * rows * self.row, self.sizes.pp)
        return self.found

    def block(self, size: int) -> range:
        """Data-parallel ranks whose tokens meet in a block of so many ranks."""
        ranks = max(size, self.sizes.tp)
        start = self.local // ranks * ranks
        return range(start // self.sizes.tp, (start + ranks) // self.sizes.tp)

    def embedding(self) -> None:
        size, tp = self.sizes.embed_tp or 1, self.sizes.tp
        if size <= tp:
            self.add("embed", "all_reduce", self.own * self.row, size)
            return
        others = self.block(size)
        most = max(self.tokens[rank] for rank in others) * len(others)
        self.add("embed_dp", "all_gather", most * ID_BYTES, len(others))
        self.add("embed_dp", "reduce_scatter", most * self.row, len(others))
        self.add("tp", "all_reduce", self.own * self.row, tp)

    def layer(self, index: int) -> None:
        tp, shard = self.sizes.tp, -(-self.own // self.sizes.tp)
        if self.sharded:
            self.add("tp", "all_gather", shard * tp * gathered_columns(self.model) * self.itemsize, tp)
            self.add("tp", "reduce_scatter", shard * tp * self.row, tp)
        else:
            self.add("tp", "all_reduce", self.own * self.row, tp)
            if index:  # the first norm of all meets no partial sum
                self.add("tp", "all_reduce", self.own * self.row, tp)
        sparse = self.model.moe_layers[index]
        gathered = self.exchange.startswith("allgather")  # with the experts' rows, and summed with their sums
        if not sparse or (self.model.moe.num_shared and not gathered):
            self.dense()
        if sparse:
            self.experts()

    def dense(self) -> None:
        size, tp = self.sizes.dense_tp or 1, self.sizes.tp
        if self.sharded:
            first = self.local // size * size
            axis, ranks, most = "dense", size, max(self.shards[first : first + size])
        else:
            others = self.block(size)
            axis, ranks, most = "dense_dp", size // tp, max(self.tokens[rank] for rank in others)
        for call in ("all_gather", "reduce_scatter"):
            self.add(axis, call, most * ranks * self.row, ranks)

    def experts(self) -> None:
        if self.exchange == "local":
            return
        axis, counts = ("stage", self.shards) if self.sharded else ("dp", self.tokens)
        ranks, rows, picks = len(counts), len(counts) * max(counts), self.model.moe.top_k * PICK_BYTES
        if self.exchange.startswith("allgather"):
            self.add(axis, "all_gather", rows * (self.row + picks), ranks)
            self.add(axis, "reduce_scatter", rows * self.row, ranks)
        elif self.exchange == "low_latency":
            self.add(axis, "all_to_all", (ranks - 1) * max(counts) * (self.payload() + picks + self.row), ranks)
        else:
            copies = destinations(self.sizes.ep, self.model.moe) * self.sizes.expert_tp * (ranks - 1) / ranks
            sent = round(counts[self.local] * copies) * (self.row + picks)
            returned = round(sum(counts) / ranks * copies) * self.row
            self.add(axis, "all_to_all", sent + returned + COUNT_BYTES * (ranks - 1), ranks)

    def payload(self) -> int:
        """Bytes of a hidden state on its way to low-latency experts."""
        hidden = self.model.hidden_size
        return hidden + 4 * -(-hidden // 128) if self.sizes.fp8_dispatch else self.row

    def head(self) -> None:
        size, tp, rows = self.sizes.head_tp or 1, self.sizes.tp, self.logits[self.dp_rank]
        if self.sharded:
            self.add("tp", "all_gather", -(-self.own // tp) * tp * self.row, tp)
        else:
            self.add("tp", "all_reduce", rows * self.row, tp)
        width = 4 * -(-self.model.vocab_size // size)
        if size <= tp:
            self.add("head", "all_gather", rows * width * size, size)
            return
        counts = [self.logits[rank] for rank in self.block(size)]
        self.add("head_dp", "all_gather", max(counts) * len(counts) * self.row, len(counts))
        self.add("head", "all_to_all", (sum(counts) * tp - rows) * width, size)


def step_messages(
    model: ModelConfig,
    sizes: ParallelConfig,
    rank: int,
    tokens: Sequence[int],
    decode: bool,
    itemsize: int = 2,
    logits: Sequence[int] | None = None,
) -> Bytes:
    """Bytes that rank `rank` sends in a step, by axis and call. `logits` rows default to one a token, as when decoding."""
    return StepMessages(model, sizes, rank, tokens, decode, itemsize, tokens if logits is None else logits).step()
