"""Dispatch and combine of the experts' rows over process groups found by name.

What travels is gathered whole by every rank: slow, and free of any order of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .core import BF16, F16, F32, I8, I32, I64, Checks, quantize_rows, undefined_rows

Tensor = torch.Tensor
_groups: dict[str, dist.ProcessGroup | None] = {}
RECORD = 128
TYPE_COUNTS = 1


def register_group(name: str, group: dist.ProcessGroup | None) -> None:
    """The process group that stands for the HCCL communicator of this name; None: world of 1."""
    _groups[name] = group


def _gather(c: Checks, name: str, world: int, rank: int, mine: Any) -> list[Any]:
    c.need(name, "group_ep", "is empty")
    group = _groups.get(name)
    if group is None:
        c.need(world == 1, "group_ep", f"{name!r} is not registered and ep_world_size is {world}")
        return [mine]
    c.need(group.size() == world, "ep_world_size", f"{world}, the group has {group.size()}")
    c.need(group.rank() == rank, "ep_rank_id", f"{rank}, the group says {group.rank()}")
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine, group=group)
    return found


def _common(
    c: Checks, x: Tensor, ids: Tensor, world: int, rank: int, experts: int, options: dict[str, Any]
) -> tuple[int, int]:
    """(local experts, rows of the largest rank)."""
    c.choice("group_tp", options["group_tp"], "")
    c.choice("tp_world_size", options["tp_world_size"], 0, 1)
    c.choice("expert_shard_type", options["expert_shard_type"], 0)
    c.choice("shared_expert_rank_num", options["shared_expert_rank_num"], 0)
    c.choice("shared_expert_num", options["shared_expert_num"], 0, 1)
    c.choice("comm_alg", options["comm_alg"], "", "fullmesh_v1", "fullmesh_v2")
    for name in ("zero_expert_num", "copy_expert_num", "const_expert_num"):
        c.choice(name, options[name], 0)
    c.need(0 <= rank < world, "ep_rank_id", f"{rank} of {world}")
    c.need(1 <= world <= 768, "ep_world_size", f"{world}")
    c.need(0 < experts <= 1024, "moe_expert_num", f"{experts} is outside (0, 1024]")
    c.need(experts % world == 0, "moe_expert_num", f"{experts} over {world} ranks")
    c.rank("expert_ids", ids, 2)
    c.dtype("expert_ids", ids, I32)
    rows, k = ids.shape
    c.need(0 < k <= min(16, experts), "expert_ids", f"K {k}")
    c.need(0 < rows <= 512, "expert_ids", f"{rows} rows, 1 to 512 are supported")
    c.ids("expert_ids", ids, 0, experts)
    same = ids.sort(-1).values
    c.need(not bool((same[:, 1:] == same[:, :-1]).any()), "expert_ids", "an expert named twice")
    total = options["global_bs"]
    c.need(total == 0 or total % world == 0, "global_bs", f"{total} over {world} ranks")
    most = rows if total == 0 else total // world
    c.need(rows <= most, "global_bs", f"{total} is below {rows} rows on each of {world} ranks")
    return experts // world, most


def _active(c: Checks, mask: Tensor | None, rows: int) -> Tensor:
    if mask is None:
        return torch.ones(rows, dtype=torch.bool)
    c.dtype("x_active_mask", mask, torch.bool)
    c.shape("x_active_mask", mask, rows)
    c.need(not bool((mask[1:] & ~mask[:-1]).any()), "x_active_mask", "True after False")
    return mask


def npu_moe_distribute_dispatch_v2(
    x: Tensor,
    expert_ids: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expert_scales: Tensor | None = None,
    elastic_info: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> tuple[Tensor, ...]:
    """x [BS, H] bfloat16 or float16, H in [1024, 8192] on A3; expert_ids [BS, K] int32; scales
    [E, H] float32 with quant_mode 2; x_active_mask bool (BS,), all True before any False;
    expert_token_nums_type 0 cumulative, 1 counts; global_bs 0 or BS_max * world [hia].

    A = BS_max * world * min(local experts, K) rows [meta]: rows by local expert, then by source
    rank, then by the source's row [hia for the first two, the third a reading]; rows after the
    last are undefined. assist_info is opaque: (source rank, row, k) in the first three of each
    record of 128 here. ep_recv_counts is the running end by (expert, source rank) [reading].
    expert_scales (hierarchical communication) is not emulated.
    """
    c = Checks("npu_moe_distribute_dispatch_v2")
    options = dict(locals())
    c.absent(expert_scales=expert_scales, elastic_info=elastic_info, y_dtype=y_dtype)
    c.absent(performance_info=performance_info, x_dtype=x_dtype, scales_dtype=scales_dtype)
    local, most = _common(c, x, expert_ids, ep_world_size, ep_rank_id, moe_expert_num, options)
    c.rank("x", x, 2)
    c.dtype("x", x, BF16, F16)
    rows, k = expert_ids.shape
    c.need(x.shape[0] == rows, "x", f"{x.shape[0]} rows, expert_ids has {rows}")
    c.bound("x", x.shape[1], 1024, 8192)
    c.choice("quant_mode", quant_mode, 0, 2)
    c.choice("expert_token_nums_type", expert_token_nums_type, 0, 1)
    if scales is not None:
        c.need(quant_mode == 2, "scales", "only with quant_mode 2")
        c.dtype("scales", scales, F32)
        c.shape("scales", scales, moe_expert_num, x.shape[1])
    active = _active(c, x_active_mask, rows)
    found = _gather(c, group_ep, ep_world_size, ep_rank_id, (x, expert_ids, active, most, scales))
    c.need(all(f[3] == most for f in found), "global_bs", "ranks disagree about the rows of one")
    slots = most * ep_world_size * min(local, k)
    first = ep_rank_id * local
    picked: list[Tensor] = []
    records: list[tuple[int, int, int]] = []
    ends: list[int] = []
    for expert in range(first, first + local):
        for source, (rows_there, ids_there, on, _, smooth) in enumerate(found):
            for row, place in ((ids_there == expert) & on.unsqueeze(1)).nonzero().tolist():
                wide = rows_there[row]
                picked.append(wide if smooth is None else wide.float() * smooth[expert])
                records.append((source, row, place))
            ends.append(len(records))
    out = undefined_rows((slots, x.shape[1]), I8 if quant_mode == 2 else x.dtype)
    dynamic = undefined_rows((slots,), F32)
    if picked:
        moved = torch.stack(picked)
        if quant_mode == 2:
            moved, dynamic[: len(picked)] = quantize_rows(moved)
        out[: len(picked)] = moved
    info = torch.full((slots, RECORD), -1, dtype=I32)
    if records:
        info[: len(records), :3] = torch.tensor(records, dtype=I32)
    info = info.flatten()
    if info.numel() < rows * k:
        info = torch.nn.functional.pad(info, (0, rows * k - info.numel()), value=-1)
    nums = torch.tensor(ends, dtype=I64).view(local, ep_world_size)[:, -1]
    if expert_token_nums_type == TYPE_COUNTS:
        nums = nums.diff(prepend=torch.zeros(1, dtype=I64))
    if quant_mode == 0:
        dynamic = _no_scales(slots)
    tp_counts = torch.zeros(tp_world_size, dtype=I32)
    counts = torch.tensor(ends, dtype=I32)
    return out, dynamic, info, nums.contiguous(), counts, tp_counts, torch.empty(0)


def _no_scales(slots: int) -> Tensor:
    from torch_npu.op_plugin.meta import _meta_registrations as meta

    shape = meta.get_dispatch_dynamic_shape(torch.empty(1, 1), None, 0, slots, 1)
    return undefined_rows(tuple(shape), F32)


def npu_moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist_info_for_combine: Tensor,
    ep_send_counts: Tensor,
    expert_scales: Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: Tensor | None = None,
    x_active_mask: Tensor | None = None,
    expand_scales: Tensor | None = None,
    shared_expert_x: Tensor | None = None,
    elastic_info: Tensor | None = None,
    ori_x: Tensor | None = None,
    const_expert_alpha_1: Tensor | None = None,
    const_expert_alpha_2: Tensor | None = None,
    const_expert_v: Tensor | None = None,
    performance_info: Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Tensor:
    """expand_x [A, H]; assist_info_for_combine and ep_send_counts as dispatch gave them, int32;
    expert_scales [BS, K] float32; shared_expert_x [BS, H] of expand_x's dtype [hia].

    out = shared_expert_x + sum_k scale * row, summed in float32. Rows switched off by the mask
    are zero (plus shared_expert_x) [reading: the page calls them undefined].
    """
    c = Checks("npu_moe_distribute_combine_v2")
    options = dict(locals())
    c.absent(elastic_info=elastic_info, ori_x=ori_x, performance_info=performance_info)
    c.absent(const_expert_alpha_1=const_expert_alpha_1, const_expert_v=const_expert_v)
    c.absent(const_expert_alpha_2=const_expert_alpha_2)
    c.need(expand_scales is None or expand_scales.numel() == 0, "expand_scales", "not emulated")
    local, most = _common(
        c, expand_x, expert_ids, ep_world_size, ep_rank_id, moe_expert_num, options
    )
    c.choice("comm_quant_mode", comm_quant_mode, 0)
    c.rank("expand_x", expand_x, 2)
    c.dtype("expand_x", expand_x, BF16, F16)
    rows, k = expert_ids.shape
    slots = most * ep_world_size * min(local, k)
    c.need(expand_x.shape[0] == slots, "expand_x", f"{expand_x.shape[0]} rows, A is {slots}")
    c.dtype("expert_scales", expert_scales, F32)
    c.shape("expert_scales", expert_scales, rows, k)
    c.dtype("assist_info_for_combine", assist_info_for_combine, I32)
    wanted = max(slots * RECORD, rows * k)
    c.shape("assist_info_for_combine", assist_info_for_combine, wanted)
    c.dtype("ep_send_counts", ep_send_counts, I32)
    c.shape("ep_send_counts", ep_send_counts, ep_world_size * local)
    used = int(ep_send_counts[-1])
    records = assist_info_for_combine[: slots * RECORD].view(slots, RECORD)[:used, :3]
    c.need(not used or int(records.min()) >= 0, "ep_send_counts", "is not that of this dispatch")
    active = _active(c, x_active_mask, rows)
    found = _gather(c, group_ep, ep_world_size, ep_rank_id, (expand_x[:used], records.contiguous()))
    terms = torch.zeros(rows, k, expand_x.shape[1])
    seen = torch.zeros(rows, k, dtype=torch.bool)
    for sender, (values, where) in enumerate(found):
        mine = where[:, 0] == ep_rank_id
        row, place = where[mine, 1].long(), where[mine, 2].long()
        right = bool((expert_ids[row, place] // local == sender).all())
        c.need(right, "expert_ids", "are not those of the dispatch")
        terms[row, place] = values[mine].float()
        seen[row, place] = True
    c.need(torch.equal(seen, active.unsqueeze(1).expand(rows, k)), "x_active_mask", "other rows")
    out = (terms * expert_scales.unsqueeze(-1)).sum(1)
    if shared_expert_x is not None:
        c.same_dtype("shared_expert_x", shared_expert_x, expand_x)
        c.shape("shared_expert_x", shared_expert_x, rows, expand_x.shape[1])
        out = out + shared_expert_x.float()
    return out.to(expand_x.dtype)
