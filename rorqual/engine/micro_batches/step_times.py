"""The times that `micro_batches="auto"` decides from, measured by all ranks together at start.
Plain data, with a JSON form. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

MS = 1e3


@dataclass(frozen=True)
class StageSeconds:
    """A stage of one MoE layer: its computing, then the communication before the next can start.
    Both of the slowest rank."""

    compute: float
    wire: float = 0.0


@dataclass(frozen=True)
class MeasuredSize:
    """A measured step, of `tokens` tokens and `requests` requests on every data-parallel rank.

    exchange: the one its tokens use. attention: seconds of one layer's, norms included. stages:
    dispatch, possibly the rows after the counts, experts, combine (layers/moe.py). passes: seconds
    of the whole forward pass in 1, 2, ... parts, the shortest of several. noise: of each, how much
    longer the second shortest was, relative."""

    tokens: int
    requests: int
    exchange: str
    attention: float
    stages: tuple[StageSeconds, ...]
    passes: tuple[float, ...]
    noise: tuple[float, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request."""
        each, over = divmod(self.tokens, self.requests)
        return tuple(each + (place < over) for place in range(self.requests))

    @property
    def compute(self) -> float:
        """Computing seconds of one layer, attention included."""
        return self.attention + sum(stage.compute for stage in self.stages)

    @property
    def wire(self) -> float:
        return sum(stage.wire for stage in self.stages)


@dataclass(frozen=True)
class PhaseTimes:
    """Measured sizes, ascending. reason: why steps of this phase are not split, where none was
    measured."""

    sizes: tuple[MeasuredSize, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class StepTimes:
    """decode: of steps in which all ranks only decode; prompts: of all others. layers: MoE layers
    of a pass. seconds: duration of the measurement."""

    layers: int
    decode: PhaseTimes
    prompts: PhaseTimes
    seconds: float = 0.0

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def of_json(text: str) -> StepTimes:
        data = json.loads(text)
        phases = {name: _phase(data[name]) for name in ("decode", "prompts")}
        return StepTimes(data["layers"], seconds=data["seconds"], **phases)


def _phase(data: dict[str, Any]) -> PhaseTimes:
    sizes = (
        MeasuredSize(
            **{
                **item,
                "stages": tuple(StageSeconds(**stage) for stage in item["stages"]),
                "passes": tuple(item["passes"]),
                "noise": tuple(item["noise"]),
            }
        )
        for item in data["sizes"]
    )
    return PhaseTimes(tuple(sizes), data["reason"])
