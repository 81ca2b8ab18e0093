"""What an offline benchmark runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rorqual.config.option import option
from rorqual.errors import ConfigError
from rorqual.request import SamplingParams


@dataclass
class OfflineWork:
    """What every concurrency runs: `groups` batches of different prompts one after the other,
    all sampled at `temperature`. Prompts are random ids, or pieces of the text file `data`.
    profiled: so many decode steps are looked at in a profiler afterwards."""

    prompt: int = option(128, "Tokens of a prompt.", flags=("--prompt-len",))
    output: int = option(128, "Tokens of an answer.", flags=("--output-len",))
    repeats: int = option(3, "Medians are taken over this many runs.")
    data: Path | None = option(None, "A text file to take prompts from; random tokens if left out.")
    groups: int = option(1, "Batches of different prompts, one after the other.")
    temperature: float = option(0.0, "0 is greedy.")
    profiled: int = option(
        0,
        "Decode steps to look at in a profiler: time by kernel, waits between them.",
        flags=("--profile",),
    )
    expert_load: Path | None = option(
        None,
        "Write how often each expert was picked to this file (JSON, `logical_count` [layers, "
        "experts]); with --single-rank-bench pick them as often as it says instead.",
    )
    rank: str | None = option(
        None,
        "With --single-rank-bench and --expert-load: time the rank with most to do in each layer "
        "(hottest), or the one nearest to the mean (mean).",
    )

    def __post_init__(self) -> None:
        if self.profiled < 0:
            raise ConfigError(f"profile={self.profiled} is out of range; accepted: at least 0")

    def sampling(self, tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
