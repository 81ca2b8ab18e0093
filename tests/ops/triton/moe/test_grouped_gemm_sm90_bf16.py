"""Grouped GEMMs of 16-bit weights and many rows: what they compile to, executed, against fp64."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from tests.emulation import ptx_interpreter
from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled, run_time
from tests.emulation.ptx_memory import TensorMap
from tests.ops.triton.moe.sorted_rows import Experts

pytestmark = pytest.mark.exhaustive

B = torch.bfloat16


PLANS = """
from rorqual.ops.triton.moe import grouped_gemm_sm90_bf16 as kernels
from rorqual.ops.triton.moe.align import empty_blocks
def launch(experts, hidden, inner, top_k, stages, pairs):
    blocks = empty_blocks(pairs, experts, 128, torch.device("cpu"), buckets=True)
    gate_up = Weight(torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16), None)
    down = Weight(torch.empty(experts, hidden, inner, dtype=torch.bfloat16), None)
    assert kernels.fits(down, torch.bfloat16)
    x = torch.empty(pairs // top_k, hidden, dtype=torch.bfloat16)
    h = kernels.gate_up_product(x, gate_up, blocks, top_k, stages)
    kernels.down_product(h, down, blocks, stages)
launch(128, 2048, 768, 8, 4, 8192)
launch(64, 2048, 1408, 6, 4, 6144)
"""
CHECKS = """
assert [k.name for k in launched] == ["_grouped_kernel_bf16"] * len(launched), launched
for kernel in launched[:4]:
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, found
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 2 * 4
    assert "st.global.v4.b32" in kernel.ptx and "griddepcontrol.wait" in kernel.ptx
"""
STEPS = 100_000  # the longest form takes 8,000
# rows of each expert, hidden, inner, top_k, stages, programs
FORMS = [
    ([70, 0, 131, 1], 256, 128, 3, 2, 2),
    ([129, 20, 60], 512, 256, 2, 3, 3),
    ([0, 0, 0, 0], 256, 128, 3, 2, 2),
    ([0, 1, 0, 0], 256, 128, 3, 2, 4),  # more programs than tiles
]
SMALL = f"""
for counts, hidden, inner, top_k, stages, _ in {FORMS}:
    launch(len(counts), hidden, inner, top_k, stages, -(-(sum(counts) + 5) // top_k) * top_k)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of PLANS and of FORMS, both GEMMs of each."""
    return compiled(PLANS + SMALL, tmp_path_factory.mktemp("compiled"), CHECKS)


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels[:4]:
        assert "serialized" not in assembled(kernel, tmp_path)


def execute(
    kernel: Kernel, form: int, gated: bool, seed: int | None = None, ptx: str = ""
) -> Tensor:
    """What the compiled kernel, or a changed `ptx` of it, makes of random operands; whether it
    is right, and free of races."""
    counts, hidden, inner, top_k, _, programs = FORMS[form]
    case = Experts(counts, hidden, inner, top_k)
    exact = case.gated if gated else case.out
    x = case.x if gated else case.h
    weight = case.gate_up if gated else case.down
    y = torch.full(exact.shape, float("nan"), dtype=B)
    flat = TensorMap(weight.view(-1, weight.shape[2]), (128, 64), 128)
    rows = None if gated else TensorMap(x, (64, 64), 128)
    taken = torch.zeros(1, dtype=torch.int32)
    arguments = [
        x,
        *run_time(rows),
        flat,
        y,
        case.order,
        case.blocks,
        case.count,
        case.limit,
        taken,
    ]
    ptx_interpreter.run(
        ptx or kernel.ptx, kernel.shared, (programs,), arguments, [y, taken], seed, steps=STEPS
    )
    assert not taken.any(), "the counter of tiles was not reset"
    found = y if gated else y[case.places.long()]
    error = (found[: case.total].double() - exact[: case.total]).norm()
    assert error <= 3e-3 * exact[: case.total].norm()
    assert found[case.total :].isnan().all(), "an unused row was stored"
    return y.nan_to_num(7)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_compiled_code_is_right_and_free_of_races(
    kernels: list[Kernel], form: int, gated: bool
) -> None:
    kernel = kernels[4 + 2 * form + (not gated)]
    assert torch.equal(execute(kernel, form, gated), execute(kernel, form, gated, seed=form))


@pytest.mark.parametrize("seed", [None, 1])
def test_both_products_take_tiles_from_one_counter(kernels: list[Kernel], seed: int | None) -> None:
    counts, hidden, inner, top_k, _, programs = FORMS[0]
    case = Experts(counts, hidden, inner, top_k)
    h = torch.full(case.gated.shape, float("nan"), dtype=B)
    y = torch.full(case.out.shape, float("nan"), dtype=B)
    taken = torch.zeros(1, dtype=torch.int32)
    launches = []
    for kernel, x, weight, out in (
        (kernels[4], case.x, case.gate_up, h),
        (kernels[5], h, case.down, y),
    ):
        rows = TensorMap(x, (64, 64), 128) if launches else None
        flat = TensorMap(weight.view(-1, weight.shape[2]), (128, 64), 128)
        arguments = [
            x,
            *run_time(rows),
            flat,
            out,
            case.order,
            case.blocks,
            case.count,
            case.limit,
            taken,
        ]
        after = 0 if launches else None
        launches.append(Launch(kernel.ptx, kernel.shared, (programs,), arguments, after))
    grid = Grid(launches, [h, y, taken], steps=STEPS)
    grid.in_turn(range(2 * programs)) if seed is None else grid.by_lot(seed)
    want = torch.cat(
        [
            case.gated[at : at + n].to(B).double() @ case.down[expert].double().T
            for expert, (at, n) in enumerate(zip([0, *accumulate(counts)], counts, strict=False))
        ]
    )
    error = (y[case.places.long()][: case.total].double() - want).norm()
    assert error <= 5e-3 * want.norm()
    assert not taken.any()


# what is taken out, one place at a time; by what; how many of the places matter at least
BROKEN = {
    "a stage is used or filled before it is there or free": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        3,
    ),
    "a stage that is never given back or announced": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", 4),
    "rows that are not announced": (r"cp\.async\.mbarrier\.arrive[^;]*;", "", 1),
    "products not awaited": (r"wgmma\.wait_group[^;]*;", "", 2),
    # not those of the queue: the compiler puts its own beside them
    "warps do not meet": (r"bar\.sync[^;]*;", "", 4),
}


@pytest.mark.longest
@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    pattern, by, matter = BROKEN[what]
    kernel = kernels[4]
    assert (
        caught(changes(kernel.ptx, pattern, by), lambda ptx: execute(kernel, 0, True, ptx=ptx))
        >= matter
    ), what
