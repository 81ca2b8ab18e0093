"""How many parts (micro-batches) a step is split into: fixed, or chosen by measured times. Pure
functions of what all ranks know. No torch.

The model of a split step has two resources: compute and the wire. Parts alternate at the hand-overs
of an MoE layer, in the order of parallel/overlap.py. A stage starts when its part's rows have
arrived and the previous part has handed over; its messages are sent when the wire is free. Stages
of smaller parts cost what was measured at that size, which includes reading weights once per part.
Two more terms come from measured passes: `rest`, the cost of a pass outside its MoE layers, and the
cost of a hand-over: the measured time of a split pass minus the time by the two resources alone,
per hand-over. It is negative where concurrent messages take less time than sequential ones. A pass
is never predicted below the computing time of its parts, measured separately: two measurements must
agree before a step is split.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol

from rorqual.config.parallel import MAX_AUTO_MICRO_BATCHES, REMOTE
from rorqual.engine.micro_batches.step_times import (
    MeasuredSize,
    PhaseTimes,
    StageSeconds,
    StepTimes,
)
from rorqual.engine.scheduling.scheduler_output import (
    SchedulerOutput,
    split_lengths,
    split_lengths_of_ranks,
)

MARGIN = 0.02  # a step is split, or split further, only for a predicted gain above this
SIMULATED_LAYERS = (2, 4)  # layers that are simulated; further ones are extrapolated from these
KNOWN_STEPS = 4096  # cached decisions

Part = tuple[int, int]  # decode tokens, prompt tokens
Lengths = tuple[tuple[int, ...], ...]
Stages = tuple[StageSeconds, ...]


class MicroBatchPolicy(Protocol):
    def parts(self, outputs: Sequence[SchedulerOutput]) -> int:
        """Parts requested for a step; `outputs`: of each data-parallel rank."""
        ...

    def decode_parts(self, requests: int, width: int, ranks: int) -> int:
        """The same for a decode step: on each of `ranks` ranks, `requests` requests of `width`
        tokens each."""
        ...


@dataclass(frozen=True)
class FixedParts:
    count: int = 1

    def parts(self, outputs: Sequence[SchedulerOutput]) -> int:
        return self.count

    def decode_parts(self, requests: int, width: int, ranks: int) -> int:
        return self.count


class MeasuredParts:
    """For each step the number of parts predicted to be fastest."""

    def __init__(self, times: StepTimes):
        self.times = times
        self._best = lru_cache(KNOWN_STEPS)(partial(best_parts, times))

    def parts(self, outputs: Sequence[SchedulerOutput]) -> int:
        width = outputs[0].num_speculative_tokens + 1
        lengths = tuple(output.lengths for output in outputs)
        return self._best(lengths, tuple(len(one.decode_slots) * width for one in outputs))

    def decode_parts(self, requests: int, width: int, ranks: int) -> int:
        return self._best(((width,) * requests,) * ranks, (requests * width,) * ranks)


def best_parts(times: StepTimes, lengths: Lengths, decoding: tuple[int, ...]) -> int:
    """lengths: tokens of each request of each rank, in packing order; decoding: how many of a
    rank's tokens, its first ones, are decode tokens."""
    totals = tuple(sum(rank) for rank in lengths)
    decodes = totals == decoding
    phase = times.decode if decodes else times.prompts
    if not phase.sizes:
        return 1
    found, fastest = 1, predicted(times, decodes, shapes((totals,), decoding))
    assert fastest is not None, "every size was measured whole"
    for count in range(2, MAX_AUTO_MICRO_BATCHES + 1):
        parts = split_lengths_of_ranks(lengths, count)
        seconds = predicted(times, decodes, shapes(parts, decoding)) if parts else None
        if seconds is None:
            continue
        needed = MARGIN if found > 1 else max(MARGIN, noise_at(phase, max(totals), count))
        if seconds < fastest * (1 - needed):
            found, fastest = count, seconds
    return found


def shapes(parts: Sequence[Sequence[int]], decoding: Sequence[int]) -> tuple[Part, ...]:
    """For each part the tokens of the rank with most: all wait for it."""
    found = []
    starts = [0] * len(decoding)
    for part in parts:
        kinds = []
        for start, tokens, first in zip(starts, part, decoding, strict=True):
            decode = min(start + tokens, first) - min(start, first)
            kinds.append((decode, tokens - decode))
        found.append(max(kinds, key=sum))
        starts = [start + tokens for start, tokens in zip(starts, part, strict=True)]
    return tuple(found)


# ---- the model


def predicted(times: StepTimes, decodes: bool, parts: Sequence[Part]) -> float | None:
    """Predicted seconds of a pass in these parts; None where no measured size has that many."""
    phase = times.decode if decodes else times.prompts
    tokens = sum(map(sum, parts))
    extra = overheads_at(times.layers, phase, tokens, len(parts))
    if extra is None:
        return None
    layers = [layer_of(times, decodes, part) for part in parts]
    hand_overs = sum(len(stages) - 1 for stages in layers) * times.layers
    found = simulated_seconds(layers, times.layers) + hand_overs * extra.hand_over
    # even with communication fully hidden; with expert servers their time counts as communication
    alone = sum(stage.compute for stages in layers for stage in stages) * times.layers
    return extra.rest + (found if phase.sizes[0].exchange == REMOTE else max(found, alone))


def layer_of(times: StepTimes, decodes: bool, part: Part) -> Stages:
    """Stages of one layer for the tokens of one part; attention is in the first."""
    phase = times.decode if decodes else times.prompts
    tokens = sum(part)
    if decodes or not times.decode.sizes:
        attention = attention_at(phase, tokens)
    else:
        attention = attention_at(times.decode, part[0]) + attention_at(phase, part[1])
    first, *rest = stages_at(phase, tokens)
    return StageSeconds(first.compute + attention, first.wire), *rest


def simulated_seconds(parts: Sequence[Stages], layers: int) -> float:
    """Simulated seconds of `layers` layers with alternating parts."""
    if layers <= SIMULATED_LAYERS[1]:
        return _simulate([_chain(stages, layers) for stages in parts])
    less, more = (
        _simulate([_chain(stages, count) for stages in parts]) for count in SIMULATED_LAYERS
    )
    return more + (layers - SIMULATED_LAYERS[1]) * (more - less) / (
        SIMULATED_LAYERS[1] - SIMULATED_LAYERS[0]
    )


def _chain(stages: Stages, layers: int) -> list[StageSeconds]:
    """A part's stages over all layers: a layer's last stage and the next layer's first are
    merged."""
    if len(stages) == 1:
        return [stages[0]] * layers
    first, *middle, last = stages
    joined = StageSeconds(last.compute + first.compute, first.wire)
    return [first, *middle, *[joined, *middle] * (layers - 1), last]


def _simulate(chains: Sequence[Sequence[StageSeconds]]) -> float:
    computed = wire = 0.0
    come = [0.0] * len(chains)
    for turn in range(max(map(len, chains))):
        for part, chain in enumerate(chains):
            if turn >= len(chain):
                continue
            computed = max(computed, come[part]) + chain[turn].compute
            if chain[turn].wire:
                wire = max(wire, computed) + chain[turn].wire
            come[part] = max(computed, wire) if chain[turn].wire else computed
    return computed


# ---- between measured sizes


@dataclass(frozen=True)
class Interpolation:
    """Linear interpolation between two measured sizes at `share` (above 1: extrapolation), times
    `scale`."""

    low: MeasuredSize
    high: MeasuredSize
    share: float = 0.0
    scale: float = 1.0

    def of(self, value: Callable[[MeasuredSize], float]) -> float:
        low, high = value(self.low), value(self.high)
        found = low + self.share * (high - low)
        return self.scale * (found if self.share <= 1 else max(found, high))


def interpolation_at(sizes: Sequence[MeasuredSize], tokens: int) -> Interpolation:
    """Below the smallest size times are constant; above the largest they are extrapolated from the
    last two. Between sizes with different exchanges the nearer one is scaled by tokens."""
    place = bisect_left(sizes, tokens, key=lambda size: size.tokens)
    if place == 0:
        return Interpolation(sizes[0], sizes[0])
    if place < len(sizes) and sizes[place].tokens == tokens:
        return Interpolation(sizes[place], sizes[place])
    if len(sizes) == 1:
        return Interpolation(sizes[0], sizes[0], 0.0, tokens / sizes[0].tokens)
    low, high = sizes[max(0, min(place, len(sizes) - 1) - 1)], sizes[min(place, len(sizes) - 1)]
    if low.exchange != high.exchange:
        near = min(low, high, key=lambda size: abs(size.tokens - tokens))
        return Interpolation(near, near, 0.0, tokens / near.tokens)
    return Interpolation(low, high, (tokens - low.tokens) / (high.tokens - low.tokens))


def attention_at(phase: PhaseTimes, tokens: int) -> float:
    return interpolation_at(phase.sizes, tokens).of(lambda size: size.attention) if tokens else 0.0


def stages_at(phase: PhaseTimes, tokens: int) -> Stages:
    here = interpolation_at(phase.sizes, tokens)
    return tuple(
        StageSeconds(
            here.of(lambda size, i=i: size.stages[i].compute),  # type: ignore[misc]
            here.of(lambda size, i=i: size.stages[i].wire),  # type: ignore[misc]
        )
        for i in range(len(here.low.stages))
    )


def noise_at(phase: PhaseTimes, tokens: int, parts: int) -> float:
    """The largest noise of whole passes and of passes in `parts` parts, over the neighbouring
    sizes."""
    here = interpolation_at(phase.sizes, tokens)
    sizes = (here.low, here.high)
    return max(
        (one for size in sizes for one in (*size.noise[:1], *size.noise[parts - 1 : parts])),
        default=0.0,
    )


@dataclass(frozen=True)
class Overheads:
    """Seconds beyond the two-resource model, from measured passes: per pass, and per hand-over."""

    rest: float
    hand_over: float


def overheads_at(layers: int, phase: PhaseTimes, tokens: int, parts: int) -> Overheads | None:
    """Interpolated between the measured sizes that have `parts` parts."""
    sizes = [size for size in phase.sizes if len(size.passes) >= parts]
    if not sizes:
        return None
    here = interpolation_at(sizes, tokens)
    return Overheads(
        here.of(lambda size: rest_of(layers, phase, size)),
        # a hand-over does not grow beyond what was measured
        replace(here, share=min(here.share, 1.0), scale=1.0).of(
            lambda size: hand_over_of(layers, phase, size, parts)
        ),
    )


def rest_of(layers: int, phase: PhaseTimes, size: MeasuredSize) -> float:
    return size.passes[0] - simulated_seconds([_layer_at(phase, size.tokens)], layers)


def hand_over_of(layers: int, phase: PhaseTimes, size: MeasuredSize, parts: int) -> float:
    if parts == 1:
        return 0.0
    found = [_layer_at(phase, tokens) for tokens in split_lengths(size.lengths, parts)]
    hand_overs = sum(len(stages) - 1 for stages in found) * layers
    measured = size.passes[parts - 1] - rest_of(layers, phase, size)
    return (measured - simulated_seconds(found, layers)) / hand_overs


def _layer_at(phase: PhaseTimes, tokens: int) -> Stages:
    first, *others = stages_at(phase, tokens)
    return StageSeconds(first.compute + attention_at(phase, tokens), first.wire), *others
