"""Incidents in a simulated deployment: replicas that die and restart, and an autoscaling rule. No
torch."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field

from rorqual.errors import ConfigError
from rorqual.planner.simulator.settings import SimulationSettings

FAILURE = re.compile(r"(?:(\w+):)?(\d+)@([0-9.]+)(?:-([0-9.]+))?")
SCALING = re.compile(r"(?:(\w+)=)?(\d+):(\d+)")


@dataclass(frozen=True)
class ReplicaFailure:
    """Seconds since the start: replica number `replica` of a pool is gone from `down` on, with all
    it holds, and back with an empty cache at `up`; never, where that is None."""

    pool: str
    replica: int
    down: float
    up: float | None = None

    @staticmethod
    def parse(text: str, pool: str) -> ReplicaFailure:
        """[POOL:]REPLICA@DOWN[-UP]; `pool` where none is named."""
        found = FAILURE.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            named, number, down, up = found.groups()
            failure = ReplicaFailure(
                named or pool, int(number), float(down), float(up) if up else None
            )
        except ValueError:
            raise ConfigError(
                f"fail={text!r} is not understood; accepted: [POOL:]REPLICA@DOWN[-UP] in "
                "seconds, such as 3@60-120 or prefill:0@30"
            ) from None
        if failure.up is not None and failure.up <= failure.down:
            raise ConfigError(f"fail={text!r}: a replica is back after it is gone")
        return failure


@dataclass(frozen=True)
class Autoscaling:
    """The rule of Kubernetes' horizontal pod autoscaler
    (kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale): every `interval` seconds
    ceil(requests in the pool / `target`) replicas are wanted, `least` to `most`; nothing changes
    while the ratio to those there are is within `tolerance` of 1, and fewer are taken only if
    fewer were wanted for `down_after` seconds. A new one serves after `start_seconds`; one that is
    given up gets no new requests, and leaves when it has none. Its GPUs count from the order to
    the leaving."""

    pool: str
    least: int
    most: int
    target: float
    interval: float = SimulationSettings.scale_interval
    down_after: float = SimulationSettings.scale_down_after
    start_seconds: float = SimulationSettings.start_seconds
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"autoscale {self.pool}={self.least}:{self.most}: at least 1 replica, least up to "
                "most"
            )
        for name in ("target", "interval"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"autoscaling's {name}={getattr(self, name)} must be above 0")
        for name in ("down_after", "start_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"autoscaling's {name}={getattr(self, name)} must be at least 0")

    @staticmethod
    def sizes(text: str, pool: str) -> tuple[str, int, int]:
        """[POOL=]LEAST:MOST"""
        found = SCALING.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"autoscale={text!r} is not understood; accepted: [POOL=]LEAST:MOST, such as 2:8"
            )
        return found[1] or pool, int(found[2]), int(found[3])


@dataclass
class Autoscaler:
    """The rule's state in a run. wanted: (when, how many replicas were wanted), newest last."""

    rule: Autoscaling
    wanted: deque[tuple[float, int]] = field(default_factory=deque)

    def replicas(self, now: float, requests: int, present: int) -> int:
        """How many there should be from now on; `present` serve or start."""
        rule = self.rule
        wanted = max(rule.least, min(rule.most, math.ceil(requests / rule.target)))
        within = abs(requests / rule.target / max(present, 1) - 1) <= rule.tolerance
        if within and rule.least <= present <= rule.most:
            wanted = present
        self.wanted.append((now, wanted))
        while self.wanted[0][0] < now - rule.down_after:
            self.wanted.popleft()
        return wanted if wanted >= present else min(present, max(n for _, n in self.wanted))


@dataclass(frozen=True)
class Incident:
    """Something that happened at `at` seconds, in words."""

    at: float
    text: str
