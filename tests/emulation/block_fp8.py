"""Operands of block-fp8 products on the CPU, and what fp64 makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.ops import reference
from rorqual.ops.reference import FP8, Weight


def operands(tokens: int, columns: int, rows: int) -> tuple[Tensor, Tensor, Weight]:
    """x e4m3 and its scales, stored column after column as the quantizing kernels do; weights."""
    blocks = torch.randn(tokens, columns // 128, 128)
    scale = blocks.abs().amax(-1) / 448
    data = (blocks / scale[..., None]).view(tokens, columns).to(FP8)
    weight = Weight(
        (torch.randn(rows, columns) * 100).to(FP8),
        torch.rand(-(-rows // 128), columns // 128) + 0.5,
    )
    return data, scale.t().contiguous().t(), weight


def exact(x: Tensor, scale: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    y = (x.double() * scale.double().repeat_interleave(128, 1)) @ reference.dequantize(
        weight, torch.float64
    ).t()
    return y if bias is None else y + bias.double()


def error(y: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm; infinite where a value was left out."""
    return ((y.double() - expected).norm() / expected.norm()).nan_to_num(float("inf")).item()
