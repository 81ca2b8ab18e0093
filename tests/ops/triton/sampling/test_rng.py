"""Random weights drawn by a kernel are, bit for bit, those that torch's operations draw: whole
matrices and windows, of every type."""

from __future__ import annotations

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops import rng as reference
from rorqual.ops.triton.sampling import rng as kernels


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize(
    ("shape", "first", "width", "key", "std"),
    [
        ((3, 40), 0, 40, 7, 0.5),
        ((9, 1030), 2**40 + 11, 5000, -(2**63) + 1, 0.02),
        ((1, 5), 2**31 - 2, 5, 2**31, 3000.0),
    ],
)
def test_the_bits_of_torch(
    kind: torch.dtype, shape: tuple[int, int], first: int, width: int, key: int, std: float
) -> None:
    whole = torch.zeros(shape[0], shape[1] + 3, dtype=kind, device=DEVICE)
    expected = torch.zeros_like(whole)
    view = whole[:, 1:-2]
    reference.draw_normal(expected[:, 1:-2], key, std, first, width)
    kernels.draw_normal(view, key, std, first, width)
    assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))
    if std == 3000.0 and kind is torch.float8_e4m3fn:
        assert view.float().abs().max() == 448, "clipped"
