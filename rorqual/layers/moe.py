"""Feed-forward layers: dense, and sparse over an Exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.layers.experts import HeldExperts
from rorqual.layers.linear import Linear, Part
from rorqual.layers.parameter import Build, Target
from rorqual.layers.picks import Picks
from rorqual.ops.activation import Activation, hidden_of, room_of
from rorqual.ops.deferred_sum import NormInput
from rorqual.ops.interface import Ops
from rorqual.ops.reference import RouterWeights
from rorqual.parallel.exchange import Exchange, ExpertStore, LocalExchange, SlotMap
from rorqual.parallel.exchange_select import make_exchange
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT

# A plain function that takes what the stage before it returned; the first takes [T, hidden].
Stage = Callable[[Any], Any]


def run_stages(stages: Sequence[Stage], x: Tensor) -> Any:
    """All stages one after the other, for a caller with nothing to do at the hand-overs."""
    for stage in stages:
        x = stage(x)
    return x


@dataclass
class MoEInFlight:
    """Tokens on their way to their experts and back: `ticket` is the exchange's. shared: the
    shared expert's result where it does not come back with the routed experts'."""

    x: Activation
    layout: Layout
    ticket: Any
    shared: Tensor | None = None


class DenseMLP:
    """SwiGLU of `intermediate` columns, split over the dense group: [T, hidden] to [T, hidden],
    both as the layout says."""

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
        """One: a dense layer waits for nobody."""
        return (partial(self.forward, layout=layout),)

    def partial(self, rows: Activation) -> Tensor:
        """What this rank's columns add to the sums of rows of the whole dense group."""
        return self.ops.mlp(rows, self.gate_up.weight, self.down.weight)

    def finalize(self) -> None:
        for layer in (self.gate_up, self.down):
            layer.finalize()

    def targets(self) -> Iterator[Target]:
        yield from self.gate_up.targets()
        yield from self.down.targets()


class SharedMLP(Protocol):
    """A dense layer beside experts."""

    def forward(self, x: Activation, layout: Layout = SINGLE_LAYOUT) -> Tensor: ...

    def partial(self, rows: Activation) -> Tensor: ...


class ExpertLayer:
    """Experts behind an Exchange, and a dense layer beside them: what follows the dispatch."""

    ops: Ops
    exchange: Exchange
    shared: SharedMLP | None

    def exchange_stages(self, dispatch: Stage, layout: Layout) -> tuple[Stage, ...]:
        """With a hand-over before the host waits for anything."""
        send = (self.send,) if self.exchange.counts_first(layout) else ()
        return (dispatch, *send, self.run_experts, self.combine)

    def send(self, work: MoEInFlight) -> MoEInFlight:
        self.exchange.send(work.ticket)
        return work

    def run_experts(self, work: MoEInFlight) -> MoEInFlight:
        """The experts, and beside them the shared expert: over the rows that the exchange has
        gathered, whose sums then come back together, or else over the layer's own."""
        rows = self.exchange.dense_rows(work.ticket)
        if self.shared is None or rows is None:
            self.exchange.run_experts(work.ticket)
            if self.shared is not None:
                with self.ops.side_stream():
                    work.shared = self.shared.forward(work.x, work.layout)
        else:
            self.exchange.run_experts(work.ticket, self.shared.partial(rows))
        return work

    def combine(self, work: MoEInFlight) -> Tensor:
        y = self.exchange.combine(work.ticket)
        return y if work.shared is None else y + work.shared


class MoE(ExpertLayer):
    """Routed experts behind an Exchange, plus shared experts.

    Where `fused_shared_experts` is not 0, shared experts stand behind the routed ones in the same
    tensors, a shared MLP of S times an expert's columns as S experts, and every token picks them:
    no kernels of their own. Else they are a layer beside the exchange, computed while it is under
    way, on rows that it gathered where these are the rows they need. remote: the exchange of a
    layer whose experts are in other processes; none is here then."""

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
        self.held = HeldExperts(build, prefix, hidden, moe, slots, None if remote is None else ())
        self.fused_shared_experts = self.held.fused_shared
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
        self.slots = self.held.slots
        self.exchange = remote or self._exchange(build, slots)
        self.picks: Picks | None = None
        self.dtype = build.dtype

    def _exchange(self, build: Build, slots: SlotMap | None) -> Exchange:
        store = ExpertStore(
            self.slots,
            self.held.weights,
            self.ops.experts,
            build.device,
            build.mesh.axes["ep"].shard,
            self.ops.experts_fp8,
            slots is not None,
        )
        return make_exchange(build.mesh.sizes, self.moe, store, self.ops.dispatch_combine)

    def slot_parts(self) -> list[Tensor]:
        """All that an expert consists of, each [slots here, ...]: data, scales, zero points."""
        return self.held.parts()

    def remap(self, slots: SlotMap, rows: Tensor) -> None:
        """The weights here have been moved as `slots` says; rows: SlotMap.rows on the device."""
        self.slots = slots
        self.exchange.remap(slots, rows)
        self.ops.weights_changed(self.slot_parts())

    def finalize(self) -> None:
        """Once the weights are there."""
        self.router.gate = self.ops.prepare_router_weight(self.router.gate, self.dtype)
        self.held.finalize(self.ops)
        if self.shared is not None:
            self.shared.finalize()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(expert ids [T, K + fused], weights [T, K + fused] fp32) of hidden states [T,
        hidden]."""
        return self.ops.router(x, self.router)

    def stages(self, layout: Layout = SINGLE_LAYOUT) -> tuple[Stage, ...]:
        """What a layer chains, with a hand-over between two stages: others may compute there while
        tokens travel. One stage where nothing travels."""
        if self.is_one_op:
            return (partial(self.forward, layout=layout),)
        return self.exchange_stages(partial(self.dispatch, layout=layout), layout)

    @property
    def is_one_op(self) -> bool:
        """Whether router and experts are one op: the exchange would pass ids and weights on as
        they are."""
        exchange = self.exchange
        return (
            isinstance(exchange, LocalExchange)
            and exchange.store.plain
            and not exchange.record_load
            and self.picks is None
        )

    def forward(self, x: Activation, layout: Layout = SINGLE_LAYOUT) -> NormInput:
        """[T, hidden], or the sum over each token's experts left to the norm that follows, where
        the layout says that one does."""
        if not room_of(x).shape[0]:
            return hidden_of(x)
        experts = self.ops.experts_deferred if layout.norm_sums else self.ops.routed_experts
        shared = None
        if self.shared is not None:
            with self.ops.side_stream():
                shared = self.shared.partial(x)
        return experts(x, self.router, self.exchange.experts, shared)

    def dispatch(self, x: Activation, layout: Layout) -> MoEInFlight:
        rows = hidden_of(x)
        ids, weights = self.route(rows)
        if self.picks is not None:
            routed = self.moe.top_k
            ids = torch.cat((self.picks(ids[:, :routed], layout.first_row), ids[:, routed:]), 1)
        return MoEInFlight(x, layout, self.exchange.dispatch(rows, ids, weights, layout))

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.prefix}.gate.weight", self.router.gate, std=self.held.std[0])
        if self.router.bias is not None:
            yield Target(f"{self.prefix}.gate.e_score_correction_bias", self.router.bias)
        if self.shared:
            yield from self.shared.targets()
        yield from self.held.targets()
