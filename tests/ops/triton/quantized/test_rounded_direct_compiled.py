"""Products whose kernels round the token, as compiled for Hopper, in the interpreter of PTX: that
the token is rounded as the definition says, that each lane finds its columns, pairs without an
expert, and that only weights and the choice of experts are read before the previous kernel has
ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from rorqual.ops import reference
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.quantized import int4_order
from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import compiled
from tests.ops.triton.quantized.cases import difference, weight
from tests.ops.triton.quantized.test_int4_direct_compiled import nothing

pytestmark = pytest.mark.exhaustive

FORMATS = [
    ("int8", "int8_token", 0),
    ("fp8", "fp8_token", 0),
    ("fp8", "fp8_group", 128),
    ("int4", "int8_token", 128),
    ("int4", "fp8_token", 128),
    ("int4", "fp8_token", 64),
]
HEAD = """
from rorqual.ops.reference import ExpertWeights
from rorqual.ops.triton.quantized import experts, linear
new = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype)
def weight(*shape):
    if "{kind}" == "int4":
        data = new(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
        scale = new(*shape[:-1], shape[-1] // {group})
        return Weight(data, scale, (1, {group}), None, "{activation}", turned=True)
    data = new(*shape, dtype=torch.int8 if "{kind}" == "int8" else FP8)
    rows, columns = (128, 128) if {group} else (1, shape[-1])
    scale = torch.empty(*shape[:-2], -(-shape[-2] // rows), shape[-1] // columns)
    return Weight(data, scale, (rows, columns), None, "{activation}")
"""
LINEAR = """
plan = linear.QuantizedLinearPlan(8, direct=linear.DirectTile({warps}, {parts}, 2, tiles={tiles}))
linear.linear(new(1, {columns}), weight({rows}, {columns}), plan=plan)
"""
EXPERTS = """
tile = experts.QuantizedTile(direct=experts.DirectTile(2, 1, 2))
plan = experts.QuantizedExpertsPlan(16, tile, tile)
w = ExpertWeights(weight({slots}, 2 * {inner}, {hidden}), weight({slots}, {hidden}, {inner}))
ids = new({tokens}, {top_k}, dtype=torch.int32)
experts.products(new({tokens}, {hidden}), w, plan, None, ids)
"""


def drawn(kind: str, activation: str, group: int, *shape: int) -> tuple[Weight, torch.Tensor]:
    """A weight as loaded, and its data as the kernels take it."""
    share = 128 if group and kind != "int4" else 1
    made = weight(kind, activation, *shape, group=group, share=share)
    data = made.data
    return made, int4_order.turned(data, 128, activation) if kind == "int4" else data


@pytest.mark.parametrize(("kind", "activation", "group"), FORMATS)
@pytest.mark.parametrize(("warps", "parts", "tiles"), [(1, 4, 1), (2, 1, 2), (2, 2, 1)])
def test_products(
    kind: str, activation: str, group: int, warps: int, parts: int, tiles: int, tmp_path: Path
) -> None:
    rows, columns = 72, 768 if parts != 4 else 1024
    sizes = {"rows": rows, "columns": columns, "group": group}
    launch = (HEAD + LINEAR).format(
        **sizes, kind=kind, activation=activation, warps=warps, parts=parts, tiles=tiles
    )
    kernel = compiled(launch, tmp_path)[-1]
    torch.manual_seed(0)
    held, data = drawn(kind, activation, group, rows, columns)
    assert held.scale is not None
    x = torch.randn(1, columns).bfloat16()
    x[0, ::7] = 0
    y = nothing(1, rows)
    given = [x, data, held.scale, y]
    programs = (-(-rows // (16 * warps * tiles)),)
    grid = Grid(
        [Launch(kernel.ptx, kernel.shared, programs, given)], [y], [data, held.scale]
    )  # fmt: skip
    grid.in_turn(range(len(grid.programs)))
    assert difference(y, reference.linear(x, held)) < 1e-5


@pytest.mark.parametrize(("kind", "activation", "group"), FORMATS)
def test_experts(kind: str, activation: str, group: int, tmp_path: Path) -> None:
    """Both products, one after the other. The second one may read weights and the choice of experts
    early, the latter from L2. Pairs of a padding row have no expert: their programs read no
    weights, whose addresses would lie before the first expert's, which is an error here."""
    slots, hidden, inner, tokens, top_k = 3, 256, 384, 3, 2
    torch.manual_seed(1)
    ids = torch.tensor([[0, 2], [2, 1], [-1, -1]], dtype=torch.int32)
    sizes = {"slots": slots, "hidden": hidden, "inner": inner, "tokens": tokens, "top_k": top_k}
    launch = (HEAD + EXPERTS).format(**sizes, kind=kind, activation=activation, group=group)
    first, second = compiled(launch, tmp_path)[-2:]
    up, up_data = drawn(kind, activation, group, slots, 2 * inner, hidden)
    down, down_data = drawn(kind, activation, group, slots, hidden, inner)
    x = torch.randn(tokens, hidden).bfloat16()
    h = nothing(ids.numel(), inner)
    y = nothing(ids.numel(), hidden)
    given = [x, up_data, up.scale, h, ids, hidden]
    programs = (ids.numel() * 2 * inner // 32,)
    grid = Grid([Launch(first.ptx, first.shared, programs, given)], [h], [])
    grid.in_turn(range(len(grid.programs)))
    given = [h, down_data, down.scale, y, ids]
    programs = (ids.numel() * hidden // 32,)
    early = [down_data, down.scale]
    grid = Grid([Launch(second.ptx, second.shared, programs, given)], [y], early, ended=[ids])
    grid.in_turn(range(len(grid.programs)))
    assert h[4:].isnan().all()
    assert y[4:].isnan().all()
    weights = torch.ones(2, top_k)
    pair = ExpertWeights(up, down)
    expected = reference.experts(x.float()[:2], ids[:2].long(), weights, pair)
    assert difference(y.view(tokens, top_k, hidden)[:2].float().sum(1), expected) < 1e-4
