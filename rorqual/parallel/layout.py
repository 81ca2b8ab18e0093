"""Where the rows of an activation are during one step, and what it takes to move from one part of a
layer to the next.

Attention takes the tokens of its data-parallel rank, replicated over tp, and returns a partial sum
over tp. Between the layers there are two ways, and the way back is always part of the next norm:

- `Replicated`: every rank of an attention group keeps all its tokens; the norms all-reduce.
  Feed-forward layers return partial sums over tp.
- `Sharded`: each rank keeps its share of the tokens; before the feed-forward a reduce-scatter.
  Attention gathers what it needs of all tokens: hidden states, or the latents that each rank made
  of its own. Feed-forward layers start from tokens that no other rank has, and return complete
  sums.

A feed-forward layer whose weights are spread over more ranks gathers rows and scatters their sums
(`dense`). `Layout` itself is the one device on which nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from rorqual.config.parallel import ParallelConfig
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.deferred_sum import NormInput, summed
from rorqual.ops.reference import Weight
from rorqual.parallel.collectives import Axis
from rorqual.parallel.shard import Shard

MLP = Callable[[Activation, Weight, Weight], Tensor]


class MeshView(Protocol):
    """What a layout asks of the mesh (mesh.py, which makes the layouts): this rank's place and its
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
    """A norm, told the axis over which `x` is still a partial sum (layers/norm.py)."""

    def add(
        self, x: NormInput, residual: Tensor | None, axis: Axis | None = None
    ) -> tuple[Activation, Tensor]: ...


class Layout:
    """One step's layout. `exchange` names the chosen way to the experts; `sharded`: the residual
    stream is split over tp."""

    exchange = "local"
    sharded = False

    def __init__(self, mesh: MeshView):
        self.mesh = mesh

    @property
    def moe_axis(self) -> Axis:
        """The ranks whose rows meet at the experts."""
        return self.mesh.dp

    @property
    def moe_rows(self) -> tuple[int, ...] | None:
        """Rows of each rank of `moe_axis`; None on one device."""
        return None

    @property
    def dense_rows(self) -> slice | None:
        """Where the rows that `dense` gathers lie among those of `moe_axis`; None where it
        gathers none."""
        return None

    @property
    def counted(self) -> bool:
        """Whether this rank counts the rows it has: of ranks with the same rows, one does."""
        return True

    @property
    def first_row(self) -> int:
        """Added to the number of a row where rows take turns among the copies of an expert: ranks
        with other rows begin with another copy, ranks with the same rows agree."""
        return 0

    @property
    def norm_sums(self) -> bool:
        """Whether what routed experts gave on this rank is complete and goes straight into a
        norm, which may then add it up."""
        return True

    def enter(self, x: Tensor) -> Tensor:
        """Rows of all tokens of this data-parallel rank, the same on every rank of tp, to those
        of the residual stream here."""
        return x

    def gather(self, x: Activation) -> Activation:
        """The way back: rows of the residual stream here to those of all tokens of this
        data-parallel rank."""
        return x

    def to_attention(
        self, norm: AddNorm, x: NormInput, residual: Tensor | None
    ) -> tuple[Activation, Tensor]:
        """(norm(x + residual), the residual stream), of the rows here: attention asks for the
        others with `gather`. x as a feed-forward layer returns it; no residual: as `enter` does."""
        return norm.add(x, residual)

    def to_ffn(self, norm: AddNorm, x: Tensor, residual: Tensor) -> tuple[Activation, Tensor]:
        """(norm(x + residual) for the feed-forward, the residual stream). x as attention returns
        it."""
        return norm.add(x, residual)

    def dense(self, mlp: MLP, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        """A feed-forward layer whose columns are split over the dense group: gather its rows,
        compute, scatter the partial sums."""
        return mlp(x, gate_up, down)

    def leave(self, norm: AddNorm, x: NormInput, residual: Tensor, rows: Tensor | None) -> Tensor:
        """Normed hidden states of the chosen `rows` of this data-parallel rank (None: all), on
        every rank of tp."""
        if rows is None:
            return hidden_of(norm.add(x, residual)[0])
        picked = (summed(x).index_select(0, rows), residual.index_select(0, rows))
        return hidden_of(norm.add(*picked)[0])


class MultiRankLayout(Layout):
    """Several ranks: `tokens` of each data-parallel rank, `dense_counts` rows of each rank of
    `dense_axis`, the first of which is number `dense_first` of `moe_axis`."""

    dense_axis: Axis
    dense_counts: Sequence[int]
    dense_first: int

    def __init__(self, mesh: MeshView, tokens: tuple[int, ...], exchange: str):
        super().__init__(mesh)
        self.tokens = tokens
        self.exchange = exchange

    @property
    def norm_sums(self) -> bool:
        return self.mesh.sizes.tp == 1

    @property
    def rows(self) -> int:
        """Rows of the residual stream on this rank."""
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
    """(hidden states of every data-parallel rank that shares this rank's vocabulary group, how
    many of each); `counts` as given for all."""
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
    """Partial vocabularies [sum of counts, own width] to this rank's rows over the whole
    vocabulary, [own rows, sum of widths]."""
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
