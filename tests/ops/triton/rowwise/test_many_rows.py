"""Kernels by rows have a form for few rows and one for many. Both leave the same bits, so that
nothing a request gets depends on how many rows came with it. Interpreted where there is no GPU;
test_many_rows_compiled.py executes what they compile to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops.activation import NormOutput, Quantized
from rorqual.ops.interface import TokenPlaces
from rorqual.ops.triton.attention import rope_kv_write
from rorqual.ops.triton.moe import combine
from rorqual.ops.triton.rowwise import norm, quantize
from rorqual.ops.triton.runtime.launch import takes_fp8

pytestmark = pytest.mark.exhaustive

ROWS = 11
MANY = (
    (norm, "MANY_ROWS", 0),
    (norm, "FEW_ROWS", 0),
    (quantize, "FEW_ROWS", 0),
    (combine, "FEW_TOKENS", 0),
    (rope_kv_write, "FEW_TOKENS", 0),
    (rope_kv_write, "LATENT_PROGRAMS", 1),
    (rope_kv_write, "multiprocessors", lambda device: 3),
    (norm, "multiprocessors", lambda device: 3),
    (norm, "RESIDENT_WARPS", 1),
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel fails to write shows."""
    torch.manual_seed(5)
    plain = torch.empty

    def empty(*shape: int, **kwargs: Any) -> Tensor:
        made = plain(*shape, **kwargs)
        if made.element_size() == 1:
            made.view(torch.uint8).fill_(127)
        elif made.is_floating_point():
            made.fill_(float("nan"))
        return made

    monkeypatch.setattr(torch, "empty", empty)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def tensors_of(found: Any) -> list[Tensor]:
    """All that an op returns, bytes as bytes."""
    if isinstance(found, tuple | list):
        return [tensor for part in found for tensor in tensors_of(part)]
    if isinstance(found, NormOutput):
        return tensors_of((found.hidden, found.quantized))
    if isinstance(found, Quantized):
        return [found.data.view(torch.uint8), found.scale]
    return [found]


def same_in_both_forms(op: Callable[[], Any], names: list[str], patch: pytest.MonkeyPatch) -> None:
    """names: of the kernels for few and for many rows, in turn, that `op` launches."""
    from triton.runtime.jit import KernelInterface

    few = tensors_of(op())
    launched = []
    plain = KernelInterface.__getitem__

    def noted(self: Any, grid: Any) -> Any:
        launched.append(getattr(self, "__name__", None) or self.fn.__name__)
        return plain(self, grid)

    with patch.context() as changed:
        for module, name, value in MANY:
            changed.setattr(module, name, value)
        changed.setattr(KernelInterface, "__getitem__", noted)
        many = tensors_of(op())
    assert launched == names
    for one, other in zip(few, many, strict=True):
        assert not one.float().isnan().any()
        assert torch.equal(one, other)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.fixture(params=[1, 4], ids=["a tile", "four tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of a program."""
    monkeypatch.setattr(quantize, "tiles_each", lambda tiles, device: request.param)
    monkeypatch.setattr(norm, "tiles_each", lambda tiles, device: request.param)


@DTYPES
@pytest.mark.parametrize("columns", [1152, 100])
@pytest.mark.parametrize("quant", [False, True], ids=["", "quantized"])
@pytest.mark.parametrize("add", [False, True], ids=["", "add"])
def test_norms(
    columns: int, quant: bool, add: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if quant and not takes_fp8(torch.device(DEVICE)):
        pytest.skip("needs e4m3")
    x = random(ROWS, columns + 8, dtype=dtype)[:, :columns]
    weight = random(columns, dtype=dtype)
    residual = random(ROWS, columns + 16, dtype=dtype)[:, :columns] if add else None
    kernel = "_norm_rows_kernel" if dtype == torch.bfloat16 else "_norm_kernel"
    same_in_both_forms(
        lambda: norm.add_norm(x, residual, weight, 1e-6, quant), [kernel], monkeypatch
    )


@DTYPES
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("columns", [3072, 384, 100])
def test_swiglu(columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(ROWS, 2 * columns + 8, dtype=dtype)[:, : 2 * columns] * 5
    same_in_both_forms(lambda: norm.swiglu(x), ["_swiglu_rows_kernel"], monkeypatch)
    if takes_fp8(x.device):
        same_in_both_forms(lambda: norm.swiglu_fp8(x), ["_swiglu_rows_kernel"], monkeypatch)


@DTYPES
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("columns", [3072, 896, 100])
def test_quantize(columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(ROWS, columns + 8, dtype=dtype)[:, :columns]
    if takes_fp8(x.device):
        same_in_both_forms(lambda: quantize.quantize(x), ["_quantize_rows_kernel"], monkeypatch)


@DTYPES
@pytest.mark.parametrize("base", [False, True], ids=["", "base"])
@pytest.mark.parametrize("absent", [False, True], ids=["all here", "some absent"])
@pytest.mark.parametrize(("hidden", "pieces"), [(3072, 8), (7168, 4), (72, 8)])
def test_sums(
    hidden: int,
    pieces: int,
    absent: bool,
    base: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pieces: of a program at most. 7168 columns are seven: four, and three of four."""
    monkeypatch.setattr(combine, "PIECES", pieces)
    top_k = 3
    y = random(ROWS * top_k, hidden, dtype=dtype)
    ids = None
    if absent:
        ids = torch.where(torch.rand(ROWS, top_k) < 0.3, -1, torch.arange(top_k)).to(DEVICE)
        y[ids.flatten() < 0] = float("nan")
    weights = torch.rand(ROWS, top_k, device=DEVICE)
    beside = random(ROWS, hidden, dtype=dtype) if base else None
    same_in_both_forms(
        lambda: combine.combine(y, ids, weights, beside), ["_combine_pieces_kernel"], monkeypatch
    )


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


@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", ["latent query", "quantized", "heads"])
def test_latents(
    kind: str, interleaved: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind MLA's joint projection; the cache entry of one token is not to be written."""
    query, rank, rotary = 240, 64, 16
    x = random(ROWS, query + rank + rotary, dtype=dtype)
    angle = torch.randn(ROWS, rotary // 2, device=DEVICE) * 3
    slots = torch.randperm(ROWS, device=DEVICE)
    slots[4] = -1
    places = TokenPlaces(angle.cos(), angle.sin(), slots)
    weights = random(query, dtype=dtype), random(rank, dtype=dtype)
    if kind == "quantized" and not takes_fp8(x.device):
        pytest.skip("needs e4m3")

    def epilogue() -> list[Any]:
        plane = torch.zeros(3, 4, rank + rotary, dtype=dtype, device=DEVICE)
        rows = x.clone()
        heads = 5 if kind == "heads" else 0
        made = rope_kv_write.latent_epilogue(
            rows, None if heads else weights[0], weights[1], places, plane, 1e-6, interleaved,
            kind == "quantized", heads,
        )  # fmt: skip
        return [rows, plane, *([] if made is None else [made])]

    same_in_both_forms(epilogue, ["_latent_kernel"], monkeypatch)


def test_programs_take_several_tiles_where_all_multiprocessors_have_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantize, "multiprocessors", lambda device: 10)
    device = torch.device(DEVICE)
    assert quantize.tiles_each(319, device) == 1
    assert quantize.tiles_each(320, device) == quantize.TILES == 4
