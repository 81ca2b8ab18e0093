"""The routed experts of one layer on this rank: their weights and their checkpoint targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.layers.parameter import Build, Target, Window
from rorqual.layers.weight_format.base import Matrix, WeightFormat
from rorqual.layers.weight_format.select import format_of
from rorqual.ops.interface import Ops
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.parallel.exchange import SlotMap
from rorqual.parallel.exchange_policy import possible_exchanges


def mlp_targets(
    name: str,
    gate_up: Weight,
    down: Weight,
    start: int,
    shape: tuple[int, int],
    std: tuple[float, float],
    formats: tuple[WeightFormat, WeightFormat],
) -> Iterator[Target]:
    """Targets of an MLP's intermediate columns from `start` on. shape: of its gate in the file;
    std, formats: (gate and up, down)."""
    size = down.columns
    for index, part in enumerate(("gate_proj", "up_proj")):
        rows = gate_up.part(index * size, (index + 1) * size)
        window = Window(shape, row=start)
        yield from formats[0].targets(Matrix(f"{name}.{part}", rows, window, std[0]))
    window = Window((shape[1], shape[0]), column=start)
    yield from formats[1].targets(Matrix(f"{name}.down_proj", down, window, std[1]))


class LocalExperts:
    """`local_slots`: the physical slots to load; None: those of this rank. `room`: slots to
    allocate, if more than are loaded. `local_fraction`: as in ExpertWeights.

    `fused_shared`: number of shared experts stored after the routed ones in the same tensors; a
    shared MLP of S times an expert's columns counts as S experts."""

    def __init__(
        self,
        build: Build,
        prefix: str,
        hidden: int,
        moe: MoEConfig,
        slots: SlotMap | None = None,
        local_slots: Sequence[int] | None = None,
        room: int = 0,
    ):
        self.moe = moe
        self.prefix = prefix
        self.hidden = hidden
        self.absent_matrix = partial(_absent_matrix, build)
        self._choose_formats(build)
        self.fused_shared = self._fused_shared(build, slots) if local_slots is None else 0
        self.slots = slots or SlotMap.identity(moe.num_experts)
        ep = build.mesh.axes["ep"].shard
        self.local_slots = self.slots.local(ep) if local_slots is None else local_slots
        self.room = max(room, len(self.local_slots))
        self.local_fraction = self.room / self.slots.num_slots
        self.columns = range(*build.mesh.axes["expert_tp"].shard.span(moe.intermediate_size))
        self.weights = self._empty(build)
        self.std = (hidden**-0.5, build.residual_gain * moe.intermediate_size**-0.5)
        self.fused_shared_std = (
            hidden**-0.5,
            build.residual_gain * (self.fused_shared * moe.intermediate_size or 1) ** -0.5,
        )

    def _fused_shared(self, build: Build, slots: SlotMap | None) -> int:
        """How many shared experts are fused with the routed ones: all or none. All, if the backend
        fuses them and this rank holds the same columns of them, in the same format, as of every
        routed expert, for the same tokens (nothing is dispatched)."""
        moe = self.moe
        sizes = build.mesh.sizes
        here = slots is None and possible_exchanges(sizes, moe) == ("local",)
        alike = (sizes.ep, sizes.expert_tp) == (1, sizes.dense_tp)
        return moe.num_shared if here and alike and self._fits_shared(build) else 0

    def _fits_shared(self, build: Build) -> bool:
        """Whether the backend fuses shared experts, and these have the routed experts' format and
        can be split into as many."""
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
        """One format for all gate and up matrices, one for all down matrices."""
        experts = [f"{self.prefix}.experts.{expert}" for expert in range(self.moe.num_experts)]
        ups = [f"{name}.{part}" for name in experts for part in ("gate_proj", "up_proj")]
        downs = [f"{name}.down_proj" for name in experts]
        self.gate_up_format = format_of(build.scheme(ups, self.hidden))
        self.down_format = format_of(build.scheme(downs, self.moe.intermediate_size))

    def _empty(self, build: Build) -> ExpertWeights:
        stack = (self.room + self.fused_shared,)
        size = len(self.columns)
        edges = (size, self.columns.start)
        return ExpertWeights(
            self.gate_up_format.empty(build, 2 * size, self.hidden, edges, stack),
            self.down_format.empty(build, self.hidden, size, stack=stack),
            self.fused_shared,
            self.local_fraction,
        )

    def parts(self) -> list[Tensor]:
        """All tensors of the experts, each [local slots, ...]: data, scales, zero points."""
        weights = (self.weights.gate_up, self.weights.down)
        return [part for weight in weights for part in weight.tensors()]

    def finalize(self, ops: Ops) -> None:
        """Call once, after loading."""
        ops.prepare_experts(self.weights, f"{self.prefix}.experts")

    def targets(self) -> Iterator[Target]:
        gate_up = self.weights.gate_up
        down = self.weights.down
        names = [f"{self.prefix}.experts.{expert}" for expert in range(self.moe.num_experts)]
        for place, slot in enumerate(self.local_slots):
            yield from self._slot_targets(
                names[self.slots.physical_to_logical[slot]],
                gate_up[place],
                down[place],
                self.columns.start,
                1,
                self.std,
            )
        for number in range(self.fused_shared):
            place = len(self.local_slots) + number
            yield from self._fused_shared_targets(number, gate_up[place], down[place])
        held = {self.slots.physical_to_logical[slot] for slot in self.local_slots}
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
        """One expert: the columns from `start` on of an MLP as wide as `experts` experts."""
        shape = (experts * self.moe.intermediate_size, self.hidden)
        formats = (self.gate_up_format, self.down_format)
        yield from mlp_targets(name, gate_up, down, start, shape, std, formats)

    def _fused_shared_targets(self, number: int, gate_up: Weight, down: Weight) -> Iterator[Target]:
        """One fused shared expert; the checkpoint may have their gate and up in one tensor."""
        name = f"{self.prefix}.shared_experts"
        each = self.moe.intermediate_size
        size = len(self.columns)
        start = number * each + self.columns.start
        width = self.fused_shared * each
        yield from self._slot_targets(
            name, gate_up, down, start, self.fused_shared, self.fused_shared_std
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
        """For checkpoints that have all experts of a layer in one tensor."""
        places = [
            (place, self.slots.physical_to_logical[slot], 1)
            for place, slot in enumerate(self.local_slots)
        ]
        if self.slots.is_identity and isinstance(self.local_slots, range):
            places = [(0, self.local_slots.start, len(self.local_slots))]
        for place, first, count in places:
            yield from self._stacked_run(names, slice(place, place + count), first)

    def _stacked_run(self, names: list[str], run: slice, first: int) -> Iterator[Target]:
        """The slots `run`, which hold consecutive experts from `first` on."""
        experts = self.moe.num_experts
        size = len(self.columns)
        total = self.moe.intermediate_size
        gate_up, down = (weight.data[run] for weight in (self.weights.gate_up, self.weights.down))
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
