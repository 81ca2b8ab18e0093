"""Kernels between projections and attention as compiled for Hopper: they read weights alone before
the kernel before has ended, what they fetch into the cache exists, and results are the
reference's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rorqual.ops import reference
from rorqual.ops.interface import TokenPlaces
from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import Kernel, compiled, run_time

pytestmark = pytest.mark.exhaustive

HEADS, GROUPS, SIZE = 4, 2, 128
QUERY, RANK, ROPE = 192, 64, 32
TOKENS = 2
PAGE = 16
LAUNCHES = f"""
from rorqual.ops.interface import GQAWeights, TokenPlaces
from rorqual.ops.triton.attention.rope_kv_write import heads_epilogue, latent_epilogue
from rorqual.ops.triton.attention.split_kv import split_plan
def rows(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)
def places(half):
    return TokenPlaces(torch.empty({TOKENS}, half), torch.empty({TOKENS}, half),
        torch.empty({TOKENS}, dtype=torch.int64))
planes = (rows(3, {PAGE}, {GROUPS}, {SIZE}), rows(3, {PAGE}, {GROUPS}, {SIZE}))
heads_epilogue(rows({TOKENS}, ({HEADS} + 2 * {GROUPS}) * {SIZE}),
    GQAWeights(rows({SIZE}), rows({SIZE}), 1e-6), places({SIZE} // 2), planes)
latent_epilogue(rows({TOKENS}, {QUERY} + {RANK} + {ROPE}), rows({QUERY}), rows({RANK}),
    places({ROPE} // 2), rows(3, {PAGE}, {RANK} + {ROPE}), 1e-6, True)
split_plan(torch.empty({TOKENS}, dtype=torch.int64), 8, 64, 1, 32, 128)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    found = compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"))
    return {kernel.name: kernel for kernel in found}


def places(size: int) -> TokenPlaces:
    angle = torch.rand(TOKENS, size // 2) * 6
    return TokenPlaces(angle.cos(), angle.sin(), torch.tensor([PAGE + 3, 2]))


def run(
    kernel: Kernel, grid: tuple[int, ...], arguments: Sequence[object], early: Sequence[Tensor]
) -> None:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    programs = Grid([Launch(kernel.ptx, kernel.shared, grid, run_time(*arguments))], tensors, early)
    programs.in_turn(range(len(programs.programs)))


def row(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def close(found: Tensor, exact: Tensor) -> None:
    assert (found.double() - exact.double()).norm() / exact.double().norm() < 6e-3


def test_queries_and_keys(kernels: dict[str, Kernel]) -> None:
    torch.manual_seed(0)
    x = row(TOKENS, (HEADS + 2 * GROUPS) * SIZE)
    weights = [row(SIZE), row(SIZE)]
    at = places(SIZE)
    k_plane, v_plane = (torch.zeros(3, PAGE, GROUPS, SIZE).bfloat16() for _ in range(2))
    q = torch.full((TOKENS, HEADS, SIZE), float("nan")).bfloat16()
    strides = [x.stride(0), *k_plane.stride()[1:3], *v_plane.stride()[1:3]]
    given = [x, *weights, at.cos, at.sin, at.slots, k_plane, v_plane, q, *strides, 1e-6]
    run(kernels["_heads_kernel"], (TOKENS, 2), given, weights)
    heads = x.view(TOKENS, -1, SIZE)
    for found, weight, part in (
        (q, weights[0], heads[:, :HEADS]),
        (k_plane.view(-1, GROUPS, SIZE)[at.slots], weights[1], heads[:, HEADS : HEADS + GROUPS]),
    ):
        normed = reference.norm(part, weight, 1e-6)
        close(found, reference.rope(normed, at.cos, at.sin, False))
    assert torch.equal(v_plane.view(-1, GROUPS, SIZE)[at.slots], heads[:, HEADS + GROUPS :])


def test_a_latent_and_its_query(kernels: dict[str, Kernel]) -> None:
    torch.manual_seed(1)
    x = row(TOKENS, QUERY + RANK + ROPE)
    weights = [row(QUERY), row(RANK)]
    at = places(ROPE)
    plane = torch.zeros(3, PAGE, RANK + ROPE).bfloat16()
    q = torch.full((TOKENS, QUERY), float("nan")).bfloat16()
    sizes = [x.stride(0), plane.stride(1), 1e-6, 0, 0]
    given = [x, *weights, at.cos, at.sin, at.slots, plane, q, *sizes]
    run(kernels["_latent_kernel"], (TOKENS, 2), given, weights)
    close(q, reference.norm(x[:, :QUERY], weights[0], 1e-6))
    entry = plane.view(-1, RANK + ROPE)[at.slots]
    close(entry[:, :RANK], reference.norm(x[:, QUERY : QUERY + RANK], weights[1], 1e-6))
    turned = reference.rope(x[:, None, QUERY + RANK :], at.cos, at.sin, True)
    close(entry[:, RANK:], turned[:, 0])


def test_a_schedule_is_in_l2_before_its_kernel_ends(kernels: dict[str, Kernel]) -> None:
    """Attention reads it before it waits for this kernel."""
    lines = [line.strip() for line in kernels["_plan_kernel"].ptx.splitlines()]
    stores = [i for i, line in enumerate(lines) if "st.global" in line]
    (fence,) = (i for i, line in enumerate(lines) if line.startswith("fence.acq_rel.gpu"))
    assert stores
    assert max(stores) < fence
    assert all(line != "ret;" for line in lines[:fence]), "no thread ends without"
    assert not any("griddepcontrol" in line for line in lines)
