"""The best token of a row, in kernels as torch finds it. Interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops.triton.sampling.argmax import argmax

pytestmark = pytest.mark.exhaustive(but_first=True)

LEAST = float("-inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "vocab"), [(0, 50), (1, 1), (1, 129_280), (3, 4097), (7, 300), (200, 5000)]
)
def test_best_token(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Many are equal in bf16: the first of them is it."""
    torch.manual_seed(rows + vocab)
    wide = torch.randn(rows, vocab + 5).to(DEVICE, dtype)
    logits = wide[:, 2 : 2 + vocab]
    found = argmax(logits)
    assert found.dtype == torch.int64
    assert torch.equal(found, (logits == logits.amax(-1, keepdim=True)).int().argmax(-1))


def test_hostile_rows() -> None:
    """All equal, nothing but -inf, one that is not -inf, a NaN, the last token."""
    logits = torch.full((5, 6000), LEAST)
    logits[0] = 1.5
    logits[2, 4321] = -7e37
    logits[3, :] = 2.0
    logits[3, 5000] = float("nan")
    logits[4, 5999] = 0.0
    assert argmax(logits.to(DEVICE)).tolist() == [0, 0, 4321, 5000, 5999]
