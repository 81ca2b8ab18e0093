"""How many prompt tokens a step takes beside decoding requests. No torch.

Prompt tokens lengthen the step for every decoding request; small chunks delay the prompt's first
token. Step costs are measured, not modelled: by number of decoding requests, plus what prompts add,
by their number of tokens.

With a target, a step takes as many prompt tokens as keep it within the target. Without one, a step
stays within GAP times a decode-only step, unless the waiting prompts would then take much longer
than they would alone: DELAY times as long where they fit into a quarter of a full step, a little
longer where they fill several. Where more prompts wait than requests decode there is no limit. So a
single prompt does not disturb decoding, and a burst is worked off.
"""

from __future__ import annotations

from rorqual.engine.scheduling.sequence import PendingLoad
from rorqual.errors import ConfigError

OFF = "off"
AUTO = "auto"
MAX_STEP_MS = 60_000.0  # milliseconds

GAP = 3.0
DELAY = 2.0
LEAST = 16  # tokens: prompts progress at least this fast
BLOCK = 64  # tokens
UNKNOWN = 256  # tokens, before any measurement
WEIGHT = 0.2  # of a new step in a running mean
DISTURBED = 3.0  # times the mean: a step that took longer counts as that


class MeanSeconds:
    """Running mean over similar steps. It follows the newest ones; one disturbed step changes it
    little."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        if self.steps:
            seconds = min(seconds, DISTURBED * self.seconds)
        self.steps += 1
        self.seconds += max(WEIGHT, 1 / self.steps) * (seconds - self.seconds)


class ChunkController:
    """Call `budget` before each step, `observe` after it. most: tokens of a step; target: seconds
    of a step with decoding requests, None for GAP times a decode-only step."""

    def __init__(self, most: int, target: float | None = None):
        self.most = most
        self.target = target
        self.decode: dict[int, MeanSeconds] = {}  # by bucket of decoding requests
        self.prompt_only: dict[int, MeanSeconds] = {}  # seconds a token, by bucket of prompt tokens
        self.added: dict[int, MeanSeconds] = {}  # likewise, beside decoding requests
        self.sizes = _sizes(most)

    def observe(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        if not prompt_tokens:
            self.decode.setdefault(_bucket(decoding), MeanSeconds()).add(seconds)
            return
        if not decoding:
            costs = self.prompt_only
        else:
            costs = self.added
            seconds = max(0.0, seconds - self._decode_seconds(decoding))
        costs.setdefault(_bucket(prompt_tokens), MeanSeconds()).add(seconds / prompt_tokens)

    def budget(self, load: PendingLoad) -> int:
        """Most prompt tokens of the next step."""
        decoding = load.decoding
        waiting = load.tokens
        if not decoding or not waiting:
            return self.most
        if self.target is None and load.prompts > decoding:
            return self.most  # more requests wait for their first token than for their next one
        base = self._decode_seconds(decoding)
        if not base or not (self.prompt_only or self.added):
            return min(self.most, UNKNOWN)
        target = self.target or GAP * base
        wanted = LEAST
        for size in self.sizes:
            if base + self._added_seconds(size) <= target:
                wanted = size
        if self.target is None:
            wanted = max(wanted, self._least_delay(base, waiting))
        return self._aligned(min(self.most, wanted), decoding)

    @staticmethod
    def _aligned(wanted: int, decoding: int) -> int:
        """Slightly less where that makes the step a multiple of BLOCK tokens, to which captured
        steps are padded."""
        whole = (wanted + decoding) // BLOCK * BLOCK - decoding
        return whole if 8 * whole >= 7 * wanted else wanted

    def _least_delay(self, base: float, waiting: int) -> int:
        """The fewest tokens a step with which `waiting` tokens stay within their allowed delay."""
        longest = 1 + (DELAY - 1) * min(1.0, self.most / (4 * waiting))
        waiting = min(waiting, self.most)
        usual = _seconds((self.prompt_only,), waiting) or self._added_seconds(waiting)
        tried = max(self.added, default=0)
        for size in self.sizes:
            if (base + self._added_seconds(size)) / size <= longest * usual / waiting:
                return size
            if _bucket(size) > tried:
                return size  # larger sizes are not measured yet: try this one first
        return self.most

    def _decode_seconds(self, decoding: int) -> float:
        """Of a decode-only step, from the nearest measured batch bucket; 0 before any was
        measured."""
        found = self.decode.get(_bucket(decoding))
        if found is None:
            near = min(self.decode, key=lambda b: abs(b - _bucket(decoding)), default=None)
            found = None if near is None else self.decode[near]
        return found.seconds if found else 0.0

    def _added_seconds(self, tokens: int) -> float:
        """What prompt tokens add to a step; a prompt-only step costs at least as much."""
        return _seconds((self.added, self.prompt_only), tokens)


def chunk_controller(itl_ms: str, most: int) -> ChunkController | None:
    """For an engine with this itl_ms, whose steps have at most `most` tokens; None where prompts
    get all of them. Raises ConfigError."""
    target = itl_target(itl_ms)
    return None if itl_ms == OFF else ChunkController(most, target)


def itl_target(itl_ms: str) -> float | None:
    """Seconds of a step, where itl_ms names them. Raises ConfigError."""
    if itl_ms in (OFF, AUTO):
        return None
    try:
        given = float(itl_ms)
    except (TypeError, ValueError):
        given = -1.0
    if not 0 < given <= MAX_STEP_MS:
        raise ConfigError(
            f"itl_ms={itl_ms!r}; accepted: {OFF}, {AUTO}, or milliseconds up to {MAX_STEP_MS:g}"
        )
    return given / 1000


def _seconds(tables: tuple[dict[int, MeanSeconds], ...], tokens: int) -> float:
    """Seconds of `tokens` tokens: as measured, else from the per-token cost of a smaller bucket, an
    upper bound, as larger chunks cost less a token. Where only larger buckets are measured, from
    theirs: too low, but soon measured. 0 before any measurement."""
    bucket = _bucket(tokens)
    fewer = []
    more = []
    for costs in tables:
        below = max((known for known in costs if known <= bucket), default=None)
        above = min((known for known in costs if known > bucket), default=None)
        if below is not None:
            fewer.append(tokens * costs[below].seconds)
            if below == bucket:
                break
        elif above is not None:
            more.append(tokens * costs[above].seconds)
    return min(fewer) if fewer else max(more, default=0.0)


def _bucket(count: int) -> int:
    """Buckets end at powers of two."""
    return (count - 1).bit_length()


def _sizes(most: int) -> tuple[int, ...]:
    """Four sizes per doubling, from LEAST on."""
    found = []
    base = LEAST
    while base < most:
        found += [base * quarter // 4 for quarter in range(4, 8)]
        base *= 2
    return (*(size for size in sorted(found) if size < most), most)
