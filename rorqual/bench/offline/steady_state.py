"""A moment at which a measurement can begin: every request is decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rorqual.engine.engine import Engine
from rorqual.errors import ConfigError
from rorqual.request import Request, SamplingParams


def enough_tokens(engine: Engine, prompts: Sequence[Sequence[int]], steps: int) -> int:
    """So many that the first request still decodes `steps` steps after the last prompt is
    through, as far as the model's length allows."""
    waiting = sum(map(len, prompts)) // engine.worker.batched_tokens
    longest = max(map(len, prompts))
    return min(
        (waiting + steps) * (engine.config.num_speculative_tokens + 1),
        engine.max_model_len - longest,
    )


@contextmanager
def steady_state_steps(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[int]:
    """The engine with all prompts decoding; yields how many. Afterwards nothing of them is left.
    Raises ConfigError where the first ends before the last has begun."""
    names = [f"together-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(Request(name, tuple(prompt), params))
    while len(engine.scheduler.decoding) < len(names) or engine.scheduler.prefilling:
        if not engine.has_work:
            problem = (
                f"{len(names)} requests never decode together within {params.max_tokens} tokens"
            )
            raise ConfigError(f"{problem}; accepted: a longer --output-len")
        engine.step()
    yield len(names)
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
