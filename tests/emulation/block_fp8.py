"""Operands of block-fp8 products on the CPU, what fp64 makes of them, and what a compiled kernel
does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rorqual.ops import reference
from rorqual.ops.reference import FP8, Weight
from tests.emulation import ptx_interpreter
from tests.emulation.ptx_kernels import Kernel, run_time
from tests.emulation.ptx_memory import TensorMap


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


def run_compiled(
    kernel: Kernel,
    ptx: str,
    programs: int,
    x: Tensor,
    scale: Tensor,
    weight: Weight,
    bias: Tensor | None,
    boxes: Sequence[tuple[int, int]],
    shared: Sequence[Tensor] = (),
    seed: int | None = None,
) -> Tensor:
    """What the kernel, or a changed `ptx` of it, makes of these operands; whether it is right, and
    free of races. boxes: of bulk copies of x, of the weights and of the result; shared: what
    programs share, after the result."""
    y = torch.full((x.shape[0], weight.data.shape[0]), float("nan"), dtype=torch.bfloat16)
    x_map, w_map, y_map = (
        TensorMap(tensor, box, 128) for tensor, box in zip((x, weight.data, y), boxes, strict=True)
    )
    strides = [*run_time(scale.stride(0)), scale.stride(1)]
    ptx_interpreter.run(
        ptx or kernel.ptx,
        kernel.shared,
        (programs,),
        [
            x_map,
            scale,
            w_map,
            weight.scale,
            *run_time(bias),
            y,
            y_map,
            *shared,
            x.shape[0],
            *strides,
        ],
        [y, *shared],
        seed,
        early=[weight.data],
    )
    assert error(y, exact(x, scale, weight, bias)) < 2e-3
    return y
