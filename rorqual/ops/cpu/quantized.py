"""Products with weights of eight and four bits by the compiled kernels, which read a Weight as it
is kept: nothing is packed, nothing is kept twice, and experts that move leave nothing stale."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.ops.cpu.native import STORAGE, Native, unknown_expert
from rorqual.ops.interface import MLAWeights, TokenPlaces
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


@dataclass
class _Kept:
    """Of one weight: where data and zero points are, its scale, why no kernel takes it, and what
    the kernels read."""

    at: tuple[int, int]
    scale: Tensor | None
    reason: str
    packed: _Packed | None


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


def _kept(weight: Weight) -> _Kept:
    """What is known of a weight since its first product: that its numbers lie where they lay."""
    zero = weight.zero
    at = (weight.data.data_ptr(), 0 if zero is None else zero.data_ptr())
    kept: _Kept | None = weight.scratch
    if kept is None or kept.at != at or kept.scale is not weight.scale:
        reason = refusal(weight)
        packed = None if reason else _described(weight, _format(weight))
        kept = weight.scratch = _Kept(at, weight.scale, reason, packed)
    return kept


def refused(*weights: Weight) -> str:
    """The first reason of `refusal`, empty where every weight is taken."""
    return next((reason for weight in weights if (reason := _kept(weight).reason)), "")


def _at(weight: Weight) -> int:
    """For the kernels; valid while the weight is."""
    packed = _kept(weight).packed
    assert packed is not None
    return ctypes.addressof(packed)


def linear(native: Native, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """reference.linear of a weight that is not refused."""
    x = x.contiguous()
    assert x.shape[1] == weight.columns
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    y = x.new_empty(x.shape[0], weight.data.shape[0])
    native.lib.rq_linear_packed(
        int(x.dtype == torch.float32),
        _at(weight),
        x.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.shape[0],
    )
    return y


def mlp(native: Native, x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """The SwiGLU layer of two weights that are not refused."""
    x = x.contiguous()
    assert x.shape[1] == gate_up.columns
    assert gate_up.data.shape[0] == 2 * down.columns
    y = x.new_empty(x.shape[0], down.data.shape[0])
    at = (_at(gate_up), _at(down), x.data_ptr(), y.data_ptr())
    native.lib.rq_mlp_packed(int(x.dtype == torch.float32), *at, x.shape[0])
    return y


def mla_prologue(
    native: Native, x: Tensor, w: MLAWeights, places: TokenPlaces, plane: Tensor
) -> Tensor:
    """As Native.mla_prologue, of projections that are not refused."""
    bias = w.down_bias
    assert x.is_contiguous()
    assert x.shape[1] == w.down.columns
    assert bias is None or bias.dtype == x.dtype
    q = x.new_empty(x.shape[0], w.config.num_heads, w.config.qk_dim)
    matrices = (_at(w.down), _at(w.down if w.q_b is None else w.q_b))
    tensors = (x, places.cos, places.sin, plane, places.slots, q)
    assert all(given.is_contiguous() for given in tensors)
    native.lib.rq_mla_prologue_packed(
        int(x.dtype == torch.float32),
        native.layer_of(w),
        *matrices,
        *(given.data_ptr() for given in tensors),
        x.shape[0],
    )
    return q


def experts_refusal(w: ExpertWeights) -> str:
    """As `refusal`, of both stacks."""
    if w.gate_up.is_int4 != w.down.is_int4:
        return "experts of two formats"
    return refused(w.gate_up, w.down)


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
    held = [_kept(matrix).packed for matrix in (w.gate_up, w.down)]
    first, second = held
    assert first is not None
    assert second is not None
    if first.format != second.format:  # W4A16 takes all of four bits
        held = [_described(matrix, W4A16) for matrix in (w.gate_up, w.down)]
    native.keep(held)
    unknown = native.lib.rq_experts_packed(
        int(x.dtype == torch.float32),
        *(ctypes.addressof(matrix) for matrix in held if matrix is not None),
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
