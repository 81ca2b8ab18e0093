"""Copies to pinned memory on the way to a device."""

from __future__ import annotations

import pytest
import torch

from rorqual.platforms import pinned


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.int32])
def test_a_copy_has_the_bytes(dtype: torch.dtype) -> None:
    data = torch.randint(0, 2, (3, pinned.THREADED), generator=torch.manual_seed(3)).to(dtype)
    host = torch.zeros_like(data)
    pinned.fill(host, data)
    assert torch.equal(host, data)
