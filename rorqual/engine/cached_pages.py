"""Pages of prompts in and out of an engine's prefix caches, for whoever moves them between
engines. On the engine's thread. Each data-parallel rank has a cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rorqual.cache.prefix import PrefixCache, chain_keys, next_key, root_key
from rorqual.engine.engine import Engine


@dataclass(frozen=True)
class KeptPages:
    """A prompt's full pages from its first on, without a gap: `count` of them are on the device or
    in host memory, and the last has `key`. Those on the device are `held` for the caller."""

    held: list[int]
    count: int
    key: bytes


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
        """How many pages of a prompt are here, on the device or in host memory, from which the
        scheduler brings them when the request is queued; the last one, which is not full, counts
        where all are and a request could take it. Those in host memory are now the newest there."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            kept = self._kept(prefix, tokens, salt)
            prefix.release(kept.held)
        full = kept.count == prefix.full_pages(len(tokens))
        return kept.count + (full and prefix.is_free_tail(prefix.tail(tokens, kept.key)))

    def _kept(self, prefix: PrefixCache, tokens: Sequence[int], salt: str) -> KeptPages:
        held: list[int] = []
        in_host: list[bytes] = []
        slots = prefix.host.slots if prefix.host is not None else {}
        key = root_key(salt)
        count = 0
        while (found := prefix.following(tokens, count, key)) is not None:
            page = prefix.pages.get(found)
            if page is not None:
                prefix.hold(page)
                held.append(page)
            elif found in slots:
                in_host.append(found)
            else:
                break
            key = found
            count += 1
        if prefix.host is not None:
            for one in reversed(in_host):  # a chain is pushed out from its end
                prefix.host.slots.move_to_end(one)
        return KeptPages(held, count, key)

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
        with self.engine.changing():
            return hold_next(self.prefix(dp_rank), keys)

    def keep(
        self,
        dp_rank: int,
        tokens: Sequence[int],
        salt: str,
        first: int,
        count: int,
        write: Callable[[list[int], int], None],
        reserved: Sequence[int] = (),
    ) -> int:
        """Take in `count` pages of a prompt from its page number `first` on: `write(pages, i)`
        fills them with what belongs to those from the i-th on; or they are in the first `count` of
        the `reserved` ones already, and `write` is not called. Returns how many are here now; fewer
        where pages before them have gone, or there is no room.

        Pages before them may be in host memory: what is taken in then waits on the device for the
        scheduler to bring these."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            kept = self._kept(prefix, tokens, salt)
            before, key = kept.count, kept.key
            skipped = before - first
            taken: list[int] = []
            if 0 <= skipped < count:
                if reserved:
                    taken = list(reserved[skipped:count])
                    for page in taken:
                        prefix.hold(page)
                else:
                    room = min(count - skipped, prefix.available)
                    taken = [prefix.take() for _ in range(room)]
                    if taken:
                        write(taken, skipped)
                full = prefix.full_pages(len(tokens))
                for place, page in enumerate(taken, before):
                    if place < full:
                        key = prefix.insert(key, prefix.covered(tokens, place), page)
                    elif (tail := prefix.tail(tokens, key)) is not None:
                        prefix.insert_tail(tail, page)
            prefix.release(kept.held + taken)
            return max(0, min(count, skipped + len(taken)))

    def reserve(self, dp_rank: int, count: int) -> list[int]:
        """So many pages, held for the caller, who alone writes to them; none where so many are not
        to be had, or what was in them may be copied to host memory yet."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            if prefix.host is not None or prefix.available < count:
                return []
            return [prefix.take() for _ in range(count)]

    def unreserve(self, prefix: PrefixCache, pages: Sequence[int]) -> None:
        """Those of a cache that is in force no more are nobody's."""
        with self.engine.changing():
            if any(prefix is one for one in self.prefixes):
                prefix.release(pages)


def hold_next(prefix: PrefixCache, keys: Sequence[bytes]) -> dict[bytes, int]:
    """See CachedPages; for who is in the midst of a change of the engine."""
    found: dict[bytes, int] = {}
    for key in keys:
        page = prefix.pages.get(key)
        if page is None:
            break
        prefix.hold(page)
        found[key] = page
    return found
