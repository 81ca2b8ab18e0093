"""Scheduling for several data-parallel ranks: each has its own pages and its own requests; all step
together. One rank is a group of one. No torch.

A request stays on one rank from its first token to its last. Every rank computes in every step, if
only to join the others' collectives, so an output holds a part for each rank and the metadata that
all must agree on.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from rorqual.cache.prefix import PrefixCache
from rorqual.engine.micro_batches.policy import FixedParts, MicroBatchPolicy
from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.scheduling.scheduler_output import (
    PrefillChunk,
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
    StepResult,
    sampling_variant_of,
)
from rorqual.engine.scheduling.sequence import InFlight, PendingLoad, Sequence, TokenOut, Usage
from rorqual.errors import RequestError
from rorqual.request import FinishReason, Request, StructuredOutput


@dataclass
class DataParallelOutput:
    """One step of all data-parallel ranks. parts[rank] is empty where that rank has nothing to do.
    sampling, host: see StepMetadata; they follow from sampling settings, which a rank has only of
    its own rows. switch: see StepMetadata; set by the executor. micro_batches: parts requested."""

    parts: list[SchedulerOutput]
    sampling: SamplingVariant
    host: bool
    switch: int = 0
    micro_batches: int = 1

    def metadata(self) -> StepMetadata:
        return StepMetadata.of(
            self.parts, self.sampling, self.host, self.switch, self.micro_batches
        )

    @property
    def structures(self) -> list[StructuredOutput]:
        """Of the step's new rows, in order."""
        return [
            found
            for part in self.parts
            for row in part.new_requests
            if (found := row.params.structured)
        ]

    @property
    def num_speculative_tokens(self) -> int:
        return self.parts[0].num_speculative_tokens

    @property
    def chunks(self) -> list[PrefillChunk]:
        return [chunk for part in self.parts for chunk in part.chunks]

    @property
    def decode_slots(self) -> list[int]:
        return [slot for part in self.parts for slot in part.decode_slots]


@dataclass
class DataParallelInFlight:
    """launched: seconds on the engine's clock."""

    output: DataParallelOutput
    parts: list[InFlight | None] = field(default_factory=list)
    launched: float = 0.0


class PrefixCaches:
    """The prefix caches of all ranks, for counting and clearing."""

    def __init__(self, schedulers: list[Scheduler]):
        self.schedulers = schedulers

    @property
    def caches(self) -> list[PrefixCache]:
        return [scheduler.prefix for scheduler in self.schedulers]

    @property
    def queries(self) -> int:
        return sum(cache.queries for cache in self.caches)

    @property
    def hits(self) -> int:
        return sum(cache.hits for cache in self.caches)

    def clear(self) -> int:
        return sum(cache.clear() for cache in self.caches)


class DataParallelScheduler:
    """Schedulers of `ranks` data-parallel ranks behind the interface of one. micro_batches: decides
    how many parts a step is split into."""

    def __init__(
        self, config: SchedulerConfig, ranks: int, micro_batches: MicroBatchPolicy | None = None
    ):
        self.config = config
        self.micro_batches: MicroBatchPolicy = micro_batches or FixedParts()
        self.schedulers = [Scheduler(config) for _ in range(ranks)]
        self.assigned_rank: dict[str, Scheduler] = {}
        self.prefix = PrefixCaches(self.schedulers)
        self.num_speculative_tokens = config.num_speculative_tokens
        self.prompt_budget = config.max_num_batched_tokens
        self.drafted = [0] * config.num_speculative_tokens
        self.accepted = [0] * config.num_speculative_tokens

    # Rebuilt on each access: `restart` replaces the ranks' mappings.

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        return ChainMap(*(rank.sequences for rank in self.schedulers))

    @property
    def decoding(self) -> Mapping[str, Sequence]:
        return ChainMap(*(rank.decoding for rank in self.schedulers))

    @property
    def prefilling(self) -> Mapping[str, Sequence]:
        return ChainMap(*(rank.prefilling for rank in self.schedulers))

    @property
    def num_decoding(self) -> int:
        return sum(len(rank.decoding) for rank in self.schedulers)

    # ---- requests in and out

    def add(self, request: Request, rank: int | None = None) -> FinishReason | None:
        """Queue a request on `rank`, by default the cheapest. For the returned reason see
        Scheduler."""
        if request.id in self.assigned_rank:
            raise RequestError(f"request id {request.id!r} is already in use")
        assigned_rank = self.schedulers[self.cheapest(request) if rank is None else rank]
        over = assigned_rank.add(request)
        if over is None:
            self.assigned_rank[request.id] = assigned_rank
        return over

    def cheapest(self, request: Request, coming: tuple[int, ...] = ()) -> int:
        """The rank where a request costs least: tokens of the requests there plus its own tokens
        that are not cached there. coming: tokens by rank of requests assigned to it but not queued
        yet."""
        if len(self.schedulers) == 1:
            return 0
        tokens = request.token_array
        keys: list[bytes] = []  # the ranks' caches differ in their pages, not in their keys

        def cost(rank: int) -> int:
            scheduler = self.schedulers[rank]
            live = scheduler.live_tokens + (coming[rank] if coming else 0)
            return live - self._cached(scheduler, request, tokens, keys)

        return min(range(len(self.schedulers)), key=cost)

    def _cached(
        self, rank: Scheduler, request: Request, tokens: ReadOnly[int], keys: list[bytes]
    ) -> int:
        prefix = rank.prefix
        if not (prefix.pages or prefix.host) or request.params.prompt_logprobs is not None:
            return 0
        pages, _ = prefix.match(tokens, request.cache_salt, keys)
        prefix.release(pages)
        pages_in_host = len(prefix.in_host(tokens, len(pages), request.cache_salt, keys))
        return (len(pages) + pages_in_host) * self.config.page_size

    def abort(self, request_id: str) -> Sequence | None:
        assigned_rank = self.assigned_rank.pop(request_id, None)
        return assigned_rank.abort(request_id) if assigned_rank else None

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        assigned_rank = self.assigned_rank.pop(sequence.request.id, None)
        if assigned_rank:
            assigned_rank.finish(sequence, reason)

    @property
    def has_work(self) -> bool:
        return any(rank.sequences for rank in self.schedulers)

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self.schedulers)

    @property
    def live_tokens(self) -> int:
        return sum(rank.live_tokens for rank in self.schedulers)

    def next_load(self) -> PendingLoad:
        """See Scheduler; the maximum of each over ranks, since all wait for the slowest."""
        return PendingLoad(*map(max, zip(*(r.next_load() for r in self.schedulers), strict=True)))

    def usage(self) -> Usage:
        return reduce(add, (rank.usage() for rank in self.schedulers))

    # ---- steps

    def schedule(self) -> DataParallelInFlight | None:
        """The next step of all ranks, or None when none of them can launch anything."""
        parts = []
        for rank in self.schedulers:
            rank.num_speculative_tokens = self.num_speculative_tokens
            rank.prompt_budget = self.prompt_budget
            parts.append(rank.schedule())
        if not any(parts):
            return None
        asked = [sequence.request.params for part in parts if part for sequence in part.sampled]
        host = any(params.needs_host for params in asked)
        outputs = [
            part.output
            if part
            else SchedulerOutput(num_speculative_tokens=self.num_speculative_tokens)
            for part in parts
        ]
        return DataParallelInFlight(
            DataParallelOutput(
                outputs,
                sampling_variant_of(asked),
                host,
                micro_batches=self.micro_batches.parts(outputs),
            ),
            parts,
        )

    def update(self, step: DataParallelInFlight, results: list[StepResult]) -> list[TokenOut]:
        """Process the sampled tokens of every rank."""
        outs: list[TokenOut] = []
        for rank, part, result in zip(self.schedulers, step.parts, results, strict=True):
            if part is not None:
                outs += rank.update(part, result)
        for out in outs:
            if out.finish is not None:
                self.assigned_rank.pop(out.sequence.request.id, None)
        for name in ("drafted", "accepted"):
            mine = getattr(self, name)
            mine[:] = [
                sum(counts)
                for counts in zip(*(getattr(rank, name) for rank in self.schedulers), strict=True)
            ]
        return outs

    def undo(self, step: DataParallelInFlight) -> None:
        """See Scheduler; on every rank."""
        for rank, part in zip(self.schedulers, step.parts, strict=True):
            if part is not None:
                rank.undo(part)

    def restart(self) -> None:
        for rank in self.schedulers:
            rank.restart()
        self.assigned_rank = {name: rank for rank in self.schedulers for name in rank.sequences}
