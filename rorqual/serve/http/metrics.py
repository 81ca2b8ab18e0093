"""The server's figures as one snapshot, for the dashboard and /stats."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Any

from rorqual.serve.engines.client import EngineClient
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.messages import RequestTimes, Snapshot

WINDOW = 60.0  # seconds that "recent" means
HOST_CACHE = ("pages", "held", "queries", "hits", "bytes_out", "bytes_in")
PERCENTILES = (50, 90, 95, 99)


class Rates:
    """Tokens a second over the last seconds, from samples of the counters."""

    def __init__(self, pool: EnginePool):
        self.pool = pool
        self.samples: deque[tuple[float, int, int]] = deque(maxlen=600)

    def sample(self) -> None:
        snapshots = [client.snapshot for client in self.pool.clients]
        self.samples.append(
            (
                time.monotonic(),
                sum(s.prompt_tokens for s in snapshots),
                sum(s.output_tokens for s in snapshots),
            )
        )

    def over(self, seconds: float) -> dict[str, float]:
        if len(self.samples) < 2:
            return {"prompt": 0.0, "output": 0.0}
        last = self.samples[-1]
        first = next(sample for sample in self.samples if sample[0] >= last[0] - seconds)
        span = last[0] - first[0]
        if span <= 0:
            return {"prompt": 0.0, "output": 0.0}
        return {
            "prompt": max(0, last[1] - first[1]) / span,
            "output": max(0, last[2] - first[2]) / span,
        }


def snapshot(pool: EnginePool, rates: Rates, counts: Counter[str]) -> dict[str, Any]:
    """The current state: counters since the engines started, gauges, percentiles over the last
    WINDOW seconds."""
    now = time.monotonic()
    return {
        "time": time.time(),
        "healthy": pool.healthy,
        "restarts": pool.restarts,
        "tokens_per_second": rates.over(5.0),
        "window_seconds": WINDOW,
        "recent": percentiles(
            [one for client in pool.clients for one in client.ended if one.at >= now - WINDOW]
        ),
        "http_events": dict(counts),
        "engines": [_engine(client) for client in pool.clients],
    }


def _engine(client: EngineClient) -> dict[str, Any]:
    found: Snapshot = client.snapshot
    kv = {"pages": found.pages_total, "used": found.pages_used, "cached": found.pages_cached}
    return {
        "engine": client.index,
        "age_seconds": round(time.monotonic() - found.at, 3) if found.at else None,
        "open": len(client.live),
        "running": found.running,
        "waiting": found.waiting,
        "steps": found.steps,
        "prompt_tokens": found.prompt_tokens,
        "output_tokens": found.output_tokens,
        "kv": kv,
        "prefix": {"queries": found.prefix_queries, "hits": found.prefix_hits},
        "host_cache": dict(zip(HOST_CACHE, found.host_cache, strict=False)),
        "preemptions": found.preemptions,
        "finished": found.finished,
        "speculation": {"drafted": found.drafted, "accepted": found.accepted},
        "expert_load": found.expert_load,
        "expert_balancedness": found.expert_balancedness,
        "expert_moves": found.expert_moves,
    }


def percentiles(ended: list[RequestTimes]) -> dict[str, Any]:
    """Of the recently ended requests, seconds: {"count", "ttft": {"p50": ...}, ...}."""
    series = {
        "ttft": [one.ttft for one in ended],
        "tpot": [one.tpot for one in ended if one.tpot is not None],
        "e2e": [one.e2e for one in ended],
        "queue": [one.queue for one in ended],
    }
    return {
        "count": len(ended),
        **{name: _ranks(sorted(values)) for name, values in series.items()},
    }


def _ranks(values: list[float]) -> dict[str, float | None]:
    last = len(values) - 1
    return {f"p{p}": values[round(p / 100 * last)] if values else None for p in PERCENTILES}
