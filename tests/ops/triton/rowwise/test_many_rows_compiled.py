"""The forms for few and for many rows, as compiled for Hopper: the same bits from random rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.emulation.ptx_kernels import Kernel, compiled
from tests.ops.triton.rowwise.test_norms_compiled import run

pytestmark = pytest.mark.exhaustive

ROWS = 11
COLUMNS = 3072
TOP_K = 3
HEADS = 12
HEAD = 16
PICKS = ROWS * TOP_K
BLOCK = 16  # rows of an expert
LIMIT = 8
QUERY = 384
RANK = 128
ROTARY = 16
LAUNCHES = f"""
from rorqual.ops.interface import TokenPlaces
from rorqual.ops.triton.attention import rope_kv_write
from rorqual.ops.triton.moe import align, combine, expert_rows
from rorqual.ops.triton.rowwise import quantize, norm
x = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
rows = x({ROWS}, {COLUMNS})
weights, angle = torch.empty({ROWS}, {TOP_K}), torch.empty({ROWS}, {HEAD} // 2)
heads = x({ROWS}, {HEADS}, {HEAD})
norm.RESIDENT_WARPS = 24  # three programs of eight warps
norm.multiprocessors = rope_kv_write.multiprocessors = lambda device: 1
quantize.multiprocessors = lambda device: 0  # four tiles a program
angles = torch.empty({ROWS}, {ROTARY} // 2)
places = TokenPlaces(angles, angles, torch.empty({ROWS}, dtype=torch.int64))
for many in (False, True):
    if many:
        norm.FEW_ROWS = quantize.FEW_ROWS = combine.FEW_TOKENS = rope_kv_write.FEW_TOKENS = 0
    norm.MANY_ROWS = 0 if many else 100
    rope_kv_write.LATENT_PROGRAMS = 3 if many else 100
    blocks = align.empty_blocks({PICKS}, 5, {BLOCK}, torch.device("cpu"), buckets=not many)
    assert blocks.limit == {LIMIT}
    norm.add_norm(rows, rows, x({COLUMNS}), 1e-6, False)
    norm.add_norm(rows, rows, x({COLUMNS}), 1e-6, True)
    norm.swiglu(x({ROWS}, 2 * {COLUMNS}))
    norm.swiglu_fp8(x({ROWS}, 2 * {COLUMNS}))
    quantize.quantize(rows)
    combine.combine(x({PICKS}, {COLUMNS}), None, weights, rows)
    combine.combine(x({PICKS}, {COLUMNS}), torch.empty({ROWS}, {TOP_K}).int(), weights, None)
    for interleaved in (False, True):
        rope_kv_write.rope(heads, angle, angle, interleaved)
    expert_rows.in_order_wide(rows, blocks, {TOP_K})
    expert_rows.in_order(quantized({ROWS}, {COLUMNS}), blocks, {TOP_K})
    expert_rows.in_order(x({PICKS}, {COLUMNS}), blocks, 1)
    expert_rows.joined(x({PICKS}, 2 * {COLUMNS}), blocks)
    for quant in (False, True):
        rope_kv_write.latent_epilogue(x({ROWS}, {QUERY + RANK + ROTARY}), x({QUERY}), x({RANK}),
            places, x(4, 4, {RANK + ROTARY}), 1e-6, True, quant)
"""
NAMES = (
    *("norm", "norm quantized", "swiglu", "swiglu quantized", "quantize", "sum", "sum of some"),
    *("rope by halves", "rope interleaved", "wide", "order", "order quantized", "join"),
    *("latent", "latent quantized"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Kernel, Kernel]]:
    """For few rows and for many, by name."""
    found = compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"))
    assert len(found) == 2 * len(NAMES)
    each = len(NAMES)
    return dict(zip(NAMES, zip(found[:each], found[each:], strict=True), strict=True))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def unwritten(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


class Made:
    """Rows in fp8 and their scales: what a kernel writes, and what its arguments say of them."""

    def __init__(self, rows: int, columns: int = COLUMNS):
        self.data = torch.full((rows, columns), 127, dtype=torch.uint8)
        self.scale = torch.full((columns // 128, rows), float("nan"))
        self.strides = [rows]  # the other one is 1, a constant

    @property
    def tensors(self) -> list[Tensor]:
        return [self.data, self.scale]


def same(one: list[Tensor], other: list[Tensor], written: int | None = None) -> None:
    """written: so many rows of the first dimension, or of the second of fp32 scales."""
    for few, many in zip(one, other, strict=True):
        assert torch.equal(few.nan_to_num(7.0), many.nan_to_num(7.0))
        wide = few.float() if few.dtype != torch.uint8 else few.float().where(few != 127, torch.nan)
        rows = wide.T if few.dtype == torch.float32 else wide
        there = len(rows) if written is None else written
        assert not rows[:there].isnan().any()
        assert rows[there:].isnan().all()


@pytest.mark.parametrize("pack", [False, True], ids=["", "quantized"])
def test_norms(kernels: dict[str, tuple[Kernel, Kernel]], pack: bool) -> None:
    x = random(ROWS, COLUMNS)
    residual = random(ROWS, COLUMNS)
    weight = random(COLUMNS)
    found: list[list[Tensor]] = []
    for kernel, grid, rest in zip(
        kernels["norm quantized" if pack else "norm"], (ROWS, 3), ([], [ROWS]), strict=True
    ):
        out, total, made = unwritten(ROWS, COLUMNS), unwritten(ROWS, COLUMNS), Made(ROWS)
        bytes_made = made.tensors if pack else []
        strides = made.strides if pack else [0, 0]
        run(
            kernel, (grid,), x, residual, weight, out, total, *bytes_made, *[COLUMNS] * 3, 1e-6,
            *strides, *rest,
        )  # fmt: skip
        found.append([out, total, *bytes_made])
    same(*found)


@pytest.mark.parametrize("pack", [False, True], ids=["", "quantized"])
def test_swiglu(kernels: dict[str, tuple[Kernel, Kernel]], pack: bool) -> None:
    x = random(ROWS, 2 * COLUMNS) * 9
    x[3, 5] = -100.0  # whose exponential is none of fp32's normal numbers
    x[4, 7] = 100.0
    found: list[list[Tensor]] = []
    few, many = kernels["swiglu quantized" if pack else "swiglu"]
    for kernel, grid, rest in ((few, (ROWS, 3), []), (many, (2,), [ROWS, 3])):
        out, made = unwritten(ROWS, COLUMNS), Made(ROWS)
        to: list[Any] = [*made.tensors, COLUMNS, 2 * COLUMNS, *made.strides]
        if not pack:
            to = [out, COLUMNS, 2 * COLUMNS, 0, 0]
        run(kernel, grid, x, *to, *rest)
        found.append(made.tensors if pack else [out])
    same(*found)


def test_quantize(kernels: dict[str, tuple[Kernel, Kernel]]) -> None:
    x = random(ROWS, COLUMNS)
    found = []
    few, many = kernels["quantize"]
    for kernel, grid, rest in ((few, (ROWS, 3), []), (many, (2,), [ROWS, 3])):
        made = Made(ROWS)
        run(kernel, grid, x, *made.tensors, COLUMNS, COLUMNS, *made.strides, *rest)
        found.append(made.tensors)
    same(*found)


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_sums(kernels: dict[str, tuple[Kernel, Kernel]], some: bool) -> None:
    y = random(PICKS, COLUMNS)
    ids = torch.where(torch.rand(PICKS) < 0.3, -1, 1).int()
    weights = torch.rand(ROWS, TOP_K)
    base = random(ROWS, COLUMNS)
    if some:
        y[ids < 0] = float("nan")
    found = []
    few, many = kernels["sum of some" if some else "sum"]
    for kernel, grid in ((few, (ROWS, 6)), (many, (ROWS,))):
        out = unwritten(ROWS, COLUMNS)
        run(kernel, grid, y, *([ids, weights] if some else [weights, base]), out)
        found.append([out])
    same(*found)


@pytest.mark.parametrize("way", ["by halves", "interleaved"])
def test_rope(kernels: dict[str, tuple[Kernel, Kernel]], way: str) -> None:
    x = random(ROWS, HEADS, HEAD)
    angle = torch.randn(ROWS, HEAD // 2) * 3
    found = []
    few, many = kernels[f"rope {way}"]
    for kernel, grid in ((few, (ROWS, 2)), (many, (ROWS,))):
        out = x.clone()
        strides = [HEADS * HEAD, HEAD] * 2
        run(kernel, grid, out, out, angle.cos(), angle.sin(), HEADS, *strides)
        assert not torch.equal(out, x)
        found.append([out])
    same(*found)


class Sorted:
    """Picks of random experts or of none, as sorting leaves them."""

    def __init__(self) -> None:
        ids = torch.randint(-1, 5, (PICKS,))
        self.here = int((ids >= 0).sum())
        self.order = torch.argsort(torch.where(ids < 0, 99, ids), stable=True).int()
        self.places = torch.full((PICKS,), -1, dtype=torch.int32)
        self.places[self.order[: self.here].long()] = torch.arange(self.here, dtype=torch.int32)
        spans = []
        start = 0
        for expert in range(5):
            count = int((ids == expert).sum())
            spans += [
                [expert, first, start + count, 0] for first in range(start, start + count, BLOCK)
            ]
            start += count
        self.count = torch.tensor([len(spans)], dtype=torch.int32)
        self.blocks = torch.full((4, LIMIT), -(10**6), dtype=torch.int32)
        self.blocks[:, : len(spans)] = torch.tensor(spans).T
        self.arguments = [self.blocks, self.count, LIMIT]


@pytest.mark.parametrize("kind", ["wide", "order", "order quantized"])
def test_rows_in_order(kernels: dict[str, tuple[Kernel, Kernel]], kind: str) -> None:
    picks = Sorted()
    rows = PICKS if kind == "order quantized" else ROWS
    x = torch.randint(0, 120, (rows, COLUMNS)).to(torch.uint8)
    given: list[Tensor] = [x, torch.rand(COLUMNS // 128, rows)]
    if kind != "order":
        given = [random(rows, COLUMNS)]
    given_strides = [rows] if kind == "order" else [0, 0]
    found = []
    for many, kernel in enumerate(kernels[kind]):
        made, out = Made(PICKS), unwritten(PICKS, COLUMNS)
        to = [out] if kind == "wide" else made.tensors
        strides = [COLUMNS, COLUMNS, *given_strides, *([0, 0] if kind == "wide" else made.strides)]
        where = [picks.places] if many else [picks.order, *picks.arguments]
        grid = (rows, 1) if many else (LIMIT * BLOCK, 1)
        run(kernel, grid, *given, *to, *where, *strides)
        found.append(to)
    same(*found, written=picks.here)


def test_joined_rows(kernels: dict[str, tuple[Kernel, Kernel]]) -> None:
    picks = Sorted()
    both = random(PICKS, 2 * COLUMNS) * 3
    few, many = kernels["join"]
    found = []
    for kernel, grid, rest in ((few, (LIMIT * BLOCK, 2), []), (many, (4,), [3])):
        made = Made(PICKS)
        run(kernel, grid, both, *made.tensors, *picks.arguments, COLUMNS, *made.strides, *rest)
        found.append(made.tensors)
    same(*found, written=picks.here)


@pytest.mark.parametrize("pack", [False, True], ids=["", "quantized"])
def test_latents(kernels: dict[str, tuple[Kernel, Kernel]], pack: bool) -> None:
    width = QUERY + RANK + ROTARY
    x = random(ROWS, width)
    angle = torch.randn(ROWS, ROTARY // 2) * 3
    given = [x, random(QUERY), random(RANK), angle.cos(), angle.sin(), torch.arange(ROWS)]
    found: list[list[Tensor]] = []
    few, many = kernels["latent quantized" if pack else "latent"]
    for kernel, programs in ((few, ROWS), (many, 3)):
        plane, query, made = (
            unwritten(ROWS, RANK + ROTARY),
            unwritten(ROWS, QUERY),
            Made(ROWS, QUERY),
        )
        to = made.tensors if pack else [query]
        strides = made.strides if pack else [0, 0]
        run(
            kernel, (programs, 2), *given, plane, *to, width, RANK + ROTARY, 1e-6, *strides, ROWS
        )  # fmt: skip
        found.append([plane, *to])
    same(*found)
