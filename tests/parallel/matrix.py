"""Valid combinations of parallel sizes for 2 and 4 ranks, and a choice of them in which every
pair of settings occurs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from rorqual.config.model import ModelConfig
from rorqual.config.parallel import EXCHANGES, ParallelConfig, check_parallel
from rorqual.errors import ConfigError
from rorqual.parallel.exchange_policy import chosen_exchange

Case = dict[str, Any]
RANGES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "dp": (1, 2, 4),
    "pp": (1, 2, 4),
    "ep": (1, 2, 4),
    "dense_tp": (1, 2, 4),
    "vocabulary_tp": (1, 2, 4),
    "exchange": EXCHANGES,
    "sequence_parallel": (False, True),
    "micro_batches": (1, 2),
}


def sizes_of(case: Case) -> Case:
    """Arguments of ParallelConfig."""
    rest = {name: value for name, value in case.items() if name != "vocabulary_tp"}
    return {**rest, "embed_tp": case["vocabulary_tp"], "head_tp": case["vocabulary_tp"]}


def valid(config: ModelConfig, world: int) -> Iterator[Case]:
    """Every combination that is accepted, without those that only name what `auto` or no
    sequence parallelism give as well."""
    for values in product(*RANGES.values()):
        case = dict(zip(RANGES, values, strict=True))
        if case["tp"] * case["dp"] * case["pp"] != world or (
            case["sequence_parallel"] and case["tp"] == 1
        ):
            continue
        try:
            sizes = ParallelConfig(**sizes_of(case))
            check_parallel(config, sizes)
        except ConfigError:
            continue
        by_itself = chosen_exchange(replace(sizes, exchange="auto"), config.moe, 1, False)
        if case["exchange"] == "auto" or case["exchange"] != by_itself:
            yield case


def pairs(case: Case) -> set[tuple[Any, ...]]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}


def pairwise(cases: list[Case]) -> list[Case]:
    """Greedy: the case with most pairs not seen yet, until every pair that occurs in `cases` has
    been seen."""
    pairs_of = [pairs(case) for case in cases]
    missing = set().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs_of[i] & missing))
        chosen.append(cases[best])
        missing -= pairs_of[best]
    return chosen


def name_of(case: Case) -> str:
    short = {"dense_tp": "dense", "vocabulary_tp": "vocab", "micro_batches": "mb"}
    parts = [
        f"{short.get(name, name)}{value}"
        for name, value in case.items()
        if name not in ("exchange", "sequence_parallel")
    ]
    return "-".join([*parts, case["exchange"], *(["sp"] if case["sequence_parallel"] else [])])
