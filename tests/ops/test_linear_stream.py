"""The streaming block-fp8 product: its Python over torch tensors against fp64, whatever order programs end in; and what it compiles to."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

import triton

from rorqual.ops.reference import Weight
from rorqual.ops.triton import linear_stream
from tests.ops import gluon_emulator
from tests.ops.block_fp8 import error, exact, operands
from tests.ops.gluon_emulator import Descriptor

ROWS, COLUMNS = 400, 640  # no whole tiles of rows, five units a tile


def emulate(x: Tensor, scale: Tensor, weight: Weight, m: int, n: int, warps: int, stages: int, workers: int, whole: bool = False,
            bias: Tensor | None = None, backwards: bool = False) -> Tensor:  # fmt: skip
    (tokens, columns), rows = x.shape, weight.data.shape[0]
    align, tiles = columns // 128 if whole else 1, -(-rows // n)
    assert workers <= tiles * (columns // 128 // align)
    y = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    partials = torch.full((2 * workers, m, n), float("nan"))
    counters = torch.zeros(tiles, dtype=torch.int32)
    args = [
        Descriptor(x, [m, 128]), scale, Descriptor(weight.data, [n, 128]), weight.scale, bias, y, partials, counters, tokens,
        *scale.stride(), rows, rows, columns, m, n, stages, align, bias is not None, warps, False,
    ]  # fmt: skip
    gluon_emulator.run(linear_stream, "_stream_kernel", (workers,), args, backwards)
    assert not counters.any(), "the next launch starts from zeros"
    return y


CASES = [  # tokens, m, n, warps, stages, workers
    (1, 8, 64, 4, 3, 5),
    (8, 8, 128, 8, 4, 20),  # one unit a program: every tile has five parts
    (13, 16, 128, 4, 2, 7),  # two pieces a tile, programs end in the middle of tiles
    (64, 64, 256, 8, 2, 3),  # two weight scales a tile; the second piece of the last tile lies past the weights
    (60, 64, 64, 4, 5, 9),
    (128, 128, 256, 8, 3, 4),  # one piece after the other
]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("tokens", "m", "n", "warps", "stages", "workers"), CASES)
def test_emulated_result(tokens: int, m: int, n: int, warps: int, stages: int, workers: int, backwards: bool) -> None:
    torch.manual_seed(tokens)
    x, scale, weight = operands(tokens, COLUMNS, ROWS)
    bias = torch.randn(ROWS).bfloat16() if tokens in (1, 60) else None
    y = emulate(x, scale, weight, m, n, warps, stages, workers, bias=bias, backwards=backwards)
    assert error(y, exact(x, scale, weight, bias)) < 2e-3
    if not backwards:
        assert torch.equal(y, emulate(x, scale, weight, m, n, warps, stages, workers, bias=bias, backwards=True)), "order of programs"


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


@pytest.mark.parametrize(("rows", "columns"), [(2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (129280, 7168)])
@pytest.mark.parametrize(("n", "split", "waves"), [(64, 8, 1), (64, 64, 2), (128, 1, 1), (128, 2, 1), (256, 64, 1)])
def test_programs_share_the_units_evenly(rows: int, columns: int, n: int, split: int, waves: int) -> None:
    programs, align = linear_stream.programs(rows, columns, n, split, waves, 132)
    tiles, blocks = -(-rows // n), columns // 128
    groups = tiles * (blocks // align)
    firsts = [groups * worker // programs * align for worker in range(programs + 1)]
    shares = [b - a for a, b in itertools.pairwise(firsts)]
    assert firsts[-1] == tiles * blocks
    assert min(shares) > 0
    assert max(shares) - min(shares) <= align
    assert programs <= 132 * waves
    assert align == blocks or tiles <= 1024
    owners = [((unit // align + 1) * programs - 1) // groups for unit in range(0, tiles * blocks, 7)]
    assert all(firsts[owner] <= unit < firsts[owner + 1] for owner, unit in zip(owners, range(0, tiles * blocks, 7), strict=True))


COMPILE = """
import torch
from rorqual.ops.reference import FP8, Weight
from rorqual.ops.triton.fp8 import Quantised
from rorqual.ops.triton.linear_fp8 import LinearPlan, linear
from tests.ops.cross_compile import SHARED, compiling
PLANS = [(1, LinearPlan(8, 128, 8, 6, split=64, stream=True)), (64, LinearPlan(64, 64, 4, 8, split=1, stream=True)),
         (64, LinearPlan(64, 256, 8, 4, split=64, stream=True)), (128, LinearPlan(128, 256, 8, 4, split=64, stream=True))]
with compiling(90) as launched:
    for tokens, plan in PLANS:
        weight = Weight(torch.empty(2112, 7168, dtype=FP8), torch.empty(17, 56))
        linear(Quantised.empty(tokens, 7168, torch.device("cpu")), weight, dtype=torch.bfloat16, plan=plan)
assert [k.name for k in launched] == ["_stream_kernel"] * len(PLANS), launched
for (tokens, plan), kernel in zip(PLANS, launched):
    found, pieces = kernel.resources(), plan.n // (16 * plan.warps)
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, (plan, found)
    # each unit is multiplied once
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n%dk32" % plan.m) == 4 * pieces == kernel.ptx.count("wgmma.mma_async"), plan
    assert "griddepcontrol.wait" in kernel.ptx
    first = kernel.ptx.index("cp.async.bulk.tensor")
    assert first < kernel.ptx.index("griddepcontrol.wait"), "weights do not wait"
    open("{folder}/%d_%d.ptx" % (plan.m, plan.n), "w").write(kernel.ptx)
"""


def test_it_compiles_to_products_that_overlap(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    command = [sys.executable, "-c", COMPILE.replace("{folder}", str(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    for text in tmp_path.glob("*.ptx"):
        command = [str(assembler), "-v", "--gpu-name=sm_90a", str(text), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "serialized" not in done.stderr, done.stderr
