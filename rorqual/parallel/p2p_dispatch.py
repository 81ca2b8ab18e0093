"""Rows to experts and sums back through memory that the ranks share: the host's side of
ops/triton/comm/dispatch_combine.py.

A `P2PDispatchBuffers` belongs to one axis and serves all layers. It holds as many buffers as
exchanges may be under way at once; a call takes the first free one and gives it back when its sums
are added up. Ranks make the same calls in the same order, so they take the same buffers, and a
captured graph has its buffers' addresses in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.ops.triton.comm import dispatch_combine as kernels
from rorqual.ops.triton.comm.dispatch_combine import Areas, DispatchBuffer, ExpertPlacement
from rorqual.parallel.p2p_memory import P2PMemory


@dataclass
class DispatchInFlight:
    """An exchange under way, `capacity` rows a rank: of `like` the sums will have shape and
    dtype."""

    buffer: DispatchBuffer
    capacity: int
    like: Tensor
    fp8: bool


class P2PDispatchBuffers:
    """Rows of up to areas.rows a rank in `dtype`. `flights`: exchanges under way at once;
    `memory` holds areas.size bytes for each."""

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
        """Whether the longest rank's `capacity` rows fit; the answer is the same on all ranks.
        Without rows there is nothing to do."""
        shape = (x.dtype, x.shape[1], top_k) == (self.dtype, self.areas.columns, self.areas.top_k)
        return shape and 0 < capacity <= self.areas.rows and len(self.busy) < len(self.buffers)

    def send(
        self,
        x: Tensor,
        slots: Tensor,
        weights: Tensor,
        capacity: int,
        place: ExpertPlacement,
        fp8: bool = False,
    ) -> DispatchInFlight:
        """x [T, columns] to the ranks that hold any of its physical slots [T, K]. Rows leave as
        they are, or as e4m3 with scales."""
        buffer = next(buffer for buffer in self.buffers if buffer not in self.busy)
        self.busy.append(buffer)
        kernels.dispatch(buffer, x, slots, weights, capacity, place, fp8)
        return DispatchInFlight(buffer, capacity, x, fp8)

    def receive(self, flight: DispatchInFlight) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """(rows [ranks * capacity, columns], or e4m3 rows and their scales; local ids [.., K] int32
        here or -1; weights): views, valid until `finish`. Where no row came all of them are -1,
        and the row is what lay there before."""
        kernels.recv_dispatch(flight.buffer)
        return kernels.arrived(
            flight.buffer, self.memory.own, flight.capacity, self.dtype, flight.fp8
        )

    def send_back(self, flight: DispatchInFlight, y: Tensor) -> None:
        """Partial sums y [ranks * capacity, columns] to where their rows came from."""
        kernels.send_combine(flight.buffer, y, flight.capacity)

    def finish(self, flight: DispatchInFlight) -> Tensor:
        """The sums of this rank's rows, added in fp32 in the order of ranks."""
        out = kernels.combine(flight.buffer, flight.like)
        self.busy.remove(flight.buffer)
        return out
