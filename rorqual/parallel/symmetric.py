"""Memory that the cards of one host share (torch symmetric memory, unicast), and small all-reduces over it, with residual addition and
RMSNorm fused in: what NCCL's latency would dominate.

Runs inside captured graphs. All calls of a group stay on one stream. Not yet timed on cards: ONE_SHOT_BYTES comes from published figures.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rorqual.parallel.group_axis import GroupAxis

ONE_SHOT_BYTES = 256 * 1024
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class PeerMemory:
    """`own`: this rank's bytes, zero at first; `table` [world + 1] int64: the addresses of all ranks' as this rank's device sees them, and
    of `stop` (ops/triton/peers.py)."""

    own: Tensor
    table: Tensor
    stop: Tensor
    handle: Any = None  # keeps the mapping

    @staticmethod
    def of(axis: GroupAxis, size: int, device: torch.device, stop: Tensor) -> PeerMemory:
        """`size` bytes on each rank's card. stop: this rank's word in pinned host memory. Collective: all ranks of the axis make it at the
        same time, with the same size."""
        import torch.distributed._symmetric_memory as symm_mem

        own = symm_mem.empty(size, dtype=torch.uint8, device=device)
        handle: Any = symm_mem.rendezvous(own, axis.group)
        own.zero_()
        table = torch.tensor([*handle.buffer_ptrs, stop.data_ptr()], dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group=axis.group)  # no rank raises a flag before all flags are zero
        return PeerMemory(own, table, stop, handle)


def why_not_shared(axis: GroupAxis, device: torch.device) -> str:
    """Why the ranks of the axis cannot share memory; empty where they can, which is alike on all ranks. Collective on cards."""
    if device.type != "cuda":
        return f"{device.type} has no symmetric memory"
    here = torch.tensor([[_host(), device.index or 0]], device=device)
    hosts, devices = axis.all_gather(here).t().tolist()
    if len(set(hosts)) > 1:
        return f"{len(set(hosts))} hosts"
    reach = all(torch.cuda.can_device_access_peer(device, other) for other in devices if other != device.index)
    missing = axis.all_reduce(torch.tensor(int(not reach), device=device))
    if int(missing):
        return "cards that cannot reach one another's memory"
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    return refusal(axis, lambda: PeerMemory.of(axis, 256, device, stop), device)


def refusal(axis: GroupAxis, make: Callable[[], object], device: torch.device) -> str:
    """Why `make`, which every rank calls, did not work on some rank; empty where it did on all. A container may forbid what it needs."""
    reason = ""
    try:
        make()
    except (RuntimeError, OSError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    refused = int(axis.all_reduce(torch.tensor(int(bool(reason)), device=device)))
    return reason or (f"refused on {refused} of {axis.size} ranks" if refused else "")


def _host() -> int:
    """A number that processes of one running host share."""
    name = BOOT_ID.read_bytes() if BOOT_ID.exists() else uuid.getnode().to_bytes(8, "big")
    return int.from_bytes(hashlib.sha256(name).digest()[:7], "big")


class SymmetricAddNorm:
    """A FusedAddNorm for messages of up to `rows` x `columns`. Collective: all ranks of the axis make it at the same time."""

    def __init__(self, axis: GroupAxis, rows: int, columns: int, dtype: torch.dtype, device: torch.device, stop: Tensor):
        from rorqual.ops.triton.all_reduce import all_reduce_norm, buffer_bytes

        self.kernel, self.rank, self.dtype, self.columns = all_reduce_norm, axis.rank, dtype, columns
        self.epochs = torch.zeros(rows, dtype=torch.int32, device=device)
        self.memory = PeerMemory.of(axis, buffer_bytes(rows, columns, axis.size, dtype.itemsize), device, stop)

    def takes(self, x: Tensor, residual: Tensor | None) -> bool:
        return residual is not None and x.dtype == self.dtype and x.shape[1] == self.columns and 0 < x.shape[0] <= self.epochs.shape[0]

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return self.kernel(self.memory.table, self.epochs, self.rank, x, residual, weight, eps, two_shot=x.nbytes > ONE_SHOT_BYTES)
