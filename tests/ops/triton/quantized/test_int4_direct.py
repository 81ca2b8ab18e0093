"""Which int4 weights go straight to registers, by shape and GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.ops.reference import Weight
from rorqual.ops.triton.quantized import int4_direct
from rorqual.ops.triton.quantized.int4_direct import DirectTile


def weight(*shape: int, group: int = 128, turned: bool = True) -> Weight:
    data = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device="meta")
    scale = torch.empty(*shape[:-1], shape[-1] // group, dtype=torch.bfloat16, device="meta")
    return Weight(data, scale, (1, group), None, "wide", turned=turned)


@pytest.mark.parametrize("hopper", [True, False])
def test_which_weights_are_taken(monkeypatch: pytest.MonkeyPatch, hopper: bool) -> None:
    """Before sm_90 the tokens of a tile have 88 KiB of shared memory."""
    monkeypatch.setattr(int4_direct, "INTERPRETED", False)
    monkeypatch.setattr(int4_direct, "is_hopper", lambda device: hopper)
    assert int4_direct.takes(weight(5120, 2048))
    assert int4_direct.takes(weight(2048, 1408, group=64))
    assert int4_direct.takes(weight(4096, 8192)) is hopper
    assert int4_direct.takes_experts(weight(64, 2048, 1408))
    assert int4_direct.takes_experts(weight(256, 7168, 2048)) is hopper
    assert not int4_direct.takes(weight(7168, 16384)), "256 KiB of tokens"
    assert not int4_direct.takes(weight(2048, 2048, group=32)), "other chunks"
    assert not int4_direct.takes(weight(2048, 2048, turned=False))
    assert not int4_direct.takes_experts(weight(64, 2000, 1408)), "a hidden size of no whole chunks"


def test_a_tile_fits_other_columns_than_it_was_found_on() -> None:
    tile = DirectTile(warps=2, parts=2, depth=3, registers=128)
    assert int4_direct._fitted(tile, 2048, 8) == tile
    assert int4_direct._fitted(tile, 1408, 8) == DirectTile(4, 1, 3, 128), "11 chunks"
    assert int4_direct._fitted(tile, 7168, 8) == DirectTile(1, 4, 3, 128), "56 chunks"
    for columns in (768, 1408, 2048, 4096, 7168):
        found = int4_direct._fitted(tile, columns, 8)
        assert int4_direct.fits(columns, 8, found.parts)
