"""Norms, activations, rotations, quantisation and dense products."""

from __future__ import annotations

import torch
from torch.nn import functional

from .core import (
    BF16,
    DTYPE_OF_CODE,
    F16,
    F32,
    I8,
    I32,
    I64,
    NZ,
    Checks,
    _Switches,
    exact_matmul,
    mark_nz,
    pack_int4,
    quantize_rows,
    rms_norm,
    rotate_half,
    rotate_interleaved,
    rotate_pairs,
    unpack_int4,
)

Tensor = torch.Tensor
FLOATS = (BF16, F16, F32)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """input, gamma: same dtype, gamma of the last axes [doc]; rstd float32 [meta]."""
    c = Checks("npu_rms_norm")
    c.dtype("input", input, *FLOATS)
    c.dtype("gamma", gamma, *FLOATS)
    c.rank("gamma", gamma, 1)
    c.shape("gamma", gamma, input.shape[-1])
    normed, rstd = rms_norm(input, gamma, epsilon)
    return normed.to(input.dtype), rstd


def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """x1, x2, gamma: same dtype, x1 and x2 of one shape [doc].

    The norm reads the sum in float32, not the rounded sum that is the third output [reading].
    """
    c = Checks("npu_add_rms_norm")
    c.dtype("x1", x1, *FLOATS)
    c.same_dtype("x2", x2, x1)
    c.same_dtype("gamma", gamma, x1)
    c.shape("x2", x2, *x1.shape)
    c.rank("gamma", gamma, 1)
    c.shape("gamma", gamma, x1.shape[-1])
    total = x1.float() + x2.float()
    normed, rstd = rms_norm(total, gamma, epsilon)
    return normed.to(x1.dtype), rstd, total.to(x1.dtype)


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu of the first half times the second half along dim [doc]."""
    c = Checks("npu_swiglu")
    c.dtype("input", input, *FLOATS)
    c.need(-input.dim() <= dim < input.dim(), "dim", f"{dim} of a rank {input.dim()} tensor")
    c.need(input.shape[dim] % 2 == 0, "input", "the split axis is odd")
    first, second = input.float().chunk(2, dim)
    return (functional.silu(first) * second).to(input.dtype)


def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """input, r1 (cos), r2 (sin): rank 4, D even and below 896, broadcastable [doc]."""
    c = Checks("npu_rotary_mul")
    c.absent(rotate=rotate)
    c.choice("rotary_mode", rotary_mode, "half", "interleave")
    width = input.shape[-1]
    for name, x in (("input", input), ("r1", r1), ("r2", r2)):
        c.rank(name, x, 4)
        c.dtype(name, x, *FLOATS)
        c.need(x.shape[-1] == width, name, f"width {x.shape[-1]}, input has {width}")
        c.same_dtype(name, x, input)
        fits = all(a in (1, b) for a, b in zip(x.shape, input.shape, strict=True))
        c.need(fits, name, f"{tuple(x.shape)} does not broadcast to {tuple(input.shape)}")
    c.shape("r2", r2, *r1.shape)
    c.need(width % 2 == 0 and width < 896, "input", f"width {width}")
    turn = rotate_half if rotary_mode == "half" else rotate_pairs
    return turn(input, r1, r2).to(input.dtype)


def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B,N,S,64], cos and sin [B,1 or N,S or 1,64] [hia]: pairs to halves, then halves turn."""
    c = Checks("npu_interleave_rope")
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        c.rank(name, t, 4)
        c.dtype(name, t, BF16, F16)
        c.same_dtype(name, t, x)
        c.width(name, t.shape[-1], 64)
        c.need(t.shape[-1] == x.shape[-1], name, "its width is not that of x")
    c.shape("sin", sin, *cos.shape)
    fits = cos.shape[0] == x.shape[0] and cos.shape[1] in (1, x.shape[1])
    fits = fits and cos.shape[2] in (1, x.shape[2])
    c.need(fits, "cos", f"{tuple(cos.shape)} beside x {tuple(x.shape)}")
    return rotate_interleaved(x, cos, sin).to(x.dtype)


def npu_apply_rotary_pos_emb(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[Tensor, Tensor]:
    """BSND rank 4 or TND rank 3, half only, D 64 or 128, one dtype [doc].

    The page says that query and key are changed in place; the schema has no alias mark and the
    Meta kernel returns new tensors: outputs are new tensors, inputs are left alone [reading].
    """
    c = Checks("npu_apply_rotary_pos_emb")
    c.choice("layout", layout, "BSND", "TND")
    c.choice("rotary_mode", rotary_mode, "half")
    rank = 4 if layout == "BSND" else 3
    for name, x in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        c.rank(name, x, rank)
        c.dtype(name, x, *FLOATS)
        c.same_dtype(name, x, query)
        c.need(x.shape[: rank - 2] == query.shape[: rank - 2], name, "other tokens than query")
        c.need(x.shape[-1] == query.shape[-1], name, "its width is not that of query")
        c.width(name, x.shape[-1], 64, 128)
    for name, x in (("cos", cos), ("sin", sin)):
        c.need(x.shape[-2] == 1, name, "axis N must be 1")
    turned = (rotate_half(x, cos, sin).to(x.dtype) for x in (query, key))
    return next(turned), next(turned)


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """indices [..., 1] int32 or int64 into axis 0, updates [..., rest] of one dtype [hia].

    Ids outside and ids named twice (their order is undefined) are refused.
    """
    c = Checks("npu_scatter_nd_update_")
    c.need(indices.dtype in (I32, I64), "indices", f"dtype {indices.dtype}")
    c.need(indices.shape[-1] == 1, "indices", "only the first axis is emulated")
    c.same_dtype("updates", updates, input)
    c.shape("updates", updates, *indices.shape[:-1], *input.shape[1:])
    rows = indices.reshape(-1).long()
    c.ids("indices", rows, 0, input.shape[0])
    c.unique("indices", rows)
    input[rows] = updates.reshape(-1, *input.shape[1:])
    return input


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """scale = rowmax|x * smooth| / 127 (7 for int4), y = round(x * smooth / scale) [doc]."""
    c = Checks("npu_dynamic_quant")
    c.dtype("input", input, BF16, F16)
    c.need(input.dim() > 1, "input", "rank must be above 1")
    c.choice("quant_mode", quant_mode, "pertoken")
    c.choice("dst_type_max", dst_type_max, 0.0)
    c.absent(group_index=group_index)
    target = I8 if dst_type is None else DTYPE_OF_CODE.get(dst_type)
    c.need(target in (I8, torch.quint4x2), "dst_type", f"{dst_type} is not int8 or quint4x2")
    x = input.float()
    if smooth_scales is not None:
        c.dtype("smooth_scales", smooth_scales, BF16, F16)
        c.same_dtype("smooth_scales", smooth_scales, input)
        c.shape("smooth_scales", smooth_scales, input.shape[-1])
        x = x * smooth_scales.float()
    if target is I8:
        return quantize_rows(x)
    c.need(input.shape[-1] % 8 == 0, "input", "int4 needs a last axis divisible by 8")
    values, scale = quantize_rows(x, 7)
    return pack_int4(values), scale


def _output_dtype(c: Checks, code: int | None, *allowed: torch.dtype) -> torch.dtype:
    target = DTYPE_OF_CODE.get(code) if code is not None else I8
    if target is F32 and BF16 in allowed and _Switches.float32:
        return F32
    c.need(target in allowed, "output_dtype", f"{target} is not one of {allowed}")
    assert target is not None
    return target


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """x1 [.., m, k], x2 [k, n] int8, scale (1,) or (n,) float32 or bfloat16, pertoken_scale (m,)
    float32, bias int32 (added to the product) or float (added after scaling) [doc].

    output int32 has neither scaling by pertoken_scale nor by scale [reading]: scale is given
    because the schema asks for it.
    """
    c = Checks("npu_quant_matmul")
    c.absent(offset=offset, x1_dtype=x1_dtype, x2_dtype=x2_dtype, group_sizes=group_sizes)
    c.absent(y_scale=y_scale, scale_dtype=scale_dtype, pertoken_scale_dtype=pertoken_scale_dtype)
    c.dtype("x1", x1, I8)
    c.dtype("x2", x2, I8)
    c.rank("x1", x1, 2, 3)
    c.rank("x2", x2, 2)
    c.need(x1.shape[-1] == x2.shape[0], "x2", f"K {x2.shape[0]}, x1 has {x1.shape[-1]}")
    c.need(x1.shape[-1] <= 65535 and x2.shape[-1] <= 65535, "x1", "last axis above 65535")
    target = _output_dtype(c, output_dtype, F16, BF16, I32)
    columns = x2.shape[1]
    rows = x1.numel() // max(x1.shape[-1], 1)
    c.rank("scale", scale, 1)
    c.need(scale.shape[0] in (1, columns), "scale", f"{scale.shape[0]} scales, n is {columns}")
    c.dtype("scale", scale, F32, BF16)
    total = exact_matmul(x1, x2)
    if bias is not None:
        c.need(bias.shape in ((columns,), (1, columns)), "bias", f"shape {tuple(bias.shape)}")
        c.dtype("bias", bias, I32, BF16, F16, F32)
        if bias.dtype is I32:
            total = total + bias.double()
    if target is I32:
        c.need(pertoken_scale is None, "pertoken_scale", "has no place in an int32 output")
        c.need(bias is None or bias.dtype is I32, "bias", "must be int32 for an int32 output")
        return total.to(I32)
    out = total.float() * scale.float()
    if pertoken_scale is not None:
        c.dtype("pertoken_scale", pertoken_scale, F32)
        c.shape("pertoken_scale", pertoken_scale, rows)
        out = out * pertoken_scale.view(*x1.shape[:-1], 1)
    if bias is not None and bias.dtype is not I32:
        out = out + bias.float()
    return out.to(target)


def _group_rows(c: Checks, group_index: Tensor, rows: int) -> Tensor:
    c.dtype("group_index", group_index, I64)
    c.rank("group_index", group_index, 1)
    c.need(int(group_index.min()) >= 0, "group_index", "negative count")
    total = int(group_index.sum())
    c.need(total <= rows, "group_index", f"sum {total} beyond {rows} rows")
    return torch.repeat_interleave(torch.arange(len(group_index)), group_index)


def npu_dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: int | None = None,
    round_mode: int | None = None,
    activate_dim: int | None = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """x [T, 2H] int32 or bfloat16; weight_scale [groups, 2H] float32 and activation_scale [T]
    float32 with int32 only; quant_scale [groups, H]; group_index counts, int64; quant_mode 1;
    with groups H <= 10496 and a multiple of 64 [doc].

    Rows past the sum of group_index are undefined [doc]. weight_scale of rank 1 is refused;
    activation_scale may be (T,) or (T, 1)? The page says (T,) [doc].
    """
    c = Checks("npu_dequant_swiglu_quant")
    c.absent(bias=bias, quant_offset=quant_offset, round_mode=round_mode)
    c.choice("quant_mode", quant_mode, 1)
    c.choice("swiglu_mode", swiglu_mode, 0)
    c.choice("dst_type", dst_type, None, 1)
    c.choice("activate_dim", activate_dim, None, -1, x.dim() - 1)
    c.rank("x", x, 2)
    c.dtype("x", x, I32, BF16, F16)
    rows, double = x.shape
    c.need(double % 2 == 0, "x", "last axis is odd")
    groups = 1 if group_index is None else len(group_index)
    owner = torch.zeros(rows, dtype=I64)
    used = rows
    if group_index is not None:
        c.bound("x", double // 2, 0, 10496)
        c.need(_Switches.widths or double % 128 == 0, "x", "H is not a multiple of 64")
        owner = _group_rows(c, group_index, rows)
        used = len(owner)
    wide = x[:used].float()
    if x.dtype is I32:
        c.need(weight_scale is not None, "weight_scale", "int32 x needs it")
        c.need(activation_scale is not None, "activation_scale", "int32 x needs it")
        assert weight_scale is not None
        assert activation_scale is not None
        c.dtype("weight_scale", weight_scale, F32)
        c.shape("weight_scale", weight_scale, groups, double)
        c.dtype("activation_scale", activation_scale, F32)
        c.shape("activation_scale", activation_scale, rows)
        wide = wide * weight_scale[owner[:used]] * activation_scale[:used, None]
    else:
        c.need(weight_scale is None, "weight_scale", "only with int32 x")
        c.need(activation_scale is None, "activation_scale", "only with int32 x")
    left, right = wide.chunk(2, -1)
    gate, up = (left, right) if activate_left else (right, left)
    out = functional.silu(gate) * up
    if quant_scale is not None:
        c.dtype("quant_scale", quant_scale, F32, F16, BF16)
        c.shape("quant_scale", quant_scale, groups, double // 2)
        out = out * quant_scale.float()[owner[:used]]
    values, scale = quantize_rows(out)
    y = torch.full((rows, double // 2), 111, dtype=I8)
    scales = torch.full((rows,), 7777.0)
    y[:used] = values
    scales[:used] = scale
    return y, scales


def dequantized(
    c: Checks, values: Tensor, scale: Tensor, offset: Tensor | None, groups: int
) -> Tensor:
    """(values + offset) * scale, scale and offset [groups, N] along K [doc]."""
    length = values.shape[-2] // groups
    c.need(length * groups == values.shape[-2], "antiquant_scale", "groups do not divide K")
    wide = values.float()
    if offset is not None:
        wide = wide + offset.float().repeat_interleave(length, -2)
    return wide * scale.float().repeat_interleave(length, -2)


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    """x [M, K]; weight [K, N] int8 or [K, N/8] int32 (int4); antiquant_scale (1,), (N,), (1, N)
    or [K/group, N] of x's dtype; antiquant_offset alike; bias float32 for bfloat16 x;
    antiquant_group_size 0 or a multiple of 32 from 32 to K - 1 [doc].

    A transposed int32 weight ([K/8, N] as the transpose of a contiguous tensor) is allowed [doc].
    """
    c = Checks("npu_weight_quant_batchmatmul")
    c.absent(quant_scale=quant_scale, quant_offset=quant_offset, weight_dtype=weight_dtype)
    c.rank("x", x, 2)
    c.rank("weight", weight, 2)
    c.dtype("x", x, BF16, F16)
    c.dtype("weight", weight, I8, I32)
    turned = not weight.is_contiguous() and weight.t().is_contiguous()
    values = weight
    if weight.dtype is I32:
        values = unpack_int4(weight.t()).t() if turned else unpack_int4(weight)
    depth, columns = values.shape
    c.need(x.shape[1] == depth, "weight", f"K {depth}, x has {x.shape[1]}")
    groups = 1
    if antiquant_group_size:
        size = antiquant_group_size
        c.need(size % 32 == 0 and 32 <= size < depth, "antiquant_group_size", f"{size}")
        c.need(depth % size == 0, "antiquant_group_size", "a ragged last group is not emulated")
        groups = depth // size
    scales = {"antiquant_scale": antiquant_scale}
    if antiquant_offset is not None:
        scales["antiquant_offset"] = antiquant_offset
        c.same_dtype("antiquant_offset", antiquant_offset, antiquant_scale)
        c.shape("antiquant_offset", antiquant_offset, *antiquant_scale.shape)
    wide = {}
    for name, t in scales.items():
        c.dtype(name, t, BF16, F16)
        c.same_dtype(name, t, x)
        allowed = ((groups, columns),) if groups > 1 else ((1,), (1, 1), (columns,), (1, columns))
        c.need(tuple(t.shape) in allowed, name, f"shape {tuple(t.shape)}, expected {allowed}")
        wide[name] = t.reshape(groups, -1).expand(groups, columns)
    plain = dequantized(c, values, wide["antiquant_scale"], wide.get("antiquant_offset"), groups)
    out = x.float() @ plain
    if bias is not None:
        c.dtype("bias", bias, F32 if x.dtype is not F16 else F16)
        c.need(tuple(bias.shape) in ((columns,), (1, columns)), "bias", f"{tuple(bias.shape)}")
        out = out + bias.float()
    return out.to(x.dtype)


def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """int32 values in [-8, 7], rank 2, last axis divisible by 8 -> eight in one int32 [doc].

    The order inside one int32 is not documented: lowest bits first [reading].
    """
    c = Checks("npu_convert_weight_to_int4pack")
    c.dtype("weight", weight, I32)
    c.rank("weight", weight, 2)
    c.contiguous("weight", weight)
    c.need(weight.shape[-1] % 8 == 0, "weight", "last axis is not a multiple of 8")
    c.ids("weight", weight, -8, 8)
    return pack_int4(weight)


def npu_transpose_batchmatmul(
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int = 1,
) -> Tensor:
    """perm_x1 brings input to [B, M, K], perm_x2 weight to [B, K, N], perm_y the product to
    [M, B, N]; one float dtype, no bias [doc, meta]; scale (int8 output) is not emulated."""
    c = Checks("npu_transpose_batchmatmul")
    c.absent(bias=bias, scale=scale)
    c.choice("batch_split_factor", batch_split_factor, 1)
    for name, x in (("input", input), ("weight", weight)):
        c.rank(name, x, 3)
        c.dtype(name, x, *FLOATS)
        c.same_dtype(name, x, input)
    first = list(perm_x1 or (0, 1, 2))
    second = list(perm_x2 or (0, 1, 2))
    c.choice("perm_x1", first, [0, 1, 2], [1, 0, 2])
    c.choice("perm_x2", second, [0, 1, 2], [0, 2, 1])
    c.choice("perm_y", list(perm_y or (1, 0, 2)), [1, 0, 2])
    left = input.permute(first).float()
    right = weight.permute(second).float()
    c.need(left.shape[0] == right.shape[0], "weight", "its batch is not that of input")
    c.need(left.shape[2] == right.shape[1], "weight", f"K {right.shape[1]} and {left.shape[2]}")
    return torch.bmm(left, right).transpose(0, 1).contiguous().to(input.dtype)


def npu_format_cast(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """29 is FRACTAL_NZ, 2 is ND [doc]: shape and values stay, the storage is marked."""
    c = Checks("npu_format_cast")
    c.absent(customize_dtype=customize_dtype, input_dtype=input_dtype)
    c.choice("acl_format", acl_format, NZ, 2)
    out = input.clone(memory_format=torch.contiguous_format)
    if acl_format == NZ:
        c.need(input.dim() >= 2, "input", "NZ needs two axes")
        mark_nz(out)
    return out


def npu_format_cast_(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """As npu_format_cast, in place [doc]."""
    c = Checks("npu_format_cast_")
    c.absent(customize_dtype=customize_dtype, input_dtype=input_dtype)
    c.choice("acl_format", acl_format, NZ)
    mark_nz(input)
    return input


def npu_prefetch(input: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """max_size above 0, offset not negative [meta]; nothing to do here."""
    c = Checks("npu_prefetch")
    c.need(max_size > 0, "max_size", f"{max_size}")
    c.need(offset >= 0, "offset", f"{offset}")
