"""Rows to expert servers and back, by the kernels as compiled for Hopper: a caller and two servers
at once, two calls of different lengths, the second with programs that count themselves. Rows come
back, and no kernel overwrites what another one, of either side and of this call or the next, still
reads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import Kernel, changes, compiled

pytestmark = pytest.mark.exhaustive

COLUMNS = 528
TOP_K = 2
EXPERTS = 6
ROWS = 6
CALLS = (2, 5)  # rows; the second call's programs count themselves
HELD = ([0, 1, 2, 3], [4, 5, 0])  # experts of each server
WIDE = 512  # columns of a program that counts itself: two warps
NAMES = ("dispatch", "arrive", "send_home", "combine")
LAUNCHES = f"""
from rorqual.ops.triton.comm import remote_dispatch as kernels
kernels.COLUMNS_AT_ONCE = ({WIDE}, {WIDE})
areas = kernels.LaneAreas({ROWS}, {COLUMNS}, {TOP_K}, 2)
i = lambda *shape: torch.empty(*shape, dtype=torch.int32)
table = torch.empty(2 * kernels.SERVERS + 2, dtype=torch.int64)
caller = kernels.CallerLane(areas, table, i({ROWS}), i(1), i(1))
server = kernels.ServerLane(areas, table[:3], torch.empty(areas.inbox_size, dtype=torch.uint8),
    i({ROWS}, {TOP_K}), i(1))
for kernels.FEW_ROWS, rows in zip((8, 0), {CALLS}):
    x = torch.empty(rows, {COLUMNS}, dtype=torch.bfloat16)
    kernels.dispatch(caller, torch.empty({EXPERTS}, dtype=torch.int64), x, i(rows, {TOP_K}),
        torch.empty(rows, {TOP_K}), 2)
    kernels.arrive(server, torch.empty({EXPERTS} + 1, dtype=torch.int64), rows)
    kernels.send_home(server, x)
    kernels.combine(caller, x)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"))


def exchange(kernels: list[Kernel], seed: int, changed: dict[int, str] | None = None) -> None:
    """Experts leave their rows as they are, so a row comes back once from each server that it was
    sent to."""
    from rorqual.ops.triton.comm.remote_dispatch import HEAD, SERVERS, LaneAreas, pack_holders

    torch.manual_seed(seed)
    areas = LaneAreas(ROWS, COLUMNS, TOP_K, 2)
    data = areas.inbox[0]

    def poisoned(size: int) -> torch.Tensor:
        found = torch.full((size // 2,), -1, dtype=torch.int16)
        found[: HEAD // 2] = 0
        return found

    inboxes = [poisoned(areas.inbox_size) for _ in HELD]
    homes = [poisoned(areas.home_size) for _ in HELD]
    words = torch.zeros(2, dtype=torch.int32)
    stop, report = (word.data_ptr() for word in words)
    table = torch.zeros(2 * SERVERS + 2, dtype=torch.int64)
    for number, (inbox, home) in enumerate(zip(inboxes, homes, strict=True)):
        table[number], table[SERVERS + number] = inbox.data_ptr(), home.data_ptr()
    table[2 * SERVERS :] = torch.tensor([stop, report])
    tables = [
        torch.tensor([inbox.data_ptr(), home.data_ptr(), stop])
        for inbox, home in zip(inboxes, homes, strict=True)
    ]
    numbers = [[s for s, held in enumerate(HELD) if e in held] for e in range(EXPERTS)]
    holders = torch.tensor([pack_holders(found) for found in numbers])
    places = []
    for held in HELD:
        place = torch.full((EXPERTS + 1,), -1)
        place[held] = torch.arange(len(held))
        places.append(place)
    sent = torch.full((ROWS,), -1, dtype=torch.int32)
    local = [torch.full((ROWS, TOP_K), 77, dtype=torch.int32) for _ in HELD]
    done = torch.zeros(len(HELD) + 1, dtype=torch.int32)
    halt = torch.zeros(1, dtype=torch.int32)
    launches: list[Launch] = []
    last: dict[int, int] = {}  # launch of each side: servers, then the caller
    caller = len(HELD)

    def launch(side: int, kernel: int, grid: tuple[int, ...], arguments: list[object]) -> None:
        found = kernels[kernel]
        ptx = (changed or {}).get(kernel, found.ptx)
        launches.append(Launch(ptx, found.shared, grid, arguments, last.get(side)))
        last[side] = len(launches) - 1

    wanted = []
    widths = (COLUMNS, COLUMNS)
    parts_at = areas.inbox[:4]
    turn = 2
    for number, (rows, parts) in enumerate(zip(CALLS, (1, -(-COLUMNS // WIDE)), strict=True)):
        first = number * len(NAMES)
        x = torch.randn(rows, COLUMNS).bfloat16()
        ids = torch.rand(rows, EXPERTS).topk(TOP_K).indices.int()
        weights = torch.rand(rows, TOP_K)
        out = torch.full((rows, COLUMNS), float("nan"), dtype=torch.bfloat16)
        copies = torch.zeros(rows, 1)
        for row, picks in enumerate(ids.tolist()):
            copies[row] = len({numbers[e][(row + turn) % len(numbers[e])] for e in picks})
        wanted.append((out, (x.float() * copies).bfloat16()))
        launch(
            caller,
            first,
            (rows, parts),
            [table, holders, x, ids, weights, sent, done[caller:], rows, *widths, turn, *parts_at],
        )
        for side in range(len(HELD)):
            arrived = inboxes[side][data // 2 :][: rows * COLUMNS].view(torch.bfloat16)
            launch(
                side,
                first + 1,
                (1,),
                [tables[side], places[side], local[side], rows, EXPERTS + 1, areas.inbox[2]],
            )
            launch(
                side,
                first + 2,
                (rows, parts),
                [tables[side], local[side], arrived, done[side:], rows, COLUMNS, HEAD],
            )
        launch(caller, first + 3, (rows, 2), [table, sent, halt, out, COLUMNS, HEAD])
    watched = [*inboxes, *homes, sent, done, *local, words, *(out for out, _ in wanted)]
    counts = [memory.data_ptr() + 4 for memory in (*inboxes, *homes)]
    Grid(launches, watched, [table, *tables], counts).by_lot(seed)
    for out, expected in wanted:
        assert torch.equal(out, expected)
    assert not words.any()
    assert not done.any()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.longest)])
@pytest.mark.longest
def test_rows_come_back(kernels: list[Kernel], seed: int) -> None:
    exchange(kernels, seed)


# the last barrier before a program counts itself, or sets the other side's flags
MEETS = r"bar\.sync[^;]*;(?=(?s:(?!bar\.sync).)*?(gpu\S*\.acq_rel|sys\S*\.release))"
BROKEN = {  # what is changed, and in which kernels of a call
    "dispatch releases": (0, r"(atom|red)(\S*sys\S*)\.release", r"\1\2.relaxed"),
    "dispatch meets": (0, MEETS, ""),
    "arrive acquires": (1, r"ld\.acquire", r"ld.relaxed"),
    "send_home releases": (2, r"(atom|red)(\S*sys\S*)\.release", r"\1\2.relaxed"),
    "send_home meets": (2, MEETS, ""),
    "combine acquires": (3, r"ld\.acquire", r"ld.relaxed"),
}


@pytest.mark.parametrize("call", [0, pytest.param(1, marks=pytest.mark.longest)])
@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str, call: int) -> None:
    number, pattern, by = BROKEN[what]
    kernel = number + call * len(NAMES)
    changed = next(changes(kernels[kernel].ptx, pattern, by))
    with pytest.raises(AssertionError, match=r"may not|may still"):
        exchange(kernels, 0, {kernel: changed})
