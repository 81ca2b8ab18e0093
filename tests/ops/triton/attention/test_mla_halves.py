"""MLA's prologue in two halves: down projections of each rank's rows, gathered, give the queries
and the cache of the whole."""

from __future__ import annotations

import pytest
import torch

from rorqual.config.model import MLAConfig
from rorqual.ops import reference
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import MLAWeights, Ops, TokenPlaces
from rorqual.ops.reference import Weight
from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

HIDDEN = 64
ROWS = 7
PAGE = 4
BACKENDS = [
    "reference",
    "torch",
    "native",
    pytest.param(
        "triton", marks=pytest.mark.skipif(SKIP_REASON is not None, reason=str(SKIP_REASON))
    ),
]


def backend(name: str) -> tuple[Ops, str]:
    if name == "triton":
        from rorqual.ops.triton.backend import TritonOps

        return TritonOps(), DEVICE
    return (Ops() if name == "reference" else CpuOps(native=name == "native")), "cpu"


def weights_of(
    q_lora: int | None, interleaved: bool, device: str, generator: torch.Generator
) -> MLAWeights:
    mla = MLAConfig(
        num_heads=2, q_lora_rank=q_lora, kv_lora_rank=32, nope_dim=24, rope_dim=16, v_dim=20
    )

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    queries = mla.num_heads * mla.qk_dim
    down = Weight(draw((q_lora or queries) + mla.latent_dim, HIDDEN) / 8)
    q_norm, q_b = (draw(q_lora), Weight(draw(queries, q_lora) / 6)) if q_lora else (None, None)
    kv_b = Weight(draw(mla.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank))
    return MLAWeights(
        mla,
        down,
        draw(down.data.shape[0]),
        q_norm,
        q_b,
        draw(mla.kv_lora_rank),
        kv_b,
        1e-6,
        interleaved,
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("q_lora", "interleaved"), [(40, True), (40, False), (None, True)])
def test_halves_of_the_prologue(name: str, q_lora: int | None, interleaved: bool) -> None:
    """Uneven shares, one of them empty; the gathered row is one tensor, so its parts lie apart."""
    generator = torch.Generator().manual_seed(1)
    ops, device = backend(name)
    w = weights_of(q_lora, interleaved, device, generator)
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(device)
    angles = torch.rand(ROWS, w.config.rope_dim // 2, generator=generator).to(device)
    cos = angles.cos()
    sin = angles.sin()
    slots = torch.randperm(12, generator=generator)[:ROWS].to(device)
    planes = [torch.full((3, PAGE, w.config.latent_dim), -1.0, device=device) for _ in range(2)]
    places = TokenPlaces(cos, sin, slots)
    _, want, _ = Ops().mla_prologue(x, w, places, planes[0])
    shares = [slice(0, 4), slice(4, 4), slice(4, ROWS)]
    rows = torch.cat([torch.cat(ops.mla_down(x[own], w, cos[own], sin[own]), -1) for own in shares])
    query, entries = rows.split((w.query_rows, w.config.latent_dim), -1)
    got, left = ops.mla_up(query, entries, w, places, planes[1])
    assert left is None
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(planes[1], planes[0], atol=1e-5, rtol=1e-5)
    _, kept = ops.mla_up(query, entries, w, places, None)
    assert kept is entries, "without a latent plane the caller decompresses them"


@pytest.mark.parametrize("name", BACKENDS)
def test_the_second_half_fills_an_fp8_cache(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    ops, device = backend(name)
    w = weights_of(40, True, device, generator)
    rank = w.config.kv_lora_rank
    dim = w.config.latent_dim
    query, entries = (
        torch.randn(ROWS, n, generator=generator).bfloat16().float().to(device) for n in (40, dim)
    )
    angles = torch.rand(ROWS, w.config.rope_dim // 2, generator=generator).to(device)
    slots = torch.arange(1, ROWS + 1, device=device)
    want = reference.pack_latent(entries, rank)
    plane = torch.zeros(3, PAGE, want.shape[-1], dtype=torch.uint8, device=device)
    ops.mla_up(query, entries, w, TokenPlaces(angles.cos(), angles.sin(), slots), plane)
    assert torch.equal(plane.flatten(0, 1)[1 : ROWS + 1], want)
    assert not plane.flatten(0, 1)[ROWS + 1 :].any()
