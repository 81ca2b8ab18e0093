"""The order in which a step of attention and experts apart is executed, and how long that takes. No
torch.

A step has N micro-batches. The attention device is one stream: it computes the micro-batches in
turns, from hand-over to hand-over (parallel/overlap.py), so it waits for the sums of the first one
before it goes on with the second, and all are in one layer or the next, even if each expert device
holds other layers. Between dispatch and combine it computes shared experts. Rows and sums go over
links whose directions do not hinder each other. An expert device serves calls as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

ATTENTION = "attention GPUs"
EXPERTS = "expert GPUs"
DISPATCH = "network, dispatch"
COMBINE = "network, combine"


@dataclass(frozen=True)
class Task:
    """Work of one micro-batch (`batch` is its number) on a resource; seconds from the step's
    start."""

    resource: str
    name: str
    batch: int
    start: float
    end: float


@dataclass(frozen=True)
class SplitPass:
    """Seconds of one micro-batch through all layers.

    own: of the attention device before the dispatch of each MoE layer, with the dense layers and
    the embedding before it; last: after the last combine. shared: of a layer's shared experts.
    latency, sent: of a message in one direction, and of these the link's bandwidth takes `sent`,
    for which it is occupied. experts: of a layer on an expert device. exclusive: the part of it in
    which no other micro-batch's experts can run there."""

    own: tuple[float, ...]
    last: float = 0.0
    shared: float = 0.0
    latency: float = 0.0
    sent: float = 0.0
    experts: float = 0.0
    exclusive: float = 0.0

    @property
    def layers(self) -> int:
        return len(self.own)

    @property
    def attention(self) -> float:
        """Of the attention device, without what a step has once."""
        return sum(self.own) + self.layers * self.shared + self.last

    def slowed(self, factor: float) -> SplitPass:
        """On an attention device that takes so many times as long."""
        return replace(
            self,
            own=tuple(seconds * factor for seconds in self.own),
            last=self.last * factor,
            shared=self.shared * factor,
        )


@dataclass(frozen=True)
class Schedule:
    """seconds: of the step. attention, experts, network: in which the attention device, the expert
    device with most work, and a direction of the network have work."""

    seconds: float
    attention: float
    experts: float
    network: float

    @property
    def busy(self) -> tuple[float, float, float]:
        """Those as shares of the step."""
        return (
            self.attention / self.seconds,
            self.experts / self.seconds,
            self.network / self.seconds,
        )


def schedule(
    passes: Sequence[SplitPass],
    once: float = 0.0,
    devices: Sequence[int] | None = None,
    tasks: list[Task] | None = None,
) -> Schedule:
    """Of micro-batches through the same layers. once: seconds of the attention device after the
    last of them: the head and sampling, for all rows together. devices: the expert device of each
    MoE layer, if not all devices work on all layers. tasks: gets what is executed."""
    layers = passes[0].layers
    places = devices or (0,) * layers
    attention = 0.0
    out = 0.0
    back = 0.0
    ready = [0.0] * len(passes)  # when a micro-batch's sums are back
    free = dict.fromkeys(places, 0.0)  # when the device has done what excludes others
    idle_from = dict.fromkeys(places, 0.0)
    worked = dict.fromkeys(places, 0.0)
    for layer, place in enumerate(places):
        sent_at = []
        for batch, one in enumerate(passes):
            start = max(attention, ready[batch])
            attention = start + one.own[layer]
            sent_at.append(attention)
            if tasks is not None:
                tasks.append(Task(ATTENTION, "attention", batch, start, attention))
        for batch, one in enumerate(passes):
            if one.shared:
                start = attention
                attention += one.shared
                if tasks is not None:
                    tasks.append(Task(ATTENTION, "shared experts", batch, start, attention))
        for batch, one in enumerate(passes):
            dispatched = max(out, sent_at[batch])
            out = dispatched + one.sent
            begin = max(out + one.latency, free[place])
            end = begin + one.experts
            free[place] = begin + one.exclusive
            # calls may overlap, and begin in this order
            worked[place] += max(0.0, end - max(begin, idle_from[place]))
            idle_from[place] = max(idle_from[place], end)
            returned = max(back, end)
            back = returned + one.sent
            ready[batch] = back + one.latency
            if tasks is not None:
                name = EXPERTS if devices is None else f"expert GPU {place}"
                tasks += [
                    Task(DISPATCH, "dispatch", batch, dispatched, out + one.latency),
                    Task(name, "experts", batch, begin, end),
                    Task(COMBINE, "combine", batch, returned, ready[batch]),
                ]
    for batch, one in enumerate(passes):
        start = max(attention, ready[batch])
        attention = start + one.last
        if tasks is not None and one.last:
            tasks.append(Task(ATTENTION, "attention", batch, start, attention))
    if tasks is not None and once:
        tasks.append(Task(ATTENTION, "head", 0, attention, attention + once))
    return Schedule(
        attention + once,
        sum(one.attention for one in passes) + once,
        max(worked.values(), default=0.0),
        layers * sum(one.sent for one in passes),
    )


@dataclass(frozen=True)
class SplitStep:
    """A step of one or more micro-batches. once, devices: as in `schedule`."""

    micro_batches: tuple[SplitPass, ...]
    once: float = 0.0
    devices: tuple[int, ...] | None = None

    @cached_property
    def schedule(self) -> Schedule:
        return schedule(self.micro_batches, self.once, self.devices)

    @property
    def seconds(self) -> float:
        """Between two tokens of one request."""
        return self.schedule.seconds

    @property
    def batches(self) -> int:
        return len(self.micro_batches)

    @property
    def attention(self) -> float:
        """Seconds of the attention device for one micro-batch, with its share of `once`; here and
        below the mean over micro-batches."""
        return (sum(one.attention for one in self.micro_batches) + self.once) / self.batches

    @property
    def experts(self) -> float:
        """Seconds on expert devices."""
        return sum(one.layers * one.experts for one in self.micro_batches) / self.batches

    @property
    def network(self) -> float:
        """Seconds of all messages, both directions."""
        found = sum(2 * one.layers * (one.latency + one.sent) for one in self.micro_batches)
        return found / self.batches
