"""The warp-specialized block-fp8 product: its Python over torch tensors, partitions as threads,
against fp64; and what it compiles to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm import fp8_gemm_sm90_persistent
from tests.emulation import gluon_emulator
from tests.emulation.block_fp8 import error, exact, operands, run_compiled
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled, run_time

pytestmark = pytest.mark.exhaustive

CASES = [  # tokens, rows, columns, m, stages, programs, parts of a tile
    (300, 320, 384, 256, 3, 2, 1),  # 64 rows in the last tile; the last half tile has no tokens
    (300, 448, 384, 128, 4, 3, 1),
    (257, 296, 256, 256, 2, 1, 1),  # 40 rows in the last tile
    (130, 400, 256, 128, 4, 5, 1),  # fewer tiles in the last round than programs
    (4500, 320, 128, 256, 3, 7, 1),  # two groups of token tiles
    (1, 192, 640, 128, 4, 2, 1),  # one tile a program
    (100, 2112, 256, 128, 5, 7, 1),  # three tiles or two, two units each: narrow last ones
    (513, 192, 384, 256, 2, 5, 1),  # a token in the last tile; stages for as long as factors
    (300, 320, 512, 128, 4, 15, 2),  # a chunk without tokens; narrow tiles are whole
    (257, 448, 1024, 128, 6, 42, 4),  # narrow tiles of two parts
    (130, 128, 768, 128, 5, 6, 3),
    (385, 192, 640, 192, 4, 3, 1),  # three warpgroups; a token in the last tile
    (200, 2112, 256, 192, 4, 7, 1),
    (40, 192, 256, 192, 3, 2, 1),  # chunks without tokens
    (100, 128, 384, 192, 4, 1, 1),
]


def set_aside(
    tokens: int, rows: int, m: int, split: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """(partials, counters) of a launch."""
    if split == 1:
        return None, None
    tiles = -(-tokens // m) * -(-rows // 128)
    partials = torch.full((tiles, 2, split, 64, 128), float("nan"))
    return partials, torch.zeros(4 * tiles, dtype=torch.int32)


def emulate(
    x: Tensor,
    scale: Tensor,
    weight: Weight,
    m: int,
    stages: int,
    programs: int,
    split: int = 1,
    bias: Tensor | None = None,
    backwards: bool = False,
) -> Tensor:
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    y = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    args = [
        Descriptor(x, [64, 128]),
        scale,
        Descriptor(weight.data, [128, 128]),
        weight.scale,
        bias,
        y,
        Descriptor(y, [64, 128]),
        *set_aside(tokens, rows, m, split),
        tokens,
        *scale.stride(),
        rows,
        columns,
        m,
        split,
        stages,
        bias is not None,
        *fp8_gemm_sm90_persistent.REGISTERS[3 if m == 192 else 2][:2],
        False,
    ]
    gluon_emulator.run(fp8_gemm_sm90_persistent, "_tall_kernel", (programs,), args, backwards)
    return y


@pytest.mark.parametrize(("tokens", "rows", "columns", "m", "stages", "programs", "split"), CASES)
def test_emulated_result(
    tokens: int, rows: int, columns: int, m: int, stages: int, programs: int, split: int
) -> None:
    torch.manual_seed(tokens)
    x, scale, weight = operands(tokens, columns, rows)
    bias = torch.randn(rows).bfloat16() if tokens == 300 else None
    y = emulate(x, scale, weight, m, stages, programs, split, bias)
    assert error(y, exact(x, scale, weight, bias)) < 2e-3
    again = emulate(x, scale, weight, m, stages, programs, split, bias, backwards=True)
    assert torch.equal(y, again), "order of programs"
    if (tokens, split) == (130, 1):  # a row does not depend on the others
        some = [7, 129, 64]
        assert torch.equal(
            emulate(
                x[some], scale[some].t().contiguous().t(), weight, m, stages, programs - 1, split
            ),
            y[some],
        )


PLANS = """
from rorqual.ops.triton.gemm.fp8_gemm import linear
from rorqual.ops.triton.gemm.linear_plan import PersistentPlan
PLANS = [(2112, PersistentPlan(256, 4)), (4096, PersistentPlan(256, 4)),
         (2112, PersistentPlan(192, 4)), (4096, PersistentPlan(192, 4)),
         (4096, PersistentPlan(128, 6)),
         (2112, PersistentPlan(128, 6, split=4))]
for rows, plan in PLANS:
    tokens = 4096 if plan.split == 1 else 256  # many tiles are not split
    assert plan.split in (1, plan.parts(rows, 7168, -(-tokens // plan.m), 132)[0])
    linear(quantized(tokens, 7168), block_fp8(rows, 7168), dtype=torch.bfloat16, plan=plan)
"""
CHECKS = """
assert [k.name for k in launched] == ["_tall_kernel"] * len(launched), launched
for (rows, plan), kernel in zip(PLANS, launched):
    found = kernel.resources()
    # with narrow tiles and three warpgroups one value, loaded once by each partition
    stack = 8 if plan.m == 192 and rows % 128 else 0
    assert found["shared"] <= SHARED[90] and found["stack"] == stack, (rows, plan, found)
    # two or three warpgroups, one product or two of each unit, in narrow tiles too
    product = "wgmma.mma_async.sync.aligned"
    whole = 4 * plan.m // 64
    assert kernel.ptx.count(product + ".m64n128k32") == whole, plan
    assert kernel.ptx.count(product + ".m64n64k32") == (whole if rows % 128 else 0), plan
    most = 160 if plan.m == 192 else 232
    assert f"setmaxnreg.inc.sync.aligned.u32 \\t{most};" in kernel.ptx
    assert "griddepcontrol.wait" in kernel.ptx
    assert ("atom.global.gpu.release" in kernel.ptx) == (plan.split > 1)
"""
FORMS = [  # tokens, rows, columns, m, stages, programs, bias, parts of a tile
    (256, 200, 256, 256, 2, 1, True, 1),  # 72 rows in the last tile
    (200, 168, 256, 128, 4, 1, False, 1),  # narrow last tiles, after which another follows
    (300, 320, 384, 256, 3, 3, True, 1),  # a chunk without tokens; three programs
    (130, 192, 640, 128, 4, 3, True, 1),
    (260, 264, 384, 128, 5, 4, False, 1),
    (190, 192, 1024, 128, 4, 12, True, 4),
    (400, 200, 640, 192, 4, 2, True, 1),
    (150, 168, 384, 192, 4, 1, False, 1),
]
SMALL = f"""
from rorqual.ops.triton.gemm.fp8_gemm_sm90_persistent import launch
from rorqual.ops.triton.gemm.linear_plan import PersistentPlan
for tokens, rows, columns, m, stages, _, bias, split in {FORMS}:
    y = torch.empty(tokens, rows, dtype=torch.bfloat16)
    launch(quantized(tokens, columns), block_fp8(rows, columns), y[0].clone() if bias else None, y,
        PersistentPlan(m, stages, split))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of PLANS and of FORMS."""
    return compiled(PLANS + SMALL, tmp_path_factory.mktemp("compiled"), CHECKS)


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for number, kernel in enumerate(kernels[: -len(FORMS)]):
        said = assembled(kernel, tmp_path)
        assert "serialized" not in said
        # number 2 of PLANS: one value, stored at the kernel's start
        assert f" {4 if number == 2 else 0} bytes spill stores" in said


def execute(kernel: Kernel, form: int, seed: int | None = None, ptx: str = "") -> Tensor:
    """What the compiled kernel, or a changed `ptx` of it, makes of random operands; whether it
    is right, and free of races."""
    tokens, rows, columns, m, _, programs, biased, split = FORMS[form]
    torch.manual_seed(form)
    x, scale, weight = operands(tokens, columns, rows)
    bias = torch.randn(rows).bfloat16() if biased else None
    shared = run_time(*set_aside(tokens, rows, m, split))
    boxes = ((64, 128), (128, 128), (64, 64))
    y = run_compiled(kernel, ptx, programs, x, scale, weight, bias, boxes, shared, seed)
    assert not any(one.any() for one in shared[1:]), "the next launch starts from zeros"
    return y


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_compiled_code_is_right_and_free_of_races(kernels: list[Kernel], form: int) -> None:
    kernel = kernels[form - len(FORMS)]
    assert torch.equal(execute(kernel, form), execute(kernel, form, seed=form))


# what is taken out, one place at a time; by what; in which form; how many of the places matter at
# least
BROKEN = {
    "a stage is used or filled before it is there or free": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        1,
        8,
    ),
    "a phase that never turns": (r"xor\.b32\s+(%r\d+), (\1), (%r\d+);", r"mov.b32 \1, \2;", 1, 3),
    "a stage is given back by one warpgroup, or full without its factors": (
        r"(mbarrier\.init[^;]*), 2;",
        r"\1, 1;",
        1,
        4,
    ),
    "a stage that is never given back or announced": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", 1, 8),
    "what threads wrote is sent without a fence": (r"fence\.proxy\.async[^;]*;", "", 0, 5),
    "registers without a fence": (r"wgmma\.fence[^;]*;", "", 1, 4),
    "products not awaited": (r"wgmma\.wait_group[^;]*;", "", 1, 4),
    "a store that still reads, also at the end": (r"cp\.async\.bulk\.wait_group[^;]*;", "", 0, 6),
    "a store that no group holds": (r"cp\.async\.bulk\.commit_group[^;]*;", "", 0, 4),
    "inputs of the kernel before": (r"griddepcontrol\.wait[^;]*;", "", 1, 2),
    "parts of a tile are counted before they are there": (
        r"gpu\.(release|acquire)\.",
        "gpu.relaxed.",
        5,
        8,
    ),
    "threads do not meet": (r"bar\.sync[^;]*;", "", 0, 10),
}


@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    pattern, by, form, matter = BROKEN[what]
    kernel = kernels[form - len(FORMS)]
    assert (
        caught(changes(kernel.ptx, pattern, by), lambda ptx: execute(kernel, form, ptx=ptx))
        >= matter
    ), what
