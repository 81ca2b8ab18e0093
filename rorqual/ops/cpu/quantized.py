"""Products with weights of eight and four bits by the compiled kernels, which read a Weight as it
is kept: nothing is packed, nothing is kept twice, and experts that move leave nothing stale."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rorqual.ops.cpu.native import STORAGE, Native, unknown_expert
from rorqual.ops.reference import ExpertWeights, Weight

# As in quantized.h.
W8A8, W4A16, W4A16_BLOCKS, W4A8 = range(4)
ROUNDINGS = ("wide", "fp8_token", "fp8_group", "fp8_group_ue8m0", "int8_token", "int8_group")
NIBBLES = 32  # columns of a block of four bits
BYTES = 64  # columns of a register of eight bits


class _Packed(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("format", "rows", "columns", "group", "wide_scales", "rounding")
    ]
    _fields_ += [(name, ctypes.c_void_p) for name in ("data", "scales", "zeros")]


def refusal(weight: Weight) -> str:
    """Why no compiled kernel takes a quantized weight; empty where one does."""
    rows, group = weight.block
    assert weight.scale is not None
    if weight.group_index is not None:
        return "groups in an order of their own (desc_act)"
    if rows > 1:
        return f"{weight.data.dtype} in blocks of {rows}x{group}"
    if any(not part.is_contiguous() for part in weight.tensors()):
        return "a view whose rows lie apart"
    if weight.is_int4:
        kinds: tuple[torch.dtype, ...] = STORAGE
        if group % 2:
            return f"groups of {group} columns"
    elif weight.data.dtype == torch.int8:
        kinds = (torch.float32,)
        if weight.activation != "int8_token":
            return f"int8 with activations {weight.activation}"
        if group < weight.columns and (group % BYTES or weight.columns % group):
            return f"int8 in groups of {group} columns"
    else:
        return f"weights of {weight.data.dtype}"
    return "" if weight.scale.dtype in kinds else f"scales of {weight.scale.dtype}"


def _format(weight: Weight) -> int:
    if not weight.is_int4:
        return W8A8
    group = min(weight.block[1], weight.columns)
    blocks = group % NIBBLES == 0 and weight.columns % group == 0
    if not blocks:
        return W4A16
    return W4A8 if weight.activation == "int8_token" else W4A16_BLOCKS


def _described(weight: Weight, form: int) -> _Packed:
    """For the kernels; valid while the weight is."""
    assert weight.scale is not None
    return _Packed(
        form,
        weight.data.shape[-2],
        weight.columns,
        min(weight.block[1], weight.columns),
        int(weight.scale.dtype == torch.float32),
        ROUNDINGS.index(weight.activation),
        weight.data.data_ptr(),
        weight.scale.data_ptr(),
        0 if weight.zero is None else weight.zero.data_ptr(),
    )


def linear(native: Native, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """reference.linear of a weight that is not refused."""
    x = x.contiguous()
    assert x.shape[1] == weight.columns
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    y = x.new_empty(x.shape[0], weight.data.shape[0])
    held = _described(weight, _format(weight))
    native.lib.rq_linear_packed(
        int(x.dtype == torch.float32),
        ctypes.addressof(held),
        x.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.shape[0],
    )
    return y


def experts_refusal(w: ExpertWeights) -> str:
    """As `refusal`, of both stacks."""
    if w.gate_up.is_int4 != w.down.is_int4:
        return "experts of two formats"
    return refusal(w.gate_up) or refusal(w.down)


def experts(native: Native, x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> Tensor:
    """reference.experts of stacks that are not refused. An id that is neither a slot nor -1 is an
    IndexError, and nothing is computed."""
    slots, hidden, _ = w.down.data.shape
    assert x.shape == (ids.shape[0], hidden)
    assert w.gate_up.columns == hidden
    assert w.gate_up.data.shape[:2] == (slots, 2 * w.down.columns)
    assert weights.shape == ids.shape
    assert weights.dtype == torch.float32
    x, ids, weights = x.contiguous(), ids.long().contiguous(), weights.contiguous()
    y = torch.empty_like(x)
    found = {_format(w.gate_up), _format(w.down)}
    form = found.pop() if len(found) == 1 else W4A16  # which takes all of four bits
    held = (_described(w.gate_up, form), _described(w.down, form))
    unknown = native.lib.rq_experts_packed(
        int(x.dtype == torch.float32),
        *(ctypes.addressof(matrix) for matrix in held),
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        y.data_ptr(),
        *ids.shape,
        slots,
    )
    if unknown < ids.numel():
        raise unknown_expert(int(ids.flatten()[unknown]), slots)
    return y
