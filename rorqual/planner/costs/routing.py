"""Routing statistics: the number of distinct experts of a batch, and the load imbalance of ranks.
No torch.

A routing is, for each expert, the probability that a token chooses it; the top_k probabilities sum
to top_k. Tokens choose independently, so n tokens need sum(1 - (1 - p)^n) distinct experts in
expectation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rorqual.errors import ConfigError


@dataclass(frozen=True)
class Routing:
    """kind: uniform; zipf (weights 1/rank^exponent); recorded (weights are counts, one per expert).
    balance: placement of experts on ranks: `none` (in order), `placed` (largest first on the
    lightest rank, as by a load balancer) or `perfect` (forced equal load)."""

    kind: str = "uniform"
    exponent: float = 0.0
    counts: tuple[float, ...] = ()
    balance: str = "none"
    fullest: float = 0.0

    def __post_init__(self) -> None:
        if self.fullest and self.fullest < 1:
            raise ConfigError(f"the fullest rank's share {self.fullest} must be at least 1")
        if self.kind not in ("uniform", "zipf", "recorded"):
            raise ConfigError(
                f"routing kind={self.kind!r} is not known; accepted: uniform, zipf, recorded"
            )
        if self.balance not in ("none", "placed", "perfect"):
            raise ConfigError(
                f"balance={self.balance!r} is not known; accepted: none, placed, perfect"
            )
        if self.exponent < 0:
            raise ConfigError(f"zipf exponent={self.exponent} must be at least 0")
        if self.kind == "recorded" and (not self.counts or min(self.counts) < 0):
            raise ConfigError("a recorded routing needs one count of at least 0 for each expert")

    def weights(self, experts: int) -> tuple[float, ...]:
        if self.kind == "recorded":
            if len(self.counts) != experts:
                raise ConfigError(
                    f"the recorded routing has {len(self.counts)} counts; the model has "
                    f"{experts} experts"
                )
            return self.counts
        return tuple((rank + 1) ** -self.exponent for rank in range(experts))

    @staticmethod
    def parse(text: str) -> Routing:
        """uniform | zipf:EXPONENT | recorded:FILE, each with an optional /BALANCE at its end."""
        name, _, balance = (
            text.rpartition("/")
            if text.endswith(("/none", "/placed", "/perfect"))
            else (text, "", "")
        )
        kind, _, value = name.partition(":")
        if kind == "recorded":
            return Routing(kind, counts=_read_counts(value), balance=balance or "none")
        try:
            return Routing(kind, float(value or 0), balance=balance or "none")
        except ValueError:
            raise ConfigError(
                f"routing {text!r}: {value!r} is no number; accepted: uniform, "
                "zipf:EXPONENT, recorded:FILE"
            ) from None


def _read_counts(path: str) -> tuple[float, ...]:
    """A JSON list of counts by expert, or of such lists by layer, which are added."""
    try:
        found = json.loads(Path(path).read_text())
        rows = found if found and isinstance(found[0], list) else [found]
        return tuple(float(sum(column)) for column in zip(*rows, strict=True))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"routing recorded:{path}: {error}; wanted a JSON list of counts, or one a layer"
        ) from None


UNIFORM = Routing()


@lru_cache(maxsize=64)
def probabilities(routing: Routing, experts: int, top_k: int) -> tuple[float, ...]:
    """p of each expert: 1 - exp(-s w) with s such that they sum to top_k (sampling without
    replacement, Poisson form)."""
    weights = routing.weights(experts)
    if len(set(weights)) == 1:
        return (top_k / experts,) * experts
    if sum(weight > 0 for weight in weights) < top_k:
        raise ConfigError(
            f"the routing uses {sum(weight > 0 for weight in weights)} experts; a token "
            f"chooses {top_k}"
        )
    low = 0.0
    high = 1.0
    while sum(-math.expm1(-high * weight) for weight in weights) < top_k - 1e-9 and high < 1e12:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        reached = sum(-math.expm1(-middle * weight) for weight in weights)
        low, high = (middle, high) if reached < top_k else (low, middle)
    return tuple(-math.expm1(-high * weight) for weight in weights)


def distinct_experts(routing: Routing, experts: int, top_k: int, tokens: float) -> float:
    """Distinct experts that `tokens` tokens need, in expectation."""
    chances = probabilities(routing, experts, top_k)
    if len(set(chances)) == 1:
        return (
            experts * -math.expm1(tokens * math.log1p(-chances[0]))
            if chances[0] < 1
            else float(experts)
        )
    return sum(1 - (1 - chance) ** tokens for chance in chances)


def expert_shares(routing: Routing, experts: int, top_k: int, ranks: int) -> list[list[float]]:
    """Probabilities of the experts each rank holds."""
    chances = list(probabilities(routing, experts, top_k))
    each = experts // ranks
    if routing.balance == "none":
        return [chances[rank * each : (rank + 1) * each] for rank in range(ranks)]
    held: list[list[float]] = [[] for _ in range(ranks)]
    for chance in sorted(chances, reverse=True):
        room = [rank for rank in range(ranks) if len(held[rank]) < each]
        held[min(room, key=lambda rank: sum(held[rank]))].append(chance)
    return held


@dataclass(frozen=True)
class RankLoad:
    """Expected load of the fullest rank: number of (token, expert) `pairs` and of `distinct`
    experts in use."""

    pairs: float
    distinct: float


@lru_cache(maxsize=4096)
def rank_load(routing: Routing, experts: int, top_k: int, tokens: int, ranks: int) -> RankLoad:
    """The fullest of `ranks` ranks when `tokens` tokens choose. Loads are taken as independent
    normals of the right mean and spread."""
    mean = tokens * top_k / ranks
    if ranks == 1 or routing.balance == "perfect":
        return RankLoad(
            mean, min(distinct_experts(routing, experts, top_k, tokens) / ranks, experts / ranks)
        )
    if routing.fullest:
        return _measured(routing.fullest, experts, top_k, tokens, ranks)
    shares = expert_shares(routing, experts, top_k, ranks)
    means = [tokens * sum(share) for share in shares]
    spreads = [math.sqrt(tokens * sum(p * (1 - p) for p in share)) for share in shares]
    distinct = max(sum(1 - (1 - p) ** tokens for p in share) for share in shares)
    return RankLoad(max(mean, expected_maximum(means, spreads)), distinct)


def _measured(fullest: float, experts: int, top_k: int, tokens: int, ranks: int) -> RankLoad:
    """One rank has so many times the mean, the others share the rest."""
    mean = tokens * top_k / ranks
    most = min(fullest, ranks)
    rest = mean * (ranks - most) / (ranks - 1)
    means = [mean * most] + [rest] * (ranks - 1)
    chance = min(1.0, most * top_k / experts)
    distinct = experts / ranks * (1 - (1 - chance) ** tokens)
    return RankLoad(expected_maximum(means, [math.sqrt(one) for one in means]), distinct)


def expected_maximum(means: Sequence[float], spreads: Sequence[float], steps: int = 160) -> float:
    """E[max] of independent normals, by integrating 1 - product of their distribution functions."""
    if max(spreads) == 0:
        return max(means)
    low = max(mean - 6 * spread for mean, spread in zip(means, spreads, strict=True))
    high = max(mean + 6 * spread for mean, spread in zip(means, spreads, strict=True))
    width = (high - low) / steps
    total = low
    groups: dict[tuple[float, float], int] = {}
    for pair in zip(means, spreads, strict=True):
        groups[pair] = groups.get(pair, 0) + 1
    for step in range(steps):
        at = low + (step + 0.5) * width
        below = 1.0
        for (mean, spread), count in groups.items():
            below *= (
                0.5 * math.erfc((mean - at) / (spread * math.sqrt(2)))
                if spread
                else float(at >= mean)
            ) ** count
        total += (1 - below) * width
    return total
