"""Grouped products of experts whose results come in pieces of columns, so that each can be sent
while the next is computed. The kernels are those of grouped_gemm.py.

To the second product a matrix [hidden, inner] in n pieces is n matrices [hidden / n, inner]: expert
e's piece i is matrix e n + i. So blocks of rows are those of the first product, with other numbers
of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rorqual.ops.activation import Quantized
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.moe.align import moe_align_block_size
from rorqual.ops.triton.moe.combine import combine
from rorqual.ops.triton.moe.grouped_gemm import GroupedGemmPlan, first_product

PIECES = 2
# of a result [T, hidden]: a message of half of it takes longer than what launching one more costs
LEAST_BYTES = 16 << 20


def in_pieces(tokens: int, w: ExpertWeights, dtype: torch.dtype) -> bool:
    """Whether `experts_in_pieces` computes such a result, and pays. Ranks with as many tokens
    agree."""
    hidden = w.down.data.shape[1]
    blocks = w.gate_up.fp8_blocks and w.down.fp8_blocks
    plain = not (w.gate_up.quantized or w.down.quantized)
    return (
        (blocks or plain)
        and hidden % (256 * PIECES) == 0
        and tokens * hidden * dtype.itemsize >= LEAST_BYTES
    )


def experts_in_pieces(
    x: Tensor | Quantized,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    plan: GroupedGemmPlan,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """The bits of `grouped_experts` in PIECES pieces of columns, [T, hidden / PIECES] each, from
    the first. Each is launched when it is asked for."""
    blocks = moe_align_block_size(ids, w.down.data.shape[0], plan.rows)
    second = first_product(x, w, plan, blocks, ids.shape[1], dtype)
    down = _pieces_of(w.down)
    for piece in range(PIECES):
        numbers = blocks.blocks.clone()
        numbers[0].mul_(PIECES).add_(piece)
        y = second(down, replace(blocks, blocks=numbers))
        yield combine(y, ids, weights)


def _pieces_of(down: Weight) -> Weight:
    experts, hidden, inner = down.data.shape
    data = down.data.view(experts * PIECES, hidden // PIECES, inner)
    if down.scale is None:
        return replace(down, data=data, scratch=None)
    _, rows, columns = down.scale.shape
    scale = down.scale.view(experts * PIECES, rows // PIECES, columns)
    return replace(down, data=data, scale=scale, scratch=None)
