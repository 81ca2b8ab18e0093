"""Weight layouts of the NPU's operators: transposed, [columns, rows], in the NZ tile format.
Converted once after loading, replacing the loaded tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rorqual.ops.interface import MLAWeights
from rorqual.ops.reference import Weight
from rorqual.ops.rounding import unpack_int4

npu = torch.ops.npu
FRACTAL_NZ = 29  # CANN's number of the format


def to_nz(matrix: Tensor) -> Tensor:
    """[..., rows, columns] of torch's linear layers to [..., columns, rows] in NZ."""
    turned = matrix.transpose(-1, -2).contiguous()
    return turned if turned.is_meta else npu.npu_format_cast(turned, FRACTAL_NZ)


def turn(weight: Weight) -> None:
    """Convert a matrix, or a stack of them, to the layout of `linear` and `grouped_matmul`."""
    if weight.turned or not weight.data.numel():
        return
    if weight.is_int4:
        _turn_int4(weight)
    else:
        weight.data = to_nz(weight.data)
        if weight.scale is not None:
            # [..., rows, 1] to [..., rows]
            weight.scale = weight.scale.squeeze(-1).contiguous()
    weight.turned = True


def _turn_int4(weight: Weight) -> None:
    """[..., rows, columns / 2] uint8 to int32 [..., columns, rows / 8], eight numbers each, and
    scales [..., groups, rows]. Symmetric numbers 0 to 15 become -8 to 7."""
    assert weight.scale is not None
    values = unpack_int4(weight.data).to(torch.int32) - 8
    turned = values.transpose(-1, -2).contiguous()
    stack = turned.flatten(0, -3) if turned.dim() > 2 else turned[None]
    if turned.is_meta:
        packed = torch.empty(
            *turned.shape[:-1], turned.shape[-1] // 8, dtype=torch.int32, device="meta"
        )
    else:
        each = [npu.npu_convert_weight_to_int4pack(matrix) for matrix in stack]
        packed = torch.stack(each).view(*turned.shape[:-1], -1)
    weight.data = packed
    weight.scale = weight.scale.transpose(-1, -2).contiguous()


class PrologueWeights:
    """What the MLA prologue multiplies by, each apart: the query's way down (None without a query
    latent: then `down` makes queries) and up, the latent's way down; [columns, rows] in NZ. uk [H,
    nope, C] plain. Of int8 weights the scales, one a row, as well."""

    def __init__(self, w: MLAWeights, hidden: int):
        mla = w.config
        rows = w.query_rows
        self.hidden = hidden
        self.first = part_of(w.down, 0, rows)
        self.latent = part_of(w.down, rows, rows + mla.latent_dim)
        self.up = None if w.q_b is None else replace(w.q_b)
        for weight in (self.first, self.latent, self.up):
            if weight is not None:
                turn(weight)
        self.bias = None if w.down_bias is None else w.down_bias.split((rows, mla.latent_dim))
        self.uk = w.w_uk.contiguous()
        self.uv = w.w_uv.contiguous()


def part_of(weight: Weight, start: int, stop: int) -> Weight:
    """Rows of a matrix as one of their own."""
    part = weight.part(start, stop)
    scale = None if part.scale is None else part.scale.clone()
    return Weight(part.data.clone(), scale, part.block, None, part.activation)
