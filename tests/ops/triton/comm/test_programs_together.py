"""Triton kernels whose programs count on each other, as compiled for Hopper: sorting of picks,
the router, and the fused all-reduce with two ranks; right and free of races however programs
take turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.triton.comm.all_reduce_norm import buffer_bytes
from tests.emulation import ptx_interpreter
from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import Kernel, caught, changes, compiled, run_time

pytestmark = pytest.mark.exhaustive

MOE = MoEConfig(24, 5, 8, 0, "sigmoid", "noaux_tc", 4, 2, True, scaling=1.7)
# two warps for the router and for a row of the all-reduce
SLOTS = 25
ROWS = 16
PICKS = 300
HIDDEN = 2304
NORMED = 512  # where the router computes the norm before it
COLUMNS = 528
RANKS = 2
LAUNCHES = f"""
from rorqual.config.model import MoEConfig
from rorqual.ops.reference import RouterWeights
from rorqual.ops.triton.comm import all_reduce_norm
from rorqual.ops.triton.moe import align, topk
from rorqual.ops.triton.rowwise import norm
bf16 = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
into = lambda tokens: align.empty_blocks(tokens * 6, {SLOTS}, {ROWS}, torch.device("cpu"), True)
align.moe_align_block_size(torch.empty({PICKS}, 1, dtype=torch.int32), {SLOTS}, {ROWS})
topk.route(torch.empty(9, 24), torch.empty(24), {MOE}, torch.int32, shared=1, into=into(9))
router = RouterWeights(bf16(24, {HIDDEN}), torch.empty(24), {MOE}, 1)
topk.router(bf16(2, {HIDDEN}), router, torch.int32, into=into(2))
for two_shot in (False, True):
    for rank in range({RANKS}):
        x, table, epochs = bf16(2, {COLUMNS}), torch.empty({RANKS} + 1,
            dtype=torch.int64), torch.empty(8, dtype=torch.int32)
        all_reduce_norm.all_reduce_norm(table, epochs, rank, x, x, x[0], 1e-6, two_shot)
pending = norm.pending(bf16(2, {NORMED}), bf16(2, {NORMED}), bf16({NORMED}), 1e-6)
router = RouterWeights(bf16(24, {NORMED}), torch.empty(24), {MOE}, 1)
topk.router(pending, router, torch.int32, into=into(2))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"))


def integers(*shape: int) -> Tensor:
    return torch.full(shape, -7, dtype=torch.int32)


class Sorted:
    """Where a kernel sorts picks, and whether it did."""

    def __init__(self, picks: int):
        self.picks = picks
        self.limit = -(-((picks + min(picks, SLOTS) * (ROWS - 1)) // ROWS) // 4) * 4
        self.order, self.blocks, self.count = (
            integers(SLOTS * picks),
            integers(4, self.limit),
            integers(1),
        )
        self.counts = torch.zeros(33, dtype=torch.int32)
        self.tensors = [self.order, self.blocks, self.count, self.counts]
        self.arguments = [*self.tensors, picks, self.limit]

    def check(self, ids: Tensor) -> None:
        assert not self.counts.any(), "the next launch starts from zeros"
        found = []
        for slot, start, end, shift in self.blocks[:, : int(self.count)].T.tolist():
            assert start < end
            places = self.order[start + shift : min(start + ROWS, end) + shift].tolist()
            assert all(ids[pick] == slot for pick in places)
            found += places
        assert sorted(found) == torch.nonzero(ids >= 0).flatten().tolist()


def sort(kernels: list[Kernel], seed: int | None, ptx: str = "") -> None:
    torch.manual_seed(0)
    ids = torch.randint(-1, SLOTS, (PICKS,)).int()
    out = Sorted(PICKS)
    ptx_interpreter.run(
        ptx or kernels[0].ptx, kernels[0].shared, (3,), [ids, *out.arguments], out.tensors, seed
    )
    out.check(ids)


def check_choice(logits: Tensor, bias: Tensor, ids: Tensor, weights: Tensor) -> None:
    def dense(some: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(len(ids), SLOTS).scatter(1, some.long(), values)

    assert torch.equal(ids[:, 5], torch.full((len(ids),), 24, dtype=torch.int32))
    assert torch.allclose(
        dense(*reference.route(logits, bias, MOE)), dense(ids[:, :5], weights[:, :5]), rtol=1e-3
    )


def choose(kernels: list[Kernel], seed: int | None, ptx: str = "", joint: bool = False) -> None:
    torch.manual_seed(1)
    tokens = 2 if joint else 9
    kernel = kernels[1 + joint]
    counters = torch.zeros(64, dtype=torch.int32)
    x = torch.randn(tokens, HIDDEN).bfloat16()
    gate = (torch.randn(24, HIDDEN) / 48).bfloat16()
    bias = torch.randn(24) * 0.3
    logits = x.float() @ gate.float().T
    ids = integers(tokens, 6)
    weights = torch.full((tokens, 6), float("nan"))
    out = Sorted(tokens * 6)
    held = torch.full((tokens, 24), 1e9)
    before = (
        [x, gate, held, counters, bias, ids, weights, HIDDEN, 0, 0.0]
        if joint
        else [logits, bias, ids, weights, logits.numel(), 24]
    )
    watched = [ids, weights, *out.tensors, *([held, counters] if joint else [])]
    arguments = [*before, float(MOE.scaling), *out.arguments]
    grid = (24, tokens) if joint else (tokens,)
    ptx_interpreter.run(
        ptx or kernel.ptx, kernel.shared, grid, arguments, watched, seed, early=[gate]
    )
    check_choice(logits, bias, ids, weights)
    out.check(ids.flatten())
    assert not counters.any(), "the next launch starts from zeros"


def choose_normed(kernels: list[Kernel], seed: int | None, ptx: str = "") -> None:
    torch.manual_seed(2)
    kernel = kernels[-1]
    counters = torch.zeros(64, dtype=torch.int32)
    x, residual = (torch.randn(2, NORMED).bfloat16() for _ in range(2))
    weight = torch.randn(NORMED).bfloat16()
    gate = (torch.randn(24, NORMED) / 24).bfloat16()
    bias = torch.randn(24) * 0.3
    rows, total = (torch.full_like(x, float("nan")) for _ in range(2))
    ids = integers(2, 6)
    weights = torch.full((2, 6), float("nan"))
    out = Sorted(2 * 6)
    held = torch.full((2, 24), 1e9)
    before = [x, residual, weight, rows, total, gate, held, counters, bias, ids, weights]
    sizes = [NORMED, NORMED, 1e-6, float(MOE.scaling)]
    watched = [rows, total, ids, weights, *out.tensors, held, counters]
    arguments = [*before, *sizes, *out.arguments]
    ptx_interpreter.run(
        ptx or kernel.ptx, kernel.shared, (24, 2), arguments, watched, seed, early=[gate, weight]
    )
    normed, added = reference.add_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, added)
    torch.testing.assert_close(rows, normed, rtol=1e-2, atol=1e-3)
    check_choice(rows.float() @ gate.float().T, bias, ids, weights)
    out.check(ids.flatten())
    assert not counters.any(), "the next launch starts from zeros"


def reduce(kernels: list[Kernel], seed: int, two_shot: bool, ptx: list[str] | None = None) -> None:
    """Three calls on two ranks, each of which starts a call as soon as its own last one is
    complete."""
    torch.manual_seed(seed)
    own = kernels[3 + RANKS * two_shot :]
    rows = 8
    tokens = 2
    buffers = [
        torch.zeros(buffer_bytes(rows, COLUMNS, RANKS, 2) // 2, dtype=torch.int16)
        for _ in range(RANKS)
    ]
    stop = torch.zeros(1, dtype=torch.int32)
    epochs = [torch.zeros(rows, dtype=torch.int32) for _ in range(RANKS)]
    table = torch.tensor([x.data_ptr() for x in [*buffers, stop]])
    weight = torch.randn(COLUMNS).bfloat16()
    launches: list[Launch] = []
    outputs = []
    for call in range(3):
        x = torch.randn(RANKS, tokens, COLUMNS).bfloat16()
        residual = torch.randn(tokens, COLUMNS).bfloat16()
        for rank in range(RANKS):
            total, out = torch.full(
                (2, tokens, COLUMNS), float("nan"), dtype=torch.bfloat16
            ).unbind()
            sizes = [COLUMNS, COLUMNS, COLUMNS, 1e-6, *run_time(rank), 256, rows * COLUMNS]
            arguments = [table, epochs[rank], x[rank], residual, weight, out, total, *sizes]
            after = len(launches) - RANKS if call else None
            launches.append(
                Launch(
                    ptx[rank] if ptx else own[rank].ptx,
                    own[rank].shared,
                    (tokens,),
                    arguments,
                    after,
                )
            )
            outputs.append((x.float().sum(0), residual, total, out))
    Grid(launches, [*buffers, *epochs, stop, *(out for *_, out in outputs)]).by_lot(seed)
    for summed, residual, total, out in outputs:
        assert torch.equal(total, (summed.bfloat16().float() + residual.float()).bfloat16())
        expected = (
            total.double()
            * (total.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
            * weight.double()
        )
        assert (out.double() - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("joint", [False, True])
def test_pairs_are_sorted(kernels: list[Kernel], seed: int | None, joint: bool) -> None:
    sort(kernels, seed)
    choose(kernels, seed, joint=joint)


@pytest.mark.parametrize("seed", [None, 1])
def test_the_router_computes_the_norm_before_it(kernels: list[Kernel], seed: int | None) -> None:
    choose_normed(kernels, seed)


@pytest.mark.parametrize("two_shot", [False, True])
def test_ranks_read_what_is_there(kernels: list[Kernel], two_shot: bool) -> None:
    for seed in range(2):
        reduce(kernels, seed, two_shot)


def missed(run: Callable[[str], None], changed: list[str]) -> int:
    """How many of the changed programs go through."""
    return len(changed) - caught(changed, run)


BROKEN = {  # what is changed, one place at a time
    "acquire": (r"atom(\.global\.\w+)\.(acq_rel|acquire)", r"atom\1.relaxed"),
    "release": (r"atom(\.global\.\w+)\.(acq_rel|release)", r"atom\1.relaxed"),
    "barriers": (r"bar\.sync[^;]*;", ""),
    "the kernel before": (r"griddepcontrol\.wait[^;]*;", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    assert (
        missed(lambda ptx: sort(kernels, 0, ptx), list(changes(kernels[0].ptx, *BROKEN[what]))) == 0
    )
    assert (
        missed(
            lambda ptx: choose(kernels, 0, ptx, joint=True),
            list(changes(kernels[2].ptx, *BROKEN[what])),
        )
        == 0
    )
    both = [list(changes(kernel.ptx, *BROKEN[what])) for kernel in kernels[3:5]]
    assert both[0]
    assert (
        missed(lambda ptx: reduce(kernels, 0, False, [ptx, both[1][both[0].index(ptx)]]), both[0])
        == 0
    )


def test_halves_have_to_alternate(kernels: list[Kernel]) -> None:
    one_half = [
        next(changes(kernel.ptx, r"bfe\.s32(\s+\S+, \S+), 1, 1;", r"bfe.s32\1, 31, 1;"))
        for kernel in kernels[3:5]
    ]
    with pytest.raises(AssertionError, match="may still"):
        reduce(kernels, 0, False, one_half)
