"""What the scheduler keeps and hands out: a request under way, a planned step, a new token, and
a moment's load. No torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from rorqual.engine.scheduling.scheduler_output import SchedulerOutput, TokenLogprobs
from rorqual.request import FinishReason, Request


class Account:
    """served: tokens computed in this name. entry: the number of its place in the heap, 0 while
    nothing of it waits."""

    __slots__ = ("entry", "name", "served")

    def __init__(self, name: str, served: int):
        self.name = name
        self.served = served
        self.entry = 0


class Sequence:
    """One request under way.

    tokens: prompt and outputs the host knows, of 64 bits each, so that slices of them are copied as
    they stand; pending: sampled tokens in flight;
    num_computed_tokens: cache entries written once every launched step is done; max_total_len: the
    length at which the request ends; num_hashed_pages: full pages already offered to the prefix
    cache. With speculation in flight num_computed_tokens and pending count one token a step, the
    least it brings; max_extra_tokens: what it may bring beyond. drafted, accepted: drafts verified
    and found right, by their place behind the newest token. client_account, user_account: charged
    for what is computed; made by the waiting queue. reserved: tokens charged beforehand.
    num_scored: tokens of the prompt behind its first whose log probabilities launched steps give;
    prompt_logprobs: those that are here; score_end: how many are wanted. host_asked: it has been
    looked for in host memory since it last began to wait.
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
        """It holds nothing and nothing of it is in flight: only its tokens are left."""
        self.slot = -1
        self.pages = []
        self.capacity = self.num_computed_tokens = self.collected = self.pending = 0
        self.num_hashed_pages = self.max_extra_tokens = self.next_hash = self.reserved = 0
        self.num_scored = len(self.prompt_logprobs)
        self.key = b""
        self.host_asked = False

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.prompt_len :].tolist()

    @property
    def reusable(self) -> array[int]:
        """The tokens of which a cached prefix may be taken: who wants a prompt's log probabilities
        has to compute the rows that are still to be scored."""
        unscored = self.num_scored < self.score_end
        return self.tokens[: self.num_scored + 1] if unscored else self.tokens

    @property
    def known(self) -> int:
        return len(self.tokens) + self.pending


@dataclass
class InFlight:
    """A planned step and whose tokens it samples, in order. before: how many tokens each of these
    had as its result was taken in, -1 where the request had ended by then; empty until then.
    scored: whose prompts it scores, a chunk each, in order; scored_before: as `before`, entries."""

    output: SchedulerOutput
    sampled: list[Sequence]
    computed: list[tuple[Sequence, int]]  # prompt chunks: entries cached once the step is done
    before: list[int] = field(default_factory=list)
    scored: list[Sequence] = field(default_factory=list)
    scored_before: list[int] = field(default_factory=list)


class PendingLoad(NamedTuple):
    """Requests that decode; prompts that could be computed now, and their tokens."""

    decoding: int
    prompts: int
    tokens: int


@dataclass(frozen=True)
class Usage:
    """A moment's load: requests, cache pages, and counts since the start (queries and hits in
    tokens). host_pages: that host memory can hold, host_pages_held: that it does; the last two
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
    """A new token of a request; `finish` on its last."""

    sequence: Sequence
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
