"""Grouped 16-bit products of many rows: the Python of both over torch tensors against fp64; what
they compile to, executed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.triton.moe import grouped_gemm_sm90
from tests.emulation import gluon_emulator, ptx_interpreter
from tests.emulation.block_fp8 import error
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled, run_time
from tests.emulation.ptx_memory import TensorMap

pytestmark = pytest.mark.exhaustive

SHIFT = 3  # how far behind its row a pick stands in the order
TOP_K = 2


class Picks:
    """Experts with so many rows each, in blocks of 192; the last rows of the order are nobody's.
    The first product (top_k above 0) reads tokens, the second rows in order. x, weights and what
    fp64 makes of them."""

    def __init__(self, counts: list[int], rows: int, columns: int, top_k: int):
        torch.manual_seed(sum(counts))
        total = sum(counts)
        self.rows = rows
        self.columns = columns
        self.top_k = top_k
        self.total = total
        self.picks = -(-total // TOP_K) * TOP_K + 2 * TOP_K
        self.weight = torch.randn(len(counts), rows, columns).bfloat16()
        given = self.picks // top_k if top_k else self.picks
        # tokens have something between them that nobody may read
        wide = torch.full((given, columns + 16), float("nan"), dtype=torch.bfloat16)
        self.x = wide[:, :columns] if top_k else torch.empty(given, columns).bfloat16()
        self.x.copy_(torch.randn(given, columns) / columns**0.5)
        starts = [sum(counts[:expert]) for expert in range(len(counts))]
        spans = [
            (e, at, start + n)
            for e, (start, n) in enumerate(zip(starts, counts, strict=True))
            for at in range(start, start + n, grouped_gemm_sm90.M)
        ]
        self.limit = len(spans) + 2
        self.blocks = torch.full((4, self.limit), -(10**6), dtype=torch.int32)
        for index, (expert, at, end) in enumerate(spans):
            self.blocks[:, index] = torch.tensor([expert, at, end, SHIFT])
        self.count = torch.tensor([len(spans)], dtype=torch.int32)
        self.places = torch.randperm(self.picks).int()
        self.order = torch.cat((torch.full((SHIFT,), -(10**6), dtype=torch.int32), self.places))
        width = rows // 2 if top_k else rows
        self.y = torch.full((self.picks, width), float("nan"), dtype=torch.bfloat16)
        self.exact = torch.full((self.picks, width), float("nan"), dtype=torch.float64)
        found = self.x[self.places.long() // top_k] if top_k else self.x
        for expert, (start, n) in enumerate(zip(starts, counts, strict=True)):
            own = slice(start, start + n)
            both = found[own].double() @ self.weight[expert].double().T
            gate, up = both[:, : rows // 2], both[:, rows // 2 :]
            self.exact[own] = torch.nn.functional.silu(gate) * up if top_k else both

    @property
    def flat(self) -> Tensor:
        return self.weight.view(-1, self.columns)

    @property
    def x_row(self) -> int:
        return self.x.stride(0) if self.top_k else 0

    @property
    def after_maps(self) -> list[object]:
        return [self.y, self.order, self.blocks, self.count, self.limit]

    def check(self) -> None:
        found = self.y if self.top_k else self.y[self.places.long()]
        assert error(found[: self.total], self.exact[: self.total]) < 3e-3
        assert found[self.total :].isnan().all(), "a row that is nobody's was stored"


CASES = [  # rows of each expert, rows of weights, columns, top_k, together, stages, programs
    ([70, 0, 200, 1], 256, 128, TOP_K, 16, 3, 3),
    ([400, 64, 20], 512, 192, 0, 2, 2, 2),
    ([129, 192, 130], 256, 64, 0, 1, 3, 1),
    ([193], 768, 72, TOP_K, 16, 2, 5),  # the last columns are half of a stage
    ([193], 256, 72, 0, 16, 2, 1),
    ([30, 140], 176, 128, TOP_K, 16, 2, 2),  # tiles are wider than gate and up are
    ([30, 140], 336, 128, 0, 16, 2, 2),
    ([300, 20], 256, 64, TOP_K, 16, 4, 1),  # one stage a tile
]


@pytest.mark.parametrize(
    ("counts", "rows", "columns", "top_k", "together", "stages", "programs"), CASES
)
def test_emulated_result(
    counts: list[int],
    rows: int,
    columns: int,
    top_k: int,
    together: int,
    stages: int,
    programs: int,
) -> None:
    case = Picks(counts, rows, columns, top_k)
    x = case.x if top_k else Descriptor(case.x, [64, 64])
    constants = [rows, columns, top_k, together, stages, *grouped_gemm_sm90.REGISTERS, False]
    gluon_emulator.run(
        grouped_gemm_sm90,
        "_grouped_sm90_kernel",
        (programs,),
        [x, case.x_row, Descriptor(case.flat, [128, 64]), *case.after_maps, *constants],
    )
    case.check()


PLANS = """
from rorqual.ops.triton.moe import grouped_gemm_sm90
from rorqual.ops.triton.moe.align import empty_blocks
def launch(experts, rows, columns, top_k, stages, picks, dtype=torch.bfloat16, apart=0):
    blocks = empty_blocks(picks, experts, 192, torch.device("cpu"), buckets=False)
    weight = Weight(torch.empty(experts, rows, columns, dtype=dtype))
    if top_k:
        x = torch.empty(picks // top_k, columns + apart, dtype=dtype)[:, :columns]
        grouped_gemm_sm90.gate_up(x, weight, blocks, top_k, stages)
    else:
        x = torch.empty(picks, columns, dtype=dtype)
        grouped_gemm_sm90.down(x, weight, blocks, stages)
launch(128, 1536, 2048, 8, 4, 65536)
launch(128, 2048, 768, 0, 4, 65536)
launch(64, 2816, 2048, 6, 4, 49152, torch.float16)
"""
CHECKS = """
assert [k.name for k in launched] == ["_grouped_sm90_kernel"] * len(launched), launched
for kernel in launched[:3]:
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, found
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n128k16") == 3 * 2 * 4
    assert "griddepcontrol.wait" in kernel.ptx
assert launched[0].ptx.count("cp.async.cg.shared.global") == 12, "16 bytes a thread"
"""
# rows of each expert, rows of weights, columns, top_k, stages, programs
FORMS = [([70, 0, 200, 1], 256, 128, TOP_K, 2, 2), ([200, 20], 512, 192, 0, 3, 1)]
SMALL = f"""
launch(4, 256, 128, {TOP_K}, 2, 276, apart=16)
launch(2, 512, 192, 0, 3, 224)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of PLANS and of FORMS."""
    return compiled(PLANS + SMALL, tmp_path_factory.mktemp("compiled"), CHECKS)


def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels[: -len(FORMS)]:
        assert "serialized" not in assembled(kernel, tmp_path)


def execute(kernel: Kernel, form: int, seed: int | None = None, ptx: str = "") -> Tensor:
    """What the compiled kernel, or a changed `ptx` of it, makes of random operands; whether it
    is right, and free of races."""
    counts, rows, columns, top_k, _, programs = FORMS[form]
    case = Picks(counts, rows, columns, top_k)
    weights = TensorMap(case.flat, (128, 64), 128)
    if top_k:
        arguments = [case.x, *run_time(case.x_row), weights, *case.after_maps]
    else:
        arguments = [TensorMap(case.x, (64, 64), 128), *run_time(0), weights, *case.after_maps]
    ptx_interpreter.run(ptx or kernel.ptx, kernel.shared, (programs,), arguments, [case.y], seed)
    case.check()
    return case.y.nan_to_num(7)


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_compiled_code_is_right_and_free_of_races(kernels: list[Kernel], form: int) -> None:
    kernel = kernels[form - len(FORMS)]
    assert torch.equal(execute(kernel, form), execute(kernel, form, seed=form))


# what is taken out, one place at a time; by what; how many of the places matter at least
BROKEN = {
    "a stage is used or filled before it is there or free": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        4,
    ),
    "a phase that never turns": (r"xor\.b32\s+(%r\d+), (\1), (%r\d+);", r"mov.b32 \1, \2;", 2),
    "a stage that is never given back or announced": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", 4),
    "products not awaited": (r"wgmma\.wait_group[^;]*;", "", 3),
    "a warpgroup does not meet": (r"bar\.sync[^;]*;", "", 3),
    "what threads copied is read without a fence": (r"fence\.proxy\.async[^;]*;", "", 1),
}


@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    pattern, by, matter = BROKEN[what]
    kernel = kernels[-len(FORMS)]
    assert (
        caught(changes(kernel.ptx, pattern, by), lambda ptx: execute(kernel, 0, ptx=ptx)) >= matter
    ), what
