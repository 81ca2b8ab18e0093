"""Which part of a dimension a rank holds. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` parts of a dimension. If its length is not a multiple of `count`, the
    last parts are shorter or empty."""

    index: int = 0
    count: int = 1

    def span(self, length: int) -> tuple[int, int]:
        """(start, stop) of the part."""
        each = -(-length // self.count)
        return min(self.index * each, length), min((self.index + 1) * each, length)

    def lengths(self, length: int) -> tuple[int, ...]:
        """Lengths of all parts."""
        spans = (Shard(index, self.count).span(length) for index in range(self.count))
        return tuple(stop - start for start, stop in spans)


WHOLE = Shard()
