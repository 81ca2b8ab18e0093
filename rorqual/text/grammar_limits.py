"""Limits of compiling untrusted grammars."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rorqual.config.option import check_positive, option
from rorqual.errors import ConfigError

_grammar = partial(option, group="Structured output")


@dataclass(frozen=True)
class GrammarLimits:
    """compiled: characters of the compiled form; kept: compiled grammars kept for reuse, and
    kept_size: characters of all of these; in_use: of those that open requests also hold; short:
    processor seconds of a short first try, where one client has several waiting."""

    size: int = _grammar(
        65_536,
        "Characters of a schema, grammar or list of choices.",
        flags=("--max-grammar-size",),
    )
    regex: int = _grammar(4_096, "Characters of a regular expression.", flags=("--max-regex-size",))
    seconds: float = _grammar(
        10.0, "Processor seconds to compile one.", flags=("--grammar-seconds",)
    )
    quick: float = _grammar(
        0.5,
        "Processor seconds of a first try; what takes longer waits for a process of its own.",
        flags=("--grammar-quick-seconds",),
    )
    waiting: int = _grammar(
        256,
        "Grammars that may wait for their first try; beyond, 429.",
        flags=("--max-grammars-waiting",),
    )
    slow_waiting: int = _grammar(
        16,
        "Grammars that may wait for their second; beyond, 429.",
        flags=("--max-slow-grammars-waiting",),
    )
    memory_mib: int = _grammar(1024, "MiB to compile one.", flags=("--grammar-memory",))
    compiled: int = 64 << 20
    kept: int = 128
    kept_size: int = 64 << 20
    in_use: int = 512 << 20
    short: float = 0.1

    def __post_init__(self) -> None:
        for name in ("quick", "seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is out of range; accepted: more than 0 seconds"
                )
        for name in ("waiting", "slow_waiting"):
            check_positive(name, getattr(self, name))
