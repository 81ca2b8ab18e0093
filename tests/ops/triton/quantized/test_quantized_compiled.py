"""int4 products as compiled for Hopper, in the interpreter of PTX: what becomes of half bytes in
registers, and that each thread of the tensor cores finds its columns where it reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from rorqual.ops import reference
from rorqual.ops.reference import Weight
from rorqual.ops.rounding import FP8, to_8_bits
from rorqual.ops.triton.quantized import int4_order
from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import compiled
from tests.ops.triton.quantized.cases import difference

pytestmark = pytest.mark.exhaustive

ROWS = 64
COLUMNS = 256
TOKENS = 5
GROUP = 128
LAUNCH = """
from rorqual.ops.triton.quantized import linear
from rorqual.ops.triton.quantized.rows import RoundedRows
new = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype)
plan = linear.QuantizedLinearPlan(16, 64, 4, 3, 1)
data, scale = new({rows}, {columns} // 2, dtype=torch.uint8), new({rows}, {columns} // {group})
w = Weight(data, scale, (1, {group}), None, "{activation}", turned=True)
x = new({tokens}, {columns})
if w.activation != "wide":
    kind = FP8 if w.activation == "fp8_token" else torch.int8
    x = RoundedRows(new({tokens}, {columns}, dtype=kind), torch.empty(1, {tokens}).t(), 0)
linear.linear(x, w, plan=plan)
"""


@pytest.mark.parametrize("activation", ["wide", "int8_token", "fp8_token"])
def test_int4_products(activation: str, tmp_path: Path) -> None:
    sizes = {"rows": ROWS, "columns": COLUMNS, "tokens": TOKENS, "group": GROUP}
    kernel = compiled(LAUNCH.format(**sizes, activation=activation), tmp_path)[-1]
    torch.manual_seed(0)
    data = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
    scale = ((torch.rand(ROWS, COLUMNS // GROUP) - 0.5) * 0.1).bfloat16()
    turned = int4_order.turned(data, 128, activation)
    x = torch.randn(TOKENS, COLUMNS).bfloat16()
    y = torch.full((TOKENS, ROWS), float("nan"), dtype=torch.bfloat16)
    steps = COLUMNS // 128
    if activation == "wide":
        given = [x, turned, scale, y, TOKENS, steps, 1, COLUMNS, 0, 0]
    else:
        number = FP8 if activation == "fp8_token" else torch.int8
        numbers, factors = to_8_bits(x.float(), number)
        numbers = numbers.view(torch.uint8) if number == FP8 else numbers
        given = [numbers, factors, turned, scale, y, TOKENS, steps, 1, COLUMNS, TOKENS]
    programs = Grid([Launch(kernel.ptx, kernel.shared, (1, 1), given)], [y], [turned, scale])
    programs.in_turn(range(len(programs.programs)))
    expected = reference.linear(x, Weight(data, scale, (1, GROUP), None, activation))
    assert difference(y, expected) < (1e-4 if activation == "wide" else 1e-6)


@pytest.mark.longest
def test_unpacking_moves_nothing_between_threads(tmp_path: Path) -> None:
    """Bytes are read 16 at a time, and operands go from registers to the tensor cores: no store to
    shared memory stands in the loop."""
    sizes = {"rows": ROWS, "columns": 2048, "tokens": TOKENS, "group": GROUP}
    product = {"wide": "bf16.bf16", "int8_token": "s32.s8.s8", "fp8_token": "e4m3.e4m3"}
    for activation, name in product.items():
        ptx = compiled(LAUNCH.format(**sizes, activation=activation), tmp_path)[-1].ptx
        loop = ptx[ptx.index("wgmma.mma_async") : ptx.rindex("wgmma.mma_async")]
        assert name in loop
        assert "st.shared" not in ptx.split("wgmma.mma_async")[0].rpartition("$L__BB")[2]
        assert "st.shared" not in loop
        assert "shfl" not in loop
        assert "ld.shared.v4.b32" in ptx
