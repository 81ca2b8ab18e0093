"""Rows to expert servers and back over memory that both sides share: callers and servers in one
process, one after the other, so that no kernel waits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, needs_triton  # before kernels are defined

pytestmark = [needs_triton, pytest.mark.exhaustive(but_first=True)]

from rorqual.ops import reference  # noqa: E402
from rorqual.ops.padded_rows import PaddedRows  # noqa: E402

if DEVICE is not None:
    kernels = pytest.importorskip("rorqual.ops.triton.comm.remote_dispatch")

EXPERTS = 12
HIDDEN = 160
TOP_K = 3
ROWS = 6


@dataclass
class Pairs:
    """A caller, and servers that hold some experts each."""

    held: list[list[int]]
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        count = kernels.SERVERS
        self.areas = kernels.LaneAreas(ROWS, HIDDEN, TOP_K, self.dtype.itemsize)
        self.words = torch.zeros(2, dtype=torch.int32)
        self.words = self.words.pin_memory() if DEVICE == "cuda" else self.words
        stop, report = (word.data_ptr() for word in self.words)
        self.inboxes = [self.memory(self.areas.inbox_size) for _ in self.held]
        self.homes = [self.memory(self.areas.home_size) for _ in self.held]
        table = torch.zeros(2 * count + 2, dtype=torch.int64)
        for number, (inbox, home) in enumerate(zip(self.inboxes, self.homes, strict=True)):
            table[number] = inbox.data_ptr()
            table[count + number] = home.data_ptr()
        table[2 * count :] = torch.tensor([stop, report])
        sent = torch.full((ROWS,), -1, dtype=torch.int32, device=DEVICE)
        counts = torch.zeros(len(self.held) + 1, 1, dtype=torch.int32, device=DEVICE)
        self.halt = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.caller = kernels.CallerLane(self.areas, table.to(DEVICE), sent, counts[-1], self.halt)
        self.servers = [
            kernels.ServerLane(
                self.areas,
                torch.tensor([inbox.data_ptr(), home.data_ptr(), stop], device=DEVICE),
                inbox,
                torch.full((ROWS, TOP_K), 77, dtype=torch.int32, device=DEVICE),
                count,
            )
            for inbox, home, count in zip(self.inboxes, self.homes, counts[:-1], strict=True)
        ]
        self.places = []
        for experts in self.held:
            place = torch.full((EXPERTS + 1,), -1)
            place[experts] = torch.arange(len(experts))
            self.places.append(place.to(DEVICE))
        numbers = [[s for s, held in enumerate(self.held) if e in held] for e in range(EXPERTS)]
        packed = [kernels.pack_holders(found) for found in numbers]
        self.holders = torch.tensor(packed, device=DEVICE)

    def memory(self, size: int) -> Tensor:
        """Poisoned but for the head."""
        found = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        found[: kernels.HEAD] = 0
        return found

    def call(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        turn: int,
        fp8: bool,
        padded: PaddedRows | None = None,
        base: Tensor | None = None,
    ) -> Tensor:
        """Server s gives its slot's number plus one times what came, so who computed is seen."""
        kernels.dispatch(self.caller, self.holders, x, ids, weights, turn, fp8, padded)
        for number, server in enumerate(self.servers):
            kernels.arrive(server, self.places[number], x.shape[0])
            parts, slots, scores = kernels.arrived(server, x.shape[0], self.dtype, fp8)
            rows = reference.dequantize_activation(*parts, self.dtype) if fp8 else parts[0]
            factor = torch.where(slots >= 0, scores * (slots + 1), 0).sum(1, keepdim=True)
            rows = torch.where((slots >= 0).any(1, keepdim=True), rows, 0)
            kernels.send_home(server, (rows * factor).to(self.dtype).contiguous())
        return kernels.combine(self.caller, x, base)

    def wanted(self, x: Tensor, ids: Tensor, weights: Tensor, turn: int, fp8: bool) -> Tensor:
        if fp8:
            x = reference.dequantize_activation(*reference.quantize_activation(x), x.dtype)
        total = torch.zeros(x.shape)
        for number, held in enumerate(self.held):
            factor = torch.zeros(x.shape[0], 1)
            for row, picks in enumerate(ids.tolist()):
                for place, expert in enumerate(picks):
                    holders = [s for s, other in enumerate(self.held) if expert in other]
                    if holders and holders[(row + turn) % len(holders)] == number:
                        factor[row] += weights[row, place].cpu() * (held.index(expert) + 1)
            total += (x.cpu() * factor).to(self.dtype).float()
        return total.to(self.dtype)


def given(rows: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, HIDDEN, generator=dice).to(dtype)
    ids = torch.rand(rows, EXPERTS, generator=dice).topk(TOP_K).indices
    return x.to(DEVICE), ids.to(DEVICE), torch.rand(rows, TOP_K, generator=dice).to(DEVICE)


SPREADS = [
    [list(range(EXPERTS))],
    [list(range(EXPERTS)), list(range(EXPERTS))],
    [[5, 3, 1, 0, 2, 4], [11, 6, 7, 8, 9, 10, 0]],
    [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8], [8, 9, 10, 11, 0], [], list(range(EXPERTS))],
]


@pytest.fixture(params=[(8, (256, 256)), (1, (128, 128))], ids=["whole", "parts"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program a row, which sets flags by itself; or, from two rows on, two programs of 128
    columns, which count themselves."""
    (few, columns) = request.param
    monkeypatch.setattr(kernels, "FEW_ROWS", few)
    monkeypatch.setattr(kernels, "COLUMNS_AT_ONCE", columns)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.usefixtures("programs")
def test_rows_meet_their_experts_and_come_back(spread: list[list[int]], fp8: bool) -> None:
    pairs = Pairs(spread)
    for number, rows in enumerate((ROWS, 1, 3, ROWS)):
        x, ids, weights = given(rows, number, torch.float32)
        found = pairs.call(x, ids, weights, number, fp8)
        wanted = pairs.wanted(x, ids, weights, number, fp8)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6)
    heads = [memory[:8].view(torch.int32).tolist() for memory in (*pairs.inboxes, *pairs.homes)]
    assert heads == [[2 * ROWS + 4] * 2] * len(heads)
    assert pairs.words.tolist() == [0, 0]
    assert not any(int(lane.done) for lane in (pairs.caller, *pairs.servers))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("fp8", [False, True])
def test_padding_has_no_experts(fp8: bool) -> None:
    """Its ids are those of no expert that any server has, and no report comes of it."""
    pairs = Pairs([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10]])
    padded = PaddedRows(torch.zeros(1, dtype=torch.int64, device=DEVICE), 2, 1)
    x, ids, weights = given(ROWS, 3, torch.float32)
    ids[ids == EXPERTS - 1] = 0  # which no server has
    for requests, real in ((3, 5), (1, 1), (0, 0), (9, ROWS)):
        padded.requests.fill_(requests)
        lost = ids.clone()
        lost[real:] = EXPERTS - 1
        found = pairs.call(x, lost, weights, 0, fp8, padded).cpu()
        wanted = pairs.wanted(x, ids, weights, 0, fp8)
        torch.testing.assert_close(found[:real], wanted[:real], rtol=1e-6, atol=1e-6)
        assert not found[real:].any()
        for server in pairs.servers:
            assert bool((server.local[real:] == -1).all())
    assert pairs.words.tolist() == [0, 0]


@pytest.mark.usefixtures("programs")
def test_sums_are_added_to_what_there_is() -> None:
    """Rounded first, as an addition of its own would find them."""
    pairs = Pairs(SPREADS[2], torch.bfloat16)
    x, ids, weights = given(ROWS, 4, torch.bfloat16)
    base = torch.randn_like(x)
    plain = pairs.call(x, ids, weights, 0, False)
    assert torch.equal(pairs.call(x, ids, weights, 0, False, base=base), plain + base)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("ue8m0", [False, True])
def test_rows_in_fp8_are_the_definition_s_to_the_bit(ue8m0: bool) -> None:
    """Zeros of both signs, blocks of nothing else, and values far apart among them."""
    pairs = Pairs([list(range(EXPERTS))])
    x, ids, weights = given(ROWS, 0, torch.float32)
    x[0] = 0.0
    x[1, :128] = -0.0
    x[2, ::3] = 0.0
    x[3, ::5] = -0.0
    x[4, ::2] *= 1e-30
    x[5] *= 1e30
    kernels.dispatch(pairs.caller, pairs.holders, x, ids, weights, 0, True, None, ue8m0)
    parts, _, _ = kernels.arrived(pairs.servers[0], ROWS, torch.float32, True)
    wanted = reference.quantize_activation(x, ue8m0)
    assert torch.equal(parts[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(parts[1], wanted[1])


def test_a_row_goes_to_one_of_two_servers_that_hold_the_same() -> None:
    pairs = Pairs([list(range(EXPERTS))] * 2)
    x, ids, weights = given(ROWS, 0, torch.float32)
    for turn in (0, 1):
        pairs.call(x, ids, weights, turn, False)
        assert pairs.caller.sent.tolist() == [1 << ((row + turn) % 2) for row in range(ROWS)]


def test_an_expert_without_a_server_is_reported() -> None:
    pairs = Pairs([[0, 1, 2, 3]])
    x, ids, weights = given(2, 0, torch.float32)
    pairs.call(x, ids.clamp(max=3), weights, 0, False)
    assert pairs.words.tolist() == [0, 0]
    ids[1, 2] = 7
    pairs.call(x, ids, weights, 0, False)
    assert pairs.words.tolist() == [0, 1]


@pytest.mark.parametrize("expert", [2, EXPERTS + 1, 2**31 - 1])
def test_a_server_reports_what_it_does_not_hold(expert: int) -> None:
    """It has dropped one since its caller heard of it; numbers beyond all experts are no index."""
    pairs = Pairs([list(range(EXPERTS)), [3]])
    x, ids, weights = given(2, 0, torch.float32)
    kernels.dispatch(pairs.caller, pairs.holders, x, ids, weights, 0)
    start = pairs.areas.inbox[2]
    pairs.inboxes[0][start : start + 4].view(torch.int32).fill_(expert)
    pairs.places[0][2] = -1
    for server, places in zip(pairs.servers, pairs.places, strict=True):
        kernels.arrive(server, places, 2)
        kernels.send_home(server, torch.zeros(2, HIDDEN, device=DEVICE))
    assert int(pairs.servers[0].local[0, 0]) == -1
    kernels.combine(pairs.caller, x)
    assert pairs.words.tolist() == [0, 1]


@pytest.mark.usefixtures("programs")
def test_a_wait_ends_by_the_stop_word_and_counts_go_on() -> None:
    pairs = Pairs([list(range(EXPERTS))])
    x, ids, weights = given(2, 0, torch.float32)
    pairs.words[0] = 1
    server = pairs.servers[0]
    kernels.arrive(server, pairs.places[0], 2)  # nothing was sent
    kernels.send_home(server, torch.zeros(2, HIDDEN, device=DEVICE))
    kernels.dispatch(pairs.caller, pairs.holders, x, ids, weights, 0)
    kernels.combine(pairs.caller, x)
    pairs.words[0] = 0
    found = pairs.call(x, ids, weights, 0, False)
    wanted = pairs.wanted(x, ids, weights, 0, False)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("programs")
def test_a_wait_of_many_programs_ends_by_the_stop_word_that_one_of_them_reads() -> None:
    pairs = Pairs([list(range(EXPERTS))])
    x, ids, weights = given(2, 0, torch.float32)
    kernels.dispatch(pairs.caller, pairs.holders, x, ids, weights, 0)
    pairs.words[0] = 1
    kernels.combine(pairs.caller, x)  # not answered yet
    assert pairs.halt.tolist() == [1]
    server = pairs.servers[0]
    kernels.arrive(server, pairs.places[0], 2)
    kernels.send_home(server, torch.zeros(2, HIDDEN, device=DEVICE))
    pairs.words[0] = 0
    pairs.halt.zero_()
    found = pairs.call(x, ids, weights, 0, False)
    wanted = pairs.wanted(x, ids, weights, 0, False)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6)
    assert pairs.halt.tolist() == [0]
