"""The exchange's four kernels as compiled for Hopper, on two ranks at once: rows arrive, come
back, and no kernel overwrites what another one, of either rank and of this call or the next,
still reads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import Kernel, changes, compiled

pytestmark = pytest.mark.exhaustive

# two warps a row
COLUMNS = 528
CAPACITY = 3
TOP_K = 2
EACH = 4
RANKS = 2
ROWS = 4
NAMES = ("dispatch", "arrival", "send_combine", "combine")
LAUNCHES = f"""
from rorqual.ops.triton.comm import dispatch_combine as kernels
for rank in range({RANKS}):
    areas = kernels.Areas({RANKS}, {ROWS}, {COLUMNS}, {TOP_K}, 2)
    i = lambda *shape: torch.empty(*shape, dtype=torch.int32)
    buffer = kernels.DispatchBuffer(torch.empty({RANKS} + 1, dtype=torch.int64), 0, areas, rank,
        i(2), i({ROWS}, {RANKS}))
    x = torch.empty(3, {COLUMNS}, dtype=torch.bfloat16)
    kernels.dispatch(buffer, x, i(3, {TOP_K}), torch.empty(3, {TOP_K}), {CAPACITY},
        kernels.ExpertPlacement({EACH}))
    kernels.recv_dispatch(buffer)
    kernels.send_combine(buffer, torch.empty({RANKS} * {CAPACITY}, {COLUMNS},
        dtype=torch.bfloat16), {CAPACITY})
    kernels.combine(buffer, x)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"))


def starts() -> list[int]:
    from rorqual.ops.triton.comm.dispatch_combine import Areas

    return list(Areas(RANKS, ROWS, COLUMNS, TOP_K, 2).starts)


def exchange(kernels: list[Kernel], seed: int, changed: dict[int, str] | None = None) -> None:
    """Three calls, with longer and then shorter blocks; experts leave their rows as they are, so
    each token comes back once from each rank that holds one of its experts."""
    torch.manual_seed(seed)
    flags, data, scales, places, weights_at, used, sums, end = starts()
    memory = [torch.full((end // 2,), -1, dtype=torch.int16) for _ in range(RANKS)]
    for own in memory:
        own[: 4 * RANKS] = 0
    stop = torch.zeros(1, dtype=torch.int32)
    rows = [torch.zeros(ROWS, RANKS, dtype=torch.int32) for _ in range(RANKS)]
    counts = torch.zeros(RANKS, 2, dtype=torch.int32).unbind()
    table = torch.tensor([x.data_ptr() for x in [*memory, stop]])
    launches: list[Launch] = []
    last: list[int | None] = [None] * RANKS
    wanted = []
    for call, capacity in enumerate((1, CAPACITY, 2)):
        for rank in range(RANKS):
            tokens = 1 if (rank + call) % 2 else capacity
            me = [rank] if rank != 1 else []
            x = torch.randn(tokens, COLUMNS).bfloat16()
            slots = torch.rand(tokens, RANKS * EACH).topk(TOP_K).indices.int()
            out = torch.full((tokens, COLUMNS), float("nan"), dtype=torch.bfloat16)
            arrived = memory[rank][data // 2 :][: RANKS * capacity * COLUMNS].view(torch.bfloat16)
            holders = (slots[:, :, None] // EACH == torch.arange(RANKS)).any(1).sum(1, keepdim=True)
            wanted.append((out, (x.float() * holders).bfloat16()))
            areas = [flags, data, scales, places, weights_at, used, ROWS]
            sizes = [tokens, capacity, COLUMNS, COLUMNS]
            own: list[tuple[int, list[object]]] = [
                (
                    capacity,
                    [x, slots, torch.rand(tokens, TOP_K), rows[rank], *sizes, *me, 0, *areas],
                ),
                (1, [*me, flags]),
                (RANKS * capacity, [arrived, capacity, COLUMNS, *me, flags, used, sums, ROWS]),
                (tokens, [rows[rank], out, tokens, COLUMNS, *me, flags, sums]),
            ]
            for number, (programs, arguments) in enumerate(own):
                kernel = kernels[rank * len(NAMES) + number]
                ptx = (changed or {}).get(rank * len(NAMES) + number, kernel.ptx)
                launches.append(
                    Launch(
                        ptx,
                        kernel.shared,
                        (programs,),
                        [table, counts[rank], *arguments],
                        last[rank],
                    )
                )
                last[rank] = len(launches) - 1
    # counts are not watched: all warps of a block load one that its first thread replaces, but no
    # other warp uses what it loaded
    Grid(launches, [*memory, *rows, stop, *(out for out, _ in wanted)]).by_lot(seed)
    for out, expected in wanted:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("seed", range(2))
def test_rows_come_back(kernels: list[Kernel], seed: int) -> None:
    exchange(kernels, seed)


BROKEN = {  # what is changed, and in which kernels
    "dispatch releases": (0, r"(atom|red)(\S*)\.release", r"\1\2.relaxed"),
    "dispatch meets": (0, r"bar\.sync[^;]*;(?=(?s:(?!bar\.sync).)*\.release)", ""),
    "arrival acquires": (1, r"atom(\S*)\.acquire", r"atom\1.relaxed"),
    "send_combine releases": (2, r"(atom|red)(\S*)\.release", r"\1\2.relaxed"),
    "send_combine meets": (2, r"bar\.sync[^;]*;(?=(?s:(?!bar\.sync).)*\.release)", ""),
    "combine acquires": (3, r"atom(\S*)\.acquire", r"atom\1.relaxed"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    number, pattern, by = BROKEN[what]
    both = {i: next(changes(kernels[i].ptx, pattern, by)) for i in (number, number + len(NAMES))}
    with pytest.raises(AssertionError, match=r"may not|may still"):
        exchange(kernels, 0, both)
