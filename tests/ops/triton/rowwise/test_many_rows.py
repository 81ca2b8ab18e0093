"""Rope has a form for few tokens and one for many. Both leave the same bits, so that nothing a
request gets depends on how many tokens came with it. Interpreted where there is no GPU;
test_many_rows_compiled.py executes what it and the experts' rows compile to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops.triton.attention import rope_kv_write
from tests.emulation.poison import poison

pytestmark = pytest.mark.exhaustive

ROWS = 11
MANY = ((rope_kv_write, "FEW_TOKENS", 0),)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel fails to write shows."""
    torch.manual_seed(5)
    poison(monkeypatch)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def same_in_both_forms(
    op: Callable[[], list[Tensor]], names: list[str], patch: pytest.MonkeyPatch
) -> None:
    """names: of the kernels for few and for many rows, in turn, that `op` launches."""
    from triton.runtime.jit import KernelInterface

    few = op()
    launched = []
    plain = KernelInterface.__getitem__

    def noted(self: Any, grid: Any) -> Any:
        launched.append(getattr(self, "__name__", None) or self.fn.__name__)
        return plain(self, grid)

    with patch.context() as changed:
        for module, name, value in MANY:
            changed.setattr(module, name, value)
        changed.setattr(KernelInterface, "__getitem__", noted)
        many = op()
    assert launched == names
    for one, other in zip(few, many, strict=True):
        assert not one.float().isnan().any()
        assert torch.equal(one, other)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "rotated"), [(12, 8192), (5, 8192), (12, 64)])
def test_rope(
    heads: int,
    rotated: int,
    interleaved: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rotated: numbers of a program at most. In place, and beside columns that stay."""
    monkeypatch.setattr(rope_kv_write, "ROTATED", rotated)
    angle = torch.randn(ROWS, 8, device=DEVICE) * 3
    x = random(ROWS, heads, 40, dtype=dtype)

    def rotated_twice() -> list[Tensor]:
        inside = x.clone()
        part = inside[..., 24:]
        apart = rope_kv_write.rope(part, angle.cos(), angle.sin(), interleaved)
        rope_kv_write.rope(part, angle.cos(), angle.sin(), interleaved, out=part)
        assert torch.equal(part, apart)
        return [inside]

    same_in_both_forms(rotated_twice, ["_rope_pairs_kernel"] * 2, monkeypatch)
