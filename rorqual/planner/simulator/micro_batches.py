"""Overlap of micro-batches: one step's layers on concurrent resources, so that one micro-batch
computes while another is sent. No torch.

A micro-batch is a chain of stages, each on one resource (compute or network); a resource serves one
stage at a time, in the order they become ready. The engine interleaves its micro-batches at the
same hand-overs. Attention and experts on devices of their own: planner/timing/split_schedule.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.planner.costs.shards import stage_layers
from rorqual.planner.timing.roofline import StepTime
from rorqual.planner.timing.split_schedule import Task

ONCE = ("embedding", "lm_head", "engine")  # parts that a step has once, not layer by layer
ONCE_SENT = ("embedding", "hidden states", "logits", "stage")
BEFORE = ("dispatch", "experts gather")
AFTER = ("combine", "experts output", "feed-forward output")


@dataclass(frozen=True)
class Stage:
    """Seconds on one resource."""

    resource: str
    name: str
    seconds: float


def play(chains: Sequence[Sequence[Stage]]) -> list[Task]:
    """First ready, first served; of two that are ready together the earlier micro-batch."""
    free: dict[str, float] = {}
    ready = [(0.0, batch, 0) for batch, chain in enumerate(chains) if chain]
    tasks: list[Task] = []
    while ready:
        at, batch, index = heapq.heappop(ready)
        stage = chains[batch][index]
        start = max(at, free.get(stage.resource, 0.0))
        end = free[stage.resource] = start + stage.seconds
        tasks.append(Task(stage.resource, stage.name, batch, start, end))
        if index + 1 < len(chains[batch]):
            heapq.heappush(ready, (end, batch, index + 1))
    return tasks


def makespan(chains: Sequence[Sequence[Stage]]) -> float:
    return max((task.end for task in play(chains)), default=0.0)


def _chain(stages: Iterable[Stage]) -> list[Stage]:
    return [stage for stage in stages if stage.seconds > 0]


def layer_chain(config: ModelConfig, sizes: ParallelConfig, time: StepTime) -> list[Stage]:
    """A step's operations in the order of its layers, on the compute and the network of the
    devices that run all of it. What costs of operations say by name and part is spread evenly over
    the layers that have it."""
    sums = dict.fromkeys(
        ("once", "own", "experts", "messages", "before", "after", "once sent"), 0.0
    )
    for item in time.items:
        if item.limiter == "network":
            kind = (
                "before" if item.name in BEFORE else "after" if item.name in AFTER else "messages"
            )
            sums["once sent" if item.name in ONCE_SENT else kind] += item.seconds
        else:
            sums[
                "once"
                if item.part in ONCE
                else "experts"
                if item.part == "routed_experts"
                else "own"
            ] += item.seconds
    dense, moe = stage_layers(config, sizes)
    layers = max(1, dense + moe)
    stages = [
        Stage("compute", "embedding and head", sums["once"]),
        Stage("network", "embedding and head", sums["once sent"]),
    ]
    for layer in range(layers):
        stages.append(Stage("compute", "attention", sums["own"] / layers))
        stages.append(Stage("network", "attention output", sums["messages"] / layers))
        if layer >= dense and moe:
            stages.append(Stage("network", "dispatch", sums["before"] / moe))
            stages.append(Stage("compute", "experts", sums["experts"] / moe))
            stages.append(Stage("network", "combine", sums["after"] / moe))
    return _chain(stages)
