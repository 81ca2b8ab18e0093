"""All-gather, experts, reduce-scatter: every rank has every token, and computes with its experts,
or its columns of experts.

No counts and no sync with the host; sums have a fixed order. One class handles tensor-parallel
experts, whole experts and both.

The ranks of a dense group are adjacent in the exchange's axis, so their rows are among the gathered
ones, and a shared expert's partial sums can be reduced with the experts'.

Experts in fp8 quantize their rows, each by itself. Quantized before they are gathered, the rows are
the same, and half as many bytes are sent (exchange_policy.gathers_fp8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.parallel.collectives import Axis, PendingCollective, Ready
from rorqual.parallel.exchange import ExpertStore, StoreExchange, plus
from rorqual.parallel.exchange_policy import gathers_fp8
from rorqual.parallel.layout import Layout


@dataclass
class GatherTicket:
    """`routing`: scales of x, if it is in fp8, and `pack` of slots and weights. dtype: of the
    result."""

    axis: Axis
    counts: tuple[int, ...] | None
    x: PendingCollective
    routing: PendingCollective
    top_k: int
    ids: torch.dtype
    dtype: torch.dtype
    dense: slice | None
    y: Sequence[PendingCollective] | None = None  # pieces of columns


class AllGatherExchange(StoreExchange):
    """shared: the layer has shared experts."""

    def __init__(self, store: ExpertStore, shared: bool):
        super().__init__(store)
        self.shared = shared

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        return True

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> GatherTicket:
        axis = layout.moe_axis
        counts = layout.moe_rows
        dtype = x.dtype
        top_k = ids.shape[1]
        dense = layout.dense_rows if self.shared else None
        routing = self.store.ops.pack_routing(self.store.slots_of(ids, layout), weights)
        # all ranks know this alike
        pairs = top_k * (x.shape[0] * axis.size if counts is None else sum(counts))
        if gathers_fp8(self.store.experts.gate_up.fp8_blocks, pairs, dense is not None):
            x, scale = self.store.ops.quantize_for_experts(x, self.store.experts)
            x = x.view(torch.uint8)
            routing = torch.cat((scale.view(torch.int32), routing), 1)
        # the short one first: nothing is left to launch when the rows have come
        sent = axis.start_all_gather(routing, counts)
        rows = axis.start_all_gather(x, counts)
        return GatherTicket(axis, counts, rows, sent, top_k, ids.dtype, dtype, dense)

    def dense_rows(self, ticket: GatherTicket) -> Tensor | None:
        if ticket.dense is None:
            return None
        ticket.x = Ready(ticket.x.wait())  # so that run_experts does not trim the rows again
        return ticket.x.wait()[ticket.dense]

    def run_experts(self, ticket: GatherTicket, dense: Tensor | None = None) -> None:
        x = ticket.x.wait()
        routing = ticket.routing.wait()
        scales = routing.shape[1] - 2 * ticket.top_k
        parts = [x]
        if scales:
            parts.append(routing[:, :scales].contiguous().view(torch.float32))
            routing = routing[:, scales:]
        held = self.store.local_slots
        given = (routing, ticket.ids, held.start, len(held))
        local_ids, weights = self.store.ops.unpack_routing(*given)
        sums = []
        first = 0
        for piece in self.store.run_in_pieces(parts, ticket.dtype, local_ids, weights):
            end = first + piece.shape[1]
            if dense is not None:
                piece[ticket.dense] += dense[:, first:end]
            sums.append(ticket.axis.start_reduce_scatter(piece, ticket.counts))
            ticket.axis.launch_recorded()  # while the next piece is computed
            first = end
        ticket.y = sums

    def combine(self, ticket: GatherTicket, base: Tensor | None = None) -> Tensor:
        assert ticket.y is not None, "run_experts comes before combine"
        pieces = [piece.wait() for piece in ticket.y]
        return plus(pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1), base)
