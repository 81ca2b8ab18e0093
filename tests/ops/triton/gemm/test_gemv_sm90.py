"""The product of one token whose weights are copied before the token is there: what it compiles
to, executed, against fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from rorqual.ops.triton.gemm import gemv_sm90
from tests.emulation import ptx_interpreter
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled
from tests.emulation.ptx_memory import TensorMap

# rows, columns, bias, programs; the first two are of Qwen3-30B and V2-Lite
FORMS = [
    (2048, 4096, False, 128),
    (3648, 2048, False, 114),
    (72, 512, True, 5),
    (2120, 1024, False, 67),
    (40, 1536, False, 3),
]
LAUNCHES = f"""
from rorqual.ops.triton.gemm import gemv_sm90
def rows(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)
for height, columns, bias, _ in {FORMS}:
    gemv_sm90.linear(rows(1, columns), rows(height, columns), rows(height) if bias else None)
"""
CHECKS = """
for kernel in launched:
    found = kernel.resources()
    # attention's programs must find room beside one of this
    assert found["shared"] <= 140 * 1024 and found["stack"] == 0, found
    copies = kernel.ptx.index("cp.async.bulk.tensor")
    assert copies < kernel.ptx.index("griddepcontrol.wait") < kernel.ptx.index("mma.sync")
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"), CHECKS)


def execute(kernel: Kernel, form: int, ptx: str = "", seed: int | None = None) -> None:
    """The compiled kernel, or a changed `ptx` of it, gives the product and is free of races."""
    height, columns, bias, programs = FORMS[form]
    torch.manual_seed(form)
    w = torch.randn(height, columns).bfloat16()
    x = torch.randn(1, columns).bfloat16()
    more = torch.randn(height).bfloat16()
    y = torch.full((height + 8,), float("nan"), dtype=torch.bfloat16)
    flat = TensorMap(w.view(height * 8, columns // 8), (128, 64), 128)
    arguments = [x, flat, *([more] if bias else []), y]
    ptx_interpreter.run(
        ptx or kernel.ptx, kernel.shared, (programs,), arguments, [y], seed, early=[w]
    )
    exact = x[0].double() @ w.double().T + (more.double() if bias else 0)
    assert (y[:height].double() - exact).norm() / exact.norm() < 3e-3
    assert y[height:].isnan().all(), "a row that does not exist was stored"


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("form", [2, 3, 4])
def test_compiled_code_is_right(kernels: list[Kernel], form: int, seed: int | None) -> None:
    execute(kernels[form], form, seed=seed)


BROKEN = {
    "weights that have not arrived": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
    ),
    "a token that is not there yet": (r"griddepcontrol\.wait;", ""),
    "threads do not meet": (r"bar\.sync\s+0;", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    pattern, by = BROKEN[what]
    changed = list(changes(kernels[2].ptx, pattern, by))
    assert changed
    assert caught(changed, lambda ptx: execute(kernels[2], 2, ptx, seed=1)) >= 1, what


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", [0, 1])
def test_published_shapes(kernels: list[Kernel], form: int, tmp_path: Path) -> None:
    execute(kernels[form], form)
    assert "0 bytes spill stores" in assembled(kernels[form], tmp_path)


def test_what_it_takes() -> None:
    def fits(
        height: int, columns: int, tokens: int = 1, kind: torch.dtype = torch.bfloat16
    ) -> bool:
        weight = torch.empty(height, columns, dtype=kind, device="meta")
        return gemv_sm90.fits(torch.empty(tokens, columns, dtype=kind, device="meta"), weight)

    assert fits(2048, 4096)
    assert fits(3648, 2048)
    assert fits(2048, 2048, kind=torch.float16)
    assert not fits(5120, 2048), "attention would not find room beside it"
    assert not fits(2048, 4096, tokens=2)
    assert not fits(2048, 4096 + 64)
    assert not fits(2048, 4096, kind=torch.float32)
