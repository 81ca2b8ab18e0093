"""Grouped GEMMs of int4 weights on Hopper: what they compile to, executed, against fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.reference import dequantize
from tests.emulation import ptx_interpreter
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled
from tests.emulation.ptx_memory import TensorMap
from tests.ops.triton.moe.sorted_rows import Experts
from tests.ops.triton.quantized.cases import drawn

pytestmark = pytest.mark.exhaustive

PLANS = """
from rorqual.ops.triton.quantized import int4_grouped_sm90 as kernels
from rorqual.ops.triton.moe.align import empty_blocks
def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)
def weight(group, *shape):
    data = empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    scale = empty(*shape[:-1], shape[-1] // group)
    made = Weight(data, scale, (1, group), None, "wide", turned=True)
    assert kernels.takes(made)
    return made
def launch(experts, hidden, inner, top_k, m, stages, group, pairs):
    blocks = empty_blocks(pairs, experts, m, torch.device("cpu"), buckets=True)
    x = empty(pairs // top_k, hidden)
    gate_up = weight(group, experts, 2 * inner, hidden)
    down = weight(group, experts, hidden, inner)
    h = kernels.gate_up_product(x, gate_up, blocks, top_k, stages)
    kernels.down_product(h, down, blocks, stages)
for m in (8, 32, 128):
    launch(128, 2048, 768, 8, m, 99, 128, 8192)
launch(64, 2048, 1408, 6, 16, 99, 128, 6144)
launch(128, 2048, 768, 8, 16, 99, 64, 8192)
"""
LARGE = 10  # kernels of PLANS
CHECKS = f"""
assert [k.name for k in launched] == ["_int4_grouped_kernel"] * len(launched), launched
for i, kernel in enumerate(launched[:{LARGE}]):
    found = kernel.resources()
    rows = [8, 8, 32, 32, 128, 128, 16, 16, 16, 16][i]
    # a few bytes are kept aside where two programs share the registers
    assert found["shared"] <= SHARED[90] and found["stack"] <= 16 * (rows == 32), found
    # of two warpgroups, for two halves of 64 columns
    chunks = [2, 2, 2, 2, 1, 1, 2, 1, 1, 1][i]  # of a stage
    assert kernel.ptx.count(f"wgmma.mma_async.sync.aligned.m64n{{rows}}k16") == 2 * 2 * 4 * chunks
    assert "st.global.v4.b32" in kernel.ptx and "griddepcontrol.wait" in kernel.ptx
    assert "ld.shared.v4.b32" in kernel.ptx
"""
# rows of each expert, hidden, inner, top_k, rows of a block, stages, group, programs
FORMS = [
    ([20, 0, 33, 1], 512, 384, 3, 16, 3, 128, 2),
    ([70, 9], 512, 384, 2, 64, 2, 128, 3),
    ([9, 20, 1], 384, 512, 2, 8, 4, 64, 2),
    ([129], 384, 384, 2, 128, 2, 128, 3),
]
SMALL = f"""
for counts, *sizes, stages, group, _ in {FORMS}:
    pairs = -(-(sum(counts) + 5) // sizes[2]) * sizes[2]
    launch(len(counts), *sizes, stages, group, pairs)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """Of PLANS and of FORMS, both GEMMs of each."""
    return compiled(PLANS + SMALL, tmp_path_factory.mktemp("compiled"), CHECKS)


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels[:LARGE]:
        assert "serialized" not in assembled(kernel, tmp_path)


def execute(
    kernel: Kernel, form: int, gated: bool, seed: int | None = None, ptx: str = ""
) -> Tensor:
    """What the compiled kernel, or a changed `ptx` of it, makes of random operands; whether it
    is right, and free of races."""
    counts, hidden, inner, top_k, m, _, group, programs = FORMS[form]
    torch.manual_seed(form)
    up, up_turned = drawn(group, len(counts), 2 * inner, hidden)
    down, down_turned = drawn(group, len(counts), hidden, inner)
    exact_weights = dequantize(up, torch.float64), dequantize(down, torch.float64)
    case = Experts(counts, hidden, inner, top_k, m, weights=exact_weights)
    exact = case.gated if gated else case.out
    x = case.x if gated else case.h
    scale, turned = (up.scale, up_turned) if gated else (down.scale, down_turned)
    y = torch.full(exact.shape, float("nan"), dtype=torch.bfloat16)
    flat = TensorMap(turned.view(-1, turned.shape[2]), (32 if gated else 64, 64), 64)
    arguments = [x, flat, scale, y, case.order, case.blocks, case.count, case.limit]
    ptx_interpreter.run(ptx or kernel.ptx, kernel.shared, (programs,), arguments, [y], seed)
    found = y if gated else y[case.places.long()]
    error = (found[: case.total].double() - exact[: case.total]).norm()
    assert error / exact[: case.total].norm() < 3e-3
    assert found[case.total :].isnan().all(), "an unused row was stored"
    return y.nan_to_num(7)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", range(len(FORMS)))
def test_compiled_code_is_right_and_free_of_races(
    kernels: list[Kernel], form: int, gated: bool
) -> None:
    kernel = kernels[LARGE + 2 * form + (not gated)]
    assert torch.equal(execute(kernel, form, gated), execute(kernel, form, gated, seed=form))


# what is taken out, one place at a time; by what; how many of the places matter at least. Waits for
# copies of tokens are not among them: the interpreter does these copies at once.
BROKEN = {
    "a stage is used or filled before it is there or free": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        3,
    ),
    "a stage that is never given back or announced": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", 3),
    "products not awaited": (r"wgmma\.wait_group[^;]*;", "", 2),
}


@pytest.mark.longest
@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    pattern, by, matter = BROKEN[what]
    kernel = kernels[LARGE]
    changed = changes(kernel.ptx, pattern, by)
    assert caught(changed, lambda ptx: execute(kernel, 0, True, ptx=ptx)) >= matter, what
