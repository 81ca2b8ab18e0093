"""How many drafts to verify: the number with the most accepted tokens per measured second, by batch
size. No torch.

A sparse model's step grows with every row, because more rows read more experts; so the best
num_speculative_tokens depends on the batch, on what the text is like, and on the machine. The
controller measures instead of modelling: for each batch bucket it keeps a running estimate of
tokens per second for every num_speculative_tokens, probes the others now and then, and changes only
when another is clearly better.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.05  # weight of a new step in the running estimate
MARGIN = 1.03  # another num_speculative_tokens must be 3 % faster
FIRST_STEPS = 8  # steps each num_speculative_tokens is tried for before any is preferred
PROBE_EVERY = 256  # steps between two trials of a num_speculative_tokens that is not in use
PROBE_STEPS = 16  # enough to outweigh a stale estimate
# a step that differs from the mean by more than this factor is ignored as disturbed
LONGEST = 5.0
DISTURBED = 4  # this many in a row replace the mean


@dataclass
class Estimate:
    """Running means over the steps of one (batch bucket, num_speculative_tokens)."""

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    disturbed: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        usual = not self.steps or seconds / LONGEST <= self.seconds <= seconds * LONGEST
        self.disturbed = 0 if usual else self.disturbed + 1
        if self.disturbed >= DISTURBED:
            # the first step was disturbed, or times have changed
            self.steps = self.disturbed = 0
        elif not usual:
            return
        weight = max(MEMORY, 1 / (self.steps + 1))
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self.steps += 1

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Bucket:
    """One range of batch sizes: the value in use, and the probe in progress."""

    current: int
    estimates: dict[int, Estimate]
    since_probe: int = 0
    probe: int | None = None
    probe_left: int = 0
    order: list[int] = field(default_factory=list)


def draft_count_choices(most: int, adaptive: bool) -> tuple[int, ...]:
    """The values of num_speculative_tokens to choose from."""
    return tuple(range(most + 1)) if adaptive else (most,)


class DraftController:
    """Call `next_count` before each step, `observe` after each decode-only step. With `adaptive`
    False the count is always `most`."""

    def __init__(self, most: int, adaptive: bool = False):
        self.most = most
        self.choices = draft_count_choices(most, adaptive)
        self.buckets: dict[int, Bucket] = {}
        self.before = most  # num_speculative_tokens of the step observed last

    def next_count(self, batch: int) -> int:
        if len(self.choices) == 1 or not batch:
            return self.most
        bucket = self._bucket(batch)
        return bucket.current if bucket.probe is None else bucket.probe

    def _bucket(self, batch: int) -> Bucket:
        """Buckets end at powers of two."""
        key = batch.bit_length()
        if key not in self.buckets:
            self.buckets[key] = Bucket(self.most, {n: Estimate() for n in self.choices})
        return self.buckets[key]

    def observe(self, batch: int, num_speculative_tokens: int, tokens: int, seconds: float) -> None:
        """A step that verified num_speculative_tokens drafts for each of `batch` requests gave
        `tokens` new tokens in `seconds`."""
        if len(self.choices) == 1:
            return
        bucket = self._bucket(batch)
        # The first step with more drafts only verifies those that the step before made, so it is
        # not representative.
        if num_speculative_tokens <= self.before:
            bucket.estimates[num_speculative_tokens].add(tokens, seconds)
        self.before = num_speculative_tokens
        if bucket.probe is None:
            bucket.since_probe += 1
            self._start_probe(bucket)
        elif num_speculative_tokens == bucket.probe:
            bucket.probe_left -= 1
            if bucket.probe_left <= 0:
                bucket.probe = None
                self._settle(bucket)
                self._start_probe(bucket)

    def _start_probe(self, bucket: Bucket) -> None:
        fresh = [
            n
            for n in self.choices
            if n != bucket.current and bucket.estimates[n].steps < FIRST_STEPS
        ]
        if bucket.estimates[bucket.current].steps < FIRST_STEPS:
            return
        if fresh:
            bucket.probe = fresh[0]
            bucket.probe_left = FIRST_STEPS + 1
        elif bucket.since_probe >= PROBE_EVERY:
            bucket.order = bucket.order or [n for n in self.choices if n != bucket.current]
            bucket.probe = bucket.order.pop(0)
            bucket.probe_left = PROBE_STEPS
            bucket.since_probe = 0

    def _settle(self, bucket: Bucket) -> None:
        """Change num_speculative_tokens when another is clearly faster than the one in use."""
        best = max(self.choices, key=lambda n: bucket.estimates[n].rate)
        if bucket.estimates[best].rate > MARGIN * bucket.estimates[bucket.current].rate:
            bucket.current = best
            bucket.order = []
