"""Reads and inserts prompt pages in an engine's prefix caches, for transfers between engines. On
the engine's thread. Each data-parallel rank has its own cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rorqual.cache.prefix import PrefixCache, next_key, root_key
from rorqual.engine.engine import Engine


@dataclass(frozen=True)
class KeptPages:
    """A prompt's cached full pages, from the first on without a gap: `count` of them on the device
    or in host memory, the last with key `key`. Those on the device are `held` for the caller."""

    held: list[int]
    count: int
    key: bytes


class CachedPages:
    def __init__(self, engine: Engine):
        self.engine = engine
        for prefix in self.prefixes:
            prefix.read_by_peers = True

    def prefix(self, dp_rank: int) -> PrefixCache:
        """The current one: an error during a step replaces it."""
        return self.engine.scheduler.schedulers[dp_rank].prefix

    @property
    def prefixes(self) -> list[PrefixCache]:
        return [scheduler.prefix for scheduler in self.engine.scheduler.schedulers]

    def count(
        self, dp_rank: int, tokens: Sequence[int], salt: str, known: list[bytes] | None = None
    ) -> int:
        """How many pages of a prompt are cached, on the device or in host memory, from which the
        scheduler loads them once the request is queued. The last, partial page counts where all
        others are cached and a request could use it. Marks those in host memory as most recently
        used. known: see PrefixCache.keys_of."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            kept = self._kept(prefix, tokens, salt, known)
            prefix.release(kept.held)
        full = kept.count == prefix.full_pages(len(tokens))
        return kept.count + (full and prefix.is_free_tail(prefix.tail(tokens, kept.key)))

    def _kept(
        self, prefix: PrefixCache, tokens: Sequence[int], salt: str, known: list[bytes] | None
    ) -> KeptPages:
        held: list[int] = []
        in_host: list[bytes] = []
        slots = prefix.host.slots if prefix.host is not None else {}
        key = root_key(salt)
        count = 0
        for found in prefix.keys_of(tokens, salt, known):
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
            for one in reversed(in_host):  # a chain is evicted from its end
                prefix.host.slots.move_to_end(one)
        return KeptPages(held, count, key)

    def hold(
        self, tokens: Sequence[int], salt: str, following: Sequence[int] = ()
    ) -> tuple[int, dict[bytes, int]]:
        """The data-parallel rank that has most of a prompt's pages, and these pages by key, held
        for the caller; includes a partial last page. following: the known tokens after the
        prompt."""
        known: list[bytes] = []  # the ranks' caches differ in their pages, not in their keys
        counts = [self.count(rank, tokens, salt, known) for rank in range(len(self.prefixes))]
        dp_rank = counts.index(max(counts))
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            pages, _ = prefix.match(tokens, salt, known)
        keys = known[: len(pages)]
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
        """The cached partial page after a prompt's full pages, by key, held for the caller. keys:
        of the full pages."""
        key = keys[-1] if keys else root_key(salt)
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            tail = prefix.tail(tokens, key)
            if tail is None:
                return {}
            # a prompt that ends at a page boundary has no partial page
            full = next_key(key, prefix.covered([*tokens, *following], len(keys)))
            last = prefix.pages.get(tail, prefix.pages.get(full))
            if last is None:
                return {}
            prefix.hold(last)
            return {tail: last}

    def hold_next(self, dp_rank: int, keys: Sequence[bytes]) -> dict[bytes, int]:
        """The pages with these keys, in order, up to the first that is not cached; held for the
        caller."""
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
        """Insert `count` pages of a prompt, from its page number `first` on. `write(pages, i)`
        fills `pages` with the contents from the i-th on; with `reserved` pages the first `count` of
        these hold the contents already, and `write` is not called. Returns how many are now cached:
        fewer where the pages before them were evicted or no page is free.

        Where the pages before them are in host memory, the inserted ones stay on the device until
        the scheduler has loaded those."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            keys: list[bytes] = []
            kept = self._kept(prefix, tokens, salt, keys)
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
                    taken = prefix.take_many(room)
                    if taken:
                        write(taken, skipped)
                for place, page in enumerate(taken, before):
                    if place < len(keys):
                        covered = prefix.covered(tokens, place)
                        key = prefix.insert(key, covered, page, keys[place])
                    elif (tail := prefix.tail(tokens, key)) is not None:
                        prefix.insert_tail(tail, page)
            prefix.release(kept.held + taken)
            return max(0, min(count, skipped + len(taken)))

    def reserve(self, dp_rank: int, count: int) -> list[int]:
        """`count` pages, held for the caller, who alone writes to them; none where not enough are
        free, or a copy of their old contents to host memory may still be running."""
        with self.engine.changing():
            prefix = self.prefix(dp_rank)
            if prefix.host is not None or prefix.available < count:
                return []
            return prefix.take_many(count)

    def unreserve(self, prefix: PrefixCache, pages: Sequence[int]) -> None:
        """Pages of a cache that was replaced need no release."""
        with self.engine.changing():
            if any(prefix is one for one in self.prefixes):
                prefix.release(pages)


def hold_next(prefix: PrefixCache, keys: Sequence[bytes]) -> dict[bytes, int]:
    """See CachedPages; for callers inside `Engine.changing`."""
    found: dict[bytes, int] = {}
    for key in keys:
        page = prefix.pages.get(key)
        if page is None:
            break
        prefix.hold(page)
        found[key] = page
    return found
