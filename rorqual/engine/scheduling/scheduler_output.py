"""What one step computes, from scheduler to runner: compact plain data, the same for every rank. No
torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise

from rorqual.cache.host_tier import PageCopy
from rorqual.request import SamplingParams

PIECE = 64  # least tokens of a prompt's chunk in a micro-batch, if the chunk is cut
UNEVEN = 0.1  # of a micro-batch: a cut between requests may be off by so much


@dataclass(frozen=True)
class NewRequest:
    """A device row to set up: sampling settings and the pages known so far. `tokens` only for
    requests that need them on the device: penalties, grammars, the ngram drafter. length: cached
    entries, where the row decodes at once from `last_token`, without a prompt chunk before; else
    0."""

    slot: int
    params: SamplingParams
    seed: int
    pages: tuple[int, ...]
    prompt_len: int
    tokens: ReadOnly[int]
    stop_ids: frozenset[int]
    last_token: int = 0
    length: int = 0


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens of one request at positions start, start + 1, ...; `sample`: whether the next
    token is sampled; if not, `following` holds the prompt's tokens after the chunk, as many as
    prediction modules look ahead (at least 1), fewer at the prompt's end. score_start, score_stop:
    the positions at which the log probability of the prompt's next token is wanted; none if
    equal."""

    slot: int
    start: int
    tokens: ReadOnly[int]
    sample: bool
    following: tuple[int, ...] = ()
    score_start: int = 0
    score_stop: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def num_scored(self) -> int:
        return self.score_stop - self.score_start


@dataclass
class SchedulerOutput:
    """One step. Decode rows come first, num_speculative_tokens + 1 tokens each: the newest one and
    num_speculative_tokens drafts to verify. Their token ids and positions are on the device. As
    many drafts are made for the next step.

    `decode_slots` in packing order with `decode_bounds`, the most cached entries each can have
    after the step; `new_requests` and `pages` (slot, index in block table, page) are applied to the
    device rows before the step. `copies` between device and host memory are done in their order,
    before the step if `copies_first`, else concurrently with it and later ones; a step may consist
    of copies alone. `copies_by_layer`: the step reads pages that it copies in, and each layer waits
    for its own. `copies_running`, for copies in and out: the step waits for those of earlier
    steps, except of the last so many steps that had any; None: for none. What is launched later
    waits for its own if `copies_settled`.
    """

    decode_slots: list[int] = field(default_factory=list)
    decode_bounds: list[int] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    num_speculative_tokens: int = 0
    copies: list[PageCopy] = field(default_factory=list)
    copies_first: bool = False
    copies_running: tuple[int | None, int | None] = (None, None)
    copies_settled: bool = False
    copies_by_layer: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.decode_slots) * (self.num_speculative_tokens + 1) + sum(
            len(chunk.tokens) for chunk in self.chunks
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request, in packing order."""
        decoding = (self.num_speculative_tokens + 1,) * len(self.decode_slots)
        return (*decoding, *(len(chunk.tokens) for chunk in self.chunks))

    @property
    def sampled_slots(self) -> list[int]:
        return self.decode_slots + [chunk.slot for chunk in self.chunks if chunk.sample]

    @property
    def num_sampled(self) -> int:
        return len(self.decode_slots) + sum(chunk.sample for chunk in self.chunks)

    @property
    def num_scored(self) -> int:
        return sum(chunk.num_scored for chunk in self.chunks)

    def logit_row(self, sampled: int) -> int:
        """The first logits row of request number `sampled` in `sampled_slots`; for num_sampled, the
        number of rows."""
        decoding = min(sampled, len(self.decode_slots))
        return decoding * self.num_speculative_tokens + sampled


def split_lengths(lengths: ReadOnly[int], parts: int) -> tuple[int, ...]:
    """Split consecutive requests into `parts` runs, as even as possible; returns the tokens of each
    run. A run ends with a request unless that would be uneven by more than UNEVEN of a run; then it
    ends inside a prompt's chunk, whose pieces have at least PIECE tokens. Requests that decode have
    fewer and stay whole. Fewer runs where there are too few requests."""
    total = sum(lengths)
    ends = list(accumulate(lengths))
    cuts = [0]
    for part in range(1, parts):
        found = _cut_near(lengths, ends, total * part / parts, total / parts)
        if cuts[-1] < found < total:
            cuts.append(found)
    return tuple(stop - start for start, stop in pairwise((*cuts, total)))


def _cut_near(lengths: ReadOnly[int], ends: list[int], wanted: float, each: float) -> int:
    """Where to cut near `wanted`; 0 if nowhere. each: tokens of a run."""
    after = bisect_left(ends, wanted)
    near = [ends[i] for i in (after - 1, after) if 0 <= i < len(ends)]
    found = min(near, key=lambda end: abs(end - wanted), default=0)
    if not near or abs(found - wanted) <= UNEVEN * each or lengths[after] < 2 * PIECE:
        return found
    start = ends[after] - lengths[after]
    pieces = min(max(round((wanted - start) / PIECE), 1), lengths[after] // PIECE - 1)
    inside = start + pieces * PIECE
    return inside if abs(inside - wanted) < abs(found - wanted) else found


def split_lengths_of_ranks(
    ranks: ReadOnly[ReadOnly[int]], parts: int
) -> tuple[tuple[int, ...], ...]:
    """For each part, the tokens of each rank, from the lengths of each rank's requests; empty where
    some rank has too few to cut, since all ranks need the same number of parts."""
    if parts < 2:
        return ()
    found = [split_lengths(lengths, parts) for lengths in ranks]
    return tuple(zip(*found, strict=True)) if all(len(one) == parts for one in found) else ()


class SamplingVariant(Enum):
    """What sampling a batch needs, decided on the host. The first three are fixed sequences of
    device operations that a graph can capture; of the last a graph holds only the forward pass."""

    GREEDY = "greedy"
    PLAIN = "plain"  # temperature and seed
    FILTERED = "filtered"  # top-k, top-p or min-p as well
    FULL = "full"  # processed logits, grammars or log probabilities: needs the host


def sampling_variant_of(params: ReadOnly[SamplingParams]) -> SamplingVariant:
    """The widest variant that any row needs, leaving FULL aside."""
    if all(p.greedy for p in params):
        return SamplingVariant.GREEDY
    return SamplingVariant.FILTERED if any(p.filters for p in params) else SamplingVariant.PLAIN


@dataclass(frozen=True)
class StepMetadata:
    """What all ranks know of one step, identical on each.

    The rule: before a collective, runner and drafter branch only on what is in here. Which
    collectives run, their sizes, and which captured step is replayed follow from this and the
    configuration alone. A rank's own output decides which rows it computes, and otherwise only what
    involves ranks with the same output: its attention group and its pipeline stages. A rank that
    branched on its own output could wait in a collective that the others never enter.

    Of each data-parallel rank: tokens, logits rows, requests that sample (`sampled`), and rows that
    score a prompt token (`scored`); each may be 0. decodes: no rank has a prompt chunk.
    num_speculative_tokens: drafts verified, and made, for each request. sampling: the variant wide
    enough for every row of every rank: never FULL. host: some row of some rank needs the host, so
    every rank replays only the captured forward pass, then samples and drafts outside it. switch:
    the number of the expert move that all ranks apply before this step, 0 for none
    (engine/balance). micro_batches: for each part of the step, the tokens of each data-parallel
    rank; empty where it is not split.
    """

    tokens: tuple[int, ...]
    logit_rows: tuple[int, ...]
    sampled: tuple[int, ...]
    decodes: bool
    num_speculative_tokens: int
    sampling: SamplingVariant
    host: bool
    scored: tuple[int, ...]
    switch: int = 0
    micro_batches: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(
        parts: ReadOnly[SchedulerOutput],
        sampling: SamplingVariant,
        host: bool,
        switch: int = 0,
        micro_batches: int = 1,
    ) -> StepMetadata:
        """`parts`: the output for each data-parallel rank; sampling, host: over the rows of all.
        micro_batches: parts requested."""
        num_speculative_tokens = parts[0].num_speculative_tokens
        assert all(part.num_speculative_tokens == num_speculative_tokens for part in parts), (
            "one num_speculative_tokens for all ranks"
        )
        assert sampling is not SamplingVariant.FULL
        return StepMetadata(
            tokens=tuple(part.num_tokens for part in parts),
            logit_rows=tuple(part.logit_row(part.num_sampled) for part in parts),
            sampled=tuple(part.num_sampled for part in parts),
            decodes=not any(part.chunks for part in parts),
            num_speculative_tokens=num_speculative_tokens,
            sampling=sampling,
            host=host,
            scored=tuple(part.num_scored for part in parts),
            switch=switch,
            micro_batches=split_lengths_of_ranks([part.lengths for part in parts], micro_batches),
        )

    @staticmethod
    def padded(
        size: int,
        ranks: int,
        variant: SamplingVariant,
        num_speculative_tokens: int,
        micro_batches: int = 1,
    ) -> StepMetadata:
        """Of a captured step: `size` requests decode on every rank."""
        width = num_speculative_tokens + 1
        rows = (size * width,) * ranks
        host = variant is SamplingVariant.FULL
        sampling = SamplingVariant.GREEDY if host else variant
        scored = (0,) * ranks
        return StepMetadata(
            rows,
            rows,
            (size,) * ranks,
            True,
            num_speculative_tokens,
            sampling,
            host,
            scored,
            micro_batches=split_lengths_of_ranks([(width,) * size] * ranks, micro_batches),
        )

    @property
    def row_micro_batches(self) -> tuple[tuple[int, ...], ...]:
        """`micro_batches` for one row of each request that samples."""
        return split_lengths_of_ranks(
            [(1,) * count for count in self.sampled], len(self.micro_batches)
        )

    @property
    def scores(self) -> bool:
        """Whether some rank wants log probabilities of a prompt."""
        return any(self.scored)

    @property
    def variant(self) -> SamplingVariant:
        """Which captured variant this step replays, where all ranks only decode."""
        return SamplingVariant.FULL if self.host else self.sampling


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities of one token, sampled or of a prompt, and of the most likely ones, and the
    token's rank (from 1)."""

    sampled: float
    rank: int
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


@dataclass
class StepResult:
    """New tokens of each of `SchedulerOutput.sampled_slots`: accepted drafts, then the model's own
    token. `drafted` counts the drafts verified; `logprobs` has one entry a token for the rows that
    asked. `prompt_logprobs`: of each scored chunk, in order, one entry a token."""

    tokens: list[list[int]]
    drafted: list[int] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
