"""Dispatch and combine through memory that the ranks share: the host side of
ops/triton/comm/dispatch_combine.py.

A `P2PDispatchBuffers` belongs to one axis and serves all layers. It has one buffer for each
exchange that may be in flight; `dispatch` takes the first free one and `combine` releases it. Ranks
make the same calls in the same order, so they use the same buffers, and a captured graph contains
the buffers' addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.triton.comm import dispatch_combine as kernels
from rorqual.ops.triton.comm.dispatch_combine import Areas, DispatchBuffer, ExpertPlacement
from rorqual.parallel.p2p_memory import P2PMemory


@dataclass
class DispatchInFlight:
    """An exchange in flight, with `capacity` rows per rank. `like`: a tensor of the result's shape
    and dtype."""

    buffer: DispatchBuffer
    capacity: int
    like: Tensor
    fp8: bool


class P2PDispatchBuffers:
    """For up to areas.rows rows per rank in `dtype`. `flights`: most exchanges in flight; `memory`
    has areas.size bytes for each."""

    def __init__(
        self, memory: P2PMemory, rank: int, areas: Areas, dtype: torch.dtype, flights: int = 2
    ):
        assert memory.own.nbytes >= flights * areas.size, (memory.own.nbytes, flights, areas)
        assert areas.itemsize == dtype.itemsize
        self.memory = memory
        self.areas = areas
        self.dtype = dtype
        device = memory.table.device
        self.buffers = [
            DispatchBuffer(
                memory.table,
                flight * areas.size,
                areas,
                rank,
                torch.zeros(2, dtype=torch.int32, device=device),
                torch.zeros(areas.rows, areas.world, dtype=torch.int32, device=device),
            )
            for flight in range(flights)
        ]
        self.busy: list[DispatchBuffer] = []

    @property
    def nbytes(self) -> int:
        return self.memory.own.nbytes

    def takes(self, x: Tensor, capacity: int, top_k: int) -> bool:
        """Whether `capacity` rows, those of the longest rank, fit and are not 0; the same answer on
        all ranks."""
        shape = (x.dtype, x.shape[1], top_k) == (self.dtype, self.areas.columns, self.areas.top_k)
        return shape and 0 < capacity <= self.areas.rows and len(self.busy) < len(self.buffers)

    def dispatch(
        self,
        x: Tensor,
        slots: Tensor,
        weights: Tensor,
        capacity: int,
        place: ExpertPlacement,
        fp8: bool = False,
        padded: PaddedRows | None = None,
        ue8m0: bool = False,
    ) -> DispatchInFlight:
        """Send rows x [T, columns] to the ranks that hold any of their physical slots [T, K],
        unchanged or as e4m3 with scales; no padding."""
        buffer = next(buffer for buffer in self.buffers if buffer not in self.busy)
        self.busy.append(buffer)
        kernels.dispatch(buffer, x, slots, weights, capacity, place, fp8, padded, ue8m0)
        return DispatchInFlight(buffer, capacity, x, fp8)

    def recv_dispatch(self, flight: DispatchInFlight) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """((rows [ranks * capacity, columns],) or (e4m3 rows, scales); local ids [.., K] int32, -1:
        on another rank; weights). Views, valid until `combine`. An unused row has only -1 ids and
        stale data."""
        kernels.recv_dispatch(flight.buffer)
        return kernels.arrived(
            flight.buffer, self.memory.own, flight.capacity, self.dtype, flight.fp8
        )

    def send_combine(self, flight: DispatchInFlight, y: Tensor) -> None:
        """Return partial sums y [ranks * capacity, columns] to the ranks that sent the rows."""
        kernels.send_combine(flight.buffer, y, flight.capacity)

    def combine(self, flight: DispatchInFlight, base: Tensor | None = None) -> Tensor:
        """The sums of this rank's rows, added in fp32 in rank order, and `base`."""
        out = kernels.combine(flight.buffer, flight.like, base)
        self.busy.remove(flight.buffer)
        return out
