"""Norms as compiled for Hopper: the kernel that adds up what experts gave leaves the bits of the
two kernels it stands for, and what either quantizes on the way is what a kernel of its own makes
of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import Kernel, compiled

pytestmark = pytest.mark.exhaustive

TOKENS = 2
COLUMNS = 1152
TOP_K = 3
LAUNCHES = f"""
from dataclasses import replace
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.triton.moe import combine
from rorqual.ops.triton.rowwise import quantize, norm
from rorqual.ops.deferred_sum import DeferredMoESum
combine.ROW_REGISTERS = 0  # without assembler text, which changes no value
x = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
rows = x({TOKENS}, {COLUMNS})
gave = DeferredMoESum(x({TOKENS * TOP_K}, {COLUMNS}), None, torch.empty({TOKENS}, {TOP_K}), None,
    combine.combine)
for quant in (None, "fp8_group"):
    norm.add_norm(rows, rows, x({COLUMNS}), 1e-6, quant)
    combine.combine_add_norm(gave, rows, x({COLUMNS}), 1e-6, quant)
gave.total()
quantize.quantize(rows)
gave = replace(gave, padded=PaddedRows(torch.empty(1, dtype=torch.int64), 1))
combine.combine_add_norm(gave, rows, x({COLUMNS}), 1e-6)
gave.total()
"""
# those that quantize second
ALONE = (0, 2)
JOINT = (1, 3)
SUM = 4
QUANTIZE = 5
JOINT_PADDED = 6
SUM_PADDED = 7


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"))


def run(
    kernel: Kernel, grid: tuple[int, ...], *arguments: object, early: Sequence[Tensor] = ()
) -> None:
    programs = Grid(
        [Launch(kernel.ptx, kernel.shared, grid, list(arguments))],
        [x for x in arguments if isinstance(x, Tensor)],
        early,
    )
    programs.in_turn(range(len(programs.programs)))


def empty() -> Tensor:
    return torch.full((TOKENS, COLUMNS), float("nan"), dtype=torch.bfloat16)


def packed() -> list[Tensor]:
    """Room for bytes and scales."""
    return [torch.zeros(TOKENS, COLUMNS, dtype=torch.uint8), torch.zeros(COLUMNS // 128, TOKENS)]


@pytest.mark.parametrize("pack", [False, True], ids=["", "quantized"])
def test_norms_leave_the_same_bits(kernels: list[Kernel], pack: bool) -> None:
    torch.manual_seed(0)
    y = torch.randn(TOKENS * TOP_K, COLUMNS).bfloat16()
    residual = torch.randn(TOKENS, COLUMNS).bfloat16()
    weights = torch.rand(TOKENS, TOP_K)
    factor = (torch.rand(COLUMNS) + 0.5).bfloat16()
    summed = empty()
    run(kernels[SUM], (TOKENS, 3), y, weights, summed)
    strides = [TOKENS] if pack else [0, 0]  # of the scales; ones are constants
    normed = empty()
    total = empty()
    beside = packed() if pack else []
    run(
        kernels[ALONE[pack]],
        (TOKENS,),
        summed,
        residual,
        factor,
        normed,
        total,
        *beside,
        *[COLUMNS] * 3,
        1e-6,
        *strides,
        early=[factor],
    )
    found = empty()
    stream = empty()
    joint = packed() if pack else []
    run(
        kernels[JOINT[pack]],
        (TOKENS,),
        y,
        weights,
        residual,
        factor,
        found,
        stream,
        *joint,
        *[COLUMNS] * 2,
        1e-6,
        *strides,
        early=[factor],
    )
    assert torch.equal(stream, total)
    assert torch.equal(found, normed)
    exact = (summed.double() + residual.double()).bfloat16().double()
    exact = exact * (exact.square().mean(1, keepdim=True) + 1e-6).rsqrt() * factor.double()
    assert ((normed.double() - exact).abs() <= 2**-7 * exact.abs()).all()
    if pack:
        behind = packed()
        run(kernels[QUANTIZE], (TOKENS, 2), normed, *behind, COLUMNS, COLUMNS, *strides)
        for mine, other, own in zip(beside, joint, behind, strict=True):
            assert torch.equal(mine, own)
            assert torch.equal(other, own)


def test_sums_of_padding_rows(kernels: list[Kernel]) -> None:
    """Zero, with NaN for results of their experts; the number of the others is read before the
    previous kernel has ended."""
    torch.manual_seed(1)
    y = torch.randn(TOKENS * TOP_K, COLUMNS).bfloat16()
    y[TOP_K:] = float("nan")
    residual = torch.randn(TOKENS, COLUMNS).bfloat16()
    weights = torch.rand(TOKENS, TOP_K)
    factor = (torch.rand(COLUMNS) + 0.5).bfloat16()
    requests = torch.tensor([1])
    plain = empty()
    run(kernels[SUM], (TOKENS, 3), y, weights, plain)
    summed = empty()
    count = [requests, 1, 0]
    run(kernels[SUM_PADDED], (TOKENS, 3), y, weights, summed, *count, early=[requests])
    assert torch.equal(summed[0], plain[0])
    assert not summed[1].any()
    want = empty()
    total = empty()
    sizes = [*[COLUMNS] * 3, 1e-6, 0, 0]
    given = [summed, residual, factor, want, total, *sizes]
    run(kernels[ALONE[0]], (TOKENS,), *given, early=[factor])
    found = empty()
    stream = empty()
    early = [factor, requests]
    given = [y, weights, residual, factor, found, stream, *count, *[COLUMNS] * 2, 1e-6, 0, 0]
    run(kernels[JOINT_PADDED], (TOKENS,), *given, early=early)
    assert torch.equal(stream, total)
    assert torch.equal(found, want)
