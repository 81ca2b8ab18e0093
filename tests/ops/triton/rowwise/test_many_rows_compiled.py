"""Rope and the experts' rows have forms for few rows and for many. As compiled for Hopper: the same
bits from random rows."""

from __future__ import annotations

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
LAUNCHES = f"""
from rorqual.ops.triton.attention import rope_kv_write
from rorqual.ops.triton.moe import align, expert_rows
x = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
angle = torch.empty({ROWS}, {HEAD} // 2)
heads = x({ROWS}, {HEADS}, {HEAD})
expert_rows.multiprocessors = lambda device: 0  # several tiles a program
for many in (False, True):
    if many:
        rope_kv_write.FEW_TOKENS = 0
    blocks = align.empty_blocks({PICKS}, 5, {BLOCK}, torch.device("cpu"), buckets=not many)
    assert blocks.limit == {LIMIT}
    for interleaved in (False, True):
        rope_kv_write.rope(heads, angle, angle, interleaved)
    expert_rows.in_order(quantized({ROWS}, {COLUMNS}), blocks, {TOP_K})
    expert_rows.in_order(x({PICKS}, {COLUMNS}), blocks, 1)
    expert_rows.joined(x({PICKS}, 2 * {COLUMNS}), blocks)
"""
NAMES = ("rope by halves", "rope interleaved", "order", "order quantized", "join")


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
    """Pairs with random experts or none, sorted."""

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


@pytest.mark.parametrize("kind", ["order", "order quantized"])
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
        made = Made(PICKS)
        to = made.tensors
        strides = [COLUMNS, COLUMNS, *given_strides, *made.strides]
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
    for kernel, grid, rest in ((few, (LIMIT * BLOCK, 2), []), (many, (7,), [3])):
        made = Made(PICKS)
        run(kernel, grid, both, *made.tensors, *picks.arguments, COLUMNS, *made.strides, *rest)
        found.append(made.tensors)
    same(*found, written=picks.here)
