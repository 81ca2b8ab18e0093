"""Groups of requests with one prefix, and attention that reads it once for each group, against the
reference. On a GPU if there is one, else in Triton's interpreter; and compiled for GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rorqual.ops import reference
from rorqual.ops.interface import AttentionMetadata, Ops
from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON, needs_triton
from tests.ops.triton.attention.test_triton_attention import GARBAGE, check, poisoned, random

if SKIP_REASON is None:
    from rorqual.ops.triton.attention import gqa_decode as gqa
    from rorqual.ops.triton.attention import shared_prefix
    from rorqual.ops.triton.attention.metadata import derived
    from rorqual.ops.triton.backend import TritonOps

pytestmark = [needs_triton, pytest.mark.exhaustive(but_first=True)]

# (name of the prefix, its pages, tokens after it) of each request; no name: nothing is shared.
# The tokens of this step are among those after it.
MIXED = [
    ("a", 3, 5),
    ("", 0, 0),
    ("b", 2, 40),
    ("a", 3, 1),
    ("", 0, 70),
    ("b", 2, 17),
    ("c", 4, 2),
    ("a", 3, 33),
    ("c", 1, 3),  # shares c's first page only: too little
    ("c", 4, 20),
]
MANY = [("a", 5, 1 + i) for i in range(11)] + [("", 0, 9), ("b", 2, 2), ("b", 2, 2)]
ALONE = [("", 0, n) for n in (5, 0, 130, 64)] + [("a", 1, 4), ("a", 1, 4)]


def batch(
    requests: list[tuple[str, int, int]], page: int, *planes: Tensor
) -> tuple[Tensor, list[int]]:
    """(tables, lengths) over shuffled pages; slots that nobody uses become NaN in `planes`."""
    lens = [pages * page + own for _, pages, own in requests]
    free = iter((1 + torch.randperm(planes[0].shape[0] - 1)).tolist())
    prefixes: dict[str, list[int]] = {}
    tables = torch.full((len(requests), max(lens) // page + 3), GARBAGE, dtype=torch.int64)
    used = torch.zeros(planes[0].shape[:2], dtype=torch.bool)
    for i, ((name, pages, _), length) in enumerate(zip(requests, lens, strict=True)):
        shared = prefixes.setdefault(name, [])
        while name and len(shared) < pages:
            shared.append(next(free))
        held = shared[:pages] if name else []
        held = held + [next(free) for _ in range(-(-length // page) - len(held))]
        tables[i, : len(held)] = torch.tensor(held)
        if not held:
            tables[i, 0] = 0
        for position in range(length):
            used[held[position // page], position % page] = True
    for plane in planes:
        if plane.is_floating_point():
            plane[~used.to(plane.device)] = float("nan")
    return tables.to(DEVICE), lens


def segment(tables: Tensor, lens: list[int], queries: int) -> AttentionMetadata:
    return AttentionMetadata(
        tables, torch.tensor(lens, device=DEVICE), (queries,) * len(lens), tuple(lens)
    )


@pytest.mark.parametrize(
    ("requests", "queries", "share", "page"),
    [(MIXED, 1, 8, 16), (MIXED, 2, 4, 32), (MANY, 1, 16, 16), (ALONE, 1, 8, 16), (MANY, 1, 5, 8)],
)
def test_requests_of_a_prefix_form_groups(
    requests: list[tuple[str, int, int]], queries: int, share: int, page: int
) -> None:
    pages = torch.zeros(90, page, 2, 16)
    requests = [(name, n, own and max(own, queries)) for name, n, own in requests]
    tables, lens = batch(requests, page, pages)
    groups = shared_prefix.find(
        tables,
        torch.tensor(lens, device=DEVICE),
        queries,
        page,
        (2 * share, 2),
        16,
        torch.float32,
        7,
        2 * page,
    )
    assert groups is not None
    most = 64 // (share * queries)
    assert groups.members == most
    count = len(requests)
    own = groups.own_lens.tolist()
    firsts = groups.first_pages.tolist()
    parts = groups.parts.tolist()
    by_name: dict[str, list[int]] = {}
    for i, (name, n, _) in enumerate(requests):
        if name and n >= 2:
            by_name.setdefault(name, []).append(i)
    shared = {i for same in by_name.values() if len(same) > 1 for i in same}
    unit = max(1, groups.block_n // page)  # of pages, so that a tile ends with one
    for i, (_, n, _) in enumerate(requests):
        assert firsts[i] == (n // unit * unit if i in shared else 0)
        assert own[i] == lens[i] - firsts[i] * page
        assert (parts[i][1] > 0) == (i in shared)
    # groups of nearly equal sizes, every request in one of them, in its place
    found: dict[int, set[int]] = {}
    starts = groups.starts.tolist()
    tile = groups.block_n
    g = 0
    while g < count and starts[g + 1] > starts[g]:
        owner = int(groups.owners[g])
        size = int(groups.counts[owner])
        held = groups.requests[owner, :size].tolist()
        assert size <= most
        assert starts[g + 1] - starts[g] == firsts[owner] * page // tile
        for place, i in enumerate(held):
            assert parts[i][2] == place
            assert firsts[i] == firsts[owner]
            assert requests[i][0] == requests[owner][0]
        found[g] = set(held)
        g += 1
    assert set().union(*found.values()) == shared
    assert sum(map(len, found.values())) == len(shared)
    assert starts[g:] == [starts[-1]] * (count + 1 - g)
    for name, same in by_name.items():
        if len(same) > 1:
            sizes = [len(held) for held in found.values() if requests[min(held)][0] == name]
            assert len(sizes) == -(-len(same) // most)
            assert max(sizes) - min(sizes) <= len(sizes)


def attended(
    requests: list[tuple[str, int, int]],
    queries: int,
    heads: tuple[int, int],
    width: int,
    page: int,
    dtype: torch.dtype,
    config: gqa.GqaDecodeConfig,
) -> None:
    requests = [(name, n, own and max(own, queries)) for name, n, own in requests]
    k, v = (random(90, page, heads[1], width, dtype=dtype) for _ in range(2))
    tables, lens = batch(requests, page, k, v)
    q = random(len(lens) * queries, heads[0], width, dtype=dtype)
    where = segment(tables, lens, queries)
    workers = gqa.gqa_workers(len(lens), max(lens), heads[1], config, q.device)
    shape = (queries, page, heads, gqa.padded(width), dtype)
    shared = shared_prefix.find(tables, where.kv_lens, *shape, workers, 2 * page)
    assert shared is not None
    assert int(shared.starts[-1]) > 0
    out = poisoned(*q.shape, dtype=dtype)
    gqa.gqa_decode(
        q, k, v, tables, where.kv_lens, 0.2, max(lens), out=out, config=config, shared=shared
    )
    check(out, Ops().attention(q, k, v, where, 0.2))


@pytest.mark.parametrize("per_sm", [1, 4])
@pytest.mark.parametrize(
    ("requests", "queries", "heads", "width", "page"),
    [
        (MIXED, 1, (16, 2), 32, 16),
        (MANY, 2, (8, 2), 24, 16),
        (MANY, 1, (20, 4), 16, 64),
        (ALONE + MANY, 1, (16, 1), 32, 32),
    ],
)
def test_attention_with_shared_prefixes(
    requests: list[tuple[str, int, int]],
    queries: int,
    heads: tuple[int, int],
    width: int,
    page: int,
    per_sm: int,
) -> None:
    config = gqa.GqaDecodeConfig(16, 4, 1, per_sm=per_sm, tma=False, finish=True)
    attended(requests, queries, heads, width, page, torch.float32, config)


@pytest.mark.parametrize("page", [64, 32])
def test_attention_in_bf16(page: int) -> None:
    """Pages of 32 are half a tile."""
    config = gqa.GqaDecodeConfig(64, 4, 3, tma=False)
    attended(MANY, 1, (32, 4), 128, page, torch.bfloat16, config)


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8], ids=str)
def test_attention_over_an_8_bit_cache(kind: torch.dtype) -> None:
    page = 64
    held = (60, page, 2, 64)
    packed = [reference.pack_heads(random(60 * page, 2, 64, dtype=torch.bfloat16), kind)] * 2
    k, v = (numbers.view(held) for numbers, _ in packed)
    scales = torch.stack([scale.view(held[:3]) for _, scale in packed], -1).contiguous()
    tables, lens = batch(MANY, page, k)
    q = random(len(lens), 8, 64, dtype=torch.bfloat16)
    where = segment(tables, lens, 1)
    dtype = torch.bfloat16
    config = gqa.GqaDecodeConfig(32, 4, 2, tma=False)
    workers = gqa.gqa_workers(len(lens), max(lens), 2, config, q.device)
    shape = (1, page, (8, 2), 64, dtype)
    shared = shared_prefix.find(tables, where.kv_lens, *shape, workers, 2 * page)
    out = poisoned(*q.shape, dtype=dtype)
    gqa.gqa_decode(
        *(q, k, v, tables, where.kv_lens, 0.2, max(lens)),
        out=out,
        config=config,
        scales=scales,
        shared=shared,
    )
    wide = [reference.unpack_heads(*each, torch.float32).view(held) for each in packed]
    check(out, Ops().attention(q.float(), *wide, where, 0.2).to(dtype))


def test_a_tile_without_room_for_two_requests_shares_nothing() -> None:
    lens = torch.tensor([200, 200], device=DEVICE)
    tables = torch.ones(2, 16, dtype=torch.int64, device=DEVICE)
    assert shared_prefix.find(tables, lens, 1, 16, (64, 1), 128, torch.float32, 8) is None


@pytest.mark.parametrize("may_share", [False, True])
def test_the_backend_shares_where_tables_may(
    may_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are found once for all layers of a step."""
    monkeypatch.setattr(shared_prefix, "FEWEST_REQUESTS", 4)
    monkeypatch.setattr(shared_prefix, "SHORTEST_PREFIX", 32)
    page = 16
    heads = (8, 2)
    layers = [[random(90, page, heads[1], 32) for _ in range(2)] for _ in range(2)]
    tables, lens = batch(MANY, page, *layers[0], *layers[1])
    where = segment(tables, lens, 1)
    where.may_share = may_share
    for k, v in layers:
        q = random(len(lens), heads[0], 32)
        check(TritonOps().attention(q, k, v, where, 0.2), Ops().attention(q, k, v, where, 0.2))
    found = list(derived(where)._prefixes.values())
    assert len(found) == may_share
    assert all(groups is not None and int(groups.starts[-1]) > 0 for groups in found)


def test_few_requests_share_nothing() -> None:
    page = 16
    k, v = (random(90, page, 2, 32) for _ in range(2))
    tables, lens = batch(MANY, page, k, v)
    where = segment(tables, lens, 1)
    where.may_share = True
    q = random(len(lens), 8, 32)
    check(TritonOps().attention(q, k, v, where, 0.2), Ops().attention(q, k, v, where, 0.2))
    assert not derived(where)._prefixes
