"""MLA's absorb products on tensor cores, as compiled for Hopper: the values, and the bytes of
heads quantized where they are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.emulation.ptx_interpreter import Grid, Launch
from tests.emulation.ptx_kernels import compiled

pytestmark = pytest.mark.exhaustive

TOKENS = 5
HEADS = 2
NOPE = 128
ROPE = 64
VALUE = 128
RANK = 384
LAUNCHES = f"""
from rorqual.ops.triton.gemm import per_head_gemm
x = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
up = x({HEADS}, {NOPE + VALUE}, {RANK})
per_head_gemm.heads_dot(x({TOKENS}, {HEADS}, {NOPE + ROPE})[..., :{NOPE}], up[:, :{NOPE}])
per_head_gemm.joined_heads_dot(x({TOKENS}, {HEADS}, {RANK}), up[:, {NOPE}:].transpose(1, 2))
"""


def test_products_and_bytes(tmp_path: Path) -> None:
    going_in, coming_out = compiled(LAUNCHES, tmp_path)
    torch.manual_seed(0)
    up = torch.randn(HEADS, NOPE + VALUE, RANK).bfloat16()
    q, latent = (torch.randn(TOKENS, HEADS, columns).bfloat16() for columns in (NOPE + ROPE, RANK))
    w_uk = up[:, :NOPE]
    w_uv = up[:, NOPE:].transpose(1, 2)

    wide = torch.full((TOKENS, HEADS, RANK), float("nan"), dtype=torch.bfloat16)
    strides = [HEADS * (NOPE + ROPE), NOPE + ROPE, *w_uk.stride()[:2]]
    run(
        Launch(going_in.ptx, going_in.shared, (HEADS, 3), [q, w_uk, wide, TOKENS, *strides, 0]),
        [wide],
        up,
    )
    expected = torch.einsum("tha,hab->thb", q[..., :NOPE].double(), w_uk.double())
    assert ((wide.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-3).all()

    heads = torch.full((TOKENS, HEADS, VALUE), float("nan"), dtype=torch.bfloat16)
    data = torch.zeros(TOKENS, HEADS, VALUE, dtype=torch.uint8)
    scale = torch.zeros(HEADS, TOKENS)
    strides = [HEADS * RANK, RANK, w_uv.stride(0), w_uv.stride(2)]  # ones are constants
    arguments = [latent, w_uv, heads, data, scale, TOKENS, *strides, TOKENS]
    run(Launch(coming_out.ptx, coming_out.shared, (HEADS, 1), arguments), [heads, data, scale], up)
    expected = torch.einsum("tha,hab->thb", latent.double(), w_uv.double())
    assert ((heads.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-3).all()
    factor = heads.float().abs().amax(2) / 448.0
    assert torch.equal(scale.t(), factor)
    assert torch.equal(
        data.view(torch.float8_e4m3fn).float(),
        (heads.float() / factor[..., None]).to(torch.float8_e4m3fn).float(),
    )


def run(launch: Launch, written: list[torch.Tensor], early: torch.Tensor) -> None:
    """early: what may be read before the kernel before is complete, being weights."""
    programs = Grid([launch], written, [early])
    programs.in_turn(range(len(programs.programs)))
