"""Memory that the GPUs of one host share (cuda_ipc.py; plain loads and stores, no multicast), and
all-reduces over it, fused with residual addition and RMSNorm, for small messages that NCCL's
latency would dominate.

Runs inside captured graphs. All calls of a group are on one stream. ONE_SHOT_BYTES is from
published figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rorqual.config.host_memory import host_number
from rorqual.parallel.cuda_ipc import Mapping
from rorqual.parallel.group_axis import GroupAxis

ONE_SHOT_BYTES = 256 * 1024
T = TypeVar("T")


@dataclass(frozen=True)
class P2PMemory:
    """`own`: this rank's bytes, initially zero. `table` [world + 1] int64: addresses of all ranks'
    memory in this rank's device address space, and of `stop` (ops/triton/comm/p2p_flags.py)."""

    own: Tensor
    table: Tensor
    stop: Tensor
    handle: Any = None  # keeps the mapping alive

    @staticmethod
    def of(axis: GroupAxis, size: int, device: torch.device, stop: Tensor) -> P2PMemory:
        """`size` bytes on each rank's GPU, the same on all ranks. stop: this rank's word in pinned
        host memory. Collective over the axis. Raises RuntimeError on every rank if it fails on
        any."""
        with torch.cuda.device(device):
            mine, name = run_on_all_ranks(axis, lambda: _export(size), device)
            names = (
                axis.all_gather(torch.tensor([list(name)], dtype=torch.uint8, device=device))
                .cpu()
                .numpy()
            )
            own = mine.tensor(device).zero_()
            # followed by a collective, so no rank raises a flag before all flags are zero
            torch.cuda.synchronize(device)
            theirs = {
                rank: handle.tobytes() for rank, handle in enumerate(names) if rank != axis.rank
            }
            found = run_on_all_ranks(
                axis,
                lambda: (
                    {rank: Mapping.of(handle, size) for rank, handle in theirs.items()}
                    | {axis.rank: mine}
                ),
                device,
            )
            table = torch.tensor(
                [*(found[rank].pointer for rank in range(axis.size)), stop.data_ptr()],
                dtype=torch.int64,
                device=device,
            )
        return P2PMemory(own, table, stop, found)


def run_on_all_ranks(axis: GroupAxis, work: Callable[[], T], device: torch.device) -> T:
    """Run `work`, which waits for no other rank, on every rank and return this rank's result.
    Raises RuntimeError on every rank if it fails on any: a container may forbid what it needs."""
    reason = ""
    found = []
    try:
        found = [work()]
    except (
        RuntimeError,
        OSError,
        AttributeError,
    ) as error:  # includes a missing driver library or driver function
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    refused = int(axis.all_reduce(torch.tensor(int(not found), device=device)))
    if refused:
        raise RuntimeError(reason or f"refused on {refused} of {axis.size} ranks")
    return found[0]


def _export(size: int) -> tuple[Mapping, bytes]:
    block = Mapping.new(size)
    return block, block.handle()


def why_not_shared(axis: GroupAxis, device: torch.device) -> str:
    """Why the ranks of the axis cannot share memory; empty if they can. All ranks agree on whether
    it is empty. Collective on GPUs."""
    if device.type != "cuda":
        return f"{device.type} has no symmetric memory"
    here = torch.tensor([[host_number(), device.index or 0]], device=device)
    hosts, devices = axis.all_gather(here).t().tolist()
    if len(set(hosts)) > 1:
        return f"{len(set(hosts))} hosts"
    reach = all(
        torch.cuda.can_device_access_peer(device, other)
        for other in devices
        if other != device.index
    )
    missing = axis.all_reduce(torch.tensor(int(not reach), device=device))
    if int(missing):
        return "GPUs that cannot reach one another's memory"
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    try:
        P2PMemory.of(axis, 256, device, stop)
    except RuntimeError as error:
        return str(error)
    return ""


class P2PAddNorm:
    """A FusedAddNorm for messages of up to `rows` x `columns`. Creation is collective over the
    axis."""

    def __init__(
        self,
        axis: GroupAxis,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        stop: Tensor,
    ):
        from rorqual.ops.triton.comm.all_reduce_norm import all_reduce_norm, buffer_bytes

        self.kernel = all_reduce_norm
        self.rank = axis.rank
        self.dtype = dtype
        self.columns = columns
        self.epochs = torch.zeros(rows, dtype=torch.int32, device=device)
        self.memory = P2PMemory.of(
            axis, buffer_bytes(rows, columns, axis.size, dtype.itemsize), device, stop
        )

    def takes(self, x: Tensor, residual: Tensor | None) -> bool:
        return (
            residual is not None
            and x.dtype == self.dtype
            and x.shape[1] == self.columns
            and 0 < x.shape[0] <= self.epochs.shape[0]
        )

    def add_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert residual is not None
        return self.kernel(
            self.memory.table,
            self.epochs,
            self.rank,
            x,
            residual,
            weight,
            eps,
            two_shot=x.nbytes > ONE_SHOT_BYTES,
        )
