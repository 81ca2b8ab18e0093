"""Feed-forward layers: dense, and sparse over an Exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.layers.linear import Linear, Part
from rorqual.layers.parameter import Build, Target, Window
from rorqual.layers.picks import Picks
from rorqual.layers.weight_format.base import Matrix, WeightFormat
from rorqual.layers.weight_format.select import format_of
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.deferred_sum import NormInput
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight
from rorqual.parallel.exchange import Exchange, ExpertStore, LocalExchange, SlotMap
from rorqual.parallel.exchange_policy import possible_exchanges
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

    def targets(self) -> Iterator[Target]:
        yield from self.gate_up.targets()
        yield from self.down.targets()


class SharedMLP(Protocol):
    """A dense layer beside experts."""

    def forward(self, x: Activation, layout: Layout = SINGLE_LAYOUT) -> Tensor: ...

    def partial(self, rows: Activation) -> Tensor: ...


class ExpertLayer:
    """Experts behind an Exchange, and a dense layer beside them: what follows the dispatch."""

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
            work.shared = self.shared.forward(work.x, work.layout) if self.shared else None
        else:
            self.exchange.run_experts(work.ticket, self.shared.partial(rows))
        return work

    def combine(self, work: MoEInFlight) -> Tensor:
        y = self.exchange.combine(work.ticket)
        return y if work.shared is None else y + work.shared


def mlp_targets(
    name: str,
    gate_up: Weight,
    down: Weight,
    start: int,
    shape: tuple[int, int],
    std: tuple[float, float],
    formats: tuple[WeightFormat, WeightFormat],
) -> Iterator[Target]:
    """The columns from `start` on of an MLP; shape: of its gate in the file; std and formats: of
    gate and up, and of down."""
    size = down.columns
    for index, part in enumerate(("gate_proj", "up_proj")):
        rows = gate_up.part(index * size, (index + 1) * size)
        window = Window(shape, row=start)
        yield from formats[0].targets(Matrix(f"{name}.{part}", rows, window, std[0]))
    window = Window((shape[1], shape[0]), column=start)
    yield from formats[1].targets(Matrix(f"{name}.down_proj", down, window, std[1]))


class MoE(ExpertLayer):
    """Routed experts behind an Exchange, plus shared experts.

    Where `fused_shared_experts` is not 0, shared experts stand behind the routed ones in the same
    tensors, a shared MLP of S times an expert's columns as S experts, and every token picks them:
    no kernels of their own. Else they are a layer beside the exchange, computed while it is under
    way, on rows that it gathered where these are the rows they need."""

    def __init__(
        self, build: Build, prefix: str, hidden: int, moe: MoEConfig, slots: SlotMap | None = None
    ):
        self.ops = build.ops
        self.moe = moe
        self.prefix = prefix
        self.hidden = hidden
        gate_dtype = torch.float32 if moe.router_fp32 else build.dtype
        self.absent_matrix = partial(_absent_matrix, build)
        self._choose_formats(build)
        self.fused_shared_experts = self._fused_shared(build, slots)
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
        self.slots = slots or SlotMap.identity(moe.num_experts)
        self.held = self.slots.local(build.mesh.axes["ep"].shard)
        self.columns = range(*build.mesh.axes["expert_tp"].shard.span(moe.intermediate_size))
        store = ExpertStore(
            self.slots,
            self._expert_weights(build, hidden),
            self.ops.experts,
            build.device,
            build.mesh.axes["ep"].shard,
            self.ops.experts_fp8,
            slots is not None,
        )
        self.exchange: Exchange = make_exchange(build.mesh.sizes, moe, store)
        self.picks: Picks | None = None
        self.dtype = build.dtype
        self.std = (hidden**-0.5, build.residual_gain * moe.intermediate_size**-0.5)
        self.fused_shared_std = (
            hidden**-0.5,
            build.residual_gain * (self.fused_shared_experts * moe.intermediate_size or 1) ** -0.5,
        )

    def _fused_shared(self, build: Build, slots: SlotMap | None) -> int:
        """How many shared experts stand among the routed ones: all or none. All, where the
        backend asks for it and a rank holds of them what it holds of every routed expert (the
        same columns, in the same format) for the same tokens (none travels)."""
        moe = self.moe
        sizes = build.mesh.sizes
        here = slots is None and possible_exchanges(sizes, moe) == ("local",)
        alike = (sizes.ep, sizes.expert_tp) == (1, sizes.dense_tp)
        return moe.num_shared if here and alike and self._fits_shared(build) else 0

    def _fits_shared(self, build: Build) -> bool:
        """Whether the backend asks for it, and shared experts are of the routed ones' format and
        can be cut into as many."""
        moe = self.moe
        if not (build.ops.fuses_shared_experts and moe.num_shared):
            return False
        at = f"{self.prefix}.shared_experts"
        names = [[f"{at}.gate_proj", f"{at}.up_proj"], [f"{at}.down_proj"]]
        widths = (self.hidden, moe.num_shared * moe.intermediate_size)
        schemes = [build.scheme(*pair) for pair in zip(names, widths, strict=True)]
        units = (self.gate_up_format.scheme.block[0], self.down_format.scheme.column_unit)
        whole = moe.num_shared == 1 or not any(moe.intermediate_size % unit for unit in units)
        return whole and schemes == [self.gate_up_format.scheme, self.down_format.scheme]

    def _choose_formats(self, build: Build) -> None:
        """One for the gates and ups of all experts, one for their downs."""
        experts = [f"{self.prefix}.experts.{expert}" for expert in range(self.moe.num_experts)]
        ups = [f"{name}.{part}" for name in experts for part in ("gate_proj", "up_proj")]
        downs = [f"{name}.down_proj" for name in experts]
        self.gate_up_format = format_of(build.scheme(ups, self.hidden))
        self.down_format = format_of(build.scheme(downs, self.moe.intermediate_size))

    def _expert_weights(self, build: Build, hidden: int) -> ExpertWeights:
        stack = (len(self.held) + self.fused_shared_experts,)
        size = len(self.columns)
        edges = (size, self.columns.start)
        return ExpertWeights(
            self.gate_up_format.empty(build, 2 * size, hidden, edges, stack),
            self.down_format.empty(build, hidden, size, stack=stack),
            self.fused_shared_experts,
            1 / build.mesh.axes["ep"].shard.count,
        )

    def slot_parts(self) -> list[Tensor]:
        """All that an expert consists of, each [slots here, ...]: data, scales, zero points."""
        weights = (self.exchange.experts.gate_up, self.exchange.experts.down)
        return [part for weight in weights for part in weight.tensors()]

    def remap(self, slots: SlotMap, rows: Tensor) -> None:
        """The weights here have been moved as `slots` says; rows: SlotMap.rows on the device."""
        self.slots = slots
        self.exchange.remap(slots, rows)
        self.ops.weights_changed(self.slot_parts())

    def finalize(self) -> None:
        """Once the weights are there."""
        self.router.gate = self.ops.prepare_router_weight(self.router.gate, self.dtype)

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
        if not hidden_of(x).shape[0]:
            return hidden_of(x)
        experts = self.ops.experts_deferred if layout.norm_sums else self.ops.routed_experts
        shared = self.shared.partial(x) if self.shared else None
        return experts(x, self.router, self.exchange.experts, shared)

    def dispatch(self, x: Activation, layout: Layout) -> MoEInFlight:
        rows = hidden_of(x)
        ids, weights = self.route(rows)
        if self.picks is not None:
            routed = self.moe.top_k
            ids = torch.cat((self.picks(ids[:, :routed], layout.first_row), ids[:, routed:]), 1)
        return MoEInFlight(x, layout, self.exchange.dispatch(rows, ids, weights, layout))

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.prefix}.gate.weight", self.router.gate, std=self.std[0])
        if self.router.bias is not None:
            yield Target(f"{self.prefix}.gate.e_score_correction_bias", self.router.bias)
        if self.shared:
            yield from self.shared.targets()
        yield from self._expert_targets()

    def _expert_targets(self) -> Iterator[Target]:
        gate_up = self.exchange.experts.gate_up
        down = self.exchange.experts.down
        names = [f"{self.prefix}.experts.{expert}" for expert in range(self.moe.num_experts)]
        for place, slot in enumerate(self.held):
            yield from self._slot_targets(
                names[self.slots.logical[slot]],
                gate_up[place],
                down[place],
                self.columns.start,
                1,
                self.std,
            )
        for number in range(self.fused_shared_experts):
            place = len(self.held) + number
            yield from self._fused_shared_targets(number, gate_up[place], down[place])
        held = {self.slots.logical[slot] for slot in self.held}
        for expert, name in enumerate(names):
            if expert not in held:
                yield from self._absent(name)
        if self.gate_up_format.whole_stacks and self.down_format.whole_stacks:
            yield from self._stacked_targets(names)

    def _slot_targets(
        self,
        name: str,
        gate_up: Weight,
        down: Weight,
        start: int,
        experts: int,
        std: tuple[float, float],
    ) -> Iterator[Target]:
        """One expert: the columns from `start` on of an MLP as wide as so many experts."""
        shape = (experts * self.moe.intermediate_size, self.hidden)
        formats = (self.gate_up_format, self.down_format)
        yield from mlp_targets(name, gate_up, down, start, shape, std, formats)

    def _fused_shared_targets(self, number: int, gate_up: Weight, down: Weight) -> Iterator[Target]:
        """One of the shared experts among the routed ones; also from a checkpoint that holds
        their gates and ups in one tensor."""
        name = f"{self.prefix}.shared_experts"
        each = self.moe.intermediate_size
        size = len(self.columns)
        start = number * each + self.columns.start
        width = self.fused_shared_experts * each
        yield from self._slot_targets(
            name, gate_up, down, start, self.fused_shared_experts, self.fused_shared_std
        )
        covers = (f"{name}.gate_proj", f"{name}.up_proj")
        for index in range(2):
            window = Window((2 * width, self.hidden), row=index * width + start)
            rows = gate_up.part(index * size, (index + 1) * size)
            matrix = Matrix(f"{name}.gate_up_proj", rows, window, self.std[0], covers)
            yield from self.gate_up_format.targets(matrix)

    def _absent(self, name: str) -> Iterator[Target]:
        size = self.moe.intermediate_size
        wide = (size, self.hidden)
        for part in ("gate_proj", "up_proj"):
            yield from self.absent_matrix(self.gate_up_format, f"{name}.{part}", wide)
        shape = (self.hidden, size)
        yield from self.absent_matrix(self.down_format, f"{name}.down_proj", shape)

    def _stacked_targets(self, names: list[str]) -> Iterator[Target]:
        """Checkpoints that keep all experts of a layer in one tensor."""
        places = [(place, self.slots.logical[slot], 1) for place, slot in enumerate(self.held)]
        if self.slots.is_identity:
            places = [(0, self.held.start, len(self.held))]
        for place, first, count in places:
            yield from self._stacked_run(names, slice(place, place + count), first)

    def _stacked_run(self, names: list[str], run: slice, first: int) -> Iterator[Target]:
        """The slots `run`, which hold the experts from `first` on."""
        experts = self.moe.num_experts
        size = len(self.columns)
        total = self.moe.intermediate_size
        gate_up, down = (
            weight.data[run]
            for weight in (self.exchange.experts.gate_up, self.exchange.experts.down)
        )
        up = tuple(f"{name}.{part}.weight" for name in names for part in ("gate_proj", "up_proj"))
        halves = (
            [(0, 0, 2 * size)]
            if size == total
            else [(half * total + self.columns.start, half * size, size) for half in range(2)]
        )
        for row, at, rows in halves:
            view = gate_up[:, at : at + rows]
            whole = (experts, 2 * total, self.hidden)
            yield Target(
                f"{self.prefix}.experts.gate_up_proj",
                view,
                self.std[0],
                covers=up,
                whole=whole,
                start=(first, row, 0),
            )
        outs = tuple(f"{name}.down_proj.weight" for name in names)
        whole = (experts, self.hidden, total)
        yield Target(
            f"{self.prefix}.experts.down_proj",
            down,
            self.std[1],
            covers=outs,
            whole=whole,
            start=(first, 0, self.columns.start),
        )


def _absent_matrix(
    build: Build, form: WeightFormat, name: str, shape: tuple[int, int]
) -> Iterator[Target]:
    return form.absent(name, build, shape)
