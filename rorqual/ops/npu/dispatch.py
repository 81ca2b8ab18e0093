"""Dispatch and combine as one operator each, with blocks of a fixed capacity that no step exceeds,
so that graphs can capture them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rorqual.ops.reference import ExpertWeights

npu = torch.ops.npu
TOKEN_QUANT = 2  # quant_mode: rows are sent as int8 with one scale each
COUNTS = 1  # expert_token_nums_type


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks of an exchange, each with an equal run of the `slots`. `name`: HCCL's name of their
    communicator."""

    name: str
    size: int
    rank: int
    slots: int


def communicator_name(group: dist.ProcessGroup, rank: int) -> str:
    """HCCL's name of a group's communicator, for operators that use it."""
    backend: Any = group._get_backend(torch.device("npu"))
    return str(backend.get_hccl_comm_name(rank))


@dataclass
class DispatchedRows:
    """rows [A, hidden] for this rank's experts, sorted by expert, `counts` [experts] of each; the
    rest is for combine."""

    rows: Tensor
    scale: Tensor | None
    counts: Tensor
    assist: Tensor
    sent: Tensor
    ids: Tensor
    weights: Tensor
    active: Tensor
    tokens: int


class DispatchCombine:
    """`grouped_mlp`: the op table's, (sorted rows, counts, scales, weights, dtype) to rows."""

    def __init__(self, grouped_mlp: Callable[..., Tensor]):
        self.grouped_mlp = grouped_mlp
        self.names: dict[str, str] = {}  # by the name of the axis' group

    def group(self, axis: Any, slots: int) -> ExpertGroup:
        """The ExpertGroup of an axis (parallel/group_axis.py) with `slots` experts in all."""
        return ExpertGroup(self.names[axis.group_name], axis.size, axis.rank, slots)

    def connect(self, axis: Any, group: dist.ProcessGroup) -> None:
        """Use the communicator of `group`, which has the same ranks, for exchanges over `axis`."""
        self.names[axis.group_name] = communicator_name(group, axis.rank)

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        capacity: int,
        group: ExpertGroup,
        eight_bits: bool,
    ) -> DispatchedRows:
        """Send x [T, hidden] with ids [T, K] by slot; T at most `capacity`. All ranks send
        `capacity` rows; the last ones are marked inactive."""
        tokens = x.shape[0]
        missing = capacity - tokens
        active = torch.arange(capacity, device=x.device) < tokens
        if missing:
            # no row may have an expert twice, not even an inactive one
            others = torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device)
            x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
            ids = torch.cat((ids, others.expand(missing, -1)))
            weights = torch.cat((weights, weights.new_zeros(missing, weights.shape[1])))
        ids = ids.int()
        rows, scale, assist, counts, sent, *_ = npu.npu_moe_distribute_dispatch_v2(
            x,
            ids,
            group.name,
            group.size,
            group.rank,
            group.slots,
            x_active_mask=active,
            expert_shard_type=0,
            shared_expert_num=0,
            shared_expert_rank_num=0,
            quant_mode=TOKEN_QUANT if eight_bits else 0,
            global_bs=capacity * group.size,
            expert_token_nums_type=COUNTS,
        )
        held = scale if eight_bits else None
        return DispatchedRows(rows, held, counts, assist, sent, ids, weights, active, tokens)

    def compute(self, sent: DispatchedRows, w: ExpertWeights, dtype: torch.dtype) -> Tensor:
        return self.grouped_mlp(sent.rows, sent.counts, sent.scale, w, dtype)

    def combine(self, y: Tensor, sent: DispatchedRows, group: ExpertGroup) -> Tensor:
        """[T, hidden]: the weighted sums of this rank's own rows."""
        capacity = sent.active.shape[0]
        out = npu.npu_moe_distribute_combine_v2(
            y,
            sent.ids,
            sent.assist,
            sent.sent,
            sent.weights.float(),
            group.name,
            group.size,
            group.rank,
            group.slots,
            x_active_mask=sent.active,
            expert_shard_type=0,
            shared_expert_num=0,
            shared_expert_rank_num=0,
            global_bs=capacity * group.size,
        )
        return out[: sent.tokens]
