"""One rank's messages in a step, for the planner's network times: the calls that
parallel/comm_volume.py counts, with their span. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.parallel.comm_counters import bytes_sent, fp8_row_bytes
from rorqual.parallel.comm_volume import CommCall, StepMessages
from rorqual.planner.costs.costs import GroupWork
from rorqual.planner.costs.shards import stage_layers

DISPATCH = ("blocks", "picks")
NEIGHBOURS = "p2p"


@dataclass(frozen=True)
class CostedMessage:
    """A call among `ranks` ranks that are at most `span` ranks apart. `bytes`: the message as in
    parallel/comm_counters.py: the whole tensor for all_reduce, all_gather and reduce_scatter, what
    one rank sends for all_to_all and p2p. tokens: rows per rank. wide: bytes of a row relative to
    an fp8 row with scales, for which exchange times are published."""

    name: str
    kind: str  # all_reduce | reduce_scatter | all_gather | all_to_all | p2p
    axis: str
    ranks: int
    span: int
    bytes: int
    tokens: int
    layers: int = 1
    wide: float = 1.0

    @property
    def wire_bytes(self) -> int:
        """What one rank sends."""
        return bytes_sent("send" if self.kind == NEIGHBOURS else self.kind, self.bytes, self.ranks)


def span_of(sizes: ParallelConfig, axis: str) -> int:
    """How many neighbouring ranks an axis reaches over."""
    if axis == "pp":
        return 2 * sizes.stage
    if axis in ("dp", "stage"):
        return sizes.stage
    part = axis.removesuffix("_dp")
    found: int = sizes.tp if part == "tp" else getattr(sizes, f"{part}_tp")
    return found


class RankMessages:
    """The messages of a rank in a group with `work`; the other groups share the rest of the stage's
    tokens evenly, with logits in proportion. `copies`: a low-latency exchange sends one copy for
    each (token, expert) pair, as DeepEP does (whose exchange times are published), instead of
    blocks of rows to every rank."""

    def __init__(
        self,
        config: ModelConfig,
        sizes: ParallelConfig,
        work: GroupWork,
        itemsize: int,
        copies: bool = False,
        fullest: float = 0.0,
    ):
        self.fullest = max(1.0, fullest)
        self.config = config
        self.sizes = sizes
        self.work = work
        self.copies = copies
        tokens = (work.tokens, *work.others(sizes.dp))
        logits = [
            round(work.logit_rows * rows / work.tokens) if work.tokens else 0 for rows in tokens
        ]
        self.step = StepMessages(config, sizes, 0, tokens, not work.prefill, itemsize, logits)
        self.rows = self.step.shards[0] if self.step.sharded else work.tokens

    def all(self) -> Iterator[CostedMessage]:
        """Of a rank of the fullest stage, as if it had both ends of the model."""
        step = self.step
        (dense, sparse) = stage_layers(self.config, self.sizes)
        yield from self._of(step.embedding())
        yield from self._of(step.to_attention(), dense + sparse - (not step.sharded))
        yield from self._of(step.layer(False), dense)
        yield from self._of(step.layer(True), sparse)
        yield from self._of(step.head())
        yield from self._of(step.hand_over())

    def layer(self, sparse: bool) -> Iterator[CostedMessage]:
        """Of one layer that is not the first."""
        yield from self._of(self.step.to_attention())
        yield from self._of(self.step.layer(sparse))

    def draft(self) -> Iterator[CostedMessage]:
        """Messages of one pass of a prediction module: embedding, layer (the input of its first
        norm is no partial sum) and head."""
        step = self.step
        yield from self._of(step.embedding())
        yield from self._of(step.to_attention() if step.sharded else ())
        yield from self._of(step.layer(True))
        yield from self._of(step.head())

    def _of(self, calls: Iterable[CommCall], layers: int = 1) -> Iterator[CostedMessage]:
        return (self._message(sent, layers) for sent in calls if layers)

    def _message(self, sent: CommCall, layers: int) -> CostedMessage:
        kind, ranks = (NEIGHBOURS, 2) if sent.call == "send" else (sent.call, sent.size)
        found = CostedMessage(
            sent.name,
            kind,
            sent.axis,
            ranks,
            span_of(self.sizes, sent.axis),
            sent.message,
            self.rows,
            layers,
        )
        return self._exchanged(found) if sent.name in ("dispatch", "combine") else found

    def _exchanged(self, message: CostedMessage) -> CostedMessage:
        step = self.step
        low_latency = step.exchange == "low_latency"
        row = step.payload if low_latency and message.name == "dispatch" else step.row
        fp8_row = fp8_row_bytes(self.config.hidden_size)
        wide = row / fp8_row if message.name == "dispatch" else 1.0
        if not (low_latency and self.copies):
            # blocks of rows have the same size for any routing
            more = 1.0 if low_latency else self.fullest
            return replace(message, bytes=round(message.bytes * more), wide=wide)
        away = (
            self.rows
            * self.config.moe.top_k
            * self.sizes.expert_tp
            * (self.sizes.ep - 1)
            / self.sizes.ep
        )
        return replace(message, bytes=round(away * row * self.fullest), wide=wide)
