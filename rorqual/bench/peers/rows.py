"""Rows of the comparison: what is asked of both servers, by a name that says it."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rorqual.errors import ConfigError

if TYPE_CHECKING:  # every command line imports this module, and few need numpy
    from rorqual.bench.serving.load import ArrivalLoad
    from rorqual.bench.serving.measure import Data

DEFAULT_ROWS = "1000/1000@1,8,64,256 8000/1000@1,8,64 prefix@64 poisson@70"
ACCEPTED = (
    "IN/OUT@CONCURRENCY, such as 1000/1000@1,8,64; prefix@64 or prefix:IN/OUT@64; poisson@70 or "
    "poisson:IN/OUT@70 (percent of the peer's highest rate in closed rows of these lengths)"
)
WORD = re.compile(r"(?:(prefix|poisson)(?::(\d+)/(\d+))?|(\d+)/(\d+))@([\d,]+)")
LENGTHS = {"prefix": (200, 300), "poisson": (1000, 1000)}  # where a name has none
LONG_PROMPT = 4000  # tokens above which a row is one of long prompts
GROUPS = 8  # of requests that share a prefix
PREFIX_TOKENS = 4000


@dataclass(frozen=True)
class Row:
    """kind: closed, prefix or poisson; count: the concurrency, or the percentage of the rate."""

    kind: str
    input_len: int
    output_len: int
    count: int

    @property
    def name(self) -> str:
        lengths = f"{self.input_len}/{self.output_len}"
        if LENGTHS.get(self.kind) == self.lengths:
            return f"{self.kind}@{self.count}"
        return f"{'' if self.kind == 'closed' else self.kind + ':'}{lengths}@{self.count}"

    @property
    def lengths(self) -> tuple[int, int]:
        return self.input_len, self.output_len

    @property
    def concurrency(self) -> int | None:
        return None if self.kind == "poisson" else self.count

    @property
    def prefix_cache(self) -> bool:
        return self.kind == "prefix"

    @property
    def must(self) -> float | None:
        """Least ratio of output tokens/s, ours over the peer's; at a rate there is none."""
        if self.kind == "poisson":
            return None
        return 1.05 if self.kind == "prefix" or self.input_len > LONG_PROMPT else 1.1

    @property
    def seed(self) -> int:
        """Rows of one server share no prompt."""
        return zlib.crc32(self.name.encode())

    def requests(self, waves: int | None, rate: float | None, seconds: float) -> int:
        if rate is not None:
            return max(1, round(rate * seconds))
        least = 3 if self.count < 64 else 2 if self.count < 512 else 1
        return self.count * (waves or least)

    def load(self, rate: float | None, seconds: float) -> ArrivalLoad:
        from rorqual.bench.serving.load import ArrivalLoad

        if rate is not None:
            return ArrivalLoad(rate=rate)
        return ArrivalLoad(self.concurrency, send_seconds=seconds)

    def data(self, requests: int, output_len: int | None = None) -> Data:
        from rorqual.bench.serving.measure import Data
        from rorqual.bench.serving.prompts import PrefixGroups, PromptLengths

        lengths = PromptLengths(self.input_len, output_len or self.output_len)
        if self.kind != "prefix":
            return Data(lengths=lengths, num_prompts=requests)
        each = max(1, -(-requests // GROUPS))
        groups = PrefixGroups(GROUPS, each, PREFIX_TOKENS)
        return Data("shared-prefix", lengths, num_prompts=requests, groups=groups)


def parse_rows(text: str) -> list[Row]:
    rows = [row for word in text.split() for row in _rows(word)]
    if not rows:
        raise ConfigError(f"no rows; accepted: {ACCEPTED}")
    # the rate is the peer's highest, known from its closed-loop rows
    return sorted(dict.fromkeys(rows), key=lambda row: row.kind == "poisson")


def _rows(word: str) -> list[Row]:
    match = WORD.fullmatch(word)
    counts = [int(part) for part in match[6].split(",") if part] if match else []
    if match is None or not counts:
        raise ConfigError(f"row {word!r}; accepted: {ACCEPTED}")
    kind = match[1] or "closed"
    given = (match[2], match[3]) if match[1] else (match[4], match[5])
    lengths = LENGTHS[kind] if given[0] is None else (int(given[0]), int(given[1]))
    if min(counts) < 1 or lengths[0] < 1 or lengths[1] < 2:
        raise ConfigError(f"row {word!r}: at least 1 token in, 2 out, and 1 after the @")
    return [Row(kind, *lengths, count) for count in counts]
