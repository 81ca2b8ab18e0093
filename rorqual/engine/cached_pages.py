"""Pages of prompts in and out of an engine's prefix caches, for whoever moves them between
engines. On the engine's thread. Each data-parallel rank has a cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rorqual.cache.prefix import PrefixCache, chain_keys, next_key, root_key
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
        """How many pages of a prompt are cached; the last one, which is not full, counts where all
        are and a request could take it."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            pages, key = prefix.match(tokens, salt)
            prefix.release(pages)
        full = len(pages) == prefix.full_pages(len(tokens))
        return len(pages) + (full and prefix.is_free_tail(prefix.tail(tokens, key)))

    def hold(
        self, tokens: Sequence[int], salt: str, following: Sequence[int] = ()
    ) -> tuple[int, dict[bytes, int]]:
        """The data-parallel rank that has most of a prompt's pages, and these by key, held for the
        caller; the last one too, which need not be full. following: the tokens after the prompt, as
        far as they are known."""
        counts = [self.count(rank, tokens, salt) for rank in range(len(self.prefixes))]
        dp_rank = counts.index(max(counts))
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            pages, _ = prefix.match(tokens, salt)
        keys = chain_keys(tokens, salt, prefix.page_size, prefix.lookahead, len(pages))
        found = dict(zip(keys, pages, strict=True))
        if len(pages) == prefix.full_pages(len(tokens)):
            found.update(self.hold_tail(dp_rank, tokens, salt, keys, following))
        return dp_rank, found

    def hold_tail(
        self,
        dp_rank: int,
        tokens: Sequence[int],
        salt: str,
        keys: Sequence[bytes],
        following: Sequence[int],
    ) -> dict[bytes, int]:
        """What is cached of a prompt behind its full pages, by key, held for the caller. keys: of
        the full pages."""
        key = keys[-1] if keys else root_key(salt)
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            tail = prefix.tail(tokens, key)
            if tail is None:
                return {}
            # a prompt that ends with a page has it as a full one
            full = next_key(key, prefix.covered([*tokens, *following], len(keys)))
            last = prefix.pages.get(tail, prefix.pages.get(full))
            if last is None:
                return {}
            prefix.hold(last)
            return {tail: last}

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
                full = prefix.full_pages(len(tokens))
                for place, page in enumerate(taken, len(before)):
                    if place < full:
                        key = prefix.insert(key, prefix.covered(tokens, place), page)
                    elif (tail := prefix.tail(tokens, key)) is not None:
                        prefix.insert_tail(tail, page)
            prefix.release(before + taken)
            return max(0, min(count, skipped + len(taken)))
