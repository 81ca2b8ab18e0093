"""The block-fp8 product whose programs end together: its Python over torch tensors, partitions as
threads, against fp64, whatever order programs end in; and what it compiles to."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.reference import Weight
from rorqual.ops.triton.gemm import fp8_gemm_sm90_balanced
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
