"""Blocks of rows by rank, sums of partial sums and exact quantization: the reference's bits.
Interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops.interface import Ops
from rorqual.ops.rank_rows import RankBlocks, RankParts
from rorqual.ops.triton.backend import TritonOps
from tests.emulation.poison import poison

PLAIN = Ops()
# tokens, ranks, slots of a rank, ranks that share them, experts of a token, rows of a block
CASES = [
    (7, 4, 4, 1, 3, 9),
    (1, 3, 2, 1, 2, 1),
    (0, 4, 4, 1, 3, 5),
    pytest.param((70, 8, 4, 2, 6, 70), marks=pytest.mark.exhaustive),
    pytest.param((130, 32, 8, 1, 8, 131), marks=pytest.mark.exhaustive),
    pytest.param((5, 33, 1, 1, 8, 64), marks=pytest.mark.exhaustive),
]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel fails to write shows."""
    torch.manual_seed(5)
    poison(monkeypatch)


def routed(
    tokens: int, parts: RankParts, top_k: int, kind: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    slots = parts.each * parts.ranks // parts.share
    ids = torch.rand(tokens, slots).topk(top_k).indices
    return ids.to(DEVICE, kind), torch.rand(tokens, top_k).to(DEVICE)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "beside"), [(7, 3, 0), (300, 8, 2), (0, 4, 1)])
def test_routing_as_a_message(tokens: int, top_k: int, beside: int, kind: torch.dtype) -> None:
    """beside: columns in front of it in each row."""
    slots, weights = routed(tokens, RankParts(4, 4), top_k, kind)
    if tokens:
        slots[0, 0] = -1
    want, got = (ops.pack_routing(slots, weights) for ops in (PLAIN, TritonOps()))
    assert got.dtype == torch.int32
    assert torch.equal(want, got)
    columns = torch.zeros(tokens, beside, dtype=torch.int32, device=DEVICE)
    rows = torch.cat((columns, got), 1)[:, beside:]
    for first, count in ((4, 4), (0, 16)):
        ids, found = TritonOps().unpack_routing(rows, kind, first, count)
        expected = PLAIN.unpack_routing(rows, kind, first, count)
        assert ids.dtype == kind
        assert torch.equal(ids, expected[0])
        assert torch.equal(bits(found), bits(expected[1]))
        assert torch.equal(bits(found), bits(weights))
        held = (slots >= first) & (slots < first + count)
        assert torch.equal(ids, torch.where(held, slots - first, -1))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", CASES)
def test_blocks(case: tuple[int, ...], kind: torch.dtype) -> None:
    tokens, ranks, each, share, top_k, capacity = case
    parts = RankParts(ranks, each, share)
    ids, weights = routed(tokens, parts, top_k, kind)
    want, got = (ops.rank_blocks(ids, weights, parts, capacity) for ops in (PLAIN, TritonOps()))
    check_blocks(want, ids, weights, parts, capacity)
    for name in ("rows", "tokens", "routing"):
        assert getattr(got, name).dtype == torch.int32
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def check_blocks(
    made: RankBlocks, ids: Tensor, weights: Tensor, parts: RankParts, capacity: int
) -> None:
    """The reference against its definition, row by row."""
    blocks = made.routing.tolist()
    words = weights.view(torch.int32).tolist()
    for rank in range(parts.ranks):
        first = rank // parts.share * parts.each
        sent = []
        for token, slots in enumerate(ids.tolist()):
            local = [slot - first if 0 <= slot - first < parts.each else -1 for slot in slots]
            if max(local) < 0:
                assert made.rows[token, rank] == -1
                continue
            row = rank * capacity + len(sent)
            assert made.rows[token, rank] == row
            assert made.tokens[row] == token
            assert blocks[rank][len(sent)] == local + words[token]
            sent.append(token)
        for row in range(len(sent), capacity):
            assert made.tokens[rank * capacity + row] == 0
            assert blocks[rank][row][: ids.shape[1]] == [-1] * ids.shape[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("base", [False, True], ids=["", "base"])
@pytest.mark.parametrize(
    ("case", "columns"),
    [
        (CASES[0], 200),
        (CASES[2], 72),
        pytest.param(CASES[4].values[0], 1100, marks=pytest.mark.longest),  # type: ignore[attr-defined]
        pytest.param(CASES[5].values[0], 2048, marks=pytest.mark.exhaustive),  # type: ignore[attr-defined]
    ],
)
def test_sums(case: tuple[int, ...], columns: int, base: bool, dtype: torch.dtype) -> None:
    """Rows that nobody sent are NaN."""
    tokens, ranks, each, share, top_k, capacity = case
    ops = TritonOps()
    given = RankParts(ranks, each, share)
    rows = ops.rank_blocks(*routed(tokens, given, top_k), given, capacity).rows
    parts = torch.full((ranks * capacity, columns), float("nan"), dtype=dtype, device=DEVICE)
    used = rows[rows >= 0].long()
    parts[used] = torch.randn(len(used), columns).to(DEVICE, dtype)
    beside = torch.randn(tokens, columns).to(DEVICE, dtype) if base else None
    want = PLAIN.add_partial_sums(parts, rows, beside)
    assert want.dtype == dtype
    assert not want.isnan().any()
    assert want.shape == (tokens, columns)
    for kind in (torch.int32, torch.int64):
        assert torch.equal(bits(ops.add_partial_sums(parts, rows.to(kind), beside)), bits(want))


def test_the_sum_is_rounded_once_and_in_rank_order() -> None:
    """fp32: 2^24 + 1 - 2^24 is 0 in this order, and 1 in another. bf16: 256 + 1 + 1 is 258, which
    a sum rounded after each part would not reach; the base is added to the rounded sum."""
    for dtype, numbers, base, want in (
        (torch.float32, (2.0**24, 1.0, -(2.0**24)), 0.0, 0.0),
        (torch.bfloat16, (256.0, 1.0, 1.0), 0.0, 258.0),
        (torch.bfloat16, (256.0, 1.0, 0.0), 1.0, 256.0),
    ):
        parts = torch.tensor(numbers, device=DEVICE).to(dtype)[:, None].expand(3, 16).contiguous()
        rows = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32, device=DEVICE)
        beside = torch.full((1, 16), base, dtype=dtype, device=DEVICE)
        for ops in (PLAIN, TritonOps()):
            assert ops.add_partial_sums(parts, rows, beside).tolist() == [[want] * 16]


def test_nothing_came_back() -> None:
    rows = torch.full((2, 3), -1, dtype=torch.int32, device=DEVICE)
    parts = torch.empty(0, 40, dtype=torch.bfloat16, device=DEVICE)
    for ops in (PLAIN, TritonOps()):
        assert ops.add_partial_sums(parts, rows).tolist() == [[0.0] * 40] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [256, 200])
def test_quantization(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, columns).to(DEVICE, dtype) * 10
    x[1] = 0
    x[2] *= 1e-6
    want, got = (ops.quantize_activation(x) for ops in (PLAIN, TritonOps()))
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert torch.equal(bits(one), bits(other))
    apart = torch.randn(4, 2 * columns).to(DEVICE, dtype)[:, ::2]
    empty = x[:0]
    for given in (apart, empty):
        want, got = (ops.quantize_activation(given) for ops in (PLAIN, TritonOps()))
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))
