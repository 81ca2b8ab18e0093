"""How the rows of an activation are distributed in one step, and the communication between the
parts of a layer.

Attention takes the tokens of its data-parallel rank, replicated over tp, and returns a partial sum
over tp. There are two layouts of the residual stream; the next norm does the reduction:

- `Replicated`: every rank of an attention group has all its tokens; the norms all-reduce.
  Feed-forward layers return partial sums over tp.
- `Sharded`: each rank has its share of the tokens, after a reduce-scatter before the feed-forward.
  Attention gathers what it needs of all tokens: hidden states, or the latents that each rank
  projected from its own. Feed-forward layers take tokens that no other rank has and return complete
  sums.

A dense layer whose weights are split over more ranks gathers their rows and reduce-scatters the
sums (`dense`). `Layout` itself is for a single device, without communication.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from rorqual.config.parallel import ParallelConfig
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.deferred_sum import NormInput, summed
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import Weight
from rorqual.parallel.collectives import Axis
from rorqual.parallel.shard import Shard

MLP = Callable[[Activation, Weight, Weight], Tensor]


class MeshView(Protocol):
    """What a layout needs of the Mesh (mesh.py creates the layouts): this rank's coordinates and
    groups."""

    sizes: ParallelConfig
    axes: dict[str, Axis]
    tp: Axis
    dp: Axis
    stage: Axis
    dp_rank: int
    tp_rank: int
    stage_rank: int

    def dp_ranks(self, part: str) -> range: ...


class AddNorm(Protocol):
    """A norm; `axis`: the axis over which `x` is a partial sum (layers/norm.py)."""

    def add(
        self, x: NormInput, residual: Tensor | None, axis: Axis | None = None
    ) -> tuple[Activation, Tensor]: ...


class Layout:
    """One step's layout. `exchange`: name of the step's exchange. `sharded`: the residual stream is
    sharded by tokens over tp. `padded`: which rows of this data-parallel rank are padding, in a
    captured step. `alternates`: the step is a micro-batch, and others compute at its hand-overs."""

    exchange = "local"
    sharded = False
    padded: PaddedRows | None = None
    alternates = False

    def __init__(self, mesh: MeshView):
        self.mesh = mesh

    def with_padding(self, padded: PaddedRows | None) -> Self:
        if padded is self.padded:
            return self
        found = copy.copy(self)
        found.padded = padded
        return found

    def alternating(self) -> Self:
        found = copy.copy(self)
        found.alternates = True
        return found

    @property
    def own_padded(self) -> PaddedRows | None:
        """`padded` of this rank's rows of the residual stream."""
        return self.padded

    @property
    def moe_axis(self) -> Axis:
        """The ranks among which rows are dispatched to experts."""
        return self.mesh.dp

    @property
    def moe_rows(self) -> tuple[int, ...] | None:
        """Rows of each rank of `moe_axis`; None on one device."""
        return None

    @property
    def dense_rows(self) -> slice | None:
        """The rows that `dense` gathers, as a slice of those of `moe_axis`; None if it gathers
        none."""
        return None

    @property
    def counted(self) -> bool:
        """Whether this rank adds its rows to the expert load: one of the ranks with the same rows
        does."""
        return True

    @property
    def first_row(self) -> int:
        """Number of the first row, for the round-robin choice of replicas. Ranks with different
        rows start with another replica, ranks with the same rows agree."""
        return 0

    @property
    def defers_moe_sum(self) -> bool:
        """Whether an MoE layer's result on this rank is complete and goes straight into a norm,
        which can then do the sum over a token's experts."""
        return True

    def enter(self, x: Tensor) -> Tensor:
        """Rows of all tokens of this data-parallel rank, replicated over tp, to this rank's rows of
        the residual stream."""
        return x

    def gather(self, x: Activation) -> Activation:
        """The inverse of `enter`: this rank's rows to those of all tokens of this data-parallel
        rank."""
        return x

    def to_attention(
        self, norm: AddNorm, x: NormInput, residual: Tensor | None
    ) -> tuple[Activation, Tensor]:
        """(norm(x + residual), residual stream) of this rank's rows; attention gets the others with
        `gather`. x: a feed-forward layer's result, or `enter`'s if residual is None."""
        return norm.add(x, residual)

    def to_ffn(self, norm: AddNorm, x: Tensor, residual: Tensor) -> tuple[Activation, Tensor]:
        """(norm(x + residual) for the feed-forward, residual stream). x: attention's result."""
        return norm.add(x, residual)

    def dense(self, mlp: MLP, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        """A feed-forward layer whose columns are split over the dense group: gather its rows,
        compute, scatter the partial sums."""
        return mlp(x, gate_up, down)

    def leave(self, norm: AddNorm, x: NormInput, residual: Tensor, rows: Tensor | None) -> Tensor:
        """The final norm: hidden states of `rows` of this data-parallel rank (None: all), on every
        rank of tp."""
        if rows is None:
            return hidden_of(norm.add(x, residual)[0])
        picked = (summed(x).index_select(0, rows), residual.index_select(0, rows))
        return hidden_of(norm.add(*picked)[0])


class MultiRankLayout(Layout):
    """Several ranks. `tokens`: of each data-parallel rank. `dense_counts`: rows of each rank of
    `dense_axis`, whose first rank is number `dense_first` of `moe_axis`."""

    dense_axis: Axis
    dense_counts: Sequence[int]
    dense_first: int

    def __init__(self, mesh: MeshView, tokens: tuple[int, ...], exchange: str):
        super().__init__(mesh)
        self.tokens = tokens
        self.exchange = exchange

    @property
    def defers_moe_sum(self) -> bool:
        return self.mesh.sizes.tp == 1

    @property
    def rows(self) -> int:
        """This rank's rows of the residual stream."""
        return self.tokens[self.mesh.dp_rank]

    @property
    def moe_rows(self) -> tuple[int, ...]:
        return self.tokens

    @property
    def dense_rows(self) -> slice | None:
        if self.dense_axis.size == 1:
            return None
        start = sum(self.moe_rows[: self.dense_first])
        return slice(start, start + sum(self.dense_counts))

    def dense(self, mlp: MLP, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        axis = self.dense_axis
        if axis.size == 1:
            return mlp(x, gate_up, down)
        counts = self.dense_counts
        rows = axis.all_gather(hidden_of(x), counts)
        return axis.reduce_scatter(mlp(rows, gate_up, down), counts)

    def embed_counts(self) -> list[int]:
        return [self.tokens[rank] for rank in self.mesh.dp_ranks("embed")]


class Replicated(MultiRankLayout):
    def __init__(self, mesh: MeshView, tokens: tuple[int, ...], exchange: str):
        super().__init__(mesh, tokens, exchange)
        others = mesh.dp_ranks("dense")
        self.dense_axis = mesh.axes["dense_dp"]
        self.dense_first = others.start
        self.dense_counts = [tokens[rank] for rank in others]

    @property
    def counted(self) -> bool:
        return self.mesh.tp_rank == 0

    @property
    def first_row(self) -> int:
        return self.mesh.dp_rank

    def to_attention(
        self, norm: AddNorm, x: NormInput, residual: Tensor | None
    ) -> tuple[Activation, Tensor]:
        return norm.add(x, residual, None if residual is None else self.mesh.tp)

    def to_ffn(self, norm: AddNorm, x: Tensor, residual: Tensor) -> tuple[Activation, Tensor]:
        return norm.add(x, residual, self.mesh.tp)

    def leave(self, norm: AddNorm, x: NormInput, residual: Tensor, rows: Tensor | None) -> Tensor:
        if rows is not None:
            x = summed(x).index_select(0, rows)
            residual = residual.index_select(0, rows)
        return hidden_of(norm.add(x, residual, self.mesh.tp)[0])


class Sharded(MultiRankLayout):
    sharded = True

    def __init__(self, mesh: MeshView, tokens: tuple[int, ...], exchange: str):
        super().__init__(mesh, tokens, exchange)
        size = mesh.sizes.tp
        dense = mesh.axes["dense"]
        self.shards = tuple(rows for count in tokens for rows in Shard(0, size).lengths(count))
        start = mesh.dp_rank * size
        self.counts = self.shards[start : start + size]
        self.dense_first = mesh.stage_rank - dense.rank
        self.dense_axis = dense
        self.dense_counts = self.shards[self.dense_first : self.dense_first + dense.size]

    @property
    def rows(self) -> int:
        return self.counts[self.mesh.tp_rank]

    @property
    def own_padded(self) -> PaddedRows | None:
        tokens = self.tokens[self.mesh.dp_rank]
        start = self.mesh.tp.shard.span(tokens)[0]
        return self.padded and self.padded.after(start)

    @property
    def first_row(self) -> int:
        return self.mesh.stage_rank

    @property
    def moe_axis(self) -> Axis:
        return self.mesh.stage

    @property
    def moe_rows(self) -> tuple[int, ...]:
        return self.shards

    def enter(self, x: Tensor) -> Tensor:
        start, stop = self.mesh.tp.shard.span(x.shape[0])
        return x[start:stop]

    def gather(self, x: Activation) -> Tensor:
        return self.mesh.tp.all_gather(hidden_of(x), self.counts)

    def to_ffn(self, norm: AddNorm, x: Tensor, residual: Tensor) -> tuple[Activation, Tensor]:
        return norm.add(self.mesh.tp.reduce_scatter(x, self.counts), residual)

    def leave(self, norm: AddNorm, x: NormInput, residual: Tensor, rows: Tensor | None) -> Tensor:
        h = self.gather(norm.add(x, residual)[0])
        return h if rows is None else h.index_select(0, rows)


def head_rows(
    mesh: MeshView, hidden: Tensor, counts: Sequence[int] | None
) -> tuple[Tensor, list[int]]:
    """(hidden states of all data-parallel ranks in this rank's vocabulary group, rows of each).
    `counts`: rows of every data-parallel rank."""
    if mesh.axes["head_dp"].size == 1:
        return hidden, [hidden.shape[0]]
    assert counts is not None, (
        "head_tp exceeds tp: logits need the rows of every data-parallel rank"
    )
    own = [counts[rank] for rank in mesh.dp_ranks("head")]
    return mesh.axes["head_dp"].all_gather(hidden, own), own


def return_logits(
    mesh: MeshView, logits: Tensor, counts: Sequence[int], widths: Sequence[int]
) -> Tensor:
    """Logits over this rank's part of the vocabulary, [sum of counts, own width], to this rank's
    rows over the whole vocabulary, [own rows, sum of widths]."""
    head = mesh.axes["head"]
    tp = mesh.sizes.tp
    if head.size <= tp:
        return head.all_gather_columns(logits, widths)
    most = max(widths)
    padded = torch.nn.functional.pad(logits, (0, most - logits.shape[1]))
    send = [counts[rank // tp] for rank in range(head.size)]
    parts = torch.cat([padded.split(list(counts))[rank // tp] for rank in range(head.size)])
    own = counts[mesh.axes["head_dp"].rank]
    received = head.all_to_all(parts, send, [own] * head.size).view(head.size, own, most)
    return torch.cat([part[:, :width] for part, width in zip(received, widths, strict=True)], 1)
