"""Broadcast of sampled tokens from a pipeline's last stage to the stages that need them for later
steps of the same requests.

No stage waits for it when the step ends: a stage continues with other requests, and reads the
tokens when a step includes theirs again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.engine.execution.request_state import RequestState
from rorqual.parallel.collectives import PendingCollective
from rorqual.parallel.mesh import Mesh


@dataclass
class BroadcastInFlight:
    """State of the rows `slots`, on the device as `on_device`."""

    slots: frozenset[int]
    on_device: Tensor
    state: PendingCollective


class SampledTokenBroadcast:
    def __init__(self, rows: RequestState, mesh: Mesh):
        self.rows = rows
        self.axis = mesh.axes["tokens"]
        self.draws = mesh.last_stage
        self.travelling: deque[BroadcastInFlight] = deque()

    def start(self, slots: list[int]) -> None:
        """After a step that sampled tokens for `slots`; the same order on every stage."""
        if self.axis.size == 1 or not slots:
            return
        on_device = self.rows.platform.to_device(torch.tensor(slots, dtype=torch.int64))
        if self.draws:
            state = self.rows.state(on_device)
        else:
            state = torch.empty(
                len(slots), 3 + self.rows.most_drafts, dtype=torch.int64, device=on_device.device
            )
        pending = self.axis.start_broadcast(state, self.axis.size - 1)
        self.travelling.append(BroadcastInFlight(frozenset(slots), on_device, pending))

    def settle(self, slots: Iterable[int]) -> None:
        """Before a step reads or sets up the rows `slots`: wait for their broadcasts and all
        earlier ones."""
        named = set(slots)
        last = max(
            (i for i, item in enumerate(self.travelling) if not named.isdisjoint(item.slots)),
            default=-1,
        )
        for _ in range(last + 1):
            item = self.travelling.popleft()
            state = item.state.wait()
            if not self.draws:
                self.rows.take(item.on_device, state)
