"""The streaming block-fp8 product: its Python over torch tensors against fp64, whatever order
programs end in; and what it compiles to."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm import fp8_gemm_sm90_streamk
from tests.emulation import gluon_emulator, ptx_interpreter
from tests.emulation.block_fp8 import error, exact, operands
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled, run_time
from tests.emulation.ptx_memory import TensorMap

pytestmark = pytest.mark.exhaustive

# no whole tiles of rows, five units a tile
ROWS = 400
COLUMNS = 640


def emulate(
    x: Tensor,
    scale: Tensor,
    weight: Weight,
    m: int,
    n: int,
    warps: int,
    stages: int,
    workers: int,
    whole: bool = False,
    bias: Tensor | None = None,
    backwards: bool = False,
) -> Tensor:
    (tokens, columns) = x.shape
    rows = weight.data.shape[0]
    align = columns // 128 if whole else 1
    tiles = -(-rows // n)
    assert workers <= tiles * (columns // 128 // align)
    y = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    blocks = -(-tokens // m)
    partials = torch.full((2 * workers * blocks, m, n), float("nan"))
    counters = torch.zeros(tiles * blocks, dtype=torch.int32)
    chunks = fp8_gemm_sm90_streamk.chunks_of(tiles * (columns // 128), workers, align, m, warps)
    args = [
        Descriptor(x, [m, 128]),
        scale,
        Descriptor(weight.data, [n, 128]),
        weight.scale,
        bias,
        y,
        partials,
        counters,
        tokens,
        *scale.stride(),
        rows,
        rows,
        columns,
        m,
        n,
        stages,
        align,
        *chunks,
        bias is not None,
        warps,
        False,
    ]
    gluon_emulator.run(fp8_gemm_sm90_streamk, "_stream_kernel", (workers, blocks), args, backwards)
    assert not counters.any(), "the next launch starts from zeros"
    return y


CASES = [  # tokens, m, n, warps, stages, workers
    (1, 8, 64, 4, 3, 5),
    (8, 8, 128, 8, 4, 20),  # one unit a program: every tile has five parts
    (13, 16, 128, 8, 2, 7),  # programs end in the middle of tiles
    (64, 64, 128, 8, 2, 3),
    (60, 64, 64, 4, 5, 9),
    (128, 128, 128, 8, 3, 1),  # scales of 20 units in chunks of 64
    (128, 128, 64, 4, 3, 1),  # of 35 in chunks of 32
    (100, 64, 64, 4, 3, 9),  # two blocks of tokens
    (19, 8, 128, 8, 4, 3),
]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("tokens", "m", "n", "warps", "stages", "workers"), CASES)
def test_emulated_result(
    tokens: int, m: int, n: int, warps: int, stages: int, workers: int, backwards: bool
) -> None:
    torch.manual_seed(tokens)
    x, scale, weight = operands(tokens, COLUMNS, ROWS)
    bias = torch.randn(ROWS).bfloat16() if tokens in (1, 60) else None
    y = emulate(x, scale, weight, m, n, warps, stages, workers, bias=bias, backwards=backwards)
    assert error(y, exact(x, scale, weight, bias)) < 2e-3
    if not backwards:
        assert torch.equal(
            y, emulate(x, scale, weight, m, n, warps, stages, workers, bias=bias, backwards=True)
        ), "order of programs"


def test_whole_tiles_need_no_workspace() -> None:
    torch.manual_seed(3)
    x, scale, weight = operands(9, COLUMNS, ROWS)
    y = emulate(x, scale, weight, 16, 64, 4, 3, 3, whole=True)
    assert error(y, exact(x, scale, weight)) < 2e-3


def test_a_row_does_not_depend_on_the_others() -> None:
    """With one configuration: its place, its neighbours and their number change nothing."""
    torch.manual_seed(4)
    x, scale, weight = operands(16, COLUMNS, ROWS)
    y = emulate(x, scale, weight, 16, 64, 4, 3, 6)
    for rows in ([5], [9, 5], [15, 3, 5, 0]):
        some = scale[rows].t().contiguous().t()
        assert torch.equal(emulate(x[rows], some, weight, 16, 64, 4, 3, 6), y[rows]), rows


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (129280, 7168)],
)
@pytest.mark.parametrize(
    ("n", "split", "waves"), [(64, 8, 1), (64, 64, 2), (128, 1, 1), (128, 2, 1), (128, 64, 1)]
)
def test_programs_share_the_units_evenly(
    rows: int, columns: int, n: int, split: int, waves: int
) -> None:
    programs, align = fp8_gemm_sm90_streamk.programs(rows, columns, n, split, waves, 132)
    tiles = -(-rows // n)
    blocks = columns // 128
    groups = tiles * (blocks // align)
    firsts = [groups * worker // programs * align for worker in range(programs + 1)]
    shares = [b - a for a, b in itertools.pairwise(firsts)]
    assert firsts[-1] == tiles * blocks
    assert min(shares) > 0
    assert max(shares) - min(shares) <= align
    assert programs <= 132 * waves
    assert align == blocks or tiles <= 1024
    chunks, chunk = fp8_gemm_sm90_streamk.chunks_of(tiles * blocks, programs, align, 8, 4)
    assert max(shares) <= chunks * chunk < max(shares) + max(align, chunk)
    owners = [
        ((unit // align + 1) * programs - 1) // groups for unit in range(0, tiles * blocks, 7)
    ]
    assert all(
        firsts[owner] <= unit < firsts[owner + 1]
        for owner, unit in zip(owners, range(0, tiles * blocks, 7), strict=True)
    )


PLANS = """
from rorqual.ops.triton.gemm.fp8_gemm import linear
from rorqual.ops.triton.gemm.linear_plan import StreamKPlan
PLANS = [(1, StreamKPlan(8, 128, 8, 6, split=64)), (64, StreamKPlan(64, 64, 4, 8, split=1)),
         (64, StreamKPlan(64, 128, 8, 4, split=64)), (128, StreamKPlan(128, 128, 8, 4, split=64))]
for tokens, plan in PLANS:
    linear(quantized(tokens, 7168), block_fp8(2112, 7168), dtype=torch.bfloat16, plan=plan)
"""
CHECKS = """
assert [k.name for k in launched] == ["_stream_kernel"] * len(launched), launched
for (tokens, plan), kernel in zip(PLANS, launched):
    found = kernel.resources()
    assert found["shared"] <= SHARED[90], (plan, found)
    # outside the loop of products
    assert found["stack"] <= (8 if plan.n * plan.m == 128 * 128 else 0), (plan, found)
    product = "wgmma.mma_async.sync.aligned.m64n%dk32" % plan.m
    assert kernel.ptx.count(product) == 16 == kernel.ptx.count("wgmma.mma_async"), plan
    assert "griddepcontrol.wait" in kernel.ptx
    first = kernel.ptx.index("cp.async.bulk.tensor")
    assert first < kernel.ptx.index("griddepcontrol.wait"), "weights do not wait"
"""
FORMS = [  # tokens, rows, columns, m, n, warps, stages, split, programs, bias
    (5, 200, 640, 8, 64, 4, 3, 8, 3, True),  # tokens and rows fill no tile; stages are filled again
    (8, 264, 640, 8, 128, 8, 2, 8, 4, False),
    (8, 264, 384, 8, 128, 8, 4, 8, 9, True),  # one unit a program
    (13, 200, 384, 16, 64, 4, 2, 1, 3, True),  # whole tiles
    (60, 136, 256, 64, 64, 4, 2, 1, 2, False),
    (64, 328, 640, 64, 64, 4, 3, 8, 5, True),
    (128, 328, 640, 128, 64, 4, 2, 8, 3, False),
    (20, 264, 640, 8, 128, 8, 2, 8, 4, True),  # three blocks of tokens
]
SMALL = f"""
from rorqual.ops.triton.gemm import fp8_gemm_sm90_streamk
from rorqual.ops.triton.gemm.linear_plan import StreamKPlan
for tokens, rows, columns, m, n, warps, stages, split, programs, bias in {FORMS}:
    # room for their scales is a constant
    fp8_gemm_sm90_streamk.multiprocessors = lambda device: programs * -(-tokens // m)
    y = torch.empty(tokens, rows, dtype=torch.bfloat16)
    biases = y[0].clone() if bias else None
    fp8_gemm_sm90_streamk.launch(quantized(tokens, columns), block_fp8(rows, columns), biases, y,
        StreamKPlan(m, n, warps, stages, split, 1))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of PLANS and of FORMS."""
    return compiled(PLANS + SMALL, tmp_path_factory.mktemp("compiled"), CHECKS)


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels[: -len(FORMS)]:
        assert "serialized" not in assembled(kernel, tmp_path)


def execute(
    kernel: Kernel, form: int, backwards: bool = False, seed: int | None = None, ptx: str = ""
) -> Tensor:
    """What the compiled kernel, or a changed `ptx` of it, makes of random operands; whether it
    is right, and free of races."""
    tokens, rows, columns, m, n, _, _, split, programs, biased = FORMS[form]
    torch.manual_seed(form)
    x, scale, weight = operands(tokens, columns, rows)
    bias = torch.randn(rows).bfloat16() if biased else None
    y = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    tiles = -(-rows // n)
    blocks = -(-tokens // m)
    partials = torch.full((2 * programs * blocks, m, n), float("nan"))
    counters = torch.zeros(tiles * blocks, dtype=torch.int32)
    shared = [partials, counters] if split > 1 else []
    arguments = [
        TensorMap(x, (m, 128), 128),
        scale,
        TensorMap(weight.data, (n, 128), 128),
        weight.scale,
        bias,
        y,
        *shared,
        tokens,
        *run_time(scale.stride(0)),
        scale.stride(1),
        rows,
    ]
    arguments = [x for x in arguments if x is not None]
    ptx_interpreter.run(
        ptx or kernel.ptx,
        kernel.shared,
        (programs, blocks),
        arguments,
        [y, *shared],
        seed,
        backwards,
        [weight.data, weight.scale],
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


MEET = r"bar\.sync[^;]*;"
APART = r"(?:(?!bar\.sync)[\s\S])*?"
# what is taken out, one place at a time; by what; how many of the places matter at least
BROKEN = {
    "a stage is multiplied before it is there": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        2,
    ),
    "a phase that never turns": (r"xor\.b32\s+(%r\d+), (\1), (%r\d+);", r"mov.b32 \1, \2;", 1),
    "barriers start without a fence": (r"fence\.proxy\.async[^;]*;", "", 1),
    "an unannounced copy": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", 4),
    "registers without a fence": (r"wgmma\.fence[^;]*;", "", 1),
    "products not awaited": (r"wgmma\.wait_group\S+\s+0;", "", 1),
    "inputs of the kernel before": (r"griddepcontrol\.wait[^;]*;", "", 1),
    "counted in without releasing": ("acq_rel", "acquire", 1),
    "counted in without acquiring": ("acq_rel", "release", 1),
    # before a part is counted in; before others read the count
    "threads do not meet": (MEET, "", 2),
    # anywhere between the products of a unit and the next one's: the compiler adds two to ours,
    # each of which would do
    "a stage is filled that others multiply": (
        rf"{MEET}({APART}){MEET}({APART}){MEET}(?={APART}mbarrier\.try_wait)",
        r"\1\2",
        1,
    ),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("form", [0, 5])
def test_races_are_found(kernels: list[Kernel], form: int, what: str) -> None:
    pattern, by, matter = BROKEN[what]
    kernel = kernels[form - len(FORMS)]
    assert (
        caught(changes(kernel.ptx, pattern, by), lambda ptx: execute(kernel, form, ptx=ptx))
        >= matter
    ), what
