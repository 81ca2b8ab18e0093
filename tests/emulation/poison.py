"""Fresh storage that shows what a kernel fails to write."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

ABSURD = 1 << 29  # as an index, it ends the test


def poison(patch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN or absurd integers; bytes are 127, which is NaN in e4m3."""
    plain = torch.empty

    def empty(*shape: int, **kwargs: object) -> Tensor:
        made = plain(*shape, **kwargs)
        if made.element_size() == 1:
            made.view(torch.uint8).fill_(127)
        else:
            made.fill_(float("nan") if made.is_floating_point() else ABSURD)
        return made

    patch.setattr(torch, "empty", empty)
