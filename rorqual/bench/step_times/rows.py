"""The steps of whole engines to time: some from which `calibrate --full` derives the time between
the kernels, and others to validate predictions. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from rorqual.planner.timing.timed_steps import TimedStep

CHUNK = 2048  # tokens of the prompt in a mixed step

Engine = tuple[str, str, int | None]  # model, weights, layers (None: all)
ENGINES: tuple[Engine, ...] = (
    ("qwen3-30b-a3b", "auto", None),
    ("deepseek-v2-lite", "auto", None),
    ("deepseek-v3", "auto", 8),
    ("qwen3-30b-a3b", "fp8", None),
    ("qwen3-30b-a3b", "w4a16", None),
    ("deepseek-v2-lite", "w4a16", None),
)

# (requests that decode, their tokens, requests with prompts, tokens of each). A prompt longer than
# the budget takes several steps, which are timed together; prompts that do not fill it are computed
# one step at a time, launch included.
LEARNT = (
    (1, 1024, 0, 0),
    (4, 1024, 0, 0),
    (8, 1024, 0, 0),
    (32, 1024, 0, 0),
    (128, 1024, 0, 0),
    (256, 1024, 0, 0),
    (0, 0, 1, 1024),
    (0, 0, 8, 1024),
    (32, 1024, 1, CHUNK),
)
JUDGED = (
    (1, 6000, 0, 0),
    (1, 30000, 0, 0),
    (3, 1500, 0, 0),
    (3, 20000, 0, 0),
    (12, 3000, 0, 0),
    (12, 16000, 0, 0),
    (48, 2000, 0, 0),
    (100, 1500, 0, 0),
    (200, 1200, 0, 0),
    (250, 1500, 0, 0),
    (0, 0, 16, 512),
    (0, 0, 4, 2048),
    (0, 0, 1, 16384),
    (12, 3000, 1, CHUNK),
    (100, 1500, 1, CHUNK),
)


def steps(learnt: bool) -> list[TimedStep]:
    """Engine by engine, those with few tokens first."""
    return [
        TimedStep(*engine, *row) for engine in ENGINES for row in (LEARNT if learnt else JUDGED)
    ]


def by_engine(wanted: list[TimedStep]) -> Iterator[tuple[Engine, list[TimedStep]]]:
    for engine in ENGINES:
        found = [step for step in wanted if step.engine == engine]
        if found:
            yield engine, found


def asked(name: str, only: str | None) -> bool:
    """Whether a row of that name is among `only`, comma-separated parts of names; None: all are."""
    return only is None or any(word in name for word in only.split(",") if word)
