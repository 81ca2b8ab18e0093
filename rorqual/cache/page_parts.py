"""Which part of every page a rank holds: some layers, and of these some heads. No torch.

A cache that ranks hold alike, as that of latents, counts as one head that all of them hold. Where
there are more ranks of tp than heads several hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.cache.spec import KVSpec


@dataclass(frozen=True)
class PagePart:
    """Layers first_layer to last_layer (excluded) of the model, its prediction modules behind the
    others; heads likewise."""

    first_layer: int
    last_layer: int
    first_head: int
    last_head: int

    @property
    def fields(self) -> tuple[int, int, int, int]:
        return self.first_layer, self.last_layer, self.first_head, self.last_head

    @property
    def empty(self) -> bool:
        return self.first_layer >= self.last_layer or self.first_head >= self.last_head

    def covers(self, other: PagePart) -> bool:
        return not other.empty and self.common(other) == other

    def common(self, other: PagePart) -> PagePart:
        """What is in both; may be empty."""
        return PagePart(
            max(self.first_layer, other.first_layer),
            min(self.last_layer, other.last_layer),
            max(self.first_head, other.first_head),
            min(self.last_head, other.last_head),
        )


def num_heads(spec: KVSpec) -> int:
    """Parts into which a cache can be cut between ranks: 1 where all of them hold it all."""
    counts = {
        1 if plane.shard_axis is None else plane.shape[plane.shard_axis]
        for layer in spec.layers
        for plane in layer
    }
    assert len(counts) == 1, "all planes are cut alike"
    return counts.pop()


def whole_part(spec: KVSpec) -> PagePart:
    return PagePart(0, len(spec.layers), 0, num_heads(spec))


def held_part(layers: range, heads: int, tp: int, tp_rank: int) -> PagePart:
    """What rank `tp_rank` of `tp` holds of a stage's `layers`, of `heads` heads: its share, or one
    that several hold. Either number divides the other, but for a single head."""
    if heads >= tp:
        first = tp_rank * heads // tp
        return PagePart(layers.start, layers.stop, first, first + heads // tp)
    head = tp_rank * heads // tp
    return PagePart(layers.start, layers.stop, head, head + 1)
