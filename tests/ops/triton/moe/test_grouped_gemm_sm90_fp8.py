"""Grouped block-fp8 products of many rows: the Python of both over torch tensors against fp64;
what they compile to, executed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.reference import Weight
from rorqual.ops.triton.moe import grouped_gemm_sm90_fp8
from tests.emulation import gluon_emulator, ptx_interpreter
from tests.emulation.block_fp8 import error, exact, operands
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled, run_time
from tests.emulation.ptx_memory import TensorMap

pytestmark = pytest.mark.exhaustive

SHIFT = 3  # of a row to its pair in the order


class SortedRows:
    """Experts with so many rows each, in blocks of m, followed by unused rows. x, weights, and the
    result in fp64."""

    def __init__(self, counts: list[int], m: int, rows: int, columns: int, unused: int = 5):
        torch.manual_seed(sum(counts))
        total = sum(counts)
        self.m = m
        self.rows = rows
        self.columns = columns
        self.total = total
        self.pairs = total + unused
        made = [operands(8, columns, rows)[2] for _ in counts]
        self.weight = Weight(
            torch.stack([w.data for w in made]), torch.stack([w.scale for w in made])
        )
        self.x, self.scale, _ = operands(self.pairs, columns, rows)
        starts = [sum(counts[:expert]) for expert in range(len(counts))]
        spans = [
            (e, at, start + n)
            for e, (start, n) in enumerate(zip(starts, counts, strict=True))
            for at in range(start, start + n, m)
        ]
        limit = len(spans) + 2
        self.blocks = torch.full((4, limit), -(10**6), dtype=torch.int32)
        for index, (expert, at, end) in enumerate(spans):
            self.blocks[:, index] = torch.tensor([expert, at, end, SHIFT])
        self.count = torch.tensor([len(spans)], dtype=torch.int32)
        self.limit = limit
        self.taken = torch.zeros(1, dtype=torch.int32)
        self.places = torch.randperm(self.pairs).int()
        self.order = torch.cat((torch.full((SHIFT,), -(10**6), dtype=torch.int32), self.places))
        self.exact = torch.full((self.pairs, rows), float("nan"), dtype=torch.float64)
        for expert, (start, n) in enumerate(zip(starts, counts, strict=True)):
            own = slice(start, start + n)
            self.exact[own] = exact(self.x[own], self.scale[own], made[expert])

    @property
    def flat(self) -> Tensor:
        return self.weight.data.view(-1, self.columns)

    def check(self, y: Tensor, scatter: bool) -> None:
        found = y[self.places.long()] if scatter else y
        if self.total:
            assert error(found[: self.total], self.exact[: self.total]) < 2e-3
        assert found[self.total :].isnan().all(), "an unused row was stored"
        assert not self.taken.any(), "the counter of tiles was not reset"


CASES = [  # rows of each expert, m, rows of weights, columns, stages, programs, scatter
    ([70, 0, 130, 1], 128, 256, 256, 2, 3, False),
    # four chunks of rows and one of 44, one, a part of one
    ([300, 64, 20], 256, 128, 384, 3, 2, True),
    ([130, 192], 256, 128, 256, 2, 1, False),  # three chunks: two and one
    ([129], 128, 384, 128, 4, 5, True),  # more programs than tiles of a round
    ([70, 193, 400, 130], 192, 256, 256, 2, 2, True),
    ([0, 0], 128, 256, 256, 2, 3, False),
    ([0, 1, 0], 192, 128, 256, 2, 4, True),  # more programs than tiles
]


@pytest.mark.parametrize(("counts", "m", "rows", "columns", "stages", "programs", "scatter"), CASES)
def test_emulated_result(
    counts: list[int], m: int, rows: int, columns: int, stages: int, programs: int, scatter: bool
) -> None:
    case = SortedRows(counts, m, rows, columns)
    y = torch.full((case.pairs, rows), float("nan"), dtype=torch.bfloat16)
    warpgroups = 3 if m == 192 else 2
    args = [
        Descriptor(case.x, [64, 128]),
        case.scale,
        Descriptor(case.flat, [128, 128]),
        case.weight.scale,
        y,
        case.order,
        case.blocks,
        case.count,
        case.limit,
        case.taken,
        *case.scale.stride(),
        rows,
        columns,
        m // 64,
        stages,
        scatter,
        warpgroups,
        *grouped_gemm_sm90_fp8.REGISTERS[warpgroups],
        False,
    ]
    gluon_emulator.run(grouped_gemm_sm90_fp8, "_grouped_kernel", (programs,), args)
    case.check(y, scatter)


PLANS = """
from rorqual.ops.triton.moe import grouped_gemm_sm90_fp8
from rorqual.ops.triton.moe.align import empty_blocks
PLANS = [(256, 4), (128, 6), (192, 5)]
def launch(counts, m, rows, columns, stages, scatter, picks):
    blocks = empty_blocks(picks, len(counts), m, torch.device("cpu"), buckets=True)
    weight = Weight(torch.empty(len(counts), rows, columns, dtype=FP8), torch.empty(len(counts),
        rows // 128, columns // 128))
    grouped_gemm_sm90_fp8.product(quantized(picks, columns), weight, blocks, torch.bfloat16,
        stages, scatter)
for m, stages in PLANS:
    launch([0] * 32, m, 4096, 7168, stages, False, 8192)
    launch([0] * 32, m, 7168, 2048, stages, True, 8192)
"""
CHECKS = """
assert [k.name for k in launched] == ["_grouped_kernel"] * len(launched), launched
for index, kernel in enumerate(launched[: 2 * len(PLANS)]):
    (m, stages), found = PLANS[index // 2], kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, (m, stages, found)
    found = kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n128k32")
    assert found == 2 * 4 * (3 if m == 256 else 1) + 4 * (m == 192), m
    assert "st.global.v4.b32" in kernel.ptx and "griddepcontrol.wait" in kernel.ptx
"""
STEPS = 100_000  # the longest form takes 8,000
# as CASES
FORMS = [
    ([70, 0, 131, 1], 128, 256, 256, 2, 2, False),
    ([200, 20, 150], 256, 128, 256, 2, 1, True),
    ([160, 20], 192, 128, 256, 2, 2, False),
    ([0, 0], 128, 256, 256, 2, 3, False),
    ([0, 1, 0], 192, 128, 256, 2, 4, True),
]
SMALL = f"""
for counts, m, rows, columns, stages, _, scatter in {FORMS}:
    launch(counts, m, rows, columns, stages, scatter, sum(counts) + 5)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of PLANS and of FORMS."""
    return compiled(PLANS + SMALL, tmp_path_factory.mktemp("compiled"), CHECKS)


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels[: -len(FORMS)]:
        assert "serialized" not in assembled(kernel, tmp_path)


def execute(kernel: Kernel, form: int, seed: int | None = None, ptx: str = "") -> Tensor:
    """What the compiled kernel, or a changed `ptx` of it, makes of random operands; whether it
    is right, and free of races."""
    counts, m, rows, columns, _, programs, scatter = FORMS[form]
    case = SortedRows(counts, m, rows, columns)
    y = torch.full((case.pairs, rows), float("nan"), dtype=torch.bfloat16)
    maps = [TensorMap(case.x, (64, 128), 128), TensorMap(case.flat, (128, 128), 128)]
    strides = [*run_time(case.scale.stride(0)), case.scale.stride(1)]
    arguments = [
        maps[0],
        case.scale,
        maps[1],
        case.weight.scale,
        y,
        case.order,
        case.blocks,
        case.count,
        case.limit,
        case.taken,
        *strides,
    ]
    ptx_interpreter.run(
        ptx or kernel.ptx, kernel.shared, (programs,), arguments, [y, case.taken], seed, steps=STEPS
    )
    case.check(y, scatter)
    return y.nan_to_num(7)


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_compiled_code_is_right_and_free_of_races(kernels: list[Kernel], form: int) -> None:
    kernel = kernels[form - len(FORMS)]
    assert torch.equal(execute(kernel, form), execute(kernel, form, seed=form))


# what is taken out, one place at a time; by what; how many of the places matter at least
BROKEN = {
    "a stage is used or filled before it is there or free": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        3,
    ),
    "a phase that never turns": (r"xor\.b32\s+(%r\d+), (\1), (%r\d+);", r"mov.b32 \1, \2;", 2),
    "a stage that is never given back or announced": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", 4),
    "products not awaited": (r"wgmma\.wait_group[^;]*;", "", 2),
    "a warpgroup does not meet": (r"bar\.sync[^;]*;", "", 4),
}


@pytest.mark.parametrize("form", [0, 2])
@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str, form: int) -> None:
    pattern, by, matter = BROKEN[what]
    kernel = kernels[form - len(FORMS)]
    changed = changes(kernel.ptx, pattern, by)
    assert caught(changed, lambda ptx: execute(kernel, form, ptx=ptx)) >= matter, what
