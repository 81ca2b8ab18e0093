"""Small all-reduces over torch symmetric memory (unicast), with residual addition and RMSNorm fused in: what NCCL's latency would dominate.

Runs inside captured graphs. All calls of a group stay on one stream. Not yet timed on cards: ONE_SHOT_BYTES comes from published figures.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rorqual.parallel.group_axis import GroupAxis

ONE_SHOT_BYTES = 256 * 1024


class SymmetricAddNorm:
    """A FusedAddNorm for messages of up to `rows` x `columns`. Collective: all ranks of the axis make it at the same time."""

    def __init__(self, axis: GroupAxis, rows: int, columns: int, dtype: torch.dtype, device: torch.device):
        import torch.distributed._symmetric_memory as symm_mem

        from rorqual.ops.triton.all_reduce import all_reduce_norm, buffer_bytes

        self.kernel, self.rank, self.dtype, self.columns = all_reduce_norm, axis.rank, dtype, columns
        self.buffer = symm_mem.empty(buffer_bytes(rows, columns, axis.size, dtype.itemsize), dtype=torch.uint8, device=device)
        self.handle: Any = symm_mem.rendezvous(self.buffer, axis.group)
        self.buffer.zero_()
        self.table = torch.tensor(self.handle.buffer_ptrs, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(rows, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group=axis.group)  # no rank raises a flag before all flags are zero

    def takes(self, x: Tensor, residual: Tensor | None) -> bool:
        return residual is not None and x.dtype == self.dtype and x.shape[1] == self.columns and 0 < x.shape[0] <= self.epochs.shape[0]

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return self.kernel(self.table, self.epochs, self.rank, x, residual, weight, eps, two_shot=x.nbytes > ONE_SHOT_BYTES)
