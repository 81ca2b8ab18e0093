"""What an offline benchmark runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rorqual.config.option import check_options, option
from rorqual.errors import ConfigError
from rorqual.request import SamplingParams

MAX_STEPS = 200  # engine/step_trace.py's
TRACE_SUFFIX = ".json.gz"


@dataclass
class OfflineWork:
    """What every concurrency runs: `groups` batches of different prompts one after the other,
    all sampled at `temperature`. Prompts are random ids, or pieces of the text file `data`, whose
    `text` is read here. profile: where traces of decode steps are written afterwards, profile_steps
    of each concurrency; on a GPU their kernels are listed too."""

    prompt: int = option(128, "Tokens of a prompt.", flags=("--prompt-len",), at_least_one=True)
    output: int = option(128, "Tokens of an answer.", flags=("--output-len",), at_least_one=True)
    repeats: int = option(3, "Medians are taken over this many runs.", at_least_one=True)
    data: Path | None = option(
        None,
        "A text file to take prompts from, long enough for them all; random tokens if left out.",
    )
    groups: int = option(1, "Batches of different prompts, one after the other.", at_least_one=True)
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

    text: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        if not 1 <= self.profile_steps <= MAX_STEPS:
            raise ConfigError(
                f"profile_steps={self.profile_steps} is out of range; accepted: 1 to {MAX_STEPS}"
            )
        if self.profile is not None and self.profile.name.isdecimal():
            raise ConfigError(
                f"profile={str(self.profile)!r} is a folder or a file; --profile-steps says how "
                "many steps"
            )
        if self.data is not None:
            self.text = _read(self.data)

    def pieces(self, ids: Sequence[int], count: int, page: int) -> list[list[int]]:
        """As many prompts from the tokens of the text, none of which overlap. Raises ConfigError
        where it is too short for that, or repeats itself: a later prompt would find the first page,
        of `page` tokens, of an earlier one in the prefix cache."""
        length = self.prompt
        needed = count * length
        if len(ids) < needed:
            raise ConfigError(
                f"data={str(self.data)!r} holds {len(ids):,} tokens; accepted: at least "
                f"{needed:,}, for {count:,} different prompts of {length:,}"
            )
        stride = max(length, (len(ids) - length) // count)
        found = [list(ids[i * stride : i * stride + length]) for i in range(count)]
        if length > page and len({tuple(piece[:page]) for piece in found}) < count:
            raise ConfigError(
                f"data={str(self.data)!r} repeats itself: of {count:,} prompts of {length:,} "
                f"tokens some begin with the same {page}; accepted: a text without repetitions"
            )
        return found

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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise ConfigError(f"data={str(path)!r} cannot be read as text: {reason}") from None
