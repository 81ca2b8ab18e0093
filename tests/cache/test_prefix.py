"""Pages and the prefix cache: who holds what, what is found again, what is evicted first."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rorqual.cache.pages import PageAllocator
from rorqual.cache.prefix import PrefixCache, next_key, root_key
from rorqual.errors import CapacityError
from tests.cache.counted_keys import counted_keys


def make(num_pages: int = 9, page_size: int = 4, enabled: bool = True) -> PrefixCache:
    return PrefixCache(PageAllocator(num_pages), page_size, enabled)


def fill(cache: PrefixCache, tokens: list[int], salt: str = "") -> list[int]:
    """What a request does: match, take pages for the rest, offer every full page. Returns its
    pages, still held."""
    size = cache.page_size
    pages, key = cache.match(tokens, salt)
    for i in range(len(pages), -(-len(tokens) // size)):
        pages.append(cache.take())
        if (i + 1) * size <= len(tokens):
            key = cache.insert(key, tokens[i * size : (i + 1) * size], pages[i])
    return pages


# ---- the allocator


def test_every_page_but_the_null_page_is_handed_out_once() -> None:
    allocator = PageAllocator(9)
    assert sorted(allocator.take() for _ in range(allocator.capacity)) == list(range(1, 9))
    assert not allocator.free


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    allocator = PageAllocator(3)
    page = allocator.take()
    allocator.hold(page)
    allocator.release(page)
    assert page not in allocator.free
    allocator.release(page)
    assert page in allocator.free
    with pytest.raises(AssertionError):
        allocator.release(page)
    with pytest.raises(AssertionError):
        allocator.hold(page)


@pytest.mark.parametrize("pages", [0, 1])
def test_a_cache_without_a_usable_page_is_refused(pages: int) -> None:
    with pytest.raises(CapacityError, match=str(pages)):
        PageAllocator(pages)


# ---- keys


def test_keys_cover_everything_before_the_page_and_the_salt() -> None:
    seen = {
        next_key(root_key(), [1, 2]),
        next_key(root_key(), [2, 1]),
        next_key(root_key(), [1, 2, 0]),
        next_key(root_key("a"), [1, 2]),
        next_key(next_key(root_key(), [1, 2]), [1, 2]),
        next_key(next_key(root_key(), [3, 4]), [1, 2]),
        next_key(root_key(), [1 << 32, 2]),
        next_key(root_key(), [513]),
    }
    assert len(seen) == 8
    assert all(len(key) == 32 for key in seen)
    assert next_key(root_key("a"), [1, 2]) == next_key(root_key("a"), (1, 2))


# ---- finding


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_a_match_leaves_a_token_to_compute(length: int, found: int) -> None:
    cache = make()
    tokens = list(range(12))
    pages = fill(cache, tokens)
    cache.release(pages)
    hit, key = cache.match(tokens[:length])
    assert hit == pages[:found]
    chain = root_key()
    for i in range(found):
        chain = next_key(chain, tokens[i * 4 : i * 4 + 4])
    assert key == chain


def test_a_match_ends_at_the_first_difference() -> None:
    cache = make()
    pages = fill(cache, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    cache.release(pages)
    assert cache.match([1, 1, 1, 1, 9, 2, 2, 2, 3, 3, 3, 3, 4])[0] == pages[:1]
    assert cache.match([9, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4])[0] == []


def test_known_keys_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make()
    tokens = list(range(14))
    pages = fill(cache, tokens)
    cache.release(pages)
    computed = counted_keys(monkeypatch)
    known: list[bytes] = []
    assert cache.match(tokens[:6], "", known)[0] == pages[:1]
    assert len(known) == len(computed) == 1
    tokens += range(6)  # a sequence grows
    found, key = cache.match(tokens, "", known)
    assert found == pages[:3]
    assert len(known) == len(computed) == 4, "the first page that is missing as well"
    assert cache.match(tokens, "", known) == (found, key)
    assert cache.keys_of(tokens, "", known)[3] == known[3]
    assert len(computed) == 4
    assert cache.match(tokens) == (found, key)
    page = cache.take()
    assert cache.insert(key, tokens[12:16], page, known[3]) == next_key(key, tokens[12:16])
    assert cache.match(tokens, "", known)[0] == [*pages[:3], page]


def test_salts_keep_tenants_apart() -> None:
    cache = make()
    ours = fill(cache, list(range(9)), "ours")
    assert cache.match(list(range(9)), "theirs")[0] == []
    assert cache.match(list(range(9)))[0] == []
    assert cache.match(list(range(9)), "ours")[0] == ours[:2]


def test_equal_pages_are_kept_once() -> None:
    """Two requests computed the same prompt side by side; the second's pages are freed when it
    ends, the first's are kept."""
    cache = make()
    tokens = list(range(8))
    one = [cache.take(), cache.take()]
    two = [cache.take(), cache.take()]
    for pages in (one, two):
        key = cache.insert(root_key(), tokens[:4], pages[0])
        assert cache.insert(key, tokens[4:], pages[1]) == next_key(
            next_key(root_key(), tokens[:4]), tokens[4:]
        )
    cache.release(two)
    assert set(two) <= set(cache.allocator.free)
    cache.release(one)
    assert set(cache.idle) == set(one)
    assert cache.match([*tokens, 1])[0] == one


def test_disabled_finds_and_keeps_nothing() -> None:
    cache = make(enabled=False)
    pages = fill(cache, list(range(9)))
    assert cache.match(list(range(9)))[0] == []
    cache.release(pages)
    assert len(cache.allocator.free) == cache.allocator.capacity
    assert cache.clear() == 0


# ---- evicting


def test_least_recently_used_goes_first_and_chains_shrink_from_their_end() -> None:
    cache = make(num_pages=7)
    first = fill(cache, [1] * 12)
    second = fill(cache, [2] * 12)
    cache.release(first)
    cache.release(second)
    again, _ = cache.match([1] * 9)
    cache.release(again)  # the first two pages of `first` are now the most recent
    order = [cache.take() for _ in range(6)]
    assert order == [first[2], second[2], second[1], second[0], first[1], first[0]]
    assert not cache.pages
    assert not cache.keys


def test_a_page_somebody_reads_is_never_evicted() -> None:
    cache = make(num_pages=5)
    pages = fill(cache, [1] * 16)
    cache.release(pages)
    shared, _ = cache.match([1] * 9)
    assert cache.available == 2
    assert {cache.take(), cache.take()} == set(pages[2:])
    assert cache.available == 0
    with pytest.raises(KeyError):
        cache.take()
    assert cache.match([1] * 9)[0] == shared


def test_an_evicted_page_is_found_no_more() -> None:
    cache = make(num_pages=3)
    cache.release(fill(cache, [1] * 8))
    cache.take()
    assert len(cache.match([1] * 9)[0]) == 1


def test_clear_drops_what_nobody_uses_and_counts_it() -> None:
    cache = make()
    kept = fill(cache, [1] * 5)
    cache.release(fill(cache, [2] * 12))
    assert cache.clear() == 3
    assert cache.match([1] * 5)[0] == kept[:1]
    assert cache.match([2] * 12)[0] == []


# ---- any history


class Histories(RuleBasedStateMachine):
    """Requests come and go over a small cache; a plain model knows which prefixes were computed
    and what each page must hold."""

    @initialize(num_pages=st.integers(8, 24), page_size=st.sampled_from([1, 2, 3]))
    def start(self, num_pages: int, page_size: int) -> None:
        self.cache = make(num_pages, page_size)
        self.live: list[list[int]] = []
        # page: salt and all tokens up to its end
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), salt=st.sampled_from(["", "s"])
    )
    def begin(self, tokens: list[int], salt: str) -> None:
        cache = self.cache
        size = self.cache.page_size
        known = set(self.content.values())
        pages, key = cache.match(tokens, salt)
        for i, page in enumerate(pages):
            assert self.content[page] == (salt, tuple(tokens[: (i + 1) * size]))
        longer = (salt, tuple(tokens[: (len(pages) + 1) * size]))
        kept = {self.content[page] for page in cache.keys}
        assert longer not in kept or (len(pages) + 1) * size >= len(tokens), (
            "a longer prefix was there"
        )
        assert kept <= known
        need = -(-len(tokens) // size) - len(pages)
        if need > cache.available:
            cache.release(pages)
            return
        for i in range(len(pages), len(pages) + need):
            page = cache.take()
            assert all(page not in other for other in self.live)
            pages.append(page)
            self.content[page] = (salt, tuple(tokens[: (i + 1) * size]))
            if (i + 1) * size <= len(tokens):
                key = cache.insert(key, tokens[i * size : (i + 1) * size], page)
        self.live.append(pages)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.cache.release(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def holders_are_requests_and_the_cache(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        held = [0] * cache.allocator.num_pages
        for pages in self.live:
            for page in pages:
                held[page] += 1
        idle = {page for page in cache.keys if not held[page]}
        for page in cache.keys:
            held[page] += 1
        assert cache.allocator.holders == held
        assert set(cache.idle) == idle
        assert len(cache.allocator.free) == len(set(cache.allocator.free)) == held[1:].count(0)
        assert cache.available == held[1:].count(0) + len(idle)
        assert len(cache.pages) == len(cache.keys)

    @invariant()
    def every_kept_page_can_be_reached(self) -> None:
        """A chain is evicted from its end: the pages before a kept page are kept too, so nothing
        kept is lost to all."""
        if not hasattr(self, "cache"):
            return
        size = self.cache.page_size
        kept = {self.content[page] for page in self.cache.keys}
        for salt, tokens in kept:
            assert len(tokens) == size or (salt, tokens[:-size]) in kept

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for pages in self.live:
                self.cache.release(pages)
            self.cache.clear()
            assert len(self.cache.allocator.free) == self.cache.allocator.capacity


Histories.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestHistories = Histories.TestCase


def test_many_random_requests_end_with_everything_free() -> None:
    rng = random.Random(0)
    cache = make(num_pages=64, page_size=4)
    live: list[list[int]] = []
    for _ in range(3000):
        if live and (cache.available < 12 or rng.random() < 0.4):
            cache.release(live.pop(rng.randrange(len(live))))
        else:
            live.append(fill(cache, [rng.randrange(2) for _ in range(rng.randint(1, 40))]))
    for pages in live:
        cache.release(pages)
    assert len(cache.allocator.free) + len(cache.idle) == cache.allocator.capacity
    cache.clear()
    assert len(cache.allocator.free) == cache.allocator.capacity
    assert not any(cache.allocator.holders)
