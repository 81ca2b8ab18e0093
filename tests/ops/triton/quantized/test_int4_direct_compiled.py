"""int4 products whose weights go straight to registers, as compiled for Hopper, in the interpreter
of PTX: that each lane finds its columns, rows that hold no token, shares that are added up, and
that only weights and the sorted order are read before the previous kernel has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from rorqual.ops import reference
from rorqual.ops.reference import ExpertWeights
from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import compiled
from tests.ops.triton.quantized.cases import difference, drawn

pytestmark = pytest.mark.exhaustive

HEAD = """
from rorqual.ops.reference import ExpertWeights
from rorqual.ops.triton.quantized import experts, linear
new = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype)
def weight(*shape):
    data = new(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    return Weight(data, new(*shape[:-1], shape[-1] // {group}), (1, {group}), None, "wide",
        turned=True)
"""
LINEAR = """
plan = linear.QuantizedLinearPlan({m}, split={split},
    direct=linear.DirectTile({n} // 16 // {tiles}, {parts}, 2, tiles={tiles}))
linear.linear(new({tokens}, {columns}), weight({rows}, {columns}), plan=plan)
"""
EXPERTS = """
from rorqual.ops.triton.moe.align import ExpertBlocks
tile = experts.QuantizedTile(direct=experts.DirectTile(2, {parts}, 2, tiles={tiles}))
plan = experts.QuantizedExpertsPlan(8, tile, tile)
w = ExpertWeights(weight({slots}, 2 * {inner}, {hidden}), weight({slots}, {hidden}, {inner}))
whole = lambda *shape: new(*shape, dtype=torch.int32)
blocks = ExpertBlocks(whole({picks}), whole(4, {limit}), whole(1), 8, {picks})
experts.products(new({tokens}, {hidden}), w, plan, {given}, whole({tokens}, {top_k}))
"""


def nothing(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize(
    ("group", "tokens", "m", "n", "parts", "tiles", "split"),
    [
        (128, 5, 8, 32, 1, 1, 1),
        (64, 3, 8, 32, 1, 2, 3),
        (128, 20, 16, 64, 2, 2, 1),
        (128, 30, 32, 64, 1, 1, 3),
        (64, 8, 8, 16, 2, 1, 3),
    ],
)
def test_products(
    group: int, tokens: int, m: int, n: int, parts: int, tiles: int, split: int, tmp_path: Path
) -> None:
    rows, columns = 72, 768
    sizes = {"rows": rows, "columns": columns, "tokens": tokens, "group": group}
    launch = (HEAD + LINEAR).format(**sizes, m=m, n=n, parts=parts, tiles=tiles, split=split)
    kernel = compiled(launch, tmp_path)[-1]
    torch.manual_seed(0)
    weight, turned = drawn(group, rows, columns)
    assert weight.scale is not None
    x = torch.randn(tokens, columns).bfloat16()
    y = nothing(tokens, rows)
    tiles = -(-tokens // m) * -(-rows // n)
    given = [x, turned, weight.scale, y]
    if split > 1:
        parts = nothing(split, tokens, rows, dtype=torch.float32)
        given += [parts, torch.zeros(tiles, dtype=torch.int32)]
    given += [tokens, columns]
    grid = Grid(
        [Launch(kernel.ptx, kernel.shared, (tiles, split), given)], given[3:-2],
        [turned, weight.scale],
    )  # fmt: skip
    grid.in_turn(range(len(grid.programs)))
    assert difference(y, reference.linear(x, weight)) < 1e-4


def sorted_blocks(
    ids: torch.Tensor, slots: int, m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, blocks [4, limit], count) as align.ExpertBlocks has them, the last block absent."""
    picks = ids.flatten()
    order = picks.argsort(stable=True).int()
    found = []
    for slot in range(slots):
        at = (picks[order] == slot).nonzero().flatten()
        first, end = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)
        found += [(slot, start, end, 0) for start in range(first, end, m)]
    absent = (99, 99, 99, 99)
    blocks = torch.tensor([*found, absent], dtype=torch.int32).t().contiguous()
    return order, blocks, torch.tensor([len(found)], dtype=torch.int32)


@pytest.mark.parametrize(("parts", "tiles"), [(1, 1), (2, 2)])
def test_experts(parts: int, tiles: int, tmp_path: Path) -> None:
    """Both products, one after the other: weights and the sorted order may be read early, by
    the first kernel once it has waited, by the second at once."""
    slots, hidden, inner, tokens, top_k = 3, 256, 256, 9, 2
    torch.manual_seed(1)
    ids = torch.stack([torch.randperm(slots)[:top_k] for _ in range(tokens)])
    order, blocks, count = sorted_blocks(ids, slots, 8)
    sizes = {"slots": slots, "hidden": hidden, "inner": inner, "tokens": tokens, "top_k": top_k}
    launch = (HEAD + EXPERTS).format(
        **sizes, group=128, parts=parts, tiles=tiles, picks=ids.numel(), limit=blocks.shape[1],
        given="blocks",
    )  # fmt: skip
    first, second = compiled(launch, tmp_path)[-2:]
    up, up_turned = drawn(128, slots, 2 * inner, hidden)
    down, down_turned = drawn(128, slots, hidden, inner)
    x = torch.randn(tokens, hidden).bfloat16()
    h = nothing(ids.numel(), inner)
    y = nothing(ids.numel(), hidden)
    places = [order, blocks, count, blocks.shape[1]]
    given = [x, up_turned, up.scale, h, *places, hidden]
    programs = (blocks.shape[1] * -(-2 * inner // (32 * tiles)),)
    grid = Grid([Launch(first.ptx, first.shared, programs, given)], [h], [])
    grid.in_turn(range(len(grid.programs)))
    given = [h, down_turned, down.scale, y, *places, inner]
    programs = (blocks.shape[1] * -(-hidden // (32 * tiles)),)
    early = [down_turned, down.scale]
    ended = [order, blocks, count]
    grid = Grid([Launch(second.ptx, second.shared, programs, given)], [y], early, ended=ended)
    grid.in_turn(range(len(grid.programs)))
    weights = torch.ones(tokens, top_k)
    expected = reference.experts(x.float(), ids, weights, ExpertWeights(up, down))
    assert difference(y.view(tokens, top_k, hidden).float().sum(1), expected) < 1e-4


def test_pairs_without_an_expert(tmp_path: Path) -> None:
    """Unsorted pairs, of which those of a padding row have no expert: their programs read no
    weights, whose addresses would lie before the first expert's, which is an error here."""
    slots, hidden, inner, tokens, top_k = 3, 256, 256, 3, 2
    torch.manual_seed(2)
    ids = torch.tensor([[0, 2], [2, 1], [-1, -1]], dtype=torch.int32)
    sizes = {"slots": slots, "hidden": hidden, "inner": inner, "tokens": tokens, "top_k": top_k}
    launch = (HEAD + EXPERTS).format(
        **sizes, group=128, parts=1, tiles=1, picks=ids.numel(), limit=1, given="None"
    )
    first, second = compiled(launch, tmp_path)[-2:]
    up, up_turned = drawn(128, slots, 2 * inner, hidden)
    down, down_turned = drawn(128, slots, hidden, inner)
    x = torch.randn(tokens, hidden).bfloat16()
    h = nothing(ids.numel(), inner)
    y = nothing(ids.numel(), hidden)
    given = [x, up_turned, up.scale, h, ids, ids.numel(), hidden]
    Grid(
        [Launch(first.ptx, first.shared, (ids.numel() * 2 * inner // 32,), given)], [h], []
    ).in_turn(range(ids.numel() * 2 * inner // 32))
    given = [h, down_turned, down.scale, y, ids, ids.numel(), inner]
    Grid(
        [Launch(second.ptx, second.shared, (ids.numel() * hidden // 32,), given)], [y],
        [down_turned, down.scale], ended=[ids],
    ).in_turn(range(ids.numel() * hidden // 32))  # fmt: skip
    assert h[4:].isnan().all()
    assert y[4:].isnan().all()
    weights = torch.ones(tokens, top_k)
    expected = reference.experts(x.float(), ids, weights, ExpertWeights(up, down))
    assert difference(y.view(tokens, top_k, hidden)[:2].float().sum(1), expected[:2]) < 1e-4
