"""Gating, routing and grouped products of the mixture of experts."""

from __future__ import annotations

import torch

from .core import (
    BF16,
    DTYPE_OF_CODE,
    F16,
    F32,
    I8,
    I32,
    I64,
    Checks,
    _Switches,
    exact_matmul,
    quantize_rows,
    undefined_rows,
    unpack_int4,
)
from .dense import FLOATS, dequantized

Tensor = torch.Tensor


def _best(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest, of equal ones the lower index first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _order(keys: Tensor) -> Tensor:
    """The stable order of rank 1 keys."""
    return keys.sort(dim=0, stable=True).indices


def _gating_checks(c: Checks, experts: int, k: int, k_group: int, group_count: int) -> None:
    c.need(experts <= 2048, "x", f"{experts} experts, at most 2048")
    c.need(group_count > 0 and experts % group_count == 0, "group_count", f"{group_count}")
    size = experts // group_count
    c.need(size > 2, "group_count", f"groups of {size} experts, must be above 2")
    aligned = (size + 31) // 32 * 32 * group_count
    c.need(aligned <= 2048, "group_count", f"{aligned} experts after aligning groups to 32")
    c.need(1 <= k_group <= group_count, "k_group", f"{k_group} of {group_count} groups")
    c.need(1 <= k <= size * k_group, "k", f"{k} of {size * k_group} experts in the kept groups")


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, E] float; bias (E,) of x's dtype; group score = maximum (mode 0) or sum of the two
    best (mode 1); norm_type 0 softmax, 1 sigmoid; renorm 0 only [doc].

    Sigmoid weights are divided by their sum + eps, softmax weights are not [hia]; experts of
    dropped groups count as -inf, so a negative biased score can never lose to them [reading];
    of equal scores the lower index wins [reading].
    """
    c = Checks("npu_moe_gating_top_k")
    c.absent(input_ids=input_ids, tid2eid=tid2eid)
    c.rank("x", x, 2)
    c.dtype("x", x, *FLOATS)
    c.choice("group_select_mode", group_select_mode, 0, 1)
    c.choice("renorm", renorm, 0)
    c.choice("norm_type", norm_type, 0, 1)
    tokens, experts = x.shape
    _gating_checks(c, experts, k, k_group, group_count)
    wide = x.float()
    scores = wide.sigmoid() if norm_type == 1 else wide.softmax(-1)
    choice = scores
    if bias is not None:
        c.same_dtype("bias", bias, x)
        c.shape("bias", bias, experts)
        choice = scores + bias.float()
    if k_group < group_count:
        grouped = choice.view(tokens, group_count, -1)
        best = 1 if group_select_mode == 0 else 2
        kept = _best(grouped.topk(best, -1).values.sum(-1), k_group)
        dropped = torch.ones(tokens, group_count, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = _best(choice, k)
    weight = scores.gather(1, chosen)
    if norm_type == 1:
        weight = weight / (weight.sum(-1, keepdim=True) + eps)
    weight = weight * routed_scaling_factor
    norm_out = scores if out_flag else torch.zeros(tokens, experts)
    return weight.to(x.dtype), chosen.to(I32), norm_out.clone()


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, E] or [B, S, E]; finished bool; k <= E and k <= 1024; row_idx[t, j] = j * T + t [doc].

    A finished row has the index E in all its places [doc].
    """
    c = Checks("npu_moe_gating_top_k_softmax")
    c.rank("x", x, 2, 3)
    c.dtype("x", x, *FLOATS)
    experts = x.shape[-1]
    c.need(0 < k <= min(experts, 1024), "k", f"{k} of {experts}")
    scores = x.float().softmax(-1)
    chosen = _best(scores, k)
    weight = scores.gather(-1, chosen)
    if finished is not None:
        c.dtype("finished", finished, torch.bool)
        c.shape("finished", finished, *x.shape[:-1])
        chosen = chosen.masked_fill(finished.unsqueeze(-1), experts)
    rows = x.numel() // max(experts, 1)
    row_idx = torch.arange(rows * k, dtype=I32).view(k, rows).t().reshape(*x.shape[:-1], k)
    return weight.to(x.dtype), chosen.to(I32), row_idx.contiguous()


def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H]; row_idx and expert_idx [T, K] int32; row_idx counts columns first; rows of the
    output: min(T, active_num) * K [doc]. The sort is stable [reading]."""
    c = Checks("npu_moe_init_routing")
    c.rank("x", x, 2)
    c.dtype("x", x, *FLOATS)
    rows = x.shape[0]
    for name, t in (("row_idx", row_idx), ("expert_idx", expert_idx)):
        c.dtype(name, t, I32)
        c.rank(name, t, 2)
        c.need(t.shape[0] == rows, name, f"{t.shape[0]} rows, x has {rows}")
    c.shape("row_idx", row_idx, *expert_idx.shape)
    c.need(active_num >= 0, "active_num", f"{active_num}")
    k = expert_idx.shape[1]
    expected = torch.arange(rows * k, dtype=I32).view(k, rows).t()
    c.need(torch.equal(row_idx, expected), "row_idx", "is not the column order 0, T, 2T, ...")
    c.need(not expert_idx.numel() or int(expert_idx.min()) >= 0, "expert_idx", "negative id")
    order = _order(expert_idx.flatten())
    sources = row_idx.flatten()[order].long()
    expanded_row_idx = torch.empty(rows * k, dtype=I32)
    expanded_row_idx[sources] = torch.arange(rows * k, dtype=I32)
    kept = min(rows, active_num) * k
    return x[sources % max(rows, 1)][:kept], expanded_row_idx, expert_idx.flatten()[order]


def _token_counts(kind: int, counts: Tensor, start: int, expert_num: int) -> Tensor:
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts
    pairs = torch.zeros(expert_num, 2, dtype=I64)
    used = counts.nonzero().flatten()
    pairs[: len(used), 0] = used + start
    pairs[: len(used), 1] = counts[used]
    return pairs


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [T, H] float or int8; expert_idx [T, K] int32 in [0, expert_num); drop_pad_mode 0;
    expert_tokens_num_flag True; quant_mode -1 or 1 (not with int8 x); scale float32: (T,) without
    quantisation (moved with the rows), [experts in range, H] with it; active_expert_range
    [start, end); row_idx_type 0 gather (slot of pair t*K+k, -1 outside the range), 1 scatter
    (pair of slot, undefined after the valid ones) [doc].

    The page allows expert_tokens_num_type 1 and 2 only; the Meta kernel also 0 (cumulative): it
    is emulated [reading]. A scale of one row for all experts is accepted as [1, H] [hia].
    """
    c = Checks("npu_moe_init_routing_v2")
    c.absent(offset=offset, x_dtype=x_dtype)
    c.rank("x", x, 2)
    c.dtype("x", x, *FLOATS, I8)
    c.rank("expert_idx", expert_idx, 2)
    c.dtype("expert_idx", expert_idx, I32)
    rows, width = x.shape
    k = expert_idx.shape[1]
    c.need(expert_idx.shape[0] == rows, "expert_idx", f"{expert_idx.shape[0]} rows, x {rows}")
    c.choice("drop_pad_mode", drop_pad_mode, 0)
    c.choice("expert_tokens_num_type", expert_tokens_num_type, 0, 1, 2)
    c.choice("expert_tokens_num_flag", expert_tokens_num_flag, True)
    c.choice("quant_mode", quant_mode, -1, 1)
    c.choice("row_idx_type", row_idx_type, 0, 1)
    c.need(not (quant_mode == 1 and x.dtype is I8), "quant_mode", "int8 x cannot be quantised")
    limit = 5120 if expert_tokens_num_type == 2 else 10240
    c.need(0 < expert_num <= limit, "expert_num", f"{expert_num} is outside (0, {limit}]")
    c.need(bool(active_expert_range), "active_expert_range", "is missing")
    assert active_expert_range is not None
    start, end = active_expert_range
    c.need(0 <= start < end <= expert_num, "active_expert_range", f"[{start}, {end})")
    c.need(active_num >= -1, "active_num", f"{active_num}")
    c.ids("expert_idx", expert_idx, 0, expert_num)
    flat = expert_idx.flatten().long()
    inside = (flat >= start) & (flat < end)
    order = _order(torch.where(inside, flat, expert_num))[: int(inside.sum())]
    total = rows * k
    kept = total if active_num <= 0 else min(active_num, total)
    counts = torch.bincount(flat[inside] - start, minlength=end - start)
    row_idx = torch.full((total,), -1, dtype=I32)
    if row_idx_type == 0:
        row_idx[order] = torch.arange(len(order), dtype=I32)
    else:
        row_idx = undefined_rows((total,), I32)
        row_idx[: len(order)] = order.to(I32)
    order = order[:kept]
    moved = x[order // k]
    scales = undefined_rows((kept,), F32)
    if quant_mode == 1:
        wide = moved.float()
        if scale is not None:
            c.dtype("scale", scale, F32)
            allowed = ((end - start, width), (1, width))
            c.need(tuple(scale.shape) in allowed, "scale", f"{tuple(scale.shape)}, not {allowed}")
            wide = wide * scale.expand(end - start, width)[flat[order] - start]
        moved, found = quantize_rows(wide)
        scales[: len(order)] = found
    elif scale is not None:
        c.dtype("scale", scale, F32)
        c.shape("scale", scale, rows)
        scales[: len(order)] = scale[order // k]
    out = undefined_rows((kept, width), moved.dtype)
    out[: len(order)] = moved
    return out, row_idx, _token_counts(expert_tokens_num_type, counts, start, expert_num), scales


def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """Sorted ids, int32, rank 1 -> the end of each expert's rows, int32 [doc]."""
    c = Checks("npu_moe_compute_expert_tokens")
    ids = sorted_expert_for_source_row
    c.dtype("sorted_expert_for_source_row", ids, I32)
    c.rank("sorted_expert_for_source_row", ids, 1)
    c.need(0 < num_expert <= 2048, "num_expert", f"{num_expert} is outside (0, 2048]")
    c.ids("sorted_expert_for_source_row", ids, 0, num_expert)
    c.need(bool((ids[1:] >= ids[:-1]).all()), "sorted_expert_for_source_row", "is not sorted")
    return torch.bincount(ids.long(), minlength=num_expert).cumsum(0).to(I32)


def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """rows [*, H] float; skip1, skip2, bias [E, H] and scales [T, K] of the rows' dtype; skip2
    needs skip1; slot of pair (t, k) at k*T + t in mode 0, at t*K + k in mode 2 [doc, hia].

    -1 in expanded_src_to_dst_row (expert outside the range of init_routing_v2) adds nothing, in
    mode 2 only [reading]: the page bounds ids to [0, T*K). Slots named twice are refused.
    """
    c = Checks("npu_moe_finalize_routing")
    rows = expanded_permuted_rows
    c.rank("expanded_permuted_rows", rows, 2)
    c.dtype("expanded_permuted_rows", rows, *FLOATS)
    c.choice("drop_pad_mode", drop_pad_mode, 0, 2)
    slots = expanded_src_to_dst_row
    c.rank("expanded_src_to_dst_row", slots, 1)
    c.dtype("expanded_src_to_dst_row", slots, I32)
    top = k if scales is None else scales.shape[-1]
    assert top is not None
    c.need(len(slots) % top == 0, "k", f"{len(slots)} slots are not a multiple of {top}")
    tokens = len(slots) // top
    width = rows.shape[1]
    weight = torch.ones(tokens, top)
    if scales is not None:
        c.same_dtype("scales", scales, rows)
        c.shape("scales", scales, tokens, top)
        weight = scales.float()
    c.need(skip2 is None or skip1 is not None, "skip2", "needs skip1")
    lowest = 0 if drop_pad_mode == 0 else -1
    c.ids("expanded_src_to_dst_row", slots, lowest, rows.shape[0])
    c.unique("expanded_src_to_dst_row", slots[slots >= 0])
    grid = slots.long().view(top, tokens).t() if drop_pad_mode == 0 else slots.long().view(-1, top)
    terms = rows[grid.clamp(min=0)].float()
    if bias is not None:
        c.same_dtype("bias", bias, rows)
        c.need(export_for_source_row is not None, "export_for_source_row", "bias needs it")
        c.need(bias.shape[-1] == width, "bias", f"width {bias.shape[-1]}")
    if export_for_source_row is not None:
        c.dtype("export_for_source_row", export_for_source_row, I32)
        c.shape("export_for_source_row", export_for_source_row, tokens, top)
    if bias is not None and export_for_source_row is not None:
        c.ids("export_for_source_row", export_for_source_row, 0, bias.shape[0])
        terms = terms + bias.float()[export_for_source_row.long()]
    terms = torch.where((grid >= 0).unsqueeze(-1), terms * weight.unsqueeze(-1), 0.0)
    out = terms.sum(1)
    for name, skip in (("skip1", skip1), ("skip2", skip2)):
        if skip is not None:
            c.same_dtype(name, skip, rows)
            c.shape(name, skip, tokens, width)
            out = out + skip.float()
    return out.to(rows.dtype)


def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens [A, H] in order of source rank, then expert; counts [ranks, experts] int32 or int64
    summing to A; scales (A,) float32; expert_token_num_type 1, idx_type 0 only [hia].

    The index is the place before of each row after (a gather index) [hia].
    """
    c = Checks("npu_moe_re_routing")
    c.absent(tokens_dtype=tokens_dtype)
    c.rank("tokens", tokens, 2)
    c.dtype("tokens", tokens, F16, BF16, I8)
    c.choice("expert_token_num_type", expert_token_num_type, 1)
    c.choice("idx_type", idx_type, 0)
    counts = expert_token_num_per_rank
    c.rank("expert_token_num_per_rank", counts, 2)
    c.dtype("expert_token_num_per_rank", counts, I32, I64)
    c.need(int(counts.min()) >= 0, "expert_token_num_per_rank", "negative count")
    total = int(counts.sum())
    c.need(total == len(tokens), "expert_token_num_per_rank", f"sum {total}, rows {len(tokens)}")
    experts = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    order = _order(experts.repeat_interleave(counts.flatten().long()))
    scales = undefined_rows((len(tokens),), F32)
    if per_token_scales is not None:
        c.dtype("per_token_scales", per_token_scales, F32)
        c.shape("per_token_scales", per_token_scales, len(tokens))
        scales = per_token_scales[order]
    return tokens[order], scales, order.to(I32), counts.sum(0).to(counts.dtype)


def _group_sizes(c: Checks, group_list: Tensor, kind: int, experts: int, rows: int) -> list:
    """(expert, rows) in the order in which the rows lie."""
    c.dtype("group_list", group_list, I64)
    if kind == 2:
        c.shape("group_list", group_list, experts, 2)
        pairs = [(int(e), int(n)) for e, n in group_list.tolist()]
        ended = next((i for i, pair in enumerate(pairs) if pair[1] == 0), len(pairs))
        c.need(all(n == 0 for _, n in pairs[ended:]), "group_list", "pairs after the end (0, 0)")
        pairs = pairs[:ended]
        names = [e for e, _ in pairs]
        c.need(len(set(names)) == len(names), "group_list", "an expert is named twice")
        c.need(all(0 <= e < experts for e in names), "group_list", "an expert out of range")
    else:
        c.shape("group_list", group_list, experts)
        values = group_list.tolist()
        if kind == 0:
            values = [b - a for a, b in zip([0, *values], values, strict=False)]
        pairs = list(enumerate(values))
    c.need(all(n >= 0 for _, n in pairs), "group_list", f"negative or decreasing (type {kind})")
    total = sum(n for _, n in pairs)
    c.need(total <= rows, "group_list", f"{total} rows in groups, x has {rows}")
    return pairs


def _only(c: Checks, name: str, values: list[Tensor] | None) -> Tensor | None:
    if not values:
        return None
    c.need(len(values) == 1, name, f"{len(values)} tensors; several are not emulated")
    return values[0]


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    activation_quant_scale: list[Tensor] | None = None,
    activation_quant_offset: list[Tensor] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: list[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """One x [M, K], one weight [E, K, N], group_type 0, split_item 2 or 3; bfloat16; int8 -> int32
    (output_dtype int32); int8 with scale [E, N] bfloat16 or float32 and per_token_scale (M,)
    float32; bfloat16 x with int8 or int4 weight, antiquant_scale [E, N] or [E, G, N] and offset
    alike; group_list_type 0 cumulative, 1 counts, 2 pairs (expert, count) [doc, hia].

    The page demands groups that sum to M; rows of a static buffer after the last group are
    common and newer pages only bound the sum: less than M is accepted, those rows of the output
    are undefined [reading]. NZ weights are an option, not a demand [doc]. int8 x with int4
    weights (W4A8) is refused: the published pages differ on its compensating bias.
    """
    c = Checks("npu_grouped_matmul")
    c.absent(offset=offset or None, activation_input=activation_input or None)
    c.absent(activation_quant_scale=activation_quant_scale or None)
    c.absent(activation_quant_offset=activation_quant_offset or None)
    c.absent(x_dtype=x_dtype, weight_dtype=weight_dtype, scale_dtype=scale_dtype)
    c.absent(bias=bias or None, per_token_scale_dtype=per_token_scale_dtype)
    c.choice("split_item", split_item, 2, 3)
    c.choice("group_type", group_type, 0)
    c.choice("group_list_type", group_list_type, 0, 1, 2)
    c.choice("act_type", act_type, 0)
    c.need(group_list is not None, "group_list", "is missing")
    rows, matrix = _only(c, "x", x), _only(c, "weight", weight)
    assert rows is not None
    assert matrix is not None
    assert group_list is not None
    c.rank("x", rows, 2)
    c.rank("weight", matrix, 3)
    c.need(rows.is_contiguous(), "x", "is not contiguous")
    c.need(rows.shape[1] < 65536 and matrix.shape[2] < 65536, "x", "last axis above 65535")
    values = unpack_int4(matrix) if matrix.dtype is I32 else matrix
    experts, depth, columns = values.shape
    c.need(rows.shape[1] == depth, "weight", f"K {depth}, x has {rows.shape[1]}")
    pairs = _group_sizes(c, group_list, group_list_type or 0, experts, rows.shape[0])
    scales = _only(c, "scale", scale)
    anti = _only(c, "antiquant_scale", antiquant_scale)
    shift = _only(c, "antiquant_offset", antiquant_offset)
    per_token = _only(c, "per_token_scale", per_token_scale)
    target = rows.dtype if output_dtype is None else DTYPE_OF_CODE.get(output_dtype)
    if rows.dtype is I8:
        _int8_checks(c, rows, matrix, scales, per_token, target, anti)
    else:
        _float_checks(c, rows, matrix, values, anti, shift, scales, per_token, target)
    assert target is not None
    out = undefined_rows((rows.shape[0], columns), target)
    at = 0
    for expert, count in pairs:
        part = rows[at : at + count]
        if rows.dtype is I8:
            product = exact_matmul(part, values[expert])
            if scales is not None:
                assert per_token is not None
                product = product.float() * scales[expert].float()
                product = product * per_token[at : at + count, None]
        else:
            plain = values[expert].float()
            if anti is not None:
                spread = anti[expert].reshape(-1, columns)
                moved = None if shift is None else shift[expert].reshape(-1, columns)
                plain = dequantized(c, values[expert], spread, moved, spread.shape[0])
            product = part.float() @ plain
        out[at : at + count] = product.to(target)
        at += count
    return [out]


def _int8_checks(
    c: Checks,
    rows: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    per_token: Tensor | None,
    target: torch.dtype | None,
    anti: Tensor | None,
) -> None:
    if matrix.dtype is I32:
        raise c.missing("weight", "int8 x with int4 weights")
    c.dtype("weight", matrix, I8)
    c.need(anti is None, "antiquant_scale", "only with float x")
    if scales is None:
        c.need(per_token is None, "scale", "per_token_scale needs scale")
        c.need(target is I32, "output_dtype", "without scale the output is int32")
        return
    c.shape("scale", scales, matrix.shape[0], matrix.shape[2])
    c.need(per_token is not None, "per_token_scale", "is missing beside scale")
    assert per_token is not None
    c.dtype("per_token_scale", per_token, F32)
    c.shape("per_token_scale", per_token, rows.shape[0])
    if _Switches.float32 and target is F32:
        return
    c.need(target in (BF16, F16), "output_dtype", f"{target} is not bfloat16 or float16")
    wanted = BF16 if target is BF16 else F32
    c.dtype("scale", scales, wanted)


def _float_checks(
    c: Checks,
    rows: Tensor,
    matrix: Tensor,
    values: Tensor,
    anti: Tensor | None,
    shift: Tensor | None,
    scales: Tensor | None,
    per_token: Tensor | None,
    target: torch.dtype | None,
) -> None:
    c.dtype("x", rows, *FLOATS)
    c.need(scales is None, "scale", "only with int8 x")
    c.need(per_token is None, "per_token_scale", "only with int8 x")
    c.need(target == rows.dtype, "output_dtype", f"{target} beside x {rows.dtype}")
    if matrix.dtype.is_floating_point:
        c.same_dtype("weight", matrix, rows)
        c.need(anti is None and shift is None, "antiquant_scale", "only with an integer weight")
        return
    c.dtype("weight", matrix, I8, I32)
    c.dtype("x", rows, BF16, F16)
    c.need(anti is not None, "antiquant_scale", "an integer weight needs it")
    assert anti is not None
    c.same_dtype("antiquant_scale", anti, rows)
    experts, depth, columns = values.shape
    if anti.dim() == 2:
        c.shape("antiquant_scale", anti, experts, columns)
    else:
        c.need(matrix.dtype is I32, "antiquant_scale", "an int8 weight has one scale a channel")
        c.shape("antiquant_scale", anti, experts, anti.shape[1], columns)
        c.need(depth % anti.shape[1] == 0, "antiquant_scale", "groups do not divide K")
    if shift is not None:
        c.same_dtype("antiquant_offset", shift, anti)
        c.shape("antiquant_offset", shift, *anti.shape)
