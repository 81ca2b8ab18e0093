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
    from rorqual.ops.triton.attention import prefix_groups
    from rorqual.ops.triton.attention.metadata import derived
    from rorqual.ops.triton.backend import TritonOps

pytestmark = [needs_triton, pytest.mark.exhaustive(but_first=True)]

# (name of the prefix, its pages, tokens after it) of each request; no name: nothing is shared; a
# name x/y: its first two pages are those of x, which must come before.
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
# two documents and a request of its own behind one prefix of two pages; pages count all of them
NESTED = [
    ("s", 2, 30),
    *[("s/d", 6, 3 + i) for i in range(5)],
    *[("s/e", 5, 2 + i) for i in range(3)],
    ("s", 2, 4),
    ("s/f", 4, 40),
]
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
        stem = name.rpartition("/")[0]
        shared = prefixes.setdefault(name, list(prefixes.get(stem, [])[:2]))
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


def in_common(
    tables: Tensor, lens: list[int], one: int, other: int, queries: int, page: int
) -> int:
    """Pages at the beginning of both that were complete before the step."""
    most = max(0, (min(lens[one], lens[other]) - queries) // page)
    equal = (tables[one, :most] == tables[other, :most]).tolist()
    return equal.index(False) if False in equal else most


@pytest.mark.parametrize(
    ("requests", "queries", "share", "page"),
    [
        (MIXED, 1, 8, 16),
        (MIXED, 2, 4, 32),
        (MANY, 1, 16, 16),
        (MANY, 1, 5, 8),
        (NESTED, 1, 8, 16),
        (NESTED, 1, 32, 16),
        (ALONE, 1, 8, 16),
    ],
)
def test_requests_of_a_prefix_form_groups(
    requests: list[tuple[str, int, int]], queries: int, share: int, page: int
) -> None:
    """Each is with those with which it has most in common."""
    pages = torch.zeros(120, page, 2, 16)
    requests = [(name, n, own and max(own, queries)) for name, n, own in requests]
    tables, lens = batch(requests, page, pages)
    kv_lens = torch.tensor(lens, device=DEVICE)
    heads = (2 * share, 2)
    groups = prefix_groups.find(
        tables, kv_lens, queries, page, heads, 16, torch.float32, 7, 2 * page
    )
    assert groups is not None
    most = 64 // (share * queries)
    assert groups.members == most
    count = len(requests)
    unit = max(1, groups.block_n // page)  # of pages, so that a tile ends with one
    depths = []
    for i in range(count):
        others = (in_common(tables, lens, i, j, queries, page) for j in range(count) if j != i)
        depth = max(others) // unit * unit
        depths.append(depth if depth >= 2 else 0)
    same: dict[tuple[int, ...], set[int]] = {}
    for i, depth in enumerate(depths):
        if depth:
            same.setdefault(tuple(tables[i, :depth].tolist()), set()).add(i)
    same = {key: held for key, held in same.items() if len(held) > 1}
    shared = set().union(*same.values())
    assert bool(shared) == (requests[0] != ALONE[0])
    own = groups.own_lens.tolist()
    firsts = groups.first_pages.tolist()
    parts = groups.parts.tolist()
    for i, depth in enumerate(depths):
        assert firsts[i] == (depth if i in shared else 0)
        assert own[i] == lens[i] - firsts[i] * page
        assert (parts[i][1] > 0) == (i in shared)
    # groups of nearly equal sizes, every request in one of them, in its place
    found: list[set[int]] = []
    starts = groups.starts.tolist()
    for g in range(count):
        if starts[g + 1] == starts[g]:
            break
        owner = int(groups.owners[g])
        size = int(groups.counts[owner])
        held = groups.requests[owner, :size].tolist()
        assert size <= most
        assert starts[g + 1] - starts[g] == firsts[owner] * page // groups.block_n
        assert [parts[i][2] for i in held] == list(range(size))
        found.append(set(held))
    assert starts[len(found) :] == [starts[-1]] * (count + 1 - len(found))
    assert sum(map(len, found)) == len(shared)
    for held in same.values():
        sizes = [len(group) for group in found if group <= held]
        assert sum(sizes) == len(held)
        assert len(sizes) == -(-len(held) // most)
        assert max(sizes) - min(sizes) <= len(sizes)
    # workers are shared out by what they read, and a request that begins counts as some tokens
    prefixes = int(groups.starts[-1]) * groups.block_n
    weight = sum(n + prefix_groups.REQUEST_COST.value for n in own if n)
    wanted = max(1, int(7 * prefixes / (prefixes + weight) + 0.5))
    assert 7 - int(groups.own_workers) == min(wanted, -(-starts[-1] // 4))
    slots = 7 + len(found) - 1  # as many as a staircase of workers and groups has steps
    assert groups.partial.shape[0] >= slots


@pytest.mark.parametrize(("workers", "for_prefixes"), [(2, 1), (5, 4), (40, 20)])
def test_workers_of_prefixes(workers: int, for_prefixes: int) -> None:
    """One is left for what follows; and prefixes of 80 tiles are parts of four at least."""
    page = 16
    tables = torch.tensor([[*range(1, 81), 90 + i] for i in range(4)], device=DEVICE)
    lens = torch.tensor([80 * page + 1] * 4, device=DEVICE)
    shape = (1, page, (8, 1), 16, torch.float32)
    groups = prefix_groups.find(tables, lens, *shape, workers, 2 * page)
    assert groups is not None
    assert groups.starts.tolist() == [0, 80, 80, 80, 80]
    assert workers - int(groups.own_workers) == for_prefixes


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
    k, v = (random(120, page, heads[1], width, dtype=dtype) for _ in range(2))
    tables, lens = batch(requests, page, k, v)
    q = random(len(lens) * queries, heads[0], width, dtype=dtype)
    where = segment(tables, lens, queries)
    workers = gqa.gqa_workers(len(lens), max(lens), heads[1], config, q.device)
    shape = (queries, page, heads, gqa.padded(width), dtype)
    shared = prefix_groups.find(tables, where.kv_lens, *shape, workers, 2 * page)
    assert shared is not None
    assert int(shared.starts[-1]) > 0
    out = poisoned(*q.shape, dtype=dtype)
    gqa.gqa_decode(
        q, k, v, tables, where.kv_lens, 0.2, max(lens), out=out, config=config, shared=shared
    )
    check(out, Ops().attention(q, k, v, where, 0.2))


@pytest.mark.parametrize(
    ("requests", "queries", "heads", "width", "page", "per_sm"),
    [
        (MIXED, 1, (16, 2), 32, 16, 1),
        (MANY, 2, (8, 2), 24, 16, 4),
        (MANY, 1, (20, 4), 16, 64, 1),
        (ALONE + MANY, 1, (16, 1), 32, 32, 4),
        (NESTED, 1, (16, 2), 32, 16, 1),
        # enough rows for programs that merge two and four of them
        (MANY, 1, (64, 8), 16, 16, 1),
        (MANY, 1, (80, 10), 16, 64, 1),
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
    for block_n in (16, 128):
        masked = gqa.GqaDecodeConfig(block_n, 4, 2, tma=False, masked=True)
        attended(MANY, 1, (32, 4), 128, page, torch.bfloat16, masked)


@pytest.mark.parametrize(
    ("kind", "masked"), [(torch.uint8, False), (torch.int8, False), (torch.int8, True)], ids=str
)
def test_attention_over_an_8_bit_cache(kind: torch.dtype, masked: bool) -> None:
    page = 64
    held = (60, page, 2, 64)
    packed = [reference.pack_heads(random(60 * page, 2, 64, dtype=torch.bfloat16), kind)] * 2
    k, v = (numbers.view(held) for numbers, _ in packed)
    scales = torch.stack([scale.view(held[:3]) for _, scale in packed], -1).contiguous()
    tables, lens = batch(MANY, page, k)
    q = random(len(lens), 8, 64, dtype=torch.bfloat16)
    where = segment(tables, lens, 1)
    dtype = torch.bfloat16
    config = gqa.GqaDecodeConfig(32, 4, 2, tma=False, masked=masked)
    workers = gqa.gqa_workers(len(lens), max(lens), 2, config, q.device)
    shape = (1, page, (8, 2), 64, dtype)
    shared = prefix_groups.find(tables, where.kv_lens, *shape, workers, 2 * page)
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
    """Nor does a single worker, which cannot have both."""
    lens = torch.tensor([200, 200], device=DEVICE)
    tables = torch.ones(2, 16, dtype=torch.int64, device=DEVICE)
    assert prefix_groups.find(tables, lens, 1, 16, (8, 1), 128, torch.float32, 1, 32) is None
    assert prefix_groups.find(tables, lens, 1, 16, (64, 1), 128, torch.float32, 8) is None


@pytest.mark.parametrize("may_share", [False, True])
def test_the_backend_shares_where_tables_may(
    may_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups are found once for all layers of a step."""
    monkeypatch.setattr(prefix_groups, "FEWEST_REQUESTS", 4)
    monkeypatch.setattr(prefix_groups, "SHORTEST_PREFIX", 32)
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
