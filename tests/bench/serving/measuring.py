"""One row of figures from the fake server, as the tests ask for it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from fake_process import Fake

from rorqual.bench.serving.client import Client, ServerTarget
from rorqual.bench.serving.load import ArrivalLoad
from rorqual.bench.serving.measure import Data, Method, ServingBench
from rorqual.bench.serving.prompts import PromptLengths, Vocabulary
from rorqual.models.hub import BUNDLED

Figures = dict[str, Any]
ATTEMPTS = 5


def steady(test: Callable[..., None]) -> Callable[..., None]:
    """For assertions about milliseconds: other work on the machine may spoil an attempt, a wrong
    measurement spoils all of them."""

    @functools.wraps(test)
    def tried(*arguments: Any, **named: Any) -> None:
        for attempt in range(ATTEMPTS):
            try:
                return test(*arguments, **named)
            except AssertionError:
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(0.3 * (attempt + 1))

    return tried


def new_mark() -> str:
    """A word that no other measurement sends."""
    return f"mark {time.perf_counter_ns()}"


def measure(
    fake: Fake,
    how: Mapping[str, Any],
    mark: str = "",
    load: ArrivalLoad | None = None,
    method: Method | None = None,
    data: Data | None = None,
    **target: Any,
) -> Figures:
    """One row; `how` is the fake's behaviour."""
    asked = ServerTarget(
        fake.url,
        model="fake",
        extra_body={"fake": dict(how), "mark": mark},
        keep_text=True,
        **target,
    )
    data = data or Data(lengths=PromptLengths(12, 8), num_prompts=6)

    async def once() -> Figures:
        async with Client(asked) as client:
            bench = ServingBench(
                client,
                Vocabulary(BUNDLED, asked.chat),
                data,
                method or Method(warm_ups=0, details=True),
            )
            return await bench.measure(load or ArrivalLoad(concurrency=3))

    return asyncio.run(once())
