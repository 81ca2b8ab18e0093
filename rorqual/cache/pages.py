"""Page numbers and their reference counts. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rorqual.errors import CapacityError


class PageAllocator:
    """Pages 1 to num_pages - 1; page 0 takes the writes of padded rows and is never handed out.

    A page is free again when the last of its holders (requests, the prefix cache) releases it.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise CapacityError(f"the cache needs at least 2 pages, {num_pages} fit")
        self.num_pages = num_pages
        self.free: deque[int] = deque(range(1, num_pages))
        self.holders = [0] * num_pages

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    def take(self) -> int:
        """A free page, with one holder. The caller has checked that there is one."""
        return self.take_many(1)[0]

    def take_many(self, count: int) -> list[int]:
        """So many free pages, as `take`."""
        pages = [self.free.popleft() for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        return pages

    def hold(self, page: int) -> None:
        self.hold_many((page,))

    def hold_many(self, pages: Sequence[int]) -> None:
        holders = self.holders
        for page in pages:
            assert holders[page] > 0, "a free page cannot be held"
            holders[page] += 1

    def release(self, page: int) -> None:
        self.release_many((page,))

    def release_many(self, pages: Sequence[int]) -> None:
        """In this order, as `release`."""
        holders = self.holders
        for page in pages:
            assert holders[page] > 0, "released more often than held"
            holders[page] -= 1
            if not holders[page]:
                self.free.append(page)
