"""Pages of prompts in and out of an engine's prefix cache, for whoever moves them between
engines. On the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rorqual.cache.prefix import PrefixCache, next_key, root_key
from rorqual.engine.engine import Engine


class CachedPages:
    def __init__(self, engine: Engine):
        assert engine.config.parallel.is_single, "each rank has a cache of its own"
        self.engine = engine

    @property
    def prefix(self) -> PrefixCache:
        """The one in force: an error in the midst of a step begins a new one."""
        return self.engine.scheduler.schedulers[0].prefix

    def missing(self, tokens: Sequence[int], salt: str) -> tuple[int, list[bytes]]:
        """How many pages of a prompt are cached, and the keys of those behind them that a request
        for it could take from a cache."""
        with self.engine.changing():
            prefix = self.prefix
            pages, key = prefix.match(tokens, salt)
            prefix.release(pages)
        keys: list[bytes] = []
        while (found := prefix.following(tokens, len(pages) + len(keys), key)) is not None:
            keys.append(found)
            key = found
        tail = prefix.tail(tokens, key)
        if tail is not None and not prefix.is_free_tail(tail):
            keys.append(tail)
        return len(pages), keys

    def hold(
        self, tokens: Sequence[int], salt: str, following: Sequence[int] = ()
    ) -> dict[bytes, int]:
        """The cached pages of a prompt by key, held for the caller, the last one too, which need
        not be full. following: the tokens after it, as far as they are known."""
        with self.engine.changing():
            prefix = self.prefix
            pages, _ = prefix.match(tokens, salt)
            found = {}
            key = root_key(salt)
            for place, page in enumerate(pages):
                key = next_key(key, prefix.covered(tokens, place))
                found[key] = page
            tail = prefix.tail(tokens, key)
            if tail is not None and len(pages) == prefix.full_pages(len(tokens)):
                # a prompt that ends with a page has it as a full one
                full = next_key(key, prefix.covered([*tokens, *following], len(pages)))
                last = prefix.pages.get(tail, prefix.pages.get(full))
                if last is not None:
                    prefix.hold(last)
                    found[tail] = last
        return found

    def keep(
        self,
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
            prefix = self.prefix
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
