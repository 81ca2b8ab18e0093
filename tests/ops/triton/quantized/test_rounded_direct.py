"""Which weights have a kernel that rounds its only token, and when it is chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.rounding import FP8
from rorqual.ops.triton import backend
from rorqual.ops.triton.quantized import (
    experts,
    int4_direct,
    linear,
    operands,
    rounded_direct,
)
from rorqual.ops.triton.quantized.int4_direct import DirectTile


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_direct, "INTERPRETED", False)
    for module in (operands, rounded_direct, backend):
        monkeypatch.setattr(module, "takes_fp8", lambda device: True)


def eight(*shape: int, kind: str = "int8", block: tuple[int, int] | None = None) -> Weight:
    data = torch.empty(*shape, dtype=torch.int8 if kind == "int8" else FP8, device="meta")
    rows, columns = block or (1, shape[-1])
    places = (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    scale = torch.empty(places, device="meta")
    share = "group" if block else "token"
    return Weight(data, scale, (rows, columns), None, f"{kind}_{share}")


def blocks(*shape: int) -> Weight:
    return eight(*shape, kind="fp8", block=(128, 128))


def four(*shape: int, group: int = 128, activation: str = "fp8_token") -> Weight:
    data = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device="meta")
    scale = torch.empty(*shape[:-1], shape[-1] // group, dtype=torch.bfloat16, device="meta")
    return Weight(data, scale, (1, group), None, activation, turned=True)


def test_which_weights_are_taken() -> None:
    assert rounded_direct.takes(eight(5120, 2048))
    assert rounded_direct.takes(eight(2048, 1408, kind="fp8"))
    assert rounded_direct.takes(four(2048, 1408))
    assert rounded_direct.takes(four(2048, 1408, group=64, activation="int8_token"))
    assert rounded_direct.takes(eight(64, 2048, 1408))
    assert rounded_direct.takes(blocks(5120, 2048))
    assert rounded_direct.takes(blocks(64, 2048, 1408)), "22 chunks, a part of all"
    assert not rounded_direct.takes(blocks(2112, 7168)), "a part's chunks are too many"
    assert not rounded_direct.takes(blocks(2048, 10944)), "half a block"
    assert rounded_direct.takes(four(128, 2048, 768))
    assert not rounded_direct.takes(eight(2048, 2048, block=(128, 128))), "scales of blocks"
    assert not rounded_direct.takes(eight(2048, 2000)), "columns of no whole chunks"
    assert not rounded_direct.takes(eight(7168, 16384)), "a token too long for registers"
    assert not rounded_direct.takes(eight(2112, 7168)), "slower in whole steps"
    assert not rounded_direct.takes(four(2112, 7168)), "likewise"
    assert rounded_direct.takes(four(2112, 7168, activation="int8_token"))
    assert not rounded_direct.takes(four(2048, 2048, activation="wide")), "int4_direct.py's"
    assert not rounded_direct.takes(four(2048, 2048, group=32)), "other chunks"
    assert not rounded_direct.takes(four(2048, 128)), "a scale a row of int4"


def test_a_tile_fits_other_columns_than_it_was_found_on() -> None:
    tile = DirectTile(warps=1, parts=4, depth=8)
    assert rounded_direct._fitted(tile, eight(100, 2048)) == tile
    assert rounded_direct._fitted(tile, eight(100, 1408)) == DirectTile(2, 2, 8), "22 chunks"
    assert rounded_direct._fitted(tile, four(100, 1408)) == DirectTile(4, 1, 8), "11 chunks"


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("int8", eight(5120, 2048)),
        ("fp8", eight(5120, 2048, kind="fp8")),
        ("fp8_blocks", blocks(5120, 2048)),
        ("int4_fp8", four(5120, 2048)),
        ("int4_int8", four(5120, 2048, activation="int8_token")),
    ],
)
def test_it_is_chosen_for_one_token_that_is_not_rounded(kind: str, weight: Weight) -> None:
    assert operands.kind_of(weight) == kind
    assert linear.plan_for(weight, 1).direct
    assert not linear.plan_for(weight, 1, rounded=True).direct
    assert not linear.plan_for(weight, 2).direct


def test_norms_quantize_what_is_not_rounded_by_its_product() -> None:
    def rows(tokens: int, columns: int) -> torch.Tensor:
        return torch.empty(tokens, columns, device="meta")

    for how in ("fp8_group", "fp8_group_ue8m0"):
        assert backend._rounds_rows(rows(1, 2048), how) is None
        assert backend._rounds_rows(rows(2, 2048), how) == how
        assert backend._rounds_rows(rows(1, 7168), how) == how
    assert backend._rounds_rows(rows(2, 2048), None) is None, "no such product follows"


@pytest.mark.parametrize(
    ("w", "most"),
    [
        (ExpertWeights(eight(128, 1536, 2048), eight(128, 2048, 768)), 1),
        (ExpertWeights(blocks(128, 1536, 2048), blocks(128, 2048, 768)), 1),
        (ExpertWeights(four(128, 1536, 2048), four(128, 2048, 768)), 2),
    ],
)
def test_it_is_chosen_for_few_pairs_that_are_not_sorted(w: ExpertWeights, most: int) -> None:
    taken = [t for t in range(1, 5) if experts.rounds_itself(w, t, 8 * t)]
    assert taken == [*range(1, most + 1)]
    few = experts.plan_for(w.down, 8, rounds=True)
    assert few.up.direct
    assert few.down.direct
    assert not few.sorts(16)
    many = experts.plan_for(w.down, 32)
    assert not many.up.direct
    assert not many.down.direct


@pytest.mark.parametrize(
    "w",
    [
        ExpertWeights(eight(8, 1536, 2048, block=(128, 128)), eight(8, 2048, 768)),
        ExpertWeights(four(8, 1536, 2048, group=32), four(8, 2048, 768)),
        ExpertWeights(eight(8, 1536, 2048), four(8, 2048, 768, activation="int8_token")),
        ExpertWeights(four(8, 1536, 2048, activation="wide"), eight(8, 2048, 768)),
        ExpertWeights(four(8, 512, 128), four(8, 128, 256)),  # one group a row of the first
        ExpertWeights(eight(64, 2816, 2000), eight(64, 2000, 1408)),  # no whole chunks
    ],
)
def test_both_products_have_to_fit(w: ExpertWeights) -> None:
    assert not experts.rounds_itself(w, 1, 8)
    plan = experts.plan_for(w.down, 8, alike=experts.alike(w))
    assert not plan.up.direct
    assert not plan.down.direct


def test_other_formats_of_the_first_product_have_the_general_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int4_direct, "INTERPRETED", False)
    monkeypatch.setattr(int4_direct, "is_hopper", lambda device: True)
    down = four(128, 2048, 768, activation="wide")
    assert experts.plan_for(down, 8).up.direct
    mixed = ExpertWeights(eight(128, 1536, 2048), down)
    assert not experts.plan_for(down, 8, alike=experts.alike(mixed)).up.direct
