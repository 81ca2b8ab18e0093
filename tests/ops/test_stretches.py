"""Attention over a cache taken apart: what a part gives, how parts are joined, who has which."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rorqual.ops import interface, reference
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import AttentionMetadata, Ops, PartialAttention, Stretch, shares_of

HEADS = 6
GROUPS = 3
SCALE = 0.3
PAGE = 4
# scores reach 40 and more, and exp() multiplies their rounding: 40 x 2^-24 of a result, several
# times over, differently on each processor
CLOSE = 3e-5


def case(queries: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries + length)
    shapes = [(queries, HEADS, 12), (length, GROUPS, 12), (length, GROUPS, 8)]
    q, k, v = (torch.randn(shape, generator=generator) * 3 for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("edges", [[0, 20], [0, 1, 2, 19, 20], [0, 5, 10, 15, 20], [0, 13, 13, 20]])
@pytest.mark.parametrize("queries", [1, 7, 20])
def test_parts_joined_are_the_whole(queries: int, edges: list[int]) -> None:
    """In any order; queries see nothing of what comes after them, and a part may be empty."""
    q, k, v = case(queries, 20)
    for bounds in (list(pairwise(edges)), list(pairwise(edges))[::-1]):
        out = torch.zeros(queries, HEADS, 8)
        total = torch.full((queries, HEADS), -math.inf)
        for start, stop in bounds:
            given = (k[start:stop], v[start:stop], SCALE, 20 - queries - start)
            found = reference.partial_attention(q, *given)
            out, total = reference.join_attention(out, total, *found)
        torch.testing.assert_close(
            out, reference.causal_attention(q, k, v, SCALE), rtol=CLOSE, atol=CLOSE
        )
        scores = reference.masked_scores(q, k, SCALE, 20 - queries)
        torch.testing.assert_close(total, scores.logsumexp(-1).t())


def test_who_sees_nothing_gives_nothing() -> None:
    q, k, v = case(5, 10)
    out, total = reference.partial_attention(q, k, v, SCALE, -3)
    assert not out[:3].any()
    assert (total[:3] == -math.inf).all()
    torch.testing.assert_close(
        out[3:], reference.causal_attention(q[3:], k[:2], v[:2], SCALE), rtol=CLOSE, atol=CLOSE
    )
    nothing = (torch.zeros_like(out), torch.full_like(total, -math.inf))
    for one, other in ((nothing, (out, total)), ((out, total), nothing)):
        joined = reference.join_attention(*one, *other)
        assert torch.equal(joined[0], out)
        assert torch.equal(joined[1], total)


@pytest.mark.parametrize("numbers", [1, 50, 700])
@pytest.mark.parametrize("bound", [40, 45])
def test_blocks_of_heads_and_queries(
    monkeypatch: pytest.MonkeyPatch,
    numbers: int,
    bound: int,
) -> None:
    """The bound a host knows may be beyond the length that the device knows."""
    monkeypatch.setattr(interface, "SCORES", numbers)
    q, k, v = case(11, 40)
    tables = torch.arange(12)[None]
    segment = AttentionMetadata(tables, torch.tensor([40]), (11,), (bound,), exact=bound == 40)
    (share,) = shares_of(segment, 8, PAGE)
    found = PartialAttention.over_no_keys(q, 8)
    begin = 0
    for stretch in share.segments:
        assert isinstance(stretch, Stretch)
        own = slice(begin, begin + 8)
        Ops().stretch_attention(q, k[own], v[own], stretch, SCALE, found)
        begin += 8
    torch.testing.assert_close(
        found.out, reference.causal_attention(q, k, v, SCALE), rtol=CLOSE, atol=CLOSE
    )


def shared(lens: tuple[int, ...], queries: tuple[int, ...], tokens: int) -> list:
    """(queries, bounds of the segments) of each share. What is on the device has no values here, so
    that whoever asked for one would fail."""
    tables = torch.empty(len(lens), 30, dtype=torch.int64, device="meta")
    held = torch.empty(len(lens), dtype=torch.int64, device="meta")
    found = shares_of(AttentionMetadata(tables, held, queries, lens), tokens, PAGE)
    for share in found:
        assert sum(sum(segment.max_kv_lens) for segment in share.segments) > 0
        assert all(sum(segment.max_kv_lens) <= tokens for segment in share.segments)
    return [(share.queries, [segment.max_kv_lens for segment in share.segments]) for share in found]


def test_requests_that_fit_stay_together_and_longer_ones_are_cut() -> None:
    assert shared((3, 9, 8), (3, 2, 1), 20) == [(slice(None), [(3, 9, 8)])]
    assert shared((3, 9, 9), (3, 2, 1), 20) == [(slice(0, 5), [(3, 9)]), (slice(5, 6), [(9,)])]
    assert shared((3, 45, 20, 1), (3, 2, 1, 1), 20) == [
        (slice(0, 3), [(3,)]),
        (slice(3, 5), [(20,), (20,), (5,)]),
        (slice(5, 6), [(20,)]),
        (slice(6, 7), [(1,)]),
    ]


def test_a_segment_that_fits_is_its_own_share() -> None:
    segment = AttentionMetadata(torch.zeros(2, 3), torch.tensor([5, 6]), (1, 1), (5, 6))
    assert shares_of(segment, 12, PAGE)[0].segments[0] is segment


@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["reference", "cpu"])
@pytest.mark.parametrize("exact", [True, False])
def test_stretches_gather_their_own_entries(ops: Ops, exact: bool) -> None:
    """Of two requests, from scattered pages; the last stretch ends where the request does, and one
    beyond its end is empty."""
    lens = torch.tensor([11, 18])
    bounds = (11, 18) if exact else (14, 23)
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(2, 6)
    plane = torch.randn(12, PAGE, 3)
    gathered = []
    for share in shares_of(AttentionMetadata(tables, lens, (2, 3), bounds, exact), 8, PAGE):
        for stretch in share.segments:
            gathered.append(ops.latent_entries(plane, stretch, 2, torch.float32))
    wanted = [reference.read_cache(plane, *request) for request in zip(tables, lens, strict=True)]
    assert torch.equal(torch.cat(gathered), torch.cat(wanted))
