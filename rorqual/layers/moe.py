"""Feed-forward layers: dense, and mixture of experts over an Exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.layers.experts import LocalExperts
from rorqual.layers.linear import Linear, Part
from rorqual.layers.parameter import Build, Target
from rorqual.layers.routing_simulator import SimulatedRouting
from rorqual.ops.activation import Activation, hidden_of, room_of
from rorqual.ops.deferred_sum import NormInput
from rorqual.ops.interface import Ops
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import RouterWeights
from rorqual.parallel.exchange import Exchange, ExpertStore, LocalExchange, SlotMap
from rorqual.parallel.exchange_select import make_exchange
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT

# A function of the previous stage's result; the first stage takes [T, hidden].
Stage = Callable[[Any], Any]


def run_stages(stages: Sequence[Stage], x: Tensor) -> Any:
    """Run all stages in order, with nothing in between."""
    for stage in stages:
        x = stage(x)
    return x


@dataclass
class MoEInFlight:
    """State between the stages of an MoE layer. `ticket`: what Exchange.dispatch returned.
    shared: the shared expert's result, unless the exchange returns it with the routed experts'
    (`shared_returns`)."""

    x: Activation
    layout: Layout
    ticket: Any
    shared: Tensor | None = None
    shared_returns: bool = False


class DenseMLP:
    """SwiGLU of `intermediate` columns, split over the dense group: [T, hidden] to [T, hidden],
    both distributed as the layout says."""

    def __init__(self, build: Build, prefix: str, hidden: int, intermediate: int):
        self.ops = build.ops
        shard = build.mesh.axes["dense"].shard
        parts = [
            Part(f"{prefix}.{name}", intermediate, shard=shard) for name in ("gate_proj", "up_proj")
        ]
        self.gate_up = Linear(build, parts, hidden, merged=f"{prefix}.gate_up_proj")
        self.down = Linear(
            build,
            [Part(f"{prefix}.down_proj", hidden)],
            intermediate,
            gain=build.residual_gain,
            shard=shard,
        )

    def forward(self, x: Activation, layout: Layout = SINGLE_LAYOUT) -> Tensor:
        return layout.dense(self.ops.mlp, x, self.gate_up.weight, self.down.weight)

    def stages(self, layout: Layout = SINGLE_LAYOUT) -> tuple[Stage, ...]:
        """One stage: a dense layer has no hand-over."""
        return (partial(self.forward, layout=layout),)

    def partial(self, rows: Activation) -> Tensor:
        """This rank's partial sums for the rows of the whole dense group."""
        return self.ops.mlp(rows, self.gate_up.weight, self.down.weight)

    def finalize(self) -> None:
        for layer in (self.gate_up, self.down):
            layer.finalize()

    def targets(self) -> Iterator[Target]:
        yield from self.gate_up.targets()
        yield from self.down.targets()


class SharedMLP(Protocol):
    """A shared expert: a dense layer beside the routed experts."""

    def forward(self, x: Activation, layout: Layout = SINGLE_LAYOUT) -> Tensor: ...

    def partial(self, rows: Activation) -> Tensor: ...


class ExpertLayer:
    """Routed experts behind an Exchange, and an optional shared expert: the stages after the
    dispatch."""

    ops: Ops
    exchange: Exchange
    shared: SharedMLP | None

    def exchange_stages(self, dispatch: Stage, layout: Layout) -> tuple[Stage, ...]:
        """The stages; forward yields between them, before the host waits for the exchange."""
        send = (self.send,) if self.exchange.counts_first(layout) else ()
        return (dispatch, *send, self.run_experts, self.combine)

    def send(self, work: MoEInFlight) -> MoEInFlight:
        self.exchange.send(work.ticket)
        return work

    def run_experts(self, work: MoEInFlight) -> MoEInFlight:
        """Routed experts, and shared ones that take the rows which the exchange gathered; their
        sums are returned with the routed ones. Otherwise shared experts take the layer's own rows
        while the routed experts' sums are on their way."""
        rows = self.exchange.dense_rows(work.ticket)
        if self.shared is None or rows is None:
            self.exchange.run_experts(work.ticket)
            if not work.layout.alternates:
                self._run_shared(work)
        else:
            self.exchange.run_experts(work.ticket, self.shared.partial(rows))
            work.shared_returns = True
        return work

    def _run_shared(self, work: MoEInFlight) -> None:
        if self.shared is not None and not work.shared_returns:
            with self.ops.side_stream():
                work.shared = self.shared.forward(work.x, work.layout)

    def combine(self, work: MoEInFlight) -> Tensor:
        """Micro-batches compute their shared experts here: the next one's routed experts come
        first, so that its sums are sent as early as possible."""
        if work.layout.alternates:
            self._run_shared(work)
        return self.exchange.combine(work.ticket, work.shared)


class MoE(ExpertLayer):
    """Routed experts behind an Exchange, plus shared experts.

    If `fused_shared_experts` is not 0, shared experts are stored after the routed ones in the same
    tensors (a shared MLP of S times an expert's columns as S experts), every token is routed to
    them, and they need no kernels of their own. Else they are a DenseMLP, computed while the
    exchange is in flight. remote: the exchange of a layer whose experts are in other processes;
    this rank then holds none."""

    exchange: Exchange

    def __init__(
        self,
        build: Build,
        prefix: str,
        hidden: int,
        moe: MoEConfig,
        slots: SlotMap | None = None,
        remote: Exchange | None = None,
    ):
        self.ops = build.ops
        self.moe = moe
        self.prefix = prefix
        gate_dtype = torch.float32 if moe.router_fp32 else build.dtype
        self.local_experts = LocalExperts(
            build, prefix, hidden, moe, slots, None if remote is None else ()
        )
        self.fused_shared_experts = self.local_experts.fused_shared
        self.router = RouterWeights(
            build.empty(moe.num_experts, hidden, dtype=gate_dtype),
            build.empty(moe.num_experts, dtype=torch.float32) if moe.has_bias else None,
            moe,
            self.fused_shared_experts,
        )
        shared = 0 if self.fused_shared_experts else moe.num_shared * moe.intermediate_size
        self.shared: DenseMLP | None = (
            DenseMLP(build, f"{prefix}.shared_experts", hidden, shared) if shared else None
        )
        self.slots = self.local_experts.slots
        self.exchange = remote or self._exchange(build, slots)
        self.simulated_routing: SimulatedRouting | None = None
        self.dtype = build.dtype

    def _exchange(self, build: Build, slots: SlotMap | None) -> Exchange:
        store = ExpertStore(
            self.slots,
            self.local_experts.weights,
            self.ops.experts,
            build.device,
            build.mesh.axes["ep"].shard,
            self.ops.experts_fp8,
            slots is not None,
            self.ops,
        )
        return make_exchange(build.mesh.sizes, self.moe, store, self.ops.dispatch_combine)

    def slot_parts(self) -> list[Tensor]:
        """All tensors of the experts, each [local slots, ...]: data, scales, zero points."""
        return self.local_experts.parts()

    def remap(self, slots: SlotMap, rows: Tensor) -> None:
        """Use another slot map, after the weights have been moved. rows: the map's
        logical_to_physical() on the device."""
        self.slots = slots
        self.exchange.remap(slots, rows)
        self.ops.weights_changed(self.slot_parts())

    def finalize(self) -> None:
        """Call once, after loading."""
        self.router.gate = self.ops.prepare_router_weight(self.router.gate, self.dtype)
        self.local_experts.finalize(self.ops)
        if self.shared is not None:
            self.shared.finalize()

    def route(self, x: Tensor, padded: PaddedRows | None = None) -> tuple[Tensor, Tensor]:
        """(expert ids [T, K + fused], weights [T, K + fused] fp32) of hidden states [T, hidden].
        Rows that are `padded` may have ids -1."""
        return self.ops.router(x, self.router, padded)

    def stages(self, layout: Layout = SINGLE_LAYOUT) -> tuple[Stage, ...]:
        """The stages of the layer. Between two of them other micro-batches may compute while tokens
        are in flight. One stage if nothing is sent."""
        if self.is_one_op:
            return (partial(self.forward, layout=layout),)
        return self.exchange_stages(partial(self.dispatch, layout=layout), layout)

    @property
    def is_one_op(self) -> bool:
        """Whether router and experts are one op: the exchange would use ids and weights
        unchanged."""
        exchange = self.exchange
        return (
            isinstance(exchange, LocalExchange)
            and exchange.store.plain
            and not exchange.record_load
            and self.simulated_routing is None
        )

    def forward(self, x: Activation, layout: Layout = SINGLE_LAYOUT) -> NormInput:
        """[T, hidden], or a DeferredMoESum if the layout says that a norm follows directly."""
        if not room_of(x).shape[0]:
            return hidden_of(x)
        experts = self.ops.experts_deferred if layout.defers_moe_sum else self.ops.routed_experts
        shared = None
        if self.shared is not None:
            with self.ops.side_stream():
                shared = self.shared.partial(x)
        return experts(x, self.router, self.exchange.experts, shared, layout.own_padded)

    def dispatch(self, x: Activation, layout: Layout) -> MoEInFlight:
        rows = hidden_of(x)
        absent = self.exchange.takes_absent(rows, self.moe.top_k, layout)
        padded = layout.own_padded if absent else None
        ids, weights = self.route(rows, padded)
        if self.simulated_routing is not None:
            routed = self.moe.top_k
            simulated = self.simulated_routing(ids[:, :routed], layout.first_row)
            if padded is not None:
                simulated = simulated.where(ids[:, :routed] >= 0, -1)
            ids = torch.cat((simulated, ids[:, routed:]), 1)
        return MoEInFlight(x, layout, self.exchange.dispatch(rows, ids, weights, layout))

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.prefix}.gate.weight", self.router.gate, std=self.local_experts.std[0])
        if self.router.bias is not None:
            yield Target(f"{self.prefix}.gate.e_score_correction_bias", self.router.bias)
        if self.shared:
            yield from self.shared.targets()
        yield from self.local_experts.targets()
