"""Vocabulary-parallel embedding and language-model head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rorqual.layers.linear import Linear, Part
from rorqual.layers.parameter import Build, Target
from rorqual.parallel.layout import Layout, MultiRankLayout, head_rows, return_logits


class Embedding:
    """forward: token ids [T] to [T, hidden], on every rank of the attention group."""

    def __init__(self, build: Build, name: str, vocabulary: int, hidden: int, axis: str = "embed"):
        self.ops = build.ops
        self.mesh = build.mesh
        self.name = name
        self.whole = (vocabulary, hidden)
        self.shard = build.mesh.axes[axis].shard
        self.start, self.stop = self.shard.span(vocabulary)
        self.table = build.embedding(self.stop - self.start, hidden)

    def forward(self, ids: Tensor, layout: Layout) -> Tensor:
        if self.shard.count == 1:
            return self.ops.embed(ids, self.table)
        assert isinstance(layout, MultiRankLayout)
        group = self.mesh.axes["embed"]
        others = self.mesh.axes["embed_dp"]
        if others.size == 1:
            return group.all_reduce(self._partial(ids))
        counts = layout.embed_counts()
        partial = others.reduce_scatter(self._partial(others.all_gather(ids, counts)), counts)
        return self.mesh.tp.all_reduce(partial)

    def _partial(self, ids: Tensor) -> Tensor:
        """[T, hidden]: zero for tokens outside this rank's part of the vocabulary."""
        place = ids - self.start
        outside = (place < 0) | (place >= self.stop - self.start)
        return self.ops.embed(place.masked_fill(outside, 0), self.table).masked_fill_(
            outside[:, None], 0
        )

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.table, std=1.0, whole=self.whole, start=(self.start, 0))


class Head:
    """Logits over the whole vocabulary, from hidden states that every rank of the attention group
    has. A tied head uses the embedding's table."""

    def __init__(self, build: Build, vocabulary: int, hidden: int, tied: Embedding | None):
        self.mesh = build.mesh
        self.tied = tied
        self.vocabulary = vocabulary
        self.shard = build.mesh.axes["head"].shard
        # quantized checkpoints leave the head unquantized; of_head is the format asked for it
        own = build.quant.of_head if build.quant else None
        part = Part("lm_head", vocabulary, shard=self.shard)
        self.linear = None if tied else Linear(replace(build, quant=own), [part], hidden)

    def finalize(self) -> None:
        """Call once, after loading. An unquantized head stays as loaded."""
        if self.linear is not None and self.linear.weight.quantized:
            self.linear.finalize()

    def _local(self, hidden: Tensor) -> Tensor:
        if self.linear is not None:
            return self.linear.forward(hidden)
        assert self.tied is not None
        return torch.nn.functional.linear(hidden, self.tied.table)

    def forward(
        self, hidden: Tensor, counts: Sequence[int] | None = None, wide: bool = True
    ) -> Tensor:
        """[N, hidden] to [N, vocabulary]. `wide`: fp32; else it may be the activations' dtype,
        which is enough for an argmax. `counts`: rows of each data-parallel rank, needed if head_tp
        exceeds tp."""
        if self.shard.count == 1:
            logits = self._local(hidden)
            return logits.float() if wide else logits
        rows, own = head_rows(self.mesh, hidden, counts)
        return return_logits(
            self.mesh, self._local(rows).float(), own, self.shard.lengths(self.vocabulary)
        )

    def targets(self) -> Iterator[Target]:
        if self.linear is not None:
            yield from self.linear.targets()
