"""What an offline benchmark runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rorqual.config.option import option
from rorqual.errors import ConfigError
from rorqual.request import SamplingParams

MAX_STEPS = 200  # engine/step_trace.py's
TRACE_SUFFIX = ".json.gz"


@dataclass
class OfflineWork:
    """What every concurrency runs: `groups` batches of different prompts one after the other,
    all sampled at `temperature`. Prompts are random ids, or pieces of the text file `data`.
    profile: where traces of decode steps are written afterwards, profile_steps of each
    concurrency; on a GPU their kernels are listed too."""

    prompt: int = option(128, "Tokens of a prompt.", flags=("--prompt-len",))
    output: int = option(128, "Tokens of an answer.", flags=("--output-len",))
    repeats: int = option(3, "Medians are taken over this many runs.")
    data: Path | None = option(None, "A text file to take prompts from; random tokens if left out.")
    groups: int = option(1, "Batches of different prompts, one after the other.")
    temperature: float = option(0.0, "0 is greedy.")
    profile: Path | None = option(
        None,
        "A folder, or a file .json.gz: a trace of decode steps for Perfetto; on a GPU also a table "
        "of time by kernel and waits between them.",
    )
    profile_steps: int = option(16, "Decode steps of a profile.")
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
        if not 1 <= self.profile_steps <= MAX_STEPS:
            raise ConfigError(
                f"profile_steps={self.profile_steps} is out of range; accepted: 1 to {MAX_STEPS}"
            )
        if self.profile is not None and self.profile.name.isdecimal():
            raise ConfigError(
                f"profile={str(self.profile)!r} is a folder or a file; --profile-steps says how "
                "many steps"
            )

    def trace_prefix(self, batch: int, drafts: int, alone: bool) -> str:
        """What the files of one concurrency begin with. alone: it is the only one."""
        assert self.profile is not None
        path = str(self.profile)
        named = path.endswith(TRACE_SUFFIX)
        if named and alone:
            return path.removesuffix(TRACE_SUFFIX)
        what = f"batch{batch}" + (f"-drafts{drafts}" if drafts else "")
        return f"{path.removesuffix(TRACE_SUFFIX)}-{what}" if named else f"{path}/{what}"

    def sampling(self, tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
