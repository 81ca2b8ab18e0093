"""The part of every page that a rank holds: some layers, and of these some heads. No torch.

A cache replicated over ranks, such as latents, counts as one head that all of them hold. With more
tp ranks than heads, several ranks hold the same head.
"""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.cache.spec import KVSpec


@dataclass(frozen=True)
class PagePart:
    """Layers first_layer to last_layer (excluded) of the model, prediction modules after the
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
        """The intersection; may be empty."""
        return PagePart(
            max(self.first_layer, other.first_layer),
            min(self.last_layer, other.last_layer),
            max(self.first_head, other.first_head),
            min(self.last_head, other.last_head),
        )


def num_heads(spec: KVSpec) -> int:
    """Number of parts into which ranks can split a cache: 1 where it is replicated."""
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
    """The part that rank `tp_rank` of `tp` holds of a stage's `layers` and `heads` heads: its
    share, or one head that several ranks hold. One of `tp` and `heads` divides the other, unless
    there is a single head."""
    if heads >= tp:
        first = tp_rank * heads // tp
        return PagePart(layers.start, layers.stop, first, first + heads // tp)
    head = tp_rank * heads // tp
    return PagePart(layers.start, layers.stop, head, head + 1)
