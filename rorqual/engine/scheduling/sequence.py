"""The scheduler's data: a request in progress, a scheduled step, a new token, and load figures. No
torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from rorqual.engine.scheduling.scheduler_output import SchedulerOutput, TokenLogprobs
from rorqual.request import FinishReason, Request


class Account:
    """served: tokens computed for this name. entry: number of its heap entry, 0 while nothing
    waits."""

    __slots__ = ("entry", "name", "served")

    def __init__(self, name: str, served: int):
        self.name = name
        self.served = served
        self.entry = 0


class Sequence:
    """One request in progress.

    tokens: prompt and outputs the host knows, int64, so that slices can be copied directly;
    pending: sampled tokens in flight; num_computed_tokens: cache entries written once every
    launched step is done; max_total_len: the length at which the request ends; num_hashed_pages:
    full pages already offered to the prefix cache. With speculative steps in flight
    num_computed_tokens and pending count one token a step, the minimum; max_extra_tokens: what
    these steps may add beyond. drafted, accepted: drafts verified and accepted, by position after
    the newest token. client_account, user_account: charged for computed tokens; set by the waiting
    queue. reserved: tokens charged in advance. num_scored: prompt tokens after the first whose log
    probabilities launched steps compute; prompt_logprobs: those already collected; score_end: how
    many are wanted. host_asked: host memory was searched for its pages since it last began to wait.
    page_keys: the prefix cache's keys of its first pages, as far as they were looked up.
    """

    __slots__ = (
        "accepted",
        "capacity",
        "client_account",
        "collected",
        "drafted",
        "finish",
        "host_asked",
        "key",
        "max_extra_tokens",
        "max_total_len",
        "min_len",
        "next_hash",
        "num_cached_prompt",
        "num_computed_tokens",
        "num_hashed_pages",
        "num_scored",
        "order",
        "page_keys",
        "pages",
        "pending",
        "preemptions",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "reserved",
        "score_end",
        "seed",
        "slot",
        "stop_ids",
        "stop_token",
        "tokens",
        "user_account",
    )

    def __init__(self, request: Request, max_total_len: int, seed: int, order: int):
        self.request = request
        self.max_total_len = max_total_len
        self.seed = seed
        self.order = order
        self.key = b""
        self.client_account: Account
        self.user_account: Account
        self.tokens = request.token_array[:]
        self.prompt_len = len(request.prompt)
        self.stop_ids = request.stop_ids
        self.min_len = self.prompt_len + request.params.min_tokens
        self.slot = -1
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []
        self.capacity = self.num_computed_tokens = self.collected = self.pending = (
            self.num_hashed_pages
        ) = self.preemptions = self.max_extra_tokens = self.reserved = 0
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.next_hash = 0
        wants_scores = request.params.prompt_logprobs is not None
        self.score_end = self.prompt_len - 1 if wants_scores else 0
        self.num_scored = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish: FinishReason | None = None
        self.stop_token: int | None = None
        self.num_cached_prompt: int | None = None
        self.host_asked = False

    def restart(self) -> None:
        """Forget everything but the tokens: it holds no pages and has no steps in flight."""
        self.slot = -1
        self.pages = []
        self.capacity = self.num_computed_tokens = self.collected = self.pending = 0
        self.num_hashed_pages = self.max_extra_tokens = self.next_hash = self.reserved = 0
        self.num_scored = len(self.prompt_logprobs)
        self.key = b""
        self.page_keys = []  # tokens may have been taken back
        self.host_asked = False

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :].tolist()

    @property
    def reusable(self) -> array[int]:
        """The tokens for which a cached prefix may be used: with prompt log probabilities, the rows
        still to be scored must be computed."""
        unscored = self.num_scored < self.score_end
        return self.tokens[: self.num_scored + 1] if unscored else self.tokens

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending


class ComputedChunk(NamedTuple):
    """A prompt chunk of a step: entries cached once it is done, unless the request has given up its
    pages since. preemptions: how often it had done so before."""

    sequence: Sequence
    stop: int
    preemptions: int

    @property
    def current(self) -> bool:
        """Whether the request still has the pages that the chunk was written to."""
        sequence = self.sequence
        same = sequence.preemptions == self.preemptions
        return same and sequence.slot >= 0 and sequence.finish is None


@dataclass
class InFlight:
    """A scheduled step. sampled: the sequences whose tokens it samples, in order; before: how many
    tokens each had when the result was processed, -1 where it had ended by then; empty until then.
    scored: the sequences whose prompts it scores, one per chunk, in order; scored_before: likewise,
    their number of log probabilities."""

    output: SchedulerOutput
    sampled: list[Sequence]
    computed: list[ComputedChunk]
    before: list[int] = field(default_factory=list)
    scored: list[Sequence] = field(default_factory=list)
    scored_before: list[int] = field(default_factory=list)


class PendingLoad(NamedTuple):
    """Decoding requests; prompts that could be computed now, and their tokens."""

    decoding: int
    prompts: int
    tokens: int


@dataclass(frozen=True)
class Usage:
    """The current load: requests, cache pages, and counts since the start (queries and hits in
    tokens). host_pages: capacity of host memory; host_pages_held: pages now there; the last two
    count pages copied out and in."""

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_cached: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    host_pages: int = 0
    host_pages_held: int = 0
    host_queries: int = 0
    host_hits: int = 0
    host_pages_out: int = 0
    host_pages_in: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            *(getattr(self, item.name) + getattr(other, item.name) for item in fields(self))
        )


@dataclass
class TokenOut:
    """A new token of a request; `finish` is set on its last."""

    sequence: Sequence
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
