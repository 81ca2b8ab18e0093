"""The block-fp8 product whose warpgroups share the columns of a tile: its Python over torch
tensors, partitions as threads, against fp64; and what it compiles to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm import fp8_gemm_sm90_sliced
from rorqual.ops.triton.gemm.linear_plan import SlicedPlan
from tests.emulation import gluon_emulator
from tests.emulation.block_fp8 import error, exact, operands, run_compiled
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled

pytestmark = pytest.mark.exhaustive

CASES = [  # tokens, rows, columns, m, slices, stages
    (300, 200, 640, 128, 2, 4),  # 8 rows in the last tile; the last tokens are read earlier
    (300, 136, 1408, 64, 3, 6),  # two chunks of factors; a slice has a block less
    (1, 64, 384, 64, 3, 3),  # one block and one stage a slice
    (129, 192, 768, 64, 2, 10),  # more stages than blocks
    (256, 328, 896, 128, 3, 6),
    (65, 72, 1024, 128, 2, 2),
    (20, 136, 1152, 32, 3, 9),
    (11, 80, 1280, 8, 2, 8),  # two tiles, the second with tokens of the first
]


def tiles(tokens: int, rows: int, m: int) -> int:
    return -(-tokens // m) * -(-rows // 64)


def emulate(
    x: Tensor,
    scale: Tensor,
    weight: Weight,
    m: int,
    slices: int,
    stages: int,
    bias: Tensor | None = None,
    backwards: bool = False,
) -> Tensor:
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    y = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    args = [
        Descriptor(x, [m, 128]),
        scale,
        Descriptor(weight.data, [64, 128]),
        weight.scale,
        bias,
        y,
        Descriptor(y, [m, 64]),
        tokens,
        *scale.stride(),
        rows,
        columns,
        m,
        slices,
        stages,
        bias is not None,
        *fp8_gemm_sm90_sliced.REGISTERS[slices][:2],
        False,
    ]
    grid = (tiles(tokens, rows, m),)
    gluon_emulator.run(fp8_gemm_sm90_sliced, "_sliced_kernel", grid, args, backwards)
    return y


@pytest.mark.parametrize(("tokens", "rows", "columns", "m", "slices", "stages"), CASES)
def test_emulated_result(
    tokens: int, rows: int, columns: int, m: int, slices: int, stages: int
) -> None:
    torch.manual_seed(tokens)
    x, scale, weight = operands(tokens, columns, rows)
    bias = torch.randn(rows).bfloat16() if tokens in (300, 65) else None
    y = emulate(x, scale, weight, m, slices, stages, bias)
    assert error(y, exact(x, scale, weight, bias)) < 2e-3
    again = emulate(x, scale, weight, m, slices, stages, bias, backwards=True)
    assert torch.equal(y, again), "order of programs"
    if tokens == 129:  # a row does not depend on the others, or on the number of stages
        some = [7, 128, 64]
        few = emulate(x[some], scale[some].t().contiguous().t(), weight, m, slices, 2)
        assert torch.equal(few, y[some])


FORMS = [  # tokens, rows, columns, m, slices, stages, bias
    (130, 136, 1280, 128, 2, 4, True),
    (100, 72, 1152, 64, 3, 6, False),
    (64, 64, 1664, 64, 2, 4, True),
    (90, 72, 1408, 128, 3, 6, False),
    (36, 72, 1152, 32, 2, 6, False),
    (5, 72, 1152, 8, 2, 6, True),
]
PLANS = f"""
from rorqual.ops.triton.gemm.fp8_gemm import linear
from rorqual.ops.triton.gemm.fp8_gemm_sm90_sliced import launch
from rorqual.ops.triton.gemm.linear_plan import SlicedPlan
PLANS = [SlicedPlan(128, 2, 6), SlicedPlan(128, 3, 6), SlicedPlan(64, 2, 10),
         SlicedPlan(64, 3, 9), SlicedPlan(32, 2, 16), SlicedPlan(16, 3, 18), SlicedPlan(8, 2, 20)]
for plan in PLANS:
    linear(quantized(plan.m, 7168), block_fp8(2112, 7168), dtype=torch.bfloat16, plan=plan)
for tokens, rows, columns, m, slices, stages, bias in {FORMS}:
    y = torch.empty(tokens, rows, dtype=torch.bfloat16)
    launch(quantized(tokens, columns), block_fp8(rows, columns), y[0].clone() if bias else None, y,
        SlicedPlan(m, slices, stages))
"""
CHECKS = """
assert [k.name for k in launched] == ["_sliced_kernel"] * len(launched), launched
for plan, kernel in zip(PLANS, launched):
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, (plan, found)
    product = f"wgmma.mma_async.sync.aligned.m64n{plan.m}k32"
    assert kernel.ptx.count(product) == 4 * plan.slices, plan
    assert "griddepcontrol.wait" in kernel.ptx
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of PLANS and of FORMS."""
    return compiled(PLANS, tmp_path_factory.mktemp("compiled"), CHECKS)


def test_shared_memory_holds_the_stages_of_published_models() -> None:
    for plan in (SlicedPlan(128, 2, 6), SlicedPlan(128, 3, 6), SlicedPlan(64, 3, 9)):
        assert fp8_gemm_sm90_sliced.stages_of(plan, 7168) == plan.stages
    assert fp8_gemm_sm90_sliced.stages_of(SlicedPlan(128, 2, 6), 16384) == 4


@pytest.mark.parametrize(("m", "slices", "stages"), [(128, 4, 8), (64, 1, 4), (64, 3, 10)])
def test_a_plan_without_a_kernel_is_refused(m: int, slices: int, stages: int) -> None:
    with pytest.raises(ValueError, match=f"{slices} slices of {m} tokens and {stages} stages"):
        SlicedPlan(m, slices, stages)


@pytest.mark.longest
def test_it_compiles_without_spilling(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels[: -len(FORMS)]:
        said = assembled(kernel, tmp_path)
        assert "serialized" not in said
        assert " 0 bytes spill stores" in said


def execute(kernel: Kernel, form: int, seed: int | None = None, ptx: str = "") -> Tensor:
    """What the compiled kernel, or a changed `ptx` of it, makes of random operands; whether it
    is right, and free of races."""
    tokens, rows, columns, m, _, _, biased = FORMS[form]
    torch.manual_seed(form)
    x, scale, weight = operands(tokens, columns, rows)
    bias = torch.randn(rows).bfloat16() if biased else None
    boxes = ((m, 128), (64, 128), (m, 64))
    programs = tiles(tokens, rows, m)
    return run_compiled(kernel, ptx, programs, x, scale, weight, bias, boxes, seed=seed)


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_compiled_code_is_right_and_free_of_races(kernels: list[Kernel], form: int) -> None:
    kernel = kernels[form - len(FORMS)]
    expected = execute(kernel, form)
    for seed in range(4):
        assert torch.equal(execute(kernel, form, seed=seed), expected)


# what is taken out, one place at a time; by what; in which form; how many of the places matter at
# least
BROKEN = {
    "a stage is used or filled before it is there or free, or sums before they are held": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        2,
        6,
    ),
    "a stage that is never given back, factors that are never announced": (
        r"@%p\d+ mbarrier\.arrive[^;]*;",
        "",
        2,
        6,
    ),
    "what threads wrote is sent without a fence": (r"fence\.proxy\.async[^;]*;", "", 0, 1),
    "registers without a fence": (r"wgmma\.fence[^;]*;", "", 0, 2),
    "products not awaited": (r"wgmma\.wait_group[^;]*;", "", 0, 2),
    "inputs of the kernel before": (r"griddepcontrol\.wait[^;]*;", "", 0, 2),
    "threads do not meet": (r"bar\.sync[^;]*;", "", 0, 3),
}


@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    pattern, by, form, matter = BROKEN[what]
    kernel = kernels[form - len(FORMS)]
    assert (
        caught(changes(kernel.ptx, pattern, by), lambda ptx: execute(kernel, form, ptx=ptx))
        >= matter
    ), what
