"""Limits of compiling untrusted grammars."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rorqual.config.option import MOST_SECONDS, check_options, option

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
        least=1,
    )
    regex: int = _grammar(
        4_096, "Characters of a regular expression.", flags=("--max-regex-size",), least=1
    )
    seconds: float = _grammar(
        10.0,
        "Processor seconds to compile one.",
        flags=("--grammar-seconds",),
        above=0,
        most=MOST_SECONDS,
    )
    quick: float = _grammar(
        0.5,
        "Processor seconds of a first try; what takes longer waits for a process of its own.",
        flags=("--grammar-quick-seconds",),
        above=0,
        most=MOST_SECONDS,
    )
    waiting: int = _grammar(
        256,
        "Grammars that may wait for their first try; beyond, 429.",
        flags=("--max-grammars-waiting",),
        least=1,
    )
    slow_waiting: int = _grammar(
        16,
        "Grammars that may wait for their second; beyond, 429.",
        flags=("--max-slow-grammars-waiting",),
        least=1,
    )
    memory_mib: int = _grammar(
        1024, "MiB to compile one.", flags=("--grammar-memory",), least=1, most=1 << 24
    )
    compiled: int = 64 << 20
    kept: int = 128
    kept_size: int = 64 << 20
    in_use: int = 512 << 20
    short: float = 0.1

    def __post_init__(self) -> None:
        check_options(self)
