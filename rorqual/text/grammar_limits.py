"""What compiling a stranger's grammar may take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rorqual.config.option import option

_grammar = partial(option, group="Structured output")


@dataclass(frozen=True)
class GrammarLimits:
    """compiled: characters of the compiled form; kept: compiled grammars kept for reuse."""

    size: int = _grammar(
        65_536,
        "Characters of a schema, grammar or list of choices.",
        flags=("--max-grammar-size",),
    )
    regex: int = _grammar(4_096, "Characters of a regular expression.", flags=("--max-regex-size",))
    seconds: float = _grammar(
        10.0, "Processor seconds to compile one.", flags=("--grammar-seconds",)
    )
    memory_mib: int = _grammar(1024, "MiB to compile one.", flags=("--grammar-memory",))
    compiled: int = 64 << 20
    kept: int = 128
