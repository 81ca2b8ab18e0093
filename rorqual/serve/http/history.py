"""The last minutes of the server's figures, one row a second, for a newly opened dashboard. No
torch."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from typing import NamedTuple

from rorqual.serve.engines.client import EngineClient
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.http.metrics import percentiles
from rorqual.serve.messages import RequestTimes, Snapshot

KEPT_SECONDS = 300
ROW_SECONDS = 1.0
RATE_SECONDS = 5.0  # over which tokens a second are taken
SHARE_SECONDS = 60.0  # over which shares of prefix hits and accepted drafts are taken
LATENCY_SECONDS = 60.0  # requests that ended within this form a point of the latency charts
LATENCY_EVERY = 5  # rows


class HistoryRow(NamedTuple):
    """Over all engines at `at`, seconds of the monotonic clock; None is unknown. Tokens a second,
    sequences, shares from 0 to 1, tokens."""

    at: float
    output: float | None
    prompt: float | None
    running: int | None
    waiting: int | None
    kv_used: float | None
    kv_cached: float | None
    prefix_hit: float | None
    accepted_length: float | None


class LatencyRow(NamedTuple):
    """Of requests that ended within LATENCY_SECONDS before `at`, seconds."""

    at: float
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None


class EngineCounters(NamedTuple):
    """One engine's counters at `at`."""

    at: float
    output: int
    prompt: int
    queries: int
    hits: int
    drafts: int
    accepted: int


class History:
    """Call `sample` at least once a second. `boot` identifies this run of the server."""

    def __init__(self, pool: EnginePool):
        self.pool = pool
        self.boot = secrets.token_hex(8)
        self.started = time.monotonic()
        self.rows: deque[HistoryRow] = deque(maxlen=KEPT_SECONDS)
        self.latencies: deque[LatencyRow] = deque(maxlen=KEPT_SECONDS // LATENCY_EVERY)
        self.lives: dict[EngineClient, deque[EngineCounters]] = {}
        self.turn = itertools.count()

    def sample(self) -> None:
        now = time.monotonic()
        if self.rows and now - self.rows[-1].at < 0.9 * ROW_SECONDS:
            return
        clients = [client for client in self.pool.clients if client.snapshot.at]
        self.lives = {client: self.lives.get(client, deque()) for client in clients}
        for client, past in self.lives.items():
            if not past or past[-1].at < client.snapshot.at:
                past.append(_counters(client.snapshot))
            while len(past) > 2 and past[1].at <= now - SHARE_SECONDS:
                past.popleft()
        self.rows.append(self._row(now, [client.snapshot for client in clients]))
        if next(self.turn) % LATENCY_EVERY == 0:
            self.latencies.append(_latency(now, clients))

    def _row(self, now: float, snapshots: list[Snapshot]) -> HistoryRow:
        pages = sum(s.pages_total for s in snapshots) or None
        return HistoryRow(
            now,
            self._rate(now, "output"),
            self._rate(now, "prompt"),
            sum(s.running for s in snapshots) if snapshots else None,
            sum(s.waiting for s in snapshots) if snapshots else None,
            pages and sum(s.pages_used for s in snapshots) / pages,
            pages and sum(s.pages_cached for s in snapshots) / pages,
            self._share(now, "hits", "queries"),
            _plus_one(self._share(now, "accepted", "drafts")),
        )

    def _rate(self, now: float, name: str) -> float | None:
        """Each engine by its own clock, so that a late snapshot causes no spike."""
        rates = []
        for past in self.lives.values():
            first = _since(past, now - RATE_SECONDS)
            if past[-1].at > first.at:
                rates.append(
                    (getattr(past[-1], name) - getattr(first, name)) / (past[-1].at - first.at)
                )
        return sum(rates) if rates else None

    def _share(self, now: float, part: str, whole: str) -> float | None:
        pairs = [(_since(past, now - SHARE_SECONDS), past[-1]) for past in self.lives.values()]
        total = sum(getattr(last, whole) - getattr(first, whole) for first, last in pairs)
        return (
            sum(getattr(last, part) - getattr(first, part) for first, last in pairs) / total
            if total
            else None
        )


def _counters(s: Snapshot) -> EngineCounters:
    drafts = s.drafted[0] if s.drafted else 0
    return EngineCounters(
        s.at,
        s.output_tokens,
        s.prompt_tokens,
        s.prefix_queries,
        s.prefix_hits,
        drafts,
        sum(s.accepted),
    )


def _since(past: deque[EngineCounters], start: float) -> EngineCounters:
    """The newest from before `start`, else the oldest."""
    return next((counters for counters in reversed(past) if counters.at <= start), past[0])


def _plus_one(drafts: float | None) -> float | None:
    """Adds the model's own token after the accepted drafts."""
    return None if drafts is None else 1.0 + drafts


def _latency(now: float, clients: list[EngineClient]) -> LatencyRow:
    ended: list[RequestTimes] = []
    for client in clients:
        ended += itertools.takewhile(
            lambda one: one.at >= now - LATENCY_SECONDS, reversed(client.ended)
        )
    found = percentiles(ended)
    return LatencyRow(
        now, *(found[name][rank] for name in ("ttft", "tpot") for rank in ("p50", "p95"))
    )
