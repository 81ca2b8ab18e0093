"""The warp-specialised block-fp8 product: its Python over torch tensors, partitions as threads, against fp64; and what it compiles to."""

from __future__ import annotations

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
from rorqual.ops.triton import linear_tall
from tests.ops import gluon_emulator
from tests.ops.block_fp8 import error, exact, operands
from tests.ops.gluon_emulator import Descriptor

CASES = [  # tokens, rows, columns, m, stages, programs
    (300, 320, 384, 256, 3, 2),  # 64 rows in the last tile; the last half tile has no tokens
    (300, 448, 384, 128, 2, 3),
    (257, 296, 256, 256, 2, 1),  # 40 rows in the last tile
    (130, 400, 256, 128, 4, 5),  # fewer tiles in the last round than programs
    (4500, 320, 128, 256, 3, 7),  # two groups of token tiles
]


def emulate(x: Tensor, scale: Tensor, weight: Weight, m: int, stages: int, programs: int, bias: Tensor | None = None) -> Tensor:
    (tokens, columns), rows = x.shape, weight.data.shape[0]
    y = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
    args = [
        Descriptor(x, [m, 128]), scale, Descriptor(weight.data, [128, 128]), weight.scale, bias, y, Descriptor(y, [64, 128]), tokens,
        *scale.stride(), rows, columns, m, stages, bias is not None, *linear_tall.REGISTERS, False,
    ]  # fmt: skip
    gluon_emulator.run(linear_tall, "_tall_kernel", (programs,), args)
    return y


@pytest.mark.parametrize(("tokens", "rows", "columns", "m", "stages", "programs"), CASES)
def test_emulated_result(tokens: int, rows: int, columns: int, m: int, stages: int, programs: int) -> None:
    torch.manual_seed(tokens)
    x, scale, weight = operands(tokens, columns, rows)
    bias = torch.randn(rows).bfloat16() if tokens == 300 else None
    y = emulate(x, scale, weight, m, stages, programs, bias)
    assert error(y, exact(x, scale, weight, bias)) < 2e-3
    if tokens == 130:  # a row does not depend on the others
        some = [7, 129, 64]
        assert torch.equal(emulate(x[some], scale[some].t().contiguous().t(), weight, m, stages, programs - 1), y[some])


COMPILE = """
import torch
from rorqual.ops.reference import FP8, Weight
from rorqual.ops.triton.fp8 import Quantised
from rorqual.ops.triton.linear_fp8 import LinearPlan, linear
from tests.ops.cross_compile import SHARED, compiling
PLANS = [(2112, LinearPlan(256, 128, 4, 4, tall=True)), (4096, LinearPlan(256, 128, 4, 4, tall=True)),
         (4096, LinearPlan(128, 128, 4, 6, tall=True))]
with compiling(90) as launched:
    for rows, plan in PLANS:
        weight = Weight(torch.empty(rows, 7168, dtype=FP8), torch.empty(-(-rows // 128), 56))
        linear(Quantised.empty(4096, 7168, torch.device("cpu")), weight, dtype=torch.bfloat16, plan=plan)
assert [k.name for k in launched] == ["_tall_kernel"] * len(PLANS), launched
for (rows, plan), kernel in zip(PLANS, launched):
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] == 0, (rows, plan, found)
    # two warpgroups, one product or two of each unit, in narrow tiles too
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n128k32") == 2 * 4 * plan.m // 128, plan
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n64k32") == (2 * 4 * plan.m // 128 if rows % 128 else 0), plan
    assert "setmaxnreg.inc.sync.aligned.u32 \\t240;" in kernel.ptx and "griddepcontrol.wait" in kernel.ptx
    open("{folder}/%d_%d.ptx" % (rows, plan.m), "w").write(kernel.ptx)
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
