"""Step times of a layout of devices, from the cost model: whole models on each, or attention and
experts on devices of their own. No torch.

What a rank does is rounded before it is looked up (exactly up to 16, then in steps of about 3 %,
contexts of 6 %), so that a long run asks the cost model a few thousand times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.planner.simulator.cost_runner import IDLE, StepCost, StepLoad
from rorqual.planner.simulator.micro_batches import (
    Stage,
    layer_chain,
    makespan,
    play,
)
from rorqual.planner.simulator.settings import SimulationSettings
from rorqual.planner.timing.roofline import StepModel, StepTime
from rorqual.planner.timing.split import layer_devices, once_seconds, split_pass
from rorqual.planner.timing.split_schedule import Schedule, Task, schedule


def rounded(value: float, bits: int) -> int:
    """To the nearest number of `bits` leading binary digits."""
    whole = round(value)
    shift = max(0, whole.bit_length() - bits)
    return (whole + (1 << shift >> 1)) >> shift << shift


@lru_cache(maxsize=1 << 16)
def coarse(load: StepLoad) -> StepLoad:
    return StepLoad(
        rounded(load.rows, 5),
        rounded(load.context, 4),
        load.prompts,
        rounded(load.new, 5),
        rounded(load.cached, 4),
    )


def slowest(loads: Sequence[StepLoad]) -> set[StepLoad]:
    """Loads one of which must be the slowest: of ranks that only decode those with most rows and
    most cache entries, and all that have prompts."""
    plain = [load for load in loads if not load.prompts]
    found = {load for load in loads if load.prompts}
    if plain:
        found |= {max(plain), max(plain, key=lambda load: (load.rows * load.context, load))}
    return found


def mean_load(loads: Sequence[StepLoad]) -> StepLoad:
    """An average rank: rows, entries and prompt tokens of all of them, divided."""
    ranks = len(loads)
    rows = sum(load.rows for load in loads)
    entries = sum(load.rows * load.context for load in loads)
    new = sum(load.prompts * load.new for load in loads)
    chunks = sum(load.prompts for load in loads)
    before = sum(load.prompts * load.new * load.cached for load in loads)
    decode = (-(-rows // ranks), round(entries / rows)) if rows else (0, 0)
    return StepLoad(*decode, *((1, -(-new // ranks), round(before / new)) if chunks else ()))


def work_of(load: StepLoad, num_speculative_tokens: int, stage_tokens: int | None) -> GroupWork:
    decode = (
        BatchShape.verify(
            load.rows,
            max(load.context + num_speculative_tokens, num_speculative_tokens + 1),
            num_speculative_tokens,
        )
        if load.rows
        else None
    )
    prefill = (BatchShape(load.prompts, load.new, load.cached),) if load.prompts else ()
    return GroupWork(decode, prefill, stage_tokens, num_speculative_tokens if decode else 0)


def shared(load: StepLoad, batches: int) -> list[StepLoad]:
    """The loads of up to `batches` micro-batches, equal to a row; prompts are cut by tokens."""
    new = load.prompts * load.new
    found = []
    for index in range(batches):
        rows, tokens = (
            total * (index + 1) // batches - total * index // batches for total in (load.rows, new)
        )
        # A later piece of the prompts attends to the earlier ones as well.
        ahead = load.cached + load.new * index // batches
        found.append(
            StepLoad(rows, load.context if rows else 0, *((1, tokens, ahead) if tokens else ()))
        )
    return [piece for piece in found if piece != IDLE]


@dataclass(frozen=True, eq=False)
class ModelCosts:
    """A layout of devices that each run the whole model. With micro_batches above 1 a step is cut
    so that one batch computes while another is sent. slow: factors by which ranks of the stage
    compute more slowly than they should. exact: no rounding.

    A device is busy with compute or memory for the operations over its peak or the bytes over its
    bandwidth, of an average rank."""

    model: StepModel
    micro_batches: int = SimulationSettings.micro_batches
    slow: Mapping[int, float] = field(default_factory=dict)
    exact: bool = False
    resources: ClassVar[tuple[str, ...]] = ("compute", "memory", "network")
    _times: dict[tuple[StepLoad, int, int, float], tuple[float, float]] = field(
        default_factory=dict, repr=False
    )
    _floors: dict[tuple[StepLoad, int, int], tuple[float, float, float]] = field(
        default_factory=dict, repr=False
    )
    _alone: dict[tuple[StepLoad, StepLoad, int, int], StepCost] = field(
        default_factory=dict, repr=False
    )
    _balanced: dict[float, ModelCosts] = field(default_factory=dict, repr=False)

    def step(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> StepCost:
        if len(loads) > 1 or self.slow:
            return self._step(loads, num_speculative_tokens)
        # one rank: a step's cost follows from these
        stage = self._stage(loads, num_speculative_tokens)
        mean = self._round(mean_load(loads))
        key = (self._round(loads[0]), mean, stage, num_speculative_tokens)
        if key not in self._alone:
            self._alone[key] = self._step(loads, num_speculative_tokens)
        return self._alone[key]

    def _step(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> StepCost:
        stage = self._stage(loads, num_speculative_tokens)
        factors: dict[StepLoad, float] = {}
        for rank, factor in self.slow.items():
            if rank < len(loads):
                load = self._round(loads[rank])
                factors[load] = max(factor, factors.get(load, 1.0))
        candidates = {
            (load, factors.get(load, 1.0))
            for load in slowest([self._round(load) for load in set(loads)])
        }
        candidates |= set(factors.items())
        times = [
            self._time(load, stage, num_speculative_tokens, factor)
            for load, factor in candidates
            if load != IDLE
        ]
        floors = self._floor(self._round(mean_load(loads)), stage, num_speculative_tokens)
        return StepCost(max(time[0] for time in times), max(time[1] for time in times), floors)

    def balanced(self, fullest: float) -> ModelCosts:
        """The same costs with the fullest expert rank's load at this multiple of the mean."""
        if fullest not in self._balanced:
            routing = replace(self.model.routing, fullest=fullest)
            model = replace(self.model, routing=routing)
            self._balanced[fullest] = ModelCosts(model, self.micro_batches, self.slow, self.exact)
        return self._balanced[fullest]

    def _round(self, load: StepLoad) -> StepLoad:
        return load if self.exact else coarse(load)

    def _stage(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> int:
        tokens = sum(load.tokens(num_speculative_tokens) for load in loads)
        return tokens if self.exact else max(rounded(tokens, 4), 1)

    def _time(
        self, load: StepLoad, stage: int, num_speculative_tokens: int, factor: float = 1.0
    ) -> tuple[float, float]:
        """(seconds, stage seconds) where this rank is the slowest."""
        key = (load, stage, num_speculative_tokens, factor)
        if key not in self._times:
            chains = self._chains(load, stage, num_speculative_tokens, factor)
            whole = self.model.step(work_of(load, num_speculative_tokens, stage))
            sent = sum(item.seconds for item in whole.items if item.limiter == "network")
            # launching kernels takes longer than running them
            host = max(0.0, whole.stage - sum(item.seconds for item in whole.items))
            seconds = (
                sent + factor * (whole.stage - sent)
                if len(chains) == 1
                else makespan(chains) + host
            )
            self._times[key] = seconds * self.model.sizes.pp, seconds
        return self._times[key]

    def _chains(
        self, load: StepLoad, stage: int, num_speculative_tokens: int, factor: float
    ) -> list[list[Stage]]:
        pieces = shared(load, self.micro_batches) if self.micro_batches > 1 else [load]
        times = [
            self.model.step(work_of(piece, num_speculative_tokens, -(-stage // len(pieces))))
            for piece in pieces
        ]
        return [self._slowed(time, factor) for time in times]

    def _slowed(self, time: StepTime, factor: float) -> list[Stage]:
        chain = layer_chain(self.model.config, self.model.sizes, time)
        return [
            Stage(s.resource, s.name, s.seconds * (factor if s.resource == "compute" else 1.0))
            for s in chain
        ]

    def _floor(
        self, load: StepLoad, stage: int, num_speculative_tokens: int
    ) -> tuple[float, float, float]:
        key = (load, stage, num_speculative_tokens)
        if key not in self._floors:
            model = self.model
            work = work_of(load, num_speculative_tokens, stage)
            ops = rank_step(model.config, model.sizes, work, model.fmt, model.routing).ops
            compute = sum(op.layers * op.flops / model.device.peak(op.dtype) for op in ops)
            memory = sum(op.layers * op.bytes / model.device.bandwidth for op in ops)
            self._floors[key] = (
                compute,
                memory,
                sum(i.seconds for i in model.step(work).items if i.limiter == "network"),
            )
        return self._floors[key]

    def tasks(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> list[Task]:
        """Of the slowest rank."""
        stage = self._stage(loads, num_speculative_tokens)
        found = {}
        for rank, load in enumerate(loads):
            if load != IDLE:
                factor = self.slow.get(rank, 1.0)
                found[
                    self._time(self._round(load), stage, num_speculative_tokens, factor)[0], rank
                ] = self._round(load), factor
        load, factor = found[max(found)]
        return play(self._chains(load, stage, num_speculative_tokens, factor))


@dataclass(frozen=True, eq=False)
class SplitCosts:
    """Attention devices, a rank each, before expert devices that serve them all; placement as in
    split.py. `micro_batches` in flight."""

    model: StepModel
    attention: int
    experts: int
    placement: str = SimulationSettings.placement
    micro_batches: int = SimulationSettings.micro_batches
    slow: Mapping[int, float] = field(default_factory=dict)
    resources: ClassVar[tuple[str, ...]] = ("attention GPUs", "an expert GPU", "network")
    _steps: dict[tuple[StepLoad, int, int, float], Schedule] = field(
        default_factory=dict, repr=False
    )

    def step(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> StepCost:
        found = max(
            (self._scheduled(*key) for key in self._keys(loads, num_speculative_tokens)),
            key=lambda one: one.seconds,
        )
        return StepCost(
            found.seconds, found.seconds, (found.attention, found.experts, found.network)
        )

    def _keys(
        self, loads: Sequence[StepLoad], num_speculative_tokens: int
    ) -> set[tuple[StepLoad, int, int, float]]:
        """(load of a slowest rank, tokens of an average rank, num_speculative_tokens, factor)."""
        mean = rounded(
            -(-sum(load.tokens(num_speculative_tokens) for load in loads) // len(loads)), 4
        )
        ranks = {
            coarse(loads[rank]): factor for rank, factor in self.slow.items() if rank < len(loads)
        }
        candidates = slowest([coarse(load) for load in set(loads)]) | set(ranks)
        return {
            (load, max(1, mean), num_speculative_tokens, ranks.get(load, 1.0))
            for load in candidates
            if load != IDLE
        }

    def _scheduled(
        self, load: StepLoad, mean: int, num_speculative_tokens: int, factor: float
    ) -> Schedule:
        key = (load, mean, num_speculative_tokens, factor)
        if key not in self._steps:
            self._steps[key] = self._schedule(*key)
        return self._steps[key]

    def _schedule(
        self,
        load: StepLoad,
        mean: int,
        num_speculative_tokens: int,
        factor: float,
        tasks: list[Task] | None = None,
    ) -> Schedule:
        gpus = (self.attention, self.experts, self.placement)
        pieces = shared(load, self.micro_batches)
        average = work_of(StepLoad(rows=-(-mean // len(pieces)), context=1), 0, None)
        sent = split_pass(self.model, average, *gpus)
        passes = []
        for piece in pieces:
            own = split_pass(self.model, work_of(piece, num_speculative_tokens, None), *gpus)
            passes.append(
                replace(sent, own=own.own, last=own.last, shared=own.shared).slowed(factor)
            )
        once = once_seconds(self.model, work_of(load, num_speculative_tokens, None)) * factor
        by_layer = self.placement == "layers"
        devices = layer_devices(self.model, self.experts) if by_layer else None
        return schedule(passes, once, devices, tasks)

    def tasks(self, loads: Sequence[StepLoad], num_speculative_tokens: int) -> list[Task]:
        key = max(
            self._keys(loads, num_speculative_tokens), key=lambda key: self._scheduled(*key).seconds
        )
        tasks: list[Task] = []
        self._schedule(*key, tasks)
        return tasks
