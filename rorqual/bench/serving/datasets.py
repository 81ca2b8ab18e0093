"""Prompts of `bench serve` that come from files: conversations in ShareGPT's format, and traces
of arrivals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rorqual.bench.serving.prompts import Ids, Prompt, Vocabulary
from rorqual.errors import ConfigError

LEAST = 4  # tokens of prompt and answer; the bounds are those of the field's common scripts
MAX_INPUT_TOKENS = 1024
MAX_TOTAL_TOKENS = 2048


def sharegpt_prompts(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    path: Path,
    count: int | None,
    output_len: int | None = None,
) -> list[Prompt]:
    """The first two turns of conversations, in shuffled order: the first is the prompt, the
    second's length the output length unless `output_len` says otherwise. Pairs below 4 tokens,
    above 1024 of prompt or 2048 in all are left out."""
    pairs = [pair for item in _conversations(path) if (pair := _first_two(item))]
    found: list[Prompt] = []
    for index in rng.permutation(len(pairs)):
        if count is not None and len(found) == count:
            break
        question, answer = pairs[index]
        length = vocabulary.count(question)
        out = output_len or vocabulary.count(answer) - vocabulary.specials
        if (
            min(length, out) >= LEAST
            and length <= MAX_INPUT_TOKENS
            and length + out <= MAX_TOTAL_TOKENS
        ):
            found.append(Prompt(question, length, out))
    if not found:
        raise ConfigError(
            f"{path}: none of its {len(pairs)} conversations of two turns has a usable "
            "length (4 to 1024 tokens, 2048 in all)"
        )
    return found


def _conversations(path: Path) -> Iterator[Any]:
    """A JSON list, or one JSON object a line."""
    text = _read(path)
    try:
        yield from (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is neither a JSON list of conversations nor one a line: {error}"
        ) from None


def _first_two(item: Any) -> tuple[str, str] | None:
    turns = (
        (item.get("conversations") or item.get("conversation") or [])
        if isinstance(item, dict)
        else []
    )
    texts = [turn.get("value", turn.get("content")) for turn in turns[:2] if isinstance(turn, dict)]
    return (
        (str(texts[0]), str(texts[1]))
        if len(texts) == 2 and all(isinstance(text, str) for text in texts)
        else None
    )


@dataclass(frozen=True)
class Trace:
    """A JSONL file with a line a request: timestamp (ms), input_length, output_length and,
    optionally, hash_ids: the prompt's blocks of `block` tokens, equal ids meaning equal tokens
    (Mooncake's format, block 512). `speed` 2 replays it twice as fast."""

    path: Path
    block: int = 512
    speed: float = 1.0

    def __post_init__(self) -> None:
        if self.block < 1 or self.speed <= 0:
            raise ConfigError(f"trace block={self.block}, speed={self.speed}; both must be above 0")


def trace_prompts(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    trace: Trace,
    seed: int,
    count: int | None = None,
) -> list[Prompt]:
    """Sorted by arrival, the first at 0 s. Blocks depend only on `seed` and their id; tokens
    without an id are random."""
    lines = [(i, line) for i, line in enumerate(_read(trace.path).splitlines(), 1) if line.strip()]
    rows = sorted(
        (_row(trace, number, line) for number, line in lines), key=lambda row: row["timestamp"]
    )[:count]
    if not rows:
        raise ConfigError(f"{trace.path} holds no requests")
    start = rows[0]["timestamp"]
    return [
        _replayed(vocabulary, rng, trace, seed, row, (row["timestamp"] - start) / 1e3 / trace.speed)
        for row in rows
    ]


def _row(trace: Trace, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        lengths = [int(row["input_length"]), int(row["output_length"])]
        ids = [int(i) for i in row.get("hash_ids") or []]
        wrong = (
            min(lengths) < 1
            or len(ids) * trace.block >= lengths[0] + trace.block
            or float(row["timestamp"]) < 0
            or min(ids, default=0) < 0
        )
    except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{trace.path}, line {number}: {type(error).__name__} {error}; needed: "
            "timestamp, input_length, output_length"
        ) from None
    if wrong:
        raise ConfigError(
            f"{trace.path}, line {number}: lengths must be at least 1, times 0, and "
            f"hash_ids cover the prompt in blocks of {trace.block}"
        )
    return {"timestamp": float(row["timestamp"]), "lengths": (lengths[0], lengths[1]), "ids": ids}


def _replayed(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    trace: Trace,
    seed: int,
    row: dict[str, Any],
    at: float,
) -> Prompt:
    room = row["lengths"][0] - (vocabulary.specials if vocabulary.as_text else 0)
    blocks = [_block(vocabulary, seed, i, trace.block) for i in row["ids"]]
    prefix = np.concatenate(blocks)[: max(0, room)] if blocks else None
    return vocabulary.prompt(rng, row["lengths"], prefix, at)


def _block(vocabulary: Vocabulary, seed: int, block_id: int, size: int) -> Ids:
    return vocabulary.draw(np.random.default_rng([seed, block_id]), size)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
