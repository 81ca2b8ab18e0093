"""Which rank of one engine has what a rank of another wants, and what they tell each other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.cache.page_parts import PagePart
from rorqual.cache.prefix import page_keys
from rorqual.disagg.page_sources import (
    MAX_RANKS,
    CacheShape,
    SenderLayout,
    WantedPages,
    page_sizes_differ,
    read_layout,
    wanted_pages,
)
from rorqual.disagg.rank_messages import (
    FetchOver,
    FetchPages,
    LeaseDone,
    LeaseGrown,
    LeaseOpened,
    LeaseRead,
    LeasesClosed,
    PagesFetched,
    PagesPlaced,
    ServerStarted,
    decode,
    encode,
)

HERE = ("10.0.0.1", 9)
LAYERS = 5
MODULES = 1


def layout(tp: int, pp: int, page_size: int = 8) -> SenderLayout:
    return SenderLayout(tp, pp, page_size, tuple(("10.0.0.1", 1 + i) for i in range(tp * pp)))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_sources_are_disjoint_and_together_all_that_is_wanted(heads: int) -> None:
    cache = CacheShape(LAYERS, MODULES, heads)
    sizes = list(itertools.product((1, 2, 4, 8), (1, 2, 3)))
    for (tp, pp), (their_tp, their_pp) in itertools.product(sizes, sizes):
        sender = layout(their_tp, their_pp)
        assert sender.problem(cache) == ""
        has = dict(zip(sender.addresses, sender.parts(cache), strict=True))
        for first, part in enumerate(layout(tp, pp).parts(cache)):
            cells: list[tuple[int, int]] = []
            for address, source in sender.sources(part, cache, first):
                assert has[address].covers(source)
                layers = range(source.first_layer, source.last_layer)
                cells += itertools.product(layers, range(source.first_head, source.last_head))
            wanted = itertools.product(
                range(part.first_layer, part.last_layer), range(part.first_head, part.last_head)
            )
            assert sorted(cells) == sorted(wanted)


def test_readers_ask_different_holders_of_the_same_part() -> None:
    latents = CacheShape(LAYERS, MODULES, 1)
    sender = layout(4, 1)
    whole = PagePart(0, LAYERS + MODULES, 0, 1)
    asked = [sender.sources(whole, latents, rank) for rank in range(8)]
    assert [source[0][0] for source in asked] == [*sender.addresses] * 2
    # a single reader reads a replicated page once
    assert all(len(source) == 1 for source in asked)


@given(
    st.sampled_from((1, 2, 4, 16)),
    st.sampled_from((1, 2, 4, 16)),
    st.integers(1, 200),
    st.integers(0, 3),
    st.integers(0, 250),
    st.data(),
)
def test_pages_of_other_sizes(
    own: int, theirs: int, tokens: int, lookahead: int, cached: int, data: st.DataObject
) -> None:
    """What is filled holds tokens that came, and all that could be."""
    salt, ids = "", list(range(tokens))
    keys = page_keys(ids, salt, theirs, lookahead)
    most = len(page_keys(ids, salt, own, lookahead))
    pages = wanted_pages(own, theirs, tokens, lookahead, cached)
    if pages is None:
        assert cached >= most or (cached + 1) * own > len(keys) * theirs
        return
    assert pages.last_page <= most
    assert pages.their_first * theirs <= pages.first_page * own
    assert pages.their_last <= len(keys)
    asked = pages.their_last - pages.their_first
    assert pages.filled(asked) == pages.last_page - cached
    found = data.draw(st.integers(0, asked))
    came = min((pages.their_first + found) * theirs, pages.entries)
    filled = pages.filled(found)
    ends = [min((page + 1) * own, pages.entries) for page in range(cached, pages.last_page)]
    assert filled == sum(end <= came for end in ends)
    for page in range(cached, cached + filled):
        assert pages.their_first * theirs + pages.skipped_tokens(page) == page * own


def test_page_sizes() -> None:
    assert page_sizes_differ(8, 32) == page_sizes_differ(32, 8) == page_sizes_differ(8, 8) == ""
    assert "page_size is 12 at the other engine, 8 here" in page_sizes_differ(8, 12)
    assert WantedPages(8, 32, 96, 5, 12).their_first == 1


def test_what_an_answer_says_of_an_engine() -> None:
    cache = CacheShape(LAYERS, MODULES, 2)
    assert read_layout({}, HERE, 16) == SenderLayout(1, 1, 16, (HERE,))
    params = {
        "tp_size": 2,
        "remote_page_size": 8,
        "remote_ranks": [["10.0.0.1", 1], ["10.0.0.1", 2]],
    }
    assert read_layout(params, HERE, 16) == layout(2, 1)
    for wrong, message in (
        ({"tp_size": True}, "whole numbers"),
        ({"remote_page_size": 8.0}, "whole numbers"),
        ({"remote_ranks": "10.0.0.1:3"}, "is a list"),
        ({"remote_ranks": [["10.0.0.1", 1]] * (MAX_RANKS + 1)}, "at most 1024"),
        ({"remote_ranks": [["10.0.0.1", 0]]}, "no [host, port]"),
        ({"remote_ranks": [["10.0.0.1", True]]}, "no [host, port]"),
        ({"remote_ranks": [["10.0.0.1", 1, 2]]}, "no [host, port]"),
    ):
        found = read_layout({**params, **wrong}, HERE, 16)
        assert isinstance(found, str)
        assert message in found
    for sender, message in (
        (layout(0, 1), "out of range"),
        (layout(1, 6), "at most 5 stages"),
        (layout(2, 1, 0), "out of range"),
        (SenderLayout(MAX_RANKS, 2, 8, ()), "1024 ranks"),
        (layout(3, 1), "tp_size=3 does not go with 2 key-value heads"),
        (SenderLayout(2, 2, 8, (HERE,)), "names 1 addresses; accepted: tp_size x pp_size, 4"),
    ):
        assert message in sender.problem(cache)


@pytest.mark.parametrize(
    "message",
    [
        LeaseOpened(b"\0" * 32, 1, [b"\1" * 32, b"\xff" * 32], [3, 9], True),
        LeaseGrown(b"\0" * 32, 1, [b"\2" * 32], [4], False),
        LeasesClosed([b"\2" * 32]),
        FetchPages(
            7, 1, b"\3" * 32, b"\4" * 32, [b"\5" * 32], 16, [[(HERE, PagePart(0, 3, 1, 2))], []]
        ),
        PagesPlaced(7, [4, 5], 12),
        FetchOver(7),
        ServerStarted("127.0.0.1", 90),
        LeaseRead(b"\6" * 32, 4, 4096),
        LeaseDone(b"\7" * 32),
        PagesFetched(7, 3, "why", 3072, 0.25),
    ],
    ids=lambda message: message.kind,
)
def test_messages_are_what_was_said(message: object) -> None:
    assert decode(encode(message)) == message  # type: ignore[arg-type]
