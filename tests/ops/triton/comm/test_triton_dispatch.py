"""Dispatch and combine with all ranks on one device, one after the other: what arrives where,
and what comes back. Interpreted where there is no GPU; on one, calls are also captured and
replayed. Ranks at the same time: tests/parallel/test_exchange_p2p.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import dequantize_activation, quantize_activation
from rorqual.ops.triton.comm import dispatch_combine as kernels

pytestmark = pytest.mark.exhaustive

EXPERTS = 16


class Ranks:
    """Their buffers hold NaN and absurd numbers at first."""

    def __init__(self, world: int, rows: int, columns: int, top_k: int, dtype: torch.dtype):
        self.world = world
        self.dtype = dtype
        self.place = kernels.ExpertPlacement(EXPERTS // world)
        self.areas = kernels.Areas(world, rows, columns, top_k, dtype.itemsize)
        self.memory = [
            torch.full((self.areas.size,), 255, dtype=torch.uint8, device=DEVICE)
            for _ in range(world)
        ]
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE == "cuda")
        table = torch.tensor(
            [memory.data_ptr() for memory in (*self.memory, self.stop)], device=DEVICE
        )
        self.buffers = []
        for rank, memory in enumerate(self.memory):
            memory[: 8 * world].zero_()
            rows_back = torch.empty(rows, world, dtype=torch.int32, device=DEVICE)
            totals = torch.zeros(2, dtype=torch.int32, device=DEVICE)
            self.buffers.append(
                kernels.DispatchBuffer(table, 0, self.areas, rank, totals, rows_back)
            )

    def dispatch(
        self,
        x: list[Tensor],
        slots: list[Tensor],
        weights: list[Tensor],
        fp8: bool,
        padded: list[PaddedRows] | None = None,
        ue8m0: bool = False,
    ) -> list[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
        capacity = max(map(len, x))
        for rank, buffer in enumerate(self.buffers):
            real = padded[rank] if padded else None
            given = (x[rank], slots[rank], weights[rank], capacity, self.place, fp8, real, ue8m0)
            kernels.dispatch(buffer, *given)
        for buffer in self.buffers:
            kernels.recv_dispatch(buffer)
        found = zip(self.buffers, self.memory, strict=True)
        return [
            kernels.arrived(buffer, memory, capacity, self.dtype, fp8) for buffer, memory in found
        ]

    def combine(
        self, y: list[Tensor], x: list[Tensor], base: list[Tensor] | None = None
    ) -> list[Tensor]:
        for buffer, part in zip(self.buffers, y, strict=True):
            kernels.send_combine(buffer, part, max(map(len, x)))
        return [
            kernels.combine(buffer, like, base[rank] if base else None)
            for rank, (buffer, like) in enumerate(zip(self.buffers, x, strict=True))
        ]


def draw(
    counts: list[int], columns: int, top_k: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    x = [torch.randn(count, columns).to(DEVICE, dtype) for count in counts]
    slots = [torch.rand(count, EXPERTS).topk(top_k).indices.to(DEVICE) for count in counts]
    return x, slots, [torch.rand(count, top_k).to(DEVICE) for count in counts]


def expected(
    ranks: Ranks, me: int, x: Tensor, slots: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that a rank sends to rank `me`, with places and weights, in the order of its tokens."""
    place = slots - me * ranks.place.each
    place = place.masked_fill((place < 0) | (place >= ranks.place.each), -1)
    wanted = (place >= 0).any(1)
    return x[wanted], place[wanted].int(), weights[wanted]


@pytest.mark.parametrize(
    ("fp8", "ue8m0"), [(False, False), (True, False), (True, True)], ids=["", "fp8", "ue8m0"]
)
@pytest.mark.parametrize(
    ("world", "counts", "columns", "top_k"),
    [(2, [5, 2], 48, 3), (4, [1, 0, 3, 2], 256, 3), (8, [2, 1, 0, 0, 2, 2, 1, 2], 160, 6)],
)
def test_what_arrives(
    world: int, counts: list[int], columns: int, top_k: int, fp8: bool, ue8m0: bool
) -> None:
    """Rows once, in the order of tokens, exact or as quantize_activation rounds them; places
    without a row say so."""
    ranks = Ranks(world, 6, columns, top_k, torch.bfloat16)
    capacity = max(counts)
    for _ in range(2):  # what the first call left lies where the second writes
        x, slots, weights = draw(counts, columns, top_k, torch.bfloat16)
        arrived = ranks.dispatch(x, slots, weights, fp8, ue8m0=ue8m0)
        for me, (parts, places, factors) in enumerate(arrived):
            for source in range(world):
                rows, place, weight = expected(ranks, me, x[source], slots[source], weights[source])
                block = slice(source * capacity, source * capacity + len(rows))
                want = quantize_activation(rows, ue8m0) if fp8 else (rows,)
                assert all(
                    torch.equal(part[block].float(), one.float())
                    for part, one in zip(parts, want, strict=True)
                )
                assert torch.equal(places[block], place)
                assert torch.equal(factors[block], weight)
                assert bool((places[block.stop : (source + 1) * capacity] == -1).all())
        ranks.combine(
            [torch.zeros(world * capacity, columns, dtype=torch.bfloat16, device=DEVICE)] * world, x
        )


def sums_of(
    ranks: Ranks,
    x: list[Tensor],
    slots: list[Tensor],
    weights: list[Tensor],
    fp8: bool,
    padded: list[PaddedRows] | None = None,
    base: list[Tensor] | None = None,
) -> list[Tensor]:
    """Rank d's experts multiply by d + 1, and make NaN of what is no row."""
    y = []
    for me, (parts, places, _) in enumerate(ranks.dispatch(x, slots, weights, fp8, padded)):
        rows = dequantize_activation(*parts, ranks.dtype) if fp8 else parts[0]
        y.append(torch.where((places >= 0).any(1, keepdim=True), rows * (me + 1), torch.nan))
    return ranks.combine(y, x, base)


def wanted_sums(ranks: Ranks, x: list[Tensor], slots: list[Tensor], fp8: bool) -> list[Tensor]:
    found = []
    for rows, slot in zip(x, slots, strict=True):
        total = torch.zeros(rows.shape, device=DEVICE)
        sent = dequantize_activation(*quantize_activation(rows), ranks.dtype) if fp8 else rows
        for me in range(ranks.world):
            here = (slot // ranks.place.each == me).any(1, keepdim=True)
            total += torch.where(here, (sent * (me + 1)).float(), 0)
        found.append(total.to(ranks.dtype))
    return found


@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_sums_come_back_in_the_order_of_ranks(dtype: torch.dtype, fp8: bool) -> None:
    ranks = Ranks(4, 3, 160, 3, dtype)
    for counts in ([2, 0, 3, 1], [0, 1, 0, 0], [1, 1, 1, 1]):
        x, slots, weights = draw(counts, 160, 3, dtype)
        got = sums_of(ranks, x, slots, weights, fp8)
        want = wanted_sums(ranks, x, slots, fp8)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("fp8", [False, True])
def test_padding_is_not_sent(fp8: bool) -> None:
    """Requests of two rows each, of which the buffers' ranks have the rows from number 1 on: what
    arrives and comes back is that of the rows that are left, and padding has sums of 0."""
    counts = [5, 4, 3]
    requests = [2, 4, 0]  # rows that are not padding: 3, all, none
    real = [3, 4, 0]
    ranks = Ranks(3, 5, 160, 3, torch.bfloat16)
    ranks.place = kernels.ExpertPlacement(6)
    fewer = Ranks(3, 5, 160, 3, torch.bfloat16)
    fewer.place = ranks.place
    padded = [PaddedRows(torch.tensor([one], device=DEVICE), 2, 1) for one in requests]
    x, slots, weights = draw(counts, 160, 3, torch.bfloat16)
    for _ in range(2):
        short = [
            [part[:count] for part, count in zip(one, real, strict=True)]
            for one in (x, slots, weights)
        ]
        got = sums_of(ranks, x, slots, weights, fp8, padded)
        want = sums_of(fewer, *short, fp8)
        for sums, few, count in zip(got, want, real, strict=True):
            assert torch.equal(sums[:count], few)
            assert not sums[count:].any()
        assert torch.count_nonzero(got[0][:3]) > 0
        for one, number in zip(padded, requests, strict=True):
            assert one.is_real(5).tolist() == [int(row < 2 * number) for row in range(1, 6)]
            one.requests.fill_(number)


def test_sums_are_added_to_what_there_is() -> None:
    """Rounded first, as an addition of its own would find them."""
    ranks = Ranks(2, 3, 160, 3, torch.bfloat16)
    x, slots, weights = draw([3, 2], 160, 3, torch.bfloat16)
    base = [torch.randn_like(part) for part in x]
    plain = sums_of(ranks, x, slots, weights, False)
    got = sums_of(ranks, x, slots, weights, False, base=base)
    for one, sums, more in zip(got, plain, base, strict=True):
        assert torch.equal(one, sums + more)


@pytest.mark.skipif(DEVICE != "cuda", reason="records a graph")
@pytest.mark.parametrize("fp8", [False, True])
def test_recorded_calls_go_on_where_they_stopped(fp8: bool) -> None:
    ranks = Ranks(8, 128, 7168, 8, torch.bfloat16)
    counts = [128, 64, 0, 1, 100, 128, 7, 33]
    x, slots, weights = draw(counts, 7168, 8, torch.bfloat16)
    sums_of(ranks, x, slots, weights, fp8)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # an odd number of calls
            got = sums_of(ranks, x, slots, weights, fp8)
    for _ in range(5):
        for old, new in zip(
            (*x, *slots),
            (part for kind in draw(counts, 7168, 8, torch.bfloat16)[:2] for part in kind),
            strict=True,
        ):
            old.copy_(new)
        graph.replay()
        assert all(
            torch.equal(a, b) for a, b in zip(got, wanted_sums(ranks, x, slots, fp8), strict=True)
        )
        assert all(
            torch.equal(a, b)
            for a, b in zip(sums_of(ranks, x, slots, weights, fp8), got, strict=True)
        ), "and eagerly in between"


def test_a_wait_for_a_rank_that_never_comes_ends_with_the_stop_word() -> None:
    """Rank 1 sends nothing. The word is set beforehand; without it the kernel would wait for
    ever."""
    ranks = Ranks(2, 4, 128, 2, torch.float32)
    x, slots, weights = draw([3, 3], 128, 2, torch.float32)
    kernels.dispatch(ranks.buffers[0], x[0], slots[0], weights[0], 3, ranks.place, False)
    ranks.stop.fill_(1)
    kernels.recv_dispatch(ranks.buffers[0])
    flags = ranks.memory[0][:8].view(torch.int32).tolist()
    assert flags[0] == int(ranks.buffers[0].totals[0])
    assert flags[1] < flags[0], "rank 1 has not come"
