"""The block-fp8 product whose programs end together: its Python over torch tensors, partitions as
threads, against fp64, whatever order programs end in; and what it compiles to."""

from __future__ import annotations

import itertools
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm import fp8_gemm_sm90_balanced, fp8_gemm_sm90_persistent
from tests.emulation import gluon_emulator, ptx_interpreter
from tests.emulation.block_fp8 import error, exact, operands
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled, run_time
from tests.emulation.ptx_memory import TensorMap

pytestmark = pytest.mark.exhaustive

CASES = [  # tokens, rows, columns, m, stages, programs, cut, loop
    (300, 320, 384, 256, 3, 2, False, "plain"),  # 64 rows in the last tile; an empty half tile
    (130, 400, 256, 128, 4, 5, False, "turns"),  # fewer tiles in the last round than programs
    (4500, 320, 128, 256, 3, 7, False, "plain"),  # two groups of token tiles
    (1, 192, 640, 128, 4, 7, True, "plain"),  # one unit or two a program: tiles of four parts
    (1, 192, 640, 128, 4, 10, True, "turns"),  # one unit a program
    (100, 2112, 256, 128, 5, 7, True, "plain"),  # whole tiles too; narrow last tiles are cut
    (130, 400, 640, 128, 4, 3, True, "turns"),  # 16 rows in the last tile
    (257, 296, 384, 256, 2, 5, True, "plain"),  # 40 rows in the last tile; a token in the last
    (300, 320, 384, 256, 3, 4, True, "turns"),
    (513, 192, 384, 256, 2, 7, True, "plain"),
    (513, 448, 256, 128, 4, 3, True, "turns"),
    (1, 192, 640, 128, 4, 10, True, "overlap"),
    (1, 192, 640, 128, 4, 7, True, "overlap"),
    (100, 2112, 256, 128, 5, 7, True, "overlap"),
    (130, 400, 640, 128, 4, 3, True, "overlap"),
    (300, 320, 384, 128, 6, 4, False, "overlap"),
]


def emulate(
    x: Tensor,
    scale: Tensor,
    weight: Weight,
    m: int,
    stages: int,
    programs: int,
    cut: bool,
    loop: str,
    bias: Tensor | None = None,
    backwards: bool = False,
) -> Tensor:
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    y = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    partials = torch.full((2 * programs, m, 128), float("nan"))
    counters = torch.zeros(4 * programs, dtype=torch.int32)
    args = [
        Descriptor(x, [m, 128]),
        scale,
        Descriptor(weight.data, [128, 128]),
        weight.scale,
        bias,
        y,
        Descriptor(y, [64, 128]),
        partials,
        counters,
        tokens,
        *scale.stride(),
        rows,
        columns,
        m,
        stages,
        cut,
        loop == "turns",
        loop == "overlap",
        bias is not None,
        *fp8_gemm_sm90_balanced.REGISTERS,
        False,
    ]
    gluon_emulator.run(
        fp8_gemm_sm90_balanced,
        "_balanced_kernel",
        (programs,),
        args,
        backwards,
        _at_once=lambda x: x,
    )
    assert not counters.any(), "the next launch starts from zeros"
    return y


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "m", "stages", "programs", "cut", "loop"), CASES
)
def test_emulated_result(
    tokens: int,
    rows: int,
    columns: int,
    m: int,
    stages: int,
    programs: int,
    cut: bool,
    loop: str,
) -> None:
    torch.manual_seed(tokens)
    x, scale, weight = operands(tokens, columns, rows)
    bias = torch.randn(rows).bfloat16() if tokens in (1, 300) else None
    y = emulate(x, scale, weight, m, stages, programs, cut, loop, bias)
    assert error(y, exact(x, scale, weight, bias)) < 2e-3
    assert torch.equal(
        y, emulate(x, scale, weight, m, stages, programs, cut, loop, bias, backwards=True)
    ), "order of programs"


@pytest.mark.parametrize("processors", [132, 7])
@pytest.mark.parametrize("split", [1, 3, 64])
@pytest.mark.parametrize("tiles", [1, 34, 133, 264])
def test_every_unit_has_one_program(tiles: int, split: int, processors: int) -> None:
    """What the kernel's Python makes of the numbers, program after program."""
    units = 5
    workers, cut = fp8_gemm_sm90_balanced.programs(tiles, units, split, processors)
    assert workers <= min(processors, tiles * split)
    found = []
    for worker in range(workers):
        tools = gluon_emulator.Language((workers,), (worker,))
        found.append(units_of(tools, tiles, units, cut))
    flat = sorted(itertools.chain.from_iterable(found))
    assert flat == list(range(tiles * units))
    sizes = [len(one) for one in found]
    assert max(sizes) - min(sizes) <= (1 if cut else units)


def units_of(tools: gluon_emulator.Language, tiles: int, units: int, cut: bool) -> list[int]:
    names = {**vars(fp8_gemm_sm90_persistent), **vars(fp8_gemm_sm90_balanced), "gl": tools}
    for name, value in list(names.items()):
        if hasattr(value, "is_gluon"):
            names[name] = types.FunctionType(value.fn.__code__, names, name)
    run = names["run_of"](torch.tensor(128 * tiles), 128, 128, units, cut)
    count = int(run.units + run.rounds * units)
    places = [names["unit_at"](index, run, 128, units) for index in range(count)]
    return [int(m_tile * units + block) for m_tile, _, block in places]


PLANS = """
from rorqual.ops.triton.gemm.fp8_gemm import linear
from rorqual.ops.triton.gemm.linear_plan import PersistentPlan
PLANS = [(2112, PersistentPlan(256, 4, 64, "plain")), (2112, PersistentPlan(128, 6, 64, "overlap")),
         (4096, PersistentPlan(256, 4, 1, "turns")), (4096, PersistentPlan(128, 6, 64, "plain"))]
for rows, plan in PLANS:
    linear(quantized(4096, 7168), block_fp8(rows, 7168), dtype=torch.bfloat16, plan=plan)
"""
CHECKS = """
assert [k.name for k in launched] == ["_balanced_kernel"] * len(launched), launched
for (rows, plan), kernel in zip(PLANS, launched):
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, (rows, plan, found)
    # two warpgroups, one product or two of each unit; of overlapping ones the first of a tile, two
    # turns of the loop and one behind it
    product = "wgmma.mma_async.sync.aligned"
    whole = 2 * 4 * (4 if plan.loop == "overlap" else plan.m // 128)
    assert kernel.ptx.count(product + ".m64n128k32") == whole, plan
    assert kernel.ptx.count(product + ".m64n64k32") == (whole if rows % 128 else 0), plan
    assert "setmaxnreg.inc.sync.aligned.u32 \\t232;" in kernel.ptx
    assert "griddepcontrol.wait" in kernel.ptx
"""
FORMS = [  # tokens, rows, columns, m, stages, split, programs, bias, loop
    (200, 200, 256, 256, 2, 64, 3, True, "plain"),  # 72 rows in the last tile
    (100, 168, 1280, 128, 4, 64, 3, False, "overlap"),  # narrow last tiles
    (300, 320, 384, 256, 3, 64, 4, True, "turns"),  # whole tiles too; an empty half tile
    (130, 192, 640, 128, 4, 64, 3, True, "turns"),
    (200, 168, 256, 128, 4, 1, 3, False, "plain"),  # whole tiles only
    (260, 264, 384, 128, 4, 64, 4, False, "overlap"),
]
SMALL = f"""
from rorqual.ops.triton.gemm import fp8_gemm_sm90_balanced, fp8_gemm_sm90_persistent
from rorqual.ops.triton.gemm.linear_plan import PersistentPlan
for tokens, rows, columns, m, stages, split, programs, bias, loop in {FORMS}:
    fp8_gemm_sm90_balanced.multiprocessors = lambda device: programs  # says if tiles are cut
    y = torch.empty(tokens, rows, dtype=torch.bfloat16)
    fp8_gemm_sm90_balanced.launch(quantized(tokens, columns), block_fp8(rows, columns),
        y[0].clone() if bias else None, y, PersistentPlan(m, stages, split, loop))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of PLANS and of FORMS."""
    return compiled(PLANS + SMALL, tmp_path_factory.mktemp("compiled"), CHECKS)


def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels[: -len(FORMS)]:
        said = assembled(kernel, tmp_path)
        assert "serialized" not in said
        assert "0 bytes spill stores" in said


def execute(
    kernel: Kernel, form: int, seed: int | None = None, ptx: str = "", backwards: bool = False
) -> Tensor:
    """What the compiled kernel, or a changed `ptx` of it, makes of random operands; whether it
    is right, and free of races."""
    tokens, rows, columns, m, _, split, programs, biased, _ = FORMS[form]
    torch.manual_seed(form)
    x, scale, weight = operands(tokens, columns, rows)
    bias = torch.randn(rows).bfloat16() if biased else None
    y = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    maps = [
        TensorMap(x, (m, 128), 128),
        TensorMap(weight.data, (128, 128), 128),
        TensorMap(y, (64, 64), 128),
    ]
    partials = torch.full((2 * programs, m, 128), float("nan"))
    counters = torch.zeros(4 * programs, dtype=torch.int32)
    shared = [partials, counters] if split > 1 else []
    strides = [*run_time(scale.stride(0)), scale.stride(1)]
    arguments = [
        maps[0],
        scale,
        maps[1],
        weight.scale,
        *run_time(bias),
        y,
        maps[2],
        *shared,
        tokens,
        *strides,
    ]
    ptx_interpreter.run(
        ptx or kernel.ptx,
        kernel.shared,
        (programs,),
        arguments,
        [y, *shared],
        seed,
        backwards,
        [weight.data],
    )
    assert not counters.any(), "the next launch starts from zeros"
    assert error(y, exact(x, scale, weight, bias)) < 2e-3
    return y


@pytest.mark.parametrize("form", range(len(FORMS)))
def test_compiled_code_is_right_and_free_of_races(kernels: list[Kernel], form: int) -> None:
    kernel = kernels[form - len(FORMS)]
    y = execute(kernel, form)
    assert torch.equal(y, execute(kernel, form, backwards=True))
    assert torch.equal(y, execute(kernel, form, seed=form))


# what is taken out, one place at a time; by what; in which form; how many of the places matter at
# least
BROKEN = {
    "a stage is used or filled before it is there or free": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        1,
        12,
    ),
    "a phase that never turns": (r"xor\.b32\s+(%r\d+), (\1), (%r\d+);", r"mov.b32 \1, \2;", 5, 3),
    "a stage is given back by one warpgroup, or full without its factors": (
        r"(mbarrier\.init[^;]*), 2;",
        r"\1, 1;",
        1,
        4,
    ),
    "a stage that is never given back or announced": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", 1, 12),
    "what threads wrote is sent without a fence": (r"fence\.proxy\.async[^;]*;", "", 3, 3),
    "registers without a fence": (r"wgmma\.fence[^;]*;", "", 1, 4),
    "products not awaited": (r"wgmma\.wait_group[^;]*;", "", 1, 8),
    "a store that still reads, also at the end": (r"cp\.async\.bulk\.wait_group[^;]*;", "", 3, 2),
    "inputs of the kernel before": (r"griddepcontrol\.wait[^;]*;", "", 1, 2),
    "counted in without releasing": ("acq_rel", "acquire", 1, 2),
    "counted in without acquiring": ("acq_rel", "release", 1, 2),
    "threads do not meet": (r"bar\.sync[^;]*;", "", 1, 8),
}


@pytest.mark.longest
@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    pattern, by, form, matter = BROKEN[what]
    kernel = kernels[form - len(FORMS)]
    assert (
        caught(changes(kernel.ptx, pattern, by), lambda ptx: execute(kernel, form, ptx=ptx))
        >= matter
    ), what
