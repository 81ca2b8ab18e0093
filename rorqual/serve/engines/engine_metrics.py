"""Metrics of an engine process: one record per live request, one addition per token. Latencies are
taken when a step's tokens are sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass

from rorqual.engine.engine import Engine
from rorqual.engine.scheduling.sequence import Sequence, Usage
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.serve.engines.histogram import BOUNDS, Histogram
from rorqual.serve.messages import RequestTimes, Snapshot

# most requests recorded between two snapshots; others are left out of the percentiles
MAX_ENDED = 4096


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended, and its times: of its arrival, its admission, its first and its last
    token. tokens: those of its answer."""

    reason: str
    prompt: int
    tokens: int
    arrival: float
    started: float
    first: float
    last: float


class EngineMetrics:
    def __init__(self, engine: Engine):
        self.engine = engine
        self.histograms = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        self.finished: Counter[str] = Counter()
        self.ended: list[RequestTimes] = []
        self.tokens = 0
        self.prompts = 0
        self.cached_prompts = 0
        self.expert_links: object = None  # of the servers, when `experts_missing` was found
        self.experts_missing = ""

    def first_token(self, sequence: Sequence, now: float) -> None:
        self.prompts += sequence.prompt_len
        self.cached_prompts += sequence.num_cached_prompt or 0
        self._observe("time_to_first_token_seconds", now - sequence.request.arrival)

    def count_gap(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens came `seconds` after the ones before: counted as that many equal gaps."""
        self.histograms["inter_token_latency_seconds"].add(seconds / tokens, tokens)

    def end(self, end: RequestEnd) -> None:
        """A request has finished."""
        decode = end.last - end.first
        tpot = decode / (end.tokens - 1) if end.tokens > 1 else None
        times = RequestTimes(
            end.last,
            end.first - end.arrival,
            tpot,
            end.last - end.arrival,
            end.started - end.arrival,
        )
        self.finished[end.reason] += 1
        self._observe("e2e_request_latency_seconds", times.e2e)
        self._observe("request_queue_time_seconds", times.queue)
        self._observe("request_prefill_time_seconds", end.first - end.started)
        self._observe("request_decode_time_seconds", decode)
        self._observe("request_inference_time_seconds", end.last - end.started)
        self._observe("request_prompt_tokens", end.prompt)
        self._observe("request_generation_tokens", end.tokens)
        if tpot is not None:
            self._observe("request_time_per_output_token_seconds", tpot)
        if len(self.ended) < MAX_ENDED:
            self.ended.append(times)

    def _host_cache(self, usage: Usage) -> list[int]:
        if not usage.host_pages:
            return []
        size = self.engine.worker.spec.bytes_per_page
        copied = (usage.host_pages_out * size, usage.host_pages_in * size)
        held = (usage.host_pages, usage.host_pages_held)
        return [*held, usage.host_queries, usage.host_hits, *copied]

    def _experts_missing(self, servers: ExpertServers) -> str:
        """Looked for only after a link has come, gone or changed: of many experts it takes
        milliseconds."""
        links = servers.links
        if links is not self.expert_links:
            self.experts_missing = servers.without_holder()
            self.expert_links = links
        return self.experts_missing

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].add(value)

    def snapshot(
        self, now: float, transfers: list[int], traffic: dict[str, list[float]]
    ) -> Snapshot:
        usage = self.engine.scheduler.usage()
        stats = self.engine.stats
        ended = self.ended
        self.ended = []
        load = self.engine.expert_load()
        moved = self.engine.balance
        servers = self.engine.worker.experts
        return Snapshot(
            at=now,
            running=usage.running,
            waiting=usage.waiting,
            steps=stats.steps,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=self.tokens,
            pages_total=usage.pages,
            pages_used=usage.pages_used,
            pages_cached=usage.pages_cached,
            prefix_queries=usage.prefix_queries,
            prefix_hits=usage.prefix_hits,
            preemptions=usage.preemptions,
            drafted=list(stats.drafted),
            accepted=list(stats.accepted),
            finished=dict(self.finished),
            histograms={name: histogram.state() for name, histogram in self.histograms.items()},
            ended=ended,
            expert_load=load,
            prompts=self.prompts,
            cached_prompts=self.cached_prompts,
            expert_balancedness=self.engine.expert_balancedness() if load else [],
            expert_moves=[moved.rebalances, moved.moves, moved.slots, moved.failed]
            if moved
            else [],
            transfers=transfers,
            traffic=traffic,
            host_cache=self._host_cache(usage),
            expert_servers=[astuple(found) for found in servers.stats()] if servers else [],
            experts_missing=self._experts_missing(servers) if servers else "",
            late_kernels=stats.late_kernels.count,
            late_kernel_seconds=stats.late_kernels.seconds,
        )
