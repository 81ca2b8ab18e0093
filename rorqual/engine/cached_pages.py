"""Whole pages of prompts in and out of an engine's prefix caches, for whoever moves them between
engines. On the engine's thread. Each data-parallel rank has a cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rorqual.cache.prefix import PrefixCache, chain_keys
from rorqual.engine.engine import Engine


class CachedPages:
    def __init__(self, engine: Engine):
        self.engine = engine

    def prefix(self, dp_rank: int) -> PrefixCache:
        """The one in force: an error in the midst of a step begins a new one."""
        return self.engine.scheduler.schedulers[dp_rank].prefix

    @property
    def prefixes(self) -> list[PrefixCache]:
        return [scheduler.prefix for scheduler in self.engine.scheduler.schedulers]

    def count(self, dp_rank: int, tokens: Sequence[int], salt: str) -> int:
        """How many pages of a prompt are cached."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            pages, _ = prefix.match(tokens, salt)
            prefix.release(pages)
        return len(pages)

    def hold(self, tokens: Sequence[int], salt: str) -> tuple[int, dict[bytes, int]]:
        """The data-parallel rank that has most of a prompt's pages, and these by key, held for the
        caller."""
        counts = [self.count(rank, tokens, salt) for rank in range(len(self.prefixes))]
        dp_rank = counts.index(max(counts))
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            pages, _ = prefix.match(tokens, salt)
        keys = chain_keys(tokens, salt, prefix.page_size, prefix.lookahead, len(pages))
        return dp_rank, dict(zip(keys, pages, strict=True))

    def hold_next(self, dp_rank: int, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Those of the pages with these keys, in order, that are cached up to the first which is
        not; held for the caller."""
        found: dict[bytes, int] = {}
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            for key in keys:
                page = prefix.pages.get(key)
                if page is None:
                    break
                prefix.hold(page)
                found[key] = page
        return found

    def keep(
        self,
        dp_rank: int,
        tokens: Sequence[int],
        salt: str,
        first: int,
        count: int,
        write: Callable[[list[int], int], None],
    ) -> int:
        """Take in `count` pages of a prompt from its page number `first` on: `write(pages, i)`
        fills them with what belongs to those from the i-th on. Returns how many are cached now;
        fewer where pages before them have gone, or there is no room."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            before, key = prefix.match(tokens, salt)
            skipped = len(before) - first
            taken: list[int] = []
            if 0 <= skipped < count:
                room = min(count - skipped, prefix.available)
                taken = [prefix.take() for _ in range(room)]
                if taken:
                    write(taken, skipped)
                for place, page in enumerate(taken, len(before)):
                    key = prefix.insert(key, prefix.covered(tokens, place), page)
            prefix.release(before + taken)
            return max(0, min(count, skipped + len(taken)))
