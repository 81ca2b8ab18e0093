"""How many tokens of prompts a step takes beside requests that decode. No torch.

Every stream waits for a step as long as its prompts take, and a prompt of which little is taken a
step comes late. What a step costs is measured, not modelled: by number of decoding requests, and
what prompts add by how many tokens they bring.

With a target, a step takes as many prompt tokens as keep it within that. Without one, steps stay
within GAP steps of decoding alone, unless what waits would then take much longer than with nothing
beside: DELAY times as long where it fits into a quarter of a full step, a little longer where it
fills several. Where more prompts wait than requests decode nothing is held back. So a prompt now
and then disturbs nobody, and a burst is worked off.
"""

from __future__ import annotations

from rorqual.engine.scheduling.sequence import PendingLoad

GAP = 3.0
DELAY = 2.0
LEAST = 16  # tokens: prompts go on whatever decoding costs
BLOCK = 64  # tokens
UNKNOWN = 256  # tokens, before anything was measured
WEIGHT = 0.2  # of a new step in a running mean
DISTURBED = 3.0  # times the mean: a step that took longer counts as that


class MeanSeconds:
    """Running mean of steps alike. It follows the newest ones, and one disturbed step moves it
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
    """`budget` before each step, `observe` after it. most: tokens of a step; target: seconds of a
    step that decodes, None for GAP steps of decoding alone."""

    def __init__(self, most: int, target: float | None = None):
        self.most = most
        self.target = target
        self.decode: dict[int, MeanSeconds] = {}  # by bucket of decoding requests
        self.alone: dict[int, MeanSeconds] = {}  # by bucket of prompt tokens, a token
        self.added: dict[int, MeanSeconds] = {}  # likewise, beside decoding requests
        self.sizes = _sizes(most)

    def observe(self, decoding: int, prompt_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if not prompt_tokens:
            self.decode.setdefault(_bucket(decoding), MeanSeconds()).add(seconds)
            return
        if not decoding:
            costs = self.alone
        else:
            costs = self.added
            seconds = max(0.0, seconds - self._decode_seconds(decoding))
        costs.setdefault(_bucket(prompt_tokens), MeanSeconds()).add(seconds / prompt_tokens)

    def budget(self, load: PendingLoad) -> int:
        """Prompt tokens of the next step."""
        decoding = load.decoding
        waiting = load.tokens
        if not decoding or not waiting:
            return self.most
        if self.target is None and load.prompts > decoding:
            return self.most  # more wait for a first token than for their next one
        base = self._decode_seconds(decoding)
        if not base or not (self.alone or self.added):
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
        """A little less, where a step is then a multiple of BLOCK tokens: captured steps are padded
        to one."""
        whole = (wanted + decoding) // BLOCK * BLOCK - decoding
        return whole if 8 * whole >= 7 * wanted else wanted

    def _least_delay(self, base: float, waiting: int) -> int:
        """The fewest tokens a step with which `waiting` of them take no longer than they may."""
        longest = 1 + (DELAY - 1) * min(1.0, self.most / (4 * waiting))
        waiting = min(waiting, self.most)
        usual = _seconds((self.alone,), waiting) or self._added_seconds(waiting)
        tried = max(self.added, default=0)
        for size in self.sizes:
            if (base + self._added_seconds(size)) / size <= longest * usual / waiting:
                return size
            if _bucket(size) > tried:
                return size  # what more would cost is only a guess: go on from here
        return self.most

    def _decode_seconds(self, decoding: int) -> float:
        """Of a step of decoding alone; 0 where none was seen. Larger batches take longer."""
        found = self.decode.get(_bucket(decoding))
        if found is None:
            near = min(self.decode, key=lambda b: abs(b - _bucket(decoding)), default=None)
            found = None if near is None else self.decode[near]
        return found.seconds if found else 0.0

    def _added_seconds(self, tokens: int) -> float:
        """Alone they take no less."""
        return _seconds((self.added, self.alone), tokens)


def _seconds(tables: tuple[dict[int, MeanSeconds], ...], tokens: int) -> float:
    """What so many tokens take: as measured, else what one among fewer costs so many times, as a
    token costs less the more there are. Where only more are known, what one among them costs: too
    little, but soon measured. 0 where nothing is known."""
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
    """Counts share a bucket up to a power of two."""
    return (count - 1).bit_length()


def _sizes(most: int) -> tuple[int, ...]:
    """Four in each doubling, from LEAST on."""
    found = []
    base = LEAST
    while base < most:
        found += [base * quarter // 4 for quarter in range(4, 8)]
        base *= 2
    return (*(size for size in sorted(found) if size < most), most)
