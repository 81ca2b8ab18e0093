"""Random weights of every format that the kernels of ops/triton/quantized take."""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.rounding import FP8
from rorqual.ops.triton.quantized import int4_order, operands


def weight(
    kind: str,
    activation: str,
    *shape: int,
    group: int = 0,
    share: int = 1,
    zero: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Weight:
    """[.., rows, columns]; group: columns of a scale, 0: all; share: rows of one."""
    *stack, rows, columns = shape
    each = group or columns
    places = (*stack, -(-rows // share), -(-columns // each))
    if kind == "int4":
        data = torch.randint(0, 256, (*stack, rows, columns // 2), dtype=torch.uint8)
        scale = ((torch.rand(places) - 0.5) * columns**-0.5).to(dtype)
        zeros = torch.randint(0, 16, places, dtype=torch.uint8) if zero else None
        return Weight(data, scale, (1, each), zeros, activation)
    wide = torch.randn(*stack, rows, columns)
    data = (wide * 40).round().clamp(-127, 127).to(torch.int8) if kind == "int8" else wide.to(FP8)
    scale = (torch.rand(places) + 0.5) * columns**-0.5 / (40 if kind == "int8" else 1)
    return Weight(data, scale, (share, each), activation=activation)


def drawn(group: int, *shape: int) -> tuple[Weight, Tensor]:
    """An int4 weight as loaded, and its data as the kernels take it, in chunks of 128 columns."""
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    scale = ((torch.rand(*shape[:-1], shape[-1] // group) + 0.5) * 0.02).bfloat16()
    weight = Weight(data, scale, (1, group), None, "wide")
    return weight, int4_order.turned(data, 128, "wide")


def prepared(plain: Weight, device: str) -> Weight:
    """A copy as the backend lays it out, on the device."""
    data, scale, zero, order = (
        None if part is None else part.clone().to(device)
        for part in (plain.data, plain.scale, plain.zero, plain.group_index)
    )
    assert data is not None
    made = Weight(data, scale, plain.block, zero, plain.activation, order)
    if operands.takes_int4(made):
        int4_order.turn(made)
    return made


def prepared_experts(plain: ExpertWeights, device: str) -> ExpertWeights:
    return ExpertWeights(prepared(plain.gate_up, device), prepared(plain.down, device))


def difference(got: Tensor, expected: Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2), in fp64. NaN fails every comparison."""
    x = got.cpu().double()
    y = expected.double()
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()
