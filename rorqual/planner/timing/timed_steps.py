"""Steps of whole engines timed by `rorqual bench steps`, and their file. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rorqual.errors import ConfigError
from rorqual.planner.costs.costs import BatchShape, GroupWork

BUDGET = 8192  # tokens of a step; prompts fill it


class StepMeasurement(NamedTuple):
    """ms: of the step, or of all steps of a prompt. context: mean tokens of a decoding request,
    half way through."""

    ms: float
    context: float


@dataclass(frozen=True)
class TimedStep:
    """One step: `requests` decode with `context` tokens each, `prompts` of `prompt` tokens are
    computed. layers: of a model cut to so many."""

    model: str
    quant: str
    layers: int | None
    requests: int
    context: int
    prompts: int
    prompt: int

    @property
    def name(self) -> str:
        kind = "" if self.quant == "auto" else f" {self.quant}"
        cut = f" {self.layers} layers" if self.layers else ""
        decode = f" decode {self.requests} x {self.context}" if self.requests else ""
        prompts = f" prompt {self.prompts} x {self.prompt}" if self.prompts else ""
        return f"{self.model}{kind}{cut}{decode}{prompts}"

    @property
    def kind(self) -> str:
        if not self.prompts:
            return "decode"
        return "mixed" if self.requests else "prompts"

    @property
    def engine(self) -> tuple[str, str, int | None]:
        return self.model, self.quant, self.layers

    def works(self, context: float | None = None) -> list[GroupWork]:
        """What is computed, step by step. context: as it was, not as asked for."""
        tokens = round(context or self.context)
        decode = BatchShape.decode(self.requests, tokens) if self.requests else None
        if not self.prompts:
            return [GroupWork(decode)]
        starts = range(0, self.prompt, BUDGET)
        chunks = [(start, min(BUDGET, self.prompt - start)) for start in starts]
        return [
            GroupWork(decode, (BatchShape(self.prompts, new, cached),)) for cached, new in chunks
        ]


def read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        meta = data["meta"]
        for name in ("device", "conditions", "commit", "date", "command", "rates", "left_out"):
            meta[name]
        rows_of(data)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is no file of rorqual bench steps: {error!r}") from None
    return data


def rows_of(data: Mapping[str, Any]) -> dict[TimedStep, StepMeasurement]:
    return {TimedStep(*row[:7]): StepMeasurement(row[7], row[8]) for row in data["rows"]}
